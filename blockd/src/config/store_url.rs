//! Where the object store is: `file:///dir`, or `s3://bucket/prefix?endpoint=…&region=…&path_style=true`.
//!
//! A URL holds no secrets: credentials come from the `AWS_*` environment, a profile or the instance. One
//! that has a place for them (user information, an unknown parameter) is refused, and neither the
//! error nor anything else repeats that text, so no message or list of settings can give them away.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A validated store URL. Its `Display` is the URL again, without anything that could be secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// A local directory, absolute.
    File(PathBuf),
    /// A bucket of an S3-compatible store.
    S3(S3Url),
}

/// The parts of an `s3://` URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Url {
    /// The bucket.
    pub bucket: String,
    /// What every key starts with, without a slash at either end; may be empty.
    pub prefix: String,
    /// The server, in place of AWS: `http://127.0.0.1:9000`.
    pub endpoint: Option<String>,
    /// The region, in place of what the environment says.
    pub region: Option<String>,
    /// Whether the bucket is in the path rather than in the host's name.
    pub path_style: bool,
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("file://") {
            parse_file(path)
        } else if let Some(rest) = text.strip_prefix("s3://") {
            parse_s3(rest).map(Self::S3)
        } else {
            Err("a store url starts with file:// or s3://".to_owned())
        }
    }
}

fn parse_file(path: &str) -> Result<StoreUrl, String> {
    if path.contains(['?', '#']) {
        return Err("a file:// url takes no parameters".to_owned());
    }
    let path = decode(path)?;
    let absolute = path.starts_with('/') && path.split('/').all(|part| part != "..");
    if !absolute || path.contains('\0') {
        return Err("a file:// url needs an absolute path, as in file:///srv/blockd".to_owned());
    }
    Ok(StoreUrl::File(PathBuf::from(path)))
}

fn parse_s3(rest: &str) -> Result<S3Url, String> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    if bucket.contains(['@', ':']) {
        return Err("credentials do not belong in the store url; \
                    use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
            .to_owned());
    }
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    if bucket.is_empty() || !bucket.bytes().all(legal) {
        return Err("an s3:// url names a bucket, as in s3://bucket/prefix".to_owned());
    }
    let prefix = decode(prefix.strip_suffix('/').unwrap_or(prefix))?;
    let bad_part = |part: &str| part.is_empty() || part == "." || part == "..";
    let control = prefix.chars().any(char::is_control);
    if !prefix.is_empty() && (control || prefix.split('/').any(bad_part)) {
        return Err(
            "the prefix of an s3:// url has an empty, dotted or unprintable part".to_owned()
        );
    }
    let mut url = S3Url {
        bucket: bucket.to_owned(),
        prefix,
        endpoint: None,
        region: None,
        path_style: false,
    };
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        set_parameter(&mut url, name, decode(value)?)?;
    }
    Ok(url)
}

fn set_parameter(url: &mut S3Url, name: &str, value: String) -> Result<(), String> {
    match name {
        "endpoint" => url.endpoint = Some(check_endpoint(value)?),
        "region" => {
            let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
            if value.is_empty() || !value.bytes().all(legal) {
                return Err("region is not a region's name".to_owned());
            }
            url.region = Some(value);
        }
        "path_style" => {
            url.path_style = value.parse().map_err(|_| "path_style is true or false".to_owned())?;
        }
        _ => return Err("an s3:// url takes endpoint, region and path_style only".to_owned()),
    }
    Ok(())
}

fn check_endpoint(value: String) -> Result<String, String> {
    let host = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
    let Some(host) = host else {
        return Err("endpoint starts with http:// or https://".to_owned());
    };
    let host = host.strip_suffix('/').unwrap_or(host);
    if host.contains('@') {
        return Err("credentials do not belong in the endpoint; \
                    use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
            .to_owned());
    }
    let legal =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':' | b'[' | b']' | b'_');
    if host.is_empty() || !host.bytes().all(legal) {
        return Err(
            "endpoint is a scheme, a host and a port, as in http://127.0.0.1:9000".to_owned()
        );
    }
    Ok(value.strip_suffix('/').map(str::to_owned).unwrap_or(value))
}

