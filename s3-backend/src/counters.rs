//! Counts of requests by operation and outcome, and of bytes each way.
//!
//! The drivers count, one per request that they send; so retries and read-backs are in the figures,
//! and "an idle disk makes no request" can be checked to the digit.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::Error;

/// The operations of [`ObjectStore`](crate::ObjectStore), as they are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A write-once put.
    PutNew,
    /// A compare-and-swap.
    PutIfMatch,
    /// A read of a whole object.
    Get,
    /// A read of a part.
    GetRange,
    /// A question for size and version.
    Stat,
    /// A page of a listing.
    List,
    /// A deletion, of one key or of many.
    Delete,
}

impl Operation {
    /// All of them, in the order of the tallies.
    pub const ALL: [Operation; 7] = [
        Operation::PutNew,
        Operation::PutIfMatch,
        Operation::Get,
        Operation::GetRange,
        Operation::Stat,
        Operation::List,
        Operation::Delete,
    ];

    /// The name, as it stands in metrics and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Operation::PutNew => "put_new",
            Operation::PutIfMatch => "put_if_match",
            Operation::Get => "get",
            Operation::GetRange => "get_range",
            Operation::Stat => "stat",
            Operation::List => "list",
            Operation::Delete => "delete",
        }
    }

    fn index(self) -> usize {
        match self {
            Operation::PutNew => 0,
            Operation::PutIfMatch => 1,
            Operation::Get => 2,
            Operation::GetRange => 3,
            Operation::Stat => 4,
            Operation::List => 5,
            Operation::Delete => 6,
        }
    }
}

/// Requests of one operation, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Did what was asked.
    pub done: u64,
    /// Got a definite no: absent, exists, changed.
    pub refused: u64,
    /// Got no usable answer, or a denial.
    pub failed: u64,
}

/// A snapshot of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    tallies: [Tally; 7],
    /// Bytes of bodies sent, those of failed requests included.
    pub bytes_up: u64,
    /// Bytes of bodies received and accepted.
    pub bytes_down: u64,
}

impl Counters {
    /// The requests of one operation.
    pub fn of(&self, operation: Operation) -> Tally {
        self.tallies[operation.index()]
    }

    /// All requests, whatever came of them.
    pub fn requests(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.done + tally.refused + tally.failed).sum()
    }
}

/// The live counts of one driver.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    outcomes: [[AtomicU64; 3]; 7],
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

impl Meter {
    /// Counts one request, and passes its result on.
    pub(crate) fn count<T>(
        &self,
        operation: Operation,
        result: Result<T, Error>,
    ) -> Result<T, Error> {
        let outcome = match &result {
            Ok(_) => 0,
            Err(error) if error.kind().is_definite() => 1,
            Err(_) => 2,
        };
        self.outcomes[operation.index()][outcome].fetch_add(1, Relaxed);
        result
    }

    pub(crate) fn add_up(&self, bytes: usize) {
        self.bytes_up.fetch_add(count_of(bytes), Relaxed);
    }

    pub(crate) fn add_down(&self, bytes: usize) {
        self.bytes_down.fetch_add(count_of(bytes), Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let load = |[done, refused, failed]: &[AtomicU64; 3]| Tally {
            done: done.load(Relaxed),
            refused: refused.load(Relaxed),
            failed: failed.load(Relaxed),
        };
        Counters {
            tallies: self.outcomes.each_ref().map(load),
            bytes_up: self.bytes_up.load(Relaxed),
            bytes_down: self.bytes_down.load(Relaxed),
        }
    }
}

/// A length in memory as a count; no machine has a `usize` wider than 64 bits.
pub(crate) fn count_of(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("usize has at most 64 bits")
}
