//! The settings of the daemon: from texts in layers to a [`Config`] whose values are valid.
//!
//! Low: `layers` finds the text of every setting in `settings` (flag, else `BLOCKD_…` variable, else
//! file, else default) and remembers where it was. High: [`Config`] has types, bounds and relations;
//! whatever is wrong is one error that names the place, the reason and how to write it right.

mod layers;
pub mod settings;
pub mod units;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use s3_backend::StoreUrl;

use crate::error::{Error, Result};
use layers::wrong;
pub use layers::{Environment, Flags, Origin, Value};

/// The file that is read when none is named; it may be missing.
pub const FILE_DEFAULT: &str = "/etc/blockd/blockd.toml";

/// Size of a segment of the log: what `log-bytes-max` is counted in.
pub const LOG_SEGMENT_BYTES: u64 = 16 << 20;

/// Longest path that the kernel takes as the address of a unix socket.
pub const SOCKET_PATH_LEN_MAX: usize = 107;

/// How a flush is made stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogSync {
    /// Measured at start.
    Auto,
    /// `fdatasync` after the writes.
    Fdatasync,
    /// `RWF_DSYNC` on the writes.
    Dsync,
}

/// How blobs are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// zstd, level 1, where it pays.
    Zstd,
    /// Stored raw.
    None,
}

/// The settings, valid. Each field is the setting of its name; see [`settings::SECTIONS`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "each field is documented once, in the list of settings")]
pub struct Config {
    pub state_dir: PathBuf,
    pub runtime_dir: PathBuf,
    pub control: PathBuf,
    pub store: StoreUrl,
    pub log_dir: PathBuf,
    pub log_bytes_max: u64,
    pub log_segments_ready: usize,
    pub allow_buffered_log: bool,
    pub log_sync: LogSync,
    pub staging_bytes: u64,
    pub staging_path: PathBuf,
    pub cache_dir: PathBuf,
    pub cache_bytes_max: u64,
    pub memory_bytes_max: u64,
    pub drain_concurrency: usize,
    pub cut_bytes: u64,
    pub cut_age: Duration,
    pub checkpoint_tail_blobs_max: usize,
    pub checkpoint_tail_bytes_max: u64,
    pub compression: Compression,
    pub lease_time: Duration,
    pub heartbeat_interval: Duration,
    pub connections_max: usize,
    pub in_flight_bytes_max: u64,
    pub handshake_timeout: Duration,
    pub control_timeout: Duration,
    pub log_level: String,
}

/// The parts of `memory-bytes-max`: the ring first, then of the rest a half for map pages and a quarter
/// each for the dirty index and for caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The staging ring.
    pub staging_bytes: u64,
    /// Pages of the chunk maps and blob tables.
    pub map_bytes: u64,
    /// Dirty indexes of all disks.
    pub dirty_bytes: u64,
    /// Blocks and the index of the read cache.
    pub cache_bytes: u64,
}

/// The valid settings, and for each its text and where that was.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The settings.
    pub config: Config,
    /// By name; the store's text is without anything that could be secret.
    pub values: BTreeMap<&'static str, Value>,
}

impl Resolved {
    /// Resolves the settings of `serve`.
    ///
    /// `file` is what `--config` names. Without it the file is `BLOCKD_CONFIG`'s, or the default one.
    ///
    /// # Errors
    /// The first thing that is wrong: place, reason and what to write.
    pub fn load(file: Option<&Path>, flags: &Flags, environment: Environment<'_>) -> Result<Self> {
        let named = match file {
            Some(file) => Some(file.to_owned()),
            None => layers::read_variable("BLOCKD_CONFIG", environment)?.map(PathBuf::from),
        };
        let file = match named {
            Some(path) => layers::read_file(&path, false)?,
            None => layers::read_file(Path::new(FILE_DEFAULT), true)?,
        };
        Self::from_layers(flags, environment, &file)
    }

    fn from_layers(
        flags: &Flags,
        environment: Environment<'_>,
        file: &BTreeMap<&'static str, Value>,
    ) -> Result<Self> {
        let mut values = layers::merge(flags, environment, file)?;
        let config = Config::parse(&values)?;
        config.check(&values)?;
        if let Some(store) = values.get_mut("store") {
            store.text = config.store.to_string();
        }
        Ok(Self { config, values })
    }
}

