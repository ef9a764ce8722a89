//! Each provided lock excludes other holders and restores the interrupt state.

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::parking::Parking;
use super::rw_lock::{ReadGuard, RwLock, WriteGuard};
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

/// A waiting thread. Whenever it parks, the other thread unlocks and tries at once to lock again.
struct Overtaken<'a> {
    lock: &'a RwLock,
    reader: Cell<Option<ReadGuard<'a, Spins>>>,
    writer: Cell<Option<WriteGuard<'a, Spins>>>,
    sleeps: Cell<u32>,
    overtaken: Cell<u32>,
}

impl<'a> Overtaken<'a> {
    /// The other thread has the lock for reading.
    fn by_readers(lock: &'a RwLock) -> Self {
        let (reader, writer) = (Cell::new(lock.try_read(&Spins)), Cell::new(None));
        Self { lock, reader, writer, sleeps: Cell::new(0), overtaken: Cell::new(0) }
    }

    /// The other thread has the lock for writing.
    fn by_writers(lock: &'a RwLock) -> Self {
        let writer = lock.try_write_while(&Spins, || false);
        Self { reader: Cell::new(None), writer: Cell::new(writer), ..Self::by_readers(lock) }
    }

    fn counts(&self) -> (u32, u32) {
        (self.sleeps.get(), self.overtaken.get())
    }
}

impl Parking<AtomicU32> for Overtaken<'_> {
    fn park(&self, _word: &AtomicU32, _expected: u32) {
        self.sleeps.set(self.sleeps.get() + 1);
        let again = if let Some(reader) = self.reader.take() {
            // Readers overlap: the next comes before the last has left.
            let next = self.lock.try_read(&Spins);
            drop(reader);
            let again = next.is_some();
            self.reader.set(next);
            again
        } else {
            drop(self.writer.take());
            let next = self.lock.try_write_while(&Spins, || false);
            let again = next.is_some();
            self.writer.set(next);
            again
        };
        self.overtaken.set(self.overtaken.get() + u32::from(again));
    }

    fn unpark(&self, _word: *const AtomicU32) {}
}

#[test]
fn a_stream_of_writers_overtakes_a_sleeper_once() {
    let lock = RwLock::new();
    let waiter = Overtaken::by_writers(&lock);
    drop(lock.read(&waiter));
    assert_eq!(waiter.counts(), (2, 1));
    let waiter = Overtaken::by_writers(&lock);
    drop(lock.write(&waiter));
    assert_eq!(waiter.counts(), (2, 1));
    assert!(lock.try_write_while(&Spins, || false).is_some(), "the line has left no trace");
}

#[test]
fn a_stream_of_readers_overtakes_no_writer() {
    let lock = RwLock::new();
    let waiter = Overtaken::by_readers(&lock);
    drop(lock.write(&waiter));
    assert_eq!(waiter.counts(), (1, 0));
}
