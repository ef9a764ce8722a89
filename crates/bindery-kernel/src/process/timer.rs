//! Timers that send signals.

use alloc::boxed::Box;
use alloc::sync::{Arc, Weak};

use linux_raw_sys::general::{
    CLOCK_BOOTTIME, CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_TAI, ITIMER_PROF, ITIMER_REAL,
    ITIMER_VIRTUAL, SIGALRM, SIGEV_NONE, SIGEV_SIGNAL, SIGEV_THREAD_ID, SIGPROF, SIGVTALRM,
    TIMER_ABSTIME,
};

use crate::errno::{Errno, Outcome};
use crate::time::{self, Event, EventId, SECOND};
use crate::{heap, user};

use super::clock::{clock, nanoseconds, of_real_time};
use super::signal::{self, Information, bit};
use super::{Process, Thread, scheduler, table};

/// The minimum interval of a timer, in ns, because a timer must not expire again while the kernel
/// still handles it.
const SHORTEST: u64 = 100_000;

/// A timer that sends a signal.
pub(super) struct Timer {
    event: Option<EventId>,
    /// The time of expiry; 0 if it is stopped.
    at: u64,
    interval: u64,
    clock: u32,
    signal: u32,
    /// The thread that gets the signal, if not any of the process.
    thread: Option<u32>,
    value: u64,
    /// The overrun of the last signal that was taken.
    overrun: u32,
}

/// The key of the `setitimer` timer; the other timers of a process count from 0.
const REAL: i32 = -1;

/// Sets an existing timer.
fn arm(process: &Arc<Process>, key: i32, at: u64, interval: u64) {
    let mut timers = process.timers.lock();
    let Some(timer) = timers.get_mut(&key) else { return };
    if let Some(event) = timer.event.take() {
        time::cancel(event);
    }
    (timer.at, timer.interval) = (at, interval);
    if at != 0 {
        let process = Arc::downgrade(process);
        timer.event = Some(time::schedule(at, Event::Call(Box::new(move || fire(&process, key)))));
    }
}

/// A timer is due.
fn fire(process: &Weak<Process>, key: i32) {
    let Some(process) = process.upgrade() else { return };
    let (information, thread, next, interval, missed) = {
        let mut timers = process.timers.lock();
        let Some(timer) = timers.get_mut(&key) else { return };
        timer.event = None;
        let missed = (time::now() - timer.at).checked_div(timer.interval).unwrap_or(0);
        let next = match timer.interval {
            0 => 0,
            interval => timer.at.saturating_add(interval.saturating_mul(missed + 1)),
        };
        let next = if next == 0 { 0 } else { next.max(time::now() + SHORTEST) };
        let information = match key {
            REAL => Information::of_kernel(timer.signal),
            key => Information::of_timer(timer.signal, key, timer.value, missed),
        };
        (information, timer.thread, next, timer.interval, missed)
    };
    arm(&process, key, next, interval);
    if information.signal == 0 {
        return;
    }
    let meant = thread;
    let thread = meant.and_then(table::find_thread);
    let ours = |thread: &Arc<Thread>| Arc::ptr_eq(&thread.process, &process);
    if meant.is_some() && !thread.as_ref().is_some_and(ours) {
        // The thread for the signal has ended.
        return;
    }
    // A timer has at most one signal that waits, which counts its expirations.
    let waits = key != REAL
        && match &thread {
            Some(thread) => thread.signals.lock().pending.add_expirations(key, missed + 1),
            None => process.pending.lock().add_expirations(key, missed + 1),
        };
    if !waits {
        // A signal for which the queue has no room is lost.
        let _ = signal::send_information(&process, thread.as_ref(), information);
    }
}

/// Records the overrun of a timer's signal, which was taken.
pub(super) fn signal_taken(process: &Process, key: i32, overrun: u32) {
    if let Some(timer) = process.timers.lock().get_mut(&key) {
        timer.overrun = overrun;
    }
}

/// The time until a timer expires, and its interval.
fn rest(process: &Process, key: i32) -> Option<(u64, u64)> {
    let timers = process.timers.lock();
    let timer = timers.get(&key)?;
    let rest = if timer.at == 0 { 0 } else { timer.at.saturating_sub(time::now()).max(1) };
    Some((rest, timer.interval))
}

/// Cancels all timers of a process that ends.
pub(super) fn cancel_all(process: &Process) {
    let timers = core::mem::take(&mut *process.timers.lock());
    let event = core::mem::take(&mut *process.processor_timers.lock()).event;
    timers
        .values()
        .filter_map(|timer| timer.event)
        .chain(event)
        .for_each(|event| _ = time::cancel(event));
}

/// A new program keeps only the timers of `setitimer`.
pub(super) fn cancel_created(process: &Process) {
    process.timers.lock().retain(|key, timer| {
        if *key != REAL {
            _ = timer.event.map(time::cancel);
            signal::forget_timer(process, *key);
        }
        *key == REAL
    });
}

