//! The kernel's own mappings, in the upper half.
//!
//! | addresses | what |
//! |---|---|
//! | `0xffff_0000_0000_0000` + physical | memory, the console's registers; never executable |
//! | `0xffff_c000_0000_0000`, 512 GiB | the arena of [`crate::memory::kernel_map`] |
//! | `0xffff_ff00_0000_0000` | the device tree, read-only |
//! | `0xffff_ffff_8000_0000` | the image, by sections (see `boot`) |
//!
//! The direct map shows only the root table of the image. The kernel's own mappings are made once,
//! at boot, and never removed. They include the console, which is used before the kernel map
//! exists; the kernel map maps all other devices.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, Entry, Level};

use crate::boot::Stretch;

use super::super::boot_tables::{BootTables, Mapping, TableMemory};
use super::{EntryFormat, tlb};

/// Entries of a table.
const ENTRIES: usize = EntryFormat::ENTRIES as usize;

/// A translation table.
#[repr(C, align(4096))]
pub struct Table([Entry; ENTRIES]);

impl Table {
    /// A table without entries.
    pub const EMPTY: Self = Self([Entry::EMPTY; ENTRIES]);
}

/// The root of the upper half (`TTBR1_EL1`).
pub static mut ROOT: Table = Table::EMPTY;
/// The root of the lower half while no program's tables are loaded (`TTBR0_EL1`).
pub static mut NO_PROGRAM: Table = Table::EMPTY;

unsafe extern "C" {
    /// The first byte of the image.
    pub static _start: u8;
    /// The address one past the image.
    pub static __image_end: u8;
    /// The address one past the room for loops, which begins where the image ends.
    pub static __loops_end: u8;
}

/// Whether loops behind the image replace its atomic instructions (see `boot`).
pub static HAS_LOOPS: AtomicBool = AtomicBool::new(false);

/// The address of physical memory in the upper half.
pub const DIRECT_MAP: u64 = 0xffff_0000_0000_0000;
/// The address of the device tree.
const DEVICE_TREE: u64 = 0xffff_ff00_0000_0000;

/// Tables for the mappings that are made here.
const SPARE: usize = 32;
static mut SPARE_TABLES: [Table; SPARE] = [Table::EMPTY; SPARE];
static SPARE_USED: AtomicUsize = AtomicUsize::new(0);

/// The physical address minus the linked address (wrapping); set before anything is mapped.
static LOAD_OFFSET: AtomicUsize = AtomicUsize::new(0);

/// Records where the image was loaded.
pub fn begin(image: u64) {
    let linked = &raw const _start as usize;
    LOAD_OFFSET.store((image as usize).wrapping_sub(linked), Ordering::Relaxed);
}

/// The physical address one past the image and its loops.
pub fn image_end() -> u64 {
    let has_loops = HAS_LOOPS.load(Ordering::Relaxed);
    physical(if has_loops { &raw const __loops_end } else { &raw const __image_end })
}

/// The physical address of something in the image.
pub fn physical<T: ?Sized>(linked: *const T) -> u64 {
    linked.addr().wrapping_add(LOAD_OFFSET.load(Ordering::Relaxed)) as u64
}

/// Tables of the image: [`SPARE_TABLES`], one after the other.
struct ImageTables;

// SAFETY: 1: each table is taken once and was never used before. 2: the root, the image's own
// tables and those taken here lie in the image, which is mapped where it was linked.
unsafe impl TableMemory for ImageTables {
    fn allocate(&mut self) -> Frame {
        let next = SPARE_USED.fetch_add(1, Ordering::Relaxed);
        assert!(next < SPARE, "the kernel has too few page tables for the machine's memory map");
        let table = (&raw const SPARE_TABLES).cast::<Table>().wrapping_add(next);
        Frame((physical(table) / PAGE_SIZE) as u32)
    }

    fn entries(&self, table: Frame) -> *mut Entry {
        let linked = table.start().0.wrapping_sub(LOAD_OFFSET.load(Ordering::Relaxed) as u64);
        core::ptr::with_exposed_provenance_mut(linked as usize)
    }
}

/// Maps whole pages around `memory` from the page of `at` on. Called only at boot, on one CPU.
fn map(at: u64, memory: Stretch, mapping: Mapping) {
    let root = Frame((physical(&raw const ROOT) / PAGE_SIZE) as u32);
    BootTables { root, memory: ImageTables }.map(VirtAddr(at), memory, mapping);
    // From here on the table walker sees the entries.
    tlb::publish_entries();
}

/// Maps whole pages around `memory` in the direct map.
pub fn map_direct(memory: Stretch, mapping: Mapping) {
    map(DIRECT_MAP + memory.start, memory, mapping);
}

/// The root table of the upper half. The table lies in the image, and from here on the direct map
/// shows the table.
pub fn own_root() -> Frame {
    let root = physical(&raw const ROOT);
    map_direct(Stretch { start: root, end: root + PAGE_SIZE }, Mapping::Data);
    Frame((root / PAGE_SIZE) as u32)
}

/// The address at which the kernel reads and writes physical memory.
#[inline]
pub fn direct_map(physical: u64) -> NonNull<u8> {
    // SAFETY: the direct map does not begin at 0.
    unsafe {
        NonNull::new_unchecked(core::ptr::with_exposed_provenance_mut(
            (DIRECT_MAP + physical) as usize,
        ))
    }
}

/// The highest level at which the processor accepts a leaf.
pub fn largest_leaf() -> Level<EntryFormat> {
    Level::PUD
}

/// `None`, because the roots are separate and programs' tables contain no kernel entries.
#[inline]
pub fn kernel_root() -> Option<Frame> {
    None
}

/// Maps the device tree at `physical` and returns its bytes. `None` if there is no tree.
pub fn map_device_tree(physical: u64) -> Option<&'static [u8]> {
    const MAGIC: u32 = 0xd00d_feed;
    /// The magic number and the length, both big-endian.
    const HEADER: u64 = 8;
    if physical == 0 {
        return None;
    }
    let address = DEVICE_TREE + physical % PAGE_SIZE;
    let at = core::ptr::with_exposed_provenance::<u8>(address as usize);
    let tree = |length| Stretch { start: physical, end: physical + length };
    map(address, tree(HEADER), Mapping::Constants);
    // SAFETY: mapped just now; the boot protocol aligns it by 8 bytes.
    let (magic, length) = unsafe { (at.cast::<u32>().read(), at.cast::<u32>().add(1).read()) };
    let length = u64::from(u32::from_be(length));
    // The boot protocol allows 2 MiB.
    if u32::from_be(magic) != MAGIC || length > 2 << 20 {
        return None;
    }
    map(address, tree(length), Mapping::Constants);
    // SAFETY: mapped forever, and kept out of free memory by `machine::read`.
    Some(unsafe { core::slice::from_raw_parts(at, length as usize) })
}
