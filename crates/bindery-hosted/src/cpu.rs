//! CPUs are threads.
//!
//! [`Seats::bind`] puts a thread on a CPU until the guard is dropped. An unbound thread is CPU 0
//! whenever it uses the machine. It occupies the seat for one read section or one access. Two
//! threads on one CPU at the same time are an error in the surrounding program and cause a panic.
//!
//! The machine has a clock that advances when a grace period begins. Each seat holds the time at
//! which its thread entered its current read section, or 0. A grace period is over when no seat
//! holds a time before the start of the grace period.
//!
//! ```text
//! clock      7   | 8 (grace period 8 begins)
//! section    0   7 (inside) ............. 0   8 (inside)
//!                    not over             over, for any section now
//! ```
//!
//! # Machines whose CPUs are busy
//! While at most one thread is bound, every check whether a grace period is over reads all seats,
//! and the answer is exact. With more threads, each check would fetch the cache lines of all other
//! seats. So a check then reads only one number, the latest time that has passed. Every
//! [`QUESTIONS`]th negative check of a CPU reads the seats and advances the number for all CPUs.

use std::cell::{Cell, RefCell};
use std::hint;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::thread;

use bindery::platform::{Cpu, GracePeriod};

/// Rounds that a waiter spins before it yields to another thread, since the host may have preempted
/// the lock's holder.
const SPINS: u32 = 64;

/// A number that no thread has.
const NOBODY: u64 = 0;

/// With several bound threads, a CPU reads all seats once in this number of checks.
const QUESTIONS: u32 = 8;

/// The time of a seat outside of read sections. The clock starts above this value.
const OUTSIDE: u64 = 0;

/// The seat of this thread on the machine that it used last.
#[derive(Clone, Copy)]
struct Here {
    machine: u64,
    cpu: Cpu,
    /// The thread is bound: it owns the seat until the guard is dropped.
    bound: bool,
}

thread_local! {
    static THREAD: Cell<u64> = const { Cell::new(NOBODY) };
    static HERE: Cell<Here> = const { Cell::new(Here { machine: 0, cpu: Cpu(0), bound: false }) };
    static SPUN: Cell<u32> = const { Cell::new(0) };
    /// All CPUs to which this thread is bound: of several machines, or of one inside another.
    static BINDINGS: RefCell<Vec<(u64, Cpu)>> = const { RefCell::new(Vec::new()) };
}

