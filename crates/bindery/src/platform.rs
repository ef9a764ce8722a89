//! What the embedder brings: [`Platform`], about a dozen functions.
//!
//! The core never executes an instruction that only one architecture has; whatever needs one is
//! asked for here. `bindery-hosted` implements the trait on top of a process, a kernel on top of
//! the bare machine.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::addr::{Frame, VirtRange};
use crate::arch::Arch;
use crate::sync::RawLock;

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

/// A point in time from which on a grace period is counted: [`Platform::grace_period`] gives it, and
/// [`Platform::is_over`] asks after it. The number is the platform's own affair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GracePeriod(pub u64);

/// What was done in a read section, told to [`Platform::worked`].
#[cfg(any(test, feature = "measure"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Page-table entries, slots of an object's index, and VMAs that were looked at; one that is
    /// looked at twice while the same locks are held counts once.
    pub entries: u64,
    /// Page tables that were marked as detached.
    pub tables_marked: u64,
}

/// The machine under the core.
///
/// # Safety
///
/// The implementor promises:
///
/// 1. **Direct map.** [`Platform::direct_map`] returns, for every frame in the ranges that were handed to
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
///    entered before the call has been left; [`Platform::is_over`] says yes only after every read
///    section that was entered before the matching [`Platform::grace_period`] has been left.
/// 4. **CPUs.** [`Platform::cpu`] returns the CPU that the caller runs on, below [`MAX_CPUS`].
pub unsafe trait Platform: Sized + Send + Sync + 'static {
    /// The architecture whose tables the MMU walks.
    type Arch: Arch;

    /// A lock that may be held for long; a waiter may sleep. Never acquired in an interrupt handler.
    /// [`crate::sync`] has ready ones.
    type Mutex: RawLock;

    /// A lock that is held for a few hundred instructions; a waiter spins. If the core is called
    /// from interrupt handlers, acquiring it must disable interrupts
    /// ([`SpinLock`](crate::sync::SpinLock) does).
    type SpinLock: RawLock;

    /// Where the core reads and writes `frame` (the "direct map"). Constant time.
    fn direct_map(&self, frame: Frame) -> NonNull<u8>;

    /// Fills `count` consecutive frames with zeroes, by the machine's fastest means. A release
    /// fence of the caller orders it before later stores; where the means are not ordered so
    /// (non-temporal stores), the platform orders them.
    fn zero(&self, first: Frame, count: u32);

    /// Copies `count` consecutive frames from `from` to `to`; the two do not overlap. Ordered as
    /// [`Platform::zero`].
    fn copy(&self, from: Frame, to: Frame, count: u32);

    /// Reads `into.len()` bytes from `from` on, which programs may write meanwhile: by the machine's
    /// fastest means, and without a reference to them. Which of two values a byte has that is
    /// written meanwhile does not matter.
    ///
    /// The provided one goes by words, and costs a kernel a hundred times what its own instructions
    /// would (x86-64: `rep movs`; AArch64: `ldp` and `stp`).
    ///
    /// # Safety
    /// The bytes lie in a [`Platform::direct_map`], or several that follow each other, of frames that
    /// belong to the caller or to an object; nobody has a reference to them that excludes writes.
    unsafe fn read_bytes(&self, from: NonNull<u8>, into: &mut [u8]) {
        // SAFETY: the caller's promise.
        unsafe { crate::bytes::read_by_words(from, into) }
    }

    /// Writes `from` to `to` and behind it, as [`Platform::read_bytes`] reads; changes no byte beside.
    ///
    /// # Safety
    /// As [`Platform::read_bytes`]; nobody has any reference to the bytes.
    unsafe fn write_bytes(&self, to: NonNull<u8>, from: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe { crate::bytes::write_by_words(to, from) }
    }

    /// Makes the CPUs in `cpus` (the caller's among them, or not) forget translations of the
    /// address space whose root table is `root`, and waits until they have. The entries were
    /// written before the call. Called with table locks held: it must not wait for anything but
    /// the other CPUs' hardware or interrupt handlers, and those CPUs may be spinning in
    /// [`Platform::relax`] for one of these locks. So either they spin with interrupts on (operations
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

    /// Called again and again by who spins: for a lock that is held for a bounded stretch of entries
    /// with preemption off, or an answer of another CPU. It may be called in a read section, with
    /// locks held, and with interrupts off: it never gives the CPU to another thread. (Linux:
    /// `cpu_relax`.) Whoever may have to wait for longer calls [`Platform::park`].
    fn relax(&self);

    /// Waits until somebody calls [`Platform::unpark`] for the same `word`. Returns at once if the
    /// word does not hold `expected`; a platform that lets the caller sleep looks once more after the
    /// caller has been queued, so that no wake-up is lost:
    /// 1. CPU A reads the word, finds the lock taken, and is about to sleep;
    /// 2. CPU B releases the lock, changes the word, and finds nobody to wake;
    /// 3. CPU A sleeps for ever.
    ///
    /// May return early: the caller asks again. Never called in a read section or with a lock held
    /// for which others spin; the mutex of an address space, VMAs and objects may be locked. (Linux:
    /// `futex(2)` with `FUTEX_WAIT`.)
    ///
    /// The provided one spins, which is enough for an embedder without a scheduler. With one, it is
    /// not: among threads of strict priorities, one that spins never lets the one run that it waits
    /// for.
    fn park(&self, word: &AtomicU32, expected: u32) {
        while word.load(Ordering::Acquire) == expected {
            self.relax();
        }
    }

    /// Wakes all who have been parked on `word`, which was changed before the call. The word may
    /// belong to somebody else by now: only its address is looked at. May be called anywhere, with
    /// table locks and in read sections, so it never waits for more than a spin lock.
    fn unpark(&self, _word: *const AtomicU32) {}

    /// Begins a read section: until the matching [`Platform::leave_read`], no table or VMA that
    /// the caller can reach is freed. Nests. A section never sleeps; a kernel disables
    /// preemption.
    fn enter_read(&self);

    /// Ends a read section.
    fn leave_read(&self);

    /// Waits until all read sections that exist now are left. Never called inside one, and never
    /// with a lock held.
    fn synchronize(&self);

    /// Begins to count a grace period: it is over when all read sections that exist now are left.
    /// Does not wait. (Linux: `start_poll_synchronize_rcu`.)
    fn grace_period(&self) -> GracePeriod {
        GracePeriod::default()
    }

    /// Whether the grace period is over. Never called inside a read section. Does not wait. (Linux:
    /// `poll_state_synchronize_rcu`.) A platform that cannot tell keeps the provided answer, "not
    /// known to be": what is to be freed collects then up to [`crate::Memory::deferred_limit`], when
    /// [`Platform::synchronize`] is due. May be asked with locks held.
    fn is_over(&self, _period: GracePeriod) -> bool {
        false
    }

    /// A number that programs can neither know nor choose, asked for once for each address space and
    /// each kernel map: it decides the shape of the list in which they keep their areas. With the
    /// provided one, which is always the same, a program may choose the shape; a search stays
    /// logarithmic all the same, with a larger factor.
    fn seed(&self) -> u64 {
        0
    }

    /// Whether the thread that runs is about to be killed, so that a long call had better end (Linux:
    /// `fatal_signal_pending`). Asked by the calls whose documentation says so; they stop where they
    /// are, with [`crate::Error::Interrupted`].
    fn fatal_signal(&self) -> bool {
        false
    }

    /// How many protection keys the machine heeds (x86-64: 16 where CR4.PKE is set). Always the same
    /// answer. More than entries can name ([`Arch::PROTECTION_KEYS`]) mean nothing.
    fn protection_keys(&self) -> u8 {
        1
    }

    /// Whether the machine checks indirect branches of programs into pages with
    /// [`crate::Protection::BTI`] (AArch64: `ID_AA64PFR1_EL1.BT` is not 0). Always the same answer.
    /// Means nothing where entries cannot say it ([`Arch::BTI`]).
    fn branch_target_identification(&self) -> bool {
        false
    }

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

    /// Gives back frames that the embedder keeps for later and does not use: what
    /// [`crate::KernelMap::purge`] gives, caches. Asked by [`crate::Memory::collect`], which faults
    /// and the background collapser call where no large folio is free and
    /// [`crate::LargeFolioEffort`] says so. No lock is held. May sleep. Does nothing by default.
    fn collect_memory(&self) {}

    /// Has another thread call [`crate::Memory::collect`] soon. A VMA may be locked, so it does not
    /// wait for one. Does nothing by default.
    fn collect_memory_later(&self) {}

    /// Called each time the core has released the lock of a page table, inside a read section. A
    /// test holds the CPU here while another call runs. Does nothing by default.
    #[cfg(any(test, feature = "testing"))]
    fn table_unlocked(&self) {}

    /// Told, inside a read section or with a lock of the reverse map held, of work done there. A
    /// measuring platform adds it up from one end of the section to the other. Does nothing by
    /// default.
    #[cfg(any(test, feature = "measure"))]
    fn worked(&self, _work: Work) {}

    /// Told that the caller has taken a lock of the reverse map. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn tree_locked(&self) {}

    /// Told that the caller is about to release a lock of the reverse map. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn tree_unlocked(&self) {}
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
