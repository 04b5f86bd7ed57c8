//! The blob table: every blob and map object that a disk wrote and has not deleted, with what of it is
//! still in use and since when none of it is.
//!
//! It travels with the disk: its pages lie in map objects and are committed by the same swap as the
//! root of the map, so whoever attaches the disk next knows what may be deleted. Only objects of the
//! disk itself are listed; what a fork shares with its parent is the parent's to count.
//!
//! Two levels: the root page lists leaf pages by their first object. A checkpoint writes the leaves
//! that changed and the root. An object is listed under its [`ObjectId`] alone, so blobs and map
//! objects of one writer draw their numbers from one sequence.
//!
//! The objects that a checkpoint fills cannot be listed in pages that lie in them; the [`TableRoot`]
//! carries them until the next checkpoint. A page that is replaced is no longer live in its object,
//! which changes that object's entry and so, perhaps, another page: [`BlobTable::store`] follows this
//! to its end before it writes the first page.

use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::ids::{DiskId, Generation, ObjectId, ObjectRef};
use crate::map::{MapObjectWriter, PageRef, PageSource, StoredObject};

mod page;

#[cfg(test)]
mod tests;

/// Entries of one leaf page.
const LEAF_ENTRIES_MAX: usize = 512;

/// A leaf below this is joined with the next one, where both fit.
const LEAF_ENTRIES_FEW: usize = LEAF_ENTRIES_MAX / 4;

/// Leaf pages that are fetched at once.
const LOADS_AHEAD: usize = 16;

/// What kind of object an entry is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    /// A data blob: its live bytes are those of the blocks that the map or the tail finds in it.
    Blob,
    /// A map object: its live bytes are those of its pages that the map or this table consist of.
    Map,
}

/// One object of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableEntry {
    /// Blob or map object.
    pub kind: ObjectKind,
    /// Which one.
    pub object: ObjectId,
    /// Its size in the store.
    pub bytes: u64,
    /// How much of it is in use.
    pub live_bytes: u64,
    /// The generation of the head that first knew it.
    pub birth: Generation,
    /// The generation of the head since which nothing of it is in use.
    pub death: Option<Generation>,
}

/// Where a table is stored: part of a head or a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TableRoot {
    /// The root page; none while no leaf was ever needed.
    pub page: Option<PageRef>,
    /// The objects that hold the newest pages, not yet listed in any.
    pub recent: Vec<TableEntry>,
}

/// A table in memory: some 72 bytes per object, which is about 6 MB for each TiB of a full disk.
#[derive(Debug, Clone)]
pub struct BlobTable {
    disk: DiskId,
    leaves: Vec<Leaf>,
    root_page: Option<PageRef>,
    /// Stored pages that no leaf needs any more.
    dropped: Vec<PageRef>,
    /// Objects that were seen without live bytes.
    emptied: Vec<ObjectId>,
}

#[derive(Debug, Clone)]
struct Leaf {
    /// Ascending, never empty.
    entries: Vec<TableEntry>,
    /// The page that holds exactly these entries, unless they changed since.
    stored: Option<PageRef>,
    dirty: bool,
}

impl Leaf {
    fn new(entries: Vec<TableEntry>) -> Self {
        Self { entries, stored: None, dirty: true }
    }

    fn first(&self) -> ObjectId {
        self.entries[0].object
    }
}

impl BlobTable {
    /// The table of a disk that has written nothing.
    #[must_use]
    pub fn new(disk: DiskId) -> Self {
        Self { disk, leaves: Vec::new(), root_page: None, dropped: Vec::new(), emptied: Vec::new() }
    }

    /// Reads the whole table of `disk`.
    ///
    /// # Errors
    /// When a page cannot be had, or is not what was written.
    pub async fn load(disk: DiskId, root: &TableRoot, source: &dyn PageSource) -> Result<Self> {
        let mut table = Self::new(disk);
        if let Some(root_page) = root.page {
            let children = page::load_root(source, &root_page, disk).await?;
            table.root_page = Some(root_page);
            let loads = children.into_iter().map(|(first, child)| async move {
                let entries = page::load_leaf(source, &child, disk, first).await?;
                Ok::<_, Error>(Leaf { entries, stored: Some(child), dirty: false })
            });
            table.leaves = stream::iter(loads).buffered(LOADS_AHEAD).try_collect().await?;
            table.check_order()?;
        }
        for entry in &root.recent {
            table.insert(*entry)?;
        }
        Ok(table)
    }

