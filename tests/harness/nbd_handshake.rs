//! The haggling of an NBD connection, option by option, with every lie a client can tell.
//!
//! Big-endian throughout, encoded here and not by the server's codec. [`Handshake`] leads to a
//! [`Client`] once both sides agree on an export.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::nbd_client::Client;

/// `NBD_OPT_EXPORT_NAME`: the old road into transmission, without any reply on refusal.
pub const OPT_EXPORT_NAME: u32 = 1;
/// `NBD_OPT_ABORT`.
pub const OPT_ABORT: u32 = 2;
/// `NBD_OPT_LIST`.
pub const OPT_LIST: u32 = 3;
/// `NBD_OPT_STARTTLS`.
pub const OPT_STARTTLS: u32 = 5;
/// `NBD_OPT_INFO`.
pub const OPT_INFO: u32 = 6;
/// `NBD_OPT_GO`.
pub const OPT_GO: u32 = 7;

/// `NBD_REP_ACK`.
pub const REP_ACK: u32 = 1;
/// `NBD_REP_SERVER`: one export of a list.
pub const REP_SERVER: u32 = 2;
/// `NBD_REP_INFO`.
pub const REP_INFO: u32 = 3;
/// `NBD_REP_ERR_UNSUP`.
pub const REP_ERR_UNSUP: u32 = 0x8000_0001;
/// `NBD_REP_ERR_INVALID`.
pub const REP_ERR_INVALID: u32 = 0x8000_0003;
/// `NBD_REP_ERR_UNKNOWN`: no such export.
pub const REP_ERR_UNKNOWN: u32 = 0x8000_0006;
/// `NBD_REP_ERR_TOO_BIG`.
pub const REP_ERR_TOO_BIG: u32 = 0x8000_0009;

/// Transmission flag: the export refuses writes.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// Transmission flag: FLUSH is understood.
pub const FLAG_FLUSH: u16 = 1 << 2;
/// Transmission flag: FUA is understood.
pub const FLAG_FUA: u16 = 1 << 3;
/// Transmission flag: TRIM is understood.
pub const FLAG_TRIM: u16 = 1 << 5;
/// Transmission flag: `WRITE_ZEROES` is understood.
pub const FLAG_ZEROES: u16 = 1 << 6;
/// Transmission flag: a flush on one connection covers them all.
pub const FLAG_MULTI_CONN: u16 = 1 << 8;

const HELLO: [u8; 16] = *b"NBDMAGICIHAVEOPT";
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// How long a reply may take before a test gives up on the server.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Where an NBD server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP address, `host:port`.
    Tcp(String),
}

/// A connected stream of either kind.
#[derive(Debug)]
pub enum Stream {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Stream {
    /// Connects, with [`PATIENCE`] as the longest wait of every later read and write.
    pub fn connect(address: &Address) -> io::Result<Self> {
        let stream = match address {
            Address::Unix(path) => Self::Unix(UnixStream::connect(path)?),
            Address::Tcp(host) => Self::Tcp(TcpStream::connect(host)?),
        };
        stream.set_patience(PATIENCE)?;
        Ok(stream)
    }

    /// Sets the longest wait of a read or write.
    pub fn set_patience(&self, limit: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            }
            Self::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            }
        }
    }

    /// A second handle to the same connection, for a reader beside a writer.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
        }
    }

    /// Shuts both directions down, so that a reader in another thread returns.
    pub fn shutdown(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(buffer),
            Self::Tcp(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the server said about an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The size in bytes.
    pub size: u64,
    /// The transmission flags.
    pub flags: u16,
    /// Minimum, preferred and maximum request size, where the server announced them.
    pub block_sizes: Option<[u32; 3]>,
}

/// One reply to an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionReply {
    /// The option this answers.
    pub option: u32,
    /// What kind of reply it is.
    pub kind: u32,
    /// Its payload: for an error, a text for people.
    pub data: Vec<u8>,
}

impl OptionReply {
    /// The payload as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.data).into_owned()
    }
}

/// A connection that still haggles.
#[derive(Debug)]
pub struct Handshake {
    stream: Stream,
    /// The handshake flags of the server.
    pub server_flags: u16,
    no_zeroes: bool,
}

impl Handshake {
    /// Connects, checks the greeting, and announces fixed newstyle without the 124 zero bytes.
    pub fn open(address: &Address) -> io::Result<Self> {
        Self::open_with_flags(address, 0b11)
    }

    /// Connects and sends `client_flags`, whatever they are.
    pub fn open_with_flags(address: &Address, client_flags: u32) -> io::Result<Self> {
        let mut stream = Stream::connect(address)?;
        let hello: [u8; 16] = stream.array()?;
        if hello != HELLO {
            return Err(wrong(format!("greeting {hello:02x?}")));
        }
        let server_flags = u16::from_be_bytes(stream.array()?);
        stream.write_all(&client_flags.to_be_bytes())?;
        Ok(Self { stream, server_flags, no_zeroes: client_flags & 0b10 != 0 })
    }

