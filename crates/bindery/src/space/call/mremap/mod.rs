//! `mremap(2)`: shrink, grow, move, duplicate.

mod move_vma;
mod plan;
mod supplies;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::{Error, Failure};
use crate::folio::FolioIndex;
use crate::platform::Platform;
use crate::userfault::Notices;
use crate::vma::{MappingFlags, Vma};
use crate::vmas::Alignment;
use crate::vmas::place::Place;

use super::munmap::{may_unmap, unmap, unmap_range, unmap_supplied};
use crate::space::AddressSpace;
use crate::space::call::populate::{Populate, populated};
use crate::space::op::Op;
use crate::space::userfault::pending_events::PendingEvents;
use move_vma::{congruent_place, move_vma};
use plan::RemapPlan;
use supplies::RemapCall;

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
    /// No move: the mapping grows in place or the call fails.
    #[default]
    InPlace,
    /// Any address, if the mapping cannot grow in place (`MREMAP_MAYMOVE`).
    MayMove,
    /// Exactly this address, even if the mapping need not move; mappings there are unmapped
    /// (`MREMAP_MAYMOVE | MREMAP_FIXED`).
    To(VirtAddr),
    /// The pages move to this address if it is free, otherwise to any address (null: any address).
    /// The source stays mapped but empty (`MREMAP_MAYMOVE | MREMAP_DONTUNMAP`).
    Leave(VirtAddr),
    /// The pages move exactly to this address. The source stays mapped but empty (`MREMAP_MAYMOVE |
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

    fn keeps_source(self) -> bool {
        matches!(self, Self::Leave(_) | Self::LeaveTo(_))
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Resizes or moves the mapping of `old_length` bytes at `old` to `new_length` bytes (both
    /// rounded up to pages), including its contents, and returns its address. If the new length is
    /// smaller, the part cut off may span several mappings. A move to a given address without a
    /// change of length moves all mappings of the range and preserves the gaps between them. The
    /// mappings move one by one, and those moved before an error stay at the destination. A mapping
    /// with a userfaultfd can only be moved by itself ([`Error::CrossesMapping`]). An old length of
    /// zero maps the pages of a shared mapping a second time.
    ///
    /// If the call chooses the destination, that address is congruent with the source modulo the
    /// largest table that the range covers, so that whole tables move by one entry each.
    ///
    /// Context: may sleep. Complexity: one entry per table that moves as a whole; for the rest,
    /// linear in the moved base pages. One invalidation per mapping and at most 64 tables; one more
    /// for each contiguous run that an end of the range divides.
    ///
    /// # Errors
    /// In Linux's order: [`Error::Unaligned`], [`Error::ZeroLength`] (the new length),
    /// [`Error::OutOfRange`], [`Error::Invalid`] (a source that stays and another length),
    /// [`Error::Overlap`], [`Error::TooManyMappings`], [`Error::NotMapped`], [`Error::Sealed`],
    /// [`Error::NotShared`] (an old length of zero), [`Error::CrossesMapping`], [`Error::Fault`] (a
    /// mapping with [`crate::MapFlags::DONT_EXPAND`] cannot grow), [`Error::LockLimit`],
    /// [`Error::LimitReached`], [`Error::BelowMinimum`], [`Error::NoRoom`],
    /// [`Error::Overcommitted`], [`Error::OutOfMemory`]. An error changes nothing, with three
    /// exceptions, as on Linux: mappings at a destination that the caller chose may be unmapped; so
    /// may the tail that a smaller length cuts off a mapping that was to move there; and some of
    /// several mappings may have moved. If memory runs out, only the third can happen, unless a
    /// fault in the source takes the memory while the call runs.
    pub fn mremap(
        &self,
        old: VirtAddr,
        old_length: u64,
        new_length: u64,
        remap: Remap,
    ) -> Result<VirtAddr, Error> {
        let plan = RemapPlan::new::<P::Arch>(old, old_length, new_length, remap)?;
        populated(self, self.deliver_after(|notices| remap_mappings(self, &plan, notices)))
    }

    /// As [`AddressSpace::mremap`], up to the waits: the steps of the [`Populate`], which do not
    /// fail, map the pages of a locked mapping's new part. They follow the steps of the
    /// [`PendingEvents`], which tell userfaultfds of mappings that were moved and unmapped, even if
    /// the call has failed after that.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::mremap`].
    ///
    /// # Errors
    /// As [`AddressSpace::mremap`].
    pub fn begin_mremap(
        &self,
        old: VirtAddr,
        old_length: u64,
        new_length: u64,
        remap: Remap,
    ) -> (Result<(VirtAddr, Populate), Error>, PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| {
            let plan = RemapPlan::new::<P::Arch>(old, old_length, new_length, remap)?;
            remap_mappings(self, &plan, notices)
        })
    }
}

