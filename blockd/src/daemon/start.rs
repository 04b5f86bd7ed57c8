//! Starting and stopping.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use nbd_server::{Limits, ServerConfig};
use s3_backend::{Kind as StoreKind, RetryPolicy, Store};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use wal::{LogConfig, LogDir, StagingConfig, SyncMethod};

use super::listeners::Listeners;
use super::{Broken, Daemon};
use crate::blob::Compression;
use crate::cache::{CacheConfig, ReadCache};
use crate::config::{self, Config, LogSync};
use crate::control::server as control_server;
use crate::disk::DirtyBudget;
use crate::drain::Uploads;
use crate::error::{Error, Kind, Result};
use crate::fetch::Fetcher;
use crate::head::StoreFormat;
use crate::host::{Host, Standing};
use crate::ids::{DiskId, DiskName};
use crate::lease::{self, LeaseFiles, Offer};
use crate::local_db::LocalDb;
use crate::{failpoint, local_file, objects, registry};

/// How long a start waits for the store before it goes on with what is local.
const STORE_PATIENCE: Duration = Duration::from_secs(5);

/// How long a start waits for the disks that it serves again.
const RESUME_PATIENCE: Duration = Duration::from_secs(15);

/// How long a stop waits for connections to end.
const CLOSE_PATIENCE: Duration = Duration::from_secs(3);

/// How often a store that did not answer at the start is tried again.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(2);

/// How long a stop waits for logs to be emptied and connections to end.
const STOP_PATIENCE: Duration = Duration::from_secs(8);

/// Runs the daemon until a signal stops it.
///
/// # Errors
/// Why it could not start, or what stopped it.
pub async fn serve(config: Config) -> Result<()> {
    failpoint::arm_from_environment().map_err(|why| Error::new(Kind::InvalidArgument, why))?;
    let control_path = config.control.clone();
    let control_timeout = config.control_timeout;
    let (daemon, fatal) = Daemon::open(config).await?;
    // The socket answers before the disks are back, so that `status` can say what it waits for.
    let listener = control_server::bind(&control_path).await?;
    let (stop_control, mut control_stopped) = watch::channel(false);
    let control = tokio::spawn(control_server::serve(
        listener,
        Arc::new(Arc::clone(&daemon)),
        control_timeout,
        async move {
            // Also when the sender is gone.
            let _ = control_stopped.wait_for(|stopped| *stopped).await;
        },
    ));
    // A disk that waits for the store does not hold up the others.
    let resuming = Arc::clone(&daemon);
    let resume = tokio::spawn(async move { resuming.resume_all().await });
    if tokio::time::timeout(RESUME_PATIENCE, resume).await.is_err() {
        tracing::warn!("some disks are still waiting for the store: going on without them");
    }
    daemon.resumed.send_replace(true);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tracing::info!(control = %control_path.display(), "ready");
    let outcome = wait_for_the_end(fatal).await;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    stop_control.send_replace(true);
    daemon.stop().await;
    let _ = tokio::time::timeout(Duration::from_secs(1), control).await;
    let _ = std::fs::remove_file(&control_path);
    outcome
}

