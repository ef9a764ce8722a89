//! Shared memory that several address spaces map, on several CPUs, with less memory than its size:
//! all pages survive swap unchanged.
//!
//! Each CPU has an address space and tracks the content of its own pages of the object, which are
//! every third page. It writes and reads these pages through any mapping or by calls, and punches
//! holes in them. All CPUs swap pages out, reclaim, and turn the area off. The object's end moves
//! up and down behind the pages.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, AddressSpace, Advice, Error, FaultError, Object, PinTime, Sealing, Sharing,
    SwapArea,
};
use bindery_hosted::{Config, Machine, Program, Walk};

use crate::support::objects::{Chance, use_object_order};
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit, memory_with, options, use_order};

const CPUS: u16 = 3;
const PAGE: u64 = 4096;
/// Pages that are never truncated, 1.5 times the machine's memory.
const PAGES: u64 = 3 * MEMORY / 2 / PAGE;
/// Pages behind these, which are truncated and return.
const TAIL: u64 = 64;
const MEMORY: u64 = 8 * MIB;
const SLOTS: u64 = 32 * MIB / PAGE;
const AT: u64 = GIB;
/// A private mapping, whose copies do not change.
const PRIVATE: u64 = 2 * GIB;
const STEPS: u64 = 600;

struct Runner<'a, 'm, A: Walk> {
    machine: &'a Machine<A>,
    spaces: &'a [AddressSpace<'m, Machine<A>>],
    object: &'a Object<'m, Machine<A>>,
    area: SwapArea,
    cpu: u64,
    /// The content of the CPU's own pages and of the copies in its space.
    contents: Vec<u64>,
    copies: Vec<Option<u64>>,
    chance: Chance,
}

impl<'m, A: Walk> Runner<'_, 'm, A> {
    fn own_page(&mut self) -> u64 {
        let pages = PAGES / u64::from(CPUS);
        // The ranges are close together, so that they share folios.
        let first = self.chance.one_of(&[0, pages / 2, pages - 40]);
        let number = if self.chance.below(3) == 0 {
            self.chance.below(pages)
        } else {
            first + self.chance.below(40)
        };
        number * u64::from(CPUS) + self.cpu
    }

    fn any_space(&mut self) -> &AddressSpace<'m, Machine<A>> {
        &self.spaces[self.chance.below(CPUS.into()) as usize]
    }

    fn run(&mut self, step: u64) {
        match self.chance.below(20) {
            0..=4 => (0..16).for_each(|n| self.store(step << 16 | n)),
            5..=8 => (0..16).for_each(|_| self.load()),
            9 => self.write(step),
            10 => self.read(),
            11..=13 => self.page_out(),
            14 => drop(self.object_memory().reclaim(64)),
            15 => self.punch(),
            16 => self.copy(step),
            17 => self.pin(),
            18 => self.resize(),
            _ => self.turn_off(),
        }
    }

    fn object_memory(&self) -> &'m bindery::Memory<Machine<A>> {
        self.spaces[0].memory()
    }

    fn store(&mut self, value: u64) {
        let page = self.own_page();
        let machine = self.machine;
        let stored =
            Program::new(machine, self.any_space()).store(VirtAddr(AT + page * PAGE), value);
        match stored {
            Ok(()) => self.contents[page as usize] = value,
            Err(error) => assert_eq!(error, FaultError::OutOfMemory),
        }
    }

    fn load(&mut self) {
        let page = self.own_page();
        let machine = self.machine;
        let found = Program::new(machine, self.any_space()).load(VirtAddr(AT + page * PAGE));
        assert!(
            found == Ok(self.contents[page as usize]) || found == Err(FaultError::OutOfMemory),
            "page {page}: {found:?}"
        );
        let copy = self.copies[page as usize];
        if let Some(copy) = copy {
            let own = &self.spaces[self.cpu as usize];
            let found = Program::new(machine, own).load(VirtAddr(PRIVATE + page * PAGE));
            assert!(found == Ok(copy) || found == Err(FaultError::OutOfMemory), "copy {page}");
        }
    }

    fn write(&mut self, step: u64) {
        let page = self.own_page();
        let mut bytes: Vec<u8> = (0..PAGE).map(|_| self.chance.below(256) as u8).collect();
        bytes[..8].copy_from_slice(&step.to_ne_bytes());
        let part = self.chance.one_of(&[8, 100, PAGE as usize]);
        match self.object.write(page * PAGE, &bytes[..part]) {
            Ok(written) => assert_eq!(written, part),
            Err(error) => return assert_eq!(error, Error::OutOfMemory),
        }
        self.contents[page as usize] = step;
    }

    fn read(&mut self) {
        let page = self.own_page();
        let mut found = [0; 8];
        match self.object.read(page * PAGE, &mut found) {
            Ok(_) => assert_eq!(u64::from_ne_bytes(found), self.contents[page as usize]),
            Err(error) => assert_eq!(error, Error::OutOfMemory),
        }
    }

    fn page_out(&mut self) {
        let first = self.own_page() & !63;
        let at = self.chance.one_of(&[AT, AT, PRIVATE]);
        let count = self.chance.one_of(&[16, 64, PAGES]).min(PAGES - first);
        let _ =
            self.any_space().madvise(VirtAddr(at + first * PAGE), count * PAGE, Advice::PageOut);
    }

    fn punch(&mut self) {
        let page = self.own_page();
        match self.object.punch_hole(page * PAGE, PAGE) {
            Ok(()) => self.contents[page as usize] = 0,
            Err(error) => assert_eq!(error, Error::OutOfMemory),
        }
    }

    /// Copies a page in the CPU's own space. The first word is either the object's or the stored
    /// one.
    fn copy(&mut self, step: u64) {
        let page = self.own_page();
        let own = &self.spaces[self.cpu as usize];
        let at = VirtAddr(PRIVATE + page * PAGE);
        if Program::new(self.machine, own).store(at, step).is_ok() {
            self.copies[page as usize] = Some(step);
        }
    }

    fn pin(&mut self) {
        let page = self.own_page();
        let at = VirtAddr(AT + page * PAGE);
        let access = self.chance.one_of(&[Access::Read, Access::Write]);
        let own = &self.spaces[self.cpu as usize];
        let pinned = own.pin(at, 1, access, PinTime::Short);
        self.page_out();
        drop(pinned);
        self.load();
    }

    /// Moves the end, sometimes into the middle of a page. No CPU has content there.
    fn resize(&mut self) {
        let end = PAGES * PAGE + self.chance.below(TAIL * PAGE);
        let _ = self.object.set_size(end);
        let page = PAGES + self.chance.below(TAIL);
        let machine = self.machine;
        let _ = Program::new(machine, self.any_space()).store(VirtAddr(AT + page * PAGE), page);
    }

    fn turn_off(&mut self) {
        if self.chance.below(4) != 0 {
            return;
        }
        let memory = self.object_memory();
        memory.stop_swapping_to(&self.area);
        let _ = memory.swap_in_objects(&self.area);
        memory.resume_swapping_to(&self.area);
    }
}

