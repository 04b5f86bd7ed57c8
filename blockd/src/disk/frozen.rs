//! A point in time of a disk, read only: no lease, no log, any number of readers on any host.

use std::sync::Arc;

use super::layers::{Layers, Piece};
use super::read::{self, Allocation, Part};
use crate::blob::Location;
use crate::error::Result;
use crate::extent_map::ExtentMap;
use crate::fetch::Fetcher;
use crate::geometry::BlockRange;
use crate::map::Root;

/// The state of a disk at one swap of its head.
#[derive(Debug)]
pub struct Frozen {
    /// Size in bytes.
    pub size_bytes: u64,
    layers: Layers,
    fetcher: Arc<Fetcher>,
}

impl Frozen {
    /// A state given by a map and the extents of the tail over it.
    #[must_use]
    pub fn new(
        size_bytes: u64,
        root: Root,
        overlay: ExtentMap<Location>,
        fetcher: Arc<Fetcher>,
    ) -> Self {
        Self { size_bytes, layers: Layers::new(root, overlay, wal::Lsn::new(0)), fetcher }
    }

    /// Reads whole blocks.
    ///
    /// # Errors
    /// [`Kind::Corrupt`](crate::error::Kind::Corrupt) naming the place.
    pub async fn read(&self, blocks: BlockRange) -> Result<Vec<Part>> {
        read::read_pieces(&self.fetcher, &self.layers.root, self.resolve(blocks)).await
    }

    /// Which runs of a range hold data.
    ///
    /// # Errors
    /// As [`Frozen::read`].
    pub async fn allocation(&self, blocks: BlockRange) -> Result<Vec<(BlockRange, Allocation)>> {
        read::allocate_pieces(&self.fetcher, &self.layers.root, self.resolve(blocks)).await
    }

    fn resolve(&self, blocks: BlockRange) -> Vec<(BlockRange, Piece)> {
        self.layers.resolve(blocks)
    }
}
