//! [`DirectStorage`]: the log's folder on a real file system, with O_DIRECT.
//!
//! It holds a `flock` on the folder for its life, so no second process writes there. Where the file
//! system knows no direct I/O it refuses by name, unless buffered writes were allowed. Short
//! transfers are continued and interrupted ones repeated here, so nobody above sees them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, BLOCK_BYTES};
use crate::memory::BlockBuf;
use crate::storage::{Durability, LogFile, Storage};

const LOCK_NAME: &str = "lock";
/// Zeros are written in pieces of this size; large enough for the device's full rate.
const ZERO_BLOCKS: u32 = 256;
/// How often "try again" is believed before it counts as an error.
const AGAIN_MAX: u32 = 1000;

/// A folder on a file system, locked.
#[derive(Debug)]
pub struct DirectStorage {
    path: PathBuf,
    buffered: bool,
    _lock: File,
}

impl DirectStorage {
    /// Opens the folder `path`, creating the last part of it if need be, and locks it.
    ///
    /// # Errors
    /// `Busy` names the process that holds the folder; `Unsupported` names a file system without
    /// direct I/O, unless `allow_buffered`; `Io` else.
    pub fn open(path: &Path, allow_buffered: bool) -> Result<Self> {
        let at = |what: &str| format!("{what} log directory {}", path.display());
        match fs::create_dir(path) {
            Ok(()) => sync_parent(path).map_err(|e| Error::io(at("sync the parent of"), e))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::io(at("create"), error)),
        }
        let lock = lock(&path.join(LOCK_NAME), path)?;
        let direct = has_direct_io(&path.join(LOCK_NAME)).map_err(|e| Error::io(at("probe"), e))?;
        match direct {
            Direct::Yes => {}
            Direct::Alignment(align) => {
                let reason = format!(
                    "{}: direct I/O needs an alignment of {align} bytes, the log has {BLOCK_BYTES}",
                    path.display()
                );
                return Err(Error::new(ErrorKind::Unsupported, reason));
            }
            Direct::No if allow_buffered => {}
            Direct::No => {
                let reason = format!(
                    "{}: the file system ({}) has no direct I/O; put the log elsewhere, or set \
                     allow_buffered and accept slower and less certain writes",
                    path.display(),
                    file_system_name(&lock)
                );
                return Err(Error::new(ErrorKind::Unsupported, reason));
            }
        }
        let buffered = matches!(direct, Direct::No);
        Ok(Self { path: path.to_owned(), buffered, _lock: lock })
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if !self.buffered {
            let flags = i32::try_from(OFlags::DIRECT.bits()).expect("O_DIRECT is a small flag");
            options.custom_flags(flags);
        }
        options
    }
}

