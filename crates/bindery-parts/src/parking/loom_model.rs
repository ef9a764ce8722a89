//! Parking under loom: the code itself, with threads that sleep until the table wakes them.
//!
//! Run with `scripts/loom parking`.
//!
//! The scheduler keeps a word for each thread that is about to sleep, and orders nothing. A thread
//! that is never woken is a deadlock. A datum is written before the word changes; a thread
//! that reads it too early is a race. The last tests leave out one rule each and must fail.

use core::cell::Cell;
use core::ops::ControlFlow;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::vec::Vec;

use bindery::sync::Interrupts;
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::thread::{self, JoinHandle, Thread};

use super::bucket::{Batch, List};
use super::{ParkResult, ParkedThread, ParkingBucket, ParkingTable, Scheduler};
use crate::atomic::{AtomicU32, Ordering};
use crate::rule::{Rule, omit};

const THREADS: usize = 3;
const PARKER: usize = 1;
/// A thread that only has a record.
const ABSENT: usize = 2;

loom::thread_local! {
    static NUMBER: Cell<usize> = Cell::new(0);
    static GIVES_UP: Cell<bool> = Cell::new(false);
}

enum Yield {}

impl Interrupts for Yield {
    type State = ();

    fn disable() {}

    fn restore((): ()) {}

    fn relax() {
        thread::yield_now();
    }
}

#[derive(Default)]
struct Seen {
    woken: Flag,
    changed: Flag,
    gave_up: Flag,
}

struct Threads {
    asleep: [AtomicBool; THREADS],
    handles: Mutex<[Option<Thread>; THREADS]>,
}

impl Scheduler for Threads {
    type Interrupts = Yield;

    fn current(&self) -> Option<usize> {
        Some(NUMBER.with(Cell::get))
    }

    fn sleep(&self, is_woken: impl Fn() -> bool) -> ControlFlow<()> {
        let me = NUMBER.with(Cell::get);
        if GIVES_UP.with(Cell::get) {
            return ControlFlow::Break(());
        }
        self.handles.lock().unwrap()[me] = Some(thread::current());
        self.asleep[me].store(true, Ordering::Relaxed);
        if !is_woken() {
            thread::park();
        }
        self.asleep[me].store(false, Ordering::Relaxed);
        ControlFlow::Continue(())
    }

    fn wake(&self, thread: usize) {
        if self.asleep[thread].load(Ordering::Relaxed) {
            let handle = self.handles.lock().unwrap()[thread].clone();
            handle.unwrap().unpark();
        }
    }
}

struct World {
    table: ParkingTable<'static, Threads>,
    words: [AtomicU32; 12],
    datum: UnsafeCell<u32>,
    seen: Arc<Seen>,
}

// SAFETY: the model runs one thread at a time, and the cell reports concurrent accesses.
unsafe impl Sync for World {}

impl World {
    /// A word of the bucket.
    fn word(&self, bucket: usize) -> &AtomicU32 {
        let is_inside = |word: &&AtomicU32| {
            let found = self.table.bucket(core::ptr::from_ref(*word).addr());
            core::ptr::eq(found.unwrap(), &self.table.buckets[bucket])
        };
        self.words.iter().find(is_inside).unwrap()
    }

    fn park(&self, bucket: usize) -> ParkResult {
        let result = self.table.park(self.word(bucket), 0);
        match result {
            ParkResult::Woken => self.seen.woken.store(true, Relaxed),
            ParkResult::Changed => self.seen.changed.store(true, Relaxed),
            ParkResult::GaveUp => self.seen.gave_up.store(true, Relaxed),
        }
        result
    }

