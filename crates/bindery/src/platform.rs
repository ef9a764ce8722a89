//! [`Platform`]: the interface that the embedder implements, about a dozen functions.
//!
//! The core never executes an instruction that only one architecture has. It asks the platform
//! instead. `bindery-hosted` implements the trait in a process, a kernel on the bare machine.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod cpu_set;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::addr::{Frame, VirtRange};
use crate::arch::Arch;
use crate::sync::RawLock;

pub use cpu_set::{Cpu, CpuSet, MAX_CPUS};

/// Translations of one address space to be invalidated in TLBs.
///
/// ```
/// use bindery::platform::{Invalidation, Tables};
///
/// /// The addresses to invalidate one by one; none where the whole TLB is cheaper.
/// fn addresses(what: &Invalidation) -> impl Iterator<Item = u64> + use<> {
///     let (start, end) = (what.range.start().0, what.range.end().0);
///     let few = what.tables == Tables::Unchanged && (end - start) / what.stride <= 33;
///     (start..if few { end } else { start }).step_by(what.stride as usize)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidation {
    /// The addresses whose translations have changed.
    pub range: VirtRange,
    /// The smallest distance in bytes between two translations in the range. A platform that
    /// invalidates address by address may step by this much. It is always a leaf size of the
    /// architecture.
    pub stride: u64,
    /// Whether entries that point to tables changed too. If so, cached intermediate entries
    /// (x86-64: paging-structure caches; AArch64: walk caches) must be invalidated as well.
    pub tables: Tables,
}

/// Whether cached intermediate entries must be invalidated.
///
/// ```
/// use bindery::platform::Tables;
///
/// /// The AArch64 instruction that forgets one page on all CPUs.
/// fn instruction(tables: Tables) -> &'static str {
///     match tables {
///         Tables::Unchanged => "tlbi vale1is",
///         Tables::Changed => "tlbi vae1is",
///     }
/// }
/// assert_eq!(instruction(Tables::Unchanged), "tlbi vale1is");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tables {
    /// Only leaves changed (AArch64: last-level invalidation will do).
    Unchanged,
    /// Tables were moved or removed.
    Changed,
}

/// The start of a grace period: [`Platform::grace_period`] returns it, and [`Platform::is_over`]
/// takes it. The number has a meaning only for the platform.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
///
/// use bindery::platform::GracePeriod;
///
/// /// Counted by a thread that waits for all CPUs, again and again.
/// static PASSED: AtomicU64 = AtomicU64::new(0);
///
/// // The period under way may have begun too early, so the one after it counts.
/// let start = GracePeriod(PASSED.load(SeqCst) + 2);
/// let is_over = || PASSED.load(SeqCst) >= start.0;
/// assert!(!is_over());
/// PASSED.fetch_add(2, SeqCst);
/// assert!(is_over());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GracePeriod(pub u64);

/// Work done in a read section, reported to [`Platform::worked`].
#[cfg(any(test, feature = "measure"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Page-table entries, slots of an object's page index, and VMAs that were read. An item that
    /// is read twice under the same locks counts once.
    pub entries: u64,
    /// Page tables that were marked as detached.
    pub tables_marked: u64,
}

