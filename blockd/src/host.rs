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

/// `host.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct HostFile {
    host: HostId,
    machine: String,
    /// What was last written to the heartbeat object, or was about to be.
    beat: Option<Beat>,
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
    machine: String,
    beat: Mutex<Option<Beat>>,
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
            machine,
            beat: Mutex::new(file.beat),
            tag: tokio::sync::Mutex::new(None),
        };
        Ok((host, former))
    }

    /// Gives the directory a new identity: it was found to be a copy.
    ///
    /// # Errors
    /// [`Kind::Failed`] when the directory cannot be written.
    pub fn renew(&mut self) -> Result<()> {
        let file = HostFile::fresh(&self.machine);
        local_file::store(&self.path, &file)?;
        self.id = file.host;
        self.beat = Mutex::new(None);
        self.tag = tokio::sync::Mutex::new(None);
        Ok(())
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
        let written = *self.beat.lock().expect("no panic while held");
        let Some(found) = found else { return Ok(Standing::Confirmed) };
        // An older counter is ours, too: the last beat may not have reached the store.
        let ours = written.is_some_and(|beat| {
            found.value.boot == beat.boot && found.value.counter <= beat.counter
        });
        if !ours {
            return Ok(Standing::Copied);
        }
        *self.tag.lock().await = Some(found.etag);
        Ok(Standing::Confirmed)
    }

    /// Writes the next heartbeat.
    ///
    /// # Errors
    /// [`Kind::LeaseLost`] when another daemon beats under this identity, [`Kind::StoreUnavailable`].
    pub async fn beat(&self, store: &Store) -> Result<()> {
        let mut tag = self.tag.lock().await;
        let beat = self.next_beat()?;
        let heartbeat = Heartbeat {
            host: self.id,
            hostname: self.hostname.clone(),
            boot: self.boot,
            counter: beat.counter,
            unix_ms: clock::unix_ms(),
        };
        let key = heartbeat_key(self.id);
        let written = match tag.as_ref() {
            None => objects::create(store, &key, &heartbeat).await?,
            Some(tag) => objects::replace(store, &key, &heartbeat, tag).await?,
        };
        if let Some(written) = written {
            *tag = Some(written);
            return Ok(());
        }
        // A beat of ours that was given up on may have landed after all.
        match objects::load::<Heartbeat>(store, &key).await? {
            Some(found) if found.value.boot == self.boot => {
                *tag = Some(found.etag);
                Ok(())
            }
            Some(found) => Err(Error::new(
                Kind::LeaseLost,
                format!("host {} also beats from {}", self.id, found.value.hostname),
            )
            .with_fix("two daemons run on copies of one state directory: give one a new one")),
            None => {
                *tag = None;
                Ok(())
            }
        }
    }

    fn next_beat(&self) -> Result<Beat> {
        let mut last = self.beat.lock().expect("no panic while held");
        let counter = last.map_or(0, |beat| beat.counter) + 1;
        let beat = Beat { boot: self.boot, counter };
        let file = HostFile { host: self.id, machine: self.machine.clone(), beat: Some(beat) };
        local_file::store(&self.path, &file)?;
        *last = Some(beat);
        Ok(beat)
    }
}

impl HostFile {
    fn fresh(machine: &str) -> Self {
        Self { host: HostId::random(), machine: machine.to_owned(), beat: None }
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
