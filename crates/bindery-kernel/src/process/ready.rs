//! The run queue: the threads that are ready, for all CPUs, in order of arrival.
//!
//! Its lock orders wake-ups by CPUs that do not hold the kernel's lock. A thread leaves the
//! queue only by a CPU that holds that lock, so a thread that is woken early first sleeps.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use crate::kernel_lock;
use crate::sync::Mutex;

use super::cpus;
use super::thread::Thread;

static READY: Mutex<VecDeque<Arc<Thread>>> = Mutex::new(VecDeque::new());

/// Appends a thread.
pub(super) fn push(thread: Arc<Thread>) {
    READY.lock().push_back(thread);
}

/// Ends the sleep of a thread and appends it. `false` if it does not sleep.
pub(super) fn push_sleeper(thread: &Arc<Thread>) -> bool {
    let mut ready = READY.lock();
    // With the queue locked. Otherwise:
    // 1. A CPU ends the sleep.
    // 2. The thread, which was about to sleep, stays awake, and is not in the queue yet.
    // 3. The CPU appends it, and a third CPU runs it, too.
    let slept = thread.asleep.swap(false, Ordering::AcqRel);
    if slept {
        ready.push_back(thread.clone());
    }
    slept
}

/// Keeps a thread awake that was about to sleep.
pub(super) fn keep_awake(thread: &Thread) {
    let mut ready = READY.lock();
    if !thread.asleep.swap(false, Ordering::AcqRel) {
        // Already woken, so it is in the queue.
        ready.retain(|ready| !core::ptr::eq(&**ready, thread));
    }
}

/// Takes the first thread that this CPU may run.
pub(super) fn take() -> Option<Arc<Thread>> {
    let mut ready = READY.lock();
    if !kernel_lock::is_used() {
        return ready.pop_front();
    }
    let first = ready.iter().position(|thread| cpus::is_allowed_here(thread))?;
    ready.remove(first)
}

/// Whether a thread is ready that this CPU may run.
pub(super) fn is_any_for_this_cpu() -> bool {
    let ready = READY.lock();
    if kernel_lock::is_used() {
        ready.iter().any(|thread| cpus::is_allowed_here(thread))
    } else {
        !ready.is_empty()
    }
}

/// Whether the thread is ready. Linear in the number of ready threads.
pub(super) fn holds(thread: &Thread) -> bool {
    READY.lock().iter().any(|ready| core::ptr::eq(&**ready, thread))
}

/// The number of ready threads.
pub(super) fn count() -> usize {
    READY.lock().len()
}

/// Whether no thread is ready.
pub(super) fn is_empty() -> bool {
    READY.lock().is_empty()
}
