//! Reads the segments that earlier processes left of one owner and says what is in them. It changes
//! nothing and decides nothing: that is `recover`'s part.
//!
//! A segment is read once, front to back, through a window of a few MiB; every frame is checked
//! down to the CRC32 of each block. What is kept is where things are, never the data.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    BLOCK, BLOCK_BYTES, Entry, EntryKind, Flaw, FrameHeader, Holding, Origin, SLOT_BLOCKS,
    SegmentHeader, index,
};
use crate::frame::{Frame, Home, Place};
use crate::lsn::{Lsn, OwnerId};
use crate::memory::BlockBuf;
use crate::record::ZeroKind;
use crate::segment::{FileId, Pool, PoolFile, Segment};
use crate::storage::{LogFile, Storage};

/// 4 MiB: the device's full rate, and many scans at once in little memory.
const WINDOW_BLOCKS: u32 = 1024;
const _: () = assert!(WINDOW_BLOCKS >= SLOT_BLOCKS);

/// What a recovered record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveredKind {
    /// Blocks with data.
    Write,
    /// A range without data.
    Zero(ZeroKind),
    /// A mark with this many bytes of payload.
    Barrier {
        /// Length of the payload.
        bytes: u32,
    },
}

/// A record that survived.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// Its position.
    pub lsn: Lsn,
    /// What it is.
    pub kind: RecoveredKind,
    /// Its first block; zero of a barrier.
    pub first_block: u64,
    /// How many blocks it covers; zero of a barrier.
    pub count: u64,
    /// Where its blocks are; a zero record has none.
    pub place: Option<Place>,
}

impl Recovered {
    pub(crate) fn new(lsn: Lsn, entry: &Entry, frame: &Arc<Frame>) -> Self {
        let kind = match entry.kind {
            EntryKind::Write => RecoveredKind::Write,
            EntryKind::Zeroes => RecoveredKind::Zero(ZeroKind::Zeroes),
            EntryKind::Discard => RecoveredKind::Zero(ZeroKind::Discard),
            EntryKind::Barrier => RecoveredKind::Barrier {
                bytes: u32::try_from(entry.count).expect("checked when decoded"),
            },
        };
        let is_barrier = entry.kind == EntryKind::Barrier;
        Self {
            lsn,
            kind,
            first_block: entry.first_block,
            count: if is_barrier { 0 } else { entry.count },
            place: (entry.data_blocks > 0)
                .then(|| Place::new(Arc::clone(frame), entry.data_index, entry.data_blocks)),
        }
    }

    /// The payload of a barrier; empty for anything else. Blocks for the device.
    ///
    /// # Errors
    /// When its block cannot be read back.
    pub fn payload_blocking(&self) -> Result<Vec<u8>> {
        let (RecoveredKind::Barrier { bytes }, Some(place)) = (self.kind, &self.place) else {
            return Ok(Vec::new());
        };
        let mut block = vec![0; BLOCK_BYTES];
        place.read_blocking(0, 1, &mut block)?;
        block.truncate(index(bytes));
        Ok(block)
    }
}

/// A segment file of an earlier process, as its header (or, failing that, its frames) name it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) id: FileId,
    /// Its name as seen from the directory.
    pub(crate) name: String,
    pub(crate) blocks: u32,
    pub(crate) held: Holding,
    /// Why the header cannot be believed; then `held` is what the first frame says.
    pub(crate) broken: Option<String>,
    /// Whether its whole header belongs to another file: no crash does that.
    pub(crate) misplaced: bool,
}

/// What a file in the folder turned out to be.
pub(crate) enum Inspected {
    Held(Found),
    Free,
    /// Nothing in it says whose it is.
    Unknown(String),
}

