//! The read cache: blocks of blobs on local NVMe, decompressed, each with its CRC.
//!
//! Promises:
//!
//! - A hit is exactly what was inserted under that key: every block's CRC is checked at every hit. What
//!   does not match is a miss, is dropped and counted.
//! - Blobs never change, so nothing is ever invalidated, and forks of a disk share what they read.
//! - It is only a cache. No error of its disk or of the local database reaches a reader, and none ends
//!   it: garbage, a full disk, deleted files (at start or under load) make it colder, for as long as
//!   that lasts.
//! - It survives restarts, `kill -9` and power cuts, without ever trusting what may be stale (see
//!   `data_file`).
//! - Its bytes are its own: at most `bytes_max` on the disk, and it grows only while a twentieth of the
//!   file system (at most 4 GiB) stays free for others, the log above all.
//!
//! A read looks in memory (`memory`, then `queue`), without a thread hop; then one of the `readers`
//! finds the frame (`memory`, then `index`) and reads just the blocks asked for from the ring
//! (`disk`, `data_file`): a hit of 4 KiB is one O_DIRECT read of 4 KiB. An insert goes to memory and,
//! if there is room, to the `queue`; one `writer` takes it from there. Map pages have a cache of their
//! own, `pages`.
//!
//! Memory: `memory_bytes_max` for everything that grows with use (five eighths for blocks, one eighth
//! for places of frames, a quarter, but at least 1 MiB, for frames on their way to the disk), and 6 MiB
//! of buffers. An eighth of 64 MiB knows the places of the last 32,768 frames, 4 GiB when they are whole; others cost
//! a lookup in the local database.

mod data_file;
mod disk;
mod frame;
mod index;
mod memory;
mod pages;
mod queue;
mod readers;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_damage;
mod writer;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use bytes::Bytes;
use tracing::warn;

use self::data_file::Header;
use self::disk::{Disk, Host, Ring};
pub use self::frame::FrameKey;
use self::frame::{Frame, Part};
use self::memory::Memory;
use self::queue::{Inserted, Queue, Stop};
use self::readers::{READERS, Readers};
use self::writer::{BATCH_LEN, Writer};
use crate::blob::FRAME_BLOCKS_MAX;
use crate::error::{Error, Kind, Result};
use crate::geometry::{BLOCK_LEN, to_usize};
use crate::local_db::LocalDb;

/// Settings of a [`ReadCache`].
#[derive(Debug, Clone)]
pub struct CacheConfig {
    /// The cache's own directory, created when it is not there.
    pub dir: PathBuf,
    /// Bytes on the disk; less than about 260 KiB (or 0) is a cache in memory only. A change empties
    /// the cache.
    pub bytes_max: u64,
    /// Bytes in memory; see the module's documentation.
    pub memory_bytes_max: u64,
}

/// What the cache did since it was opened, and what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Reads answered, from memory or from the disk.
    pub hits: u64,
    /// Those of them that memory answered.
    pub memory_hits: u64,
    /// Reads not answered.
    pub misses: u64,
    /// Bytes written to the disk.
    pub inserted_bytes: u64,
    /// Bytes that the cache takes on the disk.
    pub used_bytes: u64,
    /// Frames that were not cached on the disk: too many at once, or errors.
    pub dropped: u64,
    /// Blocks or frames that were not what had been inserted, or could not be read.
    pub corrupt: u64,
}

#[derive(Debug, Default)]
struct Counters {
    memory_hits: AtomicU64,
    disk_hits: AtomicU64,
    misses: AtomicU64,
    inserted_bytes: AtomicU64,
    dropped: AtomicU64,
    corrupt: AtomicU64,
}

/// What needs no disk.
#[derive(Debug)]
struct Core {
    memory: Memory,
    counters: Counters,
}

