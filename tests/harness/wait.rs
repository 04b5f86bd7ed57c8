//! Waiting for events, with a deadline: the one place of the tests that reads a clock or sleeps.
//!
//! A test never sleeps in place of an event; it names the event and the longest time it may take.

use std::time::Duration;

/// How often an awaited condition is looked at.
const POLL: Duration = Duration::from_millis(10);

/// A running measurement of elapsed time.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(std::time::Instant);

impl Stopwatch {
    /// Starts measuring.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the seam through which the tests read a clock")]
    pub fn start() -> Self {
        Self(std::time::Instant::now())
    }

    /// The time since the start.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// Looks at `probe` until it yields a value, and panics with `event` once `limit` has passed.
#[track_caller]
pub fn until<T>(event: &str, limit: Duration, mut probe: impl FnMut() -> Option<T>) -> T {
    let watch = Stopwatch::start();
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(watch.elapsed() < limit, "waited {limit:?} in vain: {event}");
        pause(POLL);
    }
}

/// Looks at `probe` until it holds, and panics with `event` once `limit` has passed.
#[track_caller]
pub fn until_true(event: &str, limit: Duration, mut probe: impl FnMut() -> bool) {
    until(event, limit, || probe().then_some(()));
}

/// Lets `span` pass. For workloads that must run *for* a time (a random moment of a crash, the
/// length of an outage), never for waiting until something has happened.
#[expect(clippy::disallowed_methods, reason = "the seam through which the tests let time pass")]
pub fn pause(span: Duration) {
    std::thread::sleep(span);
}
