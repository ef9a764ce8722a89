//! The VMAs of one address space: a set that faults read without a lock and that one operation at a
//! time changes.
//!
//! [`VmaIndex`] is the set, with the mutex that guards it. Three handles give access to the set,
//! and a VMA found through a handle lives as long as the handle's lifetime `'op`:
//!
//! | handle | the holder | may |
//! |---|---|---|
//! | [`VmaReadGuard`] of one VMA | has that VMA's lock for reading, without the mutex | use that VMA |
//! | [`VmaView`] | has the mutex | look VMAs and free addresses up |
//! | [`VmaSet`] | has the mutex, and nothing else looks | change the set |
//!
//! | file | contents |
//! |---|---|
//! | `view` | look-ups with the mutex held |
//! | `place`, `freeable` | the addresses of a new mapping; the page tables that an unmapped range frees |
//! | `parts` | the VMAs of a range, with its holes |
//! | `limits` | limits, usage and accounts |
//! | `set`, `merge`, `groups` | changes: inserted, removed, resized, split; joined with neighbors; the owners of anonymous pages |
//! | `both` | two VMAs, locked for reading |
//! | `new_vma` | memory for VMAs, and VMAs that are not in the set yet |
//! | `removed` | what an operation has taken out of the set, until it is freed |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod both;
mod freeable;
mod groups;
pub(crate) mod limits;
mod merge;
mod new_vma;
mod parts;
pub(crate) mod place;
mod removed;
mod set;
mod view;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::addr::{PAGE_SIZE, VirtAddr};
use crate::arch::Arch;
use crate::collections::range_skip_list::Index;
use crate::memory::Reservation;
use crate::platform::Platform;
use crate::sync::rw_lock::Readable;
use crate::sync::{Mutex, MutexGuard};
use crate::table::{PageTable, ReadSection};
use crate::vma::{Vma, VmaReadGuard};

use limits::Account;

pub(crate) use freeable::freeable_between;
pub(crate) use merge::Continues;
pub(crate) use new_vma::{LinkedVma, NewVma, ReservedVma};
pub(crate) use parts::Parts;
pub(crate) use place::Alignment;
pub(crate) use removed::Removed;
pub(crate) use set::{Between, VmaSet};
pub(crate) use view::VmaView;

/// The guard gap below a mapping that grows down, in bytes (Linux: `stack_guard_gap`).
pub(crate) const STACK_GUARD_GAP: u64 = 256 * PAGE_SIZE;

/// The addresses that mappings may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    /// The lowest address that may be mapped.
    pub(crate) minimum: VirtAddr,
    /// The address from which the search for free addresses proceeds downward, if the embedder
    /// chose one.
    pub(crate) search_top: Option<VirtAddr>,
    /// The maximum number of VMAs.
    pub(crate) maximum: usize,
}

/// The VMAs of an address space, with the mutex that guards changes, and the accounts.
///
/// The fields are ordered so that a call that changes the set writes three cache lines: the gaps of
/// the index' head; the rest of the index, with the mutex; the usage. A fault reads none of these
/// lines.
#[repr(C, align(64))]
pub(crate) struct VmaIndex<P: Platform> {
    minimum: VirtAddr,
    search_top: Option<VirtAddr>,
    maximum: AtomicUsize,
    /// Aligns the gaps of the index' head to a cache line.
    _padding: [u64; 2],
    index: Index<Vma>,
    mutex: Mutex<P::Mutex, ()>,
    account: Account,
}

impl<P: Platform> VmaIndex<P> {
    /// An empty set. `key` determines the shape of the index.
    pub(crate) fn new(key: [u64; 2], bounds: Bounds) -> Self {
        Self {
            minimum: bounds.minimum,
            search_top: bounds.search_top,
            maximum: AtomicUsize::new(bounds.maximum),
            _padding: [0; 2],
            index: Index::new(key),
            mutex: Mutex::new(()),
            account: Account::default(),
        }
    }

