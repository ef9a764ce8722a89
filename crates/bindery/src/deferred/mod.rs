//! Deferred frees, which do not wait for readers.
//!
//! Tables, VMAs, anon groups and kernel areas are found in read sections, without a lock. So their
//! memory is freed a grace period after their unlinking, when all read sections that could have
//! found them have ended ([`Platform::grace_period`]). No call waits for the grace period. Items
//! that a call has unlinked are freed at once if no reader exists. Otherwise they wait here until a
//! later call finds the grace period over ([`queue`]).
//!
//! # A queue for each CPU
//! Each online CPU has its own queue, on its own cache lines. A call adds to the queue of its CPU
//! and frees only from that queue. CPUs that were never online share one queue. A thread that
//! migrates to another CPU may use the queue of its previous CPU, so each queue has a lock.
//!
//! If only the caller's CPU is online, items are freed at once, because no other CPU can be in a
//! read section (`Cpus::no_other_reads`). When a CPU is taken offline, another CPU takes over its
//! items, with a new grace period ([`hand_over`]). Drains ([`queue::Queue`]) and [`Memory::trim`]
//! visit all queues.
//!
//! # Callers that may wait
//! A call that holds a lock only adds items ([`Batch::free_after_readers`]). A call from the
//! embedder that has released all locks tests whether items can be freed ([`Memory::outermost`]),
//! and frees at most [`FREED_AT_ONCE`] of them, so no call bears the cost of all others. Only two
//! callers wait for readers, both without locks and outside read sections:
//! - a caller that finds more waiting items than [`Memory::deferred_limit`], because a slow reader
//!   must not exhaust memory;
//! - a caller that would fail for lack of memory ([`Memory::retry`]).
//!
//! If the second kind of caller held a lock, it could deadlock:
//! 1. CPU A holds an object's lock and waits until CPU B leaves its read section.
//! 2. CPU B was preempted in that section by a thread that waits for the lock.
//!
//! # The bound
//! Waiting items are counted in frames; 8 records count as one. The limit is a 128th of the memory,
//! but at least 1 MiB and at most 64 MiB. One call may exceed the limit by the items that it has
//! unlinked itself, which it frees before it returns.
//!
//! No call adds up all queues while few items wait. The *share* of a queue is half of the limit,
//! divided by the number of queues. A call that leaves more than this share in its queue adds up
//! all queues, and drains them if the sum exceeds half of the limit. So the limit holds for the
//! sum:
//! 1. Queues within their shares hold at most half of the limit together.
//! 2. The other queues have not grown since the last of their calls found a sum of at most half of
//!    the limit.
//!
//! When a CPU is brought online for the first time, all shares shrink. Until the next calls on the
//! other CPUs, the sum may exceed the limit by half.
//!
//! # Memory that is freed without waiting
//! Pages that were mapped, objects, and the frames of a kernel area are freed after the flush,
//! because every user of them in a read section has its own count or lock.
//!
//! | file | idea |
//! |---|---|
//! | `queue` | the order: unlinked, grace period, freed; the model checker runs it too |
//! | `locked` | a queue behind its lock, with the weight that waits in it |
//! | `batch` | lists of waiting items, linked through the items themselves |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod batch;
mod locked;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
mod queue;

use core::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::Memory;
use crate::memory::{CpuRecord, Cpus};
use crate::platform::{GracePeriod, Platform};

pub(crate) use batch::{Batch, Chain, DetachedTables, Linked};
pub(crate) use locked::LockedQueue;
use queue::QueueMachine;

/// The maximum number of other calls' items that one call frees.
const FREED_AT_ONCE: u32 = 64;
/// The minimum of the limit of waiting frames: 1 MiB.
const LEAST_LIMIT: u64 = 256;
/// The maximum of the limit of waiting frames: 64 MiB.
const MOST_LIMIT: u64 = 16_384;

/// Snapshot of the unlinked items that wait for a grace period.
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
    /// The total number of items that have ever waited, in frames; 8 records count as one.
    pub ever: u64,
    /// The number of times that a call has waited for readers so far ([`Platform::synchronize`]).
    pub waits: u64,
}

/// The items of a memory that wait for a grace period.
pub(crate) struct Deferral<P: Platform> {
    /// The queue of all calls on CPUs that were never online.
    shared: CachePadded<LockedQueue<P>>,
    /// The number of drains that have begun.
    drains: AtomicU64,
    /// The number of times that items were handed over from one queue to another.
    hand_overs: AtomicU64,
    waits: AtomicU64,
    /// The weight beyond which a caller waits for readers.
    limit: u64,
    /// The weight in one queue up to which callers ignore the other queues.
    share: AtomicU64,
}

