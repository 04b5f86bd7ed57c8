//! A disk that this host may write: what it answers, and when.
//!
//! - A write is acknowledged when killing the daemon cannot lose it: when the log says so.
//! - A flush is acknowledged when the log holds every acknowledged write on stable media, whichever
//!   connection it came from; on a `durability=remote` disk, when the store does.
//! - A read never sees an older version after a newer one was read or acknowledged.
//! - After a failed log write or sync, or a lost lease, the disk is stopped: it acknowledges nothing
//!   and changes nothing until the daemon restarts. What was acknowledged stays in the log.

mod budget;
mod frozen;
mod layers;
mod read;
mod recover;
mod write;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use wal::{Log, Lsn};

pub use budget::DirtyBudget;
pub use frozen::Frozen;
pub use layers::{Barrier, Dirty, Layers, Piece, Sealed, State};
pub use read::{Allocation, Part};
pub use recover::{replay, tail_overlay};

use crate::blob::Location;
use crate::error::{Error, Kind, Result};
use crate::extent_map::ExtentMap;
use crate::fetch::Fetcher;
use crate::geometry::BlockRange;
use crate::head::{DiskOptions, Durability};
use crate::ids::{DiskId, DiskName};
use crate::map::Root;

impl Drop for Disk {
    fn drop(&mut self) {
        if let Ok(layers) = self.layers.get_mut() {
            self.dirty.moved(layers.dirty_extents(), 0);
        }
    }
}

/// When writes are handed to the drain.
#[derive(Debug, Clone, Copy)]
pub struct CutPolicy {
    /// Log bytes after which the active index is sealed.
    pub bytes: u64,
    /// Age of the oldest undrained write after which it is.
    pub age: Duration,
    /// Undrained bytes of a disk above which writers wait; slowed from half of it on.
    pub undrained_bytes_max: u64,
}

/// A disk attached for writing.
#[derive(Debug)]
pub struct Disk {
    /// Identity.
    pub id: DiskId,
    /// Name under which it was attached.
    pub name: DiskName,
    /// What it was created with.
    pub options: DiskOptions,
    /// When writes are handed to the drain.
    pub policy: CutPolicy,
    size_bytes: AtomicU64,
    log: Log,
    layers: Mutex<Layers>,
    /// Memory of dirty indexes, shared with all disks.
    dirty: Arc<DirtyBudget>,
    /// Reads what is in the store, through the cache.
    pub fetcher: Arc<Fetcher>,
    /// The drain has work: an index was sealed, or somebody waits for one.
    pub(crate) wake_drain: Notify,
    /// Somebody waits until the store holds everything up to this position.
    wanted: AtomicU64,
    /// The position that the store holds.
    drained: watch::Sender<u64>,
    /// A read-modify-write ended, room came free, or the disk stopped.
    released: Notify,
}

impl Disk {
    /// A disk over its recovered layers.
    #[must_use]
    #[expect(clippy::too_many_arguments, reason = "one call, right after recovery made them all")]
    pub fn new(
        id: DiskId,
        name: DiskName,
        options: DiskOptions,
        policy: CutPolicy,
        dirty: Arc<DirtyBudget>,
        size_bytes: u64,
        log: Log,
        layers: Layers,
        drained: Lsn,
        fetcher: Arc<Fetcher>,
    ) -> Self {
        dirty.moved(0, layers.dirty_extents());
        Self {
            id,
            name,
            options,
            policy,
            dirty,
            size_bytes: AtomicU64::new(size_bytes),
            log,
            layers: Mutex::new(layers),
            fetcher,
            wake_drain: Notify::new(),
            wanted: AtomicU64::new(0),
            drained: watch::Sender::new(drained.get()),
            released: Notify::new(),
        }
    }

    /// Size in bytes, now: a disk grows while it is served.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Makes a size visible that a swap has committed.
    pub fn set_size_bytes(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    /// The log, for its positions.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Publishes a commit to readers; see [`Layers::commit`].
    pub(crate) fn commit(
        &self,
        cut: Lsn,
        committed: impl IntoIterator<Item = (BlockRange, Location)>,
    ) {
        let mut layers = self.layers();
        let before = layers.dirty_extents();
        layers.commit(cut, committed);
        self.dirty.moved(before, layers.dirty_extents());
    }

    /// Puts a committed state under what is still dirty: it came from the same log, up to `drained`.
    pub(crate) fn rebase(&self, root: Root, overlay: ExtentMap<Location>, drained: Lsn) {
        let mut layers = self.layers();
        let before = layers.dirty_extents();
        layers.root = root;
        layers.overlay = overlay;
        layers.forget_sealed(drained);
        self.dirty.moved(before, layers.dirty_extents());
    }

    /// The layers; held for moments only.
    ///
    /// # Panics
    /// When another holder panicked: the index may then be half changed.
    pub fn layers(&self) -> MutexGuard<'_, Layers> {
        self.layers.lock().expect("no panic while the layers are held")
    }

    /// The reason why the disk does not take this request, if there is one.
    fn check_serving(layers: &Layers) -> Result<()> {
        match &layers.state {
            State::Serving => Ok(()),
            State::Closing => Err(Error::new(Kind::Poisoned, "the disk is being detached")),
            State::Stopped(reason) => {
                Err(Error::new(Kind::Poisoned, format!("the disk stopped: {}", reason.report())))
            }
        }
    }

