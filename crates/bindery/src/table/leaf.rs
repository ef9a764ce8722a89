//! Huge leaves: splitting and publishing. [`super::contig`] folds and unfolds contiguous runs.
//!
//! Each change of a translation's size uses break-before-make: clear, invalidate, set. Without the
//! middle step a TLB may hold both sizes at once. AArch64 may raise a conflict abort in that case
//! (Arm ARM DDI 0487, D8.16), and every architecture may use either size.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{Ordering, fence};

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{
    AbsentFormat, Arch, Attributes, Entry, EntryIndex, Level, Permissions, ProtectionKey,
};
use crate::events::RareEvents;
use crate::platform::Platform;
use crate::stats::Counts;

use super::locking::Depth;
use super::run::Entries;
use super::{EntryAt, NoMemory, PageTable, Table, TableEntry, TablePool};

impl<P: Platform> PageTable<'_, P> {
    /// Splits the huge leaf or absent entry that covers addresses on both sides of `at`, a multiple
    /// of the page size at which two VMAs meet. The tables come from the deposit.
    pub(crate) fn cut(&self, at: VirtAddr) {
        let (level, entry) = {
            let section = self.read_section();
            let found = self.peek(&section, at, &mut Counts::default());
            (found.node.level, found.entry)
        };
        let whole = at.is_aligned(level.span());
        if level > Level::PTE && !entry.is_empty() && !whole {
            let range = VirtRange::raw(at.0, at.0 + PAGE_SIZE);
            // The largest entries that end at the address.
            let mut below = Level::PTE.up_to(level.below()).rev();
            let floor = below.find(|level| at.is_aligned(level.span())).unwrap_or(Level::PTE);
            let section = self.read_section();
            let mut cursor = self.cursor(&section, range, Depth::Floor(floor));
            let table = cursor.table_at(at, floor, &mut TablePool::new(self.memory));
            debug_assert!(table.is_ok(), "a huge leaf has lost its deposit");
        }
    }

    /// Writes a huge leaf, or an absent entry like it, into an empty entry above level 1.
    pub(crate) fn publish_huge(&self, at: TableEntry, entry: Entry) {
        let TableEntry { table, index } = at;
        self.entries(table)[index.position()].store(entry.0, Ordering::Release);
        self.change_entry_count(table, 1, 0);
    }

    /// Installs a table in the entry for `addr`, and returns the table locked. If the entry is
    /// empty, it gets a table of the pool; otherwise, it is split. Fails if the pool is empty and
    /// the allocator has no table immediately available.
    pub(crate) fn put_table<'s>(
        &self,
        missing: &EntryAt<P::Arch, Table<'s>>,
        addr: VirtAddr,
        counts: &mut Counts,
        pool: &mut TablePool<'_, P>,
    ) -> Result<Table<'s>, NoMemory> {
        let EntryAt { node, index, entry } = *missing;
        if !entry.is_empty() {
            return self.split(missing, addr, counts);
        }
        // SAFETY: 1. the table belongs to the caller and is stored below; it is freed after the
        // section in which the table above it was found.
        let table = unsafe { Table::new(pool.take(node.level.below(), counts)?) };
        // Release: a reader that finds the table through this entry sees an empty table.
        let word = &self.entries(node.table)[index.position()];
        word.store(P::Arch::table(table.frame()).0, Ordering::Release);
        counts.entries_written += 1;
        self.change_entry_count(node.table, 1, 0);
        Ok(table)
    }

    /// Replaces the huge leaf or the absent entry for `addr` by a table of smaller entries, and
    /// returns the table locked.
    pub(crate) fn split<'s>(
        &self,
        huge: &EntryAt<P::Arch, Table<'s>>,
        addr: VirtAddr,
        counts: &mut Counts,
    ) -> Result<Table<'s>, NoMemory> {
        let EntryAt { node, index, .. } = *huge;
        let base = addr.align_down(node.level.span());
        // SAFETY: 1. the table was on deposit and is stored below; it is freed after the section in
        // which the table above it was found.
        let table = unsafe { Table::new(self.withdraw_table(node.table).ok_or(NoMemory)?) };
        let level = node.level.below();
        // The tables with which the new leaves can be split are on deposit with the table.
        self.meta(table).init_from_deposit(level);
        let word = &self.entries(node.table)[index.position()];
        let old = Entry(word.load(Ordering::Relaxed));
        counts.entries_read += 1;
        let entries = P::Arch::ENTRIES;
        if old.0 & P::Arch::PRESENT != 0 {
            RareEvents::note(&self.memory.rare.leaf_splits);
            // A thread that reads the empty entry without the lock must see that the lock is held
            // (`look::is_under_empty_entry`): the entry is empty only for a moment.
            fence(Ordering::Release);
            let old = P::Arch::replace_entry(word, old, |_| Entry::EMPTY);
            let range = VirtRange::raw(base.0, base.0 + node.level.span());
            self.invalidate_now(range, node.level, counts);
            counts.entries_written += 1;
            let first = P::Arch::page_entry(P::Arch::frame(old), level, P::Arch::attributes(old));
            if level == Level::PTE {
                self.write_leaves(TableEntry { table, index: EntryIndex::FIRST }, first, entries);
            } else {
                let step = P::Arch::STEP << level.order().0;
                write_steps(self, table, first, step);
            }
        } else {
            self.inherit_guards(node.table, table);
            let step = P::Arch::absent_step(old);
            let shift = level.order();
            write_steps(self, table, old, step.wrapping_shl(u32::from(shift.0)));
        }
        word.store(P::Arch::table(table.frame()).0, Ordering::Release);
        counts.entries_written += u64::from(entries) + 1;
        Ok(table)
    }
}

/// Fills a new table with entries that differ by `step`.
fn write_steps<P: Platform>(
    page_table: &PageTable<'_, P>,
    table: Table<'_>,
    first: Entry,
    step: u64,
) {
    let mut entry = first;
    for word in page_table.entries(table) {
        word.store(entry.0, Ordering::Relaxed);
        entry = Entry(entry.0.wrapping_add(step));
    }
    page_table.change_entry_count(table, P::Arch::ENTRIES, 0);
}

/// The attributes of a user leaf that was created for `permissions` and has not been used.
#[inline]
pub(crate) fn user_attributes(permissions: Permissions, key: ProtectionKey) -> Attributes {
    Attributes { permissions: permissions | Permissions::USER, key, ..Attributes::default() }
}