async fn wait_for_the_end(mut fatal: mpsc::Receiver<Error>) -> Result<()> {
    let signals = || -> std::io::Result<_> {
        Ok((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    };
    let (mut terminate, mut interrupt) = signals()
        .map_err(|error| Error::new(Kind::Failed, "cannot wait for signals").with_source(error))?;
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM: stopping; the log keeps what is not drained"),
        _ = interrupt.recv() => tracing::info!("SIGINT: stopping; the log keeps what is not drained"),
        Some(error) = fatal.recv() => return Err(error),
    }
    Ok(())
}

impl Daemon {
    async fn open(config: Config) -> Result<(Arc<Self>, mpsc::Receiver<Error>)> {
        for dir in [&config.state_dir, &config.runtime_dir, &config.log_dir, &config.cache_dir] {
            local_file::create_dir(dir)?;
        }
        let lock = local_file::lock_dir(&config.state_dir)?;
        let (mut host, former) = Host::open(&config.state_dir)?;
        if let Some(former) = former {
            tracing::warn!(%former, now = %host.id(), "the state directory comes from another machine: this is a new host");
        }
        if config.store_is_inside_state_dir() {
            tracing::warn!(
                store = %config.store,
                "the store lies inside the state directory: fine for a first try, lost with this host"
            );
        }
        let store = s3_backend::open(&config.store, s3_backend::Options::default()).await.map_err(
            |error| {
                Error::new(
                    Kind::StoreUnavailable,
                    format!("cannot open the store {}", config.store),
                )
                .with_source(error)
            },
        )?;
        let patient = store.with_policy(RetryPolicy::Until(STORE_PATIENCE));
        let contact = contact(&patient, &host).await?;
        let mut copied = matches!(contact, Some((_, Standing::Copied)));
        if contact.is_some() && !copied && !LeaseFiles::all(&config.state_dir)?.is_empty() {
            // Before any disk is served: a copy of this directory that starts later must see that it
            // is one, and of two that start at once only one can win.
            copied = match host.beat(&patient).await {
                Err(error) if error.kind() == Kind::LeaseLost => true,
                Err(error) if error.kind() == Kind::StoreUnavailable => false,
                outcome => outcome.map(|()| false)?,
            };
        }
        if copied {
            let former = host.id();
            host.renew()?;
            tracing::warn!(%former, now = %host.id(), "this state directory was copied from one in use: this is a new host");
        }
        let logs = open_logs(&config)?;
        host.check_log(&config.log_dir, !LeaseFiles::all(&config.state_dir)?.is_empty())?;
        let db = LocalDb::open(&config.state_dir.join("db"));
        let cache = ReadCache::open(&cache_config(&config), Arc::clone(&db))?;
        let page_bytes_max = config.memory().map_bytes;
        let fetcher = Arc::new(Fetcher::new(store.clone(), cache, db, page_bytes_max));
        let uploads = Arc::new(Uploads::new(
            store.clone(),
            Arc::clone(&fetcher),
            match config.compression {
                config::Compression::Zstd => Compression::default(),
                config::Compression::None => Compression::Off,
            },
            config.drain_concurrency,
        ));
        let listeners = Listeners::new(server_config(&config));
        let (fatal, fatal_inbox) = mpsc::channel(1);
        let daemon = Arc::new(Self {
            host,
            store,
            format: std::sync::Mutex::new(contact.as_ref().map(|(format, _)| format.clone())),
            logs,
            fetcher,
            uploads,
            dirty: Arc::new(DirtyBudget::new(config.memory().dirty_bytes)),
            listeners,
            observer: crate::lease::Observer::default(),
            snapshots: super::SnapshotBook::default(),
            served: std::sync::Mutex::default(),
            broken: std::sync::Mutex::default(),
            turns: std::sync::Mutex::default(),
            confirmed: watch::Sender::new(contact.is_some()),
            stopping: watch::Sender::new(false),
            resumed: watch::Sender::new(false),
            started: Instant::now(),
            tasks: super::Tasks::default(),
            fatal,
            _lock: lock,
            config,
        });
        if copied || former.is_some() {
            daemon.quarantine_all()?;
        }
        daemon.tasks.spawn(Arc::clone(&daemon).keep_beating());
        Ok((daemon, fatal_inbox))
    }

    /// A directory that is not this host's: whatever it was attached to, it is not any more.
    fn quarantine_all(&self) -> Result<()> {
        for (disk, attachment) in LeaseFiles::all(&self.config.state_dir)? {
            if let Ok(attachment) = attachment {
                self.quarantine(&attachment.name, disk)?;
            }
        }
        Ok(())
    }

    async fn resume_all(self: &Arc<Self>) {
        let recorded = match LeaseFiles::all(&self.config.state_dir) {
            Ok(recorded) => recorded,
            Err(error) => {
                tracing::error!(error = %error.report(), "cannot read which disks were attached");
                return;
            }
        };
        let store = self.store.with_policy(RetryPolicy::Until(STORE_PATIENCE));
        let resumed = recorded.into_iter().map(|(disk, attachment)| {
            let (daemon, store) = (Arc::clone(self), store.clone());
            tokio::spawn(async move {
                match attachment {
                    Ok(attachment) => {
                        let name = attachment.name.clone();
                        if let Err(error) = daemon.resume_disk(attachment, &store).await {
                            daemon.set_broken(name, error);
                        }
                    }
                    Err(error) => daemon.resume_without_record(disk, error, &store).await,
                }
            })
        });
        for outcome in join_all(resumed).await {
            if let Err(failure) = outcome {
                tracing::error!(%failure, "a disk could not be resumed");
            }
        }
    }

    /// Serves a disk whose record is damaged, at the default address, when its head says that it is ours.
    async fn resume_without_record(self: &Arc<Self>, disk: DiskId, error: Error, store: &Store) {
        let derived = match objects::load_head(store, disk).await {
            Ok(head) => lease::derive(&head.value, self.host.id(), Offer::default()),
            Err(_) => None,
        };
        let Some(attachment) = derived else {
            let name = disk.to_string().parse().expect("hexadecimal digits are a name");
            return self.set_broken(name, error);
        };
        tracing::warn!(
            disk = %attachment.name,
            error = %error.report(),
            "the record of an attachment is damaged: made again from the disk's head"
        );
        let name = attachment.name.clone();
        if let Err(error) = self.resume_disk(attachment, store).await {
            self.set_broken(name, error);
        }
    }

    fn set_broken(&self, name: DiskName, error: Error) {
        tracing::error!(disk = %name, error = %error.report(), "disk not served");
        let broken = Broken { reason: Arc::new(error) };
        self.broken.lock().expect("no panic while held").insert(name, broken);
    }

    /// Confirms the host's identity when the store was down at the start, then beats while a lease is
    /// held. An idle host without leases asks the store for nothing.
    async fn keep_beating(self: Arc<Self>) {
        let mut stopping = self.stopping.subscribe();
        let mut last_beat = Instant::now();
        let patient = self.store.with_policy(RetryPolicy::Until(self.config.heartbeat_interval));
        loop {
            let confirmed = *self.confirmed.borrow();
            let pause = if confirmed { self.config.heartbeat_interval } else { CONFIRM_INTERVAL };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stopping.changed() => return,
            }
            let outcome = if confirmed {
                if !self.holds_any() {
                    last_beat = Instant::now();
                    continue;
                }
                self.host.beat(&patient).await
            } else {
                self.confirm(&patient).await
            };
            match outcome {
                Err(error) if error.kind() == Kind::LeaseLost => {
                    let _ = self.fatal.send(error).await;
                    return;
                }
                Err(error) => tracing::debug!(error = %error.report(), "no heartbeat"),
                Ok(()) => {
                    if last_beat.elapsed() >= self.config.lease_time {
                        let daemon = Arc::clone(&self);
                        let silence = last_beat.elapsed();
                        self.tasks.spawn(async move { daemon.verify_leases(silence).await });
                    }
                    last_beat = Instant::now();
                }
            }
        }
    }

    /// After a silence as long as the lease time (a suspended process, an outage) another host may have
    /// taken our disks. The swap that would tell may be long in coming: it is made now.
    async fn verify_leases(&self, silence: Duration) {
        tracing::info!(
            silence_s = silence.as_secs(),
            "silent for a lease time: checking every lease"
        );
        let served = self.all_served();
        let checks = served.iter().filter(|served| served.writer.is_some()).map(|served| async {
            // A lease that is lost stops its disk, which says so.
            let _ = self.change_held(served, Box::new(|_| Ok(()))).await;
        });
        join_all(checks).await;
    }

    pub(super) async fn confirm(&self, store: &Store) -> Result<()> {
        match contact(store, &self.host).await? {
            None => Ok(()),
            Some((_, Standing::Copied)) => Err(Error::new(
                Kind::LeaseLost,
                format!(
                    "host {} also beats from elsewhere: this state directory is a copy",
                    self.host.id()
                ),
            )
            .with_fix("restart the daemon: it becomes a new host, and its logs are quarantined")),
            Some((format, Standing::Confirmed)) => {
                *self.format.lock().expect("no panic while held") = Some(format);
                self.confirmed.send_replace(true);
                tracing::info!("the store answers: identity confirmed");
                Ok(())
            }
        }
    }

    /// Stops: connections end, drains stop where they are, logs are emptied into their files.
    async fn stop(self: &Arc<Self>) {
        self.stopping.send_replace(true);
        let stopped = tokio::time::timeout(STOP_PATIENCE, async {
            if tokio::time::timeout(CLOSE_PATIENCE, self.listeners.shutdown()).await.is_err() {
                tracing::info!("some connections did not end in time");
            }
            for served in self.all_served() {
                let Some(writer) = &served.writer else { continue };
                let target = writer.disk.layers().last;
                if let Err(error) = writer.disk.log().wait_synced(target).await {
                    tracing::error!(disk = %served.target, %error, "the log could not be synced");
                }
            }
            self.fetcher.cache().close().await;
        })
        .await;
        if stopped.is_err() {
            tracing::warn!(
                "stopped before every log was synced: a flush that was acknowledged was"
            );
        }
        let uploaded = self.uploads.uploaded_bytes.load(Ordering::Relaxed);
        tracing::info!(uploaded_bytes = uploaded, "stopped");
    }
}

