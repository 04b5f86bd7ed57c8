//! The seam between the log and the world: files ([`Storage`], [`LogFile`]), time ([`Clock`]) and
//! chance. Everything that is not a pure function of bytes comes in here, so that a simulator can
//! replace all of it and one seed decides a run.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// What must be true when a write returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The device has it; a power cut may lose it.
    Volatile,
    /// It is on stable media, and so is every earlier write that was stable too.
    Stable,
}

/// One file of the log, read and written in whole blocks of 4 KiB.
pub trait LogFile: Send + Sync + fmt::Debug {
    /// Writes all of `parts`, one behind the other, or fails.
    ///
    /// # Errors
    /// When any part may not have been written.
    fn write_at(&self, parts: &[&[u8]], offset: u64, durability: Durability) -> io::Result<()>;

    /// Fills `out` from `offset`; returns less than its length only at the end of the file.
    ///
    /// # Errors
    /// When the device refuses.
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Puts every completed write on stable media.
    ///
    /// # Errors
    /// When it may not be there; then nobody may believe a later success either.
    fn sync(&self) -> io::Result<()>;

    /// The length of the file.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn bytes(&self) -> io::Result<u64>;
}

/// The folder of a log. Names are relative to it; `""` is the folder itself.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The names in a folder; nothing when it does not exist.
    ///
    /// # Errors
    /// When the folder cannot be read.
    fn list(&self, folder: &str) -> io::Result<Vec<String>>;

    /// Creates a file of zeros that are written and on stable media. Its *name* is not stable
    /// before [`Storage::sync_folder`]. A failure leaves no file.
    ///
    /// # Errors
    /// When it exists, or there is no room (`StorageFull`, `QuotaExceeded`), or the device refuses.
    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>>;

    /// Opens a file.
    ///
    /// # Errors
    /// When it is absent or cannot be opened.
    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>>;

    /// Renames a file, over another one if need be.
    ///
    /// # Errors
    /// When the file system refuses.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// When the file system refuses.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Creates a folder and those above it; it may exist.
    ///
    /// # Errors
    /// When the file system refuses.
    fn create_folder(&self, folder: &str) -> io::Result<()>;

    /// Puts the names in a folder on stable media.
    ///
    /// # Errors
    /// When they may not be there.
    fn sync_folder(&self, folder: &str) -> io::Result<()>;

    /// Where it is, for messages.
    fn path(&self) -> &Path;

    /// Whether writes pass through the page cache because the file system knows no direct I/O.
    fn is_buffered(&self) -> bool;
}

/// Monotonic time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;
}

/// The clock of the machine.
#[derive(Debug)]
pub struct MachineClock {
    start: Instant,
}

impl MachineClock {
    /// A clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self { start: now() }
    }
}

impl Default for MachineClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MachineClock {
    fn now(&self) -> Duration {
        now().duration_since(self.start)
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place where time enters this crate")]
fn now() -> Instant {
    Instant::now()
}
