//! The CPUs of the models, which run the steps of `vmap`, `protect` and `purge`.

use core::ops::Range;
use std::rc::Rc;
use std::vec::Vec;

use crate::sync::model::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Attributes, Entry, EntryIndex, Level, Permissions, Tiny};
use crate::kernel_map::protocol::{self, KernelTree, Purge, Rewrite};
use crate::platform::Tables;
use crate::stats::Counts;
use crate::table::locking::Node;

use super::world::{Area, Life, Omit, ROOT, State, World, count, page, pages};

/// A CPU of the model.
pub(super) struct Cpu {
    pub(super) world: Rc<World>,
    pub(super) number: usize,
}

// SAFETY: the model runs one thread at a time; the last thread drops the world.
unsafe impl Send for Cpu {}

/// The batch of the model's purge.
pub(super) struct Batch {
    areas: Vec<Area>,
    freeable: VirtRange,
    detached: Vec<Frame>,
}

impl KernelTree for Cpu {
    type Arch = Tiny;

    type Table = Frame;

    unsafe fn below(&self, frame: Frame) -> Frame {
        frame
    }

    fn top(&self) -> Frame {
        ROOT
    }

    fn load(&self, table: Frame, index: EntryIndex, order: Ordering) -> Entry {
        Entry(self.world.table(table).entries[index.position()].load(order))
    }

    fn store(&self, table: Frame, index: EntryIndex, entry: Entry, order: Ordering) {
        let paused = !entry.is_empty() && entry.0 & Tiny::PRESENT == 0;
        let entry = match self.world.omit {
            Omit::Pause if paused => return,
            Omit::KeepBits if paused => Entry::EMPTY,
            _ => entry,
        };
        self.world.table(table).entries[index.position()].store(entry.0, order);
    }

    fn offer(&self, table: Frame, index: EntryIndex, entry: Entry) -> Result<(), Entry> {
        let slot = &self.world.table(table).entries[index.position()];
        let relaxed = self.world.omit == Omit::Release;
        let success = if relaxed { Ordering::Relaxed } else { Ordering::AcqRel };
        if self.world.omit == Omit::Exchange {
            slot.store(entry.0, Ordering::Release);
            return Ok(());
        }
        let result = slot.compare_exchange(0, entry.0, success, Ordering::Acquire);
        result.map(drop).map_err(|other| {
            count(&self.world.seen.lost);
            Entry(other)
        })
    }

    fn make_table(&self, _level: Level<Tiny>, _counts: &mut Counts) -> Option<Frame> {
        let table = self.world.unborn(self.number);
        self.world.set_life(table, Life::Used);
        Some(table)
    }

    fn drop_table(&self, table: Frame, _counts: &mut Counts) {
        self.world.set_life(table, Life::Freed);
    }

    fn is_unflushed(&self, order: Ordering) -> bool {
        self.world.omit != Omit::WaitForFlush && self.world.unflushed.load(order) != 0
    }

    fn set_unflushed(&self, unflushed: bool, order: Ordering) {
        // An exchange, because loom does not order a plain store with a waiter's exchange.
        self.world.unflushed.swap(u32::from(unflushed), order);
        self.world.wake(&self.world.unflushed);
    }

    fn park_while_unflushed(&self) {
        // An exchange, because a load might return an older value than the last one written.
        if self.world.unflushed.fetch_or(0, Ordering::Relaxed) != 0 {
            count(&self.world.seen.waits);
            self.world.sleep(&self.world.unflushed);
        }
    }
}

impl Purge for Cpu {
    type Batch = Batch;

