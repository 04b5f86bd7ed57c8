//! The judge is judged: it accepts each image that a correct disk may leave, and no other.

use std::time::Duration;

use super::*;

const SEED: u64 = 7;

fn write(block: u64, sequence: u64, sent: Tick, acked: Option<Tick>) -> Op {
    let acked_at = acked.map(Duration::from_secs);
    Op { block, block_count: 1, sequence, zero: false, fua: false, sent, acked, acked_at }
}

/// Two blocks; block 0 gets versions 1 and 3, block 1 version 2, each acknowledged before the next
/// is sent; version 4 of block 1 is under way.
fn model() -> Model {
    let mut model = Model::new(2);
    let ops = [
        write(0, 1, 1, Some(2)),
        write(1, 2, 3, Some(4)),
        write(0, 3, 5, Some(6)),
        write(1, 4, 7, None),
    ];
    model.absorb(&ops, &[4]);
    model
}

fn image(versions: [u64; 2]) -> Image {
    let content = |version| if version == 0 { Content::Zero } else { Content::Version(version) };
    Image::of(versions.map(content).to_vec())
}

fn accepts(check: impl Fn(&Model, &Image) -> Verdict, versions: [u64; 2]) -> Option<Verdict> {
    let run = || check(&model(), &image(versions));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).ok()
}

#[test]
fn a_block_survives_encoding_and_tells_what_it_is() {
    let bytes = encode(SEED, 5, 9);
    assert_eq!(decode(SEED, 5, &bytes), Content::Version(9));
    assert_eq!(decode(SEED, 5, &[0; BLOCK]), Content::Zero);
    assert!(matches!(decode(SEED, 6, &bytes), Content::Garbage(_)), "another block's bytes");
    assert!(matches!(decode(8, 5, &bytes), Content::Garbage(_)), "another run's bytes");
    let mut flipped = bytes.clone();
    flipped[2000] ^= 1;
    assert!(matches!(decode(SEED, 5, &flipped), Content::Garbage(_)), "a flipped bit");
    let mut torn = bytes;
    torn[..SECTOR].copy_from_slice(&encode(SEED, 5, 10)[..SECTOR]);
    assert!(matches!(decode(SEED, 5, &torn), Content::Garbage(_)), "a torn block");
}

#[test]
fn after_a_kill_only_what_was_under_way_is_open() {
    let check = Model::assert_nothing_acknowledged_is_lost;
    assert!(accepts(check, [3, 2]).is_some(), "everything acknowledged");
    assert!(accepts(check, [3, 4]).is_some(), "and the write under way");
    assert!(accepts(check, [1, 2]).is_none(), "an older version of block 0");
    assert!(accepts(check, [3, 0]).is_none(), "block 1 lost its write");
    assert!(accepts(check, [4, 2]).is_none(), "a version never written there");
}

#[test]
fn after_a_power_cut_flushed_writes_are_bound_and_later_ones_are_open() {
    let check = Model::assert_nothing_flushed_is_lost;
    assert!(accepts(check, [1, 2]).is_some(), "exactly what was flushed");
    assert!(accepts(check, [3, 2]).is_some(), "and more");
    assert!(accepts(check, [0, 2]).is_none(), "a flushed write is missing");
    assert!(accepts(check, [1, 0]).is_none(), "a flushed write is missing");
}

#[test]
fn after_the_loss_of_a_host_every_block_is_of_one_moment() {
    let check = Model::assert_one_moment;
    let lost = |versions| accepts(check, versions).map(|verdict| verdict.lost_writes);
    assert_eq!(lost([0, 0]), Some(3), "before the first write");
    assert_eq!(lost([1, 0]), Some(2), "after the first");
    assert_eq!(lost([1, 2]), Some(1), "after the second");
    assert_eq!(lost([3, 2]), Some(0), "after the third");
    assert_eq!(lost([3, 4]), Some(0), "with the write under way");
    assert_eq!(lost([0, 2]), None, "the second write without the first");
    assert_eq!(lost([3, 0]), None, "the third write without the second");
    assert_eq!(lost([1, 4]), None, "the fourth write without the third");
    let verdict = accepts(check, [1, 0]).unwrap();
    assert_eq!(verdict.lost_span, Duration::from_secs(2), "from tick 4 to tick 6");
}

#[test]
fn a_moment_can_be_bounded_on_both_sides() {
    let fits = |versions, when| {
        let run = || model().assert_one_moment_within(&image(versions), when);
        std::panic::catch_unwind(run).is_ok()
    };
    assert!(fits([1, 2], 4..=5), "between the second and the third write");
    assert!(!fits([1, 2], 7..=9), "the third was acknowledged before");
    assert!(!fits([3, 2], 2..=4), "the third was sent after");
}

#[test]
fn zeros_of_several_writes_are_told_apart_by_their_moment() {
    let mut model = Model::new(2);
    let zero =
        |block, sequence, sent, acked| Op { zero: true, ..write(block, sequence, sent, acked) };
    let ops = [
        write(0, 1, 1, Some(2)),
        write(1, 2, 3, Some(4)),
        zero(0, 3, 5, Some(6)),
        write(0, 4, 7, Some(8)),
    ];
    model.absorb(&ops, &[]);
    let late = model.assert_one_moment(&Image::of(vec![Content::Zero, Content::Version(2)]));
    assert_eq!(late.lost_writes, 1, "zeroed after both writes: only the last is missing");
    let early = model.assert_one_moment(&Image::of(vec![Content::Zero, Content::Zero]));
    assert_eq!(early.lost_writes, 4, "never written");
}

#[test]
fn a_settled_image_is_the_new_past() {
    let mut model = model();
    model.settle(&image([3, 2]));
    model.assert_nothing_acknowledged_is_lost(&image([3, 2]));
    let late = std::panic::catch_unwind(|| {
        model.assert_nothing_acknowledged_is_lost(&image([3, 4]));
    });
    assert!(late.is_err(), "the write that did not happen must not appear later");
}
