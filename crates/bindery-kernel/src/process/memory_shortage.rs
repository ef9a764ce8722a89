//! The out-of-memory killer: its choice of a process, and `oom_score_adj`.

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::errno::Errno;
use crate::memory::{Space, kernel_map, memory};
use crate::sync::Mutex;
use crate::{log, time};

use super::credentials::{Capability, credentials};
use super::{Process, Thread, all, cpus, kill, scheduler, signal, table, thread};

/// The adjustment of a process that is never killed.
const NEVER: i32 = -1000;
/// The adjustment of a process that is killed first.
const FIRST: i32 = 1000;

/// How long a thread without memory waits for others that leave their address space, in
/// nanoseconds. Their pages become free at the end of a long walk, which takes seconds where the
/// CPUs of this machine share few of the host. It is bounded, because a leaver may wait for a lock
/// of the thread.
const PATIENCE_WITH_LEAVERS: u64 = 30 * time::SECOND;

/// A process's rank when memory runs out. Children inherit it, and `execve` preserves it.
#[derive(Default)]
pub(super) struct Standing {
    adjustment: AtomicI32,
    /// The last value that a privileged thread set; other threads cannot set a lower value.
    lowest: AtomicI32,
}

impl Clone for Standing {
    fn clone(&self) -> Self {
        let copy = |value: &AtomicI32| AtomicI32::new(value.load(Ordering::Relaxed));
        Self { adjustment: copy(&self.adjustment), lowest: copy(&self.lowest) }
    }
}

impl Process {
    /// `oom_score_adj`: an adjustment of the score, in thousandths of all memory.
    pub fn kill_adjustment(&self) -> i32 {
        self.standing.adjustment.load(Ordering::Relaxed)
    }

    /// Sets [`Process::kill_adjustment`] of this process and of all processes with the same memory,
    /// as Linux does, because killing only one of them frees nothing.
    ///
    /// # Errors
    /// `EINVAL` outside -1000 to 1000; `EACCES` without `CAP_SYS_RESOURCE`, below the value that a
    /// privileged thread set last.
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

    fn may_be_killed(&self) -> bool {
        self.id != 1 && self.kill_adjustment() != NEVER
    }

    /// The process's score for the killer, in pages: its pages in memory and in swap, its tables,
    /// and the adjustment's share of `total` (Linux: `oom_badness`). `None` if it is never killed.
    fn badness(&self, total: u64) -> Option<i64> {
        let (adjustment, space) = (self.kill_adjustment(), self.try_space()?);
        if !self.may_be_killed() {
            return None;
        }
        let counts = space.counts();
        let tables = counts.tables_allocated.saturating_sub(counts.tables_freed);
        let share = i64::from(adjustment) * total as i64 / 1000;
        Some((space.resident().total() + counts.swap_pages + tables) as i64 + share)
    }

    /// `oom_score`: [`Process::badness`] on a scale from 0 (never killed) to a little over 2000. As
    /// on Linux, 666 means almost no memory and no adjustment.
    pub fn kill_score(&self) -> i64 {
        let total = memory_and_swap();
        let score = |badness: i64| ((1000 + badness * 1000 / total as i64) * 2 / 3).max(0);
        self.badness(total).map_or(0, score)
    }
}

/// The memory of the process that was killed last. Until it is freed, no other process is killed.
static DYING: Mutex<Weak<Space>> = Mutex::new(Weak::new());

/// The number of victims whose memory was freed since power-on.
static FREED_VICTIMS: AtomicU64 = AtomicU64::new(0);

/// The pages of the machine's memory and of all swap areas.
fn memory_and_swap() -> u64 {
    memory().total_frames() + memory().swap_areas().map(|area| area.slots).sum::<u64>()
}

/// Frees frames that are kept for reuse: spare stacks, and unmapped areas of the kernel.
pub fn free_kept() {
    thread::free_spare_stacks();
    kernel_map().purge();
}

