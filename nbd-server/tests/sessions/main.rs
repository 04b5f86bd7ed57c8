//! Whole conversations over real sockets: what clients get, and what the server does when they
//! misbehave. The client has its own encoder, so that a mistake in the codec cannot hide.

#![expect(clippy::unwrap_used, reason = "this is all test code")]

mod client;
mod endings;
mod hosts;
mod limits;
mod negotiation;
mod noise;
mod requests;
mod structured;

#[path = "../../examples/memory/disk.rs"]
mod disk;
