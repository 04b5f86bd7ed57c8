//! What the scenarios stand on: the real binary as a process, an independent NBD client, a real
//! object store, a proxy that makes the store misbehave, and a model that judges what came back.
//!
//! Nothing here imports the crates under test, so a mistake shared by a codec and its own test
//! cannot hide. A harness function that finds the world broken panics with what it saw: its caller
//! is always a test.
//!
//! Reading order: [`process`] and [`cli`] start the daemon and talk to it, [`nbd_client`] is the
//! guest, [`model`] and [`workload`] write numbered blocks and check them, [`store`], [`s3`]
//! and [`s3_proxy`] are the store and its faults.

#![forbid(unsafe_code)]

pub mod cli;
pub mod logs;
pub mod model;
pub mod nbd_client;
pub mod nbd_handshake;
pub mod process;
pub mod random;
pub mod report;
pub mod s3;
pub mod s3_proxy;
pub mod store;
pub mod tools;
pub mod wait;
pub mod workload;
