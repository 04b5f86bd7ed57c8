//! What a running log does under pressure, at rest, and when the device fails.

use std::sync::Arc;
use std::time::Duration;

use wal::sim::{Fault, SimClock, SimStorage};
use wal::{
    ErrorKind, Inline, Log, LogConfig, LogDir, Lsn, Record, Recovery, Seams, Start, SyncMethod,
    ZeroKind,
};

use crate::support::{block_on, blocks, data, owner, small, start, sync, write};

struct Sim {
    storage: SimStorage,
    clock: Arc<SimClock>,
    boots: u64,
    config: LogConfig,
}

impl Sim {
    fn new() -> Self {
        let mut config = small("/simulated".as_ref());
        config.writer_threads = 0;
        config.idle_mark = Duration::from_millis(500);
        Self { storage: SimStorage::new(1), clock: Arc::default(), boots: 0, config }
    }

    fn open(&mut self) -> Arc<LogDir> {
        self.boots += 1;
        let nonce = self.boots;
        let seams = Seams {
            storage: Arc::new(self.storage.clone()),
            clock: self.clock.clone(),
            random: Arc::new(move || nonce),
            ring: None,
        };
        LogDir::open_with(self.config.clone(), seams).unwrap()
    }

    fn settle(&self, dir: &LogDir) {
        self.clock.advance(Duration::from_secs(1));
        while dir.step() {}
        self.clock.advance(Duration::from_secs(1));
        while dir.step() {}
    }
}

fn recover(dir: &LogDir) -> wal::Result<(Log, Recovery)> {
    dir.start(Start { owner: owner(1), epoch: 1, floor: Lsn::ZERO })
}

fn write_synced(log: &Log, seed: u64) -> Lsn {
    let lsn = write(log, seed, seed, 1);
    assert_eq!(log.sync_inline(lsn).unwrap(), Inline::Done);
    lsn
}

// Fails when the last flush before a pause leaves no mark, or an idle log keeps writing.
#[test]
fn an_idle_log_marks_its_last_sync_once() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    write_synced(&log, 1);
    write_synced(&log, 2);
    let before = sim.storage.writes();
    sim.settle(&dir);
    let marked = sim.storage.writes();
    assert!(marked > before);
    sim.settle(&dir);
    assert!(!dir.step());
    assert_eq!(sim.storage.writes(), marked, "an idle, marked log writes nothing");
    drop((log, dir));

    // The mark is what tells damage to the last flushed record from a torn end.
    let segment = sim.segment();
    sim.storage.flip(&segment, 8 * (4096 * 4 + 17));
    let error = recover(&sim.open()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().contains("offset 16384"), "{error}");
}

impl Sim {
    fn segment(&self) -> String {
        use wal::storage::Storage;
        let names = self.storage.list("").unwrap();
        let is_held = |name: &&String| {
            let mut block = vec![0; 4096];
            name.ends_with(".seg")
                && self.storage.open(name).unwrap().read_at(&mut block, 0).unwrap() > 0
                && block[56] > 0
        };
        names.iter().find(is_held).unwrap().clone()
    }
}

// Fails when a log that was released keeps its segments, or a restart finds them.
#[test]
fn an_empty_idle_log_has_no_segment() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    let last = write_synced(&log, 1);
    assert!(log.positions().bytes_used > 0);
    log.release(last);
    sim.settle(&dir);
    assert_eq!(log.positions().bytes_used, 0);
    let next = write_synced(&log, 2);
    assert_eq!(next, last.next());
    log.release(next);
    sim.settle(&dir);
    drop((log, dir));
    sim.storage.cut_power();
    assert_eq!(sim.open().owners(), []);
}

