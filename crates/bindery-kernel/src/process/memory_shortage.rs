//! The out-of-memory killer: which process it kills, and `oom_score_adj`.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicI32, Ordering};

use crate::errno::Errno;
use crate::memory::{kernel_map, memory};
use crate::{log, time};

use super::credentials::{Capability, credentials};
use super::{Process, all, end, scheduler, signal, thread};

/// The adjustment of a process that is never killed.
const NEVER: i32 = -1000;
/// The adjustment of one that goes first.
const FIRST: i32 = 1000;

/// What a process says about its turn when memory runs out. Children inherit it, and `execve` keeps
/// it.
#[derive(Default)]
pub(super) struct Standing {
    adjustment: AtomicI32,
    /// What was set last by a thread that may do so freely; others go no lower.
    lowest: AtomicI32,
}

impl Clone for Standing {
    fn clone(&self) -> Self {
        let copy = |value: &AtomicI32| AtomicI32::new(value.load(Ordering::Relaxed));
        Self { adjustment: copy(&self.adjustment), lowest: copy(&self.lowest) }
    }
}

impl Process {
    /// `oom_score_adj`: thousandths of all memory that count for or against the process.
    pub fn kill_adjustment(&self) -> i32 {
        self.standing.adjustment.load(Ordering::Relaxed)
    }

    /// Sets [`Process::kill_adjustment`], of all processes with the same memory too, as Linux does:
    /// killing one of them frees nothing.
    ///
    /// # Errors
    /// `EINVAL` for what is not from -1000 to 1000; `EACCES` for less than what a privileged thread
    /// set last, without `CAP_SYS_RESOURCE`.
    pub fn set_kill_adjustment(&self, adjustment: i32) -> Result<(), Errno> {
        if !(NEVER..=FIRST).contains(&adjustment) {
            return Err(Errno::EINVAL);
        }
        if credentials().can(Capability::Resource) {
            self.standing.lowest.store(adjustment, Ordering::Relaxed);
        } else if adjustment < self.standing.lowest.load(Ordering::Relaxed) {
            return Err(Errno::EACCES);
        }
        self.standing.adjustment.store(adjustment, Ordering::Relaxed);
        let Some(space) = self.try_space() else { return Ok(()) };
        for other in all() {
            if other.try_space().is_some_and(|its| Arc::ptr_eq(&its, &space)) {
                other.standing.adjustment.store(adjustment, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// How much speaks for killing the process, in pages: those that it has in memory, those of its
    /// tables, and its adjustment's part of all memory. `None` for one that is never killed.
    fn badness(&self) -> Option<i64> {
        let (adjustment, space) = (self.kill_adjustment(), self.try_space()?);
        if self.id == 1 || adjustment == NEVER {
            return None;
        }
        let counts = space.counts();
        let tables = counts.tables_allocated.saturating_sub(counts.tables_freed);
        let total = memory().total_frames() as i64;
        let part = i64::from(adjustment) * total / 1000;
        Some((space.resident().total() + tables) as i64 + part)
    }

    /// `oom_score`: [`Process::badness`] as a number from 0, for one that is never killed, to 2000
    /// and a bit. As on Linux, 666 means next to no memory and no adjustment.
    pub fn kill_score(&self) -> i64 {
        let total = memory().total_frames().max(1) as i64;
        self.badness().map_or(0, |badness| ((1000 + badness * 1000 / total) * 2 / 3).max(0))
    }
}

/// Gives back frames that are kept for later: spare stacks, and what the kernel has unmapped.
pub fn give_back_kept() {
    thread::forget_spare_stacks();
    kernel_map().purge();
}

/// Makes room when a fault found no memory: takes back what the kernel has unmapped, and where that
/// is nothing, ends the process that most speaks against ([`Process::badness`]). `true` where the
/// running thread is to end itself.
pub fn memory_ran_out() -> bool {
    thread::forget_spare_stacks();
    if kernel_map().freed_pages() > 0 {
        kernel_map().purge();
        return false;
    }
    let thread = scheduler::current_thread();
    if signal::must_end(&thread) {
        return true;
    }
    let living: Vec<_> =
        all().into_iter().filter(|process| process.try_space().is_some()).collect();
    // One that ends already only needs the CPU.
    let victim = living.iter().find(|process| process.state.lock().status.is_some());
    let victim = match victim.or_else(|| worst(&living)) {
        Some(victim) => victim.clone(),
        None => return true,
    };
    drop(living);
    if victim.state.lock().status.is_none() {
        let name = victim.name();
        log!("memory has run out: process {} ({}) is killed", victim.id, name.escape_ascii());
        end::kill_group(&victim);
    }
    // The victim may wait for something that the running thread holds: after a while the thread
    // goes back instead, and tries again from the beginning.
    let patience = time::now() + time::SECOND;
    while victim.try_space().is_some() && !signal::must_end(&thread) {
        if time::now() > patience {
            return true;
        }
        scheduler::yield_now();
    }
    signal::must_end(&thread)
}

/// The process that most speaks against. Where none may be killed, the first process, whose end is
/// that of the machine.
fn worst(living: &[Arc<Process>]) -> Option<&Arc<Process>> {
    let known = living.iter().filter_map(|process| Some((process.badness()?, process)));
    let worst = known.max_by_key(|(badness, _)| *badness).map(|(_, process)| process);
    worst.or_else(|| living.iter().find(|process| process.id == 1))
}
