//! Documents in the store, and the compare-and-swap of a head.
//!
//! The store settles ambiguous replies itself (it repeats the same bytes under the same condition
//! and reads back), so a swap here has two outcomes: it happened, or another head is there. Which
//! one, [`HeadHandle::swap`] tells: a head of ours that landed late is adopted by the caller, any
//! other is a lost lease.

use s3_backend::{ETag, Kind as StoreKind, ObjectKey, ObjectStore, Store};

use crate::document::{self, Document};
use crate::error::{Error, Kind, Result};
use crate::head::Head;
use crate::ids::{DiskId, Epoch, HostId, Nonce, head_key};

/// A document together with the tag that its next version must match.
#[derive(Debug, Clone)]
pub struct Tagged<T> {
    /// The document.
    pub value: T,
    /// Tag of exactly these bytes.
    pub etag: ETag,
}

/// Turns an error of the store into ours, naming the object.
pub fn store_error(what: &str, key: &ObjectKey, error: s3_backend::Error) -> Error {
    let kind = match error.kind() {
        StoreKind::NotFound => Kind::NotFound,
        StoreKind::Unavailable | StoreKind::Ambiguous | StoreKind::Denied => Kind::StoreUnavailable,
        StoreKind::Corrupt => Kind::Corrupt,
        _ => Kind::Failed,
    };
    let error = Error::new(kind, format!("cannot {what} {key}")).with_source(error);
    if kind == Kind::StoreUnavailable {
        return error.with_fix("check the store's address, credentials and health, then try again");
    }
    error
}

/// Reads a document; none when the object is not there.
///
/// # Errors
/// [`Kind::StoreUnavailable`], [`Kind::Corrupt`].
pub async fn load<T: Document>(store: &Store, key: &ObjectKey) -> Result<Option<Tagged<T>>> {
    match store.get(key).await {
        Ok(object) => {
            let value = document::decode(&object.body, key.as_str())?;
            Ok(Some(Tagged { value, etag: object.etag }))
        }
        Err(error) if error.kind() == StoreKind::NotFound => Ok(None),
        Err(error) => Err(store_error("read", key, error)),
    }
}

/// Writes a document where there is none; none when there is one already.
///
/// # Errors
/// [`Kind::StoreUnavailable`].
pub async fn create<T: Document>(
    store: &Store,
    key: &ObjectKey,
    value: &T,
) -> Result<Option<ETag>> {
    match store.put_new(key, document::encode(value)).await {
        Ok(etag) => Ok(Some(etag)),
        Err(error) if error.kind() == StoreKind::Exists => Ok(None),
        Err(error) => Err(store_error("create", key, error)),
    }
}

/// Replaces a document that is still as `expected`; none when it is not.
///
/// # Errors
/// [`Kind::StoreUnavailable`].
pub async fn replace<T: Document>(
    store: &Store,
    key: &ObjectKey,
    value: &T,
    expected: &ETag,
) -> Result<Option<ETag>> {
    match store.put_if_match(key, document::encode(value), expected).await {
        Ok(etag) => Ok(Some(etag)),
        Err(error) if matches!(error.kind(), StoreKind::Conflict | StoreKind::NotFound) => Ok(None),
        Err(error) => Err(store_error("replace", key, error)),
    }
}

/// Reads the head of a disk.
///
/// # Errors
/// [`Kind::NotFound`], [`Kind::StoreUnavailable`], [`Kind::Corrupt`].
pub async fn load_head(store: &Store, disk: DiskId) -> Result<Tagged<Head>> {
    let key = head_key(disk);
    load(store, &key)
        .await?
        .ok_or_else(|| Error::new(Kind::NotFound, format!("the disk's head {key} is not there")))
}

/// What a refused swap found in the store.
#[derive(Debug)]
pub enum Refused {
    /// A head that this host wrote in an earlier life of the same attachment (a late PUT of a killed
    /// process): everything in it came from the same log.
    OursLate(Box<Tagged<Head>>),
    /// Somebody else's: the lease is lost.
    Lost(Box<Head>),
}

/// The writer's own view of a head: only the holder of the lease has one.
#[derive(Debug)]
pub struct HeadHandle {
    store: Store,
    current: Tagged<Head>,
    host: HostId,
    /// Boot nonces of this host's daemons under the present epoch.
    boots: Vec<Nonce>,
}

impl HeadHandle {
    /// A handle on a head that names `host` as its holder.
    #[must_use]
    pub fn new(store: Store, current: Tagged<Head>, host: HostId, boots: Vec<Nonce>) -> Self {
        Self { store, current, host, boots }
    }

    /// The same head through a store of another policy: the drain waits for ever.
    #[must_use]
    pub fn with_store(self, store: Store) -> Self {
        Self { store, ..self }
    }

    /// The head as last committed or read.
    #[must_use]
    pub fn head(&self) -> &Head {
        &self.current.value
    }

    /// The head with its tag.
    #[must_use]
    pub fn tagged(&self) -> &Tagged<Head> {
        &self.current
    }

    /// The epoch under which this handle may write.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.current.value.epoch
    }

    /// Goes on from a head of ours that landed late.
    pub fn adopt(&mut self, head: Tagged<Head>) {
        self.current = head;
    }

    /// Commits `change`, retrying for as long as the store's policy says. `change` also runs on the
    /// copy that is returned; it must not depend on anything but the head it is given.
    ///
    /// # Errors
    /// The inner error says who is there instead; the outer one that the store gave no answer.
    pub async fn swap(
        &mut self,
        change: impl FnOnce(&mut Head),
    ) -> Result<std::result::Result<(), Refused>> {
        let mut next = self.current.value.successor();
        change(&mut next);
        assert!(next.generation == self.current.value.generation + 1, "one swap, one generation");
        assert!(next.drained_lsn >= self.current.value.drained_lsn, "the drain never goes back");
        let key = head_key(next.disk);
        if let Some(etag) = replace(&self.store, &key, &next, &self.current.etag).await? {
            self.current = Tagged { value: next, etag };
            return Ok(Ok(()));
        }
        let found = load_head(&self.store, next.disk).await?;
        if found.value.commit == next.commit {
            self.current = found;
            return Ok(Ok(()));
        }
        Ok(Err(self.judge(found)))
    }

    fn judge(&self, found: Tagged<Head>) -> Refused {
        let ours = found.value.is_of(self.host, self.epoch(), &self.boots);
        if ours {
            return Refused::OursLate(Box::new(found));
        }
        Refused::Lost(Box::new(found.value))
    }
}
