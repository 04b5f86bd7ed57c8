//! The blob table against a plain map, page by page.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use async_trait::async_trait;
use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::codec::seal;
use crate::codec::testing::{any_edits, edited};
use crate::geometry::{to_u64, to_usize};
use crate::ids::Nonce;
use crate::map::MapSink;

const DISK: DiskId = DiskId(5);

/// A store, and the sink of a checkpoint that writes to it.
#[derive(Default)]
struct Objects {
    objects: Mutex<HashMap<ObjectRef, Bytes>>,
    seq: u64,
}

#[async_trait]
impl PageSource for Objects {
    async fn load(&self, page: &PageRef) -> Result<Bytes> {
        let start = to_usize(page.offset.into());
        Ok(self.objects.lock().unwrap()[&page.object]
            .slice(start..start + to_usize(page.len.into())))
    }
}

#[async_trait]
impl MapSink for Objects {
    fn next_object(&mut self) -> ObjectRef {
        self.seq += 1;
        ObjectRef { disk: DISK, object: id(2, self.seq) }
    }

    async fn put(&mut self, object: ObjectRef, bytes: Bytes) -> Result<()> {
        assert!(self.objects.get_mut().unwrap().insert(object, bytes).is_none());
        Ok(())
    }
}

fn id(epoch: u64, seq: u64) -> ObjectId {
    ObjectId { epoch, nonce: Nonce(11), seq }
}

fn blob(seq: u64, live_bytes: u64) -> TableEntry {
    let kind = ObjectKind::Blob;
    TableEntry { kind, object: id(1, seq), bytes: 8 << 20, live_bytes, birth: 1, death: None }
}

fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Bytes of every page that a stored table consists of, by map object.
async fn page_bytes(root: &TableRoot, objects: &Objects) -> BTreeMap<ObjectId, u64> {
    let mut live = BTreeMap::new();
    if let Some(root_page) = root.page {
        let children = page::load_root(objects, &root_page, DISK).await.unwrap();
        for page in children.into_iter().map(|(_, page)| page).chain([root_page]) {
            *live.entry(page.object.object).or_default() += u64::from(page.len);
        }
    }
    live
}

