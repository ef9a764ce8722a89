//! `munmap(2)`.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::{Error, Failure, NoMemory};
use crate::platform::Platform;
use crate::table::zap::Flush;
use crate::userfault::Notices;
use crate::vma::{MappingFlags, Vma};
use crate::vmas::{ReservedVma, VmaView};

use crate::space::AddressSpace;
use crate::space::op::{Op, Unmappings};
use crate::space::userfault::events;
use crate::space::userfault::pending_events::PendingEvents;

/// The memory that an unmapping needs, reserved before its first change. Must be used, or passed to
/// [`UnmapSupplies::cancel`].
#[must_use]
pub(in crate::space) struct UnmapSupplies<'m, P: Platform> {
    /// The upper part of a VMA that is split.
    upper: Option<ReservedVma<'m, P>>,
    /// Notices for subscribed userfaultfds.
    notices: Notices,
}

impl<P: Platform> Default for UnmapSupplies<'_, P> {
    fn default() -> Self {
        Self { upper: None, notices: Notices::default() }
    }
}

impl<'m, P: Platform> UnmapSupplies<'m, P> {
    /// Cancels the notices; the reserved VMA frees itself.
    #[cold]
    pub(in crate::space) fn cancel(self, op: &Op<'_, 'm, P>) {
        self.notices.cancel(op.memory());
    }
}

/// Whether the VMA extends beyond the range on both sides.
fn is_inside(range: VirtRange, vma: &Vma) -> bool {
    vma.start() < range.start().0 && range.end().0 < vma.end()
}

/// The range of a call that unmaps `length` bytes (rounded up to pages) at `start`.
pub(in crate::space) fn unmap_range<P: Platform>(
    start: VirtAddr,
    length: u64,
) -> Result<VirtRange, Error> {
    if !start.is_aligned(PAGE_SIZE) {
        return Err(Error::Unaligned(start));
    }
    let limit = VirtAddr(P::Arch::USER_END);
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

/// Removes all VMAs in `range` and their pages. A failure changes nothing.
pub(in crate::space) fn unmap<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
) -> Result<(), Failure> {
    let Some(first) = op.vmas.first_in(range) else { return Ok(()) };
    may_unmap(*op.vmas, range, first)?;
    let supplies = supply_unmapping(op, range, first)?;
    Ok(unmap_supplied(op, range, supplies)?)
}

/// Fails if a VMA in `range` may not be unmapped. `first` is the first VMA in the range.
pub(in crate::space) fn may_unmap<'op, P: Platform>(
    vmas: VmaView<'op, P>,
    range: VirtRange,
    first: &'op Vma,
) -> Result<(), Error> {
    let mut unmapped = vmas.overlapping_from(Some(first), range);
    let may_refuse =
        |vma: &&Vma| vma.flags().intersects(MappingFlags::SEALED | MappingFlags::FRAMES);
    while let Some(vma) = unmapped.find(may_refuse) {
        if vma.has(MappingFlags::SEALED) {
            return Err(Error::Sealed(VirtAddr(vma.start())));
        }
        vma.may_be_cut(range)?;
    }
    if is_inside(range, first) { vmas.room_for(1) } else { Ok(()) }
}

/// Allocates the memory for unmapping `range`, whose first VMA is `first`. A failure changes
/// nothing.
pub(in crate::space) fn supply_unmapping<'m, P: Platform>(
    op: &Op<'_, 'm, P>,
    range: VirtRange,
    first: &Vma,
) -> Result<UnmapSupplies<'m, P>, NoMemory> {
    let mut supplies = UnmapSupplies::default();
    if op.space.has_userfaults() && op.unmappings == Unmappings::Reported {
        events::prepare_unmap(op, range, &mut supplies.notices)?;
    }
    if is_inside(range, first) {
        match op.vmas.reserve() {
            Ok(upper) => supplies.upper = Some(upper),
            Err(error) => {
                supplies.cancel(op);
                return Err(error);
            }
        }
    }
    Ok(supplies)
}

/// As [`unmap`], with memory reserved for the range. The caller has checked that the range may be
/// unmapped.
pub(in crate::space) fn unmap_supplied<'m, P: Platform>(
    op: &mut Op<'_, 'm, P>,
    range: VirtRange,
    supplies: UnmapSupplies<'m, P>,
) -> Result<(), NoMemory> {
    op.notices.append(supplies.notices);
    let first = op.vmas.first_ending_after(range.start().0);
    if let Some(upper) = supplies.upper {
        // The caller may have unmapped a part of the range since, so a split may no longer be
        // needed.
        if let Some(first) = first.filter(|first| is_inside(range, first)) {
            op.vmas.split_in(first, range.end(), upper);
        }
    }
    op.note_resident();
    let freeable = op.vmas.freeable(range, first, VirtRange::default());
    let Op { vmas, edit, .. } = op;
    // Zapping fails only if a huge leaf lacks its deposit and cannot be split. Such a state breaks
    // an invariant, and the auditor reports it. The remaining pages stay in the table.
    let mut zapped = Ok(());
    let cut =
        vmas.cut_out(range, first, || zapped = edit.zap(range, freeable, Flush::BeforeUnlock));
    if cut {
        edit.uncharge_before_unlock();
    }
    zapped
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Unmaps `length` bytes (rounded up to pages) at `start`. Mappings that extend beyond the
    /// range keep the rest. A range without mappings is not an error.
    ///
    /// Context: may sleep. Complexity: linear in the number of removed mappings and tables, and in
    /// the number of runs in the two tables at the edges that other mappings keep. One invalidation
    /// per 1,024 entries of the kept tables or per 512 of the removed tables, usually one in all,
    /// and one for each contiguous run or huge leaf that an end of the range divides.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Sealed`];
    /// [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping must be split and the
    /// second part exceeds the limit or the memory. An error changes nothing.
    pub fn munmap(&self, start: VirtAddr, length: u64) -> Result<(), Error> {
        let range = unmap_range::<P>(start, length)?;
        self.operate_with_reclaim(|op| unmap(op, range))
    }

    /// As [`AddressSpace::munmap`], up to the waits: the steps of the [`PendingEvents`] wait until
    /// the userfaultfds of the range have heard of the unmapping, whose result is final.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::munmap`].
    pub fn begin_munmap(
        &self,
        start: VirtAddr,
        length: u64,
    ) -> (Result<(), Error>, PendingEvents<'m, P>) {
        PendingEvents::of(self, |notices| {
            let range = unmap_range::<P>(start, length)?;
            self.operate_with_reclaim_untold(notices, |op| unmap(op, range))
        })
    }
}
