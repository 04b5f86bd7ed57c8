//! A real object store: one SeaweedFS server of the test's own, on free ports, gone with the test.
//!
//! The binary is `BLOCKD_TEST_WEED`, or `weed` in `PATH`, or `weed` below `~/.cache/blockd`. Its
//! filer answers without signatures, so that a test can look at objects, and damage them, behind
//! the daemon's back.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::random::Random;
use crate::tools;
use crate::wait;

/// The bucket that every server has.
pub const BUCKET: &str = "disks";
const ACCESS_KEY: &str = "AKBLOCKDTEST";
const SECRET_KEY: &str = "blockd-test-secret-0123456789";
const START_LIMIT: Duration = Duration::from_secs(30);

/// What a client needs in its environment to be let in.
pub const CREDENTIALS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
    ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
    ("AWS_EC2_METADATA_DISABLED", "true"),
];

/// The URL of a store at `endpoint`, below `prefix`.
#[must_use]
pub fn url(endpoint: SocketAddr, prefix: &str) -> String {
    format!("s3://{BUCKET}/{prefix}?endpoint=http://{endpoint}&region=us-east-1&path_style=true")
}

/// A running server.
#[derive(Debug)]
pub struct SeaweedFs {
    child: Child,
    /// Held for the server, which lives in it.
    _place: TempDir,
    s3: SocketAddr,
    filer: SocketAddr,
}

impl SeaweedFs {
    /// Starts a server with an empty bucket; none, after saying why, where there is no binary.
    #[track_caller]
    #[must_use]
    pub fn start() -> Option<Self> {
        let Some(weed) = find_weed() else {
            tools::skip("weed (SeaweedFS) is not installed");
            return None;
        };
        // The server takes other ports without a word when one is busy, so a start that does not
        // answer where it should is tried again elsewhere.
        let server = (0..5).find_map(|_attempt| Self::launch(&weed));
        Some(server.expect("one of five starts finds its ports free"))
    }

    fn launch(weed: &Path) -> Option<Self> {
        let place = crate::process::short_temp_dir();
        let config = place.path().join("s3.json");
        std::fs::write(&config, s3_config()).expect("write the server's configuration");
        std::fs::create_dir(place.path().join("data")).expect("make the server's folder");
        let ports = free_ports(9);
        let mut command = Command::new(weed);
        command.arg("mini").args(arguments(place.path(), &config, &ports));
        command.env("HOME", place.path());
        let log = std::fs::File::create(place.path().join("log")).expect("make the server's log");
        let errors = log.try_clone().expect("a file handle can be doubled");
        let child = command.stdin(Stdio::null()).stdout(log).stderr(errors).spawn();
        let local = |index: usize| SocketAddr::from((Ipv4Addr::LOCALHOST, ports[index]));
        let mut server = Self {
            child: child.expect("start weed"),
            _place: place,
            s3: local(0),
            filer: local(2),
        };
        server.await_bucket().then_some(server)
    }

    /// Waits until the bucket is there; false if the server ended or answers elsewhere.
    fn await_bucket(&mut self) -> bool {
        let watch = wait::Stopwatch::start();
        while watch.elapsed() < START_LIMIT {
            let bucket = format!("/buckets/{BUCKET}/");
            let listens = TcpStream::connect(self.s3).is_ok();
            let is_there = http(self.filer, "GET", &bucket, &[]).is_ok_and(|reply| reply.0 == 200);
            if listens && is_there {
                return true;
            }
            if self.child.try_wait().is_ok_and(|status| status.is_some()) {
                return false;
            }
            wait::pause(Duration::from_millis(50));
        }
        false
    }

    /// Where it speaks S3.
    #[must_use]
    pub fn endpoint(&self) -> SocketAddr {
        self.s3
    }

    /// The URL of a store in the bucket below `prefix`.
    #[must_use]
    pub fn url(&self, prefix: &str) -> String {
        url(self.s3, prefix)
    }

    /// Every object below `prefix` with its size, in the order of keys.
    #[must_use]
    pub fn objects(&self, prefix: &str) -> Vec<(String, u64)> {
        let mut found = Vec::new();
        let mut folders = vec![prefix.trim_end_matches('/').to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in self.entries(&folder) {
                let path = entry["FullPath"].as_str().expect("an entry has a path");
                let key = path.trim_start_matches(&format!("/buckets/{BUCKET}/")).to_owned();
                let is_folder = entry["Mode"].as_u64().is_some_and(|mode| mode & (1 << 31) != 0);
                if is_folder {
                    folders.push(key);
                } else {
                    found.push((key, entry["FileSize"].as_u64().unwrap_or(0)));
                }
            }
        }
        found.sort();
        found
    }

