//! The kernel's own tables.
//!
//! ```text
//! 0000000000000000 .. 00007ffffffff000   a program (the core builds its tables)
//! ffff800000000000 + physical            the direct map: all memory, and the firmware's tables
//! ffffc00000000000 .. ffffc07fffffffff   the arena of `memory::kernel_map`
//! ffffffff80000000 + physical            the kernel's image, section by section
//! ```
//! No page is both writable and executable. The direct map is never executable, and it maps the
//! image's code and constants read-only. Every program's root shares the upper half's three
//! entries, which never change after boot. All leaves there are global.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::FrameRange;
use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, Entry, Kind, Level};

use crate::boot::{Information, MAX_RANGES, Stretch};

use super::super::boot_tables::{BootTables, Mapping, TableMemory};
use super::{EntryFormat, cpu_features, tlb};

const DIRECT_MAP: u64 = 0xffff_8000_0000_0000;
const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// The bytes that the boot tables map; new tables must lie within them.
const REACH: u64 = 1 << 30;

/// The maximum size of the direct map: one entry of the root.
const MOST: u64 = 1 << 39;

/// The physical address of the kernel's root table.
static ROOT: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    static image_start: u8;
    static text_start: u8;
    static rodata_start: u8;
    static data_start: u8;
    static image_end: u8;
}

/// The physical address of something in the image's upper part.
fn physical(symbol: *const u8) -> u64 {
    symbol as u64 - IMAGE
}

/// The memory of the image, with its low part.
pub fn image() -> Stretch {
    Stretch { start: (&raw const image_start) as u64, end: physical(&raw const image_end) }
}

/// The direct map.
#[inline]
pub fn direct_map(at: u64) -> NonNull<u8> {
    // SAFETY: the direct map does not begin at address 0.
    unsafe {
        NonNull::new_unchecked(core::ptr::with_exposed_provenance_mut((DIRECT_MAP + at) as usize))
    }
}

/// Free memory for boot tables, within the mapped memory.
pub struct TableFrames(Stretch);

// SAFETY: 1: each frame is taken from the stretch once, and zeroed. 2: the direct map of the boot
// tables, and of the kernel's own, shows the stretch.
unsafe impl TableMemory for TableFrames {
    fn allocate(&mut self) -> Frame {
        let table = self.0.start;
        assert!(
            table < self.0.end,
            "the machine has too little memory for the kernel's page tables: give it more \
             (`--memory`)"
        );
        self.0.start += PAGE_SIZE;
        // SAFETY: the frame is free memory that was taken for tables, and is mapped.
        unsafe { super::zero(direct_map(table).as_ptr(), PAGE_SIZE as usize) };
        Frame((table / PAGE_SIZE) as u32)
    }

    fn entries(&self, table: Frame) -> *mut Entry {
        direct_map(table.start().0).cast().as_ptr()
    }
}

/// The kernel's tables while boot builds them.
pub type Tables = BootTables<TableFrames>;

impl Tables {
    /// Maps whole pages around `memory` in the direct map; existing mappings are kept.
    pub fn map_direct(&mut self, memory: Stretch, mapping: Mapping) {
        self.map(VirtAddr(DIRECT_MAP + memory.start), memory, mapping);
    }

    fn map_image(&mut self, part: Stretch, mapping: Mapping) {
        self.map(VirtAddr(IMAGE + part.start), part, mapping);
    }

    /// A separate root with the kernel and an identity mapping of one page of code, for a CPU that
    /// enables paging in that page.
    pub fn root_with_identity(&mut self, page: Stretch) -> Frame {
        let kernel = self.root;
        self.root = self.memory.allocate();
        // SAFETY: both are whole tables of ours, and not the same one.
        unsafe {
            let (from, to) = (self.memory.entries(kernel), self.memory.entries(self.root));
            super::copy(from.cast(), to.cast(), PAGE_SIZE as usize);
        }
        self.map(VirtAddr(page.start), page, Mapping::Code);
        core::mem::replace(&mut self.root, kernel)
    }
}

