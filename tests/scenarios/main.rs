//! Scenarios: one file per promise, in one test binary, since two cores link slowly.

// Says to the lints what cargo knows: all of this is test code, also where no `#[test]` stands.
#![cfg(test)]
#![forbid(unsafe_code)]

mod cli;
mod crash;
mod daemon;
mod guest;
mod haggling;
mod handover;
mod host_loss;
mod idle;
mod kill_points;
mod lease;
mod local_db;
mod log_io;
mod names;
mod nbd;
mod outage;
mod snapshot;
mod store_faults;
mod tidy;
mod wal;
