//! One operation on an address space, from its lock acquisition to its last free.
//!
//! | operation | holds | may |
//! |---|---|---|
//! | [`Op`] | the mutex | change VMAs and entries, unmap, free tables |
//! | [`VmaOp`] | one VMA's lock, for reading | fill empty entries of that VMA |
//!
//! Both are lent to a closure. When the closure returns, the locks are released and the work that
//! follows the unlock is done. A fault builds neither: it borrows its VMA from the guard.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::mem;

use crate::Memory;
use crate::error::{CallError, Failure};
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::edit::Edit;
use crate::tlb::Gather;
use crate::userfault::Notices;
use crate::vma::{Vma, VmaReadGuard};
use crate::vmas::{Removed, VmaSet, VmasGuard};

use super::AddressSpace;

/// An operation that holds the mutex. [`AddressSpace::operate`] lends the operation to a closure
/// and ends it; the closure can neither keep nor return it.
///
/// The parts are borrowed separately, so that a function borrows only the parts that it needs.
pub(in crate::space) struct Op<'op, 'm, P: Platform> {
    /// The settings, limits and counters of the address space.
    pub(in crate::space) space: &'op AddressSpace<'m, P>,
    /// The set of VMAs.
    pub(in crate::space) vmas: VmaSet<'op, 'm, P>,
    /// The page table.
    pub(in crate::space) edit: Edit<'op, 'm, P>,
    /// Messages for userfaultfds, delivered at the end.
    pub(in crate::space) notices: &'op mut Notices,
    /// Whether those messages report what the call unmaps.
    pub(in crate::space) unmappings: Unmappings,
}

/// Whether userfaultfds hear of the addresses that a call unmaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::space) enum Unmappings {
    /// As for most calls.
    Reported,
    /// As on Linux for `shmdt`, `shmat` over other mappings, and `remap_file_pages`. Such a call
    /// waits for no handler.
    Unreported,
}

/// An operation in one VMA that is locked for reading, concurrent with faults and other operations
/// of this kind. [`AddressSpace::operate_in`] lends the operation to a closure.
///
/// A value of this type proves that:
/// - the VMA retains its bounds, flags and tables;
/// - the mutex is not held, so other VMAs may change;
/// - nothing is gathered: the operation narrows no entry and frees no table.
pub(in crate::space) struct VmaOp<'op, 'm, P: Platform> {
    /// The page table, settings and counters.
    pub(in crate::space) space: &'op AddressSpace<'m, P>,
    /// The VMA.
    pub(in crate::space) vma: &'op Vma,
}

impl<'m, P: Platform> Op<'_, 'm, P> {
    /// The memory of the address space.
    #[inline]
    pub(in crate::space) fn memory(&self) -> &'m Memory<P> {
        self.space.page_table.memory
    }

    /// The platform.
    #[inline]
    pub(in crate::space) fn platform(&self) -> &'m P {
        self.memory().platform()
    }

    /// Records the number of resident pages. Called before a call unmaps pages, so that mapping
    /// pages need not record it. (Other threads' calls that unmap pages, such as a truncation, do
    /// not record it.) The number is exact if one CPU has entered; otherwise each further CPU may
    /// add or hide up to 31 pages.
    #[inline]
    pub(in crate::space) fn note_resident(&self) {
        let account = self.vmas.account();
        let counts = &self.space.page_table.counts;
        account.note_resident(counts.approximate_resident(self.platform().cpu()));
    }
}

