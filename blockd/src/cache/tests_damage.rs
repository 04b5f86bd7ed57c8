//! What the cache promises when its files are damaged, stale or gone: colder, never wrong.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::data_file::BootId;
use super::tests::*;
use crate::geometry::BLOCK_BYTES;

/// The rig after a restart of the machine.
fn reboot(rig: &mut Rig, boots: &str) {
    rig.host.boot = BootId::named(boots);
}

/// Flips a bit of the data file; `offset` may lie anywhere.
fn flip(rig: &Rig, offset: u64, bit: u8) {
    let file = OpenOptions::new().read(true).write(true).open(rig.data_path()).unwrap();
    let len = file.metadata().unwrap().len();
    if len > 0 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset % len).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << bit], offset % len).unwrap();
    }
}

#[tokio::test]
async fn a_flipped_bit_is_a_miss_is_counted_and_is_cured_by_the_next_insert() {
    let rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..2, 4).await;
    flip(&rig, BLOCK_BYTES + BLOCK_BYTES + 77, 3);
    assert!(hits(&cache, 0, 0, 1).await, "its neighbour is whole");
    assert!(!hits(&cache, 0, 1, 1).await);
    assert_eq!(cache.stats().corrupt, 1);
    assert!(!hits(&cache, 0, 0, 1).await, "the frame was dropped");
    assert!(hits(&cache, 1, 0, 4).await, "another frame was not");
    insert_all(&cache, 0..1, 4).await;
    assert!(hits(&cache, 0, 0, 4).await);
    assert_eq!(cache.stats().corrupt, 1);
}

#[tokio::test]
async fn blocks_inserted_with_wrong_crcs_are_never_given_out() {
    let mut rig = Rig::new(4 * MIB);
    for memory_bytes_max in [0, 4 * MIB] {
        rig.config.memory_bytes_max = memory_bytes_max;
        let cache = rig.open();
        cache.insert(key(1), content(1, 2), vec![1, 2]);
        assert_eq!(cache.read(&key(1), 0, 1).await, None);
        cache.flush().await;
        assert_eq!(cache.read(&key(1), 1, 1).await, None);
        assert!(cache.stats().corrupt > 0);
        insert_all(&cache, 1..2, 2).await;
        assert!(hits(&cache, 1, 0, 2).await);
        cache.close().await;
        fs::remove_dir_all(&rig.config.dir).unwrap();
    }
}

#[tokio::test]
async fn after_a_power_cut_only_what_was_synced_is_trusted() {
    let mut rig = Rig::new(4 * MIB);
    let cache = rig.open();
    // Segments of one frame: each reservation syncs the frames before it.
    insert_all(&cache, 0..10, 32).await;
    crash(cache).await;
    reboot(&mut rig, "once");
    let cache = rig.open();
    assert_eq!(count_hits(&cache, 0..9, 32).await, 9);
    assert!(!hits(&cache, 9, 0, 32).await, "it may have been in a volatile cache");
    crash(cache).await;
    let cache = rig.open();
    assert!(!hits(&cache, 9, 0, 32).await, "still not");
    insert_all(&cache, 10..11, 32).await;
    cache.close().await;
    drop(cache);
    reboot(&mut rig, "twice");
    let cache = rig.open();
    assert!(hits(&cache, 10, 0, 32).await, "a close syncs");
}

#[tokio::test]
async fn a_file_restored_from_a_copy_is_not_read_by_rows_of_its_future() {
    let rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..3, 32).await;
    cache.close().await;
    drop(cache);
    let copy = fs::read(rig.data_path()).unwrap();
    let cache = rig.open();
    insert_all(&cache, 3..6, 32).await;
    cache.close().await;
    drop(cache);
    fs::write(rig.data_path(), copy).unwrap();
    let cache = rig.open();
    assert_eq!(count_hits(&cache, 0..3, 32).await, 3);
    assert_eq!(count_hits(&cache, 3..6, 32).await, 0);
    assert_eq!(cache.stats().corrupt, 0, "the rows were not even tried");
}

