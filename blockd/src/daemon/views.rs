//! What the control API shows of disks and snapshots.

use std::time::Duration;

use nbd_server::ConnectionInfo;

use super::{Daemon, Served};
use crate::clock;
use crate::control::view::{
    AttachmentView, ClientView, DiskState, DiskView, Durability, HolderView, ParentView,
    SnapshotState, SnapshotView, TookOver,
};
use crate::error::{Kind, Result};
use crate::head::{self, Head, Holder, Snapshot};
use crate::ids::DiskName;
use crate::lease::Takeover;

pub(super) fn client(connection: &ConnectionInfo) -> ClientView {
    ClientView {
        peer: connection.peer.clone(),
        since_unix_ms: clock::unix_ms_of(connection.since.into()),
    }
}

pub(super) fn holder(holder: &Holder, silent: Option<Duration>) -> HolderView {
    HolderView {
        host: holder.host,
        hostname: holder.hostname.clone(),
        boot_nonce: holder.boot,
        since_unix_ms: Some(holder.since_unix_ms),
        silent_seconds: silent.map(|silent| silent.as_secs_f64()),
    }
}

pub(super) fn took_over(takeover: Takeover) -> TookOver {
    TookOver {
        holder: holder(&takeover.from, None),
        drained_lsn: takeover.drained_lsn,
        last_drained_unix_ms: Some(takeover.drained_unix_ms),
        snapshot: takeover.snapshot,
    }
}

pub(super) fn durability(durability: head::Durability) -> Durability {
    match durability {
        head::Durability::Local => Durability::Local,
        head::Durability::Remote => Durability::Remote,
    }
}

pub(super) fn snapshot(snapshot: &Snapshot) -> SnapshotView {
    SnapshotView {
        name: snapshot.name.clone(),
        id: snapshot.id,
        state: if snapshot.deleting { SnapshotState::Deleting } else { SnapshotState::Durable },
        message: snapshot.message.clone(),
        size_bytes: snapshot.size_bytes,
        lsn: snapshot.lsn,
        generation: Some(snapshot.generation),
        created_unix_ms: snapshot.created_unix_ms,
        forks: None,
    }
}

impl Daemon {
    /// A disk as its head and this daemon know it.
    pub(super) async fn disk_view(&self, name: &DiskName, head: &Head) -> Result<DiskView> {
        let writer = self.writer_of(name);
        let live = writer.as_ref().and_then(|served| served.writer.as_ref());
        let head = live.map_or_else(|| head.clone(), |live| Head::clone(&live.head.borrow()));
        let by_id = head.disk.to_string().parse().expect("hexadecimal digits are a name");
        let broken = self.broken_reason(name).or_else(|| self.broken_reason(&by_id));
        let stopped = live.and_then(|live| live.disk.stopped()).or(broken);
        let ours = head.holder.as_ref().is_some_and(|holder| holder.host == self.host.id());
        // A disk that was lost to another host is what that host makes of it; the reason still shows.
        let fails = stopped.as_ref().is_some_and(|reason| reason.kind() != Kind::LeaseLost);
        let state = match (&head.state, fails, live, &head.holder) {
            (
                head::DiskState::Deleting | head::DiskState::Doomed | head::DiskState::Aborted,
                ..,
            ) => DiskState::Deleting,
            (_, true, ..) => DiskState::Stopped,
            (_, _, Some(_), _) => DiskState::Attached,
            (_, _, None, Some(_)) if ours => DiskState::Recovering,
            (_, _, None, Some(_)) => DiskState::HeldElsewhere,
            (_, _, None, None) => DiskState::Detached,
        };
        let undrained = live.map(|live| live.disk.undrained());
        Ok(DiskView {
            name: name.clone(),
            id: head.disk,
            state,
            state_reason: stopped.map(|reason| reason.report()),
            size_bytes: head.size_bytes,
            durability: durability(head.options.durability),
            max_lag_ms: head.options.max_lag_ms,
            created_unix_ms: Some(head.created_unix_ms),
            parent: head.parent.as_ref().map(|parent| ParentView {
                disk: parent.disk,
                name: Some(parent.name.clone()),
                snapshot: parent.snapshot,
                snapshot_name: Some(parent.snapshot_name.clone()),
            }),
            epoch: head.epoch,
            generation: head.generation,
            holder: head.holder.as_ref().map(|who| holder(who, None)),
            attachments: self.attachment_views(name).await,
            drained_lsn: head.drained_lsn,
            last_drained_unix_ms: Some(head.drained_unix_ms),
            undrained_bytes: undrained.map(|(bytes, _)| bytes),
            undrained_seconds: undrained.map(|(_, age)| age.as_secs_f64()),
            log_bytes: live.map(|live| live.disk.log().positions().bytes_used),
            tail_blobs: crate::geometry::to_u64(head.tail.len()),
            blobs: Some(head.stored.blobs + crate::geometry::to_u64(head.tail.len())),
            map_objects: Some(head.stored.map_objects),
            stored_bytes: Some(
                head.stored.bytes + head.tail.iter().map(|blob| blob.bytes).sum::<u64>(),
            ),
            snapshots: head.snapshot_count,
        })
    }

    async fn attachment_views(&self, name: &DiskName) -> Vec<AttachmentView> {
        let mut views = Vec::new();
        for served in self.all_served().iter().filter(|served| served.target.disk == *name) {
            views.push(self.attachment_view(served).await);
        }
        views
    }

    async fn attachment_view(&self, served: &Served) -> AttachmentView {
        let clients = self.listeners.clients(&served.address, &served.target).await;
        AttachmentView {
            target: served.target.clone(),
            access: served.access,
            uri: served.address.uri(&served.target),
            device: None,
            discard: served.offer.discard,
            clients: clients.iter().map(client).collect(),
        }
    }
}