impl<'op, 'm, P: Platform> VmaOp<'op, 'm, P> {
    /// The memory of the address space.
    #[inline(always)]
    pub(in crate::space) fn memory(&self) -> &'m Memory<P> {
        self.space.page_table.memory
    }

    /// The page table, for filling empty entries of the VMA.
    #[inline(always)]
    pub(in crate::space) fn page_table(&self) -> &'op PageTable<'m, P> {
        &self.space.page_table
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Runs `work` with the mutex held, and ends the operation in the only correct order:
    ///
    /// 1. *Flush*, with the mutex held. The next holder of the mutex may rely on every TLB having
    ///    dropped the translations that this call has unmapped, and the pages of VMAs that stay are
    ///    counted down while their owner is unchanged.
    /// 2. *Settle*, with the mutex held: the committed pages that the set of VMAs still holds
    ///    return when it is dropped. The next holder of the mutex finds the pages free.
    /// 3. *Unlock*: no lock is held while memory is freed.
    /// 4. *Finish*: pages are counted down, removed VMAs release their references, and tables and
    ///    VMAs are freed after their readers have left.
    /// 5. *Deliver* the messages to userfaultfds and wait for their readers: no lock is held, and
    ///    no work of the call is left.
    #[inline]
    pub(in crate::space) fn operate<R>(&self, work: impl FnOnce(&mut Op<'_, 'm, P>) -> R) -> R {
        self.deliver_after(|notices| self.operate_untold(notices, work))
    }

    /// As [`AddressSpace::operate`] without the last part: appends the messages to `notices`.
    #[inline]
    pub(in crate::space) fn operate_untold<R>(
        &self,
        notices: &mut Notices,
        work: impl FnOnce(&mut Op<'_, 'm, P>) -> R,
    ) -> R {
        let mut after = AfterUnlock::new(&self.page_table);
        let mut guard = self.vmas.lock();
        let result = {
            // SAFETY: 1. both belong to this address space.
            let (vmas, edit) = unsafe { after.lend(&mut guard) };
            let unmappings = Unmappings::Reported;
            let mut op = Op { space: self, vmas, edit, notices, unmappings };
            let result = work(&mut op);
            op.edit.flush();
            result
        };
        drop(guard);
        if !after.is_done() {
            after.finish();
        }
        result
    }

    /// Runs `begin`, which performs a call up to its waits, and delivers the call's messages.
    #[inline(always)]
    pub(in crate::space) fn deliver_after<R>(&self, begin: impl FnOnce(&mut Notices) -> R) -> R {
        let mut notices = Notices::default();
        let result = begin(&mut notices);
        if !notices.is_empty() {
            notices.deliver(self.page_table.memory);
        }
        result
    }

    /// As [`AddressSpace::operate`], for a call of the embedder. If `work` fails for lack of
    /// memory, frees some memory and repeats `work` ([`Memory::outermost`]).
    #[inline(always)]
    pub(in crate::space) fn operate_with_reclaim<R, E: CallError>(
        &self,
        mut work: impl FnMut(&mut Op<'_, 'm, P>) -> Result<R, Failure<E>>,
    ) -> Result<R, E> {
        self.page_table.memory.outermost(|| self.operate(&mut work))
    }

    /// As [`AddressSpace::operate_with_reclaim`], but appends the messages to `notices`.
    #[inline(always)]
    pub(in crate::space) fn operate_with_reclaim_untold<R, E: CallError>(
        &self,
        notices: &mut Notices,
        mut work: impl FnMut(&mut Op<'_, 'm, P>) -> Result<R, Failure<E>>,
    ) -> Result<R, E> {
        self.page_table.memory.outermost(|| self.operate_untold(notices, &mut work))
    }

    /// Runs `work` in the locked VMA and then unlocks the VMA. If the work has to wait for an
    /// event, its result names the event, and the caller waits afterwards.
    #[inline(always)]
    pub(in crate::space) fn operate_in<R>(
        &self,
        locked: VmaReadGuard<'_, P>,
        work: impl FnOnce(&VmaOp<'_, 'm, P>) -> R,
    ) -> R {
        work(&VmaOp { space: self, vma: locked.vma() })
    }

    /// Runs `work` on the set of VMAs, with the mutex held, for a caller that changes no entries:
    /// faults use this function to prepare an anon group or grow a stack.
    #[inline]
    pub(in crate::space) fn change_vmas<R>(
        &self,
        work: impl FnOnce(&mut VmaSet<'_, 'm, P>) -> R,
    ) -> R {
        self.change_vmas_of(self.vmas.lock(), work)
    }

    /// As [`AddressSpace::change_vmas`], unless the mutex is taken.
    pub(in crate::space) fn try_change_vmas<R>(
        &self,
        work: impl FnOnce(&mut VmaSet<'_, 'm, P>) -> R,
    ) -> Option<R> {
        Some(self.change_vmas_of(self.vmas.try_lock()?, work))
    }

    #[inline(always)]
    fn change_vmas_of<R>(
        &self,
        mut guard: VmasGuard<'_, P>,
        work: impl FnOnce(&mut VmaSet<'_, 'm, P>) -> R,
    ) -> R {
        let mut removed = Removed::default();
        // SAFETY: 1. both belong to this address space.
        let result = work(&mut unsafe { guard.set(&self.page_table, &mut removed) });
        drop(guard);
        if !removed.is_empty() {
            // SAFETY: 1. both belong to this address space, which exists.
            unsafe { removed.free_without_tables(self.page_table.memory) };
        }
        result
    }
}

/// The frees that an operation defers until it has unlocked. The set of VMAs and the edit borrow
/// this value, so nothing that the operation has found is freed.
pub(super) struct AfterUnlock<'s, 'm, P: Platform> {
    page_table: &'s PageTable<'m, P>,
    gather: Gather,
    removed: Removed,
}

impl<'s, 'm, P: Platform> AfterUnlock<'s, 'm, P> {
    /// A new operation on the address space of `page_table`, with nothing deferred.
    #[inline]
    pub(super) fn new(page_table: &'s PageTable<'m, P>) -> Self {
        Self { page_table, gather: Gather::new(), removed: Removed::default() }
    }

    /// The set of VMAs and the page table, for changes.
    ///
    /// # Safety
    /// 1. The guard belongs to the address space.
    #[inline(always)]
    pub(super) unsafe fn lend<'op>(
        &'op mut self,
        guard: &'op mut VmasGuard<'_, P>,
    ) -> (VmaSet<'op, 'm, P>, Edit<'op, 'm, P>) {
        // SAFETY: 1. the caller's obligation 1.
        let vmas = unsafe { guard.set(self.page_table, &mut self.removed) };
        (vmas, Edit::new(self.page_table, &mut self.gather))
    }

    /// The page table, for an operation that has released its locks.
    pub(super) fn edit(&mut self) -> Edit<'_, 'm, P> {
        Edit::new(self.page_table, &mut self.gather)
    }

    /// Whether nothing is left to do.
    #[inline]
    fn is_done(&self) -> bool {
        self.gather.is_done() && self.removed.is_empty()
    }

    /// Counts unmapped pages down, releases the removed VMAs' references, and frees the tables and
    /// VMAs when no reader is left. Called without locks on VMAs or tables.
    pub(super) fn finish(&mut self) {
        // SAFETY: 1. `lend` has lent them with the page table, whose address space exists.
        unsafe { self.removed.wake_tasks(self.page_table.memory) };
        let tables = self.edit().flushed().take_detached();
        // SAFETY: 1. as above; 2. emptied above.
        unsafe { mem::take(&mut self.removed).free(self.page_table.memory, tables) };
    }
}
