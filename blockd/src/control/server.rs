//! The daemon's side of the control socket: a router over [`Control`], bounded in size and time.
//!
//! Every call runs in a task that the server owns, apart from its connection: a caller that goes away
//! tells the call so and does not cut it. Only giving up (see the module above) and the end of the
//! server drop a call's future.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request as HttpRequest, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use serde_json::value::RawValue;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::api::{self, Progress, Request};
use super::wire::{ErrorBody, Failure, LINES, Line, REQUEST_BYTES_MAX, TIMEOUT_HEADER};
use super::{Call, Control};
use crate::config::units::show_duration;
use crate::error::{Error, Kind, Result};
use crate::ids::{DiskName, SnapshotName, Target};

/// How long the end of the server waits for calls that are about to end by themselves.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Longest time limit a caller may ask for: what is longer counts as this.
const TIMEOUT_MAX: Duration = Duration::from_secs(7 * 86_400);

/// Listens on a socket at `path` that its owner and group may use.
///
/// # Errors
/// When another daemon listens there, or the socket cannot be made.
pub async fn bind(path: &Path) -> Result<UnixListener> {
    let failed = |what: &str, error: std::io::Error| {
        Error::new(Kind::Failed, format!("{what} control socket {}", path.display()))
            .with_source(error)
            .with_fix("name a socket in a folder that blockd may write with --control")
    };
    if UnixStream::connect(path).await.is_ok() {
        let message = format!("another daemon listens on {}", path.display());
        return Err(Error::new(Kind::DiskBusy, message)
            .with_fix("stop it, or name another socket with --control"));
    }
    // Made under another name first: the socket appears with its mode, and replaces a dead one at once.
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    if let Err(error) = std::fs::remove_file(&new)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(failed("replace", error));
    }
    let listener = UnixListener::bind(&new).map_err(|error| failed("make", error))?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o660))
        .and_then(|()| std::fs::rename(&new, path))
        .map_err(|error| failed("publish", error))?;
    Ok(listener)
}

/// Serves `control` until `stop` resolves. Calls that still run a moment later are dropped.
///
/// `timeout` is the time limit of callers that name none.
///
/// # Errors
/// When the listener fails.
pub async fn serve(
    listener: UnixListener,
    control: Arc<dyn Control>,
    timeout: Duration,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let (stopping, mut stopped) = watch::channel(false);
    let server = Server { control, timeout, calls: Arc::default() };
    let stop = async move {
        stop.await;
        stopping.send_replace(true);
    };
    let serving =
        axum::serve(listener, router(server.clone())).with_graceful_shutdown(stop).into_future();
    let grace = async {
        // An error is the end of `serving`, which the other branch sees.
        let _ = stopped.wait_for(|stopped| *stopped).await;
        tokio::time::sleep(STOP_GRACE).await;
    };
    let served = tokio::select! {
        served = serving => served,
        () = grace => Ok(()),
    };
    let mut calls = std::mem::take(&mut *server.calls.lock().expect("no call panics in here"));
    calls.shutdown().await;
    served.map_err(|error| Error::new(Kind::Failed, "serve the control socket").with_source(error))
}

#[derive(Clone)]
struct Server {
    control: Arc<dyn Control>,
    timeout: Duration,
    calls: Arc<Mutex<JoinSet<()>>>,
}

/// A request that knows its method of [`Control`].
#[async_trait]
trait Dispatch: Request {
    async fn dispatch(self, control: &dyn Control, call: &Call) -> Result<Self::Reply>;
}

macro_rules! commands {
    ($($method:ident: $request:ident),* $(,)?) => {
        $(
            #[async_trait]
            impl Dispatch for api::$request {
                async fn dispatch(self, control: &dyn Control, call: &Call) -> Result<Self::Reply> {
                    control.$method(call, self).await
                }
            }
        )*

        fn commands() -> Router<Server> {
            Router::new()$(
                .route(
                    &format!("/v1/{}", <api::$request as Request>::COMMAND),
                    post(answer::<api::$request>),
                )
            )*
        }
    };
}

