//! Changes the permissions of a part of a mapping and cuts pieces where necessary.
//!
//! ```text
//! before   |              2 MiB               |  2 MiB  |64K|64K|64K|
//! change              |#######################################|      end inside a contiguous run
//! after    |4K|...|64K|64K: new | ... 4K: new |2 MiB:new|64K|4K..|4K..|
//! ```
//!
//! The entries of one table are changed together (a *stretch*). Entries that keep their size get
//! their new permissions by plain stores, and one invalidation follows at the end. If a huge leaf
//! or a contiguous run is cut, or a contiguous run changes, the entries are paused; see the module
//! documentation. The table that replaces a huge leaf is built before the pause, with the new
//! permissions. It may contain contiguous runs, because no walker can reach it yet.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::error::Failure;
use core::ops::Range;
use core::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level, Permissions};
use crate::platform::{Platform, Tables};
use crate::stats::Counts;
use crate::table::locking::Node;
use crate::table::{EntryAt, Table, TablePool};

use super::area::{Area, Claim};
use super::leaves::{Leaves, check_executable};
use super::protocol::{self, KernelTree, MapTables, Rewrite};
use super::request::Pauses;
use super::{KernelMap, KernelMapError};

/// A change of a range: new permissions, or only cuts.
struct ProtectionChange<'k, 'm, P: Platform> {
    map: &'k KernelMap<'m, P>,
    /// The tables of the claimed area that contains `range`.
    tree: MapTables<'k, 'm, P>,
    range: VirtRange,
    /// `None`: only splits the pieces that cross the bounds of the range.
    permissions: Option<Permissions>,
}

/// Entries of one table that must be changed together.
struct LeafStretch<'k, A: Arch> {
    table: Table<'k>,
    level: Level<A>,
    /// The first entry, and the exclusive end.
    from: EntryIndex,
    until: EntryIndex,
    /// The address of the first entry.
    base: u64,
    /// The entries that lie entirely in the range of the change.
    inside: Range<EntryIndex>,
    /// The new attributes of leaves inside, without their frames, if permissions change.
    new: Option<Entry>,
}

/// The position of an entry relative to the range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    Inside,
    Outside,
    Across,
}

/// A new table for a huge leaf at a bound of the range.
#[derive(Clone, Copy)]
struct Cut {
    index: EntryIndex,
    /// The entry that points to the table.
    entry: Entry,
}

/// The cuts at both bounds.
type Cuts = [Option<Cut>; 2];

impl<'k, A: Arch> LeafStretch<'k, A> {
    /// The addresses of an entry.
    fn range_of(&self, index: EntryIndex) -> VirtRange {
        let shift = self.level.span_shift();
        let start = self.base + (u64::from(index - self.from) << shift);
        VirtRange::raw(start, start + (1 << shift))
    }

    /// The leaf at a position, without the effect of a pause.
    fn entry<T: KernelTree<Arch = A, Table = Table<'k>>>(
        &self,
        tree: &T,
        index: EntryIndex,
    ) -> Entry {
        protocol::whole::<A>(tree.load(self.table, index, Ordering::Relaxed))
    }

    /// The entries that cross the bounds of the change. An entry that crosses both appears once.
    fn across<P: Platform<Arch = A>>(
        &self,
        change: &ProtectionChange<'_, '_, P>,
    ) -> [Option<EntryIndex>; 2] {
        let shift = self.level.span_shift();
        let last = VirtAddr(change.range.end().0 - 1);
        let at = |at: VirtAddr| {
            let ahead = at.0.checked_sub(self.base)? >> shift;
            let ahead = u32::try_from(ahead).ok()?;
            let inside = ahead < self.until - self.from;
            let index = self.from + ahead;
            let across = |index| change.position(self.range_of(index)) == Position::Across;
            (inside && across(index)).then_some(index)
        };
        let (first, last) = (at(change.range.start()), at(last));
        [first, last.filter(|last| first != Some(*last))]
    }
}

