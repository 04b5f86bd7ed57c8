//! One writer at a time, by compare-and-swap: a race has one winner, a host that lost its disk can
//! never change it again, and what it had not drained is kept.

use std::time::Duration;

use blockd_tests::cli::Answer;
use blockd_tests::model::{self, BLOCK_BYTES, Content};
use blockd_tests::nbd_client::Client;
use blockd_tests::process::{Daemon, Export, Settings};
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// A lease that a test can wait out.
const LEASE: [&str; 2] = ["--lease-time=2s", "--heartbeat-interval=500ms"];

fn two_hosts(store: &Store, more: &[&str]) -> (Daemon, Daemon) {
    let settings = more.iter().fold(store.settings(), |settings, word| settings.arg(*word));
    (Daemon::start(settings.clone()), Daemon::start(settings))
}

/// Attaches at the same moment on both hosts; the answers, in their order.
fn race(first: &Daemon, second: &Daemon) -> [Answer; 2] {
    let attach = |daemon: &Daemon| daemon.cli(&["attach", "disk", "--json"]);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach(second));
        let own = attach(first);
        [own, other.join().expect("the other thread does not panic")]
    })
}

fn host_id(daemon: &Daemon) -> String {
    let status = daemon.cli(&["status", "--json"]).ok().json();
    status["host"].as_str().expect("status names the host").to_owned()
}

/// Fails if two hosts attach, or none does, or the loser is not told who has the disk.
fn race_for_a_disk(store: &Store, rounds: usize) {
    let (first, second) = two_hosts(store, &[]);
    let daemons = [&first, &second];
    first.create("disk", "64M");
    let mut wins = [0, 0];
    for _round in 0..rounds {
        let answers = race(&first, &second);
        let winner = answers.iter().position(|answer| answer.code == 0);
        let winner = winner.unwrap_or_else(|| panic!("nobody won: {answers:#?}"));
        let error = answers[1 - winner].clone().refused(4, "disk_busy");
        let told = error.to_string();
        assert!(told.contains(&host_id(daemons[winner])), "the holder is not named: {told}");
        wins[winner] += 1;
        daemons[winner].detach("disk");
    }
    report::say(&format!("{rounds} races: {} and {} wins", wins[0], wins[1]));
    first.finish();
    second.finish();
}

#[test]
fn an_attach_race_has_one_winner_in_a_directory() {
    race_for_a_disk(&Store::directory(), tools::rounds(10));
}

#[test]
fn an_attach_race_has_one_winner_on_s3() {
    let Some(store) = Store::s3() else { return };
    // The losers of a race on one key wait a second each in this server.
    race_for_a_disk(&store, tools::rounds(5).min(20));
}

/// Fails if a live holder loses its disk to any flag, or if a waiting attach does not get it at its
/// release.
#[test]
fn a_live_holder_keeps_its_disk_until_it_releases_it() {
    let store = Store::directory();
    let (first, second) = two_hosts(&store, &LEASE);
    let mut guest = first.create_attached("disk", "64M").connect();
    guest.write(0, &[1; 4096]).unwrap();
    for words in [&["attach", "disk", "--json"][..], &["attach", "disk", "--accept-loss", "--json"]]
    {
        let _busy = second.cli(words).refused(4, "disk_busy");
    }
    for command in ["snapshot", "delete"] {
        let mut words = vec![command, "disk", "--json"];
        words.extend((command == "delete").then_some("--yes"));
        let _busy = second.cli(&words).refused(4, "disk_busy");
    }
    guest.disconnect();
    let waiting = second.cli_in_background(&["attach", "disk", "--wait", "30"]);
    first.detach("disk");
    let attached = waiting.wait_with_output().expect("wait for attach");
    assert!(attached.status.success(), "{attached:?}");
    let export = Export::from_uri(String::from_utf8_lossy(&attached.stdout).trim());
    assert_eq!(export.connect().read(0, 4096).unwrap(), [1; 4096]);
    first.finish();
    second.finish();
}

/// What a host writes: numbered blocks of one version.
fn write_version(guest: &mut Client, seed: u64, sequence: u64) {
    for block in 0..64 {
        guest.write(block * BLOCK_BYTES, &model::encode(seed, block, sequence)).unwrap();
    }
    guest.flush().unwrap();
}

#[track_caller]
fn assert_version(guest: &mut Client, seed: u64, sequence: u64) {
    for block in 0..64 {
        let bytes = guest.read(block * BLOCK_BYTES, 4096).unwrap();
        assert_eq!(model::decode(seed, block, &bytes), Content::Version(sequence), "block {block}");
    }
}

/// Takes the disk of a frozen holder over, writes on the new host, and lets the old one go on.
/// Returns both daemons, the old host's guest, and the export on the new host.
fn take_from_paused(
    store: &Store,
    seed: u64,
    settings: Settings,
) -> (Daemon, Daemon, Client, Export) {
    let settings = settings.arg(LEASE[0]).arg(LEASE[1]);
    // The old host drains version 1, and has version 2 in its log alone.
    let first = Daemon::start(settings.clone().arg("--cut-age=600s"));
    let second = Daemon::start(store.settings().arg(LEASE[0]).arg(LEASE[1]));
    let mut old_guest = first.create_attached("disk", "64M").connect();
    write_version(&mut old_guest, seed, 1);
    first.drain("disk");
    write_version(&mut old_guest, seed, 2);
    first.pause();
    let refused = wait::until("the holder counts as silent", LIMIT, || {
        let error = second.cli(&["attach", "disk", "--json"]).exits(4).error();
        (error["code"] == "takeover_needs_accept_loss").then_some(error)
    });
    assert!(refused["message"].is_string(), "{refused}");
    let export = second.take_over("disk", LIMIT);
    let mut new_guest = export.connect();
    assert_version(&mut new_guest, seed, 1);
    write_version(&mut new_guest, seed, 3);
    second.drain("disk");
    new_guest.disconnect();
    first.log().expect("taken over");
    first.log().expect("quarantine");
    first.resume();
    (first, second, old_guest, export)
}

