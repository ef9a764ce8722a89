//! Groups of anonymous memory (Linux: `anon_vma`).
//!
//! A group outlives its VMAs while it has children: folios may name it as their owner, and a walk
//! from it has to reach the VMAs below. So a process that forks and exits leaves a *dead* group
//! behind. [`super::chain`] takes dead groups out of the tree and says how many stay.

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::Memory;
use crate::gate::Gate;
use crate::platform::Platform;
use crate::space::vma::Vma;

use super::list::{Membership, VmaList};

/// VMAs of one address space whose anonymous pages may belong together: parts of what was one
/// VMA, or could have been.
#[repr(align(16))]
pub(crate) struct AnonGroup {
    /// The first of the family, whose gate guards all lists of the family; null in itself.
    root: AtomicPtr<Self>,
    /// The group of the VMA that this one's was forked from.
    parent: AtomicPtr<Self>,
    first_child: AtomicPtr<Self>,
    next_sibling: AtomicPtr<Self>,
    previous_sibling: AtomicPtr<Self>,
    pub(crate) vmas: VmaList,
    /// VMAs, children, and walkers; 0 in a group that was contracted.
    holders: AtomicU32,
    /// How many groups stand above it. Written under the family's gate.
    depth: AtomicU32,
    gate: Gate,
}

impl AnonGroup {
    fn follow(&self, link: &AtomicPtr<Self>) -> Option<&Self> {
        // SAFETY: a group holds its parent, and with it the root, for as long as it is in the tree,
        // and nobody follows the links of one that was contracted; children and siblings take themselves out of the lists, under the family's gate, before they are
        // freed, and callers that follow those hold the gate.
        NonNull::new(link.load(Ordering::Relaxed)).map(|group| unsafe { group.as_ref() })
    }

    /// The lock of all lists of the family.
    pub(crate) fn family_gate(&self) -> &Gate {
        &self.follow(&self.root).unwrap_or(self).gate
    }

    /// The group above, where the VMA was forked.
    pub(crate) fn parent(&self) -> Option<&Self> {
        self.follow(&self.parent)
    }

