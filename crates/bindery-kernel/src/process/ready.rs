//! The run queue: the threads that are ready, for all CPUs, in order of arrival.

use alloc::collections::VecDeque;
use alloc::sync::Arc;

use crate::kernel_lock;
use crate::sync::Mutex;

use super::cpus;
use super::thread::Thread;

static READY: Mutex<VecDeque<Arc<Thread>>> = Mutex::new(VecDeque::new());

/// Appends a thread.
pub(super) fn push(thread: Arc<Thread>) {
    READY.lock().push_back(thread);
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

/// Removes a thread.
pub(super) fn remove(thread: &Thread) {
    READY.lock().retain(|ready| !core::ptr::eq(&**ready, thread));
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

/// Whether no thread is ready.
pub(super) fn is_empty() -> bool {
    READY.lock().is_empty()
}
