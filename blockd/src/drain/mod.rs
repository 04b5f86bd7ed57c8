//! From the log to the store: one module, one order.
//!
//! 1. **Seal** the dirty index at a cut: by size, by age, at a snapshot's barrier, or when somebody
//!    waits for the store.
//! 2. **Put** the newest version of everything in the sealed indexes as blobs, several at once.
//! 3. **Sync** the log through the cut: the log is never behind the store.
//! 4. **Swap** the head: the blobs join the tail, `drained` becomes the cut, and a snapshot whose
//!    barrier ends the batch joins the head in the same swap.
//! 5. **Copy** the new head to the state directory, so that a restart without the store finds a map
//!    that matches the log.
//! 6. **Publish** to readers: sealed entries become entries of the overlay, in one step.
//! 7. **Release** the log up to the cut.
//!
//! A crash before 4 leaves orphan blobs and a log that is replayed; after 4, the replay drains the
//! same blocks once more, harmlessly. Nothing is released before the swap that holds it. Retries have
//! no limit: a store that is down makes the log grow, and then writers wait. A head that another
//! writer changed ends the drain, and the disk with it.
//!
//! The drain owns the head: every other change of a held disk's head goes through [`Command`].

mod checkpoint;
mod gather;
mod plan;
mod upload;

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use wal::Lsn;

pub use checkpoint::{CheckpointPolicy, TableState};
pub use upload::{Names, Uploads};

use crate::disk::{self, Disk};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::head::{Head, Holder};
use crate::ids::SnapshotId;
use crate::lease::LeaseFiles;
use crate::objects::{self, HeadHandle, Refused, Tagged};
use crate::{clock, registry};

/// Bytes of data in one blob, at most.
const BLOB_BYTES_MAX: u64 = 16 << 20;

/// A change of a head, run on the copy that the next swap writes. It may run more than once.
pub type Change = Box<dyn Fn(&mut Head) -> Result<()> + Send + Sync>;

/// What the daemon asks of the drain of one disk.
#[expect(missing_debug_implementations, reason = "changes are functions")]
pub enum Command {
    /// Changes the head.
    Change(Change, oneshot::Sender<Result<Head>>),
    /// Drains everything and releases the lease. Not done when the asker is gone by then: its channel
    /// closes, and the reply says so.
    Release(oneshot::Sender<Result<Head>>, watch::Receiver<()>),
}

/// How the drain of a disk ended.
#[derive(Debug)]
pub enum Ended {
    /// The lease was released: the store holds everything.
    Released,
    /// The daemon is stopping: the log keeps what is not drained.
    Stopped,
    /// The disk stopped: its log is kept.
    Failed(Arc<Error>),
}

/// The drain of one disk.
#[derive(Debug)]
pub struct Drain {
    /// The disk.
    pub disk: Arc<Disk>,
    /// Its head.
    pub head: HeadHandle,
    /// Its small local files.
    pub files: LeaseFiles,
    /// What all drains share.
    pub uploads: Arc<Uploads>,
    /// Names of the objects it makes.
    pub names: Names,
    /// This daemon as the holder: its boot nonce goes into the head with the first swap.
    pub own: Holder,
    /// Whether the store has confirmed this host's identity: no swap before that.
    pub confirmed: watch::Receiver<bool>,
    /// Turns true when the daemon stops.
    pub stopping: watch::Receiver<bool>,
    /// When the tail is folded into the map.
    pub checkpoint: CheckpointPolicy,
    /// The blob table, once it was needed.
    pub table: TableState,
    /// Shows the head as last committed to whoever asks about the disk.
    pub published: watch::Sender<Arc<Head>>,
}

/// What to do next.
enum Next {
    Batch,
    Command(Command),
    Stop,
}

