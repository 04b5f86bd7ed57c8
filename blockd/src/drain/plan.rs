//! What one batch of the drain holds: pure functions of the sealed indexes.

use std::sync::Arc;

use wal::Lsn;

use crate::disk::{Barrier, Dirty, Sealed};
use crate::extent_map::{Advance, ExtentMap};
use crate::geometry::{BLOCK_BYTES, BlockRange};

/// Sealed indexes taken into one batch: overwrites within a batch are uploaded once.
const BATCH_SEALED_MAX: usize = 4;

/// Extents of one blob: its footer stays well under a mebibyte.
const BLOB_EXTENTS_MAX: usize = 16_384;

/// The newest version of everything in the oldest sealed indexes.
#[derive(Debug)]
pub(super) struct Batch {
    /// Position at which it ends.
    pub(super) cut: Lsn,
    /// The snapshot that the cut ends at.
    pub(super) barrier: Option<Barrier>,
    /// The contents of each blob.
    pub(super) blobs: Vec<Vec<(BlockRange, Dirty)>>,
}

/// Takes the oldest sealed indexes, at most up to the first barrier, into one batch.
pub(super) fn plan(sealed: &[Arc<Sealed>], blob_bytes_max: u64) -> Option<Batch> {
    let mut merged = ExtentMap::new();
    let mut taken = 0;
    for index in sealed.iter().take(BATCH_SEALED_MAX) {
        for (range, dirty) in index.extents.iter() {
            merged.insert(range, dirty.clone());
        }
        taken += 1;
        if index.barrier.is_some() {
            break;
        }
    }
    let last = sealed[..taken].last()?;
    Some(Batch {
        cut: last.cut,
        barrier: last.barrier.clone(),
        blobs: split(&merged, blob_bytes_max),
    })
}

/// Cuts a batch into blobs of at most so many bytes of data, in the order of blocks.
fn split(merged: &ExtentMap<Dirty>, blob_bytes_max: u64) -> Vec<Vec<(BlockRange, Dirty)>> {
    let blocks_max = (blob_bytes_max / BLOCK_BYTES).max(1);
    let mut blobs = Vec::new();
    let mut blob = Vec::new();
    let mut blocks = 0;
    for (range, dirty) in merged.iter() {
        let (mut range, mut dirty) = (range, dirty.clone());
        loop {
            let data = matches!(dirty, Dirty::Data(_));
            let full = data && blocks == blocks_max || blob.len() == BLOB_EXTENTS_MAX;
            if full {
                blobs.push(std::mem::take(&mut blob));
                blocks = 0;
            }
            let fits = if data { range.count().min(blocks_max - blocks) } else { range.count() };
            blob.push((BlockRange::new(range.start, fits), dirty.clone()));
            blocks += if data { fits } else { 0 };
            if fits == range.count() {
                break;
            }
            dirty = dirty.advance(fits);
            range.start += fits;
        }
    }
    if !blob.is_empty() {
        blobs.push(blob);
    }
    blobs
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn sealed(cut: u64, zeroes: &[(u64, u64)], barrier: bool) -> Arc<Sealed> {
        let mut extents = ExtentMap::new();
        for (start, count) in zeroes {
            extents.insert(BlockRange::new(*start, *count), Dirty::Zero);
        }
        let barrier = barrier.then(|| Barrier {
            id: crate::ids::SnapshotId(1),
            name: "s".parse().unwrap(),
            message: None,
            created_unix_ms: 0,
            size_bytes: 1 << 20,
        });
        let since = Instant::now();
        Arc::new(Sealed { extents, cut: Lsn::new(cut), since, log_bytes: 0, barrier })
    }

    #[test]
    fn a_batch_never_reaches_past_a_barrier() {
        let indexes =
            [sealed(3, &[(0, 2)], false), sealed(5, &[(8, 1)], true), sealed(9, &[(20, 4)], false)];
        let batch = plan(&indexes, 1 << 24).unwrap();
        assert_eq!(batch.cut, Lsn::new(5));
        assert!(batch.barrier.is_some());
        let ranges: Vec<_> = batch.blobs.concat().iter().map(|(range, _)| *range).collect();
        assert_eq!(ranges, [BlockRange::new(0, 2), BlockRange::new(8, 1)]);
    }

    #[test]
    fn a_barrier_over_nothing_is_a_batch_without_blobs() {
        let batch = plan(&[sealed(5, &[], true)], 1 << 24).unwrap();
        assert!(batch.blobs.is_empty() && batch.barrier.is_some());
        assert!(plan(&[], 1 << 24).is_none());
    }

    #[test]
    fn a_zero_extent_of_a_whole_disk_is_one_extent_of_one_blob() {
        let batch = plan(&[sealed(5, &[(0, 1 << 32)], false)], 1 << 24).unwrap();
        assert_eq!(batch.blobs.len(), 1);
        assert_eq!(batch.blobs[0].len(), 1);
    }
}
