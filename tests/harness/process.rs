//! The real binary as a process: started, asked, paused, killed, started again.
//!
//! A [`Daemon`] is one host: a state directory in a temporary folder, and a runtime directory on
//! tmpfs where there is one, as production has it; both paths are short, since a unix socket's
//! holds 108 bytes at most. It keeps them over restarts, and its [`Log`] is judged when it ends: by
//! [`Daemon::finish`], or at drop.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::cli::Answer;
use crate::logs::Log;
use crate::nbd_client::Client;
use crate::nbd_handshake::Address;
use crate::wait;

/// How long a daemon may take to answer its control socket.
const START_LIMIT: Duration = Duration::from_secs(30);
/// How long a daemon may take to end after SIGTERM: it does not wait for the drain.
pub const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A temporary folder with a short path.
#[must_use]
pub fn short_temp_dir() -> TempDir {
    temp_dir_in("/tmp")
}

/// A temporary folder on tmpfs with a short path, or an ordinary one where there is no tmpfs.
fn shared_memory_dir() -> TempDir {
    temp_dir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })
}

fn temp_dir_in(parent: &str) -> TempDir {
    tempfile::Builder::new().prefix("bd").tempdir_in(parent).expect("make a temporary folder")
}

/// The binary under test: `BLOCKD_BIN`, or `blockd` in the folder above the test's own.
#[must_use]
pub fn binary() -> PathBuf {
    let found = std::env::var_os("BLOCKD_BIN").map_or_else(beside_the_tests, PathBuf::from);
    assert!(found.is_file(), "{} is not there: cargo build --release first", found.display());
    found
}

fn beside_the_tests() -> PathBuf {
    let own = std::env::current_exe().expect("a test knows its executable");
    let profile = own.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    profile.join("blockd")
}

/// How a daemon is started.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    store: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Settings {
    /// A daemon on the store with this URL.
    #[must_use]
    pub fn new(store: impl Into<String>) -> Self {
        Self { store: store.into(), ..Self::default() }
    }

    /// Adds an argument of `blockd serve`.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Sets several environment variables.
    #[must_use]
    pub fn envs(mut self, pairs: &[(&str, &str)]) -> Self {
        let owned = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        self.environment.extend(owned);
        self
    }
}

/// One host running the daemon.
#[derive(Debug)]
pub struct Daemon {
    settings: Settings,
    place: TempDir,
    runtime: TempDir,
    log: Log,
    process: Option<Process>,
}

/// The running process and the thread that reads its stderr.
#[derive(Debug)]
struct Process {
    child: Child,
    reader: JoinHandle<()>,
}

/// An attached disk, as its guest sees it.
#[derive(Debug, Clone)]
pub struct Export {
    /// The URI that attach printed.
    pub uri: String,
    /// Where it listens.
    pub address: Address,
    /// The export's name there.
    pub name: String,
}

impl Export {
    /// Takes an NBD URI apart.
    #[track_caller]
    #[must_use]
    pub fn from_uri(uri: &str) -> Self {
        let parsed = if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
            rest.split_once("?socket=")
                .map(|(name, socket)| (Address::Unix(PathBuf::from(socket)), name))
        } else {
            uri.strip_prefix("nbd://")
                .and_then(|rest| rest.split_once('/'))
                .map(|(host, name)| (Address::Tcp(host.to_owned()), name))
        };
        let (address, name) = parsed.unwrap_or_else(|| panic!("{uri:?} is no NBD URI"));
        Self { uri: uri.to_owned(), address, name: name.replace("%40", "@") }
    }

    /// Connects a guest.
    #[track_caller]
    #[must_use]
    pub fn connect(&self) -> Client {
        Client::connect(&self.address, &self.name)
            .unwrap_or_else(|error| panic!("connect to {}: {error}", self.uri))
    }

    /// Connects a guest as soon as the export is served, as after a restart.
    #[track_caller]
    #[must_use]
    pub fn connect_when_served(&self) -> Client {
        wait::until(&format!("{} is served", self.uri), START_LIMIT, || {
            Client::connect(&self.address, &self.name).ok()
        })
    }
}

