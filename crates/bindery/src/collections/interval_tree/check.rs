//! Verification of an interval tree.

use core::ptr;
use core::sync::atomic::Ordering::Relaxed;

use super::{Asked, Interval, IntervalTree, LEFT, Member, RIGHT};

impl<T, M: Member<T>> IntervalTree<T, M> {
    /// Whether order, balance and what each node knows of its subtree are what they should be.
    /// Looks at every node: for tests and the auditor.
    pub(crate) fn check(&self) -> bool {
        let mut last = None;
        let sound = self.iter(Asked::ALL).all(|node| {
            let children = [LEFT, RIGHT].map(|side| self.child(node, side));
            let linked = children
                .into_iter()
                .flatten()
                .all(|child| ptr::eq(M::links(child).parent.load(Relaxed), node));
            let heights = [LEFT, RIGHT].map(|side| self.height(node, side));
            let place = Self::place(node);
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
        // A walk that met every node of a tree, whatever they know, has met as many as there are.
        sound && self.iter(Asked::ALL).count() == self.count_below(self.node(&self.root))
    }

    /// How many nodes there are from `top` down, by the links alone.
    fn count_below(&self, top: Option<&T>) -> usize {
        let (mut count, mut at) = (0, top);
        while let Some(node) = at {
            count += 1;
            let down = [LEFT, RIGHT].into_iter().find_map(|side| self.child(node, side));
            at = down.or_else(|| {
                // Up to the next entry that was not met.
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
