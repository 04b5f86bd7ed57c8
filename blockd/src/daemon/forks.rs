//! Forks: a new disk that begins as a snapshot of another.
//!
//! A fork is a handful of small objects, whatever the disk's size: a pin that keeps the snapshot, a
//! head with the snapshot's root and tail, and a name. The order lets a fork and the deletion of its
//! snapshot race: the pin is put, then the snapshot is read again. Either the deletion sees the pin,
//! or the fork sees the mark.

use std::sync::Arc;
use std::time::Duration;

use s3_backend::Store;
use serde::{Deserialize, Serialize};

use super::{Daemon, to_the_end};
use crate::clock;
use crate::control::Call;
use crate::control::api::{Fork, ForkReply, Progress, Snapshot as TakeSnapshot};
use crate::control::view::SnapshotState;
use crate::document::Document;
use crate::error::{Error, Kind, Result};
use crate::head::{DiskState, Head, Parent, Snapshot};
use crate::ids::{
    DiskId, DiskName, SnapshotId, SnapshotName, Target, head_key, pin_key, snapshot_key,
};
use crate::objects;
use crate::registry;

/// How often a snapshot that a fork waits for is looked at.
const PENDING_STEP: Duration = Duration::from_millis(100);

/// `d/<disk>/p/<snapshot>/<fork>`: what keeps a snapshot while a fork needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Pin {
    fork: DiskId,
    name: DiskName,
    created_unix_ms: u64,
}

impl Document for Pin {
    const KIND: &'static str = "pin";
}

impl Daemon {
    pub(super) async fn fork_target(
        self: &Arc<Self>,
        call: &Call,
        request: Fork,
    ) -> Result<ForkReply> {
        let guess = match &request.target.snapshot {
            Some(name) => self.snapshots.guess(&request.target.disk, name),
            None => None,
        };
        if let Some((head, snapshot)) = guess {
            match self.fork_of(&head, snapshot, &request, None).await {
                // Not as remembered: found out by what every fork reads again.
                Err(error) if error.kind() == Kind::NotFound => self.snapshots.erase(head.disk),
                outcome => return outcome,
            }
        }
        let (head, snapshot, held_elsewhere) = self.fork_base(call, &request.target).await?;
        let age = held_elsewhere.then(|| {
            Duration::from_millis(clock::unix_ms().saturating_sub(head.drained_unix_ms))
                .as_secs_f64()
        });
        self.fork_of(&head, snapshot, &request, age).await
    }

    async fn fork_of(
        &self,
        head: &Head,
        snapshot: Snapshot,
        request: &Fork,
        state_age_seconds: Option<f64>,
    ) -> Result<ForkReply> {
        let parent =
            Target { disk: request.target.disk.clone(), snapshot: Some(snapshot.name.clone()) };
        let (store, name, base) = (self.control_store(), request.new.clone(), head.clone());
        let fork =
            to_the_end(async move { make_fork(&store, &base, snapshot, name).await }).await?;
        tracing::info!(disk = %fork.name, %parent, "forked");
        Ok(ForkReply { name: fork.name, id: fork.disk, parent, state_age_seconds })
    }

    /// The snapshot to fork, durable; of a disk, one that is taken now.
    async fn fork_base(
        self: &Arc<Self>,
        call: &Call,
        target: &Target,
    ) -> Result<(Head, Snapshot, bool)> {
        let store = self.control_store();
        let head = self.head_of(&target.disk).await?;
        let elsewhere = head.holder.as_ref().is_some_and(|holder| holder.host != self.host.id());
        let name = match &target.snapshot {
            Some(name) => name.clone(),
            None if elsewhere => {
                let snapshot = newest_durable(&store, head.disk).await?;
                return Ok((head, snapshot, true));
            }
            None => {
                let request = TakeSnapshot {
                    name: target.disk.clone(),
                    snapshot: None,
                    message: Some("taken for a fork".to_owned()),
                    wait: false,
                };
                let daemon = Arc::clone(self);
                let taken = to_the_end(async move { daemon.take_snapshot(request).await }).await?;
                taken.snapshot.name
            }
        };
        let head = match self.writer_of(&target.disk) {
            Some(_) => {
                self.wait_durable(call, &target.disk, &name).await?;
                self.head_of(&target.disk).await?
            }
            None => head,
        };
        let snapshot = registry::find_snapshot(&store, &head, &name).await?;
        self.snapshots.learn(head.disk, std::slice::from_ref(&snapshot));
        self.snapshots.remember(&head);
        Ok((head, snapshot, false))
    }

