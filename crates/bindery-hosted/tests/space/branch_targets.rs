//! Branch target identification: the guarded mappings and entries, and the absence of stale entries
//! from TLBs after a change.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Level, Permissions, X86_64};
use bindery::platform::Cpu;
use bindery::{
    AddressSpace, Advice, Error, ExecGain, MapRequest, MappingFlags, Memory, Protection, Remap,
    testing,
};
use bindery_hosted::{Config, Machine, Program, Walk};
use bindery_linux::proc::{self, Unnamed};
use bindery_linux::{self as linux, Call};

use crate::support::{GIB, MIB, audit, fixed, memory_with, options, use_order};

const AT: VirtAddr = VirtAddr(GIB);
const ALL: Protection = Protection::READ.union(Protection::WRITE).union(Protection::EXECUTE);
const CODE: Protection = Protection::READ.union(Protection::EXECUTE);
const GUARDED: Protection = CODE.union(Protection::BTI);

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT.0 + number * PAGE_SIZE)
}

fn machine<A: Walk>(checks: bool) -> (Machine<A>, Memory<Machine<A>>) {
    memory_with(Config { branch_target_identification: checks, ..Config::default() })
}

fn code(pages: u64) -> MapRequest {
    MapRequest { protection: ALL, ..fixed(AT.0, pages * PAGE_SIZE) }
}

fn is_guarded<A: Walk>(
    space: &AddressSpace<'_, Machine<A>>,
    at: VirtAddr,
    level: Level<A>,
) -> bool {
    let entry = testing::raw_entry(space, at, level).unwrap();
    A::attributes(entry).permissions.contains(Permissions::BTI)
}

/// The mappings: the number of pages, and whether they are guarded.
fn mappings<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> Vec<(u64, bool)> {
    let mut found = Vec::new();
    space.for_each_mapping(|mapping| {
        found.push((mapping.range.pages(), mapping.flags.contains(MappingFlags::BTI)));
    });
    found
}

#[test]
fn each_entry_and_tlb_is_guarded() {
    let (machine, memory) = machine::<AArch64>(true);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&code(8)).unwrap();
    let program = Program::new(&machine, &space);
    program.fill(AT, 6 * PAGE_SIZE, 7).unwrap();
    let protect = |first: u64, pages: u64, protection| {
        space.mprotect(page(first), pages * PAGE_SIZE, protection).unwrap();
        audit(&machine, &memory, &[&space]);
    };
    protect(0, 8, CODE);
    (0..6).for_each(|number| program.execute(page(number)).unwrap());
    protect(1, 6, GUARDED);
    assert_eq!(mappings(&space), [(1, false), (6, true), (1, false)]);
    let cached = machine.cached(Cpu(0), space.root());
    assert!(cached.iter().all(|leaf| !leaf.covers(page(1).0)), "guarded pages are read again");
    program.execute(page(6)).unwrap(); // a first touch
    let guarded = [0, 1, 5, 6].map(|number| is_guarded(&space, page(number), Level::PTE));
    assert_eq!(guarded, [false, true, true, true]);
    // Neighbors merge if both or neither are guarded; a request without the flag removes it.
    protect(3, 1, CODE);
    assert_eq!(mappings(&space), [(1, false), (2, true), (1, false), (3, true), (1, false)]);
    assert!(!is_guarded(&space, page(3), Level::PTE));
    protect(3, 1, GUARDED);
    // The flag stays in a mapping without execute permission and applies again when the pages
    // become executable.
    protect(1, 3, Protection::BTI);
    assert!(program.load(page(1)).is_err());
    protect(1, 3, Protection::READ | Protection::BTI);
    assert_eq!(program.load(page(1)), Ok(0x0707_0707_0707_0707));
    assert!(!is_guarded(&space, page(1), Level::PTE), "data");
    protect(1, 3, GUARDED);
    assert!(is_guarded(&space, page(1), Level::PTE));
    (1..7).for_each(|number| program.execute(page(number)).unwrap());
    protect(0, 8, CODE);
    assert_eq!(mappings(&space), [(8, false)]);
    let cached = machine.cached(Cpu(0), space.root());
    assert!(cached.iter().all(|leaf| !leaf.permissions.contains(Permissions::BTI)), "{cached:?}");
}

