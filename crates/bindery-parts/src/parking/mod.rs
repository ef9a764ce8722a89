//! [`ParkingTable`]: threads that sleep until another thread changes a word.
//!
//! | file | contents |
//! |---|---|
//! | `bucket` | the waiting threads of some words, and their lock |
//!
//! A thread that parks locks the bucket of its word's address, reads the word, adds its record to
//! the end of the bucket's list, and sleeps. A thread that unparks removes the records of the
//! address from the list and marks them as woken, with the bucket locked. Then it calls
//! [`Scheduler::wake`] for their threads, with no lock held.
//!
//! # Orders
//! No wake-up is lost, although a thread that finds no waiter does not lock the bucket:
//! 1. The thread that parks counts itself, executes a fence, and reads the word. The thread that
//!    unparks has changed the word, executes a fence, and reads the count. So the first sees the
//!    change, or the second sees the count.
//! 2. The thread that sees the count locks the bucket. If the first thread still has it locked, the
//!    record is in the list when the lock is free.
//!
//! Between the mark and the sleep, the same holds for the state that the scheduler keeps of a
//! thread: `is_woken` executes a fence before it reads the mark, and the table executes one between
//! the mark and [`Scheduler::wake`].
//!
//! A thread may leave [`ParkingTable::park`] as soon as its record is marked, and park elsewhere.
//! So a record is out of the list before it is marked:
//! 1. CPU A marks the record of thread T.
//! 2. T runs on CPU B, sees the mark, and parks on a word of another bucket.
//! 3. CPU A reads the record's link to unlink it, and follows the list of the other bucket.

mod bucket;
#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

use core::ops::ControlFlow;

use bindery::sync::Interrupts;

use crate::atomic::{AtomicU32, Ordering, constructor};
use crate::rule::{self, Rule};

use bucket::{Batch, List};
pub use bucket::{ParkedThread, ParkingBucket};

/// The threads of the embedder: the hooks of [`ParkingTable`].
///
/// # Context
/// Context: any. [`Scheduler::sleep`] may sleep, and is called only by [`ParkingTable::park`]. The
/// others never sleep.
pub trait Scheduler {
    /// Turns interrupts off while a bucket is locked. With
    /// [`AlwaysOff`](bindery::sync::AlwaysOff), interrupt handlers do not unpark, and no holder of
    /// a bucket's lock is preempted.
    type Interrupts: Interrupts;

    /// The number of the running thread, which no other thread has at the same time. `None` where
    /// no thread runs that could sleep (at boot, in the idle loop).
    fn current(&self) -> Option<usize>;

    /// Lets the running thread sleep until [`Scheduler::wake`] is called with its number. May
    /// return early.
    ///
    /// The hook notes that the thread is about to sleep, calls `is_woken`, and switches to another
    /// thread only if the answer is `false`. If the scheduler remembers a wake-up of a running
    /// thread, it need not call `is_woken`.
    ///
    /// The answer `Break` ends [`ParkingTable::park`]: the thread has a signal, or a time is over.
    /// With `Continue`, the table calls the hook again unless the thread was woken.
    fn sleep(&self, is_woken: impl Fn() -> bool) -> ControlFlow<()>;

    /// Wakes a thread, if it sleeps. Called with no lock of the table held, in the context of
    /// [`ParkingTable::unpark`]. The thread may have gone on, parked again or ended in the
    /// meantime; a needless wake-up does no harm.
    fn wake(&self, thread: usize);
}

/// The reason why [`ParkingTable::park`] returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a thread that was woken by `unpark_some` may owe the others a wake-up"]
pub enum ParkResult {
    /// Another thread has unparked the word. All that it did before is visible.
    Woken,
    /// The word did not hold the expected value.
    Changed,
    /// [`Scheduler::sleep`] returned `Break`, or the thread has no record. It took no wake-up from
    /// the other threads.
    GaveUp,
}

