//! Calls of several CPUs on overlapping ranges of one address space, with contents verified.
//!
//! ```text
//! page of a block   0      1      2      3      4        5        6        7
//!                   common common common common of CPU 0 of CPU 1 of CPU 2 common
//! ```
//!
//! All CPUs store to common pages, and drop, unmap and map them again. A value in a page names the
//! page, so a value of any other page is an error. Only its CPU stores to an own page, and all
//! other calls keep the content. So the CPU knows the content exactly, although calls of all CPUs
//! change the entries, the VMAs and the tables of the page all the time.

use std::collections::HashMap;

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::{
    Access, AddressSpace, Advice, Inspection, LockPages, PinTime, Protection, Remap, SyncFlags,
};
use bindery_hosted::{Config, Machine, Program, Walk};
use bindery_linux::proc::{self, ClearRefs};

use super::on_cpus;
use crate::support::objects::Chance;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options, use_order};

const CPUS: u16 = 3;
const BLOCK: u64 = 8;
const BLOCKS: u64 = 160;
const PAGES: u64 = BLOCK * BLOCKS;
/// The distance to the place where own pages stay for a moment.
const AWAY: u64 = 64 * MIB;
const STEPS: u64 = 4_000;

const fn at(page: u64) -> VirtAddr {
    VirtAddr(GIB + page * PAGE_SIZE)
}

const fn own_page(block: u64, cpu: u16) -> u64 {
    block * BLOCK + 4 + cpu as u64
}

/// A value that names its page.
fn stamp(page: u64, number: u64) -> u64 {
    (page + 1) << 32 | number
}

struct Worker<'a, 'm, A: Walk> {
    cpu: u16,
    machine: &'a Machine<A>,
    space: &'a AddressSpace<'m, Machine<A>>,
    chance: Chance,
    /// The content of the own pages that were stored to.
    own: HashMap<u64, u64>,
    seen: u64,
}

impl<'m, A: Walk> Worker<'_, 'm, A> {
    fn program(&self) -> Program<'_, 'm, A> {
        Program::new(self.machine, self.space)
    }

    fn step(&mut self, number: u64) {
        let chance = &mut self.chance;
        let (block, page) = (chance.below(BLOCKS), chance.below(PAGES));
        let pages = chance.below(PAGES - page).min(chance.below(600)) + 1;
        let (range, length) = (at(page), pages * PAGE_SIZE);
        let space = self.space;
        match chance.below(16) {
            0..=3 => self.store_own(block, number),
            4 | 5 => self.check_own(block),
            6 => self.use_common(block, number),
            7 => {
                // Content of common pages only.
                let common = at(block * BLOCK + self.chance.below(4));
                let advice = self.chance.one_of(&[Advice::DontNeed, Advice::Free]);
                let _ = space.madvise(common, PAGE_SIZE, advice);
            }
            8 => {
                let common = at(block * BLOCK);
                let _ = space.munmap(common, 4 * PAGE_SIZE);
                let _ = space.mmap(&fixed(common.0, 4 * PAGE_SIZE));
            }
            9 => {
                let protection =
                    chance.one_of(&[Protection::empty(), Protection::READ, READ_WRITE]);
                let _ = space.mprotect(range, length, protection);
                let _ = space.mprotect(range, length, READ_WRITE);
            }
            10 => {
                let advice = chance.one_of(&[Advice::PageOut, Advice::Cold, Advice::Collapse]);
                let _ = space.madvise(range, length, advice);
            }
            11 => {
                let _ = space.memory().reclaim(32);
                let _ = space.split_folio(range, Order::PAGE);
            }
            12 => self.look_at_a_child(block),
            13 => self.move_away(block),
            14 => {
                let _ = space.mlock(range, length.min(16 * PAGE_SIZE), LockPages::Now);
                let _ = space.munlock(range, length);
                let _ = space.pin(range, 4, Access::Write, PinTime::Long);
            }
            _ => {
                let _ = space.msync(range, length, SyncFlags::SYNC);
                let _ = proc::clear_refs(space, ClearRefs::SoftDirty);
            }
        }
    }

    fn store_own(&mut self, block: u64, number: u64) {
        let page = own_page(block, self.cpu);
        let value = stamp(page, number);
        // Another CPU may have taken the permission for a moment, or moved the page.
        if self.program().store(at(page), value).is_ok() {
            self.own.insert(page, value);
        }
    }

    fn check_own(&mut self, block: u64) {
        let page = own_page(block, self.cpu);
        let expected = self.own.get(&page).copied().unwrap_or(0);
        if let Ok(value) = self.program().load(at(page)) {
            assert_eq!(value, expected, "page {page} of CPU {}", self.cpu);
            self.seen += 1;
        }
    }

    fn use_common(&mut self, block: u64, number: u64) {
        let page = block * BLOCK + self.chance.below(4);
        let _ = self.program().store(at(page), stamp(page, number));
        if let Ok(value) = self.program().load(at(page)) {
            assert!(value == 0 || value >> 32 == page + 1, "page {page} has {value:#x}");
            self.seen += 1;
        }
    }

    /// A child has the content of the moment of the fork, whatever other CPUs do to the parent.
    fn look_at_a_child(&mut self, block: u64) {
        let Ok(child) = self.space.fork() else { return };
        let program = Program::new(self.machine, &child);
        for block in block..BLOCKS.min(block + 8) {
            let page = own_page(block, self.cpu);
            let expected = self.own.get(&page).copied().unwrap_or(0);
            if let Ok(value) = program.load(at(page)) {
                assert_eq!(value, expected, "page {page} of the child");
                self.seen += 1;
            }
        }
    }

    /// Moves the own page to another table and back. No other call maps anything there.
    fn move_away(&mut self, block: u64) {
        let from = at(own_page(block, self.cpu));
        let to = VirtAddr(from.0 + AWAY);
        let moved = self.space.mremap(from, PAGE_SIZE, PAGE_SIZE, Remap::To(to));
        if moved.is_ok() {
            self.space.mremap(to, PAGE_SIZE, PAGE_SIZE, Remap::To(from)).unwrap();
        }
    }
}

