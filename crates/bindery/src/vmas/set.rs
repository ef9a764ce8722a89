//! Changes of the set of VMAs. All changes are methods of [`VmaSet`], so the index, the trees of
//! the reverse map and the accounts always agree.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::{Deref, Range};
use core::ptr::NonNull;

use crate::Memory;
use crate::addr::{VirtAddr, VirtRange};
use crate::collections::range_skip_list::Spot;
use crate::error::{Error, Failure, NoMemory};
use crate::memory::Reservation;
use crate::platform::Platform;
use crate::rmap::{self, RmapGuard};
use crate::table::PageTable;
use crate::vma::{MappingFlags, Purpose, Vma, VmaWriteGuard};

use super::{LinkedVma, NewVma, Removed, ReservedVma, VmaView};

/// The VMAs of an address space, lent to one operation. Only this value can change the set. It is
/// borrowed from the guard of the mutex ([`super::VmasGuard::set`]).
pub(crate) struct VmaSet<'op, 'm, P: Platform> {
    pub(super) view: VmaView<'op, P>,
    pub(super) page_table: &'op PageTable<'m, P>,
    pub(super) removed: &'op mut Removed,
    /// The committed pages of the operation. All changes of the set go through it, so only the sum
    /// of the changes reaches the machine's count, when the set is dropped.
    pub(super) reservation: Reservation<'m, P>,
}

impl<'op, P: Platform> Deref for VmaSet<'op, '_, P> {
    type Target = VmaView<'op, P>;

    #[inline]
    fn deref(&self) -> &VmaView<'op, P> {
        &self.view
    }
}

/// A whole VMA with its neighbors, between which the VMA may move.
pub(crate) struct Between<'op> {
    pub(crate) vma: &'op Vma,
    spot: Spot<Vma>,
    /// From the end of the lower neighbor to the start of the upper neighbor.
    pub(crate) free: Range<u64>,
}

