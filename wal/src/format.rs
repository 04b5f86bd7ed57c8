//! The bytes of the log: segment headers and frame headers. Nothing else encodes or decodes them.
//!
//! A segment is a file of 4 KiB blocks. Block 0 is its header; frames follow without gaps:
//!
//! ```text
//! segment   ┌────────────┬──────────────┬──────┬──────┬──────────────┬──────┬──
//!           │ segment    │ frame header │ data │ data │ frame header │ data │ …
//!           │ header     │              │      │      │              │      │
//!           └────────────┴──────────────┴──────┴──────┴──────────────┴──────┴──
//! block       0            1              2      3      4              5
//! ```
//!
//! All numbers are little-endian; all offsets and lengths below are in bytes. Bytes that no field
//! names are reserved: written as zero, and a block where they are not is refused.
//!
//! ```text
//! segment header                                     frame header
//!    0   8  magic "WALSEGMT"                            0   8  magic "WALFRAME"
//!    8   4  version, 1                                  8   4  version, 1
//!   12   4  CRC32 of this block, these 4 as zero       12   4  CRC32 of this block, these 4 as zero
//!   16  16  owner                                      16  16  owner
//!   32   8  epoch                                      32   8  epoch
//!   40   8  nonce of the writing process               40   8  nonce of the writing process
//!   48   8  ordinal of the file in that process        48   8  sequence of its segment
//!   56   8  sequence in the owner's log, from 1;       56   4  block of its segment where it stands
//!           0 in a free segment: then 16..40 and       60   2  records in it; 0 in an idle marker
//!           64..80 are zero                            62   2  data blocks in it
//!   64   8  LSN that its first record will have        64   8  LSN of its first record, or next one
//!   72   8  LSN known synced when it was opened        72   8  LSN known synced when it was written
//!   80   4  length of the segment in blocks           128 256  CRC32 of each data block
//!                                                     384 24×n record table
//!
//! record (24 bytes; its LSN is the frame's first plus its index)
//!    0   8  first block
//!    8   8  blocks; of a barrier: bytes of payload
//!   16   1  kind: 1 write, 2 zeroes, 3 discard, 4 barrier
//!   17   1  index of its first data block in the frame
//!   18   1  data blocks: as many as blocks (write), none (zeroes, discard), one (barrier)
//!   20   4  CRC32 of owner, epoch, nonce, its LSN, bytes 0..20 and the CRC32s of its data blocks
//! ```
//!
//! The segment's sequence and the nonce bind a frame to one use of one file, its block to one place
//! in it: a frame of an earlier use, of another process, of another owner or from another place
//! never passes for the one that should be there. The record's own CRC serves the staging ring,
//! where a frame is recoverable record by record before its header is complete.
//!
//! Version history: 1, the first. A reader that meets a higher version refuses the whole directory
//! (`ErrorKind::Version`): it cannot know what it would lose.

use crc32fast::Hasher;

use crate::lsn::{Lsn, OwnerId};

/// Bytes of a block, the unit of everything in the log.
pub const BLOCK_BYTES: usize = 4096;
/// The most data blocks in one frame: 256 KiB, so that writes of a power of two fill it exactly.
pub const FRAME_BLOCKS: u32 = 64;
/// The most records in one frame; what the header has room for, with some in reserve.
pub const FRAME_RECORDS: u32 = 128;
/// The longest payload of a barrier: one block.
pub const BARRIER_BYTES: usize = BLOCK_BYTES;

pub(crate) const BLOCK: u64 = 4096;
/// A whole frame: its header and its data.
pub(crate) const SLOT_BLOCKS: u32 = 1 + FRAME_BLOCKS;
pub(crate) const SLOT_BYTES: usize = index(SLOT_BLOCKS) * BLOCK_BYTES;

const VERSION: u32 = 1;
const SEGMENT_MAGIC: [u8; 8] = *b"WALSEGMT";
const FRAME_MAGIC: [u8; 8] = *b"WALFRAME";

