//! Several address spaces and their children use more memory than the machine has, on several CPUs:
//! all pages survive swap unchanged.
//!
//! Each CPU has an address space whose contents it tracks page by page, and children that it forks.
//! All CPUs swap pages of all spaces out and in, and reclaim. With `BINDERY_DEEPER` the test takes
//! minutes.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, FaultError, Memory, PinTime, Remap, SwapArea, SwapOperation,
};
use bindery_hosted::{Config, Machine, Program, SwapFile, SwapService, Walk};

use crate::support::objects::Chance;
use crate::support::{GIB, MIB, audit, fixed, memory_with, options, use_order};

const CPUS: u16 = 3;
const PAGE: u64 = 4096;
/// Pages of each address space: together with the children, more than the machine has.
const PAGES: u64 = 1024;
const MEMORY: u64 = 16 * MIB;
const SLOTS: u64 = 64 * MIB / PAGE;
/// The two addresses between which the mapping moves.
const PLACES: [u64; 2] = [GIB, 2 * GIB + 5 * PAGE];
const STEPS: u64 = 3_000;
/// The number of steps on a device that takes as long for each page as a thread's sleep.
const STEPS_ON_DEVICE: u64 = 150;

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

/// An address space, and the contents of its pages.
struct Known<'s, 'm, A: Walk> {
    space: &'s Space<'m, A>,
    contents: Vec<u64>,
    at: u64,
    /// A device that sometimes fails.
    device: Option<&'static SwapFile>,
}

impl<A: Walk> Known<'_, '_, A> {
    fn page(&self, page: u64) -> VirtAddr {
        VirtAddr(self.at + page * PAGE)
    }

    /// Loads a page. Without memory, or after an error of the device, its content is unknown.
    #[track_caller]
    fn verify(&self, machine: &Machine<A>, page: u64) {
        let at = self.page(page);
        match Program::new(machine, self.space).load(at) {
            Ok(found) => assert_eq!(found, self.contents[page as usize], "page {page} at {at:?}"),
            Err(error) => {
                let failed = self.device.is_some() && error == FaultError::Bus;
                assert!(failed || error == FaultError::OutOfMemory, "page {page}: {error:?}");
            }
        }
    }

    fn store(&mut self, machine: &Machine<A>, page: u64, value: u64) {
        let program = Program::new(machine, self.space);
        if program.store(self.page(page), value).is_ok() {
            self.contents[page as usize] = value;
        }
    }

    /// Fills a page with incompressible data.
    fn scramble(&mut self, chance: &mut Chance, page: u64) {
        let bytes: Vec<u8> = (0..PAGE).map(|_| chance.below(256) as u8).collect();
        let first = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
        if self.space.write_user(self.page(page), &bytes).is_ok() {
            self.contents[page as usize] = first;
        }
    }
}

struct Runner<'a, 'm, A: Walk> {
    machine: &'a Machine<A>,
    all: &'a [Space<'m, A>],
    own: Known<'a, 'm, A>,
    area: SwapArea,
    chance: Chance,
}

impl<A: Walk> Runner<'_, '_, A> {
    fn range(&mut self) -> (u64, u64) {
        let first = self.chance.below(PAGES);
        let longest = self.chance.one_of(&[4, 64, PAGES]);
        (first, self.chance.below(longest.min(PAGES - first)) + 1)
    }

    fn run(&mut self, step: u64) {
        match self.chance.below(16) {
            0..=4 => self.touch(step),
            5 | 6 => self.page_out(),
            7 => self.forget(),
            8 => self.fork(step),
            9 => self.move_away(),
            10 => self.bring_back(),
            11 => self.own.scramble(&mut self.chance, step % PAGES),
            12 => drop(self.own.space.memory().reclaim(64)),
            13 => self.pin(),
            _ => self.look(),
        }
    }

    fn touch(&mut self, step: u64) {
        let (first, count) = self.range();
        for page in first..first + count.min(128) {
            self.own.store(self.machine, page, step << 16 | page);
        }
    }

