//! The NBD protocol over anything that is a range of bytes.
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
