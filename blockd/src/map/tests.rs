//! The tree against a plain map, through checkpoints and resizes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::blob::Location;
use crate::error::{Error, Kind, Result};
use crate::extent_map::{Advance, ExtentMap};
use crate::geometry::{BlockRange, to_u64, to_usize};
use crate::ids::{DiskId, Nonce, ObjectId};

/// A store of map objects in memory.
#[derive(Debug, Default)]
struct Objects {
    objects: Mutex<HashMap<ObjectRef, Bytes>>,
}

impl Objects {
    fn flip(&self, page: &PageRef, bit: usize) {
        let mut objects = self.objects.lock().unwrap();
        let bytes = objects.get_mut(&page.object).unwrap();
        let mut changed = bytes.to_vec();
        changed[to_usize(page.offset.into()) + bit / 8] ^= 1 << (bit % 8);
        *bytes = changed.into();
    }
}

#[async_trait]
impl PageSource for Objects {
    async fn load(&self, page: &PageRef) -> Result<Bytes> {
        let objects = self.objects.lock().unwrap();
        let missing = || Error::new(Kind::NotFound, format!("no map object {}", page.object));
        let bytes = objects.get(&page.object).ok_or_else(missing)?;
        let start = to_usize(page.offset.into());
        Ok(bytes.slice(start..start + to_usize(page.len.into())))
    }
}

/// Counts fetches, each of which lets other tasks run.
struct Counted {
    objects: Arc<Objects>,
    loads: Arc<AtomicUsize>,
}

#[async_trait]
impl PageSource for Counted {
    async fn load(&self, page: &PageRef) -> Result<Bytes> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
        self.objects.load(page).await
    }
}

struct Sink {
    objects: Arc<Objects>,
    seq: u64,
}

#[async_trait]
impl MapSink for Sink {
    fn next_object(&mut self) -> ObjectRef {
        self.seq += 1;
        object(1, self.seq)
    }

    async fn put(&mut self, object: ObjectRef, bytes: Bytes) -> Result<()> {
        assert!(self.objects.objects.lock().unwrap().insert(object, bytes).is_none());
        Ok(())
    }
}

fn object(disk: u128, seq: u64) -> ObjectRef {
    ObjectRef { disk: DiskId(disk), object: ObjectId { epoch: 3, nonce: Nonce(7), seq } }
}

fn data(blob: u64, frame: u32, index: u8) -> Location {
    Location::Data { blob: object(1, blob), frame_offset: frame * 9000, frame_len: 9000, index }
}

/// A tree with its store, and the model: one location per mapped block.
struct World {
    objects: Arc<Objects>,
    sink: Sink,
    pages: Pages,
    root: Root,
    model: BTreeMap<u64, Location>,
    limit: usize,
}

impl World {
    fn new(limit: usize) -> Self {
        let objects = Arc::new(Objects::default());
        let sink = Sink { objects: Arc::clone(&objects), seq: 0 };
        let pages = Pages::new(Arc::clone(&objects) as Arc<dyn PageSource>, 1 << 20);
        Self { objects, sink, pages, root: Root::EMPTY, model: BTreeMap::new(), limit }
    }

