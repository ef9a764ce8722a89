//! Reads mappings and their usage, for tests, debuggers and `/proc`.

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Kind, Level};
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::table::EntryAt;
use crate::table::locking::Depth;

use super::AddressSpace;
use crate::vma::{MappingFlags, Protection, Vma};

/// The page table's entry for one page.
///
/// ```
/// use bindery::addr::{Frame, VirtAddr};
/// use bindery::{AddressSpace, Inspection, Platform};
///
/// fn frame<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Option<Frame> {
///     match space.inspect(at) {
///         Inspection::Page { frame, .. } => Some(frame),
///         _ => None,
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inspection<A: Arch> {
    /// The entry is empty.
    Empty,
    /// A page is mapped.
    Page {
        /// The frame of the page.
        frame: Frame,
        /// The attributes of the entry. In a contiguous run, the accessed and dirty bits may be in
        /// another entry of the run.
        attributes: Attributes,
        /// The level of the leaf: 1 for a base page.
        level: Level<A>,
        /// Whether the entry belongs to a contiguous run.
        contiguous: bool,
    },
    /// An absent entry.
    Absent(Absent),
}

/// One mapping of an address space.
///
/// ```
/// use bindery::{AddressSpace, Platform, Protection};
///
/// fn writable_bytes<P: Platform>(space: &AddressSpace<'_, P>) -> u64 {
///     let mut bytes = 0;
///     space.for_each_mapping(|mapping| {
///         if mapping.protection.contains(Protection::WRITE) {
///             bytes += mapping.range.len();
///         }
///     });
///     bytes
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The addresses of the mapping.
    pub range: VirtRange,
    /// The program's permissions.
    pub protection: Protection,
    /// The offset of the mapping's first page in its object, in pages; for anonymous memory, the
    /// page offset of its anonymous pages.
    pub page_offset: u64,
    /// The flags of the whole mapping.
    pub flags: MappingFlags,
    /// The mapping's object, by [`crate::Object::identity`]; `None` for anonymous memory.
    pub object: Option<u64>,
}

impl Mapping {
    pub(crate) fn of(vma: &Vma) -> Self {
        Self {
            range: vma.range(),
            protection: vma.protection(),
            page_offset: vma.page_offset(),
            flags: vma.flags(),
            object: vma.object().map(ObjectState::identity),
        }
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// The page table's entry for the page of `addr`; empty for addresses outside user space. Waits
    /// for running operations.
    ///
    /// Context: may sleep. Complexity: constant.
    pub fn inspect(&self, addr: VirtAddr) -> Inspection<P::Arch> {
        inspect(self, addr)
    }

    /// Calls `f` for every mapping, in ascending order, with the mutex held, so `f` must not call
    /// operations of this address space.
    ///
    /// Context: may sleep.
    pub fn for_each_mapping(&self, mut f: impl FnMut(Mapping)) {
        let vmas = self.vmas.lock();
        vmas.view().iter().for_each(|vma| f(Mapping::of(vma)));
    }

    /// The number of mappings visited so far by all address lookups of faults and operations.
    #[cfg(any(test, feature = "measure"))]
    pub fn mappings_looked_at(&self) -> u64 {
        self.vmas.looked_at()
    }
}

fn inspect<P: Platform>(space: &AddressSpace<'_, P>, addr: VirtAddr) -> Inspection<P::Arch> {
    if addr >= space.limit() {
        return Inspection::Empty;
    }
    // The mutex excludes moves: a table in the middle of a move would answer for the wrong address.
    let _guard = space.vmas.lock();
    let page = addr.align_down(crate::addr::PAGE_SIZE);
    let range = VirtRange::raw(page.0, page.0 + crate::addr::PAGE_SIZE);
    let section = space.page_table.read_section();
    let mut cursor = space.page_table.cursor(&section, range, Depth::Floor(Level::PTE));
    let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
    cursor.counts = crate::stats::Counts::default();
    // A huge entry records the frame of its first page.
    let inside = (page.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
    match node.level.kind(raw) {
        Kind::Empty | Kind::Table => Inspection::Empty,
        Kind::Leaf => {
            let entry = node.single(raw, index);
            Inspection::Page {
                frame: P::Arch::frame(entry).plus(inside as u32),
                attributes: P::Arch::attributes(entry),
                level: node.level,
                contiguous: node.in_contig(raw),
            }
        }
        Kind::Absent => match P::Arch::decode_absent(raw) {
            Some(mut absent) => {
                if let Absent::ProtNone { frame, .. } = &mut absent {
                    *frame = frame.plus(inside as u32);
                }
                Inspection::Absent(absent)
            }
            None => Inspection::Empty,
        },
    }
}
