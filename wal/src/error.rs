//! The one error of this crate: what a caller can do about it (kind), where it happened (context)
//! and why (source). It is `Clone`, because one failed write answers many waiters.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

/// What a caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The operating system refused: look at the source.
    Io,
    /// Bytes that must be there are missing or wrong. Nothing was changed; the owner must not serve.
    Damaged,
    /// No room in the staging slots or in the log: wait with `Log::room` and try again.
    Full,
    /// A write or sync of this log failed earlier; it refuses everything until the process restarts.
    Poisoned,
    /// The log on disk belongs to another epoch of this owner: quarantine or discard it.
    OtherEpoch,
    /// The log ends below what the store already has: quarantine it.
    BehindStore,
    /// Written by a version of this software that we do not know.
    Version,
    /// Held by somebody else: the directory by another process, or the owner by a running log.
    Busy,
    /// The log or its directory was closed.
    Closed,
    /// The request can never succeed as it stands.
    Invalid,
    /// The file system cannot do what the log needs.
    Unsupported,
}

/// An error of the log.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    context: Arc<str>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The result of everything that can fail here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, context: impl Into<Arc<str>>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    pub(crate) fn io(context: impl Into<Arc<str>>, source: io::Error) -> Self {
        Self { kind: ErrorKind::Io, context: context.into(), source: Some(Arc::new(source)) }
    }

    /// The error that every later call of a log gets once `first` has stopped it.
    pub(crate) fn poisoned(first: &Self) -> Self {
        Self {
            kind: ErrorKind::Poisoned,
            context: "log stopped by a failed write or sync".into(),
            source: Some(Arc::new(first.clone())),
        }
    }

    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}
