//! The hosted machine with a gate before its invalidations of kernel mappings. The gate holds the
//! caller at a chosen invalidation while other CPUs make their calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread;

use bindery::addr::Frame;
use bindery::platform::Invalidation;
use bindery::{FrameRange, Memory, Platform};
use bindery_hosted::{Config, Contents, Machine, Walk, pass_on};

use crate::support::waiting::{self, TellingLock};

/// A gate that stops an invalidation once.
#[derive(Default)]
pub struct Gate {
    armed: AtomicBool,
    stopped: AtomicBool,
    opened: AtomicBool,
}

impl Gate {
    /// Stops the next invalidation until the gate opens.
    pub fn arm(&self) {
        self.stopped.store(false, SeqCst);
        self.opened.store(false, SeqCst);
        self.armed.store(true, SeqCst);
    }

    /// Waits until the gate has stopped an invalidation.
    pub fn wait(&self) {
        while !self.stopped.load(SeqCst) {
            thread::yield_now();
        }
    }

    /// The caller may continue.
    pub fn open(&self) {
        self.opened.store(true, SeqCst);
    }

    /// Opens the gate at its drop, also during a panic.
    pub fn opens_at_last(&self) -> impl Drop + '_ {
        Opens(self)
    }

    /// Whether the gate holds its caller.
    pub fn is_shut(&self) -> bool {
        !self.opened.load(SeqCst)
    }

    fn pass(&self) {
        if self.armed.swap(false, SeqCst) {
            self.stopped.store(true, SeqCst);
            while self.is_shut() {
                thread::yield_now();
            }
        }
    }
}

struct Opens<'g>(&'g Gate);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

#[derive(Clone)]
pub struct Interposed<A: Walk> {
    pub machine: Machine<A>,
    pub gate: Arc<Gate>,
}

/// A machine of two CPUs with a gate.
pub fn interposed<A: Walk>() -> (Interposed<A>, Memory<Interposed<A>>) {
    let machine = Machine::new(Config {
        memory: 32 << 20,
        contents: Contents::Anything,
        cpus: 2,
        ..Config::default()
    });
    let (first, count) = machine.frames();
    let platform = Interposed { machine, gate: Arc::default() };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(platform.clone(), &[FrameRange { first, count }]) }.unwrap();
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    (platform, memory)
}

// SAFETY: every method forwards to the hosted machine, which meets the obligations; a delayed
// invalidation is still complete when the call returns.
unsafe impl<A: Walk> Platform for Interposed<A> {
    type Arch = A;
    type Mutex = TellingLock;
    type SpinLock = TellingLock;

    pass_on! { machine:
        direct_map zero copy invalidate invalidate_local publish_entries cpu unpark enter_read leave_read grace_period is_over seed fatal_signal
        allocation_may_wait might_sleep frames_released
    }

    fn relax(&self) {
        waiting::relaxes();
        self.machine.relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        if word.load(SeqCst) == expected {
            waiting::sleeps();
        }
        self.machine.park(word, expected);
    }

    fn synchronize(&self) {
        waiting::sleeps();
        self.machine.synchronize();
    }

    fn invalidate_kernel(&self, root: Frame, what: &Invalidation) {
        self.gate.pass();
        self.machine.invalidate_kernel(root, what);
    }
}
