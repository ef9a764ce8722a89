//! Iterates over the VMAs of a range and reports holes as an error at the end.

use crate::addr::{VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;
use crate::vma::Vma;

use super::VmaView;

/// An iteration over the VMAs of a range, as in `madvise` and `msync`: skips holes and reports the
/// first hole at the end.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    at: VirtAddr,
    end: VirtAddr,
    hole: Option<VirtAddr>,
}

impl Parts {
    /// An iteration over `range`.
    pub(crate) fn of(range: VirtRange) -> Self {
        Self { at: range.start(), end: range.end(), hole: None }
    }

    /// The next VMA and its intersection with the range. The mutex may be released between two
    /// calls.
    pub(crate) fn next<'op, P: Platform>(
        &mut self,
        vmas: VmaView<'op, P>,
    ) -> Option<(&'op Vma, VirtRange)> {
        if self.at >= self.end {
            return None;
        }
        let vma = vmas.first_ending_after(self.at.0).filter(|vma| vma.start() < self.end.0);
        if vma.is_none_or(|vma| vma.start() > self.at.0) {
            self.hole = self.hole.or(Some(self.at));
        }
        let part = vma?.range().intersection(VirtRange::raw(self.at.0, self.end.0));
        self.at = part.end();
        vma.map(|vma| (vma, part))
    }

    /// Whether the last VMA reaches the end of the range.
    pub(crate) fn is_at_end(&self) -> bool {
        self.at >= self.end
    }

    /// [`Error::NotMapped`] for the first hole.
    pub(crate) fn end(self) -> Result<(), Error> {
        self.hole.map_or(Ok(()), |at| Err(Error::NotMapped(at)))
    }
}
