//! The id of a log directory: sixteen random bytes in a file of their own, by which a staging ring
//! knows the directory it belongs to.
//!
//! ```text
//! file "id", one block, little-endian
//!    0   8  magic "WALDIRID"      8   4  version, 1     12   4  CRC32 of the block, these 4 as zero
//!   16  16  id                   32  ..  reserved, zero
//! ```
//!
//! Version history: 1, the first.

use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, BLOCK_BYTES, get_u32, get_u64, header_crc, is_zero, put_u32, put_u64};
use crate::memory::BlockBuf;
use crate::storage::{Durability, Storage};

const NAME: &str = "id";
const UNFINISHED: &str = "id.tmp";
const MAGIC: &[u8; 8] = b"WALDIRID";
const VERSION: u32 = 1;

/// The id of a directory; a new one for a new directory.
pub(crate) fn load_or_create(
    storage: &dyn Storage,
    random: &(dyn Fn() -> u64 + Send + Sync),
) -> Result<[u64; 2]> {
    let path = storage.path().join(NAME);
    let names = storage
        .list("")
        .map_err(|e| Error::io(format!("list log directory {}", storage.path().display()), e))?;
    if names.iter().any(|name| name == NAME) {
        return load(storage);
    }
    // A leftover of a start that was cut short says nothing.
    if names.iter().any(|name| name == UNFINISHED) {
        let removed = storage.remove(UNFINISHED);
        removed.map_err(|e| Error::io(format!("remove {}.tmp", path.display()), e))?;
    }
    let id = [random(), random()];
    create(storage, id).map_err(|e| Error::io(format!("create {}", path.display()), e))?;
    Ok(id)
}

fn load(storage: &dyn Storage) -> Result<[u64; 2]> {
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

fn decode(block: &[u8]) -> Result<[u64; 2], (ErrorKind, String)> {
    if block.len() != BLOCK_BYTES {
        let what = format!("{} bytes instead of {BLOCK_BYTES}", block.len());
        return Err((ErrorKind::Damaged, what));
    }
    if &block[..8] != MAGIC || get_u32(block, 12) != header_crc(block) {
        return Err((ErrorKind::Damaged, "not the id of a log directory".to_owned()));
    }
    let version = get_u32(block, 8);
    if version != VERSION || !is_zero(&block[32..]) {
        return Err((ErrorKind::Version, format!("unknown version {version}")));
    }
    Ok([get_u64(block, 16), get_u64(block, 24)])
}

fn create(storage: &dyn Storage, id: [u64; 2]) -> std::io::Result<()> {
    let mut block = BlockBuf::new(1);
    let bytes = block.bytes_mut();
    bytes[..8].copy_from_slice(MAGIC);
    put_u32(bytes, 8, VERSION);
    put_u64(bytes, 16, id[0]);
    put_u64(bytes, 24, id[1]);
    let crc = header_crc(bytes);
    put_u32(bytes, 12, crc);
    let file = storage.create(UNFINISHED, BLOCK)?;
    file.write_at(&[block.bytes()], 0, Durability::Volatile)?;
    file.sync()?;
    storage.rename(UNFINISHED, NAME)?;
    storage.sync_folder("")
}
