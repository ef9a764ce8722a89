//! `mremap(2)`: shrink, grow, move, duplicate.

mod relocation;
mod supplies;

use core::ptr::NonNull;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::folio::FolioIndex;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::change::Removed;
use super::map_request::Place;
use super::vma::{MappingFlags, Vma};
use super::{AddressSpace, MmapLocked};
use relocation::{Relocation, SourceFate};
use supplies::RemapSupplies;

/// The destination of a resized mapping.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, Platform, Remap};
///
/// fn double<P: Platform>(
///     space: &AddressSpace<'_, P>,
///     at: VirtAddr,
///     length: u64,
/// ) -> Result<VirtAddr, Error> {
///     space.mremap(at, length, 2 * length, Remap::MayMove)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Remap {
    /// None: it grows in place or not at all.
    #[default]
    InPlace,
    /// Any address, if the mapping cannot grow in place (`MREMAP_MAYMOVE`).
    MayMove,
    /// Exactly this address, even if the mapping need not move; mappings there are unmapped
    /// (`MREMAP_MAYMOVE | MREMAP_FIXED`).
    To(VirtAddr),
    /// The pages move to this address if it is free, otherwise anywhere (null: anywhere). The
    /// source stays mapped, empty (`MREMAP_MAYMOVE | MREMAP_DONTUNMAP`).
    Leave(VirtAddr),
    /// The pages move exactly to this address. The source stays mapped, empty (`MREMAP_MAYMOVE |
    /// MREMAP_FIXED | MREMAP_DONTUNMAP`).
    LeaveTo(VirtAddr),
}

impl Remap {
    fn target(self) -> Option<VirtAddr> {
        match self {
            Self::InPlace | Self::MayMove => None,
            Self::To(target) | Self::Leave(target) | Self::LeaveTo(target) => Some(target),
        }
    }

    fn is_fixed(self) -> bool {
        matches!(self, Self::To(_) | Self::LeaveTo(_))
    }

    fn fate(self) -> SourceFate {
        match self {
            Self::Leave(_) | Self::LeaveTo(_) => SourceFate::Stays,
            Self::InPlace | Self::MayMove | Self::To(_) => SourceFate::Goes,
        }
    }
}

