//! Disjoint ranges by address: the VMAs of an address space or the areas of a kernel map, in a skip
//! list that faults read without a lock.
//!
//! # The protocol
//!
//! **One writer.** A thread that changes the index, or needs an exact result, holds the *writer
//! lock*: the address space's mutex. **Any number of readers.** [`Index::find_at_or_before`] takes
//! no lock and runs in a read section. The index owns no memory: a node contains its own
//! [`SkipLinks`] and may be freed or reinserted only a grace period after [`Index::remove`].
//!
//! A tower of height h is in levels 0 to h - 1. Three towers in four have height 1, and level 0
//! contains every node in ascending order. A link of level l > 0 also records the widest gap
//! beneath it, for the writer's search for free addresses (`.` is free, `#` is a node):
//!
//! ```text
//!          0x0         0x1000 0x3000      0x4000 0x6000           0xa000
//!          |...........|######|...........|######|................|######|......
//! level 2  head ------------------------ 0x4000 ----------------> C --------> end
//! level 1  head - 0x1000 -> A ---------- 0x4000 ----------------> C --------> end
//! level 0  head - 0x1000 -> A - 0x1000 -> B ------- 0x4000 -----> C --------> end
//! ```
//!
//! # Why a search is short
//!
//! The heights are random, so a link spans four links of the level below on average, regardless of
//! the order of insertions and removals. Randomness alone is no protection against a program that
//! chooses the removed nodes. A program may learn which of its towers are tall, from the time of
//! its faults or from the seed. If it unmaps these, only low towers remain. So below the top level,
//! a link never spans more than [`LINKS_BENEATH`] links. The writer visits all these links when it
//! measures the gap after each change. If it finds more, it raises the middle tower by a level.
//!
//! # Why a reader never loops and never loses the list
//!
//! Consider all nodes that were ever inserted in one order, each between the two neighbors that it
//! had at its insertion. Nodes never overtake each other (a writer that moves a bound in place
//! preserves the order), so this order only gains members. Every link ever written, in a linked or
//! removed node, leads from a node to a later node. A reader only steps along links or down a
//! tower, so it visits no node twice. Its search terminates, because no node is freed or reinserted
//! while it reads. The interleavings behind the rules:
//!
//! *A node is complete before it is reachable* (its own links are written first, and each link to
//! it is a Release store that pairs with the reader's Acquire load). Otherwise:
//! 1. The writer links N after A, and intends to fill in N's links afterwards.
//! 2. A reader steps from A to N and finds no successor: it misses the rest of the list after N.
//!
//! *Links appear from the bottom and vanish from the top.* A reader that reached N on level l
//! continues on levels l and below, where N is still linked or already linked. So a tower may grow
//! while it is linked.
//!
//! *A removed node keeps its forward links:*
//! 1. A reader is on B.
//! 2. The writer unlinks B: A leads to C.
//! 3. The reader follows B's link to C, as if it had come from A. If the link had been cleared, the
//!    reader would have missed C and all later nodes.
//!
//! *A removed node is not reinserted within a grace period.* Otherwise:
//! 1. A reader that searches for C is on A.
//! 2. The writer removes A and reinserts it after C.
//! 3. The reader reads A's new link and has passed C without seeing it. If A were repeatedly
//!    reinserted farther ahead, the reader would walk forever.
//!
//! *Unlinking also stores with Release:*
//! 1. One CPU inserts C.
//! 2. Another removes B, so that A leads to C.
//! 3. A reader reaches C only through the second store, and must see the contents of C that the
//!    first CPU wrote.
//!
//! A fault relies on this consequence: **a node N that is linked when the look-up begins, remains
//! linked, and does not change its bounds is always found.** Every node on the path was linked at
//! some moment while N was linked. At that moment it was before N, so its links led to N or to an
//! earlier node, or past N to a node that starts above the address, where the reader descends a
//! level instead. A node that is inserted, removed or moved during the look-up may be missed, and a
//! found node may be unlinked a moment later. So the caller checks under the VMA's own lock whether
//! the VMA is still linked and covers the address, and otherwise acquires the mutex.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod gap_search;
mod measure;

