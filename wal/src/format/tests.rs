//! Tests of the format: golden bytes, canonical decoding, and that nothing foreign verifies.

use std::fs;
use std::path::Path;

use super::*;

const ORIGIN: Origin =
    Origin { owner: OwnerId::new(*b"owner-0123456789"), epoch: 7, nonce: 0x0123_4567_89ab_cdef };

fn segment() -> SegmentHeader {
    SegmentHeader {
        nonce: ORIGIN.nonce,
        ordinal: 3,
        blocks: 4096,
        held: Some(Holding {
            owner: ORIGIN.owner,
            epoch: ORIGIN.epoch,
            sequence: 2,
            first_lsn: Lsn::new(41),
            synced_lsn: Lsn::new(40),
        }),
    }
}

fn frame() -> FrameHeader {
    let entry = |kind, first_block, count, data_index, data_blocks| Entry {
        kind,
        first_block,
        count,
        data_index,
        data_blocks,
    };
    FrameHeader {
        head: FrameHead {
            origin: ORIGIN,
            sequence: 2,
            block: 1,
            first_lsn: Lsn::new(41),
            synced_lsn: Lsn::new(40),
            records: 4,
            blocks: 3,
        },
        records: vec![
            entry(EntryKind::Write, 1 << 33, 2, 0, 2),
            entry(EntryKind::Zeroes, 5, 1 << 40, 2, 0),
            entry(EntryKind::Discard, 0, 1, 2, 0),
            entry(EntryKind::Barrier, 0, 11, 2, 1),
        ],
        crcs: vec![0xdead_beef, 0, 0x1234_5678],
    }
}

fn encode(header: &FrameHeader) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    let seed = RecordSeed::new(&header.head.origin);
    for (at, entry) in (0..).zip(&header.records) {
        let crcs = &header.crcs[index(entry.data_index)..][..index(entry.data_blocks)];
        let lsn = header.head.first_lsn.plus(u64::from(at));
        put_record(&mut block, at, entry, crcs, seed, lsn);
    }
    header.head.finish(&mut block);
    block
}

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Lets `change` damage a block, and returns it with a CRC that holds again.
fn forged(block: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut block = block.to_vec();
    change(&mut block);
    seal(&mut block);
    block
}

// Fails when a byte of the format changes, or an old byte is read differently.
#[test]
fn version_1_has_these_bytes() {
    let mut block = vec![0xff; BLOCK_BYTES];
    segment().encode(&mut block);
    assert_eq!(block, golden("segment-v1.bin"));
    assert_eq!(SegmentHeader::decode(&golden("segment-v1.bin")), Ok(segment()));

    let free = SegmentHeader { held: None, ..segment() };
    free.encode(&mut block);
    assert_eq!(block, golden("free-segment-v1.bin"));
    assert_eq!(SegmentHeader::decode(&golden("free-segment-v1.bin")), Ok(free));

    assert_eq!(encode(&frame()), golden("frame-v1.bin"));
    assert_eq!(FrameHeader::decode(&golden("frame-v1.bin")), Ok(frame()));
}

// Fails when a flipped bit anywhere in a header passes.
#[test]
fn a_flipped_bit_is_noticed() {
    let mut bytes = vec![0; BLOCK_BYTES];
    segment().encode(&mut bytes);
    for bit in 0..BLOCK_BYTES * 8 {
        let mut frame = encode(&frame());
        frame[bit / 8] ^= 1 << (bit % 8);
        assert!(FrameHeader::decode(&frame).is_err(), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(SegmentHeader::decode(&bytes).is_err(), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

// Fails when a header that says something impossible, under a CRC that holds, is believed.
#[test]
fn impossible_contents_are_refused() {
    let good = encode(&frame());
    let check = |what: &str, flaw: Flaw, change: &dyn Fn(&mut [u8])| {
        assert_eq!(FrameHeader::decode(&forged(&good, change)), Err(flaw), "{what}");
    };
    check("version", Flaw::Version(2), &|block| put_u32(block, AT_VERSION, 2));
    check("magic", Flaw::Magic, &|block| block[0] = 0);
    for (what, at) in [
        ("fixed part", FRAME_FIXED_END),
        ("unused crc", AT_BLOCK_CRCS + 12),
        ("unused record", AT_TABLE + 4 * RECORD_BYTES),
        ("end", BLOCK_BYTES - 1),
    ] {
        check(&format!("reserved byte in the {what}"), Flaw::Contents, &|block| block[at] = 1);
    }
    check("too many records", Flaw::Contents, &|block| put_u16(block, AT_RECORDS, 129));
    check("too many blocks", Flaw::Contents, &|block| put_u16(block, AT_BLOCKS, 65));
    check("fewer blocks than records use", Flaw::Contents, &|block| put_u16(block, AT_BLOCKS, 2));
    check("synced before written", Flaw::Contents, &|block| put_u64(block, AT_SYNCED_LSN, 41));
    check("last lsn", Flaw::Contents, &|block| put_u64(block, AT_FIRST_LSN, u64::MAX));
    check("kind of record", Flaw::Contents, &|block| block[AT_TABLE + 16] = 9);
    check("place of data", Flaw::Contents, &|block| block[AT_TABLE + 17] = 1);
    check("other lsn", Flaw::Contents, &|block| put_u64(block, AT_FIRST_LSN, 42));
    check("other epoch", Flaw::Contents, &|block| put_u64(block, AT_EPOCH, 8));
}

// Fails when a record under construction verifies for another writer, position or data.
#[test]
fn a_staged_record_is_bound_to_its_writer_and_position() {
    let block = encode(&frame());
    let seed = RecordSeed::new(&ORIGIN);
    assert_eq!(get_record(&block, 0, &seed, Lsn::new(41)), Some(frame().records[0]));
    assert_eq!(get_record(&block, 0, &seed, Lsn::new(42)), None);
    for other in [
        Origin { epoch: 8, ..ORIGIN },
        Origin { nonce: 1, ..ORIGIN },
        Origin { owner: OwnerId::new([0; 16]), ..ORIGIN },
    ] {
        assert_eq!(get_record(&block, 0, &RecordSeed::new(&other), Lsn::new(41)), None);
    }
    let mut other_data = block.clone();
    put_u32(&mut other_data, AT_BLOCK_CRCS, 1);
    assert_eq!(get_record(&other_data, 0, &seed, Lsn::new(41)), None);
}

// Fails when bytes from anywhere make a decoder panic, or decode to what encodes differently.
#[test]
fn what_decodes_encodes_to_the_same_bytes() {
    let mut random = crate::sim::SimRandom::new(1);
    let good = encode(&frame());
    let mut decoded = 0;
    for _ in 0..20_000 {
        let block = forged(&good, |block| {
            for _ in 0..=random.below(3) {
                let at = usize::try_from(random.below(512)).unwrap();
                block[at] = random.draw().to_le_bytes()[0];
            }
        });
        if let Ok(header) = FrameHeader::decode(&block) {
            assert_eq!(encode(&header), block);
            decoded += 1;
        }
        if let Ok(header) = SegmentHeader::decode(&block) {
            let mut again = vec![0; BLOCK_BYTES];
            header.encode(&mut again);
            assert_eq!(again, block);
        }
    }
    assert!(decoded > 0, "some changes are of fields that may have any value");
}
