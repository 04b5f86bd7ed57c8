//! Blobs: what is put in comes out, and any flipped bit is noticed.

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::codec::testing::{any_edits, edited};
use crate::extent_map::Advance;
use crate::geometry::{BLOCK_LEN, BlockRange, to_u64, to_usize};
use crate::ids::{DiskId, Nonce, ObjectId};

fn blob_name(seq: u64) -> ObjectRef {
    ObjectRef { disk: DiskId(0xd15c), object: ObjectId { epoch: 2, nonce: Nonce(9), seq } }
}

/// A block of text-like or random bytes, and its checksum.
fn block(number: u64, random: bool) -> (Vec<u8>, u32) {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let bytes: Vec<u8> = match random {
        true => (0..BLOCK_LEN / 8).flat_map(|_| next()).collect(),
        false => (0..BLOCK_LEN).map(|at| if at % 64 == 0 { next()[0] } else { b'a' }).collect(),
    };
    let crc = crc32fast::hash(&bytes);
    (bytes, crc)
}

fn push_run(
    builder: &mut BlobBuilder,
    range: BlockRange,
    lsn: u64,
    origin: Option<Location>,
    random: bool,
) {
    let mut data = Vec::new();
    let mut crcs = Vec::new();
    for number in range.start..range.end {
        let (bytes, crc) = block(number, random);
        data.extend(bytes);
        crcs.push(crc);
    }
    builder.push(range.start, lsn, origin, &crcs, &data);
}

fn read(blob: &Blob, location: &Location) -> crate::error::Result<(Frame, usize)> {
    let Location::Data { blob: object, frame_offset, frame_len, index } = *location else {
        panic!("zeros have no frame");
    };
    let start = to_usize(frame_offset.into());
    let bytes = blob.bytes.slice(start..start + to_usize(frame_len.into()));
    Ok((decode_frame(&bytes, &object, frame_offset)?, usize::from(index)))
}

fn sample(compression: Compression) -> Blob {
    let mut builder = BlobBuilder::new(blob_name(1), compression);
    push_run(&mut builder, BlockRange::new(100, 40), 7, None, false);
    builder.push_zero(BlockRange::new(1 << 20, 1 << 33), 9);
    push_run(&mut builder, BlockRange::new(200, 1), 8, None, true);
    let origin = Location::Data { blob: blob_name(77), frame_offset: 5, frame_len: 6, index: 3 };
    push_run(&mut builder, BlockRange::new(10, 3), 5, Some(origin), true);
    builder.finish()
}

