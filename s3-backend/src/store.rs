//! What an object store is to us: [`ObjectStore`], its values, and nothing of how it is reached.
//!
//! Two kinds of things implement the trait, and callers need not care which they hold: a *driver*
//! (S3, directory, a fault injector of a test) makes one attempt per call, and a
//! [`Store`](crate::Store) makes as many as its policy says.

use std::fmt::Debug;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;

use crate::counters::Counters;
use crate::dialect::Dialect;
use crate::error::Error;
use crate::key::{ETag, ObjectKey};

/// The largest page that [`ObjectStore::list`] gives: the limit of S3.
pub const LIST_PAGE_MAX: usize = 1000;

/// An object as it was read: its bytes and the version they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The whole body.
    pub body: Bytes,
    /// The version that this body is.
    pub etag: ETag,
}

/// What is known of an object without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Length of the body in bytes.
    pub size: u64,
    /// The version that has this size.
    pub etag: ETag,
}

/// One line of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The key, relative to the store.
    pub key: ObjectKey,
    /// Length of the body in bytes.
    pub size: u64,
}

/// Where the next page of a listing begins: opaque, good for the same store and prefix only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListToken(pub String);

/// A part of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListPage {
    /// Some objects under the prefix; may be none even though there is a next page.
    pub entries: Vec<ListEntry>,
    /// How to go on; `None` only when the listing is complete.
    pub next: Option<ListToken>,
}

/// What the deletion of several keys came to, key by key.
pub type Deletions = Vec<(ObjectKey, Result<(), Error>)>;

/// Write-once objects and compare-and-swap.
///
/// Rules that hold for every method and every store:
///
/// - No object is empty. So a reply without bytes is a fault, never an object.
/// - Bodies of conditional writes are unique: the caller puts a nonce inside. So reading one's own
///   bytes back proves that one's own write won, whichever attempt it was.
/// - A key is not used again after its object was deleted. So a put that arrives late finds the key
///   taken, or leaks an object that nobody refers to, but never revives anything.
/// - An answer is definite ([`Kind::is_definite`](crate::Kind::is_definite)) or it is not an answer.
#[async_trait]
pub trait ObjectStore: Debug + Send + Sync + 'static {
    /// Stores `body` where nothing is yet. `Exists` when other bytes are there.
    async fn put_new(&self, key: &ObjectKey, body: Bytes) -> Result<ETag, Error>;

    /// Replaces the version `expected`. `Conflict` when there is another one, `NotFound` when none.
    async fn put_if_match(
        &self,
        key: &ObjectKey,
        body: Bytes,
        expected: &ETag,
    ) -> Result<ETag, Error>;

    /// Reads a whole object.
    async fn get(&self, key: &ObjectKey) -> Result<Object, Error>;

    /// Reads exactly the bytes of `range`, which is not empty: never fewer, never padded.
    async fn get_range(&self, key: &ObjectKey, range: Range<u64>) -> Result<Bytes, Error>;

    /// Size and version of an object.
    async fn stat(&self, key: &ObjectKey) -> Result<ObjectMeta, Error>;

    /// A page of the keys that begin with `prefix` (any text, not only whole segments).
    ///
    /// Each key that exists throughout the listing comes exactly once; the order is the store's
    /// own. A page that cannot be trusted is an error, never a short page.
    async fn list(
        &self,
        prefix: &str,
        from: Option<&ListToken>,
        limit: usize,
    ) -> Result<ListPage, Error>;

    /// Deletes objects; one that is absent counts as deleted. Every key is answered, in order.
    async fn delete_many(&self, keys: &[ObjectKey]) -> Deletions;

    /// What was asked of the store since it was opened.
    fn counters(&self) -> Counters;

    /// What the probe may learn about this store, where there is something to learn.
    fn dialect(&self) -> Option<&Dialect> {
        None
    }
}
