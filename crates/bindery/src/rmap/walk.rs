//! Walks to all places where pages of an owner may be mapped.
//!
//! # Holds and passes
//! Walkers share the lock of a tree; changes of the tree hold it exclusively. A walk releases the
//! lock after [`HOLD`] entries or VMAs. It resumes from its [`IntervalPlace`], a position in the
//! tree's order and a page, even if the VMA there has changed or was removed. So the tree may
//! change during a walk, and pages may enter a VMA that the walk has passed. *Passes* handle this:
//!
//! - A pass begins with the current time of the tree's clock and visits the VMAs with stamps up to
//!   that time, in tree order.
//! - A thread that extends the pages that a VMA covers, or moves entries into the VMA, holds the
//!   lock exclusively and assigns a new stamp to the VMA ([`super::RmapGuard`]).
//! - The next pass visits the VMAs with later stamps. The walk ends after a pass with no newer VMA.
//!
//! Each pass terminates, because it visits no VMA that was renewed after the pass began. If a
//! program renews VMAs as fast as a walk visits them, pass number [`PASSES`] does not release the
//! lock. It visits the VMAs that were renewed during the pass before.
//!
//! # Why no page is missed
//! The guarantee covers each page that is mapped when the walk begins. If faults must also not map
//! new pages, the caller holds the object's invalidate lock or the folio's lock.
//!
//! *A move* takes entries from V to M. M is in the trees before the first entry moves, and each
//! hold of the lock in which entries arrive ends with a new stamp for M. An entry that moved before
//! the walk began is in M, whose stamp is not later than the first pass. An entry that moves later
//! is found in V, or else:
//! 1. The walk releases the lock before it has reached the entry in V.
//! 2. The entry moves to M, before or after the walk's place; M gets a stamp later than those of
//!    this pass.
//! 3. The walk passes V. The next pass visits M.
//!
//! A VMA that moves as a whole (`AddressSpace::slide`) acts as both V and M.
//!
//! *A split* adds the upper part, with a new stamp, before the lower part is shortened. The walk
//! visits the upper pages in the lower VMA before the split, in the upper VMA in the next pass, or
//! both.
//!
//! *A merge* extends the lower VMA over the upper one, renews it, and then removes the upper one.
//! If the walk was between the two VMAs, the next pass visits the lower one again.
//!
//! *A fork* copies entries of a VMA P into C, without the tree's lock. C is in the tree before the
//! copy, with the same interval and a later stamp. P is not renewed during the copy, because `fork`
//! holds the mutex. So C is visited after P, either later in the same pass or in a later pass. In
//! the reverse order:
//! 1. CPU A truncates an object and has found nothing in C.
//! 2. CPU B copies a page of P into C.
//! 3. CPU A unmaps the page from P and drops it. C still maps the page.
//!
//! A copy made after the walk has passed P contains only what the walk left in P.
//!
//! In a family of anon groups, a walk visits a group before the groups below it. The same guarantee
//! therefore holds if a group for C is added below a group that the walk has passed or is visiting.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PageRange, VirtAddr, VirtRange};
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::edit::Edit;
use crate::tlb::Gather;
use crate::vma::Vma;
use {
    super::anon_group::{AnonGroup, Groups},
    crate::folio::{Folio, FolioOwner, Owner},
    crate::table::ReadSection,
    core::ptr::NonNull,
};

use super::{TreeLock, TreeReadGuard};
use crate::collections::interval_tree::{Asked, IntervalPlace, IntervalTree, LockedTree, Member};

/// The number of entries and VMAs after which a walk releases a tree's lock.
pub(crate) const HOLD: u64 = 1024;
/// The number of the pass that does not release the lock.
const PASSES: u32 = 8;

/// The way in which a walk takes locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WalkLocking {
    /// It waits.
    Wait,
    /// It returns [`Busy`] instead of waiting: for a reclaimer, inside an allocation.
    Try,
}

/// Another thread changes the tree, and the walk was not allowed to wait. It may have visited some
/// VMAs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Busy;

/// A run of pages of an object or anon group, in one VMA.
pub(crate) struct RmapHit<'a, 'm, P: Platform> {
    /// The tables that may map the run.
    pub(crate) page_table: PageTable<'m, P>,
    /// The VMA. Its bounds and offset do not change; its protection may change.
    pub(crate) vma: &'a Vma,
    /// The addresses of the run in the VMA.
    pub(crate) range: VirtRange,
}

/// The progress that the visitor of a hit reports.
pub(crate) struct WalkProgress {
    /// The visitor has processed the range up to this address. If this is not the end, the walk
    /// calls the visitor again for the rest.
    pub(crate) until: VirtAddr,
    /// An upper bound on the number of entries that the visitor has examined.
    pub(crate) entries: u64,
}

