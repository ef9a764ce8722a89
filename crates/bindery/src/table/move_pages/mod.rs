//! Moves pages between two places of one tree, beside running faults (`UFFDIO_MOVE`): whole folios,
//! and swap entries in runs.
//!
//! ```text
//! source   | page | folio of 16 pages ........ | hole  | swap 7 | swap 8 |
//! holds    |           one set of locks, on both sides                   |
//! target   | page | folio of 16 pages ........ |       | swap 7 | swap 8 |
//! folios     owner and index of the target, written under the folio's lock
//! ```
//!
//! The caller holds the VMAs of both places for reading. So faults run, and so do other moves of
//! pages; forks, `mremap` and unmapping wait. One *span* serves at most one table of the source, two
//! that move whole, or eight huge leaves:
//! 1. The tables of both places are locked, in one pass.
//! 2. The lock of a folio is tried. If it is held, all locks are released, and the caller waits.
//! 3. The entries are cleared, by a sequentially consistent step, and then the pins are looked at.
//!    A pinned folio gets its entries back.
//! 4. The folio gets the owner and the index of its new place, its entries are written there, and
//!    it is unlocked.
//! 5. The TLBs forget the old place before the tables are unlocked, or the tables are marked
//!    ([`crate::tlb`]), and the flush comes after the last span.
//!
//! The reverse map follows the folio's owner and index. A walker has the folio's lock, so it finds
//! the old place with the entries there, or the new one. It may wait for the table of the new place
//! until the flush is over, or meet the mark.
//!
//! A folio moves whole, at any alignment, if all its mappings are in the range. Of any other, the
//! part must be split off first, because a folio has one index: the caller does that, and retries
//! ([`MoveStop::Split`]).

mod absent;
mod leaves;
mod scattered;
mod slots;

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Attributes, Entry, EntryIndex, Kind, Level};
use crate::folio::{Folio, FolioBatch, OwnerMark};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::locked_piece::{Below, LockedPiece, MovePolicy};
use super::locking::{LockSet, SPAN_ENTRIES};
use super::{EntryAt, NoMemory, PageTable, ReadSection, TablePool, run};

/// A move, from one place to another. The caller holds the VMAs of both places for reading.
pub(crate) struct MovePlan {
    pub(crate) source: VirtAddr,
    pub(crate) target: VirtAddr,
    /// In bytes.
    pub(crate) len: u64,
    /// Skip holes in the source.
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

/// Slots that one span serves at most.
const SLOTS_TOGETHER: u64 = 8;
/// Tables that one span marks at most: two of level 2, and two for each slot.
const MARKS_OF_SPAN: usize = 2 + 2 * SLOTS_TOGETHER as usize;

/// The reason why a move has stopped before its end. The pages before have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MoveStop {
    /// The source's entry is empty, and holes are not allowed.
    Missing,
    /// The target's entry is not empty.
    Exists,
    /// The page is not the program's own, or is pinned.
    Busy,
    /// The source has a marker.
    Marked,
    /// No table for the target at once.
    NoMemory,
    /// The folio's lock is held. The caller has received a reference to the folio.
    Locked(Folio),
    /// The next folio needs a span of this many bytes.
    Longer(u64),
    /// The slot cannot move as one entry: its pages must move one by one.
    Piecemeal,
    /// The folio at this address of the source must be split into folios of this order.
    Split(VirtAddr, Order),
}

impl From<NoMemory> for MoveStop {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// A move under way. Dropping it flushes the stale ranges.
pub(crate) struct PageMover<'a, 'm, P: Platform> {
    page_table: &'a PageTable<'m, P>,
    what: &'a MovePlan,
    pool: TablePool<'m, P>,
    gather: Gather,
    counts: Counts,
    /// Tables may be marked.
    marks: bool,
    /// Bytes that are done.
    done: u64,
    /// The least length of the next span, in bytes.
    least: u64,
    /// The next span moves page by page.
    piecemeal: bool,
}

impl<'a, 'm, P: Platform> PageMover<'a, 'm, P> {
    pub(crate) fn new(page_table: &'a PageTable<'m, P>, what: &'a MovePlan) -> Self {
        // In their places: they are too large to be copied.
        Self {
            page_table,
            what,
            pool: TablePool::new(page_table.memory),
            gather: Gather::new(),
            counts: Counts::default(),
            marks: false,
            done: 0,
            least: 0,
            piecemeal: false,
        }
    }

