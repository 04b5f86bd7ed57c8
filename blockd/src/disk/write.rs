//! The path of a write: admit, append, index, acknowledge.
//!
//! Under the lock of the layers a record gets its position in the log and its entry in the active
//! index, so the order of the index is the order of the log. Blocks that a request covers only in
//! part are read, changed and written whole, one writer at a time for each such block: a writer of
//! the same block, aligned or not, waits for it.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use wal::{FRAME_BLOCKS, Lsn, Record, ZeroKind};

use super::{Dirty, Disk, Layers};
use crate::error::Result;
use crate::geometry::{BLOCK_BYTES, BLOCK_LEN, BlockRange, to_u64, to_usize};

/// Longest pause that back-pressure puts before a write while there is still room.
const PAUSE_MAX: Duration = Duration::from_millis(10);

/// How an attempt to append ended.
enum Step {
    Done,
    /// The log or its staging has no room now.
    Full,
    /// Somebody reads and changes one of the blocks.
    Locked,
}

/// Blocks locked for a read-modify-write; unlocked when dropped.
struct BlockLock<'a> {
    disk: &'a Disk,
    range: BlockRange,
}

impl Drop for BlockLock<'_> {
    fn drop(&mut self) {
        self.disk.layers().locked.retain(|locked| *locked != self.range);
        self.disk.released.notify_waiters();
    }
}

impl Disk {
    /// Writes bytes of any alignment. When this returns, killing the daemon cannot lose them; with
    /// `fua`, neither can a power cut.
    ///
    /// # Errors
    /// [`Kind::Poisoned`](crate::error::Kind::Poisoned) when the disk has stopped.
    pub async fn write(&self, offset: u64, data: Bytes, fua: bool) -> Result<()> {
        let whole = BlockRange::within(offset, to_u64(data.len()));
        let touched = BlockRange::touching(offset, to_u64(data.len()));
        let lsn = if whole == touched {
            self.append_data(touched.start, &data, None).await?
        } else {
            self.write_unaligned(offset, &data, touched).await?
        };
        self.acknowledge(lsn, fua).await
    }