    /// Acquires the mutex.
    #[inline]
    pub(crate) fn lock(&self) -> VmasGuard<'_, P> {
        VmasGuard { vmas: self, _locked: self.mutex.lock() }
    }

    /// Acquires the mutex if it is free.
    pub(crate) fn try_lock(&self) -> Option<VmasGuard<'_, P>> {
        Some(VmasGuard { vmas: self, _locked: self.mutex.try_lock()? })
    }

    /// The word for which a task waits that has found the mutex taken, if the mutex has one
    /// ([`crate::sync::RawLock::parked_on`]).
    pub(crate) fn mutex_parked_on(&self) -> Option<(&AtomicU32, u32)> {
        self.mutex.parked_on()
    }

    /// Whether a thread has the mutex.
    pub(crate) fn is_locked(&self) -> bool {
        self.mutex.try_lock().is_none()
    }

    /// The VMA that contains `addr`, locked for reading, unless a writer holds it. Takes no mutex,
    /// so a VMA may be missed while the set changes.
    #[inline(always)]
    pub(crate) fn try_read<'a>(
        &'a self,
        platform: &'a P,
        addr: VirtAddr,
    ) -> Option<VmaReadGuard<'a, P>> {
        let _section = ReadSection::enter(platform);
        let node = self.index.find_at_or_before(addr.0)?;
        // SAFETY: a VMA in the index is freed only after a grace period (`Removed`), which the read
        // section delays. The read lock keeps the VMA in the index, so the VMA outlives the
        // section.
        let vma: &'a Vma = unsafe { node.as_ref() };
        let locked = vma.try_read(platform)?;
        vma.range().contains(addr).then_some(locked)
    }

    /// Whether [`VmaIndex::try_read`] would lock a VMA. If a writer holds the VMA there, or the last
    /// one before, marks that VMA ([`Vma::poll_read`]).
    pub(crate) fn poll_read(&self, platform: &P, addr: VirtAddr) -> PolledVma {
        let _section = ReadSection::enter(platform);
        let Some(node) = self.index.find_at_or_before(addr.0) else { return PolledVma::Absent };
        // SAFETY: as in `try_read`; the VMA is used only in the section.
        let vma: &Vma = unsafe { node.as_ref() };
        match vma.poll_read() {
            Readable::Later(..) => PolledVma::Written,
            Readable::Now if vma.range().contains(addr) => PolledVma::Readable,
            Readable::Now | Readable::Never => PolledVma::Absent,
        }
    }

    /// The VMA that contains `addr`, locked for reading. If a writer holds the VMA, waits for the
    /// mutex, which excludes writers.
    #[inline]
    pub(crate) fn read<'a>(
        &'a self,
        platform: &'a P,
        addr: VirtAddr,
    ) -> Option<VmaReadGuard<'a, P>> {
        self.try_read(platform, addr).or_else(|| self.read_after_writer(platform, addr))
    }

    /// As [`VmaIndex::read`], after a failed try: a writer holds the VMA, or the set has no VMA
    /// there.
    #[cold]
    fn read_after_writer<'a>(
        &'a self,
        platform: &'a P,
        addr: VirtAddr,
    ) -> Option<VmaReadGuard<'a, P>> {
        self.lock().try_read(platform, addr)
    }

    /// The number of VMAs; exact with the mutex held.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// Limits and usage.
    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    /// The lowest address that may be mapped.
    pub(crate) fn minimum(&self) -> VirtAddr {
        self.minimum
    }

    /// The address bounds for a copy of the address space.
    pub(crate) fn bounds(&self) -> Bounds {
        let maximum = self.maximum.load(Ordering::Relaxed);
        Bounds { minimum: self.minimum, search_top: self.search_top, maximum }
    }

    /// Sets the maximum number of VMAs; existing VMAs are not affected.
    pub(crate) fn set_maximum(&self, most: usize) {
        self.maximum.store(most, Ordering::Relaxed);
    }

    /// The number of VMAs that all searches have visited.
    #[cfg(any(test, feature = "measure"))]
    pub(crate) fn looked_at(&self) -> u64 {
        self.index.looked_at()
    }

    /// The address from which the search for free addresses proceeds.
    fn search_top(&self) -> u64 {
        const BELOW_FIVE_LEVELS: u64 = (1 << 47) - PAGE_SIZE;
        match self.search_top {
            Some(top) => top.0.min(P::Arch::USER_END),
            None if P::Arch::LEVELS > 4 => P::Arch::USER_END.min(BELOW_FIVE_LEVELS),
            None => P::Arch::USER_END,
        }
    }
}

