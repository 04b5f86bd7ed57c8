//! Another world for tests: files in memory that lose what was not synced, staging memory that
//! outlives a simulated process, a clock that stands still.
//!
//! What may go wrong here, and what may not:
//! - a power cut ([`SimStorage::cut_power`]) keeps a random part of the blocks written since their
//!   file's last sync, and a random beginning of the changes of names since the last folder sync;
//!   synced blocks and names stay;
//! - a kill ([`SimStorage::kill_at`]) lets the chosen write reach the device in part, and fails
//!   everything after it until [`SimStorage::revive`]; completed writes stay;
//! - a chosen write or sync can fail, a file cannot be made for want of room, a bit can flip;
//! - a block is never torn within, and nothing is written to the wrong place.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::format::{BLOCK, BLOCK_BYTES};
use crate::memory::Mapping;
use crate::ring::Ring;
use crate::storage::{Clock, Durability, LogFile, Storage};

/// A small generator of repeatable numbers.
#[derive(Clone, Debug)]
pub struct SimRandom(u64);

impl SimRandom {
    /// The sequence of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number (splitmix64).
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }
}

/// A clock that moves when it is told to.
#[derive(Debug, Default)]
pub struct SimClock(Mutex<Duration>);

impl SimClock {
    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Staging memory that outlives the directory it was given to.
#[derive(Clone, Debug)]
pub struct SimRing(Arc<Mapping>);

impl SimRing {
    /// Fresh memory with this many slots.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(slots: u32) -> Result<Self> {
        let mapping = Ring::memory(slots).map_err(|e| Error::io("map staging memory", e))?;
        Ok(Self(Arc::new(mapping)))
    }

    pub(crate) fn mapping(&self) -> Arc<Mapping> {
        Arc::clone(&self.0)
    }
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A write fails, and nobody knows what of it arrived.
    Write,
    /// A sync fails, and what it should have kept is still volatile.
    Sync,
    /// There is no room for a new file.
    Create,
}

/// A folder in memory. Clones are the same folder.
#[derive(Clone, Debug)]
pub struct SimStorage {
    disk: Arc<Mutex<Disk>>,
    path: PathBuf,
}

#[derive(Debug)]
struct Disk {
    random: SimRandom,
    files: Vec<FileState>,
    /// Names as a running process sees them.
    names: BTreeMap<String, usize>,
    /// Names as they would be after a power cut.
    stable_names: BTreeMap<String, usize>,
    /// Changes since, in order.
    renames: Vec<Change>,
    /// Faults to come, with how many operations of their kind go well before.
    faults: Vec<(Fault, u64)>,
    kill_at: Option<u64>,
    dead: bool,
    writes: u64,
}

#[derive(Clone, Debug)]
enum Change {
    Link(String, usize),
    Unlink(String),
    Rename(String, String),
}

#[derive(Debug, Default)]
struct FileState {
    stable: Vec<Option<Box<[u8]>>>,
    volatile: BTreeMap<usize, Box<[u8]>>,
    bytes: u64,
}

