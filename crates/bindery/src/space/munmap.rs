//! `munmap(2)`.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure, NoMemory};
use crate::frame::slab::Reserved;
use crate::platform::Platform;
use crate::table::zap::Flush;
use crate::tlb::Gather;
use crate::userfault::Notices;

use super::change::Removed;
use super::vma::{MappingFlags, Vma};
use super::{AddressSpace, MmapLocked};

/// The memory that unmapping takes: reserved before its first change. Must be used or given back.
#[derive(Default)]
#[must_use]
pub(super) struct UnmapSupplies {
    /// For the upper part of a VMA that is cut in two.
    upper: Option<Reserved<Vma>>,
    /// For the userfaultfds that are told.
    notices: Notices,
}

/// Whether the range leaves something of the VMA on both sides.
fn is_inside(range: VirtRange, vma: &Vma) -> bool {
    vma.start() < range.start().0 && range.end().0 < vma.end()
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Unmaps `length` bytes (rounded up to pages) at `start`. Mappings that extend beyond the ends
    /// keep the rest; a range without mappings is left alone.
    ///
    /// Context: may sleep. Complexity: in the mappings and tables that are removed, plus the runs
    /// in the two tables at the edges that other mappings keep. One invalidation for each 1,024
    /// entries of the kept tables or 512 of the removed ones, usually one in all, and one for each
    /// contiguous run or huge leaf that an end cuts.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Sealed`];
    /// [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping would be split in two and
    /// there is no room for the second. An error changes nothing.
    pub fn munmap(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        let range = self.unmap_range(start, length)?;
        self.page_table.memory.outermost(|| self.unmap_once(range))
    }

    fn unmap_once(&self, range: VirtRange) -> Result<(), Failure> {
        self.transaction(|mm, gather, removed| self.unmap_locked(mm, range, gather, removed))
    }

    pub(super) fn unmap_range(&self, start: VirtAddr, length: u64) -> Result<VirtRange, Error> {
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        let limit = self.limit();
        if start > limit || length > limit.0 - start.0 {
            return Err(Error::OutOfRange { limit });
        }
        let length = length.next_multiple_of(PAGE_SIZE);
        if length == 0 {
            return Err(Error::ZeroLength);
        }
        VirtRange::from_len(start, length)
            .filter(|range| range.end() <= limit)
            .ok_or(Error::OutOfRange { limit })
    }

    /// Takes everything in `range` out of the index and the page table.
    pub(super) fn unmap_locked(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(), Failure> {
        let Some(first) = self.vmas_in(mm, range).next() else { return Ok(()) };
        self.may_unmap(mm, range, first)?;
        let supplies = self.supply_unmapping(mm, range, first)?;
        Ok(self.unmap_supplied(mm, range, supplies, gather, removed)?)
    }

    /// Whether what is mapped in `range`, of which `first` is the first, may be unmapped.
    pub(super) fn may_unmap(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        first: &Vma,
    ) -> Result<(), Error> {
        self.refuse_sealed(mm, range)?;
        if is_inside(range, first) { self.room_for(1) } else { Ok(()) }
    }

    /// Gets what it takes to unmap what is in `range`, of which `first` is the first. Where there
    /// is no memory, nothing has changed.
    pub(super) fn supply_unmapping(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        first: &Vma,
    ) -> Result<UnmapSupplies, NoMemory> {
        let mut supplies = UnmapSupplies::default();
        if self.has_userfaults() {
            self.tell_of_unmapping(mm, range, &mut supplies.notices)?;
        }
        if is_inside(range, first) {
            match self.reserve_vma() {
                Ok(upper) => supplies.upper = Some(upper),
                Err(error) => {
                    supplies.notices.cancel(self.page_table.memory);
                    return Err(error);
                }
            }
        }
        Ok(supplies)
    }

    /// Gives back what was to serve for unmapping.
    #[cold]
    pub(super) fn give_back_unmapping(&self, supplies: UnmapSupplies) {
        supplies.notices.cancel(self.page_table.memory);
        if let Some(upper) = supplies.upper {
            self.give_back_reserved(upper);
        }
    }

    /// As [`AddressSpace::unmap_locked`], of what may be unmapped, with what that takes.
    pub(super) fn unmap_supplied(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        supplies: UnmapSupplies,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<(), NoMemory> {
        removed.notices.append(supplies.notices);
        if let Some(upper) = supplies.upper {
            match self.vmas_in(mm, range).next() {
                Some(first) if is_inside(range, first) => {
                    self.split_in(mm, first, range.end(), upper);
                }
                // The caller has unmapped something since.
                _ => self.give_back_reserved(upper),
            }
        }
        for vma in self.vmas_in(mm, range) {
            vma.lock_write(self.platform()).leave_locked();
        }
        self.note_resident();
        let freeable = self.freeable(mm, range, VirtRange::default());
        // A huge leaf without its deposit cannot be split. That is a broken invariant, which the
        // auditor reports; what could not be unmapped stays in the table.
        let zapped = self.page_table.zap(range, freeable, Flush::BeforeUnlock, gather);
        if self.cut_out(mm, range, removed) {
            gather.vma_stays();
        }
        zapped
    }

    /// Refuses a range with a part of a sealed VMA.
    pub(super) fn refuse_sealed(&self, mm: &MmapLocked, range: VirtRange) -> Result<(), Error> {
        match self.vmas_in(mm, range).find(|vma| vma.has(MappingFlags::SEALED)) {
            Some(vma) => Err(Error::Sealed(VirtAddr(vma.start()))),
            None => Ok(()),
        }
    }

    /// Lets no VMA reach into `range`: those inside go, those at the ends are cut. None reaches
    /// over both ends; all are locked for writing, and no TLB remembers any more what they mapped
    /// in the range. The other way round, a call that saves a file would not find them:
    /// 1. CPU A takes a VMA out of the file's list;
    /// 2. CPU B saves the file, and makes all that the list names forget that they may write;
    /// 3. CPU C writes through the VMA's entries, which nobody will save;
    /// 4. CPU A takes the entries away.
    ///
    /// Says whether a VMA was cut, and stays.
    fn cut_out(&self, mm: &MmapLocked, range: VirtRange, removed: &mut Removed) -> bool {
        let mut cut = false;
        while let Some(vma) = self.first_ending_after(mm, range.start().0) {
            if vma.start() >= range.end().0 {
                break;
            }
            // SAFETY: 1. the caller has left it locked; 2. this is its only guard: a VMA that is
            // cut does not reach into the range any more.
            let vma = unsafe { vma.written(self.platform()) };
            if vma.start() < range.start().0 {
                self.resize(mm, &vma, vma.start(), range.start().0);
            } else if vma.end() > range.end().0 {
                self.resize(mm, &vma, range.end().0, vma.end());
            } else {
                self.remove(mm, vma, removed);
                continue;
            }
            cut = true;
        }
        cut
    }
}
