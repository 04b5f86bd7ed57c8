//! The suite that every store must pass: the promises of [`ObjectStore`] as checks that panic.
//!
//! Each check works under a prefix of its own below the one it is given, so that several can share a
//! store, and leaves its objects there. [`run`] does all of them.

use std::collections::HashSet;

use bytes::Bytes;
use futures_util::future::join_all;

use crate::error::{Error, Kind};
use crate::handle::Store;
use crate::key::{ETag, ObjectKey};
use crate::store::{ListEntry, ObjectStore};

/// Who tries for the same key in a race.
const RIVALS: usize = 16;

/// Runs every check against `store`, under keys that begin with `prefix/`; each race is run
/// `rounds` times.
///
/// # Panics
/// When a promise is broken, saying which.
pub async fn run(store: &Store, prefix: &str, rounds: usize) {
    let place = |name: &str| Place { store, prefix: format!("{prefix}/{name}") };
    objects_are_read_back_whole(&place("whole")).await;
    a_key_is_put_once(&place("once")).await;
    a_swap_replaces_only_what_it_has_seen(&place("swap")).await;
    absent_is_not_found(&place("absent")).await;
    a_range_is_exact(&place("range")).await;
    a_key_may_begin_another(&place("nested")).await;
    a_listing_is_complete(&place("list")).await;
    deletion_takes_exactly_the_keys_given(&place("delete")).await;
    for round in 0..rounds {
        a_race_has_one_winner(&place(&format!("race-{round}"))).await;
    }
    no_update_is_lost(&place("count")).await;
}

/// Where one check does its work.
struct Place<'a> {
    store: &'a Store,
    prefix: String,
}

impl Place<'_> {
    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::parse(format!("{}/{name}", self.prefix)).expect("checks use valid keys")
    }

    async fn put(&self, name: &str, body: impl Into<Bytes>) -> ETag {
        let put = self.store.put_new(&self.key(name), body.into()).await;
        put.unwrap_or_else(|error| panic!("put {name}: {}", error.chain()))
    }

    async fn read(&self, name: &str) -> Bytes {
        match self.store.get(&self.key(name)).await {
            Ok(object) => object.body,
            Err(error) => panic!("get {name}: {}", error.chain()),
        }
    }

    async fn list(&self, rest: &str) -> Vec<ListEntry> {
        let listed = self.store.list_all(&format!("{}/{rest}", self.prefix)).await;
        listed.unwrap_or_else(|error| panic!("list {rest}: {}", error.chain()))
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: Kind, what: &str) {
    match result {
        Err(error) if error.kind() == kind => {}
        Err(error) => panic!("{what}: {}, not {kind:?}", error.chain()),
        Ok(value) => panic!("{what}: went through with {value:?}, not {kind:?}"),
    }
}

/// Bytes that repeat nowhere, so that a shift by any offset shows.
fn pattern(len: usize) -> Bytes {
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    (0..len).map(|_| next()).collect()
}

async fn objects_are_read_back_whole(place: &Place<'_>) {
    for len in [1, 4096, 1024 * 1024 + 3, 16 * 1024 * 1024] {
        let name = format!("{len}");
        let body = pattern(len);
        let etag = place.put(&name, body.clone()).await;
        let object = place.store.get(&place.key(&name)).await.expect("get what was put");
        assert!(object.body == body, "{len} bytes came back different");
        assert_eq!(object.etag, etag, "get names the version that put made");
        let meta = place.store.stat(&place.key(&name)).await.expect("stat what was put");
        assert_eq!(usize::try_from(meta.size), Ok(len));
        assert_eq!(meta.etag, etag, "stat names the version that put made");
    }
    let empty = place.store.put_new(&place.key("empty"), Bytes::new()).await;
    refused(empty, Kind::Invalid, "put of an empty object");
}

async fn a_key_is_put_once(place: &Place<'_>) {
    let etag = place.put("key", "first").await;
    let other = place.store.put_new(&place.key("key"), "other".into()).await;
    refused(other, Kind::Exists, "put over other bytes");
    let longer = place.store.put_new(&place.key("key"), pattern(100_000)).await;
    refused(longer, Kind::Exists, "put over a shorter object");
    assert_eq!(place.read("key").await, "first", "a refused put changes nothing");
    // A repetition by someone who does not know that it went through.
    let again = place.store.put_new(&place.key("key"), "first".into()).await;
    assert_eq!(again.expect("put of the same bytes again"), etag);
}