impl SimStorage {
    /// An empty folder whose faults follow from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let disk = Disk {
            random: SimRandom::new(seed),
            files: Vec::new(),
            names: BTreeMap::new(),
            stable_names: BTreeMap::new(),
            renames: Vec::new(),
            faults: Vec::new(),
            kill_at: None,
            dead: false,
            writes: 0,
        };
        Self { disk: Arc::new(Mutex::new(disk)), path: PathBuf::from("/simulated") }
    }

    /// The power fails: whatever was not synced is kept or lost at random.
    pub fn cut_power(&self) {
        let mut disk = self.lock();
        let disk = &mut *disk;
        let kept = disk.random.below(u64::try_from(disk.renames.len()).expect("few") + 1);
        let kept = usize::try_from(kept).expect("few");
        for change in disk.renames.drain(..).take(kept) {
            change.apply(&mut disk.stable_names);
        }
        disk.names = disk.stable_names.clone();
        for file in &mut disk.files {
            for (block, bytes) in std::mem::take(&mut file.volatile) {
                if disk.random.below(2) == 0 {
                    file.stable[block] = Some(bytes);
                }
            }
        }
        disk.dead = false;
        disk.kill_at = None;
        disk.faults.clear();
    }

    /// The process dies at the `nth` write from now on (0 is the next).
    pub fn kill_at(&self, nth: u64) {
        let mut disk = self.lock();
        disk.kill_at = Some(disk.writes + nth);
    }

    /// A new process begins; the device kept everything that was written.
    pub fn revive(&self) {
        let mut disk = self.lock();
        disk.dead = false;
        disk.kill_at = None;
        disk.faults.clear();
    }

    /// After `nth` operations of its kind that go well, one goes wrong.
    pub fn fail(&self, fault: Fault, nth: u64) {
        self.lock().faults.push((fault, nth));
    }

    /// Changes one bit of a file, behind the back of every check but the log's own.
    ///
    /// # Panics
    /// When there is no such file or bit.
    pub fn flip(&self, name: &str, bit: u64) {
        let mut disk = self.lock();
        let file = disk.names[name];
        let block = usize::try_from(bit / 8 / BLOCK).expect("a small file");
        let byte = usize::try_from(bit / 8 % BLOCK).expect("below a block");
        let mut bytes = disk.files[file].block(block).to_vec().into_boxed_slice();
        bytes[byte] ^= 1 << (bit % 8);
        disk.files[file].volatile.remove(&block);
        disk.files[file].stable[block] = Some(bytes);
    }

    /// How many writes were asked for so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.lock().writes
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: Change) -> io::Result<()> {
        let mut disk = self.lock();
        disk.alive()?;
        change.apply(&mut disk.names);
        disk.renames.push(change);
        Ok(())
    }

    fn file(&self, name: &str) -> io::Result<usize> {
        let disk = self.lock();
        disk.alive()?;
        disk.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Storage for SimStorage {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let disk = self.lock();
        disk.alive()?;
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut names: Vec<String> = disk
            .names
            .keys()
            .filter_map(|name| name.strip_prefix(&prefix)?.split('/').next())
            .map(str::to_owned)
            .collect();
        names.dedup();
        Ok(names)
    }

    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>> {
        let number = {
            let mut disk = self.lock();
            disk.alive()?;
            if disk.strikes(Fault::Create) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            if disk.names.contains_key(name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let blocks = usize::try_from(bytes / BLOCK).expect("a small file");
            let stable = std::iter::repeat_with(|| None).take(blocks).collect();
            disk.files.push(FileState { stable, volatile: BTreeMap::new(), bytes });
            disk.files.len() - 1
        };
        self.change(Change::Link(name.to_owned(), number))?;
        Ok(Box::new(SimFile { storage: self.clone(), number }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        Ok(Box::new(SimFile { storage: self.clone(), number: self.file(name)? }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.change(Change::Rename(from.to_owned(), to.to_owned()))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.file(name)?;
        self.change(Change::Unlink(name.to_owned()))
    }

    fn create_folder(&self, _folder: &str) -> io::Result<()> {
        Ok(())
    }

    fn sync_folder(&self, _folder: &str) -> io::Result<()> {
        let mut disk = self.lock();
        disk.alive()?;
        disk.renames.clear();
        disk.stable_names = disk.names.clone();
        Ok(())
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn is_buffered(&self) -> bool {
        false
    }
}

#[derive(Debug)]
struct SimFile {
    storage: SimStorage,
    number: usize,
}

impl LogFile for SimFile {
    fn write_at(&self, parts: &[&[u8]], offset: u64, durability: Durability) -> io::Result<()> {
        let mut disk = self.storage.lock();
        let disk = &mut *disk;
        disk.alive()?;
        let killed = disk.kill_at == Some(disk.writes);
        disk.writes += 1;
        let failed = killed || disk.strikes(Fault::Write);
        disk.dead |= killed;
        let file = &mut disk.files[self.number];
        let first = usize::try_from(offset / BLOCK).expect("a small file");
        assert!(offset.is_multiple_of(BLOCK), "an unaligned write");
        let mut block = first;
        for part in parts {
            assert!(part.len().is_multiple_of(BLOCK_BYTES), "an unaligned part");
            for bytes in part.chunks_exact(BLOCK_BYTES) {
                if !failed || disk.random.below(2) == 0 {
                    file.volatile.insert(block, bytes.into());
                }
                block += 1;
            }
        }
        if failed {
            return Err(io::Error::other("simulated failure of a write"));
        }
        if durability == Durability::Stable {
            // Only its own blocks: earlier writes wait for a sync.
            for block in first..block {
                if let Some(bytes) = file.volatile.remove(&block) {
                    file.stable[block] = Some(bytes);
                }
            }
        }
        Ok(())
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let disk = self.storage.lock();
        disk.alive()?;
        let file = &disk.files[self.number];
        assert!(offset.is_multiple_of(BLOCK), "an unaligned read");
        let first = usize::try_from(offset / BLOCK).expect("a small file");
        let mut done = 0;
        for (i, part) in out.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            if first + i >= file.stable.len() {
                break;
            }
            part.copy_from_slice(file.block(first + i));
            done += BLOCK_BYTES;
        }
        Ok(done)
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.storage.lock();
        disk.alive()?;
        if disk.strikes(Fault::Sync) {
            return Err(io::Error::other("simulated failure of a sync"));
        }
        let file = &mut disk.files[self.number];
        for (block, bytes) in std::mem::take(&mut file.volatile) {
            file.stable[block] = Some(bytes);
        }
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        let disk = self.storage.lock();
        disk.alive()?;
        Ok(disk.files[self.number].bytes)
    }
}

impl FileState {
    fn block(&self, block: usize) -> &[u8] {
        const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
        let stable = || self.stable[block].as_deref();
        self.volatile.get(&block).map(|bytes| &**bytes).or_else(stable).unwrap_or(&ZEROS)
    }
}

impl Disk {
    fn alive(&self) -> io::Result<()> {
        if self.dead { Err(io::Error::other("the simulated process is dead")) } else { Ok(()) }
    }

    /// Whether this operation is the one that goes wrong.
    fn strikes(&mut self, kind: Fault) -> bool {
        let mut struck = false;
        self.faults.retain_mut(|(fault, left)| {
            if *fault != kind || struck {
                return true;
            }
            struck = *left == 0;
            *left = left.saturating_sub(1);
            !struck
        });
        struck
    }
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Link(name, file) => {
                names.insert(name.clone(), *file);
            }
            Self::Unlink(name) => {
                names.remove(name);
            }
            Self::Rename(from, to) => {
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                    return;
                }
                // A folder: everything below it.
                let prefix = format!("{from}/");
                let below: Vec<String> =
                    names.keys().filter(|name| name.starts_with(&prefix)).cloned().collect();
                for name in below {
                    if let Some(file) = names.remove(&name) {
                        names.insert(format!("{to}/{}", &name[prefix.len()..]), file);
                    }
                }
            }
        }
    }
}
