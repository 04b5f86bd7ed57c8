//! A listener and its connections: accepted within limits, each in a task of its own so that a
//! panic stays there, and all of them ended and awaited at shutdown.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use crate::export::ExportDirectory;
use crate::limits::Limits;
use crate::registry::{ConnectionInfo, Registration, Registry, Stop};
use crate::session;

/// How long a new connection waits for the place of one that was ended for it.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait after a failed accept; out of file descriptors is the usual reason.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// What to ask of the kernel for the replies of a local client.
const SEND_BUFFER_BYTES: usize = 1 << 20;
/// At most one line about refused connections in this time.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// What a server allows its clients.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Shared with other servers, or not.
    pub limits: Arc<Limits>,
    /// Bytes of requests and of unsent replies that one connection may hold.
    pub in_flight_bytes_max: usize,
    /// Requests that one connection may have in flight.
    pub in_flight_requests_max: usize,
    /// The longest read or write. At least 32 MiB, or clients that ask for nothing may fail; a
    /// longer write is answered with an error and skipped.
    pub payload_bytes_max: u32,
    /// How long a client may take to choose an export.
    pub handshake_timeout: Duration,
    /// How long an ending connection may take to finish its requests and send its replies.
    pub closing_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            limits: Limits::new(1024, 1 << 30),
            in_flight_bytes_max: 64 << 20,
            in_flight_requests_max: 1024,
            payload_bytes_max: 32 << 20,
            handshake_timeout: Duration::from_secs(30),
            closing_timeout: Duration::from_secs(10),
        }
    }
}

/// Where clients come from.
#[derive(Debug)]
pub enum Listener {
    /// A socket in the file system; removing it is the caller's affair.
    Unix(UnixListener),
    /// A port.
    Tcp(TcpListener),
}

/// A running server. Dropping it without [`Server::shutdown`] cuts every connection off.
#[derive(Debug)]
pub struct Server<D> {
    shared: Arc<Shared<D>>,
    stop: watch::Sender<bool>,
    accepting: Mutex<JoinSet<()>>,
}

#[derive(Debug)]
struct Shared<D> {
    directory: Arc<D>,
    config: ServerConfig,
    registry: Arc<Registry>,
}

impl<D: ExportDirectory> Server<D> {
    /// Serves the exports of a directory to whoever connects. Needs a runtime with I/O and time.
    pub fn start(listener: Listener, directory: Arc<D>, config: ServerConfig) -> Self {
        let registry = Arc::default();
        let shared = Arc::new(Shared { directory, config, registry });
        let (stop, stopped) = watch::channel(false);
        let mut accepting = JoinSet::new();
        accepting.spawn(Accepting::new(Arc::clone(&shared)).run(listener, stopped));
        Self { shared, stop, accepting: Mutex::new(accepting) }
    }

    /// Everyone who is connected, oldest first.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.shared.registry.connections()
    }

    /// Ends the connections that use an export: requests in flight are finished and answered,
    /// within the closing timeout. Returns when none is left. The directory must refuse the
    /// export by then, or clients come back while this waits.
    pub async fn disconnect(&self, export: &str) {
        self.shared.registry.disconnect(export).await;
    }

    /// Accepts no more, ends all connections as [`Server::disconnect`] does, and returns when the
    /// last is gone. May be called again.
    pub async fn shutdown(&self) {
        self.stop.send_replace(true);
        let mut accepting = self.accepting.lock().await;
        while let Some(result) = accepting.join_next().await {
            report_panic(result);
        }
    }
}

/// The accept loop, which owns the tasks of its connections.
struct Accepting<D> {
    shared: Arc<Shared<D>>,
    tasks: JoinSet<()>,
    complained: Option<Instant>,
}

impl<D: ExportDirectory> Accepting<D> {
    fn new(shared: Arc<Shared<D>>) -> Self {
        Self { shared, tasks: JoinSet::new(), complained: None }
    }

