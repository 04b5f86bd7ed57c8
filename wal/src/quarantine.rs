//! Logs set aside: kept, never replayed, still readable.
//!
//! The segments of the owner and what the ring holds of it (written as one more segment) move into a
//! folder of their own, `quarantine/OWNER-EPOCH-N`. The move goes through `OWNER.part`, which a
//! later call finishes after a crash, so that one log never ends up in two folders.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::dir::{LogDir, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Origin;
use crate::log::OwnerLog;
use crate::lsn::{Lsn, OwnerId};
use crate::recover::plan;
use crate::ring::Leftover;
use crate::scan::{Found, Inspected, inspect, scan};
use crate::segment::FileId;
use crate::start::{Recovery, Tail, sound_records};

const FOLDER: &str = "quarantine";

/// What a quarantined log holds.
#[derive(Debug)]
pub struct Quarantined {
    /// Whose log it was.
    pub owner: OwnerId,
    /// The epoch of its records.
    pub epoch: u64,
    /// The records above the floor that was asked for, up to the end or the first damage.
    pub recovery: Recovery,
    /// What is wrong behind them, if anything.
    pub damage: Option<Error>,
}

/// All that is left of one owner in the directory.
struct Remains {
    found: Vec<Found>,
    left: Vec<Leftover>,
}

impl LogDir {
    /// Moves all that is left of an owner's log aside and says where it is; `None` when nothing is
    /// left. A running log of that owner is closed first. Afterwards the owner can start afresh.
    ///
    /// # Errors
    /// `Io` when the file system refuses: then a second call goes on where this one ended.
    pub fn quarantine(&self, owner: OwnerId) -> Result<Option<PathBuf>> {
        let shared = &self.shared;
        let storage = &shared.storage;
        let remains = shared.collect(owner);
        let part = format!("{FOLDER}/{owner}.part");
        let io = |verb: &str, name: &str, e| {
            Error::io(format!("{verb} {}", storage.path().join(name).display()), e)
        };
        if let Some((epoch, sequence)) = remains.newest() {
            let staged = shared.stage_out(&remains, owner, epoch, sequence)?;
            let made = storage.create_folder(&part).and_then(|()| storage.sync_folder(FOLDER));
            made.and_then(|()| storage.sync_folder("")).map_err(|e| io("create", &part, e))?;
            let names = remains.found.iter().map(|found| found.name.clone());
            let names: Vec<String> = names.chain(staged.iter().map(|id| id.name())).collect();
            for name in &names {
                let moved = storage.rename(name, &format!("{part}/{name}"));
                moved.map_err(|e| io("move", name, e))?;
            }
            let synced = storage.sync_folder(&part).and_then(|()| storage.sync_folder(""));
            synced.map_err(|e| io("sync", &part, e))?;
            shared.pool.forget(names.len());
        }
        drop(remains);
        shared.forget(owner);

        // Also what a call that was cut short moved.
        let moved = storage.list(&part).map_err(|e| io("list", &part, e))?;
        let Some(name) = moved.iter().find(|name| FileId::parse(name).is_some()) else {
            return Ok(None);
        };
        let epoch = match FileId::parse(name) {
            Some(id) => match inspect(&**storage, id, &format!("{part}/{name}"))? {
                Inspected::Held(found) => found.held.epoch,
                Inspected::Free | Inspected::Unknown(_) => 0,
            },
            None => 0,
        };
        let taken = storage.list(FOLDER).map_err(|e| io("list", FOLDER, e))?;
        let free = |number: u32| {
            let name = format!("{owner}-{epoch}-{number}");
            (!taken.contains(&name)).then(|| format!("{FOLDER}/{name}"))
        };
        let name = (1..).find_map(free).expect("a folder has fewer than 2^32 entries");
        let named = storage.rename(&part, &name).and_then(|()| storage.sync_folder(FOLDER));
        named.map_err(|e| io("rename", &part, e))?;
        Ok(Some(storage.path().join(name)))
    }

    /// Removes all that is left of an owner's log, which is lost for good. A running log of that
    /// owner is closed first.
    ///
    /// # Errors
    /// `Io` when the file system refuses.
    pub fn discard(&self, owner: OwnerId) -> Result<()> {
        let shared = &self.shared;
        let mut remains = shared.collect(owner);
        // The oldest first: what a crash leaves is the end of a log, which its owner can tell.
        remains.found.sort_by_key(|found| found.held.sequence);
        for found in &remains.found {
            let path = shared.pool.path_of(&found.name);
            let removed = shared.storage.remove(&found.name);
            removed.map_err(|e| Error::io(format!("remove {}", path.display()), e))?;
        }
        let synced = shared.storage.sync_folder("");
        let path = shared.storage.path();
        synced.map_err(|e| Error::io(format!("sync {}", path.display()), e))?;
        shared.pool.forget(remains.found.len());
        drop(remains);
        shared.forget(owner);
        Ok(())
    }

