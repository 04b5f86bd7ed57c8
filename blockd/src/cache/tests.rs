//! What the cache promises when nothing is damaged: hits, room, restarts.

use tempfile::TempDir;

use super::data_file::BootId;
use super::*;
use crate::ids::{DiskId, Nonce, ObjectId, ObjectRef};

pub(super) const MIB: u64 = 1 << 20;

/// A cache in a directory of its own, with a small ring and, unless a test wants it, little memory.
pub(super) struct Rig {
    pub(super) dir: TempDir,
    pub(super) config: CacheConfig,
    pub(super) host: Host,
}

impl Rig {
    pub(super) fn new(bytes_max: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Self::config(dir.path(), bytes_max);
        let host = Host { boot: BootId::current(), free_bytes_min: 0 };
        Self { dir, config, host }
    }

    fn config(dir: &std::path::Path, bytes_max: u64) -> CacheConfig {
        let dir = dir.join("cache");
        CacheConfig { dir, bytes_max, memory_bytes_max: 0 }
    }

    pub(super) fn data_path(&self) -> PathBuf {
        self.config.dir.join("data")
    }

    pub(super) fn db_path(&self) -> PathBuf {
        self.dir.path().join("db")
    }

    pub(super) fn open(&self) -> Arc<ReadCache> {
        std::fs::create_dir_all(&self.config.dir).unwrap_or_default();
        ReadCache::open_on(self.host, &self.config, LocalDb::open(&self.db_path())).unwrap()
    }
}

/// Ends a cache as `kill -9` would.
pub(super) async fn crash(cache: Arc<ReadCache>) {
    cache.end(Stop::Abandon).await;
}

pub(super) fn key(number: u32) -> FrameKey {
    let object = ObjectId { epoch: 1, nonce: Nonce(2), seq: u64::from(number / 64) };
    FrameKey { blob: ObjectRef { disk: DiskId(3), object }, offset: number % 64 * 70_000 }
}

/// The blocks of a frame; each block of each frame is unlike every other.
pub(super) fn content(number: u32, count: u8) -> Bytes {
    let mut bytes = Vec::new();
    for block in 0..count {
        let mut state = u64::from(number) << 8 | u64::from(block);
        for _ in 0..BLOCK_LEN / 8 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            bytes.extend(state.to_le_bytes());
        }
    }
    bytes.into()
}

pub(super) fn insert(cache: &ReadCache, number: u32, count: u8) {
    let blocks = content(number, count);
    let crcs = blocks.chunks(BLOCK_LEN).map(crc32fast::hash).collect();
    cache.insert(key(number), blocks, crcs);
}

pub(super) async fn insert_all(cache: &ReadCache, numbers: std::ops::Range<u32>, count: u8) {
    for number in numbers {
        insert(cache, number, count);
        cache.flush().await;
    }
}

/// Reads blocks and requires that a hit is exact; returns whether it was one.
#[track_caller]
pub(super) fn check(number: u32, (first, count): (u8, u8), read: Option<&Bytes>) -> bool {
    let Some(bytes) = read else { return false };
    let expected = content(number, first + count);
    assert!(*bytes == expected[usize::from(first) * BLOCK_LEN..], "frame {number} has other bytes");
    true
}

pub(super) async fn hits(cache: &ReadCache, number: u32, first: u8, count: u8) -> bool {
    check(number, (first, count), cache.read(&key(number), first, count).await.as_ref())
}

pub(super) async fn count_hits(cache: &ReadCache, numbers: std::ops::Range<u32>, count: u8) -> u32 {
    let mut found = 0;
    for number in numbers {
        found += u32::from(hits(cache, number, 0, count).await);
    }
    found
}

#[tokio::test]
async fn every_part_of_a_frame_is_read_from_memory_and_from_the_disk() {
    let mut rig = Rig::new(MIB);
    for memory_bytes_max in [0, 4 * MIB] {
        rig.config.memory_bytes_max = memory_bytes_max;
        let cache = rig.open();
        insert(&cache, 1, 5);
        cache.flush().await;
        for first in 0..5 {
            for count in 1..=5 - first {
                assert!(hits(&cache, 1, first, count).await, "{first}, {count}");
            }
        }
        let stats = cache.stats();
        assert_eq!((stats.hits, stats.misses), (15, 0));
        assert_eq!(stats.memory_hits, if memory_bytes_max > 0 { 15 } else { 0 });
        cache.close().await;
    }
}

