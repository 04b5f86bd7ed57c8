//! The staging ring: slots in one mapping, each a frame under construction.
//!
//! Mapped from a file on tmpfs, the ring outlives the process: what a record's mark covers is there
//! after `kill -9` at any instruction, because the data, its CRCs and its line in the header block
//! are stored before the mark (release order), and every record carries a CRC of its own.
//!
//! ```text
//! words (8 bytes each, native order: the file never leaves the machine)
//!   0  magic     1  version    2,3  id of the log directory    4  slots    5  owners
//!   6  check: CRC32 of words 0..6       7  reserved
//!   then OWNERS lines of 8: owner (2), epoch, nonce, check, synced LSN, reserved (2)
//!   then one line of 8 per slot: mark, owner (2), epoch, nonce, first LSN, check, reserved
//! then, from the next multiple of 4 KiB, the slots: a frame each (see `format`), whose header
//!   block has its record table and block CRCs from the start and the rest once it is written
//!
//! mark: 0 = free; n + 1 = held, with n complete records
//! ```
//!
//! A slot is held until its frame and all earlier ones of its owner are in the log. Free slots keep
//! their contents for readers until somebody needs them; the least recently used goes first.
//!
//! Version history: 1, the first. A ring of another version is refused: empty it with the release
//! that wrote it (a clean stop does).

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::FallocateFlags;

use crate::config::StagingConfig;
use crate::direct;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Origin, index};
use crate::frame::Frame;
use crate::lsn::{Lsn, OwnerId};
use crate::memory::{Mapping, Slot};

const MAGIC: u64 = u64::from_le_bytes(*b"WALRING\n");
const VERSION: u64 = 1;
const LINE: usize = 8;
/// Owners whose synced LSN the ring can state; more of them state it in their frames only.
const OWNERS: usize = 1024;
const OWNERS_AT: usize = LINE;
const SLOTS_AT: usize = OWNERS_AT + OWNERS * LINE;

/// Whether the staging memory outlives the process, so that a record in it is acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Staging {
    /// It does: records are acknowledged as soon as they are appended.
    Outlives,
    /// It ends with the process, for this reason: the log write acknowledges.
    Private(String),
}

/// All staging slots of a log directory.
#[derive(Debug)]
pub(crate) struct Ring {
    mapping: Arc<Mapping>,
    staging: Staging,
    free: Mutex<VecDeque<FreeSlot>>,
    /// Slots that an earlier process left, until their owner is started, set aside or discarded.
    left: Mutex<BTreeMap<OwnerId, Vec<Leftover>>>,
    /// The file stays open, since its lock keeps other processes away.
    _file: Option<File>,
}

/// A slot that holds nothing unwritten, and the frame that may still be read from it.
#[derive(Debug)]
struct FreeSlot {
    at: u32,
    frame: Weak<Frame>,
}

/// A slot with records that an earlier process appended and did not write.
#[derive(Clone, Debug)]
pub(crate) struct Leftover {
    pub(crate) slot: Arc<Slot>,
    pub(crate) origin: Origin,
    pub(crate) first_lsn: Lsn,
    pub(crate) records: u32,
    /// Whether the line that says all this verifies.
    pub(crate) sound: bool,
}

/// An owner's line in the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnerLine(usize);

impl Ring {
    /// The ring that `config` asks for, with whatever an earlier process left in it.
    pub(crate) fn open(config: &StagingConfig, slots: u32, id: [u64; 2]) -> Result<Self> {
        let Some(path) = &config.path else {
            return Self::private(slots, id, "no path for it is configured".to_owned());
        };
        match open_file(path, slots)? {
            Opened::Unusable(reason) => Self::private(slots, id, reason),
            Opened::New(file) => {
                let mapping = map(path, &file, slots)?;
                Ok(Self::new(mapping, Staging::Outlives, Some(file)).initialise(id))
            }
            Opened::Existing(file, slots) => {
                let mapping = map(path, &file, slots)?;
                let ring = Self::new(mapping, Staging::Outlives, Some(file));
                ring.take_over(id, &path.display().to_string())
            }
        }
    }

