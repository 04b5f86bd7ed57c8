//! Builds a blob from the extents of one cut.

use bytes::Bytes;

use super::compress::Compressor;
use super::footer::{BlobExtent, Footer, TRAILER_LEN};
use super::frame::{Payload, encode_frame};
use super::{Compression, FRAME_BLOCKS_MAX, Location};
use crate::extent_map::Advance;
use crate::geometry::{BLOCK_LEN, BlockRange, to_u64};
use crate::ids::ObjectRef;

/// A finished blob: the bytes to put, and what they hold.
#[derive(Debug, Clone)]
pub struct Blob {
    /// Which object it is.
    pub object: ObjectRef,
    /// Its bytes.
    pub bytes: Bytes,
    /// How many of them, at the end, are footer and trailer.
    pub footer_len: u32,
    /// What it holds, ascending.
    pub extents: Vec<BlobExtent>,
}

impl Blob {
    /// Blocks of data, zeros not counted.
    #[must_use]
    pub fn data_blocks(&self) -> u64 {
        let data = self.extents.iter().filter(|extent| extent.location != Location::Zero);
        data.map(|extent| extent.range.count()).sum()
    }
}

/// Room taken at once for the usual blob; what it does not need was never touched.
const USUAL_BYTES: usize = 17 << 20;

/// Collects data and zeros into a blob.
///
/// Blocks may come in any order, each at most once. Those that come in ascending order share frames,
/// so that neighbours on the disk are neighbours in the blob.
#[derive(Debug)]
pub struct BlobBuilder {
    blob: ObjectRef,
    compressor: Compressor,
    bytes: Vec<u8>,
    frame_lens: Vec<u32>,
    /// Extents in the order they came. Until their frame is written, `frame_len` is 0.
    extents: Vec<BlobExtent>,
    /// Where the extents of the open frame start.
    open_from: usize,
    open: OpenFrame,
}

#[derive(Debug, Default)]
struct OpenFrame {
    runs: Vec<BlockRange>,
    crcs: Vec<u32>,
    data: Vec<u8>,
}

impl BlobBuilder {
    /// A blob without extents.
    #[must_use]
    pub fn new(blob: ObjectRef, compression: Compression) -> Self {
        Self {
            blob,
            compressor: Compressor::new(compression),
            bytes: Vec::with_capacity(USUAL_BYTES),
            frame_lens: Vec::new(),
            extents: Vec::new(),
            open_from: 0,
            open: OpenFrame::default(),
        }
    }

    /// Whether nothing was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Bytes so far, the open frame counted as if it could not be compressed: when to finish.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() + self.open.data.len()
    }

    /// Adds consecutive blocks from `first` on, one per entry of `crcs`: the checksums computed when
    /// the bytes arrived, which are not computed again. `origin` is where the cleaner found them.
    ///
    /// # Panics
    /// When `data` is not one block per checksum.
    pub fn push(
        &mut self,
        first: u64,
        lsn: u64,
        origin: Option<Location>,
        crcs: &[u32],
        data: &[u8],
    ) {
        assert_eq!(data.len(), crcs.len() * BLOCK_LEN, "one block of data per checksum");
        let mut at = 0;
        while at < crcs.len() {
            let start = first + to_u64(at);
            if self.open.runs.last().is_some_and(|run| start < run.end) {
                self.close_frame();
            }
            let index = self.open.crcs.len();
            let count = (FRAME_BLOCKS_MAX - index).min(crcs.len() - at);
            let range = BlockRange::new(start, to_u64(count));
            self.open.add(
                range,
                &crcs[at..at + count],
                &data[at * BLOCK_LEN..(at + count) * BLOCK_LEN],
            );
            let origin = origin.map(|origin| origin.advance(to_u64(at)));
            self.add_extent(BlobExtent { range, location: self.place(index), lsn, origin });
            if self.open.crcs.len() == FRAME_BLOCKS_MAX {
                self.close_frame();
            }
            at += count;
        }
    }

    /// Adds blocks that are zeros, any number of them.
    ///
    /// # Panics
    /// When the range is empty.
    pub fn push_zero(&mut self, range: BlockRange, lsn: u64) {
        assert!(!range.is_empty(), "zeros without a block");
        // It goes in front of the open frame's extents, which are still to be given their place.
        self.extents.insert(
            self.open_from,
            BlobExtent { range, location: Location::Zero, lsn, origin: None },
        );
        self.open_from += 1;
    }

    /// Writes the footer.
    ///
    /// # Panics
    /// When a block was added twice.
    #[must_use]
    pub fn finish(mut self) -> Blob {
        self.close_frame();
        self.extents.sort_unstable_by_key(|extent| extent.range.start);
        let footer = Footer { blob: self.blob, frame_lens: self.frame_lens, extents: self.extents };
        let encoded = footer.encode();
        self.bytes.extend(&encoded);
        debug_assert!(encoded.len() > TRAILER_LEN);
        Blob {
            object: self.blob,
            bytes: self.bytes.into(),
            footer_len: u32::try_from(encoded.len()).expect("footers are far below 4 GiB"),
            extents: footer.extents,
        }
    }

    fn place(&self, index: usize) -> Location {
        Location::Data {
            blob: self.blob,
            frame_offset: u32::try_from(self.bytes.len()).expect("blobs are below 4 GiB"),
            frame_len: 0,
            index: u8::try_from(index).expect("at most 32 blocks in a frame"),
        }
    }

    /// Adds an extent of the open frame, to the one before where it continues that.
    fn add_extent(&mut self, extent: BlobExtent) {
        if self.extents.len() > self.open_from
            && let Some(last) = self.extents.last_mut()
            && continues(last, &extent)
        {
            last.range.end = extent.range.end;
        } else {
            self.extents.push(extent);
        }
    }

    fn close_frame(&mut self) {
        if self.open.crcs.is_empty() {
            return;
        }
        let open = &mut self.open;
        let compressed = self.compressor.compress(&open.data);
        let payload = Payload { runs: &open.runs, crcs: &open.crcs, raw: &open.data, compressed };
        let len = encode_frame(&mut self.bytes, &self.blob, &payload);
        self.frame_lens.push(len);
        for extent in &mut self.extents[self.open_from..] {
            if let Location::Data { frame_len, .. } = &mut extent.location {
                *frame_len = len;
            }
        }
        self.open_from = self.extents.len();
        open.runs.clear();
        open.crcs.clear();
        open.data.clear();
    }
}

impl OpenFrame {
    fn add(&mut self, range: BlockRange, crcs: &[u32], data: &[u8]) {
        match self.runs.last_mut() {
            Some(run) if run.end == range.start => run.end = range.end,
            _ => self.runs.push(range),
        }
        self.crcs.extend(crcs);
        self.data.extend(data);
    }
}

/// Whether `next`, of the same frame, is one extent with `last`.
fn continues(last: &BlobExtent, next: &BlobExtent) -> bool {
    let count = last.range.count();
    last.range.end == next.range.start
        && last.lsn == next.lsn
        && last.location.joins(count, &next.location)
        && match (&last.origin, &next.origin) {
            (None, None) => true,
            (Some(last), Some(next)) => last.joins(count, next),
            _ => false,
        }
}