/// The number of this thread; never reused.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(NOBODY + 1);
    THREAD.with(|number| {
        if number.get() == NOBODY {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

/// One CPU, for one thread, in its own cache lines.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Seat {
    /// The thread that occupies the seat.
    owner: AtomicU64,
    /// The nesting depth of read sections. Only the owner uses it.
    depth: AtomicU32,
    /// The clock when the read section was entered, or [`OUTSIDE`].
    section: AtomicU64,
    /// The number of `is_over` calls of its thread that returned false.
    questions: AtomicU32,
    /// The work of the CPU's calls since the count was last reset to 0, and the allowed maximum; 0
    /// for no limit.
    #[cfg(feature = "measure")]
    work: AtomicU64,
    #[cfg(feature = "measure")]
    most_work: AtomicU64,
}

/// The CPUs of one machine.
#[derive(Debug)]
pub(crate) struct Seats {
    /// The machine's number; never reused.
    machine: u64,
    seats: Box<[Seat]>,
    clock: Clock,
}

/// In its own cache lines, since every section reads it.
#[repr(align(128))]
#[derive(Debug)]
struct Clock {
    /// Advances when a grace period begins.
    now: AtomicU64,
    /// Every section that was entered before this time has ended.
    passed: AtomicU64,
    /// The number of bound threads.
    bound: AtomicU32,
}

impl Seats {
    pub(crate) fn new(cpus: u16) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let seats = (0..cpus).map(|_| Seat::default()).collect();
        let clock = Clock {
            now: AtomicU64::new(OUTSIDE + 1),
            passed: AtomicU64::new(OUTSIDE),
            bound: AtomicU32::new(0),
        };
        Self { machine: NEXT.fetch_add(1, Ordering::Relaxed), seats, clock }
    }

    /// The number of CPUs.
    pub(crate) fn count(&self) -> u16 {
        self.seats.len() as u16
    }

    /// The CPU of this thread.
    #[inline]
    pub(crate) fn cpu(&self) -> Cpu {
        self.here().cpu
    }

    #[inline]
    fn here(&self) -> Here {
        let here = HERE.get();
        if here.machine == self.machine { here } else { self.look_up() }
    }

    #[cold]
    fn look_up(&self) -> Here {
        let bound = BINDINGS.with_borrow(|bindings| {
            let mine = bindings.iter().rev().find(|(machine, _)| *machine == self.machine);
            mine.map(|(_, cpu)| *cpu)
        });
        let here =
            Here { machine: self.machine, cpu: bound.unwrap_or(Cpu(0)), bound: bound.is_some() };
        HERE.set(here);
        here
    }

    #[inline]
    fn seat(&self, cpu: Cpu) -> &Seat {
        &self.seats[usize::from(cpu.0)]
    }

    /// Binds this thread to `cpu` until the guard is dropped.
    pub(crate) fn bind(&self, cpu: Cpu) -> OnCpu<'_> {
        assert!(cpu.0 < self.count(), "{cpu:?} of a machine with {} CPUs", self.count());
        assert!(!self.inside(), "a thread moved to {cpu:?} inside a read section");
        let here = self.here();
        let moved = !(here.bound && here.cpu == cpu);
        if moved {
            let owned_already = self.seat(cpu).owner.load(Ordering::Relaxed) == thread_number();
            assert!(!owned_already, "a thread that is {cpu:?} and was put elsewhere came back");
            self.take_seat(cpu);
            self.clock.bound.fetch_add(1, Ordering::Relaxed);
        }
        BINDINGS.with_borrow_mut(|bindings| bindings.push((self.machine, cpu)));
        HERE.set(Here { machine: self.machine, cpu, bound: true });
        OnCpu { seats: self, cpu, moved, of_this_thread: PhantomData }
    }

    fn take_seat(&self, cpu: Cpu) {
        let me = thread_number();
        let owner = &self.seat(cpu).owner;
        if owner.compare_exchange(NOBODY, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
            panic!(
                "two threads are CPU {} of one machine at the same time; give each thread a CPU of its own with Machine::on_cpu (a thread without one is CPU 0)",
                cpu.0
            );
        }
    }

    /// Whether this thread is inside a read section.
    pub(crate) fn inside(&self) -> bool {
        let seat = self.seat(self.here().cpu);
        seat.owner.load(Ordering::Relaxed) == thread_number()
            && seat.depth.load(Ordering::Relaxed) > 0
    }

    /// Reserves the seat for this thread while the guard lives.
    #[inline]
    pub(crate) fn occupy(&self) -> Occupied<'_> {
        let here = self.here();
        let taken =
            !here.bound && self.seat(here.cpu).owner.load(Ordering::Relaxed) != thread_number();
        if taken {
            self.take_seat(here.cpu);
        }
        Occupied { seat: self.seat(here.cpu), cpu: here.cpu, taken }
    }

    #[inline]
    pub(crate) fn enter(&self) {
        let occupied = self.occupy();
        let seat = occupied.seat;
        let depth = seat.depth.load(Ordering::Relaxed);
        #[cfg(feature = "measure")]
        if depth == 0 {
            seat.count_section();
        }
        // From here on the seat stays taken until the end of the section.
        std::mem::forget(occupied);
        seat.depth.store(depth + 1, Ordering::Relaxed);
        if depth == 0 {
            // Acquire: a thread that sees the time of a grace period also sees every unlink before
            // it.
            announce(&seat.section, self.clock.now.load(Ordering::Acquire));
        }
    }

    #[inline]
    pub(crate) fn leave(&self) {
        let here = self.here();
        let seat = self.seat(here.cpu);
        let depth = seat.depth.load(Ordering::Relaxed);
        assert!(depth > 0, "left a read section that was never entered");
        seat.depth.store(depth - 1, Ordering::Relaxed);
        if depth == 1 {
            seat.section.store(OUTSIDE, Ordering::Release);
            if !here.bound {
                seat.owner.store(NOBODY, Ordering::Release);
            }
        }
    }

    /// Adds to the work of the calls on this CPU.
    #[cfg(feature = "measure")]
    #[inline]
    pub(crate) fn worked(&self, entries: u64) {
        self.seat(self.cpu()).add_work(entries);
    }

    /// The work on this CPU since the last call. From here on, at most `most` is allowed; 0 for no
    /// limit.
    #[cfg(feature = "measure")]
    pub(crate) fn take_work(&self, most: u64) -> u64 {
        let seat = self.seat(self.cpu());
        seat.most_work.store(most, Ordering::Relaxed);
        seat.work.swap(0, Ordering::Relaxed)
    }

    /// Waits until all current read sections have ended.
    pub(crate) fn synchronize(&self) {
        assert!(
            !self.inside(),
            "synchronize inside a read section on CPU {}: it would wait for itself forever",
            self.cpu().0
        );
        let began = self.advance_clock();
        for seat in &self.seats {
            while seat.is_inside_since(began) {
                relax();
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Advances the clock and returns the new time, at which a grace period begins.
    ///
    /// If a section is entered at the same time, either its seat shows an earlier time to the
    /// caller, or it sees everything that the caller has unlinked. The fence pairs with the one in
    /// `announce`:
    /// 1. CPU A reads the clock;
    /// 2. CPU B unlinks a VMA, advances the clock, and finds CPU A's seat outside;
    /// 3. CPU A announces the old time, and then, after its fence, no longer finds the VMA.
    #[inline]
    fn advance_clock(&self) -> u64 {
        let now = self.clock.now.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        now
    }

    /// Begins a grace period. If other threads are bound, it is the one that begins at the clock's
    /// next advance.
    #[inline]
    pub(crate) fn grace_period(&self) -> GracePeriod {
        if self.is_busy() {
            // The caller's unlink precedes its read of the clock. The fence pairs with the fences
            // of the CPU that advances the clock and of the CPU that enters a section.
            fence(Ordering::SeqCst);
            GracePeriod(self.clock.now.load(Ordering::SeqCst) + 1)
        } else {
            GracePeriod(self.advance_clock())
        }
    }

    /// Whether all sections that existed when the grace period began have ended. With several bound
    /// threads, the answer may turn true later than the last section ends.
    #[inline]
    pub(crate) fn is_over(&self, period: GracePeriod) -> bool {
        assert!(
            !self.inside(),
            "a grace period asked after inside a read section on CPU {}: it may be its own",
            self.cpu().0
        );
        // Acquire: the reads of the sections come before all later steps.
        let has_passed = || self.clock.passed.load(Ordering::Acquire) >= period.0;
        if self.is_busy() {
            has_passed() || self.is_to_look() && self.look_at_seats() && has_passed()
        } else {
            !self.is_any_inside_since(period.0)
        }
    }

    /// Whether several threads are bound.
    #[inline]
    fn is_busy(&self) -> bool {
        self.clock.bound.load(Ordering::Relaxed) > 1
    }

    /// Counts a check. Returns whether the caller must read the seats this time.
    #[inline]
    fn is_to_look(&self) -> bool {
        let questions = &self.seat(self.cpu()).questions;
        // An unbound thread shares its seat, so an addition may be lost, which is harmless.
        let number = questions.load(Ordering::Relaxed).wrapping_add(1);
        questions.store(number, Ordering::Relaxed);
        number.is_multiple_of(QUESTIONS)
    }

    /// Checks whether the latest grace period has passed and records the result. If it was already
    /// known to have passed, begins another.
    #[cold]
    fn look_at_seats(&self) -> bool {
        let now = self.clock.now.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let is_known = self.clock.passed.load(Ordering::Relaxed) >= now;
        let time = if is_known { self.advance_clock() } else { now };
        let has_passed = !self.is_any_inside_since(time);
        if has_passed {
            self.clock.passed.fetch_max(time, Ordering::AcqRel);
        }
        has_passed
    }

    fn is_any_inside_since(&self, time: u64) -> bool {
        self.seats.iter().any(|seat| seat.is_inside_since(time))
    }
}

impl Seat {
    /// The seat has one thread, so no addition is lost.
    #[cfg(feature = "measure")]
    #[inline]
    fn add_work(&self, entries: u64) -> u64 {
        let work = self.work.load(Ordering::Relaxed) + entries;
        self.work.store(work, Ordering::Relaxed);
        work
    }

    /// Counts a read section before it is announced, so no other CPU waits for a thread that panics
    /// here.
    #[cfg(feature = "measure")]
    #[inline]
    fn count_section(&self) {
        let (work, most) = (self.add_work(1), self.most_work.load(Ordering::Relaxed));
        if work > most && most > 0 {
            // Panics only once, since unwinding enters read sections too.
            self.most_work.store(0, Ordering::Relaxed);
            panic!("a call looked at more than {most} entries");
        }
    }

    /// Whether the thread is in a section that it entered before `time`.
    #[inline]
    fn is_inside_since(&self, time: u64) -> bool {
        // Acquire: the reads of the section come before all later steps.
        let section = self.section.load(Ordering::Acquire);
        section != OUTSIDE && section < time
    }
}

/// Announces that a section was entered at `time`, before any later load of this thread.
#[inline]
fn announce(section: &AtomicU64, inside: u64) {
    if cfg!(target_arch = "x86_64") {
        // A locked exchange keeps later loads after it, and costs half of what a fence does.
        section.swap(inside, Ordering::SeqCst);
        compiler_fence(Ordering::SeqCst);
    } else {
        // Release, like the exchange: a thread that sees this section sees the reads of the
        // previous one.
        section.store(inside, Ordering::Release);
        fence(Ordering::SeqCst);
    }
}

/// One round of spinning.
pub(crate) fn relax() {
    let spun = SPUN.get().wrapping_add(1);
    SPUN.set(spun);
    if spun.is_multiple_of(SPINS) {
        thread::yield_now();
    } else {
        hint::spin_loop();
    }
}

/// This thread owns the seat while the guard lives.
pub(crate) struct Occupied<'a> {
    seat: &'a Seat,
    cpu: Cpu,
    taken: bool,
}

impl Occupied<'_> {
    pub(crate) fn cpu(&self) -> Cpu {
        self.cpu
    }
}

