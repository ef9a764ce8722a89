//! The purge: detach, flush once, free the addresses, free the frames. The module documentation has
//! the reasons for this order.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Kind, Level};
use crate::deferred::{Batch as Unlinked, Chain, Tables as DetachedTables};
use crate::frame::table_meta::TableStack;
use crate::platform::{Platform, Tables};
use crate::stats::Counts;

use super::area::{Area, State};
use super::protocol::{self, Purge};
use super::walk::Holes;
use super::{KernelMap, Purging};

/// What a purge works on.
pub(super) struct Batch {
    /// The first of its areas, which are linked.
    first: NonNull<Area>,
    /// What the TLBs have to forget. The first round has all areas of all rounds: one of them may
    /// have owned frames that TLBs know by the addresses of another, which it left for its own.
    freeable: Option<VirtRange>,
    /// The tables that were detached, each with what hangs below it.
    detached: TableStack,
}

/// Areas that are purged together: as many as may be looked at under a spin lock. A table with
/// entries of areas of several rounds is detached with the last of them.
const ROUND: usize = 128;
/// Areas that are taken out of the index under the lock at a time.
const CHUNK: usize = 32;

/// Areas next to each other that are being purged.
struct Purged {
    /// All their addresses.
    own: VirtRange,
    /// Those up to the nearest areas that stay, at which nothing is left either.
    free: VirtRange,
}

