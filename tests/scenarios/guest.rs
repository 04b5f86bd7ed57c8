//! A guest kernel uses a disk as ext4: its own block layer, its flushes and its discards, over
//! `nbd.ko`, through `kill -9` of the daemon and on to a second host.
//!
//! All of it happens inside User Mode Linux, so that no kernel of the machine takes part. The state
//! directories and the store are on a disk of the guest, since its shared folders have no O_DIRECT.

use std::path::Path;
use std::process::Command;

use blockd_tests::process::{binary, short_temp_dir};
use blockd_tests::{report, tools};

const DISK_BYTES: u64 = 1 << 30;
/// What ends a guest that hangs; on two busy cores it took 40 s.
const LIMIT_SECONDS: &str = "300";

/// What the script says as it goes, in this order.
const STEPS: [&str; 9] = [
    "served from an empty host",
    "connected with a write cache and fua",
    "made and mounted ext4",
    "wrote and synced a tree",
    "trimmed and found clean",
    "identical after kill -9",
    "detached and stopped",
    "identical on a second host",
    "stopped without a warning",
];

/// Runs in the guest, in a folder that holds the daemon; `CONNECT` is an option of nbd-client.
/// Nothing is drained before the kill: what is there afterwards came from the log.
const SCRIPT: &str = r#"
set -eu
began=$(cut -d ' ' -f 1 /proc/uptime)
step() {
    now=$(cut -d ' ' -f 1 /proc/uptime)
    echo "step $began $now $1"
    began=$now
}
fail() { echo "failed: $1"; tail -n 40 /tmp/*.log; exit 1; }
# Runs a command until it succeeds, for a hundred times at most.
await() {
    attempts=0
    until "$@" >/dev/null 2>&1; do
        attempts=$((attempts + 1))
        [ $attempts -lt 100 ] || fail "never: $*"
        sleep 0.1
    done
}

# Starts the daemon of host $1 and waits until it answers.
serve() {
    host=$1
    mkdir -p "/mnt/local/$host" "/run/$host"
    export BLOCKD_CONTROL="/run/$host/control.sock"
    ./blockd serve --store=file:///mnt/local/store --state-dir="/mnt/local/$host" \
        --runtime-dir="/run/$host" --staging-bytes=16M --log-bytes-max=256M \
        --cut-age=600s --cut-bytes=64M 2>>"/tmp/$host.log" &
    daemon=$!
    await ./blockd status
}
connect() {
    await nbd-client -unix "$socket" -N d1 /dev/nbd0 -b 4096 $CONNECT
    await grep -qx 131072 /sys/block/nbd0/size
}
is_free() { [ ! -e /sys/block/nbd0/pid ]; }
disconnect() {
    nbd-client -d /dev/nbd0 >/dev/null 2>&1 || true
    await is_free
}
check_sums() { (cd /mnt/d1/tree && sha256sum --strict --quiet -c /tmp/sums) || fail "sums differ"; }

mkdir -p /mnt/local /mnt/d1
mkfs.ext4 -q /dev/ubda
mount /dev/ubda /mnt/local
serve one
./blockd create d1 --size 64M >/dev/null
uri=$(./blockd attach d1)
socket=${uri#*socket=}
step "served from an empty host"

connect
[ "$(cat /sys/block/nbd0/queue/write_cache)" = "write back" ] || fail "no write cache"
[ "$(cat /sys/block/nbd0/queue/fua)" = 1 ] || fail "no fua"
# By ioctl a process of nbd-client stays, which lends its thread; by netlink none does.
[ -n "$CONNECT" ] || ! pgrep -x nbd-client >/dev/null || fail "netlink was not used"
[ -z "$CONNECT" ] || pgrep -x nbd-client >/dev/null || fail "ioctl was not used"
step "connected with a write cache and fua"

mkfs.ext4 -q /dev/nbd0
mount /dev/nbd0 /mnt/d1
step "made and mounted ext4"

for folder in 1 2 3 4 5 6 7 8; do
    mkdir -p "/tmp/tree/$folder/sub"
    for file in 1 2 3 4 5 6 7 8; do
        head -c $((folder * file * 2500)) /dev/urandom >"/tmp/tree/$folder/sub/$file"
    done
done
(cd /tmp/tree && find . -type f -exec sha256sum {} +) >/tmp/sums
cp -r /tmp/tree /mnt/d1/tree
find /mnt/d1/tree -type f -exec sync {} +
step "wrote and synced a tree"

head -c 8000000 /dev/urandom >/mnt/d1/junk
sync /mnt/d1/junk
rm /mnt/d1/junk
fstrim /mnt/d1
umount /mnt/d1
e2fsck -fn /dev/nbd0 >/tmp/e2fsck 2>&1 || fail "$(cat /tmp/e2fsck)"
step "trimmed and found clean"

[ "$(./blockd show d1 --json | jq .drained_lsn)" = 0 ] || fail "drained before the kill"
kill -9 $daemon
wait $daemon || true
disconnect
serve one
connect
mount /dev/nbd0 /mnt/d1
check_sums
umount /mnt/d1
step "identical after kill -9"

disconnect
await ./blockd detach d1
kill $daemon
wait $daemon
step "detached and stopped"

serve two
uri=$(./blockd attach d1)
socket=${uri#*socket=}
connect
e2fsck -fn /dev/nbd0 >/tmp/e2fsck 2>&1 || fail "$(cat /tmp/e2fsck)"
mount -o ro /dev/nbd0 /mnt/d1
check_sums
umount /mnt/d1
disconnect
step "identical on a second host"
kill $daemon
wait $daemon
! grep -E ' (WARN|ERROR) ' /tmp/*.log || fail "the daemon warned"
step "stopped without a warning"
"#;

/// Fails if a step fails: a feature that the kernel does not see, a file system that is not clean,
/// or one file that is not what was written.
fn guest_uses_ext4(connect: &str) {
    let needed = ["nbd-client", "mkfs.ext4", "e2fsck", "fstrim", "jq"];
    if !needed.iter().all(|name| tools::need(name).is_some()) {
        return;
    }
    if !rustix::process::getuid().is_root() {
        return tools::skip("User Mode Linux needs root here");
    }
    let _turn = tools::heavy();
    let folder = short_temp_dir();
    let (script, disk) = (folder.path().join("script"), folder.path().join("disk"));
    std::fs::copy(binary(), folder.path().join("blockd")).expect("copy the daemon");
    std::fs::write(&script, format!("CONNECT={connect}\n{SCRIPT}")).expect("write the script");
    let made = std::fs::File::create(&disk).expect("make the guest's disk");
    made.set_len(DISK_BYTES).expect("give the guest's disk its size");

    let uml_run = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/uml-run");
    let output = Command::new(uml_run)
        .args(["--module", "nbd", "--timeout", LIMIT_SECONDS, "--disk"])
        .args([disk.as_path(), folder.path(), &script])
        .output()
        .expect("run uml-run");
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("no User Mode Linux") {
        return tools::skip(complaint.trim_end());
    }
    assert_eq!(output.status.code(), Some(0), "{said}{complaint}");
    let steps: Vec<_> = said.lines().filter_map(parse_step).collect();
    let names: Vec<_> = steps.iter().map(|(_, name)| *name).collect();
    assert_eq!(names, STEPS, "{said}");
    for (seconds, name) in steps {
        report::say(&format!("{seconds:6.2} s  {name}"));
    }
}

/// The seconds and the name of a line `step BEGAN ENDED NAME`.
fn parse_step(line: &str) -> Option<(f64, &str)> {
    let mut words = line.strip_prefix("step ")?.splitn(3, ' ');
    let began: f64 = words.next()?.parse().ok()?;
    let ended: f64 = words.next()?.parse().ok()?;
    Some((ended - began, words.next()?))
}

#[test]
fn a_guest_kernel_uses_a_disk_as_ext4_through_netlink() {
    guest_uses_ext4("");
}

#[test]
fn a_guest_kernel_uses_a_disk_as_ext4_through_ioctl() {
    guest_uses_ext4("-nonetlink");
}
