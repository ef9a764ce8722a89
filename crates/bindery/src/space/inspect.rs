//! Looking at what is mapped, for tests, debuggers and `/proc`.

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{self, Absent, Arch, Attributes, Kind, absent};
use crate::platform::Platform;
use crate::table::lock::Depth;

use super::AddressSpace;
use super::index::Indexed;
use super::vma::Protection;

/// What the page table says about one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inspection {
    /// Nothing stands there.
    Empty,
    /// A page is mapped.
    Page {
        /// Its frame.
        frame: Frame,
        /// What the entry says. In a contiguous block, accessed and dirty may stand in another
        /// entry of the block.
        attributes: Attributes,
        /// The level of the leaf: 1 for a base page.
        level: u8,
        /// Whether the entry belongs to a contiguous block.
        contiguous: bool,
    },
    /// Something that only software understands.
    Absent(Absent),
}

/// One mapping of an address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Its addresses.
    pub range: VirtRange,
    /// What programs may do with it.
    pub protection: Protection,
    /// Where it begins in what backs it, in pages; for anonymous memory its address at birth.
    pub page_offset: u64,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// What the page table says about the page of `addr`; empty for addresses outside of user
    /// space. Waits for verbs that are under way. Constant time.
    pub fn inspect(&self, addr: VirtAddr) -> Inspection {
        if addr >= self.limit() {
            return Inspection::Empty;
        }
        // A table that is on its way to another place would answer for the wrong address.
        let _guard = self.mutex.lock();
        let page = addr.align_down(crate::addr::PAGE_SIZE);
        let range = VirtRange::raw(page.0, page.0 + crate::addr::PAGE_SIZE);
        let mut cursor = self.table.cursor(range, Depth::Floor(1));
        let (node, index, raw) = cursor.entry_at(page);
        cursor.counts = crate::stats::Counts::default();
        // A huge entry names the first of its pages.
        let inside = (page.0 & (arch::span::<P::Arch>(node.level) - 1)) >> PAGE_SHIFT;
        match arch::kind::<P::Arch>(raw, node.level) {
            Kind::Empty | Kind::Table => Inspection::Empty,
            Kind::Leaf => {
                let entry = if node.level == 1 { P::Arch::unblock(raw, index) } else { raw };
                Inspection::Page {
                    frame: P::Arch::frame(entry).plus(inside as u32),
                    attributes: P::Arch::attributes(entry),
                    level: node.level,
                    contiguous: node.level == 1 && P::Arch::is_block(raw),
                }
            }
            Kind::Absent => match absent::decode::<P::Arch>(raw) {
                Some(Absent::Hidden { frame, accessed, dirty, soft_dirty, userfault }) => {
                    let frame = frame.plus(inside as u32);
                    let hidden = Absent::Hidden { frame, accessed, dirty, soft_dirty, userfault };
                    Inspection::Absent(hidden)
                }
                absent => absent.map_or(Inspection::Empty, Inspection::Absent),
            },
        }
    }

    /// Calls `f` for every mapping, in rising order, with the mutex held: `f` must not call verbs
    /// of this address space.
    pub fn for_each_mapping(&self, mut f: impl FnMut(Mapping)) {
        let _guard = self.mutex.lock();
        for node in self.vmas.iter() {
            let vma = self.vma(node);
            f(Mapping {
                range: VirtRange::raw(vma.start(), vma.end()),
                protection: vma.protection(),
                page_offset: vma.page_offset(),
            });
        }
    }
}
