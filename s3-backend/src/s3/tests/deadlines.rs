//! Servers that are slow, and servers that are silent.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::stub::{Reply, Stub};
use super::{hasty, key, open};
use crate::counters::Operation;
use crate::store::ObjectStore;

#[tokio::test]
async fn a_silent_server_is_asked_again_on_another_connection() {
    let stub = Stub::start().await;
    let store = open(&stub.url(), hasty()).await;
    stub.before("PUT", Reply::hung());
    let etag = store.put_new(&key("a"), "one".into()).await.unwrap();
    stub.after("PUT", |_| Reply::hung());
    store.put_if_match(&key("a"), "two".into(), &etag).await.unwrap();
    for verb in ["GET", "LIST", "DELETE", "POST"] {
        stub.before(verb, Reply::hung());
    }
    store.get(&key("a")).await.unwrap();
    store.list("", None, 10).await.unwrap();
    super::all_ok(store.delete_many(&[key("a")]).await);
    super::all_ok(store.delete_many(&[key("a"), key("b")]).await);
    stub.all_failed();
}

#[tokio::test]
async fn a_server_that_falls_silent_within_a_body_is_asked_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("s3://bucket?endpoint=http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let mut held = Vec::new();
        for sent in ["ab", "abcd"] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            assert_ne!(stream.read(&mut request).await.unwrap(), 0);
            let head = "HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Length: 4\r\n\r\n";
            stream.write_all(format!("{head}{sent}").as_bytes()).await.unwrap();
            held.push(stream);
        }
        held
    });
    let store = open(&url, hasty()).await;
    assert_eq!(store.get(&key("a")).await.unwrap().body, "abcd");
    assert_eq!(store.counters().of(Operation::Get).failed, 1);
    drop(server.await.unwrap());
}

/// Takes a request's body in small pieces, with a pause after each that is no silence.
async fn take_slowly(listener: TcpListener) -> usize {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut taken = Vec::new();
    let mut piece = vec![0; 128 * 1024];
    while taken.len() < BODY_BYTES {
        let bytes = stream.read(&mut piece).await.unwrap();
        assert_ne!(bytes, 0, "cut off after {} bytes", taken.len());
        taken.extend_from_slice(&piece[..bytes]);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let reply = "HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Length: 0\r\n\r\n";
    stream.write_all(reply.as_bytes()).await.unwrap();
    taken.len()
}

const BODY_BYTES: usize = 8 * 1024 * 1024;

#[tokio::test]
async fn a_slow_upload_that_moves_is_not_cut_off() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("s3://bucket?endpoint=http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(take_slowly(listener));
    // Over a second for the whole, far above what any part of it may be silent.
    let store = open(&url, hasty()).await;
    store.put_new(&key("a"), vec![7; BODY_BYTES].into()).await.unwrap();
    assert!(server.await.unwrap() >= BODY_BYTES);
    assert_eq!(store.counters().bytes_up, 8 * 1024 * 1024, "sent once");
}

#[tokio::test]
async fn an_upload_that_is_not_taken_is_given_up_and_sent_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("s3://bucket?endpoint=http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (deaf, _) = listener.accept().await.unwrap();
        // The look after the unclear put comes from the other pool.
        let (mut look, _) = listener.accept().await.unwrap();
        let mut request = [0; 4096];
        assert_ne!(look.read(&mut request).await.unwrap(), 0);
        let absent = "<Error><Code>NoSuchKey</Code></Error>";
        let head = format!("HTTP/1.1 404 Not Found\r\nContent-Length: {}\r\n\r\n", absent.len());
        look.write_all(format!("{head}{absent}").as_bytes()).await.unwrap();
        let taken = take_slowly(listener).await;
        drop(deaf);
        taken
    });
    let store = open(&url, hasty()).await;
    store.put_new(&key("a"), vec![7; BODY_BYTES].into()).await.unwrap();
    assert!(server.await.unwrap() >= BODY_BYTES);
    assert_eq!(store.counters().of(Operation::PutNew).failed, 1);
}
