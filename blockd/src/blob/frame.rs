//! A frame: what one ranged read of a blob fetches, complete with the means to check it.
//!
//! ```text
//!  offset  bytes   field
//!       0      4   magic "bkFR"
//!       4      1   version, 1
//!       5      1   codec: 0 raw, 1 zstd
//!       6      1   cipher: 0, reserved
//!       7      1   blocks n, 1 to 32
//!       8      4   bytes of the payload as stored
//!      12      4   CRC32 of the payload as stored; 0 when raw, where the blocks' own cover it
//!      16     16   disk           ┐
//!      32      8   epoch          │ the blob this frame is part of
//!      40      8   nonce          │
//!      48      8   seq            ┘
//!      56     4n   CRC32 of each block, from when it arrived
//!       …          runs of block numbers: per run varint gap to the end of the run before (from 0 for
//!                  the first; at least 1 for the others), then varint blocks less 1
//!       …      4   CRC32 of all the above
//!       …          payload: n blocks, raw or compressed as one
//! ```
//!
//! Block numbers ascend. A reader refuses a version, codec or cipher that it does not know.
//! Version history: 1, the first.

use bytes::Bytes;

use super::{FRAME_BLOCKS_MAX, corrupt};
use crate::codec::{Decoded, Reader, put_varint, seal};
use crate::error::Result;
use crate::geometry::{BLOCK_LEN, BlockRange, to_u64};
use crate::ids::{DiskId, Nonce, ObjectId, ObjectRef};

const MAGIC: [u8; 4] = *b"bkFR";
/// The newest version of frames that this code writes and reads.
pub const FRAME_VERSION: u8 = 1;
const CODEC_RAW: u8 = 0;
const CODEC_ZSTD: u8 = 1;
const CIPHER_NONE: u8 = 0;

/// The blocks of a frame, decompressed and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Which blocks they are, ascending.
    pub runs: Vec<BlockRange>,
    /// CRC32 of each.
    pub crcs: Vec<u32>,
    /// Their bytes, one after the other.
    pub blocks: Bytes,
}

impl Frame {
    /// How many blocks there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.crcs.len()
    }

    /// Never: a frame has at least one block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.crcs.is_empty()
    }

    /// The number of each block, in the order of their bytes.
    pub fn block_numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|run| run.start..run.end)
    }

    /// The bytes of the block at `index`, without copying them.
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn block(&self, index: usize) -> Bytes {
        self.blocks.slice(index * BLOCK_LEN..(index + 1) * BLOCK_LEN)
    }
}

/// What a frame's header says of its payload.
pub(super) struct Payload<'a> {
    pub(super) runs: &'a [BlockRange],
    pub(super) crcs: &'a [u32],
    /// The blocks, one after the other.
    pub(super) raw: &'a [u8],
    /// The same, compressed, where that pays.
    pub(super) compressed: Option<&'a [u8]>,
}

/// Appends a frame to `out`; returns its length.
pub(super) fn encode_frame(out: &mut Vec<u8>, blob: &ObjectRef, payload: &Payload<'_>) -> u32 {
    let blocks = payload.crcs.len();
    assert!((1..=FRAME_BLOCKS_MAX).contains(&blocks), "a frame of {blocks} blocks");
    assert_eq!(payload.raw.len(), blocks * BLOCK_LEN, "whole blocks");
    let (codec, stored, stored_crc) = match payload.compressed {
        Some(compressed) => (CODEC_ZSTD, compressed, crc32fast::hash(compressed)),
        None => (CODEC_RAW, payload.raw, 0),
    };
    let mut header = Vec::with_capacity(512);
    header.extend(MAGIC);
    header.extend([FRAME_VERSION, codec, CIPHER_NONE]);
    header.push(u8::try_from(blocks).expect("at most 32 blocks"));
    header.extend(u32::try_from(stored.len()).expect("at most 128 KiB").to_le_bytes());
    header.extend(stored_crc.to_le_bytes());
    header.extend(blob.disk.to_bytes());
    header.extend(blob.object.epoch.to_le_bytes());
    header.extend(blob.object.nonce.0.to_le_bytes());
    header.extend(blob.object.seq.to_le_bytes());
    for crc in payload.crcs {
        header.extend(crc.to_le_bytes());
    }
    let mut end = 0;
    for run in payload.runs {
        put_varint(&mut header, run.start - end);
        put_varint(&mut header, run.count() - 1);
        end = run.end;
    }
    seal(&mut header);
    out.extend(&header);
    out.extend(stored);
    u32::try_from(header.len() + stored.len()).expect("a frame is little more than 128 KiB")
}

struct Header {
    codec: u8,
    stored_len: usize,
    stored_crc: u32,
    blob: ObjectRef,
    crcs: Vec<u32>,
    runs: Vec<BlockRange>,
}

