//! The file that holds the blocks of cached frames, and the header that says which of them to trust.
//!
//! ```text
//! offset 0      header, one block
//! offset 4096   ring: `capacity` bytes, in segments of `segment` bytes
//! ```
//!
//! A *position* counts every byte ever given out in the ring; it lies at `4096 + position % capacity`.
//! Header, little-endian, zero to the end of its block:
//!
//! ```text
//!  0  8  magic "blkcache"
//!  8  4  version, 1
//! 12  4  CRC32 of bytes 16..100
//! 16  8  file id, random: index rows that carry another id are not of this file
//! 24  8  capacity
//! 32  8  segment
//! 40  8  reserved end: positions from here on were never written
//! 48  8  synced end: positions below it are on stable media
//! 56 44  boot id of the kernel that wrote this header, as text, zero-padded
//! ```
//!
//! The header moves ahead of the data: positions are reserved by the segment, and the header is on
//! stable media before the segment's old bytes are overwritten. So no index row, however old, names a
//! place whose bytes are of another frame. After a restart on the same boot everything below the
//! reserved end can be trusted; after a power cut only what lies below the synced end. A header of
//! another version, capacity or with a bad CRC means an empty cache under a new file id.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::geometry::{BLOCK_BYTES, BLOCK_LEN};
use crate::ids::Nonce;

const MAGIC: &[u8; 8] = b"blkcache";
const VERSION: u32 = 1;
const HEADER_LEN: usize = 100;
const BOOT_ID_LEN: usize = 44;

/// Which boot of the machine this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BootId([u8; BOOT_ID_LEN]);

impl BootId {
    /// This boot; a random one when the kernel does not say, so that it equals no other.
    pub(super) fn current() -> Self {
        match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
            Ok(text) => Self::named(text.trim()),
            Err(_) => Self::named(&Nonce::random().to_string()),
        }
    }

    pub(super) fn named(text: &str) -> Self {
        let mut id = [0; BOOT_ID_LEN];
        let len = text.len().min(BOOT_ID_LEN);
        id[..len].copy_from_slice(&text.as_bytes()[..len]);
        Self(id)
    }
}

/// The contents of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) file_id: u64,
    pub(super) capacity: u64,
    pub(super) segment: u64,
    pub(super) reserved_end: u64,
    pub(super) synced_end: u64,
    pub(super) boot: BootId,
}

impl Header {
    /// The header of an empty ring.
    pub(super) fn empty(capacity: u64, segment: u64, boot: BootId) -> Self {
        let file_id = Nonce::random().0;
        Self { file_id, capacity, segment, reserved_end: 0, synced_end: 0, boot }
    }

    fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let numbers =
            [self.file_id, self.capacity, self.segment, self.reserved_end, self.synced_end];
        for (field, number) in bytes[16..56].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes[56..].copy_from_slice(&self.boot.0);
        let crc = crc32fast::hash(&bytes[16..]);
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let number = |at: usize| {
            u64::from_le_bytes(*bytes[at..].first_chunk().expect("offsets lie within the header"))
        };
        let mut boot = [0; BOOT_ID_LEN];
        boot.copy_from_slice(&bytes[56..]);
        let header = Self {
            file_id: number(16),
            capacity: number(24),
            segment: number(32),
            reserved_end: number(40),
            synced_end: number(48),
            boot: BootId(boot),
        };
        (header.encode() == *bytes).then_some(header)
    }
}

/// The open file. Reads and writes are whole blocks at block boundaries.
#[derive(Debug)]
pub(super) struct DataFile {
    file: File,
}

impl DataFile {
    /// Opens or creates the file, with O_DIRECT where the file system has it: what is cached here
    /// need not be cached by the kernel as well.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        match Self::open_with(path, OFlags::DIRECT) {
            Ok(file) if file.takes_blocks() => Ok(file),
            Ok(_) | Err(Errno::INVAL) => Ok(Self::open_with(path, OFlags::empty())?),
            Err(error) => Err(error.into()),
        }
    }

    fn open_with(path: &Path, flags: OFlags) -> Result<Self, Errno> {
        let flags = flags | OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(Self { file: file.into() })
    }

    /// Whether reads of a block at a block boundary are allowed: O_DIRECT may want more than that.
    fn takes_blocks(&self) -> bool {
        let read = self.file.read_at(AlignedBuffer::new(BLOCK_LEN).as_mut(), 0);
        !read.is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput)
    }

    /// The header, or `None` when there is none that can be used.
    pub(super) fn read_header(&self) -> Option<Header> {
        let mut block = AlignedBuffer::new(BLOCK_LEN);
        self.file.read_exact_at(block.as_mut(), 0).ok()?;
        Header::decode(block.as_mut().first_chunk().expect("a header is less than a block"))
    }

    /// Writes the header and waits until it, and every write before it, is on stable media.
    pub(super) fn write_header(&self, header: &Header) -> io::Result<()> {
        let mut block = AlignedBuffer::new(BLOCK_LEN);
        block.as_mut()[..HEADER_LEN].copy_from_slice(&header.encode());
        self.file.write_all_at(block.as_mut(), 0)?;
        self.sync()
    }

    /// Waits until every completed write is on stable media. Nobody is promised anything by it: it
    /// only lets the cache outlive a power cut.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    /// Gives all space back.
    pub(super) fn clear(&self) -> io::Result<()> {
        self.file.set_len(0)
    }

    /// Takes space for the ring's `len` bytes from `offset`, unless that leaves less than
    /// `free_bytes_min` to others on the file system.
    pub(super) fn allocate(&self, offset: u64, len: u64, free_bytes_min: u64) -> io::Result<()> {
        let start = BLOCK_BYTES + offset;
        if self.file.metadata()?.len() < start + len {
            let free = rustix::fs::fstatvfs(&self.file)?;
            if free.f_bavail.saturating_mul(free.f_frsize) < free_bytes_min.saturating_add(len) {
                return Err(Errno::NOSPC.into());
            }
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), start, len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Reads at `offset` of the ring; less than all of `bytes` is an error.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, BLOCK_BYTES + offset)
    }

    /// Writes at `offset` of the ring.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, BLOCK_BYTES + offset)
    }

    /// Space that the file takes on its file system.
    pub(super) fn used_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * 512)
    }
}

/// Memory at a block boundary, as O_DIRECT wants it.
pub(super) struct AlignedBuffer {
    memory: Box<[u8]>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    pub(super) fn new(len: usize) -> Self {
        let memory = vec![0; len + BLOCK_LEN].into_boxed_slice();
        let start = memory.as_ptr().align_offset(BLOCK_LEN);
        Self { memory, start, len }
    }

    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_any_flipped_bit_is_no_header() {
        let header = Header { reserved_end: 1 << 30, ..Header::empty(64, 8, BootId::current()) };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Some(header));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn buffers_begin_at_a_block_boundary() {
        for len in [BLOCK_LEN, 3 * BLOCK_LEN] {
            let mut buffer = AlignedBuffer::new(len);
            assert_eq!(buffer.as_mut().len(), len);
            assert_eq!(buffer.as_mut().as_ptr().align_offset(BLOCK_LEN), 0);
        }
    }
}
