//! What the tests of every format share: bytes that are nearly right.
//!
//! A flipped bit is caught by a checksum long before a decoder sees it. These edits are made below
//! the checksum, which is then computed again, so that they reach the decoder.

use proptest::prelude::*;
use proptest::sample::Index;

/// One change of an encoding.
#[derive(Debug, Clone)]
pub(crate) enum Edit {
    Set(Index, u8),
    Insert(Index, u8),
    Remove(Index),
    Cut(Index),
}

/// A few changes; small values are likely, since most fields are.
pub(crate) fn any_edits() -> impl Strategy<Value = Vec<Edit>> {
    let byte = || prop_oneof![0..4u8, Just(0x7f), Just(0x80), Just(0xff), any::<u8>()];
    let edit = prop_oneof![
        8 => (any::<Index>(), byte()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        2 => (any::<Index>(), byte()).prop_map(|(at, byte)| Edit::Insert(at, byte)),
        2 => any::<Index>().prop_map(Edit::Remove),
        1 => any::<Index>().prop_map(Edit::Cut),
    ];
    prop::collection::vec(edit, 1..4)
}

/// The bytes after the edits.
pub(crate) fn edited(bytes: &[u8], edits: &[Edit]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for edit in edits {
        if bytes.is_empty() {
            break;
        }
        match edit {
            Edit::Set(at, byte) => *at.get_mut(&mut bytes) = *byte,
            Edit::Insert(at, byte) => bytes.insert(at.index(bytes.len()), *byte),
            Edit::Remove(at) => drop(bytes.remove(at.index(bytes.len()))),
            Edit::Cut(at) => bytes.truncate(at.index(bytes.len())),
        }
    }
    bytes
}
