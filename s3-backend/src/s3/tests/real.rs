//! The suite against a real server: SeaweedFS, or any store that `BLOCKD_TEST_S3` names by its URL
//! (with the credentials of the environment).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use super::{open, setup};
use crate::handle::Store;
use crate::retry::RetryPolicy;
use crate::s3::S3Store;
use crate::store::ObjectStore;
use crate::url::StoreUrl;

/// A server that ends with the test.
struct Weed {
    tool: PathBuf,
    directory: tempfile::TempDir,
    endpoint: String,
}

impl Weed {
    fn start() -> Option<Self> {
        let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tools/weed-server");
        let directory = tempfile::tempdir().unwrap();
        let output = Command::new(&tool).arg("start").arg(directory.path()).arg("bucket").output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let endpoint = text.lines().find_map(|line| line.strip_prefix("AWS_ENDPOINT_URL="));
        let Some(endpoint) = endpoint else {
            println!("skipped: no SeaweedFS: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        };
        Some(Self { tool, directory, endpoint: endpoint.to_owned() })
    }
}

impl Drop for Weed {
    fn drop(&mut self) {
        // With `kill`, for what it holds is thrown away, and a graceful end takes seconds.
        let _ = Command::new(&self.tool).arg("kill").arg(self.directory.path()).status();
    }
}

async fn keeps_every_promise(store: &Store) {
    // So that a store that cannot do something says so, and is not asked for ever.
    let store = &store.with_policy(RetryPolicy::Until(Duration::from_secs(30)));
    let report = crate::probe(store).await.unwrap();
    println!("{report}");
    let nonce = getrandom::u64().unwrap();
    crate::conformance::run(store, &format!("suite-{nonce:016x}"), 3).await;
    println!("{:?}", store.counters());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_of_seaweedfs_keeps_every_promise_of_a_store() {
    let Some(weed) = Weed::start() else { return };
    let endpoint = &weed.endpoint;
    let store =
        open(&format!("s3://bucket/some/prefix?endpoint={endpoint}&region=us-east-1"), setup())
            .await;
    keeps_every_promise(&store).await;
    let at_the_top =
        open(&format!("s3://bucket?endpoint={endpoint}&region=us-east-1"), setup()).await;
    let listed = at_the_top.list("some/prefix/", None, 1).await.unwrap();
    assert_eq!(listed.entries.len(), 1, "a store without a prefix sees the whole bucket");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_named_by_the_environment_keeps_every_promise() {
    let Ok(url) = std::env::var("BLOCKD_TEST_S3") else {
        println!("skipped: BLOCKD_TEST_S3 names no store");
        return;
    };
    let StoreUrl::S3(url) = url.parse().unwrap() else { panic!("{url} is no s3 url") };
    let store = Store::new(Arc::new(S3Store::open(&url).await.unwrap()), 64);
    keeps_every_promise(&store).await;
}