/// The disk's part, with the threads that serve it.
#[derive(Debug)]
struct Storage {
    disk: Arc<Disk>,
    queue: Arc<Queue>,
    readers: Arc<Readers>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// See the module's documentation. Dropping it waits for what its threads do at the moment; what is
/// queued is lost, as it is in a crash. [`ReadCache::close`] loses nothing.
#[derive(Debug)]
pub struct ReadCache {
    core: Arc<Core>,
    storage: Option<Storage>,
}

impl ReadCache {
    /// Opens the cache with what it held before, as far as that can be trusted. A disk that cannot be
    /// used is logged, and leaves a cache in memory.
    ///
    /// # Errors
    /// When threads cannot be started.
    pub fn open(config: &CacheConfig, db: Arc<LocalDb>) -> Result<Arc<Self>> {
        if let Err(error) = std::fs::create_dir_all(&config.dir) {
            warn!("read cache {}: create directory: {error}", config.dir.display());
        }
        Self::open_on(Host::current(&config.dir), config, db)
    }

    fn open_on(host: Host, config: &CacheConfig, db: Arc<LocalDb>) -> Result<Arc<Self>> {
        let eighth = config.memory_bytes_max / 8;
        let memory = Memory::new(5 * eighth, eighth);
        let core = Arc::new(Core { memory, counters: Counters::default() });
        let opened = Ring::plan(config.bytes_max).and_then(|ring| {
            Disk::open(&config.dir, ring, host, core.clone(), db)
                .inspect_err(|error| {
                    let place = config.dir.display();
                    warn!("read cache {place} is in memory only: {error}");
                })
                .ok()
        });
        let storage = opened
            .map(|(disk, header)| Storage::start(disk, header, to_usize(2 * eighth).max(BATCH_LEN)))
            .transpose()?;
        Ok(Arc::new(Self { core, storage }))
    }