// W09. Fails when anything is acknowledged after a failed sync, or the sync is tried again.
#[test]
fn after_a_failed_sync_nothing_is_acknowledged_until_a_restart() {
    for fault in [Fault::Sync, Fault::Write] {
        let mut sim = Sim::new();
        sim.config.sync = SyncMethod::Fdatasync;
        let dir = sim.open();
        let (log, _) = recover(&dir).unwrap();
        write_synced(&log, 1);
        let lost = write(&log, 2, 2, 1);
        sim.storage.fail(fault, 0);
        assert_eq!(log.sync_inline(lost).unwrap_err().kind(), ErrorKind::Poisoned);
        let poisoned = |result: wal::Result<()>| result.unwrap_err().kind() == ErrorKind::Poisoned;
        assert!(poisoned(log.sync_inline(lost).map(drop)));
        assert!(poisoned(log.sync_inline(Lsn::FIRST).map(drop)));
        assert!(poisoned(block_on(log.wait_synced(Lsn::FIRST))));
        assert!(poisoned(block_on(log.wait_acknowledged(lost))));
        let record = Record::Zero { first_block: 0, count: 1, kind: ZeroKind::Zeroes };
        assert!(poisoned(log.append(record).map(drop)));
        block_on(log.room());
        assert!(poisoned(log.close()));
        assert_eq!(recover(&dir).unwrap_err().kind(), ErrorKind::Poisoned);
        drop(dir);
        sim.storage.revive();
        let (_, recovery) = recover(&sim.open()).unwrap();
        assert!(!recovery.records.is_empty());
    }
}

// W10. Fails when a full file system stops the log for good, or loses what was appended.
#[test]
fn a_full_file_system_is_back_pressure() {
    let mut sim = Sim::new();
    sim.config.segments_ready = 1;
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    while dir.step() {}
    for _ in 0..100 {
        sim.storage.fail(Fault::Create, 0);
    }
    let mut last = Lsn::ZERO;
    let full = loop {
        match log.append(Record::Write { first_block: 0, data: &blocks(last.get(), 64) }) {
            Ok(appended) => last = appended.lsn,
            Err(error) => break error,
        }
        // Everything appended can be synced, however full the log is.
        assert_eq!(log.sync_inline(last).unwrap(), Inline::Done);
    };
    assert_eq!(full.kind(), ErrorKind::Full);
    for _ in 0..10 {
        dir.step();
    }
    assert!(!dir.step(), "no room, and no spinning about it");
    sim.storage.revive();
    while dir.step() {}
    block_on(log.room());
    let next = write_synced(&log, 99);
    assert_eq!(next, last.next());
}

// Fails when the limit of the directory is passed, or release does not lift it.
#[test]
fn a_full_log_takes_nothing_until_something_is_released() {
    let mut sim = Sim::new();
    sim.config.bytes_max = 4 << 20;
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    let mut appended = 0;
    let full = loop {
        while dir.step() {}
        match log.append(Record::Write { first_block: appended, data: &blocks(appended, 64) }) {
            Ok(_) => appended += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::Full);
    // Three whole frames fit a segment of 1 MiB.
    assert_eq!(appended, 12);
    sync(&log, Lsn::new(appended));
    let positions = log.positions();
    assert_eq!((positions.bytes_used, positions.bytes_free), (4 << 20, 0));
    log.release(Lsn::new(3));
    block_on(log.room());
    assert_eq!(write(&log, 0, 0, 64), Lsn::new(13));
}

// W17. Fails when a place that is still held is overwritten by a recycled segment.
#[test]
fn places_stay_readable_while_segments_are_recycled() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = small(dir.path());
    config.bytes_max = 4 << 20;
    let logs = LogDir::open(config).unwrap();
    let (log, _) = start(&logs, 1, 0);
    let mut held = Vec::new();
    let mut last = Lsn::ZERO;
    for i in 0..2000_u64 {
        let bytes = blocks(i, 1 + (i as usize * 7) % 64);
        let appended = loop {
            match log.append(Record::Write { first_block: i, data: &bytes }) {
                Ok(appended) => break appended,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Full);
                    sync(&log, last);
                    log.release(last);
                    block_on(log.room());
                }
            }
        };
        last = appended.lsn;
        if i % 400 == 0 {
            held.clear();
        }
        if i % 400 < 3 {
            held.push((bytes, appended.place.unwrap()));
        }
        if i % 50 == 0 {
            for (bytes, place) in &held {
                let mut out = vec![0; bytes.len()];
                place.read_blocking(0, place.blocks(), &mut out).unwrap();
                assert!(&out == bytes);
            }
        }
    }
    assert!(log.positions().bytes_used <= 4 << 20);
}

