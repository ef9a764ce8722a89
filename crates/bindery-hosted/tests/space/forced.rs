//! A debugger's reads and writes, which no protection of a mapping stops.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::MemoryType;
use bindery::{
    Access, Accounting, AddressSpace, Error, FaultError, FileAccess, Inspection, MapFlags,
    MapObject, MapRequest, Memory, Object, Protection, Remap, Resolved, Sealing, Sharing,
};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::devices::{DEVICE, Driver, leaf, map, shared};
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict, use_order};

const AT: u64 = GIB;
const HUGE: u64 = 2 * MIB;
const NOTHING: Protection = Protection::empty();

on_every_architecture! {
    a_breakpoint_in_a_vdso_is_private => vdso;
    a_breakpoint_of_a_parent_is_the_childs_too => forked;
    memory_without_access_is_read_and_written => without_access;
    a_huge_page_is_written_in_place => huge;
    pages_in_swap_are_written => swapped;
    without_memory_no_page_is_copied => without_memory;
    a_forced_write_grants_the_program_nothing => executed;
}

/// An image of two pages, as a kernel maps it into each program.
fn image<A: Walk>(memory: &Memory<Machine<A>>) -> Object<'_, Machine<A>> {
    let image = memory.shared_memory(2 * PAGE_SIZE, Sealing::Forbidden, Accounting::None).unwrap();
    image.write(0, b"code").unwrap();
    image.write(PAGE_SIZE, b"more").unwrap();
    image
}

fn program_with<'m, A: Walk>(
    memory: &'m Memory<Machine<A>>,
    image: &Object<'m, Machine<A>>,
) -> AddressSpace<'m, Machine<A>> {
    let space = AddressSpace::new(memory, options()).unwrap();
    let request = MapRequest {
        protection: Protection::READ | Protection::EXECUTE,
        flags: MapFlags::DONT_EXPAND,
        ..fixed(AT, 2 * PAGE_SIZE)
    };
    let source = MapObject { object: image, offset: 0, access: FileAccess::READ };
    space.mmap_object(&request, &source).unwrap();
    space
}

/// The text that a program reads at the beginning of its page.
fn text<A: Walk>(space: &AddressSpace<'_, Machine<A>>, page: u64) -> [u8; 4] {
    let mut bytes = [0; 4];
    space.read_user(VirtAddr(AT + page * PAGE_SIZE), &mut bytes).unwrap();
    bytes
}

fn vdso<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let image = image(&memory);
    let [one, other] = [(); 2].map(|()| program_with(&memory, &image));
    let at = VirtAddr(AT);
    // Another program has mapped the page; this one has not.
    assert_eq!(text(&other, 0), *b"code");
    one.write_forced(VirtAddr(AT + PAGE_SIZE - 2), b"trap").unwrap();
    one.write_forced(at, b"tr").unwrap();
    assert_eq!((text(&one, 0), text(&one, 1)), (*b"trde", *b"apre"));
    assert_eq!((text(&other, 0), text(&other, 1)), (*b"code", *b"more"));
    let mut bytes = [0; 4];
    image.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"code");
    // Later writes go to the same copies.
    let frame = leaf(&one, AT).unwrap().0;
    one.write_forced(at, b"back").unwrap();
    assert_eq!((text(&one, 0), leaf(&one, AT).unwrap().0), (*b"back", frame));
    assert_eq!((one.resident().anonymous, other.resident().anonymous), (2, 0));
    // The mapping is as it was: one, read-only, and of its size.
    assert_eq!(one.mapping_count(), 1);
    assert_eq!(one.fault(at, Access::Write), Err(FaultError::Protection));
    assert_eq!(one.write_foreign(at, b"no"), Err(FaultError::Protection));
    let grown = one.mremap(at, 2 * PAGE_SIZE, 3 * PAGE_SIZE, Remap::MayMove);
    assert_eq!(grown, Err(Error::Fault(VirtAddr(AT + 2 * PAGE_SIZE))));
    one.write_forced(VirtAddr(AT + 2 * PAGE_SIZE), b"no").unwrap_err();
    audit(&machine, &memory, &[&one, &other]);
    // The program may write its copy once it may write at all.
    one.mprotect(at, PAGE_SIZE, READ_WRITE).unwrap();
    Program::new(&machine, &one).store(at, 7).unwrap();
    assert_eq!(leaf(&one, AT).unwrap().0, frame);
    audit(&machine, &memory, &[&one, &other]);
}

