//! The server and the client over a real socket, over a daemon that does what each test says.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::api::{self, Progress, Request};
use super::client::Client;
use super::fake::World;
use super::wire::{LINES, REQUEST_BYTES_MAX, TIMEOUT_HEADER};
use super::{Call, server, view};
use crate::error::{Error, Kind, Result};

impl World {
    /// Status, media type and body of a request made by hand.
    async fn raw(&self, request: hyper::Request<Full<Bytes>>) -> (u16, String, Bytes) {
        let stream = UnixStream::connect(self.socket()).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let media = response.headers()["content-type"].to_str().unwrap().to_owned();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        connection.abort();
        (status, media, body)
    }

    /// A request that must fail, as its status and error.
    async fn refused(&self, request: hyper::Request<Full<Bytes>>) -> (u16, Value) {
        let (status, media, body) = self.raw(request).await;
        assert_eq!(media, "application/json");
        let mut body: Value = serde_json::from_slice(&body).expect("an error is JSON");
        (status, body["error"].take())
    }
}

fn post(path: &str, body: impl Into<Bytes>) -> hyper::Request<Full<Bytes>> {
    hyper::Request::post(path).header("host", "blockd").body(Full::new(body.into())).unwrap()
}

async fn never() -> Result<Value> {
    std::future::pending().await
}

fn flush_reply() -> Value {
    json!({"target": "d1", "flushed_lsn": 7})
}

#[tokio::test]
async fn a_request_arrives_as_it_was_sent_and_so_does_its_reply() {
    let world = World::new(|_, command, request| async move {
        assert_eq!((command, &request["target"]), ("detach", &json!("d1@s")));
        assert_eq!(request["disconnect"], true);
        Ok(json!({"target": "d1@s", "drained_lsn": 7, "disconnected": [], "from": "the future"}))
    })
    .await;
    let request = api::Detach { target: "d1@s".parse().unwrap(), disconnect: true };
    let reply = world.call(request).await.unwrap();
    assert_eq!((reply.target.to_string().as_str(), reply.drained_lsn), ("d1@s", Some(7)));
    world.stop().await;
}

#[tokio::test]
async fn every_command_reaches_its_own_method() {
    let world = World::new(|_, command, _| async move {
        Err(Error::new(Kind::Failed, format!("this is {command}")))
    })
    .await;
    for (command, request) in [
        ("create", json!({"name": "d1", "size_bytes": 4096})),
        ("list", json!({})),
        ("show", json!({"name": "d1"})),
        ("usage", json!({})),
        ("status", json!({})),
        ("attach", json!({"target": "d1@s", "access": "read", "device": "auto"})),
        ("detach", json!({"target": "d1"})),
        ("flush", json!({"target": "d1"})),
        ("drain", json!({"target": "d1"})),
        ("snapshot", json!({"name": "d1"})),
        ("snapshots", json!({"name": "d1"})),
        ("fork", json!({"target": "d1@s", "new": "d2"})),
        ("delete", json!({"target": "d1"})),
        ("resize", json!({"name": "d1", "size_bytes": 8192})),
        ("check", json!({"name": "d1", "deep": true})),
        ("recover", json!({"name": "d1", "new": "d2"})),
    ] {
        let (status, error) =
            world.refused(post(&format!("/v1/{command}"), request.to_string())).await;
        assert_eq!((status, &error["message"]), (500, &json!(format!("this is {command}"))));
    }
    world.stop().await;
}

