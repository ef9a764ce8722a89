//! Page tables: the memory of entries, the locks that protect them, and their counts.
//!
//! [`locking`] defines the locking protocol; this page describes the structures that the protocol
//! protects. A table is one frame. Its metadata holds the lock, the stray mark, the level and the
//! *entry count*, which is the number of non-empty entries. A table records no virtual address, so
//! a table and everything below it move to another place in the tree when the single entry that
//! refers to the table moves.
//!
//! Entries are written only with the lock of their table held. The MMU also sets accessed and dirty
//! bits in entries. If the MMU can no longer change an entry (it is saturated,
//! [`Arch::is_saturated`]), a plain store may replace it. Otherwise an atomic exchange is needed:
//! 1. CPU A reads an entry that is clean.
//! 2. CPU B's program writes to the page; the MMU of CPU B sets dirty in the entry.
//! 3. CPU A clears the entry by a plain store and remembers "clean": the write is lost.
//!
//! A table above level 1 has one deposited empty table for each of its leaves, so that splitting a
//! leaf cannot fail ([`deposit`]).
//!
//! | file | idea |
//! |---|---|
//! | `locking`, `stray` | the locks and their order; marks of detached tables |
//! | `flush` | flushes, and marks for flushes that follow the unlock |
//! | `pool`, `fill_span` | spare tables for use under locks; a locked range that uses them |
//! | `publish` | makes new entries visible to the walkers |
//! | `counts` | the counters of a tree, per CPU |
//! | `edit`, `span` | the page table and gather of one call; a locked range per lock span |
//! | `reach` | the maximum reach of a run, for benchmark baselines |
//! | `run` | the longest stretch that can be treated as a unit |
//! | `cursor` | a locked range that yields runs |
//! | `contig` | contiguous (contpte) runs: folding and unfolding |
//! | `leaf`, `split_folio` | huge leaves: splitting and publishing; folios split where mapped |
//! | `deposit` | the spare tables with which huge leaves are split |
//! | `zap`, `zap_except`, `zap_chosen` | unmapping, also with exceptions or of chosen runs |
//! | `zap_few` | unmapping a few pages of one table |
//! | `zap_rmap`, `zap_pages` | drop mappings and swap slots of zapped entries after the flush |
//! | `descent`, `detach` | from a table to the entry for an address; removes tables from the tree |
//! | `look` | reads mappings without changing them |
//! | `collapse` | one huge leaf for a table of small leaves, by copy or in place |
//! | `narrowing`, `rewrite` | stores that need a flush; entries changed in place (`mprotect`, aging) |
//! | `copy`, `mover` | `fork` on entries; `mremap` and `UFFDIO_MOVE`, one locked piece at a time |
//! | `swap_out`, `swap_out_shared`, `swap_out_scan`, `out_batch` | swap-out: entries, scan, batch |
//! | `swap_in` | turns swap entries into leaves |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

pub(crate) mod collapse;
mod contig;
pub(crate) mod copy;
mod counts;
pub(crate) mod cursor;
pub(crate) mod deposit;
mod descent;
mod detach;
pub(crate) mod edit;
pub(crate) mod fill_span;
mod flush;
pub(crate) mod leaf;
pub(crate) mod locking;
pub(crate) mod look;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
pub(crate) mod mover;
mod narrowing;
pub(crate) mod out_batch;
mod pool;
pub(crate) mod publish;
mod reach;
pub(crate) mod rewrite;
pub(crate) mod run;
pub(crate) mod span;
pub(crate) mod split_folio;
pub(crate) mod stray;
pub(crate) mod swap_in;
pub(crate) mod swap_out;
pub(crate) mod swap_out_scan;
pub(crate) mod swap_out_shared;
pub(crate) mod zap;
pub(crate) mod zap_chosen;
pub(crate) mod zap_except;
mod zap_few;
mod zap_pages;
mod zap_rmap;

use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;
use crate::addr::{Frame, Order, VirtAddr};
use crate::arch::{Arch, EntryIndex, Level};
pub(crate) use crate::error::NoMemory;
use crate::frame::table_meta::TableMeta;
use crate::frame::{AllocateFor, pending};
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::sync::completions::Completions;
use crate::tlb::ActiveCpus;

use counts::TreeCounts;
use locking::Node;
use mover::Moving;
use run::Run;

pub(crate) use descent::{EntryAt, Table, TableEntry};
pub(crate) use pool::TablePool;
#[cfg(feature = "baseline")]
pub use reach::Reach;
pub(crate) use reach::RunLimit;
pub(crate) use rewrite::protect;

/// A read section that ends when the guard is dropped.
pub(crate) struct ReadSection<'p, P: Platform>(&'p P);

