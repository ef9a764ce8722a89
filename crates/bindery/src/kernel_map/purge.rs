//! The purge: detach, flush once, free the addresses, free the frames. The module documentation
//! explains this order.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Kind, Level};
use crate::deferred::{Batch as Unlinked, Chain, Tables as DetachedTables};
use crate::frame::table_meta::TableStack;
use crate::platform::{Platform, Tables};
use crate::stats::Counts;

use super::area::{Area, Claim, State};
use super::protocol::{self, Purge};
use super::walk::Holes;
use super::{KernelMap, Purging};

/// The areas and tables of one round of a purge.
pub(super) struct Batch {
    /// The first of the areas, which are linked.
    first: NonNull<Area>,
    /// The addresses to invalidate. The first round has those of all rounds: an area's frames may
    /// be in TLBs under the addresses of another area, which `vrealloc` has left.
    freeable: Option<VirtRange>,
    /// The detached tables, each with the tables below it.
    detached: TableStack,
}

/// The number of areas that are purged together, limited by the time under a spin lock. A table
/// shared by areas of several rounds is detached with the last of them.
const ROUND: usize = 128;
/// The number of areas that are removed from the index under one hold of the lock.
const CHUNK: usize = 32;

/// Adjacent areas that are being purged.
struct Purged {
    /// All their addresses.
    own: VirtRange,
    /// Their addresses and the free ones around them, up to the nearest areas that stay.
    free: VirtRange,
}

