//! The request of a search for free addresses, and its match with a gap.

/// The shape of free addresses: `len` bytes from an address `a` with `a % align == congruent`.
/// `align` is a power of two above `congruent`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GapShape {
    pub(crate) len: u64,
    pub(crate) align: u64,
    pub(crate) congruent: u64,
}

impl GapShape {
    /// Whether each gap with room for this shape has room for `other`.
    pub(crate) fn covers(self, other: Self) -> bool {
        (self.align, self.congruent) == (other.align, other.congruent) && self.len >= other.len
    }

    /// The highest matching address among those from `first` to `last`.
    fn highest_in(self, first: u64, last: u64) -> Option<u64> {
        let excess = last.wrapping_sub(self.congruent) & (self.align - 1);
        (excess <= last - first).then(|| last - excess)
    }

    /// The lowest matching address among those from `first` to `last`.
    fn lowest_in(self, first: u64, last: u64) -> Option<u64> {
        let missing = self.congruent.wrapping_sub(first) & (self.align - 1);
        (missing <= last - first).then(|| first + missing)
    }
}

/// The criteria of a search for a gap.
pub(crate) struct GapRequest {
    pub(crate) shape: GapShape,
    pub(crate) low: u64,
    /// The highest address that leaves room for the length.
    pub(crate) last: u64,
}

impl GapRequest {
    /// `None` if the bounds leave no room.
    pub(crate) fn new(shape: GapShape, low: u64, high: u64) -> Option<Self> {
        let GapShape { len, align, congruent } = shape;
        debug_assert!(align.is_power_of_two() && congruent < align);
        let last = high.checked_sub(len)?;
        (len > 0 && low <= last).then_some(Self { shape, low, last })
    }

    /// The first and the last address in a gap that leave room, without regard to alignment.
    fn clip(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        let first = u64::max(from, self.low);
        let last = u64::min(to.checked_sub(self.shape.len)?, self.last);
        (first <= last).then_some((first, last))
    }

    /// The highest matching address in the gap `from..to`.
    pub(crate) fn highest_in(&self, from: u64, to: u64) -> Option<u64> {
        let (first, last) = self.clip(from, to)?;
        self.shape.highest_in(first, last)
    }

    /// The lowest matching address in the gap `from..to`.
    pub(crate) fn lowest_in(&self, from: u64, to: u64) -> Option<u64> {
        let (first, last) = self.clip(from, to)?;
        self.shape.lowest_in(first, last)
    }
}
