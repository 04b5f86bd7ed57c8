//! What a command prints: its answer on stdout, notes and errors on stderr, or all of it as JSON on stdout.

use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::control::wire::{ErrorBody, Failure};
use crate::error::{Error, Kind, Result};

/// Where a command prints, and how.
pub struct Output<'a> {
    json: bool,
    stdout: &'a mut dyn Write,
    stderr: &'a mut dyn Write,
}

impl std::fmt::Debug for Output<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("json", &self.json).finish_non_exhaustive()
    }
}

impl<'a> Output<'a> {
    /// An output over two streams.
    pub fn new(json: bool, stdout: &'a mut dyn Write, stderr: &'a mut dyn Write) -> Self {
        Self { json, stdout, stderr }
    }

    /// Whether programs read this.
    #[must_use]
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// The answer of a command: as JSON for programs, else the lines that `text` makes of it.
    ///
    /// # Errors
    /// When stdout cannot be written. One that nobody reads any more is no error.
    pub fn answer<T: Serialize>(
        &mut self,
        reply: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<()> {
        let mut text = match self.json {
            true => serde_json::to_string_pretty(reply).expect("replies are plain data"),
            false => text(reply),
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        match self.stdout.write_all(text.as_bytes()).and_then(|()| self.stdout.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Error::new(Kind::Failed, "write to stdout").with_source(error))
            }
            _ => Ok(()),
        }
    }

    /// A line for people beside the answer. Programs find the same in the reply.
    pub fn note(&mut self, line: &str) {
        if !self.json {
            // A note that nobody can read is no reason to fail.
            let _ = writeln!(self.stderr, "blockd: {line}");
        }
    }

    /// A question for people, on stderr.
    pub fn ask(&mut self, question: &str) {
        let _ = write!(self.stderr, "{question}").and_then(|()| self.stderr.flush());
    }

    /// The end of a command that failed: one line, or JSON.
    pub fn error(&mut self, error: &Error) {
        let body = ErrorBody::from(error);
        // There is nowhere left to report to when this fails.
        let _ = if self.json {
            let text =
                serde_json::to_string(&Failure { error: body }).expect("errors are plain data");
            writeln!(self.stdout, "{text}").and_then(|()| self.stdout.flush())
        } else {
            writeln!(self.stderr, "blockd: {}; {}", body.message, body.fix)
        };
    }
}
