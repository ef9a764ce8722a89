//! The clocks, and the queue of timers.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch;
use crate::sync::Mutex;

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

/// A sleeper that a timer wakes.
pub trait Sleeper: Send + Sync {
    /// Wakes the sleeper if it sleeps.
    fn wake(self: Arc<Self>);
}

/// The action at a time.
pub enum Event {
    /// A thread wakes up.
    Wake(Weak<dyn Sleeper>),
    /// Any other action. The action runs with interrupts off, in the context of any thread.
    Call(Box<dyn FnOnce() + Send>),
}

/// Identifies an event for its cancellation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct EventId {
    at: u64,
    serial: u64,
}

static EVENTS: Mutex<BTreeMap<EventId, Event>> = Mutex::new(BTreeMap::new());
static SERIAL: AtomicU64 = AtomicU64::new(0);

/// The difference between the time of day and the time since power-on, in nanoseconds.
static REAL_TIME_OFFSET: AtomicU64 = AtomicU64::new(0);

/// Reads the time of day.
pub fn begin() {
    let offset = arch::real_time() * SECOND - arch::nanoseconds();
    REAL_TIME_OFFSET.store(offset, Ordering::Relaxed);
}

/// Nanoseconds since power-on.
pub fn now() -> u64 {
    arch::nanoseconds()
}

/// Nanoseconds since 1970.
pub fn real_time() -> u64 {
    now() + REAL_TIME_OFFSET.load(Ordering::Relaxed)
}

/// Sets the time of day, which is not below [`now`].
pub fn set_real_time(nanoseconds: u64) {
    REAL_TIME_OFFSET.store(nanoseconds.saturating_sub(now()), Ordering::Relaxed);
}

/// Schedules `event` for the time `at` of [`now`], or soon after.
pub fn schedule(at: u64, event: Event) -> EventId {
    let id = EventId { at, serial: SERIAL.fetch_add(1, Ordering::Relaxed) };
    EVENTS.lock().insert(id, event);
    interrupt_by(at);
    id
}

/// Cancels an event; `false` if it has already happened.
pub fn cancel(id: EventId) -> bool {
    EVENTS.lock().remove(&id).is_some()
}

/// Called by the timer's interrupt: handles all events that are due.
pub fn expired() {
    loop {
        let event = {
            let mut events = EVENTS.lock();
            match events.first_key_value() {
                Some((id, _)) if id.at <= now() => events.pop_first(),
                _ => None,
            }
        };
        match event {
            Some((_, Event::Wake(thread))) => {
                if let Some(thread) = thread.upgrade() {
                    thread.wake();
                }
            }
            Some((_, Event::Call(call))) => call(),
            None => break,
        }
    }
    set_timer();
}

/// Whether the interrupt of this CPU's timer is pending. Interrupts are off in the kernel, so no
/// code sees the interrupt arrive.
pub fn is_due() -> bool {
    now() >= arch::this_cpu().timer_at.load(Ordering::Relaxed)
}

/// The end of the running thread's time slice, if other threads wait.
pub fn turn_ends() -> Option<u64> {
    Some(arch::this_cpu().turn_ends.load(Ordering::Relaxed)).filter(|at| *at != u64::MAX)
}

/// Sets [`turn_ends`], and the timer.
pub fn set_turn_end(at: Option<u64>) {
    arch::this_cpu().turn_ends.store(at.unwrap_or(u64::MAX), Ordering::Relaxed);
    if let Some(at) = at {
        interrupt_by(at);
    }
}

/// Ends the running thread's time slice if it is over. Returns whether it was. The caller then calls
/// [`expired`], which sets the timer.
pub fn end_turn() -> bool {
    let is_over = turn_ends().is_some_and(|at| at <= now());
    if is_over {
        set_turn_end(None);
    }
    is_over
}

/// Makes the timer's interrupt arrive at `at` or earlier.
///
/// An interrupt that is due earlier stays, even if nothing needs it any more: [`expired`] then finds
/// nothing to do, and sets the timer anew. Two threads that wake each other begin and cancel a time
/// slice at each turn, and would set the timer each time.
fn interrupt_by(at: u64) {
    if at < arch::this_cpu().timer_at.load(Ordering::Relaxed) {
        set_timer();
    }
}

/// Sets the timer for the next event, or for the end of the running thread's time slice. A machine
/// with one thread and no event gets at most one more interrupt, which was due before.
fn set_timer() {
    let event = EVENTS.lock().first_key_value().map(|(id, _)| id.at);
    let turn = turn_ends();
    let next = [event, turn].into_iter().flatten().min();
    arch::this_cpu().timer_at.store(next.unwrap_or(u64::MAX), Ordering::Relaxed);
    arch::set_timer(next);
}

/// Wakes the thread at `at`.
pub fn wake_at(at: u64, thread: Weak<dyn Sleeper>) -> EventId {
    schedule(at, Event::Wake(thread))
}
