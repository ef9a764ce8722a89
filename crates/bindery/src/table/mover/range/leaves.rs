//! Level-1 entries of one piece, moved in runs.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{AbsentFormat, Arch, Entry, Level};
use crate::platform::Platform;
use crate::table::deposit::free_deposit;
use crate::table::detach::gather_subtree;
use crate::table::locking::Node;
use crate::table::mover::piece::{Below, Piece};
use crate::table::run::Entries;
use crate::table::{EntryAt, NoMemory, Table, TableEntry, run};

use super::{RangePiece, for_each_target};

impl<'s, P: Platform> RangePiece<'_, 's, '_, P> {
    /// The content of the source at `at`. A huge leaf that ends at `end` or before is returned; any
    /// other huge entry is split.
    pub(super) fn source(&mut self, at: u64, end: u64) -> Below<'s, P::Arch> {
        let level = self.piece.level;
        let base = at & !(level.table_span() - 1);
        if let Some((start, table)) = self.policy.source_table
            && start == base
        {
            return Below::Table(table);
        }
        let mut from = self.from;
        let table = loop {
            let huge = match self.below(from, at, level) {
                Below::Table(table) => break table,
                Below::Nothing(found) => return Below::Nothing(found),
                Below::Huge(huge) => huge,
            };
            let EntryAt { node, entry, .. } = huge;
            let leaf = entry.0 & P::Arch::PRESENT != 0;
            if leaf && node.level == Level::PMD && at == base && end - at >= node.level.span() {
                self.mark(node.table);
                return Below::Huge(huge);
            }
            let Ok(table) = self.split(&huge, at) else {
                debug_assert!(false, "a huge leaf has lost its deposit");
                return Below::Nothing(huge);
            };
            from = node.child(table);
        };
        self.policy.source_table = Some((base, table));
        self.mark(table);
        Below::Table(table)
    }

    /// Creates the tables that the target lacks, before any entry leaves the source. Fails if no
    /// table is immediately available; the tables created until then stay, empty.
    pub(super) fn preallocate_tables(&mut self) -> Result<(), NoMemory> {
        let (page_table, from, piece) = (self.page_table, self.from, self.piece);
        let mut covered = 0;
        while covered < piece.len {
            let rest = piece.after(covered);
            covered += for_each_target(page_table, from, rest, |to| self.target(to).map(|_| ()))?;
        }
        Ok(())
    }

    /// The target table for `at`, created if it is missing. Called before the entries to be moved
    /// there are cleared. Fails if no table is immediately available.
    #[inline]
    pub(super) fn target(&mut self, at: u64) -> Result<Table<'s>, NoMemory> {
        let base = at & !(self.piece.level.table_span() - 1);
        let [last, before] = self.policy.target_tables;
        match (last, before) {
            (Some((start, table)), _) | (_, Some((start, table))) if start == base => Ok(table),
            _ => self.new_target(at, base),
        }
    }

    #[inline(never)]
    fn new_target(&mut self, at: u64, base: u64) -> Result<Table<'s>, NoMemory> {
        let table = self.target_table(at, self.piece.level)?;
        self.policy.target_tables = [Some((base, table)), self.policy.target_tables[0]];
        self.mark(table);
        Ok(table)
    }

    /// Creates the one or two target tables for `count` pages from `at` on, where missing.
    pub(super) fn targets(&mut self, at: u64, count: u32) -> Result<(), NoMemory> {
        self.target(at + u64::from(count - 1) * PAGE_SIZE)?;
        self.target(at).map(|_| ())
    }

    /// Moves level-1 entries. If no table is immediately available, the preceding entries have
    /// moved and the rest is unchanged.
    pub(super) fn move_leaves(&mut self) -> Result<(), NoMemory> {
        let Piece { source, target, len, .. } = self.piece;
        let contig_mask = (u64::from(P::Arch::CONTIG_ENTRIES) << PAGE_SHIFT) - 1;
        let congruent = (source ^ target) & contig_mask == 0;
        let mut offset = 0;
        while offset < len {
            let whole = self.page_table.reach.longest_run() > 1;
            let end = if whole { source + len } else { source + offset };
            let table = match self.source(source + offset, end) {
                Below::Table(table) if self.page_table.entry_count(table) > 0 => table,
                Below::Table(_) => {
                    let last = (source + offset) | (P::Arch::PMD.span() - 1);
                    offset = last + 1 - source;
                    continue;
                }
                Below::Nothing(empty) => {
                    offset = empty.end(source + offset) - source;
                    continue;
                }
                Below::Huge(leaf) => {
                    self.targets(target + offset, P::Arch::ENTRIES)?;
                    self.scatter_huge(leaf, (offset >> PAGE_SHIFT) as u32);
                    offset += P::Arch::PMD.span();
                    continue;
                }
            };
            let from = P::Arch::PTE.index_of(VirtAddr(source + offset));
            let to = P::Arch::PTE.index_of(VirtAddr(target + offset));
            let left = (len - offset) >> PAGE_SHIFT;
            let count = u64::from(from.left::<P::Arch>()).min(left) as u32;
            // No target table was preallocated for empty entries: the other entries of this table
            // may have arrived in this very move, whose target can end in the source's last table.
            let vacant = run::count_empty(&self.page_table.entries(table)[from.positions(count)]);
            if vacant > 0 {
                self.counts.entries_read += u64::from(vacant);
                offset += u64::from(vacant) * PAGE_SIZE;
                continue;
            }
            let table_of_target = self.target(target + offset)?;
            let from = TableEntry { table, index: from };
            let page = (offset >> PAGE_SHIFT) as u32;
            let moved = if congruent {
                let count = count.min(to.left::<P::Arch>());
                let to = TableEntry { table: table_of_target, index: to };
                self.move_congruent(from, to, page, count);
                count
            } else {
                let count = count.min(self.page_table.reach.longest_run());
                self.move_shifted(from, count, page)?
            };
            offset += u64::from(moved) * PAGE_SIZE;
        }
        Ok(())
    }

    /// Moves a huge leaf to an address where no huge leaf is possible, as single pages that are
    /// written directly at their new addresses. No break-before-make is needed, because the old
    /// address stays empty.
    fn scatter_huge(&mut self, leaf: EntryAt<P::Arch, Table<'s>>, page: u32) {
        let holder = leaf.node.table;
        let word = &self.page_table.entries(holder)[leaf.index.position()];
        let old = P::Arch::replace_entry(word, leaf.entry, |_| Entry::EMPTY);
        self.counts.entries_read += 1;
        self.counts.entries_written += 1;
        self.page_table.change_entry_count(holder, 0, 1);
        self.gather.stale(self.source_pages(page, P::Arch::ENTRIES), P::Arch::PMD);
        free_deposit(self.page_table.memory, self.locks, holder, self.counts);
        let first = P::Arch::page_entry(P::Arch::frame(old), Level::PTE, P::Arch::attributes(old));
        self.arrive(first, P::Arch::ENTRIES, page);
    }

    /// Unfolds the contiguous runs that the ends of a run of `count` entries from page `page` on
    /// would divide.
    fn uncut_contigs(&mut self, from: TableEntry<'s>, page: u32, count: u32) {
        let (TableEntry { table, index: first }, size) = (from, P::Arch::CONTIG_ENTRIES);
        let end = first + count;
        let edges = [
            (0, first.offset_in(size) != 0 || count < size),
            (count - 1, end.offset_in(size) != 0),
        ];
        for (at, cut) in edges {
            let index = first + at;
            if cut && P::Arch::is_contig(run::load(self.page_table.entries(table), index)) {
                let at = VirtAddr(self.source_at(page + at));
                self.page_table.unfold(TableEntry { table, index }, at, self.counts);
            }
        }
    }

    /// Moves `count` entries from page `page` on, in parts of the maximum run length. Contiguous
    /// runs among them stay contiguous runs.
    pub(super) fn move_congruent(
        &mut self,
        source: TableEntry<'s>,
        target: TableEntry<'s>,
        page: u32,
        count: u32,
    ) {
        let longest = self.page_table.reach.longest_run().min(count);
        let from = &self.page_table.entries(source.table)[source.index.positions(count)];
        let to = &self.page_table.entries(target.table)[target.index.positions(count)];
        (self.policy.empty, self.policy.absent) = (0, 0);
        let mut done = 0;
        for (part, there) in from.chunks(longest as usize).zip(to.chunks(longest as usize)) {
            if P::Arch::CONTIG_ENTRIES > 1 {
                let index = source.index + done;
                let length = part.len() as u32;
                self.uncut_contigs(TableEntry { index, ..source }, page + done, length);
                done += length;
            }
            self.move_run(part, there);
        }
        let absent = self.policy.absent;
        if absent > 0 {
            self.page_table.inherit_guards(source.table, target.table);
        }
        let moved = count - self.policy.empty;
        self.counts.entries_read += u64::from(count);
        if moved > 0 {
            self.count_moved(source.table, target.table, moved);
        }
        if moved > absent {
            self.stale_pages(page, count);
        }
    }

    /// Moves a run. The only distinction is whether the MMU may still write to an entry.
    #[inline]
    fn move_run(&mut self, from: &[AtomicU64], to: &[AtomicU64]) {
        if from.len() < 4 {
            return self.take_each(from, to);
        }
        let (rest, rest_there) = self.move_chunks::<8>(from, to);
        let (rest, rest_there) = self.move_chunks::<4>(rest, rest_there);
        self.take_each(rest, rest_there);
    }

    /// Moves the entries that form whole chunks and returns the remaining entries.
    #[inline]
    fn move_chunks<'w, const N: usize>(
        &mut self,
        from: &'w [AtomicU64],
        to: &'w [AtomicU64],
    ) -> (&'w [AtomicU64], &'w [AtomicU64]) {
        let (chunks, rest) = from.as_chunks::<N>();
        let (chunks_there, rest_there) = to.as_chunks::<N>();
        for (words, there) in chunks.iter().zip(chunks_there) {
            let entries = words.each_ref().map(|word| Entry(word.load(Ordering::Relaxed)));
            // One branch for all entries: nearly all are saturated, and soft-dirty since their
            // first write, so they move unchanged.
            if const { P::Arch::SATURATED.with(P::Arch::SOFT_DIRTY) }.are(entries) {
                for ((word, there), entry) in words.iter().zip(there).zip(entries) {
                    word.store(0, Ordering::Relaxed);
                    there.store(entry.0, Ordering::Relaxed);
                }
            } else {
                self.take_each(words, there);
            }
        }
        (rest, rest_there)
    }

    fn take_each(&mut self, from: &[AtomicU64], to: &[AtomicU64]) {
        for (word, there) in from.iter().zip(to) {
            self.take(word, there, Entry(word.load(Ordering::Relaxed)));
        }
    }

    /// Moves an entry that is empty, absent, or still subject to changes by the MMU. No TLB holds
    /// an absent entry, so its move needs no flush.
    fn take(&mut self, word: &AtomicU64, there: &AtomicU64, entry: Entry) {
        let moved = if entry.is_empty() {
            self.policy.empty += 1;
            return;
        } else if entry.0 & P::Arch::PRESENT == 0 {
            self.policy.absent += 1;
            word.store(0, Ordering::Relaxed);
            P::Arch::mark_absent_soft_dirty(entry).0
        } else {
            P::Arch::replace_entry(word, entry, |_| Entry::EMPTY).0 | P::Arch::SOFT_DIRTY
        };
        there.store(moved, Ordering::Relaxed);
    }

    /// Detaches the tables that `cleared` covers completely, since all their entries have moved.
    pub(super) fn detach_emptied(
        &mut self,
        node: Node<P::Arch, Table<'s>>,
        base: VirtAddr,
        cleared: VirtRange,
    ) {
        let piece = self.piece;
        if node.level <= piece.level {
            return;
        }
        let page_table = self.page_table;
        let span = node.level.span();
        let Some(own) = VirtRange::from_len(base, node.level.table_span()) else {
            return;
        };
        // Within the cleared range, only the moved part has tables.
        let part = own.intersection(piece.source());
        if part.is_empty() {
            return;
        }
        let first = node.level.index_of(part.start());
        let last = node.level.index_of(VirtAddr(part.end().0 - 1));
        for index in first.up_to(last + 1) {
            if page_table.entry_count(node.table) == 0 {
                break;
            }
            let Some(table) = page_table.child_of(node, index) else {
                continue;
            };
            let start = base.offset(u64::from(index) * span);
            let below = VirtRange::raw(start.0, start.0 + span);
            let child = node.child(table);
            if !cleared.covers(below) {
                self.detach_emptied(child, start, cleared);
                continue;
            }
            page_table.entries(node.table)[index.position()].store(0, Ordering::Release);
            page_table.change_entry_count(node.table, 0, 1);
            self.counts.entries_written += 1;
            // Nothing was mapped beyond the source, so no walker caches anything below this table.
            self.gather.stale_tables(below.intersection(piece.source()));
            gather_subtree(page_table, child, piece.level, self.gather, self.counts);
        }
    }
}
