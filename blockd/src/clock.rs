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

/// The wall time of a moment in this process.
#[must_use]
pub fn unix_ms_of(moment: tokio::time::Instant) -> u64 {
    let ago = u64::try_from(moment.elapsed().as_millis()).unwrap_or(u64::MAX);
    unix_ms().saturating_sub(ago)
}

/// A wall time as people write it: `2026-01-31T23:59:58Z`.
#[must_use]
pub fn rfc3339(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (second / 3600, second % 3600 / 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Date of a day counted from 1970-01-01 in the Gregorian calendar, by whole eras of 400 years.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_read_as_people_write_them() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399_000), "2000-02-28T23:59:59Z");
        assert_eq!(rfc3339(951_782_400_999), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_798_761_598_000), "2026-12-31T23:59:58Z");
    }
}
