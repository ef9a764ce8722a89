//! Level-2 entries: a huge leaf, a huge swap entry, or a table. Each moves as one entry.
//!
//! A table is *carried* if every entry in the table may move. While the table is out of the tree,
//! its folios are locked one after the other and renumbered:
//! 1. The entry that refers to the table is cleared. No further thread finds the table; a thread
//!    that has already found it waits for its lock and then sees that the table has moved.
//! 2. Each folio is locked and its pins are checked. The folio gets its new owner and index and
//!    stays locked.
//! 3. The entry is written at the target, and the folios are unlocked.
//!
//! If a folio cannot move, the folios before it get the index of the source again, and the table
//! returns to its place. Its pages then move one by one, up to the page that cannot move.
//!
//! An empty table at the target moves to the source in exchange, so nothing is allocated or freed.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Order, PAGE_SIZE, VirtAddr};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, EntryIndex, Kind, Level, Permissions};
use crate::folio::{Folio, FolioIndex, OwnerRun};
use crate::platform::Platform;
use crate::table::run::{self, Entries};
use crate::table::{Table, TableEntry};

use super::leaves::{FolioRun, lock};
use super::{MoveStop, PagesPiece};

/// The target of a level-2 entry.
struct TargetEntry<'s> {
    at: TableEntry<'s>,
    /// The empty table that the arriving entry replaces.
    vacant: Option<Table<'s>>,
}

