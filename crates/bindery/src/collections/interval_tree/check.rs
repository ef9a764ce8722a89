//! Verification of an interval tree.

use core::ptr;
use core::sync::atomic::Ordering::Relaxed;

use super::{Asked, Interval, IntervalTree, LEFT, LockedTree, Member, RIGHT};

impl<'t, T, M: Member<T>> LockedTree<'t, T, M> {
    /// Verifies order, balance and the summary of each subtree. Reads every node: for tests and the
    /// auditor.
    pub(crate) fn check(self) -> bool {
        let mut last = None;
        let sound = self.iter(Asked::ALL).all(|node| {
            let children = [LEFT, RIGHT].map(|side| self.child(node, side));
            let linked = children
                .into_iter()
                .flatten()
                .all(|child| ptr::eq(M::links(child).parent.load(Relaxed), node));
            let heights = [LEFT, RIGHT].map(|side| self.height(node, side));
            let place = IntervalTree::<T, M>::place(node);
            let rising = last.is_none_or(|last| last < place);
            last = Some(place);
            let Interval { first, last: end } = M::interval(node);
            rising
                && linked
                && first <= end
                && place.stamp <= self.now()
                && heights[0].abs_diff(heights[1]) <= 1
                && self.measured(node) == M::links(node).summary()
        });
        // An iteration that ignores the summaries must find the same number of nodes as a count
        // through the links.
        sound && self.iter(Asked::ALL).count() == self.count_below(self.node(&self.tree.root))
    }

    /// Counts the nodes in the subtree of `top`, following only the links.
    fn count_below(self, top: Option<&'t T>) -> usize {
        let (mut count, mut at) = (0, top);
        while let Some(node) = at {
            count += 1;
            let down = [LEFT, RIGHT].into_iter().find_map(|side| self.child(node, side));
            at = down.or_else(|| {
                // Ascends to the next node that was not visited.
                let mut below = node;
                loop {
                    let parent = self.node(&M::links(below).parent)?;
                    let other = self.child(parent, RIGHT).filter(|other| !ptr::eq(*other, below));
                    if other.is_some() {
                        return other;
                    }
                    below = parent;
                }
            });
        }
        count
    }
}
