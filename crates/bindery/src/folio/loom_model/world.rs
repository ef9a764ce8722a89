//! The world of the models: four frames, one anon group, and checks that fail if a thread mistakes
//! a frame for another.
//!
//! ```text
//! frame   0     1     2     3
//!         | folio 0/1 |  -  |  -     when a model begins: order 1, mapped by two pages
//! ```

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::vec::Vec;

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::atomic::{AtomicU32, AtomicU64, Ordering, Ordering::Relaxed};

use crate::addr::{Frame, Order};
use crate::arch::{Level, Tiny};
use crate::folio::Folio;
use crate::folio::count::{self, Left, MAPPING, PIN, REFERENCE, mappings_in, references_in};
use crate::folio::lock_word;
use crate::folio::reference::{self, Heads, Mistaken};
use crate::frame::meta::{
    FOLIO_LOCK, FOLIO_PARKED, LOCK, MetaKind, ORPHAN, WRITEBACK, state_of, state_of_table,
};
use crate::sync::parking::model::{SecondLook, Sleepers};
use crate::sync::word::Word;

/// A rule that a model omits, to show that it is necessary.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Omit {
    Nothing,
    /// A fresh folio is published by a relaxed store.
    Release,
    /// A reference by number is added without acquire ordering.
    Acquire,
    /// A reference is added to zero too.
    NeverFromZero,
    /// A CPU that takes a reference by frame number does not check the frame again.
    LookAgain,
    /// A CPU that removes the last mapping stores zero without a check of the replaced value.
    Freeze,
    /// A CPU that splits a folio does not freeze it.
    FreezeToCut,
    /// Tables count their entries in the field of references.
    CountElsewhere,
    /// A CPU that removes the last hold does not acquire the others' accesses.
    AcquireLast,
    /// A CPU that finds a folio by number locks it without a reference.
    LockReferenced,
    /// A CPU changes the owner without the lock.
    LockOwner,
    /// A CPU that removes the last mapping leaves the owner in place.
    Orphan,
    /// The mark of an orphan is checked before the lock is released, not in the same step.
    MarkWithLock,
    /// A CPU that removes the last mapping holds no reference while it removes the owner.
    KeepToOrphan,
    /// A CPU that sleeps for the lock does not check the lock again after it has announced itself.
    SecondLook,
    /// A CPU that released the lock in one step does not act on concurrently set marks.
    MarksLeftBehind,
    /// A CPU that hands the lock over clears the mark without acting on it.
    SettleHandOver,
    /// A CPU that maps a folio relies on its owner without checking the mappings.
    LookAtMappings,
}

/// Counts events of all executions of a model.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) held: AtomicUsize,
    pub(super) refused: AtomicUsize,
    pub(super) mistaken: AtomicUsize,
    pub(super) busy: AtomicUsize,
    pub(super) left_to_the_other: AtomicUsize,
    pub(super) slept: AtomicUsize,
    pub(super) marked: AtomicUsize,
    pub(super) mapped_again: AtomicUsize,
}

/// Bits that a folio's state must not have once no thread can find it.
const LOCKING: u32 = FOLIO_LOCK | ORPHAN | FOLIO_PARKED | WRITEBACK;

pub(super) fn note(counter: &AtomicUsize) {
    counter.fetch_add(1, Relaxed);
}

/// The use of a frame, from its creator's view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    Free,
    Folio(Folio),
    Table,
    Slab,
}

/// A count word, which may be weaker than the product's.
pub(super) struct Count {
    word: AtomicU64,
    omit: Omit,
}

impl Word<u64> for Count {
    fn load(&self, order: Ordering) -> u64 {
        self.word.load(if self.omit == Omit::AcquireLast { Relaxed } else { order })
    }

    fn store(&self, value: u64, order: Ordering) {
        self.word.store(value, if self.omit == Omit::Release { Relaxed } else { order });
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.word.swap(value, order)
    }

    fn exchange(&self, from: u64, to: u64, order: Ordering, failure: Ordering) -> Result<u64, u64> {
        let adds = to == from + REFERENCE;
        match self.omit {
            Omit::Acquire if adds => self.word.compare_exchange(from, to, Relaxed, Relaxed),
            Omit::AcquireLast if to == 0 => self.word.compare_exchange(from, to, Relaxed, Relaxed),
            Omit::Freeze if to == 0 => {
                self.word.store(0, Relaxed);
                Ok(from)
            }
            _ => self.word.compare_exchange(from, to, order, failure),
        }
    }

    fn add(&self, value: u64, order: Ordering) -> u64 {
        self.word.fetch_add(value, order)
    }

