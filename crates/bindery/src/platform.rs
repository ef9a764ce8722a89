//! [`Platform`]: the interface that the embedder implements, about a dozen functions.
//!
//! The core never executes architecture-specific instructions; it calls the platform instead.
//! `bindery-hosted` implements the trait in a process; a kernel implements it on the bare machine.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod cpu_set;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::addr::{Frame, VirtRange};
use crate::arch::{Arch, Level};
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
    /// Whether entries that point to tables also changed. If so, cached intermediate entries
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
    /// Only leaves changed (AArch64: last-level invalidation suffices).
    Unchanged,
    /// Tables were moved or removed.
    Changed,
}

/// The start of a grace period, returned by [`Platform::grace_period`] and passed to
/// [`Platform::is_over`]. Only the platform interprets the number.
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
    /// Page-table entries, slots of an object's page index, and VMAs that were read. An item read
    /// twice under the same locks counts once.
    pub entries: u64,
    /// Page tables that were marked as detached.
    pub tables_marked: u64,
}

/// The machine under the core.
///
/// # Context
/// [`Platform::park`], [`Platform::synchronize`], [`Platform::allocation_may_wait`],
/// [`Platform::yield_if_due`] and [`Platform::collect_memory`] may sleep: the core calls them
/// outside read sections and without table locks or spin locks. All others never sleep: the core
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
///    call for an address in the range, and all accesses through such translations have completed.
///    When [`Platform::invalidate_kernel`] returns, the same is true of every running CPU. A CPU
///    that starts later counts as running from before it loads the kernel's tables.
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
    /// handler. [`crate::sync`] provides implementations.
    type Mutex: RawLock;

    /// A lock that is held for a few hundred instructions; a waiter spins. If the core is called
    /// from interrupt handlers, acquiring it must disable interrupts
    /// ([`SpinLock`](crate::sync::SpinLock) does).
    type SpinLock: RawLock;

    /// The address at which the core reads and writes `frame` (the "direct map"). Constant time.
    fn direct_map(&self, frame: Frame) -> NonNull<u8>;

    /// Fills `count` consecutive frames with zeroes, by the machine's fastest means. The caller
    /// executes a release fence before later stores. If that fence does not order the means
    /// (non-temporal stores), the platform orders them.
    fn zero(&self, first: Frame, count: u32);

    /// Copies `count` consecutive frames from `from` to `to`, which do not overlap. Ordered as
    /// [`Platform::zero`].
    fn copy(&self, from: Frame, to: Frame, count: u32);

    /// Reads `into.len()` bytes from `from`, by the machine's fastest means, without creating a
    /// reference to them, because programs may write them during the call. If a byte is written
    /// during the call, its old or its new value may be returned.
    ///
    /// The provided version copies by words. In a kernel, this costs a hundred times as much as
    /// special instructions (x86-64: `rep movs`; AArch64: `ldp` and `stp`).
    ///
    /// # Safety
    /// The bytes are in the [`Platform::direct_map`] of one frame or of several consecutive frames,
    /// which belong to the caller or to an object. No reference to them excludes writes.
    unsafe fn read_bytes(&self, from: NonNull<u8>, into: &mut [u8]) {
        // SAFETY: the caller's obligation.
        unsafe { crate::bytes::read_by_words(from, into) }
    }

    /// Writes `from` to the bytes from `to` on, as [`Platform::read_bytes`] reads. Changes no other
    /// byte.
    ///
    /// # Safety
    /// As [`Platform::read_bytes`], and no reference to the bytes exists.
    unsafe fn write_bytes(&self, to: NonNull<u8>, from: &[u8]) {
        // SAFETY: the caller's obligation.
        unsafe { crate::bytes::write_by_words(to, from) }
    }

    /// Invalidates translations of the address space whose root table is `root` on the CPUs in
    /// `cpus`, and waits until all have done so. The set may include the caller's CPU. The entries
    /// were written before the call.
    ///
    /// The core calls this with table locks held. So the call may wait only for the other CPUs'
    /// hardware or interrupt handlers, and those CPUs may be spinning in [`Platform::relax`] for
    /// one of these locks. Therefore they either spin with interrupts on, as on entry to operations
    /// and faults, or `relax` handles invalidations.
    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation);

    /// Like [`Platform::invalidate`], but only on the caller's CPU, for a fault that finds a valid
    /// entry because the CPU's TLB had an older, narrower one. [`crate::KernelMap::resolve`] passes
    /// its own root, for global entries (RISC-V: no ASID in the fence).
    fn invalidate_local(&self, root: Frame, what: &Invalidation);

    /// Invalidates translations of the kernel's addresses in the range on every CPU of the machine,
    /// regardless of the root and the ASID or PCID that the CPU has loaded, and waits until all
    /// have done so. `root` is [`crate::KernelMap::root`]. The entries were written before the
    /// call.
    ///
    /// The function may be called with interrupts off, inside a lock of type
    /// [`Platform::SpinLock`]; CPUs wait for such a lock only by [`Platform::relax`]. So while the
    /// function waits for its turn or for responses, it must itself handle invalidations of other
    /// CPUs. `relax` must also do so if [`crate::KernelMap::resolve`] is called with interrupts
    /// off:
    /// 1. CPU A, with interrupts off, waits until CPU B has invalidated.
    /// 2. CPU B, with interrupts off, waits for A: for another invalidation or for the end of a
    ///    pause.
    ///
    /// Only [`crate::KernelMap`] calls this function. A platform without a kernel map may leave it
    /// empty.
    fn invalidate_kernel(&self, root: Frame, what: &Invalidation);

    /// Makes instruction fetches of all CPUs see the current content of `count` frames from `first`
    /// on. The core calls it before a leaf of user mode becomes executable whose folio was written
    /// since: a page of an object that was filled, a copy-on-write, a collapsed folio, a copy by
    /// `fork`, an anonymous page, `mprotect`. The core calls it once for each folio until
    /// [`crate::Object::write`] writes to the folio again, and after
    /// [`crate::AddressSpace::write_foreign`] has written to such a folio. (Linux:
    /// `PG_dcache_clean`, `flush_icache_pte`.)
    ///
    /// Only called if [`Arch::COHERENT_FETCHES`] is false:
    ///
    /// | architecture | instructions |
    /// |---|---|
    /// | AArch64 | `dc cvau` for each line unless `CTR_EL0.IDC`; `dsb ish`; `ic ivau` for each line unless `CTR_EL0.DIC`; `dsb ish`; `isb` |
    /// | RISC-V | `fence.i` on all harts (SBI: `remote_fence_i`) |
    ///
    /// Programs that write code synchronize it themselves, as on Linux. The embedder synchronizes
    /// the kernel's own memory ([`crate::KernelMap`]).
    ///
    /// May be called with table locks held: the restrictions of [`Platform::invalidate`] apply.
    /// Does nothing by default.
    fn synchronize_instructions(&self, _first: Frame, _count: u32) {}

    /// Makes entry writes visible to the walkers of all CPUs, before any later access or walk of
    /// the caller (AArch64: `dsb ishst; isb`; x86-64: nothing).
    fn publish_entries(&self);

    /// The caller's CPU. Inside a read section the CPU cannot change. Outside, the result is only a
    /// hint, because the thread may have migrated before it uses the result.
    fn cpu(&self) -> Cpu;

    /// Called repeatedly by a CPU that spins for a lock that is held for a bounded number of
    /// entries with preemption off, or for a response of another CPU (Linux: `cpu_relax`). It may
    /// be called in a read section, with locks held, and with interrupts off, and never yields the
    /// CPU to another thread. A thread that may have to wait longer calls [`Platform::park`].
    fn relax(&self);

    /// Waits until a thread calls [`Platform::unpark`] for the same `word` (Linux: `futex(2)` with
    /// `FUTEX_WAIT`). Returns at once if the word does not hold `expected`. A platform that lets
    /// the caller sleep tests the word again after it has queued the caller, so that no wake-up is
    /// lost. Otherwise:
    /// 1. CPU A reads the word, finds the lock held, and is about to sleep.
    /// 2. CPU B releases the lock, changes the word, and finds no thread to wake.
    /// 3. CPU A sleeps forever.
    ///
    /// It may return spuriously; the caller tests again. It is never called in a read section or
    /// while holding a lock for which other CPUs spin. The mutex of an address space, VMAs and
    /// objects may be locked.
    ///
    /// The provided version spins, which suffices for an embedder without a scheduler. With strict
    /// priorities, however, a spinning thread may prevent the thread that it waits for from
    /// running.
    fn park(&self, word: &AtomicU32, expected: u32) {
        while word.load(Ordering::Acquire) == expected {
            self.relax();
        }
    }

    /// Like [`Platform::park`], for an access that waits for the handler of a userfaultfd, which
    /// may take any time. The thread holds no lock of the core and has no unfinished call except
    /// the access, so a platform that checks all invariants between calls (`bindery::check`) need
    /// not wait for it.
    fn park_for_handler(&self, word: &AtomicU32, expected: u32) {
        self.park(word, expected);
    }

    /// Like [`Platform::park`], but returns after a short time of the embedder's choice at the
    /// latest, even if the word has not changed (Linux: a tenth of a second in
    /// `reclaim_throttle`). A call that would fail for lack of memory waits like this, up to 32
    /// times, for a pager that stores pages for it and may never answer
    /// ([`crate::Memory::lasting_file_system`]). No lock of the core is held.
    ///
    /// The provided version lets other threads run ([`Platform::yield_if_due`]) a hundred thousand
    /// times.
    fn park_briefly(&self, word: &AtomicU32, expected: u32) {
        for _ in 0..100_000 {
            if word.load(Ordering::Acquire) != expected {
                return;
            }
            self.yield_if_due();
            self.relax();
        }
    }

    /// Wakes all threads that are parked on `word`, which was changed before the call. The word may
    /// already have been freed and reused, so only its address may be used. The function may be
    /// called anywhere, with table locks held and in read sections, so it may wait only for spin
    /// locks.
    fn unpark(&self, _word: *const AtomicU32) {}

    /// Begins a read section: until the matching [`Platform::leave_read`], no table or VMA that the
    /// caller can reach is freed. Sections nest. A section never sleeps; a kernel disables
    /// preemption. No other thread is in a section on the same CPU, because a section changes the
    /// CPU's counters without atomic additions.
    fn enter_read(&self);

    /// Ends a read section.
    fn leave_read(&self);

    /// Waits until all read sections that exist now have ended. Never called inside a read section
    /// or with a lock held. May sleep.
    fn synchronize(&self);

    /// Begins a grace period, which ends when all current read sections have ended. Does not wait.
    /// (Linux: `start_poll_synchronize_rcu`.) Each deferred free calls it, so on many CPUs it
    /// should only read one number, the last completed grace period: when the second grace period
    /// after it is over, all current sections have ended.
    fn grace_period(&self) -> GracePeriod {
        GracePeriod::default()
    }

    /// Whether the grace period is over. Never called inside a read section; may be called with
    /// locks held. Does not wait. (Linux: `poll_state_synchronize_rcu`.) Each deferred free calls
    /// it, so it should also read only one number, which one CPU advances for all. A platform that
    /// cannot tell keeps the provided version, which returns `false`. Then deferred frees collect
    /// up to [`crate::Memory::deferred_limit`], when the core calls [`Platform::synchronize`].
    fn is_over(&self, _period: GracePeriod) -> bool {
        false
    }

    /// A number that programs can neither know nor choose. The core requests a number for each
    /// address space and each kernel map, which determines the shape of its list of areas. The
    /// provided number is always the same, so a program may choose the shape. A search stays
    /// logarithmic even then, with a larger factor.
    fn seed(&self) -> u64 {
        0
    }

    /// Whether the running thread is about to be killed, so that a long call should end (Linux:
    /// `fatal_signal_pending`). Calls that document this error check it and stop with
    /// [`crate::Error::Interrupted`].
    fn fatal_signal(&self) -> bool {
        false
    }

    /// Whether the running thread has a pending signal (Linux: `signal_pending`). If so, a wait for
    /// a userfaultfd's handler or messages ends, and so does a call that swaps in the pages of a
    /// swap area. The provided version calls [`Platform::fatal_signal`].
    fn signal(&self) -> bool {
        self.fatal_signal()
    }

    /// Whether the running thread works for a [`crate::Pager`]: it stores or reads pages, and others
    /// may wait for it. It may make pages dirty beyond a [`crate::DirtyLimit`], and when it needs
    /// memory, reclaim enters no pager and does not wait for one. (Linux: `PF_LOCAL_THROTTLE`,
    /// `GFP_NOFS`.) A thread that is in a method of a pager counts as well if it calls the core
    /// there while the pager could not be entered again. Always `false` by default.
    ///
    /// Context: any.
    fn works_for_pager(&self) -> bool {
        false
    }

    /// The number of the running thread for the messages of a userfaultfd
    /// ([`crate::UserfaultFeatures::THREAD_ID`]). Always 0 by default.
    fn thread(&self) -> u32 {
        0
    }

    /// Called after a userfaultfd has received a message, or was closed. A kernel wakes the threads
    /// that poll it. VMAs may be locked, so the function must not wait for a VMA. Does nothing by
    /// default.
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

    /// Whether entries may select a memory type other than [`crate::arch::MemoryType::Normal`]
    /// (RISC-V: Svpbmt with `menvcfg.PBMTE` set; without it, loads through such an entry fault
    /// forever, and the machine's physical memory attributes alone decide). It never changes. If
    /// it is false, frame objects and kernel mappings with another type are refused.
    fn page_based_memory_types(&self) -> bool {
        true
    }

    /// The largest entry that may map frames of a [`crate::FrameSource`] in a program
    /// ([`Level::PUD`]: 1 GiB). It never changes. By default 2 MiB, because x86-64
    /// processors without CPUID's `Page1GB` treat a larger entry as malformed. Every other machine
    /// has entries of 1 GiB, on all supported architectures.
    fn largest_shown_leaf(&self) -> Level<Self::Arch> {
        Level::PMD
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

    /// Called before an allocation that may wait for memory. The caller holds no table lock and is
    /// in no read section, but VMAs and the mutex of an address space may be locked. A checking
    /// platform verifies that. Does nothing by default.
    fn allocation_may_wait(&self) {}

    /// Called before the core takes the lock of a VMA, a folio, an object or a tree of the reverse
    /// map, or waits for a swap device, even if no wait is necessary (Linux: `might_sleep`); a
    /// [`Platform::Mutex`] can make the same check itself. The caller holds no table lock and is in
    /// no read section, but VMAs, objects and the mutex of an address space may be locked. A
    /// checking platform verifies that, so a wait in a read section is detected even if the thread
    /// does not sleep. Does nothing by default.
    #[inline(always)]
    fn might_sleep(&self) {}

    /// Called between two bounded pieces of long work: between steps of reclaim, between two
    /// compressed pages, between two tables whose pages are freed, after every few tables that a
    /// fork copies, and after every 256 pages that an object drops or allocates in advance. The
    /// core holds no spin lock and is in no read section. A folio, a VMA, the pages of an object
    /// and the mutex of an address space may be locked, so other threads may wait for this one. A
    /// non-preemptible kernel schedules other threads here if due (Linux: `cond_resched`). May
    /// sleep. Does nothing by default.
    fn yield_if_due(&self) {}

    /// Frees memory that the embedder keeps for later: its caches, and the areas that
    /// [`crate::KernelMap::purge`] frees. [`crate::Memory::collect`] calls it. Faults and the
    /// background collapser run such a collection if no large folio is free and
    /// [`crate::LargeFolioEffort`] requires it, and so does each call that is about to fail for
    /// lack of memory. No lock is held. May sleep. Does nothing by default.
    fn collect_memory(&self) {}

    /// Makes another thread call [`crate::Memory::collect`] soon. A VMA may be locked, so the
    /// function must not wait for a VMA. Does nothing by default.
    fn collect_memory_later(&self) {}

    /// Called when a call is about to fail for lack of memory because reclaim has found nothing to
    /// free: no cold page has room in swap. The embedder may end a program or free other memory,
    /// and returns whether to retry (Linux: the OOM killer). No lock of the core is held. May
    /// sleep. Does nothing by default.
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

    /// Reports the work done, inside a read section or with a lock of the reverse map held. A
    /// measuring platform adds up the work of a section. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn worked(&self, _work: Work) {}

    /// Called after the caller has taken a lock of the reverse map. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn tree_locked(&self) {}

    /// Called before the caller releases a lock of the reverse map. Does nothing by default.
    #[cfg(any(test, feature = "measure"))]
    fn tree_unlocked(&self) {}
}
