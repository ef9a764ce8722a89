//! The calls about processes, threads, signals, time and limits: from numbers and arguments to what
//! serves them.

use alloc::sync::Arc;

use linux_raw_sys::general::{self as nr, SIG_BLOCK, SIG_SETMASK, SIG_UNBLOCK};

use crate::arch::Registers;
use crate::errno::{Errno, Outcome};
use crate::{files, user};

use super::clone::{Wanted, clone, unshare};
use super::credentials::{self, Capability, Kind, check_signal};
use super::deliver::{self, signal_return};
use super::identity::{self as id, Handle};
use super::signal::{
    self, Action, Alternate, IGNORE, Information, MAXIMUM, Sent, UNBLOCKABLE, bit, code,
};
use super::{Interrupted, Process, Thread, WaitQueue};
use super::{
    all, barriers, end, execute, find, futex, limits, random, scheduler, table, timer, wait,
};

/// `fork(2)` and `vfork(2)` as flags of `clone(2)`.
#[cfg(target_arch = "x86_64")]
const FORK: u64 = nr::SIGCHLD as u64;
#[cfg(target_arch = "x86_64")]
const VFORK: u64 = (nr::CLONE_VM | nr::CLONE_VFORK | nr::SIGCHLD) as u64;

/// Makes a call; `None` where the number is another's. The inner `None` means that the registers
/// are as the program shall have them.
pub fn call(
    number: u32,
    arguments: [u64; 6],
    registers: &mut Registers,
) -> Option<Option<Outcome>> {
    let [a, b, c, d, e, _] = arguments;
    Some(Some(match number {
        nr::__NR_rt_sigreturn => {
            signal_return(registers);
            return Some(None);
        }
        nr::__NR_execve | nr::__NR_execveat => {
            let (folder, rest) = match number {
                nr::__NR_execve => (nr::AT_FDCWD, [a, b, c, 0]),
                _ => (a as i32, [b, c, d, e]),
            };
            match execute::execute(folder, rest, registers) {
                Ok(()) => return Some(None),
                Err(errno) => Err(errno),
            }
        }
        nr::__NR_exit => end::exit_thread(a),
        nr::__NR_exit_group => end::exit_group(a),
        nr::__NR_clone => clone(Wanted::of_clone(arguments), registers),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_fork => clone(Wanted::of_clone([FORK, 0, 0, 0, 0, 0]), registers),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_vfork => clone(Wanted::of_clone([VFORK, 0, 0, 0, 0, 0]), registers),
        nr::__NR_clone3 => Wanted::of_clone3(a, b).and_then(|wanted| clone(wanted, registers)),
        nr::__NR_unshare => unshare(a),
        nr::__NR_wait4 => wait::wait4(a, b, c, d),
        nr::__NR_waitid => wait::waitid(a, b, c, d, e),
        nr::__NR_futex => futex::futex(arguments),
        nr::__NR_set_robust_list => futex::set_robust_list(a, b),
        nr::__NR_get_robust_list => futex::get_robust_list(a, b, c),
        nr::__NR_rt_sigsuspend => sigsuspend(a, b),
        nr::__NR_sigaltstack => sigaltstack(a, b, registers.stack_pointer()),
        _ => {
            return signals(number, arguments)
                .or_else(|| times(number, arguments))
                .or_else(|| users(number, arguments))
                .or_else(|| identities(number, arguments))
                .map(Some);
        }
    }))
}

fn signals(number: u32, [a, b, c, d, ..]: [u64; 6]) -> Option<Outcome> {
    Some(match number {
        nr::__NR_rt_sigaction => sigaction(a, b, c, d),
        nr::__NR_rt_sigprocmask => sigprocmask(a, b, c, d),
        nr::__NR_rt_sigpending => sigpending(a, b),
        nr::__NR_rt_sigtimedwait => sigtimedwait(a, b, c, d),
        nr::__NR_rt_sigqueueinfo => sigqueueinfo(None, a, b, c),
        nr::__NR_rt_tgsigqueueinfo => sigqueueinfo(Some(a), b, c, d),
        nr::__NR_kill => kill(a as i32, b),
        nr::__NR_tkill => tkill(None, a, b),
        nr::__NR_tgkill => tkill(Some(a), b, c),
        // What would have to be continued is made again instead (`timer::interrupted_until`).
        nr::__NR_restart_syscall => Err(Errno::EINTR),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_pause => pause(),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_alarm => timer::alarm(a),
        _ => return None,
    })
}

