//! Fills map objects with pages.
//!
//! Pages are placed one after the other into an object until it is full; then it goes to the sink,
//! and the next begins. A page's place is known at once, so that the page above can name it.

use async_trait::async_trait;
use bytes::Bytes;

use super::PageRef;
use crate::error::Result;
use crate::geometry::to_u64;
use crate::ids::ObjectRef;

/// Where a map object is full.
pub const MAP_OBJECT_BYTES: usize = 16 << 20;

/// Where finished map objects go: the drain's uploads.
#[async_trait]
pub trait MapSink: Send + Sync {
    /// The name of the next map object, never given before.
    fn next_object(&mut self) -> ObjectRef;

    /// Takes a finished object. May return before it is stored, as long as the sink's owner waits
    /// for that before the root is used; may wait, so that few objects are in memory.
    ///
    /// # Errors
    /// When it cannot be stored.
    async fn put(&mut self, object: ObjectRef, bytes: Bytes) -> Result<()>;
}

/// A map object that was given to the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredObject {
    /// Which one.
    pub object: ObjectRef,
    /// Its size, all of it pages.
    pub bytes: u64,
}

/// Places pages into map objects.
pub struct MapObjectWriter<'a> {
    sink: &'a mut dyn MapSink,
    limit: usize,
    open: Option<(ObjectRef, Vec<u8>)>,
    stored: Vec<StoredObject>,
}

impl std::fmt::Debug for MapObjectWriter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapObjectWriter").field("stored", &self.stored).finish_non_exhaustive()
    }
}

impl<'a> MapObjectWriter<'a> {
    /// A writer of objects of about `limit` bytes; usually [`MAP_OBJECT_BYTES`].
    pub fn new(sink: &'a mut dyn MapSink, limit: usize) -> Self {
        Self { sink, limit, open: None, stored: Vec::new() }
    }

    /// Places a page whose CRC32 is `crc`.
    ///
    /// # Errors
    /// When a full object cannot be stored.
    pub async fn add(&mut self, page: &[u8], crc: u32) -> Result<PageRef> {
        if self.open.as_ref().is_some_and(|(_, bytes)| bytes.len() + page.len() > self.limit) {
            self.close().await?;
        }
        let (object, bytes) =
            self.open.get_or_insert_with(|| (self.sink.next_object(), Vec::new()));
        let fits = "map objects and their pages are far below 4 GiB";
        let placed = PageRef {
            object: *object,
            offset: u32::try_from(bytes.len()).expect(fits),
            len: u32::try_from(page.len()).expect(fits),
            crc,
        };
        bytes.extend(page);
        Ok(placed)
    }

    /// Objects that are full and were given to the sink so far.
    #[must_use]
    pub fn stored(&self) -> &[StoredObject] {
        &self.stored
    }

    /// Whether `object` is one that this writer fills or filled.
    #[must_use]
    pub fn holds(&self, object: &ObjectRef) -> bool {
        self.open.as_ref().is_some_and(|(open, _)| open == object)
            || self.stored.iter().any(|stored| stored.object == *object)
    }

    /// Ends the last object; returns all of them.
    ///
    /// # Errors
    /// When it cannot be stored.
    pub async fn finish(mut self) -> Result<Vec<StoredObject>> {
        self.close().await?;
        Ok(self.stored)
    }

    async fn close(&mut self) -> Result<()> {
        if let Some((object, bytes)) = self.open.take() {
            self.stored.push(StoredObject { object, bytes: to_u64(bytes.len()) });
            self.sink.put(object, bytes.into()).await?;
        }
        Ok(())
    }
}
