//! What the embedder brings: [`Platform`], about a dozen functions.
//!
//! The core never executes an instruction that only one architecture has; whatever needs one is
//! asked for here. `bindery-hosted` implements the trait on top of a process, a kernel on top of
//! the bare machine.

use core::ptr::NonNull;

use lock_api::RawMutex;

use crate::addr::{Frame, VirtRange};
use crate::arch::Arch;

/// The number of a CPU, from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Cpu(pub u16);

/// How many CPUs the core can address: [`Cpu`] numbers are below this.
pub const MAX_CPUS: usize = 256;

/// A set of CPUs, one bit each.
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

/// What the TLBs must forget of one address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidation {
    /// The addresses whose translations have changed.
    pub range: VirtRange,
    /// The smallest distance in bytes between two translations in the range: a platform that
    /// invalidates address by address may step so far. Always a leaf size of the architecture.
    pub stride: u64,
    /// Whether entries that name tables changed too, so that cached intermediate entries (x86-64:
    /// paging-structure caches; AArch64: walk caches) must go as well.
    pub tables: Tables,
}

/// Whether cached intermediate entries are concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tables {
    /// Only leaves changed (AArch64: last-level invalidation will do).
    Unchanged,
    /// Tables were moved or removed.
    Changed,
}

/// What a waiter waits for, so that an embedder may choose how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// A lock that is held for a bounded stretch of entries, with preemption off: spin.
    Short,
    /// A fault or a system call of another thread: the scheduler may run somebody else.
    Long,
}

