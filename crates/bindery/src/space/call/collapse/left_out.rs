//! The collapse calls, in a build without the feature `collapse`.

use crate::addr::{VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;

use super::{CollapseLimits, CollapseProgress};
use crate::space::AddressSpace;

impl<P: Platform> AddressSpace<'_, P> {
    /// Does nothing, because the build leaves collapse out.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// [`Error::NotBuilt`].
    #[inline]
    pub fn collapse_range(&self, _range: VirtRange) -> Result<(), Error> {
        Err(Error::NotBuilt)
    }

    /// Collapses nothing and reports the whole address space as complete, because the build has no
    /// collapse.
    ///
    /// Context: any.
    #[inline]
    pub fn collapse_some(
        &self,
        _from: VirtAddr,
        _spans: u32,
        _limits: &CollapseLimits,
    ) -> CollapseProgress {
        CollapseProgress { looked_at: 0, collapsed: 0, next: VirtAddr(0), out_of_memory: false }
    }
}
