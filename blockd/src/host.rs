//! Who this daemon is, and the heartbeat that says it lives.
//!
//! Identity: `host.json` in the state directory names the host; it is only believed on the machine
//! it was made on (`/etc/machine-id`), and only while the heartbeat object in the store still carries
//! what this directory last wrote. A copied or restored directory fails one of the two and becomes a
//! new host, so it can never pass for the holder of a lease.
//!
//! Heartbeat: one object per host, not per disk, replaced if-match at each interval while the host
//! holds a lease. What is about to be written is fsynced locally first. Observers judge a host silent
//! by this object not changing on *their* monotonic clock; its contents are for people.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use s3_backend::{ETag, Store};
use serde::{Deserialize, Serialize};

use crate::document::Document;
use crate::error::{Error, Kind, Result};
use crate::ids::{HostId, Nonce, heartbeat_key};
use crate::{clock, local_file, objects};

/// How often a beat is tried against beats of our own that landed late.
const BEAT_TRIES: usize = 4;

/// `host.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct HostFile {
    host: HostId,
    machine: String,
    /// What may be in the heartbeat object: the last beat known to be there, and those that were about
    /// to be written since, by this boot or earlier ones. The newest is last.
    beats: Vec<Beat>,
    /// Checksum of the identity of the log directory, so that another one is not taken for it.
    #[serde(default)]
    log: Option<u32>,
}

impl Document for HostFile {
    const KIND: &'static str = "host";
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Beat {
    boot: Nonce,
    counter: u64,
}

/// `hosts/<host-id>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The host.
    pub host: HostId,
    /// What people call it.
    pub hostname: String,
    /// Boot nonce of its running daemon.
    pub boot: Nonce,
    /// Grows with every beat of that daemon.
    pub counter: u64,
    /// Its wall clock, for people only.
    pub unix_ms: u64,
}

impl Document for Heartbeat {
    const KIND: &'static str = "heartbeat";
}

/// Whether the store agrees that this directory is the host it says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The heartbeat is the last one written from here, or there is none yet.
    Confirmed,
    /// Another daemon beats under this identity: this directory is a copy.
    Copied,
}

/// This daemon's identity and heartbeat.
#[derive(Debug)]
pub struct Host {
    path: PathBuf,
    id: HostId,
    boot: Nonce,
    hostname: String,
    written: Mutex<HostFile>,
    tag: tokio::sync::Mutex<Option<ETag>>,
}

impl Host {
    /// Reads the identity of a state directory, or gives it one.
    ///
    /// Returns the host and, when the directory came from another machine, the id it had there.
    ///
    /// # Errors
    /// [`Kind::Failed`] when the directory cannot be written, [`Kind::Corrupt`] naming a damaged file.
    pub fn open(state_dir: &Path) -> Result<(Self, Option<HostId>)> {
        let path = state_dir.join("host.json");
        let machine = machine_id();
        let stored = local_file::load::<HostFile>(&path)?;
        let (file, former) = match stored {
            Some(file) if file.machine == machine => (file, None),
            Some(file) => (HostFile::fresh(&machine), Some(file.host)),
            None => (HostFile::fresh(&machine), None),
        };
        local_file::store(&path, &file)?;
        let host = Self {
            path,
            id: file.host,
            boot: Nonce::random(),
            hostname: hostname(),
            written: Mutex::new(file),
            tag: tokio::sync::Mutex::new(None),
        };
        Ok((host, former))
    }

    /// Gives the directory a new identity: it was found to be a copy.
    ///
    /// # Errors
    /// [`Kind::Failed`] when the directory cannot be written.
    pub fn renew(&mut self) -> Result<()> {
        let file = HostFile::fresh(&machine_id());
        local_file::store(&self.path, &file)?;
        self.id = file.host;
        self.written = Mutex::new(file);
        self.tag = tokio::sync::Mutex::new(None);
        Ok(())
    }