    fn take(&self, counts: &mut Counts) -> Option<Batch> {
        let (omit, mut detached) = (self.world.omit, Vec::new());
        let areas = self.world.with(&self.world.areas, |areas| {
            let (batch, others): (Vec<Area>, Vec<Area>) =
                areas.iter().partition(|area| area.state == State::Freed);
            for area in areas.iter_mut().filter(|area| area.state == State::Freed) {
                area.state = State::Purging;
            }
            for area in &batch {
                let own = area.range;
                let before = others.iter().map(|other| other.range.end().0);
                let after = others.iter().map(|other| other.range.start().0);
                let low = before.filter(|end| *end <= own.start().0).max().unwrap_or(0);
                let high = after.filter(|start| *start >= own.end().0).min().unwrap_or(u64::MAX);
                let asked = omit != Omit::AskWhetherFree;
                let (low, high) = if asked { (low, high) } else { (0, u64::MAX) };
                let free = VirtRange::raw(low, high);
                protocol::detach(self, own, free, counts, |table| detached.push(table));
            }
            batch
        });
        let low = areas.iter().map(|area| area.range.start().0).min()?;
        let high = areas.iter().map(|area| area.range.end().0).max()?;
        Some(Batch { areas, freeable: VirtRange::raw(low, high), detached })
    }

    fn flush(&self, batch: &Batch, _counts: &mut Counts) {
        if !matches!(self.world.omit, Omit::FlushBeforeAddresses | Omit::FlushBeforeFree) {
            self.flush_batch(batch);
        }
    }

    fn free_addresses(&self, batch: &Batch) {
        if self.world.omit != Omit::FlushBeforeFree {
            self.remove_areas(batch);
        }
        if self.world.omit == Omit::FlushBeforeAddresses {
            self.flush_batch(batch);
        }
    }

    /// Frees the frames at once, and the tables after a wait at the end of the model's purge.
    unsafe fn free_after_readers(&self, batch: Batch, _counts: &mut Counts) {
        for area in &batch.areas {
            for offset in 0..area.range.pages() {
                self.world.set_life(area.first.plus(offset as u32), Life::Freed);
            }
        }
        self.wait_for_readers();
        for table in &batch.detached {
            self.world.set_life(*table, Life::Freed);
        }
        if self.world.omit == Omit::FlushBeforeFree {
            self.flush_batch(&batch);
            self.remove_areas(&batch);
        }
    }
}

impl Cpu {
    pub(super) fn new(world: &Rc<World>, number: usize) -> Self {
        Self { world: Rc::clone(world), number }
    }

    /// `Platform::synchronize`. An exchange models its barrier: a section that the exchange does
    /// not see began later and therefore sees the earlier detach.
    fn wait_for_readers(&self) {
        if self.world.omit == Omit::Readers {
            return;
        }
        for slot in &self.world.reading {
            while slot.fetch_or(0, Ordering::AcqRel) != 0 {
                self.world.sleep(slot);
            }
        }
    }

    fn flush_batch(&self, batch: &Batch) {
        let changed = !batch.detached.is_empty();
        let tables = if changed { Tables::Changed } else { Tables::Unchanged };
        self.invalidate(batch.freeable, tables);
    }

    fn remove_areas(&self, batch: &Batch) {
        let purged = |area: &Area| batch.areas.iter().any(|other| other.range == area.range);
        self.world.with(&self.world.areas, |areas| areas.retain(|area| !purged(area)));
    }

    /// `Platform::invalidate_kernel`: a CPU is interrupted between two accesses, never inside one.
    fn invalidate(&self, range: VirtRange, tables: Tables) {
        for tlb in &self.world.tlbs {
            self.world.with(tlb, |tlb| {
                tlb.leaves.retain(|(known, _)| !known.overlaps(range));
                if tables == Tables::Changed {
                    tlb.tables.retain(|(known, _)| !known.overlaps(range));
                }
            });
        }
    }

    /// Runs `work` in a read section. (No guard: dropped by a panic, it would call loom again.)
    pub(super) fn in_section<R>(&self, work: impl FnOnce() -> R) -> R {
        let slot = &self.world.reading[self.number];
        slot.swap(1, Ordering::AcqRel);
        let result = work();
        slot.swap(0, Ordering::Release);
        self.world.wake(slot);
        result
    }
}

