//! Freeing without waiting for readers.
//!
//! Tables, VMAs, anon groups and kernel areas are found in read sections, without a lock. So their
//! memory is freed a grace period after they were unlinked: when all read sections that could have
//! found them have ended ([`Platform::grace_period`]). No call waits for that. Items that a call
//! has unlinked are freed at once if no reader exists. Otherwise they wait here until a later call
//! finds the grace period over ([`queue`]).
//!
//! # Callers that may wait
//! A call that holds a lock only adds items ([`Memory::free_after_readers`]). A call from the
//! embedder that holds no lock any more tests whether items can be freed ([`Memory::outermost`]),
//! and frees at most [`FREED_AT_ONCE`] of them, so that no call pays for all others. Only two
//! callers wait for readers, both without locks and outside read sections:
//! - a caller that finds more waiting than [`Memory::deferred_limit`]: memory must not run out
//!   because of a slow reader;
//! - a caller that would fail for lack of memory ([`Memory::retry`]).
//!
//! With a lock held, the second would never return:
//! 1. CPU A holds an object's lock, and waits until CPU B leaves its read section.
//! 2. CPU B was preempted in that section by a thread that waits for the lock.
//!
//! # The bound
//! Waiting items are counted in frames; 8 records count as one. The limit is a 128th of the memory,
//! but at least 1 MiB and at most 64 MiB. One call may exceed it by the items that it has unlinked
//! itself, and frees those before it returns.
//!
//! # Memory that is freed without waiting
//! Pages that were mapped, objects, and the frames of a kernel area: every user of them in a read
//! section has a count or a lock of its own. They are freed after the flush.
//!
//! | file | idea |
//! |---|---|
//! | `queue` | the order: unlinked, grace period, freed; the model checker runs it too |
//! | `batch` | lists of waiting items, linked through the items themselves |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod batch;
#[cfg(all(test, loom))]
mod loom_model;
mod queue;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::Memory;
use crate::platform::{GracePeriod, Platform};
use crate::sync::Mutex;

pub(crate) use batch::{Batch, Chain, Linked, Tables};
use queue::{Machine, Queue};

/// The number of other calls' items that one call frees.
const FREED_AT_ONCE: u32 = 64;
/// The lowest limit of waiting frames: 1 MiB.
const LEAST_LIMIT: u64 = 256;
/// The highest limit of waiting frames: 64 MiB.
const MOST_LIMIT: u64 = 16_384;

/// Items that were unlinked and wait for readers, at one moment.
///
/// ```
/// use bindery::{Memory, Platform};
///
/// fn waiting_tables<P: Platform>(memory: &Memory<P>) -> u64 {
///     memory.deferred().tables
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deferred {
    /// Page tables, one frame each.
    pub tables: u64,
    /// Records of mappings, anon groups and kernel areas: at most 512 bytes each.
    pub records: u64,
    /// The total that has ever waited, in frames; 8 records count as one.
    pub ever: u64,
    /// The number of times that a call has waited for readers so far ([`Platform::synchronize`]).
    pub waits: u64,
}

/// The items of a memory that wait for readers.
pub(crate) struct Deferral<P: Platform> {
    queue: Mutex<P::SpinLock, Queue<Batch<P>>>,
    /// Weights: the total added, and the total freed. The difference waits, in the queue or with
    /// the thread that frees it.
    added: AtomicU64,
    freed: AtomicU64,
    /// Changes whenever items were freed.
    turn: AtomicU32,
    waits: AtomicU64,
    /// The weight beyond which a caller waits.
    limit: u64,
}

impl<P: Platform> Deferral<P> {
    pub(crate) fn new(total_frames: u64) -> Self {
        let frames = (total_frames / 128).clamp(LEAST_LIMIT, MOST_LIMIT);
        Self {
            queue: Mutex::new(Queue::new()),
            added: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            turn: AtomicU32::new(0),
            waits: AtomicU64::new(0),
            limit: batch::weight_of_frames(frames),
        }
    }

    /// The weight of the waiting items.
    #[inline]
    fn waiting(&self) -> u64 {
        // `freed` first, so that the difference is never below zero.
        let freed = self.freed.load(Ordering::Acquire);
        self.added.load(Ordering::Relaxed).wrapping_sub(freed)
    }

    /// Calls `f` with the waiting batches. For the auditor: no other thread runs.
    pub(crate) fn for_each_batch(&self, f: impl FnMut(&Batch<P>)) {
        self.queue.lock().batches().into_iter().for_each(f);
    }
}

impl<P: Platform> Machine for Memory<P> {
    type Batch = Batch<P>;

    fn is_empty(batch: &Batch<P>) -> bool {
        batch.is_empty()
    }

    fn append(&self, to: &mut Batch<P>, batch: Batch<P>) {
        to.append(&self.frames, batch);
    }

    #[inline]
    fn grace_period(&self) -> GracePeriod {
        self.platform().grace_period()
    }

    #[inline]
    fn is_over(&self, period: GracePeriod) -> bool {
        self.platform().is_over(period)
    }
}

