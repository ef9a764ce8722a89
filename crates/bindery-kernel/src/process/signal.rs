//! Signals: sending, pending and blocked signals. Signals are delivered on the way back to the
//! program ([`super::deliver`]).

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use bindery::arch::ProtectionKey;
use linux_raw_sys::general::{
    RLIMIT_SIGPENDING, SA_NOCLDSTOP, SEGV_PKUERR, SIGBUS, SIGCHLD, SIGCONT, SIGFPE, SIGILL,
    SIGKILL, SIGSEGV, SIGSTOP, SIGSYS, SIGTRAP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH,
};

use crate::heap;
use crate::sync::Mutex;

pub(super) use super::information::{Information, code};

use super::state::{Process, Report};
use super::thread::{Thread, work};
use super::{all, kill, scheduler, timer};

/// The highest signal.
pub const MAXIMUM: u32 = 64;

/// The first signal that queues (`SIGRTMIN` of the kernel).
const FIRST_REAL_TIME: u32 = 32;

/// The maximum number of queued real-time signals, whatever the limit of a process.
const MAXIMUM_QUEUED: u64 = 4096;

/// The handler values for the default action, and for ignored signals.
pub(super) const DEFAULT: u64 = 0;
pub(super) const IGNORE: u64 = 1;

/// The set that holds one signal.
pub(super) const fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

const fn set_of(signals: &[u32]) -> u64 {
    let (mut set, mut index) = (0, 0);
    while index < signals.len() {
        set |= bit(signals[index]);
        index += 1;
    }
    set
}

/// Signals that cannot be blocked, caught or ignored.
pub(super) const UNBLOCKABLE: u64 = set_of(&[SIGKILL, SIGSTOP]);
/// Signals whose default action is to be ignored.
const DEFAULT_IGNORED: u64 = set_of(&[SIGCHLD, SIGCONT, SIGURG, SIGWINCH]);
/// Signals whose default action is to stop.
pub(super) const STOPPING: u64 = set_of(&[SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU]);
/// The stop signals that a terminal sends.
pub(super) const TERMINAL_STOPPING: u64 = STOPPING & !bit(SIGSTOP);
/// Signals caused by an instruction of the thread itself, which are delivered first.
const SYNCHRONOUS: u64 = set_of(&[SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGSYS]);

/// The maximum number of pending signals of a thread or process, whatever its limit.
const QUEUE_MAX: usize = 512;

/// Signals that wait.
#[derive(Default)]
pub(super) struct Pending {
    set: u64,
    queue: VecDeque<Information>,
}

impl Pending {
    pub(super) fn set(&self) -> u64 {
        self.set
    }

    fn add(&mut self, information: Information, limit: u64) -> Sent {
        let signal = information.signal;
        // A standard signal waits once, and once more for each timer.
        let queues = signal >= FIRST_REAL_TIME || information.timer().is_some();
        if self.set & bit(signal) != 0 && !queues {
            return Sent::Done;
        }
        let queued = self.queue.len();
        let full = queued as u64 >= limit || queued >= QUEUE_MAX || heap::room(1 << 12).is_err();
        if queues && full {
            return Sent::QueueFull;
        }
        self.set |= bit(signal);
        self.queue.push_back(information);
        Sent::Done
    }

    fn remove(&mut self, set: u64) {
        self.set &= !set;
        self.queue.retain(|information| bit(information.signal) & set == 0);
    }

    /// Adds expirations of a timer to its signal, if that waits. Returns whether it does.
    pub(super) fn add_expirations(&mut self, timer: i32, more: u64) -> bool {
        let of_timer = |information: &&mut Information| information.timer() == Some(timer);
        let Some(information) = self.queue.iter_mut().find(of_timer) else { return false };
        information.set_overrun(u64::from(information.overrun()).saturating_add(more));
        true
    }

    /// Discards the signal of a timer.
    fn remove_timer(&mut self, timer: i32) {
        self.queue.retain(|information| information.timer() != Some(timer));
        self.set = self.queue.iter().fold(0, |set, information| set | bit(information.signal));
    }

