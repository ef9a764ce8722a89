//! The reverse map: from a folio to the entries that map it.
//!
//! The map works *by index*. A folio records its owner, an object or an anon group, and the index
//! of its first page there. The owner lists its VMAs. A VMA determines the address of each index.
//! So a move of entries or whole tables writes to no folio, because the VMA's offset does not
//! change, and a fork writes only to the VMAs' own records. (With tables that know their parents,
//! an entry-by-entry move would have to write to each folio.)
//!
//! ```text
//! folio: owner, index 7 --> group A --> VMA offset 0..16 at 0x10000 --> 0x17000
//!                              |----- > VMA offset 4..8  at 0x90000 (moved) --> not there any more
//!                              '- child group B (after fork) --> VMA offset 0..16 --> 0x17000
//! ```
//!
//! Anonymous memory is grouped as in Linux (`anon_vma`): a VMA gets an anon group with its first
//! page and shares it with neighbors that could be merged with it. The anon groups of a family of
//! processes form a *tree*: `fork` creates a group for each VMA of the child, below the group of
//! the parent's VMA. A page from before the fork belongs to the parent's group, and any group below
//! may map it. A later page belongs to the child's own group. Linux links each VMA with all groups
//! above it instead, so its fork needs one more allocation for each generation. A walk visits the
//! same VMAs in both designs.
//!
//! The VMAs of an object, like those of an anon group, are in an interval tree, so a walk finds
//! exactly the VMAs that map the index. A walk from a group visits the trees of the group and of
//! the groups below, one after the other, each in logarithmic time. The number of trees is one for
//! each living VMA that was forked from a VMA of the group, plus one for each dead VMA with living
//! children. A chain of forks leaves dead groups, which are contracted; [`fork_chain`] explains the
//! contraction and the bound on their number.
//!
//! # Locks
//! The tree of an object has a lock. A family of anon groups has one lock, in its root. Walkers
//! share the lock and release it after a bounded number of entries ([`walk`]). A change of the
//! entries that a VMA in the tree covers (by its bounds, its offset, or a move of its tables) holds
//! the lock exclusively, throughout the change or for each part of it ([`RmapGuard`]). So a walker
//! with the lock misses no entry. Otherwise:
//! 1. CPU A walks: it looks for the page at the destination and finds nothing yet.
//! 2. CPU B moves the entry from the source to the destination.
//! 3. CPU A looks at the source, finds nothing there, and concludes that the page is unmapped.
//!
//! The VMA's stamp reveals changes made while the walker had released the lock; [`walk`] explains
//! the interleavings.
//!
//! Two operations change entries without these locks but in a fixed order. `fork` copies entries
//! into VMAs that a walk visits after their parents, so a walker that has passed the parent before
//! the copy reaches the child after it. An operation that removes entries does so while their VMA
//! is in the trees, and flushes before it releases the tables' locks or marks the tables as pending
//! ([`crate::tlb`]). So a walker that finds no entry in a table without a pending flush may
//! conclude that no TLB holds the page either.
//!
//! A walker that finds fewer entries than the folio has mappings treats the folio as *busy*, never
//! as unmapped. Another operation may have detached a table before lowering the count, or raised
//! the count before writing its entries.
//!
//! `docs/lock-order.md` specifies the order of the locks of folios, objects and families.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod anon_group;
mod fork_chain;
mod tree_lock;
mod trees;
mod walk;

use core::ptr::NonNull;

use crate::addr::VirtRange;
use crate::platform::Platform;
use crate::vma::{Vma, VmaWriteGuard};

pub(crate) use crate::collections::interval_tree::Asked;
pub(crate) use anon_group::{AnonGroup, Groups};
pub(crate) use fork_chain::{contract, may_contract};
use tree_lock::TreeWriteGuard;
pub(crate) use tree_lock::{TreeLock, TreeReadGuard};
pub(crate) use trees::{ObjectTree, TreeLinks};
#[cfg(any(test, feature = "testing"))]
pub(crate) use walk::ObjectWalk;
pub(crate) use walk::{
    HOLD, RmapHit, WalkLocking, WalkProgress, Walked, for_each_anonymous_sight, for_each_sight,
    for_each_sight_from,
};

/// Proof that the caller changes a VMA's range and keeps its trees up to date. Only this module
/// creates the proof, so no change bypasses the trees.
pub(crate) struct Rekeyed(());

#[cfg(any(test, feature = "testing"))]
impl Rekeyed {
    /// For tests that break invariants on purpose.
    pub(crate) fn unseen() -> Self {
        Self(())
    }
}

/// The locks of the trees that a VMA is in, held exclusively until the guard is dropped. The range
/// that the VMA maps changes only through the guard's methods, which keep the trees up to date.
pub(crate) struct RmapGuard<'a, P: Platform> {
    vma: &'a Vma,
    group: Option<NonNull<AnonGroup>>,
    // Dropped in this order: the lock acquired last is released first.
    _family: Option<TreeWriteGuard<'a, P>>,
    _mappings: Option<TreeWriteGuard<'a, P>>,
}

impl<'a, P: Platform> RmapGuard<'a, P> {
    /// Waits for the locks. A VMA that is locked for writing is in the trees, because it leaves
    /// them only when its removal consumes its guard.
    pub(crate) fn new(platform: &'a P, vma: &VmaWriteGuard<'a, P>) -> Self {
        Self::lock(platform, vma.vma())
    }

