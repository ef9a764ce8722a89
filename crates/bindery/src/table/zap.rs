//! Unmapping.
//!
//! A table that the range covers whole is detached by clearing the one entry that names it. Its
//! contents are dropped later, after the flush, when no walker can reach it. So unmapping 1 GiB
//! writes one entry while locks are held, and needs no room to remember 262,144 pages.
//!
//! ```text
//! range      |  edge  |        whole tables        | edge |
//! phase 1    | suspend|  detach: one entry each    |suspend    under the locks
//! flush      |---------------- once ----------------------|    under the locks
//! phase 2    |  drop  |                            | drop |    under the locks
//! finish              |       drop and free        |           without locks
//! ```
//!
//! At the edges, where the table stays, entries are *suspended*: they lose their valid bit and keep
//! all others. So the MMU no longer sees them, no memory is needed to remember them, and the second
//! phase finds in them what to free. All other threads keep out, because the table's lock is held
//! throughout.
//!
//! One hold of the locks serves a bounded number of entries ([`super::locking`]). A longer range,
//! or one with many tables at its edges, takes several holds, each with its own flush.
//!
//! The flush comes before the locks are released, with edges or without ([`crate::tlb`]): a
//! detached table leaves an empty entry, from which other threads conclude that nothing is mapped.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;
use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Entry, Equal, Kind, absent};
use crate::frame::{Folio, FreeBatch, OwnerKind, meta};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::swap::SlotRun;
use crate::tlb::Gather;

use super::cursor::{Chunks, Cursor, Whole};
use super::locking::{Depth, LockTree, Node};
use super::run::{self, Run, What};
use super::stray::{mark_children, mark_subtree_stray};
use super::{OutOfMemory, PageTable, ReadSection, free_table, level_of, link};

/// When the TLBs forget what is unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flush {
    /// Before the locks of the tables are released.
    BeforeUnlock,
    /// When the gather is finished, once for everything: no CPU has the root loaded or will load it,
    /// and no reverse map leads here any more.
    AtEnd,
}

