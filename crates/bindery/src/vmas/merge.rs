//! Merges neighbors into one VMA.

use crate::addr::{VirtAddr, VirtRange};
use crate::platform::Platform;
use crate::rmap::RmapGuard;
use crate::vma::{MappingFlags, Purpose, Vma};

use super::VmaSet;

/// The flags in which two VMAs must agree to be merged.
fn essential(flags: MappingFlags) -> MappingFlags {
    flags - MappingFlags::STICKY
}

/// Whether `high`, which begins where `low` ends, can be merged with it (Linux:
/// `can_vma_merge_after` and its siblings).
///
/// A VMA without an anon group of anonymous pages may take over its neighbor's, unless that group
/// is inherited, because walks would then search for the pages of a group above in places where
/// they cannot be.
fn continues(low: &Vma, high: &Vma) -> bool {
    let flags = low.flags();
    low.end() == high.start()
        && essential(flags) == essential(high.flags())
        && low.object_pointer() == high.object_pointer()
        && low.userfault_pointer() == high.userfault_pointer()
        // Each VMA of a segment counts as an attachment, and a source of frames tracks each VMA, so
        // such VMAs do not merge, as on Linux.
        && low.object().is_none_or(|object| object.segment().is_none())
        && !flags.contains(MappingFlags::DONT_EXPAND)
        && low.page_offset_of(VirtAddr(low.end())) == high.page_offset()
        && match (low.group(), high.group()) {
            (None, None) => true,
            (Some(group), None) | (None, Some(group)) => !group.is_inherited(),
            (Some(low), Some(high)) => core::ptr::eq(low, high),
        }
}

/// The neighbors that a new mapping would continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Continues {
    /// One neighbor, which was extended over the range.
    Extended,
    /// Both: the new VMA merges with them ([`VmaSet::merge_around`]).
    Both,
    /// None of them, so the new VMA merges with neither.
    Neither,
}

/// Whether a new mapping with this purpose may become a part of `vma`, which is adjacent to it.
fn continues_new(vma: &Vma, purpose: &Purpose<'_>) -> bool {
    essential(vma.flags()) == essential(purpose.flags)
        && !purpose.flags.contains(MappingFlags::DONT_EXPAND)
        && vma.object_pointer() == purpose.holds().object
        // As in `continues`: a new attachment counts.
        && vma.object().is_none_or(|object| object.segment().is_none())
        && vma.group().is_none_or(|group| !group.is_inherited())
}

impl<'op, P: Platform> VmaSet<'op, '_, P> {
    /// Merges `vma` with its neighbors if they continue each other in every respect, and returns
    /// the result.
    pub(crate) fn merge_around(&mut self, vma: &'op Vma) -> &'op Vma {
        let mut vma = vma;
        // If `vma` can merge with either neighbor but not with both, the lower neighbor is chosen,
        // as on Linux.
        if let Some(previous) = self.previous(vma)
            && continues(previous, vma)
        {
            self.join(previous, vma);
            vma = previous;
        }
        if let Some(next) = self.next(vma)
            && continues(vma, next)
        {
            self.join(vma, next);
        }
        vma
    }

    fn join(&mut self, low: &'op Vma, high: &'op Vma) {
        let low = low.lock_write(self.platform());
        let high = high.lock_write(self.platform());
        if low.group_pointer().is_none()
            && let Some(group) = high.group()
        {
            self.adopt(low.vma(), group);
        }
        let end = high.end();
        low.set_flags(low.flags() | high.flags());
        RmapGuard::new(self.platform(), &low).resize(&low, low.start(), end);
        self.remove_uncounted(high);
        self.vmas.index.bounds_changed(&low);
    }

    /// Extends the VMA below or above a free `range` over it, if a new mapping there would continue
    /// that VMA and only that one. `next` is the first VMA that ends after the start of `range`.
    /// Needs no memory and no grace period.
    pub(crate) fn extend_neighbor(
        &mut self,
        range: VirtRange,
        next: Option<&'op Vma>,
        purpose: &Purpose<'_>,
        offset: u64,
    ) -> Continues {
        let previous = self.before(next, range.start().0);
        let below = previous.filter(|vma| is_below(vma, range, offset, purpose));
        let above = next.filter(|vma| {
            vma.start() == range.end().0
                && vma.page_offset() == offset.wrapping_add(range.pages())
                && continues_new(vma, purpose)
        });
        let vma = match (below, above) {
            (Some(vma), None) | (None, Some(vma)) => vma,
            (Some(_), Some(_)) => return Continues::Both,
            (None, None) => return Continues::Neither,
        };
        self.extend_over(vma, range);
        Continues::Extended
    }

    /// As [`VmaSet::extend_neighbor`], but only for the VMA below.
    pub(crate) fn extend_below(
        &mut self,
        range: VirtRange,
        purpose: &Purpose<'_>,
        offset: u64,
    ) -> bool {
        let below = self.last_at_or_before(range.start().0);
        let below = below.filter(|vma| is_below(vma, range, offset, purpose));
        below.map(|vma| self.extend_over(vma, range)).is_some()
    }

    fn extend_over(&mut self, vma: &'op Vma, range: VirtRange) {
        let (start, end) = (vma.start().min(range.start().0), vma.end().max(range.end().0));
        let vma = vma.lock_write(self.platform());
        self.change_flags(&vma, vma.flags() | MappingFlags::SOFT_DIRTY);
        self.resize(&vma, start, end);
    }
}

/// Whether `vma` ends at the start of a new mapping that would continue it.
fn is_below(vma: &Vma, range: VirtRange, offset: u64, purpose: &Purpose<'_>) -> bool {
    vma.end() == range.start().0
        && vma.page_offset_of(range.start()) == offset
        && continues_new(vma, purpose)
}
