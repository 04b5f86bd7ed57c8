//! Writes whose outcome is unclear, stores that are busy, and stores that are not there.

use futures_util::future::join_all;
use tokio::net::TcpListener;

use super::stub::{Fault, Habits, Reply, Stub};
use super::{all_ok, key, open, open_stub, patient, setup};
use crate::counters::Operation;
use crate::error::Kind;
use crate::store::ObjectStore;

#[tokio::test]
async fn a_put_whose_reply_was_lost_has_succeeded() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    stub.after("PUT", |_| Reply::lost());
    let etag = store.put_new(&key("a"), "mine".into()).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap().etag, etag);
    stub.after("PUT", |_| Reply::lost());
    store.put_if_match(&key("a"), "mine too".into(), &etag).await.unwrap();
    assert_eq!(stub.body("a").unwrap(), "mine too");
    stub.all_failed();
    let puts = stub.log().into_iter().filter(|request| request.method == "PUT").count();
    assert_eq!(puts, 2, "looking shows that it went through; nothing is sent twice");
}

#[tokio::test]
async fn a_put_that_is_applied_late_wins_or_loses_but_never_confuses() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    stub.fail("PUT", Fault::Late);
    let etag = store.put_new(&key("a"), "mine".into()).await.unwrap();
    assert_eq!(stub.body("a").unwrap(), "mine");
    stub.fail("PUT", Fault::Late);
    let etag = store.put_if_match(&key("a"), "mine too".into(), &etag).await.unwrap();
    assert_eq!(store.get(&key("a")).await.unwrap().etag, etag);
    stub.all_failed();
}

#[tokio::test]
async fn a_put_whose_reply_was_lost_and_that_lost_the_race_says_so() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    stub.before("PUT", Reply::lost());
    stub.plant("a", "theirs");
    let error = store.put_new(&key("a"), "mine".into()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Exists);
    let theirs = store.get(&key("a")).await.unwrap().etag;
    stub.plant("a", "theirs again");
    stub.before("PUT", Reply::lost());
    let error = store.put_if_match(&key("a"), "mine".into(), &theirs).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Conflict);
    stub.all_failed();
    assert_eq!(stub.body("a").unwrap(), "theirs again");
}

#[tokio::test]
async fn a_409_is_neither_a_loss_nor_a_win() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    // Each repetition waits twice as long as the one before: four of them take a second.
    for count in [1, 4] {
        for (index, code) in ["ConditionalRequestConflict", "OperationAborted"].iter().enumerate() {
            let key = key(&format!("{count}-{index}"));
            (0..count).for_each(|_| stub.before("PUT", Reply::error(409, code)));
            let etag = store.put_new(&key, "mine".into()).await.unwrap();
            (0..count).for_each(|_| stub.before("PUT", Reply::error(409, code)));
            store.put_if_match(&key, "mine too".into(), &etag).await.unwrap();
            stub.all_failed();
        }
    }
    stub.plant("theirs", "theirs");
    stub.before("PUT", Reply::error(409, "ConditionalRequestConflict"));
    let error = store.put_new(&key("theirs"), "mine".into()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Exists, "there it is, after a look");
}

#[tokio::test]
async fn an_unclear_write_that_has_to_be_given_up_is_ambiguous() {
    let stub = Stub::start().await;
    let store = patient(&open_stub(&stub).await, 400);
    (0..100).for_each(|_| stub.before("PUT", Reply::error(500, "InternalError")));
    let error = store.put_new(&key("a"), "mine".into()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Ambiguous, "{}", error.chain());
    assert!(error.chain().contains("InternalError"), "{}", error.chain());
    (0..100).for_each(|_| stub.before("GET", Reply::error(500, "InternalError")));
    let error = store.get(&key("a")).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "a read has no outcome to be unclear about");
}

#[tokio::test]
async fn a_store_that_is_not_there_is_unavailable_and_nothing_is_unclear() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("s3://bucket?endpoint=http://{}", free.local_addr().unwrap());
    drop(free);
    let store = patient(&open(&url, setup()).await, 300);
    let error = store.put_new(&key("a"), "mine".into()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{}", error.chain());
    let error = store.get(&key("a")).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{}", error.chain());
    let health = store.health();
    assert!(health.failing_for.is_some() && health.failures > 1);
    assert!(health.last_error.unwrap().contains("refused"), "the status says why");
}

#[tokio::test]
async fn every_call_outlives_a_refused_connection() {
    for call in 0..6 {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let url = format!("s3://bucket/prefix?endpoint=http://{address}");
        let store = open(&url, setup()).await;
        let waiting = store.clone();
        let waiting = tokio::spawn(async move {
            let key = key("a");
            match call {
                0 => waiting.put_new(&key, "x".into()).await.map(drop).map_err(|e| e.kind()),
                1 => waiting.get(&key).await.map(drop).map_err(|e| e.kind()),
                2 => waiting.get_range(&key, 0..1).await.map(drop).map_err(|e| e.kind()),
                3 => waiting.stat(&key).await.map(drop).map_err(|e| e.kind()),
                4 => waiting.list("", None, 10).await.map(drop).map_err(|e| e.kind()),
                _ => {
                    all_ok(waiting.delete_many(&[key.clone(), super::key("b")]).await);
                    Ok(())
                }
            }
        });
        while store.health().failures < 2 {
            tokio::task::yield_now().await;
        }
        let listener = TcpListener::bind(address).await.unwrap();
        let _stub = Stub::serve(listener, Habits::default());
        let expected = if (1..=3).contains(&call) { Err(Kind::NotFound) } else { Ok(()) };
        assert_eq!(waiting.await.unwrap(), expected, "call {call}");
        assert_eq!(store.health().failing_for, None, "all is well again");
    }
}

#[tokio::test]
async fn a_storm_of_refusals_lowers_the_rate_and_ends_nothing() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    let storm = [(503, "SlowDown"), (503, "ServiceUnavailable"), (429, "TooManyRequests")];
    for (status, code) in storm.into_iter().cycle().take(40) {
        stub.before("PUT", Reply::error(status, code));
    }
    let keys: Vec<_> = (0..40).map(|n| key(&format!("k{n}"))).collect();
    let puts = keys.iter().map(|key| store.put_new(key, "x".into()));
    for put in join_all(puts).await {
        put.unwrap();
    }
    stub.all_failed();
    assert_eq!(store.counters().of(Operation::PutNew).failed, 40);
    assert!(store.request_limit() < 64, "fewer at once after a storm");
    while store.request_limit() < 64 {
        store.get(&key("k0")).await.unwrap();
    }
    stub.before("POST", Reply::error(503, "SlowDown"));
    all_ok(store.delete_many(&keys).await);
    stub.all_failed();
    assert!(store.list_all("").await.unwrap().is_empty());
}

#[tokio::test]
async fn no_put_goes_without_a_condition() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    crate::probe(&store).await.unwrap();
    stub.after("PUT", |_| Reply::lost());
    stub.before("PUT", Reply::error(503, "SlowDown"));
    let etag = store.put_new(&key("a"), "one".into()).await.unwrap();
    store.put_if_match(&key("a"), "two".into(), &etag).await.unwrap();
    for request in stub.log().iter().filter(|request| request.method == "PUT") {
        let conditions = ["if-match", "if-none-match"].map(|name| request.header(name).is_some());
        assert_eq!(conditions.iter().filter(|set| **set).count(), 1, "{request:?}");
    }
}
