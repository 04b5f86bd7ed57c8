//! The command line as its users meet it: what it asks the daemon, what it prints, how it ends.

use std::ffi::OsString;
use std::sync::{Arc, Mutex};

use clap::CommandFactory;
use serde_json::{Value, json};

use super::args::CommandLine;
use crate::config::settings;
use crate::control::fake::World;
use crate::error::{Error, Kind};

/// How one run ended and what it printed.
struct Answer {
    code: u8,
    stdout: String,
    stderr: String,
}

fn run(arguments: &str) -> Answer {
    let arguments = ["blockd"].into_iter().chain(arguments.split(' ').filter(|a| !a.is_empty()));
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let code = super::run(arguments.map(OsString::from).collect(), &mut stdout, &mut stderr);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Answer { code, stdout: text(stdout), stderr: text(stderr) }
}

/// A run against a daemon that answers every command with `reply`, and what it was asked.
async fn run_against(
    arguments: &str,
    reply: impl Fn() -> crate::error::Result<Value> + Send + Sync + 'static,
) -> (Answer, Vec<(&'static str, Value)>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    let world = World::new(move |_, command, request| {
        log.lock().unwrap().push((command, request));
        let reply = reply();
        async { reply }
    })
    .await;
    let arguments = format!("{arguments} --control {}", world.socket().display());
    let answer = tokio::task::spawn_blocking(move || run(&arguments)).await.unwrap();
    world.stop().await;
    let asked = std::mem::take(&mut *asked.lock().unwrap());
    (answer, asked)
}

fn disk() -> Value {
    json!({
        "name": "d1", "id": "000000000000000000000000000000d1", "state": "attached",
        "state_reason": null, "size_bytes": 10_737_418_240_u64, "durability": "local",
        "max_lag_ms": 5000, "created_unix_ms": 1_764_532_526_000_u64,
        "parent": {"disk": "000000000000000000000000000000d0", "name": "d0",
            "snapshot": "00000000000000000000000000000050", "snapshot_name": "s"},
        "epoch": 3, "generation": 12,
        "holder": {"host": "0000000000000000000000000000000a", "hostname": "host-a",
            "boot_nonce": "000000000000000b", "since_unix_ms": 1_764_532_526_000_u64,
            "silent_seconds": 4.5},
        "attachments": [{"target": "d1", "access": "write", "uri": "nbd+unix:///d1?socket=/run/s",
            "device": "/dev/nbd0", "discard": false,
            "clients": [{"peer": "unix", "since_unix_ms": 1_764_532_526_000_u64}]}],
        "drained_lsn": 400, "last_drained_unix_ms": 1_764_532_526_000_u64,
        "undrained_bytes": 1_572_864, "undrained_seconds": 2.5, "log_bytes": 16_777_216,
        "tail_blobs": 2, "blobs": 7, "map_objects": 1, "stored_bytes": 5_368_709_120_u64,
        "snapshots": 1,
    })
}

fn status() -> Value {
    json!({
        "version": "0.1.0", "pid": 4711, "uptime_seconds": 3725.0,
        "host": "0000000000000000000000000000000a", "hostname": "host-a",
        "boot_nonce": "000000000000000b", "state_dir": "/var/lib/blockd",
        "store": {"url": "s3://b/p", "id": null, "available": false,
            "unavailable_since_unix_ms": null, "last_error": "connection refused",
            "requests": {"get": 3, "list": 0, "put": 4}, "put_bytes": 4096, "get_bytes": 0},
        "log": {"mode": "direct", "sync": "fdatasync", "ring": true, "used_bytes": 0,
            "max_bytes": 8_589_934_592_u64},
        "cache": {"used_bytes": 0, "max_bytes": 10_737_418_240_u64, "hits": 3, "misses": 1},
        "memory": {"used_bytes": 1024, "max_bytes": 268_435_456, "resident_bytes": 2048},
        "warnings": ["the log is buffered"], "disks": [disk()],
    })
}

