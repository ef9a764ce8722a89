//! Iteration over the mappings of a range, in which holes are an error at the end.

use crate::addr::{VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;

use super::vma::Vma;
use super::{AddressSpace, MmapLocked};

/// A walk over what is mapped of a range, as `madvise` and `msync` do it: holes are passed over,
/// and reported when the rest is done.
pub(super) struct Parts {
    at: VirtAddr,
    end: VirtAddr,
    hole: Option<VirtAddr>,
}

impl Parts {
    pub(super) fn of(range: VirtRange) -> Self {
        Self { at: range.start(), end: range.end(), hole: None }
    }

    /// The next VMA and what the range has of it. The mutex may be let go between two calls.
    pub(super) fn next<'a, P: Platform>(
        &mut self,
        mm: &MmapLocked,
        space: &'a AddressSpace<'_, P>,
    ) -> Option<(&'a Vma, VirtRange)> {
        if self.at >= self.end {
            return None;
        }
        let vma = space.first_ending_after(mm, self.at.0).filter(|vma| vma.start() < self.end.0);
        if vma.is_none_or(|vma| vma.start() > self.at.0) {
            self.hole = self.hole.or(Some(self.at));
        }
        let part = vma?.range().intersection(VirtRange::raw(self.at.0, self.end.0));
        self.at = part.end();
        vma.map(|vma| (vma, part))
    }

    /// [`Error::NotMapped`] for the first hole that was passed over.
    pub(super) fn end(self) -> Result<(), Error> {
        self.hole.map_or(Ok(()), |at| Err(Error::NotMapped(at)))
    }
}
