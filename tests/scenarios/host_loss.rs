//! Losing the whole host is a power cut a few seconds ago: the store holds the disk at one moment
//! of its own write order, never a mix.

use std::time::Duration;

use blockd_tests::model::{Image, Model, Verdict};
use blockd_tests::process::Daemon;
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::workload::{self, Clock, History, Plan};
use blockd_tests::{report, tools, wait};

const BLOCKS: u64 = 8192;
const LIMIT: Duration = Duration::from_secs(60);
/// A lease that a test can wait out.
const LEASE: [&str; 2] = ["--lease-time=2s", "--heartbeat-interval=500ms"];

/// Writes for a while, destroys the host with all it had, takes the disk over on another one.
/// Returns the model of what was written and the image of what is left.
fn lose_host(store: &Store, random: &mut Random, create: &[&str]) -> (Model, Image, History) {
    let settings = store.settings().arg(LEASE[0]).arg(LEASE[1]).arg("--cut-bytes=2M");
    let mut first = Daemon::start(settings.clone().arg("--cut-age=500ms"));
    let mut words = vec!["create", "disk", "--size", "64M"];
    words.extend(create);
    let _created = first.cli(&words).ok();
    let export = first.attach("disk");
    let mut plan = Plan::new(export.address.clone(), &export.name, random.bits(), BLOCKS);
    plan.pace = Duration::from_micros(500);
    let running = workload::start(&plan, &Clock::default());
    running.await_acks(1000 + random.below(2000), LIMIT);
    wait::pause(Duration::from_millis(random.below(2000)));
    first.kill9();
    let history = running.join();
    history.assert_no_errors();
    drop(first);

    let second = Daemon::start(settings);
    let export = second.take_over("disk", LIMIT);
    let mut model = Model::new(BLOCKS);
    history.teach(&mut model);
    let mut guest = export.connect();
    let image = Image::read(&mut guest, plan.seed, BLOCKS).expect("read the disk back");
    guest.disconnect();
    let _sound = second.cli(&["check", "disk", "--deep"]).ok();
    second.finish();
    (model, image, history)
}

fn tell(verdict: Verdict, history: &History) {
    report::say(&format!(
        "lost {} of {} acknowledged block writes, {:?} of them",
        verdict.lost_writes,
        history.acked(),
        verdict.lost_span
    ));
}

/// Fails if some block is older than another one allows.
fn lose_hosts(store: impl Fn() -> Option<Store>, rounds: usize) {
    let mut random = Random::for_test();
    for _round in 0..rounds {
        let Some(store) = store() else { return };
        let (model, image, history) = lose_host(&store, &mut random, &[]);
        tell(model.assert_one_moment(&image), &history);
    }
}

#[test]
fn a_lost_host_leaves_one_moment_of_the_write_order_in_a_directory() {
    let _turn = tools::heavy();
    lose_hosts(|| Some(Store::directory()), tools::rounds(2));
}

#[test]
fn a_lost_host_leaves_one_moment_of_the_write_order_on_s3() {
    let _turn = tools::heavy();
    lose_hosts(Store::s3, tools::rounds(2));
}

/// Fails if the store lags behind by more than the bound allowed when the host dies.
#[test]
fn a_bound_on_the_lag_bounds_what_a_lost_host_takes_with_it() {
    let _turn = tools::heavy();
    let mut random = Random::for_test();
    let (model, image, history) = lose_host(&Store::directory(), &mut random, &["--max-lag", "1s"]);
    let verdict = model.assert_one_moment(&image);
    tell(verdict, &history);
    // The acknowledgement of the guest comes after that of the daemon, by a scheduling delay.
    assert!(verdict.lost_span < Duration::from_secs(2), "lost {:?}", verdict.lost_span);
}

/// Fails if a write is missing that a flush or FUA of a remote-durable disk covered.
#[test]
fn a_remote_durable_disk_loses_nothing_flushed_with_its_host() {
    let _turn = tools::heavy();
    let mut random = Random::for_test();
    let (model, image, history) =
        lose_host(&Store::directory(), &mut random, &["--durability", "remote"]);
    tell(model.assert_one_moment(&image), &history);
    model.assert_nothing_flushed_is_lost(&image);
}
