//! Disks with a damaged file system. The kernel refuses to mount each of them and continues without
//! it.

use std::fs;

use bindery_cli::guest::Architecture;
use libtest_mimic::{Completion, Failed, Trial};

use crate::command::{Expected, run};

/// The size of a block in bytes, the number of blocks on a disk, and the first block of content.
const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;
const CONTENT: u32 = 257;
/// A number of extents that do not fit in a file's block, which is also the maximum in a block of
/// extents.
const LISTED: u32 = 299;
const IN_LIST: u32 = 340;
/// The maximum number of blocks of extents that a file's block names.
const LISTS: u32 = 896;

/// The trial. One architecture is enough, because the file system's code is the same for both.
pub fn trial() -> Trial {
    Trial::ignorable_test("x86_64::disk_damaged", || {
        let damaged =
            "[bindery] /disk is not mounted: its file system is damaged; use a new image\n";
        let shorter = "[bindery] /disk is not mounted: the disk is shorter than its file system; \
                       restore the image's size\n";
        let whole = [(3, CONTENT, 1), (7, CONTENT + 1, 2)];
        let images = [
            (image(BLOCKS, &whole), "file\n"),
            (image(0, &[]), damaged),
            (image(CONTENT.into(), &[]), damaged),
            (image(BLOCKS + 1, &[]), shorter),
            (image(BLOCKS, &[(u32::MAX, CONTENT, 2)]), damaged),
            (image(BLOCKS, &[(0, u32::MAX, 2)]), damaged),
            (image(BLOCKS, &[(0, BLOCKS as u32 - 1, 2)]), damaged),
            (image(BLOCKS, &[(0, CONTENT - 1, 2)]), damaged),
            (image(BLOCKS, &[(0, CONTENT, 2), (2, CONTENT + 1, 2)]), damaged),
            (image(BLOCKS, &[(1, CONTENT, 1), (0, CONTENT + 1, 1)]), damaged),
            (image(BLOCKS, &[(0, CONTENT, 0)]), damaged),
            (last_of_names(), damaged),
            (listed(CONTENT, 0, LISTED), "file\n"),
            (listed(BLOCKS as u32, 0, LISTED), damaged),
            (listed(CONTENT - 1, 0, LISTED), damaged),
            (listed(CONTENT + 1, 0, LISTED), damaged),
            (listed(CONTENT, 1, LISTED), damaged),
            (listed(CONTENT, 0, LISTED - 1), damaged),
            (repeated(), damaged),
        ];
        for (image, output) in &images {
            let completion = mounted(image, output)?;
            if !matches!(completion, Completion::Completed) {
                return Ok(completion);
            }
        }
        Ok(Completion::Completed)
    })
}

/// Boots with the image and verifies the listing of its files.
fn mounted(image: &[u8], output: &'static str) -> Result<Completion, Failed> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("disk");
    fs::write(&file, image)?;
    let disk = file.to_string_lossy();
    let script = "ls /disk 2>/dev/null; exit 7";
    // The machine has little memory, because a damaged file must not make the kernel request more
    // than exists.
    let machine = ["--check", "--timeout", "60", "--memory", "64m", "--disk", &disk];
    let arguments = [&machine[..], &["busybox", "sh", "-c", script]].concat();
    let expected = Expected { status: 7, output: Some(output), message: "" };
    run(Architecture::X86_64, &arguments, &expected)
}

/// An image of [`BLOCKS`] blocks. Its superblock says that the file system has `blocks`. The file
/// system has one file with these extents, each a first page, a first block and a count.
fn image(blocks: u64, extents: &[(u32, u32, u32)]) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK * BLOCKS as usize];
    let mut put = |at: usize, from: &[u8]| bytes[at..at + from.len()].copy_from_slice(from);
    put(0, b"bindery\0");
    put(8, &1u32.to_le_bytes());
    put(12, &(CONTENT - 1).to_le_bytes());
    put(16, &blocks.to_le_bytes());
    put(BLOCK, b"file");
    put(BLOCK + 4, &0o644u32.to_le_bytes());
    put(BLOCK + 8, &40_000u64.to_le_bytes());
    put(BLOCK + 40, &(extents.len() as u32).to_le_bytes());
    put(BLOCK + 44, &4u32.to_le_bytes());
    put(BLOCK + 48, b"file");
    for (index, (page, block, count)) in extents.iter().enumerate() {
        for (word, value) in [page, block, count].into_iter().enumerate() {
            put(BLOCK + 512 + index * 12 + word * 4, &value.to_le_bytes());
        }
    }
    bytes
}

/// An image whose file was named last, so that no sequence number is left for the next naming.
fn last_of_names() -> Vec<u8> {
    let mut bytes = image(BLOCKS, &[(0, CONTENT, 1)]);
    bytes[BLOCK + 32..BLOCK + 40].fill(0xff);
    bytes
}

/// An image whose file names one block of extents as often as it can.
fn repeated() -> Vec<u8> {
    let mut bytes = listed(CONTENT, 0, IN_LIST);
    let mut put = |at: usize, word: u32| bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    put(BLOCK + 40, LISTS * IN_LIST);
    for list in 0..LISTS as usize {
        put(BLOCK + 512 + list * 4, CONTENT);
    }
    bytes
}

/// An image whose file names the block `list` for its [`LISTED`] extents. That block claims to hold
/// `count` extents of the file with this number. If `list` is not a block of content, they lie in
/// the first block of content.
fn listed(list: u32, number: u32, count: u32) -> Vec<u8> {
    let mut bytes = image(BLOCKS, &[]);
    let mut put = |at: usize, word: u32| bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    put(8, 2);
    put(BLOCK + 40, LISTED);
    put(BLOCK + 512, list);
    let is_content = (CONTENT..BLOCKS as u32).contains(&list);
    let start = BLOCK * if is_content { list } else { CONTENT } as usize;
    put(start, u32::from_le_bytes(*b"list"));
    put(start + 4, number);
    put(start + 8, count);
    for extent in 0..LISTED {
        let at = start + 16 + extent as usize * 12;
        put(at, extent * 2);
        put(at + 4, CONTENT + 1 + extent);
        put(at + 8, 1);
    }
    bytes
}