impl Config {
    fn parse(values: &BTreeMap<&'static str, Value>) -> Result<Self> {
        let texts = Texts { values };
        Ok(Self {
            state_dir: texts.folder("state-dir")?,
            runtime_dir: texts.folder("runtime-dir")?,
            control: texts.socket("control")?,
            store: texts.parse("store", |text| {
                text.parse().map_err(|error: s3_backend::Error| {
                    format!("{error}; write file:///dir or s3://bucket/prefix")
                })
            })?,
            log_dir: texts.folder("log-dir")?,
            log_bytes_max: texts.size("log-bytes-max", 8 * LOG_SEGMENT_BYTES, u64::MAX)?,
            log_segments_ready: texts.count("log-segments-ready", 1, 64)?,
            allow_buffered_log: texts.parse("allow-buffered-log", parse_bool)?,
            log_sync: texts.parse("log-sync", parse_log_sync)?,
            staging_bytes: texts.size("staging-bytes", 4 << 20, 64 << 30)?,
            staging_path: texts.folder("staging-path")?,
            cache_dir: texts.folder("cache-dir")?,
            cache_bytes_max: texts.size("cache-bytes-max", 16 << 20, u64::MAX)?,
            memory_bytes_max: texts.size("memory-bytes-max", 64 << 20, u64::MAX)?,
            drain_concurrency: texts.count("drain-concurrency", 1, 256)?,
            cut_bytes: texts.size("cut-bytes", 1 << 20, 1 << 30)?,
            cut_age: texts.duration("cut-age", Duration::from_millis(100))?,
            checkpoint_tail_blobs_max: texts.count("checkpoint-tail-blobs-max", 1, 1024)?,
            checkpoint_tail_bytes_max: texts.size(
                "checkpoint-tail-bytes-max",
                1 << 20,
                u64::MAX,
            )?,
            compression: texts.parse("compression", parse_compression)?,
            lease_time: texts.duration("lease-time", Duration::from_secs(1))?,
            heartbeat_interval: texts.duration("heartbeat-interval", Duration::from_millis(100))?,
            connections_max: texts.count("connections-max", 1, 1 << 20)?,
            in_flight_bytes_max: texts.size("in-flight-bytes-max", 32 << 20, 64 << 30)?,
            handshake_timeout: texts.duration("handshake-timeout", Duration::from_millis(100))?,
            control_timeout: texts.duration("control-timeout", Duration::from_millis(100))?,
            log_level: texts.parse("log-level", parse_log_level)?,
        })
    }

    /// What settings must be to each other. The error is at the setting that somebody wrote.
    fn check(&self, values: &BTreeMap<&'static str, Value>) -> Result<()> {
        let texts = Texts { values };
        let ready = u64::try_from(self.log_segments_ready).unwrap_or(u64::MAX);
        let relations = [
            (
                self.heartbeat_interval <= self.lease_time / 2,
                ["heartbeat-interval", "lease-time"],
                "is more than half of",
            ),
            (
                ready.saturating_mul(4 * LOG_SEGMENT_BYTES) <= self.log_bytes_max,
                ["log-segments-ready", "log-bytes-max"],
                "takes more than a quarter of",
            ),
            (
                self.cut_bytes <= self.log_bytes_max / 4,
                ["cut-bytes", "log-bytes-max"],
                "is more than a quarter of",
            ),
            (
                self.staging_bytes <= self.memory_bytes_max / 2,
                ["staging-bytes", "memory-bytes-max"],
                "is more than half of",
            ),
        ];
        match relations.into_iter().find(|(holds, ..)| !holds) {
            Some((_, names, reason)) => Err(texts.contradiction(names, reason)),
            None => Ok(()),
        }
    }

    /// How `memory-bytes-max` is divided.
    #[must_use]
    pub fn memory(&self) -> MemoryBudget {
        let rest = self.memory_bytes_max - self.staging_bytes;
        MemoryBudget {
            staging_bytes: self.staging_bytes,
            map_bytes: rest / 2,
            dirty_bytes: rest / 4,
            cache_bytes: rest / 4,
        }
    }