    /// Makes bytes read as zeroes. `kind` says whether the range may be given back (a discard).
    /// Blocks covered in part are zeroed exactly, except by a discard, which leaves them.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub async fn zero(&self, offset: u64, len: u64, kind: ZeroKind, fua: bool) -> Result<()> {
        let whole = BlockRange::within(offset, len);
        let mut last = Lsn::new(0);
        if !whole.is_empty() {
            last = self.append_zeroes(whole, kind).await?;
        }
        if matches!(kind, ZeroKind::Zeroes) {
            for (offset, len) in edges(offset, len, whole) {
                let zeroes = Bytes::from_static(&[0; BLOCK_LEN]).slice(..to_usize(len));
                let touched = BlockRange::touching(offset, len);
                last = last.max(self.write_unaligned(offset, &zeroes, touched).await?);
            }
        }
        self.acknowledge(last, fua).await
    }

    async fn acknowledge(&self, lsn: Lsn, fua: bool) -> Result<()> {
        self.log.wait_acknowledged(lsn).await.map_err(|error| self.log_failed(error))?;
        if self.stopped().is_some() {
            // The lease may have been lost while the log write was under way.
            Self::check_serving(&self.layers())?;
        }
        if fua {
            self.make_durable(lsn).await?;
        }
        Ok(())
    }

    async fn write_unaligned(&self, offset: u64, data: &[u8], touched: BlockRange) -> Result<Lsn> {
        let lock = self.lock_blocks(touched).await?;
        let mut blocks = vec![0; to_usize(touched.count() * BLOCK_BYTES)];
        let base = touched.start * BLOCK_BYTES;
        let (start, end) = (to_usize(offset - base), to_usize(offset - base) + data.len());
        let head = BlockRange::new(touched.start, 1);
        let tail = BlockRange::new(touched.end - 1, 1);
        if start > 0 {
            self.read_blocks_into(head, &mut blocks[..BLOCK_LEN]).await?;
        }
        let tail_read = end < blocks.len() && (start == 0 || tail != head);
        if tail_read {
            let at = blocks.len() - BLOCK_LEN;
            self.read_blocks_into(tail, &mut blocks[at..]).await?;
        }
        blocks[start..end].copy_from_slice(data);
        let lsn = self.append_data(touched.start, &blocks, Some(touched)).await?;
        drop(lock);
        Ok(lsn)
    }

    async fn lock_blocks(&self, range: BlockRange) -> Result<BlockLock<'_>> {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            {
                let mut layers = self.layers();
                Self::check_serving(&layers)?;
                if layers.locked.iter().all(|locked| !locked.overlaps(range)) {
                    layers.locked.push(range);
                    return Ok(BlockLock { disk: self, range });
                }
            }
            released.await;
        }
    }

    /// Appends whole blocks. `own` is the caller's lock, which does not stand in its own way.
    async fn append_data(&self, first: u64, data: &[u8], own: Option<BlockRange>) -> Result<Lsn> {
        let mut runs = Runs::new(first, data);
        let range = BlockRange::new(first, to_u64(data.len() / BLOCK_LEN));
        self.append_steps(range, own, |layers, now| {
            while let Some((run, zero)) = runs.peek() {
                let record = if zero {
                    Record::Zero {
                        first_block: run.start,
                        count: run.count(),
                        kind: ZeroKind::Zeroes,
                    }
                } else {
                    let start = to_usize((run.start - first) * BLOCK_BYTES);
                    let len = to_usize(run.count() * BLOCK_BYTES);
                    Record::Write { first_block: run.start, data: &data[start..start + len] }
                };
                self.append_one(layers, run, record, now)?;
                runs.next();
            }
            Ok(())
        })
        .await
    }

    async fn append_zeroes(&self, range: BlockRange, kind: ZeroKind) -> Result<Lsn> {
        let mut done = false;
        self.append_steps(range, None, |layers, now| {
            if !done {
                let record = Record::Zero { first_block: range.start, count: range.count(), kind };
                self.append_one(layers, range, record, now)?;
                done = true;
            }
            Ok(())
        })
        .await
    }

    /// Runs `append` under the lock until it has put in everything; it goes on where it stopped.
    /// Returns the position of the last record.
    async fn append_steps(
        &self,
        range: BlockRange,
        own: Option<BlockRange>,
        mut append: impl FnMut(&mut Layers, Instant) -> Result<(), wal::Error>,
    ) -> Result<Lsn> {
        loop {
            self.admit().await?;
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            let (step, last) = {
                let mut layers = self.layers();
                Self::check_serving(&layers)?;
                let locked = layers
                    .locked
                    .iter()
                    .any(|locked| locked.overlaps(range) && Some(*locked) != own);
                let step = if locked {
                    Step::Locked
                } else {
                    match append(&mut layers, Instant::now()) {
                        Ok(()) => Step::Done,
                        Err(error) if error.kind() == wal::ErrorKind::Full => Step::Full,
                        Err(error) => {
                            drop(layers);
                            return Err(self.log_failed(error));
                        }
                    }
                };
                (step, layers.last)
            };
            match step {
                Step::Done => return Ok(last),
                Step::Locked => released.await,
                Step::Full => {
                    self.wake_drain.notify_one();
                    tokio::select! { () = self.log.room() => {}, () = released => {} }
                }
            }
        }
    }

    fn append_one(
        &self,
        layers: &mut Layers,
        range: BlockRange,
        record: Record<'_>,
        now: Instant,
    ) -> Result<(), wal::Error> {
        let first_of_index = layers.active_since.is_none();
        let appended = self.log.append(record)?;
        let dirty = match appended.place {
            Some(place) => Dirty::Data(place),
            None => Dirty::Zero,
        };
        let before = layers.active.len();
        layers.insert(range, dirty, appended.lsn, now);
        self.dirty.moved(before, layers.active.len());
        if layers.active_bytes >= self.policy.bytes {
            layers.seal(None, now);
            self.wake_drain.notify_one();
        } else if first_of_index {
            // The drain sets its timer by the first write.
            self.wake_drain.notify_one();
        }
        Ok(())
    }

    /// Back-pressure that bends before it stops: no pause below half of a bound, then one that grows
    /// with the square of the rest, then a wait for the drain.
    async fn admit(&self) -> Result<()> {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            let fill = {
                let layers = self.layers();
                Self::check_serving(&layers)?;
                self.fill(&layers)
            };
            if fill < 0.5 {
                return Ok(());
            }
            self.wake_drain.notify_one();
            if fill < 1.0 {
                let over = (fill - 0.5) * 2.0;
                tokio::time::sleep(PAUSE_MAX.mul_f64(over * over)).await;
                return Ok(());
            }
            // A bound on age can be passed without any event: look again soon.
            tokio::select! {
                () = released => {}
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
        }
    }

    /// How full the bound is that is closest to its limit; 1 is full.
    fn fill(&self, layers: &Layers) -> f64 {
        let bytes = ratio(layers.undrained_bytes(), self.policy.undrained_bytes_max);
        let age = match (self.options.max_lag_ms, layers.undrained_since()) {
            (Some(max_ms), Some(since)) => {
                since.elapsed().as_secs_f64() / Duration::from_millis(max_ms.max(1)).as_secs_f64()
            }
            _ => 0.0,
        };
        bytes.max(age).max(ratio(self.dirty.used_bytes(), self.dirty.max_bytes()))
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share needs no more digits")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// The parts of a byte range outside its whole blocks: at most two, each within one block.
fn edges(offset: u64, len: u64, whole: BlockRange) -> Vec<(u64, u64)> {
    let end = offset + len;
    let (inner_start, inner_end) = (whole.start * BLOCK_BYTES, whole.end * BLOCK_BYTES);
    let mut edges = Vec::new();
    let mut push = |start: u64, end: u64| {
        let mut at = start;
        while at < end {
            let stop = (at / BLOCK_BYTES + 1).saturating_mul(BLOCK_BYTES).min(end);
            edges.push((at, stop - at));
            at = stop;
        }
    };
    if whole.is_empty() {
        push(offset, end);
    } else {
        push(offset, inner_start);
        push(inner_end, end);
    }
    edges
}

/// Runs of blocks that are all zero or all not, each within what one record may hold.
struct Runs<'a> {
    data: &'a [u8],
    first: u64,
    at: u64,
    current: Option<(BlockRange, bool)>,
}