fn forked<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let image = image(&memory);
    let space = program_with(&memory, &image);
    space.write_forced(VirtAddr(AT), b"trap").unwrap();
    let child = space.fork().unwrap();
    assert_eq!(text(&child, 0), *b"trap");
    child.write_forced(VirtAddr(AT), b"mine").unwrap();
    assert_eq!((text(&space, 0), text(&child, 0)), (*b"trap", *b"mine"));
    audit(&machine, &memory, &[&space, &child]);
    drop(child);
    // No other process maps the page now, so it is not copied.
    let frame = leaf(&space, AT).unwrap().0;
    space.write_forced(VirtAddr(AT), b"last").unwrap();
    assert_eq!((text(&space, 0), leaf(&space, AT).unwrap().0), (*b"last", frame));
    audit(&machine, &memory, &[&space]);
}

fn without_access<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let image = image(&memory);
    let space = program_with(&memory, &image);
    space.mmap(&MapRequest { protection: NOTHING, ..fixed(2 * AT, HUGE) }).unwrap();
    space.mprotect(VirtAddr(AT), 2 * PAGE_SIZE, NOTHING).unwrap();
    let mut bytes = [1; 4];
    let read = |at, bytes: &mut [u8; 4]| space.read_forced(VirtAddr(at), bytes).unwrap();
    read(2 * AT, &mut bytes);
    assert_eq!(bytes, [0; 4]);
    read(AT, &mut bytes);
    assert_eq!(&bytes, b"code");
    // Pages that are there, and pages that no access has mapped.
    for at in [AT, AT + PAGE_SIZE, 2 * AT, 2 * AT + 9 * PAGE_SIZE] {
        space.write_forced(VirtAddr(at), b"trap").unwrap();
        read(at, &mut bytes);
        assert_eq!(&bytes, b"trap");
        assert_eq!(space.fault(VirtAddr(at), Access::Read), Err(FaultError::Protection));
        audit(&machine, &memory, &[&space]);
    }
    let child = space.fork().unwrap();
    child.write_forced(VirtAddr(2 * AT), b"mine").unwrap();
    read(2 * AT, &mut bytes);
    assert_eq!(&bytes, b"trap");
    audit(&machine, &memory, &[&space, &child]);
    space.mprotect(VirtAddr(AT), 2 * PAGE_SIZE, Protection::READ).unwrap();
    assert_eq!(text(&space, 1), *b"trap");
    image.read(PAGE_SIZE, &mut bytes).unwrap();
    assert_eq!(&bytes, b"more");
}

/// A page that the program may only execute: it may read it no more than before, if its MMU can
/// tell.
fn executed<A: Walk>() {
    for order in [0, 4] {
        let (machine, memory) = strict::<A>(32 * MIB);
        use_order(&memory, order);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT, 16 * PAGE_SIZE)).unwrap();
        let program = Program::new(&machine, &space);
        let all = || (0..16).map(|page| VirtAddr(AT + page * PAGE_SIZE));
        all().for_each(|at| program.store(at, 7).unwrap());
        space.mprotect(VirtAddr(AT), 16 * PAGE_SIZE, Protection::EXECUTE).unwrap();
        let rights = || all().map(|at| program.load(at)).collect::<Vec<_>>();
        let before = rights();
        space.write_forced(VirtAddr(AT + 3 * PAGE_SIZE), &[9]).unwrap();
        space.write_forced(VirtAddr(AT + 5 * PAGE_SIZE), &[9]).unwrap();
        let is_same =
            |(after, before): (Result<u64, _>, &Result<u64, _>)| after.is_ok() == before.is_ok();
        assert!(rights().into_iter().zip(&before).all(is_same), "{before:?}");
        assert!(program.store(VirtAddr(AT + 3 * PAGE_SIZE), 1).is_err());
        audit(&machine, &memory, &[&space]);
    }
}

fn huge<A: Walk>() {
    for protection in [Protection::READ, NOTHING] {
        let (machine, memory) = strict::<A>(32 * MIB);
        use_order(&memory, 9);
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT, HUGE)).unwrap();
        Program::new(&machine, &space).store(VirtAddr(AT), 1).unwrap();
        space.mprotect(VirtAddr(AT), HUGE, protection).unwrap();
        let before = space.inspect(VirtAddr(AT + 5 * PAGE_SIZE));
        space.write_forced(VirtAddr(AT + 5 * PAGE_SIZE), b"trap").unwrap();
        let frame = |inspection| match inspection {
            Inspection::Page { frame, level, .. } => (frame, level.number()),
            Inspection::Absent(bindery::arch::Absent::ProtNone { frame, .. }) => (frame, 0),
            other => panic!("{other:?}"),
        };
        assert_eq!(frame(space.inspect(VirtAddr(AT + 5 * PAGE_SIZE))), frame(before));
        // A child shares the folio, so the next write copies one page of it.
        let child = space.fork().unwrap();
        space.write_forced(VirtAddr(AT + 5 * PAGE_SIZE), b"mine").unwrap();
        let mut bytes = [0; 4];
        child.read_forced(VirtAddr(AT + 5 * PAGE_SIZE), &mut bytes).unwrap();
        assert_eq!(&bytes, b"trap");
        audit(&machine, &memory, &[&space, &child]);
    }
}

