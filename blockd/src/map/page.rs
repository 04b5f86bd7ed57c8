//! The nodes of the tree and their bytes.
//!
//! ```text
//!  bytes     field
//!      4     magic "bkMP"
//!      1     version, 1
//!      1     level: 0 is a leaf
//!  varint    which of its level: first block / blocks below a page of this level
//!   list     objects referred to (see `codec`): blobs of a leaf, map objects of an inner page
//!
//!            leaf                                     inner page
//!  varint    frames, then by column:                  children, then by column:
//!  varint      blob, to the one before                  gap to the slot before, less 1
//!  varint      bytes                                    map object
//!   delta      offset, to the end of the frame before;  offset
//!              to 0 where that is in another blob
//!            extents, then by column:                   bytes
//!  varint      gap to the end of the extent before      4 bytes CRC32 of the page
//!  1 byte      blocks less 1
//!   delta      frame, to that of the extent before
//!  1 byte      block within the frame
//!
//!      4     CRC32 of all the above, which the page above repeats
//! ```
//!
//! Everything ascends: objects, frames by (blob, offset), extents and children by place. Each object
//! and frame is used, and two extents that could be one are one: a page has one encoding. Version
//! history: 1, the first. A reader refuses newer versions.

use crate::blob::{FRAME_BLOCKS_MAX, Location};
use crate::codec::{
    Decoded, Reader, decode_objects, encode_objects, put_delta, put_varint, seal, unseal,
};
use crate::extent_map::Advance;
use crate::geometry::{BlockRange, to_u64, to_usize};
use crate::ids::ObjectRef;
use crate::map::{CHUNK_BLOCKS, FANOUT, LEVELS_MAX, PageRef, TREE_BLOCKS, blocks_below};

const MAGIC: [u8; 4] = *b"bkMP";
/// The newest version of pages that this code writes and reads.
pub const PAGE_VERSION: u8 = 1;
const LEAF: u8 = 0;

/// A node of the tree, read and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) position: Position,
    pub(super) body: Body,
}

/// Where in the tree a page belongs: it covers the blocks from `index * blocks_below(level)` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) level: u8,
    pub(super) index: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    Leaf(Leaf),
    Inner(Inner),
}