    /// A ring over memory that a simulator keeps; new when nothing was written to it yet.
    pub(crate) fn over(mapping: Arc<Mapping>, id: [u64; 2]) -> Result<Self> {
        let new = mapping.word(0).load(Ordering::Acquire) == 0;
        let ring = Self::new(mapping, Staging::Outlives, None);
        if new { Ok(ring.initialise(id)) } else { ring.take_over(id, "simulated memory") }
    }

    /// Memory for such a ring.
    pub(crate) fn memory(slots: u32) -> io::Result<Mapping> {
        Mapping::private(words(slots), slots)
    }

    fn private(slots: u32, id: [u64; 2], reason: String) -> Result<Self> {
        let mapping = Self::memory(slots).map_err(|e| Error::io("map staging memory", e))?;
        Ok(Self::new(Arc::new(mapping), Staging::Private(reason), None).initialise(id))
    }

    fn new(mapping: Arc<Mapping>, staging: Staging, file: Option<File>) -> Self {
        Self { mapping, staging, free: Mutex::default(), left: Mutex::default(), _file: file }
    }

    /// Makes every slot free; the magic number comes last, so half of this is not a ring.
    fn initialise(self, id: [u64; 2]) -> Self {
        self.set(0, 0);
        for word in LINE..words(self.slots()) {
            self.set(word, 0);
        }
        self.set(1, VERSION);
        self.set(2, id[0]);
        self.set(3, id[1]);
        self.set(4, u64::from(self.slots()));
        self.set(5, u64::try_from(OWNERS).expect("a small number"));
        self.set(7, 0);
        let header = [MAGIC, VERSION, id[0], id[1], self.get(4), self.get(5)];
        self.set(6, check(&header));
        self.set(0, MAGIC);
        self.lock_free().extend((0..self.slots()).map(|at| FreeSlot { at, frame: Weak::new() }));
        self
    }

    /// Finds what an earlier process left.
    fn take_over(self, id: [u64; 2], name: &str) -> Result<Self> {
        let header: [u64; 6] = std::array::from_fn(|word| self.get(word));
        if self.get(6) != check(&header) || header[4] != u64::from(self.slots()) {
            let reason = format!("staging ring {name}: header crc mismatch");
            return Err(Error::new(ErrorKind::Damaged, reason));
        }
        let held = (0..self.slots()).filter(|at| self.get(slot_line(*at)) > 0).count();
        if header[2..4] != id {
            if held == 0 {
                return Ok(self.initialise(id));
            }
            let reason = format!(
                "staging ring {name} belongs to log directory {:016x}{:016x} and holds {held} \
                 slots with acknowledged writes; give this one another path",
                header[2], header[3]
            );
            return Err(Error::new(ErrorKind::Invalid, reason));
        }
        let mut left: BTreeMap<OwnerId, Vec<Leftover>> = BTreeMap::new();
        let mut free = VecDeque::new();
        for at in 0..self.slots() {
            match self.leftover(at) {
                Some(leftover) => left.entry(leftover.origin.owner).or_default().push(leftover),
                None => free.push_back(FreeSlot { at, frame: Weak::new() }),
            }
        }
        for slots in left.values_mut() {
            slots.sort_by_key(|leftover| leftover.first_lsn);
        }
        *self.lock_free() = free;
        *self.lock_left() = left;
        Ok(self)
    }

    /// The records in a slot that nobody in this process holds.
    fn leftover(&self, at: u32) -> Option<Leftover> {
        let line = slot_line(at);
        let mark = self.mapping.word(line).load(Ordering::Acquire);
        let records = u32::try_from(mark.checked_sub(1)?).unwrap_or(u32::MAX);
        let fields: [u64; 5] = std::array::from_fn(|field| self.get(line + 1 + field));
        Some(Leftover {
            slot: Arc::new(self.mapping.borrow_slot(at)?),
            origin: Origin {
                owner: owner_of(fields[0], fields[1]),
                epoch: fields[2],
                nonce: fields[3],
            },
            first_lsn: Lsn::new(fields[4]),
            records,
            sound: self.get(line + 6) == check(&fields) && records <= crate::format::FRAME_RECORDS,
        })
    }

