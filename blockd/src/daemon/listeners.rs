//! The sockets that exports are offered on: opened for the first export, closed with the last.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nbd_server::{ConnectionInfo, Listener, Server, ServerConfig};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::Mutex;

use super::exports::{Export, Exports};
use crate::config::SOCKET_PATH_LEN_MAX;
use crate::error::{Error, Kind, Result};
use crate::ids::Target;

/// Where an export is offered.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

impl Address {
    /// The NBD URI of an export at this address.
    #[must_use]
    pub(super) fn uri(&self, target: &Target) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///{target}?socket={}", path.display()),
            Self::Tcp(address) => format!("nbd://{address}/{target}"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[derive(Debug)]
struct Open {
    server: Server<Exports>,
    exports: Arc<Exports>,
}

/// Every open listener of the daemon.
#[derive(Debug)]
pub(super) struct Listeners {
    open: Mutex<HashMap<Address, Open>>,
    config: ServerConfig,
}

impl Listeners {
    /// No listener yet; all that will be share the limits of `config`.
    #[must_use]
    pub(super) fn new(config: ServerConfig) -> Self {
        Self { open: Mutex::default(), config }
    }

    /// Offers an export; the listener accepts when this returns.
    ///
    /// # Errors
    /// [`Kind::DiskBusy`] when another process listens there, [`Kind::Failed`] when the address
    /// cannot be used.
    pub(super) async fn offer(&self, address: &Address, export: Arc<Export>) -> Result<()> {
        let mut open = self.open.lock().await;
        if let Some(listener) = open.get(address) {
            listener.exports.insert(export);
            return Ok(());
        }
        let listener = bind(address).await?;
        let exports = Arc::new(Exports::default());
        exports.insert(export);
        let server = Server::start(listener, Arc::clone(&exports), self.config.clone());
        open.insert(address.clone(), Open { server, exports });
        Ok(())
    }

    /// The connections to one export.
    pub(super) async fn clients(&self, address: &Address, target: &Target) -> Vec<ConnectionInfo> {
        let name = target.to_string();
        let open = self.open.lock().await;
        let Some(listener) = open.get(address) else { return Vec::new() };
        let mut clients = listener.server.connections();
        clients.retain(|client| client.export.as_deref() == Some(name.as_str()));
        clients
    }

    /// Takes an export back, so that nobody new finds it.
    pub(super) async fn hide(&self, address: &Address, target: &Target) {
        if let Some(listener) = self.open.lock().await.get(address) {
            listener.exports.remove(&target.to_string());
        }
    }

    /// Ends the connections of a hidden export; its listener stays.
    pub(super) async fn disconnect(&self, address: &Address, target: &Target) {
        if let Some(listener) = self.open.lock().await.get(address) {
            listener.server.disconnect(&target.to_string()).await;
        }
    }

    /// Ends the connections of a hidden export, and its listener when it was the last there.
    pub(super) async fn close(&self, address: &Address, target: &Target) {
        let mut open = self.open.lock().await;
        let Some(listener) = open.get(address) else { return };
        listener.server.disconnect(&target.to_string()).await;
        if listener.exports.is_empty() {
            let listener = open.remove(address).expect("it was just found");
            listener.server.shutdown().await;
            remove_socket(address);
        }
    }

    /// Closes everything: requests in flight are answered or their connections end.
    pub(super) async fn shutdown(&self) {
        for (address, listener) in self.open.lock().await.drain() {
            listener.server.shutdown().await;
            remove_socket(&address);
        }
    }
}

fn remove_socket(address: &Address) {
    if let Address::Unix(path) = address {
        let _ = std::fs::remove_file(path);
    }
}

async fn bind(address: &Address) -> Result<Listener> {
    let listener = match address {
        Address::Unix(path) => bind_unix(path).await.map(Listener::Unix),
        Address::Tcp(address) => TcpListener::bind(address).await.map(Listener::Tcp),
    };
    listener.map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::AddrInUse => Kind::DiskBusy,
            _ => Kind::Failed,
        };
        Error::new(kind, format!("cannot listen on {address}"))
            .with_fix("choose another --socket or --tcp")
            .with_source(error)
    })
}

/// Binds a unix socket, removing one that nobody listens on: a killed process leaves its own.
///
/// # Errors
/// `AddrInUse` when somebody does listen, or when something else than a socket is there.
pub(super) async fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    if path.as_os_str().len() > SOCKET_PATH_LEN_MAX {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            format!("the path is longer than {SOCKET_PATH_LEN_MAX} bytes"),
        ));
    }
    match UnixListener::bind(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket || UnixStream::connect(path).await.is_ok() {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}
