//! [`LogDir`], one folder with the logs of many owners: its files, its staging ring, its threads.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use tokio::sync::Notify;

use crate::config::{LogConfig, Seams};
use crate::direct::DirectStorage;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::{self, Identity};
use crate::log::{Log, OwnerLog};
use crate::lsn::OwnerId;
use crate::ring::{self, Ring, Staging};
use crate::scan::{Found, Inspected, inspect};
use crate::segment::{FileId, Pool, UNFINISHED};
use crate::start::{self, Recovery, Start};
use crate::storage::{Clock, Durability, MachineClock, Storage};
use crate::work::Work;

/// The niceness of threads that write: a flush waits for them, so they come before others.
const WRITER_NICE: i32 = -15;

/// A folder of logs. One process has it open at a time.
#[derive(Debug)]
pub struct LogDir {
    pub(crate) shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the logs of a folder share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: LogConfig,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) nonce: u64,
    pub(crate) pool: Arc<Pool>,
    pub(crate) ring: Ring,
    pub(crate) work: Work,
    pub(crate) counts: Counts,
    /// Whether threads do the work; without them those who wait for it do.
    threads: AtomicBool,
    /// Told when a slot or a segment becomes free.
    pub(crate) room: Arc<Notify>,
    owners: Mutex<Owners>,
}

/// What a directory did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Transfers to log files.
    pub writes: u64,
    /// Frames in them.
    pub frames: u64,
    /// Bytes in them: records, headers and all.
    pub bytes: u64,
    /// Syncs: of their own, or as part of a write.
    pub syncs: u64,
}

/// [`Counters`] while they count.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    writes: AtomicU64,
    frames: AtomicU64,
    bytes: AtomicU64,
    syncs: AtomicU64,
}

impl Counts {
    pub(crate) fn count_write(&self, frames: usize, parts: &[&[u8]], durability: Durability) {
        let wide = |number: usize| u64::try_from(number).expect("a transfer is small");
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.frames.fetch_add(wide(frames), Ordering::Relaxed);
        self.bytes.fetch_add(wide(bytes), Ordering::Relaxed);
        if durability == Durability::Stable {
            self.count_sync();
        }
    }

    pub(crate) fn count_sync(&self) {
        self.syncs.fetch_add(1, Ordering::Relaxed);
    }
}

/// A log that was started, or is about to be.
#[derive(Debug)]
struct Running {
    /// Dangling while it is being started.
    log: Weak<OwnerLog>,
    /// Its segments in use, by the log or by readers.
    segments: Arc<AtomicUsize>,
    started: bool,
}

#[derive(Debug, Default)]
struct Owners {
    /// Segments that wait for their owner.
    found: BTreeMap<OwnerId, Vec<Found>>,
    running: BTreeMap<OwnerId, Running>,
    /// Owners whose log failed to reach the device in this process, which must not try again.
    failed: BTreeMap<OwnerId, Error>,
}

impl LogDir {
    /// Opens a folder on this machine's file system.
    ///
    /// # Errors
    /// `Busy` when another process has it; `Unsupported` when the file system has no direct I/O;
    /// `Version` when a newer release wrote it; `Invalid` for a configuration that cannot work.
    pub fn open(config: LogConfig) -> Result<Arc<Self>> {
        config.validate()?;
        let storage = DirectStorage::open(&config.dir, config.allow_buffered)?;
        let seams = Seams {
            storage: Arc::new(storage),
            clock: Arc::new(MachineClock::new()),
            random: Arc::new(|| {
                getrandom::u64().expect("the kernel has random numbers once it has booted")
            }),
            ring: None,
        };
        Self::open_with(config, seams)
    }

    /// Opens a folder of another world.
    ///
    /// # Errors
    /// As [`LogDir::open`].
    pub fn open_with(config: LogConfig, seams: Seams) -> Result<Arc<Self>> {
        config.validate()?;
        let Seams { storage, clock, random, ring } = seams;
        let identity = identity::load_or_create(&*storage, &*random)?;
        let (found, files) = take_stock(&*storage)?;
        let ring = match ring {
            Some(memory) => Ring::over(memory.mapping(), identity.id)?,
            None => open_ring(&config, &*storage, &identity)?,
        };
        let nonce = random();
        let threads = config.writer_threads;
        let room = Arc::new(Notify::new());
        let pool = Pool::new(Arc::clone(&storage), nonce, &config, files, Arc::clone(&room));
        let shared = Arc::new(Shared {
            work: Work::new(Arc::clone(&clock)),
            config,
            storage,
            clock,
            nonce,
            pool: Arc::new(pool),
            ring,
            counts: Counts::default(),
            threads: AtomicBool::new(threads > 0),
            room,
            owners: Mutex::new(Owners { found, ..Owners::default() }),
        });
        let threads = spawn(&shared)?;
        Ok(Arc::new(Self { shared, threads }))
    }