/// Calls `visit` for each part of `ranges` in each VMA that maps `object`, with the lock of the
/// object's tree held shared, in the order and number of visits that the module describes. Flushes
/// and finishes the edit before it releases the lock and before it visits another VMA. The ranges
/// are ascending and do not overlap.
///
/// Complexity: O(log n) of the n VMAs that map the object, for each VMA that maps one of the ranges
/// and for each range.
///
/// # Errors
/// [`Busy`], unless the walk waits for locks.
pub(crate) fn for_each_sight<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    ranges: &[PageRange],
    locking: WalkLocking,
    mut visit: impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
) -> Result<(), Busy> {
    let mut walk = ObjectWalk::new(object, ranges);
    while !walk.hold(memory, locking, &mut visit)? {}
    Ok(())
}

/// A walk over the VMAs that map an object, hold by hold.
pub(crate) struct ObjectWalk<'a> {
    object: &'a ObjectState,
    walk: TreeWalk<'a>,
}

impl<'a> ObjectWalk<'a> {
    pub(crate) fn new(object: &'a ObjectState, ranges: &'a [PageRange]) -> Self {
        Self { object, walk: TreeWalk::new(ranges) }
    }

    /// Continues for one hold of the lock. Returns whether the walk is done.
    pub(crate) fn hold<'m, P: Platform>(
        &mut self,
        memory: &'m Memory<P>,
        locking: WalkLocking,
        visit: &mut impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
    ) -> Result<bool, Busy> {
        let tree_lock = &self.object.mapping_lock;
        let _held = lock(memory, tree_lock, locking)?;
        // SAFETY: 1. the lock is held.
        let mappers = unsafe { self.object.mappers.locked() };
        Ok(self.walk.hold(memory, mappers, &mut { HOLD }, visit))
    }

    /// The number of visited VMAs; a VMA that was visited twice counts twice.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn visited(&self) -> u64 {
        self.walk.visited
    }
}

#[inline]
fn looked_at_one<P: Platform>(_memory: &Memory<P>) {
    #[cfg(any(test, feature = "measure"))]
    _memory.platform().worked(crate::platform::Work { entries: 1, tables_marked: 0 });
}

fn lock<'a, P: Platform>(
    memory: &'a Memory<P>,
    tree_lock: &'a TreeLock,
    locking: WalkLocking,
) -> Result<TreeReadGuard<'a, P>, Busy> {
    match locking {
        WalkLocking::Wait => Ok(tree_lock.read(memory.platform())),
        WalkLocking::Try => tree_lock.try_read(memory.platform()).ok_or(Busy),
    }
}

/// A walk over one tree; see the module's documentation.
struct TreeWalk<'r> {
    ranges: &'r [PageRange],
    /// Counted from 1; 0 before the first hold.
    pass: u32,
    /// The pass visits VMAs with stamps above the first value and up to the second.
    stamps: (u64, u64),
    /// The VMA that the walk has reached.
    place: Option<IntervalPlace>,
    /// The walk has processed that VMA up to this page.
    page: u64,
    /// The number of visited VMAs.
    visited: u64,
}

/// The next step of a walk.
enum WalkStep<'t> {
    /// A part of a range, in a VMA that maps it.
    Part(&'t Vma, PageRange),
    /// A VMA.
    Arrived,
    /// No VMA of the pass is left.
    End,
}

impl<'r> TreeWalk<'r> {
    fn new(ranges: &'r [PageRange]) -> Self {
        Self { ranges, pass: 0, stamps: (0, 0), place: None, page: 0, visited: 0 }
    }