impl Storage for DirectStorage {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.path.join(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>> {
        let path = self.path.join(name);
        let file = self.options().create_new(true).open(&path)?;
        let file = DirectFile { file };
        // A half-made file must not stay: it would hold the space whose lack stopped it.
        if let Err(error) = file.fill_with_zeros(bytes) {
            fs::remove_file(&path)?;
            return Err(error);
        }
        Ok(Box::new(file))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        Ok(Box::new(DirectFile { file: self.options().open(self.path.join(name))? }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn create_folder(&self, folder: &str) -> io::Result<()> {
        fs::create_dir_all(self.path.join(folder))
    }

    fn sync_folder(&self, folder: &str) -> io::Result<()> {
        sync_path(&self.path.join(folder))
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn is_buffered(&self) -> bool {
        self.buffered
    }
}

#[derive(Debug)]
struct DirectFile {
    file: File,
}

impl DirectFile {
    /// Written zeros, not just allocated ones: the first write into an unwritten extent changes
    /// metadata, and the next sync would pay a journal commit for it.
    fn fill_with_zeros(&self, bytes: u64) -> io::Result<()> {
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            // The allocation only keeps the file in one piece.
            Err(Errno::OPNOTSUPP) | Ok(()) => {}
            Err(error) => return Err(error.into()),
        }
        let zeros = BlockBuf::new(ZERO_BLOCKS);
        let mut offset = 0;
        while offset < bytes {
            let left = usize::try_from(bytes - offset).unwrap_or(usize::MAX);
            let piece = &zeros.bytes()[..left.min(zeros.bytes().len())];
            self.write_at(&[piece], offset, Durability::Volatile)?;
            offset += u64::try_from(piece.len()).expect("a piece is small");
        }
        sync_all(&self.file)
    }
}

impl LogFile for DirectFile {
    fn write_at(&self, parts: &[&[u8]], offset: u64, durability: Durability) -> io::Result<()> {
        let flags = match durability {
            Durability::Volatile => ReadWriteFlags::empty(),
            Durability::Stable => ReadWriteFlags::DSYNC,
        };
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut done = 0;
        while done < total {
            let rest: Vec<IoSlice<'_>> = skip(parts, done).map(IoSlice::new).collect();
            let at = offset + u64::try_from(done).expect("a write is small");
            let written = repeat(|| rustix::io::pwritev2(&self.file, &rest, at, flags))?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            // The rest of a short write starts at a whole block again: direct I/O needs that.
            let end = done + written;
            done = if end == total { total } else { end - end % BLOCK_BYTES };
        }
        Ok(())
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < out.len() {
            let at = offset + u64::try_from(done).expect("a read is small");
            let read = repeat(|| rustix::io::pread(&self.file, &mut out[done..], at))?;
            let end = done + read;
            if end == out.len() {
                return Ok(end);
            }
            // Short: either the end of the file, which the next read confirms, or an interruption.
            let whole = end - end % BLOCK_BYTES;
            if whole == done {
                return Ok(end);
            }
            done = whole;
        }
        Ok(done)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

/// What is left of `parts` after their first `done` bytes.
fn skip<'a>(parts: &'a [&'a [u8]], done: usize) -> impl Iterator<Item = &'a [u8]> {
    let mut before = done;
    parts.iter().filter_map(move |part| {
        let skipped = before.min(part.len());
        before -= skipped;
        let rest = &part[skipped..];
        (!rest.is_empty()).then_some(rest)
    })
}

/// Repeats a transfer that was interrupted or told to try again.
fn repeat(mut transfer: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    let mut again = 0;
    loop {
        match transfer() {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if again < AGAIN_MAX => {
                again += 1;
                thread::yield_now();
            }
            other => return Ok(other?),
        }
    }
}

enum Direct {
    Yes,
    No,
    Alignment(u32),
}

fn has_direct_io(file: &Path) -> io::Result<Direct> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("O_DIRECT is a small flag");
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(file) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(Direct::No),
        other => other?,
    };
    let name = rustix::fs::fstatfs(&file)?.f_type;
    if let Some((_, _, false)) = FILE_SYSTEMS.iter().find(|(magic, _, _)| *magic == name) {
        return Ok(Direct::No);
    }
    let known = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let Ok(known) = known else { return Ok(Direct::Yes) };
    if !StatxFlags::from_bits_retain(known.stx_mask).contains(StatxFlags::DIOALIGN) {
        // An older kernel or file system does not say; 4 KiB is what all of them accept.
        return Ok(Direct::Yes);
    }
    let align = known.stx_dio_offset_align.max(known.stx_dio_mem_align);
    Ok(match align {
        0 => Direct::No,
        _ if BLOCK.is_multiple_of(u64::from(align)) => Direct::Yes,
        _ => Direct::Alignment(align),
    })
}

/// Magic number, name, and whether O_DIRECT means anything, of file systems worth naming.
const FILE_SYSTEMS: [(i64, &str, bool); 8] = [
    (0x0102_1994, "tmpfs", false),
    (0x8584_58f6, "ramfs", false),
    (0x794c_7630, "overlayfs", true),
    (0xef53, "ext4", true),
    (0x5846_5342, "xfs", true),
    (0x9123_683e, "btrfs", true),
    (0x6573_5546, "fuse", true),
    (0x6969, "nfs", true),
];

fn file_system_name(file: &File) -> String {
    let Ok(stat) = rustix::fs::fstatfs(file) else { return "unknown".to_owned() };
    let known = FILE_SYSTEMS.iter().find(|(magic, _, _)| *magic == stat.f_type);
    known.map_or_else(|| format!("type {:#x}", stat.f_type), |(_, name, _)| (*name).to_owned())
}

/// Whether a path lies on tmpfs, where memory outlives the process.
pub(crate) fn is_tmpfs(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file)?.f_type == FILE_SYSTEMS[0].0)
}

/// Takes the lock of a file; `false` when another process has it.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes the lock of the folder `what` and leaves our process id for whoever finds it held.
fn lock(file: &Path, what: &Path) -> Result<File> {
    let at = |verb: &str| format!("{verb} {}", file.display());
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).open(file);
    let mut lock = opened.map_err(|e| Error::io(at("open"), e))?;
    if !try_lock(&lock).map_err(|e| Error::io(at("lock"), e))? {
        let mut holder = String::new();
        let read = lock.read_to_string(&mut holder).is_ok() && !holder.trim().is_empty();
        let holder = if read { holder.trim() } else { "unknown" };
        let reason = format!("{} is in use by process {holder}", what.display());
        return Err(Error::new(ErrorKind::Busy, reason));
    }
    let id = std::process::id().to_string();
    let written =
        lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| lock.write_all(id.as_bytes()));
    written.map_err(|e| Error::io(at("write"), e))?;
    Ok(lock)
}

fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_path(parent),
        _ => sync_path(Path::new(".")),
    }
}

