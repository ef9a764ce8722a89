//! The interrupts that CPUs have sent to each other, for `/proc/interrupts`.
//!
//! The sender counts, so a count includes an interrupt that its CPU has not taken yet.

use core::sync::atomic::{AtomicU64, Ordering};

use bindery::platform::MAX_CPUS;

/// The reason for an interrupt of another CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// A thread is ready for it, or the thread that it runs has work.
    Look,
    /// Its accesses have to become ordered (`membarrier`).
    Order,
    /// Its TLB has to be flushed.
    #[cfg(target_arch = "x86_64")]
    Flush,
}

#[cfg(target_arch = "x86_64")]
const REASONS: usize = 3;
#[cfg(target_arch = "aarch64")]
const REASONS: usize = 2;

/// By reason and by the CPU that is interrupted.
static SENT: [[AtomicU64; MAX_CPUS]; REASONS] =
    [const { [const { AtomicU64::new(0) }; MAX_CPUS] }; REASONS];

/// Counts an interrupt of CPU `to`.
pub fn count(reason: Reason, to: u16) {
    SENT[reason as usize][usize::from(to)].fetch_add(1, Ordering::Relaxed);
}

/// The number of interrupts of CPU `to` so far.
pub fn sent(reason: Reason, to: u16) -> u64 {
    SENT[reason as usize].get(usize::from(to)).map_or(0, |count| count.load(Ordering::Relaxed))
}
