//! Serves disks in memory until it is interrupted:
//!
//! ```text
//! memory --socket PATH [--name NAME]... [--size BYTES] [--tcp ADDRESS:PORT]
//! ```

#![expect(clippy::print_stderr, reason = "an example talks to the terminal")]

use std::error::Error;
use std::sync::Arc;

use nbd_server::{Listener, Server, ServerConfig};
use tokio::net::{TcpListener, UnixListener};

use crate::disk::{Disks, MemoryDisk};

mod disk;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mut names, mut size, mut socket, mut tcp) = (Vec::new(), 1 << 30, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--name" => names.push(value),
            "--size" => size = value.parse()?,
            "--socket" => socket = Some(value),
            "--tcp" => tcp = Some(value),
            _ => return Err(format!("unknown argument {flag}").into()),
        }
    }
    if names.is_empty() {
        names.push("memory".to_owned());
    }
    let disks = names.iter().map(|name| Arc::new(MemoryDisk::new(name, size))).collect();
    let listener = match (&socket, tcp) {
        (Some(path), None) => Listener::Unix(UnixListener::bind(path)?),
        (None, Some(address)) => Listener::Tcp(TcpListener::bind(address).await?),
        _ => return Err("give either --socket PATH or --tcp ADDRESS:PORT".into()),
    };
    let server = Server::start(listener, Arc::new(Disks(disks)), ServerConfig::default());
    eprintln!("serving {names:?}");
    tokio::signal::ctrl_c().await?;
    server.shutdown().await;
    if let Some(path) = socket {
        std::fs::remove_file(path)?;
    }
    Ok(())
}
