//! The outside programs that scenarios drive: fio, nbdcopy, qemu-io, e2fsck and their kind.
//!
//! A missing tool skips its test and says why; where `CI=true` a skip would hide a hole, so there
//! it is a failure.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::report;

/// An outside program that was found.
#[derive(Debug, Clone)]
pub struct Tool(PathBuf);

impl Tool {
    /// A command line of this tool, yet without arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        Command::new(&self.0)
    }

    /// Runs the tool to its end and returns what it said, whatever its exit code.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Output {
        self.command()
            .args(arguments)
            .output()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", self.0.display()))
    }

    /// Runs the tool and panics with all it said unless it succeeds; returns its stdout.
    #[track_caller]
    pub fn must<S: AsRef<OsStr>>(&self, arguments: &[S]) -> String {
        let output = self.run(arguments);
        let shown: Vec<_> = arguments.iter().map(|argument| argument.as_ref()).collect();
        assert!(
            output.status.success(),
            "{} {shown:?}: {}\n{}{}",
            self.0.display(),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// Finds `name`, or says that the calling test is skipped; panics instead where `CI=true`.
#[track_caller]
pub fn need(name: &str) -> Option<Tool> {
    let found = find(name);
    if found.is_none() {
        skip(&format!("{name} is not installed"));
    }
    found
}

/// Says that the calling test is skipped because of `reason`; panics instead where `CI=true`.
#[track_caller]
pub fn skip(reason: &str) {
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "not to be skipped: {reason}");
    report::say(&format!("skipped: {reason}"));
}

/// Finds `name` in `PATH` or where system tools live.
#[must_use]
pub fn find(name: &str) -> Option<Tool> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| is_executable(candidate))
        .map(Tool)
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Copies a folder and all it holds to a place where there is none yet.
#[track_caller]
pub fn copy_folder(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("run cp");
    assert!(copied.success(), "copy {} to {}", from.display(), to.display());
}

/// The right to load the machine heavily, held by one test at a time: tests run in parallel, and
/// two that saturate the disk would only stretch each other.
#[must_use = "the turn ends when this is dropped"]
pub fn heavy() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many rounds a repeated test runs: `BLOCKD_ROUNDS`, or `default`.
#[must_use]
pub fn rounds(default: usize) -> usize {
    std::env::var("BLOCKD_ROUNDS")
        .map_or(default, |text| text.parse().expect("BLOCKD_ROUNDS is a decimal number"))
}
