//! The end of threads, of processes and of the machine.
//!
//! A thread ends itself, on its way back to the program or in `exit`. To end another thread, it
//! marks that thread ([`work::END`]) and wakes it. The last thread ends the process; the end of the
//! first process ends the machine.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use bindery::VmallocOptions;
use linux_raw_sys::general::{SA_NOCLDWAIT, SIGCHLD};

use crate::arch::{self, Ended};
use crate::calls::segments;
use crate::errno::{Errno, Outcome};
use crate::memory::{self, Pages, kernel_map, memory};
use crate::sync::SleepingMutex;
use crate::{control, disk, files, kernel_lock, log, options, time};

use super::facts::ProgramFacts;
use super::signal::{self, Information, code};
use super::table::LeftSpace;
use super::thread::work;
use super::{
    Capability, Process, background, cpus, credentials, futex, jobs, kill, parking, provoke,
    scheduler, table, thread, timer,
};

/// The time that the remaining processes have to end with the machine, in nanoseconds.
const PATIENCE: u64 = 60 * time::SECOND;

/// Ends the other threads of the running thread's process and waits until they have ended.
///
/// # Errors
/// If the running thread has to end itself.
pub(super) fn end_other_threads() -> Result<(), super::Interrupted> {
    let this = scheduler::current_thread();
    if signal::must_end(&this) {
        // Another thread has already begun this.
        return Err(super::Interrupted::Signal);
    }
    let process = &this.process;
    for thread in process.threads().iter().filter(|thread| !Arc::ptr_eq(thread, &this)) {
        thread.work.fetch_or(work::END, Ordering::Relaxed);
        scheduler::wake(thread);
    }
    process.life_changed.wait_to_the_end(|| (process.threads().len() == 1).then_some(()))
}

/// `exit(2)`: ends only the running thread.
pub(super) fn exit_thread(code: u64) -> ! {
    let thread = scheduler::current_thread();
    if thread.id() == thread.process.id {
        thread.process.state.lock().first_thread_status = status_of(code);
    }
    drop(thread);
    end_thread()
}

/// `exit_group(2)`.
pub(super) fn exit_group(code: u64) -> ! {
    let process = scheduler::current().process.clone();
    kill::end_group(&process, status_of(code));
    drop(process);
    provoke::as_asked();
    end_thread()
}

const fn status_of(code: u64) -> u32 {
    (code as u32 & 0xff) << 8
}

/// Ends the running thread.
pub(super) fn end_thread() -> ! {
    let thread = scheduler::current_thread();
    futex::thread_ends(&thread);
    // From here on the thread does not wait for a silent device, as if it had been killed.
    thread.work.fetch_or(work::END, Ordering::Relaxed);
    files::give_up_silent(thread.id());
    let process = thread.process.clone();
    table::remove_thread(thread.id());
    thread.set_files(None);
    let is_last = {
        let mut state = process.state.lock();
        // Done in one step with the thread's removal, so that its time counts once.
        state.ended_threads_time += thread.processor_time();
        state.ended_threads_faults = state.ended_threads_faults + thread.faults();
        state.threads.retain(|other| !Arc::ptr_eq(other, &thread));
        state.threads.is_empty()
    };
    drop(thread);
    if is_last {
        end_process(&process);
    } else {
        process.life_changed.wake_all();
        signal::tell_others(&process);
    }
    drop(process);
    scheduler::exit()
}

/// The last thread of a process ends it.
fn end_process(process: &Arc<Process>) {
    timer::cancel_all(process);
    let space = LeftSpace::new(process.space.lock().take());
    if let Some(space) = space.get() {
        process.note_left_memory(space);
    }
    scheduler::unload_space();
    drop(space);
    lend_back(process);
    *process.facts.lock() = ProgramFacts::default();
    reparent_children(process);
    let status = {
        let mut state = process.state.lock();
        state.is_ended = true;
        let status = state.status.unwrap_or(state.first_thread_status);
        state.status = Some(status);
        status
    };
    if let Some(parent) = process.parent() {
        jobs::lose_parent(process, &parent);
    }
    // Pollers of a pidfd of the process have to see its end.
    files::changed();
    // In the middle of a call of another thread, folios are locked and slots busy, so not all
    // invariants hold. A thread that waits for a userfaultfd holds no such state. The audit at the
    // machine's end always runs.
    let audit_if_quiet = || {
        let is_quiet = scheduler::yielded() + parking::parked() == 0;
        if is_quiet {
            audit();
            provoke::after_an_audit(process.id);
        }
    };
    if options::CHECK_AT_EXIT.load(Ordering::Relaxed) {
        cpus::without_others(audit_if_quiet);
    }
    if process.id == 1 {
        end_machine(status);
    } else {
        tell_parent(process, status);
    }
}

