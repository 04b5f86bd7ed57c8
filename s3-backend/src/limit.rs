//! How many requests may be under way at once, found by trying: one more while all goes well, fewer
//! when the store says so or falls silent. There is no quota that can run dry: as soon as answers
//! come again, the limit grows again.
//!
//! Who waits is served by class: heads before blobs, blobs before cleaning.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// What a request is for; decides who goes first when the store is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Small objects that others wait for: heads, names, heartbeats.
    Meta,
    /// Blobs, both ways.
    Data,
    /// What nobody waits for: cleaning and deletion. Gets at most half of the requests.
    Background,
}

/// Requests that `Meta` may have under way beyond the limit, so that a head never queues behind
/// blobs for long.
const META_RESERVE: usize = 2;

/// The limit shrinks at most once in this time: the many requests that one bad moment hits are one
/// reason, not many.
const SHRINK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct State {
    limit: usize,
    /// Below this, every success raises the limit by one; above, every `limit` successes do.
    fast_below: usize,
    successes: usize,
    in_use: usize,
    shrunk_at: Option<Instant>,
    waiting: [VecDeque<oneshot::Sender<Permit>>; 3],
}

/// The shared limit of one store.
#[derive(Debug)]
pub(crate) struct Limiter {
    state: Mutex<State>,
    limit_max: usize,
}

/// The right to one request; gives itself back.
#[derive(Debug)]
pub(crate) struct Permit {
    limiter: Arc<Limiter>,
    armed: bool,
}

impl Limiter {
    pub(crate) fn new(limit_max: usize) -> Arc<Self> {
        let limit_max = limit_max.max(1);
        Arc::new(Self {
            state: Mutex::new(State {
                limit: limit_max,
                fast_below: limit_max,
                successes: 0,
                in_use: 0,
                shrunk_at: None,
                waiting: Default::default(),
            }),
            limit_max,
        })
    }

    /// Waits for a turn. Dropping the future gives the turn up.
    pub(crate) async fn acquire(self: &Arc<Self>, class: Class) -> Permit {
        let turn = {
            let mut state = self.lock();
            if state.waiting[queue_of(class)].is_empty() && state.has_room(class) {
                state.in_use += 1;
                return Permit { limiter: Arc::clone(self), armed: true };
            }
            let (sender, turn) = oneshot::channel();
            state.waiting[queue_of(class)].push_back(sender);
            turn
        };
        turn.await.expect("the limiter outlives its queue and answers every waiter")
    }

    /// A request was answered in time.
    pub(crate) fn succeeded(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.limit == self.limit_max {
            return;
        }
        state.successes += 1;
        if state.limit < state.fast_below || state.successes >= state.limit {
            state.successes = 0;
            state.limit += 1;
            drop(state);
            self.wake();
        }
    }

    /// The store asked for less, or did not answer in time.
    pub(crate) fn congested(&self, now: Instant) {
        let mut state = self.lock();
        if state.shrunk_at.is_some_and(|at| now.duration_since(at) < SHRINK_INTERVAL) {
            return;
        }
        state.shrunk_at = Some(now);
        state.successes = 0;
        state.fast_below = (state.limit / 2).max(1);
        state.limit = (state.limit * 7 / 10).max(1);
    }

    /// The present limit, for the status page.
    pub(crate) fn limit(&self) -> usize {
        self.lock().limit
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the limiter")
    }

    fn released(self: &Arc<Self>) {
        self.lock().in_use -= 1;
        self.wake();
    }

    /// Hands out what is free, the most urgent class first.
    fn wake(self: &Arc<Self>) {
        // Permits for waiters that have gone are dropped after the lock, for dropping takes it.
        let mut unclaimed = Vec::new();
        {
            let mut state = self.lock();
            for class in [Class::Meta, Class::Data, Class::Background] {
                while state.has_room(class) {
                    let Some(waiter) = state.waiting[queue_of(class)].pop_front() else { break };
                    if waiter.is_closed() {
                        continue;
                    }
                    state.in_use += 1;
                    let permit = Permit { limiter: Arc::clone(self), armed: true };
                    if let Err(mut permit) = waiter.send(permit) {
                        state.in_use -= 1;
                        permit.armed = false;
                        unclaimed.push(permit);
                    }
                }
            }
        }
        drop(unclaimed);
    }
}

impl State {
    fn has_room(&self, class: Class) -> bool {
        let share = match class {
            Class::Meta => self.limit + META_RESERVE,
            Class::Data => self.limit,
            Class::Background => (self.limit / 2).max(1),
        };
        self.in_use < share
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.armed {
            self.limiter.released();
        }
    }
}

fn queue_of(class: Class) -> usize {
    match class {
        Class::Meta => 0,
        Class::Data => 1,
        Class::Background => 2,
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_limit_falls_once_per_moment_and_always_comes_back() {
        let limiter = Limiter::new(10);
        let now = Instant::now();
        for _ in 0..100 {
            limiter.congested(now);
        }
        assert_eq!(limiter.limit(), 7);
        for second in 1..20 {
            limiter.congested(now + SHRINK_INTERVAL * second);
        }
        assert_eq!(limiter.limit(), 1);
        for _ in 0..100 {
            limiter.succeeded();
        }
        assert_eq!(limiter.limit(), 10);
    }

    #[tokio::test]
    async fn heads_pass_blobs_and_blobs_pass_cleaning() {
        let limiter = Limiter::new(2);
        let first = limiter.acquire(Class::Data).await;
        let second = limiter.acquire(Class::Data).await;
        let mut cleaning = Box::pin(limiter.acquire(Class::Background));
        let mut blob = Box::pin(limiter.acquire(Class::Data));
        assert!(cleaning.as_mut().now_or_never().is_none());
        assert!(blob.as_mut().now_or_never().is_none());
        let head = limiter.acquire(Class::Meta).now_or_never();
        assert!(head.is_some(), "the reserve is for heads");
        drop(head);
        drop(first);
        let blob = blob.now_or_never().expect("the blob is next");
        assert!(cleaning.as_mut().now_or_never().is_none(), "half of the limit is in use");
        drop((blob, second));
        assert!(cleaning.now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_waiter_that_gives_up_loses_no_permit() {
        let limiter = Limiter::new(1);
        let held = limiter.acquire(Class::Data).await;
        let mut gone = Box::pin(limiter.acquire(Class::Data));
        assert!(gone.as_mut().now_or_never().is_none());
        let mut granted_and_gone = Box::pin(limiter.acquire(Class::Data));
        assert!(granted_and_gone.as_mut().now_or_never().is_none());
        drop(gone);
        drop(held);
        drop(granted_and_gone);
        assert!(limiter.acquire(Class::Data).now_or_never().is_some());
    }
}
