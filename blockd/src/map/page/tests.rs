//! Map pages: canonical, bounded, and never wrong in silence.

use proptest::prelude::*;

use super::*;
use crate::codec::testing::{any_edits, edited};
use crate::extent_map::ExtentMap;
use crate::ids::{DiskId, Nonce, ObjectId};

fn object(seed: u64) -> ObjectRef {
    let disk = DiskId(u128::from(seed % 3));
    let object = ObjectId { epoch: seed / 3 % 2, nonce: Nonce(seed / 6 % 2), seq: seed / 12 };
    ObjectRef { disk, object }
}

fn any_leaf() -> impl Strategy<Value = Page> {
    let extent = (0..CHUNK_BLOCKS, 1..=32u64, 0..60u64, 0..4u32, any::<prop::sample::Index>());
    (prop::collection::vec(extent, 1..60), 0..9u64).prop_map(|(extents, index)| {
        let position = Position { level: 0, index };
        let mut map = ExtentMap::new();
        for (start, count, blob, frame, place) in extents {
            let range = BlockRange::new(start, count.min(CHUNK_BLOCKS - start));
            let place = place.index(FRAME_BLOCKS_MAX + 1 - to_usize(range.count()));
            let location = Location::Data {
                blob: object(blob),
                frame_offset: frame * 70_000,
                frame_len: 70_000 + frame,
                index: u8::try_from(place).unwrap(),
            };
            let first = position.range().start;
            map.insert(BlockRange::new(first + range.start, range.count()), location);
        }
        let extents: Vec<_> = map.iter().map(|(range, location)| (range, *location)).collect();
        Page { position, body: Body::Leaf(Leaf::new(position.range().start, &extents)) }
    })
}

fn any_inner() -> impl Strategy<Value = Page> {
    let child = (0..60u64, any::<u32>(), 1..100_000u32, any::<u32>());
    let children = prop::collection::btree_map(0..FANOUT, child, 1..40);
    (children, 1..LEVELS_MAX, 0..9u64).prop_map(|(children, level, index)| {
        let page = |(seed, offset, len, crc)| PageRef { object: object(seed), offset, len, crc };
        let children: Vec<_> = children.into_iter().map(|(slot, it)| (slot, page(it))).collect();
        let index = index % (TREE_BLOCKS / blocks_below(level));
        Page { position: Position { level, index }, body: Body::Inner(Inner::new(&children)) }
    })
}

proptest! {
    #[test]
    fn a_page_reads_back_and_any_flipped_bit_is_noticed(
        page in prop_oneof![any_leaf(), any_inner()],
        bit: prop::sample::Index,
    ) {
        let (mut bytes, crc) = page.encode();
        prop_assert_eq!(Page::decode(&bytes), Ok((page, crc)));
        let bit = bit.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Page::decode(&bytes).is_err());
    }

    #[test]
    fn what_reads_as_a_page_is_the_only_encoding_of_that_page(
        page in prop_oneof![any_leaf(), any_inner()],
        edits in any_edits(),
    ) {
        let (bytes, _) = page.encode();
        let mut bytes = edited(&bytes[..bytes.len() - 4], &edits);
        seal(&mut bytes);
        if let Ok((page, _)) = Page::decode(&bytes) {
            prop_assert_eq!(page.encode().0, bytes);
        }
    }

    #[test]
    fn noise_behind_a_right_header_never_panics(
        noise in prop::collection::vec(any::<u8>(), 0..200),
        level in 0..5u8,
    ) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([PAGE_VERSION, level, 0]);
        bytes.extend(noise);
        seal(&mut bytes);
        if let Ok((page, _)) = Page::decode(&bytes) {
            prop_assert_eq!(page.encode().0, bytes);
        }
    }
}

#[test]
fn a_newer_version_is_refused_by_number() {
    let extents = [(
        BlockRange::new(0, 1),
        Location::Data { blob: object(1), frame_offset: 0, frame_len: 9, index: 0 },
    )];
    let body = Body::Leaf(Leaf::new(0, &extents));
    let (mut bytes, _) = Page { position: Position { level: 0, index: 0 }, body }.encode();
    bytes.truncate(bytes.len() - 4);
    bytes[4] = PAGE_VERSION + 1;
    seal(&mut bytes);
    let error = Page::decode(&bytes).unwrap_err().to_string();
    assert!(error.contains("version 2 is newer than this blockd reads (1)"), "{error}");
}

#[test]
fn the_leaf_of_a_sequential_file_is_small_and_the_worst_leaf_is_bounded() {
    let size = |location: &dyn Fn(u64) -> Location, run: u64| {
        let extent = |at: u64| (BlockRange::new(at * run, run), location(at));
        let extents: Vec<_> = (0..CHUNK_BLOCKS / run).map(extent).collect();
        let body = Body::Leaf(Leaf::new(0, &extents));
        Page { position: Position { level: 0, index: 0 }, body }.encode().0.len()
    };
    let frame = |at: u64| u32::try_from(at).unwrap() * 131_300;
    let sequential = size(
        &|at| Location::Data {
            blob: object(1),
            frame_offset: frame(at),
            frame_len: 131_300,
            index: 0,
        },
        32,
    );
    assert!(sequential < 350, "{sequential} bytes");
    let scattered = size(
        &|at| Location::Data {
            blob: object(at * 7919 % 4096 * 12),
            frame_offset: frame(at * 31 % 100),
            frame_len: 131_300,
            index: u8::try_from(at * 5 % 32).unwrap(),
        },
        1,
    );
    assert!(scattered < 16 << 10, "{scattered} bytes");
}
