//! Anon groups (Linux: `anon_vma`).
//!
//! An anon group outlives its VMAs while it has children: folios may name it as their owner, and a
//! walk from the group must reach the VMAs below. So a process that forks and exits leaves a *dead*
//! group behind. [`super::fork_chain`] removes dead groups from the tree and bounds their number.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod groups;

use core::ops::ControlFlow;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::deferred::{Chain, Linked};
use crate::folio::{LiveOwner, OWNER_ALIGN, Owner};
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;
use crate::vma::Vma;

pub(crate) use groups::Groups;

use super::TreeLock;
use super::trees::GroupTree;
use crate::collections::interval_tree::Asked;

/// VMAs of one address space whose anonymous pages may belong together: parts of one former VMA, or
/// neighbors that could have been one VMA.
///
/// The target of a reference has a holder, unless the group was just found through a folio
/// ([`AnonGroup::try_hold`]): the group and all groups above it are in the family's tree.
#[repr(align(64))]
pub(crate) struct AnonGroup {
    /// The root of the family, whose lock guards all trees of the family; null in the root itself.
    root: AtomicPtr<Self>,
    /// The anon group of the VMA from which this group's VMA was forked.
    parent: AtomicPtr<Self>,
    first_child: AtomicPtr<Self>,
    next_sibling: AtomicPtr<Self>,
    previous_sibling: AtomicPtr<Self>,
    pub(crate) vmas: GroupTree,
    /// In an anon group that was found dead and unary: the first anon group below that is not dead
    /// and unary, which takes over the pages. In the root: the anon group whose VMAs are being
    /// surveyed. Written under the family's lock; see [`super::fork_chain`].
    new_parent: AtomicPtr<Self>,
    /// In the root: the family's clock. In an anon group that was found dead: the time of this
    /// finding. In any other group: a time such that no page in the group's VMAs belongs to a group
    /// that was found dead up to then.
    stamp: AtomicU64,
    /// VMAs, children, and walkers; 0 in a contracted anon group.
    holders: AtomicU32,
    lock: TreeLock,
    /// The pointer to the anon group that the slab returned. The group must be freed through it,
    /// because a pointer made from a reference may not be valid beyond the group.
    node: AtomicPtr<Self>,
}

impl AnonGroup {
    /// The slab's pointer to the anon group.
    pub(crate) fn node(&self) -> NonNull<Self> {
        // Never null after `Groups::create`.
        NonNull::new(self.node.load(Ordering::Relaxed)).unwrap_or(NonNull::from(self))
    }

    /// The anon group that `link`, a field of this group, points to.
    ///
    /// # Safety
    /// 1. That anon group remains in the tree while the result is used. The family lock guarantees
    ///    this, because it is held whenever children and siblings leave the lists and whenever a
    ///    dead group is contracted.
    unsafe fn follow(&self, link: &AtomicPtr<Self>) -> Option<&Self> {
        // SAFETY: a group is freed only after it has left the tree (obligation 1).
        NonNull::new(link.load(Ordering::Relaxed)).map(|group| unsafe { group.as_ref() })
    }

    /// The lock of all trees of the family.
    pub(crate) fn family_lock(&self) -> &TreeLock {
        &self.root().lock
    }

