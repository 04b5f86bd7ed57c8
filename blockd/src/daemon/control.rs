//! The daemon as the control socket sees it.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt};
use tokio::sync::oneshot;

use super::{Daemon, Served, to_the_end};
use crate::control::api::{
    Attach, AttachReply, Check, CheckReply, Create, CreateReply, Delete, DeleteReply, Detach,
    DetachReply, Drain, DrainReply, Flush, FlushReply, Fork, ForkReply, List, ListReply, Progress,
    Recover, RecoverReply, Resize, ResizeReply, Show, Snapshot, SnapshotReply, Snapshots,
    SnapshotsReply, Status, Usage, UsageReply,
};
use crate::control::view::{self, DiskView, StatusReply};
use crate::control::{Call, Control};
use crate::drain::{Change, Command};
use crate::error::{Error, Kind, Result};
use crate::head::{DiskOptions, DiskState, Durability, Head};
use crate::ids::{DiskName, Target};
use crate::objects::{self, Tagged};
use crate::registry;

/// Heads read at once for a list.
const HEADS_AT_ONCE: usize = 16;

/// How often a long drain says how far it is.
const PROGRESS_STEP: std::time::Duration = std::time::Duration::from_millis(500);

#[async_trait]
impl Control for Arc<Daemon> {
    async fn create(&self, _call: &Call, request: Create) -> Result<CreateReply> {
        let daemon = Arc::clone(self);
        to_the_end(async move {
            let store = daemon.control_store();
            let options = DiskOptions {
                durability: match request.durability {
                    view::Durability::Local => Durability::Local,
                    view::Durability::Remote => Durability::Remote,
                },
                max_lag_ms: request.max_lag_ms,
            };
            let (head, created) = registry::create(
                &store,
                &request.name,
                request.size_bytes,
                options,
                request.if_missing,
            )
            .await?;
            let disk = daemon.disk_view(&request.name, &head).await?;
            Ok(CreateReply { created, disk })
        })
        .await
    }

    async fn list(&self, call: &Call, _request: List) -> Result<ListReply> {
        let store = self.control_store();
        let names = registry::list(&store).await?;
        call.progress(Progress { doing: "reading heads".to_owned(), ..Progress::default() });
        let views = stream::iter(names)
            .map(|(name, disk)| {
                let (store, daemon) = (store.clone(), Arc::clone(self));
                async move {
                    match objects::load_head(&store, disk).await {
                        Ok(head) => daemon.disk_view(&name, &head.value).await.map(Some),
                        // Its objects are gone, its name is about to be freed.
                        Err(error) if error.kind() == Kind::NotFound => Ok(None),
                        Err(error) => Err(error),
                    }
                }
            })
            .buffered(HEADS_AT_ONCE)
            .collect::<Vec<Result<Option<DiskView>>>>()
            .await;
        let disks = views.into_iter().filter_map(Result::transpose).collect::<Result<_>>()?;
        Ok(ListReply { disks })
    }

    async fn show(&self, _call: &Call, request: Show) -> Result<DiskView> {
        let head = self.head_of(&request.name).await?;
        self.disk_view(&request.name, &head).await
    }

    async fn usage(&self, _call: &Call, request: Usage) -> Result<UsageReply> {
        self.usage_of(request.name).await
    }

    async fn status(&self, _call: &Call, _request: Status) -> Result<StatusReply> {
        self.status_view().await
    }

    async fn attach(&self, call: &Call, request: Attach) -> Result<AttachReply> {
        self.wait_resumed().await;
        self.attach_target(call, request).await
    }

    async fn detach(&self, call: &Call, request: Detach) -> Result<DetachReply> {
        self.wait_resumed().await;
        self.detach_target(call, request).await
    }

    async fn flush(&self, _call: &Call, request: Flush) -> Result<FlushReply> {
        self.wait_resumed().await;
        let served = self.attached(&request.target)?;
        let flushed_lsn = match &served.writer {
            Some(writer) => writer.disk.flush().await?.get(),
            None => 0,
        };
        Ok(FlushReply { target: request.target, flushed_lsn })
    }

    async fn drain(&self, call: &Call, request: Drain) -> Result<DrainReply> {
        self.wait_resumed().await;
        let served = self.attached(&request.target)?;
        let Some(writer) = &served.writer else {
            return Ok(DrainReply { target: request.target, drained_lsn: 0, generation: 0 });
        };
        let target = writer.disk.layers().last;
        let (total, _) = writer.disk.undrained();
        let drained = writer.disk.wait_drained(target);
        tokio::pin!(drained);
        let mut seen = total;
        loop {
            tokio::select! {
                outcome = &mut drained => {
                    outcome?;
                    break;
                }
                () = tokio::time::sleep(PROGRESS_STEP) => {
                    let (left, _) = writer.disk.undrained();
                    if left != seen {
                        seen = left;
                        call.progress(Progress {
                            doing: format!("draining {}", request.target),
                            done_bytes: total.saturating_sub(left),
                            total_bytes: Some(total),
                        });
                    }
                }
            }
        }
        let head = writer.head.borrow().clone();
        Ok(DrainReply {
            target: request.target,
            drained_lsn: head.drained_lsn,
            generation: head.generation,
        })
    }

    async fn snapshot(&self, _call: &Call, request: Snapshot) -> Result<SnapshotReply> {
        self.wait_resumed().await;
        let daemon = Arc::clone(self);
        to_the_end(async move { daemon.take_snapshot(request).await }).await
    }

    async fn snapshots(&self, _call: &Call, request: Snapshots) -> Result<SnapshotsReply> {
        self.list_snapshots(request.name).await
    }

