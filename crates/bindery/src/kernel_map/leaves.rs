//! Writes leaves into one table: runs of consecutive frames, contiguous runs included, and pages
//! that follow no order.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtAddr};
use crate::arch::{Arch, Attributes, Entry, EntryIndex, Level, MemoryType, Permissions};
use crate::platform::Platform;
use crate::table::{Table, run};

use super::request::Pieces;
use super::walk::{Walk, WalkError};
use super::{KernelMap, KernelMapError};

/// The attributes of leaves, and the largest leaf size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaves<A: Arch> {
    permissions: Permissions,
    memory: u64,
    /// The highest level of a leaf.
    largest: Level<A>,
    /// The highest level at which leaves may form contiguous runs.
    largest_contig: Level<A>,
}

impl<A: Arch> Leaves<A> {
    /// The leaves of `map` for these permissions.
    pub(super) fn new<P: Platform<Arch = A>>(
        map: &KernelMap<'_, P>,
        permissions: Permissions,
        memory: MemoryType,
        pieces: Pieces,
    ) -> Result<Self, KernelMapError> {
        let for_kernel =
            permissions.intersects(Permissions::ACCESS) && !permissions.contains(Permissions::USER);
        if !for_kernel {
            return Err(KernelMapError::BadPermissions);
        }
        check_executable(permissions, memory)?;
        let memory = map.memory.memory_type_bits(memory).ok_or(KernelMapError::NoSuchMemoryType)?;
        let single = pieces == Pieces::Base || map.reach.is_page();
        let (largest, largest_contig) =
            if single { (Level::PTE, Level::NONE) } else { (map.largest_leaf, map.largest_contig) };
        Ok(Self { permissions, memory, largest, largest_contig })
    }

    /// Leaves for a type of memory that the architecture supports.
    pub(super) fn of(permissions: Permissions, memory: MemoryType) -> Self {
        let memory = A::memory_type(memory).unwrap_or(0);
        Self { permissions, memory, largest: Level::PTE, largest_contig: Level::NONE }
    }

    /// Like `other`, with other permissions.
    pub(super) fn like(other: &Self, permissions: Permissions) -> Self {
        Self { permissions, ..*other }
    }

    /// The same leaves, in smaller pieces.
    pub(super) fn at_most(&self, largest: Level<A>) -> Self {
        Self { largest, ..*self }
    }

    pub(super) fn largest(&self) -> Level<A> {
        self.largest
    }

    /// The leaf of `frame` at `level`. The MMU sets no bits in it, so plain stores change it.
    #[inline]
    pub(super) fn leaf(&self, frame: Frame, level: Level<A>) -> Entry {
        let entry = A::page_entry(frame, level, Attributes::of_kernel(self.permissions));
        debug_assert!(entry.0 & A::PRESENT != 0, "`KernelMapError::BadPermissions` says no");
        Entry(entry.0 | self.memory)
    }

    /// The number of pages in the largest piece that fits into `pages`.
    pub(super) fn largest_piece(&self, pages: u64) -> u64 {
        self.piece_sizes().find(|piece| *piece <= pages).unwrap_or(1)
    }

    /// The sizes of pieces above a page, in pages, largest first.
    pub(super) fn piece_sizes(&self) -> impl Iterator<Item = u64> + use<A> {
        let (largest, largest_contig) = (self.largest, self.largest_contig);
        Level::PTE.up_to(largest).rev().flat_map(move |level| {
            let pages = 1_u64 << level.order().0;
            let contig = pages * u64::from(A::CONTIG_ENTRIES);
            let contig = (level <= largest_contig).then_some(contig);
            contig.into_iter().chain((level > Level::PTE).then_some(pages))
        })
    }
}

/// Entries of one table, and the first of the consecutive frames to map with them.
pub(super) struct LeafRun<'k, A: Arch> {
    pub(super) table: Table<'k>,
    pub(super) level: Level<A>,
    pub(super) index: EntryIndex,
    pub(super) entries: u32,
    pub(super) first: Frame,
}

