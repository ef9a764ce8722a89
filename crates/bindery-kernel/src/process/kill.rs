//! The end of a process on request of another thread. The process's threads end on their way to the
//! program.

use core::sync::atomic::Ordering;

use linux_raw_sys::general::SIGKILL;

use super::scheduler;
use super::state::Process;
use super::thread::work;

/// Ends all threads of a process (`exit_group`, or a fatal signal). The first caller decides the
/// status.
pub(super) fn end_group(process: &Process, status: u32) {
    let threads = {
        let mut state = process.state.lock();
        state.status.get_or_insert(status);
        state.stopped = None;
        state.threads.clone()
    };
    for thread in threads {
        thread.work.fetch_or(work::END, Ordering::Relaxed);
        scheduler::wake(&thread);
    }
}

/// Kills a process (`SIGKILL`).
pub fn kill_group(process: &Process) {
    end_group(process, SIGKILL);
}
