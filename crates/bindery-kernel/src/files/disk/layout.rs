//! The layout of the disk: a superblock, a table with one block for each file, and content.
//!
//! A file's block has its name, its attributes and its extents, so it changes at once. There is no
//! map of free blocks on the disk: it is made of the extents at mount, and so it never disagrees
//! with them.

use alloc::vec::Vec;

use crate::disk::BLOCK_SIZE;

use super::extents::Extent;

/// The superblock's first bytes.
const MAGIC: [u8; 8] = *b"bindery\0";
/// The version of the layout.
const VERSION: u32 = 1;
/// The first bytes of a file's block.
const FILE: [u8; 4] = *b"file";

/// The most files.
pub const FILES: usize = 256;
/// The first block of the table.
pub const TABLE: u64 = 1;
/// The first block of content.
pub const CONTENT: u64 = TABLE + FILES as u64;
/// The longest name.
pub const NAME_MAX: usize = 255;

/// The place of the extents in a file's block.
const EXTENTS: usize = 512;
/// The most extents of a file.
pub const EXTENTS_MAX: usize = (BLOCK_SIZE - EXTENTS) / 12;

/// A block of the disk.
pub type Block = [u8; BLOCK_SIZE];

/// A file, as its block describes it.
pub struct Record {
    /// Its name; none if it was unlinked.
    pub name: Option<Vec<u8>>,
    /// Its size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// The time of the last change of its content, in nanoseconds since 1970.
    pub modified: u64,
    /// Rises with each naming: of two files of one name the later one is it.
    pub sequence: u64,
    /// By rising page.
    pub extents: Vec<Extent>,
}

fn put(block: &mut Block, at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

fn word(block: &Block, at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn long(block: &Block, at: usize) -> u64 {
    u64::from(word(block, at)) | u64::from(word(block, at + 4)) << 32
}

/// Writes the superblock of a disk of `blocks` blocks.
pub fn write_superblock(block: &mut Block, blocks: u64) {
    block.fill(0);
    put(block, 0, &MAGIC);
    put(block, 8, &VERSION.to_le_bytes());
    put(block, 12, &(FILES as u32).to_le_bytes());
    put(block, 16, &blocks.to_le_bytes());
}

/// The content of the first block of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Superblock {
    /// A file system, and its number of blocks.
    Ours(u64),
    /// One of another version.
    Unknown,
    /// Nothing of ours.
    None,
}

/// Reads the superblock.
pub fn read_superblock(block: &Block) -> Superblock {
    if block[..8] != MAGIC {
        Superblock::None
    } else if word(block, 8) == VERSION && word(block, 12) == FILES as u32 {
        Superblock::Ours(long(block, 16))
    } else {
        Superblock::Unknown
    }
}

/// Writes a file's block; one without a name is empty.
pub fn write_record(block: &mut Block, record: &Record) {
    block.fill(0);
    let Some(name) = &record.name else { return };
    put(block, 0, &FILE);
    put(block, 4, &record.mode.to_le_bytes());
    put(block, 8, &record.size.to_le_bytes());
    put(block, 16, &record.owner.0.to_le_bytes());
    put(block, 20, &record.owner.1.to_le_bytes());
    put(block, 24, &record.modified.to_le_bytes());
    put(block, 32, &record.sequence.to_le_bytes());
    put(block, 40, &(record.extents.len() as u32).to_le_bytes());
    put(block, 44, &(name.len() as u32).to_le_bytes());
    put(block, 48, name);
    for (index, extent) in record.extents.iter().enumerate() {
        let at = EXTENTS + index * 12;
        put(block, at, &extent.page.to_le_bytes());
        put(block, at + 4, &extent.block.to_le_bytes());
        put(block, at + 8, &extent.count.to_le_bytes());
    }
}

/// Reads a file's block; `None` if it is empty or damaged.
pub fn read_record(block: &Block) -> Option<Record> {
    let (extents, name) = (word(block, 40) as usize, word(block, 44) as usize);
    if block[..4] != FILE || extents > EXTENTS_MAX || !(1..=NAME_MAX).contains(&name) {
        return None;
    }
    let extent = |index: usize| {
        let at = EXTENTS + index * 12;
        Extent { page: word(block, at), block: word(block, at + 4), count: word(block, at + 8) }
    };
    let mut list = Vec::with_capacity(EXTENTS_MAX);
    list.extend((0..extents).map(extent));
    Some(Record {
        name: Some(block[48..48 + name].to_vec()),
        size: long(block, 8),
        mode: word(block, 4) & 0o7777,
        owner: (word(block, 16), word(block, 20)),
        modified: long(block, 24),
        sequence: long(block, 32),
        extents: list,
    })
}