    /// Whether records in the ring outlive the process.
    pub(crate) fn staging(&self) -> &Staging {
        &self.staging
    }

    pub(crate) fn outlives(&self) -> bool {
        self.staging == Staging::Outlives
    }

    /// A slot for a frame that begins at `first_lsn`, for an owner that holds `held` already.
    ///
    /// An owner gets at most twice what is left free: so one that floods the ring leaves a third
    /// of it to the others, whatever their number.
    pub(crate) fn take(&self, origin: &Origin, first_lsn: Lsn, held: usize) -> Option<Slot> {
        let mut slot = {
            let mut free = self.lock_free();
            if held >= 2 * free.len() {
                return None;
            }
            let next = free.pop_front()?;
            if let Some(frame) = next.frame.upgrade() {
                // Readers of that frame turn to its segment from here on.
                frame.slot_mut().take();
            }
            let Some(slot) = self.mapping.borrow_slot(next.at) else {
                // The frame is being dropped on another thread at this moment.
                free.push_back(next);
                return None;
            };
            slot
        };
        slot.bytes_mut()[..crate::format::BLOCK_BYTES].fill(0);
        let line = slot_line(slot.at());
        let fields = fields_of(origin, first_lsn.get());
        for (field, value) in fields.iter().enumerate() {
            self.set(line + 1 + field, *value);
        }
        self.set(line + 6, check(&fields));
        self.commit(slot.at(), 0);
        Some(slot)
    }

    /// Whether [`Ring::take`] would find a slot.
    pub(crate) fn has_room(&self, held: usize) -> bool {
        held < 2 * self.lock_free().len()
    }

    /// Marks the first `records` records of a slot as complete.
    pub(crate) fn commit(&self, at: u32, records: u32) {
        // Release: whoever sees the mark sees the records, also a process that finds them here.
        self.mapping.word(slot_line(at)).store(u64::from(records) + 1, Ordering::Release);
    }

    /// Frees the slot of a frame that is in the log with all its predecessors.
    pub(crate) fn give_back(&self, frame: &Arc<Frame>) {
        let Some(at) = frame.slot().as_ref().map(Slot::at) else { return };
        self.release_mark(at);
        self.lock_free().push_back(FreeSlot { at, frame: Arc::downgrade(frame) });
    }

    pub(crate) fn release_mark(&self, at: u32) {
        self.mapping.word(slot_line(at)).store(0, Ordering::Release);
    }

    /// Owners of whom an earlier process left records here.
    pub(crate) fn owners_left(&self) -> Vec<OwnerId> {
        self.lock_left().keys().copied().collect()
    }

    /// What an earlier process left of `owner`, in LSN order.
    pub(crate) fn left_of(&self, owner: OwnerId) -> Vec<Leftover> {
        self.lock_left().get(&owner).cloned().unwrap_or_default()
    }

    /// Finds the slots of a log that was dropped without being closed.
    pub(crate) fn reclaim(&self, owner: OwnerId) {
        let is_owners = |at: &u32| {
            let line = slot_line(*at);
            owner_of(self.get(line + 1), self.get(line + 2)) == owner
        };
        let slots = (0..self.slots()).filter(is_owners);
        let mut found: Vec<Leftover> = slots.filter_map(|at| self.leftover(at)).collect();
        found.sort_by_key(|leftover| leftover.first_lsn);
        self.leave(owner, found);
    }

    /// Adds slots of a log that ended without writing them.
    pub(crate) fn leave(&self, owner: OwnerId, slots: Vec<Leftover>) {
        if !slots.is_empty() {
            self.lock_left().entry(owner).or_default().extend(slots);
        }
    }

    /// Frees what was left of `owner`: it is in the log now, or was kept elsewhere, or given up.
    pub(crate) fn free_left(&self, owner: OwnerId) {
        for leftover in self.lock_left().remove(&owner).unwrap_or_default() {
            let at = leftover.slot.at();
            drop(leftover);
            self.release_mark(at);
            self.lock_free().push_back(FreeSlot { at, frame: Weak::new() });
        }
    }

