//! The CPUs that run threads, and which of them idle.
//!
//! Only the holder of the kernel's lock ([`crate::kernel_lock`]) marks its CPU as idle, or takes
//! that mark back. A CPU that makes a thread ready takes the mark from another one, with or without
//! the lock ([`call_for`]).

use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

use crate::arch::{self, CpuRecord};
use crate::{kernel_lock, time};

use super::thread::{NO_CPU, Thread, work};
use super::{ready, scheduler};

pub use crate::kernel_lock::MOST_CPUS as MOST;

/// The records of the CPUs that run threads, by number.
static RECORDS: [AtomicPtr<CpuRecord>; MOST] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; MOST];

/// One bit for each CPU that runs threads.
static ONLINE: AtomicU64 = AtomicU64::new(1);

/// One bit for each CPU that idles and has not been interrupted for new work.
static IDLE: AtomicU64 = AtomicU64::new(0);

/// The bit of the calling CPU.
#[inline]
pub(super) fn own_bit() -> u64 {
    1 << (arch::cpu() % MOST as u16)
}

/// Counts the calling CPU among those that run threads.
pub(super) fn join() {
    let record = arch::this_cpu();
    if record.number != 0 {
        // It has run nothing yet.
        record.idle_time.store(time::now(), Ordering::Relaxed);
    }
    let record = core::ptr::from_ref(record).cast_mut();
    RECORDS[usize::from(arch::cpu()) % MOST].store(record, Ordering::Release);
    ONLINE.fetch_or(own_bit(), Ordering::Relaxed);
}

/// One bit for each CPU that runs threads.
pub fn online() -> u64 {
    ONLINE.load(Ordering::Relaxed)
}

/// The number of CPUs that run threads. They are the first ones.
pub fn count() -> u32 {
    online().count_ones()
}

/// The record of a CPU that runs threads.
pub(super) fn record(cpu: usize) -> Option<&'static CpuRecord> {
    let record = RECORDS.get(cpu)?.load(Ordering::Acquire);
    // SAFETY: the record of a CPU lives forever, and is only shared.
    unsafe { record.as_ref() }
}

/// Does work while no other CPU is in the core; not at all if one waits for the kernel's lock
/// there.
pub(super) fn without_others<T>(work: impl FnOnce() -> T) -> Option<T> {
    if !kernel_lock::is_used() {
        return Some(work());
    }
    kernel_lock::hold_off((0..MOST).filter_map(record), work)
}

/// Whether another CPU is in the core, in a fault or a call about memory.
pub(super) fn is_any_beside() -> bool {
    kernel_lock::is_used() && (0..MOST).filter_map(record).any(kernel_lock::is_beside)
}

/// The record of the CPU that runs the thread.
pub(super) fn record_of(thread: &Thread) -> Option<&'static CpuRecord> {
    if core::ptr::eq(arch::running().cast_const().cast(), thread) {
        Some(arch::this_cpu())
    } else if kernel_lock::is_used() {
        record(thread.runs_on.load(Ordering::Relaxed) as usize)
    } else {
        None
    }
}

/// The number of faults of programs on all CPUs.
pub(super) fn page_faults() -> u64 {
    let records = (0..MOST).filter_map(record);
    records.map(|record| record.page_faults.load(Ordering::Relaxed)).sum()
}

/// The time until `now` in which a CPU has run no thread since power-on, in nanoseconds; 0 for a
/// CPU that does not run threads. Exact for the holder of the kernel's lock, without which no CPU
/// begins or ends to idle.
pub fn idle_time(cpu: u32, now: u64) -> u64 {
    let Some(record) = record(cpu as usize) else { return 0 };
    let begun = record.idles_since.load(Ordering::Relaxed);
    record.idle_time.load(Ordering::Relaxed) + now.saturating_sub(begun)
}

/// The number of switches of all CPUs between threads, and to and from their idle loops.
pub fn switches() -> u64 {
    let records = (0..MOST).filter_map(record);
    records.map(|record| record.switches.load(Ordering::Relaxed)).sum()
}

