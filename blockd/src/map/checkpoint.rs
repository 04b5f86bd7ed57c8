//! The next tree from the last one and an overlay of newer extents.
//!
//! Only leaves that the overlay touches are read and written again, and the path above them. Leaves
//! are written one at a time; the pages above wait for the last leaf of the page that they are below,
//! at most 512 of them per level, and follow together, the root last. A zero extent over whole subtrees takes them out of the page
//! above without reading them: what they held is for the caller to account for later, from the
//! [`Subtree`] that is reported.
//!
//! Nothing stored is changed: until the new root is committed, the old one stands.

use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt, try_join_all};

use super::page::{Body, Inner, Leaf, Page, Position};
use super::{
    LOADS_AHEAD, MapObjectWriter, PageRef, Pages, Root, Subtree, blocks_below, height_for,
};
use crate::blob::Location;
use crate::error::Result;
use crate::extent_map::{Advance, ExtentMap};
use crate::geometry::BlockRange;
use crate::ids::ObjectRef;

/// Most bytes of unchanged inner pages that are copied to lie beside the root: those of some 16 GiB of
/// a full disk, little beside what a checkpoint writes anyway.
const UPPER_COPIED_BYTES_MAX: u64 = 64 << 10;

/// What a checkpoint changes, for the accounts of live bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Data that the tree now maps.
    Mapped {
        /// Which blocks.
        range: BlockRange,
        /// Where their data lies.
        location: Location,
    },
    /// Data that the tree no longer maps. Data mapped again to where it was is reported as both.
    Unmapped {
        /// Which blocks.
        range: BlockRange,
        /// Where their data lies.
        location: Location,
    },
    /// A page that is no longer part of the tree; what was below it is reported on its own.
    PageDropped(PageRef),
    /// A page that is no longer part of the tree, with all that is below it: [`super::Walk`] tells.
    SubtreeDropped(Subtree),
}

/// Writes the tree that maps what `root` maps, overlaid by `overlay`: its data is mapped, its zeros
/// are unmapped. Tells `report` every change.
///
/// # Errors
/// When a page cannot be had or stored. What was already written is then garbage.
pub async fn apply(
    root: &Root,
    overlay: &ExtentMap<Location>,
    pages: &Pages,
    writer: &mut MapObjectWriter<'_>,
    report: &mut (dyn FnMut(Change) + Send),
) -> Result<Root> {
    let data = overlay.iter().rev().find(|(_, location)| **location != Location::Zero);
    let height = data.map_or(0, |(range, _)| height_for(range.end)).max(root.height);
    let Some(level) = height.checked_sub(1) else { return Ok(Root::EMPTY) };
    let mut checkpoint = Checkpoint { overlay, pages, writer, report, upper: None };
    let top = Position { level, index: 0 };
    match checkpoint.node(top, root.subtree()).await? {
        Node::Absent => Ok(Root::EMPTY),
        Node::Stored(page) if root.page == Some(page) => Ok(*root),
        Node::Stored(page) => Ok(Root { height, page: Some(page), upper_bytes: page.len }),
        Node::Pending(top) => checkpoint.root(top).await,
    }
}

struct Checkpoint<'a, 'w> {
    overlay: &'a ExtentMap<Location>,
    pages: &'a Pages,
    writer: &'a mut MapObjectWriter<'w>,
    report: &'a mut (dyn FnMut(Change) + Send),
    /// Where the inner pages start that were written last, with no leaf among them.
    upper: Option<(ObjectRef, u32)>,
}

/// What has become of a place in the tree.
enum Node {
    Absent,
    Stored(PageRef),
    /// An inner page that is still to be written, after all its leaves.
    Pending(Pending),
}

struct Pending {
    position: Position,
    children: Vec<(u64, PageRef)>,
    /// The page it takes the place of.
    replaces: Option<PageRef>,
}

impl Checkpoint<'_, '_> {
    /// The page at `position`, which is to change, where the old tree has `old`: the page of this
    /// position, or, above the old root, that root.
    async fn node(&mut self, position: Position, old: Option<Subtree>) -> Result<Node> {
        if self.erases(position) {
            if let Some(old) = old {
                (self.report)(Change::SubtreeDropped(old));
            }
            return Ok(Node::Absent);
        }
        match position.level {
            0 => {
                let page = load(self.pages, old).await?;
                self.leaf(position, old, page.as_deref()).await
            }
            _ => self.inner(position, old).await,
        }
    }

