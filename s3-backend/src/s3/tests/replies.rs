//! Replies that look like answers and are not: each is asked again, and none is believed.

use super::stub::{Habits, Reply, Stub};
use super::{all_ok, key, open_stub, patient};
use crate::error::Kind;
use crate::handle::Store;
use crate::store::ObjectStore;

const HTML: &str = "<html><body>Please log in to use the network</body></html>";

fn without_etag(mut reply: Reply) -> Reply {
    reply.headers.retain(|(name, _)| name != "ETag");
    reply
}

#[tokio::test]
async fn a_put_counts_only_with_an_etag() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    stub.after("PUT", without_etag);
    stub.before("PUT", Reply::new(200, ""));
    stub.before("PUT", Reply::new(200, HTML));
    stub.before("PUT", Reply::error(200, "InternalError"));
    for name in ["a", "b", "c", "d"] {
        let etag = store.put_new(&key(name), "body".into()).await.unwrap();
        assert_eq!(store.get(&key(name)).await.unwrap().etag, etag);
    }
    stub.all_failed();
}

#[tokio::test]
async fn only_the_store_says_that_an_object_is_absent() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    stub.plant("a", "body");
    stub.before("GET", Reply::new(404, HTML));
    stub.before("GET", Reply::new(404, ""));
    stub.before("GET", Reply::error(404, "NoSuchBucket"));
    assert_eq!(store.get(&key("a")).await.unwrap().body, "body");
    stub.before("GET", Reply::new(404, HTML));
    assert_eq!(store.stat(&key("a")).await.unwrap().size, 4);
    stub.all_failed();
    assert_eq!(store.get(&key("b")).await.unwrap_err().kind(), Kind::NotFound);
}

type Change = Box<dyn FnOnce(Reply) -> Reply + Send>;

#[tokio::test]
async fn a_get_is_whole_or_asked_again() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    let body = "0123456789".repeat(40_000);
    stub.plant("a", &body);
    let cut = |sent: usize| -> Change { Box::new(move |reply| Reply { cut: Some(sent), ..reply }) };
    let faults: [Change; 8] = [
        cut(0),
        cut(1),
        cut(body.len() / 2),
        cut(body.len() - 1),
        Box::new(|reply| Reply { cut: Some(1000), chunked: true, ..reply }),
        Box::new(|reply| Reply { body: Vec::new(), ..reply }),
        Box::new(without_etag),
        Box::new(|_| Reply::new(200, HTML)),
    ];
    for fault in faults {
        stub.after("GET", fault);
        assert_eq!(store.get(&key("a")).await.unwrap().body, body.as_bytes());
        stub.all_failed();
    }
}

/// The same reply, said to be of this range.
fn served(text: &'static str) -> Change {
    Box::new(move |mut reply| {
        reply.headers.retain(|(name, _)| name != "Content-Range");
        reply.headers.push(("Content-Range".into(), text.into()));
        reply
    })
}

#[tokio::test]
async fn a_range_is_the_one_asked_for_or_asked_again() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    let body = "0123456789".repeat(1000);
    stub.plant("a", &body);
    let whole = body.clone();
    let faults: [Change; 11] = [
        Box::new(move |mut reply| {
            reply.headers.retain(|(name, _)| name != "Content-Range");
            Reply { status: 200, body: whole.into(), ..reply }
        }),
        served("bytes 0-99/10000"),
        served("bytes 101-200/10000"),
        served("bytes 100-198/10000"),
        served("bytes 100-200/10000"),
        served("bytes */10000"),
        served("100-199"),
        Box::new(|reply| Reply { body: reply.body[..99].into(), ..reply }),
        Box::new(|reply| Reply { body: [&reply.body[..], b"x"].concat(), ..reply }),
        Box::new(|reply| Reply { cut: Some(99), ..reply }),
        Box::new(|reply| Reply { body: Vec::new(), ..reply }),
    ];
    for fault in faults {
        stub.after("GET", fault);
        let part = store.get_range(&key("a"), 100..200).await.unwrap();
        assert_eq!(part, body.as_bytes()[100..200]);
        stub.all_failed();
    }
}

/// Changes the XML of the next listing; the listing must come out right all the same.
async fn survives(
    stub: &Stub,
    store: &Store,
    damage: impl FnOnce(String) -> String + Send + 'static,
) {
    stub.after("LIST", |reply| {
        let xml = String::from_utf8(reply.body.clone()).unwrap();
        Reply { body: damage(xml).into(), ..reply }
    });
    let listed = store.list_all("").await.unwrap();
    assert_eq!(listed.len(), 7);
    stub.all_failed();
}