fn sync_path(folder: &Path) -> io::Result<()> {
    sync_all(&File::open(folder)?)
}

fn sync_all(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fsync(file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    // W03. Fails when the rest of a short write begins elsewhere than where it stopped.
    #[test]
    fn the_rest_of_a_short_write_is_what_was_not_written() {
        let parts: [&[u8]; 3] = [b"abcd", b"", b"efghij"];
        let all = parts.concat();
        for done in 0..=all.len() {
            let rest: Vec<&[u8]> = skip(&parts, done).collect();
            assert_eq!(rest.concat(), &all[done..]);
            assert!(rest.iter().all(|part| !part.is_empty()));
        }
    }

    // W03. Fails when an interruption is an error, or "try again" is believed for ever.
    #[test]
    fn interrupted_transfers_are_repeated() {
        let mut left = 5000;
        let done = repeat(|| {
            left -= 1;
            if left > 0 { Err(Errno::INTR) } else { Ok(7) }
        });
        assert_eq!(done.unwrap(), 7);
        assert!(repeat(|| Err(Errno::AGAIN)).is_err());
        assert!(repeat(|| Err(Errno::IO)).is_err());
    }

    // W03. Fails when what is written in parts is not read back whole, or a file's end is not seen.
    #[test]
    fn parts_are_written_one_behind_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let storage = DirectStorage::open(dir.path(), true).unwrap();
        let file = storage.create("file", 8 * BLOCK).unwrap();
        let mut blocks = BlockBuf::new(3);
        for (block, byte) in blocks.bytes_mut().chunks_exact_mut(BLOCK_BYTES).zip(1..) {
            block.fill(byte);
        }
        let (first, rest) = blocks.bytes().split_at(BLOCK_BYTES);
        file.write_at(&[rest, first], 5 * BLOCK, Durability::Stable).unwrap();
        let mut out = BlockBuf::new(4);
        assert_eq!(file.read_at(out.bytes_mut(), 4 * BLOCK).unwrap(), 4 * BLOCK_BYTES);
        let found: Vec<u8> = out.bytes().chunks_exact(BLOCK_BYTES).map(|block| block[0]).collect();
        assert_eq!(found, [0, 2, 3, 1]);
        assert_eq!(file.read_at(out.bytes_mut(), 6 * BLOCK).unwrap(), 2 * BLOCK_BYTES);
        assert_eq!(file.read_at(out.bytes_mut(), 8 * BLOCK).unwrap(), 0);
        assert_eq!(file.bytes().unwrap(), 8 * BLOCK);
        assert_eq!(storage.list("").unwrap(), ["file", "lock"]);
    }
}
