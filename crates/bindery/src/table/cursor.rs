//! A cursor: a locked range of a page table that yields runs. Every operation is "for each run: do
//! it once".
//!
//! ```text
//! range        |<------------------------------------------------------------->|
//! level 3      |  empty: 2 entries  |        table: covered whole        | ...down
//! level 1                                                                | leaf run | empty |
//! runs         |         1          |                 2                  |    3     |   4   |
//! ```
//!
//! A piece that the range covers only in part is divided before it is yielded: a huge leaf is split
//! with its deposited table, and a contiguous run is unfolded. The receiver of a run therefore owns
//! the whole run.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod chunks;
mod leaves;

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, EntryIndex, Equal, Kind, Level};
use crate::memory::{absent_limit, folio_limit};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::EntryAt;
use super::locking::{self, Depth, LockSet, Node};
use super::narrowing::Unflushed;
use super::run::{self, Entries, Run, What};
use super::{NoMemory, PageTable, ReadSection, Table, TablePool};

pub(crate) use chunks::Chunks;

/// The way in which a cursor treats a table that its range covers completely.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WholeTables {
    /// The cursor yields the table as one run.
    Yielded,
    /// The cursor yields a table of level 1 as one run, and enters all others.
    LowestYielded,
    /// The cursor enters the table, because the operation concerns every leaf.
    Entered,
}

/// A locked range, usually a short one. Dropping the cursor releases the locks; the tables that the
/// cursor finds stay valid until the end of the read section, which the cursor borrows.
pub(crate) struct Cursor<'a, 'm, P: Platform> {
    pub(crate) page_table: &'a PageTable<'m, P>,
    pub(crate) locks: LockSet,
    pub(crate) counts: Counts,
    cover: Node<P::Arch, Table<'a>>,
    range: VirtRange,
    at: u64,
    /// The table in which `at` was last found, valid while `at` stays within that table.
    position: Option<Node<P::Arch, Table<'a>>>,
    /// Whether narrowed entries have to be flushed before the locks are released.
    pub(super) unflushed: Unflushed,
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// Locks `range`, which is not empty, or the front of `range`: one set of locks serves at most
    /// [`locking::SPAN_ENTRIES`] entries, and a range of at most that many pages is locked
    /// completely. If another flush is pending, the cursor performs it first, so that no TLB
    /// allows more than the entries do.
    // Always inlined: a function of its own would have to return the set of locks by copy.
    #[inline(always)]
    pub(crate) fn cursor<'a>(
        &'a self,
        section: &'a ReadSection<'_, P>,
        range: VirtRange,
        depth: Depth<P::Arch>,
    ) -> Cursor<'a, 'm, P> {
        self.cursor_beside(section, range, depth, None)
    }

    /// As [`PageTable::cursor`], but leaves pending flushes of `own` to the caller.
    #[inline(always)]
    pub(crate) fn cursor_beside<'a>(
        &'a self,
        section: &'a ReadSection<'_, P>,
        range: VirtRange,
        depth: Depth<P::Arch>,
        own: Option<&Gather>,
    ) -> Cursor<'a, 'm, P> {
        let mut cursor = self.unlocked_cursor(section, range);
        cursor.lock(section, depth, own);
        cursor
    }

    /// A cursor that holds no lock until [`Cursor::lock`] is called.
    #[inline(always)]
    pub(super) fn unlocked_cursor<'a>(
        &'a self,
        section: &'a ReadSection<'_, P>,
        range: VirtRange,
    ) -> Cursor<'a, 'm, P> {
        Cursor {
            page_table: self,
            counts: Counts::default(),
            locks: LockSet::new(),
            cover: self.root_in(section),
            range,
            at: range.start().0,
            position: None,
            unflushed: Unflushed::none(),
        }
    }
}

impl<P: Platform> Drop for Cursor<'_, '_, P> {
    fn drop(&mut self) {
        self.unflushed.assert_none();
        self.locks.release_all(|table| self.page_table.unlock(table));
        self.page_table.count(&self.counts);
    }
}

