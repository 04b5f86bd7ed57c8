//! What the control socket says besides requests and replies: errors, and the lines of a streamed answer.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::api::Progress;
use crate::error::{Error, Kind};

/// The caller's time limit, in a header of the request.
pub const TIMEOUT_HEADER: &str = "x-blockd-timeout-ms";

/// The media type that asks for progress.
pub const LINES: &str = "application/x-ndjson";

/// Longest request body.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;

/// An [`Error`] on the wire, and under `--json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// [`Kind::code`].
    pub code: String,
    /// What went wrong and where, with its causes, on one line.
    pub message: String,
    /// What to do about it: there is always something.
    #[serde(default)]
    pub fix: String,
    /// Facts for programs.
    #[serde(default)]
    pub details: serde_json::Map<String, serde_json::Value>,
}

impl From<&Error> for ErrorBody {
    fn from(error: &Error) -> Self {
        Self {
            code: error.kind().code().to_owned(),
            message: error.report(),
            fix: error.fix().unwrap_or_else(|| usual_fix(error.kind())).to_owned(),
            details: error.details().clone(),
        }
    }
}

impl From<ErrorBody> for Error {
    fn from(body: ErrorBody) -> Self {
        let error = Self::new(Kind::from_code(&body.code), body.message);
        let error =
            body.details.into_iter().fold(error, |e, (name, value)| e.with_detail(&name, value));
        match body.fix.as_str() {
            "" => error,
            _ => error.with_fix(body.fix),
        }
    }
}

/// What to do about an error that does not say it itself.
fn usual_fix(kind: Kind) -> &'static str {
    match kind {
        Kind::DiskBusy | Kind::SnapshotInUse => {
            "see who uses it with blockd show, and detach it there"
        }
        Kind::DiskExists | Kind::SnapshotExists => "choose another name",
        Kind::DiskHasForks => "delete the forks first",
        Kind::LeaseLost => "what was not drained is kept: see blockd recover",
        Kind::TakeoverNeedsAcceptLoss => "wait for the holder, or attach with --accept-loss",
        Kind::NotFound => "blockd list and blockd snapshots NAME say what there is",
        Kind::InvalidName => {
            "use 1 to 63 lowercase letters, digits and hyphens, starting with a letter or digit"
        }
        Kind::InvalidArgument => "see the help of the command",
        Kind::QuotaExceeded => "free some room, or raise the limit",
        Kind::StoreUnavailable => "see blockd status, and try again when the store answers",
        Kind::LogFull => "wait until the store has taken some of the log; see blockd status",
        Kind::Corrupt => {
            "see what else is damaged with blockd check --deep, and keep the daemon's log"
        }
        Kind::Poisoned => "look into the cause, then restart the daemon",
        Kind::Failed => "see the daemon's log",
    }
}

/// `{"error": …}`: the body of a reply that is not a success.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    /// What went wrong.
    pub error: ErrorBody,
}

/// One line of a streamed answer. `reply` and `error` are the last.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// The command goes on.
    Progress(Progress),
    /// It is done.
    Reply(Box<RawValue>),
    /// It failed.
    Error(ErrorBody),
}

impl Line {
    /// The line with its end.
    ///
    /// # Panics
    /// Never: lines are plain data.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("lines are plain data");
        bytes.push(b'\n');
        bytes
    }
}
