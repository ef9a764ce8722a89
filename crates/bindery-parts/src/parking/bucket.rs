//! [`ParkingBucket`]: the waiting threads of some words, in the order in which they parked.
//!
//! The list is linked by the threads' numbers, in their records. It has a spin lock; all functions
//! of [`List`] are called with the lock held.

use bindery::sync::Interrupts;

use crate::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, constructor};
use crate::rule::{self, Rule};

/// No thread, in a link.
const NONE: u32 = u32::MAX;

const FREE: u32 = 0;
const LOCKED: u32 = 1;

const WAITING: u32 = 0;
const WOKEN: u32 = 1;

/// The number of threads that a call wakes for each time that it locks the bucket.
#[cfg(not(all(test, loom)))]
const BATCH: usize = 16;
#[cfg(all(test, loom))]
const BATCH: usize = 1;

/// The memory of one thread in a [`ParkingTable`](super::ParkingTable), half a cache line.
///
/// ```
/// use bindery_parts::ParkedThread;
///
/// static THREADS: [ParkedThread; 4] = [const { ParkedThread::new() }; 4];
/// assert_eq!(size_of_val(&THREADS), 4 * 32);
/// ```
#[repr(align(32))]
#[derive(Debug)]
pub struct ParkedThread {
    /// The address of the word.
    address: AtomicUsize,
    /// The number of the arrival in the bucket.
    arrival: AtomicU64,
    /// The thread that arrived next in the bucket; none while the record is in no list.
    next: AtomicU32,
    /// Whether another thread has woken this one.
    mark: AtomicU32,
}

impl ParkedThread {
    constructor! {
        /// A thread that is not parked.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self {
                address: AtomicUsize::new(0),
                arrival: AtomicU64::new(0),
                next: AtomicU32::new(NONE),
                mark: AtomicU32::new(WOKEN),
            }
        }
    }

    /// Whether another thread has woken this one, after all earlier stores of the caller.
    pub(super) fn is_woken(&self) -> bool {
        rule::fence(Rule::FenceBeforeMark);
        self.mark.load(rule::order(Rule::AcquireMark, Ordering::Acquire)) == WOKEN
    }

    /// The address of the word on which the caller, the record's thread, parked last.
    pub(super) fn address(&self) -> usize {
        self.address.load(Ordering::Relaxed)
    }

    /// From here on, the record belongs to its thread again.
    pub(super) fn mark(&self) {
        self.mark.store(WOKEN, rule::order(Rule::ReleaseMark, Ordering::Release));
    }
}

impl Default for ParkedThread {
    fn default() -> Self {
        Self::new()
    }
}

/// The threads parked on the words of some addresses in a
/// [`ParkingTable`](super::ParkingTable), one cache line.
///
/// ```
/// use bindery_parts::ParkingBucket;
///
/// static BUCKETS: [ParkingBucket; 4] = [const { ParkingBucket::new() }; 4];
/// assert_eq!(size_of_val(&BUCKETS), 4 * 64);
/// ```
#[repr(align(64))]
#[derive(Debug)]
pub struct ParkingBucket {
    lock: AtomicU32,
    /// The length of the list, or one more while a thread reads its word.
    waiting: AtomicU32,
    first: AtomicU32,
    last: AtomicU32,
    /// The number of threads that have parked so far.
    arrivals: AtomicU64,
}

impl ParkingBucket {
    constructor! {
        /// No thread is parked.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self {
                lock: AtomicU32::new(FREE),
                waiting: AtomicU32::new(0),
                first: AtomicU32::new(NONE),
                last: AtomicU32::new(NONE),
                arrivals: AtomicU64::new(0),
            }
        }
    }

    pub(super) fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Does the work with the bucket locked, and with interrupts off. Waits with interrupts on, if
    /// they were on.
    pub(super) fn locked<I: Interrupts, R>(&self, work: impl FnOnce() -> R) -> R {
        loop {
            let interrupts = I::disable();
            if self.try_lock() {
                let result = work();
                self.lock.store(FREE, rule::order(Rule::ReleaseBucket, Ordering::Release));
                I::restore(interrupts);
                return result;
            }
            I::restore(interrupts);
            // Plain loads keep the line shared while another CPU holds the lock.
            while self.lock.load(Ordering::Relaxed) != FREE {
                I::relax();
            }
        }
    }

    fn try_lock(&self) -> bool {
        let order = rule::order(Rule::AcquireBucket, Ordering::Acquire);
        self.lock.compare_exchange(FREE, LOCKED, order, Ordering::Relaxed).is_ok()
    }
}

