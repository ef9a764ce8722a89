//! CPUs by number, and sets of them.

/// A CPU's number, from 0.
///
/// ```
/// use bindery::platform::{Cpu, MAX_CPUS};
///
/// let boot = Cpu(0);
/// assert!(usize::from(boot.0) < MAX_CPUS);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Cpu(pub u16);

/// The number of CPUs that the core can address: [`Cpu`] numbers are below this.
pub const MAX_CPUS: usize = 256;

/// A set of CPUs, one bit each.
///
/// ```
/// use bindery::platform::{Cpu, CpuSet};
///
/// let mut cpus = CpuSet::default();
/// cpus.insert(Cpu(3));
/// assert!(cpus.contains(Cpu(3)) && cpus.iter().eq([Cpu(3)]));
/// ```
///
/// # Context
/// Context: any.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuSet {
    bits: [u64; MAX_CPUS / 64],
}

impl CpuSet {
    /// No CPU.
    pub const EMPTY: Self = Self { bits: [0; MAX_CPUS / 64] };

    pub(crate) const fn from_bits(bits: [u64; MAX_CPUS / 64]) -> Self {
        Self { bits }
    }

    /// Whether no CPU is in the set.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|word| *word == 0)
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: Cpu) -> bool {
        let cpu = usize::from(cpu.0);
        cpu < MAX_CPUS && self.bits[cpu / 64] & 1 << (cpu % 64) != 0
    }

    /// Adds `cpu`; one at or above [`MAX_CPUS`] is ignored.
    pub fn insert(&mut self, cpu: Cpu) {
        let cpu = usize::from(cpu.0);
        if cpu < MAX_CPUS {
            self.bits[cpu / 64] |= 1 << (cpu % 64);
        }
    }

    /// The CPUs in the set, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = Cpu> + use<> {
        let mut left = self.bits;
        core::iter::from_fn(move || {
            let word = left.iter().position(|word| *word != 0)?;
            let bit = left[word].trailing_zeros() as usize;
            left[word] &= left[word] - 1;
            Some(Cpu((word * 64 + bit) as u16))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_cpus_yields_its_members() {
        let mut set = CpuSet::EMPTY;
        for cpu in [0, 63, 64, 200, 255, 256, 9999] {
            set.insert(Cpu(cpu));
        }
        assert!(set.iter().eq([0, 63, 64, 200, 255].map(Cpu)));
        assert!(set.contains(Cpu(64)) && !set.contains(Cpu(65)) && !set.contains(Cpu(256)));
        assert!(CpuSet::EMPTY.is_empty() && !set.is_empty());
    }
}
