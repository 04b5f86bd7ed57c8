//! The promises of the log, tried on real files. One binary, since linking is slow.

mod replay;
mod support;
