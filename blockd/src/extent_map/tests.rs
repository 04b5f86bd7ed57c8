//! Extent maps against an array of blocks.

use proptest::prelude::*;

use super::*;

/// A value that knows where it came from: writer and distance from the start of its extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    writer: u32,
    offset: u64,
    joining: bool,
}

impl Advance for Mark {
    fn advance(&self, blocks: u64) -> Self {
        Self { offset: self.offset + blocks, ..*self }
    }

    const JOINS: bool = true;

    fn joins(&self, blocks: u64, next: &Self) -> bool {
        self.joining && self.advance(blocks) == *next
    }
}

const BLOCKS: u64 = 64;

#[derive(Debug, Clone)]
enum Step {
    Insert(BlockRange),
    Remove(BlockRange),
}

fn any_range() -> impl Strategy<Value = BlockRange> {
    (0..BLOCKS, 0..24u64)
        .prop_map(|(start, count)| BlockRange { start, end: (start + count).min(BLOCKS) })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![3 => any_range().prop_map(Step::Insert), 1 => any_range().prop_map(Step::Remove)]
}

/// The plain model: one cell per block.
fn paint(model: &mut [Option<Mark>], range: BlockRange, mark: Option<Mark>) -> Vec<(u64, Mark)> {
    let mut old = Vec::new();
    for block in range.start..range.end {
        let cell = &mut model[usize::try_from(block).unwrap()];
        old.extend(cell.map(|mark| (block, mark)));
        *cell = mark.map(|mark| mark.advance(block - range.start));
    }
    old
}

fn blocks(parts: impl IntoIterator<Item = (BlockRange, Mark)>) -> Vec<(u64, Mark)> {
    let spread = |(range, mark): (BlockRange, Mark)| {
        assert!(!range.is_empty(), "an empty extent at {}", range.start);
        (range.start..range.end).map(move |block| (block, mark.advance(block - range.start)))
    };
    parts.into_iter().flat_map(spread).collect()
}

proptest! {
    #[test]
    fn the_map_is_an_array_in_fewer_words(
        steps in prop::collection::vec(any_step(), 1..40),
        probe in any_range(),
        joining: bool,
    ) {
        let mut map = ExtentMap::new();
        let mut model = vec![None; usize::try_from(BLOCKS).unwrap()];
        for (writer, step) in (0..).zip(steps) {
            let mut displaced = Vec::new();
            let old = match step {
                Step::Insert(range) => {
                    let mark = Mark { writer: if joining { 0 } else { writer }, offset: range.start, joining };
                    map.insert_with(range, mark, |part, mark| displaced.push((part, mark)));
                    paint(&mut model, range, Some(mark))
                }
                Step::Remove(range) => {
                    map.remove_with(range, |part, mark| displaced.push((part, mark)));
                    paint(&mut model, range, None)
                }
            };
            prop_assert_eq!(blocks(displaced), old);
            let all: Vec<_> = map.iter().map(|(range, mark)| (range, *mark)).collect();
            prop_assert!(all.windows(2).all(|pair| pair[0].0.end <= pair[1].0.start));
            prop_assert_eq!(all.len(), map.len());
            let expected: Vec<_> = (0..)
                .zip(&model)
                .filter_map(|(block, cell)| cell.map(|mark| (block, mark)))
                .collect();
            prop_assert_eq!(map.block_count(), expected.len() as u64);
            prop_assert_eq!(blocks(all), expected);
        }
        for block in 0..BLOCKS {
            prop_assert_eq!(map.get(block), model[usize::try_from(block).unwrap()]);
        }
        let mut at = probe.start;
        for (part, mark) in map.lookup(probe) {
            prop_assert_eq!(part.start, at);
            at = part.end;
            for block in part.start..part.end {
                let expected = model[usize::try_from(block).unwrap()];
                prop_assert_eq!(mark.map(|mark| mark.advance(block - part.start)), expected);
            }
        }
        prop_assert_eq!(at, probe.end.max(probe.start));
        if joining {
            let ends: Vec<_> = map.iter().map(|(range, _)| range).collect();
            prop_assert!(ends.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", ends);
        }
    }
}

#[test]
fn a_discard_of_the_largest_disk_is_one_extent() {
    let mut map = ExtentMap::new();
    let mark = |writer| Mark { writer, offset: 0, joining: false };
    for index in 0..1000 {
        map.insert(BlockRange::new(index * 7, 3), mark(1));
    }
    let mut displaced = 0;
    map.insert_with(BlockRange::new(0, 1 << 34), mark(2), |range, _| displaced += range.count());
    assert_eq!((map.len(), displaced, map.block_count()), (1, 3000, 1 << 34));
    map.insert(BlockRange::new(1 << 20, 1), mark(3));
    assert_eq!(map.len(), 3);
    assert_eq!(map.get((1 << 20) + 1).unwrap().offset, (1 << 20) + 1);
}
