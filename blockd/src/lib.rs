//! The daemon, its disks and its command line: the only crate that knows what a disk is.
//!
//! Reading order: `ids` and `error` (the words), `geometry`, `document` (how small objects are
//! written), `extent_map`, `blob`, `map`, `blob_table` (the formats), `head` and `registry` (the
//! mutable objects and how they are swapped), `lease`, `disk` (write, read, flush), `drain` (the one
//! order in which data leaves the log), `daemon`, `control` and `cli`.

#![forbid(unsafe_code)]

pub mod blob;
pub mod blob_table;
pub mod cache;
pub mod cli;
pub mod clock;
mod codec;
pub mod config;
pub mod control;
pub mod daemon;
pub mod disk;
pub mod document;
pub mod drain;
pub mod error;
pub mod extent_map;
pub mod failpoint;
pub mod fetch;
pub mod geometry;
pub mod head;
pub mod host;
pub mod ids;
pub mod lease;
pub mod local_db;
pub mod local_file;
pub mod map;
pub mod objects;
pub mod registry;