impl<P: Platform> Deferral<P> {
    pub(crate) fn new(total_frames: u64) -> Self {
        let frames = (total_frames / 128).clamp(LEAST_LIMIT, MOST_LIMIT);
        Self {
            shared: CachePadded::new(LockedQueue::new()),
            drains: AtomicU64::new(0),
            hand_overs: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            limit: batch::weight_of_frames(frames),
            share: AtomicU64::new(batch::weight_of_frames(frames)),
        }
    }
}

impl<P: Platform> QueueMachine for Memory<P> {
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
    /// Waits for the readers of all items that were unlinked before the call, and frees the items:
    /// page tables and records of the core. The core itself does this before it fails for lack of
    /// memory. An embedder calls this function before it allocates memory for itself
    /// ([`Memory::allocate_frames`]), or to verify that nothing has leaked. [`Memory::deferred`]
    /// reports the waiting items.
    ///
    /// Context: may sleep, but not with a lock held for which a reader may wait. Complexity: linear
    /// in the waiting items.
    pub fn drain_deferred(&self) {
        drain(self);
    }

    /// The items that wait for a grace period. Holds a lock for a constant number of steps.
    ///
    /// Context: spins.
    pub fn deferred(&self) -> Deferred {
        self.deferred.sums(&self.cpus)
    }

    /// The number of frames that may wait for readers before a call waits for the readers itself; 8
    /// records count as one frame.
    ///
    /// Context: any.
    pub fn deferred_limit(&self) -> u64 {
        self.deferred.limit()
    }
}

impl<P: Platform> Deferral<P> {
    /// All queues, in a fixed order.
    fn queues<'a>(&'a self, cpus: &'a Cpus<P>) -> impl Iterator<Item = &'a LockedQueue<P>> {
        let own = cpus.records().map(|record| &*record.deferred);
        core::iter::once(&*self.shared).chain(own)
    }

    /// Divides half of the limit among the queues. Called when a CPU has received its queue.
    pub(crate) fn share_limit(&self, cpus: &Cpus<P>) {
        let share = self.limit / 2 / self.queues(cpus).count() as u64;
        self.share.store(share, Ordering::Relaxed);
    }

    /// The limit of the waiting items, in frames.
    fn limit(&self) -> u64 {
        batch::frames_of_weight(self.limit)
    }

    /// Whether callers must wait for readers: the items of all queues weigh too much.
    fn is_above_limit(&self, cpus: &Cpus<P>) -> bool {
        let all: u64 = self.queues(cpus).map(LockedQueue::waiting).sum();
        // If CPUs have queues, those within their shares may hold the other half.
        let has_queues = cpus.records().next().is_some();
        all > if has_queues { self.limit / 2 } else { self.limit }
    }

    /// Calls `f` with the waiting batches.
    pub(crate) fn for_each_batch(&self, cpus: &Cpus<P>, mut f: impl FnMut(&Batch<P>)) {
        self.queues(cpus).for_each(|queue| queue.for_each_batch(&mut f));
    }

    fn sums(&self, cpus: &Cpus<P>) -> Deferred {
        let waits = self.waits.load(Ordering::Relaxed);
        let ever = batch::frames_of_weight(self.queues(cpus).map(LockedQueue::ever).sum());
        let mut sums = Deferred { waits, ever, ..Deferred::default() };
        self.for_each_batch(cpus, |batch| {
            sums.tables += u64::from(batch.tables.count());
            sums.records += batch.records();
        });
        sums
    }
}

impl<P: Platform> Batch<P> {
    /// Frees the items that the caller has unlinked, at once or after a grace period. Never waits;
    /// the caller may hold locks but is in no read section.
    #[inline]
    pub(crate) fn free_after_readers(mut self, memory: &Memory<P>) {
        if self.is_empty() {
            return;
        }
        if no_reader_left(memory) {
            self.free(memory, u32::MAX);
        } else {
            put_off(memory, self);
        }
    }
}

