//! The hosted machine with a step in front of what a call does to locks, sections and TLBs.

use std::ptr::NonNull;

use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, Invalidation, Platform, Wait};
use bindery::{FrameRange, Memory, Overcommit};
use bindery_hosted::{Config, Machine, TlbKind, Walk};
use parking_lot::lock_api::RawMutex;

use super::stops::{self, Step};

/// A machine whose calls can be held.
pub struct Stepped<A: Walk>(Machine<A>);

/// A strict machine of four CPUs, with the core on it.
pub fn stepped<A: Walk>(bytes: u64) -> (Machine<A>, Memory<Stepped<A>>) {
    let config = Config { memory: bytes, cpus: 4, tlb: TlbKind::Strict, ..Config::default() };
    let machine = Machine::<A>::new(config);
    let (first, count) = machine.frames();
    let memory = Memory::new(Stepped(machine.clone()), &[FrameRange { first, count }]).unwrap();
    memory.commitment().set_mode(Overcommit::Always);
    (machine, memory)
}

/// A lock that says when somebody has to wait for it. A call can be held behind a mutex; not behind
/// a spin lock, which is given back where others are held.
pub struct SteppedLock<const MUTEX: bool>(parking_lot::RawMutex);

type Guard = <parking_lot::RawMutex as RawMutex>::Guard;

// SAFETY: the lock is parking_lot's, and nothing else touches it. A call that is held behind it has
// given it back.
unsafe impl<const MUTEX: bool> RawMutex for SteppedLock<MUTEX> {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);

    type Guard = Guard;

    fn lock(&self) -> Guard {
        self.0.try_lock().unwrap_or_else(|| {
            stops::blocks();
            self.0.lock()
        })
    }

    fn try_lock(&self) -> Option<Guard> {
        self.0.try_lock()
    }

    unsafe fn unlock(&self, guard: Guard) {
        // SAFETY: the guard is that of the lock, as the trait demands.
        unsafe { self.0.unlock(guard) };
        if MUTEX {
            stops::pass(Step::MutexUnlocked);
        }
    }

    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

// SAFETY: all is the hosted machine's doing, which keeps the promises. A call that is held takes
// longer for what it does, and returns no earlier.
unsafe impl<A: Walk> Platform for Stepped<A> {
    type Arch = A;
    type Mutex = SteppedLock<true>;
    type SpinLock = SteppedLock<false>;

    fn window(&self, frame: Frame) -> NonNull<u8> {
        self.0.window(frame)
    }

    fn zero(&self, first: Frame, count: u32) {
        self.0.zero(first, count);
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        self.0.copy(from, to, count);
    }

    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        stops::pass(Step::Invalidate);
        self.0.invalidate(root, cpus, what);
    }

    fn invalidate_local(&self, root: Frame, what: &Invalidation) {
        self.0.invalidate_local(root, what);
    }

    fn invalidate_kernel(&self, root: Frame, what: &Invalidation) {
        self.0.invalidate_kernel(root, what);
    }

    fn publish_entries(&self) {
        self.0.publish_entries();
    }

    fn cpu(&self) -> Cpu {
        self.0.cpu()
    }

    fn relax(&self, wait: Wait) {
        stops::relaxes();
        self.0.relax(wait);
    }

    fn enter_read(&self) {
        stops::enters();
        self.0.enter_read();
    }

    fn leave_read(&self) {
        self.0.leave_read();
        stops::left();
    }

    fn synchronize(&self) {
        stops::synchronizes();
        self.0.synchronize();
    }

    fn frames_released(&self, first: Frame, count: u32) {
        self.0.frames_released(first, count);
    }

    fn table_unlocked(&self) {
        stops::pass(Step::TableUnlocked);
    }
}