#[tokio::test]
async fn a_listing_is_complete_or_asked_again() {
    let stub = Stub::start_with(Habits { page_max: Some(3), ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    (0..7).for_each(|n| stub.plant(&format!("k{n}"), "body"));
    let cut_after = |text: &'static str| {
        move |xml: String| xml[..xml.find(text).unwrap() + text.len()].to_owned()
    };
    survives(&stub, &store, cut_after("prefix/k")).await;
    survives(&stub, &store, cut_after("</Contents>")).await;
    survives(&stub, &store, cut_after("<Contents>")).await;
    survives(&stub, &store, cut_after("<ListBucketResult>")).await;
    survives(&stub, &store, |_| String::new()).await;
    survives(&stub, &store, |_| HTML.into()).await;
    survives(&stub, &store, |_| "<Error><Code>InternalError</Code></Error>".into()).await;
    survives(&stub, &store, |xml| xml.replace("<IsTruncated>true</IsTruncated>", "")).await;
    survives(&stub, &store, |xml| xml.replace("<KeyCount>3<", "<KeyCount>4<")).await;
    survives(&stub, &store, |xml| xml.replace("Token>prefix/k2<", "Token><")).await;
    survives(&stub, &store, |xml| xml.replace("<Size>4</Size>", "")).await;
    survives(&stub, &store, |xml| xml.replace("<Key>prefix/k1<", "<Key>other/k1<")).await;
}

#[tokio::test]
async fn a_page_token_that_repeats_is_not_followed_in_a_circle() {
    let stub = Stub::start_with(Habits { page_max: Some(3), ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    (0..7).for_each(|n| stub.plant(&format!("k{n}"), "body"));
    stub.after("LIST", |reply| reply);
    stub.after("LIST", |reply| {
        let xml = String::from_utf8(reply.body.clone()).unwrap();
        Reply { body: xml.replace("Token>prefix/k5<", "Token>prefix/k2<").into(), ..reply }
    });
    assert_eq!(store.list_all("").await.unwrap().len(), 7);
    stub.all_failed();
}

#[tokio::test]
async fn many_pages_and_empty_pages_make_one_listing() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    (0..2500).for_each(|n| stub.plant(&format!("k{n:04}"), "body"));
    stub.before(
        "LIST",
        Reply::new(
            200,
            "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>true</IsTruncated>\
             <NextContinuationToken>prefix/</NextContinuationToken></ListBucketResult>",
        ),
    );
    assert_eq!(store.list_all("k").await.unwrap().len(), 2500);
    stub.all_failed();
}

#[tokio::test]
async fn a_key_that_cannot_be_ours_fails_the_listing() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    stub.plant("a", "body");
    for mangled in ["A", "a%2Fb", "a//b", "dir/"] {
        stub.plant(mangled, "body");
        let error = store.list_all("").await.unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.to_string().contains(mangled), "it is named: {error}");
        stub.forget(mangled);
    }
}

#[tokio::test]
async fn a_deletion_counts_key_by_key() {
    let stub = Stub::start().await;
    let store = open_stub(&stub).await;
    let keys: Vec<_> = (0..5).map(|n| key(&format!("k{n}"))).collect();
    let replies = [
        "<Error><Code>InternalError</Code></Error>",
        "<DeleteResult></DeleteResult>",
        "<DeleteResult><Deleted><Key>prefix/k0</Key></Deleted>",
        "<DeleteResult><Deleted><Key>prefix/k0</Key></Deleted></DeleteResult>",
        "<DeleteResult><Error><Key>prefix/k1</Key><Code>InternalError</Code></Error></DeleteResult>",
        HTML,
    ];
    for reply in replies {
        (0..5).for_each(|n| stub.plant(&format!("k{n}"), "body"));
        stub.before("POST", Reply::new(200, reply));
        all_ok(store.delete_many(&keys).await);
        stub.all_failed();
        let left = (0..5).filter(|n| stub.body(&format!("k{n}")).is_some()).count();
        // The stub did not delete what it said it had; only k0 can be left for that.
        assert!(left <= 1, "{reply}: {left} left");
    }
}

#[tokio::test]
async fn a_deletion_that_is_denied_says_so_and_works_when_it_is_allowed() {
    let stub = Stub::start_with(Habits { denies_deletion: true, ..Habits::default() }).await;
    let store = open_stub(&stub).await;
    stub.plant("a", "body");
    stub.plant("b", "body");
    let keys = [key("a"), key("b"), key("c")];
    for (_, result) in patient(&store, 200).delete_many(&keys).await {
        assert_eq!(result.unwrap_err().kind(), Kind::Denied);
    }
    let waiting = store.clone();
    let again = keys.clone();
    let waiting = tokio::spawn(async move { waiting.delete_many(&again).await });
    let before = stub.log().len();
    while stub.log().len() < before + 2 {
        tokio::task::yield_now().await;
    }
    assert!(store.health().last_error.unwrap().contains("AccessDenied"));
    stub.change(|habits| habits.denies_deletion = false);
    all_ok(waiting.await.unwrap());
    assert!(stub.body("a").is_none() && stub.body("b").is_none());
}
