//! Reads what one blob holds out of the log.
//!
//! A blob is in the order of blocks, the log in the order of writes. So the log is read frame by
//! frame, each with one transfer, and its blocks are put where the blob wants them.

use std::collections::HashMap;
use std::sync::Arc;

use wal::{BlockBuf, FRAME_BLOCKS, Frame};

use crate::disk::Dirty;
use crate::error::{Error, Kind, Result};
use crate::geometry::{BLOCK_BYTES, BLOCK_LEN, BlockRange, to_u64, to_usize};

/// Where a run of blocks goes: from which block of its frame, how many, to which byte.
struct Move {
    from: u32,
    count: u32,
    to: usize,
}

/// The data of a blob's extents, one after another; zero extents have none.
///
/// # Errors
/// [`Kind::Corrupt`] naming file and offset when a block is not what was written.
pub(super) fn gather(contents: &[(BlockRange, Dirty)]) -> Result<Vec<u8>> {
    let mut frames: HashMap<*const Frame, (Arc<Frame>, Vec<Move>)> = HashMap::new();
    let mut len = 0;
    for (range, dirty) in contents {
        let Dirty::Data(place) = dirty else { continue };
        let count = u32::try_from(range.count()).expect("a record has at most one frame");
        let frame = Arc::clone(place.frame());
        let moves = &mut frames.entry(Arc::as_ptr(&frame)).or_insert_with(|| (frame, Vec::new())).1;
        moves.push(Move { from: place.frame_block(), count, to: len });
        len += to_usize(range.count() * BLOCK_BYTES);
    }
    let mut data = vec![0; len];
    let mut buffer = BlockBuf::new(FRAME_BLOCKS);
    for (frame, moves) in frames.values() {
        let blocks = frame.read_all_blocking(&mut buffer).map_err(|error| {
            Error::new(Kind::Corrupt, "cannot drain what the log holds").with_source(error)
        })?;
        for Move { from, count, to } in moves {
            let start = to_usize(u64::from(*from) * BLOCK_BYTES);
            let bytes = to_usize(u64::from(*count)) * BLOCK_LEN;
            data[*to..*to + bytes].copy_from_slice(&blocks[start..start + bytes]);
        }
    }
    debug_assert!(to_u64(data.len()).is_multiple_of(BLOCK_BYTES));
    Ok(data)
}
