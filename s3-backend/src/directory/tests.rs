//! The directory store: the suite, and what only a directory can suffer.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use bytes::Bytes;

use super::DirectoryStore;
use crate::error::Kind;
use crate::handle::Store;
use crate::key::ObjectKey;
use crate::store::ObjectStore;

async fn driver(root: &Path) -> DirectoryStore {
    DirectoryStore::open(root).await.unwrap()
}

async fn store(root: &Path) -> Store {
    Store::new(Arc::new(driver(root).await), 64)
}

fn key(text: &str) -> ObjectKey {
    ObjectKey::parse(text).unwrap()
}

fn scratch_files(root: &Path) -> usize {
    let directories = std::fs::read_dir(root.join("@tmp")).unwrap().map(|entry| entry.unwrap());
    let directories = directories.filter(|entry| entry.path().is_dir());
    // One file in each is its lock.
    directories.map(|entry| std::fs::read_dir(entry.path()).unwrap().count() - 1).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_keeps_every_promise_of_a_store() {
    let root = tempfile::tempdir().unwrap();
    let store = store(&root.path().join("made/on/the/way")).await;
    crate::conformance::run(&store, "suite", 20).await;
    crate::probe(&store).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_openings_of_one_directory_are_one_store() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (store(root.path()).await, store(root.path()).await);
    let etag = one.put_new(&key("head"), "a".into()).await.unwrap();
    let swaps = (0..40).map(|n| {
        let (store, etag) = (if n % 2 == 0 { one.clone() } else { two.clone() }, etag.clone());
        tokio::spawn(async move {
            store.put_if_match(&key("head"), format!("swap {n}").into(), &etag).await.is_ok()
        })
    });
    let results = futures_util::future::join_all(swaps.collect::<Vec<_>>()).await;
    assert_eq!(results.into_iter().filter(|won| *won.as_ref().unwrap()).count(), 1);
}

#[tokio::test]
async fn a_swap_is_not_fooled_by_bytes_that_were_there_before() {
    let root = tempfile::tempdir().unwrap();
    let driver = driver(root.path()).await;
    let first = driver.put_new(&key("head"), "a".into()).await.unwrap();
    let second = driver.put_if_match(&key("head"), "b".into(), &first).await.unwrap();
    let third = driver.put_if_match(&key("head"), "a".into(), &second).await.unwrap();
    assert_ne!(first, third, "the same bytes are another version");
    let late = driver.put_if_match(&key("head"), "c".into(), &first).await;
    assert_eq!(late.unwrap_err().kind(), Kind::Conflict);
}

#[tokio::test]
async fn what_a_killed_writer_left_is_no_object_and_is_swept() {
    let root = tempfile::tempdir().unwrap();
    let dead = root.path().join("@tmp/00000000deadbeef");
    let alive = driver(root.path()).await;
    std::fs::create_dir(&dead).unwrap();
    std::fs::write(dead.join("lock"), "").unwrap();
    std::fs::write(dead.join("0"), "half an obj").unwrap();
    alive.put_new(&key("d/x"), "body".into()).await.unwrap();
    let again = store(root.path()).await;
    assert!(!dead.exists(), "nobody holds its lock, so it is swept");
    assert_eq!(again.list_all("").await.unwrap().len(), 1);
    alive.put_new(&key("d/y"), "body".into()).await.expect("the living keep their scratch files");
}

#[tokio::test]
async fn no_scratch_file_outlives_its_write() {
    let root = tempfile::tempdir().unwrap();
    let driver = driver(root.path()).await;
    let etag = driver.put_new(&key("k"), "a".into()).await.unwrap();
    driver.put_new(&key("k"), "b".into()).await.unwrap_err();
    let other = driver.put_if_match(&key("k"), "c".into(), &etag).await.unwrap();
    assert_ne!(other, etag);
    driver.put_if_match(&key("k"), "d".into(), &etag).await.unwrap_err();
    assert_eq!(scratch_files(root.path()), 0);
}

#[tokio::test]
async fn damage_to_a_file_is_an_error_and_never_another_body() {
    let root = tempfile::tempdir().unwrap();
    let driver = driver(root.path()).await;
    let body = Bytes::from(vec![7; 10_000]);
    for at in [0_usize, 9_999, 10_000, 10_008, 10_016, 10_031] {
        let key = key(&format!("at-{at}"));
        driver.put_new(&key, body.clone()).await.unwrap();
        let path = root.path().join(format!("{key}@"));
        let mut bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 10_032);
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(driver.get(&key).await.unwrap_err().kind(), Kind::Corrupt, "flipped at {at}");
        for len in [bytes.len() - 1, 40, 31, 0] {
            std::fs::write(&path, &bytes[..len]).unwrap();
            assert_eq!(driver.get(&key).await.unwrap_err().kind(), Kind::Corrupt, "cut to {len}");
            assert_eq!(driver.stat(&key).await.unwrap_err().kind(), Kind::Corrupt, "cut to {len}");
        }
    }
}

