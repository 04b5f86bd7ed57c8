//! How an export says no, and the one table from its reasons to the numbers of the protocol.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use crate::wire::Errno;

/// Why an export could not do what was asked; each kind is one number on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExportErrorKind {
    /// The data cannot be read or written.
    Io,
    /// There is no room, and waiting would not help.
    NoSpace,
    /// The export may not be changed.
    NotPermitted,
    /// The request makes no sense for this export.
    Invalid,
    /// The export is going away. A kernel client turns this into an I/O error for its file
    /// system, whereas it sends its requests again after a lost connection: to hand an export
    /// over, end the connection instead.
    ShuttingDown,
}

impl ExportErrorKind {
    /// The number that the client sees.
    pub fn errno(self) -> Errno {
        match self {
            Self::Io => Errno::EIO,
            Self::NoSpace => Errno::ENOSPC,
            Self::NotPermitted => Errno::EPERM,
            Self::Invalid => Errno::EINVAL,
            Self::ShuttingDown => Errno::ESHUTDOWN,
        }
    }
}

/// A request that an export could not serve. The text goes to the log, and to those clients that
/// can receive one.
#[derive(Debug)]
pub struct ExportError {
    kind: ExportErrorKind,
    context: Cow<'static, str>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl ExportError {
    /// An error without a cause below it.
    pub fn new(kind: ExportErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// An error with a cause, which is printed after the context.
    pub fn with_source(
        kind: ExportErrorKind,
        context: impl Into<Cow<'static, str>>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), source: Some(source.into()) }
    }

    /// What the client is told.
    pub fn kind(&self) -> ExportErrorKind {
        self.kind
    }

    /// The context and every cause below it, in one line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl Error for ExportError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn Error + 'static))
    }
}

/// Why an export cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is no export of this name.
    #[error("there is no export of this name")]
    Unknown,
    /// There is one, but this client may not have it now; the text says why.
    #[error("{0}")]
    Policy(String),
    /// The server, or this export, is going away.
    #[error("the export is shutting down")]
    ShuttingDown,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails if a cause is lost on the way to the log, or printed twice.
    #[test]
    fn an_error_prints_its_context_and_its_causes() {
        let cause = std::io::Error::other("bad sector");
        let error = ExportError::with_source(ExportErrorKind::Io, "read block 7", cause);
        assert_eq!(error.to_string(), "read block 7");
        assert_eq!(error.chain(), "read block 7: bad sector");
        assert_eq!(error.kind().errno(), Errno::EIO);
    }
}