impl Drain {
    /// Drains until the disk is released, stops, or the daemon does.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) -> Ended {
        // What the last holder, or the takeover, left to be written out.
        if let Err(error) = self.write_snapshots().await {
            self.disk.stop(error);
            return self.failed();
        }
        loop {
            let outcome = match self.next(&mut commands).await {
                Next::Batch => self.batch().await,
                Next::Command(Command::Change(change, reply)) => {
                    let outcome = self.change(&change).await;
                    let lost = match &outcome {
                        Err(error) if error.kind() == Kind::LeaseLost => Err(copy_of(error)),
                        _ => Ok(()),
                    };
                    let _ = reply.send(outcome.map(|()| self.head.head().clone()));
                    lost
                }
                Next::Command(Command::Release(reply, asker)) => match self.release(asker).await {
                    Ok(true) => {
                        let _ = reply.send(Ok(self.head.head().clone()));
                        return Ended::Released;
                    }
                    Ok(false) => {
                        let _ = reply.send(Err(given_up(&self.disk)));
                        Ok(())
                    }
                    Err(error) => {
                        let _ = reply.send(Err(copy_of(&error)));
                        Err(error)
                    }
                },
                Next::Stop if self.disk.stopped().is_some() => return self.failed(),
                Next::Stop => return Ended::Stopped,
            };
            if let Err(error) = outcome {
                self.disk.stop(error);
            }
            if self.disk.stopped().is_some() {
                return self.failed();
            }
        }
    }

    fn failed(&self) -> Ended {
        Ended::Failed(self.disk.stopped().expect("only a stopped disk has failed"))
    }

    /// Waits for work. Nothing here asks the store for anything: an idle disk makes no request.
    async fn next(&mut self, commands: &mut mpsc::Receiver<Command>) -> Next {
        loop {
            if *self.stopping.borrow() || self.disk.stopped().is_some() {
                return Next::Stop;
            }
            // A command never waits behind a backlog.
            if let Ok(command) = commands.try_recv() {
                return Next::Command(command);
            }
            let wanted = self.disk.wanted() > self.disk.drained();
            let due = {
                let mut layers = self.disk.layers();
                if !layers.sealed.is_empty() {
                    return Next::Batch;
                }
                let now = Instant::now();
                let age = self.cut_age();
                let due = layers.active_since.map(|since| since + age);
                if due.is_some_and(|due| due <= now || wanted) {
                    layers.seal(None, now);
                    return Next::Batch;
                }
                due
            };
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.disk.wake_drain.notified() => {
                    if self.disk.stopped().is_some() {
                        return Next::Stop;
                    }
                }
                command = commands.recv() => match command {
                    Some(command) => return Next::Command(command),
                    None => return Next::Stop,
                },
                () = timer => {}
                _ = self.stopping.changed() => {}
            }
        }
    }

    /// A third of the bound on lag, when there is one that is nearer.
    fn cut_age(&self) -> std::time::Duration {
        let age = self.disk.policy.age;
        match self.disk.options.max_lag_ms {
            Some(ms) => age.min(std::time::Duration::from_millis(ms / 3)),
            None => age,
        }
    }

    /// One batch, in the order at the top of this file.
    async fn batch(&mut self) -> Result<()> {
        let sealed: Vec<_> = self.disk.layers().sealed.iter().cloned().collect();
        let Some(batch) = plan::plan(&sealed, BLOB_BYTES_MAX) else { return Ok(()) };
        drop(sealed);
        let cut = batch.cut;
        let blobs = self.uploads.put_all(&self.names, cut.get(), batch.blobs).await?;
        failpoint::pass("drain-after-put").await;
        self.disk.log().wait_synced(cut).await.map_err(|error| {
            Error::new(Kind::Poisoned, "the log failed while it was drained").with_source(error)
        })?;
        failpoint::pass("drain-before-swap").await;
        let barrier = batch.barrier;
        let change = |head: &mut Head| {
            let birth = head.generation;
            head.tail.extend(blobs.iter().map(|blob| blob.tail_entry(birth)));
            head.drained_lsn = cut.get();
            head.drained_unix_ms = clock::unix_ms();
            if let Some(barrier) = &barrier {
                let mut snapshot = head.snapshot(
                    barrier.name.clone(),
                    barrier.message.clone(),
                    barrier.id,
                    barrier.created_unix_ms,
                );
                // The disk may have grown since.
                snapshot.size_bytes = barrier.size_bytes;
                head.snapshots.push(snapshot);
            }
            Ok(())
        };
        if !self.swap(&change, Some(cut)).await? {
            // A head of ours that landed late holds this cut already.
            return Ok(());
        }
        failpoint::pass("drain-after-swap").await;
        let extents = blobs.iter().flat_map(|blob| &blob.extents);
        self.disk.commit(cut, extents.map(|extent| (extent.range, extent.location)));
        self.settle(cut).await?;
        self.write_snapshots().await?;
        self.checkpoint_if_due().await
    }

    /// What follows every commit: the log is released, and those who wait are told.
    async fn settle(&mut self, cut: Lsn) -> Result<()> {
        self.disk.log().release(cut);
        failpoint::pass("drain-after-release").await;
        self.disk.set_drained(cut);
        Ok(())
    }

    /// Commits a change and copies the new head to the state directory. With a `cut`, false when a
    /// late head of ours already holds it.
    async fn swap(
        &mut self,
        change: &(dyn Fn(&mut Head) -> Result<()> + Send + Sync),
        cut: Option<Lsn>,
    ) -> Result<bool> {
        self.confirmed.wait_for(|confirmed| *confirmed).await.map_err(|_| {
            Error::new(Kind::LeaseLost, "this host's identity was not confirmed by the store")
        })?;
        loop {
            let own = self.own.clone();
            let mut refusal = None;
            let outcome = self
                .head
                .swap(|head| {
                    head.holder.get_or_insert_with(|| own.clone()).boot = own.boot;
                    refusal = change(head).err();
                })
                .await?;
            assert!(refusal.is_none(), "changes are checked before they are committed");
            match outcome {
                Ok(()) => {
                    self.copy_head().await?;
                    return Ok(true);
                }
                Err(Refused::Lost(found)) => return Err(lost(&found)),
                Err(Refused::OursLate(found)) => {
                    self.adopt(*found).await?;
                    let covered = self.head.head().drained_lsn;
                    if cut.is_some_and(|cut| cut.get() <= covered) {
                        return Ok(false);
                    }
                }
            }
        }
    }

    async fn copy_head(&self) -> Result<()> {
        self.published.send_replace(Arc::new(self.head.head().clone()));
        let files = self.files.clone();
        let head = self.head.tagged().clone();
        tokio::task::spawn_blocking(move || files.store_head(&head))
            .await
            .expect("writing a small file does not panic")
    }

    /// Goes on from a head that a killed process of this attachment committed after we had read an
    /// older one. Its data came from the same log, so the dirty indexes still hold it or newer.
    async fn adopt(&mut self, found: Tagged<Head>) -> Result<()> {
        tracing::info!(
            disk = %self.disk.name,
            generation = found.value.generation,
            "a commit of the previous process landed late: going on from it"
        );
        let overlay =
            disk::tail_overlay(self.uploads.fetcher(), self.uploads.store(), &found.value.tail)
                .await?;
        let drained = Lsn::new(found.value.drained_lsn);
        self.disk.rebase(found.value.root, overlay, drained);
        self.table.forget();
        self.head.adopt(found);
        self.copy_head().await?;
        self.settle(drained).await
    }

    /// Commits a change that somebody asked for.
    async fn change(&mut self, change: &Change) -> Result<()> {
        // Tried on a copy first: a refusal must not end the disk.
        change(&mut self.head.head().successor())?;
        self.swap(change, None).await.map(drop)
    }

    /// Gives snapshots that a swap has published objects of their own; the next swap drops them from
    /// the head, and whoever attaches after a crash does the same.
    async fn write_snapshots(&mut self) -> Result<()> {
        let pending = self.head.head().snapshots.clone();
        if pending.is_empty() {
            return Ok(());
        }
        failpoint::pass("snapshot-after-swap").await;
        registry::write_snapshots(self.uploads.store(), &pending).await?;
        let written: Vec<SnapshotId> = pending.iter().map(|snapshot| snapshot.id).collect();
        let drop_written = move |head: &mut Head| {
            head.snapshots.retain(|snapshot| !written.contains(&snapshot.id));
            Ok(())
        };
        self.swap(&drop_written, None).await.map(drop)
    }

    /// Drains what is left, folds the tail into the map, and releases the lease. False when the
    /// asker went away first: the disk is then served on.
    async fn release(&mut self, mut asker: watch::Receiver<()>) -> Result<bool> {
        self.write_snapshots().await?;
        loop {
            // The store must answer before writes are refused: in an outage the disk is served on.
            let probe = objects::load_head(self.uploads.store(), self.disk.id);
            tokio::select! {
                _ = asker.changed() => return Ok(false),
                head = probe => drop(head?),
            }
            if self.disk.close_if_clean()? {
                break;
            }
            self.batch().await?;
            if *self.stopping.borrow() {
                return Ok(false);
            }
        }
        let release = |head: &mut Head| {
            head.holder = None;
            Ok(())
        };
        self.swap(&release, None).await?;
        failpoint::pass("detach-after-swap").await;
        Ok(true)
    }
}

fn lost(found: &Head) -> Error {
    let by = match &found.holder {
        Some(holder) => format!("{} (host {})", holder.hostname, holder.host),
        None => "another host, which has released it since".to_owned(),
    };
    Error::new(
        Kind::LeaseLost,
        format!("disk {} was taken over by {by} at epoch {}", found.name, found.epoch),
    )
    .with_fix(format!(
        "what was not drained is kept: `blockd recover {} NEW` makes a disk of it",
        found.name
    ))
}

fn given_up(disk: &Disk) -> Error {
    Error::new(Kind::StoreUnavailable, format!("disk {} stays attached: nobody waits", disk.name))
}

/// An error for the asker, where the original stops the disk.
fn copy_of(error: &Error) -> Error {
    let copy = Error::new(error.kind(), error.report());
    match error.fix() {
        Some(fix) => copy.with_fix(fix),
        None => copy,
    }
}