// Fails when a part of a place gives other blocks than its own.
#[test]
fn a_part_of_a_place_is_read_and_checked_like_the_whole() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    write(&log, 0, 9, 3);
    let bytes = blocks(1, 10);
    let mut place =
        log.append(Record::Write { first_block: 0, data: &bytes }).unwrap().place.unwrap();
    let crcs: Vec<u32> = bytes.chunks(4096).map(crc32fast::hash).collect();
    assert_eq!(place.crcs(), crcs);
    place.advance(2);
    place.truncate(5);
    assert_eq!(place.crcs(), &crcs[2..7]);
    let mut out = vec![0; 3 * 4096];
    assert!(place.read_memory(1, 3, &mut out).unwrap());
    assert_eq!(out, bytes[3 * 4096..6 * 4096]);
    let mut all = wal::BlockBuf::new(64);
    let frame = place.frame().read_all_blocking(&mut all).unwrap();
    let at = place.frame_block() as usize * 4096;
    assert_eq!(frame[at..at + 5 * 4096], bytes[2 * 4096..7 * 4096]);
    sync(&log, Lsn::new(2));
    drop((log, dir));

    let (_log, recovery) = recover(&sim.open()).unwrap();
    assert_eq!(data(&recovery.records[1]), bytes);
    let place = recovery.records[1].place.as_ref().unwrap();
    assert!(!place.read_memory(0, 10, &mut vec![0; 10 * 4096]).unwrap());
    let segment = sim.segment();
    sim.storage.flip(&segment, 8 * 4096 * (1 + 1 + 3 + 4));
    let mut out = vec![0; 10 * 4096];
    let error = place.read_blocking(0, 10, &mut out).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().contains(&format!("offset {}", 4096 * 9)), "{error}");
}

// W17. Fails when a record that can never fit is not refused at once.
#[test]
fn what_can_never_fit_is_refused() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    let long = vec![0; 65 * 4096];
    for record in [
        Record::Write { first_block: 0, data: &long },
        Record::Write { first_block: 0, data: &[] },
        Record::Write { first_block: 0, data: &long[..100] },
        Record::Write { first_block: u64::MAX, data: &long[..8192] },
        Record::Zero { first_block: 0, count: 0, kind: ZeroKind::Discard },
        Record::Zero { first_block: 2, count: u64::MAX - 1, kind: ZeroKind::Discard },
        Record::Barrier { payload: &long[..4097] },
    ] {
        assert_eq!(log.append(record).unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(log.positions().appended, Lsn::ZERO);
    assert_eq!(block_on(log.wait_synced(Lsn::FIRST)).unwrap_err().kind(), ErrorKind::Invalid);
}

// Fails when a closed log loses something, takes more, or cannot be started again.
#[test]
fn a_closed_log_has_everything_and_can_be_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::open(small(dir.path())).unwrap();
    let (log, _) = start(&logs, 1, 0);
    for i in 0..10 {
        write(&log, i, i, 3);
    }
    let other = log.clone();
    log.close().unwrap();
    block_on(other.wait_synced(Lsn::new(10))).unwrap();
    let record = Record::Barrier { payload: b"" };
    assert_eq!(other.append(record).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(logs.owners(), [owner(1)]);
    let (_log, records) = start(&logs, 1, 4);
    assert_eq!(records.len(), 6);
    assert_eq!(records[0].lsn, Lsn::new(5));
}

// W22, K15. Fails when two processes can have a folder, or the second is not told who has it.
#[test]
fn a_second_opener_is_told_who_has_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::open(small(dir.path())).unwrap();
    let error = LogDir::open(small(dir.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    drop(logs);
    LogDir::open(small(dir.path())).unwrap();
}

// W02. Fails when a file system without direct I/O is used without saying so.
#[test]
fn a_file_system_without_direct_io_is_refused_by_name() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm");
        return;
    };
    let mut config = small(dir.path());
    config.allow_buffered = false;
    let error = LogDir::open(config.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("tmpfs"), "{error}");
    assert!(error.to_string().contains("allow_buffered"), "{error}");
    config.allow_buffered = true;
    let logs = LogDir::open(config).unwrap();
    assert!(logs.is_buffered());
    let (log, _) = start(&logs, 1, 0);
    let lsn = write(&log, 1, 1, 1);
    sync(&log, lsn);
}

