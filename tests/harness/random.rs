//! Seeded random numbers: one seed replays the choices of a test.
//!
//! `BLOCKD_SEED` sets the seed; without it a fresh one is drawn. A test prints its seed, so that a
//! failure can be run again.

use crate::report;

/// A small generator (SplitMix64): fast, seedable, good enough to choose offsets and moments.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The generator of one test: from `BLOCKD_SEED`, or a fresh seed, which is printed.
    #[must_use]
    pub fn for_test() -> Self {
        let seed = match std::env::var("BLOCKD_SEED") {
            Ok(text) => text.parse().expect("BLOCKD_SEED is a decimal number"),
            Err(_) => getrandom_u64(),
        };
        report::say(&format!("BLOCKD_SEED={seed}"));
        Self(seed)
    }

    /// A generator that replays `seed`.
    #[must_use]
    pub const fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing lies below zero");
        self.bits() % bound
    }

    /// A number in `low..high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// True once in `odds` calls, on average.
    pub fn one_in(&mut self, odds: u64) -> bool {
        self.below(odds) == 0
    }

    /// `length` random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.bits().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

fn getrandom_u64() -> u64 {
    getrandom::u64().expect("the system hands out random bytes")
}