    /// Continues until `left` entries and VMAs were examined. Returns whether the walk is done.
    fn hold<'m, P: Platform, M: Member<Vma>>(
        &mut self,
        memory: &'m Memory<P>,
        tree: LockedTree<'_, Vma, M>,
        left: &mut u64,
        visit: &mut impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
    ) -> bool {
        let mut gather = Gather::new();
        let mut hit: Option<RmapHit<'_, 'm, P>> = None;
        if self.pass == 0 {
            (self.pass, self.stamps) = (1, (0, tree.now()));
        }
        let done = loop {
            if *left == 0 && self.pass < PASSES {
                break false;
            }
            match self.step(tree) {
                WalkStep::Part(vma, pages) => {
                    let Some(range) = part_of(vma, pages) else { continue };
                    // SAFETY: 1. the VMA is in a tree that does not change, and leaves that tree
                    // before its address space is dropped.
                    let page_table = || unsafe { PageTable::from_state(memory, vma.tree()) };
                    let hit = hit.get_or_insert_with(|| {
                        let page_table = page_table();
                        page_table.flush_source_of_move();
                        RmapHit { page_table, vma, range }
                    });
                    hit.range = range;
                    let seen = visit(hit, &mut Edit::new(&hit.page_table, &mut gather));
                    debug_assert!(range.start() < seen.until, "nothing was done");
                    self.page = vma.page_offset_of(seen.until.min(range.end()));
                    *left = left.saturating_sub(seen.entries);
                }
                WalkStep::Arrived => {
                    if let Some(last) = hit.take() {
                        Edit::new(&last.page_table, &mut gather).finish();
                    }
                    looked_at_one(memory);
                    *left = left.saturating_sub(1);
                }
                WalkStep::End if !self.next_pass(tree.now()) => break true,
                WalkStep::End => {}
            }
        };
        if let Some(last) = hit {
            Edit::new(&last.page_table, &mut gather).finish();
        }
        done
    }

    /// Advances by one part of a range, or by one VMA.
    fn step<'t, M: Member<Vma>>(&mut self, tree: LockedTree<'t, Vma, M>) -> WalkStep<'t> {
        let here = self.place.and_then(|place| tree.at(place));
        if let Some(vma) = here
            && let Some(PageRange { first, end }) = self.range_from(self.page)
            && first.max(self.page) <= M::interval(vma).last
        {
            return WalkStep::Part(vma, PageRange { first: first.max(self.page), end });
        }
        // VMAs after the place overlap no earlier range.
        let begin = self.place.map_or(0, |place| place.first);
        let Some(PageRange { first, .. }) = self.range_from(begin) else { return WalkStep::End };
        let last = self.ranges.last().map_or(0, |pages| pages.end - 1);
        let asked = Asked { first, last, since: self.stamps.0, after: self.place };
        let Some(vma) = tree.first(&asked) else { return WalkStep::End };
        let place = IntervalTree::<Vma, M>::place(vma);
        self.place = Some(place);
        // A VMA with a later stamp is left for the next pass.
        self.page = if place.stamp <= self.stamps.1 { place.first } else { u64::MAX };
        self.visited += 1;
        WalkStep::Arrived
    }

    /// The first of the ranges that has a page at or after `page`.
    fn range_from(&self, page: u64) -> Option<PageRange> {
        let index = self.ranges.partition_point(|pages| pages.end <= page);
        self.ranges.get(index).copied()
    }

    /// Begins another pass, if VMAs were renewed or added since the previous pass began.
    fn next_pass(&mut self, now: u64) -> bool {
        if now == self.stamps.1 {
            return false;
        }
        self.stamps = (self.stamps.1, now);
        self.pass += 1;
        self.place = None;
        true
    }
}

/// The outcome of a walk for an anonymous folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Walked {
    /// The walk has visited this many VMAs.
    Visited(u64),
    /// The folio is not mapped, or is not anonymous.
    NotMapped,
    /// The owner is being removed from its family, or the walk was not allowed to wait: the folio
    /// is busy.
    Busy,
}

/// Calls `visit` for each VMA that may map pages of `folio`, with the family lock held shared, for
/// parents before their children; otherwise as [`for_each_sight`]. The caller keeps the folio by a
/// reference or a mapping and holds its lock, so the owner does not change. The caller holds no
/// locks of tables and is in no read section.
///
/// A caller that finds fewer entries than the folio has mappings must treat the folio as busy, not
/// as unmapped: an operation may have detached a table before lowering the count, or a fork may
/// have raised the count before storing the entries.
///
/// The owner is known to be an anon group, although the walk does not hold it yet:
/// 1. The walker enters a read section and sees that the folio is mapped.
/// 2. An anon group is freed a grace period after its VMAs' last pages were counted down, so the
///    memory of the folio's owner contains an anon group at least until the section ends.
/// 3. The walker holds the group, unless the group has no holder left, and leaves the section
///    before it waits for the tree's lock.
///
/// Complexity: O(log n) for each anon group (the owner and the groups below) and for each VMA in it
/// that maps the index, where n is the number of VMAs in the group.
pub(crate) fn for_each_anonymous_sight<'m, P: Platform>(
    memory: &'m Memory<P>,
    folio: Folio,
    locking: WalkLocking,
    visit: impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
) -> Walked {
    for_each_sight_from(memory, folio, u64::from(folio.pages()), locking, visit)
}

