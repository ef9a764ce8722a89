//! What an operation has taken out of the set, until it is freed.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::deferred::{Chain, Tables};
use crate::object;
use crate::platform::Platform;
use crate::rmap::{AnonGroup, Groups};
use crate::userfault::release as release_userfault;
use crate::vma::{MappingFlags, Vma};

/// What an operation has taken out of the set.
#[derive(Default)]
#[must_use = "what was removed has to be freed"]
pub(crate) struct Removed {
    /// VMAs that were taken out of the index. Each still holds its object, anon group and
    /// userfaultfd.
    pub(super) vmas: Chain<Vma>,
    /// Anon groups without a holder.
    pub(super) groups: Chain<AnonGroup>,
    /// A VMA that stays is no longer locked into memory.
    pub(super) unlocked: bool,
}

impl Removed {
    /// Whether nothing is left to be done.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.vmas.is_empty() && self.groups.is_empty() && !self.unlocked
    }

    /// Releases what the removed VMAs hold, and frees the VMAs, and `tables`, when no reader is
    /// left. May sleep.
    ///
    /// Pages of the VMAs must be counted down before: a walker of the reverse map that is in a read
    /// section and sees that a folio is mapped relies on its owner ([`crate::rmap`]).
    ///
    /// # Safety
    /// 1. The VMAs and anon groups were removed by operations on address spaces of `memory`.
    /// 2. `tables` are detached, flushed and emptied.
    pub(crate) unsafe fn free<P: Platform>(self, memory: &Memory<P>, tables: Tables) {
        let Self { vmas, mut groups, mut unlocked } = self;
        for vma in vmas.iter() {
            unlocked |= vma.has(MappingFlags::LOCKED);
            if let Some(group) = vma.group_pointer() {
                // SAFETY: 1. the VMA's own holder, which it gives up here.
                unsafe { Groups::release(memory, group, &mut groups) };
            }
            if let Some(object) = vma.object_pointer() {
                // SAFETY: 1. the VMA's own holder, which it gives up here.
                unsafe { object::map_removed(memory, object, vma.flags()) };
            }
            if let Some(userfault) = vma.userfault_pointer() {
                // SAFETY: 1. the VMA's own hold, which it gives up here.
                unsafe { release_userfault(memory, userfault) };
            }
        }
        if unlocked {
            memory.note_unlocked();
        }
        // SAFETY: 1. the VMAs are out of the index and the trees; no VMA and no child holds the
        // anon groups.
        unsafe { memory.free_unlinked(tables, vmas, groups) };
    }
}
