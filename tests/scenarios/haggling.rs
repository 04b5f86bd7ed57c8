//! No client, however broken or hostile before transmission, disturbs the server or its neighbours.

use std::io::Write;
use std::time::Duration;

use blockd_tests::nbd_client::Command;
use blockd_tests::nbd_handshake::{
    FLAG_FLUSH, FLAG_FUA, FLAG_MULTI_CONN, FLAG_READ_ONLY, FLAG_TRIM, FLAG_ZEROES, Handshake,
    OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_STARTTLS, REP_ACK, REP_ERR_INVALID,
    REP_ERR_TOO_BIG, REP_ERR_UNKNOWN, REP_ERR_UNSUP, Stream,
};
use blockd_tests::process::{Daemon, Export};
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::{tools, wait};

const LIMIT: Duration = Duration::from_secs(30);

fn serve() -> (Store, Daemon, Export) {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings());
    let export = daemon.create_attached("disk", "64M");
    (store, daemon, export)
}

#[track_caller]
fn assert_served(export: &Export) {
    export.connect().read(0, 4096).expect("a decent client is served");
}

/// Fails if a name is cut, overruns, or ends the haggling. (P01, P07)
#[test]
fn names_of_any_length_and_bytes_are_unknown_or_invalid_and_haggling_goes_on() {
    let (_store, daemon, export) = serve();
    let names: Vec<Vec<u8>> = [1, 255, 256, 257, 3000, 4096, 4097, 70_000]
        .into_iter()
        .map(|length| vec![b'a'; length])
        .chain([b"\xff\xfe\n\x1b[2J".to_vec(), b"disk\0".to_vec(), b"disk@".to_vec()])
        .collect();
    for option in [OPT_INFO, OPT_GO] {
        for name in &names {
            let mut haggling = Handshake::open(&export.address).unwrap();
            let reply = haggling.select(option, name).unwrap().expect_err("no such export");
            let allowed = [REP_ERR_UNKNOWN, REP_ERR_INVALID, REP_ERR_TOO_BIG];
            assert!(allowed.contains(&reply.kind), "{} bytes: {:#x}", name.len(), reply.kind);
            if name.len() <= 4096 && name.iter().all(u8::is_ascii_lowercase) {
                assert_eq!(reply.kind, REP_ERR_UNKNOWN, "{} bytes", name.len());
            }
            let info = haggling.select(OPT_GO, b"disk").unwrap();
            assert!(info.is_ok(), "haggling ended after a name of {} bytes", name.len());
        }
    }
    for name in &names {
        let mut haggling = Handshake::open(&export.address).unwrap();
        haggling.send(OPT_EXPORT_NAME, name).unwrap();
        assert!(haggling.reply().is_err(), "the old road has no reply but a close");
    }
    assert_served(&export);
    daemon.finish();
}

/// Fails if a claimed length is believed. (P02)
#[test]
fn lying_lengths_cost_no_memory_and_harm_nobody() {
    let (_store, daemon, export) = serve();
    let before = daemon.resident_bytes();
    let mut held = Vec::new();
    for _connection in 0..50 {
        let mut haggling = Handshake::open(&export.address).unwrap();
        haggling.send_lying(OPT_GO, u32::MAX, &[0; 1000]).unwrap();
        held.push(haggling);
    }
    let mut short_go = 0xffff_fff0u32.to_be_bytes().to_vec();
    short_go.extend_from_slice(&[0, 0]);
    let mut many_infos = 4u32.to_be_bytes().to_vec();
    many_infos.extend_from_slice(b"disk\xff\xff\0\x03");
    for (option, data) in [(OPT_GO, &short_go[..]), (OPT_GO, &many_infos), (OPT_INFO, &[])] {
        let mut haggling = Handshake::open(&export.address).unwrap();
        let reply = haggling.ask(option, data).unwrap();
        assert_eq!(reply.kind, REP_ERR_INVALID, "{data:02x?}");
        assert!(haggling.select(OPT_GO, b"disk").unwrap().is_ok(), "haggling ended");
    }
    let grown = daemon.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for lies");
    assert_served(&export);
    daemon.finish();
}

/// Fails if connections that end anywhere leave files open, or a panic in the log. (P03, P22)
#[test]
fn garbage_and_early_closes_leave_nothing_open() {
    let (_store, daemon, export) = serve();
    assert_served(&export);
    let before = daemon.open_files();
    let mut random = Random::for_test();
    let mut real = 3u32.to_be_bytes().to_vec();
    real.extend_from_slice(b"IHAVEOPT\0\0\0\x07\0\0\0\x0e\0\0\0\x04disk\0\x01\0\x03");
    for _connection in 0..300 {
        let mut stream = Stream::connect(&export.address).unwrap();
        let bytes = if random.one_in(2) {
            let length = usize::try_from(random.below(65)).unwrap();
            random.bytes(length)
        } else {
            let length = usize::try_from(random.below(real.len() as u64)).unwrap();
            real[..length].to_vec()
        };
        // The server may have closed already.
        let _sent = stream.write_all(&bytes);
    }
    for _connection in 0..100 {
        let mut client = export.connect();
        for index in 0..8 {
            client.send(Command::Read, 0, index << 20, 1 << 20, &[]).unwrap();
        }
    }
    assert_served(&export);
    wait::until_true("files are closed", LIMIT, || daemon.open_files() <= before + 2);
    daemon.finish();
}

