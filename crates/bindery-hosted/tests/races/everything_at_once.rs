//! All operations at once, from several CPUs on the same mappings and the same object. No result is
//! predictable, but all invariants hold, and nothing is left.
//!
//! Every run is different. With `BINDERY_DEEPER` a run takes minutes.

use std::thread;

use bindery::addr::{Order, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, CollapseLimits, FileAccess, LockPages, MapFlags, MapObject,
    MapRequest, Object, PinTime, Pinned, Protection, Remap, Sharing, SwapArea, SyncFlags,
};
use bindery_hosted::{Config, Machine, MemoryFiles, Program, Walk};
use bindery_linux::proc::{self, ClearRefs, Unnamed};

use crate::support::objects::{Chance, PAGE, memfd, use_object_order};
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options, use_order};

const AT: u64 = GIB;
const SPAN: u64 = 16 * MIB;
const OBJECT: u64 = 4 * MIB;
const CPUS: u16 = 4;
/// Steps of each CPU with one seed.
const STEPS: u64 = 2_000;

/// A range of pages: small, large, or of whole tables.
fn range(chance: &mut Chance) -> (VirtAddr, u64) {
    let pages = chance.one_of(&[16, OBJECT / PAGE]);
    let (at, length) = (chance.page(), (chance.below(pages) + 1) * PAGE);
    if chance.below(4) == 0 {
        return (at.align_down(2 * MIB), length.next_multiple_of(2 * MIB));
    }
    (at, length)
}

/// The state of one CPU.
struct Runner<'a, 'm, A: Walk> {
    machine: &'a Machine<A>,
    space: &'a AddressSpace<'m, Machine<A>>,
    object: &'a Object<'m, Machine<A>>,
    area: SwapArea,
    chance: Chance,
    pins: Vec<Pinned<'m, Machine<A>>>,
    children: Vec<AddressSpace<'m, Machine<A>>>,
}

impl<A: Walk> Runner<'_, '_, A> {
    /// Performs an operation. Most operations fail for some reason, which is acceptable.
    fn run(&mut self) {
        match self.chance.below(10) {
            0 => self.family(),
            1 => self.object(),
            2 | 3 => self.touch(),
            4 => self.look(),
            5 => self.advise(),
            6 => self.pin(),
            _ => self.map(),
        }
    }

    /// The index of the address space or, sometimes, of a child.
    fn one_space(&mut self) -> usize {
        if self.chance.below(3) > 0 {
            return usize::MAX;
        }
        self.chance.below(self.children.len() as u64 + 1) as usize
    }

    fn map(&mut self) {
        let one = self.one_space();
        let space = self.children.get(one).unwrap_or(self.space);
        let chance = &mut self.chance;
        let (at, length) = range(chance);
        match chance.below(12) {
            0..=2 => {
                let sharing = chance.one_of(&[Sharing::Shared, Sharing::Private]);
                let request = MapRequest { sharing, ..fixed(at.0, length) };
                let offset = chance.below(OBJECT / PAGE) * PAGE;
                let access = FileAccess::READ | FileAccess::WRITE;
                let source = MapObject { object: self.object, offset, access };
                let _ = space.mmap_object(&request, &source);
            }
            3 => {
                let flags = chance.one_of(&[MapFlags::empty(), MapFlags::GROWS_DOWN]);
                let _ = space.mmap(&MapRequest { flags, ..fixed(at.0, length) });
            }
            4 => {
                let _ = space.munmap(at, length);
            }
            5 | 6 => {
                let all = [Protection::empty(), Protection::READ, READ_WRITE];
                let _ = space.mprotect(at, length, chance.one_of(&all));
            }
            7 => {
                let to = chance.page();
                let remap = chance.one_of(&[Remap::To(to), Remap::LeaveTo(to)]);
                let _ = space.mremap(at, length, length, remap);
            }
            8 => {
                let more = length + chance.below(64) * PAGE;
                let _ = space.mremap(at, length, more, Remap::MayMove);
            }
            9 => {
                let less = (chance.below(64) + 1) * PAGE;
                let _ = space.mremap(at, length, less, Remap::To(chance.page()));
            }
            10 => {
                let _ = space.mremap(at, 0, length, Remap::To(chance.page()));
            }
            _ => {
                let _ = space.mlock(at, length, LockPages::Now);
                let _ = space.munlock(at, length);
            }
        }
    }

    fn advise(&mut self) {
        let one = self.one_space();
        let space = self.children.get(one).unwrap_or(self.space);
        let (at, length) = range(&mut self.chance);
        let advice = self.chance.one_of(&[
            Advice::DontNeed,
            Advice::Free,
            Advice::Cold,
            Advice::PageOut,
            Advice::PageOut,
            Advice::GuardInstall,
            Advice::GuardRemove,
            Advice::Collapse,
            Advice::Remove,
            Advice::PopulateRead,
            Advice::PopulateWrite,
            Advice::WipeOnFork,
            Advice::KeepOnFork,
            Advice::Huge,
            Advice::NoHuge,
        ]);
        let _ = space.madvise(at, length, advice);
        let _ = space.collapse_some(at, 1, &CollapseLimits::default());
        let _ = space.split_folio(at, Order::PAGE);
        let _ = space.join_leaves(at);
        self.swap();
    }

