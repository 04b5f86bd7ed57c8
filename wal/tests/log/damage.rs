//! Files that were cut, overwritten, lost or exchanged while no process ran: what nobody was promised
//! is dropped, what was promised and is not there stops that owner, and only that one.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use wal::{Error, ErrorKind, Inline, LogConfig, LogDir, Lsn, OwnerId, Recovery, Start};

use crate::support::{blocks, data, owner, small, start, write};

const BLOCK: u64 = 4096;
const SYNCED: u64 = 70;
const WRITTEN: u64 = 80;

/// Two owners with three segments each: 70 records of 8 blocks synced, one at a time, 10 more only
/// written.
struct Base {
    dir: TempDir,
}

impl Base {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let logs = LogDir::open(quiet(dir.path())).unwrap();
        for number in [1, 2] {
            let (log, _) = start(&logs, number, 0);
            for i in 1..=WRITTEN {
                let lsn = write(&log, i, u64::from(number) << 32 | i, 8);
                let done = if i <= SYNCED { log.sync_inline(lsn) } else { log.write_inline(lsn) };
                assert_eq!(done.unwrap(), Inline::Done);
            }
        }
        Self { dir }
    }

    /// The segments of an owner in their order.
    fn segments(&self, number: u8) -> Vec<PathBuf> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            if path.extension().is_some_and(|suffix| suffix == "seg")
                && OwnerId::new(bytes[16..32].try_into().unwrap()) == owner(number)
            {
                found.insert(u64::from_le_bytes(bytes[56..64].try_into().unwrap()), path);
            }
        }
        found.into_values().collect()
    }

    fn change(&self, path: &Path, offset: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        assert!(path.starts_with(self.dir.path()));
    }

    fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let files = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().path());
        // The lock file holds the process id, and free segments come and go.
        let kept = files.filter(|path| self.segments(1).contains(path));
        kept.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
    }

    /// Restarts owner 1. Whatever happens to it, owner 2 has all it had.
    fn restart(&self) -> Result<Recovery, Error> {
        let logs = LogDir::open(quiet(self.dir.path())).unwrap();
        let (_, others) = start(&logs, 2, 0);
        assert_eq!(others.len() as u64, WRITTEN);
        logs.start(Start { owner: owner(1), epoch: 1, floor: Lsn::ZERO }).map(|(_, found)| found)
    }

    #[track_caller]
    fn check_prefix(&self, records: u64) -> Recovery {
        let recovery = self.restart().unwrap();
        assert_eq!(recovery.records.len() as u64, records);
        for (i, record) in (1..).zip(&recovery.records) {
            assert_eq!((record.lsn.get(), record.first_block), (i, i));
            assert_eq!(data(record), blocks(1 << 32 | i, 8));
        }
        recovery
    }

    /// The log refuses, names the file, and nothing of it was changed; at the next start likewise.
    #[track_caller]
    fn check_damaged(&self, named: &Path) {
        let before = self.snapshot();
        for _ in 0..2 {
            let error = self.restart().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
            let name = named.file_name().unwrap().to_str().unwrap();
            assert!(error.to_string().contains(name), "{error} does not name {name}");
        }
        assert!(self.snapshot() == before, "a refused log was changed");
    }
}

/// Without threads: what is written, and when, is up to the test.
fn quiet(dir: &Path) -> LogConfig {
    let mut config = small(dir);
    config.writer_threads = 0;
    config
}

/// Where the last frame of a segment begins and ends; each has a header and 8 blocks.
fn last_frame(path: &Path) -> (u64, u64) {
    let bytes = fs::read(path).unwrap();
    let starts =
        (1..bytes.len() / 4096).filter(|block| bytes[block * 4096..].starts_with(b"WALFRAME"));
    let start = starts.max().unwrap() as u64 * BLOCK;
    (start, start + 9 * BLOCK)
}

