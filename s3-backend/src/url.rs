//! Store URLs: where the objects are, and how that place likes to be spoken to. Never a secret.
//!
//! ```text
//! file:///absolute/directory
//! s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=…&path_style=true
//!                   &if_match=auto|quoted|unquoted&checksums=auto|on|off
//! ```
//!
//! Values may be percent-encoded. An unknown parameter is an error: a setting that is misspelt must
//! not be a setting that is ignored. Credentials come from the environment, from profiles and from the
//! instance; a URL that carries any is refused, for URLs end up in logs.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::dialect::{Checksums, IfMatch};
use crate::error::{Error, Kind};
use crate::key::ObjectKey;

/// A parsed store URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUrl {
    /// A directory.
    File(PathBuf),
    /// A bucket, or a part of one.
    S3(S3Url),
}

/// Where and how to reach a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Url {
    /// The bucket.
    pub bucket: String,
    /// What all keys begin with, without slashes at the ends; may be empty.
    pub prefix: String,
    /// The server, where it is not AWS.
    pub endpoint: Option<String>,
    /// The region; else the environment's.
    pub region: Option<String>,
    /// `endpoint/bucket/key` rather than `bucket.endpoint/key`; the default with an endpoint.
    pub path_style: bool,
    /// The form of ETags in `If-Match`; `None` lets the probe find it.
    pub if_match: Option<IfMatch>,
    /// Whether puts carry our CRC32; `None` lets the first put find out.
    pub checksums: Option<Checksums>,
}

impl FromStr for StoreUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).map_err(|rule| {
            // Of a URL that may hold a secret, only the scheme is repeated.
            let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
            Error::new(Kind::Invalid, format!("store url {:?}: {rule}", format!("{scheme}://…")))
        })
    }
}

fn parse(text: &str) -> Result<StoreUrl, String> {
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err("must be file:///directory or s3://bucket/prefix".into());
    };
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    match scheme {
        "file" => parse_file(place, query),
        "s3" => parse_s3(place, query).map(StoreUrl::S3),
        _ => Err("the scheme must be file or s3".into()),
    }
}

fn parse_file(place: &str, query: &str) -> Result<StoreUrl, String> {
    if !query.is_empty() {
        return Err("a directory has no parameters".into());
    }
    if !place.starts_with('/') {
        return Err("the directory must be absolute: file:///directory".into());
    }
    Ok(StoreUrl::File(PathBuf::from(decode(place)?)))
}

fn parse_s3(place: &str, query: &str) -> Result<S3Url, String> {
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    if bucket.contains(['@', ':']) {
        return Err("credentials do not belong in a url; use AWS_* variables or a profile".into());
    }
    let is_bucket_byte =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
    if !(3..=63).contains(&bucket.len()) || !bucket.bytes().all(is_bucket_byte) {
        return Err("the bucket must have 3 to 63 of [a-z0-9._-]".into());
    }
    let prefix = prefix.trim_end_matches('/');
    if !prefix.is_empty() && (prefix.len() > 100 || ObjectKey::parse(prefix).is_err()) {
        return Err("the prefix must be segments of [a-z0-9._-], 100 bytes at most".into());
    }
    let mut url = S3Url {
        bucket: bucket.into(),
        prefix: prefix.into(),
        endpoint: None,
        region: None,
        path_style: false,
        if_match: None,
        checksums: None,
    };
    let mut path_style = None;
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let value = decode(value)?;
        match name {
            "endpoint" => url.endpoint = Some(check_endpoint(value)?),
            "region" => url.region = Some(check_region(value)?),
            "path_style" => {
                path_style = Some(value.parse().map_err(|_| "path_style must be true or false")?);
            }
            "if_match" => url.if_match = choose(name, &value, IfMatch::from_name)?,
            "checksums" => url.checksums = choose(name, &value, Checksums::from_name)?,
            _ => return Err(format!("unknown parameter {:?}", name.escape_default().to_string())),
        }
    }
    url.path_style = path_style.unwrap_or(url.endpoint.is_some());
    Ok(url)
}

