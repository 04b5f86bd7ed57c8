//! [`Store`]: a driver, pursued until it answers. This is what the daemon holds.
//!
//! # A conditional write with an unclear reply
//!
//! A reply can be lost after the write was applied, and a write can be applied long after we stopped
//! waiting for it. So an unclear write is settled by looking, and never by reasoning:
//!
//! 1. The same body under the same condition is sent again until the answer is definite. Repeating it
//!    is harmless: at most one attempt can meet the condition.
//! 2. A refusal (`Exists`, `Conflict`) is only believed after reading the object: if it holds *our*
//!    bytes, one of our own attempts won. Bodies are unique, so equal bytes are ours.
//! 3. An unclear attempt is looked at before it is repeated, unless the store asked for less: a look
//!    costs less than a blob. Seeing nothing there decides nothing, for the attempt may be late.
//!
//! When the deadline of [`RetryPolicy::Until`] comes first, the error is `Ambiguous` if any attempt
//! may yet be applied, else the last reason.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::Instant;

use crate::counters::{Counters, Operation};
use crate::dialect::Dialect;
use crate::error::{Error, Kind};
use crate::key::{ETag, ObjectKey, check_prefix};
use crate::limit::{Class, Limiter};
use crate::probe::probe;
use crate::retry::{Backoff, Health, HealthRecord, RetryPolicy, jitter};
use crate::store::{
    Deletions, LIST_PAGE_MAX, ListEntry, ListPage, ListToken, Object, ObjectMeta, ObjectStore,
};

/// Objects up to this size are no blobs: they go first, and are read back without asking for their
/// size.
const SMALL_BYTES: usize = 64 * 1024;

/// A store with a retry policy. Clones share the driver, its connections and the rate limit.
#[derive(Clone, Debug)]
pub struct Store {
    shared: Arc<Shared>,
    policy: RetryPolicy,
    class: Option<Class>,
}

#[derive(Debug)]
struct Shared {
    driver: Arc<dyn ObjectStore>,
    limiter: Arc<Limiter>,
    health: HealthRecord,
}

impl Store {
    /// A handle on `driver` that retries for ever, with at most `requests_max` requests at once.
    pub fn new(driver: Arc<dyn ObjectStore>, requests_max: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                driver,
                limiter: Limiter::new(requests_max),
                health: HealthRecord::default(),
            }),
            policy: RetryPolicy::Forever,
            class: None,
        }
    }

    /// The same store under another policy.
    #[must_use]
    pub fn with_policy(&self, policy: RetryPolicy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// The same store for requests of one class. Without this, deletions are `Background`, small
    /// objects and swaps are `Meta`, and all else is `Data`.
    #[must_use]
    pub fn with_class(&self, class: Class) -> Self {
        Self { class: Some(class), ..self.clone() }
    }

    /// How the store has been answering.
    pub fn health(&self) -> Health {
        self.shared.health.snapshot(Instant::now())
    }

    /// How many requests may be under way at present.
    pub fn request_limit(&self) -> usize {
        self.shared.limiter.limit()
    }

    /// The driver itself: one attempt per call, for the probe.
    pub(crate) fn driver(&self) -> &dyn ObjectStore {
        self.shared.driver.as_ref()
    }

    /// All keys under a prefix, or an error: never a part of them.
    ///
    /// # Errors
    /// `Corrupt` when the pages contradict each other, and whatever [`ObjectStore::list`] gives.
    pub async fn list_all(&self, prefix: &str) -> Result<Vec<ListEntry>, Error> {
        let mut entries = Vec::new();
        let mut token = None;
        loop {
            let page = self.list(prefix, token.as_ref(), LIST_PAGE_MAX).await?;
            entries.extend(page.entries);
            match page.next {
                None => break,
                next if next == token => {
                    let text = format!("list {prefix:?}: the same page token came twice");
                    return Err(Error::new(Kind::Corrupt, text));
                }
                next => token = next,
            }
        }
        entries.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].key == pair[1].key) {
            let text = format!("list {prefix:?}: key {} came twice", pair[0].key);
            return Err(Error::new(Kind::Corrupt, text));
        }
        Ok(entries)
    }

    fn pursuit<'a>(&'a self, operation: Operation, target: &'a str) -> Pursuit<'a> {
        Pursuit {
            store: self,
            operation,
            target,
            class: self.class.unwrap_or(match operation {
                Operation::PutIfMatch | Operation::Get | Operation::Stat => Class::Meta,
                Operation::PutNew | Operation::GetRange | Operation::List => Class::Data,
                Operation::Delete => Class::Background,
            }),
            deadline: self.policy.deadline(Instant::now()),
            backoff: Backoff::new(),
            unclear: false,
            is_last: false,
            last_error: None,
        }
    }

    /// Repeats a read until it is answered.
    pub(crate) async fn read<'a, T, F, R>(
        &'a self,
        operation: Operation,
        target: &'a str,
        mut attempt: F,
    ) -> Result<T, Error>
    where
        F: FnMut() -> R + Send,
        R: Future<Output = Result<T, Error>> + Send,
    {
        let mut pursuit = self.pursuit(operation, target);
        loop {
            match pursuit.attempt(attempt()).await {
                Err(error) if !error.kind().is_definite() => pursuit.pause(error).await?,
                answer => return answer,
            }
        }
    }

    /// A store refused the version that it has: it may want to hear of it in another form. Where the
    /// store could not be probed at start, this makes up for it.
    async fn learn(&self) {
        if self.dialect().is_none_or(|dialect| dialect.if_match_is_settled()) {
            return;
        }
        // Boxed, for the probe writes through this very handle.
        let probed: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(probe(self));
        match probed.await {
            Ok(report) => tracing::info!("{report}"),
            Err(error) => tracing::warn!(error = %error.chain(), "the store failed the probe"),
        }
    }

    /// Repeats a conditional write until it is known what became of it.
    async fn write(&self, write: Write<'_>) -> Result<ETag, Error> {
        let mut pursuit = self.pursuit(write.operation(), write.key.as_str());
        if self.class.is_none() && write.body.len() <= SMALL_BYTES {
            pursuit.class = Class::Meta;
        }
        loop {
            let error = match pursuit.attempt(write.send(self.driver())).await {
                Ok(etag) => return Ok(etag),
                Err(error) => error,
            };
            let look = match error.kind() {
                Kind::Exists | Kind::Conflict | Kind::NotFound => true,
                Kind::Ambiguous => !error.is_throttled(),
                kind if kind.is_definite() => return Err(error),
                _ => false,
            };
            let error = if look {
                match pursuit.attempt(write.look(self.driver())).await {
                    Ok(Seen::Mine(etag)) => return Ok(etag),
                    Ok(Seen::Lost(kind)) => {
                        let text = format!("{} {}", write.operation().name(), write.key);
                        return Err(Error::new(kind, text));
                    }
                    // A refusal that the object does not bear out is no answer.
                    Ok(Seen::Nothing) => {
                        if error.kind() == Kind::Conflict {
                            self.learn().await;
                        }
                        error.into_kind(Kind::Unavailable)
                    }
                    Err(error) => error,
                }
            } else {
                error
            };
            pursuit.pause(error).await?;
        }
    }
}

