//! A machine that lets a test act where the core calls the platform, in the role of another CPU or
//! of the embedder.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

use bindery::addr::Frame;
use bindery::arch::AArch64;
use bindery::platform::{CpuSet, Invalidation, Platform};
use bindery::{AddressSpace, FrameRange, Memory, Overcommit, SizeMode, check};
use bindery_hosted::{Config, Contents, Machine, pass_on};

/// The points at which a test may act.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Moment {
    /// Before an allocation that may wait.
    Allocation,
    Invalidation,
    /// Between two steps of reclaim.
    Pause,
    /// Before a thread sleeps.
    Sleep,
    /// The embedder is asked for the memory that it keeps.
    Collection,
    /// `Platform::out_of_memory`: a call is about to fail.
    OutOfMemory,
    /// A call asks for a fatal signal.
    Signal,
}

type Act = Box<dyn FnMut() + Send>;

/// The machine that the module describes.
pub struct Interposed {
    machine: Machine<AArch64>,
    acts: Mutex<HashMap<Moment, Act>>,
}

impl Interposed {
    /// Calls `act` at each such moment, except those that occur while it runs.
    pub fn at(&self, moment: Moment, act: impl FnMut() + Send + 'static) {
        self.acts.lock().unwrap().insert(moment, Box::new(act));
    }

    /// Whether an action is registered for that moment.
    fn comes(&self, moment: Moment) -> bool {
        let act = self.acts.lock().unwrap().remove(&moment);
        let Some(mut act) = act else { return false };
        act();
        self.acts.lock().unwrap().insert(moment, act);
        true
    }
}

// SAFETY: every method forwards to the machine, which meets the obligations.
unsafe impl Platform for Interposed {
    type Arch = AArch64;
    type Mutex = <Machine<AArch64> as Platform>::Mutex;
    type SpinLock = <Machine<AArch64> as Platform>::SpinLock;

    pass_on! { machine:
        direct_map zero copy invalidate_local invalidate_kernel publish_entries cpu relax unpark
        enter_read leave_read synchronize grace_period is_over seed frames_released might_sleep
    }

    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        self.comes(Moment::Invalidation);
        self.machine.invalidate(root, cpus, what);
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        self.comes(Moment::Sleep);
        self.machine.park(word, expected);
    }

    fn allocation_may_wait(&self) {
        self.machine.allocation_may_wait();
        self.comes(Moment::Allocation);
    }

    fn fatal_signal(&self) -> bool {
        self.comes(Moment::Signal);
        self.machine.fatal_signal()
    }

    fn yield_if_due(&self) {
        self.comes(Moment::Pause);
    }

    fn collect_memory(&self) {
        self.comes(Moment::Collection);
    }

    /// A test that acts here needs the call to be retried.
    fn out_of_memory(&self) -> bool {
        self.comes(Moment::OutOfMemory)
    }
}

/// An interposed machine with two CPUs, and the core on it.
pub fn interposed(bytes: u64) -> (Machine<AArch64>, Memory<Interposed>) {
    let config =
        Config { memory: bytes, contents: Contents::Anything, cpus: 2, ..Config::default() };
    let machine = Machine::<AArch64>::new(config);
    let (first, count) = machine.frames();
    let platform = Interposed { machine: machine.clone(), acts: Mutex::default() };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(platform, &[FrameRange { first, count }]) }.unwrap();
    memory.folio_policy().set_global(SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    (machine, memory)
}

#[track_caller]
pub fn audit(
    machine: &Machine<AArch64>,
    memory: &Memory<Interposed>,
    space: &AddressSpace<'_, Interposed>,
) {
    machine.assert_clean();
    let mut scratch = vec![0; check::scratch_words(memory)];
    if let Err(violation) = check::check(memory, &[space], &mut scratch) {
        panic!("the audit found: {violation}");
    }
}
