//! [`CrcTable`]: the CRC32s of a frame's blocks, appended while others read.
//!
//! A `&[u32]` of what was appended stays valid while more is appended behind it, without a lock.
//! Small frames are many (one per write and flush of a single client), so the first few values live
//! inside; only a frame with more of them allocates.
#![expect(unsafe_code, reason = "lending a prefix of cells that are written once")]

use std::cell::UnsafeCell;
use std::fmt;
use std::slice;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::format::{FRAME_BLOCKS, index};

const FEW: usize = 4;

/// An append-only table of at most [`FRAME_BLOCKS`] numbers.
///
/// Any range of them lies together: a table that outgrows the inner cells copies them in front of the
/// new ones, and what was lent from the inner ones stays valid.
pub(crate) struct CrcTable {
    len: AtomicU32,
    appending: AtomicBool,
    few: [UnsafeCell<u32>; FEW],
    many: OnceLock<Many>,
}

/// The cells of a table that outgrew the inner ones: all of them.
type Many = Box<[UnsafeCell<u32>]>;

// SAFETY: cells below `len` are never written again; cells from `len` on are written only by the
// one thread that set `appending`, and become readable by its release store to `len`.
unsafe impl Sync for CrcTable {}

impl CrcTable {
    pub(crate) fn new() -> Self {
        Self {
            len: AtomicU32::new(0),
            appending: AtomicBool::new(false),
            few: [const { UnsafeCell::new(0) }; FEW],
            many: OnceLock::new(),
        }
    }

    /// How many values there are.
    pub(crate) fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// Adds values behind the others.
    ///
    /// # Panics
    /// When the table would pass [`FRAME_BLOCKS`], or two threads append at once.
    pub(crate) fn append(&self, values: &[u32]) {
        assert!(!self.appending.swap(true, Ordering::Acquire), "one thread appends at a time");
        let len = self.len.load(Ordering::Relaxed);
        let start = index(len);
        let end = start + values.len();
        assert!(end <= index(FRAME_BLOCKS));
        let cells = if self.many.get().is_none() && end <= FEW {
            &self.few[start..end]
        } else {
            let many = self.many.get_or_init(|| {
                let inner = if len == 0 { &[][..] } else { self.get(0, len) };
                many(inner, index(FRAME_BLOCKS))
            });
            &many[start..end]
        };
        for (cell, value) in cells.iter().zip(values) {
            // SAFETY: at or above `len`, so not lent to anybody, and `appending` keeps other
            // writers away.
            unsafe { *cell.get() = *value };
        }
        let added = u32::try_from(values.len()).expect("at most FRAME_BLOCKS values");
        self.len.store(len + added, Ordering::Release);
        self.appending.store(false, Ordering::Release);
    }

    /// The `count` values from `first` on.
    pub(crate) fn get(&self, first: u32, count: u32) -> &[u32] {
        assert!(first + count <= self.len());
        let (start, end) = (index(first), index(first + count));
        let cells = match self.many.get() {
            Some(many) => &many[start..end],
            None => &self.few[start..end],
        };
        // SAFETY: `UnsafeCell<u32>` has the layout of `u32`; the cells lie below `len`, so they
        // were written before the acquire load in `len()` and are never written again.
        unsafe { slice::from_raw_parts(cells.as_ptr().cast::<u32>(), cells.len()) }
    }
}

/// `cells` cells that begin with `values`.
fn many(values: &[u32], cells: usize) -> Many {
    let rest = std::iter::repeat(0);
    values.iter().copied().chain(rest).take(cells).map(UnsafeCell::new).collect()
}

impl From<&[u32]> for CrcTable {
    fn from(values: &[u32]) -> Self {
        let table = Self::new();
        if values.len() > FEW {
            table.many.get_or_init(|| many(&[], values.len()));
        }
        table.append(values);
        table
    }
}

impl fmt::Debug for CrcTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CrcTable").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails when a value moves or changes while the table grows past its inner cells.
    #[test]
    fn lent_values_stay_while_more_are_appended() {
        let table = CrcTable::new();
        table.append(&[1, 2, 3]);
        let early = table.get(1, 2);
        table.append(&[4, 5]);
        table.append(&[6]);
        assert_eq!(early, [2, 3]);
        assert_eq!(table.get(0, 3), [1, 2, 3]);
        assert_eq!(table.get(3, 2), [4, 5]);
        assert_eq!(table.get(4, 2), [5, 6]);
        assert_eq!(table.get(5, 1), [6]);
        assert_eq!(table.get(0, 6), [1, 2, 3, 4, 5, 6]);
        assert_eq!(table.len(), 6);
    }

    // Fails when a table built at once splits its values.
    #[test]
    fn a_table_built_at_once_lends_any_range() {
        let values: Vec<u32> = (0..9).collect();
        let table = CrcTable::from(values.as_slice());
        assert_eq!(table.get(0, 9), values);
        assert_eq!(table.get(2, 5), &values[2..7]);
        assert_eq!(CrcTable::from(&values[..2]).get(0, 2), &values[..2]);
    }
}