#[tokio::test]
async fn what_was_never_inserted_is_a_miss_also_within_a_frame() {
    let rig = Rig::new(MIB);
    let cache = rig.open();
    insert(&cache, 1, 5);
    cache.flush().await;
    assert!(!hits(&cache, 2, 0, 1).await);
    assert!(!hits(&cache, 1, 5, 1).await);
    assert!(!hits(&cache, 1, 4, 2).await);
    assert!(!hits(&cache, 1, 255, 255).await);
    assert!(cache.contains(&key(1)) && !cache.contains(&key(2)));
}

#[tokio::test]
async fn a_queued_frame_is_read_before_it_is_on_the_disk() {
    let rig = Rig::new(MIB);
    let cache = rig.open();
    for number in 0..200 {
        insert(&cache, number, 1);
        let written = cache.stats().inserted_bytes;
        assert!(hits(&cache, number, 0, 1).await, "missed with {written} bytes written");
    }
}

#[tokio::test]
async fn a_full_queue_refuses_and_has_room_again_when_it_is_done() {
    let queue = Queue::new(3 * BLOCK_LEN);
    let push = |number, count: u8| {
        let blocks = content(number, count);
        let frame = Arc::new(Frame::new(vec![0; count.into()]));
        queue.push(Inserted { key: key(number), frame, blocks })
    };
    assert!(push(1, 2) && push(2, 1));
    assert!(!push(3, 1), "more than its bytes");
    assert!(push(1, 2), "it is there already");
    let queue::Next::Write(batch) = queue.next(BATCH_LEN) else { panic!("not stopped") };
    assert_eq!(batch.len(), 2);
    assert!(!push(3, 1), "taken is not done");
    queue.done(&batch);
    queue.drained().await;
    assert!(push(3, 3));
}

#[tokio::test]
async fn without_a_disk_it_caches_in_memory() {
    let mut rig = Rig::new(0);
    rig.config.memory_bytes_max = MIB;
    let cache = rig.open();
    insert(&cache, 1, 4);
    assert!(hits(&cache, 1, 1, 3).await);
    assert!(!hits(&cache, 2, 1, 3).await);
    cache.close().await;
    assert_eq!(cache.stats().used_bytes, 0);
}

#[tokio::test]
async fn the_ring_stays_within_its_bytes_and_gives_up_the_oldest() {
    let rig = Rig::new(2 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..64, 32).await;
    assert!(cache.stats().used_bytes <= 2 * MIB);
    assert!(rig.data_path().metadata().unwrap().len() <= 2 * MIB);
    // 15 segments of one frame each.
    assert_eq!(count_hits(&cache, 0..49, 32).await, 0);
    assert_eq!(count_hits(&cache, 49..64, 32).await, 15);
    // The index has no rows of what is gone.
    let mut rows = 0;
    rig_rows(&cache, |_| rows += 1);
    assert_eq!(rows, 2 * 15);
}

fn rig_rows(cache: &ReadCache, mut row: impl FnMut(&[u8])) {
    let index = &cache.storage.as_ref().unwrap().disk.index;
    index.db().scan(crate::local_db::Family::Cache, b"a"..b"z", |key, _| {
        row(key);
        std::ops::ControlFlow::Continue(())
    });
}

#[tokio::test]
async fn a_frame_that_is_read_again_and_again_outlives_the_ring() {
    let mut rig = Rig::new(2 * MIB);
    rig.config.memory_bytes_max = MIB / 2;
    let cache = rig.open();
    insert_all(&cache, 0..2, 2).await;
    for number in 2..300 {
        insert_all(&cache, number..number + 1, 9).await;
        assert!(hits(&cache, 0, 0, 1).await, "lost at {number}");
    }
    crash(cache).await;
    let cache = rig.open();
    assert!(hits(&cache, 0, 0, 2).await, "memory had it, the disk has not");
    assert_eq!(count_hits(&cache, 50..150, 1).await, 0, "nobody read them");
}

#[tokio::test]
async fn a_clean_restart_and_a_crash_keep_everything() {
    let rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..20, 7).await;
    cache.close().await;
    drop(cache);
    let cache = rig.open();
    assert_eq!(count_hits(&cache, 0..20, 7).await, 20);
    insert_all(&cache, 20..40, 7).await;
    crash(cache).await;
    let cache = rig.open();
    assert_eq!(count_hits(&cache, 0..40, 7).await, 40);
    assert_eq!(cache.stats().corrupt, 0);
}

#[tokio::test]
async fn an_insert_of_what_is_there_writes_nothing() {
    let rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..3, 7).await;
    insert_all(&cache, 0..3, 7).await;
    cache.close().await;
    drop(cache);
    let cache = rig.open();
    insert_all(&cache, 0..3, 7).await;
    assert_eq!(cache.stats().inserted_bytes, 0);
    assert_eq!(count_hits(&cache, 0..3, 7).await, 3);
}

