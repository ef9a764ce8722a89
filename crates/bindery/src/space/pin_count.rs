//! Counts and limits the pages that an address space has pinned.
//!
//! A folio has room for 2^15 pins. Without a limit, a process could pin one page of shared memory
//! so often that other processes cannot pin it. Two limits prevent that:
//!
//! 1. *Of the address space*: [`super::Limits::pinned`], as Linux counts pinned pages against
//!    `RLIMIT_MEMLOCK` (`pinned_vm`, `account_locked_vm`). A pin covers at least one page, so the
//!    default limit of 8 MiB per process allows 2,048 pins of one folio, a sixteenth of its room.
//! 2. *Of the folio*: from 2^14 pins on, only address spaces with at most 1,024 pinned pages in all
//!    may pin it. The limit excludes address spaces whose first limit is large or absent. At least
//!    sixteen address spaces that pin little therefore find room in the upper half, even if the
//!    lower half is full.
//!
//! ```text
//! pins of a folio   0 ................ 16,384 ................ 32,768
//!                   | any address space  | few pinned pages      | none
//! ```
//!
//! The drawback is that an address space with many pins cannot pin a folio whose lower half is
//! full. Counting per owner and folio would avoid that, but needs a record per pair. Many address
//! spaces together can still exhaust a folio. The embedder limits the number of processes per user
//! (`RLIMIT_NPROC`).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::Memory;
use crate::addr::PAGE_SIZE;
use crate::error::{Failure, FaultError, NoMemory, PinError};
use crate::folio::PinRoom;
use crate::memory::{Record, RecordKind};
use crate::platform::Platform;

use super::AddressSpace;
use super::limits::Locking;

/// The maximum number of pinned pages at which an address space may still use the upper half of a
/// folio's room.
const FEW: u64 = 1024;

/// Set until the address space is dropped.
const SPACE: u64 = 1 << 63;

/// The number of pages that one address space has pinned. Freed by the last of its owners, which
/// are the address space and its pins.
#[derive(Debug)]
pub(crate) struct PinCount(AtomicU64);

impl PinCount {
    fn pages(&self) -> u64 {
        self.0.load(Ordering::Relaxed) & !SPACE
    }

    /// Adds pages, unless the sum would exceed `limit`. Returns the sum.
    fn add(&self, pages: u64, limit: u64) -> Option<u64> {
        let fits = |word: u64| Some(word + pages).filter(|sum| sum & !SPACE <= limit);
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some((before & !SPACE) + pages)
    }

    /// Subtracts a share of the count. The last owner frees the count.
    ///
    /// # Safety
    /// 1. The count is alive, in `memory`, and the caller owns the share and gives it up.
    unsafe fn take<P: Platform>(count: NonNull<Self>, memory: &Memory<P>, taken: u64) {
        // Release, and acquire for the last owner: all accesses of other owners happen before the
        // free.
        // SAFETY: obligation 1.
        if unsafe { count.as_ref() }.0.fetch_sub(taken, Ordering::AcqRel) == taken {
            // SAFETY: the count was allocated from this slab (`PinCounts::get_or_allocate`). The
            // count is zero, so neither the address space nor a pin still refers to it.
            unsafe { memory.slab::<PinCount>().free(&memory.frames, count) };
        }
    }
}

/// The pointer of an address space to its count; null before its first pin.
#[derive(Default)]
pub(super) struct PinCounts(AtomicPtr<PinCount>);

impl PinCounts {
    fn get(&self) -> Option<NonNull<PinCount>> {
        NonNull::new(self.0.load(Ordering::Acquire))
    }

    /// The address space's count, allocated at its first pin.
    fn get_or_allocate<P: Platform>(
        &self,
        memory: &Memory<P>,
    ) -> Result<NonNull<PinCount>, NoMemory> {
        if let Some(count) = self.get() {
            return Ok(count);
        }
        memory.may_wait();
        let new = PinCount(AtomicU64::new(SPACE));
        let new = memory.slab::<PinCount>().allocate(&memory.frames, new).ok_or(NoMemory)?;
        let (null, made) = (ptr::null_mut(), new.as_ptr());
        let order = (Ordering::AcqRel, Ordering::Acquire);
        match self.0.compare_exchange(null, made, order.0, order.1) {
            Ok(_) => Ok(new),
            Err(other) => {
                // SAFETY: the count was allocated from this slab, and no other thread has seen it.
                unsafe { memory.slab::<PinCount>().free(&memory.frames, new) };
                NonNull::new(other).ok_or(NoMemory)
            }
        }
    }

    /// The number of pinned pages. A page counts once per pin.
    pub(super) fn pages(&self) -> u64 {
        // SAFETY: the address space owns a share of the count.
        self.get().map_or(0, |count| unsafe { count.as_ref() }.pages())
    }

    /// Subtracts the address space's own share when the address space is dropped. Its pins may
    /// outlive it.
    ///
    /// # Safety
    /// 1. The address space no longer uses the count, and calls this function once, with its
    ///    memory.
    pub(super) unsafe fn release<P: Platform>(&self, memory: &Memory<P>) {
        if let Some(count) = self.get() {
            // SAFETY: 1. the address space owns a share of the count until this call.
            unsafe { PinCount::take(count, memory, SPACE) };
        }
    }
}

/// The share of one pin in the count. Dropping the value subtracts the share.
pub(super) struct Share<'m, P: Platform> {
    memory: &'m Memory<P>,
    /// The count. It lives as long as the share, which may outlive the address space.
    count: NonNull<PinCount>,
    pages: u64,
    /// The part of a folio's room that the owner may use.
    pub(super) room: PinRoom,
}

// SAFETY: the count is an atomic that any thread may use, and its last owner frees it.
unsafe impl<P: Platform> Send for Share<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for Share<'_, P> {}

/// The count of an address space, allocated at its first pin.
pub(super) fn pin_count<'s, P: Platform>(
    space: &'s AddressSpace<'_, P>,
) -> Result<&'s PinCount, Failure<FaultError>> {
    let count = space.pin_counts.get_or_allocate(space.page_table.memory)?;
    // SAFETY: the address space owns a share of the count until it is dropped.
    Ok(unsafe { count.as_ref() })
}

impl<'m, P: Platform> Share<'m, P> {
    /// Adds a pin of `pages` pages to the count of an address space.
    pub(super) fn add(
        space: &AddressSpace<'m, P>,
        count: &PinCount,
        pages: u32,
    ) -> Result<Self, PinError> {
        let limits = space.limits();
        let limit = match limits.locking {
            Locking::Limited => limits.pinned / PAGE_SIZE,
            Locking::Privileged => SPACE - 1,
        };
        let pages = u64::from(pages);
        let all = count.add(pages, limit).ok_or(PinError::LimitReached)?;
        let room = if all <= FEW { PinRoom::All } else { PinRoom::LowerHalf };
        Ok(Self { memory: space.page_table.memory, count: NonNull::from(count), pages, room })
    }
}

impl<P: Platform> Drop for Share<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. `add` has added the share, which ends here.
        unsafe { PinCount::take(self.count, self.memory, self.pages) };
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for PinCount {
    const KIND: RecordKind = RecordKind::PinCount;
}
