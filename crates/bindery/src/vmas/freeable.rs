//! The freeable span of an unmapped range: the part of the page table that can be freed with the
//! range.

use crate::addr::VirtRange;
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::vma::Vma;

use super::VmaView;

impl<P: Platform> VmaView<'_, P> {
    /// `range`, in which nothing will remain mapped, extended by the surrounding whole table spans
    /// without mappings. `occupied` counts as mapped.
    ///
    /// ```text
    /// VMAs     |  A  |                 (range)             | B |
    /// tables   |----------|----------|----------|----------|----------|
    /// freeable span                |<-------------------------->|
    /// ```
    pub(crate) fn freeable(self, range: VirtRange, occupied: VirtRange) -> VirtRange {
        let next = self.first_ending_after(range.start().0);
        let begins = next.map_or(u64::MAX, Vma::start);
        let mut ceiling = begins;
        if begins < range.end().0 {
            let above = self.first_ending_after(range.end().0);
            ceiling = above.map_or(u64::MAX, |vma| vma.start().max(range.end().0));
        }
        let mut floor = self.before(next, range.start().0).map_or(0, Vma::end);
        if begins < range.start().0 {
            floor = range.start().0;
        }
        freeable_between::<P::Arch>(range, floor..ceiling, occupied)
    }
}

/// As [`VmaView::freeable`], if `free` contains no other mapping.
pub(crate) fn freeable_between<A: Arch>(
    range: VirtRange,
    free: core::ops::Range<u64>,
    occupied: VirtRange,
) -> VirtRange {
    let (mut floor, mut ceiling) = (free.start, free.end);
    if !occupied.is_empty() {
        if occupied.start() >= range.end() {
            ceiling = ceiling.min(occupied.start().0);
        } else {
            floor = floor.max(occupied.end().0);
        }
    }
    let (mut start, mut end) = (range.start().0, range.end().0);
    for level in Level::PMD.up_to(A::ROOT) {
        let mask = level.span() - 1;
        let low = range.start().0 & !mask;
        if low < floor || low.saturating_add(mask) >= ceiling {
            break;
        }
        start = low;
    }
    for level in Level::PMD.up_to(A::ROOT) {
        let mask = level.span() - 1;
        let low = (range.end().0 - 1) & !mask;
        if low < floor || low.saturating_add(mask) >= ceiling {
            break;
        }
        end = low + mask + 1;
    }
    VirtRange::raw(start, end)
}
