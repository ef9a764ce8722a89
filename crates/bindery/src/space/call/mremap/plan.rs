//! The decision of a call, without access to the address space: from lengths, flags and mappings to
//! a plan or an error.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::Error;
use crate::vma::MappingFlags;

use super::Remap;

/// A call, or the part of a call that concerns one mapping. The call first unmaps a destination
/// that the caller chose, then the tail. The source then gets the new length, in place or at
/// another address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemapPlan {
    /// The kept part of the old range. An empty source creates a second view of a shared mapping's
    /// memory.
    pub(super) source: VirtRange,
    /// The rest of the old range, which a smaller length cuts off.
    pub(super) tail: VirtRange,
    /// The new length in bytes, a multiple of the page size, not less than the length of the
    /// source.
    pub(super) length: u64,
    pub(super) remap: Remap,
}

impl RemapPlan {
    /// A call with lengths in bytes. Fails if the arguments are invalid whatever is mapped.
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
        if let Some(target) = remap.target() {
            if !target.is_aligned(PAGE_SIZE) {
                return Err(Error::Unaligned(target));
            }
            if target.0 > limit.0 - length {
                return Err(Error::OutOfRange { limit });
            }
            if remap.keeps_source() && old_length != length {
                return Err(Error::Invalid);
            }
            // The sum may wrap, as on Linux: the old range has not been checked yet.
            let old_end = old.0.wrapping_add(old_length);
            if old_end > target.0 && target.0 + length > old.0 {
                return Err(Error::Overlap);
            }
        }
        // No mapping starts where the sums saturate, so the call fails before it uses the ranges.
        let [source_end, tail_end] =
            [old_length.min(length), old_length].map(|length| old.0.saturating_add(length));
        let source = VirtRange::raw(old.0, source_end);
        Ok(Self { source, tail: VirtRange::raw(source_end, tail_end), length, remap })
    }

    /// Moves a range without a change of its length to exactly this address.
    pub(super) fn moves_all(&self) -> Option<VirtAddr> {
        let target = self.fixed_target()?.start();
        (self.source.len() == self.length && self.tail.is_empty()).then_some(target)
    }

    /// The part of such a call ([`RemapPlan::moves_all`]) that moves `source` to `target`.
    pub(super) fn part(&self, source: VirtRange, target: VirtAddr) -> Self {
        let remap =
            if self.remap.keeps_source() { Remap::LeaveTo(target) } else { Remap::To(target) };
        Self { source, tail: VirtRange::default(), length: source.len(), remap }
    }

    /// Whether the new mapping has a different address from the old mapping, which contains the
    /// start of the source and ends at `end`. `free_until` returns the start of the next mapping.
    #[inline]
    pub(super) fn moves(
        &self,
        end: VirtAddr,
        flags: MappingFlags,
        free_until: impl FnOnce() -> u64,
    ) -> Result<bool, Error> {
        let &Self { source, tail, length, remap } = self;
        if flags.contains(MappingFlags::SEALED) {
            return Err(Error::Sealed(source.start()));
        }
        let may_stay = remap.target().is_none();
        if may_stay && length == source.len() {
            // The tail may span several mappings, and so may the source.
            return Ok(false);
        }
        if source.is_empty() && tail.is_empty() && !flags.contains(MappingFlags::SHARED) {
            return Err(Error::NotShared);
        }
        if remap.keeps_source() && flags.contains(MappingFlags::DONT_EXPAND) {
            return Err(Error::Invalid);
        }
        if source.end() > end {
            return Err(Error::CrossesMapping { end });
        }
        let grows_in_place = may_stay
            && source.end() == end
            && !source.is_empty()
            && source.start().0.checked_add(length).is_some_and(|end| end <= free_until());
        Ok(!grows_in_place)
    }

    /// The number of bytes by which the mapping grows.
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

    /// Whether the source stays mapped.
    pub(super) fn keeps_source(&self) -> bool {
        self.remap.keeps_source() || self.source.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::RemapPlan;
    use crate::Remap::{self, InPlace, Leave, MayMove, To};
    use crate::addr::{PAGE_SIZE, VirtAddr};
    use crate::arch::X86_64;
    use crate::error::Error;
    use crate::vma::MappingFlags;

    const fn at(page: u64) -> VirtAddr {
        VirtAddr(page * PAGE_SIZE)
    }

    /// Plans a call on a mapping of pages 10 to 13; the next mapping starts at page 20. Also
    /// returns whether the mapping must move.
    fn plan(first: u64, lengths: [u64; 2], remap: Remap) -> Result<(RemapPlan, bool), Error> {
        plan_with(first, lengths, remap, MappingFlags::empty())
    }

    fn plan_with(
        first: u64,
        lengths: [u64; 2],
        remap: Remap,
        flags: MappingFlags,
    ) -> Result<(RemapPlan, bool), Error> {
        let [old_length, length] = lengths.map(|pages| pages * PAGE_SIZE);
        let plan = RemapPlan::new::<X86_64<4>>(at(first), old_length, length, remap)?;
        Ok((plan, plan.moves(at(14), flags, || at(20).0)?))
    }

    #[test]
    fn steps_follow_from_lengths_and_destination() {
        // The first page and the two lengths; the end of the source, the end of the tail, and
        // whether the mapping moves.
        let cases = [
            // As long as before, and shorter; the rest stays.
            ((10, [4, 4], InPlace), (14, 14, false)),
            ((10, [4, 1], MayMove), (11, 14, false)),
            ((12, [8, 1], InPlace), (13, 20, false)),
            ((12, [8, 6], InPlace), (18, 20, false)),
            // The mapping grows in place up to the next mapping.
            ((10, [4, 10], InPlace), (14, 14, false)),
            ((12, [2, 8], MayMove), (14, 14, false)),
            ((10, [4, 11], MayMove), (14, 14, true)),
            // The source is not at the end of its mapping.
            ((10, [2, 3], MayMove), (12, 12, true)),
            // To another place, whether or not the mapping has to move.
            ((10, [4, 4], To(at(40))), (14, 14, true)),
            ((10, [4, 2], To(at(40))), (12, 14, true)),
            ((10, [4, 6], To(at(40))), (14, 14, true)),
            ((10, [4, 4], Leave(at(0))), (14, 14, true)),
        ];
        for ((first, lengths, remap), (source_end, tail_end, moves)) in cases {
            let planned = plan(first, lengths, remap).map(|(plan, moves)| {
                let ends = [plan.source.start(), plan.source.end(), plan.tail.end()];
                (ends, plan.tail.start() == plan.source.end(), plan.length / PAGE_SIZE, moves)
            });
            let ends = [at(first), at(source_end), at(tail_end)];
            let expected = Ok((ends, true, lengths[1], moves));
            assert_eq!(planned, expected, "{first} {lengths:?} {remap:?}");
        }
    }

    #[test]
    fn an_empty_source_duplicates_shared_memory() {
        assert_eq!(plan(12, [0, 2], MayMove), Err(Error::NotShared));
        let view = plan_with(13, [0, 2], MayMove, MappingFlags::SHARED);
        assert!(
            view.is_ok_and(|(view, moves)| {
                moves && view.keeps_source() && view.tail.is_empty()
            })
        );
        // Empty at the very end of its mapping: nothing can grow there.
        assert!(plan_with(14, [0, 2], MayMove, MappingFlags::SHARED).is_ok_and(|(_, moves)| moves));
    }

    #[test]
    fn refusals_come_in_linux_order() {
        let crosses = Err(Error::CrossesMapping { end: at(14) });
        assert_eq!(plan(12, [3, 4], MayMove), crosses);
        assert_eq!(plan(12, [3, 3], To(at(40))), crosses);
        // Only the source must lie in one mapping.
        assert!(plan(12, [9, 2], To(at(40))).is_ok());
        let sealed = MappingFlags::SEALED;
        assert_eq!(plan_with(12, [9, 2], InPlace, sealed), Err(Error::Sealed(at(12))));
        assert_eq!(plan_with(12, [0, 2], MayMove, sealed), Err(Error::Sealed(at(12))));
    }

    #[test]
    fn several_mappings_move_only_at_equal_length() {
        let moves_all = |lengths, remap| plan(10, lengths, remap).unwrap().0.moves_all();
        assert_eq!(moves_all([4, 4], To(at(40))), Some(at(40)));
        assert_eq!(moves_all([4, 2], To(at(40))), None);
        assert_eq!(moves_all([4, 4], MayMove), None);
        assert_eq!(moves_all([4, 4], Leave(at(40))), None);
    }
}