#[derive(Debug, Clone)]
enum Step {
    Insert(u64),
    Adjust(u64, i64),
    Remove(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let seq = 0..3000u64;
    prop_oneof![
        4 => seq.clone().prop_map(Step::Insert),
        3 => (seq.clone(), -3..9i64).prop_map(|(seq, delta)| Step::Adjust(seq, delta)),
        1 => seq.prop_map(Step::Remove),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_table_reads_back_what_was_noted_and_counts_its_own_pages(
        rounds in prop::collection::vec(
            (prop::collection::vec(any_step(), 0..60), 0..1500u64, 0..400u64),
            1..6,
        ),
        limit in prop_oneof![Just(1000), Just(20_000), Just(1 << 24)],
    ) {
        run(async {
            let mut objects = Objects::default();
            let mut root = TableRoot::default();
            let mut model: BTreeMap<ObjectId, TableEntry> = BTreeMap::new();
            for (generation, (steps, fill_from, fill)) in (2..).zip(rounds) {
                let mut table = BlobTable::load(DISK, &root, &objects).await.unwrap();
                let fills = (fill_from..fill_from + fill).map(Step::Insert);
                for step in steps.into_iter().chain(fills) {
                    match step {
                        Step::Insert(seq) => {
                            let known = model.contains_key(&id(1, seq));
                            prop_assert_eq!(table.insert(blob(seq, 4)).is_err(), known);
                            model.entry(id(1, seq)).or_insert(blob(seq, 4));
                        }
                        Step::Adjust(seq, delta) => {
                            let object = ObjectRef { disk: DISK, object: id(1, seq) };
                            let entry = model.get_mut(&object.object);
                            let live = entry.as_ref().and_then(|entry| {
                                let alive = entry.death.is_none();
                                alive.then(|| entry.live_bytes.checked_add_signed(delta))?
                            });
                            prop_assert_eq!(table.adjust_live(&object, delta).ok(), live.map(|_| ()));
                            if let (Some(entry), Some(live)) = (entry, live) {
                                entry.live_bytes = live;
                            }
                        }
                        Step::Remove(seq) => {
                            prop_assert_eq!(table.remove(&id(1, seq)), model.remove(&id(1, seq)));
                        }
                    }
                }
                let writer = MapObjectWriter::new(&mut objects, limit);
                root = table.store(writer, generation).await.unwrap();
                for entry in model.values_mut().filter(|entry| entry.live_bytes == 0) {
                    entry.death = entry.death.or(Some(generation));
                }
                let read = BlobTable::load(DISK, &root, &objects).await.unwrap();
                prop_assert_eq!(read.iter().collect::<Vec<_>>(), table.iter().collect::<Vec<_>>());
                let (maps, blobs): (Vec<&TableEntry>, Vec<&TableEntry>) =
                    read.iter().partition(|entry| entry.kind == ObjectKind::Map);
                prop_assert_eq!(blobs, model.values().collect::<Vec<_>>());
                let live = page_bytes(&root, &objects).await;
                for entry in &maps {
                    let stored = objects.objects.lock().unwrap()[&ObjectRef {
                        disk: DISK,
                        object: entry.object,
                    }]
                        .len();
                    prop_assert_eq!(entry.bytes, to_u64(stored));
                    let expected = live.get(&entry.object).copied().unwrap_or(0);
                    prop_assert_eq!(entry.live_bytes, expected);
                    prop_assert_eq!(entry.death.is_some(), expected == 0);
                }
                prop_assert_eq!(maps.len(), objects.objects.lock().unwrap().len());
            }
            Ok(())
        })?;
    }
}

fn sample_pages() -> (Vec<u8>, Vec<u8>) {
    let entry = |seq| TableEntry { death: (seq % 3 == 0).then_some(4 + seq), ..blob(seq * 5, seq) };
    let entries: Vec<_> = (0..9).map(entry).collect();
    let (leaf, leaf_crc) = page::encode_leaf(DISK, &entries);
    assert_eq!(page::decode_leaf(&leaf, DISK), Ok((entries, leaf_crc)));
    let place = |seq| PageRef {
        object: ObjectRef { disk: DISK, object: id(2, seq) },
        offset: 3,
        len: 4,
        crc: 5,
    };
    let children: Vec<_> = (0..9).map(|seq| (id(1, seq * 512), place(seq / 2))).collect();
    let (root, root_crc) = page::encode_root(DISK, &children);
    assert_eq!(page::decode_root(&root, DISK), Ok((children, root_crc)));
    (leaf, root)
}

proptest! {
    #[test]
    fn what_reads_as_a_page_is_the_only_encoding_of_that_page(edits in any_edits()) {
        let (leaf, root) = sample_pages();
        let sealed = |page: &[u8]| {
            let mut bytes = edited(&page[..page.len() - 4], &edits);
            seal(&mut bytes);
            bytes
        };
        let bytes = sealed(&leaf);
        if let Ok((entries, _)) = page::decode_leaf(&bytes, DISK) {
            prop_assert_eq!(page::encode_leaf(DISK, &entries).0, bytes);
        }
        let bytes = sealed(&root);
        if let Ok((children, _)) = page::decode_root(&bytes, DISK) {
            prop_assert_eq!(page::encode_root(DISK, &children).0, bytes);
        }
    }
}

#[test]
fn one_changed_entry_writes_one_leaf_and_the_root() {
    run(async {
        let mut objects = Objects::default();
        let mut table = BlobTable::new(DISK);
        for seq in 0..100_000 {
            table.insert(blob(seq, 4096)).unwrap();
        }
        let first = table.store(MapObjectWriter::new(&mut objects, 1 << 24), 2).await.unwrap();
        let object = ObjectRef { disk: DISK, object: id(1, 50_000) };
        table.adjust_live(&object, 4096).unwrap();
        let second = table.store(MapObjectWriter::new(&mut objects, 1 << 24), 3).await.unwrap();
        let bytes = |root: &TableRoot| root.recent.iter().map(|entry| entry.bytes).sum::<u64>();
        assert!(bytes(&first) > 800_000, "{} bytes", bytes(&first));
        assert!(bytes(&second) < 20_000, "{} bytes", bytes(&second));
    });
}

#[test]
fn objects_of_other_disks_are_not_counted_and_unknown_ones_of_this_disk_are_an_error() {
    let mut table = BlobTable::new(DISK);
    let other = ObjectRef { disk: DiskId(6), object: id(1, 1) };
    table.adjust_live(&other, -4096).unwrap();
    let own = ObjectRef { disk: DISK, object: id(1, 1) };
    let error = table.adjust_live(&own, 4096).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt);
    assert!(error.report().contains(&own.to_string()), "{}", error.report());
}

#[test]
fn any_flipped_bit_in_a_page_is_an_error() {
    let (leaf, root) = sample_pages();
    for bit in 0..leaf.len().max(root.len()) * 8 {
        let flip = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            let at = bit / 8 % bytes.len();
            bytes[at] ^= 1 << (bit % 8);
            bytes
        };
        assert!(page::decode_leaf(&flip(&leaf), DISK).is_err(), "bit {bit}");
        assert!(page::decode_root(&flip(&root), DISK).is_err(), "bit {bit}");
    }
}