const AT_VERSION: usize = 8;
const AT_CRC: usize = 12;
const AT_OWNER: usize = 16;
const AT_EPOCH: usize = 32;
const AT_NONCE: usize = 40;
const AT_ORDINAL: usize = 48;
const AT_SEGMENT_SEQUENCE: usize = 56;
const AT_FRAME_SEQUENCE: usize = 48;
const AT_FRAME_BLOCK: usize = 56;
const AT_RECORDS: usize = 60;
const AT_BLOCKS: usize = 62;
const AT_FIRST_LSN: usize = 64;
const AT_SYNCED_LSN: usize = 72;
const AT_LENGTH: usize = 80;
const SEGMENT_END: usize = 84;
const FRAME_FIXED_END: usize = 80;
const AT_BLOCK_CRCS: usize = 128;
const AT_TABLE: usize = 384;
const RECORD_BYTES: usize = 24;
const AT_RECORD_CRC: usize = 20;
const AT_TABLE_END: usize = AT_TABLE + index(FRAME_RECORDS) * RECORD_BYTES;

const _: () = assert!(BLOCK_BYTES == 4096 && BLOCK == 4096);
const _: () = assert!(AT_BLOCK_CRCS + index(FRAME_BLOCKS) * 4 == AT_TABLE);
const _: () = assert!(AT_TABLE_END <= BLOCK_BYTES);
const _: () = assert!(FRAME_BLOCKS <= 255 && FRAME_RECORDS <= 65535);
// 63 full frames and the header fill the default segment of 16 MiB to the last block.
const _: () = assert!(1 + 63 * SLOT_BLOCKS == 4096);

/// A count or index of blocks or records as an index into memory.
///
/// The one `as` of the crate: `From` is not const, and usize is at least as wide as u32.
pub(crate) const fn index(number: u32) -> usize {
    const { assert!(size_of::<usize>() >= size_of::<u32>()) };
    number as usize
}

/// Who writes: the owner, its epoch, and the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) owner: OwnerId,
    pub(crate) epoch: u64,
    pub(crate) nonce: u64,
}

/// What block 0 of a segment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    /// The process that created the file and the only one that ever writes it.
    pub(crate) nonce: u64,
    pub(crate) ordinal: u64,
    pub(crate) blocks: u32,
    /// Whose it is; `None` in a segment that waits in the pool.
    pub(crate) held: Option<Holding>,
}

/// The use of a segment by one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) owner: OwnerId,
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
    pub(crate) first_lsn: Lsn,
    pub(crate) synced_lsn: Lsn,
}

/// The fixed part of a frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHead {
    pub(crate) origin: Origin,
    pub(crate) sequence: u64,
    pub(crate) block: u32,
    pub(crate) first_lsn: Lsn,
    pub(crate) synced_lsn: Lsn,
    pub(crate) records: u32,
    pub(crate) blocks: u32,
}

/// A whole frame header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) head: FrameHead,
    pub(crate) records: Vec<Entry>,
    pub(crate) crcs: Vec<u32>,
}

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Write,
    Zeroes,
    Discard,
    Barrier,
}

/// One line of the record table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    pub(crate) first_block: u64,
    pub(crate) count: u64,
    pub(crate) data_index: u32,
    pub(crate) data_blocks: u32,
}

/// Why a block is not the header that was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Another magic number, or zeros.
    Magic,
    Version(u32),
    Crc {
        stored: u32,
        computed: u32,
    },
    /// The CRC holds and the contents do not make sense: a bug, or somebody's forgery.
    Contents,
    /// A frame of another use, place, process or owner.
    Foreign,
}

impl std::fmt::Display for Flaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic => f.write_str("no header"),
            Self::Version(version) => write!(f, "unknown version {version}"),
            Self::Crc { stored, computed } => {
                write!(f, "header crc mismatch: stored {stored:#010x}, computed {computed:#010x}")
            }
            Self::Contents => f.write_str("header with impossible contents"),
            Self::Foreign => f.write_str("frame that belongs elsewhere"),
        }
    }
}