impl<P: Platform> PageTable<'_, P> {
    /// Unmaps everything in `range`, and frees the tables that `freeable` covers, the range with what
    /// is free around it. They end up in the gather, flushed; the rest is given back already. The
    /// caller keeps faults out of the range.
    ///
    /// Reads the runs of the edges and one entry for each whole table. Fails only where a huge
    /// leaf that must be split has no deposit; the runs before it are unmapped then.
    pub(crate) fn zap(
        &self,
        range: VirtRange,
        freeable: VirtRange,
        flush: Flush,
        gather: &mut Gather,
    ) -> Result<(), OutOfMemory> {
        if !self.reach.takes_tables() {
            // The baseline looks at every leaf first, and finds the tables empty afterwards.
            let mut chunks = Chunks::of(range);
            while let Some(mut cursor) = chunks.next(self, Depth::Floor(1), None) {
                zap_locked(&mut cursor, range, Whole::Enter, flush, gather)?;
            }
        }
        let mut left = freeable;
        loop {
            // Mostly the whole span: one entry detaches a table with all that hangs in it. The gather's
            // own marks are flushed with the rest.
            let mut cursor = self.cursor_beside(left, Depth::Edges, Some(&*gather));
            zap_locked(&mut cursor, range, Whole::Yield, flush, gather)?;
            left = VirtRange::raw(cursor.range().end().0, freeable.end().0);
            if left.is_empty() {
                return Ok(());
            }
        }
    }

    /// Detaches the tables for `addr` that are empty, from the lowest up: each is locked again from
    /// one level higher and looked at again, since a fault may have filled it in between.
    pub(crate) fn prune(&self, addr: VirtAddr, gather: &mut Gather) {
        for level in 2..=P::Arch::LEVELS {
            let span = arch::span::<P::Arch>(level);
            let Some(slot) = VirtRange::from_len(addr.align_down(span), span) else { return };
            let mut cursor = self.cursor(slot, Depth::Floor(level - 1));
            let Some((node, index)) = cursor.parent_of(addr, level - 1) else { continue };
            let entry = run::load(self.slots(node.table), index);
            if arch::kind::<P::Arch>(entry, level) != Kind::Table {
                continue;
            }
            let table = P::Arch::frame(entry);
            if self.live(table) > 0 {
                return;
            }
            let what = What::Table(table);
            let run = Run { at: slot.start(), node, index, count: 1, what };
            self.detach(&run, table, slot, Some(level - 1), gather, &mut cursor.counts);
            // Under the lock: the neighbour's next fault may install another table in its place, and
            // no walker may then remember the old one.
            self.flush(gather, &mut cursor.counts);
        }
    }

    /// Detaches the table of `run`, in which at most `mapped` was mapped; it is freed when the
    /// gather is finished. With `held`, tables at that level and above are locked by the caller, and
    /// all are marked. Otherwise the table of the run alone is, and those below it are later, when no
    /// lock is held any more but before their entries are dropped: a thread that locks one of them
    /// until then finds that it is not in the tree, and the present holder of a lock is waited for.
    pub(super) fn detach(
        &self,
        run: &Run,
        table: Frame,
        mapped: VirtRange,
        held: Option<u8>,
        gather: &mut Gather,
        counts: &mut Counts,
    ) {
        // Release: who reads the entry as empty finds its table locked, or the flush done.
        self.slots(run.node.table)[run.index as usize].store(0, Ordering::Release);
        counts.entries_written += 1;
        self.change_live(run.node.table, 0, 1);
        // Where nothing was mapped, there was no table for a walker to remember.
        gather.stale_tables(run.range::<P::Arch>().intersection(mapped));
        let node = Node { table, level: run.node.level - 1 };
        if let Some(held) = held {
            return self.gather_subtree(node, held, gather, counts);
        }
        self.lock(table);
        self.mark_stray(table);
        self.unlock(table);
        counts.tables_locked += 1;
        self.memory.worked(0, 1);
        if node.level == 1 {
            gather_table(self.memory, gather, table);
        } else {
            let next = gather.unscanned.replace(table).map_or(meta::NONE, |next| next.0);
            self.meta(table).next.store(next, Ordering::Relaxed);
        }
    }

    /// Marks what hangs in the detached tables, and puts all of it on the list of detached ones. Called
    /// without locks and outside of read sections.
    pub(super) fn gather_detached(&self, gather: &mut Gather, counts: &mut Counts) {
        while let Some(table) = gather.unscanned {
            gather.unscanned = link(self.meta(table).next.load(Ordering::Relaxed));
            let node = Node { table, level: level_of(self.meta(table)) };
            self.gather_below(node, gather, counts);
        }
    }

    fn gather_below(&self, node: Node, gather: &mut Gather, counts: &mut Counts) {
        let level = node.level - 1;
        let children = {
            let _section = ReadSection::enter(&self.memory.platform);
            mark_children(self, node, &mut |child| {
                self.memory.worked(1, 1);
                if level == 1 {
                    gather_table(self.memory, gather, child);
                }
            })
        };
        if level > 1 {
            // Nobody changes the entries of a table that is marked.
            for index in 0..arch::entries::<P::Arch>() {
                if let Some(table) = self.child(node.table, node.level, index) {
                    self.gather_below(Node { table, level }, gather, counts);
                }
            }
        }
        counts.entries_descended += u64::from(children);
        counts.tables_locked += u64::from(children);
        // They are on the list themselves.
        self.change_live(node.table, 0, children);
        gather_table(self.memory, gather, node.table);
    }

    /// Marks the detached table of `node` and all below it, and puts each on the gather's list, so
    /// that dropping them is no search. Tables at `held` and above are locked by the caller.
    pub(crate) fn gather_subtree(
        &self,
        node: Node,
        held: u8,
        gather: &mut Gather,
        counts: &mut Counts,
    ) {
        mark_subtree_stray(self, node, held, &mut |table, children| {
            counts.entries_descended += u64::from(children);
            counts.tables_locked += 1;
            self.memory.worked(0, 1);
            // The children are on the list themselves.
            self.change_live(table, 0, children);
            gather_table(self.memory, gather, table);
        });
    }
}

fn zap_locked<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    mapped: VirtRange,
    whole: Whole,
    flush: Flush,
    gather: &mut Gather,
) -> Result<(), OutOfMemory> {
    let tables = cursor.tables;
    let mut suspended = false;
    let mut failed = Ok(());
    loop {
        let run = match cursor.next_run(Equal::empty(), whole) {
            Ok(Some(run)) => run,
            Ok(None) => break,
            Err(error) => {
                failed = Err(error);
                break;
            }
        };
        match run.what {
            What::Empty => {}
            What::Table(table) => {
                tables.detach(&run, table, mapped, None, gather, &mut cursor.counts);
            }
            What::Leaf(_) => {
                suspend(cursor, &run, gather);
                suspended = true;
            }
            What::Absent(first) => {
                let (table, end) = (run.node.table, run.index + run.count);
                drop_absent(tables.memory, run.node, first, run.count, &mut cursor.counts);
                for slot in &tables.slots(table)[run.index as usize..end as usize] {
                    slot.store(0, Ordering::Relaxed);
                }
                cursor.counts.entries_written += u64::from(run.count);
                tables.change_live(table, 0, run.count);
            }
        }
    }
    if suspended || flush == Flush::BeforeUnlock {
        tables.flush(gather, &mut cursor.counts);
    }
    if suspended {
        let node = cursor.cover();
        let start = cursor.range().start();
        let base = start.align_down(arch::table_span::<P::Arch>(node.level));
        // What was not reached was not suspended either.
        let range = cursor.passed();
        drop_suspended(cursor, node, base, range, &mut tables.memory.free_batch());
    }
    failed
}

