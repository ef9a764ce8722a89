//! How many pages an address space has pinned, and how many it may pin.
//!
//! A folio has room for 2^15 pins in all. Without a limit, a process could pin one page of shared
//! memory so often that nobody else can. Two limits prevent that:
//!
//! 1. *Of the address space*: [`super::Limits::pinned`], as Linux counts pinned pages against
//!    `RLIMIT_MEMLOCK` (`pinned_vm`, `account_locked_vm`). A pin is of at least one page, so the 8
//!    MiB that a process has by default are 2,048 pins of one folio, a sixteenth of its room.
//! 2. *Of the folio*: from 2^14 pins on, only an address space with at most 1,024 pinned pages in
//!    all may pin it. That excludes owners without the first limit, or with a large one. So the
//!    upper half of the room is left to at least sixteen address spaces that pin little, however
//!    much one of them has pinned below it.
//!
//! ```text
//! pins of a folio   0 ................ 16,384 ................ 32,768
//!                   |     anybody        |  who pins little      | nobody
//! ```
//!
//! An address space that pins much cannot pin a folio that another has crowded. That is the price
//! of counting per owner and not per owner and folio, which would need a record for each pair. Many
//! address spaces together can still use a folio up. The embedder limits how many of them a user
//! may have (`RLIMIT_NPROC`).

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

/// A user with more pages pinned leaves the upper half of a folio's room to others.
const FEW: u64 = 1024;

/// The address space has not been dropped.
const SPACE: u64 = 1 << 63;

/// The pages that one address space has pinned. It outlives the address space as long as there is a
/// pin: the last to release it frees it.
#[derive(Debug)]
pub(crate) struct PinCount(AtomicU64);

impl PinCount {
    fn pages(&self) -> u64 {
        self.0.load(Ordering::Relaxed) & !SPACE
    }

    /// Adds pages, unless they would be more than `limit`; how many there are then.
    fn add(&self, pages: u64, limit: u64) -> Option<u64> {
        let fits = |word: u64| Some(word + pages).filter(|sum| sum & !SPACE <= limit);
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some((before & !SPACE) + pages)
    }

    /// Takes away what the caller has. The last one frees the count.
    fn take<P: Platform>(&self, memory: &Memory<P>, taken: u64) {
        // Release, and acquire for the last: all that others did with the count comes before its
        // end.
        if self.0.fetch_sub(taken, Ordering::AcqRel) == taken {
            // SAFETY: the count came from this slab (`AddressSpace::pin_count`). It is zero, so
            // neither the address space nor a pin knows it any more.
            unsafe {
                memory.slab::<PinCount>().free(&memory.frames, &memory.platform, self.into())
            };
        }
    }
}

/// Where an address space has its count; null until it pins something.
#[derive(Default)]
pub(super) struct PinCounts(AtomicPtr<PinCount>);

impl PinCounts {
    fn get(&self) -> Option<NonNull<PinCount>> {
        NonNull::new(self.0.load(Ordering::Acquire))
    }
}

/// What one pin counts for; given back by the drop.
pub(super) struct Share<'m, P: Platform> {
    memory: &'m Memory<P>,
    count: &'m PinCount,
    pages: u64,
    /// How far the folio's room is open to the owner.
    pub(super) room: PinRoom,
}

impl<P: Platform> Drop for Share<'_, P> {
    fn drop(&mut self) {
        self.count.take(self.memory, self.pages);
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// The count of the address space, made with its first pin.
    pub(super) fn pin_count(&self) -> Result<&'m PinCount, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let count = match self.pin_counts.get() {
            Some(count) => count,
            None => {
                memory.may_wait();
                let new = PinCount(AtomicU64::new(SPACE));
                let new = memory.slab::<PinCount>().allocate(&memory.frames, &memory.platform, new);
                let new = new.ok_or(NoMemory)?;
                let (null, made) = (ptr::null_mut(), new.as_ptr());
                let order = (Ordering::AcqRel, Ordering::Acquire);
                match self.pin_counts.0.compare_exchange(null, made, order.0, order.1) {
                    Ok(_) => new,
                    Err(other) => {
                        // SAFETY: the count came from this slab, and nobody else has seen it.
                        unsafe {
                            memory.slab::<PinCount>().free(&memory.frames, &memory.platform, new)
                        };
                        NonNull::new(other).ok_or(NoMemory)?
                    }
                }
            }
        };
        // SAFETY: the address space is one of those who keep the count, and each pin that takes the
        // reference along another. It is not followed once they have let go.
        Ok(unsafe { count.as_ref() })
    }

    /// Counts a pin of `pages` pages.
    pub(super) fn share_of_pins(
        &self,
        count: &'m PinCount,
        pages: u32,
    ) -> Result<Share<'m, P>, PinError> {
        let limits = self.limits();
        let limit = match limits.locking {
            Locking::Limited => limits.pinned / PAGE_SIZE,
            Locking::Privileged => SPACE - 1,
        };
        let pages = u64::from(pages);
        let all = count.add(pages, limit).ok_or(PinError::LimitReached)?;
        let room = if all <= FEW { PinRoom::All } else { PinRoom::LowerHalf };
        Ok(Share { memory: self.page_table.memory, count, pages, room })
    }

    /// The pages that are pinned, each counted once for each pin.
    pub(super) fn pinned_pages(&self) -> u64 {
        // SAFETY: the address space keeps the count.
        self.pin_counts.get().map_or(0, |count| unsafe { count.as_ref() }.pages())
    }

    /// The address space goes: its pins may stay.
    pub(super) fn let_go_of_pins(&self) {
        if let Some(count) = self.pin_counts.get() {
            // SAFETY: the address space keeps the count until now.
            unsafe { count.as_ref() }.take(self.page_table.memory, SPACE);
        }
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for PinCount {
    const KIND: RecordKind = RecordKind::PinCount;
}
