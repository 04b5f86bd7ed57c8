//! The ring on the disk: where frames lie, and how one is read and checked.
//!
//! Frames are written one after another in a ring; the oldest segment is given up for the newest. A
//! frame at `position` is there as long as `oldest <= position`. The writer moves `oldest` *before*
//! it overwrites, and a reader looks at it *after* it has read: so bytes of another frame are never
//! taken for the frame's, whatever their CRC.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use tracing::{info, warn};

use super::Core;
use super::data_file::{BootId, DataFile, Header};
use super::frame::{FRAME_LEN_MAX, Frame, FrameKey, Part};
use super::index::Index;
use crate::geometry::{BLOCK_BYTES, BLOCK_LEN, to_u64, to_usize};
use crate::local_db::LocalDb;

/// The ring is reserved, and given up, in this many segments when it is not very large.
const SEGMENTS: u64 = 64;

/// A segment of a large ring: the part of the cache that is lost at a time, and what a restart may
/// leave unused.
const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// Segments are multiples of this; whether something was read is known by the grain.
const GRAIN: u64 = 32 * BLOCK_BYTES;

const _: () = assert!(32 * BLOCK_LEN == FRAME_LEN_MAX);

/// Most bytes that are left free of a large file system.
const FREE_BYTES_MAX: u64 = 4 << 30;

/// What the cache needs to know of the machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host {
    pub(super) boot: BootId,
    /// What the cache leaves free of its file system when it grows.
    pub(super) free_bytes_min: u64,
}

impl Host {
    /// This machine, with the file system of a directory.
    pub(super) fn current(dir: &Path) -> Self {
        let bytes = rustix::fs::statvfs(dir)
            .map_or(u64::MAX, |system| system.f_blocks.saturating_mul(system.f_frsize));
        Self { boot: BootId::current(), free_bytes_min: FREE_BYTES_MAX.min(bytes / 20) }
    }
}

/// Sizes of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) capacity: u64,
    pub(super) segment: u64,
}

impl Ring {
    /// The ring of a file of at most `bytes_max`; `None` when that is too little for two segments.
    pub(super) fn plan(bytes_max: u64) -> Option<Self> {
        let segment = (bytes_max / SEGMENTS / GRAIN * GRAIN).clamp(GRAIN, SEGMENT_BYTES_MAX);
        let capacity = bytes_max.saturating_sub(BLOCK_BYTES) / segment * segment;
        (capacity >= 2 * segment).then_some(Self { capacity, segment })
    }

    /// Where a position lies.
    pub(super) fn offset(self, position: u64) -> u64 {
        position % self.capacity
    }

    /// The number of a position's grain.
    fn grain(self, position: u64) -> usize {
        to_usize(self.offset(position) / GRAIN)
    }

    /// The oldest position that is still there when everything below `reserved_end` is given out.
    pub(super) fn oldest(self, reserved_end: u64) -> u64 {
        reserved_end.saturating_sub(self.capacity)
    }
}

/// The disk's part of the cache. One writer changes it, any number of threads read.
pub(super) struct Disk {
    pub(super) core: Arc<Core>,
    pub(super) file: DataFile,
    pub(super) index: Index,
    pub(super) ring: Ring,
    pub(super) free_bytes_min: u64,
    oldest: AtomicU64,
    /// For each grain of the ring, whether a frame that begins there was read: a byte for 128 KiB.
    read: Box<[AtomicBool]>,
    corruption_logged: AtomicBool,
}

impl Disk {
    /// Opens the data file in `dir`, with what it holds if that can be trusted. Returns the header
    /// that the writer goes on from.
    pub(super) fn open(
        dir: &Path,
        ring: Ring,
        host: Host,
        core: Arc<Core>,
        db: Arc<LocalDb>,
    ) -> io::Result<(Self, Header)> {
        let Host { boot, free_bytes_min } = host;
        let file = DataFile::open(&dir.join("data"))?;
        let (header, index) =
            match file.read_header().and_then(|header| adopt(header, ring, boot, &db)) {
                Some(adopted) => adopted,
                None => {
                    info!("read cache {} begins empty", dir.display());
                    let header = Header::empty(ring.capacity, ring.segment, boot);
                    file.clear()?;
                    let index = Index::new(db, header.file_id);
                    index.forget_other_files();
                    (header, index)
                }
            };
        let oldest = ring.oldest(header.reserved_end).into();
        let read = (0..ring.capacity / GRAIN).map(|_| AtomicBool::new(false)).collect();
        let corruption_logged = false.into();
        let disk =
            Self { core, file, index, ring, free_bytes_min, oldest, read, corruption_logged };
        Ok((disk, header))
    }

    /// Whether what was written at `position` has not been given up.
    pub(super) fn holds(&self, position: u64) -> bool {
        self.oldest() <= position
    }

    pub(super) fn oldest(&self) -> u64 {
        self.oldest.load(Ordering::SeqCst)
    }

