use core::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::thread::{self, Thread};
use std::thread_local;
use std::vec::Vec;

use bindery::sync::AlwaysOff;

use super::*;

thread_local! {
    static ARE_ON: Cell<bool> = const { Cell::new(true) };
    static LOCKED: Cell<u32> = const { Cell::new(0) };
    static RELAXED: Cell<u32> = const { Cell::new(0) };
}

/// The interrupts of the test's thread.
enum Flag {}

impl Interrupts for Flag {
    type State = bool;

    fn disable() -> bool {
        LOCKED.set(LOCKED.get() + 1);
        ARE_ON.replace(false)
    }

    fn restore(were_on: bool) {
        ARE_ON.set(were_on);
    }

    fn relax() {
        RELAXED.set(RELAXED.get() + 1);
    }
}

/// One thread, whose sleep is a function of the test.
struct Script<'a> {
    current: Option<usize>,
    sleep: &'a dyn Fn(&dyn Fn() -> bool) -> ControlFlow<()>,
    wake: &'a dyn Fn(usize),
    woken: RefCell<Vec<usize>>,
}

impl Scheduler for Script<'_> {
    type Interrupts = Flag;

    fn current(&self) -> Option<usize> {
        self.current
    }

    fn sleep(&self, is_woken: impl Fn() -> bool) -> ControlFlow<()> {
        assert!(ARE_ON.get());
        (self.sleep)(&is_woken)
    }

    fn wake(&self, thread: usize) {
        assert!(ARE_ON.get());
        self.woken.borrow_mut().push(thread);
        (self.wake)(thread);
    }
}

fn never_sleeps(_: &dyn Fn() -> bool) -> ControlFlow<()> {
    panic!("slept")
}

fn script<'a>(sleep: &'a dyn Fn(&dyn Fn() -> bool) -> ControlFlow<()>) -> Script<'a> {
    Script { current: Some(0), sleep, wake: &|_| {}, woken: RefCell::default() }
}

fn buckets(count: usize) -> Vec<ParkingBucket> {
    (0..count).map(|_| ParkingBucket::new()).collect()
}

fn records(count: usize) -> Vec<ParkedThread> {
    (0..count).map(|_| ParkedThread::new()).collect()
}

/// Parks a thread that does not exist.
fn park(table: &ParkingTable<'_, Script<'_>>, thread: u32, word: &AtomicU32) {
    let address = core::ptr::from_ref(word).addr();
    let bucket = table.bucket(address).unwrap();
    assert!(table.locked(bucket, |list| list.push_if(thread, address, || true)));
}

#[test]
fn threads_wake_in_order_of_arrival() {
    let (buckets, records) = (buckets(1), records(6));
    let table = ParkingTable::new(script(&never_sleeps), &buckets, &records);
    let words = [const { AtomicU32::new(0) }; 3];
    for (thread, at) in [(4, 0), (1, 1), (3, 0), (0, 0), (2, 1)] {
        park(&table, thread, &words[at]);
    }
    assert_eq!(table.unpark_some(&words[0], 2), 2);
    assert_eq!(table.scheduler.woken.take(), [4, 3]);
    assert!(records[4].is_woken() && !records[0].is_woken());
    assert_eq!((table.unpark_some(&words[2], 9), table.unpark_some(&words[1], 0)), (0, 0));
    table.unpark(&words[1]);
    assert_eq!(table.scheduler.woken.take(), [1, 2]);
    // The end of the list moved twice.
    park(&table, 5, &words[0]);
    assert_eq!(table.parked(), 2);
    table.unpark(&words[0]);
    assert_eq!((table.scheduler.woken.take(), table.parked()), ([0, 5].to_vec(), 0));
}

/// Each thread parks again as soon as it is woken, and stays parked.
#[test]
fn one_call_wakes_no_thread_twice() {
    let (buckets, records) = (buckets(2), records(40));
    let word = AtomicU32::new(0);
    let again = OnceLock::new();
    let wake = |thread| {
        let table: &ParkingTable<'_, Script<'_>> = again.get().copied().unwrap();
        assert!(table.scheduler.woken.borrow().len() <= 40);
        park(table, thread as u32, &word);
    };
    let scheduler = Script { wake: &wake, ..script(&never_sleeps) };
    let table = ParkingTable::new(scheduler, &buckets, &records);
    assert!(again.set(&table).is_ok());
    (0..40).for_each(|thread| park(&table, thread, &word));
    assert_eq!(table.unpark_some(&word, usize::MAX), 40);
    assert_eq!(table.scheduler.woken.take(), (0..40).collect::<Vec<_>>());
    assert_eq!(table.parked(), 40);
}

#[test]
fn a_changed_word_lets_no_thread_sleep() {
    let (buckets, records) = (buckets(4), records(1));
    let table = ParkingTable::new(script(&never_sleeps), &buckets, &records);
    assert_eq!(table.park(&AtomicU32::new(1), 0), ParkResult::Changed);
    assert_eq!(table.parked(), 0);
}

