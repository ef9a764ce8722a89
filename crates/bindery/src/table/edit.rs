//! The page table, lent to one call that edits it.

use core::ops::Deref;

use crate::addr::{VirtAddr, VirtRange};
use crate::error::{Failure, NoMemory};
use crate::folio::Folio;
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::PageTable;
use super::collapse::Replacement;
use super::copy::ForkCopy;
use super::rewrite::protect::EntryPolicy;
use super::rewrite::use_bits::UseBits;
use super::zap::Flush;
use super::zap_chosen::{Fate, Mapped};
use super::zap_except::{Exceptions, Protected};

/// The page table of an address space, and the gather of one call. What the call makes stale is
/// flushed once, or by [`Edit::flush`] before a fault may look; its owner flushes and frees the rest
/// at the end of the call.
///
/// Reading goes through to the [`PageTable`].
pub(crate) struct Edit<'op, 'm, P: Platform> {
    page_table: &'op PageTable<'m, P>,
    gather: &'op mut Gather,
}

impl<'m, P: Platform> Deref for Edit<'_, 'm, P> {
    type Target = PageTable<'m, P>;

    #[inline]
    fn deref(&self) -> &PageTable<'m, P> {
        self.page_table
    }
}

impl<'op, 'm, P: Platform> Edit<'op, 'm, P> {
    /// An edit whose flushes and frees are collected in `gather`.
    #[inline]
    pub(crate) fn new(page_table: &'op PageTable<'m, P>, gather: &'op mut Gather) -> Self {
        Self { page_table, gather }
    }

    /// The page table.
    #[inline]
    pub(crate) fn table(&self) -> &'op PageTable<'m, P> {
        self.page_table
    }

    /// The gather, for functions of the page table that this type does not forward.
    #[inline]
    pub(crate) fn gather(&mut self) -> &mut Gather {
        self.gather
    }

    /// Invalidates stale translations, and counts down pages that were unmapped in VMAs that stay.
    /// Called by every operation before it releases the mutex. (No other thread relies on that for
    /// the flush: a thread that locks a table meets the mark of the pending flush, see
    /// [`crate::tlb`].)
    pub(crate) fn flush(&mut self) {
        if self.gather.is_stale() {
            let mut counts = Counts::default();
            self.page_table.flush(self.gather, &mut counts);
            self.page_table.count(&counts);
        }
        if self.gather.take_uncharge_before_unlock() {
            self.page_table.drop_contents(self.gather);
        }
    }

    /// As [`Gather::uncharge_before_unlock`].
    #[inline]
    pub(crate) fn uncharge_before_unlock(&mut self) {
        self.gather.uncharge_before_unlock();
    }

    /// As [`PageTable::zap`].
    #[inline]
    pub(crate) fn zap(
        &mut self,
        range: VirtRange,
        freeable: VirtRange,
        flush: Flush,
    ) -> Result<(), NoMemory> {
        self.page_table.zap(range, freeable, flush, self.gather)
    }

    /// As [`PageTable::zap_sparing`].
    #[inline]
    pub(crate) fn zap_sparing(
        &mut self,
        range: VirtRange,
        except: Exceptions,
    ) -> Result<(), NoMemory> {
        self.page_table.zap_sparing(range, except, self.gather)
    }

    /// As [`PageTable::zap_chosen`].
    #[inline]
    pub(crate) fn zap_chosen(
        &mut self,
        range: VirtRange,
        protected: Protected,
        fate: impl FnMut(Mapped) -> Fate,
    ) -> Result<(), NoMemory> {
        self.page_table.zap_chosen(range, protected, self.gather, fate)
    }

    /// As [`PageTable::prune`].
    #[inline]
    pub(crate) fn prune(&mut self, addr: VirtAddr) {
        self.page_table.prune(addr, self.gather);
    }

    /// As [`PageTable::protect`].
    #[inline]
    pub(crate) fn protect(
        &mut self,
        range: VirtRange,
        policy: &EntryPolicy,
    ) -> Result<(), NoMemory> {
        self.page_table.protect(range, policy, self.gather)
    }

    /// As [`PageTable::userfault_protect`].
    #[inline]
    pub(crate) fn userfault_protect(&mut self, range: VirtRange) -> Result<(), NoMemory> {
        self.page_table.userfault_protect(range, self.gather)
    }

    /// As [`PageTable::clear_use`].
    #[inline]
    pub(crate) fn clear_use(
        &mut self,
        range: VirtRange,
        forget: UseBits,
        concerned: impl FnMut(Option<Folio>, u32) -> bool,
    ) -> Result<u64, NoMemory> {
        self.page_table.clear_use(range, forget, self.gather, concerned)
    }

    /// As [`PageTable::copy_to`].
    #[inline]
    pub(crate) fn copy_to(
        &mut self,
        child: &PageTable<'m, P>,
        what: &ForkCopy<'_>,
    ) -> Result<(), Failure> {
        self.page_table.copy_to(child, what, self.gather)
    }

    /// As [`PageTable::replace_by_copy`].
    #[inline]
    pub(crate) fn replace_by_copy(&mut self, what: &Replacement) -> bool {
        self.page_table.replace_by_copy(what, self.gather)
    }
}
