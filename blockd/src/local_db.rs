//! The local database: the one module that touches RocksDB.
//!
//! It holds only what can be rebuilt (the index of the read cache; map pages, with `get_page` and
//! `put_page` in `cache::pages`), so it promises little and never stands in the way:
//!
//! - Deleting its files loses warmth and nothing else, also while it runs. What does not open, or was
//!   written by another version, is removed and begun anew.
//! - An error is a miss, or a write that was not taken; it is logged once until the database works
//!   again. [`LocalDb::reopen_if_failing`] brings it back, so no bad spell lasts for ever.
//! - Writes are not synced, unless asked for: they survive the daemon, and a power cut may take the
//!   newest of them. Readers must therefore check what they find (the cache does, by position and by CRC).
//! - Memory and files are bounded by the constants below, however large the database grows.
//!
//! Calls block. Most gets are answered from memory in a few microseconds (a filter answers most
//! misses); one that must read from the disk takes as long as that does. A write is a copy into
//! memory and into the page cache, and is refused rather than held up when compaction lags.

use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, Direction, ErrorKind,
    IteratorMode, LogLevel, Options, ReadOptions, WriteBatch, WriteBufferManager, WriteOptions,
};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::error::{Error, Kind, Result};

/// Memory for cached blocks, filters, indexes and memtables together.
pub const MEMORY_BYTES: usize = 24 << 20;

/// The part of [`MEMORY_BYTES`] that memtables may take.
const MEMTABLE_BYTES: usize = 8 << 20;

/// Files that RocksDB keeps open: well below the usual limit of 1,024 descriptors of a process.
const OPEN_FILES: i32 = 128;

/// Shortest time between two attempts to bring a failing database back.
const REOPEN_DELAY: Duration = Duration::from_secs(10);

/// Stands under [`VERSION_KEY`]; another value means that the database is begun anew.
const VERSION: &[u8] = b"1";
const VERSION_KEY: &[u8] = b"version";

/// A space of keys of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// The index of the read cache.
    Cache,
    /// Pages of chunk maps.
    Pages,
}

impl Family {
    const ALL: [Self; 2] = [Self::Cache, Self::Pages];

    fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Pages => "pages",
        }
    }
}

enum Change {
    Put(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    DeleteRange(Range<Vec<u8>>),
}

/// Changes of one family that are written together or not at all.
pub struct Batch {
    family: Family,
    changes: Vec<Change>,
}

impl Batch {
    /// No changes yet.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self { family, changes: Vec::new() }
    }

    /// Sets the value of a key.
    pub fn put(&mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) {
        self.changes.push(Change::Put(key.into(), value.into()));
    }

    /// Removes a key, if it is there.
    pub fn delete(&mut self, key: impl Into<Vec<u8>>) {
        self.changes.push(Change::Delete(key.into()));
    }

    /// Removes every key in the range.
    pub fn delete_range(&mut self, keys: Range<Vec<u8>>) {
        self.changes.push(Change::DeleteRange(keys));
    }

    fn encode(self, family: &ColumnFamily) -> WriteBatch {
        let mut batch = WriteBatch::default();
        for change in self.changes {
            match change {
                Change::Put(key, value) => batch.put_cf(family, key, value),
                Change::Delete(key) => batch.delete_cf(family, key),
                Change::DeleteRange(keys) => batch.delete_range_cf(family, keys.start, keys.end),
            }
        }
        batch
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch({}, {} changes)", self.family.name(), self.changes.len())
    }
}

/// The database of one state directory. See the module's documentation.
pub struct LocalDb {
    dir: PathBuf,
    /// Empty while the database cannot be opened.
    db: RwLock<Option<DB>>,
    /// Held by whoever adds a page.
    pub(crate) pages_turn: Mutex<()>,
    failing: AtomicBool,
    reopen_delay: Duration,
    reopen_at: Mutex<Instant>,
}

