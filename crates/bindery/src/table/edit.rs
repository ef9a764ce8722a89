//! The page table, lent to one call that edits it.
//!
//! | part | lifetime |
//! |---|---|
//! | gather | the call: one flush serves all its lock spans |
//! | locked range ([`Span`](super::span::Span)), its counters | one lock span ([`Edit::span`]) |
//! | spare tables | the filling of one place ([`FillSpan`](super::fill_span::FillSpan)) |
//!
//! The functions here are the face of the operations that narrow entries or free tables.

use core::ops::Deref;

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Attributes, Marker};
use crate::error::{Failure, NoMemory};
use crate::folio::{Folio, FreshFolio};
use crate::platform::Platform;
use crate::tlb::Gather;

use super::collapse::{self, JoinError, Replacement};
use super::copy::{self, ForkCopy};
use super::rewrite::protect::{self, EntryPolicy};
use super::rewrite::use_bits::{self, UseBits};
use super::rewrite::{marker, write_protect};
use super::swap_out_shared::{self, SharedFolios, StretchPart};
use super::zap::{self, Flush};
use super::zap_chosen::{self, MappedFolio, ZapChoice};
use super::zap_except::{self, Exceptions, Protected};
use super::{PageTable, detach};

/// The page table of an address space and the gather of one call. Stale translations are flushed
/// once, or by [`Edit::flush`] before a fault may read the tables; the owner of the edit performs
/// the remaining flushes and frees at the end of the call.
///
/// Read-only methods come from the [`PageTable`].
pub(crate) struct Edit<'op, 'm, P: Platform> {
    pub(super) page_table: &'op PageTable<'m, P>,
    pub(super) gather: &'op mut Gather,
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

    /// The page table and the gather.
    #[inline(always)]
    pub(super) fn parts(&mut self) -> (&'op PageTable<'m, P>, &mut Gather) {
        (self.page_table, self.gather)
    }

    /// Whether translations are stale, or tables wait for a flush.
    #[inline]
    pub(super) fn is_stale(&self) -> bool {
        self.gather.is_stale()
    }

    /// As [`Gather::uncharge_before_unlock`].
    #[inline]
    pub(crate) fn uncharge_before_unlock(&mut self) {
        self.gather.uncharge_before_unlock();
    }

    /// As [`PageTable::first_part`]. Flushes that are pending for this edit stay so.
    #[inline]
    pub(crate) fn first_part(&self, range: VirtRange, size: u64) -> Option<VirtRange> {
        self.page_table.first_part(range, size, Some(&*self.gather))
    }

    /// As [`zap::zap`].
    #[inline]
    pub(crate) fn zap(
        &mut self,
        range: VirtRange,
        freeable: VirtRange,
        flush: Flush,
    ) -> Result<(), NoMemory> {
        zap::zap(self, range, freeable, flush)
    }

    /// As [`zap_except::zap_sparing`].
    #[inline]
    pub(crate) fn zap_sparing(
        &mut self,
        range: VirtRange,
        except: Exceptions,
    ) -> Result<(), NoMemory> {
        zap_except::zap_sparing(self, range, except)
    }

    /// As [`zap_chosen::zap_chosen`].
    #[inline]
    pub(crate) fn zap_chosen(
        &mut self,
        range: VirtRange,
        protected: Protected,
        fate: impl FnMut(MappedFolio) -> ZapChoice,
    ) -> Result<(), NoMemory> {
        zap_chosen::zap_chosen(self, range, protected, fate)
    }

    /// As [`detach::prune`].
    #[inline]
    pub(crate) fn prune(&mut self, addr: VirtAddr) {
        detach::prune(self, addr);
    }

    /// As [`protect::protect`].
    #[inline]
    pub(crate) fn protect(
        &mut self,
        range: VirtRange,
        policy: &EntryPolicy,
    ) -> Result<(), NoMemory> {
        protect::protect(self, range, policy)
    }

