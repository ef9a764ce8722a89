//! Clocks and sleeps.
//!
//! All CPU time of a thread counts as user time, because a separate count for the kernel would need
//! a read of the clock on each entry and exit.

use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use linux_raw_sys::general::{
    CLOCK_BOOTTIME, CLOCK_MONOTONIC, CLOCK_MONOTONIC_COARSE, CLOCK_MONOTONIC_RAW,
    CLOCK_PROCESS_CPUTIME_ID, CLOCK_REALTIME, CLOCK_REALTIME_COARSE, CLOCK_TAI,
    CLOCK_THREAD_CPUTIME_ID, TIMER_ABSTIME,
};

use crate::errno::{Errno, Outcome};
use crate::time::{self, SECOND};
use crate::user;

use super::{Capability, Interrupted, WaitQueue, find, scheduler, table};

/// The deadline of a call that waits `timeout` nanoseconds, in [`time::now`]. A restarted call
/// keeps the deadline of the first attempt.
pub fn deadline_of_call(timeout: u64) -> u64 {
    match scheduler::current().deadline_of_restart.swap(0, Ordering::Relaxed) {
        0 => time::now().saturating_add(timeout),
        deadline => deadline,
    }
}

/// The errno of a call with a relative timeout whose wait was interrupted by a signal. Without a
/// handler the call is restarted with the same deadline; otherwise it fails with `EINTR`.
pub fn interrupted_until(deadline: u64) -> Errno {
    scheduler::current().deadline_of_restart.store(deadline.max(1), Ordering::Relaxed);
    Errno::RESTART_WITHOUT_HANDLER
}

/// Reads a `timespec`, in nanoseconds; saturates.
pub(super) fn read_time(at: u64) -> Result<u64, Errno> {
    nanoseconds(user::read::<[i64; 2]>(at)?, SECOND)
}

/// Seconds and parts of a second, in nanoseconds.
pub(super) fn nanoseconds([seconds, parts]: [i64; 2], parts_of_second: u64) -> Result<u64, Errno> {
    let whole = u64::try_from(seconds).map_err(|_| Errno::EINVAL)?;
    let parts = u64::try_from(parts).ok().filter(|parts| *parts < parts_of_second);
    let rest = parts.ok_or(Errno::EINVAL)? * (SECOND / parts_of_second);
    Ok(whole.saturating_mul(SECOND).saturating_add(rest))
}

pub(super) fn write_time(at: u64, time: u64) -> Result<(), Errno> {
    user::write(at, &[time / SECOND, time % SECOND])
}

/// The time in [`time::now`] at which the time of day is `at`.
pub(super) fn of_real_time(at: u64) -> u64 {
    at.saturating_sub(time::real_time() - time::now())
}

/// The time of a clock.
pub(super) fn clock(id: u64) -> Result<u64, Errno> {
    let id = id as i32;
    if id < 0 {
        return processor_clock(id);
    }
    let thread = scheduler::current();
    Ok(match id as u32 {
        CLOCK_REALTIME | CLOCK_REALTIME_COARSE | CLOCK_TAI => time::real_time(),
        CLOCK_MONOTONIC | CLOCK_MONOTONIC_RAW | CLOCK_MONOTONIC_COARSE | CLOCK_BOOTTIME => {
            time::now()
        }
        CLOCK_PROCESS_CPUTIME_ID => thread.process.processor_time(),
        CLOCK_THREAD_CPUTIME_ID => thread.processor_time(),
        _ => return Err(Errno::EINVAL),
    })
}

