//! `mremap(2)`: shrink, grow, move, duplicate.

mod relocation;
mod supplies;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::{Error, Failure};
use crate::folio::FolioIndex;
use crate::platform::Platform;
use crate::vma::{MappingFlags, Vma};
use crate::vmas::VmaView;
use crate::vmas::place::Place;

use super::munmap::{may_unmap, unmap, unmap_range, unmap_supplied};
use crate::space::AddressSpace;
use crate::space::op::Op;
use relocation::{Relocation, SourceFate, congruent_place, relocate};
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

impl<P: Platform> AddressSpace<'_, P> {
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
        let request = RemapRequest::new::<P>(old, old_length, new_length, remap)?;
        let memory = self.page_table.memory;
        let mut progress = Progress { moved_to: old.0, grown: None };
        let result = memory.outermost(|| {
            self.operate(|op| {
                let mut call = RemapCall { progress, supplies: RemapSupplies::none(memory) };
                let result = remap_range(op, &mut call, &request);
                progress.grown = call.progress.grown.filter(|_| result.is_ok());
                progress.moved_to = call.progress.moved_to;
                result
            })
        });
        if let Some(range) = progress.grown {
            // A failure to populate the locked pages is ignored, as on Linux.
            let _ = self.populate(range);
        }
        result
    }
}

/// A call, or the part of a call that concerns one mapping.
#[derive(Clone, Copy)]
struct RemapRequest {
    old: VirtAddr,
    /// In whole pages, as the new one.
    old_length: u64,
    length: u64,
    remap: Remap,
}

impl RemapRequest {
    /// A call with lengths in bytes. Refuses one that makes no sense whatever is mapped.
    fn new<P: Platform>(
        old: VirtAddr,
        old_length: u64,
        length: u64,
        remap: Remap,
    ) -> Result<Self, Error> {
        if !old.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(old));
        }
        let limit = VirtAddr(P::Arch::USER_END);
        // A length that wraps when it is rounded up becomes zero, as on Linux.
        let round = |length: u64| length.checked_next_multiple_of(PAGE_SIZE).unwrap_or(0);
        let (old_length, length) = (round(old_length), round(length));
        if length == 0 {
            return Err(Error::ZeroLength);
        }
        if length > limit.0 {
            return Err(Error::OutOfRange { limit });
        }
        let request = Self { old, old_length, length, remap };
        if let Some(target) = remap.target() {
            request.check_target(target, limit)?;
        }
        Ok(request)
    }

    fn check_target(&self, target: VirtAddr, limit: VirtAddr) -> Result<(), Error> {
        let &Self { old, old_length, length, remap } = self;
        if !target.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(target));
        }
        if target.0 > limit.0 - length {
            return Err(Error::OutOfRange { limit });
        }
        if remap.fate() == SourceFate::Stays && old_length != length {
            return Err(Error::Invalid);
        }
        // The sum may wrap, as on Linux: the old range is not checked yet.
        let old_end = old.0.wrapping_add(old_length);
        if old_end > target.0 && target.0 + length > old.0 {
            return Err(Error::Overlap);
        }
        Ok(())
    }

    /// The part of `vma` that is kept.
    fn source_in(&self, vma: &Vma) -> Result<VirtRange, Error> {
        let end = VirtAddr(vma.end());
        let length = self.old_length.min(self.length);
        if length > end.0 - self.old.0 {
            return Err(Error::CrossesMapping { end });
        }
        Ok(VirtRange::raw(self.old.0, self.old.0 + length))
    }
}

/// The state of one attempt.
struct RemapCall<'m, P: Platform> {
    progress: Progress,
    supplies: RemapSupplies<'m, P>,
}

/// The progress of a call over its attempts.
#[derive(Clone, Copy)]
struct Progress {
    /// In a move of several mappings, those before this address of the source have moved.
    moved_to: u64,
    /// New pages of a locked mapping.
    grown: Option<VirtRange>,
}

/// If it fails for lack of memory, nothing has changed except as the progress records.
fn remap_range<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    call: &mut RemapCall<'m, P>,
    request: &RemapRequest,
) -> Result<VirtAddr, Failure> {
    if request.remap.target().is_some() {
        // Before any look-up, as on Linux: source and destination may each be cut.
        op.vmas.room_for(6)?;
    }
    match request.remap {
        Remap::To(target) | Remap::LeaveTo(target) if request.old_length == request.length => {
            move_all(op, call, request, target)
        }
        Remap::InPlace | Remap::MayMove | Remap::To(_) | Remap::Leave(_) | Remap::LeaveTo(_) => {
            let vma = op.vmas.at(request.old).ok_or(Error::NotMapped(request.old))?;
            remap_one(op, call, vma, request)
        }
    }
}

