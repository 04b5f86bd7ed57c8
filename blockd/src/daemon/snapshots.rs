//! Snapshots: taken, listed, deleted.

use std::sync::Arc;

use s3_backend::Store;

use super::{Daemon, forks};
use crate::clock;
use crate::control::api::{Snapshot, SnapshotReply, SnapshotsReply};
use crate::control::view::{SnapshotState, SnapshotView};
use crate::disk::Barrier;
use crate::error::{Error, Kind, Result};
use crate::head::{self, Head};
use crate::ids::{DiskName, SnapshotId, SnapshotName, Target};
use crate::{failpoint, registry};

impl Daemon {
    pub(super) async fn take_snapshot(self: Arc<Self>, request: Snapshot) -> Result<SnapshotReply> {
        let name = request.name;
        let turn = self.turn(&name).await;
        let snapshot_name = match request.snapshot {
            Some(chosen) => chosen,
            None => generated_name(),
        };
        let barrier = Barrier {
            id: SnapshotId::random(),
            name: snapshot_name.clone(),
            message: request.message,
            created_unix_ms: clock::unix_ms(),
            size_bytes: self.writer_of(&name).map_or(0, |served| {
                served.writer.as_ref().map_or(0, |writer| writer.disk.size_bytes())
            }),
        };
        let target = Target { disk: name.clone(), snapshot: Some(snapshot_name) };
        let Some(served) = self.writer_of(&name) else {
            let snapshot = self.snapshot_detached(&name, &barrier).await?;
            return Ok(SnapshotReply { target, snapshot });
        };
        let writer = served.writer.as_ref().expect("it was found as one");
        if !self.snapshots.is_complete(writer.disk.id) {
            let head = Head::clone(&writer.head.borrow());
            self.complete_snapshot_book(&self.control_store(), &head).await?;
        }
        if !self.snapshots.reserve(writer.disk.id, &barrier.name) {
            return Err(taken(&name, &barrier.name));
        }
        let lsn = writer
            .disk
            .snapshot(barrier.clone())
            .await
            .inspect_err(|_| self.snapshots.forget(writer.disk.id, &barrier.name))?;
        failpoint::pass("snapshot-after-barrier").await;
        let mut view = pending(&barrier, lsn.get(), writer.disk.size_bytes());
        // Others need not wait for the store.
        drop(turn);
        if request.wait {
            writer.disk.wait_drained(lsn).await?;
            let head = Head::clone(&writer.head.borrow());
            view.state = SnapshotState::Durable;
            view.generation = Some(head.generation);
            self.snapshots.learn(head.disk, &head.snapshots);
            self.snapshots.remember(&head);
        }
        Ok(SnapshotReply { target, snapshot: view })
    }

    /// Of a disk that nobody writes: one swap, at once.
    async fn snapshot_detached(&self, name: &DiskName, barrier: &Barrier) -> Result<SnapshotView> {
        let store = self.control_store();
        let tagged = registry::load_by_name(&store, name).await?;
        self.check_name_free_in(name, &tagged.value, &barrier.name).await?;
        let head = self
            .change_free(name, tagged, |head| {
                let snapshot = head.snapshot(
                    barrier.name.clone(),
                    barrier.message.clone(),
                    barrier.id,
                    barrier.created_unix_ms,
                );
                head.snapshots.push(snapshot);
                Ok(())
            })
            .await?;
        registry::write_snapshots(&store, &head.snapshots).await?;
        let taken = head.snapshots.iter().find(|snapshot| snapshot.id == barrier.id);
        Ok(super::views::snapshot(taken.expect("it was just added")))
    }

    /// Reads the snapshots of a disk that was attached, in the background; one that never had any needs
    /// no request.
    pub(super) async fn fill_snapshot_book(&self, target: &Target, head: &Head) {
        for (barrier, _) in self.pending_barriers(&target.disk) {
            self.snapshots.reserve(head.disk, &barrier.name);
        }
        if head.snapshot_count == 0 {
            self.snapshots.complete(head.disk);
        } else if let Err(error) = self.complete_snapshot_book(&self.store, head).await {
            tracing::debug!(disk = %target.disk, error = %error.report(), "snapshots not listed");
        }
    }

    async fn complete_snapshot_book(&self, store: &Store, head: &Head) -> Result<()> {
        self.snapshots.learn(head.disk, &registry::snapshots(store, head).await?);
        self.snapshots.complete(head.disk);
        Ok(())
    }

