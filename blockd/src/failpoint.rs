//! Named points at which a test can end, stop or fail the real daemon.
//!
//! `BLOCKD_FAILPOINTS=drain-before-swap=kill:3,…` arms them from the environment: the action happens
//! the n-th time (1 when left out) the point is passed. Unarmed, a point costs one load. Actions:
//! `kill` ends the process as SIGKILL would, `panic` panics in place, `pause` sleeps for ever.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every point there is, so that a misspelt one is an error at start and not a test that tests nothing.
pub const POINTS: [&str; 14] = [
    "attach-after-intent",
    "attach-after-swap",
    "checkpoint-after-put",
    "checkpoint-after-swap",
    "create-after-head",
    "delete-after-mark",
    "delete-after-objects",
    "detach-after-swap",
    "drain-after-put",
    "drain-before-swap",
    "drain-after-swap",
    "drain-after-release",
    "snapshot-after-barrier",
    "snapshot-after-swap",
];

#[derive(Debug, Clone, Copy)]
enum Action {
    Kill,
    Panic,
    Pause,
}

#[derive(Debug)]
struct Armed {
    action: Action,
    left: AtomicU64,
}

static ARMED: OnceLock<HashMap<String, Armed>> = OnceLock::new();

/// Arms the points that the environment names.
///
/// # Errors
/// What is wrong with the variable.
pub fn arm_from_environment() -> Result<(), String> {
    let Ok(text) = std::env::var("BLOCKD_FAILPOINTS") else { return Ok(()) };
    let mut armed = HashMap::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (point, action) = parse(part)?;
        armed.insert(point, action);
    }
    tracing::warn!(points = %text, "failpoints are armed: this daemon is under test");
    let _ = ARMED.set(armed);
    Ok(())
}

fn parse(part: &str) -> Result<(String, Armed), String> {
    let wrong = || format!("BLOCKD_FAILPOINTS: {part:?} is not POINT=kill|panic|pause[:N]");
    let (point, rest) = part.split_once('=').ok_or_else(wrong)?;
    if !POINTS.contains(&point) {
        return Err(format!("BLOCKD_FAILPOINTS: no point is named {point:?}"));
    }
    let (action, nth) = rest.split_once(':').unwrap_or((rest, "1"));
    let action = match action {
        "kill" => Action::Kill,
        "panic" => Action::Panic,
        "pause" => Action::Pause,
        _ => return Err(wrong()),
    };
    let left = nth.parse::<u64>().ok().filter(|nth| *nth > 0).ok_or_else(wrong)?;
    Ok((point.to_owned(), Armed { action, left: AtomicU64::new(left) }))
}

/// Passes a point.
///
/// # Panics
/// When the point is armed to.
pub async fn pass(point: &'static str) {
    let Some(armed) = ARMED.get().and_then(|armed| armed.get(point)) else { return };
    if armed.left.fetch_sub(1, Ordering::AcqRel) != 1 {
        return;
    }
    tracing::info!(point, "failpoint reached");
    match armed.action {
        Action::Kill => {
            let me = rustix::process::getpid();
            let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
        }
        Action::Panic => panic!("failpoint {point}"),
        Action::Pause => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_point_or_action_is_refused() {
        assert!(parse("drain-before-swap=kill:2").is_ok());
        for bad in
            ["drain-before-swp=kill", "drain-before-swap", "drain-before-swap=die", "x=kill:0"]
        {
            assert!(parse(bad).is_err(), "{bad} was taken");
        }
        assert!(parse("drain-before-swap=kill:0").is_err());
    }
}
