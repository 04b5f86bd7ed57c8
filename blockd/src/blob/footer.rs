//! The footer of a blob: what it holds of its disk, and where.
//!
//! ```text
//!  bytes     field
//!      4     magic "bkFT"
//!      1     version, 1
//!     16     disk   ┐
//!      8     epoch  │ the blob itself
//!      8     nonce  │
//!      8     seq    ┘
//!  varint    frames; then per frame: varint bytes. The first starts at 0, each where the last ends
//!  varint    extents; then by column, extents in ascending order:
//!              varint  gap to the end of the extent before
//!              varint  2 × (blocks - 1), + 1 when it is zeros
//!              delta   LSN, to that of the extent before
//!            of those with data only:
//!              delta   frame, to that of the extent with data before
//!              1 byte  block within the frame
//!            objects that extents were copied from, and unless there are none, of those with data:
//!              varint  0 not copied, else 1 + object; if copied: varint frame offset, varint frame
//!                      bytes, 1 byte block within that frame
//!
//! trailer, the last 24 bytes of the blob:
//!  offset  bytes
//!       0      4   magic "bkBL"
//!       4      1   version, 1
//!       5      3   0
//!       8      4   offset of the footer
//!      12      4   bytes of the footer
//!      16      4   CRC32 of the footer
//!      20      4   CRC32 of the trailer up to here
//! ```
//!
//! *delta* is a varint of twice the difference, or twice the difference less one plus one when it is
//! negative. Version history: 1, the first. A reader refuses newer versions.

use super::{BLOB_BYTES_MAX, FRAME_BLOCKS_MAX, Location, corrupt};
use crate::codec::{
    Decoded, Malformed, Reader, decode_objects, encode_objects, put_delta, put_varint, seal, unseal,
};
use crate::error::{Error, Kind, Result};
use crate::geometry::{BlockRange, to_u64, to_usize};
use crate::ids::{DiskId, Nonce, ObjectId, ObjectRef};

const MAGIC: [u8; 4] = *b"bkFT";
const TRAILER_MAGIC: [u8; 4] = *b"bkBL";
/// The newest version of footers that this code writes and reads.
pub const FOOTER_VERSION: u8 = 1;
/// Bytes at the end of a blob that say where its footer is.
pub const TRAILER_LEN: usize = 24;
/// Most extents or frames in one blob; a limit for readers, far above what a writer makes.
const ENTRIES_MAX: usize = 1 << 20;
/// Block numbers and counts stay below this.
const BLOCKS_END: u64 = 1 << 40;

/// One extent of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobExtent {
    /// Which blocks of the disk.
    pub range: BlockRange,
    /// Where their data lies in this blob, or that they are zeros.
    pub location: Location,
    /// The place of the write in the disk's order.
    pub lsn: u64,
    /// Where the cleaner copied the data from: such an extent applies only where the map still
    /// points there.
    pub origin: Option<Location>,
}

/// What a blob holds of its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    /// The blob.
    pub blob: ObjectRef,
    /// Bytes of each of its frames, which lie one after the other from offset 0.
    pub frame_lens: Vec<u32>,
    /// Its extents, ascending, without overlap.
    pub extents: Vec<BlobExtent>,
}

impl Footer {
    /// Blocks of data, zeros not counted.
    #[must_use]
    pub fn data_blocks(&self) -> u64 {
        let data = self.extents.iter().filter(|extent| extent.location != Location::Zero);
        data.map(|extent| extent.range.count()).sum()
    }

    /// Where the frames end and the footer starts.
    fn offset(&self) -> u64 {
        self.frame_lens.iter().map(|&len| u64::from(len)).sum()
    }

