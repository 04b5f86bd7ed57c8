//! The proxy at work: takes a request, asks the rules, forwards, and answers or does not.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper::header::{
    CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderMap, IF_MATCH, IF_NONE_MATCH, RANGE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

use super::{Entry, Fault, Shared, Weather};

/// A request kept back.
#[derive(Debug)]
pub struct HeldRequest(Request<Bytes>);

/// A body that the proxy sends: whole, or ending before its announced length.
type Body = http_body_util::combinators::BoxBody<Bytes, io::Error>;

/// Serves connections until the runtime ends.
pub(super) async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { return };
        if *shared.weather.borrow() == Weather::Refusing {
            continue;
        }
        tokio::spawn(connection(stream, Arc::clone(&shared)));
    }
}

/// Serves one connection; a dropped one ends with its error.
async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let service = service_fn(move |request| serve(Arc::clone(&shared), request));
    let mut server = hyper::server::conn::http1::Builder::new();
    let served = server.half_close(true).serve_connection(TokioIo::new(stream), service).await;
    // A connection that ends early, by either side, is what faults are made of.
    drop(served);
}

/// Why a connection is closed without an answer.
fn dropped() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "dropped by a rule")
}

async fn serve(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Body>, io::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let request = Request::from_parts(head, body);
    let mut entry = describe(&request);
    if is_cut_off(&shared) {
        shared.state().log.push(entry);
        return Err(silence_until_healed(&shared).await);
    }
    slow_down(&shared, request.body().len()).await;
    let fault = {
        let mut state = shared.state();
        let (method, key) = (&entry.method, &entry.key);
        state.rules.iter_mut().find_map(|active| active.take(method, key))
    };
    let answer = answer(&shared, request, fault, &mut entry).await;
    if is_cut_off(&shared) {
        shared.state().log.push(entry);
        return Err(silence_until_healed(&shared).await);
    }
    entry.status = answer.as_ref().ok().map(|response| response.status().as_u16());
    shared.state().log.push(entry);
    answer
}

/// What the client gets under `fault`.
async fn answer(
    shared: &Shared,
    request: Request<Bytes>,
    fault: Option<Fault>,
    entry: &mut Entry,
) -> Result<Response<Body>, io::Error> {
    match &fault {
        Some(Fault::Answer(status, code)) => return Ok(error_reply(*status, code)),
        Some(Fault::OkWithError(code)) => return Ok(error_reply(200, code)),
        Some(Fault::OkEmpty) => return Ok(Response::new(whole(Bytes::new()))),
        Some(Fault::Drop) => return Err(dropped()),
        Some(Fault::NeverAnswer) => return silence(shared, entry).await,
        Some(Fault::DelayBefore(span)) => tokio::time::sleep(*span).await,
        Some(Fault::Hold) => {
            shared.state().held.push(HeldRequest(request));
            return Err(dropped());
        }
        _ => {}
    }
    let is_head = request.method() == Method::HEAD;
    let reply = forward(shared, request).await?;
    entry.store_status = Some(reply.status().as_u16());
    let (head, body) = reply.into_parts();
    entry.received_bytes = u64::try_from(body.len()).expect("a length fits 64 bits");
    slow_down(shared, body.len()).await;
    let body = match fault {
        Some(Fault::DelayAfter(span)) => {
            tokio::time::sleep(span).await;
            whole(body)
        }
        Some(Fault::ApplyThenDrop) => return Err(dropped()),
        Some(Fault::IgnoreConditions) if head.status == StatusCode::PRECONDITION_FAILED => {
            return Ok(made_up_success());
        }
        Some(Fault::ApplyThenNeverAnswer) => return silence(shared, entry).await,
        Some(Fault::CutBody(at)) => cut(body.slice(..at.min(body.len()))),
        Some(Fault::FlipByte(at)) => whole(flip(&body, at)),
        Some(Fault::Replace(from, to)) => {
            let text = String::from_utf8_lossy(&body).replace(from, to);
            let mut response = Response::new(whole(Bytes::from(text)));
            *response.status_mut() = head.status;
            copy_headers(&head.headers, response.headers_mut());
            response.headers_mut().remove(CONTENT_LENGTH);
            return Ok(response);
        }
        _ => whole(body),
    };
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    copy_headers(&head.headers, response.headers_mut());
    if is_head {
        *response.body_mut() = whole(Bytes::new());
    }
    Ok(response)
}

