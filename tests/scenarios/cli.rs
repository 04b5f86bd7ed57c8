//! The command line contract: exit codes, errors that programs can read, and commands that can be
//! sent again.

use std::time::Duration;

use blockd_tests::process::{Daemon, Export};
use blockd_tests::store::Store;
use blockd_tests::wait;

const LIMIT: Duration = Duration::from_secs(60);

fn host() -> (Store, Daemon) {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings());
    (store, daemon)
}

/// Fails if a name or size outside the rules makes a disk, or is refused under another code.
#[test]
fn names_and_sizes_outside_the_rules_are_refused_with_exit_2() {
    let (_store, daemon) = host();
    let long = "a".repeat(64);
    for name in ["", "-a", "A", "a_b", "a.b", "a/b", "a@b", "ä", &long] {
        let answer = daemon.cli(&["create", "--size", "1M", "--json", "--", name]);
        let _error = answer.refused(2, "invalid_name");
    }
    for size in ["0", "1", "4095", "5000", "x", "1Q", "-1", "99999999999999999999"] {
        let size = format!("--size={size}");
        let answer = daemon.cli(&["create", "disk", &size, "--json"]);
        let _error = answer.refused(2, "invalid_argument");
    }
    let listed = daemon.cli(&["list", "--json"]).ok().json();
    assert_eq!(listed["disks"].as_array().map(Vec::len), Some(0), "{listed}");
    daemon.create(&"a".repeat(63), "4K");
    daemon.create("0", "1T");
    daemon.finish();
}

/// Fails if create makes a second disk of one name, or --if-missing hides a difference.
#[test]
fn create_can_be_sent_again_and_tells_what_differs() {
    let (_store, daemon) = host();
    daemon.create("disk", "64M");
    let created = |more: &[&str]| {
        let words = ["create", "disk", "--json"];
        daemon.cli(&[&words[..], more].concat())
    };
    let _exists = created(&["--size", "64M"]).refused(4, "disk_exists");
    let again = created(&["--size", "64M", "--if-missing"]).ok().json();
    assert_eq!(again["created"], false, "{again}");
    let differs = [
        (&["--size", "65M", "--if-missing"][..], "size"),
        (&["--size", "64M", "--if-missing", "--durability", "remote"], "durability"),
        (&["--size", "64M", "--if-missing", "--max-lag", "5s"], "max"),
    ];
    for (words, named) in differs {
        let error = created(words).refused(4, "disk_exists");
        assert!(error.to_string().contains(named), "{named} is not named: {error}");
    }
    daemon.finish();
}

/// Fails if what is not there is answered with another code than 3.
#[test]
fn what_is_not_there_is_not_found_with_exit_3() {
    let (_store, daemon) = host();
    daemon.create("disk", "64M");
    for words in [
        &["show", "none"][..],
        &["attach", "none"],
        &["attach", "disk@none"],
        &["snapshot", "none"],
        &["snapshots", "none"],
        &["fork", "none", "new"],
        &["fork", "disk@none", "new"],
        &["delete", "none", "--yes"],
        &["delete", "disk@none", "--yes"],
        &["resize", "none", "1G"],
        &["check", "none"],
        &["usage", "none"],
    ] {
        let _missing = daemon.cli(&[words, &["--json"]].concat()).refused(3, "not_found");
    }
    daemon.finish();
}

/// Fails if wrong use is taken for anything else.
#[test]
fn wrong_use_is_exit_2_and_one_line() {
    let (_store, daemon) = host();
    for words in
        [&["frobnicate"][..], &["create", "disk"], &["show"], &["list", "--frob"], &["detach"]]
    {
        let answer = daemon.cli(words).exits(2);
        assert!(!answer.stderr.is_empty(), "{words:?} says nothing");
        assert!(answer.stdout.is_empty(), "{words:?} answers on stdout: {answer:?}");
        let json = daemon.cli(&[words, &["--json"]].concat());
        let _error = json.refused(2, "invalid_argument");
    }
    daemon.finish();
}

