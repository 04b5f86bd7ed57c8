//! Scenarios.
fn main() {}
