//! Incoherent instruction caches: the core synchronizes a folio once, before it becomes executable.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::{
    Access, AddressSpace, FileAccess, MapObject, MapRequest, Memory, PinTime, Place, Protection,
};
use bindery_hosted::{Config, InstructionCache, Machine, MemoryFiles, Program, Violation, Walk};

use crate::support::{MIB, audit, memory_with, options, use_order};

macro_rules! where_fetches_are_not_coherent {
    ($($test:ident => $run:ident;)*) => {
        $(mod $test {
            #[test]
            fn aarch64() { super::$run::<bindery::arch::AArch64>(); }
            #[test]
            fn riscv64() { super::$run::<bindery::arch::Riscv64<4>>(); }
        })*
    };
}

where_fetches_are_not_coherent! {
    a_page_of_a_file_is_synchronized_once => file;
    a_page_written_by_a_call_is_synchronized => written;
    a_copy_on_write_is_synchronized => copy_on_write;
    an_anonymous_page_is_synchronized => anonymous;
    memory_that_becomes_executable_is_synchronized_once => protect;
    memory_that_is_shown_again_is_synchronized => shown;
    a_collapsed_folio_is_synchronized => collapse;
    a_copy_by_fork_is_synchronized => fork;
    the_zero_page_is_synchronized_at_boot => zero_page;
    what_a_debugger_writes_is_synchronized => debugger;
    a_breakpoint_is_synchronized => breakpoint;
}

const AT: VirtAddr = VirtAddr(0x40_0000);
const READ: Protection = Protection::READ;
const WRITE: Protection = Protection::WRITE;
const EXECUTE: Protection = Protection::EXECUTE;
const ALL: Protection = READ.union(WRITE).union(EXECUTE);
/// The address this number of bytes after [`AT`].
fn at(offset: u64) -> VirtAddr {
    VirtAddr(AT.0 + offset)
}

const CODE: [u8; 4] = [0xc0, 0x03, 0x5f, 0xd6];

fn machine<A: Walk>() -> (Machine<A>, Memory<Machine<A>>) {
    let instructions = InstructionCache::Stale;
    memory_with(Config { memory: 32 * MIB, instructions, ..Config::default() })
}

fn request(length: u64, protection: Protection) -> MapRequest {
    MapRequest { length, protection, place: Place::Fixed(AT), ..MapRequest::default() }
}

/// Maps a file of `pages` pages, privately.
fn with_file<A: Walk>(
    pages: u64,
    protection: Protection,
    story: impl for<'m> FnOnce(
        &Machine<A>,
        &AddressSpace<'m, Machine<A>>,
        &bindery::Object<'m, Machine<A>>,
    ),
) {
    let (machine, memory) = machine::<A>();
    let files = MemoryFiles::new();
    files.put(1, &vec![0x5a; (pages * PAGE_SIZE) as usize]);
    {
        let file = memory.file(&files, 1, pages * PAGE_SIZE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let access = FileAccess::READ | FileAccess::WRITE;
        let object = MapObject { object: &file, offset: 0, access };
        space.mmap_object(&request(pages * PAGE_SIZE, protection), &object).unwrap();
        story(&machine, &space, &file);
        audit(&machine, &memory, &[&space]);
    }
}

fn file<A: Walk>() {
    with_file::<A>(4, READ | EXECUTE, |machine, space, _| {
        let program = Program::new(machine, space);
        for page in 0..4 {
            program.execute(at(page * PAGE_SIZE)).unwrap();
        }
        let calls = machine.instruction_synchronizations();
        space.munmap(AT, 4 * PAGE_SIZE).unwrap();
        assert_eq!(machine.instruction_synchronizations(), calls);
    });
    // At the second mapping, the folios are already marked as synchronized.
    with_file::<A>(1, READ | EXECUTE, |machine, space, file| {
        let program = Program::new(machine, space);
        program.execute(AT).unwrap();
        let calls = machine.instruction_synchronizations();
        let object = MapObject { object: file, offset: 0, access: FileAccess::READ };
        space.mmap_object(&request(PAGE_SIZE, READ | EXECUTE), &object).unwrap();
        program.execute(AT).unwrap();
        assert_eq!(machine.instruction_synchronizations(), calls);
    });
}

fn written<A: Walk>() {
    with_file::<A>(1, READ | EXECUTE, |machine, space, file| {
        let program = Program::new(machine, space);
        program.execute(AT).unwrap();
        file.write(0, &CODE).unwrap();
        let object = MapObject { object: file, offset: 0, access: FileAccess::READ };
        space.mmap_object(&request(PAGE_SIZE, READ | EXECUTE), &object).unwrap();
        program.execute(AT).unwrap();
    });
}

fn copy_on_write<A: Walk>() {
    with_file::<A>(1, ALL, |machine, space, _| {
        let program = Program::new(machine, space);
        program.execute(AT).unwrap();
        // The copy is executable at once; the store comes later, to another place.
        program.write(at(64), &CODE).unwrap();
        program.execute(AT).unwrap();
    });
    // A page that two processes share.
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, ALL)).unwrap();
    Program::new(&machine, &space).write(AT, &CODE).unwrap();
    let child = space.fork().unwrap();
    let program = Program::new(&machine, &child);
    program.write(at(64), &CODE).unwrap();
    program.execute(AT).unwrap();
    audit(&machine, &memory, &[&space, &child]);
}