/// Never answers; the entry is in the log all the same, since the request did arrive.
async fn silence(shared: &Shared, entry: &Entry) -> Result<Response<Body>, io::Error> {
    shared.state().log.push(entry.clone());
    std::future::pending().await
}

/// Whether nothing passes between client and store now.
fn is_cut_off(shared: &Shared) -> bool {
    matches!(*shared.weather.borrow(), Weather::Refusing | Weather::BlackHole)
}

/// Waits while the store is a black hole. What vanished stays vanished when the link is back: the
/// connection is dead.
async fn silence_until_healed(shared: &Shared) -> io::Error {
    let mut weather = shared.weather.subscribe();
    // An error means that the proxy is gone, which is the end of the silence as well.
    let _ = weather.wait_for(|now| *now != Weather::BlackHole).await;
    dropped()
}

/// Takes as long as a slow link would for `count` bytes.
async fn slow_down(shared: &Shared, count: usize) {
    let weather = *shared.weather.borrow();
    if let Weather::Slow(bytes_per_second) = weather {
        let count = u64::try_from(count).expect("a length fits 64 bits");
        tokio::time::sleep(Duration::from_millis(count * 1000 / bytes_per_second)).await;
    }
}

/// Applies a held request, late; returns the store's status.
pub(super) async fn apply(shared: &Shared, held: HeldRequest) -> u16 {
    let reply = forward(shared, held.0).await.expect("the store answers a held request");
    reply.status().as_u16()
}

/// Sends a request to the store as it is, over a connection of its own.
async fn forward(shared: &Shared, request: Request<Bytes>) -> Result<Response<Bytes>, io::Error> {
    let stream = TcpStream::connect(shared.store).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    let driver = tokio::spawn(connection);
    let reply = sender.send_request(request.map(Full::new)).await.map_err(io::Error::other)?;
    let (head, body) = reply.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    drop(sender);
    driver.abort();
    Ok(Response::from_parts(head, body))
}

fn describe(request: &Request<Bytes>) -> Entry {
    let path = request.uri().path().trim_start_matches('/');
    let (_bucket, key) = path.split_once('/').unwrap_or((path, ""));
    let header = |name| {
        let value = request.headers().get(name)?;
        Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    Entry {
        method: request.method().to_string(),
        key: key.to_owned(),
        query: request.uri().query().unwrap_or_default().to_owned(),
        if_match: header(IF_MATCH),
        if_none_match: header(IF_NONE_MATCH),
        range: header(RANGE),
        status: None,
        store_status: None,
        sent_bytes: u64::try_from(request.body().len()).expect("a length fits 64 bits"),
        received_bytes: 0,
    }
}

/// A reply with an error in the words of S3.
fn error_reply(status: u16, code: &str) -> Response<Body> {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
         <Message>made up by a test</Message></Error>"
    );
    let mut response = Response::new(whole(Bytes::from(text)));
    *response.status_mut() = StatusCode::from_u16(status).expect("a test names a valid status");
    let xml = "application/xml".parse().expect("a valid header value");
    response.headers_mut().insert(CONTENT_TYPE, xml);
    response
}

/// What a store says of a PUT that it has done, or claims to have.
fn made_up_success() -> Response<Body> {
    let mut response = Response::new(whole(Bytes::new()));
    let tag = "\"00000000000000000000000000000000\"".parse().expect("a valid header value");
    response.headers_mut().insert(ETAG, tag);
    response
}

fn copy_headers(from: &HeaderMap, to: &mut HeaderMap) {
    for (name, value) in from {
        // The proxy frames its replies itself.
        if name != hyper::header::TRANSFER_ENCODING && name != hyper::header::CONNECTION {
            to.append(name.clone(), value.clone());
        }
    }
}

fn flip(body: &Bytes, at: usize) -> Bytes {
    let mut bytes = body.to_vec();
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1;
    }
    Bytes::from(bytes)
}

fn whole(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never: Infallible| match never {}).boxed()
}

/// A body that breaks off after `start`.
fn cut(start: Bytes) -> Body {
    BodyExt::boxed(CutBody::Start(start))
}

/// Its start, then a pause in which hyper sends what it has, then the break.
enum CutBody {
    Start(Bytes),
    Pause,
    Break,
}

impl hyper::body::Body for CutBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match std::mem::replace(&mut *self, Self::Break) {
            Self::Start(bytes) => {
                *self = Self::Pause;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Self::Pause => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Self::Break => Poll::Ready(Some(Err(dropped()))),
        }
    }
}
