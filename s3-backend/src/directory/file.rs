//! The file of one object: its body, then a footer that proves the body whole and names the version.
//!
//! ```text
//! 0                 the body, size - 32 bytes, never empty
//! size - 32         magic "blkdobj1"
//! size - 24         nonce of this write      u64, little-endian
//! size - 16         length of the body       u64
//! size - 8          CRC32 of the body        u32
//! size - 4          CRC32 of the 28 bytes before it
//! ```
//!
//! The version (ETag) is nonce and CRC in hexadecimal. An unknown magic is refused as corrupt: there
//! has been one version so far.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use rustix::fs::OFlags;

use crate::counters::count_of;
use crate::key::ETag;

const MAGIC: &[u8; 8] = b"blkdobj1";
pub(super) const FOOTER_BYTES: usize = 32;

/// From this size on, a body is written past the page cache.
const DIRECT_FROM_BYTES: usize = 1024 * 1024;

/// What O_DIRECT may ask of memory, offset and length, on any disk.
const BLOCK_BYTES: usize = 4096;

/// One write of a large body.
const STAGE_BYTES: usize = 1024 * 1024;

/// The footer of an object's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Footer {
    pub(super) nonce: u64,
    pub(super) body_bytes: u64,
    pub(super) body_crc: u32,
}

impl Footer {
    pub(super) fn new(body: &[u8], nonce: u64) -> Self {
        Self { nonce, body_bytes: count_of(body.len()), body_crc: crc32fast::hash(body) }
    }

    pub(super) fn etag(&self) -> ETag {
        ETag::parse(&format!("{:016x}-{:08x}", self.nonce, self.body_crc))
            .expect("hexadecimal and a dash make an ETag")
    }

    pub(super) fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.body_crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..28]);
        bytes[28..32].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; FOOTER_BYTES]) -> Result<Self, Damage> {
        let u64_at = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes were sliced"))
        };
        let u32_at = |at: usize| {
            u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes were sliced"))
        };
        let computed = crc32fast::hash(&bytes[..28]);
        if bytes[0..8] != *MAGIC || u32_at(28) != computed {
            return Err(Damage("the footer is damaged or of an unknown version".into()));
        }
        Ok(Self { nonce: u64_at(8), body_bytes: u64_at(16), body_crc: u32_at(24) })
    }
}

/// Why a file cannot be an object as it was written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Damage(pub(super) String);

/// A read that failed: the machine's fault, or the file's.
#[derive(Debug)]
pub(super) enum ReadError {
    Io(io::Error),
    Damaged(Damage),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        ReadError::Io(error)
    }
}

fn damaged<T>(text: String) -> Result<T, ReadError> {
    Err(ReadError::Damaged(Damage(text)))
}

/// Writes body and footer to a fresh file, and syncs them.
pub(super) fn write(file: &mut File, body: &[u8], footer: &Footer) -> io::Result<()> {
    let direct_bytes = if body.len() < DIRECT_FROM_BYTES { 0 } else { write_direct(file, body)? };
    file.write_all(&body[direct_bytes..])?;
    file.write_all(&footer.encode())?;
    rustix::fs::fdatasync(&*file)?;
    Ok(())
}

/// Writes the whole blocks of a large body past the page cache, where the file system allows that,
/// and says how many bytes they are. A blob is seldom read again soon, and copying it through the
/// cache costs more than the disk does.
fn write_direct(file: &mut File, body: &[u8]) -> io::Result<usize> {
    let flags = rustix::fs::fcntl_getfl(&*file)?;
    if rustix::fs::fcntl_setfl(&*file, flags | OFlags::DIRECT).is_err() {
        return Ok(0);
    }
    let whole = body.len() - body.len() % BLOCK_BYTES;
    let mut memory = vec![0; STAGE_BYTES + BLOCK_BYTES];
    let start = memory.as_ptr().align_offset(BLOCK_BYTES);
    let stage = &mut memory[start..start + STAGE_BYTES];
    let mut written = 0;
    for piece in body[..whole].chunks(STAGE_BYTES) {
        let stage = &mut stage[..piece.len()];
        stage.copy_from_slice(piece);
        match file.write_all(stage) {
            // Some file systems take the flag and then refuse what it asks for.
            Err(error) if written == 0 && error.kind() == io::ErrorKind::InvalidInput => break,
            result => result?,
        }
        written += piece.len();
    }
    rustix::fs::fcntl_setfl(&*file, flags)?;
    Ok(written)
}

/// Reads the footer alone, and checks it against the length of the file.
pub(super) fn read_footer(file: &File) -> Result<Footer, ReadError> {
    let file_bytes = file.metadata()?.len();
    let Some(body_bytes) = file_bytes.checked_sub(count_of(FOOTER_BYTES)) else {
        return damaged(format!("the file has {file_bytes} bytes, fewer than a footer"));
    };
    let mut bytes = [0; FOOTER_BYTES];
    file.read_exact_at(&mut bytes, body_bytes)?;
    let footer = Footer::decode(&bytes).map_err(ReadError::Damaged)?;
    if footer.body_bytes != body_bytes {
        return damaged(format!("the body has {body_bytes} bytes, was {}", footer.body_bytes));
    }
    Ok(footer)
}

/// Reads and checks the whole object.
pub(super) fn read(mut file: File) -> Result<(Bytes, Footer), ReadError> {
    let footer = read_footer(&file)?;
    let body = read_exactly(&mut file, footer.body_bytes)?;
    let computed = crc32fast::hash(&body);
    if computed != footer.body_crc {
        return damaged(format!(
            "body crc: stored {:#010x}, computed {computed:#010x}",
            footer.body_crc
        ));
    }
    Ok((body, footer))
}

/// Reads a part of the body. Only the whole has a checksum; callers have their own for parts.
pub(super) fn read_range(mut file: File, range: Range<u64>) -> Result<Bytes, ReadError> {
    let body_bytes = file.metadata()?.len().saturating_sub(count_of(FOOTER_BYTES));
    if range.end > body_bytes {
        return damaged(format!(
            "bytes {}..{} asked of a body of {body_bytes}",
            range.start, range.end
        ));
    }
    io::Seek::seek(&mut file, io::SeekFrom::Start(range.start))?;
    Ok(read_exactly(&mut file, range.end - range.start)?)
}

fn read_exactly(file: &mut File, len: u64) -> io::Result<Bytes> {
    let capacity = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut bytes = Vec::with_capacity(capacity);
    if file.take(len).read_to_end(&mut bytes)? < capacity {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes.into())
}