    /// How many bytes have moved, holes included.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done == self.what.len
    }

    /// Moves the next span. `None` if nothing stopped it.
    pub(crate) fn step(&mut self) -> Option<MoveStop> {
        // Shorter than one table: skipping the hole under the lock is cheap enough.
        if self.what.len - self.done >= P::Arch::PTE.table_span() {
            let holes = self.pass_holes();
            if holes.is_some() || self.is_done() {
                return holes;
            }
        }
        let len = self.length_of_span();
        let stop = self.move_span(len);
        self.least = 0;
        self.piecemeal = false;
        match stop {
            Some(MoveStop::Piecemeal) => {
                self.piecemeal = true;
                None
            }
            Some(MoveStop::Longer(least)) => {
                let at = VirtAddr(self.what.source.0 + self.done);
                // A span of that length would lock an entry as source and as target.
                if least > self.distance() || self.page_table.reach.is_page() {
                    return Some(MoveStop::Split(at, Order::PAGE));
                }
                self.least = least;
                None
            }
            stop => stop,
        }
    }

    /// Allocates tables for the next span, after [`MoveStop::NoMemory`].
    pub(crate) fn refill(&mut self) -> Result<(), NoMemory> {
        self.pool.refill()
    }

    fn distance(&self) -> u64 {
        self.what.source.0.abs_diff(self.what.target.0)
    }

    /// Up to the end of the source's table, and not so far that source and target of the span meet.
    fn length_of_span(&mut self) -> u64 {
        let left = self.what.len - self.done;
        if self.page_table.reach.is_page() {
            return PAGE_SIZE.min(left);
        }
        let at = self.what.source.0 + self.done;
        let span = P::Arch::PTE.table_span();
        let table = span - (at & (span - 1));
        if self.moves_slots(left) {
            return self.slots_ahead() * span;
        }
        table.max(self.least).min(left).min(self.distance())
    }

    /// Whether the next span, of at most `left` bytes, moves by entries of level 2.
    fn moves_slots(&self, left: u64) -> bool {
        let span = P::Arch::PTE.table_span();
        let (source, target) = (self.what.source.0 + self.done, self.what.target.0 + self.done);
        (source | target) & (span - 1) == 0
            && left.min(self.distance()) >= span
            && self.least <= span
            && !self.piecemeal
            && self.page_table.reach.takes_tables()
    }

    /// The number of slots of level 2 in the next span, in one table on each side: at most two
    /// tables, or eight huge leaves. At least one. A guess.
    fn slots_ahead(&mut self) -> u64 {
        let _section = ReadSection::enter(self.page_table.memory.platform());
        let from = VirtAddr(self.what.source.0 + self.done);
        let to = VirtAddr(self.what.target.0 + self.done);
        let root = self.page_table.root_node();
        let found = self.page_table.table_below(root, from, Level::PMD, Ordering::Acquire);
        let Ok(node) = found else { return 1 };
        self.counts.entries_descended += root.level.steps_to(node.level);
        let first = P::Arch::PMD.index_of(from);
        let room = P::Arch::ENTRIES - first.number().max(P::Arch::PMD.index_of(to).number());
        let left = (self.what.len - self.done).min(self.distance()) / P::Arch::PMD.span();
        let most = left.min(room.into()).min(SLOTS_TOGETHER) as u32;
        let slots = &self.page_table.slots(node.table)[first.slots(most)];
        let mut room = SPAN_ENTRIES;
        let fits = |slot: &&AtomicU64| {
            let entries = match P::Arch::PMD.kind(Entry(slot.load(Ordering::Relaxed))) {
                Kind::Leaf => SPAN_ENTRIES / SLOTS_TOGETHER as u32,
                Kind::Table => P::Arch::ENTRIES,
                Kind::Empty | Kind::Absent => u32::MAX,
            };
            room.checked_sub(entries).inspect(|left| room = *left).is_some()
        };
        slots.iter().take_while(fits).count().max(1) as u64
    }

