//! Credit at the limit under loom: the code of [`super`] itself, with two areas of memory and two
//! processes, each of which needs at most one.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib commit::loom_model`.
//!
//! The limit is two areas. So no refusal is justified, regardless of the CPU whose credit contains
//! the free pages, and three areas are never committed. The last tests leave out one rule each
//! ([`Omit`]) and must fail.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64 as Count, AtomicU64 as Taken, Ordering::Relaxed as StdRelaxed};

use crate::sync::model;
use crate::sync::model::sync::Mutex;

use super::*;

/// An area: more pages than a batch.
const AREA: i64 = 2 * BATCH;
/// The pages that may be committed.
const LIMIT: i64 = 2 * AREA;
const CPUS: usize = 3;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// The lock is held while pages move between the word and credit.
    Lock,
    /// A call that would be refused collects the credit of all CPUs first.
    Collect,
    /// Collected credit remains closed until the pages are counted again.
    Closed,
}

struct World {
    omit: Omit,
    state: CommitState,
    credits: [Credit; CPUS],
    lock: Mutex<()>,
    /// Pages that the processes have committed, counted from after their grant until before their
    /// return.
    committed: Count,
    /// The number of times that the lock was acquired, in all executions.
    locked: Arc<Taken>,
}

/// A thread on a CPU.
struct On<'w>(&'w World, usize);

impl Credits for On<'_> {
    fn own(&self) -> Option<&Credit> {
        Some(&self.0.credits[self.1])
    }

    fn all(&self) -> impl Iterator<Item = &Credit> {
        let cpus = if self.0.omit == Omit::Collect { 0 } else { CPUS };
        self.0.credits.iter().take(cpus)
    }

    fn locked<R>(&self, exchange: impl FnOnce() -> R) -> R {
        self.0.locked.fetch_add(1, StdRelaxed);
        let lock = (self.0.omit != Omit::Lock).then(|| self.0.lock.lock().unwrap());
        let result = exchange();
        drop(lock);
        result
    }

    fn close(&self, credit: &Credit) -> i64 {
        if self.0.omit == Omit::Closed { credit.0.swap(0, Relaxed) } else { credit.close() }
    }
}

impl World {
    fn new(omit: Omit, locked: &Arc<Taken>) -> Self {
        let state = CommitState::new(1 << 30);
        state.set_mode(Overcommit::Never);
        state.set_limit(LIMIT as u64);
        let (lock, locked) = (Mutex::new(()), Arc::clone(locked));
        let (credits, committed) = (Default::default(), Count::new(0));
        Self { omit, state, credits, lock, committed, locked }
    }

    /// Maps an area on a CPU, on behalf of a process that has no other area.
    fn map(&self, cpu: usize) {
        let granted = self.state.reserve(&On(self, cpu), AREA, 0).is_ok();
        assert!(granted, "a refusal is true");
        self.note_mapped();
    }

    /// Unmaps an area on a CPU.
    fn unmap(&self, cpu: usize) {
        self.committed.fetch_sub(AREA, StdRelaxed);
        self.state.add(&On(self, cpu), -AREA);
    }

    /// Maps an area on a CPU. May be refused.
    fn try_to_map(&self, cpu: usize) {
        if self.state.reserve(&On(self, cpu), AREA, 0).is_ok() {
            self.note_mapped();
        }
    }

    fn note_mapped(&self) {
        let before = self.committed.fetch_add(AREA, StdRelaxed);
        assert!(before + AREA <= LIMIT, "the limit holds");
    }
}

/// Runs `first` concurrently with `second`, after `before`, which leaves `left` pages committed.
/// Returns the number of times that the lock was acquired.
fn explore(omit: Omit, before: fn(&World), [first, second]: [fn(&World); 2], left: i64) -> u64 {
    let locked = Arc::new(Taken::new(0));
    let shared = Arc::clone(&locked);
    model::check(Some(4), move || {
        let world = Rc::new(World::new(omit, &shared));
        before(&world);
        model::beside(&world, [second], first);
        let committed = world.state.committed(&On(&world, 0));
        assert_eq!(committed as i64, left, "pages are counted");
    });
    locked.load(StdRelaxed)
}

