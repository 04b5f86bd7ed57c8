//! A snapshot is the disk at one position of its write order; a fork of it is a disk of its own.

use std::time::Duration;

use blockd_tests::model::{self, BLOCK_BYTES, Content, Image, Model};
use blockd_tests::nbd_client::Client;
use blockd_tests::process::{Daemon, Export, Settings};
use blockd_tests::random::Random;
use blockd_tests::s3::{self, SeaweedFs};
use blockd_tests::s3_proxy::{Proxy, Weather};
use blockd_tests::store::Store;
use blockd_tests::workload::{self, Clock, Plan};
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(60);
const BLOCKS: u64 = 8192;

/// Fails if a snapshot under load lacks what was acknowledged before the call, holds what was sent
/// after it returned, or mixes moments; on this host or on another. (F07)
#[test]
fn a_snapshot_under_load_is_one_moment_during_its_call() {
    let _turn = tools::heavy();
    let store = Store::directory();
    let mut random = Random::for_test();
    let daemon = Daemon::start(store.settings().arg("--cut-bytes=4M"));
    let export = daemon.create_attached("disk", "64M");
    let plan = Plan::new(export.address.clone(), &export.name, random.bits(), BLOCKS);
    let (clock, mut model) = (Clock::default(), Model::new(BLOCKS));
    let running = workload::start(&plan, &clock);
    let mut windows = Vec::new();
    for index in 0..tools::rounds(5) {
        running.await_acks(200 + random.below(500), LIMIT);
        let name = format!("s{index}");
        let before = clock.tick();
        let _taken = daemon.cli(&["snapshot", "disk", "--name", &name]).ok();
        windows.push((name, before..=clock.tick()));
    }
    running.await_acks(200, LIMIT);
    let history = running.stop();
    history.assert_no_errors();
    history.teach(&mut model);
    let image_of = |host: &Daemon, fork: &str| {
        let mut guest = host.attach(fork).connect();
        Image::read(&mut guest, plan.seed, BLOCKS).expect("read a fork")
    };
    for (name, window) in &windows {
        let _forked = daemon.cli(&["fork", &format!("disk@{name}"), &format!("f{name}")]).ok();
        let image = image_of(&daemon, &format!("f{name}"));
        model.assert_one_moment_within(&image, window.clone());
        daemon.detach_when_left(&format!("f{name}"));
    }
    daemon.detach_when_left("disk");
    let second = Daemon::start(store.settings());
    for (name, window) in &windows {
        let image = image_of(&second, &format!("f{name}"));
        model.assert_one_moment_within(&image, window.clone());
    }
    report::say(&format!("{} snapshots in {} writes", windows.len(), history.acked()));
    second.finish();
    daemon.finish();
}

fn proxied(proxy: &Proxy) -> Settings {
    Settings::new(proxy.url("blockd")).envs(&s3::CREDENTIALS)
}

/// Fails if a snapshot that was taken while the store was away is lost by a kill, or is of another
/// moment.
#[test]
fn a_snapshot_that_returned_survives_a_kill_without_the_store() {
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let mut daemon = Daemon::start(proxied(&proxy));
    daemon.log().expect("store");
    let export = daemon.create_attached("disk", "64M");
    let mut guest = export.connect();
    guest.write(0, &[1; 65536]).unwrap();
    daemon.drain("disk");
    proxy.set_weather(Weather::Refusing);
    guest.write(4096, &[2; 4096]).unwrap();
    let _taken = daemon.cli(&["snapshot", "disk", "--name", "kept"]).ok();
    guest.write(8192, &[3; 4096]).unwrap();
    daemon.kill9();
    daemon.launch();
    let mut guest = export.connect_when_served();
    assert_eq!(guest.read(4096, 8192).unwrap(), [[2; 4096], [3; 4096]].concat());
    proxy.heal();
    let again = daemon.cli(&["snapshot", "disk", "--name", "kept", "--json"]);
    let _exists = again.refused(4, "snapshot_exists");
    daemon.drain("disk");
    let _forked = daemon.cli(&["fork", "disk@kept", "fork"]).ok();
    let mut fork = daemon.attach("fork").connect();
    assert_eq!(fork.read(4096, 8192).unwrap(), [[2; 4096], [1; 4096]].concat());
    daemon.finish();
}