/// As [`for_each_anonymous_sight`], for `pages` pages of the folio's owner, starting with the
/// folio's first page.
pub(crate) fn for_each_sight_from<'m, P: Platform>(
    memory: &'m Memory<P>,
    folio: Folio,
    pages: u64,
    locking: WalkLocking,
    mut visit: impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
) -> Walked {
    let frames = &memory.frames;
    let (node, first) = {
        let _section = ReadSection::enter(memory.platform());
        let FolioOwner { owner, first } = frames.folio(folio).owner();
        let Owner::Group(node) = owner else { return Walked::NotMapped };
        let node = node.cast::<AnonGroup>();
        if frames.folio(folio).mappings() == 0 {
            return Walked::NotMapped;
        }
        // SAFETY: the folio is mapped, so its anon group is not freed before this section ends (2
        // above).
        if !unsafe { node.as_ref() }.try_hold() {
            return Walked::Busy;
        }
        (node, first)
    };
    let ranges = [PageRange::from_count(first.first(), pages)];
    // SAFETY: the group is held now.
    let walked = walk_family(memory, unsafe { node.as_ref() }, &ranges, locking, &mut visit);
    // SAFETY: 1. `try_hold` above.
    unsafe { Groups::release_now(memory, node) };
    walked.map_or(Walked::Busy, Walked::Visited)
}

/// Walks over the anon group, which is held, and over the groups below. Returns the number of VMAs
/// visited.
fn walk_family<'m, P: Platform>(
    memory: &'m Memory<P>,
    top: &AnonGroup,
    ranges: &[PageRange],
    locking: WalkLocking,
    visit: &mut impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
) -> Result<u64, Busy> {
    let tree_lock = top.family_lock();
    let mut walk = FamilyWalk { top, at: top, walk: TreeWalk::new(ranges), visited: 0 };
    // The walk's place between two holds of the lock; the group is held so that it remains in the
    // tree.
    let mut kept: Option<NonNull<AnonGroup>> = None;
    let result = loop {
        let locked = lock(memory, tree_lock, locking);
        let before = kept.take();
        // SAFETY: 1. the lock is held, if `locked` is not an error.
        let done = locked.is_err() || unsafe { walk.hold(memory, visit) };
        if !done {
            kept = Some(NonNull::from(walk.at));
        }
        let locked = locked.map(drop);
        if let Some(node) = before {
            // SAFETY: 1. `FamilyWalk::hold` held the group for the walk's place, which has
            // advanced.
            unsafe { Groups::release_now(memory, node) };
        }
        if done {
            break locked;
        }
    };
    result.map(|()| walk.visited)
}

/// A walk over the anon groups of a family, one after another.
struct FamilyWalk<'a, 'r> {
    top: &'a AnonGroup,
    at: &'a AnonGroup,
    walk: TreeWalk<'r>,
    visited: u64,
}

impl FamilyWalk<'_, '_> {
    /// Continues for one hold of the lock. Returns whether the walk is done; if not, adds a hold on
    /// the anon group at the walk's place.
    ///
    /// # Safety
    /// 1. The caller holds the family lock.
    unsafe fn hold<'m, P: Platform>(
        &mut self,
        memory: &'m Memory<P>,
        visit: &mut impl FnMut(&RmapHit<'_, 'm, P>, &mut Edit<'_, 'm, P>) -> WalkProgress,
    ) -> bool {
        let mut left = HOLD;
        loop {
            // An anon group without holders has no VMA and no anon group below, and is about to be
            // freed.
            if left == 0 && self.at.try_hold() {
                return false;
            }
            // SAFETY: 1. the caller's obligation 1.
            let vmas = unsafe { self.at.vmas.locked() };
            if left == 0 || self.walk.hold(memory, vmas, &mut left, visit) {
                self.visited += self.walk.visited;
                self.walk = TreeWalk::new(self.walk.ranges);
                // SAFETY: 1. the caller's obligation 1; `try_hold` keeps the group at the place
                // from then on.
                let next = unsafe { self.at.next_below(self.top) };
                let Some(next) = next else { return true };
                self.at = next;
                left = left.saturating_sub(1);
            }
        }
    }
}

/// The addresses of those `pages` that the VMA contains.
pub(crate) fn part_of(vma: &Vma, pages: PageRange) -> Option<VirtRange> {
    let offset = vma.page_offset();
    let length = (vma.end() - vma.start()) >> PAGE_SHIFT;
    let begin = pages.first.max(offset);
    let end = pages.end.min(offset.saturating_add(length));
    (begin < end).then(|| {
        let at = |page: u64| vma.start() + ((page - offset) << PAGE_SHIFT);
        VirtRange::raw(at(begin), at(end))
    })
}
