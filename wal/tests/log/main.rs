//! The promises of the log, tried on real files. One binary, since linking is slow.
#![expect(
    clippy::unwrap_used,
    reason = "a test ends where it fails; helpers are not marked as tests"
)]
#![expect(clippy::cast_possible_truncation, reason = "test data is small")]
#![expect(clippy::print_stdout, reason = "a test that is skipped says why")]

mod damage;
mod flow;
mod gate;
mod model;
mod quarantine;
mod replay;
mod staging;
mod stress;
mod support;