/// Reads the header of a segment file, and its frames if need be.
pub(crate) fn inspect(storage: &dyn Storage, id: FileId, name: &str) -> Result<Inspected> {
    let path = storage.path().join(name);
    let io = |e| Error::io(format!("read segment {}", path.display()), e);
    let file = storage.open(name).map_err(io)?;
    let bytes = file.bytes().map_err(io)?;
    let blocks = u32::try_from(bytes / BLOCK).unwrap_or(u32::MAX);
    let mut window = Window::new(&*file, blocks.min(1), 1);
    let header = match window.get(0, 1).map_err(io)? {
        Some(block) => SegmentHeader::decode(block),
        None => Err(Flaw::Magic),
    };
    let broken = match header {
        Err(Flaw::Version(version)) => {
            let reason = format!("segment {} has unknown version {version}", path.display());
            return Err(Error::new(ErrorKind::Version, reason));
        }
        Ok(header) if (header.nonce, header.ordinal) != (id.nonce, id.ordinal) => {
            let stated = FileId { nonce: header.nonce, ordinal: header.ordinal };
            let Some(held) = header.held else {
                return Ok(Inspected::Unknown(format!("header of free segment {stated}")));
            };
            let broken = Some(format!("the header is that of segment {stated}"));
            let name = name.to_owned();
            return Ok(Inspected::Held(Found {
                id,
                name,
                blocks: header.blocks,
                held,
                broken,
                misplaced: true,
            }));
        }
        Ok(SegmentHeader { held: None, .. }) => return Ok(Inspected::Free),
        Ok(SegmentHeader { held: Some(held), blocks, .. }) => {
            let name = name.to_owned();
            return Ok(Inspected::Held(Found {
                id,
                name,
                blocks,
                held,
                broken: None,
                misplaced: false,
            }));
        }
        Err(flaw) => flaw.to_string(),
    };
    let mut window = Window::new(&*file, blocks, WINDOW_BLOCKS);
    attribute(&mut window, id).map_err(io).map(|found| match found {
        Some((held, blocks)) => Inspected::Held(Found {
            id,
            name: name.to_owned(),
            blocks,
            held,
            broken: Some(broken),
            misplaced: false,
        }),
        None => Inspected::Unknown(broken),
    })
}

/// Finds out from its frames whose a segment without a header is.
fn attribute(window: &mut Window<'_>, id: FileId) -> std::io::Result<Option<(Holding, u32)>> {
    // The first frame is of the newest use: each use of a recycled file writes over it again.
    let mut block = 1;
    while let Some(bytes) = window.get(block, 1)? {
        if let Ok(FrameHeader { head, .. }) = FrameHeader::decode(bytes)
            && head.origin.nonce == id.nonce
            && head.block == block
        {
            let held = Holding {
                owner: head.origin.owner,
                epoch: head.origin.epoch,
                sequence: head.sequence,
                first_lsn: head.first_lsn,
                synced_lsn: head.synced_lsn,
            };
            return Ok(Some((held, window.end)));
        }
        block += 1;
    }
    Ok(None)
}

/// What all segments of one owner hold.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// The segments, in their order.
    pub(crate) segments: Vec<Scanned>,
    /// Every record of a sound frame that no later process took over, in LSN order.
    pub(crate) records: VecDeque<Recovered>,
    /// Places where something else was found than a frame that should be there.
    pub(crate) flaws: Vec<Misfit>,
    /// The highest LSN that anything states as synced.
    pub(crate) synced: Lsn,
    pub(crate) bytes: u64,
}

/// A scanned segment.
#[derive(Debug)]
pub(crate) struct Scanned {
    pub(crate) segment: Arc<Segment>,
    /// The last record in it, or the one before its first.
    pub(crate) last: Lsn,
}

/// A place in the log where the scan lost the thread.
#[derive(Debug)]
pub(crate) struct Misfit {
    /// The record that should begin there.
    pub(crate) expected: Lsn,
    /// What is wrong, and where.
    pub(crate) reason: String,
    /// Whether the frame that begins there was cut or torn: its bytes.
    pub(crate) torn_bytes: u64,
}