    /// As [`write_protect::userfault_protect`].
    #[inline]
    pub(crate) fn userfault_protect(&mut self, range: VirtRange) -> Result<(), NoMemory> {
        write_protect::userfault_protect(self, range)
    }

    /// As [`write_protect::userfault_lift`].
    #[inline]
    pub(crate) fn userfault_lift(&mut self, range: VirtRange) -> Result<(), NoMemory> {
        write_protect::userfault_lift(self, range)
    }

    /// As [`write_protect::userfault_lift_to`].
    #[inline]
    pub(crate) fn userfault_lift_to(
        &mut self,
        range: VirtRange,
        policy: &EntryPolicy,
    ) -> Result<(), NoMemory> {
        write_protect::userfault_lift_to(self, range, policy)
    }

    /// As [`write_protect::userfault_mark`].
    #[inline]
    pub(crate) fn userfault_mark(
        &mut self,
        range: VirtRange,
        reached: &mut VirtAddr,
    ) -> Result<(), NoMemory> {
        write_protect::userfault_mark(self.page_table, range, reached)
    }

    /// As [`marker::mark`].
    #[inline]
    pub(crate) fn mark(&mut self, range: VirtRange, marker: Marker) -> Result<(), NoMemory> {
        marker::mark(self.page_table, range, marker)
    }

    /// As [`marker::unmark`].
    #[inline]
    pub(crate) fn unmark(&mut self, range: VirtRange, marker: Marker) -> Result<(), NoMemory> {
        marker::unmark(self, range, marker)
    }

    /// As [`use_bits::clear_use`].
    #[inline]
    pub(crate) fn clear_use(
        &mut self,
        range: VirtRange,
        bits: UseBits,
        concerns: impl FnMut(Option<Folio>, u32) -> bool,
    ) -> Result<u64, NoMemory> {
        use_bits::clear_use(self, range, bits, |_| false, concerns)
    }

    /// As [`use_bits::clear_use`], with a cheap test for folios of one page.
    #[inline]
    pub(crate) fn clear_use_quickly(
        &mut self,
        range: VirtRange,
        bits: UseBits,
        single: impl Fn(Frame) -> bool,
        concerns: impl FnMut(Option<Folio>, u32) -> bool,
    ) -> Result<u64, NoMemory> {
        use_bits::clear_use(self, range, bits, single, concerns)
    }

    /// As [`copy::copy_to`].
    #[inline]
    pub(crate) fn copy_to(
        &mut self,
        child: &PageTable<'m, P>,
        what: &ForkCopy<'_>,
    ) -> Result<(), Failure> {
        copy::copy_to(self, child, what)
    }

    /// As [`collapse::replace_by_copy`].
    #[inline]
    pub(crate) fn replace_by_copy<'f>(
        &mut self,
        what: &Replacement,
        folio: FreshFolio<'f, P>,
    ) -> Option<FreshFolio<'f, P>> {
        collapse::replace_by_copy(self, what, folio)
    }

    /// As [`collapse::join_leaves`].
    #[inline]
    pub(crate) fn join_leaves(&mut self, base: VirtAddr) -> Result<(), JoinError> {
        collapse::join_leaves(self, base)
    }

    /// As [`swap_out_shared::look_at_shared`].
    #[inline]
    pub(crate) fn look_at_shared(
        &mut self,
        part: StretchPart,
        attributes: Attributes,
        folios: &mut SharedFolios<'m, P>,
    ) {
        swap_out_shared::look_at_shared(self, part, attributes, folios);
    }

    /// As [`swap_out_shared::swap_out_shared`].
    #[inline]
    pub(crate) fn swap_out_shared(
        &mut self,
        range: VirtRange,
        attributes: Attributes,
        folios: &mut SharedFolios<'m, P>,
    ) {
        swap_out_shared::swap_out_shared(self, range, attributes, folios);
    }
}
