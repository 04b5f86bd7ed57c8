//! Credentials that expire, change or are refused, and the freshness of signatures.

use std::collections::HashSet;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use super::stub::{Habits, Reply, Stub};
use super::{Setup, key, open_stub, patient};
use crate::error::Kind;
use crate::handle::Store;
use crate::s3::S3Store;
use crate::store::ObjectStore;
use crate::url::StoreUrl;

#[tokio::test]
async fn a_denial_is_waited_out_and_named_meanwhile() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    let denials = [(403, "AccessDenied"), (400, "ExpiredToken"), (403, "RequestTimeTooSkewed")];
    for (status, code) in denials {
        stub.before("PUT", Reply::error(status, code));
        stub.before("PUT", Reply::error(status, code));
        store.put_new(&key(&code.to_lowercase()), "x".into()).await.unwrap();
        stub.all_failed();
        let health = store.health();
        assert_eq!(health.failing_for, None);
        assert!(health.last_error.unwrap().contains(code), "the status says why");
    }
}

#[tokio::test]
async fn a_denial_that_lasts_is_told_to_whoever_cannot_wait() {
    let stub = Stub::start_with(Habits { access_key: Some("ANOTHER"), ..Habits::default() }).await;
    let store = patient(&open_stub(&stub).await, 300);
    assert_eq!(store.put_new(&key("a"), "x".into()).await.unwrap_err().kind(), Kind::Denied);
    assert_eq!(store.get(&key("a")).await.unwrap_err().kind(), Kind::Denied);
}

#[tokio::test]
async fn every_attempt_is_signed_anew() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    // Six pauses add up to more than a second, and signatures have dates to the second.
    (0..6).for_each(|_| stub.before("PUT", Reply::error(503, "SlowDown")));
    store.put_new(&key("a"), "x".into()).await.unwrap();
    let dates: HashSet<String> =
        stub.log().iter().map(|put| put.header("x-amz-date").unwrap().to_owned()).collect();
    assert!(dates.len() > 1, "{dates:?}");
}

/// Set in the process that `credentials_that_change_on_disk_are_found` starts of itself, for it
/// needs an environment of its own.
const INNER: &str = "BLOCKD_TEST_CREDENTIALS_FILE";

fn profile(access_key: &str) -> String {
    format!("[default]\naws_access_key_id = {access_key}\naws_secret_access_key = secret\n")
}

#[tokio::test]
async fn credentials_that_change_on_disk_are_found() {
    let Ok(path) = std::env::var(INNER) else {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("credentials");
        std::fs::write(&path, profile("OLD")).unwrap();
        let test = "s3::tests::credentials::credentials_that_change_on_disk_are_found";
        let inner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env_clear()
            .env(INNER, &path)
            .env("AWS_SHARED_CREDENTIALS_FILE", &path)
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .output()
            .unwrap();
        assert!(inner.status.success(), "{}", String::from_utf8_lossy(&inner.stdout));
        return;
    };
    let stub = Stub::start_with(Habits { access_key: Some("OLD"), ..Habits::default() }).await;
    let StoreUrl::S3(url) = stub.url().parse().unwrap() else { panic!("the stub is an s3") };
    let setup = Setup { reload_interval: Duration::ZERO, ..Setup::default() };
    let store = Store::new(Arc::new(S3Store::open_with(&url, setup).await.unwrap()), 64);
    store.put_new(&key("a"), "x".into()).await.unwrap();
    stub.change(|habits| habits.access_key = Some("NEW"));
    let waiting = store.clone();
    let waiting = tokio::spawn(async move { waiting.put_new(&key("b"), "x".into()).await });
    while store.health().failures < 2 {
        tokio::task::yield_now().await;
    }
    std::fs::write(path, profile("NEW")).unwrap();
    waiting.await.unwrap().unwrap();
}
