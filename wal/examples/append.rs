//! Measures the log on a folder of the caller's choice, beside a raw loop of writes and syncs.
//!
//! `cargo run --release -p wal --example append -- DIR [STAGING-FILE]`
#![expect(clippy::print_stdout, reason = "its output is its purpose")]
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use wal::{BlockBuf, Inline, Log, LogConfig, LogDir, Lsn, OwnerId, Record, Start, SyncMethod};

const ROUND: Duration = Duration::from_secs(2);

fn main() {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let dir = args.next().expect("the folder to measure in");
    let staging = args.next();
    raw(&dir.join("raw"));
    for sync in [SyncMethod::Fdatasync, SyncMethod::Dsync] {
        println!("-- {sync:?}");
        let folder = dir.join("log");
        if folder.exists() {
            std::fs::remove_dir_all(&folder).expect("the last run's log goes away");
        }
        let mut config = LogConfig::new(folder);
        config.sync = sync;
        config.staging.path.clone_from(&staging);
        config.segments_ready = 16;
        let logs = LogDir::open(config).expect("the log directory");
        println!("staging: {:?}", logs.staging());
        let start = Start { owner: OwnerId::new([1; 16]), epoch: 1, floor: Lsn::ZERO };
        let (log, _) = logs.start(start).expect("the log");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_time()
            .build()
            .expect("a runtime");
        measure(&log, &runtime);
        log.release(log.positions().synced);
        log.close().expect("closed");
    }
}

fn measure(log: &Log, runtime: &tokio::runtime::Runtime) {
    let data = vec![7_u8; 4096];
    // Appends alone, a burst that fits the ring; what they leave is written before the next burst.
    let mut times = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        for i in 0..2000 {
            write(log, i, &data);
        }
        times.push(start.elapsed() / 2000);
        runtime.block_on(log.wait_synced(log.positions().appended)).expect("synced");
        log.release(log.positions().synced);
    }
    times.sort();
    println!("append 4 KiB: {:?} (median of bursts of 2000)", times[times.len() / 2]);

    rate("append 4 KiB, as fast as the device", || {
        while let Err(_full) = log.append(Record::Write { first_block: 1, data: &data }) {
            let synced = log.positions().synced;
            log.release(synced);
            runtime
                .block_on(log.wait_synced(synced.plus(1000).min(log.positions().appended)))
                .expect("room");
        }
    });
    runtime.block_on(log.wait_synced(log.positions().appended)).expect("synced");

    let mut busy = 0;
    latency("write + sync_inline", || {
        let lsn = write(log, 1, &data);
        if log.sync_inline(lsn).expect("synced") == Inline::Busy {
            busy += 1;
            runtime.block_on(log.wait_synced(lsn)).expect("synced");
        }
        log.release(lsn);
    });
    println!("  ({busy} times another thread was at it)");
    let one = log.clone();
    let task = runtime.spawn(async move {
        let data = vec![7_u8; 4096];
        let start = Instant::now();
        let mut count = 0_u32;
        while start.elapsed() < ROUND {
            let lsn = write(&one, 1, &data);
            one.wait_synced(lsn).await.expect("synced");
            one.release(lsn);
            count += 1;
        }
        println!("write + wait_synced in a task: {:.0} /s", f64::from(count) / ROUND.as_secs_f64());
    });
    runtime.block_on(task).expect("the task");
    for tasks in [8, 32] {
        let count: u32 = runtime.block_on(async {
            let all: Vec<_> = (0..tasks).map(|_| tokio::spawn(syncer(log.clone()))).collect();
            let mut count = 0;
            for task in all {
                count += task.await.expect("the task");
            }
            count
        });
        let per_second = f64::from(count) / ROUND.as_secs_f64();
        println!("write + wait_synced in {tasks} tasks: {per_second:.0} /s");
    }
    let large = vec![7_u8; 256 << 10];
    let start = Instant::now();
    let mut bytes = 0_u64;
    while start.elapsed() < ROUND {
        while log.append(Record::Write { first_block: 1, data: &large }).is_err() {
            log.release(log.positions().synced);
            runtime.block_on(log.wait_synced(log.positions().appended)).expect("synced");
            log.release(log.positions().synced);
        }
        bytes += 256 << 10;
    }
    runtime.block_on(log.wait_synced(log.positions().appended)).expect("synced");
    let seconds = start.elapsed().as_secs_f64();
    println!("256 KiB appends, synced now and then: {:.0} MB/s", bytes as f64 / 1e6 / seconds);
}

async fn syncer(log: Log) -> u32 {
    let data = vec![7_u8; 4096];
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < ROUND {
        let lsn = loop {
            match log.append(Record::Write { first_block: 1, data: &data }) {
                Ok(appended) => break appended.lsn,
                Err(_full) => log.room().await,
            }
        };
        log.wait_synced(lsn).await.expect("synced");
        log.release(lsn);
        count += 1;
    }
    count
}

fn write(log: &Log, first_block: u64, data: &[u8]) -> Lsn {
    loop {
        match log.append(Record::Write { first_block, data }) {
            Ok(appended) => return appended.lsn,
            Err(_full) => std::thread::yield_now(),
        }
    }
}

/// The device alone: what a log can at best do for one client.
fn raw(path: &Path) {
    let direct = 0o40000;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(direct)
        .open(path)
        .expect("a file with direct I/O");
    let mut buffer = BlockBuf::new(256);
    for i in 0..64 {
        file.write_all_at(buffer.bytes(), i << 20).expect("zeros");
    }
    file.sync_all().expect("synced");
    buffer.bytes_mut().fill(7);
    let file = Arc::new(file);
    for blocks in [1, 2] {
        let mut i = 0;
        latency(&format!("raw: pwrite {} KiB + fdatasync", blocks * 4), || {
            i = (i + 1) % 8000;
            file.write_all_at(&buffer.bytes()[..blocks * 4096], i * 8192).expect("written");
            file.sync_data().expect("synced");
        });
    }
    let mut i = 0;
    latency("raw: pwrite 4 KiB", || {
        i = (i + 1) % 8000;
        file.write_all_at(&buffer.bytes()[..4096], i * 8192).expect("written");
    });
}

fn rate(name: &str, mut operation: impl FnMut()) {
    let start = Instant::now();
    let mut count = 0_u32;
    while start.elapsed() < ROUND {
        for _ in 0..16 {
            operation();
        }
        count += 16;
    }
    println!("{name}: {:.0} /s", f64::from(count) / start.elapsed().as_secs_f64());
}

fn latency(name: &str, mut operation: impl FnMut()) {
    let mut times = Vec::new();
    let start = Instant::now();
    while start.elapsed() < ROUND {
        let before = Instant::now();
        operation();
        times.push(before.elapsed());
    }
    times.sort();
    let at = |part: usize| times[(times.len() * part / 1000).min(times.len() - 1)];
    let per_second = times.len() as f64 / start.elapsed().as_secs_f64();
    println!("{name}: {per_second:.0} /s, p50 {:?}, p99 {:?}", at(500), at(990));
}