/// Phase 1: takes the valid bit from the leaves of the run.
pub(super) fn suspend<P: Platform>(cursor: &mut Cursor<'_, '_, P>, run: &Run, gather: &mut Gather) {
    let slots = cursor.tables.slots(run.node.table);
    for slot in &slots[run.index as usize..(run.index + run.count) as usize] {
        let raw = slot.load(Ordering::Relaxed);
        if P::Arch::is_saturated(Entry(raw)) {
            slot.store(raw & !P::Arch::PRESENT, Ordering::Relaxed);
        } else {
            slot.fetch_and(!P::Arch::PRESENT, Ordering::Relaxed);
        }
    }
    cursor.counts.entries_written += u64::from(run.count);
    gather.stale(run.range::<P::Arch>(), run.node.level);
}

/// Phase 2: gives back what the suspended entries of `range` name, and clears them.
pub(super) fn drop_suspended<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    node: Node,
    base: VirtAddr,
    range: VirtRange,
    batch: &mut FreeBatch<'_, P>,
) {
    let tables = cursor.tables;
    let Some(span) = VirtRange::from_len(base, arch::table_span::<P::Arch>(node.level)) else {
        return;
    };
    let part = range.intersection(span);
    if part.is_empty() {
        return;
    }
    let first = arch::index_of::<P::Arch>(part.start(), node.level);
    let last = arch::index_of::<P::Arch>(VirtAddr(part.end().0 - 1), node.level);
    if node.level == 1 {
        let range = (first, last + 1);
        let counts = &mut cursor.counts;
        let dropped = drop_leaves(tables.memory, node.table, range, Suspended::Yes, batch, counts);
        tables.change_live(node.table, 0, dropped);
        return;
    }
    for index in first..=last {
        let slot = &tables.slots(node.table)[index as usize];
        let entry = Entry(slot.load(Ordering::Relaxed));
        let start = VirtAddr(base.0 + u64::from(index) * arch::span::<P::Arch>(node.level));
        match arch::kind::<P::Arch>(entry, node.level) {
            Kind::Table => {
                let child = Node { table: P::Arch::frame(entry), level: node.level - 1 };
                drop_suspended(cursor, child, start, range, batch);
            }
            Kind::Absent => {
                let leaf = Entry(entry.0 | P::Arch::PRESENT);
                let pages = 1 << arch::order_of_level::<P::Arch>(node.level);
                slot.store(0, Ordering::Relaxed);
                cursor.counts.entries_written += 1;
                tables.change_live(node.table, 0, 1);
                free_deposit(tables.memory, node.table, &mut cursor.counts);
                tables.memory.unmap_pages(leaf, pages, batch, &mut cursor.counts);
            }
            Kind::Empty | Kind::Leaf => {}
        }
    }
}

/// Whether the leaves to be dropped have lost their valid bit and are in a table that stays.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Suspended {
    Yes,
    No,
}

