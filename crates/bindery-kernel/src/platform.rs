//! `Platform`: the machine in the form that the core needs, and all that an embedder implements.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use bindery::Platform;
use bindery::addr::Frame;
use bindery::arch::Level;
use bindery::platform::{Cpu, CpuSet, GracePeriod, Invalidation};

use spin::Once;

use crate::sync::{self, SleepingLock, SpinLock};
use crate::{arch, kernel_lock, options, time};

/// The thread services that memory management needs. Those that may sleep are called with the
/// kernel's lock. All others are called anywhere, also without the lock.
pub trait Threads: Sync {
    /// As [`Platform::park_for_handler`].
    fn park_for_handler(&self, word: &AtomicU32, expected: u32);

    /// As [`Platform::yield_if_due`].
    fn yield_if_due(&self);

    /// As [`Platform::fatal_signal`].
    fn fatal_signal(&self) -> bool;

    /// As [`Platform::signal`].
    fn signal(&self) -> bool;

    /// As [`Platform::thread`].
    fn thread(&self) -> u32;

    /// As [`Platform::major_fault`].
    fn major_fault(&self);

    /// As [`Platform::userfault_arrived`].
    fn userfault_arrived(&self);

    /// As [`Platform::collect_memory`].
    fn collect_memory(&self);

    /// As [`Platform::collect_memory_later`].
    fn collect_memory_later(&self);
}

static THREADS: Once<&'static dyn Threads> = Once::new();

/// Registers the threads' services. No thread runs before that.
pub fn set_threads(threads: &'static dyn Threads) {
    THREADS.call_once(|| threads);
}

#[inline]
fn threads() -> Option<&'static dyn Threads> {
    THREADS.get().copied()
}

/// A grace period of the time in which only the first CPU runs threads. It is over at once: the
/// caller is outside of sections, and so are all other threads. Those of `kernel_lock` are above 0.
const ALONE: GracePeriod = GracePeriod(0);

/// The machine that the kernel runs on.
pub struct Machine;

// SAFETY:
// 1. The direct map covers all memory. The boot code makes it and nothing removes it; the frames
//    are the free memory of the boot protocol, without image, heap and initramfs.
// 2. `arch::shoot_down` waits until no CPU of the set uses an old translation: those that run the
//    root answer in an interrupt handler or while they wait for the kernel's lock or a spin lock,
//    and the others flush when they load it. Without the kernel's lock only the first CPU runs
//    programs, and `arch::invalidate` suffices. The kernel's own addresses are the same for all
//    CPUs, and each may have walked them speculatively, so `arch::invalidate_kernel` flushes every
//    running CPU, idle or not, and waits for all.
// 3. No thread is preempted in the kernel, and none sleeps in a read section. As long as only the
//    first CPU runs threads, the caller of `synchronize` or `is_over` is outside of sections, and
//    so are all other threads. From then on, all the time that a CPU spends in the kernel is one
//    section in the count of `kernel_lock`, so those of the core need no count of their own. It
//    ends where the CPU is outside of those: at a wait for the kernel's lock, and in these two
//    functions.
// 4. `arch::cpu` reads the CPU's own register.
// 5. The kernel root is the boot code's, which nothing frees.
unsafe impl Platform for Machine {
    type Arch = arch::EntryFormat;
    type Mutex = SleepingLock;
    type SpinLock = SpinLock;

    #[inline]
    fn direct_map(&self, frame: Frame) -> NonNull<u8> {
        arch::direct_map(u64::from(frame.0) << 12)
    }

    #[inline]
    fn zero(&self, first: Frame, count: u32) {
        let length = (count as usize) << 12;
        // SAFETY: the core owns the frames that it asks to be zeroed (`Platform::direct_map`).
        unsafe { arch::zero(self.direct_map(first).as_ptr(), length) }
    }

    #[inline]
    fn copy(&self, from: Frame, to: Frame, count: u32) {
        let length = (count as usize) << 12;
        // SAFETY: the core owns both ranges and promises that they do not overlap.
        unsafe { arch::copy(self.direct_map(from).as_ptr(), self.direct_map(to).as_ptr(), length) }
    }

