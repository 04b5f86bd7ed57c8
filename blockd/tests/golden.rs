//! Old bytes stay readable, and today's code writes the same bytes again.
//!
//! Each file under `golden/` is an object as it was stored by the version in its name. A test builds
//! the same content and compares every byte, then reads the file and compares what it says. A format
//! that changes on purpose gets a new file beside the old one, which must still be read:
//! `BLOCKD_WRITE_GOLDEN=1 cargo test -p blockd --test golden` writes files that are missing, and never
//! one that is there.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use blockd::blob::{
    Blob, BlobBuilder, BlobExtent, Compression, Location, decode_footer, decode_frame,
};
use blockd::blob_table::{BlobTable, ObjectKind, TableEntry, TableRoot};
use blockd::error::Result;
use blockd::extent_map::ExtentMap;
use blockd::geometry::{BLOCK_LEN, BlockRange};
use blockd::ids::{DiskId, Nonce, ObjectId, ObjectRef};
use blockd::map::{
    MAP_OBJECT_BYTES, MapObjectWriter, MapSink, PageRef, PageSource, Pages, Root, Walk, apply,
};
use bytes::Bytes;

fn golden(name: &str) -> Bytes {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("golden file {name}: {error}")).into()
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The golden file, which must be what is written today.
#[track_caller]
fn check_written(name: &str, written: &[u8]) -> Bytes {
    if std::env::var_os("BLOCKD_WRITE_GOLDEN").is_some() && !path(name).exists() {
        std::fs::write(path(name), written).unwrap();
    }
    let stored = golden(name);
    let differs = stored.iter().zip(written).position(|(stored, written)| stored != written);
    assert_eq!(differs, None, "first byte of {name} that is written differently");
    assert_eq!(stored.len(), written.len(), "bytes of {name}");
    stored
}

fn object(disk: u128, seq: u64) -> ObjectRef {
    let object = ObjectId { epoch: 3, nonce: Nonce(0x0123_4567_89ab_cdef), seq };
    ObjectRef { disk: DiskId(disk), object }
}

fn data(blob: ObjectRef, frame_offset: u32, frame_len: u32, index: u8) -> Location {
    Location::Data { blob, frame_offset, frame_len, index }
}

/// The bytes of a block: its number again and again.
fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK_LEN / 8)
}

fn push(builder: &mut BlobBuilder, range: BlockRange, lsn: u64, origin: Option<Location>) {
    let bytes: Vec<u8> = (range.start..range.end).flat_map(block).collect();
    let crcs: Vec<u32> = bytes.chunks(BLOCK_LEN).map(crc32fast::hash).collect();
    builder.push(range.start, lsn, origin, &crcs, &bytes);
}

fn sample_blob(compression: Compression) -> Blob {
    let mut builder = BlobBuilder::new(object(1, 7), compression);
    push(&mut builder, BlockRange::new(2, 1), 1000, None);
    push(&mut builder, BlockRange::new(40, 2), 900, Some(data(object(2, 5), 777, 8000, 3)));
    builder.push_zero(BlockRange::new(1 << 20, 1 << 32), 1100);
    push(&mut builder, BlockRange::new(3, 1), 1200, None);
    builder.finish()
}

fn check_blob(bytes: &Bytes, frames: [(u32, u32); 2]) {
    let name = object(1, 7);
    let [first, second] = frames.map(|(offset, len)| move |index| data(name, offset, len, index));
    let extent = |start, count, location, lsn, origin| BlobExtent {
        range: BlockRange::new(start, count),
        location,
        lsn,
        origin,
    };
    let footer = decode_footer(bytes, &name).unwrap();
    let copied = Some(data(object(2, 5), 777, 8000, 3));
    assert_eq!(
        footer.extents,
        [
            extent(2, 1, first(0), 1000, None),
            extent(3, 1, second(0), 1200, None),
            extent(40, 2, first(1), 900, copied),
            extent(1 << 20, 1 << 32, Location::Zero, 1100, None),
        ]
    );
    for ((offset, len), numbers) in frames.into_iter().zip([vec![2, 40, 41], vec![3]]) {
        let start = usize::try_from(offset).unwrap();
        let frame = bytes.slice(start..start + usize::try_from(len).unwrap());
        let frame = decode_frame(&frame, &name, offset).unwrap();
        assert_eq!(frame.block_numbers().collect::<Vec<_>>(), numbers);
        for (index, number) in numbers.into_iter().enumerate() {
            assert_eq!(frame.block(index), block(number));
        }
    }
}

#[test]
fn a_blob_of_version_1_is_read_and_written_unchanged() {
    let stored = check_written("blob-v1.bin", &sample_blob(Compression::Off).bytes);
    check_blob(&stored, [(0, 12_364), (12_364, 4162)]);
}

