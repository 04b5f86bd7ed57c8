//! Whatever the store answers, or does not, a disk is never wrong and never wedged.

use std::time::Duration;

use blockd_tests::nbd_client::{Client, Command, EIO};
use blockd_tests::process::{Daemon, Export, Settings};
use blockd_tests::random::Random;
use blockd_tests::s3::{self, SeaweedFs};
use blockd_tests::s3_proxy::{Entry, Fault, Key, Proxy, Rule};
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(90);
const MIB: u32 = 1 << 20;

/// A store, the proxy in front of it, and how daemons are started on it.
struct World {
    _server: SeaweedFs,
    proxy: Proxy,
}

impl World {
    fn start() -> Option<Self> {
        let server = SeaweedFs::start()?;
        let proxy = Proxy::start(server.endpoint());
        Some(Self { _server: server, proxy })
    }

    fn settings(&self) -> Settings {
        Settings::new(self.proxy.url("blockd")).envs(&s3::CREDENTIALS)
    }

    /// A daemon that may speak of its store's trouble.
    fn daemon(&self) -> Daemon {
        let daemon = Daemon::start(self.settings());
        daemon.log().expect("store");
        daemon
    }
}

/// Incompressible bytes that another call with the same seed makes again.
fn bytes(seed: u64, count: u32) -> Vec<u8> {
    Random::from_seed(seed).bytes(usize::try_from(count).expect("a test disk fits memory"))
}

/// Writes four MiB and drains them under `rule`; then another host must find them.
fn drain_under(rules: &[Rule]) {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let daemon = world.daemon();
    let mut guest = daemon.create_attached("disk", "64M").connect();
    let data = bytes(1, 4 * MIB);
    let ids: Vec<_> = rules.iter().map(|rule| world.proxy.rule(rule.clone())).collect();
    guest.write(0, &data).unwrap();
    let _drained = daemon.cli(&["drain", "disk", "--timeout", "60"]).ok();
    for (id, rule) in ids.iter().zip(rules) {
        assert!(world.proxy.hits(*id) > 0, "never met: {rule:?}");
    }
    assert_eq!(daemon.show("disk")["state"], "attached");
    assert!(guest.read(0, 4 * MIB).unwrap() == data, "on the same host");
    guest.write(0, &[1; 4096]).unwrap();
    guest.disconnect();
    world.proxy.heal();
    daemon.detach_when_left("disk");
    daemon.finish();
    let second = Daemon::start(world.settings());
    let mut guest = second.attach("disk").connect();
    let found = guest.read(0, 4 * MIB).unwrap();
    assert!(found[..4096] == [1; 4096] && found[4096..] == data[4096..], "on another host");
    second.finish();
}

/// Fails if a status of 200 is believed where the body says otherwise. (S01)
#[test]
fn a_success_that_carries_an_error_is_not_believed() {
    drain_under(&[
        Rule::new("PUT", Key::blobs(), Fault::OkWithError("InternalError")).times(2),
        Rule::new("PUT", Key::heads(), Fault::OkWithError("SlowDown")).times(2),
    ]);
}

/// Fails if a PUT that never arrived counts because an empty 200 came back. (S01)
#[test]
fn a_success_without_an_etag_is_not_believed() {
    drain_under(&[
        Rule::new("PUT", Key::blobs(), Fault::OkEmpty).times(1),
        Rule::new("PUT", Key::heads(), Fault::OkEmpty).times(1),
    ]);
}

/// Fails if a conflict that left nothing behind is taken for a lost lease. (S11)
#[test]
fn a_409_is_looked_into_and_not_taken_for_a_lost_race() {
    drain_under(&[
        Rule::new("PUT", Key::heads(), Fault::Answer(409, "ConditionalRequestConflict")).times(3),
        Rule::new("PUT", Key::blobs(), Fault::Answer(409, "OperationAborted")).times(2),
    ]);
}