/// Writes one block at `place` and takes a fork of the disk; its name.
fn grow(daemon: &Daemon, parent: &str, generation: u64, seed: u64) -> String {
    let mut guest = daemon.attach(parent).connect();
    guest.write(generation * BLOCK_BYTES, &model::encode(seed, generation, generation)).unwrap();
    guest.disconnect();
    let child = format!("g{generation}");
    let snapshot = daemon.cli(&["snapshot", parent, "--name", "leaf", "--wait"]).ok();
    let _forked = daemon.cli(&["fork", snapshot.line(), &child]).ok();
    child
}

/// Fails if a fork of a fork of a fork lacks a generation, or sees what its parents wrote later; if
/// a parent that is needed can be deleted, or the leaf suffers when one is. (F03)
#[test]
fn every_generation_of_a_chain_of_forks_is_whole() {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings());
    let seed = Random::for_test().bits();
    let generations = 8;
    daemon.create("g0", "64M");
    let mut leaf = "g0".to_owned();
    for generation in 1..=generations {
        leaf = grow(&daemon, &leaf, generation, seed);
    }
    for index in 0..generations {
        let name = format!("g{index}");
        let mut guest = daemon.attach(&name).connect();
        guest.write(20 * BLOCK_BYTES, &[9; 4096]).unwrap();
        guest.disconnect();
        daemon.detach_when_left(&name);
    }
    for index in 0..generations {
        let refused = daemon.cli(&["delete", &format!("g{index}"), "--yes", "--json"]);
        let _kept = refused.refused(4, "disk_has_forks");
    }
    let mut guest = daemon.attach(&leaf).connect();
    for generation in 1..=generations {
        let bytes = guest.read(generation * BLOCK_BYTES, 4096).unwrap();
        let found = model::decode(seed, generation, &bytes);
        assert_eq!(found, Content::Version(generation), "generation {generation}");
    }
    assert_eq!(guest.read(20 * BLOCK_BYTES, 4096).unwrap(), [0; 4096], "a parent wrote later");
    guest.disconnect();
    daemon.finish();
}

/// Fails if a trimmed part of a fork shows its parent's bytes, at once, after a restart or from the
/// store. (F05)
#[test]
fn what_a_fork_trims_stays_zero_around_partial_writes() {
    let store = Store::directory();
    let mut daemon = Daemon::start(store.settings());
    let mut parent = daemon.create_attached("disk", "64M").connect();
    let mib = 1 << 20;
    parent.write(0, &vec![7; 8 * mib]).unwrap();
    let _taken = daemon.cli(&["snapshot", "disk", "--name", "base", "--wait"]).ok();
    let _forked = daemon.cli(&["fork", "disk@base", "fork"]).ok();
    let export = daemon.attach("fork");
    let mut fork = export.connect();
    let mut expected = vec![7; 8 * mib];
    fork.trim(0, 3 << 20).unwrap();
    expected[..3 * mib].fill(0);
    for (at, length) in [(mib + 100, 512), (3 * mib - 256, 512), (2 * mib, 4096)] {
        fork.write(at as u64, &vec![8; length]).unwrap();
        expected[at..at + length].fill(8);
    }
    assert!(fork.read(0, 8 << 20).unwrap() == expected, "at once");
    daemon.kill9();
    daemon.launch();
    let mut fork = export.connect_when_served();
    assert!(fork.read(0, 8 << 20).unwrap() == expected, "after a kill");
    daemon.drain("fork");
    daemon.restart();
    let mut fork = export.connect_when_served();
    assert!(fork.read(0, 8 << 20).unwrap() == expected, "from the store");
    let mut parent = daemon.attach("disk").connect();
    assert!(parent.read(0, 8 << 20).unwrap() == vec![7; 8 * mib], "the parent");
    daemon.finish();
}