/// Fails if a command without a daemon hangs, or does not say where it looked.
#[test]
fn without_a_daemon_commands_exit_1_and_name_the_socket() {
    let store = Store::directory();
    let daemon = Daemon::prepare(store.settings());
    let answer = daemon.cli(&["list"]).exits(1);
    assert!(answer.stderr.contains(daemon.control().to_str().unwrap()), "{answer:?}");
    assert_eq!(answer.stderr.trim_end().lines().count(), 1, "{answer:?}");
    let error = daemon.cli(&["list", "--json"]).exits(1).error();
    assert!(error["fix"].is_string(), "{error}");
}

/// Fails if attach is not safe to repeat, or quietly changes how a disk is served.
#[test]
fn attach_can_be_sent_again_and_refuses_other_options() {
    let (_store, mut daemon) = host();
    daemon.create("disk", "64M");
    let first = daemon.attach("disk");
    assert_eq!(daemon.attach("disk").uri, first.uri);
    let again = daemon.cli(&["attach", "disk", "--json"]).ok().json();
    assert_eq!(again["already_attached"], true, "{again}");
    assert_eq!(again["uri"], first.uri.as_str(), "{again}");
    let elsewhere = daemon.place().join("other.sock");
    let words = ["attach", "disk", "--socket", elsewhere.to_str().unwrap(), "--json"];
    let _busy = daemon.cli(&words).refused(4, "disk_busy");
    let _busy = daemon.cli(&["attach", "disk", "--access", "read", "--json"]);
    daemon.restart();
    first.connect_when_served().disconnect();
    assert_eq!(daemon.attach("disk").uri, first.uri, "after a restart");
    daemon.finish();
}

/// Fails if two disks cannot share a socket, or one's end takes the other with it.
#[test]
fn several_disks_may_share_a_socket() {
    let (_store, mut daemon) = host();
    let socket = daemon.place().join("shared.sock");
    let attach = |daemon: &Daemon, name: &str| {
        let words = ["attach", name, "--socket", socket.to_str().unwrap()];
        Export::from_uri(daemon.cli(&words).ok().line())
    };
    daemon.create("one", "1M");
    daemon.create("two", "2M");
    let (one, two) = (attach(&daemon, "one"), attach(&daemon, "two"));
    assert_eq!(one.address, two.address);
    assert_eq!(one.connect().info.size, 1 << 20);
    assert_eq!(two.connect().info.size, 2 << 20);
    daemon.kill9();
    daemon.launch();
    one.connect_when_served().disconnect();
    daemon.detach_when_left("one");
    assert_eq!(two.connect_when_served().info.size, 2 << 20);
    daemon.finish();
}

/// Fails if a disk is pulled from under its clients, or cannot be when that is asked for.
#[test]
fn detach_with_clients_is_refused_unless_they_may_be_disconnected() {
    let (_store, daemon) = host();
    let export = daemon.create_attached("disk", "64M");
    let mut guest = export.connect();
    guest.write(0, &[1; 4096]).unwrap();
    let error = daemon.cli(&["detach", "disk", "--json"]).refused(4, "disk_busy");
    assert!(error["details"].is_object(), "the clients are not named: {error}");
    guest.write(4096, &[2; 4096]).unwrap();
    let _detached = daemon.cli(&["detach", "disk", "--disconnect"]).ok();
    assert!(guest.read(0, 4096).is_err(), "a detached disk is still served");
    let mut guest = daemon.attach("disk").connect();
    assert_eq!(guest.read(4096, 4096).unwrap(), [2; 4096]);
    daemon.finish();
}

