//! Look-ups, faults and dumps. No function here claims an area.

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level, Permissions};
use crate::events::Unchanged;
use crate::platform::{Invalidation, Platform, Tables};
use crate::stats::Counts;
use crate::table::locking::Node;
use crate::table::{EntryAt, ReadSection};

use super::KernelMap;
use super::area::{Area, State};
use super::protocol::{self, FoundEntry};
use super::request::{KernelAddress, KernelArea, KernelPiece, Resolution};

/// Walks the tables to the entry of `at`.
fn find<P: Platform>(
    map: &KernelMap<'_, P>,
    section: &ReadSection<'_, P>,
    at: VirtAddr,
) -> FoundEntry<P::Arch> {
    protocol::find(&map.tables_in(section), at)
}

impl<P: Platform> KernelMap<'_, P> {
    /// The physical address of `at`, if it is mapped (Linux: `vmalloc_to_page`, `vmalloc_to_pfn`;
    /// unlike them, for areas of every kind).
    ///
    /// Context: any. Complexity: constant.
    pub fn physical(&self, at: VirtAddr) -> Option<PhysAddr> {
        if !self.areas.arena.contains(at) {
            return None;
        }
        let section = ReadSection::enter(self.memory.platform());
        let found = find(self, &section, at);
        if found.level.kind(found.entry) != Kind::Leaf {
            return None;
        }
        let leaf = P::Arch::frame(P::Arch::clear_contig(found.entry, found.index));
        let offset = at.0 & (found.level.span() - 1);
        Some(PhysAddr(leaf.start().0 + offset))
    }

    /// Explains a kernel address, for messages about faults and for debuggers.
    ///
    /// Takes no lock, so any context may call this function. Areas that are made or freed during
    /// the call may be missed.
    ///
    /// Context: any. Complexity: logarithmic in the areas.
    pub fn explain(&self, at: VirtAddr) -> KernelAddress {
        if !self.areas.arena.contains(at) {
            return KernelAddress::Outside;
        }
        let found: Option<(KernelArea, State)> = {
            let section = ReadSection::enter(self.memory.platform());
            let area = self.areas.at(&section, at);
            area.map(|area| (area.describe(), area.state()))
        };
        match found {
            None => KernelAddress::Free,
            Some((area, State::Freed | State::Purging | State::Surveyed)) => {
                KernelAddress::Freed { area }
            }
            Some((area, _)) if !area.range.contains(at) => KernelAddress::Guard { area },
            Some((area, _)) => match self.physical(at) {
                Some(to) => KernelAddress::Mapped { area, to },
                None => KernelAddress::Unmapped { area },
            },
        }
    }

    /// Handles a fault of the kernel at `at`, for an access that needs `needed`: waits while the
    /// address is paused, and returns whether to retry.
    ///
    /// Call it only for faults that the tables explain: a missing mapping or a missing permission.
    /// (For an alignment fault or an external abort of AArch64 the answer would be "retry"
    /// forever.)
    ///
    /// Takes no lock and waits only by [`Platform::relax`], so it may be called with interrupts
    /// off. (The CPU that has paused the address continues to run.)
    ///
    /// Context: any. Waits for the CPU that has paused the entry, for the time of one table and one
    /// invalidation.
    pub fn resolve(&self, at: VirtAddr, needed: Permissions) -> Resolution {
        if !self.areas.arena.contains(at) {
            return Resolution::NotMapped;
        }
        loop {
            let found = {
                let section = ReadSection::enter(self.memory.platform());
                find(self, &section, at)
            };
            if found.paused {
                self.memory.platform().relax();
                continue;
            }
            return match found.level.kind(found.entry) {
                Kind::Leaf => {
                    let allowed = P::Arch::attributes(found.entry).permissions;
                    if !allowed.contains(needed) {
                        return Resolution::Denied;
                    }
                    let page = at.align_down(PAGE_SIZE);
                    let written = self.stats.read().entries_written;
                    let fault = Unchanged { root: self.root, page, written };
                    self.memory.rare.repeats.note::<P::Arch>(&fault);
                    flush_local(self, at);
                    Resolution::Retry
                }
                Kind::Empty | Kind::Table | Kind::Absent => Resolution::NotMapped,
            };
        }
    }

    /// Calls `f` for all areas in use, in rising order (Linux: `/proc/vmallocinfo`).
    ///
    /// `f` is called without a lock, so it may call any function. The listing may miss areas that
    /// are made or freed during the call.
    ///
    /// Context: spins. Complexity: linear in the areas, times their logarithm.
    pub fn for_each_area(&self, mut f: impl FnMut(KernelArea)) {
        let mut from = 0;
        loop {
            let describe = |area: &Area| (area.describe(), area.state(), area.end());
            let found = self.areas.with_first_after(from, describe);
            let Some((area, state, end)) = found else { break };
            // An area that begins before `from` is new: it was created in place of the last
            // reported area, which was freed.
            let is_new = area.range.start().0 < from;
            if !is_new && matches!(state, State::Live | State::Busy) {
                f(area);
            }
            from = end;
        }
    }

    /// Calls `f` for all mapped pieces in `range`, in rising order; neighbors that agree are joined
    /// (Linux: `/sys/kernel/debug/kernel_page_tables`).
    ///
    /// Walks the tables without a lock, while other CPUs change them. Pieces that are mapped or
    /// unmapped during the call may be reported in full, in part, or not at all.
    ///
    /// Context: any. Complexity: linear in the entries read.
    pub fn for_each_piece(&self, range: VirtRange, mut f: impl FnMut(KernelPiece)) {
        let range = range.intersection(self.areas.arena);
        let (mut at, end) = (range.start(), range.end());
        let mut joined: Option<KernelPiece> = None;
        while at < end {
            let (next, piece) = next_piece(self, at, end);
            if let Some(piece) = piece {
                match &mut joined {
                    Some(last) if last.continues(&piece) => last.extend(&piece),
                    last => {
                        if let Some(done) = last.replace(piece) {
                            f(done);
                        }
                    }
                }
            }
            let Some(next) = next else { break };
            at = next;
        }
        if let Some(last) = joined {
            f(last);
        }
    }
}

