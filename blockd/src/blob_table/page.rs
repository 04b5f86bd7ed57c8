//! The pages of the blob table and their bytes.
//!
//! ```text
//!  bytes     field
//!      4     magic "bkBT"
//!      1     version, 1
//!      1     level: 0 leaf, 1 root
//!
//!            leaf                                       root
//!   list     the objects, at most 512 (see `codec`)     the first object of each leaf
//!   list                                                the map objects that hold the leaves
//!            then by column:                            then by column:
//!  varint    2 × bytes, + 1 for a map object            map object
//!  varint    live bytes                                 offset
//!   delta    birth, to that of the object before        bytes
//!  varint    0 alive, else 1 + death - birth            4 bytes CRC32 of the page
//!
//!      4     CRC32 of all the above, which the root repeats for its leaves
//! ```
//!
//! All objects are of one disk. Version history: 1, the first. A reader refuses newer versions.

use super::{LEAF_ENTRIES_MAX, ObjectKind, TableEntry};
use crate::codec::{
    Decoded, Reader, decode_objects, encode_objects, put_delta, put_varint, seal, unseal,
};
use crate::error::Result;
use crate::geometry::to_u64;
use crate::ids::{DiskId, ObjectId, ObjectRef};
use crate::map::{PageRef, PageSource, corrupt_page, load_page, wrong_page};

const MAGIC: [u8; 4] = *b"bkBT";
const VERSION: u8 = 1;
const LEAF: u8 = 0;
const ROOT: u8 = 1;
/// Leaves of one table: enough for any disk, 64 TiB in blobs of 8 MiB.
const LEAVES_MAX: usize = 1 << 16;
/// Objects are far below this.
const OBJECT_BYTES_MAX: u64 = 1 << 40;

fn start(level: u8) -> Vec<u8> {
    let mut out = Vec::with_capacity(8192);
    out.extend(MAGIC);
    out.extend([VERSION, level]);
    out
}

fn open(bytes: &[u8], level: u8) -> Decoded<(Reader<'_>, u32)> {
    let (content, crc) = unseal(bytes)?;
    let mut reader = Reader::new(content);
    reader.magic(MAGIC, "no page of a blob table starts here")?;
    reader.version(VERSION)?;
    let found = reader.u8()?;
    reader.check(found == level, "a page of the other level")?;
    Ok((reader, crc))
}

pub(super) fn encode_leaf(disk: DiskId, entries: &[TableEntry]) -> (Vec<u8>, u32) {
    let mut out = start(LEAF);
    let object = |entry: &TableEntry| ObjectRef { disk, object: entry.object };
    encode_objects(&mut out, &entries.iter().map(object).collect::<Vec<_>>());
    for entry in entries {
        put_varint(&mut out, entry.bytes * 2 + u64::from(entry.kind == ObjectKind::Map));
    }
    for entry in entries {
        put_varint(&mut out, entry.live_bytes);
    }
    let mut last = 0;
    for entry in entries {
        put_delta(&mut out, last, entry.birth);
        last = entry.birth;
    }
    for entry in entries {
        let lived = entry.death.map(|death| {
            death.checked_sub(entry.birth).expect("an object dies after it was born") + 1
        });
        put_varint(&mut out, lived.unwrap_or(0));
    }
    let crc = seal(&mut out);
    (out, crc)
}

pub(super) fn decode_leaf(bytes: &[u8], disk: DiskId) -> Decoded<(Vec<TableEntry>, u32)> {
    let (mut reader, crc) = open(bytes, LEAF)?;
    let objects = decode_objects(&mut reader, LEAF_ENTRIES_MAX)?;
    reader.check(!objects.is_empty(), "a leaf without objects")?;
    let of_disk = objects.iter().all(|object| object.disk == disk);
    reader.check(of_disk, "objects of another disk")?;
    let mut entries = Vec::with_capacity(objects.len());
    for ObjectRef { object, .. } in objects {
        let coded = reader.varint_to::<u64>(OBJECT_BYTES_MAX, "bytes of an object")?;
        let kind = if coded % 2 == 1 { ObjectKind::Map } else { ObjectKind::Blob };
        let bytes = coded / 2;
        entries.push(TableEntry { kind, object, bytes, live_bytes: 0, birth: 0, death: None });
    }
    for entry in &mut entries {
        entry.live_bytes = reader.varint_to(OBJECT_BYTES_MAX, "live bytes")?;
    }
    let mut last = 0;
    for entry in &mut entries {
        last = reader.delta(last)?;
        entry.birth = last;
    }
    for entry in &mut entries {
        if let Some(lived) = reader.varint()?.checked_sub(1) {
            let death = entry.birth.checked_add(lived);
            let Some(death) = death else { return reader.malformed("death out of range") };
            entry.death = Some(death);
        }
    }
    reader.end()?;
    Ok((entries, crc))
}

