//! The check before a store is trusted: does it keep the conditions of conditional writes?
//!
//! Several popular servers take `If-None-Match` and `If-Match` and ignore them. On such a store two
//! hosts would both hold a disk. So each condition is tried where it holds and where it does not, and
//! by several at once; a store that lets a write through which its condition forbids is refused, in
//! plain words. On the way the probe finds the form of `If-Match` that the store understands.

use std::fmt;

use bytes::Bytes;
use futures_util::future::join_all;

use crate::counters::Operation;
use crate::dialect::{Checksums, IfMatch};
use crate::error::{Error, Kind};
use crate::handle::Store;
use crate::key::{ETag, ObjectKey};
use crate::store::ObjectStore;

/// How many try at once for what one may have.
const RIVALS: usize = 4;

/// What the probe found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    /// The form of ETags in `If-Match`, where there is a choice.
    pub if_match: Option<IfMatch>,
    /// Whether puts carry a checksum for the store to check, where there is a choice.
    pub checksums: Option<Checksums>,
}

impl fmt::Display for ProbeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("conditional writes are honest")?;
        if let Some(form) = self.if_match {
            write!(f, ", if-match {}", form.name())?;
        }
        if let Some(checksums) = self.checksums {
            write!(f, ", checksums {}", checksums.name())?;
        }
        Ok(())
    }
}

/// Tries the store out under keys of its own, `probe/…`, which are gone afterwards.
///
/// # Errors
/// `Unsupported`, naming the operation that the store does not do as it must; or the error of an
/// operation that could not be tried within the policy of `store`.
pub async fn probe(store: &Store) -> Result<ProbeReport, Error> {
    let nonce = getrandom::u64().map_err(|error| {
        Error::new(Kind::Unavailable, "probe: no random numbers").with_source(error)
    })?;
    let probe = Probe { store, nonce };
    let result = probe.run().await;
    // Also after a failure, as far as the store goes along; what is left is a few bytes.
    let keys = ["first", "absent", "put-race", "swap-race"].map(|name| probe.key(name));
    let cleanup = store.delete_many(&keys).await;
    result?;
    for (_, deleted) in cleanup {
        deleted?;
    }
    if let Some(dialect) = store.dialect() {
        dialect.if_match_worked();
    }
    Ok(ProbeReport {
        if_match: store.dialect().map(|dialect| dialect.if_match()),
        checksums: store.dialect().map(|dialect| dialect.checksums()),
    })
}

struct Probe<'a> {
    store: &'a Store,
    nonce: u64,
}