fn snapshot() -> Value {
    json!({
        "name": "s", "id": "00000000000000000000000000000050", "state": "pending",
        "message": "before\nlunch", "size_bytes": 4096, "lsn": 9, "generation": null,
        "created_unix_ms": 1_764_532_526_000_u64, "forks": ["d2", "d3"],
    })
}

fn attached() -> Value {
    json!({
        "target": "d1", "access": "write", "uri": "nbd+unix:///d1?socket=/run/blockd/d1.sock",
        "device": null, "epoch": 4, "already_attached": false, "took_over": null,
        "state_age_seconds": null,
    })
}

#[track_caller]
fn check_misuse(arguments: &str, code: &str, expected: &str) {
    let answer = run(arguments);
    assert_eq!((answer.code, answer.stdout.as_str()), (2, ""), "{arguments}: {}", answer.stderr);
    assert_eq!(answer.stderr.lines().count(), 1, "{arguments}: {}", answer.stderr);
    assert!(answer.stderr.starts_with("blockd: "), "{arguments}: {}", answer.stderr);
    assert!(answer.stderr.contains(expected), "{arguments}: {}", answer.stderr);
    let answer = run(&format!("{arguments} --json"));
    assert_eq!((answer.code, answer.stderr.as_str()), (2, ""), "{arguments} --json");
    let error: Value = serde_json::from_str(&answer.stdout).expect(arguments);
    assert_eq!(error["error"]["code"], code, "{arguments}: {error}");
    for field in ["message", "fix"] {
        let text = error["error"][field].as_str().unwrap_or_default();
        assert!(!text.is_empty() && !text.contains('\n'), "{arguments}: {error}");
    }
}

#[test]
fn each_misuse_is_one_line_with_a_fix_and_exit_code_2() {
    let wrong = "invalid_argument";
    for (arguments, code, expected) in [
        ("crate d1", wrong, "unrecognized subcommand 'crate'; perhaps create is meant"),
        ("create", wrong, "--size <SIZE> <NAME>; see blockd create --help"),
        ("create d1", wrong, "--size <SIZE>; see blockd create --help"),
        ("create D1 --size 1G", "invalid_name", "disk name \"D1\" is not valid; use 1 to 63"),
        ("create d1 --size 1X", wrong, "--size <SIZE>: \"1X\" is not a size; write whole"),
        ("create d1 --size 0", wrong, "a disk has at least one block"),
        ("create d1 --size 1000", wrong, "1000 bytes is not a multiple of 4 KiB; write"),
        ("create d1 --size 1G --max-lag 5", wrong, "\"5\" is not a duration; write it with its"),
        ("create d1 --size 1G --durability best", wrong, "'best' for '--durability"),
        ("list d1", wrong, "unexpected argument 'd1' found; see blockd list --help"),
        ("list --timeout 0", wrong, "--timeout <TIME>: no time at all; write"),
        ("list --timeout soon", wrong, "\"soon\" is not a duration"),
        ("show", wrong, "<NAME>; see blockd show --help"),
        ("show d1@s", "invalid_name", "disk name \"d1@s\" is not valid"),
        ("usage a b", wrong, "unexpected argument 'b'"),
        ("attach d1@", "invalid_name", "snapshot name \"\" is not valid"),
        ("attach d1 --acces read", wrong, "perhaps --access is meant; see blockd attach --help"),
        ("attach d1 --access rw", wrong, "[possible values: write, read, branch]; see"),
        ("attach d1 --socket a --tcp [::1]:1", wrong, "cannot be used with '--tcp <ADDR:PORT>'"),
        ("attach d1 --socket a --device auto", wrong, "cannot be used with '--device"),
        ("attach d1 --tcp [::1]:1 --device auto", wrong, "cannot be used with '--device"),
        ("attach d1 --tcp localhost", wrong, "is not an address and a port; write it as"),
        ("attach d1 --device sda", wrong, "neither auto nor a device like /dev/nbd0"),
        ("attach d1 --wait ever", wrong, "\"ever\" is not a duration"),
        ("attach d1 --discard", wrong, "--discard is for the fork of a branch; add --access"),
        ("attach d1 --access read --accept-loss", wrong, "--accept-loss is for taking a disk over"),
        ("attach d1@s --access write", wrong, "d1@s is a snapshot, which is never written"),
        ("snapshot d1 --name S", "invalid_name", "snapshot name \"S\" is not valid"),
        ("snapshot d1@s", "invalid_name", "disk name \"d1@s\" is not valid"),
        ("fork d1", wrong, "<NEW>; see blockd fork --help"),
        ("fork d1 d2@s", "invalid_name", "disk name \"d2@s\" is not valid"),
        ("delete d1", wrong, "delete d1 needs a yes, and there is nobody to ask; add --yes"),
        ("resize d1 +1G", wrong, "\"+1G\" is not a size"),
        ("mount d1 /none/such", wrong, "/none/such is not a folder to mount on"),
        ("mount d1 /proc/version", wrong, "not a folder to mount on; name a folder"),
        ("mount d1 / --mkfs btrfs", wrong, "'btrfs' for '--mkfs"),
        ("config show", wrong, "unrecognized subcommand 'show'"),
        ("config check --config /none/such", wrong, "cannot read /none/such"),
        ("serve --cut-bytes 1", wrong, "--cut-bytes: 1 is too small; at least 1 MiB"),
        ("serve --store s3://", wrong, "--store: store url \"s3://…\": the bucket must have"),
        ("serve --control c.sock", wrong, "--control: \"c.sock\" is not an absolute path"),
        ("serve --allow-buffered-log=si", wrong, "\"si\" is not a choice; write true or false"),
        ("serve --verbose", wrong, "unexpected argument '--verbose' found"),
    ] {
        check_misuse(arguments, code, expected);
    }
    let long = format!("attach d1 --socket /{}", "x".repeat(107));
    check_misuse(&long, wrong, "has 108 bytes; a socket's path has at most 107");
}