// W04. Fails when a cut tail stops the log, takes more than the cut frame, or is reported for ever.
#[test]
fn a_cut_tail_loses_only_what_nobody_was_promised() {
    for cut in [1, 2, 511, 512, 4095, 4096] {
        let base = Base::new();
        let last = base.segments(1).pop().unwrap();
        let (_, end) = last_frame(&last);
        OpenOptions::new().write(true).open(&last).unwrap().set_len(end - cut).unwrap();
        let recovery = base.check_prefix(WRITTEN - 1);
        assert_eq!(recovery.bytes_dropped, 9 * BLOCK, "cut {cut}");
        drop(recovery);
        let again = base.check_prefix(WRITTEN - 1);
        assert_eq!((again.bytes_dropped, again.records_dropped), (0, 0), "cut {cut}");
    }
}

// W05. Fails when anything behind the true end is taken for a record.
#[test]
fn what_stands_behind_the_end_is_never_replayed() {
    let base = Base::new();
    let [first, .., last] = &base.segments(1)[..] else { panic!("segments") };
    let foreign = fs::read(base.segments(2).pop().unwrap()).unwrap();
    let older = fs::read(first).unwrap();
    let (_, end) = last_frame(last);
    let room = fs::metadata(last).unwrap().len() - end;
    let start = usize::try_from(end).unwrap();
    for tail in [vec![0; room as usize], vec![0xff; room as usize], foreign[4096..].to_vec()] {
        base.change(last, end, &tail[..room as usize]);
        base.check_prefix(WRITTEN);
    }
    // At their own offset, too, frames of another segment or owner are not ours.
    for other in [&older, &foreign] {
        base.change(last, end, &other[start..]);
        base.check_prefix(WRITTEN);
    }
    OpenOptions::new().append(true).open(last).unwrap();
    let longer = [0_u8; 1 << 20];
    base.change(last, fs::metadata(last).unwrap().len(), &longer);
    base.check_prefix(WRITTEN);
}

// W05. Fails when a hole among unsynced records is jumped.
#[test]
fn the_log_ends_at_the_first_hole_beyond_what_was_synced() {
    let base = Base::new();
    let last = base.segments(1).pop().unwrap();
    let (start, _) = last_frame(&last);
    base.change(&last, start - 27 * BLOCK, &[0; 4096]);
    let recovery = base.check_prefix(WRITTEN - 4);
    assert_eq!(recovery.records_dropped, 3);
    assert_eq!(recovery.bytes_dropped, 27 * BLOCK);
    drop(recovery);
    // The records that were given up do not come back when their LSNs are used again.
    let logs = LogDir::open(quiet(base.dir.path())).unwrap();
    let (log, _) = crate::support::start(&logs, 1, 0);
    let lsn = write(&log, 1000, 5, 1);
    assert_eq!(lsn.get(), WRITTEN - 3);
    assert_eq!(log.sync_inline(lsn).unwrap(), Inline::Done);
    drop((log, logs));
    let recovery = base.restart().unwrap();
    assert_eq!(recovery.records.len() as u64, WRITTEN - 3);
    assert_eq!(recovery.records.back().unwrap().first_block, 1000);
}

// W05. Fails when damage to synced data is dropped as a torn tail, or not located.
#[test]
fn damage_to_what_was_synced_is_named_and_nothing_is_changed() {
    for (at, what) in [(0, [0_u8; 4096]), (0, [0xff; 4096]), (3 * BLOCK, [1; 4096])] {
        let base = Base::new();
        let second = &base.segments(1)[1];
        let (start, _) = last_frame(second);
        base.change(second, start + at, &what);
        base.check_damaged(second);
        let error = base.restart().unwrap_err().to_string();
        assert!(error.contains(&format!("offset {}", start + at)), "{error}");
    }
    let base = Base::new();
    let second = &base.segments(1)[1];
    base.change(second, 0, &[0; 4096]);
    base.check_damaged(second);
}

