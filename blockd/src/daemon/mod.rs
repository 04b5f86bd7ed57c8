//! The daemon: what all its disks share, how it starts and how it stops.
//!
//! At its start it takes the state directory's lock, finds out who it is, makes sure that the store
//! honours conditions, and serves every disk again that it served before, without being asked; a disk
//! that cannot be served says why and does not hold up the others. While the store is down it goes by
//! what is local, and no head is swapped before the store has confirmed the host's identity.
//!
//! SIGTERM and SIGINT stop it quickly: nothing is drained, the log keeps what is not in the store.

mod attach;
mod control;
mod detach;
mod exports;
mod forks;
mod inspect;
mod listeners;
mod recover;
mod snapshot_book;
mod snapshots;
mod start;
mod views;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::{Arc, Mutex};

use s3_backend::{RetryPolicy, Store};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use wal::LogDir;

pub use start::serve;

use crate::config::Config;
use crate::control::view::Access;
use crate::disk::{DirtyBudget, Disk};
use crate::drain::{Command, Uploads};
use crate::error::{Error, Result};
use crate::fetch::Fetcher;
use crate::head::{Head, StoreFormat};
use crate::host::Host;
use crate::ids::{DiskName, Target};
use crate::lease::{Observer, Offer};
use exports::Export;
use listeners::{Address, Listeners};
use snapshot_book::SnapshotBook;

/// The daemon.
#[derive(Debug)]
pub struct Daemon {
    config: Config,
    host: Host,
    /// Waits for ever: the data path.
    store: Store,
    format: Mutex<Option<StoreFormat>>,
    logs: Arc<LogDir>,
    fetcher: Arc<Fetcher>,
    uploads: Arc<Uploads>,
    dirty: Arc<DirtyBudget>,
    listeners: Listeners,
    observer: Observer,
    snapshots: SnapshotBook,
    served: Mutex<BTreeMap<Target, Arc<Served>>>,
    /// Disks that this host holds, or held, and cannot serve.
    broken: Mutex<BTreeMap<DiskName, Broken>>,
    /// One change of a disk's attachment at a time.
    turns: Mutex<HashMap<DiskName, Arc<tokio::sync::Mutex<()>>>>,
    confirmed: watch::Sender<bool>,
    stopping: watch::Sender<bool>,
    /// Turns true when every disk that was attached before the start is back, or known to be broken.
    resumed: watch::Sender<bool>,
    started: Instant,
    tasks: Tasks,
    /// What ends the daemon.
    fatal: mpsc::Sender<Error>,
    /// Held until the process ends: one daemon per state directory.
    _lock: File,
}

/// A disk or snapshot that clients can connect to.
#[derive(Debug)]
pub struct Served {
    target: Target,
    access: Access,
    offer: Offer,
    address: Address,
    export: Arc<Export>,
    writer: Option<Writer>,
}

/// What a writable attachment has besides its export.
#[derive(Debug)]
struct Writer {
    disk: Arc<Disk>,
    commands: mpsc::Sender<Command>,
    /// The head as last committed.
    head: watch::Receiver<Arc<Head>>,
    epoch: u64,
}

/// A disk that cannot be served, and why.
#[derive(Debug)]
struct Broken {
    reason: Arc<Error>,
}

impl Daemon {
    /// The store for one call of the control socket: it gives up.
    fn control_store(&self) -> Store {
        self.store.with_policy(RetryPolicy::Until(self.config.control_timeout))
    }

    /// Waits for the disks that are being served again, so that nobody is told they are not there.
    async fn wait_resumed(&self) {
        let mut resumed = self.resumed.subscribe();
        let _ = resumed.wait_for(|resumed| *resumed).await;
    }

    fn served(&self, target: &Target) -> Option<Arc<Served>> {
        self.served.lock().expect("no panic while held").get(target).cloned()
    }

    /// The attachment through which this daemon may write a disk.
    fn writer_of(&self, name: &DiskName) -> Option<Arc<Served>> {
        self.served(&Target { disk: name.clone(), snapshot: None })
            .filter(|served| served.writer.is_some())
    }

    fn all_served(&self) -> Vec<Arc<Served>> {
        self.served.lock().expect("no panic while held").values().cloned().collect()
    }

    /// Why a disk is not served; one whose name was lost with its record is known by its id.
    fn broken_reason(&self, name: &DiskName) -> Option<Arc<Error>> {
        let broken = self.broken.lock().expect("no panic while held");
        broken.get(name).map(|broken| Arc::clone(&broken.reason))
    }

    /// The turn to change how a disk is attached.
    async fn turn(&self, name: &DiskName) -> tokio::sync::OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock().expect("no panic while held");
            Arc::clone(turns.entry(name.clone()).or_default())
        };
        turn.lock_owned().await
    }
}

/// The daemon's background tasks: owned here, ended with the process.
#[derive(Debug, Default)]
struct Tasks(Mutex<JoinSet<()>>);

impl Tasks {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.0.lock().expect("no panic while held");
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

/// Runs a step that must not stop half-way in a task of its own: the caller may go away, it does not.
async fn to_the_end<T: Send + 'static>(
    step: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    match tokio::spawn(step).await {
        Ok(outcome) => outcome,
        Err(failure) => Err(Error::new(
            crate::error::Kind::Failed,
            format!("an internal step failed: {failure}"),
        )),
    }
}