impl Daemon {
    /// Starts a host of its own and waits until it answers.
    #[track_caller]
    #[must_use]
    pub fn start(settings: Settings) -> Self {
        let mut daemon = Self::prepare(settings);
        daemon.launch();
        daemon
    }

    /// Makes the folder of a host without starting it.
    #[must_use]
    pub fn prepare(settings: Settings) -> Self {
        let (place, runtime) = (short_temp_dir(), shared_memory_dir());
        Self { settings, place, runtime, log: Log::default(), process: None }
    }

    /// Starts the process and waits until its control socket answers.
    #[track_caller]
    pub fn launch(&mut self) {
        self.spawn();
        self.await_ready();
    }

    /// Starts the process without waiting.
    #[track_caller]
    pub fn spawn(&mut self) {
        assert!(self.process.is_none(), "the daemon runs already");
        let mut child = self
            .serve_command()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start the daemon");
        let stderr = child.stderr.take().expect("stderr is piped");
        let reader = self.log.collect(stderr);
        self.process = Some(Process { child, reader });
    }

    /// Waits until the control socket answers; panics with the log if the process ends instead.
    #[track_caller]
    pub fn await_ready(&mut self) {
        wait::until_true("the control socket answers", START_LIMIT, || {
            if let Some(status) = self.exited() {
                panic!("the daemon ended with {status} at start:\n{}", self.log.lines().join("\n"));
            }
            self.cli(&["status", "--json"]).code == 0
        });
    }

    /// The command line that starts this host's daemon.
    #[must_use]
    pub fn serve_command(&self) -> Command {
        let mut command = self.command();
        command.arg("serve").args(["--store", &self.settings.store]);
        command.arg("--state-dir").arg(self.state_dir());
        command.arg("--runtime-dir").arg(self.runtime_dir());
        command.arg("--control").arg(self.control());
        command.args(&self.settings.arguments);
        command
    }

    /// The binary with this host's environment, yet without arguments.
    fn command(&self) -> Command {
        let mut command = Command::new(binary());
        let inherited = std::env::vars_os().filter(|(name, _)| {
            let name = name.to_string_lossy();
            !name.starts_with("BLOCKD_") && !name.starts_with("AWS_")
        });
        command.env_clear().envs(inherited).env("NO_COLOR", "1");
        command.envs(self.settings.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Changes how the next start is done.
    pub fn reconfigure(&mut self, change: impl FnOnce(Settings) -> Settings) {
        self.settings = change(std::mem::take(&mut self.settings));
    }

    /// Runs a command against this daemon, to its end.
    #[track_caller]
    pub fn cli<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Answer {
        let mut command = self.command();
        command.args(arguments).env("BLOCKD_CONTROL", self.control());
        let shown: Vec<_> = arguments.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        let output = command.stdin(Stdio::null()).output().expect("run the command line");
        Answer::new(format!("blockd {}", shown.join(" ")), &output)
    }

    /// Starts a command against this daemon without waiting for its end.
    #[track_caller]
    #[must_use]
    pub fn cli_in_background<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Child {
        self.command()
            .args(arguments)
            .env("BLOCKD_CONTROL", self.control())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start the command line")
    }

    /// Creates a disk.
    #[track_caller]
    pub fn create(&self, name: &str, size: &str) {
        let _created = self.cli(&["create", name, "--size", size]).ok();
    }

    /// Attaches a disk for writing.
    #[track_caller]
    #[must_use]
    pub fn attach(&self, name: &str) -> Export {
        Export::from_uri(self.cli(&["attach", name]).ok().line())
    }

    /// Creates a disk and attaches it.
    #[track_caller]
    #[must_use]
    pub fn create_attached(&self, name: &str, size: &str) -> Export {
        self.create(name, size);
        self.attach(name)
    }

    /// Attaches a disk for writing that another host held and is about to be silent.
    #[track_caller]
    #[must_use]
    pub fn take_over(&self, name: &str, limit: Duration) -> Export {
        let attached = wait::until(&format!("{name} can be taken over"), limit, || {
            let answer = self.cli(&["attach", name, "--accept-loss"]);
            assert!(answer.code == 0 || answer.code == 4, "take over {name}: {answer:#?}");
            (answer.code == 0).then_some(answer)
        });
        Export::from_uri(attached.line())
    }

    /// Detaches a disk.
    #[track_caller]
    pub fn detach(&self, name: &str) {
        let _detached = self.cli(&["detach", name]).ok();
    }

    /// Detaches a disk as soon as its clients, who have left, are gone for the daemon too.
    #[track_caller]
    pub fn detach_when_left(&self, name: &str) {
        wait::until_true(&format!("{name} can be detached"), START_LIMIT, || {
            let answer = self.cli(&["detach", name]);
            assert!(answer.code == 0 || answer.code == 4, "detach {name}: {answer:#?}");
            answer.code == 0
        });
    }

    /// Drains a disk.
    #[track_caller]
    pub fn drain(&self, name: &str) {
        let _drained = self.cli(&["drain", name]).ok();
    }

    /// What `show` tells of a disk.
    #[track_caller]
    #[must_use]
    pub fn show(&self, name: &str) -> serde_json::Value {
        self.cli(&["show", name, "--json"]).ok().json()
    }

    /// Kills the process as `kill -9` does, unless it has ended, and waits until it is gone.
    pub fn kill9(&mut self) {
        if self.exited().is_none() {
            self.signal(Signal::KILL);
        }
        self.reap();
    }

    /// Asks the process to end, and waits until it has; panics if it takes longer than it may or
    /// fails.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        self.await_end(STOP_LIMIT);
    }

    /// Waits until the process has ended by itself, successfully.
    #[track_caller]
    pub fn await_end(&mut self, limit: Duration) {
        let status = wait::until("the daemon ends", limit, || self.exited());
        self.reap();
        assert!(status.success(), "the daemon ended with {status}");
    }

    /// Stops and starts again.
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        self.launch();
    }

