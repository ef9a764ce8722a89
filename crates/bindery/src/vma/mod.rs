//! VMAs (Linux: `vm_area_struct`): a VMA is one mapping of an address space, a range of addresses
//! with one purpose.
//!
//! Faults hold a VMA's lock for reading while they work. A thread that changes or removes the VMA
//! holds the address space's mutex and then the VMA's lock for writing. A fault takes no other lock
//! that spans more than its own page tables, so faults in different VMAs never contend.
//!
//! 1. A fault finds the VMA in the index without a lock and then acquires the VMA's lock for
//!    reading.
//! 2. Before the fault acquires the lock, `munmap` may have removed or split the VMA. So the fault
//!    tests whether the VMA is still linked and still covers the address, and otherwise looks it up
//!    again under the mutex.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod attributes;
mod flags;
mod guards;

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::collections::range_skip_list::{Indexed, SkipLinks};
use crate::deferred::Linked;
use crate::folio::FolioIndex;
use crate::memory::{Record, RecordKind};
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::rmap::{AnonGroup, Rekeyed, TreeLinks};
use crate::sync::rw_lock::{Readable, RwLock};
use crate::table::{TreeState, zap_except::Protected};
use crate::userfault::UserfaultState;

pub(crate) use attributes::MappingAttributes;
pub use flags::{MappingFlags, Protection};
pub(crate) use guards::{ReadLockedVma, VmaReadGuard, VmaWriteGuard};

/// The purpose of a mapping: two neighbors merge only if their purposes are equal. The records in
/// it live as long as the value that it borrows from, usually a VMA that holds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Purpose<'h> {
    pub(crate) flags: MappingFlags,
    holds: Holds,
    _held: PhantomData<&'h Vma>,
}

/// The records that a VMA holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Holds {
    /// The object that backs the mapping; `None` for anonymous memory.
    pub(crate) object: Option<NonNull<ObjectState>>,
    /// The owner of the mapping's anonymous pages; `None` until the VMA first needs an owner.
    pub(crate) group: Option<NonNull<AnonGroup>>,
    /// The userfaultfd that serves the mapping's faults ([`MappingFlags::USERFAULT`]).
    pub(crate) userfault: Option<NonNull<UserfaultState>>,
}

impl<'h> Purpose<'h> {
    /// The purpose of anonymous memory, which has no page yet.
    pub(crate) fn anonymous(flags: MappingFlags) -> Self {
        Self { flags, holds: Holds::default(), _held: PhantomData }
    }

    /// The purpose of a mapping that will hold these records.
    ///
    /// # Safety
    /// 1. The records live for `'h`.
    #[inline]
    pub(crate) unsafe fn holding(flags: MappingFlags, holds: Holds) -> Self {
        Self { flags, holds, _held: PhantomData }
    }

    /// The records of the purpose.
    #[inline]
    pub(crate) fn holds(&self) -> &Holds {
        &self.holds
    }

    /// The same purpose without the userfaultfd.
    pub(crate) fn without_userfault(self) -> Self {
        let holds = Holds { userfault: None, ..self.holds };
        Self { flags: self.flags - MappingFlags::USERFAULT, holds, _held: PhantomData }
    }
}

/// A mapping. All fields except the lock change only while the thread holds the mutex of the
/// address space and the VMA's lock for writing.
///
/// While a reference exists, the VMA's object, anon group and userfaultfd are alive: the VMA holds
/// them from before its insertion until its pages are counted down (`VmaSet::insert`,
/// `Removed::free`). Functions that make a reference from a pointer guarantee this by the mutex, by
/// the lock of a tree that contains the VMA, or by the VMA's own lock. A read section does not
/// suffice, because the VMA may be removed during the section; there, only the lock and the bounds
/// are used (`VmaIndex::try_read`).
///
/// The fields are ordered by use, so that a fault in one VMA reads no cache line that a fault in
/// its neighbor writes. Searches read the first fields of all VMAs on their path; calls write the
/// links of the trees; faults use the remaining fields, from the lock on, of one VMA.
#[repr(C, align(64))]
pub(crate) struct Vma {
    start: AtomicU64,
    end: AtomicU64,
    links: SkipLinks<Self>,
    pub(crate) object_links: TreeLinks,
    pub(crate) group_links: TreeLinks,
    lock: RwLock,
    flags: AtomicU64,
    /// The mapping's offset in its object, in pages. For anonymous memory, the initial offset is
    /// the address; a move retains the offset once pages exist, so that the index of every page
    /// stays the same.
    page_offset: AtomicU64,
    object: AtomicPtr<ObjectState>,
    group: AtomicPtr<AnonGroup>,
    userfault: AtomicPtr<UserfaultState>,
    tree: AtomicPtr<TreeState>,
    /// The next VMA in a chain of VMAs to be freed.
    next_removed: AtomicPtr<Self>,
}

