//! [`CpuMask`]: a set of CPUs that CPUs change at the same time.

#[cfg(not(all(test, loom)))]
use bindery::platform::MAX_CPUS;
use bindery::platform::{Cpu, CpuSet};

use crate::atomic::{AtomicU64, Ordering};

#[cfg(not(all(test, loom)))]
const WORDS: usize = MAX_CPUS / 64;
#[cfg(all(test, loom))]
const WORDS: usize = 1;

/// A set of CPUs, one bit each, in cache lines of its own. CPUs at or above `MAX_CPUS` are in no
/// set.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct CpuMask {
    words: [AtomicU64; WORDS],
}

impl CpuMask {
    #[cfg(not(all(test, loom)))]
    pub(crate) const fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; WORDS] }
    }

    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self { words: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    pub(crate) fn insert(&self, cpu: Cpu, order: Ordering) {
        if let Some((word, bit)) = self.place(cpu) {
            word.fetch_or(bit, order);
        }
    }

    pub(crate) fn remove(&self, cpu: Cpu, order: Ordering) {
        if let Some((word, bit)) = self.place(cpu) {
            word.fetch_and(!bit, order);
        }
    }

    #[inline]
    pub(crate) fn contains(&self, cpu: Cpu, order: Ordering) -> bool {
        self.place(cpu).is_some_and(|(word, bit)| word.load(order) & bit != 0)
    }

    /// Whether a CPU other than `cpu` is in the set.
    #[inline]
    pub(crate) fn has_others(&self, cpu: Cpu, order: Ordering) -> bool {
        // Without a branch for each word.
        (0..WORDS).fold(0, |others, index| others | self.others_in(index, cpu, order)) != 0
    }

    /// The CPUs of the set without `cpu`.
    pub(crate) fn others(&self, cpu: Cpu, order: Ordering) -> CpuSet {
        let mut set = CpuSet::EMPTY;
        for index in 0..WORDS {
            let mut left = self.others_in(index, cpu, order);
            while left != 0 {
                set.insert(Cpu((index * 64) as u16 + left.trailing_zeros() as u16));
                left &= left - 1;
            }
        }
        set
    }

    #[inline]
    fn others_in(&self, index: usize, cpu: Cpu, order: Ordering) -> u64 {
        let own = usize::from(cpu.0);
        let bit = if index == own / 64 { 1 << (own % 64) } else { 0 };
        self.words[index].load(order) & !bit
    }

    /// The number of CPUs in the set.
    pub(crate) fn count(&self) -> usize {
        self.words.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    #[inline]
    fn place(&self, cpu: Cpu) -> Option<(&AtomicU64, u64)> {
        let cpu = usize::from(cpu.0);
        Some((self.words.get(cpu / 64)?, 1 << (cpu % 64)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn cpus_enter_and_leave_a_mask() {
        let mask = CpuMask::new();
        for cpu in [0, 63, 64, 255, 256, u16::MAX] {
            mask.insert(Cpu(cpu), Ordering::Relaxed);
        }
        assert_eq!(mask.count(), 4);
        mask.remove(Cpu(64), Ordering::Relaxed);
        assert!(mask.others(Cpu(63), Ordering::Relaxed).iter().eq([0, 255].map(Cpu)));
        assert!(mask.others(Cpu(64), Ordering::Relaxed).iter().eq([0, 63, 255].map(Cpu)));
        let alone = CpuMask::new();
        alone.insert(Cpu(200), Ordering::Relaxed);
        assert!(!alone.has_others(Cpu(200), Ordering::Relaxed));
        assert!(alone.has_others(Cpu(8), Ordering::Relaxed));
        let contained = |cpu| mask.contains(Cpu(cpu), Ordering::Relaxed);
        assert!(contained(0) && contained(255) && !contained(64) && !contained(256));
    }
}
