//! Huge leaves: split, collapsed and published. [`super::contig`] folds and unfolds contiguous
//! runs.
//!
//! Each change of a translation's size uses break-before-make: clear, invalidate, set. Without the
//! middle step a TLB may hold both sizes at once. AArch64 may answer that with a conflict abort
//! (Arm ARM DDI 0487, D8.16), and every architecture may use either size.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{
    self, Arch, Attributes, Entry, Equal, Level, Permissions, ProtectionKey, absent,
};
use crate::events::RareEvents;
use crate::platform::Platform;
use crate::stats::Counts;
use crate::tlb::Gather;

use super::locking::{Depth, Node};
use super::run;
use super::{OutOfMemory, PageTable, ReadSection, TablePool, new_table};

/// Replaces `old`, just read from `slot`, by what `change` makes of it, and returns what was there
/// with everything that the MMU added.
#[inline]
pub(crate) fn replace<A: Arch>(
    slot: &AtomicU64,
    old: Entry,
    change: impl Fn(Entry) -> Entry,
) -> Entry {
    if old.0 & A::PRESENT == 0 || A::is_saturated(old) {
        slot.store(change(old).0, Ordering::Relaxed);
        return old;
    }
    let mut current = old.0;
    while let Err(newer) = slot.compare_exchange_weak(
        current,
        change(Entry(current)).0,
        Ordering::Relaxed,
        Ordering::Relaxed,
    ) {
        current = newer;
    }
    Entry(current)
}

/// Why a leaf could not be made of the entries of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CollapseError {
    /// The entries are not all there, not of one folio in order, or not equal.
    NotUniform,
    /// No memory for the table that the new leaf has to keep on deposit.
    OutOfMemory,
}

impl<P: Platform> PageTable<'_, P> {
    /// Lets no entry cover addresses on both sides of `at`, a multiple of the page size: VMAs
    /// meet there. A huge leaf or absent entry that does is split, with the tables on deposit.
    pub(crate) fn cut(&self, at: VirtAddr) {
        let (node, _, entry) = {
            let section = ReadSection::enter(&self.memory.platform);
            self.peek(&section, at, &mut Counts::default())
        };
        let whole = at.is_aligned(node.level.span::<P::Arch>());
        if node.level > Level::PTE && !entry.is_empty() && !whole {
            let range = VirtRange::raw(at.0, at.0 + PAGE_SIZE);
            let mut cursor = self.cursor(range, Depth::Floor(Level::PTE));
            // From the deposit: the pool is not asked.
            let table = cursor.table_at(at, Level::PTE, &mut TablePool::new(self.memory));
            debug_assert!(table.is_ok(), "a huge leaf has lost its deposit");
        }
    }

    /// Writes one leaf above level 1 into an empty entry.
    pub(crate) fn publish_leaf(&self, table: Frame, index: u32, leaf: Entry) {
        self.slots(table)[index as usize].store(leaf.0, Ordering::Release);
        self.change_entry_count(table, 1, 0);
    }

    /// Replaces the huge leaf or the absent entry at `index` of `node`, whose slot begins at
    /// `base`, by a table of smaller ones, and returns the table, locked.
    pub(crate) fn split(
        &self,
        node: Node,
        index: u32,
        base: VirtAddr,
        counts: &mut Counts,
    ) -> Result<Frame, OutOfMemory> {
        let table = self.withdraw_table(node.table).ok_or(OutOfMemory)?;
        let level = node.level.below();
        self.meta(table).init(level);
        let slot = &self.slots(node.table)[index as usize];
        let old = Entry(slot.load(Ordering::Relaxed));
        counts.entries_read += 1;
        let entries = arch::entries::<P::Arch>();
        if old.0 & P::Arch::PRESENT != 0 {
            RareEvents::note(&self.memory.rare.leaf_splits);
            let old = replace::<P::Arch>(slot, old, |_| Entry::EMPTY);
            let range = VirtRange::raw(base.0, base.0 + node.level.span::<P::Arch>());
            self.invalidate_now(range, node.level, counts);
            counts.entries_written += 1;
            let first = P::Arch::leaf(P::Arch::frame(old), level, P::Arch::attributes(old));
            if level == Level::PTE {
                self.fill(table, 0, first, entries, counts);
            } else {
                let step = P::Arch::STEP << level.order::<P::Arch>().0;
                self.write_steps(table, first, step, counts);
            }
        } else {
            self.inherit_guards(node.table, table);
            let step = absent::step::<P::Arch>(old);
            let shift = level.order::<P::Arch>();
            self.write_steps(table, old, step.wrapping_shl(u32::from(shift.0)), counts);
        }
        slot.store(P::Arch::table(table).0, Ordering::Release);
        counts.entries_written += 1;
        Ok(table)
    }

    fn write_steps(&self, table: Frame, first: Entry, step: u64, counts: &mut Counts) {
        let mut entry = first;
        for slot in self.slots(table) {
            slot.store(entry.0, Ordering::Relaxed);
            entry = Entry(entry.0.wrapping_add(step));
        }
        let entries = arch::entries::<P::Arch>();
        counts.entries_written += u64::from(entries);
        self.change_entry_count(table, entries, 0);
    }

    /// Makes one leaf of the leaves that fill the level-1 table for `base`, a multiple of its
    /// span: they must be all pages, in order, of one folio of that size, with equal attributes.
    /// Accessed and dirty of the leaf are those of them all. One walk of the table, one
    /// invalidation. The caller keeps faults out of the range.
    pub(crate) fn collapse(&self, base: VirtAddr) -> Result<(), CollapseError> {
        let memory = self.memory;
        let range = VirtRange::raw(base.0, base.0 + Level::PMD.span::<P::Arch>());
        let mut counts = Counts::default();
        memory.may_wait();
        let deposit =
            new_table(memory, Level::PTE, &mut counts).ok_or(CollapseError::OutOfMemory)?;
        let mut gather = Gather::new();
        let mut cursor = self.cursor(range, Depth::Floor(Level::PTE));
        let done = collapse_locked(&mut cursor, base, deposit, &mut gather);
        drop(cursor);
        if !done {
            // SAFETY: 1. made above; 2. what was not done has not shown it to anybody.
            unsafe { super::free_table(memory, deposit, &mut counts) };
        }
        self.stats.add(&counts);
        self.finish(&mut gather);
        if done { Ok(()) } else { Err(CollapseError::NotUniform) }
    }
}

