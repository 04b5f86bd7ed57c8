//! The log on disk: what a crash may leave is recovered, what only damage can explain is refused,
//! and neither ever becomes wrong bytes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_tests::model::{self, BLOCK, BLOCK_BYTES, Content};
use blockd_tests::nbd_client::Client;
use blockd_tests::process::{Daemon, Export, short_temp_dir};
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::{report, tools, wait};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);
/// Blocks of the victim that are flushed: enough for three segments of 16 MiB.
const FLUSHED: u64 = 10_000;
/// The block whose last version is acknowledged and not flushed.
const TAIL: u64 = FLUSHED + 100;

/// A host with a killed daemon, of which every case starts from the same copy.
struct Scene {
    store: Store,
    daemon: Daemon,
    victim: Export,
    witness: Export,
    seed: u64,
    copy: TempDir,
}

impl Scene {
    /// Two disks with everything in the log and nothing in the store, then `kill -9`.
    fn set() -> Self {
        let store = Store::directory();
        let seed = Random::for_test().bits();
        let mut daemon = Daemon::prepare(store.settings());
        // Off tmpfs there is no staging ring: writes are acknowledged from the log, so that the log
        // alone is what a case damages.
        let ring = daemon.place().join("staging").display().to_string();
        daemon.reconfigure(|settings| {
            let settings = settings.arg(format!("--staging-path={ring}"));
            settings.arg("--cut-age=600s").arg("--cut-bytes=1G")
        });
        daemon.log().expect("staging");
        daemon.launch();
        let witness = daemon.create_attached("witness", "64M");
        let mut guest = witness.connect();
        write_blocks(&mut guest, seed + 1, 0..64, 1);
        guest.flush().expect("flush the witness");
        let victim = daemon.create_attached("victim", "64M");
        let mut guest = victim.connect();
        write_blocks(&mut guest, seed, 0..FLUSHED, 1);
        guest.flush().expect("flush the victim");
        // The next frame says that the flush happened.
        write_blocks(&mut guest, seed, TAIL..TAIL + 1, 1);
        guest.flush().expect("flush the victim again");
        write_blocks(&mut guest, seed, TAIL..TAIL + 1, 2);
        daemon.kill9();
        let copy = short_temp_dir();
        tools::copy_folder(&daemon.state_dir(), &copy.path().join("state"));
        tools::copy_folder(store.folder(), &copy.path().join("store"));
        Self { store, daemon, victim, witness, seed, copy }
    }

    /// Puts everything back as the kill left it, and damages it.
    fn again(&mut self, damage: impl FnOnce(&Log)) {
        for (from, to) in
            [("state", self.daemon.state_dir()), ("store", self.store.folder().into())]
        {
            std::fs::remove_dir_all(&to).expect("remove what the last case left");
            tools::copy_folder(&self.copy.path().join(from), &to);
        }
        damage(&Log { folder: self.daemon.state_dir().join("log"), seed: self.seed });
    }

    fn assert_witness_served(&self) {
        let mut guest = self.witness.connect_when_served();
        assert_blocks(&mut guest, self.seed + 1, 0..64, 1);
    }

    /// Asserts that the victim is served with all that was flushed; the version of the tail.
    #[track_caller]
    fn assert_exact(&self, case: &str) -> u64 {
        let mut guest = self.victim.connect_when_served();
        assert_blocks(&mut guest, self.seed, 0..FLUSHED, 1);
        let bytes = guest.read(TAIL * BLOCK_BYTES, 4096).expect("read the tail");
        match model::decode(self.seed, TAIL, &bytes) {
            Content::Version(version) if version == 1 || version == 2 => version,
            other => panic!("{case}: the tail holds {other:?}"),
        }
    }

    /// Whether a disk is served; false once it is shown as refused, with a reason.
    fn is_served(&self, disk: &Export) -> bool {
        wait::until(&format!("{} is served or refused", disk.name), LIMIT, || {
            if Client::connect(&disk.address, &disk.name).is_ok() {
                return Some(true);
            }
            self.daemon.show(&disk.name)["state_reason"].is_string().then_some(false)
        })
    }

    /// Whether the victim is refused, and why.
    fn refusal(&self) -> Option<String> {
        let shown = self.daemon.show("victim");
        (shown["state"] == "stopped").then(|| shown["state_reason"].to_string())
    }

    /// Fails unless the damage keeps this disk from service, by name, and only this one.
    fn damage_is_refused(&mut self, case: &str, damage: impl FnOnce(&Log)) {
        self.again(damage);
        self.daemon.log().expect("victim");
        self.daemon.log().expect("damage");
        self.daemon.launch();
        self.assert_witness_served();
        let reason =
            wait::until(&format!("{case}: the damage is noticed"), LIMIT, || self.refusal());
        assert!(Client::connect(&self.victim.address, &self.victim.name).is_err(), "{case}");
        assert_eq!(self.daemon.show("victim")["drained_lsn"], 0, "{case}: something was drained");
        report::say(&format!("{case}: {reason}"));
        self.daemon.kill9();
    }