/// Both lengths of a call, rounded up to pages.
struct RemapLengths {
    old: u64,
    new: u64,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Resizes or moves the mapping of `old_length` bytes at `old` to `new_length` bytes (both
    /// rounded up to pages), contents included, and returns its address. The part that a smaller
    /// length cuts off may span several mappings. A move to a given place without a change of
    /// length moves all mappings of the range, with the gaps between them. It moves them one by
    /// one, and those moved before an error stay at the destination. A mapping with a userfaultfd
    /// moves only by itself ([`Error::CrossesMapping`]). An old length of zero maps the pages of a
    /// shared mapping a second time.
    ///
    /// If the call chooses the destination, it is congruent with the source modulo the largest
    /// table that the range covers, so that whole tables move by one entry each.
    ///
    /// Context: may sleep. Complexity: one entry for each table that moves whole; for the rest, the
    /// base pages that are moved. One invalidation for each mapping and at most 64 tables; one more
    /// for each contiguous run that an end of the range cuts.
    ///
    /// # Errors
    /// In Linux's order: [`Error::Unaligned`], [`Error::ZeroLength`] (the new length),
    /// [`Error::OutOfRange`], [`Error::Invalid`] (a source that stays and another length),
    /// [`Error::Overlap`], [`Error::TooManyMappings`], [`Error::NotMapped`], [`Error::Sealed`],
    /// [`Error::NotShared`] (an old length of zero), [`Error::CrossesMapping`],
    /// [`Error::LockLimit`], [`Error::LimitReached`], [`Error::BelowMinimum`], [`Error::NoRoom`],
    /// [`Error::Overcommitted`], [`Error::OutOfMemory`]. An error changes nothing, with three
    /// exceptions, as on Linux: mappings at a destination that the caller chose may be unmapped; so
    /// may the tail that a smaller length cuts off a mapping that was to move there; and of several
    /// mappings some may have moved. For lack of memory, only the last can happen, unless a fault
    /// in the source takes the memory while the call runs.
    pub fn mremap(
        &self,
        old: VirtAddr,
        old_length: u64,
        new_length: u64,
        remap: Remap,
    ) -> Result<VirtAddr, Error> {
        let lengths = self.check_lengths(old, old_length, new_length)?;
        let RemapLengths { old: old_length, new: new_length } = lengths;
        if let Some(target) = remap.target() {
            self.check_target(old, old_length, target, new_length, remap.fate())?;
        }
        let memory = self.page_table.memory;
        let mut progress = Progress { moved_to: old.0, grown: None };
        let result =
            memory.outermost(|| self.remap_once(old, old_length, new_length, remap, &mut progress));
        if let Some(range) = progress.grown {
            // A failure to populate the locked pages is ignored, as on Linux.
            let _ = self.populate(range);
        }
        result
    }

    /// If it fails for lack of memory, nothing has changed except as `progress` records.
    fn remap_once(
        &self,
        old: VirtAddr,
        old_length: u64,
        new_length: u64,
        remap: Remap,
        progress: &mut Progress,
    ) -> Result<VirtAddr, Failure> {
        self.transaction(|mm, gather, removed| {
            let supplies = RemapSupplies::none(self.page_table.memory);
            let moved_to = progress.moved_to;
            let mut call = RemapCall { remap, gather, removed, grown: None, moved_to, supplies };
            let result = self.remap_locked(mm, old, old_length, new_length, &mut call);
            progress.grown = call.grown.filter(|_| result.is_ok());
            progress.moved_to = call.moved_to;
            result
        })
    }

    fn check_lengths(
        &self,
        old: VirtAddr,
        old_length: u64,
        length: u64,
    ) -> Result<RemapLengths, Error> {
        if !old.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(old));
        }
        let limit = self.limit();
        // A length that wraps when it is rounded up becomes zero, as on Linux.
        let round = |length: u64| length.checked_next_multiple_of(PAGE_SIZE).unwrap_or(0);
        let (old_length, length) = (round(old_length), round(length));
        if length == 0 {
            return Err(Error::ZeroLength);
        }
        if length > limit.0 {
            return Err(Error::OutOfRange { limit });
        }
        Ok(RemapLengths { old: old_length, new: length })
    }

    fn check_target(
        &self,
        old: VirtAddr,
        old_length: u64,
        target: VirtAddr,
        length: u64,
        source: SourceFate,
    ) -> Result<(), Error> {
        let limit = self.limit();
        if !target.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(target));
        }
        if target.0 > limit.0 - length {
            return Err(Error::OutOfRange { limit });
        }
        if source == SourceFate::Stays && old_length != length {
            return Err(Error::Invalid);
        }
        // The sum may wrap, as on Linux: the old range is not checked yet.
        let old_end = old.0.wrapping_add(old_length);
        if old_end > target.0 && target.0 + length > old.0 {
            return Err(Error::Overlap);
        }
        Ok(())
    }

    fn remap_locked(
        &self,
        mm: &MmapLocked,
        old: VirtAddr,
        old_length: u64,
        length: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        if call.remap.target().is_some() {
            // Before any look-up, as on Linux: source and destination may each be cut.
            self.room_for(6)?;
        }
        match call.remap {
            Remap::To(target) | Remap::LeaveTo(target) if old_length == length => {
                self.move_all(mm, old, length, target, call)
            }
            Remap::InPlace
            | Remap::MayMove
            | Remap::To(_)
            | Remap::Leave(_)
            | Remap::LeaveTo(_) => {
                let vma = self.vma_at(mm, old).ok_or(Error::NotMapped(old))?;
                self.remap_one(mm, vma, old, old_length, length, call)
            }
        }
    }

    /// Moves all mappings of the range, each by the same distance.
    fn move_all(
        &self,
        mm: &MmapLocked,
        old: VirtAddr,
        length: u64,
        target: VirtAddr,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let end = old.0.saturating_add(length);
        // An attempt that failed for lack of memory has moved the mappings before the one that
        // failed.
        let mut at = call.moved_to;
        let mut seen = at > old.0;
        while let Some(vma) = self.first_ending_after(mm, at).filter(|vma| vma.start() < end) {
            if !seen && vma.start() > at {
                break;
            }
            // A mapping with a userfaultfd moves only by itself, as on Linux.
            let alone = vma.flags().intersects(MappingFlags::USERFAULT);
            if alone && (seen || vma.end() < end) {
                return Err(Error::CrossesMapping { end: VirtAddr(vma.end()) }.into());
            }
            seen = true;
            let start = at.max(vma.start());
            let stop = end.min(vma.end());
            let to = VirtAddr(target.0 + (start - old.0));
            call.remap = match call.remap {
                Remap::LeaveTo(_) => Remap::LeaveTo(to),
                Remap::InPlace | Remap::MayMove | Remap::To(_) | Remap::Leave(_) => Remap::To(to),
            };
            let length = stop - start;
            self.remap_one(mm, vma, VirtAddr(start), length, length, call)?;
            at = stop;
            call.moved_to = at;
            if at >= end {
                break;
            }
        }
        if seen { Ok(target) } else { Err(Error::NotMapped(old).into()) }
    }

    /// Resizes or moves the part of `vma` that begins at `old`.
    fn remap_one(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        old: VirtAddr,
        old_length: u64,
        length: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        if vma.has(MappingFlags::SEALED) {
            return Err(Error::Sealed(old).into());
        }
        if call.remap.target().is_none() && length <= old_length {
            return self.shrink(mm, old, old_length, length, call).map(|()| old);
        }
        if old_length == 0 && !vma.is_shared() {
            return Err(Error::NotShared.into());
        }
        let source = source_in(vma, old, old_length.min(length))?;
        let grown = length.saturating_sub(old_length) >> PAGE_SHIFT;
        if grown > 0 {
            let end = vma.page_offset_of(old).checked_add(length >> PAGE_SHIFT);
            if end.is_none_or(|end| end > FolioIndex::END) {
                return Err(Error::Invalid.into());
            }
            if vma.has(MappingFlags::LOCKED) {
                self.may_lock(grown)?;
            }
            self.may_expand(vma.flags(), grown)?;
        }
        match call.remap.target() {
            Some(_) => self.remap_to(mm, vma, source, old_length, length, call),
            None => self.expand(mm, vma, source, length, call),
        }
    }

    fn shrink(
        &self,
        mm: &MmapLocked,
        old: VirtAddr,
        old_length: u64,
        length: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<(), Failure> {
        if length < old_length {
            let tail = self.unmap_range(VirtAddr(old.0 + length), old_length - length)?;
            self.unmap_locked(mm, tail, call.gather, call.removed)?;
        }
        Ok(())
    }

    /// Moves `source`, the part of one VMA that is kept, to the destination that the caller wants.
    fn remap_to(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        source: VirtRange,
        old_length: u64,
        length: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let remap = call.remap;
        let target = remap.target().unwrap_or_default();
        if remap.is_fixed() {
            let minimum = self.options.minimum_address;
            if target < minimum {
                return Err(Error::BelowMinimum { minimum }.into());
            }
        }
        let range = VirtRange::raw(target.0, target.0 + length);
        let replaces = remap.is_fixed() && self.vmas_in(mm, range).next().is_some();
        if replaces || length < old_length {
            return self.remap_over(mm, vma, source, old_length, range, call);
        }
        self.remap_free(mm, vma, source, length, call)
    }

    /// As [`AddressSpace::remap_to`], for moves that unmap something first: mappings in the target,
    /// or the source's tail. It allocates all memory before that. Otherwise:
    /// 1. CPU A unmaps the target, finds no memory for a table, and releases the mutex;
    /// 2. CPU B maps something at the target, and returns;
    /// 3. CPU A makes another attempt, and unmaps it.
    #[cold]
    fn remap_over(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        source: VirtRange,
        old_length: u64,
        target: VirtRange,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let start = source.start();
        // The unmapping of the tail refuses an end beyond user space.
        let tail_start = start.0 + old_length.min(target.len());
        let tail = VirtRange::raw(tail_start, start.0.saturating_add(old_length));
        self.supply_remap(mm, vma, source, tail, target, call)?;
        let done = self.remap_supplied(mm, source, tail, target, call);
        self.give_back_supplies(call);
        // The supplies are short if a concurrent fault has mapped more of the source.
        done.map_err(Failure::without_second_attempt)
    }

    fn remap_supplied(
        &self,
        mm: &MmapLocked,
        source: VirtRange,
        tail: VirtRange,
        target: VirtRange,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        // In Linux's order: unmaps the target before any later check can fail.
        if call.remap.is_fixed() {
            self.unmap_next(mm, target, call)?;
            self.flush(call.gather);
        }
        if !tail.is_empty() {
            self.unmap_range(tail.start(), tail.len())?;
            self.unmap_next(mm, tail, call)?;
        }
        // The target or the tail may have been a part of the same VMA, which is shorter now.
        let vma = self.vma_at(mm, source.start()).ok_or(Error::NotMapped(source.start()))?;
        self.remap_free(mm, vma, source, target.len(), call)
    }

    /// Unmaps the mappings in `range` with the first of the supplies.
    fn unmap_next(
        &self,
        mm: &MmapLocked,
        range: VirtRange,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<(), Failure> {
        let Some(first) = self.vmas_in(mm, range).next() else { return Ok(()) };
        self.may_unmap(mm, range, first)?;
        let unmapping = call.supplies.unmappings.pop_at(0).unwrap_or_default();
        Ok(self.unmap_supplied(mm, range, unmapping, call.gather, call.removed)?)
    }

    /// Moves `source` to the destination that the caller wants, which is free by now.
    fn remap_free(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        source: VirtRange,
        length: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let remap = call.remap;
        let target = remap.target().unwrap_or_default();
        let target = if remap.is_fixed() {
            VirtRange::raw(target.0, target.0 + length)
        } else if target.0 == 0 {
            self.congruent_place(mm, source, length).ok_or(Error::NoRoom)?
        } else {
            self.find_place(mm, length, Place::Near(target), PAGE_SIZE)?
        };
        if remap.fate() == SourceFate::Stays {
            // The mappings that the target replaces are not subtracted: Linux counts before it
            // unmaps.
            self.may_expand(vma.flags(), source.pages())?;
        }
        self.relocate(mm, vma, &Relocation { source, target, fate: remap.fate() }, call)
    }

    /// Extends the mapping, in place if possible.
    fn expand(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        source: VirtRange,
        length: u64,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<VirtAddr, Failure> {
        let old = source.start();
        let locked = vma.has(MappingFlags::LOCKED) && !vma.has(MappingFlags::LOCK_ON_FAULT);
        if vma.end() == source.end().0 && !source.is_empty() && self.can_grow(vma, old.0, length) {
            let added = length - source.len();
            let accounted = vma.has(MappingFlags::ACCOUNT);
            let committed = if accounted { added >> PAGE_SHIFT } else { 0 };
            let _reservation = self.page_table.memory.commitment().reserve(committed)?;
            let held = vma.lock_write(self.platform());
            self.resize(mm, &held, vma.start(), old.0 + length);
            drop(held);
            self.merge_around(mm, vma, call.removed);
            if locked {
                call.grown = Some(VirtRange::raw(source.end().0, old.0 + length));
            }
            return Ok(old);
        }
        if call.remap == Remap::InPlace {
            return Err(Error::NoRoom.into());
        }
        self.room_for(4)?;
        let target = self.congruent_place(mm, source, length).ok_or(Error::NoRoom)?;
        self.relocate(mm, vma, &Relocation { source, target, fate: SourceFate::Goes }, call)
    }

    fn can_grow(&self, vma: &Vma, start: u64, length: u64) -> bool {
        let Some(end) = start.checked_add(length) else { return false };
        let next = self.vmas.next(NonNull::from(vma));
        let ceiling = next.map_or(self.limit().0, |next| self.vma(next).start());
        end <= ceiling
    }
}

/// The state of one attempt, passed down the calls.
struct RemapCall<'a, 'm, P: Platform> {
    remap: Remap,
    gather: &'a mut Gather,
    removed: &'a mut Removed,
    /// New pages of a locked mapping.
    grown: Option<VirtRange>,
    /// In a move of several mappings, those before this address of the source have moved.
    moved_to: u64,
    supplies: RemapSupplies<'m, P>,
}

/// The progress of a call over its attempts.
struct Progress {
    /// As in [`RemapCall`].
    moved_to: u64,
    grown: Option<VirtRange>,
}

fn source_in(vma: &Vma, old: VirtAddr, length: u64) -> Result<VirtRange, Error> {
    let end = VirtAddr(vma.end());
    if length > end.0 - old.0 {
        return Err(Error::CrossesMapping { end });
    }
    Ok(VirtRange::raw(old.0, old.0 + length))
}
