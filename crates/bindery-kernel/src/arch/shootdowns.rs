//! What one CPU asks of others, by [`bindery_parts::Shootdowns`]: to invalidate translations
//! (x86-64), and to make their accesses ordered (`membarrier`).
//!
//! A CPU answers in its interrupt handler or, with interrupts off, where it waits for the kernel's
//! lock, for a spin lock or for answers of its own (`answer`).

use core::sync::atomic::{AtomicU32, Ordering};

use bindery::platform::{Cpu, MAX_CPUS};
use bindery_parts::{LocalTlb, OnCpu, ShootdownCpu, Shootdowns};

static CPUS: [ShootdownCpu; MAX_CPUS] = [const { ShootdownCpu::new() }; MAX_CPUS];

static SHOOTDOWNS: Shootdowns<'static> = Shootdowns::new(&CPUS);

/// The number of CPUs besides the first that answer.
static OTHERS: AtomicU32 = AtomicU32::new(0);

/// The number of CPUs besides the first that answer.
pub fn others() -> u32 {
    OTHERS.load(Ordering::Acquire)
}

/// Counts the calling CPU among [`others`]. It is online, and its interrupts are set up.
pub fn join() {
    OTHERS.fetch_add(1, Ordering::AcqRel);
}

/// The shootdowns as the calling CPU uses them.
#[inline]
pub fn here<T: LocalTlb>(tlb: &'static T) -> OnCpu<'static, 'static, T> {
    SHOOTDOWNS.on(Cpu(super::cpu()), tlb)
}
