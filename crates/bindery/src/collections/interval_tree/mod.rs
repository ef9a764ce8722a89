//! Intervals in a balanced tree: finds all that overlap a range, in logarithmic time.
//!
//! The tree is intrusive: a node has its own [`Links`], so adding one allocates nothing and cannot
//! fail. It is an AVL tree, so its height depends only on the number of nodes, and no program can
//! choose it.
//!
//! # Order and stamps
//! The tree has a clock. A node that is added or [renewed](IntervalTree::renew) gets the next tick
//! as its *stamp*. Nodes are ordered by `(first index, stamp)`, which differs for any two of them.
//! So a walk may remember its place as that pair, release the tree, and continue from there later,
//! whatever happens to the node.
//!
//! Each node stores a summary of the subtree below it: its height, the greatest index that any of
//! its intervals reaches, and the greatest stamp. The second prunes intervals that end before a
//! range, the third those older than a walk asks for:
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

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

/// Bits of [`Links::own`] that hold the height. The other 56 hold the stamp: with one tick each
/// nanosecond they last for two years, at the rate of system calls a thousand times longer.
const HEIGHT_BITS: u32 = 8;

/// A node's part of a tree, embedded in the node. The tree's lock guards it.
pub(crate) struct Links<T> {
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

impl<T> Links<T> {
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

/// The indexes that a node spans; the first is not above the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Interval {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// The linking of nodes of type `T` in one kind of tree.
pub(crate) trait Member<T> {
    /// The node's links in such a tree, always the same ones.
    fn links(node: &T) -> &Links<T>;
    /// The node's interval.
    fn interval(node: &T) -> Interval;
}

/// A node's place in the order.
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
    /// Nodes after this place, if given.
    pub(crate) after: Option<IntervalPlace>,
}

impl Asked {
    /// All nodes.
    pub(crate) const ALL: Self = Self { first: 0, last: u64::MAX, since: 0, after: None };
}

/// Intervals by index. The owner of the tree has a lock for it: the methods that change the tree
/// demand it exclusively, and look-ups ([`IntervalTree::locked`]) shared.
pub(crate) struct IntervalTree<T, M> {
    root: AtomicPtr<T>,
    /// The last stamp.
    clock: AtomicU64,
    /// The number of links that all calls have followed.
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

    /// Whether no node is in the tree.
    pub(crate) fn is_empty(&self) -> bool {
        self.root.load(Relaxed).is_null()
    }

    /// The number of links that all calls have followed so far: their cost.
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
    /// 3. As long as it is in the tree, its interval changes only with the lock held exclusively,
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

    /// Gives `node`, whose interval may have changed, a new stamp and the corresponding place.
    /// O(log n); for a single node a few steps.
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
    /// 1. As long as the result and the nodes that it returns are used, the caller holds the lock,
    ///    or the tree cannot change for another reason. A caller that holds the lock exclusively
    ///    may change the tree between two look-ups.
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

/// A tree that does not change. Having one tells you:
///
/// - its links lead to nodes that stay in the tree and are valid for `'t`;
/// - their intervals stay as they are.
pub(crate) struct LockedTree<'t, T, M> {
    tree: &'t IntervalTree<T, M>,
}

impl<T, M> Clone for LockedTree<'_, T, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, M> Copy for LockedTree<'_, T, M> {}

impl<'t, T, M: Member<T>> LockedTree<'t, T, M> {
    /// The last stamp ([`IntervalTree::now`]).
    pub(crate) fn now(self) -> u64 {
        self.tree.now()
    }

    /// The first node that matches. O(log n), and O(log n) for each node with a matching stamp
    /// whose interval is elsewhere.
    pub(crate) fn first(self, asked: &Asked) -> Option<&'t T> {
        let may_hold = |node: &&T| {
            let links = M::links(node);
            links.reach.load(Relaxed) >= asked.first && links.newest.load(Relaxed) > asked.since
        };
        let after =
            |node: &T| asked.after.is_none_or(|place| IntervalTree::<T, M>::place(node) > place);
        let mut at = self.node(&self.tree.root).filter(may_hold)?;
        loop {
            // If a node is not after the place, no node before it is.
            while after(at)
                && let Some(left) = self.child(at, LEFT).filter(may_hold)
            {
                at = left;
            }
            loop {
                let Interval { first, last } = M::interval(at);
                if first > asked.last {
                    return None;
                }
                let newer = M::links(at).stamp() > asked.since;
                if newer && last >= asked.first && after(at) {
                    return Some(at);
                }
                if let Some(next) = self.child(at, RIGHT).filter(may_hold) {
                    at = next;
                    break;
                }
                at = self.parent_after(at)?;
            }
        }
    }