impl<P: Platform> Memory<P> {
    /// Frees the items that the caller has unlinked, now or after all readers have left. Never
    /// waits; locks may be held, but the caller is in no read section.
    #[inline]
    pub(crate) fn free_after_readers(&self, mut batch: Batch<P>) {
        if batch.is_empty() {
            return;
        }
        if queue::no_reader_left(self) {
            batch.free(self, u32::MAX);
        } else {
            self.put_off(batch);
        }
    }

    /// Like [`Memory::free_after_readers`], for tables and for records of two types. If no reader
    /// is left, the usual case, makes no batch of them.
    ///
    /// # Safety
    /// 1. The records were unlinked from all lookups.
    #[inline]
    pub(crate) unsafe fn free_unlinked<A: Linked, B: Linked>(
        &self,
        tables: Tables,
        some: Chain<A>,
        others: Chain<B>,
    ) {
        if tables.is_empty() && some.is_empty() && others.is_empty() {
            return;
        }
        if queue::no_reader_left(self) {
            tables.free(self);
            // SAFETY: 1. the caller's obligation 1; no reader is left.
            unsafe {
                some.free(self);
                others.free(self);
            }
        } else {
            self.put_off(Batch::of(tables).with(some).with(others));
        }
    }

    #[cold]
    fn put_off(&self, batch: Batch<P>) {
        let weight = batch.weight();
        let mut queue = self.deferred.queue.lock();
        self.deferred.added.fetch_add(weight, Ordering::Relaxed);
        queue.push(self, batch);
    }

    /// Whether any item waits for readers.
    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        self.deferred.waiting() > 0
    }

    /// Frees some of the waiting items. The caller holds no lock.
    #[inline]
    pub(crate) fn free_some(&self) {
        if self.deferred.waiting() > 0 {
            self.free_ripe(FREED_AT_ONCE);
            if self.deferred.waiting() > self.deferred.limit {
                self.drain_deferred();
            }
        }
    }

    /// Frees at most `most` items whose readers have all left.
    #[cold]
    pub(crate) fn free_ripe(&self, most: u32) {
        let mut ripe = self.deferred.queue.lock().take_ripe(self);
        if ripe.is_empty() {
            return;
        }
        let weight = ripe.weight();
        ripe.free(self, most);
        let left = ripe.weight();
        if left > 0 {
            self.deferred.queue.lock().put_back(self, ripe);
        }
        self.note_freed(weight - left);
    }

    /// Waits for the readers of all items that were unlinked before the call, and frees them: page
    /// tables and records of the core. The core does so itself before it fails for lack of memory.
    /// An embedder calls it before it allocates memory for itself ([`Memory::allocate_frames`]), or
    /// to verify that nothing has leaked. [`Memory::deferred`] shows the waiting items.
    ///
    /// Context: may sleep, but not with a lock held for which a reader may wait. Complexity: linear
    /// in the waiting items.
    pub fn drain_deferred(&self) {
        let deferred = &self.deferred;
        if deferred.waiting() == 0 {
            return;
        }
        let target = deferred.added.load(Ordering::Relaxed);
        loop {
            let (mut ripe, mut unripe) = {
                let mut queue = deferred.queue.lock();
                (queue.take_ripe(self), queue.take_unripe(self))
            };
            let weight = ripe.weight() + unripe.weight();
            ripe.free(self, u32::MAX);
            if !unripe.is_empty() {
                deferred.waits.fetch_add(1, Ordering::Relaxed);
                self.platform().synchronize();
                unripe.free(self, u32::MAX);
            }
            self.note_freed(weight);
            // Another CPU may have taken waiting items and not have freed them yet.
            let turn = deferred.turn.load(Ordering::Acquire);
            if deferred.freed.load(Ordering::Acquire) >= target {
                return;
            }
            self.platform().park(&deferred.turn, turn);
        }
    }

    fn note_freed(&self, weight: u64) {
        if weight > 0 {
            // Release: a thread that reads it sees the memory free.
            self.deferred.freed.fetch_add(weight, Ordering::Release);
            self.deferred.turn.fetch_add(1, Ordering::Release);
            self.platform().unpark(&raw const self.deferred.turn);
        }
    }

    /// The items that wait for readers. Holds a lock for a constant number of steps.
    ///
    /// Context: spins.
    pub fn deferred(&self) -> Deferred {
        let waits = self.deferred.waits.load(Ordering::Relaxed);
        let ever = self.deferred.added.load(Ordering::Relaxed);
        let ever = batch::frames_of_weight(ever);
        let mut sums = Deferred { waits, ever, ..Deferred::default() };
        self.deferred.for_each_batch(|batch| {
            sums.tables += u64::from(batch.tables.count());
            sums.records += batch.records();
        });
        sums
    }

    /// The number of frames that may wait for readers before a call waits for the readers itself; 8
    /// records count as one frame.
    ///
    /// Context: any.
    pub fn deferred_limit(&self) -> u64 {
        batch::frames_of_weight(self.deferred.limit)
    }
}