/// The extents of one chunk, as small in memory as on disk: a leaf of 1,024 scattered blocks is 20 KB.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Leaf {
    blobs: Vec<ObjectRef>,
    frames: Vec<FrameRef>,
    extents: Vec<LeafExtent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FrameRef {
    blob: u16,
    offset: u32,
    len: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LeafExtent {
    /// First block, from the start of the chunk.
    start: u16,
    blocks: u8,
    index: u8,
    frame: u16,
}

/// The children of an inner page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Inner {
    objects: Vec<ObjectRef>,
    children: Vec<Child>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Child {
    slot: u16,
    object: u16,
    offset: u32,
    len: u32,
    crc: u32,
}

impl Position {
    pub(super) fn of(level: u8, block: u64) -> Self {
        Self { level, index: block / blocks_below(level) }
    }

    /// The blocks below the page.
    pub(super) fn range(self) -> BlockRange {
        BlockRange::new(self.index * blocks_below(self.level), blocks_below(self.level))
    }

    pub(super) fn child(self, slot: u64) -> Self {
        Self { level: self.level - 1, index: self.index * FANOUT + slot }
    }
}

impl Page {
    /// The bytes of the page and their CRC32.
    pub(super) fn encode(&self) -> (Vec<u8>, u32) {
        let mut out = Vec::with_capacity(256);
        out.extend(MAGIC);
        out.extend([PAGE_VERSION, self.position.level]);
        put_varint(&mut out, self.position.index);
        match &self.body {
            Body::Leaf(leaf) => leaf.encode(&mut out),
            Body::Inner(inner) => inner.encode(&mut out),
        }
        let crc = seal(&mut out);
        (out, crc)
    }

    pub(super) fn decode(bytes: &[u8]) -> Decoded<(Self, u32)> {
        let (content, crc) = unseal(bytes)?;
        let mut reader = Reader::new(content);
        reader.magic(MAGIC, "no map page starts here")?;
        reader.version(PAGE_VERSION)?;
        let level = reader.u8()?;
        reader.check(level < LEVELS_MAX, "impossible level")?;
        let index = reader.varint_to(TREE_BLOCKS / blocks_below(level) - 1, "index of a page")?;
        let body = match level {
            LEAF => Body::Leaf(Leaf::decode(&mut reader)?),
            _ => Body::Inner(Inner::decode(&mut reader)?),
        };
        reader.end()?;
        Ok((Self { position: Position { level, index }, body }, crc))
    }

    /// Bytes of memory it takes.
    pub(super) fn weight(&self) -> usize {
        let body = match &self.body {
            Body::Leaf(leaf) => {
                size_of_val(&leaf.blobs[..])
                    + size_of_val(&leaf.frames[..])
                    + size_of_val(&leaf.extents[..])
            }
            Body::Inner(inner) => {
                size_of_val(&inner.objects[..]) + size_of_val(&inner.children[..])
            }
        };
        size_of::<Self>() + body
    }
}

impl Leaf {
    /// A leaf with these extents of data, which lie in the chunk that starts at `first`, ascending.
    pub(super) fn new(first: u64, extents: &[(BlockRange, Location)]) -> Self {
        let small = |count: usize| u16::try_from(count).expect("a chunk has 1,024 blocks");
        let mut by_frame: Vec<_> = (0..extents.len()).collect();
        by_frame.sort_unstable_by_key(|&at| frame_of(&extents[at].1));
        let mut leaf = Self {
            extents: extents.iter().map(|e| LeafExtent::new(first, e)).collect(),
            ..Self::default()
        };
        for at in by_frame {
            let (blob, offset, len) = frame_of(&extents[at].1);
            if leaf.blobs.last() != Some(&blob) {
                leaf.blobs.push(blob);
            }
            let frame = FrameRef { blob: small(leaf.blobs.len() - 1), offset, len };
            if leaf.frames.last() != Some(&frame) {
                leaf.frames.push(frame);
            }
            leaf.extents[at].frame = small(leaf.frames.len() - 1);
        }
        leaf
    }

    fn location(&self, extent: &LeafExtent) -> Location {
        let frame = self.frames[usize::from(extent.frame)];
        Location::Data {
            blob: self.blobs[usize::from(frame.blob)],
            frame_offset: frame.offset,
            frame_len: frame.len,
            index: extent.index,
        }
    }

    /// The extents within `range` of a leaf whose chunk starts at `first`, clipped to it.
    pub(super) fn range(
        &self,
        first: u64,
        range: BlockRange,
    ) -> impl Iterator<Item = (BlockRange, Location)> + '_ {
        let from = self.extents.partition_point(|extent| extent.range(first).end <= range.start);
        let within = move |extent: &&LeafExtent| extent.range(first).start < range.end;
        self.extents[from..].iter().take_while(within).map(move |extent| {
            let whole = extent.range(first);
            let part = whole.intersect(range);
            (part, self.location(extent).advance(part.start - whole.start))
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        encode_objects(out, &self.blobs);
        put_varint(out, to_u64(self.frames.len()));
        let mut last = 0;
        for frame in &self.frames {
            put_varint(out, u64::from(frame.blob - last));
            last = frame.blob;
        }
        for frame in &self.frames {
            put_varint(out, frame.len.into());
        }
        let mut last = None;
        for frame in &self.frames {
            put_delta(out, frame.base(last), frame.offset.into());
            last = Some(*frame);
        }
        put_varint(out, to_u64(self.extents.len()));
        let mut end = 0;
        for extent in &self.extents {
            put_varint(out, u64::from(extent.start - end));
            end = extent.end();
        }
        out.extend(self.extents.iter().map(|extent| extent.blocks - 1));
        let mut last = 0;
        for extent in &self.extents {
            put_delta(out, last, extent.frame.into());
            last = extent.frame.into();
        }
        out.extend(self.extents.iter().map(|extent| extent.index));
    }

    fn decode(reader: &mut Reader<'_>) -> Decoded<Self> {
        let blobs = decode_objects(reader, to_usize(CHUNK_BLOCKS))?;
        let frames = decode_frames(reader, blobs.len())?;
        let extents = decode_extents(reader, frames.len())?;
        reader.check(!extents.is_empty(), "a leaf without extents")?;
        let one = |pair: &[LeafExtent]| pair[0].joins(&pair[1]);
        reader.check(!extents.windows(2).any(one), "two extents that are one")?;
        Ok(Self { blobs, frames, extents })
    }
}

/// Blob, offset and length of the frame.
fn frame_of(location: &Location) -> (ObjectRef, u32, u32) {
    match *location {
        Location::Data { blob, frame_offset, frame_len, .. } => (blob, frame_offset, frame_len),
        Location::Zero => unreachable!("leaves map data: zeros are what they do not map"),
    }
}

fn decode_frames(reader: &mut Reader<'_>, blobs: usize) -> Decoded<Vec<FrameRef>> {
    let count = reader.count(to_usize(CHUNK_BLOCKS), "frames")?;
    let mut frames: Vec<FrameRef> = Vec::with_capacity(count);
    let mut blob = 0;
    for place in 0..count {
        let step = reader.varint_to::<u16>(u64::from(place > 0), "step to the next blob")?;
        blob += step;
        frames.push(FrameRef { blob, offset: 0, len: 0 });
    }
    let listed = frames.last().map_or(0, |last| usize::from(last.blob) + 1);
    reader.check(listed == blobs, "blobs and their frames do not agree")?;
    for frame in &mut frames {
        frame.len = reader.varint_to(u32::MAX.into(), "frame length")?;
    }
    let mut last: Option<FrameRef> = None;
    for frame in &mut frames {
        let offset = u32::try_from(reader.delta(frame.base(last))?);
        frame.offset = offset.or_else(|_| reader.malformed("frame offset out of range"))?;
        let place = |frame: FrameRef| (frame.blob, frame.offset);
        let ascending = last.is_none_or(|last| place(last) < place(*frame));
        reader.check(ascending, "frames out of order")?;
        last = Some(*frame);
    }
    Ok(frames)
}

fn decode_extents(reader: &mut Reader<'_>, frames: usize) -> Decoded<Vec<LeafExtent>> {
    let count = reader.count(to_usize(CHUNK_BLOCKS), "extents")?;
    let gaps =
        (0..count).map(|_| reader.varint_to(CHUNK_BLOCKS, "gap")).collect::<Decoded<Vec<u16>>>()?;
    let mut extents: Vec<LeafExtent> = Vec::with_capacity(count);
    for gap in gaps {
        let start = extents.last().map_or(0, LeafExtent::end) + gap;
        let blocks = reader.u8()?;
        reader.check(usize::from(blocks) < FRAME_BLOCKS_MAX, "an extent larger than a frame")?;
        extents.push(LeafExtent { start, blocks: blocks + 1, index: 0, frame: 0 });
        let end = extents.last().map_or(0, LeafExtent::end);
        reader.check(u64::from(end) <= CHUNK_BLOCKS, "an extent that leaves its chunk")?;
    }
    let mut used = vec![false; frames];
    let mut last = 0;
    for extent in &mut extents {
        last = reader.delta(last)?;
        let frame = usize::try_from(last).ok().filter(|&frame| frame < frames);
        let Some(frame) = frame else {
            return reader.malformed(format!("frame {last} of {frames}"));
        };
        used[frame] = true;
        extent.frame = u16::try_from(frame).expect("at most 1,024 frames");
    }
    reader.check(used.into_iter().all(|used| used), "a frame that no extent is in")?;
    for extent in &mut extents {
        extent.index = reader.u8()?;
        let fits = usize::from(extent.index) + usize::from(extent.blocks) <= FRAME_BLOCKS_MAX;
        reader.check(fits, "an extent that leaves its frame")?;
    }
    Ok(extents)
}

impl FrameRef {
    /// What its offset is counted from.
    fn base(&self, last: Option<Self>) -> u64 {
        let same_blob = last.filter(|last| last.blob == self.blob);
        same_blob.map_or(0, |last| u64::from(last.offset) + u64::from(last.len))
    }
}

impl LeafExtent {
    /// An extent whose frame is still to be listed.
    fn new(first: u64, (range, location): &(BlockRange, Location)) -> Self {
        let Location::Data { index, .. } = *location else { unreachable!("leaves map data") };
        let start = u16::try_from(range.start - first).expect("it lies within the chunk");
        let blocks = u8::try_from(range.count()).expect("it lies within one frame");
        Self { start, blocks, index, frame: 0 }
    }

    fn end(&self) -> u16 {
        self.start + u16::from(self.blocks)
    }

    fn range(&self, first: u64) -> BlockRange {
        BlockRange::new(first + u64::from(self.start), self.blocks.into())
    }

    fn joins(&self, next: &Self) -> bool {
        self.end() == next.start
            && self.frame == next.frame
            && u16::from(self.index) + u16::from(self.blocks) == u16::from(next.index)
    }
}

impl Inner {
    /// A page with these children, by slot, ascending.
    pub(super) fn new(children: &[(u64, PageRef)]) -> Self {
        let mut objects: Vec<_> = children.iter().map(|(_, page)| page.object).collect();
        objects.sort_unstable();
        objects.dedup();
        let child = |&(slot, page): &(u64, PageRef)| Child {
            slot: u16::try_from(slot).expect("512 children"),
            object: objects
                .binary_search(&page.object)
                .ok()
                .and_then(|object| u16::try_from(object).ok())
                .expect("every object was listed, and there are at most 512"),
            offset: page.offset,
            len: page.len,
            crc: page.crc,
        };
        let children = children.iter().map(child).collect();
        Self { objects, children }
    }

    /// The first child at or after `slot`.
    pub(super) fn next_child(&self, slot: u64) -> Option<(u64, PageRef)> {
        let at = self.children.partition_point(|child| u64::from(child.slot) < slot);
        self.children.get(at).map(|child| self.entry(child))
    }

    /// Every child.
    pub(super) fn children(&self) -> impl Iterator<Item = (u64, PageRef)> + '_ {
        self.children.iter().map(|child| self.entry(child))
    }

    fn entry(&self, child: &Child) -> (u64, PageRef) {
        let object = self.objects[usize::from(child.object)];
        let page = PageRef { object, offset: child.offset, len: child.len, crc: child.crc };
        (child.slot.into(), page)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        encode_objects(out, &self.objects);
        put_varint(out, to_u64(self.children.len()));
        let mut next = 0;
        for child in &self.children {
            put_varint(out, u64::from(child.slot - next));
            next = child.slot + 1;
        }
        for child in &self.children {
            put_varint(out, child.object.into());
        }
        for child in &self.children {
            put_varint(out, child.offset.into());
        }
        for child in &self.children {
            put_varint(out, child.len.into());
        }
        for child in &self.children {
            out.extend(child.crc.to_le_bytes());
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Decoded<Self> {
        let objects = decode_objects(reader, to_usize(FANOUT))?;
        let count = reader.count(to_usize(FANOUT), "children")?;
        reader.check(count > 0, "a page without children")?;
        let mut children: Vec<Child> = Vec::with_capacity(count);
        let mut next: u16 = 0;
        for _ in 0..count {
            let slot = next + reader.varint_to::<u16>(FANOUT, "gap")?;
            reader.check(u64::from(slot) < FANOUT, "a child beyond the last slot")?;
            next = slot + 1;
            children.push(Child { slot, object: 0, offset: 0, len: 0, crc: 0 });
        }
        let mut used = vec![false; objects.len()];
        for child in &mut children {
            let max = to_u64(objects.len()).saturating_sub(1);
            child.object = reader.varint_to(max, "map object")?;
            reader.check(!used.is_empty(), "children without map objects")?;
            used[usize::from(child.object)] = true;
        }
        reader.check(used.into_iter().all(|used| used), "a map object that no child is in")?;
        for child in &mut children {
            child.offset = reader.varint_to(u32::MAX.into(), "page offset")?;
        }
        for child in &mut children {
            child.len = reader.varint_to(u32::MAX.into(), "page length")?;
        }
        for child in &mut children {
            child.crc = reader.u32()?;
        }
        Ok(Self { objects, children })
    }
}

#[cfg(test)]
mod tests;
