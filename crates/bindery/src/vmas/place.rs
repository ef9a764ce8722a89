//! The search for the address of a new mapping: the requested place, or the highest gap that fits.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::collections::range_skip_list::GapShape;
use crate::error::Error;
use crate::platform::Platform;

use crate::vma::{MappingFlags, Vma};

use super::{STACK_GUARD_GAP, VmaView};

/// The requested address of a mapping.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, MapRequest, Place, Platform};
///
/// /// Reserves a range, or fails if something is mapped there.
/// fn reserve<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Result<VirtAddr, Error> {
///     let place = Place::FixedNoReplace(at);
///     space.mmap(&MapRequest { length: 1 << 20, place, ..MapRequest::default() })
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Place {
    /// Any free address.
    #[default]
    Anywhere,
    /// This address if it is free (rounded down to a page, or up to the lowest address that may be
    /// mapped), else any. Null means any.
    Near(VirtAddr),
    /// Exactly this address; existing mappings there are unmapped (`MAP_FIXED`).
    Fixed(VirtAddr),
    /// Exactly this address, or none (`MAP_FIXED_NOREPLACE`).
    FixedNoReplace(VirtAddr),
}

/// The preferred addresses of a new mapping: those `congruent` bytes after a multiple of `align`, a
/// power of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Alignment {
    pub(crate) align: u64,
    pub(crate) congruent: u64,
}

impl Alignment {
    /// Any page.
    pub(crate) const PAGE: Self = Self::to(PAGE_SIZE);

    /// The multiples of `align`.
    pub(crate) const fn to(align: u64) -> Self {
        Self { align, congruent: 0 }
    }
}

impl<P: Platform> VmaView<'_, P> {
    /// The range of a new mapping. If any address is acceptable, prefers those of `preferred`.
    pub(crate) fn find_place(
        self,
        length: u64,
        place: Place,
        preferred: Alignment,
    ) -> Result<VirtRange, Error> {
        match place {
            Place::Fixed(start) => self.fixed_range(start, length),
            Place::FixedNoReplace(start) => {
                let range = self.fixed_range(start, length)?;
                match self.first_ending_after(start.0) {
                    Some(vma) if vma.start() < range.end().0 => {
                        Err(Error::Exists(VirtAddr(vma.start().max(start.0))))
                    }
                    _ => Ok(range),
                }
            }
            Place::Near(hint) if hint.0 < PAGE_SIZE => self.free_range(length, preferred),
            Place::Near(hint) => {
                // A hint below the minimum means the lowest possible address, as on Linux.
                let start = hint.align_down(PAGE_SIZE).max(self.lowest());
                if let Ok(range) = self.fixed_range(start, length) {
                    let next = self.first_ending_after(start.0);
                    if next.is_none_or(|vma| vma.start() >= range.end().0)
                        && guard_gap_over(range, next).is_none()
                    {
                        return Ok(range);
                    }
                }
                self.free_range(length, preferred)
            }
            Place::Anywhere => self.free_range(length, preferred),
        }
    }

    /// The range at a fixed address; `length` is at most the limit. The checks run in Linux's
    /// order.
    fn fixed_range(self, start: VirtAddr, length: u64) -> Result<VirtRange, Error> {
        let limit = VirtAddr(P::Arch::USER_END);
        if start.0 > limit.0 - length {
            return Err(Error::OutOfRange { limit });
        }
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        let minimum = self.vmas.minimum;
        if start < minimum {
            return Err(Error::BelowMinimum { minimum });
        }
        Ok(VirtRange::raw(start.0, start.0 + length))
    }

    /// The lowest address that the search may choose. Never null, even if null may be mapped.
    fn lowest(self) -> VirtAddr {
        let minimum = self.vmas.minimum.0.max(PAGE_SIZE);
        VirtAddr(minimum.checked_next_multiple_of(PAGE_SIZE).unwrap_or(minimum))
    }

    fn free_range(self, length: u64, preferred: Alignment) -> Result<VirtRange, Error> {
        let Alignment { mut align, congruent } = preferred;
        if length >= P::Arch::PMD.span() && congruent == 0 {
            align = align.max(P::Arch::PMD.span());
        }
        let search = || self.find_free(length, align, congruent);
        let aligned = (align > PAGE_SIZE).then(search).flatten();
        aligned.or_else(|| self.find_free(length, PAGE_SIZE, 0)).ok_or(Error::NoRoom)
    }

    /// The highest free range of `length` bytes below the top that begins `congruent` bytes after
    /// a multiple of `align`. If there is none, and the embedder has set the top, the lowest range
    /// anywhere, as on Linux.
    pub(crate) fn find_free(self, length: u64, align: u64, congruent: u64) -> Option<VirtRange> {
        let shape = GapShape { len: length, align, congruent };
        let low = self.lowest().0;
        let mut high = self.vmas.search_top();
        while let Some(start) = self.vmas.index.find_gap_top_down(shape, low, high) {
            let range = VirtRange::from_len(VirtAddr(start), length)?;
            match guard_gap_over(range, self.first_ending_after(range.end().0 - 1)) {
                Some(gap) => high = gap.min(range.end().0 - 1),
                None => return Some(range),
            }
        }
        self.vmas.search_top?;
        let mut low = low;
        loop {
            let start = self.vmas.index.find_gap_bottom_up(shape, low, P::Arch::USER_END)?;
            let range = VirtRange::from_len(VirtAddr(start), length)?;
            let next = self.first_ending_after(range.end().0 - 1);
            if guard_gap_over(range, next).is_none() {
                return Some(range);
            }
            // The range lies directly below a stack, so only ranges above the stack are left.
            low = next?.end();
        }
    }
}

/// The start of the guard gap of `next`, the first VMA above the free `range`, if that VMA grows
/// down and the range reaches into the gap.
fn guard_gap_over(range: VirtRange, next: Option<&Vma>) -> Option<u64> {
    let next = next?;
    let gap = next.start().saturating_sub(STACK_GUARD_GAP);
    (next.has(MappingFlags::GROWS_DOWN) && range.end().0 > gap).then_some(gap)
}
