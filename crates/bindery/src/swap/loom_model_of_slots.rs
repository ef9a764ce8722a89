//! Slots, under loom: their counts, and a page that leaves the swap cache while a fault looks it
//! up. The steps are those of [`super::slot_state`] and of the folio's count.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib swap::loom_model`.
//!
//! The contents of a frame and of a slot in the store are loom cells, so a use of either after its
//! reuse shows as a race or as another page's content. The last tests each leave out one rule
//! ([`Omit`]) and must fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed as Plain};

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::Mutex;
use crate::sync::model::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::model::sync::atomic::{AtomicU32, AtomicU64};
use crate::sync::model::{self, thread};

use super::slot_state::{MAX_ENTRIES, SlotState, hold_cached, name_all};
use crate::addr::{Frame, Order};
use crate::folio::{REFERENCE, publish, refer, take_all};

const FRAME: Frame = Frame(7);
/// The page of the slot, and the next owner of its frame or slot.
const PAGE: u32 = 1;
const NEXT_PAGE: u32 = 2;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// A thread that has taken a reference reads the slot again.
    SecondLook,
    /// The holder of the folio's lock is the one to release a busy slot.
    Busy,
    /// References to slots are added under the lock of their cluster.
    ClusterLock,
}

struct World {
    omit: Omit,
    /// The lock of the cluster.
    cluster: Mutex<()>,
    cells: [AtomicU64; 2],
    /// The folio's count.
    count: AtomicU64,
    /// The page that the frame holds.
    frame: UnsafeCell<u32>,
    /// The page whose content is in the store.
    store: UnsafeCell<u32>,
    /// The number of times that the slot became free.
    freed: AtomicU32,
}

/// A reference to the folio.
struct Held<'a>(&'a AtomicU64);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(REFERENCE, Release);
    }
}

// SAFETY: the model tracks each access to the cells and reports races.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new(omit: Omit, cells: [SlotState; 2], references: u64) -> Self {
        Self {
            omit,
            cluster: Mutex::new(()),
            cells: cells.map(|cell| AtomicU64::new(cell.0)),
            count: AtomicU64::new(references * REFERENCE),
            frame: UnsafeCell::new(PAGE),
            store: UnsafeCell::new(PAGE),
            freed: AtomicU32::new(0),
        }
    }

    fn cell(&self) -> SlotState {
        // Acquire: like `Swap::state_of`.
        SlotState(self.cells[0].load(Acquire))
    }

    /// `CachedFolio::evict` by a thread that has the folio's lock and a reference. Afterwards the
    /// frame belongs to another page.
    fn evict(&self) {
        let cluster = self.cluster.lock().unwrap();
        let frozen = take_all(&self.count, 2 * REFERENCE);
        let now = if frozen { self.cell().uncached(3) } else { self.cell() };
        self.cells[0].store(now.0 & !SlotState::BUSY, Relaxed);
        drop(cluster);
        if frozen {
            // SAFETY: as for `Sync`.
            self.frame.with_mut(|frame| unsafe { frame.write(NEXT_PAGE) });
            publish(&self.count, REFERENCE);
        } else {
            self.count.fetch_sub(REFERENCE, Release);
        }
    }

    /// `find_cached`, followed by a read of the page. Returns whether the page was found.
    fn find(&self) -> bool {
        let first = self.cell().frame();
        let look = || match self.omit {
            Omit::SecondLook => first,
            _ => self.cell().frame(),
        };
        let held = hold_cached(look, |frame| {
            assert_eq!(frame, FRAME);
            refer(&self.count).then(|| Held(&self.count))
        });
        if held.is_some() {
            // SAFETY: as for `Sync`.
            let page = self.frame.with(|frame| unsafe { frame.read() });
            assert_eq!(page, PAGE, "another page has the frame");
        }
        held.is_some()
    }

    /// The slot is free: another page is stored there.
    fn reuse(&self) {
        self.freed.fetch_add(1, Relaxed);
        // SAFETY: as for `Sync`.
        self.store.with_mut(|store| unsafe { store.write(NEXT_PAGE) });
    }

    /// `SlotRun::release`, for the only entry that refers to the slot.
    fn release(&self) {
        let cluster = self.cluster.lock().unwrap();
        let now = self.cell().without_entry();
        let free = match self.omit {
            Omit::Busy => now.entries() == 0,
            _ => now.is_unheld(),
        };
        self.cells[0].store(if free { SlotState::FREE.0 } else { now.0 }, Relaxed);
        drop(cluster);
        if free {
            self.reuse();
        }
    }

    /// The holder of the folio's lock stores the content and unlocks the slot.
    fn write_out(&self) {
        // SAFETY: as for `Sync`.
        self.store.with_mut(|store| unsafe { store.write(PAGE) });
        let cluster = self.cluster.lock().unwrap();
        let now = SlotState(self.cell().0 & !SlotState::BUSY | SlotState::STORED);
        let free = now.is_unheld();
        self.cells[0].store(if free { SlotState::FREE.0 } else { now.0 }, Relaxed);
        drop(cluster);
        if free {
            self.reuse();
        }
    }

    /// `SlotRun::dup` of both slots.
    fn name(&self) -> bool {
        let cluster = (self.omit != Omit::ClusterLock).then(|| self.cluster.lock().unwrap());
        let named = name_all(&self.cells);
        drop(cluster);
        named
    }
}