#[async_trait]
impl ObjectStore for Store {
    async fn put_new(&self, key: &ObjectKey, body: Bytes) -> Result<ETag, Error> {
        check_body(key, &body)?;
        self.write(Write { key, body, expected: None }).await
    }

    async fn put_if_match(
        &self,
        key: &ObjectKey,
        body: Bytes,
        expected: &ETag,
    ) -> Result<ETag, Error> {
        check_body(key, &body)?;
        self.write(Write { key, body, expected: Some(expected) }).await
    }

    async fn get(&self, key: &ObjectKey) -> Result<Object, Error> {
        self.read(Operation::Get, key.as_str(), || self.driver().get(key)).await
    }

    async fn get_range(&self, key: &ObjectKey, range: Range<u64>) -> Result<Bytes, Error> {
        if range.is_empty() {
            let text = format!("get {key} bytes {}..{}: empty range", range.start, range.end);
            return Err(Error::new(Kind::Invalid, text));
        }
        self.read(Operation::GetRange, key.as_str(), || self.driver().get_range(key, range.clone()))
            .await
    }

    async fn stat(&self, key: &ObjectKey) -> Result<ObjectMeta, Error> {
        self.read(Operation::Stat, key.as_str(), || self.driver().stat(key)).await
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&ListToken>,
        limit: usize,
    ) -> Result<ListPage, Error> {
        check_prefix(prefix)?;
        let limit = limit.clamp(1, LIST_PAGE_MAX);
        self.read(Operation::List, prefix, || self.driver().list(prefix, from, limit)).await
    }

    async fn delete_many(&self, keys: &[ObjectKey]) -> Deletions {
        let mut results = Deletions::with_capacity(keys.len());
        for batch in keys.chunks(LIST_PAGE_MAX) {
            results.extend(self.delete_batch(batch).await);
        }
        results
    }

    fn counters(&self) -> Counters {
        self.driver().counters()
    }

    fn dialect(&self) -> Option<&Dialect> {
        self.driver().dialect()
    }
}

impl Store {
    /// Deletes one batch; what failed is tried again, and only that.
    async fn delete_batch(&self, keys: &[ObjectKey]) -> Deletions {
        let target = format!("{} keys", keys.len());
        let mut pursuit = self.pursuit(Operation::Delete, &target);
        let mut results: Vec<Option<Result<(), Error>>> = keys.iter().map(|_| None).collect();
        loop {
            let open: Vec<usize> = (0..keys.len()).filter(|&at| results[at].is_none()).collect();
            let batch: Vec<ObjectKey> = open.iter().map(|&at| keys[at].clone()).collect();
            let answers = pursuit.turn(async { Ok(self.driver().delete_many(&batch).await) }).await;
            let worst = match answers {
                Ok(answers) => sort_answers(&open, answers, &mut results),
                Err(error) => Some(error),
            };
            pursuit.note(worst.as_ref());
            let Some(error) = worst else { break };
            if let Err(error) = pursuit.pause(error).await {
                for (key, result) in keys.iter().zip(&mut results) {
                    result.get_or_insert_with(|| {
                        Err(Error::new(error.kind(), format!("delete {key}: {}", error.chain())))
                    });
                }
                break;
            }
        }
        let answered = |result: Option<_>| result.expect("every key was answered or given up");
        keys.iter().cloned().zip(results.into_iter().map(answered)).collect()
    }
}