#[test]
fn no_command_at_all_is_help_on_stderr_for_people_and_an_error_for_programs() {
    let answer = run("");
    assert_eq!((answer.code, answer.stdout.as_str()), (2, ""));
    assert!(answer.stderr.contains("Usage: blockd"), "{}", answer.stderr);
    let answer = run("--json");
    assert_eq!((answer.code, answer.stderr.as_str()), (2, ""));
    assert!(answer.stdout.contains("no command is given"), "{}", answer.stdout);
}

#[test]
fn help_and_version_are_answers() {
    CommandLine::command().debug_assert();
    let version = run("--version");
    assert_eq!((version.code, version.stderr.as_str()), (0, ""));
    assert_eq!(version.stdout, format!("blockd {}\n", env!("CARGO_PKG_VERSION")));
    for command in CommandLine::command().get_subcommands() {
        let help = run(&format!("{} --help", command.get_name()));
        assert_eq!((help.code, help.stderr.as_str()), (0, ""), "{}", command.get_name());
        assert!(help.stdout.contains(&format!("Usage: blockd {}", command.get_name())));
    }
}

#[test]
fn every_setting_is_a_flag_of_serve_with_its_variable_and_default_in_the_help() {
    let help = run("serve --help").stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for setting in settings::all() {
        assert!(help.contains(&format!("--{}", setting.name)), "{}", setting.name);
        assert!(help.contains(&format!("[env: {}]", setting.variable())), "{}", setting.name);
        assert!(
            setting.name == "control" || help.contains(&format!("[default: {}]", setting.default))
        );
    }
}

