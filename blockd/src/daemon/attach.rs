//! Attaching and detaching: from a name to an export that accepts clients, and back.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use s3_backend::Store;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use wal::Lsn;

use super::detach::close_log;
use super::exports::Export;
use super::listeners::Address;
use super::{Broken, Daemon, Served, Writer, to_the_end};
use crate::control::Call;
use crate::control::api::{Attach, AttachReply, Fork, Progress};
use crate::control::view::Access;
use crate::disk::{self, CutPolicy, Disk, Frozen, Layers};
use crate::drain::{CheckpointPolicy, Command, Drain, Ended, Names, TableState};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::head::{DiskState, Head, Holder, Snapshot};
use crate::ids::{DiskName, SnapshotName, Target};
use crate::lease::{self, Attachment, LeaseFiles, Offer, Takeover};
use crate::objects::{HeadHandle, Tagged};
use crate::registry;

/// How often a held disk is looked at while somebody waits for it.
const WAIT_STEP: Duration = Duration::from_millis(500);

impl Daemon {
    pub(super) async fn attach_target(
        self: &Arc<Self>,
        call: &Call,
        request: Attach,
    ) -> Result<AttachReply> {
        if request.device.is_some() {
            return Err(Error::new(Kind::InvalidArgument, "kernel devices are not built in yet")
                .with_fix("attach without --device and connect nbd-client to the URI"));
        }
        let offer = Offer {
            socket: request.socket.clone(),
            tcp: request.tcp,
            discard: request.discard && request.access == Access::Branch,
        };
        if request.access == Access::Branch {
            return self.attach_branch(call, request, offer).await;
        }
        let _turn = self.turn(&request.target.disk).await;
        if let Some(served) = self.served(&request.target) {
            return self.attached_already(&served, &request, &offer);
        }
        let takeover = match (request.access, &request.target.snapshot) {
            (Access::Write, None) => self.attach_for_writing(call, &request, &offer).await?,
            (Access::Write, Some(_)) => {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    format!("{} is a snapshot: it is never written", request.target),
                )
                .with_fix("attach it with --access read, or --access branch for a fork of it"));
            }
            (Access::Read | Access::Branch, _) => {
                self.attach_for_reading(&request.target, &offer).await?;
                None
            }
        };
        let served = self.served(&request.target).ok_or_else(|| {
            Error::new(Kind::Failed, format!("{} stopped while it was attached", request.target))
        })?;
        Ok(AttachReply {
            took_over: takeover.map(super::views::took_over),
            ..reply(&served, false)
        })
    }

    /// A fork for this attachment, under a name of its own.
    async fn attach_branch(
        self: &Arc<Self>,
        call: &Call,
        request: Attach,
        offer: Offer,
    ) -> Result<AttachReply> {
        let name = branch_name(&request.target.disk);
        let fork = Fork { target: request.target.clone(), new: name.clone() };
        let made = self.fork_target(call, fork).await?;
        let target = Target { disk: name.clone(), snapshot: None };
        let _turn = self.turn(&name).await;
        let branch = Attach { target: target.clone(), access: Access::Write, ..request };
        self.attach_for_writing(call, &branch, &offer).await?;
        let served = self.attached(&target)?;
        Ok(AttachReply {
            access: Access::Branch,
            state_age_seconds: made.state_age_seconds,
            ..reply(&served, false)
        })
    }

    fn attached_already(
        &self,
        served: &Served,
        request: &Attach,
        offer: &Offer,
    ) -> Result<AttachReply> {
        let stopped = served.writer.as_ref().and_then(|writer| writer.disk.stopped());
        if let Some(reason) = stopped {
            return Err(Error::new(
                Kind::Poisoned,
                format!("disk {} is stopped: {}", request.target, reason.report()),
            )
            .with_fix("restart the daemon: what was acknowledged is in its log"));
        }
        // Without a wish for an address, any address is the one asked for.
        let same_place = *offer == Offer::default() || *offer == served.offer;
        if served.access == request.access && same_place {
            return Ok(reply(served, true));
        }
        Err(Error::new(
            Kind::DiskBusy,
            format!(
                "{} is attached here with other options: {:?} at {}",
                request.target, served.access, served.address
            )
            .to_lowercase(),
        )
        .with_fix(format!("use {}, or detach it first", served.address.uri(&served.target))))
    }

    async fn attach_for_writing(
        self: &Arc<Self>,
        call: &Call,
        request: &Attach,
        offer: &Offer,
    ) -> Result<Option<Takeover>> {
        let name = &request.target.disk;
        let head = self.wait_for_release(call, request).await?;
        let address = self.address(&request.target, offer)?;
        let daemon = Arc::clone(self);
        let (name, offer) = (name.clone(), offer.clone());
        to_the_end(async move { daemon.take_and_open(name, head, offer, address).await }).await
    }

    /// Waits until nobody else holds the disk, as far as the request allows. The head that is
    /// returned is free, ours, or of a holder that was seen silent.
    async fn wait_for_release(&self, call: &Call, request: &Attach) -> Result<Tagged<Head>> {
        let name = &request.target.disk;
        let store = self.control_store();
        let until = Instant::now() + Duration::from_secs(request.wait_seconds);
        let mut settle_by = None;
        loop {
            let head = registry::load_by_name(&store, name).await?;
            let Some(holder) = head.value.holder.as_ref() else { return Ok(head) };
            if holder.host == self.host.id() {
                return Ok(head);
            }
            let silent = self.observer.silence(&store, holder.host).await?;
            let lease_time = self.config.lease_time;
            if silent >= lease_time {
                if request.accept_loss {
                    return Ok(head);
                }
                return Err(needs_accept_loss(name, &head.value, silent));
            }
            let now = Instant::now();
            // A holder that is silent was seen so for a lease time: look that long before saying no.
            let patience = *settle_by.get_or_insert(now + lease_time + 2 * WAIT_STEP);
            let deadline = if request.accept_loss { until.max(patience) } else { until };
            if now >= deadline || call.is_abandoned() {
                return Err(lease::busy(name, holder, Some(silent)));
            }
            call.progress(Progress {
                doing: format!("waiting for {} to release {name}", holder.hostname),
                ..Progress::default()
            });
            tokio::time::sleep(WAIT_STEP.min(lease_time / 4)).await;
        }
    }

    pub(super) async fn take_and_open(
        self: Arc<Self>,
        name: DiskName,
        head: Tagged<Head>,
        offer: Offer,
        address: Address,
    ) -> Result<Option<Takeover>> {
        let store = self.control_store();
        let files = LeaseFiles::new(&self.config.state_dir, head.value.disk);
        self.ensure_heartbeat().await?;
        if let Some(attachment) = lease::derive(&head.value, self.host.id(), offer.clone()) {
            // An attach that failed after its swap, or a record that was lost: the lease is ours.
            self.resume_disk(attachment, &store).await?;
            return Ok(None);
        }
        let owner = wal::OwnerId::new(head.value.disk.to_bytes());
        if self.logs.owners().contains(&owner) {
            // A log of an attachment that this host lost: it must not meet a new epoch.
            self.quarantine(&name, head.value.disk)?;
        }
        let foreign =
            head.value.holder.as_ref().is_some_and(|holder| holder.host != self.host.id());
        let (handle, takeover) = if foreign {
            let taken = lease::take_over(&store, &self.host, &files, &name, head, &offer).await?;
            (taken.0, Some(taken.1))
        } else {
            (lease::acquire(&store, &self.host, &files, &name, head, &offer).await?, None)
        };
        failpoint::pass("attach-after-swap").await;
        let handle = handle.with_store(self.store.clone());
        self.open_disk(name, handle, files, offer, address).await?;
        Ok(takeover)
    }

    /// The store knows this host as itself, and the heartbeat exists, before any lease does.
    async fn ensure_heartbeat(&self) -> Result<()> {
        if !*self.confirmed.borrow() {
            self.confirm(&self.control_store()).await?;
        }
        if !*self.confirmed.borrow() {
            return Err(Error::new(Kind::StoreUnavailable, "the store has not answered yet")
                .with_fix("see `blockd status`, then try again"));
        }
        if self.holds_any() {
            return Ok(());
        }
        self.host.beat(&self.control_store()).await
    }

    pub(super) fn holds_any(&self) -> bool {
        self.all_served().iter().any(|served| served.writer.is_some())
    }

    /// Recovers a disk that this host holds, and offers it.
    pub(super) async fn open_disk(
        self: &Arc<Self>,
        name: DiskName,
        handle: HeadHandle,
        files: LeaseFiles,
        offer: Offer,
        address: Address,
    ) -> Result<()> {
        let target = Target { disk: name.clone(), snapshot: None };
        let head = handle.head().clone();
        let started = Instant::now();
        let disk = Arc::new(self.recover_disk(&name, &head).await?);
        let (commands, inbox) = mpsc::channel(16);
        let (published, head_view) = watch::channel(Arc::new(head.clone()));
        let epoch = handle.epoch();
        let export = Arc::new(Export::writable(target.to_string(), Arc::clone(&disk)));
        let served = Arc::new(Served {
            target: target.clone(),
            access: Access::Write,
            offer,
            address: address.clone(),
            export: Arc::clone(&export),
            writer: Some(Writer { disk: Arc::clone(&disk), commands, head: head_view, epoch }),
        });
        let drain = Drain {
            disk: Arc::clone(&disk),
            names: Names::new(head.disk, epoch),
            own: self.own_holder(),
            head: handle,
            files,
            uploads: Arc::clone(&self.uploads),
            confirmed: self.confirmed.subscribe(),
            stopping: self.stopping.subscribe(),
            checkpoint: CheckpointPolicy {
                tail_blobs_max: self.config.checkpoint_tail_blobs_max,
                tail_bytes_max: self.config.checkpoint_tail_bytes_max,
            },
            table: TableState::default(),
            published,
        };
        for sealed in &disk.layers().sealed {
            if let Some(barrier) = &sealed.barrier {
                self.snapshots.reserve(head.disk, &barrier.name);
            }
        }
        if head.snapshot_count == 0 {
            self.snapshots.complete(head.disk);
        }
        self.listeners.offer(&address, export).await?;
        self.served.lock().expect("no panic while held").insert(target.clone(), served);
        self.broken.lock().expect("no panic while held").remove(&name);
        let daemon = Arc::clone(self);
        let lost = target.clone();
        self.tasks.spawn(async move { daemon.supervise(lost, drain, inbox).await });
        let daemon = Arc::clone(self);
        self.tasks.spawn(async move {
            daemon.fill_snapshot_book(&target, &head).await;
            // The first lookups then wait for little more than their leaf.
            if let Err(error) = daemon.fetcher.pages().preload(&head.root).await {
                tracing::debug!(disk = %target, error = %error.report(), "map not preloaded");
            }
        });
        tracing::info!(
            disk = %name,
            epoch,
            at = %address,
            took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "disk attached"
        );
        Ok(())
    }

    fn own_holder(&self) -> Holder {
        Holder {
            host: self.host.id(),
            boot: self.host.boot(),
            hostname: self.host.hostname().to_owned(),
            since_unix_ms: crate::clock::unix_ms(),
        }
    }

    async fn recover_disk(&self, name: &DiskName, head: &Head) -> Result<Disk> {
        let drained = Lsn::new(head.drained_lsn);
        let start = wal::Start {
            owner: wal::OwnerId::new(head.disk.to_bytes()),
            epoch: head.epoch,
            floor: drained,
        };
        let logs = Arc::clone(&self.logs);
        let log_recovery = async {
            tokio::task::spawn_blocking(move || logs.start(start))
                .await
                .expect("recovering a log does not panic")
                .map_err(|error| log_damaged(name, error))
        };
        let overlay = disk::tail_overlay(&self.fetcher, &self.store, &head.tail);
        let ((log, recovery), overlay) = tokio::try_join!(log_recovery, overlay)?;
        let mut layers = Layers::new(head.root, overlay, drained);
        let replayed = disk::replay(&mut layers, recovery.records, self.config.cut_bytes)?;
        if replayed > 0 || recovery.bytes_dropped > 0 {
            tracing::info!(
                disk = %name,
                records = replayed,
                dropped_tail_bytes = recovery.bytes_dropped,
                "log replayed"
            );
        }
        Ok(Disk::new(
            head.disk,
            name.clone(),
            head.options,
            CutPolicy {
                bytes: self.config.cut_bytes,
                age: self.config.cut_age,
                undrained_bytes_max: self.config.log_bytes_max / 2,
            },
            Arc::clone(&self.dirty),
            head.size_bytes,
            log,
            layers,
            drained,
            Arc::clone(&self.fetcher),
        ))
    }

    /// Runs the drain of a disk, and does what its end asks for.
    async fn supervise(
        self: Arc<Self>,
        target: Target,
        drain: Drain,
        inbox: mpsc::Receiver<Command>,
    ) {
        let disk = Arc::clone(&drain.disk);
        let ended = match tokio::spawn(drain.run(inbox)).await {
            Ok(ended) => ended,
            Err(failure) => {
                disk.stop(Error::new(Kind::Failed, format!("its drain panicked: {failure}")));
                Ended::Failed(disk.stopped().expect("it was just stopped"))
            }
        };
        if let Ended::Failed(reason) = ended
            && reason.kind() == Kind::LeaseLost
        {
            self.drop_lost(&target, &disk, reason).await;
        }
    }

    /// Another host has the disk: its export ends here, and its log is kept aside.
    async fn drop_lost(&self, target: &Target, disk: &Disk, reason: Arc<Error>) {
        let Some(served) = self.served(target) else { return };
        self.listeners.hide(&served.address, target).await;
        self.listeners.close(&served.address, target).await;
        self.snapshots.close(disk.id);
        close_log(disk).await;
        if let Err(error) = self.quarantine(&target.disk, disk.id) {
            tracing::error!(disk = %target.disk, error = %error.report(), "log not quarantined");
        }
        let broken = Broken { reason };
        self.broken.lock().expect("no panic while held").insert(target.disk.clone(), broken);
        self.served.lock().expect("no panic while held").remove(target);
    }

    /// Keeps the log of a lost attachment aside and forgets the attachment.
    pub(super) fn quarantine(&self, name: &DiskName, disk: crate::ids::DiskId) -> Result<()> {
        let owner = wal::OwnerId::new(disk.to_bytes());
        let kept = self.logs.quarantine(owner).map_err(|error| {
            Error::new(Kind::Failed, format!("cannot quarantine the log of disk {name}"))
                .with_source(error)
        })?;
        if let Some(kept) = kept {
            tracing::warn!(
                disk = %name,
                log = %kept.display(),
                "the log of a lost attachment is quarantined: `blockd recover` makes a disk of it"
            );
        }
        LeaseFiles::new(&self.config.state_dir, disk).remove()
    }

    async fn attach_for_reading(&self, target: &Target, offer: &Offer) -> Result<()> {
        let store = self.control_store();
        let head = registry::load_by_name(&store, &target.disk).await?.value;
        if head.state != DiskState::Live {
            return Err(registry::deleting(&target.disk));
        }
        let snapshot = match &target.snapshot {
            Some(name) => registry::find_snapshot(&store, &head, name).await?,
            None => newest_state(head),
        };
        let overlay = disk::tail_overlay(&self.fetcher, &store, &snapshot.tail).await?;
        let frozen =
            Frozen::new(snapshot.size_bytes, snapshot.root, overlay, Arc::clone(&self.fetcher));
        let address = self.address(target, offer)?;
        let export = Arc::new(Export::frozen(target.to_string(), frozen));
        self.listeners.offer(&address, Arc::clone(&export)).await?;
        let served = Served {
            target: target.clone(),
            access: Access::Read,
            offer: offer.clone(),
            address,
            export,
            writer: None,
        };
        self.served.lock().expect("no panic while held").insert(target.clone(), Arc::new(served));
        Ok(())
    }

    pub(super) fn address(&self, target: &Target, offer: &Offer) -> Result<Address> {
        match (&offer.socket, offer.tcp) {
            (Some(_), Some(_)) => {
                Err(Error::new(Kind::InvalidArgument, "--socket and --tcp exclude each other")
                    .with_fix("give one of them"))
            }
            (Some(socket), None) => Ok(Address::Unix(socket.clone())),
            (None, Some(tcp)) => Ok(Address::Tcp(tcp)),
            (None, None) => Ok(Address::Unix(self.default_socket(target))),
        }
    }

    fn default_socket(&self, target: &Target) -> PathBuf {
        self.config.runtime_dir.join(format!("{target}.sock"))
    }

    /// Serves a disk again that was attached when the daemon last ran.
    pub(super) async fn resume_disk(
        self: &Arc<Self>,
        mut attachment: Attachment,
        store: &Store,
    ) -> Result<()> {
        let files = LeaseFiles::new(&self.config.state_dir, attachment.disk);
        let name = attachment.name.clone();
        let head = self.head_to_resume(&attachment, &files, store).await?;
        if head.value.epoch < attachment.epoch {
            // The swap of the intent never reached the store: there was no attachment.
            return self.quarantine(&name, attachment.disk);
        }
        if head.value.holder.is_none()
            && head.value.epoch == attachment.epoch
            && self.was_released(&head.value).await?
        {
            // The release of a detach reached the store, its end here did not: nothing is left to do.
            return files.remove();
        }
        let resumed = lease::resume(&self.store, &self.host, &files, &mut attachment, head);
        if let Err(error) = &resumed
            && error.kind() == Kind::LeaseLost
            && let Err(error) = self.quarantine(&name, attachment.disk)
        {
            tracing::error!(disk = %name, error = %error.report(), "log not kept");
        }
        let handle = resumed?;
        let target = Target { disk: name.clone(), snapshot: None };
        let address = self.address(&target, &attachment.offer)?;
        self.open_disk(name, handle, files, attachment.offer, address).await
    }

    /// Whether the log has nothing that a released head does not have; it is discarded then.
    async fn was_released(&self, head: &Head) -> Result<bool> {
        let owner = wal::OwnerId::new(head.disk.to_bytes());
        let start = wal::Start { owner, epoch: head.epoch, floor: Lsn::new(head.drained_lsn) };
        let logs = Arc::clone(&self.logs);
        tokio::task::spawn_blocking(move || {
            let (log, recovery) = logs.start(start)?;
            log.close()?;
            if recovery.records.is_empty() {
                logs.discard(owner)?;
            }
            Ok(recovery.records.is_empty())
        })
        .await
        .expect("looking at a log does not panic")
        .map_err(|error| log_damaged(&head.name, error))
    }

    async fn head_to_resume(
        &self,
        attachment: &Attachment,
        files: &LeaseFiles,
        store: &Store,
    ) -> Result<Tagged<Head>> {
        match crate::objects::load_head(store, attachment.disk).await {
            Ok(head) => Ok(head),
            Err(error) if error.kind() == Kind::StoreUnavailable => {
                tracing::warn!(
                    disk = %attachment.name,
                    error = %error.report(),
                    "the store does not answer: serving from what is local"
                );
                files.load_head()?.ok_or(error)
            }
            Err(error) => Err(error),
        }
    }
}

