//! The purge: detach, flush once, free the addresses, free the frames. The module documentation
//! explains this order.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Kind, Level};
use crate::deferred::{Batch as Unlinked, Chain, DetachedTables};
use crate::frame::table_meta::TableStack;
use crate::platform::{Platform, Tables};
use crate::stats::Counts;
use crate::table::Table;
use crate::table::locking::Node;

use super::area::{Area, AreaList};
use super::areas::{Purged, Round};
use super::protocol::{self, MapTables, Purge};
use super::walk::Holes;
use super::{KernelMap, Purging};

/// The areas and tables of one round of a purge.
pub(super) struct PurgeBatch {
    areas: AreaList,
    /// The addresses to invalidate. The first round covers those of all rounds, because TLBs may
    /// hold an area's frames under the addresses of another area, which `vrealloc` has left.
    freeable: Option<VirtRange>,
    /// The detached tables, each with the tables below it.
    detached: TableStack,
}

impl PurgeBatch {
    /// Frees the batch after the flush: frames at once, tables and areas after a grace period.
    ///
    /// # Safety
    /// 1. As of [`Purge::free_after_readers`].
    unsafe fn free<P: Platform>(self, map: &KernelMap<'_, P>, counts: &mut Counts) {
        let memory = map.memory;
        let (mut tables, mut areas) = (DetachedTables::default(), Chain::default());
        for table in self.detached.iter(&memory.frames) {
            let level = memory.frames.table(table).level();
            // SAFETY: 1. a detached table, which is freed by this batch, later.
            let node = Node { table: unsafe { Table::new(table) }, level };
            gather_below(map, node, &mut tables);
        }
        counts.tables_freed += u64::from(tables.count());
        // SAFETY: 1. the caller's obligation 1.
        self.areas.for_each(|area| unsafe { area.blocks.free(memory) });
        for node in self.areas.nodes() {
            // SAFETY: 1. The slab receives the area when it leaves the chain. 2. The area is only
            // in this batch's list, which ends here, and the iterator has passed it.
            unsafe { areas.push(node) };
        }
        Unlinked::of(tables).with(areas).free_after_readers(memory);
    }
}

/// Collects a detached table and the tables below it. The owners of their leaves have cleared them.
/// Readers may still walk through the tables.
fn gather_below<P: Platform>(
    map: &KernelMap<'_, P>,
    node: Node<P::Arch, Table<'_>>,
    tables: &mut DetachedTables,
) {
    let Node { table, level } = node;
    if level > Level::PTE {
        for word in map.entries(table) {
            let entry = Entry(word.load(Ordering::Relaxed));
            if level.kind(entry) == Kind::Table {
                // The recursion is as deep as the table levels.
                // SAFETY: 1. an entry of a detached table; both are freed later.
                let table = unsafe { Table::new(P::Arch::frame(entry)) };
                gather_below(map, node.child(table), tables);
            }
        }
    }
    // SAFETY: 1. the purge detached it, or the table above it, and visits each table once; 2. the
    // purge flushes before it frees the list.
    unsafe { tables.push(&map.memory.frames, table.frame()) };
}

