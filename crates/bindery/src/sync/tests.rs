//! Each provided lock excludes other holders and restores the interrupt state.

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::parking::Parking;
use super::rw_lock::RwLock;
use super::{AlwaysOff, Interrupts, Mutex, RawLock, SpinLock};

/// Several threads increment a number without atomic instructions.
fn excludes<L: RawLock>() {
    const ROUNDS: u64 = 2_000;
    let sum = Mutex::<L, u64>::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let mut sum = sum.lock();
                    let seen = *sum;
                    core::hint::black_box(&sum);
                    *sum = seen + 1;
                }
            });
        }
    });
    assert_eq!(*sum.lock(), 4 * ROUNDS);
}

/// The lock excludes others until the guard is dropped.
fn is_held_as_long_as_its_guard<L: RawLock>() {
    let mut mutex = Mutex::<L, u32>::new(1);
    let guard = mutex.lock();
    thread::scope(|scope| {
        scope.spawn(|| assert!(mutex.try_lock().is_none(), "held"));
    });
    drop(guard);
    *mutex.try_lock().expect("the mutex is free") += 1;
    assert_eq!(*mutex.get_mut(), 2);
}

fn is_a_lock<L: RawLock>() {
    excludes::<L>();
    is_held_as_long_as_its_guard::<L>();
}

#[test]
fn spin_locks_exclude() {
    is_a_lock::<SpinLock>();
    is_a_lock::<SpinLock<Flag>>();
    assert_eq!(size_of::<SpinLock<Flag>>(), 1);
    assert_eq!(size_of::<Mutex<SpinLock<AlwaysOff>, u8>>(), 2);
}

#[test]
#[cfg(feature = "lock_api_04")]
fn locks_of_lock_api_04_exclude() {
    is_a_lock::<super::LockApi04<spin::Mutex<()>>>();
}

#[test]
#[cfg(feature = "lock_api_05")]
fn locks_of_lock_api_05_exclude() {
    is_a_lock::<super::LockApi05<parking_lot::RawMutex>>();
}

std::thread_local! {
    /// Whether this thread has interrupts on.
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// The number of spins of waiters.
static SPINS: AtomicU32 = AtomicU32::new(0);

/// Each thread has its own interrupt state.
struct Flag;

impl Interrupts for Flag {
    type State = bool;

    fn disable() -> bool {
        ENABLED.replace(false)
    }

    fn restore(enabled: bool) {
        ENABLED.set(enabled);
    }

    fn relax() {
        assert!(ENABLED.get(), "a waiter spins with interrupts as it had them");
        SPINS.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
    }
}

#[test]
fn a_spin_locks_holder_has_interrupts_off() {
    let locks = [const { Mutex::<SpinLock<Flag>, ()>::new(()) }; 2];
    let outer = locks[0].lock();
    assert!(!ENABLED.get());
    drop(locks[1].lock());
    assert!(!ENABLED.get(), "they were off before the inner lock");
    drop(outer);
    assert!(ENABLED.get());
}

#[test]
fn who_cannot_have_the_lock_gets_interrupts_back() {
    let mutex = Mutex::<SpinLock<Flag>, ()>::new(());
    let _guard = mutex.lock();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(mutex.try_lock().is_none());
            assert!(ENABLED.get(), "those of this thread");
        });
    });
}

#[test]
fn a_waiter_spins_with_interrupts_on() {
    let mutex = Mutex::<SpinLock<Flag>, ()>::new(());
    let guard = mutex.lock();
    let before = SPINS.load(Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| drop(mutex.lock()));
        while SPINS.load(Ordering::Relaxed) == before {
            thread::yield_now();
        }
        drop(guard);
    });
}

/// Threads that wait by spinning.
struct Spins;

impl Parking<AtomicU32> for Spins {
    fn park(&self, _word: &AtomicU32, _expected: u32) {
        thread::yield_now();
    }

    fn unpark(&self, _word: *const AtomicU32) {}
}

#[test]
fn overlapping_readers_do_not_block_patient_writers() {
    let lock = RwLock::<AtomicU32>::new();
    let mut reader = lock.try_read(&Spins);
    assert!(reader.is_some());
    let mut rounds = 0;
    let writer = lock.try_write_while(&Spins, || {
        assert!(lock.try_read(&Spins).is_none(), "the next reader waits");
        rounds += 1;
        if rounds == 3 {
            reader = None;
        }
        true
    });
    assert!(writer.is_some());
    assert!(lock.try_write_while(&Spins, || true).is_none(), "one writer at a time");
    drop(writer);
    assert!(lock.try_read(&Spins).is_some());
}

#[test]
fn an_impatient_writer_leaves_the_lock_unchanged() {
    let lock = RwLock::<AtomicU32>::new();
    let reader = lock.try_read(&Spins);
    let mut left = 3;
    let writer = lock.try_write_while(&Spins, || {
        left -= 1;
        left > 0
    });
    assert!(writer.is_none() && left == 0);
    assert!(lock.try_read(&Spins).is_some(), "readers are let in again");
    drop(reader);
    assert!(lock.try_write_while(&Spins, || false).is_some(), "the lock is free");
}
