//! Names and the life of a disk while nobody writes it: create, resolve, list, delete.
//!
//! A name is a small object that says which disk has it, or that it is free; it is created if-absent,
//! changed if-match and never deleted. A disk exists from the moment its name points to its head.
//! Deleting goes: mark the head (refused while somebody holds the lease or forks pin a snapshot),
//! delete the disk's objects, then its head, then free the name; each step can be repeated, so a
//! delete that was cut short is finished by sending it again.

use s3_backend::{Kind as StoreKind, ObjectKey, ObjectStore, Store};

use crate::error::{Error, Kind, Result};
use crate::head::{DiskOptions, DiskState, Head, NameRecord, Snapshot, StoreFormat};
use crate::ids::{
    DiskId, DiskName, Nonce, SnapshotName, StoreId, format_key, head_key, name_key, pin_key,
    snapshot_key,
};
use crate::objects::{self, Tagged, store_error};
use crate::{clock, failpoint, geometry};

/// Keys deleted with one request.
const DELETE_BATCH: usize = 1000;

/// Reads the store's identity, writing it the first time.
///
/// # Errors
/// [`Kind::StoreUnavailable`], [`Kind::Corrupt`].
pub async fn open_store(store: &Store) -> Result<StoreFormat> {
    let key = format_key();
    if let Some(format) = objects::load::<StoreFormat>(store, &key).await? {
        return Ok(format.value);
    }
    let format = StoreFormat { store: StoreId::random(), created_unix_ms: clock::unix_ms() };
    objects::create(store, &key, &format).await?;
    let stored = objects::load(store, &key).await?;
    stored.map(|format| format.value).ok_or_else(|| {
        Error::new(Kind::Failed, format!("{key} is not there just after it was written"))
            .with_fix("the store must be read-after-write consistent")
    })
}

/// Which disk has a name.
///
/// # Errors
/// [`Kind::NotFound`] when none has.
pub async fn resolve(store: &Store, name: &DiskName) -> Result<DiskId> {
    let record = objects::load::<NameRecord>(store, &name_key(name)).await?;
    record.and_then(|record| record.value.disk).ok_or_else(|| no_such_disk(name))
}

/// The head of the disk of this name.
///
/// # Errors
/// [`Kind::NotFound`] when there is none.
pub async fn load_by_name(store: &Store, name: &DiskName) -> Result<Tagged<Head>> {
    let disk = resolve(store, name).await?;
    objects::load_head(store, disk).await.map_err(|error| match error.kind() {
        Kind::NotFound => deleting(name),
        _ => error,
    })
}

fn no_such_disk(name: &DiskName) -> Error {
    Error::new(Kind::NotFound, format!("no disk named {name}"))
        .with_fix("see `blockd list`, or create it with `blockd create`")
        .with_detail("name", name.as_str())
}

/// The answer for a disk whose deletion has begun.
#[must_use]
pub fn deleting(name: &DiskName) -> Error {
    Error::new(Kind::NotFound, format!("disk {name} is being deleted"))
        .with_fix(format!("finish it with `blockd delete {name} --yes`"))
        .with_detail("name", name.as_str())
}

/// Creates a disk; the flag says whether it is new. With `if_missing`, a disk that is there with the
/// same settings is the answer.
///
/// # Errors
/// [`Kind::DiskExists`], also when `if_missing` finds other settings, which the message names.
pub async fn create(
    store: &Store,
    name: &DiskName,
    size_bytes: u64,
    options: DiskOptions,
    if_missing: bool,
) -> Result<(Head, bool)> {
    check_size(size_bytes)?;
    let found = objects::load::<NameRecord>(store, &name_key(name)).await?;
    if found.is_some_and(|record| record.value.disk.is_some()) {
        let head = existing(store, name, size_bytes, options, if_missing).await?;
        return Ok((head, false));
    }
    let head = Head::new(name.clone(), size_bytes, options, clock::unix_ms());
    let head_object = head_key(head.disk);
    if objects::create(store, &head_object, &head).await?.is_none() {
        return Err(Error::new(Kind::Failed, format!("{head_object} exists before its disk")));
    }
    failpoint::pass("create-after-head").await;
    match claim_name(store, name, head.disk).await {
        Ok(()) => Ok((head, true)),
        Err(error) if error.kind() == Kind::DiskExists => {
            delete_keys(store, std::slice::from_ref(&head_object)).await?;
            let head = existing(store, name, size_bytes, options, if_missing).await?;
            Ok((head, false))
        }
        Err(error) => Err(error),
    }
}