#[tokio::test]
async fn damaged_files_at_start_are_a_cold_cache_that_warms_up_again() {
    type Damage = fn(&Rig);
    let damages: [(&str, Damage); 9] = [
        ("data deleted", |rig| fs::remove_file(rig.data_path()).unwrap()),
        ("data emptied", |rig| fs::write(rig.data_path(), []).unwrap()),
        ("data garbage", |rig| fs::write(rig.data_path(), vec![0xa5; 3 << 20]).unwrap()),
        ("directory deleted", |rig| fs::remove_dir_all(&rig.config.dir).unwrap()),
        ("db deleted", |rig| fs::remove_dir_all(rig.db_path()).unwrap()),
        ("db garbage", |rig| {
            for file in fs::read_dir(rig.db_path()).unwrap() {
                fs::write(file.unwrap().path(), [0x5a; 999]).unwrap();
            }
        }),
        ("db emptied", |rig| {
            for file in fs::read_dir(rig.db_path()).unwrap() {
                fs::write(file.unwrap().path(), []).unwrap();
            }
        }),
        ("db a file", |rig| {
            fs::remove_dir_all(rig.db_path()).unwrap();
            fs::write(rig.db_path(), "x").unwrap();
        }),
        ("both deleted", |rig| {
            fs::remove_file(rig.data_path()).unwrap();
            fs::remove_dir_all(rig.db_path()).unwrap();
        }),
    ];
    for (what, damage) in damages {
        let rig = Rig::new(4 * MIB);
        let cache = rig.open();
        insert_all(&cache, 0..5, 32).await;
        cache.close().await;
        drop(cache);
        damage(&rig);
        let cache = rig.open();
        assert_eq!(count_hits(&cache, 0..5, 32).await, 0, "{what}");
        insert_all(&cache, 0..5, 32).await;
        assert_eq!(count_hits(&cache, 0..5, 32).await, 5, "{what}");
        cache.close().await;
        drop(cache);
        assert_eq!(count_hits(&rig.open(), 0..5, 32).await, 5, "{what}, one start later");
    }
}

#[tokio::test]
async fn a_file_cut_short_loses_only_what_was_cut_off() {
    let rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..4, 32).await;
    let file = OpenOptions::new().write(true).open(rig.data_path()).unwrap();
    file.set_len(BLOCK_BYTES + 2 * 32 * BLOCK_BYTES).unwrap();
    assert_eq!(count_hits(&cache, 0..4, 32).await, 2);
    insert_all(&cache, 4..8, 32).await;
    assert_eq!(count_hits(&cache, 4..8, 32).await, 4);
}

