//! Moves pages between two addresses of one tree, concurrently with faults (`UFFDIO_MOVE`): whole
//! folios, and swap entries in runs.
//!
//! ```text
//! source   | page | folio of 16 pages ........ | hole  | swap 7 | swap 8 |
//! holds    |           one set of locks, on both sides                   |
//! target   | page | folio of 16 pages ........ |       | swap 7 | swap 8 |
//! folios     owner and index of the target, written under the folio's lock
//! ```
//!
//! The caller holds the VMAs of both ranges for reading. Faults and other page moves run
//! concurrently; forks, `mremap` and unmapping wait. One piece covers at most one table of the
//! source, two tables that move as a whole, or eight huge leaves:
//! 1. The tables of both places are locked, in one pass.
//! 2. The mover tries the lock of each folio. If another thread holds a folio's lock, the mover
//!    releases all locks, and the caller waits.
//! 3. A sequentially consistent step clears the entries, and then the mover checks the pins. The
//!    entries of a pinned folio are restored.
//! 4. The mover sets the folio's owner and index for the new address, writes the entries there, and
//!    unlocks the folio.
//! 5. The TLBs are flushed for the old addresses before the tables are unlocked; or the tables are
//!    marked ([`crate::tlb`]), and the flush follows the last piece.
//!
//! The reverse map follows the folio's owner and index. A walker holds the folio's lock, so it
//! finds either the old address with the entries there, or the new address. At the new address the
//! walker may wait for the table until the flush is over, or find the mark.
//!
//! A folio moves as a whole, at any alignment, if all its mappings lie in the range. Otherwise the
//! part in the range must be split off first, because a folio has one index: the caller splits the
//! folio and retries ([`MoveStop::Split`]).

mod absent;
mod leaves;
mod scattered;
mod upper_levels;

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Order, PAGE_SIZE, VirtAddr};
use crate::arch::{self, Arch, Attributes, Entry, EntryIndex, Kind, Level};
use crate::folio::{Folio, FolioBatch, HeldFolio, OwnerMark};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::locking::{self, SPAN_ENTRIES};
use crate::table::{EntryAt, NoMemory, PageTable, TablePool, run};
use crate::tlb::Gather;

use super::Mover;
use super::piece::{LockedPiece, MovePolicy, Piece};

/// A move between two ranges. The caller holds the VMAs of both for reading.
pub(crate) struct MovePlan {
    pub(crate) source: VirtAddr,
    pub(crate) target: VirtAddr,
    /// The length, in bytes.
    pub(crate) len: u64,
    /// Whether holes in the source are skipped.
    pub(crate) allows_holes: bool,
    /// The owner of the target's pages.
    pub(crate) owner: OwnerMark,
    /// The index of the page at `target`.
    pub(crate) index: u64,
    /// The owner of the source's exclusive pages, and the index of the page at `source`.
    pub(crate) source_owner: OwnerMark,
    pub(crate) source_index: u64,
    /// The attributes of leaves in both VMAs after a store.
    pub(crate) attributes: Attributes,
    /// Whether pages that a userfaultfd has write-protected stay so.
    pub(crate) keeps_protection: bool,
}

/// The maximum number of level-2 entries in one piece.
const UPPER_ENTRIES: u64 = 8;
/// The maximum number of tables that one piece marks: two of level 2, and two for each entry.
const MARKS_OF_PIECE: usize = 2 + 2 * UPPER_ENTRIES as usize;

/// The reason why a move stopped before its end. All pages before the stop have moved.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum MoveStop {
    /// The source's entry is empty, and holes are not allowed.
    Missing,
    /// The target's entry is not empty.
    Exists,
    /// The page is not exclusive to the process, or is pinned.
    Busy,
    /// The source has a marker.
    Marked,
    /// The target needs a table that cannot be allocated immediately.
    NoMemory,
    /// The folio's lock is held.
    Locked(HeldFolio),
    /// The next folio needs a piece of this many bytes.
    Longer(u64),
    /// The level-2 entry cannot move as a whole: its pages must move singly.
    Piecemeal,
    /// The folio at this address of the source must be split into folios of this order.
    Split(VirtAddr, Order),
}

