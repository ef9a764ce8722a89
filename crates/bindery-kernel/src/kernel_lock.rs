//! The kernel's lock: of all CPUs, the holder alone runs code of the kernel, but for the core.
//!
//! A CPU takes the lock on each entry from a program, and gives it back on the return and while it
//! idles. A switch of threads leaves the lock with the CPU. So code between two sleeps stays atomic
//! on any number of CPUs. Only programs, their page faults and most calls about memory run at the
//! same time.
//!
//! The lock has no order. With an order, it would often wait for a CPU of an emulator that does not
//! run at the moment. A holder that stays in the kernel for long lets others have it ([`offer`]).
//!
//! # Work beside the holder
//! A program's page fault enters the core without the lock ([`beside`]), and so does a call about
//! memory that needs nothing else of the kernel. Code that the core calls back takes the lock for
//! as long as it needs it ([`inside`]), unless the CPU has it already: sleeps, pagers, collections
//! of memory. A CPU that waits for the lock there may hold locks of the core for which threads
//! sleep, but never one for which CPUs spin:
//! 1. CPU A is beside, holds the lock of a table, and waits for the kernel's lock.
//! 2. CPU B holds the kernel's lock, and spins for the lock of that table.
//! 3. Neither ever continues.
//!
//! So the services that the core calls anywhere (`Platform::unpark`, signals, notes) never take the
//! kernel's lock. The spin locks of the queues that they change suffice, since their holders wait
//! for nothing.
//!
//! A thread beside uses its address space, its number, its signals and its work, and no other state
//! of the kernel. None of that is replaced while the thread is in the core: another thread that
//! executes a program or ends the process waits for its end.
//!
//! [`hold_off`] keeps such work out of the core for the auditor.
//!
//! # Requests
//! A CPU that waits for the lock answers the requests of other CPUs ([`arch::answer`]), because the
//! holder may wait for its answer. So does a CPU that waits for a spin lock
//! ([`crate::sync::relax`]). Such an answer touches nothing but the CPU's own TLB.
//!
//! # Read sections
//! The core frees what it has unlinked when all read sections that could have found it have
//! ended (`Platform::synchronize`). Nothing preempts the kernel, and no thread sleeps in a
//! section. So all the time in which a CPU holds the lock or is beside it counts as one
//! section ([`ReadSections`]), and the many short ones of the core cost nothing. A CPU that looks
//! for the end of a grace period, or waits for the lock, is outside of those, and leaves its
//! section meanwhile. A CPU that idles or runs a program is in none.
//!
//! As long as only the first CPU runs threads, there is no lock to take, and nothing is counted.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bindery::platform::{Cpu, GracePeriod};
use bindery_parts::{ReadCpu, ReadSections};

use crate::arch::{self, CpuRecord};

/// The maximum number of CPUs that run threads; further ones only idle.
pub const MOST_CPUS: usize = 64;

/// Whether several CPUs run threads. Never reset.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Whether a CPU holds the lock.
static IS_HELD: AtomicBool = AtomicBool::new(false);

/// The number of CPUs that wait for the lock.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// Whether all work takes the lock before it enters the core.
static IS_HELD_OFF: AtomicBool = AtomicBool::new(false);

/// The words of the CPUs in [`SECTIONS`].
static SECTION_CPUS: [ReadCpu; MOST_CPUS] = [const { ReadCpu::new() }; MOST_CPUS];

/// Which CPUs are in the kernel, if several run threads.
static SECTIONS: ReadSections<'static> = ReadSections::new(&SECTION_CPUS);

/// The number of times that [`offer`] looks whether another CPU has taken the lock.
const PATIENCE: u32 = 1000;

/// Values of [`CpuRecord::in_kernel`].
mod place {
    /// In a program, idle, or on the way to the lock.
    pub const ELSEWHERE: u8 = 0;
    /// The CPU holds the lock.
    pub const INSIDE: u8 = 1;
    /// In the core, without the lock.
    pub const BESIDE: u8 = 2;
    /// In the core, waiting for the lock.
    pub const WAITING: u8 = 3;
}

/// Whether several CPUs run threads.
#[inline]
pub fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// From here on there is a lock, and the calling CPU holds it. Called once, while no other CPU runs
/// threads.
pub fn begin() {
    set_place(place::INSIDE);
    SECTIONS.enter(own());
    IS_HELD.store(true, Ordering::Relaxed);
    IS_USED.store(true, Ordering::Release);
}

/// The calling CPU.
#[inline]
fn own() -> Cpu {
    Cpu(arch::cpu())
}

fn set_place(place: u8) {
    arch::this_cpu().in_kernel.store(place, Ordering::Relaxed);
}

