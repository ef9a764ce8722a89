//! The one walk: finds or builds the tables that lead to an address, and maps and clears runs of
//! leaves ([`super::leaves`] writes the leaves).
//!
//! ```text
//! addresses  |.....|64K|64K|64K|..4K..|            2 MiB            |  2 MiB  |.4K.|
//! written by  run of level 1           run of level 2: two entries             run
//! ```
//!
//! A [`Walk`] remembers the tables that led to the last address. The next walk begins at the lowest
//! of them that covers its address, not at the root. A run is written one table at a time, with all
//! the run's entries in that table, contiguous runs included.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::error::Failure;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::platform::{Invalidation, Platform, Tables};
use crate::stats::Counts;
use crate::table::locking::Node;
use crate::table::{EntryAt, Table, new_table};

use super::leaves::{LeafRun, Leaves};
use super::protocol::{self, KernelTree, MapTables};
use super::{KernelMap, KernelMapError};

/// The maximum number of table levels of any architecture.
const MAX_LEVELS: usize = 5;

/// A walk of a map: the tables from the root down to `level` that lead to `at`.
pub(super) struct Walk<'k, 'm, P: Platform> {
    pub(super) map: &'k KernelMap<'m, P>,
    tree: MapTables<'k, 'm, P>,
    tables: [Table<'k>; MAX_LEVELS + 1],
    at: u64,
    level: Level<P::Arch>,
    pub(super) counts: Counts,
}

/// Whether a range to be cleared may have unmapped parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holes {
    None,
    Perhaps,
}

/// Why a walk stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WalkError {
    /// A table was missing.
    NoMemory,
    /// The entry is not empty.
    Occupied(u64),
    /// A fatal signal is pending.
    Interrupted,
}

impl From<WalkError> for Failure<KernelMapError> {
    fn from(error: WalkError) -> Self {
        match error {
            WalkError::NoMemory => Self::NoMemory,
            WalkError::Occupied(at) => KernelMapError::Occupied(VirtAddr(at)).into(),
            WalkError::Interrupted => KernelMapError::Interrupted.into(),
        }
    }
}

impl<'k, 'm, P: Platform> Walk<'k, 'm, P> {
    /// A walk that has found the root.
    ///
    /// # Safety
    /// 1. Each address passed to the walk belongs to an area that the caller owns until the walk is
    ///    dropped.
    pub(super) unsafe fn new(map: &'k KernelMap<'m, P>) -> Self {
        // SAFETY: 1. the caller's obligation 1.
        let tree = unsafe { map.tables_of_owner() };
        let tables = [tree.top(); MAX_LEVELS + 1];
        Self { map, tree, tables, at: 0, level: P::Arch::ROOT, counts: Counts::default() }
    }

    /// The table of `level` that covers `at`; makes missing tables.
    #[inline]
    pub(super) fn table(&mut self, at: u64, level: Level<P::Arch>) -> Result<Table<'k>, WalkError> {
        let mut have = self.level.max(level);
        // The table at level `have` covers both addresses if they agree in all bits above the
        // table's span.
        let covers = |have: Level<_>| {
            let top = have.span_shift() + P::Arch::INDEX_BITS;
            (self.at ^ at).checked_shr(top).unwrap_or(0) == 0
        };
        while have < P::Arch::ROOT && !covers(have) {
            have = have.above();
        }
        self.at = at;
        while have > level {
            let parent = Node { table: self.tables[usize::from(have.number())], level: have };
            let child = protocol::child(&self.tree, parent, VirtAddr(at), &mut self.counts);
            have = have.below();
            match child {
                Ok(child) => self.tables[usize::from(have.number())] = child,
                Err(stop) => {
                    self.level = have.above();
                    return Err(stop);
                }
            }
        }
        self.level = level;
        Ok(self.tables[usize::from(level.number())])
    }

    /// Maps `count` consecutive frames at `at`, in the largest pieces.
    ///
    /// # Errors
    /// Pages may have been mapped before the error: the caller clears the range.
    pub(super) fn map_run(
        &mut self,
        mut at: u64,
        mut first: Frame,
        mut count: u64,
        leaves: &Leaves<P::Arch>,
    ) -> Result<(), WalkError> {
        while count > 0 {
            let level = Self::level_of_piece(at, first, count, leaves.largest());
            let order = level.order();
            let table = self.table(at, level)?;
            let index = level.index_of(VirtAddr(at));
            let room = index.left::<P::Arch>();
            let entries = (count >> order.0).min(u64::from(room)) as u32;
            let run = LeafRun { table, level, index, entries, first };
            if self.write_run(&run, leaves).is_err() {
                self.map_among_tables(at, &run, leaves)?;
            }
            let pages = entries << order.0;
            at = at.wrapping_add(u64::from(pages) << PAGE_SHIFT);
            count -= u64::from(pages);
            // The frame after the last run need not be valid.
            first = Frame(first.0.wrapping_add(pages));
        }
        Ok(())
    }

    /// Maps a run into entries of which some point to tables. The area has retained these tables
    /// since it consisted of smaller pieces. The empty tables remain in place, because a leaf in
    /// their place would need a flush.
    #[cold]
    fn map_among_tables(
        &mut self,
        at: u64,
        run: &LeafRun<'k, P::Arch>,
        leaves: &Leaves<P::Arch>,
    ) -> Result<(), WalkError> {
        let LeafRun { level, entries, first, .. } = *run;
        if level == Level::PTE {
            return Err(WalkError::Occupied(at));
        }
        let order = level.order();
        let smaller = leaves.at_most(level.below());
        for entry in 0..entries {
            let pages = entry << order.0;
            let (at, first) = (at + (u64::from(pages) << PAGE_SHIFT), first.plus(pages));
            let table = self.table(at, level)?;
            let index = level.index_of(VirtAddr(at));
            let run = LeafRun { table, level, index, entries: 1, first };
            if self.write_run(&run, leaves).is_err() {
                self.map_run(at, first, u64::from(order.pages()), &smaller)?;
            }
        }
        Ok(())
    }

    /// The highest level at which a leaf can map `first` at `at`.
    #[inline]
    fn level_of_piece(
        at: u64,
        first: Frame,
        count: u64,
        largest: Level<P::Arch>,
    ) -> Level<P::Arch> {
        let mut level = largest;
        while level > Level::PTE {
            let pages = u64::from(level.order().pages());
            if count >= pages && (at >> PAGE_SHIFT | u64::from(first.0)) & (pages - 1) == 0 {
                break;
            }
            level = level.below();
        }
        level
    }
}