// W07. Fails when a gap between segments is taken for the end, or segments out of place are read.
#[test]
fn missing_and_misplaced_segments_stop_the_owner() {
    let base = Base::new();
    let segments = base.segments(1);
    fs::remove_file(&segments[1]).unwrap();
    let error = base.restart().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().contains("segment number 2 is missing"), "{error}");

    // Cut on a record boundary: no torn record shows it.
    let base = Base::new();
    let second = &base.segments(1)[1];
    let (start, _) = last_frame(second);
    OpenOptions::new().write(true).open(second).unwrap().set_len(start).unwrap();
    base.check_damaged(second);

    let base = Base::new();
    let segments = base.segments(1);
    fs::rename(&segments[2], &segments[1]).unwrap();
    assert_eq!(base.restart().unwrap_err().kind(), ErrorKind::Damaged);

    let base = Base::new();
    let segments = base.segments(1);
    let copy = segments[1].with_file_name("00000000000000aa-000000bb.seg");
    fs::copy(&segments[1], &copy).unwrap();
    base.check_damaged(&copy);
    // Under a name of no segment it is none.
    fs::rename(&copy, copy.with_extension("bak")).unwrap();
    base.check_prefix(WRITTEN);

    let base = Base::new();
    let segments = base.segments(1);
    let third = fs::read(&segments[2]).unwrap();
    fs::rename(&segments[1], &segments[2]).unwrap();
    fs::write(&segments[1], third).unwrap();
    base.check_damaged(&segments[2]);
}

// W18. Fails when a small file beside the segments, damaged or left over, is trusted or fatal.
#[test]
fn small_files_are_ignored_or_named() {
    let base = Base::new();
    for leftover in ["id.tmp", "0000000000000001-00000001.new", "notes.txt"] {
        fs::write(base.dir.path().join(leftover), b"half").unwrap();
    }
    base.check_prefix(WRITTEN);
    assert!(!base.dir.path().join("0000000000000001-00000001.new").exists());
    fs::write(base.dir.path().join("0000000000000001-00000001.seg"), b"").unwrap();
    base.check_prefix(WRITTEN);

    let id = base.dir.path().join("id");
    let good = fs::read(&id).unwrap();
    for bad in [&b""[..], &good[..100], &[0xff; 4096][..]] {
        fs::write(&id, bad).unwrap();
        let error = LogDir::open(quiet(base.dir.path())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
        assert!(error.to_string().contains(id.to_str().unwrap()), "{error}");
    }
    fs::write(&id, good).unwrap();
    base.check_prefix(WRITTEN);
}

// W16. Fails when each restart leaves something more behind.
#[test]
fn restarting_again_and_again_does_not_grow_the_log() {
    let base = Base::new();
    let size = || -> u64 {
        let files = fs::read_dir(base.dir.path()).unwrap();
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
    };
    base.check_prefix(WRITTEN);
    let after_one = size();
    for _ in 0..10 {
        base.check_prefix(WRITTEN);
    }
    assert!(size() <= after_one + (2 << 20), "{} bytes, then {}", after_one, size());
}

// Fails when a log of another epoch, or one that ends below what the store has, is replayed.
#[test]
fn a_log_that_does_not_fit_the_store_is_refused() {
    let base = Base::new();
    let logs = LogDir::open(quiet(base.dir.path())).unwrap();
    let try_start = |epoch, floor| {
        let start = Start { owner: owner(1), epoch, floor: Lsn::new(floor) };
        logs.start(start).map(|(log, recovery)| (log, recovery.records.len()))
    };
    assert_eq!(try_start(2, 0).unwrap_err().kind(), ErrorKind::OtherEpoch);
    assert_eq!(try_start(1, WRITTEN + 1).unwrap_err().kind(), ErrorKind::BehindStore);
    let (_log, records) = try_start(1, WRITTEN).unwrap();
    assert_eq!(records, 0);
    assert_eq!(try_start(1, WRITTEN).unwrap_err().kind(), ErrorKind::Busy);
}