fn check(world: impl Fn() -> World + Send + Sync + 'static, scenario: fn(&Arc<World>)) {
    model::check(Some(3), move || scenario(&Arc::new(world())));
}

fn spawn<R: Send + 'static>(
    world: &Arc<World>,
    work: impl FnOnce(&World) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

/// A folio is evicted while two faults look it up by its slot.
fn eviction(omit: Omit) {
    static FOUND: Flag = Flag::new(false);
    static GONE: Flag = Flag::new(false);
    let cached = SlotState(SlotState::going_out(FRAME, Order(4), 1).0 | SlotState::STORED);
    check(
        move || World::new(omit, [cached, SlotState::FREE], 2),
        |world| {
            let fault = spawn(world, World::find);
            let reclaim = spawn(world, World::evict);
            let found = world.find();
            FOUND.fetch_or(found | fault.join().unwrap(), Plain);
            GONE.fetch_or(!found, Plain);
            reclaim.join().unwrap();
            assert_eq!(world.cell().entries(), 1);
            assert_eq!(world.count.load(Acquire), REFERENCE, "a reference was lost");
        },
    );
    assert!(FOUND.load(Plain) && GONE.load(Plain), "one of the outcomes was not seen");
}

/// The last entry is removed while the page is written out.
fn last_entry(omit: Omit) {
    check(
        move || World::new(omit, [SlotState::going_out(FRAME, Order(4), 1), SlotState::FREE], 2),
        |world| {
            let writer = spawn(world, World::write_out);
            world.release();
            writer.join().unwrap();
            assert_eq!((world.cell(), world.freed.load(Acquire)), (SlotState::FREE, 1));
        },
    );
}

/// Two forks add references to a run in which one slot allows only one more.
fn two_names(omit: Omit) {
    let nearly_full = SlotState(SlotState::STORED | (MAX_ENTRIES - 1));
    check(
        move || World::new(omit, [SlotState(SlotState::STORED | 5), nearly_full], 0),
        |world| {
            let fork = spawn(world, World::name);
            let named = world.name();
            assert!(named ^ fork.join().unwrap(), "both name the slots, or none does");
            let entries = |cell: usize| SlotState(world.cells[cell].load(Acquire)).entries();
            assert_eq!([entries(0), entries(1)], [6, MAX_ENTRIES as u32]);
        },
    );
}

#[test]
fn a_page_found_in_the_cache_is_right() {
    eviction(Omit::Nothing);
}

#[test]
fn a_busy_slot_is_free_after_its_write() {
    last_entry(Omit::Nothing);
}

#[test]
fn a_run_gets_all_references_or_none() {
    two_names(Omit::Nothing);
}

#[test]
#[should_panic(expected = "another page has the frame")]
fn without_a_second_check_another_page_appears() {
    eviction(Omit::SecondLook);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_the_busy_bit_a_slot_is_reused() {
    last_entry(Omit::Busy);
}

#[test]
#[should_panic(expected = "both name the slots")]
fn without_the_lock_a_slot_is_overcounted() {
    two_names(Omit::ClusterLock);
}