    /// A line for an owner that starts; `None` when all are taken.
    pub(crate) fn register(&self, origin: &Origin, synced: Lsn) -> Option<OwnerLine> {
        // The lock only keeps two registrations apart.
        let _left = self.lock_left();
        let same = |line: &usize| owner_of(self.get(*line), self.get(line + 1)) == origin.owner;
        let free = |line: &usize| self.get(line + 4) == 0;
        let mut lines = (0..OWNERS).map(|owner| OWNERS_AT + owner * LINE);
        let line = lines.clone().find(same).or_else(|| lines.find(free))?;
        self.set(line + 4, 0);
        self.set(line + 5, synced.get());
        let fields = fields_of(origin, 0);
        for (field, value) in fields[..4].iter().enumerate() {
            self.set(line + field, *value);
        }
        self.set(line + 4, check(&fields));
        Some(OwnerLine(line))
    }

    /// States that the log of an owner is synced up to `lsn`.
    pub(crate) fn set_synced(&self, line: OwnerLine, lsn: Lsn) {
        self.set(line.0 + 5, lsn.get());
    }

    /// Gives a line back.
    pub(crate) fn unregister(&self, line: OwnerLine) {
        for field in [4, 0, 1] {
            self.set(line.0 + field, 0);
        }
    }

    /// The highest LSN that the ring states as synced for `owner` in `epoch`.
    pub(crate) fn synced_of(&self, owner: OwnerId, epoch: u64) -> Lsn {
        let lines = (0..OWNERS).map(|owner| OWNERS_AT + owner * LINE);
        let stated = lines.filter_map(|line| {
            let mut fields = [0; 5];
            for (field, value) in fields[..4].iter_mut().enumerate() {
                *value = self.get(line + field);
            }
            let found = owner_of(fields[0], fields[1]) == owner && fields[2] == epoch;
            (found && self.get(line + 4) == check(&fields)).then(|| self.get(line + 5))
        });
        Lsn::new(stated.max().unwrap_or(0))
    }

    fn slots(&self) -> u32 {
        u32::try_from(self.mapping.slot_count()).expect("made from a u32")
    }

    fn get(&self, word: usize) -> u64 {
        self.mapping.word(word).load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.mapping.word(word).store(value, Ordering::Release);
    }

