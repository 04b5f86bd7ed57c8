//! Names of objects and of their versions. Strings end here: what holds an [`ObjectKey`] may be put
//! into a URL, an XML body or a path without another thought.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Kind};

/// The longest key, in bytes. S3 allows 1,024; the rest is for the prefix of the store.
pub const KEY_BYTES_MAX: usize = 900;

/// The longest part of a key between two slashes: a file name may have 255 bytes, and the directory
/// store adds a mark.
pub const SEGMENT_BYTES_MAX: usize = 240;

/// A relative key: `[a-z0-9._-]` in segments parted by single slashes, none of them `.` or `..`.
///
/// The narrow alphabet is what makes every store agree: nothing to escape, nothing to fold, no
/// segment with a meaning to a file system.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// Checks and takes a key.
    ///
    /// # Errors
    /// [`Kind::Invalid`], with the rule that is broken.
    pub fn parse(text: impl AsRef<str>) -> Result<Self, Error> {
        let text = text.as_ref();
        match broken_rule(text) {
            None => Ok(Self(text.into())),
            Some(rule) => {
                Err(Error::new(Kind::Invalid, format!("key {:?}: {rule}", text.escape_default())))
            }
        }
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether `text` may be the beginning of a key: the same alphabet, and nothing that no key has.
pub(crate) fn check_prefix(text: &str) -> Result<(), Error> {
    let invalid = |rule| {
        Err(Error::new(Kind::Invalid, format!("prefix {:?}: {rule}", text.escape_default())))
    };
    if text.len() > KEY_BYTES_MAX {
        return invalid("longer than 900 bytes");
    }
    if !text.bytes().all(is_key_byte) {
        return invalid("has bytes outside [a-z0-9._/-]");
    }
    if text.starts_with('/') || text.contains("//") {
        return invalid("has an empty segment");
    }
    Ok(())
}

fn is_key_byte(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'/')
}

fn broken_rule(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return Some("is empty");
    }
    if text.len() > KEY_BYTES_MAX {
        return Some("longer than 900 bytes");
    }
    if !text.bytes().all(is_key_byte) {
        return Some("has bytes outside [a-z0-9._/-]");
    }
    for segment in text.split('/') {
        match segment {
            "" => return Some("has an empty segment"),
            "." | ".." => return Some("has a segment of dots only"),
            _ if segment.len() > SEGMENT_BYTES_MAX => {
                return Some("has a segment longer than 240 bytes");
            }
            _ => {}
        }
    }
    None
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The version of an object, as its store names it. Opaque; equal exactly when the version is.
///
/// Kept without the quotes that HTTP puts around it: stores disagree about them.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ETag(Arc<str>);

impl ETag {
    /// Takes the tag of a reply. None if it is empty or weak (a weak tag cannot guard a swap).
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let bare = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
        let usable = !bare.is_empty()
            && !bare.starts_with("W/")
            && bare.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"');
        usable.then(|| Self(bare.into()))
    }

    /// The tag without quotes.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ETag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ETag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, good: bool) {
        assert_eq!(ObjectKey::parse(text).is_ok(), good, "{text:?}");
    }

    #[test]
    fn a_key_is_refused_unless_every_store_can_hold_it() {
        check("format.json", true);
        check("d/ab12/b/0001-ff-2", true);
        check("a..b/.c", true);
        check(&"k".repeat(SEGMENT_BYTES_MAX), true);
        check(&"k".repeat(SEGMENT_BYTES_MAX + 1), false);
        check(&["k".repeat(200).as_str(); 5].join("/"), false);
        for bad in ["", "/a", "a/", "a//b", ".", "a/..", "../a", "A", "a b", "a%20", "ä", "a\n"] {
            check(bad, false);
        }
    }

    #[test]
    fn an_etag_is_the_same_quoted_and_unquoted_and_never_weak() {
        assert_eq!(ETag::parse("\"abc\""), ETag::parse(" abc "));
        for bad in ["", "\"\"", "W/\"abc\"", "a b", "\"a\"b\""] {
            assert_eq!(ETag::parse(bad), None, "{bad:?}");
        }
    }
}
