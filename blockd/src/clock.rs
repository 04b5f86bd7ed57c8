//! Wall time, for people only: names, creation times, ages shown to a reader.
//!
//! Nothing that decides who may write, or what may be deleted, compares wall clocks; those decisions
//! use generations and the observer's own monotonic time (`tokio::time::Instant`).

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970 in UTC; zero on a host whose clock stands before that.
#[must_use]
pub fn unix_ms() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "the one place where wall time enters")]
    let now = SystemTime::now();
    now.duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
