//! What a table span has, counted before it is collapsed.

use crate::addr::VirtRange;
use crate::arch::{AbsentFormat, Arch, Kind, Level};
use crate::platform::Platform;
use crate::table::PageTable;

use super::CollapseLimits;

/// What one entry of level 2 maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::space) struct Census {
    pub(in crate::space) huge: bool,
    pub(in crate::space) present: u32,
    /// Of these, mappings of the zero page.
    pub(in crate::space) zero: u32,
    pub(in crate::space) shared: u32,
    pub(in crate::space) pinned: bool,
    /// Pages in swap.
    pub(in crate::space) swapped: u32,
    /// An entry is neither empty nor a leaf, nor in swap.
    pub(in crate::space) absent: bool,
}

impl Census {
    /// Whether there is too much of something, in a span of so many pages.
    pub(in crate::space) fn exceeds(&self, limits: &CollapseLimits, pages: u32) -> bool {
        let missing = pages - self.present - self.swapped + self.zero;
        missing > limits.missing || self.swapped > limits.swapped || self.shared > limits.shared
    }
}

/// The entries of the span; its VMA is locked for writing.
pub(in crate::space) fn census<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
) -> Census {
    let frames = &page_table.memory.frames;
    let mut census = Census::default();
    page_table.look(range, |looked| {
        match looked.node.level.kind(looked.raw) {
            Kind::Leaf if looked.node.level > Level::PTE => census.huge = true,
            Kind::Leaf => {
                let frame = P::Arch::frame(looked.entry);
                census.present += 1;
                census.zero += u32::from(page_table.memory.is_zero(frame));
                if let Some(folio) = frames.folio_of(frame) {
                    let number = frame.0 - folio.head.0;
                    // What a child has copied since may be nobody else's, and not be known as
                    // such.
                    let elsewhere = || frames.folio(folio).mappings() > folio.pages();
                    let exclusive = frames.folio(folio).exclusive().contains(number);
                    census.shared += u32::from(!exclusive && elsewhere());
                    census.pinned |= frames.folio(folio).pins() > 0;
                }
            }
            Kind::Absent if P::Arch::is_swap(looked.raw) => {
                census.swapped += looked.range.pages() as u32;
            }
            Kind::Absent => {
                census.absent = true;
                census.present += u32::from(P::Arch::is_prot_none(looked.raw));
            }
            Kind::Empty | Kind::Table => {}
        }
        true
    });
    census
}
