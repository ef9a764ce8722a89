//! The world of the models: a small tree of tables, and the checks that fail if the CPUs break the
//! protocol.
//!
//! ```text
//! page     0     4     8     12    16    20    24   ...     pages of 4 KiB, tables of 4 entries
//! level 3  |      ROOT, slot 0     |      slot 1       ...
//! level 2  |          LEFT         |       RIGHT       ...
//! level 1  |  X  |  Y  |  -  |  -  |  -  |  Z  |  -    ...  -: to be created
//! ```

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::vec::Vec;

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::model::thread::{self, Thread};

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Level, Tiny};
use crate::table::mover::Moving;

const CPUS: usize = 3;

/// The tables that exist at the start of a model: their levels and first pages, by frame.
pub(super) const INITIAL: [(Level<Tiny>, u64); 6] = [
    (Level::PUD, 0),
    (Level::PMD, 0),
    (Level::PMD, 16),
    (Level::PTE, 0),
    (Level::PTE, 4),
    (Level::PTE, 20),
];
pub(super) const ROOT: Frame = Frame(0);
/// The links between tables: parent, child.
const HOOKED: [(usize, usize); 5] = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)];

/// A rule that a model omits, to show that the rule is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Omit {
    Nothing,
    /// A CPU that has locked a table does not check whether it is stray.
    StrayCheck,
    /// Only the detached table is marked, not the level-1 tables below it.
    StrayBelow,
    /// A CPU that detaches a table does not wait for the locks of the tables below it.
    WaitBelow,
    /// Tables are freed without waiting for readers.
    Readers,
    /// A table that was found in one read section is used in the next.
    OneSection,
    /// A move locks its source, then its target.
    OnePass,
    /// The VMA's lock is held neither by the CPU that moves or unmaps nor by the CPU that faults.
    VmaLock,
    /// New tables are unlocked when they are installed.
    LockedBirth,
    /// Tables are installed by a relaxed store.
    Release,
    /// A CPU that has locked a table does not descend again.
    SecondDescent,
    /// A mover that does not hold the VMA does not lock the table that it carries.
    LockCarried,
    /// A CPU that narrows an entry leaves no mark.
    Mark,
    /// A CPU that finds a mark does not flush.
    Honor,
    /// The mark is a flag, which every flusher clears.
    Count,
    /// A CPU that finds the mark of a move flushes only its own range, not the move's source.
    OldPlace,
    /// A CPU that skips an empty entry does not check its table's lock and marks.
    Settle,
    /// The entry of a detached table is cleared by a relaxed store.
    ReleaseClear,
    /// A detached table is freed even if a flush is pending for it.
    KeepPending,
}

/// Counts events of all executions of a model.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) waits: AtomicUsize,
    pub(super) restarts: AtomicUsize,
    /// The number of faults that found the VMA elsewhere.
    pub(super) refusals: AtomicUsize,
}

pub(super) fn count(seen: &AtomicUsize) {
    seen.fetch_add(1, Relaxed);
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    Unborn,
    Used,
    Freed,
}

/// State that only the holder of a table's lock may access.
#[derive(Default)]
pub(super) struct Inside {
    /// The number of entries that refer to a table.
    pub(super) entry_count: u32,
    /// The number of visits of each page, at level 1.
    pub(super) visits: [u32; 4],
    /// Whether each page, at level 1, may no longer be written.
    pub(super) narrowed: [bool; 4],
    /// Pages that a move has moved, at level 1.
    pub(super) arrived: [bool; 4],
}

pub(super) struct Table {
    pub(super) level: Level<Tiny>,
    pub(super) state: AtomicU32,
    /// As in `frame::pending`.
    pub(super) pending: AtomicU32,
    /// Empty at level 1, where nothing is read without the lock.
    pub(super) entries: Vec<AtomicU64>,
    pub(super) life: UnsafeCell<Life>,
    inside: UnsafeCell<Inside>,
    /// The first address that the table covers. The CPU that moves the table does not hold the
    /// table's lock.
    pub(super) place: UnsafeCell<VirtAddr>,
}

pub(super) struct World {
    /// The existing tables, and for each CPU one level-1 table and one level-2 table that it may
    /// create.
    pub(super) tables: Vec<Table>,
    /// One word per CPU, because read sections must not order the CPUs among themselves.
    pub(super) reading: [AtomicU32; CPUS],
    /// The lock and the bounds of the VMA that is initially at X.
    pub(super) vma: AtomicU32,
    pub(super) vma_start: AtomicU64,
    pub(super) vma_end: AtomicU64,
    /// The pages that the TLB of another CPU still allows: one bit for each of the first ones.
    pub(super) tlb: AtomicU32,
    pub(super) moving: Moving,
    pub(super) omit: Omit,
    /// Each sleeper's word and thread.
    sleepers: RefCell<Vec<(*const AtomicU32, Thread)>>,
    pub(super) seen: Arc<Seen>,
}

/// The range of `count` pages that starts with page number `first`.
pub(super) fn pages(first: u64, count: u64) -> VirtRange {
    VirtRange::raw(first << PAGE_SHIFT, (first + count) << PAGE_SHIFT)
}

pub(super) fn page(number: u64) -> VirtAddr {
    VirtAddr(number << PAGE_SHIFT)
}

pub(super) fn index_of(addr: VirtAddr, level: Level<Tiny>) -> usize {
    level.index_of(addr).position()
}

