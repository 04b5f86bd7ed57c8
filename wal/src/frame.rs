//! [`Frame`], the blocks of one log write, and [`Place`], where some of them are.
//!
//! A frame begins in a staging slot and ends in a segment. Readers hold a [`Place`] and do not see
//! the change: while the slot holds the frame they copy from memory, later they read the file.
//! Every block is checked against its CRC32 on the way out; a mismatch is an error that names file
//! and offset, never wrong data.

use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::crcs::CrcTable;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, BLOCK_BYTES, FRAME_BLOCKS, index};
use crate::lsn::Lsn;
use crate::memory::{BlockBuf, Slot, is_aligned};
use crate::segment::Segment;

/// The blocks that were, or will be, one write to the log.
#[derive(Debug)]
pub struct Frame {
    first_lsn: Lsn,
    crcs: CrcTable,
    /// The slot, until the frame was written and its slot was needed again.
    slot: RwLock<Option<Slot>>,
    /// Set before the frame is written; its segment lives at least as long as the frame.
    home: OnceLock<Home>,
}

/// Where a frame stands in the log.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) segment: Arc<Segment>,
    pub(crate) block: u32,
}

impl Frame {
    /// A frame to be filled.
    pub(crate) fn in_slot(first_lsn: Lsn, slot: Slot) -> Self {
        Self {
            first_lsn,
            crcs: CrcTable::new(),
            slot: RwLock::new(Some(slot)),
            home: OnceLock::new(),
        }
    }

    /// A frame that is in the log.
    pub(crate) fn in_segment(first_lsn: Lsn, crcs: &[u32], home: Home) -> Self {
        Self {
            first_lsn,
            crcs: CrcTable::from(crcs),
            slot: RwLock::new(None),
            home: OnceLock::from(home),
        }
    }

    /// The LSN of its first record.
    #[must_use]
    pub fn first_lsn(&self) -> Lsn {
        self.first_lsn
    }

    /// How many data blocks it has so far.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.crcs.len()
    }

    /// Whether a read would be answered from memory; it may turn false at any moment.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.slot().is_some()
    }

    /// Reads all its data blocks with one transfer into the start of `buffer` and lends them.
    /// Blocks, when the frame is no longer in memory.
    ///
    /// # Errors
    /// `Damaged` when a block does not match its CRC32; `Io` when the device refuses.
    ///
    /// # Panics
    /// When `buffer` holds fewer than [`Frame::blocks`] blocks.
    pub fn read_all_blocking<'b>(&self, buffer: &'b mut BlockBuf) -> Result<&'b [u8]> {
        let blocks = self.blocks();
        let out = &mut buffer.bytes_mut()[..index(blocks) * BLOCK_BYTES];
        self.read(0, blocks, out)?;
        Ok(out)
    }

    fn read(&self, first: u32, count: u32, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len(), index(count) * BLOCK_BYTES);
        if !self.read_memory(first, count, out)? {
            let home = self.home.get().expect("a frame leaves its slot after it was written");
            home.segment.read(home.block + 1 + first, out)?;
            self.verify(first, count, out)?;
        }
        Ok(())
    }

    /// Reads from memory; `false` when the frame is no longer there.
    fn read_memory(&self, first: u32, count: u32, out: &mut [u8]) -> Result<bool> {
        assert_eq!(out.len(), index(count) * BLOCK_BYTES);
        let slot = self.slot();
        let Some(slot) = slot.as_ref() else { return Ok(false) };
        let start = index(1 + first) * BLOCK_BYTES;
        out.copy_from_slice(&slot.bytes()[start..start + out.len()]);
        self.verify(first, count, out)?;
        Ok(true)
    }

    fn verify(&self, first: u32, count: u32, bytes: &[u8]) -> Result<()> {
        let stored = self.crcs.get(first, count);
        for (i, (stored, block)) in (0..).zip(stored.iter().zip(bytes.chunks_exact(BLOCK_BYTES))) {
            let computed = crc32fast::hash(block);
            if computed != *stored {
                let place = self.describe(first + i);
                let reason = format!(
                    "block crc mismatch {place}: stored {stored:#010x}, computed {computed:#010x}"
                );
                return Err(Error::new(ErrorKind::Damaged, reason));
            }
        }
        Ok(())
    }

    fn describe(&self, block: u32) -> String {
        match self.home.get() {
            Some(home) => home.segment.describe(home.block + 1 + block),
            None => format!("in the staging slot of lsn {}, block {block}", self.first_lsn),
        }
    }

    pub(crate) fn crcs(&self) -> &CrcTable {
        &self.crcs
    }

    pub(crate) fn home(&self) -> Option<&Home> {
        self.home.get()
    }

    pub(crate) fn set_home(&self, home: Home) {
        assert!(self.home.set(home).is_ok(), "a frame has one home");
    }

    /// The slot, to read; a panic elsewhere leaves nothing half-done that a reader could meet.
    pub(crate) fn slot(&self) -> RwLockReadGuard<'_, Option<Slot>> {
        self.slot.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot, to fill or to take away.
    pub(crate) fn slot_mut(&self) -> RwLockWriteGuard<'_, Option<Slot>> {
        self.slot.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where some blocks of one record are. Cheap to clone; the segment stays while one lives.