/// The number of threads that run on a CPU, or are ready to.
pub fn threads_in_use() -> usize {
    let runs = |record: &&CpuRecord| !record.running.load(Ordering::Relaxed).is_null();
    (0..MOST).filter_map(record).filter(runs).count() + ready::count()
}

/// Starts to count idle time of the calling CPU. The caller holds the kernel's lock.
pub(super) fn count_idle_time() {
    arch::this_cpu().idles_since.store(time::now(), Ordering::Relaxed);
}

/// Ends [`count_idle_time`].
pub(super) fn end_idle_time() {
    let record = arch::this_cpu();
    let begun = record.idles_since.swap(u64::MAX, Ordering::Relaxed);
    let length = time::now().saturating_sub(begun);
    record.idle_time.fetch_add(length, Ordering::Relaxed);
}

/// Marks the calling CPU as idle. It then looks for ready threads once more.
pub(super) fn begin_to_idle() {
    IDLE.fetch_or(own_bit(), Ordering::Relaxed);
    // The mark before the look: as in `call_for`.
    fence(Ordering::SeqCst);
}

/// Ends [`begin_to_idle`].
pub(super) fn end_to_idle() {
    IDLE.fetch_and(!own_bit(), Ordering::Relaxed);
}

/// Whether all CPUs but the caller's idle, with no new work.
pub(super) fn all_others_idle() -> bool {
    IDLE.load(Ordering::Relaxed) | own_bit() == online()
}

/// Makes an idle CPU run a thread that is ready. If all CPUs that may run it are busy with others,
/// one of them gets time slices.
pub(super) fn call_for(thread: &Thread) {
    let allowed = thread.allowed.load(Ordering::Relaxed) & online();
    // The thread in the queue before the look at the marks: a CPU that has not set its own yet
    // looks into the queue after that.
    fence(Ordering::SeqCst);
    let chosen = loop {
        let idle = IDLE.load(Ordering::Relaxed) & allowed;
        // The caller itself is marked as idle if an interrupt has woken it.
        let chosen = if idle & own_bit() != 0 { own_bit() } else { idle & idle.wrapping_neg() };
        // Another CPU may have called the chosen one for another thread.
        if IDLE.fetch_and(!chosen, Ordering::Relaxed) & chosen == chosen {
            break chosen;
        }
    };
    let called = if chosen != 0 { chosen } else { allowed & allowed.wrapping_neg() };
    let is_served_here = chosen == 0 && allowed & own_bit() != 0;
    if called != 0 && called != own_bit() && !is_served_here {
        arch::interrupt(called.trailing_zeros() as u16);
    }
}

/// Makes a thread that runs on another CPU look for its work. It enters the kernel for that.
#[cold]
pub(super) fn kick(thread: &Thread) {
    let cpu = thread.runs_on.load(Ordering::Relaxed);
    if cpu != NO_CPU && cpu != u32::from(arch::cpu()) {
        arch::interrupt(cpu as u16);
    }
}

/// Sets the CPUs that may run a thread, one bit for each. At least one of them is online. The
/// thread leaves any other CPU soon. A thread that waits for a CPU is offered to the new ones.
pub(super) fn set_allowed(thread: &Thread, cpus: u64) {
    thread.allowed.store(cpus, Ordering::Relaxed);
    // The look takes the queue's lock after the store. So a thread that a fault appends later is
    // offered by that wake-up, which reads the new set.
    if kernel_lock::is_used() && ready::holds(thread) {
        scheduler::look();
        call_for(thread);
    }
    if let Some(record) = record_of(thread)
        && cpus & 1 << record.number == 0
    {
        thread.work.fetch_or(work::RESCHEDULE, Ordering::Relaxed);
        kick(thread);
    }
}

/// Whether this CPU may run the thread.
pub(super) fn is_allowed_here(thread: &Thread) -> bool {
    thread.allowed.load(Ordering::Relaxed) & own_bit() != 0
}
