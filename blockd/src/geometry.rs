//! Blocks and byte ranges: the only arithmetic between them.
//!
//! A disk is an array of 4 KiB blocks. Clients may ask for any bytes; everything inside works on
//! whole blocks.

/// Bytes of a block, the unit of the map and of checksums.
pub const BLOCK_BYTES: u64 = 4096;

/// [`BLOCK_BYTES`] for lengths of buffers.
pub const BLOCK_LEN: usize = 4096;

/// The largest disk: 64 TiB. It keeps block numbers within 34 bits and the map at four levels.
pub const DISK_BYTES_MAX: u64 = 64 << 40;

/// A half-open range of blocks, `start < end` unless empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockRange {
    /// First block.
    pub start: u64,
    /// One past the last block.
    pub end: u64,
}

impl BlockRange {
    /// The range of `count` blocks from `start`.
    ///
    /// # Panics
    /// When `start + count` overflows: callers have checked against the size of the disk.
    #[must_use]
    pub fn new(start: u64, count: u64) -> Self {
        let end = start.checked_add(count).expect("block ranges lie within a disk");
        Self { start, end }
    }

    /// Blocks in the range.
    #[must_use]
    pub fn count(self) -> u64 {
        self.end - self.start
    }

    /// Whether the range has no blocks.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// The blocks that both ranges have.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end).max(start);
        Self { start, end }
    }

    /// Whether the ranges share a block.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The blocks that `len` bytes at `offset` touch, even in part.
    #[must_use]
    pub fn touching(offset: u64, len: u64) -> Self {
        let start = offset / BLOCK_BYTES;
        let end = (offset + len).div_ceil(BLOCK_BYTES).max(start);
        Self { start, end }
    }

    /// The blocks that `len` bytes at `offset` cover whole.
    #[must_use]
    pub fn within(offset: u64, len: u64) -> Self {
        let start = offset.div_ceil(BLOCK_BYTES);
        let end = ((offset + len) / BLOCK_BYTES).max(start);
        Self { start, end }
    }
}

/// Whether a size is one a disk may have: whole blocks, more than none, at most
/// [`DISK_BYTES_MAX`].
#[must_use]
pub fn is_disk_size(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(BLOCK_BYTES) && bytes <= DISK_BYTES_MAX
}

/// A length that is known to fit: buffers never exceed the address space.
///
/// # Panics
/// When `value` does not fit a `usize`.
#[must_use]
pub fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("buffer lengths fit the address space")
}

/// A length or count as the number that goes into formats.
///
/// # Panics
/// Never on the 64-bit targets this crate builds for.
#[must_use]
pub fn to_u64(value: usize) -> u64 {
    u64::try_from(value).expect("usize is at most 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_touch_more_than_they_cover() {
        assert_eq!(BlockRange::touching(4095, 2), BlockRange { start: 0, end: 2 });
        assert!(BlockRange::within(4095, 2).is_empty());
        assert_eq!(BlockRange::within(1, 8192), BlockRange { start: 1, end: 2 });
        assert_eq!(BlockRange::touching(8192, 0).count(), 0);
    }
}