#[tokio::test]
async fn files_of_others_are_not_objects() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path()).await;
    store.put_new(&key("d/x"), "body".into()).await.unwrap();
    std::fs::create_dir_all(root.path().join("lost+found/b")).unwrap();
    for name in ["README.TXT", "d/y", "d/UPPER@", "d/@", "lost+found/b/c@"] {
        std::fs::write(root.path().join(name), "not ours").unwrap();
    }
    let listed = store.list_all("").await.unwrap();
    assert_eq!(listed.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>(), ["d/x"]);
    assert_eq!(store.get(&key("d/y")).await.unwrap_err().kind(), Kind::NotFound);
}

#[tokio::test]
async fn an_emptied_directory_goes_and_comes_back_also_under_another_opening() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (driver(root.path()).await, driver(root.path()).await);
    for round in 0..3 {
        let old = key(&format!("d/a/b/{round}"));
        one.put_new(&old, "x".into()).await.unwrap();
        two.put_new(&key(&format!("d/a/b/{round}-two")), "x".into()).await.unwrap();
        let keys = [old, key(&format!("d/a/b/{round}-two"))];
        for (_, result) in two.delete_many(&keys).await {
            result.unwrap();
        }
        assert!(!root.path().join("d").exists(), "nothing is left but the store");
    }
    // `one` still has the removed directory open; what it makes anew must be what `two` sees.
    one.put_new(&key("d/a/b/last"), "x".into()).await.unwrap();
    two.get(&key("d/a/b/last")).await.unwrap();
    for (_, result) in one.delete_many(&[key("d/a/b/last")]).await {
        result.unwrap();
    }
    assert_eq!(two.get(&key("d/a/b/last")).await.unwrap_err().kind(), Kind::NotFound);
}

#[tokio::test]
async fn a_store_that_was_removed_is_unreachable_and_not_empty() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("store");
    let driver = driver(&path).await;
    driver.put_new(&key("k"), "a".into()).await.unwrap();
    std::fs::remove_dir_all(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert_eq!(driver.get(&key("k")).await.unwrap_err().kind(), Kind::Unavailable);
    assert_eq!(driver.list("", None, 10).await.unwrap_err().kind(), Kind::Unavailable);
    assert_eq!(driver.put_new(&key("k"), "b".into()).await.unwrap_err().kind(), Kind::Unavailable);
}

