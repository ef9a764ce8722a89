//! The mappings that the kernel makes at boot: its image, the direct map, what the firmware left in
//! memory. There is no [`bindery::KernelMap`] yet, and these addresses lie outside of its arena.
//!
//! Both architectures build these tables here, from the core's entry formats. A stretch of memory
//! is mapped by the largest leaves that its virtual and physical address allow:
//!
//! ```text
//! physical      0x3ff0_0000    0x4000_0000             0x8000_0000   0x8030_1000
//!               | 2 MiB leaves | 1 GiB leaf            | 2 MiB | 4 KiB leaves |
//! ```
//!
//! Only empty entries are filled: what is mapped already stays as it is, so nothing has to be
//! invalidated and no entry needs break-before-make.

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, Entry, Kind, Level, MemoryType, Permissions};

use crate::boot::Stretch;

use super::{EntryFormat, largest_leaf};

/// What is mapped, and so with which permissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapping {
    /// Code of the kernel.
    Code,
    /// Memory that the kernel only reads.
    Constants,
    /// Memory that it reads and writes.
    Data,
    /// Registers of a device.
    #[cfg_attr(target_arch = "x86_64", expect(dead_code, reason = "the console has ports there"))]
    Device,
}

impl Mapping {
    /// The leaf at `level` that maps `frame` so.
    pub const fn leaf(self, frame: Frame, level: Level<EntryFormat>) -> Entry {
        let (permissions, memory) = match self {
            Self::Code => (Permissions::READ.union(Permissions::EXECUTE), MemoryType::Normal),
            Self::Constants => (Permissions::READ, MemoryType::Normal),
            Self::Data => (Permissions::READ.union(Permissions::WRITE), MemoryType::Normal),
            Self::Device => (Permissions::READ.union(Permissions::WRITE), MemoryType::Device),
        };
        EntryFormat::kernel_leaf(frame, level, permissions, memory)
    }
}

/// The memory that tables lie in.
///
/// # Safety
/// 1. [`TableMemory::allocate`] returns frames that are zeroed and that nobody else uses.
/// 2. [`TableMemory::entries`] is where a table that was allocated, or the root, can be read and
///    written.
pub unsafe trait TableMemory {
    /// An empty table.
    fn allocate(&mut self) -> Frame;

    /// The first entry of a table.
    fn entries(&self, table: Frame) -> *mut Entry;
}

/// The tables under one root, while they are built.
pub struct BootTables<M> {
    /// The table of the highest level.
    pub root: Frame,
    /// Where further tables come from.
    pub memory: M,
}

impl<M: TableMemory> BootTables<M> {
    /// Maps the whole pages around `memory`, of which the first is mapped at the page of `at`.
    pub fn map(&mut self, at: VirtAddr, memory: Stretch, mapping: Mapping) {
        let start = memory.start & !(PAGE_SIZE - 1);
        let end = memory.end.next_multiple_of(PAGE_SIZE);
        let mut at = at.0 & !(PAGE_SIZE - 1);
        let largest = largest_leaf();
        let mut physical = start;
        while physical < end {
            // The larger leaves are for what is left of `memory`.
            let leaf = |frame, level: Level<_>| {
                let fits = level <= largest && level.span() <= end - physical;
                fits.then(|| mapping.leaf(frame, level))
            };
            let covered = self.map_leaf(VirtAddr(at), physical, leaf);
            at = at.wrapping_add(covered);
            physical += covered;
        }
    }

    /// Maps `physical` at `at` by the first leaf, from the largest down, that `leaf` makes and that
    /// both addresses allow. Returns how many bytes from `at` on a leaf maps now, which may be one
    /// that was there before.
    fn map_leaf(
        &mut self,
        at: VirtAddr,
        physical: u64,
        leaf: impl Fn(Frame, Level<EntryFormat>) -> Option<Entry>,
    ) -> u64 {
        let frame = Frame((physical / PAGE_SIZE) as u32);
        let (mut table, mut level) = (self.root, EntryFormat::ROOT);
        loop {
            let size = level.span();
            let index = level.index_of(at).slot();
            // SAFETY: an index within the table, which `TableMemory` lets us read and write.
            let entry = unsafe { &mut *self.memory.entries(table).add(index) };
            table = match level.kind(*entry) {
                Kind::Leaf => return size - at.0 % size,
                Kind::Table => EntryFormat::frame(*entry),
                Kind::Empty | Kind::Absent => {
                    let aligned = (at.0 | physical).is_multiple_of(size);
                    if let Some(leaf) = aligned.then(|| leaf(frame, level)).flatten() {
                        *entry = leaf;
                        return size;
                    }
                    let new = self.memory.allocate();
                    *entry = EntryFormat::table_entry(new);
                    new
                }
            };
            level = level.below();
        }
    }
}