fn decode_header(reader: &mut Reader<'_>, bytes: &[u8]) -> Decoded<Header> {
    reader.magic(MAGIC, "no frame starts here")?;
    reader.version(FRAME_VERSION)?;
    let codec = reader.u8()?;
    reader.check(codec <= CODEC_ZSTD, "unknown codec")?;
    let cipher = reader.u8()?;
    reader.check(cipher == CIPHER_NONE, "unknown cipher")?;
    let blocks = usize::from(reader.u8()?);
    reader.check((1..=FRAME_BLOCKS_MAX).contains(&blocks), "impossible number of blocks")?;
    let stored_len = reader.u32()?;
    let stored_crc = reader.u32()?;
    let blob = ObjectRef {
        disk: DiskId::from_bytes(reader.array()?),
        object: ObjectId { epoch: reader.u64()?, nonce: Nonce(reader.u64()?), seq: reader.u64()? },
    };
    let crcs = (0..blocks).map(|_| reader.u32()).collect::<Decoded<Vec<_>>>()?;
    let runs = decode_runs(reader, to_u64(blocks))?;
    let computed = crc32fast::hash(&bytes[..reader.offset()]);
    let stored = reader.u32()?;
    reader.check(stored == computed, "header crc mismatch")?;
    let stored_len = usize::try_from(stored_len).expect("u32 fits usize");
    Ok(Header { codec, stored_len, stored_crc, blob, crcs, runs })
}

fn decode_runs(reader: &mut Reader<'_>, blocks: u64) -> Decoded<Vec<BlockRange>> {
    let mut runs: Vec<BlockRange> = Vec::new();
    let mut left = blocks;
    while left > 0 {
        let gap = reader.varint_to::<u64>(1 << 62, "block number")?;
        reader.check(runs.is_empty() || gap > 0, "two runs that are one")?;
        let count = reader.varint_to::<u64>(left - 1, "blocks of a run")? + 1;
        let start = runs.last().map_or(0, |run| run.end) + gap;
        reader.check(start < 1 << 62, "impossible block number")?;
        runs.push(BlockRange::new(start, count));
        left -= count;
    }
    Ok(runs)
}

/// Reads and checks the frame of `blob` that `bytes` hold, whole; `offset` is where they came from.
/// The blocks of a raw frame are not copied: they keep `bytes` alive.
///
/// # Errors
/// [`Kind::Corrupt`](crate::error::Kind::Corrupt), naming blob, offset and what is wrong, unless these
/// are the bytes that were written, for that blob.
pub fn decode_frame(bytes: &Bytes, blob: &ObjectRef, offset: u32) -> Result<Frame> {
    decode(bytes, blob).map_err(|why| corrupt(blob, offset.into(), "frame", &why))
}

fn decode(bytes: &Bytes, blob: &ObjectRef) -> Decoded<Frame> {
    let mut reader = Reader::new(bytes);
    let header = decode_header(&mut reader, bytes)?;
    if header.blob != *blob {
        return reader.malformed(format!("a frame of blob {}", header.blob));
    }
    let stored = reader.take(header.stored_len)?;
    reader.end()?;
    let len = header.crcs.len() * BLOCK_LEN;
    let blocks = match header.codec {
        CODEC_ZSTD => decompress(&reader, stored, len, header.stored_crc)?,
        _ => {
            reader.check(stored.len() == len, "raw payload of the wrong length")?;
            reader.check(header.stored_crc == 0, "raw payload with a crc of its own")?;
            bytes.slice_ref(stored)
        }
    };
    for ((block, crc), number) in blocks
        .chunks(BLOCK_LEN)
        .zip(&header.crcs)
        .zip(header.runs.iter().flat_map(|r| r.start..r.end))
    {
        let computed = crc32fast::hash(block);
        if computed != *crc {
            return reader.malformed(format!(
                "crc mismatch in block {number}: stored {crc:#010x}, computed {computed:#010x}"
            ));
        }
    }
    Ok(Frame { runs: header.runs, crcs: header.crcs, blocks })
}

fn decompress(reader: &Reader<'_>, stored: &[u8], len: usize, crc: u32) -> Decoded<Bytes> {
    let computed = crc32fast::hash(stored);
    if computed != crc {
        return reader.malformed(format!(
            "payload crc mismatch: stored {crc:#010x}, computed {computed:#010x}"
        ));
    }
    let failed = |why: &dyn std::fmt::Display| -> Decoded<Bytes> {
        reader.malformed(format!("cannot decompress: {why}"))
    };
    match zstd::bulk::decompress(stored, len) {
        Ok(blocks) if blocks.len() == len => Ok(blocks.into()),
        Ok(blocks) => failed(&format!("{} bytes instead of {len}", blocks.len())),
        Err(why) => failed(&why),
    }
}
