//! `kill -9` loses nothing that was acknowledged, flushed or not, whenever it comes.

use std::time::Duration;

use blockd_tests::model::{Image, Model};
use blockd_tests::process::{Daemon, Export};
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::workload::{self, Clock, Plan};
use blockd_tests::{report, tools, wait};

const BLOCKS: u64 = 8192;
const LIMIT: Duration = Duration::from_secs(60);

/// A disk under a numbered writer, over all its crashes.
struct Victim {
    daemon: Daemon,
    export: Export,
    plan: Plan,
    clock: Clock,
    model: Model,
    random: Random,
    acked: usize,
}

impl Victim {
    fn start(store: &Store) -> Self {
        let mut random = Random::for_test();
        // Small cuts, so that a crash meets the drain at work more often than not.
        let settings = store.settings().arg("--cut-bytes=1M").arg("--cut-age=200ms");
        let daemon = Daemon::start(settings);
        let export = daemon.create_attached("victim", "64M");
        let plan = Plan::new(export.address.clone(), &export.name, random.bits(), BLOCKS);
        let model = Model::new(BLOCKS);
        Self { daemon, export, plan, clock: Clock::default(), model, random, acked: 0 }
    }

    /// Writes until a random moment, and dies at it.
    fn write_and_die(&mut self) {
        let running = workload::start(&self.plan, &self.clock);
        running.await_acks(self.random.below(3000), LIMIT);
        wait::pause(Duration::from_millis(self.random.below(300)));
        self.daemon.kill9();
        let history = running.join();
        history.assert_no_errors();
        self.acked += history.acked();
        history.teach(&mut self.model);
    }

    /// Starts again, now and then dying while it recovers.
    fn rise(&mut self) {
        while self.random.one_in(3) {
            self.daemon.spawn();
            wait::pause(Duration::from_millis(self.random.below(150)));
            self.daemon.kill9();
        }
        self.daemon.launch();
    }

    fn verify(&mut self) {
        let mut guest = self.export.connect_when_served();
        let image = Image::read(&mut guest, self.plan.seed, BLOCKS).expect("read the disk back");
        self.model.assert_nothing_acknowledged_is_lost(&image);
        self.model.settle(&image);
        guest.disconnect();
    }
}

/// Fails if a block lacks a write that was acknowledged before a kill, or holds anything else.
fn crash_again_and_again(store: &Store, rounds: usize) {
    let mut victim = Victim::start(store);
    for _round in 0..rounds {
        victim.write_and_die();
        victim.rise();
        victim.verify();
    }
    report::say(&format!("{rounds} crashes, {} acknowledged writes, none lost", victim.acked));
    let _sound = victim.daemon.cli(&["check", "victim", "--deep"]).ok();
    victim.daemon.finish();
}

#[test]
fn a_kill_loses_no_acknowledged_write_on_a_directory_store() {
    let _turn = tools::heavy();
    crash_again_and_again(&Store::directory(), tools::rounds(6));
}

#[test]
fn a_kill_loses_no_acknowledged_write_on_s3() {
    let _turn = tools::heavy();
    let Some(store) = Store::s3() else { return };
    crash_again_and_again(&store, tools::rounds(6));
}

/// Fails if fio, whose blocks carry checksums of its own, finds one torn, misplaced or foreign.
#[test]
fn a_kill_leaves_every_block_whole_as_fio_verifies_it() {
    let _turn = tools::heavy();
    let Some(fio) = tools::need("fio") else { return };
    let mut random = Random::for_test();
    let store = Store::directory();
    let mut daemon = Daemon::start(store.settings().arg("--cut-bytes=1M").arg("--cut-age=200ms"));
    let export = daemon.create_attached("fio", "64M");
    let folder = daemon.place().display().to_string();
    let job = |name: &str, more: &[&str]| fio_job(&export, &folder, name, more);
    let fill = job("fill", &["--rw=write", "--do_verify=0"]);
    let verify = job("verify", &["--rw=read", "--verify_fatal=1"]);
    fio.must(&fill);
    let rounds = tools::rounds(6);
    for round in 0..rounds {
        let seed = format!("--randseed={}", random.bits() >> 1);
        let rewrite = job("rewrite", &["--rw=randwrite", "--do_verify=0", "--fsync=64", &seed]);
        let mut writer = fio.command();
        writer.args(&rewrite).args(["--time_based", "--runtime=600"]);
        writer.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let mut writer = writer.spawn().expect("start fio");
        wait::pause(Duration::from_millis(300 + random.below(700)));
        assert!(writer.try_wait().expect("fio can be waited for").is_none(), "round {round}");
        daemon.kill9();
        let _lost_its_server = writer.wait().expect("fio can be waited for");
        daemon.launch();
        export.connect_when_served().disconnect();
        fio.must(&verify);
    }
    report::say(&format!("{rounds} crashes under fio, every block whole"));
    daemon.finish();
}

/// The words of a fio job on `export`, which keeps its own files in `folder`.
fn fio_job(export: &Export, folder: &str, name: &str, more: &[&str]) -> Vec<String> {
    let mut words = vec![
        format!("--name={name}"),
        "--ioengine=nbd".to_owned(),
        format!("--uri={}", export.uri),
        "--size=64M".to_owned(),
        "--bs=4k".to_owned(),
        "--verify=crc32c".to_owned(),
        "--iodepth=16".to_owned(),
        format!("--aux-path={folder}"),
    ];
    words.extend(more.iter().map(|word| (*word).to_owned()));
    words
}
