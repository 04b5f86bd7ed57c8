//! Starting the log of an owner: replay what earlier processes left, then open a segment of our own
//! behind it.
//!
//! Until everything was checked nothing is changed. Then, in this order: what is kept is synced; a
//! new segment states where it begins (so that frames of an older process from there on are void),
//! takes what the ring holds beyond, and is synced; the ring's slots are freed; segments without
//! live records are unlinked. A crash between any two of these leaves what the next start needs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use tokio::sync::Notify;

use crate::dir::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    BLOCK, BLOCK_BYTES, Entry, FrameHead, Holding, Origin, RecordSeed, SegmentHeader, block_crc,
    get_record, index, put_record,
};
use crate::frame::{Frame, Home};
use crate::log::{Cursor, Log, OwnerLog, State};
use crate::lsn::{Lsn, OwnerId};
use crate::memory::BlockBuf;
use crate::recover::{Plan, Staged, plan};
use crate::ring::Leftover;
use crate::scan::{Found, Recovered, Scan, scan};
use crate::segment::Segment;
use crate::storage::Durability;
use crate::work::Tick;

/// Which log to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Whose.
    pub owner: OwnerId,
    /// The owner's epoch; records of another epoch are not replayed.
    pub epoch: u64,
    /// The highest LSN that the store has: records up to it are dropped.
    pub floor: Lsn,
}

/// What survived.
#[derive(Debug, Default)]
pub struct Recovery {
    /// The records above the floor, in LSN order, without a gap.
    pub records: VecDeque<Recovered>,
    /// The last of them; the floor if there are none.
    pub end: Lsn,
    /// The highest LSN that was known to be synced before the crash.
    pub synced: Lsn,
    /// How many of the records came from the staging ring.
    pub from_staging: u64,
    /// Records that were whole but lie beyond a hole, so nobody was promised them.
    pub records_dropped: u64,
    /// Bytes of torn or unreachable frames behind the end.
    pub bytes_dropped: u64,
    /// Bytes of segments that were read.
    pub bytes_read: u64,
}

/// Replays and starts a log. The caller keeps others from starting the same owner.
pub(crate) fn start(
    shared: &Arc<Shared>,
    start: Start,
    found: Vec<Found>,
) -> Result<(Log, Recovery)> {
    let Start { owner, epoch, floor } = start;
    let origin = Origin { owner, epoch, nonce: shared.nonce };
    let alive = Arc::default();
    let left = shared.ring.left_of(owner);
    check_epoch(&start, &found, &left)?;
    let sequence = found.iter().map(|found| found.held.sequence).max().unwrap_or(0);

    let storage = &*shared.storage;
    let mut scan = scan(&shared.pool, storage, owner, epoch, found, &alive)?;
    let synced = scan.synced.max(shared.ring.synced_of(owner, epoch));
    let staged = staged_records(&left);
    check_not_behind(&start, &scan, &staged)?;
    let plan = plan(floor, synced, std::mem::take(&mut scan.records), &staged, &scan.flaws);
    if let Some(damage) = &plan.damage {
        return Err(Error::new(damage.kind(), format!("log of owner {owner}: {damage}")));
    }
    let mut recovery = Recovery::new(&plan, &scan, synced);

    let mut state = State {
        appended: plan.end,
        written: plan.end,
        synced: plan.end,
        released: floor,
        marked: plan.log_end,
        sequence,
        last_use: shared.clock.now(),
        ..State::default()
    };
    recovery.records = plan.records;
    let tail = Tail::new(shared, origin, Arc::clone(&alive), sequence);
    recovery.records.extend(settle(&mut state, scan, &left, tail)?);
    drop(left);
    shared.ring.free_left(owner);

    let owner_log = Arc::new(OwnerLog {
        origin,
        seed: RecordSeed::new(&origin),
        dir: Arc::clone(shared),
        line: shared.ring.register(&origin, state.synced),
        state: state.into(),
        written: Notify::new(),
        synced: Notify::new(),
        led: std::sync::Condvar::new(),
        segments_alive: alive,
    });
    owner_log.arm(&mut owner_log.lock(), Tick::Idle);
    Ok((Log { owner: owner_log }, recovery))
}

/// Makes the disk agree with what was decided. Returns the records that were in the ring, with their
/// new places.
fn settle(
    state: &mut State,
    scan: Scan,
    left: &[Leftover],
    mut tail: Tail<'_>,
) -> Result<Vec<Recovered>> {
    let (floor, log_end, end) = (state.released, state.marked, state.appended);
    let mut moved = Vec::new();
    if end > floor {
        // Only now may a header claim that everything before it is synced.
        for scanned in scan.segments.iter().filter(|scanned| scanned.last > floor) {
            sync(&scanned.segment)?;
        }
        tail.open(log_end)?;
        for leftover in left {
            moved.extend(tail.copy(leftover, log_end.next(), end)?);
        }
        tail.sync()?;
    }
    retire(tail.shared, state, scan)?;
    state.full.extend(tail.full);
    state.sequence = tail.sequence;
    state.cursor = tail.cursor;
    Ok(moved)
}

