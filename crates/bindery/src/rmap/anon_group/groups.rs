//! Allocates anon groups, and frees those without holders.

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
    /// An anon group without VMAs and with no holder; below `parent`, if given. The caller adds a
    /// VMA as its holder, or frees it by [`Groups::release`] after one [`AnonGroup::hold`].
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
            // The root's children too: no anon group above them can be found dead.
            stamp: AtomicU64::new(parent.map_or(0, AnonGroup::stamp)),
            holders: AtomicU32::new(0),
            lock: TreeLock::new(),
            node: null(),
        };
        let node = memory.slab::<AnonGroup>().allocate(&memory.frames, group)?;
        // SAFETY: the anon group is fresh from the slab, and is not freed before it was held.
        unsafe { node.as_ref() }.node.store(node.as_ptr(), Ordering::Relaxed);
        if let Some(parent) = parent {
            parent.hold();
            // SAFETY: the anon group is fresh from the slab, and is not freed before it was held.
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

    /// Like [`Groups::release`], for a caller that has nothing else to be freed.
    ///
    /// # Safety
    /// 1. As of [`Groups::release`].
    pub(in crate::rmap) unsafe fn release_now<P: Platform>(
        memory: &Memory<P>,
        node: NonNull<AnonGroup>,
    ) {
        let mut groups = Chain::default();
        // SAFETY: 1. the caller's obligation 1.
        unsafe { Self::release(memory, node, &mut groups) };
        Batch::default().with(groups).free_after_readers(memory);
    }

    /// Drops a VMA or walker. With the last holder, the anon group leaves the tree, and perhaps
    /// those above it. They are added to `unheld`, and are freed after their readers. A VMA calls
    /// this when it is out of the anon group's tree and its pages are counted down. So a thread in
    /// a read section that sees a mapped folio name the anon group finds a group that was not
    /// freed.
    ///
    /// # Safety
    /// 1. The caller, or a VMA of its, is one of the holders counted, and gives that up.
    pub(crate) unsafe fn release<P: Platform>(
        memory: &Memory<P>,
        node: NonNull<AnonGroup>,
        unheld: &mut Chain<AnonGroup>,
    ) {
        let mut next = Some(node);
        while let Some(node) = next.take() {
            // SAFETY: the holder (obligation 1), or the child below, is one of those counted, so
            // the anon group lives until that holder is dropped here.
            let group = unsafe { node.as_ref() };
            if !group.is_childless() && group.vmas.is_empty() {
                // A guess, for threads that wait for dead groups: it may have been dead before.
                group.tick();
            }
            if group.holders.fetch_sub(1, Ordering::AcqRel) != 1 {
                return;
            }
            // SAFETY: 1. this group still counts as a holder of its parent, which is contracted
            // only if its one holder is a group with VMAs below.
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
            // SAFETY: 1. it has no holder, so that no other thread frees it; 2. it is in no list of
            // children any more.
            unsafe { unheld.push(node) };
        }
    }
}
