//! Intervals in a balanced tree, which finds all intervals that overlap a range in logarithmic
//! time.
//!
//! The tree is intrusive: a node contains its own [`IntervalLinks`], so an insertion allocates
//! nothing and cannot fail. It is an AVL tree, so its height is bounded by the number of nodes, and
//! no program can influence it.
//!
//! # Order and stamps
//! The tree has a clock. A node that is added or [renewed](IntervalTree::renew) gets the next tick
//! as its *stamp*. Nodes are ordered by `(first index, stamp)`, which is unique. So a walk may
//! record its place as that pair, release the tree, and continue from there later, even if the node
//! has changed or left the tree.
//!
//! Each node stores a summary of the subtree below it: its height, the greatest index in its
//! intervals, and the greatest stamp. The greatest index prunes intervals that end before a range;
//! the greatest stamp prunes intervals older than a walk requests:
//!
//! ```text
//!                    [4, 5]  reaches 19, newest 6
//!                   /      \
//!   [0, 19] reaches 19 [8, 9] reaches 12 asked for 13 to 14:
//!                          /      \                  only [0, 19] is looked at beneath the root
//!                   [6, 7] 7       [8, 12] 12
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod check;
mod locked;

use core::marker::PhantomData;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

pub(crate) use locked::LockedTree;

/// Bits of [`IntervalLinks::own`] that hold the height. The other 56 hold the stamp, which suffices
/// for two years at one tick each nanosecond, and for a thousand times longer at the rate of system
/// calls.
const HEIGHT_BITS: u32 = 8;

/// A node's links in a tree, embedded in the node. The tree's lock guards them.
pub(crate) struct IntervalLinks<T> {
    /// The left and the right subtree.
    children: [AtomicPtr<T>; 2],
    parent: AtomicPtr<T>,
    /// The greatest index in the subtree.
    reach: AtomicU64,
    /// The greatest stamp in the subtree.
    newest: AtomicU64,
    /// The node's own stamp, and the height of the subtree, at least 1 in a tree.
    own: AtomicU64,
}

impl<T> IntervalLinks<T> {
    /// The links of a node that is in no tree.
    pub(crate) const fn new() -> Self {
        Self {
            children: [const { AtomicPtr::new(ptr::null_mut()) }; 2],
            parent: AtomicPtr::new(ptr::null_mut()),
            reach: AtomicU64::new(0),
            newest: AtomicU64::new(0),
            own: AtomicU64::new(0),
        }
    }

    fn stamp(&self) -> u64 {
        self.own.load(Relaxed) >> HEIGHT_BITS
    }

    fn height(&self) -> u64 {
        self.own.load(Relaxed) & ((1 << HEIGHT_BITS) - 1)
    }

    fn summary(&self) -> Summary {
        Summary {
            height: self.height(),
            reach: self.reach.load(Relaxed),
            newest: self.newest.load(Relaxed),
        }
    }

    fn set_summary(&self, summary: Summary) {
        self.own.store(self.stamp() << HEIGHT_BITS | summary.height, Relaxed);
        self.reach.store(summary.reach, Relaxed);
        self.newest.store(summary.newest, Relaxed);
    }
}

/// A node's summary of its subtree.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Summary {
    height: u64,
    reach: u64,
    newest: u64,
}

/// The indexes that a node spans; `first` is at most `last`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Interval {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// Access to the links and interval of nodes of type `T`, for one kind of tree.
pub(crate) trait Member<T> {
    /// The node's links in such a tree, always the same links.
    fn links(node: &T) -> &IntervalLinks<T>;
    /// The node's interval.
    fn interval(node: &T) -> Interval;
}

/// A node's position in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct IntervalPlace {
    pub(crate) first: u64,
    pub(crate) stamp: u64,
}

/// The criteria of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    /// Intervals that contain at least one index from `first` to `last`.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// Stamps above this one.
    pub(crate) since: u64,
    /// Nodes after this position, if given.
    pub(crate) after: Option<IntervalPlace>,
}

