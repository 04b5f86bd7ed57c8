//! The layer in memory: blocks read or inserted lately, and where frames seen lately lie.
//!
//! Both parts are bounded in bytes, everything they hold counted, and keep what is asked for again.

use std::sync::Arc;

use bytes::Bytes;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use super::frame::{Frame, FrameKey, Part};
use crate::geometry::{BLOCK_LEN, to_u64};

/// Lets a shard hold a whole frame even when the cache has only half a MiB.
const SHARDS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Piece {
    Whole,
    Block(u8),
}

/// Blocks with the frame that knows their CRCs.
#[derive(Debug, Clone)]
struct Blocks {
    bytes: Bytes,
    frame: Arc<Frame>,
}

#[derive(Clone)]
struct Weight;

impl Weighter<(FrameKey, Piece), Blocks> for Weight {
    fn weight(&self, _: &(FrameKey, Piece), blocks: &Blocks) -> u64 {
        to_u64(blocks.bytes.len() + Frame::OVERHEAD_BYTES)
    }
}

impl Weighter<FrameKey, Arc<Frame>> for Weight {
    fn weight(&self, _: &FrameKey, _: &Arc<Frame>) -> u64 {
        to_u64(Frame::OVERHEAD_BYTES)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Memory {
    blocks: Cache<(FrameKey, Piece), Blocks, Weight>,
    frames: Cache<FrameKey, Arc<Frame>, Weight>,
}

impl Memory {
    pub(super) fn new(blocks_bytes_max: u64, frames_bytes_max: u64) -> Self {
        let block_bytes = to_u64(BLOCK_LEN + Frame::OVERHEAD_BYTES);
        Self {
            blocks: bounded(blocks_bytes_max, block_bytes),
            frames: bounded(frames_bytes_max, to_u64(Frame::OVERHEAD_BYTES)),
        }
    }

    /// The blocks of `part`, not verified, if all of them are here.
    pub(super) fn blocks(&self, key: &FrameKey, part: Part) -> Option<(Bytes, Arc<Frame>)> {
        if let Some(whole) = self.blocks.get(&(*key, Piece::Whole)) {
            return whole.frame.has(part).then(|| {
                (whole.bytes.slice(part.start()..part.start() + part.len()), whole.frame)
            });
        }
        let mut blocks = part.blocks().map(|block| self.blocks.get(&(*key, Piece::Block(block))));
        let first = blocks.next()??;
        if part.count() == 1 {
            return Some((first.bytes, first.frame));
        }
        let mut bytes = Vec::with_capacity(part.len());
        bytes.extend_from_slice(&first.bytes);
        for block in blocks {
            bytes.extend_from_slice(&block?.bytes);
        }
        Some((bytes.into(), first.frame))
    }

    /// Keeps a whole frame.
    pub(super) fn put_whole(&self, key: FrameKey, frame: Arc<Frame>, bytes: Bytes) {
        self.blocks.insert((key, Piece::Whole), Blocks { bytes, frame });
    }

    /// Keeps the blocks of `part`, each in memory of its own, so that one that stays does not hold on
    /// to its neighbours.
    pub(super) fn put_part(&self, key: FrameKey, frame: &Arc<Frame>, part: Part, bytes: &Bytes) {
        if part.len() == frame.len() {
            return self.put_whole(key, frame.clone(), bytes.clone());
        }
        for (index, block) in part.blocks().enumerate() {
            let bytes = if part.count() == 1 {
                bytes.clone()
            } else {
                Bytes::copy_from_slice(&bytes[index * BLOCK_LEN..][..BLOCK_LEN])
            };
            self.blocks.insert((key, Piece::Block(block)), Blocks { bytes, frame: frame.clone() });
        }
    }

    /// Drops the blocks of a frame.
    pub(super) fn remove_blocks(&self, key: &FrameKey, part: Part) {
        self.blocks.remove(&(*key, Piece::Whole));
        for block in part.blocks() {
            self.blocks.remove(&(*key, Piece::Block(block)));
        }
    }

    /// The frame, if it was seen lately.
    pub(super) fn frame(&self, key: &FrameKey) -> Option<Arc<Frame>> {
        self.frames.get(key)
    }

    /// Remembers a frame.
    pub(super) fn put_frame(&self, key: FrameKey, frame: Arc<Frame>) {
        self.frames.insert(key, frame);
    }

    /// Forgets a frame.
    pub(super) fn remove_frame(&self, key: &FrameKey) {
        self.frames.remove(key);
    }
}

fn bounded<K, V>(bytes_max: u64, item_bytes: u64) -> Cache<K, V, Weight>
where
    K: Eq + std::hash::Hash,
    V: Clone,
    Weight: Weighter<K, V> + Clone,
{
    let items = usize::try_from(bytes_max / item_bytes).unwrap_or(usize::MAX).max(1);
    let options = OptionsBuilder::new()
        .shards(SHARDS)
        .estimated_items_capacity(items)
        .weight_capacity(bytes_max)
        .build()
        .expect("every option without a default is set");
    Cache::with_options(options, Weight, DefaultHashBuilder::default(), DefaultLifecycle::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DiskId, Nonce, ObjectId, ObjectRef};

    fn key(offset: u32) -> FrameKey {
        let object = ObjectId { epoch: 1, nonce: Nonce(2), seq: 3 };
        FrameKey { blob: ObjectRef { disk: DiskId(4), object }, offset }
    }

    #[test]
    fn blocks_kept_one_by_one_are_read_together_only_when_all_are_there() {
        let memory = Memory::new(1 << 20, 1 << 16);
        let frame = Arc::new(Frame::new(vec![0; 4]));
        let bytes = Bytes::from([[1; BLOCK_LEN], [2; BLOCK_LEN]].concat());
        memory.put_part(key(0), &frame, Part::new(1, 2), &bytes);
        assert_eq!(memory.blocks(&key(0), Part::new(1, 2)).unwrap().0, bytes);
        assert_eq!(memory.blocks(&key(0), Part::new(2, 1)).unwrap().0, bytes[BLOCK_LEN..]);
        assert!(memory.blocks(&key(0), Part::new(0, 2)).is_none());
        assert!(memory.blocks(&key(1), Part::new(1, 1)).is_none());
    }

    #[test]
    fn blocks_beyond_a_frame_are_not_there() {
        let memory = Memory::new(1 << 20, 1 << 16);
        let frame = Arc::new(Frame::new(vec![0; 2]));
        memory.put_whole(key(0), frame, Bytes::from(vec![0; 2 * BLOCK_LEN]));
        assert!(memory.blocks(&key(0), Part::new(1, 1)).is_some());
        assert!(memory.blocks(&key(0), Part::new(1, 2)).is_none());
    }

    #[test]
    fn what_is_kept_stays_within_its_bytes() {
        let memory = Memory::new(1 << 20, 1 << 16);
        for offset in 0..1000 {
            let frame = Arc::new(Frame::new(vec![0; 4]));
            memory.put_part(key(offset), &frame, Part::new(0, 1), &Bytes::from(vec![0; BLOCK_LEN]));
            memory.put_whole(key(offset), frame.clone(), Bytes::from(vec![0; 4 * BLOCK_LEN]));
            memory.put_frame(key(offset), frame);
        }
        assert!(memory.blocks.weight() <= 1 << 20);
        assert!(memory.frames.weight() <= 1 << 16);
    }
}
