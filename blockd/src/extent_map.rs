//! A map from blocks to values, kept as extents: the dirty index, the overlay over the chunk map, a
//! blob's part of a disk.
//!
//! Extents never overlap. A later insert wins: what it covers of older extents is cut away and handed
//! to the caller, who accounts for it. The length of an extent costs nothing, so a discard of the
//! whole disk is one extent; every operation is a few steps of a B-tree and one per extent that it
//! cuts. Extents that [`Advance::joins`] calls one are kept as one.

use std::collections::BTreeMap;

use crate::geometry::BlockRange;

/// A value that covers a run of blocks.
pub trait Advance: Clone {
    /// The value of what remains when the first `blocks` blocks of its extent are cut off.
    #[must_use]
    fn advance(&self, blocks: u64) -> Self;

    /// Whether [`Advance::joins`] is ever true. Looking for what to join doubles the cost of an insert.
    const JOINS: bool = false;

    /// Whether an extent with value `next` that follows an extent of `blocks` blocks with this value
    /// is its continuation, so that both can be kept as one. Must hold of the two parts of any split.
    fn joins(&self, blocks: u64, next: &Self) -> bool {
        let _ = (blocks, next);
        false
    }
}

/// Non-overlapping extents of blocks, each with a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentMap<V> {
    /// By first block.
    extents: BTreeMap<u64, Extent<V>>,
    /// Blocks in all extents.
    block_count: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Extent<V> {
    end: u64,
    value: V,
}

impl<V> Default for ExtentMap<V> {
    fn default() -> Self {
        Self { extents: BTreeMap::new(), block_count: 0 }
    }
}

impl<V: Advance> ExtentMap<V> {
    /// A map without extents.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of extents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// Whether there are no extents.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Blocks in all extents.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.block_count
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.extents.clear();
        self.block_count = 0;
    }

    /// Maps `range` to `value`; what it covered before is lost.
    pub fn insert(&mut self, range: BlockRange, value: V) {
        self.insert_with(range, value, |_, _| {});
    }

    /// Maps `range` to `value` and hands what it covered before to `displaced`, in order.
    pub fn insert_with(
        &mut self,
        range: BlockRange,
        value: V,
        mut displaced: impl FnMut(BlockRange, V),
    ) {
        if range.is_empty() {
            return;
        }
        // The last extent that starts before the end of the range tells what most writes need to
        // know: that they overwrite exactly what was written before, or nothing.
        match self.extents.range_mut(..range.end).next_back() {
            Some((&start, old)) if start == range.start && old.end == range.end => {
                displaced(range, std::mem::replace(&mut old.value, value));
            }
            last => {
                if last.is_some_and(|(_, old)| old.end > range.start) {
                    self.remove_with(range, displaced);
                }
                self.extents.insert(range.start, Extent { end: range.end, value });
                self.block_count += range.count();
            }
        }
        if V::JOINS {
            self.join_at(range.end);
            self.join_at(range.start);
        }
    }

    /// Makes one extent of those that meet at `border`, where they are one.
    fn join_at(&mut self, border: u64) {
        if let Some((&start, left)) = self.extents.range(..border).next_back()
            && left.end == border
            && let Some(right) = self.extents.get(&border)
            && left.value.joins(border - start, &right.value)
        {
            let end = right.end;
            self.extents.remove(&border);
            self.extents.get_mut(&start).expect("it was just found").end = end;
        }
    }

    /// Unmaps `range`; what it covered is lost.
    pub fn remove(&mut self, range: BlockRange) {
        self.remove_with(range, |_, _| {});
    }

    /// Unmaps `range` and hands what it covered to `displaced`, in order.
    pub fn remove_with(&mut self, range: BlockRange, mut displaced: impl FnMut(BlockRange, V)) {
        if range.is_empty() {
            return;
        }
        let mut lost = 0;
        let mut tail = None;
        if let Some((&start, extent)) = self.extents.range_mut(..range.start).next_back()
            && extent.end > range.start
        {
            let old = Extent { end: extent.end, value: extent.value.advance(range.start - start) };
            extent.end = range.start;
            tail = cut(range.start, old, range, &mut lost, &mut displaced);
        }
        for (start, old) in self.extents.extract_if(range.start..range.end, |_, _| true) {
            tail = cut(start, old, range, &mut lost, &mut displaced);
        }
        if let Some(tail) = tail {
            self.extents.insert(range.end, tail);
        }
        self.block_count -= lost;
    }

    /// The value of `block`, as of that block.
    #[must_use]
    pub fn get(&self, block: u64) -> Option<V> {
        let (start, extent) = self.extents.range(..=block).next_back()?;
        (block < extent.end).then(|| extent.value.advance(block - start))
    }

    /// The parts of `range` in order, without a gap between them: extents clipped to it, and `None`
    /// for what is not mapped.
    pub fn lookup(&self, range: BlockRange) -> impl Iterator<Item = (BlockRange, Option<V>)> + '_ {
        let mut extents = self.range(range).peekable();
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let start = at;
            match extents.peek() {
                Some((part, _)) if part.start == start => {
                    let (part, value) = extents.next().expect("it was just peeked at");
                    at = part.end;
                    Some((part, Some(value)))
                }
                next => {
                    at = next.map_or(range.end, |(part, _)| part.start);
                    Some((BlockRange { start, end: at }, None))
                }
            }
        })
    }

    /// The extents within `range`, clipped to it, in order.
    pub fn range(&self, range: BlockRange) -> impl Iterator<Item = (BlockRange, V)> + '_ {
        let first = self
            .extents
            .range(..=range.start)
            .next_back()
            .filter(|(_, extent)| !range.is_empty() && extent.end > range.start);
        // Most reads end within the extent they start in, and need no second search.
        let covered = first.map_or(range.start, |(_, extent)| extent.end);
        let rest = (covered < range.end).then(|| self.extents.range(covered..range.end));
        let rest = rest.into_iter().flatten();
        first.into_iter().chain(rest).map(move |(&start, extent)| {
            let part = BlockRange { start, end: extent.end }.intersect(range);
            (part, extent.value.advance(part.start - start))
        })
    }

    /// Every extent in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (BlockRange, &V)> + '_ {
        self.extents
            .iter()
            .map(|(&start, extent)| (BlockRange { start, end: extent.end }, &extent.value))
    }
}

/// Takes `range` out of an extent that starts within it: reports what is lost and returns what
/// remains behind `range.end`.
fn cut<V: Advance>(
    start: u64,
    old: Extent<V>,
    range: BlockRange,
    lost: &mut u64,
    displaced: &mut impl FnMut(BlockRange, V),
) -> Option<Extent<V>> {
    let end = old.end.min(range.end);
    let tail = (old.end > range.end)
        .then(|| Extent { end: old.end, value: old.value.advance(range.end - start) });
    *lost += end - start;
    displaced(BlockRange { start, end }, old.value);
    tail
}

#[cfg(test)]
mod tests;