    fn sub(&self, value: u64, order: Ordering) -> u64 {
        self.word.fetch_sub(value, order)
    }

    fn set(&self, bits: u64, order: Ordering) -> u64 {
        self.word.fetch_or(bits, order)
    }
}

pub(super) struct Meta {
    pub(super) state: AtomicU32,
    head: AtomicU32,
    pub(super) count: Count,
    /// Entries of a table, objects of a slab.
    word: AtomicU64,
    /// The number of the anon group that owns the folio; none for zero.
    owner: UnsafeCell<u32>,
    life: UnsafeCell<Life>,
}

pub(super) struct World {
    metas: Vec<Meta>,
    pub(super) sleepers: Sleepers,
    /// The anon group for which a folio was mapped again.
    pub(super) heir: UnsafeCell<u32>,
    pub(super) omit: Omit,
    pub(super) seen: Arc<Seen>,
}

impl Heads for World {
    type Count = Count;

    fn covers(&self, frame: Frame) -> bool {
        (frame.0 as usize) < self.metas.len()
    }

    fn state(&self, frame: Frame) -> u32 {
        self.meta(frame).state.load(Relaxed)
    }

    fn head(&self, tail: Frame) -> Frame {
        Frame(self.meta(tail).head.load(Relaxed))
    }

    fn count(&self, frame: Frame) -> &Count {
        &self.meta(frame).count
    }
}

pub(super) const FIRST: Folio = Folio::of(Frame(0), Order(1));

impl World {
    /// A world whose first folio has two mappings and is owned by anon group 1.
    pub(super) fn new(omit: Omit, seen: &Arc<Seen>) -> Rc<Self> {
        let meta = |_| Meta {
            state: AtomicU32::new(state_of(MetaKind::Free, Order::PAGE)),
            head: AtomicU32::new(0),
            count: Count { word: AtomicU64::new(0), omit },
            word: AtomicU64::new(0),
            owner: UnsafeCell::new(0),
            life: UnsafeCell::new(Life::Free),
        };
        let metas = (0..4).map(meta).collect();
        let look = if omit == Omit::SecondLook { SecondLook::LeftOut } else { SecondLook::Taken };
        let sleepers = Sleepers::new(look);
        let world = Rc::new(Self {
            metas,
            sleepers,
            heir: UnsafeCell::new(0),
            omit,
            seen: Arc::clone(seen),
        });
        world.make_folio(FIRST, 2 * MAPPING);
        world
    }

    pub(super) fn meta(&self, frame: Frame) -> &Meta {
        &self.metas[frame.0 as usize]
    }

    fn frames(folio: Folio) -> impl Iterator<Item = Frame> {
        (0..folio.pages()).map(move |page| folio.head.plus(page))
    }

    fn set_life(&self, frame: Frame, life: Life) {
        // SAFETY: the cell panics if another access has not ended from this CPU's view.
        self.meta(frame).life.with_mut(|old| unsafe { *old = life });
    }

    pub(super) fn life(&self, frame: Frame) -> Life {
        // SAFETY: the cell panics if another thread may be writing.
        self.meta(frame).life.with(|life| unsafe { *life })
    }

    pub(super) fn set_owner(&self, folio: Folio, owner: u32) {
        // SAFETY: the cell panics if another access has not ended from this CPU's view.
        self.meta(folio.head).owner.with_mut(|old| unsafe { *old = owner });
    }

    pub(super) fn owner(&self, folio: Folio) -> u32 {
        // SAFETY: the cell panics if another thread may be writing.
        self.meta(folio.head).owner.with(|owner| unsafe { *owner })
    }

    /// Creates a folio from frames that the caller owns, as `new_folio` and `first_map` do.
    pub(super) fn make_folio(&self, folio: Folio, count: u64) {
        for frame in Self::frames(folio) {
            self.set_life(frame, Life::Folio(folio));
        }
        for tail in Self::frames(folio).skip(1) {
            self.meta(tail).head.store(folio.head.0, Relaxed);
            self.meta(tail).state.store(state_of(MetaKind::Tail, folio.order), Relaxed);
        }
        self.meta(folio.head).state.store(state_of(MetaKind::Folio, folio.order), Relaxed);
        self.set_owner(folio, 1);
        count::publish(&self.meta(folio.head).count, count);
    }

    /// Creates a table with two entries from a frame that the caller owns, and removes one entry
    /// under the table's lock.
    pub(super) fn make_table(&self, frame: Frame) {
        let meta = self.meta(frame);
        self.set_life(frame, Life::Table);
        let table = state_of_table(Level::<Tiny>::PTE);
        meta.state.store(table | LOCK, Relaxed);
        let entries = if self.omit == Omit::CountElsewhere { &meta.count.word } else { &meta.word };
        entries.store(2, Relaxed);
        let live = entries.load(Relaxed);
        entries.store(live - 1, Relaxed);
        meta.state.fetch_and(!LOCK, Ordering::Release);
    }

