//! The one thread that writes frames to the ring, and its rules for room.
//!
//! - Room is reserved by the segment: space is taken from the file system, the header says so on
//!   stable media, the segment's old frames are given up, and only then it is written.
//! - Where the file system has no room for another segment, the ring wraps early and goes on with
//!   what it has, and tries again next time round.
//! - Frames of the oldest segment that were read since they were written get a second chance: they
//!   are written again, for at most every second byte.
//! - An error costs the frames at hand, never the cache: the next batch tries again.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::{info, warn};

use super::data_file::{AlignedBuffer, Header};
use super::disk::Disk;
use super::frame::{FRAME_LEN_MAX, Frame, FrameKey};
use super::queue::{Inserted, Next, Queue, Stop};
use crate::geometry::to_u64;

/// Bytes written at a time: enough for the full speed of a device.
pub(super) const BATCH_LEN: usize = 1 << 20;

/// See the module's documentation.
pub(super) struct Writer<'a> {
    disk: &'a Disk,
    queue: &'a Queue,
    header: Header,
    /// Where the next frame goes; everything from `header.reserved_end` on is not ours yet.
    head: u64,
    staged: Vec<(FrameKey, Arc<Frame>)>,
    staged_len: usize,
    buffer: AlignedBuffer,
    /// Frames that get a second chance.
    kept: VecDeque<FrameKey>,
    failing: bool,
    /// Where the file system had no room last.
    end_of_room: Option<u64>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(disk: &'a Disk, header: Header, queue: &'a Queue) -> Self {
        Self {
            disk,
            queue,
            header,
            head: header.reserved_end,
            staged: Vec::new(),
            staged_len: 0,
            buffer: AlignedBuffer::new(BATCH_LEN),
            kept: VecDeque::new(),
            failing: false,
            end_of_room: None,
        }
    }

    /// The body of the thread.
    pub(super) fn run(mut self) {
        loop {
            match self.queue.next(BATCH_LEN) {
                Next::Write(batch) => {
                    self.write(&batch);
                    self.queue.done(&batch);
                    self.disk.index.heal();
                }
                Next::Stop(Stop::Settle) => return self.settle(),
                Next::Stop(Stop::Abandon) => return,
            }
        }
    }

    fn write(&mut self, batch: &[Inserted]) {
        for Inserted { key, frame, blocks } in batch {
            if self.disk.find(key).is_none() {
                self.stage(*key, frame.clone(), |buffer| {
                    buffer.copy_from_slice(blocks);
                    Some(())
                });
            }
        }
        let mut room = BATCH_LEN;
        while room > 0
            && let Some(key) = self.kept.pop_front()
        {
            room = room.saturating_sub(self.keep(key));
        }
        self.write_out();
    }

    /// Makes room for a frame, and has `fill` put its blocks there.
    fn stage(
        &mut self,
        key: FrameKey,
        frame: Arc<Frame>,
        fill: impl FnOnce(&mut [u8]) -> Option<()>,
    ) {
        let len = frame.len();
        if self.staged_len + len > BATCH_LEN {
            self.write_out();
        }
        if self.head + to_u64(self.staged_len + len) > self.header.reserved_end {
            self.write_out();
            let reserved = self.reserve();
            if !self.noted(reserved) {
                self.drop_frames(1);
                return;
            }
        }
        if fill(&mut self.buffer.as_mut()[self.staged_len..][..len]).is_some() {
            self.staged.push((key, frame));
            self.staged_len += len;
        }
    }

    /// Writes what is staged, and lets it be found.
    fn write_out(&mut self) {
        if self.staged.is_empty() {
            return;
        }
        let bytes = &self.buffer.as_mut()[..self.staged_len];
        let written = self.disk.file.write(bytes, self.disk.ring.offset(self.head));
        let staged = std::mem::take(&mut self.staged);
        let mut position = self.head;
        // After an error too: what does not work here may work further on.
        self.head += to_u64(std::mem::take(&mut self.staged_len));
        if !self.noted(written) {
            return self.drop_frames(to_u64(staged.len()));
        }
        for (_, frame) in &staged {
            frame.set_position(position);
            position += to_u64(frame.len());
        }
        // Where the index takes nothing, memory still knows the frames.
        self.disk.index.put(staged.iter().map(|(key, frame)| (key, &**frame)));
        let core = &self.disk.core;
        for (key, frame) in staged {
            core.counters.inserted_bytes.fetch_add(to_u64(frame.len()), Ordering::Relaxed);
            core.memory.put_frame(key, frame);
        }
    }

    /// Reserves the next segment of the ring. Nothing is staged.
    fn reserve(&mut self) -> io::Result<()> {
        let (disk, ring) = (self.disk, self.disk.ring);
        let start = self.allocate()?;
        let end = start + ring.segment;
        let header =
            Header { reserved_end: end, synced_end: self.header.reserved_end, ..self.header };
        // First the data below `synced_end`, then the header that vouches for it.
        disk.file.sync()?;
        disk.file.write_header(&header)?;
        self.header = header;
        self.head = start;
        let (given_up, oldest) = (disk.oldest(), ring.oldest(end));
        disk.give_up(oldest);
        disk.mark_unread(start);
        // Rows that stay lead nowhere, and are removed at the next start.
        disk.index.forget(given_up..oldest);
        self.choose_kept(oldest..ring.oldest(end + ring.segment));
        Ok(())
    }

    /// Takes space for the segment after the reserved ones; where there is none, for the first one of
    /// the next round. Returns where it starts.
    fn allocate(&mut self) -> io::Result<u64> {
        let (disk, ring) = (self.disk, self.disk.ring);
        let start = self.header.reserved_end;
        let allocate =
            |start| disk.file.allocate(ring.offset(start), ring.segment, disk.free_bytes_min);
        let Err(error) = allocate(start) else { return Ok(start) };
        let offset = ring.offset(start);
        if offset == 0 {
            return Err(error);
        }
        if self.end_of_room.replace(offset) != Some(offset) {
            info!("read cache stays at {} bytes for now: {error}", disk.file.used_bytes());
        }
        let wrapped = start.next_multiple_of(ring.capacity);
        allocate(wrapped).map(|()| wrapped)
    }

    /// Chooses the frames that are worth writing again before their segment is given up next.
    fn choose_kept(&mut self, given_up_next: Range<u64>) {
        self.kept.clear();
        let disk = self.disk;
        let mut room = disk.ring.segment / 2;
        for (position, key) in disk.index.frames(given_up_next).unwrap_or_default() {
            if !disk.was_read(position) {
                continue;
            }
            match disk.find(&key) {
                // A frame that was written again since then does not lie there any more.
                Some((frame, found)) if found == position && to_u64(frame.len()) <= room => {
                    room -= to_u64(frame.len());
                    self.kept.push_back(key);
                }
                _ => {}
            }
        }
    }

    /// Stages a frame that is on the disk for a second stay; returns its bytes.
    fn keep(&mut self, key: FrameKey) -> usize {
        let Some((frame, position)) = self.disk.find(&key) else { return 0 };
        let disk = self.disk;
        self.stage(key, frame.clone(), |buffer| {
            disk.read_verified(&key, &frame, position, frame.whole(), buffer)
        });
        frame.len()
    }

    /// Tells the next process that it can trust all of this, also after a power cut.
    fn settle(&mut self) {
        let header = Header { synced_end: self.header.reserved_end, ..self.header };
        let written = if header == self.header {
            Ok(())
        } else {
            self.disk.file.sync().and_then(|()| self.disk.file.write_header(&header))
        };
        self.noted(written);
    }

    fn drop_frames(&self, count: u64) {
        self.disk.core.counters.dropped.fetch_add(count, Ordering::Relaxed);
    }

    /// Whether it worked; the log hears of the first failure, and of the end of them.
    fn noted(&mut self, result: io::Result<()>) -> bool {
        match &result {
            Ok(()) if self.failing => info!("read cache is written again"),
            Err(error) if !self.failing => warn!("read cache is not written for now: {error}"),
            _ => {}
        }
        self.failing = result.is_err();
        result.is_ok()
    }
}

impl Drop for Writer<'_> {
    /// Whatever ends the writer ends the waiting for it.
    fn drop(&mut self) {
        self.queue.stop(Stop::Abandon);
    }
}

const _: () = assert!(FRAME_LEN_MAX <= BATCH_LEN);