fn times(number: u32, [a, b, c, d, ..]: [u64; 6]) -> Option<Outcome> {
    Some(match number {
        nr::__NR_nanosleep => timer::nanosleep(a, b),
        nr::__NR_clock_nanosleep => timer::clock_nanosleep(a, b, c, d),
        nr::__NR_clock_gettime => timer::clock_gettime(a, b),
        nr::__NR_clock_getres => timer::clock_getres(a, b),
        nr::__NR_clock_settime => timer::clock_settime(a, b),
        nr::__NR_gettimeofday => timer::gettimeofday(a, b),
        nr::__NR_getitimer => timer::getitimer(a, b),
        nr::__NR_setitimer => timer::setitimer(a, b, c),
        nr::__NR_timer_create => timer::timer_create(a, b, c),
        nr::__NR_timer_settime => timer::timer_settime(a, b, c, d),
        nr::__NR_timer_gettime => timer::timer_gettime(a, b),
        nr::__NR_timer_getoverrun => timer::timer_getoverrun(a),
        nr::__NR_timer_delete => timer::timer_delete(a),
        nr::__NR_times => limits::times(a),
        nr::__NR_getrusage => limits::getrusage(a, b),
        nr::__NR_prlimit64 => limits::prlimit(a, b, c, d),
        nr::__NR_getrlimit => limits::prlimit(0, a, 0, b),
        nr::__NR_setrlimit if b == 0 => Err(Errno::EFAULT),
        nr::__NR_setrlimit => limits::prlimit(0, a, b, 0),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_time => timer::time_of_day(a),
        _ => return None,
    })
}

fn users(number: u32, [a, b, c, ..]: [u64; 6]) -> Option<Outcome> {
    const USER: Kind = Kind::User;
    const GROUP: Kind = Kind::Group;
    let who = scheduler::current().credentials();
    Some(match number {
        nr::__NR_getuid => Ok(who.user.real.into()),
        nr::__NR_geteuid => Ok(who.user.effective.into()),
        nr::__NR_getgid => Ok(who.group.real.into()),
        nr::__NR_getegid => Ok(who.group.effective.into()),
        nr::__NR_setuid => credentials::set(USER, a),
        nr::__NR_setgid => credentials::set(GROUP, a),
        nr::__NR_setreuid => credentials::set_two(USER, a, b),
        nr::__NR_setregid => credentials::set_two(GROUP, a, b),
        nr::__NR_setresuid => credentials::set_three(USER, [a, b, c]),
        nr::__NR_setresgid => credentials::set_three(GROUP, [a, b, c]),
        nr::__NR_setfsuid => credentials::set_file(USER, a),
        nr::__NR_setfsgid => credentials::set_file(GROUP, a),
        nr::__NR_getresuid => credentials::get_three(USER, [a, b, c]),
        nr::__NR_getresgid => credentials::get_three(GROUP, [a, b, c]),
        nr::__NR_getgroups => credentials::get_groups(a, b),
        nr::__NR_setgroups => credentials::set_groups(a, b),
        nr::__NR_capget => credentials::capget(a, b),
        nr::__NR_capset => credentials::capset(a, b),
        _ => return None,
    })
}

