//! `blockd mount` and `blockd umount`: an attachment with a kernel device, and a file system on it.
//!
//! Both work from the caller's side, in its mount namespace, with the system's own mkfs, mount and umount. A
//! mount that fails or is interrupted gives back the attachment that it made. A file system is made
//! only where the device reads zeros at both ends, where every file system and volume manager
//! keeps its marks. A snapshot is mounted read-only over a branch that goes away with it, so that the
//! journal of a file system that was in use can be replayed.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;

use super::args::{self, FileSystem};
use super::commands::note_attach;
use super::output::Output;
use super::session::Session;
use crate::control::api::{self, AttachReply, Device};
use crate::control::view::{Access, AttachmentView};
use crate::error::{Error, Kind, Result};
use crate::ids::Target;

/// How much at each end of a device must be zero for it to count as never used.
const MARKS_BYTES: u64 = 1 << 20;

#[derive(Serialize)]
struct Mounted {
    target: Target,
    device: PathBuf,
    dir: PathBuf,
    uri: String,
}

/// `blockd mount`.
///
/// # Errors
/// What the daemon, mkfs or mount say.
pub async fn mount(args: args::Mount, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let dir = folder(&args.dir)?;
    let is_snapshot = args.target.snapshot.is_some();
    let request = api::Attach {
        target: args.target.clone(),
        access: if is_snapshot { Access::Branch } else { Access::Write },
        wait_seconds: 0,
        accept_loss: false,
        socket: None,
        tcp: None,
        device: Some(Device::Auto),
        discard: is_snapshot,
    };
    let reply = session.call(&request).await?;
    let device = match use_device(&reply, &dir, &args) {
        Ok(device) => device,
        Err(error) => {
            if !reply.already_attached {
                let undo = api::Detach { target: reply.target.clone(), disconnect: true };
                if let Err(undo) = session.call(&undo).await {
                    output.note(&format!("{} is still attached: {}", reply.target, undo.report()));
                }
            }
            return Err(error);
        }
    };
    note_attach(&reply, output);
    let mounted = Mounted { target: reply.target, device, dir, uri: reply.uri };
    output.answer(&mounted, |_| String::new())
}

/// Makes the file system if there is none, and mounts it.
fn use_device(reply: &AttachReply, dir: &Path, args: &args::Mount) -> Result<PathBuf> {
    let device = reply.device.clone().ok_or_else(|| {
        Error::new(Kind::Failed, format!("{} came without a device", reply.target))
            .with_fix("use the client and the daemon of one version")
    })?;
    if mounts_of(&device)?.iter().any(|mounted| mounted == dir) {
        return Ok(device);
    }
    let is_snapshot = args.target.snapshot.is_some();
    if !is_snapshot && is_blank(&device)? {
        make_file_system(&device, args)?;
    }
    let mut command = Command::new("mount");
    let options = match (is_snapshot, args.options.as_deref()) {
        (true, Some(options)) => Some(format!("ro,{options}")),
        (true, None) => Some("ro".to_owned()),
        (false, options) => options.map(str::to_owned),
    };
    if let Some(options) = options {
        command.arg("-o").arg(options);
    }
    run(command.arg("--").arg(&device).arg(dir))?;
    Ok(device)
}

fn folder(dir: &Path) -> Result<PathBuf> {
    let wrong = |fix: &str| {
        let what = format!("{} is not a folder to mount on", dir.display());
        Error::new(Kind::InvalidArgument, what).with_fix(fix)
    };
    let dir = dir.canonicalize().map_err(|error| wrong("make it with mkdir").with_source(error))?;
    if dir.is_dir() { Ok(dir) } else { Err(wrong("name a folder")) }
}

fn is_blank(device: &Path) -> Result<bool> {
    let zeros = |from: SeekFrom| -> std::io::Result<bool> {
        let mut file = File::open(device)?;
        file.seek(from)?;
        let mut bytes = Vec::new();
        file.take(MARKS_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes.iter().all(|byte| *byte == 0))
    };
    let size = File::open(device).and_then(|mut file| file.seek(SeekFrom::End(0)));
    let blank = size.and_then(|size| {
        Ok(zeros(SeekFrom::Start(0))? && zeros(SeekFrom::Start(size.saturating_sub(MARKS_BYTES)))?)
    });
    blank.map_err(|error| {
        Error::new(Kind::Failed, format!("read {}", device.display()))
            .with_source(error)
            .with_fix("run it as root")
    })
}

fn make_file_system(device: &Path, args: &args::Mount) -> Result<()> {
    // Neither discards first: a disk that reads zeros has nothing to discard.
    let (program, options): (_, &[&str]) = match args.mkfs {
        FileSystem::Ext4 => ("mkfs.ext4", &["-q", "-E", "nodiscard"]),
        FileSystem::Xfs => ("mkfs.xfs", &["-q", "-K"]),
        FileSystem::None => {
            let what = format!("{} has no file system", args.target);
            return Err(Error::new(Kind::InvalidArgument, what)
                .with_fix("make one with --mkfs ext4 or --mkfs xfs"));
        }
    };
    run(Command::new(program).args(options).arg(device))
}