impl<P: Platform> KernelMap<'_, P> {
    /// Changes the permissions of a part of an area, or of all of it (Linux: `set_memory_ro`,
    /// `set_memory_rw`, `set_memory_x`, `set_memory_nx`). When it returns, no CPU has the old
    /// permissions.
    ///
    /// Pieces that cross the bounds are split, and split pieces are never joined again. During a
    /// split, accesses to the piece pause ([`KernelMap::resolve`]) if the area's [`Pauses`] allow
    /// that.
    ///
    /// Context: may sleep. Complexity: linear in the entries; one invalidation for all entries that
    /// keep their size, and one for each table in which entries are paused.
    ///
    /// # Errors
    /// [`KernelMapError::Empty`], [`KernelMapError::Unaligned`],
    /// [`KernelMapError::BadPermissions`], [`KernelMapError::NotAnArea`],
    /// [`KernelMapError::Freed`], [`KernelMapError::CrossesArea`], [`KernelMapError::WouldPause`],
    /// [`KernelMapError::OutOfMemory`] if a table cannot be allocated.
    ///
    /// # Safety
    /// 1. The area is the caller's.
    /// 2. From the call on, no access to the range violates `permissions`: memory that becomes
    ///    read-only has no mutable reference, and no CPU executes memory that becomes data.
    /// 3. Memory that becomes executable is code; memory that becomes writable contains no constant
    ///    that code relies on.
    pub unsafe fn protect(
        &self,
        range: VirtRange,
        permissions: Permissions,
    ) -> Result<(), KernelMapError> {
        if range.is_empty() {
            return Err(KernelMapError::Empty);
        }
        for at in [range.start(), range.end()] {
            if !at.is_aligned(PAGE_SIZE) {
                return Err(KernelMapError::Unaligned(at));
            }
        }
        if !permissions.intersects(Permissions::ACCESS) || permissions.contains(Permissions::USER) {
            return Err(KernelMapError::BadPermissions);
        }
        self.memory.outermost(|| {
            let claim = self.areas.claim(range.start(), |area| {
                check_executable(permissions, area.traits.memory)?;
                let inside = area.range().covers(range);
                let crosses = || KernelMapError::CrossesArea { area: area.describe() };
                inside.then_some(()).ok_or_else(crosses)
            })?;
            // SAFETY: 1. the claim is held until the change is done.
            let tree = unsafe { self.tables_of_owner() };
            let change =
                ProtectionChange { map: self, tree, range, permissions: Some(permissions) };
            let result = change.apply(&claim);
            self.areas.release(claim);
            result
        })
    }
}

/// Splits the piece of a claimed area that crosses `at`, if any.
pub(super) fn cut<P: Platform>(
    map: &KernelMap<'_, P>,
    area: &Claim<'_>,
    at: VirtAddr,
) -> Result<(), Failure<KernelMapError>> {
    let range = VirtRange::raw(at.0, area.range().end().0);
    // SAFETY: 1. the claim.
    let tree = unsafe { map.tables_of_owner() };
    ProtectionChange { map, tree, range, permissions: None }.apply(area)
}

