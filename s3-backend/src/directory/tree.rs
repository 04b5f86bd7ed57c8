//! Keys as paths, and the directories on the way.
//!
//! A key's segments are directories, its last one a file with `@` after the name: so `a` and `a/b` do
//! not collide (`a@` and `a/b@`), and files of others, which lack the mark, are not taken for objects.
//!
//! Directories come and go: the last object of one takes it along. That is safe because a name is
//! always given through the descriptor of the directory. If that was removed meanwhile, giving a name
//! fails, whatever stands at its path by then, and the way is made anew, under a lock that is held
//! until each step is durable.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::key::{ObjectKey, SEGMENT_BYTES_MAX};

/// What marks the file of an object.
const MARK: char = '@';

/// Open directories kept at most. A disk writes into three.
const OPEN_MAX: usize = 256;

const READ_DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The directory tree of a store.
#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
    /// Its lock is held while directories are made.
    making: std::path::PathBuf,
    open: Mutex<HashMap<String, Arc<OwnedFd>>>,
}

/// Something found in a directory: the key of an object, or `key/` of a directory.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Found(String);

impl Tree {
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        Ok(Self {
            root: File::open(root)?.into(),
            making: root.join("@locks/tree"),
            open: Mutex::default(),
        })
    }

    /// Opens the file of an object, if there is one.
    pub(super) fn open_object(&self, key: &ObjectKey) -> io::Result<Option<File>> {
        let path = format!("{key}{MARK}");
        match rustix::fs::openat(&self.root, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        {
            Ok(file) => Ok(Some(file.into())),
            // A file where the key has a directory: files of others, not an object.
            Err(Errno::NOENT | Errno::NOTDIR) => self.check_root().map(|()| None),
            Err(error) => Err(error.into()),
        }
    }

    /// Length of an object's file, if there is one.
    pub(super) fn file_bytes(&self, key: &str) -> io::Result<Option<u64>> {
        let path = format!("{key}{MARK}");
        match rustix::fs::statat(&self.root, path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => u64::try_from(stat.st_size).map(Some).map_err(io::Error::other),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The directory where a key's object is, if it exists, and the name of the file in it.
    ///
    /// Opened anew each time: one kept open may have been removed, and another made in its place.
    pub(super) fn find(&self, key: &ObjectKey) -> io::Result<Option<(OwnedFd, String)>> {
        let (directory, name) = split(key);
        match self.open_directory(directory) {
            Ok(open) => Ok(Some((open, name))),
            Err(Errno::NOENT | Errno::NOTDIR) => self.check_root().map(|()| None),
            Err(error) => Err(error.into()),
        }
    }

    /// The directory of a key, durably there, and the name of the key's file in it.
    pub(super) fn make(&self, key: &ObjectKey) -> io::Result<(Arc<OwnedFd>, String)> {
        let (directory, name) = split(key);
        if let Some(open) = self.opened(directory) {
            return Ok((open, name));
        }
        let open = Arc::new(self.make_directory(directory)?);
        let mut kept = self.open.lock().expect("no code panics while it holds the directories");
        if kept.len() >= OPEN_MAX {
            kept.clear();
        }
        kept.insert(directory.to_owned(), Arc::clone(&open));
        Ok((open, name))
    }

    /// Forgets a directory that turned out to be removed.
    pub(super) fn forget(&self, key: &ObjectKey) {
        let (directory, _) = split(key);
        self.open.lock().expect("no code panics while it holds the directories").remove(directory);
    }

    /// Removes the directory of a deleted key if it has become empty, and those above it.
    pub(super) fn prune(&self, key: &ObjectKey) {
        let (mut directory, _) = split(key);
        while !directory.is_empty() {
            // Most often it is not empty, and that is the answer we stop at.
            if rustix::fs::unlinkat(&self.root, directory, AtFlags::REMOVEDIR).is_err() {
                return;
            }
            self.open
                .lock()
                .expect("no code panics while it holds the directories")
                .remove(directory);
            directory = directory.rsplit_once('/').map_or("", |(parent, _)| parent);
        }
    }

    /// Absent is only absent in a store that is there.
    fn check_root(&self) -> io::Result<()> {
        if rustix::fs::fstat(&self.root)?.st_nlink == 0 {
            return Err(io::Error::other("the directory of the store was removed"));
        }
        Ok(())
    }

    fn opened(&self, directory: &str) -> Option<Arc<OwnedFd>> {
        let open = self.open.lock().expect("no code panics while it holds the directories");
        open.get(directory).cloned()
    }

    fn open_directory(&self, directory: &str) -> Result<OwnedFd, Errno> {
        let path = if directory.is_empty() { "." } else { directory };
        rustix::fs::openat(&self.root, path, READ_DIRECTORY, Mode::empty())
    }

    /// Makes every directory on the way and syncs its parent, also where another process made it:
    /// that one may have died before its sync.
    fn make_directory(&self, directory: &str) -> io::Result<OwnedFd> {
        self.check_root()?;
        let lock = std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.making)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        let mut here = self.open_directory("")?;
        for segment in directory.split('/').filter(|segment| !segment.is_empty()) {
            match rustix::fs::mkdirat(&here, segment, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            rustix::fs::fsync(&here)?;
            here = rustix::fs::openat(&here, segment, READ_DIRECTORY, Mode::empty())?;
        }
        Ok(here)
    }

    /// Up to `limit` keys that begin with `prefix` and come after `after`, in byte order.
    pub(super) fn list(&self, prefix: &str, after: &str, limit: usize) -> io::Result<Vec<String>> {
        self.check_root()?;
        let start = prefix.rfind('/').map_or("", |slash| &prefix[..=slash]);
        let mut keys = Vec::new();
        let mut todo = vec![Found(start.to_owned())];
        // A stack with the least on top: so keys come out in order, and only as far as needed.
        while let Some(Found(found)) = todo.pop() {
            if keys.len() == limit {
                break;
            }
            if found.is_empty() || found.ends_with('/') {
                let mut inside = self.read_directory(&found)?;
                inside.retain(|Found(key)| is_wanted(key, prefix, after));
                inside.sort_unstable_by(|a, b| b.cmp(a));
                todo.extend(inside);
            } else {
                keys.push(found);
            }
        }
        Ok(keys)
    }

    fn read_directory(&self, directory: &str) -> io::Result<Vec<Found>> {
        let open = match self.open_directory(directory.trim_end_matches('/')) {
            Ok(open) => open,
            // Pruned since we read its name, or never there.
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let mut found = Vec::new();
        for entry in Dir::new(open)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let is_directory = match entry.file_type() {
                FileType::Directory => true,
                FileType::RegularFile => false,
                FileType::Unknown => self.is_directory(&format!("{directory}{name}"))?,
                _ => continue,
            };
            if is_directory && is_segment(name) {
                found.push(Found(format!("{directory}{name}/")));
            } else if let Some(name) = name.strip_suffix(MARK)
                && !is_directory
                && is_segment(name)
            {
                found.push(Found(format!("{directory}{name}")));
            }
        }
        Ok(found)
    }

    /// For file systems that do not say what a name is.
    fn is_directory(&self, path: &str) -> io::Result<bool> {
        match rustix::fs::statat(&self.root, path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

fn split(key: &ObjectKey) -> (&str, String) {
    let (directory, name) = key.as_str().rsplit_once('/').unwrap_or(("", key.as_str()));
    (directory, format!("{name}{MARK}"))
}

fn is_segment(name: &str) -> bool {
    name.len() <= SEGMENT_BYTES_MAX && !name.contains('/') && ObjectKey::parse(name).is_ok()
}

/// Whether a key, or some key in a directory, is under the prefix and after the mark.
fn is_wanted(found: &str, prefix: &str, after: &str) -> bool {
    if found.ends_with('/') {
        let under = found.starts_with(prefix) || prefix.starts_with(found);
        under && (found > after || after.starts_with(found))
    } else {
        found.starts_with(prefix) && found > after
    }
}
