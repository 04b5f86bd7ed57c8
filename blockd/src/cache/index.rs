//! Where each cached frame lies: rows in the local database.
//!
//! ```text
//! 'k' ‖ frame key (44)                          → file id (8, LE) ‖ position (8, LE) ‖ CRC32 per block
//! 'p' ‖ file id (8, BE) ‖ position (8, BE)      → frame key (44)
//! ```
//!
//! A row says where a frame *was* written; whether it is still there is for the ring to say, by its
//! position. The second kind of row finds the frames of a segment that is about to be overwritten.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::frame::{Frame, FrameKey};
use crate::blob::FRAME_BLOCKS_MAX;
use crate::local_db::{Batch, Family, LocalDb};

/// The index of one data file.
#[derive(Debug)]
pub(super) struct Index {
    db: Arc<LocalDb>,
    file_id: u64,
}

impl Index {
    pub(super) fn new(db: Arc<LocalDb>, file_id: u64) -> Self {
        Self { db, file_id }
    }

    /// The frame, as it was written last.
    pub(super) fn get(&self, key: &FrameKey) -> Option<Frame> {
        let row = self.db.get(Family::Cache, &frame_row(key))?;
        let (file_id, rest) = row.split_first_chunk()?;
        let (position, crcs) = rest.split_first_chunk()?;
        let (crcs, torn) = crcs.as_chunks();
        let valid = u64::from_le_bytes(*file_id) == self.file_id
            && torn.is_empty()
            && (1..=FRAME_BLOCKS_MAX).contains(&crcs.len());
        valid.then(|| {
            let crcs = crcs.iter().map(|crc| u32::from_le_bytes(*crc)).collect();
            Frame::at(u64::from_le_bytes(*position), crcs)
        })
    }

    /// Adds frames that have been written; `false` when they could not be added.
    pub(super) fn put<'a>(
        &self,
        frames: impl IntoIterator<Item = (&'a FrameKey, &'a Frame)>,
    ) -> bool {
        let mut batch = Batch::new(Family::Cache);
        for (key, frame) in frames {
            let position = frame.position().expect("a frame is indexed once it is written");
            let mut row = Vec::with_capacity(16 + 4 * frame.crcs().len());
            row.extend(self.file_id.to_le_bytes());
            row.extend(position.to_le_bytes());
            row.extend(frame.crcs().iter().flat_map(|crc| crc.to_le_bytes()));
            batch.put(frame_row(key), row);
            batch.put(self.position_row(position), key.encode());
        }
        self.db.write(batch)
    }

    /// Removes a frame, if it still lies at `position`.
    pub(super) fn remove(&self, key: &FrameKey, position: u64) {
        if self.get(key).and_then(|frame| frame.position()) == Some(position) {
            let mut batch = Batch::new(Family::Cache);
            batch.delete(frame_row(key));
            self.db.write(batch);
        }
    }

    /// Removes every frame that lies at one of `positions`; `false` when that could not be done.
    pub(super) fn forget(&self, positions: Range<u64>) -> bool {
        let Some(frames) = self.frames(positions.clone()) else { return false };
        let mut batch = Batch::new(Family::Cache);
        for (_, key) in frames {
            // A frame that was written again since then lies elsewhere, and stays.
            let position = self.get(&key).and_then(|frame| frame.position());
            if position.is_some_and(|position| positions.contains(&position)) {
                batch.delete(frame_row(&key));
            }
        }
        batch.delete_range(self.position_row(positions.start)..self.position_row(positions.end));
        self.db.write(batch)
    }

    /// What was written at `positions`, in order; `None` when that could not be read.
    pub(super) fn frames(&self, positions: Range<u64>) -> Option<Vec<(u64, FrameKey)>> {
        let (start, end) = (self.position_row(positions.start), self.position_row(positions.end));
        let mut frames = Vec::new();
        let complete = self.db.scan(Family::Cache, &start..&end, |row, key| {
            if let (Some(position), Some(key)) = (row.last_chunk(), FrameKey::decode(key)) {
                frames.push((u64::from_be_bytes(*position), key));
            }
            ControlFlow::Continue(())
        });
        complete.then_some(frames)
    }

    /// Removes everything if rows of another data file are found; `false` when that could not be done.
    pub(super) fn forget_other_files(&self) -> bool {
        let first = self.position_row(0);
        let last = self.position_row(u64::MAX);
        let mut found = false;
        let mut stop = |_: &[u8], _: &[u8]| {
            found = true;
            ControlFlow::Break(())
        };
        let scanned = self.db.scan(Family::Cache, b"p"..&first, &mut stop)
            && self.db.scan(Family::Cache, &last..b"q", &mut stop);
        scanned && (!found || self.clear())
    }

    fn clear(&self) -> bool {
        let mut batch = Batch::new(Family::Cache);
        batch.delete_range(b"k".to_vec()..b"l".to_vec());
        batch.delete_range(b"p".to_vec()..b"q".to_vec());
        self.db.write(batch)
    }

    /// Waits until what was removed is removed for good; `false` when that cannot be said.
    pub(super) fn sync(&self) -> bool {
        self.db.sync()
    }

    /// Gives a failing database the chance to come back.
    pub(super) fn heal(&self) {
        self.db.reopen_if_failing();
    }

    #[cfg(test)]
    pub(super) fn db(&self) -> &LocalDb {
        &self.db
    }

    fn position_row(&self, position: u64) -> Vec<u8> {
        let mut row = vec![b'p'];
        row.extend(self.file_id.to_be_bytes());
        row.extend(position.to_be_bytes());
        row
    }
}

fn frame_row(key: &FrameKey) -> Vec<u8> {
    let mut row = Vec::with_capacity(1 + FrameKey::LEN);
    row.push(b'k');
    row.extend(key.encode());
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::tests::key;

    #[test]
    fn rows_of_another_file_are_not_read_and_are_removed_when_found() {
        let dir = tempfile::tempdir().unwrap();
        let db = LocalDb::open(dir.path());
        let (ours, others) = (Index::new(db.clone(), 2), Index::new(db, 3));
        assert!(ours.put([(&key(1), &Frame::at(0, vec![1]))]));
        assert!(ours.forget_other_files());
        assert!(ours.get(&key(1)).is_some() && others.get(&key(1)).is_none());
        assert!(others.forget_other_files());
        assert!(ours.get(&key(1)).is_none());
    }

    #[test]
    fn forgetting_spares_a_frame_that_was_written_again_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let index = Index::new(LocalDb::open(dir.path()), 1);
        assert!(
            index.put([(&key(1), &Frame::at(0, vec![1])), (&key(2), &Frame::at(4096, vec![2]))])
        );
        assert!(index.put([(&key(1), &Frame::at(8192, vec![1]))]));
        assert!(index.forget(0..8192));
        assert_eq!(index.get(&key(1)).unwrap().position(), Some(8192));
        assert!(index.get(&key(2)).is_none());
        assert_eq!(index.frames(0..u64::MAX).unwrap(), [(8192, key(1))]);
    }
}