impl From<NoMemory> for MoveStop {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// The progress of a move.
pub(crate) struct MoveProgress<'a> {
    what: &'a MovePlan,
    /// The number of completed bytes.
    done: u64,
    /// The minimum length of the next piece, in bytes.
    least: u64,
    /// Whether the next piece moves page by page.
    piecemeal: bool,
}

/// A move of pages in progress.
pub(crate) type PageMover<'a, 'm, P> = Mover<'a, 'm, P, MoveProgress<'a>>;

/// The policy of a piece for VMAs held for reading.
struct BesideFaults<'a, 'm> {
    what: &'a MovePlan,
    /// The leaf of the machine's first frame, in the form that moves to the target unchanged.
    unchanged: Entry,
    numbered: FolioBatch<'m>,
}

impl MovePolicy for BesideFaults<'_, '_> {
    const BESIDE_MOVES: bool = true;
}

/// Lends a move to `work` and flushes afterwards. Also returns the number of moved bytes, including
/// holes.
pub(crate) fn move_pages<'m, P: Platform, R>(
    page_table: &PageTable<'m, P>,
    what: &MovePlan,
    work: impl FnOnce(&mut PageMover<'_, 'm, P>) -> R,
) -> (R, u64) {
    let (mut pool, mut gather) = (TablePool::new(page_table.memory), Gather::new());
    let mut counts = Counts::default();
    let mut mover = Mover {
        page_table,
        pool: &mut pool,
        gather: &mut gather,
        counts: &mut counts,
        marks: false,
        kind: MoveProgress { what, done: 0, least: 0, piecemeal: false },
    };
    let result = work(&mut mover);
    mover.flush();
    if mover.marks {
        page_table.moving.end_beside_faults();
    }
    mover.pool.settle(mover.counts);
    let done = mover.kind.done;
    page_table.count(&counts);
    (result, done)
}

impl<P: Platform> PageMover<'_, '_, P> {
    pub(crate) fn is_done(&self) -> bool {
        self.left() == 0
    }

    /// The number of bytes left to move.
    fn left(&self) -> u64 {
        self.kind.what.len - self.kind.done
    }

    /// The source and target addresses of the next page.
    fn ends(&self) -> (u64, u64) {
        let MoveProgress { what, done, .. } = self.kind;
        (what.source.0 + done, what.target.0 + done)
    }

    fn distance(&self) -> u64 {
        let (source, target) = self.ends();
        source.abs_diff(target)
    }

    /// Moves the next piece. `None` if the piece was completed.
    pub(crate) fn step(&mut self) -> Option<MoveStop> {
        // Shorter than one table: skipping the hole under the lock is cheap enough.
        if self.left() >= P::Arch::PTE.table_span() {
            let holes = self.pass_holes();
            if holes.is_some() || self.is_done() {
                return holes;
            }
        }
        let len = self.next_length();
        let stop = self.move_piece(len);
        self.kind.least = 0;
        self.kind.piecemeal = false;
        match stop {
            Some(MoveStop::Piecemeal) => {
                self.kind.piecemeal = true;
                None
            }
            Some(MoveStop::Longer(least)) => {
                // A piece of that length would lock one entry both as source and as target.
                if least > self.distance() || self.page_table.reach.is_page() {
                    return Some(MoveStop::Split(VirtAddr(self.ends().0), Order::PAGE));
                }
                self.kind.least = least;
                None
            }
            stop => stop,
        }
    }

    /// Allocates tables for the next piece, after [`MoveStop::NoMemory`].
    pub(crate) fn refill(&mut self) -> Result<(), NoMemory> {
        self.pool.refill()
    }

    /// The length of the next piece: up to the end of the source's table, and short enough that the
    /// source and the target of the piece do not overlap.
    fn next_length(&mut self) -> u64 {
        let left = self.left();
        if self.page_table.reach.is_page() {
            return PAGE_SIZE.min(left);
        }
        let (at, _) = self.ends();
        let span = P::Arch::PTE.table_span();
        let table = span - (at & (span - 1));
        if self.moves_tables(left) {
            return self.tables_ahead() * span;
        }
        table.max(self.kind.least).min(left).min(self.distance())
    }

    /// Whether the next piece, of at most `left` bytes, moves level-2 entries.
    fn moves_tables(&self, left: u64) -> bool {
        let span = P::Arch::PTE.table_span();
        let (source, target) = self.ends();
        (source | target) & (span - 1) == 0
            && left.min(self.distance()) >= span
            && self.kind.least <= span
            && !self.kind.piecemeal
            && self.page_table.reach.takes_tables()
    }

