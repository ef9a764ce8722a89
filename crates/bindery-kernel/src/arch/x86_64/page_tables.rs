//! The kernel's own tables.
//!
//! ```text
//! 0000000000000000 .. 00007ffffffff000   a program's (the core builds it)
//! ffff800000000000 + physical            the direct map: all memory, and the firmware's tables
//! ffffc00000000000 .. ffffc07fffffffff   what the kernel maps for itself (`memory::kernel_map`)
//! ffffffff80000000 + physical            the kernel's image, part by part
//! ```
//! No page can be written and executed: the direct map is never executable, and shows the image's
//! code and constants read-only. Every program's root shares the upper half's three entries,
//! which are never changed after boot. All leaves there are global.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use bindery::FrameRange;
use bindery::addr::Frame;

use crate::boot::{Information, MAX_RANGES, Stretch};

use super::{cpu_features, tlb};

const DIRECT_MAP: u64 = 0xffff_8000_0000_0000;
const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// What the boot tables reach, and so where new tables have to lie.
const REACH: u64 = 1 << 30;

/// The most memory that the direct map has room for: one entry of the root.
const MOST: u64 = 1 << 39;

const PAGE: u64 = 4096;
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const ACCESSED_AND_DIRTY: u64 = 3 << 5;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// What may be done with a mapping of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Code.
    Code,
    /// Constants.
    Constants,
    /// Anything in memory that changes.
    Data,
}

impl Kind {
    fn bits(self) -> u64 {
        PRESENT
            | ACCESSED_AND_DIRTY
            | GLOBAL
            | match self {
                Self::Code => 0,
                Self::Constants => NO_EXECUTE,
                Self::Data => NO_EXECUTE | WRITABLE,
            }
    }
}

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

/// Where the image lies, with its low part.
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

/// Tables in the making; used at boot alone.
pub struct Tables {
    root: u64,
    free: Stretch,
    giant_pages: bool,
}

impl Tables {
    fn new_table(&mut self) -> u64 {
        let table = self.free.start;
        assert!(table < self.free.end, "too little memory for the kernel's tables");
        self.free.start += PAGE;
        // SAFETY: the frame is free memory that was taken for tables, and is mapped.
        unsafe { super::zero(direct_map(table).as_ptr(), PAGE as usize) };
        table
    }

    /// Maps whole pages around `memory` at [`DIRECT_MAP`], in the largest pieces; what is mapped already
    /// stays as it is.
    pub fn map(&mut self, memory: Stretch, kind: Kind) {
        self.map_at(DIRECT_MAP, memory, kind);
    }

    fn map_at(&mut self, base: u64, memory: Stretch, kind: Kind) {
        let mut at = memory.start & !(PAGE - 1);
        let end = memory.end.next_multiple_of(PAGE);
        while at < end {
            at = self.map_piece(base + at, at, end - at, kind);
        }
    }

    /// Maps one piece, at most `length` long; gives the physical address behind it.
    fn map_piece(&mut self, address: u64, at: u64, length: u64, kind: Kind) -> u64 {
        let (mut table, mut level) = (self.root, 4);
        loop {
            let size = 1 << (12 + 9 * (level - 1));
            let entry = entry(table, address, level);
            // SAFETY: `entry` points into a table of ours.
            let value = unsafe { entry.read() };
            let is_leaf_size = level <= 2 || level == 3 && self.giant_pages;
            if value == 0 && is_leaf_size && (address | at).is_multiple_of(size) && length >= size {
                let large = if level > 1 { LARGE } else { 0 };
                // SAFETY: as above; nothing was mapped there.
                unsafe { entry.write(at | large | kind.bits()) };
                return at + size;
            }
            if value != 0 && (level == 1 || value & LARGE != 0) {
                return (at | (size - 1)) + 1;
            }
            table = if value == 0 {
                let new = self.new_table();
                // SAFETY: as above.
                unsafe { entry.write(new | PRESENT | WRITABLE | (ACCESSED_AND_DIRTY & !(1 << 6))) };
                new
            } else {
                value & ADDRESS
            };
            level -= 1;
        }
    }