/// Fails if a delete needs no word, or leaves bytes for the next disk of that name.
#[test]
fn delete_asks_for_a_word_and_frees_the_name() {
    let (_store, daemon) = host();
    let export = daemon.create_attached("disk", "64M");
    let mut guest = export.connect();
    guest.write(0, &vec![1; 1 << 20]).unwrap();
    daemon.drain("disk");
    let _attached = daemon.cli(&["delete", "disk", "--yes", "--json"]).refused(4, "disk_busy");
    guest.disconnect();
    daemon.detach_when_left("disk");
    let _asked = daemon.cli(&["delete", "disk", "--json"]).exits(2);
    assert_eq!(daemon.show("disk")["state"], "detached");
    let _deleted = daemon.cli(&["delete", "disk", "--yes"]).ok();
    wait::until_true("the disk is gone", LIMIT, || daemon.cli(&["show", "disk"]).code == 3);
    wait::until_true("the name is free", LIMIT, || {
        daemon.cli(&["create", "disk", "--size", "64M"]).code == 0
    });
    let mut guest = daemon.attach("disk").connect();
    assert!(guest.read(0, 1 << 20).unwrap() == vec![0; 1 << 20], "bytes of a deleted disk");
    daemon.finish();
}

/// Fails if snapshots or forks bend the rules of names, or a parent is deleted under its forks.
#[test]
fn snapshots_and_forks_follow_the_contract() {
    let (_store, daemon) = host();
    let mut guest = daemon.create_attached("disk", "64M").connect();
    guest.write(0, &[1; 4096]).unwrap();
    let taken = daemon.cli(&["snapshot", "disk", "--name", "one", "--message", "first"]).ok();
    assert_eq!(taken.line(), "disk@one");
    guest.write(0, &[2; 4096]).unwrap();
    let again = daemon.cli(&["snapshot", "disk", "--name", "one", "--json"]);
    let _exists = again.refused(4, "snapshot_exists");
    let made_up = daemon.cli(&["snapshot", "disk", "--wait"]).ok();
    assert!(made_up.line().starts_with("disk@"), "{made_up:?}");
    let listed = daemon.cli(&["snapshots", "disk", "--json"]).ok().json();
    assert_eq!(listed["snapshots"].as_array().map(Vec::len), Some(2), "{listed}");
    let _forked = daemon.cli(&["fork", "disk@one", "fork"]).ok();
    let _exists = daemon.cli(&["fork", "disk@one", "fork", "--json"]).refused(4, "disk_exists");
    let mut fork = daemon.attach("fork").connect();
    assert_eq!(fork.read(0, 4096).unwrap(), [1; 4096]);
    fork.write(0, &[3; 4096]).unwrap();
    assert_eq!(guest.read(0, 4096).unwrap(), [2; 4096], "a fork writes into its parent");
    let error = daemon.cli(&["delete", "disk@one", "--yes", "--json"]).exits(4).error();
    assert!(error.to_string().contains("fork"), "the fork is not named: {error}");
    daemon.finish();
}

/// Fails if a branch changes what it was made of, or outlives its attachment when told not to.
#[test]
fn a_branch_is_a_fork_for_one_attachment() {
    let (_store, daemon) = host();
    daemon.create_attached("disk", "64M").connect().write(0, &[1; 4096]).unwrap();
    let _taken = daemon.cli(&["snapshot", "disk", "--name", "base", "--wait"]).ok();
    let words = ["attach", "disk@base", "--access", "branch", "--discard", "--json"];
    let branch = daemon.cli(&words).ok().json();
    let name = branch["target"].as_str().expect("the branch has a name").to_owned();
    let export = Export::from_uri(branch["uri"].as_str().expect("a URI"));
    let mut guest = export.connect();
    assert_eq!(guest.read(0, 4096).unwrap(), [1; 4096]);
    guest.write(0, &[2; 4096]).unwrap();
    guest.disconnect();
    daemon.detach_when_left(&name);
    wait::until_true("the branch is gone", LIMIT, || daemon.cli(&["show", &name]).code == 3);
    daemon.finish();
}

