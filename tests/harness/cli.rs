//! The command line as its users meet it: exit code, stdout, stderr, and the JSON error.

use serde_json::Value;

/// What one run of `blockd` answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The command line, for messages.
    pub command: String,
    /// The exit code; -1 when the process died by a signal.
    pub code: i32,
    /// All of stdout.
    pub stdout: String,
    /// All of stderr.
    pub stderr: String,
}

impl Answer {
    pub(crate) fn new(command: String, output: &std::process::Output) -> Self {
        Self {
            command,
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Asserts success.
    #[track_caller]
    #[must_use]
    pub fn ok(self) -> Self {
        assert!(self.code == 0, "`{}` failed: {self:#?}", self.command);
        self
    }

    /// Asserts an exit code.
    #[track_caller]
    #[must_use]
    pub fn exits(self, code: i32) -> Self {
        assert!(self.code == code, "`{}` should exit {code}: {self:#?}", self.command);
        self
    }

    /// Asserts that a `--json` run failed with this exit code and this error code, and that the
    /// error has the shape of the contract; returns the error.
    #[track_caller]
    #[must_use]
    pub fn refused(self, exit: i32, code: &str) -> Value {
        let answer = self.exits(exit);
        let error = answer.error();
        assert_eq!(error["code"], code, "`{}`: {answer:#?}", answer.command);
        for field in ["message", "fix"] {
            assert!(error[field].is_string(), "`{field}` is missing: {answer:#?}");
        }
        error
    }

    /// The `error` object of a failed `--json` run, from whichever stream carries it.
    #[track_caller]
    #[must_use]
    pub fn error(&self) -> Value {
        [&self.stdout, &self.stderr]
            .iter()
            .find_map(|text| serde_json::from_str::<Value>(text).ok())
            .map(|document| document["error"].clone())
            .filter(Value::is_object)
            .unwrap_or_else(|| panic!("`{}` gave no JSON error: {self:#?}", self.command))
    }

    /// Stdout as JSON.
    #[track_caller]
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("`{}`: {error}: {self:#?}", self.command))
    }

    /// The last line of stdout, where commands print the name or URI they made.
    #[must_use]
    pub fn line(&self) -> &str {
        self.stdout.trim_end().lines().last().unwrap_or_default()
    }
}