async fn a_swap_replaces_only_what_it_has_seen(place: &Place<'_>) {
    let key = place.key("key");
    let swap = |body: &'static str, expected: ETag| {
        let key = &key;
        async move { place.store.put_if_match(key, body.into(), &expected).await }
    };
    let first = place.put("key", "first").await;
    let second = swap("second", first.clone()).await.expect("swap of the current version");
    assert_ne!(first, second, "each version has a name of its own");
    assert_eq!(place.read("key").await, "second");
    refused(swap("third", first.clone()).await, Kind::Conflict, "swap of an old version");
    assert_eq!(place.read("key").await, "second", "a refused swap changes nothing");
    let third = swap("third, and longer", second.clone()).await.expect("swap once more");
    assert_eq!(place.store.get(&key).await.expect("get the third").etag, third);
    refused(swap("fourth", second).await, Kind::Conflict, "swap of a version before");
    let foreign = ETag::parse("0123456789abcdef0123456789abcdef").expect("a valid tag");
    refused(swap("fifth", foreign).await, Kind::Conflict, "swap of a version that never was");
    let absent = place.store.put_if_match(&place.key("absent"), "x".into(), &third).await;
    refused(absent, Kind::NotFound, "swap of an absent object");
    refused(place.store.get(&place.key("absent")).await, Kind::NotFound, "get after that");
}

async fn absent_is_not_found(place: &Place<'_>) {
    // Beside a neighbour, so that "there is nothing here at all" is not what is tested.
    place.put("present", "x").await;
    for name in ["absent", "present/absent", "presen", "present-"] {
        let key = place.key(name);
        refused(place.store.get(&key).await, Kind::NotFound, "get");
        refused(place.store.get_range(&key, 0..4).await, Kind::NotFound, "get of a range");
        refused(place.store.stat(&key).await, Kind::NotFound, "stat");
    }
    assert!(place.list("nothing").await.is_empty(), "a prefix of no key lists nothing");
}

async fn a_range_is_exact(place: &Place<'_>) {
    let body = pattern(300_000);
    place.put("key", body.clone()).await;
    let key = place.key("key");
    let whole = 0..300_000;
    for range in [0..1, 0..4096, 4096..4097, 100_001..299_999, 299_999..300_000, whole] {
        let part = place.store.get_range(&key, range.clone()).await;
        let part = part.unwrap_or_else(|error| panic!("{range:?}: {}", error.chain()));
        let [start, end] = [range.start, range.end].map(|at| usize::try_from(at).expect("small"));
        assert!(part == body[start..end], "bytes {range:?} came back different");
    }
    for range in [299_999..300_001, 300_000..300_001, 400_000..500_000] {
        let result = place.store.get_range(&key, range).await.map(|part| part.len());
        refused(result, Kind::Corrupt, "range beyond the end");
    }
    refused(place.store.get_range(&key, 5..5).await, Kind::Invalid, "empty range");
}

async fn a_key_may_begin_another(place: &Place<'_>) {
    let names = ["a", "a/b", "a/b/c", "a-b", "a.b", "a_b", "ab", "a0"];
    for name in names {
        place.put(name, format!("body of {name}")).await;
    }
    for name in names {
        assert_eq!(place.read(name).await, format!("body of {name}"));
    }
    let listed: HashSet<String> =
        place.list("").await.iter().map(|entry| entry.key.to_string()).collect();
    assert_eq!(listed, names.map(|name| place.key(name).to_string()).into());
    let under: Vec<ObjectKey> = place.list("a/").await.into_iter().map(|entry| entry.key).collect();
    assert_eq!(under, [place.key("a/b"), place.key("a/b/c")]);
    let results = place.store.delete_many(&[place.key("a")]).await;
    assert!(results[0].1.is_ok());
    assert_eq!(place.read("a/b").await, "body of a/b", "a deletion takes nothing below the key");
}

async fn a_listing_is_complete(place: &Place<'_>) {
    let names: Vec<String> = (0..23)
        .map(|n| format!("{}/{n:04x}", if n % 3 == 0 { "even/deep" } else { "odd" }))
        .collect();
    let puts = names.iter().map(|name| place.put(name, vec![7; name.len()]));
    join_all(puts).await;
    let mut expected: Vec<ObjectKey> = names.iter().map(|name| place.key(name)).collect();
    expected.sort();
    let listed = place.list("").await;
    assert!(listed.iter().map(|entry| &entry.key).eq(&expected));
    for entry in &listed {
        let name_bytes = entry.key.as_str().len() - place.prefix.len() - 1;
        assert_eq!(usize::try_from(entry.size), Ok(name_bytes), "size of {}", entry.key);
    }
    for limit in [1, 5, 22, 23, 24] {
        assert_eq!(paged(place, limit).await, expected, "in pages of {limit}");
    }
    let middle = place.list("odd/000").await;
    assert_eq!(middle.len(), 10, "a prefix may end within a segment: {middle:?}");
}