    async fn leaf(
        &mut self,
        position: Position,
        old: Option<Subtree>,
        page: Option<&Page>,
    ) -> Result<Node> {
        let range = position.range();
        let before = match page.map(|page| &page.body) {
            Some(Body::Leaf(leaf)) => leaf.range(range.start, range).collect(),
            _ => Vec::new(),
        };
        let after = merge(before, self.overlay.range(range), self.report);
        if !after.is_empty() {
            let body = Body::Leaf(Leaf::new(range.start, &after));
            if let (Some(old), Some(page)) = (old, page)
                && page.body == body
            {
                return Ok(Node::Stored(old.page));
            }
            let stored = self.write(position, body).await?;
            self.drop_page(old.map(|old| old.page));
            return Ok(Node::Stored(stored));
        }
        self.drop_page(old.map(|old| old.page));
        Ok(Node::Absent)
    }

    fn inner(&mut self, position: Position, old: Option<Subtree>) -> BoxFuture<'_, Result<Node>> {
        async move {
            let replaces = old.filter(|old| old.level == position.level);
            let page = load(self.pages, replaces).await?;
            let olds: Vec<_> = match (replaces, page.as_deref()) {
                (Some(old), Some(Page { body: Body::Inner(inner), .. })) => {
                    inner.children().map(|(slot, page)| (slot, old.child(slot, page))).collect()
                }
                // Above the old root there is no old page, and that root is the first child.
                _ => old.map(|old| (0, old)).into_iter().collect(),
            };
            let children = self.children(position, &olds).await?;
            let unchanged =
                children.iter().copied().eq(olds.iter().map(|&(slot, old)| (slot, old.page)));
            let replaces = replaces.map(|old| old.page);
            match replaces {
                Some(page) if unchanged => Ok(Node::Stored(page)),
                _ if children.is_empty() => {
                    self.drop_page(replaces);
                    Ok(Node::Absent)
                }
                _ => Ok(Node::Pending(Pending { position, children, replaces })),
            }
        }
        .boxed()
    }

    /// The new children of the page at `position`, all of them written.
    async fn children(
        &mut self,
        position: Position,
        olds: &[(u64, Subtree)],
    ) -> Result<Vec<(u64, PageRef)>> {
        let mut touched = self.touched(position);
        // An old root that is to lie deeper than just below this page needs pages between.
        let lifted = olds.first().is_some_and(|(_, old)| old.level + 1 < position.level);
        if lifted && touched.first() != Some(&0) {
            touched.insert(0, 0);
        }
        let old_of = |slot: u64| {
            olds.binary_search_by_key(&slot, |&(slot, _)| slot).ok().map(|at| olds[at].1)
        };
        let mut nodes = Vec::with_capacity(touched.len());
        for group in touched.chunks(LOADS_AHEAD) {
            if position.level == 1 {
                // Read the leaves of a group side by side; `node` then finds them in the cache.
                let kept = group.iter().filter(|&&slot| !self.erases(position.child(slot)));
                let pages = self.pages;
                try_join_all(kept.map(|&slot| load(pages, old_of(slot)))).await?;
            }
            for &slot in group {
                nodes.push((slot, self.node(position.child(slot), old_of(slot)).await?));
            }
            tokio::task::yield_now().await;
        }
        let mut children: Vec<_> = olds
            .iter()
            .filter(|(slot, _)| touched.binary_search(slot).is_err())
            .map(|&(slot, old)| (slot, old.page))
            .collect();
        for (slot, node) in nodes {
            match node {
                Node::Absent => {}
                Node::Stored(page) => children.push((slot, page)),
                Node::Pending(pending) => children.push((slot, self.write_inner(pending).await?)),
            }
        }
        children.sort_unstable_by_key(|&(slot, _)| slot);
        Ok(children)
    }

    /// Whether the overlay has one extent of zeros over all that is at `position`.
    fn erases(&self, position: Position) -> bool {
        let range = position.range();
        self.overlay.range(range).next() == Some((range, Location::Zero))
    }

    /// The children of the page at `position` that the overlay touches.
    fn touched(&self, position: Position) -> Vec<u64> {
        let range = position.range();
        let below = blocks_below(position.level - 1);
        let mut slots = Vec::new();
        let mut rest = range;
        while let Some((part, _)) = self.overlay.range(rest).next() {
            let slot = (part.start - range.start) / below;
            slots.push(slot);
            rest.start = range.start + (slot + 1) * below;
        }
        slots
    }

    async fn write_inner(&mut self, pending: Pending) -> Result<PageRef> {
        let body = Body::Inner(Inner::new(&pending.children));
        let stored = self.write(pending.position, body).await?;
        self.drop_page(pending.replaces);
        Ok(stored)
    }

    async fn write(&mut self, position: Position, body: Body) -> Result<PageRef> {
        let page = Page { position, body };
        let (bytes, crc) = page.encode();
        let stored = self.writer.add(&bytes, crc).await?;
        if position.level == 0 {
            self.upper = None;
        } else if self.upper.is_none_or(|(object, _)| object != stored.object) {
            self.upper = Some((stored.object, stored.offset));
        }
        self.pages.insert(&stored, Arc::new(page));
        Ok(stored)
    }

    fn drop_page(&mut self, page: Option<PageRef>) {
        if let Some(page) = page {
            (self.report)(Change::PageDropped(page));
        }
    }

    /// The root: the top page, unless all that it would hold is a first child, which then takes its
    /// place, and so on down. A page that was written just now stays, even if it is not needed:
    /// dropping it would be the change of an object that is not stored yet.
    async fn root(&mut self, mut top: Pending) -> Result<Root> {
        let mut level = top.position.level;
        let [(0, child)] = top.children[..] else {
            self.bring_together(&mut top).await?;
            let page = self.write_inner(top).await?;
            let start = self.upper.filter(|(object, _)| *object == page.object);
            let start = start.map_or(page.offset, |(_, offset)| offset);
            let upper_bytes = page.offset - start + page.len;
            return Ok(Root { height: level + 1, page: Some(page), upper_bytes });
        };
        self.drop_page(top.replaces);
        let mut page = child;
        loop {
            level -= 1;
            let read = self.pages.get(&page, Position { level, index: 0 }).await?;
            let Body::Inner(inner) = &read.body else { break };
            let mut children = inner.children();
            let (Some((0, child)), None) = (children.next(), children.next()) else { break };
            if self.writer.holds(&page.object) {
                break;
            }
            self.drop_page(Some(page));
            page = child;
        }
        Ok(Root { height: level + 1, page: Some(page), upper_bytes: page.len })
    }

    /// Copies the inner pages below the root that lie elsewhere, where they are small, so that one
    /// read fetches them with it.
    async fn bring_together(&mut self, top: &mut Pending) -> Result<()> {
        let is_far = |page: &PageRef| !self.writer.holds(&page.object);
        let far: Vec<_> = top.children.iter_mut().filter(|(_, page)| is_far(page)).collect();
        let far_bytes: u64 = far.iter().map(|(_, page)| u64::from(page.len)).sum();
        if top.position.level < 2 || far_bytes > UPPER_COPIED_BYTES_MAX {
            return Ok(());
        }
        for (slot, page) in far {
            let position = top.position.child(*slot);
            let read = self.pages.get(page, position).await?;
            self.drop_page(Some(*page));
            *page = self.write(position, read.body.clone()).await?;
        }
        Ok(())
    }
}