    /// Waits until the store holds a snapshot that this daemon still has in its log. Bounded by the
    /// call's own limit: nothing moves while the store does not answer.
    async fn wait_durable(&self, call: &Call, disk: &DiskName, name: &SnapshotName) -> Result<()> {
        let mut seen = wal::Lsn::ZERO;
        loop {
            let listed = self.list_snapshots(disk.clone()).await?;
            let pending = listed
                .snapshots
                .iter()
                .any(|snapshot| snapshot.name == *name && snapshot.state == SnapshotState::Pending);
            if !pending {
                return Ok(());
            }
            if let Some(served) = self.writer_of(disk) {
                let writer = served.writer.as_ref().expect("it was found as one");
                if let Some(reason) = writer.disk.stopped() {
                    return Err(Error::new(reason.kind(), reason.report()).context(disk));
                }
                let last = writer.disk.layers().last;
                writer.disk.want_drained(last);
                let drained = writer.disk.drained();
                if drained != seen {
                    // Something moved: the call's time limit starts again.
                    seen = drained;
                    call.progress(Progress {
                        doing: format!("waiting for {disk}@{name} to be drained"),
                        ..Progress::default()
                    });
                }
            }
            if call.is_abandoned() {
                return Err(Error::new(Kind::Failed, "the caller is gone"));
            }
            tokio::time::sleep(PENDING_STEP).await;
        }
    }
}

/// A snapshot of exactly the generation that the head of another host's disk has: written first, then
/// the head is read again, so that its holder either sees the snapshot before it deletes anything, or
/// has not yet made anything of that generation dead.
async fn newest_durable(store: &Store, disk: DiskId) -> Result<Snapshot> {
    loop {
        let mut head = objects::load_head(store, disk).await?.value;
        let generation = head.generation;
        let id = SnapshotId::random();
        let name: SnapshotName =
            format!("newest-{generation}-{:04x}", id.0 & 0xffff).parse().expect("a valid name");
        let message = "newest durable state, for a fork on another host".to_owned();
        let snapshot = head.snapshot(name, Some(message), id, clock::unix_ms());
        let key = snapshot_key(disk, id);
        objects::create(store, &key, &snapshot).await?;
        if objects::load_head(store, disk).await?.value.generation == generation {
            return Ok(snapshot);
        }
        registry::delete_keys(store, &[key]).await?;
    }
}

pub(super) async fn make_fork(
    store: &Store,
    parent: &Head,
    snapshot: Snapshot,
    name: DiskName,
) -> Result<Head> {
    let now = clock::unix_ms();
    let mut fork = Head::new(name.clone(), snapshot.size_bytes, parent.options, now);
    fork.root = snapshot.root;
    fork.tail.clone_from(&snapshot.tail);
    fork.parent = Some(Parent {
        disk: parent.disk,
        name: parent.name.clone(),
        snapshot: snapshot.id,
        snapshot_name: snapshot.name.clone(),
    });
    let pin = Pin { fork: fork.disk, name: name.clone(), created_unix_ms: now };
    let pin_object = pin_key(parent.disk, snapshot.id, fork.disk);
    objects::create(store, &pin_object, &pin).await?;
    let outcome = finish_fork(store, parent, &snapshot, &fork, &name).await;
    if let Err(error) = &outcome
        && error.kind() != Kind::StoreUnavailable
    {
        // Nothing leads to the fork: its head goes first, so that the pin is never missing under it.
        registry::delete_keys(store, &[head_key(fork.disk)]).await?;
        registry::delete_keys(store, &[pin_object]).await?;
    }
    outcome.map(|()| fork)
}

async fn finish_fork(
    store: &Store,
    parent: &Head,
    snapshot: &Snapshot,
    fork: &Head,
    name: &DiskName,
) -> Result<()> {
    let gone = || {
        Error::new(
            Kind::NotFound,
            format!("{}@{} was deleted while it was being forked", parent.name, snapshot.name),
        )
        .with_fix("fork another snapshot")
    };
    let key = snapshot_key(parent.disk, snapshot.id);
    let stored = objects::load::<Snapshot>(store, &key).await?;
    let head = objects::load_head(store, parent.disk).await?.value;
    // A head may still carry a snapshot whose object is about to be written.
    let carried = head.snapshots.iter().any(|carried| carried.id == snapshot.id);
    let lives = stored.map_or(carried, |found| !found.value.deleting);
    if !lives || head.state != DiskState::Live {
        return Err(gone());
    }
    if objects::create(store, &head_key(fork.disk), fork).await?.is_none() {
        return Err(gone());
    }
    registry::claim_name(store, name, fork.disk).await
}

/// Deletes a snapshot that no fork pins.
///
/// # Errors
/// [`Kind::DiskHasForks`] naming them.
pub(super) async fn delete_snapshot(
    store: &Store,
    disk: &DiskName,
    snapshot: &Snapshot,
) -> Result<()> {
    let key = snapshot_key(snapshot.disk, snapshot.id);
    objects::create(store, &key, snapshot).await?;
    let Some(found) = objects::load::<Snapshot>(store, &key).await? else { return Ok(()) };
    let marked = Snapshot { deleting: true, ..found.value.clone() };
    let Some(tag) = objects::replace(store, &key, &marked, &found.etag).await? else {
        return Err(Error::new(Kind::DiskBusy, format!("snapshot {key} changed meanwhile"))
            .with_fix("send the delete again"));
    };
    let pins =
        registry::list_keys(store, &format!("d/{}/p/{}/", snapshot.disk, snapshot.id)).await?;
    if pins.is_empty() {
        return registry::delete_keys(store, &[key]).await;
    }
    objects::replace(store, &key, &found.value, &tag).await?;
    Err(registry::has_forks(store, &format!("snapshot {disk}@{}", snapshot.name), &pins).await)
}