/// A leaf with the kernel's attributes.
fn leaf(frame: Frame, level: Level<Tiny>, permissions: Permissions) -> Entry {
    let attributes =
        Attributes { permissions, accessed: true, dirty: true, ..Attributes::default() };
    Tiny::page_entry(frame, level, attributes)
}

/// The range and first entry of the contiguous run around a leaf, or the leaf's own.
pub(super) fn whole_contig(
    range: VirtRange,
    entry: Entry,
    index: EntryIndex,
) -> (VirtRange, Entry) {
    if !Tiny::is_contig(entry) {
        return (range, entry);
    }
    let before = u64::from(index.offset_in(Tiny::CONTIG_ENTRIES));
    let start = range.start().0 - before * range.len();
    let whole = VirtRange::raw(start, start + u64::from(Tiny::CONTIG_ENTRIES) * range.len());
    (whole, Entry(entry.0 - before * Tiny::STEP))
}

const READ_WRITE: Permissions = Permissions::READ.union(Permissions::WRITE);

/// Operations that map and unmap.
impl Cpu {
    /// Reserves the addresses, if they are free.
    fn reserve(&self, range: VirtRange, first: Frame) -> bool {
        let done = self.world.with(&self.world.areas, |areas| {
            let free = areas.iter().all(|area| !area.range.overlaps(range));
            if free {
                areas.push(Area { range, first, state: State::Busy });
            }
            free
        });
        if !done {
            count(&self.world.seen.refusals);
        }
        done
    }

    fn set_state(&self, range: VirtRange, state: State) {
        self.world.with(&self.world.areas, |areas| {
            areas.iter_mut().filter(|area| area.range == range).for_each(|area| area.state = state);
        });
    }

    /// Maps frames from `first` on, by one huge leaf if it fits. Returns whether the addresses were
    /// free.
    pub(super) fn map(&self, range: VirtRange, first: Frame) -> bool {
        if !self.reserve(range, first) {
            return false;
        }
        let (mut at, mut frame) = (range.start(), first);
        while at < range.end() {
            let left = (range.end().0 - at.0) >> PAGE_SHIFT;
            let fits = |number: u64| number.is_multiple_of(4);
            let huge = left >= 4 && fits(at.0 >> PAGE_SHIFT) && fits(u64::from(frame.0));
            let level = if huge { Level::PMD } else { Level::PTE };
            let (mut table, mut have) = (ROOT, Tiny::ROOT);
            while have > level {
                let node = Node { table, level: have };
                let child = protocol::child(self, node, at, &mut Counts::default());
                (table, have) = (child.expect("another area's leaf"), have.below());
            }
            let index = level.index_of(at);
            let old = self.load(table, index, Ordering::Relaxed);
            assert!(old.is_empty(), "mapped over something");
            self.store(table, index, leaf(frame, level, READ_WRITE), Ordering::Relaxed);
            let pages = level.order().pages();
            (at, frame) = (at.offset(u64::from(pages) << PAGE_SHIFT), frame.plus(pages));
        }
        self.set_state(range, State::Live);
        true
    }

    /// Unmaps `range`, a live or reserved area, and lists it for a purge.
    pub(super) fn unmap(&self, range: VirtRange) {
        self.set_state(range, State::Busy);
        self.clear(range);
        self.set_state(range, State::Freed);
    }

    /// Like `KernelMap::clear`.
    fn clear(&self, range: VirtRange) {
        let (mut at, counts) = (range.start(), &mut Counts::default());
        while at < range.end() {
            let lowest = protocol::descend(self, at, counts);
            let (node, index) = (lowest.node, lowest.index);
            let Node { table, level } = node;
            let span = level.span();
            let passed = if level == Level::PTE || self.world.omit == Omit::LeaveEmpty {
                self.store(table, index, Entry::EMPTY, Ordering::Relaxed);
                1
            } else {
                protocol::clear_leaves(self, node, index..index + 1, counts)
            };
            at = VirtAddr(at.align_down(span).0 + u64::from(passed) * span);
        }
    }

