//! TLB invalidation: the TLBs that may hold an entry, and the gather, which flushes before anything
//! is freed.
//!
//! An address space records the CPUs that have loaded it ([`ActiveCpus`]). An operation collects
//! the addresses to invalidate and the detached tables in a [`Gather`]. The gather enforces an
//! order:
//!
//! 1. The operation clears or narrows entries under the table locks.
//! 2. [`Gather::flush`] invalidates every TLB that may hold the old entries.
//! 3. Only then does `Edit::finish` free the mapped pages. The detached tables and VMAs are freed
//!    when they have no readers left ([`crate::deferred`]).
//!
//! Invariants 1 and 2 (`docs/invariants.md`) rely on step 2 before step 3. Without it:
//! 1. CPU A unmaps a page and frees its frame; CPU B's TLB still holds the translation.
//! 2. CPU A hands the frame to another process.
//! 3. CPU B's program writes to the old address, which now corrupts the other process's memory.
//!
//! # Pending flushes
//! From the first narrowing store until the flush, a table's entries allow less than the TLBs do.
//! In that interval no thread may infer from such an entry what the TLBs allow:
//! 1. CPU A saves a file: it write-protects the entry of a page and releases the table's lock.
//! 2. CPU B calls `mprotect(PROT_READ)`, finds the entry read-only, flushes nothing, and returns.
//! 3. CPU C stores through the writable translation that its TLB still holds.
//!
//! One rule therefore holds for every operation, whatever it narrows. **Before a thread releases a
//! table's lock, it has either flushed what it narrowed under the lock, or raised the table's
//! *pending count* before its first narrowing store; in the latter case it lowers the count after
//! the flush. A thread that acquires the lock later and finds the count above zero flushes its own
//! range before it acts.** The mark is a count rather than a flag so that one flusher cannot clear
//! another's mark. The later locker flushes without help from the first thread, which may be
//! waiting for a lock that the later one holds.
//!
//! In tables that a cursor has locked, the narrowing stores are methods of values that enforce the
//! rule (`table::narrowing`). Moves mark their tables themselves.
//!
//! | operation | flush |
//! |---|---|
//! | unmapping, discarding, truncation | before the unlock, so no mark is needed |
//! | a move of one piece | before the locks of either end are released |
//! | a move of several pieces | marks both ends' tables; one flush per about 64 tables of an end |
//! | `mprotect`, write-protection, aging, `fork` | marks up to 64 tables; one flush for all |
//! | swap-out by reclaim | marks the tables of a batch; one flush per address space |
//! | copy-on-write, fold, split, collapse | between break and make, under the lock |
//!
//! A move brings pages to a table whose own addresses no TLB holds. TLBs hold the old addresses.
//! During a move of several pieces, the tree therefore records the source, and a thread that finds
//! a mark also flushes the source:
//! 1. CPU A moves the entry of a page from X to Y, marks both tables, and releases their locks.
//! 2. CPU B truncates the file: it finds the page at Y, unmaps it, flushes Y, and frees the page.
//! 3. CPU C stores through its translation of X, into a page that by now belongs to another owner.
//!
//! A detached table is pending in its parent, the only table that refers to it: the parent's lock
//! is held from the clearing of the entry until the flush. An operation that passes over an empty
//! entry without a lock tests, after it has read the entry, whether the table is locked or pending.
//! If so, the operation acquires the lock (`PageTable::is_empty_after_flushes`):
//! 1. CPU A punches a hole: under the lock of table P it clears the entry that refers to table C.
//! 2. CPU B calls `mprotect(PROT_NONE)` and finds nothing below P; without the test, the call would
//!    return.
//! 3. CPU C stores through its translation, which came from table C.
//!
//! The operation also reads the entry once more, under the lock. Break-before-make leaves the entry
//! of a huge leaf empty while another thread splits the leaf:
//! 1. CPU A revokes one page of a device: under the lock of table P it clears the leaf, flushes, and
//!    is about to write the table of smaller leaves.
//! 2. CPU B calls `mprotect(PROT_NONE)`, finds nothing below P, and waits for the lock; without the
//!    second look, it would pass over the pages.
//! 3. A program stores through the leaves that CPU A has written.
//!
//! The store that clears the entry is a release: a thread that sees the cleared entry sees either
//! that P is locked or that the flush is complete.
//!
//! A table that is detached while its count is above zero stays allocated until the count is zero,
//! so the thread that lowers the count never finds another table in the same frame.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicU64, Ordering, fence};

use arrayvec::ArrayVec;