/// Fails if parallel writes into a fork go astray, or reach its parent. (P23)
#[test]
fn a_fork_under_fio_is_exact_and_leaves_its_parent_alone() {
    let _turn = tools::heavy();
    let Some(fio) = tools::need("fio") else { return };
    let store = Store::directory();
    let daemon = Daemon::start(store.settings().arg("--cut-bytes=4M"));
    let pattern = Random::for_test().bytes(32 << 20);
    let mut parent = daemon.create_attached("disk", "64M").connect();
    parent.write(0, &pattern).unwrap();
    let _taken = daemon.cli(&["snapshot", "disk", "--name", "base", "--wait"]).ok();
    let _forked = daemon.cli(&["fork", "disk@base", "fork"]).ok();
    let export = daemon.attach("fork");
    let job = [
        "--name=fork".to_owned(),
        "--ioengine=nbd".to_owned(),
        format!("--uri={}", export.uri),
        "--rw=randrw".to_owned(),
        "--bsrange=512-256k".to_owned(),
        "--iodepth=32".to_owned(),
        "--size=64M".to_owned(),
        "--verify=crc32c".to_owned(),
        "--verify_backlog=256".to_owned(),
        "--verify_fatal=1".to_owned(),
        format!("--aux-path={}", daemon.place().display()),
    ];
    fio.must(&job);
    assert!(parent.read(0, 32 << 20).unwrap() == pattern, "the parent changed");
    parent.disconnect();
    daemon.finish();
}

fn read_one(export: &Export) -> Vec<u8> {
    let mut guest: Client = export.connect();
    let bytes = guest.read(0, 4096).unwrap();
    guest.disconnect();
    bytes
}

/// Fails if a fork costs more than five requests, or if a read through many generations costs more
/// than through one.
#[test]
fn a_fork_costs_a_handful_of_requests_and_reads_no_deeper_with_depth() {
    let _turn = tools::heavy();
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let daemon = Daemon::start(proxied(&proxy));
    let mut guest = daemon.create_attached("g0", "1G").connect();
    guest.write(0, &vec![5; 1 << 20]).unwrap();
    guest.disconnect();
    let depth = 12;
    let mut costs = Vec::new();
    for generation in 0..depth {
        let parent = format!("g{generation}");
        let _attached = daemon.attach(&parent);
        let _taken = daemon.cli(&["snapshot", &parent, "--name", "leaf", "--wait"]).ok();
        daemon.detach(&parent);
        let data = |log: Vec<blockd_tests::s3_proxy::Entry>| {
            log.into_iter().filter(|entry| !entry.key.contains("/hosts/")).collect::<Vec<_>>()
        };
        proxy.clear_log();
        let _forked =
            daemon.cli(&["fork", &format!("{parent}@leaf"), &format!("g{}", generation + 1)]).ok();
        let requests: Vec<_> = data(proxy.log())
            .into_iter()
            .map(|entry| format!("{} {} {:?}", entry.method, entry.key, entry.status))
            .collect();
        assert!(requests.len() <= 5, "a fork made {} requests: {requests:#?}", requests.len());
        costs.push(requests.len());
    }
    let cold_gets = |name: &str| {
        let reader = Daemon::start(proxied(&proxy));
        let export = reader.attach(name);
        proxy.clear_log();
        assert_eq!(read_one(&export), [5; 4096]);
        let gets = proxy.log().iter().filter(|entry| entry.method == "GET").count();
        wait::until_true("the disk is free", LIMIT, || reader.cli(&["detach", name]).code == 0);
        reader.finish();
        gets
    };
    let (shallow, deep) = (cold_gets("g1"), cold_gets(&format!("g{depth}")));
    report::say(&format!("forks cost {costs:?} requests; cold reads {shallow} and {deep} GETs"));
    assert!(deep <= shallow, "a read costs {shallow} GETs at depth 1, {deep} at depth {depth}");
    daemon.finish();
}