    /// Makes sure that the log directory is the one that this host's leases belong to.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] when it is another one and `leases` says that there are some: their
    /// acknowledged writes are in the other.
    pub fn check_log(&self, dir: &Path, leases: bool) -> Result<()> {
        let cannot = |error| {
            Error::new(
                Kind::Failed,
                format!("cannot read the identity of the log in {}", dir.display()),
            )
            .with_source(error)
        };
        let log = crc32fast::hash(&std::fs::read(dir.join("id")).map_err(cannot)?);
        let mut file = self.written.lock().expect("no panic while held");
        if leases && file.log.is_some_and(|known| known != log) {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!(
                    "{} is not the log directory that this host's disks were written to",
                    dir.display()
                ),
            )
            .with_fix(
                "mount it, or name the former one with --log-dir: acknowledged writes are there",
            ));
        }
        file.log = Some(log);
        local_file::store(&self.path, &*file)
    }

    /// The host.
    #[must_use]
    pub fn id(&self) -> HostId {
        self.id
    }

    /// Drawn when this daemon started.
    #[must_use]
    pub fn boot(&self) -> Nonce {
        self.boot
    }

    /// What people call the host.
    #[must_use]
    pub fn hostname(&self) -> &str {
        &self.hostname
    }

    /// Compares the heartbeat in the store with what this directory last wrote.
    ///
    /// # Errors
    /// [`Kind::StoreUnavailable`].
    pub async fn standing(&self, store: &Store) -> Result<Standing> {
        let found = objects::load::<Heartbeat>(store, &heartbeat_key(self.id)).await?;
        let Some(found) = found else { return Ok(Standing::Confirmed) };
        let ours = self.may_have_written(&found.value);
        if !ours {
            return Ok(Standing::Copied);
        }
        *self.tag.lock().await = Some(found.etag);
        Ok(Standing::Confirmed)
    }

    /// Whether a heartbeat is one of those that this directory wrote, or was about to.
    fn may_have_written(&self, found: &Heartbeat) -> bool {
        let file = self.written.lock().expect("no panic while held");
        file.beats.iter().any(|beat| beat.boot == found.boot && found.counter <= beat.counter)
    }

    /// Writes the next heartbeat.
    ///
    /// # Errors
    /// [`Kind::LeaseLost`] when another daemon beats under this identity, [`Kind::StoreUnavailable`].
    pub async fn beat(&self, store: &Store) -> Result<()> {
        let mut tag = self.tag.lock().await;
        let heartbeat = self.next_beat()?;
        let key = heartbeat_key(self.id);
        // Refused once by a beat of ours that was given up on and landed after all.
        for _ in 0..BEAT_TRIES {
            let written = match tag.as_ref() {
                None => objects::create(store, &key, &heartbeat).await?,
                Some(tag) => objects::replace(store, &key, &heartbeat, tag).await?,
            };
            if written.is_some() {
                *tag = written;
                self.confirm_beat();
                return Ok(());
            }
            match objects::load::<Heartbeat>(store, &key).await? {
                Some(found) if self.may_have_written(&found.value) => *tag = Some(found.etag),
                Some(found) => {
                    return Err(Error::new(
                        Kind::LeaseLost,
                        format!("host {} also beats from {}", self.id, found.value.hostname),
                    )
                    .with_fix(
                        "two daemons run on copies of one state directory: give one a new one",
                    ));
                }
                None => *tag = None,
            }
        }
        Err(Error::new(Kind::StoreUnavailable, format!("{key} changes faster than it is read")))
    }

    /// Records the next beat locally before it goes to the store.
    fn next_beat(&self) -> Result<Heartbeat> {
        let mut file = self.written.lock().expect("no panic while held");
        let last = file.beats.last().copied();
        let counter = last.map_or(0, |beat| beat.counter) + 1;
        let beat = Beat { boot: self.boot, counter };
        match file.beats.last_mut() {
            Some(last) if last.boot == self.boot => *last = beat,
            _ => file.beats.push(beat),
        }
        local_file::store(&self.path, &*file)?;
        Ok(Heartbeat {
            host: self.id,
            hostname: self.hostname.clone(),
            boot: self.boot,
            counter,
            unix_ms: clock::unix_ms(),
        })
    }

    /// The newest beat is in the store: older ones can no longer be, and the next record says so.
    fn confirm_beat(&self) {
        let mut file = self.written.lock().expect("no panic while held");
        let older = file.beats.len().saturating_sub(1);
        file.beats.drain(..older);
    }
}

impl HostFile {
    fn fresh(machine: &str) -> Self {
        Self { host: HostId::random(), machine: machine.to_owned(), beats: Vec::new(), log: None }
    }
}

fn machine_id() -> String {
    std::fs::read_to_string("/etc/machine-id")
        .map_or_else(|_| hostname(), |id| id.trim().to_owned())
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}