use core::iter;
use core::ops::Range;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use super::heights::Heights;
use gap_search::GapRequest;
pub(crate) use gap_search::GapShape;

/// The height of the tallest tower. One node in four reaches each further level, which keeps
/// searches logarithmic up to some 4^9 = 262,144 nodes: four times Linux's limit of mappings. A
/// million nodes have about 15 towers on the top level, which is searched linearly.
pub(crate) const HEIGHT: usize = 9;

/// The maximum number of links below one link, on the next lower level; four on average. If a
/// change leaves more, the tower in their middle grows ([`Index::measure`]).
const LINKS_BENEATH: usize = 32;

/// The node's part of the index, embedded in the node. The fields of the lowest levels come first,
/// so that the writer touches only the beginning of most nodes.
#[repr(C)]
pub(crate) struct SkipLinks<T> {
    /// The number of levels that link this node. For the head, the number of levels that ever
    /// linked any node, at least two, so that the auditor always has a stored gap to compare.
    /// Readers begin at the highest of these levels. A reader that sees an outdated, lower number
    /// finds the same node, because each level contains all nodes of the levels above it.
    height: AtomicU8,
    /// The next tower on each level; null at the end. Unused above the height.
    next: [AtomicPtr<T>; HEIGHT],
    /// The widest gap below the link of level 1, 2, and so on. Only the writer reads these gaps.
    /// The gap at level 0 is not stored, because it follows from the bounds.
    widest: [AtomicU64; HEIGHT - 1],
}

impl<T> SkipLinks<T> {
    /// The links of a node that is in no index.
    pub(crate) const fn new() -> Self {
        Self {
            height: AtomicU8::new(0),
            next: [const { AtomicPtr::new(ptr::null_mut()) }; HEIGHT],
            // All zeroes, so the compiler clears the record in place, without a copy.
            widest: [const { AtomicU64::new(0) }; HEIGHT - 1],
        }
    }

    /// The links of the head of an empty index: the gap is the whole address space.
    const fn of_head() -> Self {
        Self {
            height: AtomicU8::new(2),
            widest: [const { AtomicU64::new(u64::MAX) }; HEIGHT - 1],
            ..Self::new()
        }
    }

    #[inline]
    fn next(&self, level: usize) -> Option<NonNull<T>> {
        NonNull::new(self.next[level].load(Ordering::Acquire))
    }

    fn set_next(&self, level: usize, next: Option<NonNull<T>>) {
        let next = next.map_or(ptr::null_mut(), NonNull::as_ptr);
        self.next[level].store(next, Ordering::Release);
    }

    fn height(&self) -> usize {
        usize::from(self.height.load(Ordering::Relaxed))
    }
}

/// A member of an [`Index`]: a range of addresses with links.
pub(crate) trait Indexed: Sized {
    /// The links inside this node, always the same links.
    fn links(&self) -> &SkipLinks<Self>;
    /// The first byte. Readers may read it while the writer changes it.
    fn start(&self) -> u64;
    /// The exclusive end.
    fn end(&self) -> u64;
}

/// The position of a search: a node, or `None` for the head, before the first node.
type LinkTarget<T> = Option<NonNull<T>>;

/// The position of a node in an [`Index`]; valid until any node is inserted or removed.
pub(crate) struct Spot<T> {
    /// On each level, the position whose link leads to the node or past the node.
    path: [LinkTarget<T>; HEIGHT],
}

/// Nodes by address: lookups without a lock, one writer, free addresses in logarithmic time.
///
/// The obligations of [`Index::insert`] make the use of the index sound; methods marked "writer"
/// require the writer lock for exact results.
///
/// Searches read the links of the head. Each change writes the subsequent fields: the gaps of the
/// head, which fill a line of 64 bytes, and the rest.
#[repr(C)]
pub(crate) struct Index<T: Indexed> {
    head: SkipLinks<T>,
    count: AtomicUsize,
    heights: Heights,
    /// The number of nodes read by all searches.
    #[cfg(any(test, feature = "measure"))]
    looked_at: AtomicU64,
}

