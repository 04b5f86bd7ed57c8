//! A name is one disk, however many hosts make, take and delete it at once.

use std::time::Duration;

use blockd_tests::process::Daemon;
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(60);

/// Fails if two of many creates at once succeed, or a loser hears anything but that it exists. (K17)
#[test]
fn of_many_creates_of_one_name_exactly_one_succeeds() {
    let store = Store::directory();
    let hosts = [Daemon::start(store.settings()), Daemon::start(store.settings())];
    for round in 0..tools::rounds(5) {
        let name = format!("disk{round}");
        let answers: Vec<_> = std::thread::scope(|scope| {
            let creating: Vec<_> = (0..12)
                .map(|index: usize| {
                    let (host, name) = (&hosts[index % 2], &name);
                    scope.spawn(move || host.cli(&["create", name, "--size", "1M", "--json"]))
                })
                .collect();
            creating.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let won = answers.iter().filter(|answer| answer.code == 0).count();
        assert_eq!(won, 1, "{answers:#?}");
        for answer in answers.into_iter().filter(|answer| answer.code != 0) {
            let _exists = answer.refused(4, "disk_exists");
        }
    }
    let listed = |host: &Daemon| host.cli(&["list", "--json"]).ok().json()["disks"].clone();
    assert_eq!(listed(&hosts[0]), listed(&hosts[1]));
    let [first, second] = hosts;
    first.finish();
    second.finish();
}

/// Fails if a storm of commands on few names ends in a disk that cannot be used or deleted, or in an
/// answer outside the contract. (K17)
#[test]
fn a_storm_of_commands_on_few_names_leaves_nothing_stuck() {
    let _turn = tools::heavy();
    let store = Store::directory();
    let hosts = [Daemon::start(store.settings()), Daemon::start(store.settings())];
    let seed = Random::for_test().bits();
    let counts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6u64)
            .map(|index| {
                let host = &hosts[usize::from(index % 2 == 0)];
                scope.spawn(move || storm(host, Random::from_seed(seed ^ index)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    report::say(&format!("successes of each thread: {counts:?}"));
    for index in 0..3 {
        let name = format!("n{index}");
        for host in &hosts {
            let _detached = host.cli(&["detach", &name, "--disconnect"]);
        }
        wait::until_true(&format!("{name} can be deleted"), LIMIT, || {
            let answer = hosts[0].cli(&["delete", &name, "--yes"]);
            answer.code == 3 || (answer.code == 0 && hosts[0].cli(&["show", &name]).code == 3)
        });
        let mut guest = hosts[1].create_attached(&name, "1M").connect();
        assert_eq!(guest.read(0, 4096).unwrap(), [0; 4096], "bytes of a deleted disk");
        guest.disconnect();
    }
    let [first, second] = hosts;
    first.finish();
    second.finish();
}

/// Sends random commands; how many succeeded.
fn storm(host: &Daemon, mut random: Random) -> usize {
    let mut succeeded = 0;
    for _command in 0..60 {
        let name = format!("n{}", random.below(3));
        let words: &[&str] = match random.below(5) {
            0 | 1 => &["create", &name, "--size", "1M", "--json"],
            2 => &["attach", &name, "--json"],
            3 => &["detach", &name, "--disconnect", "--json"],
            _ => &["delete", &name, "--yes", "--json"],
        };
        let answer = host.cli(words);
        if answer.code == 0 {
            succeeded += 1;
            continue;
        }
        assert!([3, 4].contains(&answer.code), "not in the contract: {answer:#?}");
    }
    succeeded
}

/// Fails if a store that was put back to an older state is used as if it were the newest: writes
/// are missing between what it holds and what the host's log begins with. (L11)
#[test]
fn a_store_that_went_back_in_time_is_noticed() {
    let store = Store::directory();
    let mut daemon = Daemon::start(store.settings());
    let export = daemon.create_attached("disk", "64M");
    let mut guest = export.connect();
    guest.write(0, &vec![1; 1 << 20]).unwrap();
    daemon.drain("disk");
    let backup = tempfile::tempdir().unwrap();
    tools::copy_folder(store.folder(), &backup.path().join("store"));
    // Enough that segments of the log are released behind the drain.
    for mib in 0..60 {
        guest.write(mib << 20, &vec![2; 1 << 20]).unwrap();
    }
    daemon.drain("disk");
    guest.write(1 << 20, &[3; 4096]).unwrap();
    daemon.stop();
    std::fs::remove_dir_all(store.folder()).unwrap();
    tools::copy_folder(&backup.path().join("store"), store.folder());
    daemon.log().expect("not served");
    daemon.log().expect("quarantine");
    daemon.launch();
    let view = wait::until("the disk is refused, with a reason", LIMIT, || {
        let view = daemon.show("disk");
        view["state_reason"].is_string().then_some(view)
    });
    assert_ne!(view["state"], "attached", "an older state is served: {view}");
    report::say(&format!("{}", view["state_reason"]));
    daemon.finish();
}
