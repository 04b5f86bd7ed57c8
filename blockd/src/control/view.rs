//! What replies show: disks, snapshots, the daemon itself.
//!
//! A reader ignores fields that it does not know, so that an older client reads a newer daemon. What a
//! daemon cannot know (the undrained bytes of a disk that another host holds) is null.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{DiskId, DiskName, HostId, Nonce, SnapshotId, SnapshotName, StoreId, Target};

/// When a flush of a disk is acknowledged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// When the log of the host holds it on stable media.
    #[default]
    Local,
    /// When the store holds it.
    Remote,
}

/// What an attachment may do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Read and write, with the disk's one lease.
    #[default]
    Write,
    /// Read a snapshot, or the newest durable state, frozen at attach; no lease.
    Read,
    /// Write a fork made for this attachment.
    Branch,
}

/// What a disk is doing, as this daemon sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskState {
    /// Nobody holds its lease.
    Detached,
    /// This daemon holds its lease and serves it.
    Attached,
    /// This daemon holds its lease and is reading its log.
    Recovering,
    /// This daemon drains it to release its lease.
    Detaching,
    /// Another host holds its lease.
    HeldElsewhere,
    /// This daemon stopped it after a failed log write, damage in the log or a lost lease.
    Stopped,
    /// Its objects are being deleted.
    Deleting,
}

/// Who holds a disk's lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HolderView {
    /// The host's identity.
    pub host: HostId,
    /// The name the host gives itself.
    pub hostname: String,
    /// The start of the daemon that last swapped the head.
    pub boot_nonce: Nonce,
    /// When it attached the disk, by its own wall clock.
    pub since_unix_ms: Option<u64>,
    /// For how long this daemon has seen its heartbeat unchanged; null when it has not watched.
    pub silent_seconds: Option<f64>,
}

/// One connection to an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientView {
    /// The TCP peer, or `unix` with what the kernel says of the process.
    pub peer: String,
    /// When it connected.
    pub since_unix_ms: u64,
}

/// One way this daemon serves a disk or a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttachmentView {
    /// The disk or snapshot; also the name of the export.
    pub target: Target,
    /// What it may do.
    pub access: Access,
    /// The NBD URI.
    pub uri: String,
    /// The kernel device that is connected to it.
    pub device: Option<PathBuf>,
    /// Whether the branch goes away with the attachment.
    pub discard: bool,
    /// Who is connected.
    pub clients: Vec<ClientView>,
}

/// Where a fork came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParentView {
    /// The disk.
    pub disk: DiskId,
    /// Its name, if it still has one.
    pub name: Option<DiskName>,
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The name of the snapshot, if it still has one.
    pub snapshot_name: Option<SnapshotName>,
}

/// Everything about one disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DiskView {
    /// Its name.
    pub name: DiskName,
    /// Its identity.
    pub id: DiskId,
    /// What it is doing.
    pub state: DiskState,
    /// Why it is stopped, or what it waits for: one line.
    pub state_reason: Option<String>,
    /// Its size.
    pub size_bytes: u64,
    /// When a flush is acknowledged.
    pub durability: Durability,
    /// The most that the store may lag behind acknowledged writes.
    pub max_lag_ms: Option<u64>,
    /// When it was created, by the wall clock of the host that did.
    pub created_unix_ms: Option<u64>,
    /// Where it was forked from.
    pub parent: Option<ParentView>,
    /// How many times it was attached for writing.
    pub epoch: u64,
    /// How many times its head was swapped.
    pub generation: u64,
    /// Who holds the lease.
    pub holder: Option<HolderView>,
    /// How this daemon serves it and its snapshots.
    pub attachments: Vec<AttachmentView>,
    /// The store holds every write up to this position.
    pub drained_lsn: u64,
    /// When the head last moved, by the wall clock of the host that moved it.
    pub last_drained_unix_ms: Option<u64>,
    /// What losing this host now would lose.
    pub undrained_bytes: Option<u64>,
    /// The age of the oldest write that losing this host now would lose.
    pub undrained_seconds: Option<f64>,
    /// Room taken in the log.
    pub log_bytes: Option<u64>,
    /// Blobs committed since the last checkpoint of the map.
    pub tail_blobs: u64,
    /// Data blobs of its own.
    pub blobs: Option<u64>,
    /// Map objects of its own.
    pub map_objects: Option<u64>,
    /// Bytes of its own objects in the store.
    pub stored_bytes: Option<u64>,
    /// Snapshots, also those not yet in the store.
    pub snapshots: u64,
}