fn check_epoch(start: &Start, found: &[Found], left: &[Leftover]) -> Result<()> {
    let in_files = found.iter().map(|found| (found.held.epoch, found.name.as_str()));
    let in_ring = left.iter().filter(|left| left.sound);
    let mut all = in_files.chain(in_ring.map(|left| (left.origin.epoch, "the staging ring")));
    match all.find(|(epoch, _)| *epoch != start.epoch) {
        None => Ok(()),
        Some((epoch, place)) => Err(Error::new(
            ErrorKind::OtherEpoch,
            format!(
                "log of owner {} has records of epoch {epoch} in {place}: asked for epoch {}",
                start.owner, start.epoch
            ),
        )),
    }
}

/// A store never holds more than the log it was drained from, unless the log was replaced.
fn check_not_behind(start: &Start, scan: &Scan, staged: &[Staged]) -> Result<()> {
    let in_log = scan.segments.iter().map(|scanned| scanned.last).max();
    let in_ring = staged.last().map(|staged| staged.lsn);
    match in_log.max(in_ring) {
        Some(end) if end < start.floor => Err(Error::new(
            ErrorKind::BehindStore,
            format!(
                "log of owner {} ends at lsn {end}, the store has up to {}",
                start.owner, start.floor
            ),
        )),
        _ => Ok(()),
    }
}

impl Recovery {
    /// What a plan comes to, but for its records.
    pub(crate) fn new(plan: &Plan, scan: &Scan, synced: Lsn) -> Self {
        let mut recovery = Self {
            end: plan.end,
            synced,
            from_staging: plan.end.since(plan.log_end),
            bytes_read: scan.bytes,
            ..Self::default()
        };
        let mut last_frame = None;
        for record in &plan.dropped {
            recovery.records_dropped += 1;
            // A record without blocks has no place: its frame counts with the others or not at all.
            let Some(place) = &record.place else { continue };
            if last_frame != Some(Arc::as_ptr(place.frame())) {
                last_frame = Some(Arc::as_ptr(place.frame()));
                recovery.bytes_dropped += u64::from(1 + place.frame().blocks()) * BLOCK;
            }
        }
        let torn = scan.flaws.iter().filter(|flaw| flaw.expected > plan.log_end);
        recovery.bytes_dropped += torn.map(|flaw| flaw.torn_bytes).sum::<u64>();
        recovery
    }
}

/// Keeps the segments that have live records and unlinks the others, the oldest first.
fn retire(shared: &Shared, state: &mut State, scan: Scan) -> Result<()> {
    let mut removed = 0;
    let mut first = state.released.next();
    for scanned in scan.segments {
        let last = scanned.last.min(state.marked);
        if last >= first {
            first = last.next();
            state.full.push_back((scanned.segment, last));
            continue;
        }
        let name = scanned.segment.id().name();
        let path = shared.storage.path().join(&name);
        let context = || format!("remove segment {}", path.display());
        shared.storage.remove(&name).map_err(|e| Error::io(context(), e))?;
        removed += 1;
    }
    if removed > 0 {
        let context = || format!("sync directory {}", shared.storage.path().display());
        shared.storage.sync_folder("").map_err(|e| Error::io(context(), e))?;
        shared.pool.forget(removed);
    }
    Ok(())
}

/// What the ring holds, record by record, in LSN order.
fn staged_records(left: &[Leftover]) -> Vec<Staged> {
    let mut staged = Vec::new();
    for leftover in left {
        let sound = sound_records(leftover);
        for i in 0..leftover.records {
            let lsn = leftover.first_lsn.plus(u64::from(i));
            staged.push(Staged { lsn, sound: i < sound });
        }
    }
    staged
}

/// How many records of a slot verify, from the first on: line, CRC and blocks.
pub(crate) fn sound_records(leftover: &Leftover) -> u32 {
    if !leftover.sound {
        return 0;
    }
    let (header, data) = leftover.slot.bytes().split_at(BLOCK_BYTES);
    let seed = RecordSeed::new(&leftover.origin);
    let mut next_block = 0;
    let sound = (0..leftover.records).take_while(|at| {
        let lsn = leftover.first_lsn.plus(u64::from(*at));
        let Some(entry) = get_record(header, *at, &seed, lsn) else { return false };
        let in_place = entry.data_index == next_block;
        next_block += entry.data_blocks;
        in_place
            && (entry.data_index..next_block).all(|block| {
                let start = index(block) * BLOCK_BYTES;
                crc32fast::hash(&data[start..start + BLOCK_BYTES]) == block_crc(header, block)
            })
    });
    u32::try_from(sound.count()).expect("counted from a u32")
}

/// The end of a log while it is being written by nobody else: new segments, filled frame by frame.
pub(crate) struct Tail<'a> {
    shared: &'a Arc<Shared>,
    origin: Origin,
    alive: Arc<AtomicUsize>,
    sequence: u64,
    cursor: Option<Cursor>,
    full: Vec<(Arc<Segment>, Lsn)>,
    synced: Lsn,
}