/// The machine under the core.
///
/// # Context
/// [`Platform::park`], [`Platform::synchronize`], [`Platform::allocation_may_wait`],
/// [`Platform::yield_if_due`] and [`Platform::collect_memory`] may sleep: the core calls them
/// outside of read sections and without table locks or spin locks. All others never sleep: the core
/// calls them in read sections, with locks of every kind held, and with interrupts off.
///
/// # Safety
///
/// The implementor guarantees:
///
/// 1. **Direct map.** For every frame in the ranges that were passed to [`crate::Memory::new`],
///    [`Platform::direct_map`] returns a pointer at which the frame's 4,096 bytes can be read and
///    written for as long as the platform lives. Different frames never overlap. The pointers of
///    consecutive frames in one range are consecutive multiples of 4,096. No other code uses those
///    bytes, except user programs through the tables that the core builds, and the MMU.
/// 2. **Invalidation.** When [`Platform::invalidate`] returns, no CPU in the set uses or holds a
///    translation (with [`Tables::Changed`], nor an intermediate entry) that it read before the
///    call for an address in the range, and all accesses through such translations are finished.
///    When [`Platform::invalidate_kernel`] returns, the same is true of every running CPU. A CPU
///    that comes up later counts as running from before it loads the kernel's tables.
/// 3. **Read sections.** [`Platform::synchronize`] returns only after every read section that was
///    entered before the call has ended. [`Platform::is_over`] returns true only after every read
///    section that was entered before the matching [`Platform::grace_period`] has ended.
/// 4. **CPUs.** [`Platform::cpu`] returns the caller's CPU, below [`MAX_CPUS`]. From the first
///    [`crate::Memory::cpu_online`] on, every CPU is online for as long as it is in a read section,
///    and no other thread calls the core on that CPU until the section ends.
/// 5. **Kernel root.** [`Platform::kernel_root`] returns a table of the highest level, or none.
///    [`Platform::direct_map`] shows it for as long as the platform lives, and its entries are
///    accessed only as aligned 64-bit atomics.
pub unsafe trait Platform: Sized + Send + Sync + 'static {
    /// The architecture of the tables that the MMU walks.
    type Arch: Arch;

    /// A lock that may be held for long; a waiter may sleep. Never acquired in an interrupt
    /// handler. [`crate::sync`] has ready ones.
    type Mutex: RawLock;

    /// A lock that is held for a few hundred instructions; a waiter spins. If the core is called
    /// from interrupt handlers, acquiring it must disable interrupts
    /// ([`SpinLock`](crate::sync::SpinLock) does).
    type SpinLock: RawLock;

    /// The address at which the core reads and writes `frame` (the "direct map"). Constant time.
    fn direct_map(&self, frame: Frame) -> NonNull<u8>;

    /// Fills `count` consecutive frames with zeroes, by the machine's fastest means. The caller
    /// makes a release fence before later stores. If the means are not ordered by it (non-temporal
    /// stores), the platform orders them.
    fn zero(&self, first: Frame, count: u32);

    /// Copies `count` consecutive frames from `from` to `to`, which do not overlap. Ordered as
    /// [`Platform::zero`].
    fn copy(&self, from: Frame, to: Frame, count: u32);

    /// Reads `into.len()` bytes from `from`, by the machine's fastest means, and without a
    /// reference to them: programs may write them during the call. If a byte is written during the
    /// call, its old or its new value may be returned.
    ///
    /// The provided version copies by words. That costs a kernel a hundred times as much as its own
    /// instructions (x86-64: `rep movs`; AArch64: `ldp` and `stp`).
    ///
    /// # Safety
    /// The bytes are in the [`Platform::direct_map`] of one frame or of several consecutive ones,
    /// which belong to the caller or to an object. No reference to them excludes writes.
    unsafe fn read_bytes(&self, from: NonNull<u8>, into: &mut [u8]) {
        // SAFETY: the caller's obligation.
        unsafe { crate::bytes::read_by_words(from, into) }
    }

    /// Writes `from` to the bytes from `to` on, in the way that [`Platform::read_bytes`] reads.
    /// Changes no other byte.
    ///
    /// # Safety
    /// As [`Platform::read_bytes`], and no reference to the bytes exists.
    unsafe fn write_bytes(&self, to: NonNull<u8>, from: &[u8]) {
        // SAFETY: the caller's obligation.
        unsafe { crate::bytes::write_by_words(to, from) }
    }

    /// Invalidates translations of the address space whose root table is `root` on the CPUs in
    /// `cpus`, and waits until all have done so. The caller's CPU may be in the set or not. The
    /// entries were written before the call.
    ///
    /// The core calls this with table locks held. So it must not wait for anything but the other
    /// CPUs' hardware or interrupt handlers, and those CPUs may be spinning in [`Platform::relax`]
    /// for one of these locks. Either they spin with interrupts on, as on entry to operations and
    /// faults, or `relax` serves invalidations.
    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation);

    /// Like [`Platform::invalidate`], only on the caller's CPU, for a fault that finds a valid
    /// entry: the CPU's TLB had an older, narrower one. [`crate::KernelMap::resolve`] calls it with
    /// its own root, for global entries (RISC-V: no ASID in the fence).
    fn invalidate_local(&self, root: Frame, what: &Invalidation);

    /// Invalidates translations of the kernel's addresses in the range on every CPU of the machine,
    /// whatever root and whatever ASID or PCID it has loaded, and waits until all have done so.
    /// `root` is [`crate::KernelMap::root`]. The entries were written before the call.
    ///
    /// It may be called with interrupts off, inside a lock of type [`Platform::SpinLock`]; CPUs
    /// wait for such a lock only by [`Platform::relax`]. So while it waits, for its turn or for
    /// answers, it answers the invalidations of other CPUs itself. `relax` must do so as well if
    /// [`crate::KernelMap::resolve`] is called with interrupts off:
    /// 1. CPU A, interrupts off, waits until CPU B has invalidated.
    /// 2. CPU B, interrupts off, waits for A: for another invalidation, or for the end of a pause.
    ///
    /// Only [`crate::KernelMap`] calls this. A platform without a kernel map need do nothing.
    fn invalidate_kernel(&self, root: Frame, what: &Invalidation);

    /// Makes instruction fetches of all CPUs see the current content of `count` frames from `first`
    /// on. The core calls it before a leaf of user mode becomes executable whose folio was written
    /// since: a page of an object that was filled, a copy-on-write, a collapsed folio, a copy by
    /// `fork`, an anonymous page, `mprotect`. Once for each folio, until [`crate::Object::write`]
    /// writes to it again; and after [`crate::AddressSpace::write_foreign`] has written to such a
    /// folio. (Linux: `PG_dcache_clean`, `flush_icache_pte`.)
    ///
    /// Only called if [`Arch::COHERENT_FETCHES`] is false:
    ///
    /// | architecture | instructions |
    /// |---|---|
    /// | AArch64 | `dc cvau` for each line unless `CTR_EL0.IDC`; `dsb ish`; `ic ivau` for each line unless `CTR_EL0.DIC`; `dsb ish`; `isb` |
    /// | RISC-V | `fence.i` on all harts (SBI: `remote_fence_i`) |
    ///
    /// Programs that write code themselves synchronize it themselves, as on Linux. For the kernel's
    /// own memory ([`crate::KernelMap`]) the embedder does.
    ///
    /// May be called with table locks held: the restrictions of [`Platform::invalidate`] apply.
    /// Does nothing by default.
    fn synchronize_instructions(&self, _first: Frame, _count: u32) {}

    /// Makes entry writes visible to the walkers of all CPUs, before any later access or walk of
    /// the caller (AArch64: `dsb ishst; isb`; x86-64: nothing).
    fn publish_entries(&self);

    /// The caller's CPU. Inside a read section it cannot change. Outside the answer is only a hint:
    /// the thread may run on another CPU when it uses it.
    fn cpu(&self) -> Cpu;

    /// Called repeatedly by a CPU that spins: for a lock that is held for a bounded number of
    /// entries with preemption off, or for an answer of another CPU (Linux: `cpu_relax`). It may be
    /// called in a read section, with locks held, and with interrupts off, and it never gives the
    /// CPU to another thread. A thread that may have to wait longer calls [`Platform::park`].
    fn relax(&self);

    /// Waits until a thread calls [`Platform::unpark`] for the same `word` (Linux: `futex(2)` with
    /// `FUTEX_WAIT`). Returns at once if the word does not hold `expected`. A platform that lets
    /// the caller sleep tests the word again after it has queued the caller, so that no wake-up is
    /// lost:
    /// 1. CPU A reads the word, finds the lock taken, and is about to sleep.
    /// 2. CPU B releases the lock, changes the word, and finds no thread to wake.
    /// 3. CPU A sleeps forever.
    ///
    /// It may return early: the caller tests again. It is never called in a read section, or with a
    /// lock held for which other CPUs spin. The mutex of an address space, VMAs and objects may be
    /// locked.
    ///
    /// The provided version spins, which is enough for an embedder without a scheduler. With a
    /// scheduler it is not: among threads of strict priorities, a spinning thread never lets the
    /// thread run that it waits for.
    fn park(&self, word: &AtomicU32, expected: u32) {
        while word.load(Ordering::Acquire) == expected {
            self.relax();
        }
    }

    /// Like [`Platform::park`], for an access that waits for the handler of a userfaultfd, which
    /// may take any time. The thread has no lock of the core, and no unfinished call except the
    /// access: a platform that checks all invariants between calls ([`crate::check`]) need not wait
    /// for it.
    fn park_for_handler(&self, word: &AtomicU32, expected: u32) {
        self.park(word, expected);
    }

    /// Wakes all threads that are parked on `word`, which was changed before the call. The word may
    /// have been freed and reused already: only its address counts. It may be called anywhere, with
    /// table locks and in read sections, so it never waits for more than a spin lock.
    fn unpark(&self, _word: *const AtomicU32) {}

    /// Begins a read section: until the matching [`Platform::leave_read`], no table or VMA that the
    /// caller can reach is freed. Sections nest. A section never sleeps; a kernel disables
    /// preemption. No other thread is in a section on the same CPU: in a section, the core changes
    /// the counters of the CPU without atomic additions.
    fn enter_read(&self);

    /// Ends a read section.
    fn leave_read(&self);

    /// Waits until all read sections that exist now have ended. Never called inside one, and never
    /// with a lock held. May sleep.
    fn synchronize(&self);

    /// Begins a grace period: it is over when all read sections that exist now have ended. Does not
    /// wait. (Linux: `start_poll_synchronize_rcu`.) A free calls it, so on many CPUs it should only
    /// read one number, the last grace period that has passed: the one after the next is over when
    /// all sections that exist now have ended.
    fn grace_period(&self) -> GracePeriod {
        GracePeriod::default()
    }

    /// Whether the grace period is over. Never called inside a read section; may be called with
    /// locks held. Does not wait. (Linux: `poll_state_synchronize_rcu`.) Each free asks, so it
    /// should read one number as well, which one CPU advances for all. A platform that cannot know
    /// keeps the provided answer, "not known to be". Then deferred frees collect up to
    /// [`crate::Memory::deferred_limit`], when the core calls [`Platform::synchronize`].
    fn is_over(&self, _period: GracePeriod) -> bool {
        false
    }

    /// A number that programs can neither know nor choose. The core takes one for each address
    /// space and each kernel map; it determines the shape of the list of their areas. The provided
    /// number is always the same, so a program may choose the shape. A search stays logarithmic
    /// even then, with a larger factor.
    fn seed(&self) -> u64 {
        0
    }

    /// Whether the running thread is about to be killed, so that a long call should end (Linux:
    /// `fatal_signal_pending`). Calls with that documented error check it, and stop with
    /// [`crate::Error::Interrupted`].
    fn fatal_signal(&self) -> bool {
        false
    }

    /// Whether the running thread has a pending signal (Linux: `signal_pending`). If so, a program
    /// stops waiting for a userfaultfd's handler, and so does a thread that reads its messages, or
    /// swaps in the pages of a swap area. The provided answer is that of
    /// [`Platform::fatal_signal`].
    fn signal(&self) -> bool {
        self.fatal_signal()
    }

    /// The number of the running thread for the messages of a userfaultfd
    /// ([`crate::UserfaultFeatures::THREAD_ID`]). Always 0 by default.
    fn thread(&self) -> u32 {
        0
    }

    /// Called after a userfaultfd has received a message, or was closed: a kernel wakes the threads
    /// that poll it. VMAs may be locked, so it must not wait for one. Does nothing by default.
    fn userfault_arrived(&self) {}

    /// The number of protection keys that the machine supports (x86-64: 16 if CR4.PKE is set). It
    /// never changes. Keys above [`Arch::PROTECTION_KEYS`], which entries cannot hold, have no
    /// effect.
    fn protection_keys(&self) -> u8 {
        1
    }

    /// Whether the machine checks indirect branches of programs into pages with
    /// [`crate::Protection::BTI`] (AArch64: `ID_AA64PFR1_EL1.BT` is not 0). Always the same answer.
    /// Has no effect if entries cannot require it ([`Arch::BTI`]).
    fn branch_target_identification(&self) -> bool {
        false
    }

    /// A table whose upper half every new root copies, so that the kernel is mapped in every
    /// address space. `None` if kernel and user have separate roots (AArch64) or the kernel is not
    /// mapped at all (a hosted machine).
    fn kernel_root(&self) -> Option<Frame> {
        None
    }

    /// Called when frames return to the allocator. A checking platform tests whether a TLB still
    /// holds them. Does nothing by default.
    fn frames_released(&self, _first: Frame, _count: u32) {}

    /// Called before an allocation that may wait for memory. No table lock and no read section is
    /// held; VMAs and the mutex of an address space may be. A checking platform verifies that. Does
    /// nothing by default.
    fn allocation_may_wait(&self) {}

    /// Called before the core takes the lock of a VMA, a folio, an object or a tree of the reverse
    /// map, or waits for a swap device, also if it need not wait then (Linux: `might_sleep`); a
    /// [`Platform::Mutex`] can check for itself. No table lock and no read section is held; VMAs,
    /// objects and the mutex of an address space may be. A checking platform verifies that: a wait
    /// in a read section is found without the race in which the thread would sleep. Does nothing by
    /// default.
    #[inline(always)]
    fn might_sleep(&self) {}

    /// Called between two bounded pieces of long work: between steps of reclaim, between two pages
    /// that are compressed, between two tables whose pages are freed, after a few tables that a
    /// fork copies, and after each 256 pages that an object loses or gets in advance. The core
    /// holds no spin lock and is in no read section. A folio, a VMA, the pages of an object and the
    /// mutex of an address space may be locked, so other threads may wait for this one. A kernel
    /// that does not preempt itself runs other threads here if their time has come (Linux:
    /// `cond_resched`). May sleep. Does nothing by default.
    fn yield_if_due(&self) {}

    /// Frees memory that the embedder keeps for later: its caches, and the areas that
    /// [`crate::KernelMap::purge`] frees. [`crate::Memory::collect`] calls it; faults and the
    /// background collapser call that if no large folio is free and [`crate::LargeFolioEffort`]
    /// requires it, and so does each call that is about to fail for lack of memory. No lock is
    /// held. May sleep. Does nothing by default.
    fn collect_memory(&self) {}

    /// Makes another thread call [`crate::Memory::collect`] soon. A VMA may be locked, so it does
    /// not wait for one. Does nothing by default.
    fn collect_memory_later(&self) {}

    /// Called when a call is about to fail for lack of memory, and reclaim has found nothing to
    /// free: no page is cold and has room in swap. The embedder may end a program, or free other
    /// memory, and returns whether to try the call once more (Linux: the OOM killer). No lock of
    /// the core is held. May sleep. Does nothing by default.
    fn out_of_memory(&self) -> bool {
        false
    }

    /// Called when a fault of the running thread has read content from a device: a major fault
    /// (getrusage(2), `ru_majflt`). [`crate::Events::major_faults`] counts those of all threads. A
    /// VMA is locked. Does nothing by default.
    fn major_fault(&self) {}

    /// Called each time the core has released the lock of a page table, inside a read section. A
    /// test stops the CPU here while another call runs. Does nothing by default.
    #[cfg(any(test, feature = "testing"))]
    fn table_unlocked(&self) {}

    /// Called inside a read section, or with a lock of the reverse map held, with the work done. A
    /// measuring platform adds it up over the section. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn worked(&self, _work: Work) {}

    /// Called after the caller has taken a lock of the reverse map. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn tree_locked(&self) {}

    /// Called before the caller releases a lock of the reverse map. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn tree_unlocked(&self) {}
}
