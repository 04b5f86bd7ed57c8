//! Segment files: [`Segment`], one in use by an owner, and [`Pool`], where they come from and go to.
//!
//! The pool keeps some files zeroed ahead, so that the log never pays for making one, and takes
//! back those that were released. Rules:
//! - a file enters the pool with a durable *free* header and a durable name;
//! - a released file is marked free, durably, before it can serve anybody else, and files of one
//!   owner in the order of their release: so what a crash leaves is never an older state's middle;
//! - a file of an earlier process is never used again: writes of a killed process may still land.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::error::{Error, Result};
use crate::format::{BLOCK, SegmentHeader};
use crate::memory::BlockBuf;
use crate::storage::{Durability, LogFile, Storage};

/// What a segment file is called once it is ready.
pub(crate) const SUFFIX: &str = ".seg";
/// What it is called while it is made; such files never held anything.
pub(crate) const UNFINISHED: &str = ".new";
/// How long the pool waits before it tries again to make a segment.
const RETRY: Duration = Duration::from_secs(1);

/// Which process made a segment file, and which of its files it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId {
    pub(crate) nonce: u64,
    pub(crate) ordinal: u64,
}

impl FileId {
    pub(crate) fn name(self) -> String {
        format!("{self}{SUFFIX}")
    }

    /// The id in a file name; `None` for a name that is not of a ready segment.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (nonce, ordinal) = name.strip_suffix(SUFFIX)?.split_once('-')?;
        let id = Self {
            nonce: u64::from_str_radix(nonce, 16).ok()?,
            ordinal: u64::from_str_radix(ordinal, 16).ok()?,
        };
        (id.name() == name).then_some(id)
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:08x}", self.nonce, self.ordinal)
    }
}

/// A segment file in use. When the last reference is dropped, a released one goes back to the pool;
/// any other stays as it is, to be found at the next start.
pub(crate) struct Segment {
    id: FileId,
    file: Arc<dyn LogFile>,
    sequence: u64,
    blocks: u32,
    released: AtomicBool,
    /// Where it lies, as seen from the directory; for messages.
    folder: String,
    pool: Arc<Pool>,
    /// How many segments of the same owner are in use.
    siblings: Arc<AtomicUsize>,
}

impl Segment {
    pub(crate) fn new(
        pool: &Arc<Pool>,
        file: PoolFile,
        sequence: u64,
        siblings: &Arc<AtomicUsize>,
    ) -> Self {
        siblings.fetch_add(1, Ordering::Relaxed);
        Self {
            id: file.id,
            file: file.file,
            sequence,
            blocks: file.blocks,
            released: AtomicBool::new(false),
            folder: String::new(),
            pool: Arc::clone(pool),
            siblings: Arc::clone(siblings),
        }
    }

    /// Says in which folder below the directory it lies.
    pub(crate) fn set_folder(&mut self, folder: &str) {
        folder.clone_into(&mut self.folder);
    }

    pub(crate) fn file(&self) -> &dyn LogFile {
        &*self.file
    }

