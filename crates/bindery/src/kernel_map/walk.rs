//! The one walk: finds or makes the tables on the way to an address, writes and clears runs of
//! leaves.
//!
//! ```text
//! addresses  |.....|64K|64K|64K|..4K..|            2 MiB            |  2 MiB  |.4K.|
//! written by  run of level 1           run of level 2: two entries             run
//! ```
//!
//! A [`Walk`] remembers the tables that led to the last address. The next walk begins at the lowest
//! of them that covers its address, not at the root. A run is written a table at a time: all its
//! entries of one level in one table, contiguous runs included.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Attributes, Entry, MemoryType, Permissions};
use crate::platform::{Invalidation, Platform, Tables};
use crate::stats::Counts;
use crate::table::{new_table, run};

use super::protocol;
use super::request::Pieces;
use super::{KernelMap, KernelMapError};

/// The most table levels that an architecture has.
const MAX_LEVELS: usize = 5;

/// What leaves say, but for their frames, and how large they may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaves {
    permissions: Permissions,
    memory: u64,
    /// The highest level that they may have.
    largest: u8,
    /// The highest level at which they may form contiguous runs.
    largest_contig: u8,
}

impl Leaves {
    /// Leaves as they stand somewhere already, so that the architecture has their type of memory.
    pub(super) fn of<P: Platform>(permissions: Permissions, memory: MemoryType) -> Self {
        let memory = P::Arch::memory_type(memory).unwrap_or(0);
        Self { permissions, memory, largest: 1, largest_contig: 0 }
    }

    /// As `other`, with other permissions.
    pub(super) fn like(other: &Self, permissions: Permissions) -> Self {
        Self { permissions, ..*other }
    }

    pub(super) fn largest(&self) -> u8 {
        self.largest
    }

    pub(super) fn largest_contig(&self) -> u8 {
        self.largest_contig
    }
}

/// A walk under way: the tables from the root down to `level` that lead to `at`.
pub(super) struct Walk {
    tables: [Frame; MAX_LEVELS + 1],
    at: u64,
    level: u8,
    pub(super) counts: Counts,
}

/// Whether all of a range is mapped that is to be cleared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holes {
    None,
    Perhaps,
}

/// Why a walk stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// A table was missing.
    OutOfMemory,
    /// Something stands at the address.
    Occupied(u64),
    /// A fatal signal waits.
    Interrupted,
}

impl From<Stop> for KernelMapError {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::OutOfMemory => Self::OutOfMemory,
            Stop::Occupied(at) => Self::Occupied(VirtAddr(at)),
            Stop::Interrupted => Self::Interrupted,
        }
    }
}

impl Walk {
    pub(super) fn new<P: Platform>(map: &KernelMap<'_, P>) -> Self {
        let mut tables = [Frame(0); MAX_LEVELS + 1];
        tables[usize::from(P::Arch::LEVELS)] = map.root;
        Self { tables, at: 0, level: P::Arch::LEVELS, counts: Counts::default() }
    }

    /// The table of `level` that stands for `at`; those that are missing are made.
    #[inline]
    fn table<P: Platform>(
        &mut self,
        map: &KernelMap<'_, P>,
        at: u64,
        level: u8,
    ) -> Result<Frame, Stop> {
        let mut have = self.level.max(level);
        // The table of `have` covers both addresses if they differ in nothing above its span.
        let covers = |have: u8| {
            let top = arch::span_shift::<P::Arch>(have) + P::Arch::INDEX_BITS;
            (self.at ^ at).checked_shr(top).unwrap_or(0) == 0
        };
        while have < P::Arch::LEVELS && !covers(have) {
            have += 1;
        }
        self.at = at;
        while have > level {
            let index = arch::index_of::<P::Arch>(VirtAddr(at), have);
            let parent = self.tables[usize::from(have)];
            let child = protocol::child(map, parent, have, index, &mut self.counts);
            let child = child.map_err(|stop| match stop {
                Stop::Occupied(_) => Stop::Occupied(at),
                stop => stop,
            });
            have -= 1;
            match child {
                Ok(child) => self.tables[usize::from(have)] = child,
                Err(stop) => {
                    self.level = have + 1;
                    return Err(stop);
                }
            }
        }
        self.level = level;
        Ok(self.tables[usize::from(level)])
    }
}