impl Table {
    fn new(level: Level<Tiny>, life: Life, place: VirtAddr) -> Self {
        let entries = if level > Level::PTE { Tiny::ENTRIES } else { 0 };
        Self {
            level,
            state: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            entries: (0..entries).map(|_| AtomicU64::new(0)).collect(),
            life: UnsafeCell::new(life),
            inside: UnsafeCell::new(Inside::default()),
            place: UnsafeCell::new(place),
        }
    }

    pub(super) fn inside<R>(&self, work: impl FnOnce(&mut Inside) -> R) -> R {
        // SAFETY: the cell panics if any other CPU may be inside at the same time.
        self.inside.with_mut(|inside| work(unsafe { &mut *inside }))
    }

    pub(super) fn set_life(&self, life: Life) {
        // SAFETY: the cell panics if an access exists that this CPU does not know to be over.
        self.life.with_mut(|old| unsafe { *old = life });
    }

    pub(super) fn set_place(&self, place: VirtAddr) {
        // SAFETY: the cell panics if the table may be visited at the same time.
        self.place.with_mut(|old| unsafe { *old = place });
    }
}

impl World {
    pub(super) fn new(omit: Omit, seen: &Arc<Seen>) -> Self {
        let initial = INITIAL.map(|(level, first)| Table::new(level, Life::Used, page(first)));
        let unborn = [Level::PTE, Level::PMD].repeat(CPUS);
        let unborn = unborn.into_iter().map(|level| Table::new(level, Life::Unborn, page(0)));
        let tables: Vec<Table> = initial.into_iter().chain(unborn).collect();
        for (parent, child) in HOOKED {
            let (level, first) = INITIAL[child];
            let slot = &tables[parent].entries[index_of(page(first), level.above())];
            slot.store(Tiny::table(Frame(child as u32)).0, Ordering::Relaxed);
            tables[parent].inside(|inside| inside.entry_count += 1);
        }
        Self {
            tables,
            reading: core::array::from_fn(|_| AtomicU32::new(0)),
            vma: AtomicU32::new(0),
            vma_start: AtomicU64::new(page(0).0),
            vma_end: AtomicU64::new(page(4).0),
            tlb: AtomicU32::new(u32::MAX),
            moving: Moving::new(),
            omit,
            sleepers: RefCell::default(),
            seen: Arc::clone(seen),
        }
    }

    /// Waits until another CPU changes `word`. The caller has just read from `word` that it must
    /// wait.
    ///
    /// Not `yield_now`: loom would forever explore two CPUs taking turns while they wait for a
    /// third. Also, when all CPUs sleep, loom reports a deadlock.
    pub(super) fn sleep(&self, word: &AtomicU32) {
        let this = thread::current();
        self.sleepers.borrow_mut().push((word, this));
        thread::park();
    }

    pub(super) fn wake(&self, word: &AtomicU32) {
        // The borrow of the cell ends before another thread runs.
        let woken: Vec<_> =
            self.sleepers.borrow_mut().extract_if(.., |(on, _)| *on == word).collect();
        woken.into_iter().for_each(|(_, sleeper)| sleeper.unpark());
    }

    /// The number of all visits, including those in tables that have since been freed.
    pub(super) fn visits(&self) -> u32 {
        let sum = |inside: &mut Inside| inside.visits.iter().sum::<u32>();
        self.tables.iter().map(|table| table.inside(sum)).sum()
    }

    /// The visits in the table that covers page `number` now.
    pub(super) fn visits_at(&self, number: u64) -> u32 {
        let mut at = ROOT;
        loop {
            let table = &self.tables[at.0 as usize];
            if table.level == Level::PTE {
                return table.inside(|inside| inside.visits[index_of(page(number), Level::PTE)]);
            }
            let entry = table.entries[index_of(page(number), table.level)].load(Ordering::Relaxed);
            if entry == 0 {
                return 0;
            }
            at = Tiny::frame(Entry(entry));
        }
    }

    /// The number of created tables.
    pub(super) fn tables_made(&self) -> usize {
        let unborn = &self.tables[INITIAL.len()..];
        // SAFETY: the cell panics if the table may be created or freed at the same time.
        unborn
            .iter()
            .filter(|table| table.life.with(|life| unsafe { *life } != Life::Unborn))
            .count()
    }

    /// Called after all CPUs have finished: no lock is held, every table in the tree is allocated
    /// and in its place, and all other tables are freed.
    pub(super) fn audit(&self) {
        let reached = self.audit_below(ROOT, page(0));
        // SAFETY: as in `tables_made`.
        let used = |table: &&Table| table.life.with(|life| unsafe { *life } == Life::Used);
        assert_eq!(self.tables.iter().filter(used).count(), reached, "a table leaks or is shared");
    }

    fn audit_below(&self, at: Frame, place: VirtAddr) -> usize {
        let table = &self.tables[at.0 as usize];
        assert_eq!(table.state.load(Ordering::Relaxed), 0, "locked or stray, but in the tree");
        assert_eq!(table.pending.load(Ordering::Relaxed), 0, "a mark was left over");
        // SAFETY: as in `tables_made`.
        table.life.with(|life| assert_eq!(unsafe { *life }, Life::Used));
        // SAFETY: the cell panics if the table may be moved at the same time.
        table.place.with(|known| assert_eq!(unsafe { *known }, place));
        let (mut entry_count, mut reached) = (0, 1);
        for (index, slot) in (0..).zip(&table.entries) {
            let entry = slot.load(Ordering::Relaxed);
            if entry != 0 {
                entry_count += 1;
                let place = place.offset(index * table.level.span());
                reached += self.audit_below(Tiny::frame(Entry(entry)), place);
            }
        }
        assert_eq!(
            table.inside(|inside| inside.entry_count),
            entry_count,
            "the entry count is wrong"
        );
        reached
    }
}