    /// The parent: the anon group of the VMA that was forked.
    ///
    /// # Safety
    /// 1. The caller holds the family lock while the result is used, or prevents the parent's
    ///    contraction by other means.
    pub(crate) unsafe fn parent(&self) -> Option<&Self> {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.follow(&self.parent) }
    }

    /// Whether the VMAs of this group may contain pages of an anon group above.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.parent.load(Ordering::Relaxed).is_null()
    }

    /// Whether a walk for pages of this anon group reaches `vma`. For the auditor.
    ///
    /// # Safety
    /// 1. The family does not change during the call.
    pub(crate) unsafe fn leads_to(&self, vma: &Vma) -> bool {
        // A walk first holds the anon group, which fails for a contracted group.
        let mut found = false;
        if self.holders.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // SAFETY: 1. of both: the caller's obligation 1.
        unsafe { self.for_each_below(|group| found |= group.vmas.locked().contains(vma)) };
        found
    }

    /// Whether `vma` is the first VMA in the anon group's tree.
    ///
    /// # Safety
    /// 1. The caller holds the family lock, or the family does not change during the call.
    pub(crate) unsafe fn is_first(&self, vma: &Vma) -> bool {
        // SAFETY: 1. the caller's obligation 1.
        let vmas = unsafe { self.vmas.locked() };
        vmas.first(&Asked::ALL).is_some_and(|first| ptr::eq(first, vma))
    }

    /// Whether the anon group has no VMA and `child` is its first child. For the auditor.
    pub(crate) fn is_traced_by(&self, child: &Self) -> bool {
        let first = self.first_child.load(Ordering::Relaxed);
        self.vmas.is_empty() && ptr::eq(first.cast_const(), child)
    }

    /// Whether `owner` is an anon group of the same family.
    pub(crate) fn is_related<P: Platform>(&self, platform: &P, owner: Owner) -> bool {
        let names = |group: &Self| Self::as_owner(Some(group)).owner() == owner;
        if names(self) || names(self.root()) {
            return true;
        }
        let _family = self.family_lock().read(platform);
        let mut found = false;
        // SAFETY: 1. the lock is held.
        unsafe { self.root().for_each_below(|group| found |= names(group)) };
        found
    }

    /// The root of the family, above all others.
    pub(crate) fn root(&self) -> &Self {
        // SAFETY: 1. an anon group holds its parent, and thus the root, until the group has left
        // the tree; the root is never contracted.
        unsafe { self.follow(&self.root) }.unwrap_or(self)
    }

    /// The time of the family's clock, which advances when an anon group with children becomes
    /// dead, and when dead anon groups are found.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.root().stamp.load(Ordering::Relaxed)
    }

    /// Advances the family's clock and returns the new time.
    pub(super) fn tick(&self) -> u64 {
        self.root().stamp.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The time when the anon group was found dead, or the time up to which its VMAs are clear of
    /// pages of dead groups.
    #[inline]
    pub(super) fn stamp(&self) -> u64 {
        self.stamp.load(Ordering::Relaxed)
    }

    /// Records the time up to which the VMAs are clear. The address space's mutex is held.
    pub(super) fn set_stamp(&self, now: u64) {
        self.stamp.store(now, Ordering::Relaxed);
    }

    /// Whether the anon group was found dead and unary.
    pub(super) fn has_new_parent(&self) -> bool {
        self.is_inherited() && !self.new_parent.load(Ordering::Relaxed).is_null()
    }

    /// The anon group that takes over the pages of this group, which was found dead and unary.
    ///
    /// # Safety
    /// 1. The caller surveys VMAs below the group. The new parent was chosen for this survey, and
    ///    is the group of these VMAs or a group above it.
    pub(super) unsafe fn new_parent(&self) -> Option<&Self> {
        // SAFETY: 1. the new parent lives as long as the VMAs, and no other survey contracts it
        // (the caller's obligation 1).
        if self.is_inherited() { unsafe { self.follow(&self.new_parent) } } else { None }
    }

    /// Whether the anon group is dead and unary and will remain so. Never true for the root, which
    /// contains the lock. The family lock is held.
    pub(super) fn is_dead(&self) -> bool {
        self.is_inherited() && (self.has_new_parent() || self.is_dead_and_unary())
    }

    /// Records that the anon group was found dead, unless that is already recorded, and which group
    /// takes over its pages. The family lock is held.
    pub(super) fn reparent(&self, new_parent: &Self, now: u64) {
        if !self.has_new_parent() {
            self.stamp.store(now, Ordering::Relaxed);
        }
        self.new_parent.store(new_parent.node().as_ptr(), Ordering::Relaxed);
    }

    /// Claims the family's survey for this anon group, unless another group has claimed it. The
    /// family lock is held.
    pub(super) fn begin_survey(&self) -> bool {
        let surveyor = &self.root().new_parent;
        let free = surveyor.load(Ordering::Relaxed).is_null();
        if free {
            surveyor.store(self.node().as_ptr(), Ordering::Relaxed);
        }
        free
    }

    /// Ends the anon group's survey. The family lock is held.
    pub(super) fn end_survey(&self) {
        debug_assert!(ptr::eq(self.root().new_parent.load(Ordering::Relaxed), self));
        self.root().new_parent.store(ptr::null_mut(), Ordering::Relaxed);
    }

    /// The anon groups forked from this one.
    ///
    /// # Safety
    /// 1. The caller holds the family lock while the iterator or an item is in use.
    pub(super) unsafe fn children(&self) -> impl Iterator<Item = &Self> {
        // SAFETY: 1. the caller's obligation 1.
        let mut next = unsafe { self.follow(&self.first_child) };
        core::iter::from_fn(move || {
            let child = next?;
            // SAFETY: 1. the caller's obligation 1.
            next = unsafe { child.follow(&child.next_sibling) };
            Some(child)
        })
    }

    /// The number of VMAs and walkers that hold the group. Includes VMAs that left the tree but
    /// have pages that may still count as mapped.
    ///
    /// # Safety
    /// 1. The caller holds the family lock.
    pub(super) unsafe fn active_vmas(&self) -> u32 {
        // Acquire: changes to the anon group by earlier holders are visible.
        let holders = self.holders.load(Ordering::Acquire);
        // SAFETY: 1. the caller's obligation 1.
        holders.saturating_sub(unsafe { self.children() }.count() as u32)
    }

    /// Whether the anon group's only holder is one child: the group has no walker and no VMA, not
    /// even a removed one with pages still to be counted down. This remains true until the child
    /// leaves. The family lock is held.
    fn is_dead_and_unary(&self) -> bool {
        // Acquire: changes to the anon group by earlier holders are visible.
        self.holders.load(Ordering::Acquire) == 1 && self.vmas.is_empty() && !self.is_childless()
    }

    /// Whether the anon group has no children. The family lock is held, or no fork of its VMAs runs
    /// and a stale `false` is harmless.
    fn is_childless(&self) -> bool {
        self.first_child.load(Ordering::Relaxed).is_null()
    }

    /// Sets the holder count to zero if the only child is the only holder.
    fn freeze(&self) -> bool {
        self.holders.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Removes this dead anon group with its only child `child` from the tree, unless a walker
    /// holds the group.
    ///
    /// # Safety
    /// 1. The caller holds the family lock exclusively.
    pub(super) unsafe fn detach(&self, child: &Self, retired: &mut Chain<Self>) -> bool {
        // SAFETY: 1. the lock is held.
        let Some(parent) = (unsafe { self.parent() }) else { return false };
        if !self.is_dead_and_unary() || !self.freeze() {
            return false;
        }
        // SAFETY: 1. the lock is held.
        unsafe { child.replace_child(self, parent) };
        // SAFETY: 1. the group is frozen, so no other thread frees it; 2. it is in no list of
        // children.
        unsafe { retired.push(self.node()) };
        true
    }

    /// Replaces `old` among the children of `parent`.
    ///
    /// # Safety
    /// 1. The caller holds the family lock exclusively.
    unsafe fn replace_child(&self, old: &Self, parent: &Self) {
        let node = self.node().as_ptr();
        self.parent.store(parent.node().as_ptr(), Ordering::Relaxed);
        let after = old.next_sibling.load(Ordering::Relaxed);
        let before = old.previous_sibling.load(Ordering::Relaxed);
        self.next_sibling.store(after, Ordering::Relaxed);
        self.previous_sibling.store(before, Ordering::Relaxed);
        // SAFETY: 1. of both: the caller's obligation 1.
        let siblings =
            unsafe { (self.follow(&self.previous_sibling), self.follow(&self.next_sibling)) };
        match siblings.0 {
            Some(before) => before.next_sibling.store(node, Ordering::Relaxed),
            None => parent.first_child.store(node, Ordering::Relaxed),
        }
        if let Some(after) = siblings.1 {
            after.previous_sibling.store(node, Ordering::Relaxed);
        }
    }

    /// Adds a walker, unless the anon group has no holder. The caller is in a read section in which
    /// it saw a mapped folio that names the anon group as its owner, so the memory still contains
    /// an anon group.
    pub(super) fn try_hold(&self) -> bool {
        let more = |holders| if holders == 0 { None } else { Some(holders + 1) };
        self.holders.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    /// Adds a VMA or child.
    pub(crate) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes `vma` belong to this anon group.
    ///
    /// # Safety
    /// 1. The VMA is in the trees and belongs to no anon group. It leaves this group before it is
    ///    freed.
    /// 2. The VMA was counted as a holder ([`AnonGroup::hold`]).
    pub(crate) unsafe fn join<P: Platform>(&self, platform: &P, vma: &Vma) {
        self.family_lock().with_write(platform, || {
            // SAFETY: 1. and 2. the caller's obligations; 3. the lock is held.
            unsafe { self.add(vma) };
        });
    }

    /// As [`AnonGroup::join`], if the family's lock is free, and counts the VMA as a holder. Returns
    /// whether the VMA joined.
    ///
    /// # Safety
    /// 1. As for [`AnonGroup::join`].
    pub(crate) unsafe fn try_join<P: Platform>(&self, platform: &P, vma: &Vma) -> bool {
        let Some(_guard) = self.family_lock().try_write(platform) else { return false };
        self.hold();
        // SAFETY: 1. the caller's obligation 1; 2. counted above; 3. the lock is held.
        unsafe { self.add(vma) };
        true
    }

    /// Adds a VMA.
    ///
    /// # Safety
    /// 1. and 2. As for [`AnonGroup::join`].
    /// 3. The caller holds the family lock for writing.
    unsafe fn add(&self, vma: &Vma) {
        // SAFETY: 1. the VMA holds the group (obligation 2).
        unsafe { vma.set_group(Some(self.node())) };
        // SAFETY: 1. obligation 3; 2. obligation 1; 3. the VMA's range changes only through
        // `RmapGuard`, which updates the tree (`Rekeyed`).
        unsafe { self.vmas.insert(vma) };
    }

    /// Removes `vma` from the anon group. The VMA still counts as a holder.
    ///
    /// # Safety
    /// 1. The VMA belongs to this anon group and is in its tree.
    pub(crate) unsafe fn leave<P: Platform>(&self, platform: &P, vma: &Vma) {
        self.family_lock().with_write(platform, || {
            // SAFETY: 1. the lock is held; 2. the caller's obligation 1.
            unsafe { self.vmas.remove(vma) };
            // SAFETY: 1. no group needs to be held.
            unsafe { vma.set_group(None) };
        });
    }

    /// Calls `f` for this anon group and for all groups below it.
    ///
    /// The groups below are: one for each mapped VMA that was forked from a VMA of this group or
    /// from a copy of it, and the dead groups above those. [`super::fork_chain`] bounds the number
    /// of dead groups for each living one.
    ///
    /// # Safety
    /// 1. The caller holds the family lock.
    pub(super) unsafe fn for_each_below(&self, mut f: impl FnMut(&Self)) {
        let each = |group: &Self| {
            f(group);
            ControlFlow::Continue(())
        };
        // SAFETY: 1. the caller's obligation 1.
        let _ = unsafe { self.try_for_each_below(each) };
    }

    /// Like [`AnonGroup::for_each_below`], until `f` breaks. Iterates instead of recursing, because
    /// the depth of families is unbounded.
    ///
    /// # Safety
    /// 1. The caller holds the family lock.
    pub(super) unsafe fn try_for_each_below(
        &self,
        mut f: impl FnMut(&Self) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut next = Some(self);
        while let Some(at) = next {
            f(at)?;
            // SAFETY: 1. the caller's obligation 1.
            next = unsafe { at.next_below(self) };
        }
        ControlFlow::Continue(())
    }

    /// The next anon group among `top` and the groups below it, parents before their children.
    ///
    /// # Safety
    /// 1. The caller holds the family lock while the result is used, or until it holds that group.
    pub(super) unsafe fn next_below(&self, top: &Self) -> Option<&Self> {
        let mut at = self;
        // SAFETY: 1. the caller's obligation 1.
        if let Some(child) = unsafe { at.follow(&at.first_child) } {
            return Some(child);
        }
        while !ptr::eq(at, top) {
            // SAFETY: 1. the caller's obligation 1.
            if let Some(sibling) = unsafe { at.follow(&at.next_sibling) } {
                return Some(sibling);
            }
            // SAFETY: 1. the caller's obligation 1.
            at = unsafe { at.parent() }?;
        }
        None
    }
}

const _: () = assert!(align_of::<AnonGroup>() as u64 >= OWNER_ALIGN);

impl AnonGroup {
    /// The anon group as the owner of folios, or no owner.
    #[inline]
    pub(crate) fn as_owner(group: Option<&Self>) -> LiveOwner<'_> {
        let Some(group) = group else { return LiveOwner::NONE };
        // SAFETY: 1. `Groups::create` allocates all groups from a slab; this group is borrowed.
        unsafe { LiveOwner::new(Owner::Group(NonNull::from(group).cast())) }
    }
}

impl Linked for AnonGroup {
    /// Used only for an anon group that has left the tree, because no caller then follows the link
    /// to siblings.
    fn next(&self) -> &AtomicPtr<Self> {
        &self.next_sibling
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for AnonGroup {
    const KIND: RecordKind = RecordKind::AnonGroup;
}
