//! [`TagWord`]: the states of 64 tags, one bit each in three words.

use core::ops::RangeInclusive;

use crate::atomic::{AtomicU64, Ordering, constructor};
use crate::rule::{self, Rule};

/// The memory of 64 tags in [`Tags`](super::Tags), half a cache line.
///
/// ```
/// use bindery_parts::TagWord;
///
/// static WORDS: [TagWord; 4] = [const { TagWord::new() }; 4];
/// assert_eq!(size_of_val(&WORDS), 4 * 32);
/// ```
#[repr(align(32))]
#[derive(Debug)]
pub struct TagWord {
    /// The tags that are not free.
    taken: AtomicU64,
    /// Those of them whose address spaces have ended.
    retired: AtomicU64,
    /// Those that the thread that collects is about to free.
    collected: AtomicU64,
}

impl TagWord {
    constructor! {
        /// 64 free tags.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self {
                taken: AtomicU64::new(0),
                retired: AtomicU64::new(0),
                collected: AtomicU64::new(0),
            }
        }
    }

    /// Takes the tags of a range, where the word's first tag has the number `first`. Returns the
    /// number of those that were free.
    pub(super) fn reserve(&self, first: u32, tags: &RangeInclusive<u16>) -> u32 {
        let is_inside = |bit: &u32| u16::try_from(first + bit).is_ok_and(|tag| tags.contains(&tag));
        let bits = (0..64).filter(is_inside).fold(0, |bits, bit| bits | 1 << bit);
        (bits & !self.taken.fetch_or(bits, Ordering::Relaxed)).count_ones()
    }

    /// Takes a free tag. In the first word, tag 0 is never free.
    pub(super) fn take(&self, is_first: bool) -> Option<u16> {
        let mut taken = self.taken.load(Ordering::Relaxed);
        loop {
            let free = !(taken | u64::from(is_first));
            if free == 0 {
                return None;
            }
            let bit = free & free.wrapping_neg();
            match self.exchange(taken, taken | bit) {
                Ok(_) => return Some(bit.trailing_zeros() as u16),
                Err(now) => taken = now,
            }
        }
    }

    fn exchange(&self, taken: u64, more: u64) -> Result<u64, u64> {
        if !rule::holds(Rule::TakeTagInOneStep) {
            self.taken.store(more, Ordering::Relaxed);
            return Ok(taken);
        }
        let order = rule::order(Rule::AcquireFree, Ordering::Acquire);
        self.taken.compare_exchange(taken, more, order, Ordering::Relaxed)
    }

    pub(super) fn retire(&self, bit: u16) {
        let order = rule::order(Rule::ReleaseRetired, Ordering::Release);
        self.retired.fetch_or(1 << bit, order);
    }

    /// Only the thread that collects calls this and [`TagWord::free_collected`].
    pub(super) fn collect(&self) {
        let order = rule::order(Rule::AcquireRetired, Ordering::Acquire);
        let retired = self.retired.swap(0, order);
        self.collected.store(retired, Ordering::Relaxed);
    }

    pub(super) fn free_collected(&self) {
        let collected = self.collected.load(Ordering::Relaxed);
        if collected != 0 {
            let order = rule::order(Rule::ReleaseFree, Ordering::Release);
            self.taken.fetch_and(!collected, order);
        }
    }

    pub(super) fn retired(&self) -> usize {
        self.retired.load(Ordering::Relaxed).count_ones() as usize
    }

    pub(super) fn in_use(&self) -> usize {
        self.taken.load(Ordering::Relaxed).count_ones() as usize
    }
}

impl Default for TagWord {
    fn default() -> Self {
        Self::new()
    }
}