    async fn checkpoint(&mut self, overlay: &ExtentMap<Location>) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut writer = MapObjectWriter::new(&mut self.sink, self.limit);
        let mut report = |change| changes.push(change);
        let root = apply(&self.root, overlay, &self.pages, &mut writer, &mut report);
        self.root = root.await.unwrap();
        writer.finish().await.unwrap();
        for (range, location) in overlay.iter() {
            let old: Vec<_> =
                self.model.range(range.start..range.end).map(|(block, _)| *block).collect();
            for block in old {
                self.model.remove(&block);
            }
            if *location != Location::Zero {
                for block in range.start..range.end {
                    self.model.insert(block, location.advance(block - range.start));
                }
            }
        }
        changes
    }

    /// An empty cache over the same objects, and the count of its fetches.
    fn cold(&self) -> (Pages, Arc<AtomicUsize>) {
        let loads = Arc::new(AtomicUsize::new(0));
        let counted = Counted { objects: Arc::clone(&self.objects), loads: Arc::clone(&loads) };
        (Pages::new(Arc::new(counted), 1 << 20), loads)
    }

    /// Every page of a subtree.
    async fn pages_below(&self, tree: Option<Subtree>) -> HashSet<PageRef> {
        let mut all = HashSet::new();
        let mut walk = Walk::new(tree, BlockRange::new(0, TREE_BLOCKS), &self.pages);
        let mut visit = |tree: Subtree| assert!(all.insert(tree.page), "told twice");
        while walk.next(&mut visit).await.unwrap().is_some() {}
        all
    }

    /// Bytes of all map objects that were ever stored.
    fn written(&self) -> u64 {
        let objects = self.objects.objects.lock().unwrap();
        objects.values().map(|bytes| to_u64(bytes.len())).sum()
    }

    async fn all(&self) -> BTreeMap<u64, Location> {
        let range = BlockRange::new(0, TREE_BLOCKS);
        let mut walk = Walk::new(self.root.subtree(), range, &self.pages);
        let mut all = Vec::new();
        while let Some(extents) = walk.next(&mut |_| {}).await.unwrap() {
            all.extend(extents);
        }
        spread(all)
    }
}

fn spread(extents: impl IntoIterator<Item = (BlockRange, Location)>) -> BTreeMap<u64, Location> {
    let blocks = |(range, location): (BlockRange, Location)| {
        (range.start..range.end).map(move |block| (block, location.advance(block - range.start)))
    };
    extents.into_iter().flat_map(blocks).collect()
}

fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Blocks near the borders of pages of every level.
fn any_block() -> impl Strategy<Value = u64> {
    let near = prop_oneof![
        Just(0),
        Just(CHUNK_BLOCKS),
        Just(blocks_below(1)),
        Just(blocks_below(1) * 3),
        Just(blocks_below(2)),
        Just(blocks_below(2) * 3),
    ];
    (near, 0..64u64).prop_map(|(base, offset)| (base + offset).saturating_sub(32))
}

#[derive(Debug, Clone)]
struct Write {
    range: BlockRange,
    location: Location,
}

fn any_write() -> impl Strategy<Value = Write> {
    let zero = (any_block(), any_block()).prop_map(|(a, b)| Write {
        range: BlockRange { start: a.min(b), end: a.max(b) + 1 },
        location: Location::Zero,
    });
    let small = (any_block(), 1..40u64).prop_map(|(start, count)| Write {
        range: BlockRange::new(start, count),
        location: Location::Zero,
    });
    let placed = (any_block(), 1..=32u64, 1..4u64, 0..3u32, any::<prop::sample::Index>()).prop_map(
        |(start, count, blob, frame, index)| Write {
            range: BlockRange::new(start, count),
            location: data(blob, frame, u8::try_from(index.index(33 - to_usize(count))).unwrap()),
        },
    );
    prop_oneof![1 => zero, 2 => small, 9 => placed]
}