impl SegmentHeader {
    /// Writes this header over `block`.
    pub(crate) fn encode(&self, block: &mut [u8]) {
        assert_eq!(block.len(), BLOCK_BYTES);
        block.fill(0);
        block[..8].copy_from_slice(&SEGMENT_MAGIC);
        put_u32(block, AT_VERSION, VERSION);
        put_u64(block, AT_NONCE, self.nonce);
        put_u64(block, AT_ORDINAL, self.ordinal);
        put_u32(block, AT_LENGTH, self.blocks);
        if let Some(held) = &self.held {
            assert!(held.sequence > 0);
            block[AT_OWNER..AT_EPOCH].copy_from_slice(held.owner.as_bytes());
            put_u64(block, AT_EPOCH, held.epoch);
            put_u64(block, AT_SEGMENT_SEQUENCE, held.sequence);
            put_u64(block, AT_FIRST_LSN, held.first_lsn.get());
            put_u64(block, AT_SYNCED_LSN, held.synced_lsn.get());
        }
        seal(block);
    }

    /// Reads block 0 of a segment.
    pub(crate) fn decode(block: &[u8]) -> Result<Self, Flaw> {
        check(block, SEGMENT_MAGIC)?;
        let sequence = get_u64(block, AT_SEGMENT_SEQUENCE);
        let blocks = get_u32(block, AT_LENGTH);
        let held = Holding {
            owner: get_owner(block),
            epoch: get_u64(block, AT_EPOCH),
            sequence,
            first_lsn: Lsn::new(get_u64(block, AT_FIRST_LSN)),
            synced_lsn: Lsn::new(get_u64(block, AT_SYNCED_LSN)),
        };
        let free_is_blank = sequence > 0
            || (is_zero(&block[AT_OWNER..AT_NONCE]) && is_zero(&block[AT_FIRST_LSN..AT_LENGTH]));
        let makes_sense = free_is_blank && is_zero(&block[SEGMENT_END..]) && blocks > SLOT_BLOCKS;
        if !makes_sense || (sequence > 0 && held.first_lsn <= held.synced_lsn) {
            return Err(Flaw::Contents);
        }
        Ok(Self {
            nonce: get_u64(block, AT_NONCE),
            ordinal: get_u64(block, AT_ORDINAL),
            blocks,
            held: (sequence > 0).then_some(held),
        })
    }
}

impl FrameHead {
    /// Completes a header block whose records were put there by [`put_record`].
    pub(crate) fn finish(&self, block: &mut [u8]) {
        assert_eq!(block.len(), BLOCK_BYTES);
        assert!(self.records <= FRAME_RECORDS);
        assert!(self.blocks <= FRAME_BLOCKS);
        block[..8].copy_from_slice(&FRAME_MAGIC);
        put_u32(block, AT_VERSION, VERSION);
        block[AT_OWNER..AT_EPOCH].copy_from_slice(self.origin.owner.as_bytes());
        put_u64(block, AT_EPOCH, self.origin.epoch);
        put_u64(block, AT_NONCE, self.origin.nonce);
        put_u64(block, AT_FRAME_SEQUENCE, self.sequence);
        put_u32(block, AT_FRAME_BLOCK, self.block);
        put_u16(block, AT_RECORDS, self.records);
        put_u16(block, AT_BLOCKS, self.blocks);
        put_u64(block, AT_FIRST_LSN, self.first_lsn.get());
        put_u64(block, AT_SYNCED_LSN, self.synced_lsn.get());
        seal(block);
    }

    /// The LSN after the last record of the frame.
    pub(crate) fn end_lsn(&self) -> Lsn {
        self.first_lsn.plus(u64::from(self.records))
    }

    /// Whether this head is bound to the given use of a segment and the given place in it.
    pub(crate) fn stands_at(&self, origin: &Origin, sequence: u64, block: u32) -> bool {
        self.origin == *origin && self.sequence == sequence && self.block == block
    }
}

