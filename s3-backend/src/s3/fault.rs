//! What a reply that is not the wanted one means, in one table.

use std::error::Error as _;
use std::fmt;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use super::http::NotConnected;
use crate::error::{Error, Kind};

/// A reply of the store, for people.
#[derive(Debug)]
struct Reply {
    status: u16,
    code: String,
    message: String,
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store answered {}", self.status)?;
        if !self.code.is_empty() {
            write!(f, " {}", self.code)?;
        }
        if !self.message.is_empty() {
            write!(f, " ({})", self.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for Reply {}

/// Text as the cause of an error, where the SDK's own types would say the same at ten times the length.
#[derive(Debug)]
struct Cause(String);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Cause {}

/// A reply that came in good order and makes no sense. Whatever was asked may have been done.
pub(super) fn unusable(context: &str, what: impl Into<String>) -> Error {
    Error::new(Kind::Ambiguous, context)
        .with_source(Cause(format!("unusable reply: {}", what.into())))
}

/// The error of a request, as we see it. `context` says what was asked.
pub(super) fn classify<E>(context: &str, error: SdkError<E>) -> Error
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    let (SdkError::ServiceError(_) | SdkError::ResponseError(_)) = &error else {
        let kind = if was_not_sent(&error) { Kind::Unavailable } else { Kind::Ambiguous };
        let kind = if lacks_credentials(&error) { Kind::Denied } else { kind };
        return Error::new(kind, context).with_source(Cause(causes(&error)));
    };
    let status = error.raw_response().map_or(0, |raw: &HttpResponse| raw.status().as_u16());
    let code = error.code().unwrap_or_default().to_owned();
    if (200..300).contains(&status) {
        return unusable(context, causes(&error));
    }
    let kind = kind_of(status, &code);
    let is_throttle = status == 429 || status == 503 || code == "SlowDown";
    let message = error.message().unwrap_or_default().escape_debug().to_string();
    let error = Error::new(kind, context).with_source(Reply { status, code, message });
    if is_throttle { error.throttled() } else { error }
}

/// The table. A 404 or 400 that does not come with a code of S3 comes from something in the way.
fn kind_of(status: u16, code: &str) -> Kind {
    match (status, code) {
        (404, "NoSuchKey") => Kind::NotFound,
        // As good as switched off; and never to be taken for the absence of an object.
        (404, _) => Kind::Unavailable,
        (412, _) => Kind::Conflict,
        // Another operation on the key was under way; nothing is said about who won.
        (409, _) => Kind::Ambiguous,
        (416, _) => Kind::Corrupt,
        (401 | 403, _) => Kind::Denied,
        (400, "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken" | "RequestExpired") => {
            Kind::Denied
        }
        (400, "AuthorizationHeaderMalformed" | "InvalidAccessKeyId" | "RequestTimeTooSkewed") => {
            Kind::Denied
        }
        // The body was damaged or cut on its way; the store has not taken it.
        (400, "BadDigest" | "IncompleteBody" | "RequestTimeout") => Kind::Unavailable,
        (400, "XAmzContentSHA256Mismatch" | "XAmzContentChecksumMismatch") => Kind::Unavailable,
        (400 | 405 | 411 | 501, _) | (300..400, _) => Kind::Unsupported,
        (429, _) | (503, "SlowDown") => Kind::Unavailable,
        _ => Kind::Ambiguous,
    }
}

fn was_not_sent<E>(error: &SdkError<E>) -> bool {
    match error {
        SdkError::ConstructionFailure(_) => true,
        SdkError::DispatchFailure(failure) => failure
            .as_connector_error()
            .and_then(|error| error.source())
            .is_some_and(|source| source.is::<NotConnected>()),
        _ => false,
    }
}

fn lacks_credentials<E>(error: &SdkError<E>) -> bool
where
    E: std::error::Error + 'static,
{
    chain(error).any(|cause| cause.is::<CredentialsError>())
}

fn causes<E: std::error::Error + 'static>(error: &SdkError<E>) -> String {
    // The first text only names the variant of `SdkError`.
    let causes: Vec<String> = chain(error).skip(1).map(ToString::to_string).collect();
    if causes.is_empty() { error.to_string() } else { causes.join(": ") }
}

fn chain<E: std::error::Error + 'static>(
    error: &SdkError<E>,
) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error: &&(dyn std::error::Error + 'static)| {
        (*error).source()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_store_can_say_that_an_object_is_absent() {
        assert_eq!(kind_of(404, "NoSuchKey"), Kind::NotFound);
        assert_eq!(kind_of(404, "NoSuchBucket"), Kind::Unavailable);
        assert_eq!(kind_of(404, ""), Kind::Unavailable);
    }

    #[test]
    fn a_409_decides_nothing() {
        assert_eq!(kind_of(409, "ConditionalRequestConflict"), Kind::Ambiguous);
        assert_eq!(kind_of(409, "OperationAborted"), Kind::Ambiguous);
    }
}