impl Probe<'_> {
    async fn run(&self) -> Result<(), Error> {
        let first = self.if_absent().await?;
        let second = self.if_match(&first).await?;
        let one_by_one = async {
            self.stale_match(&first).await?;
            self.absent_match(&first).await?;
            self.reads(&second).await
        };
        // Some stores keep the losers of a race waiting; all waiting is done at once.
        let (one_by_one, puts, swaps) =
            futures_util::join!(one_by_one, self.put_race(), self.swap_race());
        one_by_one.and(puts).and(swaps)
    }

    async fn if_absent(&self) -> Result<ETag, Error> {
        let key = self.key("first");
        let etag = self.store.put_new(&key, self.body("one")).await?;
        match self.store.put_new(&key, self.body("two")).await {
            Err(error) if error.kind() == Kind::Exists => Ok(etag),
            Ok(_) => Err(refuse(
                "put if absent (If-None-Match: *) overwrote an object that was there; \
                 the condition is ignored",
            )),
            Err(error) => Err(error),
        }
    }

    /// The swap that must go through. A store that refuses one form of the ETag is asked in the other.
    async fn if_match(&self, current: &ETag) -> Result<ETag, Error> {
        let key = self.key("first");
        let form = self.store.dialect().map(|dialect| dialect.if_match());
        let forms = form.map(|form| [form, form.other()]).into_iter().flatten().map(Some);
        let forms: Vec<Option<IfMatch>> = if form.is_none() { vec![None] } else { forms.collect() };
        for form in forms {
            if let (Some(dialect), Some(form)) = (self.store.dialect(), form)
                && !dialect.try_if_match(form)
            {
                continue;
            }
            let swap = || self.store.driver().put_if_match(&key, self.body("two"), current);
            match self.store.read(Operation::PutIfMatch, key.as_str(), swap).await {
                Ok(etag) => return Ok(etag),
                Err(error) if error.kind() == Kind::Conflict => {}
                Err(error) => return Err(error),
            }
            // Refused; or an attempt of ours went through and its reply was lost.
            let object = self.store.get(&key).await?;
            if object.body == self.body("two") {
                return Ok(object.etag);
            }
        }
        Err(refuse("swap (If-Match) with the current ETag was refused"))
    }

    async fn stale_match(&self, stale: &ETag) -> Result<(), Error> {
        match self.store.put_if_match(&self.key("first"), self.body("three"), stale).await {
            Err(error) if error.kind() == Kind::Conflict => Ok(()),
            Ok(_) => Err(refuse(
                "swap (If-Match) with an old ETag overwrote a newer object; \
                 the condition is ignored",
            )),
            Err(error) => Err(error),
        }
    }

    async fn absent_match(&self, any: &ETag) -> Result<(), Error> {
        match self.store.put_if_match(&self.key("absent"), self.body("four"), any).await {
            Err(error) if error.kind() == Kind::NotFound => Ok(()),
            Ok(_) => Err(refuse("swap (If-Match) created an object that was not there")),
            Err(error) => Err(error),
        }
    }

    async fn reads(&self, etag: &ETag) -> Result<(), Error> {
        let key = self.key("first");
        let body = self.body("two");
        let object = self.store.get(&key).await?;
        if object.body != body || object.etag != *etag {
            return Err(refuse("get did not return what the last swap stored"));
        }
        let part = self.store.get_range(&key, 2..7).await?;
        if part != body[2..7] {
            return Err(refuse("get of a range returned other bytes"));
        }
        let listed = self.store.list_all(&format!("probe/{:016x}/f", self.nonce)).await?;
        if listed.len() != 1 || listed[0].key != key {
            return Err(refuse("list did not show exactly the object that was put"));
        }
        Ok(())
    }

    /// Several at once: a store may look at a condition and forget it by the time it writes.
    async fn put_race(&self) -> Result<(), Error> {
        let key = self.key("put-race");
        let puts =
            (0..RIVALS).map(|rival| self.store.put_new(&key, self.body(&format!("{rival}"))));
        one_winner(join_all(puts).await, Kind::Exists, "put if absent (If-None-Match: *)")
    }

    async fn swap_race(&self) -> Result<(), Error> {
        let key = self.key("swap-race");
        let etag = self.store.put_new(&key, self.body("start")).await?;
        let swap = |rival| self.store.put_if_match(&key, self.body(&format!("{rival}")), &etag);
        one_winner(join_all((0..RIVALS).map(swap)).await, Kind::Conflict, "swap (If-Match)")
    }

    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::parse(format!("probe/{:016x}/{name}", self.nonce)).expect("a key by its form")
    }

    fn body(&self, text: &str) -> Bytes {
        format!("blockd probe {:016x} {text}", self.nonce).into()
    }
}

fn one_winner(results: Vec<Result<ETag, Error>>, loss: Kind, operation: &str) -> Result<(), Error> {
    let mut winners = 0;
    for result in results {
        match result {
            Ok(_) => winners += 1,
            Err(error) if error.kind() == loss => {}
            Err(error) => return Err(error),
        }
    }
    if winners != 1 {
        return Err(refuse(&format!("{operation}: {winners} of {RIVALS} rivals won, not one")));
    }
    Ok(())
}

fn refuse(what: &str) -> Error {
    Error::new(Kind::Unsupported, format!("this store cannot be used: {what}"))
}
