//! What this daemon knows of the snapshots of disks, so that taking and forking one need not list the
//! store.
//!
//! Snapshots are immutable while they exist, and only the holder of a disk adds to or takes from them
//! by name. So for a disk that this daemon holds, a book that was once complete stays complete, and a
//! snapshot can be taken while the store is down without meeting a name that is taken.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use crate::head::{Head, Snapshot};
use crate::ids::{DiskId, DiskName, SnapshotName};

/// Disks that are remembered, beside those that are held.
const PAGES_MAX: usize = 256;

/// Known snapshots of all disks.
#[derive(Debug, Default)]
pub(super) struct SnapshotBook {
    pages: Mutex<HashMap<DiskId, Page>>,
}

#[derive(Debug, Default)]
struct Page {
    /// Every snapshot of the disk is here; only true of disks that this daemon holds.
    complete: bool,
    /// None: reserved by a barrier that only the log has.
    by_name: BTreeMap<SnapshotName, Option<Snapshot>>,
    /// The head as last seen. What may have changed since, whoever uses it has to look at.
    head: Option<Head>,
}

impl SnapshotBook {
    fn with<T>(&self, disk: DiskId, change: impl FnOnce(&mut Page) -> T) -> T {
        change(self.pages.lock().expect("no panic while held").entry(disk).or_default())
    }

    /// Notes snapshots that were read from the store.
    pub(super) fn learn(&self, disk: DiskId, snapshots: &[Snapshot]) {
        self.with(disk, |page| {
            for snapshot in snapshots {
                page.by_name.insert(snapshot.name.clone(), Some(snapshot.clone()));
            }
        });
    }

    /// Notes that nothing is missing from now on.
    pub(super) fn complete(&self, disk: DiskId) {
        self.with(disk, |page| page.complete = true);
    }

    /// Whether nothing is missing.
    pub(super) fn is_complete(&self, disk: DiskId) -> bool {
        self.with(disk, |page| page.complete)
    }

    /// Reserves a name; false when it is taken.
    pub(super) fn reserve(&self, disk: DiskId, name: &SnapshotName) -> bool {
        self.with(disk, |page| {
            let free = !page.by_name.contains_key(name);
            page.by_name.entry(name.clone()).or_default();
            free
        })
    }

    /// Gives a name back.
    pub(super) fn forget(&self, disk: DiskId, name: &SnapshotName) {
        self.with(disk, |page| page.by_name.remove(name));
    }

    /// A snapshot by name, of a disk that was forked or held before: a guess that a fork confirms.
    pub(super) fn guess(&self, disk: &DiskName, name: &SnapshotName) -> Option<(Head, Snapshot)> {
        let pages = self.pages.lock().expect("no panic while held");
        let page =
            pages.values().find(|page| page.head.as_ref().is_some_and(|it| it.name == *disk))?;
        Some((page.head.clone()?, page.by_name.get(name).cloned().flatten()?))
    }

    /// Remembers the head of a disk for [`SnapshotBook::guess`].
    pub(super) fn remember(&self, head: &Head) {
        let mut pages = self.pages.lock().expect("no panic while held");
        if pages.len() >= PAGES_MAX {
            pages.retain(|_, page| page.complete);
        }
        pages.entry(head.disk).or_default().head = Some(head.clone());
    }

    /// A disk that this daemon no longer holds: others may add to its snapshots.
    pub(super) fn close(&self, disk: DiskId) {
        self.with(disk, |page| {
            page.complete = false;
            page.by_name.retain(|_, snapshot| snapshot.is_some());
        });
    }

    /// Forgets all about a disk.
    pub(super) fn erase(&self, disk: DiskId) {
        self.pages.lock().expect("no panic while held").remove(&disk);
    }
}