impl<'p, P: Platform> ReadSection<'p, P> {
    /// Enters a section that borrows only the platform. A caller with a tree uses
    /// [`PageTable::read_section`].
    pub(crate) fn enter(platform: &'p P) -> Self {
        platform.enter_read();
        Self(platform)
    }
}

impl<P: Platform> Drop for ReadSection<'_, P> {
    fn drop(&mut self) {
        self.0.leave_read();
    }
}

/// The shared state of one tree. The state keeps its address for the lifetime of the tree, so that
/// the reverse map (`rmap`) can also reach the tables.
pub(crate) struct TreeState {
    pub(crate) root: Frame,
    pub(crate) active_cpus: ActiveCpus,
    pub(crate) counts: TreeCounts,
    pub(crate) reach: RunLimit,
    /// The source of a move in several lock spans.
    pub(crate) moving: Moving,
    /// Tasks that wait for the locks of VMAs, whose own words may be freed meanwhile.
    pub(crate) lock_waits: Completions,
}

/// A handle to one tree of tables. An address space has one, and a walker of the reverse map makes
/// another.
pub(crate) struct PageTable<'m, P: Platform> {
    pub(crate) memory: &'m Memory<P>,
    pub(crate) root: Frame,
    state: NonNull<TreeState>,
}

// SAFETY: `TreeState` holds atomics and constants; sharing or sending the pointer is equivalent to
// sharing or sending a reference to the state.
unsafe impl<P: Platform> Send for PageTable<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for PageTable<'_, P> {}