impl<T: Indexed> Index<T> {
    /// The offset of the first word that each change writes.
    #[cfg(test)]
    pub(crate) const WRITTEN: usize = core::mem::offset_of!(Self, head.widest);

    /// An empty index. `key` determines the tower heights. Programs do not know the key, although
    /// searches are short in any case.
    pub(crate) const fn new(key: [u64; 2]) -> Self {
        Self {
            head: SkipLinks::of_head(),
            count: AtomicUsize::new(0),
            heights: Heights::new(key),
            #[cfg(any(test, feature = "measure"))]
            looked_at: AtomicU64::new(0),
        }
    }

    /// The number of nodes read by all searches so far.
    #[cfg(any(test, feature = "measure"))]
    pub(crate) fn looked_at(&self) -> u64 {
        self.looked_at.load(Ordering::Relaxed)
    }

    /// The node with the greatest start at or below `addr`, if any.
    ///
    /// Lock-free, in a read section; exact with the writer lock. Without the lock, the returned
    /// node may have been removed or moved, and a node that is being inserted, removed or moved may
    /// be missed: the caller validates the node under the VMA's lock and falls back to the mutex
    /// (see the module documentation).
    #[inline]
    pub(crate) fn find_at_or_before(&self, addr: u64) -> Option<NonNull<T>> {
        self.last(|node| node.start() <= addr)
    }

    /// Writer: the first node whose end is above `addr`.
    pub(crate) fn first_ending_after(&self, addr: u64) -> Option<NonNull<T>> {
        let before = self.last(|node| node.end() <= addr);
        self.links(before).next(0)
    }

    /// Writer: the node after `node`, which may have been removed.
    pub(crate) fn next(&self, node: &T) -> Option<NonNull<T>> {
        node.links().next(0)
    }

    /// Writer: the node before `node`.
    pub(crate) fn previous(&self, node: &T) -> Option<NonNull<T>> {
        let start = node.start();
        self.last(|other| other.start() < start)
    }

    /// The number of nodes in the index; exact for the writer.
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Writer: all nodes in ascending order. The caller may remove the node that it received last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NonNull<T>> {
        iter::successors(self.head.next(0), |node| self.next(self.node(*node)))
    }

    /// Writer: adds `node`. The starts of all nodes differ. Ends may overlap the next node while
    /// the writer is about to move them, until it calls [`Index::bounds_changed`].
    ///
    /// # Safety
    ///
    /// The caller promises, for this node and for this index as a whole:
    ///
    /// 1. It holds the writer lock.
    /// 2. The node is in no index, and a grace period has passed since it last was in an index.
    /// 3. The node is valid for shared access from all CPUs until a grace period has passed since
    ///    its removal, and its [`Indexed::links`] lie inside it.
    /// 4. While the index contains a node, its methods are called only in read sections or with the
    ///    writer lock held, and the nodes that they return are used no longer than that. A [`Spot`]
    ///    is used only while no node in it is freed.
    pub(crate) unsafe fn insert(&self, node: NonNull<T>) {
        let height = self.heights.draw();
        if height > self.levels() {
            self.head.height.store(height as u8, Ordering::Relaxed);
        }
        let path = self.path_to(self.node(node));
        let links = self.links(Some(node));
        links.height.store(height as u8, Ordering::Relaxed);
        for (level, place) in path.iter().enumerate().take(height) {
            let next = self.links(*place).next(level);
            debug_assert!(next != Some(node) && self.start(next) != self.node(node).start());
            links.set_next(level, next);
        }
        for (level, place) in path.iter().enumerate().take(height) {
            self.links(*place).set_next(level, Some(node));
        }
        self.count.store(self.len() + 1, Ordering::Relaxed);
        self.measure_path(&path, Some(node), height);
    }