    /// Stops the disk for good: nothing is acknowledged after this returns.
    pub fn stop(&self, reason: Error) {
        let mut layers = self.layers();
        if matches!(layers.state, State::Stopped(_)) {
            return;
        }
        tracing::error!(disk = %self.name, reason = %reason.report(), "disk stopped");
        layers.state = State::Stopped(Arc::new(reason));
        drop(layers);
        self.released.notify_waiters();
        self.wake_drain.notify_one();
        // Whoever waits for the drain looks at the state again.
        self.drained.send_modify(|_| ());
    }

    /// Why the disk stopped, if it did.
    #[must_use]
    pub fn stopped(&self) -> Option<Arc<Error>> {
        match &self.layers().state {
            State::Stopped(reason) => Some(Arc::clone(reason)),
            _ => None,
        }
    }

    /// Takes no more writes when the store holds everything; else seals what it does not, and says
    /// that there is something to drain.
    ///
    /// # Errors
    /// When the disk has stopped.
    pub(crate) fn close_if_clean(&self) -> Result<bool> {
        let mut layers = self.layers();
        Self::check_serving(&layers)?;
        if layers.sealed.is_empty() {
            layers.seal(None, Instant::now());
        }
        if layers.sealed.is_empty() {
            layers.state = State::Closing;
        }
        Ok(layers.sealed.is_empty())
    }

    /// Takes writes again: the detach did not go through.
    pub fn resume_serving(&self) {
        let mut layers = self.layers();
        if matches!(layers.state, State::Closing) {
            layers.state = State::Serving;
        }
    }

    /// Everything acknowledged is on stable media when this returns, and in the store on a
    /// `durability=remote` disk. Returns the position it covers.
    ///
    /// # Errors
    /// [`Kind::Poisoned`] when the log failed or the disk stopped: nothing is promised then.
    pub async fn flush(&self) -> Result<Lsn> {
        let target = {
            let layers = self.layers();
            if let State::Stopped(_) = &layers.state {
                Self::check_serving(&layers)?;
            }
            layers.last
        };
        self.make_durable(target).await?;
        Ok(target)
    }

    async fn make_durable(&self, lsn: Lsn) -> Result<()> {
        self.log.wait_synced(lsn).await.map_err(|error| self.log_failed(error))?;
        if self.options.durability == Durability::Remote {
            self.wait_drained(lsn).await?;
        }
        match self.stopped() {
            None => Ok(()),
            Some(_) => Self::check_serving(&self.layers()),
        }
    }

    fn log_failed(&self, error: wal::Error) -> Error {
        let reason = || Error::new(Kind::Poisoned, "the log failed");
        self.stop(reason().with_source(error).with_fix(
            "see the log device's health, then restart the daemon: acknowledged writes are kept",
        ));
        reason()
    }

    /// Asks the drain not to wait for size or age up to `lsn`.
    pub fn want_drained(&self, lsn: Lsn) {
        self.wanted.fetch_max(lsn.get(), Ordering::AcqRel);
        self.wake_drain.notify_one();
    }

    /// The store holds everything up to `lsn` when this returns.
    ///
    /// # Errors
    /// [`Kind::Poisoned`] when the disk stopped before.
    pub async fn wait_drained(&self, lsn: Lsn) -> Result<()> {
        self.want_drained(lsn);
        let mut drained = self.drained.subscribe();
        let reached = drained
            .wait_for(|drained| *drained >= lsn.get() || self.stopped().is_some())
            .await
            .expect("self holds the sender");
        if *reached >= lsn.get() {
            return Ok(());
        }
        drop(reached);
        Self::check_serving(&self.layers())
    }

    /// The position that somebody waits to see in the store.
    pub(crate) fn wanted(&self) -> Lsn {
        Lsn::new(self.wanted.load(Ordering::Acquire))
    }

    /// Tells waiters that the store holds everything up to `lsn`.
    pub(crate) fn set_drained(&self, lsn: Lsn) {
        self.drained.send_modify(|drained| *drained = (*drained).max(lsn.get()));
        self.released.notify_waiters();
    }

    /// The position that the store holds.
    #[must_use]
    pub fn drained(&self) -> Lsn {
        Lsn::new(*self.drained.borrow())
    }

    /// Log bytes that are not in the store, and for how long the oldest of them has been there.
    #[must_use]
    pub fn undrained(&self) -> (u64, Duration) {
        let layers = self.layers();
        let age = layers.undrained_since().map_or(Duration::ZERO, |since| since.elapsed());
        (layers.undrained_bytes(), age)
    }

    /// Takes a snapshot: a barrier in the log at one position, durable here when this returns.
    ///
    /// # Errors
    /// [`Kind::Poisoned`] when the disk stopped.
    pub async fn snapshot(&self, barrier: Barrier) -> Result<Lsn> {
        let payload = serde_json::to_vec(&barrier).expect("a barrier is plain data");
        let lsn = loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            {
                let mut layers = self.layers();
                Self::check_serving(&layers)?;
                match self.log.append(wal::Record::Barrier { payload: &payload }) {
                    Ok(appended) => {
                        layers.last = appended.lsn;
                        layers.seal(Some(barrier), Instant::now());
                        break appended.lsn;
                    }
                    Err(error) if error.kind() == wal::ErrorKind::Full => {}
                    Err(error) => {
                        drop(layers);
                        return Err(self.log_failed(error));
                    }
                }
            }
            tokio::select! { () = self.log.room() => {}, () = released => {} }
        };
        self.wake_drain.notify_one();
        self.log.wait_synced(lsn).await.map_err(|error| self.log_failed(error))?;
        Ok(lsn)
    }
}
