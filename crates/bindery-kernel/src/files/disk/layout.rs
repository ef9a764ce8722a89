//! The layout of the disk: a superblock, a table with one block for each file, and content.
//!
//! A file's block holds its name, its attributes and its extents, so a file changes atomically.
//! Extents that do not fit there lie in blocks among the content, which the file's block names;
//! each change writes new blocks of extents before the file's block. The disk has no map of free
//! blocks: mounting builds the map from the extents, so the two never disagree.

use alloc::vec::Vec;

use crate::disk::BLOCK_SIZE;

use super::extents::Extent;

/// The superblock's first bytes.
const MAGIC: [u8; 8] = *b"bindery\0";
/// The version of the layout. In version 1 a file's block held all its extents.
const VERSION: u32 = 2;
/// The first bytes of a file's block.
const FILE: [u8; 4] = *b"file";
/// The first bytes of a block of extents.
const LIST: [u8; 4] = *b"list";

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
/// The most extents in a file's block.
pub const WITHIN: usize = (BLOCK_SIZE - EXTENTS) / 12;
/// The place of the extents in a block of extents.
const LISTED: usize = 16;
/// The most extents in such a block.
pub const IN_LIST: usize = (BLOCK_SIZE - LISTED) / 12;
/// The most extents of a file.
pub const EXTENTS_MAX: usize = (BLOCK_SIZE - EXTENTS) / 4 * IN_LIST;

/// A block of the disk.
pub type Block = [u8; BLOCK_SIZE];

/// A file, as its block describes it.
pub struct Record {
    /// The file's name; `None` if the file was unlinked.
    pub name: Option<Vec<u8>>,
    /// The file's size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// The time of the last change of the file's content, in nanoseconds since 1970.
    pub modified: u64,
    /// Rises with each naming. If two files have one name, the later one owns it.
    pub sequence: u64,
    /// The file's extents, by rising page.
    pub extents: Vec<Extent>,
    /// The blocks of extents that the file's block on the disk names.
    pub lists: Vec<u32>,
}

/// The number of blocks of extents that a file with this number of extents needs.
pub fn lists_of(extents: usize) -> usize {
    if extents <= WITHIN { 0 } else { extents.div_ceil(IN_LIST) }
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
    /// A file system, its number of blocks, and whether it has the older layout.
    Ours(u64, bool),
    /// A file system of another version.
    Unknown,
    /// No file system of this layout.
    None,
}

/// Reads the superblock.
pub fn read_superblock(block: &Block) -> Superblock {
    if block[..8] != MAGIC {
        Superblock::None
    } else if (1..=VERSION).contains(&word(block, 8)) && word(block, 12) == FILES as u32 {
        Superblock::Ours(long(block, 16), word(block, 8) < VERSION)
    } else {
        Superblock::Unknown
    }
}

fn put_extent(block: &mut Block, at: usize, extent: &Extent) {
    put(block, at, &extent.page.to_le_bytes());
    put(block, at + 4, &extent.block.to_le_bytes());
    put(block, at + 8, &extent.count.to_le_bytes());
}

fn extent(block: &Block, at: usize) -> Extent {
    Extent { page: word(block, at), block: word(block, at + 4), count: word(block, at + 8) }
}

/// Writes a file's block with these extents. The block of a file without a name is empty. If the
/// extents do not fit, the block names the blocks of `lists`, which hold them ([`write_list`]).
pub fn write_record(block: &mut Block, record: &Record, extents: &[Extent], lists: &[u32]) {
    block.fill(0);
    let Some(name) = &record.name else { return };
    put(block, 0, &FILE);
    put(block, 4, &record.mode.to_le_bytes());
    put(block, 8, &record.size.to_le_bytes());
    put(block, 16, &record.owner.0.to_le_bytes());
    put(block, 20, &record.owner.1.to_le_bytes());
    put(block, 24, &record.modified.to_le_bytes());
    put(block, 32, &record.sequence.to_le_bytes());
    put(block, 40, &(extents.len() as u32).to_le_bytes());
    put(block, 44, &(name.len() as u32).to_le_bytes());
    put(block, 48, name);
    for (index, list) in lists.iter().enumerate() {
        put(block, EXTENTS + index * 4, &list.to_le_bytes());
    }
    let within = if lists.is_empty() { extents } else { &[] };
    for (index, extent) in within.iter().enumerate() {
        put_extent(block, EXTENTS + index * 12, extent);
    }
}

/// Reads a file's block, without the extents in other blocks, whose number is returned too. `None`
/// if the block is empty or damaged.
pub fn read_record(block: &Block) -> Option<(Record, usize)> {
    let (extents, name) = (word(block, 40) as usize, word(block, 44) as usize);
    if block[..4] != FILE || extents > EXTENTS_MAX || !(1..=NAME_MAX).contains(&name) {
        return None;
    }
    let within = if extents <= WITHIN { extents } else { 0 };
    let lists = (0..lists_of(extents)).map(|index| word(block, EXTENTS + index * 4));
    let record = Record {
        name: Some(block[48..48 + name].to_vec()),
        size: long(block, 8),
        mode: word(block, 4) & 0o7777,
        owner: (word(block, 16), word(block, 20)),
        modified: long(block, 24),
        sequence: long(block, 32),
        extents: (0..within).map(|index| extent(block, EXTENTS + index * 12)).collect(),
        lists: lists.collect(),
    };
    Some((record, extents - within))
}

/// Writes a block of extents of the file of this number.
pub fn write_list(block: &mut Block, file: u64, extents: &[Extent]) {
    block.fill(0);
    put(block, 0, &LIST);
    put(block, 4, &(file as u32).to_le_bytes());
    put(block, 8, &(extents.len() as u32).to_le_bytes());
    for (index, extent) in extents.iter().enumerate() {
        put_extent(block, LISTED + index * 12, extent);
    }
}

/// Decodes a block as a list of `extents` extents of the file with this number. `None` if it is no
/// list, belongs to another file, or has another number of extents.
pub fn read_list(block: &Block, file: u64, extents: usize) -> Option<Vec<Extent>> {
    let head = [word(block, 4), word(block, 8)];
    let is_own = block[..4] == LIST && head == [file as u32, extents as u32];
    is_own.then(|| (0..extents).map(|index| extent(block, LISTED + index * 12)).collect())
}
