//! A store that is down is never an I/O error: guests write on, and the drain catches up by itself.

use std::time::Duration;

use blockd_tests::model::{Image, Model};
use blockd_tests::process::Daemon;
use blockd_tests::random::Random;
use blockd_tests::s3::{self, SeaweedFs};
use blockd_tests::s3_proxy::{Fault, Key, Proxy, Rule, Weather};
use blockd_tests::workload::{self, Clock, Plan};
use blockd_tests::{report, tools, wait};

const BLOCKS: u64 = 8192;
const LIMIT: Duration = Duration::from_secs(120);

/// How long each outage lasts.
fn outage_length() -> Duration {
    let seconds = std::env::var("BLOCKD_OUTAGE_SECONDS");
    Duration::from_secs(seconds.map_or(4, |text| text.parse().expect("a number of seconds")))
}

fn settings(proxy: &Proxy) -> blockd_tests::process::Settings {
    blockd_tests::process::Settings::new(proxy.url("blockd"))
        .envs(&s3::CREDENTIALS)
        .arg("--cut-bytes=1M")
        .arg("--cut-age=300ms")
}

/// Fails if a request is refused, if writes stop during the outage, or if the drain does not come
/// back by itself afterwards.
fn survive(name: &str, break_it: impl Fn(&Proxy)) {
    let _turn = tools::heavy();
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let mut random = Random::for_test();
    let daemon = Daemon::start(settings(&proxy));
    // The outage is worth a warning, and its end too.
    daemon.log().expect("store");
    let export = daemon.create_attached("disk", "64M");
    let mut plan = Plan::new(export.address.clone(), &export.name, random.bits(), BLOCKS);
    plan.pace = Duration::from_millis(1);
    plan.patience = LIMIT;
    let running = workload::start(&plan, &Clock::default());
    running.await_acks(500, LIMIT);
    break_it(&proxy);
    let before = running.acked();
    wait::pause(outage_length());
    let during = running.acked() - before;
    proxy.heal();
    running.await_acks(200, LIMIT);
    let history = running.stop();
    history.assert_no_errors();
    assert!(during > 0, "no write was acknowledged while the store was away");
    let mut model = Model::new(BLOCKS);
    history.teach(&mut model);
    let _drained = daemon.cli(&["drain", "disk", "--timeout", "60"]).ok();
    daemon.detach("disk");
    daemon.finish();

    let second = Daemon::start(settings(&proxy));
    let mut guest = second.attach("disk").connect();
    let image = Image::read(&mut guest, plan.seed, BLOCKS).expect("read on the second host");
    model.assert_nothing_acknowledged_is_lost(&image);
    report::say(&format!(
        "{name}: {during} writes during {:?}, longest wait {:?}",
        outage_length(),
        history.longest_gap
    ));
    guest.disconnect();
    second.finish();
}

#[test]
fn guests_write_on_while_the_store_refuses_connections() {
    survive("refused", |proxy| proxy.set_weather(Weather::Refusing));
}

#[test]
fn guests_write_on_while_the_store_swallows_requests() {
    survive("black hole", |proxy| proxy.set_weather(Weather::BlackHole));
}

#[test]
fn guests_write_on_while_the_store_answers_errors() {
    survive("503", |proxy| {
        proxy.rule(Rule::new("ANY", Key::Any, Fault::Answer(503, "SlowDown")));
    });
}

/// Fails if half-failing requests are ever more than slow.
#[test]
fn a_store_that_fails_every_other_request_only_slows_the_drain() {
    survive("every other", |proxy| {
        proxy.rule(Rule::new("ANY", Key::Any, Fault::Answer(500, "InternalError")).one_in(2));
    });
}