    fn look(&mut self) {
        let (first, count) = self.range();
        for page in first..first + count.min(128) {
            self.own.verify(self.machine, page);
        }
    }

    /// Swaps out pages of another thread, whose mapping may be at either address.
    fn page_out(&mut self) {
        let (first, count) = self.range();
        let space = &self.all[self.chance.below(self.all.len() as u64) as usize];
        let advice = self.chance.one_of(&[Advice::PageOut, Advice::PageOut, Advice::Cold]);
        for place in PLACES {
            let _ = space.madvise(VirtAddr(place + first * PAGE), count * PAGE, advice);
        }
    }

    fn forget(&mut self) {
        let (first, count) = self.range();
        if self.own.space.discard(self.own.page(first), count * PAGE).is_ok() {
            self.own.contents[first as usize..(first + count) as usize].fill(0);
        }
    }

    fn move_away(&mut self) {
        let to = if self.own.at == PLACES[0] { PLACES[1] } else { PLACES[0] };
        let (at, size) = (VirtAddr(self.own.at), PAGES * PAGE);
        if self.own.space.mremap(at, size, size, Remap::To(VirtAddr(to))).is_ok() {
            self.own.at = to;
        }
    }

    /// Performs a part of `swapoff`, for any space.
    fn bring_back(&mut self) {
        if self.chance.below(8) == 0 {
            let memory = self.own.space.memory();
            memory.stop_swapping_to(&self.area);
            let space = &self.all[self.chance.below(self.all.len() as u64) as usize];
            let _ = space.swap_in_area(&self.area);
            memory.resume_swapping_to(&self.area);
        }
    }

    fn pin(&mut self) {
        let page = self.chance.below(PAGES);
        let access = self.chance.one_of(&[Access::Read, Access::Write]);
        let pinned = self.own.space.pin(self.own.page(page), 1, access, PinTime::Short);
        self.page_out();
        drop(pinned);
        self.own.verify(self.machine, page);
    }

    /// A child writes to its pages, and pages are swapped out on both sides: neither sees the
    /// other's writes.
    fn fork(&mut self, step: u64) {
        let Ok(space) = self.own.space.fork() else { return };
        let mut child = Known { space: &space, contents: self.own.contents.clone(), ..self.own };
        for round in 0..4 {
            let (first, count) = self.range();
            for page in (first..first + count).step_by(3) {
                child.store(self.machine, page, step << 16 | page | 1 << 60);
            }
            let _ = space.madvise(child.page(first), count * PAGE, Advice::PageOut);
            if round == 1 {
                self.touch(step);
            }
            self.page_out();
            let (first, count) = self.range();
            for page in first..first + count.min(128) {
                child.verify(self.machine, page);
                self.own.verify(self.machine, page);
            }
            if self.chance.below(4) == 0 && space.discard(child.page(first), count * PAGE).is_ok() {
                child.contents[first as usize..(first + count) as usize].fill(0);
            }
        }
        if self.chance.below(4) == 0 {
            let grandchild = space.fork();
            for page in 0..PAGES {
                child.verify(self.machine, page);
            }
            drop(grandchild);
        }
    }
}

/// A slow device of two threads, which completes requests in any order and sometimes fails.
fn bad_device(seed: u64, stable: bool) -> &'static SwapFile {
    let service = SwapService::Shuffled(seed, Duration::from_micros(20));
    let device = SwapFile::new(SLOTS, service).unwrap();
    let device = if stable { device } else { device.without_stable_pages() };
    let device: &SwapFile = Box::leak(Box::new(device));
    let served = AtomicU64::new(0);
    device.fail(move |request| {
        let every = if request.operation() == SwapOperation::Read { 31 } else { 7 };
        served.fetch_add(1, Relaxed) % every == every - 1
    });
    device
}

