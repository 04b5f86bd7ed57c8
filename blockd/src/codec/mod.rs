//! The few primitives that blobs, map pages and the blob table are made of.
//!
//! All integers are little-endian; a *varint* is LEB128, seven bits a byte, lowest first, in its
//! shortest form only, so that every value has one encoding. A [`Reader`] never panics and never
//! allocates by a claimed size: [`Reader::count`] holds a count against the bytes that are there.
//! Errors know the offset; the caller adds which object it was.

use std::fmt;

mod objects;
#[cfg(test)]
pub(crate) mod testing;

pub(crate) use objects::{decode_objects, encode_objects};

/// Bytes that are not what an encoder writes: what, and where in the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed {
    what: String,
    offset: usize,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.what, self.offset)
    }
}

impl std::error::Error for Malformed {}

pub(crate) type Decoded<T> = Result<T, Malformed>;

/// Reads an encoding from front to back.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn offset(&self) -> usize {
        self.at
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An error about the bytes just read.
    pub(crate) fn malformed<T>(&self, what: impl Into<String>) -> Decoded<T> {
        Err(Malformed { what: what.into(), offset: self.at })
    }

    pub(crate) fn check(&self, holds: bool, what: &str) -> Decoded<()> {
        if holds { Ok(()) } else { self.malformed(what) }
    }

    pub(crate) fn take(&mut self, len: usize) -> Decoded<&'a [u8]> {
        if len > self.remaining() {
            return self.malformed(format!("{len} bytes expected, {} left", self.remaining()));
        }
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Decoded<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("take gives as many bytes as asked for"))
    }

    pub(crate) fn u8(&mut self) -> Decoded<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Decoded<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Decoded<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The four bytes that say what follows.
    pub(crate) fn magic(&mut self, magic: [u8; 4], what: &str) -> Decoded<()> {
        let found: [u8; 4] = self.array()?;
        self.check(found == magic, what)
    }

    /// A version byte that this code can read.
    pub(crate) fn version(&mut self, newest: u8) -> Decoded<()> {
        match self.u8()? {
            0 => self.malformed("version 0"),
            found if found > newest => self
                .malformed(format!("version {found} is newer than this blockd reads ({newest})")),
            _ => Ok(()),
        }
    }

    pub(crate) fn varint(&mut self) -> Decoded<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let Some(&byte) = self.bytes.get(self.at) else {
                return self.malformed("a varint that does not end");
            };
            self.at += 1;
            let bits = u64::from(byte & 0x7f);
            let overlong = byte == 0 && shift > 0;
            if overlong || bits > u64::MAX >> shift {
                return self.malformed("a varint not in its shortest form");
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        self.malformed("a varint longer than 64 bits")
    }

    /// A varint that must not exceed `max`, as the integer that holds it.
    pub(crate) fn varint_to<T: TryFrom<u64>>(&mut self, max: u64, what: &str) -> Decoded<T> {
        let value = self.varint()?;
        match T::try_from(value) {
            Ok(small) if value <= max => Ok(small),
            _ => self.malformed(format!("{what} {value} exceeds {max}")),
        }
    }

    /// A signed difference to `base`, which must give a value again.
    pub(crate) fn delta(&mut self, base: u64) -> Decoded<u64> {
        let coded = self.varint()?;
        let distance = coded >> 1;
        let value = match coded & 1 {
            0 => base.checked_add(distance),
            _ => base.checked_sub(distance).and_then(|value| value.checked_sub(1)),
        };
        value.map_or_else(|| self.malformed("difference out of range"), Ok)
    }

    /// How many entries follow: at most `max`, and no more than there are bytes for.
    pub(crate) fn count(&mut self, max: usize, what: &str) -> Decoded<usize> {
        let value = self.varint()?;
        match usize::try_from(value) {
            Ok(count) if count <= max && count <= self.remaining() => Ok(count),
            _ => self.malformed(format!(
                "{value} {what}, with a limit of {max} and {} bytes left",
                self.remaining()
            )),
        }
    }

    /// The whole input was read.
    pub(crate) fn end(&self) -> Decoded<()> {
        self.check(self.remaining() == 0, "bytes left over")
    }
}

/// Appends a varint.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(low_byte(value) | 0x80);
        value >>= 7;
    }
    out.push(low_byte(value));
}

/// Appends the difference from `base` to `value`, short when it is small in either direction.
///
/// # Panics
/// When the values lie further apart than 63 bits, which block numbers and LSNs do not.
pub(crate) fn put_delta(out: &mut Vec<u8>, base: u64, value: u64) {
    let coded = if value >= base {
        (value - base).checked_mul(2)
    } else {
        (base - value - 1).checked_mul(2).map(|twice| twice + 1)
    };
    put_varint(out, coded.expect("values of one column lie within 63 bits"));
}

fn low_byte(value: u64) -> u8 {
    value.to_le_bytes()[0]
}

/// Appends the CRC32 of what `out` holds.
pub(crate) fn seal(out: &mut Vec<u8>) -> u32 {
    let crc = crc32fast::hash(out);
    out.extend(crc.to_le_bytes());
    crc
}

/// Splits off the CRC32 that [`seal`] appended, once it was found to be right.
pub(crate) fn unseal(bytes: &[u8]) -> Decoded<(&[u8], u32)> {
    let Some((content, stored)) = bytes.split_last_chunk::<4>() else {
        return Err(Malformed { what: format!("{} bytes are too few", bytes.len()), offset: 0 });
    };
    let (stored, computed) = (u32::from_le_bytes(*stored), crc32fast::hash(content));
    if stored != computed {
        let what = format!("crc mismatch: stored {stored:#010x}, computed {computed:#010x}");
        return Err(Malformed { what, offset: content.len() });
    }
    Ok((content, computed))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_have_one_encoding_and_read_back(value: u64, base in 0..1u64 << 62, to in 0..1u64 << 62) {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            put_delta(&mut out, base, to);
            let mut reader = Reader::new(&out);
            prop_assert_eq!(reader.varint().unwrap(), value);
            prop_assert_eq!(reader.delta(base).unwrap(), to);
            reader.end().unwrap();
        }

        #[test]
        fn what_reads_as_a_varint_is_its_encoding(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut reader = Reader::new(&bytes);
            if let Ok(value) = reader.varint() {
                let mut again = Vec::new();
                put_varint(&mut again, value);
                prop_assert_eq!(&again[..], &bytes[..reader.offset()]);
            }
        }
    }

    #[test]
    fn a_count_beyond_the_bytes_is_refused_before_it_is_believed() {
        let mut out = Vec::new();
        put_varint(&mut out, 1 << 40);
        assert!(Reader::new(&out).count(usize::MAX, "things").is_err());
    }
}