#[tokio::test]
async fn every_kind_of_error_has_its_exit_code_and_keeps_its_words() {
    for (kind, exit) in [
        (Kind::Failed, 1),
        (Kind::Corrupt, 1),
        (Kind::Poisoned, 1),
        (Kind::LogFull, 1),
        (Kind::InvalidName, 2),
        (Kind::InvalidArgument, 2),
        (Kind::NotFound, 3),
        (Kind::DiskBusy, 4),
        (Kind::DiskExists, 4),
        (Kind::DiskHasForks, 4),
        (Kind::SnapshotExists, 4),
        (Kind::SnapshotInUse, 4),
        (Kind::LeaseLost, 4),
        (Kind::TakeoverNeedsAcceptLoss, 4),
        (Kind::QuotaExceeded, 4),
        (Kind::StoreUnavailable, 5),
    ] {
        let refuse = move || Err(Error::new(kind, "d1 will not").with_detail("holder", "host-b"));
        let (answer, _) = run_against("flush d1", refuse).await;
        assert_eq!((answer.code, answer.stdout.as_str()), (exit, ""), "{kind:?}");
        assert_eq!(answer.stderr.lines().count(), 1, "{}", answer.stderr);
        let fix = answer.stderr.strip_prefix("blockd: d1 will not; ").expect("what comes first");
        assert!(fix.trim().len() > 5, "{kind:?} has no fix");
        let (answer, _) = run_against("flush d1 --json", refuse).await;
        assert_eq!((answer.code, answer.stderr.as_str()), (exit, ""), "{kind:?}");
        let body: Value = serde_json::from_str(&answer.stdout).unwrap();
        assert_eq!(body["error"]["code"], kind.code());
        assert_eq!(body["error"]["message"], "d1 will not");
        assert_eq!(body["error"]["details"]["holder"], "host-b");
        assert_eq!(body["error"]["fix"].as_str().unwrap(), fix.trim());
    }
}

#[test]
fn no_daemon_is_exit_code_1_and_says_which_socket_and_how_to_start_one() {
    let answer = run("list --control /none/such.sock");
    assert_eq!((answer.code, answer.stdout.as_str()), (1, ""));
    assert!(answer.stderr.contains("no daemon listens on /none/such.sock; start one with"));
}

#[tokio::test]
async fn each_command_asks_the_daemon_for_what_was_written() {
    let here = std::env::current_dir().unwrap().join("s.sock");
    for (arguments, command, request) in [
        (
            "create d1 --size 10G",
            "create",
            json!({"name": "d1", "size_bytes": 10_737_418_240_u64,
            "if_missing": false, "durability": "local", "max_lag_ms": null}),
        ),
        (
            "create d1 --size 4K --if-missing --durability remote --max-lag 5s",
            "create",
            json!({"name": "d1", "size_bytes": 4096, "if_missing": true, "durability": "remote",
            "max_lag_ms": 5000}),
        ),
        ("list", "list", json!({})),
        ("show d1", "show", json!({"name": "d1"})),
        ("usage", "usage", json!({"name": null})),
        ("usage d1", "usage", json!({"name": "d1"})),
        ("status", "status", json!({})),
        (
            "attach d1",
            "attach",
            json!({"target": "d1", "access": "write", "wait_seconds": 0,
            "accept_loss": false, "socket": null, "tcp": null, "device": null, "discard": false}),
        ),
        (
            "attach d1@s",
            "attach",
            json!({"target": "d1@s", "access": "read", "wait_seconds": 0,
            "accept_loss": false, "socket": null, "tcp": null, "device": null, "discard": false}),
        ),
        (
            "attach d1 --wait 500ms --accept-loss --socket s.sock",
            "attach",
            json!({"target": "d1", "access": "write", "wait_seconds": 1, "accept_loss": true,
            "socket": here, "tcp": null, "device": null, "discard": false}),
        ),
        (
            "attach d1 --access branch --discard --tcp [::1]:10809",
            "attach",
            json!({"target": "d1", "access": "branch", "wait_seconds": 0, "accept_loss": false,
            "socket": null, "tcp": "[::1]:10809", "device": null, "discard": true}),
        ),
        (
            "attach d1 --device /dev/nbd7",
            "attach",
            json!({"target": "d1", "access": "write",
            "wait_seconds": 0, "accept_loss": false, "socket": null, "tcp": null,
            "device": "/dev/nbd7", "discard": false}),
        ),
        ("detach d1", "detach", json!({"target": "d1", "disconnect": false})),
        ("detach d1@s --disconnect", "detach", json!({"target": "d1@s", "disconnect": true})),
        ("flush d1", "flush", json!({"target": "d1"})),
        ("drain d1", "drain", json!({"target": "d1"})),
        (
            "snapshot d1",
            "snapshot",
            json!({"name": "d1", "snapshot": null, "message": null, "wait": false}),
        ),
        (
            "snapshot d1 --name s --message m --wait",
            "snapshot",
            json!({"name": "d1", "snapshot": "s", "message": "m", "wait": true}),
        ),
        ("snapshots d1", "snapshots", json!({"name": "d1"})),
        ("fork d1@s d2", "fork", json!({"target": "d1@s", "new": "d2"})),
        ("delete d1@s --yes", "delete", json!({"target": "d1@s"})),
        ("resize d1 1T", "resize", json!({"name": "d1", "size_bytes": 1_099_511_627_776_u64})),
        ("check d1 --deep", "check", json!({"name": "d1", "deep": true})),
        ("recover d1 d2", "recover", json!({"name": "d1", "new": "d2"})),
        (
            "mount d1 /",
            "attach",
            json!({"target": "d1", "access": "write", "wait_seconds": 0,
            "accept_loss": false, "socket": null, "tcp": null, "device": "auto", "discard": false}),
        ),
        (
            "mount d1@s /",
            "attach",
            json!({"target": "d1@s", "access": "branch", "wait_seconds": 0,
            "accept_loss": false, "socket": null, "tcp": null, "device": "auto", "discard": true}),
        ),
        ("umount d1", "status", json!({})),
    ] {
        let (answer, asked) =
            run_against(arguments, || Err(Error::new(Kind::NotFound, "enough"))).await;
        assert_eq!(asked, [(command, request)], "{arguments}: {}", answer.stderr);
    }
}