impl<'op, 'm, P: Platform> VmaSet<'op, 'm, P> {
    /// The platform.
    #[inline]
    pub(crate) fn platform(&self) -> &'m P {
        self.memory().platform()
    }

    /// The memory of the address space.
    #[inline]
    pub(crate) fn memory(&self) -> &'m Memory<P> {
        self.page_table.memory
    }

    /// Commits `pages` for mappings that the operation is about to insert or extend, or refuses.
    /// Pages of mappings that the operation has removed are used first. The rest returns at the end
    /// of the operation.
    #[inline]
    pub(crate) fn commit(&mut self, pages: u64) -> Result<(), Error> {
        self.reservation.reserve(pages)
    }

    /// Memory for a VMA. May sleep.
    #[inline]
    pub(crate) fn reserve(&self) -> Result<ReservedVma<'m, P>, NoMemory> {
        ReservedVma::new(self.memory())
    }

    /// A VMA that is in no list yet. May sleep.
    #[inline]
    pub(crate) fn new_vma(
        &self,
        range: VirtRange,
        purpose: Purpose<'op>,
        page_offset: u64,
    ) -> Result<NewVma<'op, 'm, P>, NoMemory> {
        Ok(self.new_vma_in(self.reserve()?, range, purpose, page_offset))
    }

    /// As [`VmaSet::new_vma`], in reserved memory.
    #[inline]
    pub(crate) fn new_vma_in(
        &self,
        reserved: ReservedVma<'m, P>,
        range: VirtRange,
        purpose: Purpose<'op>,
        page_offset: u64,
    ) -> NewVma<'op, 'm, P> {
        let tree = self.page_table.state();
        // SAFETY: 1. the result's lifetime `'op` ends before the lifetime of the records that the
        // purpose borrows.
        reserved.fill(|| unsafe { Vma::new(range, purpose, page_offset, tree) })
    }

    /// Inserts a new VMA into the index, the trees and the accounts. The VMA holds its object, anon
    /// group and userfaultfd until [`Removed::free`].
    #[inline]
    pub(crate) fn insert(&mut self, new: NewVma<'op, 'm, P>) -> &'op Vma {
        let linked = self.link(new);
        self.insert_linked(linked)
    }

    /// Inserts a new VMA only into the trees, before [`VmaSet::insert_linked`] completes the
    /// insertion.
    #[inline]
    pub(crate) fn link(&mut self, new: NewVma<'op, 'm, P>) -> LinkedVma<'op> {
        let linked = self.hold_for(new);
        // SAFETY: 1. the VMA was in no list, and `VmaSet::remove` removes it from the trees.
        unsafe { rmap::link(self.platform(), linked.vma) };
        linked
    }

    /// As [`VmaSet::insert`], with the trees of a VMA of the same purpose locked.
    pub(crate) fn insert_held(
        &mut self,
        new: NewVma<'op, 'm, P>,
        held: &RmapGuard<'_, P>,
    ) -> &'op Vma {
        let linked = self.hold_for(new);
        // SAFETY: 1. as in `link`.
        unsafe { held.add(linked.vma) };
        self.insert_linked(linked)
    }

    /// Inserts a VMA that is in the trees into the index and the accounts.
    pub(crate) fn insert_linked(&mut self, linked: LinkedVma<'op>) -> &'op Vma {
        let LinkedVma { vma, node } = linked;
        self.count(vma.flags(), vma.pages() as i64);
        // SAFETY: 1. the set is borrowed from the guard of the mutex; 2. and 3. the node is fresh
        // from the slab and is freed only by `Removed::free`, after a grace period; 4. the index is
        // private to this module, which uses it under the mutex or in a read section.
        unsafe { self.vmas.index.insert(node) };
        vma
    }

    /// Counts the VMA as a holder of its object, anon group and userfaultfd.
    #[inline]
    fn hold_for(&mut self, new: NewVma<'op, 'm, P>) -> LinkedVma<'op> {
        let node = new.into_node();
        // SAFETY: 1. `new` owned the node. From here on only the `LinkedVma` refers to it, and that
        // type permits only its insertion into the index.
        let vma = unsafe { self.vma(node) };
        if let Some(object) = vma.object() {
            object.map_added(vma.flags());
        }
        if let Some(group) = vma.group() {
            group.hold();
        }
        if let Some(userfault) = vma.userfault() {
            userfault.hold();
        }
        LinkedVma { vma, node }
    }

    /// Removes a VMA from the set.
    pub(crate) fn remove(&mut self, vma: VmaWriteGuard<'op, P>) {
        self.count(vma.flags(), -(vma.pages() as i64));
        self.remove_uncounted(vma);
    }

    /// As [`VmaSet::remove`], for a VMA whose pages now belong to its neighbor, so no account
    /// changes.
    pub(super) fn remove_uncounted(&mut self, vma: VmaWriteGuard<'op, P>) {
        // SAFETY: 1. a VMA of the set is in the trees.
        unsafe { rmap::unlink(self.platform(), &vma) };
        self.remove_unlinked(vma);
    }

    /// As [`VmaSet::remove`], with the VMA's trees locked.
    pub(crate) fn remove_held(&mut self, vma: VmaWriteGuard<'op, P>, held: &RmapGuard<'_, P>) {
        held.assert_of(&vma);
        // SAFETY: 1. a VMA of the set is in the trees; its guard is consumed here.
        unsafe { held.take() };
        self.count(vma.flags(), -(vma.pages() as i64));
        self.remove_unlinked(vma);
    }

    fn remove_unlinked(&mut self, vma: VmaWriteGuard<'op, P>) {
        let vma = vma.remove();
        // SAFETY: 1. the mutex is held; 2. the VMA is in the index, where starts differ; 3. only
        // `Removed::free` returns it to the slab, after a grace period.
        let node = unsafe { self.vmas.index.remove(NonNull::from(vma)) };
        // SAFETY: 1. `Removed::free` returns it to the slab when it leaves the chain; 2. a VMA is
        // removed only once, and the link has no other use.
        unsafe { self.removed.vmas.push(node) };
    }

    /// Sets the VMA's bounds to `start` and `end`; its pages do not move.
    pub(crate) fn resize(&mut self, vma: &VmaWriteGuard<'op, P>, start: u64, end: u64) {
        let held = RmapGuard::new(self.platform(), vma);
        self.resize_held(vma, start, end, &held);
    }

    /// As [`VmaSet::resize`], if the locks of the VMA's trees are free. Returns whether they were.
    pub(crate) fn try_resize(&mut self, vma: &VmaWriteGuard<'op, P>, start: u64, end: u64) -> bool {
        let Some(held) = RmapGuard::try_new(self.platform(), vma) else { return false };
        self.resize_held(vma, start, end, &held);
        true
    }

    /// As [`VmaSet::resize`], with the VMA's trees locked.
    pub(crate) fn resize_held(
        &mut self,
        vma: &VmaWriteGuard<'op, P>,
        start: u64,
        end: u64,
        held: &RmapGuard<'_, P>,
    ) {
        let before = vma.pages() as i64;
        held.resize(vma, start, end);
        self.vmas.index.bounds_changed(vma);
        self.count(vma.flags(), vma.pages() as i64 - before);
    }

    /// Leaves the VMA only `rest`, its lower or its upper end. The pages of the part that it loses
    /// are unmapped or have moved.
    #[inline]
    fn shorten(&mut self, vma: &VmaWriteGuard<'op, P>, rest: VirtRange) {
        let held = RmapGuard::new(self.platform(), vma);
        self.shorten_held(vma, rest, &held);
    }

    /// As [`VmaSet::shorten`], with the VMA's trees locked.
    #[inline]
    pub(crate) fn shorten_held(
        &mut self,
        vma: &VmaWriteGuard<'op, P>,
        rest: VirtRange,
        held: &RmapGuard<'_, P>,
    ) {
        self.resize_held(vma, rest.start().0, rest.end().0, held);
        if vma.has(MappingFlags::FRAMES)
            && let Some(object) = vma.object()
        {
            object.note_shortened();
        }
    }

    /// Looks up the neighbors of a VMA, for [`VmaSet::slide_held`].
    #[inline]
    pub(crate) fn between(&self, vma: &'op Vma) -> Between<'op> {
        let spot = self.vmas.index.spot(vma);
        let free = self.vmas.index.between_neighbors(&spot, vma);
        Between { vma, spot, free }
    }

    /// Moves a whole VMA to another range between its neighbors and sets its flags and offset; its
    /// pages have moved along. The VMA and its trees are locked.
    #[inline]
    pub(crate) fn slide_held(
        &mut self,
        (between, locked): (&Between<'op>, &VmaWriteGuard<'op, P>),
        target: VirtRange,
        (flags, page_offset): (MappingFlags, u64),
        held: &RmapGuard<'_, P>,
    ) {
        let vma = between.vma;
        let grown = target.pages() as i64 - vma.pages() as i64;
        held.set_place(locked, target, page_offset);
        vma.set_flags(flags);
        self.vmas.index.bounds_changed_at(&between.spot, vma);
        if grown != 0 {
            self.count(flags, grown);
        }
    }

    /// Changes the flags of a VMA.
    pub(crate) fn change_flags(&mut self, vma: &VmaWriteGuard<'op, P>, flags: MappingFlags) {
        let (before, pages) = (vma.flags(), vma.pages() as i64);
        self.removed.unlocked |=
            before.contains(MappingFlags::LOCKED) && !flags.contains(MappingFlags::LOCKED);
        vma.set_flags(flags);
        self.count(before, -pages);
        self.count(flags, pages);
    }

    /// Splits a VMA at `at`, an address inside, and returns the upper part.
    pub(crate) fn split(&mut self, vma: &'op Vma, at: VirtAddr) -> Result<&'op Vma, NoMemory> {
        let upper = self.reserve()?;
        Ok(self.split_in(vma, at, upper))
    }

    /// As [`VmaSet::split`], with the memory for the upper part.
    ///
    /// The upper part is in the trees before the lower one shrinks, so a walker of the reverse map
    /// sees the upper pages at least once, possibly twice.
    pub(crate) fn split_in(
        &mut self,
        vma: &'op Vma,
        at: VirtAddr,
        upper: ReservedVma<'m, P>,
    ) -> &'op Vma {
        let range = VirtRange::raw(at.0, vma.end());
        let upper = self.new_vma_in(upper, range, vma.purpose(), vma.page_offset_of(at));
        let vma = vma.lock_write(self.platform());
        self.page_table.cut(at);
        let LinkedVma { vma: upper, node } = self.link(upper);
        RmapGuard::new(self.platform(), &vma).resize(&vma, vma.start(), at.0);
        self.vmas.index.bounds_changed(&vma);
        // SAFETY: as in `insert_linked`. The accounts do not change, because the pages belonged to
        // one VMA before.
        unsafe { self.vmas.index.insert(node) };
        drop(vma);
        upper
    }

    /// Splits `part` off `vma`, sets the part's flags to `flags`, runs `work` with the part locked
    /// for writing, and merges the part with its neighbors. If the VMA cannot be split, nothing has
    /// changed.
    pub(crate) fn with_flags(
        &mut self,
        vma: &'op Vma,
        part: VirtRange,
        flags: MappingFlags,
        work: impl FnOnce(&Vma) -> Result<(), NoMemory>,
    ) -> Result<(), Failure> {
        let mut vma = vma;
        vma.may_be_cut(part)?;
        if vma.start() < part.start().0 {
            self.room_for(1)?;
            vma = self.split(vma, part.start())?;
        }
        if part.end().0 < vma.end() {
            let cut = self.room_for(1).map_err(Failure::from);
            let cut = cut.and_then(|()| Ok(self.split(vma, part.end())?));
            if let Err(failure) = cut {
                // The lower part that was split off is merged with the VMA again.
                self.merge_around(vma);
                return Err(failure);
            }
        }
        let locked = vma.lock_write(self.platform());
        self.change_flags(&locked, flags);
        let done = work(&locked);
        drop(locked);
        self.merge_around(vma);
        Ok(done?)
    }

    /// Sets the flags of all VMAs in `range` to those that `flags` returns, in ascending order.
    /// Skips VMAs that already have these flags, so that a second attempt continues.
    ///
    /// # Errors
    /// [`Error::NotMapped`] at a hole; those of a split. The part before the error has changed.
    pub(crate) fn set_flags_in(
        &mut self,
        range: VirtRange,
        flags: impl Fn(&Vma) -> MappingFlags,
    ) -> Result<(), Failure> {
        let mut at = range.start();
        while at < range.end() {
            let vma = self.at(at).ok_or(Error::NotMapped(at))?;
            let part = vma.range().intersection(range);
            at = part.end();
            let flags = flags(vma);
            if flags != vma.flags() {
                self.with_flags(vma, part, flags, |_| Ok(()))?;
            }
        }
        Ok(())
    }

    /// Sets the flags of each VMA to those that `flags` returns.
    pub(crate) fn set_all_flags(&mut self, flags: impl Fn(&Vma) -> MappingFlags) {
        let mut at = 0;
        while let Some(vma) = self.first_ending_after(at) {
            at = vma.end();
            let flags = flags(vma);
            if flags != vma.flags() {
                // A change of a whole VMA needs no split, so it cannot fail.
                let done = self.with_flags(vma, vma.range(), flags, |_| Ok(()));
                debug_assert!(done.is_ok());
            }
        }
    }

    /// Locks all VMAs that overlap `range` for writing, runs `work`, and clears the range of VMAs:
    /// removes those inside and truncates those at the ends. No VMA may extend beyond both ends.
    /// `work` unmaps the pages of the range, and no TLB holds them afterwards. If VMAs were removed
    /// before `work`, a call that saves a file would not find them:
    /// 1. CPU A removes a VMA from the file's list;
    /// 2. CPU B saves the file and write-protects it in all VMAs of the list;
    /// 3. CPU C writes through the VMA's entries, and no later save stores that write;
    /// 4. CPU A clears the entries.
    ///
    /// `first` is the first VMA that ends after the start of the range. Returns whether a VMA was
    /// split and remains.
    #[inline]
    pub(crate) fn cut_out(
        &mut self,
        range: VirtRange,
        first: Option<&'op Vma>,
        work: impl FnOnce(),
    ) -> bool {
        let view = self.view;
        for vma in view.overlapping_from(first, range) {
            vma.lock_write(self.platform()).leave_locked();
        }
        work();
        let mut cut = false;
        for vma in view.overlapping_from(first, range) {
            // SAFETY: 1. the VMA was left locked above, and only VMAs before it have changed since;
            // 2. this is its only guard: each VMA is visited once.
            let vma = unsafe { vma.written(self.platform()) };
            if vma.start() < range.start().0 {
                self.shorten(&vma, VirtRange::raw(vma.start(), range.start().0));
            } else if vma.end() > range.end().0 {
                self.shorten(&vma, VirtRange::raw(range.end().0, vma.end()));
            } else {
                self.remove(vma);
                continue;
            }
            cut = true;
        }
        cut
    }

    /// Runs `work`, which copies the address space, with all VMAs locked for writing. First removes
    /// dead anon groups from the families whose chains the copy would otherwise make too long.
    #[inline]
    pub(crate) fn with_all_locked<R>(&mut self, work: impl FnOnce(VmaView<'op, P>) -> R) -> R {
        let mut chains = false;
        for vma in self.iter() {
            vma.lock_write(self.platform()).leave_locked();
            chains |= rmap::may_contract(vma);
        }
        if chains {
            // SAFETY: 1. locked above.
            unsafe { self.contract_groups() };
        }
        let result = work(self.view);
        for vma in self.iter() {
            // SAFETY: 1. the VMA was left locked above, and the set has not changed since; 2. no
            // guard was kept.
            drop(unsafe { vma.written(self.platform()) });
        }
        result
    }

    /// Removes all VMAs, for the end of the address space.
    ///
    /// # Safety
    /// 1. No other thread uses the address space, except walkers of the reverse map.
    pub(crate) unsafe fn remove_all(&mut self) {
        while let Some(vma) = self.first_ending_after(0) {
            // SAFETY: 1. and 2. the caller's obligation 1; walkers only read fields that do not
            // change.
            self.remove(unsafe { vma.written(self.platform()) });
            // A reclaimer that found the VMA earlier may continue without the locks of the VMA's
            // trees.
            vma.wait_for_readers(self.platform());
        }
    }

    /// Adds `pages` pages with these flags to the accounts (or subtracts them).
    pub(super) fn count(&mut self, flags: MappingFlags, pages: i64) {
        let committed = self.view.vmas.account.count(flags, pages);
        if committed {
            self.reservation.pass(pages);
        }
    }
}
