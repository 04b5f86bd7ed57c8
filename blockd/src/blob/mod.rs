//! Blobs: immutable objects with the data of many blocks of one disk.
//!
//! ```text
//! ┌───────┬───────┬─────┬───────┬────────┬─────────┐
//! │ frame │ frame │  …  │ frame │ footer │ trailer │
//! └───────┴───────┴─────┴───────┴────────┴─────────┘
//! ```
//!
//! A `frame` is what one ranged read fetches: at most [`FRAME_BLOCKS_MAX`] blocks, compressed where
//! that pays, with all it takes to know that they are the right ones. The `footer` lists every
//! extent of the blob, with the LSN of its data, so that a blob alone is enough to rebuild its part of
//! the map. The trailer has a fixed size and says where the footer is.
//!
//! The checksum of a block is the one computed when its bytes arrived; encoding only carries it, so
//! a bit that flips anywhere between arrival and answer is found when the frame is decoded.

mod build;
mod compress;
mod footer;
mod frame;
mod location;

pub use build::{Blob, BlobBuilder};
pub use compress::Compression;
pub use footer::{BlobExtent, FOOTER_VERSION, Footer, TRAILER_LEN, decode_footer, footer_len};
pub use frame::{FRAME_VERSION, Frame, decode_frame};
pub use location::Location;

use crate::codec::Malformed;
use crate::error::{Error, Kind};
use crate::ids::ObjectRef;

/// Most blocks in one frame: 128 KiB, a compromise between the bytes fetched to answer a 4 KiB read
/// and the cost of many requests.
pub const FRAME_BLOCKS_MAX: usize = 32;

/// Most bytes of a blob that is being built: far above the usual 8 to 16 MiB, below what the 32-bit
/// offsets of a [`Location`] can say.
pub const BLOB_BYTES_MAX: u64 = 1 << 30;

/// The error of bytes that are not what a blob should hold.
fn corrupt(blob: &ObjectRef, offset: u64, what: &str, why: &Malformed) -> Error {
    Error::new(Kind::Corrupt, format!("blob {}: {what} at offset {offset}: {why}", blob.blob_key()))
        .with_detail("object", blob.blob_key().to_string())
}

#[cfg(test)]
mod tests;