/// Fails if a swap whose answer was lost is done twice, or counted as somebody else's.
#[test]
fn a_put_that_landed_without_an_answer_counts_once() {
    drain_under(&[
        Rule::new("PUT", Key::heads(), Fault::ApplyThenDrop).times(2),
        Rule::new("PUT", Key::blobs(), Fault::ApplyThenDrop).times(2),
    ]);
}

/// Fails if one failure of any kind of request is more than a retry. (S16)
#[test]
fn one_failure_of_each_kind_of_request_is_only_a_retry() {
    drain_under(&[
        Rule::new("PUT", Key::blobs(), Fault::Drop).times(1),
        Rule::new("PUT", Key::heads(), Fault::Answer(500, "InternalError")).times(1),
        Rule::new("PUT", Key::blobs(), Fault::Answer(429, "TooManyRequests")).times(1),
        Rule::new("PUT", Key::heads(), Fault::Answer(503, "ServiceUnavailable")).times(2),
    ]);
}

/// Fails if expired or refused credentials make the drain give up instead of trying again. (S09)
#[test]
fn refused_credentials_are_tried_again_until_they_work() {
    drain_under(&[
        Rule::new("PUT", Key::blobs(), Fault::Answer(403, "AccessDenied")).times(3),
        Rule::new("PUT", Key::heads(), Fault::Answer(400, "ExpiredToken")).times(2),
    ]);
}

/// Fails if a head that lands minutes late undoes what came after it.
#[test]
fn a_head_that_lands_late_changes_nothing() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let daemon = world.daemon();
    let mut guest = daemon.create_attached("disk", "64M").connect();
    world.proxy.rule(Rule::new("PUT", Key::heads(), Fault::Hold).times(1));
    let data = bytes(2, 2 * MIB);
    guest.write(0, &data).unwrap();
    let _drained = daemon.cli(&["drain", "disk", "--timeout", "60"]).ok();
    guest.write(0, &data[MIB as usize..]).unwrap();
    let _drained = daemon.cli(&["drain", "disk", "--timeout", "60"]).ok();
    assert_eq!(world.proxy.held(), 1);
    let late = world.proxy.release_held();
    assert!(late.iter().all(|status| *status == 412), "a late swap was applied: {late:?}");
    guest.write(0, &data).unwrap();
    let _drained = daemon.cli(&["drain", "disk", "--timeout", "60"]).ok();
    guest.disconnect();
    daemon.detach_when_left("disk");
    let second = Daemon::start(world.settings());
    assert!(second.attach("disk").connect().read(0, 2 * MIB).unwrap() == data);
    second.finish();
    daemon.finish();
}

/// A disk with four MiB in the store, attached on a host whose caches are cold.
fn cold(world: &World) -> (Daemon, Export, Vec<u8>) {
    let data = bytes(3, 4 * MIB);
    let writer = Daemon::start(world.settings());
    let mut guest = writer.create_attached("disk", "64M").connect();
    guest.write(0, &data).unwrap();
    guest.disconnect();
    writer.detach_when_left("disk");
    writer.finish();
    let reader = world.daemon();
    let export = reader.attach("disk");
    (reader, export, data)
}

/// Fails if a body that breaks off is padded, or a flipped byte is handed to the guest. (S03)
#[test]
fn broken_bodies_are_fetched_again_and_never_served() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let (daemon, export, data) = cold(&world);
    daemon.log().expect("blob");
    for fault in [Fault::CutBody(1), Fault::CutBody(5000), Fault::CutBody(0), Fault::Drop] {
        world.proxy.rule(Rule::new("GET", Key::blobs(), fault).times(2));
    }
    let mut guest = export.connect();
    assert!(guest.read(0, 4 * MIB).unwrap() == data, "after cut bodies");
    daemon.finish();
}