/// Takes the lock. The caller does not hold it.
#[inline]
pub fn lock() {
    if is_used() {
        if !try_to_take() {
            wait();
        }
        set_place(place::INSIDE);
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
        arch::pause();
    }
    WAITING.fetch_sub(1, Ordering::Relaxed);
}

/// Gives the lock back. The caller holds it.
#[inline]
pub fn unlock() {
    if is_used() {
        SECTIONS.leave(own());
        give_back(place::ELSEWHERE);
    }
}

/// Gives the lock back. The next holder finds the caller at `place`.
fn give_back(place: u8) {
    set_place(place);
    IS_HELD.store(false, Ordering::Release);
}

/// Whether the calling CPU holds the lock, or there is none.
#[inline]
pub fn is_held() -> bool {
    !is_used() || arch::this_cpu().in_kernel.load(Ordering::Relaxed) == place::INSIDE
}

/// Does work in the core for a program, without the lock. The caller does not hold it, and several
/// CPUs run threads.
#[inline]
pub fn beside<T>(work: impl FnOnce() -> T) -> T {
    // Both orders as in `hold_off`: one of the two CPUs sees what the other has written.
    arch::this_cpu().in_kernel.store(place::BESIDE, Ordering::SeqCst);
    if IS_HELD_OFF.load(Ordering::SeqCst) {
        return instead(work);
    }
    SECTIONS.enter(own());
    let outcome = work();
    SECTIONS.leave(own());
    // The thread may have slept, so this may be another CPU.
    arch::this_cpu().in_kernel.store(place::ELSEWHERE, Ordering::Release);
    outcome
}

/// As [`beside`], with the lock.
#[cold]
fn instead<T>(work: impl FnOnce() -> T) -> T {
    set_place(place::ELSEWHERE);
    lock();
    let outcome = work();
    unlock();
    outcome
}

/// Does work that needs the lock, and takes the lock for it unless the calling CPU holds it. The
/// caller holds no spin lock, and is in no read section of the core.
#[inline]
pub fn inside<T>(work: impl FnOnce() -> T) -> T {
    if is_held() { work() } else { with_lock(work) }
}

/// The rare part of [`inside`]. The CPU is in [`beside`].
#[cold]
fn with_lock<T>(work: impl FnOnce() -> T) -> T {
    set_place(place::WAITING);
    SECTIONS.leave(own());
    lock();
    let outcome = work();
    // The section goes on.
    give_back(place::BESIDE);
    outcome
}

/// Does work while no CPU is beside: later ones wait for the lock, which the caller holds. Returns
/// `None`, without a try, if one of the CPUs waits for the lock in the core, and so cannot leave
/// it.
pub fn hold_off<T>(
    mut cpus: impl Iterator<Item = &'static CpuRecord>,
    work: impl FnOnce() -> T,
) -> Option<T> {
    IS_HELD_OFF.store(true, Ordering::SeqCst);
    // Work beside may wait for the end of all sections (`synchronize`).
    let are_out = outside_of_sections(|| {
        cpus.all(|cpu| {
            loop {
                match cpu.in_kernel.load(Ordering::SeqCst) {
                    place::BESIDE => arch::answer(),
                    place::WAITING => break false,
                    _ => break true,
                }
                arch::pause();
            }
        })
    });
    let outcome = are_out.then(work);
    IS_HELD_OFF.store(false, Ordering::Relaxed);
    outcome
}

/// Whether the CPU is in the core without the lock, or waits for it there.
pub fn is_beside(cpu: &CpuRecord) -> bool {
    matches!(cpu.in_kernel.load(Ordering::Relaxed), place::BESIDE | place::WAITING)
}

/// Whether other CPUs wait for the lock, which the caller holds.
#[inline]
pub fn is_wanted() -> bool {
    is_used() && WAITING.load(Ordering::Relaxed) != 0
}

/// Lets the CPUs that wait for the lock have it first, unless none of them takes it soon. For the
/// caller, this is a sleep.
pub fn offer() {
    if !is_used() {
        return;
    }
    if !is_wanted() {
        // The caller may wait in a loop for a CPU in the core, which waits for the end of all
        // sections or for an answer.
        arch::answer();
        return outside_of_sections(|| {});
    }
    unlock();
    for _ in 0..PATIENCE {
        if IS_HELD.load(Ordering::Relaxed) || WAITING.load(Ordering::Relaxed) == 0 {
            break;
        }
        arch::answer();
        arch::pause();
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

/// As [`bindery::Platform::is_over`], if several CPUs run threads. Most answers read one word. A CPU
/// looks at the others only once in 64 questions, since a look takes lines from all of them.
#[cold]
#[inline(never)]
pub fn is_over(period: GracePeriod) -> bool {
    SECTIONS.has_passed(period)
        || SECTIONS.is_to_look(own()) && outside_of_sections(|| SECTIONS.advance_to(period))
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
