//! Scenarios: one file per promise, in one test binary, since two cores link slowly.

#![forbid(unsafe_code)]

mod tidy;
