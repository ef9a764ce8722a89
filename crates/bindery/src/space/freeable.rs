//! The freeable span of an unmapped range: what the page table may lose with it.

use core::ptr::NonNull;

use crate::addr::VirtRange;
use crate::arch::{Arch, Level};
use crate::platform::Platform;
use crate::vma::Vma;

use super::{AddressSpace, MmapLocked};

impl<P: Platform> AddressSpace<'_, P> {
    /// `range`, in which nothing will be mapped any more, and around it whole table spans in which
    /// nothing is mapped either: what the page table may lose with it. `occupied` counts as
    /// mapped.
    ///
    /// ```text
    /// VMAs     |  A  |                 (range)             | B |
    /// tables   |----------|----------|----------|----------|----------|
    /// freeable span                |<-------------------------->|
    /// ```
    pub(super) fn freeable(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        occupied: VirtRange,
    ) -> VirtRange {
        let next = self.first_ending_after(mm, range.start().0);
        let begins = next.map_or(u64::MAX, Vma::start);
        let mut ceiling = begins;
        if begins < range.end().0 {
            let above = self.first_ending_after(mm, range.end().0);
            ceiling = above.map_or(u64::MAX, |vma| vma.start().max(range.end().0));
        }
        let previous = match next {
            Some(next) => self.vmas.previous(NonNull::from(next)),
            None => self.vmas.find_at_or_before(range.start().0),
        };
        let mut floor = previous.map_or(0, |previous| self.vma(previous).end());
        if begins < range.start().0 {
            floor = range.start().0;
        }
        Self::freeable_between(range, floor, ceiling, occupied)
    }

    /// As [`AddressSpace::freeable`], where nothing else is mapped from `floor` to `ceiling`.
    pub(super) fn freeable_between(
        range: VirtRange,
        mut floor: u64,
        mut ceiling: u64,
        occupied: VirtRange,
    ) -> VirtRange {
        if !occupied.is_empty() {
            if occupied.start() >= range.end() {
                ceiling = ceiling.min(occupied.start().0);
            } else {
                floor = floor.max(occupied.end().0);
            }
        }
        let (mut start, mut end) = (range.start().0, range.end().0);
        for level in Level::PMD.up_to(P::Arch::ROOT) {
            let mask = level.span() - 1;
            let low = range.start().0 & !mask;
            if low < floor || low.saturating_add(mask) >= ceiling {
                break;
            }
            start = low;
        }
        for level in Level::PMD.up_to(P::Arch::ROOT) {
            let mask = level.span() - 1;
            let low = (range.end().0 - 1) & !mask;
            if low < floor || low.saturating_add(mask) >= ceiling {
                break;
            }
            end = low + mask + 1;
        }
        VirtRange::raw(start, end)
    }
}
