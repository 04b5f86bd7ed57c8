//! A real process, really killed: what it was told is acknowledged or synced is there.
//!
//! The test runs its own binary again as the victim, which appends as fast as it can and says on its
//! output how far it is; the test kills it after some of these lines. A binary of its own, and one
//! such test at a time: a process that is just being spawned holds every lock of its parent.
#![expect(
    clippy::unwrap_used,
    reason = "a test ends where it fails; helpers are not marked as tests"
)]
#![expect(clippy::cast_possible_truncation, reason = "test data is small")]
#![expect(dead_code, reason = "the helpers serve other tests too")]

#[path = "log/support.rs"]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use wal::sim::SimRandom;
use wal::{ErrorKind, Inline, LogConfig, LogDir, Lsn, Record, Staging, Start};

use support::{block_on, blocks, data, owner, small};

const DIR: &str = "WAL_TEST_VICTIM_DIR";
const RING: &str = "WAL_TEST_VICTIM_RING";
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn config(dir: &Path, ring: Option<PathBuf>) -> LogConfig {
    let mut config = small(dir);
    config.writer_threads = 2;
    config.bytes_max = 64 << 20;
    config.staging.path = ring;
    config
}

/// How many blocks record `lsn` has; its contents follow from its LSN.
fn count(lsn: u64) -> usize {
    1 + (lsn * 13 % 40) as usize
}

// Not a test by itself: the victim of the one below.
#[test]
fn victim() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let logs =
        LogDir::open(config(dir.as_ref(), std::env::var_os(RING).map(PathBuf::from))).unwrap();
    let start = Start { owner: owner(1), epoch: 1, floor: Lsn::ZERO };
    let (log, recovery) = logs.start(start).unwrap();
    let mut lsn = recovery.end;
    drop(recovery);
    let mut out = std::io::stdout();
    loop {
        let next = lsn.next().get();
        let bytes = blocks(next, count(next));
        match log.append(Record::Write { first_block: next, data: &bytes }) {
            Ok(appended) => lsn = appended.lsn,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full);
                block_on(log.room());
                continue;
            }
        }
        if matches!(logs.staging(), Staging::Outlives) {
            writeln!(out, "acknowledged {lsn}").unwrap();
        }
        if next.is_multiple_of(5) {
            if log.sync_inline(lsn).unwrap() == Inline::Busy {
                block_on(log.wait_synced(lsn)).unwrap();
            }
            writeln!(out, "synced {lsn}").unwrap();
        }
        out.flush().unwrap();
    }
}

/// Runs the victim until it has said `lines` lines, kills it, and returns how far it said it was.
fn run_victim(dir: &Path, ring: Option<&Path>, lines: u64) -> u64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["victim", "--exact", "--nocapture", "--test-threads=1"]).env(DIR, dir);
    if let Some(ring) = ring {
        command.env(RING, ring);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let said = output.filter_map(|line| {
        line.split_once("acknowledged ").or(line.split_once("synced "))?.1.parse().ok()
    });
    let last = said.take(lines as usize).last().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    last
}

fn check_kills(ring: Option<&Path>) {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut random = SimRandom::new(7);
    let mut end = 0;
    for round in 0..12 {
        let lines = 1 + random.below(if ring.is_some() { 60 } else { 12 });
        let said = run_victim(dir.path(), ring, lines);
        assert!(said > end, "round {round}: said {said}, began after {end}");
        let logs = LogDir::open(config(dir.path(), ring.map(Path::to_owned))).unwrap();
        let start = Start { owner: owner(1), epoch: 1, floor: Lsn::ZERO };
        let (log, recovery) = logs.start(start).unwrap();
        end = recovery.end.get();
        assert!(end >= said, "round {round}: said {said}, found {end}");
        assert_eq!(recovery.records.len() as u64, end);
        for (lsn, record) in (1..).zip(&recovery.records) {
            assert_eq!((record.lsn.get(), record.first_block), (lsn, lsn));
            assert_eq!(data(record), blocks(lsn, count(lsn)));
        }
        // Half of the rounds leave what they recovered as a killed process would.
        if round % 2 == 0 {
            log.close().unwrap();
        }
    }
}

// W12. Fails when a killed process loses what its staging ring acknowledged.
#[test]
fn a_kill_loses_nothing_that_was_acknowledged() {
    let Ok(shm) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm");
        return;
    };
    check_kills(Some(&shm.path().join("ring")));
}

// W12. Fails when a killed process loses what was synced.
#[test]
fn a_kill_without_a_ring_loses_nothing_that_was_synced() {
    check_kills(None);
}