/// Moves all mappings of the range, each by the same distance.
fn move_all<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    call: &mut RemapCall<'m, P>,
    request: &RemapRequest,
    target: VirtAddr,
) -> Result<VirtAddr, Failure> {
    let old = request.old;
    let end = old.0.saturating_add(request.length);
    // An attempt that failed for lack of memory has moved the mappings before the one that failed.
    let mut at = call.progress.moved_to;
    let mut seen = at > old.0;
    while let Some(vma) = op.vmas.first_ending_after(at).filter(|vma| vma.start() < end) {
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
        let remap = match request.remap {
            Remap::LeaveTo(_) => Remap::LeaveTo(to),
            Remap::InPlace | Remap::MayMove | Remap::To(_) | Remap::Leave(_) => Remap::To(to),
        };
        let length = stop - start;
        let part = RemapRequest { old: VirtAddr(start), old_length: length, length, remap };
        remap_one(op, call, vma, &part)?;
        at = stop;
        call.progress.moved_to = at;
        if at >= end {
            break;
        }
    }
    if seen { Ok(target) } else { Err(Error::NotMapped(old).into()) }
}

/// Resizes or moves the part of `vma` that the request names.
fn remap_one<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    request: &RemapRequest,
) -> Result<VirtAddr, Failure> {
    let &RemapRequest { old, old_length, length, remap } = request;
    if vma.has(MappingFlags::SEALED) {
        return Err(Error::Sealed(old).into());
    }
    if remap.target().is_none() && length <= old_length {
        return shrink(op, request).map(|()| old);
    }
    if old_length == 0 && !vma.is_shared() {
        return Err(Error::NotShared.into());
    }
    let source = request.source_in(vma)?;
    let grown = length.saturating_sub(old_length) >> PAGE_SHIFT;
    if grown > 0 {
        let end = vma.page_offset_of(old).checked_add(length >> PAGE_SHIFT);
        if end.is_none_or(|end| end > FolioIndex::END) {
            return Err(Error::Invalid.into());
        }
        if vma.has(MappingFlags::LOCKED) {
            op.vmas.account().may_lock(grown)?;
        }
        op.vmas.account().may_expand(vma.flags(), grown)?;
    }
    match remap.target() {
        Some(_) => remap_to(op, call, vma, source, request),
        None => expand(op, call, vma, source, request),
    }
}

fn shrink<P: Platform>(op: &mut Op<'_, '_, P>, request: &RemapRequest) -> Result<(), Failure> {
    let &RemapRequest { old, old_length, length, .. } = request;
    if length < old_length {
        let tail = unmap_range::<P>(VirtAddr(old.0 + length), old_length - length)?;
        unmap(op, tail)?;
    }
    Ok(())
}

/// Moves `source`, the part of one VMA that is kept, to the requested destination.
fn remap_to<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    source: VirtRange,
    request: &RemapRequest,
) -> Result<VirtAddr, Failure> {
    let &RemapRequest { old_length, length, remap, .. } = request;
    let target = remap.target().unwrap_or_default();
    if remap.is_fixed() {
        let minimum = op.vmas.minimum();
        if target < minimum {
            return Err(Error::BelowMinimum { minimum }.into());
        }
    }
    let range = VirtRange::raw(target.0, target.0 + length);
    let replaces = remap.is_fixed() && op.vmas.first_in(range).is_some();
    if replaces || length < old_length {
        // The unmapping of the tail refuses an end beyond user space.
        let start = source.start();
        let tail_start = start.0 + old_length.min(length);
        let tail = VirtRange::raw(tail_start, start.0.saturating_add(old_length));
        return remap_over(op, call, vma, &Replacing { source, tail, target: range, remap });
    }
    remap_free(op, call, vma, source, (length, remap))
}

/// A move that unmaps something first: mappings in the target, or the source's tail.
struct Replacing {
    source: VirtRange,
    /// The rest of the old range, which a smaller length cuts off.
    tail: VirtRange,
    target: VirtRange,
    remap: Remap,
}

