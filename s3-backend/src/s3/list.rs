//! Pages of a listing, believed only when nothing about them is odd: on the strength of a listing,
//! objects are deleted.

use aws_sdk_s3::config::interceptors::AfterDeserializationInterceptorContextRef;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::types;

use super::S3Store;
use super::fault::{classify, unusable};
use crate::error::{Error, Kind};
use crate::key::ObjectKey;
use crate::store::{ListEntry, ListPage, ListToken};

/// Refuses an XML body that does not end with the tag it began with: the SDK's parser takes a body
/// that was cut between two elements for a shorter one.
#[derive(Debug)]
pub(super) struct WholeXml(pub(super) &'static str);

impl Intercept for WholeXml {
    fn name(&self) -> &'static str {
        "WholeXml"
    }

    fn read_after_deserialization(
        &self,
        context: &AfterDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let response = context.response();
        let end = format!("</{}>", self.0);
        let body = response.body().bytes().unwrap_or_default().trim_ascii_end();
        if response.status().is_success() && !body.ends_with(end.as_bytes()) {
            return Err(format!("the body of {} bytes lacks its end, {end}", body.len()).into());
        }
        Ok(())
    }
}

impl S3Store {
    pub(super) async fn list_page(
        &self,
        context: &str,
        prefix: &str,
        from: Option<&ListToken>,
        limit: usize,
    ) -> Result<ListPage, Error> {
        let reply = self
            .clients
            .reads()
            .list_objects_v2()
            .bucket(&self.url.bucket)
            .prefix(self.full(prefix))
            .max_keys(i32::try_from(limit).unwrap_or(i32::MAX))
            .set_continuation_token(from.map(|token| token.0.clone()))
            .customize()
            .interceptor(WholeXml("ListBucketResult"))
            .send()
            .await
            .map_err(|error| classify(context, error))?;
        let next = next_token(context, &reply, from)?;
        if let Some(count) = reply.key_count()
            && usize::try_from(count) != Ok(reply.contents().len())
        {
            let text = format!("{} keys, said to be {count}", reply.contents().len());
            return Err(unusable(context, text));
        }
        let entry = |object| self.entry(context, prefix, object);
        let entries = reply.contents().iter().map(entry).collect::<Result<_, _>>()?;
        Ok(ListPage { entries, next })
    }

    fn entry(
        &self,
        context: &str,
        prefix: &str,
        object: &types::Object,
    ) -> Result<ListEntry, Error> {
        let (Some(full), Some(size)) = (object.key(), object.size()) else {
            return Err(unusable(context, "an entry without key or size"));
        };
        let start = self.full("");
        let key = match full.strip_prefix(&start) {
            Some(key) if key.starts_with(prefix) => key,
            _ => return Err(unusable(context, format!("key {full:?} is not under the prefix"))),
        };
        let (Ok(key), Ok(size)) = (ObjectKey::parse(key), u64::try_from(size)) else {
            // Not ours. To leave it out might hide an object whose key came mangled.
            let text = format!("{context}: {full:?} ({size} bytes) is no object of ours");
            return Err(Error::new(Kind::Corrupt, text));
        };
        Ok(ListEntry { key, size })
    }
}

fn next_token(
    context: &str,
    reply: &ListObjectsV2Output,
    from: Option<&ListToken>,
) -> Result<Option<ListToken>, Error> {
    match (reply.is_truncated(), reply.next_continuation_token()) {
        (Some(false), _) => Ok(None),
        (Some(true), None | Some("")) => Err(unusable(context, "more is to come, but no token")),
        (Some(true), Some(token)) if from.is_some_and(|from| from.0 == token) => {
            Err(unusable(context, "the same token again"))
        }
        (Some(true), Some(token)) => Ok(Some(ListToken(token.to_owned()))),
        (None, _) => Err(unusable(context, "a page that does not say whether it is the last")),
    }
}