#[derive(Clone, Debug)]
pub struct Place {
    frame: Arc<Frame>,
    first: u16,
    count: u16,
}

impl Place {
    pub(crate) fn new(frame: Arc<Frame>, first: u32, count: u32) -> Self {
        assert!(first + count <= FRAME_BLOCKS);
        Self { frame, first: narrow(first), count: narrow(count) }
    }

    /// How many blocks lie here.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::from(self.count)
    }

    /// The frame they belong to; reading all of it at once is cheaper than many places of it.
    #[must_use]
    pub fn frame(&self) -> &Arc<Frame> {
        &self.frame
    }

    /// Index of the first block within the data blocks of its frame.
    #[must_use]
    pub fn frame_block(&self) -> u32 {
        u32::from(self.first)
    }

    /// The CRC32 of each block.
    #[must_use]
    pub fn crcs(&self) -> &[u32] {
        self.frame.crcs.get(u32::from(self.first), u32::from(self.count))
    }

    /// Leaves out the first `blocks` blocks.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn advance(&mut self, blocks: u32) {
        assert!(blocks <= self.blocks());
        self.first += narrow(blocks);
        self.count -= narrow(blocks);
    }

    /// Keeps the first `blocks` blocks.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn truncate(&mut self, blocks: u32) {
        assert!(blocks <= self.blocks());
        self.count = narrow(blocks);
    }

    /// Whether a read would be answered from memory; it may turn false at any moment.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.frame.is_in_memory()
    }

    /// Reads `count` blocks from the `first` of this place into `out`, if they are in memory;
    /// `false` if not. Never waits for the device.
    ///
    /// # Errors
    /// `Damaged` when a block does not match its CRC32.
    ///
    /// # Panics
    /// When the range passes the place, or `out` is not `count` blocks long.
    pub fn read_memory(&self, first: u32, count: u32, out: &mut [u8]) -> Result<bool> {
        assert!(first + count <= self.blocks());
        self.frame.read_memory(u32::from(self.first) + first, count, out)
    }

    /// Reads `count` blocks from the `first` of this place into `out`, from memory or the file.
    ///
    /// # Errors
    /// `Damaged` when a block does not match its CRC32; `Io` when the device refuses.
    ///
    /// # Panics
    /// When the range passes the place, or `out` is not `count` blocks long.
    pub fn read_blocking(&self, first: u32, count: u32, out: &mut [u8]) -> Result<()> {
        assert!(first + count <= self.blocks());
        self.frame.read(u32::from(self.first) + first, count, out)
    }
}

fn narrow(blocks: u32) -> u16 {
    u16::try_from(blocks).expect("a frame has at most FRAME_BLOCKS blocks")
}

impl Segment {
    /// Reads whole blocks from `block` on.
    fn read(&self, block: u32, out: &mut [u8]) -> Result<()> {
        if is_aligned(out) {
            return self.read_aligned(block, out);
        }
        let blocks = u32::try_from(out.len() / BLOCK_BYTES).expect("a read is at most a frame");
        let mut aligned = BlockBuf::new(blocks);
        self.read_aligned(block, aligned.bytes_mut())?;
        out.copy_from_slice(aligned.bytes());
        Ok(())
    }

    fn read_aligned(&self, block: u32, out: &mut [u8]) -> Result<()> {
        let offset = u64::from(block) * BLOCK;
        let read = self.file().read_at(out, offset);
        let read = read.map_err(|e| Error::io(format!("read log {}", self.describe(block)), e))?;
        if read < out.len() {
            let reason = format!(
                "log file ends early {}: read {read} of {} bytes",
                self.describe(block),
                out.len()
            );
            return Err(Error::new(ErrorKind::Damaged, reason));
        }
        Ok(())
    }
}