    fn check_order(&self) -> Result<()> {
        let ends = self.leaves.windows(2).map(|pair| (pair[0].entries.last(), pair[1].first()));
        for (last, next) in ends {
            if last.is_some_and(|last| last.object >= next) {
                return Err(self.corrupt(&next, "is listed in two pages, or out of order"));
            }
        }
        Ok(())
    }

    /// How many objects are listed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.entries.len()).sum()
    }

    /// Whether no object is listed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// Every object, ascending.
    pub fn iter(&self) -> impl Iterator<Item = &TableEntry> + '_ {
        self.leaves.iter().flat_map(|leaf| &leaf.entries)
    }

    /// The entry of an object.
    #[must_use]
    pub fn get(&self, object: &ObjectId) -> Option<&TableEntry> {
        let leaf = &self.leaves[self.leaf_of(object)?];
        let at = leaf.entries.binary_search_by_key(object, |entry| entry.object).ok()?;
        Some(&leaf.entries[at])
    }

    /// Lists an object that was not listed.
    ///
    /// # Errors
    /// When it is listed already.
    pub fn insert(&mut self, entry: TableEntry) -> Result<()> {
        if entry.live_bytes == 0 {
            self.emptied.push(entry.object);
        }
        let Some(place) = self.leaf_of(&entry.object).or((!self.is_empty()).then_some(0)) else {
            self.leaves.push(Leaf::new(vec![entry]));
            return Ok(());
        };
        let is_last = place + 1 == self.leaves.len();
        let entries = &mut self.leaves[place].entries;
        let at = match entries.binary_search_by_key(&entry.object, |entry| entry.object) {
            Ok(_) => return Err(self.corrupt(&entry.object, "is listed already")),
            Err(at) => at,
        };
        if entries.len() < LEAF_ENTRIES_MAX {
            entries.insert(at, entry);
            self.leaves[place].dirty = true;
        } else if is_last && at == entries.len() {
            // Objects come in ascending order: a leaf behind a full one, which stays as it is.
            self.leaves.push(Leaf::new(vec![entry]));
        } else {
            let mut upper = entries.split_off(LEAF_ENTRIES_MAX / 2);
            match at.checked_sub(LEAF_ENTRIES_MAX / 2) {
                Some(at) if at > 0 => upper.insert(at, entry),
                _ => entries.insert(at, entry),
            }
            self.leaves[place].dirty = true;
            self.leaves.insert(place + 1, Leaf::new(upper));
        }
        Ok(())
    }

    /// Adds to what of an object is in use, or takes from it. Objects of other disks are not counted.
    ///
    /// # Errors
    /// When an object of this disk is not listed, is dead, or would have less than nothing in use:
    /// the accounts are wrong, and nothing may be deleted by them.
    pub fn adjust_live(&mut self, object: &ObjectRef, delta: i64) -> Result<()> {
        if object.disk != self.disk {
            return Ok(());
        }
        let Some((place, at)) = self.find(&object.object) else {
            return Err(self.corrupt(&object.object, "is in use and not listed"));
        };
        let entry = self.leaves[place].entries[at];
        if entry.death.is_some() {
            return Err(self.corrupt(&object.object, "is dead, and its use changes"));
        }
        let Some(live_bytes) = entry.live_bytes.checked_add_signed(delta) else {
            let what = format!("has {} live bytes, of which {delta} are added", entry.live_bytes);
            return Err(self.corrupt(&object.object, &what));
        };
        if live_bytes == 0 {
            self.emptied.push(object.object);
        }
        self.leaves[place].entries[at].live_bytes = live_bytes;
        self.leaves[place].dirty |= delta != 0;
        Ok(())
    }

    /// Notes that nothing of an object is in use since `generation`. [`BlobTable::store`] does this
    /// for every object without live bytes.
    ///
    /// # Errors
    /// When it is not listed.
    pub fn mark_dead(&mut self, object: &ObjectId, generation: Generation) -> Result<()> {
        let Some((place, at)) = self.find(object) else {
            return Err(self.corrupt(object, "is not listed"));
        };
        let leaf = &mut self.leaves[place];
        if leaf.entries[at].death.is_none() {
            leaf.entries[at].death = Some(generation);
            leaf.dirty = true;
        }
        Ok(())
    }

    /// Forgets an object that was deleted; its entry, if there was one.
    pub fn remove(&mut self, object: &ObjectId) -> Option<TableEntry> {
        let (place, at) = self.find(object)?;
        let removed = self.leaves[place].entries.remove(at);
        self.leaves[place].dirty = true;
        if self.leaves[place].entries.is_empty() {
            let leaf = self.leaves.remove(place);
            self.dropped.extend(leaf.stored);
        } else if self.leaves[place].entries.len() < LEAF_ENTRIES_FEW
            && let Some(next) = self.leaves.get(place + 1)
            && self.leaves[place].entries.len() + next.entries.len() <= LEAF_ENTRIES_MAX
        {
            let next = self.leaves.remove(place + 1);
            self.dropped.extend(next.stored);
            self.leaves[place].entries.extend(next.entries);
        }
        Some(removed)
    }

    /// Writes what changed and ends the map objects of a checkpoint that `generation` will commit.
    /// Marks every object dead that has no live bytes left, and lists the map objects that the
    /// checkpoint filled.
    ///
    /// # Errors
    /// When a page cannot be stored, or the accounts are wrong. The table must then not be used.
    pub async fn store(
        &mut self,
        mut writer: MapObjectWriter<'_>,
        generation: Generation,
    ) -> Result<TableRoot> {
        let listed = writer.stored().len();
        for stored in writer.stored() {
            self.insert(map_entry(stored, generation))?;
        }
        self.settle(generation)?;
        for leaf in self.leaves.iter_mut().filter(|leaf| leaf.dirty) {
            let (bytes, crc) = page::encode_leaf(self.disk, &leaf.entries);
            leaf.stored = Some(writer.add(&bytes, crc).await?);
            leaf.dirty = false;
        }
        self.root_page = None;
        if !self.is_empty() {
            let child = |leaf: &Leaf| (leaf.first(), leaf.stored.expect("all leaves are stored"));
            let children: Vec<_> = self.leaves.iter().map(child).collect();
            let (bytes, crc) = page::encode_root(self.disk, &children);
            self.root_page = Some(writer.add(&bytes, crc).await?);
        }
        let filled = writer.finish().await?;
        let recent: Vec<_> =
            filled[listed..].iter().map(|stored| map_entry(stored, generation)).collect();
        for entry in &recent {
            self.insert(*entry)?;
        }
        Ok(TableRoot { page: self.root_page, recent })
    }

    /// Follows every change to its end: pages to be replaced lose their place in their objects, whose
    /// entries change, and with them pages; objects without live bytes die.
    fn settle(&mut self, generation: Generation) -> Result<()> {
        self.dropped.extend(self.root_page);
        loop {
            for object in std::mem::take(&mut self.emptied) {
                if self.get(&object).is_some_and(|entry| entry.live_bytes == 0) {
                    self.mark_dead(&object, generation)?;
                }
            }
            for leaf in self.leaves.iter_mut().filter(|leaf| leaf.dirty) {
                self.dropped.extend(leaf.stored.take());
            }
            if self.dropped.is_empty() {
                return Ok(());
            }
            for page in std::mem::take(&mut self.dropped) {
                self.adjust_live(&page.object, -i64::from(page.len))?;
            }
        }
    }

    /// The leaf that lists `object`, if any does; none when it comes before all that are listed.
    fn leaf_of(&self, object: &ObjectId) -> Option<usize> {
        self.leaves.partition_point(|leaf| leaf.first() <= *object).checked_sub(1)
    }

    fn find(&self, object: &ObjectId) -> Option<(usize, usize)> {
        let place = self.leaf_of(object)?;
        let entries = &self.leaves[place].entries;
        let at = entries.binary_search_by_key(object, |entry| entry.object).ok()?;
        Some((place, at))
    }

    fn corrupt(&self, object: &ObjectId, what: &str) -> Error {
        let object = ObjectRef { disk: self.disk, object: *object };
        Error::new(Kind::Corrupt, format!("blob table: object {object} {what}"))
    }
}

fn map_entry(stored: &StoredObject, generation: Generation) -> TableEntry {
    TableEntry {
        kind: ObjectKind::Map,
        object: stored.object.object,
        bytes: stored.bytes,
        live_bytes: stored.bytes,
        birth: generation,
        death: None,
    }
}
