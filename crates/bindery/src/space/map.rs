//! `mmap(2)` of anonymous private memory.

use core::ptr::NonNull;

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch;
use crate::error::Error;
use crate::platform::Platform;
use crate::tlb::Gather;

use super::index::Indexed;
use super::vma::{Protection, Vma};
use super::{AddressSpace, Removed};

/// Where a mapping shall be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Place {
    /// Wherever there is room.
    #[default]
    Anywhere,
    /// There if it is free (rounded down to a page, or up to the lowest address that may be
    /// mapped), else anywhere. Null means anywhere.
    Near(VirtAddr),
    /// Exactly there; what is mapped there goes (`MAP_FIXED`).
    Fixed(VirtAddr),
    /// Exactly there, or not at all (`MAP_FIXED_NOREPLACE`).
    FixedNoReplace(VirtAddr),
}

/// A mapping that is asked for: anonymous and private.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapRequest {
    /// Length in bytes, rounded up to pages.
    pub length: u64,
    /// What the program may do with it.
    pub protection: Protection,
    /// Where it shall be.
    pub place: Place,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Maps anonymous private memory, and returns where. It reads as zeroes; frames come with the
    /// first touch. (Linux: `mmap(2)` with `MAP_PRIVATE | MAP_ANONYMOUS`.)
    ///
    /// An address that is not given is chosen downwards from the top, and a mapping of at least
    /// one table's span (2 MiB) begins at a multiple of it where there is room, so that large
    /// folios and whole-table moves fit.
    ///
    /// # Errors
    /// [`Error::ZeroLength`]; [`Error::TooLong`] and [`Error::OutOfRange`] where it would not fit
    /// into user space; [`Error::Unaligned`] for a fixed address; [`Error::BelowMinimum`];
    /// [`Error::Exists`] for [`Place::FixedNoReplace`]; [`Error::TooManyMappings`];
    /// [`Error::NoRoom`]; [`Error::OutOfMemory`]. Nothing is changed then.
    ///
    /// Complexity: logarithmic in the mappings; of what [`Place::Fixed`] replaces, as
    /// [`AddressSpace::munmap`].
    pub fn mmap(&self, request: &MapRequest) -> Result<VirtAddr, Error> {
        if request.length == 0 {
            return Err(Error::ZeroLength);
        }
        let length = request.length.checked_next_multiple_of(PAGE_SIZE).ok_or(Error::TooLong)?;
        if length > self.limit().0 {
            return Err(Error::TooLong);
        }
        let guard = self.mutex.lock();
        self.room_for(1)?;
        let range = self.find_place(length, request.place)?;
        if self.extend_neighbour(range, request.protection) {
            return Ok(range.start());
        }
        let node =
            self.new_vma(Vma::new(range, request.protection, range.start().0 >> PAGE_SHIFT))?;
        let (mut gather, mut removed) = (Gather::new(), Removed::default());
        let overlaps = |vma: &Vma| vma.start() < range.end().0;
        if self.first_behind(range.start().0).is_some_and(overlaps)
            && let Err(error) = self.unmap_locked(range, &mut gather, &mut removed)
        {
            let error = self.give_back([Some(node), None], error);
            self.flush(&mut gather);
            drop(guard);
            self.finish(gather, removed);
            return Err(error);
        }
        self.flush(&mut gather);
        self.insert(node);
        self.merge_around(self.vma(node), &mut removed);
        drop(guard);
        self.finish(gather, removed);
        Ok(range.start())
    }

    /// Lets the VMA below or above a free `range` grow over it, where it would be its continuation
    /// and does not reach a third one. Needs no memory and no grace period.
    fn extend_neighbour(&self, range: VirtRange, protection: Protection) -> bool {
        let offset = range.start().0 >> PAGE_SHIFT;
        let next = self.first_behind(range.start().0);
        if next.is_some_and(|next| next.start() < range.end().0) {
            return false;
        }
        let previous = match next {
            Some(next) => self.vmas.previous(NonNull::from(next)),
            None => self.vmas.find_at_or_before(range.start().0),
        };
        let previous = previous.map(|node| self.vma(node));
        let alike = |vma: &&Vma| vma.protection() == protection;
        let below = previous.filter(alike).filter(|vma| {
            vma.end() == range.start().0 && vma.page_offset_of(range.start()) == offset
        });
        let above = next.filter(alike).filter(|vma| {
            vma.start() == range.end().0 && vma.page_offset() == offset + range.pages()
        });
        let (vma, grow): (_, fn(&Vma, VirtRange)) = match (below, above) {
            (Some(vma), None) => (vma, |vma, range| vma.set_end(range.end().0)),
            (None, Some(vma)) => (vma, |vma, range| vma.set_start(range.start().0)),
            _ => return false,
        };
        vma.write(self.platform());
        grow(vma, range);
        self.vmas.bounds_changed(NonNull::from(vma));
        vma.end_write();
        true
    }

    fn find_place(&self, length: u64, place: Place) -> Result<VirtRange, Error> {
        match place {
            Place::Fixed(start) => self.fixed_range(start, length),
            Place::FixedNoReplace(start) => {
                let range = self.fixed_range(start, length)?;
                match self.first_behind(start.0) {
                    Some(vma) if vma.start() < range.end().0 => {
                        Err(Error::Exists(VirtAddr(vma.start().max(start.0))))
                    }
                    _ => Ok(range),
                }
            }
            Place::Near(hint) if hint.0 < PAGE_SIZE => self.free_range(length),
            Place::Near(hint) => {
                // As Linux: what lies too low is tried at the lowest address that may be.
                let start = hint.align_down(PAGE_SIZE).max(self.lowest());
                if let Ok(range) = self.fixed_range(start, length)
                    && self.first_behind(start.0).is_none_or(|vma| vma.start() >= range.end().0)
                {
                    return Ok(range);
                }
                self.free_range(length)
            }
            Place::Anywhere => self.free_range(length),
        }
    }

    /// The range at a fixed place; `length` is at most the limit. In Linux's order.
    fn fixed_range(&self, start: VirtAddr, length: u64) -> Result<VirtRange, Error> {
        let limit = self.limit();
        if start.0 > limit.0 - length {
            return Err(Error::OutOfRange { limit });
        }
        if !start.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(start));
        }
        let minimum = self.options.minimum_address;
        if start < minimum {
            return Err(Error::BelowMinimum { minimum });
        }
        Ok(VirtRange::raw(start.0, start.0 + length))
    }

    /// The lowest address that the search may choose: never null, whatever may be mapped there.
    fn lowest(&self) -> VirtAddr {
        let minimum = self.options.minimum_address.0.max(PAGE_SIZE);
        VirtAddr(minimum.checked_next_multiple_of(PAGE_SIZE).unwrap_or(minimum))
    }

    fn free_range(&self, length: u64) -> Result<VirtRange, Error> {
        let table = arch::table_span::<P::Arch>(1);
        let aligned = (length >= table).then(|| self.find_free(length, table, 0)).flatten();
        aligned.or_else(|| self.find_free(length, PAGE_SIZE, 0)).ok_or(Error::NoRoom)
    }

    /// The highest free range of `length` bytes below the top that begins `congruent` bytes behind
    /// a multiple of `align`.
    pub(super) fn find_free(&self, length: u64, align: u64, congruent: u64) -> Option<VirtRange> {
        let low = self.lowest().0;
        let high = self.search_top();
        let below = self.vmas.find_gap_top_down(length, align, congruent, low, high);
        // As Linux: when all below the chosen top is taken, what lies above is better than none.
        let start = match (below, self.options.search_top) {
            (None, Some(_)) => {
                let limit = self.limit().0;
                self.vmas.find_gap_bottom_up(length, align, congruent, high.max(low), limit)?
            }
            (below, _) => below?,
        };
        VirtRange::from_len(VirtAddr(start), length)
    }
}