    /// A root of its own with the kernel and one page of code where it lies: what a CPU needs that
    /// switches paging on there.
    pub fn root_with_identity(&mut self, page: Stretch) -> u64 {
        let kernel = self.root;
        self.root = self.new_table();
        // SAFETY: both are tables of ours.
        unsafe {
            super::copy(direct_map(kernel).as_ptr(), direct_map(self.root).as_ptr(), PAGE as usize)
        };
        self.map_at(0, page, Kind::Code);
        core::mem::replace(&mut self.root, kernel)
    }
}

/// The entry for `address` in a table of `level`.
fn entry(table: u64, address: u64, level: u32) -> *mut u64 {
    let index = address >> (12 + 9 * (level - 1)) & 511;
    direct_map(table + index * 8).cast().as_ptr()
}

/// Lays the kernel's tables and loads them. Takes memory for them, and says so in `reserved`.
pub fn begin(information: &mut Information) -> Tables {
    for memory in &mut information.memory {
        memory.end = memory.end.min(MOST);
        memory.start = memory.start.min(memory.end);
    }
    let giant_pages = cpu_features::has_giant_pages();
    let end = information.memory.iter().map(|memory| memory.end).max().unwrap_or(0);
    // The edges of each stretch take a table of two levels each, the image and the devices a few.
    let large = if giant_pages { 0 } else { end >> 30 };
    let size = (large + 48) * PAGE;
    let mut ranges = [FrameRange { first: Frame(0), count: 0 }; MAX_RANGES];
    let count = information.free_memory(Stretch::default(), &mut ranges);
    let place = ranges[..count].iter().map(|range| {
        let start = u64::from(range.first.0) * PAGE;
        Stretch { start, end: start + u64::from(range.count) * PAGE }
    });
    let Some(place) = place.into_iter().find(|place| place.start + size <= place.end.min(REACH))
    else {
        panic!("no room for the kernel's tables");
    };
    let free = Stretch { start: place.start, end: place.start + size };
    information.reserved[4] = free;

    let mut tables = Tables { root: 0, free, giant_pages };
    tables.root = tables.new_table();
    let [code, constants, data, end] = [
        &raw const text_start,
        &raw const rodata_start,
        &raw const data_start,
        &raw const image_end,
    ]
    .map(physical);
    tables.map_at(IMAGE, Stretch { start: code, end: constants }, Kind::Code);
    tables.map_at(IMAGE, Stretch { start: constants, end: data }, Kind::Constants);
    tables.map_at(IMAGE, Stretch { start: data, end }, Kind::Data);
    // First what has to be read-only: it stays so when the memory around it follows.
    tables.map(Stretch { start: code, end: data }, Kind::Constants);
    for memory in information.memory {
        tables.map(memory, Kind::Data);
    }
    ROOT.store(tables.root, Ordering::Relaxed);
    tlb::unload_root();
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

/// The same table, under which the kernel's own addresses lie.
pub fn own_root() -> Frame {
    Frame((ROOT.load(Ordering::Relaxed) >> 12) as u32)
}

/// The highest level of a leaf that the processor takes.
pub fn largest_leaf() -> u8 {
    if cpu_features::has_giant_pages() { 3 } else { 2 }
}

/// Whether an address of the kernel is mapped.
pub fn is_mapped(address: u64) -> bool {
    let mut table = ROOT.load(Ordering::Relaxed);
    if address < DIRECT_MAP || table == 0 {
        return false;
    }
    for level in [4, 3, 2, 1] {
        // SAFETY: a table of the kernel, which lies in the direct map.
        let value = unsafe { entry(table, address, level).read_volatile() };
        if value & PRESENT == 0 {
            return false;
        }
        if value & LARGE != 0 {
            return true;
        }
        table = value & ADDRESS;
    }
    true
}