    /// Gives up what lies below `oldest`: from here on it may be overwritten.
    pub(super) fn give_up(&self, oldest: u64) {
        self.oldest.store(oldest, Ordering::SeqCst);
    }

    /// Notes that a frame was read.
    pub(super) fn mark_read(&self, frame: &Frame) {
        if let Some(position) = frame.position().filter(|&position| self.holds(position)) {
            let read = &self.read[self.ring.grain(position)];
            // Looked at first: writing to a cache line that other cores read is the dearer of the two.
            if !read.load(Ordering::Relaxed) {
                read.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether a frame at `position` (or another of its grain) was read since it was written.
    pub(super) fn was_read(&self, position: u64) -> bool {
        self.read[self.ring.grain(position)].load(Ordering::Relaxed)
    }

    /// Notes that nothing in the segment at `start` was read yet.
    pub(super) fn mark_unread(&self, start: u64) {
        let first = self.ring.grain(start);
        for read in &self.read[first..][..to_usize(self.ring.segment / GRAIN)] {
            read.store(false, Ordering::Relaxed);
        }
    }

    /// The frame, if it is on the disk, and its position.
    pub(super) fn find(&self, key: &FrameKey) -> Option<(Arc<Frame>, u64)> {
        let held = |frame: &Frame| frame.position().filter(|&position| self.holds(position));
        if let Some(frame) = self.core.memory.frame(key)
            && let Some(position) = held(&frame)
        {
            return Some((frame, position));
        }
        let frame = Arc::new(self.index.get(key)?);
        let position = held(&frame)?;
        self.core.memory.put_frame(*key, frame.clone());
        Some((frame, position))
    }

    /// Reads and verifies blocks of a frame, through a buffer at least as long as they are.
    pub(super) fn read(&self, key: &FrameKey, part: Part, buffer: &mut [u8]) -> Option<Bytes> {
        let (frame, position) = self.find(key)?;
        if !frame.has(part) {
            return None;
        }
        let buffer = &mut buffer[..part.len()];
        self.read_verified(key, &frame, position, part, buffer)?;
        self.mark_read(&frame);
        let bytes = Bytes::copy_from_slice(buffer);
        self.core.memory.put_part(*key, &frame, part, &bytes);
        Some(bytes)
    }

    /// Fills `buffer` with the blocks of `part`; `None` when they are not there any more, or not what
    /// was written: then the frame is dropped.
    pub(super) fn read_verified(
        &self,
        key: &FrameKey,
        frame: &Frame,
        position: u64,
        part: Part,
        buffer: &mut [u8],
    ) -> Option<()> {
        let read = self.file.read(buffer, self.ring.offset(position) + to_u64(part.start()));
        if !self.holds(position) {
            return None;
        }
        if read.is_ok() && frame.verifies(part, buffer) {
            return Some(());
        }
        self.core.counters.corrupt.fetch_add(1, Ordering::Relaxed);
        if !self.corruption_logged.swap(true, Ordering::Relaxed) {
            let cause = read.err().map_or_else(|| "crc mismatch".to_owned(), |e| e.to_string());
            warn!("read cache: frame {} of blob {}: {cause}; dropped", key.offset, key.blob);
        }
        self.core.memory.remove_frame(key);
        self.index.remove(key, position);
        None
    }
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let oldest = self.oldest();
        f.debug_struct("Disk")
            .field("ring", &self.ring)
            .field("oldest", &oldest)
            .finish_non_exhaustive()
    }
}

/// What a header found in the file lets one trust; `None` when nothing.
fn adopt(header: Header, ring: Ring, boot: BootId, db: &Arc<LocalDb>) -> Option<(Header, Index)> {
    let valid = header.capacity == ring.capacity
        && header.segment == ring.segment
        && header.reserved_end.is_multiple_of(ring.segment)
        && header.synced_end <= header.reserved_end;
    if !valid {
        return None;
    }
    let index = Index::new(db.clone(), header.file_id);
    // Rows from here on are of writes that a power cut may have undone, or (in a file that was
    // restored from a copy) of writes that this file has never seen.
    let trusted_end = if header.boot == boot { header.reserved_end } else { header.synced_end };
    // Removed for good: later headers no longer tell which these were.
    let forgotten = index.forget_other_files()
        && index.forget(0..ring.oldest(header.reserved_end))
        && index.forget(trusted_end..u64::MAX)
        && index.sync();
    forgotten.then_some((Header { boot, ..header }, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_never_exceeds_its_bytes_and_has_whole_segments() {
        for bytes_max in [0, 4096, 262_143, 266_240, 1 << 20, 1 << 30, (1 << 40) + 12_345] {
            let Some(ring) = Ring::plan(bytes_max) else {
                assert!(bytes_max < 266_240, "{bytes_max} bytes are enough");
                continue;
            };
            assert!(ring.capacity + BLOCK_BYTES <= bytes_max);
            assert!(ring.capacity.is_multiple_of(ring.segment));
            assert!(ring.segment.is_multiple_of(GRAIN));
        }
    }
}
