//! Limits that several servers share: how many connections there are, and how many bytes of
//! requests and replies they hold together.
//!
//! Each connection has an allowance of its own that is never counted, so that small requests are
//! served however much memory stalled clients occupy. What a connection holds beyond it comes
//! from the shared budget, and a connection that gets none stops reading.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// The unit of the shared budget.
const GRANULE_BYTES: usize = 64 << 10;
/// What each connection may hold uncounted: 128 requests of 4 KiB, or 8 of 128 KiB.
const ALLOWANCE_BYTES: usize = 1 << 20;

/// Limits for all servers that are given them.
pub struct Limits {
    connections: Arc<Semaphore>,
    granules: Arc<Semaphore>,
    granules_max: usize,
}

impl Limits {
    /// At most so many connections, which hold at most so many bytes beyond 1 MiB each.
    pub fn new(connections_max: usize, in_flight_bytes_max: usize) -> Arc<Self> {
        let granules_max = in_flight_bytes_max.div_ceil(GRANULE_BYTES).clamp(1, 1 << 30);
        Arc::new(Self {
            connections: Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS))),
            granules: Arc::new(Semaphore::new(granules_max)),
            granules_max,
        })
    }

    /// A place for one more connection, if there is one now.
    pub(crate) fn try_connect(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.connections).try_acquire_owned().ok()
    }

    /// A place for one more connection, when there is one.
    pub(crate) async fn connect(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.connections).acquire_owned().await.ok()
    }

    /// The part of the budget that so many bytes need. One request beyond the whole budget is
    /// served alone.
    fn granules_for(&self, bytes: usize) -> usize {
        bytes.saturating_sub(ALLOWANCE_BYTES).div_ceil(GRANULE_BYTES).min(self.granules_max)
    }
}

impl fmt::Debug for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limits")
            .field("connections_free", &self.connections.available_permits())
            .field("granules_free", &self.granules.available_permits())
            .field("granules_max", &self.granules_max)
            .finish()
    }
}

/// The part of the shared budget that one connection holds.
pub(crate) struct Budget {
    limits: Arc<Limits>,
    held: usize,
    waiting: Option<Waiting>,
}

type Waiting = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

impl Budget {
    /// Holds nothing yet.
    pub(crate) fn new(limits: Arc<Limits>) -> Self {
        Self { limits, held: 0, waiting: None }
    }

    /// Ready once the connection may hold so many bytes in all.
    pub(crate) fn poll_hold(&mut self, bytes: usize, cx: &mut Context<'_>) -> Poll<()> {
        let wanted = self.limits.granules_for(bytes);
        while self.held < wanted {
            let limits = &self.limits;
            let missing = u32::try_from(wanted - self.held).expect("at most 2^30 granules");
            let waiting = self.waiting.get_or_insert_with(|| {
                Box::pin(Arc::clone(&limits.granules).acquire_many_owned(missing))
            });
            let permit = ready!(waiting.as_mut().poll(cx)).expect("the budget is never closed");
            self.held += permit.num_permits();
            permit.forget();
            self.waiting = None;
        }
        self.waiting = None;
        Poll::Ready(())
    }

    /// Gives back what so many bytes do not need.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        if self.held > 0 {
            let wanted = self.limits.granules_for(bytes);
            let surplus = self.held.saturating_sub(wanted);
            self.held -= surplus;
            self.limits.granules.add_permits(surplus);
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.waiting = None;
        self.limits.granules.add_permits(self.held);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("granules_held", &self.held).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    const MIB: usize = 1 << 20;

    #[track_caller]
    fn check(budget: &mut Budget, bytes: usize, granted: bool) {
        let poll = budget.poll_hold(bytes, &mut Context::from_waker(Waker::noop()));
        assert_eq!(poll.is_ready(), granted, "{bytes} bytes, {budget:?}");
    }

    /// Fails if the budget is overdrawn, or what is given back does not come to who waits.
    #[test]
    fn connections_share_the_budget() {
        let limits = Limits::new(2, 4 * MIB);
        let mut first = Budget::new(Arc::clone(&limits));
        let mut second = Budget::new(Arc::clone(&limits));
        check(&mut first, 4 * MIB, true);
        check(&mut second, 2 * MIB, true);
        check(&mut second, 3 * MIB, false);
        first.shrink(2 * MIB);
        check(&mut second, 3 * MIB, true);
        drop((first, second));
        assert_eq!(limits.granules.available_permits(), limits.granules_max);
    }

    /// Fails if a client that hoards memory keeps others from small requests.
    #[test]
    fn an_allowance_is_left_to_every_connection() {
        let limits = Limits::new(2, MIB);
        let mut hoarder = Budget::new(Arc::clone(&limits));
        check(&mut hoarder, 100 * MIB, true);
        let mut other = Budget::new(limits);
        check(&mut other, MIB, true);
        check(&mut other, MIB + 1, false);
    }
}