/// The page at the top of a subtree.
async fn load(pages: &Pages, old: Option<Subtree>) -> Result<Option<Arc<Page>>> {
    let Some(old) = old else { return Ok(None) };
    Ok(Some(pages.get(&old.page, old.position()).await?))
}

/// The extents of a leaf: `old` ones, ascending, overlaid by `new` ones.
fn merge(
    old: Vec<(BlockRange, Location)>,
    new: impl Iterator<Item = (BlockRange, Location)>,
    report: &mut (dyn FnMut(Change) + Send),
) -> Vec<(BlockRange, Location)> {
    let mut merged = Vec::with_capacity(old.len() + 16);
    let mut old = old.into_iter();
    let mut next = old.next();
    for (part, placed) in new {
        while let Some((range, location)) = next.filter(|(range, _)| range.start < part.end) {
            if range.start < part.start {
                let end = range.end.min(part.start);
                push(&mut merged, BlockRange { start: range.start, end }, location);
            }
            let covered = range.intersect(part);
            if !covered.is_empty() {
                let location = location.advance(covered.start - range.start);
                report(Change::Unmapped { range: covered, location });
            }
            if range.end > part.end {
                let rest = BlockRange { start: part.end, end: range.end };
                next = Some((rest, location.advance(part.end - range.start)));
                break;
            }
            next = old.next();
        }
        if placed != Location::Zero {
            report(Change::Mapped { range: part, location: placed });
            push(&mut merged, part, placed);
        }
    }
    for (range, location) in next.into_iter().chain(old) {
        push(&mut merged, range, location);
    }
    merged
}

/// Adds an extent, to the one before where it continues that.
fn push(merged: &mut Vec<(BlockRange, Location)>, range: BlockRange, location: Location) {
    if let Some((last, place)) = merged.last_mut()
        && last.end == range.start
        && place.joins(last.count(), &location)
    {
        last.end = range.end;
    } else {
        merged.push((range, location));
    }
}
