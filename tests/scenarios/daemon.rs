//! The daemon as a process: one per state directory, quick to end, undisturbed by what a killed one
//! left behind.

use std::io::Read;
use std::time::Duration;

use blockd_tests::process::{Daemon, STOP_LIMIT, Settings};
use blockd_tests::s3::{self, SeaweedFs};
use blockd_tests::s3_proxy::{Proxy, Weather};
use blockd_tests::store::Store;
use blockd_tests::{tools, wait};
use rustix::process::Signal;

/// Runs a second `serve` on the same host; its exit code and what it said.
fn second_start(daemon: &Daemon) -> (i32, String) {
    let output = daemon.serve_command().output().expect("start a second daemon");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap_or(-1), said)
}

/// Fails if two daemons ever run on one state directory, or the second does not say who is there.
#[test]
fn a_second_daemon_on_a_state_directory_is_refused_and_told_of_the_first() {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings());
    let (code, said) = second_start(&daemon);
    assert_ne!(code, 0, "{said}");
    assert!(said.contains(&daemon.pid().to_string()), "the holder is not named: {said}");
    let _still_there = daemon.cli(&["status"]).ok();
    daemon.finish();
}

/// Fails if sockets, locks or half-written files of a killed daemon keep the next one from starting.
#[test]
fn what_a_killed_daemon_left_does_not_block_a_start() {
    let store = Store::directory();
    let mut daemon = Daemon::start(store.settings());
    let export = daemon.create_attached("disk", "64M");
    export.connect().write(0, &[5; 4096]).unwrap();
    for _again in 0..3 {
        daemon.kill9();
        assert!(daemon.control().exists(), "a killed daemon leaves its socket");
        std::fs::write(daemon.state_dir().join("identity.tmp"), b"half").unwrap();
        daemon.launch();
        assert_eq!(export.connect_when_served().read(0, 4096).unwrap(), [5; 4096]);
    }
    daemon.finish();
}

/// Fails if SIGTERM or SIGINT waits for the drain, or if a second signal is needed.
#[test]
fn a_stop_is_quick_and_keeps_the_log_with_the_store_away() {
    let _turn = tools::heavy();
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let settings = Settings::new(proxy.url("blockd")).envs(&s3::CREDENTIALS);
    let mut daemon = Daemon::start(settings);
    daemon.log().expect("store");
    let export = daemon.create_attached("disk", "64M");
    for (round, signal) in (1..).zip([Signal::TERM, Signal::INT, Signal::TERM]) {
        proxy.set_weather(if round == 3 { Weather::BlackHole } else { Weather::Slow(100_000) });
        let mut guest = export.connect_when_served();
        guest.write(0, &vec![round; 8 << 20]).unwrap();
        daemon.signal(signal);
        daemon.await_end(STOP_LIMIT);
        if round == 3 {
            proxy.heal();
        }
        daemon.launch();
        let mut guest = export.connect_when_served();
        assert_eq!(guest.read(0, 4 << 20).unwrap(), vec![round; 4 << 20], "round {round}");
    }
    daemon.finish();
}

/// Fails if a daemon that is told to end while clients hold connections open does not, or leaves
/// them hanging.
#[test]
fn a_stop_with_open_connections_ends_them() {
    let store = Store::directory();
    let mut daemon = Daemon::start(store.settings());
    let export = daemon.create_attached("disk", "64M");
    let mut silent = blockd_tests::nbd_handshake::Stream::connect(&export.address).unwrap();
    let mut idle: Vec<_> = (0..10).map(|_| export.connect()).collect();
    for client in &mut idle {
        client.write(0, &[1; 4096]).unwrap();
    }
    let mut busy = export.connect();
    for index in 0..32 {
        busy.send(blockd_tests::nbd_client::Command::Read, 0, index * 4096, 4096, &[]).unwrap();
    }
    daemon.stop();
    for client in &mut idle {
        assert!(client.read(0, 4096).is_err(), "a connection outlived its server");
    }
    silent.set_patience(Duration::from_secs(10)).unwrap();
    let mut greeting = Vec::new();
    // An error is an end as well: the peer is gone.
    let _end = silent.read_to_end(&mut greeting);
    daemon.launch();
    assert_eq!(export.connect_when_served().read(0, 4096).unwrap(), [1; 4096]);
    daemon.finish();
}

/// Fails if a daemon that cannot reach its store at start gives up, or does not serve the disks it
/// has in its log.
#[test]
fn a_start_without_the_store_serves_what_is_local_and_recovers() {
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let settings = Settings::new(proxy.url("blockd")).envs(&s3::CREDENTIALS);
    let mut daemon = Daemon::start(settings.arg("--cut-age=600s"));
    daemon.log().expect("store");
    let export = daemon.create_attached("disk", "64M");
    export.connect().write(4096, &[6; 8192]).unwrap();
    daemon.kill9();
    proxy.set_weather(Weather::Refusing);
    daemon.launch();
    let mut guest = export.connect_when_served();
    assert_eq!(guest.read(4096, 8192).unwrap(), [6; 8192]);
    guest.write(12288, &[7; 4096]).unwrap();
    let answer = daemon.cli(&["create", "other", "--size", "1M", "--timeout", "2", "--json"]);
    let _unavailable = answer.refused(5, "store_unavailable");
    proxy.heal();
    wait::until_true("the store is back", Duration::from_secs(60), || {
        daemon.cli(&["drain", "disk", "--timeout", "5"]).code == 0
    });
    assert_eq!(guest.read(4096, 12288).unwrap()[8192..], [7; 4096]);
    guest.disconnect();
    daemon.finish();
}

/// Fails if a directory that cannot hold the state is met with a panic or silence.
#[test]
fn a_state_directory_that_cannot_be_used_is_an_error_that_names_it() {
    let store = Store::directory();
    let daemon = Daemon::prepare(store.settings());
    std::fs::write(daemon.state_dir(), b"a file").unwrap();
    let (code, said) = second_start(&daemon);
    assert_ne!(code, 0);
    assert!(said.contains(daemon.state_dir().to_str().unwrap()), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}
