//! A small blocking NBD client with an encoder of its own, so that a mistake in the server's codec
//! cannot hide behind the same mistake here.
//!
//! [`Client::send`] and [`Client::receive`] pipeline at will; `read`, `write` and their kin do one
//! request and wait. A refusal by the server ([`Failure::Refused`]) is kept apart from a lost
//! connection ([`Failure::Lost`]): a crash test lives on the second and dies of the first.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::time::Duration;

use crate::nbd_handshake::{Address, ExportInfo, Handshake, Stream};

/// The commands of the transmission phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Read bytes.
    Read,
    /// Write bytes.
    Write,
    /// End the connection; no reply.
    Disconnect,
    /// Make all acknowledged writes durable.
    Flush,
    /// Discard a range.
    Trim,
    /// Prefetch a range.
    Cache,
    /// Zero a range.
    Zeroes,
}

impl Command {
    const fn code(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::Zeroes => 6,
        }
    }
}

/// Request flag: durable before the reply.
pub const FUA: u16 = 1 << 0;
/// Request flag of zeroes: keep the range allocated.
pub const NO_HOLE: u16 = 1 << 1;
/// Request flag of zeroes: fail rather than be slow.
pub const FAST_ZERO: u16 = 1 << 4;

/// Errno of a reply: not permitted, as on a read-only export.
pub const EPERM: u32 = 1;
/// Errno of a reply: input or output error.
pub const EIO: u32 = 5;
/// Errno of a reply: the request is larger than the server takes.
pub const ENOMEM: u32 = 12;
/// Errno of a reply: the request makes no sense.
pub const EINVAL: u32 = 22;
/// Errno of a reply: beyond the end of the disk.
pub const ENOSPC: u32 = 28;
/// Errno of a reply: too large for this connection.
pub const EOVERFLOW: u32 = 75;
/// Errno of a reply: this form of the request is not offered.
pub const ENOTSUP: u32 = 95;
/// Errno of a reply: the export is going away.
pub const ESHUTDOWN: u32 = 108;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Why a request brought nothing.
#[derive(Debug)]
pub enum Failure {
    /// The server answered with this errno.
    Refused(u32),
    /// The connection ended or made no sense.
    Lost(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(errno) => write!(formatter, "the server answered errno {errno}"),
            Self::Lost(error) => write!(formatter, "the connection is lost: {error}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

impl Failure {
    /// The errno of a refusal; panics on a lost connection.
    #[track_caller]
    #[must_use]
    pub fn errno(&self) -> u32 {
        match self {
            Self::Refused(errno) => *errno,
            Self::Lost(error) => panic!("a reply with an errno was due, but: {error}"),
        }
    }
}

/// One reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Which request it answers.
    pub cookie: u64,
    /// Zero, or why not.
    pub errno: u32,
    /// The bytes of a successful read.
    pub data: Vec<u8>,
}

/// A connection in transmission.
#[derive(Debug)]
pub struct Client {
    stream: Stream,
    /// What the server announced.
    pub info: ExportInfo,
    last_cookie: u64,
    read_lengths: HashMap<u64, u32>,
}

impl Client {
    /// Connects to `export` with GO.
    pub fn connect(address: &Address, export: &str) -> io::Result<Self> {
        Handshake::open(address)?.go(export)
    }

    pub(crate) fn new(stream: Stream, info: ExportInfo) -> Self {
        Self { stream, info, last_cookie: 0, read_lengths: HashMap::new() }
    }

    /// The bare connection.
    pub fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Sets how long a reply may take.
    pub fn set_patience(&mut self, limit: Duration) {
        self.stream.set_patience(limit).expect("a socket takes a timeout");
    }

    /// Sends a request without waiting; returns its cookie.
    pub fn send(
        &mut self,
        command: Command,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        let cookie = self.send_raw(command.code(), flags, offset, length, payload)?;
        if command == Command::Read {
            self.read_lengths.insert(cookie, length);
        }
        Ok(cookie)
    }

    /// Sends a header with any numbers at all, and any bytes behind it; returns its cookie.
    pub fn send_raw(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        self.last_cookie += 1;
        let mut bytes = Vec::with_capacity(28 + payload.len());
        bytes.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&self.last_cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes)?;
        Ok(self.last_cookie)
    }

    /// Sends a write of `data`; returns its cookie.
    pub fn send_write(&mut self, offset: u64, data: &[u8], flags: u16) -> io::Result<u64> {
        self.send(Command::Write, flags, offset, length_of(data), data)
    }

    /// Receives the next reply, whichever request it answers.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let magic = u32::from_be_bytes(self.stream.array()?);
        if magic != REPLY_MAGIC {
            let what = format!("the server sent reply magic {magic:#x}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let errno = u32::from_be_bytes(self.stream.array()?);
        let cookie = u64::from_be_bytes(self.stream.array()?);
        let length = self.read_lengths.remove(&cookie).filter(|_| errno == 0).unwrap_or(0);
        let mut data = vec![0; usize::try_from(length).expect("usize holds 32 bits")];
        self.stream.read_exact(&mut data)?;
        Ok(Reply { cookie, errno, data })
    }

    /// Sends any request and waits for its reply.
    pub fn request(
        &mut self,
        command: Command,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let cookie = self.send(command, flags, offset, length, payload)?;
        let reply = self.receive()?;
        assert_eq!(reply.cookie, cookie, "a lone request was answered with another's cookie");
        if reply.errno == 0 { Ok(reply.data) } else { Err(Failure::Refused(reply.errno)) }
    }

    /// Reads `length` bytes.
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, Failure> {
        self.request(Command::Read, 0, offset, length, &[])
    }

    /// Writes `data`, acknowledged but not necessarily flushed.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Failure> {
        self.request(Command::Write, 0, offset, length_of(data), data).map(drop)
    }

    /// Writes `data`, durable before the reply.
    pub fn write_fua(&mut self, offset: u64, data: &[u8]) -> Result<(), Failure> {
        self.request(Command::Write, FUA, offset, length_of(data), data).map(drop)
    }

    /// Flushes.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.request(Command::Flush, 0, 0, 0, &[]).map(drop)
    }

    /// Discards a range.
    pub fn trim(&mut self, offset: u64, length: u32) -> Result<(), Failure> {
        self.request(Command::Trim, 0, offset, length, &[]).map(drop)
    }

    /// Zeroes a range.
    pub fn zeroes(&mut self, offset: u64, length: u32) -> Result<(), Failure> {
        self.request(Command::Zeroes, 0, offset, length, &[]).map(drop)
    }

    /// Ends the connection politely.
    pub fn disconnect(mut self) {
        let _already_gone = self.send(Command::Disconnect, 0, 0, 0, &[]);
    }

    /// Splits into a sender and a receiver, for a writer thread beside a reader thread.
    pub fn split(self) -> io::Result<(Self, Self)> {
        let twin = Self {
            stream: self.stream.try_clone()?,
            info: self.info.clone(),
            last_cookie: self.last_cookie,
            read_lengths: HashMap::new(),
        };
        Ok((self, twin))
    }

    /// Lets this receiver expect a read of `length` bytes that its twin has sent or will send.
    pub fn expect_read(&mut self, cookie: u64, length: u32) {
        self.read_lengths.insert(cookie, length);
    }
}

/// The length of a payload as a request states it.
fn length_of(data: &[u8]) -> u32 {
    u32::try_from(data.len()).expect("a test payload is below 4 GiB")
}