impl LocalDb {
    /// Opens the database in `dir`, a directory of its own: whatever else is in there may be deleted.
    /// Never fails: without a working database every get is a miss.
    #[must_use]
    pub fn open(dir: &Path) -> Arc<Self> {
        Self::open_with(dir, REOPEN_DELAY)
    }

    fn open_with(dir: &Path, reopen_delay: Duration) -> Arc<Self> {
        let db = open_or_begin_anew(dir);
        Arc::new(Self {
            dir: dir.to_owned(),
            failing: AtomicBool::new(db.is_none()),
            db: RwLock::new(db),
            pages_turn: Mutex::new(()),
            reopen_delay,
            reopen_at: Mutex::new(Instant::now() + reopen_delay),
        })
    }

    /// The value of a key; an error is `None`.
    pub fn get(&self, family: Family, key: &[u8]) -> Option<Vec<u8>> {
        let found = self.with(family, |db, family| db.get_cf(family, key));
        self.noted("get", found?)?
    }

    /// Writes a batch; `false` when it was not taken, for whatever reason.
    pub fn write(&self, batch: Batch) -> bool {
        let mut options = WriteOptions::default();
        options.set_no_slowdown(true);
        let written = self.with(batch.family, |db, family| {
            match db.write_opt(batch.encode(family), &options) {
                // Compaction lags: a refusal, not a failure.
                Err(error) if error.kind() == ErrorKind::Incomplete => Ok(false),
                other => other.map(|()| true),
            }
        });
        written.and_then(|written| self.noted("write", written)).unwrap_or(false)
    }

    /// Visits the rows of a range of keys in order until told to stop; `false` when not all of it
    /// could be read.
    pub fn scan(
        &self,
        family: Family,
        keys: Range<&[u8]>,
        mut visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> bool {
        let mut options = ReadOptions::default();
        options.set_iterate_upper_bound(keys.end);
        options.fill_cache(false);
        let scanned = self.with(family, |db, family| {
            let mode = IteratorMode::From(keys.start, Direction::Forward);
            for row in db.iterator_cf_opt(family, options, mode) {
                let (key, value) = row?;
                if visit(&key, &value).is_break() {
                    break;
                }
            }
            Ok(())
        });
        scanned.is_some_and(|scanned| self.noted("scan", scanned).is_some())
    }

    /// Waits until everything written before is on stable media; `false` when that cannot be said.
    pub fn sync(&self) -> bool {
        let synced = self.with(Family::Cache, |db, _| db.flush_wal(true));
        synced.is_some_and(|synced| self.noted("sync", synced).is_some())
    }

    /// Closes and opens the database again if it has failed since it was opened, at most once in ten
    /// seconds; what does not open is begun anew. This takes long enough to belong on a thread that
    /// serves nobody; gets and writes wait meanwhile.
    pub fn reopen_if_failing(&self) {
        if !self.failing.load(Ordering::Relaxed) {
            return;
        }
        {
            let mut reopen_at = self.reopen_at.lock().unwrap_or_else(PoisonError::into_inner);
            if Instant::now() < *reopen_at {
                return;
            }
            *reopen_at = Instant::now() + self.reopen_delay;
        }
        let mut db = self.db.write().unwrap_or_else(PoisonError::into_inner);
        // The old handle holds the lock of the directory until it is dropped.
        *db = None;
        *db = open_or_begin_anew(&self.dir);
        if db.is_some() {
            self.failing.store(false, Ordering::Relaxed);
            info!("local database {} works again", self.dir.display());
        }
    }

    /// Runs `operation` if there is a database.
    fn with<T>(
        &self,
        family: Family,
        operation: impl FnOnce(&DB, &ColumnFamily) -> Result<T, rocksdb::Error>,
    ) -> Option<Result<T, rocksdb::Error>> {
        let db = self.db.read().unwrap_or_else(PoisonError::into_inner);
        let db = db.as_ref()?;
        let family = db.cf_handle(family.name()).expect("opened with every family");
        Some(operation(db, family))
    }

    /// Turns an error into `None`, and into one line of the log.
    fn noted<T>(&self, what: &str, result: Result<T, rocksdb::Error>) -> Option<T> {
        result
            .inspect_err(|error| {
                if !self.failing.swap(true, Ordering::Relaxed) {
                    warn!(
                        "local database {}: {what}: {error}; caches are colder until it works again",
                        self.dir.display()
                    );
                }
            })
            .ok()
    }
}

impl std::fmt::Debug for LocalDb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalDb({})", self.dir.display())
    }
}