/// The machine under the core.
///
/// # Safety
///
/// The implementor promises:
///
/// 1. **Window.** [`Platform::window`] returns, for every frame in the ranges that were handed to
///    [`crate::Memory::new`], a pointer at which the frame's 4,096 bytes can be read and written
///    for as long as the platform lives; different frames never overlap, and the pointers of
///    consecutive frames in one range are consecutive multiples of 4,096. Nothing else uses those bytes but user
///    programs through the tables that the core builds, and the MMU.
/// 2. **Invalidation.** When [`Platform::invalidate`] returns, no CPU in the set uses or holds a
///    translation (with [`Tables::Changed`], nor an intermediate entry) that it read before the
///    call for an address in the range, and all accesses through such translations are finished.
///    When [`Platform::invalidate_kernel`] returns, the same holds of every CPU that runs; one that
///    comes up later counts as running from before it loads the kernel's tables.
/// 3. **Read sections.** [`Platform::synchronize`] returns only after every read section that was
///    entered before the call has been left.
/// 4. **CPUs.** [`Platform::cpu`] returns the CPU that the caller runs on, below [`MAX_CPUS`].
/// 5. **Locks.** The two lock types provide mutual exclusion.
pub unsafe trait Platform: Sized + Send + Sync + 'static {
    /// The architecture whose tables the MMU walks.
    type Arch: Arch;

    /// A lock that may be held for long; a waiter may sleep. Never taken in interrupt context.
    type Mutex: RawMutex + Send + Sync;

    /// A lock that is held for a few hundred instructions; a waiter spins. Where the core is
    /// called from interrupt handlers, acquiring it must disable interrupts.
    type SpinLock: RawMutex + Send + Sync;

    /// Where the core reads and writes `frame` (the "direct map"). Constant time.
    fn window(&self, frame: Frame) -> NonNull<u8>;

    /// Fills `count` consecutive frames with zeroes, by the machine's fastest means. A release
    /// fence of the caller orders it before later stores; where the means are not ordered so
    /// (non-temporal stores), the platform orders them.
    fn zero(&self, first: Frame, count: u32);

    /// Copies `count` consecutive frames from `from` to `to`; the two do not overlap. Ordered as
    /// [`Platform::zero`].
    fn copy(&self, from: Frame, to: Frame, count: u32);

    /// Makes the CPUs in `cpus` (the caller's among them, or not) forget translations of the
    /// address space whose root table is `root`, and waits until they have. The entries were
    /// written before the call. Called with table locks held: it must not wait for anything but
    /// the other CPUs' hardware or interrupt handlers, and those CPUs may be spinning in
    /// [`Platform::relax`] for one of these locks. So either they spin with interrupts on (verbs
    /// and faults are entered so), or `relax` serves invalidations.
    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation);

    /// As [`Platform::invalidate`], on the caller's CPU alone and for a fault that turned out to
    /// have a valid entry: the CPU remembered an older, narrower one. [`crate::KernelMap::resolve`]
    /// asks with its own root, about entries that are global (RISC-V: no ASID in the fence).
    fn invalidate_local(&self, root: Frame, what: &Invalidation);

    /// Makes every CPU of the machine forget translations of the kernel's addresses in the range,
    /// whichever root and whichever ASID or PCID it has loaded, and waits until they have. `root`
    /// is [`crate::KernelMap::root`]. The entries were written before the call.
    ///
    /// It may be called with interrupts off (inside a lock of type [`Platform::SpinLock`], which no
    /// CPU waits for otherwise than by [`Platform::relax`]). So while it waits, for its turn or for
    /// answers, it answers the invalidations of others itself; and so does `relax`, if
    /// [`crate::KernelMap::resolve`] is called with interrupts off:
    /// 1. CPU A, interrupts off, waits until B has invalidated;
    /// 2. B, interrupts off, waits for A, to invalidate something else or for a pause of A's to end.
    ///
    /// Only asked by [`crate::KernelMap`]: a platform that makes none need do nothing.
    fn invalidate_kernel(&self, root: Frame, what: &Invalidation);

    /// Makes entry writes visible to the walkers of all CPUs before any later access or walk of
    /// the caller (AArch64: `dsb ishst; isb`; x86-64: nothing).
    fn publish_entries(&self);

    /// The CPU that the caller runs on. Only asked while it cannot change: inside a read section.
    fn cpu(&self) -> Cpu;

    /// Called again and again by a waiter.
    fn relax(&self, wait: Wait);

    /// Begins a read section: until the matching [`Platform::leave_read`], no table or VMA that
    /// the caller can reach is freed. Nests. A section never sleeps; a kernel disables
    /// preemption.
    fn enter_read(&self);

    /// Ends a read section.
    fn leave_read(&self);

    /// Waits until all read sections that exist now are left. Never called inside one.
    fn synchronize(&self);

    /// A table whose upper half every new root copies, so that the kernel is mapped in every
    /// address space; `None` where kernel and user have separate roots (AArch64) or the kernel
    /// is not mapped at all (a hosted machine).
    fn kernel_root(&self) -> Option<Frame> {
        None
    }

    /// Told when frames return to the allocator; a checking platform looks whether a TLB still
    /// holds them. Does nothing by default.
    fn frames_released(&self, _first: Frame, _count: u32) {}

    /// Told before an allocation that may wait for memory: no table lock and no read section is
    /// held, while VMAs and the mutex of an address space may be. A checking platform looks whether
    /// that is so. Does nothing by default.
    fn allocation_may_wait(&self) {}

    /// Called each time the core has released the lock of a page table, inside a read section. A
    /// test holds the CPU here while another call runs. Does nothing by default.
    #[cfg(any(test, feature = "testing"))]
    fn table_unlocked(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_cpus_yields_what_was_put_in_and_no_more() {
        let mut set = CpuSet::EMPTY;
        for cpu in [0, 63, 64, 200, 255, 256, 9999] {
            set.insert(Cpu(cpu));
        }
        assert!(set.iter().eq([0, 63, 64, 200, 255].map(Cpu)));
        assert!(set.contains(Cpu(64)) && !set.contains(Cpu(65)) && !set.contains(Cpu(256)));
        assert!(CpuSet::EMPTY.is_empty() && !set.is_empty());
    }
}
