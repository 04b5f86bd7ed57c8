//! Reads what is in the store: frames of blobs through the read cache, pages of maps through theirs.
//!
//! Many readers of one missing frame make one request (single flight). What comes back is verified
//! before anybody sees it, and before it enters the cache; a failed or short read is neither cached
//! nor ever zeroes. A store that does not answer makes the read wait, not fail.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use s3_backend::{Kind as StoreKind, ObjectKey, ObjectStore, Store};
use tokio::sync::{OnceCell, Semaphore};

use crate::blob::{self, Footer, Frame, Location};
use crate::cache::{FrameKey, ReadCache};
use crate::error::{Error, Kind, Result};
use crate::geometry::{BLOCK_BYTES, BlockRange, to_u64, to_usize};
use crate::head::TailBlob;
use crate::ids::ObjectRef;
use crate::local_db::LocalDb;
use crate::map::{PageRef, PageSource, Pages};

/// Requests for frames that may be on their way at once.
const FETCHES_MAX: usize = 64;

type Flight = Arc<OnceCell<Arc<Frame>>>;

/// The readers' side of the store.
#[derive(Debug)]
pub struct Fetcher {
    store: Store,
    cache: Arc<ReadCache>,
    db: Arc<LocalDb>,
    pages: Pages,
    flights: Mutex<HashMap<FrameKey, Flight>>,
    permits: Semaphore,
}

impl Fetcher {
    /// A fetcher over the daemon's caches. `store` waits for ever.
    #[must_use]
    pub fn new(store: Store, cache: Arc<ReadCache>, db: Arc<LocalDb>, page_bytes_max: u64) -> Self {
        let source = StorePages { store: store.clone(), db: Arc::clone(&db) };
        Self {
            store,
            cache,
            db,
            pages: Pages::new(Arc::new(source), page_bytes_max),
            flights: Mutex::default(),
            permits: Semaphore::new(FETCHES_MAX),
        }
    }

    /// Pages of maps.
    #[must_use]
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// The footer of a tail blob, from the local database when it is there: a restart then needs no
    /// store to serve.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] naming the blob, [`Kind::StoreUnavailable`].
    pub async fn footer(&self, store: &Store, entry: &TailBlob) -> Result<Footer> {
        let offset = footer_offset(entry)?;
        if let Some(bytes) = self.db.get_page(entry.blob, offset)
            && let Ok(footer) = blob::decode_footer(&bytes, &entry.blob)
        {
            return Ok(footer);
        }
        let len = entry.bytes - entry.footer_offset;
        let bytes = get_range(store, &entry.blob.blob_key(), entry.footer_offset, len).await?;
        let footer = blob::decode_footer(&bytes, &entry.blob)?;
        self.db.put_page(entry.blob, offset, &bytes);
        Ok(footer)
    }

    /// Remembers the footer of a blob that was just put.
    pub fn keep_footer(&self, blob: ObjectRef, offset: u32, footer: &[u8]) {
        self.db.put_page(blob, offset, footer);
    }

