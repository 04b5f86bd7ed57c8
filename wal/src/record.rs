//! [`Record`], what is appended: data, a range without data, or a barrier.

use crate::error::{Error, ErrorKind, Result};
use crate::format::{BARRIER_BYTES, BLOCK_BYTES, Entry, EntryKind, FRAME_BLOCKS};

/// What a record without data does to its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroKind {
    /// They were written as zeros.
    Zeroes,
    /// They were given up.
    Discard,
}

/// Something to append.
#[derive(Clone, Copy, Debug)]
pub enum Record<'a> {
    /// Whole blocks of 4 KiB: at least one, at most [`FRAME_BLOCKS`].
    Write {
        /// Where they belong.
        first_block: u64,
        /// The blocks.
        data: &'a [u8],
    },
    /// A range of any length without data.
    Zero {
        /// Where it begins.
        first_block: u64,
        /// How many blocks it has; at least one.
        count: u64,
        /// What happened to them.
        kind: ZeroKind,
    },
    /// A mark in the write order with a payload of its own, at most [`BARRIER_BYTES`].
    Barrier {
        /// Opaque to the log.
        payload: &'a [u8],
    },
}

impl Record<'_> {
    /// How the record stands in a frame's table, once its place in the data is known.
    pub(crate) fn entry(&self) -> Result<Entry> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let (kind, first_block, count, data_blocks) = match *self {
            Self::Write { first_block, data } => {
                let blocks = u32::try_from(data.len() / BLOCK_BYTES).unwrap_or(u32::MAX);
                if !data.len().is_multiple_of(BLOCK_BYTES) || !(1..=FRAME_BLOCKS).contains(&blocks)
                {
                    return invalid(format!(
                        "write of {} bytes: a record takes 1 to {FRAME_BLOCKS} whole blocks of \
                         {BLOCK_BYTES}",
                        data.len()
                    ));
                }
                (EntryKind::Write, first_block, u64::from(blocks), blocks)
            }
            Self::Zero { first_block, count, kind } => {
                if count == 0 {
                    return invalid(format!("zero record of no blocks at block {first_block}"));
                }
                let kind = match kind {
                    ZeroKind::Zeroes => EntryKind::Zeroes,
                    ZeroKind::Discard => EntryKind::Discard,
                };
                (kind, first_block, count, 0)
            }
            Self::Barrier { payload } => {
                if payload.len() > BARRIER_BYTES {
                    let bytes = payload.len();
                    return invalid(format!("barrier of {bytes} bytes: at most {BARRIER_BYTES}"));
                }
                let bytes = u64::try_from(payload.len()).expect("at most a block");
                (EntryKind::Barrier, 0, bytes, 1)
            }
        };
        if first_block.checked_add(count).is_none() {
            return invalid(format!("record of {count} blocks at block {first_block} wraps"));
        }
        Ok(Entry { kind, first_block, count, data_index: 0, data_blocks })
    }

    pub(crate) fn data(&self) -> &[u8] {
        match self {
            Self::Write { data, .. } => data,
            Self::Zero { .. } => &[],
            Self::Barrier { payload } => payload,
        }
    }
}