    #[inline]
    unsafe fn read_bytes(&self, from: NonNull<u8>, into: &mut [u8]) {
        // SAFETY: the core promises `from` valid for the length; `into` does not overlap it.
        unsafe { arch::copy_bytes(from.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    #[inline]
    unsafe fn write_bytes(&self, to: NonNull<u8>, from: &[u8]) {
        // SAFETY: as above.
        unsafe { arch::copy_bytes(from.as_ptr(), to.as_ptr(), from.len()) }
    }

    #[inline]
    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        if kernel_lock::is_used() {
            arch::shoot_down(root, cpus, what);
        } else if cpus.contains(self.cpu()) {
            arch::invalidate(root, what);
        }
    }

    #[inline]
    fn invalidate_local(&self, root: Frame, what: &Invalidation) {
        arch::invalidate_local(root, what);
    }

    fn invalidate_kernel(&self, _root: Frame, what: &Invalidation) {
        arch::invalidate_kernel(what);
    }

    fn synchronize_instructions(&self, first: Frame, count: u32) {
        arch::synchronize_instructions(u64::from(first.0) << 12, u64::from(count) << 12);
    }

    #[inline]
    fn publish_entries(&self) {
        arch::publish_entries();
    }

    #[inline]
    fn cpu(&self) -> Cpu {
        Cpu(arch::cpu())
    }

    fn relax(&self) {
        sync::relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        sync::park(word, expected);
    }

    fn park_for_handler(&self, word: &AtomicU32, expected: u32) {
        if let Some(threads) = threads() {
            kernel_lock::inside(|| threads.park_for_handler(word, expected));
        }
    }

    #[inline]
    fn unpark(&self, word: *const AtomicU32) {
        sync::unpark(word);
    }

    #[inline]
    fn enter_read(&self) {}

    #[inline]
    fn leave_read(&self) {}

    fn synchronize(&self) {
        if kernel_lock::is_used() {
            kernel_lock::synchronize(sync::relax);
        }
    }

    #[inline]
    fn grace_period(&self) -> GracePeriod {
        if kernel_lock::is_used() { kernel_lock::grace_period() } else { ALONE }
    }

    fn yield_if_due(&self) {
        // Another CPU in the core may wait for an answer until the end of a long call.
        if kernel_lock::is_used() {
            arch::answer();
        }
        // A CPU without the kernel's lock takes it only where its time slice may be over.
        if (kernel_lock::is_held() || time::is_due())
            && let Some(threads) = threads()
        {
            kernel_lock::inside(|| threads.yield_if_due());
        }
    }

    /// The CPU's own generator. Without a generator, the seed is the time, which programs may
    /// guess.
    fn seed(&self) -> u64 {
        match options::SEED.load(Ordering::Relaxed) {
            0 => arch::random_word().unwrap_or_else(time::now),
            chosen => chosen,
        }
    }

    #[inline]
    fn protection_keys(&self) -> u8 {
        arch::protection_keys()
    }

    #[inline]
    fn largest_shown_leaf(&self) -> Level<arch::EntryFormat> {
        arch::largest_leaf()
    }

    #[inline]
    fn branch_target_identification(&self) -> bool {
        arch::branch_target_identification()
    }

    #[inline]
    fn fatal_signal(&self) -> bool {
        threads().is_some_and(Threads::fatal_signal)
    }

    fn signal(&self) -> bool {
        threads().is_some_and(Threads::signal)
    }

    fn thread(&self) -> u32 {
        threads().map_or(0, Threads::thread)
    }

    fn userfault_arrived(&self) {
        if let Some(threads) = threads() {
            threads.userfault_arrived();
        }
    }

    fn collect_memory(&self) {
        if let Some(threads) = threads() {
            kernel_lock::inside(|| threads.collect_memory());
        }
    }

    fn major_fault(&self) {
        if let Some(threads) = threads() {
            threads.major_fault();
        }
    }

    fn collect_memory_later(&self) {
        if let Some(threads) = threads() {
            threads.collect_memory_later();
        }
    }

    #[inline]
    fn is_over(&self, period: GracePeriod) -> bool {
        // The number, rather than a second look at the CPUs: a free asks both in a row.
        period == ALONE || kernel_lock::is_over(period)
    }

    #[inline]
    fn kernel_root(&self) -> Option<Frame> {
        arch::kernel_root()
    }
}
