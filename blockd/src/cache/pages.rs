//! Map pages on the local disk, so that a restarted daemon finds its maps without asking the store.
//!
//! Pages are immutable and known by where they are stored, so none is ever stale; the caller checks a
//! page's CRC as it would check one from the store. Rows of the local database:
//!
//! ```text
//! 'g' ‖ generation (4, BE) ‖ page key (44)  → page
//! 'm'                                       → generation (4, LE) ‖ bytes of this generation (8, LE)
//! ```
//!
//! Eviction is by generation: pages are written to the current one; when it holds half of the bytes
//! allowed, the one before it is dropped whole and a new one begins. A page that is found in the
//! older generation is copied to the current one, so what is used stays.

use std::sync::{Arc, Mutex};

use bytes::Bytes;

use super::frame::FrameKey;
use crate::geometry::to_u64;
use crate::ids::ObjectRef;
use crate::local_db::{Batch, Family, LocalDb};

const META_ROW: &[u8] = b"m";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Meta {
    generation: u32,
    bytes: u64,
}

impl Meta {
    fn encode(self) -> Vec<u8> {
        [&self.generation.to_le_bytes()[..], &self.bytes.to_le_bytes()].concat()
    }

    fn decode(row: &[u8]) -> Option<Self> {
        let (generation, bytes) = row.split_first_chunk()?;
        let bytes = u64::from_le_bytes(bytes.try_into().ok()?);
        Some(Self { generation: u32::from_le_bytes(*generation), bytes })
    }
}

/// See the module's documentation. Calls block as those of [`LocalDb`] do: microseconds as a rule.
#[derive(Debug)]
pub struct PageCache {
    db: Arc<LocalDb>,
    bytes_max: u64,
    meta: Mutex<Meta>,
}

impl PageCache {
    /// The pages that `db` holds, to be kept within `bytes_max`.
    #[must_use]
    pub fn open(db: Arc<LocalDb>, bytes_max: u64) -> Self {
        let meta = db.get(Family::Pages, META_ROW).and_then(|row| Meta::decode(&row));
        let meta = meta.unwrap_or(Meta { generation: 1, bytes: 0 });
        Self { db, bytes_max, meta: Mutex::new(meta) }
    }

    /// The page at `offset` of a map object, as it was put. The caller checks it.
    pub fn get_page(&self, object: &ObjectRef, offset: u32) -> Option<Bytes> {
        let generation = self.meta.lock().expect("nothing panics while it is held").generation;
        if let Some(page) = self.db.get(Family::Pages, &page_row(generation, object, offset)) {
            return Some(page.into());
        }
        let older = page_row(generation.wrapping_sub(1), object, offset);
        let page = Bytes::from(self.db.get(Family::Pages, &older)?);
        self.put_page(object, offset, &page);
        Some(page)
    }

    /// Keeps a page; one that cannot be kept is not.
    pub fn put_page(&self, object: &ObjectRef, offset: u32, page: &[u8]) {
        let row_bytes = to_u64(page.len() + FrameKey::LEN);
        let mut meta = self.meta.lock().expect("nothing panics while it is held");
        if row_bytes > self.bytes_max / 2 {
            return;
        }
        let mut batch = Batch::new(Family::Pages);
        let mut next = Meta { bytes: meta.bytes + row_bytes, ..*meta };
        if next.bytes > self.bytes_max / 2 {
            next = Meta { generation: meta.generation.wrapping_add(1), bytes: row_bytes };
            // Everything that is neither of the old generation nor of the new one.
            batch.delete_range(generation_row(0)..generation_row(meta.generation));
            batch.delete_range(generation_row(next.generation)..b"h".to_vec());
        }
        batch.put(page_row(next.generation, object, offset), page);
        batch.put(META_ROW, next.encode());
        if self.db.write(batch) {
            *meta = next;
        }
    }
}

fn generation_row(generation: u32) -> Vec<u8> {
    let mut row = vec![b'g'];
    row.extend(generation.to_be_bytes());
    row
}

fn page_row(generation: u32, object: &ObjectRef, offset: u32) -> Vec<u8> {
    let mut row = generation_row(generation);
    row.extend(FrameKey { blob: *object, offset }.encode());
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DiskId, Nonce, ObjectId};

    fn object(seq: u64) -> ObjectRef {
        ObjectRef { disk: DiskId(7), object: ObjectId { epoch: 1, nonce: Nonce(2), seq } }
    }

    #[test]
    fn a_page_is_found_where_it_was_put_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let pages = PageCache::open(LocalDb::open(dir.path()), 1 << 20);
        pages.put_page(&object(1), 4096, b"page");
        assert_eq!(pages.get_page(&object(1), 4096).unwrap(), b"page"[..]);
        assert_eq!(pages.get_page(&object(1), 0), None);
        assert_eq!(pages.get_page(&object(2), 4096), None);
        drop(pages);
        let pages = PageCache::open(LocalDb::open(dir.path()), 1 << 20);
        assert_eq!(pages.get_page(&object(1), 4096).unwrap(), b"page"[..]);
    }

    #[test]
    fn the_bytes_stay_bounded_and_pages_in_use_stay() {
        let dir = tempfile::tempdir().unwrap();
        let db = LocalDb::open(dir.path());
        let pages = PageCache::open(db.clone(), 64 << 10);
        for seq in 0..1000 {
            pages.put_page(&object(seq), 0, &[1; 1000]);
            assert!(pages.get_page(&object(0), 0).is_some(), "lost at {seq}");
        }
        let mut bytes = 0;
        db.scan(Family::Pages, b"g"..b"h", |_, page| {
            bytes += page.len();
            std::ops::ControlFlow::Continue(())
        });
        assert!((32 << 10..=64 << 10).contains(&bytes), "{bytes} bytes are kept");
        assert!(pages.get_page(&object(1), 0).is_none());
        assert!(pages.get_page(&object(999), 0).is_some());
    }

    #[test]
    fn a_page_larger_than_the_cache_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let pages = PageCache::open(LocalDb::open(dir.path()), 4096);
        pages.put_page(&object(1), 0, &[0; 4096]);
        assert_eq!(pages.get_page(&object(1), 0), None);
    }
}