impl<'a> Runs<'a> {
    fn new(first: u64, data: &'a [u8]) -> Self {
        assert!(data.len().is_multiple_of(BLOCK_LEN), "only whole blocks are appended");
        Self { data, first, at: 0, current: None }
    }

    fn is_zero(&self, index: u64) -> bool {
        let start = to_usize(index * BLOCK_BYTES);
        is_zero_block(&self.data[start..start + BLOCK_LEN])
    }

    fn peek(&mut self) -> Option<(BlockRange, bool)> {
        if self.current.is_none() {
            let count = to_u64(self.data.len() / BLOCK_LEN);
            if self.at == count {
                return None;
            }
            let zero = self.is_zero(self.at);
            let longest = if zero { count } else { self.at + u64::from(FRAME_BLOCKS) };
            let mut end = self.at + 1;
            while end < count.min(longest) && self.is_zero(end) == zero {
                end += 1;
            }
            self.current =
                Some((BlockRange { start: self.first + self.at, end: self.first + end }, zero));
        }
        self.current
    }

    fn next(&mut self) {
        if let Some((run, _)) = self.current.take() {
            self.at = run.end - self.first;
        }
    }
}

/// Whether all bytes of a block are zero, looked at in chunks that the compiler makes wide loads of.
fn is_zero_block(block: &[u8]) -> bool {
    let (chunks, rest) = block.as_chunks::<64>();
    chunks.iter().all(|chunk| *chunk == [0; 64]) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_the_data_once_and_split_at_zeroes_and_at_frames() {
        let mut data = vec![1; BLOCK_LEN * (to_usize(u64::from(FRAME_BLOCKS)) + 4)];
        data[BLOCK_LEN..3 * BLOCK_LEN].fill(0);
        let mut runs = Runs::new(10, &data);
        let mut found = Vec::new();
        while let Some((run, zero)) = runs.peek() {
            found.push((run.start, run.end, zero));
            runs.next();
        }
        let frame = u64::from(FRAME_BLOCKS);
        let end = 10 + frame + 4;
        assert_eq!(
            found,
            [(10, 11, false), (11, 13, true), (13, 13 + frame, false), (13 + frame, end, false)]
        );
    }

    #[test]
    fn edges_are_what_whole_blocks_leave_over() {
        let cut = |offset, len| edges(offset, len, BlockRange::within(offset, len));
        assert_eq!(cut(0, 8192), []);
        assert_eq!(cut(1, 8191), [(1, 4095)]);
        assert_eq!(cut(4095, 4098), [(4095, 1), (8192, 1)]);
        assert_eq!(cut(4095, 2), [(4095, 1), (4096, 1)]);
        assert_eq!(cut(10, 20), [(10, 20)]);
    }
}