fn open_or_begin_anew(dir: &Path) -> Option<DB> {
    let error = match open_existing(dir) {
        Ok(db) => return Some(db),
        Err(error) => error,
    };
    let place = dir.display();
    if is_passing(&error) {
        warn!("local database {place} is not used for now: {}", error.report());
        return None;
    }
    warn!("local database {place} begins anew, caches are cold: {}", error.report());
    let removed = if dir.is_dir() {
        std::fs::remove_dir_all(dir)
    } else if dir.exists() {
        std::fs::remove_file(dir)
    } else {
        Ok(())
    };
    let begun = removed
        .map_err(|error| Error::new(Kind::Failed, "remove it").with_source(error))
        .and_then(|()| open_existing(dir));
    begun.inspect_err(|error| warn!("local database {place} is not used: {}", error.report())).ok()
}

/// Opens a database of this version, or creates one where there is none.
fn open_existing(dir: &Path) -> Result<DB> {
    std::fs::create_dir_all(dir)
        .map_err(|error| Error::new(Kind::Failed, "create directory").with_source(error))?;
    let failed = |error| Error::new(Kind::Failed, "open").with_source(error);
    let cache = Cache::new_lru_cache(MEMORY_BYTES);
    let families =
        Family::ALL.map(|family| ColumnFamilyDescriptor::new(family.name(), table_options(&cache)));
    let db = DB::open_cf_descriptors(&options(&cache), dir, families).map_err(failed)?;
    match db.get_pinned(VERSION_KEY).map_err(failed)? {
        Some(version) if &*version == VERSION => {}
        Some(version) => {
            let version = String::from_utf8_lossy(&version).escape_debug().to_string();
            return Err(Error::new(Kind::Failed, format!("it is of version {version}")));
        }
        None => db.put(VERSION_KEY, VERSION).map_err(failed)?,
    }
    Ok(db)
}

/// Whether the database may be whole and only cannot be opened now. RocksDB gives the cause as text.
fn is_passing(error: &Error) -> bool {
    let report = error.report();
    ["No space left", "Too many open files", "/LOCK: "].iter().any(|cause| report.contains(cause))
}

fn options(cache: &Cache) -> Options {
    let mut options = table_options(cache);
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_write_buffer_manager(&WriteBufferManager::new_write_buffer_manager_with_cache(
        MEMTABLE_BYTES,
        false,
        cache.clone(),
    ));
    options.set_max_total_wal_size(2 * u64::try_from(MEMTABLE_BYTES).expect("a small constant"));
    options.set_max_background_jobs(2);
    options.set_max_open_files(OPEN_FILES);
    options.set_max_file_opening_threads(1);
    options.set_max_manifest_file_size(4 << 20);
    options.set_skip_stats_update_on_db_open(true);
    // Its own log: errors only, in two small files.
    options.set_log_level(LogLevel::Error);
    options.set_keep_log_file_num(2);
    options.set_max_log_file_size(1 << 20);
    options.set_stats_dump_period_sec(0);
    options
}