#[tokio::test]
async fn each_answer_is_what_the_next_command_needs_and_nothing_else() {
    for (arguments, reply, stdout) in [
        ("create d1 --size 10G", json!({"created": true, "disk": disk()}), "d1\n"),
        ("attach d1", attached(), "nbd+unix:///d1?socket=/run/blockd/d1.sock\n"),
        ("detach d1", json!({"target": "d1", "drained_lsn": 7, "disconnected": []}), ""),
        ("flush d1", json!({"target": "d1", "flushed_lsn": 7}), ""),
        ("drain d1", json!({"target": "d1", "drained_lsn": 7, "generation": 3}), ""),
        ("snapshot d1", json!({"target": "d1@s", "snapshot": snapshot()}), "d1@s\n"),
        (
            "fork d1@s d2",
            json!({"name": "d2", "id": "000000000000000000000000000000d2",
            "parent": "d1@s", "state_age_seconds": null}),
            "d2\n",
        ),
        ("delete d1 --yes", json!({"target": "d1"}), ""),
        ("resize d1 8K", json!({"name": "d1", "size_bytes": 8192, "size_bytes_before": 4096}), ""),
        (
            "check d1",
            json!({"name": "d1", "objects": 3, "blocks": 40, "problems": []}),
            "d1: sound; 3 objects, 40 blocks checked\n",
        ),
        (
            "recover d1 d2",
            json!({"name": "d2", "id": "000000000000000000000000000000d2",
            "base": "d1@lost-3", "records": 2, "recovered_bytes": 8192}),
            "d2\n",
        ),
        (
            "list",
            json!({"disks": [disk()]}),
            "NAME    SIZE  STATE     HOLDER  UNDRAINED  STORED  SNAPSHOTS\n\
             d1    10 GiB  attached  host-a    1.5 MiB   5 GiB          1\n",
        ),
        (
            "snapshots d1",
            json!({"name": "d1", "snapshots": [snapshot()]}),
            "SNAPSHOT  STATE    CREATED                SIZE  FORKS  MESSAGE\n\
             d1@s      pending  2025-11-30 19:55:26Z  4 KiB  d2 d3  before\\nlunch\n",
        ),
        (
            "usage",
            json!({"disks": [
            {"name": "d1", "size_bytes": 4096, "stored_bytes": 1024, "live_bytes": 512,
                "dead_bytes": 256, "pinned_bytes": 128, "map_bytes": 128, "shared_bytes": 0,
                "objects": 2},
            {"name": "d2", "size_bytes": 4096, "stored_bytes": 0, "live_bytes": 0, "dead_bytes": 0,
                "pinned_bytes": 0, "map_bytes": 0, "shared_bytes": 1024, "objects": 0}]}),
            "NAME    SIZE  STORED   LIVE   DEAD  PINNED    MAP  SHARED  OBJECTS\n\
             d1     4 KiB   1 KiB  512 B  256 B   128 B  128 B     0 B        2\n\
             d2     4 KiB     0 B    0 B    0 B     0 B    0 B   1 KiB        0\n\
             total  8 KiB   1 KiB  512 B  256 B   128 B  128 B   1 KiB        2\n",
        ),
    ] {
        let whole = reply.clone();
        let (answer, _) = run_against(arguments, move || Ok(reply.clone())).await;
        assert_eq!(answer.code, 0, "{arguments}: {}", answer.stderr);
        assert_eq!(answer.stdout, stdout, "{arguments}");
        let again = whole.clone();
        let (answer, _) =
            run_against(&format!("{arguments} --json"), move || Ok(again.clone())).await;
        assert_eq!((answer.code, answer.stderr.as_str()), (0, ""), "{arguments} --json");
        assert_eq!(serde_json::from_str::<Value>(&answer.stdout).unwrap(), whole, "{arguments}");
    }
}

