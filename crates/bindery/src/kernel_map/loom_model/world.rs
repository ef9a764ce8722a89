//! The world of the models: a small tree of tables, areas, TLBs, and the checks that fail if the
//! CPUs violate the protocol.
//!
//! ```text
//! page     0    1    2    3    4     8     12    16        pages of 4 KiB, tables of 4 entries
//! level 3  |             ROOT, slot 0            | -
//! level 2  |                MIDDLE               |         permanent, like all under the root
//! level 1  | -                 | -   | -   | -   |         -: made on demand, or a huge leaf
//! ```

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::vec::Vec;

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::model::thread::{self, Thread};

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Kind, Level, Tiny};

pub(super) const ROOT: Frame = Frame(0);
const MIDDLE: Frame = Frame(1);
/// The number of tables that each CPU may make.
const OWN: usize = 2;
/// The first frame that is not a table; the number of frames is [`FRAMES`].
const FIRST: u32 = 16;
const FRAMES: usize = 24;

/// A rule that a model leaves out, to show that it is necessary.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Omit {
    Nothing,
    /// Detached tables are freed without a grace period.
    Readers,
    /// Addresses are freed before the TLBs are flushed.
    FlushBeforeAddresses,
    /// Frames and tables are freed before the TLBs are flushed.
    FlushBeforeFree,
    /// A CPU that makes a table does not wait for the flush of detached tables.
    WaitForFlush,
    /// Tables are installed by a relaxed exchange.
    Release,
    /// Tables are installed by a plain store.
    Exchange,
    /// Tables are detached although areas lie under them.
    AskWhetherFree,
    /// Empty entries are written again.
    LeaveEmpty,
    /// Walkers without a claim read an entry twice: once for the level and once for the leaf.
    OneLook,
    /// Paused entries are empty.
    KeepBits,
    /// Entries are replaced without a pause.
    Pause,
}

/// The interesting points that some execution of a model has reached.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) executions: AtomicUsize,
    /// Tables that lost to another offer.
    pub(super) lost: AtomicUsize,
    /// Waits of table makers for a flush.
    pub(super) waits: AtomicUsize,
    /// Reservations refused because their addresses were not free yet.
    pub(super) refusals: AtomicUsize,
    /// Walks that read a paused entry, and faults of CPUs there.
    pub(super) pauses: AtomicUsize,
    /// Walks that found an empty entry for a page that was mapped before or is mapped afterwards.
    pub(super) absences: AtomicUsize,
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

pub(super) struct Table {
    pub(super) entries: Vec<AtomicU64>,
    life: UnsafeCell<Life>,
}

/// Like the states in `area`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Busy,
    Live,
    Freed,
    Purging,
}

#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) range: VirtRange,
    /// The first of the area's consecutive frames.
    pub(super) first: Frame,
    pub(super) state: State,
}

/// The TLB's entries: every entry that it walked through since the last invalidation.
#[derive(Default)]
pub(super) struct Tlb {
    /// Leaves as they are in memory.
    pub(super) leaves: Vec<(VirtRange, Entry)>,
    /// Tables of level 1.
    pub(super) tables: Vec<(VirtRange, Frame)>,
}

/// A value that only a lock holder may access.
pub(super) struct Locked<T> {
    word: AtomicU32,
    content: RefCell<T>,
}

pub(super) struct World {
    /// The existing tables, and for each CPU the tables that it may create.
    pub(super) tables: Vec<Table>,
    frames: Vec<UnsafeCell<Life>>,
    pub(super) areas: Locked<Vec<Area>>,
    pub(super) purging: Locked<()>,
    pub(super) pausing: Locked<()>,
    pub(super) unflushed: AtomicU32,
    /// One for each CPU, because read sections must not order the CPUs among themselves.
    pub(super) reading: Vec<AtomicU32>,
    pub(super) tlbs: Vec<Locked<Tlb>>,
    pub(super) omit: Omit,
    /// The word and the thread of each sleeper.
    sleepers: RefCell<Vec<(*const AtomicU32, Thread)>>,
    pub(super) seen: Arc<Seen>,
}