/// Records that a process no longer uses the memory that `vfork` lent it.
pub(super) fn lend_back(process: &Process) {
    process.has_own_memory.store(true, Ordering::Relaxed);
    process.life_changed.wake_all();
}

/// Makes the first process the parent of an ended process's children.
fn reparent_children(process: &Arc<Process>) {
    let children = core::mem::take(&mut process.state.lock().children);
    let Some(first) = table::first().filter(|first| !Arc::ptr_eq(first, process)) else { return };
    for child in &children {
        let (signal, is_ended) = {
            let mut state = child.state.lock();
            state.parent = Arc::downgrade(&first);
            state.exit_signal = SIGCHLD;
            state.is_orphan = true;
            (state.parent_end_signal, state.is_ended)
        };
        first.state.lock().children.push(child.clone());
        if signal != 0 {
            signal::send(child, signal);
        }
        if is_ended {
            let status = child.state.lock().status.unwrap_or(0);
            tell_parent(child, status);
        }
    }
    children.iter().for_each(|child| jobs::lose_parent(child, process));
}

/// Notifies the parent of a process that has ended. If the parent ignores that, removes the
/// process.
fn tell_parent(process: &Arc<Process>, status: u32) {
    let Some(parent) = process.parent() else { return };
    let exit_signal = process.state.lock().exit_signal;
    if (1..=signal::MAXIMUM).contains(&exit_signal) {
        let action = parent.actions().get(exit_signal);
        let ignored = action.handler == signal::IGNORE;
        let unwanted = ignored || action.flags & u64::from(SA_NOCLDWAIT) != 0;
        if exit_signal == SIGCHLD && unwanted {
            bury(process);
        }
        let information = about_end(process, exit_signal, status);
        // Standard signals always find room; a real-time signal that finds no room is lost, as on
        // Linux.
        let _ = signal::send_information(&parent, None, information);
    }
    parent.children_changed.wake_all();
}

/// The information of `SIGCHLD` and `waitid` about a process that has ended.
pub(super) fn about_end(process: &Process, signal: u32, status: u32) -> Information {
    let (code, value) = match status & 0x7f {
        0 => (code::EXITED, status >> 8),
        signal => (code::KILLED, signal),
    };
    let time = process.processor_time() / (time::SECOND / 100);
    Information::of_child(signal, code, process, value, time)
}

/// Removes the record of a process that has ended.
pub(super) fn bury(process: &Arc<Process>) {
    if let Some(parent) = process.parent() {
        parent.state.lock().children.retain(|child| !Arc::ptr_eq(child, process));
    }
    table::remove_process(process.id);
}

/// Removes the ended children that the first process inherited and has not waited for. Called when
/// the table of processes is full.
pub(super) fn bury_orphans() {
    let Some(first) = table::first() else { return };
    let children = first.state.lock().children.clone();
    for child in &children {
        let (is_ended, is_orphan) = {
            let state = child.state.lock();
            (state.is_ended, state.is_orphan)
        };
        if is_ended && is_orphan {
            bury(child);
        }
    }
}

/// The machine's exit status, once the first process has ended; `u32::MAX` before.
static MACHINE_STATUS: AtomicU32 = AtomicU32::new(u32::MAX);

/// Called when the first process has ended. The machine ends with this status after its last
/// thread.
fn end_machine(status: u32) {
    let code = match status & 0x7f {
        0 => (status >> 8) as u8,
        signal => 128 + signal as u8,
    };
    control::send(format_args!("status {code}"));
    files::end_silence();
    end_all_others();
    background::end();
    files::disk::writer::end();
    table::remove_process(1);
    files::end();
    segments::end();
    MACHINE_STATUS.store(code.into(), Ordering::Relaxed);
}

