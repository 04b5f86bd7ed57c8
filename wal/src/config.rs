//! What a log directory is opened with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, SLOT_BLOCKS, SLOT_BYTES};
use crate::storage::{Clock, Storage};

/// How a flush reaches stable media.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncMethod {
    /// A write, then `fdatasync`.
    Fdatasync,
    /// One `pwritev2(RWF_DSYNC)` where that alone makes everything stable; as `Fdatasync` else.
    /// It saves a system call, and on a device with FUA the flush of the whole cache.
    #[default]
    Dsync,
}

/// Where records wait to be written to the log.
#[derive(Clone, Debug)]
pub struct StagingConfig {
    /// Memory for the staging slots, rounded down to whole slots of 260 KiB.
    pub bytes: usize,
    /// A file on tmpfs that outlives the process, so that a record in it can be acknowledged;
    /// `None` for memory that ends with the process: then the log write acknowledges.
    pub path: Option<PathBuf>,
}

/// What a [`LogDir`](crate::LogDir) is opened with.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// The folder of the log; its last part is created when it is missing.
    pub dir: PathBuf,
    /// The length of a segment file.
    pub segment_bytes: u64,
    /// The most bytes that all segments of the folder may take.
    pub bytes_max: u64,
    /// How many segments are kept zeroed ahead of need.
    pub segments_ready: usize,
    /// How a flush reaches stable media.
    pub sync: SyncMethod,
    /// Whether a file system without direct I/O is accepted.
    pub allow_buffered: bool,
    /// Where records wait to be written.
    pub staging: StagingConfig,
    /// Threads that write; several owners are written at once, each by one. With none, nothing
    /// happens in the background: [`LogDir::step`](crate::LogDir::step) and the syncs do the work.
    pub writer_threads: usize,
    /// How long a frame may wait to fill where the staging ring acknowledges.
    pub frame_fill: Duration,
    /// How long after its last sync an idle log writes down that it is synced.
    pub idle_mark: Duration,
}

impl LogConfig {
    /// The defaults for a log in `dir`.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            segment_bytes: 16 << 20,
            bytes_max: 8 << 30,
            segments_ready: 8,
            sync: SyncMethod::default(),
            allow_buffered: false,
            staging: StagingConfig { bytes: 64 << 20, path: None },
            writer_threads: 4,
            frame_fill: Duration::from_millis(1),
            idle_mark: Duration::from_millis(500),
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let frame_bytes = u64::from(1 + SLOT_BLOCKS) * BLOCK;
        if !self.segment_bytes.is_multiple_of(BLOCK)
            || self.segment_bytes <= frame_bytes
            || self.segment_bytes > SEGMENT_BYTES_MAX
        {
            return invalid(format!(
                "segment_bytes is {}: it must be a multiple of {BLOCK} above {frame_bytes} and at \
                 most {SEGMENT_BYTES_MAX}",
                self.segment_bytes
            ));
        }
        if self.bytes_max < 2 * self.segment_bytes {
            return invalid(format!(
                "bytes_max is {}: it must hold two segments of {} bytes",
                self.bytes_max, self.segment_bytes
            ));
        }
        let staging_min = SLOTS_MIN * SLOT_BYTES;
        if self.staging.bytes < staging_min {
            return invalid(format!(
                "staging takes {} bytes: it must be at least {staging_min}",
                self.staging.bytes
            ));
        }
        Ok(())
    }

    pub(crate) fn segment_blocks(&self) -> u32 {
        u32::try_from(self.segment_bytes / BLOCK).expect("validated against SEGMENT_BYTES_MAX")
    }

    pub(crate) fn slots(&self) -> u32 {
        u32::try_from(self.staging.bytes / SLOT_BYTES).unwrap_or(u32::MAX)
    }

    pub(crate) fn segments_max(&self) -> usize {
        usize::try_from(self.bytes_max / self.segment_bytes).unwrap_or(usize::MAX)
    }
}

/// Keeps block numbers within 32 bits, with much to spare.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;
/// One to fill while one is written, and as much for a second owner.
const SLOTS_MIN: usize = 4;

/// Where files, time and chance come from.
#[derive(Clone)]
pub struct Seams {
    /// The files.
    pub storage: Arc<dyn Storage>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Sixty-four bits that no other process drew or will draw.
    pub random: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Staging memory that outlives this directory; `None` for what the configuration says.
    pub ring: Option<crate::sim::SimRing>,
}

impl std::fmt::Debug for Seams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seams").field("storage", &self.storage).finish_non_exhaustive()
    }
}
