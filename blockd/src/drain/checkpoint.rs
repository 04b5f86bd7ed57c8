//! Folds the tail into the map and the blob table.
//!
//! Due when the tail is long, by blobs, bytes or extents: the next host reads the footers of all of
//! it, and all its extents are in memory here. A checkpoint writes the leaves that the tail touches
//! and the path above them into map objects, settles the accounts of live bytes, writes the changed
//! pages of the blob table behind them, and moves the head to both roots with an empty tail, in one
//! swap. Until that swap, what was written is garbage of this epoch and nothing else.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use s3_backend::{ObjectStore, Store};

use super::{Drain, Names, lost};
use crate::blob_table::{BlobTable, ObjectKind, TableEntry};
use crate::error::Result;
use crate::failpoint;
use crate::geometry::{BLOCK_BYTES, to_u64};
use crate::head::{Head, Stored};
use crate::ids::{Generation, ObjectRef};
use crate::map::{self, Change, MAP_OBJECT_BYTES, MapObjectWriter, MapSink, Pages, Walk};
use crate::objects::{Refused, store_error};

/// Extents of the overlay at which a checkpoint is due: some 6 MiB of memory.
const OVERLAY_EXTENTS_MAX: usize = 65_536;

/// When a checkpoint is due.
#[derive(Debug, Clone, Copy)]
pub struct CheckpointPolicy {
    /// Blobs in the tail.
    pub tail_blobs_max: usize,
    /// Their bytes.
    pub tail_bytes_max: u64,
}

impl CheckpointPolicy {
    fn is_due(&self, head: &Head, overlay_extents: usize) -> bool {
        let bytes: u64 = head.tail.iter().map(|entry| entry.bytes).sum();
        head.tail.len() >= self.tail_blobs_max
            || bytes >= self.tail_bytes_max
            || overlay_extents >= OVERLAY_EXTENTS_MAX
    }
}

/// The blob table in memory, read when it is first needed.
#[derive(Debug, Default)]
pub struct TableState(Option<BlobTable>);

impl TableState {
    /// Reads the table again before the next use.
    pub(super) fn forget(&mut self) {
        self.0 = None;
    }
}

/// Puts map objects one after another.
struct Sink<'a> {
    store: &'a Store,
    names: &'a Names,
}

#[async_trait]
impl MapSink for Sink<'_> {
    fn next_object(&mut self) -> ObjectRef {
        self.names.next()
    }

    async fn put(&mut self, object: ObjectRef, bytes: Bytes) -> Result<()> {
        let key = object.map_key();
        let put = self.store.put_new(&key, bytes).await;
        put.map(drop).map_err(|error| store_error("put", &key, error))
    }
}

impl Drain {
    pub(super) async fn checkpoint_if_due(&mut self) -> Result<()> {
        let extents = self.disk.layers().overlay.len();
        if self.checkpoint.is_due(self.head.head(), extents) {
            self.checkpoint().await?;
        }
        Ok(())
    }

    async fn checkpoint(&mut self) -> Result<()> {
        let head = self.head.head().clone();
        let generation = head.generation + 1;
        // Only the drain changes the overlay, and this is the drain.
        let overlay = self.disk.layers().overlay.clone();
        let uploads = Arc::clone(&self.uploads);
        let pages = uploads.fetcher().pages();
        let mut table = match self.table.0.take() {
            Some(table) => table,
            None => BlobTable::load(head.disk, &head.table, pages.source()).await?,
        };
        list_tail(&mut table, &head)?;
        let mut sink = Sink { store: uploads.store(), names: &self.names };
        let mut writer = MapObjectWriter::new(&mut sink, MAP_OBJECT_BYTES);
        let mut changes = Vec::new();
        let mut report = |change| changes.push(change);
        let root = map::apply(&head.root, &overlay, pages, &mut writer, &mut report).await?;
        account(&mut table, changes, pages).await?;
        let table_root = table.store(writer, generation).await?;
        failpoint::pass("checkpoint-after-put").await;
        let stored = count(&table);
        let change = |next: &mut Head| {
            next.root = root;
            next.table = table_root.clone();
            next.stored = stored;
            next.tail.clear();
        };
        if !self.commit_checkpoint(generation, change).await? {
            return Ok(());
        }
        self.table.0 = Some(table);
        failpoint::pass("checkpoint-after-swap").await;
        {
            let mut layers = self.disk.layers();
            layers.root = root;
            layers.overlay.clear();
        }
        self.copy_head().await
    }

    /// False when a late head of ours came between: the accounts were made for another generation.
    async fn commit_checkpoint(
        &mut self,
        generation: Generation,
        change: impl FnOnce(&mut Head),
    ) -> Result<bool> {
        match self.head.swap(change).await? {
            Ok(()) => {
                assert!(self.head.head().generation == generation, "accounts are of this swap");
                Ok(true)
            }
            Err(Refused::Lost(found)) => Err(lost(&found)),
            Err(Refused::OursLate(found)) => {
                self.adopt(*found).await?;
                Ok(false)
            }
        }
    }
}

/// Lists the blobs of the tail that are this disk's own; what of them is live, the map tells.
fn list_tail(table: &mut BlobTable, head: &Head) -> Result<()> {
    for entry in head.tail.iter().filter(|entry| entry.blob.disk == head.disk) {
        table.insert(TableEntry {
            kind: ObjectKind::Blob,
            object: entry.blob.object,
            bytes: entry.bytes,
            live_bytes: 0,
            birth: entry.birth,
            death: None,
        })?;
    }
    Ok(())
}

/// Carries the changes of a map into the table: first what is mapped, then what is not any more, so
/// that data that stays where it was never counts as gone.
async fn account(table: &mut BlobTable, changes: Vec<Change>, pages: &Pages) -> Result<()> {
    for change in &changes {
        if let Change::Mapped { range, location } = change
            && let Some(blob) = location.blob()
        {
            table.adjust_live(&blob, delta(range.count() * BLOCK_BYTES))?;
        }
    }
    for change in changes {
        match change {
            Change::Mapped { .. } => {}
            Change::Unmapped { range, location } => {
                if let Some(blob) = location.blob() {
                    table.adjust_live(&blob, -delta(range.count() * BLOCK_BYTES))?;
                }
            }
            Change::PageDropped(page) => {
                table.adjust_live(&page.object, -i64::from(page.len))?;
            }
            Change::SubtreeDropped(subtree) => {
                let mut dropped = Vec::new();
                let mut walk = Walk::new(Some(subtree), subtree.range(), pages);
                while let Some(extents) = walk.next(&mut |page| dropped.push(page)).await? {
                    for (range, location) in extents {
                        if let Some(blob) = location.blob() {
                            table.adjust_live(&blob, -delta(range.count() * BLOCK_BYTES))?;
                        }
                    }
                }
                for below in dropped {
                    table.adjust_live(&below.page.object, -i64::from(below.page.len))?;
                }
            }
        }
    }
    Ok(())
}

fn delta(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("bytes of one blob fit 63 bits")
}

fn count(table: &BlobTable) -> Stored {
    let mut stored = Stored::default();
    for entry in table.iter() {
        stored.bytes += entry.bytes;
        match entry.kind {
            ObjectKind::Blob => stored.blobs += 1,
            ObjectKind::Map => stored.map_objects += 1,
        }
        if entry.death.is_some() {
            stored.dead_bytes += entry.bytes;
        }
    }
    debug_assert!(stored.blobs + stored.map_objects == to_u64(table.len()));
    stored
}