    /// Creates a slab with one object.
    pub(super) fn make_slab(&self, frame: Frame) {
        self.set_life(frame, Life::Slab);
        self.meta(frame).word.store(1, Relaxed);
        self.meta(frame).state.store(state_of(MetaKind::Slab, Order::PAGE), Relaxed);
    }

    fn free(&self, folio: Folio) {
        for frame in Self::frames(folio) {
            assert_eq!(self.life(frame), Life::Folio(folio), "freed what is not this folio");
            self.set_life(frame, Life::Free);
        }
        let state = self.meta(folio.head).state.load(Relaxed);
        assert_eq!(state & LOCKING, 0, "freed a locked folio");
        self.meta(folio.head).state.store(state_of(MetaKind::Tail, Order::PAGE), Relaxed);
    }

    fn release_some(&self, folio: Folio, taken: u64, field: fn(u64) -> u32) -> bool {
        let last = count::take(&self.meta(folio.head).count, taken, field).expect("was there");
        if last {
            self.free(folio);
        }
        last
    }

    pub(super) fn release(&self, folio: Folio) -> bool {
        self.release_some(folio, REFERENCE, references_in)
    }

    pub(super) fn unpin(&self, folio: Folio) -> bool {
        self.release_some(folio, PIN, count::pins_in)
    }

    /// As `FolioHandle::unmap_into`. Returns whether the caller now owns the frames.
    pub(super) fn unmap(&self, folio: Folio, pages: u32) -> bool {
        let count = &self.meta(folio.head).count;
        if count::take_all(count, u64::from(pages) * MAPPING) {
            self.free(folio);
            return true;
        }
        if self.omit == Omit::KeepToOrphan {
            let last = self.release_some(folio, u64::from(pages) * MAPPING, mappings_in);
            if !last && mappings_in(count.word.load(Relaxed)) == 0 {
                self.orphan(folio);
            }
            return last;
        }
        match count::unmap_owned(count, pages).expect("was mapped") {
            Left::Mapped => false,
            Left::Nothing => {
                self.free(folio);
                true
            }
            Left::Held => {
                if self.omit != Omit::Orphan {
                    self.orphan(folio);
                }
                self.release(folio)
            }
        }
    }

    pub(super) fn disown(&self, folio: Folio) {
        if mappings_in(self.meta(folio.head).count.word.load(Relaxed)) == 0 {
            self.set_owner(folio, 0);
        }
    }

    fn orphan(&self, folio: Folio) {
        let state = &self.meta(folio.head).state;
        if state.load(Relaxed) & FOLIO_LOCK != 0 {
            note(&self.seen.left_to_the_other);
        }
        lock_word::orphan(state, &self.sleepers, || self.disown(folio));
    }

    /// Calls `f` with the folio's lock, unless another thread holds it.
    pub(super) fn with_lock(&self, folio: Folio, f: impl FnOnce()) {
        let state = &self.meta(folio.head).state;
        if self.omit == Omit::LockOwner {
            return f();
        }
        if !lock_word::try_lock(state) {
            return note(&self.seen.busy);
        }
        f();
        if self.omit == Omit::MarkWithLock {
            if state.load(Ordering::Acquire) & ORPHAN != 0 {
                self.disown(folio);
            }
            state.fetch_and(!(FOLIO_LOCK | ORPHAN), Ordering::Release);
            return;
        }
        lock_word::unlock(state, &self.sleepers, || self.disown(folio));
    }

    /// As [`World::with_lock`], but releases the lock by one subtraction.
    pub(super) fn with_lock_at_once(&self, folio: Folio, f: impl FnOnce()) {
        let state = &self.meta(folio.head).state;
        if !lock_word::try_lock(state) {
            return note(&self.seen.busy);
        }
        f();
        if !lock_word::unlock_at_once(state) {
            note(&self.seen.marked);
            if self.omit != Omit::MarksLeftBehind {
                lock_word::see_to_marks(state, &self.sleepers, || self.disown(folio));
            }
        }
    }

    /// Calls `f` with the folio's lock, waiting for it if necessary.
    pub(super) fn wait_for_lock(&self, folio: Folio, f: impl FnOnce()) {
        let state = &self.meta(folio.head).state;
        assert!(lock_word::lock_unless_writeback(state, &self.sleepers));
        f();
        lock_word::unlock(state, &self.sleepers, || self.disown(folio));
        self.seen.slept.fetch_add(self.sleepers.sleeps.swap(0, Relaxed), Relaxed);
    }