impl Drop for Occupied<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.taken {
            self.seat.owner.store(NOBODY, Ordering::Release);
        }
    }
}

/// Keeps the calling thread on a CPU of a machine.
#[must_use = "the thread leaves the CPU when this is dropped"]
#[derive(Debug)]
pub struct OnCpu<'a> {
    seats: &'a Seats,
    cpu: Cpu,
    /// The thread was not on the CPU before.
    moved: bool,
    /// Threads cannot pass their guards to each other.
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for OnCpu<'_> {
    fn drop(&mut self) {
        let mine = (self.seats.machine, self.cpu);
        BINDINGS.with_borrow_mut(|bindings| {
            if let Some(last) = bindings.iter().rposition(|binding| *binding == mine) {
                bindings.remove(last);
            }
        });
        if self.moved {
            self.seats.clock.bound.fetch_sub(1, Ordering::Relaxed);
            let seat = self.seats.seat(self.cpu);
            if seat.depth.swap(0, Ordering::Relaxed) > 0 {
                // A synchronizing thread must not wait for one that has ended.
                seat.section.store(OUTSIDE, Ordering::Release);
                seat.owner.store(NOBODY, Ordering::Release);
                let mistake = !thread::panicking();
                assert!(!mistake, "a thread left CPU {} inside a read section", self.cpu.0);
            }
            seat.owner.store(NOBODY, Ordering::Release);
        }
        // The next use looks up the binding again.
        HERE.set(Here { machine: 0, cpu: Cpu(0), bound: false });
    }
}
