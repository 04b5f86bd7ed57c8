//! How connections end: by a goodbye, by a client that is gone, by the server, by a panic.

use std::sync::Arc;
use std::time::Duration;

use nbd_server::ServerConfig;

use crate::client::*;
use crate::disk::{Disks, MemoryDisk};
use crate::hosts::{Host, PANICS_AT, memory, puppet};

/// Fails if a goodbye cuts off the replies to what was asked before.
#[test]
fn a_goodbye_waits_for_the_requests_before_it() {
    let (host, puppet) = puppet(ServerConfig::default());
    puppet.gate.send_replace(false);
    let mut client = host.enter("");
    for _ in 0..8 {
        client.send(READ, 0, 0, 4096);
    }
    client.send(DISC, 0, 0, 0);
    client.send(FLUSH, 0, 0, 0);
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 8));
    puppet.gate.send_replace(true);
    for _ in 0..8 {
        assert_eq!(client.reply().1, 0);
        client.take(4096);
    }
    client.expect_end();
    host.until_connections(0);
    assert_eq!(puppet.journal.borrow().started.len(), 8);
}

/// Fails if a client that closes its sending half loses replies.
#[test]
fn a_client_that_has_nothing_more_to_ask_still_gets_its_replies() {
    let (host, puppet) = puppet(ServerConfig::default());
    puppet.gate.send_replace(false);
    let mut client = host.enter("");
    client.send(READ, 0, 0, 4096);
    client.finish_sending();
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 1));
    puppet.gate.send_replace(true);
    assert_eq!(client.reply().1, 0);
    client.take(4096);
    client.expect_end();
}

/// Fails if part of a payload is written, or if a task waits for the rest for ever.
#[test]
fn half_a_payload_changes_nothing() {
    let host = memory(4 << 20);
    let old = vec![1; 1 << 20];
    assert_eq!(host.enter("d1").write(0, 0, &old), 0);
    let new = vec![2; 1 << 20];
    for sent in [0, 1, 4096, 300 << 10, (1 << 20) - 1] {
        let mut client = host.enter("d1");
        client.send_with(WRITE, FUA, 0, 1 << 20, &new[..sent]);
        drop(client);
        let mut small = host.enter("d1");
        small.send_with(WRITE, 0, 0, 4096, &new[..sent.min(4095)]);
        drop(small);
    }
    for cut in [1, 27] {
        let mut client = host.enter("d1");
        client.put(&request(TRIM, 0, 1, 0, 1 << 20)[..cut]);
    }
    host.until_connections(0);
    assert!(host.enter("d1").read(0, 1 << 20).unwrap() == old);
}

/// Fails if requests of a client that is gone are dropped although they could be finished, or
/// hold the connection for longer than the closing timeout.
#[test]
fn requests_of_a_client_that_is_gone_are_finished_within_the_timeout() {
    let (host, puppet) = puppet(ServerConfig::default());
    puppet.gate.send_replace(false);
    let mut client = host.enter("");
    for _ in 0..8 {
        client.send_with(WRITE, 0, 0, 4, b"data");
    }
    drop(client);
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 8));
    puppet.gate.send_replace(true);
    host.until_connections(0);
    let journal = puppet.journal.borrow().clone();
    assert_eq!((journal.finished, journal.dropped), (8, 0));
}

/// The other half: fails if an export that hangs holds the connection for ever.
#[test]
fn requests_that_hang_are_dropped_with_their_connection() {
    let closing_timeout = Duration::from_millis(20);
    let (host, puppet) = puppet(ServerConfig { closing_timeout, ..ServerConfig::default() });
    puppet.gate.send_replace(false);
    let mut client = host.enter("");
    client.send(READ, 0, 0, 4);
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 1));
    drop(client);
    host.runtime.block_on(puppet.until(|journal| journal.dropped == 1));
    host.until_connections(0);
}

/// Fails if a shutdown waits for clients that say nothing, or cuts off one that is being served.
#[test]
fn shutdown_ends_connections_in_every_state() {
    let (host, puppet) = puppet(ServerConfig::default());
    puppet.gate.send_replace(false);
    let mut open = Vec::new();
    for _ in 0..5 {
        open.push(Client::silent(&host.socket));
        open.push(Client::greet(&host.socket, 3));
        let mut halfway = Client::greet(&host.socket, 3);
        halfway.option_claiming(7, 100, b"half");
        open.push(halfway);
        open.push(host.enter(""));
        let mut writing = host.enter("");
        writing.send_with(WRITE, 0, 0, 1 << 20, &[1; 1000]);
        open.push(writing);
    }
    let mut served = host.enter("");
    for _ in 0..32 {
        served.send(READ, 0, 0, 128 << 10);
    }
    host.runtime.block_on(puppet.until(|journal| journal.started.len() == 32));
    host.until_connections(26);

    let gate = puppet.gate.clone();
    let reader = std::thread::spawn(move || {
        for mut client in open {
            let mut bytes = Vec::new();
            // Whatever had been said before, then the end.
            let _ = std::io::Read::read_to_end(&mut client.stream, &mut bytes);
        }
        gate.send_replace(true);
        for _ in 0..32 {
            assert_eq!(served.reply().1, 0);
            served.take(128 << 10);
        }
        served.expect_end();
    });
    host.runtime.block_on(host.server.shutdown());
    reader.join().unwrap();
    assert!(host.server.connections().is_empty());
    assert!(std::os::unix::net::UnixStream::connect(&host.socket).is_err());
    host.runtime.block_on(host.server.shutdown());
}

/// Fails if a client of another export is ended, or one of this export is not.
#[test]
fn disconnect_ends_the_clients_of_one_export() {
    let disk = |name| Arc::new(MemoryDisk::new(name, 1 << 20));
    let host = Host::start(Disks(vec![disk("a"), disk("b")]), ServerConfig::default());
    let (mut first, mut second, mut other) = (host.enter("a"), host.enter("a"), host.enter("b"));
    host.runtime.block_on(host.server.disconnect("a"));
    let left = host.server.connections();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].export.as_deref(), Some("b"));
    assert!(left[0].peer.contains(&format!("pid {}", std::process::id())), "{}", left[0].peer);
    first.expect_end();
    second.expect_end();
    assert_eq!(other.ask(FLUSH, 0, 0, 0), 0);
    host.runtime.block_on(host.server.disconnect("a"));
}

/// Fails if a panic in one connection is felt in another, or leaves its connection listed.
#[test]
fn a_panic_ends_one_connection_only() {
    let (host, _puppet) = puppet(ServerConfig::default());
    let (mut bad, mut good) = (host.enter(""), host.enter(""));
    bad.send(READ, 0, PANICS_AT, 4);
    bad.expect_end();
    host.until_connections(1);
    assert_eq!(good.read(0, 1).unwrap(), [0x5a]);
    assert_eq!(host.enter("").read(0, 1).unwrap(), [0x5a]);
}

/// Fails if bytes that are no request are taken for one, or cut off the replies before them.
#[test]
fn bytes_that_are_no_request_end_the_connection() {
    let (host, puppet) = puppet(ServerConfig::default());
    let mut client = host.enter("");
    client.send(READ, 0, 0, 4);
    client.put(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    client.send_with(WRITE, 0, 0, 4, b"data");
    assert_eq!(client.reply().1, 0);
    assert_eq!(client.take(4), [0x5a; 4]);
    client.expect_end();
    assert_eq!(puppet.journal.borrow().started.len(), 1);
}