    /// The owners of whom earlier processes left segments or staged records, and that were not
    /// started since.
    #[must_use]
    pub fn owners(&self) -> Vec<OwnerId> {
        let mut owners: Vec<OwnerId> = self.shared.owners().found.keys().copied().collect();
        owners.extend(self.shared.ring.owners_left());
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    /// Starts the log of an owner: a fresh one, or what survived. Blocks for as long as reading the
    /// owner's segments takes.
    ///
    /// # Errors
    /// `Damaged`, `OtherEpoch` or `BehindStore` when what is there must not be replayed: nothing
    /// was changed then, and other owners are not affected. `Busy` when the owner's log is running,
    /// or was dropped while somebody still reads from it. `Poisoned` when it failed before.
    pub fn start(&self, start: Start) -> Result<(Log, Recovery)> {
        let found = self.shared.reserve(start.owner)?;
        let started = start::start(&self.shared, start, found);
        let mut owners = self.shared.owners();
        match &started {
            Ok((log, _)) => {
                owners.found.remove(&start.owner);
                let segments = Arc::clone(&log.owner.segments_alive);
                let log = Arc::downgrade(&log.owner);
                owners.running.insert(start.owner, Running { log, segments, started: true });
            }
            Err(error) => {
                owners.running.remove(&start.owner);
                if error.kind() == ErrorKind::Poisoned {
                    owners.failed.insert(start.owner, error.clone());
                } else if error.kind() == ErrorKind::Io
                    && let Ok(found) = self.shared.find(start.owner)
                {
                    // It may have made or removed segments before it failed.
                    owners.found.insert(start.owner, found);
                }
            }
        }
        started
    }

    /// Whether appended records outlive the process, and if not, why.
    #[must_use]
    pub fn staging(&self) -> &Staging {
        self.shared.ring.staging()
    }

    /// Whether log writes pass through the page cache, because direct I/O is not to be had here and
    /// `allow_buffered` was set.
    #[must_use]
    pub fn is_buffered(&self) -> bool {
        self.shared.storage.is_buffered()
    }

    /// What was done since the directory was opened.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let counts = &self.shared.counts;
        Counters {
            writes: counts.writes.load(Ordering::Relaxed),
            frames: counts.frames.load(Ordering::Relaxed),
            bytes: counts.bytes.load(Ordering::Relaxed),
            syncs: counts.syncs.load(Ordering::Relaxed),
        }
    }

    /// Does one piece of background work; `false` when nothing is due. For directories without
    /// writer threads.
    pub fn step(&self) -> bool {
        self.shared.step()
    }
}

impl Drop for LogDir {
    /// Stops the threads. Logs that were not closed stay as a killed process would leave them; who
    /// still waits on one does the work.
    fn drop(&mut self) {
        self.shared.work.stop();
        self.shared.pool.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the log panicked");
            }
        }
        self.shared.threads.store(false, Ordering::Release);
        let running: Vec<_> = {
            let owners = self.shared.owners();
            owners.running.values().filter_map(|running| running.log.upgrade()).collect()
        };
        for log in running {
            log.tell_all();
        }
        self.shared.room.notify_waiters();
    }
}

impl Shared {
    pub(crate) fn has_threads(&self) -> bool {
        self.threads.load(Ordering::Acquire)
    }

    pub(crate) fn step(&self) -> bool {
        self.work.step() || self.pool.step()
    }

    /// Notes that an owner is being started and hands out what was found of it.
    fn reserve(&self, owner: OwnerId) -> Result<Vec<Found>> {
        let mut owners = self.owners();
        if let Some(error) = owners.failed.get(&owner) {
            return Err(Error::poisoned(error));
        }
        if let Some(running) = owners.running.get(&owner) {
            let held = running.segments.load(Ordering::Acquire);
            if !running.started || running.log.strong_count() > 0 || held > 0 {
                let reason = format!("the log of owner {owner} is running, or being read");
                return Err(Error::new(ErrorKind::Busy, reason));
            }
            self.ring.reclaim(owner);
            let found = self.find(owner)?;
            owners.found.insert(owner, found);
        }
        let segments = Arc::default();
        let starting = Running { log: Weak::new(), segments, started: false };
        owners.running.insert(owner, starting);
        Ok(owners.found.get(&owner).cloned().unwrap_or_default())
    }

    /// Looks for the segments of an owner in the folder, but for those that the pool has back.
    fn find(&self, owner: OwnerId) -> Result<Vec<Found>> {
        let path = self.storage.path();
        let names = self.storage.list("");
        let names = names.map_err(|e| Error::io(format!("list {}", path.display()), e))?;
        let ids: Vec<FileId> = names
            .iter()
            .filter_map(|name| FileId::parse(name))
            .filter(|id| !self.pool.has(*id))
            .collect();
        let mut found = self.inspect_all(&ids);
        found.retain(|found| found.held.owner == owner);
        Ok(found)
    }

