//! What requests do, byte for byte, and how wrong ones are answered.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nbd_server::{Durability, Hole, Listener, Server, ServerConfig};

use crate::client::*;
use crate::hosts::{Call, FAILS_AT, Host, Puppet, SHORT_AT, Stage, memory, puppet};

const MIB: u32 = 1 << 20;

/// A generator that is good enough to shake a disk, and the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// Fails if a request of any alignment changes a neighbour or misses a byte.
#[test]
fn requests_of_any_alignment_are_exact() {
    let host = memory(1 << 20);
    let mut client = host.enter("d1");
    let mut shadow: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    assert_eq!(client.write(0, 0, &shadow), 0);
    let mut dice = Dice(1);
    for turn in 0..3000 {
        let offset = dice.below(shadow.len());
        let len = 1 + dice.below(10_000).min(shadow.len() - offset - 1);
        let (range, at) = (offset..offset + len, offset as u64);
        match turn % 4 {
            0 => {
                let data: Vec<u8> =
                    (0..len).map(|_| u8::try_from(dice.below(256)).unwrap()).collect();
                assert_eq!(client.write(0, at, &data), 0);
                shadow[range].copy_from_slice(&data);
            }
            1 => {
                assert_eq!(client.ask(ZEROES, 0, at, u32::try_from(len).unwrap()), 0);
                shadow[range].fill(0);
            }
            _ => assert!(client.read(at, u32::try_from(len).unwrap()).unwrap() == shadow[range]),
        }
    }
    assert!(client.read(0, MIB).unwrap() == shadow);
    assert!(host.enter("d1").read(0, MIB).unwrap() == shadow);
}

/// Fails if a length near 4 GiB is cut, or its end computed in 32 bits.
#[test]
fn ranges_beyond_four_gigabytes_are_exact() {
    let host = memory(12 << 30);
    let mut client = host.enter("d1");
    let markers: Vec<u64> = (0..24).map(|index| index << 29).collect();
    for at in &markers {
        assert_eq!(client.write(0, *at, b"marker"), 0);
    }
    assert_eq!(client.ask(TRIM, 0, 3 << 30, 0xffff_f000), 0);
    assert_eq!(client.ask(ZEROES, 0, 1 << 30, 0x8000_0000), 0);
    let cleared = (1 << 30)..(7 << 30) - 4096;
    for at in &markers {
        let expected = if cleared.contains(at) { b"\0\0\0\0\0\0" } else { b"marker" };
        assert_eq!(client.read(*at, 6).unwrap(), expected, "at {at}");
    }
}

/// Fails if a wrong request has the wrong error, or costs the connection.
#[test]
fn wrong_requests_are_answered_and_the_connection_is_kept() {
    let size = (1 << 20) + 512;
    let host = memory(size);
    let mut client = host.enter("d1");
    let past_end = [(size, 512), (size - 511, 512), (u64::MAX - 511, 512)];
    for (offset, len) in past_end {
        assert_eq!(client.ask(READ, 0, offset, len), EINVAL);
        assert_eq!(client.ask(TRIM, 0, offset, len), EINVAL);
        assert_eq!(client.ask(CACHE, 0, offset, len), EINVAL);
        assert_eq!(client.ask(ZEROES, 0, offset, len), ENOSPC);
        assert_eq!(client.write(0, offset, &[1; 512]), ENOSPC);
    }
    for command in [READ, WRITE, TRIM, ZEROES, CACHE] {
        assert_eq!(client.ask(command, 0, 512, 0), 0, "command {command} of no length");
        if command != WRITE {
            assert_eq!(client.ask(command, 1 << 15, 0, 512), EINVAL);
        }
    }
    assert_eq!(client.write(1 << 15, 0, &[1; 512]), EINVAL);
    assert_eq!(client.ask(0x1234, 0, 0, 0), EINVAL);
    assert_eq!(client.ask(STATUS, 0, 0, 512), EINVAL);
    assert_eq!(client.ask(READ, DF, 0, 512), EINVAL);
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
}

/// Fails if the payload of 32 MiB is refused, or if a longer one gets the stream out of step.
#[test]
fn payloads_beyond_the_limit_are_skipped() {
    let host = memory(128 << 20);
    let mut client = host.enter("d1");
    let payload: Vec<u8> = (0..=250).cycle().take(65 << 20).collect();
    assert_eq!(client.write(0, 1, &payload[..32 << 20]), 0);
    assert_eq!(client.write(0, 0, &payload[..33 << 20]), EINVAL);
    assert_eq!(client.write(0, 0, &payload), EINVAL);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert!(client.read(1, 32 * MIB).unwrap() == payload[..32 << 20]);
    assert_eq!(client.read(0, 33 * MIB), Err(EINVAL));
    assert_eq!(client.read(0, 1).unwrap(), [0]);
}

