//! The pages in memory: one cache for all disks of a daemon, under one budget.
//!
//! Pages are immutable and known by where they are stored, so nothing in the cache is ever wrong, and
//! forks share what they share in the store. Whoever needs a page that another task is fetching waits
//! for that fetch; a failed fetch is not remembered.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::page::{Body, Page, Position};
use super::{PAGE_BYTES_MAX, PageRef, Root};
use crate::error::{Error, Kind, Result};
use crate::geometry::{to_u64, to_usize};
use crate::ids::ObjectRef;

/// Where pages come from: the object store.
#[async_trait]
pub trait PageSource: Send + Sync {
    /// The bytes of one page.
    ///
    /// # Errors
    /// When they cannot be had. Whether they are the right ones is for the caller to check.
    async fn load(&self, page: &PageRef) -> Result<Bytes>;
}

/// The page cache over its source.
pub struct Pages {
    source: Arc<dyn PageSource>,
    cache: Cache<Key, Arc<Page>, Weigh>,
}

/// Most that is read at once of the pages above the leaves.
const PRELOAD_BYTES_MAX: u32 = 1 << 20;

/// Object and offset of a page.
type Key = (ObjectRef, u32);

#[derive(Debug, Clone)]
struct Weigh;

/// What a cached page costs beside its own bytes: key, pointers and the cache's own entry.
const ENTRY_BYTES: usize = 160;

impl Weighter<Key, Arc<Page>> for Weigh {
    fn weight(&self, _: &Key, page: &Arc<Page>) -> u64 {
        to_u64(page.weight() + ENTRY_BYTES)
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages")
            .field("pages", &self.cache.len())
            .field("bytes", &self.cache.weight())
            .finish_non_exhaustive()
    }
}

impl Pages {
    /// A cache of about `budget_bytes` over `source`.
    #[must_use]
    pub fn new(source: Arc<dyn PageSource>, budget_bytes: u64) -> Self {
        // A full leaf of scattered blocks is 20 KB, one of a sequential file 1 KB.
        let pages = usize::try_from(budget_bytes / 4096).unwrap_or(usize::MAX).max(16);
        Self { source, cache: Cache::with_weighter(pages, budget_bytes, Weigh) }
    }

    /// Bytes of memory the cached pages take.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.cache.weight()
    }

    /// The source behind the cache.
    #[must_use]
    pub fn source(&self) -> &dyn PageSource {
        &*self.source
    }

    /// The page at `position` that `page` refers to.
    pub(super) async fn get(&self, page: &PageRef, position: Position) -> Result<Arc<Page>> {
        let key = (page.object, page.offset);
        let found = match self.cache.get(&key) {
            Some(found) => found,
            None => {
                let load = async {
                    let bytes = load_page(&*self.source, page).await?;
                    decode(page, &bytes).map(Arc::new)
                };
                self.cache.get_or_insert_async(&key, load).await?
            }
        };
        if found.position != position {
            let what = format!(
                "a page of level {} at {}, where level {} at {} belongs",
                found.position.level, found.position.index, position.level, position.index
            );
            return Err(corrupt_page(page, &what));
        }
        Ok(found)
    }

    /// Fetches the root page and those that were stored with it by one read, so that the first lookup
    /// of a disk waits for little more than its leaf.
    ///
    /// # Errors
    /// When they cannot be had, or are not what was written.
    pub async fn preload(&self, root: &Root) -> Result<()> {
        let Some(top) = root.subtree() else { return Ok(()) };
        let end = top.page.offset.saturating_add(top.page.len);
        let len = root.upper_bytes.min(PRELOAD_BYTES_MAX).max(top.page.len).min(end);
        let offset = end - len;
        let together = PageRef { offset, len, ..top.page };
        let bytes = self.source.load(&together).await?;
        let mut pending = vec![top];
        while let Some(tree) = pending.pop() {
            let page = &tree.page;
            let start = page.offset.checked_sub(offset).filter(|_| page.object == together.object);
            let Some(start) = start else { continue };
            let end = u64::from(start) + u64::from(page.len);
            let Some(encoded) = bytes.get(to_usize(start.into())..to_usize(end)) else {
                return Err(corrupt_page(page, &format!("{} bytes read", bytes.len())));
            };
            let decoded = decode(page, encoded)?;
            if let Body::Inner(inner) = &decoded.body
                && tree.level > 1
            {
                pending.extend(inner.children().map(|(slot, page)| tree.child(slot, page)));
            }
            self.insert(page, Arc::new(decoded));
        }
        Ok(())
    }

    /// Remembers a page that was just written.
    pub(super) fn insert(&self, page: &PageRef, decoded: Arc<Page>) {
        self.cache.insert((page.object, page.offset), decoded);
    }
}

/// Reads and checks the bytes of `page`.
fn decode(page: &PageRef, bytes: &[u8]) -> Result<Page> {
    let (decoded, crc) = Page::decode(bytes).map_err(|why| corrupt_page(page, &why))?;
    if crc != page.crc {
        return Err(wrong_page(page, crc));
    }
    Ok(decoded)
}

/// The bytes of a page, as many as there should be.
pub(crate) async fn load_page(source: &dyn PageSource, page: &PageRef) -> Result<Bytes> {
    if page.len > PAGE_BYTES_MAX {
        return Err(corrupt_page(page, &format!("longer than {PAGE_BYTES_MAX} bytes")));
    }
    let bytes = source.load(page).await?;
    if to_u64(bytes.len()) != u64::from(page.len) {
        return Err(corrupt_page(page, &format!("{} bytes read", bytes.len())));
    }
    Ok(bytes)
}

/// The error of bytes that are a page, but not this one.
pub(crate) fn wrong_page(page: &PageRef, crc: u32) -> Error {
    corrupt_page(page, &format!("another page: its crc is {crc:#010x}, not {:#010x}", page.crc))
}

/// The error of bytes that are not the page they should be.
pub(crate) fn corrupt_page(page: &PageRef, why: &dyn fmt::Display) -> Error {
    let PageRef { object, offset, len, .. } = page;
    let message = format!("map object {object}: page of {len} bytes at offset {offset}: {why}");
    Error::new(Kind::Corrupt, message).with_detail("object", object.map_key().to_string())
}
