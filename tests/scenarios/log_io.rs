//! How the log reaches its device: past the page cache, whole even where the kernel does less than
//! asked, and never in silence where that cannot be.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockd_tests::model::{self, BLOCK_BYTES, Content, Image, Model};
use blockd_tests::process::{Daemon, Export, short_temp_dir};
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::workload::{self, Clock, Plan};
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(60);
const BLOCKS: u64 = 4096;

/// A tracer that holds all threads of a daemon, and what it saw.
struct Tracer {
    child: Child,
    folder: tempfile::TempDir,
}

impl Tracer {
    /// Attaches to `daemon`; `None` where there is no strace.
    fn attach(daemon: &Daemon, words: &[&str]) -> Option<Self> {
        let strace = tools::need("strace")?;
        let folder = short_temp_dir();
        let mut command: Command = strace.command();
        command.args(["-f", "-qq", "-y", "-o"]).arg(folder.path().join("trace")).args(words);
        // A group of its own, so that an interrupt of the test run detaches it last.
        command.args(["-p", &daemon.pid().to_string()]).process_group(0);
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("run strace");
        let status = format!("/proc/{}/status", daemon.pid());
        wait::until_true("strace holds the daemon", LIMIT, || {
            let status = std::fs::read_to_string(&status).unwrap_or_default();
            !status.contains("TracerPid:\t0\n")
        });
        Some(Self { child, folder })
    }

    /// Lets go of the daemon; the calls that were seen.
    fn end(mut self) -> Vec<String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.expect("a pid is positive");
        // Unlike a kill, this makes it detach first.
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("end strace");
        self.child.wait().expect("wait for strace");
        let seen = std::fs::read_to_string(self.folder.path().join("trace"));
        seen.expect("strace wrote its output").lines().map(str::to_owned).collect()
    }
}

/// A daemon without a staging ring, so that every acknowledgement waits for the log.
fn log_only(store: &Store) -> Daemon {
    let mut daemon = Daemon::prepare(store.settings());
    let ring = daemon.place().join("staging").display().to_string();
    daemon.reconfigure(|settings| settings.arg(format!("--staging-path={ring}")));
    daemon.log().expect("staging");
    daemon.launch();
    daemon
}

/// Writes under a tracer, kills the daemon, and asserts that nothing acknowledged is lost.
/// Returns the traced calls.
fn write_traced(words: &[&str]) -> Option<Vec<String>> {
    let store = Store::directory();
    let mut daemon = log_only(&store);
    let export = daemon.create_attached("disk", "64M");
    let tracer = Tracer::attach(&daemon, words)?;
    let seed = Random::for_test().bits();
    let plan = Plan::new(export.address.clone(), &export.name, seed, BLOCKS);
    let running = workload::start(&plan, &Clock::default());
    running.await_acks(500, LIMIT);
    let history = running.stop();
    let seen = tracer.end();
    history.assert_no_errors();
    let mut model = Model::new(BLOCKS);
    history.teach(&mut model);
    daemon.kill9();
    daemon.launch();
    let mut guest = export.connect_when_served();
    let image = Image::read(&mut guest, seed, BLOCKS).expect("read the disk back");
    model.assert_nothing_acknowledged_is_lost(&image);
    guest.disconnect();
    daemon.finish();
    Some(seen)
}

/// Fails if a segment is written through the page cache, a write is unaligned, or a new file is
/// relied on before its folder is synced. (W01, W08)
#[test]
fn the_log_is_written_past_the_page_cache_in_whole_blocks() {
    let Some(seen) = write_traced(&["-e", "trace=openat,pwritev2,pwrite64,fsync,fdatasync"]) else {
        return;
    };
    let writes: Vec<_> = seen.iter().filter(|line| line.contains("/log/")).collect();
    let opened = writes.iter().filter(|line| line.contains("openat("));
    for line in opened.filter(|line| line.contains("O_WRONLY") || line.contains("O_RDWR")) {
        assert!(line.contains("O_DIRECT") || line.contains("O_CREAT"), "{line}");
    }
    let written: Vec<_> = writes.iter().filter(|line| line.contains("pwrite")).collect();
    assert!(!written.is_empty(), "no write to the log was seen");
    for line in &written {
        assert!(!line.contains("EINVAL"), "{line}");
        if let Some(count) = line.rsplit_once("= ").and_then(|(_, count)| count.parse::<u64>().ok())
        {
            assert_eq!(count % BLOCK_BYTES, 0, "{line}");
        }
    }
    report::say(&format!("{} writes to the log, all whole blocks", written.len()));
}