    /// Bytes of map pages in memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.pages.bytes()
    }

    /// The read cache.
    #[must_use]
    pub fn cache(&self) -> &Arc<ReadCache> {
        &self.cache
    }

    /// Reads the run of blocks that starts at `location`. All of it lies in one frame.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] naming blob and offset when the bytes are not what was written, or when the
    /// blob is not there.
    ///
    /// # Panics
    /// When `location` holds no data: zeroes are the caller's.
    pub async fn read(&self, range: BlockRange, location: &Location) -> Result<Bytes> {
        let Location::Data { blob, frame_offset, frame_len, index } = *location else {
            panic!("zeroes are not fetched");
        };
        let key = FrameKey { blob, offset: frame_offset };
        let count = u8::try_from(range.count()).expect("a run lies in one frame");
        if let Some(blocks) = self.cache.read(&key, index, count).await {
            return Ok(blocks);
        }
        let frame = self.fetch(key, frame_len).await?;
        let first = usize::from(index);
        check_blocks(&frame, first, range, &key)?;
        let start = first * to_usize(BLOCK_BYTES);
        Ok(frame.blocks.slice(start..start + to_usize(range.count() * BLOCK_BYTES)))
    }

    async fn fetch(&self, key: FrameKey, len: u32) -> Result<Arc<Frame>> {
        let flight = {
            let mut flights = self.flights.lock().expect("no panic while held");
            Arc::clone(flights.entry(key).or_default())
        };
        let frame = flight.get_or_try_init(|| self.get_frame(key, len)).await.cloned();
        let mut flights = self.flights.lock().expect("no panic while held");
        if flights.get(&key).is_some_and(|current| Arc::ptr_eq(current, &flight)) {
            flights.remove(&key);
        }
        frame
    }

    async fn get_frame(&self, key: FrameKey, len: u32) -> Result<Arc<Frame>> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let object = key.blob.blob_key();
        let start = u64::from(key.offset);
        let bytes = get_range(&self.store, &object, start, u64::from(len)).await?;
        let frame = blob::decode_frame(&bytes, &key.blob, key.offset)?;
        self.cache.insert(key, frame.blocks.clone(), frame.crcs.clone());
        Ok(Arc::new(frame))
    }
}

/// Makes sure that a frame holds a run of blocks from its `first` one on: the map and the blob must
/// agree about which blocks these are.
///
/// # Errors
/// [`Kind::Corrupt`] naming the frame.
pub fn check_blocks(frame: &Frame, first: usize, range: BlockRange, key: &FrameKey) -> Result<()> {
    let agree = (range.start..range.end).zip(frame.block_numbers().skip(first));
    if to_u64(agree.filter(|(wanted, found)| wanted == found).count()) == range.count() {
        return Ok(());
    }
    Err(Error::new(
        Kind::Corrupt,
        format!(
            "the frame at {} of blob {} does not hold blocks {}..{}",
            key.offset, key.blob, range.start, range.end
        ),
    )
    .with_detail("object", key.blob.blob_key().as_str()))
}

/// Reads a part of an object that must be there.
///
/// # Errors
/// [`Kind::Corrupt`] when it is not there, [`Kind::StoreUnavailable`] when the policy of `store`
/// gives up.
pub async fn get_range(store: &Store, key: &ObjectKey, start: u64, len: u64) -> Result<Bytes> {
    store.get_range(key, start..start + len).await.map_err(|error| {
        let kind = match error.kind() {
            StoreKind::NotFound | StoreKind::Corrupt | StoreKind::Invalid => Kind::Corrupt,
            _ => Kind::StoreUnavailable,
        };
        Error::new(kind, format!("cannot read {len} bytes at {start} of {key}"))
            .with_source(error)
            .with_detail("object", key.as_str())
    })
}

fn footer_offset(entry: &TailBlob) -> Result<u32> {
    u32::try_from(entry.footer_offset).map_err(|_| {
        Error::new(Kind::Corrupt, format!("blob {} has its footer past 4 GiB", entry.blob))
    })
}

/// Pages from the store, kept in the local database on the way.
#[derive(Debug)]
struct StorePages {
    store: Store,
    db: Arc<LocalDb>,
}

#[async_trait]
impl PageSource for StorePages {
    async fn load(&self, page: &PageRef) -> Result<Bytes> {
        if let Some(bytes) = self.db.get_page(page.object, page.offset)
            && crc32fast::hash(&bytes) == page.crc
        {
            return Ok(bytes);
        }
        let key = page.object.map_key();
        let bytes =
            get_range(&self.store, &key, u64::from(page.offset), u64::from(page.len)).await?;
        // A preload asks for several pages under the checksum of one: only what can be found again.
        if crc32fast::hash(&bytes) == page.crc {
            self.db.put_page(page.object, page.offset, &bytes);
        }
        Ok(bytes)
    }
}
