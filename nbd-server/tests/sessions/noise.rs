//! Clients that come and go, and bytes that mean nothing.

use proptest::prelude::*;
use std::io::Read;
use std::os::unix::net::UnixStream;

use nbd_server::ServerConfig;

use crate::client::*;
use crate::hosts::{memory, puppet};

/// Sends bytes, then closes the sending half and takes everything until the end.
fn converse(stream: &mut UnixStream, bytes: &[u8]) {
    use std::io::Write;
    // The server may have had enough before we are done.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Fails if a client that leaves early, or never makes sense, leaves anything behind.
#[test]
fn clients_that_leave_early_leave_nothing_behind() {
    let (host, _puppet) = puppet(ServerConfig::default());
    let hello = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x08\0\0\0\x02d1\0\0";
    for turn in 0..1000 {
        let mut client = Client::silent(&host.socket);
        let sent = turn % (hello.len() + 1);
        // A reset connection is what this is about.
        let _ = std::io::Write::write_all(&mut client.stream, &hello[..sent]);
    }
    for _ in 0..100 {
        let mut client = host.enter("");
        for _ in 0..64 {
            client.send(READ, 0, 0, 1 << 20);
        }
    }
    host.until_connections(0);
    assert_eq!(host.enter("").ask(FLUSH, 0, 0, 0), 0);
}

/// Fails if an acknowledged write is missing after clients came and went, politely or not.
#[test]
fn clients_that_come_and_go_keep_what_was_acknowledged() {
    const CLIENTS: u64 = 9;
    const ROUNDS: u64 = 100;
    let host = memory(CLIENTS * ROUNDS * 4096);
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let host = &host;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let offset = (number * ROUNDS + round) * 4096;
                    let mut client = host.enter("d1");
                    assert_eq!(client.write(0, offset, &offset.to_be_bytes()), 0);
                    if round % 2 == 0 {
                        client.send(DISC, 0, 0, 0);
                        client.expect_end();
                    } else {
                        for _ in 0..8 {
                            client.send(READ, 0, 0, 4096);
                        }
                    }
                }
            });
        }
    });
    host.until_connections(0);
    let mut client = host.enter("d1");
    for offset in (0..CLIENTS * ROUNDS).map(|index| index * 4096) {
        assert_eq!(client.read(offset, 8).unwrap(), offset.to_be_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Fails if any bytes, before or after the handshake, panic a connection or hold it open.
    #[test]
    fn arbitrary_bytes_end_in_a_closed_connection(
        bytes in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..64),
                (0u16..10, 0u16..32, 0u64..8192, 0u32..8192)
                    .prop_map(|(command, flags, offset, len)| request(command, flags, 1, offset, len)),
            ],
            0..20,
        ),
        entered: bool,
        structured: bool,
    ) {
        use std::sync::LazyLock;
        use crate::disk::Disks;
        use crate::hosts::Host;
        static HOST: LazyLock<Host<Disks>> = LazyLock::new(|| memory(1 << 20));
        let mut client = match (entered, structured) {
            (false, _) => Client::silent(&HOST.socket),
            (true, false) => HOST.enter("d1"),
            (true, true) => Client::enter_structured(&HOST.socket, "d1"),
        };
        converse(&mut client.stream, &bytes.concat());
        prop_assert!(HOST.enter("d1").read(0, 1).is_ok());
    }
}
