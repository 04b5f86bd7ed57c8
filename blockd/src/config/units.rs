//! Sizes and durations as people write them: `10G` (powers of 1024), `5s`, `500ms`, `2m`.

use std::fmt::Write as _;
use std::time::Duration;

const SIZE_UNITS: [(char, u32); 5] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50)];

/// Bytes: `4096`, `512K`, `64M`, `10G`, `1T`; a suffix may also be written `GiB`.
///
/// # Errors
/// Says what is wrong with the text and how to write it.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let number = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let suffix = &text[number.len()..];
    let letter = suffix.strip_suffix("iB").unwrap_or(suffix).to_ascii_uppercase();
    let shift = match SIZE_UNITS.iter().find(|(unit, _)| letter == unit.to_string()) {
        Some((_, shift)) => *shift,
        None if suffix.is_empty() => 0,
        None => return Err(not_a_size(text)),
    };
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return Err(not_a_size(text));
    }
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| format!("{text:?} is more than 64 bits of bytes"))
}

fn not_a_size(text: &str) -> String {
    format!("{text:?} is not a size; write whole bytes or powers of 1024: 4096, 512M, 10G")
}

const DURATION_UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// A duration with its unit: `500ms`, `5s`, `2m`, `1h`, `1d`.
///
/// # Errors
/// Says what is wrong with the text and how to write it.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let number = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = &text[number.len()..];
    let scale = DURATION_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, ms)| *ms);
    let (Some(scale), true) = (scale, number.bytes().all(|b| b.is_ascii_digit())) else {
        return Err(format!("{text:?} is not a duration; write it with its unit: 500ms, 5s, 2m"));
    };
    let ms = number.parse::<u64>().ok().and_then(|number| number.checked_mul(scale));
    ms.map(Duration::from_millis).ok_or_else(|| format!("{text:?} is too long"))
}

/// A duration, where a bare number is seconds.
///
/// # Errors
/// Says what is wrong with the text and how to write it.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) => Ok(Duration::from_secs(seconds)),
        Err(_) => parse_duration(text),
    }
}

/// Bytes for people: `10 GiB`, `1.5 MiB`, `17 B`; rounded down, one digit after the point.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    let Some((unit, shift)) = SIZE_UNITS.iter().rev().find(|(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let (whole, rest) = (bytes >> shift, bytes & ((1 << shift) - 1));
    // The rest is below 2^50, so ten times it fits.
    let tenth = (rest * 10) >> shift;
    let mut shown = whole.to_string();
    if tenth > 0 {
        let _ = write!(shown, ".{tenth}");
    }
    format!("{shown} {unit}iB")
}

/// A duration for people: `250 ms`, `4 s`, `2 m 5 s`, `3 h 10 m`, `12 d 4 h`.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let pair = |high: u64, high_unit: &str, low: u64, low_unit: &str| match low {
        0 => format!("{high} {high_unit}"),
        low => format!("{high} {high_unit} {low} {low_unit}"),
    };
    match seconds {
        0 if duration.is_zero() => "0 s".to_owned(),
        0 => format!("{} ms", duration.as_millis().max(1)),
        1..60 => format!("{seconds} s"),
        60..3600 => pair(seconds / 60, "m", seconds % 60, "s"),
        3600..86_400 => pair(seconds / 3600, "h", seconds % 3600 / 60, "m"),
        _ => pair(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_bytes_or_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1K", 1 << 10),
            ("1k", 1 << 10),
            ("512M", 512 << 20),
            ("10G", 10 << 30),
            ("10GiB", 10 << 30),
            ("16T", 16 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_an_example() {
        for text in ["", "G", "-1", "+1", "1.5G", "10 G", "10GB", "10X", "0x10", "1G1", "ä", "1ä"]
        {
            let message = parse_size(text).unwrap_err();
            assert!(message.contains("10G") && message.contains(&format!("{text:?}")), "{message}");
        }
        for text in ["99999999999999999999", "16777216T"] {
            assert!(parse_size(text).unwrap_err().contains("64 bits"), "{text:?}");
        }
    }

    #[test]
    fn durations_need_their_unit_and_seconds_do_not() {
        for (text, ms) in
            [("500ms", 500), ("5s", 5000), ("2m", 120_000), ("1h", 3_600_000), ("1d", 86_400_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text:?}");
        }
        for text in ["", "s", "5", "5 s", "-5s", "1.5s", "5sec", "99999999999999999999s"] {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
        assert_eq!(parse_seconds("30"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_seconds("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_seconds("soon").is_err());
    }

    #[test]
    fn sizes_and_durations_are_shown_short_and_never_too_large() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1023.9 KiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "16383.9 PiB"),
        ] {
            assert_eq!(show_size(bytes), shown);
        }
        for (ms, shown) in [
            (0, "0 s"),
            (250, "250 ms"),
            (4999, "4 s"),
            (125_000, "2 m 5 s"),
            (7_200_000, "2 h"),
            (1_051_200_000, "12 d 4 h"),
        ] {
            assert_eq!(show_duration(Duration::from_millis(ms)), shown);
        }
    }
}