/// Reads all segments of one owner and epoch.
pub(crate) fn scan(
    pool: &Arc<Pool>,
    storage: &dyn Storage,
    owner: OwnerId,
    epoch: u64,
    mut found: Vec<Found>,
    alive: &Arc<AtomicUsize>,
) -> Result<Scan> {
    found.sort_by_key(|found| (found.held.sequence, found.id));
    let mut scan = Scan::default();
    for (i, this) in found.iter().enumerate() {
        // What a later segment begins with was written again there: frames that an older process
        // left from there on are void, whatever they say.
        let limit = found[i + 1..].iter().map(|later| later.held.first_lsn).min();
        let path = pool.path_of(&this.name);
        if let Some(twin) = found.get(i + 1).filter(|next| next.held.sequence == this.held.sequence)
        {
            let reason = format!(
                "segments {} and {} are both number {} of owner {owner}",
                path.display(),
                pool.path_of(&twin.name).display(),
                this.held.sequence
            );
            return Err(Error::new(ErrorKind::Damaged, reason));
        }
        if let Some(broken) = this.broken.as_ref().filter(|_| this.misplaced) {
            let reason = format!("log of owner {owner} is damaged: {broken} in {}", path.display());
            return Err(Error::new(ErrorKind::Damaged, reason));
        }
        let io = |e| Error::io(format!("read segment {}", path.display()), e);
        let file: Arc<dyn LogFile> = Arc::from(storage.open(&this.name).map_err(io)?);
        let file = PoolFile { id: this.id, file, blocks: this.blocks };
        let mut segment = Segment::new(pool, file, this.held.sequence, alive);
        segment.set_folder(this.name.rsplit_once('/').map_or("", |(folder, _)| folder));
        let segment = Arc::new(segment);
        let origin = Origin { owner, epoch, nonce: this.id.nonce };
        let mut walk = Walk { scan: &mut scan, segment, origin, expected: this.held.first_lsn };
        walk.segment(this, limit.unwrap_or(Lsn::new(u64::MAX))).map_err(io)?;
        let Walk { segment, expected, .. } = walk;
        scan.segments.push(Scanned { segment, last: expected.previous() });
        if let Some(next) = found.get(i + 1).filter(|next| next.held.first_lsn > expected) {
            let number = this.held.sequence + 1;
            if next.held.sequence > number {
                let next = pool.path_of(&next.name);
                let (before, after) = (path.display(), next.display());
                let reason =
                    format!("segment number {number} is missing between {before} and {after}");
                scan.flaws.push(Misfit { expected, reason, torn_bytes: 0 });
            }
        }
    }
    Ok(scan)
}

/// The walk through one segment.
struct Walk<'a> {
    scan: &'a mut Scan,
    segment: Arc<Segment>,
    origin: Origin,
    expected: Lsn,
}

