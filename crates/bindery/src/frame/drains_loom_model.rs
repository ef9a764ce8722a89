//! The order of a drain under loom: the code of [`super::drains`] itself, over two fronts and a
//! frame for each CPU.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib drains_loom_model`.
//!
//! CPU 0 frees all frames into its front, and allocates one. The other CPUs allocate one each at the
//! same time. So a frame is free when CPU 0 asks, wherever it is then, and CPU 0 must get it. The
//! last tests leave out one rule each ([`Omit`]) and must fail.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed as StdRelaxed};
use std::vec::Vec;

use loom::model::Builder;
use loom::sync::Mutex;
use loom::sync::atomic::{
    AtomicU8,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use loom::thread;

use super::drains::{self, DRAINING, EMPTY, Machine, UNKNOWN};

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// A frame that enters a front ends the memory of an empty drain.
    NotePut,
    /// A drain that was disturbed does not count as empty.
    Disturbed,
    /// One drain runs at a time.
    OneAtATime,
    /// The lists are tried again after a drain that found nothing.
    TryAgain,
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

    /// Allocates a frame as a CPU whose front is empty.
    fn allocate(&self) -> bool {
        if self.take_from_lists() {
            return true;
        }
        let mut found = 0;
        drains::run(self, || {
            for front in &self.fronts {
                let mut held = front.lock().unwrap();
                let mut lists = self.lists.lock().unwrap();
                *lists += *held;
                found += core::mem::take(&mut *held);
            }
            found
        });
        let again = self.omit != Omit::TryAgain || found > 0;
        again && self.take_from_lists()
    }

    fn free(&self, frames: u64) {
        let mut held = self.fronts[0].lock().unwrap();
        *held += frames;
        if self.omit != Omit::NotePut {
            drains::note_put(self);
        }
    }
}

struct Shared(Rc<World>);

// SAFETY: the world is shared by loom's threads, which run one at a time; it is dropped by the last.
unsafe impl Send for Shared {}

/// CPU 0 frees and allocates, beside the allocations of `others` CPUs.
fn explore(omit: Omit, others: usize) -> bool {
    let skipped = Arc::new(Flag::new(false));
    let shared = Arc::clone(&skipped);
    let mut builder = Builder::new();
    builder.preemption_bound = Some(if others > 1 { 3 } else { 6 });
    builder.check(move || {
        let world = Rc::new(World {
            omit,
            state: AtomicU8::new(UNKNOWN),
            drain: Mutex::new(()),
            fronts: [Mutex::new(0), Mutex::new(0)],
            lists: Mutex::new(0),
            skipped: Arc::clone(&shared),
        });
        let cpus: Vec<_> = (0..others)
            .map(|_| {
                let shared = Shared(Rc::clone(&world));
                thread::spawn(move || {
                    let shared = shared;
                    shared.0.allocate();
                })
            })
            .collect();
        world.free(others as u64 + 1);
        assert!(world.allocate(), "a frame was free");
        cpus.into_iter().for_each(|cpu| cpu.join().unwrap());
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
fn without_a_note_an_empty_drain_hides_a_frame() {
    explore(Omit::NotePut, 1);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_disturbed_drain_hides_a_frame() {
    explore(Omit::Disturbed, 1);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn two_drains_at_once_hide_a_frame() {
    explore(Omit::OneAtATime, 2);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn a_frame_that_another_drain_moved_is_missed() {
    explore(Omit::TryAgain, 1);
}