/// The VMA at an address, for a task that must not sleep ([`VmaIndex::poll_read`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PolledVma {
    /// It can be locked for reading.
    Readable,
    /// A writer holds it. When the writer leaves, the word of
    /// [`TreeState::lock_waits`](crate::table::TreeState::lock_waits) changes.
    Written,
    /// None was found, or one that was removed; only the mutex shows whether one exists.
    Absent,
}

/// The mutex of an address space's VMAs, held until the guard is dropped.
#[must_use = "dropping the guard unlocks the set"]
pub(crate) struct VmasGuard<'a, P: Platform> {
    vmas: &'a VmaIndex<P>,
    _locked: MutexGuard<'a, P::Mutex, ()>,
}

impl<'a, P: Platform> VmasGuard<'a, P> {
    /// A view of the set, for look-ups.
    #[inline]
    pub(crate) fn view(&self) -> VmaView<'_, P> {
        VmaView { vmas: self.vmas }
    }

    /// The VMA that contains `addr`, locked for reading. The caller holds the mutex, so no writer
    /// is active and no VMA is missed.
    pub(crate) fn try_read(&self, platform: &'a P, addr: VirtAddr) -> Option<VmaReadGuard<'a, P>> {
        let node = NonNull::from(self.view().at(addr)?);
        // SAFETY: the mutex keeps the VMA in the index until it is locked, and the read lock keeps
        // it there afterwards.
        let vma: &'a Vma = unsafe { node.as_ref() };
        vma.try_read(platform)
    }

    /// The set, for changes. It lends all views that exist at the same time.
    ///
    /// # Safety
    /// 1. The set and the page table belong to the same address space.
    #[inline]
    pub(crate) unsafe fn set<'op, 'm>(
        &'op mut self,
        page_table: &'op PageTable<'m, P>,
        removed: &'op mut Removed,
    ) -> VmaSet<'op, 'm, P> {
        let reservation = Reservation::new(page_table.memory);
        VmaSet { view: VmaView { vmas: self.vmas }, page_table, removed, reservation }
    }

    /// Updates the index after a change of the bounds of `vma`. For tests that break invariants.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn bounds_changed(&self, vma: &Vma) {
        self.vmas.index.bounds_changed(vma);
    }

    /// Whether the index maintains its own invariants. For the auditor.
    pub(crate) fn check(&self) -> bool {
        self.vmas.index.check()
    }
}

#[cfg(test)]
mod layout {
    use core::mem::offset_of;

    use super::VmaIndex;
    use super::limits::Account;
    use crate::collections::range_skip_list::Index;
    use crate::frame::tests::Machine;
    use crate::vma::Vma;

    const LINE: usize = 64;

    #[test]
    fn a_change_writes_three_lines() {
        let gaps = offset_of!(VmaIndex<Machine>, index) + Index::<Vma>::WRITTEN;
        assert_eq!(gaps % LINE, 0, "searches read what is before");
        // The gaps fill a cache line; the rest of the index and the mutex follow on the next.
        assert_eq!(offset_of!(VmaIndex<Machine>, mutex) / LINE, gaps / LINE + 1);
        assert_eq!(offset_of!(VmaIndex<Machine>, account) % LINE, 0);
        const { assert!(Account::USAGE_END <= LINE) };
    }
}
