//! A small blocking client that shares no code with the server. It can lie about lengths, send
//! without waiting, and leave in the middle of anything.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const ZEROES: u16 = 6;
pub(crate) const STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const DF: u16 = 4;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST_ZERO: u16 = 16;

pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;

pub(crate) const ACK: u32 = 1;
pub(crate) const ERR_UNSUP: u32 = 0x8000_0001;
pub(crate) const ERR_INVALID: u32 = 0x8000_0003;
pub(crate) const ERR_UNKNOWN: u32 = 0x8000_0006;
pub(crate) const ERR_TOO_BIG: u32 = 0x8000_0009;

/// Nothing here takes this long; a test that waits longer has found a server that hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// One chunk of a structured reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) done: bool,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) payload: Vec<u8>,
}

pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    cookie: u64,
    /// From the latest `GO`.
    pub(crate) size: u64,
    pub(crate) flags: u16,
}

impl Client {
    /// Connects and says nothing.
    pub(crate) fn silent(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, cookie: 0, size: 0, flags: 0 }
    }

    /// The same connection once more, so that one thread can send while another receives.
    pub(crate) fn again(&self) -> Self {
        Self { stream: self.stream.try_clone().unwrap(), ..*self }
    }

    /// Connects, takes the greeting and sends client flags.
    pub(crate) fn greet(path: &Path, client_flags: u32) -> Self {
        let mut client = Self::silent(path);
        let greeting = client.take(18);
        assert_eq!(greeting, *b"NBDMAGICIHAVEOPT\0\x03");
        client.put(&client_flags.to_be_bytes());
        client
    }

    /// Connects and enters transmission the new way, with simple replies.
    pub(crate) fn enter(path: &Path, name: &str) -> Self {
        let mut client = Self::greet(path, 3);
        assert_eq!(client.go(name), ACK);
        client
    }

    /// The same with structured replies and block status.
    pub(crate) fn enter_structured(path: &Path, name: &str) -> Self {
        let mut client = Self::greet(path, 3);
        client.option(8, &[]);
        assert_eq!(client.option_reply(), (ACK, vec![]));
        let len = u32::try_from(name.len()).unwrap().to_be_bytes();
        let one = [0, 0, 0, 1, 0, 0, 0, 15];
        client.option(10, &[&len[..], name.as_bytes(), &one, b"base:allocation"].concat());
        assert_eq!(client.option_reply(), (4, b"\0\0\0\x01base:allocation".to_vec()));
        assert_eq!(client.option_reply(), (ACK, vec![]));
        assert_eq!(client.go(name), ACK);
        client
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn take_u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }

    fn take_u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    pub(crate) fn take_u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    /// Waits for the end of the stream; panics if bytes come first.
    pub(crate) fn expect_end(&mut self) {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(0) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            other => panic!("expected the end of the stream, got {other:?} {byte:?}"),
        }
    }

    /// Closes the sending half.
    pub(crate) fn finish_sending(&mut self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    pub(crate) fn option(&mut self, code: u32, data: &[u8]) {
        self.option_claiming(code, u32::try_from(data.len()).unwrap(), data);
    }

    pub(crate) fn option_claiming(&mut self, code: u32, len: u32, data: &[u8]) {
        let (code, len) = (code.to_be_bytes(), len.to_be_bytes());
        self.put(&[b"IHAVEOPT", &code[..], &len, data].concat());
    }

    pub(crate) fn option_reply(&mut self) -> (u32, Vec<u8>) {
        assert_eq!(self.take_u64(), 0x0003_e889_0455_65a9);
        self.take_u32();
        let kind = self.take_u32();
        let len = self.take_u32();
        (kind, self.take(len.try_into().unwrap()))
    }

    pub(crate) fn go(&mut self, name: impl AsRef<[u8]>) -> u32 {
        self.describe(7, name)
    }

    /// `INFO` (6) or `GO` (7); returns the final reply.
    pub(crate) fn describe(&mut self, code: u32, name: impl AsRef<[u8]>) -> u32 {
        let name = name.as_ref();
        let len = u32::try_from(name.len()).unwrap().to_be_bytes();
        self.option(code, &[&len[..], name, &[0, 0]].concat());
        loop {
            match self.option_reply() {
                (3, fact) if fact[..2] == [0, 0] => {
                    self.size = u64::from_be_bytes(fact[2..10].try_into().unwrap());
                    self.flags = u16::from_be_bytes(fact[10..].try_into().unwrap());
                }
                (3, _) => {}
                (last, _) => return last,
            }
        }
    }

    /// Sends a request and returns its cookie.
    pub(crate) fn send(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> u64 {
        self.send_with(command, flags, offset, len, &[])
    }

    /// Sends a request with a payload, which may be shorter than the header says.
    pub(crate) fn send_with(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> u64 {
        self.cookie += 1;
        let header = request(command, flags, self.cookie, offset, len);
        self.put(&header);
        self.put(payload);
        self.cookie
    }

    /// Takes a simple reply: cookie and error.
    pub(crate) fn reply(&mut self) -> (u64, u32) {
        assert_eq!(self.take_u32(), 0x6744_6698);
        let error = self.take_u32();
        (self.take_u64(), error)
    }

    /// A request without data in either direction, and its error.
    pub(crate) fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> u32 {
        let cookie = self.send(command, flags, offset, len);
        let (answered, error) = self.reply();
        assert_eq!(answered, cookie);
        error
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        let len = u32::try_from(data.len()).unwrap();
        let cookie = self.send_with(WRITE, flags, offset, len, data);
        let (answered, error) = self.reply();
        assert_eq!(answered, cookie);
        error
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        match self.ask(READ, 0, offset, len) {
            0 => Ok(self.take(len.try_into().unwrap())),
            error => Err(error),
        }
    }

    /// Takes all chunks of one structured reply.
    pub(crate) fn chunks(&mut self) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        loop {
            assert_eq!(self.take_u32(), 0x668e_33ef);
            let flags = self.take_u16();
            let kind = self.take_u16();
            let cookie = self.take_u64();
            let len = self.take_u32();
            let payload = self.take(len.try_into().unwrap());
            chunks.push(Chunk { done: flags == 1, kind, cookie, payload });
            if flags == 1 {
                return chunks;
            }
        }
    }
}

/// The bytes of a request's header.
pub(crate) fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut header = 0x2560_9513_u32.to_be_bytes().to_vec();
    header.extend(flags.to_be_bytes());
    header.extend(command.to_be_bytes());
    header.extend(cookie.to_be_bytes());
    header.extend(offset.to_be_bytes());
    header.extend(len.to_be_bytes());
    header
}