/// Fails if silent connections keep a real client out, or are kept for ever. (P05)
#[test]
fn silent_connections_starve_nobody_and_are_dropped_in_time() {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings().arg("--handshake-timeout=3s"));
    let export = daemon.create_attached("disk", "64M");
    assert_served(&export);
    let before = daemon.open_files();
    let silent: Vec<_> = (0..200).map(|_| Stream::connect(&export.address).unwrap()).collect();
    assert_served(&export);
    wait::until_true("silent connections are dropped", LIMIT, || daemon.open_files() <= before + 2);
    assert_served(&export);
    drop(silent);
    daemon.finish();
}

/// Fails if an option that is not offered ends the haggling, or ABORT is not acknowledged. (P06)
#[test]
fn options_that_are_not_offered_are_declined_one_by_one() {
    let (_store, daemon, export) = serve();
    daemon.create("other", "1M");
    let mut haggling = Handshake::open(&export.address).unwrap();
    for option in [OPT_STARTTLS, 0x1234] {
        assert_eq!(haggling.ask(option, &[]).unwrap().kind, REP_ERR_UNSUP, "option {option}");
    }
    assert_eq!(haggling.list().unwrap(), ["disk"], "what is attached, and only that");
    let offered = haggling.select(OPT_INFO, b"disk").unwrap().expect("the disk is there");
    let announced = haggling.select(OPT_GO, b"disk").unwrap().expect("the disk is there");
    assert_eq!(offered, announced);
    for flag in [FLAG_FLUSH, FLAG_FUA, FLAG_TRIM, FLAG_ZEROES, FLAG_MULTI_CONN] {
        assert_ne!(announced.flags & flag, 0, "flag {flag:#x} of {:#x}", announced.flags);
    }
    assert_eq!(announced.flags & FLAG_READ_ONLY, 0);
    assert_eq!(announced.size, 64 << 20);
    let mut leaving = Handshake::open(&export.address).unwrap();
    assert_eq!(leaving.ask(OPT_ABORT, &[]).unwrap().kind, REP_ACK);
    assert!(leaving.reply().is_err(), "ABORT closes");
    daemon.finish();
}

/// Fails if the old road into transmission is shut, with or without padding. (P06)
#[test]
fn clients_of_the_old_road_are_served() {
    let (_store, daemon, export) = serve();
    for flags in [0b01, 0b11] {
        let haggling = Handshake::open_with_flags(&export.address, flags).unwrap();
        let mut client = haggling.export_name("disk").unwrap();
        assert_eq!(client.info.size, 64 << 20);
        client.write(4096, &[3; 4096]).unwrap();
        assert_eq!(client.read(4096, 4096).unwrap(), [3; 4096]);
    }
    daemon.finish();
}

/// Fails if one of the clients that people use finds the server wanting. (P06)
#[test]
fn the_clients_that_people_use_are_served() {
    let (_store, daemon, export) = serve();
    let uri = export.uri.as_str();
    if let Some(nbdinfo) = tools::need("nbdinfo") {
        let told = nbdinfo.must(&["--json", uri]);
        assert!(told.contains("\"export-size\": 67108864"), "{told}");
        nbdinfo.must(&["--list", uri]);
    }
    if let Some(qemu_io) = tools::need("qemu-io") {
        let commands = ["write -P 7 -f 0 64k", "write -z 4k 4k", "discard 8k 4k", "flush"];
        let checks = ["read -P 7 0 4k", "read -P 0 4k 8k", "read -P 7 12k 52k"];
        for command in commands.iter().chain(&checks) {
            let said = qemu_io.must(&["-f", "raw", uri, "-c", command]);
            assert!(!said.contains("verification failed"), "{command}: {said}");
        }
    }
    if let Some(qemu_img) = tools::need("qemu-img") {
        qemu_img.must(&["info", "-f", "raw", uri]);
    }
    if let Some(nbdsh) = tools::need("nbdsh") {
        // It is a module of the system's Python, whichever other one comes first in PATH.
        let mut shell = nbdsh.command();
        shell.env("PATH", "/usr/bin:/bin").args(["-u", uri, "-c"]);
        let script = "h.pwrite(b'x' * 512, 512); h.flush(); h.zero(512, 512)";
        let output = shell.arg(script).output().expect("run nbdsh");
        assert!(output.status.success(), "{output:?}");
    }
    daemon.finish();
}

/// Fails if TCP serves worse than a unix socket does.
#[test]
fn a_disk_can_be_served_over_tcp() {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings());
    daemon.create("disk", "64M");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let answer = daemon.cli(&["attach", "disk", "--tcp", &free.to_string()]).ok();
    let export = Export::from_uri(answer.line());
    let mut client = export.connect();
    client.write_fua(0, &[1; 4096]).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    daemon.finish();
}