    /// Fails unless the disk is exact now and after another kill.
    fn remnant_is_recovered(&mut self, case: &str, damage: impl FnOnce(&Log)) {
        self.again(damage);
        self.daemon.launch();
        self.assert_witness_served();
        let tail = self.assert_exact(case);
        self.daemon.kill9();
        self.daemon.launch();
        assert_eq!(self.assert_exact(case), tail, "{case}: the second start differs");
        report::say(&format!("{case}: tail version {tail}"));
        self.daemon.kill9();
    }

    /// Fails if one of the disks is neither exact nor refused.
    fn is_exact_or_refused(&mut self, case: &str, damage: impl FnOnce(&Log)) {
        self.again(damage);
        self.daemon.log().expect("not served");
        self.daemon.launch();
        if self.is_served(&self.witness) {
            self.assert_witness_served();
        }
        let outcome = if self.is_served(&self.victim) {
            self.assert_exact(case);
            "exact".to_owned()
        } else {
            self.refusal().unwrap_or_default()
        };
        report::say(&format!("{case}: {outcome}"));
        self.daemon.kill9();
    }
}

/// The log's folder, and how to find something in it.
struct Log {
    folder: PathBuf,
    seed: u64,
}

impl Log {
    fn segments(&self) -> Vec<PathBuf> {
        let mut found: Vec<_> = std::fs::read_dir(&self.folder)
            .expect("the log has a folder")
            .map(|entry| entry.expect("a folder can be read").path())
            .filter(|path| path.metadata().is_ok_and(|meta| meta.len() >= 1 << 20))
            .collect();
        found.sort();
        found
    }

    /// The file and offset of a version of a block.
    fn find(&self, block: u64, version: u64) -> (PathBuf, u64) {
        let needle = model::encode(self.seed, block, version);
        self.segments()
            .into_iter()
            .find_map(|path| {
                let bytes = std::fs::read(&path).expect("a segment can be read");
                let at = bytes.chunks(BLOCK).position(|chunk| chunk == needle)?;
                Some((path, at as u64 * BLOCK_BYTES))
            })
            .unwrap_or_else(|| panic!("version {version} of block {block} is not in the log"))
    }

    /// Overwrites part of the file that holds a version of a block, at a distance from it.
    fn overwrite(&self, block: u64, version: u64, distance: i64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let (path, offset) = self.find(block, version);
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("open a segment");
        let at = offset.checked_add_signed(distance).expect("inside the file");
        file.write_all_at(bytes, at).expect("damage a segment");
    }
}

fn write_blocks(guest: &mut Client, seed: u64, blocks: std::ops::Range<u64>, version: u64) {
    for start in blocks.clone().step_by(64) {
        let end = blocks.end.min(start + 64);
        let data: Vec<u8> =
            (start..end).flat_map(|block| model::encode(seed, block, version)).collect();
        guest.write(start * BLOCK_BYTES, &data).expect("write blocks");
    }
}

#[track_caller]
fn assert_blocks(guest: &mut Client, seed: u64, blocks: std::ops::Range<u64>, version: u64) {
    for start in blocks.clone().step_by(256) {
        let count = blocks.end.min(start + 256) - start;
        let length = u32::try_from(count * BLOCK_BYTES).expect("1 MiB fits");
        let bytes = guest.read(start * BLOCK_BYTES, length).expect("read blocks");
        for (block, bytes) in (start..).zip(bytes.chunks(BLOCK)) {
            let found = model::decode(seed, block, bytes);
            assert_eq!(found, Content::Version(version), "block {block}");
        }
    }
}

/// Fails if a torn or rotten end of the log, where nothing was flushed, costs more than what was not
/// flushed, or keeps the disk from service. (W04, W05)
#[test]
fn an_end_of_the_log_that_was_never_flushed_may_be_anything() {
    let _turn = tools::heavy();
    let mut scene = Scene::set();
    scene.remnant_is_recovered("nothing", |_| {});
    for (case, bytes) in [
        ("a flipped block", vec![0x5a; 4096]),
        ("a zeroed block", vec![0; 4096]),
        ("half a block", vec![0xff; 2048]),
        ("a sector", vec![0; 512]),
    ] {
        scene.remnant_is_recovered(case, |log| log.overwrite(TAIL, 2, 0, &bytes));
    }
    scene.remnant_is_recovered("a lost header", |log| log.overwrite(TAIL, 2, -4096, &[0; 4096]));
    for (case, byte) in [("zeros behind the end", 0), ("ones behind the end", 0xff)] {
        scene.remnant_is_recovered(case, |log| {
            log.overwrite(TAIL, 2, 4096, &vec![byte; 65536]);
        });
    }
    scene.remnant_is_recovered("old frames behind the end", |log| {
        let (path, offset) = log.find(100, 1);
        let bytes = std::fs::read(path).expect("read a segment");
        let from = usize::try_from(offset).expect("inside the file") / 65536 * 65536;
        log.overwrite(TAIL, 2, 4096, &bytes[from..from + 65536]);
    });
    scene.daemon.finish();
}

