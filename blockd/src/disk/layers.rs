//! Where each block of a disk is found: the layers between a write and the map.
//!
//! Newest first: the *active* dirty index, which takes every write; the *sealed* ones, each ending at
//! a cut, in the hands of the drain; the *overlay*, extents committed since the last checkpoint; and
//! the map under its root. One mutex holds them all, so a reader sees one moment, and the hand-over
//! from sealed to overlay at a commit is one step that no reader can fall between.
//!
//! A sealed index and its log space live until the swap that holds them: an entry leaves together
//! with its index, never by itself.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::time::Instant;
use wal::{Lsn, Place};

use crate::blob::Location;
use crate::error::Error;
use crate::extent_map::{Advance, ExtentMap};
use crate::geometry::{BLOCK_BYTES, BlockRange};
use crate::ids::{SnapshotId, SnapshotName};
use crate::map::Root;

/// Bytes that an entry of the dirty index is counted as, whatever its length: a record without
/// payload costs memory and a share of a log frame, too.
const ENTRY_BYTES: u64 = 128;

/// A run of undrained blocks.
#[derive(Debug, Clone)]
pub enum Dirty {
    /// Data in the log or its staging slots; the run starts at the place.
    Data(Place),
    /// Zeroes.
    Zero,
}

impl Advance for Dirty {
    fn advance(&self, blocks: u64) -> Self {
        match self {
            Self::Data(place) => {
                let mut rest = place.clone();
                rest.advance(u32::try_from(blocks).expect("a record has at most one frame"));
                Self::Data(rest)
            }
            Self::Zero => Self::Zero,
        }
    }

    fn joins(&self, _blocks: u64, next: &Self) -> bool {
        matches!((self, next), (Self::Zero, Self::Zero))
    }
}

/// A snapshot whose barrier is in the log: drained together with the cut that ends at it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Barrier {
    /// Identity of the snapshot.
    pub id: SnapshotId,
    /// Its name, reserved by the barrier.
    pub name: SnapshotName,
    /// What the taker had to say.
    pub message: Option<String>,
    /// When it was taken.
    pub created_unix_ms: u64,
    /// Size of the disk then.
    pub size_bytes: u64,
}

/// A dirty index that takes no more writes.
#[derive(Debug)]
pub struct Sealed {
    /// Undrained runs, newest version only.
    pub extents: ExtentMap<Dirty>,
    /// Every record at or below this position is in this index or an older one.
    pub cut: Lsn,
    /// When its oldest write arrived.
    pub since: Instant,
    /// Bytes of log it stands for.
    pub log_bytes: u64,
    /// The snapshot that the cut ends at.
    pub barrier: Option<Barrier>,
}

/// Whether a disk answers.
#[derive(Debug, Clone)]
pub enum State {
    /// It does.
    Serving,
    /// It is being released: no new writes.
    Closing,
    /// It stopped for good, for this reason, until the daemon restarts or it is attached again.
    Stopped(Arc<Error>),
}

/// What a reader finds for a run of blocks.
#[derive(Debug, Clone)]
pub enum Piece {
    /// Undrained data.
    Log(Place),
    /// Zeroes, whatever lies below.
    Zero,
    /// In a blob.
    Blob(Location),
    /// Ask the map.
    Map,
}

/// The layers of one disk.
#[derive(Debug)]
pub struct Layers {
    /// Whether the disk answers.
    pub state: State,
    /// Takes writes.
    pub active: ExtentMap<Dirty>,
    /// Bytes of log that the active index stands for.
    pub active_bytes: u64,
    /// When the oldest write of the active index arrived.
    pub active_since: Option<Instant>,
    /// The last record that went into a dirty index.
    pub last: Lsn,
    /// Handed to the drain, oldest first.
    pub sealed: VecDeque<Arc<Sealed>>,
    /// Committed since the last checkpoint.
    pub overlay: ExtentMap<Location>,
    /// The map at the last checkpoint.
    pub root: Root,
    /// Blocks whose read-modify-write is under way: writers of the same blocks wait.
    pub locked: Vec<BlockRange>,
}

