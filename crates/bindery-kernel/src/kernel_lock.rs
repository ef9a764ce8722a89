//! The kernel's lock: of all CPUs, the holder alone runs code of the kernel.
//!
//! A CPU takes the lock on each entry from a program, and gives it back on the return and while it
//! idles. A switch of threads leaves the lock with the CPU. So code between two sleeps stays atomic
//! on any number of CPUs, and only programs run at the same time.
//!
//! The lock has no order. With an order, it would often wait for a CPU of an emulator that does not
//! run at the moment. A holder that stays in the kernel for long lets others have it ([`offer`]).
//!
//! The only code that runs without the lock answers requests of other CPUs ([`arch::answer`]), and
//! touches nothing but its own TLB. A CPU that waits for the lock answers them, too, because the
//! holder may wait for its answer.
//!
//! # Read sections
//! The core frees what it has unlinked when all read sections that could have found it have
//! ended (`Platform::synchronize`). Nothing preempts the kernel, and no thread sleeps in a
//! section. So all the time in which a CPU holds the lock counts as one section
//! ([`ReadSections`]), and the many short ones of the core cost nothing. A CPU that asks for the
//! end of a grace period is outside of those, and leaves its section for the question. A CPU that
//! idles, runs a program, or waits for the lock is in none.
//!
//! As long as only the first CPU runs threads, there is no lock to take, and nothing is counted.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bindery::platform::{Cpu, GracePeriod};
use bindery_parts::{ReadCpu, ReadSections};

use crate::arch;

/// The maximum number of CPUs that run threads; further ones only idle.
pub const MOST_CPUS: usize = 64;

/// Whether several CPUs run threads. Never reset.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Whether a CPU holds the lock.
static IS_HELD: AtomicBool = AtomicBool::new(false);

/// The number of CPUs that wait for the lock.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// The words of the CPUs in [`SECTIONS`].
static SECTION_CPUS: [ReadCpu; MOST_CPUS] = [const { ReadCpu::new() }; MOST_CPUS];

/// Which CPUs are in the kernel, if several run threads.
static SECTIONS: ReadSections<'static> = ReadSections::new(&SECTION_CPUS);

/// The number of times that [`offer`] looks whether another CPU has taken the lock.
const PATIENCE: u32 = 1000;

/// Whether several CPUs run threads.
#[inline]
pub fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// From here on there is a lock, and the calling CPU holds it. Called once, while no other CPU runs
/// threads.
pub fn begin() {
    SECTIONS.enter(own());
    IS_HELD.store(true, Ordering::Relaxed);
    IS_USED.store(true, Ordering::Release);
}

/// The calling CPU.
#[inline]
fn own() -> Cpu {
    Cpu(arch::cpu())
}

/// Takes the lock. The caller does not hold it.
#[inline]
pub fn lock() {
    if is_used() {
        if !try_to_take() {
            wait();
        }
        SECTIONS.enter(own());
    }
}

#[inline]
fn try_to_take() -> bool {
    IS_HELD.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

#[cold]
fn wait() {
    WAITING.fetch_add(1, Ordering::Relaxed);
    while IS_HELD.load(Ordering::Relaxed) || !try_to_take() {
        arch::answer();
        core::hint::spin_loop();
    }
    WAITING.fetch_sub(1, Ordering::Relaxed);
}

/// Gives the lock back. The caller holds it.
#[inline]
pub fn unlock() {
    if is_used() {
        SECTIONS.leave(own());
        IS_HELD.store(false, Ordering::Release);
    }
}

/// Whether other CPUs wait for the lock, which the caller holds.
#[inline]
pub fn is_wanted() -> bool {
    is_used() && WAITING.load(Ordering::Relaxed) != 0
}

/// Lets the CPUs that wait for the lock have it first, unless none of them takes it soon. For the
/// caller, this is a sleep.
pub fn offer() {
    if !is_wanted() {
        return;
    }
    unlock();
    for _ in 0..PATIENCE {
        if IS_HELD.load(Ordering::Relaxed) || WAITING.load(Ordering::Relaxed) == 0 {
            break;
        }
        arch::answer();
        core::hint::spin_loop();
    }
    lock();
}

// Out of line, so that a machine with one CPU pays for one test in each call of the platform.

/// As [`bindery::Platform::grace_period`], if several CPUs run threads.
#[cold]
#[inline(never)]
pub fn grace_period() -> GracePeriod {
    SECTIONS.grace_period()
}

/// As [`bindery::Platform::is_over`], if several CPUs run threads. Looks at once at the CPUs that
/// hold the period up, so what no other CPU reads is freed without a delay.
#[cold]
#[inline(never)]
pub fn is_over(period: GracePeriod) -> bool {
    let look = || {
        SECTIONS.advance();
        SECTIONS.has_passed(period)
    };
    // The period under way may have to end first, so there are two looks.
    SECTIONS.has_passed(period) || outside_of_sections(|| look() || look())
}

/// As [`bindery::Platform::synchronize`], if several CPUs run threads. Waits by `relax` for the
/// other CPUs that are in the kernel.
#[cold]
#[inline(never)]
pub fn synchronize(relax: impl FnMut()) {
    outside_of_sections(|| SECTIONS.synchronize(relax));
}

/// Does work outside of the CPU's section. The caller is outside of those of the core.
fn outside_of_sections<T>(work: impl FnOnce() -> T) -> T {
    SECTIONS.leave(own());
    let outcome = work();
    SECTIONS.enter(own());
    outcome
}
