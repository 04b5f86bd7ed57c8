//! HTTP/1.1 for the SDK: one pool of connections, with an eye on whether bytes move.
//!
//! A request is ended by silence, not by the clock, so a slow link is slow and not stalled:
//!
//! - a connection is there within [`Limits::connect`];
//! - while the body is sent, each piece must be taken within [`Limits::stall`]. `TCP_NOTSENT_LOWAT` keeps
//!   the kernel from swallowing the body whole, so what was taken is really on its way;
//! - when the body is out, the answer may take its time, within the [`Patience`] learned so far;
//! - while the answer's body is received, each piece must come within the same time.
//!
//! A request that is given up closes its connection, and idle ones are closed after [`IDLE_MAX`]: no
//! dead connection stays in the pool to be tried after an outage.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_types::body::SdkBody;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{ClientConfig, RootCertStore};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

/// How long each part of a request may be without a sign of life.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) connect: Duration,
    /// Between two pieces of a body, either way.
    pub(super) stall: Duration,
    /// For the answer to a small request, at first.
    pub(super) answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            stall: Duration::from_secs(30),
            answer: Duration::from_secs(15),
        }
    }
}

const IDLE_MAX: Duration = Duration::from_secs(20);

/// How long data may stay unacknowledged, and how long a silent connection is left unprobed.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);
const KEEPALIVE: Duration = Duration::from_secs(10);

/// What the kernel may hold unsent: at 16 KiB/s it is gone within a third of the stall limit.
const UNSENT_BYTES_MAX: u32 = 128 * 1024;

/// The body goes to the connection in pieces of this size, each one a sign of life.
const PIECE_BYTES: usize = 64 * 1024;

/// From this size on, an answer may have to wait for the store to digest the body.
const LARGE_BODY_BYTES: u64 = 256 * 1024;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The request never left: there was no connection to send it on.
#[derive(Debug)]
pub(super) struct NotConnected(hyper_util::client::legacy::Error);

impl fmt::Display for NotConnected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no connection")
    }
}

impl std::error::Error for NotConnected {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its own text adds nothing; its cause says refused, timed out, unknown host.
        std::error::Error::source(&self.0)
    }
}

/// One pool of connections, as the SDK wants it.
#[derive(Clone)]
pub(super) struct Http {
    client: Client<HttpsConnector<Tcp>, Upload>,
    small: Arc<Patience>,
    large: Arc<Patience>,
    limits: Limits,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Http")
    }
}

impl Http {
    /// A pool of its own. Without `https`, a system that has no root certificates will do.
    pub(super) fn new(https: bool, limits: Limits) -> std::io::Result<Self> {
        let mut tcp = TcpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(limits.connect));
        tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX));
        tcp.set_keepalive(Some(KEEPALIVE));
        tcp.set_keepalive_interval(Some(KEEPALIVE));
        tcp.set_keepalive_retries(Some(2));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls_config(https)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(Tcp(tcp));
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_MAX)
            .pool_timer(TokioTimer::new())
            .build(connector);
        // A small request is given up within a minute, so that an outage is over for us a minute
        // after it is over. A large one may have to be digested by a store that is busy.
        let patience = |first: u32, last: u32| Patience {
            millis: AtomicU64::new(millis(limits.answer * first)),
            min: limits.answer * first,
            max: limits.answer * last,
        };
        let (small, large) = (Arc::new(patience(1, 3)), Arc::new(patience(3, 24)));
        Ok(Self { client, small, large, limits })
    }

    async fn send(self, request: HttpRequest) -> Result<HttpResponse, ConnectorError> {
        let request =
            request.try_into_http1x().map_err(|error| ConnectorError::user(error.into()))?;
        let progress = Arc::new(Progress::new());
        let mut patience = &self.small;
        let request = request.map(|body| {
            let upload = Upload::new(body, Arc::clone(&progress));
            if upload.unsent >= LARGE_BODY_BYTES {
                patience = &self.large;
            }
            upload
        });
        let mut answer = std::pin::pin!(self.client.request(request));
        let answer = loop {
            let (since, phase) = progress.get();
            let silence = match phase {
                Phase::Sending => self.limits.stall,
                Phase::Waiting => patience.get(),
            };
            match tokio::time::timeout_at(since + silence, &mut answer).await {
                Ok(answer) => break answer,
                Err(_) if progress.get() != (since, phase) => {}
                Err(_) => {
                    if phase == Phase::Waiting {
                        patience.ran_out();
                    }
                    let text = format!("{} for {silence:.0?}", phase.complaint());
                    return Err(ConnectorError::timeout(text.into()));
                }
            }
        };
        let answer = answer.map_err(|error| match error.is_connect() {
            true => ConnectorError::io(Box::new(NotConnected(error))),
            false => ConnectorError::io(error.into()),
        })?;
        patience.answered(progress.get().0.elapsed());
        let answer =
            answer.map(|body| SdkBody::from_body_1_x(Download::new(body, self.limits.stall)));
        HttpResponse::try_from(answer).map_err(|error| ConnectorError::other(error.into(), None))
    }
}

