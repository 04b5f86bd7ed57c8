//! The path of a read: layers, then map, then cache, then store.
//!
//! What a range consists of is settled under one lock of the layers; the pieces are then read
//! without it. A piece in the log pins its frame, a piece in a blob is immutable, so nothing that
//! happens meanwhile can change what was settled.

use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use wal::Place;

use super::{Disk, Piece, State};
use crate::blob::Location;
use crate::error::{Error, Kind, Result};
use crate::fetch::Fetcher;
use crate::geometry::{BLOCK_BYTES, BlockRange, to_usize};
use crate::map::{self, Root};

/// Pieces of one request that are read side by side.
const PIECES_AT_ONCE: usize = 16;

/// A part of an answer, in whole blocks.
#[derive(Debug, Clone)]
pub enum Part {
    /// These bytes.
    Data(Bytes),
    /// So many bytes of zeroes.
    Zero(u64),
}

impl Part {
    /// Bytes of the part.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Data(data) => crate::geometry::to_u64(data.len()),
            Self::Zero(len) => *len,
        }
    }

    /// Whether the part has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What is known about a stretch of blocks without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// Some data.
    Data,
    /// Reads as zeroes and takes no space.
    Hole,
}

impl Disk {
    /// Reads the blocks that a byte range touches, in order.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] naming the place when a checksum does not match, [`Kind::Poisoned`] when the
    /// disk has stopped.
    pub async fn read(&self, blocks: BlockRange) -> Result<Vec<Part>> {
        let (pieces, root) = self.resolve(blocks)?;
        read_pieces(&self.fetcher, &root, pieces).await
    }

    /// Reads whole blocks into a buffer of their size.
    pub(super) async fn read_blocks_into(&self, blocks: BlockRange, out: &mut [u8]) -> Result<()> {
        copy_parts(&self.read(blocks).await?, out);
        Ok(())
    }

    /// Which runs of a range hold data.
    ///
    /// # Errors
    /// As [`Disk::read`].
    pub async fn allocation(&self, blocks: BlockRange) -> Result<Vec<(BlockRange, Allocation)>> {
        let (pieces, root) = self.resolve(blocks)?;
        allocate_pieces(&self.fetcher, &root, pieces).await
    }

    fn resolve(&self, blocks: BlockRange) -> Result<(Vec<(BlockRange, Piece)>, Root)> {
        let layers = self.layers();
        if let State::Stopped(_) = &layers.state {
            Self::check_serving(&layers)?;
        }
        Ok((layers.resolve(blocks), layers.root))
    }
}

/// Reads settled pieces. Several are read side by side: a long request crosses many frames.
pub(super) async fn read_pieces(
    fetcher: &Fetcher,
    root: &Root,
    mut pieces: Vec<(BlockRange, Piece)>,
) -> Result<Vec<Part>> {
    if pieces.len() == 1 {
        let (range, piece) = pieces.remove(0);
        return read_piece(fetcher, root, range, piece).await;
    }
    let reads: Vec<_> =
        pieces.into_iter().map(|(range, piece)| read_piece(fetcher, root, range, piece)).collect();
    let parts: Vec<Vec<Part>> = stream::iter(reads).buffered(PIECES_AT_ONCE).try_collect().await?;
    Ok(parts.into_iter().flatten().collect())
}

async fn read_piece(
    fetcher: &Fetcher,
    root: &Root,
    range: BlockRange,
    piece: Piece,
) -> Result<Vec<Part>> {
    let pieces = match piece {
        Piece::Zero => return Ok(vec![Part::Zero(range.count() * BLOCK_BYTES)]),
        Piece::Log(place) => return Ok(vec![Part::Data(read_log(place, range).await?)]),
        Piece::Blob(location) => return Ok(vec![read_location(fetcher, range, location).await?]),
        Piece::Map => map::lookup(root, range, fetcher.pages()).await?,
    };
    let reads: Vec<_> = pieces
        .into_iter()
        .map(|(run, location)| read_location(fetcher, run, location.unwrap_or(Location::Zero)))
        .collect();
    stream::iter(reads).buffered(PIECES_AT_ONCE).try_collect().await
}

/// Says of settled pieces whether they hold data.
pub(super) async fn allocate_pieces(
    fetcher: &Fetcher,
    root: &Root,
    pieces: Vec<(BlockRange, Piece)>,
) -> Result<Vec<(BlockRange, Allocation)>> {
    let mut found = Vec::new();
    for (range, piece) in pieces {
        match piece {
            Piece::Zero | Piece::Blob(Location::Zero) => found.push((range, Allocation::Hole)),
            Piece::Log(_) | Piece::Blob(_) => found.push((range, Allocation::Data)),
            Piece::Map => {
                for (run, location) in map::lookup(root, range, fetcher.pages()).await? {
                    found.push((
                        run,
                        match location {
                            None | Some(Location::Zero) => Allocation::Hole,
                            Some(Location::Data { .. }) => Allocation::Data,
                        },
                    ));
                }
            }
        }
    }
    Ok(found)
}

/// Copies parts one after another into a buffer of their total size.
///
/// # Panics
/// When the sizes differ.
pub(super) fn copy_parts(parts: &[Part], out: &mut [u8]) {
    let mut at = 0;
    for part in parts {
        let end = at + to_usize(part.len());
        match part {
            Part::Data(data) => out[at..end].copy_from_slice(data),
            Part::Zero(_) => out[at..end].fill(0),
        }
        at = end;
    }
    assert!(at == out.len(), "parts fill the buffer");
}

/// Reads undrained blocks: from memory when they are still staged, else from the log on a thread
/// that may block.
async fn read_log(place: Place, range: BlockRange) -> Result<Bytes> {
    let count = u32::try_from(range.count()).expect("a record has at most one frame");
    let in_memory = place.is_in_memory();
    let read = move || {
        let mut out = vec![0; to_usize(u64::from(count) * BLOCK_BYTES)];
        place.read_blocking(0, count, &mut out).map(|()| Bytes::from(out)).map_err(|error| {
            Error::new(Kind::Corrupt, "cannot read undrained blocks").with_source(error)
        })
    };
    if in_memory {
        return read();
    }
    tokio::task::spawn_blocking(read).await.expect("reads of the log do not panic")
}

async fn read_location(fetcher: &Fetcher, range: BlockRange, location: Location) -> Result<Part> {
    match location {
        Location::Zero => Ok(Part::Zero(range.count() * BLOCK_BYTES)),
        Location::Data { .. } => Ok(Part::Data(fetcher.read(range, &location).await?)),
    }
}