fn table_options(cache: &Cache) -> Options {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(cache);
    table.set_cache_index_and_filter_blocks(true);
    table.set_bloom_filter(10.0, false);
    let mut options = Options::default();
    options.set_block_based_table_factory(&table);
    options.set_write_buffer_size(MEMTABLE_BYTES / 2);
    options.set_target_file_size_base(8 << 20);
    options.set_max_bytes_for_level_base(32 << 20);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(db: &LocalDb, key: &[u8], value: &[u8]) -> bool {
        let mut batch = Batch::new(Family::Cache);
        batch.put(key, value);
        db.write(batch)
    }

    fn rows(db: &LocalDb, keys: Range<&[u8]>) -> Vec<Vec<u8>> {
        let mut rows = Vec::new();
        assert!(db.scan(Family::Cache, keys, |key, _| {
            rows.push(key.to_vec());
            ControlFlow::Continue(())
        }));
        rows
    }

    #[test]
    fn a_batch_is_there_after_a_restart_and_only_in_its_family() {
        let dir = tempfile::tempdir().unwrap();
        let db = LocalDb::open(dir.path());
        for key in [b"a", b"b", b"c", b"d"] {
            assert!(put(&db, key, b"1"));
        }
        let mut batch = Batch::new(Family::Cache);
        batch.delete(b"a");
        batch.delete_range(b"b".to_vec()..b"d".to_vec());
        batch.put(b"e", b"2");
        assert!(db.write(batch) && db.sync());
        drop(db);
        let db = LocalDb::open(dir.path());
        assert_eq!(rows(&db, b"a"..b"z"), [b"d", b"e"]);
        assert_eq!(rows(&db, b"d"..b"e"), [b"d"]);
        assert_eq!(db.get(Family::Cache, b"e").unwrap(), b"2");
        assert_eq!(db.get(Family::Pages, b"e"), None);
    }

    #[test]
    fn a_database_of_another_version_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let db = LocalDb::open(dir.path());
        assert!(put(&db, b"a", b"1"));
        let locked = db.db.read().unwrap();
        locked.as_ref().unwrap().put(VERSION_KEY, b"2").unwrap();
        drop(locked);
        drop(db);
        let db = LocalDb::open(dir.path());
        assert_eq!(db.get(Family::Cache, b"a"), None);
        assert!(put(&db, b"a", b"1"));
    }

    #[test]
    fn a_second_opening_neither_works_nor_harms_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = LocalDb::open(dir.path());
        assert!(put(&first, b"a", b"1"));
        let second = LocalDb::open(dir.path());
        assert!(!put(&second, b"b", b"2"));
        assert_eq!(second.get(Family::Cache, b"a"), None);
        drop((first, second));
        assert_eq!(LocalDb::open(dir.path()).get(Family::Cache, b"a").unwrap(), b"1");
    }

    #[test]
    fn deleted_under_load_it_fails_softly_and_comes_back_empty() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("db");
        let db = LocalDb::open_with(&dir, Duration::ZERO);
        let value = vec![7; 64 << 10];
        let mut numbers = 0_u32..10_000;
        let mut put_next = || put(&db, &numbers.next().unwrap().to_be_bytes(), &value);
        for _ in 0..200 {
            put_next();
        }
        // It may add a file while they are being deleted.
        while std::fs::remove_dir_all(&dir).is_err() {}
        // Until it wants a new file.
        while !db.failing.load(Ordering::Relaxed) {
            put_next();
            db.get(Family::Cache, &1_u32.to_be_bytes());
        }
        db.reopen_if_failing();
        assert!(dir.exists());
        assert!(put(&db, b"a", b"1"));
        assert_eq!(db.get(Family::Cache, b"a").unwrap(), b"1");
        assert_eq!(db.get(Family::Cache, &1_u32.to_be_bytes()), None);
    }

    #[test]
    fn its_own_logs_stay_few() {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..6 {
            drop(LocalDb::open(dir.path()));
        }
        let logs = std::fs::read_dir(dir.path())
            .unwrap()
            .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().starts_with("LOG"))
            .count();
        assert!(logs <= 3, "{logs} log files");
    }
}
