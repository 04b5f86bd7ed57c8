//! The validator as a table: command, flags, offset and length on one side, verdict on the other.

use proptest::prelude::*;

use super::*;

const SIZE: u64 = (12 << 30) + 512;
const MIB: u32 = 1 << 20;
const ALL: Terms = Terms {
    read_only: false,
    fast_zeroes: true,
    structured: true,
    block_status: true,
    block_bytes_min: 1,
    payload_bytes_max: 32 * MIB,
};
/// What a client gets that negotiates nothing, as a kernel does.
const PLAIN: Terms = Terms { structured: false, block_status: false, ..ALL };

#[track_caller]
fn check(
    terms: Terms,
    (command, flags, offset, len): (Command, u16, u64, u32),
    expected: Result<Request, Errno>,
) {
    let header = RequestHeader { flags, command, cookie: 7, offset, len };
    let verdict = Request::parse(&header, &terms, SIZE);
    assert_eq!(verdict, expected, "{command} flags {flags:#x} at {offset} len {len}");
}

use Command as C;
use Durability::{Fua, Ordered};
use Pieces::{Many, One};

/// Fails if a well-formed request is turned into another one.
#[test]
fn good_requests_keep_their_meaning() {
    let (offset, len) = (4095, 1);
    check(ALL, (C::READ, 0, offset, len), Ok(Request::Read { offset, len, pieces: Many }));
    check(ALL, (C::READ, flag::DF, offset, len), Ok(Request::Read { offset, len, pieces: One }));
    check(ALL, (C::READ, flag::FUA, offset, len), Ok(Request::Read { offset, len, pieces: Many }));
    let durability = Ordered;
    check(PLAIN, (C::WRITE, 0, offset, len), Ok(Request::Write { offset, len, durability }));
    check(PLAIN, (C::TRIM, 0, offset, len), Ok(Request::Trim { offset, len, durability }));
    let durability = Fua;
    check(
        PLAIN,
        (C::WRITE, flag::FUA, offset, len),
        Ok(Request::Write { offset, len, durability }),
    );
    check(PLAIN, (C::TRIM, flag::FUA, offset, len), Ok(Request::Trim { offset, len, durability }));
    check(PLAIN, (C::FLUSH, 0, 0, 0), Ok(Request::Flush));
    check(PLAIN, (C::FLUSH, flag::FUA, 0, 0), Ok(Request::Flush));
    check(PLAIN, (C::CACHE, 0, offset, len), Ok(Request::Cache { offset, len }));
    check(
        ALL,
        (C::BLOCK_STATUS, 0, offset, len),
        Ok(Request::BlockStatus { offset, len, pieces: Many }),
    );
    check(
        ALL,
        (C::BLOCK_STATUS, flag::REQ_ONE, offset, len),
        Ok(Request::BlockStatus { offset, len, pieces: One }),
    );
    check(PLAIN, (C::DISC, 0xffff, 1, 1), Ok(Request::Disconnect));
}

/// Fails if a flag of `WRITE_ZEROES` is ignored, or one that was not announced is taken.
#[test]
fn zeroes_take_their_flags_in_every_combination() {
    let (offset, len) = (0, 4096);
    for (flags, hole, durability) in [
        (0, Hole::Allowed, Ordered),
        (flag::NO_HOLE, Hole::Never, Ordered),
        (flag::FAST_ZERO, Hole::Allowed, Ordered),
        (flag::NO_HOLE | flag::FUA, Hole::Never, Fua),
        (flag::NO_HOLE | flag::FUA | flag::FAST_ZERO, Hole::Never, Fua),
    ] {
        let expected = Request::WriteZeroes { offset, len, hole, durability };
        check(PLAIN, (C::WRITE_ZEROES, flags, offset, len), Ok(expected));
    }
    let slow = Terms { fast_zeroes: false, ..ALL };
    check(slow, (C::WRITE_ZEROES, flag::FAST_ZERO, offset, len), Err(Errno::EINVAL));
}

/// Fails if the end of the export is off by one, wraps, or is answered with the wrong number.
#[test]
fn ranges_end_where_the_export_ends() {
    let past_end: [(u64, u32); 5] = [
        (SIZE, 512),
        (SIZE - 511, 512),
        (SIZE + 1, 0),
        (u64::MAX - 511, 512),
        (u64::MAX, u32::MAX),
    ];
    for (offset, len) in past_end {
        for command in [C::WRITE, C::WRITE_ZEROES] {
            let too_long = command == C::WRITE && len > ALL.payload_bytes_max;
            let errno = if too_long { Errno::EINVAL } else { Errno::ENOSPC };
            check(ALL, (command, 0, offset, len), Err(errno));
        }
        for command in [C::READ, C::TRIM, C::CACHE, C::BLOCK_STATUS] {
            check(ALL, (command, 0, offset, len), Err(Errno::EINVAL));
        }
    }
    let (offset, len, durability) = (SIZE - 512, 512, Ordered);
    check(ALL, (C::WRITE, 0, offset, len), Ok(Request::Write { offset, len, durability }));
}

