//! What a log directory knows of itself: an id, by which a staging ring knows the directory it belongs
//! to, and the path of that ring, so that another path does not silently leave records behind.
//!
//! ```text
//! file "id", one block, little-endian
//!    0   8  magic "WALDIRID"      8   4  version, 1     12   4  CRC32 of the block, these 4 as zero
//!   16  16  id                   32   2  length of the path of the staging ring; 0 if there was none
//!   34   n  that path           34+n  .. reserved, zero
//! ```
//!
//! Version history: 1, the first.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, BLOCK_BYTES, get_u32, get_u64, header_crc, is_zero, put_u32, put_u64};
use crate::memory::BlockBuf;
use crate::storage::{Durability, Storage};

const NAME: &str = "id";
const UNFINISHED: &str = "id.tmp";
const MAGIC: &[u8; 8] = b"WALDIRID";
const VERSION: u32 = 1;

/// The longest path that fits.
const PATH_BYTES_MAX: usize = BLOCK_BYTES - AT_PATH;
const AT_PATH: usize = 34;

/// What the file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: [u64; 2],
    /// The ring that was used last.
    pub(crate) ring: Option<PathBuf>,
}

/// The identity of a directory; a new one for a new directory.
pub(crate) fn load_or_create(
    storage: &dyn Storage,
    random: &(dyn Fn() -> u64 + Send + Sync),
) -> Result<Identity> {
    let names = storage
        .list("")
        .map_err(|e| Error::io(format!("list log directory {}", storage.path().display()), e))?;
    if names.iter().any(|name| name == NAME) {
        return load(storage);
    }
    let identity = Identity { id: [random(), random()], ring: None };
    store(storage, &identity)?;
    Ok(identity)
}

/// Notes the ring that is used from now on.
pub(crate) fn note_ring(storage: &dyn Storage, identity: &Identity, ring: &Path) -> Result<()> {
    if ring.as_os_str().len() > PATH_BYTES_MAX {
        let reason = format!("the path of the staging ring has more than {PATH_BYTES_MAX} bytes");
        return Err(Error::new(ErrorKind::Invalid, reason));
    }
    store(storage, &Identity { ring: Some(ring.to_owned()), ..identity.clone() })
}

fn load(storage: &dyn Storage) -> Result<Identity> {
    let path = storage.path().join(NAME);
    let mut block = BlockBuf::new(1);
    let read = storage.open(NAME).and_then(|file| file.read_at(block.bytes_mut(), 0));
    let read = read.map_err(|e| Error::io(format!("read {}", path.display()), e))?;
    decode(&block.bytes()[..read]).map_err(|(kind, what)| {
        let reason = format!(
            "{}: {what}; it ties the staging ring to this directory: put it back from a copy, or \
             remove it together with the staging file",
            path.display()
        );
        Error::new(kind, reason)
    })
}

fn decode(block: &[u8]) -> Result<Identity, (ErrorKind, String)> {
    let damaged = |what: String| Err((ErrorKind::Damaged, what));
    if block.len() != BLOCK_BYTES {
        return damaged(format!("{} bytes instead of {BLOCK_BYTES}", block.len()));
    }
    if &block[..8] != MAGIC || get_u32(block, 12) != header_crc(block) {
        return damaged("not the id of a log directory".to_owned());
    }
    let version = get_u32(block, 8);
    if version != VERSION {
        return Err((ErrorKind::Version, format!("unknown version {version}")));
    }
    let bytes = usize::from(u16::from_le_bytes([block[32], block[33]]));
    if bytes > PATH_BYTES_MAX || !is_zero(&block[AT_PATH + bytes..]) {
        return damaged("impossible contents".to_owned());
    }
    let ring = Path::new(OsStr::from_bytes(&block[AT_PATH..AT_PATH + bytes]));
    Ok(Identity {
        id: [get_u64(block, 16), get_u64(block, 24)],
        ring: (bytes > 0).then(|| ring.to_owned()),
    })
}

fn encode(identity: &Identity, block: &mut [u8]) {
    let ring = identity.ring.as_ref().map_or(&b""[..], |ring| ring.as_os_str().as_bytes());
    let bytes = u16::try_from(ring.len()).expect("checked against PATH_BYTES_MAX");
    block[..8].copy_from_slice(MAGIC);
    put_u32(block, 8, VERSION);
    put_u64(block, 16, identity.id[0]);
    put_u64(block, 24, identity.id[1]);
    block[32..AT_PATH].copy_from_slice(&bytes.to_le_bytes());
    block[AT_PATH..AT_PATH + ring.len()].copy_from_slice(ring);
    let crc = header_crc(block);
    put_u32(block, 12, crc);
}

/// Writes the file beside the old one and puts it in its place.
fn store(storage: &dyn Storage, identity: &Identity) -> Result<()> {
    let mut block = BlockBuf::new(1);
    encode(identity, block.bytes_mut());
    let replace = || {
        // A leftover of a start that was cut short says nothing.
        if storage.list("")?.iter().any(|name| name == UNFINISHED) {
            storage.remove(UNFINISHED)?;
        }
        let file = storage.create(UNFINISHED, BLOCK)?;
        file.write_at(&[block.bytes()], 0, Durability::Volatile)?;
        file.sync()?;
        storage.rename(UNFINISHED, NAME)?;
        storage.sync_folder("")
    };
    let path = storage.path().join(NAME);
    replace().map_err(|e| Error::io(format!("write {}", path.display()), e))
}
