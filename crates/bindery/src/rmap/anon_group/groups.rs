//! Allocates anon groups and frees those without holders.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::Memory;
use crate::deferred::{Batch, Chain};
use crate::platform::Platform;
use crate::rmap::TreeLock;
use crate::rmap::trees::GroupTree;

use super::AnonGroup;

/// Allocates and frees anon groups.
pub(crate) struct Groups;

impl Groups {
    /// Creates an anon group without VMAs and holders, below `parent` if given. The caller adds a
    /// VMA as the group's holder, or calls [`AnonGroup::hold`] once and frees the group by
    /// [`Groups::release`].
    pub(crate) fn create<P: Platform>(
        memory: &Memory<P>,
        parent: Option<&AnonGroup>,
    ) -> Option<NonNull<AnonGroup>> {
        let null = || AtomicPtr::new(ptr::null_mut());
        let root = parent.map_or(ptr::null_mut(), |parent| parent.root().node().as_ptr());
        let group = AnonGroup {
            root: AtomicPtr::new(root),
            parent: AtomicPtr::new(parent.map_or(ptr::null_mut(), |p| p.node().as_ptr())),
            first_child: null(),
            next_sibling: null(),
            previous_sibling: null(),
            vmas: GroupTree::new(),
            new_parent: null(),
            // Correct for the root's children too, because no anon group above them can be found
            // dead.
            stamp: AtomicU64::new(parent.map_or(0, AnonGroup::stamp)),
            holders: AtomicU32::new(0),
            lock: TreeLock::new(),
            node: null(),
        };
        let node = memory.slab::<AnonGroup>().allocate(&memory.frames, group)?;
        // SAFETY: the anon group is fresh from the slab, and is not freed before it has been held.
        unsafe { node.as_ref() }.node.store(node.as_ptr(), Ordering::Relaxed);
        if let Some(parent) = parent {
            parent.hold();
            // SAFETY: the anon group is fresh from the slab, and is not freed before it has been
            // held.
            let group = unsafe { node.as_ref() };
            parent.family_lock().with_write(memory.platform(), || {
                let first = parent.first_child.load(Ordering::Relaxed);
                group.next_sibling.store(first, Ordering::Relaxed);
                // SAFETY: 1. the lock is held.
                if let Some(first) = unsafe { parent.follow(&parent.first_child) } {
                    first.previous_sibling.store(node.as_ptr(), Ordering::Relaxed);
                }
                parent.first_child.store(node.as_ptr(), Ordering::Relaxed);
            });
        }
        Some(node)
    }

    /// Like [`Groups::release`], for a caller that has no other groups to free.
    ///
    /// # Safety
    /// 1. As for [`Groups::release`].
    pub(in crate::rmap) unsafe fn release_now<P: Platform>(
        memory: &Memory<P>,
        node: NonNull<AnonGroup>,
    ) {
        let mut groups = Chain::default();
        // SAFETY: 1. the caller's obligation 1.
        unsafe { Self::release(memory, node, &mut groups) };
        Batch::default().with(groups).free_after_readers(memory);
    }

    /// Drops a VMA or walker as a holder. If it was the last holder, the anon group leaves the
    /// tree, perhaps along with groups above it. These groups are added to `unheld` and freed after
    /// a grace period. A VMA is dropped only after it has left the anon group's tree and its pages
    /// are counted down. So in a read section, the group that a mapped folio names as its owner has
    /// not been freed.
    ///
    /// # Safety
    /// 1. The caller, or a VMA of the caller's, is one of the counted holders and relinquishes its
    ///    hold.
    pub(crate) unsafe fn release<P: Platform>(
        memory: &Memory<P>,
        node: NonNull<AnonGroup>,
        unheld: &mut Chain<AnonGroup>,
    ) {
        let mut next = Some(node);
        while let Some(node) = next.take() {
            // SAFETY: the holder (obligation 1), or the child below, is counted, so the anon group
            // lives until that holder is dropped here.
            let group = unsafe { node.as_ref() };
            if !group.is_childless() && group.vmas.is_empty() {
                // An estimate, for threads that wait for dead groups: the group may have been dead
                // before.
                group.tick();
            }
            if group.holders.fetch_sub(1, Ordering::AcqRel) != 1 {
                return;
            }
            // SAFETY: 1. this group still counts as a holder of its parent, which is contracted
            // only if its only holder is a group with VMAs below.
            if let Some(parent) = unsafe { group.parent() } {
                parent.family_lock().with_write(memory.platform(), || {
                    let after = group.next_sibling.load(Ordering::Relaxed);
                    let before = group.previous_sibling.load(Ordering::Relaxed);
                    // SAFETY: 1. the lock is held.
                    match unsafe { group.follow(&group.previous_sibling) } {
                        Some(before) => before.next_sibling.store(after, Ordering::Relaxed),
                        None => parent.first_child.store(after, Ordering::Relaxed),
                    }
                    // SAFETY: 1. the lock is held.
                    if let Some(after) = unsafe { group.follow(&group.next_sibling) } {
                        after.previous_sibling.store(before, Ordering::Relaxed);
                    }
                });
                next = Some(parent.node());
            }
            debug_assert!(
                group.vmas.is_empty() && group.first_child.load(Ordering::Relaxed).is_null()
            );
            // SAFETY: 1. the group has no holder, so no other thread frees it; 2. it is in no list
            // of children.
            unsafe { unheld.push(node) };
        }
    }
}
