//! The right to write a disk: taken, resumed, lost and released by compare-and-swap of its head.
//!
//! Rules, each of which stops a concrete loss:
//! - An intent (host, boot nonce, epoch to come) is fsynced locally *before* the swap, and the
//!   heartbeat exists before it, so a crash in between leaves a lease that this host can resume.
//! - Only a release makes a head clean. A held head is never clean, however idle its holder.
//! - A holder is silent when its heartbeat has not changed for the lease time on *our* monotonic
//!   clock; wall clocks of two hosts are never compared. Taking over from a silent holder needs the
//!   caller's word, and the same swap keeps the state as snapshot `lost-<epoch>`.
//! - A restarted daemon resumes a lease only when host, epoch and boot nonce in the head are the ones
//!   it fsynced locally.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use s3_backend::{ETag, Store};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::document::Document;
use crate::error::{Error, Kind, Result};
use crate::head::{DiskState, Head, Holder};
use crate::host::{Heartbeat, Host};
use crate::ids::{
    DiskId, DiskName, Epoch, HostId, Nonce, SnapshotId, SnapshotName, head_key, heartbeat_key,
};
use crate::objects::{HeadHandle, Tagged};
use crate::{clock, failpoint, local_file, objects, registry};

/// How a disk is offered to clients: kept over restarts of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Offer {
    /// Unix socket of the export; none: the default one.
    pub socket: Option<PathBuf>,
    /// TCP address of the export.
    pub tcp: Option<std::net::SocketAddr>,
    /// A branch that goes away when it is detached.
    #[serde(default)]
    pub discard: bool,
}

/// `disks/<disk-id>/attachment.json`: what this host fsynced about its right to write one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Name under which it was attached.
    pub name: DiskName,
    /// The disk.
    pub disk: DiskId,
    /// The host that attached it.
    pub host: HostId,
    /// The epoch it holds, or was about to take.
    pub epoch: Epoch,
    /// Boot nonces of the daemons that served it under this epoch, oldest first.
    pub boots: Vec<Nonce>,
    /// How it is offered.
    pub offer: Offer,
}

impl Document for Attachment {
    const KIND: &'static str = "attachment";
}

/// `disks/<disk-id>/head.json`: the head as this host last committed it, so that a restart can serve
/// while the store is down. Written after the swap and before the log is released.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadCopy {
    /// The head.
    pub head: Head,
    /// Its tag in the store.
    pub etag: String,
}

impl Document for HeadCopy {
    const KIND: &'static str = "head-copy";
}

/// The small files of one attached disk.
#[derive(Debug, Clone)]
pub struct LeaseFiles {
    dir: PathBuf,
}

impl LeaseFiles {
    /// The files of `disk` under a state directory.
    #[must_use]
    pub fn new(state_dir: &Path, disk: DiskId) -> Self {
        Self { dir: state_dir.join("disks").join(disk.to_string()) }
    }

    /// Every attachment recorded under a state directory; damaged files are errors of their own.
    ///
    /// # Errors
    /// [`Kind::Failed`] when the directory cannot be read.
    pub fn all(state_dir: &Path) -> Result<Vec<(DiskId, Result<Attachment>)>> {
        let dir = state_dir.join("disks");
        local_file::create_dir(&dir)?;
        let cannot = |error| {
            Error::new(Kind::Failed, format!("cannot read {}", dir.display())).with_source(error)
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&dir).map_err(cannot)? {
            let name = entry.map_err(cannot)?.file_name();
            let Some(Ok(disk)) = name.to_str().map(str::parse::<DiskId>) else { continue };
            let path = Self::new(state_dir, disk).dir.join("attachment.json");
            match local_file::load(&path) {
                Ok(Some(attachment)) => found.push((disk, Ok(attachment))),
                Ok(None) => {}
                Err(error) => found.push((disk, Err(error))),
            }
        }
        found.sort_by_key(|(disk, _)| *disk);
        Ok(found)
    }

    /// Records an attachment.
    ///
    /// # Errors
    /// [`Kind::Failed`].
    pub fn store_attachment(&self, attachment: &Attachment) -> Result<()> {
        local_file::create_dir(&self.dir)?;
        local_file::store(&self.dir.join("attachment.json"), attachment)
    }