/// Remaps. The caller has to populate the new part of a locked mapping.
fn remap_mappings<P: Platform>(
    space: &AddressSpace<'_, P>,
    plan: &RemapPlan,
    notices: &mut Notices,
) -> Result<(VirtAddr, Populate), Error> {
    let mut call = RemapCall::new(space.page_table.memory, *plan);
    let result = space.operate_with_reclaim_untold(notices, |op| call.remap_range(op, plan));
    // A failure to populate the locked pages is ignored, as on Linux.
    result.map(|at| (at, call.grown.map_or(Populate::default(), Populate::as_possible)))
}

impl<'m, P: Platform> RemapCall<'m, P> {
    /// One attempt at the whole call. If it fails for lack of memory, nothing has changed except
    /// what the call records.
    fn remap_range(
        &mut self,
        op: &mut Op<'_, 'm, P>,
        whole: &RemapPlan,
    ) -> Result<VirtAddr, Failure> {
        self.grown = None;
        if whole.remap.target().is_some() {
            // Checked before any lookup, as on Linux: source and destination may each be split.
            op.vmas.room_for(6)?;
        }
        if let Some(target) = whole.moves_all() {
            return self.move_all(op, whole, target);
        }
        let old = whole.source.start();
        let vma = op.vmas.at(old).ok_or(Error::NotMapped(old))?;
        self.remap_one(op, vma)
    }

    /// Moves all mappings of the range, each by the same distance.
    fn move_all(
        &mut self,
        op: &mut Op<'_, 'm, P>,
        whole: &RemapPlan,
        target: VirtAddr,
    ) -> Result<VirtAddr, Failure> {
        let (old, end) = (whole.source.start(), whole.source.end().0);
        // An attempt that failed for lack of memory has moved the mappings before the failing one.
        let mut at = self.moved_to;
        let mut seen = at > old.0;
        while let Some(vma) = op.vmas.first_ending_after(at).filter(|vma| vma.start() < end) {
            if !seen && vma.start() > at {
                break;
            }
            // A mapping with a userfaultfd can only be moved by itself, as on Linux.
            let is_served = vma.flags().intersects(MappingFlags::USERFAULT);
            if is_served && (seen || vma.end() < end) {
                return Err(Error::CrossesMapping { end: VirtAddr(vma.end()) }.into());
            }
            seen = true;
            let source = VirtRange::raw(at.max(vma.start()), end.min(vma.end()));
            let to = VirtAddr(target.0 + (source.start().0 - old.0));
            self.plan = whole.part(source, to);
            self.remap_one(op, vma)?;
            at = source.end().0;
            self.moved_to = at;
            if at >= end {
                break;
            }
        }
        if seen { Ok(target) } else { Err(Error::NotMapped(old).into()) }
    }

