//! Sleeps until a word of the kernel changes, with queues by the word's address.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering, fence};

use crate::kernel_lock;
use crate::sync::{self, Mutex};

use super::scheduler;
use super::thread::Thread;

/// The sleeping threads in order of arrival, each with its word's address.
static PARKED: Mutex<VecDeque<(usize, Arc<Thread>)>> = Mutex::new(VecDeque::new());

/// The number of threads in [`park`], without those that wait for the handler of a userfaultfd.
static INSIDE: AtomicU32 = AtomicU32::new(0);

/// As [`sync::park`].
pub fn park(word: &AtomicU32, expected: u32) {
    sleep_on(word, expected, || {
        INSIDE.fetch_add(1, Ordering::Relaxed);
        scheduler::sleep();
        INSIDE.fetch_sub(1, Ordering::Relaxed);
    });
}

/// As [`park`], for an access that waits for the handler of a userfaultfd. Such a thread holds
/// nothing that a caller of [`parked`] could wait for.
pub fn park_for_handler(word: &AtomicU32, expected: u32) {
    sleep_on(word, expected, scheduler::sleep);
}

fn sleep_on(word: &AtomicU32, expected: u32, sleep: impl FnOnce()) {
    if !scheduler::is_in_thread() {
        // Threads on other CPUs may change the word.
        kernel_lock::offer();
        sync::relax();
        return;
    }
    let thread = scheduler::current_thread();
    scheduler::prepare_to_sleep();
    change(|parked| parked.push_back((ptr::from_ref(word).addr(), thread.clone())));
    // The last check: from here on, a wake-up finds the thread (`sync::unpark`).
    fence(Ordering::SeqCst);
    if word.load(Ordering::Acquire) == expected {
        sleep();
    } else {
        scheduler::stay_awake();
    }
    change(|parked| parked.retain(|(_, parked)| !Arc::ptr_eq(parked, &thread)));
}

/// The number of threads in [`park`], including threads that were woken but have not run yet.
pub fn parked() -> u32 {
    INSIDE.load(Ordering::Relaxed)
}

/// Whether the thread sleeps in [`park`].
pub fn is_parked(thread: &Thread) -> bool {
    PARKED.lock().iter().any(|(_, parked)| ptr::eq(&**parked, thread))
}

/// Wakes all threads that sleep on the word at this address. The word may have been freed. The
/// caller may be in the core without the kernel's lock.
pub fn unpark(word: *const AtomicU32) {
    let address = word.addr();
    change(|parked| {
        parked.retain(|(at, thread)| {
            let found = *at == address;
            if found {
                scheduler::wake(thread);
            }
            !found
        });
    });
}

fn change(change: impl FnOnce(&mut VecDeque<(usize, Arc<Thread>)>)) {
    let mut parked = PARKED.lock();
    change(&mut parked);
    sync::set_parked(parked.len() as u32);
}
