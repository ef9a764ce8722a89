//! One operation on an address space, from its lock to its last free.
//!
//! | operation | holds | may |
//! |---|---|---|
//! | [`Op`] | the mutex | change VMAs and entries, unmap, free tables |
//! | [`VmaOp`] | one VMA's lock, for reading | fill empty entries of that VMA |
//!
//! Both are lent to a closure, so that the locks are released, and what follows the unlock is done,
//! when the closure returns. A fault builds neither: it borrows its VMA from the guard.

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

/// An operation that holds the mutex. [`AddressSpace::operate`] lends it to a closure, and ends it:
/// the closure can neither keep nor return it.
///
/// Its parts are borrowed separately, so that a function takes only those that it needs.
pub(in crate::space) struct Op<'op, 'm, P: Platform> {
    /// Settings, limits and the counters of the address space.
    pub(in crate::space) space: &'op AddressSpace<'m, P>,
    /// The set of VMAs.
    pub(in crate::space) vmas: VmaSet<'op, 'm, P>,
    /// The page table.
    pub(in crate::space) edit: Edit<'op, 'm, P>,
    /// Messages for userfaultfds, delivered at the end.
    pub(in crate::space) notices: &'op mut Notices,
}

/// An operation in one VMA, which is locked for reading, concurrent with faults and other
/// operations of this kind. [`AddressSpace::operate_in`] lends it to a closure.
///
/// Having one means:
/// - the VMA keeps its bounds, flags and tables;
/// - the mutex is not held: other VMAs may change;
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

    /// Records how many pages are resident. Called before a call unmaps pages, so that mapping them
    /// need not. (Calls of others that unmap pages, as a truncation, do not record it.) The number
    /// is exact if one CPU has entered; otherwise each other one may add or hide up to 31 pages.
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

    /// The page table, in which empty entries of the VMA are filled.
    #[inline(always)]
    pub(in crate::space) fn page_table(&self) -> &'op PageTable<'m, P> {
        &self.space.page_table
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Does `work` with the mutex held, and ends it in the only right order:
    ///
    /// 1. *Flush*, with the mutex held: a call that takes the mutex next may rely on every TLB
    ///    having lost what this one has unmapped, and the pages of VMAs that stay are counted down
    ///    while their owner is the same.
    /// 2. *Unlock*: no lock is held while memory is freed.
    /// 3. *Finish*: pages are counted down, removed VMAs release what they hold, tables and VMAs
    ///    are freed after the readers.
    /// 4. *Deliver* the messages to userfaultfds, and wait for their readers: no lock is held, and
    ///    nothing of the call is left to be done.
    #[inline]
    pub(in crate::space) fn operate<R>(&self, work: impl FnOnce(&mut Op<'_, 'm, P>) -> R) -> R {
        let mut after = AfterUnlock::new(&self.page_table);
        let mut notices = Notices::default();
        let mut guard = self.vmas.lock();
        let result = {
            // SAFETY: 1. both are this address space's.
            let (vmas, edit) = unsafe { after.lend(&mut guard) };
            let mut op = Op { space: self, vmas, edit, notices: &mut notices };
            let result = work(&mut op);
            op.edit.flush();
            result
        };
        drop(guard);
        if !after.is_done() {
            after.finish();
        }
        if !notices.is_empty() {
            notices.deliver(self.page_table.memory);
        }
        result
    }

    /// As [`AddressSpace::operate`], for a call of the embedder. If `work` fails for lack of
    /// memory, frees some and repeats it ([`Memory::outermost`]).
    #[inline(always)]
    pub(in crate::space) fn operate_with_reclaim<R, E: CallError>(
        &self,
        mut work: impl FnMut(&mut Op<'_, 'm, P>) -> Result<R, Failure<E>>,
    ) -> Result<R, E> {
        self.page_table.memory.outermost(|| self.operate(&mut work))
    }

    /// Does `work` in the locked VMA, and unlocks the VMA. If the work has to wait for an event,
    /// its result names the event, and the caller waits afterwards.
    #[inline(always)]
    pub(in crate::space) fn operate_in<R>(
        &self,
        locked: VmaReadGuard<'_, P>,
        work: impl FnOnce(&VmaOp<'_, 'm, P>) -> R,
    ) -> R {
        work(&VmaOp { space: self, vma: locked.vma() })
    }

    /// Does `work` on the set of VMAs, with the mutex held, for a caller that changes no entries:
    /// faults prepare an anon group or grow a stack so.
    #[inline]
    pub(in crate::space) fn change_vmas<R>(
        &self,
        work: impl FnOnce(&mut VmaSet<'_, 'm, P>) -> R,
    ) -> R {
        let mut removed = Removed::default();
        let mut guard = self.vmas.lock();
        // SAFETY: 1. both are this address space's.
        let result = work(&mut unsafe { guard.set(&self.page_table, &mut removed) });
        drop(guard);
        if !removed.is_empty() {
            // SAFETY: 1. both are of one address space.
            unsafe { removed.free_without_tables(self.page_table.memory) };
        }
        result
    }
}

/// The frees that an operation defers until it has unlocked. The set of VMAs and the edit borrow
/// them, so that nothing that the operation has found is freed.
pub(super) struct AfterUnlock<'s, 'm, P: Platform> {
    page_table: &'s PageTable<'m, P>,
    gather: Gather,
    removed: Removed,
}

impl<'s, 'm, P: Platform> AfterUnlock<'s, 'm, P> {
    /// An operation on the address space of `page_table` that has left nothing yet.
    #[inline]
    pub(super) fn new(page_table: &'s PageTable<'m, P>) -> Self {
        Self { page_table, gather: Gather::new(), removed: Removed::default() }
    }

    /// The set of VMAs and the page table, for changes.
    ///
    /// # Safety
    /// 1. The guard is that of the address space.
    #[inline(always)]
    pub(super) unsafe fn lend<'op>(
        &'op mut self,
        guard: &'op mut VmasGuard<'_, P>,
    ) -> (VmaSet<'op, 'm, P>, Edit<'op, 'm, P>) {
        // SAFETY: 1. the caller's obligation 1.
        let vmas = unsafe { guard.set(self.page_table, &mut self.removed) };
        (vmas, Edit::new(self.page_table, &mut self.gather))
    }

    /// The page table, for an operation that has unlocked.
    pub(super) fn edit(&mut self) -> Edit<'_, 'm, P> {
        Edit::new(self.page_table, &mut self.gather)
    }

    /// Whether nothing is left to do.
    #[inline]
    fn is_done(&self) -> bool {
        self.gather.is_done() && self.removed.is_empty()
    }

    /// Counts unmapped pages down, releases the holds of the removed VMAs, and frees the tables and
    /// VMAs when no reader is left. Called without locks on VMAs or tables.
    pub(super) fn finish(&mut self) {
        let tables = self.edit().flushed().take_detached();
        // SAFETY: 1. `lend` has lent them with the page table; 2. emptied above.
        unsafe { mem::take(&mut self.removed).free(self.page_table.memory, tables) };
    }
}
