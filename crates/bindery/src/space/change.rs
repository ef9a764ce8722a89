//! Changes of the set of VMAs. All of them go through here, so that the index, the trees of the
//! reverse map and the accounts always agree. Each takes the proof that the mutex is
//! held ([`MmapLocked`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::deferred::Chain;
use crate::error::{Error, NoMemory};
use crate::frame::slab::Reserved;
use crate::platform::Platform;
use crate::rmap::{self, AnonGroup, Groups, RmapGuard};
use crate::userfault::Notices;

use super::vma::{MappingFlags, Purpose, Vma, VmaWriteGuard};
use super::{AddressSpace, MmapLocked};

/// What an operation has unlinked, for [`AddressSpace::finish`].
#[derive(Default)]
pub(super) struct Removed {
    /// VMAs that were taken out of the index. Each still holds what it names.
    pub(super) vmas: Chain<Vma>,
    /// Groups that nobody holds any more.
    pub(super) groups: Chain<AnonGroup>,
    /// A mapping was locked into memory, and is so no more.
    pub(super) unlocked: bool,
    /// Messages for userfaultfds, which [`AddressSpace::transaction`] delivers.
    pub(super) notices: Notices,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// A VMA that is in no list yet.
    pub(super) fn new_vma(
        &self,
        range: VirtRange,
        purpose: Purpose,
        page_offset: u64,
    ) -> Result<NonNull<Vma>, NoMemory> {
        Ok(self.vma_in(self.reserve_vma()?, range, purpose, page_offset))
    }

    /// Memory for a VMA, which [`AddressSpace::vma_in`] takes, or
    /// [`AddressSpace::give_back_reserved`].
    #[inline]
    pub(super) fn reserve_vma(&self) -> Result<Reserved<Vma>, NoMemory> {
        let memory = self.page_table.memory;
        memory.may_wait();
        memory.slab::<Vma>().reserve(&memory.frames, &memory.platform).ok_or(NoMemory)
    }

    /// As [`AddressSpace::new_vma`], in memory that was reserved before.
    #[inline]
    pub(super) fn vma_in(
        &self,
        reserved: Reserved<Vma>,
        range: VirtRange,
        purpose: Purpose,
        page_offset: u64,
    ) -> NonNull<Vma> {
        reserved.fill(|| Vma::new(range, purpose, page_offset, self.page_table.state()))
    }

    /// Gives back what was reserved and is not needed.
    #[cold]
    pub(super) fn give_back_reserved(&self, reserved: Reserved<Vma>) {
        let memory = self.page_table.memory;
        // SAFETY: 1. an address space has reserved it (`reserve_vma`), of the one slab for VMAs of
        // its memory; memory for VMAs does not pass from one address space to another.
        unsafe { memory.slab::<Vma>().unreserve(&memory.frames, self.platform(), reserved) };
    }

    /// Refuses where `more` VMAs would be too many.
    pub(super) fn room_for(&self, more: usize) -> Result<(), Error> {
        if self.vmas.len() + more > self.maximum_mappings.load(Ordering::Relaxed) {
            return Err(Error::TooManyMappings);
        }
        Ok(())
    }

    /// Puts a new VMA into the index, the trees and the accounts. It holds what it names from here
    /// on, until [`AddressSpace::finish`] frees it.
    pub(super) fn insert(&self, mm: &MmapLocked, node: NonNull<Vma>) {
        self.link(mm, node);
        self.insert_linked(mm, node);
    }

    /// Puts a new VMA into the trees, before [`AddressSpace::insert_linked`] does the rest: only
    /// walkers of the reverse map know it then.
    pub(super) fn link(&self, _mm: &MmapLocked, node: NonNull<Vma>) {
        let vma = self.vma(node);
        self.hold_for(vma);
        rmap::link(self.platform(), vma);
    }

