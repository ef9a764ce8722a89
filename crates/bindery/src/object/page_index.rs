//! The index of an object's pages, and its lock.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;
use crate::addr::PageRange;
use crate::error::NoMemory;
use crate::platform::Platform;
use crate::sync::rw_lock::RwLock;

use super::in_flight::{Ends, InFlight};
use super::unsaved::{Unsaved, UnsavedPages};
use crate::collections::page_tree::{IndexNode, NODES_OF_A_FOLIO, Nodes, PageIndex};

/// The index of an object's pages, the records of pages in flight to or from the pager, and the
/// lock of both. Waiters for the lock spin, because the index is read in read sections and with
/// tables locked.
///
/// The fields that a fault on shared memory writes come first.
#[repr(C)]
pub(crate) struct Pages {
    lock: RwLock,
    /// The number of pages in memory, readable without the lock.
    resident: AtomicU64,
    index: UnsafeCell<PageIndex>,
    in_flight: UnsafeCell<InFlight>,
    pub(super) ends: Ends,
    /// The number of pages in swap.
    swapped: AtomicU64,
    pub(super) unsaved: Unsaved,
}

impl Pages {
    /// The offset of the byte after the fields that a fault writes.
    #[cfg(test)]
    pub(super) const FAULTED_END: usize = core::mem::offset_of!(Self, in_flight);

    pub(super) const fn new(unsaved: Unsaved) -> Self {
        Self {
            lock: RwLock::new(),
            resident: AtomicU64::new(0),
            index: UnsafeCell::new(PageIndex::new()),
            in_flight: UnsafeCell::new(InFlight::new()),
            ends: Ends::new(),
            swapped: AtomicU64::new(0),
            unsaved,
        }
    }

    /// Reads the index, shared with other readers. `work` acquires no lock.
    pub(crate) fn look<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&PageIndex) -> R,
    ) -> R {
        self.lock.with_read_spinning(platform, || {
            // SAFETY: changes hold the lock for writing (`change`), so no change runs now.
            work(unsafe { &*self.index.get() })
        })
    }

    /// Changes the index, exclusively. `work` acquires only locks of the frames and slabs. It
    /// returns its result and the change of the number of pages in memory.
    pub(super) fn change<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        work: impl FnOnce(&mut PageIndex, &Nodes<'_, P>) -> (R, i64),
    ) -> R {
        let nodes = Self::nodes(memory);
        self.lock.with_write_spinning(memory.platform(), || {
            // SAFETY: all users of the index or the records hold the lock, which is held for
            // writing here.
            let (index, in_flight) =
                unsafe { (&mut *self.index.get(), &mut *self.in_flight.get()) };
            let before = (index.dirty_count(), index.failed_count());
            let (result, by) = work(index, &nodes);
            self.count_resident(by);
            if (index.dirty_count(), index.failed_count()) != before {
                self.unsaved.set(memory, UnsavedPages::of(index, in_flight));
            }
            result
        })
    }

    fn nodes<P: Platform>(memory: &Memory<P>) -> Nodes<'_, P> {
        // SAFETY: 1. the index belongs to one object, which belongs to this memory, and the slab,
        // frames and platform are those of the memory.
        unsafe { Nodes::new(memory.slab::<IndexNode>(), &memory.frames) }
    }

    /// Adds `by` pages to the count. The index lock is held for writing.
    #[inline]
    fn count_resident(&self, by: i64) {
        let resident = self.resident.load(Ordering::Relaxed);
        self.resident.store(resident.wrapping_add_signed(by), Ordering::Relaxed);
    }

    /// Like [`Pages::change`], but only if no record overlaps the pages.
    pub(super) fn change_at_rest<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        range: PageRange,
        work: impl FnOnce(&mut PageIndex, &Nodes<'_, P>) -> (R, i64),
    ) -> Option<R> {
        let nodes = Self::nodes(memory);
        self.alone(memory.platform(), |index, in_flight, _| {
            if in_flight.overlaps_any(range) {
                return None;
            }
            let (result, by) = work(index, &nodes);
            self.count_resident(by);
            Some(result)
        })
    }

    /// Accesses the index and the records exclusively; may change the records, and the flags of
    /// pages. `work` acquires no lock.
    pub(super) fn alone<P: Platform, R>(
        &self,
        platform: &P,
        work: impl FnOnce(&mut PageIndex, &mut InFlight, &Ends) -> R,
    ) -> R {
        self.lock.with_write_spinning(platform, || {
            // SAFETY: all users of the index or the records hold the lock, which is held for
            // writing here.
            let (index, in_flight) =
                unsafe { (&mut *self.index.get(), &mut *self.in_flight.get()) };
            work(index, in_flight, &self.ends)
        })
    }

    /// As [`Pages::alone`], for `work` that ends writes.
    pub(super) fn end_writes<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        work: impl FnOnce(&mut PageIndex, &mut InFlight, &Ends) -> R,
    ) -> R {
        self.alone(memory.platform(), |index, in_flight, ends| {
            let result = work(index, in_flight, ends);
            self.unsaved.set(memory, UnsavedPages::of(index, in_flight));
            result
        })
    }

    /// Like [`Pages::change`], for `work` that prepares the index for the pages of one folio and
    /// may lack memory for nodes. In that case, releases the index lock, waits for memory and
    /// retries once.
    pub(super) fn change_with_nodes<P: Platform, R>(
        &self,
        memory: &Memory<P>,
        mut work: impl FnMut(&mut PageIndex, &Nodes<'_, P>) -> (Result<R, NoMemory>, i64),
    ) -> Result<R, NoMemory> {
        if let Ok(done) = self.change(memory, &mut work) {
            return Ok(done);
        }
        memory.may_wait();
        let nodes = NODES_OF_A_FOLIO;
        if !memory.slab::<IndexNode>().stock(&memory.frames, nodes) {
            return Err(NoMemory);
        }
        self.change(memory, work)
    }

    /// The number of pages in memory.
    pub(crate) fn resident(&self) -> u64 {
        self.resident.load(Ordering::Relaxed)
    }

    /// Adds `by` to the count of pages in swap. The index lock is held for writing.
    pub(super) fn count_swapped(&self, by: i64) {
        let swapped = self.swapped.load(Ordering::Relaxed);
        self.swapped.store(swapped.wrapping_add_signed(by), Ordering::Relaxed);
    }

    /// The number of pages in swap.
    pub(crate) fn swapped(&self) -> u64 {
        if cfg!(not(feature = "swap")) {
            return 0;
        }
        self.swapped.load(Ordering::Relaxed)
    }
}
