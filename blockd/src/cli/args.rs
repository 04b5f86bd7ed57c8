//! The command line, as clap reads it: every command of the contract and its options.
//!
//! Names are checked here, so that a wrong one is refused with its own code before anything is asked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::flags::SettingFlags;
use crate::config::units::{parse_duration, parse_seconds, parse_size};
use crate::control::api::Device;
use crate::control::view::{Access, Durability};
use crate::ids::{DiskName, SnapshotName, Target};

/// Block storage: named disks over NBD, acknowledged from a local log, kept in an object store.
#[derive(Debug, Parser)]
#[command(name = "blockd", version, max_term_width = 100, subcommand_required = true)]
pub struct CommandLine {
    /// Options of every command.
    #[command(flatten)]
    pub common: Common,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// The daemon's control socket [env: BLOCKD_CONTROL] [default: /run/blockd/control.sock]
    #[arg(long, global = true, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Print JSON, also for errors
    #[arg(long, global = true)]
    pub json: bool,
    /// Give up when the store has not answered for so long: seconds, or 500ms, 2m [default: 30s]
    #[arg(long, global = true, value_name = "TIME", value_parser = timeout)]
    pub timeout: Option<Duration>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground
    Serve(Serve),
    /// Make a disk; prints its name
    Create(Create),
    /// List the disks of the store
    List,
    /// Show everything about a disk
    Show(OneDisk),
    /// Count what disks store: live, dead, pinned and shared bytes
    Usage(Usage),
    /// Show the state of the daemon
    Status,
    /// Serve a disk or snapshot over NBD; prints its URI, or the device with --device
    Attach(Attach),
    /// Drain a disk, then release it for other hosts
    Detach(Detach),
    /// Attach a disk to a kernel device and mount it, with a file system made on its first use
    Mount(Mount),
    /// Unmount a disk and detach it
    Umount(Umount),
    /// Return when all acknowledged writes are synced to the log
    Flush(OneTarget),
    /// Return when all acknowledged writes are in the store
    Drain(OneTarget),
    /// Take a snapshot; prints NAME@SNAPSHOT
    Snapshot(Snapshot),
    /// List the snapshots of a disk
    Snapshots(OneDisk),
    /// Make a writable disk from a snapshot, or from a disk; prints its name
    Fork(Fork),
    /// Delete a disk or a snapshot
    Delete(Delete),
    /// Grow a disk, attached or not
    Resize(Resize),
    /// Verify every reference of a disk
    Check(Check),
    /// Make a disk from a log that was left behind; prints its name
    Recover(Recover),
    /// Look at the settings of the daemon
    #[command(subcommand)]
    Config(Config),
}

/// `blockd serve`.
#[derive(Debug, Args)]
pub struct Serve {
    /// The file of settings [env: BLOCKD_CONFIG] [default: /etc/blockd/blockd.toml, may be missing]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The settings.
    #[command(flatten)]
    pub settings: SettingFlags,
}

/// `blockd config …`.
#[derive(Debug, Subcommand)]
pub enum Config {
    /// Print every setting, its value and where that comes from
    Check(Serve),
}

/// A command of one disk.
#[derive(Debug, Args)]
pub struct OneDisk {
    /// The disk
    pub name: DiskName,
}

/// A command of one disk or snapshot.
#[derive(Debug, Args)]
pub struct OneTarget {
    /// The disk or snapshot
    #[arg(value_name = "NAME[@SNAPSHOT]")]
    pub target: Target,
}

/// `blockd create`.
#[derive(Debug, Args)]
pub struct Create {
    /// The name: 1 to 63 lowercase letters, digits and hyphens
    pub name: DiskName,
    /// The size: 10G, 512M; powers of 1024, a multiple of 4 KiB
    #[arg(long, value_parser = disk_size)]
    pub size: u64,
    /// Take a disk that exists with the same settings for an answer
    #[arg(long)]
    pub if_missing: bool,
    /// When a flush is acknowledged
    #[arg(long, value_enum, default_value = "local")]
    pub durability: DurabilityArg,
    /// How far the store may lag behind: writers are slowed, then stalled, at this bound
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub max_lag: Option<Duration>,
}

/// [`Durability`] on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DurabilityArg {
    /// When the log of this host is synced
    Local,
    /// When the store holds it
    Remote,
}

impl From<DurabilityArg> for Durability {
    fn from(durability: DurabilityArg) -> Self {
        match durability {
            DurabilityArg::Local => Self::Local,
            DurabilityArg::Remote => Self::Remote,
        }
    }
}

/// `blockd usage`.
#[derive(Debug, Args)]
pub struct Usage {
    /// One disk; all without it
    pub name: Option<DiskName>,
}

/// [`Access`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AccessArg {
    /// Read and write; one host at a time
    Write,
    /// Read a snapshot or the newest durable state, frozen now; any number of hosts
    Read,
    /// Write a fork made for this attachment
    Branch,
}

