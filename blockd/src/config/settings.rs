//! The one list of settings. Each line of it is a flag of `serve`, an environment variable, a line of
//! the file and a line of `blockd config check`; `Config` gives it its type and its bounds.

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Its flag without `--`, and its key in the file.
    pub name: &'static str,
    /// What stands for its value in the help.
    pub placeholder: &'static str,
    /// The value nobody set; `{state-dir}` and `{runtime-dir}` stand for those settings.
    pub default: &'static str,
    /// One line for people.
    pub help: &'static str,
}

impl Setting {
    /// Its environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("BLOCKD_{}", self.name.to_ascii_uppercase().replace('-', "_"))
    }
}

/// Settings that belong together.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Its heading in the help and in the file.
    pub title: &'static str,
    /// Its settings.
    pub settings: &'static [Setting],
}

/// Every setting, in the order in which they are explained. The two folders that defaults refer to
/// come first.
pub fn all() -> impl Iterator<Item = &'static Setting> {
    SECTIONS.iter().flat_map(|section| section.settings)
}

const fn setting(
    name: &'static str,
    placeholder: &'static str,
    default: &'static str,
    help: &'static str,
) -> Setting {
    Setting { name, placeholder, default, help }
}

/// The settings by section.
pub const SECTIONS: &[Section] = &[
    Section {
        title: "Places",
        settings: &[
            setting(
                "state-dir",
                "DIR",
                "/var/lib/blockd",
                "identity of this host, log and cache; one daemon per folder",
            ),
            setting(
                "runtime-dir",
                "DIR",
                "/run/blockd",
                "sockets and the staging ring: what a reboot may remove",
            ),
            setting(
                "control",
                "PATH",
                "{runtime-dir}/control.sock",
                "the socket that the other commands talk to",
            ),
            setting(
                "store",
                "URL",
                "file://{state-dir}/store",
                "the object store: file:///dir, or s3://bucket/prefix[?endpoint=URL&region=R&path_style=true]",
            ),
        ],
    },
    Section {
        title: "Log",
        settings: &[
            setting("log-dir", "DIR", "{state-dir}/log", "the write-ahead log, on local NVMe"),
            setting(
                "log-bytes-max",
                "SIZE",
                "8G",
                "room for writes that the store does not hold yet; full, writes stall",
            ),
            setting(
                "log-segments-ready",
                "COUNT",
                "4",
                "segments of 16 MiB zeroed ahead, so that writes never wait for one",
            ),
            setting(
                "allow-buffered-log",
                "BOOL",
                "false",
                "go on where O_DIRECT does not work, through the page cache",
            ),
            setting(
                "log-sync",
                "HOW",
                "auto",
                "how a flush is made stable: auto (measured at start), fdatasync or dsync",
            ),
            setting(
                "staging-bytes",
                "SIZE",
                "64M",
                "the ring in shared memory that writes are acknowledged from; part of memory-bytes-max",
            ),
            setting(
                "staging-path",
                "PATH",
                "{runtime-dir}/staging",
                "the ring's file; not on tmpfs, writes are acknowledged from the log",
            ),
        ],
    },
    Section {
        title: "Cache and memory",
        settings: &[
            setting("cache-dir", "DIR", "{state-dir}/cache", "the read cache, on local NVMe"),
            setting("cache-bytes-max", "SIZE", "10G", "room for the read cache"),
            setting(
                "memory-bytes-max",
                "SIZE",
                "256M",
                "budget of the daemon: the ring, then of the rest a half for map pages, a quarter each for the dirty index and caches",
            ),
        ],
    },
    Section {
        title: "Drain",
        settings: &[
            setting("drain-concurrency", "COUNT", "4", "blobs uploaded at once"),
            setting("cut-bytes", "SIZE", "16M", "undrained data that starts an upload"),
            setting(
                "cut-age",
                "DURATION",
                "5s",
                "age of the oldest undrained write that starts one",
            ),
            setting(
                "checkpoint-tail-blobs-max",
                "COUNT",
                "64",
                "blobs whose footers the next host reads at attach; more start a checkpoint of the map",
            ),
            setting(
                "checkpoint-tail-bytes-max",
                "SIZE",
                "512M",
                "bytes of blobs since the last checkpoint; more start one",
            ),
            setting("compression", "HOW", "zstd", "of blobs: zstd (where it pays) or none"),
        ],
    },
    Section {
        title: "Lease",
        settings: &[
            setting(
                "lease-time",
                "DURATION",
                "30s",
                "a holder whose heartbeat stands still for this long is silent",
            ),
            setting("heartbeat-interval", "DURATION", "10s", "at most half of lease-time"),
        ],
    },
    Section {
        title: "Limits",
        settings: &[
            setting("connections-max", "COUNT", "1024", "NBD connections"),
            setting(
                "in-flight-bytes-max",
                "SIZE",
                "64M",
                "bytes of requests in flight per NBD connection; more wait",
            ),
            setting(
                "handshake-timeout",
                "DURATION",
                "10s",
                "an NBD client that has not chosen an export by then is dropped",
            ),
            setting(
                "control-timeout",
                "DURATION",
                "30s",
                "a control call gives up after this long without an answer from the store",
            ),
            setting(
                "log-level",
                "FILTER",
                "info",
                "messages on stderr: error, warn, info, debug, trace, or a filter such as info,wal=debug",
            ),
        ],
    },
];