/// Fails if a change to a read-only export gets to it, or is answered with success.
#[test]
fn a_read_only_export_refuses_every_change() {
    let puppet = Arc::new(Puppet { read_only: true, ..Arc::into_inner(Puppet::new()).unwrap() });
    let host = Host::start(Stage(Arc::clone(&puppet)), ServerConfig::default());
    let mut client = host.enter("");
    assert_eq!(client.flags & 2, 2);
    for flags in [0, FUA] {
        assert_eq!(client.write(flags, 0, &[1; 512]), EPERM);
        assert_eq!(client.ask(TRIM, flags, 0, 512), EPERM);
        assert_eq!(client.ask(ZEROES, flags, 0, 512), EPERM);
    }
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert_eq!(puppet.journal.borrow().started, [Call::Flush]);
}

/// Fails if a flag or a flush is lost between the wire and the export, or if requests that arrive
/// together reach it in another order.
#[test]
fn the_export_sees_what_was_asked_in_the_order_of_asking() {
    let (host, puppet) = puppet(ServerConfig::default());
    let mut client = host.enter("");
    client.send_with(WRITE, 0, 1, 4, b"data");
    client.send_with(WRITE, FUA, 2, 4, b"data");
    client.send(READ, 0, 3, 4);
    client.send(TRIM, 0, 4, 4);
    client.send(TRIM, FUA, 5, 4);
    client.send(ZEROES, 0, 6, 4);
    client.send(ZEROES, NO_HOLE | FUA, 7, 4);
    client.send(ZEROES, FAST_ZERO, 8, 4);
    client.send(CACHE, 0, 9, 4);
    client.send(FLUSH, 0, 0, 0);
    let journal = host.runtime.block_on(puppet.until(|journal| journal.finished == 10));
    use Durability::{Fua, Ordered};
    let expected = [
        Call::Write(1, Ordered),
        Call::Write(2, Fua),
        Call::Read(3),
        Call::Trim(4, Ordered),
        Call::Trim(5, Fua),
        Call::Zeroes(6, Hole::Allowed, Ordered),
        Call::Zeroes(7, Hole::Never, Fua),
        Call::Zeroes(8, Hole::Allowed, Ordered),
        Call::Cache(9),
        Call::Flush,
    ];
    assert_eq!(journal.started, expected);
}

/// Fails if one error takes other requests or the connection with it.
#[test]
fn one_error_among_many_requests_is_one_error() {
    let (host, puppet) = puppet(ServerConfig::default());
    puppet.gate.send_replace(false);
    let mut client = host.enter("");
    let mut bad = Vec::new();
    for index in 0..32 {
        let offset = match index {
            7 => FAILS_AT,
            21 => SHORT_AT,
            _ => index * 4096,
        };
        let cookie = client.send(READ, 0, offset, 4096);
        client.send_with(WRITE, 0, offset, 4, b"data");
        if offset >= FAILS_AT {
            bad.push(cookie);
        }
    }
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 64));
    puppet.gate.send_replace(true);
    for _ in 0..64 {
        let (cookie, error) = client.reply();
        if cookie % 2 == 1 {
            assert_eq!(error, if bad.contains(&cookie) { EIO } else { 0 });
            if error == 0 {
                assert_eq!(client.take(4096), [0x5a; 4096]);
            }
        } else {
            assert_eq!(error, 0);
        }
    }
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
}

/// Fails if the size at the time of the handshake still counts after the export has grown.
#[test]
fn an_export_may_grow_while_it_is_served() {
    let (host, puppet) = puppet(ServerConfig::default());
    let mut client = host.enter("");
    let size = client.size;
    assert_eq!(client.write(0, size, b"beyond"), ENOSPC);
    puppet.size.store(2 * size, Ordering::Relaxed);
    assert_eq!(client.write(0, size, b"beyond"), 0);
}

/// Fails if a connection needs more than the one thread it runs on.
#[test]
fn a_single_thread_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let path = socket.clone();
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let (started, ready) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = Listener::Unix(tokio::net::UnixListener::bind(path).unwrap());
            let stage = Arc::new(Stage(Puppet::new()));
            let server = Server::start(listener, stage, ServerConfig::default());
            started.send(()).unwrap();
            stopped.await.unwrap();
            server.shutdown().await;
        });
    });
    ready.recv().unwrap();
    let (mut first, mut second) = (Client::enter(&socket, ""), Client::enter(&socket, ""));
    for _ in 0..100 {
        assert_eq!(first.write(0, 0, &[1; 100_000]), 0);
        assert_eq!(second.read(0, 100_000).unwrap().len(), 100_000);
    }
    stop.send(()).unwrap();
    first.expect_end();
    thread.join().unwrap();
}