impl From<AccessArg> for Access {
    fn from(access: AccessArg) -> Self {
        match access {
            AccessArg::Write => Self::Write,
            AccessArg::Read => Self::Read,
            AccessArg::Branch => Self::Branch,
        }
    }
}

/// `blockd attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// The disk or snapshot
    #[arg(value_name = "NAME[@SNAPSHOT]")]
    pub target: Target,
    /// What the attachment may do [default: write, of a snapshot read]
    #[arg(long, value_enum)]
    pub access: Option<AccessArg>,
    /// Wait so many seconds for another host to release the disk
    #[arg(long, value_name = "SECS", value_parser = parse_seconds)]
    pub wait: Option<Duration>,
    /// Take the disk from a silent host, leaving behind what that host had not drained
    #[arg(long)]
    pub accept_loss: bool,
    /// Listen on this unix socket [default: NAME.sock in the runtime directory]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["tcp", "device"])]
    pub socket: Option<PathBuf>,
    /// Listen on this TCP address
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "device", value_parser = tcp_address)]
    pub tcp: Option<SocketAddr>,
    /// Connect a kernel device: auto, or one such as /dev/nbd0
    #[arg(long, value_name = "auto|/dev/nbdN")]
    pub device: Option<Device>,
    /// Delete the fork of --access branch when it is detached
    #[arg(long)]
    pub discard: bool,
}

/// `blockd detach`.
#[derive(Debug, Args)]
pub struct Detach {
    /// The disk or snapshot
    #[arg(value_name = "NAME[@SNAPSHOT]")]
    pub target: Target,
    /// Close the connections of clients instead of refusing
    #[arg(long)]
    pub disconnect: bool,
}

/// `blockd mount`.
#[derive(Debug, Args)]
pub struct Mount {
    /// The disk, or a snapshot, which is mounted read-only
    #[arg(value_name = "NAME[@SNAPSHOT]")]
    pub target: Target,
    /// Where to mount it: a folder that exists
    pub dir: PathBuf,
    /// The file system to make on a disk that was never written
    #[arg(long, value_enum, default_value = "ext4")]
    pub mkfs: FileSystem,
    /// Options for mount, such as noatime,discard
    #[arg(long, value_name = "OPTIONS")]
    pub options: Option<String>,
}

/// A file system that `mount` can make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FileSystem {
    /// mkfs.ext4
    Ext4,
    /// mkfs.xfs
    Xfs,
    /// Refuse a disk without a file system
    None,
}

/// `blockd umount`.
#[derive(Debug, Args)]
pub struct Umount {
    /// The disk, or where it is mounted
    #[arg(value_name = "NAME|DIR")]
    pub place: String,
}

/// `blockd snapshot`.
#[derive(Debug, Args)]
pub struct Snapshot {
    /// The disk
    #[arg(value_name = "NAME")]
    pub disk: DiskName,
    /// The snapshot's name; one is made up without it
    #[arg(long, value_name = "SNAPSHOT")]
    pub name: Option<SnapshotName>,
    /// A note for people
    #[arg(long)]
    pub message: Option<String>,
    /// Return only when the store holds it
    #[arg(long)]
    pub wait: bool,
}

/// `blockd fork`.
#[derive(Debug, Args)]
pub struct Fork {
    /// The snapshot, or a disk of which one is taken first
    #[arg(value_name = "NAME[@SNAPSHOT]")]
    pub target: Target,
    /// The name of the new disk
    pub new: DiskName,
}

/// `blockd delete`.
#[derive(Debug, Args)]
pub struct Delete {
    /// The disk or snapshot
    #[arg(value_name = "NAME[@SNAPSHOT]")]
    pub target: Target,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

/// `blockd resize`.
#[derive(Debug, Args)]
pub struct Resize {
    /// The disk
    pub name: DiskName,
    /// The new size: 10G, 512M; powers of 1024, a multiple of 4 KiB
    #[arg(value_parser = disk_size)]
    pub size: u64,
}

/// `blockd check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The disk
    pub name: DiskName,
    /// Read every block and check it
    #[arg(long)]
    pub deep: bool,
}

/// `blockd recover`.
#[derive(Debug, Args)]
pub struct Recover {
    /// The disk whose log was left behind
    pub name: DiskName,
    /// The name of the new disk
    pub new: DiskName,
}

fn disk_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("a disk has at least one block; write a size such as 10G".to_owned()),
        bytes if bytes % 4096 != 0 => {
            Err(format!("{bytes} bytes is not a multiple of 4 KiB; write a size such as 10G"))
        }
        bytes => Ok(bytes),
    }
}

fn timeout(text: &str) -> Result<Duration, String> {
    match parse_seconds(text)? {
        Duration::ZERO => Err("no time at all; write a time such as 30s".to_owned()),
        timeout => Ok(timeout),
    }
}

fn tcp_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("{text:?} is not an address and a port; write it as 127.0.0.1:10809 or [::1]:10809")
    })
}