impl<P: Platform> Deref for PageTable<'_, P> {
    type Target = TreeState;

    #[inline]
    fn deref(&self) -> &TreeState {
        // SAFETY: only `free_root` frees the state, when the address space is dropped; a handle
        // made from a VMA is dropped before that VMA has left all lists (obligation 1 of
        // `from_state`).
        unsafe { self.state.as_ref() }
    }
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// A tree that maps nothing but the kernel, if the platform has a kernel half to copy.
    pub(crate) fn new(memory: &'m Memory<P>, reach: RunLimit) -> Option<Self> {
        let mut counts = Counts::default();
        memory.may_wait();
        let root = new_table(memory, P::Arch::ROOT, &mut counts)?;
        let state = || TreeState {
            root,
            active_cpus: ActiveCpus::new(),
            counts: TreeCounts::new(),
            reach,
            moving: Moving::new(),
            lock_waits: Completions::new(),
        };
        let Some(state) = memory.slab::<TreeState>().allocate_with(&memory.frames, state) else {
            // SAFETY: 1. made above; 2. no other thread has seen it.
            unsafe { free_table(memory, root, &mut counts) };
            return None;
        };
        let page_table = Self { memory, root, state };
        if let Some(kernel) = memory.platform().kernel_root() {
            let half = P::Arch::ENTRIES / 2;
            // SAFETY: 1. and 2. the platform's obligation 5.
            let theirs = unsafe { memory.table_entries(kernel) };
            let section = page_table.read_section();
            let ours = page_table.entries(page_table.root_in(&section).table);
            for index in EntryIndex::new(half).stretch(half) {
                let entry = theirs[index.position()].load(Ordering::Relaxed);
                ours[index.position()].store(entry, Ordering::Relaxed);
            }
        }
        page_table.meta(root).unlock();
        page_table.count(&counts);
        Some(page_table)
    }

    /// Records that the calling CPU may have translations of this tree, and gives it counters.
    pub(crate) fn enter(&self) {
        let platform = self.memory.platform();
        let section = ReadSection::enter(platform);
        let cpu = platform.cpu();
        self.active_cpus.enter(cpu);
        // The mark must be visible before this CPU's walker reads its first entry.
        platform.publish_entries();
        drop(section);
        self.counts.enter(self.memory, cpu);
    }

    /// Records that the calling CPU caches nothing of this tree.
    ///
    /// # Safety
    /// As [`crate::AddressSpace::leave`].
    pub(crate) unsafe fn leave(&self) {
        let platform = self.memory.platform();
        let section = ReadSection::enter(platform);
        // SAFETY: the caller's obligation; the CPU does not change in a read section.
        unsafe { self.active_cpus.leave(platform.cpu()) };
        drop(section);
    }

    /// A handle to the tree with this state.
    ///
    /// # Safety
    /// 1. The handle is dropped before the address space is. A caller that holds the lock of a list
    ///    containing a VMA of the address space meets this obligation.
    pub(crate) unsafe fn from_state(memory: &'m Memory<P>, state: NonNull<TreeState>) -> Self {
        // SAFETY: the state is alive (the caller's obligation).
        let root = unsafe { state.as_ref() }.root;
        Self { memory, root, state }
    }

    /// The pointer by which VMAs find the tree.
    pub(crate) fn state(&self) -> NonNull<TreeState> {
        self.state
    }

    /// Enters a read section, in which no table that the caller finds is freed. The section borrows
    /// the tree, and thereby the guard or the call that lends the tree; a wait invalidates those
    /// (`space/sleep.rs`).
    #[inline(always)]
    pub(crate) fn read_section(&self) -> ReadSection<'_, P> {
        ReadSection::enter(self.memory.platform())
    }

    /// The metadata of a table of this tree.
    #[inline]
    pub(crate) fn meta(&self, table: impl Into<Frame>) -> TableMeta<'_> {
        self.memory.frames.table(table.into())
    }

    /// The entries of a table of this tree.
    #[inline]
    pub(crate) fn entries<'s>(&self, table: Table<'s>) -> &'s [AtomicU64]
    where
        'm: 's,
    {
        let memory: &'s Memory<P> = self.memory;
        debug_assert!(self.meta(table).is_table(), "{table:?}");
        // SAFETY: 1. and 2. having a `Table` means both.
        unsafe { memory.table_entries(table.frame()) }
    }

    /// The entries of a run.
    #[inline]
    pub(crate) fn entries_of<'s>(&self, run: &Run<'s, P::Arch>) -> &'s [AtomicU64]
    where
        'm: 's,
    {
        &self.entries(run.node.table)[run.index.positions(run.count)]
    }

    /// Frees the state and the empty root.
    ///
    /// # Safety
    /// 1. The tree is no longer in use: no CPU has its root loaded, and no reader knows any of its
    ///    tables.
    /// 2. No other handle of the tree is left, and this handle is not used again.
    pub(crate) unsafe fn free_root(&mut self) {
        debug_assert_eq!(self.entry_count(self.root), 0);
        let memory = self.memory;
        // SAFETY: 1. `PageTable::new` made it; 2. the caller's obligations 1 and 2.
        unsafe { free_table(memory, self.root, &mut Counts::default()) };
        // SAFETY: 1. the caller's obligations 1 and 2. 2. `enter` made them from it.
        unsafe { self.counts.free(memory) };
        // SAFETY: the state was allocated from this slab; no handle is left (the caller's
        // obligation 2).
        unsafe { memory.slab::<TreeState>().free(&memory.frames, self.state) };
    }

    /// The lowest entry that covers `addr`, read without locks: a hint, unless the caller excludes
    /// all other threads.
    pub(crate) fn peek<'s>(
        &'s self,
        section: &'s ReadSection<'_, P>,
        addr: VirtAddr,
        counts: &mut Counts,
    ) -> EntryAt<P::Arch, Table<'s>> {
        let found = self.entry_below(self.root_in(section), addr, Level::PTE, Ordering::Acquire);
        counts.entries_descended += P::Arch::ROOT.steps_to(found.node.level) + 1;
        found
    }

    /// The table of level 1 that covers `addr`, found without locks.
    #[inline]
    pub(crate) fn leaf_table<'s>(
        &'s self,
        section: &'s ReadSection<'_, P>,
        addr: VirtAddr,
    ) -> Option<LeafTable<'s>> {
        let root = self.root_in(section);
        let parent = self.table_below(root, addr, Level::PMD, Ordering::Acquire).ok()?.table;
        let node = Node { table: parent, level: Level::PMD };
        let table = self.child_of(node, P::Arch::PMD.index_of(addr))?;
        Some(LeafTable { parent, table })
    }

    /// The entry of level 2 for `addr`, found without locks. `None` if no table of that level
    /// exists.
    pub(crate) fn upper_entry<'s>(
        &'s self,
        section: &'s ReadSection<'_, P>,
        addr: VirtAddr,
    ) -> Option<EntryAt<P::Arch, Table<'s>>> {
        let root = self.root_in(section);
        let node = self.table_below(root, addr, Level::PMD, Ordering::Acquire).ok()?;
        Some(self.entry_in(node, addr, Ordering::Acquire))
    }

    /// Locks a table that was found for `addr`, unless the table has since been detached or moved,
    /// or a flush is pending. The caller holds a VMA around `addr` for reading, which excludes
    /// moves that carry the parent along.
    #[inline]
    pub(crate) fn try_lock_leaf_table(
        &self,
        section: &ReadSection<'_, P>,
        addr: VirtAddr,
        found: &LeafTable<'_>,
    ) -> bool {
        let index = P::Arch::PMD.index_of(addr);
        let parent = Node { table: found.parent, level: Level::PMD };
        let is_at = || self.child_of(parent, index) == Some(found.table);
        if !locking::lock_found(&self.tables(section), found.table.frame(), is_at) {
            return false;
        }
        if self.is_pending(found.table.frame()) {
            self.unlock(found.table.frame());
            return false;
        }
        true
    }

    /// As [`PageTable::try_lock_leaf_table`], for the table of `node`, whatever its level.
    pub(crate) fn try_lock_table(
        &self,
        section: &ReadSection<'_, P>,
        addr: VirtAddr,
        node: Node<P::Arch, Table<'_>>,
    ) -> bool {
        let root = self.root_in(section);
        let is_at =
            || self.table_below(root, addr, node.level, Ordering::Acquire).ok() == Some(node);
        if !locking::lock_found(&self.tables(section), node.table.frame(), is_at) {
            return false;
        }
        if self.is_pending(node.table.frame()) {
            self.unlock(node.table.frame());
            return false;
        }
        true
    }

    /// Changes the entry count of a table whose lock the caller holds.
    #[inline]
    pub(crate) fn change_entry_count(&self, table: impl Into<Frame>, added: u32, removed: u32) {
        self.meta(table).change_entry_count(added, removed);
    }

    /// The number of non-empty entries of the table.
    #[inline]
    pub(crate) fn entry_count(&self, table: impl Into<Frame>) -> u32 {
        self.meta(table).entry_count()
    }

    /// Records that entries of `from` may have moved to `to`; the caller holds both locks.
    pub(crate) fn inherit_guards(&self, from: Table<'_>, to: Table<'_>) {
        if self.meta(from).has_guards() {
            self.meta(to).note_guards();
        }
    }

    /// Adds an empty table to the deposit of `holder`, whose lock the caller holds.
    pub(crate) fn deposit_table(&self, holder: impl Into<Frame>, table: Frame) {
        self.memory.frames.deposit_table(holder.into(), table);
    }

    /// Moves `count` tables, or all if the deposit has fewer, from the deposit of `from` to that of
    /// `to`. The caller holds the locks of both.
    pub(crate) fn move_deposits(&self, from: Table<'_>, to: Table<'_>, count: u32) {
        self.memory.frames.move_deposits(from.frame(), to.frame(), count);
    }

    /// Removes a table from the deposit of `holder`, whose lock the caller holds.
    pub(crate) fn withdraw_table(&self, holder: impl Into<Frame>) -> Option<Frame> {
        self.memory.frames.withdraw_table(holder.into())
    }
}

