//! The one error of this crate: what to do (`kind`), where (`context`), why (`source`).
//!
//! A kind exists only because a caller acts on it. The line that matters most is drawn here:
//! *absent* ([`Kind::NotFound`]) is an answer of the store, *unreachable* ([`Kind::Unavailable`]) is
//! the lack of one, and neither is ever reported as the other.

use std::fmt;

type Source = Box<dyn std::error::Error + Send + Sync + 'static>;

/// What a caller can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The store answered that there is no such object.
    NotFound,
    /// A write-once put found the key taken by other bytes.
    Exists,
    /// The object has another version than the one a swap expected.
    Conflict,
    /// No usable answer, and nothing of ours can have been applied.
    Unavailable,
    /// A write may or may not have been applied, now or later.
    Ambiguous,
    /// The store refuses our credentials, our clock or our permissions. May heal without us.
    Denied,
    /// The store answered with bytes that cannot be what was stored.
    Corrupt,
    /// The store does not do what we need of it.
    Unsupported,
    /// The request itself makes no sense; nothing was sent.
    Invalid,
}

impl Kind {
    /// Whether asking again cannot change the answer.
    ///
    /// `Unsupported` is not definite: a proxy in the way answers 501 just as well as the store.
    pub fn is_definite(self) -> bool {
        match self {
            Kind::NotFound | Kind::Exists | Kind::Conflict | Kind::Corrupt | Kind::Invalid => true,
            Kind::Unavailable | Kind::Ambiguous | Kind::Denied | Kind::Unsupported => false,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::NotFound => "not found",
            Kind::Exists => "exists with other bytes",
            Kind::Conflict => "changed by someone else",
            Kind::Unavailable => "store unavailable",
            Kind::Ambiguous => "outcome unknown",
            Kind::Denied => "access denied",
            Kind::Corrupt => "corrupt",
            Kind::Unsupported => "not supported by the store",
            Kind::Invalid => "invalid request",
        })
    }
}

/// An operation on the store that did not do what was asked.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    context: String,
    source: Option<Source>,
    throttled: bool,
}

impl Error {
    /// An error of `kind`; `context` says what was done, where, with numbers.
    pub fn new(kind: Kind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), source: None, throttled: false }
    }

    /// Adds the cause, which `Display` leaves to the chain.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Marks the error as the store's request to send less.
    #[must_use]
    pub fn throttled(mut self) -> Self {
        self.throttled = true;
        self
    }

    /// What to do about it.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the store asked us to send less.
    pub fn is_throttled(&self) -> bool {
        self.throttled
    }

    /// The same error under another kind, for a layer that knows more about the outcome.
    #[must_use]
    pub(crate) fn into_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The whole chain on one line, for a status page or a log.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.ends_with(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            source = cause.source();
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.context, self.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
