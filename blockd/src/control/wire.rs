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
    /// What to do about it.
    pub fix: Option<String>,
    /// Facts for programs.
    #[serde(default)]
    pub details: serde_json::Map<String, serde_json::Value>,
}

impl From<&Error> for ErrorBody {
    fn from(error: &Error) -> Self {
        Self {
            code: error.kind().code().to_owned(),
            message: error.report(),
            fix: error.fix().map(str::to_owned),
            details: error.details().clone(),
        }
    }
}

impl From<ErrorBody> for Error {
    fn from(body: ErrorBody) -> Self {
        let error = Self::new(Kind::from_code(&body.code), body.message);
        let error =
            body.details.into_iter().fold(error, |e, (name, value)| e.with_detail(&name, value));
        match body.fix {
            Some(fix) => error.with_fix(fix),
            None => error,
        }
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