/// Fails if damage in the store is served as data or as zeros, or does not name the object; if it
/// takes requests with it that need no damaged byte. (P17)
#[test]
fn damage_in_the_store_is_an_error_of_exactly_the_requests_it_concerns() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    for fault in [Fault::FlipByte(100), Fault::Answer(404, "NoSuchKey")] {
        let name = if fault == Fault::FlipByte(100) { "flipped" } else { "gone" };
        let writer = Daemon::start(world.settings());
        let mut guest = writer.create_attached(name, "64M").connect();
        guest.write(0, &bytes(4, 2 * MIB)).unwrap();
        guest.disconnect();
        writer.detach_when_left(name);
        writer.finish();
        let reader = world.daemon();
        for part in ["blob", "crc", "checksum", "corrupt", "/b/"] {
            reader.log().expect(part);
        }
        let mut guest = reader.attach(name).connect();
        guest.write(32 << 20, &[7; 1 << 16]).unwrap();
        let rule = world.proxy.rule(Rule::new("GET", Key::blobs(), fault));
        one_bad_among_good(&mut guest);
        let named = ["blob ", "/b/"].iter().any(|part| !reader.log().matching(part).is_empty());
        assert!(named, "the object is not named: {:#?}", reader.log().lines());
        world.proxy.remove(rule);
        assert!(guest.read(0, 2 * MIB).unwrap() == bytes(4, 2 * MIB), "once it is whole again");
        reader.finish();
    }
}

/// Pipelines reads of which one needs the store: that one fails, the others do not.
fn one_bad_among_good(guest: &mut Client) {
    let mut bad = 0;
    for index in 0..32u64 {
        let offset = if index == 7 { 0 } else { (32 << 20) + (index % 16) * 4096 };
        let cookie = guest.send(Command::Read, 0, offset, 4096, &[]).unwrap();
        bad = if index == 7 { cookie } else { bad };
    }
    for _reply in 0..32 {
        let reply = guest.receive().unwrap();
        if reply.cookie == bad {
            assert_eq!(reply.errno, EIO, "damage was answered with data");
        } else {
            assert_eq!((reply.errno, reply.data), (0, vec![7; 4096]));
        }
    }
    guest.flush().unwrap();
}

/// Fails if a store that is slow to read holds writes up, or reads of what is local. (X02)
#[test]
fn a_slow_fetch_holds_up_nothing_but_its_own_read() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let (daemon, export, data) = cold(&world);
    let mut guest = export.connect();
    guest.write(32 << 20, &[7; 4096]).unwrap();
    let slow = Fault::DelayBefore(Duration::from_secs(5));
    let rule = world.proxy.rule(Rule::new("GET", Key::blobs(), slow));
    let waiting = guest.send(Command::Read, 0, 0, 4096, &[]).unwrap();
    world.proxy.await_hits(rule, 1, LIMIT);
    let mut quick = 0;
    for round in 0..500u64 {
        let sent = [
            guest.send_write((33 << 20) + round * 4096, &[8; 4096], 0).unwrap(),
            guest.send(Command::Read, 0, 32 << 20, 4096, &[]).unwrap(),
        ];
        for _reply in sent {
            let reply = guest.receive().unwrap();
            assert!(sent.contains(&reply.cookie), "round {round}: the slow read came first");
            assert_eq!(reply.errno, 0);
            quick += 1;
        }
    }
    let reply = guest.receive().unwrap();
    assert_eq!((reply.cookie, reply.errno), (waiting, 0));
    assert!(reply.data == data[..4096]);
    report::say(&format!("{quick} requests overtook one slow read"));
    daemon.finish();
}

/// Fails if a refused DELETE reaches a guest or wedges the disk. (S12)
#[test]
fn a_store_that_refuses_deletes_only_keeps_garbage() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let daemon = world.daemon();
    daemon.log().expect("delete");
    let mut guest = daemon.create_attached("disk", "64M").connect();
    world.proxy.rule(Rule::new("DELETE", Key::Any, Fault::Answer(403, "AccessDenied")));
    world.proxy.rule(Rule::new("POST", Key::Any, Fault::Answer(403, "AccessDenied")));
    for round in 0..4 {
        guest.write(0, &bytes(round, MIB)).unwrap();
        guest.trim(MIB.into(), MIB).unwrap();
        daemon.drain("disk");
    }
    assert!(guest.read(0, MIB).unwrap() == bytes(3, MIB));
    daemon.finish();
}