    pub(crate) fn id(&self) -> FileId {
        self.id
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Nothing in it is needed by a replay any more.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    /// "in FILE at offset N", for messages.
    pub(crate) fn describe(&self, block: u32) -> String {
        let path = self.pool.path_of(&self.folder).join(self.id.name());
        format!("in {} at offset {}", path.display(), u64::from(block) * BLOCK)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.released.load(Ordering::Relaxed) {
            let file = Arc::clone(&self.file);
            self.pool.give_back(PoolFile { id: self.id, file, blocks: self.blocks });
        }
        self.siblings.fetch_sub(1, Ordering::Release);
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("id", &self.id)
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

/// A segment file that no owner holds.
#[derive(Debug)]
pub(crate) struct PoolFile {
    pub(crate) id: FileId,
    pub(crate) file: Arc<dyn LogFile>,
    pub(crate) blocks: u32,
}

/// The segment files of one log directory.
#[derive(Debug)]
pub(crate) struct Pool {
    storage: Arc<dyn Storage>,
    nonce: u64,
    segment_blocks: u32,
    segments_max: usize,
    segments_ready: usize,
    state: Mutex<PoolState>,
    work: Condvar,
    /// Told whenever a file becomes free.
    room: Arc<Notify>,
}

#[derive(Debug)]
struct PoolState {
    free: VecDeque<PoolFile>,
    returned: VecDeque<PoolFile>,
    /// The returned file that is being made free at this moment.
    settling: Option<FileId>,
    /// Files in the folder, free or in use, of this process or another.
    total: usize,
    next_ordinal: u64,
    /// Making a file failed, and trying again at once would fail again.
    failing: bool,
    stop: bool,
}

impl Pool {
    /// A pool over a folder that already has `total` segment files.
    pub(crate) fn new(
        storage: Arc<dyn Storage>,
        nonce: u64,
        config: &crate::LogConfig,
        total: usize,
        room: Arc<Notify>,
    ) -> Self {
        Self {
            storage,
            nonce,
            segment_blocks: config.segment_blocks(),
            segments_max: config.segments_max(),
            segments_ready: config.segments_ready.max(1),
            state: Mutex::new(PoolState {
                free: VecDeque::new(),
                returned: VecDeque::new(),
                settling: None,
                total,
                next_ordinal: 1,
                failing: false,
                stop: false,
            }),
            work: Condvar::new(),
            room,
        }
    }

    pub(crate) fn segment_blocks(&self) -> u32 {
        self.segment_blocks
    }

    /// A zeroed file, if one is ready.
    pub(crate) fn take(&self) -> Option<PoolFile> {
        let mut state = self.lock();
        let file = state.free.pop_front();
        if state.free.len() < self.segments_ready {
            self.work.notify_one();
        }
        file
    }

    /// A zeroed file, made here and now if none is ready, even beyond the limit: recovery needs
    /// room before it can give any back.
    pub(crate) fn take_or_make(&self) -> Result<PoolFile> {
        match self.take() {
            Some(file) => Ok(file),
            None => self.make(),
        }
    }

    /// Whether the pool has this file, whatever its header still says.
    pub(crate) fn has(&self, id: FileId) -> bool {
        let state = self.lock();
        let mut all = state.free.iter().chain(&state.returned);
        state.settling == Some(id) || all.any(|file| file.id == id)
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.lock().free.is_empty()
    }

    /// Bytes of segments that are ready or may still be made.
    pub(crate) fn bytes_free(&self) -> u64 {
        let state = self.lock();
        let segments = state.free.len() + self.segments_max.saturating_sub(state.total);
        u64::try_from(segments).expect("a count of files") * u64::from(self.segment_blocks) * BLOCK
    }

    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.storage.path().join(name)
    }

    /// Counts files that left the folder.
    pub(crate) fn forget(&self, files: usize) {
        let mut state = self.lock();
        state.total = state.total.saturating_sub(files);
    }

    fn give_back(&self, file: PoolFile) {
        self.lock().returned.push_back(file);
        self.work.notify_one();
    }

    /// Does one piece of work; `false` when there is none, or when it failed and must wait.
    pub(crate) fn step(&self) -> bool {
        let mut state = self.lock();
        if let Some(file) = state.returned.pop_front() {
            state.settling = Some(file.id);
            drop(state);
            self.settle(file);
            self.lock().settling = None;
            return true;
        }
        if state.free.len() >= self.segments_ready || state.total >= self.segments_max {
            return false;
        }
        let was_failing = state.failing;
        drop(state);
        match self.make() {
            Ok(file) => {
                let mut state = self.lock();
                state.free.push_back(file);
                state.failing = false;
                drop(state);
                self.room.notify_waiters();
                true
            }
            Err(error) => {
                if !was_failing {
                    tracing::warn!(error = &error as &dyn std::error::Error, "no new log segment");
                }
                self.lock().failing = true;
                false
            }
        }
    }

    /// Works until [`Pool::stop`].
    pub(crate) fn run(&self) {
        loop {
            while self.step() {}
            let state = self.lock();
            if state.stop {
                return;
            }
            let idle = state.returned.is_empty()
                && (state.failing
                    || state.free.len() >= self.segments_ready
                    || state.total >= self.segments_max);
            if !idle {
                continue;
            }
            // Space on the file system comes back without telling anybody.
            if state.failing && state.free.len() < self.segments_ready {
                drop(self.work.wait_timeout(state, RETRY).unwrap_or_else(PoisonError::into_inner));
            } else {
                drop(self.work.wait(state).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.lock().stop = true;
        self.work.notify_all();
    }

    /// Makes a file of zeros with a free header and a durable name.
    fn make(&self) -> Result<PoolFile> {
        let ordinal = {
            let mut state = self.lock();
            state.total += 1;
            state.next_ordinal += 1;
            state.next_ordinal - 1
        };
        let id = FileId { nonce: self.nonce, ordinal };
        self.make_file(id).inspect_err(|_| self.forget(1)).map_err(|error| {
            Error::io(format!("make segment {}", self.path_of(&id.name()).display()), error)
        })
    }

    fn make_file(&self, id: FileId) -> io::Result<PoolFile> {
        let unfinished = format!("{id}{UNFINISHED}");
        let bytes = u64::from(self.segment_blocks) * BLOCK;
        let file: Arc<dyn LogFile> = Arc::from(self.storage.create(&unfinished, bytes)?);
        let named = self
            .mark_free(id, &*file)
            .and_then(|()| self.storage.rename(&unfinished, &id.name()))
            .and_then(|()| self.storage.sync_folder(""));
        if let Err(error) = named {
            // Whichever name it has now; a file that stays is removed at the next start.
            drop(self.storage.remove(&unfinished).or_else(|_| self.storage.remove(&id.name())));
            return Err(error);
        }
        Ok(PoolFile { id, file, blocks: self.segment_blocks })
    }

    fn mark_free(&self, id: FileId, file: &dyn LogFile) -> io::Result<()> {
        let header = SegmentHeader {
            nonce: id.nonce,
            ordinal: id.ordinal,
            blocks: self.segment_blocks,
            held: None,
        };
        let mut block = BlockBuf::new(1);
        header.encode(block.bytes_mut());
        file.write_at(&[block.bytes()], 0, Durability::Volatile)?;
        file.sync()
    }

    /// Makes a returned file free again, or removes it if it cannot serve this process.
    fn settle(&self, file: PoolFile) {
        let ours = file.id.nonce == self.nonce && file.blocks == self.segment_blocks;
        if !ours {
            self.remove(file.id);
        } else if let Err(error) = self.mark_free(file.id, &*file.file) {
            let name = file.id.name();
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%name, error, "released segment cannot be used again");
            self.remove(file.id);
        } else {
            self.lock().free.push_back(file);
        }
        self.room.notify_waiters();
    }

    fn remove(&self, id: FileId) {
        let name = id.name();
        if let Err(error) = self.storage.remove(&name) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%name, error, "released segment stays");
        }
        self.forget(1);
        self.lock().failing = false;
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