/// CPU 2 has all credit; CPU 0 and CPU 1 map an area each.
fn all_credit_elsewhere(omit: Omit) -> u64 {
    let before = |world: &World| {
        (0..2).for_each(|_| world.map(2));
        (0..2).for_each(|_| world.unmap(2));
    };
    explore(omit, before, [|world| world.map(0), |world| world.map(1)], LIMIT)
}

/// CPU 2 has credit for one area. A process returns the other area on CPU 1 and then maps an area
/// on CPU 2. CPU 0 maps an area.
fn credit_that_moves(omit: Omit) -> u64 {
    let before = |world: &World| {
        (0..2).for_each(|_| world.map(2));
        world.unmap(2);
    };
    let moves = |world: &World| {
        world.unmap(1);
        world.map(2);
    };
    explore(omit, before, [|world| world.map(0), moves], LIMIT)
}

/// Two CPUs map and unmap an area each. CPU 0 has all credit, until the other CPU collects it.
fn areas_that_come_and_go(omit: Omit) -> u64 {
    let before = |world: &World| {
        (0..2).for_each(|_| world.map(0));
        (0..2).for_each(|_| world.unmap(0));
    };
    let first = |world: &World| {
        world.map(0);
        world.unmap(0);
    };
    let second = |world: &World| {
        world.map(1);
        world.unmap(1);
    };
    explore(omit, before, [first, second], 0)
}

/// CPU 2 has all credit and is taken offline. A thread that still has its number maps an area with
/// its credit, and CPU 0 maps the other area.
fn credit_of_a_cpu_that_leaves(omit: Omit) -> u64 {
    let before = |world: &World| {
        (0..2).for_each(|_| world.map(2));
        (0..2).for_each(|_| world.unmap(2));
    };
    let leaves = |world: &World| world.state.collect(&On(world, 2), &world.credits[2]);
    let maps = |world: &World| {
        world.map(2);
        world.map(0);
    };
    explore(omit, before, [maps, leaves], LIMIT)
}

/// As [`credit_of_a_cpu_that_leaves`]; the thread returns an area and maps it again.
fn pages_for_a_cpu_that_leaves(omit: Omit) -> u64 {
    let before = |world: &World| {
        (0..2).for_each(|_| world.map(2));
    };
    let leaves = |world: &World| world.state.collect(&On(world, 2), &world.credits[2]);
    let returns = |world: &World| {
        world.unmap(2);
        world.map(0);
    };
    explore(omit, before, [returns, leaves], LIMIT)
}

#[test]
fn two_cpus_get_the_credit_of_a_third() {
    assert!(all_credit_elsewhere(Omit::Nothing) > 0);
}

#[test]
fn credit_that_moves_behind_a_refusal_is_found() {
    assert!(credit_that_moves(Omit::Nothing) > 0);
}

#[test]
fn two_areas_have_room_for_two() {
    assert!(areas_that_come_and_go(Omit::Nothing) > 0);
}

#[test]
fn a_cpu_that_leaves_takes_no_credit_along() {
    assert!(credit_of_a_cpu_that_leaves(Omit::Nothing) > 0);
    assert!(pages_for_a_cpu_that_leaves(Omit::Nothing) > 0);
}

#[test]
fn of_three_areas_two_are_granted() {
    let map_two = |world: &World| (0..2).for_each(|_| world.try_to_map(1));
    explore(Omit::Nothing, |_| {}, [|world| world.try_to_map(0), map_two], LIMIT);
}

#[test]
#[should_panic(expected = "a refusal is true")]
fn a_refusal_before_collecting_credit_is_false() {
    all_credit_elsewhere(Omit::Collect);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a refusal is true")]
fn open_credit_moves_behind_a_refusal() {
    credit_that_moves(Omit::Closed);
}

#[test]
#[should_panic(expected = "pages are counted")]
fn two_exchanges_at_once_lose_pages() {
    all_credit_elsewhere(Omit::Lock);
}

#[test]
#[should_panic(expected = "pages are counted")]
fn a_leaving_cpu_beside_an_exchange_loses_pages() {
    credit_of_a_cpu_that_leaves(Omit::Lock);
}
