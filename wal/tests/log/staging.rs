//! The staging ring on tmpfs: what it keeps over a restart, whose it is, and what it refuses.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use wal::{ErrorKind, LogConfig, LogDir, Lsn, Record, Staging, Start};

use crate::support::{block_on, blocks, data, owner, small, start, write};

/// A folder for the log and one on tmpfs for its ring; nothing is written unless a test says so.
struct Fixture {
    dir: TempDir,
    shm: TempDir,
}

impl Fixture {
    fn new() -> Option<Self> {
        let Ok(shm) = tempfile::tempdir_in("/dev/shm") else {
            println!("skipped: no /dev/shm");
            return None;
        };
        Some(Self { dir: tempfile::tempdir().unwrap(), shm })
    }

    fn ring(&self) -> PathBuf {
        self.shm.path().join("ring")
    }

    fn config(&self) -> LogConfig {
        let mut config = small(self.dir.path());
        config.writer_threads = 0;
        config.staging.path = Some(self.ring());
        config
    }

    fn open(&self) -> wal::Result<std::sync::Arc<LogDir>> {
        LogDir::open(self.config())
    }

    /// Leaves records 1 to 5 of owner 1 in the ring, and only there.
    fn leave_five(&self) {
        let logs = self.open().unwrap();
        assert_eq!(*logs.staging(), Staging::Outlives);
        let (log, _) = start(&logs, 1, 0);
        for i in 1..=5 {
            let lsn = write(&log, i, i, 3);
            block_on(log.wait_acknowledged(lsn)).unwrap();
        }
        assert_eq!(log.positions().written, Lsn::ZERO);
    }

    fn check_five(&self) {
        let logs = self.open().unwrap();
        assert_eq!(logs.owners(), [owner(1)]);
        let (_log, records) = start(&logs, 1, 0);
        assert_eq!(records.len(), 5);
        for (i, record) in (1..).zip(&records) {
            assert_eq!(data(record), blocks(i, 3));
        }
    }
}

// Fails when an acknowledged record that never reached the log is lost, or comes twice.
#[test]
fn the_ring_keeps_what_the_log_does_not_have() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.leave_five();
    fixture.check_five();
    // Now it is in the log: the ring may go.
    fs::remove_file(fixture.ring()).unwrap();
    fixture.check_five();
}

// Fails when a changed configuration loses what the ring still holds.
#[test]
fn a_ring_of_another_size_is_emptied_before_it_is_replaced() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.leave_five();
    let size = || fs::metadata(fixture.ring()).unwrap().len();
    let before = size();
    let mut config = fixture.config();
    config.staging.bytes *= 2;
    {
        let logs = LogDir::open(config.clone()).unwrap();
        assert_eq!(size(), before);
        let (_log, records) = start(&logs, 1, 0);
        assert_eq!(records.len(), 5);
    }
    LogDir::open(config).unwrap();
    assert!(size() > before);
    fixture.check_five();
}

// Fails when one directory takes another's ring, or destroys what is in it.
#[test]
fn a_ring_belongs_to_one_directory() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.leave_five();
    let other = Fixture { dir: tempfile::tempdir().unwrap(), ..fixture };
    let error = other.open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains(other.ring().to_str().unwrap()), "{error}");
}

// Fails when two processes can share a ring.
#[test]
fn a_ring_in_use_is_refused() {
    let Some(fixture) = Fixture::new() else { return };
    let _logs = fixture.open().unwrap();
    let mut config = fixture.config();
    let dir = tempfile::tempdir().unwrap();
    config.dir = dir.path().to_owned();
    assert_eq!(LogDir::open(config).unwrap_err().kind(), ErrorKind::Busy);
}

