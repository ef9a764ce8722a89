//! Two VMAs, locked for reading.
//!
//! The second lock is only tried. Otherwise:
//! 1. CPU A holds VMA 1 for reading and waits for VMA 2.
//! 2. CPU B, in `mprotect`, holds the mutex and waits for the readers of VMA 1.
//! 3. CPU A finds a writer at VMA 2 and waits for the mutex.
//!
//! If the try fails, the first lock is released, and both locks are acquired under the mutex, which
//! excludes writers.

use crate::addr::VirtAddr;
use crate::platform::Platform;
use crate::vma::{Vma, VmaReadGuard};

use super::VmaIndex;

/// The VMAs of two addresses, which may be one VMA.
pub(crate) struct BothVmas<'a, P: Platform> {
    first: VmaReadGuard<'a, P>,
    /// `None`: the first VMA contains both addresses.
    second: Option<VmaReadGuard<'a, P>>,
}

impl<P: Platform> BothVmas<'_, P> {
    /// The VMA of each address.
    #[inline]
    pub(crate) fn vmas(&self) -> (&Vma, &Vma) {
        let first = self.first.vma();
        (first, self.second.as_ref().map_or(first, VmaReadGuard::vma))
    }
}

impl<P: Platform> VmaIndex<P> {
    /// The VMAs of both addresses, locked for reading; `None` if an address has no VMA.
    #[inline]
    pub(crate) fn read_both<'a>(
        &'a self,
        platform: &'a P,
        first: VirtAddr,
        second: VirtAddr,
    ) -> Option<BothVmas<'a, P>> {
        let locked = self.read(platform, first)?;
        if locked.vma().range().contains(second) {
            return Some(BothVmas { first: locked, second: None });
        }
        if let found @ Some(_) = self.try_read(platform, second) {
            return Some(BothVmas { first: locked, second: found });
        }
        drop(locked);
        self.read_both_after_writer(platform, first, second)
    }

    /// As [`VmaIndex::read_both`], after a failed try: a writer holds the second VMA, or the set
    /// has no VMA there.
    #[cold]
    fn read_both_after_writer<'a>(
        &'a self,
        platform: &'a P,
        first: VirtAddr,
        second: VirtAddr,
    ) -> Option<BothVmas<'a, P>> {
        let vmas = self.lock();
        let first = vmas.try_read(platform, first)?;
        if first.vma().range().contains(second) {
            return Some(BothVmas { first, second: None });
        }
        let second = Some(vmas.try_read(platform, second)?);
        Some(BothVmas { first, second })
    }
}
