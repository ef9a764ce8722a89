//! [`CpuMask`]: a set of CPUs that CPUs change at the same time.

use bindery::platform::{Cpu, MAX_CPUS};

use crate::atomic::{AtomicU64, Ordering};

const WORDS: usize = MAX_CPUS / 64;

/// A set of CPUs, one bit each, in cache lines of its own. CPUs at or above [`MAX_CPUS`] are in no
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
        let contained = |cpu| mask.contains(Cpu(cpu), Ordering::Relaxed);
        assert!(contained(0) && contained(255) && !contained(64) && !contained(256));
    }
}