impl<'k, P: Platform> ProtectionChange<'k, '_, P> {
    fn position(&self, range: VirtRange) -> Position {
        if self.range.covers(range) {
            Position::Inside
        } else if self.range.overlaps(range) {
            Position::Across
        } else {
            Position::Outside
        }
    }

    /// Changes a claimed area.
    fn apply(&self, area: &Area) -> Result<(), Failure<KernelMapError>> {
        let (map, tree) = (self.map, self.tree);
        let mut counts = Counts::default();
        if area.traits.pauses == Pauses::Never && self.would_pause(&mut counts) {
            map.stats.add(&counts);
            return Err(KernelMapError::WouldPause { area: area.describe() }.into());
        }
        let needed = self.tables_for(&mut counts);
        let pool = TablePool::fill(map.memory, needed).or_else(|_| {
            // Freed areas may hold memory until a purge.
            map.purge_freed();
            TablePool::fill(map.memory, needed)
        });
        let mut pool = pool?;
        let mut plain = None;
        self.for_each_stretch(&mut counts, |stretch, counts| {
            let mut part = StretchChange { stretch, change: self, cuts: Cuts::default() };
            for (cut, index) in part.cuts.iter_mut().zip(stretch.across(self)) {
                let Some(index) = index else { continue };
                let single = P::Arch::clear_contig(stretch.entry(&tree, index), index);
                let base = stretch.range_of(index).start();
                let mut tables = TableBuilder { change: self, pool: &mut pool, counts };
                let table = tables.build(single, stretch.level, base);
                *cut = table.map(|table| Cut { index, entry: P::Arch::table(table) });
            }
            if part.needs_pause() {
                part.apply_paused(counts);
            } else if protocol::write(&tree, &part, counts) {
                plain =
                    Some(plain.map_or(stretch.level, |level: Level<_>| level.min(stretch.level)));
            }
        });
        if let Some(lowest) = plain {
            map.invalidate(self.range, lowest, Tables::Unchanged, &mut counts);
        }
        pool.free_unused();
        counts += pool.counts;
        map.stats.add(&counts);
        Ok(())
    }

    /// Walks over all stretches of a range. If the range splits a contiguous run, the stretch
    /// includes the whole run.
    fn for_each_stretch(
        &self,
        counts: &mut Counts,
        mut f: impl FnMut(&LeafStretch<'k, P::Arch>, &mut Counts),
    ) {
        let tree = self.tree;
        let raw = |table, index| tree.load(table, index, Ordering::Relaxed);
        let (mut at, end) = (self.range.start(), self.range.end());
        while at < end {
            let EntryAt { node: Node { table, level }, index, .. } =
                protocol::descend(&tree, at, counts);
            let shift = level.span_shift();
            let base = at.align_down(1 << shift).0;
            let left = (end.0 - base).div_ceil(1 << shift);
            let room = left.min(u64::from(index.left::<P::Arch>())) as u32;
            let is_leaf = |index: EntryIndex| level.kind(raw(table, index)) == Kind::Leaf;
            // The next round descends into a table among huge leaves.
            let count = index.stretch(room).take_while(|index| is_leaf(*index)).count() as u32;
            if count > 0 {
                let contig = P::Arch::CONTIG_ENTRIES;
                let is_contig = |index: EntryIndex| P::Arch::is_contig(raw(table, index));
                let from = if is_contig(index) { index.align_down(contig) } else { index };
                let last = index + count - 1;
                let until =
                    if is_contig(last) { last.align_down(contig) + contig } else { last + 1 };
                let base = base - (u64::from(index - from) << shift);
                counts.entries_read += u64::from(until - from);
                let mut stretch =
                    LeafStretch { table, level, from, until, base, inside: from..from, new: None };
                let inside = |index: &EntryIndex| {
                    self.position(stretch.range_of(*index)) == Position::Inside
                };
                let first = index.up_to(until).find(inside).unwrap_or(until);
                let after = first.up_to(index + count).rev().find(inside);
                let after = after.map_or(first, |last| last + 1);
                stretch.inside = first..after;
                stretch.new = self.permissions.map(|permissions| {
                    let memory = P::Arch::memory_type_of(stretch.entry(&tree, index));
                    Leaves::of(permissions, memory).leaf(Frame(0), level)
                });
                f(&stretch, counts);
            }
            let next = base.checked_add(u64::from(count.max(1)) << shift);
            let Some(next) = next else { break };
            at = VirtAddr(next);
        }
    }

    /// Whether any stretch would need a pause; checked before the change begins.
    fn would_pause(&self, counts: &mut Counts) -> bool {
        let mut pauses = false;
        self.for_each_stretch(counts, |stretch, _| {
            pauses |= stretch.across(self).iter().any(Option::is_some)
                || StretchChange { stretch, change: self, cuts: Cuts::default() }.needs_pause();
        });
        pauses
    }

    /// The number of tables that the cuts may need: for a leaf of level n, one table of each level
    /// below n.
    fn tables_for(&self, counts: &mut Counts) -> u64 {
        let mut needed = 0;
        self.for_each_stretch(counts, |stretch, _| {
            let across = stretch.across(self).into_iter().flatten().count() as u64;
            needed += 2 * across * u64::from(stretch.level.below().number());
        });
        needed
    }
}

/// The change of one stretch.
struct StretchChange<'a, 'm, P: Platform> {
    stretch: &'a LeafStretch<'a, P::Arch>,
    change: &'a ProtectionChange<'a, 'm, P>,
    cuts: Cuts,
}

impl<P: Platform> StretchChange<'_, '_, P> {
    /// Whether an entry must be paused.
    fn needs_pause(&self) -> bool {
        let stretch = self.stretch;
        stretch.from.up_to(stretch.until).any(|index| {
            let old = stretch.entry(&self.change.tree, index);
            self.breaks(old, self.new_entry(index))
        })
    }

    /// The addresses of the stretch.
    fn range(&self) -> VirtRange {
        let first = self.stretch.range_of(self.stretch.from).start();
        let last = self.stretch.range_of(self.stretch.until - 1).end();
        VirtRange::raw(first.0, last.0)
    }

    /// Pauses the entries that need it, invalidates every TLB, and writes the new entries.
    fn apply_paused(&self, counts: &mut Counts) {
        let map = self.change.map;
        // No CPU waits for this lock with interrupts off, because a CPU must be able to respond to
        // the invalidation.
        let _pausing = loop {
            if let Some(pausing) = map.pausing.try_lock() {
                break pausing;
            }
            map.memory.platform().relax();
        };
        protocol::replace(&self.change.tree, self, counts);
        map.publish(self.range(), counts);
    }
}