/// The frame of a page, if the page is mapped.
fn frame<A: Walk>(space: &AddressSpace<'_, Machine<A>>, at: VirtAddr) -> Option<Frame> {
    match space.inspect(at) {
        Inspection::Page { frame, .. } => Some(frame),
        Inspection::Empty | Inspection::Absent(_) => None,
    }
}

/// The pages in the range of the test that are mapped, except for the zero page.
fn resident<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> u64 {
    let unused = at(2 * PAGES);
    space.mmap(&fixed(unused.0, PAGE_SIZE)).unwrap();
    space.fault(unused, Access::Read).unwrap();
    let zero = frame(space, unused);
    space.munmap(unused, PAGE_SIZE).unwrap();
    let is_resident = |page: &u64| {
        let frame = frame(space, at(*page));
        frame.is_some() && frame != zero
    };
    (0..PAGES).filter(is_resident).count() as u64
}

fn contents<A: Walk>(seed: u64, order: u8) {
    let config = Config { memory: 24 * MIB, cpus: CPUS, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_order(&memory, order);
    let area = memory.swap_on(32 * MIB / PAGE_SIZE, 0).unwrap();
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(GIB, PAGES * PAGE_SIZE)).unwrap();
        let owned = on_cpus(&machine, CPUS, |cpu| {
            let seed = (seed + 1) * 7919 + u64::from(cpu) * 104_729;
            let chance = Chance::new(seed, (GIB, PAGES * PAGE_SIZE));
            let own = HashMap::new();
            let mut worker = Worker { cpu, machine: &machine, space: &space, chance, own, seen: 0 };
            (1..=STEPS).for_each(|number| worker.step(number));
            assert!(worker.seen > 0, "no content was seen");
            worker.own
        });
        audit(&machine, &memory, &[&space]);
        // The system is quiet: the counts of `/proc` are those of the entries.
        let anonymous = space.resident().anonymous;
        assert_eq!(anonymous, resident(&space));
        space.mprotect(at(0), PAGES * PAGE_SIZE, READ_WRITE).unwrap();
        let program = Program::new(&machine, &space);
        for (page, value) in owned.into_iter().flatten() {
            assert_eq!(program.load(at(page)), Ok(value), "page {page} at the end");
        }
        audit(&machine, &memory, &[&space]);
    }
    memory.swap_off(&area).unwrap();
    audit(&machine, &memory, &[]);
}

#[test]
fn no_page_has_foreign_content_on_x86_64() {
    (0..2).for_each(|seed| contents::<X86_64<4>>(seed, 0));
}

#[test]
fn folios_have_no_foreign_content_on_x86_64() {
    (0..2).for_each(|seed| contents::<X86_64<4>>(seed, 4));
}

#[test]
fn no_page_has_foreign_content_on_aarch64() {
    (0..2).for_each(|seed| contents::<AArch64>(seed, 4));
}

#[test]
fn no_page_has_foreign_content_on_riscv64() {
    (0..2).for_each(|seed| contents::<Riscv64<3>>(seed, 4));
}