impl<'a, 'm, P: Platform> Cursor<'a, 'm, P> {
    /// Locks the range; called once. Locking is separate from construction so that the large set of
    /// locks need not be copied to the cursor's final place.
    #[inline(always)]
    pub(super) fn lock(
        &mut self,
        section: &'a ReadSection<'_, P>,
        depth: Depth<P::Arch>,
        own: Option<&Gather>,
    ) {
        let (page_table, range) = (self.page_table, self.range);
        let tables = page_table.tables(section);
        self.cover = locking::lock_range(&tables, range, depth, &mut self.locks);
        let range = VirtRange::raw(range.start().0, self.locks.end_of(range).0);
        self.range = range;
        self.counts.tables_locked = self.locks.len() as u64;
        if self.locks.is_pending() {
            page_table.honor_pending(range, &self.locks, own, &mut self.counts);
        }
    }

    /// The next run, whose leaves agree in the attributes of `equal`; `None` at the end of the
    /// range. All tables are entered. Fails if a huge leaf has to be split and its deposit is
    /// missing.
    #[inline]
    pub(crate) fn next_run(&mut self, equal: Equal) -> Result<Option<Run<'a, P::Arch>>, NoMemory> {
        self.next_run_or_table(equal, WholeTables::Entered)
    }

    /// As [`Cursor::next_run`], but a table that the range covers completely may itself be a run.
    #[inline(always)]
    pub(crate) fn next_run_or_table(
        &mut self,
        equal: Equal,
        tables: WholeTables,
    ) -> Result<Option<Run<'a, P::Arch>>, NoMemory> {
        // The check for the end of the range needs no function call.
        if self.at >= self.range.end().0 {
            return Ok(None);
        }
        self.following_run(equal, tables)
    }

    /// As [`Cursor::next_run_or_table`], before the end of the range.
    #[inline]
    fn following_run(
        &mut self,
        equal: Equal,
        tables: WholeTables,
    ) -> Result<Option<Run<'a, P::Arch>>, NoMemory> {
        while self.at < self.range.end().0 {
            let node = self.position.unwrap_or(self.cover);
            let at = VirtAddr(self.at);
            let index = node.level.index_of(at);
            let entries = self.page_table.entries(node.table);
            let entry = run::load(entries, index);
            let kind = node.level.kind(entry);
            let limit = self.limit(node.level, index);
            if node.level == Level::PTE {
                if let Some(found) =
                    self.level_one_run(EntryAt { node, index, entry }, limit, equal)
                {
                    return Ok(Some(self.pass(found)));
                }
                continue;
            }
            let found = |count, what| Run { at, node, index, count, what };
            let whole = limit > 0 && at.is_aligned(node.level.span());
            match kind {
                Kind::Empty => {
                    let count = run::count_empty(&entries[index.positions(limit.max(1))]);
                    self.counts.entries_read += u64::from(count);
                    return Ok(Some(self.pass(found(count, What::Empty))));
                }
                Kind::Table => {
                    // SAFETY: 1. the cursor has read the entry in its table, in its section.
                    let table = unsafe { Table::new(P::Arch::frame(entry)) };
                    let yields = match tables {
                        WholeTables::Yielded => true,
                        WholeTables::LowestYielded => node.level == Level::PMD,
                        WholeTables::Entered => false,
                    };
                    if whole && yields {
                        self.counts.entries_read += 1;
                        return Ok(Some(self.pass(found(1, What::Table(table)))));
                    }
                    self.counts.entries_descended += 1;
                    self.position = Some(node.child(table));
                }
                Kind::Leaf | Kind::Absent if !whole => {
                    self.split(&EntryAt { node, index, entry })?;
                }
                Kind::Leaf => {
                    self.counts.entries_read += 1;
                    return Ok(Some(self.pass(found(1, What::Leaf(entry)))));
                }
                Kind::Absent => {
                    self.counts.entries_read += 1;
                    return Ok(Some(self.pass(found(1, What::Absent(entry)))));
                }
            }
        }
        Ok(None)
    }

    /// The number of entries at `level` that lie completely between the position and the end of its
    /// table or of the range.
    #[inline]
    fn limit(&self, level: Level<P::Arch>, index: EntryIndex) -> u32 {
        let left = (self.range.end().0 - self.at) >> level.span_shift();
        u64::from(index.left::<P::Arch>()).min(left) as u32
    }

    /// Advances past the run. An empty entry above level 1 may extend past the range's end or start
    /// before the position.
    #[inline]
    fn pass(&mut self, found: Run<'a, P::Arch>) -> Run<'a, P::Arch> {
        let shift = found.node.level.span_shift();
        self.page_table.memory.worked(u64::from(found.count), 0);
        let begin = self.at >> shift << shift;
        self.at = begin.saturating_add(u64::from(found.count) << shift);
        let stays = found.count < found.index.left::<P::Arch>();
        self.position = stays.then_some(found.node);
        found
    }

    #[inline]
    fn level_one_run(
        &mut self,
        found: EntryAt<P::Arch, Table<'a>>,
        limit: u32,
        equal: Equal,
    ) -> Option<Run<'a, P::Arch>> {
        let EntryAt { node, index, entry } = found;
        let page_table = self.page_table;
        let entries = page_table.entries(node.table);
        let limit = limit.min(page_table.reach.longest_run());
        let (count, what) = match P::Arch::PTE.kind(entry) {
            Kind::Empty => (run::count_empty(&entries[index.positions(limit)]), What::Empty),
            Kind::Leaf => {
                let offset = index.offset_in(P::Arch::CONTIG_ENTRIES);
                if P::Arch::is_contig(entry) && (offset != 0 || limit < P::Arch::CONTIG_ENTRIES) {
                    // The run covers only a part of the contiguous run.
                    page_table.unfold(node.place(index), VirtAddr(self.at), &mut self.counts);
                    return None;
                }
                let single = P::Arch::clear_contig(entry, index);
                if limit == 1 {
                    self.counts.entries_read += 1;
                    let (at, what) = (VirtAddr(self.at), What::Leaf(single));
                    return Some(Run { at, node, index, count: 1, what });
                }
                let (limit, step) = if equal.contains(Equal::ANY_FRAMES) {
                    (limit, 0)
                } else {
                    folio_limit(page_table.memory, P::Arch::frame(single), limit)
                };
                if limit == 1 {
                    // The folio has one page, or this is its last page: no neighbor is compared.
                    self.counts.entries_read += 1;
                    let (at, what) = (VirtAddr(self.at), What::Leaf(single));
                    return Some(Run { at, node, index, count: 1, what });
                }
                let limited = &entries[index.positions(limit)];
                let (mut count, first) = P::Arch::match_leaves(limited, index, equal, step, 0);
                if P::Arch::CONTIG_ENTRIES > 1 {
                    // A contiguous run is uniform in the bits that the MMU sees, but `equal` may
                    // also compare software bits, and the range may end inside a contiguous run.
                    // Leave a contiguous run that would be divided to the next run.
                    let end = index + count;
                    let cut = end.offset_in(P::Arch::CONTIG_ENTRIES);
                    if cut != 0 && P::Arch::is_contig(run::load(entries, end - 1)) {
                        if cut >= count {
                            // This contiguous run is the first, and its own software bits differ.
                            page_table.unfold(
                                node.place(index),
                                VirtAddr(self.at),
                                &mut self.counts,
                            );
                            return None;
                        }
                        count -= cut;
                    }
                }
                (count, What::Leaf(first))
            }
            Kind::Absent | Kind::Table => {
                let limit = absent_limit(page_table.memory, entry, limit);
                let (count, first) = P::Arch::match_absent(&entries[index.positions(limit)]);
                (count, What::Absent(first))
            }
        };
        self.counts.entries_read += u64::from(count);
        Some(Run { at: VirtAddr(self.at), node, index, count, what })
    }

    /// Splits the huge leaf or the absent entry at the position, because the range covers it only
    /// in part.
    fn split(&mut self, huge: &EntryAt<P::Arch, Table<'a>>) -> Result<(), NoMemory> {
        let table = self.page_table.split(huge, VirtAddr(self.at), &mut self.counts)?;
        self.locks.push(table.frame());
        Ok(())
    }

    /// The table at level `level` that covers `addr`. Creates the missing tables above it, and
    /// splits a leaf or an absent entry in the way.
    pub(crate) fn table_at(
        &mut self,
        addr: VirtAddr,
        level: Level<P::Arch>,
        pool: &mut TablePool<'m, P>,
    ) -> Result<Table<'a>, NoMemory> {
        let (page_table, cover) = (self.page_table, self.cover);
        self.counts.entries_descended += cover.level.steps_to(level);
        page_table.table_under(cover, addr, level, |missing| {
            let table = page_table.put_table(&missing, addr, &mut self.counts, pool)?;
            self.locks.push(table.frame());
            Ok(table)
        })
    }

    /// The level-1 table that covers `addr`, at which a page is mapped. A leaf that covers more is
    /// split with its deposited table.
    #[inline(always)]
    pub(crate) fn split_table_at(&mut self, addr: VirtAddr) -> Result<Table<'a>, NoMemory> {
        self.table_at(addr, Level::PTE, &mut TablePool::new(self.page_table.memory))
    }

    /// The locked range: the caller's whole range, or its front.
    pub(crate) fn range(&self) -> VirtRange {
        self.range
    }

    /// The part of the range whose runs were yielded.
    pub(crate) fn passed(&self) -> VirtRange {
        VirtRange::raw(self.range.start().0, self.at.min(self.range.end().0))
    }

    /// The table that covers the whole range.
    pub(crate) fn cover(&self) -> Node<P::Arch, Table<'a>> {
        self.cover
    }

    /// The entry for `addr` that refers to a table of `level`, if the table exists and the cursor
    /// holds the entry.
    pub(crate) fn parent_of(
        &mut self,
        addr: VirtAddr,
        level: Level<P::Arch>,
    ) -> Option<EntryAt<P::Arch, Table<'a>>> {
        let (cover, parent) = (self.cover, level.above());
        let found = self.page_table.table_below(cover, addr, parent, Ordering::Relaxed);
        let lowest = found.map_or_else(|found| found.node.level.below(), |node| node.level);
        self.counts.entries_descended += cover.level.steps_to(lowest);
        let node = found.ok().filter(|node| node.level == parent)?;
        let index = parent.index_of(addr);
        let entry = run::load(self.page_table.entries(node.table), index);
        Some(EntryAt { node, index, entry })
    }

    /// Unfolds contiguous runs that start before the level-1 run or end after it.
    pub(crate) fn unfold_edges(&mut self, run: &Run<'_, P::Arch>) {
        let entries = self.page_table.entries(run.node.table);
        let contig = P::Arch::CONTIG_ENTRIES;
        let last = run.index + run.count - 1;
        for (index, cut) in [
            (run.index, run.index.offset_in(contig) != 0),
            (last, (last + 1).offset_in(contig) != 0),
        ] {
            if cut && P::Arch::is_contig(run::load(entries, index)) {
                let at = run.at.offset(u64::from(index - run.index) << PAGE_SHIFT);
                self.page_table.unfold(run.node.place(index), at, &mut self.counts);
            }
        }
    }

    /// The lowest existing entry for `addr`: its table, level and index.
    pub(crate) fn entry_at(&mut self, addr: VirtAddr) -> EntryAt<P::Arch, Table<'a>> {
        let found = self.page_table.entry_below(self.cover, addr, Level::PTE, Ordering::Relaxed);
        self.counts.entries_descended += self.cover.level.steps_to(found.node.level);
        self.counts.entries_read += 1;
        self.page_table.memory.worked(1, 0);
        found
    }
}