#[tokio::test]
async fn an_error_keeps_code_message_causes_fix_and_details() {
    let world = World::new(|_, _, _| async {
        Err(Error::new(Kind::DiskBusy, "d1 is held by host-b")
            .with_source(std::io::Error::other("cause"))
            .with_fix("wait for it with --wait")
            .with_detail("holder", "host-b"))
    })
    .await;
    let expected = json!({
        "code": "disk_busy", "message": "d1 is held by host-b: cause",
        "fix": "wait for it with --wait", "details": {"holder": "host-b"},
    });
    let refused = world.refused(post("/v1/flush", r#"{"target":"d1"}"#)).await;
    assert_eq!(refused, (409, expected));
    let error = world.call(api::Flush { target: "d1".parse().unwrap() }).await.unwrap_err();
    assert_eq!((error.kind(), error.fix()), (Kind::DiskBusy, Some("wait for it with --wait")));
    assert_eq!(error.report(), "d1 is held by host-b: cause");
    assert_eq!(error.details()["holder"], "host-b");
    world.stop().await;
}

#[tokio::test]
async fn each_wrong_request_is_refused_in_json_and_reaches_nobody() {
    let world = World::new(|_, command, _| async move { panic!("{command} was reached") }).await;
    let flush = "/v1/flush";
    for (request, status, code) in [
        (post(flush, ""), 400, "invalid_argument"),
        (post(flush, "{"), 400, "invalid_argument"),
        (post(flush, "\0\u{7f}"), 400, "invalid_argument"),
        (post(flush, "[]"), 400, "invalid_argument"),
        (post(flush, r#"{"target":1}"#), 400, "invalid_argument"),
        (post(flush, r#"{"target":"d1","twice":1}"#), 400, "invalid_argument"),
        (post(flush, r#"{"target":"D1"}"#), 400, "invalid_name"),
        (post(flush, r#"{"target":"d1@"}"#), 400, "invalid_name"),
        (post("/v1/fork", r#"{"target":"d1","new":"../x"}"#), 400, "invalid_name"),
        (post("/v1/snapshot", r#"{"name":"d1","snapshot":"S"}"#), 400, "invalid_name"),
        (post("/v1/attach", r#"{"target":"d1","device":"/dev/sda"}"#), 400, "invalid_argument"),
        (post("/v1/create", r#"{"name":"d1","size_bytes":-1}"#), 400, "invalid_argument"),
        (post(flush, vec![b' '; REQUEST_BYTES_MAX + 1]), 413, "invalid_argument"),
        (post("/v1/flusch", "{}"), 404, "not_found"),
        (post("/", "{}"), 404, "not_found"),
    ] {
        let shown = format!("{request:?}").chars().take(300).collect::<String>();
        let (got, error) = world.refused(request).await;
        assert_eq!((got, &error["code"]), (status, &json!(code)), "{shown}: {error}");
        assert!(error["fix"].is_string(), "{shown}: {error}");
    }
    let get = hyper::Request::get(flush).header("host", "b").body(Full::default()).unwrap();
    let (status, error) = world.refused(get).await;
    assert_eq!((status, &error["message"]), (405, &json!("/v1/flush does not take GET")));
    for bad in ["0", "-1", "soon", ""] {
        let mut request = post(flush, r#"{"target":"d1"}"#);
        request.headers_mut().insert(TIMEOUT_HEADER, bad.parse().unwrap());
        assert_eq!(world.refused(request).await.0, 400, "time limit {bad:?}");
    }
    world.stop().await;
}

#[tokio::test]
async fn a_request_of_the_longest_length_is_taken() {
    let world = World::new(|_, _, _| async { Ok(flush_reply()) }).await;
    let mut body = br#"{"target":"d1"}"#.to_vec();
    body.resize(REQUEST_BYTES_MAX, b' ');
    assert_eq!(world.raw(post("/v1/flush", body)).await.0, 200);
    world.stop().await;
}

#[tokio::test]
async fn a_call_whose_store_does_not_answer_gives_up() {
    let world = World::new(|_, _, _| never()).await;
    let mut request = post("/v1/drain", r#"{"target":"d1"}"#);
    request.headers_mut().insert(TIMEOUT_HEADER, "20".parse().unwrap());
    let (status, error) = world.refused(request).await;
    assert_eq!((status, &error["code"]), (503, &json!("store_unavailable")));
    let client = Client::new(world.socket(), Duration::from_millis(20));
    let request = api::Drain { target: "d1".parse().unwrap() };
    let error = client.call(&request, &mut |_| ()).await.unwrap_err();
    assert_eq!((error.kind(), error.kind().exit_code()), (Kind::StoreUnavailable, 5));
    world.stop().await;
}

/// Runs `request` until another call of the same time limit, begun later, has given up; then it may end.
async fn outlives_its_time_limit<R: Request>(
    request: R,
    reply: Value,
    step: impl Fn(&Call) + Send + Sync + 'static,
) -> Result<R::Reply> {
    let step = Arc::new(step);
    let (begun, mut begins) = mpsc::channel(1);
    let (end, ends) = tokio::sync::watch::channel(false);
    let world = World::new(move |call, command, _| {
        let (step, begun, ends, reply) = (step.clone(), begun.clone(), ends.clone(), reply.clone());
        async move {
            if command == "drain" {
                return never().await;
            }
            begun.send(()).await.unwrap();
            while !*ends.borrow() {
                step(&call);
                tokio::task::yield_now().await;
            }
            Ok(reply)
        }
    })
    .await;
    let client = Client::new(world.socket(), Duration::from_millis(50));
    let long = tokio::spawn({
        let client = client.clone();
        async move { client.call(&request, &mut |_| ()).await }
    });
    begins.recv().await.unwrap();
    let stuck = api::Drain { target: "d1".parse().unwrap() };
    let error = client.call(&stuck, &mut |_| ()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::StoreUnavailable);
    end.send(true).unwrap();
    let reply = long.await.unwrap();
    world.stop().await;
    reply
}

#[tokio::test]
async fn a_call_that_makes_progress_outlives_its_time_limit() {
    let request = || api::Flush { target: "d1".parse().unwrap() };
    let moving = |call: &Call| call.progress(Progress::default());
    assert!(outlives_its_time_limit(request(), flush_reply(), moving).await.is_ok());
    let standing = |_: &Call| ();
    let error = outlives_its_time_limit(request(), flush_reply(), standing).await.unwrap_err();
    assert_eq!(error.kind(), Kind::StoreUnavailable);
}

#[tokio::test]
async fn an_attach_that_waits_has_its_wait_on_top_of_the_time_limit() {
    let request = json!({"target": "d1", "wait_seconds": 100});
    let request = serde_json::from_value::<api::Attach>(request).unwrap();
    let reply = json!({
        "target": "d1", "access": "write", "uri": "nbd://h/d1", "device": null, "epoch": 1,
        "already_attached": false, "took_over": null, "state_age_seconds": null,
    });
    let reply = outlives_its_time_limit(request, reply, |_| ()).await.unwrap();
    assert_eq!(reply.uri, "nbd://h/d1");
}

#[tokio::test]
async fn progress_is_heard_in_order_and_before_the_reply() {
    let (step, steps) = mpsc::channel::<u64>(1);
    let steps = Arc::new(tokio::sync::Mutex::new(steps));
    let world = World::new(move |call, _, _| {
        let steps = Arc::clone(&steps);
        async move {
            let mut steps = steps.lock().await;
            while let Some(done_bytes @ 0..3) = steps.recv().await {
                call.progress(Progress { done_bytes, ..Progress::default() });
            }
            Ok(flush_reply())
        }
    })
    .await;
    // Each step is taken only when the one before has been heard.
    let mut heard = Vec::new();
    step.try_send(0).unwrap();
    let mut hear = |progress: Progress| {
        heard.push(progress.done_bytes);
        step.try_send(progress.done_bytes + 1).unwrap();
    };
    let request = api::Flush { target: "d1".parse().unwrap() };
    let reply = world.client().call(&request, &mut hear).await.unwrap();
    assert_eq!((heard, reply.flushed_lsn), (vec![0, 1, 2], 7));
    world.stop().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_is_told_to_the_call_which_goes_on_to_its_end() {
    let (begun, mut begins) = mpsc::channel(2);
    let (ended, mut ends) = mpsc::channel(2);
    let world = World::new(move |call, _, _| {
        let (begun, ended) = (begun.clone(), ended.clone());
        async move {
            begun.send(call.is_abandoned()).await.unwrap();
            call.abandoned().await;
            ended.send(call.is_abandoned()).await.unwrap();
            Ok(flush_reply())
        }
    })
    .await;
    for accept in [LINES, "*/*"] {
        let mut stream = UnixStream::connect(world.socket()).await.unwrap();
        let body = r#"{"target":"d1"}"#;
        let head = format!("POST /v1/flush HTTP/1.1\r\nhost: b\r\naccept: {accept}\r\n");
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
        assert_eq!(begins.recv().await, Some(false));
        drop(stream);
        assert_eq!(ends.recv().await, Some(true), "with accept: {accept}");
    }
    world.stop().await;
}

#[tokio::test]
async fn a_panic_in_one_call_is_that_calls_error_alone() {
    let world = World::new(|_, _, request| async move {
        assert_eq!(request["target"], "d1", "a bug");
        Ok(flush_reply())
    })
    .await;
    let error = world.call(api::Flush { target: "d2".parse().unwrap() }).await.unwrap_err();
    assert_eq!(error.report(), "flush ended without a reply");
    world.call(api::Flush { target: "d1".parse().unwrap() }).await.unwrap();
    world.stop().await;
}

#[tokio::test]
async fn the_server_stops_though_a_call_never_ends() {
    let (begun, mut begins) = mpsc::channel(1);
    let world = World::new(move |_, _, _| {
        let begun = begun.clone();
        async move {
            begun.send(()).await.unwrap();
            never().await
        }
    })
    .await;
    let client = world.client();
    let request = api::Flush { target: "d1".parse().unwrap() };
    let call = tokio::spawn(async move { client.call(&request, &mut |_| ()).await });
    begins.recv().await.unwrap();
    world.stop().await;
    assert_eq!(call.await.unwrap().unwrap_err().kind(), Kind::Failed);
}

#[tokio::test]
async fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.sock");
    drop(UnixListener::bind(&path).unwrap());
    let listener = server::bind(&path).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    let error = server::bind(&path).await.unwrap_err();
    assert_eq!(error.kind(), Kind::DiskBusy);
    drop(listener);
    let error = server::bind(Path::new("/nowhere/c.sock")).await.unwrap_err();
    assert!(error.report().contains("/nowhere/c.sock"), "{error:?}");
}

#[tokio::test]
async fn a_client_without_a_daemon_says_where_it_looked_and_how_to_start_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.sock");
    let client = Client::new(&path, Duration::from_secs(1));
    for dead in [false, true] {
        if dead {
            drop(UnixListener::bind(&path).unwrap());
        }
        let error = client.call(&api::Status {}, &mut |_| ()).await.unwrap_err();
        assert_eq!(error.report(), format!("no daemon listens on {}", path.display()));
        assert!(error.fix().unwrap().contains("blockd serve"));
        assert_eq!(error.kind().exit_code(), 1);
    }
}

#[tokio::test]
async fn a_client_takes_no_nonsense_for_a_reply() {
    for answer in [
        "",
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{\"reply\":",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"reply\":{}}",
        "HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let served = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            tokio::io::AsyncReadExt::read(&mut stream, &mut request).await.unwrap();
            tokio::io::AsyncWriteExt::write_all(&mut stream, answer.as_bytes()).await.unwrap();
        };
        let client = Client::new(&path, Duration::from_secs(60));
        let request = api::Flush { target: "d1".parse().unwrap() };
        let mut ignore = |_| ();
        let (reply, ()) = tokio::join!(client.call(&request, &mut ignore), served);
        let error = reply.expect_err(answer);
        assert_eq!(error.kind(), Kind::Failed, "{answer:?}");
        assert!(error.report().contains(path.to_str().unwrap()), "{answer:?}: {error:?}");
    }
}

#[test]
fn requests_and_views_keep_their_words_on_the_wire() {
    let attach = json!({
        "target": "d1@s", "access": "branch", "wait_seconds": 0, "accept_loss": false, "socket": null,
        "tcp": "127.0.0.1:10809", "device": "/dev/nbd3", "discard": true,
    });
    let parsed: api::Attach = serde_json::from_value(attach.clone()).unwrap();
    assert_eq!(serde_json::to_value(parsed).unwrap(), attach);
    assert_eq!(serde_json::to_value(view::DiskState::HeldElsewhere).unwrap(), "held-elsewhere");
    assert_eq!(serde_json::to_value(view::Durability::Remote).unwrap(), "remote");
    for wrong in
        ["", "nbd0", "/dev/nbd", "/dev/nbdx", "/dev/nbd+1", "/dev/nbd-1", "/dev/nbd0p1", "Auto"]
    {
        assert!(wrong.parse::<api::Device>().is_err(), "{wrong:?}");
    }
}

#[tokio::test]
async fn calls_run_side_by_side() {
    let waiting = Arc::new(Mutex::new(Vec::<oneshot::Sender<()>>::new()));
    let world = World::new(move |_, _, _| {
        let waiting = Arc::clone(&waiting);
        async move {
            // The first waits for the second: one after the other, they would wait for ever.
            let wait = {
                let mut waiting = waiting.lock().unwrap();
                match waiting.pop() {
                    Some(first) => {
                        first.send(()).unwrap();
                        None
                    }
                    None => {
                        let (sender, receiver) = oneshot::channel();
                        waiting.push(sender);
                        Some(receiver)
                    }
                }
            };
            if let Some(wait) = wait {
                wait.await.unwrap();
            }
            Ok(flush_reply())
        }
    })
    .await;
    let flush = || world.call(api::Flush { target: "d1".parse().unwrap() });
    let (first, second) = tokio::join!(flush(), flush());
    assert!(first.is_ok() && second.is_ok());
    world.stop().await;
}
