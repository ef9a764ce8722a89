//! Wait queues: sleep until an event.

use alloc::collections::VecDeque;
use alloc::sync::{Arc, Weak};

use crate::sync::Mutex;
use crate::time;

use super::thread::Thread;
use super::{scheduler, signal};

/// The reason for an early end of a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interrupted {
    /// A signal that the thread has to handle.
    Signal,
    /// The deadline.
    Deadline,
}

/// The threads that wait for one event. They may be woken without the kernel's lock.
pub struct WaitQueue(Mutex<VecDeque<Arc<Thread>>>);

impl WaitQueue {
    /// An empty queue.
    pub const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Sleeps until `ready` returns a value. Calls `ready` at once and after every wake-up. `ready`
    /// must not sleep.
    ///
    /// # Errors
    /// As [`Interrupted`] says; `ready` was called once more before.
    pub fn wait<T>(
        &self,
        deadline: Option<u64>,
        ready: impl FnMut() -> Option<T>,
    ) -> Result<T, Interrupted> {
        self.wait_unless(deadline, signal::is_waiting, ready)
    }

    /// As [`WaitQueue::wait`], but only the thread's own end interrupts the wait. This is for waits
    /// that a program must not notice.
    ///
    /// # Errors
    /// The end.
    pub(super) fn wait_to_the_end<T>(
        &self,
        ready: impl FnMut() -> Option<T>,
    ) -> Result<T, Interrupted> {
        self.wait_unless(None, signal::must_end, ready)
    }

    fn wait_unless<T>(
        &self,
        deadline: Option<u64>,
        interrupted: impl Fn(&Thread) -> bool,
        mut ready: impl FnMut() -> Option<T>,
    ) -> Result<T, Interrupted> {
        if let Some(value) = ready() {
            return Ok(value);
        }
        let thread = scheduler::current_thread();
        let alarm = deadline.map(|at| {
            let sleeper: Weak<Thread> = Arc::downgrade(&thread);
            time::wake_at(at, sleeper)
        });
        let result = loop {
            scheduler::prepare_to_sleep();
            self.0.lock().push_back(thread.clone());
            let outcome = match ready() {
                Some(value) => Some(Ok(value)),
                None if interrupted(&thread) => Some(Err(Interrupted::Signal)),
                None if deadline.is_some_and(|at| at <= time::now()) => {
                    Some(Err(Interrupted::Deadline))
                }
                None => None,
            };
            if outcome.is_none() {
                scheduler::sleep();
            } else {
                scheduler::stay_awake();
            }
            self.forget(&thread);
            if let Some(outcome) = outcome {
                break outcome;
            }
        };
        if let Some(alarm) = alarm {
            time::cancel(alarm);
        }
        result
    }

    /// Wakes all threads.
    pub fn wake_all(&self) {
        self.wake(usize::MAX);
    }

    /// Wakes the `count` oldest waiters. Returns the number of woken threads.
    pub fn wake(&self, count: usize) -> usize {
        // Locked until all are awake: other CPUs need no kernel's lock to wake threads, and a
        // thread that was still to be woken could leave the queue and end.
        let mut waiting = self.0.lock();
        // Most events have no waiter.
        if waiting.is_empty() {
            return 0;
        }
        let count = count.min(waiting.len());
        waiting.drain(..count).for_each(|thread| scheduler::wake(&thread));
        count
    }

    fn forget(&self, thread: &Arc<Thread>) {
        self.0.lock().retain(|waiting| !Arc::ptr_eq(waiting, thread));
    }
}