    fn swap(&mut self) {
        let one = self.one_space();
        let space = self.children.get(one).unwrap_or(self.space);
        let memory = space.memory();
        match self.chance.below(8) {
            0 => {
                memory.stop_swapping_to(&self.area);
                let _ = space.swap_in_area(&self.area);
                let _ = memory.swap_in_objects(&self.area);
                memory.resume_swapping_to(&self.area);
            }
            1 => drop(memory.reclaim(16)),
            _ => {}
        }
    }

    fn family(&mut self) {
        if self.children.len() < 3 && self.chance.below(2) == 0 {
            self.children.extend(self.space.fork());
        } else if !self.children.is_empty() {
            let one = self.chance.below(self.children.len() as u64) as usize;
            self.children.swap_remove(one);
        }
    }

    fn object(&mut self) {
        let chance = &mut self.chance;
        let _ = match chance.below(4) {
            0 => self.object.set_size(chance.below(2 * OBJECT)),
            1 => self.object.punch_hole(chance.below(OBJECT), chance.below(OBJECT / 2) + 1),
            2 => self.object.sync(0, u64::MAX),
            _ => self.object.write(chance.below(OBJECT), &[7; 5000]).map(|_| ()),
        };
    }

    fn touch(&mut self) {
        let one = self.one_space();
        let space = self.children.get(one).unwrap_or(self.space);
        let program = Program::new(self.machine, space);
        for number in 0..16 {
            let at = self.chance.page();
            let _ = match self.chance.below(2) {
                0 => program.store(at, number),
                _ => program.load(at).map(|_| ()),
            };
        }
        let _ = space.write_user(self.chance.page(), &[1; 9000]);
    }

    fn look(&mut self) {
        let one = self.one_space();
        let space = self.children.get(one).unwrap_or(self.space);
        let (at, length) = range(&mut self.chance);
        let _ = space.mincore(at, length, |_, _| ());
        let _ = space.msync(at, length, SyncFlags::SYNC);
        match self.chance.below(8) {
            0 => {
                let _ = proc::smaps(space, &Unnamed, &mut String::new());
            }
            1 => {
                let _ = proc::clear_refs(space, ClearRefs::SoftDirty);
            }
            _ => {
                let _ = proc::pagemap(space, at.0 / PAGE, Default::default(), &mut [0; 64]);
            }
        }
    }

    fn pin(&mut self) {
        let chance = &mut self.chance;
        if self.pins.len() > 8 || chance.below(3) == 0 && !self.pins.is_empty() {
            let one = chance.below(self.pins.len() as u64) as usize;
            self.pins.swap_remove(one);
            return;
        }
        let access = chance.one_of(&[Access::Read, Access::Write]);
        let time = chance.one_of(&[PinTime::Short, PinTime::Long]);
        self.pins.extend(self.space.pin(chance.page(), 4, access, time));
    }
}

/// The source of the mapped content.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backed {
    ByMemory,
    ByFile,
}

fn scenario<A: Walk>(seed: u64, backed: Backed, order: u8, bytes: u64) {
    let files = MemoryFiles::new();
    let config = Config { memory: bytes, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_object_order(&memory, order);
    use_order(&memory, order);
    memory.set_huge_zero_page(true);
    let area = memory.swap_on(64 * MIB / PAGE, 0).unwrap();
    {
        let object = match backed {
            Backed::ByMemory => memfd(&memory, OBJECT),
            Backed::ByFile => memory.file(&files, 1, OBJECT).unwrap(),
        };
        let space = AddressSpace::new(&memory, options()).unwrap();
        thread::scope(|scope| {
            for cpu in 0..CPUS {
                let (machine, space, object) = (&machine, &space, &object);
                scope.spawn(move || {
                    machine.on_cpu(Cpu(cpu), || {
                        let chance =
                            Chance::new((seed + 1) * 7919 + u64::from(cpu) * 104_729, (AT, SPAN));
                        let (pins, children) = (Vec::new(), Vec::new());
                        let mut runner =
                            Runner { machine, space, object, area, chance, pins, children };
                        for _ in 0..STEPS {
                            runner.run();
                        }
                    });
                });
            }
        });
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.swap_off(&area).expect("slots have leaked");
    memory.trim();
    assert_eq!(memory.commitment().committed(), 0, "seed {seed}");
}

#[test]
fn invariants_hold_whatever_all_cpus_do() {
    let deeper = std::env::var_os("BINDERY_DEEPER").is_some();
    for seed in 0..if deeper { 400 } else { 12 } {
        let backed = if seed % 2 == 0 { Backed::ByMemory } else { Backed::ByFile };
        let order = [0, 4, 9][seed as usize % 3];
        // With little memory, many operations stop partway.
        let bytes = if seed % 4 < 2 { 256 * MIB } else { 24 * MIB };
        match seed % 5 {
            0 | 1 => scenario::<AArch64>(seed, backed, order, bytes),
            2 => scenario::<Riscv64<3>>(seed, backed, order, bytes),
            _ => scenario::<X86_64<4>>(seed, backed, order, bytes),
        }
    }
}