    /// Notes that a log was closed cleanly; its segments can be found again.
    pub(crate) fn closed(&self, log: &OwnerLog) {
        let owner = log.origin.owner;
        if let Some(line) = log.line {
            self.ring.unregister(line);
        }
        let found = self.inspect_all(&log.lock().segment_ids());
        let mut owners = self.owners();
        owners.running.remove(&owner);
        if !found.is_empty() {
            owners.found.insert(owner, found);
        }
    }

    /// Notes that a log failed to reach the device: in this process it must not try again.
    pub(crate) fn failed(&self, owner: OwnerId, error: &Error) {
        self.owners().failed.entry(owner).or_insert_with(|| error.clone());
    }

    /// Reads the headers of an owner's segments.
    pub(crate) fn inspect_all(&self, ids: &[FileId]) -> Vec<Found> {
        let mut found = Vec::new();
        for id in ids {
            match inspect(&*self.storage, *id, &id.name()) {
                Ok(Inspected::Held(segment)) => found.push(segment),
                // Taken, and never written.
                Ok(Inspected::Free) => {}
                Ok(Inspected::Unknown(reason)) => {
                    tracing::warn!(%id, reason, "segment of a closed log has no header");
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%id, error, "segment of a closed log cannot be read");
                }
            }
        }
        found
    }

    /// The log of an owner, if it was started and not closed.
    pub(crate) fn running(&self, owner: OwnerId) -> Option<Arc<OwnerLog>> {
        self.owners().running.get(&owner)?.log.upgrade()
    }

    /// The segments that wait for an owner.
    pub(crate) fn found(&self, owner: OwnerId) -> Vec<Found> {
        self.owners().found.get(&owner).cloned().unwrap_or_default()
    }

    /// Forgets an owner of whom nothing is left.
    pub(crate) fn forget(&self, owner: OwnerId) {
        self.ring.free_left(owner);
        let mut owners = self.owners();
        owners.found.remove(&owner);
        owners.running.remove(&owner);
        owners.failed.remove(&owner);
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the staging ring that is configured, unless that would leave another one behind.
fn open_ring(config: &LogConfig, storage: &dyn Storage, identity: &Identity) -> Result<Ring> {
    let path = config.staging.path.as_ref();
    let path = path.map(std::path::absolute).transpose();
    let path = path.map_err(|e| Error::io("find the folder of the staging file", e))?;
    if let Some(before) = identity.ring.as_ref().filter(|before| path.as_ref() != Some(before)) {
        ring::check_emptied(before, identity.id)?;
    }
    let ring = Ring::open(&config.staging, config.slots(), identity.id)?;
    if let Some(path) = path.filter(|path| ring.outlives() && identity.ring.as_ref() != Some(path))
    {
        identity::note_ring(storage, identity, &path)?;
    }
    Ok(ring)
}

/// Finds whose segments are in a folder, removes what was never used, and counts the rest.
fn take_stock(storage: &dyn Storage) -> Result<(BTreeMap<OwnerId, Vec<Found>>, usize)> {
    let path = storage.path();
    let io =
        |verb: &str, name: &str, e| Error::io(format!("{verb} {}", path.join(name).display()), e);
    let mut found: BTreeMap<OwnerId, Vec<Found>> = BTreeMap::new();
    let mut kept = 0;
    let mut unused = Vec::new();
    for name in storage.list("").map_err(|e| io("list", "", e))? {
        if name.ends_with(UNFINISHED) {
            unused.push(name);
            continue;
        }
        let Some(id) = FileId::parse(&name) else { continue };
        match inspect(storage, id, &name)? {
            Inspected::Free => unused.push(name),
            Inspected::Held(segment) => {
                kept += 1;
                found.entry(segment.held.owner).or_default().push(segment);
            }
            Inspected::Unknown(reason) => {
                kept += 1;
                tracing::warn!(%name, reason, "segment of unknown owner is left alone");
            }
        }
    }
    for name in unused {
        storage.remove(&name).map_err(|e| io("remove", &name, e))?;
    }
    Ok((found, kept))
}

fn spawn(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>> {
    if shared.config.writer_threads == 0 {
        return Ok(Vec::new());
    }
    let mut threads = Vec::new();
    for number in 0..shared.config.writer_threads {
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new().name(format!("wal-writer-{number}"));
        threads.push(thread.spawn(move || {
            // Best effort: without the right to it, a busy machine makes flushes slower.
            let id = rustix::thread::gettid();
            let _ = rustix::process::setpriority_process(Some(id), WRITER_NICE);
            supervise(|| shared.work.run());
        }));
    }
    let pool = Arc::clone(&shared.pool);
    let thread = thread::Builder::new().name("wal-pool".to_owned());
    threads.push(thread.spawn(move || supervise(|| pool.run())));
    threads
        .into_iter()
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|e| Error::io("start a thread of the log", e))
}

/// Goes on after a panic: the log it happened in is stopped, the others need their threads.
fn supervise(work: impl Fn()) {
    while catch_unwind(AssertUnwindSafe(&work)).is_err() {
        tracing::error!("a thread of the log panicked and goes on");
    }
}
