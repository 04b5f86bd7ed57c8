//! The store in a bucket: a thin adapter over the SDK that believes no reply it has not checked.
//!
//! - A put counts when the reply carries an ETag; a 200 without one is no answer.
//! - A read counts when length and `Content-Range` are those asked for. No object is empty, so a reply
//!   of no bytes is no object.
//! - A listing counts when its XML is whole, its count is right and its continuation makes sense.
//! - A deletion counts key by key.
//!
//! Each call makes one attempt, signed when it is sent. Objects are put in one request, never in
//! parts: nothing is left behind that has to be found and aborted. The credentials need `s3:GetObject`,
//! `s3:PutObject`, `s3:DeleteObject` and `s3:ListBucket`; without the last, S3 answers 403 for an
//! absent object, which we cannot tell from a denial.

use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use bytes::{Bytes, BytesMut};

use crate::counters::{Counters, Meter, Operation, count_of};
use crate::dialect::{Checksums, Dialect, IfMatch};
use crate::error::{Error, Kind};
use crate::key::{ETag, ObjectKey};
use crate::store::{Deletions, ListPage, ListToken, Object, ObjectMeta, ObjectStore};
use crate::url::S3Url;

mod clients;
mod delete;
mod fault;
mod http;
mod list;
#[cfg(test)]
mod tests;

use clients::{Clients, Setup};
use fault::{classify, unusable};

/// No object of ours comes near this; a longer reply is not one.
const OBJECT_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// The hard end of an attempt, for a connection that keeps moving and gets nowhere: this long, plus
/// the time of the body at [`PACE_MIN_BYTES`] a second.
const ATTEMPT_MAX: Duration = Duration::from_secs(600);
const PACE_MIN_BYTES: u64 = 8 * 1024;

/// A driver over a bucket.
#[derive(Debug)]
pub struct S3Store {
    url: S3Url,
    clients: Clients,
    dialect: Dialect,
    meter: Meter,
}

/// The condition of a put.
enum Condition<'a> {
    Absent,
    Version(&'a ETag),
}

impl S3Store {
    /// Sets the client up. Nothing is sent yet, except where credentials are looked for.
    ///
    /// # Errors
    /// `Invalid` when the system has no root certificates and the URL needs them.
    pub async fn open(url: &S3Url) -> Result<Self, Error> {
        Self::open_with(url, Setup::default()).await
    }

    async fn open_with(url: &S3Url, setup: Setup) -> Result<Self, Error> {
        Ok(Self {
            url: url.clone(),
            clients: Clients::new(url, setup).await?,
            dialect: Dialect::new(url.if_match, url.checksums),
            meter: Meter::default(),
        })
    }

    /// Key in the bucket.
    fn full(&self, key: &str) -> String {
        if self.url.prefix.is_empty() {
            key.to_owned()
        } else {
            format!("{}/{key}", self.url.prefix)
        }
    }

    fn describe(&self, verb: &str, key: &str) -> String {
        format!("{verb} s3://{}/{}", self.url.bucket, self.full(key))
    }

    /// Ends one attempt, counts it, and looks up credentials where they were refused.
    async fn attempt<T>(
        &self,
        operation: Operation,
        context: &str,
        bytes: u64,
        request: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let time = ATTEMPT_MAX + Duration::from_secs(bytes / PACE_MIN_BYTES);
        let result = tokio::time::timeout(time, request).await.unwrap_or_else(|_| {
            let text = format!("{context}: not done after {} s", time.as_secs());
            Err(Error::new(Kind::Ambiguous, text))
        });
        if matches!(&result, Err(error) if error.kind() == Kind::Denied) {
            self.clients.reload_credentials().await;
        }
        self.meter.count(operation, result)
    }

    async fn put(
        &self,
        context: &str,
        key: &ObjectKey,
        body: Bytes,
        condition: Condition<'_>,
    ) -> Result<ETag, Error> {
        self.meter.add_up(body.len());
        let checksums = self.dialect.checksums();
        let crc = (checksums == Checksums::On)
            .then(|| aws_smithy_types::base64::encode(crc32fast::hash(&body).to_be_bytes()));
        let put = self
            .clients
            .writes()
            .put_object()
            .bucket(&self.url.bucket)
            .key(self.full(key.as_str()))
            .set_checksum_crc32(crc)
            .body(ByteStream::new(SdkBody::from(body)));
        let put = match condition {
            Condition::Absent => put.if_none_match("*"),
            Condition::Version(etag) => put.if_match(match self.dialect.if_match() {
                IfMatch::Quoted => format!("\"{etag}\""),
                IfMatch::Unquoted => etag.to_string(),
            }),
        };
        // TLS protects the body on its way; over plain HTTP the signature covers it.
        let sent = match self.is_encrypted() {
            true => put.customize().disable_payload_signing().send().await,
            false => put.send().await,
        };
        match sent {
            Ok(reply) => {
                if checksums == Checksums::On {
                    self.dialect.checksums_worked();
                }
                let etag = reply.e_tag().and_then(ETag::parse);
                etag.ok_or_else(|| unusable(context, "a put without an ETag"))
            }
            Err(error) => {
                let error = classify(context, error);
                if error.kind() == Kind::Unsupported
                    && checksums == Checksums::On
                    && self.dialect.checksums_refused()
                {
                    tracing::warn!(
                        error = %error.chain(),
                        "the store refused a put with a checksum; trying without"
                    );
                    return Err(error.into_kind(Kind::Unavailable));
                }
                Err(error)
            }
        }
    }

    fn is_encrypted(&self) -> bool {
        self.url.endpoint.as_deref().is_none_or(|endpoint| endpoint.starts_with("https:"))
    }

