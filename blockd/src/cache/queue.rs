//! Frames on their way to the disk: a bounded queue between those who insert and the one writer.
//!
//! A queued frame can be read here until it can be read from the disk. A full queue refuses.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::frame::{Frame, FrameKey, Part};

/// A frame and its blocks.
#[derive(Debug, Clone)]
pub(super) struct Inserted {
    pub(super) key: FrameKey,
    pub(super) frame: Arc<Frame>,
    pub(super) blocks: Bytes,
}

/// What the writer does next.
#[derive(Debug)]
pub(super) enum Next {
    /// Write these, then call [`Queue::done`].
    Write(Vec<Inserted>),
    /// End.
    Stop(Stop),
}

/// How the writer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// Leave everything as a restart likes it best.
    Settle,
    /// At once.
    Abandon,
}

#[derive(Debug, Default)]
struct State {
    order: VecDeque<FrameKey>,
    /// What is in `order`, and what the writer has taken and not done yet.
    inserted: HashMap<FrameKey, Inserted>,
    bytes: usize,
    stop: Option<Stop>,
    /// Told when nothing is queued.
    waiting: Vec<oneshot::Sender<()>>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Queue {
    bytes_max: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it is held")
    }

    /// Adds a frame; `false` when the queue is full. One that is queued already is not added twice.
    pub(super) fn push(&self, inserted: Inserted) -> bool {
        let mut state = self.state();
        if state.inserted.contains_key(&inserted.key) {
            return true;
        }
        let bytes = state.bytes + inserted.blocks.len();
        if bytes > self.bytes_max || state.stop.is_some() {
            return false;
        }
        state.bytes = bytes;
        state.order.push_back(inserted.key);
        state.inserted.insert(inserted.key, inserted);
        self.changed.notify_one();
        true
    }

    /// The blocks of `part`, not verified, if the frame is queued.
    pub(super) fn blocks(&self, key: &FrameKey, part: Part) -> Option<(Bytes, Arc<Frame>)> {
        let state = self.state();
        let Inserted { frame, blocks, .. } = state.inserted.get(key)?;
        frame
            .has(part)
            .then(|| (blocks.slice(part.start()..part.start() + part.len()), frame.clone()))
    }

    /// Waits for work; takes frames of at most `bytes_max` bytes, at least one.
    pub(super) fn next(&self, bytes_max: usize) -> Next {
        let mut state = self.state();
        loop {
            if let Some(stop) = state.stop {
                return Next::Stop(stop);
            }
            if !state.order.is_empty() {
                break;
            }
            state = self.changed.wait(state).expect("nothing panics while it is held");
        }
        let mut batch = Vec::new();
        let mut bytes = 0;
        while let Some(inserted) = state.order.front().and_then(|key| state.inserted.get(key)) {
            bytes += inserted.blocks.len();
            if bytes > bytes_max && !batch.is_empty() {
                break;
            }
            batch.push(inserted.clone());
            state.order.pop_front();
        }
        Next::Write(batch)
    }

    /// Ends the stay of frames that [`Queue::next`] gave out.
    pub(super) fn done(&self, batch: &[Inserted]) {
        let mut state = self.state();
        for Inserted { key, .. } in batch {
            let inserted = state.inserted.remove(key).expect("the writer ends each frame once");
            state.bytes -= inserted.blocks.len();
        }
        if state.inserted.is_empty() {
            for waiting in state.waiting.drain(..) {
                // Whoever waited may have gone.
                let _gone = waiting.send(());
            }
        }
    }

    /// Waits until nothing is queued.
    pub(super) async fn drained(&self) {
        let (drained, wait) = oneshot::channel();
        {
            let mut state = self.state();
            if state.inserted.is_empty() || state.stop.is_some() {
                return;
            }
            state.waiting.push(drained);
        }
        // An error is a writer that ended: nothing more will be written.
        let _ended = wait.await;
    }

    /// Ends the writer after what it does now. The first call decides how.
    pub(super) fn stop(&self, stop: Stop) {
        let mut state = self.state();
        state.stop.get_or_insert(stop);
        state.waiting.clear();
        self.changed.notify_all();
    }
}
