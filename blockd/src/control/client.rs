//! The caller's side of the control socket: one connection a call.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::api::{Progress, Request};
use super::wire::{Failure, LINES, Line, TIMEOUT_HEADER};
use crate::config::units::show_duration;
use crate::error::{Error, Kind, Result};

/// Where a daemon listens when nobody says otherwise.
pub const SOCKET_DEFAULT: &str = "/run/blockd/control.sock";

/// How much longer than the daemon the client waits: the daemon's own giving up says more.
const TIMEOUT_SLACK: Duration = Duration::from_secs(5);

/// Longest line of a reply. A list of ten thousand disks is about 10 MiB.
const LINE_BYTES_MAX: usize = 256 << 20;

/// Calls a daemon.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

impl Client {
    /// A client of the daemon at `socket`, whose calls give up when the store has not answered for `timeout`.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>, timeout: Duration) -> Self {
        Self { socket: socket.into(), timeout }
    }

    /// The socket it calls.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request and waits for its reply. `progress` hears how far a long command is.
    ///
    /// Dropping the future closes the connection, which tells the daemon that nobody waits any more.
    ///
    /// # Errors
    /// What the daemon says; or that there is none, or that it does not answer.
    pub async fn call<R: Request>(
        &self,
        request: &R,
        progress: &mut (dyn FnMut(Progress) + Send),
    ) -> Result<R::Reply> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| self.no_daemon(e))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.broken(e))?;
        let exchange = async {
            let silence = self.timeout.saturating_add(TIMEOUT_SLACK);
            let first = silence.saturating_add(request.patience());
            let sent = sender.send_request(self.encode(request)?);
            let response = self.before(first, sent).await?.map_err(|e| self.broken(e))?;
            let mut lines = Lines { body: response.into_body(), buffer: BytesMut::new() };
            let mut patience = first;
            loop {
                let line =
                    self.before(patience, lines.next()).await?.map_err(|e| self.broken(e))?;
                patience = silence.max(request.patience());
                match self.decode(&line)? {
                    Line::Progress(step) => progress(step),
                    Line::Reply(reply) => {
                        return serde_json::from_str(reply.get()).map_err(|e| self.strange(e));
                    }
                    Line::Error(error) => return Err(error.into()),
                }
            }
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            biased;
            reply = &mut exchange => reply,
            // The connection is done; what it read is still in the exchange.
            _ = connection => exchange.await,
        }
    }

    fn encode<R: Request>(&self, request: &R) -> Result<hyper::Request<Full<Bytes>>> {
        let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        let body = serde_json::to_vec(request).map_err(|error| {
            Error::new(Kind::InvalidArgument, format!("{} cannot be sent as JSON", R::COMMAND))
                .with_source(error)
                .with_fix("use paths in utf-8")
        })?;
        hyper::Request::post(format!("/v1/{}", R::COMMAND))
            .header(HOST, "blockd")
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, LINES)
            .header(TIMEOUT_HEADER, timeout_ms)
            .body(Full::new(body.into()))
            .map_err(|error| self.broken(error))
    }

    /// A line of the stream; or, from a daemon that refused the request before it ran, a whole body.
    fn decode(&self, line: &[u8]) -> Result<Line> {
        let refused = || serde_json::from_slice::<Failure>(line).map(|f| Line::Error(f.error));
        serde_json::from_slice(line).or_else(|error| refused().map_err(|_| self.strange(error)))
    }

    async fn before<T>(&self, patience: Duration, work: impl Future<Output = T>) -> Result<T> {
        tokio::time::timeout(patience, work).await.map_err(|_| {
            let waited = show_duration(patience);
            let socket = self.socket.display();
            Error::new(Kind::Failed, format!("the daemon at {socket} did not answer for {waited}"))
                .with_fix("see its log")
        })
    }

    fn no_daemon(&self, error: std::io::Error) -> Error {
        let socket = self.socket.display();
        match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                Error::new(Kind::Failed, format!("no daemon listens on {socket}")).with_fix(
                    "start one with `systemctl start blockd` or `blockd serve`, \
                     or name its socket with --control",
                )
            }
            std::io::ErrorKind::PermissionDenied => {
                Error::new(Kind::Failed, format!("not allowed to use {socket}"))
                    .with_fix("become root, or a member of the group of the socket")
            }
            _ => Error::new(Kind::Failed, format!("cannot connect to {socket}"))
                .with_source(error)
                .with_fix("name the daemon's socket with --control"),
        }
    }

    fn broken(&self, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        let message = format!("the daemon at {} closed the connection", self.socket.display());
        Error::new(Kind::Failed, message)
            .with_source(error)
            .with_fix("what was asked may have been done; see `blockd list` and the daemon's log")
    }

    fn strange(&self, error: serde_json::Error) -> Error {
        let message = format!("the reply from {} is not understood", self.socket.display());
        Error::new(Kind::Failed, message)
            .with_source(error)
            .with_fix("use the client and the daemon of one version, and a socket of blockd")
    }
}

/// The lines of a body. A last line may lack its end.
struct Lines {
    body: Incoming,
    buffer: BytesMut,
}

impl Lines {
    async fn next(&mut self) -> Result<Bytes, Box<dyn std::error::Error + Send + Sync>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(searched + end);
                self.buffer.advance(1);
                return Ok(line.freeze());
            }
            searched = self.buffer.len();
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                None if self.buffer.is_empty() => return Err("the reply ends early".into()),
                None => return Ok(self.buffer.split().freeze()),
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(format!("a reply above {LINE_BYTES_MAX} bytes").into());
            }
        }
    }
}