    /// Whether pages of a group above may stand in the VMAs of this one.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.parent.load(Ordering::Relaxed).is_null()
    }

    /// Whether a walk for pages of this group comes by `vma`. For the auditor.
    pub(crate) fn leads_to(&self, vma: &Vma) -> bool {
        // A walk holds the group first, which it cannot do with a contracted one.
        let mut found = false;
        if self.holders.load(Ordering::Relaxed) == 0 {
            return false;
        }
        self.for_each_below(|group| found |= group.vmas.iter().any(|one| ptr::eq(one, vma)));
        found
    }

    /// Whether `vma` is the first in the group's list. For the auditor.
    pub(crate) fn is_first(&self, vma: &Vma) -> bool {
        self.vmas.iter().next().is_some_and(|first| ptr::eq(first, vma))
    }

    /// Whether the group has no VMA, and `child` is the first of those below it. For the auditor.
    pub(crate) fn is_traced_by(&self, child: &Self) -> bool {
        let first = self.follow(&self.first_child).is_some_and(|first| ptr::eq(first, child));
        self.vmas.is_empty() && first
    }

    /// How many groups stand above it. A hint for those who do not keep the family as it is.
    #[inline]
    pub(super) fn depth(&self) -> u32 {
        self.depth.load(Ordering::Relaxed)
    }

    /// Whether the group is kept by one child alone: it has no VMA, not even one that waits for its
    /// grace period, and no walker. It stays so until the child leaves. The family's gate is held.
    pub(super) fn is_dead_and_unary(&self) -> bool {
        // Acquire: what the holders before did to the group has happened.
        self.holders.load(Ordering::Acquire) == 1 && self.vmas.is_empty() && !self.is_childless()
    }

    /// Whether no group was forked from this one, or none is left. The family's gate is held, or no
    /// fork of its VMAs runs and a stale "no" does no harm.
    pub(super) fn is_childless(&self) -> bool {
        self.first_child.load(Ordering::Relaxed).is_null()
    }

    /// Lets nobody hold the group any more, if its one child is all that does.
    fn freeze(&self) -> bool {
        self.holders.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes up to `count` dead groups right above this one out of the tree, and returns them as a
    /// list. Where one has got a walker meanwhile, it and those above it stay.
    pub(super) fn detach_above<P: Platform>(&self, platform: &P, count: u32) -> Option<Retired> {
        self.family_gate().alone(platform, || {
            let mut kept = self.parent()?;
            let mut retired = Retired::default();
            let mut top = None;
            for _ in 0..count {
                let Some(above) = kept.parent() else { break };
                if !kept.is_dead_and_unary() || !kept.freeze() {
                    break;
                }
                top = Some(kept);
                kept = above;
            }
            let top = top?;
            let mut at = self.parent();
            // This group takes the place of the topmost among the children of the one that stays.
            self.replace_child(top, kept);
            while let Some(group) = at {
                at = if ptr::eq(group, top) { None } else { group.parent() };
                retired.push(NonNull::from(group));
            }
            self.depth.store(kept.depth() + 1, Ordering::Relaxed);
            Some(retired)
        })
    }

    /// Stands where `old` stood among the children of `parent`. The family's gate is held.
    fn replace_child(&self, old: &Self, parent: &Self) {
        let node = ptr::from_ref(self).cast_mut();
        self.parent.store(ptr::from_ref(parent).cast_mut(), Ordering::Relaxed);
        let after = old.next_sibling.load(Ordering::Relaxed);
        let before = old.previous_sibling.load(Ordering::Relaxed);
        self.next_sibling.store(after, Ordering::Relaxed);
        self.previous_sibling.store(before, Ordering::Relaxed);
        match self.follow(&self.previous_sibling) {
            Some(before) => before.next_sibling.store(node, Ordering::Relaxed),
            None => parent.first_child.store(node, Ordering::Relaxed),
        }
        if let Some(after) = self.follow(&self.next_sibling) {
            after.previous_sibling.store(node, Ordering::Relaxed);
        }
    }

    /// One walker more, unless nobody holds the group any more. The caller is in a read section in
    /// which it saw a mapped folio name the group, so the group's memory is still one.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn try_hold(&self) -> bool {
        let more = |holders| if holders == 0 { None } else { Some(holders + 1) };
        self.holders.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    /// One VMA or child more.
    pub(crate) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets `vma`, which belongs to no group, belong to this one, which `node` names.
    pub(crate) fn join<P: Platform>(&self, platform: &P, vma: &Vma, node: NonNull<Self>) {
        self.family_gate().alone(platform, || {
            vma.set_group(Some(node));
            self.vmas.add(vma);
        });
    }

    /// Lets `vma` belong to no group any more. It still counts as a holder.
    pub(crate) fn leave<P: Platform>(&self, platform: &P, vma: &Vma) {
        self.family_gate().alone(platform, || {
            self.vmas.take(vma);
            vma.set_group(None);
        });
    }

    /// Calls `f` for this group and all below it. The family's gate is held. Loops instead of
    /// recursing: families may be as deep as programs fork.
    pub(super) fn for_each_below(&self, mut f: impl FnMut(&Self)) {
        let mut at = self;
        loop {
            f(at);
            if let Some(child) = at.follow(&at.first_child) {
                at = child;
                continue;
            }
            loop {
                if ptr::eq(at, self) {
                    return;
                }
                if let Some(sibling) = at.follow(&at.next_sibling) {
                    at = sibling;
                    break;
                }
                let Some(parent) = at.parent() else { return };
                at = parent;
            }
        }
    }
}

/// Groups that were taken out of the tree and wait until nobody can know them.
#[derive(Default)]
pub(crate) struct Retired {
    /// Linked by `next_sibling`.
    first: Option<NonNull<AnonGroup>>,
}

impl Retired {
    fn push(&mut self, node: NonNull<AnonGroup>) {
        let next = self.first.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the group was detached by the caller, and is freed by `Groups::free_retired`
        // alone.
        unsafe { node.as_ref() }.next_sibling.store(next, Ordering::Relaxed);
        self.first = Some(node);
    }

    /// Takes over what the other has.
    pub(crate) fn append(&mut self, mut other: Self) {
        while let Some(node) = other.pop() {
            self.push(node);
        }
    }