/// The hook returns early twice before the thread is woken.
#[test]
fn a_thread_sleeps_until_it_is_woken() {
    let (buckets, records) = (buckets(4), records(1));
    let (word, slept) = (AtomicU32::new(7), Cell::new(0));
    let table_of_hook = OnceLock::new();
    let sleep = |is_woken: &dyn Fn() -> bool| {
        slept.set(slept.get() + 1);
        assert!(!is_woken());
        if slept.get() == 3 {
            let table: &ParkingTable<'_, Script<'_>> = table_of_hook.get().copied().unwrap();
            table.unpark(&word);
            assert!(is_woken());
        }
        ControlFlow::Continue(())
    };
    let table = ParkingTable::new(script(&sleep), &buckets, &records);
    assert!(table_of_hook.set(&table).is_ok());
    assert_eq!(table.park(&word, 7), ParkResult::Woken);
    assert_eq!((slept.get(), table.parked()), (3, 0));
}

#[test]
fn a_thread_that_gives_up_leaves() {
    let (buckets, records) = (buckets(1), records(4));
    let word = AtomicU32::new(0);
    for place in 0..3 {
        let gives_up = |_: &dyn Fn() -> bool| ControlFlow::Break(());
        let table = ParkingTable::new(script(&gives_up), &buckets, &records);
        (1..=place).for_each(|thread| park(&table, thread, &word));
        assert_eq!(table.park(&word, 0), ParkResult::GaveUp);
        (place + 1..4).for_each(|thread| park(&table, thread, &word));
        table.unpark(&word);
        assert_eq!(table.scheduler.woken.take(), [1, 2, 3]);
    }
}

#[test]
fn a_wake_up_passes_to_the_next() {
    let (buckets, records) = (buckets(1), records(3));
    let word = AtomicU32::new(0);
    let table_of_hook = OnceLock::new();
    let sleep = |_: &dyn Fn() -> bool| {
        let table: &ParkingTable<'_, Script<'_>> = table_of_hook.get().copied().unwrap();
        (1..3).for_each(|thread| park(table, thread, &word));
        assert_eq!(table.unpark_some(&word, 1), 1);
        ControlFlow::Break(())
    };
    let table = ParkingTable::new(script(&sleep), &buckets, &records);
    assert!(table_of_hook.set(&table).is_ok());
    assert_eq!(table.park(&word, 0), ParkResult::GaveUp);
    assert_eq!(table.scheduler.woken.take(), [0, 1]);
    assert_eq!(table.parked(), 1);
}

/// The hooks check that interrupts are on.
#[test]
fn buckets_are_locked_with_interrupts_off() {
    let (buckets, records) = (buckets(1), records(20));
    let word = AtomicU32::new(0);
    let table = ParkingTable::new(script(&never_sleeps), &buckets, &records);
    (0..20).for_each(|thread| park(&table, thread, &word));
    table.locked(&buckets[0], |_| assert!(!ARE_ON.get()));
    LOCKED.set(0);
    table.unpark(&word);
    assert_eq!((LOCKED.get(), ARE_ON.get()), (2, true));
    // Without waiters, the call locks nothing.
    table.unpark(&word);
    assert_eq!(LOCKED.get(), 2);
}

#[test]
fn a_thread_without_record_only_relaxes() {
    let (buckets, records) = (buckets(1), records(2));
    let word = AtomicU32::new(0);
    for current in [None, Some(2), Some(usize::MAX)] {
        let scheduler = Script { current, ..script(&never_sleeps) };
        let table = ParkingTable::new(scheduler, &buckets, &records);
        assert_eq!(table.park(&word, 0), ParkResult::GaveUp);
    }
    let table = ParkingTable::new(script(&never_sleeps), &[], &records);
    assert_eq!(table.park(&word, 0), ParkResult::GaveUp);
    table.unpark(&word);
    assert_eq!(RELAXED.get(), 4);
}

const THREADS: usize = 4;

thread_local! {
    static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Threads of the standard library.
struct Real([OnceLock<Thread>; THREADS]);

impl Scheduler for Real {
    type Interrupts = AlwaysOff;

    fn current(&self) -> Option<usize> {
        NUMBER.get()
    }

    fn sleep(&self, _: impl Fn() -> bool) -> ControlFlow<()> {
        thread::park();
        ControlFlow::Continue(())
    }

    fn wake(&self, thread: usize) {
        self.0[thread].get().unwrap().unpark();
    }
}

/// Two locks whose waiters sleep, in one bucket.
#[test]
fn threads_that_contend_for_locks_finish() {
    const ROUNDS: u32 = 5_000;
    let (buckets, records) = (buckets(1), records(THREADS));
    let table = ParkingTable::new(Real([const { OnceLock::new() }; THREADS]), &buckets, &records);
    let locks = [const { AtomicU32::new(0) }; 2];
    let counts = [const { AtomicU32::new(0) }; 2];
    let work = |lock: &AtomicU32, count: &AtomicU32| {
        while lock.swap(2, Ordering::Acquire) != 0 {
            let _ = table.park(lock, 2);
        }
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if lock.swap(0, Ordering::Release) == 2 {
            table.unpark_some(lock, 1);
        }
    };
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (table, locks, counts, work) = (&table, &locks, &counts, &work);
            scope.spawn(move || {
                NUMBER.set(Some(number));
                table.scheduler.0[number].set(thread::current()).unwrap();
                for round in 0..ROUNDS {
                    let at = (round as usize + number) % 2;
                    work(&locks[at], &counts[at]);
                }
            });
        }
    });
    let sum: u32 = counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    assert_eq!((sum, table.parked()), (THREADS as u32 * ROUNDS, 0));
}