impl Layers {
    /// Layers over a map with nothing undrained; `drained` is the position that the store holds.
    #[must_use]
    pub fn new(root: Root, overlay: ExtentMap<Location>, drained: Lsn) -> Self {
        Self {
            state: State::Serving,
            active: ExtentMap::new(),
            active_bytes: 0,
            active_since: None,
            last: drained,
            sealed: VecDeque::new(),
            overlay,
            root,
            locked: Vec::new(),
        }
    }

    /// Puts a record into the active index. Records arrive in the order of their positions.
    pub fn insert(&mut self, range: BlockRange, dirty: Dirty, lsn: Lsn, now: Instant) {
        assert!(lsn > self.last, "records enter the index in the order of the log");
        self.last = lsn;
        let payload = match &dirty {
            Dirty::Data(_) => range.count() * BLOCK_BYTES,
            Dirty::Zero => 0,
        };
        self.active_bytes += payload + ENTRY_BYTES;
        self.active_since.get_or_insert(now);
        self.active.insert(range, dirty);
    }

    /// Ends the active index at the last record. An index without entries is sealed only for a
    /// barrier, which has a position of its own.
    pub fn seal(&mut self, barrier: Option<Barrier>, now: Instant) {
        if self.active.is_empty() && barrier.is_none() {
            return;
        }
        self.sealed.push_back(Arc::new(Sealed {
            extents: std::mem::take(&mut self.active),
            cut: self.last,
            since: self.active_since.take().unwrap_or(now),
            log_bytes: std::mem::take(&mut self.active_bytes),
            barrier,
        }));
    }

    /// Extents of all dirty indexes.
    #[must_use]
    pub fn dirty_extents(&self) -> usize {
        self.active.len() + self.sealed.iter().map(|sealed| sealed.extents.len()).sum::<usize>()
    }

    /// Bytes of log that are not in the store yet.
    #[must_use]
    pub fn undrained_bytes(&self) -> u64 {
        self.active_bytes + self.sealed.iter().map(|sealed| sealed.log_bytes).sum::<u64>()
    }

    /// When the oldest write arrived that is not in the store yet.
    #[must_use]
    pub fn undrained_since(&self) -> Option<Instant> {
        self.sealed.front().map(|sealed| sealed.since).or(self.active_since)
    }

    /// Finds every run of a range, in order.
    #[must_use]
    pub fn resolve(&self, range: BlockRange) -> Vec<(BlockRange, Piece)> {
        let mut found = Vec::new();
        self.resolve_dirty(range, 0, &mut found);
        found
    }

    /// `depth` 0 is the active index, then the sealed ones from the newest.
    fn resolve_dirty(&self, range: BlockRange, depth: usize, found: &mut Vec<(BlockRange, Piece)>) {
        let index = match depth {
            0 => &self.active,
            _ => match self.sealed.len().checked_sub(depth) {
                Some(position) => &self.sealed[position].extents,
                None => return self.resolve_overlay(range, found),
            },
        };
        for (part, dirty) in index.lookup(range) {
            match dirty {
                Some(Dirty::Data(place)) => found.push((part, Piece::Log(place))),
                Some(Dirty::Zero) => found.push((part, Piece::Zero)),
                None => self.resolve_dirty(part, depth + 1, found),
            }
        }
    }

    fn resolve_overlay(&self, range: BlockRange, found: &mut Vec<(BlockRange, Piece)>) {
        for (part, location) in self.overlay.lookup(range) {
            found.push(match location {
                Some(Location::Zero) => (part, Piece::Zero),
                Some(location) => (part, Piece::Blob(location)),
                None if self.root == Root::EMPTY => (part, Piece::Zero),
                None => (part, Piece::Map),
            });
        }
    }

    /// Publishes a commit: everything up to `cut` is in the store, at `committed`.
    pub fn commit(
        &mut self,
        cut: Lsn,
        committed: impl IntoIterator<Item = (BlockRange, Location)>,
    ) {
        for (range, location) in committed {
            self.overlay.insert(range, location);
        }
        self.forget_sealed(cut);
    }

    /// Lets go of the sealed indexes that end at or before `cut`.
    pub fn forget_sealed(&mut self, cut: Lsn) {
        while self.sealed.front().is_some_and(|sealed| sealed.cut <= cut) {
            self.sealed.pop_front();
        }
    }
}
