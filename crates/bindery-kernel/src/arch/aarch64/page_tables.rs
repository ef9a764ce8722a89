//! The kernel's own mappings, in the upper half.
//!
//! | addresses | what |
//! |---|---|
//! | `0xffff_0000_0000_0000` + physical | memory, the console's registers; never executable |
//! | `0xffff_c000_0000_0000`, 512 GiB | what the kernel maps for itself (`memory::kernel_map`) |
//! | `0xffff_ff00_0000_0000` | the device tree, read-only |
//! | `0xffff_ffff_8000_0000` | the image, by sections (see [`boot`]) |
//!
//! Of the image, the direct map has the root table alone. What stands here is mapped once at boot and
//! stays; only empty entries are ever filled, so no break-before-make is needed. The console is among
//! it, since it must speak before there is memory to map anything with; other devices are mapped by
//! the kernel map.

use core::arch::asm;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use bindery::addr::Frame;

use super::boot;

/// Entries of a table.
const ENTRIES: usize = 512;

/// A translation table.
#[repr(C, align(4096))]
pub struct Table([u64; ENTRIES]);

impl Table {
    /// Nothing mapped.
    pub const EMPTY: Self = Self([0; ENTRIES]);
}

/// Where physical memory begins in the upper half.
pub const DIRECT_MAP: u64 = 0xffff_0000_0000_0000;
/// Where the device tree is mapped.
const DEVICE_TREE: u64 = 0xffff_ff00_0000_0000;

/// Entries: valid, and a table or a page.
const TABLE: u64 = 0b11;
/// A leaf that is no page.
const BLOCK: u64 = 0b01;
/// Inner shareable, accessed, executable by nobody.
const COMMON: u64 = 0b11 << 8 | 1 << 10 | 1 << 53 | 1 << 54;

/// What is mapped, and so how.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Memory to read and write.
    Memory,
    /// Memory to read.
    ReadOnly,
    /// Device registers.
    Device,
}

impl Kind {
    fn attributes(self) -> u64 {
        COMMON
            | match self {
                Self::Memory => 0,
                Self::ReadOnly => 1 << 7,
                Self::Device => 1 << 2, // attribute 1 of MAIR_EL1
            }
    }
}

/// Tables for the mappings that are made here.
const SPARE: usize = 32;
static mut SPARE_TABLES: [Table; SPARE] = [Table::EMPTY; SPARE];
static SPARE_USED: AtomicUsize = AtomicUsize::new(0);

/// What to add to a linked address for the physical one (wrapping); set before anything is mapped.
static LOAD_OFFSET: AtomicUsize = AtomicUsize::new(0);

/// Takes note of where the image was loaded.
pub fn begin(image: u64) {
    let linked = &raw const boot::_start as usize;
    LOAD_OFFSET.store((image as usize).wrapping_sub(linked), Ordering::Relaxed);
}

/// The physical address of something in the image.
pub fn physical<T: ?Sized>(linked: *const T) -> u64 {
    linked.addr().wrapping_add(LOAD_OFFSET.load(Ordering::Relaxed)) as u64
}

/// The table that an entry names: all of them lie in the image.
fn linked(entry: u64) -> *mut Table {
    let physical = (entry & 0x0000_ffff_ffff_f000) as usize;
    core::ptr::with_exposed_provenance_mut(
        physical.wrapping_sub(LOAD_OFFSET.load(Ordering::Relaxed)),
    )
}

/// Maps whole pages, in the largest pieces that both addresses allow. Pieces that are there
/// already stay as they are.
fn map(mut at: u64, mut from: u64, end: u64, kind: Kind) {
    while from < end {
        let left = end - from;
        let fits = |size: u64| (at | from).is_multiple_of(size) && left >= size;
        // Levels as the architecture counts them: 1 holds 1 GiB, 2 holds 2 MiB, 3 pages.
        let (level, size) = match () {
            () if fits(1 << 30) => (1, 1 << 30),
            () if fits(2 << 20) => (2, 2 << 20),
            () => (3, 4096),
        };
        let leaf = from | kind.attributes() | if level == 3 { TABLE } else { BLOCK };
        // SAFETY: boot, on one CPU, before anybody uses what is mapped here.
        unsafe {
            let slot = slot(at, level);
            if *slot == 0 {
                *slot = leaf;
            }
        }
        at += size;
        from += size;
    }
    // SAFETY: a barrier. The walker finds the entries from here on.
    unsafe { asm!("dsb ishst", "isb", options(nostack, preserves_flags)) };
}

