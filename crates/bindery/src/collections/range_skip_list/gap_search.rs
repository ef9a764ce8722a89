//! The request of a search for free addresses, and its match with a gap.

/// The criteria of a search for a gap.
pub(crate) struct Wanted {
    pub(crate) len: u64,
    align: u64,
    congruent: u64,
    pub(crate) low: u64,
    /// The highest address that leaves room for the length.
    pub(crate) last: u64,
}

impl Wanted {
    /// `None` if the bounds leave no room.
    pub(crate) fn new(len: u64, align: u64, congruent: u64, low: u64, high: u64) -> Option<Self> {
        debug_assert!(align.is_power_of_two() && congruent < align);
        let last = high.checked_sub(len)?;
        (len > 0 && low <= last).then_some(Self { len, align, congruent, low, last })
    }

    /// The first and the last address in a gap that leave room, without regard to alignment.
    fn clip(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        let first = u64::max(from, self.low);
        let last = u64::min(to.checked_sub(self.len)?, self.last);
        (first <= last).then_some((first, last))
    }

    /// The highest matching address in the gap `from..to`.
    pub(crate) fn highest_in(&self, from: u64, to: u64) -> Option<u64> {
        let (first, last) = self.clip(from, to)?;
        let excess = last.wrapping_sub(self.congruent) & (self.align - 1);
        (excess <= last - first).then(|| last - excess)
    }

    /// The lowest matching address in the gap `from..to`.
    pub(crate) fn lowest_in(&self, from: u64, to: u64) -> Option<u64> {
        let (first, last) = self.clip(from, to)?;
        let missing = self.congruent.wrapping_sub(first) & (self.align - 1);
        (missing <= last - first).then(|| first + missing)
    }
}
