//! The chunk map: where the data of every block of a disk lies, as a tree of immutable pages.
//!
//! ```text
//! level 2                    root                         512 children of 2 GiB
//! level 1          page   page    ·     page              512 children of 4 MiB
//! level 0       leaf leaf  ·  leaf leaf   ·   leaf        the extents of one chunk, 1,024 blocks
//! ```
//!
//! A page, once stored, never changes: a checkpoint writes new leaves and the path above them, and
//! whoever holds an older [`Root`] still sees the disk as it was. A snapshot or fork is therefore a
//! copy of a root. The tree is complete in itself: what no leaf lists reads as zeros, whatever disk
//! the pages came from. It is as high as its highest mapped block needs, so growing a disk changes
//! nothing in it.
//!
//! - `page`: the nodes and their bytes.
//! - `pages`: the cache through which every page is read, and the [`PageSource`] behind it.
//! - `tree`: looking up and walking.
//! - `checkpoint`: the next root from the last one and an overlay; `writer`: the objects it fills.

use serde::{Deserialize, Serialize};

use crate::geometry::{BLOCK_BYTES, DISK_BYTES_MAX};
use crate::ids::ObjectRef;

mod checkpoint;
mod page;
mod pages;
mod tree;
mod writer;

pub use checkpoint::{Change, apply};
pub use page::PAGE_VERSION;
pub use pages::{PageSource, Pages};
pub(crate) use pages::{corrupt_page, load_page, wrong_page};
pub use tree::{Subtree, Walk, lookup};
pub use writer::{MAP_OBJECT_BYTES, MapObjectWriter, MapSink, StoredObject};

/// Blocks of a chunk: what one leaf covers, 4 MiB.
pub const CHUNK_BLOCKS: u64 = 1024;

/// Children of an inner page.
pub const FANOUT: u64 = 512;

/// Levels of the highest tree there can be.
pub const LEVELS_MAX: u8 = 4;

/// Blocks that the highest tree can map: 512 TiB.
pub const TREE_BLOCKS: u64 = CHUNK_BLOCKS * FANOUT * FANOUT * FANOUT;

/// Most bytes of one page, for readers.
pub const PAGE_BYTES_MAX: u32 = 1 << 20;

/// Pages of one parent that are read side by side.
const LOADS_AHEAD: usize = 16;

/// Where a page is stored, and the checksum that tells it from any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageRef {
    /// The map object, often of another disk.
    pub object: ObjectRef,
    /// Where the page starts in it.
    pub offset: u32,
    /// Bytes of the page.
    pub len: u32,
    /// CRC32 of the page.
    pub crc: u32,
}

/// The root of a tree: all that a head or a snapshot needs to hold of a disk's map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Root {
    /// Levels of the tree: 0 when nothing is mapped.
    pub height: u8,
    /// The page at the top; none when nothing is mapped.
    pub page: Option<PageRef>,
    /// How many bytes up to the end of that page, in its object, are it and pages close below it, none
    /// of them leaves: [`Pages::preload`] fetches them with one read.
    pub upper_bytes: u32,
}

impl Root {
    /// The map of a disk that reads as zeros.
    pub const EMPTY: Self = Self { height: 0, page: None, upper_bytes: 0 };
}

/// Blocks below one page of `level`.
#[must_use]
pub fn blocks_below(level: u8) -> u64 {
    CHUNK_BLOCKS * FANOUT.pow(level.into())
}

/// Levels that a tree needs to reach the block before `end`.
#[must_use]
pub fn height_for(end: u64) -> u8 {
    match end {
        0 => 0,
        _ => (1..LEVELS_MAX).find(|height| end <= blocks_below(height - 1)).unwrap_or(LEVELS_MAX),
    }
}

const _: () = assert!(DISK_BYTES_MAX / BLOCK_BYTES <= TREE_BLOCKS, "any disk fits the tree");

#[cfg(test)]
mod tests;
