//! Folios taken over from a device, under loom: the code of [`super::requests`] and of the folio's
//! lock, and the steps of [`super::take_over`].
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib swap::loom_model`.
//!
//! The content of a slot on the device is a loom cell, written first by the device and then by the
//! next user of the slot. So a slot that is freed before the device is done shows as a race. The
//! content of the folio is another cell, which the holder of the lock writes. The last tests each
//! leave out one rule ([`Omit`]) and must fail. The other test requires that some executions took
//! the folio back and others did not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed as Plain};

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::Mutex;
use crate::sync::model::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use crate::sync::model::sync::atomic::{AtomicU32, AtomicU64};
use crate::sync::model::{self, thread};

use super::device::SwapOperation;
use super::requests::Group;
use super::slot_state::SlotState;
use crate::addr::{Frame, Order};
use crate::folio::{
    REFERENCE, begin_writeback, lock_unless_writeback, take_all, take_from_request, unlock,
};
use crate::frame::meta::{FOLIO_LOCK, WRITEBACK};
use crate::sync::completions::Completions;
use crate::sync::parking::model::{SecondLook, Sleepers};

const FRAME: Frame = Frame(7);
/// The number of address spaces that refer to the slot.
const SPACES: u32 = 2;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// The lock is taken over and the slot is marked in one step.
    OneStep,
    /// The slot is marked and stays taken until the device is done.
    Mark,
}

struct World {
    omit: Omit,
    state: AtomicU32,
    count: AtomicU64,
    requests: Group<AtomicU32, 1>,
    completions: Completions<AtomicU32>,
    sleepers: Sleepers,
    cluster: Mutex<()>,
    cell: AtomicU64,
    content: UnsafeCell<u32>,
    /// The content of the slot on the device.
    stored: UnsafeCell<u32>,
    freed: AtomicU32,
    taken_back: Flag,
}

// SAFETY: the model tracks each access to the cells and reports races.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    /// A folio submitted to a device, in the state in which `send_to_device` leaves it. The faults
    /// have seen the entries that refer to its slot, and each holds a reference.
    fn new(omit: Omit) -> Self {
        let world = Self {
            omit,
            state: AtomicU32::new(FOLIO_LOCK),
            count: AtomicU64::new((2 + u64::from(SPACES)) * REFERENCE),
            requests: Group::of_words(AtomicU32::new),
            completions: Completions::of_words(AtomicU32::new),
            sleepers: Sleepers::new(SecondLook::Taken),
            cluster: Mutex::new(()),
            cell: AtomicU64::new(SlotState::going_out(FRAME, Order::PAGE, SPACES).0),
            content: UnsafeCell::new(0),
            stored: UnsafeCell::new(0),
            freed: AtomicU32::new(0),
            taken_back: Flag::new(false),
        };
        let number = world.requests.take().expect("it is free");
        world.requests.begin(number, FRAME, 0);
        begin_writeback(&world.state, &world.sleepers, || ());
        world
    }

    /// The device writes the slot and completes the request. The thread that notices ends the
    /// request.
    fn transfer(&self) {
        // SAFETY: as for `Sync`.
        self.stored.with_mut(|stored| unsafe { stored.write(1) });
        self.requests.complete(0, SwapOperation::Write, false);
        self.completions.note(&self.sleepers);
        self.finish();
    }

    /// `Memory::finish_swap_writes`.
    fn finish(&self) {
        if self.requests.take_done() == 0 {
            return;
        }
        if self.lock_written() {
            self.evict();
            unlock(&self.state, &self.sleepers, || ());
        }
        self.count.fetch_sub(REFERENCE, AcqRel);
        self.requests.free(0);
        self.completions.note(&self.sleepers);
    }

    /// `lock_written`. Returns whether the caller has the lock.
    fn lock_written(&self) -> bool {
        let _cluster = self.cluster.lock().unwrap();
        let now = SlotState(self.cell.load(Relaxed));
        if !now.has(SlotState::WRITING) {
            return take_from_request(&self.state, || ());
        }
        let now = SlotState(now.0 & !SlotState::WRITING);
        self.free_if_unheld(now);
        false
    }

    /// `CachedFolio::evict`, while the faults still have their references.
    fn evict(&self) {
        let _cluster = self.cluster.lock().unwrap();
        assert!(!take_all(&self.count, 2 * REFERENCE), "a fault has lost its reference");
        let now = SlotState(self.cell.load(Relaxed) & !SlotState::BUSY | SlotState::STORED);
        self.free_if_unheld(now);
    }

    /// Frees the slot if it no longer has a holder. The lock of the cluster is held.
    fn free_if_unheld(&self, now: SlotState) {
        if !now.is_unheld() {
            self.cell.store(now.0, Relaxed);
            return;
        }
        self.cell.store(SlotState::FREE.0, Relaxed);
        self.leave_cache_of(now);
        self.freed.fetch_add(1, Relaxed);
        // SAFETY: as for `Sync`.
        self.stored.with_mut(|stored| unsafe { stored.write(2) });
    }

    fn leave_cache_of(&self, cell: SlotState) {
        if cell.has(SlotState::CACHED) {
            self.count.fetch_sub(REFERENCE, AcqRel);
        }
    }

    /// `take_over`. Returns whether the caller has the lock.
    fn take_over(&self) -> bool {
        let cluster = self.cluster.lock().unwrap();
        let now = SlotState(self.cell.load(Relaxed));
        let written = now.has(SlotState::BUSY | SlotState::CACHED) && !now.has(SlotState::STORED);
        if !written || !take_from_request(&self.state, || ()) {
            return false;
        }
        let cluster = match self.omit {
            Omit::OneStep => {
                drop(cluster);
                self.cluster.lock().unwrap()
            }
            _ => cluster,
        };
        let mark = if self.omit == Omit::Mark { 0 } else { SlotState::WRITING };
        let now = self.cell.load(Relaxed) & !(SlotState::BUSY | SlotState::CONTENT) | mark;
        self.cell.store(now, Relaxed);
        drop(cluster);
        self.taken_back.store(true, Plain);
        true
    }

    /// A fault: `lock_folio`, then the page is mapped and written to, and the slot is released.
    fn fault(&self) {
        while !lock_unless_writeback(&self.state, &self.sleepers) && !self.take_over() {
            self.completions.wait(&self.sleepers, &mut || {
                self.finish();
                self.state.load(Acquire) & WRITEBACK == 0
            });
        }
        // SAFETY: as for `Sync`.
        self.content.with_mut(|content| unsafe { content.write(content.read() + 1) });
        self.settle();
        unlock(&self.state, &self.sleepers, || ());
        // The mapping keeps the reference.
    }

    /// `CachedFolio::unlock`, for a page that has lost an entry.
    fn settle(&self) {
        let _cluster = self.cluster.lock().unwrap();
        let now = SlotState((self.cell.load(Relaxed) & !SlotState::BUSY) - 1);
        if now.entries() == 0 && now.has(SlotState::WRITING) {
            self.cell.store(SlotState::WRITING, Relaxed);
            self.leave_cache_of(now);
        } else {
            self.free_if_unheld(now);
        }
    }
}

/// Two spaces that share a page fault on it while a device is writing it. Returns whether some
/// executions took the folio back, and whether some did not.
fn two_faults(omit: Omit) -> [bool; 2] {
    let seen = Arc::new([Flag::new(false), Flag::new(false)]);
    let outcomes = Arc::clone(&seen);
    model::check(Some(2), move || {
        let world = Arc::new(World::new(omit));
        let spawn = |work: fn(&World)| {
            let world = Arc::clone(&world);
            thread::spawn(move || work(&world))
        };
        let (device, other) = (spawn(World::transfer), spawn(World::fault));
        world.fault();
        device.join().unwrap();
        other.join().unwrap();
        world.finish();
        assert!(world.requests.is_idle(), "a request was not freed");
        let (state, cell) = (world.state.load(Acquire), SlotState(world.cell.load(Acquire)));
        assert_eq!(
            (state, cell),
            (0, SlotState::FREE),
            "the folio stays locked, or its slot taken"
        );
        assert_eq!(world.freed.load(Acquire), 1, "the slot was freed more than once");
        let references = u64::from(SPACES) * REFERENCE;
        assert_eq!(world.count.load(Acquire), references, "the count of the folio is wrong");
        outcomes[usize::from(world.taken_back.load(Plain))].store(true, Plain);
    });
    [0, 1].map(|outcome| seen[outcome].load(Plain))
}

#[test]
fn a_folio_is_the_faults_or_the_finishers() {
    assert_eq!(two_faults(Omit::Nothing), [true; 2], "one of the outcomes was not seen");
}

#[test]
#[should_panic(expected = "the folio stays locked, or its slot taken")]
fn without_one_step_nobody_lets_the_slot_go() {
    two_faults(Omit::OneStep);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Concurrent write accesses")]
fn without_a_mark_a_written_slot_is_reused() {
    two_faults(Omit::Mark);
}