impl<'a, 'm, P: Platform> Rewrite<MapTables<'a, 'm, P>> for StretchChange<'a, 'm, P> {
    fn table(&self) -> Table<'a> {
        self.stretch.table
    }

    fn indices(&self) -> Range<EntryIndex> {
        self.stretch.from..self.stretch.until
    }

    #[inline]
    fn new_entry(&self, index: EntryIndex) -> Entry {
        let (stretch, old) = (self.stretch, self.stretch.entry(&self.change.tree, index));
        let single = P::Arch::clear_contig(old, index);
        if stretch.inside.contains(&index) {
            let new = match stretch.new {
                None => single,
                Some(new) => Entry(new.0 + P::Arch::STEP * u64::from(P::Arch::frame(single).0)),
            };
            let first = index.align_down(P::Arch::CONTIG_ENTRIES);
            let last = first + (P::Arch::CONTIG_ENTRIES - 1);
            let inside = stretch.inside.contains(&first) && stretch.inside.contains(&last);
            let whole_contig = P::Arch::is_contig(old) && inside;
            return if whole_contig { P::Arch::set_contig(new, index) } else { new };
        }
        if self.change.position(stretch.range_of(index)) == Position::Outside {
            return single;
        }
        let cut = self.cuts.iter().flatten().find(|cut| cut.index == index);
        // Every piece that crosses a bound has its table; without it, the change would not have
        // begun.
        cut.map_or(old, |cut| cut.entry)
    }

    fn breaks(&self, old: Entry, new: Entry) -> bool {
        let level = self.stretch.level;
        old != new && (P::Arch::is_contig(old) || P::Arch::needs_break(old, new, level))
    }

    fn flush(&self, counts: &mut Counts) {
        self.change.map.invalidate(self.range(), self.stretch.level, Tables::Unchanged, counts);
    }
}

/// Builds tables that replace huge leaves, with the change applied.
struct TableBuilder<'a, 'm, P: Platform> {
    change: &'a ProtectionChange<'a, 'm, P>,
    pool: &'a mut TablePool<'m, P>,
    counts: &'a mut Counts,
}

impl<P: Platform> TableBuilder<'_, '_, P> {
    /// A leaf with the permissions of the change.
    fn changed(&self, leaf: Entry, level: Level<P::Arch>) -> Entry {
        match self.change.permissions {
            None => leaf,
            Some(permissions) => {
                let memory = P::Arch::memory_type_of(leaf);
                let leaves = Leaves::of(permissions, memory);
                leaves.leaf(P::Arch::frame(leaf), level)
            }
        }
    }

    /// Builds the table for the huge `leaf` of `level` at `base`.
    fn build(&mut self, leaf: Entry, level: Level<P::Arch>, base: VirtAddr) -> Option<Frame> {
        let (map, change, below) = (self.change.map, self.change, level.below());
        let table = self.pool.take(below, self.counts).ok()?;
        map.memory.frames.table(table).unlock();
        let (shift, order) = (below.span_shift(), below.order());
        let leaves =
            Leaves::of(P::Arch::attributes(leaf).permissions, P::Arch::memory_type_of(leaf));
        // SAFETY: 1. the table came from the pool, and no other thread has seen it.
        let words = map.entries(unsafe { Table::new(table) });
        let part = |index: EntryIndex, count: u32| {
            let start = base.0 + (u64::from(index) << shift);
            VirtRange::raw(start, start + (u64::from(count) << shift))
        };
        for index in EntryIndex::all::<P::Arch>() {
            let frame = P::Arch::frame(leaf).plus(index.number() << order.0);
            let old = leaves.leaf(frame, below);
            let entry = match change.position(part(index, 1)) {
                Position::Outside => old,
                Position::Inside => self.changed(old, below),
                Position::Across => {
                    let start = part(index, 1).start();
                    P::Arch::table(self.build(old, below, start)?)
                }
            };
            let contig = P::Arch::CONTIG_ENTRIES;
            let folds = below <= map.largest_contig
                && change.position(part(index.align_down(contig), contig)) != Position::Across;
            let entry = if folds { P::Arch::set_contig(entry, index) } else { entry };
            words[index.position()].store(entry.0, Ordering::Relaxed);
        }
        let entries = P::Arch::ENTRIES;
        self.counts.entries_written += u64::from(entries);
        if below == Level::PTE {
            map.memory.frames.table(table).change_entry_count(entries, 0);
        }
        Some(table)
    }
}