/// What one disk stores, from metadata alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsageView {
    /// The disk.
    pub name: DiskName,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes of its own objects in the store: the sum of the four below.
    pub stored_bytes: u64,
    /// Bytes of its own blobs that its head needs.
    pub live_bytes: u64,
    /// Bytes that nothing needs and that are not yet deleted.
    pub dead_bytes: u64,
    /// Bytes that only snapshots and forks need.
    pub pinned_bytes: u64,
    /// Bytes of its map.
    pub map_bytes: u64,
    /// Bytes that it reads from objects of its ancestors.
    pub shared_bytes: u64,
    /// Objects of its own in the store.
    pub objects: u64,
}

/// Answers [`Status`](super::api::Status).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReply {
    /// Of the daemon, which may differ from the client's.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since its start.
    pub uptime_seconds: f64,
    /// Its identity.
    pub host: HostId,
    /// Its name for people.
    pub hostname: String,
    /// Drawn at its start.
    pub boot_nonce: Nonce,
    /// Where its identity and log are.
    pub state_dir: PathBuf,
    /// The object store.
    pub store: StoreStatus,
    /// The log.
    pub log: LogStatus,
    /// The read cache.
    pub cache: CacheStatus,
    /// Memory under the daemon's budget.
    pub memory: MemoryStatus,
    /// What an operator should know, one line each.
    pub warnings: Vec<String>,
    /// The disks that this daemon serves or has in its log.
    pub disks: Vec<DiskView>,
}

/// The object store, as the daemon last saw it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreStatus {
    /// Where it is, without secrets.
    pub url: String,
    /// Its identity; null until it was reached.
    pub id: Option<StoreId>,
    /// Whether the last request was answered.
    pub available: bool,
    /// Since when it has not answered.
    pub unavailable_since_unix_ms: Option<u64>,
    /// What the last failed request said, also when the store is back.
    pub last_error: Option<String>,
    /// Requests since the start, by operation.
    pub requests: BTreeMap<String, u64>,
    /// Bytes put since the start.
    pub put_bytes: u64,
    /// Bytes got since the start.
    pub get_bytes: u64,
}

/// How the log reaches its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogMode {
    /// With `O_DIRECT`.
    Direct,
    /// Through the page cache, as `allow-buffered-log` permits.
    Buffered,
}

/// How a flush makes the log stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogSyncMode {
    /// `fdatasync` after the writes.
    Fdatasync,
    /// `RWF_DSYNC` on the writes.
    Dsync,
}

/// The log of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogStatus {
    /// How it reaches its device.
    pub mode: LogMode,
    /// How a flush makes it stable.
    pub sync: LogSyncMode,
    /// Whether writes are acknowledged from the staging ring.
    pub ring: bool,
    /// Room taken.
    pub used_bytes: u64,
    /// Room there is.
    pub max_bytes: u64,
}

/// The read cache of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Room taken.
    pub used_bytes: u64,
    /// Room there is.
    pub max_bytes: u64,
    /// Blocks found since the start.
    pub hits: u64,
    /// Blocks not found since the start.
    pub misses: u64,
}

/// Memory of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Under the budget: map pages, dirty index, caches.
    pub used_bytes: u64,
    /// The budget.
    pub max_bytes: u64,
    /// What the kernel counts for the process.
    pub resident_bytes: Option<u64>,
}

/// A holder that was silent, and what it left in the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TookOver {
    /// The holder.
    pub holder: HolderView,
    /// The store holds its writes up to this position; later ones are in its log alone.
    pub drained_lsn: u64,
    /// When it last drained, by its own wall clock.
    pub last_drained_unix_ms: Option<u64>,
    /// The snapshot that keeps the state as it was taken over.
    pub snapshot: SnapshotName,
}

/// Whether the store holds a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    /// Only the log does.
    Pending,
    /// It does.
    Durable,
    /// Its objects are being deleted.
    Deleting,
}

/// Everything about one snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotView {
    /// Its name.
    pub name: SnapshotName,
    /// Its identity.
    pub id: SnapshotId,
    /// Whether the store holds it.
    pub state: SnapshotState,
    /// For people.
    pub message: Option<String>,
    /// The size of the disk then.
    pub size_bytes: u64,
    /// The position in the disk's write order.
    pub lsn: u64,
    /// The generation of the head that published it; null while pending.
    pub generation: Option<u64>,
    /// By the wall clock of the host that took it.
    pub created_unix_ms: u64,
    /// Disks forked from it; null when they were not looked up.
    pub forks: Option<Vec<String>>,
}
