//! A thread in a read section never waits for a thread that has yet to be scheduled.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::{Cpu, Platform};
use bindery::sync::{LockApi05, RawLock};
use bindery::{
    Access, AddressSpace, FileAccess, FrameRange, MapObject, MapRequest, Memory, Place, Sharing,
};
use bindery_hosted::{Config, Machine, MemoryFiles, pass_on};
use bindery_linux::proc::{self, Unnamed};

use crate::support::kernel::Finished;
use crate::support::{GIB, MIB, READ_WRITE, options};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// The number of spins on either side that ends the test, since the two sides have then contended
/// often enough.
const MEETINGS: u64 = 1_000;
/// The maximum number of rounds.
const MOST_ROUNDS: u64 = 200_000;

thread_local! {
    /// The nesting of this thread's read sections.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// A spin lock that is held for a long time, so that waiters contend.
struct Slow(LockApi05<parking_lot::RawMutex>);

// SAFETY: the inner lock meets the contract.
unsafe impl RawLock for Slow {
    const UNLOCKED: Self = Self(LockApi05::UNLOCKED);
    type State = <LockApi05<parking_lot::RawMutex> as RawLock>::State;

    fn lock(&self) -> Self::State {
        thread::yield_now();
        self.0.lock()
    }

    fn try_lock(&self) -> Option<Self::State> {
        self.0.try_lock()
    }

    unsafe fn unlock(&self, state: Self::State) {
        // SAFETY: 1. and 2. are the caller's promises.
        unsafe { self.0.unlock(state) };
    }
}

/// A machine that records how its callers wait.
struct Watching {
    machine: Machine<X86_64<4>>,
    /// The number of waits for a scheduler inside read sections.
    wrong: AtomicU64,
    spins: AtomicU64,
}

// SAFETY: the inner machine meets the contract, and `Slow` is a lock.
unsafe impl Platform for Watching {
    type Arch = X86_64<4>;
    type Mutex = LockApi05<parking_lot::RawMutex>;
    type SpinLock = Slow;

    pass_on! { machine:
        direct_map zero copy invalidate invalidate_local invalidate_kernel publish_entries cpu unpark
        grace_period is_over seed fatal_signal allocation_may_wait might_sleep frames_released
    }

    fn relax(&self) {
        self.spins.fetch_add(1, Relaxed);
        self.machine.relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        self.wrong.fetch_add(u64::from(INSIDE.get() > 0), Relaxed);
        self.machine.park(word, expected);
    }

    fn enter_read(&self) {
        self.machine.enter_read();
        INSIDE.set(INSIDE.get() + 1);
    }

    fn leave_read(&self) {
        INSIDE.set(INSIDE.get() - 1);
        self.machine.leave_read();
    }

    fn synchronize(&self) {
        assert_eq!(INSIDE.get(), 0, "nobody waits for the end of their own section");
        self.machine.synchronize();
    }
}

#[test]
fn look_ups_during_changes_of_an_object_spin() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let machine = Machine::<X86_64<4>>::new(config);
    let (first, count) = machine.frames();
    let watching =
        Watching { machine: machine.clone(), wrong: AtomicU64::new(0), spins: AtomicU64::new(0) };
    let files = MemoryFiles::new();
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(watching, &[FrameRange { first, count }]) }.unwrap();
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    let file = memory.file(&files, 1, 4 * MIB).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let request = MapRequest {
        length: 4 * MIB,
        protection: READ_WRITE,
        place: Place::Fixed(VirtAddr(AT)),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object: &file, offset: 0, access }).unwrap();
    // For mapped clean pages, only the file records whether they were written.
    for page in 0..16 {
        space.fault(VirtAddr(AT + page * PAGE), Access::Read).unwrap();
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _finished = Finished(&over);
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                while !over.load(Relaxed) {
                    file.write(3 * MIB, &[1; 64]).unwrap();
                    file.punch_hole(3 * MIB, PAGE).unwrap();
                }
            });
        });
        machine.on_cpu(Cpu(0), || {
            let spins = || memory.platform().spins.load(Relaxed);
            for _ in 0..MOST_ROUNDS {
                if spins() > MEETINGS {
                    break;
                }
                space.mincore(VirtAddr(AT), 4 * MIB, |_, _| ()).unwrap();
                proc::smaps(&space, &Unnamed, &mut String::new()).unwrap();
            }
        });
    });
    let watching = memory.platform();
    assert!(watching.spins.load(Relaxed) > 0, "nobody has met anybody");
    assert_eq!(watching.wrong.load(Relaxed), 0, "somebody has slept in a read section");
}
