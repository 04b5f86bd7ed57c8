//! Memory of the dirty indexes of all disks, under one budget: reached, writers wait as they do for a
//! full log.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::geometry::to_u64;

/// What an extent of a dirty index costs in memory, with its share of what the log keeps of its frame.
const EXTENT_BYTES: u64 = 128;

/// Counts the dirty extents of a daemon.
#[derive(Debug)]
pub struct DirtyBudget {
    bytes_max: u64,
    extents: AtomicUsize,
}

impl DirtyBudget {
    /// A budget of so many bytes.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes_max, extents: AtomicUsize::new(0) }
    }

    /// An index went from `before` to `after` extents.
    pub(super) fn moved(&self, before: usize, after: usize) {
        if after >= before {
            self.extents.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.extents.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// Bytes in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        to_u64(self.extents.load(Ordering::Relaxed)) * EXTENT_BYTES
    }

    /// Bytes there are.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.bytes_max
    }
}
