//! Anon groups (Linux: `anon_vma`).
//!
//! An anon group outlives its VMAs while it has children: folios may name it as their owner, and a
//! walk from it must reach the VMAs below. So a process that forks and exits leaves a *dead* group
//! behind. [`super::fork_chain`] takes dead groups out of the tree and bounds their number.

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

/// VMAs of one address space whose anonymous pages may belong together: parts of what was one
/// VMA, or could have been.
///
/// Having a reference tells you that the anon group has a holder, unless it was just found by a
/// folio ([`AnonGroup::try_hold`]): it is in the family's tree, and so are those above it.
#[repr(align(64))]
pub(crate) struct AnonGroup {
    /// The root of the family, whose lock guards all trees of the family; null in itself.
    root: AtomicPtr<Self>,
    /// The anon group of the VMA that this one's was forked from.
    parent: AtomicPtr<Self>,
    first_child: AtomicPtr<Self>,
    next_sibling: AtomicPtr<Self>,
    previous_sibling: AtomicPtr<Self>,
    pub(crate) vmas: GroupTree,
    /// In an anon group that was found dead and unary: the first anon group below that is not,
    /// which takes over its pages. In the root: the anon group whose VMAs are being surveyed.
    /// Written under the family's lock; see [`super::fork_chain`].
    new_parent: AtomicPtr<Self>,
    /// In the root: the family's clock. In an anon group that was found dead: the time of that. In
    /// any other: no page in its VMAs belongs to an anon group that was found dead up to then.
    stamp: AtomicU64,
    /// VMAs, children, and walkers; 0 in an anon group that was contracted.
    holders: AtomicU32,
    lock: TreeLock,
    /// The pointer that the slab gave for the anon group. Freeing it needs this one: a pointer made
    /// of a reference may reach no further than the group.
    node: AtomicPtr<Self>,
}

impl AnonGroup {
    /// The anon group as the slab knows it.
    pub(crate) fn node(&self) -> NonNull<Self> {
        // Never null after `Groups::create`.
        NonNull::new(self.node.load(Ordering::Relaxed)).unwrap_or(NonNull::from(self))
    }

    /// The anon group to which a link of this one leads.
    ///
    /// # Safety
    /// 1. That anon group stays in the tree as long as the result is used. All do while the family
    ///    lock is held: children and siblings leave the lists under it, and a dead group is
    ///    contracted under it.
    unsafe fn follow(&self, link: &AtomicPtr<Self>) -> Option<&Self> {
        // SAFETY: a group is freed only after it has left the tree (obligation 1).
        NonNull::new(link.load(Ordering::Relaxed)).map(|group| unsafe { group.as_ref() })
    }

    /// The lock of all trees of the family.
    pub(crate) fn family_lock(&self) -> &TreeLock {
        &self.root().lock
    }