    fn locked<R>(&self, bucket: usize, work: impl FnOnce(&List<'_>, usize) -> R) -> R {
        let address = core::ptr::from_ref(self.word(bucket)).addr();
        self.table.locked(&self.table.buckets[bucket], |list| work(list, address))
    }

    /// Adds a thread to the bucket, without a sleep.
    fn queue(&self, bucket: usize, thread: usize) {
        self.locked(bucket, |list, address| list.push_if(thread as u32, address, || true));
    }

    fn write(&self) {
        // SAFETY: the cell reports a concurrent access.
        self.datum.with_mut(|datum| unsafe { *datum = 1 });
        self.word(0).store(1, Ordering::Release);
    }
}

fn wake_all(world: &World) {
    world.write();
    world.table.unpark(world.word(0));
}

fn wake_one(world: &World) {
    world.write();
    world.table.unpark_some(world.word(0), 1);
}

fn park_and_read(world: &World) {
    if world.park(0) != ParkResult::GaveUp {
        // SAFETY: the cell reports a concurrent write.
        assert_eq!(world.datum.with(|datum| unsafe { *datum }), 1);
    }
}

fn park_and_give_up(world: &World) {
    GIVES_UP.with(|gives_up| gives_up.set(true));
    if world.park(0) == ParkResult::Woken {
        // As one that unlocks again.
        world.table.unpark_some(world.word(0), 1);
    }
}

fn with_world(
    rule: Option<Rule>,
    preemptions: usize,
    work: impl Fn(&'static World) + Send + Sync + 'static,
) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let all = Arc::clone(&seen);
    omit::check(rule, Some(preemptions), move || {
        let seen = Arc::clone(&all);
        let memory: ([ParkingBucket; 2], [ParkedThread; THREADS]) =
            (core::array::from_fn(|_| ParkingBucket::new()), Default::default());
        omit::lend(memory, |(buckets, records)| {
            let threads = Threads {
                asleep: core::array::from_fn(|_| AtomicBool::new(false)),
                handles: Mutex::default(),
            };
            let table = ParkingTable::new(threads, buckets, records);
            let words = core::array::from_fn(|_| AtomicU32::new(0));
            omit::lend(World { table, words, datum: UnsafeCell::new(0), seen }, |world| {
                work(world);
                assert_eq!(world.table.parked(), 0, "a record is left behind");
            });
        });
    });
    seen
}

fn spawn(world: &'static World, number: usize, work: fn(&World)) -> JoinHandle<()> {
    thread::spawn(move || {
        NUMBER.with(|me| me.set(number));
        work(world);
    })
}

/// Explores the interleavings of threads, of which the first runs on the main thread.
fn explore<const N: usize>(
    rule: Option<Rule>,
    preemptions: usize,
    work: [fn(&World); N],
) -> Arc<Seen> {
    with_world(rule, preemptions, move |world| {
        let others: Vec<_> = (1..N).map(|number| spawn(world, number, work[number])).collect();
        work[0](world);
        others.into_iter().for_each(|thread| thread.join().unwrap());
    })
}

/// A thread is woken without a sleep, and its record goes to another bucket at once, with another
/// record behind it.
fn reuse(rule: Option<Rule>) {
    fn go_on(world: &World) {
        while !world.table.threads[PARKER].is_woken() {
            thread::yield_now();
        }
        [PARKER, ABSENT].into_iter().for_each(|thread| world.queue(1, thread));
    }
    with_world(rule, 3, |world| {
        world.queue(0, PARKER);
        let parker = spawn(world, PARKER, go_on);
        let mut batch = Batch::at_most(1);
        world.locked(0, |list, address| list.take(address, u64::MAX, &mut batch));
        parker.join().unwrap();
        assert_eq!(world.table.unpark_some(world.word(1), 9), 2, "a waiter is lost");
    });
}

#[test]
fn no_wake_up_is_lost() {
    let seen = explore(None, 3, [wake_all, park_and_read]);
    assert!(seen.woken.load(Relaxed) && seen.changed.load(Relaxed));
    let seen = explore(None, 2, [wake_all, park_and_read, park_and_read]);
    assert!(seen.woken.load(Relaxed) && seen.changed.load(Relaxed));
}

#[test]
fn a_woken_thread_may_park_elsewhere() {
    reuse(None);
}

#[test]
fn a_thread_that_gives_up_takes_nothing() {
    let seen = explore(None, 2, [wake_one, park_and_give_up, park_and_read]);
    assert!(seen.woken.load(Relaxed) && seen.gave_up.load(Relaxed));
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[should_panic(expected = "deadlock")]
fn a_word_read_too_early_is_old() {
    explore(Some(Rule::WordUnderLock), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_word_read_without_fence_is_old() {
    explore(Some(Rule::FenceBeforeWord), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_count_read_without_fence_is_old() {
    explore(Some(Rule::FenceBeforeWaiters), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_word_read_without_acquire_proves_nothing() {
    explore(Some(Rule::AcquireWord), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_bucket_locked_without_acquire_looks_empty() {
    explore(Some(Rule::AcquireBucket), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_bucket_left_without_release_looks_empty() {
    explore(Some(Rule::ReleaseBucket), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "a waiter is lost")]
fn a_record_marked_too_early_is_reused() {
    reuse(Some(Rule::UnlinkBeforeMark));
}

#[test]
#[should_panic(expected = "a waiter is lost")]
fn a_mark_without_release_cuts_another_list() {
    reuse(Some(Rule::ReleaseMark));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_thread_woken_without_mark_sleeps_again() {
    explore(Some(Rule::MarkBeforeWake), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_state_read_without_fence_is_old() {
    explore(Some(Rule::FenceBeforeWake), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_mark_read_without_fence_is_old() {
    explore(Some(Rule::FenceBeforeMark), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_mark_read_without_acquire_proves_nothing() {
    explore(Some(Rule::AcquireMark), 3, [wake_all, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_record_left_behind_takes_wake_ups() {
    explore(Some(Rule::LeaveList), 2, [wake_one, park_and_give_up, park_and_read]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_up_kept_is_lost() {
    explore(Some(Rule::PassOn), 2, [wake_one, park_and_give_up, park_and_read]);
}