    /// Freezes the process: it neither acts nor notices.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets a frozen process go on.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid =
            i32::try_from(self.pid()).ok().and_then(Pid::from_raw).expect("a pid is positive");
        kill_process(pid, signal).expect("the process is there to be signalled");
    }

    /// The process id.
    #[track_caller]
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the daemon runs").child.id()
    }

    /// How the process ended, if it has.
    pub fn exited(&mut self) -> Option<std::process::ExitStatus> {
        let process = self.process.as_mut()?;
        process.child.try_wait().expect("a child can be waited for")
    }

    /// Memory that the process holds, in bytes.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/statm", self.pid());
        let text = std::fs::read_to_string(path).expect("the process is there");
        let pages = text.split(' ').nth(1).and_then(|field| field.parse::<u64>().ok());
        pages.expect("statm has a second field") * 4096
    }

    /// How many files the process has open.
    #[must_use]
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the process is there").count()
    }

    /// What the daemon logged.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The folder of everything that is this host's.
    #[must_use]
    pub fn place(&self) -> &Path {
        self.place.path()
    }

    /// The state directory.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.place.path().join("state")
    }

    /// The runtime directory, where sockets are.
    #[must_use]
    pub fn runtime_dir(&self) -> &Path {
        self.runtime.path()
    }

    /// The control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.runtime_dir().join("control.sock")
    }

    /// Ends the daemon and judges its log.
    #[track_caller]
    pub fn finish(mut self) {
        if self.process.is_some() {
            self.stop();
        }
        self.judge();
    }

    fn reap(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.child.wait().expect("a child can be waited for");
            process.reader.join().expect("the log reader does not panic");
        }
    }

    #[track_caller]
    fn judge(&self) {
        let unlisted = self.log.unlisted();
        assert!(
            unlisted.is_empty(),
            "the daemon logged what this test does not list: {unlisted:#?}"
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // A process that is gone already cannot be killed, which is as good.
            let _gone = process.child.kill();
        }
        self.reap();
        if std::thread::panicking() {
            let lines = self.log.lines();
            let tail = lines.len().saturating_sub(60);
            crate::report::say(&format!("daemon log, last lines:\n{}", lines[tail..].join("\n")));
        } else {
            self.judge();
        }
    }
}