/// Runs the work while two threads serve the device, if any.
fn served<A: Walk>(
    device: Option<&'static SwapFile>,
    memory: &Memory<Machine<A>>,
    work: impl FnOnce(),
) {
    let Some(device) = device else { return work() };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| device.serve(memory));
        }
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            work();
            memory.wait_for_swap_writes().unwrap();
        }));
        // Stops the device before the scope waits for the threads.
        device.stop();
        result.unwrap_or_else(|problem| panic::resume_unwind(problem));
    });
}

fn soak<A: Walk>(seed: u64, order: u8, device: Option<&'static SwapFile>) {
    let config = Config { memory: MEMORY, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_order(&memory, order);
    let free = memory.free_frame_count();
    let area = match device {
        Some(device) => memory.swap_on_device(device, 0),
        None => memory.swap_on(SLOTS, 0),
    };
    let area = area.unwrap();
    {
        let spaces: Vec<_> =
            (0..CPUS).map(|_| AddressSpace::new(&memory, options()).unwrap()).collect();
        for space in &spaces {
            space.mmap(&fixed(PLACES[0], PAGES * PAGE)).unwrap();
        }
        let run = |cpu: u16| {
            let (space, contents) = (&spaces[usize::from(cpu)], vec![0; PAGES as usize]);
            let own = Known { space, contents, at: PLACES[0], device };
            let chance = Chance::new(seed * 7919 + u64::from(cpu) * 104_729, (0, 1));
            let mut runner = Runner { machine: &machine, all: &spaces, own, area, chance };
            let steps = if device.is_some() { STEPS_ON_DEVICE } else { STEPS };
            machine.on_cpu(Cpu(cpu), || (1..steps).for_each(|step| runner.run(step)));
            runner.own
        };
        served(device, &memory, || {
            let known: Vec<_> = thread::scope(|scope| {
                let cpus: Vec<_> = (0..CPUS).map(|cpu| scope.spawn(move || run(cpu))).collect();
                cpus.into_iter().map(|cpu| cpu.join().unwrap()).collect()
            });
            if let Some(device) = device {
                assert!(device.counts().failed > 0, "{:?}", device.counts());
                device.fail(|_| false);
            }
            for mut known in known {
                known.device = None;
                (0..PAGES).for_each(|page| known.verify(&machine, page));
            }
        });
        let spaces: Vec<_> = spaces.iter().collect();
        audit(&machine, &memory, &spaces);
    }
    audit(&machine, &memory, &[]);
    assert_eq!(memory.swap_areas().next().map(|area| area.taken), Some(0), "slots have leaked");
    memory.swap_off(&area).unwrap();
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

#[test]
fn contents_survive_swap_whatever_all_cpus_do() {
    let deeper = std::env::var_os("BINDERY_DEEPER").is_some();
    // Each folio size runs on each machine.
    for seed in 1..if deeper { 100 } else { 16 } {
        let order = [0, 4, 9][seed as usize % 3];
        match seed % 5 {
            0 | 1 => soak::<AArch64>(seed, order, None),
            2 => soak::<Riscv64<3>>(seed, order, None),
            _ => soak::<X86_64<4>>(seed, order, None),
        }
    }
}

fn soak_on_devices(stable: bool) {
    let deeper = std::env::var_os("BINDERY_DEEPER").is_some();
    // Each folio size runs on each machine.
    for seed in 1..if deeper { 60 } else { 10 } {
        let order = [4, 0, 9][seed as usize % 3];
        let device = Some(bad_device(seed, stable));
        match seed / 3 % 3 {
            0 => soak::<AArch64>(seed, order, device),
            1 => soak::<Riscv64<3>>(seed, order, device),
            _ => soak::<X86_64<4>>(seed, order, device),
        }
    }
}

#[test]
fn contents_survive_a_slow_and_failing_device() {
    soak_on_devices(true);
}

/// Write faults reuse pages while the device writes them.
#[test]
fn contents_survive_a_device_that_bears_changes() {
    soak_on_devices(false);
}