    /// As [`AddressSpace::insert`], with the trees of a VMA of the same purpose locked.
    pub(super) fn insert_held(&self, mm: &MmapLocked, node: NonNull<Vma>, held: &RmapGuard<'_, P>) {
        let vma = self.vma(node);
        self.hold_for(vma);
        held.add(vma);
        self.insert_linked(mm, node);
    }

    /// Puts a VMA that is in the trees into the index and the accounts.
    pub(super) fn insert_linked(&self, mm: &MmapLocked, node: NonNull<Vma>) {
        let vma = self.vma(node);
        self.account(mm, vma.flags(), vma.pages() as i64);
        // SAFETY: 1. callers hold the mutex; 2. and 3. the node is fresh from the slab, which
        // gives it back only in `finish`, after a grace period; 4. all callers of the index are in
        // this module and its parent, which use it under the mutex or in a read section.
        unsafe { self.vmas.insert(node) };
    }

    /// Takes a VMA out of the index and puts it on the list.
    pub(super) fn remove(&self, mm: &MmapLocked, vma: VmaWriteGuard<'_, P>, removed: &mut Removed) {
        rmap::unlink(self.platform(), &vma);
        self.remove_unlinked(mm, vma, removed);
    }

    /// As [`AddressSpace::remove`], with the VMA's trees locked.
    pub(super) fn remove_held(
        &self,
        mm: &MmapLocked,
        vma: VmaWriteGuard<'_, P>,
        held: &RmapGuard<'_, P>,
        removed: &mut Removed,
    ) {
        held.take();
        self.remove_unlinked(mm, vma, removed);
    }

    fn remove_unlinked(&self, mm: &MmapLocked, vma: VmaWriteGuard<'_, P>, removed: &mut Removed) {
        self.account(mm, vma.flags(), -(vma.pages() as i64));
        let vma = vma.remove();
        // SAFETY: 1. callers hold the mutex; 2. the VMA is in the index, where starts differ;
        // 3. it goes back to the slab only in `finish`, after a grace period.
        let node = unsafe { self.vmas.remove(NonNull::from(vma)) };
        // SAFETY: 1. the slab gets it back from `finish`, where it leaves the chain; 2. a VMA is
        // removed once, and nothing else uses the link.
        unsafe { removed.vmas.push(node) };
    }

    /// Lets the VMA begin at `start` and end at `end`; what it maps stays where it is.
    pub(super) fn resize(&self, mm: &MmapLocked, vma: &VmaWriteGuard<'_, P>, start: u64, end: u64) {
        self.resize_held(mm, vma, start, end, &RmapGuard::new(self.platform(), vma));
    }

    /// As [`AddressSpace::resize`], with the VMA's trees locked.
    pub(super) fn resize_held(
        &self,
        mm: &MmapLocked,
        vma: &VmaWriteGuard<'_, P>,
        start: u64,
        end: u64,
        held: &RmapGuard<'_, P>,
    ) {
        let before = vma.pages() as i64;
        held.resize(start, end);
        self.vmas.bounds_changed(NonNull::from(vma.vma()));
        self.account(mm, vma.flags(), vma.pages() as i64 - before);
    }

    /// Changes the flags of a VMA.
    pub(super) fn change_flags(
        &self,
        mm: &MmapLocked,
        vma: &VmaWriteGuard<'_, P>,
        flags: MappingFlags,
    ) {
        let pages = vma.pages() as i64;
        self.account(mm, vma.flags(), -pages);
        vma.set_flags(flags);
        self.account(mm, flags, pages);
    }

    /// Cuts a VMA in two at `at`, an address inside, and returns the upper part.
    pub(super) fn split(&self, mm: &MmapLocked, vma: &Vma, at: VirtAddr) -> Result<&Vma, NoMemory> {
        Ok(self.split_in(mm, vma, at, self.reserve_vma()?))
    }

    /// As [`AddressSpace::split`], with the memory for the upper part.
    pub(super) fn split_in(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        at: VirtAddr,
        upper: Reserved<Vma>,
    ) -> &Vma {
        let range = VirtRange::raw(at.0, vma.end());
        let node = self.vma_in(upper, range, vma.purpose(), vma.page_offset_of(at));
        let vma = vma.lock_write(self.platform());
        self.page_table.cut(at);
        self.split_with(mm, &vma, at, node);
        drop(vma);
        self.vma(node)
    }

