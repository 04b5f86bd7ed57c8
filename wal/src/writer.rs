//! Who writes a log, and when: one leader at a time, in rounds.
//!
//! A leader closes the open frame if somebody needs it, writes what is queued with one transfer,
//! and syncs if somebody waits for that; all who asked meanwhile share it. The leader is a thread
//! of the directory, or the caller of a sync that finds nobody leading (`drive`): then one client
//! that flushes after each write pays no wake-up. Since one transfer per owner is in flight and
//! frames are written in order, `written` always means "this and everything before it".
//!
//! Nothing here is retried: a failed write or sync stops the log ("poisoned").

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::SyncMethod;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, BLOCK_BYTES, FrameHead, Holding, SegmentHeader, index};
use crate::frame::Home;
use crate::log::{ClosedFrame, Goal, Inline, OwnerLog, PANICKED, State};
use crate::lsn::Lsn;
use crate::memory::BlockBuf;
use crate::segment::Segment;
use crate::storage::Durability;
use crate::work::Tick;

/// The most blocks in one transfer: 1 MiB, from where on a device gets no faster.
const TRANSFER_BLOCKS: u32 = 256;

/// The right to write a log. A panic of its holder stops the log: nobody knows what was written.
struct Lead<'a>(&'a Arc<OwnerLog>);

impl<'a> Lead<'a> {
    fn take(log: &'a Arc<OwnerLog>, state: &mut State) -> Self {
        assert!(!state.leading);
        state.leading = true;
        Self(log)
    }

    /// Lets another one lead, at once if there is work.
    fn step_down(self, mut state: MutexGuard<'_, State>) {
        state.leading = false;
        self.0.enqueue(&mut state);
        if state.successors > 0 {
            self.0.led.notify_all();
        }
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let mut state = self.0.lock();
            state.leading = false;
            self.0.stop(&mut state, Error::new(ErrorKind::Poisoned, PANICKED));
            self.0.led.notify_all();
        }
    }
}

/// Frames that lie one behind the other in one segment.
struct Batch {
    frames: Vec<ClosedFrame>,
    synced: Lsn,
    /// Nothing written before waits for a sync, and nothing is left to write after: a stable write
    /// is a whole sync.
    alone: bool,
}

impl OwnerLog {
    /// Puts the log into the directory's queue if it has work and nobody is at it.
    pub(crate) fn enqueue(self: &Arc<Self>, state: &mut State) {
        if !state.leading && !state.queued && state.has_work() {
            state.queued = true;
            self.dir.work.push(self);
        }
    }

    /// Makes sure that somebody looks at the log after the time that `tick` stands for.
    pub(crate) fn arm(self: &Arc<Self>, state: &mut State, tick: Tick) {
        let armed = match tick {
            Tick::Fill => &mut state.fill_armed,
            Tick::Idle => &mut state.idle_armed,
        };
        // One that is arranged already comes earlier, and arranges the next.
        if !*armed {
            *armed = true;
            self.dir.work.push_tick(tick, self.dir.clock.now() + self.delay(tick), self);
        }
    }

    fn delay(&self, tick: Tick) -> Duration {
        match tick {
            Tick::Fill => self.dir.config.frame_fill,
            Tick::Idle => self.dir.config.idle_mark,
        }
    }

    /// Reaches a goal on the calling thread, unless another one leads.
    pub(crate) fn drive(self: &Arc<Self>, lsn: Lsn, goal: Goal) -> Result<Inline> {
        // Declared first, so that a panic unlocks the state before this is dropped.
        let lead;
        let mut state = self.lock();
        if state.is_done(goal, lsn)? {
            return Ok(Inline::Done);
        }
        goal.demand(&mut state, lsn);
        if state.leading {
            return Ok(Inline::Busy);
        }
        lead = Lead::take(self, &mut state);
        while !state.is_done(goal, lsn).unwrap_or(true) {
            state = self.round(state);
        }
        let done = state.is_done(goal, lsn);
        lead.step_down(state);
        done.map(|_| Inline::Done)
    }

