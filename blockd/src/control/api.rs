//! Requests of the control socket and their replies, as they are on the wire.
//!
//! Units are in the names. A request refuses fields that it does not know, so that a misspelt option is
//! an error. What replies show of disks and of the daemon is in [`view`](super::view).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::view::{
    Access, ClientView, DiskView, Durability, SnapshotView, StatusReply, TookOver, UsageView,
};
use crate::ids::{DiskId, DiskName, SnapshotName, Target};

/// A request: where it goes and what answers it.
pub trait Request: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The last part of its path, which is also the command's name.
    const COMMAND: &'static str;
    /// What answers it.
    type Reply: Serialize + DeserializeOwned + Send + 'static;

    /// How much longer than the time limit the caller asked to wait.
    fn patience(&self) -> Duration {
        Duration::ZERO
    }
}

macro_rules! request {
    ($request:ident => $command:literal, $reply:ident $(, $patience:expr)?) => {
        impl Request for $request {
            const COMMAND: &'static str = $command;
            type Reply = $reply;
            $(
                fn patience(&self) -> Duration {
                    let patience: fn(&Self) -> Duration = $patience;
                    patience(self)
                }
            )?
        }
    };
}

request!(Create => "create", CreateReply);
request!(List => "list", ListReply);
request!(Show => "show", DiskView);
request!(Usage => "usage", UsageReply);
request!(Status => "status", StatusReply);
request!(Attach => "attach", AttachReply, |request| Duration::from_secs(request.wait_seconds));
request!(Detach => "detach", DetachReply);
request!(Flush => "flush", FlushReply);
request!(Drain => "drain", DrainReply);
request!(Snapshot => "snapshot", SnapshotReply);
request!(Snapshots => "snapshots", SnapshotsReply);
request!(Fork => "fork", ForkReply);
request!(Delete => "delete", DeleteReply);
request!(Resize => "resize", ResizeReply);
request!(Check => "check", CheckReply);
request!(Recover => "recover", RecoverReply);

/// `create`: a new disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// Its name.
    pub name: DiskName,
    /// Its size, a multiple of 4096.
    pub size_bytes: u64,
    /// Whether a disk of this name with the same settings is as good as a new one.
    #[serde(default)]
    pub if_missing: bool,
    /// When a flush is acknowledged.
    #[serde(default)]
    pub durability: Durability,
    /// The most that the store may lag behind acknowledged writes.
    #[serde(default)]
    pub max_lag_ms: Option<u64>,
}

/// Answers [`Create`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CreateReply {
    /// False if it was there already.
    pub created: bool,
    /// The disk.
    pub disk: DiskView,
}

/// `list`: every disk.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {}

/// Answers [`List`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListReply {
    /// The disks in the order of their names.
    pub disks: Vec<DiskView>,
}

/// `show`: one disk, answered by its [`DiskView`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Show {
    /// The disk.
    pub name: DiskName,
}

/// `usage`: what is stored.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// One disk, or all.
    #[serde(default)]
    pub name: Option<DiskName>,
}

/// Answers [`Usage`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsageReply {
    /// The disks in the order of their names.
    pub disks: Vec<UsageView>,
}

/// `status`: the daemon.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {}

/// `attach`: serves a disk or snapshot over NBD.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// The disk or snapshot.
    pub target: Target,
    /// What the attachment may do.
    #[serde(default)]
    pub access: Access,
    /// How long to wait for another host to release the disk.
    #[serde(default)]
    pub wait_seconds: u64,
    /// Whether to take the disk from a silent holder, whose undrained writes are then left behind.
    #[serde(default)]
    pub accept_loss: bool,
    /// A unix socket to listen on, absolute, in place of the default one.
    #[serde(default)]
    pub socket: Option<PathBuf>,
    /// A TCP address to listen on, in place of a unix socket.
    #[serde(default)]
    pub tcp: Option<SocketAddr>,
    /// Connect a kernel device as well.
    #[serde(default)]
    pub device: Option<Device>,
    /// Whether the branch goes away with the attachment.
    #[serde(default)]
    pub discard: bool,
}

