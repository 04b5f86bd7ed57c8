//! Looking up blocks, and walking all that a tree maps.

use std::collections::VecDeque;
use std::sync::Arc;

use futures_util::future::try_join_all;

use super::page::{Body, Page, Position};
use super::{FANOUT, LOADS_AHEAD, PageRef, Pages, Root, blocks_below};
use crate::blob::Location;
use crate::error::{Error, Result};
use crate::geometry::BlockRange;

/// Some page of a tree and all that is below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subtree {
    /// The page.
    pub page: PageRef,
    /// Its level: 0 is a leaf.
    pub level: u8,
    /// The first block it covers.
    pub first: u64,
}

impl Root {
    /// The whole tree; none when nothing is mapped.
    #[must_use]
    pub fn subtree(&self) -> Option<Subtree> {
        let page = self.page?;
        Some(Subtree { page, level: self.height.checked_sub(1)?, first: 0 })
    }
}

impl Subtree {
    pub(super) fn position(&self) -> Position {
        Position::of(self.level, self.first)
    }

    pub(super) fn child(&self, slot: u64, page: PageRef) -> Self {
        let level = self.level - 1;
        Self { page, level, first: self.first + slot * blocks_below(level) }
    }

    /// The blocks below it.
    #[must_use]
    pub fn range(&self) -> BlockRange {
        BlockRange::new(self.first, blocks_below(self.level))
    }
}

/// The parts of `range` in order, without a gap between them: where the data lies, or `None` for what
/// reads as zeros.
///
/// # Errors
/// When a page cannot be had, or is not what was written.
pub async fn lookup(
    root: &Root,
    range: BlockRange,
    pages: &Pages,
) -> Result<Vec<(BlockRange, Option<Location>)>> {
    let mut found = Vec::new();
    let mut at = range.start;
    if let Some(top) = root.subtree() {
        let reach = range.intersect(top.range()).end;
        while at < reach {
            match descend(&top, at, pages).await? {
                Step::Hole { end } => at = end.min(reach),
                Step::Leaf { page, first } => {
                    let chunk = BlockRange::new(first, blocks_below(0));
                    let wanted = BlockRange { start: at, end: reach }.intersect(chunk);
                    let Body::Leaf(leaf) = &page.body else { unreachable!("leaves have level 0") };
                    for (part, location) in leaf.range(first, wanted) {
                        push_hole(&mut found, range.start, part.start);
                        found.push((part, Some(location)));
                    }
                    at = wanted.end;
                }
            }
        }
    }
    push_hole(&mut found, range.start, range.end);
    Ok(found)
}

type Found = Vec<(BlockRange, Option<Location>)>;

/// Fills up with a hole to `end`; `start` is where the first part starts.
fn push_hole(found: &mut Found, start: u64, end: u64) {
    let start = found.last().map_or(start, |(part, _)| part.end);
    if start < end {
        found.push((BlockRange { start, end }, None));
    }
}

/// What lies at a block.
enum Step {
    /// Nothing is mapped up to `end`.
    Hole { end: u64 },
    /// A leaf, whose chunk starts at `first`.
    Leaf { page: Arc<Page>, first: u64 },
}

/// Goes down from `top` to `block`.
async fn descend(top: &Subtree, block: u64, pages: &Pages) -> Result<Step> {
    let mut here = *top;
    loop {
        let page = pages.get(&here.page, here.position()).await?;
        let Body::Inner(inner) = &page.body else {
            return Ok(Step::Leaf { page, first: here.first });
        };
        let below = blocks_below(here.level - 1);
        let slot = (block - here.first) / below;
        match inner.next_child(slot) {
            Some((found, child)) if found == slot => here = here.child(slot, child),
            found => {
                let next = found.map_or(FANOUT, |(next, _)| next);
                return Ok(Step::Hole { end: here.first + next * below });
            }
        }
    }
}

/// Walks the pages of a tree that reach into a range, each before those below it, in the order of
/// their blocks. Reads leaves ahead, a few at a time, so that memory stays bounded.
#[derive(Debug)]
pub struct Walk<'a> {
    range: BlockRange,
    pages: &'a Pages,
    /// What is still to be read, the next one last.
    pending: Vec<Subtree>,
    /// What was read ahead, the next one first.
    ready: VecDeque<(Subtree, Arc<Page>)>,
}

impl<'a> Walk<'a> {
    /// A walk of what `tree` maps within `range`.
    #[must_use]
    pub fn new(tree: Option<Subtree>, range: BlockRange, pages: &'a Pages) -> Self {
        let pending = tree.into_iter().filter(|tree| tree.range().overlaps(range)).collect();
        Self { range, pages, pending, ready: VecDeque::new() }
    }

    /// The extents of the next leaf that has any in the range; `None` at the end. Tells `visit` each
    /// page on the way, once.
    ///
    /// # Errors
    /// When a page cannot be had, or is not what was written. The next call tries again.
    pub async fn next(
        &mut self,
        visit: &mut (dyn FnMut(Subtree) + Send),
    ) -> Result<Option<Vec<(BlockRange, Location)>>> {
        loop {
            if self.ready.is_empty() {
                self.read_ahead().await?;
            }
            let Some((tree, page)) = self.ready.pop_front() else { return Ok(None) };
            visit(tree);
            match &page.body {
                Body::Leaf(leaf) => {
                    let extents: Vec<_> = leaf.range(tree.first, self.range).collect();
                    if !extents.is_empty() {
                        return Ok(Some(extents));
                    }
                }
                Body::Inner(inner) => {
                    let children = inner.children().map(|(slot, page)| tree.child(slot, page));
                    let start = self.pending.len();
                    let within = children.filter(|child| child.range().overlaps(self.range));
                    self.pending.extend(within);
                    self.pending[start..].reverse();
                }
            }
        }
    }

    /// Reads the next page, or, where they are leaves, the next few side by side.
    async fn read_ahead(&mut self) -> Result<()> {
        let next = self.pending.iter().rev().take(LOADS_AHEAD);
        let count = next.take_while(|tree| tree.level == 0).count().max(1);
        let from = self.pending.len().saturating_sub(count);
        let pages = self.pages;
        let read = self.pending[from..].iter().rev().map(|tree| async move {
            Ok::<_, Error>((*tree, pages.get(&tree.page, tree.position()).await?))
        });
        self.ready = try_join_all(read).await?.into();
        self.pending.truncate(from);
        Ok(())
    }
}