/// Gives a free name to a disk.
///
/// # Errors
/// [`Kind::DiskExists`] when it is not free.
pub async fn claim_name(store: &Store, name: &DiskName, disk: DiskId) -> Result<()> {
    let key = name_key(name);
    let record = NameRecord { disk: Some(disk), nonce: Nonce::random() };
    // Most names were never used: one request then.
    if objects::create(store, &key, &record).await?.is_some() {
        return Ok(());
    }
    let named = match objects::load::<NameRecord>(store, &key).await? {
        Some(free) if free.value.disk.is_none() => {
            objects::replace(store, &key, &record, &free.etag).await?
        }
        _ => None,
    };
    named.map(drop).ok_or_else(|| taken(name))
}

/// Refuses a name that a disk has.
///
/// # Errors
/// [`Kind::DiskExists`].
pub async fn check_free(store: &Store, name: &DiskName) -> Result<()> {
    let found = objects::load::<NameRecord>(store, &name_key(name)).await?;
    match found.is_some_and(|record| record.value.disk.is_some()) {
        true => Err(taken(name)),
        false => Ok(()),
    }
}

fn taken(name: &DiskName) -> Error {
    Error::new(Kind::DiskExists, format!("a disk named {name} exists"))
        .with_fix("choose another name, or pass --if-missing to use it as it is")
        .with_detail("name", name.as_str())
}

async fn existing(
    store: &Store,
    name: &DiskName,
    size_bytes: u64,
    options: DiskOptions,
    if_missing: bool,
) -> Result<Head> {
    let head = load_by_name(store, name).await?.value;
    let exists = |message: String| {
        Error::new(Kind::DiskExists, message)
            .with_detail("name", name.as_str())
            .with_detail("size_bytes", head.size_bytes)
    };
    if head.state != DiskState::Live {
        return Err(exists(format!("disk {name} is being deleted"))
            .with_fix(format!("finish it with `blockd delete {name} --yes`")));
    }
    if !if_missing {
        return Err(taken(name).with_detail("size_bytes", head.size_bytes));
    }
    let mut differences = Vec::new();
    if head.size_bytes != size_bytes {
        differences.push(format!("size {} bytes, not {size_bytes}", head.size_bytes));
    }
    if head.options.durability != options.durability {
        differences.push(format!("durability {:?}", head.options.durability).to_lowercase());
    }
    if head.options.max_lag_ms != options.max_lag_ms {
        differences.push(match head.options.max_lag_ms {
            Some(ms) => format!("max-lag {ms} ms"),
            None => "no max-lag".to_owned(),
        });
    }
    if differences.is_empty() {
        return Ok(head);
    }
    Err(exists(format!("disk {name} exists with other settings: {}", differences.join(", ")))
        .with_fix("ask for the settings it has, or choose another name"))
}

/// Refuses sizes that no disk can have.
///
/// # Errors
/// [`Kind::InvalidArgument`].
pub fn check_size(size_bytes: u64) -> Result<()> {
    if geometry::is_disk_size(size_bytes) {
        return Ok(());
    }
    Err(Error::new(Kind::InvalidArgument, format!("a disk of {size_bytes} bytes is not possible"))
        .with_fix("use a multiple of 4096 bytes, from 4K to 64T"))
}

/// Every name in the store with its disk, free names left out.
///
/// # Errors
/// [`Kind::StoreUnavailable`].
pub async fn list(store: &Store) -> Result<Vec<(DiskName, DiskId)>> {
    let mut disks = Vec::new();
    for key in list_keys(store, "disks/").await? {
        let Some(Ok(name)) = key.as_str().strip_prefix("disks/").map(str::parse::<DiskName>) else {
            continue;
        };
        let record = objects::load::<NameRecord>(store, &key).await?;
        if let Some(disk) = record.and_then(|record| record.value.disk) {
            disks.push((name, disk));
        }
    }
    disks.sort();
    Ok(disks)
}