    /// Blocks `first..first + count` of a frame, `count * 4096` bytes, if they are cached.
    ///
    /// Cancelling it is harmless.
    ///
    /// # Panics
    /// When `count` is zero.
    pub async fn read(&self, key: &FrameKey, first: u8, count: u8) -> Option<Bytes> {
        let part = Part::new(first, count);
        let counters = &self.core.counters;
        if let Some(bytes) = self.read_memory(key, part) {
            counters.memory_hits.fetch_add(1, Ordering::Relaxed);
            return Some(bytes);
        }
        let bytes = match &self.storage {
            Some(storage) => storage.readers.read(*key, part).await,
            None => None,
        };
        let counter = if bytes.is_some() { &counters.disk_hits } else { &counters.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        bytes
    }

    fn read_memory(&self, key: &FrameKey, part: Part) -> Option<Bytes> {
        let queued = || self.storage.as_ref()?.queue.blocks(key, part);
        let (bytes, frame) = self.core.memory.blocks(key, part).or_else(queued)?;
        if frame.verifies(part, &bytes) {
            if let Some(storage) = &self.storage {
                storage.disk.mark_read(&frame);
            }
            return Some(bytes);
        }
        self.core.counters.corrupt.fetch_add(1, Ordering::Relaxed);
        self.core.memory.remove_blocks(key, part);
        None
    }

    /// Caches a whole frame: all of its blocks, with the CRC32 of each. Returns at once; a frame that
    /// comes faster than the disk takes it is kept in memory only.
    ///
    /// `blocks` should be the only use of its memory: a slice would hold on to all of it.
    ///
    /// # Panics
    /// When there is not one CRC for each of 1 to [`FRAME_BLOCKS_MAX`] blocks.
    pub fn insert(&self, key: FrameKey, blocks: Bytes, crcs: Vec<u32>) {
        assert!((1..=FRAME_BLOCKS_MAX).contains(&crcs.len()), "{} blocks in a frame", crcs.len());
        assert_eq!(blocks.len(), crcs.len() * BLOCK_LEN, "each block has a crc");
        let known = self.core.memory.frame(&key).filter(|frame| *frame.crcs() == crcs);
        let frame = known.unwrap_or_else(|| Arc::new(Frame::new(crcs)));
        self.core.memory.put_whole(key, frame.clone(), blocks.clone());
        if let Some(storage) = &self.storage
            && !storage.queue.push(Inserted { key, frame, blocks })
        {
            self.core.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a read of the frame's first block would be a hit, were it made now and its bytes good.
    /// May look into the local database, which blocks as described there.
    #[must_use]
    pub fn contains(&self, key: &FrameKey) -> bool {
        let part = Part::new(0, 1);
        self.core.memory.blocks(key, part).is_some()
            || self.storage.as_ref().is_some_and(|storage| {
                storage.queue.blocks(key, part).is_some() || storage.disk.find(key).is_some()
            })
    }

    /// Counters since the cache was opened.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let counters = &self.core.counters;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let memory_hits = count(&counters.memory_hits);
        CacheStats {
            hits: memory_hits + count(&counters.disk_hits),
            memory_hits,
            misses: count(&counters.misses),
            inserted_bytes: count(&counters.inserted_bytes),
            used_bytes: self.storage.as_ref().map_or(0, |storage| storage.disk.file.used_bytes()),
            dropped: count(&counters.dropped),
            corrupt: count(&counters.corrupt),
        }
    }

    /// Waits until everything inserted before is on the disk or dropped.
    pub async fn flush(&self) {
        if let Some(storage) = &self.storage {
            storage.queue.drained().await;
        }
    }

    /// Flushes, settles what is on the disk, and waits for the threads to end. From here on reads of
    /// what is not in memory are misses.
    pub async fn close(&self) {
        self.flush().await;
        self.end(Stop::Settle).await;
    }

    async fn end(&self, stop: Stop) {
        let Some(storage) = &self.storage else { return };
        let threads = storage.stop(stop);
        let joined = tokio::task::spawn_blocking(|| join(threads)).await;
        if !joined.unwrap_or(false) {
            warn!("a thread of the read cache had panicked");
        }
    }
}

impl Drop for ReadCache {
    fn drop(&mut self) {
        if let Some(storage) = &self.storage {
            // The threads share the local database: it must not outlive its owner by accident.
            join(storage.stop(Stop::Abandon));
        }
    }
}

/// Waits for threads to end; `false` if one had panicked.
fn join(threads: Vec<JoinHandle<()>>) -> bool {
    let panicked = threads.into_iter().map(JoinHandle::join).filter(Result::is_err).count();
    panicked == 0
}

impl Storage {
    fn start(disk: Disk, header: Header, queue_bytes_max: usize) -> Result<Self> {
        let storage = Self {
            disk: Arc::new(disk),
            queue: Arc::new(Queue::new(queue_bytes_max)),
            readers: Arc::default(),
            threads: Mutex::default(),
        };
        let (disk, queue) = (storage.disk.clone(), storage.queue.clone());
        storage
            .spawn("cache-write", move || Writer::new(&disk, header, &queue).run())
            .and_then(|()| {
                (0..READERS).try_for_each(|_| {
                    let (disk, readers) = (storage.disk.clone(), storage.readers.clone());
                    storage.spawn("cache-read", move || readers.run(&disk))
                })
            })
            .inspect_err(|_| {
                join(storage.stop(Stop::Abandon));
            })?;
        Ok(storage)
    }

    fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|error| {
                Error::new(Kind::Failed, format!("start thread {name}")).with_source(error)
            })?;
        self.threads.lock().expect("nothing panics under it").push(thread);
        Ok(())
    }

    /// Has the threads end, and hands them over to be waited for.
    fn stop(&self, stop: Stop) -> Vec<JoinHandle<()>> {
        self.queue.stop(stop);
        self.readers.stop();
        std::mem::take(&mut *self.threads.lock().expect("nothing panics under it"))
    }
}
