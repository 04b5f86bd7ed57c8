//! The threads that read from the disk, so that no async thread waits for it.
//!
//! As many as the queue depth at which a fast NVMe device is busy. The queue between holds one job
//! per waiting reader, so those who ask bound it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::data_file::AlignedBuffer;
use super::disk::Disk;
use super::frame::{FRAME_LEN_MAX, FrameKey, Part};

/// Threads that read: a deeper queue gains little on one device.
pub(super) const READERS: usize = 32;

#[derive(Debug)]
struct Job {
    key: FrameKey,
    part: Part,
    reply: oneshot::Sender<Option<Bytes>>,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    stopped: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Readers {
    state: Mutex<State>,
    changed: Condvar,
}

impl Readers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it is held")
    }

    /// Has a thread read `part` of a frame.
    pub(super) async fn read(&self, key: FrameKey, part: Part) -> Option<Bytes> {
        let (reply, read) = oneshot::channel();
        {
            let mut state = self.state();
            if state.stopped {
                return None;
            }
            state.jobs.push_back(Job { key, part, reply });
        }
        self.changed.notify_one();
        read.await.ok()?
    }

    /// The body of each thread.
    pub(super) fn run(&self, disk: &Disk) {
        let mut buffer = AlignedBuffer::new(FRAME_LEN_MAX);
        while let Some(job) = self.next() {
            if !job.reply.is_closed() {
                // Whoever asked may have gone meanwhile.
                let _gone = job.reply.send(disk.read(&job.key, job.part, buffer.as_mut()));
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self.changed.wait(state).expect("nothing panics while it is held");
        }
    }

    /// Ends the threads; what was not read yet is a miss.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        state.jobs.clear();
        self.changed.notify_all();
    }
}