fn collapse_locked<P: Platform>(
    cursor: &mut super::cursor::Cursor<'_, '_, P>,
    base: VirtAddr,
    deposit: Frame,
    gather: &mut Gather,
) -> bool {
    let tables = cursor.tables;
    let (node, _, _) = cursor.entry_at(base);
    if node.level != Level::PTE {
        return false;
    }
    let slots = tables.slots(node.table);
    let entries = arch::entries::<P::Arch>();
    let order = Level::PMD.order::<P::Arch>();
    let first = run::load(slots, 0);
    if first.0 & P::Arch::PRESENT == 0 || tables.entry_count(node.table) != entries {
        return false;
    }
    let frame = P::Arch::frame(P::Arch::clear_contig(first, 0));
    let whole = tables.memory.frames.folio_of(frame);
    if !whole.is_some_and(|folio| folio.head == frame && folio.order == order) {
        return false;
    }
    let equal = Equal::WRITABLE | Equal::SOFT_DIRTY;
    let (count, _) = run::match_leaves::<P::Arch>(slots, 0, entries, equal, P::Arch::STEP, 0);
    cursor.counts.entries_read += u64::from(count);
    if count != entries {
        return false;
    }
    // The table hangs in the table above it, which the cursor holds: the range is its whole slot.
    let Some((parent, index)) = cursor.parent_of(base, Level::PTE) else { return false };
    let parent_slot = &tables.slots(parent.table)[index as usize];
    // Release: a reader of the empty entry finds its table locked, or the flush done.
    parent_slot.store(0, Ordering::Release);
    let range = VirtRange::raw(base.0, base.0 + Level::PMD.span::<P::Arch>());
    gather.stale_tables(range);
    tables.flush(gather, &mut cursor.counts);
    // Nobody walks the table any more: what the MMU set until now is final.
    let (_, gathered) = run::match_leaves::<P::Arch>(slots, 0, entries, equal, P::Arch::STEP, 0);
    for slot in slots {
        slot.store(0, Ordering::Relaxed);
    }
    tables.change_entry_count(node.table, 0, entries);
    let leaf = P::Arch::leaf(frame, Level::PMD, P::Arch::attributes(gathered));
    parent_slot.store(leaf.0, Ordering::Release);
    tables.deposit_table(parent.table, deposit);
    cursor.counts.entries_written += 2 + u64::from(entries);
    tables.gather_subtree(node, Level::PTE, gather, &mut cursor.counts);
    true
}

/// What a leaf of a user mapping says that was made for `permissions` and not used yet.
#[inline]
pub(crate) fn user_attributes(permissions: Permissions, key: ProtectionKey) -> Attributes {
    Attributes { permissions: permissions | Permissions::USER, key, ..Attributes::default() }
}