commands! {
    create: Create, list: List, show: Show, usage: Usage, status: Status, attach: Attach,
    detach: Detach, flush: Flush, drain: Drain, snapshot: Snapshot, snapshots: Snapshots,
    fork: Fork, delete: Delete, resize: Resize, check: Check, recover: Recover,
}

fn router(server: Server) -> Router {
    commands()
        .method_not_allowed_fallback(any(method_not_allowed))
        .fallback(no_such_command)
        .with_state(server)
}

async fn no_such_command(uri: Uri) -> Response {
    let message = format!("there is no command at {}", uri.path());
    let fix = "post to /v1/ and the name of a command; is the daemon older than its client?";
    failure(&Error::new(Kind::NotFound, message).with_fix(fix), None)
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let error = Error::new(Kind::InvalidArgument, format!("{} does not take {method}", uri.path()))
        .with_fix("use POST, with the request as a JSON body");
    failure(&error, Some(StatusCode::METHOD_NOT_ALLOWED))
}

fn failure(error: &Error, status: Option<StatusCode>) -> Response {
    let status = status.unwrap_or_else(|| {
        StatusCode::from_u16(error.kind().http_status()).expect("kinds have statuses of HTTP")
    });
    json(status, &Failure { error: ErrorBody::from(error) })
}