/// Called by the idle loop. Ends the machine if its end is due. Everything allocated after the boot
/// must be free by then.
pub(super) fn end_machine_if_due() {
    let Ok(code) = u8::try_from(MACHINE_STATUS.load(Ordering::Relaxed)) else { return };
    if options::CHECK_AT_EXIT.load(Ordering::Relaxed) {
        thread::free_spare_stacks();
        files::swap::end();
        files::frame_buffer::end();
        audit();
        let leaked = memory::leaked_frames();
        assert!(
            leaked == 0,
            "{leaked} frames leaked: fewer are free than at boot, although all processes have ended"
        );
    }
    // A CPU that has just started may not have come to its first thread.
    let (online, run) = (memory().online_cpus(), cpus::count());
    assert!(
        if kernel_lock::is_used() { online >= run } else { online == 0 },
        "{run} CPUs run threads, but {online} are online in the core"
    );
    // The measured calls have freed all that they unlinked themselves (`Platform::is_over`).
    let deferred = memory().deferred();
    assert!(
        deferred.ever == 0 || kernel_lock::is_used(),
        "the core deferred frees, although no reader can run: {deferred:?}"
    );
    arch::power_off(Ended::Program(code))
}

/// Switches the machine off (`reboot`), as if the first process had exited successfully.
pub(super) fn power_off() -> ! {
    if let Some(first) = table::first() {
        kill::end_group(&first, 0);
        let this = scheduler::current().process.clone();
        kill::end_group(&this, 0);
    }
    end_thread()
}

fn end_all_others() {
    let deadline = time::now() + PATIENCE;
    loop {
        let others: Vec<_> = table::all().into_iter().filter(|process| process.id != 1).collect();
        let Some(left) = others.first() else { return };
        assert!(
            time::now() < deadline,
            "process {} has not ended one minute after it was killed",
            left.id
        );
        for process in &others {
            if process.state.lock().is_ended {
                bury(process);
            } else {
                kill::kill_group(process);
            }
        }
        drop(others);
        scheduler::yield_now();
    }
}

/// Memory for audits, reserved at boot, because an audit must not depend on free memory.
static SCRATCH: SleepingMutex<Option<Pages>> = SleepingMutex::new(None);

/// Reserves memory for audits, if there are to be any.
pub fn prepare_audits() {
    if options::CHECK_AT_EXIT.load(Ordering::Relaxed) {
        let bytes = bindery::check::scratch_words(memory()) * size_of::<u32>();
        let pages = Pages::new(bytes.next_multiple_of(4096), &VmallocOptions::huge());
        *SCRATCH.lock() = pages.ok();
    }
}

/// Makes the core verify all its invariants.
///
/// # Panics
/// If an invariant is broken.
pub fn audit() {
    let spaces: Vec<_> = table::spaces().collect();
    let spaces: Vec<_> = spaces.iter().map(|space| &**space).collect();
    let mut scratch = SCRATCH.lock();
    let scratch = scratch.as_mut().expect("there was memory for audits at boot").words();
    let kernel = [kernel_map()];
    if let Err(violation) = bindery::check::check_with_kernel(memory(), &spaces, &kernel, scratch) {
        log!("the audit has found a broken invariant");
        panic!("audit: {violation}");
    }
}

/// `reboot(2)`: every command ends the machine. The argument matters only for a test
/// ([`provoke::loses_power`]).
pub(super) fn reboot(first: u64, second: u64, command: u64, argument: u64) -> Outcome {
    const MAGIC: u32 = 0xfee1_dead;
    const SECOND_MAGICS: [u32; 4] = [672_274_793, 85_072_278, 369_367_448, 537_993_216];
    const ENDS: [u32; 4] = [0x0123_4567, 0xcdef_0123, 0x4321_fedc, 0xa1b2_c3d4];
    if first as u32 != MAGIC || !SECOND_MAGICS.contains(&(second as u32)) {
        return Err(Errno::EINVAL);
    }
    credentials().demand(Capability::Boot)?;
    match command as u32 {
        // The setting of Ctrl-Alt-Del has no effect, because the machine has no such key.
        0 | 0x89ab_cdef => Ok(0),
        command if ENDS.contains(&command) && provoke::loses_power() => {
            match argument {
                0 => disk::lose_power(),
                numbers => disk::plan(numbers),
            }
            Ok(0)
        }
        command if ENDS.contains(&command) => power_off(),
        _ => Err(Errno::EINVAL),
    }
}