    /// The anon group above, whose VMA was forked.
    ///
    /// # Safety
    /// 1. The caller holds the family lock as long as the result is used, or the parent is not
    ///    contracted for another reason.
    pub(crate) unsafe fn parent(&self) -> Option<&Self> {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.follow(&self.parent) }
    }

    /// Whether pages of an anon group above may be in the VMAs of this one.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.parent.load(Ordering::Relaxed).is_null()
    }

    /// Whether a walk for pages of this anon group reaches `vma`. For the auditor.
    ///
    /// # Safety
    /// 1. The family does not change during the call.
    pub(crate) unsafe fn leads_to(&self, vma: &Vma) -> bool {
        // A walk holds the anon group first, which it cannot do with a contracted one.
        let mut found = false;
        if self.holders.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // SAFETY: 1. of both: the caller's obligation 1.
        unsafe { self.for_each_below(|group| found |= group.vmas.locked().contains(vma)) };
        found
    }

    /// Whether `vma` is the first in the anon group's tree, which refers to one of them.
    ///
    /// # Safety
    /// 1. The caller holds the family lock, or the family does not change during the call.
    pub(crate) unsafe fn is_first(&self, vma: &Vma) -> bool {
        // SAFETY: 1. the caller's obligation 1.
        let vmas = unsafe { self.vmas.locked() };
        vmas.first(&Asked::ALL).is_some_and(|first| ptr::eq(first, vma))
    }

    /// Whether the anon group has no VMA, and `child` is the first of those below it. For the
    /// auditor.
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
        // SAFETY: 1. an anon group holds its parent, and so the root, until it has left the tree;
        // the root is never contracted.
        unsafe { self.follow(&self.root) }.unwrap_or(self)
    }

    /// The time of the family's clock. It advances when an anon group with children becomes dead,
    /// and when dead anon groups are found.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.root().stamp.load(Ordering::Relaxed)
    }

    /// Advances the family's clock, and returns the new time.
    pub(super) fn tick(&self) -> u64 {
        self.root().stamp.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The time when the anon group was found dead, or up to which its VMAs are clear of pages of
    /// dead groups.
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

    /// The anon group that takes over the pages of one that was found dead and unary.
    ///
    /// # Safety
    /// 1. The caller surveys VMAs below the group. The new parent was chosen for that, and is the
    ///    group of these VMAs or one above it.
    pub(super) unsafe fn new_parent(&self) -> Option<&Self> {
        // SAFETY: 1. it stays as long as the VMAs do, and no other survey contracts it (the
        // caller's obligation 1).
        if self.is_inherited() { unsafe { self.follow(&self.new_parent) } } else { None }
    }

    /// Whether the anon group is dead and unary, and stays so. Never the root, which has the lock.
    /// The family lock is held.
    pub(super) fn is_dead(&self) -> bool {
        self.is_inherited() && (self.has_new_parent() || self.is_dead_and_unary())
    }

    /// Records that the anon group was found dead, unless that is known, and which group takes over
    /// its pages. The family lock is held.
    pub(super) fn reparent(&self, new_parent: &Self, now: u64) {
        if !self.has_new_parent() {
            self.stamp.store(now, Ordering::Relaxed);
        }
        self.new_parent.store(new_parent.node().as_ptr(), Ordering::Relaxed);
    }

    /// Claims the survey of the family for this anon group, unless another has it. The family lock
    /// is held.
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
    /// 1. The caller holds the family lock as long as the iterator and its items are used.
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

    /// The number of VMAs and walkers that hold the group. Includes VMAs that were removed from the
    /// tree but whose pages may still count as mapped.
    ///
    /// # Safety
    /// 1. The caller holds the family lock.
    pub(super) unsafe fn active_vmas(&self) -> u32 {
        // Acquire: the earlier holders' changes of the anon group are visible.
        let holders = self.holders.load(Ordering::Acquire);
        // SAFETY: 1. the caller's obligation 1.
        holders.saturating_sub(unsafe { self.children() }.count() as u32)
    }

    /// Whether one child is the only holder of the anon group: it has no VMA, not even one whose
    /// pages are still to be counted down, and no walker. It stays so until the child leaves. The
    /// family lock is held.
    fn is_dead_and_unary(&self) -> bool {
        // Acquire: the earlier holders' changes of the anon group are visible.
        self.holders.load(Ordering::Acquire) == 1 && self.vmas.is_empty() && !self.is_childless()
    }

    /// Whether no anon group was forked from this one, or none is left. The family lock is held, or
    /// no fork of its VMAs runs and a stale "no" does no harm.
    fn is_childless(&self) -> bool {
        self.first_child.load(Ordering::Relaxed).is_null()
    }

    /// Drops the count of holders to zero, if the one child is the only holder.
    fn freeze(&self) -> bool {
        self.holders.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Removes this dead anon group, whose one child is `child`, from the tree, unless a walker
    /// holds it.
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
        // SAFETY: 1. it is frozen, so that no other thread frees it; 2. it is in no list of
        // children any more.
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

    /// Adds a walker, unless the anon group has no holder any more. The caller is in a read section
    /// in which it saw a mapped folio name the anon group as its owner, so the memory still holds
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
    /// 1. The VMA is in the trees and belongs to no anon group. It leaves this one before it is
    ///    freed.
    /// 2. The VMA was counted as a holder ([`AnonGroup::hold`]).
    pub(crate) unsafe fn join<P: Platform>(&self, platform: &P, vma: &Vma) {
        self.family_lock().with_write(platform, || {
            // SAFETY: 1. it holds the group (obligation 2).
            unsafe { vma.set_group(Some(self.node())) };
            // SAFETY: 1. the lock is held; 2. the caller's obligation 1; 3. the VMA's range changes
            // only through `RmapGuard`, which updates the tree (`Rekeyed`).
            unsafe { self.vmas.insert(vma) };
        });
    }

    /// Removes `vma` from the anon group. It still counts as a holder.
    ///
    /// # Safety
    /// 1. The VMA belongs to this anon group, and is in its tree.
    pub(crate) unsafe fn leave<P: Platform>(&self, platform: &P, vma: &Vma) {
        self.family_lock().with_write(platform, || {
            // SAFETY: 1. the lock is held; 2. the caller's obligation 1.
            unsafe { self.vmas.remove(vma) };
            // SAFETY: 1. there is no group to be held.
            unsafe { vma.set_group(None) };
        });
    }

    /// Calls `f` for this anon group and all below it.
    ///
    /// These are one for each mapped VMA that was forked from one of the anon group's, or from a
    /// copy of it, and the dead ones above those; [`super::fork_chain`] leaves a few dead ones for
    /// each.
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

    /// Like [`AnonGroup::for_each_below`], until `f` breaks. Loops instead of recursing: families
    /// may be as deep as programs fork.
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

    /// The anon group after this one among `top` and those below, parents before their children.
    ///
    /// # Safety
    /// 1. The caller holds the family lock as long as the result is used, or until it holds that
    ///    group.
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
        // SAFETY: 1. `Groups::create` makes all groups, in a slab; this one is borrowed.
        unsafe { LiveOwner::new(Owner::Group(NonNull::from(group).cast())) }
    }
}

impl Linked for AnonGroup {
    /// For an anon group that has left the tree; no caller follows it to siblings then.
    fn next(&self) -> &AtomicPtr<Self> {
        &self.next_sibling
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for AnonGroup {
    const KIND: RecordKind = RecordKind::AnonGroup;
}