impl Indexed for Vma {
    fn links(&self) -> &SkipLinks<Self> {
        &self.links
    }

    fn start(&self) -> u64 {
        self.start()
    }

    fn end(&self) -> u64 {
        self.end()
    }
}

impl Linked for Vma {
    fn next(&self) -> &AtomicPtr<Self> {
        &self.next_removed
    }
}

fn raw<T>(pointer: Option<NonNull<T>>) -> *mut T {
    pointer.map_or(ptr::null_mut(), NonNull::as_ptr)
}

impl Vma {
    /// The first byte. Readers may read it while the writer changes it.
    pub(crate) fn start(&self) -> u64 {
        self.start.load(Ordering::Relaxed)
    }

    /// The exclusive end.
    pub(crate) fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// A VMA of the address space whose tree is `tree`. The VMA is in no list yet and holds no
    /// records.
    ///
    /// # Safety
    /// 1. The records that `purpose` borrows live until the VMA holds its records, or is dropped.
    #[inline(always)]
    pub(crate) unsafe fn new(
        range: VirtRange,
        purpose: Purpose<'_>,
        page_offset: u64,
        tree: NonNull<TreeState>,
    ) -> Self {
        Self {
            links: SkipLinks::new(),
            start: AtomicU64::new(range.start().0),
            end: AtomicU64::new(range.end().0),
            lock: RwLock::new(),
            flags: AtomicU64::new(purpose.flags.bits()),
            page_offset: AtomicU64::new(page_offset),
            object: AtomicPtr::new(raw(purpose.holds.object)),
            group: AtomicPtr::new(raw(purpose.holds.group)),
            userfault: AtomicPtr::new(raw(purpose.holds.userfault)),
            tree: AtomicPtr::new(tree.as_ptr()),
            object_links: TreeLinks::new(),
            group_links: TreeLinks::new(),
            next_removed: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Whether the VMA was removed ([`VmaWriteGuard::remove`]). Never reset.
    pub(crate) fn is_removed(&self) -> bool {
        self.lock.is_closed()
    }

    pub(crate) fn range(&self) -> VirtRange {
        VirtRange::raw(self.start(), self.end().max(self.start()))
    }

    pub(crate) fn pages(&self) -> u64 {
        self.range().pages()
    }

    #[inline]
    pub(crate) fn flags(&self) -> MappingFlags {
        MappingFlags::from_bits_truncate(self.flags.load(Ordering::Relaxed))
    }

    pub(crate) fn set_flags(&self, flags: MappingFlags) {
        self.flags.store(flags.bits(), Ordering::Relaxed);
    }

    pub(crate) fn has(&self, flags: MappingFlags) -> bool {
        self.flags().contains(flags)
    }

    pub(crate) fn protection(&self) -> Protection {
        self.flags().protection()
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.has(MappingFlags::SHARED)
    }

    pub(crate) fn is_anonymous(&self) -> bool {
        self.object.load(Ordering::Relaxed).is_null()
    }

    /// Whether write protection is retained when pages are dropped but the mapping remains. For
    /// pages of an object, only the entries record the protection.
    pub(crate) fn dropped_protection(&self) -> Protected {
        let kept = self.has(MappingFlags::USERFAULT_WRITE_PROTECT) && !self.is_anonymous();
        if kept { Protected::Marked } else { Protected::Forgotten }
    }

    pub(crate) fn purpose(&self) -> Purpose<'_> {
        let holds = Holds {
            object: self.object_pointer(),
            group: self.group_pointer(),
            userfault: self.userfault_pointer(),
        };
        Purpose { flags: self.flags(), holds, _held: PhantomData }
    }

    pub(crate) fn object_pointer(&self) -> Option<NonNull<ObjectState>> {
        NonNull::new(self.object.load(Ordering::Relaxed))
    }

    /// The object that backs the mapping, if it is not anonymous.
    pub(crate) fn object(&self) -> Option<&ObjectState> {
        // SAFETY: the object lives while a reference to the VMA exists (see the type).
        self.object_pointer().map(|object| unsafe { object.as_ref() })
    }

    pub(crate) fn group_pointer(&self) -> Option<NonNull<AnonGroup>> {
        // Acquire: a concurrent fault may have just created the anon group.
        NonNull::new(self.group.load(Ordering::Acquire))
    }

    /// The owner of the mapping's anonymous pages.
    pub(crate) fn group(&self) -> Option<&AnonGroup> {
        // SAFETY: as for the object; a VMA that leaves its anon group earlier first clears the
        // pointer (`set_group`).
        self.group_pointer().map(|group| unsafe { group.as_ref() })
    }

    /// Changes the owner of the anonymous pages. The VMA is in no anon group's tree.
    ///
    /// # Safety
    /// 1. The VMA has held `group` since before this call, as [`Vma::new`] requires.
    pub(crate) unsafe fn set_group(&self, group: Option<NonNull<AnonGroup>>) {
        self.group.store(raw(group), Ordering::Release);
    }

    #[inline]
    pub(crate) fn userfault_pointer(&self) -> Option<NonNull<UserfaultState>> {
        if cfg!(not(feature = "userfault")) {
            return None;
        }
        NonNull::new(self.userfault.load(Ordering::Relaxed))
    }

    /// The userfaultfd that serves the mapping's faults; `None` in a build without the feature
    /// `userfault`.
    #[inline]
    pub(crate) fn userfault(&self) -> Option<&UserfaultState> {
        // SAFETY: as for the object.
        self.userfault_pointer().map(|userfault| unsafe { userfault.as_ref() })
    }

    /// Changes the userfaultfd that serves the mapping's faults. The VMA is locked for writing.
    ///
    /// # Safety
    /// 1. The VMA has held `userfault` since before this call, and holds the previous one until
    ///    after it.
    pub(crate) unsafe fn set_userfault(&self, userfault: Option<NonNull<UserfaultState>>) {
        self.userfault.store(raw(userfault), Ordering::Relaxed);
    }

    /// Whether the VMA is in the trees of its object and anon group. For the auditor.
    ///
    /// # Safety
    /// 1. The trees do not change during the call.
    pub(crate) unsafe fn is_listed(&self) -> bool {
        // SAFETY: 1. of both: the caller's obligation 1.
        unsafe {
            self.object().is_none_or(|object| object.mappers.locked().contains(self))
                && self.group().is_none_or(|group| group.vmas.locked().contains(self))
        }
    }

    /// The tree of the address space.
    pub(crate) fn tree(&self) -> NonNull<TreeState> {
        NonNull::new(self.tree.load(Ordering::Relaxed)).unwrap_or(NonNull::dangling())
    }

    pub(crate) fn page_offset(&self) -> u64 {
        self.page_offset.load(Ordering::Relaxed)
    }

    /// The offset, in pages, of an address of the mapping in its object.
    pub(crate) fn page_offset_of(&self, addr: VirtAddr) -> u64 {
        self.page_offset().wrapping_add((addr.0 - self.start()) >> PAGE_SHIFT)
    }

    /// The index of a folio whose first page is at `addr` in the mapping. All pages of the mapping,
    /// anonymous or of an object, have indexes below [`FolioIndex::END`].
    #[inline]
    pub(crate) fn folio_index_at(&self, addr: VirtAddr) -> FolioIndex {
        FolioIndex::new(self.page_offset_of(addr))
    }

    /// The index of a folio whose page `number` is at `addr` in the mapping. `None` if the index of
    /// its first page, which need not be in the mapping, would be negative.
    pub(crate) fn folio_index_around(&self, addr: VirtAddr, number: u32) -> Option<FolioIndex> {
        FolioIndex::for_folio(self.page_offset_of(addr), number)
    }

    /// Sets the mapping's end to `end`.
    pub(crate) fn set_end(&self, end: u64, _rekeyed: &Rekeyed) {
        self.end.store(end, Ordering::Relaxed);
    }

    /// Sets the mapping's start to `start`; the entries do not move.
    pub(crate) fn set_start(&self, start: u64, _rekeyed: &Rekeyed) {
        let moved = (start.wrapping_sub(self.start()) as i64) >> PAGE_SHIFT;
        self.page_offset.store(self.page_offset().wrapping_add(moved as u64), Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
    }

    /// Sets the mapping's range to `range` and its offset to `page_offset`; the entries have moved
    /// along.
    pub(crate) fn set_place(&self, range: VirtRange, page_offset: u64, _rekeyed: &Rekeyed) {
        self.page_offset.store(page_offset, Ordering::Relaxed);
        self.start.store(range.start().0, Ordering::Relaxed);
        self.end.store(range.end().0, Ordering::Relaxed);
    }

    /// Locks for reading, unless a writer holds the lock or the VMA was removed.
    #[inline]
    pub(crate) fn try_read<'a, P: Platform>(
        &'a self,
        platform: &'a P,
    ) -> Option<VmaReadGuard<'a, P>> {
        Some(VmaReadGuard::new(self, self.lock.try_read(platform)?))
    }