fn anonymous<A: Walk>() {
    for order in [0, 2, 9] {
        let (machine, memory) = machine::<A>();
        use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&request(4 * MIB, ALL)).unwrap();
        let program = Program::new(&machine, &space);
        let calls = machine.instruction_synchronizations();
        program.write(at(64), &CODE).unwrap();
        program.execute(AT).unwrap();
        assert_eq!(machine.instruction_synchronizations(), calls + 1);
        audit(&machine, &memory, &[&space]);
    }
}

fn protect<A: Walk>() {
    for order in [0, 2, 4] {
        let (machine, memory) = machine::<A>();
        use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        let size = 16 * PAGE_SIZE;
        space.mmap(&request(size, READ | WRITE)).unwrap();
        let program = Program::new(&machine, &space);
        program.fill(AT, size, 0xd6).unwrap();
        let calls = machine.instruction_synchronizations();
        for _ in 0..3 {
            space.mprotect(AT, size, READ | EXECUTE).unwrap();
            for page in 0..16 {
                program.execute(at(page * PAGE_SIZE)).unwrap();
            }
            space.mprotect(AT, size, READ | WRITE).unwrap();
        }
        assert_eq!(machine.instruction_synchronizations(), calls + (16 >> order));
        audit(&machine, &memory, &[&space]);
    }
}

fn shown<A: Walk>() {
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, READ | WRITE)).unwrap();
    let program = Program::new(&machine, &space);
    program.write(AT, &CODE).unwrap();
    space.mprotect(AT, PAGE_SIZE, Protection::empty()).unwrap();
    space.mprotect(AT, PAGE_SIZE, READ | EXECUTE).unwrap();
    program.execute(AT).unwrap();
    audit(&machine, &memory, &[&space]);
}

fn collapse<A: Walk>() {
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(2 * MIB, ALL)).unwrap();
    let program = Program::new(&machine, &space);
    for page in 0..20 {
        program.write(at(page * 7 * PAGE_SIZE + 64), &CODE).unwrap();
    }
    let range = bindery::addr::VirtRange::from_len(AT, 2 * MIB).unwrap();
    space.collapse_range(range).unwrap();
    let calls = machine.instruction_synchronizations();
    for page in 0..512 {
        program.execute(at(page * PAGE_SIZE)).unwrap();
    }
    assert_eq!(machine.instruction_synchronizations(), calls);
    audit(&machine, &memory, &[&space]);
}

fn fork<A: Walk>() {
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, ALL)).unwrap();
    Program::new(&machine, &space).write(AT, &CODE).unwrap();
    let pinned = space.pin(AT, 1, Access::Write, PinTime::Short).unwrap();
    let child = space.fork().unwrap();
    Program::new(&machine, &child).execute(AT).unwrap();
    drop(pinned);
    audit(&machine, &memory, &[&space, &child]);
}

fn zero_page<A: Walk>() {
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, READ | EXECUTE)).unwrap();
    Program::new(&machine, &space).execute(AT).unwrap();
    audit(&machine, &memory, &[&space]);
}

fn debugger<A: Walk>() {
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, ALL)).unwrap();
    let program = Program::new(&machine, &space);
    program.write(at(64), &[0]).unwrap();
    program.execute(AT).unwrap();
    space.write_foreign(AT, &CODE).unwrap();
    program.execute(AT).unwrap();
    audit(&machine, &memory, &[&space]);
}

fn breakpoint<A: Walk>() {
    let (machine, memory) = machine::<A>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, READ | EXECUTE)).unwrap();
    let program = Program::new(&machine, &space);
    program.execute(AT).unwrap();
    // The first write copies the page, the second one finds the copy.
    for _ in 0..2 {
        space.write_forced(AT, &CODE).unwrap();
        program.execute(AT).unwrap();
    }
    audit(&machine, &memory, &[&space]);
}

#[test]
fn unsynchronized_code_of_a_program_is_reported() {
    let (machine, memory) = machine::<AArch64>();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&request(PAGE_SIZE, ALL)).unwrap();
    let program = Program::new(&machine, &space);
    program.write(AT, &CODE).unwrap();
    program.execute(AT).unwrap();
    let violations = machine.take_violations();
    assert!(matches!(violations[..], [Violation::StaleInstructions { .. }]), "{violations:?}");
    let frame = space.pin(AT, 1, Access::Read, PinTime::Short).unwrap().first();
    machine.synchronize_program(frame);
    program.execute(AT).unwrap();
    audit(&machine, &memory, &[&space]);
}

/// The number of synchronizations while memory repeatedly becomes executable and non-executable.
fn calls<A: Walk>(protection: Protection) -> u64 {
    let (machine, memory) = memory_with::<A>(Config::default());
    let space = AddressSpace::new(&memory, options()).unwrap();
    let boot = machine.instruction_synchronizations();
    space.mmap(&request(MIB, READ | WRITE)).unwrap();
    Program::new(&machine, &space).fill(AT, MIB, 1).unwrap();
    space.mprotect(AT, MIB, protection).unwrap();
    machine.instruction_synchronizations() - boot
}

#[test]
fn only_executable_memory_without_coherence_is_synchronized() {
    assert_eq!(calls::<AArch64>(READ), 0);
    assert_eq!(calls::<AArch64>(READ | EXECUTE), 256);
    assert_eq!(calls::<Riscv64<4>>(READ | EXECUTE), 256);
    assert_eq!(calls::<X86_64<4>>(READ | EXECUTE), 0);
}