/// Every key under a prefix.
///
/// # Errors
/// [`Kind::StoreUnavailable`]; a list that was cut short is an error, never a short list.
pub async fn list_keys(store: &Store, prefix: &str) -> Result<Vec<ObjectKey>> {
    let entries = store.list_all(prefix).await.map_err(|error| {
        let kind = match error.kind() {
            StoreKind::Corrupt => Kind::Corrupt,
            _ => Kind::StoreUnavailable,
        };
        Error::new(kind, format!("cannot list {prefix}")).with_source(error)
    })?;
    Ok(entries.into_iter().map(|entry| entry.key).collect())
}

/// Deletes objects; those that are gone already count as deleted.
///
/// # Errors
/// The first refusal, naming its object; the others were tried.
pub async fn delete_keys(store: &Store, keys: &[ObjectKey]) -> Result<()> {
    for batch in keys.chunks(DELETE_BATCH) {
        for (key, outcome) in store.delete_many(batch).await {
            outcome.map_err(|error| store_error("delete", &key, error))?;
        }
    }
    Ok(())
}

/// All snapshots of a disk, oldest first: those with an object of their own and those that the head
/// still carries.
///
/// # Errors
/// [`Kind::StoreUnavailable`], [`Kind::Corrupt`].
pub async fn snapshots(store: &Store, head: &Head) -> Result<Vec<Snapshot>> {
    let mut found = head.snapshots.clone();
    for key in list_keys(store, &format!("d/{}/s/", head.disk)).await? {
        if let Some(snapshot) = objects::load::<Snapshot>(store, &key).await?
            && found.iter().all(|known| known.id != snapshot.value.id)
        {
            found.push(snapshot.value);
        }
    }
    found.sort_by_key(|snapshot| snapshot.number);
    Ok(found)
}

/// One snapshot by name, or by `#`-less number where no name matches.
///
/// # Errors
/// [`Kind::NotFound`].
pub async fn find_snapshot(store: &Store, head: &Head, name: &SnapshotName) -> Result<Snapshot> {
    let all = snapshots(store, head).await?;
    let number = name.as_str().parse::<u64>().ok();
    let chosen = all
        .iter()
        .find(|snapshot| snapshot.name == *name)
        .or_else(|| all.iter().find(|snapshot| Some(snapshot.number) == number));
    chosen.filter(|snapshot| !snapshot.deleting).cloned().ok_or_else(|| {
        Error::new(Kind::NotFound, format!("disk {} has no snapshot {name}", head.name))
            .with_fix(format!("see `blockd snapshots {}`", head.name))
    })
}

/// Puts the objects of the snapshots that a head carries; already there is as good.
///
/// # Errors
/// [`Kind::StoreUnavailable`].
pub async fn write_snapshots(store: &Store, snapshots: &[Snapshot]) -> Result<()> {
    for snapshot in snapshots {
        objects::create(store, &snapshot_key(snapshot.disk, snapshot.id), snapshot).await?;
    }
    Ok(())
}

/// Deletes a disk that nobody holds.
///
/// # Errors
/// [`Kind::NotFound`], [`Kind::DiskBusy`] naming the holder, [`Kind::DiskHasForks`] naming them.
pub async fn delete(store: &Store, name: &DiskName) -> Result<()> {
    let key = name_key(name);
    let record = objects::load::<NameRecord>(store, &key).await?;
    let Some(record) = record.filter(|record| record.value.disk.is_some()) else {
        return Err(no_such_disk(name));
    };
    let disk = record.value.disk.expect("just checked");
    if let Some(head) = objects::load::<Head>(store, &head_key(disk)).await? {
        let parent = head.value.parent.clone();
        mark_deleting(store, name, head).await?;
        failpoint::pass("delete-after-mark").await;
        let mut keys = list_keys(store, &format!("d/{disk}/")).await?;
        keys.retain(|key| *key != head_key(disk));
        delete_keys(store, &keys).await?;
        failpoint::pass("delete-after-objects").await;
        // The pin goes before the head that says where it is.
        if let Some(parent) = parent {
            delete_keys(store, &[pin_key(parent.disk, parent.snapshot, disk)]).await?;
        }
        delete_keys(store, &[head_key(disk)]).await?;
    }
    let free = NameRecord { disk: None, nonce: Nonce::random() };
    objects::replace(store, &key, &free, &record.etag).await?;
    Ok(())
}