    async fn read(&self, context: &str, key: &ObjectKey) -> Result<Object, Error> {
        let request =
            self.clients.reads().get_object().bucket(&self.url.bucket).key(self.full(key.as_str()));
        let reply = request.send().await.map_err(|error| classify(context, error))?;
        let etag = reply.e_tag().and_then(ETag::parse);
        let etag = etag.ok_or_else(|| unusable(context, "an object without an ETag"))?;
        let len = match reply.content_length().map(u64::try_from) {
            Some(Ok(len)) if len > 0 && len <= OBJECT_BYTES_MAX => len,
            other => return Err(unusable(context, format!("an object of length {other:?}"))),
        };
        let body = collect(context, reply.body, len).await?;
        Ok(Object { body, etag })
    }

    async fn read_range(
        &self,
        context: &str,
        key: &ObjectKey,
        range: Range<u64>,
    ) -> Result<(Bytes, ObjectMeta), Error> {
        let request = self
            .clients
            .reads()
            .get_object()
            .bucket(&self.url.bucket)
            .key(self.full(key.as_str()))
            .range(format!("bytes={}-{}", range.start, range.end - 1));
        let reply = request.send().await.map_err(|error| classify(context, error))?;
        let content_range = reply.content_range().unwrap_or("the whole object");
        let size = match parse_content_range(content_range) {
            Some((served, size)) if served == range => size,
            // The object ends before the range does: the store is right, and the caller is not.
            Some((served, size)) if served.start == range.start && served.end == size => {
                let text = format!("{context}: the object has {size} bytes");
                return Err(Error::new(Kind::Corrupt, text));
            }
            _ => return Err(unusable(context, format!("served {content_range:?}"))),
        };
        let etag = reply.e_tag().and_then(ETag::parse);
        let etag = etag.ok_or_else(|| unusable(context, "an object without an ETag"))?;
        let body = collect(context, reply.body, range.end - range.start).await?;
        Ok((body, ObjectMeta { size, etag }))
    }
}

#[async_trait]
impl ObjectStore for S3Store {
    async fn put_new(&self, key: &ObjectKey, body: Bytes) -> Result<ETag, Error> {
        let context = self.describe("put", key.as_str());
        let bytes = count_of(body.len());
        let put = async {
            // The store speaks of an unmet condition; here we know which one it was.
            self.put(&context, key, body, Condition::Absent).await.map_err(|error| {
                match error.kind() {
                    Kind::Conflict => error.into_kind(Kind::Exists),
                    _ => error,
                }
            })
        };
        self.attempt(Operation::PutNew, &context, bytes, put).await
    }

    async fn put_if_match(
        &self,
        key: &ObjectKey,
        body: Bytes,
        expected: &ETag,
    ) -> Result<ETag, Error> {
        let context = self.describe("swap", key.as_str());
        let bytes = count_of(body.len());
        let put = self.put(&context, key, body, Condition::Version(expected));
        self.attempt(Operation::PutIfMatch, &context, bytes, put).await
    }

    async fn get(&self, key: &ObjectKey) -> Result<Object, Error> {
        let context = self.describe("get", key.as_str());
        let read = self.read(&context, key);
        let object = self.attempt(Operation::Get, &context, 0, read).await?;
        self.meter.add_down(object.body.len());
        Ok(object)
    }

    async fn get_range(&self, key: &ObjectKey, range: Range<u64>) -> Result<Bytes, Error> {
        let context = self.describe("get", key.as_str());
        let context = format!("{context} bytes {}..{}", range.start, range.end);
        let len = range.end - range.start;
        let read = self.read_range(&context, key, range);
        let (body, _) = self.attempt(Operation::GetRange, &context, len, read).await?;
        self.meter.add_down(body.len());
        Ok(body)
    }

    /// Reads the first byte: unlike the reply to a HEAD, that to a GET says whether it is the object
    /// that is missing, or the bucket, or the store.
    async fn stat(&self, key: &ObjectKey) -> Result<ObjectMeta, Error> {
        let context = self.describe("stat", key.as_str());
        let read = self.read_range(&context, key, 0..1);
        let (_, meta) = self.attempt(Operation::Stat, &context, 0, read).await?;
        Ok(meta)
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&ListToken>,
        limit: usize,
    ) -> Result<ListPage, Error> {
        let context = self.describe("list", prefix);
        let page = self.list_page(&context, prefix, from, limit);
        self.attempt(Operation::List, &context, 0, page).await
    }

    async fn delete_many(&self, keys: &[ObjectKey]) -> Deletions {
        self.delete_keys(keys).await
    }

    fn counters(&self) -> Counters {
        self.meter.snapshot()
    }

    fn dialect(&self) -> Option<&Dialect> {
        Some(&self.dialect)
    }
}

/// Receives a body of exactly `len` bytes.
async fn collect(context: &str, mut body: ByteStream, len: u64) -> Result<Bytes, Error> {
    let capacity = usize::try_from(len.min(OBJECT_BYTES_MAX)).expect("below the maximum");
    let mut bytes = BytesMut::with_capacity(capacity);
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|error| {
            let text = format!("{context}: cut off after {} of {len} bytes", bytes.len());
            Error::new(Kind::Ambiguous, text).with_source(error)
        })?;
        if piece.len() > capacity - bytes.len() {
            return Err(unusable(context, format!("more than the {len} bytes announced")));
        }
        if piece.len() == capacity {
            return Ok(piece);
        }
        bytes.extend_from_slice(&piece);
    }
    if bytes.len() < capacity {
        return Err(unusable(context, format!("{} of {len} bytes", bytes.len())));
    }
    Ok(bytes.freeze())
}

/// Reads `bytes 0-99/1234` as `(0..100, 1234)`.
fn parse_content_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (served, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = served.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let size = size.parse().ok()?;
    (first <= last && last < size).then(|| (first..last + 1, size))
}