impl<P: Platform> KernelMap<'_, P> {
    /// Makes freed areas reusable. Invalidates every TLB once for all areas, and again for each
    /// further 128 areas if tables are detached there. When the call returns, the addresses and
    /// frames of every area that was freed before the call can be reused. Tables and area records
    /// are freed after a grace period ([`crate::Memory::deferred`]).
    ///
    /// The map purges by itself when many pages wait or when it runs out of memory or addresses. An
    /// embedder that needs memory for another purpose calls this function, or [`KernelMap::vunmap`]
    /// with [`super::UnmapTime::Now`].
    ///
    /// Context: may sleep. Complexity: linear in the freed areas, times the logarithm of all areas.
    pub fn purge(&self) {
        self.purge_freed();
        crate::deferred::free_some(self.memory);
    }

    /// Like [`KernelMap::purge`], for a caller that holds a claim; does not wait for readers.
    pub(super) fn purge_freed(&self) {
        self.purge_now(&self.purging.lock());
    }

    /// Purges if too many pages wait, unless another CPU is purging. Checks once more at the end,
    /// because a CPU that freed areas during the purge found the lock held and did not purge.
    ///
    /// The purging CPU may be preempted for long, and all memory could end up in areas that wait
    /// for the purge. So above twice the limit, a free waits as well.
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
        self.areas.freed_pages()
    }

    pub(super) fn purge_limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    fn purge_now(&self, purging: &Purging) {
        if self.areas.begin_purge(purging) {
            let mut counts = Counts::default();
            // SAFETY: 1. the caller has the right to purge.
            protocol::purge(&unsafe { self.tables_of_owner() }, &mut counts);
            self.stats.add(&counts);
        }
    }

    /// Empties the map for its drop: frees all areas.
    pub(super) fn free_everything(&mut self) {
        let mut counts = Counts::default();
        // SAFETY: 1. `&mut self`: the caller owns all areas.
        let mut clear =
            |area: &Area| unsafe { self.clear(area.range(), Holes::Perhaps, &mut counts) };
        // SAFETY: 1. `&mut self`.
        while unsafe { self.areas.put_off_all(&mut clear) } {
            self.purge_freed();
        }
        self.stats.add(&counts);
        debug_assert!(self.areas.arena.is_empty() || self.areas.is_empty());
    }
}

/// The auditor's side.
impl<P: Platform> KernelMap<'_, P> {
    /// Whether the areas' addresses are correct and no area is busy.
    pub(crate) fn index_is_sound(&self) -> bool {
        self.areas.is_sound()
    }

    /// The areas, in rising order.
    ///
    /// # Safety
    /// 1. No other call of the map runs while the iterator or an item is in use.
    pub(crate) unsafe fn areas(&self) -> impl Iterator<Item = &Area> {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.areas.iter() }
    }

    /// Whether the map owns its root.
    pub(crate) fn owns_root(&self) -> bool {
        self.ownership == super::Ownership::Own
    }

    /// Whether any area overlaps the `bytes` from `start` on.
    pub(crate) fn has_area_under(&self, start: VirtAddr, bytes: u64) -> bool {
        let overlaps = |area: &Area| area.start() - start.0.min(area.start()) < bytes;
        self.areas.with_first_after(start.0, overlaps) == Some(true)
    }

    /// The area in use that contains `at`. Pages may be mapped only in such an area.
    ///
    /// # Safety
    /// 1. No other call of the map runs while the result is in use.
    pub(crate) unsafe fn owner_of(&self, at: VirtAddr) -> Option<&Area> {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { self.areas.owner_of(at) }
    }
}

impl<P: Platform> Purge for MapTables<'_, '_, P> {
    type Batch = PurgeBatch;

    /// Takes up to a round of freed areas and detaches the tables that cover no other area.
    fn take(&self, counts: &mut Counts) -> Option<PurgeBatch> {
        let mut detached = TableStack::new();
        let round = self.areas.take_round(|Purged { own, free }| {
            protocol::detach(self, own, free, counts, |table| {
                detached.push(&self.memory.frames, table.frame());
            });
        });
        let Round { areas, freeable } = round?;
        let others = || (!detached.is_empty()).then(|| areas.range());
        let freeable = freeable.or_else(others);
        Some(PurgeBatch { areas, freeable, detached })
    }

    fn flush(&self, batch: &PurgeBatch, counts: &mut Counts) {
        let tables = if batch.detached.is_empty() { Tables::Unchanged } else { Tables::Changed };
        if let Some(freeable) = batch.freeable {
            self.invalidate(freeable, Level::PTE, tables, counts);
        }
    }

    fn free_addresses(&self, batch: &PurgeBatch) {
        // SAFETY: 1. freed areas remain in the index until a purge, and the purge removes each
        // once;
        // 2. `PurgeBatch::free` frees the areas after a grace period.
        unsafe { self.areas.remove(&batch.areas) };
    }

    unsafe fn free_after_readers(&self, batch: PurgeBatch, counts: &mut Counts) {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { batch.free(self, counts) };
    }
}
