//! Drops the mappings and swap slots of zapped entries after the flush: suspended entries of tables
//! that stay in the tree, and all entries of detached tables.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;
use crate::addr::{Frame, Order, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, EntryIndex, Equal, Kind, Level};
use crate::folio::{Folio, OwnerKind};
use crate::frame::{FrameRange, FreeBatch};
use crate::memory::{absent_limit, shown_limit, unmap_frames, unmap_pages, unmap_shown};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::swap::{SlotRun, after_unmapping};

use super::cursor::Cursor;
use super::deposit::free_deposit_held;
use super::locking::Node;
use super::run::{self, Entries};
use super::zap_few::LockedTable;
use super::zap_pages::{drop_shared_pages, drop_single_pages};

/// Drops the mappings of zapped entries.
pub(super) struct RmapZap<'d, 'm, P: Platform> {
    memory: &'m Memory<P>,
    batch: &'d mut FreeBatch<'m, P>,
    counts: &'d mut Counts,
    /// The bits that the entries lack. Suspended entries lack the valid bit; they are cleared
    /// because their table stays in the tree. Entries of a detached table lack nothing and are not
    /// changed.
    missing: u64,
}

impl<'d, 'm, P: Platform> RmapZap<'d, 'm, P> {
    /// Drops and clears suspended entries.
    #[inline]
    fn suspended(
        memory: &'m Memory<P>,
        batch: &'d mut FreeBatch<'m, P>,
        counts: &'d mut Counts,
    ) -> Self {
        Self { memory, batch, counts, missing: P::Arch::PRESENT }
    }

    /// Drops the mappings of detached tables' entries, without changing the entries.
    #[inline]
    pub(super) fn detached(
        memory: &'m Memory<P>,
        batch: &'d mut FreeBatch<'m, P>,
        counts: &'d mut Counts,
    ) -> Self {
        Self { memory, batch, counts, missing: 0 }
    }

    /// Drops and clears the suspended entries of `range` in the tables from `node` downwards;
    /// `node` starts at `base`.
    ///
    /// # Safety
    /// 1. The caller holds the locks of those of the tables that overlap `range`.
    /// 2. Suspended entries in `range` were flushed.
    unsafe fn range(&mut self, node: Node<P::Arch>, base: VirtAddr, range: VirtRange) {
        let Some(span) = VirtRange::from_len(base, node.level.table_span()) else {
            return;
        };
        let part = range.intersection(span);
        if part.is_empty() {
            return;
        }
        if node.level == Level::PTE {
            // SAFETY: 1. and 2. the caller's obligations 1 and 2.
            unsafe { self.leaves_in(node.table, part) };
            return;
        }
        let first = node.level.index_of(part.start());
        let last = node.level.index_of(VirtAddr(part.end().0 - 1));
        let meta = self.memory.frames.table(node.table);
        for index in first.up_to(last + 1) {
            // SAFETY: 1. a table, according to the entry above it or to the cursor; 2. the caller's
            // obligation 1.
            let word = unsafe { &self.memory.table_entries(node.table)[index.position()] };
            let entry = Entry(word.load(Ordering::Relaxed));
            let start = VirtAddr(base.0 + u64::from(index) * node.level.span());
            match node.level.kind(entry) {
                Kind::Table => {
                    let child = node.child(P::Arch::frame(entry));
                    // SAFETY: 1. and 2. the caller's obligations 1 and 2.
                    unsafe { self.range(child, start, range) };
                }
                Kind::Absent => {
                    word.store(0, Ordering::Relaxed);
                    self.counts.entries_written += 1;
                    meta.change_entry_count(0, 1);
                    // SAFETY: 1. the caller's obligation 1.
                    unsafe { free_deposit_held(self.memory, node.table, self.counts) };
                    // SAFETY: 1. cleared above; 2. its suspension was flushed.
                    unsafe { self.huge(Entry(entry.0 | self.missing), node.level) };
                }
                Kind::Empty | Kind::Leaf => {}
            }
        }
    }

    /// Drops and clears the suspended entries of `part`, which lies within the span of a level-1
    /// table.
    ///
    /// # Safety
    /// 1. The caller holds the table's lock.
    /// 2. Suspended entries of `part` were flushed.
    unsafe fn leaves_in(&mut self, table: Frame, part: VirtRange) {
        if part.is_empty() {
            return;
        }
        let first = P::Arch::PTE.index_of(part.start());
        let last = P::Arch::PTE.index_of(VirtAddr(part.end().0 - 1));
        // SAFETY: 1. a table of leaves, locked (the caller's obligation 1). 2. the caller's
        // obligation 2.
        let dropped = unsafe { self.leaves(table, first..last + 1) };
        self.memory.frames.table(table).change_entry_count(0, dropped);
    }

