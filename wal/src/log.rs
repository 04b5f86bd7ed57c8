//! [`Log`], the write order of one owner: append, wait, release.
//!
//! An append copies the record into the open frame of the owner and gives it the next LSN; it does
//! no I/O. A frame closes when it is full or when somebody needs it in the log, gets its place in a
//! segment at that moment, and is written by whoever leads the log then (see `writer`). Rules:
//! - a frame is opened only when there is certainly room in the log for it, so that everything
//!   appended can always be synced, also when the log is full;
//! - released ≤ synced ≤ written ≤ appended;
//! - after a failed write or sync nothing is acknowledged any more.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use crate::dir::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    BLOCK, BLOCK_BYTES, Entry, FRAME_BLOCKS, FRAME_RECORDS, Origin, RecordSeed, SLOT_BLOCKS, index,
    put_record,
};
use crate::frame::{Frame, Home, Place};
use crate::lsn::{Lsn, OwnerId};
use crate::record::Record;
use crate::ring::OwnerLine;
use crate::segment::{FileId, Segment};
use crate::work::Tick;

/// What an append did.
#[derive(Clone, Debug)]
pub struct Appended {
    /// The position of the record.
    pub lsn: Lsn,
    /// Where its blocks are; a zero record has none.
    pub place: Option<Place>,
}

/// How far a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// The last record appended.
    pub appended: Lsn,
    /// The last record that killing the process cannot lose.
    pub acknowledged: Lsn,
    /// The last record up to which the log's files have everything.
    pub written: Lsn,
    /// The last record up to which everything is on stable media.
    pub synced: Lsn,
    /// The last record up to which log space was given back.
    pub released: Lsn,
    /// Bytes of the segments that this log holds.
    pub bytes_used: u64,
    /// Bytes of segments that any log of the directory may still take.
    pub bytes_free: u64,
}

/// Whether a caller could do the work of a sync on its own thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inline {
    /// It is done.
    Done,
    /// Another thread is at it and will do this too: wait for it.
    Busy,
}

/// The log of one owner. Clones are handles to the same log.
#[derive(Clone, Debug)]
pub struct Log {
    pub(crate) owner: Arc<OwnerLog>,
}

/// What all handles of a log share.
pub(crate) struct OwnerLog {
    pub(crate) origin: Origin,
    pub(crate) seed: RecordSeed,
    pub(crate) dir: Arc<Shared>,
    pub(crate) state: Mutex<State>,
    /// Told when `written` moves, or the log stops.
    pub(crate) written: Notify,
    /// Told when `synced` moves, or the log stops.
    pub(crate) synced: Notify,
    /// Told when nobody leads any more.
    pub(crate) led: Condvar,
    pub(crate) line: Option<OwnerLine>,
    /// Segments of this owner in use, by the log or by readers.
    pub(crate) segments_alive: Arc<AtomicUsize>,
}

/// What changes in a log, under its mutex.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) appended: Lsn,
    pub(crate) written: Lsn,
    pub(crate) synced: Lsn,
    pub(crate) released: Lsn,
    /// The highest synced LSN that something in the log states.
    pub(crate) marked: Lsn,
    /// Up to where somebody needs the log written, or synced.
    pub(crate) want_written: Lsn,
    pub(crate) want_synced: Lsn,
    pub(crate) want_mark: bool,
    pub(crate) open: Option<OpenFrame>,
    /// Closed frames in LSN order, not yet written.
    pub(crate) queue: VecDeque<ClosedFrame>,
    /// Slots of frames that are not in the log yet.
    pub(crate) slots_held: usize,
    /// Where the next frame goes.
    pub(crate) cursor: Option<Cursor>,
    /// The segment after that one, taken early so that an open frame is sure to fit.
    pub(crate) spare: Option<Arc<Segment>>,
    /// Full segments, with the last LSN in each.
    pub(crate) full: VecDeque<(Arc<Segment>, Lsn)>,
    /// The sequence of the last segment taken.
    pub(crate) sequence: u64,
    /// Segments written since their last sync.
    pub(crate) unsynced: Vec<Arc<Segment>>,
    pub(crate) leading: bool,
    /// Threads that wait for the end of somebody's lead.
    pub(crate) successors: u32,
    pub(crate) queued: bool,
    pub(crate) failed: Option<Error>,
    pub(crate) closed: bool,
    /// When somebody last led this log.
    pub(crate) last_use: Duration,
    /// Which looks at this log are already arranged.
    pub(crate) fill_armed: bool,
    pub(crate) idle_armed: bool,
}