    /// Whether losing the state directory would lose the store as well: fine for a first try only.
    #[must_use]
    pub fn store_is_inside_state_dir(&self) -> bool {
        matches!(&self.store, StoreUrl::File(path) if path.starts_with(&self.state_dir))
    }
}

/// Typed access to the texts. Every error names the place of the text.
struct Texts<'a> {
    values: &'a BTreeMap<&'static str, Value>,
}

impl Texts<'_> {
    fn get(&self, name: &str) -> &Value {
        self.values.get(name).expect("every setting of the list has a text")
    }

    fn parse<T>(&self, name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<T> {
        let Value { text, origin } = self.get(name);
        parse(text).map_err(|reason| {
            let (reason, fix) = match reason.split_once("; ") {
                Some((reason, fix)) => (reason, Some(fix)),
                None => (reason.as_str(), None),
            };
            let error = match origin {
                // These places are the setting's own.
                Origin::Flag(_) | Origin::Variable(_) => wrong(origin, reason),
                Origin::File { .. } | Origin::Default => {
                    wrong(origin, &format!("{name}: {reason}"))
                }
            };
            error.with_fix(fix.map_or_else(|| format!("correct {name}"), str::to_owned))
        })
    }

    fn folder(&self, name: &str) -> Result<PathBuf> {
        self.parse(name, |text| {
            let path = PathBuf::from(text);
            if !path.is_absolute() || text.contains('\0') {
                return Err(format!("{text:?} is not an absolute path; start it with /"));
            }
            Ok(path)
        })
    }

    fn socket(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder(name)?;
        self.parse(name, |text| match text.len() {
            0..=SOCKET_PATH_LEN_MAX => Ok(path),
            len => Err(format!(
                "a path of {len} bytes; a socket's path has at most {SOCKET_PATH_LEN_MAX}"
            )),
        })
    }

    fn size(&self, name: &str, min: u64, max: u64) -> Result<u64> {
        self.parse(name, |text| {
            let bytes = units::parse_size(text)?;
            if bytes < min {
                return Err(format!("{text} is too small; at least {}", units::show_size(min)));
            }
            if bytes > max {
                return Err(format!("{text} is too large; at most {}", units::show_size(max)));
            }
            Ok(bytes)
        })
    }

    fn count(&self, name: &str, min: usize, max: usize) -> Result<usize> {
        self.parse(name, |text| match text.parse() {
            Ok(count) if (min..=max).contains(&count) => Ok(count),
            _ => Err(format!("{text:?} is not a count; from {min} to {max}")),
        })
    }

    fn duration(&self, name: &str, min: Duration) -> Result<Duration> {
        self.parse(name, |text| {
            let duration = units::parse_duration(text)?;
            if duration < min {
                let min = units::show_duration(min);
                return Err(format!("{text} is too short; at least {min}"));
            }
            Ok(duration)
        })
    }

    fn contradiction(&self, names: [&str; 2], reason: &str) -> Error {
        let [first, second] = names.map(|name| (name, self.get(name)));
        let at = match first.1.origin {
            Origin::Default => &second.1.origin,
            _ => &first.1.origin,
        };
        let text = format!("{} {} {reason} {} {}", first.0, first.1.text, second.0, second.1.text);
        wrong(at, &text).with_fix(format!("lower {} or raise {}", first.0, second.0))
    }
}

fn parse_bool(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| format!("{text:?} is not a choice; write true or false"))
}

fn parse_log_sync(text: &str) -> Result<LogSync, String> {
    match text {
        "auto" => Ok(LogSync::Auto),
        "fdatasync" => Ok(LogSync::Fdatasync),
        "dsync" => Ok(LogSync::Dsync),
        _ => Err(format!("{text:?} is not a choice; write auto, fdatasync or dsync")),
    }
}

fn parse_compression(text: &str) -> Result<Compression, String> {
    match text {
        "zstd" => Ok(Compression::Zstd),
        "none" => Ok(Compression::None),
        _ => Err(format!("{text:?} is not a choice; write zstd or none")),
    }
}

fn parse_log_level(text: &str) -> Result<String, String> {
    match tracing_subscriber::EnvFilter::try_new(text) {
        Ok(_) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(format!("{text:?} is not a level; write error, warn, info, debug or trace")),
    }
}
