//! The one place where a request is judged: a raw header becomes a [`Request`] that an export can
//! be asked, or the error to answer it with. Nothing behind this file checks a range again.
//!
//! Where the protocol document leaves a choice:
//!
//! - A request of length zero succeeds and reaches no export, as qemu does it; except
//!   `BLOCK_STATUS`, which has to describe something.
//! - `FLUSH` with a range, which is reserved, is refused.
//! - `FUA` is taken on every command, and matters to those that write.
//! - A payload beyond the limit is `EINVAL` in either direction, and the connection is kept.

use crate::export::{Durability, Hole};
use crate::wire::{Command, Errno, RequestHeader, command_flags as flag};

/// What a connection has settled: the facts beside the size that a request is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Changes are refused.
    pub read_only: bool,
    /// `FAST_ZERO` was announced.
    pub fast_zeroes: bool,
    /// Structured replies were negotiated.
    pub structured: bool,
    /// A metadata context was chosen.
    pub block_status: bool,
    /// What offsets and lengths must be multiples of.
    pub block_bytes_min: u32,
    /// The longest payload of a read or a write.
    pub payload_bytes_max: u32,
}

/// In how many pieces the client wants its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pieces {
    /// Exactly one.
    One,
    /// As many as it takes.
    Many,
}

/// A request that is in range and well formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Send a range.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
        /// Whether holes may be sent as such.
        pieces: Pieces,
    },
    /// Take the payload of `len` bytes that follows.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
        /// When to acknowledge.
        durability: Durability,
    },
    /// Make acknowledged changes durable.
    Flush,
    /// Give a range back.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
        /// When to acknowledge.
        durability: Durability,
    },
    /// Zero a range.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
        /// Whether the range may become unallocated.
        hole: Hole,
        /// When to acknowledge.
        durability: Durability,
    },
    /// Fetch a range.
    Cache {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
    },
    /// Describe a range.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
        /// How many extents to send.
        pieces: Pieces,
    },
    /// Succeed without doing anything: the range is empty.
    Nothing,
    /// End the connection; no reply.
    Disconnect,
}

impl Request {
    /// Judges a header against the terms of its connection and the size of the export now.
    pub fn parse(header: &RequestHeader, terms: &Terms, size: u64) -> Result<Self, Errno> {
        let &RequestHeader { flags, command, offset, len, .. } = header;
        if command == Command::DISC {
            return Ok(Self::Disconnect);
        }
        if flags & !flags_accepted(command, terms)? != 0 {
            return Err(Errno::EINVAL);
        }
        if command == Command::FLUSH {
            return if offset == 0 && len == 0 { Ok(Self::Flush) } else { Err(Errno::EINVAL) };
        }
        check_permission(command, terms)?;
        check_range(header, terms, size)?;
        if len == 0 {
            let must_describe = command == Command::BLOCK_STATUS;
            return if must_describe { Err(Errno::EINVAL) } else { Ok(Self::Nothing) };
        }

        let durability = if flags & flag::FUA == 0 { Durability::Ordered } else { Durability::Fua };
        let pieces_unless = |one| if flags & one == 0 { Pieces::Many } else { Pieces::One };
        Ok(match command {
            Command::READ => Self::Read { offset, len, pieces: pieces_unless(flag::DF) },
            Command::WRITE => Self::Write { offset, len, durability },
            Command::TRIM => Self::Trim { offset, len, durability },
            Command::WRITE_ZEROES => {
                let hole = if flags & flag::NO_HOLE == 0 { Hole::Allowed } else { Hole::Never };
                Self::WriteZeroes { offset, len, hole, durability }
            }
            Command::CACHE => Self::Cache { offset, len },
            Command::BLOCK_STATUS => {
                Self::BlockStatus { offset, len, pieces: pieces_unless(flag::REQ_ONE) }
            }
            _ => return Err(Errno::EINVAL),
        })
    }
}

/// The flags a command takes on this connection; an error for a command that nobody knows.
fn flags_accepted(command: Command, terms: &Terms) -> Result<u16, Errno> {
    let only_if = |agreed: bool, bits: u16| if agreed { bits } else { 0 };
    let own = match command {
        Command::READ => only_if(terms.structured, flag::DF),
        Command::WRITE | Command::FLUSH | Command::TRIM | Command::CACHE => 0,
        Command::WRITE_ZEROES => flag::NO_HOLE | only_if(terms.fast_zeroes, flag::FAST_ZERO),
        Command::BLOCK_STATUS if terms.block_status => flag::REQ_ONE,
        _ => return Err(Errno::EINVAL),
    };
    Ok(flag::FUA | own)
}

fn changes_data(command: Command) -> bool {
    matches!(command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES)
}

fn check_permission(command: Command, terms: &Terms) -> Result<(), Errno> {
    if terms.read_only && changes_data(command) { Err(Errno::EPERM) } else { Ok(()) }
}

/// Length limit, alignment, and the end of the export, in 64 bits and without wrapping.
fn check_range(header: &RequestHeader, terms: &Terms, size: u64) -> Result<(), Errno> {
    let &RequestHeader { command, offset, len, .. } = header;
    let has_payload = matches!(command, Command::READ | Command::WRITE);
    if has_payload && len > terms.payload_bytes_max {
        return Err(Errno::EINVAL);
    }
    let min = terms.block_bytes_min.max(1);
    if !offset.is_multiple_of(min.into()) || !len.is_multiple_of(min) {
        return Err(Errno::EINVAL);
    }
    match offset.checked_add(len.into()) {
        Some(end) if end <= size => Ok(()),
        _ if matches!(command, Command::WRITE | Command::WRITE_ZEROES) => Err(Errno::ENOSPC),
        _ => Err(Errno::EINVAL),
    }
}

#[cfg(test)]
mod tests;