#[tokio::test]
async fn a_file_system_without_room_leaves_the_ring_at_its_size() {
    let mut rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..4, 32).await;
    let used_bytes = cache.stats().used_bytes;
    cache.close().await;
    drop(cache);
    rig.host.free_bytes_min = u64::MAX;
    let cache = rig.open();
    insert_all(&cache, 4..50, 32).await;
    assert_eq!(count_hits(&cache, 46..50, 32).await, 4);
    assert_eq!(cache.stats().used_bytes, used_bytes);
    assert_eq!(cache.stats().dropped, 0);
}

#[tokio::test]
async fn a_file_system_without_any_room_costs_inserts_and_nothing_else() {
    let mut rig = Rig::new(4 * MIB);
    rig.host.free_bytes_min = u64::MAX;
    let cache = rig.open();
    insert_all(&cache, 0..4, 32).await;
    assert_eq!(count_hits(&cache, 0..4, 32).await, 0);
    assert_eq!(cache.stats().dropped, 4);
    cache.close().await;
    drop(cache);
    rig.host.free_bytes_min = 0;
    let cache = rig.open();
    insert_all(&cache, 0..4, 32).await;
    assert_eq!(count_hits(&cache, 0..4, 32).await, 4);
}

#[tokio::test]
async fn what_is_given_up_during_a_read_is_a_miss_and_not_damage() {
    let rig = Rig::new(MIB);
    let cache = rig.open();
    insert_all(&cache, 1..2, 1).await;
    let disk = &cache.storage.as_ref().unwrap().disk;
    let (frame, position) = disk.find(&key(1)).unwrap();
    disk.give_up(position + 1);
    let part = Part::new(0, 1);
    let mut buffer = data_file::AlignedBuffer::new(BLOCK_LEN);
    // The bytes are still there, and still verify.
    assert!(disk.read_verified(&key(1), &frame, position, part, buffer.as_mut()).is_none());
    assert!(frame.verifies(part, buffer.as_mut()));
    assert_eq!(cache.stats().corrupt, 0);
}

/// Fails if a reader is given what the writer puts over the place it reads: the ring turns many times
/// while readers read what is about to be overwritten.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_never_see_another_frame_while_the_ring_turns() {
    let rig = Rig::new(MIB);
    let cache = rig.open();
    let newest = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..8)
        .map(|reader: u32| {
            let (cache, newest) = (cache.clone(), newest.clone());
            tokio::spawn(async move {
                let mut found = 0;
                for round in 0.. {
                    let newest = u32::try_from(newest.load(Ordering::Relaxed)).unwrap();
                    if newest >= 1000 {
                        break;
                    }
                    let number = newest.saturating_sub((round * 7 + reader) % 40);
                    found += u32::from(hits(&cache, number, 3, 9).await);
                }
                found
            })
        })
        .collect();
    for number in 0..=1000 {
        insert_all(&cache, number..number + 1, 12).await;
        newest.store(number.into(), Ordering::Relaxed);
    }
    for reader in readers {
        assert!(reader.await.unwrap() > 0, "a reader without any hit proves nothing");
    }
    assert_eq!(cache.stats().corrupt, 0, "a frame that was overwritten was taken for damaged");
}

/// Runs itself as a second process that is killed while it inserts.
#[tokio::test]
async fn what_was_written_before_kill_9_is_read_after_it() {
    use std::io::BufRead;
    const CHILD: &str = "BLOCKD_TEST_CACHE_CHILD";
    if let Some(dir) = std::env::var_os(CHILD) {
        let dir = PathBuf::from(dir);
        let config = Rig::config(&dir, 64 * MIB);
        let cache = ReadCache::open(&config, LocalDb::open(&dir.join("db"))).unwrap();
        insert_all(&cache, 0..50, 32).await;
        println!("\nwritten");
        for number in 50.. {
            insert_all(&cache, number..number + 1, 1).await;
        }
    }
    let rig = Rig::new(64 * MIB);
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture"])
        .arg("cache::tests::what_was_written_before_kill_9_is_read_after_it")
        .env(CHILD, rig.dir.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let output = std::io::BufReader::new(child.stdout.take().unwrap());
    assert!(output.lines().any(|line| line.unwrap() == "written"), "the child ended early");
    child.kill().unwrap();
    child.wait().unwrap();
    let cache = rig.open();
    assert_eq!(count_hits(&cache, 0..50, 32).await, 50);
    count_hits(&cache, 50..500, 1).await;
    assert_eq!(cache.stats().corrupt, 0);
}