/// Builds the kernel's tables and loads them. Allocates memory for them and records it in
/// `reserved`.
pub fn begin(information: &mut Information) -> Tables {
    for memory in &mut information.memory {
        memory.end = memory.end.min(MOST);
        memory.start = memory.start.min(memory.end);
    }
    let giant_pages = cpu_features::has_giant_pages();
    let end = information.memory.iter().map(|memory| memory.end).max().unwrap_or(0);
    // Each edge of a range takes up to two tables; the image and the devices take a few.
    let large = if giant_pages { 0 } else { end >> 30 };
    let size = (large + 48) * PAGE_SIZE;
    let mut ranges = [FrameRange { first: Frame(0), count: 0 }; MAX_RANGES];
    let count = information.free_memory(Stretch::default(), &mut ranges);
    let place = ranges[..count].iter().map(|range| {
        let start = u64::from(range.first.0) * PAGE_SIZE;
        Stretch { start, end: start + u64::from(range.count) * PAGE_SIZE }
    });
    let Some(place) = place.into_iter().find(|place| place.start + size <= place.end.min(REACH))
    else {
        panic!(
            "the first GiB has no free area for the kernel's page tables: give the machine more \
             memory (`--memory`)"
        );
    };
    let free = Stretch { start: place.start, end: place.start + size };
    information.reserved[4] = free;

    let mut memory = TableFrames(free);
    let mut tables = Tables { root: memory.allocate(), memory };
    let [code, constants, data, end] = [
        &raw const text_start,
        &raw const rodata_start,
        &raw const data_start,
        &raw const image_end,
    ]
    .map(physical);
    tables.map_image(Stretch { start: code, end: constants }, Mapping::Code);
    tables.map_image(Stretch { start: constants, end: data }, Mapping::Constants);
    tables.map_image(Stretch { start: data, end }, Mapping::Data);
    // Read-only parts come first, because existing mappings stay when the memory around them is
    // mapped.
    tables.map_direct(Stretch { start: code, end: data }, Mapping::Constants);
    for memory in information.memory {
        tables.map_direct(memory, Mapping::Data);
    }
    ROOT.store(tables.root.start().0, Ordering::Relaxed);
    tlb::load_own_root();
    // The leaves of the first tables are global too, and map everything writable and executable.
    tlb::begin();
    tables
}

/// The physical address of the kernel's root table.
#[inline]
pub(super) fn root() -> u64 {
    ROOT.load(Ordering::Relaxed)
}

/// The table whose upper half every program's root shares.
#[inline]
pub fn kernel_root() -> Option<Frame> {
    Some(own_root())
}

/// The same table: kernel addresses lie under it.
pub fn own_root() -> Frame {
    Frame((ROOT.load(Ordering::Relaxed) >> 12) as u32)
}

/// The highest level at which the processor accepts a leaf.
pub fn largest_leaf() -> Level<EntryFormat> {
    if cpu_features::has_giant_pages() { Level::PUD } else { Level::PMD }
}

/// Whether an address of the kernel is mapped.
pub fn is_mapped(address: u64) -> bool {
    let mut table = root();
    if address < DIRECT_MAP || table == 0 {
        return false;
    }
    for level in Level::PTE.up_to(EntryFormat::ROOT).rev() {
        let index = level.index_of(VirtAddr(address)).position();
        let entries = direct_map(table).cast::<Entry>();
        // SAFETY: an entry of a table of the kernel, which lies in the direct map.
        let entry = unsafe { entries.add(index).read_volatile() };
        match level.kind(entry) {
            Kind::Table => table = EntryFormat::frame(entry).start().0,
            Kind::Leaf => return true,
            Kind::Empty | Kind::Absent => return false,
        }
    }
    false
}