    fn take(&mut self, allowed: u64) -> Option<Information> {
        let ready = self.set & allowed;
        let first = if ready & SYNCHRONOUS != 0 { ready & SYNCHRONOUS } else { ready };
        if first == 0 {
            return None;
        }
        let signal = first.trailing_zeros() + 1;
        let at = self.queue.iter().position(|information| information.signal == signal)?;
        let information = self.queue.remove(at);
        if !self.queue.iter().any(|information| information.signal == signal) {
            self.set &= !bit(signal);
        }
        information
    }
}

/// The outcome of sending a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Sent {
    Done,
    /// The maximum number of signals is already pending.
    QueueFull,
}

/// A process's action for a signal (`struct sigaction` of the kernel).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Action {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

/// A process's actions for all signals; shared with `CLONE_SIGHAND`.
pub(super) struct Actions(Mutex<[Action; MAXIMUM as usize]>);

impl Actions {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new([Action::default(); MAXIMUM as usize])))
    }

    /// A copy, as `fork` makes one.
    pub(super) fn duplicate(&self) -> Arc<Self> {
        Arc::new(Self(Mutex::new(*self.0.lock())))
    }

    /// A copy without handlers, for `exec`: ignored signals stay ignored.
    pub(super) fn without_handlers(&self) -> Arc<Self> {
        let mut actions = *self.0.lock();
        for action in &mut actions {
            let handler = if action.handler == IGNORE { IGNORE } else { DEFAULT };
            *action = Action { handler, ..Action::default() };
        }
        Arc::new(Self(Mutex::new(actions)))
    }

    pub(super) fn get(&self, signal: u32) -> Action {
        self.0.lock()[signal as usize - 1]
    }

    pub(super) fn set(&self, signal: u32, action: Action) {
        self.0.lock()[signal as usize - 1] = action;
    }

    pub(super) fn ignores(&self, signal: u32) -> bool {
        match self.get(signal).handler {
            IGNORE => true,
            DEFAULT => DEFAULT_IGNORED & bit(signal) != 0,
            _ => false,
        }
    }

    /// The ignored signals, and those with a handler.
    pub(super) fn sets(&self) -> (u64, u64) {
        let actions = self.0.lock();
        let those = |wanted: fn(u64) -> bool| {
            let signals = actions.iter().enumerate().filter(|(_, action)| wanted(action.handler));
            signals.map(|(index, _)| 1 << index).sum()
        };
        (those(|handler| handler == IGNORE), those(|handler| handler > IGNORE))
    }
}

/// The alternate stack for signal handlers (`sigaltstack`); its size is 0 if there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Alternate {
    pub base: u64,
    pub size: u64,
    pub flags: u32,
}

/// The signals of one thread: the blocked ones, and those pending for it.
#[derive(Default)]
pub struct ThreadSignals {
    pub(super) blocked: u64,
    pub(super) pending: Pending,
    /// The mask to restore, if a call has set its own mask for its duration.
    pub(super) mask_after_call: Option<u64>,
    /// The signals for which `sigtimedwait` waits although they are blocked.
    pub(super) awaited: u64,
    pub(super) alternate: Alternate,
}

impl ThreadSignals {
    /// The signals of a new thread with this mask.
    pub(super) fn new(blocked: u64, alternate: Alternate) -> Self {
        Self { blocked, alternate, ..Self::default() }
    }
}

/// Turns an exception of the running thread into a signal, which the thread cannot block. If the
/// thread blocks or ignores the signal, the process ends.
pub fn exception(signal: u32, code: i32, address: u64) {
    raise(Information::new(signal, code, [address, 0, 0, 0]));
}

/// As [`exception`], for a running thread that has accessed memory with a protection key that it
/// has disabled.
pub fn key_violation(address: u64, key: ProtectionKey) {
    let fields = [address, 0, u64::from(key.number()), 0];
    raise(Information::new(SIGSEGV, SEGV_PKUERR as i32, fields));
}

fn raise(information: Information) {
    let signal = information.signal;
    let thread = scheduler::current();
    let actions = thread.process.actions();
    let mut signals = thread.signals.lock();
    let action = actions.get(signal);
    if signals.blocked & bit(signal) != 0 || action.handler == IGNORE {
        actions.set(signal, Action::default());
        signals.blocked &= !bit(signal);
    }
    signals.pending.remove(bit(signal));
    let _ = signals.pending.add(information, u64::MAX); // none of its kind waits
    thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
}