impl<'k, P: Platform> Walk<'k, '_, P> {
    /// Adds entries `words` to the count of a level 1 table before they are filled. Fails without
    /// changing the count if any entry is in use.
    ///
    /// A table with a count of zero need not be read, because entries are emptied before they are
    /// subtracted from the count.
    #[inline]
    fn count_in(&mut self, table: Table<'_>, words: &[AtomicU64]) -> bool {
        let meta = self.map.memory.frames.table(table.frame());
        let entries = words.len() as u64;
        let before = meta.count_in(entries);
        let is_empty = |word: &AtomicU64| word.load(Ordering::Relaxed) == 0;
        let free = if self.map.reach.is_page() {
            words.iter().all(is_empty)
        } else if before == 0 {
            return true;
        } else {
            run::are_empty(words)
        };
        self.counts.entries_read += entries;
        if !free {
            meta.count_out(entries);
        }
        free
    }

    /// Writes leaves into empty entries of one table, as contiguous runs where they fit.
    pub(super) fn write_run(
        &mut self,
        run: &LeafRun<'k, P::Arch>,
        leaves: &Leaves<P::Arch>,
    ) -> Result<(), ()> {
        let map = self.map;
        let LeafRun { table, level, index, entries, first } = *run;
        let words = &map.entries(table)[index.positions(entries)];
        let free = if level == Level::PTE {
            self.count_in(table, words)
        } else {
            self.counts.entries_read += u64::from(entries);
            run::are_empty(words)
        };
        if !free {
            return Err(());
        }
        if map.reach.is_page() {
            // Each entry is checked, made and stored separately.
            for (word, ahead) in words.iter().zip(0..) {
                word.store(leaves.leaf(first.plus(ahead), level).0, Ordering::Relaxed);
            }
            self.counts.entries_written += u64::from(entries);
            return Ok(());
        }
        let leaf = leaves.leaf(first, level).0;
        let order = level.order();
        let step = P::Arch::STEP << order.0;
        self.counts.entries_written += u64::from(entries);
        let contig = P::Arch::CONTIG_ENTRIES;
        let congruent = (first.0 >> order.0 ^ index.number()) & (contig - 1) == 0;
        if contig == 1 || level > leaves.largest_contig || !congruent || entries < contig {
            store_run(words, leaf, step);
            return Ok(());
        }
        // Single leaves up to the first contiguous run, contiguous runs, single leaves after the
        // last.
        let head = index.number().wrapping_neg() & (contig - 1);
        let contigs = entries.saturating_sub(head) & !(contig - 1);
        let (before, rest) = words.split_at(head.min(entries) as usize);
        let (folded, after) = rest.split_at(contigs as usize);
        let at = |ahead: u32| leaf.wrapping_add(step * u64::from(ahead));
        store_run(before, leaf, step);
        for (words, ahead) in
            folded.chunks_exact(contig as usize).zip((head..).step_by(contig as usize))
        {
            store_contig::<P::Arch>(words, index + ahead, at(ahead), step);
        }
        store_run(after, at(head + contigs), step);
        Ok(())
    }

    /// Maps pages into one table of level 1: contiguous runs where they fit, single pages
    /// otherwise.
    pub(super) fn map_pages(
        &mut self,
        at: u64,
        pages: &[Frame],
        leaves: &Leaves<P::Arch>,
    ) -> Result<(), WalkError> {
        let map = self.map;
        let table = self.table(at, Level::PTE)?;
        let index = P::Arch::PTE.index_of(VirtAddr(at));
        let words = &map.entries(table)[index.position()..][..pages.len()];
        if !self.count_in(table, words) {
            return Err(WalkError::Occupied(at));
        }
        self.counts.entries_written += pages.len() as u64;
        let base = leaves.leaf(Frame(0), Level::PTE).0;
        let leaf = |frame: Frame| base + P::Arch::STEP * u64::from(frame.0);
        let singles = |words: &[AtomicU64], pages: &[Frame]| {
            for (word, frame) in words.iter().zip(pages) {
                word.store(leaf(*frame), Ordering::Relaxed);
            }
        };
        let contig = P::Arch::CONTIG_ENTRIES as usize;
        if contig == 1 || leaves.largest_contig == Level::NONE {
            singles(words, pages);
            return Ok(());
        }
        // Single pages up to the first place for a contiguous run.
        let head = index.position().wrapping_neg() & (contig - 1);
        let head = head.min(pages.len());
        singles(&words[..head], &pages[..head]);
        let mut index = index + head as u32;
        for (words, pages) in words[head..].chunks(contig).zip(pages[head..].chunks(contig)) {
            let at = index;
            index += contig as u32;
            let first = pages[0].0;
            let last = pages[pages.len() - 1].0;
            // A cheap test that nearly always rules out a run.
            let may_be = first & (P::Arch::CONTIG_ENTRIES - 1) == 0
                && last.wrapping_sub(first) == P::Arch::CONTIG_ENTRIES - 1
                && pages.len() == contig;
            if !may_be || !are_consecutive(pages) {
                singles(words, pages);
                continue;
            }
            store_contig::<P::Arch>(words, at, leaf(Frame(first)), P::Arch::STEP);
        }
        Ok(())
    }
}

/// Stores `leaf` and the following ones, each greater by `step`.
#[inline]
fn store_run(words: &[AtomicU64], mut leaf: u64, step: u64) {
    // The constant length lets the compiler use two instructions for each entry.
    let (chunks, rest) = words.as_chunks::<8>();
    for chunk in chunks {
        for (word, ahead) in chunk.iter().zip(0..) {
            word.store(leaf.wrapping_add(step * ahead), Ordering::Relaxed);
        }
        leaf = leaf.wrapping_add(step * 8);
    }
    for word in rest {
        word.store(leaf, Ordering::Relaxed);
        leaf = leaf.wrapping_add(step);
    }
}

/// Stores a contiguous run at `index`. `leaf` is its first entry, as if it were a single page.
#[inline]
fn store_contig<A: Arch>(words: &[AtomicU64], index: EntryIndex, leaf: u64, step: u64) {
    let entry = |ahead: u32| {
        A::set_contig(Entry(leaf.wrapping_add(step * u64::from(ahead))), index + ahead).0
    };
    // Neighbors differ by a constant: the frame, or nothing (Svnapot).
    store_run(words, entry(0), entry(1).wrapping_sub(entry(0)));
}

/// Fails for an executable mapping of memory that must not be fetched from.
pub(super) fn check_executable(
    permissions: Permissions,
    memory: MemoryType,
) -> Result<(), KernelMapError> {
    if !memory.is_executable() && permissions.contains(Permissions::EXECUTE) {
        return Err(KernelMapError::BadPermissions);
    }
    Ok(())
}

/// Whether all frames follow the first. Compares two at a time, without a branch.
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