impl Walk<'_> {
    fn segment(&mut self, found: &Found, limit: Lsn) -> std::io::Result<()> {
        let segment = Arc::clone(&self.segment);
        let bytes = segment.file().bytes()?;
        let blocks = u32::try_from(bytes / BLOCK).unwrap_or(u32::MAX).min(segment.blocks());
        let mut window = Window::new(segment.file(), blocks, WINDOW_BLOCKS);
        self.scan.bytes += u64::from(blocks) * BLOCK;
        self.scan.synced = self.scan.synced.max(found.held.synced_lsn);
        if let Some(broken) = &found.broken {
            self.misfit(0, broken.clone(), 0);
        }
        let mut block = 1;
        let mut in_thread = found.broken.is_none();
        while let Some(bytes) = window.get(block, 1)? {
            let header = FrameHeader::decode(bytes).and_then(|header| {
                let stands = header.head.stands_at(&self.origin, found.held.sequence, block);
                if stands { Ok(header) } else { Err(Flaw::Foreign) }
            });
            match header {
                Ok(header) => {
                    let whole = self.frame(&mut window, block, &header, limit, found)?;
                    in_thread = whole && found.broken.is_none();
                    block += 1 + header.head.blocks;
                }
                Err(flaw) => {
                    // Once the thread is lost, only the next sound frame is news.
                    if std::mem::take(&mut in_thread) {
                        self.misfit(block, flaw.to_string(), 0);
                    }
                    block += 1;
                }
            }
        }
        if in_thread && blocks < segment.blocks() {
            let reason = format!("the file ends after {blocks} of {} blocks", segment.blocks());
            self.misfit(blocks, reason, 0);
        }
        Ok(())
    }

    /// Takes in one frame whose header is sound and in its place; `false` if its data is not.
    fn frame(
        &mut self,
        window: &mut Window<'_>,
        block: u32,
        header: &FrameHeader,
        limit: Lsn,
        found: &Found,
    ) -> std::io::Result<bool> {
        let head = &header.head;
        self.scan.synced = self.scan.synced.max(head.synced_lsn);
        if head.first_lsn >= limit {
            return Ok(true);
        }
        let torn_bytes = u64::from(1 + head.blocks) * BLOCK;
        let data = window.get(block + 1, head.blocks)?;
        let broken = match data {
            None => Some((0, "the file ends within this frame".to_owned())),
            Some(data) => find_broken(data, &header.crcs),
        };
        if let Some((at, reason)) = broken {
            self.misfit(block + 1 + at, reason, torn_bytes);
            self.expected = head.end_lsn();
            return Ok(false);
        }
        if found.broken.is_some() {
            // Without its header nothing says that the segment is where it belongs.
            return Ok(true);
        }
        let home = Home { segment: Arc::clone(&self.segment), block };
        let frame = Arc::new(Frame::in_segment(head.first_lsn, &header.crcs, home));
        for (i, entry) in (0..).zip(&header.records) {
            let lsn = head.first_lsn.plus(i);
            if lsn < limit {
                self.scan.records.push_back(Recovered::new(lsn, entry, &frame));
            }
        }
        self.expected = head.end_lsn();
        Ok(true)
    }

    fn misfit(&mut self, block: u32, reason: String, torn_bytes: u64) {
        let reason = format!("{reason} {}", self.segment.describe(block));
        self.scan.flaws.push(Misfit { expected: self.expected, reason, torn_bytes });
    }
}

/// The first block that does not match its CRC32.
fn find_broken(data: &[u8], crcs: &[u32]) -> Option<(u32, String)> {
    (0..).zip(data.chunks_exact(BLOCK_BYTES).zip(crcs)).find_map(|(at, (block, stored))| {
        let computed = crc32fast::hash(block);
        let reason =
            || format!("block crc mismatch: stored {stored:#010x}, computed {computed:#010x}");
        (computed != *stored).then(|| (at, reason()))
    })
}

/// The part of a file that is in memory.
struct Window<'a> {
    file: &'a dyn LogFile,
    /// Blocks of the file that may be read.
    end: u32,
    buffer: BlockBuf,
    start: u32,
    filled: u32,
}

impl<'a> Window<'a> {
    /// A window of so many blocks over the first `end` blocks of a file.
    fn new(file: &'a dyn LogFile, end: u32, blocks: u32) -> Self {
        let buffer = BlockBuf::new(blocks);
        Self { file, end, buffer, start: 0, filled: 0 }
    }

    /// `count` blocks from `block` on; `None` when they pass the end.
    fn get(&mut self, block: u32, count: u32) -> std::io::Result<Option<&[u8]>> {
        if block + count > self.end {
            return Ok(None);
        }
        if block < self.start || block + count > self.start + self.filled {
            let room = u32::try_from(self.buffer.bytes().len() / BLOCK_BYTES).expect("made so");
            let blocks = room.min(self.end - block);
            let out = &mut self.buffer.bytes_mut()[..index(blocks) * BLOCK_BYTES];
            let read = self.file.read_at(out, u64::from(block) * BLOCK)?;
            self.start = block;
            self.filled = u32::try_from(read / BLOCK_BYTES).expect("at most the window");
            if count > self.filled {
                return Ok(None);
            }
        }
        let at = index(block - self.start) * BLOCK_BYTES;
        Ok(Some(&self.buffer.bytes()[at..at + index(count) * BLOCK_BYTES]))
    }
}