    /// One round on a thread of the directory, which took the log from the queue.
    pub(crate) fn lead(self: &Arc<Self>) {
        let lead;
        let mut state = self.lock();
        state.queued = false;
        if state.leading || !state.has_work() {
            return;
        }
        lead = Lead::take(self, &mut state);
        state = self.round(state);
        lead.step_down(state);
    }

    /// Writes, syncs, tells. The caller leads.
    fn round<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if state.failed.is_some() {
            return state;
        }
        state.last_use = self.dir.clock.now();
        let wanted = state
            .open
            .as_ref()
            .is_some_and(|open| open.records > 0 && open.frame.first_lsn() <= state.want_written);
        if wanted {
            self.close_frame(&mut state);
        }
        if let Some(batch) = state.next_batch() {
            state = self.write_batch(state, batch);
        } else if state.want_mark {
            state = self.write_mark(state);
        }
        let all_written = state.failed.is_none() && state.want_synced <= state.written;
        if all_written && state.want_synced > state.synced {
            state = self.sync(state);
        }
        state
    }

    fn write_batch<'a>(
        self: &'a Arc<Self>,
        state: MutexGuard<'a, State>,
        batch: Batch,
    ) -> MutexGuard<'a, State> {
        let wants_sync = state.want_synced > state.synced;
        let stable = wants_sync && batch.alone && self.dir.config.sync == SyncMethod::Dsync;
        let durability = if stable { Durability::Stable } else { Durability::Volatile };
        drop(state);
        let result = self.transfer(&batch, durability);

        let mut state = self.lock();
        if let Err(error) = result {
            self.stop(&mut state, error);
            return state;
        }
        for closed in &batch.frames {
            state.queue.pop_front();
            self.dir.ring.give_back(&closed.frame);
        }
        state.slots_held -= batch.frames.len();
        let last = batch.frames.last().expect("a batch has frames");
        state.written = last.last_lsn();
        state.marked = state.marked.max(batch.synced);
        if stable {
            self.set_synced(&mut state, last.last_lsn());
        } else {
            let segment = &last.home().segment;
            if !state.unsynced.iter().any(|known| Arc::ptr_eq(known, segment)) {
                state.unsynced.push(Arc::clone(segment));
            }
        }
        self.dir.room.notify_waiters();
        self.written.notify_waiters();
        state
    }

    /// One write of all frames of a batch, behind the segment's header if they are its first.
    fn transfer(&self, batch: &Batch, durability: Durability) -> Result<()> {
        let first = batch.frames.first().expect("a batch has frames");
        let home = first.home();
        for closed in &batch.frames {
            let head = self.head(closed, batch.synced);
            let mut slot = closed.frame.slot_mut();
            let slot = slot.as_mut().expect("an unwritten frame is in its slot");
            head.finish(&mut slot.bytes_mut()[..BLOCK_BYTES]);
        }
        let header = (home.block == 1)
            .then(|| self.segment_header(&home.segment, first.frame.first_lsn(), batch.synced));
        let slots: Vec<_> = batch.frames.iter().map(|closed| closed.frame.slot()).collect();
        let frames = slots.iter().zip(&batch.frames).map(|(slot, closed)| {
            let slot = slot.as_ref().expect("an unwritten frame is in its slot");
            &slot.bytes()[..index(1 + closed.blocks) * BLOCK_BYTES]
        });
        let parts: Vec<&[u8]> = header.iter().map(BlockBuf::bytes).chain(frames).collect();
        let block = if header.is_some() { 0 } else { home.block };
        self.dir.counts.count_write(batch.frames.len(), &parts, durability);
        write(&home.segment, &parts, block, durability)
    }

    /// Writes a frame without records, which states what is synced, and syncs it.
    fn write_mark<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        state.want_mark = false;
        if state.marked >= state.synced || state.written < state.appended {
            return state;
        }
        let first_lsn = state.appended.next();
        if state.blocks_left() == 0 && state.spare.is_none() {
            self.take_spare(&mut state);
        }
        let Some(home) = Self::place(&mut state, first_lsn, 1) else { return state };
        let synced = state.synced;
        drop(state);
        let head = FrameHead {
            origin: self.origin,
            sequence: home.segment.sequence(),
            block: home.block,
            first_lsn,
            synced_lsn: synced,
            records: 0,
            blocks: 0,
        };
        let mut mark = BlockBuf::new(1);
        head.finish(mark.bytes_mut());
        let header =
            (home.block == 1).then(|| self.segment_header(&home.segment, first_lsn, synced));
        let mut parts: Vec<&[u8]> = header.iter().map(BlockBuf::bytes).collect();
        parts.push(mark.bytes());
        let block = if header.is_some() { 0 } else { home.block };
        let written = write(&home.segment, &parts, block, Durability::Stable);

        let mut state = self.lock();
        match written {
            Ok(()) => state.marked = synced,
            Err(error) => self.stop(&mut state, error),
        }
        state
    }

    fn sync<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let up_to = state.written;
        let files = std::mem::take(&mut state.unsynced);
        drop(state);
        self.dir.counts.count_sync();
        let result = files.iter().try_for_each(|segment| {
            let context = || format!("sync log {}", segment.describe(0));
            segment.file().sync().map_err(|e| Error::io(context(), e))
        });
        drop(files);

        let mut state = self.lock();
        match result {
            Ok(()) => self.set_synced(&mut state, up_to),
            Err(error) => self.stop(&mut state, error),
        }
        state
    }

    fn set_synced(self: &Arc<Self>, state: &mut State, lsn: Lsn) {
        assert!(state.synced <= lsn && lsn <= state.written);
        state.synced = lsn;
        if let Some(line) = self.line {
            self.dir.ring.set_synced(line, lsn);
        }
        self.arm(state, Tick::Idle);
        self.synced.notify_waiters();
    }

    /// Stops the log for good: what the device has is unknown from here on.
    fn stop(&self, state: &mut State, error: Error) {
        let source = &error as &dyn std::error::Error;
        tracing::error!(owner = %self.origin.owner, error = source, "log stopped");
        self.dir.failed(self.origin.owner, &error);
        state.failed.get_or_insert(error);
        self.dir.room.notify_waiters();
        self.tell_all();
    }

    pub(crate) fn tell_all(&self) {
        self.written.notify_waiters();
        self.synced.notify_waiters();
    }

    fn head(&self, closed: &ClosedFrame, synced: Lsn) -> FrameHead {
        let home = closed.home();
        FrameHead {
            origin: self.origin,
            sequence: home.segment.sequence(),
            block: home.block,
            first_lsn: closed.frame.first_lsn(),
            synced_lsn: synced,
            records: closed.records,
            blocks: closed.blocks,
        }
    }

    pub(crate) fn segment_header(&self, segment: &Segment, first: Lsn, synced: Lsn) -> BlockBuf {
        let header = SegmentHeader {
            nonce: segment.id().nonce,
            ordinal: segment.id().ordinal,
            blocks: segment.blocks(),
            held: Some(Holding {
                owner: self.origin.owner,
                epoch: self.origin.epoch,
                sequence: segment.sequence(),
                first_lsn: first,
                synced_lsn: synced,
            }),
        };
        let mut block = BlockBuf::new(1);
        header.encode(block.bytes_mut());
        block
    }

    /// Writes a frame that waited long enough to fill.
    pub(crate) fn look_at_frame(self: &Arc<Self>, now: Duration) {
        let mut state = self.lock();
        state.fill_armed = false;
        let Some(open) = &state.open else { return };
        if open.opened + self.dir.config.frame_fill > now {
            self.arm(&mut state, Tick::Fill);
        } else {
            state.want_written = state.appended;
            self.enqueue(&mut state);
        }
    }

    /// Marks a log that fell idle, and takes the segments of an empty one.
    pub(crate) fn look_at_idle(self: &Arc<Self>, now: Duration) {
        let mut state = self.lock();
        state.idle_armed = false;
        let empty = state.released == state.appended && state.cursor.is_some();
        let unmarked = state.marked < state.synced;
        if state.usable().is_err() || !(empty || unmarked) {
            return;
        }
        if state.last_use + self.dir.config.idle_mark > now {
            self.arm(&mut state, Tick::Idle);
        } else if empty {
            self.give_back_segments(&mut state);
        } else {
            state.want_mark = true;
            self.enqueue(&mut state);
        }
    }

    /// Gives back the segments of a log without live records, unless a reader still holds an older
    /// one: the newest must not go first.
    fn give_back_segments(self: &Arc<Self>, state: &mut State) {
        let kept = 1 + usize::from(state.spare.is_some());
        if state.synced < state.appended {
            return;
        }
        if self.segments_alive.load(Ordering::Acquire) > kept {
            self.arm(state, Tick::Idle);
            return;
        }
        if let Some(cursor) = state.cursor.take() {
            cursor.segment.release();
        }
        if let Some(spare) = state.spare.take() {
            spare.release();
        }
        state.unsynced.clear();
        state.marked = state.synced;
    }

    /// Empties the log's staging into its files and stops it.
    pub(crate) fn close(self: &Arc<Self>) -> Result<()> {
        let lead;
        let mut state = self.lock();
        if state.closed {
            return state.usable();
        }
        state.closed = true;
        let last = state.appended;
        Goal::Synced.demand(&mut state, last);
        state.successors += 1;
        while state.leading {
            state = self.led.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.successors -= 1;
        lead = Lead::take(self, &mut state);
        while state.failed.is_none() && state.synced < last {
            state = self.round(state);
        }
        state.want_mark = state.marked < state.synced && state.released < state.appended;
        if state.want_mark && state.failed.is_none() {
            state = self.round(state);
        }
        let result = match &state.failed {
            Some(error) => Err(Error::poisoned(error)),
            None => Ok(()),
        };
        if result.is_ok() && state.released == state.appended {
            self.give_back_segments(&mut state);
        }
        lead.step_down(state);
        self.tell_all();
        if result.is_ok() {
            self.dir.closed(self);
        }
        result
    }
}

