//! A queue with its lock and the weight of its items.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::batch::Batch;
use super::queue::Queue;
use crate::Memory;
use crate::platform::Platform;
use crate::sync::Mutex;

/// Items that wait for a grace period, from calls on one CPU or on all CPUs without their own
/// queue.
pub(crate) struct LockedQueue<P: Platform> {
    queue: Mutex<P::SpinLock, Queue<Batch<P>>>,
    /// The weight of the items in the queue and of those that a thread is freeing. Written under
    /// the lock.
    waiting: AtomicU64,
    /// The weight of all items ever added. Written under the lock.
    ever: AtomicU64,
    /// Changes when a drain that waits for the queue must retry.
    turn: AtomicU32,
}

impl<P: Platform> LockedQueue<P> {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue::new()),
            waiting: AtomicU64::new(0),
            ever: AtomicU64::new(0),
            turn: AtomicU32::new(0),
        }
    }

    /// The weight of the waiting items.
    #[inline]
    pub(super) fn waiting(&self) -> u64 {
        // Acquire: a thread that reads a lower weight sees the freed memory.
        self.waiting.load(Ordering::Acquire)
    }

    /// The weight of all items that were ever added.
    pub(super) fn ever(&self) -> u64 {
        self.ever.load(Ordering::Relaxed)
    }

    /// Adds items that were unlinked before the call.
    pub(super) fn add(&self, memory: &Memory<P>, batch: Batch<P>) {
        let weight = batch.weight();
        let mut queue = self.queue.lock();
        self.waiting.store(self.waiting() + weight, Ordering::Release);
        self.ever.store(self.ever() + weight, Ordering::Relaxed);
        queue.push(memory, batch);
    }

    /// Frees up to `most` items whose grace period is over.
    pub(super) fn free_ripe(&self, memory: &Memory<P>, most: u32) {
        let ripe = self.queue.lock().take_ripe(memory);
        if let Some(ripe) = ripe {
            self.free(memory, ripe, most);
        }
    }

    /// [`Queue::close_for`], if anything waits.
    pub(super) fn close_for(&self, memory: &Memory<P>, drain: u64) -> bool {
        self.waiting() > 0 && self.queue.lock().close_for(memory, drain)
    }

    /// Frees all items that were added before the drain with this number began. The drain has
    /// waited for the readers.
    pub(super) fn free_drained(&self, memory: &Memory<P>, drain: u64) {
        while self.waiting() > 0 {
            let turn = self.turn.load(Ordering::Acquire);
            let taken = self.queue.lock().take_drained(memory, drain);
            let Some(items) = taken else {
                memory.platform().park(&self.turn, turn);
                continue;
            };
            if !items.is_empty() {
                self.free(memory, items, u32::MAX);
            }
            return;
        }
    }

    /// Frees up to `most` of the items that were taken from the queue.
    fn free(&self, memory: &Memory<P>, mut items: Batch<P>, most: u32) {
        let weight = items.weight();
        items.free(memory, most);
        let freed = weight - items.weight();
        let is_awaited = {
            let mut queue = self.queue.lock();
            self.waiting.store(self.waiting() - freed, Ordering::Release);
            queue.end_free(memory, items)
        };
        if is_awaited {
            self.wake(memory);
        }
    }

    /// Moves all items to another queue, in which they get their own grace period. Items that a
    /// thread is currently freeing remain with that thread. Calls of this function do not overlap.
    ///
    /// Both locks are held at once, so that no drain passes both queues during the move; `moved` is
    /// called before the weights change.
    pub(super) fn hand_over(&self, memory: &Memory<P>, to: &Self, moved: impl FnOnce()) {
        {
            let (mut mine, mut others) = (self.queue.lock(), to.queue.lock());
            let items = mine.take_all(memory);
            let weight = items.weight();
            moved();
            to.waiting.store(to.waiting() + weight, Ordering::Release);
            to.ever.store(to.ever() + weight, Ordering::Relaxed);
            self.waiting.store(self.waiting() - weight, Ordering::Release);
            self.ever.store(self.ever() - weight, Ordering::Relaxed);
            others.push(memory, items);
        }
        self.wake(memory);
    }

    fn wake(&self, memory: &Memory<P>) {
        self.turn.fetch_add(1, Ordering::Release);
        memory.platform().unpark(&raw const self.turn);
    }

    /// Calls `f` with the waiting batches, under the lock.
    pub(super) fn for_each_batch(&self, f: impl FnMut(&Batch<P>)) {
        self.queue.lock().batches().into_iter().for_each(f);
    }
}
