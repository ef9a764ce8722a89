//! The owners of anonymous pages.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr;

use crate::addr::PAGE_SHIFT;
use crate::error::NoMemory;
use crate::platform::Platform;
use crate::rmap::{self, AnonGroup, Groups};
use crate::vma::{MappingFlags, Vma, VmaWriteGuard};

use super::VmaSet;

impl<'op, P: Platform> VmaSet<'op, '_, P> {
    /// Assigns a VMA an anon group for its anonymous pages: that of a mergeable neighbor, or a new
    /// group (Linux: `anon_vma_prepare`). May sleep.
    ///
    /// # Panics
    /// If the VMA is not in the set.
    pub(crate) fn prepare_group(&mut self, vma: &'op Vma) -> Result<(), NoMemory> {
        if vma.group_pointer().is_some() {
            return Ok(());
        }
        let group = match self.group_of_neighbors(vma) {
            Some(group) => group,
            None => self.new_group()?,
        };
        self.adopt(vma, group);
        Ok(())
    }

    /// As [`VmaSet::prepare_group`], if this requires no wait for a lock. Returns whether the VMA has
    /// an anon group.
    ///
    /// # Panics
    /// If the VMA is not in the set.
    pub(crate) fn try_prepare_group(&mut self, vma: &'op Vma) -> Result<bool, NoMemory> {
        if vma.group_pointer().is_some() {
            return Ok(true);
        }
        self.assert_has(vma);
        let shared = self.group_of_neighbors(vma);
        let group = match shared {
            Some(group) => group,
            None => self.new_group()?,
        };
        // SAFETY: 1. as in `adopt`.
        let joined = unsafe { group.try_join(self.platform(), vma) };
        debug_assert!(joined || shared.is_some(), "the lock of a new family is free");
        Ok(joined)
    }

    /// The anon group of a neighbor with which the VMA may merge later, if any.
    fn group_of_neighbors(&self, vma: &'op Vma) -> Option<&'op AnonGroup> {
        let (next, previous) = (self.next(vma), self.previous(vma));
        next.and_then(|next| shared_group(vma, next, next))
            .or_else(|| previous.and_then(|previous| shared_group(previous, vma, previous)))
    }

    /// A new anon group, which the caller gives a VMA.
    fn new_group(&self) -> Result<&'op AnonGroup, NoMemory> {
        let group = Groups::create(self.page_table.memory, None).ok_or(NoMemory)?;
        // SAFETY: the group is fresh, so no other thread frees it; the VMA that joins it keeps it
        // for the length of the operation.
        Ok(unsafe { group.as_ref() })
    }

    /// Adds a VMA without an anon group to `group`, which belongs to this address space.
    pub(super) fn adopt(&mut self, vma: &'op Vma, group: &AnonGroup) {
        self.assert_has(vma);
        assert!(vma.group_pointer().is_none(), "a VMA belongs to one group");
        group.hold();
        // SAFETY: 1. the VMA is in the set and in the trees; `VmaSet::remove` removes it from the
        // trees; 2. held above.
        unsafe { group.join(self.platform(), vma) };
    }

    /// Removes a VMA from its anon group. The VMA maps no page of the group, to which `moved` also
    /// belongs.
    ///
    /// # Panics
    /// If the VMAs are not in the set, or do not belong to the same group.
    pub(crate) fn leave_group(&mut self, vma: &VmaWriteGuard<'op, P>, moved: &'op Vma) {
        let Some(group) = vma.group_pointer() else { return };
        self.assert_has(vma.vma());
        self.assert_has(moved);
        let stays = moved.group_pointer() == Some(group) && !ptr::eq(moved, vma.vma());
        assert!(stays, "no other VMA has the group of the one that leaves it");
        if let Some(state) = vma.group() {
            // SAFETY: 1. the group is the VMA's own, and the VMA is in the set and therefore in the
            // trees.
            unsafe { state.leave(self.platform(), vma) };
        }
        // SAFETY: 1. the hold is the VMA's own, and the VMA no longer refers to the group.
        unsafe { Groups::release(self.page_table.memory, group, &mut self.removed.groups) };
    }

    /// Asserted in all builds: a VMA in the set belongs to this address space and is not removed.
    fn assert_has(&self, vma: &'op Vma) {
        let has = vma.tree() == self.page_table.state() && !vma.is_removed();
        assert!(has, "the set does not have the VMA");
    }

    /// Removes dead anon groups from the families.
    ///
    /// # Safety
    /// 1. All VMAs are locked for writing.
    #[cold]
    pub(super) unsafe fn contract_groups(&mut self) {
        for vma in self.iter() {
            // SAFETY: 1. the set is borrowed from the guard of the mutex; the caller's obligation
            // 1.
            if let Some(groups) = unsafe { rmap::contract(self.page_table, vma) } {
                self.removed.groups.append(groups);
            }
        }
    }
}

/// The anon group of `owner`, one of the two VMAs, if only their protection prevents `low` and
/// `high` from merging. A later change of the protection may permit the merge.
fn shared_group<'v>(low: &Vma, high: &Vma, owner: &'v Vma) -> Option<&'v AnonGroup> {
    let ignored = MappingFlags::PROTECTION | MappingFlags::STICKY;
    let fits = low.end() == high.start()
        && low.flags() - ignored == high.flags() - ignored
        && low.object_pointer() == high.object_pointer()
        && high.page_offset()
            == low.page_offset().wrapping_add((high.start() - low.start()) >> PAGE_SHIFT);
    owner.group().filter(|group| fits && !group.is_inherited())
}