impl State {
    fn has_work(&self) -> bool {
        let wanted = self.want_written.min(self.appended) > self.written;
        let unsynced = self.want_synced.min(self.appended) > self.synced;
        self.failed.is_none() && (!self.queue.is_empty() || wanted || unsynced || self.want_mark)
    }

    /// The first queued frames that one transfer can write.
    fn next_batch(&self) -> Option<Batch> {
        let first = self.queue.front()?;
        let Home { segment, block } = first.home();
        let mut end = *block;
        let mut frames = Vec::new();
        for closed in &self.queue {
            let home = closed.home();
            let fits = end + 1 + closed.blocks - block <= TRANSFER_BLOCKS || frames.is_empty();
            if !Arc::ptr_eq(&home.segment, segment) || !fits {
                break;
            }
            assert_eq!(home.block, end, "queued frames lie one behind the other");
            end += 1 + closed.blocks;
            frames.push(closed.clone());
        }
        let alone = self.unsynced.is_empty() && frames.len() == self.queue.len();
        Some(Batch { frames, synced: self.synced, alone })
    }
}

fn write(segment: &Segment, parts: &[&[u8]], block: u32, durability: Durability) -> Result<()> {
    let written = segment.file().write_at(parts, u64::from(block) * BLOCK, durability);
    written.map_err(|e| Error::io(format!("write log {}", segment.describe(block)), e))
}