/// Which kernel device to connect. On the wire `auto` or a number's device, `/dev/nbd0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// The first free one, made if there is none.
    Auto,
    /// This one.
    Nbd(u32),
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        match device {
            Device::Auto => "auto".to_owned(),
            Device::Nbd(index) => format!("/dev/nbd{index}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = |digits: &&str| digits.bytes().all(|b| b.is_ascii_digit());
        match text.strip_prefix("/dev/nbd").filter(digits).map(str::parse) {
            Some(Ok(index)) => Ok(Self::Nbd(index)),
            None if text == "auto" => Ok(Self::Auto),
            _ => Err(format!("{text:?} is neither auto nor a device like /dev/nbd0")),
        }
    }
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Answers [`Attach`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttachReply {
    /// What is served: the target, or the fork made for a branch.
    pub target: Target,
    /// What the attachment may do.
    pub access: Access,
    /// The NBD URI.
    pub uri: String,
    /// The kernel device, when one was asked for.
    pub device: Option<PathBuf>,
    /// The epoch of the lease; null for an attachment without one.
    pub epoch: Option<u64>,
    /// The disk had this attachment already.
    pub already_attached: bool,
    /// Whom the disk was taken from.
    pub took_over: Option<TookOver>,
    /// How old the durable state is that a `read` or `branch` of a held disk sees.
    pub state_age_seconds: Option<f64>,
}

/// `detach`: drains, then releases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detach {
    /// The disk or snapshot.
    pub target: Target,
    /// Whether to close the connections of clients instead of refusing.
    #[serde(default)]
    pub disconnect: bool,
}

/// Answers [`Detach`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DetachReply {
    /// What was detached.
    pub target: Target,
    /// The position at which the store holds the disk; null for an attachment without a lease.
    pub drained_lsn: Option<u64>,
    /// Connections that were closed.
    pub disconnected: Vec<ClientView>,
}

/// `flush`: everything acknowledged is on stable media.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flush {
    /// The disk or snapshot.
    pub target: Target,
}

/// Answers [`Flush`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlushReply {
    /// What was flushed.
    pub target: Target,
    /// Every write up to this position is on stable media.
    pub flushed_lsn: u64,
}

/// `drain`: everything acknowledged is in the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// The disk or snapshot.
    pub target: Target,
}

/// Answers [`Drain`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrainReply {
    /// What was drained.
    pub target: Target,
    /// The store holds every write up to this position.
    pub drained_lsn: u64,
    /// The generation of the head that says so.
    pub generation: u64,
}

/// `snapshot`: the disk at one position of its write order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The disk.
    pub name: DiskName,
    /// The snapshot's name; made up if null.
    #[serde(default)]
    pub snapshot: Option<SnapshotName>,
    /// For people.
    #[serde(default)]
    pub message: Option<String>,
    /// Whether to return only when the store holds it.
    #[serde(default)]
    pub wait: bool,
}

/// Answers [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotReply {
    /// `NAME@SNAPSHOT`.
    pub target: Target,
    /// The snapshot.
    pub snapshot: SnapshotView,
}

/// `snapshots`: of one disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshots {
    /// The disk.
    pub name: DiskName,
}

/// Answers [`Snapshots`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotsReply {
    /// The disk.
    pub name: DiskName,
    /// Its snapshots, oldest first.
    pub snapshots: Vec<SnapshotView>,
}

/// `fork`: a new writable disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// A snapshot, or a disk of which one is taken first.
    pub target: Target,
    /// The name of the new disk.
    pub new: DiskName,
}

/// Answers [`Fork`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkReply {
    /// The new disk.
    pub name: DiskName,
    /// Its identity.
    pub id: DiskId,
    /// What it was forked from; a disk without a snapshot is the newest durable state of one held elsewhere.
    pub parent: Target,
    /// How old the durable state is, for a disk that another host holds.
    pub state_age_seconds: Option<f64>,
}

/// `delete`: a disk or a snapshot. The question whether one is sure is the command line's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delete {
    /// The disk or snapshot.
    pub target: Target,
}

/// Answers [`Delete`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeleteReply {
    /// What is deleted; its objects follow in the background.
    pub target: Target,
}

/// `resize`: grows a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// The disk.
    pub name: DiskName,
    /// The new size, a multiple of 4096, not below the old one.
    pub size_bytes: u64,
}

/// Answers [`Resize`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResizeReply {
    /// The disk.
    pub name: DiskName,
    /// Its size now.
    pub size_bytes: u64,
    /// Its size before.
    pub size_bytes_before: u64,
}

/// `check`: verifies every reference of a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// The disk.
    pub name: DiskName,
    /// Whether to read and check every block as well.
    #[serde(default)]
    pub deep: bool,
}

/// Answers [`Check`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckReply {
    /// The disk.
    pub name: DiskName,
    /// Objects looked at.
    pub objects: u64,
    /// Blocks whose checksums were verified.
    pub blocks: u64,
    /// What is wrong; empty is a sound disk.
    pub problems: Vec<Problem>,
}

/// One thing that [`Check`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The key of the object.
    pub object: String,
    /// What is wrong with it.
    pub message: String,
}

/// `recover`: a quarantined log as a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recover {
    /// The disk whose log it is.
    pub name: DiskName,
    /// The name of the new disk.
    pub new: DiskName,
}

/// Answers [`Recover`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecoverReply {
    /// The new disk.
    pub name: DiskName,
    /// Its identity.
    pub id: DiskId,
    /// The snapshot that the log was applied to.
    pub base: Target,
    /// Writes of the log that the new disk holds.
    pub records: u64,
    /// Their bytes.
    pub recovered_bytes: u64,
}

/// How far a command is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What it is doing: `draining d1`, `waiting for host-b to release d1`.
    pub doing: String,
    /// How much is done.
    pub done_bytes: u64,
    /// Of how much, if that is known.
    pub total_bytes: Option<u64>,
}