/// The entry for `at` at `level`; tables on the way are made.
///
/// # Safety
/// Nobody else changes the tables.
unsafe fn slot(at: u64, level: u32) -> *mut u64 {
    let index = |level: u32| (at >> (39 - 9 * level)) as usize % ENTRIES;
    let mut table = &raw mut boot::ROOT;
    for above in 0..level {
        // SAFETY: tables lie in the image, which is mapped; the caller is alone with them.
        unsafe {
            let slot = &raw mut (*table).0[index(above)];
            if *slot == 0 {
                let next = SPARE_USED.fetch_add(1, Ordering::Relaxed);
                assert!(next < SPARE, "too few tables for the kernel's mappings");
                *slot = physical(&raw const SPARE_TABLES[next]) | TABLE;
            }
            assert!(*slot & TABLE == TABLE, "{at:#x} is mapped already, in a larger piece");
            table = linked(*slot);
        }
    }
    // SAFETY: as above.
    unsafe { &raw mut (*table).0[index(level)] }
}

/// Maps `start` to `end` of the direct map, in bytes; whole pages around them.
pub fn map_direct(start: u64, end: u64, kind: Kind) {
    let (start, end) = (start & !0xfff, end.next_multiple_of(4096));
    map(DIRECT_MAP + start, start, end, kind);
}

/// The root table of the upper half. It lies in the image; the direct map shows it from here on.
pub fn own_root() -> Frame {
    let root = physical(&raw const boot::ROOT);
    map_direct(root, root + size_of::<Table>() as u64, Kind::Memory);
    Frame((root >> 12) as u32)
}

/// Where the kernel reads and writes physical memory.
#[inline]
pub fn direct_map(physical: u64) -> NonNull<u8> {
    // SAFETY: the direct map does not begin at 0.
    unsafe {
        NonNull::new_unchecked(core::ptr::with_exposed_provenance_mut(
            (DIRECT_MAP + physical) as usize,
        ))
    }
}

/// The highest level of a leaf that the processor takes.
pub fn largest_leaf() -> u8 {
    3
}

/// Separate roots: programs' tables have nothing of the kernel's.
#[inline]
pub fn kernel_root() -> Option<Frame> {
    None
}

/// Maps the device tree at `physical`, and gives its bytes; `None` where there is none.
pub fn map_device_tree(physical: u64) -> Option<&'static [u8]> {
    const MAGIC: u32 = 0xd00d_feed;
    /// The magic number and the length, both big-endian.
    const HEADER: u64 = 8;
    if physical == 0 {
        return None;
    }
    let first = physical & !0xfff;
    let offset = physical - first;
    let at = core::ptr::with_exposed_provenance::<u8>((DEVICE_TREE + offset) as usize);
    map(DEVICE_TREE, first, (physical + HEADER).next_multiple_of(4096), Kind::ReadOnly);
    // SAFETY: mapped just now; the boot protocol aligns it by 8 bytes.
    let (magic, length) = unsafe { (at.cast::<u32>().read(), at.cast::<u32>().add(1).read()) };
    let length = u64::from(u32::from_be(length));
    // The boot protocol allows 2 MiB.
    if u32::from_be(magic) != MAGIC || length > 2 << 20 {
        return None;
    }
    map(DEVICE_TREE, first, (physical + length).next_multiple_of(4096), Kind::ReadOnly);
    // SAFETY: mapped for good, and kept out of free memory by `machine::read`.
    Some(unsafe { core::slice::from_raw_parts(at, length as usize) })
}