/// Fails if a write that was interrupted, or that the kernel asked to repeat, is acknowledged
/// without being repeated. (W03; short writes cannot be injected: the call would not happen at all)
#[test]
fn interrupted_log_writes_are_repeated() {
    for inject in ["error=EINTR:when=4+7", "error=EAGAIN:when=6+11"] {
        let inject = format!("inject=pwritev2:{inject}");
        let Some(seen) = write_traced(&["-e", "trace=pwritev2", "-e", &inject]) else { return };
        let injected = seen.iter().filter(|line| line.contains("INJECTED")).count();
        assert!(injected > 0, "{inject} never happened");
        report::say(&format!("{inject}: {injected} times"));
    }
}

/// Fails if a write or sync that the device refused is acknowledged, now or by a later flush. (W09)
#[test]
fn a_failed_sync_stops_the_disk_and_is_never_tried_again() {
    let store = Store::directory();
    let mut daemon = Daemon::start(store.settings().arg("--log-sync=fdatasync"));
    let export = daemon.create_attached("disk", "64M");
    let mut guest = export.connect();
    guest.write(0, &model::encode(1, 0, 1)).unwrap();
    guest.flush().unwrap();
    let words = ["-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when=1"];
    let Some(tracer) = Tracer::attach(&daemon, &words) else { return };
    daemon.log().expect("disk");
    daemon.log().expect("log");
    wait::until_true("a flush meets the error", LIMIT, || {
        let _written = guest.write(4096, &model::encode(1, 1, 1));
        guest.flush().is_err()
    });
    assert!(guest.flush().is_err(), "a later flush was acknowledged");
    let refused = guest.write(8192, &model::encode(1, 2, 1));
    assert!(refused.is_err(), "a write to a stopped disk was acknowledged");
    let _seen = tracer.end();
    assert_eq!(daemon.show("disk")["state"], "stopped");
    daemon.kill9();
    daemon.launch();
    let bytes = export.connect_when_served().read(0, 4096).unwrap();
    assert_eq!(model::decode(1, 0, &bytes), Content::Version(1), "what was flushed before");
    daemon.finish();
}

/// Fails if a folder without direct I/O is used in silence. (W02)
#[test]
fn a_log_on_tmpfs_works_directly_or_is_refused_by_name() {
    let store = Store::directory();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut daemon = Daemon::prepare(store.settings());
    daemon.reconfigure(|settings| settings.arg(format!("--log-dir={}", folder.path().display())));
    daemon.spawn();
    let ended = wait::until("the daemon answers or ends", LIMIT, || {
        let ended = daemon.exited().map(|_status| true);
        ended.or_else(|| (daemon.cli(&["status"]).code == 0).then_some(false))
    });
    if ended {
        let said = daemon.log().lines().join("\n");
        assert!(said.contains("tmpfs") && said.contains("allow-buffered-log"), "{said}");
        daemon.log().expect("tmpfs");
        daemon.kill9();
        daemon.reconfigure(|settings| settings.arg("--allow-buffered-log=true"));
        daemon.log().expect("buffered");
        daemon.launch();
        let status = daemon.cli(&["status", "--json"]).ok().json();
        assert_eq!(status["log"]["mode"], "buffered", "{status}");
    }
    let export: Export = daemon.create_attached("disk", "64M");
    export.connect().write_fua(0, &[1; 4096]).unwrap();
    daemon.kill9();
    daemon.launch();
    assert_eq!(export.connect_when_served().read(0, 4096).unwrap(), [1; 4096]);
    daemon.finish();
}
