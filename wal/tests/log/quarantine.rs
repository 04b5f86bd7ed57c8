//! Logs set aside: complete, readable, never replayed.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use wal::sim::{Fault, SimClock, SimRing, SimStorage};
use wal::{ErrorKind, Inline, LogDir, Lsn, Seams};

use crate::support::{blocks, data, owner, small, start, write};

// Fails when a log set aside is replayed, loses something, or takes others with it.
#[test]
fn a_log_set_aside_is_kept_and_never_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::open(small(dir.path())).unwrap();
    let (log, _) = start(&logs, 1, 0);
    let (other, _) = start(&logs, 2, 0);
    for i in 0..60 {
        write(&log, i, i, 20);
    }
    let kept_lsn = write(&other, 1, 1, 1);
    assert_eq!(logs.quarantine(owner(3)).unwrap(), None);
    let first = logs.quarantine(owner(1)).unwrap().unwrap();
    assert!(first.starts_with(dir.path().join("quarantine")));
    crate::support::sync(&other, kept_lsn);
    drop(log);

    let (log, records) = start(&logs, 1, 0);
    assert!(records.is_empty());
    write(&log, 9, 9, 1);
    let second = logs.quarantine(owner(1)).unwrap().unwrap();
    assert_ne!(first, second);
    drop((log, other, logs));

    let logs = LogDir::open(small(dir.path())).unwrap();
    assert_eq!(logs.owners(), [owner(2)]);
    let kept = logs.read_quarantined(&first, Lsn::new(10)).unwrap();
    assert_eq!((kept.owner, kept.epoch), (owner(1), 1));
    assert!(kept.damage.is_none());
    assert_eq!(kept.recovery.records.len(), 50);
    for (i, record) in (10..).zip(&kept.recovery.records) {
        assert_eq!(data(record), blocks(i, 20));
    }
    let kept = logs.read_quarantined(&second, Lsn::ZERO).unwrap();
    assert_eq!(data(&kept.recovery.records[0]), blocks(9, 1));
    assert_eq!(
        logs.read_quarantined(dir.path(), Lsn::ZERO).unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

// Fails when a damaged log cannot be set aside, or what precedes the damage cannot be read.
#[test]
fn a_damaged_log_is_readable_up_to_the_damage() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = small(dir.path());
    config.writer_threads = 0;
    {
        let logs = LogDir::open(config.clone()).unwrap();
        let (log, _) = start(&logs, 1, 0);
        for i in 0..9 {
            let lsn = write(&log, i, i, 1);
            assert_eq!(log.sync_inline(lsn).unwrap(), Inline::Done);
        }
    }
    let logs = LogDir::open(config).unwrap();
    let segment = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let segment = segment.filter(|path| path.extension().is_some_and(|suffix| suffix == "seg"));
    let held = segment.max_by_key(|path| std::fs::read(path).unwrap()[56]).unwrap();
    // The fifth frame: a header and a block each.
    let file = OpenOptions::new().write(true).open(held).unwrap();
    file.write_all_at(&[0; 4096], 4096 * (1 + 2 * 4)).unwrap();
    let damaged = logs.start(wal::Start { owner: owner(1), epoch: 1, floor: Lsn::ZERO });
    assert_eq!(damaged.unwrap_err().kind(), ErrorKind::Damaged);
    let folder = logs.quarantine(owner(1)).unwrap().unwrap();
    let kept = logs.read_quarantined(&folder, Lsn::ZERO).unwrap();
    assert_eq!(kept.recovery.records.len(), 4);
    assert_eq!(kept.damage.unwrap().kind(), ErrorKind::Damaged);
}

// Fails when a log that the device refused loses what only the ring has, or the ring replays it.
#[test]
fn a_failed_log_is_set_aside_with_its_staged_records() {
    let storage = SimStorage::new(3);
    let ring = SimRing::new(12).unwrap();
    let mut nonce = 0;
    let mut open = || {
        nonce += 1;
        let seams = Seams {
            storage: Arc::new(storage.clone()),
            clock: Arc::new(SimClock::default()),
            random: Arc::new(move || nonce),
            ring: Some(ring.clone()),
        };
        let mut config = small("/simulated".as_ref());
        config.writer_threads = 0;
        LogDir::open_with(config, seams).unwrap()
    };
    let logs = open();
    let (log, _) = start(&logs, 1, 0);
    let first = write(&log, 0, 0, 1);
    assert_eq!(log.sync_inline(first).unwrap(), Inline::Done);
    for i in 1..6 {
        write(&log, i, i, 30);
    }
    storage.fail(Fault::Write, 0);
    assert_eq!(log.sync_inline(Lsn::new(6)).unwrap_err().kind(), ErrorKind::Poisoned);
    let folder = logs.quarantine(owner(1)).unwrap().unwrap();
    let kept = logs.read_quarantined(&folder, Lsn::ZERO).unwrap();
    assert!(kept.damage.is_none(), "{:?}", kept.damage);
    assert_eq!(kept.recovery.records.len(), 6);
    for (i, record) in (1..6).zip(kept.recovery.records.iter().skip(1)) {
        assert_eq!(data(record), blocks(i, 30));
    }
    drop((kept, log, logs));
    assert_eq!(open().owners(), []);
}

// Fails when discarding leaves anything to replay.
#[test]
fn a_discarded_log_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::open(small(dir.path())).unwrap();
    let (log, _) = start(&logs, 1, 0);
    for i in 0..60 {
        write(&log, i, i, 20);
    }
    logs.discard(owner(1)).unwrap();
    logs.discard(owner(2)).unwrap();
    drop((log, logs));
    let logs = LogDir::open(small(dir.path())).unwrap();
    assert_eq!(logs.owners(), []);
    let (_log, records) = start(&logs, 1, 0);
    assert!(records.is_empty());
}
