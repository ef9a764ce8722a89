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
    /// Gives a VMA an anon group for its anonymous pages: that of a mergeable neighbor, or a new
    /// one (Linux: `anon_vma_prepare`). May sleep.
    ///
    /// # Panics
    /// If the set does not have the VMA.
    pub(crate) fn prepare_group(&mut self, vma: &'op Vma) -> Result<(), NoMemory> {
        if vma.group_pointer().is_some() {
            return Ok(());
        }
        let (next, previous) = (self.next(vma), self.previous(vma));
        let mut group = next.and_then(|next| shared_group(vma, next, next));
        if group.is_none() {
            group = previous.and_then(|previous| shared_group(previous, vma, previous));
        }
        let group = match group {
            Some(group) => group,
            // SAFETY: it is fresh: no other thread frees it.
            None => unsafe {
                Groups::create(self.page_table.memory, None).ok_or(NoMemory)?.as_ref()
            },
        };
        self.adopt(vma, group);
        Ok(())
    }

    /// Adds a VMA without an anon group to `group`, one of this address space.
    pub(super) fn adopt(&mut self, vma: &'op Vma, group: &AnonGroup) {
        self.assert_has(vma);
        assert!(vma.group_pointer().is_none(), "a VMA belongs to one group");
        group.hold();
        // SAFETY: 1. the set has the VMA, and so have the trees; `VmaSet::remove` takes it out of
        // them; 2. held above.
        unsafe { group.join(self.platform(), vma) };
    }

    /// Removes a VMA from its anon group; it maps no page of the group, to which `moved` belongs
    /// too.
    ///
    /// # Panics
    /// If the set does not have the VMAs, or they do not belong to one group.
    pub(crate) fn leave_group(&mut self, vma: &VmaWriteGuard<'op, P>, moved: &'op Vma) {
        let Some(group) = vma.group_pointer() else { return };
        self.assert_has(vma.vma());
        self.assert_has(moved);
        let stays = moved.group_pointer() == Some(group) && !ptr::eq(moved, vma.vma());
        assert!(stays, "no other VMA has the group of the one that leaves it");
        if let Some(state) = vma.group() {
            // SAFETY: 1. it is the VMA's own, and the VMA is in the set, so also in the trees.
            unsafe { state.leave(self.platform(), vma) };
        }
        // SAFETY: 1. the VMA's own holder, which does not name the group any more.
        unsafe { Groups::release(self.page_table.memory, group, &mut self.removed.groups) };
    }

    /// Checked in all builds: a VMA that the set has is one of this address space, and not removed.
    fn assert_has(&self, vma: &'op Vma) {
        let has = vma.tree() == self.page_table.state() && !vma.is_removed();
        assert!(has, "the set does not have the VMA");
    }

    /// Takes dead anon groups out of the families.
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

/// The anon group of `owner`, one of the two VMAs, if only their protection keeps `low` and `high`
/// from merging. A later change of the protection may let them merge.
fn shared_group<'v>(low: &Vma, high: &Vma, owner: &'v Vma) -> Option<&'v AnonGroup> {
    let ignored = MappingFlags::PROTECTION | MappingFlags::STICKY;
    let fits = low.end() == high.start()
        && low.flags() - ignored == high.flags() - ignored
        && low.object_pointer() == high.object_pointer()
        && high.page_offset()
            == low.page_offset().wrapping_add((high.start() - low.start()) >> PAGE_SHIFT);
    owner.group().filter(|group| fits && !group.is_inherited())
}