/// As [`remap_to`], for moves that unmap something first. It allocates all memory before that.
/// Otherwise:
/// 1. CPU A unmaps the target, finds no memory for a table, and releases the mutex;
/// 2. CPU B maps something at the target, and returns;
/// 3. CPU A makes another attempt, and unmaps it.
#[cold]
fn remap_over<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &Vma,
    what: &Replacing,
) -> Result<VirtAddr, Failure> {
    let supplied = call.supplies.fill(op, vma, what);
    let done = match supplied {
        Ok(()) => remap_supplied(op, call, what),
        Err(error) => Err(error.into()),
    };
    call.supplies.give_back(op);
    // The supplies are short if a concurrent fault has mapped more of the source.
    if supplied.is_ok() { done.map_err(Failure::without_second_attempt) } else { done }
}

fn remap_supplied<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    call: &mut RemapCall<'m, P>,
    what: &Replacing,
) -> Result<VirtAddr, Failure> {
    let &Replacing { source, tail, target, remap } = what;
    // In Linux's order: unmaps the target before any later check can fail.
    if remap.is_fixed() {
        unmap_next(op, call, target)?;
        op.edit.flush();
    }
    if !tail.is_empty() {
        unmap_range::<P>(tail.start(), tail.len())?;
        unmap_next(op, call, tail)?;
    }
    // The target or the tail may have been a part of the same VMA, which is shorter now.
    let vma = op.vmas.at(source.start()).ok_or(Error::NotMapped(source.start()))?;
    remap_free(op, call, vma, source, (target.len(), remap))
}

/// Unmaps the mappings in `range` with the first of the supplies.
fn unmap_next<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    call: &mut RemapCall<'m, P>,
    range: VirtRange,
) -> Result<(), Failure> {
    let Some(first) = op.vmas.first_in(range) else { return Ok(()) };
    may_unmap(*op.vmas, range, first)?;
    let unmapping = call.supplies.unmappings.pop_at(0).unwrap_or_default();
    Ok(unmap_supplied(op, range, unmapping)?)
}

/// Moves `source` to the requested destination, which is free by now.
fn remap_free<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    source: VirtRange,
    (length, remap): (u64, Remap),
) -> Result<VirtAddr, Failure> {
    let target = remap.target().unwrap_or_default();
    let target = if remap.is_fixed() {
        VirtRange::raw(target.0, target.0 + length)
    } else if target.0 == 0 {
        congruent_place(*op.vmas, source, length).ok_or(Error::NoRoom)?
    } else {
        op.vmas.find_place(length, Place::Near(target), PAGE_SIZE)?
    };
    if remap.fate() == SourceFate::Stays {
        // The mappings that the target replaces are not subtracted: Linux counts before it unmaps.
        op.vmas.account().may_expand(vma.flags(), source.pages())?;
    }
    relocate(op, call, vma, &Relocation { source, target, fate: remap.fate() })
}

/// Extends the mapping, in place if possible.
fn expand<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
    source: VirtRange,
    request: &RemapRequest,
) -> Result<VirtAddr, Failure> {
    let (old, length) = (source.start(), request.length);
    let locked = vma.has(MappingFlags::LOCKED) && !vma.has(MappingFlags::LOCK_ON_FAULT);
    if vma.end() == source.end().0
        && !source.is_empty()
        && can_grow(*op.vmas, vma, old.0.checked_add(length))
    {
        let added = length - source.len();
        let accounted = vma.has(MappingFlags::ACCOUNT);
        let committed = if accounted { added >> PAGE_SHIFT } else { 0 };
        let _reservation = op.memory().commitment().reserve(committed)?;
        let held = vma.lock_write(op.platform());
        op.vmas.resize(&held, vma.start(), old.0 + length);
        drop(held);
        op.vmas.merge_around(vma);
        if locked {
            call.progress.grown = Some(VirtRange::raw(source.end().0, old.0 + length));
        }
        return Ok(old);
    }
    if request.remap == Remap::InPlace {
        return Err(Error::NoRoom.into());
    }
    op.vmas.room_for(4)?;
    let target = congruent_place(*op.vmas, source, length).ok_or(Error::NoRoom)?;
    relocate(op, call, vma, &Relocation { source, target, fate: SourceFate::Goes })
}

/// Whether nothing is mapped between the end of `vma` and `end`.
fn can_grow<P: Platform>(vmas: VmaView<'_, P>, vma: &Vma, end: Option<u64>) -> bool {
    let ceiling = || vmas.next(vma).map_or(P::Arch::USER_END, Vma::start);
    end.is_some_and(|end| end <= ceiling())
}