    /// Drops all entries of a detached table that do not refer to tables. Readers may still see the
    /// entries and treat them as hints. The entry count shows when the remaining entries are empty.
    ///
    /// # Safety
    /// 1. The table was detached and flushed, and only the caller holds it.
    pub(super) unsafe fn contents(&mut self, table: Frame) {
        let meta = self.memory.frames.table(table);
        let level = meta.level();
        if level == Level::PTE {
            let first = EntryIndex::FIRST;
            // SAFETY: 1. and 2. a table of leaves, detached and flushed (obligation 1).
            unsafe { self.leaves(table, first..first + P::Arch::ENTRIES) };
            return;
        }
        let mut entry_count = meta.entry_count();
        // SAFETY: 1. a table, by its metadata; 2. the caller's obligation 1.
        for word in unsafe { self.memory.table_entries(table) } {
            if entry_count == 0 {
                break;
            }
            self.counts.entries_read += 1;
            let entry = Entry(word.load(Ordering::Relaxed));
            match level.kind(entry) {
                Kind::Empty | Kind::Table => continue,
                // SAFETY: 1. and 2. the caller's obligation 1: the entry disappears with the table.
                Kind::Leaf => unsafe { self.huge(entry, level) },
                // The whole deposit is freed below. SAFETY: 1. and 2. as above.
                Kind::Absent => unsafe { self.absent(level, entry, 1) },
            }
            entry_count -= 1;
        }
        // SAFETY: 1. the caller's obligation 1.
        while unsafe { free_deposit_held(self.memory, table, self.counts) } {}
    }

    /// Drops the mapping of a huge leaf.
    ///
    /// # Safety
    /// 1. and 2. As [`unmap_pages`].
    unsafe fn huge(&mut self, leaf: Entry, level: Level<P::Arch>) {
        let pages = level.order().pages();
        // SAFETY: 1. and 2. the caller's obligations 1 and 2.
        unsafe { unmap_pages(self.memory, leaf, pages, self.batch, self.counts) };
    }

    /// Drops the mappings of the level-1 leaves and absent entries of `indices`. Returns the number
    /// of entries.
    ///
    /// # Safety
    /// 1. `table` is a level-1 table that the caller has locked, or that was detached and only the
    ///    caller holds.
    /// 2. Suspended leaves of `indices`, and the leaves of a detached table, were flushed.
    unsafe fn leaves(&mut self, table: Frame, indices: Range<EntryIndex>) -> u32 {
        let (memory, missing) = (self.memory, self.missing);
        let entry_count = memory.frames.table(table).entry_count();
        // SAFETY: 1. and 2. the caller's obligation 1.
        let entries = unsafe { &memory.table_entries(table)[..indices.end.position()] };
        let (mut index, mut dropped) = (indices.start, 0);
        while dropped < entry_count
            && let Some(word) = entries.get(index.position())
        {
            let raw = word.load(Ordering::Relaxed);
            if raw == 0 {
                index += run::count_empty_ahead(&entries[index.position()..]);
                continue;
            }
            let entry = Entry(raw | missing);
            let count = if entry.0 & P::Arch::PRESENT != 0 {
                // SAFETY: 1. and 2. the caller's obligations 1 and 2.
                unsafe { self.run(entries, index, entry) }
            } else {
                let limit = (entries.len() as u32 - index.number()).min(entry_count - dropped);
                // SAFETY: 1. and 2. as for the leaves.
                unsafe { self.absent_run(entries, index, limit) }
            };
            if missing != 0 {
                for word in &entries[index.positions(count)] {
                    word.store(0, Ordering::Relaxed);
                }
                self.counts.entries_written += u64::from(count);
            }
            dropped += count;
            index += count;
        }
        self.counts.entries_read += u64::from(index - indices.start);
        // Counts all entries as anonymous pages, the most common kind. `run` has compensated for
        // other kinds.
        self.counts.unmapped(OwnerKind::Anonymous, dropped);
        dropped
    }