impl<P: Platform> KernelMap<'_, P> {
    /// How leaves are written.
    pub(super) fn leaves(
        &self,
        permissions: Permissions,
        memory: MemoryType,
        pieces: Pieces,
    ) -> Result<Leaves, KernelMapError> {
        let for_kernel =
            permissions.intersects(Permissions::ACCESS) && !permissions.contains(Permissions::USER);
        if !for_kernel {
            return Err(KernelMapError::BadPermissions);
        }
        check_executable(permissions, memory)?;
        let memory = P::Arch::memory_type(memory).ok_or(KernelMapError::NoSuchMemoryType)?;
        let single = pieces == Pieces::Base || self.reach.is_page();
        let (largest, largest_contig) =
            if single { (1, 0) } else { (self.largest_leaf, self.largest_contig) };
        Ok(Leaves { permissions, memory, largest, largest_contig })
    }

    /// The leaf of `frame` at `level`. The MMU has nothing to add to it, so plain stores change it.
    #[inline]
    pub(super) fn leaf(&self, frame: Frame, level: u8, leaves: &Leaves) -> Entry {
        let attributes = Attributes {
            permissions: leaves.permissions,
            accessed: true,
            dirty: leaves.permissions.contains(Permissions::WRITE),
            ..Attributes::default()
        };
        Entry(P::Arch::leaf(frame, level, attributes).0 | leaves.memory)
    }

    /// An empty table, which nobody locks: see the protocol.
    pub(super) fn new_table(&self, level: u8, counts: &mut Counts) -> Option<Frame> {
        let table = new_table(self.memory, level, counts).or_else(|| {
            // What was freed may wait for a purge.
            self.purge();
            new_table(self.memory, level, counts)
        })?;
        self.memory.frames.table(table).unlock();
        Some(table)
    }

    /// Maps `count` consecutive frames at `at`, in the largest pieces.
    ///
    /// # Errors
    /// Some of it may be mapped then: the caller clears the range.
    pub(super) fn map_run(
        &self,
        walk: &mut Walk,
        mut at: u64,
        mut first: Frame,
        mut count: u64,
        leaves: &Leaves,
    ) -> Result<(), Stop> {
        while count > 0 {
            let level = Self::level_of_piece(at, first, count, leaves.largest);
            let order = arch::order_of_level::<P::Arch>(level);
            let table = walk.table(self, at, level)?;
            let index = arch::index_of::<P::Arch>(VirtAddr(at), level);
            let room = arch::entries::<P::Arch>() - index;
            let entries = (count >> order).min(u64::from(room)) as u32;
            let written = self.write_run(walk, table, level, index, entries, first, leaves);
            if written.is_err() {
                self.map_among_tables(walk, at, first, (level, entries), leaves)?;
            }
            let pages = entries << order;
            at = at.wrapping_add(u64::from(pages) << PAGE_SHIFT);
            count -= u64::from(pages);
            // Behind the last run there need not be another frame.
            first = Frame(first.0.wrapping_add(pages));
        }
        Ok(())
    }

    /// Maps a run of entries of a level of which some name tables: those that an area has kept since
    /// it was smaller pieces. They stay, as a leaf in their place would take a flush; nothing is in
    /// them.
    #[cold]
    fn map_among_tables(
        &self,
        walk: &mut Walk,
        at: u64,
        first: Frame,
        (level, entries): (u8, u32),
        leaves: &Leaves,
    ) -> Result<(), Stop> {
        if level == 1 {
            return Err(Stop::Occupied(at));
        }
        let order = arch::order_of_level::<P::Arch>(level);
        let smaller = Leaves { largest: level - 1, ..*leaves };
        for entry in 0..entries {
            let pages = entry << order;
            let (at, first) = (at + (u64::from(pages) << PAGE_SHIFT), first.plus(pages));
            let table = walk.table(self, at, level)?;
            let index = arch::index_of::<P::Arch>(VirtAddr(at), level);
            if self.write_run(walk, table, level, index, 1, first, leaves).is_err() {
                self.map_run(walk, at, first, 1 << order, &smaller)?;
            }
        }
        Ok(())
    }

    /// The highest level at which a leaf can stand at `at` for `first`.
    #[inline]
    fn level_of_piece(at: u64, first: Frame, count: u64, largest: u8) -> u8 {
        let mut level = largest;
        while level > 1 {
            let pages = 1 << arch::order_of_level::<P::Arch>(level);
            if count >= pages && (at >> PAGE_SHIFT | u64::from(first.0)) & (pages - 1) == 0 {
                break;
            }
            level -= 1;
        }
        level
    }

    /// Writes leaves into entries of one table, which are empty, folded where contiguous runs fit.
    #[expect(clippy::too_many_arguments, reason = "a place, a run and its meaning")]
    fn write_run(
        &self,
        walk: &mut Walk,
        table: Frame,
        level: u8,
        index: u32,
        entries: u32,
        first: Frame,
        leaves: &Leaves,
    ) -> Result<(), ()> {
        let slots = &self.slots(table)[index as usize..(index + entries) as usize];
        let free = if level == 1 {
            self.count_in(table, slots, &mut walk.counts)
        } else {
            walk.counts.entries_read += u64::from(entries);
            run::are_empty(slots)
        };
        if !free {
            return Err(());
        }
        if self.reach.is_page() {
            // Each looked at, each made, each stored.
            for (slot, ahead) in slots.iter().zip(0..) {
                slot.store(self.leaf(first.plus(ahead), level, leaves).0, Ordering::Relaxed);
            }
            walk.counts.entries_written += u64::from(entries);
            return Ok(());
        }
        let leaf = self.leaf(first, level, leaves).0;
        let order = arch::order_of_level::<P::Arch>(level);
        let step = P::Arch::STEP << order;
        walk.counts.entries_written += u64::from(entries);
        let contig = P::Arch::CONTIG_ENTRIES;
        let congruent = (first.0 >> order ^ index) & (contig - 1) == 0;
        if contig == 1 || level > leaves.largest_contig || !congruent || entries < contig {
            store_run(slots, leaf, step);
            return Ok(());
        }
        // Single leaves up to the first contiguous run, contiguous runs, single leaves behind the last.
        let head = index.wrapping_neg() & (contig - 1);
        let contigs = entries.saturating_sub(head) & !(contig - 1);
        let (before, rest) = slots.split_at(head.min(entries) as usize);
        let (folded, behind) = rest.split_at(contigs as usize);
        let at = |ahead: u32| leaf.wrapping_add(step * u64::from(ahead));
        store_run(before, leaf, step);
        for (slots, ahead) in
            folded.chunks_exact(contig as usize).zip((head..).step_by(contig as usize))
        {
            store_contig::<P::Arch>(slots, index + ahead, at(ahead), step);
        }
        store_run(behind, at(head + contigs), step);
        Ok(())
    }

    /// Maps pages into one table of level 1, one by one but for the contiguous runs among them.
    pub(super) fn map_pages(
        &self,
        walk: &mut Walk,
        at: u64,
        pages: &[Frame],
        leaves: &Leaves,
    ) -> Result<(), Stop> {
        let table = walk.table(self, at, 1)?;
        let index = arch::index_of::<P::Arch>(VirtAddr(at), 1);
        let slots = &self.slots(table)[index as usize..][..pages.len()];
        if !self.count_in(table, slots, &mut walk.counts) {
            return Err(Stop::Occupied(at));
        }
        walk.counts.entries_written += pages.len() as u64;
        let base = self.leaf(Frame(0), 1, leaves).0;
        let leaf = |frame: Frame| base + P::Arch::STEP * u64::from(frame.0);
        let singles = |slots: &[AtomicU64], pages: &[Frame]| {
            for (slot, frame) in slots.iter().zip(pages) {
                slot.store(leaf(*frame), Ordering::Relaxed);
            }
        };
        let contig = P::Arch::CONTIG_ENTRIES as usize;
        if contig == 1 || leaves.largest_contig == 0 {
            singles(slots, pages);
            return Ok(());
        }
        // Single pages up to the first place for a contiguous run.
        let head = (index as usize).wrapping_neg() & (contig - 1);
        let head = head.min(pages.len());
        singles(&slots[..head], &pages[..head]);
        let index = index + head as u32;
        let places = slots[head..].chunks(contig).zip((index..).step_by(contig));
        for ((slots, index), pages) in places.zip(pages[head..].chunks(contig)) {
            let first = pages[0].0;
            let last = pages[pages.len() - 1].0;
            // Nearly always enough to tell that it is none.
            let may_be = first & (P::Arch::CONTIG_ENTRIES - 1) == 0
                && last.wrapping_sub(first) == P::Arch::CONTIG_ENTRIES - 1
                && pages.len() == contig;
            if !may_be || !are_consecutive(pages) {
                singles(slots, pages);
                continue;
            }
            store_contig::<P::Arch>(slots, index, leaf(Frame(first)), P::Arch::STEP);
        }
        Ok(())
    }

    /// Makes what was written visible to all walkers.
    pub(super) fn publish(&self, range: VirtRange, counts: &mut Counts) {
        self.memory.platform.publish_entries();
        if P::Arch::INVALID_MAY_BE_CACHED {
            self.invalidate(range, 1, Tables::Changed, counts);
        }
    }

    /// Makes all CPUs forget translations of `range`, of which none is smaller than a leaf of
    /// `level`.
    pub(super) fn invalidate(
        &self,
        range: VirtRange,
        level: u8,
        tables: Tables,
        counts: &mut Counts,
    ) {
        let level = if self.reach.is_page() { 1 } else { level.min(P::Arch::LARGEST_LEAF) };
        let stride = arch::span::<P::Arch>(level);
        counts.invalidations += 1;
        counts.pages_invalidated += range.pages();
        self.memory.platform.publish_entries();
        self.memory.platform.invalidate_kernel(self.root, &Invalidation { range, stride, tables });
    }

    /// Counts `entries` more in a table of level 1, of which `slots` are about to be filled. Fails,
    /// and counts nothing, where one of them is in use.
    ///
    /// A table in which nothing counts need not be looked at: a call that empties entries does so before
    /// it takes them off the count.
    #[inline]
    fn count_in(&self, table: Frame, slots: &[AtomicU64], counts: &mut Counts) -> bool {
        let meta = self.memory.frames.table(table);
        let entries = slots.len() as u64;
        let before = meta.count_in(entries);
        let is_empty = |slot: &AtomicU64| slot.load(Ordering::Relaxed) == 0;
        let free = if self.reach.is_page() {
            slots.iter().all(is_empty)
        } else if before == 0 {
            return true;
        } else {
            run::are_empty(slots)
        };
        counts.entries_read += entries;
        if !free {
            meta.count_out(entries);
        }
        free
    }

    /// Empties all leaves in a range of one area; what is empty already stays so.
    pub(super) fn clear(&self, range: VirtRange, holes: Holes, counts: &mut Counts) {
        let (mut at, end) = (range.start().0, range.end().0);
        while at < end {
            let (table, level, index) = self.lowest(VirtAddr(at), counts);
            let shift = arch::span_shift::<P::Arch>(level);
            let left = (end - at).div_ceil(1 << shift);
            let room = u64::from(arch::entries::<P::Arch>() - index).min(left);
            let passed = if level == 1 {
                let slots = &self.slots(table)[index as usize..][..room as usize];
                let is_used = |slot: &&AtomicU64| slot.load(Ordering::Relaxed) != 0;
                let used = match holes {
                    Holes::None => slots.len(),
                    Holes::Perhaps => slots.iter().filter(is_used).count(),
                };
                for slot in slots {
                    slot.store(0, Ordering::Relaxed);
                }
                // Release: see `count_in`.
                self.memory.frames.table(table).count_out(used as u64);
                counts.entries_written += slots.len() as u64;
                slots.len()
            } else {
                // A table next to a huge leaf is looked into by the next round.
                protocol::clear_leaves(self, table, level, index..index + room as u32, counts)
                    as usize
            };
            let next = (at >> shift) + passed as u64;
            if next >> (u64::BITS - shift) != 0 {
                // Behind the last address of all.
                break;
            }
            at = next << shift;
        }
    }

    /// The lowest table that exists for `at`, its level, and the position there.
    #[inline]
    pub(super) fn lowest(&self, at: VirtAddr, counts: &mut Counts) -> (Frame, u8, u32) {
        let lowest = protocol::descend(self, at, counts);
        (lowest.table, lowest.level, lowest.index)
    }
}

