//! A kill at any named point of the daemon's orders leaves what can be sent again, and loses nothing.

use std::time::Duration;

use blockd_tests::process::{Daemon, Settings};
use blockd_tests::store::Store;
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(60);

fn armed(settings: &Settings, point: &str, action: &str) -> Settings {
    settings.clone().env("BLOCKD_FAILPOINTS", format!("{point}={action}"))
}

/// Starts a daemon whose failpoint will end it at its next command.
fn rearm(daemon: &mut Daemon, settings: &Settings, point: &str) {
    daemon.stop();
    daemon.reconfigure(|_| armed(settings, point, "kill"));
    daemon.launch();
}

/// Starts the dead daemon again without a failpoint.
fn revive(daemon: &mut Daemon, settings: &Settings, point: &str) {
    wait::until_true(&format!("{point} is reached"), LIMIT, || daemon.exited().is_some());
    daemon.kill9();
    daemon.reconfigure(|_| settings.clone());
    daemon.launch();
}

/// Fails if the daemon does not survive, whole, a kill at any point of its order: blob, head,
/// release. (W13)
#[test]
fn a_kill_at_every_point_of_the_drain_loses_nothing() {
    let _turn = tools::heavy();
    let points = [
        "drain-after-put",
        "drain-before-swap",
        "drain-after-swap",
        "drain-after-release",
        "checkpoint-after-put",
        "checkpoint-after-swap",
    ];
    for point in points {
        let store = Store::directory();
        let settings = store.settings().arg("--cut-bytes=1M").arg("--checkpoint-tail-blobs-max=2");
        let mut daemon = Daemon::start(armed(&settings, point, "kill:2"));
        daemon.log().expect("failpoints are armed");
        let export = daemon.create_attached("disk", "64M");
        let mut guest = export.connect();
        let byte = |at: u64| u8::try_from(at + 1).unwrap();
        let mut acked = 0;
        while acked < 48 && guest.write(acked << 20, &vec![byte(acked); 1 << 20]).is_ok() {
            acked += 1;
        }
        revive(&mut daemon, &settings, point);
        let mut guest = export.connect_when_served();
        for at in 0..acked {
            assert!(
                guest.read(at << 20, 1 << 20).unwrap() == vec![byte(at); 1 << 20],
                "{point}: {at}"
            );
        }
        guest.disconnect();
        daemon.drain("disk");
        let _sound = daemon.cli(&["check", "disk", "--deep"]).ok();
        daemon.finish();
    }
}

/// One command that dies, and what must be true of it when it is sent again.
struct Case {
    point: &'static str,
    command: &'static [&'static str],
    /// Exit codes of the same command after the restart: 0, or the code that says it is done.
    again: &'static [i32],
}

const CASES: &[Case] = &[
    Case {
        point: "create-after-head",
        command: &["create", "new", "--size", "64M", "--if-missing"],
        again: &[0],
    },
    Case { point: "attach-after-swap", command: &["attach", "other"], again: &[0] },
    Case { point: "detach-after-swap", command: &["detach", "disk"], again: &[0, 3] },
    Case {
        point: "snapshot-after-barrier",
        command: &["snapshot", "disk", "--name", "snap", "--wait"],
        again: &[0, 4],
    },
    Case {
        point: "snapshot-after-swap",
        command: &["snapshot", "disk", "--name", "snap", "--wait"],
        again: &[0, 4],
    },
    Case { point: "delete-after-mark", command: &["delete", "other", "--yes"], again: &[0, 3] },
    Case { point: "delete-after-objects", command: &["delete", "other", "--yes"], again: &[0, 3] },
];

/// Fails if a command that died half-way cannot be sent again, or has harmed a disk.
#[test]
fn a_kill_at_every_point_of_a_command_leaves_it_to_be_sent_again() {
    let _turn = tools::heavy();
    for Case { point, command, again } in CASES {
        let store = Store::directory();
        let settings = store.settings();
        let mut daemon = Daemon::start(settings.clone());
        daemon.log().expect("failpoints are armed");
        daemon.create("other", "64M");
        let export = daemon.create_attached("disk", "64M");
        export.connect().write(0, &vec![7; 1 << 20]).unwrap();
        rearm(&mut daemon, &settings, point);
        export.connect_when_served().disconnect();
        wait::until_true(&format!("{point} ends the daemon"), LIMIT, || {
            let _died = daemon.cli(command);
            daemon.exited().is_some()
        });
        revive(&mut daemon, &settings, point);
        let answer = wait::until(&format!("{point}: {command:?} again"), LIMIT, || {
            let answer = daemon.cli(command);
            again.contains(&answer.code).then_some(answer)
        });
        report::say(&format!("{point}: then exit {}: {}", answer.code, answer.stderr.trim()));
        let mut guest = daemon.attach("disk").connect();
        assert!(guest.read(0, 1 << 20).unwrap() == vec![7; 1 << 20], "{point}");
        guest.disconnect();
        if command.contains(&"snap") {
            let _forked = daemon.cli(&["fork", "disk@snap", "fork"]).ok();
            let mut fork = daemon.attach("fork").connect();
            assert!(fork.read(0, 1 << 20).unwrap() == vec![7; 1 << 20], "{point}: the snapshot");
        }
        if command[0] == "delete" {
            wait::until_true("the deleted disk is gone", LIMIT, || {
                daemon.cli(&["show", "other"]).code == 3
            });
            daemon.create("other", "1M");
        }
        let _sound = daemon.cli(&["check", "disk", "--deep"]).ok();
        daemon.finish();
    }
}

/// Fails if a panic in the drain of one disk is hidden, or takes another disk with it. (K13)
#[test]
fn a_panic_in_a_drain_stops_that_disk_for_all_to_see_and_no_other() {
    let store = Store::directory();
    let settings = store.settings();
    let mut daemon = Daemon::start(armed(&settings, "drain-before-swap", "panic"));
    daemon.log().expect("");
    let (victim, witness) =
        (daemon.create_attached("victim", "64M"), daemon.create_attached("witness", "64M"));
    let (mut guest, mut other) = (victim.connect(), witness.connect());
    guest.write(0, &vec![1; 1 << 20]).unwrap();
    let _failed = daemon.cli(&["drain", "victim"]).exits(1);
    assert_eq!(daemon.show("victim")["state"], "stopped");
    assert!(guest.write(0, &[2; 4096]).is_err(), "a stopped disk acknowledges");
    other.write(0, &[3; 4096]).unwrap();
    daemon.drain("witness");
    daemon.kill9();
    daemon.reconfigure(|_| settings);
    daemon.launch();
    let mut guest = victim.connect_when_served();
    assert!(guest.read(0, 1 << 20).unwrap() == vec![1; 1 << 20], "what was acknowledged is there");
    daemon.drain("victim");
    daemon.finish();
}
