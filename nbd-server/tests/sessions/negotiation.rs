//! Choosing an export, by every road that clients take.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use nbd_server::{Listener, Server, ServerConfig};

use crate::client::{ACK, Client, ERR_INVALID, ERR_TOO_BIG, ERR_UNKNOWN, ERR_UNSUP};
use crate::disk::{Disks, MemoryDisk};
use crate::hosts::{Host, memory};

const SIZE: u64 = 1 << 20;

/// Fails if a client of the old road gets a reply of the wrong length, and so reads garbage.
#[test]
fn export_name_leads_to_transmission_with_and_without_padding() {
    let host = memory(SIZE);
    for (client_flags, padding) in [(0, 124), (1, 124), (3, 0)] {
        let mut client = Client::greet(&host.socket, client_flags);
        client.option(1, b"d1");
        assert_eq!(client.take_u64(), SIZE);
        client.take(2 + padding);
        assert_eq!(client.write(0, 7, b"hello"), 0);
        assert_eq!(client.read(7, 5).unwrap(), b"hello");
    }
    let mut client = Client::greet(&host.socket, 3);
    client.option(1, b"nothing here");
    client.expect_end();
}

/// Fails if a name of any kind breaks the negotiation, or takes others with it.
#[test]
fn a_name_that_leads_nowhere_does_not_end_the_negotiation() {
    let host = memory(SIZE);
    for code in [6, 7] {
        let mut client = Client::greet(&host.socket, 3);
        for (name, expected) in [
            (vec![b'a'; 1], ERR_UNKNOWN),
            (vec![b'a'; 257], ERR_UNKNOWN),
            (vec![b'a'; 4096], ERR_UNKNOWN),
            (vec![b'a'; 4097], ERR_INVALID),
            (vec![b'a'; 70_000], ERR_TOO_BIG),
            (b"\xff\xfe\n".to_vec(), ERR_INVALID),
            (b"d1\0d1".to_vec(), ERR_INVALID),
        ] {
            assert_eq!(client.describe(code, &name), expected, "a name of {} bytes", name.len());
            assert_eq!(client.describe(6, "d1"), ACK);
        }
        assert_eq!(client.go("d1"), ACK);
        assert_eq!(client.size, SIZE);
        assert_eq!(client.read(0, 1).unwrap(), [0]);
    }
}

/// Fails if an option that is not served ends the connection.
#[test]
fn unknown_options_are_answered() {
    let host = memory(SIZE);
    let mut client = Client::greet(&host.socket, 3);
    for code in [4, 5, 11, 0x1234] {
        client.option(code, b"data");
        assert_eq!(client.option_reply().0, ERR_UNSUP);
    }
    client.option(2, &[]);
    assert_eq!(client.option_reply().0, ACK);
    client.expect_end();
}

/// Fails if a claimed length is waited for or allocated.
#[test]
fn a_claim_of_four_gigabytes_ends_the_connection_at_once() {
    let host = memory(SIZE);
    let mut client = Client::greet(&host.socket, 3);
    client.option_claiming(7, u32::MAX, &[]);
    client.expect_end();
}

/// Fails if `LIST` leaves an export out, or if the empty name is not refused among several.
#[test]
fn several_exports_are_listed_and_have_no_default() {
    let disk = |name| Arc::new(MemoryDisk::new(name, SIZE));
    let host = Host::start(Disks(vec![disk("a"), disk("b")]), ServerConfig::default());
    let mut client = Client::greet(&host.socket, 3);
    client.option(3, &[]);
    assert_eq!(client.option_reply(), (2, b"\0\0\0\x01a".to_vec()));
    assert_eq!(client.option_reply(), (2, b"\0\0\0\x01b".to_vec()));
    assert_eq!(client.option_reply(), (ACK, vec![]));
    assert_eq!(client.go(""), ERR_UNKNOWN);
    assert_eq!(client.go("b"), ACK);
    assert_eq!(host.server.connections()[0].export.as_deref(), Some("b"));
}

/// Fails if requests that come along with the last option are lost.
#[test]
fn a_client_may_send_requests_without_waiting_for_the_last_answer() {
    let host = memory(SIZE);
    let mut client = Client::greet(&host.socket, 3);
    let mut bytes = b"IHAVEOPT\0\0\0\x07\0\0\0\x08\0\0\0\x02d1\0\0".to_vec();
    bytes.extend(crate::client::request(crate::client::READ, 0, 77, 0, 2));
    client.put(&bytes);
    assert_eq!(client.option_reply().0, 3);
    assert_eq!(client.option_reply().0, ACK);
    assert_eq!(client.reply(), (77, 0));
    assert_eq!(client.take(2), [0, 0]);
}

/// Fails if TCP clients are not served, or are listed without their address.
#[test]
fn tcp_clients_are_served_and_known_by_their_address() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let disks = Arc::new(Disks(vec![Arc::new(MemoryDisk::new("d1", SIZE))]));
    let (server, address) = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (Server::start(Listener::Tcp(listener), disks, ServerConfig::default()), address)
    });
    let mut stream = TcpStream::connect(address).unwrap();
    let mut bytes = [0; 18 + 10];
    stream.read_exact(&mut bytes[..18]).unwrap();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x02d1").unwrap();
    stream.read_exact(&mut bytes[18..]).unwrap();
    assert_eq!(bytes[18..26], SIZE.to_be_bytes());
    let peer = &server.connections()[0].peer;
    assert_eq!(*peer, stream.local_addr().unwrap().to_string());
    runtime.block_on(server.shutdown());
    assert_eq!(stream.read(&mut bytes).unwrap(), 0);
}