/// Decodes `%41`. The text is not repeated in the error.
fn decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first != b'%' {
            bytes.push(first);
            rest = after;
            continue;
        }
        let digits = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits
            .filter(|two| two.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|two| u8::from_str_radix(two, 16).ok())
            .ok_or("a % in a url is followed by two hexadecimal digits")?;
        bytes.push(byte);
        rest = &after[2..];
    }
    String::from_utf8(bytes).map_err(|_| "the url is not utf-8 after decoding".to_owned())
}

/// Encodes what would end the part of a URL early.
fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '%' => encoded.push_str("%25"),
            '?' => encoded.push_str("%3F"),
            '#' => encoded.push_str("%23"),
            c => encoded.push(c),
        }
    }
    encoded
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = match self {
            Self::File(path) => return write!(f, "file://{}", encode(&path.to_string_lossy())),
            Self::S3(url) => url,
        };
        write!(f, "s3://{}", url.bucket)?;
        if !url.prefix.is_empty() {
            write!(f, "/{}", encode(&url.prefix))?;
        }
        let path_style = url.path_style.then(|| "true".to_owned());
        let parameters =
            [("endpoint", &url.endpoint), ("region", &url.region), ("path_style", &path_style)];
        let set = parameters.iter().filter_map(|(name, value)| value.as_ref().map(|v| (name, v)));
        for (index, (name, value)) in set.enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_reads_back_as_what_it_shows() {
        for (text, shown) in [
            ("file:///srv/blockd", "file:///srv/blockd"),
            ("file:///srv/my%20disks%3f", "file:///srv/my disks%3F"),
            ("s3://b", "s3://b"),
            ("s3://b/", "s3://b"),
            ("s3://my.bucket/a/b/", "s3://my.bucket/a/b"),
            (
                "s3://b/p?region=eu-west-1&endpoint=http://127.0.0.1:9000/&path_style=true",
                "s3://b/p?endpoint=http://127.0.0.1:9000&region=eu-west-1&path_style=true",
            ),
            (
                "s3://b?endpoint=https%3A%2F%2F%5B::1%5D:9000&path_style=false",
                "s3://b?endpoint=https://[::1]:9000",
            ),
        ] {
            let url = text.parse::<StoreUrl>().unwrap();
            assert_eq!(url.to_string(), shown, "{text}");
            assert_eq!(shown.parse::<StoreUrl>().unwrap(), url, "{text}");
        }
    }

    #[test]
    fn each_wrong_url_is_refused_and_its_text_is_not_repeated() {
        for text in [
            "",
            "hunter2",
            "http://hunter2",
            "file://",
            "file://hunter2/x",
            "file:///hunter2/../x",
            "file:///x?hunter2",
            "file:///x%4",
            "file:///x%zz",
            "file:///x%00",
            "file:///%ff",
            "s3://",
            "s3:///hunter2",
            "s3://key:hunter2@bucket/p",
            "s3://buc ket/hunter2",
            "s3://b/hunter2//c",
            "s3://b/../hunter2",
            "s3://b/hunter2%0a",
            "s3://b?secret_key=hunter2",
            "s3://b?hunter2",
            "s3://b?path_style=hunter2",
            "s3://b?region=",
            "s3://b?region=hunter2!",
            "s3://b?endpoint=hunter2",
            "s3://b?endpoint=http://",
            "s3://b?endpoint=http://key:hunter2@h",
            "s3://b?endpoint=http://key%3Ahunter2%40h",
            "s3://b?endpoint=http://h/hunter2",
        ] {
            let message = text.parse::<StoreUrl>().expect_err(text);
            assert!(!message.contains("hunter2"), "{text:?}: {message}");
        }
    }
}