    /// Resizes or moves the source range, a part of `vma`.
    fn remap_one<'op>(
        &mut self,
        op: &mut Op<'op, 'm, P>,
        vma: &'op Vma,
    ) -> Result<VirtAddr, Failure> {
        let RemapPlan { source, tail, .. } = self.plan;
        let next = || op.vmas.next(vma).map_or(P::Arch::USER_END, Vma::start);
        let moves = self.plan.moves(VirtAddr(vma.end()), vma.flags(), next)?;
        if self.plan.added() > 0 {
            may_grow(op, vma, &self.plan)?;
        }
        if !moves {
            if !tail.is_empty() {
                unmap(op, unmap_range::<P>(tail.start(), tail.len())?)?;
            }
            if self.plan.added() > 0 {
                grow(op, self, vma)?;
            }
            return Ok(source.start());
        }
        let mut replaces = false;
        if let Some(target) = self.plan.fixed_target() {
            let minimum = op.vmas.minimum();
            if target.start() < minimum {
                return Err(Error::BelowMinimum { minimum }.into());
            }
            vma.may_be_moved(source, target.start())?;
            replaces = op.vmas.first_in(target).is_some();
        }
        if replaces || !tail.is_empty() {
            self.move_over(op, vma)
        } else {
            self.move_to_free(op, vma)
        }
    }

    /// Moves the source after unmapping the tail or the mappings in the target. All memory is
    /// allocated before that. Otherwise:
    /// 1. CPU A unmaps the target, finds no memory for a table, and releases the mutex;
    /// 2. CPU B maps memory at the target and returns;
    /// 3. CPU A retries, and unmaps CPU B's mapping.
    #[cold]
    fn move_over(&mut self, op: &mut Op<'_, 'm, P>, vma: &Vma) -> Result<VirtAddr, Failure> {
        let supplied = self.supply(op, vma);
        let done = match supplied {
            Ok(()) => self.move_supplied(op),
            Err(error) => Err(error.into()),
        };
        self.free_supplies(op);
        // The supplies are insufficient if a concurrent fault has mapped more of the source.
        if supplied.is_ok() { done.map_err(Failure::without_second_attempt) } else { done }
    }

    fn move_supplied(&mut self, op: &mut Op<'_, 'm, P>) -> Result<VirtAddr, Failure> {
        let RemapPlan { source, tail, .. } = self.plan;
        // In Linux's order: unmaps the target before any later check can fail.
        if let Some(target) = self.plan.fixed_target() {
            self.unmap_next(op, target)?;
            op.edit.flush();
        }
        if !tail.is_empty() {
            unmap_range::<P>(tail.start(), tail.len())?;
            self.unmap_next(op, tail)?;
        }
        // The target or the tail may have belonged to the same VMA, which is now shorter.
        let vma = op.vmas.at(source.start()).ok_or(Error::NotMapped(source.start()))?;
        self.move_to_free(op, vma)
    }

    /// Unmaps the mappings in `range` with the first of the supplies.
    fn unmap_next(&mut self, op: &mut Op<'_, 'm, P>, range: VirtRange) -> Result<(), Failure> {
        let Some(first) = op.vmas.first_in(range) else { return Ok(()) };
        may_unmap(*op.vmas, range, first)?;
        let unmapping = self.unmappings.pop_at(0).unwrap_or_default();
        Ok(unmap_supplied(op, range, unmapping)?)
    }

    /// Moves the source to the requested destination, which is free by then.
    fn move_to_free<'op>(
        &mut self,
        op: &mut Op<'op, 'm, P>,
        vma: &'op Vma,
    ) -> Result<VirtAddr, Failure> {
        let RemapPlan { source, length, remap, .. } = self.plan;
        let target = match remap {
            Remap::To(at) | Remap::LeaveTo(at) => VirtRange::raw(at.0, at.0 + length),
            Remap::Leave(near) if near.0 != 0 => {
                op.vmas.find_place(length, Place::Near(near), Alignment::PAGE)?
            }
            Remap::InPlace => return Err(Error::NoRoom.into()),
            Remap::MayMove | Remap::Leave(_) => {
                if remap == Remap::MayMove {
                    op.vmas.room_for(4)?;
                }
                congruent_place(*op.vmas, source, length).ok_or(Error::NoRoom)?
            }
        };
        if self.plan.fixed_target().is_none() {
            vma.may_be_moved(source, target.start())?;
        }
        if remap.keeps_source() {
            // The mappings that the target replaces are not subtracted: Linux counts before it
            // unmaps.
            op.vmas.account().may_expand(vma.flags(), source.pages())?;
        }
        move_vma(op, self, vma, target)
    }
}

/// Whether the limits allow the additional pages of the mapping.
fn may_grow<P: Platform>(op: &Op<'_, '_, P>, vma: &Vma, plan: &RemapPlan) -> Result<(), Error> {
    let end = vma.page_offset_of(plan.source.start()).checked_add(plan.length >> PAGE_SHIFT);
    if end.is_none_or(|end| end > FolioIndex::END) {
        return Err(Error::Invalid);
    }
    if vma.has(MappingFlags::DONT_EXPAND) {
        return Err(Error::Fault(plan.source.end()));
    }
    let added = plan.added() >> PAGE_SHIFT;
    if vma.has(MappingFlags::LOCKED) {
        op.vmas.account().may_lock(added)?;
    }
    op.vmas.account().may_expand(vma.flags(), added)
}

/// Extends the mapping into the free addresses above it.
fn grow<'op, 'm, P: Platform>(
    op: &mut Op<'op, 'm, P>,
    call: &mut RemapCall<'m, P>,
    vma: &'op Vma,
) -> Result<(), Failure> {
    let plan = &call.plan;
    let locked = vma.has(MappingFlags::LOCKED) && !vma.has(MappingFlags::LOCK_ON_FAULT);
    let accounted = vma.has(MappingFlags::ACCOUNT);
    let committed = if accounted { plan.added() >> PAGE_SHIFT } else { 0 };
    op.vmas.commit(committed)?;
    let end = plan.source.start().0 + plan.length;
    let held = vma.lock_write(op.platform());
    op.vmas.resize(&held, vma.start(), end);
    drop(held);
    op.vmas.merge_around(vma);
    if locked {
        call.grown = Some(VirtRange::raw(plan.source.end().0, end));
    }
    Ok(())
}