    fn pop(&mut self) -> Option<NonNull<AnonGroup>> {
        let node = self.first?;
        // SAFETY: what is on the list was not freed yet.
        self.first = NonNull::new(unsafe { node.as_ref() }.next_sibling.load(Ordering::Relaxed));
        Some(node)
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// How many wait. For the auditor.
    pub(crate) fn count(&self) -> u64 {
        let (mut count, mut next) = (0, self.first);
        while let Some(node) = next {
            // SAFETY: what is on the list was not freed yet.
            next = NonNull::new(unsafe { node.as_ref() }.next_sibling.load(Ordering::Relaxed));
            count += 1;
        }
        count
    }
}

// SAFETY: the groups on the list belong to it alone but for walkers, which share nothing but atomics
// with it.
unsafe impl Send for Retired {}

/// Making and freeing groups.
pub(crate) struct Groups;

impl Groups {
    /// A group without VMAs and with no holder; below `parent`, if there is one. The caller lets a
    /// VMA hold it, or frees it by [`Groups::release`] after one [`AnonGroup::hold`].
    pub(crate) fn create<P: Platform>(
        memory: &Memory<P>,
        parent: Option<&AnonGroup>,
    ) -> Option<NonNull<AnonGroup>> {
        let null = || AtomicPtr::new(ptr::null_mut());
        let root = parent.map_or(ptr::null_mut(), |parent| {
            ptr::from_ref(parent.follow(&parent.root).unwrap_or(parent)).cast_mut()
        });
        let group = AnonGroup {
            root: AtomicPtr::new(root),
            parent: AtomicPtr::new(parent.map_or(ptr::null_mut(), |p| ptr::from_ref(p).cast_mut())),
            first_child: null(),
            next_sibling: null(),
            previous_sibling: null(),
            vmas: VmaList::new(Membership::Group),
            holders: AtomicU32::new(0),
            depth: AtomicU32::new(parent.map_or(0, |parent| parent.depth() + 1)),
            gate: Gate::new(),
        };
        let node = memory.groups.allocate(&memory.frames, &memory.platform, group)?;
        if let Some(parent) = parent {
            parent.hold();
            // SAFETY: the group is fresh from the slab, and nobody frees it before it was held.
            let group = unsafe { node.as_ref() };
            parent.family_gate().alone(&memory.platform, || {
                let first = parent.first_child.load(Ordering::Relaxed);
                group.next_sibling.store(first, Ordering::Relaxed);
                if let Some(first) = parent.follow(&parent.first_child) {
                    first.previous_sibling.store(node.as_ptr(), Ordering::Relaxed);
                }
                parent.first_child.store(node.as_ptr(), Ordering::Relaxed);
            });
        }
        Some(node)
    }

    /// Frees a group that was created and not held since.
    pub(crate) fn discard<P: Platform>(memory: &Memory<P>, node: NonNull<AnonGroup>) {
        // SAFETY: fresh from `create`; nobody else knows it.
        unsafe { node.as_ref() }.hold();
        Self::release(memory, node);
    }

    /// Frees what was contracted. A grace period has passed since the last folio that named one of
    /// the groups was counted as mapped.
    pub(crate) fn free_retired<P: Platform>(memory: &Memory<P>, mut retired: Retired) {
        while let Some(node) = retired.pop() {
            // SAFETY: it came from this slab, stands in no tree, and was frozen, so that no walker
            // holds it; those that saw it named have left (the caller's promise).
            unsafe { memory.groups.free(&memory.frames, &memory.platform, node) };
        }
    }

    /// One VMA or walker less; frees the group with the last, and then perhaps those above it. No VMA that
    /// is still in the group's list calls this, and no walker may still know the group: a grace
    /// period has passed since the VMA left the list.
    pub(crate) fn release<P: Platform>(memory: &Memory<P>, node: NonNull<AnonGroup>) {
        let mut next = Some(node);
        while let Some(node) = next.take() {
            // SAFETY: the caller's holder, or the child's below, is one of those counted, so the
            // group lives until it is taken away here.
            let group = unsafe { node.as_ref() };
            if group.holders.fetch_sub(1, Ordering::AcqRel) != 1 {
                return;
            }
            if let Some(parent) = group.parent() {
                parent.family_gate().alone(&memory.platform, || {
                    let after = group.next_sibling.load(Ordering::Relaxed);
                    let before = group.previous_sibling.load(Ordering::Relaxed);
                    match group.follow(&group.previous_sibling) {
                        Some(before) => before.next_sibling.store(after, Ordering::Relaxed),
                        None => parent.first_child.store(after, Ordering::Relaxed),
                    }
                    if let Some(after) = group.follow(&group.next_sibling) {
                        after.previous_sibling.store(before, Ordering::Relaxed);
                    }
                });
                next = Some(NonNull::from(parent));
            }
            debug_assert!(
                group.vmas.is_empty() && group.first_child.load(Ordering::Relaxed).is_null()
            );
            // SAFETY: it came from this slab; nobody holds it, so no VMA and no child names it, and
            // walkers that found it through a folio have left (the caller's promise).
            unsafe { memory.groups.free(&memory.frames, &memory.platform, node) };
        }
    }
}