// K15. Fails when a configuration that cannot work is found out later than at open.
#[test]
fn a_configuration_that_cannot_work_is_refused() {
    let check = |change: &dyn Fn(&mut LogConfig)| {
        let mut config = small("/simulated".as_ref());
        change(&mut config);
        assert_eq!(LogDir::open(config).unwrap_err().kind(), ErrorKind::Invalid);
    };
    check(&|config| config.segment_bytes = 1000);
    check(&|config| config.segment_bytes = 64 * 4096);
    check(&|config| config.bytes_max = config.segment_bytes);
    check(&|config| config.staging.bytes = 65 * 4096);
    let missing = LogDir::open(small("/nonexistent/deep".as_ref())).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Io);
    assert!(missing.to_string().contains("/nonexistent/deep"), "{missing}");
}

// Fails when a log that was dropped, not closed, cannot be started again, or lost something.
#[test]
fn a_dropped_log_can_be_started_again() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let mut last = Lsn::ZERO;
    for round in 0..4 {
        let (log, recovery) = recover(&dir).unwrap();
        assert_eq!(recovery.end, last);
        for (i, record) in (1..).zip(&recovery.records) {
            assert_eq!(data(record), blocks(i, 5));
        }
        assert_eq!(recover(&dir).unwrap_err().kind(), ErrorKind::Busy);
        for _ in 0..40 {
            last = write(&log, 0, last.get() + 1, 5);
        }
        if round % 2 == 0 {
            sync(&log, last.previous());
            last = write(&log, 0, last.get() + 1, 5);
        }
        drop(log);
        // Blocks that are still held would be read from files that are replaced.
        let held = recovery.records.front().map(|record| record.place.clone());
        drop(recovery);
        if held.is_some() {
            assert_eq!(recover(&dir).unwrap_err().kind(), ErrorKind::Busy);
        }
        while dir.step() {}
    }
}

// W10. Fails when a file system that is full at the start keeps an owner down after it has room.
#[test]
fn a_start_without_room_can_be_tried_again() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    let last = write_synced(&log, 1);
    drop((log, dir));
    let dir = sim.open();
    sim.storage.fail(Fault::Create, 0);
    assert_eq!(recover(&dir).unwrap_err().kind(), ErrorKind::Io);
    let (log, recovery) = recover(&dir).unwrap();
    assert_eq!(recovery.end, last);
    assert_eq!(write_synced(&log, 2), last.next());
}

// Fails when blocks that somebody still refers to keep their staging slots from being used again, or
// are read from a slot that has been.
#[test]
fn places_move_from_memory_to_the_file() {
    let mut sim = Sim::new();
    sim.config.bytes_max = 64 << 20;
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    let mut places = Vec::new();
    for i in 0..60 {
        while dir.step() {}
        let bytes = blocks(i, 64);
        let appended = log.append(Record::Write { first_block: i, data: &bytes }).unwrap();
        places.push((bytes, appended.place.unwrap()));
    }
    let in_memory = places.iter().filter(|(_, place)| place.is_in_memory()).count();
    assert!((1..=15).contains(&in_memory), "{in_memory} of 15 slots");
    for (bytes, place) in &places {
        let mut out = vec![0; bytes.len()];
        place.read_blocking(0, 64, &mut out).unwrap();
        assert!(&out == bytes);
    }
}

// Fails when an empty log gives its newest segment back while an older one is still read: after a
// crash it would seem to end below what the store has.
#[test]
fn segments_are_given_back_in_their_order() {
    let mut sim = Sim::new();
    let dir = sim.open();
    let (log, _) = recover(&dir).unwrap();
    while dir.step() {}
    let first = Record::Write { first_block: 0, data: &blocks(0, 64) };
    let held = log.append(first).unwrap().place;
    let mut last = Lsn::ZERO;
    for i in 0..6 {
        last = write(&log, i, i, 64);
    }
    assert_eq!(log.sync_inline(last).unwrap(), Inline::Done);
    log.release(last);
    sim.settle(&dir);
    assert!(log.positions().bytes_used > 0);
    let reopen = |sim: &mut Sim| {
        let start = Start { owner: owner(1), epoch: 1, floor: last };
        sim.open().start(start).map(|(_, recovery)| recovery.records.len())
    };
    assert_eq!(reopen(&mut sim).unwrap(), 0);
    drop(held);
    sim.settle(&dir);
    assert_eq!(log.positions().bytes_used, 0);
    assert_eq!(reopen(&mut sim).unwrap(), 0);
}