    /// Reads a log that was set aside, whose path [`LogDir::quarantine`] gave. Changes nothing, and
    /// ends at the first damage instead of refusing.
    ///
    /// # Errors
    /// `Invalid` when there is no log of one owner and epoch; `Io` when it cannot be read.
    pub fn read_quarantined(&self, folder: &Path, floor: Lsn) -> Result<Quarantined> {
        let shared = &self.shared;
        let invalid =
            |what: &str| Error::new(ErrorKind::Invalid, format!("{} {what}", folder.display()));
        let inside = folder.strip_prefix(shared.storage.path()).unwrap_or(folder);
        let inside = inside.to_str().filter(|name| name.starts_with(FOLDER));
        let inside = inside.ok_or_else(|| invalid("is not in the quarantine folder"))?;
        let names = shared.storage.list(inside);
        let names = names.map_err(|e| Error::io(format!("list {}", folder.display()), e))?;
        let mut found = Vec::new();
        for name in names {
            let Some(id) = FileId::parse(&name) else { continue };
            let name = format!("{inside}/{name}");
            if let Inspected::Held(segment) = inspect(&*shared.storage, id, &name)? {
                found.push(segment);
            }
        }
        let first = found.first().map(|found| found.held);
        let held = first.ok_or_else(|| invalid("holds no quarantined log"))?;
        let (owner, epoch) = (held.owner, held.epoch);
        if found.iter().any(|found| (found.held.owner, found.held.epoch) != (owner, epoch)) {
            return Err(invalid("holds segments of more than one log"));
        }
        let alive = Arc::new(AtomicUsize::new(0));
        let mut scan = scan(&shared.pool, &*shared.storage, owner, epoch, found, &alive)?;
        let records = std::mem::take(&mut scan.records);
        let plan = plan(floor, scan.synced, records, &[], &scan.flaws);
        let mut recovery = Recovery::new(&plan, &scan, scan.synced);
        recovery.records = plan.records;
        Ok(Quarantined { owner, epoch, recovery, damage: plan.damage })
    }
}

impl Remains {
    /// The epoch and the highest sequence of what is left.
    fn newest(&self) -> Option<(u64, u64)> {
        let found = self.found.iter().map(|found| (found.held.epoch, found.held.sequence));
        let left = self.left.iter().map(|left| (left.origin.epoch, 0));
        found.chain(left).reduce(|a, b| (a.0.max(b.0), a.1.max(b.1)))
    }
}

impl Shared {
    /// Stops the log of an owner, if it runs, and collects what is left of it.
    fn collect(&self, owner: OwnerId) -> Remains {
        let mut found = Vec::new();
        if let Some(log) = self.running(owner)
            && let Err(error) = log.close()
        {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%owner, error, "log to be set aside was not closed cleanly");
            found = self.inspect_all(&log.lock().segment_ids());
            self.ring.leave(owner, unwritten(&log));
        }
        found.extend(self.found(owner));
        Remains { found, left: self.ring.left_of(owner) }
    }

    /// Writes what the ring holds of an owner as segments behind the others.
    fn stage_out(
        self: &Arc<Self>,
        remains: &Remains,
        owner: OwnerId,
        epoch: u64,
        sequence: u64,
    ) -> Result<Vec<FileId>> {
        let sound = |left: &&Leftover| left.origin.epoch == epoch && sound_records(left) > 0;
        let sound: Vec<&Leftover> = remains.left.iter().filter(sound).collect();
        let Some(first) = sound.first() else { return Ok(Vec::new()) };
        let origin = Origin { owner, epoch, nonce: self.nonce };
        let mut tail = Tail::new(self, origin, Arc::default(), sequence);
        tail.open(first.first_lsn.previous())?;
        for left in sound {
            tail.copy(left, Lsn::FIRST, Lsn::new(u64::MAX))?;
        }
        tail.sync()?;
        Ok(tail.segments().map(|segment| segment.id()).collect())
    }
}

/// The slots of a failed log, taken from its frames.
fn unwritten(log: &OwnerLog) -> Vec<Leftover> {
    let mut state = log.lock();
    let open = state.open.take().map(|open| (open.frame, open.records));
    let queued = std::mem::take(&mut state.queue).into_iter();
    let frames = queued.map(|closed| (closed.frame, closed.records)).chain(open);
    frames
        .filter_map(|(frame, records)| {
            Some(Leftover {
                slot: Arc::new(frame.slot_mut().take()?),
                origin: log.origin,
                first_lsn: frame.first_lsn(),
                records,
                sound: true,
            })
        })
        .collect()
}