#[tokio::test]
async fn show_and_status_say_all_they_were_told() {
    let (answer, _) = run_against("show d1", || Ok(disk())).await;
    for expected in [
        "size:         10 GiB\n",
        "state:        attached\n",
        "max lag:      5 s\n",
        "created:      2025-11-30 19:55:26Z (",
        "parent:       d0@s\n",
        "host-a (host 0000000000000000000000000000000a, since 2025-11-30",
        "silent for 4 s)\n",
        "undrained:    1.5 MiB, oldest 2 s\n",
        "blobs:        7, 2 since the checkpoint\n",
        "attached:     d1 (write) at nbd+unix:///d1?socket=/run/s\n",
        "device:       /dev/nbd0\n",
        "client:       unix since",
    ] {
        assert!(answer.stdout.contains(expected), "{expected:?} is not in\n{}", answer.stdout);
    }
    let (answer, _) = run_against("status", || Ok(status())).await;
    for expected in [
        "up:         1 h 2 m (process 4711)\n",
        "store:      s3://b/p (not reached yet)\n",
        "store id:   -\n",
        "requests:   get 3, put 4\n",
        "0 B of 8 GiB, direct, fdatasync; writes are acknowledged from the staging ring\n",
        "cache:      0 B of 10 GiB, 75 % hits\n",
        "memory:     1 KiB of 256 MiB, 2 KiB resident\n",
        "last error: connection refused\n",
        "warning:    the log is buffered\n",
        "NAME    SIZE  STATE",
    ] {
        assert!(answer.stdout.contains(expected), "{expected:?} is not in\n{}", answer.stdout);
    }
}

#[tokio::test]
async fn a_takeover_is_told_on_stderr_and_stdout_is_still_the_uri_alone() {
    let reply = || {
        let mut reply = attached();
        reply["took_over"] = json!({"holder": disk()["holder"], "drained_lsn": 400,
            "last_drained_unix_ms": 1_764_532_526_000_u64, "snapshot": "lost-3"});
        Ok(reply)
    };
    let (answer, _) = run_against("attach d1 --accept-loss", reply).await;
    assert_eq!(answer.stdout.lines().count(), 1);
    for expected in ["taken from host-a", "2025-11-30 19:55:26Z", "d1@lost-3"] {
        assert!(answer.stderr.contains(expected), "{}", answer.stderr);
    }
}

