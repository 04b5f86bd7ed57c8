//! Detaching: clients first, then the drain, then the lease, then the log.
//!
//! A detach that is given up on before the lease is released leaves the disk attached and served.

use std::sync::Arc;

use tokio::sync::{OwnedMutexGuard, oneshot, watch};

use super::{Daemon, Served, to_the_end};
use crate::control::Call;
use crate::control::api::{Detach, DetachReply, Progress};
use crate::disk::Disk;
use crate::drain::Command;
use crate::error::{Error, Kind, Result};
use crate::lease::LeaseFiles;
use crate::registry;

impl Daemon {
    pub(super) async fn detach_target(
        self: &Arc<Self>,
        call: &Call,
        request: Detach,
    ) -> Result<DetachReply> {
        let turn = self.turn(&request.target.disk).await;
        let served = self.attached(&request.target)?;
        let clients = self.listeners.clients(&served.address, &request.target).await;
        if !clients.is_empty() && !request.disconnect {
            let peers: Vec<String> = clients.iter().map(|client| client.peer.clone()).collect();
            return Err(Error::new(
                Kind::DiskBusy,
                format!("{} has {} clients: {}", request.target, peers.len(), peers.join(", ")),
            )
            .with_fix("disconnect them, or pass --disconnect")
            .with_detail("clients", peers));
        }
        let disconnected = clients.iter().map(super::views::client).collect();
        let daemon = Arc::clone(self);
        let target = request.target.clone();
        let (gone, waiting) = watch::channel(());
        let released = to_the_end(async move { daemon.release(&served, waiting, turn).await });
        let _still_asking = gone;
        call.progress(Progress { doing: format!("draining {target}"), ..Progress::default() });
        let drained_lsn = released.await?;
        Ok(DetachReply { target, drained_lsn, disconnected })
    }

    /// Drains and releases; `asker` closes when nobody waits for it any more, and the disk then stays
    /// attached unless it was released already.
    pub(super) async fn release(
        &self,
        served: &Served,
        mut asker: watch::Receiver<()>,
        turn: OwnedMutexGuard<()>,
    ) -> Result<Option<u64>> {
        let target = &served.target;
        self.listeners.hide(&served.address, target).await;
        let Some(writer) = &served.writer else {
            self.withdraw(served).await;
            return Ok(None);
        };
        self.listeners.disconnect(&served.address, target).await;
        let (reply, mut answer) = oneshot::channel();
        let ended = || stopped_meanwhile(&writer.disk);
        let sent = writer.commands.send(Command::Release(reply, asker.clone())).await;
        let early = match sent {
            Err(_) => Some(Ok(Err(ended()))),
            Ok(()) => tokio::select! {
                answer = &mut answer => Some(answer),
                _ = asker.changed() => None,
            },
        };
        let outcome = match early {
            Some(outcome) => outcome,
            None => {
                // Nobody waits: the disk is served on at once, unless its release has gone out already.
                drop(turn);
                self.listeners.offer(&served.address, Arc::clone(&served.export)).await?;
                answer.await
            }
        };
        let head = match outcome.unwrap_or_else(|_| Err(ended())) {
            Ok(head) => head,
            Err(error) => {
                self.listeners.offer(&served.address, Arc::clone(&served.export)).await?;
                return Err(error);
            }
        };
        self.listeners.hide(&served.address, target).await;
        self.withdraw(served).await;
        self.snapshots.close(head.disk);
        close_log(&writer.disk).await;
        self.logs.discard(wal::OwnerId::new(head.disk.to_bytes())).map_err(|error| {
            Error::new(Kind::Failed, "the disk is released, but its log cannot be removed")
                .with_source(error)
        })?;
        LeaseFiles::new(&self.config.state_dir, head.disk).remove()?;
        tracing::info!(disk = %target, drained_lsn = head.drained_lsn, "disk detached");
        if served.offer.discard {
            registry::delete(&self.control_store(), &target.disk).await?;
            tracing::info!(disk = %target, "branch discarded");
        }
        Ok(Some(head.drained_lsn))
    }

    async fn withdraw(&self, served: &Served) {
        self.listeners.close(&served.address, &served.target).await;
        self.served.lock().expect("no panic while held").remove(&served.target);
    }
}

/// Empties what is staged into the log's files, so that the log is whole whatever happens to it next.
pub(super) async fn close_log(disk: &Disk) {
    let log = disk.log().clone();
    let closed = tokio::task::spawn_blocking(move || log.close())
        .await
        .expect("closing a log does not panic");
    if let Err(error) = closed {
        tracing::warn!(disk = %disk.name, %error, "the log could not be closed");
    }
}

fn stopped_meanwhile(disk: &Disk) -> Error {
    let reason = disk.stopped().map_or_else(String::new, |reason| format!(": {}", reason.report()));
    Error::new(Kind::Poisoned, format!("disk {} stopped{reason}", disk.name))
}