/// Files the definite answers to a batch, and gives back an error of one that has to be sent again.
fn sort_answers(
    open: &[usize],
    answers: Deletions,
    results: &mut [Option<Result<(), Error>>],
) -> Option<Error> {
    let mut worst = None;
    for (&index, (_, answer)) in open.iter().zip(answers) {
        match answer {
            Err(error) if !error.kind().is_definite() => worst = Some(error),
            answer => results[index] = Some(answer),
        }
    }
    worst
}

/// One conditional write: the same body and the same condition in every attempt.
struct Write<'a> {
    key: &'a ObjectKey,
    body: Bytes,
    /// The version to replace; `None` for a key that must be free.
    expected: Option<&'a ETag>,
}

/// What is there where a write of ours may have landed.
enum Seen {
    /// Our bytes.
    Mine(ETag),
    /// Something that rules our write out, now and for ever.
    Lost(Kind),
    /// What was there before: our write has not been applied, but a late attempt still may be.
    Nothing,
}

impl Write<'_> {
    fn operation(&self) -> Operation {
        match self.expected {
            None => Operation::PutNew,
            Some(_) => Operation::PutIfMatch,
        }
    }

    async fn send(&self, driver: &dyn ObjectStore) -> Result<ETag, Error> {
        match self.expected {
            None => driver.put_new(self.key, self.body.clone()).await,
            Some(expected) => driver.put_if_match(self.key, self.body.clone(), expected).await,
        }
    }

    async fn look(&self, driver: &dyn ObjectStore) -> Result<Seen, Error> {
        match self.look_at_object(driver).await {
            Err(error) if error.kind() == Kind::NotFound => Ok(match self.expected {
                None => Seen::Nothing,
                Some(_) => Seen::Lost(Kind::NotFound),
            }),
            seen => seen,
        }
    }

    async fn look_at_object(&self, driver: &dyn ObjectStore) -> Result<Seen, Error> {
        if self.body.len() > SMALL_BYTES {
            let meta = driver.stat(self.key).await?;
            if meta.size != crate::counters::count_of(self.body.len()) {
                return Ok(self.not_mine(&meta.etag));
            }
        }
        let object = driver.get(self.key).await?;
        if object.body == self.body {
            return Ok(Seen::Mine(object.etag));
        }
        Ok(self.not_mine(&object.etag))
    }

    fn not_mine(&self, etag: &ETag) -> Seen {
        match self.expected {
            None => Seen::Lost(Kind::Exists),
            Some(expected) if expected == etag => Seen::Nothing,
            Some(_) => Seen::Lost(Kind::Conflict),
        }
    }
}

/// The state of one call over its attempts.
struct Pursuit<'a> {
    store: &'a Store,
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

impl Pursuit<'_> {
    /// Makes one attempt in its turn, and keeps the books.
    async fn attempt<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let result = self.turn(attempt).await;
        self.note(result.as_ref().err());
        result
    }

    /// Waits for a turn and makes one attempt, within the deadline.
    async fn turn<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let mut sent = false;
        let turn = async {
            let _permit = self.store.shared.limiter.acquire(self.class).await;
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
    fn note(&mut self, error: Option<&Error>) {
        let shared = &self.store.shared;
        let now = Instant::now();
        match error {
            Some(error) if !error.kind().is_definite() => {
                self.unclear |= error.kind() == Kind::Ambiguous;
                if error.is_throttled() || error.kind() == Kind::Ambiguous {
                    shared.limiter.congested(now);
                }
                shared.health.failed(error, now);
            }
            _ => {
                shared.limiter.succeeded();
                if let Some((failing_for, failures)) = shared.health.answered(now) {
                    tracing::info!(?failing_for, failures, "store answers again");
                }
            }
        }
    }

    /// Waits before the next attempt, or ends the call with what is known.
    async fn pause(&mut self, error: Error) -> Result<(), Error> {
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
            kind => kind,
        };
        let context = self.describe("gave up");
        Error::new(kind, context).with_source(error)
    }

    fn describe(&self, what: &str) -> String {
        format!("{} {}: {what}", self.operation.name(), self.target)
    }
}

fn check_body(key: &ObjectKey, body: &Bytes) -> Result<(), Error> {
    if body.is_empty() {
        return Err(Error::new(Kind::Invalid, format!("put {key}: an object is never empty")));
    }
    Ok(())
}
