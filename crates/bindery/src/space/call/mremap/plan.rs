//! The decision of a call: its request is checked, and planned for one mapping.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::Error;
use crate::vma::MappingFlags;

use super::Remap;

/// A call, or the part of a call that concerns one mapping.
#[derive(Clone, Copy)]
pub(super) struct RemapRequest {
    pub(super) old: VirtAddr,
    /// In whole pages, as the new one.
    pub(super) old_length: u64,
    pub(super) length: u64,
    pub(super) remap: Remap,
}

impl RemapRequest {
    /// A call with lengths in bytes. Refuses one that makes no sense whatever is mapped.
    pub(super) fn new<A: Arch>(
        old: VirtAddr,
        old_length: u64,
        length: u64,
        remap: Remap,
    ) -> Result<Self, Error> {
        if !old.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(old));
        }
        let limit = VirtAddr(A::USER_END);
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
        if remap.keeps_source() && old_length != length {
            return Err(Error::Invalid);
        }
        // The sum may wrap, as on Linux: the old range is not checked yet.
        let old_end = old.0.wrapping_add(old_length);
        if old_end > target.0 && target.0 + length > old.0 {
            return Err(Error::Overlap);
        }
        Ok(())
    }
}

/// The steps of a call for one mapping, decided before the first of them. First a
/// destination that the caller chose is unmapped, then the tail. Then the source gets the new length, in its place or at another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemapPlan {
    /// The kept part of the old range. An empty one makes a second view of a shared mapping's
    /// memory.
    pub(super) source: VirtRange,
    /// The rest of the old range, which a smaller length cuts off.
    pub(super) tail: VirtRange,
    /// In bytes, not less than the length of the source.
    pub(super) length: u64,
    /// The new mapping lies at another place, which `remap` names or forbids.
    pub(super) moves: bool,
    pub(super) remap: Remap,
}

impl RemapPlan {
    /// The plan for the mapping that contains the beginning of the request, and ends at `end`.
    /// `free_until` returns the beginning of the next mapping.
    #[inline]
    pub(super) fn new(
        request: &RemapRequest,
        end: VirtAddr,
        flags: MappingFlags,
        free_until: impl FnOnce() -> u64,
    ) -> Result<Self, Error> {
        let &RemapRequest { old, old_length, length, remap } = request;
        if flags.contains(MappingFlags::SEALED) {
            return Err(Error::Sealed(old));
        }
        let source = VirtRange::raw(old.0, old.0 + old_length.min(length));
        // The unmapping of the tail refuses an end beyond user space.
        let tail = VirtRange::raw(source.end().0, old.0.saturating_add(old_length));
        let plan = Self { source, tail, length, moves: true, remap };
        let may_stay = remap.target().is_none();
        if may_stay && length <= old_length {
            // The tail may span several mappings, and the source too.
            return Ok(Self { moves: false, ..plan });
        }
        if old_length == 0 && !flags.contains(MappingFlags::SHARED) {
            return Err(Error::NotShared);
        }
        if source.end() > end {
            return Err(Error::CrossesMapping { end });
        }
        let grows_in_place = may_stay
            && source.end() == end
            && !source.is_empty()
            && old.0.checked_add(length).is_some_and(|new_end| new_end <= free_until());
        Ok(Self { moves: !grows_in_place, ..plan })
    }

    /// The bytes by which the mapping grows.
    pub(super) fn added(&self) -> u64 {
        self.length - self.source.len()
    }

    /// The destination, if the caller chose it; mappings there are unmapped.
    pub(super) fn fixed_target(&self) -> Option<VirtRange> {
        match self.remap {
            Remap::To(target) | Remap::LeaveTo(target) => {
                Some(VirtRange::raw(target.0, target.0 + self.length))
            }
            Remap::InPlace | Remap::MayMove | Remap::Leave(_) => None,
        }
    }

