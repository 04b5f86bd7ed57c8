//! What a daemon said: its stderr, collected in the background, and judged at the end.
//!
//! A line at WARN or ERROR, or a panic, that the test did not list beforehand fails the test: a
//! fault in the background cannot hide behind green assertions.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::wait;

/// The lines that one daemon, over all its restarts, wrote to stderr.
#[derive(Debug, Clone, Default)]
pub struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    listed: Arc<Mutex<Vec<String>>>,
}

impl Log {
    /// Collects from `stderr` until its end, in a thread of its own.
    pub(crate) fn collect(&self, stderr: impl Read + Send + 'static) -> JoinHandle<()> {
        let lines = Arc::clone(&self.lines);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n') {
                let Ok(line) = line else { return };
                let line = String::from_utf8_lossy(&line).into_owned();
                lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        })
    }

    /// Lists a warning or error that this test provokes: any line containing `part` is expected.
    pub fn expect(&self, part: &str) {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner).push(part.to_owned());
    }

    /// All lines so far.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The lines so far that contain `part`.
    #[must_use]
    pub fn matching(&self, part: &str) -> Vec<String> {
        self.lines().into_iter().filter(|line| line.contains(part)).collect()
    }

    /// Waits until a line contains `part`, and returns it.
    #[track_caller]
    pub fn wait_for(&self, part: &str, limit: Duration) -> String {
        wait::until(&format!("a log line with {part:?}"), limit, || self.matching(part).pop())
    }

    /// The lines that nobody expected.
    #[must_use]
    pub fn unlisted(&self) -> Vec<String> {
        let listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_listed = |line: &String| listed.iter().any(|part| line.contains(part.as_str()));
        self.lines().into_iter().filter(|line| is_alarm(line) && !is_listed(line)).collect()
    }
}

/// Whether a line reports something that a quiet run does not contain.
fn is_alarm(line: &str) -> bool {
    let level = line.split_whitespace().take(3).any(|word| word == "WARN" || word == "ERROR");
    level || line.contains("panicked at")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_is_unlisted_until_the_test_lists_it() {
        let log = Log::default();
        let text = "2026-01-01T00:00:00Z  WARN blockd: store is down\n\
                    2026-01-01T00:00:00Z  INFO blockd: the word WARN in a message is none\n\
                    thread 'main' panicked at src/main.rs:1\n";
        log.collect(std::io::Cursor::new(text)).join().unwrap();
        assert_eq!(log.unlisted().len(), 2);
        log.expect("store is down");
        assert_eq!(log.unlisted(), ["thread 'main' panicked at src/main.rs:1"]);
    }
}
