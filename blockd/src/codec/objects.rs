//! A list of object references, each written once and referred to by its place in the list.
//!
//! ```text
//! writers   varint                    one entry per (disk, epoch, nonce), ascending
//!   disk    1 byte, then 16 or none   0: as the writer before · 1: these sixteen bytes
//!   epoch   varint
//!   nonce   8 bytes
//!   count   varint, at least 1        objects of this writer
//!   seq     varint each               the first as it is, then the distance to the one before, less 1
//! ```
//!
//! Most pages refer to many objects of few writers: two or three bytes each.

use super::{Decoded, Reader, put_varint};
use crate::geometry::to_u64;
use crate::ids::{DiskId, Nonce, ObjectId, ObjectRef};

const SAME_DISK: u8 = 0;
const OTHER_DISK: u8 = 1;

/// Appends `objects`, which are ascending and without repeats.
pub(crate) fn encode_objects(out: &mut Vec<u8>, objects: &[ObjectRef]) {
    assert!(objects.is_sorted_by(|a, b| a < b), "object lists are ascending");
    let same_writer = |a: &ObjectRef, b: &ObjectRef| writer_of(a) == writer_of(b);
    put_varint(out, to_u64(objects.chunk_by(same_writer).count()));
    let mut disk = None;
    for group in objects.chunk_by(same_writer) {
        let first = group[0];
        if disk == Some(first.disk) {
            out.push(SAME_DISK);
        } else {
            out.push(OTHER_DISK);
            out.extend(first.disk.to_bytes());
            disk = Some(first.disk);
        }
        put_varint(out, first.object.epoch);
        out.extend(first.object.nonce.0.to_le_bytes());
        put_varint(out, to_u64(group.len()));
        put_varint(out, first.object.seq);
        for pair in group.windows(2) {
            put_varint(out, pair[1].object.seq - pair[0].object.seq - 1);
        }
    }
}

/// Reads a list of at most `max` objects.
pub(crate) fn decode_objects(reader: &mut Reader<'_>, max: usize) -> Decoded<Vec<ObjectRef>> {
    let writers = reader.count(max, "writers of objects")?;
    let mut objects: Vec<ObjectRef> = Vec::new();
    for _ in 0..writers {
        let disk = match (reader.u8()?, objects.last()) {
            (SAME_DISK, Some(last)) => last.disk,
            (OTHER_DISK, last) => {
                let disk = DiskId::from_bytes(reader.array()?);
                reader.check(last.is_none_or(|last| last.disk < disk), "disks out of order")?;
                disk
            }
            _ => return reader.malformed("neither a new disk nor the last one"),
        };
        let epoch = reader.varint()?;
        let nonce = Nonce(reader.u64()?);
        let writer = (disk, epoch, nonce);
        let ascending = objects.last().is_none_or(|last| writer_of(last) < writer);
        reader.check(ascending, "writers out of order")?;
        let count = reader.count(max - objects.len(), "objects")?;
        reader.check(count > 0, "a writer without objects")?;
        let mut seq = reader.varint()?;
        objects.push(ObjectRef { disk, object: ObjectId { epoch, nonce, seq } });
        for _ in 1..count {
            let next = seq.checked_add(reader.varint()?).and_then(|seq| seq.checked_add(1));
            seq = next.map_or_else(|| reader.malformed("sequence number out of range"), Ok)?;
            objects.push(ObjectRef { disk, object: ObjectId { epoch, nonce, seq } });
        }
    }
    Ok(objects)
}

fn writer_of(object: &ObjectRef) -> (DiskId, u64, Nonce) {
    (object.disk, object.object.epoch, object.object.nonce)
}