    fn lock_free(&self) -> MutexGuard<'_, VecDeque<FreeSlot>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_left(&self) -> MutexGuard<'_, BTreeMap<OwnerId, Vec<Leftover>>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses to leave records behind in the ring that a directory used before.
pub(crate) fn check_emptied(path: &Path, id: [u64; 2]) -> Result<()> {
    // Gone, with whatever was in it, or now somebody else's.
    let Ok(mut file) = File::open(path) else { return Ok(()) };
    match inspect(path, &mut file) {
        Ok(Some(found)) if found.held && found.id == id => {
            let reason = format!(
                "staging file {} still holds acknowledged writes of this log directory: start once \
                 with that path, or remove the file and lose them",
                path.display()
            );
            Err(Error::new(ErrorKind::Invalid, reason))
        }
        Err(error) if error.kind() == ErrorKind::Version => Err(error),
        _ => Ok(()),
    }
}

enum Opened {
    New(File),
    /// With this many slots.
    Existing(File, u32),
    Unusable(String),
}

/// Opens, locks and sizes the file of a ring.
fn open_file(path: &Path, slots: u32) -> Result<Opened> {
    let at = |verb: &str| format!("{verb} staging file {}", path.display());
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.map_or_else(|| PathBuf::from("."), Path::to_owned);
    match File::open(&parent).and_then(|folder| direct::is_tmpfs(&folder)) {
        Ok(true) => {}
        Ok(false) => {
            return Ok(Opened::Unusable(format!("{} is not on tmpfs", path.display())));
        }
        Err(error) => return Err(Error::io(at("find the folder of"), error)),
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut file = options.open(path).map_err(|e| Error::io(at("open"), e))?;
    if !direct::try_lock(&file).map_err(|e| Error::io(at("lock"), e))? {
        let reason = format!("staging file {} is in use by another process", path.display());
        return Err(Error::new(ErrorKind::Busy, reason));
    }
    if let Some(found) = inspect(path, &mut file)? {
        let wanted = found.slots == slots || found.held;
        if wanted {
            return Ok(Opened::Existing(file, found.slots));
        }
    }
    // Emptied first: a ring of zeros is one that was never initialised.
    let bytes = length(slots);
    let allocated = rustix::fs::ftruncate(&file, 0)
        .and_then(|()| rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes));
    if let Err(error) = allocated {
        drop(std::fs::remove_file(path));
        let reason = format!("{bytes} bytes for {} cannot be had: {error}", path.display());
        return Ok(Opened::Unusable(reason));
    }
    Ok(Opened::New(file))
}

struct Found {
    id: [u64; 2],
    slots: u32,
    /// Whether any slot holds records.
    held: bool,
}

/// Reads the words of a ring file before it is mapped; `None` when it never became a ring.
fn inspect(path: &Path, file: &mut File) -> Result<Option<Found>> {
    let io = |e: io::Error| Error::io(format!("read staging file {}", path.display()), e);
    let refuse = |kind, what: String| {
        Err(Error::new(kind, format!("staging file {}: {what}", path.display())))
    };
    let mut bytes = vec![0; LINE * 8];
    let read = file.read(&mut bytes).map_err(io)?;
    let word = |bytes: &[u8], at: usize| {
        u64::from_ne_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("eight bytes"))
    };
    match word(&bytes, 0) {
        0 => return Ok(None),
        MAGIC if read == bytes.len() => {}
        _ => return refuse(ErrorKind::Invalid, "not a staging ring; not touched".to_owned()),
    }
    let version = word(&bytes, 1);
    if version != VERSION {
        let what = format!("version {version}, this release knows {VERSION}");
        return refuse(ErrorKind::Version, what);
    }
    let header: [u64; 6] = std::array::from_fn(|at| word(&bytes, at));
    let slots = u32::try_from(header[4]).unwrap_or(u32::MAX);
    let size = file.metadata().map_err(io)?.len();
    if word(&bytes, 6) != check(&header) {
        return refuse(ErrorKind::Damaged, "header crc mismatch".to_owned());
    }
    if usize::try_from(header[5]) != Ok(OWNERS) || size != length(slots) {
        let what = format!("{size} bytes do not hold {slots} slots and {} owners", header[5]);
        return refuse(ErrorKind::Damaged, what);
    }
    let mut bytes = vec![0; words(slots) * 8 - bytes.len()];
    file.read_exact(&mut bytes).map_err(io)?;
    let held = (0..slots).any(|at| word(&bytes, slot_line(at) - LINE) > 0);
    Ok(Some(Found { id: [header[2], header[3]], slots, held }))
}

fn map(path: &Path, file: &File, slots: u32) -> Result<Arc<Mapping>> {
    let mapping = Mapping::shared(file, words(slots), slots);
    let context = || format!("map staging file {}", path.display());
    mapping.map(Arc::new).map_err(|e| Error::io(context(), e))
}

fn words(slots: u32) -> usize {
    SLOTS_AT + index(slots) * LINE
}

fn length(slots: u32) -> u64 {
    u64::try_from(Mapping::length(words(slots), slots)).expect("a mapping fits the address space")
}

fn slot_line(at: u32) -> usize {
    SLOTS_AT + index(at) * LINE
}

fn fields_of(origin: &Origin, last: u64) -> [u64; 5] {
    let (high, low) = origin.owner.as_bytes().split_at(8);
    let word = |half: &[u8]| u64::from_ne_bytes(half.try_into().expect("half of 16 bytes"));
    [word(high), word(low), origin.epoch, origin.nonce, last]
}

fn owner_of(high: u64, low: u64) -> OwnerId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&high.to_ne_bytes());
    bytes[8..].copy_from_slice(&low.to_ne_bytes());
    OwnerId::new(bytes)
}

/// The CRC32 of some words, never zero: zero is what an unused line has.
fn check(words: &[u64]) -> u64 {
    let mut hasher = crc32fast::Hasher::new();
    for word in words {
        hasher.update(&word.to_ne_bytes());
    }
    u64::from(hasher.finalize()) | 1 << 32
}
