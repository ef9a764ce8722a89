//! Process groups, sessions, names and pidfds; `uname`, `sysinfo` and the scheduling calls.

use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use bindery_linux as linux;
use linux_raw_sys::general::{O_NONBLOCK, SCHED_BATCH, SCHED_IDLE, SCHED_NORMAL};
use linux_raw_sys::prctl::{
    PR_CAPBSET_READ, PR_GET_DUMPABLE, PR_GET_NAME, PR_GET_NO_NEW_PRIVS, PR_GET_PDEATHSIG,
    PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG,
};

use crate::arch::{self, PLATFORM_NAME};
use crate::errno::{Errno, Outcome};
use crate::files;
use crate::memory::{Space, memory};
use crate::options::RELEASE;
use crate::{time, user};

use super::credentials::{Credentials, commit, credentials, may_use_memory_of};
use super::signal::MAXIMUM;
use super::{Capability, Process, Thread, all, cpus, find, may_look_into, name, scheduler, table};

/// The referent of a pidfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Handle {
    /// The running thread (`PIDFD_SELF_THREAD`).
    OwnThread,
    /// The running process (`PIDFD_SELF_THREAD_GROUP`).
    OwnProcess,
    /// The process of an open descriptor.
    Descriptor(i32),
}

impl Handle {
    /// Two special numbers name the caller.
    pub(super) fn of(descriptor: i32) -> Self {
        match descriptor {
            -10_000 => Self::OwnThread,
            -10_001 => Self::OwnProcess,
            descriptor => Self::Descriptor(descriptor),
        }
    }
}

/// The process that a pidfd names.
fn process_behind(descriptor: i32) -> Result<Arc<Process>, Errno> {
    match Handle::of(descriptor) {
        Handle::OwnThread | Handle::OwnProcess => Ok(scheduler::current().process.clone()),
        Handle::Descriptor(descriptor) => {
            table::find_behind(&files::process_behind(descriptor)?).ok_or(Errno::ESRCH)
        }
    }
}

/// The memory of the process that a pidfd names.
///
/// # Errors
/// `EBADF`; `ESRCH` if the process has ended; `EACCES` if the caller may not access it.
pub fn space_behind(descriptor: i32) -> Result<Arc<Space>, Errno> {
    let process = process_behind(descriptor)?;
    if !scheduler::is_running(&process) && !may_look_into(&process) {
        return Err(Errno::EACCES);
    }
    process.try_space().ok_or(Errno::ESRCH)
}

/// Whether the running thread may give advice about other processes' memory.
pub fn may_advise_others() -> bool {
    // As on Linux, that needs more than read access to them.
    credentials().can(Capability::Nice)
}

/// The memory of the process that a pidfd names. The process, and all others with the same memory,
/// must be about to end.
///
/// # Errors
/// `EBADF`; `ESRCH` if the process has ended; `EINVAL` if it is not about to end.
pub fn dying_space_behind(descriptor: i32) -> Result<Arc<Space>, Errno> {
    // As on Linux, the descriptor is sufficient permission.
    let space = process_behind(descriptor)?.try_space().ok_or(Errno::ESRCH)?;
    let has_it = |process: &&Arc<Process>| {
        process.try_space().is_some_and(|other| Arc::ptr_eq(&other, &space))
    };
    let goes_on = |process: &Arc<Process>| process.state.lock().status.is_none();
    if all().iter().filter(has_it).any(goes_on) { Err(Errno::EINVAL) } else { Ok(space) }
}

/// The memory of the process to which the thread with this number belongs, for reads and writes.
///
/// # Errors
/// `ESRCH` if there is no such process, or if it has ended; `EPERM` if [`may_use_memory_of`]
/// refuses.
pub fn space_of(id: u32) -> Result<Arc<Space>, Errno> {
    let process = find(id).or_else(|| Some(table::find_thread(id)?.process.clone()));
    let process = process.ok_or(Errno::ESRCH)?;
    let space = process.try_space().ok_or(Errno::ESRCH)?;
    if may_use_memory_of(&process) { Ok(space) } else { Err(Errno::EPERM) }
}