/// The range of `count` pages from page number `first` on.
pub(super) fn pages(first: u64, count: u64) -> VirtRange {
    VirtRange::raw(first << PAGE_SHIFT, (first + count) << PAGE_SHIFT)
}

pub(super) fn page(number: u64) -> VirtAddr {
    VirtAddr(number << PAGE_SHIFT)
}

/// The models' frame `number`, from 0 on.
pub(super) fn frame(number: u32) -> Frame {
    Frame(FIRST + number)
}

impl<T> Locked<T> {
    fn new(content: T) -> Self {
        Self { word: AtomicU32::new(0), content: RefCell::new(content) }
    }
}

impl World {
    pub(super) fn new(omit: Omit, cpus: usize, seen: &Arc<Seen>) -> Self {
        let table = |life| Table {
            entries: (0..Tiny::ENTRIES).map(|_| AtomicU64::new(0)).collect(),
            life: UnsafeCell::new(life),
        };
        let lives = [Life::Used; 2].into_iter().chain([Life::Unborn].repeat(OWN * cpus));
        let tables: Vec<Table> = lives.map(table).collect();
        tables[0].entries[0].store(Tiny::table(MIDDLE).0, Ordering::Relaxed);
        Self {
            tables,
            frames: (0..FRAMES).map(|_| UnsafeCell::new(Life::Used)).collect(),
            areas: Locked::new(Vec::new()),
            purging: Locked::new(()),
            pausing: Locked::new(()),
            unflushed: AtomicU32::new(0),
            reading: (0..cpus).map(|_| AtomicU32::new(0)).collect(),
            tlbs: (0..cpus).map(|_| Locked::new(Tlb::default())).collect(),
            omit,
            sleepers: RefCell::default(),
            seen: Arc::clone(seen),
        }
    }

    /// A table that the CPU has not made before.
    pub(super) fn unborn(&self, cpu: usize) -> Frame {
        let own = 2 + OWN * cpu..2 + OWN * (cpu + 1);
        let frame = own.map(|number| Frame(number as u32)).find(|frame| {
            let life = &self.tables[frame.0 as usize].life;
            // SAFETY: only this CPU makes the table, and the cell panics if another CPU frees it
            // now.
            life.with(|life| unsafe { *life == Life::Unborn })
        });
        frame.expect("a CPU makes more tables than it has")
    }

    /// The table, which must not have been freed. Every access to a table begins here.
    pub(super) fn table(&self, frame: Frame) -> &Table {
        let table = &self.tables[frame.0 as usize];
        // SAFETY: the cell panics if the table may be made or freed at the same time.
        table.life.with(|life| assert_eq!(unsafe { *life }, Life::Used, "touched a freed table"));
        table
    }

    /// Reads or writes a frame, which must not have been freed.
    pub(super) fn touch(&self, frame: Frame) {
        let life = &self.frames[(frame.0 - FIRST) as usize];
        // SAFETY: the cell panics if the frame may be freed at the same time.
        life.with(|life| assert_eq!(unsafe { *life }, Life::Used, "touched a freed frame"));
    }

    pub(super) fn set_life(&self, frame: Frame, life: Life) {
        let cell = match frame.0.checked_sub(FIRST) {
            Some(number) => &self.frames[number as usize],
            None => &self.tables[frame.0 as usize].life,
        };
        // SAFETY: the cell panics if another access has not ended from this CPU's view.
        cell.with_mut(|old| unsafe { *old = life });
    }

    /// Waits until another CPU changes `word`. The caller has just read from the word, by an
    /// exchange, that it must wait. (See the world of `table::loom_model`: why not `yield_now`.)
    pub(super) fn sleep(&self, word: &AtomicU32) {
        let this = thread::current();
        self.sleepers.borrow_mut().push((word, this));
        thread::park();
    }