fn identities(number: u32, [a, b, c, d, e, _]: [u64; 6]) -> Option<Outcome> {
    let thread = scheduler::current();
    Some(match number {
        nr::__NR_getpid => Ok(u64::from(thread.process.id)),
        nr::__NR_gettid => Ok(u64::from(thread.id())),
        nr::__NR_getppid => Ok(u64::from(thread.process.parent_id())),
        nr::__NR_set_tid_address => {
            thread.clear_child_id.store(a, core::sync::atomic::Ordering::Relaxed);
            Ok(u64::from(thread.id()))
        }
        nr::__NR_getpgid => id::getpgid(a),
        nr::__NR_setpgid => id::setpgid(a, b),
        nr::__NR_getsid => id::getsid(a),
        nr::__NR_setsid => id::setsid(),
        nr::__NR_prctl => id::prctl(a, [b, c, d, e]),
        nr::__NR_uname => id::uname(a),
        nr::__NR_sysinfo => id::sysinfo(a),
        nr::__NR_getrandom => getrandom(a, b, c),
        nr::__NR_sched_yield => {
            scheduler::yield_now();
            Ok(0)
        }
        nr::__NR_sched_getaffinity => id::sched_getaffinity(a, b, c),
        nr::__NR_sched_setaffinity => id::sched_setaffinity(a, b, c),
        nr::__NR_sched_getscheduler => id::sched_getscheduler(a),
        nr::__NR_sched_setscheduler => id::sched_setscheduler(a, b, c),
        nr::__NR_sched_getparam => id::sched_getparam(a, b),
        nr::__NR_sched_setparam => id::sched_setscheduler(a, 0, b),
        nr::__NR_sched_get_priority_min => id::priority_limit(a, 1),
        nr::__NR_sched_get_priority_max => id::priority_limit(a, 99),
        nr::__NR_getpriority => Ok(20),
        nr::__NR_setpriority => Ok(0),
        nr::__NR_getcpu => id::getcpu(a, b),
        nr::__NR_membarrier => barriers::membarrier(a, b),
        nr::__NR_personality => Ok(0),
        nr::__NR_rseq => Err(Errno::ENOSYS),
        nr::__NR_pidfd_open => pidfd_open(a, b),
        nr::__NR_pidfd_send_signal => pidfd_send_signal(a as i32, b, c, d as u32),
        nr::__NR_reboot => reboot(a, b, c),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_getpgrp => id::getpgid(0),
        _ => return None,
    })
}

