//! What NBD clients see: exports over disks, and where a listener finds them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use nbd_server::{
    Durability, ExportDirectory, ExportError, ExportErrorKind, ExportInfo, Extent, ExtentKind,
    Hole, OpenError, ReadPart,
};
use wal::ZeroKind;

use crate::disk::{Allocation, Disk, Frozen, Part};
use crate::error::{Error, Kind, Result};
use crate::geometry::{BLOCK_BYTES, BlockRange, to_usize};

/// One disk or snapshot as clients see it.
#[derive(Debug)]
pub(super) struct Export {
    name: String,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Writable(Arc<Disk>),
    Frozen(Box<Frozen>),
}

impl Export {
    /// A disk that this host may write.
    #[must_use]
    pub(super) fn writable(name: String, disk: Arc<Disk>) -> Self {
        Self { name, body: Body::Writable(disk) }
    }

    /// A point in time.
    #[must_use]
    pub(super) fn frozen(name: String, frozen: Frozen) -> Self {
        Self { name, body: Body::Frozen(Box::new(frozen)) }
    }

    fn disk(&self) -> std::result::Result<&Disk, ExportError> {
        match &self.body {
            Body::Writable(disk) => Ok(disk),
            Body::Frozen(_) => {
                Err(ExportError::new(ExportErrorKind::NotPermitted, "the export is read-only"))
            }
        }
    }

    async fn parts(&self, blocks: BlockRange) -> Result<Vec<Part>> {
        match &self.body {
            Body::Writable(disk) => disk.read(blocks).await,
            Body::Frozen(frozen) => frozen.read(blocks).await,
        }
    }
}

fn refused(error: Error) -> ExportError {
    let kind = match error.kind() {
        Kind::InvalidArgument => ExportErrorKind::Invalid,
        _ => ExportErrorKind::Io,
    };
    ExportError::with_source(kind, "cannot serve the request", error)
}

fn fua(durability: Durability) -> bool {
    durability == Durability::Fua
}

impl nbd_server::Export for Export {
    fn info(&self) -> ExportInfo {
        let mut info = ExportInfo::new(&self.name, self.size());
        info.read_only = matches!(self.body, Body::Frozen(_));
        info
    }

    fn size(&self) -> u64 {
        match &self.body {
            Body::Writable(disk) => disk.size_bytes(),
            Body::Frozen(frozen) => frozen.size_bytes,
        }
    }

    async fn read(&self, offset: u64, len: u32) -> std::result::Result<Vec<ReadPart>, ExportError> {
        let blocks = BlockRange::touching(offset, u64::from(len));
        let parts = self.parts(blocks).await.map_err(refused)?;
        Ok(trim(parts, offset - blocks.start * BLOCK_BYTES, u64::from(len)))
    }

    async fn write(
        &self,
        offset: u64,
        data: Bytes,
        durability: Durability,
    ) -> std::result::Result<(), ExportError> {
        self.disk()?.write(offset, data, fua(durability)).await.map_err(refused)
    }

    async fn flush(&self) -> std::result::Result<(), ExportError> {
        match &self.body {
            Body::Writable(disk) => disk.flush().await.map(drop).map_err(refused),
            Body::Frozen(_) => Ok(()),
        }
    }

    async fn trim(
        &self,
        offset: u64,
        len: u64,
        durability: Durability,
    ) -> std::result::Result<(), ExportError> {
        self.disk()?.zero(offset, len, ZeroKind::Discard, fua(durability)).await.map_err(refused)
    }

