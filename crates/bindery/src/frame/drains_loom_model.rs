//! The order of a drain under loom: the code of [`super::drains`] itself, over two fronts and a
//! frame for each CPU.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib drains_loom_model`.
//!
//! CPU 0 frees all frames into its front and allocates one. The other CPUs concurrently allocate
//! one frame each. So some frame is free when CPU 0 allocates, and CPU 0 must get it. In the refill
//! models, the frames are on the lists, and the other CPUs allocate them through a front. The last
//! tests leave out one rule each ([`Omit`]) and must fail.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed as StdRelaxed};

use crate::sync::model;
use crate::sync::model::sync::Mutex;
use crate::sync::model::sync::atomic::{
    AtomicU8,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use super::drains::{self, DRAINING, EMPTY, Machine, UNKNOWN};

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// A frame that enters a front invalidates the record of an empty drain.
    NotePut,
    /// A drain that was disturbed does not count as empty.
    Disturbed,
    /// One drain runs at a time.
    OneAtATime,
    /// The lists are tried again after a drain that found nothing.
    TryAgain,
    /// A refill publishes its frames before it unlocks the lists.
    NoteInside,
    /// A drain that found frames but did not lead to an allocation is repeated.
    Repeat,
    /// A front's lock is held until its frames are on the lists.
    LockHeld,
}

struct World {
    omit: Omit,
    state: AtomicU8,
    drain: Mutex<()>,
    fronts: [Mutex<u64>; 2],
    lists: Mutex<u64>,
    /// Whether a drain was skipped in any execution.
    skipped: Arc<Flag>,
}

impl Machine for World {
    fn state(&self) -> u8 {
        let state = self.state.load(Acquire);
        self.skipped.fetch_or(state == EMPTY, StdRelaxed);
        state
    }

    fn disturb(&self) {
        self.state.swap(UNKNOWN, AcqRel);
    }

    fn begin(&self) {
        self.state.store(DRAINING, Release);
    }

    fn replace_draining(&self, state: u8) {
        if self.omit == Omit::Disturbed {
            self.state.store(state, Release);
        } else {
            let _disturbed = self.state.compare_exchange(DRAINING, state, Release, Relaxed);
        }
    }

    fn one_at_a_time(&self, drain: impl FnOnce()) {
        let lock = (self.omit != Omit::OneAtATime).then(|| self.drain.lock().unwrap());
        drain();
        drop(lock);
    }
}

impl World {
    fn take_from_lists(&self) -> bool {
        let mut lists = self.lists.lock().unwrap();
        let taken = *lists > 0;
        *lists -= u64::from(taken);
        taken
    }

    /// Allocates a frame on a CPU whose front is empty and cannot be refilled.
    fn allocate(&self) -> bool {
        self.take_from_lists() || self.take_after_drains()
    }

    /// Allocates a frame through the front of CPU 1, as [`super::Allocator`] does. The refill takes
    /// all frames from the lists.
    fn allocate_by_front(&self) -> bool {
        let mut held = self.fronts[1].lock().unwrap();
        if *held == 0 {
            let mut lists = self.lists.lock().unwrap();
            *held += core::mem::take(&mut *lists);
            if *held > 0 {
                let lists = (self.omit != Omit::NoteInside).then_some(lists);
                drains::note_put(self);
                drop(lists);
            }
        }
        let taken = *held > 0;
        *held -= u64::from(taken);
        drop(held);
        taken || self.take_after_drains()
    }

    fn take_after_drains(&self) -> bool {
        loop {
            let found = self.drain();
            let again = self.omit != Omit::TryAgain || found > 0;
            let taken = again && self.take_from_lists();
            if taken || found == 0 || self.omit == Omit::Repeat {
                return taken;
            }
        }
    }

    /// Returns the number of frames that the fronts had.
    fn drain(&self) -> u64 {
        let mut found = 0;
        drains::run(self, || {
            found = self.fronts.iter().map(|front| self.empty(front)).sum();
            found
        });
        found
    }

    /// Returns the number of frames that the front had.
    fn empty(&self, front: &Mutex<u64>) -> u64 {
        let mut held = front.lock().unwrap();
        let found = core::mem::take(&mut *held);
        let held = (self.omit != Omit::LockHeld).then_some(held);
        *self.lists.lock().unwrap() += found;
        drop(held);
        found
    }