fn reply(served: &Served, already_attached: bool) -> AttachReply {
    AttachReply {
        target: served.target.clone(),
        access: served.access,
        uri: served.address.uri(&served.target),
        device: None,
        epoch: served.writer.as_ref().map(|writer| writer.epoch),
        already_attached,
        took_over: None,
        state_age_seconds: None,
    }
}

/// The newest durable state of a disk, in the shape of a snapshot.
fn newest_state(mut head: Head) -> Snapshot {
    let name: SnapshotName = "newest".parse().expect("a valid name");
    let created = head.drained_unix_ms;
    head.snapshot(name, None, crate::ids::SnapshotId::random(), created)
}

/// `NAME-branch-1a2b3c4d`, with as much of the name as fits.
fn branch_name(disk: &DiskName) -> DiskName {
    let salt = crate::ids::Nonce::random().0 & 0xffff_ffff;
    let suffix = format!("-branch-{salt:08x}");
    let kept = crate::ids::NAME_LEN_MAX - suffix.len();
    let stem: String = disk.as_str().chars().take(kept).collect();
    format!("{stem}{suffix}")
        .parse()
        .expect("a valid name with letters, hyphens and digits behind it")
}

fn needs_accept_loss(name: &DiskName, head: &Head, silent: Duration) -> Error {
    let holder = head.holder.as_ref().expect("only a held disk is taken over");
    Error::new(
        Kind::TakeoverNeedsAcceptLoss,
        format!(
            "disk {name} is held by {} (host {}), silent for {} s; it last drained at {} (lsn {})",
            holder.hostname,
            holder.host,
            silent.as_secs(),
            crate::clock::rfc3339(head.drained_unix_ms),
            head.drained_lsn,
        ),
    )
    .with_fix(
        "bring that host back, or pass --accept-loss to go on without what it had not drained",
    )
    .with_detail("holder", holder.host.to_string())
    .with_detail("drained_lsn", head.drained_lsn)
    .with_detail("last_drained_unix_ms", head.drained_unix_ms)
    .with_detail("silent_seconds", silent.as_secs())
}

fn log_damaged(name: &DiskName, error: wal::Error) -> Error {
    Error::new(Kind::Corrupt, format!("the log of disk {name} cannot be replayed"))
        .with_fix(
            "nothing was changed or uploaded: keep the state directory and restore the file named",
        )
        .with_source(error)
}