fn sigaction(signal: u64, new: u64, old: u64, size: u64) -> Outcome {
    let signal = valid(signal)?;
    if size != 8 || new != 0 && bit(signal) & UNBLOCKABLE != 0 {
        return Err(Errno::EINVAL);
    }
    let process = scheduler::current().process.clone();
    let actions = process.actions();
    let was = actions.get(signal);
    if new != 0 {
        let [handler, flags, restorer, mask] = user::read::<[u64; 4]>(new)?;
        actions.set(signal, Action { handler, flags, restorer, mask: mask & !UNBLOCKABLE });
        if handler == IGNORE || handler == signal::DEFAULT && !signal::ends_by_default(signal) {
            signal::forget(&process, bit(signal) & !signal::STOPPING);
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

fn sigprocmask(how: u64, new: u64, old: u64, size: u64) -> Outcome {
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

fn sigpending(at: u64, size: u64) -> Outcome {
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

fn sigsuspend(at: u64, size: u64) -> Outcome {
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    signal::block_for_call(user::read::<u64>(at)?);
    pause()
}

/// Waits for a signal that does something.
fn pause() -> Outcome {
    let waited = WaitQueue::new().wait(None, || None::<u64>);
    waited.map_err(|_| Errno::RESTART_WITHOUT_HANDLER)
}

fn sigtimedwait(set_at: u64, information_at: u64, time_at: u64, size: u64) -> Outcome {
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    let set = user::read::<u64>(set_at)? & !UNBLOCKABLE;
    let deadline = match time_at {
        0 => None,
        at => Some(timer::deadline_of_call(timer::read_time(at)?)),
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

fn sigqueueinfo(process: Option<u64>, target: u64, number: u64, at: u64) -> Outcome {
    let bytes = user::read::<[u64; 6]>(at)?;
    let code = bytes[1] as i32;
    let own = scheduler::current().process.id;
    let found = find(target as u32);
    // Only the kernel speaks as the kernel, but to oneself one may say anything.
    if (code >= 0 || code == code::THREAD) && target as u32 != own && process.is_none() {
        return Err(Errno::EPERM);
    }
    let fields = [bytes[2], bytes[3], bytes[4], bytes[5]];
    let information = |signal| Information { signal, code, fields };
    if let Some(process) = process {
        let thread = thread_of(Some(process), target)?;
        return send(&thread.process, Some(&thread), number, information);
    }
    send(&found.ok_or(Errno::ESRCH)?, None, number, information)
}

fn kill(target: i32, number: u64) -> Outcome {
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
        // One that may be sent to is enough.
        outcome = outcome.or(send(process, None, number, information));
    }
    outcome
}

fn tkill(process: Option<u64>, thread: u64, number: u64) -> Outcome {
    let thread = thread_of(process, thread)?;
    send(&thread.process, Some(&thread), number, |signal| {
        Information::of_program(signal, code::THREAD)
    })
}

/// A thread by number, and by that of its process if it is given.
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

fn sigaltstack(new: u64, old: u64, stack_pointer: u64) -> Outcome {
    const MINIMUM: u64 = 2048;
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
            0 | deliver::ON_STACK => Alternate { base, size, flags: flags & nr::SS_AUTODISARM },
            _ => return Err(Errno::EINVAL),
        };
        base.checked_add(size).ok_or(Errno::EINVAL)?;
        scheduler::current().signals.lock().alternate = alternate;
    }
    if old != 0 {
        let flags = u64::from(deliver::flags_of(&was, stack_pointer));
        user::write(old, &[was.base, flags, was.size])?;
    }
    Ok(0)
}

fn getrandom(at: u64, length: u64, flags: u64) -> Outcome {
    // GRND_NONBLOCK, GRND_RANDOM, GRND_INSECURE; the last two exclude each other.
    if flags > 7 || flags & 6 == 6 {
        return Err(Errno::EINVAL);
    }
    let length = length.min(i32::MAX as u64);
    let mut bytes = [0; 256];
    let mut done = 0;
    while done < length {
        let part = &mut bytes[..(length - done).min(256) as usize];
        random::fill(part);
        let written = at.checked_add(done).ok_or(Errno::EFAULT);
        match written.and_then(|at| user::write_bytes(at, part)) {
            Ok(()) => done += part.len() as u64,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        // A large request must not keep a deadly signal waiting.
        if done < length && signal::is_waiting(&scheduler::current()) {
            break;
        }
    }
    Ok(done)
}

fn pidfd_open(process: u64, flags: u64) -> Outcome {
    if process as i32 <= 0 || flags as u32 & !nr::O_NONBLOCK != 0 {
        return Err(Errno::EINVAL);
    }
    let process = find(process as u32).ok_or(Errno::ESRCH)?;
    files::insert_process(process.id, flags as u32)
}

/// `pidfd_send_signal(2)`: to a process, a thread of it, or its group.
fn pidfd_send_signal(descriptor: i32, number: u64, at: u64, flags: u32) -> Outcome {
    const THREAD: u32 = 1 << 0;
    const PROCESS: u32 = 1 << 1;
    const GROUP: u32 = 1 << 2;
    if flags & !(THREAD | PROCESS | GROUP) != 0 || flags.count_ones() > 1 {
        return Err(Errno::EINVAL);
    }
    let (process, own_thread) = match Handle::of(descriptor) {
        Handle::OwnThread => {
            let thread = scheduler::current_thread();
            (thread.process.clone(), Some(thread))
        }
        Handle::OwnProcess => (scheduler::current().process.clone(), None),
        Handle::Descriptor(descriptor) => {
            (find(files::process_behind(descriptor)?).ok_or(Errno::ESRCH)?, None)
        }
    };
    let thread = match flags {
        THREAD => own_thread.or_else(|| process.threads().first().cloned()),
        0 => own_thread,
        _ => None,
    };
    let information = match at {
        0 => None,
        at => {
            let bytes = user::read::<[u64; 6]>(at)?;
            if bytes[0] as u32 != number as u32 {
                return Err(Errno::EINVAL);
            }
            let code = bytes[1] as i32;
            let own = scheduler::current().process.id;
            if (code >= 0 || code == code::THREAD) && (process.id != own || flags == GROUP) {
                return Err(Errno::EPERM);
            }
            Some((code, [bytes[2], bytes[3], bytes[4], bytes[5]]))
        }
    };
    let information = |signal| match information {
        Some((code, fields)) => Information { signal, code, fields },
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

/// `reboot(2)`: whichever way is asked for, the machine ends.
fn reboot(first: u64, second: u64, command: u64) -> Outcome {
    const MAGIC: u32 = 0xfee1_dead;
    const SECOND_MAGICS: [u32; 4] = [672_274_793, 85_072_278, 369_367_448, 537_993_216];
    const ENDS: [u32; 4] = [0x0123_4567, 0xcdef_0123, 0x4321_fedc, 0xa1b2_c3d4];
    if first as u32 != MAGIC || !SECOND_MAGICS.contains(&(second as u32)) {
        return Err(Errno::EINVAL);
    }
    credentials::credentials().demand(Capability::Boot)?;
    match command as u32 {
        // What Ctrl-Alt-Del does: there is no such key.
        0 | 0x89ab_cdef => Ok(0),
        command if ENDS.contains(&command) => end::power_off(),
        _ => Err(Errno::EINVAL),
    }
}