/// Threads parked on words, for [`Platform::park`](bindery::Platform::park) and
/// [`Platform::unpark`](bindery::Platform::unpark).
///
/// The embedder supplies a number of [`ParkingBucket`]s, about one for each CPU or more, and a
/// [`ParkedThread`] for each thread that may exist at once. Threads that park on the same word are
/// woken in the order in which they parked. Words whose addresses have the same bucket share a
/// lock, and a thread that unparks passes over the waiters of the others.
///
/// ```
/// use std::ops::ControlFlow;
/// use std::sync::OnceLock;
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use std::thread::{self, Thread};
///
/// use bindery::sync::AlwaysOff;
/// use bindery_parts::{ParkedThread, ParkingBucket, ParkingTable, Scheduler};
///
/// static BUCKETS: [ParkingBucket; 16] = [const { ParkingBucket::new() }; 16];
/// static RECORDS: [ParkedThread; 100] = [const { ParkedThread::new() }; 100];
/// static PARKING: ParkingTable<'static, Threads> =
///     ParkingTable::new(Threads, &BUCKETS, &RECORDS);
///
/// /// The scheduler; here, that of the standard library.
/// struct Threads;
/// static THREAD: OnceLock<Thread> = OnceLock::new();
///
/// impl Scheduler for Threads {
///     /// A kernel whose interrupt handlers unpark has here what its `SpinLock` has.
///     type Interrupts = AlwaysOff;
///
///     fn current(&self) -> Option<usize> {
///         Some(7) // the only thread here that parks
///     }
///     fn sleep(&self, _is_woken: impl Fn() -> bool) -> ControlFlow<()> {
///         thread::park(); // remembers an earlier wake-up
///         ControlFlow::Continue(()) // `Break(())` if the thread has a signal
///     }
///     fn wake(&self, _thread: usize) {
///         if let Some(thread) = THREAD.get() {
///             thread.unpark();
///         }
///     }
/// }
///
/// struct Machine;
///
/// impl Machine {
///     // Functions of a `Platform`:
///     fn park(&self, word: &AtomicU32, expected: u32) {
///         let _ = PARKING.park(word, expected); // the core reads the word again
///     }
///     fn unpark(&self, word: *const AtomicU32) {
///         PARKING.unpark(word);
///     }
/// }
///
/// static LOCKED: AtomicU32 = AtomicU32::new(1);
/// let waiter = thread::spawn(|| {
///     THREAD.set(thread::current()).expect("one thread");
///     while LOCKED.load(Ordering::Acquire) == 1 {
///         Machine.park(&LOCKED, 1);
///     }
/// });
/// LOCKED.store(0, Ordering::Release);
/// Machine.unpark(&LOCKED);
/// waiter.join().expect("no panic");
/// ```
///
/// # Threads that end
/// To end a thread that is parked, wake it by the scheduler's own means, and answer `Break` in
/// [`Scheduler::sleep`]. Its record then leaves the bucket. If a thread has unparked it in the
/// meantime, the wake-up passes to the next waiter.
///
/// # Context
/// Context: any for unparking; in interrupt handlers only if [`Scheduler::Interrupts`] turns
/// interrupts off.
#[derive(Debug)]
pub struct ParkingTable<'m, S> {
    scheduler: S,
    buckets: &'m [ParkingBucket],
    threads: &'m [ParkedThread],
}

impl<'m, S: Scheduler> ParkingTable<'m, S> {
    constructor! {
        /// A table without parked threads. Thread *n* uses element *n* of `threads`. The buckets
        /// and the records belong to no other table.
        pub const fn new(
            scheduler: S,
            buckets: &'m [ParkingBucket],
            threads: &'m [ParkedThread],
        ) -> Self {
            Self { scheduler, buckets, threads }
        }
    }

