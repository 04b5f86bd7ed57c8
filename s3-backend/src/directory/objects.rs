//! The operations of the directory store, blocking, one call each: scratch file, name, sync.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rustix::fs::{AtFlags, fsync};
use rustix::io::Errno;

use super::file::{self, FOOTER_BYTES, Footer, ReadError};
use super::scratch::{Scratch, Temporary, nonce};
use super::tree::Tree;
use crate::counters::count_of;
use crate::error::{Error, Kind};
use crate::key::{ETag, ObjectKey};
use crate::store::{Deletions, ListEntry, ListPage, ListToken, Object, ObjectMeta};

/// How often the way to a name is made anew when others keep removing it.
const NAME_ATTEMPTS_MAX: usize = 16;

#[derive(Debug)]
pub(super) struct Objects {
    root: PathBuf,
    tree: Tree,
    scratch: Scratch,
}

impl Objects {
    pub(super) fn open(root: &Path) -> Result<Self, Error> {
        let open = || -> io::Result<Self> {
            make_root(root)?;
            Ok(Self {
                root: root.to_owned(),
                tree: Tree::open(root)?,
                scratch: Scratch::open(root)?,
            })
        };
        open().map_err(|error| io_error(error, format!("open store {}", root.display())))
    }

    pub(super) fn put_new(&self, key: &ObjectKey, body: &[u8]) -> Result<ETag, Error> {
        for _ in 0..NAME_ATTEMPTS_MAX {
            let (temporary, footer) = self.write(body).map_err(|e| self.error("put", key, e))?;
            let (directory, name) = self.tree.make(key).map_err(|e| self.error("put", key, e))?;
            match temporary.link(directory.as_fd(), &name) {
                Ok(()) => {
                    fsync(&directory).map_err(|e| self.unclear("put", key, e.into()))?;
                    return Ok(footer.etag());
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // Whoever put it may not have come to the sync. Before anyone relies on its
                    // being there, it has to stay there.
                    fsync(&directory).map_err(|e| self.error("put", key, e.into()))?;
                    return Err(Error::new(Kind::Exists, self.describe("put", key)));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.tree.forget(key),
                Err(error) => return Err(self.error("put", key, error)),
            }
        }
        let text = format!("{}: its directory vanishes", self.describe("put", key));
        Err(Error::new(Kind::Unavailable, text))
    }

    pub(super) fn put_if_match(
        &self,
        key: &ObjectKey,
        body: &[u8],
        expected: &ETag,
    ) -> Result<ETag, Error> {
        let failed = |error: io::Error| self.error("swap", key, error);
        let (temporary, footer) = self.write(body).map_err(failed)?;
        let _lock = self.scratch.lock(key).map_err(failed)?;
        let Some(current) = self.tree.open_object(key).map_err(failed)? else {
            return Err(Error::new(Kind::NotFound, self.describe("swap", key)));
        };
        let current = file::read_footer(&current).map_err(|e| self.read_error("swap", key, e))?;
        let found = self.tree.find(key).map_err(failed)?;
        let Some((directory, name)) = found else {
            return Err(Error::new(Kind::NotFound, self.describe("swap", key)));
        };
        if current.etag() != *expected {
            // As in `put_new`: what rules us out has to stay.
            fsync(&directory).map_err(|e| failed(e.into()))?;
            let text = format!(
                "{}: expected version {expected}, found {}",
                self.describe("swap", key),
                current.etag()
            );
            return Err(Error::new(Kind::Conflict, text));
        }
        temporary.rename(directory.as_fd(), &name).map_err(failed)?;
        fsync(&directory).map_err(|e| self.unclear("swap", key, e.into()))?;
        Ok(footer.etag())
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Result<Object, Error> {
        let file = self.open_object("get", key)?;
        let (body, footer) = file::read(file).map_err(|e| self.read_error("get", key, e))?;
        Ok(Object { body, etag: footer.etag() })
    }

    pub(super) fn get_range(&self, key: &ObjectKey, range: Range<u64>) -> Result<Bytes, Error> {
        let file = self.open_object("get", key)?;
        file::read_range(file, range).map_err(|e| self.read_error("get", key, e))
    }

    pub(super) fn stat(&self, key: &ObjectKey) -> Result<ObjectMeta, Error> {
        let file = self.open_object("stat", key)?;
        let footer = file::read_footer(&file).map_err(|e| self.read_error("stat", key, e))?;
        Ok(ObjectMeta { size: footer.body_bytes, etag: footer.etag() })
    }

    pub(super) fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<ListPage, Error> {
        let failed = |error| io_error(error, format!("list {}/{prefix}", self.root.display()));
        let keys = self.tree.list(prefix, after, limit).map_err(failed)?;
        let next = match keys.last() {
            Some(last) if keys.len() == limit => Some(ListToken(last.clone())),
            _ => None,
        };
        let mut entries = Vec::with_capacity(keys.len());
        for key in keys {
            // One that is gone by now was deleted meanwhile: it is not part of the listing.
            if let Some(file_bytes) = self.tree.file_bytes(&key).map_err(failed)? {
                let size = file_bytes.saturating_sub(count_of(FOOTER_BYTES));
                entries.push(ListEntry { key: ObjectKey::parse(key)?, size });
            }
        }
        Ok(ListPage { entries, next })
    }

    pub(super) fn delete_many(&self, keys: &[ObjectKey]) -> Deletions {
        let delete = |key: &ObjectKey| {
            let result = self.delete(key).map_err(|error| self.error("delete", key, error));
            (key.clone(), result)
        };
        keys.iter().map(delete).collect()
    }

    /// Not synced: a deletion that a power cut undoes leaks an object and harms nothing.
    fn delete(&self, key: &ObjectKey) -> io::Result<()> {
        let _lock = self.scratch.lock(key)?;
        let Some((directory, name)) = self.tree.find(key)? else { return Ok(()) };
        match rustix::fs::unlinkat(&directory, &name, AtFlags::empty()) {
            Ok(()) => self.tree.prune(key),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn write(&self, body: &[u8]) -> io::Result<(Temporary<'_>, Footer)> {
        let footer = Footer::new(body, nonce()?);
        let (temporary, mut file) = self.scratch.create()?;
        file::write(&mut file, body, &footer)?;
        Ok((temporary, footer))
    }

    fn open_object(&self, verb: &str, key: &ObjectKey) -> Result<std::fs::File, Error> {
        let file = self.tree.open_object(key).map_err(|error| self.error(verb, key, error))?;
        file.ok_or_else(|| Error::new(Kind::NotFound, self.describe(verb, key)))
    }

    fn describe(&self, verb: &str, key: &ObjectKey) -> String {
        format!("{verb} {}/{key}", self.root.display())
    }

    fn error(&self, verb: &str, key: &ObjectKey, error: io::Error) -> Error {
        io_error(error, self.describe(verb, key))
    }

    /// The name was given, but it may not last.
    fn unclear(&self, verb: &str, key: &ObjectKey, error: io::Error) -> Error {
        Error::new(Kind::Ambiguous, self.describe(verb, key)).with_source(error)
    }

    fn read_error(&self, verb: &str, key: &ObjectKey, error: ReadError) -> Error {
        match error {
            ReadError::Io(error) => self.error(verb, key, error),
            ReadError::Damaged(damage) => {
                let text = format!("{}: {}", self.describe(verb, key), damage.0);
                Error::new(Kind::Corrupt, text)
            }
        }
    }
}

/// Creates the root where it is missing, durably.
fn make_root(root: &Path) -> io::Result<()> {
    if root.is_dir() {
        return Ok(());
    }
    let parent = root.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    make_root(parent)?;
    match std::fs::create_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && root.is_dir() => {}
        result => result?,
    }
    fsync(std::fs::File::open(parent)?)?;
    Ok(())
}

/// A full disk, a failing disk and a directory that is gone are outages: they may heal.
fn io_error(error: io::Error, context: String) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Kind::Denied,
        _ => Kind::Unavailable,
    };
    Error::new(kind, context).with_source(error)
}
