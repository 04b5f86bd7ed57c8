//! Where the data of a block lies in the store.

use crate::blob::FRAME_BLOCKS_MAX;
use crate::extent_map::Advance;
use crate::ids::ObjectRef;

/// The place of an extent's first block; those that follow it lie behind it in the same frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Location {
    /// In a frame of a blob.
    Data {
        /// The blob.
        blob: ObjectRef,
        /// Where the frame starts in it.
        frame_offset: u32,
        /// Bytes of the frame, so that one ranged read fetches it.
        frame_len: u32,
        /// Which block of the frame.
        index: u8,
    },
    /// Nowhere: the block reads as zeros, whatever an older blob holds.
    Zero,
}

impl Location {
    /// The blob that holds the data.
    #[must_use]
    pub fn blob(&self) -> Option<ObjectRef> {
        match self {
            Self::Data { blob, .. } => Some(*blob),
            Self::Zero => None,
        }
    }
}

impl Advance for Location {
    fn advance(&self, blocks: u64) -> Self {
        match *self {
            Self::Data { blob, frame_offset, frame_len, index } => {
                let index = u64::from(index) + blocks;
                let index = u8::try_from(index).expect("an extent of data lies within its frame");
                Self::Data { blob, frame_offset, frame_len, index }
            }
            Self::Zero => Self::Zero,
        }
    }

    const JOINS: bool = true;

    fn joins(&self, blocks: u64, next: &Self) -> bool {
        match self {
            Self::Zero => *next == Self::Zero,
            Self::Data { blob, frame_offset, index, .. } => match next {
                Self::Data { blob: to, frame_offset: offset, index: next, .. } => {
                    (blob, frame_offset) == (to, offset)
                        && u64::from(*index) + blocks == u64::from(*next)
                }
                Self::Zero => false,
            },
        }
    }
}

const _: () = assert!(FRAME_BLOCKS_MAX < 256, "block numbers within a frame fit a byte");