    fn free(&self, frames: u64) {
        let mut held = self.fronts[0].lock().unwrap();
        *held += frames;
        if self.omit != Omit::NotePut {
            drains::note_put(self);
        }
    }
}

/// CPU 0 frees and allocates, concurrently with allocations of `others` CPUs.
fn explore(omit: Omit, others: usize) -> bool {
    let free = move |world: &World| world.free(others as u64 + 1);
    check(omit, others, UNKNOWN, free, World::allocate)
}

/// CPU 0 is taken offline. A thread that still has its number frees a frame into its front and then
/// allocates. The last drain found nothing.
fn explore_offline(omit: Omit) {
    model::check(Some(6), move || {
        let world = Rc::new(World {
            omit,
            state: AtomicU8::new(EMPTY),
            drain: Mutex::new(()),
            fronts: [Mutex::new(0), Mutex::new(0)],
            lists: Mutex::new(0),
            skipped: Arc::default(),
        });
        let offline = |world: &World| {
            world.empty(&world.fronts[0]);
        };
        model::beside(&world, [offline], |world| {
            world.free(1);
            assert!(world.allocate(), "a frame was free");
        });
    });
}

/// CPU 0 allocates while `others` CPUs refill a front. The last drain found nothing.
fn explore_refill(omit: Omit, others: usize) -> bool {
    check(omit, others, EMPTY, |_| {}, World::allocate_by_front)
}

/// CPU 0 runs `before` and allocates, concurrently with `others` CPUs that run `allocate`.
fn check(
    omit: Omit,
    others: usize,
    state: u8,
    before: impl Fn(&World) + Send + Sync + 'static,
    allocate: fn(&World) -> bool,
) -> bool {
    let skipped = Arc::new(Flag::new(false));
    let shared = Arc::clone(&skipped);
    model::check(Some(if others > 1 { 3 } else { 6 }), move || {
        let on_lists = if state == EMPTY { others as u64 + 1 } else { 0 };
        let world = Rc::new(World {
            omit,
            state: AtomicU8::new(state),
            drain: Mutex::new(()),
            fronts: [Mutex::new(0), Mutex::new(0)],
            lists: Mutex::new(on_lists),
            skipped: Arc::clone(&shared),
        });
        let other = move |world: &World| {
            allocate(world);
        };
        model::beside(&world, (0..others).map(|_| other), |world| {
            before(world);
            assert!(world.allocate(), "a frame was free");
        });
    });
    skipped.load(StdRelaxed)
}

#[test]
fn the_free_frame_is_found_beside_one_drain() {
    assert!(explore(Omit::Nothing, 1));
}

#[test]
fn the_free_frame_is_found_beside_two_drains() {
    assert!(explore(Omit::Nothing, 2));
}

#[test]
#[should_panic(expected = "a frame was free")]
fn an_unnoted_empty_drain_hides_a_frame() {
    explore(Omit::NotePut, 1);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_disturbed_drain_hides_a_frame() {
    explore(Omit::Disturbed, 1);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a frame was free")]
fn two_drains_at_once_hide_a_frame() {
    explore(Omit::OneAtATime, 2);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_frame_that_another_drain_moved_is_missed() {
    explore(Omit::TryAgain, 1);
}

#[test]
fn the_free_frame_is_found_beside_a_refill() {
    assert!(explore_refill(Omit::Nothing, 1));
}

#[test]
fn the_free_frame_is_found_beside_two_refills() {
    assert!(explore_refill(Omit::Nothing, 2));
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_late_refill_note_hides_a_frame() {
    explore_refill(Omit::NoteInside, 1);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_refill_after_a_drain_takes_frames_again() {
    explore_refill(Omit::Repeat, 2);
}

#[test]
fn the_frame_is_found_beside_a_leaving_cpu() {
    explore_offline(Omit::Nothing);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_frame_of_a_leaving_cpu_is_missed() {
    explore_offline(Omit::LockHeld);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn an_unnoted_frame_of_a_leaving_cpu() {
    explore_offline(Omit::NotePut);
}
