//! Makes blobs of a batch and puts them: reading and compressing on threads that may block, several
//! blobs at once, all disks of the daemon within one budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::stream::{self, StreamExt, TryStreamExt};
use s3_backend::{ObjectStore, Store};
use tokio::sync::Semaphore;

use super::gather::gather;
use crate::blob::{Blob, BlobBuilder, BlobExtent, Compression};
use crate::disk::Dirty;
use crate::error::Result;
use crate::fetch::Fetcher;
use crate::geometry::{BLOCK_BYTES, BlockRange, to_u64, to_usize};
use crate::head::TailBlob;
use crate::ids::{DiskId, Epoch, Generation, Nonce, ObjectId, ObjectRef};
use crate::objects::store_error;

/// What the drains of all disks share.
#[derive(Debug)]
pub struct Uploads {
    store: Store,
    fetcher: Arc<Fetcher>,
    compression: Compression,
    blobs: Semaphore,
    concurrency: usize,
    /// Bytes put as blobs since the daemon started.
    pub uploaded_bytes: AtomicU64,
}

/// A blob that is in the store.
#[derive(Debug)]
pub(super) struct Uploaded {
    object: ObjectRef,
    bytes: u64,
    footer_offset: u64,
    pub(super) extents: Vec<BlobExtent>,
}

impl Uploaded {
    /// As the tail of a head lists it.
    pub(super) fn tail_entry(&self, birth: Generation) -> TailBlob {
        TailBlob { blob: self.object, bytes: self.bytes, footer_offset: self.footer_offset, birth }
    }
}

impl Uploads {
    /// At most `concurrency` blobs are in memory at once, over all disks.
    #[must_use]
    pub fn new(
        store: Store,
        fetcher: Arc<Fetcher>,
        compression: Compression,
        concurrency: usize,
    ) -> Self {
        Self {
            store,
            fetcher,
            compression,
            blobs: Semaphore::new(concurrency),
            concurrency,
            uploaded_bytes: AtomicU64::new(0),
        }
    }

    /// The store that blobs are put to.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The readers' side of the same store.
    #[must_use]
    pub fn fetcher(&self) -> &Fetcher {
        &self.fetcher
    }

    /// Encodes and puts every blob of a batch; returns them in the order of the batch.
    ///
    /// # Errors
    /// [`Kind::Corrupt`](crate::error::Kind::Corrupt) when what the log holds is not what was written
    /// to it.
    pub(super) async fn put_all(
        self: &Arc<Self>,
        names: &Names,
        cut: u64,
        blobs: Vec<Vec<(BlockRange, Dirty)>>,
    ) -> Result<Vec<Uploaded>> {
        let puts: Vec<_> = blobs
            .into_iter()
            .map(|contents| Arc::clone(self).put_one(names.next(), cut, contents))
            .collect();
        stream::iter(puts).buffered(self.concurrency).try_collect().await
    }

    async fn put_one(
        self: Arc<Self>,
        object: ObjectRef,
        cut: u64,
        contents: Vec<(BlockRange, Dirty)>,
    ) -> Result<Uploaded> {
        let _permit = self.blobs.acquire().await.expect("the semaphore is never closed");
        let compression = self.compression;
        let encode = move || encode(object, compression, cut, &contents);
        let blob: Blob =
            tokio::task::spawn_blocking(encode).await.expect("encoding a blob does not panic")?;
        let bytes = to_u64(blob.bytes.len());
        let footer_offset = bytes - u64::from(blob.footer_len);
        let footer = blob.bytes.slice(to_usize(footer_offset)..);
        let key = object.blob_key();
        let put = self.store.put_new(&key, blob.bytes).await;
        put.map_err(|error| store_error("put", &key, error))?;
        let short = u32::try_from(footer_offset).expect("blobs are far below 4 GiB");
        self.fetcher.keep_footer(object, short, &footer);
        self.uploaded_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Uploaded { object, bytes, footer_offset, extents: blob.extents })
    }
}

fn encode(
    object: ObjectRef,
    compression: Compression,
    cut: u64,
    contents: &[(BlockRange, Dirty)],
) -> Result<Blob> {
    let data = gather(contents)?;
    let mut builder = BlobBuilder::new(object, compression);
    let mut at = 0;
    for (range, dirty) in contents {
        match dirty {
            Dirty::Zero => builder.push_zero(*range, cut),
            Dirty::Data(place) => {
                let len = to_usize(range.count() * BLOCK_BYTES);
                let crcs = &place.crcs()[..to_usize(range.count())];
                builder.push(range.start, cut, None, crcs, &data[at..at + len]);
                at += len;
            }
        }
    }
    Ok(builder.finish())
}

/// Names for the objects that one opening of a disk makes: never the same twice. The nonce is drawn
/// at each opening, so that a restart within one epoch cannot meet a late PUT of its predecessor.
#[derive(Debug)]
pub struct Names {
    disk: DiskId,
    epoch: Epoch,
    nonce: Nonce,
    seq: AtomicU64,
}

impl Names {
    /// Names under this epoch.
    #[must_use]
    pub fn new(disk: DiskId, epoch: Epoch) -> Self {
        Self { disk, epoch, nonce: Nonce::random(), seq: AtomicU64::new(0) }
    }

    /// The next one.
    pub fn next(&self) -> ObjectRef {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        let object = ObjectId { epoch: self.epoch, nonce: self.nonce, seq };
        ObjectRef { disk: self.disk, object }
    }
}
