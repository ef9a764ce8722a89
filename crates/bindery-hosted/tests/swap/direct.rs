//! Direct reclaim: the memory that it frees for a failed allocation, the conditions under which it
//! ends, and its calls to the embedder.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use bindery::addr::{Order, VirtAddr};
use bindery::arch::AArch64;
use bindery::{
    Access, Accounting, AddressSpace, Advice, Error, FrameRange, Memory, Object, Sealing,
    SwapDevice, SwapRequest, testing,
};
use bindery_hosted::Machine;

use super::interposed::{Interposed, Moment, audit, interposed};
use crate::support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
/// The address of a call that finds no memory.
const WANTED: VirtAddr = VirtAddr(GIB + GIB / 2);
const PAGE: u64 = 4096;
const BYTES: u64 = 8 * MIB;
/// Frames that are kept for reclaim.
const RESERVE: u64 = 32;
/// Pages of the first round.
const FIRST_ROUND: u64 = 32;
const ROUNDS: u64 = 16;

type Interposing = &'static Memory<Interposed>;
type Space = AddressSpace<'static, Interposed>;

/// The allocations that a test performs in the role of another CPU.
#[derive(Clone)]
struct Others {
    memory: Interposing,
    frames: Arc<Mutex<Vec<FrameRange>>>,
}

impl Others {
    fn new(memory: Interposing) -> Self {
        Self { memory, frames: Arc::default() }
    }

    fn take(&self, frames: u64) {
        for _ in 0..frames {
            self.frames.lock().unwrap().push(self.memory.allocate_frames(Order::PAGE).unwrap());
        }
    }

    fn free(&self, frames: u64) {
        for _ in 0..frames {
            let range = self.frames.lock().unwrap().pop().unwrap();
            // SAFETY: 1. the frame was allocated above; 2. nothing maps or uses it.
            assert!(unsafe { self.memory.free_frames(range) });
        }
    }

    /// Allocates all free frames except `left`.
    fn leave(&self, left: u64) {
        self.take(self.memory.free_frame_count().saturating_sub(left));
    }

    /// Frees a frame and allocates another.
    fn exchange(&self) {
        let taken = self.memory.allocate_frames(Order::PAGE).unwrap();
        self.free(1);
        self.frames.lock().unwrap().push(taken);
    }
}

fn memory() -> Interposing {
    Box::leak(Box::new(interposed(BYTES).1))
}

/// An address space with the tables around [`WANTED`].
fn space(memory: Interposing) -> Space {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(WANTED.0, 2 * PAGE)).unwrap();
    space.fault(VirtAddr(WANTED.0 + PAGE), Access::Write).unwrap();
    space
}

/// A machine with room in swap, and 1,024 cold pages at [`AT`].
fn with_cold_pages() -> (Machine<AArch64>, Interposing, Space) {
    let (machine, memory) = interposed(BYTES);
    let memory: Interposing = Box::leak(Box::new(memory));
    memory.swap_on(4096, 0).unwrap();
    let space = space(memory);
    fill(&space, 1024);
    space.madvise(VirtAddr(AT), 1024 * PAGE, Advice::Cold).unwrap();
    (machine, memory, space)
}

/// Maps `pages` at [`AT`] and writes to each.
fn fill(space: &Space, pages: u64) {
    space.mmap(&fixed(AT, pages * PAGE)).unwrap();
    for page in 0..pages {
        space.write_user(VirtAddr(AT + page * PAGE), &[page as u8; PAGE as usize]).unwrap();
    }
}

/// An object for which a write to the first page fails in the allocation that the test chooses.
fn object(memory: Interposing) -> Object<'static, Interposed> {
    let object = memory.shared_memory(2 * PAGE, Sealing::Allowed, Accounting::PerPage).unwrap();
    object.write(PAGE, &[1]).unwrap();
    object
}

fn out(memory: Interposing) -> u64 {
    memory.events().pages_swapped_out
}

#[test]
fn a_call_lacking_a_frame_has_one_round() {
    let (machine, memory, space) = with_cold_pages();
    let others = Others::new(memory);
    memory.collect();
    others.leave(RESERVE);
    space.fault(WANTED, Access::Write).unwrap();
    assert_eq!(out(memory), FIRST_ROUND);
    audit(&machine, memory, &space);
}