/// The clock of a process, or of a thread of the caller's process. Its number is part of the clock
/// id; 0 means the caller.
fn processor_clock(id: i32) -> Result<u64, Errno> {
    const OF_THREAD: i32 = 4;
    /// The two lowest bits choose what counts. This choice means a file instead.
    const OF_FILE: i32 = 3;
    let number = !(id >> 3) as u32;
    let own = scheduler::current();
    if id & 3 == OF_FILE {
        return Err(Errno::EINVAL);
    }
    if id & OF_THREAD != 0 {
        let thread = match number {
            0 => scheduler::current_thread(),
            number => table::find_thread(number).ok_or(Errno::EINVAL)?,
        };
        let is_own = Arc::ptr_eq(&thread.process, &own.process);
        return if is_own { Ok(thread.processor_time()) } else { Err(Errno::EINVAL) };
    }
    if number == 0 || number == own.id() {
        return Ok(own.process.processor_time());
    }
    Ok(find(number).ok_or(Errno::EINVAL)?.processor_time())
}

/// `clock_gettime(2)`.
pub(super) fn clock_gettime(id: u64, at: u64) -> Outcome {
    write_time(at, clock(id)?)?;
    Ok(0)
}

/// `clock_getres(2)`.
pub(super) fn clock_getres(id: u64, at: u64) -> Outcome {
    clock(id)?;
    if at != 0 {
        write_time(at, 1)?;
    }
    Ok(0)
}

/// The first time of day that cannot be set, because the clock must not overflow for 30 years.
const LATEST: u64 = (i64::MAX as u64 / SECOND - 30 * 365 * 86_400) * SECOND;

/// `clock_settime(2)`: only sets the time of day.
pub(super) fn clock_settime(id: u64, at: u64) -> Outcome {
    let time = read_time(at)?;
    if id as u32 != CLOCK_REALTIME {
        return Err(Errno::EINVAL);
    }
    if time >= LATEST {
        return Err(Errno::EINVAL);
    }
    super::credentials().demand(Capability::Time)?;
    // The power-on was not before 1970.
    if time < time::now() {
        return Err(Errno::EINVAL);
    }
    time::set_real_time(time);
    Ok(0)
}

/// `gettimeofday(2)`.
pub(super) fn gettimeofday(at: u64, zone_at: u64) -> Outcome {
    let now = time::real_time();
    if at != 0 {
        user::write(at, &[now / SECOND, now % SECOND / 1000])?;
    }
    if zone_at != 0 {
        user::write(zone_at, &0_u64)?;
    }
    Ok(0)
}

/// `time(2)`.
#[cfg(target_arch = "x86_64")]
pub(super) fn time_of_day(at: u64) -> Outcome {
    let seconds = time::real_time() / SECOND;
    if at != 0 {
        user::write(at, &seconds)?;
    }
    Ok(seconds)
}

/// `nanosleep(2)`.
pub(super) fn nanosleep(wanted_at: u64, rest_at: u64) -> Outcome {
    let deadline = deadline_of_call(read_time(wanted_at)?);
    sleep_until(deadline).map_err(|_| {
        if rest_at != 0
            && let Err(errno) = write_time(rest_at, deadline.saturating_sub(time::now()))
        {
            return errno;
        }
        interrupted_until(deadline)
    })
}

/// `clock_nanosleep(2)`.
pub(super) fn clock_nanosleep(id: u64, flags: u64, wanted_at: u64, rest_at: u64) -> Outcome {
    let wanted = read_time(wanted_at)?;
    let deadline = match id as u32 {
        CLOCK_REALTIME | CLOCK_TAI => of_real_time(wanted),
        CLOCK_MONOTONIC | CLOCK_BOOTTIME => wanted,
        CLOCK_THREAD_CPUTIME_ID => return Err(Errno::EINVAL),
        _ => return clock(id).and(Err(Errno::EOPNOTSUPP)),
    };
    if flags as u32 & TIMER_ABSTIME == 0 {
        return nanosleep(wanted_at, rest_at);
    }
    sleep_until(deadline).map_err(|_| Errno::RESTART_WITHOUT_HANDLER)
}

fn sleep_until(deadline: u64) -> Result<u64, Interrupted> {
    match WaitQueue::new().wait(Some(deadline), || None::<u64>) {
        Err(Interrupted::Deadline) => Ok(0),
        other => other,
    }
}
