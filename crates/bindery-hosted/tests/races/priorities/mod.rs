//! One CPU and strict priorities: only the ready thread with the highest priority runs. A thread
//! that waits for another must sleep, so that the other thread can run; otherwise no thread makes
//! progress.

mod scheduler;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::{Cpu, Platform};
use bindery::{
    Access, AddressSpace, FileAccess, FrameRange, MapObject, MapRequest, Memory, Object,
    Overcommit, Pager, PagerError, Place, Protection, ReadBuffer, Sharing, StoredBytes,
};
use bindery_hosted::{Config, Machine, MemoryFiles, pass_on};

use crate::support::{self, GIB, MIB, READ_WRITE, options};
use scheduler::{End, Lock, Scheduler};

const PAGE: u64 = 4096;
const PAGES: u64 = 16;
/// The thread priorities, in ascending order.
const PRIORITIES: [u32; 6] = [1, 1, 2, 2, 3, 3];
const CALLS: u64 = 60;
/// The average number of steps per call above which the threads count as stuck. A call takes a few
/// hundred.
const STEPS_OF_A_CALL: u64 = 5_000;

/// A machine whose threads a scheduler runs. Without `SLEEP`, its waiters spin.
struct Prioritized<const SLEEP: bool>(Machine<X86_64<4>>);

// SAFETY: every method forwards to the hosted machine, which meets the obligations; both lock types
// are locks.
unsafe impl<const SLEEP: bool> Platform for Prioritized<SLEEP> {
    type Arch = X86_64<4>;
    type Mutex = Lock<true>;
    type SpinLock = Lock<false>;

    pass_on! { 0:
        direct_map zero copy invalidate invalidate_local invalidate_kernel publish_entries cpu
        grace_period is_over seed fatal_signal allocation_may_wait might_sleep frames_released
    }

    fn relax(&self) {
        scheduler::spin();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        let unchanged = || word.load(Ordering::Acquire) == expected;
        if SLEEP {
            scheduler::park(std::ptr::from_ref(word).addr(), unchanged);
            return;
        }
        while unchanged() {
            self.relax();
        }
    }

    fn unpark(&self, word: *const AtomicU32) {
        scheduler::unpark(word.addr());
    }

    fn enter_read(&self) {
        scheduler::enter();
        self.0.enter_read();
    }

    fn leave_read(&self) {
        self.0.leave_read();
        scheduler::leave();
    }

    fn synchronize(&self) {
        scheduler::point();
        self.0.synchronize();
    }
}

/// Files on a slow disk.
struct Disk(MemoryFiles);

impl Pager for Disk {
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        scheduler::sleep(50);
        self.0.read(file, first_page, into)
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        scheduler::sleep(50);
        self.0.write(file, first_page, from)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        scheduler::sleep(5);
        self.0.resize(file, size)
    }

    fn discard(&self, file: u64, first_page: u64, pages: u64) -> Result<(), PagerError> {
        scheduler::sleep(5);
        self.0.discard(file, first_page, pages)
    }

    fn removed(&self, file: u64) {
        self.0.removed(file);
    }
}

/// The state that the threads work on. Never freed, because stuck threads never end.
struct Shared<const SLEEP: bool> {
    machine: Machine<X86_64<4>>,
    space: AddressSpace<'static, Prioritized<SLEEP>>,
    file: Object<'static, Prioritized<SLEEP>>,
}

fn at(page: u64) -> VirtAddr {
    VirtAddr(GIB + page * PAGE)
}

/// Maps the file, shared or private, and anonymous memory behind it.
fn map<const SLEEP: bool>(shared: &Shared<SLEEP>, sharing: Sharing) {
    let request = MapRequest {
        length: PAGES * PAGE,
        protection: READ_WRITE,
        place: Place::Fixed(at(0)),
        sharing,
        ..MapRequest::default()
    };
    let access = FileAccess::READ | FileAccess::WRITE;
    let source = MapObject { object: &shared.file, offset: 0, access };
    let _ = shared.space.mmap_object(&request, &source);
    let _ = shared.space.mmap(&support::fixed(at(PAGES).0, PAGES * PAGE));
}

fn share<const SLEEP: bool>() -> &'static Shared<SLEEP> {
    let cpus = PRIORITIES.len() as u16;
    let machine = Machine::new(Config { memory: 32 * MIB, cpus, ..Config::default() });
    let (first, count) = machine.frames();
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory =
        unsafe { Memory::new(Prioritized(machine.clone()), &[FrameRange { first, count }]) }
            .unwrap();
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    memory.commitment().set_mode(Overcommit::Always);
    let memory: &'static Memory<_> = Box::leak(Box::new(memory));
    let disk: &'static Disk = Box::leak(Box::new(Disk(MemoryFiles::new())));
    let file = memory.file(disk, 1, PAGES * PAGE).unwrap();
    let space = AddressSpace::new(memory, options()).unwrap();
    let shared = Box::leak(Box::new(Shared { machine, space, file }));
    map(shared, Sharing::Shared);
    shared
}

/// One call, selected by `random`. Its result depends on earlier calls of the other threads.
fn call<const SLEEP: bool>(shared: &Shared<SLEEP>, random: u64) {
    let Shared { space, file, .. } = shared;
    let page = random / 16 % (2 * PAGES);
    let length = (1 + random / 512 % 4) * PAGE;
    match random % 16 {
        0..=3 => drop(space.fault(at(page), Access::Write)),
        4..=5 => drop(space.fault(at(page), Access::Read)),
        6 => drop(space.mprotect(at(page), length, Protection::READ)),
        7 => drop(space.mprotect(at(page), length, READ_WRITE)),
        8 => drop(space.munmap(at(page), length)),
        9 => map(shared, if page < PAGES { Sharing::Shared } else { Sharing::Private }),
        10 => drop(space.fork()),
        11 => drop(file.set_size(page % PAGES * PAGE)),
        12 => drop(file.set_size(PAGES * PAGE)),
        13 => drop(file.sync(0, u64::MAX)),
        14 => drop(file.write(page % PAGES * PAGE + 100, &[7; 6000])),
        _ => drop(file.punch_hole(page % PAGES * PAGE, length)),
    }
}

/// Threads of three priorities make calls; each thread sleeps for a while between two calls.
fn run<const SLEEP: bool>(seed: u64) -> End {
    let shared = share::<SLEEP>();
    let limit = PRIORITIES.len() as u64 * CALLS * STEPS_OF_A_CALL;
    let scheduler = Scheduler::new(&PRIORITIES, limit);
    for number in 0..PRIORITIES.len() {
        let scheduler = Arc::clone(&scheduler);
        thread::spawn(move || {
            let _cpu = shared.machine.bind(Cpu(number as u16));
            let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut random = mixed ^ (number as u64 + 1) << 32;
            scheduler.run(number, || {
                for _ in 0..CALLS {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    call(shared, random >> 8);
                    scheduler::sleep(random % 97);
                }
            });
        });
    }
    scheduler.wait()
}

#[test]
fn threads_of_three_priorities_all_end() {
    for seed in 0..20 {
        let end = run::<true>(seed);
        assert!(matches!(end, End::Finished(_)), "seed {seed}: {end:?}");
    }
}

/// Spinning on a thread of lower priority is fatal under this scheduler; the test shows that the
/// calls really contend.
#[test]
fn spinning_waiters_starve_those_they_wait_for() {
    let ends: Vec<End> = (0..20).map(run::<false>).collect();
    let livelocks =
        ends.iter().filter(|end| matches!(end, End::Stuck(why) if why.contains("livelock")));
    assert!(livelocks.count() > 10, "{ends:?}");
}