/// Frees memory for a fault that ran out of memory: purges unmapped areas of the kernel or, without
/// such areas, ends the process with the highest [`Process::badness`]. `true` if the running thread
/// has to end itself.
pub fn memory_ran_out() -> bool {
    thread::free_spare_stacks();
    if kernel_map().freed_pages() > 0 {
        kernel_map().purge();
        return false;
    }
    let thread = scheduler::current_thread();
    if signal::must_end(&thread) {
        return true;
    }
    let free = memory().free_frame_count();
    wait_for_interrupted(&thread);
    if memory().free_frame_count() > free || has_another_attempt(&thread) {
        return signal::must_end(&thread);
    }
    let space = DYING.lock().clone();
    let space = if space.strong_count() > 0 { space } else { choose_and_kill() };
    if space.strong_count() == 0 {
        return true;
    }
    // The victim may wait for a lock of the running thread. So after a while the thread abandons
    // the fault and retries it from the beginning, with another victim.
    let patience = time::now() + time::SECOND;
    while space.strong_count() > 0 && !signal::must_end(&thread) {
        if time::now() > patience {
            *DYING.lock() = Weak::new();
            return true;
        }
        // No interrupt arrives in the kernel, so expired sleepers are woken here.
        time::expired();
        scheduler::yield_now();
    }
    signal::must_end(&thread)
}

/// Whether a victim was freed since the thread ran out of memory the last time. Then its attempt
/// may have failed before that, and waited for the kernel's lock while another thread's victim
/// freed all that is needed: killing one more process would be wrong. Each victim allows one more
/// attempt of each thread.
fn has_another_attempt(thread: &Thread) -> bool {
    let freed = FREED_VICTIMS.load(Ordering::Relaxed);
    thread.victims_seen.swap(freed, Ordering::Relaxed) != freed
}

/// Notes that an address space was freed.
pub(super) fn note_freed(space: &Weak<Space>) {
    if DYING.lock().ptr_eq(space) {
        FREED_VICTIMS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits for threads that yielded while they freed memory by reclaim, for processes that leave
/// their memory, and for other CPUs in the core. A thread that finds no memory itself also calls
/// this function; the others do not wait for it, so the last one continues.
fn wait_for_interrupted(thread: &Thread) {
    let begun = time::now();
    while !signal::must_end(thread) {
        let patience = if table::leaving_spaces() > 0 {
            PATIENCE_WITH_LEAVERS
        } else if scheduler::yielded() > 0 || cpus::is_any_beside() {
            time::SECOND
        } else {
            return;
        };
        if time::now() > begun + patience {
            return;
        }
        time::expired();
        scheduler::yield_now();
    }
}

/// Ends the process with the highest badness, and all processes that share its memory, unless a
/// process with memory is already ending and needs only the CPU. Returns that memory, which others
/// may hold for a moment longer; `None` if no process may be killed.
fn choose_and_kill() -> Weak<Space> {
    let living: Vec<_> =
        all().into_iter().filter(|process| process.try_space().is_some()).collect();
    let ends = |process: &Process| process.state.lock().status.is_some();
    let has = |process: &Process, space: &Arc<Space>| {
        process.try_space().is_some_and(|its| Arc::ptr_eq(&its, space))
    };
    // A child of `vfork` that ends frees nothing while its parent goes on.
    let goes_on = |space: &Arc<Space>| living.iter().any(|user| !ends(user) && has(user, space));
    let ending = living
        .iter()
        .find(|process| ends(process) && process.try_space().is_some_and(|space| !goes_on(&space)));
    let space = ending.or_else(|| worst(&living)).and_then(|victim| victim.try_space());
    let Some(space) = space else { return Weak::new() };
    for process in &living {
        if has(process, &space) && !ends(process) {
            let name = process.name();
            log!("memory has run out: process {} ({}) is killed", process.id, name.escape_ascii());
            kill::kill_group(process);
        }
    }
    let space = Arc::downgrade(&space);
    *DYING.lock() = space.clone();
    space
}

/// The process with the highest badness. A process whose memory another one uses that is never
/// killed is not chosen, because its end would free nothing. If no process may be killed, the first
/// process, whose end stops the machine.
fn worst(living: &[Arc<Process>]) -> Option<&Arc<Process>> {
    let total = memory_and_swap();
    let spared = living.iter().filter(|process| !process.may_be_killed());
    let spared: Vec<_> = spared.filter_map(|process| process.try_space()).collect();
    let is_spared = |space: &Arc<Space>| spared.iter().any(|its| Arc::ptr_eq(its, space));
    let known = living.iter().filter(|process| !process.try_space().is_some_and(|s| is_spared(&s)));
    let known = known.filter_map(|process| Some((process.badness(total)?, process)));
    let worst = known.max_by_key(|(badness, _)| *badness).map(|(_, process)| process);
    worst.or_else(|| living.iter().find(|process| process.id == 1))
}