    /// Writer: removes `node` and returns the pointer that was inserted, because `node` may be made
    /// from a reference, which must not be used to free it. The node's forward links are kept for
    /// readers that may be on it.
    ///
    /// # Safety
    ///
    /// The caller promises:
    ///
    /// 1. It holds the writer lock.
    /// 2. The node is in this index, and no node before it has the same start (the next one may: a
    ///    writer that merges may first lower the next node's start, then remove this one).
    /// 3. The node's start does not change, and the node is neither freed nor inserted anywhere,
    ///    until a grace period has passed.
    pub(crate) unsafe fn remove(&self, node: NonNull<T>) -> NonNull<T> {
        let path = self.path_to(self.node(node));
        let links = self.links(Some(node));
        let mut inserted = node;
        for level in (0..links.height()).rev() {
            let before = self.links(path[level]);
            debug_assert_eq!(before.next(level), Some(node));
            inserted = before.next(level).unwrap_or(node);
            before.set_next(level, links.next(level));
        }
        self.count.store(self.len() - 1, Ordering::Relaxed);
        self.measure_path(&path, None, links.height());
        inserted
    }

    /// Writer: the position of `node`.
    #[inline]
    pub(crate) fn spot(&self, node: &T) -> Spot<T> {
        Spot { path: self.path_to(node) }
    }

    /// Writer: the addresses between the neighbors of `node`, which is at `spot`: from the end of
    /// the previous node to the start of the next.
    pub(crate) fn between_neighbors(&self, spot: &Spot<T>, node: &T) -> Range<u64> {
        self.end(spot.path[0])..self.start(node.links().next(0))
    }

    /// Writer: updates the gaps after `node`'s start or end was changed in place, without passing a
    /// neighbor's. Gap searches are correct again after one call for each changed node.
    pub(crate) fn bounds_changed(&self, node: &T) {
        self.bounds_changed_at(&self.spot(node), node);
    }

    /// Writer: like [`Index::bounds_changed`], for a node with a known spot.
    pub(crate) fn bounds_changed_at(&self, spot: &Spot<T>, node: &T) {
        self.measure_path(&spot.path, Some(NonNull::from(node)), 0);
    }

    /// Writer: the highest address of the shape in `low..high` that no node overlaps.
    ///
    /// Logarithmic, times the number of gaps that are wide enough but badly aligned. A length of 0
    /// finds nothing.
    pub(crate) fn find_gap_top_down(
        &self,
        shape: GapShape,
        low: u64,
        mut high: u64,
    ) -> Option<u64> {
        // If the last candidate fails, only the gaps below it are left. This happens at most once
        // for each level, if a link leads across `low` or `high` and its widest gap lies outside,
        // and for each gap that is wide enough but badly aligned.
        loop {
            let wanted = GapRequest::new(shape, low, high)?;
            let place = self.last_candidate(&wanted);
            let next = self.links(place).next(0);
            let found = wanted.highest_in(self.end(place), self.start(next));
            if found.is_some() {
                return found;
            }
            high = self.node(place?).start();
        }
    }

    /// Writer: like [`Index::find_gap_top_down`], for the lowest address.
    pub(crate) fn find_gap_bottom_up(&self, shape: GapShape, low: u64, high: u64) -> Option<u64> {
        let wanted = GapRequest::new(shape, low, high)?;
        let mut place = None;
        let mut level = self.levels() - 1;
        while self.end(place) <= wanted.last {
            let next = self.links(place).next(level);
            if self.is_candidate(place, level, &wanted) {
                if level > 0 {
                    level -= 1;
                    continue;
                }
                let found = wanted.lowest_in(self.end(place), self.start(next));
                if found.is_some() {
                    return found;
                }
            }
            // No gap below this link: advance past the link and ascend the tower at its end.
            level = self.links(Some(next?)).height() - 1;
            place = next;
        }
        None
    }

