//! A quarantined log as a fork: nothing that was acknowledged is thrown away silently.
//!
//! The base is the snapshot that the takeover kept of the epoch that the log belongs to, and nothing
//! else: the log's first record must be the one after the snapshot's position. The log itself stays in
//! quarantine until someone removes it.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use wal::{Lsn, OwnerId, Quarantined, Recovered, RecoveredKind};

use super::{Daemon, forks};
use crate::control::api::{Recover, RecoverReply};
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::geometry::{BLOCK_BYTES, to_usize};
use crate::head::Snapshot;
use crate::ids::{DiskId, SnapshotName, Target};
use crate::lease::Offer;
use crate::registry;

impl Daemon {
    pub(super) async fn recover_log(self: Arc<Self>, request: Recover) -> Result<RecoverReply> {
        let store = self.control_store();
        registry::check_free(&store, &request.new).await?;
        let head = registry::load_by_name(&store, &request.name).await?.value;
        let (folder, epoch) = self.newest_quarantined(&request.name.to_string(), head.disk)?;
        let lost: SnapshotName = format!("lost-{epoch}").parse().expect("a valid name");
        let base = registry::find_snapshot(&store, &head, &lost).await.map_err(|error| {
            error.context(format!("the log in {} has no base", folder.display()))
        })?;
        let logs = Arc::clone(&self.logs);
        let floor = Lsn::new(base.lsn);
        let from = folder.clone();
        let found = tokio::task::spawn_blocking(move || logs.read_quarantined(&from, floor))
            .await
            .expect("reading a log does not panic")
            .map_err(|error| {
                Error::new(Kind::Corrupt, format!("cannot read the log in {}", folder.display()))
                    .with_source(error)
            })?;
        check_base(&found, &base)?;
        let fork = forks::make_fork(&store, &head, base.clone(), request.new.clone()).await?;
        let target = Target { disk: request.new.clone(), snapshot: None };
        let turn = self.turn(&request.new).await;
        let offer = Offer::default();
        let address = self.address(&target, &offer)?;
        let free = registry::load_by_name(&store, &request.new).await?;
        Arc::clone(&self).take_and_open(request.new.clone(), free, offer, address).await?;
        let served = self.attached(&target)?;
        let disk = Arc::clone(&served.writer.as_ref().expect("attached for writing").disk);
        let applied = apply(&disk, found.recovery.records).await;
        let (records, recovered_bytes) = applied.map_err(|error| {
            error.context(format!("{} is attached and holds a part of the log", request.new))
        })?;
        let (_asking, asker) = tokio::sync::watch::channel(());
        self.release(&served, asker, turn).await?;
        let parent = Target { disk: request.name, snapshot: Some(base.name) };
        tracing::info!(disk = %request.new, base = %parent, records, "quarantined log recovered");
        if let Some(damage) = found.damage {
            tracing::warn!(log = %folder.display(), %damage, "the log ends in damage: what lies before was recovered");
        }
        Ok(RecoverReply {
            name: request.new,
            id: fork.disk,
            base: parent,
            records,
            recovered_bytes,
        })
    }

    /// The folder of the newest quarantined log of a disk, and the epoch of its records.
    fn newest_quarantined(&self, name: &str, disk: DiskId) -> Result<(PathBuf, u64)> {
        let owner = OwnerId::new(disk.to_bytes()).to_string();
        let newest = self
            .quarantined_folders()
            .into_iter()
            .filter_map(|folder| {
                let parts =
                    folder.file_name()?.to_str()?.strip_prefix(&owner)?.strip_prefix('-')?;
                let (epoch, count) = parts.split_once('-')?;
                Some((epoch.parse().ok()?, count.parse::<u64>().ok()?, folder.clone()))
            })
            .max();
        newest.map(|(epoch, _, folder)| (folder, epoch)).ok_or_else(|| {
            Error::new(Kind::NotFound, format!("no quarantined log of disk {name} is on this host"))
                .with_fix("run it on the host that lost the disk")
        })
    }

    /// Every quarantined log on this host.
    pub(super) fn quarantined_folders(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.config.log_dir.join("quarantine")) else {
            return Vec::new();
        };
        let mut folders: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        folders.sort();
        folders
    }
}

fn check_base(found: &Quarantined, base: &Snapshot) -> Result<()> {
    let first = found.recovery.records.front().map(|record| record.lsn.get());
    if first.is_none_or(|first| first == base.lsn + 1) {
        return Ok(());
    }
    Err(Error::new(
        Kind::Corrupt,
        format!(
            "the log does not continue {}: it begins at lsn {}, the snapshot ends at {}",
            base.name,
            first.unwrap_or(0),
            base.lsn
        ),
    )
    .with_fix("nothing was made; keep the log"))
}

/// Writes records to a disk in their order; returns how many, and their bytes.
async fn apply(disk: &Disk, records: impl IntoIterator<Item = Recovered>) -> Result<(u64, u64)> {
    let (mut count, mut bytes) = (0, 0);
    for record in records {
        let offset = record.first_block * BLOCK_BYTES;
        let len = record.count * BLOCK_BYTES;
        match record.kind {
            RecoveredKind::Barrier { .. } => continue,
            RecoveredKind::Write => {
                let data = tokio::task::spawn_blocking(move || read(&record))
                    .await
                    .expect("reading a log does not panic")?;
                disk.write(offset, data, false).await?;
            }
            RecoveredKind::Zero(kind) => {
                disk.zero(offset, len, kind, false).await?;
            }
        }
        count += 1;
        bytes += len;
    }
    Ok((count, bytes))
}

fn read(record: &Recovered) -> Result<Bytes> {
    let place = record.place.as_ref().expect("a write has blocks");
    let count = u32::try_from(record.count).expect("a record has at most one frame");
    let mut data = vec![0; to_usize(record.count * BLOCK_BYTES)];
    place.read_blocking(0, count, &mut data).map_err(|error| {
        Error::new(Kind::Corrupt, format!("cannot read the record at lsn {}", record.lsn))
            .with_source(error)
    })?;
    Ok(Bytes::from(data))
}