// Fails when a file that is not a ring of ours is overwritten, or a newer ring misread.
#[test]
fn a_file_that_is_no_ring_is_left_alone() {
    let Some(fixture) = Fixture::new() else { return };
    fs::write(fixture.ring(), b"precious data, longer than eight bytes").unwrap();
    assert_eq!(fixture.open().unwrap_err().kind(), ErrorKind::Invalid);
    assert!(fs::read(fixture.ring()).unwrap().starts_with(b"precious"));
    fs::remove_file(fixture.ring()).unwrap();

    fixture.leave_five();
    let file = OpenOptions::new().write(true).open(fixture.ring()).unwrap();
    file.write_all_at(&2_u64.to_ne_bytes(), 8).unwrap();
    assert_eq!(fixture.open().unwrap_err().kind(), ErrorKind::Version);
    file.write_all_at(&1_u64.to_ne_bytes(), 8).unwrap();
    file.write_all_at(&77_u64.to_ne_bytes(), 48).unwrap();
    assert_eq!(fixture.open().unwrap_err().kind(), ErrorKind::Damaged);
}

// Fails when an acknowledged record that rotted in memory is dropped as if it were the end.
#[test]
fn damage_in_the_ring_stops_the_owner() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.leave_five();
    let bytes = fs::read(fixture.ring()).unwrap();
    let wanted = &blocks(4, 3)[..4096];
    let at = bytes.chunks(4096).position(|block| block == wanted).unwrap() * 4096;
    let file = OpenOptions::new().write(true).open(fixture.ring()).unwrap();
    file.write_all_at(&[!wanted[0]], at as u64).unwrap();
    let logs = fixture.open().unwrap();
    let from = Start { owner: owner(1), epoch: 1, floor: Lsn::ZERO };
    let error = logs.start(from).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().contains("record 4"), "{error}");
    let (_log, records) = start(&logs, 2, 0);
    assert!(records.is_empty());
    // Kept for whoever looks into it, up to the damage.
    let kept = logs.quarantine(owner(1)).unwrap().unwrap();
    let kept = logs.read_quarantined(&kept, Lsn::ZERO).unwrap();
    assert_eq!(kept.recovery.records.len(), 3);
    let (_log, records) = start(&logs, 1, 0);
    assert!(records.is_empty());
}

// Fails when acknowledgement is claimed for memory that ends with the process.
#[test]
fn where_memory_does_not_outlive_the_process_the_log_acknowledges() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = small(dir.path());
    config.staging.path = Some(dir.path().join("ring"));
    let logs = LogDir::open(config).unwrap();
    if *logs.staging() == Staging::Outlives {
        println!("skipped: the temporary folder is on tmpfs");
        return;
    }
    assert!(matches!(logs.staging(), Staging::Private(why) if why.contains("not on tmpfs")));
    assert!(!Path::new(&dir.path().join("ring")).exists());
    let (log, _) = start(&logs, 1, 0);
    let lsn = write(&log, 1, 1, 1);
    block_on(log.wait_acknowledged(lsn)).unwrap();
    assert_eq!(log.positions().written, lsn);
}

// Fails when one owner can take the whole ring from the others.
#[test]
fn a_flood_leaves_slots_to_others() {
    let Some(fixture) = Fixture::new() else { return };
    let mut config = fixture.config();
    config.segments_ready = 12;
    let logs = LogDir::open(config).unwrap();
    while logs.step() {}
    let (flood, _) = start(&logs, 1, 0);
    let (other, _) = start(&logs, 2, 0);
    let bytes = blocks(0, 64);
    let mut taken = 0;
    while flood.append(Record::Write { first_block: taken, data: &bytes }).is_ok() {
        taken += 1;
    }
    assert!(taken >= 2);
    other.append(Record::Write { first_block: 0, data: &bytes[..4096] }).unwrap();
}

// Fails when another path in the configuration leaves acknowledged records behind.
#[test]
fn a_ring_is_not_left_behind() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.leave_five();
    let mut config = fixture.config();
    for path in [None, Some(fixture.shm.path().join("other"))] {
        config.staging.path = path;
        let error = LogDir::open(config.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(fixture.ring().to_str().unwrap()), "{error}");
    }
    fixture.check_five();
    // Emptied, it may be left, and then taken up again.
    LogDir::open(config).unwrap();
    fixture.check_five();
}