fn set_real(process: &Arc<Process>, value: u64, interval: u64) {
    process.timers.lock().entry(REAL).or_insert(Timer {
        event: None,
        at: 0,
        interval: 0,
        clock: CLOCK_MONOTONIC,
        signal: SIGALRM,
        thread: None,
        value: 0,
        overrun: 0,
    });
    let at = if value == 0 { 0 } else { time::now().saturating_add(value) };
    arm(process, REAL, at, interval);
}

/// `alarm(2)`.
#[cfg(target_arch = "x86_64")]
pub(super) fn alarm(seconds: u64) -> Outcome {
    let process = scheduler::current().process.clone();
    let (rest, _) = rest(&process, REAL).unwrap_or((0, 0));
    set_real(&process, u64::from(seconds as u32) * SECOND, 0);
    // The time left of a running alarm is never 0.
    Ok(if rest == 0 { 0 } else { ((rest + SECOND / 2) / SECOND).max(1) })
}

/// The timers of `setitimer` that count a process's CPU time.
#[derive(Default)]
pub(super) struct ProcessorTimers {
    /// Each timer's expiry in the process's CPU time (0 if the timer is stopped) and its interval.
    timers: [(u64, u64); 2],
    event: Option<EventId>,
}

/// The signal of each.
const PROCESSOR_SIGNALS: [u32; 2] = [SIGVTALRM, SIGPROF];

/// Called when a thread is scheduled, to continue the timers of its process's CPU time.
pub fn arrived() {
    look_at_processor_timers(&scheduler::current().process);
}

/// Sends the signals of expired timers. Runs again when the next timer expires, if the process
/// still runs.
fn look_at_processor_timers(process: &Arc<Process>) {
    let mut timers = process.processor_timers.lock();
    if let Some(event) = timers.event.take() {
        time::cancel(event);
    }
    if timers.timers.iter().all(|(at, _)| *at == 0) {
        return;
    }
    let now = process.processor_time();
    let (mut due, mut next) = (0, u64::MAX);
    for ((at, interval), signal) in timers.timers.iter_mut().zip(PROCESSOR_SIGNALS) {
        if *at != 0 && *at <= now {
            due |= bit(signal);
            *at = if *interval == 0 { 0 } else { now.saturating_add(*interval) };
        }
        if *at != 0 {
            next = next.min((*at - now).max(SHORTEST));
        }
    }
    if next != u64::MAX && scheduler::runs_anywhere(process) {
        let process = Arc::downgrade(process);
        let look = move || _ = process.upgrade().map(|process| look_at_processor_timers(&process));
        timers.event =
            Some(time::schedule(time::now().saturating_add(next), Event::Call(Box::new(look))));
    }
    drop(timers);
    for signal in PROCESSOR_SIGNALS.into_iter().filter(|signal| due & bit(*signal) != 0) {
        signal::send(process, signal);
    }
}

/// The time until a timer of `setitimer` expires, and its interval.
fn interval_timer(process: &Process, which: u64) -> Result<(u64, u64), Errno> {
    Ok(match which as u32 {
        ITIMER_REAL => rest(process, REAL).unwrap_or((0, 0)),
        ITIMER_VIRTUAL | ITIMER_PROF => {
            let now = process.processor_time();
            let (at, interval) = process.processor_timers.lock().timers[which as usize - 1];
            (if at == 0 { 0 } else { at.saturating_sub(now).max(1000) }, interval)
        }
        _ => return Err(Errno::EINVAL),
    })
}

/// Writes an `itimerval`.
fn write_interval_timer(at: u64, (rest, interval): (u64, u64)) -> Outcome {
    let micro = |time: u64| [time / SECOND, time % SECOND / 1000];
    user::write(at, &[micro(interval), micro(rest)])?;
    Ok(0)
}

/// `getitimer(2)`.
pub(super) fn getitimer(which: u64, at: u64) -> Outcome {
    write_interval_timer(at, interval_timer(&scheduler::current().process, which)?)
}

/// `setitimer(2)`. As on Linux, the timer is set before the old value is written: if that address
/// is bad, the call fails with `EFAULT` and the timer runs.
pub(super) fn setitimer(which: u64, new: u64, old: u64) -> Outcome {
    let [interval, value] = match new {
        0 => [[0; 2]; 2],
        at => user::read::<[[i64; 2]; 2]>(at)?,
    };
    let (interval, value) = (nanoseconds(interval, 1_000_000)?, nanoseconds(value, 1_000_000)?);
    let process = scheduler::current().process.clone();
    // Nothing sleeps from here until the timer is set.
    let was = interval_timer(&process, which)?;
    if which as u32 == ITIMER_REAL {
        set_real(&process, value, interval);
    } else {
        let at = if value == 0 { 0 } else { process.processor_time().saturating_add(value) };
        process.processor_timers.lock().timers[which as usize - 1] = (at, interval);
        look_at_processor_timers(&process);
    }
    if old == 0 { Ok(0) } else { write_interval_timer(old, was) }
}

