//! Looking up blocks, and walking all that a tree maps.

use std::sync::Arc;

use super::page::{Body, Page, Position};
use super::{FANOUT, PageRef, Pages, Root, blocks_below};
use crate::blob::Location;
use crate::error::Result;
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
    fn position(&self) -> Position {
        Position::of(self.level, self.first)
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
            match descend(&top, at, pages, &mut |_| {}).await? {
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

/// Goes down from `top` to `block`; tells `visit` each page on the way that starts at `block`, so that
/// a walk from the start of a tree tells each of its pages once.
async fn descend(
    top: &Subtree,
    block: u64,
    pages: &Pages,
    visit: &mut (dyn FnMut(Subtree) + Send),
) -> Result<Step> {
    let mut here = *top;
    loop {
        let position = here.position();
        let page = pages.get(&here.page, position).await?;
        if here.first >= block {
            visit(here);
        }
        let Body::Inner(inner) = &page.body else {
            return Ok(Step::Leaf { page, first: here.first });
        };
        let below = blocks_below(here.level - 1);
        let slot = (block - here.first) / below;
        match inner.next_child(slot) {
            Some((found, child)) if found == slot => {
                let first = here.first + slot * below;
                here = Subtree { page: child, level: here.level - 1, first };
            }
            found => {
                let next = found.map_or(FANOUT, |(next, _)| next);
                return Ok(Step::Hole { end: here.first + next * below });
            }
        }
    }
}

/// Walks what a tree maps within a range, leaf by leaf, so that memory stays bounded.
#[derive(Debug)]
pub struct Walk<'a> {
    top: Option<Subtree>,
    at: u64,
    end: u64,
    pages: &'a Pages,
}

impl<'a> Walk<'a> {
    /// A walk of what `tree` maps within `range`.
    #[must_use]
    pub fn new(tree: Option<Subtree>, range: BlockRange, pages: &'a Pages) -> Self {
        let range = tree.map_or(BlockRange::new(0, 0), |top| range.intersect(top.range()));
        Self { top: tree, at: range.start, end: range.end, pages }
    }

    /// The extents of the next leaf that has any; `None` at the end. A walk over the whole of a tree
    /// also tells `visit` every page, each before what is below it.
    ///
    /// # Errors
    /// When a page cannot be had, or is not what was written. The next call tries again, and may tell
    /// pages that were told before.
    pub async fn next(
        &mut self,
        visit: &mut (dyn FnMut(Subtree) + Send),
    ) -> Result<Option<Vec<(BlockRange, Location)>>> {
        while let Some(top) = self.top.filter(|_| self.at < self.end) {
            match descend(&top, self.at, self.pages, visit).await? {
                Step::Hole { end } => self.at = end.min(self.end),
                Step::Leaf { page, first } => {
                    let Body::Leaf(leaf) = &page.body else { unreachable!("leaves have level 0") };
                    let rest = BlockRange { start: self.at, end: self.end };
                    let extents: Vec<_> = leaf.range(first, rest).collect();
                    self.at = (first + blocks_below(0)).min(self.end);
                    if !extents.is_empty() {
                        return Ok(Some(extents));
                    }
                }
            }
        }
        Ok(None)
    }
}