impl Default for ParkingBucket {
    fn default() -> Self {
        Self::new()
    }
}

/// The threads that one pass over a list has woken.
pub(super) struct Batch {
    threads: [u32; BATCH],
    length: usize,
    limit: usize,
}

impl Batch {
    pub(super) fn at_most(limit: usize) -> Self {
        Self { threads: [NONE; BATCH], length: 0, limit: limit.min(BATCH) }
    }

    pub(super) fn threads(&self) -> &[u32] {
        &self.threads[..self.length]
    }

    pub(super) fn is_full(&self) -> bool {
        self.length >= self.limit
    }

    fn push(&mut self, thread: u32) {
        self.threads[self.length] = thread;
        self.length += 1;
    }
}

/// The list of a bucket that the caller has locked.
pub(super) struct List<'a> {
    bucket: &'a ParkingBucket,
    threads: &'a [ParkedThread],
}

impl<'a> List<'a> {
    pub(super) fn new(bucket: &'a ParkingBucket, threads: &'a [ParkedThread]) -> Self {
        Self { bucket, threads }
    }

    /// The number of threads that have parked so far.
    pub(super) fn arrivals(&self) -> u64 {
        self.bucket.arrivals.load(Ordering::Relaxed)
    }

    /// Adds a thread at the end if its word is unchanged. Returns whether it is.
    pub(super) fn push_if(
        &self,
        thread: u32,
        address: usize,
        is_unchanged: impl FnOnce() -> bool,
    ) -> bool {
        self.count(1);
        rule::fence(Rule::FenceBeforeWord);
        let Some(record) = self.record(thread).filter(|_| is_unchanged()) else {
            self.count(-1);
            return false;
        };
        let arrivals = self.arrivals();
        self.bucket.arrivals.store(arrivals + 1, Ordering::Relaxed);
        record.address.store(address, Ordering::Relaxed);
        record.arrival.store(arrivals, Ordering::Relaxed);
        record.mark.store(WAITING, Ordering::Relaxed);
        self.link(self.bucket.last.load(Ordering::Relaxed)).store(thread, Ordering::Relaxed);
        self.bucket.last.store(thread, Ordering::Relaxed);
        true
    }

    /// Removes and marks the threads of the address that arrived before a number, in their order,
    /// until the batch is full.
    pub(super) fn take(&self, address: usize, before: u64, batch: &mut Batch) {
        let mut previous = NONE;
        let mut thread = self.bucket.first.load(Ordering::Relaxed);
        while let Some(record) = self.record(thread).filter(|_| !batch.is_full()) {
            if record.arrival.load(Ordering::Relaxed) >= before {
                break;
            }
            if record.address() == address {
                if !rule::holds(Rule::UnlinkBeforeMark) {
                    record.mark();
                }
                let next = self.unlink(previous, thread, record);
                if rule::holds(Rule::MarkBeforeWake) {
                    record.mark();
                }
                batch.push(thread);
                thread = next;
            } else {
                previous = thread;
                thread = record.next.load(Ordering::Relaxed);
            }
        }
    }

    /// Removes a thread. Returns `false` if it was not in the list, because another thread has
    /// woken it.
    pub(super) fn leave(&self, leaving: u32) -> bool {
        let mut previous = NONE;
        let mut thread = self.bucket.first.load(Ordering::Relaxed);
        while let Some(record) = self.record(thread) {
            if thread == leaving {
                self.unlink(previous, thread, record);
                return true;
            }
            previous = thread;
            thread = record.next.load(Ordering::Relaxed);
        }
        false
    }

    /// Returns the next thread.
    fn unlink(&self, previous: u32, thread: u32, record: &ParkedThread) -> u32 {
        let next = record.next.load(Ordering::Relaxed);
        record.next.store(NONE, Ordering::Relaxed);
        self.link(previous).store(next, Ordering::Relaxed);
        if self.bucket.last.load(Ordering::Relaxed) == thread {
            self.bucket.last.store(previous, Ordering::Relaxed);
        }
        self.count(-1);
        next
    }

    /// The link to the thread after this one; without one, that to the first.
    fn link(&self, thread: u32) -> &AtomicU32 {
        self.record(thread).map_or(&self.bucket.first, |record| &record.next)
    }

    fn record(&self, thread: u32) -> Option<&'a ParkedThread> {
        self.threads.get(thread as usize)
    }

    fn count(&self, change: i32) {
        let waiting = self.bucket.waiting().wrapping_add_signed(change);
        self.bucket.waiting.store(waiting, Ordering::Relaxed);
    }
}