    /// Nothing is unmapped at the source.
    pub(super) fn keeps_source(&self) -> bool {
        self.remap.keeps_source() || self.source.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::{RemapPlan, RemapRequest};
    use crate::Remap::{self, InPlace, Leave, MayMove, To};
    use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
    use crate::error::Error;
    use crate::vma::MappingFlags;

    const fn at(page: u64) -> VirtAddr {
        VirtAddr(page * PAGE_SIZE)
    }

    /// The plan for a mapping of pages 10 to 13, with the next mapping at page 20.
    fn plan(first: u64, lengths: [u64; 2], remap: Remap) -> Result<RemapPlan, Error> {
        plan_with(first, lengths, remap, MappingFlags::empty())
    }

    fn plan_with(
        first: u64,
        [old_pages, pages]: [u64; 2],
        remap: Remap,
        flags: MappingFlags,
    ) -> Result<RemapPlan, Error> {
        let (old_length, length) = (old_pages * PAGE_SIZE, pages * PAGE_SIZE);
        let request = RemapRequest { old: at(first), old_length, length, remap };
        RemapPlan::new(&request, at(14), flags, || at(20).0)
    }

    #[test]
    fn steps_follow_from_lengths_and_destination() {
        // The first page and the two lengths; the source's end, the tail's end, and whether it moves.
        let cases = [
            // As long as before, and shorter: the rest stays.
            ((10, [4, 4], InPlace), (14, 14, false)),
            ((10, [4, 1], MayMove), (11, 14, false)),
            ((12, [8, 1], InPlace), (13, 20, false)),
            ((12, [8, 6], InPlace), (18, 20, false)),
            // Up to the next mapping it grows where it is.
            ((10, [4, 10], InPlace), (14, 14, false)),
            ((12, [2, 8], MayMove), (14, 14, false)),
            ((10, [4, 11], MayMove), (14, 14, true)),
            // Not at the end of its mapping.
            ((10, [2, 3], MayMove), (12, 12, true)),
            // To another place, whether it need move or not.
            ((10, [4, 4], To(at(40))), (14, 14, true)),
            ((10, [4, 2], To(at(40))), (12, 14, true)),
            ((10, [4, 6], To(at(40))), (14, 14, true)),
            ((10, [4, 4], Leave(at(0))), (14, 14, true)),
        ];
        for ((first, lengths, remap), (source_end, tail_end, moves)) in cases {
            let expected = RemapPlan {
                source: VirtRange::raw(at(first).0, at(source_end).0),
                tail: VirtRange::raw(at(source_end).0, at(tail_end).0),
                length: lengths[1] * PAGE_SIZE,
                moves,
                remap,
            };
            assert_eq!(plan(first, lengths, remap), Ok(expected), "{first} {lengths:?} {remap:?}");
        }
    }

    #[test]
    fn an_empty_source_is_a_second_view_of_shared_memory() {
        assert_eq!(plan(12, [0, 2], MayMove), Err(Error::NotShared));
        let view = plan_with(13, [0, 2], MayMove, MappingFlags::SHARED);
        assert!(view.is_ok_and(|view| view.moves && view.keeps_source() && view.tail.is_empty()));
        // Empty at the very end of its mapping: nothing grows there.
        assert!(plan_with(14, [0, 2], MayMove, MappingFlags::SHARED).is_ok_and(|view| view.moves));
    }

    #[test]
    fn refusals_come_in_linux_order() {
        let crosses = Err(Error::CrossesMapping { end: at(14) });
        assert_eq!(plan(12, [3, 4], MayMove), crosses);
        assert_eq!(plan(12, [3, 3], To(at(40))), crosses);
        // Only the source must be in one mapping.
        assert!(plan(12, [9, 2], To(at(40))).is_ok());
        let sealed = MappingFlags::SEALED;
        assert_eq!(plan_with(12, [9, 2], InPlace, sealed), Err(Error::Sealed(at(12))));
        assert_eq!(plan_with(12, [0, 2], MayMove, sealed), Err(Error::Sealed(at(12))));
    }
}