    /// Cuts a VMA in two at `at`; `node` is the upper part.
    ///
    /// The upper part is in the trees before the lower one lets go, so a walker of the reverse map
    /// sees the upper pages once or twice, never not at all.
    pub(super) fn split_with(
        &self,
        _mm: &MmapLocked,
        vma: &VmaWriteGuard<'_, P>,
        at: VirtAddr,
        node: NonNull<Vma>,
    ) {
        let upper = self.vma(node);
        self.hold_for(upper);
        rmap::link(self.platform(), upper);
        RmapGuard::new(self.platform(), vma).resize(vma.start(), at.0);
        self.vmas.bounds_changed(NonNull::from(vma.vma()));
        // SAFETY: as in `insert`. The accounts stay: the pages are those of one VMA before.
        unsafe { self.vmas.insert(node) };
    }

    /// Lets the VMA hold what it names.
    fn hold_for(&self, vma: &Vma) {
        if let Some(object) = vma.object() {
            object.map_added(vma.flags());
        }
        if let Some(group) = vma.group() {
            group.hold();
        }
        if let Some(userfault) = vma.userfault() {
            userfault.hold();
        }
    }

    /// Whether `high`, which begins where `low` ends, continues it in every respect (Linux:
    /// `can_vma_merge_after` and its siblings).
    ///
    /// A VMA without an anon group of anonymous pages may take over its neighbor's, unless that
    /// one is inherited: the pages of an anon group above would be looked for in places where they
    /// cannot be.
    fn continues(&self, low: &Vma, high: &Vma) -> bool {
        let alike = |flags: MappingFlags| flags - MappingFlags::STICKY;
        low.end() == high.start()
            && alike(low.flags()) == alike(high.flags())
            && low.object_pointer() == high.object_pointer()
            && low.userfault_pointer() == high.userfault_pointer()
            // As Linux: each of them counts as an attachment of its own.
            && low.object().is_none_or(|object| object.segment().is_none())
            && low.page_offset_of(VirtAddr(low.end())) == high.page_offset()
            && match (low.group(), high.group()) {
                (None, None) => true,
                (Some(group), None) | (None, Some(group)) => !group.is_inherited(),
                (Some(low), Some(high)) => core::ptr::eq(low, high),
            }
    }