/// The maximum number of timers that a process can create.
const MAXIMUM_TIMERS: usize = 64;

/// `timer_create(2)`.
///
/// # Errors
/// `EOPNOTSUPP` for clocks that no timer follows: those that Linux excludes, and CPU time, which
/// only `setitimer` counts here.
pub(super) fn timer_create(clock_id: u64, event_at: u64, id_at: u64) -> Outcome {
    clock(clock_id)?;
    if !matches!(clock_id as u32, CLOCK_REALTIME | CLOCK_TAI | CLOCK_MONOTONIC | CLOCK_BOOTTIME) {
        return Err(Errno::EOPNOTSUPP);
    }
    let process = scheduler::current().process.clone();
    // struct sigevent: the value; the signal and the kind; the thread.
    let [value, both, thread] = match event_at {
        0 => [0, u64::from(SIGALRM), 0],
        at => user::read::<[u64; 3]>(at)?,
    };
    let (signal, kind) = (both as u32, (both >> 32) as u32);
    let thread = match kind {
        SIGEV_NONE | SIGEV_SIGNAL => None,
        SIGEV_THREAD_ID => {
            let thread = table::find_thread(thread as u32).ok_or(Errno::EINVAL)?;
            if !Arc::ptr_eq(&thread.process, &process) {
                return Err(Errno::EINVAL);
            }
            Some(thread.id())
        }
        _ => return Err(Errno::EINVAL),
    };
    if kind != SIGEV_NONE && !(1..=signal::MAXIMUM).contains(&signal) {
        return Err(Errno::EINVAL);
    }
    heap::room(1024)?;
    let mut timers = process.timers.lock();
    if timers.len() > MAXIMUM_TIMERS {
        return Err(Errno::EAGAIN);
    }
    let key = (0..).find(|key| !timers.contains_key(key)).ok_or(Errno::EAGAIN)?;
    let value = if event_at == 0 { key as u64 } else { value };
    timers.insert(
        key,
        Timer {
            event: None,
            at: 0,
            interval: 0,
            clock: clock_id as u32,
            signal: if kind == SIGEV_NONE { 0 } else { signal },
            thread,
            value,
            overrun: 0,
        },
    );
    drop(timers);
    // Written last, because other threads of the process may create timers during the copy.
    user::write(id_at, &key).inspect_err(|_| _ = timer_delete(key as u64))?;
    Ok(0)
}

/// `timer_gettime(2)`.
pub(super) fn timer_gettime(id: u64, at: u64) -> Outcome {
    let rest = rest(&scheduler::current().process, created(id)?).ok_or(Errno::EINVAL)?;
    write_rest(at, rest)
}

fn write_rest(at: u64, (rest, interval): (u64, u64)) -> Outcome {
    user::write(at, &[[interval / SECOND, interval % SECOND], [rest / SECOND, rest % SECOND]])?;
    Ok(0)
}

/// `timer_settime(2)`. As on Linux, a signal of the old time that waits is discarded, and so is the
/// overrun.
pub(super) fn timer_settime(id: u64, flags: u64, new: u64, old: u64) -> Outcome {
    let key = created(id)?;
    let [interval, value] = user::read::<[[i64; 2]; 2]>(new)?;
    let (interval, value) = (nanoseconds(interval, SECOND)?, nanoseconds(value, SECOND)?);
    let process = scheduler::current().process.clone();
    let clock = process.timers.lock().get(&key).ok_or(Errno::EINVAL)?.clock;
    let was = rest(&process, key).ok_or(Errno::EINVAL)?;
    let at = match value {
        0 => 0,
        value if flags as u32 & TIMER_ABSTIME == 0 => time::now().saturating_add(value),
        value if matches!(clock, CLOCK_REALTIME | CLOCK_TAI) => of_real_time(value).max(1),
        value => value,
    };
    signal_taken(&process, key, 0);
    signal::forget_timer(&process, key);
    arm(&process, key, at, interval);
    if old == 0 { Ok(0) } else { write_rest(old, was) }
}

/// `timer_getoverrun(2)`.
pub(super) fn timer_getoverrun(id: u64) -> Outcome {
    let key = created(id)?;
    let process = &scheduler::current().process;
    let timers = process.timers.lock();
    Ok(timers.get(&key).ok_or(Errno::EINVAL)?.overrun.into())
}

/// `timer_delete(2)`.
pub(super) fn timer_delete(id: u64) -> Outcome {
    let key = created(id)?;
    let process = scheduler::current().process.clone();
    let timer = process.timers.lock().remove(&key).ok_or(Errno::EINVAL)?;
    if let Some(event) = timer.event {
        time::cancel(event);
    }
    signal::forget_timer(&process, key);
    Ok(0)
}

/// The key of a created timer; never that of `setitimer`.
fn created(id: u64) -> Result<i32, Errno> {
    Some(id as i32).filter(|id| *id >= 0).ok_or(Errno::EINVAL)
}
