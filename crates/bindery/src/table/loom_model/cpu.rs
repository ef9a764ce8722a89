//! The CPUs of the models, which work on tables as `cursor`, `zap`, `mover` and `space` do.

use std::rc::Rc;
use std::vec::Vec;

use crate::sync::model::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Kind, Level, Tiny};
use crate::frame::pending::{self, Last};
use crate::table::locking::{self, Depth, LockSet, LockTree, Node};
use crate::table::stray;

use super::world::{INITIAL, Inside, Life, Omit, ROOT, Table, World, count, index_of, page, pages};

/// Bits of a table's state, as in `frame::meta`.
const LOCK: u32 = 1;
const STRAY: u32 = 2;
/// Set if the table should be stray: the model records this even if it omits the mark.
const GONE: u32 = 4;
/// A bit of the VMA's lock, as in `vma`; the bits below it count readers.
const WRITER: u32 = 1 << 31;

/// A CPU at work. It performs the protocol's operations on a tree with the orderings of
/// `PageTable`.
pub(super) struct Cpu {
    pub(super) world: Rc<World>,
    number: usize,
}

// SAFETY: the model runs one thread at a time; the last one drops the world.
unsafe impl Send for Cpu {}

impl LockTree for Cpu {
    type Table = Frame;
    type Arch = Tiny;

    fn root(&self) -> Frame {
        ROOT
    }

    fn lock(&self, table: Frame) {
        loop {
            let state = &self.table(table).state;
            if state.fetch_or(LOCK, Ordering::Acquire) & LOCK == 0 {
                break;
            }
            count(&self.world.seen.waits);
            self.world.sleep(state);
        }
    }

    fn unlock(&self, table: Frame) {
        let state = &self.table(table).state;
        state.fetch_and(!LOCK, Ordering::Release);
        self.world.wake(state);
    }

    fn is_stray(&self, table: Frame) -> bool {
        let stray = self.table(table).state.load(Ordering::Relaxed) & STRAY != 0;
        if !stray || self.world.omit == Omit::StrayCheck {
            return false;
        }
        count(&self.world.seen.restarts);
        true
    }

    fn mark_stray(&self, table: Frame) {
        let table = self.table(table);
        let told = self.world.omit != Omit::StrayBelow || table.level > Level::PTE;
        table.state.fetch_or(if told { STRAY | GONE } else { GONE }, Ordering::Relaxed);
    }

    fn clear_stray(&self, table: Frame) {
        self.table(table).state.fetch_and(!(STRAY | GONE), Ordering::Relaxed);
    }

    fn is_locked(&self, table: Frame) -> bool {
        self.table(table).state.load(Ordering::Acquire) & LOCK != 0
    }

    fn is_pending(&self, table: Frame) -> bool {
        pending::count(&self.table(table).pending) != 0
    }

    fn is_at(&self, node: Node<Tiny>, addr: VirtAddr) -> bool {
        if self.world.omit == Omit::SecondDescent {
            return true;
        }
        let mut found = Some(self.root());
        for level in node.level.above().up_to(Tiny::ROOT).rev() {
            let index = level.index_of(addr);
            found = found.and_then(|table| self.child(Node { table, level }, index));
        }
        if found != Some(node.table) {
            count(&self.world.seen.restarts);
        }
        found == Some(node.table)
    }

    fn entry_count(&self, table: Frame) -> u32 {
        self.table(table).inside(|inside| inside.entry_count)
    }

    fn child(&self, node: Node<Tiny>, index: EntryIndex) -> Option<Frame> {
        let entry = Entry(self.table(node.table).entries[index.position()].load(Ordering::Acquire));
        (node.level.kind(entry) == Kind::Table).then(|| Tiny::frame(entry))
    }
}

/// The way in which a CPU reaches tables.
impl Cpu {
    pub(super) fn new(world: &Rc<World>, number: usize) -> Self {
        Self { world: Rc::clone(world), number }
    }

    /// The table, which must not have been freed. Every operation of a CPU on a table starts with
    /// this call.
    pub(super) fn table(&self, table: Frame) -> &Table {
        let table = &self.world.tables[table.0 as usize];
        // SAFETY: the cell panics if the table may be created or freed at the same time.
        table.life.with(|life| assert_eq!(unsafe { *life }, Life::Used, "touched a freed table"));
        table
    }

    fn touch(&self, table: Frame) {
        self.table(table);
    }