impl<'a> Tail<'a> {
    pub(crate) fn new(
        shared: &'a Arc<Shared>,
        origin: Origin,
        alive: Arc<AtomicUsize>,
        sequence: u64,
    ) -> Self {
        Self { shared, origin, alive, sequence, cursor: None, full: Vec::new(), synced: Lsn::ZERO }
    }

    /// Opens a segment for the records after `last`. What comes before the first one opened is
    /// synced.
    pub(crate) fn open(&mut self, last: Lsn) -> Result<()> {
        if self.full.is_empty() && self.cursor.is_none() {
            self.synced = last;
        }
        let file = self.shared.pool.take_or_make()?;
        self.sequence += 1;
        let segment = Segment::new(&self.shared.pool, file, self.sequence, &self.alive);
        let header = SegmentHeader {
            nonce: segment.id().nonce,
            ordinal: segment.id().ordinal,
            blocks: segment.blocks(),
            held: Some(Holding {
                owner: self.origin.owner,
                epoch: self.origin.epoch,
                sequence: self.sequence,
                first_lsn: last.next(),
                synced_lsn: self.synced,
            }),
        };
        let mut block = BlockBuf::new(1);
        header.encode(block.bytes_mut());
        write(&segment, block.bytes(), 0)?;
        let cursor = Cursor { segment: Arc::new(segment), block: 1 };
        if let Some(before) = self.cursor.replace(cursor) {
            self.full.push((before.segment, last));
        }
        Ok(())
    }

    /// Copies the records of a slot that lie in `from..=to` and says where they are now.
    pub(crate) fn copy(
        &mut self,
        leftover: &Leftover,
        from: Lsn,
        to: Lsn,
    ) -> Result<Vec<Recovered>> {
        let (header, data) = leftover.slot.bytes().split_at(BLOCK_BYTES);
        let old = RecordSeed::new(&leftover.origin);
        let entries: Vec<(Lsn, Entry)> = (0..sound_records(leftover))
            .map(|at| (at, leftover.first_lsn.plus(u64::from(at))))
            .filter(|(_, lsn)| (from..=to).contains(lsn))
            .filter_map(|(at, lsn)| Some((lsn, get_record(header, at, &old, lsn)?)))
            .collect();
        let Some((first_lsn, first)) = entries.first().copied() else { return Ok(Vec::new()) };
        let blocks: u32 = entries.iter().map(|(_, entry)| entry.data_blocks).sum();
        let room = self.cursor.as_ref().map_or(0, |end| end.segment.blocks() - end.block);
        if room < 1 + blocks {
            self.open(first_lsn.previous())?;
        }
        let cursor = self.cursor.as_mut().expect("opened above or before");
        let home = Home { segment: Arc::clone(&cursor.segment), block: cursor.block };
        cursor.block += 1 + blocks;

        let mut frame = BlockBuf::new(1 + blocks);
        let (new_header, new_data) = frame.bytes_mut().split_at_mut(BLOCK_BYTES);
        let start = index(first.data_index) * BLOCK_BYTES;
        new_data.copy_from_slice(&data[start..start + new_data.len()]);
        let crcs: Vec<u32> =
            (0..blocks).map(|at| block_crc(header, first.data_index + at)).collect();
        let seed = RecordSeed::new(&self.origin);
        let mut moved = Vec::with_capacity(entries.len());
        for (at, (lsn, entry)) in (0..).zip(entries) {
            let entry = Entry { data_index: entry.data_index - first.data_index, ..entry };
            let range = index(entry.data_index)..index(entry.data_index + entry.data_blocks);
            put_record(new_header, at, &entry, &crcs[range], seed, lsn);
            moved.push((lsn, entry));
        }
        let head = FrameHead {
            origin: self.origin,
            sequence: home.segment.sequence(),
            block: home.block,
            first_lsn,
            synced_lsn: self.synced,
            records: u32::try_from(moved.len()).expect("at most FRAME_RECORDS"),
            blocks,
        };
        head.finish(new_header);
        write(&home.segment, frame.bytes(), home.block)?;
        let frame = Arc::new(Frame::in_segment(first_lsn, &crcs, home));
        Ok(moved.iter().map(|(lsn, entry)| Recovered::new(*lsn, entry, &frame)).collect())
    }

    pub(crate) fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        let open = self.cursor.iter().map(|cursor| &cursor.segment);
        self.full.iter().map(|(segment, _)| segment).chain(open)
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.segments().try_for_each(|segment| sync(segment))
    }
}

// What fails here poisons: some of it may not have reached the device, and a second try in the same
// process could be told that it did.

fn write(segment: &Segment, bytes: &[u8], block: u32) -> Result<()> {
    let written = segment.file().write_at(&[bytes], u64::from(block) * BLOCK, Durability::Volatile);
    let context = || format!("write log {}", segment.describe(block));
    written.map_err(|e| Error::poisoned(&Error::io(context(), e)))
}

fn sync(segment: &Segment) -> Result<()> {
    let context = || format!("sync log {}", segment.describe(0));
    segment.file().sync().map_err(|e| Error::poisoned(&Error::io(context(), e)))
}