    /// As [`RmapGuard::new`], if the locks are free.
    pub(crate) fn try_new(platform: &'a P, vma: &VmaWriteGuard<'a, P>) -> Option<Self> {
        let vma = vma.vma();
        let mappings = match vma.object() {
            Some(object) => Some(object.mapping_lock.try_write(platform)?),
            None => None,
        };
        let family = match vma.group() {
            Some(group) => Some(group.family_lock().try_write(platform)?),
            None => None,
        };
        Some(Self { vma, group: vma.group_pointer(), _family: family, _mappings: mappings })
    }

    fn lock(platform: &'a P, vma: &'a Vma) -> Self {
        let mappings = vma.object().map(|object| object.mapping_lock.write(platform));
        let group = vma.group_pointer();
        let family = vma.group().map(|group| group.family_lock().write(platform));
        Self { vma, group, _family: family, _mappings: mappings }
    }

    /// Adds a VMA to the trees.
    ///
    /// # Panics
    /// If `other` has a different object or anon group.
    ///
    /// # Safety
    /// 1. `other` is in no tree, and leaves the trees before it is freed.
    pub(crate) unsafe fn add(&self, other: &Vma) {
        self.assert_alike(other);
        // SAFETY: 1. the locks of its trees are held (`assert_alike`); 2. the caller's obligation
        // 1; 3. its range changes only through the methods below (`Rekeyed`), which update the
        // tree.
        unsafe {
            if let Some(object) = other.object() {
                object.mappers.insert(other);
            }
            if let Some(group) = other.group() {
                group.vmas.insert(other);
            }
        }
    }

    /// Removes the VMA from the trees.
    ///
    /// # Safety
    /// 1. The VMA is in the trees. Its guard is consumed afterwards: [`RmapGuard::resize`] and
    ///    [`RmapGuard::set_place`] require the guard of a VMA in the trees.
    pub(crate) unsafe fn take(&self) {
        // SAFETY: 1. the locks are held; 2. the caller's obligation 1.
        unsafe {
            if let Some(object) = self.vma.object() {
                object.mappers.remove(self.vma);
            }
            if let Some(group) = self.vma.group() {
                group.vmas.remove(self.vma);
            }
        }
    }

    /// Sets the VMA's bounds to `start` and `end`; the entries do not move.
    ///
    /// # Panics
    /// If the guard belongs to another VMA.
    pub(crate) fn resize(&self, vma: &VmaWriteGuard<'_, P>, start: u64, end: u64) {
        self.assert_of(vma);
        if self.vma.start() != start {
            self.vma.set_start(start, &Rekeyed(()));
        }
        self.vma.set_end(end, &Rekeyed(()));
        // SAFETY: 1. the VMA is in the trees, because its guard is not consumed yet (obligation 1
        // of `take`).
        unsafe { self.moved(self.vma) };
    }

    /// Sets the VMA's range to `range` and its offset to `page_offset`; the entries have moved
    /// along.
    ///
    /// # Panics
    /// If the guard belongs to another VMA.
    pub(crate) fn set_place(&self, vma: &VmaWriteGuard<'_, P>, range: VirtRange, page_offset: u64) {
        self.assert_of(vma);
        self.vma.set_place(range, page_offset, &Rekeyed(()));
        // SAFETY: 1. as in `resize`.
        unsafe { self.moved(self.vma) };
    }

    /// Records that `other` has received entries from elsewhere since the locks were taken, so
    /// walks in progress visit it once more.
    ///
    /// # Panics
    /// If `other` has a different object or anon group.
    ///
    /// # Safety
    /// 1. `other` is in the trees of its object and anon group.
    pub(crate) unsafe fn moved(&self, other: &Vma) {
        self.assert_alike(other);
        // SAFETY: 1. the locks are held; 2. the caller's obligation 1.
        unsafe {
            if let Some(object) = other.object() {
                object.mappers.renew(other);
            }
            if let Some(group) = other.group() {
                group.vmas.renew(other);
            }
        }
    }

    /// Asserts, in all builds like [`RmapGuard::assert_alike`], that the guard is for `vma`.
    pub(crate) fn assert_of(&self, vma: &VmaWriteGuard<'_, P>) {
        assert!(core::ptr::eq(vma.vma(), self.vma), "the guard is another VMA's");
    }

    /// Asserted in all builds, because safe functions of `vmas` accept any VMA and any guard.
    fn assert_alike(&self, other: &Vma) {
        let alike = other.object_pointer() == self.vma.object_pointer()
            && other.group_pointer() == self.group;
        assert!(alike, "the locked trees are another VMA's");
    }
}

impl<P: Platform> Drop for RmapGuard<'_, P> {
    fn drop(&mut self) {
        debug_assert_eq!(self.group, self.vma.group_pointer(), "a group changed under its lock");
    }
}

/// Inserts a VMA into the trees of its object and its group.
///
/// # Safety
/// 1. The VMA is in no tree, and leaves the trees before it is freed.
#[inline]
pub(crate) unsafe fn link<P: Platform>(platform: &P, vma: &Vma) {
    if belongs(vma) {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { RmapGuard::lock(platform, vma).add(vma) };
    }
}

/// Removes a VMA from the trees. The VMA still holds its object and group until its pages are
/// counted down.
///
/// # Safety
/// 1. The VMA is in the trees. Its guard, if any, is consumed afterwards.
#[inline]
pub(crate) unsafe fn unlink<P: Platform>(platform: &P, vma: &Vma) {
    if belongs(vma) {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { RmapGuard::lock(platform, vma).take() };
    }
}

/// Whether the VMA belongs in any tree. Anonymous memory that never had a page does not.
#[inline]
fn belongs(vma: &Vma) -> bool {
    vma.object_pointer().is_some() || vma.group_pointer().is_some()
}