    /// Records the head as committed.
    ///
    /// # Errors
    /// [`Kind::Failed`].
    pub fn store_head(&self, head: &Tagged<Head>) -> Result<()> {
        let copy = HeadCopy { head: head.value.clone(), etag: head.etag.to_string() };
        local_file::store(&self.dir.join("head.json"), &copy)
    }

    /// The head as last committed from here.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] naming the file.
    pub fn load_head(&self) -> Result<Option<Tagged<Head>>> {
        let copy = local_file::load::<HeadCopy>(&self.dir.join("head.json"))?;
        Ok(copy.and_then(|copy| {
            let etag = ETag::parse(&copy.etag)?;
            Some(Tagged { value: copy.head, etag })
        }))
    }

    /// Forgets the attachment: it was released.
    ///
    /// # Errors
    /// [`Kind::Failed`].
    pub fn remove(&self) -> Result<()> {
        local_file::remove(&self.dir.join("attachment.json"))?;
        local_file::remove(&self.dir.join("head.json"))?;
        match std::fs::remove_dir(&self.dir) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                Err(Error::new(Kind::Failed, format!("cannot remove {}", self.dir.display()))
                    .with_source(error))
            }
        }
    }
}

/// Other hosts' heartbeats as this daemon has seen them, on its own clock.
#[derive(Debug, Default)]
pub struct Observer {
    seen: Mutex<HashMap<HostId, (Option<ETag>, Instant)>>,
}

impl Observer {
    /// How long a host has been silent as far as this daemon has seen: zero at the first look.
    ///
    /// # Errors
    /// [`Kind::StoreUnavailable`].
    pub async fn silence(&self, store: &Store, host: HostId) -> Result<Duration> {
        let found = objects::load::<Heartbeat>(store, &heartbeat_key(host)).await?;
        let tag = found.map(|found| found.etag);
        let now = Instant::now();
        let mut seen = self.seen.lock().expect("no panic while held");
        let entry = seen.entry(host).or_insert_with(|| (tag.clone(), now));
        if entry.0 != tag {
            *entry = (tag, now);
        }
        Ok(now - entry.1)
    }
}

/// What a takeover left behind.
#[derive(Debug, Clone)]
pub struct Takeover {
    /// Who held the disk.
    pub from: Holder,
    /// The snapshot that keeps the state.
    pub snapshot: SnapshotName,
    /// Position up to which the former holder had drained.
    pub drained_lsn: u64,
    /// When it last did, on its own clock.
    pub drained_unix_ms: u64,
}

/// Says who holds a disk and since when.
#[must_use]
pub fn busy(name: &DiskName, holder: &Holder, silent: Option<Duration>) -> Error {
    let silence = match silent {
        Some(silent) if silent.as_secs() > 0 => {
            format!(", seen silent for {} s", silent.as_secs())
        }
        _ => String::new(),
    };
    Error::new(
        Kind::DiskBusy,
        format!(
            "disk {name} is held by {} (host {}) since {}{silence}",
            holder.hostname,
            holder.host,
            clock::rfc3339(holder.since_unix_ms)
        ),
    )
    .with_fix(format!("detach it there (`blockd detach {name}`), or wait for it with --wait"))
    .with_detail("holder", holder.host.to_string())
    .with_detail("hostname", holder.hostname.as_str())
    .with_detail("since_unix_ms", holder.since_unix_ms)
    .with_detail("silent_seconds", silent.map_or(0, |silent| silent.as_secs()))
}

/// Takes a free disk for this host.
///
/// # Errors
/// [`Kind::DiskBusy`] when somebody was faster.
pub async fn acquire(
    store: &Store,
    host: &Host,
    files: &LeaseFiles,
    name: &DiskName,
    head: Tagged<Head>,
    offer: &Offer,
) -> Result<HeadHandle> {
    if head.value.state != DiskState::Live {
        return Err(registry::deleting(name));
    }
    assert!(head.value.holder.is_none(), "a held disk is taken over, not acquired");
    take(store, host, files, name, head, offer, |_| ()).await
}