/// Sends a signal to the running thread, as if its own process had sent it (`SIGPIPE`).
pub fn send_to_this_thread(signal: u32) {
    let thread = scheduler::current_thread();
    let information = Information::of_program(signal, code::USER);
    // Standard signals always find room.
    let _ = send_information(&thread.process, Some(&thread), information);
}

/// Sends a signal of the kernel to a process.
pub fn send(process: &Arc<Process>, signal: u32) {
    // Standard signals always find room.
    let _ = send_information(process, None, Information::of_kernel(signal));
}

/// Sends a signal of the kernel to all processes of a group (the console's `SIGINT`).
pub fn send_to_group(group: u32, signal: u32) {
    for process in all().iter().filter(|process| process.group() == group) {
        send(process, signal);
    }
}

/// Sends a signal to a process, or to one of its threads.
pub(super) fn send_information(
    process: &Arc<Process>,
    thread: Option<&Arc<Thread>>,
    information: Information,
) -> Sent {
    let signal = information.signal;
    let threads = process.threads();
    let Some(first) = threads.first() else { return Sent::Done };
    if signal == SIGKILL {
        kill::kill_group(process);
        return Sent::Done;
    }
    if bit(signal) & STOPPING != 0 {
        forget(process, bit(SIGCONT));
    } else if signal == SIGCONT {
        forget(process, STOPPING);
        continue_process(process);
    }
    let blocked = thread.unwrap_or(first).signals.lock().blocked & bit(signal) != 0;
    if !blocked && process.actions().ignores(signal) {
        return Sent::Done;
    }
    let limit = process.limit(RLIMIT_SIGPENDING).current.min(MAXIMUM_QUEUED);
    let sent = match thread {
        Some(thread) => thread.signals.lock().pending.add(information, limit),
        None => process.pending.lock().add(information, limit),
    };
    match thread {
        Some(thread) => _ = tell(thread, bit(signal)),
        None => _ = threads.iter().find(|thread| tell(thread, bit(signal))),
    }
    sent
}

/// Makes the thread check its signals if it would handle a signal of `set`. Returns whether it
/// would.
fn tell(thread: &Arc<Thread>, set: u64) -> bool {
    let signals = thread.signals.lock();
    let takes = set & (!signals.blocked | signals.awaited) != 0;
    drop(signals);
    if takes {
        thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
        scheduler::wake(thread);
    }
    takes
}

/// Makes all threads check for signals pending for the process, after the notified thread has ended
/// or has blocked these signals.
pub(super) fn tell_others(process: &Process) {
    let set = process.pending.lock().set;
    if set != 0 {
        process.threads().iter().for_each(|thread| _ = tell(thread, set));
    }
}

/// Discards the signals of `set` that are pending for the process or its threads.
pub(super) fn forget(process: &Process, set: u64) {
    process.pending.lock().remove(set);
    for thread in process.threads() {
        thread.signals.lock().pending.remove(set);
    }
}

/// Discards the signal of a timer that is deleted.
pub(super) fn forget_timer(process: &Process, timer: i32) {
    process.pending.lock().remove_timer(timer);
    for thread in process.threads() {
        thread.signals.lock().pending.remove_timer(timer);
    }
}

/// The next pending signal of `allowed` for the thread or its process.
pub(super) fn take(thread: &Thread, allowed: u64) -> Option<Information> {
    let own = thread.signals.lock().pending.take(allowed);
    let information = own.or_else(|| thread.process.pending.lock().take(allowed))?;
    if let Some(timer) = information.timer() {
        timer::signal_taken(&thread.process, timer, information.overrun());
    }
    Some(information)
}

/// Whether the thread has a signal to handle, or has to stop or to end.
#[inline]
pub fn is_waiting(thread: &Thread) -> bool {
    thread.work.load(Ordering::Relaxed) & (work::SIGNAL | work::END) != 0 && has_work(thread)
}