/// The process with this number; 0 is the running one.
fn process(id: u64) -> Result<Arc<Process>, Errno> {
    match id as u32 {
        0 => Ok(scheduler::current().process.clone()),
        id => find(id).ok_or(Errno::ESRCH),
    }
}

/// `getpgid(2)`.
pub(super) fn getpgid(id: u64) -> Outcome {
    Ok(u64::from(process(id)?.group()))
}

/// `getsid(2)`.
pub(super) fn getsid(id: u64) -> Outcome {
    Ok(u64::from(process(id)?.session()))
}

/// `setpgid(2)`.
pub(super) fn setpgid(id: u64, group: u64) -> Outcome {
    if (group as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let caller = scheduler::current().process.clone();
    let target = process(id)?;
    let is_own = Arc::ptr_eq(&target, &caller);
    let is_child = target.parent().is_some_and(|parent| Arc::ptr_eq(&parent, &caller));
    if !is_own && !is_child {
        return Err(Errno::ESRCH);
    }
    let session = target.session();
    if is_child && target.state.lock().has_executed {
        return Err(Errno::EACCES);
    }
    if session != caller.session() || session == target.id {
        return Err(Errno::EPERM);
    }
    let group = if group == 0 { target.id } else { group as u32 };
    let is_there = all().iter().any(|other| other.group() == group && other.session() == session);
    if group != target.id && !is_there {
        return Err(Errno::EPERM);
    }
    target.state.lock().group = group;
    Ok(0)
}

/// `setsid(2)`.
pub(super) fn setsid() -> Outcome {
    let process = scheduler::current().process.clone();
    if all().iter().any(|other| other.group() == process.id) {
        return Err(Errno::EPERM);
    }
    let mut state = process.state.lock();
    (state.group, state.session) = (process.id, process.id);
    Ok(u64::from(process.id))
}

/// `prctl(2)`.
pub(super) fn prctl(what: u64, arguments: [u64; 4]) -> Outcome {
    let about_memory = |space: &Space| linux::prctl(space, what as u32, arguments);
    if let Some(outcome) = scheduler::with_space(about_memory) {
        return Ok(outcome?);
    }
    let argument = arguments[0];
    let process = scheduler::current().process.clone();
    match what as u32 {
        PR_SET_NAME => return name::set(argument),
        PR_GET_NAME => return name::get(argument),
        PR_SET_PDEATHSIG if argument <= u64::from(MAXIMUM) => {
            process.state.lock().parent_end_signal = argument as u32;
        }
        PR_GET_PDEATHSIG => {
            let signal = process.state.lock().parent_end_signal;
            user::write(argument, &signal)?;
        }
        PR_GET_NO_NEW_PRIVS if arguments == [0; 4] => {
            return Ok(credentials().no_new_privileges.into());
        }
        PR_GET_DUMPABLE => return Ok(process.is_dumpable().into()),
        PR_SET_DUMPABLE if argument <= 1 => process.set_dumpable(argument == 1),
        // A process never loses a capability permanently.
        PR_CAPBSET_READ if argument <= 40 => return Ok(1),
        PR_SET_NO_NEW_PRIVS if arguments == [1, 0, 0, 0] => {
            let new = Credentials { no_new_privileges: true, ..credentials() };
            commit(new);
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// `uname(2)`: six strings of 65 bytes.
pub(super) fn uname(at: u64) -> Outcome {
    let mut bytes = [0; 6 * 65];
    let version = concat!("#1 Bindery ", env!("CARGO_PKG_VERSION"));
    let texts = ["Linux", "bindery", RELEASE, version, PLATFORM_NAME, "(none)"];
    for (place, text) in bytes.chunks_mut(65).zip(texts) {
        place[..text.len()].copy_from_slice(text.as_bytes());
    }
    user::write(at, &bytes)?;
    Ok(0)
}

/// `sysinfo(2)`.
pub(super) fn sysinfo(at: u64) -> Outcome {
    let (total, free) = (memory().total_frames() << 12, memory().free_frame_count() << 12);
    let areas = || memory().swap_areas();
    let swap: u64 = areas().map(|area| area.slots << 12).sum();
    let taken: u64 = areas().map(|area| area.taken << 12).sum();
    let (unused, processes) = (swap - taken, all().len() as u64);
    // Uptime, three loads, total, free, shared, buffers, swap total and free, processes (16 bits),
    // high memory total and free, the unit (32 bits).
    let uptime = time::now() / time::SECOND;
    let words = [uptime, 0, 0, 0, total, free, 0, 0, swap, unused, processes, 0, 0, 1];
    user::write(at, &words)?;
    Ok(0)
}

/// The thread with this number; 0 is the running one.
fn thread_of(id: u64) -> Result<Arc<Thread>, Errno> {
    match id as i32 {
        0 => Ok(scheduler::current_thread()),
        id => {
            let id = u32::try_from(id).map_err(|_| Errno::EINVAL)?;
            table::find_thread(id).ok_or(Errno::ESRCH)
        }
    }
}

/// Refuses to schedule another user's thread.
///
/// # Errors
/// `EPERM`.
fn check_scheduling(thread: &Thread) -> Result<(), Errno> {
    let (who, other) = (credentials(), thread.credentials().user);
    if [other.real, other.effective].contains(&who.user.effective) {
        return Ok(());
    }
    who.demand(Capability::Nice)
}

/// `sched_getaffinity(2)`.
pub(super) fn sched_getaffinity(id: u64, length: u64, at: u64) -> Outcome {
    if (length as u32) < 8 || !length.is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
    let allowed = thread_of(id)?.allowed.load(Ordering::Relaxed);
    user::write(at, &(allowed & cpus::online()))?;
    Ok(8)
}

/// `sched_setaffinity(2)`: accepts any set with a CPU that is online.
pub(super) fn sched_setaffinity(id: u64, length: u64, at: u64) -> Outcome {
    let mut bytes = [0; 8];
    let length = (length as usize).min(bytes.len());
    user::read_bytes(at, &mut bytes[..length])?;
    // Looked up only now, because the thread may get other rights during the copy.
    let thread = thread_of(id)?;
    check_scheduling(&thread)?;
    let wanted = u64::from_le_bytes(bytes) & cpus::online();
    if wanted == 0 {
        return Err(Errno::EINVAL);
    }
    cpus::set_allowed(&thread, wanted);
    Ok(0)
}

/// `sched_getscheduler(2)`: there is only one policy.
pub(super) fn sched_getscheduler(id: u64) -> Outcome {
    thread_of(id).map(|_| 0)
}

/// `sched_setscheduler(2)`.
pub(super) fn sched_setscheduler(id: u64, policy: u64, at: u64) -> Outcome {
    let priority = user::read::<i32>(at)?;
    let thread = thread_of(id)?;
    match policy as u32 {
        SCHED_NORMAL | SCHED_BATCH | SCHED_IDLE if priority == 0 => {
            check_scheduling(&thread).map(|()| 0)
        }
        // No thread may have priority over all others.
        1 | 2 => Err(Errno::EPERM),
        _ => Err(Errno::EINVAL),
    }
}

/// `sched_getparam(2)`.
pub(super) fn sched_getparam(id: u64, at: u64) -> Outcome {
    thread_of(id)?;
    user::write(at, &0_i32)?;
    Ok(0)
}

/// `sched_get_priority_min(2)` and `sched_get_priority_max(2)`.
pub(super) fn priority_limit(policy: u64, real_time: u64) -> Outcome {
    match policy as u32 {
        1 | 2 => Ok(real_time),
        SCHED_NORMAL | SCHED_BATCH | SCHED_IDLE => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// `getcpu(2)`.
pub(super) fn getcpu(cpu_at: u64, node_at: u64) -> Outcome {
    for (at, number) in [(cpu_at, u32::from(arch::cpu())), (node_at, 0)] {
        if at != 0 {
            user::write(at, &number)?;
        }
    }
    Ok(0)
}

/// `pidfd_open(2)`.
pub(super) fn pidfd_open(process: u64, flags: u64) -> Outcome {
    if process as i32 <= 0 || flags as u32 & !O_NONBLOCK != 0 {
        return Err(Errno::EINVAL);
    }
    let process = find(process as u32).ok_or(Errno::ESRCH)?;
    files::insert_process(&process, flags as u32).map(|(descriptor, _)| descriptor as u64)
}
