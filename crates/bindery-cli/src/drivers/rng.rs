//! Random numbers determined by a seed.

/// A generator of 64 bits of state (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator of other numbers.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// The next number.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// As [`Rng::below`], for an index.
    pub fn index(&mut self, count: usize) -> usize {
        self.below(count as u64) as usize
    }

    /// One of the values, each equally likely.
    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }

    /// True once in `times` times.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