    /// The nodes that match, in order. O(log n) for each.
    pub(crate) fn iter(self, asked: Asked) -> impl Iterator<Item = &'t T> {
        let mut asked = asked;
        core::iter::from_fn(move || {
            let node = self.first(&asked)?;
            asked.after = Some(IntervalTree::<T, M>::place(node));
            Some(node)
        })
    }

    /// The node at `place`, if it exists. O(log n).
    pub(crate) fn at(self, place: IntervalPlace) -> Option<&'t T> {
        let mut at = self.node(&self.tree.root);
        while let Some(node) = at {
            let here = IntervalTree::<T, M>::place(node);
            if here == place {
                break;
            }
            at = self.child(node, usize::from(here < place));
        }
        at
    }

    /// Whether `node` is in the tree. O(log n).
    pub(crate) fn contains(self, node: &T) -> bool {
        self.at(IntervalTree::<T, M>::place(node)).is_some_and(|found| ptr::eq(found, node))
    }

    /// Makes `node` the only one.
    fn alone(self, node: &T, stamp: u64) {
        let links = M::links(node);
        for link in &links.children {
            link.store(ptr::null_mut(), Relaxed);
        }
        links.parent.store(ptr::null_mut(), Relaxed);
        links.own.store(stamp << HEIGHT_BITS | 1, Relaxed);
        links.reach.store(M::interval(node).last, Relaxed);
        links.newest.store(stamp, Relaxed);
        self.tree.root.store(pointer(node), Relaxed);
    }

    /// Links `node`, which is in no tree.
    fn put(self, node: &T, stamp: u64) {
        match self.node(&self.tree.root) {
            None => self.alone(node, stamp),
            Some(root) => self.put_below(root, node, stamp),
        }
    }

    /// Separate from the common case, so that it is not inlined with it.
    #[inline(never)]
    fn put_below(self, root: &'t T, node: &T, stamp: u64) {
        let links = M::links(node);
        for link in &links.children {
            link.store(ptr::null_mut(), Relaxed);
        }
        links.own.store(stamp << HEIGHT_BITS, Relaxed);
        let place = IntervalTree::<T, M>::place(node);
        let mut above = root;
        let side = loop {
            let side = usize::from(IntervalTree::<T, M>::place(above) < place);
            match self.child(above, side) {
                Some(below) => above = below,
                None => break side,
            }
        };
        links.parent.store(pointer(above), Relaxed);
        links.set_summary(self.measured(node));
        M::links(above).children[side].store(pointer(node), Relaxed);
        self.mend(Some(above));
    }

    fn take(self, node: &T) {
        let links = M::links(node);
        let (left, right) = (self.child(node, LEFT), self.child(node, RIGHT));
        let (Some(left), Some(right)) = (left, right) else {
            let parent = self.node(&links.parent);
            self.replace(node, left.or(right));
            self.mend(parent);
            return;
        };
        // The next node in the order replaces it; that one has no left child.
        let mut next = right;
        while let Some(left) = self.child(next, LEFT) {
            next = left;
        }
        let mut lowest = next;
        if !ptr::eq(next, right) {
            lowest = self.node(&M::links(next).parent).unwrap_or(right);
            self.replace(next, self.child(next, RIGHT));
            self.adopt(next, RIGHT, Some(right));
        }
        self.adopt(next, LEFT, Some(left));
        self.replace(node, Some(next));
        // The summary that the nodes above know. They are measured again if it no longer holds.
        M::links(next).set_summary(links.summary());
        self.mend(Some(lowest));
        self.mend(Some(next));
    }

    /// Balances and measures from `at` upward, until a node's summary does not change.
    fn mend(self, mut at: Option<&'t T>) {
        while let Some(node) = at {
            let before = M::links(node).summary();
            let top = self.balance(node);
            if M::links(top).summary() == before {
                return;
            }
            at = self.node(&M::links(top).parent);
        }
    }

    /// Measures `node`, after a rotation if one of its subtrees is higher by two. Returns the node
    /// in its place.
    fn balance(self, node: &'t T) -> &'t T {
        let (left, right) = (self.height(node, LEFT), self.height(node, RIGHT));
        if left.abs_diff(right) > 1 {
            let high = usize::from(right > left);
            if let Some(child) = self.child(node, high) {
                if self.height(child, 1 - high) > self.height(child, high) {
                    self.rotate(child, 1 - high);
                }
                return self.rotate(node, high);
            }
        }
        M::links(node).set_summary(self.measured(node));
        node
    }

    /// Moves the child of `node` at `side` to the place of `node`, and `node` below it. Returns the
    /// child.
    ///
    /// ```text
    ///      node                child
    ///      /  \                /   \
    ///     a   child    -->   node   c        side: RIGHT
    ///         /  \           /  \
    ///        b    c         a    b
    /// ```
    fn rotate(self, node: &'t T, side: usize) -> &'t T {
        let Some(child) = self.child(node, side) else { return node };
        self.replace(node, Some(child));
        self.adopt(node, side, self.child(child, 1 - side));
        self.adopt(child, 1 - side, Some(node));
        M::links(node).set_summary(self.measured(node));
        M::links(child).set_summary(self.measured(child));
        child
    }

    /// Makes the parent of `node` link `by` instead.
    fn replace(self, node: &T, by: Option<&T>) {
        match self.node(&M::links(node).parent) {
            Some(parent) => {
                let right = self.child(parent, RIGHT).is_some_and(|child| ptr::eq(child, node));
                self.adopt(parent, usize::from(right), by);
            }
            None => {
                self.tree.root.store(by.map_or(ptr::null_mut(), pointer), Relaxed);
                if let Some(by) = by {
                    M::links(by).parent.store(ptr::null_mut(), Relaxed);
                }
            }
        }
    }

    /// Makes `child` the child of `node` at `side`.
    fn adopt(self, node: &T, side: usize, child: Option<&T>) {
        M::links(node).children[side].store(child.map_or(ptr::null_mut(), pointer), Relaxed);
        if let Some(child) = child {
            M::links(child).parent.store(pointer(node), Relaxed);
        }
    }

    /// The summary of `node`, from those of its children.
    fn measured(self, node: &T) -> Summary {
        let own =
            Summary { height: 0, reach: M::interval(node).last, newest: M::links(node).stamp() };
        let sides = [LEFT, RIGHT].map(|side| self.child(node, side));
        let all = sides.into_iter().flatten().fold(own, |all, child| {
            let below = M::links(child).summary();
            Summary {
                height: all.height.max(below.height),
                reach: all.reach.max(below.reach),
                newest: all.newest.max(below.newest),
            }
        });
        Summary { height: all.height + 1, ..all }
    }

    fn height(self, node: &T, side: usize) -> u64 {
        self.child(node, side).map_or(0, |child| M::links(child).height())
    }

    /// The next node above `node` that comes after it.
    fn parent_after(self, mut node: &'t T) -> Option<&'t T> {
        loop {
            let parent = self.node(&M::links(node).parent)?;
            if self.child(parent, LEFT).is_some_and(|left| ptr::eq(left, node)) {
                return Some(parent);
            }
            node = parent;
        }
    }

    fn child(self, node: &T, side: usize) -> Option<&'t T> {
        self.node(&M::links(node).children[side])
    }

    fn node(self, link: &AtomicPtr<T>) -> Option<&'t T> {
        #[cfg(any(test, feature = "measure"))]
        crate::stats::count_roughly(&self.tree.looked_at, 1);
        // SAFETY: only links of the tree are passed in. They point to nodes in it, which are valid
        // until they are removed (obligation 2 of `insert`), and none is removed as long as this
        // value lives (obligation 1 of `locked`).
        NonNull::new(link.load(Relaxed)).map(|node| unsafe { node.as_ref() })
    }
}

fn pointer<T>(node: &T) -> *mut T {
    ptr::from_ref(node).cast_mut()
}

#[cfg(test)]
mod tests;