use crate::addr::{Frame, VirtRange};
use crate::arch::{Arch, Level};
use crate::deferred::DetachedTables;
use crate::frame::table_meta::TableStack;
use crate::platform::{Cpu, CpuSet, Invalidation, MAX_CPUS, Platform, Tables};
use crate::stats::Counts;

/// The CPUs whose TLBs may hold translations of one address space.
pub(crate) struct ActiveCpus {
    cpus: [AtomicU64; MAX_CPUS / 64],
}

impl ActiveCpus {
    pub(crate) const fn new() -> Self {
        Self { cpus: [const { AtomicU64::new(0) }; MAX_CPUS / 64] }
    }

    /// Called on `cpu` before it loads the root.
    pub(crate) fn enter(&self, cpu: Cpu) {
        let cpu = usize::from(cpu.0) % MAX_CPUS;
        let bit = 1 << (cpu % 64);
        if self.cpus[cpu / 64].load(Ordering::Relaxed) & bit == 0 {
            self.cpus[cpu / 64].fetch_or(bit, Ordering::SeqCst);
        }
        // Pairs with the fence in `snapshot`: either the invalidator sees this CPU, or this CPU's
        // walker sees the entries that the invalidator has written.
        fence(Ordering::SeqCst);
    }

    /// Called on `cpu` after it has loaded another root. Only the CPU itself clears its bit. If
    /// another CPU cleared it, a CPU that loads the root at that moment would be missed.
    ///
    /// # Safety
    /// As [`crate::AddressSpace::leave`]; `cpu` is the caller's.
    pub(crate) unsafe fn leave(&self, cpu: Cpu) {
        let cpu = usize::from(cpu.0) % MAX_CPUS;
        self.cpus[cpu / 64].fetch_and(!(1 << (cpu % 64)), Ordering::SeqCst);
    }

    fn snapshot(&self) -> CpuSet {
        fence(Ordering::SeqCst);
        let mut bits = [0; MAX_CPUS / 64];
        for (word, cpus) in bits.iter_mut().zip(&self.cpus) {
            *word = cpus.load(Ordering::Relaxed);
        }
        CpuSet::from_bits(bits)
    }
}

/// Sends `what` to all CPUs that may hold translations under `root`.
pub(crate) fn invalidate<P: Platform>(
    platform: &P,
    root: Frame,
    active_cpus: &ActiveCpus,
    what: &Invalidation,
    counts: &mut Counts,
) {
    platform.publish_entries();
    let cpus = active_cpus.snapshot();
    if cpus.is_empty() {
        counts.invalidations_saved += 1;
        return;
    }
    counts.invalidations += 1;
    counts.pages_invalidated += what.range.pages();
    platform.invalidate(root, &cpus, what);
}

/// The ranges to invalidate, and the tables to free afterwards.
#[must_use = "what was gathered has to be flushed and finished"]
pub(crate) struct Gather {
    range: Option<VirtRange>,
    /// The lowest level at which a translation changed.
    level: u8,
    tables: Tables,
    /// Tables that this gather has marked as pending; the flush lowers their counts. A table that
    /// was marked twice appears twice.
    marks: ArrayVec<Frame, MARKS>,
    /// Detached tables above level 1 whose entries have not been moved to the next list.
    pub(crate) unscanned: TableStack,
    /// Detached tables; their entries still count as mapped.
    pub(crate) detached: TableStack,
    /// Detached tables without mapped entries. Readers may still be walking through them.
    pub(crate) emptied: DetachedTables,
    /// The time at which the contents of detached tables are uncharged.
    uncharge: Uncharge,
}

/// The time at which pages of detached tables are counted down, relative to the unlock of the
/// mutex.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Uncharge {
    /// The default: the VMA is removed and keeps its anon group until its pages are counted down.
    AfterUnlock,
    /// The VMA outlives its pages.
    BeforeUnlock,
}

/// The number of leaf tables that one flush covers.
pub(crate) const CHUNK_TABLES: u64 = 64;

/// The maximum number of marks that one flush carries for a move: up to [`CHUNK_TABLES`] source
/// tables, and the target tables of their entries.
const MARKS: usize = 2 * CHUNK_TABLES as usize + 8;