/// Runs a program of the system to its end. What it prints on stderr is the cause of the error.
fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.stdin(Stdio::null()).stdout(Stdio::null()).output().map_err(|error| {
        let fix = match program.as_str() {
            "mkfs.xfs" => "install xfsprogs",
            "mkfs.ext4" => "install e2fsprogs",
            _ => "install mount (util-linux)",
        };
        Error::new(Kind::Failed, format!("run {program}")).with_source(error).with_fix(fix)
    })?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let kind = if said.contains("busy") { Kind::DiskBusy } else { Kind::Failed };
    let arguments: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
    let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let what = format!("{program} {} failed: {}", arguments.join(" "), lines.join(", "));
    Err(Error::new(kind, what).with_fix("see dmesg; run it as root, when nothing uses the folder"))
}

/// `blockd umount`.
///
/// # Errors
/// What the daemon or umount say.
pub async fn umount(args: args::Umount, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let attachment = find(&args.place, session).await?;
    let device = attachment.device.as_deref().expect("only attachments with a device are found");
    for dir in mounts_of(device)?.iter().rev() {
        run(Command::new("umount").arg("--").arg(dir))?;
    }
    let reply = session.call(&api::Detach { target: attachment.target, disconnect: false }).await?;
    output.answer(&reply, |_| String::new())
}

/// The attachment with a device that is named, or mounted, as `place`.
async fn find(place: &str, session: &Session) -> Result<AttachmentView> {
    let status = session.call(&api::Status {}).await?;
    let attachments = status.disks.into_iter().flat_map(|disk| disk.attachments);
    let with_device = attachments.filter(|attachment| attachment.device.is_some());
    // A name has no slash: `./d1` is the folder.
    if !place.contains('/') {
        let target: Target = place.parse()?;
        return with_device.into_iter().find(|attachment| attachment.target == target).ok_or_else(
            || {
                Error::new(Kind::NotFound, format!("{target} is not attached to a device here"))
                    .with_fix("name the folder that it is mounted on, or see blockd status")
            },
        );
    }
    let missing = || {
        Error::new(Kind::NotFound, format!("no disk of this daemon is mounted on {place}"))
            .with_fix("see blockd status and findmnt")
    };
    let dir = Path::new(place).canonicalize().map_err(|error| missing().with_source(error))?;
    for attachment in with_device {
        let device = attachment.device.as_deref().expect("they were filtered");
        if mounts_of(device)?.contains(&dir) {
            return Ok(attachment);
        }
    }
    Err(missing())
}

/// Where a device is mounted, in the order of the mounts.
fn mounts_of(device: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        let number = device.metadata()?.rdev();
        let number = (rustix::fs::major(number), rustix::fs::minor(number));
        Ok(mounts_in(&std::fs::read("/proc/self/mountinfo")?, number))
    };
    read().map_err(|error| {
        Error::new(Kind::Failed, format!("look for mounts of {}", device.display()))
            .with_source(error)
            .with_fix("is the device there, and /proc mounted?")
    })
}

/// The mount points of a device in the text of `mountinfo`: its third and fifth fields.
fn mounts_in(text: &[u8], (major, minor): (u32, u32)) -> Vec<PathBuf> {
    let number = format!("{major}:{minor}").into_bytes();
    let lines = text.split(|byte| *byte == b'\n');
    let fields = lines.map(|line| line.split(|byte| *byte == b' ').collect::<Vec<_>>());
    let of_device = fields.filter(|fields| fields.get(2).is_some_and(|field| **field == number));
    of_device.filter_map(|fields| fields.get(4).map(|dir| unescape(dir))).collect()
}

/// Blanks and the like are three octal digits after a backslash.
fn unescape(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| first == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_the_number_of_their_device() {
        let text = b"22 1 254:0 / / rw - ext4 /dev/root rw\n\
            30 22 43:0 / /mnt/with\\040blank\\134 rw - ext4 /dev/nbd0 rw\n\
            31 22 43:16 / /mnt/other rw - xfs /dev/nbd1 rw\n\
            32 22 43:0 /sub /mnt/bind rw - ext4 /dev/nbd0 rw\n\n43:0\n";
        let expected = [PathBuf::from("/mnt/with blank\\"), PathBuf::from("/mnt/bind")];
        assert_eq!(mounts_in(text, (43, 0)), expected);
        assert!(mounts_in(text, (43, 1)).is_empty());
        assert!(mounts_in(b"", (43, 0)).is_empty());
    }

    #[test]
    fn a_device_with_a_mark_at_either_end_is_not_blank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let size = 4 * MARKS_BYTES;
        for (mark, blank) in [(None, true), (Some(1024), false), (Some(size - 1), false)] {
            let file = File::create(&path).unwrap();
            file.set_len(size).unwrap();
            if let Some(offset) = mark {
                std::os::unix::fs::FileExt::write_all_at(&file, b"x", offset).unwrap();
            }
            assert_eq!(is_blank(&path).unwrap(), blank, "a mark at {mark:?}");
        }
        File::create(&path).unwrap().set_len(4096).unwrap();
        assert!(is_blank(&path).unwrap());
        assert!(is_blank(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn a_program_that_fails_is_quoted_and_one_that_is_busy_is_a_conflict() {
        let script = |text: &str| run(Command::new("sh").arg("-c").arg(text));
        assert!(script("exit 0").is_ok());
        let error = script("echo first >&2; echo second >&2; exit 32").unwrap_err();
        assert!(error.report().ends_with("failed: first, second"), "{error:?}");
        assert_eq!(script("echo target is busy >&2; exit 32").unwrap_err().kind(), Kind::DiskBusy);
        let error = run(&mut Command::new("mkfs.none-such")).unwrap_err();
        assert!(error.report().contains("mkfs.none-such") && error.fix().is_some());
    }
}
