//! Counts the entries of a table span before the span is collapsed.

use crate::addr::VirtRange;
use crate::arch::{AbsentFormat, Arch, Kind, Level};
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::look;

use super::CollapseLimits;

/// Counts of the pages that one level-2 entry covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::space) struct PmdScan {
    /// Whether a huge leaf already maps the span.
    pub(in crate::space) huge: bool,
    pub(in crate::space) present: u32,
    /// The entries of `present` that map the zero page.
    pub(in crate::space) zero: u32,
    pub(in crate::space) shared: u32,
    pub(in crate::space) pinned: bool,
    /// The number of pages in swap.
    pub(in crate::space) swapped: u32,
    /// Whether an entry is neither empty, nor a leaf, nor a swap entry.
    pub(in crate::space) absent: bool,
}

impl PmdScan {
    /// Whether one of the counts exceeds its limit, in a span of `pages` pages.
    pub(in crate::space) fn exceeds(&self, limits: &CollapseLimits, pages: u32) -> bool {
        let missing = pages - self.present - self.swapped + self.zero;
        missing > limits.missing || self.swapped > limits.swapped || self.shared > limits.shared
    }
}

/// Counts the entries of the span. The caller holds the lock of the span's VMA for writing.
pub(in crate::space) fn scan_pmd<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
) -> PmdScan {
    let frames = &page_table.memory.frames;
    let mut scan = PmdScan::default();
    look::look(page_table, range, |looked| {
        match looked.node.level.kind(looked.raw) {
            Kind::Leaf if looked.node.level > Level::PTE => scan.huge = true,
            Kind::Leaf => {
                let frame = P::Arch::frame(looked.entry);
                scan.present += 1;
                scan.zero += u32::from(page_table.memory.is_zero(frame));
                if let Some(folio) = frames.folio_of(frame) {
                    let number = frame.0 - folio.head.0;
                    // After a child has copied its pages, a folio with a single owner may lack the
                    // exclusive bit, so its mappings are also compared.
                    let elsewhere = || frames.folio(folio).mappings() > folio.pages();
                    let exclusive = frames.folio(folio).exclusive().contains(number);
                    scan.shared += u32::from(!exclusive && elsewhere());
                    scan.pinned |= frames.folio(folio).pins() > 0;
                }
            }
            Kind::Absent if P::Arch::is_swap(looked.raw) => {
                scan.swapped += looked.range.pages() as u32;
            }
            Kind::Absent => {
                scan.absent = true;
                scan.present += u32::from(P::Arch::is_prot_none(looked.raw));
            }
            Kind::Empty | Kind::Table => {}
        }
        true
    });
    scan
}