impl Gather {
    // Not `const`: a constant would be copied in full, including the room for marks.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self {
            range: None,
            level: u8::MAX,
            tables: Tables::Unchanged,
            marks: ArrayVec::new(),
            unscanned: TableStack::new(),
            detached: TableStack::new(),
            emptied: DetachedTables::default(),
            uncharge: Uncharge::AfterUnlock,
        }
    }

    /// Adds stale translations in `range`, which came from entries at `level`.
    #[inline]
    pub(crate) fn stale<A>(&mut self, range: VirtRange, level: Level<A>) {
        self.stale_from(range, level.number());
    }

    #[inline]
    fn stale_from(&mut self, range: VirtRange, number: u8) {
        self.level = self.level.min(number);
        self.range = Some(match self.range {
            None => range,
            Some(old) => {
                VirtRange::raw(old.start().0.min(range.start().0), old.end().0.max(range.end().0))
            }
        });
    }

    /// Adds a `range` whose tables have moved. The tables may have contained leaves of any level.
    pub(crate) fn stale_tables(&mut self, range: VirtRange) {
        self.stale_from(range, 1);
        self.tables = Tables::Changed;
    }

    /// Records that this gather has raised the pending count of `table`. Called after
    /// [`Gather::has_room_for_mark`].
    pub(crate) fn note_mark(&mut self, table: Frame) {
        self.marks.push(table);
    }

    /// Whether another mark fits.
    #[inline]
    pub(crate) fn has_room_for_mark(&self) -> bool {
        self.marks.len() < CHUNK_TABLES as usize
    }

    /// Whether the marks of another piece of a move fit.
    pub(crate) fn has_room_for_piece(&self) -> bool {
        self.has_room_for(8)
    }

    /// Whether `marks` more marks fit.
    pub(crate) fn has_room_for(&self, marks: usize) -> bool {
        self.marks.len() + marks <= MARKS
    }

    /// Whether `table` is among the tables that this piece of a move, or the previous piece, has
    /// marked last.
    pub(crate) fn has_lately_marked(&self, table: Frame) -> bool {
        self.marks.iter().rev().take(8).any(|marked| *marked == table)
    }

    /// Whether `table` is the last marked table.
    #[inline]
    pub(crate) fn has_just_marked(&self, table: Frame) -> bool {
        self.marks.last() == Some(&table)
    }

    /// Whether all `count` pending marks of `table` belong to this gather. Searches the most recent
    /// marks first, since the marks of the current table are usually among them.
    pub(crate) fn has_marked(&self, table: Frame, count: u32) -> bool {
        let own = self.marks.iter().rev().filter(|marked| **marked == table);
        own.take(count as usize).count() == count as usize
    }

    /// This gather's share of the pending count of `table`.
    pub(crate) fn marks_of(&self, table: Frame) -> u32 {
        self.marks.iter().filter(|marked| **marked == table).count() as u32
    }

    /// A table whose pending count must be lowered after the flush.
    pub(crate) fn take_mark(&mut self) -> Option<Frame> {
        self.marks.pop()
    }

    /// Invalidates the stale translations on every TLB; does nothing if no translation is stale.
    /// The marks stay, and the caller lowers them ([`crate::table::PageTable::flush`]).
    pub(crate) fn flush<P: Platform>(
        &mut self,
        platform: &P,
        root: Frame,
        active_cpus: &ActiveCpus,
        counts: &mut Counts,
    ) {
        if let Some(range) = self.range.take() {
            let what = Invalidation {
                range,
                stride: P::Arch::LARGEST_LEAF.min(Level::new(self.level)).span(),
                tables: self.tables,
            };
            invalidate(platform, root, active_cpus, &what, counts);
            self.level = u8::MAX;
            self.tables = Tables::Unchanged;
        }
    }

    /// Requires the flush to count down the zapped pages before the mutex is unlocked, because
    /// their VMA stays in the address space. Otherwise another operation could remove the VMA, and
    /// with it the owner of the pages, too early:
    /// 1. CPU A discards pages, whose tables are detached, and releases the mutex.
    /// 2. CPU B unmaps the VMA; a grace period later its anon group is freed.
    /// 3. CPU C finds one of the folios by its frame number: the folio counts as mapped and refers
    ///    to the freed anon group.
    pub(crate) fn uncharge_before_unlock(&mut self) {
        self.uncharge = Uncharge::BeforeUnlock;
    }

    /// Whether [`Gather::uncharge_before_unlock`] was called since the last call of this function.
    pub(crate) fn take_uncharge_before_unlock(&mut self) -> bool {
        core::mem::replace(&mut self.uncharge, Uncharge::AfterUnlock) == Uncharge::BeforeUnlock
    }

    /// Whether nothing is left to free. Called after a flush.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.unscanned.is_empty() && self.detached.is_empty() && self.emptied.is_empty()
    }

    /// Whether a flush is needed.
    pub(crate) fn is_stale(&self) -> bool {
        self.range.is_some() || !self.marks.is_empty()
    }
}