    /// Whether [`Vma::try_read`] would lock. If a writer holds the lock, the tasks that wait on the
    /// word of [`TreeState::lock_waits`] are woken when the writer unlocks, or when the removed VMA
    /// is freed.
    pub(crate) fn poll_read(&self) -> Readable<'_> {
        self.lock.poll_read()
    }

    /// Whether a task or a thread has waited for the lock of this VMA, which was removed since.
    #[inline]
    pub(crate) fn was_waited_for(&self) -> bool {
        self.lock.is_marked()
    }

    /// Locks for writing, unless faults are in progress or wait. The caller holds the mutex of the
    /// address space.
    pub(crate) fn try_lock_write<'a, P: Platform>(
        &'a self,
        platform: &'a P,
    ) -> Option<VmaWriteGuard<'a, P>> {
        Some(VmaWriteGuard::new(self, self.lock.try_write(platform)?))
    }

    /// Locks for writing: blocks new faults and waits for those in progress. The caller holds the
    /// mutex of the address space, so it is the only writer.
    #[inline]
    pub(crate) fn lock_write<'a, P: Platform>(&'a self, platform: &'a P) -> VmaWriteGuard<'a, P> {
        VmaWriteGuard::new(self, self.lock.write(platform))
    }

    /// Waits for the threads that held the VMA's read lock when the VMA was removed. They found the
    /// VMA through the reverse map and may continue after they have released the reverse map's
    /// locks.
    #[inline]
    pub(crate) fn wait_for_readers<P: Platform>(&self, platform: &P) {
        while self.lock.has_readers() {
            platform.relax();
        }
    }

    /// A guard for a VMA that was left locked ([`VmaWriteGuard::leave_locked`]), or that no other
    /// thread can reach.
    ///
    /// # Safety
    /// 1. The caller left the VMA locked for writing, or no other thread can reach it.
    /// 2. The VMA has no other guard for writing.
    #[inline]
    pub(crate) unsafe fn written<'a, P: Platform>(
        &'a self,
        platform: &'a P,
    ) -> VmaWriteGuard<'a, P> {
        // SAFETY: 1. the caller's obligations 1 and 2.
        VmaWriteGuard::new(self, unsafe { self.lock.written(platform) })
    }
}

// SAFETY: 1. No other type has this kind.
unsafe impl Record for Vma {
    const KIND: RecordKind = RecordKind::Vma;
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::*;

    const LINE: usize = 64;

    #[test]
    fn a_fault_uses_no_line_of_searches() {
        let searched = offset_of!(Vma, start)..offset_of!(Vma, object_links);
        let used = offset_of!(Vma, lock)..size_of::<Vma>();
        assert!(searched.end <= used.start);
        assert_eq!((used.start % LINE, used.len()), (0, LINE), "from the lock on: one line");
    }
}
