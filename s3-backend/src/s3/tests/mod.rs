//! The S3 store against a real server, and against one that does what no server should.

use std::time::Duration;

use std::sync::Arc;

use aws_credential_types::Credentials;

use super::S3Store;
use super::clients::Setup;
use super::http::Limits;
use crate::error::Error;
use crate::handle::Store;
use crate::key::ObjectKey;
use crate::retry::RetryPolicy;
use crate::url::StoreUrl;

mod credentials;
mod deadlines;
mod faults;
mod probed;
mod real;
mod replies;
mod stub;

use stub::Stub;

fn setup() -> Setup {
    let credentials =
        Credentials::new("AKBLOCKDTEST", "blockd-test-secret-0123456789", None, None, "test");
    Setup { credentials: Some(credentials), ..Setup::default() }
}

/// What a hanging server costs is waited for in these tests.
fn hasty() -> Setup {
    let (connect, stall, answer) = (1000, 300, 300);
    let [connect, stall, answer] = [connect, stall, answer].map(Duration::from_millis);
    Setup { limits: Limits { connect, stall, answer }, ..setup() }
}

async fn open(url: &str, setup: Setup) -> Store {
    let StoreUrl::S3(url) = url.parse().unwrap() else { panic!("{url} is no s3 url") };
    Store::new(Arc::new(S3Store::open_with(&url, setup).await.unwrap()), 64)
}

/// A handle on the stub that retries for ever.
async fn open_stub(stub: &Stub) -> Store {
    open(&stub.url(), setup()).await
}

fn key(text: &str) -> ObjectKey {
    ObjectKey::parse(text).unwrap()
}

fn patient(store: &Store, millis: u64) -> Store {
    store.with_policy(RetryPolicy::Until(Duration::from_millis(millis)))
}

fn all_ok(deletions: Vec<(ObjectKey, Result<(), Error>)>) {
    for (key, result) in deletions {
        result.unwrap_or_else(|error| panic!("{key}: {}", error.chain()));
    }
}
