//! How long one call is pursued, and at what pace.
//!
//! All retries of the daemon are here: the SDK's own are off, because they count attempts and draw on
//! a quota that an outage empties. A call ends with a definite answer, or when its policy says so;
//! the number of attempts never ends it.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::Error;

/// When to give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryPolicy {
    /// Never: the data path. An outage makes it wait, not fail.
    Forever,
    /// After this time: commands, which a person waits for.
    Until(Duration),
}

impl RetryPolicy {
    pub(crate) fn deadline(self, now: Instant) -> Option<Instant> {
        match self {
            RetryPolicy::Forever => None,
            RetryPolicy::Until(patience) => Some(now + patience),
        }
    }
}

const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Short enough that an outage is over for us within seconds of being over.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Exponential back-off: each pause is drawn from the upper half of a window that doubles.
#[derive(Debug)]
pub(crate) struct Backoff {
    window: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { window: PAUSE_MIN }
    }

    /// The next pause. `jitter` is any random number.
    pub(crate) fn next(&mut self, jitter: u32) -> Duration {
        let half = self.window / 2;
        self.window = (self.window * 2).min(PAUSE_MAX);
        half + half * (jitter % 1024) / 1024
    }
}

/// A random number for pacing. A system without entropy paces evenly: that is no reason to fail.
pub(crate) fn jitter() -> u32 {
    getrandom::u32().unwrap_or(512)
}

/// How the store has been answering.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Attempts without a usable answer since the last good one, over all calls.
    pub failures: u64,
    /// How long there has been no good answer; `None` while the last one was good.
    pub failing_for: Option<Duration>,
    /// The last failure, also after it healed: what, where and why.
    pub last_error: Option<String>,
}

/// The live record behind [`Health`].
#[derive(Debug, Default)]
pub(crate) struct HealthRecord {
    state: Mutex<HealthState>,
}

#[derive(Debug, Default)]
struct HealthState {
    failures: u64,
    failing_since: Option<Instant>,
    last_error: Option<String>,
}

impl HealthRecord {
    pub(crate) fn failed(&self, error: &Error, now: Instant) {
        let mut state = self.lock();
        if state.failing_since.is_none() {
            state.failing_since = Some(now);
        }
        state.failures += 1;
        state.last_error = Some(error.chain());
    }

    /// Says how long the store was failing, once, if it was.
    pub(crate) fn answered(&self, now: Instant) -> Option<(Duration, u64)> {
        let mut state = self.lock();
        let since = state.failing_since.take()?;
        Some((now.duration_since(since), std::mem::take(&mut state.failures)))
    }

    pub(crate) fn snapshot(&self, now: Instant) -> Health {
        let state = self.lock();
        Health {
            failures: state.failures,
            failing_for: state.failing_since.map(|since| now.duration_since(since)),
            last_error: state.last_error.clone(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HealthState> {
        self.state.lock().expect("no code panics while it holds the health record")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_ten_seconds_and_no_further() {
        let mut backoff = Backoff::new();
        let pauses: Vec<Duration> = (0..20).map(|_| backoff.next(u32::MAX)).collect();
        assert!(pauses[0] < PAUSE_MIN);
        assert!(pauses.is_sorted());
        assert!(pauses[19] > PAUSE_MAX * 9 / 10 && pauses[19] <= PAUSE_MAX);
        assert!(Backoff::new().next(0) >= PAUSE_MIN / 2, "the first pause is never nothing");
    }
}
