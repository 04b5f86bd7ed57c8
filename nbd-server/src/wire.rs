//! The bytes of the protocol: every number has one name here, every structure one encoder and
//! one decoder. No I/O and no policy.
//!
//! All integers are big-endian. Names follow the protocol document without its `NBD_` prefixes.
//! A code that the peer may send and that we do not know is a value like any other: it keeps its
//! number and prints as one.

use std::fmt;

use bytes::{Buf, BufMut};

/// `NBDMAGIC`, the first eight bytes a server sends.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, in the greeting and before every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Before every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Before every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Before every simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Before every chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// The longest string the protocol allows: names, contexts, error texts.
pub const STRING_BYTES_MAX: usize = 4096;
/// Zeroes after the answer to `EXPORT_NAME`, unless the client asked to do without.
pub const EXPORT_NAME_PADDING: usize = 124;

/// Bits of the handshake flags (server) and of the client flags, which mirror them.
pub mod handshake_flags {
    /// Options other than `EXPORT_NAME` may be sent, and unknown ones are answered.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The padding after the answer to `EXPORT_NAME` may be left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Bits of the transmission flags, which describe an export.
pub mod transmission_flags {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The `FUA` command flag is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The `DF` command flag is understood; only with structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what was acknowledged on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The `FAST_ZERO` command flag is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Bits of the flags of a request.
pub mod command_flags {
    /// Reply only once the data is on stable media.
    pub const FUA: u16 = 1 << 0;
    /// `WRITE_ZEROES` must leave the range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Answer a `READ` in one piece.
    pub const DF: u16 = 1 << 2;
    /// Answer `BLOCK_STATUS` with a single extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail `WRITE_ZEROES` rather than be as slow as a write.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Bits of the status of an extent in the `base:allocation` context.
pub mod extent_flags {
    /// Nothing is allocated.
    pub const HOLE: u32 = 1 << 0;
    /// Reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// The flag of the last chunk of a structured reply.
pub const CHUNK_DONE: u16 = 1 << 0;

/// Declares a newtype over a wire integer, its known values, and how each prints.
macro_rules! codes {
    (
        $(#[$doc:meta])*
        $name:ident($int:ty) { $($(#[$value_doc:meta])* $value_name:ident = $value:expr;)* }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub $int);

        impl $name {
            $($(#[$value_doc])* pub const $value_name: Self = Self($value);)*

            /// The name of a known value.
            pub fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$value_name => Some(stringify!($value_name)),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{:#x}", self.0),
                }
            }
        }
    };
}

codes! {
    /// What a client asks for during negotiation.
    OptionCode(u32) {
        /// Choose an export and start, without a way to report an error.
        EXPORT_NAME = 1;
        /// End the negotiation.
        ABORT = 2;
        /// Name the exports.
        LIST = 3;
        /// Upgrade to TLS.
        STARTTLS = 5;
        /// Describe an export.
        INFO = 6;
        /// Describe an export and start.
        GO = 7;
        /// Use structured replies.
        STRUCTURED_REPLY = 8;
        /// Name the metadata contexts of an export.
        LIST_META_CONTEXT = 9;
        /// Choose metadata contexts for `BLOCK_STATUS`.
        SET_META_CONTEXT = 10;
        /// Use extended headers (experimental).
        EXTENDED_HEADERS = 11;
    }
}

codes! {
    /// What a server answers to an option.
    OptionReply(u32) {
        /// Done, or accepted.
        ACK = 1;
        /// An export's name.
        SERVER = 2;
        /// One fact about an export.
        INFO = 3;
        /// A metadata context.
        META_CONTEXT = 4;
        /// The option is not known.
        ERR_UNSUP = (1 << 31) + 1;
        /// The option is forbidden.
        ERR_POLICY = (1 << 31) + 2;
        /// The option's data makes no sense.
        ERR_INVALID = (1 << 31) + 3;
        /// There is no such export.
        ERR_UNKNOWN = (1 << 31) + 6;
        /// The server is going away.
        ERR_SHUTDOWN = (1 << 31) + 7;
        /// The option's data is too large.
        ERR_TOO_BIG = (1 << 31) + 9;
    }
}

codes! {
    /// The facts that `INFO` and `GO` can ask for.
    InfoType(u16) {
        /// Size and transmission flags; always sent.
        EXPORT = 0;
        /// The canonical name.
        NAME = 1;
        /// A text for people.
        DESCRIPTION = 2;
        /// Minimum and preferred block size, maximum payload.
        BLOCK_SIZE = 3;
    }
}

codes! {
    /// What a client asks for during transmission.
    Command(u16) {
        /// Bytes, please.
        READ = 0;
        /// Bytes follow.
        WRITE = 1;
        /// Goodbye; there is no reply.
        DISC = 2;
        /// Make durable what was acknowledged.
        FLUSH = 3;
        /// The range is no longer needed.
        TRIM = 4;
        /// The range will be needed soon.
        CACHE = 5;
        /// The range shall read as zeroes.
        WRITE_ZEROES = 6;
        /// Which parts of the range are allocated.
        BLOCK_STATUS = 7;
    }
}

codes! {
    /// The chunks that structured replies consist of.
    ChunkType(u16) {
        /// Nothing more to say.
        NONE = 0;
        /// Bytes of the export.
        OFFSET_DATA = 1;
        /// A range that reads as zeroes.
        OFFSET_HOLE = 2;
        /// Extents of one metadata context.
        BLOCK_STATUS = 5;
        /// The request failed.
        ERROR = (1 << 15) + 1;
    }
}

codes! {
    /// The errors a request can be answered with.
    Errno(u32) {
        /// Not permitted: a write to a read-only export.
        EPERM = 1;
        /// The data cannot be read or written.
        EIO = 5;
        /// Out of memory.
        ENOMEM = 12;
        /// The request makes no sense.
        EINVAL = 22;
        /// No space, or a write past the end.
        ENOSPC = 28;
        /// The answer would be too large.
        EOVERFLOW = 75;
        /// `FAST_ZERO` cannot be fast.
        ENOTSUP = 95;
        /// The server is going away.
        ESHUTDOWN = 108;
    }
}

/// The bytes were not what has to come next: reading cannot go on, since no one knows where the
/// next message starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("wrong magic {found:#x}, expected {expected:#x}")]
pub struct WrongMagic {
    /// What has to stand here.
    pub expected: u64,
    /// What stood here.
    pub found: u64,
}

/// Fails unless the magic is the expected one.
fn check_magic(expected: u64, found: u64) -> Result<(), WrongMagic> {
    if found == expected { Ok(()) } else { Err(WrongMagic { expected, found }) }
}

/// The greeting of a newstyle server.
pub fn encode_greeting(flags: u16, out: &mut impl BufMut) {
    out.put_u64(GREETING_MAGIC);
    out.put_u64(OPTION_MAGIC);
    out.put_u16(flags);
}

/// What stands before the data of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub code: OptionCode,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 16;

    /// Reads a header.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, WrongMagic> {
        let bytes = &mut &bytes[..];
        check_magic(OPTION_MAGIC, bytes.get_u64())?;
        Ok(Self { code: OptionCode(bytes.get_u32()), len: bytes.get_u32() })
    }

    /// Writes the header.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u64(OPTION_MAGIC);
        out.put_u32(self.code.0);
        out.put_u32(self.len);
    }
}

/// Writes one reply to an option.
///
/// # Panics
/// When the data is 4 GiB or longer, which nothing that calls this can produce.
pub fn encode_option_reply(
    option: OptionCode,
    reply: OptionReply,
    data: &[u8],
    out: &mut impl BufMut,
) {
    out.put_u64(OPTION_REPLY_MAGIC);
    out.put_u32(option.0);
    out.put_u32(reply.0);
    out.put_u32(u32::try_from(data.len()).expect("replies to options are short"));
    out.put_slice(data);
}

/// A request as it stands on the wire, unchecked but for its magic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// See [`command_flags`].
    pub flags: u16,
    /// What to do.
    pub command: Command,
    /// Chosen by the client, repeated in the reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range.
    pub len: u32,
}

impl RequestHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 28;

    /// Reads a header.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, WrongMagic> {
        let bytes = &mut &bytes[..];
        check_magic(REQUEST_MAGIC.into(), bytes.get_u32().into())?;
        Ok(Self {
            flags: bytes.get_u16(),
            command: Command(bytes.get_u16()),
            cookie: bytes.get_u64(),
            offset: bytes.get_u64(),
            len: bytes.get_u32(),
        })
    }