#[tokio::test]
async fn another_size_begins_empty_and_rows_of_the_former_file_are_gone() {
    let mut rig = Rig::new(4 * MIB);
    let cache = rig.open();
    insert_all(&cache, 0..5, 32).await;
    cache.close().await;
    drop(cache);
    rig.config.bytes_max = 2 * MIB;
    let cache = rig.open();
    assert_eq!(count_hits(&cache, 0..5, 32).await, 0);
    insert_all(&cache, 5..30, 32).await;
    assert!(cache.stats().used_bytes <= 2 * MIB);
    cache.close().await;
    drop(cache);
    rig.config.bytes_max = 4 * MIB;
    assert_eq!(count_hits(&rig.open(), 0..30, 32).await, 0);
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_leaves_a_cache_in_memory() {
    let mut rig = Rig::new(4 * MIB);
    rig.config.memory_bytes_max = 4 * MIB;
    fs::write(&rig.config.dir, "a file").unwrap();
    let cache = rig.open();
    insert(&cache, 1, 3);
    assert!(hits(&cache, 1, 0, 3).await);
    assert!(!hits(&cache, 2, 0, 3).await);
    cache.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_deleted_and_cut_under_load_never_fail_or_falsify_a_read() {
    let rig = Rig::new(8 * MIB);
    let cache = rig.open();
    for round in 0..12 {
        let numbers = round * 200..round * 200 + 200;
        insert_all(&cache, numbers.start..numbers.start + 100, 3).await;
        match round % 4 {
            1 => fs::remove_dir_all(rig.db_path()).unwrap_or_default(),
            2 => OpenOptions::new()
                .write(true)
                .open(rig.data_path())
                .map_or((), |file| file.set_len(MIB).unwrap()),
            3 => fs::remove_file(rig.data_path()).unwrap_or_default(),
            _ => {}
        }
        let (_, inserted) = tokio::join!(
            count_hits(&cache, 0..numbers.end, 3),
            insert_all(&cache, numbers.start + 100..numbers.end, 3)
        );
        let () = inserted;
    }
    cache.close().await;
    drop(cache);
    let cache = rig.open();
    count_hits(&cache, 0..2400, 3).await;
    insert_all(&cache, 0..10, 3).await;
    assert_eq!(count_hits(&cache, 0..10, 3).await, 10);
}

#[derive(Debug, Clone)]
enum Step {
    Insert(u32),
    Read { number: u32, first: u8, count: u8 },
    Close,
    Crash,
    PowerCut,
    Flip { offset: u64, bit: u8 },
    Truncate(u64),
    DeleteDb,
    DeleteData,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        20 => (0..40u32).prop_map(Step::Insert),
        30 => (0..40u32, 0..32u8, 1..33u8)
            .prop_map(|(number, first, count)| Step::Read { number, first, count }),
        1 => Just(Step::Close),
        1 => Just(Step::Crash),
        1 => Just(Step::PowerCut),
        4 => (any::<u64>(), 0..8u8).prop_map(|(offset, bit)| Step::Flip { offset, bit }),
        1 => (0..MIB).prop_map(Step::Truncate),
        1 => Just(Step::DeleteDb),
        1 => Just(Step::DeleteData),
    ];
    prop::collection::vec(step, 1..120)
}

/// Blocks of a frame in the model.
fn block_count(number: u32) -> u8 {
    u8::try_from(number * 13 % 32 + 1).unwrap()
}

async fn run(steps: &[Step], memory_bytes_max: u64) {
    let mut rig = Rig::new(MIB);
    rig.config.memory_bytes_max = memory_bytes_max;
    let mut boots = 0;
    let mut cache = rig.open();
    let mut inserted = std::collections::HashSet::new();
    for step in steps {
        match *step {
            Step::Insert(number) => {
                insert_all(&cache, number..number + 1, block_count(number)).await;
                inserted.insert(number);
            }
            Step::Read { number, first, count } => {
                let read = cache.read(&key(number), first, count).await;
                if check(number, (first, count), read.as_ref()) {
                    assert!(first + count <= block_count(number), "beyond the frame");
                    assert!(inserted.contains(&number), "never inserted");
                }
            }
            Step::Flip { offset, bit } => {
                if rig.data_path().exists() {
                    flip(&rig, offset, bit);
                }
            }
            Step::Truncate(len) => {
                if let Ok(file) = OpenOptions::new().write(true).open(rig.data_path()) {
                    file.set_len(len).unwrap();
                }
            }
            Step::DeleteDb => fs::remove_dir_all(rig.db_path()).unwrap_or_default(),
            Step::DeleteData => fs::remove_file(rig.data_path()).unwrap_or_default(),
            Step::Close | Step::Crash | Step::PowerCut => {
                if matches!(step, Step::Close) {
                    cache.close().await;
                }
                crash(cache).await;
                if matches!(step, Step::PowerCut) {
                    boots += 1;
                    reboot(&mut rig, &boots.to_string());
                }
                cache = rig.open();
            }
        }
    }
    // Whatever happened, it still caches.
    insert_all(&cache, 100..101, 32).await;
    assert!(hits(&cache, 100, 0, 32).await, "the cache was disabled for good");
    cache.close().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_hit_is_exact_whatever_happens_to_the_files(steps in steps(), in_memory: bool) {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(run(&steps, if in_memory { MIB } else { 0 }));
    }
}