#[tokio::test]
async fn pages_follow_the_order_of_keys_and_do_not_read_what_they_do_not_need() {
    let root = tempfile::tempdir().unwrap();
    let driver = driver(root.path()).await;
    let mut keys: Vec<String> =
        ["a", "a-b", "a.b", "a/b", "a/c/d", "a0", "b/a", "b/a/a", "c"].map(str::to_owned).into();
    for text in &keys {
        driver.put_new(&key(text), "x".into()).await.unwrap();
    }
    keys.sort();
    let mut seen = Vec::new();
    let mut token = None;
    loop {
        let page = driver.list("", token.as_ref(), 2).await.unwrap();
        seen.extend(page.entries.into_iter().map(|entry| entry.key.to_string()));
        match page.next {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    assert_eq!(seen, keys);
}

/// Set in the process that the next test starts of itself, in order to kill it.
const INNER: &str = "BLOCKD_TEST_WRITE_UNTIL_KILLED";

/// A body of a megabyte that begins with its number.
fn numbered(number: usize) -> Bytes {
    let mut body = vec![b'.'; 1024 * 1024 + number % 4096];
    let digits = number.to_string();
    body[..digits.len()].copy_from_slice(digits.as_bytes());
    body.into()
}

/// Puts blobs and swaps a head over and over, and says on stdout what is done.
async fn write_until_killed(root: &Path) {
    let store = store(root).await;
    let mut head = store.put_new(&key("head"), numbered(0)).await.unwrap();
    for number in 1.. {
        store.put_new(&key(&format!("b/{number}")), numbered(number)).await.unwrap();
        head = store.put_if_match(&key("head"), numbered(number), &head).await.unwrap();
        println!("done {number}");
    }
}

#[tokio::test]
async fn killing_a_writer_loses_nothing_and_leaves_nothing_half_done() {
    if let Some(root) = std::env::var_os(INNER) {
        return write_until_killed(Path::new(&root)).await;
    }
    let test = "directory::tests::killing_a_writer_loses_nothing_and_leaves_nothing_half_done";
    for wanted in [1, 4, 9] {
        let root = tempfile::tempdir().unwrap();
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(INNER, root.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines().map(Result::unwrap);
        let done: Vec<usize> = lines
            .filter_map(|line| line.strip_prefix("done ").map(|number| number.parse().unwrap()))
            .inspect(|number| {
                if *number == wanted {
                    writer.kill().unwrap();
                }
            })
            .collect();
        writer.wait().unwrap();
        let last = *done.last().unwrap();
        let store = store(root.path()).await;
        for number in 1..=last {
            let blob = store.get(&key(&format!("b/{number}"))).await.unwrap();
            assert_eq!(blob.body, numbered(number));
        }
        let head = store.get(&key("head")).await.unwrap().body;
        assert!(head == numbered(last) || head == numbered(last + 1), "after {last}");
        for entry in store.list_all("b/").await.unwrap() {
            store.get(&entry.key).await.expect("what is listed is whole");
        }
        assert_eq!(scratch_files(root.path()), 0, "what was not finished is swept");
    }
}

/// A small file system, unmounted when this is dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=4m", "none"]).arg(place.path());
        match mount.output() {
            Ok(output) if output.status.success() => Some(Self(place)),
            _ => None,
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_is_an_outage_that_ends_when_there_is_room() {
    let Some(disk) = SmallDisk::mount() else {
        println!("skipped: only root may mount a small disk");
        return;
    };
    let driver = Arc::new(driver(&disk.0.path().join("store")).await);
    let mut stored = 0;
    let error = loop {
        match driver.put_new(&key(&format!("b/{stored}")), numbered(stored)).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), Kind::Unavailable, "{}", error.chain());
    assert!(stored >= 2, "{stored} fitted");
    let store = Store::new(driver, 64);
    let waiting = store.clone();
    let waiting = tokio::spawn(async move { waiting.put_new(&key("b/more"), numbered(7)).await });
    while store.health().failures < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.list_all("").await.unwrap().len(), stored, "nothing half is there");
    for (_, result) in store.delete_many(&[key("b/0")]).await {
        result.unwrap();
    }
    waiting.await.unwrap().unwrap();
    assert_eq!(store.get(&key("b/more")).await.unwrap().body, numbered(7));
}