/// A table of level 1 and its parent.
pub(crate) struct LeafTable<'s> {
    parent: Table<'s>,
    pub(crate) table: Table<'s>,
}

/// A new empty table for `level`, already locked so that the caller can install it at once.
#[inline(never)]
pub(crate) fn new_table<P: Platform>(
    memory: &Memory<P>,
    level: Level<P::Arch>,
    counts: &mut Counts,
) -> Option<Frame> {
    let table = memory.frames.allocate(Order::PAGE, AllocateFor::Use)?;
    memory.platform().zero(table, 1);
    memory.frames.table(table).init(level);
    counts.tables_allocated += 1;
    Some(table)
}

/// Frees the frame of a table.
///
/// # Safety
/// 1. The table came from [`new_table`], belongs to the caller, and is freed by no other thread.
/// 2. The table is no longer reachable: no entry and no deposit refers to it, and no TLB and no
///    reader in a read section knows it.
pub(crate) unsafe fn free_table<P: Platform>(
    memory: &Memory<P>,
    table: Frame,
    counts: &mut Counts,
) {
    // SAFETY: 1. and 2. the caller's obligations 1 and 2.
    unsafe { memory.frames.free(table, Order::PAGE) };
    counts.tables_freed += 1;
}

/// The lock and the marks of a table.
impl<P: Platform> PageTable<'_, P> {
    /// Waits for the table's lock.
    #[inline]
    pub(crate) fn lock(&self, table: impl Into<Frame>) {
        let meta = self.meta(table);
        while !meta.try_lock() {
            while meta.is_locked() {
                self.memory.platform().relax();
            }
        }
    }

    /// Releases the table's lock.
    #[inline]
    pub(crate) fn unlock(&self, table: impl Into<Frame>) {
        self.meta(table).unlock();
        #[cfg(any(test, feature = "testing"))]
        self.memory.platform().table_unlocked();
    }

    /// Whether the table was detached. The caller holds the table's lock.
    #[inline]
    pub(crate) fn is_stray(&self, table: impl Into<Frame>) -> bool {
        self.meta(table).is_stray()
    }

    /// Whether the table's lock is held. The load has acquire ordering.
    #[inline]
    pub(crate) fn is_locked(&self, table: impl Into<Frame>) -> bool {
        self.meta(table).is_locked()
    }

    /// Whether entries of the table were narrowed but not yet flushed. The load has acquire
    /// ordering.
    #[inline]
    pub(crate) fn is_pending(&self, table: impl Into<Frame>) -> bool {
        pending::is_any(self.meta(table).pending())
    }

    /// Marks the table as detached. The caller holds the table's lock.
    #[inline]
    pub(crate) fn mark_stray(&self, table: impl Into<Frame>) {
        self.meta(table).mark_stray();
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for TreeState {
    const KIND: RecordKind = RecordKind::PageTable;
}