    /// A reference by frame number. `f` receives the result.
    pub(super) fn walk(&self, frame: Frame, f: impl FnOnce(Folio)) {
        let found = match self.omit {
            Omit::LookAgain => reference::guess(self, frame)
                .filter(|guess| count::refer(&self.meta(guess.head).count)),
            Omit::NeverFromZero => reference::guess(self, frame).inspect(|guess| {
                self.meta(guess.head).count.add(REFERENCE, Ordering::Acquire);
            }),
            Omit::LockReferenced => {
                if let Some(guess) = reference::guess(self, frame) {
                    self.with_lock(guess, || {});
                }
                return;
            }
            _ => match reference::from_nothing(self, frame) {
                Ok(found) => found,
                Err(Mistaken(folio)) => {
                    note(&self.seen.mistaken);
                    self.check(folio);
                    self.release(folio);
                    return;
                }
            },
        };
        let Some(folio) = found else { return note(&self.seen.refused) };
        note(&self.seen.held);
        if self.omit != Omit::CountElsewhere {
            // Otherwise the CPU would notice the mistake and never reach the table's count.
            self.check(folio);
            f(folio);
        }
        self.release(folio);
    }

    /// Whether the held frame belongs to the folio that the hold is for.
    pub(super) fn check(&self, folio: Folio) {
        for frame in Self::frames(folio) {
            assert_eq!(self.life(frame), Life::Folio(folio), "held what is not this folio");
        }
    }

    /// Splits the first folio into single pages, as `FolioHandle::split` does. The caller has all
    /// its mappings and takes a reference. Both pages are mapped afterwards. Returns whether the
    /// folio was split.
    pub(super) fn cut(&self) -> bool {
        let count = &self.meta(FIRST.head).count;
        assert!(count::refer(count));
        let all = 2 * MAPPING + REFERENCE;
        let seen = Word::load(count, Relaxed);
        let frozen = match self.omit {
            Omit::FreezeToCut => seen == all,
            _ => seen == all && count::take_all(count, all),
        };
        if !frozen {
            note(&self.seen.busy);
            self.release(FIRST);
            return false;
        }
        for frame in Self::frames(FIRST) {
            let part = Folio::of(frame, Order::PAGE);
            let meta = self.meta(frame);
            self.set_life(frame, Life::Folio(part));
            meta.state.store(state_of(MetaKind::Folio, Order::PAGE), Relaxed);
            Word::store(&meta.count, MAPPING + REFERENCE, Ordering::Release);
        }
        for frame in Self::frames(FIRST) {
            self.release(Folio::of(frame, Order::PAGE));
        }
        true
    }

    /// Changes the owner, if the lock is free. The caller keeps a mapping.
    pub(super) fn claim(&self, folio: Folio, owner: u32) {
        self.with_lock(folio, || self.set_owner(folio, owner));
    }

    /// Audits the state after all CPUs are done: free frames have no count, lock or mark, tables
    /// and slabs are unchanged since their creation, and no folio without mappings has an owner.
    pub(super) fn audit(&self) {
        for number in 0..self.metas.len() as u32 {
            let (frame, meta) = (Frame(number), self.meta(Frame(number)));
            let (state, count) = (meta.state.load(Relaxed), meta.count.word.load(Relaxed));
            match self.life(frame) {
                Life::Free => assert_eq!(count, 0, "a free frame has a count"),
                Life::Table => {
                    let entries = if self.omit == Omit::CountElsewhere { count } else { 0 };
                    assert_eq!(entries.max(meta.word.load(Relaxed)), 1, "a table's entries");
                    assert_eq!(
                        state,
                        state_of_table(Level::<Tiny>::PTE),
                        "a table was locked by a stranger"
                    );
                }
                Life::Slab => {
                    assert_eq!((count, meta.word.load(Relaxed)), (0, 1), "a slab's objects");
                }
                Life::Folio(folio) if folio.head == frame => {
                    assert_ne!(count, 0, "a folio without an owner leaks");
                    assert_eq!(references_in(count), 0, "a reference got lost");
                    assert_eq!(state & LOCKING, 0, "a folio stays locked");
                    let owner = self.owner(folio);
                    assert!(mappings_in(count) > 0 || owner == 0, "an owner dangles");
                    // SAFETY: all CPUs have finished.
                    let heir = self.heir.with(|heir| unsafe { *heir });
                    assert!(heir == 0 || owner == heir, "mapped with the owner of before");
                }
                Life::Folio(_) => assert_eq!(count, 0, "a tail has a count"),
            }
        }
    }
}
