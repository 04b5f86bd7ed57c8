//! The `blockd` program: all of it is in the library.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    blockd::cli::main()
}
