//! The system calls about signals.

use alloc::sync::Arc;

use linux_raw_sys::general::{self as nr, SIG_BLOCK, SIG_SETMASK, SIG_UNBLOCK};

use crate::errno::{Errno, Outcome};
use crate::{files, user};

use super::super::credentials::check_signal;
use super::super::identity::Handle;
use super::super::signal::{
    self, Action, Alternate, Information, MAXIMUM, Sent, UNBLOCKABLE, bit, code,
};
use super::super::{Interrupted, Process, Thread, WaitQueue};
use super::super::{all, clock, deliver, find, scheduler, table};

/// `rt_sigaction(2)`.
pub(super) fn sigaction(signal: u64, new: u64, old: u64, size: u64) -> Outcome {
    let signal = valid(signal)?;
    if size != 8 || new != 0 && bit(signal) & UNBLOCKABLE != 0 {
        return Err(Errno::EINVAL);
    }
    // Copied before the old action is read, because another thread may change the action during the
    // copy.
    let new = if new == 0 { None } else { Some(user::read::<[u64; 4]>(new)?) };
    let process = scheduler::current().process.clone();
    let actions = process.actions();
    let was = actions.get(signal);
    if let Some([handler, flags, restorer, mask]) = new {
        actions.set(signal, Action { handler, flags, restorer, mask: mask & !UNBLOCKABLE });
        if actions.ignores(signal) {
            signal::forget(&process, bit(signal));
        }
    }
    if old != 0 {
        user::write(old, &[was.handler, was.flags, was.restorer, was.mask])?;
    }
    Ok(0)
}

/// A signal's number; not 0.
fn valid(signal: u64) -> Result<u32, Errno> {
    let signal = signal as u32;
    if (1..=MAXIMUM).contains(&signal) { Ok(signal) } else { Err(Errno::EINVAL) }
}

/// `rt_sigprocmask(2)`.
pub(super) fn sigprocmask(how: u64, new: u64, old: u64, size: u64) -> Outcome {
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    let was = scheduler::current().signals.lock().blocked;
    if new != 0 {
        let set = user::read::<u64>(new)?;
        signal::set_blocked(match how as u32 {
            SIG_BLOCK => was | set,
            SIG_UNBLOCK => was & !set,
            SIG_SETMASK => set,
            _ => return Err(Errno::EINVAL),
        });
    }
    if old != 0 {
        user::write(old, &was)?;
    }
    Ok(0)
}

/// `rt_sigpending(2)`.
pub(super) fn sigpending(at: u64, size: u64) -> Outcome {
    if size > 8 {
        return Err(Errno::EINVAL);
    }
    let thread = scheduler::current();
    let signals = thread.signals.lock();
    let set = (signals.pending.set() | thread.process.pending.lock().set()) & signals.blocked;
    drop(signals);
    user::write_bytes(at, &set.to_le_bytes()[..size as usize])?;
    Ok(0)
}

/// `rt_sigsuspend(2)`.
pub(super) fn sigsuspend(at: u64, size: u64) -> Outcome {
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    signal::block_for_call(user::read::<u64>(at)?);
    pause()
}

/// `pause(2)`: waits for a signal with an effect.
pub(super) fn pause() -> Outcome {
    let waited = WaitQueue::new().wait(None, || None::<u64>);
    waited.map_err(|_| Errno::RESTART_WITHOUT_HANDLER)
}

/// `rt_sigtimedwait(2)`.
pub(super) fn sigtimedwait(set_at: u64, information_at: u64, time_at: u64, size: u64) -> Outcome {
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    let set = user::read::<u64>(set_at)? & !UNBLOCKABLE;
    let deadline = match time_at {
        0 => None,
        at => Some(clock::deadline_of_call(clock::read_time(at)?)),
    };
    let thread = scheduler::current_thread();
    thread.signals.lock().awaited = set;
    let waited = WaitQueue::new().wait(deadline, || signal::take(&thread, set));
    thread.signals.lock().awaited = 0;
    let information = waited.map_err(|interrupted| match interrupted {
        Interrupted::Deadline => Errno::EAGAIN,
        Interrupted::Signal => Errno::EINTR,
    })?;
    if information_at != 0 {
        user::write(information_at, &information.bytes())?;
    }
    Ok(u64::from(information.signal))
}

/// `rt_sigqueueinfo(2)` and, with a process, `rt_tgsigqueueinfo(2)`.
pub(super) fn sigqueueinfo(process: Option<u64>, target: u64, number: u64, at: u64) -> Outcome {
    let bytes = user::read::<[u64; 6]>(at)?;
    let code = bytes[1] as i32;
    let own = scheduler::current().id();
    let found = find(target as u32);
    let is_number = |number: u64| number as i32 > 0;
    if process.is_some_and(|process| !is_number(process) || !is_number(target)) {
        return Err(Errno::EINVAL);
    }
    // Only the kernel may send the kernel's codes, except that a thread may send itself any code.
    if (code >= 0 || code == code::THREAD) && target as u32 != own {
        return Err(Errno::EPERM);
    }
    let fields = [bytes[2], bytes[3], bytes[4], bytes[5]];
    let information = |signal| Information::new(signal, code, fields);
    if let Some(process) = process {
        let thread = thread_of(Some(process), target)?;
        return send(&thread.process, Some(&thread), number, information);
    }
    send(&found.ok_or(Errno::ESRCH)?, None, number, information)
}