proptest! {
    #[test]
    fn every_block_put_into_a_blob_is_read_back_from_its_location(
        runs in prop::collection::vec((0..50u64, 1..70u64, any::<bool>(), 0..4u8, 1..1u64 << 40), 1..12),
        order in any::<prop::sample::Index>(),
        off: bool,
    ) {
        let compression = if off { Compression::Off } else { Compression::default() };
        let mut builder = BlobBuilder::new(blob_name(1), compression);
        let mut extents = Vec::new();
        let mut at = 0;
        for (gap, count, random, kind, lsn) in runs {
            extents.push((BlockRange::new(at + gap, count), random, kind == 0, lsn));
            at += gap + count;
        }
        let middle = order.index(extents.len());
        extents.rotate_left(middle);
        for (range, random, zero, lsn) in &extents {
            match zero {
                true => builder.push_zero(*range, *lsn),
                false => push_run(&mut builder, *range, *lsn, None, *random),
            }
        }
        let blob = builder.finish();
        let tail = blob.bytes.slice(blob.bytes.len() - to_usize(blob.footer_len.into())..);
        prop_assert_eq!(footer_len(&tail, &blob.object).unwrap(), u64::from(blob.footer_len));
        let footer = decode_footer(&tail, &blob.object).unwrap();
        prop_assert_eq!(&footer.extents, &blob.extents);
        prop_assert_eq!(footer.encode(), &tail[..]);
        extents.sort_by_key(|extent| extent.0.start);
        let mut found = footer.extents.iter();
        for (range, random, zero, lsn) in extents {
            let mut at = range.start;
            while at < range.end {
                let part = found.next().unwrap();
                prop_assert_eq!((part.range.start, part.lsn), (at, lsn));
                prop_assert_eq!(part.location == Location::Zero, zero);
                at = part.range.end;
                for number in part.range.start..part.range.end {
                    if zero { break; }
                    let place = part.location.advance(number - part.range.start);
                    let (frame, index) = read(&blob, &place).unwrap();
                    prop_assert_eq!(&frame.block(index)[..], &block(number, random).0[..]);
                    prop_assert_eq!(frame.block_numbers().nth(index), Some(number));
                }
            }
            prop_assert_eq!(at, range.end);
        }
        prop_assert_eq!(found.next(), None);
    }

    #[test]
    fn what_reads_as_a_footer_is_the_only_encoding_of_that_footer(edits in any_edits()) {
        let blob = sample(Compression::Off);
        let tail = &blob.bytes[blob.bytes.len() - to_usize(blob.footer_len.into())..];
        let mut bytes = edited(&tail[..tail.len() - TRAILER_LEN], &edits);
        let (len, crc) = (u32::try_from(bytes.len()).unwrap(), crc32fast::hash(&bytes));
        let frames = to_u64(blob.bytes.len() - tail.len());
        bytes.extend(footer::encode_trailer(frames, len, crc));
        if let Ok(footer) = decode_footer(&bytes, &blob.object) {
            prop_assert_eq!(footer.encode(), bytes);
        }
    }

    #[test]
    fn what_reads_as_a_raw_frame_is_the_only_encoding_of_that_frame(edits in any_edits()) {
        let blob = sample(Compression::Off);
        let Location::Data { frame_offset: 0, frame_len, .. } = blob.extents[1].location else {
            panic!("the first frame holds the blocks from 100 on");
        };
        let payload = FRAME_BLOCKS_MAX * BLOCK_LEN;
        let (header, blocks) = blob.bytes[..to_usize(frame_len.into())]
            .split_at(to_usize(frame_len.into()) - payload);
        let mut bytes = edited(&header[..header.len() - 4], &edits);
        let crc = crc32fast::hash(&bytes);
        bytes.extend(crc.to_le_bytes());
        bytes.extend(blocks);
        let bytes = Bytes::from(bytes);
        if let Ok(Frame { runs, crcs, blocks }) = decode_frame(&bytes, &blob.object, 0) {
            let payload = frame::Payload { runs: &runs, crcs: &crcs, raw: &blocks, compressed: None };
            let mut again = Vec::new();
            frame::encode_frame(&mut again, &blob.object, &payload);
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn noise_is_never_a_footer_or_frame(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(decode_footer(&bytes, &blob_name(1)).is_err());
        prop_assert!(footer_len(&bytes, &blob_name(1)).is_err());
        prop_assert!(decode_frame(&Bytes::from(bytes), &blob_name(1), 0).is_err());
    }
}

/// Whether flips of this bit are tried: all of them, but of plain payload one per byte.
fn is_tried(at: usize, bit: usize) -> bool {
    at % BLOCK_LEN < 600 || at % 8 == bit
}

#[test]
fn any_flipped_bit_in_a_frame_or_footer_is_an_error_that_names_the_blob() {
    let blob = sample(Compression::default());
    let frames = blob.bytes.len() - to_usize(blob.footer_len.into());
    for (at, bit) in (0..blob.bytes.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        if !is_tried(at, bit) {
            continue;
        }
        let mut bytes = blob.bytes.to_vec();
        bytes[at] ^= 1 << bit;
        let error = if at < frames {
            let of_frame = |extent: &&BlobExtent| match extent.location {
                Location::Data { frame_offset, frame_len, .. } => {
                    (frame_offset..frame_offset + frame_len).contains(&u32::try_from(at).unwrap())
                }
                Location::Zero => false,
            };
            let place = blob.extents.iter().find(of_frame).unwrap().location;
            read(&Blob { bytes: bytes.into(), ..blob.clone() }, &place).unwrap_err()
        } else {
            decode_footer(&bytes[frames..], &blob.object).unwrap_err()
        };
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.report().contains(&blob.object.blob_key().to_string()), "{}", error.report());
    }
}

#[test]
fn a_block_that_changed_between_arrival_and_encoding_is_found_when_read() {
    let mut builder = BlobBuilder::new(blob_name(1), Compression::default());
    let (mut bytes, crc) = block(5, false);
    bytes[17] ^= 1;
    builder.push(5, 1, None, &[crc], &bytes);
    let blob = builder.finish();
    let error = read(&blob, &blob.extents[0].location).unwrap_err();
    assert!(error.report().contains("crc mismatch in block 5"), "{}", error.report());
}

#[test]
fn a_frame_of_another_blob_is_refused() {
    let blob = sample(Compression::Off);
    let moved = blob.extents[0].location;
    let Location::Data { frame_offset, frame_len, index, .. } = moved else { panic!() };
    let elsewhere = Location::Data { blob: blob_name(2), frame_offset, frame_len, index };
    let error = read(&blob, &elsewhere).unwrap_err();
    assert!(error.report().contains("a frame of blob"), "{}", error.report());
}

#[test]
fn the_footer_of_4096_scattered_blocks_is_far_below_100_kib() {
    let mut builder = BlobBuilder::new(blob_name(1), Compression::Off);
    let data = vec![0; BLOCK_LEN];
    for index in 0..4096u64 {
        let lsn = (1 << 40) + index * 7919 % 4096 * 8192;
        builder.push(index * 999_983, lsn, None, &[0], &data);
    }
    let blob = builder.finish();
    assert_eq!(blob.extents.len(), 4096);
    assert!(blob.footer_len < 50 << 10, "{} bytes", blob.footer_len);
    let overhead = blob.bytes.len() - 4096 * BLOCK_LEN;
    assert!(overhead < 90 << 10, "{overhead} bytes beside the data");
}
