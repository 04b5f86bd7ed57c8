//! A disk in memory, allocated piece by piece. As an export it is as small as one can be, which
//! makes it the yardstick for what the protocol itself costs.

use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use nbd_server::{
    BlockSizes, Durability, Export, ExportDirectory, ExportError, ExportErrorKind, ExportInfo,
    Extent, ExtentKind, Hole, OpenError, ReadPart,
};

/// The unit of allocation.
const PIECE_BYTES: u64 = 64 << 10;
/// The same as a length in memory.
const PIECE_LEN: usize = 64 << 10;

type Piece = Option<Box<[u8]>>;

/// A disk in memory.
#[derive(Debug)]
pub(crate) struct MemoryDisk {
    name: String,
    size: u64,
    pieces: Vec<RwLock<Piece>>,
}

/// A range within one piece.
struct Span {
    index: usize,
    start: usize,
    len: usize,
}

impl MemoryDisk {
    /// An empty disk.
    pub(crate) fn new(name: &str, size: u64) -> Self {
        let count = size.div_ceil(PIECE_BYTES);
        Self {
            name: name.to_owned(),
            size,
            pieces: (0..count).map(|_| RwLock::default()).collect(),
        }
    }

    /// Cuts a range at the borders of pieces.
    fn spans(offset: u64, len: u64) -> impl Iterator<Item = Span> {
        let end = offset + len;
        let mut at = offset;
        std::iter::from_fn(move || {
            let next = (at / PIECE_BYTES + 1) * PIECE_BYTES;
            let span = Span {
                index: to_usize(at / PIECE_BYTES),
                start: to_usize(at % PIECE_BYTES),
                len: to_usize(next.min(end).saturating_sub(at)),
            };
            at = next;
            (span.len > 0).then_some(span)
        })
    }

    fn change(&self, index: usize, change: impl FnOnce(&mut Piece)) -> Result<(), ExportError> {
        let outside = || ExportError::new(ExportErrorKind::Io, format!("no piece {index}"));
        let piece = self.pieces.get(index).ok_or_else(outside)?;
        change(&mut piece.write().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }

    fn look<T>(&self, index: usize, look: impl FnOnce(&Piece) -> T) -> Result<T, ExportError> {
        let outside = || ExportError::new(ExportErrorKind::Io, format!("no piece {index}"));
        let piece = self.pieces.get(index).ok_or_else(outside)?;
        Ok(look(&piece.read().unwrap_or_else(PoisonError::into_inner)))
    }

    fn zero(&self, offset: u64, len: u64, hole: Hole) -> Result<(), ExportError> {
        for Span { index, start, len } in Self::spans(offset, len) {
            self.change(index, |piece| match (hole, piece) {
                (Hole::Allowed, piece) if len == PIECE_LEN => *piece = None,
                (Hole::Allowed, None) => {}
                (_, piece) => allocated(piece)[start..start + len].fill(0),
            })?;
        }
        Ok(())
    }
}

impl Export for MemoryDisk {
    fn info(&self) -> ExportInfo {
        ExportInfo {
            description: Some("a disk in memory".to_owned()),
            block_sizes: BlockSizes::default(),
            ..ExportInfo::new(&*self.name, self.size)
        }
    }

    fn size(&self) -> u64 {
        self.size
    }

    async fn read(&self, offset: u64, len: u32) -> Result<Vec<ReadPart>, ExportError> {
        let mut parts = Vec::with_capacity(1);
        for Span { index, start, len } in Self::spans(offset, len.into()) {
            parts.push(self.look(index, |piece| match piece {
                Some(bytes) => ReadPart::Data(Bytes::copy_from_slice(&bytes[start..start + len])),
                None => ReadPart::Zero(u32::try_from(len).expect("a piece is small")),
            })?);
        }
        Ok(parts)
    }

    async fn write(&self, offset: u64, data: Bytes, _: Durability) -> Result<(), ExportError> {
        let mut rest = &data[..];
        for Span { index, start, len } in Self::spans(offset, to_u64(data.len())) {
            let (bytes, left) = rest.split_at(len);
            self.change(index, |piece| {
                allocated(piece)[start..start + len].copy_from_slice(bytes);
            })?;
            rest = left;
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), ExportError> {
        Ok(())
    }

    async fn trim(&self, offset: u64, len: u64, _: Durability) -> Result<(), ExportError> {
        self.zero(offset, len, Hole::Allowed)
    }

    async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        hole: Hole,
        _: Durability,
    ) -> Result<(), ExportError> {
        self.zero(offset, len, hole)
    }

    async fn cache(&self, _: u64, _: u64) -> Result<(), ExportError> {
        Ok(())
    }

    async fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, ExportError> {
        let describe = |Span { index, len, .. }| {
            let kind = self.look(index, |piece| match piece {
                Some(_) => ExtentKind::Data,
                None => ExtentKind::Hole,
            })?;
            Ok(Extent { len: to_u64(len), kind })
        };
        Self::spans(offset, len).map(describe).collect()
    }
}

/// Disks by name; a single one is also the default.
#[derive(Debug)]
pub(crate) struct Disks(pub(crate) Vec<Arc<MemoryDisk>>);

impl ExportDirectory for Disks {
    type Export = MemoryDisk;

    async fn open(&self, name: &str) -> Result<Arc<MemoryDisk>, OpenError> {
        match &self.0[..] {
            [only] if name.is_empty() => Ok(Arc::clone(only)),
            disks => disks.iter().find(|disk| disk.name == name).cloned().ok_or(OpenError::Unknown),
        }
    }

    async fn list(&self) -> Vec<String> {
        self.0.iter().map(|disk| disk.name.clone()).collect()
    }
}

/// The bytes of a piece, allocated if it was a hole.
fn allocated(piece: &mut Piece) -> &mut [u8] {
    piece.get_or_insert_with(|| vec![0; PIECE_LEN].into_boxed_slice())
}

fn to_u64(len: usize) -> u64 {
    u64::try_from(len).expect("a length in memory fits 64 bits")
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("a disk in memory fits into memory")
}
