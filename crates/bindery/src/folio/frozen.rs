//! A folio whose count was set to zero in one step. Only the thread that ran this step has the
//! folio.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering::Relaxed;

use super::count;
use super::handle::{Folio, FolioHandle};
use crate::addr::Order;
use crate::frame::FreeBatch;
use crate::frame::meta::{MetaKind, state_of};
use crate::platform::Platform;

/// A frozen folio, owned by the caller. Freeing consumes the value, so a folio is freed only once.
/// The frames leak unless the value is freed.
#[must_use = "a frozen folio must be freed"]
pub(crate) struct FrozenFolio<'a, P: Platform>(FolioHandle<'a, P>);

impl<'a, P: Platform> FrozenFolio<'a, P> {
    /// Freezes the folio if its count is `count`, by one compare-exchange. Afterwards no thread can
    /// take a reference, not even by frame number.
    ///
    /// # Safety
    /// 1. The caller owns the references and mappings in `count` and relinquishes them.
    /// 2. No TLB has translations from the entries that these mappings counted.
    #[inline(always)]
    pub(super) unsafe fn freeze(handle: FolioHandle<'a, P>, count: u64) -> Option<Self> {
        count::take_all(handle.count(), count).then_some(Self(handle))
    }

    #[inline(always)]
    pub(crate) fn folio(&self) -> Folio {
        self.0.folio
    }

    /// Frees the folio into the batch.
    #[inline(always)]
    pub(crate) fn free_into(self, batch: &mut FreeBatch<'_, P>) {
        let FolioHandle { folio, .. } = self.0;
        self.0.state().store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
        // SAFETY: 1. the tails have been written since the folio was allocated, and the head's
        // state just now; 2. a frozen folio has no holder except this value, which ends here.
        unsafe { batch.push(folio.head, folio.pages()) };
    }
}
