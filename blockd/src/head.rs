//! The head of a disk: its only mutable object, and the linearization point of everything.
//!
//! Every change of a disk's durable state is one compare-and-swap of its head: data that was
//! drained, a checkpoint of the map, a snapshot, a lease taken or released, a resize, the mark of
//! deletion. Each swap adds one to the generation and draws a new commit nonce, so no two heads are
//! ever byte-equal and a reply that was lost can be settled by reading back.
//!
//! A head stays small: the map and the blob table are roots (`map`, `blob_table`), and the tail (the
//! blobs committed since the last checkpoint) is bounded by the checkpoint policy of `drain`.

use serde::{Deserialize, Serialize};

use crate::blob_table::TableRoot;
use crate::document::Document;
use crate::ids::{
    DiskId, DiskName, Epoch, Generation, HostId, Nonce, ObjectRef, SnapshotId, SnapshotName,
    StoreId,
};
use crate::map::Root;

/// `disks/<name>`: which disk has a name, or that none has. Never deleted, so that a late writer
/// can never bring back an old owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameRecord {
    /// The disk, or none: the name is free.
    pub disk: Option<DiskId>,
    /// Makes each version of the record unique.
    pub nonce: Nonce,
}

impl Document for NameRecord {
    const KIND: &'static str = "name";
}

/// `format.json`: version and identity of a store, written once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFormat {
    /// Drawn when the store was first used.
    pub store: StoreId,
    /// When that was.
    pub created_unix_ms: u64,
}

impl Document for StoreFormat {
    const KIND: &'static str = "store";
}

/// What a flush waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The log on this host's NVMe.
    #[default]
    Local,
    /// The object store.
    Remote,
}

/// What a disk was created with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DiskOptions {
    /// What a flush waits for.
    pub durability: Durability,
    /// Bound on the age of undrained writes, in milliseconds; none: only the log's size bounds it.
    pub max_lag_ms: Option<u64>,
}

/// Who may write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The host.
    pub host: HostId,
    /// Boot nonce of its daemon when it last swapped the head.
    pub boot: Nonce,
    /// What people call the host.
    pub hostname: String,
    /// When it took the disk, on its own clock: for people only.
    pub since_unix_ms: u64,
}

/// One blob of the tail. Later ones hide earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TailBlob {
    /// The blob.
    pub blob: ObjectRef,
    /// Bytes of the whole object.
    pub bytes: u64,
    /// Where the footer begins: it ends with the object.
    pub footer_offset: u64,
    /// Generation of the swap that added it.
    pub birth: Generation,
}

/// A point in time of one disk: everything needed to read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Identity, for ever.
    pub id: SnapshotId,
    /// Name, unique within the disk while the snapshot exists.
    pub name: SnapshotName,
    /// The disk it was taken of.
    pub disk: DiskId,
    /// Number in the disk's history, from 1.
    pub number: u64,
    /// Generation of the swap that published it: an object dead at a later generation may not be
    /// deleted while this snapshot exists if it was born at or before it.
    pub generation: Generation,
    /// Position in the disk's write order.
    pub lsn: u64,
    /// Size of the disk then.
    pub size_bytes: u64,
    /// Map at the last checkpoint before it.
    pub root: Root,
    /// Blobs since that checkpoint.
    pub tail: Vec<TailBlob>,
    /// When it was taken.
    pub created_unix_ms: u64,
    /// What the taker had to say.
    pub message: Option<String>,
    /// Marked for deletion: no new pin may rely on it.
    #[serde(default)]
    pub deleting: bool,
}

impl Document for Snapshot {
    const KIND: &'static str = "snapshot";
}

/// Where a fork came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// The disk.
    pub disk: DiskId,
    /// Its name when the fork was made.
    pub name: DiskName,
    /// The snapshot that the fork pins.
    pub snapshot: SnapshotId,
    /// Name of that snapshot.
    pub snapshot_name: SnapshotName,
}