    /// The footer and the trailer: all of a blob that follows its frames.
    ///
    /// # Panics
    /// When extents overlap, or lie in frames that are not there: bugs of the caller.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.push(FOOTER_VERSION);
        out.extend(self.blob.disk.to_bytes());
        out.extend(self.blob.object.epoch.to_le_bytes());
        out.extend(self.blob.object.nonce.0.to_le_bytes());
        out.extend(self.blob.object.seq.to_le_bytes());
        put_varint(&mut out, to_u64(self.frame_lens.len()));
        for &len in &self.frame_lens {
            put_varint(&mut out, len.into());
        }
        self.encode_ranges(&mut out);
        self.encode_places(&mut out);
        self.encode_origins(&mut out);
        let len = u32::try_from(out.len()).expect("footers are far below 4 GiB");
        let crc = crc32fast::hash(&out);
        out.extend(encode_trailer(self.offset(), len, crc));
        out
    }

    fn encode_ranges(&self, out: &mut Vec<u8>) {
        put_varint(out, to_u64(self.extents.len()));
        let mut end = 0;
        for BlobExtent { range, .. } in &self.extents {
            assert!(end <= range.start && !range.is_empty(), "extents of a blob ascend");
            put_varint(out, range.start - end);
            end = range.end;
        }
        for BlobExtent { range, location, .. } in &self.extents {
            put_varint(out, (range.count() - 1) * 2 + u64::from(*location == Location::Zero));
        }
        let mut last = 0;
        for extent in &self.extents {
            put_delta(out, last, extent.lsn);
            last = extent.lsn;
        }
    }

    fn encode_places(&self, out: &mut Vec<u8>) {
        let offsets = frame_offsets(&self.frame_lens);
        let mut last = 0;
        for extent in &self.extents {
            if let Location::Data { blob, frame_offset, .. } = extent.location {
                assert_eq!(blob, self.blob, "a blob lists its own data");
                let frame = offsets.binary_search(&frame_offset).expect("a frame starts there");
                put_delta(out, last, to_u64(frame));
                last = to_u64(frame);
            }
        }
        for extent in &self.extents {
            if let Location::Data { index, .. } = extent.location {
                out.push(index);
            }
        }
    }

    fn encode_origins(&self, out: &mut Vec<u8>) {
        let mut objects: Vec<_> =
            self.extents.iter().filter_map(|extent| extent.origin?.blob()).collect();
        objects.sort_unstable();
        objects.dedup();
        encode_objects(out, &objects);
        if objects.is_empty() {
            return;
        }
        for extent in self.extents.iter().filter(|extent| extent.location != Location::Zero) {
            if let Some(Location::Data { blob, frame_offset, frame_len, index }) = extent.origin {
                let object = objects.binary_search(&blob).expect("every origin was listed");
                put_varint(out, to_u64(object) + 1);
                put_varint(out, frame_offset.into());
                put_varint(out, frame_len.into());
                out.push(index);
            } else {
                put_varint(out, 0);
            }
        }
    }
}

pub(super) fn encode_trailer(footer_offset: u64, footer_len: u32, footer_crc: u32) -> Vec<u8> {
    assert!(footer_offset <= BLOB_BYTES_MAX, "a blob of {footer_offset} bytes");
    let mut out = Vec::with_capacity(TRAILER_LEN);
    out.extend(TRAILER_MAGIC);
    out.extend([FOOTER_VERSION, 0, 0, 0]);
    out.extend(u32::try_from(footer_offset).expect("blobs are below 4 GiB").to_le_bytes());
    out.extend(footer_len.to_le_bytes());
    out.extend(footer_crc.to_le_bytes());
    seal(&mut out);
    out
}

struct Trailer {
    footer_offset: u64,
    footer_len: usize,
    footer_crc: u32,
}

fn decode_trailer(tail: &[u8]) -> Decoded<Trailer> {
    let Some(bytes) = tail.last_chunk::<TRAILER_LEN>() else {
        return Reader::new(tail).malformed(format!("{} bytes hold no trailer", tail.len()));
    };
    let (content, _) = unseal(bytes)?;
    let mut reader = Reader::new(content);
    reader.magic(TRAILER_MAGIC, "this is not the end of a blob")?;
    reader.version(FOOTER_VERSION)?;
    let zeros = reader.array()?;
    reader.check(zeros == [0; 3], "reserved bytes are not zero")?;
    Ok(Trailer {
        footer_offset: reader.u32()?.into(),
        footer_len: to_usize(reader.u32()?.into()),
        footer_crc: reader.u32()?,
    })
}

/// How many bytes at the end of a blob are its footer and trailer, told by its last
/// [`TRAILER_LEN`] bytes.
///
/// # Errors
/// [`Kind::Corrupt`] when they are no trailer.
pub fn footer_len(tail: &[u8], blob: &ObjectRef) -> Result<u64> {
    let trailer = decode_trailer(tail).map_err(|why| corrupt_tail(blob, &why))?;
    Ok(to_u64(trailer.footer_len + TRAILER_LEN))
}

/// Reads the footer from the last bytes of a blob, at least [`footer_len`] of them.
///
/// # Errors
/// [`Kind::Corrupt`] unless these are the bytes that were written for
/// this blob.
pub fn decode_footer(tail: &[u8], blob: &ObjectRef) -> Result<Footer> {
    let trailer = decode_trailer(tail).map_err(|why| corrupt_tail(blob, &why))?;
    decode(tail, &trailer, blob).map_err(|why| corrupt(blob, trailer.footer_offset, "footer", &why))
}

fn corrupt_tail(blob: &ObjectRef, why: &Malformed) -> Error {
    Error::new(Kind::Corrupt, format!("blob {}: trailer: {why}", blob.blob_key()))
        .with_detail("object", blob.blob_key().to_string())
}

