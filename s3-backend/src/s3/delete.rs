//! Deletion of many keys: one request for all of them where the store can, else one for each.

use std::collections::HashMap;

use aws_sdk_s3::operation::delete_objects::DeleteObjectsOutput;
use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use futures_util::StreamExt;

use super::S3Store;
use super::fault::{classify, unusable};
use super::list::WholeXml;
use crate::counters::Operation;
use crate::error::{Error, Kind};
use crate::key::ObjectKey;
use crate::store::Deletions;

/// Single deletions under way at once.
const SINGLES_MAX: usize = 8;

impl S3Store {
    pub(super) async fn delete_keys(&self, keys: &[ObjectKey]) -> Deletions {
        if keys.len() > 1 && self.dialect.bulk_delete() {
            match self.delete_bulk(keys).await {
                Ok(results) => {
                    self.dialect.bulk_delete_worked();
                    return results;
                }
                Err(error)
                    if error.kind() == Kind::Unsupported && self.dialect.bulk_delete_refused() =>
                {
                    tracing::warn!(
                        error = %error.chain(),
                        "the store refused a bulk deletion; deleting one by one"
                    );
                }
                Err(error) => return spread(keys, &error),
            }
        }
        let mut deletions = Vec::with_capacity(keys.len());
        for key in keys {
            deletions.push(self.delete_one(key));
        }
        futures_util::stream::iter(deletions).buffered(SINGLES_MAX).collect().await
    }

    async fn delete_one(&self, key: &ObjectKey) -> (ObjectKey, Result<(), Error>) {
        let context = self.describe("delete", key.as_str());
        let request = self
            .clients
            .writes()
            .delete_object()
            .bucket(&self.url.bucket)
            .key(self.full(key.as_str()));
        let delete = async {
            match request.send().await.map_err(|error| classify(&context, error)) {
                Err(error) if error.kind() == Kind::NotFound => Ok(()),
                result => result.map(drop),
            }
        };
        (key.clone(), self.attempt(Operation::Delete, &context, 0, delete).await)
    }

    async fn delete_bulk(&self, keys: &[ObjectKey]) -> Result<Deletions, Error> {
        let context = self.describe(&format!("delete {} keys of", keys.len()), "");
        let identify = |key: &ObjectKey| {
            let identifier = ObjectIdentifier::builder().key(self.full(key.as_str())).build();
            identifier.expect("a key is all it needs")
        };
        let keys_of_request = keys.iter().map(identify).collect();
        let delete = Delete::builder().set_objects(Some(keys_of_request)).quiet(false).build();
        let request = self
            .clients
            .writes()
            .delete_objects()
            .bucket(&self.url.bucket)
            .delete(delete.expect("the list of objects is all it needs"))
            .customize()
            .interceptor(WholeXml("DeleteResult"));
        let delete = async { request.send().await.map_err(|error| classify(&context, error)) };
        let reply = self.attempt(Operation::Delete, &context, 0, delete).await?;
        Ok(self.sort_out(keys, &reply))
    }

    /// Finds each key's own result. One that is not mentioned has not been deleted, for all we know.
    fn sort_out(&self, keys: &[ObjectKey], reply: &DeleteObjectsOutput) -> Deletions {
        let mut results: HashMap<&str, Result<(), Error>> = HashMap::new();
        for deleted in reply.deleted() {
            results.extend(deleted.key().map(|key| (key, Ok(()))));
        }
        for refused in reply.errors() {
            let Some(full) = refused.key() else { continue };
            let code = refused.code().unwrap_or_default();
            let result = match code {
                "NoSuchKey" => Ok(()),
                _ => {
                    let kind = match code {
                        "AccessDenied" | "AllAccessDisabled" => Kind::Denied,
                        _ => Kind::Unavailable,
                    };
                    let message = refused.message().unwrap_or_default().escape_debug();
                    let text =
                        format!("delete s3://{}/{full}: {code} ({message})", self.url.bucket);
                    let error = Error::new(kind, text);
                    Err(if code == "SlowDown" { error.throttled() } else { error })
                }
            };
            results.insert(full, result);
        }
        let result_of = |key: &ObjectKey| {
            let result = results.remove(self.full(key.as_str()).as_str());
            let missing = || {
                let context = self.describe("delete", key.as_str());
                Err(unusable(&context, "a bulk deletion that leaves this key out"))
            };
            (key.clone(), result.unwrap_or_else(missing))
        };
        keys.iter().map(result_of).collect()
    }
}

/// One failure for every key.
fn spread(keys: &[ObjectKey], error: &Error) -> Deletions {
    let each = |key: &ObjectKey| {
        let copy = Error::new(error.kind(), error.chain());
        (key.clone(), Err(if error.is_throttled() { copy.throttled() } else { copy }))
    };
    keys.iter().map(each).collect()
}