/// Drops the mappings of the level-1 leaves (and absent entries) of `range`. Returns how many
/// entries that were.
fn drop_leaves<P: Platform>(
    memory: &Memory<P>,
    table: Frame,
    range: (u32, u32),
    suspended: Suspended,
    batch: &mut FreeBatch<'_, P>,
    counts: &mut Counts,
) -> u32 {
    let restored = if suspended == Suspended::Yes { P::Arch::PRESENT } else { 0 };
    let live = memory.frames.meta(table).word.load(Ordering::Relaxed) as u32;
    let (first, end) = range;
    // SAFETY: 1. it has leaves, so it is a table; 2. it is locked, or detached and on the caller's list.
    let slots = unsafe { &memory.slots(table)[..end as usize] };
    let (mut index, mut dropped) = (first, 0);
    while dropped < live
        && let Some(slot) = slots.get(index as usize)
    {
        let raw = slot.load(Ordering::Relaxed);
        if raw == 0 {
            index += run::empty_ahead(&slots[index as usize..]);
            continue;
        }
        let entry = Entry(raw | restored);
        let count = if entry.0 & P::Arch::PRESENT != 0 {
            drop_run(memory, slots, index, entry, restored, batch, counts)
        } else {
            let limit = (slots.len() as u32 - index).min(live - dropped);
            let count = absent_run::<P>(slots, index, limit);
            counts.mapped(OwnerKind::Anonymous, count);
            drop_absent(memory, Node { table, level: 1 }, entry, count, counts);
            count
        };
        if suspended == Suspended::Yes {
            for slot in &slots[index as usize..(index + count) as usize] {
                slot.store(0, Ordering::Relaxed);
            }
            counts.entries_written += u64::from(count);
        }
        dropped += count;
        index += count;
    }
    counts.entries_read += u64::from(index - first);
    // All entries at once, as if they were anonymous pages, which they mostly are. What is something
    // else has been counted the other way.
    counts.unmapped(OwnerKind::Anonymous, dropped);
    dropped
}

/// Drops the mappings of single anonymous pages that nobody else has, from the first slot on, until
/// something else stands there; `restored` is missing in the entries as they stand. Returns how many
/// that were. A loop of its own: it does one thing, all in registers.
#[inline(never)]
fn drop_single_pages<P: Platform>(
    memory: &Memory<P>,
    slots: &[AtomicU64],
    restored: u64,
    batch: &mut FreeBatch<'_, P>,
) -> u32 {
    let mut dropped = 0;
    for slot in slots {
        let raw = slot.load(Ordering::Relaxed);
        let entry = Entry(raw | restored);
        // The pages of a contiguous run are those of a large folio.
        if raw == 0 || entry.0 & P::Arch::PRESENT == 0 || P::Arch::is_contig(entry) {
            break;
        }
        let folio = memory.frames.folio_of(P::Arch::frame(entry));
        let Some(folio) = folio.filter(|folio| folio.order == 0) else { break };
        if !memory.frames.free_anonymous_into(batch, folio, 1) {
            break;
        }
        dropped += 1;
    }
    dropped
}

/// Drops the run of leaves that begins at `index` with `entry`; `restored` is missing in the
/// entries as they stand. Returns how many that were. The caller counts them all as anonymous pages
/// that are gone; what is none is counted here so that the sum is right.
#[inline]
fn drop_run<P: Platform>(
    memory: &Memory<P>,
    slots: &[AtomicU64],
    index: u32,
    entry: Entry,
    restored: u64,
    batch: &mut FreeBatch<'_, P>,
    counts: &mut Counts,
) -> u32 {
    let entry = P::Arch::clear_contig(entry, index);
    let frame = P::Arch::frame(entry);
    // Pages of zeroes, and frames that are not ours, have no counts.
    let Some(folio) = memory.frames.folio_of(frame) else {
        counts.mapped(OwnerKind::Anonymous, 1);
        return 1;
    };
    counts.folios_touched += 1;
    // Nearly all folios of one page end here. One that an object has let go may be ours to free as
    // well, and counts as the object's page that it was when it was mapped.
    if folio.order == 0 && memory.frames.free_anonymous_into(batch, folio, 1) {
        // Where one is a page of its own, the next mostly are as well.
        let rest = &slots[index as usize + 1..];
        let more = drop_single_pages(memory, rest, restored, batch);
        counts.folios_touched += u64::from(more);
        return 1 + more;
    }
    let left = folio.head.0 + folio.pages() - frame.0;
    let limit = left.min(slots.len() as u32 - index);
    // A folio of which these are all mappings takes nothing along of what they say.
    let last = folio.order > 0
        && memory.frames.is_mapped_only(folio, limit)
        && run::are_leaves::<P::Arch>(
            &slots[index as usize..(index + limit) as usize],
            index,
            P::Arch::STEP,
            restored,
        );
    if last && memory.frames.free_anonymous_into(batch, folio, limit) {
        return limit;
    }
    let slots = &slots[..(index + limit) as usize];
    drop_shared(memory, slots, index, (folio, entry), restored, batch, counts)
}

