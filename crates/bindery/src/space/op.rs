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
use crate::deferred::Tables;
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::edit::Edit;
use crate::tlb::Gather;
use crate::userfault::Notices;
use crate::vma::{Vma, VmaReadGuard};
use crate::vmas::{Removed, VmaSet};

use super::AddressSpace;

/// An operation that holds the mutex. [`AddressSpace::operate`] lends it to a closure, and ends it:
/// it cannot be kept or returned.
///
/// Its parts are borrowed apart from each other, so that a function takes only those that it needs.
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

/// An operation in one VMA, which is locked for reading, beside faults and other operations of this
/// kind. [`AddressSpace::operate_in`] lends it to a closure.
///
/// Having one means:
/// - the VMA stays, and so do its bounds, flags and tables;
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
        let (mut gather, mut removed) = (Gather::new(), Removed::default());
        let mut notices = Notices::default();
        let mut guard = self.vmas.lock();
        let result = {
            // SAFETY: 1. both are this address space's.
            let vmas = unsafe { guard.set(&self.page_table, &mut removed) };
            let edit = Edit::new(&self.page_table, &mut gather);
            let mut op = Op { space: self, vmas, edit, notices: &mut notices };
            let result = work(&mut op);
            op.edit.flush();
            result
        };
        drop(guard);
        if !gather.is_done() || !removed.is_empty() {
            let mut edit = Edit::new(&self.page_table, &mut gather);
            finish(&mut edit, mem::take(&mut removed));
        }
        if !notices.is_empty() {
            notices.deliver(self.page_table.memory);
        }
        result
    }

    /// Does `work` in the locked VMA, and unlocks the VMA. If the work has to wait for an event, its
    /// result names the event, and the caller waits afterwards.
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
            free_removed(&self.page_table, removed);
        }
        result
    }
}

#[cold]
fn free_removed<P: Platform>(page_table: &PageTable<'_, P>, removed: Removed) {
    // SAFETY: 1. both are of one address space; 2. there are none.
    unsafe { removed.free(page_table.memory, Tables::default()) };
}

/// Counts unmapped pages down, releases what the removed VMAs hold, and frees the tables and VMAs
/// when no reader is left. Called without locks on VMAs or tables.
pub(super) fn finish<P: Platform>(edit: &mut Edit<'_, '_, P>, removed: Removed) {
    let tables = edit.flushed().take_detached();
    // SAFETY: 1. both are of one address space; 2. emptied above.
    unsafe { removed.free(edit.memory, tables) };
}
