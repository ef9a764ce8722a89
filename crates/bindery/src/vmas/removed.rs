//! The VMAs and anon groups that an operation has removed from the set, until they are freed.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::deferred::{Chain, DetachedTables, free_unlinked};
use crate::object;
use crate::platform::Platform;
use crate::rmap::{AnonGroup, Groups};
use crate::table::TreeState;
use crate::userfault::release as release_userfault;
use crate::vma::{MappingFlags, Vma};

/// The VMAs and anon groups that an operation has removed from the set.
#[derive(Default)]
#[must_use = "what was removed has to be freed"]
pub(crate) struct Removed {
    /// VMAs removed from the index. Each still holds its object, anon group and userfaultfd.
    pub(super) vmas: Chain<Vma>,
    /// Anon groups without a holder.
    pub(super) groups: Chain<AnonGroup>,
    /// Whether a VMA that remains in the set was unlocked (`munlock`).
    pub(super) unlocked: bool,
}

impl Removed {
    /// Whether nothing needs to be freed or reported.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.vmas.is_empty() && self.groups.is_empty() && !self.unlocked
    }

    /// As [`Removed::free`], for an operation that has detached no table.
    ///
    /// # Safety
    /// 1. As for [`Removed::free`].
    #[cold]
    pub(crate) unsafe fn free_without_tables<P: Platform>(self, memory: &Memory<P>) {
        // SAFETY: 1. of both: the caller's obligation 1; 2. the operation has no tables.
        unsafe {
            self.wake_tasks(memory);
            self.free(memory, DetachedTables::default());
        }
    }

    /// Wakes the tasks that wait for the locks of removed VMAs. Called with the mutex released, which
    /// the tasks need, and before the pages are freed, which may take long.
    ///
    /// # Safety
    /// 1. As for [`Removed::free`].
    #[inline]
    pub(crate) unsafe fn wake_tasks<P: Platform>(&self, memory: &Memory<P>) {
        // All VMAs of an operation have the same tree.
        if let Some(vma) = self.vmas.iter().find(|vma| vma.was_waited_for()) {
            // SAFETY: the address space exists (obligation 1), and with it the tree.
            note_removed(memory, unsafe { vma.tree().as_ref() });
        }
    }

    /// Releases the objects, anon groups and userfaultfds of the removed VMAs. Frees the VMAs and
    /// `tables` after a grace period. May sleep.
    ///
    /// The pages of the VMAs must be counted down first. Otherwise a walker of the reverse map
    /// could, in a read section, see a folio that counts as mapped but whose owner is freed
    /// ([`crate::rmap`]).
    ///
    /// # Safety
    /// 1. The VMAs and anon groups were removed by operations on address spaces of `memory`, which
    ///    still exist.
    /// 2. `tables` are detached, flushed and emptied.
    pub(crate) unsafe fn free<P: Platform>(self, memory: &Memory<P>, tables: DetachedTables) {
        let Self { vmas, mut groups, mut unlocked } = self;
        for vma in vmas.iter() {
            unlocked |= vma.has(MappingFlags::LOCKED);
            if let Some(group) = vma.group_pointer() {
                // SAFETY: 1. the reference is the VMA's own, and is released here.
                unsafe { Groups::release(memory, group, &mut groups) };
            }
            if let Some(object) = vma.object_pointer() {
                // SAFETY: 1. the reference is the VMA's own, and is released here.
                unsafe { object::map_removed(memory, object, vma.flags()) };
            }
            if let Some(userfault) = vma.userfault_pointer() {
                // SAFETY: 1. the reference is the VMA's own, and is released here.
                unsafe { release_userfault(memory, userfault) };
            }
        }
        if unlocked {
            memory.clock.note_unlocked(memory.frames.span().count);
        }
        // SAFETY: 1. the VMAs are in neither the index nor the trees; no VMA and no child holds the
        // anon groups.
        unsafe { free_unlinked(memory, tables, vmas, groups) };
    }
}

/// Wakes the tasks that wait for locks of VMAs of the tree.
#[cold]
fn note_removed<P: Platform>(memory: &Memory<P>, tree: &TreeState) {
    tree.lock_waits.note(memory.platform());
}