impl<P: Platform> KernelMap<'_, P> {
    /// An empty table that no CPU has locked; see `protocol`.
    pub(super) fn new_table(&self, level: Level<P::Arch>, counts: &mut Counts) -> Option<Frame> {
        let table = new_table(self.memory, level, counts).or_else(|| {
            // Freed areas may hold memory until a purge.
            self.purge();
            new_table(self.memory, level, counts)
        })?;
        self.memory.frames.table(table).unlock();
        Some(table)
    }

    /// Makes the entries of `range` visible to all walkers.
    pub(super) fn publish(&self, range: VirtRange, counts: &mut Counts) {
        self.memory.platform().publish_entries();
        if P::Arch::INVALID_MAY_BE_CACHED {
            self.invalidate(range, Level::PTE, Tables::Changed, counts);
        }
    }

    /// Invalidates translations of `range` on all CPUs. Every leaf in the range is of `level` or
    /// above.
    pub(super) fn invalidate(
        &self,
        range: VirtRange,
        level: Level<P::Arch>,
        tables: Tables,
        counts: &mut Counts,
    ) {
        let level =
            if self.reach.is_page() { Level::PTE } else { level.min(P::Arch::LARGEST_LEAF) };
        let stride = level.span();
        counts.invalidations += 1;
        counts.pages_invalidated += range.pages();
        self.memory.platform().publish_entries();
        self.memory
            .platform()
            .invalidate_kernel(self.root, &Invalidation { range, stride, tables });
    }

    /// Empties all leaves in a range of one area; empty entries are not written.
    ///
    /// # Safety
    /// 1. The caller owns the area.
    pub(super) unsafe fn clear(&self, range: VirtRange, holes: Holes, counts: &mut Counts) {
        // SAFETY: 1. the caller's obligation 1.
        let tree = unsafe { self.tables_of_owner() };
        let (mut at, end) = (range.start().0, range.end().0);
        while at < end {
            let EntryAt { node, index, .. } = protocol::descend(&tree, VirtAddr(at), counts);
            let Node { table, level } = node;
            let shift = level.span_shift();
            let left = (end - at).div_ceil(1 << shift);
            let room = u64::from(index.left::<P::Arch>()).min(left);
            let passed = if level == Level::PTE {
                let words = &self.entries(table)[index.position()..][..room as usize];
                let is_used = |word: &&AtomicU64| word.load(Ordering::Relaxed) != 0;
                let used = match holes {
                    Holes::None => words.len(),
                    Holes::Perhaps => words.iter().filter(is_used).count(),
                };
                for word in words {
                    word.store(0, Ordering::Relaxed);
                }
                // Release: see `count_in`.
                self.memory.frames.table(table.frame()).count_out(used as u64);
                counts.entries_written += words.len() as u64;
                words.len()
            } else {
                // The next round descends into a table next to a huge leaf.
                protocol::clear_leaves(&tree, node, index..index + room as u32, counts) as usize
            };
            let next = (at >> shift) + passed as u64;
            if next >> (u64::BITS - shift) != 0 {
                // The range ends with the last address of the address space.
                break;
            }
            at = next << shift;
        }
    }
}
