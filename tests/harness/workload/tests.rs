//! The guest and the judge together, against a server that is known to be right, and against one
//! that is known to be wrong.

use std::path::Path;
use std::process::{Child, Stdio};

use tempfile::TempDir;

use super::*;
use crate::model::Image;
use crate::nbd_handshake::Handshake;
use crate::{process, tools};

const BLOCKS: u64 = 1024;
const LIMIT: Duration = Duration::from_secs(30);

/// An nbdkit of the test's own.
struct Nbdkit {
    child: Child,
    address: Address,
    _place: TempDir,
}

impl Nbdkit {
    fn start(arguments: impl Fn(&Path) -> Vec<String>) -> Option<Self> {
        let nbdkit = tools::need("nbdkit")?;
        let place = process::short_temp_dir();
        let socket = place.path().join("s");
        let mut command = nbdkit.command();
        command.args(["-f", "-U"]).arg(&socket).args(arguments(place.path()));
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        wait::until_true("nbdkit listens", LIMIT, || socket.exists());
        Some(Self { child, address: Address::Unix(socket), _place: place })
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn memory(_place: &Path) -> Vec<String> {
    ["memory", "4M"].map(str::to_owned).to_vec()
}

#[test]
fn the_client_speaks_with_a_server_of_others() {
    let Some(server) = Nbdkit::start(memory) else { return };
    let mut client = Client::connect(&server.address, "").unwrap();
    assert_eq!(client.info.size, 4 << 20);
    client.write_fua(4096, &[1; 8192]).unwrap();
    client.trim(4096, 4096).unwrap();
    client.flush().unwrap();
    assert_eq!(client.read(4096, 8192).unwrap(), [[0; 4096], [1; 4096]].concat());
    assert_eq!(client.read(4 << 20, 512).unwrap_err().errno(), crate::nbd_client::EINVAL);
    client.disconnect();
    let mut old = Handshake::open(&server.address).unwrap().export_name("").unwrap();
    assert_eq!(old.read(8192, 4096).unwrap(), [1; 4096]);
}

fn run(server: &Nbdkit, model: &mut Model) -> Plan {
    let plan = Plan::new(server.address.clone(), "", 42, BLOCKS);
    let running = start(&plan, &Clock::default());
    running.await_acks(2000, LIMIT);
    let history = running.stop();
    history.assert_no_errors();
    assert!(history.acked() >= 2000 && !history.flushes.is_empty());
    history.teach(model);
    plan
}

#[test]
fn a_server_that_keeps_everything_passes_every_question() {
    let Some(server) = Nbdkit::start(memory) else { return };
    let mut model = Model::new(BLOCKS);
    let plan = run(&server, &mut model);
    let mut client = Client::connect(&server.address, "").unwrap();
    let image = Image::read(&mut client, plan.seed, BLOCKS).unwrap();
    model.assert_nothing_acknowledged_is_lost(&image);
    model.assert_nothing_flushed_is_lost(&image);
    assert_eq!(model.assert_one_moment(&image).lost_writes, 0);
}

/// The server drops the whole of its disk between two questions: the judge must see it.
#[test]
fn a_server_that_forgets_is_found_out() {
    let Some(server) = Nbdkit::start(memory) else { return };
    let mut model = Model::new(BLOCKS);
    let plan = run(&server, &mut model);
    drop(server);
    let Some(server) = Nbdkit::start(memory) else { return };
    let mut client = Client::connect(&server.address, "").unwrap();
    let image = Image::read(&mut client, plan.seed, BLOCKS).unwrap();
    let caught = std::panic::catch_unwind(|| model.assert_nothing_acknowledged_is_lost(&image));
    assert!(caught.is_err(), "lost writes went unseen");
    let verdict = model.assert_one_moment(&image);
    assert!(verdict.lost_writes > 0, "an empty disk is a moment: the first");
}
