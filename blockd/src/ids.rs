//! Names, identities and the object keys made of them.
//!
//! Every number in a key is fixed-width hexadecimal, so that all orders (numeric, byte-wise, a
//! store's own) agree. A constructor is the validator: what exists is valid.

use std::fmt;
use std::str::FromStr;

use s3_backend::ObjectKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Kind};

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident, $int:ty, $digits:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $int);

        impl $name {
            /// A fresh random one.
            ///
            /// # Panics
            /// When the kernel has no randomness to give.
            #[must_use]
            pub fn random() -> Self {
                let mut bytes = [0; $digits / 2];
                getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
                Self(<$int>::from_le_bytes(bytes))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{:0", $digits, "x}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                let digits = text.len() == $digits
                    && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
                if !digits {
                    return Err(Error::new(
                        Kind::Corrupt,
                        format!(concat!("{:?} is not ", $digits, " hexadecimal digits"), text),
                    ));
                }
                Ok(Self(<$int>::from_str_radix(text, 16).expect("the digits were checked")))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

random_id!(
    /// A disk, for ever: names may be used again, ids never.
    DiskId, u128, 32
);
random_id!(
    /// One running daemon's identity, kept over restarts on its own state directory.
    HostId, u128, 32
);
random_id!(
    /// A store, written once into its `format.json`.
    StoreId, u128, 32
);
random_id!(
    /// A snapshot of one disk.
    SnapshotId, u128, 32
);
random_id!(
    /// Drawn at each start of a daemon, and at each swap of a head: makes keys and heads unique.
    Nonce, u64, 16
);

impl DiskId {
    /// The sixteen bytes that mark this disk's frames in the log and its blobs.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The reverse of [`DiskId::to_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }
}

/// Grows each time a disk is attached for writing; 0 is a disk that never was.
pub type Epoch = u64;

/// Grows by one at every swap of a head.
pub type Generation = u64;

/// What makes one immutable object of a disk unique: the epoch and boot nonce of the daemon that
/// wrote it, and a sequence number. Displayed as in its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    /// Epoch of the writer.
    pub epoch: Epoch,
    /// Boot nonce of the writer.
    pub nonce: Nonce,
    /// Counts the objects that this writer made.
    pub seq: u64,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}-{:016x}", self.epoch, self.nonce, self.seq)
    }
}

impl FromStr for ObjectId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut parts = text.split('-').map(|part| part.parse::<Nonce>());
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(Ok(epoch)), Some(Ok(nonce)), Some(Ok(seq)), None) => {
                Ok(Self { epoch: epoch.0, nonce, seq: seq.0 })
            }
            _ => Err(Error::new(Kind::Corrupt, format!("{text:?} is not an object id"))),
        }
    }
}

impl Serialize for ObjectId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ObjectId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A data blob or map object anywhere in the store: pages of a fork refer to its ancestors' objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectRef {
    /// The disk that wrote the object, and alone may delete it.
    pub disk: DiskId,
    /// Which of its objects.
    pub object: ObjectId,
}

impl ObjectRef {
    /// Key of the object as a data blob.
    #[must_use]
    pub fn blob_key(&self) -> ObjectKey {
        key(format!("d/{}/b/{}", self.disk, self.object))
    }

    /// Key of the object as a map object.
    #[must_use]
    pub fn map_key(&self) -> ObjectKey {
        key(format!("d/{}/m/{}", self.disk, self.object))
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.disk, self.object)
    }
}

/// Key of the store's identity.
#[must_use]
pub fn format_key() -> ObjectKey {
    key("format.json".to_owned())
}

/// Key of a disk's name.
#[must_use]
pub fn name_key(name: &DiskName) -> ObjectKey {
    key(format!("disks/{name}"))
}

/// Key of a disk's head.
#[must_use]
pub fn head_key(disk: DiskId) -> ObjectKey {
    key(format!("d/{disk}/head"))
}

/// Key of a snapshot.
#[must_use]
pub fn snapshot_key(disk: DiskId, snapshot: SnapshotId) -> ObjectKey {
    key(format!("d/{disk}/s/{snapshot}"))
}

/// Key of the pin that a fork (or a reader) puts on a snapshot.
#[must_use]
pub fn pin_key(disk: DiskId, snapshot: SnapshotId, fork: DiskId) -> ObjectKey {
    key(format!("d/{disk}/p/{snapshot}/{fork}"))
}

/// Key of a host's heartbeat.
#[must_use]
pub fn heartbeat_key(host: HostId) -> ObjectKey {
    key(format!("hosts/{host}"))
}

fn key(text: String) -> ObjectKey {
    ObjectKey::parse(text).expect("keys made of checked names and hexadecimal digits are valid")
}

/// Longest name of a disk or snapshot, in characters.
pub const NAME_LEN_MAX: usize = 63;

fn check_name(what: &str, text: &str) -> Result<(), Error> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let valid = (1..=NAME_LEN_MAX).contains(&text.len())
        && text.bytes().all(|b| legal(b) || b == b'-')
        && text.bytes().next().is_some_and(legal);
    if valid {
        return Ok(());
    }
    let shown: String = text.chars().take(NAME_LEN_MAX + 1).flat_map(char::escape_debug).collect();
    Err(Error::new(Kind::InvalidName, format!("{what} name \"{shown}\" is not valid")).with_fix(
        "use 1 to 63 lowercase letters, digits and hyphens, starting with a letter or digit",
    ))
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                check_name($what, text)?;
                Ok(Self(text.to_owned()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

name!(
    /// The name of a disk.
    DiskName, "disk"
);
name!(
    /// The name of a snapshot, unique within its disk.
    SnapshotName, "snapshot"
);

/// What a user attaches or reads: `NAME` or `NAME@SNAPSHOT`. Also the name of an NBD export.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The disk.
    pub disk: DiskName,
    /// One of its snapshots, or the disk itself.
    pub snapshot: Option<SnapshotName>,
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once('@') {
            None => Ok(Self { disk: text.parse()?, snapshot: None }),
            Some((disk, snapshot)) => {
                Ok(Self { disk: disk.parse()?, snapshot: Some(snapshot.parse()?) })
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.snapshot {
            None => write!(f, "{}", self.disk),
            Some(snapshot) => write!(f, "{}@{snapshot}", self.disk),
        }
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_their_folder_or_hide_are_refused() {
        for bad in ["", "-a", "A", "a/b", "..", "a@b", "a b", "a\0", "ä", &"a".repeat(64)] {
            assert!(bad.parse::<DiskName>().is_err(), "{bad:?} was taken");
        }
        for good in ["a", "0", "a-b-", &"z".repeat(63)] {
            assert!(good.parse::<DiskName>().is_ok(), "{good:?} was refused");
        }
    }

    #[test]
    fn ids_read_back_and_their_order_is_the_order_of_their_keys() {
        let older = ObjectId { epoch: 9, nonce: Nonce(u64::MAX), seq: 1 };
        let newer = ObjectId { epoch: 10, nonce: Nonce(0), seq: 0 };
        assert_eq!(older.to_string().parse::<ObjectId>().unwrap(), older);
        assert!(older < newer && older.to_string() < newer.to_string());
        assert!("9-1-1".parse::<ObjectId>().is_err());
        let id = DiskId::random();
        assert_eq!(DiskId::from_bytes(id.to_bytes()), id);
        assert_eq!(id.to_string().parse::<DiskId>().unwrap(), id);
    }
}
