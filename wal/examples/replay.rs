//! Measures how long a replay takes and how much memory it needs, on a log of many small frames.
//!
//! `cargo run --release -p wal --example replay -- write|read DIR GIB`, one after the other, so that
//! the memory of the second is the replay's alone.
#![expect(clippy::print_stdout, reason = "its output is its purpose")]
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::path::PathBuf;
use std::time::Instant;

use wal::{LogConfig, LogDir, Lsn, OwnerId, Record, Start};

fn main() {
    let mut args = std::env::args().skip(1);
    let mode = args.next().expect("write or read");
    let dir = PathBuf::from(args.next().expect("the folder to measure in"));
    let gib: u64 = args.next().expect("how many GiB").parse().expect("a number of GiB");
    let mut config = LogConfig::new(dir);
    config.bytes_max = (gib + 2) << 30;
    let logs = LogDir::open(config).expect("the log directory");
    let start = Start { owner: OwnerId::new([1; 16]), epoch: 1, floor: Lsn::ZERO };
    let begin = Instant::now();
    let (log, recovery) = logs.start(start).expect("the log");
    println!(
        "replayed {} records from {} MiB in {:?}",
        recovery.records.len(),
        recovery.bytes_read >> 20,
        begin.elapsed()
    );
    if mode == "write" {
        // A block to a frame, as one client makes them that flushes after each write.
        let data = vec![7_u8; 4096];
        let frames = (gib << 30) / 8192;
        for i in 0..frames {
            let lsn = loop {
                match log.append(Record::Write { first_block: i, data: &data }) {
                    Ok(appended) => break appended.lsn,
                    Err(_full) => std::thread::yield_now(),
                }
            };
            log.write_inline(lsn).expect("written");
        }
        log.sync_inline(Lsn::new(frames)).expect("synced");
    }
    let status = std::fs::read_to_string("/proc/self/status").expect("a Linux machine");
    for line in status.lines().filter(|line| line.starts_with("VmHWM") || line.starts_with("VmRSS"))
    {
        println!("{line}");
    }
}