    /// Skips addresses without tables, without locks, as far as one read section may reach.
    /// Faults fill holes at any time, so a hole was empty only when it was read.
    fn pass_holes(&mut self) -> Option<MoveStop> {
        let (page_table, what) = (self.page_table, self.what);
        let section = ReadSection::enter(page_table.memory.platform());
        for _ in 0..SPAN_ENTRIES / 4 / u32::from(P::Arch::LEVELS) {
            let left = what.len - self.done;
            if left == 0 {
                return None;
            }
            let from = VirtAddr(what.source.0 + self.done);
            let to = VirtAddr(what.target.0 + self.done);
            let EntryAt { node, entry, .. } = page_table.peek(&section, from, &mut self.counts);
            if node.level == Level::PTE || !entry.is_empty() {
                return None;
            }
            let EntryAt { node: there, index, entry } =
                page_table.peek(&section, to, &mut self.counts);
            if there.level > Level::PTE && !entry.is_empty() {
                return Some(MoveStop::Exists);
            }
            if !what.allows_holes {
                return Some(MoveStop::Missing);
            }
            let to_end = |at: VirtAddr, level: Level<P::Arch>| {
                let span = level.span();
                span - (at.0 & (span - 1))
            };
            let hole = left.min(to_end(from, node.level));
            if there.level > Level::PTE {
                self.done += hole.min(to_end(to, there.level));
                continue;
            }
            let entries = u64::from(index.left::<P::Arch>());
            let count = entries.min(hole / PAGE_SIZE) as u32;
            let vacant = run::count_empty(&page_table.slots(there.table)[index.slots(count)]);
            page_table.memory.worked(u64::from(vacant), 0);
            self.counts.entries_read += u64::from(vacant);
            self.done += u64::from(vacant) * PAGE_SIZE;
            return (vacant < count).then_some(MoveStop::Exists);
        }
        None
    }

    /// Moves the next `len` bytes under one set of locks.
    fn move_span(&mut self, len: u64) -> Option<MoveStop> {
        let (page_table, what) = (self.page_table, self.what);
        let (source, target) = (what.source.0 + self.done, what.target.0 + self.done);
        let is_last = self.done + len == what.len;
        let by_slots = self.moves_slots(len);
        if source == target {
            return self.stays(source);
        }
        if !is_last {
            if !self.marks {
                self.marks = true;
                page_table.moving.begin_beside_faults();
            }
            if !self.gather.has_room_for(MARKS_OF_SPAN) {
                page_table.flush(&mut self.gather, &mut self.counts);
            }
        }
        let (first, numbered) = page_table.memory.frames.folio_batch();
        let mut locks = LockSet::new();
        let root = page_table.root_node();
        let mut locked = LockedPiece {
            _section: ReadSection::enter(page_table.memory.platform()),
            page_table,
            locks: &mut locks,
            pool: &mut self.pool,
            gather: &mut self.gather,
            counts: &mut self.counts,
            from: root,
            to: root,
            marks: !is_last,
            policy: BesideFaults {
                what,
                source,
                target,
                len,
                index: what.index + self.done / PAGE_SIZE,
                source_index: what.source_index + self.done / PAGE_SIZE,
                unchanged: P::Arch::page_entry(first, Level::PTE, what.attributes),
                numbered,
            },
        };
        let (from, to) =
            (VirtRange::raw(source, source + len), VirtRange::raw(target, target + len));
        locked.lock(from.into(), to, Level::PTE);
        let (moved, stop) = if by_slots { locked.move_slots() } else { locked.move_leaves() };
        if is_last {
            // Before another thread gets the locks.
            locked.flush();
        }
        drop(locked);
        self.done += moved;
        stop
    }