/// Waits until the first host knows that it lost the disk to the second.
fn await_lost(first: &Daemon, second: &Daemon) {
    wait::until_true("the old host knows who has its disk", LIMIT, || {
        let view = first.show("disk");
        let told = view["state_reason"].to_string();
        view["state"] == "held-elsewhere" && told.contains(&host_id(second))
    });
}

/// Fails if the old host changes the disk after it was taken, or acknowledges for ever; if its
/// undrained writes are not to be had as a fork.
#[test]
fn a_paused_holder_loses_the_disk_and_keeps_its_log() {
    let store = Store::directory();
    let seed = Random::for_test().bits();
    let (first, second, mut old_guest, export) = take_from_paused(&store, seed, store.settings());
    // It sees that it was silent for too long, and looks before it goes on.
    await_lost(&first, &second);
    assert!(old_guest.write(0, &[9; 4096]).is_err(), "the old host acknowledges a lost disk");
    assert!(old_guest.flush().is_err(), "the old host acknowledges a flush of a lost disk");
    assert_version(&mut export.connect(), seed, 3);
    let lost = second.cli(&["snapshots", "disk", "--json"]).ok().json().to_string();
    assert!(lost.contains("lost-"), "the state as it was taken is no snapshot: {lost}");
    let _recovered = first.cli(&["recover", "disk", "rescued"]).ok();
    let mut rescued = first.attach("rescued").connect();
    for block in 1..64 {
        let bytes = rescued.read(block * BLOCK_BYTES, 4096).unwrap();
        assert_eq!(model::decode(seed, block, &bytes), Content::Version(2), "block {block}");
    }
    second.detach("disk");
    let third = Daemon::start(store.settings());
    assert_version(&mut third.attach("disk").connect(), seed, 3);
    drop(old_guest);
    first.finish();
    second.finish();
    third.finish();
}

/// Fails if a holder that died, was taken over and starts again resumes the disk, or throws away
/// what it had not drained.
#[test]
fn a_holder_that_returns_after_a_takeover_quarantines_its_log() {
    let store = Store::directory();
    let seed = Random::for_test().bits();
    let settings = store.settings().arg(LEASE[0]).arg(LEASE[1]).arg("--cut-age=600s");
    let mut first = Daemon::start(settings.clone());
    let second = Daemon::start(settings);
    let mut guest = first.create_attached("disk", "64M").connect();
    write_version(&mut guest, seed, 1);
    first.drain("disk");
    write_version(&mut guest, seed, 2);
    first.kill9();
    let export = second.take_over("disk", LIMIT);
    let mut guest = export.connect();
    assert_version(&mut guest, seed, 1);
    write_version(&mut guest, seed, 3);
    first.log().expect("quarantine");
    first.log().expect("not served");
    first.launch();
    await_lost(&first, &second);
    let _recovered = first.cli(&["recover", "disk", "rescued"]).ok();
    assert_version(&mut first.attach("rescued").connect(), seed, 2);
    assert_version(&mut guest, seed, 3);
    guest.disconnect();
    first.finish();
    second.finish();
}

/// Waits until a host has changed its heartbeat `count` times.
fn await_heartbeats(store: &Store, host: &str, count: usize) {
    let path = store.object_file(&format!("hosts/{host}"));
    for _beat in 0..count {
        let before = std::fs::read(&path).expect("a holder has a heartbeat");
        wait::until_true("a heartbeat", LIMIT, || {
            std::fs::read(&path).is_ok_and(|now| now != before)
        });
    }
}

/// Fails if a restart on the same host needs a flag, or a copied state directory counts as the same
/// host.
#[test]
fn a_restart_resumes_at_once_and_a_copied_state_directory_does_not() {
    let store = Store::directory();
    let seed = Random::for_test().bits();
    let settings = store.settings().arg(LEASE[0]).arg(LEASE[1]);
    let mut first = Daemon::start(settings.clone());
    let export = first.create_attached("disk", "64M");
    let mut guest = export.connect();
    write_version(&mut guest, seed, 1);
    let mut copy = Daemon::prepare(settings);
    first.kill9();
    tools::copy_folder(&first.state_dir(), &copy.state_dir());
    first.launch();
    assert_version(&mut export.connect_when_served(), seed, 1);
    await_heartbeats(&store, &host_id(&first), 2);
    copy.log().expect("quarantine");
    copy.log().expect("copied");
    copy.log().expect("not served");
    copy.launch();
    assert_ne!(host_id(&first), host_id(&copy), "a copy took the identity of its original");
    let _busy = copy.cli(&["attach", "disk", "--json"]).refused(4, "disk_busy");
    assert_version(&mut export.connect(), seed, 1);
    copy.finish();
    first.finish();
}
