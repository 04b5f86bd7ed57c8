//! Scratch files, where objects are written before they get their names, and the locks of keys.
//!
//! ```text
//! <root>/@tmp/lock            held while a scratch directory is made or swept
//! <root>/@tmp/<nonce>/lock    held by the process that writes there, for as long as it lives
//! <root>/@tmp/<nonce>/<n>     objects not yet named
//! <root>/@locks/<00..3f>      locks for swaps and deletions, shared by the keys of one hash
//! ```
//!
//! `@` cannot occur in a key, so none of this can be taken for an object. A scratch directory whose
//! lock is free belongs to a process that has died: it is swept.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, unlinkat};

use crate::key::ObjectKey;

/// Locks for all keys together; two keys that share one wait for each other, nothing worse.
const LOCKS: u32 = 64;

/// This process's scratch directory.
#[derive(Debug)]
pub(super) struct Scratch {
    directory: OwnedFd,
    locks: PathBuf,
    counter: AtomicU64,
    /// Held, not used: its lock says that we are alive.
    _alive: File,
}

impl Scratch {
    /// Sweeps what the dead left, and makes a directory for this process.
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let parent = root.join("@tmp");
        let locks = root.join("@locks");
        fs::create_dir_all(&parent)?;
        fs::create_dir_all(&locks)?;
        let guard = open_lock(&parent.join("lock"))?;
        flock(&guard, FlockOperation::LockExclusive)?;
        sweep(&parent)?;
        let path = parent.join(format!("{:016x}", nonce()?));
        fs::create_dir(&path)?;
        let alive = open_lock(&path.join("lock"))?;
        flock(&alive, FlockOperation::NonBlockingLockExclusive)?;
        let directory = File::open(&path)?.into();
        Ok(Self { directory, locks, counter: AtomicU64::new(0), _alive: alive })
    }

    /// A fresh file, which is gone again unless it gets a name.
    pub(super) fn create(&self) -> io::Result<(Temporary<'_>, File)> {
        let name = self.counter.fetch_add(1, Relaxed).to_string();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&self.directory, &name, flags, Mode::from_raw_mode(0o644))?;
        Ok((Temporary { scratch: self, name, named: false }, file.into()))
    }

    /// Waits for the lock of a key; it ends when the returned file is closed.
    pub(super) fn lock(&self, key: &ObjectKey) -> io::Result<File> {
        let stripe = crc32fast::hash(key.as_str().as_bytes()) % LOCKS;
        let file = open_lock(&self.locks.join(format!("{stripe:02x}")))?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.map(|()| file).map_err(io::Error::from),
            }
        }
    }
}

/// A scratch file on its way to a name.
#[derive(Debug)]
pub(super) struct Temporary<'a> {
    scratch: &'a Scratch,
    name: String,
    named: bool,
}

impl Temporary<'_> {
    /// Gives it a name that is not taken. The error is `AlreadyExists` where it is.
    pub(super) fn link(self, directory: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        let from = self.scratch.directory.as_fd();
        Ok(rustix::fs::linkat(from, &self.name, directory, name, AtFlags::empty())?)
    }

    /// Puts it in the place of what has the name now.
    pub(super) fn rename(mut self, directory: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        rustix::fs::renameat(&self.scratch.directory, &self.name, directory, name)?;
        self.named = true;
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.named {
            // What cannot be removed now is swept when the store is opened next.
            let _ = unlinkat(&self.scratch.directory, &self.name, AtFlags::empty());
        }
    }
}

/// A number that no other write has: it makes each version of an object one of a kind.
pub(super) fn nonce() -> io::Result<u64> {
    getrandom::u64().map_err(io::Error::other)
}

fn open_lock(path: &Path) -> io::Result<File> {
    fs::OpenOptions::new().create(true).truncate(false).write(true).open(path)
}

/// Removes the scratch directories of processes that are no more.
fn sweep(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let lock = open_lock(&entry.path().join("lock"))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
