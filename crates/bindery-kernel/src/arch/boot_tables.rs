//! The mappings that the kernel makes at boot: its image, the direct map, the firmware's tables.
//! [`bindery::KernelMap`] does not exist yet, and these addresses lie outside its arena.
//!
//! Both architectures build these tables here, from the core's entry formats. A range of memory is
//! mapped by the largest leaves that its virtual and physical address allow:
//!
//! ```text
//! physical      0x3ff0_0000    0x4000_0000             0x8000_0000   0x8030_1000
//!               | 2 MiB leaves | 1 GiB leaf            | 2 MiB | 4 KiB leaves |
//! ```
//!
//! Only empty entries are filled: existing mappings are kept, so nothing has to be invalidated and
//! no entry needs break-before-make.

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::arch::{Arch, Entry, Kind, Level, MemoryType, Permissions};

use crate::boot::Stretch;

use super::{EntryFormat, largest_leaf};

/// The use of a mapping, which decides its permissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapping {
    /// Code of the kernel.
    Code,
    /// Memory that the kernel only reads.
    Constants,
    /// Memory that the kernel reads and writes.
    Data,
    /// Registers of a device.
    #[cfg_attr(target_arch = "x86_64", expect(dead_code, reason = "the console has ports there"))]
    Device,
}

impl Mapping {
    /// The leaf at `level` that maps `frame` with these permissions.
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

/// The memory of the tables.
///
/// # Safety
/// 1. [`TableMemory::allocate`] returns frames that are zeroed and unused.
/// 2. [`TableMemory::entries`] returns a pointer that is valid for reads and writes of the entries
///    of the root and of each allocated table.
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
    /// The source of further tables.
    pub memory: M,
}

impl<M: TableMemory> BootTables<M> {
    /// Maps the whole pages around `memory`, the first one at the page of `at`.
    pub fn map(&mut self, at: VirtAddr, memory: Stretch, mapping: Mapping) {
        let start = memory.start & !(PAGE_SIZE - 1);
        let end = memory.end.next_multiple_of(PAGE_SIZE);
        let mut at = at.0 & !(PAGE_SIZE - 1);
        let largest = largest_leaf();
        let mut physical = start;
        while physical < end {
            // A leaf must fit into the rest of `memory`.
            let leaf = |frame, level: Level<_>| {
                let fits = level <= largest && level.span() <= end - physical;
                fits.then(|| mapping.leaf(frame, level))
            };
            let covered = self.map_leaf(VirtAddr(at), physical, leaf);
            at = at.wrapping_add(covered);
            physical += covered;
        }
    }

    /// Maps `physical` at `at` with a leaf. Tries the levels from the largest down, within the
    /// limits of `leaf` and of the alignment of both addresses. Returns the number of bytes from
    /// `at` on that a single leaf now maps, possibly an older leaf.
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
            let index = level.index_of(at).position();
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