    pub(super) fn purge(&self) {
        self.world.with(&self.world.purging, |()| protocol::purge(self, &mut Counts::default()));
    }

    /// A mapping attempt that fails because no table is available.
    pub(super) fn fail_to_map(&self, range: VirtRange) {
        if self.reserve(range, Frame(0)) {
            self.clear(range);
            self.world.with(&self.world.areas, |areas| areas.retain(|area| area.range != range));
        }
    }

    /// Cuts a huge leaf of four pages by write-protecting one of them.
    pub(super) fn cut(&self, number: u64) {
        let first = page(number).align_down(Tiny::PMD.span());
        let counts = &mut Counts::default();
        let parent = protocol::descend(self, first, counts);
        assert_eq!(parent.node.level, Level::PMD);
        let below = self.make_table(Level::PTE, counts).expect("the model has tables enough");
        for index in EntryIndex::all::<Tiny>() {
            let at = first.offset(u64::from(index) << PAGE_SHIFT);
            let single = self.part(parent.entry, index.number(), at == page(number));
            self.store(below, index, single, Ordering::Relaxed);
        }
        self.replace(&Replacement {
            cpu: self,
            node: parent.node,
            indices: parent.index..parent.index + 1,
            range: pages(first.0 >> PAGE_SHIFT, 4),
            new: |_| Tiny::table(below),
        });
    }

    /// Cuts a contiguous run of two by write-protecting its first page.
    pub(super) fn cut_contig(&self, number: u64) {
        let lowest = protocol::descend(self, page(number), &mut Counts::default());
        assert!(lowest.node.level == Level::PTE && Tiny::is_contig(lowest.entry));
        let first = Tiny::clear_contig(lowest.entry, lowest.index);
        let new = |index: EntryIndex| self.part(first, index - lowest.index, index == lowest.index);
        self.replace(&Replacement {
            cpu: self,
            node: lowest.node,
            indices: lowest.index..lowest.index + 2,
            range: pages(number, 2),
            new,
        });
    }

    /// The leaf of level 1 for a part of a larger one.
    fn part(&self, whole: Entry, offset: u32, protected: bool) -> Entry {
        let permissions = if protected { Permissions::READ } else { READ_WRITE };
        leaf(Tiny::frame(whole).plus(offset), Level::PTE, permissions)
    }

    fn replace(&self, replacement: &impl Rewrite<Self>) {
        self.world.with(&self.world.pausing, |()| {
            protocol::replace(self, replacement, &mut Counts::default());
        });
    }

    /// Makes a contiguous run of two leaves. No other CPU runs.
    pub(super) fn fold(&self, number: u64) {
        for number in [number, number + 1] {
            let lowest = protocol::descend(self, page(number), &mut Counts::default());
            let contig = Tiny::set_contig(lowest.entry, lowest.index);
            self.store(lowest.node.table, lowest.index, contig, Ordering::Relaxed);
        }
    }
}

/// Entries of one table that a CPU replaces and that map `range`.
struct Replacement<'a, F> {
    cpu: &'a Cpu,
    node: Node<Tiny>,
    indices: Range<EntryIndex>,
    range: VirtRange,
    new: F,
}

impl<F: Fn(EntryIndex) -> Entry> Rewrite<Cpu> for Replacement<'_, F> {
    fn table(&self) -> Frame {
        self.node.table
    }

    fn indices(&self) -> Range<EntryIndex> {
        self.indices.clone()
    }

    fn new_entry(&self, index: EntryIndex) -> Entry {
        (self.new)(index)
    }

    fn breaks(&self, old: Entry, new: Entry) -> bool {
        old != new && (Tiny::is_contig(old) || Tiny::needs_break(old, new, self.node.level))
    }

    fn flush(&self, _counts: &mut Counts) {
        self.cpu.invalidate(self.range, Tables::Unchanged);
    }
}
