//! What a scenario tells its reader: the seed, the counts, the reason of a skip.

/// Prints one line beside the test's other output.
#[expect(clippy::print_stderr, reason = "the seam through which the harness speaks")]
pub fn say(line: &str) {
    eprintln!("{line}");
}