fn json<T: serde::Serialize>(status: StatusCode, value: &T) -> Response {
    let body = serde_json::to_vec(value).expect("replies are plain data");
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Answers one call, whole or in lines.
async fn answer<R: Dispatch>(State(server): State<Server>, http: HttpRequest) -> Response {
    let (head, body) = http.into_parts();
    let body = match axum::body::to_bytes(body, REQUEST_BYTES_MAX).await {
        Ok(body) => body,
        Err(_) => {
            let message = format!("the body is cut short or above {REQUEST_BYTES_MAX} bytes");
            let error = Error::new(Kind::InvalidArgument, message).with_fix("send a shorter one");
            return failure(&error, Some(StatusCode::PAYLOAD_TOO_LARGE));
        }
    };
    let started = parse_request::<R>(&body).and_then(|request| {
        let timeout = time_limit(&head.headers, server.timeout)?;
        Ok(start(&server, request, timeout))
    });
    let mut running = match started {
        Ok(running) => running,
        Err(error) => return failure(&error, None),
    };
    let wants_lines = head.headers.get(header::ACCEPT).is_some_and(|accept| accept == LINES);
    if wants_lines {
        let lines = futures_util::stream::unfold(Some(running), |running| async {
            let mut running = running?;
            let line = running.next_line().await;
            let last = !matches!(line, Line::Progress(_));
            Some((Ok::<_, std::convert::Infallible>(line.to_bytes()), (!last).then_some(running)))
        });
        return ([(header::CONTENT_TYPE, LINES)], Body::from_stream(lines)).into_response();
    }
    match running.reply().await {
        Ok(reply) => json(StatusCode::OK, &reply),
        Err(error) => failure(&error, None),
    }
}

/// A call in its task, as its connection sees it. Dropped, it tells the call that the caller is gone.
struct Running {
    command: &'static str,
    progress: watch::Receiver<Progress>,
    reply: oneshot::Receiver<Result<Box<RawValue>>>,
    gone: watch::Sender<bool>,
}

impl Running {
    async fn reply(&mut self) -> Result<Box<RawValue>> {
        (&mut self.reply).await.unwrap_or_else(|_| Err(died(self.command)))
    }

    async fn next_line(&mut self) -> Line {
        // Progress first, so that what a call said before its end is not lost.
        tokio::select! {
            biased;
            Ok(()) = self.progress.changed() => Line::Progress(self.progress.borrow_and_update().clone()),
            reply = &mut self.reply => match reply.unwrap_or_else(|_| Err(died(self.command))) {
                Ok(reply) => Line::Reply(reply),
                Err(error) => Line::Error(ErrorBody::from(&error)),
            },
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.gone.send_replace(true);
    }
}

fn died(command: &str) -> Error {
    Error::new(Kind::Failed, format!("{command} ended without a reply"))
        .with_fix("the daemon stopped or failed; see its log")
}

fn start<R: Dispatch>(server: &Server, request: R, timeout: Duration) -> Running {
    let gone = watch::Sender::new(false);
    let (progress_sender, progress) = watch::channel(Progress::default());
    let call = Call { progress: progress_sender, gone: gone.clone() };
    let (reply_sender, reply) = oneshot::channel();
    let control = Arc::clone(&server.control);
    let task = async move {
        let begun = Instant::now();
        let result = run(request, &*control, &call, timeout).await;
        let took = show_duration(begun.elapsed());
        match &result {
            Ok(_) => tracing::debug!("{} done in {took}", R::COMMAND),
            Err(error) if error.kind().http_status() == 500 => {
                tracing::warn!("{} failed after {took}: {}", R::COMMAND, error.report());
            }
            Err(error) => tracing::debug!("{} refused: {}", R::COMMAND, error.report()),
        }
        // A caller that is gone does not want the reply.
        let _ = reply_sender.send(result);
    };
    let mut calls = server.calls.lock().expect("no call panics in here");
    while calls.try_join_next().is_some() {}
    calls.spawn(task);
    Running { command: R::COMMAND, progress, reply, gone }
}

/// Runs a call to its end, or gives up when nothing has moved for `timeout`.
async fn run<R: Dispatch>(
    request: R,
    control: &dyn Control,
    call: &Call,
    timeout: Duration,
) -> Result<Box<RawValue>> {
    let mut moved = call.progress.subscribe();
    let mut deadline = Instant::now() + timeout + request.patience().min(TIMEOUT_MAX);
    let mut work = std::pin::pin!(request.dispatch(control, call));
    let reply = loop {
        tokio::select! {
            biased;
            reply = &mut work => break reply?,
            Ok(()) = moved.changed() => deadline = deadline.max(Instant::now() + timeout),
            () = tokio::time::sleep_until(deadline) => return Err(gave_up(R::COMMAND, timeout)),
        }
    };
    Ok(serde_json::value::to_raw_value(&reply).expect("replies are plain data"))
}

fn gave_up(command: &str, timeout: Duration) -> Error {
    let waited = show_duration(timeout);
    Error::new(
        Kind::StoreUnavailable,
        format!("{command} gave up: the store did not answer for {waited}"),
    )
    .with_fix("see blockd status; try again, or wait longer with --timeout")
}

fn time_limit(headers: &HeaderMap, default: Duration) -> Result<Duration> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else {
        return Ok(default);
    };
    match value.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(ms) if ms > 0 => Ok(Duration::from_millis(ms).min(TIMEOUT_MAX)),
        _ => Err(Error::new(Kind::InvalidArgument, format!("{TIMEOUT_HEADER} is not a time"))
            .with_fix("write milliseconds, at least 1")),
    }
}

fn parse_request<R: Request>(body: &Bytes) -> Result<R> {
    let body = if body.is_empty() { b"{}" } else { body.as_ref() };
    serde_json::from_slice(body).map_err(|error| {
        wrong_name(body).unwrap_or_else(|| {
            let message = format!("the request of {} is not understood", R::COMMAND);
            Error::new(Kind::InvalidArgument, message)
                .with_source(error)
                .with_fix("correct the field; is the daemon older than its client?")
        })
    })
}

/// The error of the first name in a request that is not valid: it has its own code.
fn wrong_name(body: &[u8]) -> Option<Error> {
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(body).ok()?;
    fields.iter().find_map(|(field, value)| {
        let text = value.as_str()?;
        match field.as_str() {
            "name" | "new" => text.parse::<DiskName>().err(),
            "target" => text.parse::<Target>().err(),
            "snapshot" => text.parse::<SnapshotName>().err(),
            _ => None,
        }
    })
}