    /// A move of a page to its own place: the target's entry is the source's.
    fn stays(&mut self, at: u64) -> Option<MoveStop> {
        let section = ReadSection::enter(self.page_table.memory.platform());
        let EntryAt { entry, .. } = self.page_table.peek(&section, VirtAddr(at), &mut self.counts);
        if !entry.is_empty() {
            return Some(MoveStop::Exists);
        }
        if !self.what.allows_holes {
            return Some(MoveStop::Missing);
        }
        self.done += PAGE_SIZE;
        None
    }
}

impl<P: Platform> Drop for PageMover<'_, '_, P> {
    fn drop(&mut self) {
        self.page_table.flush(&mut self.gather, &mut self.counts);
        if self.marks {
            self.page_table.moving.end_beside_faults();
        }
        if self.pool.is_used() {
            self.pool.give_back();
            self.counts += self.pool.counts;
        }
        self.page_table.count(&self.counts);
    }
}

/// The state of one span of a move whose VMAs are held for reading.
struct BesideFaults<'a, 'm> {
    what: &'a MovePlan,
    source: u64,
    target: u64,
    len: u64,
    /// Of the page at `target`.
    index: u64,
    /// Of the page at `source`, before it moves.
    source_index: u64,
    /// The leaf of the machine's first frame that moves to the target without a change.
    unchanged: Entry,
    numbered: FolioBatch<'m>,
}

impl MovePolicy for BesideFaults<'_, '_> {
    const BESIDE_MOVES: bool = true;
}

/// One span: the piece of a move whose VMAs are held for reading.
type LockSpan<'a, 'm, P> = LockedPiece<'a, 'm, P, BesideFaults<'a, 'm>>;

impl<P: Platform> LockSpan<'_, '_, P> {
    /// The frame of a leaf that moves to the target without a change, counted from the machine's
    /// first one. Of any other entry, a number that no frame has: where other bits than those of a
    /// frame differ, the difference is no multiple of the step, or far beyond 2^32 of them.
    #[inline(always)]
    fn number_of(&self, entry: Entry) -> u64 {
        const { assert!(P::Arch::STEP.is_power_of_two()) };
        entry.0.wrapping_sub(self.policy.unchanged.0).rotate_right(P::Arch::STEP.trailing_zeros())
    }

    /// Whether the `count` entries from `at` on are leaves of consecutive frames that move without
    /// a change, be they in contiguous runs or not. One pass without a branch an entry.
    #[inline]
    fn are_unchanged(&self, slots: &[AtomicU64], at: EntryIndex, count: u32) -> bool {
        let entry = |raw: &AtomicU64, index| {
            P::Arch::clear_contig(Entry(raw.load(Ordering::Relaxed)), index)
        };
        let slots = &slots[at.slots(count)];
        let Some(first) = slots.first() else { return false };
        let first = entry(first, at);
        if self.number_of(first) > u64::from(u32::MAX) {
            return false;
        }
        let mut expected = first.0;
        let mut differ = 0;
        for (slot, index) in slots.iter().zip(at.stretch(count)) {
            differ |= entry(slot, index).0 ^ expected;
            expected = expected.wrapping_add(P::Arch::STEP);
        }
        differ == 0
    }

    /// The source address of page `page` of this span.
    fn source_at(&self, page: u32) -> u64 {
        self.policy.source + u64::from(page) * PAGE_SIZE
    }

    /// The entry at the target for `entry`, a leaf that was taken from the source: soft-dirty,
    /// and writable unless a userfaultfd has write-protected the page.
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
