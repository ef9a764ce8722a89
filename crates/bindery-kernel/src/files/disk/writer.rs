//! The kernel's thread that stores dirty pages of the disk early (Linux: the flusher of a device),
//! so that a writer seldom reaches the limit and has to store pages itself.
//!
//! The thread stores pages while the number of dirty pages exceeds half of the limit; writes wake
//! it. At an interval (`/proc/sys/vm/dirty_writeback_centisecs`) it stores all dirty pages,
//! including those that programs wrote through mappings, and the blocks of their files. Without a
//! disk there is no thread. The thread ends with the machine.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::process::{WaitQueue, kernel_thread};
use crate::{log, sync, time};

use super::storage::{dirty_and_limit, file_system, storage};

/// The interval in hundredths of a second; 0 for none. Linux's, at first.
static INTERVAL: AtomicU64 = AtomicU64::new(500);

/// Whether the interval has changed, or a write has exceeded the mark, since the thread last
/// checked.
static WOKEN: AtomicBool = AtomicBool::new(false);
/// The machine ends.
static ENDS: AtomicBool = AtomicBool::new(false);
/// 1 while the thread exists.
static LIVES: AtomicU32 = AtomicU32::new(0);
static SLEEPER: WaitQueue = WaitQueue::new();

/// Begins the thread.
pub fn begin() {
    LIVES.store(1, Ordering::Relaxed);
    if kernel_thread::begin(b"writeback", run).is_err() {
        LIVES.store(0, Ordering::Relaxed);
        log!("no thread stores dirty pages early: there is no memory for it");
    }
}

/// Ends the thread and waits until it no longer uses the disk.
pub fn end() {
    ENDS.store(true, Ordering::Relaxed);
    SLEEPER.wake_all();
    while LIVES.load(Ordering::Acquire) != 0 {
        sync::park(&LIVES, 1);
    }
}

/// The interval in hundredths of a second; 0 for none.
pub fn interval() -> u64 {
    INTERVAL.load(Ordering::Relaxed)
}

/// Changes the interval, from now on.
pub fn set_interval(hundredths: u64) {
    INTERVAL.store(hundredths, Ordering::Relaxed);
    wake();
}

/// Called after a write.
pub fn written() {
    if excess() > 0 {
        wake();
    }
}

fn wake() {
    if !WOKEN.swap(true, Ordering::Relaxed) {
        SLEEPER.wake_all();
    }
}

/// The number of dirty pages above the mark.
fn excess() -> u64 {
    let (dirty, limit) = dirty_and_limit();
    dirty.saturating_sub(limit / 2)
}

extern "C" fn run() -> ! {
    kernel_thread::run(|| {
        work();
        LIVES.store(0, Ordering::Release);
        sync::unpark(&raw const LIVES);
    })
}

fn work() {
    let (Some(system), Some(storage)) = (file_system(), storage()) else { return };
    let mut last = time::now();
    loop {
        let interval = INTERVAL.load(Ordering::Relaxed) * (time::SECOND / 100);
        // Counted from the last round, however often writes wake the thread in between.
        let deadline = (interval > 0).then_some(last + interval);
        let woken = || {
            let ends = ENDS.load(Ordering::Relaxed);
            (WOKEN.swap(false, Ordering::Relaxed) || ends).then_some(())
        };
        let _ended_early = SLEEPER.wait(deadline, woken);
        if ENDS.load(Ordering::Relaxed) {
            return;
        }
        let is_due = || deadline.is_some_and(|deadline| time::now() >= deadline);
        if is_due() {
            last = time::now();
            system.write_back(dirty_and_limit().0);
            // An error in storing pages is reported to the files' openers. After an error in
            // storing a file's block, the block stays marked and the next commit writes it again.
            let _ = storage.commit();
        }
        // The result is 0 if all remaining pages have failed, or if memory is short.
        while !is_due() && excess() > 0 && system.write_back(excess()) > 0 {}
    }
}
