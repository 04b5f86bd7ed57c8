//! What the probe refuses, and what it learns.

use super::stub::{Habits, Stub};
use super::{all_ok, key, open_stub, patient};
use crate::dialect::{Checksums, IfMatch};
use crate::error::Kind;
use crate::probe::{ProbeReport, probe};
use crate::store::ObjectStore;

#[track_caller]
fn is_refused(result: Result<ProbeReport, crate::Error>, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported, "{}", error.chain());
    assert!(error.chain().contains(words), "{}", error.chain());
}

#[tokio::test]
async fn an_honest_store_passes_and_is_left_as_it_was() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    let report = probe(&store).await.unwrap();
    assert_eq!(report.if_match, Some(IfMatch::Quoted));
    assert_eq!(report.checksums, Some(Checksums::On));
    assert!(store.list_all("").await.unwrap().is_empty());
}

#[tokio::test]
async fn a_store_that_ignores_a_condition_is_refused_in_plain_words() {
    let habits = Habits { ignores_if_none_match: true, ..Habits::default() };
    let stub = Stub::start_with(habits).await;
    is_refused(probe(&open_stub(&stub).await).await, "put if absent");
    let habits = Habits { ignores_if_match: true, ..Habits::default() };
    let stub = Stub::start_with(habits).await;
    is_refused(probe(&open_stub(&stub).await).await, "swap (If-Match) with an old ETag");
}

#[tokio::test]
async fn a_store_that_lets_several_win_a_race_is_refused() {
    let stub = Stub::start_with(Habits { loses_races: true, ..Habits::default() }).await;
    is_refused(probe(&open_stub(&stub).await).await, "of 4 rivals won");
}

#[tokio::test]
async fn a_store_that_cannot_do_it_says_so_at_once() {
    let stub = Stub::start_with(Habits { refuses_everything: true, ..Habits::default() }).await;
    let store = patient(&open_stub(&stub).await, 60_000);
    is_refused(probe(&store).await, "NotImplemented");
}

#[tokio::test]
async fn the_form_of_if_match_is_found_and_kept() {
    let stub = Stub::start_with(Habits { takes_only_unquoted: true, ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    let report = probe(&store).await.unwrap();
    assert_eq!(report.if_match, Some(IfMatch::Unquoted));
    let etag = store.put_new(&key("a"), "one".into()).await.unwrap();
    let swapped = store.put_if_match(&key("a"), "two".into(), &etag).await.unwrap();
    let late = store.put_if_match(&key("a"), "three".into(), &etag).await;
    assert_eq!(late.unwrap_err().kind(), Kind::Conflict);
    assert_ne!(swapped, etag);
}

#[tokio::test]
async fn a_store_that_could_not_be_probed_at_start_is_probed_when_it_refuses() {
    let stub = Stub::start_with(Habits { takes_only_unquoted: true, ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    let etag = store.put_new(&key("a"), "one".into()).await.unwrap();
    store.put_if_match(&key("a"), "two".into(), &etag).await.unwrap();
    assert_eq!(stub.body("a").unwrap(), "two");
}

#[tokio::test]
async fn a_form_fixed_by_the_url_is_not_changed() {
    let stub = Stub::start_with(Habits { takes_only_unquoted: true, ..Habits::default() }).await;
    let url = format!("{}&if_match=quoted", stub.url());
    let store = super::open(&url, super::setup()).await;
    is_refused(probe(&store).await, "with the current ETag was refused");
    let url = format!("{}&if_match=unquoted", stub.url());
    probe(&super::open(&url, super::setup()).await).await.unwrap();
}

#[tokio::test]
async fn a_store_that_refuses_checksums_is_served_without() {
    let stub = Stub::start_with(Habits { refuses_checksums: true, ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    let report = probe(&store).await.unwrap();
    assert_eq!(report.checksums, Some(Checksums::Off));
    let keys: Vec<_> = (0..5).map(|n| key(&format!("k{n}"))).collect();
    for key in &keys {
        let etag = store.put_new(key, "one".into()).await.unwrap();
        store.put_if_match(key, "two".into(), &etag).await.unwrap();
    }
    // A bulk deletion needs a checksum by its own rules, so these go one by one.
    all_ok(store.delete_many(&keys).await);
    assert!(store.list_all("").await.unwrap().is_empty());
}

#[tokio::test]
async fn checksums_that_worked_are_not_given_up_for_one_refusal() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    store.put_new(&key("a"), "one".into()).await.unwrap();
    stub.before("PUT", super::stub::Reply::error(400, "InvalidRequest"));
    store.put_new(&key("b"), "one".into()).await.unwrap();
    stub.all_failed();
    let puts = stub.log().into_iter().filter(|request| request.method == "PUT");
    assert!(puts.into_iter().all(|put| put.header("x-amz-checksum-crc32").is_some()));
    assert!(!stub.log().iter().any(|request| request.header("x-amz-trailer").is_some()));
}

#[tokio::test]
async fn a_store_without_bulk_deletion_deletes_one_by_one() {
    let stub = Stub::start_with(Habits { refuses_bulk_delete: true, ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    (0..20).for_each(|n| stub.plant(&format!("k{n}"), "body"));
    let keys: Vec<_> = (0..20).map(|n| key(&format!("k{n}"))).collect();
    all_ok(store.delete_many(&keys).await);
    assert!(store.list_all("").await.unwrap().is_empty());
    let posts = stub.log().into_iter().filter(|request| request.method == "POST").count();
    assert_eq!(posts, 1, "it is not asked again");
}
