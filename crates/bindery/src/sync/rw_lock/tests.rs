//! A lock's word with threads in its line, or parked: who is let in, and who is woken.

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A thread that sleeps only as the test has planned. Counts the wake-ups of others.
struct Sleeper<'a> {
    /// Runs at each sleep, with the number of sleeps before it.
    others: &'a dyn Fn(u32),
    sleeps: Cell<u32>,
    wakeups: Cell<u32>,
}

impl<'a> Sleeper<'a> {
    fn new(others: &'a dyn Fn(u32)) -> Self {
        Self { others, sleeps: Cell::new(0), wakeups: Cell::new(0) }
    }
}

impl Parking<AtomicU32> for Sleeper<'_> {
    fn park(&self, word: &AtomicU32, expected: u32) {
        assert_eq!(word.load(Ordering::Relaxed), expected);
        let before = self.sleeps.replace(self.sleeps.get() + 1);
        (self.others)(before);
    }

    fn unpark(&self, _word: *const AtomicU32) {
        self.wakeups.set(self.wakeups.get() + 1);
    }
}

fn never(_: u32) {
    panic!("the thread may enter");
}

fn word(lock: &RwLock) -> u32 {
    lock.0.load(Ordering::Relaxed)
}

/// Another thread joins the line and parks.
fn join_and_park(lock: &RwLock) {
    let (joined, _) = line::join(word(lock)).expect("the line has room");
    lock.0.store(joined | PARKED, Ordering::Relaxed);
}

/// The word of a lock with one thread in its line, which does not sleep.
fn line_of_one() -> u32 {
    line::join(0).expect("the line has room").0
}

#[test]
fn newcomers_do_not_pass_the_line() {
    let lock = RwLock::new();
    let thread = Sleeper::new(&never);
    join_and_park(&lock);
    let before = word(&lock);
    assert!(lock.try_read(&thread).is_none());
    assert!(lock.try_write_while(&thread, || true).is_none());
    assert_eq!(word(&lock), before);
}

#[test]
fn a_writer_giving_up_keeps_the_line() {
    let lock = RwLock::new();
    let thread = Sleeper::new(&never);
    let reader = lock.try_read(&thread);
    let mut is_alone = true;
    let goes_on = || {
        if core::mem::take(&mut is_alone) {
            join_and_park(&lock);
        }
        false
    };
    assert!(lock.try_write_while(&thread, goes_on).is_none());
    assert_eq!(word(&lock), line_of_one() | READER);
    assert_eq!(thread.wakeups.get(), 1, "the first of the line may enter");
    drop(reader);
    assert_eq!(thread.wakeups.get(), 1, "no thread sleeps");
}

#[test]
fn unlocking_keeps_the_line_and_wakes_it() {
    let lock = RwLock::new();
    let thread = Sleeper::new(&never);
    let writer = lock.write(&thread);
    join_and_park(&lock);
    drop(writer);
    assert_eq!(word(&lock), line_of_one());
    assert_eq!(thread.wakeups.get(), 1);
}

#[test]
fn only_the_last_reader_wakes_the_writer() {
    let lock = RwLock::new();
    let thread = Sleeper::new(&never);
    let readers = [lock.read(&thread), lock.read(&thread)];
    // A writer that waits for the readers.
    lock.0.set(WRITER | PARKED, Ordering::Relaxed);
    let wakeups = readers.map(|reader| {
        drop(reader);
        thread.wakeups.get()
    });
    assert_eq!(wakeups, [0, 1]);
}

/// A thread sleeps in vain, joins the line, and enters when the writer has left. Another thread
/// joined behind it and parked. Returns the word and the number of wake-ups with the lock held.
fn enters_from_line(enter: impl FnOnce(&RwLock, &Sleeper<'_>) -> (u32, u32)) -> (u32, u32) {
    let lock = RwLock::new();
    lock.0.store(WRITER, Ordering::Relaxed);
    let others = |sleeps| {
        if sleeps > 0 {
            // The writer leaves, and its wake-up of the second thread comes too early.
            let left = word(&lock) & !WRITER;
            lock.0.store(left, Ordering::Relaxed);
            join_and_park(&lock);
        }
    };
    enter(&lock, &Sleeper::new(&others))
}

#[test]
fn a_reader_from_the_line_wakes_the_next() {
    let (word, wakeups) = enters_from_line(|lock, thread| {
        let _guard = lock.read(thread);
        (word(lock), thread.wakeups.get())
    });
    assert_eq!(word & (WRITER | PARKED | QUEUED | READERS), QUEUED | READER);
    assert_eq!(wakeups, 1);
}

#[test]
fn a_writer_from_the_line_wakes_none() {
    let (word, wakeups) = enters_from_line(|lock, thread| {
        let _guard = lock.write(thread);
        (word(lock), thread.wakeups.get())
    });
    assert_eq!(word & (WRITER | PARKED | QUEUED | READERS), WRITER | PARKED | QUEUED);
    assert_eq!(wakeups, 0, "the next enters when the writer unlocks");
}