/// Whether a request could change an object that is there.
fn is_unconditional(entry: &Entry) -> bool {
    entry.method == "PUT" && entry.if_match.is_none() && entry.if_none_match.is_none()
}

/// Fails if any object is ever put without a condition, a head without `If-Match` once it is
/// there, or a mutable object is deleted. (L10)
#[test]
fn nothing_is_ever_put_without_a_condition() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let mut daemon = world.daemon();
    let export = daemon.create_attached("disk", "64M");
    export.connect().write(0, &bytes(5, 2 * MIB)).unwrap();
    let _taken = daemon.cli(&["snapshot", "disk", "--name", "one", "--wait"]).ok();
    let _forked = daemon.cli(&["fork", "disk@one", "fork"]).ok();
    daemon.kill9();
    daemon.launch();
    export.connect_when_served().write(0, &bytes(6, MIB)).unwrap();
    daemon.drain("disk");
    daemon.detach_when_left("disk");
    let _deleted = daemon.cli(&["delete", "fork", "--yes"]).ok();
    let log = world.proxy.log();
    let puts = log.iter().filter(|entry| entry.method == "PUT").count();
    // The probe at start has to try what an honest store refuses, on keys of its own.
    let wrong: Vec<_> = log
        .iter()
        .filter(|entry| is_unconditional(entry) && !entry.key.contains("probe"))
        .collect();
    assert!(puts > 10 && wrong.is_empty(), "{puts} PUTs, unconditional: {wrong:#?}");
    let undone: Vec<_> = log
        .iter()
        .filter(|entry| entry.method == "DELETE" && entry.key.contains("/disks/"))
        .collect();
    assert!(undone.is_empty(), "names are never deleted: {undone:#?}");
    daemon.finish();
}

/// Fails if a store that ignores conditions is used at all, or the operation is not named.
#[test]
fn a_store_that_ignores_conditions_is_refused_at_start() {
    let Some(world) = World::start() else { return };
    world.proxy.rule(Rule::new("PUT", Key::Any, Fault::IgnoreConditions));
    let mut daemon = Daemon::prepare(world.settings());
    daemon.spawn();
    let status = wait::until("the daemon ends", LIMIT, || daemon.exited());
    assert!(!status.success());
    let said = daemon.log().lines().join("\n");
    assert!(said.contains("If-None-Match"), "the operation that failed is not named: {said}");
}

/// Fails if a control call waits for ever on a store that does not answer, or a detach that gave up
/// left the disk half attached.
#[test]
fn control_calls_give_up_and_a_detach_that_did_leaves_the_disk_attached() {
    let _turn = tools::heavy();
    let Some(world) = World::start() else { return };
    let daemon = world.daemon();
    let export = daemon.create_attached("disk", "64M");
    let mut guest = export.connect();
    let rule = world.proxy.rule(Rule::new("ANY", Key::Any, Fault::NeverAnswer));
    guest.write(0, &[9; 4096]).unwrap();
    guest.disconnect();
    for words in [
        &["create", "other", "--size", "1M"][..],
        &["drain", "disk"],
        &["detach", "disk", "--disconnect"],
        &["snapshot", "disk", "--wait"],
    ] {
        let answer = daemon.cli(&[words, &["--timeout", "1", "--json"]].concat());
        let _unavailable = answer.refused(5, "store_unavailable");
    }
    let _told = daemon.cli(&["status", "--timeout", "1"]).ok();
    assert_eq!(export.connect().read(0, 4096).unwrap(), [9; 4096]);
    world.proxy.remove(rule);
    let _drained = daemon.cli(&["drain", "disk", "--timeout", "60"]).ok();
    daemon.detach_when_left("disk");
    daemon.finish();
}
