//! From what the store and the log hold to the layers of a disk that serves.

use futures_util::stream::{self, StreamExt, TryStreamExt};
use s3_backend::Store;
use tokio::time::Instant;
use wal::{Recovered, RecoveredKind};

use super::{Barrier, Dirty, Layers};
use crate::blob::Location;
use crate::error::{Error, Kind, Result};
use crate::extent_map::ExtentMap;
use crate::fetch::Fetcher;
use crate::geometry::BlockRange;
use crate::head::TailBlob;

/// Footers fetched at once: one round trip for a usual tail.
const FOOTERS_AT_ONCE: usize = 32;

/// Reads the footers of a tail and lays their extents over each other, oldest first.
///
/// # Errors
/// [`Kind::Corrupt`] naming the blob, [`Kind::StoreUnavailable`].
pub async fn tail_overlay(
    fetcher: &Fetcher,
    store: &Store,
    tail: &[TailBlob],
) -> Result<ExtentMap<Location>> {
    let loads: Vec<_> = tail.iter().map(|entry| fetcher.footer(store, entry)).collect();
    let mut footers = stream::iter(loads).buffered(FOOTERS_AT_ONCE);
    let mut overlay = ExtentMap::new();
    while let Some(footer) = footers.try_next().await? {
        for extent in footer.extents {
            overlay.insert(extent.range, extent.location);
        }
    }
    Ok(overlay)
}

/// Puts the records that survived in the log into the dirty indexes, sealing as the writes did.
///
/// # Errors
/// [`Kind::Corrupt`] when a barrier cannot be read.
pub fn replay(
    layers: &mut Layers,
    records: impl IntoIterator<Item = Recovered>,
    cut_bytes: u64,
) -> Result<u64> {
    let now = Instant::now();
    let mut count = 0;
    for record in records {
        count += 1;
        let Recovered { lsn, kind, first_block, .. } = record;
        match (kind, &record.place) {
            (RecoveredKind::Barrier { .. }, _) => {
                let barrier = read_barrier(&record)?;
                layers.last = lsn;
                layers.seal(Some(barrier), now);
            }
            (RecoveredKind::Write, Some(place)) => {
                let range = BlockRange::new(first_block, record.count);
                layers.insert(range, Dirty::Data(place.clone()), lsn, now);
            }
            (RecoveredKind::Write | RecoveredKind::Zero(_), _) => {
                layers.insert(BlockRange::new(first_block, record.count), Dirty::Zero, lsn, now);
            }
        }
        if layers.active_bytes >= cut_bytes {
            layers.seal(None, now);
        }
    }
    Ok(count)
}

fn read_barrier(record: &Recovered) -> Result<Barrier> {
    let unreadable =
        || Error::new(Kind::Corrupt, format!("the barrier at lsn {} cannot be read", record.lsn));
    let payload = record.payload_blocking().map_err(|error| unreadable().with_source(error))?;
    serde_json::from_slice(&payload).map_err(|error| unreadable().with_source(error))
}