/// Like [`Batch::free_after_readers`], for tables and for records of two types. In the usual case,
/// when no reader is left, creates no batch.
///
/// # Safety
/// 1. The records were unlinked from all lookups.
#[inline]
pub(crate) unsafe fn free_unlinked<P: Platform, A: Linked, B: Linked>(
    memory: &Memory<P>,
    tables: DetachedTables,
    some: Chain<A>,
    others: Chain<B>,
) {
    if tables.is_empty() && some.is_empty() && others.is_empty() {
        return;
    }
    if no_reader_left(memory) {
        tables.free(memory);
        // SAFETY: 1. the caller's obligation 1; no reader is left.
        unsafe {
            some.free(memory);
            others.free(memory);
        }
    } else {
        put_off(memory, Batch::of(tables).with(some).with(others));
    }
}

/// Whether every read section that could have found the items just unlinked by the caller has
/// ended.
#[inline]
fn no_reader_left<P: Platform>(memory: &Memory<P>) -> bool {
    queue::no_reader_left(memory) || memory.cpus.no_other_reads(memory.platform())
}

#[cold]
fn put_off<P: Platform>(memory: &Memory<P>, batch: Batch<P>) {
    own_queue(memory).add(memory, batch);
}

/// The queue of the running CPU.
#[inline]
fn own_queue<P: Platform>(memory: &Memory<P>) -> &LockedQueue<P> {
    match memory.cpus.own(memory.platform()) {
        Some(record) => &record.deferred,
        None => &memory.deferred.shared,
    }
}

/// Whether any item waits for a grace period.
pub(crate) fn has_items<P: Platform>(Memory { deferred, cpus, .. }: &Memory<P>) -> bool {
    deferred.queues(cpus).any(|queue| queue.waiting() > 0)
}

/// Frees some of the waiting items. The caller holds no lock.
#[inline]
pub(crate) fn free_some<P: Platform>(memory: &Memory<P>) {
    let queue = own_queue(memory);
    if queue.waiting() > 0 {
        free_some_of(memory, queue);
    }
}

#[cold]
fn free_some_of<P: Platform>(memory: &Memory<P>, queue: &LockedQueue<P>) {
    let Memory { deferred, cpus, .. } = memory;
    queue.free_ripe(memory, FREED_AT_ONCE);
    if queue.waiting() > deferred.share.load(Ordering::Relaxed) && deferred.is_above_limit(cpus) {
        drain(memory);
    }
}

/// Frees all items whose grace period is over.
pub(crate) fn free_all_ripe<P: Platform>(memory: &Memory<P>) {
    memory.deferred.queues(&memory.cpus).for_each(|queue| queue.free_ripe(memory, u32::MAX));
}

/// Moves the items that calls deferred before any CPU was online to the queue of a CPU that is
/// brought online: from now on no call uses the shared queue. Called with the lock for all changes
/// of CPUs held.
pub(crate) fn adopt<P: Platform>(memory: &Memory<P>, record: &CpuRecord<P>) {
    hand_over_queue(memory, &memory.deferred.shared, &record.deferred);
}

/// Moves the items of a CPU that is taken offline to a CPU that remains online, or to the shared
/// queue. Their grace period starts anew. Called with the lock for all changes of CPUs held.
pub(crate) fn hand_over<P: Platform>(
    memory: &Memory<P>,
    from: &CpuRecord<P>,
    to: Option<&CpuRecord<P>>,
) {
    let to = to.map_or(&memory.deferred.shared, |to| &to.deferred);
    hand_over_queue(memory, &from.deferred, to);
}

fn hand_over_queue<P: Platform>(memory: &Memory<P>, from: &LockedQueue<P>, to: &LockedQueue<P>) {
    if from.waiting() > 0 {
        from.hand_over(memory, to, || {
            memory.deferred.hand_overs.fetch_add(1, Ordering::Release);
        });
    }
}

/// Waits for the readers of all items that were unlinked before the call, and frees the items.
fn drain<P: Platform>(memory: &Memory<P>) {
    let hand_overs = &memory.deferred.hand_overs;
    loop {
        let before = hand_overs.load(Ordering::Acquire);
        if has_items(memory) {
            drain_queues(memory);
        }
        // Items may have been handed over to a queue that was already drained.
        if hand_overs.load(Ordering::Acquire) == before {
            return;
        }
    }
}

fn drain_queues<P: Platform>(memory: &Memory<P>) {
    let Memory { deferred, cpus, .. } = memory;
    let number = deferred.drains.fetch_add(1, Ordering::Relaxed) + 1;
    let mut must_wait = false;
    deferred.queues(cpus).for_each(|queue| must_wait |= queue.close_for(memory, number));
    if must_wait {
        deferred.waits.fetch_add(1, Ordering::Relaxed);
        memory.platform().synchronize();
    }
    deferred.queues(cpus).for_each(|queue| queue.free_drained(memory, number));
}