    async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        _hole: Hole,
        durability: Durability,
    ) -> std::result::Result<(), ExportError> {
        // Room is never reserved block by block, so a range that must stay allocated needs nothing.
        self.disk()?.zero(offset, len, ZeroKind::Zeroes, fua(durability)).await.map_err(refused)
    }

    async fn cache(&self, offset: u64, len: u64) -> std::result::Result<(), ExportError> {
        let mut blocks = BlockRange::touching(offset, len);
        while !blocks.is_empty() {
            let end = blocks.end.min(blocks.start + CACHE_STEP_BLOCKS);
            self.parts(BlockRange { start: blocks.start, end }).await.map_err(refused)?;
            blocks.start = end;
        }
        Ok(())
    }

    async fn extents(
        &self,
        offset: u64,
        len: u64,
    ) -> std::result::Result<Vec<Extent>, ExportError> {
        let blocks = BlockRange::touching(offset, len);
        // A long sparse range is answered in part: clients ask again from where the answer ends.
        let asked = BlockRange { end: blocks.end.min(blocks.start + EXTENT_STEP_BLOCKS), ..blocks };
        let found = match &self.body {
            Body::Writable(disk) => disk.allocation(asked).await,
            Body::Frozen(frozen) => frozen.allocation(asked).await,
        };
        let mut extents: Vec<Extent> = Vec::new();
        let mut skip = offset - blocks.start * BLOCK_BYTES;
        for (run, allocation) in found.map_err(refused)? {
            let kind = match allocation {
                Allocation::Data => ExtentKind::Data,
                Allocation::Hole => ExtentKind::Hole,
            };
            let len = run.count() * BLOCK_BYTES - std::mem::take(&mut skip);
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.len += len,
                _ => extents.push(Extent { len, kind }),
            }
        }
        Ok(extents)
    }
}

/// Blocks that a CACHE request reads at once.
const CACHE_STEP_BLOCKS: u64 = 256;

/// Blocks that one answer about extents looks at: 16 GiB.
const EXTENT_STEP_BLOCKS: u64 = 1 << 22;

/// Cuts `len` bytes from `skip` on out of parts.
fn trim(parts: Vec<Part>, mut skip: u64, mut len: u64) -> Vec<ReadPart> {
    let mut trimmed = Vec::with_capacity(parts.len());
    for part in parts {
        let from = skip.min(part.len());
        let take = (part.len() - from).min(len);
        skip -= from;
        len -= take;
        if take == 0 {
            continue;
        }
        trimmed.push(match part {
            Part::Data(data) => ReadPart::Data(data.slice(to_usize(from)..to_usize(from + take))),
            Part::Zero(_) => ReadPart::Zero(u32::try_from(take).expect("reads are 32 bits long")),
        });
    }
    trimmed
}

/// The exports of one listener.
#[derive(Debug, Default)]
pub(super) struct Exports {
    by_name: Mutex<BTreeMap<String, Arc<Export>>>,
}

impl Exports {
    /// Offers an export under its name.
    pub(super) fn insert(&self, export: Arc<Export>) {
        self.by_name.lock().expect("no panic while held").insert(export.name.clone(), export);
    }

    /// Offers an export no longer; clients that are connected stay.
    pub(super) fn remove(&self, name: &str) {
        self.by_name.lock().expect("no panic while held").remove(name);
    }

    /// Whether nothing is offered.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.by_name.lock().expect("no panic while held").is_empty()
    }
}

impl ExportDirectory for Exports {
    type Export = Export;

    async fn open(&self, name: &str) -> std::result::Result<Arc<Export>, OpenError> {
        let by_name = self.by_name.lock().expect("no panic while held");
        if name.is_empty() && by_name.len() == 1 {
            return by_name.values().next().cloned().ok_or(OpenError::Unknown);
        }
        by_name.get(name).cloned().ok_or(OpenError::Unknown)
    }

    async fn list(&self) -> Vec<String> {
        self.by_name.lock().expect("no panic while held").keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::to_u64;

    #[test]
    fn parts_are_cut_to_the_bytes_asked_for() {
        let parts = vec![Part::Data(Bytes::from(vec![7; 4096])), Part::Zero(8192)];
        let cut = trim(parts, 4095, 4098);
        assert_eq!(cut, [ReadPart::Data(Bytes::from_static(&[7])), ReadPart::Zero(4097)]);
        assert_eq!(cut.iter().map(|part| to_u64(part.len())).sum::<u64>(), 4098);
    }
}
