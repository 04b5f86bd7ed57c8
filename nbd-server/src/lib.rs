//! The NBD protocol over anything that is a range of bytes.
mod error;
mod export;
pub mod wire;
pub use error::{ExportError, ExportErrorKind, OpenError};
pub use export::{
    BlockSizes, Durability, EXTENTS_MAX, Export, ExportDirectory, ExportInfo, Extent, ExtentKind,
    Hole, ReadPart,
};
