//! Clients that take more than their share: silent ones, ones that never read, ones that come by
//! the hundred.

use std::time::Duration;

use nbd_server::{Limits, ServerConfig};

use crate::client::*;
use crate::hosts::puppet;

/// Fails if silent connections keep a real client out.
#[test]
fn a_flood_of_silent_connections_does_not_keep_clients_out() {
    let config = ServerConfig { limits: Limits::new(8, 1 << 20), ..ServerConfig::default() };
    let (host, _puppet) = puppet(config);
    let mut worker = host.enter("");
    let mut silent = Vec::new();
    for index in 0..200 {
        let mut client = Client::silent(&host.socket);
        if index % 2 == 0 {
            client.put(&[0, 0, 0]);
        }
        silent.push(client);
    }
    let mut late = host.enter("");
    assert_eq!(late.ask(FLUSH, 0, 0, 0), 0);
    assert_eq!(worker.ask(FLUSH, 0, 0, 0), 0);
    assert!(host.server.connections().len() <= 8);
}

/// Fails if more clients are served than allowed, or if one that works is ended for a new one.
#[test]
fn a_full_house_turns_new_clients_away() {
    let config = ServerConfig { limits: Limits::new(2, 1 << 20), ..ServerConfig::default() };
    let (host, _puppet) = puppet(config);
    let (mut first, second) = (host.enter(""), host.enter(""));
    Client::silent(&host.socket).expect_end();
    assert_eq!(first.ask(FLUSH, 0, 0, 0), 0);
    drop(second);
    host.until_connections(1);
    host.enter("");
}

/// Fails if a client can stay in the handshake for ever.
#[test]
fn a_handshake_that_takes_too_long_is_ended() {
    let handshake_timeout = Duration::from_millis(20);
    let (host, _puppet) = puppet(ServerConfig { handshake_timeout, ..ServerConfig::default() });
    for bytes in [&b""[..], b"\0\0\0\x03", b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x08\0"] {
        let mut client = Client::silent(&host.socket);
        client.take(18);
        client.put(bytes);
        client.expect_end();
    }
    host.until_connections(0);
}

/// Fails if a client that never reads makes the server hold more than the limit, if it disturbs
/// another client, or if its replies are lost once it reads after all.
#[test]
fn a_client_that_stops_reading_is_served_no_further() {
    const READS: usize = 10_000;
    const LEN: u32 = 128 << 10;
    let (host, puppet) = puppet(ServerConfig::default());
    let mut client = host.enter("");
    let mut other = host.enter("");

    let mut sending = client.again();
    let sender = std::thread::spawn(move || {
        for _ in 0..READS {
            sending.send(READ, 0, 0, LEN);
        }
    });
    // What fits is asked of the export; then everything stands still but the other client.
    host.runtime.block_on(puppet.until(|journal| journal.finished >= 8));
    for _ in 0..1000 {
        assert_eq!(other.ask(FLUSH, 0, 0, 0), 0);
    }
    let asked = puppet.journal.borrow().finished - 1000;
    // A few MiB that wait, and a few that the socket holds; all of it would be 1.2 GiB.
    assert!(asked < 100, "{asked} reads without a reader");

    for _ in 0..READS {
        assert_eq!(client.reply().1, 0);
        assert!(client.take(LEN.try_into().unwrap()).iter().all(|byte| *byte == 0x5a));
    }
    sender.join().unwrap();
}

/// Fails if a client that sends many writes before it reads any reply is stuck.
#[test]
fn writes_go_on_while_their_replies_wait() {
    const WRITES: u64 = 20_000;
    let (host, _puppet) = puppet(ServerConfig::default());
    let mut client = host.enter("");
    for _ in 0..WRITES {
        client.send_with(WRITE, 0, 0, 4096, &[7; 4096]);
    }
    for _ in 0..WRITES {
        assert_eq!(client.reply().1, 0);
    }
}

/// Fails if more requests than allowed are in flight, or if the limit locks a connection up.
#[test]
fn requests_in_flight_are_limited() {
    let config = ServerConfig {
        in_flight_requests_max: 4,
        in_flight_bytes_max: 1000,
        ..ServerConfig::default()
    };
    let (host, puppet) = puppet(config);
    puppet.gate.send_replace(false);
    let mut client = host.enter("");
    for _ in 0..10 {
        client.send(FLUSH, 0, 0, 0);
    }
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 4));
    puppet.gate.send_replace(true);
    for _ in 0..10 {
        assert_eq!(client.reply().1, 0);
    }
    assert_eq!(client.read(0, 100_000).unwrap().len(), 100_000);
    assert_eq!(client.write(0, 0, &[1; 100_000]), 0);

    puppet.gate.send_replace(false);
    for _ in 0..3 {
        client.send(READ, 0, 0, 400);
    }
    let journal = host.runtime.block_on(puppet.until(|journal| journal.started.len() == 14));
    assert_eq!(journal.finished, 12);
    host.enter("");
    assert_eq!(puppet.journal.borrow().started.len(), 14);
    puppet.gate.send_replace(true);
    for _ in 0..3 {
        assert_eq!(client.reply().1, 0);
        client.take(400);
    }
}

/// Fails if clients that hoard the shared memory keep another from working.
#[test]
fn a_budget_that_is_used_up_leaves_small_requests_to_everyone() {
    let limits = Limits::new(100, 4 << 20);
    let (host, puppet) = puppet(ServerConfig { limits, ..ServerConfig::default() });
    puppet.gate.send_replace(false);
    let mut hoarders: Vec<_> = (0..4).map(|_| host.enter("")).collect();
    for hoarder in &mut hoarders {
        for _ in 0..40 {
            hoarder.send(READ, 0, 0, 128 << 10);
        }
    }
    // One MiB each, and what the budget has: that is all until something leaves.
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 4 * 8 + 32));
    let mut other = host.enter("");
    for _ in 0..8 {
        other.send(READ, 0, 0, 128 << 10);
    }
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 5 * 8 + 32));
    puppet.gate.send_replace(true);
    for client in hoarders.iter_mut().map(|hoarder| (hoarder, 40)).chain([(&mut other, 8)]) {
        for _ in 0..client.1 {
            assert_eq!(client.0.reply().1, 0);
            client.0.take(128 << 10);
        }
    }
}
