//! Swap-ins for a task that is polled instead of a waiting thread.
//!
//! No thread waits for such a read ([`super::early_read`]), so the task may be dropped at any time.
//! Each poll finishes the completed requests, as a waiting thread does ([`super::writeback`]);
//! afterwards the folio is in the swap cache and unlocked, or has left it.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::AtomicU32;

use super::area::SlotRun;
use super::early_read::{Begun, Cause};
use super::find_cached;
use super::take_over::take_over;
use crate::Memory;
use crate::addr::Order;
use crate::folio::{FolioRef, HeldFolio};
use crate::platform::Platform;

/// A wait for a slot's page, or for a free request of its area.
#[derive(Debug)]
pub(crate) struct PolledSlot {
    area: u8,
    /// The slot; `None` for a request.
    slot: Option<u64>,
    stage: Stage,
    /// Whether the wait initially had a read to start.
    is_for_read: bool,
    /// Whether a poll has started the read.
    has_read: bool,
    /// Whether the wait is counted among those that wait for devices.
    has_entered: bool,
}

/// The part of the wait that is ahead, besides the check of the cache.
#[derive(Debug)]
enum Stage {
    /// The read has yet to be started.
    Read(SlotRun, Order),
    /// A thread has the lock of the cached folio, which this reference keeps.
    Locked(HeldFolio),
    Check,
}

/// The result of a poll.
pub(crate) enum SlotPoll<'w, 'm, P: Platform> {
    /// The wait is over. The reference holds the page's folio in the cache.
    Ready(Option<FolioRef<'m, P>>),
    /// No progress is possible until the word has another value.
    Pending(&'w AtomicU32, u32),
    /// Only a thread can continue.
    NeedsThread,
}

impl PolledSlot {
    /// A wait for a folio in the swap cache that a thread or a device has locked.
    pub(crate) fn cached(area: u8, slot: u64) -> Self {
        let (slot, stage) = (Some(slot), Stage::Check);
        Self { area, slot, stage, is_for_read: false, has_read: false, has_entered: false }
    }

    /// A wait for a read of the slots, which the first poll starts.
    pub(crate) fn read(slots: SlotRun, order: Order, wanted: u64) -> Self {
        let stage = Stage::Read(slots, order);
        Self { stage, is_for_read: true, ..Self::cached(slots.area, wanted) }
    }

    /// A wait for a free request of the area.
    pub(crate) fn request(area: u8) -> Self {
        Self { slot: None, ..Self::cached(area, 0) }
    }

    /// Whether the page is only in swap, or was when the wait was created.
    pub(crate) fn is_for_read(&self) -> bool {
        self.is_for_read
    }

    /// Whether a poll has started a read.
    pub(crate) fn has_read(&self) -> bool {
        self.has_read
    }

    /// Continues the wait. Called without locks.
    pub(crate) fn poll<'w, 'm: 'w, P: Platform>(
        &mut self,
        memory: &'m Memory<P>,
    ) -> SlotPoll<'w, 'm, P> {
        let completions = &memory.swap.completions;
        if !core::mem::replace(&mut self.has_entered, true) {
            completions.enter();
        }
        let _kept = self.take_locked(memory);
        loop {
            // Read before the check of the requests.
            let (word, expected) = completions.word();
            memory.finish_swap_writes();
            let Some(slot) = self.slot else {
                return match memory.swap.has_free_request(self.area) {
                    true => SlotPoll::Ready(None),
                    false => SlotPoll::Pending(word, expected),
                };
            };
            if let Some(cached) = find_cached(memory, self.area, slot) {
                match look_at(memory, &cached) {
                    Lock::Free => return SlotPoll::Ready(Some(cached)),
                    Lock::Device => return SlotPoll::Pending(word, expected),
                    Lock::Thread => {}
                }
                // Otherwise the lock has changed hands.
                if let Some((word, expected)) = cached.parked_on_lock() {
                    self.stage = Stage::Locked(cached.into_held());
                    return SlotPoll::Pending(word, expected);
                }
                continue;
            }
            match self.stage {
                Stage::Read(slots, order) => match slots.begin_read(memory, order, Cause::Advice) {
                    Begun::Yes => (self.stage, self.has_read) = (Stage::Check, true),
                    // Another thread is reading one of the pages, or has mapped them.
                    Begun::Taken => self.stage = Stage::Check,
                    Begun::NoRoom if memory.swap.has_free_request(self.area) => {
                        return SlotPoll::NeedsThread;
                    }
                    Begun::NoRoom => return SlotPoll::Pending(word, expected),
                },
                // The device has failed, or the page has left the cache again; a thread finds out
                // which.
                Stage::Check | Stage::Locked(_) if self.has_read => return SlotPoll::NeedsThread,
                Stage::Check | Stage::Locked(_) => return SlotPoll::Ready(None),
            }
        }
    }

    /// The guard of the reference to a folio whose lock a thread has had.
    fn take_locked<'m, P: Platform>(&mut self, memory: &'m Memory<P>) -> Option<FolioRef<'m, P>> {
        match core::mem::replace(&mut self.stage, Stage::Check) {
            Stage::Locked(held) => Some(held.guard(&memory.frames)),
            stage @ (Stage::Read(..) | Stage::Check) => {
                self.stage = stage;
                None
            }
        }
    }

    /// Ends the wait. A read in progress continues.
    pub(crate) fn end<P: Platform>(&mut self, memory: &Memory<P>) {
        drop(self.take_locked(memory));
        if core::mem::replace(&mut self.has_entered, false) {
            memory.swap.completions.leave();
        }
    }
}

/// The holder of a folio's lock.
enum Lock {
    Free,
    /// A request of a device, whose end changes the word of the waiting threads.
    Device,
    Thread,
}

/// The number of [`Platform::relax`] rounds for which a poll waits for a thread; longer than a
/// thread takes to finish a request.
const PATIENCE: u32 = 128;

/// The state of the folio's lock. If the device allows it, a write is taken over.
fn look_at<P: Platform>(memory: &Memory<P>, held: &FolioRef<'_, P>) -> Lock {
    let handle = memory.frames.folio(**held);
    for _ in 0..PATIENCE {
        // SAFETY: 1. the reference is `held`, which outlives the lock.
        let lock = held.try_lock().or_else(|| unsafe { take_over(memory, **held) });
        if lock.is_some() {
            return Lock::Free;
        }
        if handle.is_under_writeback() {
            return Lock::Device;
        }
        memory.platform().relax();
    }
    Lock::Thread
}