    /// Runs `work` in a read section. (A guard would not do: dropped by a panic, it would call loom
    /// again.)
    pub(super) fn in_section<R>(&self, work: impl FnOnce(&mut LockSet) -> R) -> R {
        let mut locks = LockSet::new();
        let slot = &self.world.reading[self.number];
        slot.swap(1, Ordering::AcqRel);
        let result = work(&mut locks);
        locks.release(self);
        slot.swap(0, Ordering::Release);
        self.world.wake(slot);
        result
    }

    /// `Platform::synchronize`. An exchange models its barrier: a section that the exchange does
    /// not see began later, and sees the earlier detach.
    fn synchronize(&self) {
        if self.world.omit == Omit::Readers {
            return;
        }
        for slot in &self.world.reading {
            while slot.fetch_or(0, Ordering::AcqRel) != 0 {
                self.world.sleep(slot);
            }
        }
    }

    /// Descends from `node`, a locked table, to page `at`, and counts the visit there. Missing
    /// tables are created, as `PageTable::table_under` does.
    fn visit(&self, mut node: Node<Tiny>, at: VirtAddr, locks: &mut LockSet) {
        while node.level > Level::PTE {
            let index = node.level.index_of(at);
            let child = self.child(node, index);
            let table = child.unwrap_or_else(|| self.create(node, at, locks));
            node = node.child(table);
        }
        let table = self.table(node.table);
        let state = table.state.load(Ordering::Relaxed);
        assert_eq!(state & GONE, 0, "wrote into a stray table");
        let place = at.align_down(Tiny::PMD.span());
        // SAFETY: the cell panics if the table may be moved at the same time.
        table.place.with(|known| assert_eq!(unsafe { *known }, place, "wrote to an old address"));
        table.inside(|inside| inside.visits[index_of(at, Level::PTE)] += 1);
    }

    /// A new locked table for `at`, installed below `node`.
    fn create(&self, node: Node<Tiny>, at: VirtAddr, locks: &mut LockSet) -> Frame {
        let level = node.level.below();
        let own = INITIAL.len() + 2 * self.number;
        let frame = Frame((own + usize::from(level.number()) - 1) as u32);
        let table = &self.world.tables[frame.0 as usize];
        table.set_life(Life::Used);
        table.set_place(at.align_down(level.table_span()));
        if self.world.omit != Omit::LockedBirth {
            table.state.store(LOCK, Ordering::Release);
            locks.push(frame);
        }
        self.install(node, at, frame);
        frame
    }

    /// Makes the entry of `node` for `at` refer to `table`.
    pub(super) fn install(&self, node: Node<Tiny>, at: VirtAddr, table: Frame) {
        let parent = self.table(node.table);
        let released = self.world.omit != Omit::Release;
        let order = if released { Ordering::Release } else { Ordering::Relaxed };
        parent.entries[index_of(at, node.level)].store(Tiny::table(table).0, order);
        parent.inside(|inside| inside.entry_count += 1);
    }

    /// Clears the entry of `node` for `at` and returns the table to which the entry referred.
    pub(super) fn detach(&self, node: Node<Tiny>, at: VirtAddr) -> Option<Frame> {
        let index = node.level.index_of(at);
        let table = self.child(node, index)?;
        let parent = self.table(node.table);
        let released = self.world.omit != Omit::ReleaseClear;
        let order = if released { Ordering::Release } else { Ordering::Relaxed };
        parent.entries[index.position()].store(0, order);
        parent.inside(|inside| inside.entry_count -= 1);
        Some(table)
    }

    /// As `Span::detach`: marks only the table of `node`, and leaves the tables below it for later.
    fn mark_detached(
        &self,
        node: Node<Tiny>,
        detached: &mut Vec<Node<Tiny>>,
        gathered: &mut Vec<Frame>,
    ) {
        self.lock(node.table);
        self.mark_stray(node.table);
        self.unlock(node.table);
        if node.level == Level::PTE {
            gathered.push(node.table);
        } else {
            detached.push(node);
        }
    }

    /// As `detach::gather_below`.
    fn gather_below(&self, node: Node<Tiny>, gathered: &mut Vec<Frame>) {
        let level = node.level.below();
        let mut tables = Vec::new();
        if self.world.omit == Omit::WaitBelow {
            let entries = EntryIndex::all::<Tiny>();
            tables.extend(entries.filter_map(|index| self.child(node, index)));
        } else {
            self.in_section(|_| {
                stray::mark_children(self, node, &mut |table| tables.push(table));
            });
        }
        self.table(node.table).inside(|inside| inside.entry_count -= tables.len() as u32);
        for table in tables {
            if level > Level::PTE {
                self.gather_below(Node { table, level }, gathered);
            } else {
                gathered.push(table);
            }
        }
        gathered.push(node.table);
    }