    /// Drops the run of leaves that starts at `index` with `entry`. Returns the number of leaves.
    /// The caller counts every page as anonymous; this function compensates for other kinds.
    ///
    /// # Safety
    /// 1. The caller removes the entries before other threads see the table again.
    /// 2. No TLB still holds translations of the entries.
    #[inline]
    unsafe fn run(&mut self, entries: &[AtomicU64], index: EntryIndex, entry: Entry) -> u32 {
        let (memory, missing) = (self.memory, self.missing);
        let entry = P::Arch::clear_contig(entry, index);
        let frame = P::Arch::frame(entry);
        let Some(folio) = memory.frames.folio_of(frame) else {
            return self.without_folio(entries, index, entry);
        };
        self.counts.folios_touched += 1;
        if folio.order == Order::PAGE {
            // The common case. A page that its object has dropped may also be freed here; the page
            // still counts as one of the object's, as it did when it was mapped. SAFETY: 1. and 2.
            // the caller's obligations 1 and 2, of this entry.
            if unsafe { memory.frames.folio(folio).free_anonymous_into(self.batch, 1) } {
                // Single-page folios usually come in sequences.
                let rest = &entries[index.position() + 1..];
                // SAFETY: 1. and 2. the caller's obligations 1 and 2, of these entries.
                let more = unsafe { drop_single_pages(memory, rest, missing, self.batch) };
                self.counts.folios_touched += u64::from(more);
                return 1 + more;
            }
            if memory.frames.folio(folio).is_anonymous() {
                // After a fork, pages that another process also maps come in sequences too.
                let rest = &entries[index.position()..];
                // SAFETY: 1. and 2. the caller's obligations 1 and 2, of these entries.
                let count = unsafe { drop_shared_pages(memory, rest, missing) };
                if count > 0 {
                    self.counts.folios_touched += u64::from(count) - 1;
                    return count;
                }
            }
        }
        let left = folio.head.0 + folio.pages() - frame.0;
        let limit = left.min(entries.len() as u32 - index.number());
        let entries = &entries[..(index + limit).position()];
        // The folio is freed if it has no other mappings, so its accessed and dirty bits do not
        // matter.
        let last = folio.order > Order::PAGE
            && memory.frames.folio(folio).is_mapped_and_held(limit, 0)
            && P::Arch::are_leaves(&entries[index.position()..], index, P::Arch::STEP, missing);
        // SAFETY: 1. and 2. the caller's obligations 1 and 2, of `limit` entries.
        if last && unsafe { memory.frames.folio(folio).free_anonymous_into(self.batch, limit) } {
            return limit;
        }
        // SAFETY: 1. and 2. passed on; nothing was dropped.
        unsafe { self.shared(entries, index, folio, entry) }
    }

    /// Drops the mappings and swap slots of the `count` absent entries of a run, which has the
    /// combined bits of `first`.
    ///
    /// # Safety
    /// 1. and 2. As [`RmapZap::run`].
    #[inline]
    unsafe fn absent(&mut self, level: Level<P::Arch>, first: Entry, count: u32) {
        let (memory, pages) = (self.memory, count << level.order().0);
        match P::Arch::decode_absent(first) {
            Some(Absent::ProtNone { frame, dirty, .. }) => {
                let frames = FrameRange { first: frame, count: pages };
                // SAFETY: 1. and 2. the caller's obligations 1 and 2.
                unsafe { unmap_frames(memory, frames, dirty, self.batch, self.counts) };
            }
            Some(Absent::Swap { device, slot, .. }) => {
                self.counts.swap_pages = self.counts.swap_pages.wrapping_sub(u64::from(pages));
                SlotRun { area: device, first: slot, count: pages }.release(memory);
            }
            Some(Absent::Marker(_)) | None => {}
        }
    }

    /// As [`RmapZap::run`], for the absent entries from `index` on, at most `limit`.
    ///
    /// # Safety
    /// 1. and 2. As [`RmapZap::run`].
    // Out of line, because the caller's registers are for leaves.
    #[inline(never)]
    unsafe fn absent_run(&mut self, entries: &[AtomicU64], index: EntryIndex, limit: u32) -> u32 {
        let (count, first) = absent_run(self.memory, entries, index, limit);
        self.counts.mapped(OwnerKind::Anonymous, count);
        // SAFETY: 1. and 2. passed on.
        unsafe { self.absent(Level::PTE, first, count) };
        count
    }

    /// As [`RmapZap::run`], for zero pages or for the embedder's frames.
    #[inline(never)]
    fn without_folio(&mut self, entries: &[AtomicU64], index: EntryIndex, entry: Entry) -> u32 {
        let frame = P::Arch::frame(entry);
        let mut count = 1;
        if !self.memory.is_zero(frame) {
            let (equal, step) = (Equal::empty(), P::Arch::STEP);
            let limit = shown_limit(self.memory, frame, entries.len() as u32 - index.number());
            let entries = &entries[index.positions(limit)];
            (count, _) = P::Arch::match_leaves(entries, index, equal, step, self.missing);
            unmap_shown(self.memory, FrameRange { first: frame, count });
        }
        self.counts.mapped(OwnerKind::Anonymous, count);
        count
    }