    /// Lets the running thread sleep until another one unparks the word. Returns at once if the
    /// word does not hold `expected`. For [`Platform::park`](bindery::Platform::park), which
    /// ignores the result.
    ///
    /// A thread without a number, or with one for which there is no record, does not sleep: it
    /// executes one [`Interrupts::relax`] and returns. Constant time without the sleep; linear in
    /// the waiters of the bucket if the hook gives up.
    ///
    /// Context: may sleep.
    pub fn park(&self, word: &AtomicU32, expected: u32) -> ParkResult {
        let address = core::ptr::from_ref(word).addr();
        let me = self.scheduler.current();
        let record = me.and_then(|me| Some((u32::try_from(me).ok()?, self.threads.get(me)?)));
        let (Some(bucket), Some((me, record))) = (self.bucket(address), record) else {
            S::Interrupts::relax();
            return ParkResult::GaveUp;
        };
        let order = rule::order(Rule::AcquireWord, Ordering::Acquire);
        let is_unchanged = || word.load(order) == expected;
        let early = (!rule::holds(Rule::WordUnderLock)).then(is_unchanged);
        let is_parked = self.locked(bucket, |list| {
            list.push_if(me, address, || early.unwrap_or_else(is_unchanged))
        });
        if is_parked { self.sleep(bucket, me, record) } else { ParkResult::Changed }
    }

    /// Wakes all threads that are parked on the word. For
    /// [`Platform::unpark`](bindery::Platform::unpark).
    ///
    /// The word was changed before the call, and may have been freed since: only its address is
    /// used. Threads that park during the call may stay parked. Without a waiter in the bucket, the
    /// call reads one word; otherwise, it passes over the waiters of the bucket once for each 16
    /// that it wakes. Interrupts are off for one such pass.
    pub fn unpark(&self, word: *const AtomicU32) {
        self.unpark_some(word, usize::MAX);
    }

    /// Wakes up to `count` threads that are parked on the word, in the order in which they parked
    /// (Linux: `futex(2)` with `FUTEX_WAKE`). Returns the number of threads woken. Otherwise as
    /// [`ParkingTable::unpark`].
    pub fn unpark_some(&self, word: *const AtomicU32, count: usize) -> usize {
        self.wake(word.addr(), count)
    }

    /// The number of parked threads. Not exact while threads park. Linear in the number of buckets.
    pub fn parked(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.waiting() as usize).sum()
    }

    fn sleep(&self, bucket: &ParkingBucket, me: u32, record: &ParkedThread) -> ParkResult {
        let is_woken = || record.is_woken();
        while !is_woken() {
            if self.scheduler.sleep(is_woken).is_break() {
                let address = record.address();
                let was_woken =
                    rule::holds(Rule::LeaveList) && !self.locked(bucket, |list| list.leave(me));
                if was_woken && rule::holds(Rule::PassOn) {
                    self.wake(address, 1);
                }
                return ParkResult::GaveUp;
            }
        }
        ParkResult::Woken
    }

    fn wake(&self, address: usize, count: usize) -> usize {
        let Some(bucket) = self.bucket(address) else { return 0 };
        rule::fence(Rule::FenceBeforeWaiters);
        if bucket.waiting() == 0 {
            return 0;
        }
        let mut woken = 0;
        // Threads that were woken and park again are not woken twice.
        let mut arrived = u64::MAX;
        while woken < count {
            let mut batch = Batch::at_most(count - woken);
            self.locked(bucket, |list| {
                arrived = arrived.min(list.arrivals());
                list.take(address, arrived, &mut batch);
            });
            rule::fence(Rule::FenceBeforeWake);
            for thread in batch.threads() {
                self.scheduler.wake(*thread as usize);
                if !rule::holds(Rule::MarkBeforeWake)
                    && let Some(record) = self.threads.get(*thread as usize)
                {
                    record.mark();
                }
            }
            woken += batch.threads().len();
            if !batch.is_full() {
                break;
            }
        }
        woken
    }

    fn locked<R>(&self, bucket: &ParkingBucket, work: impl FnOnce(&List<'_>) -> R) -> R {
        bucket.locked::<S::Interrupts, R>(|| work(&List::new(bucket, self.threads)))
    }

    /// `None` only in a table without buckets.
    fn bucket(&self, address: usize) -> Option<&'m ParkingBucket> {
        // Fibonacci hashing: the high bits of the product depend on all bits of the address.
        let mixed = (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.buckets.get(((mixed * self.buckets.len() as u64) >> 32) as usize)
    }
}
