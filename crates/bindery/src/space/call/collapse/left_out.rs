//! The collapse calls, in a build without the feature `collapse`.

use core::marker::PhantomData;

use crate::addr::{VirtAddr, VirtRange};
use crate::error::Error;
use crate::platform::Platform;

use super::{CollapseLimits, CollapseProgress};
use crate::Memory;
use crate::space::AddressSpace;
use crate::space::call::steps::{CallReady, Step};

/// `MADV_COLLAPSE` in steps, in a build without collapse.
#[derive(Debug)]
pub(in crate::space::call) struct PendingCollapse<'m, P: Platform>(PhantomData<&'m Memory<P>>);

impl<'m, P: Platform> PendingCollapse<'m, P> {
    /// A call that fails in its first step.
    pub(in crate::space::call) fn new(_range: VirtRange) -> Self {
        Self(PhantomData)
    }

    /// Does nothing.
    ///
    /// # Errors
    /// [`Error::NotBuilt`].
    pub(in crate::space::call) fn step<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
        _ready: Option<CallReady<'m, P>>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        space.collapse_range(VirtRange::default()).map(|()| Step::Done)
    }
}

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
