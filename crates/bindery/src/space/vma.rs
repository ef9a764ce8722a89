//! One mapping of an address space: a stretch of addresses with one purpose (Linux: VMA).
//!
//! Faults hold a VMA's lock for reading while they work; whoever changes or removes it holds the
//! address space's mutex and then the VMA's lock for writing. A fault takes no other lock that
//! spans more than its own page tables, so faults in different VMAs never meet.
//!
//! 1. A fault finds the VMA in the index without a lock and takes its lock for reading;
//! 2. in between, `munmap` may have taken the VMA out or cut it: the fault looks again whether it
//!    is still there and still holds the address, and otherwise asks again under the mutex.

use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use bitflags::bitflags;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::Permissions;
use crate::platform::{Platform, Wait};

use super::index::{Indexed, Links};

bitflags! {
    /// What a program may do with a mapping (`PROT_READ`, `PROT_WRITE`, `PROT_EXEC`; none of
    /// them is `PROT_NONE`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Protection: u8 {
        /// Loads.
        const READ = 1 << 0;
        /// Stores. Implies loads, as no page-table format separates the two.
        const WRITE = 1 << 1;
        /// Instruction fetches.
        const EXECUTE = 1 << 2;
    }
}

impl Protection {
    /// What page-table entries of such a mapping say.
    pub(crate) fn permissions(self) -> Permissions {
        let mut permissions = Permissions::empty();
        permissions.set(Permissions::READ, self.intersects(Self::READ | Self::WRITE));
        permissions.set(Permissions::WRITE, self.contains(Self::WRITE));
        permissions.set(Permissions::EXECUTE, self.contains(Self::EXECUTE));
        permissions
    }
}

/// Somebody changes the VMA, or waits until the readers have gone.
const WRITER: u32 = 1 << 31;
/// The VMA is no longer in the index.
const REMOVED: u32 = 1 << 30;

/// A mapping. All fields but the lock change only with the mutex of the address space and the lock
/// for writing held.
pub(crate) struct Vma {
    links: Links<Self>,
    start: AtomicU64,
    end: AtomicU64,
    /// The low bits count readers.
    lock: AtomicU32,
    protection: AtomicU32,
    /// Where the mapping begins in what backs it, in pages. Anonymous memory takes the address
    /// at birth; a move keeps it, so that the index of every page stays what it was.
    page_offset: AtomicU64,
    /// The next in a list of VMAs to be freed.
    pub(crate) next_removed: AtomicPtr<Self>,
}

impl Indexed for Vma {
    fn links(&self) -> &Links<Self> {
        &self.links
    }

    fn start(&self) -> u64 {
        self.start.load(Ordering::Relaxed)
    }

    fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }
}

impl Vma {
    pub(crate) fn new(range: VirtRange, protection: Protection, page_offset: u64) -> Self {
        Self {
            links: Links::new(),
            start: AtomicU64::new(range.start().0),
            end: AtomicU64::new(range.end().0),
            lock: AtomicU32::new(0),
            protection: AtomicU32::new(u32::from(protection.bits())),
            page_offset: AtomicU64::new(page_offset),
            next_removed: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    pub(crate) fn range(&self) -> VirtRange {
        VirtRange::raw(self.start(), self.end().max(self.start()))
    }

    pub(crate) fn protection(&self) -> Protection {
        Protection::from_bits_truncate(self.protection.load(Ordering::Relaxed) as u8)
    }

    pub(crate) fn set_protection(&self, protection: Protection) {
        self.protection.store(u32::from(protection.bits()), Ordering::Relaxed);
    }

    pub(crate) fn page_offset(&self) -> u64 {
        self.page_offset.load(Ordering::Relaxed)
    }

    /// The offset in what backs the mapping, in pages, of an address in it.
    pub(crate) fn page_offset_of(&self, addr: VirtAddr) -> u64 {
        self.page_offset().wrapping_add((addr.0 - self.start()) >> PAGE_SHIFT)
    }

    /// Lets the mapping end at `end`.
    pub(crate) fn set_end(&self, end: u64) {
        self.end.store(end, Ordering::Relaxed);
    }

    /// Lets the mapping begin at `start`; what it maps stays where it is.
    pub(crate) fn set_start(&self, start: u64) {
        let moved = (start.wrapping_sub(self.start()) as i64) >> PAGE_SHIFT;
        self.page_offset.store(self.page_offset().wrapping_add(moved as u64), Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
    }

    /// Whether `next`, which begins where this one ends, continues it in every respect.
    pub(crate) fn continues_in(&self, next: &Self) -> bool {
        self.end() == next.start()
            && self.protection() == next.protection()
            && self.page_offset_of(VirtAddr(self.end())) == next.page_offset()
    }

    /// Takes the lock for reading, unless somebody writes or the VMA was removed.
    pub(crate) fn try_read(&self) -> bool {
        let mut state = self.lock.load(Ordering::Relaxed);
        while state & (WRITER | REMOVED) == 0 {
            match self.lock.compare_exchange_weak(
                state,
                state + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(newer) => state = newer,
            }
        }
        false
    }

    pub(crate) fn end_read(&self) {
        self.lock.fetch_sub(1, Ordering::Release);
    }

    /// Takes the lock for writing: keeps new faults out and waits for those inside. The caller
    /// holds the mutex of the address space, so it is the only one to write.
    pub(crate) fn write<P: Platform>(&self, platform: &P) {
        let before = self.lock.fetch_or(WRITER, Ordering::Acquire);
        debug_assert_eq!(before & WRITER, 0, "the mutex lets one writer in");
        while self.lock.load(Ordering::Acquire) & !(WRITER | REMOVED) != 0 {
            platform.relax(Wait::Long);
        }
    }

    pub(crate) fn end_write(&self) {
        self.lock.fetch_and(!WRITER, Ordering::Release);
    }

    /// Says to those who still find the VMA that it is gone. Called with the lock for writing.
    pub(crate) fn mark_removed(&self) {
        self.lock.fetch_or(REMOVED, Ordering::Release);
    }
}