/// Fails if a disk cannot grow while it is served, or can shrink.
#[test]
fn resize_grows_online_and_never_shrinks() {
    let (_store, mut daemon) = host();
    let export = daemon.create_attached("disk", "64M");
    let mut old = export.connect();
    old.write((64 << 20) - 4096, &[1; 4096]).unwrap();
    let _grown = daemon.cli(&["resize", "disk", "128M"]).ok();
    let mut new = export.connect();
    assert_eq!(new.info.size, 128 << 20);
    assert!(new.read(64 << 20, 1 << 20).unwrap() == vec![0; 1 << 20], "grown space is zero");
    new.write((128 << 20) - 4096, &[2; 4096]).unwrap();
    let _shrunk = daemon.cli(&["resize", "disk", "64M", "--json"]).exits(2);
    daemon.kill9();
    daemon.launch();
    let mut guest = export.connect_when_served();
    assert_eq!(guest.info.size, 128 << 20);
    assert_eq!(guest.read((64 << 20) - 4096, 4096).unwrap(), [1; 4096]);
    assert_eq!(guest.read((128 << 20) - 4096, 4096).unwrap(), [2; 4096]);
    daemon.finish();
}

/// Fails if flush or drain return before what they promise is so.
#[test]
fn flush_and_drain_return_when_it_is_done() {
    let (store, daemon) = host();
    let mut guest = daemon.create_attached("disk", "64M").connect();
    guest.write(0, &vec![1; 1 << 20]).unwrap();
    let flushed = daemon.cli(&["flush", "disk", "--json"]).ok().json();
    let drained = daemon.cli(&["drain", "disk", "--json"]).ok().json();
    let lsn = |value: &serde_json::Value| value.as_u64().expect("a position");
    assert!(lsn(&drained["drained_lsn"]) >= lsn(&flushed["flushed_lsn"]), "{drained} {flushed}");
    let shown = daemon.show("disk");
    assert_eq!(shown["undrained_bytes"], 0, "{shown}");
    let reader = Daemon::start(store.settings());
    let words = ["attach", "disk", "--access", "read"];
    let mut other = Export::from_uri(reader.cli(&words).ok().line()).connect();
    assert!(other.read(0, 1 << 20).unwrap() == vec![1; 1 << 20], "what is drained is not readable");
    reader.finish();
    daemon.finish();
}

/// Fails if the first-try default, a store inside the state directory, is not worth a warning.
#[test]
fn a_store_inside_the_state_directory_is_worth_a_warning() {
    let store = Store::directory();
    let mut daemon = Daemon::prepare(store.settings());
    let inside = format!("file://{}/store", daemon.state_dir().display());
    daemon.reconfigure(|_| blockd_tests::process::Settings::new(inside));
    daemon.log().expect("state director");
    daemon.launch();
    assert!(!daemon.log().matching("WARN").is_empty(), "{:#?}", daemon.log().lines());
    daemon.finish();
}

/// Fails if what operators look at lacks what the contract names.
#[test]
fn status_show_usage_and_check_tell_what_is_there() {
    let (_store, daemon) = host();
    let mut guest = daemon.create_attached("disk", "64M").connect();
    guest.write(0, &vec![1; 1 << 20]).unwrap();
    let status = daemon.cli(&["status", "--json"]).ok().json();
    assert_eq!(status["pid"], daemon.pid(), "{status}");
    assert_eq!(status["disks"][0]["name"], "disk", "{status}");
    daemon.drain("disk");
    let shown = daemon.show("disk");
    assert_eq!(shown["state"], "attached", "{shown}");
    assert_eq!(shown["attachments"][0]["clients"].as_array().map(Vec::len), Some(1), "{shown}");
    let usage = daemon.cli(&["usage", "disk", "--json"]).ok().json();
    assert!(usage["disks"][0]["stored_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{usage}");
    let checked = daemon.cli(&["check", "disk", "--deep", "--json"]).ok().json();
    assert_eq!(checked["problems"].as_array().map(Vec::len), Some(0), "{checked}");
    for command in ["list", "status", "usage"] {
        let _text = daemon.cli(&[command]).ok();
    }
    for command in ["show", "check", "snapshots"] {
        let _text = daemon.cli(&[command, "disk"]).ok();
    }
    daemon.finish();
}
