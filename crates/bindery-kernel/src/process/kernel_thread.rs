//! Kernel threads. Each has a process of its own, without memory.

use crate::errno::Errno;
use crate::heap;

use super::barriers::Barriers;
use super::facts::ProgramFacts;
use super::limits::Limits;
use super::memory_shortage::Standing;
use super::signal::Actions;
use super::state::{ProcessParts, State};
use super::{Credentials, Process, Thread, scheduler};

/// Begins a thread with this name. `entry` calls [`run`].
///
/// # Errors
/// `ENOMEM`.
pub fn begin(name: &[u8], entry: extern "C" fn() -> !) -> Result<(), Errno> {
    heap::room(16 << 10)?;
    let parts = ProcessParts {
        space: None,
        actions: Actions::new(),
        state: State::new(None, 0),
        facts: ProgramFacts::default(),
        limits: Limits::default(),
        standing: Standing::default(),
        barriers: Barriers::default(),
        credentials: Credentials::root(),
        dumpable: false,
    };
    let process = Process::new(0, parts);
    process.set_name(name);
    scheduler::wake(&Thread::of_kernel(process, entry)?);
    Ok(())
}

/// The main function of a kernel thread: runs the work and ends the thread.
pub fn run(work: impl FnOnce()) -> ! {
    scheduler::finish_switch();
    work();
    scheduler::exit()
}