/// Stores `leaf` and what follows it, `step` more each.
#[inline]
fn store_run(slots: &[AtomicU64], mut leaf: u64, step: u64) {
    // Of a length that the compiler knows, so that two instructions for each are left.
    let (chunks, rest) = slots.as_chunks::<8>();
    for chunk in chunks {
        for (slot, ahead) in chunk.iter().zip(0..) {
            slot.store(leaf.wrapping_add(step * ahead), Ordering::Relaxed);
        }
        leaf = leaf.wrapping_add(step * 8);
    }
    for slot in rest {
        slot.store(leaf, Ordering::Relaxed);
        leaf = leaf.wrapping_add(step);
    }
}

/// Stores a contiguous run, of which `leaf` is the first as a page of its own, at `index`.
#[inline]
fn store_contig<A: Arch>(slots: &[AtomicU64], index: u32, leaf: u64, step: u64) {
    let entry = |ahead: u32| {
        A::set_contig(Entry(leaf.wrapping_add(step * u64::from(ahead))), index + ahead).0
    };
    // What neighbours differ by is the same throughout: the frame, or nothing (Svnapot).
    store_run(slots, entry(0), entry(1).wrapping_sub(entry(0)));
}

/// Devices cannot be run: a speculative fetch would be an access with effects (Arm ARM forbids it).
pub(super) fn check_executable(
    permissions: Permissions,
    memory: MemoryType,
) -> Result<(), KernelMapError> {
    let device = matches!(memory, MemoryType::Device | MemoryType::Uncached);
    if device && permissions.contains(Permissions::EXECUTE) {
        return Err(KernelMapError::BadPermissions);
    }
    Ok(())
}

/// Whether all frames follow the first. Two at a time, without a branch.
#[inline]
pub(super) fn are_consecutive(pages: &[Frame]) -> bool {
    let Some(first) = pages.first().map(|page| u64::from(page.0)) else { return true };
    let (pairs, rest) = pages.as_chunks::<2>();
    let mut expected = first | (first + 1) << 32;
    let mut differ = 0;
    for [low, high] in pairs {
        differ |= (u64::from(low.0) | u64::from(high.0) << 32) ^ expected;
        expected = expected.wrapping_add(2 | 2 << 32);
    }
    for page in rest {
        differ |= u64::from(page.0) ^ expected & u64::from(u32::MAX);
    }
    differ == 0
}
