//! The system calls about processes, threads, signals, time and limits, by number. Calls about
//! signals are in `signals`; the others are in the modules above.

mod signals;

use linux_raw_sys::general as nr;

use crate::arch::Registers;
use crate::errno::{Errno, Outcome};

use super::clone::{Wanted, clone, unshare};
use super::credentials::{self, Kind};
use super::deliver::signal_return;
use super::identity as id;
use super::{barriers, clock, end, execute, futex, limits, random, scheduler, timer, wait};

/// `fork(2)` and `vfork(2)` as flags of `clone(2)`.
#[cfg(target_arch = "x86_64")]
const FORK: u64 = nr::SIGCHLD as u64;
#[cfg(target_arch = "x86_64")]
const VFORK: u64 = (nr::CLONE_VM | nr::CLONE_VFORK | nr::SIGCHLD) as u64;

/// Makes a call; `None` if the number belongs to another call. The inner `None` means that the
/// registers already have the program's new state.
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
            let (directory, rest) = match number {
                nr::__NR_execve => (nr::AT_FDCWD, [a, b, c, 0]),
                _ => (a as i32, [b, c, d, e]),
            };
            match execute::execute(directory, rest, registers) {
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
        nr::__NR_rt_sigsuspend => signals::sigsuspend(a, b),
        nr::__NR_sigaltstack => signals::sigaltstack(a, b, registers.stack_pointer()),
        _ => {
            return signal_call(number, arguments)
                .or_else(|| times(number, arguments))
                .or_else(|| users(number, arguments))
                .or_else(|| identities(number, arguments))
                .map(Some);
        }
    }))
}

fn signal_call(number: u32, [a, b, c, d, ..]: [u64; 6]) -> Option<Outcome> {
    Some(match number {
        nr::__NR_rt_sigaction => signals::sigaction(a, b, c, d),
        nr::__NR_rt_sigprocmask => signals::sigprocmask(a, b, c, d),
        nr::__NR_rt_sigpending => signals::sigpending(a, b),
        nr::__NR_rt_sigtimedwait => signals::sigtimedwait(a, b, c, d),
        nr::__NR_rt_sigqueueinfo => signals::sigqueueinfo(None, a, b, c),
        nr::__NR_rt_tgsigqueueinfo => signals::sigqueueinfo(Some(a), b, c, d),
        nr::__NR_kill => signals::kill(a as i32, b),
        nr::__NR_tkill => signals::tkill(None, a, b),
        nr::__NR_tgkill => signals::tkill(Some(a), b, c),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_pause => signals::pause(),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_alarm => timer::alarm(a),
        _ => return None,
    })
}

fn times(number: u32, [a, b, c, d, ..]: [u64; 6]) -> Option<Outcome> {
    Some(match number {
        nr::__NR_nanosleep => clock::nanosleep(a, b),
        nr::__NR_clock_nanosleep => clock::clock_nanosleep(a, b, c, d),
        nr::__NR_clock_gettime => clock::clock_gettime(a, b),
        nr::__NR_clock_getres => clock::clock_getres(a, b),
        nr::__NR_clock_settime => clock::clock_settime(a, b),
        nr::__NR_gettimeofday => clock::gettimeofday(a, b),
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
        nr::__NR_time => clock::time_of_day(a),
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

/// The result of a call that returns a number which only the running thread changes.
#[inline]
pub fn own_number(number: u32) -> Option<u32> {
    match number {
        nr::__NR_getpid => Some(scheduler::current().process.id),
        nr::__NR_gettid => Some(scheduler::current().id()),
        _ => None,
    }
}

fn identities(number: u32, [a, b, c, d, e, _]: [u64; 6]) -> Option<Outcome> {
    if let Some(own) = own_number(number) {
        return Some(Ok(own.into()));
    }
    let thread = scheduler::current();
    Some(match number {
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
        nr::__NR_getrandom => random::getrandom(a, b, c),
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
        nr::__NR_pidfd_open => id::pidfd_open(a, b),
        nr::__NR_pidfd_send_signal => signals::pidfd_send_signal(a as i32, b, c, d as u32),
        nr::__NR_reboot => end::reboot(a, b, c, d),
        #[cfg(target_arch = "x86_64")]
        nr::__NR_getpgrp => id::getpgid(0),
        _ => return None,
    })
}