    /// The number of level-2 entries in the next piece, within one table on each side: at least
    /// one, and at most two tables or eight huge leaves. The result is a guess.
    fn tables_ahead(&mut self) -> u64 {
        let section = self.page_table.read_section();
        let (from, to) = self.ends();
        let root = self.page_table.root_in(&section);
        let found =
            self.page_table.table_below(root, VirtAddr(from), Level::PMD, Ordering::Acquire);
        let Ok(node) = found else { return 1 };
        self.counts.entries_descended += root.level.steps_to(node.level);
        let [first, there] = [from, to].map(|at| P::Arch::PMD.index_of(VirtAddr(at)));
        let room = P::Arch::ENTRIES - first.number().max(there.number());
        let left = self.left().min(self.distance()) / P::Arch::PMD.span();
        let most = left.min(room.into()).min(UPPER_ENTRIES) as u32;
        let words = &self.page_table.entries(node.table)[first.positions(most)];
        let mut room = SPAN_ENTRIES;
        let fits = |word: &&AtomicU64| {
            let entries = match P::Arch::PMD.kind(Entry(word.load(Ordering::Relaxed))) {
                Kind::Leaf => SPAN_ENTRIES / UPPER_ENTRIES as u32,
                Kind::Table => P::Arch::ENTRIES,
                Kind::Empty | Kind::Absent => u32::MAX,
            };
            room.checked_sub(entries).inspect(|left| room = *left).is_some()
        };
        words.iter().take_while(fits).count().max(1) as u64
    }

    /// The stop at a hole in the source, unless holes are skipped.
    fn stop_at_hole(&self) -> Option<MoveStop> {
        (!self.kind.what.allows_holes).then_some(MoveStop::Missing)
    }

    /// Skips addresses without tables, without locks, up to the limit of one read section. Faults
    /// fill holes at any time, so a hole was empty only at the time of the read.
    fn pass_holes(&mut self) -> Option<MoveStop> {
        let page_table = self.page_table;
        let section = page_table.read_section();
        for _ in 0..SPAN_ENTRIES / 4 / u32::from(P::Arch::LEVELS) {
            let left = self.left();
            if left == 0 {
                return None;
            }
            let (from, to) = self.ends();
            let found = page_table.peek(&section, VirtAddr(from), self.counts);
            if found.node.level == Level::PTE || !found.entry.is_empty() {
                return None;
            }
            let (holder, own) = (found.node.table.frame(), self.marks.then_some(&*self.gather));
            if !locking::has_no_pending_flush(&page_table.tables(&section), holder)
                && !page_table.is_empty_after_flushes(found.node, VirtAddr(from), own)
            {
                // Another thread was splitting a huge leaf.
                return None;
            }
            let there = page_table.peek(&section, VirtAddr(to), self.counts);
            let EntryAt { node, index, entry } = there;
            if node.level > Level::PTE && !entry.is_empty() {
                return Some(MoveStop::Exists);
            }
            if let stop @ Some(_) = self.stop_at_hole() {
                return stop;
            }
            let hole = left.min(found.end(from) - from);
            if node.level > Level::PTE {
                self.kind.done += hole.min(there.end(to) - to);
                continue;
            }
            let entries = u64::from(index.left::<P::Arch>());
            let count = entries.min(hole / PAGE_SIZE) as u32;
            let vacant = run::count_empty(&page_table.entries(node.table)[index.positions(count)]);
            page_table.memory.worked(u64::from(vacant), 0);
            self.counts.entries_read += u64::from(vacant);
            self.kind.done += u64::from(vacant) * PAGE_SIZE;
            return (vacant < count).then_some(MoveStop::Exists);
        }
        None
    }

