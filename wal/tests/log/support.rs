//! What the tests of the log share: configurations, blocks with known contents, and a checker.

use std::path::Path;
use std::time::Duration;

use wal::{Log, LogConfig, LogDir, Lsn, OwnerId, Record, Recovered, Start};

/// Small segments and few slots, so that every limit is near.
pub(crate) fn small(dir: &Path) -> LogConfig {
    let mut config = LogConfig::new(dir);
    config.segment_bytes = 1 << 20;
    config.bytes_max = 16 << 20;
    config.segments_ready = 2;
    config.staging.bytes = 4 << 20;
    config.writer_threads = 1;
    config.idle_mark = Duration::from_secs(3600);
    // A file system without direct I/O is fine here: what is tested is not the device.
    config.allow_buffered = true;
    config
}

pub(crate) fn owner(number: u8) -> OwnerId {
    OwnerId::new([number; 16])
}

pub(crate) fn start(dir: &LogDir, number: u8, floor: u64) -> (Log, Vec<Recovered>) {
    let start = Start { owner: owner(number), epoch: 1, floor: Lsn::new(floor) };
    let (log, recovery) = dir.start(start).expect("the log starts");
    (log, recovery.records.into())
}

/// Blocks whose contents follow from a number.
pub(crate) fn blocks(seed: u64, count: usize) -> Vec<u8> {
    (0..count * 512)
        .flat_map(|i| (seed ^ (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes())
        .collect()
}

/// Appends, waiting for room when there is none.
pub(crate) fn append(log: &Log, record: Record<'_>) -> Lsn {
    loop {
        match log.append(record) {
            Ok(appended) => return appended.lsn,
            Err(error) if error.kind() == wal::ErrorKind::Full => block_on(log.room()),
            Err(error) => panic!("append: {error}"),
        }
    }
}

pub(crate) fn write(log: &Log, block: u64, seed: u64, count: usize) -> Lsn {
    append(log, Record::Write { first_block: block, data: &blocks(seed, count) })
}

pub(crate) fn sync(log: &Log, lsn: Lsn) {
    block_on(log.wait_synced(lsn)).expect("synced");
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

/// What a record's blocks hold.
pub(crate) fn data(record: &Recovered) -> Vec<u8> {
    let place = record.place.as_ref().expect("a record with data");
    let mut out = vec![0; place.blocks() as usize * wal::BLOCK_BYTES];
    place.read_blocking(0, place.blocks(), &mut out).expect("its blocks");
    out
}
