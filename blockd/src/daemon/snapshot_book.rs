//! What this daemon knows of the snapshots of disks, so that taking and forking one need not list the
//! store.
//!
//! Snapshots are immutable while they exist, and only the holder of a disk adds to or takes from them
//! by name. So for a disk that this daemon holds, a book that was once complete stays complete, and a
//! snapshot can be taken while the store is down without meeting a name that is taken.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use crate::head::Snapshot;
use crate::ids::{DiskId, SnapshotName};

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

    /// A snapshot that is known to be in the store.
    pub(super) fn find(&self, disk: DiskId, name: &SnapshotName) -> Option<Snapshot> {
        self.with(disk, |page| page.by_name.get(name).cloned().flatten())
    }

    /// Forgets a disk that this daemon no longer holds.
    pub(super) fn close(&self, disk: DiskId) {
        self.pages.lock().expect("no panic while held").remove(&disk);
    }
}