/// Drops the mappings of the pages of `folio` that begin at `index` with `entry`, without the contiguous bit, and end
/// with the slots at the latest: others map or hold the folio, too.
#[inline(never)]
fn drop_shared<P: Platform>(
    memory: &Memory<P>,
    slots: &[AtomicU64],
    index: u32,
    (folio, entry): (Folio, Entry),
    restored: u64,
    batch: &mut FreeBatch<'_, P>,
    counts: &mut Counts,
) -> u32 {
    let limit = slots.len() as u32 - index;
    let (mut count, mut first) = (limit, entry);
    if limit > 1 {
        let (equal, step) = (Equal::empty(), P::Arch::STEP);
        (count, first) = run::leaves::<P::Arch>(slots, index, limit, equal, step, restored);
    }
    let owner = memory.frames.owner_kind(folio);
    if owner != OwnerKind::Anonymous {
        counts.mapped(OwnerKind::Anonymous, count);
        counts.unmapped(owner, count);
    }
    let dirty = || P::Arch::attributes(first).dirty;
    memory.frames.unmap_into(batch, &memory.platform, folio, count, dirty);
    count
}

/// How many of the `limit` absent entries from `index` on can be dropped at once: swap entries by runs of
/// slots, others one by one.
#[inline(never)]
fn absent_run<P: Platform>(slots: &[AtomicU64], index: u32, limit: u32) -> u32 {
    if absent::is_swap::<P::Arch>(run::load(slots, index)) {
        run::absents::<P::Arch>(slots, index, limit).0
    } else {
        1
    }
}

/// Gives back what a run of `count` absent entries of the table of `node` stands for.
pub(super) fn drop_absent<P: Platform>(
    memory: &Memory<P>,
    node: Node,
    first: Entry,
    count: u32,
    counts: &mut Counts,
) {
    let pages = count << arch::order_of_level::<P::Arch>(node.level);
    match absent::decode::<P::Arch>(first) {
        Some(absent::Absent::ProtNone { frame, dirty, .. }) => {
            memory.unmap_frames(frame, pages, dirty, counts);
        }
        Some(absent::Absent::Swap { device, slot, .. }) => {
            counts.swap_pages = counts.swap_pages.wrapping_sub(u64::from(pages));
            memory.release_slots(SlotRun { area: device, first: slot, count: pages });
        }
        _ => {}
    }
    if node.level > 1 {
        free_deposit(memory, node.table, counts);
    }
}

pub(super) fn free_deposit<P: Platform>(memory: &Memory<P>, holder: Frame, counts: &mut Counts) {
    let head = &memory.frames.meta(holder).owner;
    if let Some(table) = link(head.load(Ordering::Relaxed)) {
        let next = memory.frames.meta(table).next.load(Ordering::Relaxed);
        head.store(next, Ordering::Relaxed);
        // SAFETY: 1. a table on deposit is a table, and the holder's lock is held; 2. no entry and no TLB
        // ever knew it, and it was just withdrawn.
        unsafe { free_table(memory, table, counts) };
    }
}

/// Puts a detached table on the gather's list.
pub(crate) fn gather_table<P: Platform>(memory: &Memory<P>, gather: &mut Gather, table: Frame) {
    let next = gather.detached.map_or(meta::NONE, |next| next.0);
    memory.frames.meta(table).next.store(next, Ordering::Relaxed);
    gather.detached = Some(table);
}

/// Drops all entries of a detached table but those of tables, after the flush. Readers may
/// still see the entries, and know that they are only hints. The entry count tells when the rest is
/// empty.
pub(crate) fn drop_contents<P: Platform>(
    memory: &Memory<P>,
    table: Frame,
    batch: &mut FreeBatch<'_, P>,
    counts: &mut Counts,
) {
    let level = level_of(memory.frames.meta(table));
    if level == 1 {
        let all = (0, arch::entries::<P::Arch>());
        drop_leaves(memory, table, all, Suspended::No, batch, counts);
        return;
    }
    let mut live = memory.frames.meta(table).word.load(Ordering::Relaxed);
    // SAFETY: 1. a table, by its metadata; 2. detached, and on the caller's list.
    for slot in unsafe { memory.slots(table) } {
        if live == 0 {
            break;
        }
        counts.entries_read += 1;
        let entry = Entry(slot.load(Ordering::Relaxed));
        match arch::kind::<P::Arch>(entry, level) {
            Kind::Empty | Kind::Table => continue,
            Kind::Leaf => {
                let pages = 1 << arch::order_of_level::<P::Arch>(level);
                memory.unmap_pages(entry, pages, batch, counts);
            }
            Kind::Absent => drop_absent(memory, Node { table, level }, entry, 1, counts),
        }
        live -= 1;
    }
    while memory.frames.meta(table).owner.load(Ordering::Relaxed) != meta::NONE {
        free_deposit(memory, table, counts);
    }
}