async fn mark_deleting(store: &Store, name: &DiskName, head: Tagged<Head>) -> Result<()> {
    if let Some(holder) = &head.value.holder {
        return Err(Error::new(
            Kind::DiskBusy,
            format!("disk {name} is attached on {} ({})", holder.hostname, holder.host),
        )
        .with_fix(format!("detach it there first: `blockd detach {name}`"))
        .with_detail("holder", holder.host.to_string()));
    }
    if head.value.state == DiskState::Doomed {
        return Ok(());
    }
    let marked = match head.value.state {
        DiskState::Live => change_state(store, name, &head, DiskState::Deleting).await?,
        _ => head,
    };
    let pins = list_keys(store, &format!("d/{}/p/", marked.value.disk)).await?;
    let pins = settle_pins(store, pins).await?;
    if pins.is_empty() {
        // From here on nobody brings it back: a pin that comes now belongs to a fork that will see the
        // mark, and give up.
        return change_state(store, name, &marked, DiskState::Doomed).await.map(drop);
    }
    change_state(store, name, &marked, DiskState::Live).await?;
    Err(has_forks(store, &format!("disk {name}"), &pins).await)
}

async fn change_state(
    store: &Store,
    name: &DiskName,
    head: &Tagged<Head>,
    state: DiskState,
) -> Result<Tagged<Head>> {
    let mut next = head.value.successor();
    next.state = state;
    let replaced = objects::replace(store, &head_key(next.disk), &next, &head.etag).await?;
    let etag = replaced.ok_or_else(|| {
        Error::new(Kind::DiskBusy, format!("disk {name} changed while it was being deleted"))
            .with_fix("look again with `blockd show`, then send the delete again")
    })?;
    Ok(Tagged { value: next, etag })
}

/// Removes pins whose forks never came to life, and returns the others. The place of such a fork's head
/// is taken first, so that it cannot come to life any more.
async fn settle_pins(store: &Store, pins: Vec<ObjectKey>) -> Result<Vec<ObjectKey>> {
    let mut live = Vec::new();
    for pin in pins {
        let Some(Ok(fork)) = pin.as_str().rsplit('/').next().map(str::parse::<DiskId>) else {
            live.push(pin);
            continue;
        };
        let key = head_key(fork);
        let mut aborted = Head::new(
            "aborted".parse().expect("a valid name"),
            geometry::BLOCK_BYTES,
            DiskOptions::default(),
            clock::unix_ms(),
        );
        aborted.disk = fork;
        aborted.state = DiskState::Aborted;
        let ours = objects::create(store, &key, &aborted).await?.is_some();
        let dead = ours
            || objects::load::<Head>(store, &key)
                .await?
                .is_none_or(|head| head.value.state == DiskState::Aborted);
        if dead {
            delete_keys(store, &[pin]).await?;
        } else {
            live.push(pin);
        }
    }
    Ok(live)
}

/// The refusal to delete what forks pin; names them.
pub async fn has_forks(store: &Store, what: &str, pins: &[ObjectKey]) -> Error {
    let mut forks = Vec::new();
    for pin in pins {
        let Some(Ok(fork)) = pin.as_str().rsplit('/').next().map(str::parse::<DiskId>) else {
            continue;
        };
        let head = objects::load::<Head>(store, &head_key(fork)).await.ok().flatten();
        forks.push(head.map_or_else(|| fork.to_string(), |head| head.value.name.to_string()));
    }
    Error::new(Kind::DiskHasForks, format!("{what} has forks: {}", forks.join(", ")))
        .with_fix("delete the forks first")
        .with_detail("forks", forks)
}