impl FrameHeader {
    /// Reads a frame header, wherever it stands; the caller checks [`FrameHead::stands_at`].
    pub(crate) fn decode(block: &[u8]) -> Result<Self, Flaw> {
        check(block, FRAME_MAGIC)?;
        let head = FrameHead {
            origin: Origin {
                owner: get_owner(block),
                epoch: get_u64(block, AT_EPOCH),
                nonce: get_u64(block, AT_NONCE),
            },
            sequence: get_u64(block, AT_FRAME_SEQUENCE),
            block: get_u32(block, AT_FRAME_BLOCK),
            first_lsn: Lsn::new(get_u64(block, AT_FIRST_LSN)),
            synced_lsn: Lsn::new(get_u64(block, AT_SYNCED_LSN)),
            records: get_u16(block, AT_RECORDS),
            blocks: get_u16(block, AT_BLOCKS),
        };
        if head.records > FRAME_RECORDS
            || head.blocks > FRAME_BLOCKS
            || head.first_lsn <= head.synced_lsn
            || head.first_lsn.get().checked_add(u64::from(head.records)).is_none()
        {
            return Err(Flaw::Contents);
        }
        let crcs_end = AT_BLOCK_CRCS + index(head.blocks) * 4;
        let table_end = AT_TABLE + index(head.records) * RECORD_BYTES;
        if !is_zero(&block[FRAME_FIXED_END..AT_BLOCK_CRCS])
            || !is_zero(&block[crcs_end..AT_TABLE])
            || !is_zero(&block[table_end..])
        {
            return Err(Flaw::Contents);
        }
        let crcs: Vec<u32> = (0..head.blocks).map(|at| block_crc(block, at)).collect();
        let seed = RecordSeed::new(&head.origin);
        let mut records = Vec::with_capacity(index(head.records));
        let mut data_blocks = 0;
        for at in 0..head.records {
            let lsn = head.first_lsn.plus(u64::from(at));
            let entry = get_record(block, at, &seed, lsn).ok_or(Flaw::Contents)?;
            if entry.data_index != data_blocks {
                return Err(Flaw::Contents);
            }
            data_blocks += entry.data_blocks;
            records.push(entry);
        }
        if data_blocks != head.blocks {
            return Err(Flaw::Contents);
        }
        Ok(Self { head, records, crcs })
    }
}

/// What binds a record's own CRC to its writer: the CRC state after owner, epoch and nonce.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordSeed(u32);

impl RecordSeed {
    pub(crate) fn new(origin: &Origin) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(origin.owner.as_bytes());
        hasher.update(&origin.epoch.to_le_bytes());
        hasher.update(&origin.nonce.to_le_bytes());
        Self(hasher.finalize())
    }

    fn crc(self, lsn: Lsn, fields: &[u8], block_crcs: &[u8]) -> u32 {
        let mut hasher = Hasher::new_with_initial(self.0);
        hasher.update(&lsn.get().to_le_bytes());
        hasher.update(fields);
        hasher.update(block_crcs);
        hasher.finalize()
    }
}

/// Writes record `at` of a frame into its header block: its line and the CRCs of its data blocks.
pub(crate) fn put_record(
    block: &mut [u8],
    at: u32,
    entry: &Entry,
    crcs: &[u32],
    seed: RecordSeed,
    lsn: Lsn,
) {
    assert!(at < FRAME_RECORDS);
    assert_eq!(crcs.len(), index(entry.data_blocks));
    let crcs_at = AT_BLOCK_CRCS + index(entry.data_index) * 4;
    for (i, crc) in crcs.iter().enumerate() {
        put_u32(block, crcs_at + i * 4, *crc);
    }
    let line = AT_TABLE + index(at) * RECORD_BYTES;
    put_u64(block, line, entry.first_block);
    put_u64(block, line + 8, entry.count);
    block[line + 16] = entry.kind.code();
    block[line + 17] = narrow_u8(entry.data_index);
    block[line + 18] = narrow_u8(entry.data_blocks);
    block[line + 19] = 0;
    let crc = seed.crc(
        lsn,
        &block[line..line + AT_RECORD_CRC],
        &block[crcs_at..crcs_at + crcs.len() * 4],
    );
    put_u32(block, line + AT_RECORD_CRC, crc);
}

