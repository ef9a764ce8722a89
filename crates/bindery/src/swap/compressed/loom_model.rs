//! The limit of compressed memory, under loom: the code of [`super::quota`] and of
//! [`crate::frame::drains`] itself, with a pool for each CPU.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib compressed::loom_model`.
//!
//! A pool has frames in use and credit. The frames never exceed the limit, and a CPU is refused
//! only if all frames are in use. The last tests each leave out one rule ([`Omit`]) and must fail.

use std::sync::Arc;

use crate::sync::model::sync::Mutex;
use crate::sync::model::sync::atomic::{
    AtomicU8, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use crate::sync::model::{self, thread};

use super::quota::{CompressedQuota, FrameCredit};
use crate::frame::drains::{self, DRAINING, EMPTY, Machine, UNKNOWN};
use crate::sync::word::Word;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// A search returns the credit of all pools before it retries.
    Return,
    /// No pool keeps credit during a search.
    KeepsNone,
    /// Freeing a frame clears the note that a search found nothing.
    NotePut,
}

/// A pool: its credit, and the number of its frames in use.
struct Pool(FrameCredit, u64);

struct World {
    omit: Omit,
    quota: CompressedQuota<AtomicU64>,
    pools: [Mutex<Pool>; 2],
    state: AtomicU8,
    search: Mutex<()>,
}

impl Machine for World {
    fn state(&self) -> u8 {
        self.state.load(Acquire)
    }

    fn disturb(&self) {
        self.state.swap(UNKNOWN, AcqRel);
    }

    fn begin(&self) {
        self.state.store(DRAINING, Release);
    }

    fn replace_draining(&self, state: u8) {
        let _disturbed = self.state.compare_exchange(DRAINING, state, Release, Relaxed);
    }

    fn one_at_a_time(&self, drain: impl FnOnce()) {
        let _lock = self.search.lock().unwrap();
        drain();
    }
}

impl World {
    fn new(omit: Omit, limit: u64) -> Self {
        Self {
            omit,
            quota: CompressedQuota::of_words(limit, AtomicU64::new),
            pools: [(); 2].map(|()| Mutex::new(Pool(FrameCredit::new(true), 0))),
            state: AtomicU8::new(UNKNOWN),
            search: Mutex::new(()),
        }
    }

    fn keeps_credit(&self) -> bool {
        let is_searching = self.quota.is_searching() && self.omit != Omit::KeepsNone;
        !is_searching && self.state() == UNKNOWN
    }

    /// `PoolInFrames::grow`.
    fn grow(&self, cpu: usize) -> bool {
        let Pool(credit, used) = &mut *self.pools[cpu].lock().unwrap();
        let grown = credit.take(&self.quota, self.keeps_credit());
        if grown {
            *used += 1;
            drains::note_put(self);
        }
        grown
    }

    /// `Pools::reserve` for a page that needs a frame.
    fn store(&self, cpu: usize) -> bool {
        let mut grown = self.grow(cpu);
        if !grown {
            drains::run(self, || {
                self.quota.set_searching(true);
                for pool in self.pools.iter().filter(|_| self.omit != Omit::Return) {
                    pool.lock().unwrap().0.return_all(&self.quota);
                }
                grown = self.grow(cpu);
                self.quota.set_searching(false);
                u64::from(grown)
            });
        }
        grown
    }

    /// `Pools::release` for a page that needs a frame.
    fn free(&self, cpu: usize) {
        let Pool(credit, used) = &mut *self.pools[cpu].lock().unwrap();
        *used -= 1;
        credit.put(&self.quota, self.keeps_credit());
        if self.omit != Omit::NotePut {
            drains::note_put(self);
        }
    }

    /// The number of frames in use. Checks that it and the credit of all pools add up to the
    /// granted frames.
    fn assert_counted(&self, limit: u64) {
        let [one, other] = [0, 1].map(|cpu| {
            let Pool(credit, used) = &*self.pools[cpu].lock().unwrap();
            (credit.frames(), *used)
        });
        assert!(one.1 + other.1 <= limit, "the limit was passed");
        assert_eq!(one.0 + one.1 + other.0 + other.1, self.quota.granted());
    }
}

fn check(omit: Omit, limit: u64, scenario: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    model::check(Some(3), move || {
        let world = Arc::new(World::new(omit, limit));
        scenario(&world);
        world.assert_counted(limit);
    });
}

/// Two CPUs store one page each, and two frames exist. The first batch of either CPU is both
/// frames.
fn two_frames_serve_two_cpus(omit: Omit) {
    check(omit, 2, |world| {
        let other = Arc::clone(world);
        let thread = thread::spawn(move || other.store(1));
        assert!(world.store(0), "a frame was free");
        assert!(thread.join().unwrap(), "a frame was free");
    });
}

/// CPU 1 uses two of three frames in succession, so that room appears during a search.
fn three_frames_serve_two_cpus(omit: Omit) {
    check(omit, 3, |world| {
        assert!(world.store(1));
        let other = Arc::clone(world);
        let thread = thread::spawn(move || {
            other.free(1);
            other.store(1) && other.store(1)
        });
        assert!(world.store(0), "a frame was free");
        assert!(thread.join().unwrap(), "a frame was free");
    });
}

/// The only frame is freed during a store that may be refused; the refusal is not remembered.
fn a_refusal_ends_with_a_free(omit: Omit) {
    check(omit, 1, |world| {
        assert!(world.store(0));
        let other = Arc::clone(world);
        let thread = thread::spawn(move || other.store(1));
        world.free(0);
        let stored = thread.join().unwrap();
        assert!(stored || world.state() != EMPTY, "the refusal stays");
    });
}

#[test]
fn credit_of_another_cpu_is_found() {
    two_frames_serve_two_cpus(Omit::Nothing);
}

#[test]
fn credit_is_found_while_frames_come_and_go() {
    three_frames_serve_two_cpus(Omit::Nothing);
}

#[test]
fn a_freed_frame_is_found() {
    a_refusal_ends_with_a_free(Omit::Nothing);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn without_the_return_credit_is_not_found() {
    two_frames_serve_two_cpus(Omit::Return);
}

#[test]
#[should_panic(expected = "a frame was free")]
fn credit_kept_in_searches_refuses_falsely() {
    three_frames_serve_two_cpus(Omit::KeepsNone);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "the refusal stays")]
fn an_unnoted_free_lets_the_refusal_stay() {
    a_refusal_ends_with_a_free(Omit::NotePut);
}