    /// As `detach::gather_subtree`. Counts are changed without the lock, because no other thread
    /// may be in a marked table.
    pub(super) fn gather_subtree(
        &self,
        node: Node<Tiny>,
        held: Level<Tiny>,
        gathered: &mut Vec<Frame>,
    ) {
        stray::mark_subtree_stray(self, node, held, &mut |table, children| {
            self.table(table).inside(|inside| inside.entry_count -= children);
            gathered.push(table);
        });
    }

    /// Drops the entries of the tables, waits for readers, and frees the tables.
    pub(super) fn finish(&self, gathered: Vec<Frame>) {
        for frame in &gathered {
            let left = self.table(*frame).inside(|inside| inside.entry_count);
            assert_eq!(left, 0, "a table below was not gathered");
        }
        self.synchronize();
        for frame in gathered {
            let table = self.table(frame);
            let kept = self.world.omit != Omit::KeepPending;
            if !kept || pending::release(&table.pending) == Last::Yes {
                table.set_life(Life::Freed);
            }
        }
    }
}

/// The operations.
impl Cpu {
    /// An operation on `range`, which visits the first and the last page like a cursor.
    pub(super) fn operate(&self, range: VirtRange) {
        self.in_section(|locks| {
            let cover = locking::lock_range(self, range, Depth::Floor(Level::PTE), locks);
            assert!(
                cover.level > Level::PTE || locks.len() == 1,
                "kept a lock when it started again"
            );
            self.visit(cover, range.start(), locks);
            if range.pages() > 1 {
                self.visit(cover, VirtAddr(range.end().0 - PAGE_SIZE), locks);
            }
        });
    }

    /// Looks for the lowest table of page `number` without locks, as `PageTable::peek`, then reads
    /// the entry.
    pub(super) fn peek(&self, number: u64) {
        let find = || {
            let (mut table, mut level) = (ROOT, Tiny::ROOT);
            while level > Level::PTE
                && let Some(child) = self.child(Node { table, level }, level.index_of(page(number)))
            {
                (table, level) = (child, level.below());
            }
            table
        };
        if self.world.omit == Omit::OneSection {
            let table = self.in_section(|_| find());
            self.in_section(|_| self.touch(table));
        } else {
            self.in_section(|_| self.touch(find()));
        }
    }

    /// A move of `count` pages, as `mover::range` performs it with level-1 pieces. The move visits
    /// the first page of the source and the last page of the target.
    pub(super) fn transfer(&self, from: u64, to: u64, count: u64) {
        let (from, to) = (pages(from, count), pages(to, count));
        self.in_section(|locks| {
            let [source, target] = if self.world.omit == Omit::OnePass {
                let source = locking::lock_range(self, from, Depth::Floor(Level::PTE), locks);
                [source, locking::lock_range(self, to, Depth::Floor(Level::PTE), locks)]
            } else {
                locking::lock_both_ranges(self, [from.into(), to.into()], Level::PTE, locks)
            };
            self.visit(source, from.start(), locks);
            self.visit(target, VirtAddr(to.end().0 - PAGE_SIZE), locks);
        });
    }

    /// As `zap`: detaches the tables that `range` covers completely, works in the tables at its
    /// edges (all hang in the cover), and frees the detached tables.
    pub(super) fn zap(&self, range: VirtRange) {
        let (mut detached, mut gathered) = (Vec::new(), Vec::new());
        self.in_section(|locks| {
            let cover = locking::lock_range(self, range, Depth::Edges, locks);
            let span = cover.level.span();
            let mut at = range.start();
            while at < range.end() {
                let start = at.align_down(span);
                let slot = VirtRange::raw(start.0, start.0 + span);
                let index = cover.level.index_of(at);
                if !range.covers(slot) {
                    if self.child(cover, index).is_some() {
                        self.visit(cover, at, locks);
                    }
                } else if let Some(table) = self.detach(cover, at) {
                    let node = cover.child(table);
                    self.mark_detached(node, &mut detached, &mut gathered);
                }
                at = slot.end();
            }
        });
        for node in detached {
            self.gather_below(node, &mut gathered);
        }
        self.finish(gathered);
    }