/// Reads record `at` of a frame from its header block, complete or still under construction.
pub(crate) fn get_record(block: &[u8], at: u32, seed: &RecordSeed, lsn: Lsn) -> Option<Entry> {
    let line = AT_TABLE + index(at) * RECORD_BYTES;
    let entry = Entry {
        kind: EntryKind::from_code(block[line + 16])?,
        first_block: get_u64(block, line),
        count: get_u64(block, line + 8),
        data_index: u32::from(block[line + 17]),
        data_blocks: u32::from(block[line + 18]),
    };
    if block[line + 19] != 0 || !entry.makes_sense() {
        return None;
    }
    let crcs_at = AT_BLOCK_CRCS + index(entry.data_index) * 4;
    let crcs = &block[crcs_at..crcs_at + index(entry.data_blocks) * 4];
    let crc = seed.crc(lsn, &block[line..line + AT_RECORD_CRC], crcs);
    (crc == get_u32(block, line + AT_RECORD_CRC)).then_some(entry)
}

/// The CRC32 that a frame header states for its data block `at`.
pub(crate) fn block_crc(block: &[u8], at: u32) -> u32 {
    assert!(at < FRAME_BLOCKS);
    get_u32(block, AT_BLOCK_CRCS + index(at) * 4)
}

impl Entry {
    fn makes_sense(&self) -> bool {
        let count_fits = match self.kind {
            EntryKind::Write => self.count == u64::from(self.data_blocks) && self.count > 0,
            EntryKind::Zeroes | EntryKind::Discard => self.data_blocks == 0 && self.count > 0,
            EntryKind::Barrier => {
                self.data_blocks == 1 && self.count <= BLOCK && self.first_block == 0
            }
        };
        count_fits
            && self.first_block.checked_add(self.count).is_some()
            && self.data_index + self.data_blocks <= FRAME_BLOCKS
    }
}

impl EntryKind {
    const fn code(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::Zeroes => 2,
            Self::Discard => 3,
            Self::Barrier => 4,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Write),
            2 => Some(Self::Zeroes),
            3 => Some(Self::Discard),
            4 => Some(Self::Barrier),
            _ => None,
        }
    }
}

/// Whether every byte is zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The CRC32 of a header block, its own field taken as zero.
pub(crate) fn header_crc(block: &[u8]) -> u32 {
    let mut hasher = Hasher::new();
    hasher.update(&block[..AT_CRC]);
    hasher.update(&[0; 4]);
    hasher.update(&block[AT_CRC + 4..]);
    hasher.finalize()
}

fn seal(block: &mut [u8]) {
    let crc = header_crc(block);
    put_u32(block, AT_CRC, crc);
}

fn check(block: &[u8], magic: [u8; 8]) -> Result<(), Flaw> {
    assert_eq!(block.len(), BLOCK_BYTES);
    if block[..8] != magic {
        return Err(Flaw::Magic);
    }
    let (stored, computed) = (get_u32(block, AT_CRC), header_crc(block));
    if stored != computed {
        return Err(Flaw::Crc { stored, computed });
    }
    let version = get_u32(block, AT_VERSION);
    if version == VERSION { Ok(()) } else { Err(Flaw::Version(version)) }
}

fn get_owner(block: &[u8]) -> OwnerId {
    OwnerId::new(block[AT_OWNER..AT_EPOCH].try_into().expect("the owner field has 16 bytes"))
}

fn get_u16(block: &[u8], at: usize) -> u32 {
    u32::from(u16::from_le_bytes(block[at..at + 2].try_into().expect("two bytes")))
}

pub(crate) fn get_u32(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"))
}

pub(crate) fn get_u64(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"))
}

fn put_u16(block: &mut [u8], at: usize, value: u32) {
    let value = u16::try_from(value).expect("counts of one frame fit 16 bits");
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u32(block: &mut [u8], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u64(block: &mut [u8], at: usize, value: u64) {
    block[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn narrow_u8(value: u32) -> u8 {
    u8::try_from(value).expect("block indexes of one frame fit 8 bits")
}

#[cfg(test)]
mod tests;