/// Fails if a length near 4 GiB is cut to fewer bits, or held to the limit of payloads.
#[test]
fn long_ranges_without_payload_are_taken() {
    let (offset, len, durability) = (3 << 30, 0xffff_f000, Ordered);
    check(PLAIN, (C::TRIM, 0, offset, len), Ok(Request::Trim { offset, len, durability }));
    let (offset, len, hole) = (1 << 30, 0x8000_0000, Hole::Allowed);
    check(
        PLAIN,
        (C::WRITE_ZEROES, 0, offset, len),
        Ok(Request::WriteZeroes { offset, len, hole, durability }),
    );
}

/// Fails if a payload of 32 MiB is refused or a longer one accepted.
#[test]
fn payloads_are_limited() {
    let durability = Ordered;
    let len = 32 * MIB;
    check(ALL, (C::WRITE, 0, 0, len), Ok(Request::Write { offset: 0, len, durability }));
    check(ALL, (C::READ, 0, 0, len), Ok(Request::Read { offset: 0, len, pieces: Many }));
    for len in [len + 1, 65 * MIB, u32::MAX] {
        check(ALL, (C::WRITE, 0, 0, len), Err(Errno::EINVAL));
        check(ALL, (C::READ, 0, 0, len), Err(Errno::EINVAL));
    }
}

/// Fails if an empty range reaches an export, or hides an error.
#[test]
fn empty_ranges_do_nothing_and_succeed() {
    for command in [C::READ, C::WRITE, C::TRIM, C::WRITE_ZEROES, C::CACHE] {
        check(ALL, (command, 0, 4096, 0), Ok(Request::Nothing));
        check(ALL, (command, 0, SIZE, 0), Ok(Request::Nothing));
    }
    check(ALL, (C::BLOCK_STATUS, 0, 4096, 0), Err(Errno::EINVAL));
    check(ALL, (C::FLUSH, 0, 4096, 0), Err(Errno::EINVAL));
    check(ALL, (C::FLUSH, 0, 0, 4096), Err(Errno::EINVAL));
}

/// Fails if anything that changes data passes on a read-only export, or anything else does not.
#[test]
fn read_only_exports_refuse_every_change() {
    let terms = Terms { read_only: true, ..ALL };
    for command in [C::WRITE, C::TRIM, C::WRITE_ZEROES] {
        for flags in [0, flag::FUA] {
            for len in [0, 512] {
                check(terms, (command, flags, 0, len), Err(Errno::EPERM));
            }
        }
    }
    check(terms, (C::FLUSH, 0, 0, 0), Ok(Request::Flush));
    check(terms, (C::CACHE, 0, 0, 1), Ok(Request::Cache { offset: 0, len: 1 }));
}

/// Fails if a flag is taken by a command it does not belong to, or without being negotiated.
#[test]
fn flags_that_do_not_belong_are_refused() {
    for bit in 5..16 {
        for command in 0..8 {
            if Command(command) != C::DISC {
                check(ALL, (Command(command), 1 << bit, 0, 0), Err(Errno::EINVAL));
            }
        }
    }
    check(PLAIN, (C::READ, flag::DF, 0, 1), Err(Errno::EINVAL));
    check(ALL, (C::WRITE, flag::DF, 0, 1), Err(Errno::EINVAL));
    check(ALL, (C::TRIM, flag::NO_HOLE, 0, 1), Err(Errno::EINVAL));
    check(ALL, (C::READ, flag::REQ_ONE, 0, 1), Err(Errno::EINVAL));
    check(ALL, (C::WRITE, flag::FAST_ZERO, 0, 1), Err(Errno::EINVAL));
}

/// Fails if an unknown command, or one that was not negotiated, is anything but `EINVAL`.
#[test]
fn unknown_commands_are_refused() {
    for command in [8, 9, 4660, u16::MAX] {
        check(ALL, (Command(command), 0, 0, 0), Err(Errno::EINVAL));
    }
    check(PLAIN, (C::BLOCK_STATUS, 0, 0, 512), Err(Errno::EINVAL));
}

/// Fails if an announced minimum is not held to.
#[test]
fn an_announced_minimum_is_enforced() {
    let terms = Terms { block_bytes_min: 512, ..ALL };
    check(terms, (C::READ, 0, 511, 512), Err(Errno::EINVAL));
    check(terms, (C::WRITE, 0, 512, 511), Err(Errno::EINVAL));
    check(terms, (C::READ, 0, 512, 512), Ok(Request::Read { offset: 512, len: 512, pieces: Many }));
}

proptest! {
    /// Fails if any header panics, or yields a request that leaves the export.
    #[test]
    fn whatever_passes_is_in_range(
        flags: u16, command in 0u16..10, offset: u64, len: u32, size: u64, near_end: bool,
    ) {
        let offset = if near_end { size.wrapping_sub(u64::from(len)).wrapping_add(offset % 3) } else { offset };
        let header = RequestHeader { flags, command: Command(command), cookie: 0, offset, len };
        match Request::parse(&header, &ALL, size) {
            Ok(
                Request::Read { offset, len, .. }
                | Request::Write { offset, len, .. }
                | Request::Trim { offset, len, .. }
                | Request::WriteZeroes { offset, len, .. }
                | Request::Cache { offset, len }
                | Request::BlockStatus { offset, len, .. },
            ) => {
                prop_assert!(len > 0);
                prop_assert!(u128::from(offset) + u128::from(len) <= u128::from(size));
            }
            Ok(Request::Nothing | Request::Flush | Request::Disconnect) | Err(_) => {}
        }
    }
}