    /// Drops the mappings of `folio` from `index` up to the end of `entries` at most. The folio has
    /// other mappings or references. `entry` is the first entry, without the contiguous bit.
    ///
    /// # Safety
    /// 1. and 2. As [`RmapZap::run`].
    #[inline(never)]
    unsafe fn shared(
        &mut self,
        entries: &[AtomicU64],
        index: EntryIndex,
        folio: Folio,
        entry: Entry,
    ) -> u32 {
        let (memory, missing) = (self.memory, self.missing);
        let limit = entries.len() as u32 - index.number();
        let (mut count, mut first) = (limit, entry);
        if limit > 1 {
            let (equal, step) = (Equal::empty(), P::Arch::STEP);
            let entries = &entries[index.positions(limit)];
            (count, first) = P::Arch::match_leaves(entries, index, equal, step, missing);
        }
        let owner = memory.frames.folio(folio).owner_kind();
        if owner != OwnerKind::Anonymous {
            self.counts.mapped(OwnerKind::Anonymous, count);
            self.counts.unmapped(owner, count);
        }
        let dirty = || P::Arch::attributes(first).dirty;
        // SAFETY: 1. and 2. the caller's obligations 1 and 2.
        let freed = unsafe { memory.frames.folio(folio).unmap_into(self.batch, count, dirty) };
        after_unmapping(memory, self.batch, folio, freed);
        count
    }
}

/// Phase 2: releases the pages of the suspended entries in a part of the cursor's range and clears
/// the entries.
///
/// # Safety
/// 1. The suspended entries of `part` were flushed, with the cursor's locks held since.
pub(super) unsafe fn drop_suspended<P: Platform>(cursor: &mut Cursor<'_, '_, P>, part: VirtRange) {
    let (memory, node) = (cursor.page_table.memory, cursor.cover());
    let base = cursor.range().start().align_down(node.level.table_span());
    let mut batch = memory.free_batch();
    let mut zap = RmapZap::suspended(memory, &mut batch, &mut cursor.counts);
    if node.level == Level::PTE {
        // SAFETY: 1. the cursor holds the lock of the table, which spans its range. 2. the caller's
        // obligation 1.
        unsafe { zap.leaves_in(node.table.frame(), part) };
        return;
    }
    let node = Node { table: node.table.frame(), level: node.level };
    // SAFETY: 1. the cursor holds the locks of the tables of its range, from this one down. 2. the
    // caller's obligation 1.
    unsafe { zap.range(node, base, part) };
}

/// As [`drop_suspended`], for the entries `leaves` of a table that is locked without a cursor.
///
/// # Safety
/// 1. As for [`drop_suspended`], with the lock of `locked`.
#[inline(always)]
pub(super) unsafe fn drop_suspended_few<P: Platform>(
    locked: &mut LockedTable<'_, '_, P>,
    leaves: Range<EntryIndex>,
) {
    let (memory, table) = (locked.page_table().memory, locked.table().frame());
    let mut batch = memory.free_batch();
    let mut zap = RmapZap::suspended(memory, &mut batch, &mut locked.counts);
    // SAFETY: 1. a table of leaves, which is locked while `locked` exists. 2. the caller's
    // obligation 1.
    let dropped = unsafe { zap.leaves(table, leaves) };
    memory.frames.table(table).change_entry_count(0, dropped);
}

/// The run of absent entries from `index` on, of at most `limit` entries, and its first entry with
/// the dirty bits of all of them.
#[inline(never)]
pub(super) fn absent_run<P: Platform>(
    memory: &Memory<P>,
    entries: &[AtomicU64],
    index: EntryIndex,
    limit: u32,
) -> (u32, Entry) {
    let first = run::load(entries, index);
    if P::Arch::is_prot_none(first) {
        let limit = absent_limit(memory, first, limit);
        return P::Arch::match_absent(&entries[index.positions(limit)]);
    }
    // Apart, because other absent entries have no bits to gather, which the loop then leaves out.
    let (count, _) = P::Arch::match_absent(&entries[index.positions(limit)]);
    (count, first)
}

/// Drops the mappings and swap slots of the `count` absent entries of a run, which has the combined
/// bits of `first`. The deposits of the entries stay.
///
/// # Safety
/// 1. The caller removes the entries before other threads see the table again.
/// 2. No TLB still holds translations of the entries.
pub(super) unsafe fn release_absent<P: Platform>(
    memory: &Memory<P>,
    level: Level<P::Arch>,
    first: Entry,
    count: u32,
    counts: &mut Counts,
) {
    let mut batch = memory.free_batch();
    // SAFETY: 1. and 2. the caller's obligations 1 and 2.
    unsafe { RmapZap::detached(memory, &mut batch, counts).absent(level, first, count) };
}