#[tokio::test]
async fn a_device_is_printed_in_place_of_the_uri() {
    let reply = || {
        let mut reply = attached();
        reply["device"] = json!("/dev/nbd3");
        Ok(reply)
    };
    let (answer, _) = run_against("attach d1 --device auto", reply).await;
    assert_eq!(answer.stdout, "/dev/nbd3\n");
}

#[tokio::test]
async fn a_check_that_finds_something_prints_it_and_fails() {
    let reply = || {
        Ok(json!({"name": "d1", "objects": 3, "blocks": 40,
            "problems": [{"object": "d/1/b/2", "message": "is missing"}]}))
    };
    let (answer, _) = run_against("check d1", reply).await;
    assert_eq!(answer.code, 1);
    assert_eq!(answer.stdout, "d/1/b/2: is missing\nd1: 1 problem; 3 objects, 40 blocks checked\n");
    assert_eq!(answer.stderr.lines().count(), 1);
    let (answer, _) = run_against("check d1 --json", reply).await;
    assert_eq!((answer.code, answer.stderr.as_str()), (1, ""));
    let body: Value = serde_json::from_str(&answer.stdout).expect("one document");
    assert_eq!(body["error"]["code"], "corrupt");
    assert_eq!(body["error"]["details"]["report"]["problems"][0]["object"], "d/1/b/2");
}

#[tokio::test]
async fn a_mount_that_cannot_use_its_device_gives_the_attachment_back() {
    let world = World::new(|_, command, _| async move {
        match command {
            "attach" => {
                let mut reply = attached();
                reply["device"] = json!("/none/such");
                Ok(reply)
            }
            "detach" => Err(Error::new(Kind::DiskBusy, "this was asked for")),
            _ => panic!("{command} was asked for"),
        }
    })
    .await;
    let arguments = format!("mount d1 / --control {}", world.socket().display());
    let answer = tokio::task::spawn_blocking(move || run(&arguments)).await.unwrap();
    assert_eq!((answer.code, answer.stdout.as_str()), (1, ""));
    assert!(
        answer.stderr.contains("d1 is still attached: this was asked for"),
        "{}",
        answer.stderr
    );
    assert!(answer.stderr.contains("/none/such"), "{}", answer.stderr);
    world.stop().await;
}

#[test]
fn config_check_lists_every_setting_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("b.toml");
    std::fs::write(&file, "cut-age = \"7s\"\n").unwrap();
    let arguments = format!("config check --cut-bytes 2M --config {}", file.display());
    let answer = run(&arguments);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    let line = |name: &str| {
        let line = answer.stdout.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name} is missing")).split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(line("cut-age"), ["cut-age", "7s", &format!("{}:1", file.display())]);
    assert_eq!(line("cut-bytes"), ["cut-bytes", "2M", "--cut-bytes"]);
    assert_eq!(line("lease-time"), ["lease-time", "30s", "default"]);
    for setting in settings::all() {
        line(setting.name);
    }
    let answer = run(&format!("{arguments} --json"));
    let listing: Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(listing["settings"].as_array().unwrap().len(), settings::all().count());
    std::fs::write(&file, "\n\ncut_age = 7\n").unwrap();
    let answer = run(&arguments);
    assert_eq!(answer.code, 2);
    let expected =
        format!("blockd: {}:3: there is no setting \"cut_age\"; perhaps cut-age", file.display());
    assert!(answer.stderr.starts_with(&expected), "{}", answer.stderr);
}

#[test]
fn dates_are_those_of_the_calendar() {
    for (seconds, date) in [
        (0, "1970-01-01 00:00:00Z"),
        (951_782_399, "2000-02-28 23:59:59Z"),
        (951_782_400, "2000-02-29 00:00:00Z"),
        (951_868_800, "2000-03-01 00:00:00Z"),
        (1_764_532_526, "2025-11-30 19:55:26Z"),
        (4_107_542_400, "2100-03-01 00:00:00Z"),
    ] {
        assert_eq!(super::show::date(seconds * 1000), date);
    }
}