    /// Writer: like [`Index::find_gap_bottom_up`], but only in the gap right after `node`. O(1).
    pub(crate) fn find_gap_after(&self, node: &T, shape: GapShape, high: u64) -> Option<u64> {
        let wanted = GapRequest::new(shape, node.end(), high)?;
        wanted.lowest_in(node.end(), self.start(node.links().next(0)))
    }

    /// The number of levels that a search must read.
    #[inline]
    fn levels(&self) -> usize {
        self.head.height().min(HEIGHT)
    }

    /// The last node that a search reaches; `passes` tells which nodes the search passes.
    #[inline]
    fn last(&self, passes: impl Fn(&T) -> bool) -> LinkTarget<T> {
        let mut place = None;
        let mut links = &self.head;
        for level in (0..self.levels()).rev() {
            while let Some(next) = links.next(level)
                && self.passes_over(next, &passes)
            {
                place = Some(next);
                links = self.node(next).links();
            }
        }
        place
    }

    #[inline]
    fn passes_over(&self, node: NonNull<T>, passes: &impl Fn(&T) -> bool) -> bool {
        #[cfg(any(test, feature = "measure"))]
        crate::stats::count_roughly(&self.looked_at, 1);
        passes(self.node(node))
    }

    /// On each level, the last position that a search reaches; `passes` tells which nodes the
    /// search passes.
    #[inline]
    fn path(&self, passes: impl Fn(&T) -> bool) -> [LinkTarget<T>; HEIGHT] {
        let mut path = [None; HEIGHT];
        let mut place = None;
        for level in (0..self.levels()).rev() {
            while let Some(next) = self.links(place).next(level)
                && self.passes_over(next, &passes)
            {
                place = Some(next);
            }
            path[level] = place;
        }
        path
    }

    /// On each level, the position whose link leads to `node` or leads (or would lead) past it.
    fn path_to(&self, node: &T) -> [LinkTarget<T>; HEIGHT] {
        let start = node.start();
        self.path(|other| other.start() < start)
    }

    /// The last position whose gap may match.
    fn last_candidate(&self, wanted: &GapRequest) -> LinkTarget<T> {
        let mut place = None;
        let mut until = None;
        for level in (0..self.levels()).rev() {
            let mut last = None;
            let mut at = place;
            while self.end(at) <= wanted.last {
                let next = self.links(at).next(level);
                if self.is_candidate(at, level, wanted) {
                    last = Some((at, next));
                }
                if next == until {
                    break;
                }
                at = next;
            }
            let Some(narrower) = last else { break };
            (place, until) = narrower;
        }
        place
    }

    /// Whether a gap below the link of `place` at `level` may be wide enough and within the bounds.
    /// The caller has checked the upper bound.
    fn is_candidate(&self, place: LinkTarget<T>, level: usize, wanted: &GapRequest) -> bool {
        self.widest(place, level) >= wanted.shape.len
            && self.start(self.links(place).next(level)) > wanted.low
    }

    #[inline]
    fn links(&self, place: LinkTarget<T>) -> &SkipLinks<T> {
        place.map_or(&self.head, |node| self.node(node).links())
    }

    /// The start of the gap after `position`.
    fn end(&self, place: LinkTarget<T>) -> u64 {
        place.map_or(0, |node| self.node(node).end())
    }

    /// The end of the gap before `next`, which is `None` at the end of the list.
    fn start(&self, next: Option<NonNull<T>>) -> u64 {
        next.map_or(u64::MAX, |node| self.node(node).start())
    }

    #[inline]
    fn node(&self, node: NonNull<T>) -> &T {
        // SAFETY: the pointer was read from a link, or was passed to `insert` or `remove`. Only
        // `insert` links nodes; its obligations 3 and 4 guarantee that linked nodes are valid for
        // shared access while any method runs.
        unsafe { node.as_ref() }
    }
}

#[cfg(test)]
mod tests;
