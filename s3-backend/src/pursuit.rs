//! One call over all its attempts: when the next one comes, and when to give up.

use std::sync::Arc;

use tokio::time::Instant;

use crate::counters::Operation;
use crate::error::{Error, Kind};
use crate::limit::{Class, Limiter};
use crate::retry::{Backoff, Health, HealthRecord, RetryPolicy, jitter};

/// What all calls to one store share: the limit on requests, and the record of how it answers.
#[derive(Debug)]
pub(crate) struct Pace {
    limiter: Arc<Limiter>,
    health: HealthRecord,
}

impl Pace {
    pub(crate) fn new(requests_max: usize) -> Self {
        Self { limiter: Limiter::new(requests_max), health: HealthRecord::default() }
    }

    pub(crate) fn health(&self) -> Health {
        self.health.snapshot(Instant::now())
    }

    pub(crate) fn request_limit(&self) -> usize {
        self.limiter.limit()
    }
}

/// The state of one call over its attempts.
pub(crate) struct Pursuit<'a> {
    pace: &'a Pace,
    operation: Operation,
    target: &'a str,
    class: Class,
    deadline: Option<Instant>,
    backoff: Backoff,
    /// An attempt of ours may have been applied, or may yet be.
    unclear: bool,
    /// The next attempt is the last.
    is_last: bool,
    /// Why the attempt before failed.
    last_error: Option<Error>,
}

impl<'a> Pursuit<'a> {
    pub(crate) fn new(
        pace: &'a Pace,
        policy: RetryPolicy,
        class: Class,
        operation: Operation,
        target: &'a str,
    ) -> Self {
        let deadline = policy.deadline(Instant::now());
        let (backoff, unclear, is_last, last_error) = (Backoff::new(), false, false, None);
        Self { pace, operation, target, class, deadline, backoff, unclear, is_last, last_error }
    }

    /// Makes one attempt in its turn, and keeps the books.
    pub(crate) async fn attempt<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let result = self.turn(attempt).await;
        self.note(result.as_ref().err());
        result
    }

    /// Waits for a turn and makes one attempt, within the deadline.
    pub(crate) async fn turn<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let mut sent = false;
        let turn = async {
            let _permit = self.pace.limiter.acquire(self.class).await;
            sent = true;
            attempt.await
        };
        let Some(deadline) = self.deadline else { return turn.await };
        match tokio::time::timeout_at(deadline, turn).await {
            Ok(result) => result,
            Err(_) => {
                let (kind, what) = match sent {
                    true => (Kind::Ambiguous, "no answer before the deadline"),
                    false => (Kind::Unavailable, "no turn before the deadline"),
                };
                let error = Error::new(kind, self.describe(what));
                // Why there were attempts before this one says more than that time is up.
                Err(match self.last_error.take() {
                    Some(last) => error.with_source(last),
                    None => error,
                })
            }
        }
    }

    /// Keeps the books after an attempt: what is unclear, the rate, the health.
    pub(crate) fn note(&mut self, error: Option<&Error>) {
        let now = Instant::now();
        match error {
            Some(error) if !error.kind().is_definite() => {
                self.unclear |= error.kind() == Kind::Ambiguous;
                if error.is_throttled() || error.kind() == Kind::Ambiguous {
                    self.pace.limiter.congested(now);
                }
                self.pace.health.failed(error, now);
            }
            _ => {
                self.pace.limiter.succeeded();
                if let Some((failing_for, failures)) = self.pace.health.answered(now) {
                    tracing::info!(?failing_for, failures, "store answers again");
                }
            }
        }
    }

    /// Waits before the next attempt, or ends the call with what is known.
    pub(crate) async fn pause(&mut self, error: Error) -> Result<(), Error> {
        let mut pause = self.backoff.next(jitter());
        if let Some(deadline) = self.deadline {
            let rest = deadline.saturating_duration_since(Instant::now());
            // Who waits in person need not wait for a store that says it cannot.
            if self.is_last || rest.is_zero() || error.kind() == Kind::Unsupported {
                return Err(self.give_up(error));
            }
            if pause >= rest / 2 {
                // One more attempt, with half of what is left for the answer.
                pause = rest / 2;
                self.is_last = true;
            }
        }
        tracing::debug!(error = %error.chain(), ?pause, "{}", self.describe("will be retried"));
        tokio::time::sleep(pause).await;
        self.last_error = Some(error);
        Ok(())
    }

    fn give_up(&self, error: Error) -> Error {
        let is_write = matches!(self.operation, Operation::PutNew | Operation::PutIfMatch);
        let kind = match error.kind() {
            _ if is_write && self.unclear => Kind::Ambiguous,
            // Whether a read or a deletion was applied is no question.
            Kind::Ambiguous => Kind::Unavailable,
            // A refusal that the object did not bear out.
            kind if kind.is_definite() => Kind::Unavailable,
            kind => kind,
        };
        let context = self.describe("gave up");
        Error::new(kind, context).with_source(error)
    }

    fn describe(&self, what: &str) -> String {
        format!("{} {}: {what}", self.operation.name(), self.target)
    }
}
