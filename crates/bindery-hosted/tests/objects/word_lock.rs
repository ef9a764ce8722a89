//! A machine whose mutexes have words for tasks.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use bindery::addr::Frame;
use bindery::arch::X86_64;
use bindery::platform::{Cpu, Platform};
use bindery::sync::RawLock;
use bindery::{FrameRange, Memory, ParkedOn};
use bindery_hosted::{Config, Machine, pass_on};

use crate::support::MIB;

pub type A = X86_64<4>;

/// A mutex with a word, on which the test does not sleep.
pub struct WordLock(AtomicU32);

/// More tries than a holder takes that is not the test.
const MOST_TRIES: u32 = 1 << 24;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WANTED: u32 = 2;

// SAFETY: 1. the exchange lets one caller in until `unlock`; its orderings are acquire and release.
// 2. Nothing panics.
unsafe impl RawLock for WordLock {
    type State = ();

    const UNLOCKED: Self = Self(AtomicU32::new(FREE));

    fn lock(&self) {
        for _ in 0..MOST_TRIES {
            if self.try_lock().is_some() {
                return;
            }
            thread::yield_now();
        }
        // A lock must not unwind, and nothing would wake the thread.
        eprintln!("a thread sleeps for a mutex that this test holds");
        std::process::abort();
    }

    fn try_lock(&self) -> Option<()> {
        self.0.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).ok().map(drop)
    }

    fn parked_on(&self) -> Option<(&AtomicU32, u32)> {
        let _ = self.0.compare_exchange(TAKEN, WANTED, Ordering::Relaxed, Ordering::Relaxed);
        Some((&self.0, WANTED))
    }

    unsafe fn unlock(&self, (): ()) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// A machine whose mutexes have words. A thread can be held where it has zeroed a frame, and before it
/// enters a read section.
#[derive(Debug)]
pub struct WithWords {
    machine: Machine<A>,
    holds_next: AtomicBool,
    holds_next_section: AtomicBool,
    is_held: AtomicBool,
}

impl WithWords {
    /// Holds the thread that zeroes the next frame.
    pub fn hold_next_zero(&self) {
        self.holds_next.store(true, Ordering::Release);
    }

    /// Holds the thread that enters the next read section.
    pub fn hold_next_section(&self) {
        self.holds_next_section.store(true, Ordering::Release);
    }

    /// Runs `work` on the CPU.
    pub fn on_cpu<R>(&self, cpu: Cpu, work: impl FnOnce() -> R) -> R {
        self.machine.on_cpu(cpu, work)
    }

    fn hold_if(&self, next: &AtomicBool) {
        if next.swap(false, Ordering::AcqRel) {
            self.is_held.store(true, Ordering::Release);
            while self.is_held.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }
    }

    pub fn wait_until_held(&self) {
        while !self.is_held.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }

    pub fn release(&self) {
        self.is_held.store(false, Ordering::Release);
    }
}

// SAFETY: every method forwards to the machine, which meets the obligations.
unsafe impl Platform for WithWords {
    type Arch = A;
    type Mutex = WordLock;
    type SpinLock = <Machine<A> as Platform>::SpinLock;

    pass_on! { machine:
        direct_map copy invalidate invalidate_local invalidate_kernel publish_entries cpu relax
        park unpark leave_read synchronize grace_period is_over seed fatal_signal
        allocation_may_wait frames_released
    }

    fn zero(&self, first: Frame, count: u32) {
        self.machine.zero(first, count);
        self.hold_if(&self.holds_next);
    }

    fn enter_read(&self) {
        self.hold_if(&self.holds_next_section);
        self.machine.enter_read();
    }
}

pub fn memory_with_words() -> Memory<WithWords> {
    let machine = Machine::<A>::new(Config { memory: 32 * MIB, cpus: 2, ..Config::default() });
    let (first, count) = machine.frames();
    let platform = WithWords {
        machine,
        holds_next: false.into(),
        holds_next_section: false.into(),
        is_held: false.into(),
    };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    unsafe { Memory::new(platform, &[FrameRange { first, count }]) }.unwrap()
}

/// The word of a wait that is over, or of one that is still borrowed.
pub struct Word(*const AtomicU32, u32);

impl Word {
    pub fn of(on: ParkedOn<'_>) -> Self {
        Self(std::ptr::from_ref(on.word()), on.expected())
    }

    /// Whether the word has changed.
    ///
    /// # Safety
    /// 1. The word lives.
    pub unsafe fn has_changed(&self) -> bool {
        // SAFETY: the caller's obligation 1.
        unsafe { &*self.0 }.load(Ordering::Acquire) != self.1
    }
}
