//! Write-once objects and compare-and-swap, over S3 and over a directory. Knows keys and bytes, and
//! nothing of what they mean.
//!
//! # The contract
//!
//! - An object is put once, under a key that is free ([`ObjectStore::put_new`]), or it is *swapped*:
//!   replaced only while it has the version the caller has seen ([`ObjectStore::put_if_match`]). There
//!   is no unconditional put.
//! - A write that succeeded is durable, and everyone sees it from then on.
//! - A write is all there or not at all.
//! - *Absent*, *taken* and *changed* are answers of the store. No answer is never turned into one of
//!   them: it is retried, for as long as the [`RetryPolicy`] says, with back-off and at a rate that
//!   adapts to the store.
//! - Reads are exact or fail; listings are complete or fail.
//!
//! Before a store is trusted, [`probe()`] checks that it keeps its side.
//!
//! # Reading order
//!
//! `store` has the trait, `handle` the retrying [`Store`] and how an unclear write is settled, `retry`
//! and `limit` its pace; `s3` and `directory` are the two drivers; `conformance` is what both must
//! pass, and whoever writes a third.

#![forbid(unsafe_code)]

pub mod conformance;
mod counters;
mod dialect;
mod directory;
mod error;
mod handle;
mod key;
mod limit;
mod probe;
mod retry;
mod s3;
mod store;
mod url;

use std::sync::Arc;

pub use counters::{Counters, Operation, Tally};
pub use dialect::{Checksums, Dialect, IfMatch};
pub use directory::DirectoryStore;
pub use error::{Error, Kind};
pub use handle::Store;
pub use key::{ETag, KEY_BYTES_MAX, ObjectKey, SEGMENT_BYTES_MAX};
pub use limit::Class;
pub use probe::{ProbeReport, probe};
pub use retry::{Health, RetryPolicy};
pub use s3::S3Store;
pub use store::{
    Deletions, LIST_PAGE_MAX, ListEntry, ListPage, ListToken, Object, ObjectMeta, ObjectStore,
};
pub use url::{S3Url, StoreUrl};

/// How a store is used, beyond what its URL says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Requests under way at once, at most; fewer while the store is slow.
    pub requests_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        // Enough to fill a fast link with 8 MiB blobs and to hide the latency of small reads.
        Self { requests_max: 64 }
    }
}

/// Opens the store at a URL, with a policy of retrying for ever.
///
/// # Errors
/// Only what no waiting can mend, and a directory that cannot be opened. Whether the store answers,
/// and is honest, is for [`probe()`] to find out.
pub async fn open(url: &StoreUrl, options: Options) -> Result<Store, Error> {
    let driver: Arc<dyn ObjectStore> = match url {
        StoreUrl::File(path) => Arc::new(DirectoryStore::open(path).await?),
        StoreUrl::S3(url) => Arc::new(S3Store::open(url).await?),
    };
    Ok(Store::new(driver, options.requests_max))
}