/// What a disk's own objects add up to, the tail not counted: so that nobody has to read the table
/// to show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stored {
    /// Data blobs.
    pub blobs: u64,
    /// Map objects.
    pub map_objects: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes of those of which nothing is in use any more.
    pub dead_bytes: u64,
}

/// Whether a disk lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskState {
    /// It can be attached.
    #[default]
    Live,
    /// It is to be deleted, unless a fork pins one of its snapshots.
    Deleting,
    /// Its objects are being deleted; this is never undone.
    Doomed,
    /// A fork that never came to life.
    Aborted,
}

/// The head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The disk.
    pub disk: DiskId,
    /// The name it was created under.
    pub name: DiskName,
    /// Grows by one at every swap.
    pub generation: Generation,
    /// Drawn at every swap.
    pub commit: Nonce,
    /// Whether the disk lives.
    pub state: DiskState,
    /// Size of the disk.
    pub size_bytes: u64,
    /// What it was created with.
    pub options: DiskOptions,
    /// Grows at every attach for writing.
    pub epoch: Epoch,
    /// Who may write; none: released, everything is drained.
    pub holder: Option<Holder>,
    /// Every record at or below this position is in the store.
    pub drained_lsn: u64,
    /// When that was committed: for people only.
    pub drained_unix_ms: u64,
    /// The map at the last checkpoint.
    pub root: Root,
    /// Objects of this disk that are not yet deleted.
    pub table: TableRoot,
    /// What the table adds up to.
    pub stored: Stored,
    /// Blobs committed since the last checkpoint, oldest first.
    pub tail: Vec<TailBlob>,
    /// Snapshots whose own object is not known to be written yet.
    pub snapshots: Vec<Snapshot>,
    /// Snapshots taken so far: the number of the last one.
    pub snapshot_count: u64,
    /// Where a fork came from.
    pub parent: Option<Parent>,
    /// When the disk was created.
    pub created_unix_ms: u64,
}

impl Document for Head {
    const KIND: &'static str = "head";
}

impl Head {
    /// The first head of a new, empty disk.
    #[must_use]
    pub fn new(name: DiskName, size_bytes: u64, options: DiskOptions, now_unix_ms: u64) -> Self {
        Self {
            disk: DiskId::random(),
            name,
            generation: 1,
            commit: Nonce::random(),
            state: DiskState::Live,
            size_bytes,
            options,
            epoch: 0,
            holder: None,
            drained_lsn: 0,
            drained_unix_ms: now_unix_ms,
            root: Root::EMPTY,
            table: TableRoot::default(),
            stored: Stored::default(),
            tail: Vec::new(),
            snapshots: Vec::new(),
            snapshot_count: 0,
            parent: None,
            created_unix_ms: now_unix_ms,
        }
    }

    /// The head that the next swap writes, before the caller's changes.
    #[must_use]
    pub fn successor(&self) -> Self {
        let mut next = self.clone();
        next.generation += 1;
        next.commit = Nonce::random();
        next
    }

    /// Whether `host` wrote this head, with one of these boot nonces, under `epoch`.
    ///
    /// Only the holder of an epoch can have released it at that epoch: a release of its own that
    /// landed late leaves no holder, and the lease is taken again by its next swap.
    #[must_use]
    pub fn is_of(&self, host: HostId, epoch: Epoch, boots: &[Nonce]) -> bool {
        self.epoch == epoch
            && self.state == DiskState::Live
            && self
                .holder
                .as_ref()
                .is_none_or(|holder| holder.host == host && boots.contains(&holder.boot))
    }

    /// The state of this head as a snapshot, published by the swap that makes `self`.
    #[must_use]
    pub fn snapshot(
        &mut self,
        name: SnapshotName,
        message: Option<String>,
        id: SnapshotId,
        created_unix_ms: u64,
    ) -> Snapshot {
        self.snapshot_count += 1;
        Snapshot {
            id,
            name,
            disk: self.disk,
            number: self.snapshot_count,
            generation: self.generation,
            lsn: self.drained_lsn,
            size_bytes: self.size_bytes,
            root: self.root,
            tail: self.tail.clone(),
            created_unix_ms,
            message,
            deleting: false,
        }
    }
}
