//! Map pages (and footers of blobs) on the local disk, so that a restarted daemon finds its maps
//! without asking the store.
//!
//! Pages are immutable and known by where they are stored, so none is ever stale; the caller checks a
//! page's CRC as it would check one from the store. Rows of the local database:
//!
//! ```text
//! 'g' ‖ generation (4, BE) ‖ object (40) ‖ offset (4)  → page
//! 'm'                                                  → generation (4, LE) ‖ its bytes (8, LE)
//! ```
//!
//! Eviction is by generation: pages are written to the current one; when it holds half of the bytes
//! allowed, the one before it is dropped whole and a new one begins. A page that is found in the
//! older generation is copied to the current one, so what is used stays.

use bytes::Bytes;

use super::frame::FrameKey;
use crate::geometry::to_u64;
use crate::ids::ObjectRef;
use crate::local_db::{Batch, Family, LocalDb};

/// Most bytes of pages, both generations together.
const PAGES_BYTES_MAX: u64 = 256 << 20;

const GENERATION_ROW: &[u8] = b"m";

/// The generation that pages are written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Generation {
    number: u32,
    bytes: u64,
}

impl Generation {
    fn encode(self) -> Vec<u8> {
        [&self.number.to_le_bytes()[..], &self.bytes.to_le_bytes()].concat()
    }

    fn decode(row: &[u8]) -> Option<Self> {
        let (number, bytes) = row.split_first_chunk()?;
        let bytes = u64::from_le_bytes(bytes.try_into().ok()?);
        Some(Self { number: u32::from_le_bytes(*number), bytes })
    }
}

impl LocalDb {
    /// The page at `offset` of an object, as it was put. The caller checks it.
    pub fn get_page(&self, object: ObjectRef, offset: u32) -> Option<Bytes> {
        let Generation { number, .. } = self.page_generation();
        if let Some(page) = self.get(Family::Pages, &page_row(number, object, offset)) {
            return Some(page.into());
        }
        let older = page_row(number.wrapping_sub(1), object, offset);
        let page = Bytes::from(self.get(Family::Pages, &older)?);
        self.put_page(object, offset, &page);
        Some(page)
    }

    /// Keeps a page; one that cannot be kept is not.
    pub fn put_page(&self, object: ObjectRef, offset: u32, page: &[u8]) {
        self.put_page_within(PAGES_BYTES_MAX, object, offset, page);
    }

    fn put_page_within(&self, bytes_max: u64, object: ObjectRef, offset: u32, page: &[u8]) {
        let row_bytes = to_u64(page.len() + FrameKey::LEN);
        if row_bytes > bytes_max / 2 {
            return;
        }
        let _alone = self.pages_turn.lock().expect("nothing panics while it is held");
        let now = self.page_generation();
        let mut batch = Batch::new(Family::Pages);
        let mut next = Generation { bytes: now.bytes + row_bytes, ..now };
        if next.bytes > bytes_max / 2 {
            next = Generation { number: now.number.wrapping_add(1), bytes: row_bytes };
            // Everything that is neither of the generation that ends now nor of the one that begins.
            batch.delete_range(generation_row(0)..generation_row(now.number));
            batch.delete_range(generation_row(next.number)..b"h".to_vec());
        }
        batch.put(page_row(next.number, object, offset), page);
        batch.put(GENERATION_ROW, next.encode());
        self.write(batch);
    }

    fn page_generation(&self) -> Generation {
        let row = self.get(Family::Pages, GENERATION_ROW);
        row.and_then(|row| Generation::decode(&row)).unwrap_or(Generation { number: 1, bytes: 0 })
    }
}

fn generation_row(number: u32) -> Vec<u8> {
    let mut row = vec![b'g'];
    row.extend(number.to_be_bytes());
    row
}

fn page_row(generation: u32, object: ObjectRef, offset: u32) -> Vec<u8> {
    let mut row = generation_row(generation);
    row.extend(FrameKey { blob: object, offset }.encode());
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
    fn a_page_is_found_where_it_was_put_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        LocalDb::open(dir.path()).put_page(object(1), 4096, b"page");
        let db = LocalDb::open(dir.path());
        assert_eq!(db.get_page(object(1), 4096).unwrap(), b"page"[..]);
        assert_eq!(db.get_page(object(1), 0), None);
        assert_eq!(db.get_page(object(2), 4096), None);
    }

    #[test]
    fn the_bytes_stay_bounded_and_pages_in_use_stay() {
        let dir = tempfile::tempdir().unwrap();
        let db = LocalDb::open(dir.path());
        db.put_page(object(0), 0, &[1; 1000]);
        for seq in 1..1000 {
            db.put_page_within(64 << 10, object(seq), 0, &[1; 1000]);
            assert!(db.get_page(object(0), 0).is_some(), "lost at {seq}");
        }
        let mut bytes = 0;
        db.scan(Family::Pages, b"g"..b"h", |_, page| {
            bytes += page.len();
            std::ops::ControlFlow::Continue(())
        });
        assert!((32 << 10..=64 << 10).contains(&bytes), "{bytes} bytes are kept");
        assert!(db.get_page(object(1), 0).is_none());
        assert!(db.get_page(object(999), 0).is_some());
    }

    #[test]
    fn a_page_larger_than_a_generation_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let db = LocalDb::open(dir.path());
        db.put_page_within(4096, object(1), 0, &[0; 4096]);
        assert_eq!(db.get_page(object(1), 0), None);
    }
}