/// Other CPUs take the frames that each round has freed, and leave 20. The call fails nevertheless.
#[test]
fn later_rounds_want_bounded_amounts() {
    const LEFT: u64 = 20;
    let (machine, memory, space) = with_cold_pages();
    let others = Others::new(memory);
    let object = object(memory);
    memory.collect();
    let rounds = Arc::new(Mutex::new(Vec::new()));
    let noted = rounds.clone();
    memory.platform().at(Moment::Allocation, move || {
        noted.lock().unwrap().push(out(memory));
        others.leave(RESERVE + LEFT);
        testing::fail_one_allocation(memory, Some(0));
    });
    assert_eq!(object.write(0, &[1]), Err(Error::OutOfMemory));
    testing::fail_one_allocation(memory, None);
    let rounds = rounds.lock().unwrap();
    let freed: Vec<_> = rounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut expected = vec![2 * LEFT; ROUNDS as usize];
    expected[0] = FIRST_ROUND;
    assert_eq!(freed, expected);
    audit(&machine, memory, &space);
}

/// As above, but with enough frames for rounds that double in size.
#[test]
fn each_round_wants_twice_as_much() {
    let memory = memory();
    memory.swap_on(4096, 0).unwrap();
    let space = space(memory);
    fill(&space, 1024);
    space.madvise(VirtAddr(AT), 1024 * PAGE, Advice::Cold).unwrap();
    let object = object(memory);
    memory.collect();
    let mut attempts = 0;
    let rounds = Arc::new(Mutex::new(Vec::new()));
    let noted = rounds.clone();
    memory.platform().at(Moment::Allocation, move || {
        noted.lock().unwrap().push(out(memory));
        attempts += 1;
        testing::fail_one_allocation(memory, (attempts <= 4).then_some(0));
    });
    object.write(0, &[1]).unwrap();
    assert_eq!(*rounds.lock().unwrap(), [0, 32, 96, 224, 480]);
}

/// A device that completes requests on the test's command. Nothing is read from it.
#[derive(Default)]
struct Slow(Mutex<Vec<SwapRequest>>);

impl Slow {
    fn waiting(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn complete_one(&self, memory: Interposing) {
        let request = self.0.lock().unwrap().pop();
        if let Some(request) = request {
            memory.complete_swap_request(request, Ok(()));
        }
    }
}

impl SwapDevice<Interposed> for Slow {
    fn slots(&self) -> u64 {
        4096
    }

