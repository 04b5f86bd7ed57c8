//! Memory with an address that the kernel's direct I/O accepts: [`BlockBuf`] for reads, and
//! [`Mapping`], the one mapping that holds all staging slots.
//!
//! A mapping has two parts: *words*, touched only atomically, and *slots*, each handed out to one
//! holder at a time. So everything here is safe to call; the unsafe code behind it is this file's.
#![expect(unsafe_code, reason = "mapping memory and lending parts of it")]

use std::fmt;
use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::format::{BLOCK_BYTES, SLOT_BYTES, index};

/// Whole blocks on the heap, at an address that direct I/O accepts; zeroed when made.
///
/// A read into one goes straight from the device; a read into other memory is copied once.
pub struct BlockBuf {
    storage: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl BlockBuf {
    /// Room for `blocks` blocks.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        let bytes = index(blocks) * BLOCK_BYTES;
        let storage = vec![0; bytes + BLOCK_BYTES];
        let start = storage.as_ptr().align_offset(BLOCK_BYTES);
        assert!(start <= BLOCK_BYTES);
        Self { storage, start, bytes }
    }

    /// The blocks.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.bytes]
    }

    /// The blocks, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.bytes]
    }
}

impl fmt::Debug for BlockBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockBuf").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Whether direct I/O accepts this memory as it is.
pub(crate) fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().align_offset(BLOCK_BYTES) == 0
}

/// One mapping: `words` atomics, then, from the next multiple of 4 KiB, `slots` slots.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    words: usize,
    slots_at: usize,
    lent: Box<[AtomicBool]>,
}

// SAFETY: the mapping belongs to this value until it is dropped. Its words are only reached as
// atomics; its slots only through `Slot`, of which `lent` lets one exist per index.
unsafe impl Send for Mapping {}
// SAFETY: as above; sharing a `&Mapping` gives no other access than sending it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Where slots begin in a mapping with that many words.
    pub(crate) fn slots_at(words: usize) -> usize {
        (words * 8).next_multiple_of(BLOCK_BYTES)
    }

    /// The length of a mapping.
    pub(crate) fn length(words: usize, slots: u32) -> usize {
        Self::slots_at(words) + index(slots) * SLOT_BYTES
    }

    /// Memory that ends with the process.
    pub(crate) fn private(words: usize, slots: u32) -> io::Result<Self> {
        let bytes = Self::length(words, slots);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )
        }?;
        Self::new(base.cast(), bytes, words, slots)
    }

    /// The memory of `file`, which keeps it when the process ends.
    ///
    /// The file must have its whole length allocated, and nobody may cut it while it is mapped:
    /// the caller holds a lock on it.
    pub(crate) fn shared(file: &File, words: usize, slots: u32) -> io::Result<Self> {
        let bytes = Self::length(words, slots);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing. The file is
        // allocated and locked, so no page of it can vanish.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )
        }?;
        Self::new(base.cast(), bytes, words, slots)
    }

    fn new(base: *mut u8, bytes: usize, words: usize, slots: u32) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        assert!(base.as_ptr().align_offset(BLOCK_BYTES) == 0);
        let lent = (0..slots).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { base, bytes, words, slots_at: Self::slots_at(words), lent })
    }

    /// One of the words.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.words);
        // SAFETY: in bounds by the assert, aligned since the base is, alive as long as `self`, and
        // never reached except as an atomic: slots begin behind the words.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at * 8).cast()) }
    }

    /// How many slots there are.
    pub(crate) fn slot_count(&self) -> usize {
        self.lent.len()
    }

    /// Slot `at`, unless somebody holds it.
    pub(crate) fn borrow_slot(self: &Arc<Self>, at: u32) -> Option<Slot> {
        let taken = self.lent[index(at)].swap(true, Ordering::Acquire);
        (!taken).then(|| Slot { mapping: Arc::clone(self), at })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped; every `Slot` holds an `Arc` of this value, so none is
        // left, and words are only lent for the life of a borrow.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("bytes", &self.bytes)
            .field("slots", &self.lent.len())
            .finish_non_exhaustive()
    }
}

/// The only handle to one slot: a header block and the data blocks behind it.
#[derive(Debug)]
pub(crate) struct Slot {
    mapping: Arc<Mapping>,
    at: u32,
}

impl Slot {
    /// Which slot it is.
    pub(crate) fn at(&self) -> u32 {
        self.at
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: in bounds and initialised (the kernel zeroes new memory). `lent` makes this the
        // only handle, so the borrow of `self` keeps every writer away.
        unsafe { slice::from_raw_parts(self.start(), SLOT_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the exclusive borrow of the only handle makes it exclusive.
        unsafe { slice::from_raw_parts_mut(self.start(), SLOT_BYTES) }
    }

    fn start(&self) -> *mut u8 {
        let offset = self.mapping.slots_at + index(self.at) * SLOT_BYTES;
        assert!(offset + SLOT_BYTES <= self.mapping.bytes);
        // SAFETY: inside the mapping by the assert.
        unsafe { self.mapping.base.as_ptr().add(offset) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.mapping.lent[index(self.at)].store(false, Ordering::Release);
    }
}