/// The slow part of [`is_waiting`], for a thread that is marked as having work.
#[cold]
#[inline(never)]
fn has_work(thread: &Thread) -> bool {
    must_end(thread) || unblocked(thread) != 0 || thread.process.state.lock().stopped.is_some()
}

/// The pending signals of the thread and its process that the thread does not block. Takes one lock
/// after the other: a CPU may ask without the kernel's lock, while its holder has one of them and
/// waits for another.
fn unblocked(thread: &Thread) -> u64 {
    let (own, blocked) = {
        let signals = thread.signals.lock();
        (signals.pending.set, signals.blocked)
    };
    (own | thread.process.pending.lock().set) & !blocked
}

/// Whether the thread has to end.
pub(super) fn must_end(thread: &Thread) -> bool {
    thread.work.load(Ordering::Relaxed) & work::END != 0
}

/// Whether the thread is about to be killed: either it has to end, or a pending signal ends its
/// process (Linux: `fatal_signal_pending`). With the kernel's lock, this changes only before a
/// call, or while the thread sleeps in it. Without, another thread may take or ignore the signal.
#[inline]
pub fn is_fatal_waiting(thread: &Thread) -> bool {
    thread.work.load(Ordering::Relaxed) & (work::SIGNAL | work::END) != 0 && is_killed(thread)
}

#[cold]
fn is_killed(thread: &Thread) -> bool {
    let set = unblocked(thread);
    let (ignored, caught) = thread.process.actions().sets();
    let left = set & !ignored & !caught;
    must_end(thread) || left & !(DEFAULT_IGNORED | STOPPING) != 0
}

/// Makes `mask` the blocked signals of the running thread until the call is over, that is until a
/// handler has been chosen (`ppoll`, `pselect6`).
pub fn block_for_call(mask: u64) {
    let thread = scheduler::current();
    let mut signals = thread.signals.lock();
    signals.mask_after_call = Some(signals.blocked);
    signals.blocked = mask & !UNBLOCKABLE;
    drop(signals);
    thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
    tell_others(&thread.process);
}

/// Ends the effect of [`block_for_call`]. Signals that the thread's own mask blocks stay pending.
pub fn end_block_for_call() {
    let thread = scheduler::current();
    let mask = thread.signals.lock().mask_after_call.take();
    if let Some(mask) = mask {
        set_blocked(mask);
    }
}

/// Changes the blocked signals of the running thread.
pub(super) fn set_blocked(mask: u64) {
    let thread = scheduler::current();
    thread.signals.lock().blocked = mask & !UNBLOCKABLE;
    thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
    tell_others(&thread.process);
}

/// Whether the signal's default action ends a process.
pub(super) fn ends_by_default(signal: u32) -> bool {
    bit(signal) & (DEFAULT_IGNORED | STOPPING) == 0
}

/// Stops a process. Its threads stop on their way back to the program.
pub(super) fn stop_process(process: &Arc<Process>, signal: u32) {
    {
        let mut state = process.state.lock();
        if state.stopped.is_some() || state.status.is_some() {
            return;
        }
        state.stopped = Some(signal);
        state.report = Some(Report::Stopped(signal));
    }
    for thread in process.threads() {
        thread.work.fetch_or(work::SIGNAL, Ordering::Relaxed);
        scheduler::wake(&thread);
    }
    tell_parent_of_stop(process, code::STOPPED, signal);
}

fn continue_process(process: &Arc<Process>) {
    {
        let mut state = process.state.lock();
        if state.stopped.take().is_none() {
            return;
        }
        state.report = Some(Report::Continued);
    }
    process.life_changed.wake_all();
    tell_parent_of_stop(process, code::CONTINUED, SIGCONT);
}

fn tell_parent_of_stop(process: &Process, code: i32, status: u32) {
    let Some(parent) = process.parent() else { return };
    parent.children_changed.wake_all();
    if parent.actions().get(SIGCHLD).flags & u64::from(SA_NOCLDSTOP) == 0 {
        let information = Information::of_child(SIGCHLD, code, process, status, 0);
        let _ = send_information(&parent, None, information); // a standard signal finds room
    }
}