fn swapped<A: Walk>() {
    for protection in [Protection::READ, NOTHING] {
        let (machine, memory) = strict::<A>(32 * MIB);
        let area = memory.swap_on(100, 0).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        space.mmap(&fixed(AT, 16 * PAGE_SIZE)).unwrap();
        space.write_user(VirtAddr(AT), &[7; 16 * PAGE_SIZE as usize]).unwrap();
        space.mprotect(VirtAddr(AT), 16 * PAGE_SIZE, protection).unwrap();
        let swap_out = || {
            while space.resident().anonymous > 0 {
                assert!(memory.reclaim(64).scanned > 0, "they are all swapped out");
            }
        };
        for round in [1, 2] {
            swap_out();
            space.write_forced(VirtAddr(AT + 3 * PAGE_SIZE), &[round; 8]).unwrap();
            audit(&machine, &memory, &[&space]);
            swap_out();
            let mut bytes = [0; 9];
            space.read_forced(VirtAddr(AT + 3 * PAGE_SIZE), &mut bytes).unwrap();
            assert_eq!((bytes[7], bytes[8]), (round, 7), "the write is in swap as well");
        }
        drop(space);
        memory.swap_off(&area).unwrap();
    }
}

fn without_memory<A: Walk>() {
    let (machine, memory) = strict::<A>(4 * MIB);
    let image = image(&memory);
    let space = program_with(&memory, &image);
    for allowed in 0.. {
        memory.fail_allocations_after(Some(allowed));
        let written = space.write_forced(VirtAddr(AT), b"trap");
        memory.fail_allocations_after(None);
        audit(&machine, &memory, &[&space]);
        if written == Ok(()) {
            break;
        }
        assert_eq!(written, Err(FaultError::OutOfMemory));
        assert_eq!(text(&space, 0), *b"code");
    }
    assert_eq!(text(&space, 0), *b"trap");
}

type X86 = bindery::arch::X86_64;

#[test]
fn what_no_debugger_may_access_is_refused() {
    let (machine, memory) = strict::<X86>(32 * MIB);
    let block = memory.allocate_frames(Order(0)).unwrap();
    let driver = Driver::of(&[(0, block.first, 1), (1, DEVICE, 1)]);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let at = VirtAddr(AT);
    let refused = Err(FaultError::Protection);
    let attempts = || (space.write_forced(at, b"trap"), space.read_forced(at, &mut [0; 4]));
    assert_eq!(attempts(), (Err(FaultError::NotMapped), Err(FaultError::NotMapped)));
    // A write to shared memory would reach the object.
    let image = image(&memory);
    for protection in [Protection::READ, NOTHING] {
        map(&space, &image, &MapRequest { protection, ..shared(AT, PAGE_SIZE) }).unwrap();
        assert_eq!(attempts(), (refused, Ok(())), "{protection:?}");
    }
    map(&space, &image, &shared(AT, PAGE_SIZE)).unwrap();
    assert_eq!(attempts(), (Ok(()), Ok(())), "as the program itself");
    // Device frames, also copies of them, and secret memory.
    let object = memory.frame_object(&driver, 2 * PAGE_SIZE, MemoryType::Normal).unwrap();
    for sharing in [Sharing::Shared, Sharing::Private] {
        let protection = Protection::READ;
        map(&space, &object, &MapRequest { protection, sharing, ..fixed(AT, 2 * PAGE_SIZE) })
            .unwrap();
        assert_eq!(attempts(), (refused, refused), "{sharing:?}");
    }
    space.munmap(at, 2 * PAGE_SIZE).unwrap();
    let secret = memory.secret_memory().unwrap();
    secret.set_size(PAGE_SIZE).unwrap();
    map(&space, &secret, &shared(AT, PAGE_SIZE)).unwrap();
    assert_eq!(attempts(), (refused, refused));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_forced_write_counts_as_a_write() {
    let (machine, memory) = strict::<X86>(32 * MIB);
    for protection in [Protection::READ, NOTHING] {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let at = VirtAddr(AT);
        space.mmap(&fixed(AT, PAGE_SIZE)).unwrap();
        assert!(matches!(space.fault(at, Access::Write), Ok(Resolved::New(_))));
        space.mprotect(at, PAGE_SIZE, protection).unwrap();
        space.clear_soft_dirty().unwrap();
        let is_soft_dirty = || match space.inspect(at) {
            Inspection::Page { attributes, .. } => attributes.soft_dirty,
            Inspection::Absent(bindery::arch::Absent::ProtNone { soft_dirty, .. }) => soft_dirty,
            other => panic!("{other:?}"),
        };
        assert!(!is_soft_dirty());
        space.write_forced(at, b"trap").unwrap();
        assert!(is_soft_dirty());
        audit(&machine, &memory, &[&space]);
    }
}
