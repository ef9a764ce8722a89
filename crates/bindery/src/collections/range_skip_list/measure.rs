//! The summary in each link: the widest gap below the link. Also bounds the number of links below a
//! link.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use super::{HEIGHT, Index, Indexed, LINKS_BENEATH, LinkTarget};

impl<T: Indexed> Index<T> {
    /// The widest gap below the link of `place` at `level`.
    pub(crate) fn widest(&self, place: LinkTarget<T>, level: usize) -> u64 {
        let links = self.links(place);
        match level.checked_sub(1) {
            Some(above) => links.widest[above].load(Ordering::Relaxed),
            None => self.start(links.next(0)).saturating_sub(self.end(place)),
        }
    }

    /// Measures the links of `path` and the links of `node` again, from the bottom up. The number
    /// and the targets of the links may have changed on the levels below `relinked`.
    ///
    /// Ends at the first level, not below `relinked`, on which no gap has changed. The links above it
    /// depend only on the gaps and on the number of the links of that level.
    pub(super) fn measure_path(
        &self,
        path: &[LinkTarget<T>; HEIGHT],
        node: Option<NonNull<T>>,
        relinked: usize,
    ) {
        let height = node.map_or(0, |node| self.node(node).links().height());
        for (place, level) in path[1..self.levels()].iter().zip(1..) {
            let mut has_changed = self.measure(*place, level);
            if level < height {
                has_changed |= self.measure(node, level);
            }
            if !has_changed && level >= relinked {
                break;
            }
        }
    }

    /// Stores the widest gap below the link of `place` at `level`, above 0, from the links one
    /// level below it. If that level has too many links there, the tower in their middle grows
    /// first. Returns whether a gap or a link of `level` has changed.
    fn measure(&self, place: LinkTarget<T>, level: usize) -> bool {
        let links = self.links(place);
        let until = links.next(level);
        let mut widest = self.widest(place, level - 1);
        let mut at = links.next(level - 1);
        let mut beneath = 1;
        while at != until {
            beneath += 1;
            widest = u64::max(widest, self.widest(at, level - 1));
            at = self.links(at).next(level - 1);
        }
        if beneath > LINKS_BENEATH {
            self.grow(place, level);
            return true;
        }
        let stored = &links.widest[level - 1];
        let has_changed = stored.load(Ordering::Relaxed) != widest;
        if has_changed {
            stored.store(widest, Ordering::Relaxed);
        }
        has_changed
    }

    /// Raises to `level` a tower in the middle of the links below the link of `place`, whose number
    /// exceeds [`LINKS_BENEATH`].
    #[cold]
    fn grow(&self, place: LinkTarget<T>, level: usize) {
        let middle = (0..LINKS_BENEATH / 2)
            .try_fold(place, |at, _| self.links(at).next(level - 1).map(Some));
        let Some(Some(node)) = middle else { return };
        let (links, before) = (self.links(Some(node)), self.links(place));
        debug_assert_eq!(links.height(), level);
        links.set_next(level, before.next(level));
        before.set_next(level, Some(node));
        links.height.store(level as u8 + 1, Ordering::Relaxed);
        // A half may still be too long if a tall tower was removed.
        self.measure(place, level);
        self.measure(Some(node), level);
    }

    /// Writer: verifies order, count, towers and gaps by reading every node. For tests and the
    /// auditor.
    pub(crate) fn check(&self) -> bool {
        let ordered = self.iter().all(|node| {
            let node = self.node(node);
            let next = self.next(node);
            let bounded = (1..=self.levels()).contains(&node.links().height());
            bounded && node.start() < node.end() && node.end() <= self.start(next)
        });
        ordered
            && self.iter().count() == self.len()
            && (1..self.levels()).all(|l| self.check_level(l))
    }

    /// Whether `level` links exactly the towers that reach it, with the correct gaps.
    fn check_level(&self, level: usize) -> bool {
        let (mut tower, mut place, mut widest, mut beneath) = (None, None, 0, 0);
        loop {
            widest = u64::max(widest, self.widest(place, 0));
            place = self.links(place).next(0);
            beneath +=
                usize::from(place.is_none_or(|node| self.links(Some(node)).height() >= level));
            if place.is_none_or(|node| self.node(node).links().height() > level) {
                let linked = self.links(tower).next(level) == place && beneath <= LINKS_BENEATH;
                if !linked || self.widest(tower, level) != widest {
                    return false;
                }
                (tower, widest, beneath) = (place, 0, 0);
            }
            if place.is_none() {
                return true;
            }
        }
    }
}