impl<'s, P: Platform> PagesPiece<'_, 's, '_, '_, P> {
    /// Moves the entries of the piece, each as a whole. Returns the number of completed bytes.
    pub(super) fn move_upper(&mut self) -> (u64, Option<MoveStop>) {
        let (all, span) = (self.piece.len, P::Arch::PMD.span());
        let mut moved = 0;
        self.piece.len = span;
        while moved < all {
            if let Err(stop) = self.move_entry() {
                return (moved, Some(stop));
            }
            moved += span;
            self.piece.source += span;
            self.piece.target += span;
        }
        (moved, None)
    }

    /// Moves one entry, or returns [`MoveStop::Piecemeal`] if its pages must move one by one.
    fn move_entry(&mut self) -> Result<(), MoveStop> {
        let (page_table, at) = (self.page_table, VirtAddr(self.piece.source));
        let found = page_table.table_below(self.from, at, Level::PMD, Ordering::Relaxed);
        let Ok(node) = found else { return Err(MoveStop::Piecemeal) };
        let from = TableEntry { table: node.table, index: P::Arch::PMD.index_of(at) };
        let entry = run::load(page_table.entries(from.table), from.index);
        self.counts.entries_descended += self.from.level.steps_to(node.level);
        self.counts.entries_read += 1;
        page_table.memory.worked(1, 0);
        match P::Arch::PMD.kind(entry) {
            Kind::Empty => Err(MoveStop::Piecemeal),
            Kind::Leaf => self.move_huge(from, entry),
            Kind::Absent => self.move_huge_absent(from, entry),
            Kind::Table => {
                // SAFETY: 1. the entry was read in the table of `from`, which is locked.
                let table = unsafe { Table::new(P::Arch::frame(entry)) };
                self.carry(from, entry, table)
            }
        }
    }

    // Always inlined: returning the result in memory costs dozens of instructions per table of a
    // move.
    #[inline(always)]
    fn target_entry(&mut self) -> Result<TargetEntry<'s>, MoveStop> {
        let page_table = self.page_table;
        let table = self.target_table(self.piece.target, Level::PMD)?;
        let index = P::Arch::PMD.index_of(VirtAddr(self.piece.target));
        let entry = run::load(page_table.entries(table), index);
        let vacant = match P::Arch::PMD.kind(entry) {
            Kind::Empty => None,
            Kind::Table => {
                // SAFETY: 1. the entry was read in this table, which is locked.
                let below = unsafe { Table::new(P::Arch::frame(entry)) };
                if page_table.entry_count(below) != 0 {
                    return Err(MoveStop::Piecemeal);
                }
                Some(below)
            }
            Kind::Leaf | Kind::Absent => return Err(MoveStop::Exists),
        };
        Ok(TargetEntry { at: TableEntry { table, index }, vacant })
    }

    #[inline(always)]
    fn mark_ends(&mut self, from: TableEntry<'s>, to: &TargetEntry<'s>) {
        self.mark(from.table);
        self.mark(to.at.table);
        if let Some(vacant) = to.vacant {
            self.mark(vacant);
        }
    }

    /// Writes the entry at the target. The entry has left the source, and its old addresses are in
    /// the gather.
    #[inline(always)]
    fn arrive(&mut self, from: TableEntry<'s>, to: &TargetEntry<'s>, entry: u64) {
        let page_table = self.page_table;
        let there = &page_table.entries(to.at.table)[to.at.index.position()];
        let Some(vacant) = to.vacant else {
            there.store(entry, Ordering::Release);
            return self.count_moved(from.table, to.at.table, 1);
        };
        // A walker may have cached the empty table under the target's address. Through that table
        // it would read the source's mappings from now on.
        there.store(0, Ordering::Release);
        self.gather.stale_tables(self.piece.target());
        page_table.flush(self.gather, self.counts);
        there.store(entry, Ordering::Release);
        let word = &page_table.entries(from.table)[from.index.position()];
        word.store(P::Arch::table(vacant.frame()).0, Ordering::Release);
        self.counts.entries_written += 4;
    }

    fn move_huge(&mut self, from: TableEntry<'s>, entry: Entry) -> Result<(), MoveStop> {
        let (page_table, memory) = (self.page_table, self.page_table.memory);
        let frames = &memory.frames;
        let head = P::Arch::frame(entry);
        let folio = if memory.is_zero(head) {
            None
        } else {
            let folio = frames.folio_of(head).filter(|folio| folio.head == head);
            Some(folio.ok_or(MoveStop::Busy)?)
        };
        let is_own = |folio: Folio| {
            let pages = folio.pages();
            frames.folio(folio).exclusive().contains_all(0, pages)
                && frames.folio(folio).mappings() == pages
        };
        let to = self.target_entry()?;
        if !folio.is_none_or(is_own) {
            return Err(MoveStop::Busy);
        }
        // SAFETY: 1. the leaf at the source, whose table is locked.
        let lock = folio.map(|folio| unsafe { lock(memory, folio) }).transpose()?;
        self.mark_ends(from, &to);
        let word = &page_table.entries(from.table)[from.index.position()];
        let old = Entry(word.swap(0, Ordering::SeqCst));
        if folio.is_some_and(|folio| frames.folio(folio).is_pinned_since()) {
            word.store(old.0, Ordering::Release);
            return Err(MoveStop::Busy);
        }
        self.gather.stale(self.piece.source(), P::Arch::PMD);
        let arrived = match folio.zip(lock) {
            Some((folio, lock)) => {
                lock.give_to(self.policy.what.owner, FolioIndex::new(self.index_at(0)));
                self.keep_content(folio);
                self.arrived(old)
            }
            None => old,
        };
        self.arrive(from, &to, arrived.0);
        page_table.move_deposits(from.table, to.at.table, 1);
        Ok(())
    }

    fn move_huge_absent(&mut self, from: TableEntry<'s>, entry: Entry) -> Result<(), MoveStop> {
        self.may_move_absent(entry)?;
        let to = self.target_entry()?;
        self.mark_ends(from, &to);
        self.page_table.entries(from.table)[from.index.position()].store(0, Ordering::Release);
        let arrived = self.arrived_absent(entry);
        self.arrive(from, &to, arrived.0);
        self.page_table.move_deposits(from.table, to.at.table, 1);
        Ok(())
    }

    /// Carries a level-1 table.
    fn carry(
        &mut self,
        from: TableEntry<'s>,
        named: Entry,
        table: Table<'s>,
    ) -> Result<(), MoveStop> {
        let page_table = self.page_table;
        let (entry_count, entries) = (page_table.entry_count(table), P::Arch::ENTRIES);
        if entry_count == 0 || entry_count < entries && !self.policy.what.allows_holes {
            return Err(MoveStop::Piecemeal);
        }
        let to = self.target_entry()?;
        self.mark_ends(from, &to);
        self.mark(table);
        let word = &page_table.entries(from.table)[from.index.position()];
        word.swap(0, Ordering::SeqCst);
        let (claimed, alike) = self.claim(table);
        page_table.memory.worked(u64::from(claimed), 0);
        self.counts.entries_read += u64::from(claimed);
        if claimed < entries {
            self.settle(table, claimed);
            word.store(named.0, Ordering::Release);
            return Err(MoveStop::Piecemeal);
        }
        self.gather.stale_tables(self.piece.source());
        self.arrive(from, &to, named.0);
        match alike {
            Some(Order::PAGE) => self.settle_singles(table),
            Some(order) => self.settle_large(table, order),
            None => self.settle(table, claimed),
        }
        self.counts.tables_moved += 1;
        Ok(())
    }

    /// Locks and renumbers the folios of a table that is out of the tree, up to the first entry
    /// that may not move, and leaves the folios locked. Returns the number of entries before that
    /// entry. Also returns the order of the folios if all have the same order, lie in the table as
    /// a whole, and are mapped by leaves that move unchanged.
    // A separate function, so that all per-page state stays in registers.
    #[inline(never)]
    fn claim(&self, table: Table<'s>) -> (u32, Option<Order>) {
        let words = self.page_table.entries(table);
        let numbered = self.policy.numbered;
        let Some(owner) = self.policy.what.owner.run_from(self.index_at(0), words.len() as u64)
        else {
            return (0, None);
        };
        let first = P::Arch::clear_contig(run::load(words, EntryIndex::FIRST), EntryIndex::FIRST);
        let large = numbered.large_order(self.number_of(first));
        let (mut at, mut alike) = (0, Some(Order::PAGE));
        if let Some(order) = large {
            at = self.claim_large(words, order, owner);
            alike = (at == words.len()).then_some(order);
        }
        while let Some(word) = words.get(at) {
            let entry = Entry(word.load(Ordering::Relaxed));
            if let Some(single) = numbered.try_lock_single(self.number_of(entry)) {
                if !single.is_free_to_move(1) {
                    // SAFETY: 1. the folio was locked above, by its number.
                    unsafe { self.unlock_head(entry) };
                    break;
                }
                single.give_to(owner, at as u64);
                at += 1;
                continue;
            }
            alike = None;
            match self.claim_other(words, EntryIndex::new(at as u32), entry) {
                Some(claimed) => at += claimed as usize,
                None => break,
            }
        }
        (at as u32, alike)
    }

    /// As `claim`, for large folios of one order. Each folio lies in the table as a whole,
    /// naturally aligned, and is mapped by leaves that move unchanged. Returns the number of
    /// claimed entries.
    #[inline(never)]
    fn claim_large(&self, words: &[AtomicU64], order: Order, owner: OwnerRun) -> usize {
        let (numbered, pages) = (self.policy.numbered, order.pages());
        let mut at = EntryIndex::FIRST;
        for run in words.chunks_exact(pages as usize) {
            let leaf = |word: &AtomicU64, index| {
                P::Arch::clear_contig(Entry(word.load(Ordering::Relaxed)), index)
            };
            let first = leaf(&run[0], at);
            let Some(large) = numbered.try_lock_large(self.number_of(first), order) else { break };
            let (mut expected, mut index) = (first.0, at);
            let mut differ = 0;
            let (eights, rest) = run.as_chunks::<8>();
            for eight in eights {
                // No iteration from folio to folio is needed: their positions are known.
                for (word, place) in eight.iter().zip(0..) {
                    let wanted = expected.wrapping_add(P::Arch::STEP * u64::from(place));
                    differ |= leaf(word, index + place).0 ^ wanted;
                }
                expected = expected.wrapping_add(P::Arch::STEP * 8);
                index += 8;
            }
            for word in rest {
                differ |= leaf(word, index).0 ^ expected;
                expected = expected.wrapping_add(P::Arch::STEP);
                index += 1;
            }
            if differ != 0 || !large.is_free_to_move(pages) {
                // SAFETY: 1. the folio was locked above, by its number.
                unsafe { self.unlock_head(first) };
                break;
            }
            large.give_to(owner, at.number().into());
            at += pages;
        }
        at.number() as usize
    }

    /// Unlocks the folios of a moved table that `claim_large` has locked.
    #[inline(never)]
    fn settle_large(&self, table: Table<'s>, order: Order) {
        let words = self.page_table.entries(table);
        let mut at = EntryIndex::FIRST;
        for run in words.chunks_exact(order.pages() as usize) {
            let leaf = P::Arch::clear_contig(Entry(run[0].load(Ordering::Relaxed)), at);
            // SAFETY: 1. `claim_large` has locked the folio by this number, and no guard of the
            // lock exists.
            if !unsafe { self.policy.numbered.unlock(self.number_of(leaf)) } {
                self.see_to_marks(leaf);
            }
            at += order.pages();
        }
    }

    /// Unlocks the single-page folios of a moved table, whose leaves have not changed.
    #[inline(never)]
    fn settle_singles(&self, table: Table<'s>) {
        for word in self.page_table.entries(table) {
            let leaf = Entry(word.load(Ordering::Relaxed));
            // SAFETY: 1. `claim` has locked the folio by this number, and no guard of the lock
            // exists.
            if !unsafe { self.policy.numbered.unlock(self.number_of(leaf)) } {
                self.see_to_marks(leaf);
            }
        }
    }

    /// Unlocks the folio whose first page the leaf maps, and wakes all waiters.
    ///
    /// # Safety
    /// 1. The piece has locked the folio by its number, and no guard of the lock exists.
    #[cold]
    pub(super) unsafe fn unlock_head(&self, leaf: Entry) {
        let frames = &self.page_table.memory.frames;
        let folio = frames.folio_of(P::Arch::frame(leaf));
        debug_assert!(folio.is_some(), "the leaf maps a page of a locked folio");
        if let Some(folio) = folio {
            // SAFETY: 1. the caller's obligation 1.
            drop(unsafe { frames.folio(folio).lock_of_batch() });
        }
    }

    /// Performs other threads' deferred work for the folio whose first page the leaf maps, and
    /// which was just unlocked. The leaf keeps the folio allocated.
    #[cold]
    pub(super) fn see_to_marks(&self, leaf: Entry) {
        let frames = &self.page_table.memory.frames;
        if let Some(folio) = frames.folio_of(P::Arch::frame(leaf)) {
            frames.folio(folio).see_to_marks();
        }
    }

    /// As `claim`, for any entry except a single page whose leaf moves unchanged. Returns the
    /// number of claimed entries.
    #[inline(never)]
    fn claim_other(&self, words: &[AtomicU64], at: EntryIndex, entry: Entry) -> Option<u32> {
        let memory = self.page_table.memory;
        let left = at.left::<P::Arch>();
        if entry.is_empty() {
            return self
                .policy
                .what
                .allows_holes
                .then(|| run::count_empty(&words[at.position()..]));
        }
        let keeps = self.policy.what.keeps_protection;
        if entry.0 & P::Arch::PRESENT == 0 {
            return match P::Arch::decode_absent(entry)? {
                Absent::Swap { exclusive: true, userfault, .. } if keeps || !userfault => {
                    Some(P::Arch::match_absent(&words[at.positions(left)]).0)
                }
                Absent::Swap { .. } | Absent::Marker(_) | Absent::ProtNone { .. } => None,
            };
        }
        let single = P::Arch::clear_contig(entry, at);
        if memory.is_zero(P::Arch::frame(single)) {
            return Some(1);
        }
        let attributes = P::Arch::attributes(single);
        let stays = if attributes.userfault {
            keeps
        } else {
            attributes.permissions.contains(Permissions::WRITE)
        };
        if !stays {
            return None;
        }
        let FolioRun { folio, number, count, .. } = self.folio_run(words, at, left, entry)?;
        // All mappings of the folio lie in the run.
        let handle = memory.frames.folio(folio);
        if handle.mappings() != count || !handle.exclusive().contains_all(number, count) {
            return None;
        }
        let index = self.index_of_folio(at.number(), number)?;
        // SAFETY: 1. the run's mappings, in a locked table.
        let lock = unsafe { handle.try_lock() }?;
        if handle.is_pinned_since() {
            return None;
        }
        lock.give_to(self.policy.what.owner, index);
        lock.leave_to_batch();
        Some(count)
    }

    /// Unlocks the folios of the first `claimed` entries. If these are not the whole table, no
    /// entry moves, and the folios get their owner and index at the source again.
    fn settle(&mut self, table: Table<'s>, claimed: u32) {
        let moves = claimed == P::Arch::ENTRIES;
        let memory = self.page_table.memory;
        let frames = &memory.frames;
        let words = self.page_table.entries(table);
        let mut at = EntryIndex::FIRST;
        while at.number() < claimed {
            let entry = run::load(words, at);
            if entry.0 & P::Arch::PRESENT == 0 {
                if moves && !entry.is_empty() {
                    let moved = P::Arch::mark_absent_soft_dirty(entry);
                    words[at.position()].store(moved.0, Ordering::Relaxed);
                }
                at += 1;
                continue;
            }
            let frame = P::Arch::frame(P::Arch::clear_contig(entry, at));
            let Some(folio) = frames.folio_of(frame) else {
                at += 1;
                continue;
            };
            // The folio is locked, and so are the tables of all entries that map it.
            let count = if folio.order == Order::PAGE { 1 } else { frames.folio(folio).mappings() };
            // SAFETY: 1. `claim` left the folio locked, and each folio of the table is visited
            // once.
            let lock = unsafe { frames.folio(folio).lock_of_batch() };
            if !moves {
                let what = self.policy.what;
                let page = (self.piece.source - what.source.0) / PAGE_SIZE + u64::from(at);
                let index = what.source_index + page;
                let index = FolioIndex::for_folio(index, frame.0 - folio.head.0);
                debug_assert!(index.is_some(), "the folio was at its index before");
                if let Some(index) = index {
                    lock.give_to(what.source_owner, index);
                }
            } else {
                self.keep_content(folio);
                if entry.0 & P::Arch::SOFT_DIRTY == 0 {
                    for word in &words[at.positions(count)] {
                        word.fetch_or(P::Arch::SOFT_DIRTY, Ordering::Relaxed);
                    }
                }
            }
            drop(lock);
            at += count;
        }
    }
}
