//! The freeable span of an unmapped range: the part of the page table that can be freed with the
//! range.

use crate::addr::VirtRange;
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::vma::Vma;

use super::VmaView;

impl<'op, P: Platform> VmaView<'op, P> {
    /// `range`, in which nothing will remain mapped, extended by the surrounding whole table spans
    /// without mappings. `first` is the first VMA that ends after the start of `range`; `occupied`
    /// counts as mapped.
    ///
    /// ```text
    /// VMAs     |  A  |                 (range)             | B |
    /// tables   |----------|----------|----------|----------|----------|
    /// freeable span                |<-------------------------->|
    /// ```
    pub(crate) fn freeable(
        self,
        range: VirtRange,
        first: Option<&'op Vma>,
        occupied: VirtRange,
    ) -> VirtRange {
        let begins = first.map_or(u64::MAX, Vma::start);
        let mut ceiling = begins;
        if begins < range.end().0 {
            let above = self.first_above(range, first);
            ceiling = above.map_or(u64::MAX, |vma| vma.start().max(range.end().0));
        }
        // A mapping above the range in the same table keeps the table, whatever is below.
        if range.start().0 | (P::Arch::PMD.span() - 1) >= ceiling {
            return range;
        }
        let floor = if begins < range.start().0 {
            range.start().0
        } else {
            self.before(first, range.start().0).map_or(0, Vma::end)
        };
        freeable_between::<P::Arch>(range, floor..ceiling, occupied)
    }

    /// The first VMA that ends after `range`, by a search only if `range` has more than one VMA.
    fn first_above(self, range: VirtRange, first: Option<&'op Vma>) -> Option<&'op Vma> {
        let end = range.end().0;
        match first {
            Some(only) if only.end() == end => self.next(only),
            Some(last) if last.end() > end => Some(last),
            _ => self.first_ending_after(end),
        }
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