async fn paged(place: &Place<'_>, limit: usize) -> Vec<ObjectKey> {
    let mut keys = Vec::new();
    let mut token = None;
    loop {
        let prefix = format!("{}/", place.prefix);
        let page = place.store.list(&prefix, token.as_ref(), limit).await.expect("list a page");
        assert!(page.entries.len() <= limit, "a page is not longer than asked for");
        keys.extend(page.entries.into_iter().map(|entry| entry.key));
        match page.next {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    keys.sort();
    keys
}

async fn deletion_takes_exactly_the_keys_given(place: &Place<'_>) {
    let names: Vec<String> = (0..10).map(|n| format!("dir/{n}")).collect();
    for name in &names {
        place.put(name, "x").await;
    }
    let mut doomed: Vec<ObjectKey> = names[..7].iter().map(|name| place.key(name)).collect();
    doomed.insert(3, place.key("dir/absent"));
    for attempt in ["first", "second"] {
        let results = place.store.delete_many(&doomed).await;
        let answered: Vec<&ObjectKey> = results.iter().map(|(key, _)| key).collect();
        assert_eq!(answered, doomed.iter().collect::<Vec<_>>(), "every key is answered, in order");
        for (key, result) in results {
            result.unwrap_or_else(|error| panic!("{attempt} delete {key}: {}", error.chain()));
        }
    }
    let left: Vec<ObjectKey> = place.list("").await.into_iter().map(|entry| entry.key).collect();
    assert_eq!(left, names[7..].iter().map(|name| place.key(name)).collect::<Vec<_>>());
    assert!(place.store.delete_many(&[]).await.is_empty());
}

async fn a_race_has_one_winner(place: &Place<'_>) {
    let key = &place.key("key");
    let body = |what: &str, rival: usize| Bytes::from(format!("{what} by rival {rival}"));
    let puts = (0..RIVALS).map(|rival| place.store.put_new(key, body("put", rival)));
    let (winner, etag) = only_winner(join_all(puts).await, Kind::Exists, "put");
    assert_eq!(place.read("key").await, body("put", winner), "the winner's bytes are there");
    let swaps = (0..RIVALS).map(|rival| place.store.put_if_match(key, body("swap", rival), &etag));
    let (winner, _) = only_winner(join_all(swaps).await, Kind::Conflict, "swap");
    assert_eq!(place.read("key").await, body("swap", winner), "the winner's bytes are there");
}

#[track_caller]
fn only_winner(results: Vec<Result<ETag, Error>>, loss: Kind, what: &str) -> (usize, ETag) {
    let mut winner = None;
    for (rival, result) in results.into_iter().enumerate() {
        match result {
            Ok(etag) if winner.is_none() => winner = Some((rival, etag)),
            won_or_lost => refused(won_or_lost, loss, what),
        }
    }
    winner.unwrap_or_else(|| panic!("{what}: nobody won"))
}

/// Several count in one object, each by read and swap until it goes through.
async fn no_update_is_lost(place: &Place<'_>) {
    const WRITERS: usize = 3;
    const STEPS: usize = 4;
    let key = &place.key("key");
    place.put("key", "0 start").await;
    let writers = (0..WRITERS).map(|writer| async move {
        for step in 0..STEPS {
            loop {
                let object = place.store.get(key).await.expect("read the count");
                let text = String::from_utf8_lossy(&object.body).into_owned();
                let count: usize =
                    text.split(' ').next().expect("one word").parse().expect("a number");
                let body = format!("{} by {writer} in {step}", count + 1);
                match place.store.put_if_match(key, body.into(), &object.etag).await {
                    Ok(_) => break,
                    lost => refused(lost, Kind::Conflict, "swap"),
                }
            }
        }
    });
    join_all(writers).await;
    let text = place.read("key").await;
    let expected = format!("{} by ", WRITERS * STEPS);
    assert!(text.starts_with(expected.as_bytes()), "updates were lost: {text:?}");
}
