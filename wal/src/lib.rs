//! A write-ahead log of block records on O_DIRECT files.
//!
//! It knows bytes, blocks of 4 KiB and LSNs. Whose records they are is an opaque [`OwnerId`].
//!
//! What it promises:
//! - *acknowledged* ([`Log::wait_acknowledged`]): killing the process loses nothing up to there;
//! - *synced* ([`Log::wait_synced`]): a power cut loses nothing up to there;
//! - a replay ([`LogDir::start`]) gives a prefix of the write order that holds everything promised,
//!   and nothing that was never written; where it cannot, it says which file and offset is damaged
//!   and changes nothing;
//! - appending never waits for the device; a full log or ring is [`ErrorKind::Full`], and passes.
//!
//! In reading order: [`Lsn`]; `format`, the bytes on disk; `storage`, the seam to the world, and
//! `direct`, the real one; `memory` and `crcs`, the only unsafe code; `segment`, files and their
//! pool; `ring`, the staging slots; `frame`, where blocks are read from; `record`, `log` and
//! `writer`, the path of a record; `work`, the threads' queue; `scan`, `recover` and `start`, the way back after
//! a crash, and `quarantine` for what must not be replayed; `dir`, which holds all of it together; `sim`, another world for tests.
#![deny(unsafe_code)]

mod config;
mod crcs;
mod dir;
mod direct;
mod error;
mod format;
mod frame;
mod identity;
mod log;
mod lsn;
mod memory;
mod quarantine;
mod record;
mod recover;
mod ring;
mod scan;
mod segment;
pub mod sim;
mod start;
pub mod storage;
mod work;
mod writer;

pub use config::{LogConfig, Seams, StagingConfig, SyncMethod};
pub use dir::{Counters, LogDir};
pub use direct::DirectStorage;
pub use error::{Error, ErrorKind, Result};
pub use format::{BARRIER_BYTES, BLOCK_BYTES, FRAME_BLOCKS, FRAME_RECORDS};
pub use frame::{Frame, Place};
pub use log::{Appended, Inline, Log, Positions};
pub use lsn::{Lsn, OwnerId};
pub use memory::BlockBuf;
pub use quarantine::Quarantined;
pub use record::{Record, ZeroKind};
pub use ring::Staging;
pub use scan::{Recovered, RecoveredKind};
pub use start::{Recovery, Start};