impl Asked {
    /// All nodes.
    pub(crate) const ALL: Self = Self { first: 0, last: u64::MAX, since: 0, after: None };
}

/// Intervals by index. The owner of the tree provides a lock: the methods that change the tree
/// require it exclusively, and look-ups ([`IntervalTree::locked`]) shared.
pub(crate) struct IntervalTree<T, M> {
    root: AtomicPtr<T>,
    /// The last stamp.
    clock: AtomicU64,
    /// The number of links followed by all calls.
    #[cfg(any(test, feature = "measure"))]
    looked_at: AtomicU64,
    member: PhantomData<M>,
}

/// The left and the right child of a node.
const LEFT: usize = 0;
const RIGHT: usize = 1;

impl<T, M: Member<T>> IntervalTree<T, M> {
    /// A tree without nodes.
    pub(crate) const fn new() -> Self {
        Self {
            root: AtomicPtr::new(ptr::null_mut()),
            clock: AtomicU64::new(0),
            #[cfg(any(test, feature = "measure"))]
            looked_at: AtomicU64::new(0),
            member: PhantomData,
        }
    }

    /// Whether the tree has no node.
    pub(crate) fn is_empty(&self) -> bool {
        self.root.load(Relaxed).is_null()
    }

    /// The number of links followed by all calls so far: their cost.
    #[cfg(any(test, feature = "measure"))]
    pub(crate) fn looked_at(&self) -> u64 {
        self.looked_at.load(Relaxed)
    }

    /// The last stamp. Nodes added or renewed later have greater ones.
    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Relaxed)
    }

    /// The place of `node`, which is in the tree.
    pub(crate) fn place(node: &T) -> IntervalPlace {
        IntervalPlace { first: M::interval(node).first, stamp: M::links(node).stamp() }
    }

    /// Adds `node`, with a new stamp. O(log n).
    ///
    /// # Safety
    /// The caller promises:
    ///
    /// 1. It holds the lock exclusively.
    /// 2. The node is in no tree by these links, and valid for shared access until it is removed.
    /// 3. While the node is in the tree, its interval changes only with the lock held exclusively,
    ///    and [`IntervalTree::renew`] is called before the lock is released.
    pub(crate) unsafe fn insert(&self, node: &T) {
        let stamp = self.tick();
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.locked() }.put(node, stamp);
    }

    /// Removes `node`. O(log n).
    ///
    /// # Safety
    /// The caller promises:
    ///
    /// 1. It holds the lock exclusively.
    /// 2. The node is in this tree.
    pub(crate) unsafe fn remove(&self, node: &T) {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.locked() }.take(node);
    }

    /// Gives `node`, whose interval may have changed, a new stamp and position. O(log n), or a few
    /// steps if the tree has one node.
    ///
    /// # Safety
    /// As for [`IntervalTree::remove`].
    pub(crate) unsafe fn renew(&self, node: &T) {
        let stamp = self.tick();
        // SAFETY: 1. the caller's obligation 1.
        let tree = unsafe { self.locked() };
        if M::links(node).height() == 1 && ptr::eq(self.root.load(Relaxed), node) {
            tree.alone(node, stamp);
            return;
        }
        tree.take(node);
        tree.put(node, stamp);
    }

    /// The tree for look-ups.
    ///
    /// # Safety
    /// 1. While the result and the nodes that it returns are in use, the caller holds the lock or
    ///    otherwise prevents changes of the tree. A caller that holds the lock exclusively may
    ///    change the tree between two look-ups.
    #[inline]
    pub(crate) unsafe fn locked(&self) -> LockedTree<'_, T, M> {
        LockedTree { tree: self }
    }

    fn tick(&self) -> u64 {
        let stamp = self.now() + 1;
        self.clock.store(stamp, Relaxed);
        stamp
    }
}

fn pointer<T>(node: &T) -> *mut T {
    ptr::from_ref(node).cast_mut()
}

#[cfg(test)]
mod tests;