    /// As `detach::prune`: detaches the empty tables for page `number`, from the lowest up, each
    /// under its own lock and that of its parent.
    pub(super) fn prune(&self, number: u64) {
        let mut gathered = Vec::new();
        for level in Level::PMD.up_to(Tiny::ROOT) {
            let span = level.span();
            let start = page(number).align_down(span);
            let slot = VirtRange::raw(start.0, start.0 + span);
            let pruned = self.in_section(|locks| {
                let cover = locking::lock_range(self, slot, Depth::Floor(level.below()), locks);
                // No test prunes under a missing parent table.
                assert_eq!(cover.level, level);
                let index = level.index_of(start);
                let Some(table) = self.child(cover, index) else { return true };
                let empty =
                    |inside: &mut Inside| inside.entry_count == 0 && inside.visits == [0; 4];
                if !self.table(table).inside(empty) {
                    return false;
                }
                self.detach(cover, start);
                self.gather_subtree(cover.child(table), level.below(), &mut gathered);
                true
            });
            if !pruned {
                break;
            }
        }
        self.finish(gathered);
    }

    /// A move to page `to` that leaves nothing in `freeable`, a whole entry span, so that the table
    /// of `freeable` is freed. As `detach_emptied`, with the freed tables already locked.
    pub(super) fn empty(&self, freeable: VirtRange, to: u64) {
        let mut gathered = Vec::new();
        self.in_section(|locks| {
            let ends = [freeable.into(), pages(to, 1).into()];
            let [source, target] = locking::lock_both_ranges(self, ends, Level::PTE, locks);
            self.visit(target, page(to), locks);
            if let Some(table) = self.detach(source, freeable.start()) {
                let node = source.child(table);
                self.gather_subtree(node, Level::PTE, &mut gathered);
            }
        });
        self.finish(gathered);
    }

    /// A fault at page `number`.
    pub(super) fn fault(&self, number: u64) {
        self.with_vma(number, || self.operate(pages(number, 1)));
    }

    /// `munmap` of the VMA, with the surrounding `range`.
    pub(super) fn unmap(&self, range: VirtRange) {
        self.change_vma(pages(0, 0), || self.zap(range));
    }

    /// `mremap` of a VMA that fills an entry span of `level`. Only the parents of its tables are
    /// locked.
    pub(super) fn move_table(&self, from: VirtRange, to: VirtRange, level: Level<Tiny>) {
        self.change_vma(to, || {
            self.in_section(|locks| {
                let [source, target] =
                    locking::lock_both_ranges(self, [from.into(), to.into()], level, locks);
                assert_eq!((source.level, target.level), (level, level));
                let Some(table) = self.detach(source, from.start()) else { return };
                self.tell_place(table, to.start());
                self.install(target, to.start(), table);
            });
        });
    }

    /// Updates the current addresses of the tables from `frame` downwards. Only the model reads
    /// these addresses.
    pub(super) fn tell_place(&self, frame: Frame, place: VirtAddr) {
        let table = self.table(frame);
        table.set_place(place);
        for index in EntryIndex::FIRST.stretch(table.entries.len() as u32) {
            if let Some(child) = self.child(Node { table: frame, level: table.level }, index) {
                let offset = u64::from(index) * table.level.span();
                self.tell_place(child, place.offset(offset));
            }
        }
    }

    /// Runs `work` with the VMA locked for reading, if the VMA contains page `number`. Waits for a
    /// writer, as `lock_vma` does through the mutex.
    pub(super) fn with_vma(&self, number: u64, work: impl FnOnce()) {
        let world = &*self.world;
        let locked = world.omit != Omit::VmaLock;
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let mut state = 0;
        while locked
            && let Err(newer) = world.vma.compare_exchange(state, state + 1, acquire, relaxed)
        {
            if newer & WRITER != 0 {
                world.sleep(&world.vma);
            }
            state = newer & !WRITER;
        }
        let start = world.vma_start.load(Ordering::Relaxed);
        if start <= page(number).0 && page(number).0 < world.vma_end.load(Ordering::Relaxed) {
            work();
        } else {
            count(&world.seen.refusals);
        }
        if locked {
            world.vma.fetch_sub(1, Ordering::Release);
            world.wake(&world.vma);
        }
    }

    /// Runs `work` with the VMA locked for writing and gives the VMA new bounds.
    fn change_vma(&self, bounds: VirtRange, work: impl FnOnce()) {
        let world = &*self.world;
        let locked = world.omit != Omit::VmaLock;
        if locked {
            world.vma.fetch_or(WRITER, Ordering::Acquire);
            while world.vma.fetch_or(0, Ordering::Acquire) & !WRITER != 0 {
                world.sleep(&world.vma);
            }
        }
        world.vma_start.store(bounds.start().0, Ordering::Relaxed);
        world.vma_end.store(bounds.end().0, Ordering::Relaxed);
        work();
        if locked {
            world.vma.fetch_and(!WRITER, Ordering::Release);
            world.wake(&world.vma);
        }
    }
}
