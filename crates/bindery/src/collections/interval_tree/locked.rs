//! [`LockedTree`]: look-ups and the steps of a change in a tree that no other thread changes.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::{
    Asked, HEIGHT_BITS, Interval, IntervalPlace, IntervalTree, LEFT, Member, RIGHT, Summary,
    pointer,
};

/// A tree that does not change. While a value exists:
///
/// - the tree's links lead to nodes that remain in the tree and are valid for `'t`;
/// - the nodes' intervals do not change.
pub(crate) struct LockedTree<'t, T, M> {
    pub(super) tree: &'t IntervalTree<T, M>,
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

    /// The first node that matches. O(log n), plus O(log n) for each node with a matching stamp but
    /// a non-matching interval.
    pub(crate) fn first(self, asked: &Asked) -> Option<&'t T> {
        let may_hold = |node: &&T| {
            let links = M::links(node);
            links.reach.load(Relaxed) >= asked.first && links.newest.load(Relaxed) > asked.since
        };
        let after =
            |node: &T| asked.after.is_none_or(|place| IntervalTree::<T, M>::place(node) > place);
        let mut at = self.node(&self.tree.root).filter(may_hold)?;
        loop {
            // If a node is not after the place, no earlier node is.
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

    /// Makes `node` the only node.
    pub(super) fn alone(self, node: &T, stamp: u64) {
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
    pub(super) fn put(self, node: &T, stamp: u64) {
        match self.node(&self.tree.root) {
            None => self.alone(node, stamp),
            Some(root) => self.put_below(root, node, stamp),
        }
    }

    /// Separate from the common case to prevent inlining with it.
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

    pub(super) fn take(self, node: &T) {
        let links = M::links(node);
        let (left, right) = (self.child(node, LEFT), self.child(node, RIGHT));
        let (Some(left), Some(right)) = (left, right) else {
            let parent = self.node(&links.parent);
            self.replace(node, left.or(right));
            self.mend(parent);
            return;
        };
        // The next node in the order replaces the removed node; that next node has no left child.
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
        // The summary that is recorded in the nodes above. They are measured again if the summary
        // changes.
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
    /// that is now in its place.
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

    /// Moves the child of `node` at `side` to the place of `node`, and `node` below that child.
    /// Returns the child.
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

    /// The summary of `node`, computed from those of its children.
    pub(super) fn measured(self, node: &T) -> Summary {
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

    pub(super) fn height(self, node: &T, side: usize) -> u64 {
        self.child(node, side).map_or(0, |child| M::links(child).height())
    }

    /// The nearest node above `node` that follows it in the order.
    fn parent_after(self, mut node: &'t T) -> Option<&'t T> {
        loop {
            let parent = self.node(&M::links(node).parent)?;
            if self.child(parent, LEFT).is_some_and(|left| ptr::eq(left, node)) {
                return Some(parent);
            }
            node = parent;
        }
    }

    pub(super) fn child(self, node: &T, side: usize) -> Option<&'t T> {
        self.node(&M::links(node).children[side])
    }

    pub(super) fn node(self, link: &AtomicPtr<T>) -> Option<&'t T> {
        #[cfg(any(test, feature = "measure"))]
        crate::stats::count_roughly(&self.tree.looked_at, 1);
        // SAFETY: only links of the tree are passed. They point to nodes in the tree, which are
        // valid until they are removed (obligation 2 of `insert`), and no node is removed while
        // this value lives (obligation 1 of `locked`).
        NonNull::new(link.load(Relaxed)).map(|node| unsafe { node.as_ref() })
    }
}