pub(super) fn encode_root(disk: DiskId, children: &[(ObjectId, PageRef)]) -> (Vec<u8>, u32) {
    let mut out = start(ROOT);
    let firsts: Vec<_> = children.iter().map(|&(object, _)| ObjectRef { disk, object }).collect();
    encode_objects(&mut out, &firsts);
    let mut objects: Vec<_> = children.iter().map(|(_, page)| page.object).collect();
    objects.sort_unstable();
    objects.dedup();
    encode_objects(&mut out, &objects);
    for (_, page) in children {
        let object = objects.binary_search(&page.object).expect("every object was listed");
        put_varint(&mut out, to_u64(object));
    }
    for (_, page) in children {
        put_varint(&mut out, page.offset.into());
    }
    for (_, page) in children {
        put_varint(&mut out, page.len.into());
    }
    for (_, page) in children {
        out.extend(page.crc.to_le_bytes());
    }
    let crc = seal(&mut out);
    (out, crc)
}

pub(super) fn decode_root(bytes: &[u8], disk: DiskId) -> Decoded<(Vec<(ObjectId, PageRef)>, u32)> {
    let (mut reader, crc) = open(bytes, ROOT)?;
    let firsts = decode_objects(&mut reader, LEAVES_MAX)?;
    reader.check(!firsts.is_empty(), "a root without leaves")?;
    let objects = decode_objects(&mut reader, firsts.len())?;
    let of_disk = firsts.iter().chain(&objects).all(|object| object.disk == disk);
    reader.check(of_disk, "objects of another disk")?;
    let mut used = vec![false; objects.len()];
    let mut children = Vec::with_capacity(firsts.len());
    for ObjectRef { object: first, .. } in firsts {
        let place =
            reader.varint_to::<usize>(to_u64(used.len()).saturating_sub(1), "map object")?;
        reader.check(place < used.len(), "leaves without map objects")?;
        used[place] = true;
        children.push((first, PageRef { object: objects[place], offset: 0, len: 0, crc: 0 }));
    }
    reader.check(used.into_iter().all(|used| used), "a map object that no leaf is in")?;
    for (_, page) in &mut children {
        page.offset = reader.varint_to(u32::MAX.into(), "page offset")?;
    }
    for (_, page) in &mut children {
        page.len = reader.varint_to(u32::MAX.into(), "page length")?;
    }
    for (_, page) in &mut children {
        page.crc = reader.u32()?;
    }
    reader.end()?;
    Ok((children, crc))
}

/// The leaves of a table by their first object.
pub(super) async fn load_root(
    source: &dyn PageSource,
    page: &PageRef,
    disk: DiskId,
) -> Result<Vec<(ObjectId, PageRef)>> {
    let bytes = load_page(source, page).await?;
    let (children, crc) = decode_root(&bytes, disk).map_err(|why| corrupt_page(page, &why))?;
    if crc != page.crc {
        return Err(wrong_page(page, crc));
    }
    Ok(children)
}

/// The entries of the leaf whose first object is `first`.
pub(super) async fn load_leaf(
    source: &dyn PageSource,
    page: &PageRef,
    disk: DiskId,
    first: ObjectId,
) -> Result<Vec<TableEntry>> {
    let bytes = load_page(source, page).await?;
    let (entries, crc) = decode_leaf(&bytes, disk).map_err(|why| corrupt_page(page, &why))?;
    if crc != page.crc {
        return Err(wrong_page(page, crc));
    }
    if entries[0].object != first {
        let what = format!("starts with object {} instead of {first}", entries[0].object);
        return Err(corrupt_page(page, &what));
    }
    Ok(entries)
}