    /// The bare connection, to send anything at all.
    pub fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Sends an option.
    pub fn send(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let length = u32::try_from(data.len()).expect("a test sends less than 4 GiB");
        self.send_lying(option, length, data)
    }

    /// Sends an option whose header claims `claimed` bytes, whatever follows.
    pub fn send_lying(&mut self, option: u32, claimed: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&claimed.to_be_bytes());
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes)
    }

    /// Receives one reply.
    pub fn reply(&mut self) -> io::Result<OptionReply> {
        let magic = u64::from_be_bytes(self.stream.array()?);
        if magic != REPLY_MAGIC {
            return Err(wrong(format!("option reply magic {magic:#x}")));
        }
        let option = u32::from_be_bytes(self.stream.array()?);
        let kind = u32::from_be_bytes(self.stream.array()?);
        let length = u32::from_be_bytes(self.stream.array()?);
        let mut data = vec![0; usize::try_from(length).expect("usize holds 32 bits")];
        self.stream.read_exact(&mut data)?;
        Ok(OptionReply { option, kind, data })
    }

    /// Sends an option and returns its last reply.
    pub fn ask(&mut self, option: u32, data: &[u8]) -> io::Result<OptionReply> {
        self.send(option, data)?;
        loop {
            let reply = self.reply()?;
            if reply.kind != REP_INFO && reply.kind != REP_SERVER {
                return Ok(reply);
            }
        }
    }

    /// Asks for INFO or GO of `name`: what the server tells, or the error it gave.
    pub fn select(
        &mut self,
        option: u32,
        name: &[u8],
    ) -> io::Result<Result<ExportInfo, OptionReply>> {
        self.send(option, &select_payload(name))?;
        let mut info = ExportInfo { size: 0, flags: 0, block_sizes: None };
        loop {
            let reply = self.reply()?;
            match reply.kind {
                REP_INFO => note_info(&mut info, &reply.data)?,
                REP_ACK => return Ok(Ok(info)),
                _ => return Ok(Err(reply)),
            }
        }
    }

    /// Names the exports that the server lists.
    pub fn list(&mut self) -> io::Result<Vec<String>> {
        self.send(OPT_LIST, &[])?;
        let mut names = Vec::new();
        loop {
            let reply = self.reply()?;
            if reply.kind != REP_SERVER {
                return Ok(names);
            }
            let (length, rest) = reply
                .data
                .split_first_chunk::<4>()
                .ok_or_else(|| wrong(format!("a list entry of {} bytes", reply.data.len())))?;
            let length = usize::try_from(u32::from_be_bytes(*length)).expect("32 bits fit");
            names.push(String::from_utf8_lossy(&rest[..length]).into_owned());
        }
    }

    /// Enters transmission with GO.
    pub fn go(mut self, name: &str) -> io::Result<Client> {
        match self.select(OPT_GO, name.as_bytes())? {
            Ok(info) => Ok(Client::new(self.stream, info)),
            Err(reply) => Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("export {name:?}: reply {:#x}: {}", reply.kind, reply.text()),
            )),
        }
    }

    /// Enters transmission by `EXPORT_NAME`, the old road.
    pub fn export_name(mut self, name: &str) -> io::Result<Client> {
        self.send(OPT_EXPORT_NAME, name.as_bytes())?;
        let size = u64::from_be_bytes(self.stream.array()?);
        let flags = u16::from_be_bytes(self.stream.array()?);
        if !self.no_zeroes {
            let padding: [u8; 124] = self.stream.array()?;
            if padding != [0; 124] {
                return Err(wrong("padding that is not zero".to_owned()));
            }
        }
        Ok(Client::new(self.stream, ExportInfo { size, flags, block_sizes: None }))
    }
}

/// The payload of INFO and GO: the name, and a wish to hear of block sizes.
#[must_use]
pub fn select_payload(name: &[u8]) -> Vec<u8> {
    let length = u32::try_from(name.len()).expect("a test name is short");
    let mut payload = length.to_be_bytes().to_vec();
    payload.extend_from_slice(name);
    payload.extend_from_slice(&1u16.to_be_bytes());
    payload.extend_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
    payload
}

fn note_info(info: &mut ExportInfo, data: &[u8]) -> io::Result<()> {
    let short = || wrong(format!("an info reply of {} bytes", data.len()));
    let (kind, rest) = data.split_first_chunk::<2>().ok_or_else(short)?;
    match u16::from_be_bytes(*kind) {
        INFO_EXPORT => {
            let (size, rest) = rest.split_first_chunk::<8>().ok_or_else(short)?;
            let (flags, _) = rest.split_first_chunk::<2>().ok_or_else(short)?;
            info.size = u64::from_be_bytes(*size);
            info.flags = u16::from_be_bytes(*flags);
        }
        INFO_BLOCK_SIZE => {
            let mut sizes = [0; 3];
            for (size, bytes) in sizes.iter_mut().zip(rest.chunks_exact(4)) {
                *size = u32::from_be_bytes(bytes.try_into().expect("chunks of four"));
            }
            info.block_sizes = Some(sizes);
        }
        _ => {}
    }
    Ok(())
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server sent {what}"))
}