fn race<A: Walk>(seed: u64, order: u8) {
    let config = Config { memory: MEMORY, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_order(&memory, order);
    use_object_order(&memory, order);
    let free = memory.free_frame_count();
    let area = memory.swap_on(SLOTS, 0).unwrap();
    {
        let size = (PAGES + TAIL) * PAGE;
        let object = memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).unwrap();
        let spaces: Vec<_> =
            (0..CPUS).map(|_| AddressSpace::new(&memory, options()).unwrap()).collect();
        for space in &spaces {
            map(space, &object, AT, size, Sharing::Shared).unwrap();
            map(space, &object, PRIVATE, size, Sharing::Private).unwrap();
        }
        thread::scope(|scope| {
            for cpu in 0..CPUS {
                let (machine, spaces, object) = (&machine, &spaces[..], &object);
                scope.spawn(move || {
                    machine.on_cpu(Cpu(cpu), || {
                        let chance = Chance::new(seed * 7919 + u64::from(cpu) * 104_729, (0, 1));
                        let contents = vec![0; PAGES as usize];
                        let copies = vec![None; PAGES as usize];
                        let cpu = u64::from(cpu);
                        let mut runner =
                            Runner { machine, spaces, object, area, cpu, contents, copies, chance };
                        for step in 1..STEPS {
                            runner.run(step);
                        }
                        for page in (cpu..PAGES).step_by(CPUS.into()) {
                            let at = VirtAddr(AT + page * PAGE);
                            let found = Program::new(machine, &spaces[cpu as usize]).load(at);
                            let expected = Ok(runner.contents[page as usize]);
                            assert!(found == expected || found == Err(FaultError::OutOfMemory));
                        }
                    });
                });
            }
        });
        assert!(memory.swap_usage().taken > 0, "nothing went out");
        let spaces: Vec<_> = spaces.iter().collect();
        audit(&machine, &memory, &spaces);
        drop(object);
    }
    audit(&machine, &memory, &[]);
    assert_eq!(memory.swap_areas().next().map(|area| area.taken), Some(0), "slots have leaked");
    memory.swap_off(&area).unwrap();
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

#[test]
fn shared_contents_survive_swap_whatever_all_cpus_do() {
    let deeper = std::env::var_os("BINDERY_DEEPER").is_some();
    for seed in 1..if deeper { 100 } else { 4 } {
        let order = [0, 4, 9][seed as usize % 3];
        match seed % 5 {
            0 | 1 => race::<AArch64>(seed, order),
            2 => race::<Riscv64<3>>(seed, order),
            _ => race::<X86_64<4>>(seed, order),
        }
    }
}