    /// Writes the header.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u32(REQUEST_MAGIC);
        out.put_u16(self.flags);
        out.put_u16(self.command.0);
        out.put_u64(self.cookie);
        out.put_u64(self.offset);
        out.put_u32(self.len);
    }

    /// Bytes that follow the header: only a write carries any, whether or not it is acceptable.
    pub fn payload_len(&self) -> u32 {
        if self.command == Command::WRITE { self.len } else { 0 }
    }
}

/// The head of a simple reply; the data of a successful read follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimpleReply {
    /// `None` for success.
    pub error: Option<Errno>,
    /// Of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Bytes on the wire.
    pub const BYTES: usize = 16;

    /// Reads the head of a reply.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, WrongMagic> {
        let bytes = &mut &bytes[..];
        check_magic(SIMPLE_REPLY_MAGIC.into(), bytes.get_u32().into())?;
        let error = Some(Errno(bytes.get_u32())).filter(|errno| errno.0 != 0);
        Ok(Self { error, cookie: bytes.get_u64() })
    }

    /// Writes the head of a reply.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u32(SIMPLE_REPLY_MAGIC);
        out.put_u32(self.error.map_or(0, |errno| errno.0));
        out.put_u64(self.cookie);
    }
}

/// The head of a chunk of a structured reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// [`CHUNK_DONE`] on the last chunk of a reply.
    pub flags: u16,
    /// What the payload is.
    pub kind: ChunkType,
    /// Of the request.
    pub cookie: u64,
    /// Bytes of payload that follow.
    pub len: u32,
}