    async fn check_name_free_in(
        &self,
        disk: &DiskName,
        head: &Head,
        name: &SnapshotName,
    ) -> Result<()> {
        let all = registry::snapshots(&self.control_store(), head).await?;
        match all.iter().any(|snapshot| snapshot.name == *name) {
            true => Err(taken(disk, name)),
            false => Ok(()),
        }
    }

    /// Snapshots that only the log has, with their positions.
    fn pending_barriers(&self, name: &DiskName) -> Vec<(Barrier, u64)> {
        let Some(served) = self.writer_of(name) else { return Vec::new() };
        let writer = served.writer.as_ref().expect("it was found as one");
        let layers = writer.disk.layers();
        let sealed = layers.sealed.iter();
        sealed
            .filter_map(|index| index.barrier.clone().map(|barrier| (barrier, index.cut.get())))
            .collect()
    }

    pub(super) async fn list_snapshots(&self, name: DiskName) -> Result<SnapshotsReply> {
        let head = self.head_of(&name).await?;
        let stored = registry::snapshots(&self.control_store(), &head).await?;
        let mut snapshots: Vec<_> = stored.iter().map(super::views::snapshot).collect();
        for (barrier, lsn) in self.pending_barriers(&name) {
            if stored.iter().all(|snapshot| snapshot.id != barrier.id) {
                snapshots.push(pending(&barrier, lsn, head.size_bytes));
            }
        }
        Ok(SnapshotsReply { name, snapshots })
    }

    pub(super) async fn delete_snapshot(
        self: &Arc<Self>,
        disk: DiskName,
        name: SnapshotName,
    ) -> Result<()> {
        let store = self.control_store();
        let target = Target { disk: disk.clone(), snapshot: Some(name.clone()) };
        if self.served(&target).is_some() {
            return Err(Error::new(Kind::SnapshotInUse, format!("{target} is attached here"))
                .with_fix(format!("detach it first: `blockd detach {target}`")));
        }
        let head = self.head_of(&disk).await?;
        if let Some(holder) = &head.holder
            && holder.host != self.host.id()
        {
            return Err(crate::lease::busy(&disk, holder, None));
        }
        if self.pending_barriers(&disk).iter().any(|(barrier, _)| barrier.name == name) {
            return Err(Error::new(Kind::DiskBusy, format!("{target} is not in the store yet"))
                .with_fix(format!("drain it first: `blockd drain {disk}`")));
        }
        let snapshot = registry::find_snapshot(&store, &head, &name).await?;
        self.drop_from_head(&disk, &head, &snapshot).await?;
        forks::delete_snapshot(&store, &disk, &snapshot).await?;
        self.snapshots.forget(head.disk, &name);
        Ok(())
    }

    /// A head that still carries a snapshot would bring it back: it is written out and dropped first.
    async fn drop_from_head(
        &self,
        disk: &DiskName,
        head: &Head,
        snapshot: &head::Snapshot,
    ) -> Result<()> {
        if head.snapshots.iter().all(|carried| carried.id != snapshot.id) {
            return Ok(());
        }
        let store = self.control_store();
        registry::write_snapshots(&store, std::slice::from_ref(snapshot)).await?;
        let id = snapshot.id;
        let forget = move |head: &mut Head| {
            head.snapshots.retain(|carried| carried.id != id);
            Ok(())
        };
        match self.writer_of(disk) {
            Some(served) => self.change_held(&served, Box::new(forget)).await.map(drop),
            None => {
                let tagged = registry::load_by_name(&store, disk).await?;
                self.change_free(disk, tagged, forget).await.map(drop)
            }
        }
    }
}

fn taken(disk: &DiskName, name: &SnapshotName) -> Error {
    Error::new(Kind::SnapshotExists, format!("disk {disk} has a snapshot named {name}"))
        .with_fix("choose another name, or delete that one")
}

fn pending(barrier: &Barrier, lsn: u64, size_bytes: u64) -> SnapshotView {
    SnapshotView {
        name: barrier.name.clone(),
        id: barrier.id,
        state: SnapshotState::Pending,
        message: barrier.message.clone(),
        size_bytes,
        lsn,
        generation: None,
        created_unix_ms: barrier.created_unix_ms,
        forks: None,
    }
}

/// `s20260131-235958-1a2b`: when, and a few digits against two in one second.
fn generated_name() -> SnapshotName {
    let digits: String =
        clock::rfc3339(clock::unix_ms()).chars().filter(char::is_ascii_digit).collect();
    let (date, time) = digits.split_at(8);
    let salt = SnapshotId::random().0 & 0xffff;
    format!("s{date}-{time}-{salt:04x}").parse().expect("letters, digits and hyphens")
}
