//! Detach leaves nothing behind on the host: the next one needs only the store.

use std::path::Path;

use blockd_tests::process::{Daemon, Export};
use blockd_tests::store::Store;
use blockd_tests::{report, tools};

/// The size of the image, `BLOCKD_IMAGE_MIB` or 64 MiB.
fn image_mib() -> u64 {
    std::env::var("BLOCKD_IMAGE_MIB").map_or(64, |text| text.parse().expect("a number of MiB"))
}

/// Makes an ext4 image with the real files of this source tree in it.
fn make_image(path: &Path, mib: u64) {
    let mke2fs = tools::need("mke2fs").expect("checked by the caller");
    let files = Path::new(env!("CARGO_MANIFEST_DIR"));
    mke2fs.must(&[
        "-q",
        "-t",
        "ext4",
        "-d",
        files.to_str().expect("the tree's path is text"),
        path.to_str().expect("a temporary path is text"),
        &format!("{mib}M"),
    ]);
}

fn assert_same(export: &Export, image: &Path, folder: &Path, when: &str) {
    let nbdcopy = tools::need("nbdcopy").expect("checked by the caller");
    let copy = folder.join("out.img");
    nbdcopy.must(&[&export.uri, copy.to_str().expect("a temporary path is text")]);
    let (expected, found) = (std::fs::read(image).unwrap(), std::fs::read(&copy).unwrap());
    assert_eq!(expected.len(), found.len(), "size {when}");
    let differs = expected.iter().zip(&found).position(|(expected, found)| expected != found);
    assert_eq!(differs, None, "first differing byte {when}");
}

/// Fails if the image differs by one byte after a crash, on another host, or to e2fsck.
fn hand_over(store: &Store) {
    let tools = ["nbdcopy", "mke2fs", "e2fsck"].map(tools::need);
    let [Some(nbdcopy), Some(_), Some(e2fsck)] = tools else { return };
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("in.img");
    let mib = image_mib();
    make_image(&image, mib);

    let mut first = Daemon::start(store.settings());
    let export = first.create_attached("disk", &format!("{mib}M"));
    nbdcopy.must(&["--flush", image.to_str().unwrap(), &export.uri]);
    first.kill9();
    first.launch();
    export.connect_when_served().disconnect();
    assert_same(&export, &image, folder.path(), "after a crash");
    first.detach("disk");
    first.finish();

    let second = Daemon::start(store.settings());
    let export = second.attach("disk");
    assert_same(&export, &image, folder.path(), "on the second host");
    e2fsck.must(&["-fn", folder.path().join("out.img").to_str().unwrap()]);
    second.detach("disk");
    second.finish();
    report::say(&format!("{mib} MiB identical after a crash and on a second host"));
}

#[test]
fn a_detached_disk_is_identical_on_another_host_through_a_directory() {
    let _turn = tools::heavy();
    hand_over(&Store::directory());
}

#[test]
fn a_detached_disk_is_identical_on_another_host_through_s3() {
    let _turn = tools::heavy();
    let Some(store) = Store::s3() else { return };
    hand_over(&store);
}
