//! The NBD protocol over anything that is a range of bytes.
//!
//! Implement [`Export`] for what is to be served and [`ExportDirectory`] for the place where it is
//! found, and [`Server::start`] does the rest. This crate knows nothing of disks or logs; see the
//! rules in [`Export`] for what it expects of them.
//!
//! **Served**: fixed newstyle negotiation with `EXPORT_NAME`, `LIST`, `INFO`, `GO`, `ABORT`,
//! `STRUCTURED_REPLY`, `LIST_META_CONTEXT` and `SET_META_CONTEXT` (`base:allocation`); all
//! commands but `RESIZE`, with all their flags, of any alignment, and with lengths up to 4 GiB
//! where there is no payload; many connections to one export.
//!
//! **Refused**: oldstyle negotiation; TLS and extended headers, which are unknown options here;
//! payloads above [`ServerConfig::payload_bytes_max`], which are skipped.
//!
//! Code map, in reading order:
//!
//! | file | what it holds |
//! |---|---|
//! | `export.rs`, `error.rs` | what the server needs of an export, and how an export says no |
//! | [`wire`] | every number and every structure on the wire |
//! | [`handshake`] | the negotiation, as a state machine without I/O |
//! | [`request`] | from a raw header to a request that is known to make sense, or an error |
//! | `session.rs` | one connection: the negotiation, then `session/transmission.rs` |
//! | `session/` | `input.rs` and `output.rs` move bytes, `reply.rs` writes replies |
//! | `limits.rs`, `registry.rs` | how many connections and bytes there are, and who is connected |
//! | `server.rs` | listeners, the accept loop, shutdown |

#![forbid(unsafe_code)]

mod error;
mod export;
pub mod handshake;
mod limits;
mod registry;
pub mod request;
mod server;
mod session;
pub mod wire;

pub use error::{ExportError, ExportErrorKind, OpenError};
pub use export::{
    BlockSizes, Durability, EXTENTS_MAX, Export, ExportDirectory, ExportInfo, Extent, ExtentKind,
    Hole, ReadPart,
};
pub use limits::Limits;
pub use registry::ConnectionInfo;
pub use server::{Listener, Server, ServerConfig};
