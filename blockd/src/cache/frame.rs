//! What the cache knows of one frame: its key, the CRCs of its blocks, and where it lies.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::blob::FRAME_BLOCKS_MAX;
use crate::geometry::BLOCK_LEN;
use crate::ids::{DiskId, Nonce, ObjectId, ObjectRef};

/// Most bytes of a frame.
pub(super) const FRAME_LEN_MAX: usize = FRAME_BLOCKS_MAX * BLOCK_LEN;

/// A frame of a blob anywhere in the store. Blobs never change, so neither does what a key stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrameKey {
    /// The blob.
    pub blob: ObjectRef,
    /// Where in the blob the frame begins, in bytes.
    pub offset: u32,
}

impl FrameKey {
    /// Bytes of an encoded key.
    pub(super) const LEN: usize = 44;

    /// The key as bytes, ordered as keys are: disk, epoch, nonce, sequence, offset, all big-endian.
    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let ObjectRef { disk, object } = self.blob;
        let mut bytes = [0; Self::LEN];
        bytes[..16].copy_from_slice(&disk.to_bytes());
        bytes[16..24].copy_from_slice(&object.epoch.to_be_bytes());
        bytes[24..32].copy_from_slice(&object.nonce.0.to_be_bytes());
        bytes[32..40].copy_from_slice(&object.seq.to_be_bytes());
        bytes[40..].copy_from_slice(&self.offset.to_be_bytes());
        bytes
    }

    /// The reverse of [`FrameKey::encode`]; `None` when the length is wrong.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (disk, rest) = bytes.split_first_chunk()?;
        let (epoch, rest) = rest.split_first_chunk()?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (seq, rest) = rest.split_first_chunk()?;
        let offset = u32::from_be_bytes(rest.try_into().ok()?);
        let object = ObjectId {
            epoch: u64::from_be_bytes(*epoch),
            nonce: Nonce(u64::from_be_bytes(*nonce)),
            seq: u64::from_be_bytes(*seq),
        };
        Some(Self { blob: ObjectRef { disk: DiskId::from_bytes(*disk), object }, offset })
    }
}

/// A cached frame. Shared by everything in memory that speaks of the frame.
#[derive(Debug)]
pub(super) struct Frame {
    crcs: Box<[u32]>,
    /// Where the frame begins in the ring, or [`Frame::NOWHERE`].
    position: AtomicU64,
}

impl Frame {
    /// Memory that a frame costs beside its blocks, with its key and its place in a cache.
    pub(super) const OVERHEAD_BYTES: usize = 256;

    const NOWHERE: u64 = u64::MAX;

    /// A frame that is not on the disk yet.
    pub(super) fn new(crcs: Vec<u32>) -> Self {
        Self::at(Self::NOWHERE, crcs)
    }

    /// A frame on the disk.
    pub(super) fn at(position: u64, crcs: Vec<u32>) -> Self {
        Self { crcs: crcs.into(), position: position.into() }
    }

    pub(super) fn crcs(&self) -> &[u32] {
        &self.crcs
    }

    /// Bytes of the frame's blocks.
    pub(super) fn len(&self) -> usize {
        self.crcs.len() * BLOCK_LEN
    }

    pub(super) fn position(&self) -> Option<u64> {
        let position = self.position.load(Ordering::SeqCst);
        (position != Self::NOWHERE).then_some(position)
    }

    pub(super) fn set_position(&self, position: u64) {
        self.position.store(position, Ordering::SeqCst);
    }

    /// All blocks of the frame.
    pub(super) fn whole(&self) -> Part {
        Part::new(0, u8::try_from(self.crcs.len()).expect("a frame has at most 32 blocks"))
    }

    /// Whether the frame has the blocks of `part`.
    pub(super) fn has(&self, part: Part) -> bool {
        part.first() + part.count() <= self.crcs.len()
    }

    /// Whether `bytes` are what was cached as the blocks of `part`.
    pub(super) fn verifies(&self, part: Part, bytes: &[u8]) -> bool {
        let crcs = &self.crcs[part.first()..][..part.count()];
        bytes.len() == part.len()
            && bytes
                .chunks_exact(BLOCK_LEN)
                .zip(crcs)
                .all(|(block, &crc)| crc32fast::hash(block) == crc)
    }
}

/// Neighbouring blocks of a frame, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    first: u8,
    count: u8,
}

impl Part {
    /// # Panics
    /// When `count` is zero.
    pub(super) fn new(first: u8, count: u8) -> Self {
        assert!(count > 0, "a read of no blocks");
        Self { first, count }
    }

    pub(super) fn first(self) -> usize {
        self.first.into()
    }

    pub(super) fn count(self) -> usize {
        self.count.into()
    }

    /// Bytes of the blocks.
    pub(super) fn len(self) -> usize {
        self.count() * BLOCK_LEN
    }

    /// Bytes of the frame before them.
    pub(super) fn start(self) -> usize {
        self.first() * BLOCK_LEN
    }

    /// The numbers of the blocks.
    pub(super) fn blocks(self) -> impl Iterator<Item = u8> {
        self.first..self.first.saturating_add(self.count)
    }
}
