//! The record of a CPU: the facts about it that the layers above need, on all architectures.
//!
//! Only the CPU itself writes its record, in the kernel, where nothing interrupts it. So plain loads
//! and stores suffice, and the fields are atomics only because other CPUs may read them.

use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64};

/// The record of one CPU.
#[repr(C)]
pub struct CpuRecord {
    /// The running thread, in the scheduler's form; null in the idle loop.
    pub running: AtomicPtr<()>,
    /// The address space whose tables are loaded, in the scheduler's form; null for the kernel's.
    pub space: AtomicPtr<()>,
    /// The time when the running thread was scheduled, in nanoseconds since power-on.
    pub runs_since: AtomicU64,
    /// The number of faults of programs on the CPU.
    pub page_faults: AtomicU64,
    /// The value of the fault counter when the running thread was scheduled.
    pub faults_at_switch: AtomicU64,
    /// The time in which the CPU ran no thread, up to [`CpuRecord::idles_since`], in nanoseconds.
    pub idle_time: AtomicU64,
    /// The time since which the CPU runs no thread, in nanoseconds since power-on; `u64::MAX` while
    /// it does.
    pub idles_since: AtomicU64,
    /// The number of switches between threads, and to and from the idle loop.
    pub switches: AtomicU64,
    /// The end of the running thread's time slice; `u64::MAX` for none.
    pub turn_ends: AtomicU64,
    /// The time that the CPU's timer is set for; `u64::MAX` for none.
    pub timer_at: AtomicU64,
    /// Whether the CPU holds the kernel's lock, and whether it is in the core without it, in the
    /// form of [`crate::kernel_lock`].
    pub in_kernel: AtomicU8,
    /// The number of the CPU.
    pub number: u64,
}

impl CpuRecord {
    /// The record of CPU `number` before its first thread.
    pub const fn new(number: u64) -> Self {
        Self {
            running: AtomicPtr::new(core::ptr::null_mut()),
            space: AtomicPtr::new(core::ptr::null_mut()),
            runs_since: AtomicU64::new(0),
            page_faults: AtomicU64::new(0),
            faults_at_switch: AtomicU64::new(0),
            idle_time: AtomicU64::new(0),
            idles_since: AtomicU64::new(u64::MAX),
            switches: AtomicU64::new(0),
            turn_ends: AtomicU64::new(u64::MAX),
            timer_at: AtomicU64::new(u64::MAX),
            in_kernel: AtomicU8::new(0),
            number,
        }
    }
}
