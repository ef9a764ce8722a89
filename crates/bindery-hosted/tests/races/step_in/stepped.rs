//! The hosted machine with a step before each operation on locks, sections and TLBs.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, GracePeriod, Invalidation, Platform};
use bindery::sync::{LockApi05, RawLock};
use bindery::{FrameRange, Memory, Overcommit, Pager, PagerError, ReadBuffer, StoredBytes};
use bindery_hosted::{Config, Contents, Machine, MemoryFiles, TlbKind, Walk, pass_on};

use super::stops::{self, Step};

/// A machine whose calls can be held.
pub struct Stepped<A: Walk>(Machine<A>, Readers);

/// Whether the machine reports when read sections are over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Readers {
    /// The machine reports completed sections, so unlinked items are freed at once if no reader is
    /// inside.
    Told,
    /// The machine never reports completed sections, so all unlinked items wait.
    NotTold,
}

/// The free frames that each CPU keeps for itself, also where the machine has little memory.
const KEPT_FRAMES: u32 = 32;

/// A strict machine of four CPUs, all online, with the core on it.
pub fn stepped<A: Walk>(bytes: u64, readers: Readers) -> (Machine<A>, Memory<Stepped<A>>) {
    let config = Config {
        memory: bytes,
        contents: Contents::Anything,
        cpus: 4,
        tlb: TlbKind::Strict,
        ..Config::default()
    };
    let machine = Machine::<A>::new(config);
    let (first, count) = machine.frames();
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory =
        unsafe { Memory::new(Stepped(machine.clone(), readers), &[FrameRange { first, count }]) }
            .unwrap();
    (0..machine.cpus()).for_each(|cpu| memory.cpu_online(Cpu(cpu)).unwrap());
    memory.set_front_limit(KEPT_FRAMES);
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    (machine, memory)
}

/// Files in memory. A call can be held in the pager, after a read or before a store.
#[derive(Default)]
pub struct SteppedFiles(MemoryFiles);

impl Pager for SteppedFiles {
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        self.0.read(file, first_page, into)?;
        stops::pass(Step::Pager);
        Ok(())
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        stops::pass(Step::Pager);
        self.0.write(file, first_page, from)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        stops::pass(Step::Pager);
        self.0.resize(file, size)
    }

    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        stops::pass(Step::Pager);
        self.0.discard(file, first_page, pages)
    }

    fn removed(&self, file: u64) {
        self.0.removed(file);
    }
}

/// A lock that reports when a thread has to wait for it. A call can be held while it holds a mutex
/// and before it acquires a spin lock, but not while it holds one.
pub struct SteppedLock<const MUTEX: bool>(LockApi05<parking_lot::RawMutex>);

type State = <LockApi05<parking_lot::RawMutex> as RawLock>::State;

// SAFETY: the lock is parking_lot's, and no other code accesses it. A call that is held after the
// unlock has already released the lock.
unsafe impl<const MUTEX: bool> RawLock for SteppedLock<MUTEX> {
    const UNLOCKED: Self = Self(LockApi05::UNLOCKED);

    type State = State;

    fn lock(&self) -> State {
        if MUTEX {
            stops::might_sleep();
        } else {
            stops::takes_spin_lock(ptr::from_ref(self).addr());
        }
        self.0.try_lock().unwrap_or_else(|| {
            if MUTEX {
                stops::blocks_at_mutex();
            } else {
                stops::blocks();
            }
            self.0.lock()
        })
    }

    fn try_lock(&self) -> Option<State> {
        self.0.try_lock()
    }

    unsafe fn unlock(&self, state: State) {
        // SAFETY: 1. and 2. are the caller's promises.
        unsafe { self.0.unlock(state) };
        if MUTEX {
            stops::pass(Step::MutexUnlocked);
        }
    }
}

// SAFETY: each call is forwarded to the hosted machine, which meets the contract. A held call only
// takes longer; it never returns earlier.
unsafe impl<A: Walk> Platform for Stepped<A> {
    type Arch = A;
    type Mutex = SteppedLock<true>;
    type SpinLock = SteppedLock<false>;

    pass_on! { 0:
        direct_map zero copy invalidate_local invalidate_kernel publish_entries cpu unpark
        grace_period seed fatal_signal allocation_may_wait frames_released largest_shown_leaf
    }

    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        stops::pass(Step::Invalidate);
        self.0.invalidate(root, cpus, what);
    }

    fn might_sleep(&self) {
        stops::might_sleep();
        self.0.might_sleep();
    }

    fn relax(&self) {
        stops::relaxes();
        self.0.relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        stops::might_sleep();
        stops::parks(|| word.load(Ordering::Acquire) == expected);
        self.0.park(word, expected);
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

    fn is_over(&self, period: GracePeriod) -> bool {
        self.0.is_over(period) && self.1 == Readers::Told
    }

    fn table_unlocked(&self) {
        stops::pass(Step::TableUnlocked);
    }
}