impl ChunkHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 20;

    /// Reads the head of a chunk.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, WrongMagic> {
        let bytes = &mut &bytes[..];
        check_magic(CHUNK_MAGIC.into(), bytes.get_u32().into())?;
        Ok(Self {
            flags: bytes.get_u16(),
            kind: ChunkType(bytes.get_u16()),
            cookie: bytes.get_u64(),
            len: bytes.get_u32(),
        })
    }

    /// Writes the head of a chunk.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u32(CHUNK_MAGIC);
        out.put_u16(self.flags);
        out.put_u16(self.kind.0);
        out.put_u64(self.cookie);
        out.put_u32(self.len);
    }
}

/// Reads the fields of an option's data in order; `None` where the data ends too early. Lengths
/// inside the data are compared with what is there, never trusted.
#[derive(Debug)]
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Over all of an option's data.
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.0.try_get_u16().ok()
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.0.try_get_u32().ok()
    }

    /// A length of four bytes, then so many bytes.
    pub fn counted(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok()?;
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    /// Whether everything was read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Fails if any field is dropped, swapped or cut on its way through the request codec.
        #[test]
        fn a_request_decodes_to_what_was_encoded(
            flags: u16, command: u16, cookie: u64, offset: u64, len: u32,
        ) {
            let header = RequestHeader { flags, command: Command(command), cookie, offset, len };
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            let bytes: [u8; RequestHeader::BYTES] = bytes.try_into().unwrap();
            prop_assert_eq!(RequestHeader::decode(&bytes), Ok(header));
        }

        /// Fails if what decodes does not encode to the same bytes again.
        #[test]
        fn request_bytes_have_one_meaning(mut bytes: [u8; RequestHeader::BYTES], magic: bool) {
            if magic {
                bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
            }
            match RequestHeader::decode(&bytes) {
                Ok(header) => {
                    let mut again = Vec::new();
                    header.encode(&mut again);
                    prop_assert_eq!(&again[..], &bytes[..]);
                }
                Err(wrong) => prop_assert_ne!(wrong.found, wrong.expected),
            }
        }

        /// Fails if a reply or chunk head changes on its way through the codec.
        #[test]
        fn replies_decode_to_what_was_encoded(
            error: u32, cookie: u64, flags: u16, kind: u16, len: u32,
        ) {
            let error = Some(Errno(error)).filter(|errno| errno.0 != 0);
            let reply = SimpleReply { error, cookie };
            let mut bytes = Vec::new();
            reply.encode(&mut bytes);
            prop_assert_eq!(SimpleReply::decode(&bytes.try_into().unwrap()), Ok(reply));

            let chunk = ChunkHeader { flags, kind: ChunkType(kind), cookie, len };
            let mut bytes = Vec::new();
            chunk.encode(&mut bytes);
            prop_assert_eq!(ChunkHeader::decode(&bytes.try_into().unwrap()), Ok(chunk));
        }

        /// Fails if an option header changes, or if data that lies about its lengths panics.
        #[test]
        fn options_decode_and_fields_never_panic(code: u32, len: u32, data: Vec<u8>) {
            let header = OptionHeader { code: OptionCode(code), len };
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            prop_assert_eq!(OptionHeader::decode(&bytes.try_into().unwrap()), Ok(header));

            let mut fields = Fields::new(&data);
            while fields.counted().is_some() {}
            let _ = (fields.u16(), fields.u32(), fields.is_empty());
        }
    }

    /// Fails if a number moves: these are the numbers of the protocol document.
    #[test]
    fn a_write_request_is_these_bytes() {
        let header = RequestHeader {
            flags: command_flags::FUA,
            command: Command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1000,
            len: 512,
        };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        assert_eq!(
            bytes,
            *b"\x25\x60\x95\x13\x00\x01\x00\x01\x01\x02\x03\x04\x05\x06\x07\x08\
               \x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x02\x00"
        );
    }

    /// Fails if a known code loses its name or an unknown one its number.
    #[test]
    fn codes_print_as_names_and_unknown_ones_as_numbers() {
        assert_eq!(OptionCode::GO.to_string(), "GO");
        assert_eq!(Errno::ENOSPC.to_string(), "ENOSPC");
        assert_eq!(Command(4660).to_string(), "0x1234");
    }
}
