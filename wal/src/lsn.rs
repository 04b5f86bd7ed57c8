//! [`Lsn`], a position in one owner's write order, and [`OwnerId`], whose order it is.

use std::fmt;

/// A position in the write order of one owner.
///
/// It counts records: the first record is [`Lsn::FIRST`], the next one is one higher, and no number
/// is left out. [`Lsn::ZERO`] stands for "before any record".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(u64);

impl Lsn {
    /// Before any record.
    pub const ZERO: Self = Self(0);
    /// The first record of an owner.
    pub const FIRST: Self = Self(1);

    /// The position with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number of this position.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The position after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        self.plus(1)
    }

    /// The position before this one; [`Lsn::ZERO`] has none and stays.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// The position `count` records later.
    ///
    /// # Panics
    /// When the sum passes `u64::MAX`, which no log can reach by appending.
    #[must_use]
    pub const fn plus(self, count: u64) -> Self {
        Self(self.0.checked_add(count).expect("an owner writes fewer than 2^64 records"))
    }

    /// How many records lie after `earlier` up to and including this one; zero when it is not later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Sixteen bytes that name whose records these are; opaque to the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId([u8; 16]);

impl OwnerId {
    /// The owner with this name.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes of the name.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerId({self})")
    }
}
