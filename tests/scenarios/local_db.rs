//! The local database holds only what can be rebuilt: deleting it loses nothing.

use std::time::Duration;

use blockd_tests::model::{Image, Model};
use blockd_tests::process::Daemon;
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::tools;
use blockd_tests::workload::{self, Clock, Plan};

const BLOCKS: u64 = 4096;
const LIMIT: Duration = Duration::from_secs(60);

/// Fails if anything acknowledged is missing after `rm -rf` of the database under load, before or
/// after a restart.
#[test]
fn deleting_the_local_database_under_load_loses_nothing() {
    let _turn = tools::heavy();
    let store = Store::directory();
    let mut random = Random::for_test();
    let mut daemon = Daemon::start(store.settings().arg("--cut-bytes=1M").arg("--cut-age=200ms"));
    let export = daemon.create_attached("disk", "64M");
    let plan = Plan::new(export.address.clone(), &export.name, random.bits(), BLOCKS);
    let (clock, mut model) = (Clock::default(), Model::new(BLOCKS));
    let running = workload::start(&plan, &clock);
    running.await_acks(500, LIMIT);
    // A database that is gone under a running daemon is worth a word.
    daemon.log().expect("database");
    let database = daemon.state_dir().join("db");
    std::fs::remove_dir_all(&database).expect("the database is there to be removed");
    running.await_acks(1000, LIMIT);
    let history = running.stop();
    history.assert_no_errors();
    history.teach(&mut model);
    let mut guest = export.connect();
    let image = Image::read(&mut guest, plan.seed, BLOCKS).expect("read the running disk");
    model.assert_nothing_acknowledged_is_lost(&image);
    guest.disconnect();
    daemon.kill9();
    let _perhaps_made_again = std::fs::remove_dir_all(&database);
    daemon.launch();
    let mut guest = export.connect_when_served();
    let image = Image::read(&mut guest, plan.seed, BLOCKS).expect("read the restarted disk");
    model.assert_nothing_acknowledged_is_lost(&image);
    guest.disconnect();
    daemon.finish();
}
