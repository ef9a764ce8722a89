//! The memory part of `fork(2)`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use crate::error::{Error, Failure, NoMemory};
use crate::interrupt;
use crate::platform::Platform;
use crate::rmap::{self, AnonGroup, Groups};
use crate::table::copy::{Copied, ForkCopy};
use crate::tlb::Gather;
use crate::userfault::Notices;

use super::change::Removed;
use super::vma::{MappingFlags, Purpose, Vma};
use super::{AddressSpace, MmapLocked, SpaceOptions};

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// A copy of the address space: the same mappings with the same contents. Private pages are
    /// shared until one side writes, except that the child gets copies of pinned pages. Shared
    /// mappings stay shared. The child has no locked memory, none of the `MADV_DONTFORK` mappings,
    /// and empty mappings for `MADV_WIPEONFORK`.
    ///
    /// If a mapping never had a private page or a guard, nothing is copied: the child's faults find
    /// what the parent's would.
    ///
    /// Context: may sleep. Complexity: in the mappings and the runs of those that have private
    /// pages; one write to a folio's counts for each run, one invalidation for each 64 tables.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Overcommitted`], and [`Error::Interrupted`] if a fatal
    /// signal came before the end. Then there is no copy, and this address space is as it was,
    /// except that its next writes may fault once more. (Linux asks for signals at each mapping,
    /// too, and before it begins, where any signal restarts the call: that is the embedder's part.)
    pub fn fork(&self) -> Result<Self, Error> {
        self.page_table.memory.outermost(|| self.fork_once())
    }

    fn fork_once(&self) -> Result<Self, Failure> {
        let maximum_mappings = self.maximum_mappings.load(Ordering::Relaxed);
        let options = SpaceOptions { maximum_mappings, ..self.options };
        let child = Self::with_limit(self.page_table.memory, options, self.page_table.reach)?;
        child.set_limits(&self.limits());
        child.inherit_settings(self);
        let result = self.transaction(|mm, gather, removed| {
            child.program_break.copy_from(&self.program_break);
            child.keys.copy_from(&self.keys);
            // All VMAs stay locked until the flush, which is one for up to 64 tables: a fault would
            // meet the mark of the pending flush, and make one of its own.
            let mut notices = Notices::default();
            let result = self.copy_vmas(mm, &child, gather, removed, &mut notices);
            if result.is_ok() {
                removed.notices.append(notices);
            } else {
                notices.cancel(self.page_table.memory);
            }
            self.flush(gather);
            for node in self.vmas.iter() {
                // SAFETY: 1. `copy_vmas` left each locked; 2. it kept no guard.
                drop(unsafe { self.vma(node).written(self.platform()) });
            }
            result
        });
        // On failure the drop of the child gives back what it has.
        result.map(|()| child)
    }

    fn copy_vmas(
        &self,
        mm: &MmapLocked,
        child: &Self,
        gather: &mut Gather,
        removed: &mut Removed,
        notices: &mut Notices,
    ) -> Result<(), Failure> {
        let mut chains = false;
        for node in self.vmas.iter() {
            let vma = self.vma(node);
            vma.lock_write(self.platform()).leave_locked();
            chains |= rmap::may_contract(vma);
        }
        if chains {
            self.contract_groups(removed);
        }
        for node in self.vmas.iter() {
            interrupt::check(self.platform())?;
            let vma = self.vma(node);
            if vma.has(MappingFlags::DONT_FORK) {
                continue;
            }
            // As Linux, which asks for each mapping by itself: heuristics refuse what is too much
            // at once. What was committed for the mappings before is in the child's account.
            let committed = if vma.has(MappingFlags::ACCOUNT) { vma.pages() } else { 0 };
            let _reservation = self.page_table.memory.commitment().reserve(committed)?;
            self.copy_vma(mm, child, vma, notices, gather)?;
        }
        Ok(())
    }

    /// Takes dead anon groups out of the families, before the child's make their chains longer. All
    /// VMAs are locked.
    #[cold]
    fn contract_groups(&self, removed: &mut Removed) {
        for node in self.vmas.iter() {
            if let Some(groups) = rmap::contract(&self.page_table, self.vma(node)) {
                removed.groups.append(groups);
            }
        }
    }

    fn copy_vma(
        &self,
        _mm: &MmapLocked,
        child: &Self,
        vma: &Vma,
        notices: &mut Notices,
        gather: &mut Gather,
    ) -> Result<(), Failure> {
        let range = vma.range();
        // Before the child can run, and before anything else is made that would have to go again.
        let userfault = match vma.userfault_pointer() {
            Some(_) => self.child_userfault(child, vma, notices)?,
            None => None,
        };
        let wiped = vma.has(MappingFlags::WIPE_ON_FORK);
        let parent = vma.group().filter(|_| !wiped);
        let group = match parent {
            None => None,
            Some(parent) => {
                let memory = self.page_table.memory;
                Some(Groups::create(memory, Some(parent)).ok_or(NoMemory)?)
            }
        };
        let flags = vma.flags() - (MappingFlags::LOCKED | MappingFlags::LOCK_ON_FAULT);
        let unserved = MappingFlags::USERFAULT;
        let flags = if userfault.is_some() { flags } else { flags - unserved };
        let purpose = Purpose { flags, object: vma.object_pointer(), group, userfault };
        match child.new_vma(range, purpose, vma.page_offset()) {
            // Before anything is copied, and after this side's in the trees (`rmap::walk`).
            Ok(node) => child.insert(&child.mmap_lock.lock(), node),
            Err(error) => {
                if let Some(group) = group {
                    Groups::discard(self.page_table.memory, group);
                }
                return Err(error.into());
            }
        }
        let guarded = vma.has(MappingFlags::MAYBE_GUARDS);
        // Shared memory keeps what is write-protected in its entries alone.
        let marked = flags.contains(MappingFlags::USERFAULT_WRITE_PROTECT);
        if wiped || group.is_none() && !guarded && !marked {
            return Ok(());
        }
        let copied = if vma.is_shared() { Copied::Shared } else { Copied::Private };
        let owner = AnonGroup::as_owner(group);
        let page_offset = vma.page_offset();
        let what = ForkCopy { range, copied, owner, page_offset, userfault: userfault.is_some() };
        self.page_table.copy_to(&child.page_table, &what, gather)
    }
}