#[test]
fn forks_moves_and_large_leaves_stay_guarded() {
    let (machine, memory) = machine::<AArch64>(true);
    for order in [4, 9] {
        use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let request = MapRequest { protection: ALL | Protection::BTI, ..fixed(AT.0, 4 * MIB) };
        space.mmap(&request).unwrap();
        let program = Program::new(&machine, &space);
        program.fill(AT, 4 * MIB, 7).unwrap();
        space.mprotect(page(3), PAGE_SIZE, ALL).unwrap();
        assert_eq!(
            [2, 3, 4].map(|number| is_guarded(&space, page(number), Level::PTE)),
            [true, false, true]
        );
        space.mprotect(page(3), PAGE_SIZE, ALL | Protection::BTI).unwrap();
        space.madvise(AT, 2 * MIB, Advice::Collapse).unwrap();
        assert!(is_guarded(&space, AT, Level::PMD));
        let child = space.fork().unwrap();
        assert_eq!(mappings(&child), [(1024, true)]);
        Program::new(&machine, &child).store(page(700), 9).unwrap();
        program.store(page(600), 9).unwrap();
        assert!(
            is_guarded(&child, page(700), Level::PTE) && is_guarded(&space, page(600), Level::PTE)
        );
        audit(&machine, &memory, &[&space, &child]);
        drop(child);
        let to = VirtAddr(8 * GIB);
        space.mremap(AT, 4 * MIB, 6 * MIB, Remap::To(to)).unwrap();
        assert_eq!(mappings(&space), [(1536, true)]);
        program.execute(VirtAddr(to.0 + 5 * MIB)).unwrap();
        assert_eq!(program.load(to), Ok(0x0707_0707_0707_0707));
        audit(&machine, &memory, &[&space]);
    }
}

#[test]
fn the_audit_finds_an_unguarded_page() {
    let (machine, memory) = machine::<AArch64>(true);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&code(1)).unwrap();
    Program::new(&machine, &space).store(AT, 1).unwrap();
    let damage = testing::MappingDamage::Protection(ALL | Protection::BTI);
    testing::damage_mapping(&space, AT, damage);
    let mut scratch = vec![0; bindery::check::scratch_words(&memory)];
    let found = bindery::check::check(&memory, &[&space], &mut scratch);
    assert!(matches!(found, Err(bindery::check::Violation::TooWide(at)) if at == AT), "{found:?}");
}

#[test]
fn code_becomes_guarded_where_none_is_gained() {
    let (_machine, memory) = machine::<AArch64>(true);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.set_exec_gain(ExecGain::Refused).unwrap();
    space.mmap(&MapRequest { protection: CODE, ..code(2) }).unwrap();
    space.mprotect(AT, PAGE_SIZE, GUARDED).unwrap();
    assert_eq!(mappings(&space), [(1, true), (1, false)]);
    space.mprotect(page(1), PAGE_SIZE, Protection::READ).unwrap();
    assert_eq!(space.mprotect(page(1), PAGE_SIZE, GUARDED), Err(Error::AccessDenied));
}

struct Caller<'a, 'm, A: Walk>(&'a AddressSpace<'m, Machine<A>>);

impl<'m, A: Walk> linux::Process<'m, Machine<A>> for Caller<'_, 'm, A> {
    fn space(&self) -> &AddressSpace<'m, Machine<A>> {
        self.0
    }
    fn file(&self, _: i32) -> Option<linux::OpenFile<'m, Machine<A>>> {
        None
    }
    fn process(&self, _: i32) -> Option<&AddressSpace<'m, Machine<A>>> {
        None
    }
}

/// The results of `mmap` and `mprotect` with `PROT_BTI`, and whether smaps shows it.
fn answers<A: Walk>(checks: bool) -> (i64, i64, bool) {
    const PROT_BTI: u64 = 0x10;
    const MAP_FIXED_PRIVATE_ANONYMOUS: u64 = 0x32;
    let (_machine, memory) = machine::<A>(checks);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let flags = MAP_FIXED_PRIVATE_ANONYMOUS;
    let map = [AT.0, 4 * PAGE_SIZE, 5 | PROT_BTI, flags, u64::MAX, 0];
    let mapped = linux::call(&Caller(&space), Call::Mmap, map);
    let protect = [page(1).0, PAGE_SIZE, 5 | PROT_BTI, 0, 0, 0];
    let protected = linux::call(&Caller(&space), Call::Mprotect, protect);
    let mut text = String::new();
    proc::smaps(&space, &Unnamed, &mut text).unwrap();
    (mapped - AT.0 as i64, protected, text.contains(" bt "))
}

#[test]
fn without_checks_mmap_ignores_and_mprotect_refuses() {
    const EINVAL: i64 = -22;
    assert_eq!(answers::<AArch64>(true), (0, 0, true));
    assert_eq!(answers::<AArch64>(false), (0, EINVAL, false));
    assert_eq!(answers::<X86_64>(true), (0, EINVAL, false));
}
