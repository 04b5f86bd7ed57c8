//! Many threads at once on real files: what one of them sees is never another's unfinished work.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use wal::sim::SimRandom;
use wal::{ErrorKind, Inline, Log, LogDir, Lsn, Place, Record};

use crate::support::{block_on, blocks, data, owner, small, start};

const THREADS: u64 = 4;
const OPERATIONS: u64 = 1500;

/// What the threads of one owner share.
struct Shared {
    log: Log,
    /// What each live record holds, and where it is said to be.
    live: Mutex<BTreeMap<Lsn, (u64, Place)>>,
    released: AtomicU64,
}

impl Shared {
    fn work(&self, seed: u64) {
        let mut random = SimRandom::new(seed);
        for _ in 0..OPERATIONS {
            let content = random.draw();
            let bytes = blocks(content, 1 + random.below(12) as usize);
            let lsn = {
                // As a disk does: LSN order and index order are the same.
                let mut live = self.live.lock().unwrap();
                match self.log.append(Record::Write { first_block: content, data: &bytes }) {
                    Ok(appended) => {
                        live.insert(appended.lsn, (content, appended.place.unwrap()));
                        Some(appended.lsn)
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Full);
                        None
                    }
                }
            };
            match (lsn, random.below(8)) {
                (None, _) => {
                    self.release(self.log.positions().synced);
                    block_on(self.log.wait_synced(self.log.positions().appended)).unwrap();
                    self.release(self.log.positions().synced);
                    block_on(self.log.room());
                }
                (Some(lsn), 0) => {
                    if self.log.sync_inline(lsn).unwrap() == Inline::Busy {
                        block_on(self.log.wait_synced(lsn)).unwrap();
                    }
                    assert!(self.log.positions().synced >= lsn);
                }
                (Some(lsn), 1) => {
                    block_on(self.log.wait_acknowledged(lsn)).unwrap();
                    assert!(self.log.positions().acknowledged >= lsn);
                }
                (Some(lsn), 2) => self.release(Lsn::new(lsn.get().saturating_sub(100))),
                (Some(_), 3 | 4) => self.read(&mut random),
                _ => {}
            }
        }
    }

    /// Reads a random live record, which may be in memory, on its way, or in a file.
    fn read(&self, random: &mut SimRandom) {
        let found = {
            let live = self.live.lock().unwrap();
            let nth = random.below(live.len().max(1) as u64) as usize;
            live.values().nth(nth).cloned()
        };
        // Another thread may just have released all of them.
        let Some((content, place)) = found else { return };
        let mut out = vec![0; place.blocks() as usize * 4096];
        place.read_blocking(0, place.blocks(), &mut out).unwrap();
        assert!(out == blocks(content, place.blocks() as usize));
    }

    fn release(&self, up_to: Lsn) {
        let mut live = self.live.lock().unwrap();
        let up_to = up_to.min(self.log.positions().synced);
        if up_to.get() > self.released.fetch_max(up_to.get(), Ordering::SeqCst) {
            self.log.release(up_to);
            let kept = live.split_off(&up_to.next());
            *live = kept;
        }
    }
}

// Fails when a race loses a record, mixes two, or leaves a thread waiting.
#[test]
fn threads_that_write_sync_read_and_release_at_once_get_what_they_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = small(dir.path());
    config.writer_threads = 2;
    config.bytes_max = 8 << 20;
    let logs = LogDir::open(config.clone()).unwrap();
    let owners: Vec<Shared> = (1..=2)
        .map(|number| Shared {
            log: start(&logs, number, 0).0,
            live: Mutex::default(),
            released: AtomicU64::new(0),
        })
        .collect();
    thread::scope(|scope| {
        for (number, owner) in (0..).zip(&owners) {
            for thread in 0..THREADS {
                scope.spawn(move || owner.work(number * 100 + thread));
            }
        }
    });
    let expected: Vec<(u64, BTreeMap<Lsn, u64>)> = owners
        .into_iter()
        .map(|shared| {
            shared.log.close().unwrap();
            let live = shared.live.into_inner().unwrap().into_iter();
            let live = live.map(|(lsn, (content, _))| (lsn, content)).collect();
            (shared.released.into_inner(), live)
        })
        .collect();
    drop(logs);
    let logs = LogDir::open(config).unwrap();
    for (number, (floor, live)) in (1..).zip(expected) {
        let (_log, records) = start(&logs, number, floor);
        assert_eq!(records.len(), live.len(), "{}", owner(number));
        for (record, (lsn, content)) in records.iter().zip(live) {
            assert_eq!((record.lsn, record.first_block), (lsn, content));
            assert_eq!(data(record), blocks(content, record.count as usize));
        }
    }
}

// Fails when somebody who waits is forgotten when the directory goes away.
#[test]
fn who_waits_when_the_directory_goes_away_does_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::open(small(dir.path())).unwrap();
    let (log, _) = start(&logs, 1, 0);
    let lsn = crate::support::write(&log, 0, 0, 1);
    drop(logs);
    block_on(log.wait_synced(lsn)).unwrap();
    assert_eq!(log.positions().synced, lsn);
    log.close().unwrap();
}