    fn entries(&self, folder: &str) -> Vec<Value> {
        let path = format!("/buckets/{BUCKET}/{folder}/?limit=100000");
        let path = path.replace("//?", "/?");
        let (status, body) = http(self.filer, "GET", &path, &[]).expect("list a folder");
        if status == 404 {
            return Vec::new();
        }
        let listing: Value = serde_json::from_slice(&body).expect("a listing is JSON");
        listing["Entries"].as_array().cloned().unwrap_or_default()
    }

    /// The bytes of an object.
    #[track_caller]
    #[must_use]
    pub fn read(&self, key: &str) -> Vec<u8> {
        let path = format!("/buckets/{BUCKET}/{key}");
        let (status, body) = http(self.filer, "GET", &path, &[]).expect("read an object");
        assert_eq!(status, 200, "read {key}");
        body
    }

    /// Deletes an object behind the daemon's back.
    #[track_caller]
    pub fn delete(&self, key: &str) {
        let path = format!("/buckets/{BUCKET}/{key}");
        let (status, _) = http(self.filer, "DELETE", &path, &[]).expect("delete an object");
        assert!((200..300).contains(&status), "delete {key}: {status}");
    }
}

impl Drop for SeaweedFs {
    fn drop(&mut self) {
        // It takes seconds to end politely, and its data is not needed any more.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn find_weed() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("BLOCKD_TEST_WEED") {
        return Some(PathBuf::from(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let cache = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/blockd"));
    let folders = cache.and_then(|cache| std::fs::read_dir(cache).ok());
    let cached = folders.into_iter().flatten().flatten().map(|entry| entry.path());
    std::env::split_paths(&path)
        .chain(cached.flat_map(|folder| [folder.join("bin"), folder]))
        .map(|folder| folder.join("weed"))
        .find(|candidate| candidate.is_file())
}

fn s3_config() -> String {
    serde_json::json!({"identities": [{
        "name": "blockd",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }]})
    .to_string()
}

fn arguments(place: &Path, config: &Path, ports: &[u16]) -> Vec<String> {
    let mut arguments = vec![
        format!("-dir={}", place.join("data").display()),
        format!("-s3.config={}", config.display()),
        format!("-bucket={BUCKET}"),
    ];
    let fixed = "-ip=127.0.0.1 -ip.bind=127.0.0.1 -master.telemetry=false -webdav=false \
                 -admin.ui=false -s3.autoCreateBucket=false -s3.port.iceberg=0 -s3.port.lance=0";
    arguments.extend(fixed.split_whitespace().map(str::to_owned));
    let named = [
        "s3.port",
        "s3.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "master.port",
        "master.port.grpc",
        "admin.port",
    ];
    arguments.extend(named.iter().zip(ports).map(|(name, port)| format!("-{name}={port}")));
    // Its own worker looks for the admin server at this distance, whatever it is told.
    arguments.push(format!("-admin.port.grpc={}", ports[8] + 10_000));
    arguments
}

/// Ports that nobody listens on, below the range from which outgoing connections are numbered.
fn free_ports(count: usize) -> Vec<u16> {
    let mut random =
        Random::from_seed(getrandom::u64().expect("the system hands out random bytes"));
    let mut held = Vec::new();
    while held.len() < count {
        let port = u16::try_from(random.between(10_000, 22_000)).expect("in the range of ports");
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            held.push((port, listener));
        }
    }
    held.into_iter().map(|(port, _listener)| port).collect()
}

/// One plain HTTP exchange: the status and the body.
fn http(host: SocketAddr, method: &str, path: &str, body: &[u8]) -> io::Result<(u16, Vec<u8>)> {
    let mut stream = TcpStream::connect(host)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut head =
        format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\nAccept: application/json\r\n");
    write!(head, "Content-Length: {}\r\n\r\n", body.len()).expect("a string grows");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply)?;
    let end = reply.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.ok_or_else(|| io::Error::other("a reply without an end of headers"))?;
    let head = String::from_utf8_lossy(&reply[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("a reply without a status"))?;
    Ok((status, reply.split_off(end + 4)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_servers_run_side_by_side_and_are_empty() {
        let (Some(first), Some(second)) = (SeaweedFs::start(), SeaweedFs::start()) else { return };
        assert_ne!(first.endpoint(), second.endpoint());
        assert!(first.objects("").is_empty());
        assert!(second.objects("").is_empty());
    }
}
