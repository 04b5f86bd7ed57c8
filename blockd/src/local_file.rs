//! Small files of the state directory: written whole, fsynced, renamed into place.
//!
//! A reader sees the old file or the new one, never a part; leftovers of a killed writer end in
//! `.tmp` and are ignored. Contents are documents, so a damaged one is an error that names the file.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::thread::Timespec;

use crate::document::{self, Document};
use crate::error::{Error, Kind, Result};

/// How often a lock is asked for before somebody else has it: for a second in all.
const LOCK_TRIES: usize = 50;

/// Pause between two tries, in nanoseconds.
const LOCK_PAUSE_NS: i64 = 20_000_000;

/// Writes `value` to `path` so that it is there after a power cut once this returns.
///
/// # Errors
/// [`Kind::Failed`] naming the file when the file system refuses.
pub fn store<T: Document>(path: &Path, value: &T) -> Result<()> {
    store_bytes(path, &document::encode(value)).map_err(|error| failed("write", path, error))
}

#[expect(clippy::disallowed_methods, reason = "the durability point of the small local files")]
fn store_bytes(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    sync_parent(path)
}

#[expect(clippy::disallowed_methods, reason = "the durability point of the small local files")]
fn sync_parent(path: &Path) -> std::io::Result<()> {
    let parent = path.parent().expect("files of the state directory have a parent");
    File::open(parent)?.sync_all()
}

/// Reads a document back; none when there is no such file.
///
/// # Errors
/// [`Kind::Corrupt`] naming the file when it is damaged, [`Kind::Failed`] when it cannot be read.
pub fn load<T: Document>(path: &Path) -> Result<Option<T>> {
    match std::fs::read(path) {
        Ok(bytes) => document::decode(&bytes, &path.display().to_string()).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read", path, error)),
    }
}

/// Removes a file, so that it stays removed after a power cut.
///
/// # Errors
/// [`Kind::Failed`] naming the file.
pub fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Ok(()) => sync_parent(path).map_err(|error| failed("remove", path, error)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed("remove", path, error)),
    }
}

/// Makes a directory and its parents, so that they are there after a power cut.
///
/// # Errors
/// [`Kind::Failed`] naming the directory.
pub fn create_dir(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_dir(parent)?;
    }
    match std::fs::create_dir(path) {
        Ok(()) => sync_parent(path).map_err(|error| failed("create", path, error)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed("create", path, error)),
    }
}

/// Takes the lock that makes one daemon the owner of a state directory, for as long as the returned
/// file lives. The file holds the owner's process id, for the message of the one that comes second.
///
/// # Errors
/// [`Kind::DiskBusy`] naming the owner when another process has it.
pub fn lock_dir(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let mut file = OpenOptions::new()
        .create(true)
        .read(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .map_err(|error| failed("open", &path, error))?;
    if !try_lock(&file) {
        let owner = std::fs::read_to_string(&path).unwrap_or_default();
        return Err(Error::new(
            Kind::DiskBusy,
            format!(
                "state directory {} is used by another blockd (process {})",
                dir.display(),
                owner.trim()
            ),
        )
        .with_fix("stop that process, or give this one its own --state-dir"));
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(|error| failed("write", &path, error))?;
    Ok(file)
}

/// A killed process keeps its locks until its last I/O has ended: it gets a moment.
fn try_lock(file: &File) -> bool {
    let lock = || rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok();
    (0..LOCK_TRIES).any(|_| {
        lock() || {
            let pause = Timespec { tv_sec: 0, tv_nsec: LOCK_PAUSE_NS };
            let _ = rustix::thread::nanosleep(&pause);
            false
        }
    })
}

fn failed(verb: &str, path: &Path, error: std::io::Error) -> Error {
    Error::new(Kind::Failed, format!("cannot {verb} {}", path.display())).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::NameRecord;
    use crate::ids::Nonce;

    #[test]
    fn a_second_owner_is_refused_and_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock_dir(dir.path()).unwrap();
        let error = lock_dir(dir.path()).unwrap_err();
        assert!(error.report().contains(&std::process::id().to_string()), "{error:?}");
        drop(first);
        lock_dir(dir.path()).unwrap();
    }

    #[test]
    fn a_damaged_file_is_named_and_a_missing_one_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        assert!(load::<NameRecord>(&path).unwrap().is_none());
        let record = NameRecord { disk: None, nonce: Nonce(7) };
        store(&path, &record).unwrap();
        assert_eq!(load::<NameRecord>(&path).unwrap(), Some(record));
        std::fs::write(&path, b"").unwrap();
        let error = load::<NameRecord>(&path).unwrap_err();
        assert!(error.report().contains("x.json"), "{error:?}");
    }
}