/// Asks the store whether it is honest, which store it is, and whether it knows us as ourselves. None
/// when it does not answer.
async fn contact(store: &Store, host: &Host) -> Result<Option<(StoreFormat, Standing)>> {
    match s3_backend::probe(store).await {
        Ok(_) => {}
        Err(error) if error.kind() == StoreKind::Unsupported => {
            return Err(Error::new(
                Kind::InvalidArgument,
                "the store cannot be used: it does not honour conditional writes",
            )
            .with_fix(
                "two hosts could write one disk there: use a store with If-None-Match and If-Match",
            )
            .with_source(error));
        }
        Err(error) => {
            tracing::warn!(error = %error, "the store does not answer: going on with what is local");
            return Ok(None);
        }
    }
    let unavailable = |error: Error| match error.kind() {
        Kind::StoreUnavailable => Ok(None),
        _ => Err(error),
    };
    let format = match registry::open_store(store).await {
        Ok(format) => format,
        Err(error) => return unavailable(error),
    };
    match host.standing(store).await {
        Ok(standing) => Ok(Some((format, standing))),
        Err(error) => unavailable(error),
    }
}

fn open_logs(config: &Config) -> Result<Arc<LogDir>> {
    let log_config = LogConfig {
        dir: config.log_dir.clone(),
        bytes_max: config.log_bytes_max,
        segments_ready: config.log_segments_ready,
        sync: match config.log_sync {
            LogSync::Auto => SyncMethod::default(),
            LogSync::Fdatasync => SyncMethod::Fdatasync,
            LogSync::Dsync => SyncMethod::Dsync,
        },
        allow_buffered: config.allow_buffered_log,
        staging: StagingConfig {
            bytes: usize::try_from(config.staging_bytes).unwrap_or(usize::MAX),
            path: Some(config.staging_path.clone()),
        },
        ..LogConfig::new(config.log_dir.clone())
    };
    LogDir::open(log_config).map_err(|error| {
        let unsupported = error.kind() == wal::ErrorKind::Unsupported;
        let failed = Error::new(
            Kind::Failed,
            format!("cannot open the log in {}", config.log_dir.display()),
        )
        .with_source(error);
        match unsupported {
            true => failed.with_fix(
                "put --log-dir on a local device, or accept slower and less certain writes with \
                 --allow-buffered-log true",
            ),
            false => failed,
        }
    })
}

fn cache_config(config: &Config) -> CacheConfig {
    CacheConfig {
        dir: config.cache_dir.clone(),
        bytes_max: config.cache_bytes_max,
        memory_bytes_max: config.memory().cache_bytes,
    }
}

fn server_config(config: &Config) -> ServerConfig {
    let in_flight = usize::try_from(config.in_flight_bytes_max).unwrap_or(usize::MAX);
    ServerConfig {
        // What all connections may hold at once: a few of the largest.
        limits: Limits::new(config.connections_max, in_flight.saturating_mul(4)),
        in_flight_bytes_max: in_flight,
        handshake_timeout: config.handshake_timeout,
        ..ServerConfig::default()
    }
}