    async fn run(mut self, listener: Listener, mut stopped: watch::Receiver<bool>) {
        loop {
            let accepted = tokio::select! {
                biased;
                // The server that could say so may also be gone.
                _ = stopped.changed() => break,
                Some(result) = self.tasks.join_next() => {
                    report_panic(result);
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok(client) => self.admit(client).await,
                // This one is gone; the next is not concerned.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.complain(&format!("accept failed: {error}"));
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
        drop(listener);
        self.shared.registry.end_all();
        while let Some(result) = self.tasks.join_next().await {
            report_panic(result);
        }
    }

    /// Finds a place for a client, if need be that of a client that has not come to the point.
    async fn admit(&mut self, client: Client) {
        let Some(place) = self.find_place().await else {
            self.complain("too many connections, a client was turned away");
            return;
        };
        let peer = client.peer();
        let (registration, stop) = self.shared.registry.register(peer);
        let shared = Arc::clone(&self.shared);
        match client {
            Client::Unix(stream) => {
                self.tasks.spawn(shared.serve(stream, registration, stop, place));
            }
            Client::Tcp(stream) => {
                self.tasks.spawn(shared.serve(stream, registration, stop, place));
            }
        }
    }

    async fn find_place(&self) -> Option<OwnedSemaphorePermit> {
        let limits = &self.shared.config.limits;
        if let Some(place) = limits.try_connect() {
            return Some(place);
        }
        if !self.shared.registry.end_oldest_negotiation() {
            return None;
        }
        tokio::time::timeout(EVICTION_TIMEOUT, limits.connect()).await.ok().flatten()
    }

    /// Warns, but not for every client of a flood.
    fn complain(&mut self, what: &str) {
        let quiet = self.complained.is_some_and(|then| then.elapsed() < COMPLAINT_INTERVAL);
        if !quiet {
            tracing::warn!("{what}");
            self.complained = Some(Instant::now());
        }
    }
}

impl<D: ExportDirectory> Shared<D> {
    /// One connection. Its place and its entry are given up last, after its export.
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
        self: Arc<Self>,
        stream: S,
        registration: Registration,
        stop: Stop,
        place: OwnedSemaphorePermit,
    ) {
        session::serve(stream, &*self.directory, &self.config, &registration, stop).await;
        drop(registration);
        drop(place);
    }
}

fn report_panic(result: Result<(), JoinError>) {
    if let Err(error) = result {
        tracing::error!(%error, "a connection panicked");
    }
}

/// A client that was accepted.
enum Client {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<Client> {
        let (client, prepared) = match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let prepared = prepare_unix(&stream);
                (Client::Unix(stream), prepared)
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                let prepared = prepare_tcp(&stream);
                (Client::Tcp(stream), prepared)
            }
        };
        if let Err(error) = prepared {
            // It works without, or it is gone already.
            tracing::debug!(%error, "cannot set socket options");
        }
        Ok(client)
    }
}

/// The default holds one reply of 128 KiB, but not two, so that every other write falls short.
/// The kernel grants as much of this as its settings allow.
fn prepare_unix(stream: &UnixStream) -> io::Result<()> {
    Ok(sockopt::set_socket_send_buffer_size(stream, SEND_BUFFER_BYTES)?)
}

/// Replies leave at once, and a peer that vanished without a word is noticed in two minutes.
fn prepare_tcp(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(15))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 4)?)
}

impl Client {
    /// Who it is, for people.
    fn peer(&self) -> String {
        match self {
            Self::Unix(stream) => match stream.peer_cred() {
                Ok(peer) => match peer.pid() {
                    Some(pid) => format!("pid {pid}, uid {}", peer.uid()),
                    None => format!("uid {}", peer.uid()),
                },
                Err(_) => "a local process".to_owned(),
            },
            Self::Tcp(stream) => match stream.peer_addr() {
                Ok(address) => address.to_string(),
                Err(_) => "a client that is gone".to_owned(),
            },
        }
    }
}