impl<P: Platform> KernelMap<'_, P> {
    /// Makes freed areas reusable: invalidates every TLB once for all areas (and again for each
    /// further 128 of them if tables are detached there). From then on their addresses and frames
    /// can be used again. When the call returns, this is true of every area that was freed before
    /// the call. Tables and records of areas are freed when no reader is left
    /// ([`crate::Memory::deferred`]).
    ///
    /// The map purges by itself when much waits, or when it runs out of memory or addresses. An
    /// embedder that needs memory for something else calls it, or calls [`KernelMap::vunmap`] with
    /// [`super::UnmapTime::Now`].
    ///
    /// Context: may sleep. Complexity: linear in the freed areas, times the logarithm of all areas.
    pub fn purge(&self) {
        self.purge_freed();
        self.memory.free_some();
    }

    /// Like [`KernelMap::purge`], for a caller that holds a claim: does not wait for readers.
    pub(super) fn purge_freed(&self) {
        self.purge_now(&self.purging.lock());
    }

    /// Purges if too many pages wait, unless another CPU purges already. Checks once more at the
    /// end: CPUs that freed areas during the purge found its lock taken and did not purge.
    ///
    /// The CPU that purges may be preempted for long, and all memory could end up in areas that
    /// wait for it. So above twice the limit, a free waits as well.
    pub(super) fn purge_if_due(&self) {
        let limit = self.purge_limit();
        for _ in 0..2 {
            let waiting = self.freed_pages();
            if waiting <= limit {
                return;
            }
            if let Some(purging) = self.purging.try_lock() {
                self.purge_now(&purging);
            } else if waiting > limit.saturating_mul(2) {
                drop(self.purging.lock());
            } else {
                return;
            }
        }
    }

    /// The number of pages that wait for a purge.
    ///
    /// Context: spins.
    pub fn freed_pages(&self) -> u64 {
        self.freed.lock().pages
    }

    pub(super) fn purge_limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    fn purge_now(&self, _purging: &Purging) {
        let mut counts = Counts::default();
        let first = {
            let mut freed = self.freed.lock();
            freed.pages = 0;
            freed.first.take()
        };
        let Some(first) = first else { return };
        // SAFETY: 1. no other CPU uses the list now: this purge has taken it.
        let freeable = unsafe { self.freeable(first) };
        {
            let mut freed = self.freed.lock();
            freed.detached = Some(first);
            freed.detached_freeable = Some(freeable);
        }
        protocol::purge(self, &mut counts);
        self.stats.add(&counts);
    }

    /// Takes up to a round of freed areas, and detaches the tables that cover no other area.
    fn take_batch(&self, counts: &mut Counts) -> Option<Batch> {
        let mut freed = self.freed.lock();
        let first = freed.detached?;
        // SAFETY: 1. the area waits for this purge, which frees it at its end.
        let mut last = unsafe { self.area(first) };
        for _ in 1..ROUND {
            match last.next() {
                // SAFETY: 1. as above.
                Some(next) => last = unsafe { self.area(next) },
                None => break,
            }
        }
        freed.detached = last.next();
        last.set_next(None);
        let freeable = freed.detached_freeable.take();
        let mut batch = Batch { first, freeable, detached: TableStack::new() };
        let survey = |area: &Area| {
            if area.state() == State::Purging {
                // SAFETY: 1. the lock is held.
                let Purged { own, free } = unsafe { self.survey(area) };
                protocol::detach(self, own, free, counts, |table| {
                    batch.detached.push(&self.memory.frames, table);
                });
            }
        };
        // SAFETY: 1. of both: the areas wait for this purge.
        unsafe {
            self.for_each_in(first, |area| area.set_state(State::Purging));
            self.for_each_in(first, survey);
        }
        if !batch.detached.is_empty() {
            // SAFETY: 1. as above.
            batch.freeable = batch.freeable.or_else(|| Some(unsafe { self.freeable(first) }));
        }
        Some(batch)
    }

    /// From the lowest to the highest address of the areas in a list.
    ///
    /// # Safety
    /// 1. As of [`KernelMap::for_each_in`].
    unsafe fn freeable(&self, first: NonNull<Area>) -> VirtRange {
        let (mut low, mut high) = (u64::MAX, 0);
        let widen = |area: &Area| {
            low = low.min(area.start());
            high = high.max(area.end());
        };
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.for_each_in(first, widen) };
        VirtRange::raw(low.min(high), high)
    }

    /// Calls `f` for the areas of a list.
    ///
    /// # Safety
    /// 1. The areas wait for a purge that the caller does and that frees them later.
    unsafe fn for_each_in(&self, first: NonNull<Area>, mut f: impl FnMut(&Area)) {
        let mut next = Some(first);
        while let Some(node) = next {
            // SAFETY: 1. the caller's obligation 1.
            let area = unsafe { self.area(node) };
            next = area.next();
            f(area);
        }
    }

    /// Finds the adjacent areas around `area` that are being purged, and marks them surveyed.
    ///
    /// # Safety
    /// 1. The caller holds the lock of the freed list.
    unsafe fn survey(&self, area: &Area) -> Purged {
        // SAFETY: 1. the caller's obligation 1.
        let found = |node: Option<NonNull<Area>>| node.map(|node| unsafe { self.area(node) });
        let is_purged = |area: &&Area| area.state() == State::Purging;
        let mut first = area;
        let mut before = found(self.index.previous(first));
        while let Some(other) = before.filter(is_purged) {
            first = other;
            before = found(self.index.previous(first));
        }
        let mut last = first;
        let after = loop {
            last.set_state(State::Surveyed);
            match found(self.index.next(last)) {
                Some(other) if is_purged(&other) => last = other,
                after => break after,
            }
        };
        let own = VirtRange::raw(first.start(), last.end());
        let low = before.map_or(0, Area::end);
        let high = after.map_or(u64::MAX, Area::start);
        Purged { own, free: VirtRange::raw(low, high) }
    }

    /// Frees a batch after the flush: frames now, tables and areas when readers have left.
    fn free_batch(&self, batch: Batch, counts: &mut Counts) {
        let memory = self.memory;
        let (mut tables, mut areas) = (DetachedTables::default(), Chain::default());
        for table in batch.detached.iter(&memory.frames) {
            self.gather_below(table, memory.frames.table(table).level(), &mut tables);
        }
        counts.tables_freed += u64::from(tables.count());
        let mut next = Some(batch.first);
        while let Some(node) = next {
            // SAFETY: 1. the batch has it, which this call takes.
            let area = unsafe { self.area(node) };
            next = area.next();
            area.blocks.free(memory);
            // SAFETY: 1. The slab gets it back when it leaves the chain. 2. It is only in this
            // batch's list, whose next link was read before.
            unsafe { areas.push(node) };
        }
        memory.free_after_readers(Unlinked::of(tables).with(areas));
    }

    /// Collects a detached table and those below it. The owners of their leaves have cleared them.
    /// Readers may still walk through them.
    fn gather_below(&self, table: Frame, level: Level<P::Arch>, tables: &mut DetachedTables) {
        if level > Level::PTE {
            for slot in self.slots(table) {
                let entry = Entry(slot.load(Ordering::Relaxed));
                if level.kind(entry) == Kind::Table {
                    // The recursion is as deep as the table levels.
                    self.gather_below(P::Arch::frame(entry), level.below(), tables);
                }
            }
        }
        // SAFETY: 1. the purge detached it, or the table above it, and visits it once; 2. the purge
        // flushes before it passes the list on.
        unsafe { tables.push(&self.memory.frames, table) };
    }

    /// Empties the map for its drop: frees all areas.
    pub(super) fn free_everything(&mut self) {
        let mut counts = Counts::default();
        while let Some(node) = self.index.first_ending_after(0) {
            // Areas that wait for a purge are still in the index; a second `put_off` would list
            // them twice.
            let mut at = Some(node);
            while let Some(node) = at {
                // SAFETY: 1. no other thread uses the map, and the purge comes below.
                let area = unsafe { self.area(node) };
                at = self.index.next(area);
                if matches!(area.state(), State::Live | State::Busy) {
                    self.clear(area.range(), Holes::Perhaps, &mut counts);
                    // SAFETY: 1. no other thread uses the map.
                    self.put_off(unsafe { Claim::new(node) });
                }
            }
            self.purge_freed();
        }
        self.stats.add(&counts);
        debug_assert!(self.arena.is_empty() || self.index.len() == 0);
    }

    /// Whether the areas' addresses are correct and no area is busy. For the auditor.
    pub(crate) fn index_is_sound(&self) -> bool {
        let in_arena = |node: NonNull<Area>| {
            // SAFETY: 1. the lock is held.
            let area = unsafe { self.area(node) };
            let whole = VirtRange::raw(area.start(), area.end());
            let guarded = area.range().end() < whole.end();
            self.arena.covers(whole) && guarded && area.state() != State::Busy
        };
        let _writer = self.freed.lock();
        self.index.check() && self.index.iter().all(in_arena)
    }

    /// The areas, in rising order. For the auditor.
    ///
    /// # Safety
    /// 1. No other call of the map runs as long as the iterator and its items are used.
    pub(crate) unsafe fn areas(&self) -> impl Iterator<Item = &Area> {
        // SAFETY: 1. the caller's obligation 1.
        self.index.iter().map(|node| unsafe { self.area(node) })
    }

    /// Whether the map owns its root. For the auditor.
    pub(crate) fn owns_root(&self) -> bool {
        self.ownership == super::Ownership::Own
    }

    /// Whether any area overlaps the `bytes` from `start` on. For the auditor.
    pub(crate) fn has_area_under(&self, start: VirtAddr, bytes: u64) -> bool {
        let overlaps = |area: &Area| area.start() - start.0.min(area.start()) < bytes;
        self.with_first_after(start.0, overlaps) == Some(true)
    }

    /// The area in use that contains `at`: only there may pages be mapped. For the auditor.
    ///
    /// # Safety
    /// 1. No other call of the map runs as long as the result is used.
    pub(crate) unsafe fn owner_of(&self, at: VirtAddr) -> Option<&Area> {
        let node = self.index.find_at_or_before(at.0)?;
        // SAFETY: 1. the caller's obligation 1.
        let area = unsafe { self.area(node) };
        (area.state() == State::Live && area.range().contains(at)).then_some(area)
    }
}

impl<P: Platform> Purge for KernelMap<'_, P> {
    type Batch = Batch;

    fn take(&self, counts: &mut Counts) -> Option<Batch> {
        self.take_batch(counts)
    }

    fn flush(&self, batch: &Batch, counts: &mut Counts) {
        let tables = if batch.detached.is_empty() { Tables::Unchanged } else { Tables::Changed };
        if let Some(freeable) = batch.freeable {
            self.invalidate(freeable, Level::PTE, tables, counts);
        }
    }

    fn give_back(&self, batch: &Batch) {
        let mut next = Some(batch.first);
        while next.is_some() {
            let mut freed = self.freed.lock();
            freed.last_found = None;
            for _ in 0..CHUNK {
                let Some(node) = next else { break };
                // SAFETY: 1. the batch has it.
                next = unsafe { self.area(node) }.next();
                // SAFETY: 1. The lock is held. 2. The area is in the index, since a purge takes it
                // out once, and no two areas have the same start. 3. It is freed after a
                // grace period (`free_batch`).
                unsafe { self.index.remove(node) };
            }
        }
    }

    fn free_after_readers(&self, batch: Batch, counts: &mut Counts) {
        self.free_batch(batch, counts);
    }
}