/// The frame that takes records.
#[derive(Debug)]
pub(crate) struct OpenFrame {
    pub(crate) frame: Arc<Frame>,
    pub(crate) records: u32,
    pub(crate) blocks: u32,
    pub(crate) opened: Duration,
}

/// A frame that takes no more records and has its place in a segment.
#[derive(Clone, Debug)]
pub(crate) struct ClosedFrame {
    pub(crate) frame: Arc<Frame>,
    pub(crate) records: u32,
    pub(crate) blocks: u32,
}

/// The end of a log.
#[derive(Debug)]
pub(crate) struct Cursor {
    pub(crate) segment: Arc<Segment>,
    pub(crate) block: u32,
}

impl ClosedFrame {
    pub(crate) fn last_lsn(&self) -> Lsn {
        self.frame.first_lsn().plus(u64::from(self.records)).previous()
    }

    pub(crate) fn home(&self) -> &Home {
        self.frame.home().expect("a frame gets its home when it closes")
    }
}

impl Log {
    /// Whose log it is.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.owner.origin.owner
    }

    /// The epoch it was started with.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.owner.origin.epoch
    }

    /// Appends a record and gives it the next LSN. Does no I/O and never waits for any.
    ///
    /// # Errors
    /// `Full` when the staging slots or the log have no room: [`Log::room`], then try again.
    /// `Invalid` for a record that can never fit. `Poisoned`, `Closed`.
    pub fn append(&self, record: Record<'_>) -> Result<Appended> {
        let mut entry = record.entry()?;
        let mut state = self.owner.lock();
        state.usable()?;
        if state.open.as_ref().is_some_and(|open| !open.takes(&entry)) {
            self.owner.close_frame(&mut state);
        }
        if state.open.is_none() {
            self.owner.open_frame(&mut state)?;
        }
        let lsn = state.appended.next();
        let open = state.open.as_mut().expect("opened above");
        entry.data_index = open.blocks;
        self.owner.fill(open, &entry, record.data(), lsn);
        let place = (entry.data_blocks > 0)
            .then(|| Place::new(Arc::clone(&open.frame), entry.data_index, entry.data_blocks));
        if open.is_full() {
            self.owner.close_frame(&mut state);
        }
        state.appended = lsn;
        self.owner.enqueue(&mut state);
        Ok(Appended { lsn, place })
    }

    /// Waits until an append has a chance again. Without writer threads it does what background
    /// work there is, and returns.
    pub async fn room(&self) {
        if !self.owner.dir.has_threads() {
            while !self.owner.has_room() && self.owner.dir.step() {}
            return;
        }
        loop {
            let room = self.owner.dir.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            if self.owner.has_room() {
                return;
            }
            room.await;
        }
    }

    /// Waits until killing the process cannot lose the record at `lsn`, nor any before it: at once
    /// where the staging ring outlives the process, else when the log write is complete.
    ///
    /// # Errors
    /// `Poisoned` or `Closed` when that will never be; `Invalid` when nothing was appended there.
    pub async fn wait_acknowledged(&self, lsn: Lsn) -> Result<()> {
        if self.owner.dir.ring.outlives() {
            let state = self.owner.lock();
            state.usable()?;
            return state.reached(lsn);
        }
        self.wait(lsn, Goal::Written).await
    }

    /// Waits until the log holds every record up to `lsn` on stable media. All who wait at the same
    /// time share one sync.
    ///
    /// # Errors
    /// As [`Log::wait_acknowledged`].
    pub async fn wait_synced(&self, lsn: Lsn) -> Result<()> {
        self.wait(lsn, Goal::Synced).await
    }

    /// Does the work of [`Log::wait_synced`] on this thread, which blocks for the device, if nobody
    /// else is writing. That saves two wake-ups where one client flushes after each write.
    ///
    /// # Errors
    /// As [`Log::wait_acknowledged`].
    pub fn sync_inline(&self, lsn: Lsn) -> Result<Inline> {
        self.owner.drive(lsn, Goal::Synced)
    }

    /// As [`Log::sync_inline`], for the log write alone.
    ///
    /// # Errors
    /// As [`Log::wait_acknowledged`].
    pub fn write_inline(&self, lsn: Lsn) -> Result<Inline> {
        self.owner.drive(lsn, Goal::Written)
    }

    /// Gives back the log space of the records up to `up_to`, as far as they are synced. The caller
    /// promises that the store holds them: they are not replayed, and a later start must state a
    /// floor that is no lower.
    pub fn release(&self, up_to: Lsn) {
        let mut state = self.owner.lock();
        let up_to = up_to.min(state.synced);
        if up_to <= state.released {
            return;
        }
        state.released = up_to;
        while state.full.front().is_some_and(|(_, last)| *last <= up_to) {
            if let Some((segment, _)) = state.full.pop_front() {
                segment.release();
            }
        }
        // An empty log gives back its last segment too, once it is idle.
        self.owner.arm(&mut state, Tick::Idle);
    }

    /// How far the log is.
    #[must_use]
    pub fn positions(&self) -> Positions {
        let state = self.owner.lock();
        let segment_bytes = u64::from(self.owner.dir.pool.segment_blocks()) * BLOCK;
        let held = self.owner.segments_alive.load(Ordering::Relaxed);
        Positions {
            appended: state.appended,
            acknowledged: if self.owner.dir.ring.outlives() {
                state.appended
            } else {
                state.written
            },
            written: state.written,
            synced: state.synced,
            released: state.released,
            bytes_used: u64::try_from(held).expect("a count of files") * segment_bytes,
            bytes_free: self.owner.dir.pool.bytes_free(),
        }
    }

    /// Writes everything into the log, syncs it, and stops it. Blocks for the device. Other handles
    /// get `Closed` from then on; what was not released is replayed at the next start.
    ///
    /// # Errors
    /// When not everything could be synced. The log is stopped all the same.
    pub fn close(self) -> Result<()> {
        self.owner.close()
    }

    async fn wait(&self, lsn: Lsn, goal: Goal) -> Result<()> {
        loop {
            let progress = match goal {
                Goal::Written => self.owner.written.notified(),
                Goal::Synced => self.owner.synced.notified(),
            };
            tokio::pin!(progress);
            progress.as_mut().enable();
            if !self.owner.dir.has_threads() && self.owner.drive(lsn, goal)? == Inline::Done {
                return Ok(());
            }
            {
                let mut state = self.owner.lock();
                if state.is_done(goal, lsn)? {
                    return Ok(());
                }
                goal.demand(&mut state, lsn);
                self.owner.enqueue(&mut state);
            }
            progress.await;
        }
    }
}