    pub(super) fn wake(&self, word: &AtomicU32) {
        // The cell is free before another thread runs.
        let woken: Vec<_> =
            self.sleepers.borrow_mut().extract_if(.., |(on, _)| *on == word).collect();
        woken.into_iter().for_each(|(_, sleeper)| sleeper.unpark());
    }

    /// Runs `work` with the lock held. (No guard: dropped by a panic, it would call loom again.)
    pub(super) fn with<T, R>(&self, lock: &Locked<T>, work: impl FnOnce(&mut T) -> R) -> R {
        while lock.word.swap(1, Ordering::Acquire) != 0 {
            self.sleep(&lock.word);
        }
        let result = work(&mut lock.content.borrow_mut());
        lock.word.swap(0, Ordering::Release);
        self.wake(&lock.word);
        result
    }

    /// Waits while another CPU holds the lock.
    pub(super) fn wait_for<T>(&self, lock: &Locked<T>) {
        while lock.word.fetch_or(0, Ordering::AcqRel) != 0 {
            self.sleep(&lock.word);
        }
    }

    /// The mapping of a page according to the tables: its frame, the leaf, and the number of pages
    /// of the leaf or its contiguous run. No other CPU runs.
    fn mapped(&self, number: u64) -> Option<(Frame, Entry, u64)> {
        let (mut at, mut level) = (ROOT, Tiny::ROOT);
        loop {
            let index = level.index_of(page(number));
            let entry = Entry(self.table(at).entries[index.position()].load(Ordering::Relaxed));
            match level.kind(entry) {
                Kind::Table => (at, level) = (Tiny::frame(entry), level.below()),
                Kind::Leaf => {
                    let pages = u64::from(level.order().pages());
                    let offset = (number & (pages - 1)) as u32;
                    let contig =
                        if Tiny::is_contig(entry) { u64::from(Tiny::CONTIG_ENTRIES) } else { 1 };
                    return Some((Tiny::frame(entry).plus(offset), entry, pages * contig));
                }
                Kind::Empty => return None,
                Kind::Absent => panic!("something stays paused"),
            }
        }
    }

    /// Audits the final state: the used tables are those in the tree, exactly the live areas are
    /// mapped, and no TLB has a different entry for them.
    pub(super) fn audit(&self) {
        let reached = self.reached(ROOT, Tiny::ROOT);
        // SAFETY: the cell panics if the table may be made or freed at the same time.
        let used = |table: &&Table| table.life.with(|life| unsafe { *life == Life::Used });
        assert_eq!(self.tables.iter().filter(used).count(), reached, "a table leaks");
        for number in 0..16 {
            let at = page(number);
            let areas = self.areas.content.borrow();
            let area = areas.iter().find(|area| area.range.contains(at));
            let live = area.filter(|area| area.state == State::Live);
            let mapped = self.mapped(number);
            let wanted = live
                .map(|area| area.first.plus(((at.0 - area.range.start().0) >> PAGE_SHIFT) as u32));
            assert_eq!(
                mapped.map(|(frame, ..)| frame),
                wanted,
                "a page is mapped to something else"
            );
            let Some((frame, leaf, pages)) = mapped else { continue };
            self.touch(frame);
            for tlb in &self.tlbs {
                let tlb = tlb.content.borrow();
                for (range, known) in tlb.leaves.iter().filter(|(range, _)| range.contains(at)) {
                    let same = Tiny::attributes(*known) == Tiny::attributes(leaf);
                    assert!(same && range.pages() == pages, "a TLB remembers what was replaced");
                }
            }
        }
    }

    fn reached(&self, at: Frame, level: Level<Tiny>) -> usize {
        let entries = self.table(at).entries.iter();
        let entries = entries.map(|entry| Entry(entry.load(Ordering::Relaxed)));
        let children = entries.filter(|entry| level.kind(*entry) == Kind::Table);
        1 + children.map(|entry| self.reached(Tiny::frame(entry), level.below())).sum::<usize>()
    }
}
