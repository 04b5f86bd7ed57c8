//! The error of this crate: a kind that a caller acts on, one line that says what and where, and what
//! to do about it.
//!
//! `Display` never repeats the source; [`Error::report`] prints the whole chain on one line. Kinds map
//! one to one to the codes, HTTP statuses and exit codes of the command line contract.

use std::fmt;

/// What a caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Another host, daemon or attachment has the disk, or the disk is in use.
    DiskBusy,
    /// A disk of this name exists (also with other settings than asked for).
    DiskExists,
    /// Forks depend on what was to be deleted.
    DiskHasForks,
    /// A snapshot of this name exists.
    SnapshotExists,
    /// A reader uses the snapshot.
    SnapshotInUse,
    /// This host lost the disk to another one.
    LeaseLost,
    /// The holder is silent: taking over needs the caller's word that its last writes may be lost.
    TakeoverNeedsAcceptLoss,
    /// No such disk, snapshot or object.
    NotFound,
    /// Not a valid disk or snapshot name.
    InvalidName,
    /// An argument or setting is wrong.
    InvalidArgument,
    /// A limit set by the operator is reached.
    QuotaExceeded,
    /// The object store does not answer.
    StoreUnavailable,
    /// The log has no room.
    LogFull,
    /// Bytes read back are not what was written.
    Corrupt,
    /// The disk stopped after a failed log write or a lost lease, until a restart.
    Poisoned,
    /// Anything else: the operation failed.
    Failed,
}

impl Kind {
    /// The stable code printed by `--json` and sent by the control API.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::DiskBusy => "disk_busy",
            Self::DiskExists => "disk_exists",
            Self::DiskHasForks => "disk_has_forks",
            Self::SnapshotExists => "snapshot_exists",
            Self::SnapshotInUse => "snapshot_in_use",
            Self::LeaseLost => "lease_lost",
            Self::TakeoverNeedsAcceptLoss => "takeover_needs_accept_loss",
            Self::NotFound => "not_found",
            Self::InvalidName => "invalid_name",
            Self::InvalidArgument => "invalid_argument",
            Self::QuotaExceeded => "quota_exceeded",
            Self::StoreUnavailable => "store_unavailable",
            Self::LogFull => "log_full",
            Self::Corrupt => "corrupt",
            Self::Poisoned => "disk_stopped",
            Self::Failed => "failed",
        }
    }

    /// The kind of a code, for a client that reads a reply; unknown codes are [`Kind::Failed`].
    #[must_use]
    pub fn from_code(code: &str) -> Self {
        Self::ALL.into_iter().find(|kind| kind.code() == code).unwrap_or(Self::Failed)
    }

    /// The HTTP status of the control API.
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::DiskBusy
            | Self::DiskExists
            | Self::DiskHasForks
            | Self::SnapshotExists
            | Self::SnapshotInUse
            | Self::LeaseLost
            | Self::TakeoverNeedsAcceptLoss => 409,
            Self::NotFound => 404,
            Self::InvalidName | Self::InvalidArgument => 400,
            Self::QuotaExceeded => 413,
            Self::StoreUnavailable | Self::LogFull => 503,
            Self::Corrupt | Self::Poisoned | Self::Failed => 500,
        }
    }

    /// The exit code of the command line.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::NotFound => 3,
            Self::InvalidName | Self::InvalidArgument => 2,
            Self::StoreUnavailable => 5,
            Self::Corrupt | Self::Poisoned | Self::Failed | Self::LogFull => 1,
            _ => 4,
        }
    }

    const ALL: [Self; 16] = [
        Self::DiskBusy,
        Self::DiskExists,
        Self::DiskHasForks,
        Self::SnapshotExists,
        Self::SnapshotInUse,
        Self::LeaseLost,
        Self::TakeoverNeedsAcceptLoss,
        Self::NotFound,
        Self::InvalidName,
        Self::InvalidArgument,
        Self::QuotaExceeded,
        Self::StoreUnavailable,
        Self::LogFull,
        Self::Corrupt,
        Self::Poisoned,
        Self::Failed,
    ];
}

/// An error: kind, one line of what and where, what to do, and the cause.
pub struct Error {
    kind: Kind,
    message: String,
    fix: Option<String>,
    details: serde_json::Map<String, serde_json::Value>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; `message` is lower case, without a full stop, and names what and where.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            fix: None,
            details: serde_json::Map::new(),
            source: None,
        }
    }

    /// What the reader of the message can do about it.
    #[must_use]
    pub fn with_fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// A fact for programs that read the reply.
    #[must_use]
    pub fn with_detail(mut self, name: &str, value: impl Into<serde_json::Value>) -> Self {
        self.details.insert(name.to_owned(), value.into());
        self
    }

    /// The cause.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Puts what was being done in front of the message.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// What a caller does about it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What the reader of the message can do about it.
    #[must_use]
    pub fn fix(&self) -> Option<&str> {
        self.fix.as_deref()
    }

    /// Facts for programs that read the reply.
    #[must_use]
    pub fn details(&self) -> &serde_json::Map<String, serde_json::Value> {
        &self.details
    }

    /// The message and its causes on one line.
    #[must_use]
    pub fn report(&self) -> String {
        let mut line = self.message.clone();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            line.push_str(": ");
            line.push_str(&error.to_string());
            cause = error.source();
        }
        line.replace('\n', " ")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.report())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back_as_its_kind() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_code(kind.code()), kind);
        }
        assert_eq!(Kind::from_code("never heard of"), Kind::Failed);
    }

    #[test]
    fn report_is_one_line_with_every_cause_once() {
        let cause = std::io::Error::other("cable\ncut");
        let error = Error::new(Kind::Failed, "read blob").with_source(cause).context("attach d1");
        assert_eq!(error.report(), "attach d1: read blob: cable cut");
    }
}
