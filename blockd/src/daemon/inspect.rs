//! What the daemon says about itself and about what is stored.

use std::collections::BTreeMap;

use futures_util::stream::{self, StreamExt};
use s3_backend::{ObjectStore, Operation};

use super::Daemon;
use crate::blob::{self, Location};
use crate::blob_table::{BlobTable, ObjectKind};
use crate::cache::FrameKey;
use crate::clock;
use crate::config::LogSync;
use crate::control::Call;
use crate::control::api::{Check, CheckReply, Problem, Progress, UsageReply};
use crate::control::view::{
    CacheStatus, LogMode, LogStatus, LogSyncMode, MemoryStatus, StatusReply, StoreStatus, UsageView,
};
use crate::disk;
use crate::error::{Error, Kind, Result};
use crate::extent_map::Advance;
use crate::geometry::{BLOCK_BYTES, BlockRange, to_u64};
use crate::head::Head;
use crate::ids::DiskName;
use crate::map::Walk;
use crate::{objects, registry};

/// Objects that a check looks up at once.
const LOOKS_AT_ONCE: usize = 16;

/// Frames that a deep check reads at once.
const READS_AT_ONCE: usize = 8;

impl Daemon {
    pub(super) async fn status_view(&self) -> Result<StatusReply> {
        let mut disks = Vec::new();
        let served = self.all_served();
        for writer in served.iter().filter_map(|served| served.writer.as_ref()) {
            let head = writer.head.borrow().clone();
            disks.push(self.disk_view(&writer.disk.name, &head).await?);
        }
        Ok(StatusReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            host: self.host.id(),
            hostname: self.host.hostname().to_owned(),
            boot_nonce: self.host.boot(),
            state_dir: self.config.state_dir.clone(),
            store: self.store_status(),
            log: self.log_status(),
            cache: self.cache_status(),
            memory: MemoryStatus {
                used_bytes: self.fetcher.memory_bytes() + self.dirty.used_bytes(),
                max_bytes: self.config.memory_bytes_max,
                resident_bytes: resident_bytes(),
            },
            warnings: self.warnings(),
            disks,
        })
    }

    fn store_status(&self) -> StoreStatus {
        let counters = self.store.counters();
        let health = self.store.health();
        let requests: BTreeMap<String, u64> = Operation::ALL
            .iter()
            .map(|operation| {
                let tally = counters.of(*operation);
                (operation.name().to_owned(), tally.done + tally.refused + tally.failed)
            })
            .collect();
        let failing = health.failing_for.map(|duration| {
            clock::unix_ms().saturating_sub(u64::try_from(duration.as_millis()).unwrap_or(0))
        });
        StoreStatus {
            url: self.config.store.to_string(),
            id: self.format.lock().expect("no panic while held").as_ref().map(|it| it.store),
            available: health.failing_for.is_none(),
            unavailable_since_unix_ms: failing,
            last_error: health.last_error,
            requests,
            put_bytes: counters.bytes_up,
            get_bytes: counters.bytes_down,
        }
    }

    fn log_status(&self) -> LogStatus {
        let buffered = self.logs.is_buffered();
        let used = self
            .all_served()
            .iter()
            .filter_map(|served| served.writer.as_ref())
            .map(|writer| writer.disk.log().positions().bytes_used)
            .sum();
        LogStatus {
            mode: if buffered { LogMode::Buffered } else { LogMode::Direct },
            sync: match self.config.log_sync {
                LogSync::Fdatasync => LogSyncMode::Fdatasync,
                LogSync::Auto | LogSync::Dsync => LogSyncMode::Dsync,
            },
            ring: matches!(self.logs.staging(), wal::Staging::Outlives),
            used_bytes: used,
            max_bytes: self.config.log_bytes_max,
        }
    }

    fn cache_status(&self) -> CacheStatus {
        let stats = self.fetcher.cache().stats();
        CacheStatus {
            used_bytes: stats.used_bytes,
            max_bytes: self.config.cache_bytes_max,
            hits: stats.hits,
            misses: stats.misses,
        }
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.config.store_is_inside_state_dir() {
            warnings
                .push("the store lies inside the state directory: lost with this host".to_owned());
        }
        if self.logs.is_buffered() {
            warnings.push("the log goes through the page cache: no O_DIRECT there".to_owned());
        }
        if let wal::Staging::Private(why) = self.logs.staging() {
            warnings.push(format!("writes are acknowledged from the log: {why}"));
        }
        for folder in self.quarantined_folders() {
            warnings.push(format!("a quarantined log is kept in {}", folder.display()));
        }
        for (name, broken) in self.broken.lock().expect("no panic while held").iter() {
            warnings.push(format!("disk {name} is not served: {}", broken.reason.report()));
        }
        warnings
    }

    pub(super) async fn usage_of(&self, name: Option<DiskName>) -> Result<UsageReply> {
        let store = self.control_store();
        let names = match name {
            Some(name) => vec![name],
            None => registry::list(&store).await?.into_iter().map(|(name, _)| name).collect(),
        };
        let mut disks = Vec::new();
        for name in names {
            let head = match self.head_of(&name).await {
                Ok(head) => head,
                // Deleted between the list and here.
                Err(error) if error.kind() == Kind::NotFound && disks.len() > 1 => continue,
                Err(error) => return Err(error),
            };
            disks.push(self.usage_view(name, &head).await?);
        }
        Ok(UsageReply { disks })
    }

    /// What a disk stores, from its blob table and tail.
    async fn usage_view(&self, name: DiskName, head: &Head) -> Result<UsageView> {
        let pages = self.fetcher.pages().source();
        let table = BlobTable::load(head.disk, &head.table, pages).await?;
        let mut view = UsageView {
            name,
            size_bytes: head.size_bytes,
            stored_bytes: 0,
            live_bytes: 0,
            dead_bytes: 0,
            pinned_bytes: 0,
            map_bytes: 0,
            shared_bytes: 0,
            objects: to_u64(table.len()),
        };
        for entry in table.iter() {
            view.stored_bytes += entry.bytes;
            match entry.kind {
                _ if entry.death.is_some() => view.dead_bytes += entry.bytes,
                ObjectKind::Blob => view.live_bytes += entry.bytes,
                ObjectKind::Map => view.map_bytes += entry.bytes,
            }
        }
        for entry in &head.tail {
            if entry.blob.disk == head.disk {
                view.stored_bytes += entry.bytes;
                view.live_bytes += entry.bytes;
                view.objects += 1;
            } else {
                view.shared_bytes += entry.bytes;
            }
        }
        Ok(view)
    }

    /// Verifies that every reference resolves; with `deep`, that every block is what was written.
    pub(super) async fn check_disk(&self, call: &Call, request: Check) -> Result<CheckReply> {
        let head = self.head_of(&request.name).await?;
        let store = self.control_store();
        let mut reply =
            CheckReply { name: request.name.clone(), objects: 0, blocks: 0, problems: Vec::new() };
        for entry in &head.tail {
            reply.objects += 1;
            let key = entry.blob.blob_key();
            match store.stat(&key).await {
                Ok(meta) if meta.size == entry.bytes => {}
                Ok(meta) => reply.problems.push(Problem {
                    object: key.to_string(),
                    message: format!("has {} bytes, not {}", meta.size, entry.bytes),
                }),
                Err(error) => note(
                    &mut reply.problems,
                    &key.to_string(),
                    objects::store_error("read", &key, error),
                )?,
            }
        }
        let overlay = match disk::tail_overlay(&self.fetcher, &store, &head.tail).await {
            Ok(overlay) => overlay,
            Err(error) => {
                note(&mut reply.problems, "tail", error)?;
                return Ok(reply);
            }
        };
        let everything = BlockRange::new(0, head.size_bytes / BLOCK_BYTES);
        let mut located: Vec<(BlockRange, Location)> = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        let total = head.size_bytes;
        let mut walk = Walk::new(head.root.subtree(), everything, self.fetcher.pages());
        loop {
            match walk.next(&mut |_| ()).await {
                Ok(Some(extents)) => {
                    for (range, location) in extents {
                        for (part, hidden) in overlay.lookup(range) {
                            if hidden.is_none() {
                                let at = location.advance(part.start - range.start);
                                located.push((part, at));
                            }
                        }
                    }
                    if located.len() >= 4096 {
                        self.check_located(
                            call,
                            &mut reply,
                            &mut seen,
                            &mut located,
                            request.deep,
                            total,
                        )
                        .await?;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    note(&mut reply.problems, "map", error)?;
                    break;
                }
            }
        }
        located.extend(overlay.iter().map(|(range, location)| (range, *location)));
        self.check_located(call, &mut reply, &mut seen, &mut located, request.deep, total).await?;
        Ok(reply)
    }

    async fn check_located(
        &self,
        call: &Call,
        reply: &mut CheckReply,
        seen: &mut std::collections::BTreeSet<crate::ids::ObjectRef>,
        located: &mut Vec<(BlockRange, Location)>,
        deep: bool,
        total_bytes: u64,
    ) -> Result<()> {
        let store = self.control_store();
        let fresh: Vec<_> = located
            .iter()
            .filter_map(|(_, location)| location.blob())
            .filter(|blob| seen.insert(*blob))
            .collect();
        let looks: Vec<_> = fresh
            .into_iter()
            .map(|blob| {
                let store = store.clone();
                async move { (blob, store.stat(&blob.blob_key()).await) }
            })
            .collect();
        let mut stats = stream::iter(looks).buffer_unordered(LOOKS_AT_ONCE);
        while let Some((blob, stat)) = stats.next().await {
            reply.objects += 1;
            if let Err(error) = stat {
                let key = blob.blob_key();
                note(
                    &mut reply.problems,
                    &key.to_string(),
                    objects::store_error("find", &key, error),
                )?;
            }
        }
        if deep {
            let reads: Vec<_> = located
                .iter()
                .copied()
                .map(|(range, location)| {
                    let store = store.clone();
                    async move { (range, location, check_frame(&store, range, location).await) }
                })
                .collect();
            let mut frames = stream::iter(reads).buffer_unordered(READS_AT_ONCE);
            while let Some((range, location, outcome)) = frames.next().await {
                let place =
                    location.blob().map_or_else(String::new, |blob| blob.blob_key().to_string());
                match outcome {
                    Ok(()) => reply.blocks += range.count(),
                    Err(error) => note(&mut reply.problems, &place, error)?,
                }
                call.progress(Progress {
                    doing: format!("checking {}", reply.name),
                    done_bytes: reply.blocks * BLOCK_BYTES,
                    total_bytes: Some(total_bytes),
                });
            }
        } else {
            call.progress(Progress {
                doing: format!("checking {}", reply.name),
                done_bytes: to_u64(seen.len()),
                total_bytes: None,
            });
        }
        located.clear();
        Ok(())
    }
}

/// Reads a run of blocks from the store itself, past every cache, and verifies it.
async fn check_frame(
    store: &s3_backend::Store,
    range: BlockRange,
    location: Location,
) -> Result<()> {
    let Location::Data { blob, frame_offset, frame_len, index } = location else { return Ok(()) };
    let bytes = crate::fetch::get_range(
        store,
        &blob.blob_key(),
        u64::from(frame_offset),
        u64::from(frame_len),
    )
    .await?;
    let frame = blob::decode_frame(&bytes, &blob, frame_offset)?;
    crate::fetch::check_blocks(
        &frame,
        usize::from(index),
        range,
        &FrameKey { blob, offset: frame_offset },
    )
}

/// Damage is a finding; a store that does not answer is an error.
fn note(problems: &mut Vec<Problem>, object: &str, error: Error) -> Result<()> {
    if error.kind() == Kind::StoreUnavailable {
        return Err(error);
    }
    problems.push(Problem { object: object.to_owned(), message: error.report() });
    Ok(())
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}