impl HttpConnector for Http {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        HttpConnectorFuture::new(self.clone().send(request))
    }
}

impl HttpClient for Http {
    fn http_connector(
        &self,
        _: &HttpConnectorSettings,
        _: &RuntimeComponents,
    ) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

/// The provider is named, for a process where two are compiled in has no default one.
fn tls_config(https: bool) -> std::io::Result<ClientConfig> {
    let builder = || {
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has the default protocol versions")
    };
    let rooted = match builder().with_native_roots() {
        Err(_) if !https => builder().with_root_certificates(RootCertStore::empty()),
        rooted => rooted?,
    };
    Ok(rooted.with_no_client_auth())
}

/// TCP connections that keep little unsent.
#[derive(Clone)]
struct Tcp(TcpConnector);

impl Service<http::Uri> for Tcp {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: http::Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let stream = connecting.await?;
            SockRef::from(stream.inner()).set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
            Ok(stream)
        })
    }
}

/// How far one request has come.
#[derive(Debug)]
struct Progress {
    state: Mutex<(Instant, Phase)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The body is on its way.
    Sending,
    /// The body is out.
    Waiting,
}

impl Phase {
    fn complaint(self) -> &'static str {
        match self {
            Phase::Sending => "the connection took nothing",
            Phase::Waiting => "the store did not answer",
        }
    }
}

impl Progress {
    fn new() -> Self {
        Self { state: Mutex::new((Instant::now(), Phase::Sending)) }
    }

    fn moved(&self, phase: Phase) {
        *self.lock() = (Instant::now(), phase);
    }

    fn get(&self) -> (Instant, Phase) {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, (Instant, Phase)> {
        self.state.lock().expect("no code panics while it holds the progress")
    }
}

/// How long to wait for an answer: more after it proved too little, less again as answers come fast.
#[derive(Debug)]
struct Patience {
    millis: AtomicU64,
    min: Duration,
    max: Duration,
}

impl Patience {
    fn get(&self) -> Duration {
        Duration::from_millis(self.millis.load(Relaxed))
    }

    fn ran_out(&self) {
        self.set(self.get() * 2);
    }

    /// Four times what an answer took is enough for the next; come down to that gently.
    fn answered(&self, elapsed: Duration) {
        self.set((elapsed * 4).max(self.get() * 3 / 4));
    }

    fn set(&self, patience: Duration) {
        self.millis.store(millis(patience.clamp(self.min, self.max)), Relaxed);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A request's body, handed over piece by piece.
struct Upload {
    body: SdkBody,
    piece: Bytes,
    unsent: u64,
    progress: Arc<Progress>,
}

impl Upload {
    fn new(body: SdkBody, progress: Arc<Progress>) -> Self {
        // All our bodies are in memory, so their length is known.
        let unsent = body.content_length().unwrap_or(0);
        if unsent == 0 {
            progress.moved(Phase::Waiting);
        }
        Self { body, piece: Bytes::new(), unsent, progress }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.piece.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                None => return Poll::Ready(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.piece = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
            }
        }
        let bytes = self.piece.len().min(PIECE_BYTES);
        let piece = self.piece.split_to(bytes);
        self.unsent = self.unsent.saturating_sub(crate::counters::count_of(bytes));
        let phase = if self.unsent == 0 { Phase::Waiting } else { Phase::Sending };
        self.progress.moved(phase);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.unsent == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.unsent)
    }
}

/// An answer's body that must not fall silent.
struct Download<B> {
    body: B,
    silence: Pin<Box<Sleep>>,
    silence_max: Duration,
}

impl<B> Download<B> {
    fn new(body: B, silence_max: Duration) -> Self {
        Self { body, silence: Box::pin(tokio::time::sleep(silence_max)), silence_max }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for Download<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let limit = Instant::now() + self.silence_max;
            self.silence.as_mut().reset(limit);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        ready!(self.silence.as_mut().poll(context));
        let text = format!("the store fell silent for {:.0?}", self.silence_max);
        Poll::Ready(Some(Err(text.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