/// What a waiter waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    Written,
    Synced,
}

impl Goal {
    pub(crate) fn is_reached(self, state: &State, lsn: Lsn) -> bool {
        match self {
            Self::Written => state.written >= lsn,
            Self::Synced => state.synced >= lsn,
        }
    }

    pub(crate) fn demand(self, state: &mut State, lsn: Lsn) {
        state.want_written = state.want_written.max(lsn);
        if self == Self::Synced {
            state.want_synced = state.want_synced.max(lsn);
        }
    }
}

impl OpenFrame {
    fn takes(&self, entry: &Entry) -> bool {
        self.records < FRAME_RECORDS && self.blocks + entry.data_blocks <= FRAME_BLOCKS
    }

    fn is_full(&self) -> bool {
        self.records == FRAME_RECORDS || self.blocks == FRAME_BLOCKS
    }
}

impl State {
    pub(crate) fn usable(&self) -> Result<()> {
        match &self.failed {
            Some(error) => Err(Error::poisoned(error)),
            None if self.closed => Err(Error::new(ErrorKind::Closed, "the log is closed")),
            None => Ok(()),
        }
    }

    /// Whether a goal is reached; an error when it never will be. What was synced before the log
    /// was closed is synced; once a write failed nothing is certain.
    pub(crate) fn is_done(&self, goal: Goal, lsn: Lsn) -> Result<bool> {
        if self.failed.is_none() && goal.is_reached(self, lsn) {
            return Ok(true);
        }
        self.usable()?;
        self.reached(lsn)?;
        Ok(false)
    }

    /// Refuses to wait for what was never appended.
    pub(crate) fn reached(&self, lsn: Lsn) -> Result<()> {
        if lsn <= self.appended {
            return Ok(());
        }
        let reason = format!("nothing to wait for at lsn {lsn}: appended up to {}", self.appended);
        Err(Error::new(ErrorKind::Invalid, reason))
    }

    /// The files of the segments that hold this log.
    pub(crate) fn segment_ids(&self) -> Vec<FileId> {
        let full = self.full.iter().map(|(segment, _)| segment.id());
        full.chain(self.cursor.iter().map(|cursor| cursor.segment.id())).collect()
    }

    /// Blocks left in the segment that the next frame goes to.
    pub(crate) fn blocks_left(&self) -> u32 {
        self.cursor.as_ref().map_or(0, |cursor| cursor.segment.blocks() - cursor.block)
    }
}

/// Why a log is stopped when a thread panicked at work on it.
pub(crate) const PANICKED: &str = "a thread panicked while it worked on the log";

