//! The owners of anonymous pages.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::addr::PAGE_SHIFT;
use crate::error::NoMemory;
use crate::platform::Platform;
use crate::rmap::{self, AnonGroup, Groups};
use crate::vma::{MappingFlags, Vma, VmaWriteGuard};

use super::VmaSet;

impl<'op, P: Platform> VmaSet<'op, '_, P> {
    /// Gives a VMA an anon group for its anonymous pages: that of a neighbor with which it could be
    /// one VMA, or a new one (Linux: `anon_vma_prepare`). May sleep.
    pub(crate) fn prepare_group(&mut self, vma: &Vma) -> Result<(), NoMemory> {
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
            None => Groups::create(self.page_table.memory, None).ok_or(NoMemory)?,
        };
        self.adopt(vma, group);
        Ok(())
    }

    /// Lets a VMA without an anon group belong to `group`, one of this address space.
    pub(super) fn adopt(&mut self, vma: &Vma, group: NonNull<AnonGroup>) {
        debug_assert!(vma.group_pointer().is_none(), "a VMA belongs to one group");
        // SAFETY: this module found the anon group in a VMA of this address space, which holds it,
        // and the mutex keeps that VMA; or the anon group is fresh, and no other thread knows it.
        let state = unsafe { group.as_ref() };
        state.hold();
        state.join(self.platform(), vma, group);
    }

    /// Lets a VMA belong to no anon group any more; it maps no page of the anon group. Another VMA
    /// of this address space belongs to the group.
    pub(crate) fn leave_group(&mut self, vma: &VmaWriteGuard<'op, P>) {
        let Some(group) = vma.group_pointer() else { return };
        if let Some(state) = vma.group() {
            state.leave(self.platform(), vma);
        }
        Groups::release(self.page_table.memory, group, &mut self.removed.groups);
    }

    /// Takes dead anon groups out of the families. All VMAs are locked for writing.
    #[cold]
    pub(super) fn contract_groups(&mut self) {
        for vma in self.iter() {
            if let Some(groups) = rmap::contract(self.page_table, vma) {
                self.removed.groups.append(groups);
            }
        }
    }
}

/// The anon group of `owner`, one of the two, if `low` and `high` could be one VMA but for their
/// protection, which may be changed back.
fn shared_group(low: &Vma, high: &Vma, owner: &Vma) -> Option<NonNull<AnonGroup>> {
    let ignored = MappingFlags::PROTECTION | MappingFlags::STICKY;
    let fits = low.end() == high.start()
        && low.flags() - ignored == high.flags() - ignored
        && low.object_pointer() == high.object_pointer()
        && high.page_offset()
            == low.page_offset().wrapping_add((high.start() - low.start()) >> PAGE_SHIFT);
    let group = owner.group().filter(|group| fits && !group.is_inherited());
    group.and(owner.group_pointer())
}