    /// Moves the next `len` bytes under one set of locks.
    fn move_piece(&mut self, len: u64) -> Option<MoveStop> {
        let (page_table, what) = (self.page_table, self.kind.what);
        let (source, target) = self.ends();
        if source == target {
            return self.stays(source);
        }
        let level = if self.moves_tables(len) { P::Arch::PMD } else { Level::PTE };
        let is_last = self.left() == len;
        if !is_last && !self.marks {
            self.marks = true;
            page_table.moving.begin_beside_faults();
        }
        // The last of several pieces also marks its tables.
        if self.marks && !self.gather.has_room_for(MARKS_OF_PIECE) {
            self.flush();
        }
        let piece = Piece { level, source, target, len };
        let (first, numbered) = page_table.memory.frames.folio_batch();
        let unchanged = P::Arch::page_entry(first, Level::PTE, what.attributes);
        let policy = BesideFaults { what, unchanged, numbered };
        let section = page_table.read_section();
        let (moved, stop) = self.with_piece((page_table, &section), piece, policy, |locked| {
            if level > Level::PTE { locked.move_upper() } else { locked.move_leaves() }
        });
        self.kind.done += moved;
        stop
    }

    /// Handles a page that moves to its own place, so that the target's entry is also the source's.
    fn stays(&mut self, at: u64) -> Option<MoveStop> {
        let section = self.page_table.read_section();
        let EntryAt { entry, .. } = self.page_table.peek(&section, VirtAddr(at), self.counts);
        if !entry.is_empty() {
            return Some(MoveStop::Exists);
        }
        let stop = self.stop_at_hole();
        if stop.is_none() {
            self.kind.done += PAGE_SIZE;
        }
        stop
    }
}

/// One piece of a move with VMAs held for reading.
type PagesPiece<'a, 's, 'w, 'm, P> = LockedPiece<'a, 's, 'm, P, BesideFaults<'w, 'm>>;

impl<'s, P: Platform> PagesPiece<'_, 's, '_, '_, P> {
    /// The target index of page `page` of the piece.
    #[inline]
    fn index_at(&self, page: u32) -> u64 {
        let what = self.policy.what;
        what.index + (self.target_at(page) - what.target.0) / PAGE_SIZE
    }

    /// The frame of a leaf that moves to the target unchanged, counted from the machine's first
    /// frame. For any other entry, a number that no frame has: if bits other than the frame's
    /// differ, the difference is either no multiple of the step or far beyond 2^32 steps.
    #[inline(always)]
    fn number_of(&self, entry: Entry) -> u64 {
        const { assert!(P::Arch::STEP.is_power_of_two()) };
        entry.0.wrapping_sub(self.policy.unchanged.0).rotate_right(P::Arch::STEP.trailing_zeros())
    }

    /// Whether the `count` entries from `at` on are leaves of consecutive frames that move
    /// unchanged, in contiguous runs or not. One pass without a branch per entry.
    #[inline]
    fn are_unchanged(&self, words: &[AtomicU64], at: EntryIndex, count: u32) -> bool {
        let entry = |raw: &AtomicU64, index| {
            P::Arch::clear_contig(Entry(raw.load(Ordering::Relaxed)), index)
        };
        let words = &words[at.positions(count)];
        let Some(first) = words.first() else { return false };
        let first = entry(first, at);
        if self.number_of(first) > u64::from(u32::MAX) {
            return false;
        }
        let mut expected = first.0;
        let mut differ = 0;
        for (word, index) in words.iter().zip(at.stretch(count)) {
            differ |= entry(word, index).0 ^ expected;
            expected = expected.wrapping_add(P::Arch::STEP);
        }
        differ == 0
    }

    /// Makes the content of a lazily freed folio (`MADV_FREE`) survive reclaim: as on Linux, a page
    /// counts as written once it has moved. A leaf that moves unchanged is dirty, so only the other
    /// leaves may map such a folio.
    #[inline]
    fn keep_content(&self, folio: Folio) {
        let handle = self.page_table.memory.frames.folio(folio);
        if handle.is_lazy() {
            handle.mark_dirty();
        }
    }

    /// The entry at the target for `entry`, a leaf taken from the source: soft-dirty, and writable
    /// unless a userfaultfd has write-protected the page.
    fn arrived(&self, entry: Entry) -> Entry {
        let mut entry = Entry(entry.0 | P::Arch::SOFT_DIRTY);
        if entry.0 & P::Arch::USERFAULT != 0 {
            if self.policy.what.keeps_protection {
                return entry;
            }
            entry.0 &= !P::Arch::USERFAULT;
        }
        P::Arch::make_writable(entry, arch::Write::Later)
    }
}