/// Fails if damage below what was flushed is taken for the end of the log, or takes other disks
/// with it. (W05, W07)
#[test]
fn damage_below_the_last_flush_keeps_that_disk_from_service_and_no_other() {
    let _turn = tools::heavy();
    let mut scene = Scene::set();
    scene.damage_is_refused("a flipped bit", |log| log.overwrite(5000, 1, 16, &[0xee]));
    scene.damage_is_refused("a zeroed block", |log| log.overwrite(5000, 1, 0, &[0; 4096]));
    scene.damage_is_refused("a lost frame header", |log| {
        // One of these blocks is the header of the frame that holds the block.
        log.overwrite(64, 1, -64 * 4096, &vec![0; 64 * 4096]);
    });
    scene.damage_is_refused("a missing segment", |log| {
        std::fs::remove_file(log.find(5000, 1).0).expect("remove a segment");
    });
    scene.damage_is_refused("a segment cut short", |log| {
        let (path, offset) = log.find(5000, 1);
        let file = std::fs::OpenOptions::new().write(true).open(path).expect("open a segment");
        file.set_len(offset).expect("cut a segment");
    });
    scene.daemon.finish();
}

/// Fails if segments under wrong names, twice or of a stranger are replayed as what they are not.
/// (W05, W07)
#[test]
fn misplaced_segments_are_never_replayed_as_what_they_are_not() {
    let _turn = tools::heavy();
    let mut scene = Scene::set();
    scene.is_exact_or_refused("swapped names", |log| {
        swap(&log.find(10, 1).0, &log.find(5000, 1).0);
    });
    scene.is_exact_or_refused("names swapped between disks", |log| {
        let witness = Log { folder: log.folder.clone(), seed: log.seed + 1 };
        swap(&log.find(10, 1).0, &witness.find(10, 1).0);
    });
    scene.is_exact_or_refused("one segment over another", |log| {
        std::fs::copy(log.find(10, 1).0, log.find(5000, 1).0).expect("copy a segment");
    });
    scene.is_exact_or_refused("a segment twice", |log| {
        let path = log.find(10, 1).0;
        std::fs::copy(&path, path.with_file_name("ffffffff-copy")).expect("copy a segment");
    });
    scene.is_exact_or_refused("another disk's segment", |log| {
        let (own, other) = (log.find(10, 1).0, log.segments());
        let stranger = other.iter().find(|path| **path != own).expect("several segments");
        std::fs::copy(stranger, &own).expect("copy a segment");
    });
    scene.daemon.finish();
}

fn swap(first: &Path, second: &Path) {
    let aside = first.with_extension("aside");
    std::fs::rename(first, &aside).expect("rename");
    std::fs::rename(second, first).expect("rename");
    std::fs::rename(&aside, second).expect("rename");
}

/// Fails if a small file of the state directory that is empty, cut or rotten makes the daemon panic,
/// serve wrong bytes, or stop without naming it. (W18)
#[test]
fn rotten_small_files_are_rebuilt_or_named() {
    let _turn = tools::heavy();
    let mut scene = Scene::set();
    let files = small_files(&scene.daemon.state_dir());
    assert!(!files.is_empty(), "the state directory has small files");
    for file in &files {
        for how in ["empty", "half", "rotten"] {
            let path = scene.daemon.state_dir().join(file);
            scene.again(|_| {
                let mut bytes = std::fs::read(&path).expect("read a small file");
                match how {
                    "empty" => bytes.clear(),
                    "half" => bytes.truncate(bytes.len() / 2),
                    _ => bytes.iter_mut().for_each(|byte| *byte ^= 0x55),
                }
                std::fs::write(&path, bytes).expect("damage a small file");
            });
            let fate = start_somehow(&mut scene, file);
            report::say(&format!("{}, {how}: {fate}", file.display()));
        }
    }
    // What was provoked here is judged above, file by file.
    scene.daemon.log().expect("");
}

