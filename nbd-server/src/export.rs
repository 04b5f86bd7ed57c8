//! What the server needs of the thing that it exports: a range of bytes, and a place to find it.
//!
//! Rules that hold for every call of an [`Export`]:
//!
//! - The range was checked against [`Export::size`], is not empty, and has any alignment down to
//!   the announced minimum. Writes to a read-only export never arrive.
//! - Calls run side by side. The futures of one connection are *first polled* in the order in
//!   which their requests arrived, so an export that fixes its order of writes at the first poll
//!   keeps the client's.
//! - A future is run to its end, except when its connection has to end and it takes longer than
//!   the closing timeout: then it is dropped. Its range then holds the old bytes or the new, and
//!   nothing else may come to harm. Work that must be finished belongs in a task of the export.
//! - A future may be polled on whatever runtime the connection runs on, must not block, and
//!   should not keep the `Bytes` of a write beyond its own life: they are slices of a larger
//!   buffer.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::{ExportError, OpenError};

/// The extents of one answer that the server passes on; an export may stop there.
pub const EXTENTS_MAX: usize = 8192;

/// Whether a change has to be durable before it is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Durability {
    /// Durable with the next flush.
    Ordered,
    /// Durable when the call returns.
    Fua,
}

/// Whether zeroes may be stored as nothing at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hole {
    /// The range may become unallocated.
    Allowed,
    /// The range must stay allocated, so that writing it again cannot run out of space.
    Never,
}

/// A piece of the answer to a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadPart {
    /// These bytes.
    Data(Bytes),
    /// So many zeroes.
    Zero(u32),
}

impl ReadPart {
    /// How many bytes of the export the piece covers.
    pub fn len(&self) -> usize {
        match self {
            Self::Data(bytes) => bytes.len(),
            Self::Zero(len) => usize::try_from(*len).unwrap_or(usize::MAX),
        }
    }

    /// Whether it covers nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What is known of a stretch of an export without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Allocated; may hold anything.
    Data,
    /// Not allocated; reads as zeroes.
    Hole,
    /// Allocated; reads as zeroes.
    Zero,
}

/// A stretch of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// In bytes.
    pub len: u64,
    /// What it holds.
    pub kind: ExtentKind,
}

/// The block sizes that clients are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockSizes {
    /// A power of two up to 64 KiB. Requests that are not aligned to it are refused; 1 accepts
    /// all.
    pub min: u32,
    /// A power of two, at least 512 and `min`: below it requests cost more.
    pub preferred: u32,
    /// The longest payload to announce; never more than the server's own limit is.
    pub max: u32,
}

impl Default for BlockSizes {
    /// Any alignment; best in pages; 32 MiB, which every server is expected to take.
    fn default() -> Self {
        Self { min: 1, preferred: 4096, max: 32 << 20 }
    }
}

/// What clients are told of an export when they connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its canonical name, whatever the client called it.
    pub name: String,
    /// A line for people.
    pub description: Option<String>,
    /// Its size in bytes.
    pub size: u64,
    /// Whether every change is refused.
    pub read_only: bool,
    /// Whether zeroing a range is always cheaper than writing it.
    pub fast_zeroes: bool,
    /// Which sizes and alignments are accepted, and which are best.
    pub block_sizes: BlockSizes,
}

impl ExportInfo {
    /// A writable export with the default block sizes and fast zeroes.
    pub fn new(name: impl Into<String>, size: u64) -> Self {
        Self {
            name: name.into(),
            description: None,
            size,
            read_only: false,
            fast_zeroes: true,
            block_sizes: BlockSizes::default(),
        }
    }
}

/// A range of bytes that clients read and change. See the rules at the top of this file.
///
/// The server announces that a flush on one connection covers all connections of the same export;
/// every implementation has to keep that.
pub trait Export: Send + Sync + 'static {
    /// Describes the export; called once or twice per connection.
    fn info(&self) -> ExportInfo;

    /// Its size now; called for every request, so that an export can grow while it is served.
    fn size(&self) -> u64;

    /// Reads a range. The pieces cover exactly `len` bytes.
    fn read(
        &self,
        offset: u64,
        len: u32,
    ) -> impl Future<Output = Result<Vec<ReadPart>, ExportError>> + Send;

    /// Replaces a range.
    fn write(
        &self,
        offset: u64,
        data: Bytes,
        durability: Durability,
    ) -> impl Future<Output = Result<(), ExportError>> + Send;

    /// Makes every change durable that had been acknowledged, on any connection, before the call.
    fn flush(&self) -> impl Future<Output = Result<(), ExportError>> + Send;

    /// Gives a range back. What it then reads as is the export's choice; zeroes are kindest.
    fn trim(
        &self,
        offset: u64,
        len: u64,
        durability: Durability,
    ) -> impl Future<Output = Result<(), ExportError>> + Send;

    /// Makes a range read as zeroes.
    fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        hole: Hole,
        durability: Durability,
    ) -> impl Future<Output = Result<(), ExportError>> + Send;

    /// Hints that a range will be read; may return before it has been fetched.
    fn cache(&self, offset: u64, len: u64) -> impl Future<Output = Result<(), ExportError>> + Send;

    /// Describes the stretches from `offset` on. They may end before or after the range, but
    /// there is at least one; see [`EXTENTS_MAX`].
    fn extents(
        &self,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = Result<Vec<Extent>, ExportError>> + Send;
}

/// Where the exports of a server are found.
pub trait ExportDirectory: Send + Sync + 'static {
    /// What is found.
    type Export: Export;

    /// Finds an export. The empty name asks for the default one: the only one, when there is
    /// exactly one. Also called when a client only asks about an export.
    fn open(&self, name: &str)
    -> impl Future<Output = Result<Arc<Self::Export>, OpenError>> + Send;

    /// Names all exports.
    fn list(&self) -> impl Future<Output = Vec<String>> + Send;
}