/// Takes a disk from a holder that was seen silent, keeping its state as `lost-<epoch>`.
///
/// # Errors
/// [`Kind::DiskBusy`] when the head changed meanwhile.
pub async fn take_over(
    store: &Store,
    host: &Host,
    files: &LeaseFiles,
    name: &DiskName,
    head: Tagged<Head>,
    offer: &Offer,
) -> Result<(HeadHandle, Takeover)> {
    let from = head.value.holder.clone().expect("a free disk is acquired, not taken over");
    let snapshot: SnapshotName =
        format!("lost-{}", head.value.epoch).parse().expect("letters, a hyphen and digits");
    let takeover = Takeover {
        from,
        snapshot: snapshot.clone(),
        drained_lsn: head.value.drained_lsn,
        drained_unix_ms: head.value.drained_unix_ms,
    };
    let keep = move |next: &mut Head| {
        let message = "state of a disk taken over from a silent holder".to_owned();
        let lost = next.snapshot(snapshot, Some(message), SnapshotId::random(), clock::unix_ms());
        next.snapshots.push(lost);
    };
    Ok((take(store, host, files, name, head, offer, keep).await?, takeover))
}

async fn take(
    store: &Store,
    host: &Host,
    files: &LeaseFiles,
    name: &DiskName,
    head: Tagged<Head>,
    offer: &Offer,
    change: impl FnOnce(&mut Head),
) -> Result<HeadHandle> {
    let mut next = head.value.successor();
    change(&mut next);
    next.epoch += 1;
    next.holder = Some(Holder {
        host: host.id(),
        boot: host.boot(),
        hostname: host.hostname().to_owned(),
        since_unix_ms: clock::unix_ms(),
    });
    let attachment = Attachment {
        name: name.clone(),
        disk: next.disk,
        host: host.id(),
        epoch: next.epoch,
        boots: vec![host.boot()],
        offer: offer.clone(),
    };
    files.store_attachment(&attachment)?;
    failpoint::pass("attach-after-intent").await;
    let key = head_key(next.disk);
    let swapped = objects::replace(store, &key, &next, &head.etag).await;
    let etag = match swapped {
        Ok(Some(etag)) => etag,
        Ok(None) => {
            let found = objects::load_head(store, next.disk).await?.value;
            if found.holder.as_ref().is_none_or(|holder| holder.host != host.id()) {
                files.remove()?;
            }
            return Err(match &found.holder {
                Some(holder) => busy(name, holder, None),
                None => Error::new(Kind::DiskBusy, format!("disk {name} changed meanwhile"))
                    .with_fix("try again"),
            });
        }
        // The swap may still land: the intent stays, and a restart or the next attach resumes it.
        Err(error) => return Err(error),
    };
    let taken = Tagged { value: next, etag };
    files.store_head(&taken)?;
    Ok(HeadHandle::new(store.clone(), taken, host.id(), attachment.boots))
}

/// Whether a head is the one that an attachment of this host describes.
#[must_use]
pub fn is_ours(head: &Head, attachment: &Attachment, host: HostId) -> bool {
    attachment.host == host && head.is_of(host, attachment.epoch, &attachment.boots)
}

/// The attachment that a head of ours implies, where the file that recorded it is damaged or gone: the
/// identity of the host was confirmed, and the log checks the epoch.
#[must_use]
pub fn derive(head: &Head, host: HostId, offer: Offer) -> Option<Attachment> {
    let holder = head.holder.as_ref().filter(|holder| holder.host == host)?;
    Some(Attachment {
        name: head.name.clone(),
        disk: head.disk,
        host,
        epoch: head.epoch,
        boots: vec![holder.boot],
        offer,
    })
}

/// Goes on with a lease of this host after a restart of its daemon. `head` comes from the store, or
/// from the local copy while the store is down: the first swap tells the difference.
///
/// # Errors
/// [`Kind::LeaseLost`] when the head is not the one this host left.
pub fn resume(
    store: &Store,
    host: &Host,
    files: &LeaseFiles,
    attachment: &mut Attachment,
    head: Tagged<Head>,
) -> Result<HeadHandle> {
    if !is_ours(&head.value, attachment, host.id()) {
        let by = match &head.value.holder {
            Some(holder) => format!("{} (host {}) holds it", holder.hostname, holder.host),
            None => "it was released".to_owned(),
        };
        return Err(Error::new(
            Kind::LeaseLost,
            format!(
                "disk {} was taken from this host: {by}, epoch {} against {} here",
                attachment.name, head.value.epoch, attachment.epoch
            ),
        ));
    }
    if !attachment.boots.contains(&host.boot()) {
        attachment.boots.push(host.boot());
        files.store_attachment(attachment)?;
    }
    files.store_head(&head)?;
    Ok(HeadHandle::new(store.clone(), head, host.id(), attachment.boots.clone()))
}