/// Starts the daemon on a damaged file: it serves what was flushed, refuses the disk, or ends naming
/// the file.
fn start_somehow(scene: &mut Scene, file: &Path) -> &'static str {
    let before = scene.daemon.log().lines().len();
    scene.daemon.spawn();
    let ended = wait::until("the daemon answers or ends", LIMIT, || {
        let ended = scene.daemon.exited().map(|status| !status.success());
        ended.or_else(|| (scene.daemon.cli(&["status"]).code == 0).then_some(false))
    });
    let said = scene.daemon.log().lines().split_off(before).join("\n");
    assert!(!said.contains("panicked"), "{}: {said}", file.display());
    let fate = if ended {
        let name = file.file_name().expect("a file has a name").to_string_lossy();
        assert!(said.contains(name.as_ref()), "{} is not named: {said}", file.display());
        "refused at start"
    } else if scene.is_served(&scene.victim) {
        scene.assert_exact("a rotten file");
        "exact"
    } else {
        "the disk is not served"
    };
    scene.daemon.kill9();
    fate
}

/// Files of the state directory that are neither log, cache nor database, relative to it.
fn small_files(state: &Path) -> Vec<PathBuf> {
    let mut folders = vec![state.to_owned()];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("read a folder") {
            let path = entry.expect("read a folder").path();
            let name = path.strip_prefix(state).expect("below the state directory");
            if path.is_dir() && !["log", "cache", "db"].iter().any(|part| name.starts_with(part)) {
                folders.push(path);
            } else if path.metadata().is_ok_and(|meta| meta.is_file() && meta.len() > 0) {
                found.push(name.to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Fails if restarts make the log grow, or lose anything. (W16)
#[test]
fn restarts_with_a_backlog_do_not_make_the_log_grow() {
    let _turn = tools::heavy();
    let mut scene = Scene::set();
    let folder = scene.daemon.state_dir().join("log");
    let size = || {
        let entries = std::fs::read_dir(&folder).expect("read the log's folder");
        entries.map(|entry| entry.expect("a file").metadata().expect("a file").len()).sum::<u64>()
    };
    let before = size();
    for _restart in 0..5 {
        scene.daemon.launch();
        scene.assert_witness_served();
        scene.assert_exact("after a restart");
        scene.daemon.kill9();
    }
    let after = size();
    report::say(&format!("log of {before} bytes, {after} after five restarts"));
    // Each start opens a segment of its own and zeroes some ahead; it must not add up.
    assert!(after <= before + (128 << 20), "{before} bytes grew to {after}");
    scene.daemon.launch();
    scene.assert_exact("before the drain");
    scene.daemon.drain("victim");
    scene.assert_exact("once drained");
    scene.daemon.finish();
}

/// Fails if a log without room is an error to its guest, blocks reads, or does not go on by itself;
/// if a kill at that moment loses anything. (W10, W14)
#[test]
fn a_full_log_stalls_writes_and_goes_on_by_itself() {
    use blockd_tests::s3::{self, SeaweedFs};
    use blockd_tests::s3_proxy::{Proxy, Weather};
    let _turn = tools::heavy();
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let settings = blockd_tests::process::Settings::new(proxy.url("blockd"))
        .envs(&s3::CREDENTIALS)
        .arg("--log-bytes-max=128M")
        .arg("--log-segments-ready=1");
    let mut daemon = Daemon::start(settings);
    daemon.log().expect("store");
    daemon.log().expect("full");
    let export = daemon.create_attached("disk", "512M");
    let mut guest = export.connect();
    proxy.set_weather(Weather::Refusing);
    guest.set_patience(Duration::from_secs(3));
    let seed = 11;
    let mut acked = 0;
    while acked < 512 {
        let data: Vec<u8> = (acked * 256..(acked + 1) * 256)
            .flat_map(|block| model::encode(seed, block, 1))
            .collect();
        match guest.write(acked << 20, &data) {
            Ok(()) => acked += 1,
            Err(blockd_tests::nbd_client::Failure::Lost(_)) => break,
            Err(refused) => panic!("a full log is an error to its guest: {refused}"),
        }
    }
    assert!((16..512).contains(&acked), "{acked} MiB went into a log of 128 MiB");
    let mut reader = export.connect();
    assert_blocks(&mut reader, seed, 0..256, 1);
    reader.disconnect();
    daemon.kill9();
    daemon.launch();
    let mut guest = export.connect_when_served();
    assert_blocks(&mut guest, seed, 0..acked * 256, 1);
    proxy.heal();
    // The write that waits now is the one that must go on by itself.
    write_blocks(&mut guest, seed, acked * 256..(acked + 200) * 256, 1);
    daemon.drain("disk");
    assert_blocks(&mut guest, seed, 0..(acked + 200) * 256, 1);
    report::say(&format!("{acked} MiB acknowledged into a log of 128 MiB, then 200 more"));
    daemon.finish();
}
