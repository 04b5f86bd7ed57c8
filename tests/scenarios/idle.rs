//! An attached disk that nobody writes costs nothing but the heartbeat of its host.

use std::time::Duration;

use blockd_tests::process::{Daemon, Settings};
use blockd_tests::s3::{self, SeaweedFs};
use blockd_tests::s3_proxy::Proxy;
use blockd_tests::{report, wait};

const LIMIT: Duration = Duration::from_secs(60);

/// Fails if a clean disk makes a request while its host sends four heartbeats.
#[test]
fn an_idle_attached_disk_makes_no_request() {
    let Some(server) = SeaweedFs::start() else { return };
    let proxy = Proxy::start(server.endpoint());
    let settings = Settings::new(proxy.url("blockd"))
        .envs(&s3::CREDENTIALS)
        .arg("--lease-time=4s")
        .arg("--heartbeat-interval=1s");
    let daemon = Daemon::start(settings);
    let mut guest = daemon.create_attached("idle", "1G").connect();
    guest.write(0, &[7; 65536]).unwrap();
    guest.flush().unwrap();
    daemon.drain("idle");
    let drained = proxy.log();
    let is_heartbeat = |key: &str| key.contains("/hosts/");
    let heartbeats = || proxy.log().iter().filter(|entry| is_heartbeat(&entry.key)).count();
    // What the drain still had under way (its checkpoint, deletes) ends with the next heartbeat.
    let settled = heartbeats() + 1;
    wait::until_true("the drain has settled", LIMIT, || heartbeats() >= settled);
    proxy.clear_log();
    wait::until_true("four heartbeats", LIMIT, || heartbeats() >= 4);
    let others: Vec<_> =
        proxy.log().into_iter().filter(|entry| !is_heartbeat(&entry.key)).collect();
    assert!(others.is_empty(), "an idle disk made requests: {others:#?}");
    report::say(&format!("{} requests until drained, then none", drained.len()));
    guest.disconnect();
    daemon.finish();
}