proptest! {
    #[test]
    fn a_tree_maps_what_was_written_last_and_says_what_it_changed(
        checkpoints in prop::collection::vec(prop::collection::vec(any_write(), 0..12), 1..6),
        limit in prop_oneof![Just(100), Just(4096), Just(MAP_OBJECT_BYTES)],
        probe in (any_block(), any_block()),
    ) {
        run(async {
            let mut world = World::new(limit);
            for writes in checkpoints {
                let mut overlay = ExtentMap::new();
                for Write { range, location } in writes {
                    overlay.insert(range, location);
                }
                let before = world.model.clone();
                let mut pages = world.pages_below(world.root.subtree()).await;
                let written_before = world.written();
                let changes = world.checkpoint(&overlay).await;
                prop_assert_eq!(&world.all().await, &world.model);

                let mut accounted = before;
                for change in changes {
                    match change {
                        Change::Mapped { range, location } => {
                            for (block, place) in spread([(range, location)]) {
                                prop_assert_eq!(accounted.insert(block, place), None);
                            }
                        }
                        Change::Unmapped { range, location } => {
                            for (block, place) in spread([(range, location)]) {
                                prop_assert_eq!(accounted.remove(&block), Some(place));
                            }
                        }
                        Change::PageDropped(page) => prop_assert!(pages.remove(&page)),
                        Change::SubtreeDropped(tree) => {
                            for page in world.pages_below(Some(tree)).await {
                                prop_assert!(pages.remove(&page));
                            }
                            let mut walk = Walk::new(Some(tree), tree.range(), &world.pages);
                            while let Some(extents) = walk.next(&mut |_| {}).await.unwrap() {
                                for (block, place) in spread(extents) {
                                    prop_assert_eq!(accounted.remove(&block), Some(place));
                                }
                            }
                        }
                    }
                }
                prop_assert_eq!(&accounted, &world.model);
                let now = world.pages_below(world.root.subtree()).await;
                prop_assert!(pages.is_subset(&now), "a page went without a word");
                let new: u64 = now.difference(&pages).map(|page| u64::from(page.len)).sum();
                prop_assert_eq!(new, world.written() - written_before, "bytes that nothing needs");
            }
            let range = BlockRange { start: probe.0.min(probe.1), end: probe.0.max(probe.1) };
            let (cold, _) = world.cold();
            cold.preload(&world.root).await.unwrap();
            let found = lookup(&world.root, range, &cold).await.unwrap();
            let mut at = range.start;
            for (part, _) in &found {
                prop_assert_eq!(part.start, at);
                at = part.end;
            }
            prop_assert_eq!(at, range.end);
            let mapped = found.into_iter().filter_map(|(part, place)| Some((part, place?)));
            let expected = world.model.range(range.start..range.end);
            prop_assert_eq!(spread(mapped), expected.map(|(block, place)| (*block, *place)).collect());
            Ok(())
        })?;
    }
}

#[test]
fn a_flipped_bit_in_a_page_is_an_error_that_names_the_object() {
    run(async {
        let mut world = World::new(MAP_OBJECT_BYTES);
        let mut overlay = ExtentMap::new();
        for index in 0..40 {
            overlay.insert(BlockRange::new(index * 5, 3), data(index % 3 + 1, 1, 2));
        }
        overlay.insert(BlockRange::new(5000, 3), data(1, 1, 2));
        world.checkpoint(&overlay).await;
        let root = world.root.page.unwrap();
        for bit in 0..root.len * 8 {
            let bit = usize::try_from(bit).unwrap();
            world.objects.flip(&root, bit);
            let error =
                lookup(&world.root, BlockRange::new(0, 1), &world.cold().0).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Corrupt);
            assert!(error.report().contains(&root.object.to_string()), "{}", error.report());
            world.objects.flip(&root, bit);
        }
    });
}

#[test]
fn a_discard_of_everything_reads_one_page_and_reports_the_subtrees() {
    run(async {
        let mut world = World::new(MAP_OBJECT_BYTES);
        let mut overlay = ExtentMap::new();
        for index in 0..20_000 {
            overlay.insert(BlockRange::new(index * 7000, 1), data(1, 1, 0));
        }
        world.checkpoint(&overlay).await;
        let mapped = world.model.len();
        let (cold, loads) = world.cold();
        world.pages = cold;
        let mut discard = ExtentMap::new();
        discard.insert(BlockRange::new(1, TREE_BLOCKS - 1), Location::Zero);
        let changes = world.checkpoint(&discard).await;
        assert_eq!(world.model.len(), 1);
        let dropped = |change: &&Change| matches!(change, Change::SubtreeDropped(_));
        let subtrees = changes.iter().filter(dropped).count();
        assert!(subtrees > 0 && subtrees < mapped / 10, "{subtrees} subtrees of {mapped} leaves");
        assert!(loads.load(Ordering::Relaxed) <= 4, "one page of each level is read");
        assert!(world.root.height <= 2, "one leaf is left, under one page at most");
        assert_eq!(world.all().await, world.model);
    });
}