impl<P: Platform> KernelMap<'_, P> {
    /// Makes freed areas free: every TLB forgets them, once for all areas (and again for each
    /// further 128 of them if tables are detached there). From then on addresses and frames can be
    /// used again. When it returns, this is true of everything that was freed before the call.
    /// Tables and records of areas follow when no reader is left ([`crate::Memory::deferred`]).
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

    /// As [`KernelMap::purge`], for a caller with an area claimed: it waits for no reader.
    pub(super) fn purge_freed(&self) {
        self.purge_now(&self.purging.lock());
    }

    /// Purges if too much waits, unless another CPU does so already. Checks once more at the end:
    /// CPUs that freed areas meanwhile found the purge lock taken and left.
    ///
    /// The CPU that purges may be preempted for long, and all memory could pass through areas that
    /// wait for it: above twice the limit, a free waits as well.
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

    /// Pages that wait for a purge.
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
        // Nobody else has the list now.
        let freeable = self.freeable(first);
        {
            let mut freed = self.freed.lock();
            freed.detached = Some(first);
            freed.detached_freeable = Some(freeable);
        }
        protocol::purge(self, &mut counts);
        self.stats.add(&counts);
    }

    /// Takes freed areas, as many as a round has, and detaches the tables under which nothing is
    /// left.
    fn take_batch(&self, counts: &mut Counts) -> Option<Batch> {
        let mut freed = self.freed.lock();
        let first = freed.detached?;
        let mut last = first;
        for _ in 1..ROUND {
            match self.area(last).next() {
                Some(next) => last = next,
                None => break,
            }
        }
        freed.detached = self.area(last).next();
        self.area(last).set_next(None);
        let freeable = freed.detached_freeable.take();
        let mut batch = Batch { first, freeable, detached: TableStack::new() };
        self.for_each_in(first, |node| self.area(node).set_state(State::Purging));
        self.for_each_in(first, |node| {
            if self.area(node).state() == State::Purging {
                let Purged { own, free } = self.survey(node);
                protocol::detach(self, own, free, counts, |table| {
                    batch.detached.push(&self.memory.frames, table);
                });
            }
        });
        if !batch.detached.is_empty() {
            batch.freeable = batch.freeable.or(Some(self.freeable(first)));
        }
        Some(batch)
    }

    /// From the lowest address to the highest of the areas in a list.
    fn freeable(&self, first: NonNull<Area>) -> VirtRange {
        let (mut low, mut high) = (u64::MAX, 0);
        self.for_each_in(first, |node| {
            low = low.min(self.area(node).start());
            high = high.max(self.area(node).end());
        });
        VirtRange::raw(low.min(high), high)
    }

    fn for_each_in(&self, first: NonNull<Area>, mut f: impl FnMut(NonNull<Area>)) {
        let mut next = Some(first);
        while let Some(node) = next {
            next = self.area(node).next();
            f(node);
        }
    }

    /// The areas next to each other that are being purged, of which `node` is one. They are
    /// surveyed then. Called with the lock held.
    fn survey(&self, node: NonNull<Area>) -> Purged {
        let is_purged = |node: &NonNull<Area>| self.area(*node).state() == State::Purging;
        let mut first = node;
        let mut before = self.index.previous(first);
        while let Some(other) = before.filter(is_purged) {
            first = other;
            before = self.index.previous(first);
        }
        let mut last = first;
        let after = loop {
            self.area(last).set_state(State::Surveyed);
            match self.index.next(last) {
                Some(other) if is_purged(&other) => last = other,
                after => break after,
            }
        };
        let own = VirtRange::raw(self.area(first).start(), self.area(last).end());
        let low = before.map_or(0, |other| self.area(other).end());
        let high = after.map_or(u64::MAX, |other| self.area(other).start());
        Purged { own, free: VirtRange::raw(low, high) }
    }

    /// Frees everything that a purge has taken, after the flush: the frames now, what readers may
    /// know when they have left.
    fn free_batch(&self, batch: &Batch, counts: &mut Counts) {
        let memory = self.memory;
        let (mut tables, mut areas) = (DetachedTables::default(), Chain::default());
        for table in batch.detached.iter(&memory.frames) {
            self.gather_below(table, memory.frames.table(table).level(), &mut tables);
        }
        counts.tables_freed += u64::from(tables.count());
        self.for_each_in(batch.first, |node| {
            self.area(node).blocks.free(memory);
            // SAFETY: 1. The slab gets it back when it leaves the chain. 2. It is in no list any
            // more but this batch's, whose next link was read before.
            unsafe { areas.push(node) };
        });
        memory.free_after_readers(Unlinked::of(tables).with(areas));
    }

    /// Gathers a detached table and those below it. Their leaves were cleared by those who owned
    /// them. Readers may still be there.
    fn gather_below(&self, table: Frame, level: Level<P::Arch>, tables: &mut DetachedTables) {
        if level > Level::PTE {
            for slot in self.slots(table) {
                let entry = Entry(slot.load(Ordering::Relaxed));
                if level.kind(entry) == Kind::Table {
                    // As deep as there are levels.
                    self.gather_below(P::Arch::frame(entry), level.below(), tables);
                }
            }
        }
        // SAFETY: 1. the purge detached it, or the table above it, and visits it once; 2. the purge
        // flushes before it hands the list on.
        unsafe { tables.push(&self.memory.frames, table) };
    }

    /// Empties the map: frees all areas. For its drop.
    pub(super) fn free_everything(&mut self) {
        let mut counts = Counts::default();
        while let Some(node) = self.index.first_ending_after(0) {
            // Areas that wait for a purge are still in the index; `put_off` of one would list it
            // twice.
            let mut at = Some(node);
            while let Some(node) = at {
                let area = self.area(node);
                at = self.index.next(node);
                if matches!(area.state(), State::Live | State::Busy) {
                    self.clear(area.range(), Holes::Perhaps, &mut counts);
                    self.put_off(super::area::Claim(node));
                }
            }
            self.purge_freed();
        }
        self.stats.add(&counts);
        debug_assert!(self.arena.is_empty() || self.index.len() == 0);
    }

    /// The areas' addresses are right, and nobody has them busy. For the auditor.
    pub(crate) fn index_is_sound(&self) -> bool {
        let in_arena = |node: NonNull<Area>| {
            let area = self.area(node);
            let whole = VirtRange::raw(area.start(), area.end());
            let guarded = area.range().end() < whole.end();
            self.arena.covers(whole) && guarded && area.state() != State::Busy
        };
        let _writer = self.freed.lock();
        self.index.check() && self.index.iter().all(in_arena)
    }

    /// The areas, in rising order. For the auditor: nothing runs.
    pub(crate) fn areas(&self) -> impl Iterator<Item = &Area> {
        self.index.iter().map(|node| self.area(node))
    }

    /// Whether the root is the map's own. For the auditor.
    pub(crate) fn owns_root(&self) -> bool {
        self.ownership == super::Ownership::Own
    }

    /// Whether any area lies in the `bytes` from `start` on. For the auditor.
    pub(crate) fn has_area_under(&self, start: VirtAddr, bytes: u64) -> bool {
        let node = self.index.first_ending_after(start.0);
        node.is_some_and(|node| {
            self.area(node).start() - start.0.min(self.area(node).start()) < bytes
        })
    }

    /// Whether something may be mapped at `at`: it lies in an area that is in use. For the auditor.
    pub(crate) fn owner_of(&self, at: VirtAddr) -> Option<&Area> {
        let node = self.index.find_at_or_before(at.0)?;
        let area = self.area(node);
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
                next = self.area(node).next();
                // SAFETY: 1. The lock is held. 2. The area is in the index, since a purge takes it
                // out once, and no two areas have the same start. 3. It is freed after a
                // grace period (`free_batch`).
                unsafe { self.index.remove(node) };
            }
        }
    }

    fn free_after_readers(&self, batch: Batch, counts: &mut Counts) {
        self.free_batch(&batch, counts);
    }
}