impl OwnerLog {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| {
            // A bug: going on could acknowledge what is not there.
            let mut state = poisoned.into_inner();
            state.failed.get_or_insert_with(|| Error::new(ErrorKind::Poisoned, PANICKED));
            state
        })
    }

    /// Opens a frame, if there is a slot for it and room in the log.
    fn open_frame(self: &Arc<Self>, state: &mut State) -> Result<()> {
        let full = |what: &str| Err(Error::new(ErrorKind::Full, what));
        if state.blocks_left() < SLOT_BLOCKS && !self.take_spare(state) {
            return full("no free log segment");
        }
        let first_lsn = state.appended.next();
        let Some(slot) = self.dir.ring.take(&self.origin, first_lsn, state.slots_held) else {
            return full("no free staging slot");
        };
        state.slots_held += 1;
        state.open = Some(OpenFrame {
            frame: Arc::new(Frame::in_slot(first_lsn, slot)),
            records: 0,
            blocks: 0,
            opened: self.dir.clock.now(),
        });
        self.arm(state, Tick::Fill);
        Ok(())
    }

    /// Takes a segment for later, unless there is one; `false` when none is free.
    pub(crate) fn take_spare(&self, state: &mut State) -> bool {
        if state.spare.is_none() {
            let Some(file) = self.dir.pool.take() else { return false };
            state.sequence += 1;
            let segment = Segment::new(&self.dir.pool, file, state.sequence, &self.segments_alive);
            state.spare = Some(Arc::new(segment));
        }
        true
    }

    fn has_room(&self) -> bool {
        let state = self.lock();
        if state.usable().is_err() {
            // The append that follows says why.
            return true;
        }
        let log =
            state.blocks_left() >= SLOT_BLOCKS || state.spare.is_some() || self.dir.pool.has_free();
        log && self.dir.ring.has_room(state.slots_held)
    }

    /// Puts a record into the open frame: data and CRCs, its line, then its mark.
    fn fill(&self, open: &mut OpenFrame, entry: &Entry, data: &[u8], lsn: Lsn) {
        let mut crcs = [0; index(FRAME_BLOCKS)];
        let crcs = &mut crcs[..index(entry.data_blocks)];
        let mut slot = open.frame.slot_mut();
        let slot = slot.as_mut().expect("an open frame is in its slot");
        let (header, blocks) = slot.bytes_mut().split_at_mut(BLOCK_BYTES);
        let start = index(entry.data_index) * BLOCK_BYTES;
        let room = &mut blocks[start..start + index(entry.data_blocks) * BLOCK_BYTES];
        for (i, block) in room.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            // One block at a time, so that the second pass finds it in the nearest cache.
            let source = &data[i * BLOCK_BYTES..data.len().min((i + 1) * BLOCK_BYTES)];
            let (filled, rest) = block.split_at_mut(source.len());
            filled.copy_from_slice(source);
            rest.fill(0);
            crcs[i] = crc32fast::hash(block);
        }
        put_record(header, open.records, entry, crcs, self.seed, lsn);
        open.frame.crcs().append(crcs);
        open.records += 1;
        open.blocks += entry.data_blocks;
        self.dir.ring.commit(slot.at(), open.records);
    }

    /// Closes the open frame: its place in the log is fixed from here on.
    pub(crate) fn close_frame(&self, state: &mut State) {
        let Some(open) = state.open.take() else { return };
        let closed = ClosedFrame { frame: open.frame, records: open.records, blocks: open.blocks };
        let home = Self::place(state, closed.frame.first_lsn(), 1 + closed.blocks);
        closed.frame.set_home(home.expect("room was made when it opened"));
        state.queue.push_back(closed);
    }

    /// The next `blocks` blocks of the log, for a frame that begins at `first_lsn`; `None` when
    /// they need a segment and there is none.
    pub(crate) fn place(state: &mut State, first_lsn: Lsn, blocks: u32) -> Option<Home> {
        if state.blocks_left() < blocks {
            let segment = state.spare.take()?;
            if let Some(cursor) = state.cursor.take() {
                state.full.push_back((cursor.segment, first_lsn.previous()));
            }
            state.cursor = Some(Cursor { segment, block: 1 });
        }
        let cursor = state.cursor.as_mut().expect("set above, or it has blocks left");
        let block = cursor.block;
        cursor.block += blocks;
        Some(Home { segment: Arc::clone(&cursor.segment), block })
    }
}

impl fmt::Debug for OwnerLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerLog")
            .field("owner", &self.origin.owner)
            .field("epoch", &self.origin.epoch)
            .finish_non_exhaustive()
    }
}