/// A setting that is left to be found out, or fixed.
fn choose<T>(
    name: &str,
    value: &str,
    from_name: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, String> {
    match value {
        "auto" => Ok(None),
        _ => from_name(value).map(Some).ok_or_else(|| format!("{name} has no such value")),
    }
}

fn check_endpoint(value: String) -> Result<String, String> {
    let Some(authority) = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"))
    else {
        return Err("the endpoint must begin with http:// or https://".into());
    };
    if authority.contains('@') {
        return Err("credentials do not belong in a url; use AWS_* variables or a profile".into());
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]/_".contains(&byte);
    if authority.is_empty() || !authority.bytes().all(is_plain) {
        return Err("the endpoint must be scheme, host and port".into());
    }
    Ok(value.trim_end_matches('/').to_owned())
}

fn check_region(value: String) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if value.is_empty() || !value.bytes().all(is_plain) {
        return Err("the region must be of [a-zA-Z0-9-]".into());
    }
    Ok(value)
}

/// Undoes percent-encoding.
fn decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err("a % is not followed by two hexadecimal digits".into());
        };
        bytes.push(u8::try_from(high * 16 + low).expect("two hexadecimal digits are a byte"));
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".into())
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::File(path) => write!(f, "file://{}", path.display()),
            StoreUrl::S3(url) => url.fmt(f),
        }
    }
}

impl fmt::Display for S3Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if !self.prefix.is_empty() {
            write!(f, "/{}", self.prefix)?;
        }
        let path_style =
            (self.path_style != self.endpoint.is_some()).then(|| self.path_style.to_string());
        let parameters = [
            ("endpoint", self.endpoint.clone()),
            ("region", self.region.clone()),
            ("path_style", path_style),
            ("if_match", self.if_match.map(|form| form.name().to_owned())),
            ("checksums", self.checksums.map(|use_| use_.name().to_owned())),
        ];
        let mut separator = '?';
        for (name, value) in parameters {
            if let Some(value) = value {
                write!(f, "{separator}{name}={value}")?;
                separator = '&';
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn same(text: &str) -> StoreUrl {
        let url: StoreUrl = text.parse().unwrap();
        assert_eq!(url.to_string(), text);
        url
    }

    #[track_caller]
    fn refused(text: &str, reason: &str) {
        let error = text.parse::<StoreUrl>().unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.to_string().contains(reason), "{error}");
    }

    #[test]
    fn a_url_says_the_same_when_printed_and_read_again() {
        same("file:///var/lib/blockd/store");
        same("s3://bucket");
        same("s3://bucket/a/b?region=eu-central-1&path_style=true");
        same("s3://bucket/p?endpoint=http://127.0.0.1:9000&if_match=unquoted&checksums=off");
        let StoreUrl::S3(url) = same("s3://bucket/p?endpoint=https://s3.example.org") else {
            panic!("an s3 url");
        };
        assert!(url.path_style, "the default with an endpoint");
        let encoded: StoreUrl =
            "s3://bucket?endpoint=http%3A%2F%2F127.0.0.1%3A9000".parse().unwrap();
        assert_eq!(encoded, "s3://bucket?endpoint=http://127.0.0.1:9000".parse().unwrap());
    }

    #[test]
    fn a_url_with_a_mistake_is_refused_and_named() {
        refused("/dir", "must be file");
        refused("http://x", "scheme");
        refused("file://dir", "absolute");
        refused("file:///dir?x=y", "no parameters");
        refused("s3://", "bucket");
        refused("s3://UPPER", "bucket");
        refused("s3://bucket//x", "prefix");
        refused("s3://bucket?regoin=x", "unknown parameter");
        refused("s3://bucket?region=", "region");
        refused("s3://bucket?path_style=maybe", "path_style");
        refused("s3://bucket?if_match=both", "if_match");
        refused("s3://bucket?endpoint=127.0.0.1", "endpoint");
        refused("s3://bucket?endpoint=%zz", "hexadecimal");
    }

    #[test]
    fn a_secret_in_a_url_is_refused_and_not_repeated() {
        for text in ["s3://key:secret@bucket/p", "s3://bucket?endpoint=http://key:secret@host"] {
            refused(text, "credentials");
            assert!(!text.parse::<StoreUrl>().unwrap_err().chain().contains("secret"));
        }
    }
}
