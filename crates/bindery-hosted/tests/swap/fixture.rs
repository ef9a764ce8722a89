//! A fixture with a swap area. After the scenario the area is empty, and nothing has leaked.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::Absent;
use bindery::{AddressSpace, Advice, Inspection, Memory, SwapArea, SwapDevice};
use bindery_hosted::{Config, Machine, Program, SwapFile, SwapService, Walk};

use crate::support::{MIB, audit, fixed, memory_with, options, use_order};

/// The parts available to a scenario.
pub struct Swapping<'s, 'm, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub space: &'s AddressSpace<'m, Machine<A>>,
    pub program: Program<'s, 'm, A>,
    pub area: SwapArea,
}

/// Runs `scenario` with an address space on a machine with folios of 2^`order` pages and `slots`
/// slots.
#[track_caller]
pub fn with_swap<A: Walk>(order: u8, slots: u64, scenario: impl FnOnce(&Swapping<'_, '_, A>)) {
    with_little_memory(64 * MIB, order, slots, scenario);
}

/// As [`with_swap`], on a machine of this size.
#[track_caller]
pub fn with_little_memory<A: Walk>(
    bytes: u64,
    order: u8,
    slots: u64,
    scenario: impl FnOnce(&Swapping<'_, '_, A>),
) {
    let turn_on = |memory: &Memory<_>| memory.swap_on(slots, 0).expect("a swap area");
    with_area(bytes, order, turn_on, scenario);
}

/// As [`with_little_memory`], with the slots on a device whose requests the scenario completes,
/// with its own threads or one by one. At the end, all pending requests are completed. Faults read
/// nothing around the needed pages, unless the scenario enables it.
#[track_caller]
pub fn with_device<A: Walk>(
    bytes: u64,
    order: u8,
    device: &'static SwapFile,
    scenario: impl FnOnce(&Swapping<'_, '_, A>),
) {
    let turn_on = |memory: &Memory<_>| memory.swap_on_device(device, 0).expect("a swap area");
    with_area(bytes, order, turn_on, |swapping| {
        swapping.memory.set_page_cluster(0);
        scenario(swapping);
        while device.serve_one(swapping.memory) {}
        swapping.memory.wait_for_swap_writes().unwrap();
    });
    let needs_stable = SwapDevice::<Machine<A>>::needs_stable_pages(device);
    let stable = !needs_stable || device.counts().unstable == 0;
    assert!(stable, "pages changed while the device wrote them");
}

/// A device that is never freed, as the core requires.
pub fn device(slots: u64, service: SwapService) -> &'static SwapFile {
    Box::leak(Box::new(SwapFile::new(slots, service).expect("a temporary file")))
}

/// As [`with_little_memory`], with the area that `turn_on` adds.
#[track_caller]
pub fn with_area<A: Walk>(
    bytes: u64,
    order: u8,
    turn_on: impl FnOnce(&Memory<Machine<A>>) -> SwapArea,
    scenario: impl FnOnce(&Swapping<'_, '_, A>),
) {
    let (machine, memory) =
        memory_with::<A>(Config { memory: bytes, cpus: 3, ..Config::default() });
    use_order(&memory, order);
    let free = memory.free_frame_count();
    let area = turn_on(&memory);
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let program = Program::new(&machine, &space);
        let swapping =
            Swapping { machine: &machine, memory: &memory, space: &space, program, area };
        scenario(&swapping);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    assert_eq!(memory.swap_areas().next().map(|area| area.taken), Some(0), "slots have leaked");
    memory.swap_off(&area).expect("nothing is in it");
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

struct StopAtEnd<'a>(&'a SwapFile);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl<A: Walk> Swapping<'_, '_, A> {
    /// Writes a distinct value to every page.
    pub fn fill(&self, at: u64, pages: u64) {
        for page in 0..pages {
            self.program.store(VirtAddr(at + page * 4096), at + page).unwrap();
        }
    }

    /// Whether the pages hold what [`Swapping::fill`] wrote at `from`.
    #[track_caller]
    pub fn assert_filled(&self, at: u64, pages: u64, from: u64) {
        for page in 0..pages {
            let there = self.program.load(VirtAddr(at + page * 4096));
            assert_eq!(there, Ok(from + page), "page {page} at {at:#x}");
        }
    }

    /// Maps memory there.
    pub fn map(&self, at: u64, pages: u64) {
        self.space.mmap(&fixed(at, pages * 4096)).unwrap();
    }

    /// Sends pages to swap.
    pub fn page_out(&self, at: u64, pages: u64) {
        self.space.madvise(VirtAddr(at), pages * 4096, Advice::PageOut).unwrap();
    }

    /// Runs `work` while two threads serve the device.
    pub fn served<R>(&self, device: &SwapFile, work: impl FnOnce() -> R) -> R {
        device.start();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| device.serve(self.memory));
            }
            // Stops the device even if a test fails, because a scope waits for its threads.
            let _stop = StopAtEnd(device);
            let result = work();
            self.memory.wait_for_swap_writes().unwrap();
            result
        })
    }

    /// The number of allocated slots.
    pub fn taken(&self) -> u64 {
        self.memory.swap_areas().map(|area| area.taken).sum()
    }

    /// The number of the pages that are in swap.
    pub fn swapped(&self, at: u64, pages: u64) -> u64 {
        let is_out = |page: &u64| {
            let at = VirtAddr(at + page * 4096);
            matches!(self.space.inspect(at), Inspection::Absent(Absent::Swap { .. }))
        };
        (0..pages).filter(is_out).count() as u64
    }
}
