//! Threads that sleep on words ([`Platform::park`]), and the watchdog over them.
//!
//! A sleep ends only when the word's address is unparked, so a wake-up that the core loses leaves a
//! thread asleep forever. The watchdog then reports the thread and its word and aborts the process.
//!
//! Two things end a sleep early:
//! - A signal. A thread with a pending signal does not sleep at all, and the call that sends a
//!   signal wakes the threads concerned.
//! - The feature `spurious_wakeups`. When it is enabled, sleeps end at random, as
//!   [`Platform::park`] allows, which exposes a caller that does not check again.
//!
//! [`Platform::park`]: bindery::Platform::park

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::process::abort;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bindery::platform::Cpu;
use parking_lot::Mutex;
use parking_lot_core::{
    DEFAULT_UNPARK_TOKEN, FilterOp, ParkResult, ParkToken, park, unpark_all, unpark_filter,
};

use crate::signals::Signals;

/// Serves the events for which a thread would sleep. Returns whether there was one.
type Serve = dyn Fn() -> bool;

thread_local! {
    /// The function that the thread calls in place of its sleeps.
    static IN_PLACE: Cell<Option<NonNull<Serve>>> = const { Cell::new(None) };
}

/// Runs `work`. The calling thread calls `serve` instead of sleeping ([`Platform::park`]), until the
/// word changes. `serve` answers for devices, pagers and handlers, and returns whether it had an
/// answer. Only without an answer does the thread sleep. So one thread takes both sides of a wait,
/// and the order of all events is that of `serve`. A signal ends no wait while answers come.
///
/// A sleep within `serve` is a sleep, and so is a brief one ([`Platform::park_briefly`]).
///
/// [`Platform::park`]: bindery::Platform::park
/// [`Platform::park_briefly`]: bindery::Platform::park_briefly
pub fn served_in_place<R>(serve: &dyn Fn() -> bool, work: impl FnOnce() -> R) -> R {
    let serve: NonNull<dyn Fn() -> bool + '_> = serve.into();
    // SAFETY: only the lifetime changes. `_restore` removes the pointer before the borrow ends.
    let serve =
        unsafe { std::mem::transmute::<NonNull<dyn Fn() -> bool + '_>, NonNull<Serve>>(serve) };
    let _restore = Restore(IN_PLACE.replace(Some(serve)));
    work()
}

/// Sets the function of the thread again, also when the work panics.
struct Restore(Option<NonNull<Serve>>);

impl Drop for Restore {
    fn drop(&mut self) {
        IN_PLACE.set(self.0);
    }
}

/// Calls the function of the calling thread, if it has one, until the word has another value.
/// Returns whether it has.
fn serves(word: &AtomicU32, expected: u32) -> bool {
    let Some(serve) = IN_PLACE.take() else { return false };
    let _restore = Restore(Some(serve));
    // SAFETY: `served_in_place` borrows the function for as long as the pointer is set.
    let serve = unsafe { serve.as_ref() };
    while word.load(Ordering::Acquire) == expected {
        if !serve() {
            return false;
        }
    }
    true
}

/// Whether sleeps end at random.
const SPURIOUS_WAKEUPS: bool = cfg!(feature = "spurious_wakeups");

/// The parked threads of one machine.
pub(crate) struct Parking {
    /// The longest sleep.
    limit: Duration,
    /// The length of a brief sleep.
    brief: Duration,
    /// The thread that built the machine. In a test run, its name is the name of the test.
    builder: Thread,
    sleepers: Mutex<Vec<Sleeper>>,
    /// The number of sleepers that a wake-up finds.
    asleep: AtomicU32,
    /// The number of the next sleep.
    next: AtomicU64,
    /// The number of wake-ups so far.
    unparks: AtomicU64,
    seed: u64,
}

/// A thread that sleeps, or is about to.
struct Sleeper {
    sleep: u64,
    cpu: Cpu,
    /// The thread borrows the word for as long as this sleeper is in the list.
    word: NonNull<AtomicU32>,
    expected: u32,
    thread: Thread,
}

// SAFETY: all other fields may be sent, and any thread may read an atomic word.
unsafe impl Send for Sleeper {}

impl Parking {
    /// No thread sleeps. The seed determines the spurious wake-ups.
    pub(crate) fn new((limit, brief): (Duration, Duration), seed: u64) -> Self {
        let builder = thread::current();
        let (sleepers, asleep) = (Mutex::default(), AtomicU32::new(0));
        let [next, unparks] = [const { AtomicU64::new(0) }; 2];
        Self { limit, brief, builder, sleepers, asleep, next, unparks, seed }
    }

    /// Puts the calling thread, on `cpu`, to sleep until `word` is unparked.
    pub(crate) fn park(&self, cpu: Cpu, word: &AtomicU32, expected: u32, signals: &Signals) {
        self.park_for(None, (cpu, word, expected), signals);
    }

    /// As [`Parking::park`], for a limited time.
    pub(crate) fn park_briefly(&self, sleep: (Cpu, &AtomicU32, u32), signals: &Signals) {
        self.park_for(Some(self.brief), sleep, signals);
    }

    /// Sleeps for at most the time of a `brief` sleep, or until the wake-up counts as lost.
    fn park_for(
        &self,
        brief: Option<Duration>,
        (cpu, word, expected): (Cpu, &AtomicU32, u32),
        signals: &Signals,
    ) {
        if brief.is_none() && serves(word, expected) {
            return;
        }
        let sleep = self.next.fetch_add(1, Ordering::Relaxed);
        let spurious = SPURIOUS_WAKEUPS.then(|| spurious_wakeup(self.seed ^ sleep));
        if signals.keep_awake(cpu) || spurious == Some(Duration::ZERO) {
            // The thread that will wake the caller may need the host's CPU.
            thread::yield_now();
            return;
        }
        self.begin(Sleeper { sleep, cpu, word: word.into(), expected, thread: thread::current() });
        // Acquire: a thread that finds the word changed sees everything before the change. The
        // signals are checked after the thread has become visible, because `interrupt` looks for
        // sleepers after the signals were sent.
        let stays = || word.load(Ordering::Acquire) == expected && !signals.keep_awake(cpu);
        let slept = Cell::new(0);
        let sleeps = || {
            slept.set(1);
            self.asleep.fetch_add(1, Ordering::Release);
        };
        let key = ptr::from_ref(word).addr();
        let limit = brief.unwrap_or(self.limit);
        let until = Instant::now().checked_add(spurious.map_or(limit, |at| at.min(limit)));
        // SAFETY: 1. The key is the address of an existing word, which contains no lock of that
        // crate and is used as a key only in this module. 2. The closures neither panic nor call
        // the crate.
        let result = unsafe { park(key, stays, sleeps, |_, _| (), token_of(sleep), until) };
        self.asleep.fetch_sub(slept.get(), Ordering::Relaxed);
        if result == ParkResult::TimedOut && spurious.is_none() && brief.is_none() {
            self.give_up(sleep);
        }
        self.end(sleep);
    }

    fn begin(&self, sleeper: Sleeper) {
        self.sleepers.lock().push(sleeper);
    }

    fn end(&self, sleep: u64) {
        self.sleepers.lock().retain(|sleeper| sleeper.sleep != sleep);
    }

    /// The number of sleeping threads. The next wake-up of its word finds each of them.
    pub(crate) fn asleep(&self) -> u32 {
        self.asleep.load(Ordering::Acquire)
    }

    /// The number of calls of [`Parking::unpark`].
    pub(crate) fn unparks(&self) -> u64 {
        self.unparks.load(Ordering::Relaxed)
    }

    /// Wakes all threads that sleep on the word.
    pub(crate) fn unpark(&self, word: *const AtomicU32) {
        self.unparks.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `park`. If the word was freed and its address reused, a thread that waits
        // for the new word checks again.
        unsafe { unpark_all(word.addr(), DEFAULT_UNPARK_TOKEN) };
    }

    /// Wakes the threads on the CPUs for which `concerns` is true. The caller has already sent them
    /// a signal.
    pub(crate) fn interrupt(&self, concerns: impl Fn(Cpu) -> bool) {
        let concerned = |sleeper: &&Sleeper| concerns(sleeper.cpu);
        let found = |sleeper: &Sleeper| (sleeper.word.addr().get(), token_of(sleeper.sleep));
        let found: Vec<_> = self.sleepers.lock().iter().filter(concerned).map(found).collect();
        for (key, token) in found {
            let is_found = |other| if other == token { FilterOp::Unpark } else { FilterOp::Skip };
            // SAFETY: as in `park`. A thread that has woken since is no longer queued under the key
            // or has another token.
            unsafe { unpark_filter(key, is_found, |_| DEFAULT_UNPARK_TOKEN) };
        }
    }

    /// Ends the process because the thread was not woken. A panic would not suffice: it would
    /// unwind through core calls that hold locks, and it would be lost in a helper thread that is
    /// never joined.
    ///
    /// Two threads can give up at once. The list stays locked until the process ends, so that only
    /// one of them reports.
    fn give_up(&self, sleep: u64) -> ! {
        let mut sleepers = self.sleepers.lock();
        let report = self.report(sleep, &mut sleepers).unwrap_or_default();
        // Avoids `eprintln`, because a test's output is captured until the test ends, and this test
        // never ends.
        let _ = io::stderr().write_all(report.as_bytes());
        abort()
    }

    fn report(&self, sleep: u64, sleepers: &mut [Sleeper]) -> Result<String, fmt::Error> {
        let mut text = String::new();
        writeln!(
            text,
            "\na machine that {} built hangs: {:?} asleep",
            Name(&self.builder),
            self.limit
        )?;
        sleepers.sort_by_key(|sleeper| sleeper.sleep != sleep);
        for Sleeper { cpu, word, expected, thread, .. } in sleepers {
            // SAFETY: the sleeper is in the list, which is locked, so its thread borrows the word.
            let now = unsafe { word.as_ref() }.load(Ordering::Acquire);
            let (thread, at) = (Name(thread), word.addr());
            write!(text, "{thread} on CPU {} sleeps on the word at {at:#x}", cpu.0)?;
            match now == *expected {
                true => writeln!(text, " while it holds {now:#x}, which it does")?,
                false => writeln!(
                    text,
                    " while it holds {expected:#x}; it holds {now:#x}: a lost wake-up"
                )?,
            }
        }
        writeln!(text, "the first was parked here:\n{}", Backtrace::force_capture())?;
        Ok(text)
    }
}

/// The name of a thread, or its number if it has none.
struct Name<'a>(&'a Thread);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.name() {
            Some(name) => write!(f, "thread `{name}`"),
            None => write!(f, "{:?}", self.0.id()),
        }
    }
}

/// Distinguishes the sleeps on one word.
fn token_of(sleep: u64) -> ParkToken {
    ParkToken(sleep as usize)
}

/// The time after which a sleep ends spuriously: every second sleep ends at once, the others within
/// a millisecond.
fn spurious_wakeup(number: u64) -> Duration {
    // The mixer of SplitMix64: the results of neighboring numbers are unrelated.
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    if mixed & 1 == 0 { Duration::ZERO } else { Duration::from_micros(mixed >> 54) }
}
