//! Structured replies and block status.

use nbd_server::ServerConfig;

use crate::client::*;
use crate::hosts::{FAILS_AT, memory, puppet};

const DATA: u16 = 1;
const HOLE: u16 = 2;
const NONE: u16 = 0;
const EXTENTS: u16 = 5;
const ERROR: u16 = 0x8001;
const PIECE: u32 = 64 << 10;

fn offset_of(chunk: &Chunk) -> u64 {
    u64::from_be_bytes(chunk.payload[..8].try_into().unwrap())
}

/// Fails if a hole is sent as data, or data as a hole, or at the wrong place.
#[test]
fn reads_send_holes_as_holes() {
    let host = memory(1 << 20);
    let mut client = Client::enter_structured(&host.socket, "d1");
    let at = u64::from(2 * PIECE);
    let cookie = client.send_with(WRITE, 0, at, 4, b"data");
    assert_eq!(client.reply(), (cookie, 0));

    let cookie = client.send(READ, 0, at - 512, PIECE + 1024);
    let chunks = client.chunks();
    let shape: Vec<_> = chunks.iter().map(|chunk| (chunk.kind, offset_of(chunk))).collect();
    assert_eq!(shape, [(HOLE, at - 512), (DATA, at), (HOLE, at + u64::from(PIECE))]);
    assert!(chunks.iter().all(|chunk| chunk.cookie == cookie));
    assert_eq!(chunks[0].payload[8..], 512_u32.to_be_bytes());
    assert_eq!(chunks[1].payload[8..12], *b"data");
    assert_eq!(chunks[1].payload.len(), 8 + (64 << 10));

    client.send(READ, DF, at - 512, 1024);
    let chunks = client.chunks();
    assert_eq!((chunks.len(), chunks[0].kind), (1, DATA));
    assert_eq!(chunks[0].payload[8..520], [0; 512]);
    assert_eq!(chunks[0].payload[520..524], *b"data");
}

/// Fails if a read is ever answered with a simple reply, which the client could not take.
#[test]
fn failed_and_empty_reads_are_structured_too() {
    let (host, _puppet) = puppet(ServerConfig::default());
    let mut client = Client::enter_structured(&host.socket, "puppet");
    client.send(READ, 0, FAILS_AT, 512);
    let chunks = client.chunks();
    assert_eq!((chunks.len(), chunks[0].kind), (1, ERROR));
    assert_eq!(chunks[0].payload, b"\0\0\0\x05\0\x0fblock 7 is gone");

    for (flags, offset, len) in [(REQ_ONE, 0, 512), (0, u64::MAX, 512), (0, 0, 64 << 20)] {
        client.send(READ, flags, offset, len);
        let chunks = client.chunks();
        assert_eq!((chunks.len(), chunks[0].kind), (1, ERROR));
        assert_eq!(chunks[0].payload[..4], EINVAL.to_be_bytes());
    }
    client.send(READ, 0, 0, 0);
    let chunks = client.chunks();
    assert_eq!((chunks.len(), chunks[0].kind, chunks[0].payload.len()), (1, NONE, 0));
}

/// Fails if extents do not add up to the range, or more come than were asked for.
#[test]
fn block_status_tells_data_from_holes() {
    let host = memory(1 << 20);
    let mut client = Client::enter_structured(&host.socket, "d1");
    let cookie = client.send_with(WRITE, 0, u64::from(PIECE), 4, b"data");
    assert_eq!(client.reply(), (cookie, 0));

    let extents = |client: &mut Client, flags, len| {
        client.send(STATUS, flags, 0, len);
        let chunks = client.chunks();
        assert_eq!((chunks.len(), chunks[0].kind), (1, EXTENTS));
        assert_eq!(chunks[0].payload[..4], [0, 0, 0, 1]);
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        let pairs = chunks[0].payload[4..].chunks(8);
        pairs.map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect::<Vec<_>>()
    };
    let rest = (1 << 20) - 2 * PIECE;
    assert_eq!(extents(&mut client, 0, 1 << 20), [(PIECE, 3), (PIECE, 0), (rest, 3)]);
    assert_eq!(extents(&mut client, REQ_ONE, 1 << 20), [(PIECE, 3)]);
    assert_eq!(extents(&mut client, REQ_ONE, 512), [(512, 3)]);
    client.send(STATUS, 0, 0, 0);
    assert_eq!(client.chunks()[0].kind, ERROR);
}