/// `kill(2)`.
pub(super) fn kill(target: i32, number: u64) -> Outcome {
    let own = scheduler::current().process.clone();
    let information = |signal| Information::of_program(signal, code::USER);
    let group = match target {
        1.. => {
            let process = find(target as u32)
                .or_else(|| Some(table::find_thread(target as u32)?.process.clone()));
            return send(&process.ok_or(Errno::ESRCH)?, None, number, information);
        }
        0 => own.group(),
        -1 => 0,
        i32::MIN => return Err(Errno::ESRCH),
        _ => target.unsigned_abs(),
    };
    let is_meant = |process: &&Arc<Process>| match target {
        -1 => process.id != 1 && process.id != own.id,
        _ => process.group() == group,
    };
    let mut outcome = Err(Errno::ESRCH);
    for process in all().iter().filter(is_meant) {
        // The call succeeds if at least one process may be signaled.
        outcome = outcome.or(send(process, None, number, information));
    }
    outcome
}

/// `tkill(2)` and, with a process, `tgkill(2)`.
pub(super) fn tkill(process: Option<u64>, thread: u64, number: u64) -> Outcome {
    let thread = thread_of(process, thread)?;
    send(&thread.process, Some(&thread), number, |signal| {
        Information::of_program(signal, code::THREAD)
    })
}

/// Finds a thread by its number and, if given, its process's number.
fn thread_of(process: Option<u64>, id: u64) -> Result<Arc<Thread>, Errno> {
    if id as i32 <= 0 || process.is_some_and(|process| process as i32 <= 0) {
        return Err(Errno::EINVAL);
    }
    let thread = table::find_thread(id as u32).ok_or(Errno::ESRCH)?;
    let of_process = process.is_none_or(|process| thread.process.id == process as u32);
    if of_process { Ok(thread) } else { Err(Errno::ESRCH) }
}

/// Sends a signal, or none for the number 0.
fn send(
    process: &Arc<Process>,
    thread: Option<&Arc<Thread>>,
    number: u64,
    information: impl Fn(u32) -> Information,
) -> Outcome {
    if number as u32 != 0 {
        valid(number)?;
    }
    check_signal(process, number as u32)?;
    if number as u32 == 0 {
        return Ok(0);
    }
    let signal = valid(number)?;
    match signal::send_information(process, thread, information(signal)) {
        Sent::Done => Ok(0),
        Sent::QueueFull => Err(Errno::EAGAIN),
    }
}

/// `sigaltstack(2)`.
pub(super) fn sigaltstack(new: u64, old: u64, stack_pointer: u64) -> Outcome {
    const MINIMUM: u64 = if cfg!(target_arch = "aarch64") { 5120 } else { 2048 };
    let was = scheduler::current().signals.lock().alternate;
    if new != 0 {
        let [base, flags, size] = user::read::<[u64; 3]>(new)?;
        let flags = flags as u32;
        if deliver::is_on(&was, stack_pointer)
            && was.flags & nr::SS_AUTODISARM == 0
            && was.size != 0
        {
            return Err(Errno::EPERM);
        }
        let mode = flags & !nr::SS_AUTODISARM;
        let alternate = match mode {
            deliver::DISABLED => Alternate::default(),
            0 | deliver::ON_STACK if size < MINIMUM => return Err(Errno::ENOMEM),
            0 | deliver::ON_STACK if base.checked_add(size).is_none() => return Err(Errno::EINVAL),
            0 | deliver::ON_STACK => Alternate { base, size, flags: flags & nr::SS_AUTODISARM },
            _ => return Err(Errno::EINVAL),
        };
        scheduler::current().signals.lock().alternate = alternate;
    }
    if old != 0 {
        let flags = u64::from(deliver::flags_of(&was, stack_pointer));
        user::write(old, &[was.base, flags, was.size])?;
    }
    Ok(0)
}

/// `pidfd_send_signal(2)`: to a process, a thread of it, or its group.
pub(super) fn pidfd_send_signal(descriptor: i32, number: u64, at: u64, flags: u32) -> Outcome {
    const THREAD: u32 = 1 << 0;
    const PROCESS: u32 = 1 << 1;
    const GROUP: u32 = 1 << 2;
    if flags & !(THREAD | PROCESS | GROUP) != 0 || flags.count_ones() > 1 {
        return Err(Errno::EINVAL);
    }
    let own = Arc::downgrade(&scheduler::current().process);
    let (handle, own_thread) = match Handle::of(descriptor) {
        Handle::OwnThread => (own.clone(), Some(scheduler::current_thread())),
        Handle::OwnProcess => (own.clone(), None),
        Handle::Descriptor(descriptor) => (files::process_behind(descriptor)?, None),
    };
    let information = match at {
        0 => None,
        at => {
            let bytes = user::read::<[u64; 6]>(at)?;
            if bytes[0] as u32 != number as u32 {
                return Err(Errno::EINVAL);
            }
            let code = bytes[1] as i32;
            if (code >= 0 || code == code::THREAD) && (!handle.ptr_eq(&own) || flags == GROUP) {
                return Err(Errno::EPERM);
            }
            Some((code, [bytes[2], bytes[3], bytes[4], bytes[5]]))
        }
    };
    // Looked up only now, because the process or the thread may end during the copy.
    let process = table::find_behind(&handle).ok_or(Errno::ESRCH)?;
    let thread = match flags {
        THREAD => own_thread.or_else(|| process.threads().first().cloned()),
        0 => own_thread,
        _ => None,
    };
    let information = |signal| match information {
        Some((code, fields)) => Information::new(signal, code, fields),
        None if thread.is_some() => Information::of_program(signal, code::THREAD),
        None => Information::of_program(signal, code::USER),
    };
    if flags != GROUP {
        return send(&process, thread.as_ref(), number, information);
    }
    // The number of a group is that of the process that leads it.
    let mut outcome = Err(Errno::ESRCH);
    for member in all().iter().filter(|other| other.group() == process.id) {
        outcome = outcome.or(send(member, None, number, information));
    }
    outcome
}
