//! The hosted machine, extended to record how its callers wait for readers.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use bindery::platform::{GracePeriod, Platform};
use bindery::sync::{LockApi05, RawLock};
use bindery::{FrameRange, Memory, Overcommit};
use bindery_hosted::{Config, Contents, Machine, Walk, pass_on};

thread_local! {
    /// The number of mutexes and spin locks that this thread holds.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// A lock that is counted in `HELD` while it is held.
pub struct Counted(LockApi05<parking_lot::RawMutex>);

// SAFETY: the inner lock meets the contract.
unsafe impl RawLock for Counted {
    const UNLOCKED: Self = Self(LockApi05::UNLOCKED);
    type State = <LockApi05<parking_lot::RawMutex> as RawLock>::State;

    fn lock(&self) -> Self::State {
        let guard = self.0.lock();
        HELD.set(HELD.get() + 1);
        guard
    }

    fn try_lock(&self) -> Option<Self::State> {
        let guard = self.0.try_lock()?;
        HELD.set(HELD.get() + 1);
        Some(guard)
    }

    unsafe fn unlock(&self, state: Self::State) {
        HELD.set(HELD.get() - 1);
        // SAFETY: 1. and 2. are the caller's promises.
        unsafe { self.0.unlock(state) };
    }
}

type Hook = Box<dyn FnMut() + Send>;

pub struct Watched<A: Walk> {
    pub machine: Machine<A>,
    /// The number of waits for readers.
    pub waits: AtomicU64,
    /// Whether the machine reports completed grace periods.
    pub tells: AtomicBool,
    /// Called before each wait.
    pub before_waiting: Mutex<Option<Hook>>,
}

impl<A: Walk> Watched<A> {
    pub fn waits(&self) -> u64 {
        self.waits.load(Relaxed)
    }

    /// Stops the machine's reports of completed grace periods.
    pub fn tell_nothing(&self) {
        self.tells.store(false, Relaxed);
    }

    /// Resumes the machine's reports.
    pub fn tell(&self) {
        self.tells.store(true, Relaxed);
    }

    pub fn before_waiting(&self, hook: impl FnMut() + Send + 'static) {
        *self.before_waiting.lock().unwrap() = Some(Box::new(hook));
    }
}

/// A watched machine of three CPUs.
pub fn watched<A: Walk>(bytes: u64) -> (Machine<A>, Memory<Watched<A>>) {
    let machine = Machine::<A>::new(Config {
        memory: bytes,
        contents: Contents::Anything,
        cpus: 3,
        ..Config::default()
    });
    let (first, count) = machine.frames();
    let watched = Watched {
        machine: machine.clone(),
        waits: AtomicU64::new(0),
        tells: AtomicBool::new(true),
        before_waiting: Mutex::new(None),
    };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(watched, &[FrameRange { first, count }]) }.unwrap();
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    (machine, memory)
}

// SAFETY: the inner machine meets the contract, and `Counted` is a lock. It is always valid to
// report that no grace period has ended.
unsafe impl<A: Walk> Platform for Watched<A> {
    type Arch = A;
    type Mutex = Counted;
    type SpinLock = Counted;

    pass_on! { machine:
        direct_map zero copy invalidate invalidate_local invalidate_kernel publish_entries cpu relax
        park unpark enter_read leave_read grace_period seed fatal_signal allocation_may_wait
        might_sleep frames_released
    }

    fn synchronize(&self) {
        assert_eq!(HELD.get(), 0, "somebody waits for readers with a lock held");
        self.waits.fetch_add(1, Relaxed);
        if let Some(hook) = self.before_waiting.lock().unwrap().as_mut() {
            hook();
        }
        // The machine panics if this runs inside a read section.
        self.machine.synchronize();
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        let over = self.machine.is_over(period);
        over && self.tells.load(Relaxed)
    }
}