fn decode(tail: &[u8], trailer: &Trailer, blob: &ObjectRef) -> Decoded<Footer> {
    let content = &tail[..tail.len() - TRAILER_LEN];
    let Some(start) = content.len().checked_sub(trailer.footer_len) else {
        return Reader::new(tail).malformed(format!(
            "{} bytes read, of a footer of {}",
            content.len(),
            trailer.footer_len
        ));
    };
    let bytes = &content[start..];
    let mut reader = Reader::new(bytes);
    let computed = crc32fast::hash(bytes);
    reader.check(computed == trailer.footer_crc, "crc mismatch")?;
    reader.magic(MAGIC, "no footer starts here")?;
    reader.version(FOOTER_VERSION)?;
    let named = ObjectRef {
        disk: DiskId::from_bytes(reader.array()?),
        object: ObjectId { epoch: reader.u64()?, nonce: Nonce(reader.u64()?), seq: reader.u64()? },
    };
    if named != *blob {
        return reader.malformed(format!("the footer of blob {named}"));
    }
    let frames = reader.count(ENTRIES_MAX, "frames")?;
    let frame_lens =
        (0..frames).map(|_| reader.varint_to(1 << 20, "frame length")).collect::<Decoded<_>>()?;
    let mut footer = Footer { blob: named, frame_lens, extents: Vec::new() };
    let agree = footer.offset() == trailer.footer_offset;
    reader.check(agree, "frames do not end where the footer starts")?;
    decode_ranges(&mut reader, &mut footer)?;
    decode_places(&mut reader, &mut footer)?;
    decode_origins(&mut reader, &mut footer)?;
    reader.end()?;
    Ok(footer)
}

fn decode_ranges(reader: &mut Reader<'_>, footer: &mut Footer) -> Decoded<()> {
    let count = reader.count(ENTRIES_MAX, "extents")?;
    let gaps =
        (0..count).map(|_| reader.varint_to(BLOCKS_END, "gap")).collect::<Decoded<Vec<u64>>>()?;
    let mut end = 0;
    for gap in gaps {
        let coded = reader.varint_to::<u64>(BLOCKS_END, "blocks of an extent")?;
        let range = BlockRange::new(end + gap, coded / 2 + 1);
        let zero = coded % 2 == 1;
        reader.check(range.end <= BLOCKS_END, "impossible block number")?;
        let small = zero || range.count() <= to_u64(FRAME_BLOCKS_MAX);
        reader.check(small, "an extent larger than a frame")?;
        end = range.end;
        let location = match zero {
            true => Location::Zero,
            // The frame follows in its own column.
            false => Location::Data { blob: footer.blob, frame_offset: 0, frame_len: 0, index: 0 },
        };
        footer.extents.push(BlobExtent { range, location, lsn: 0, origin: None });
    }
    let mut last = 0;
    for extent in &mut footer.extents {
        extent.lsn = reader.delta(last)?;
        last = extent.lsn;
    }
    Ok(())
}

fn decode_places(reader: &mut Reader<'_>, footer: &mut Footer) -> Decoded<()> {
    let offsets = frame_offsets(&footer.frame_lens);
    let mut last = 0;
    for extent in &mut footer.extents {
        if let Location::Data { frame_offset, frame_len, .. } = &mut extent.location {
            last = reader.delta(last)?;
            let frame = usize::try_from(last).ok().filter(|&frame| frame < offsets.len());
            let Some(frame) = frame else {
                return reader.malformed(format!("frame {last} of {}", offsets.len()));
            };
            (*frame_offset, *frame_len) = (offsets[frame], footer.frame_lens[frame]);
        }
    }
    for extent in &mut footer.extents {
        if let Location::Data { index, .. } = &mut extent.location {
            *index = decode_index(reader, extent.range)?;
        }
    }
    Ok(())
}

fn decode_origins(reader: &mut Reader<'_>, footer: &mut Footer) -> Decoded<()> {
    let objects = decode_objects(reader, ENTRIES_MAX)?;
    if objects.is_empty() {
        return Ok(());
    }
    let mut used = vec![false; objects.len()];
    for extent in footer.extents.iter_mut().filter(|extent| extent.location != Location::Zero) {
        let Some(object) =
            reader.varint_to::<usize>(to_u64(objects.len()), "origin")?.checked_sub(1)
        else {
            continue;
        };
        used[object] = true;
        extent.origin = Some(Location::Data {
            blob: objects[object],
            frame_offset: reader.varint_to(u32::MAX.into(), "frame offset")?,
            frame_len: reader.varint_to(u32::MAX.into(), "frame length")?,
            index: decode_index(reader, extent.range)?,
        });
    }
    reader.check(used.into_iter().all(|used| used), "an origin that no extent has")
}

/// A block number within a frame from which all of `range` fits the frame.
fn decode_index(reader: &mut Reader<'_>, range: BlockRange) -> Decoded<u8> {
    let index = reader.u8()?;
    let fits = u64::from(index) + range.count() <= to_u64(FRAME_BLOCKS_MAX);
    reader.check(fits, "an extent that leaves its frame")?;
    Ok(index)
}

fn frame_offsets(lens: &[u32]) -> Vec<u32> {
    let mut end = 0;
    lens.iter()
        .map(|len| {
            let start = end;
            end += len;
            start
        })
        .collect()
}