#[test]
fn leaves_are_stored_first_and_the_pages_above_them_together_behind() {
    run(async {
        let mut world = World::new(MAP_OBJECT_BYTES);
        let mut overlay = ExtentMap::new();
        for index in 0..1500 {
            overlay.insert(BlockRange::new(index * 900, 1), data(1, 1, 0));
        }
        world.checkpoint(&overlay).await;
        let mut placed = Vec::new();
        let mut walk =
            Walk::new(world.root.subtree(), BlockRange::new(0, TREE_BLOCKS), &world.pages);
        while walk
            .next(&mut |tree| placed.push((tree.page.offset, tree.level)))
            .await
            .unwrap()
            .is_some()
        {}
        placed.sort_unstable();
        assert!(placed.is_sorted_by_key(|(_, level)| *level), "{placed:?}");
        assert_eq!(placed.last().unwrap().0, world.root.page.unwrap().offset);
    });
}

#[test]
fn a_page_in_the_place_of_another_is_refused() {
    run(async {
        let mut world = World::new(MAP_OBJECT_BYTES);
        let mut overlay = ExtentMap::new();
        for chunk in 0..3 {
            overlay.insert(BlockRange::new(chunk * CHUNK_BLOCKS, 1), data(1, 1, 0));
        }
        world.checkpoint(&overlay).await;
        let mut leaves = Vec::new();
        let mut walk =
            Walk::new(world.root.subtree(), BlockRange::new(0, TREE_BLOCKS), &world.pages);
        while walk.next(&mut |tree| leaves.push(tree)).await.unwrap().is_some() {}
        let moved = Root { height: 1, page: Some(leaves[2].page), upper_bytes: 0 };
        let error = lookup(&moved, BlockRange::new(0, 1), &world.cold().0).await.unwrap_err();
        assert!(error.report().contains("a page of level 0 at 1"), "{}", error.report());
        let (a, b) = (leaves[1].page, leaves[2].page);
        let page = Some(PageRef { offset: b.offset, len: b.len, ..a });
        let swapped = Root { height: 1, page, upper_bytes: 0 };
        let error = lookup(&swapped, BlockRange::new(0, 1), &world.cold().0).await.unwrap_err();
        assert!(error.report().contains("another page"), "{}", error.report());
    });
}

#[test]
fn readers_of_one_page_share_one_fetch_and_a_failed_fetch_is_tried_again() {
    run(async {
        let mut world = World::new(MAP_OBJECT_BYTES);
        let mut overlay = ExtentMap::new();
        overlay.insert(BlockRange::new(0, 1), data(1, 1, 0));
        world.checkpoint(&overlay).await;
        let (cold, loads) = world.cold();
        let held = world.objects.objects.lock().unwrap().drain().collect::<Vec<_>>();
        assert!(lookup(&world.root, BlockRange::new(0, 1), &cold).await.is_err());
        world.objects.objects.lock().unwrap().extend(held);
        let one = || lookup(&world.root, BlockRange::new(0, 1), &cold);
        let (a, b, c) = tokio::join!(one(), one(), one());
        assert!(a.unwrap() == b.unwrap() && c.is_ok());
        assert_eq!(loads.load(Ordering::Relaxed), 2, "the failed fetch, and one for all readers");
    });
}

#[test]
fn one_read_fetches_all_pages_above_the_leaves_of_a_disk_of_16_gib() {
    run(async {
        let mut world = World::new(MAP_OBJECT_BYTES);
        for round in 0..5 {
            let mut overlay = ExtentMap::new();
            for chunk in 0..if round == 0 { 4096 } else { 3 } {
                overlay.insert(
                    BlockRange::new((chunk + round * 700) * CHUNK_BLOCKS, 1),
                    data(1, 1, 0),
                );
            }
            world.checkpoint(&overlay).await;
            let (cold, loads) = world.cold();
            cold.preload(&world.root).await.unwrap();
            for chunk in [0, 600, 1100, 3000, 4095] {
                let before = loads.load(Ordering::Relaxed);
                lookup(&world.root, BlockRange::new(chunk * CHUNK_BLOCKS, 1), &cold).await.unwrap();
                let fetched = loads.load(Ordering::Relaxed) - before;
                assert_eq!(fetched, 1, "the leaf alone, in round {round}");
            }
        }
    });
}
