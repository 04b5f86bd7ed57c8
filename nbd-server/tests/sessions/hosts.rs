//! Servers for tests, and an export that does what a test tells it to.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use nbd_server::{
    Durability, Export, ExportDirectory, ExportError, ExportErrorKind, ExportInfo, Extent,
    ExtentKind, Hole, Listener, OpenError, ReadPart, Server, ServerConfig,
};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::client::Client;
use crate::disk::{Disks, MemoryDisk};

/// A server on a runtime of its own, and the socket it listens on.
pub(crate) struct Host<D: ExportDirectory> {
    pub(crate) runtime: Runtime,
    pub(crate) server: Server<D>,
    pub(crate) socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl<D: ExportDirectory> Host<D> {
    pub(crate) fn start(directory: D, config: ServerConfig) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let entered = runtime.enter();
        let listener = Listener::Unix(UnixListener::bind(&socket).unwrap());
        let server = Server::start(listener, Arc::new(directory), config);
        drop(entered);
        Self { runtime, server, socket, _dir: dir }
    }

    pub(crate) fn enter(&self, name: &str) -> Client {
        Client::enter(&self.socket, name)
    }

    /// Waits until so many connections are listed. There is no event to wait for from outside,
    /// so this asks again and again.
    pub(crate) fn until_connections(&self, count: usize) {
        self.runtime.block_on(async {
            let patience = tokio::time::timeout(Duration::from_secs(20), async {
                while self.server.connections().len() != count {
                    tokio::task::yield_now().await;
                }
            });
            patience.await.unwrap_or_else(|_| panic!("{:#?}", self.server.connections()));
        });
    }
}

/// One empty disk in memory, `d1`.
pub(crate) fn memory(size: u64) -> Host<Disks> {
    Host::start(Disks(vec![Arc::new(MemoryDisk::new("d1", size))]), ServerConfig::default())
}

/// Reads from here fail.
pub(crate) const FAILS_AT: u64 = 1 << 20;
/// Reads from here panic.
pub(crate) const PANICS_AT: u64 = 2 << 20;
/// Reads from here yield one byte too few.
pub(crate) const SHORT_AT: u64 = 3 << 20;

/// What a puppet was asked, in the order of first polls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Read(u64),
    Write(u64, Durability),
    Flush,
    Trim(u64, Durability),
    Zeroes(u64, Hole, Durability),
    Cache(u64),
}

/// What happened to the calls so far.
#[derive(Debug, Default, Clone)]
pub(crate) struct Journal {
    pub(crate) started: Vec<Call>,
    pub(crate) finished: usize,
    pub(crate) dropped: usize,
}

/// An export without bytes: everything reads as `0x5a`. Its gate holds every call back.
#[derive(Debug)]
pub(crate) struct Puppet {
    pub(crate) size: AtomicU64,
    pub(crate) read_only: bool,
    pub(crate) gate: watch::Sender<bool>,
    pub(crate) journal: watch::Sender<Journal>,
}

impl Puppet {
    /// With its gate open.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            size: AtomicU64::new(1 << 30),
            read_only: false,
            gate: watch::Sender::new(true),
            journal: watch::Sender::default(),
        })
    }

    /// Waits until the calls so far are as they should be.
    pub(crate) async fn until(&self, condition: impl FnMut(&Journal) -> bool) -> Journal {
        let mut journal = self.journal.subscribe();
        let reached = tokio::time::timeout(Duration::from_secs(20), journal.wait_for(condition));
        reached.await.expect("the export is asked what it should be").unwrap().clone()
    }

    async fn call(&self, call: Call) {
        self.journal.send_modify(|journal| journal.started.push(call));
        let mut running = Running { puppet: self, finished: false };
        self.gate.subscribe().wait_for(|open| *open).await.unwrap();
        running.finished = true;
    }
}

/// Notes how a call ended.
struct Running<'a> {
    puppet: &'a Puppet,
    finished: bool,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.puppet.journal.send_modify(|journal| {
            if self.finished { journal.finished += 1 } else { journal.dropped += 1 }
        });
    }
}

impl Export for Puppet {
    fn info(&self) -> ExportInfo {
        ExportInfo { read_only: self.read_only, ..ExportInfo::new("puppet", self.size()) }
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    async fn read(&self, offset: u64, len: u32) -> Result<Vec<ReadPart>, ExportError> {
        self.call(Call::Read(offset)).await;
        let len = usize::try_from(len).unwrap();
        match offset {
            FAILS_AT => Err(ExportError::new(ExportErrorKind::Io, "block 7 is gone")),
            PANICS_AT => panic!("the export was told to panic"),
            SHORT_AT => Ok(vec![ReadPart::Data(vec![0x5a; len - 1].into())]),
            _ => Ok(vec![ReadPart::Data(vec![0x5a; len].into())]),
        }
    }

    async fn write(
        &self,
        offset: u64,
        _: Bytes,
        durability: Durability,
    ) -> Result<(), ExportError> {
        self.call(Call::Write(offset, durability)).await;
        Ok(())
    }

    async fn flush(&self) -> Result<(), ExportError> {
        self.call(Call::Flush).await;
        Ok(())
    }

    async fn trim(&self, offset: u64, _: u64, durability: Durability) -> Result<(), ExportError> {
        self.call(Call::Trim(offset, durability)).await;
        Ok(())
    }

    async fn write_zeroes(
        &self,
        offset: u64,
        _: u64,
        hole: Hole,
        durability: Durability,
    ) -> Result<(), ExportError> {
        self.call(Call::Zeroes(offset, hole, durability)).await;
        Ok(())
    }

    async fn cache(&self, offset: u64, _: u64) -> Result<(), ExportError> {
        self.call(Call::Cache(offset)).await;
        Ok(())
    }

    async fn extents(&self, _: u64, len: u64) -> Result<Vec<Extent>, ExportError> {
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }
}

/// A directory of a single puppet, under any name.
#[derive(Debug)]
pub(crate) struct Stage(pub(crate) Arc<Puppet>);

impl ExportDirectory for Stage {
    type Export = Puppet;

    async fn open(&self, _: &str) -> Result<Arc<Puppet>, OpenError> {
        Ok(Arc::clone(&self.0))
    }

    async fn list(&self) -> Vec<String> {
        vec!["puppet".into()]
    }
}

pub(crate) fn puppet(config: ServerConfig) -> (Host<Stage>, Arc<Puppet>) {
    let puppet = Puppet::new();
    (Host::start(Stage(Arc::clone(&puppet)), config), puppet)
}