/// Invalidates this CPU's TLB entry for `at`, which may be a cached invalid entry or have fewer
/// permissions. The CPU that changed the entry invalidates it on all CPUs. But that invalidation
/// may not have begun, or may wait for this very CPU, whose fault handler runs with interrupts off:
/// 1. CPU A pauses an entry; CPU B uses the address, and its MMU caches the invalid entry.
/// 2. CPU A writes the new entry and requests that B invalidate the old one.
/// 3. CPU B finds a valid entry, retries, and faults on the cached invalid entry, forever.
fn flush_local<P: Platform>(map: &KernelMap<'_, P>, at: VirtAddr) {
    let start = at.align_down(PAGE_SIZE).0;
    let range = VirtRange::raw(start, start + PAGE_SIZE);
    let tables = if P::Arch::INVALID_MAY_BE_CACHED { Tables::Changed } else { Tables::Unchanged };
    let invalidation = Invalidation { range, stride: PAGE_SIZE, tables };
    map.memory.platform().invalidate_local(map.root, &invalidation);
    map.memory.platform().relax();
}

/// The first joinable leaves from `at` on in one table, and the next address to examine; `None`
/// after the last address.
fn next_piece<P: Platform>(
    map: &KernelMap<'_, P>,
    at: VirtAddr,
    end: VirtAddr,
) -> (Option<VirtAddr>, Option<KernelPiece>) {
    let section = ReadSection::enter(map.memory.platform());
    let tree = map.tables_in(&section);
    let lowest = protocol::descend(&tree, at, &mut Counts::default());
    let EntryAt { node: Node { table, level }, mut index, mut entry } = lowest;
    let span = level.span();
    let (mut at, mut joined) = (at, None::<KernelPiece>);
    loop {
        let next = at.align_down(span).checked_add(span);
        entry = protocol::whole::<P::Arch>(entry);
        match level.kind(entry) {
            // The leaf has been cut, so the next call descends into its table.
            Kind::Table => return (Some(at), joined),
            Kind::Leaf => {
                let until = next.map_or(end.0, |next| next.0.min(end.0));
                let piece = piece::<P::Arch>(entry, level, index, VirtRange::raw(at.0, until));
                match &mut joined {
                    None => joined = Some(piece),
                    Some(last) if last.continues(&piece) => last.extend(&piece),
                    Some(_) => return (Some(at), joined),
                }
            }
            Kind::Empty | Kind::Absent if joined.is_some() => return (next, joined),
            Kind::Empty | Kind::Absent => {}
        }
        index += 1;
        let stays = index.left::<P::Arch>() > 0;
        let Some(next) = next.filter(|next| stays && *next < end) else {
            return (next, joined);
        };
        at = next;
        entry = protocol::KernelTree::load(&tree, table, index, Ordering::Acquire);
    }
}

/// The part of a leaf at `index` of a table that is in the range.
fn piece<A: Arch>(
    leaf: Entry,
    level: Level<A>,
    index: EntryIndex,
    range: VirtRange,
) -> KernelPiece {
    let span = level.span();
    let single = A::clear_contig(leaf, index);
    let entries = if A::is_contig(leaf) { u64::from(A::CONTIG_ENTRIES) } else { 1 };
    KernelPiece {
        range,
        to: PhysAddr(A::frame(single).start().0 + (range.start().0 & (span - 1))),
        size: span * entries,
        permissions: A::attributes(single).permissions,
        memory: A::memory_type_of(single),
    }
}
