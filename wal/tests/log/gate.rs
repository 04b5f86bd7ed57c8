//! Threads against a device that does what a test tells it: stand still in a sync, or panic.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use wal::sim::{SimClock, SimRandom, SimStorage};
use wal::storage::{Durability, LogFile, Storage};
use wal::{ErrorKind, LogConfig, LogDir, Seams, SyncMethod};

use crate::support::{block_on, small, start, sync, write};

/// What the device is told, and what it says.
#[derive(Debug, Default)]
struct Orders {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    hold_syncs: bool,
    syncs_held: u32,
    panic_at_write: bool,
}

impl Orders {
    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn wait(&self, until: impl Fn(&State) -> bool) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| !until(state)).unwrap());
    }
}

#[derive(Debug)]
struct Gate {
    inner: SimStorage,
    orders: Arc<Orders>,
}

#[derive(Debug)]
struct GateFile {
    inner: Box<dyn LogFile>,
    orders: Arc<Orders>,
    /// Whether it holds more than a header: only the log's own syncs are held, not the pool's.
    used: AtomicBool,
}

impl LogFile for GateFile {
    fn write_at(&self, parts: &[&[u8]], offset: u64, durability: Durability) -> io::Result<()> {
        let panics = self.orders.state.lock().unwrap().panic_at_write && offset > 0;
        assert!(!panics, "told to panic at a write");
        self.used.fetch_or(offset > 0 || parts.len() > 1, Ordering::Relaxed);
        self.inner.write_at(parts, offset, durability)
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(out, offset)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.orders.state.lock().unwrap();
        if state.hold_syncs && self.used.load(Ordering::Relaxed) {
            state.syncs_held += 1;
            self.orders.changed.notify_all();
            drop(self.orders.changed.wait_while(state, |state| state.hold_syncs).unwrap());
        }
        self.inner.sync()
    }

    fn bytes(&self) -> io::Result<u64> {
        self.inner.bytes()
    }
}

impl Gate {
    fn file(&self, inner: Box<dyn LogFile>) -> Box<dyn LogFile> {
        let orders = Arc::clone(&self.orders);
        Box::new(GateFile { inner, orders, used: AtomicBool::new(false) })
    }
}

impl Storage for Gate {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        self.inner.list(folder)
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>> {
        Ok(self.file(self.inner.create(name, bytes)?))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        Ok(self.file(self.inner.open(name)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn create_folder(&self, folder: &str) -> io::Result<()> {
        self.inner.create_folder(folder)
    }

    fn sync_folder(&self, folder: &str) -> io::Result<()> {
        self.inner.sync_folder(folder)
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn is_buffered(&self) -> bool {
        false
    }
}

fn open(orders: &Arc<Orders>) -> Arc<LogDir> {
    let mut config: LogConfig = small("/simulated".as_ref());
    config.writer_threads = 2;
    config.segments_ready = 2;
    config.bytes_max = 2 << 20;
    config.sync = SyncMethod::Fdatasync;
    let random = Mutex::new(SimRandom::new(1));
    let seams = Seams {
        storage: Arc::new(Gate { inner: SimStorage::new(1), orders: Arc::clone(orders) }),
        clock: Arc::new(SimClock::default()),
        random: Arc::new(move || random.lock().unwrap().draw()),
        ring: None,
    };
    LogDir::open_with(config, seams).unwrap()
}

// X07. Fails when flushes that wait for the same sync each get one of their own.
#[test]
fn flushes_that_arrive_during_a_sync_share_the_next_one() {
    let orders = Arc::new(Orders::default());
    let dir = open(&orders);
    let (log, _) = start(&dir, 1, 0);
    let first = write(&log, 0, 0, 1);
    sync(&log, first);
    let before = dir.counters().syncs;
    orders.set(|state| state.hold_syncs = true);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let local = tokio::task::LocalSet::new();
        let flush = |lsn| {
            let log = log.clone();
            local.spawn_local(async move { log.wait_synced(lsn).await.unwrap() })
        };
        let mut flushes = vec![flush(write(&log, 0, 0, 1))];
        // Runs every task as far as it gets: all of them wait when this is done.
        local.run_until(tokio::task::yield_now()).await;
        orders.wait(|state| state.syncs_held == 1);
        flushes.extend((0..32).map(|i| flush(write(&log, i, i, 1))));
        for _ in 0..100 {
            local.run_until(tokio::task::yield_now()).await;
        }
        orders.set(|state| state.hold_syncs = false);
        local
            .run_until(async {
                for flush in flushes {
                    flush.await.unwrap();
                }
            })
            .await;
    });
    assert_eq!(dir.counters().syncs - before, 2);
}

// K13. Fails when a panic of a thread leaves somebody waiting, or stops another owner's log.
#[test]
fn a_panic_stops_the_log_it_happened_in_and_no_other() {
    let orders = Arc::new(Orders::default());
    let dir = open(&orders);
    let (victim, _) = start(&dir, 1, 0);
    let (other, _) = start(&dir, 2, 0);
    for log in [&victim, &other] {
        let lsn = write(log, 0, 0, 1);
        sync(log, lsn);
    }
    orders.set(|state| state.panic_at_write = true);
    for _ in 0..3 {
        let lsn = victim.positions().appended;
        if let Ok(appended) = victim.append(wal::Record::Write { first_block: 0, data: &[0; 4096] })
        {
            assert_eq!(appended.lsn, lsn.next());
        }
        let error = block_on(victim.wait_synced(lsn.next())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
    }
    orders.set(|state| state.panic_at_write = false);
    let lsn = write(&other, 0, 0, 1);
    sync(&other, lsn);
}
