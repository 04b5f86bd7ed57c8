//! Small objects that people may want to read: JSON with a checksum.
//!
//! ```text
//! {"blockd":"head","version":1,"crc32":"0a1b2c3d","body":{…}}
//! ```
//!
//! `crc32` covers `blockd`, `version` and the exact bytes of `body` (CRC-32/ISO-HDLC over
//! `<blockd> <version> <body>`), so a flipped bit is an error that names the object, never a value
//! that is merely wrong. A reader refuses a version above its own. Heads, snapshots, names, pins,
//! heartbeats, `format.json` and the small files of the state directory are such documents.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Kind, Result};

/// A type that is written as a document: its kind on disk and the newest version this code writes.
pub trait Document: Serialize + DeserializeOwned {
    /// The word under `blockd`.
    const KIND: &'static str;
    /// The version under `version`.
    const VERSION: u32 = 1;
}

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    blockd: String,
    version: u32,
    crc32: String,
    #[serde(borrow)]
    body: &'a RawValue,
}

fn checksum(kind: &str, version: u32, body: &str) -> String {
    let mut crc = crc32fast::Hasher::new();
    crc.update(format!("{kind} {version} ").as_bytes());
    crc.update(body.as_bytes());
    format!("{:08x}", crc.finalize())
}

/// The bytes of a document.
///
/// # Panics
/// When the type cannot be written as JSON, which would be a bug of that type.
pub fn encode<T: Document>(value: &T) -> Bytes {
    let body = serde_json::value::to_raw_value(value).expect("documents are plain data");
    let envelope = Envelope {
        blockd: T::KIND.to_owned(),
        version: T::VERSION,
        crc32: checksum(T::KIND, T::VERSION, body.get()),
        body: &body,
    };
    let mut bytes = serde_json::to_vec(&envelope).expect("documents are plain data");
    bytes.push(b'\n');
    bytes.into()
}

/// Reads a document back. `place` names the object in the error.
///
/// # Errors
/// [`Kind::Corrupt`] when the bytes are not such a document, or not the bytes that were written.
pub fn decode<T: Document>(bytes: &[u8], place: &str) -> Result<T> {
    let corrupt = |why: String| {
        Error::new(Kind::Corrupt, format!("{place}: {why}")).with_detail("object", place)
    };
    let envelope: Envelope<'_> = serde_json::from_slice(bytes)
        .map_err(|error| corrupt(format!("not a {} document: {error}", T::KIND)))?;
    if envelope.blockd != T::KIND {
        return Err(corrupt(format!("a {} document, not a {}", envelope.blockd, T::KIND)));
    }
    if envelope.version > T::VERSION {
        return Err(corrupt(format!(
            "{} version {} is newer than this blockd reads ({})",
            T::KIND,
            envelope.version,
            T::VERSION
        ))
        .with_fix("run the blockd version that wrote it, or a newer one"));
    }
    let computed = checksum(T::KIND, envelope.version, envelope.body.get());
    if computed != envelope.crc32 {
        return Err(corrupt(format!(
            "crc mismatch: stored {}, computed {computed}",
            envelope.crc32
        )));
    }
    serde_json::from_str(envelope.body.get())
        .map_err(|error| corrupt(format!("unreadable {} document: {error}", T::KIND)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct Sample {
        number: u64,
    }

    impl Document for Sample {
        const KIND: &'static str = "sample";
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let bytes = encode(&Sample { number: 41 });
        assert_eq!(decode::<Sample>(&bytes, "k").unwrap(), Sample { number: 41 });
        for index in 0..bytes.len() - 1 {
            for bit in 0..8 {
                let mut bad = bytes.to_vec();
                bad[index] ^= 1 << bit;
                if let Ok(value) = decode::<Sample>(&bad, "k") {
                    assert_eq!(value, Sample { number: 41 }, "bit {bit} of byte {index}");
                }
            }
        }
    }

    #[test]
    fn a_newer_version_is_refused_with_a_way_out() {
        let text = String::from_utf8(encode(&Sample { number: 1 }).to_vec()).unwrap();
        let newer = text.replace("\"version\":1", "\"version\":2");
        let error = decode::<Sample>(newer.as_bytes(), "k").unwrap_err();
        assert!(error.report().contains("newer"), "{}", error.report());
        assert!(error.fix().is_some());
    }
}