    async fn fork(&self, call: &Call, request: Fork) -> Result<ForkReply> {
        self.wait_resumed().await;
        self.fork_target(call, request).await
    }

    async fn delete(&self, _call: &Call, request: Delete) -> Result<DeleteReply> {
        self.wait_resumed().await;
        let daemon = Arc::clone(self);
        to_the_end(async move { daemon.delete_target(request.target).await }).await
    }

    async fn resize(&self, _call: &Call, request: Resize) -> Result<ResizeReply> {
        self.wait_resumed().await;
        let daemon = Arc::clone(self);
        to_the_end(async move { daemon.resize_disk(request).await }).await
    }

    async fn check(&self, call: &Call, request: Check) -> Result<CheckReply> {
        self.check_disk(call, request).await
    }

    async fn recover(&self, _call: &Call, request: Recover) -> Result<RecoverReply> {
        self.wait_resumed().await;
        let daemon = Arc::clone(self);
        to_the_end(async move { daemon.recover_log(request).await }).await
    }
}

impl Daemon {
    pub(super) fn attached(&self, target: &Target) -> Result<Arc<Served>> {
        self.served(target).ok_or_else(|| match self.broken_reason(&target.disk) {
            Some(reason) => {
                let message = format!("{target} is not served: {}", reason.report());
                let error = Error::new(reason.kind(), message);
                match reason.fix() {
                    Some(fix) => error.with_fix(fix),
                    None => error,
                }
            }
            None => Error::new(Kind::NotFound, format!("{target} is not attached here"))
                .with_fix(format!("attach it first: `blockd attach {target}`")),
        })
    }

    /// The head of a disk: as last committed from here when this daemon writes it, so that this also
    /// answers while the store is down.
    pub(super) async fn head_of(&self, name: &DiskName) -> Result<Head> {
        if let Some(served) = self.writer_of(name) {
            let writer = served.writer.as_ref().expect("it was found as one");
            return Ok(Head::clone(&writer.head.borrow()));
        }
        Ok(registry::load_by_name(&self.control_store(), name).await?.value)
    }

    /// Changes the head of a disk that this daemon writes, through its drain.
    pub(super) async fn change_held(&self, served: &Served, change: Change) -> Result<Head> {
        let writer = served.writer.as_ref().expect("only a writer has a head to change");
        let gone = || Error::new(Kind::Poisoned, format!("disk {} has stopped", writer.disk.name));
        let (reply, answer) = oneshot::channel();
        let sent = writer.commands.send(Command::Change(change, reply)).await;
        sent.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Changes the head of a disk that nobody holds.
    ///
    /// # Errors
    /// [`Kind::DiskBusy`] naming the holder when somebody does, or when it changed meanwhile.
    pub(super) async fn change_free(
        &self,
        name: &DiskName,
        head: Tagged<Head>,
        change: impl FnOnce(&mut Head) -> Result<()>,
    ) -> Result<Head> {
        if let Some(holder) = &head.value.holder {
            return Err(crate::lease::busy(name, holder, None));
        }
        if head.value.state != DiskState::Live {
            return Err(registry::deleting(name));
        }
        let mut next = head.value.successor();
        change(&mut next)?;
        let key = crate::ids::head_key(next.disk);
        let swapped = objects::replace(&self.control_store(), &key, &next, &head.etag).await?;
        if swapped.is_none() {
            return Err(Error::new(Kind::DiskBusy, format!("disk {name} changed meanwhile"))
                .with_fix("try again"));
        }
        Ok(next)
    }

    async fn resize_disk(self: Arc<Self>, request: Resize) -> Result<ResizeReply> {
        registry::check_size(request.size_bytes)?;
        let (name, size_bytes) = (request.name, request.size_bytes);
        let _turn = self.turn(&name).await;
        let before = self.head_of(&name).await?.size_bytes;
        if size_bytes < before {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!("disk {name} has {before} bytes: it cannot shrink to {size_bytes}"),
            )
            .with_fix("disks only grow; copy to a smaller one instead"));
        }
        let grow = move |head: &mut Head| {
            head.size_bytes = head.size_bytes.max(size_bytes);
            Ok(())
        };
        if size_bytes > before {
            match self.writer_of(&name) {
                Some(served) => {
                    let head = self.change_held(&served, Box::new(grow)).await?;
                    let writer = served.writer.as_ref().expect("it was found as one");
                    writer.disk.set_size_bytes(head.size_bytes);
                }
                None => {
                    let head = registry::load_by_name(&self.control_store(), &name).await?;
                    self.change_free(&name, head, grow).await?;
                }
            }
        }
        Ok(ResizeReply { name, size_bytes, size_bytes_before: before })
    }

    async fn delete_target(self: Arc<Self>, target: Target) -> Result<DeleteReply> {
        let _turn = self.turn(&target.disk).await;
        if let Some(snapshot) = &target.snapshot {
            self.delete_snapshot(target.disk.clone(), snapshot.clone()).await?;
            tracing::info!(%target, "snapshot deleted");
            return Ok(DeleteReply { target });
        }
        let attached: Vec<_> = self
            .all_served()
            .into_iter()
            .filter(|served| served.target.disk == target.disk)
            .collect();
        if let Some(served) = attached.first() {
            return Err(Error::new(
                Kind::DiskBusy,
                format!("{} is attached here at {}", served.target, served.address),
            )
            .with_fix(format!("detach it first: `blockd detach {}`", served.target)));
        }
        registry::delete(&self.control_store(), &target.disk).await?;
        self.broken.lock().expect("no panic while held").remove(&target.disk);
        tracing::info!(disk = %target.disk, "disk deleted");
        Ok(DeleteReply { target })
    }
}