/// What zstd writes may differ from release to release; what it once wrote must be read.
#[test]
fn a_compressed_blob_of_version_1_is_read() {
    if std::env::var_os("BLOCKD_WRITE_GOLDEN").is_some() && !path("blob-zstd-v1.bin").exists() {
        std::fs::write(path("blob-zstd-v1.bin"), sample_blob(Compression::Zstd(1)).bytes).unwrap();
    }
    let stored = golden("blob-zstd-v1.bin");
    let footer = decode_footer(&stored, &object(1, 7)).unwrap();
    let [first, second] = footer.frame_lens[..] else { panic!("two frames") };
    assert!(first < 4096 && second < 4096, "stored compressed");
    check_blob(&stored, [(0, first), (first, second)]);
}

/// Map objects in memory.
#[derive(Default)]
struct Objects {
    objects: Mutex<HashMap<ObjectRef, Bytes>>,
}

#[async_trait]
impl PageSource for Objects {
    async fn load(&self, page: &PageRef) -> Result<Bytes> {
        let start = usize::try_from(page.offset).unwrap();
        let end = start + usize::try_from(page.len).unwrap();
        Ok(self.objects.lock().unwrap()[&page.object].slice(start..end))
    }
}

/// Stores every map object under one name: a checkpoint here fills only one.
struct Sink(Arc<Objects>, ObjectRef);

#[async_trait]
impl MapSink for Sink {
    fn next_object(&mut self) -> ObjectRef {
        self.1
    }

    async fn put(&mut self, object: ObjectRef, bytes: Bytes) -> Result<()> {
        assert!(self.0.objects.lock().unwrap().insert(object, bytes).is_none());
        Ok(())
    }
}

/// What the map maps: three leaves under three levels.
fn sample_extents() -> Vec<(BlockRange, Location)> {
    vec![
        (BlockRange::new(0, 32), data(object(1, 7), 0, 131_300, 0)),
        (BlockRange::new(32, 1), data(object(2, 5), 50_000, 4_200, 0)),
        (BlockRange::new(40, 3), data(object(1, 7), 131_300, 70_000, 5)),
        (BlockRange::new(1023, 1), data(object(1, 9), 16_000_000, 70_000, 31)),
        (BlockRange::new(1024, 4), data(object(1, 9), 16_000_000, 70_000, 0)),
        (BlockRange::new(5 << 20, 1), data(object(1, 9), 0, 4_200, 0)),
    ]
}

#[tokio::test]
async fn a_map_object_of_version_1_is_read_and_written_unchanged() {
    let name = object(1, 8);
    let written = Arc::new(Objects::default());
    let pages = Pages::new(written.clone(), 1 << 20);
    let mut overlay = ExtentMap::new();
    for (range, location) in sample_extents() {
        overlay.insert(range, location);
    }
    let mut sink = Sink(written.clone(), name);
    let mut writer = MapObjectWriter::new(&mut sink, MAP_OBJECT_BYTES);
    let root = apply(&Root::EMPTY, &overlay, &pages, &mut writer, &mut |_| {}).await.unwrap();
    writer.finish().await.unwrap();
    let bytes = written.objects.lock().unwrap()[&name].clone();
    let stored = check_written("map-object-v1.bin", &bytes);

    let objects = Objects::default();
    objects.objects.lock().unwrap().insert(name, stored);
    let pages = Pages::new(Arc::new(objects), 1 << 20);
    let mut walk = Walk::new(root.subtree(), BlockRange::new(0, 1 << 30), &pages);
    let mut extents = Vec::new();
    while let Some(leaf) = walk.next(&mut |_| {}).await.unwrap() {
        extents.extend(leaf);
    }
    assert_eq!(extents, sample_extents());
}

fn sample_entries() -> Vec<TableEntry> {
    let entry = |kind, seq, bytes, live_bytes, birth, death| TableEntry {
        kind,
        object: object(1, seq).object,
        bytes,
        live_bytes,
        birth,
        death,
    };
    vec![
        entry(ObjectKind::Blob, 5, 16_800_000, 12_288, 40, None),
        entry(ObjectKind::Map, 6, 9000, 800, 41, None),
        entry(ObjectKind::Blob, 7, 12_582_912, 0, 43, Some(50)),
    ]
}

#[tokio::test]
async fn a_blob_table_of_version_1_is_read_and_written_unchanged() {
    let name = object(1, 8);
    let written = Arc::new(Objects::default());
    let mut table = BlobTable::new(name.disk);
    for entry in sample_entries() {
        table.insert(entry).unwrap();
    }
    let mut sink = Sink(written.clone(), name);
    let writer = MapObjectWriter::new(&mut sink, MAP_OBJECT_BYTES);
    let root = table.store(writer, 50).await.unwrap();
    let bytes = written.objects.lock().unwrap()[&name].clone();
    let stored = check_written("blob-table-v1.bin", &bytes);

    let objects = Objects::default();
    objects.objects.lock().unwrap().insert(name, stored);
    let pages_only = TableRoot { recent: Vec::new(), ..root };
    let read = BlobTable::load(name.disk, &pages_only, &objects).await.unwrap();
    assert_eq!(read.iter().copied().collect::<Vec<_>>(), sample_entries());
}