    fn submit(&self, _memory: &Memory<Interposed>, request: SwapRequest) {
        self.0.lock().unwrap().push(request);
    }
}

/// A memory that swaps to such a device, with this number of pages under writeback.
fn with_writes(pages: u64) -> (Interposing, Space, &'static Slow) {
    let (memory, device) = (memory(), &*Box::leak(Box::<Slow>::default()));
    memory.swap_on_device(device, 0).unwrap();
    let space = space(memory);
    space.mmap(&fixed(AT, pages * PAGE)).unwrap();
    for page in 0..pages {
        // Avoids word-filled pages, which would not reach the device.
        space.write_user(VirtAddr(AT + page * PAGE), &[1]).unwrap();
    }
    space.madvise(VirtAddr(AT), pages * PAGE, Advice::PageOut).unwrap();
    assert_eq!(device.waiting(), pages);
    (memory, space, device)
}

/// Another CPU frees the frames that the round needs: no page is evicted, no call waits for a
/// device, and the embedder is not asked.
#[test]
fn a_round_ends_with_another_cpus_frames() {
    let (memory, space, device) = with_writes(16);
    let others = Others::new(memory);
    // These pages were just used, so their first examination frees nothing.
    space.mmap(&fixed(2 * AT, 1024 * PAGE)).unwrap();
    for page in 0..1024 {
        space.write_user(VirtAddr(2 * AT + page * PAGE), &[1]).unwrap();
    }
    memory.collect();
    others.leave(RESERVE);
    let before = out(memory);
    let (asked, paused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    for moment in [Moment::Collection, Moment::OutOfMemory, Moment::Sleep] {
        let asked = asked.clone();
        memory.platform().at(moment, move || {
            asked.fetch_add(1, Relaxed);
            device.complete_one(memory);
        });
    }
    let pauses = paused.clone();
    memory.platform().at(Moment::Pause, move || {
        if pauses.fetch_add(1, Relaxed) == 0 {
            others.free(FIRST_ROUND);
        }
    });
    space.fault(WANTED, Access::Write).unwrap();
    assert_eq!(out(memory), before, "pages went out");
    assert_eq!((paused.load(Relaxed), asked.load(Relaxed)), (1, 0));
    assert_eq!(device.waiting(), 16);
    space.munmap(VirtAddr(AT), 16 * PAGE).unwrap();
    (0..16).for_each(|_| device.complete_one(memory));
    assert_eq!(memory.finish_swap_writes(), 16);
}

/// Each time the search waits, one write completes and another CPU submits a new one.
#[test]
fn a_search_waits_for_its_initial_writes() {
    const WRITES: u64 = 8;
    let (memory, space, device) = with_writes(WRITES);
    let space: &'static Space = Box::leak(Box::new(space));
    let sleeps = Arc::new(AtomicU64::new(0));
    let slept = sleeps.clone();
    memory.platform().at(Moment::Sleep, move || {
        let number = slept.fetch_add(1, Relaxed);
        device.complete_one(memory);
        if number < 8 * WRITES {
            let at = VirtAddr(2 * AT + number * PAGE);
            space.mmap(&fixed(at.0, PAGE)).unwrap();
            space.write_user(at, &[1]).unwrap();
            space.madvise(at, PAGE, Advice::PageOut).unwrap();
        }
    });
    memory.reclaim(u64::MAX);
    let sleeps = sleeps.load(Relaxed);
    // The page next to the needed page is written as well.
    assert!((1..=WRITES + 1).contains(&sleeps), "{sleeps} waits");
}

/// The events of a call whose every attempt finds no memory, when nothing can be reclaimed.
fn order_of_events(with: impl FnOnce(Interposing, &Others)) -> Vec<Moment> {
    let memory = memory();
    let (object, others) = (object(memory), Others::new(memory));
    let log = log(memory);
    others.take(2);
    memory.collect();
    with(memory, &others);
    log.lock().unwrap().clear();
    assert_eq!(object.write(0, &[1]), Err(Error::OutOfMemory));
    testing::fail_one_allocation(memory, None);
    let log = log.lock().unwrap();
    log.clone()
}

/// Makes each attempt fail and records the events.
fn log(memory: Interposing) -> Arc<Mutex<Vec<Moment>>> {
    let log = Arc::new(Mutex::new(Vec::new()));
    for moment in [Moment::Allocation, Moment::Collection, Moment::OutOfMemory] {
        let log = log.clone();
        memory.platform().at(moment, move || {
            log.lock().unwrap().push(moment);
            if moment == Moment::Allocation {
                testing::fail_one_allocation(memory, Some(0));
            }
        });
    }
    log
}

#[test]
fn the_embedder_is_asked_once_for_caches() {
    use Moment::{Allocation, Collection, OutOfMemory};
    let events = order_of_events(|_, _| ());
    assert_eq!(events, [Allocation, Collection, OutOfMemory, Allocation]);
}

/// Between two checks, another CPU frees a frame and a third CPU allocates one. So the call is
/// retried exactly once before `Platform::out_of_memory`.
#[test]
fn another_cpus_frames_allow_one_more_try() {
    use Moment::{Allocation, Collection, OutOfMemory, Pause};
    let events = order_of_events(|memory, others| {
        let others = others.clone();
        memory.platform().at(Pause, move || others.exchange());
    });
    let expected = [Allocation, Collection, Allocation, OutOfMemory, Allocation];
    assert_eq!(events, expected);
}

/// When frames are reserved for faults, writes of file content fail without
/// `Platform::out_of_memory`.
#[test]
fn a_file_write_ends_no_program_with_reserves() {
    use Moment::{Allocation, Collection, OutOfMemory};
    for kept in [0, 1] {
        let memory = memory();
        let object = object(memory);
        memory.collect();
        memory.set_fault_reserve(kept);
        let log = log(memory);
        assert_eq!(object.write(0, &[1]), Err(Error::OutOfMemory));
        testing::fail_one_allocation(memory, None);
        let mut log = log.lock().unwrap().clone();
        log.retain(|moment| *moment != Allocation);
        let told = [Collection, OutOfMemory];
        assert_eq!(log, told[..2 - kept as usize], "{kept} kept");
    }
}