    /// Joins `vma` with its neighbors where they continue each other in every respect, and
    /// returns what it has become.
    pub(super) fn merge_around<'a>(
        &'a self,
        mm: &MmapLocked,
        vma: &'a Vma,
        removed: &mut Removed,
    ) -> &'a Vma {
        let mut vma = vma;
        // As Linux: where both neighbors fit but not to each other, the lower one wins.
        if let Some(previous) = self.vmas.previous(NonNull::from(vma))
            && self.continues(self.vma(previous), vma)
        {
            self.join(mm, self.vma(previous), vma, removed);
            vma = self.vma(previous);
        }
        if let Some(next) = self.vmas.next(NonNull::from(vma))
            && self.continues(vma, self.vma(next))
        {
            self.join(mm, vma, self.vma(next), removed);
        }
        vma
    }

    fn join(&self, mm: &MmapLocked, low: &Vma, high: &Vma, removed: &mut Removed) {
        let low = low.lock_write(self.platform());
        let high = high.lock_write(self.platform());
        if low.group_pointer().is_none()
            && let Some(group) = high.group_pointer()
        {
            self.adopt(mm, &low, group);
        }
        let end = high.end();
        let pages = high.pages() as i64;
        low.set_flags(low.flags() | high.flags());
        RmapGuard::new(self.platform(), &low).resize(low.start(), end);
        rmap::unlink(self.platform(), &high);
        self.remove_unlinked(mm, high, removed);
        self.account(mm, low.flags(), pages);
        self.vmas.bounds_changed(NonNull::from(low.vma()));
    }

    /// Lets a VMA without an anon group belong to `group`, one of this address space.
    pub(super) fn adopt(&self, _mm: &MmapLocked, vma: &Vma, group: NonNull<AnonGroup>) {
        debug_assert!(vma.group_pointer().is_none(), "a VMA belongs to one group");
        // SAFETY: the caller found the anon group in a VMA of this address space, which holds it,
        // and the mutex keeps that VMA; or it is fresh and nobody but the caller could free it.
        let state = unsafe { group.as_ref() };
        state.hold();
        state.join(self.platform(), vma, group);
    }

    /// Lets a VMA belong to no anon group any more; nothing of the anon group is mapped in it.
    /// Another VMA of this address space belongs to the group.
    pub(super) fn leave_group(
        &self,
        _mm: &MmapLocked,
        vma: &VmaWriteGuard<'_, P>,
        removed: &mut Removed,
    ) {
        let Some(group) = vma.group_pointer() else { return };
        if let Some(state) = vma.group() {
            state.leave(self.platform(), vma);
        }
        Groups::release(self.page_table.memory, group, &mut removed.groups);
    }

    /// Gives the VMA around `addr` an anon group for its anonymous pages: that of a neighbor with
    /// which it could be one VMA, or a new one (Linux: `anon_vma_prepare`). Takes the mutex.
    pub(super) fn prepare_group(&self, addr: VirtAddr) -> Result<(), NoMemory> {
        let mm = self.mmap_lock.lock();
        let found = self.first_ending_after(&mm, addr.0).filter(|vma| vma.start() <= addr.0);
        let Some(vma) = found else { return Ok(()) };
        self.prepare_group_locked(&mm, vma)
    }

    /// As [`AddressSpace::prepare_group`], for a caller that has the mutex.
    pub(super) fn prepare_group_locked(&self, mm: &MmapLocked, vma: &Vma) -> Result<(), NoMemory> {
        if vma.group_pointer().is_some() {
            return Ok(());
        }
        let node = NonNull::from(vma);
        let next = self.vmas.next(node).map(|next| self.vma(next));
        let previous = self.vmas.previous(node).map(|previous| self.vma(previous));
        let mut group = next.and_then(|next| self.shared_group(vma, next, next));
        if group.is_none() {
            group = previous.and_then(|previous| self.shared_group(previous, vma, previous));
        }
        let group = match group {
            Some(group) => group,
            None => Groups::create(self.page_table.memory, None).ok_or(NoMemory)?,
        };
        self.adopt(mm, vma, group);
        Ok(())
    }

    /// The anon group of `owner`, one of the two, if `low` and `high` could be one VMA but for
    /// their protection, which may be changed back.
    fn shared_group(&self, low: &Vma, high: &Vma, owner: &Vma) -> Option<NonNull<AnonGroup>> {
        let ignored = MappingFlags::PROTECTION | MappingFlags::STICKY;
        let fits = low.end() == high.start()
            && low.flags() - ignored == high.flags() - ignored
            && low.object_pointer() == high.object_pointer()
            && high.page_offset()
                == low.page_offset().wrapping_add((high.start() - low.start()) >> PAGE_SHIFT);
        let group = owner.group().filter(|group| fits && !group.is_inherited());
        group.and(owner.group_pointer())
    }

    /// Frees VMAs that were never in the index, and hands the error on.
    pub(super) fn give_back<E>(&self, nodes: [Option<NonNull<Vma>>; 2], error: E) -> E {
        nodes.into_iter().flatten().for_each(|node| self.free_unused(node));
        error
    }

    /// Frees a VMA that was never in the index.
    pub(super) fn free_unused(&self, node: NonNull<Vma>) {
        let memory = self.page_table.memory;
        // SAFETY: the node came from this slab (`new_vma`), was never put into the index, and so
        // is known to nobody else.
        unsafe { memory.slab::<Vma>().free(&memory.frames, self.platform(), node) };
    }
}
