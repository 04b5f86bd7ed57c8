//! The store in a directory: the same guarantees as S3, also under `kill -9`, a power cut and several
//! processes at once.
//!
//! - **Whole or absent.** An object is written to a scratch file, synced, and only then given its
//!   name, by `link(2)` (which fails when the name is taken) or by `rename(2)` over the version that a
//!   swap replaces. The directory is synced before success is reported.
//! - **One winner.** Swaps and deletions of one key run under an advisory lock on a file, so that
//!   processes are serialised too. A lock ends with its process; nothing is ever left locked.
//! - **No false twin.** Each write has a random nonce in its version, so a swap is never fooled by
//!   bytes that were there before.
//! - **A full disk is an outage**, not an error: `Unavailable`, and whoever holds a
//!   [`Store`](crate::Store) tries again.
//!
//! Reads and writes are plain file I/O on tokio's blocking threads, of which we take a bounded
//! number. Dropping a call does not stop its work: like a request that is already on the wire.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::counters::{Counters, Meter, Operation};
use crate::error::{Error, Kind};
use crate::key::{ETag, ObjectKey};
use crate::store::{Deletions, ListPage, ListToken, Object, ObjectMeta, ObjectStore};

mod file;
mod objects;
mod scratch;
#[cfg(test)]
mod tests;
mod tree;

use objects::Objects;

/// Threads that one store keeps busy at most. More does not make a disk faster.
const THREADS_MAX: usize = 32;

/// A driver over a directory.
#[derive(Debug)]
pub struct DirectoryStore {
    objects: Arc<Objects>,
    threads: Arc<Semaphore>,
    meter: Meter,
}

impl DirectoryStore {
    /// Opens the store in `root`, creating it where it is missing, and sweeps what killed writers
    /// left behind.
    ///
    /// # Errors
    /// `Denied` or `Unavailable`, naming the path.
    pub async fn open(root: &Path) -> Result<Self, Error> {
        let root = root.to_owned();
        let objects = blocking(move || Objects::open(&root)).await?;
        Ok(Self {
            objects: Arc::new(objects),
            threads: Arc::new(Semaphore::new(THREADS_MAX)),
            meter: Meter::default(),
        })
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Objects) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let thread = Arc::clone(&self.threads).acquire_owned().await;
        let thread = thread.expect("the semaphore is never closed");
        let objects = Arc::clone(&self.objects);
        blocking(move || {
            let _thread = thread;
            work(&objects)
        })
        .await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(Error::new(Kind::Unavailable, "the runtime is shutting down")
                    .with_source(error)),
            }
        }
    }
}

#[async_trait]
impl ObjectStore for DirectoryStore {
    async fn put_new(&self, key: &ObjectKey, body: Bytes) -> Result<ETag, Error> {
        self.meter.add_up(body.len());
        let key = key.clone();
        let result = self.run(move |objects| objects.put_new(&key, &body)).await;
        self.meter.count(Operation::PutNew, result)
    }

    async fn put_if_match(
        &self,
        key: &ObjectKey,
        body: Bytes,
        expected: &ETag,
    ) -> Result<ETag, Error> {
        self.meter.add_up(body.len());
        let (key, expected) = (key.clone(), expected.clone());
        let result = self.run(move |objects| objects.put_if_match(&key, &body, &expected)).await;
        self.meter.count(Operation::PutIfMatch, result)
    }

    async fn get(&self, key: &ObjectKey) -> Result<Object, Error> {
        let key = key.clone();
        let result = self.run(move |objects| objects.get(&key)).await;
        let object = self.meter.count(Operation::Get, result)?;
        self.meter.add_down(object.body.len());
        Ok(object)
    }

    async fn get_range(&self, key: &ObjectKey, range: Range<u64>) -> Result<Bytes, Error> {
        let key = key.clone();
        let result = self.run(move |objects| objects.get_range(&key, range)).await;
        let bytes = self.meter.count(Operation::GetRange, result)?;
        self.meter.add_down(bytes.len());
        Ok(bytes)
    }

    async fn stat(&self, key: &ObjectKey) -> Result<ObjectMeta, Error> {
        let key = key.clone();
        let result = self.run(move |objects| objects.stat(&key)).await;
        self.meter.count(Operation::Stat, result)
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&ListToken>,
        limit: usize,
    ) -> Result<ListPage, Error> {
        let (prefix, after) = (prefix.to_owned(), from.map(|token| token.0.clone()));
        let result = self
            .run(move |objects| objects.list(&prefix, after.as_deref().unwrap_or(""), limit))
            .await;
        self.meter.count(Operation::List, result)
    }

    async fn delete_many(&self, keys: &[ObjectKey]) -> Deletions {
        let batch = keys.to_vec();
        match self.run(move |objects| Ok(objects.delete_many(&batch))).await {
            Ok(results) => {
                let count = |(key, result)| (key, self.meter.count(Operation::Delete, result));
                results.into_iter().map(count).collect()
            }
            Err(error) => keys
                .iter()
                .map(|key| (key.clone(), Err(Error::new(error.kind(), error.chain()))))
                .collect(),
        }
    }

    fn counters(&self) -> Counters {
        self.meter.snapshot()
    }
}
