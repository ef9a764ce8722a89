//! The embedder's frames, shown to programs (Linux: `VM_PFNMAP`).

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{Absent, Arch, Level, MemoryType};
use bindery::{
    Access, AddressSpace, Error, FaultError, Inspection, MapFlags, MapObject, MapRequest,
    Protection, Remap, Resolved, Sharing,
};
use bindery_hosted::{Program, Walk};

use crate::support::devices::{BOTH, DEVICE, Driver, leaf, map, shared};
use crate::support::{GIB, MIB, READ_WRITE, anywhere, audit, fixed, options, strict};

pub(super) type X86 = bindery::arch::X86_64;

pub(super) const AT: u64 = GIB;
pub(super) const HUGE: u64 = 2 * MIB;

/// The actual type of leaves that were requested with type `memory`.
pub(super) fn stored<A: Arch>(memory: MemoryType) -> MemoryType {
    let bits = A::memory_type(memory).expect("the architecture has it");
    A::memory_type_of(bindery::arch::Entry(bits))
}

on_every_architecture! {
    devices_are_never_executable => not_executable;
    pieces_are_mapped_as_large_as_entries_can => largest_pieces;
    a_chosen_address_is_congruent_with_the_frames => congruent_address;
    all_calls_keep_the_memory_type => kept_type;
    a_run_of_shown_frames_ends_before_a_folio => beside_a_folio;
    frames_on_both_sides_of_8_tib_are_hidden => hidden_high;
}

fn largest_pieces<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    // Aligned at the third page of the object's second 2 MiB only.
    let driver = Driver::of(&[(0, DEVICE, 1024), (1024, DEVICE.plus(2048), 16)]);
    let object = memory.frame_object(&driver, 5 * MIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 5 * MIB)).unwrap();
    let program = Program::new(&machine, &space);
    assert_eq!(program.load(VirtAddr(AT + 8)), Ok(u64::MAX), "a bus without a device");
    let device = stored::<A>(MemoryType::Device);
    assert_eq!(leaf(&space, AT), Some((DEVICE, device, 2)));
    assert_eq!(leaf(&space, AT + HUGE), None);
    let resolved = space.fault(VirtAddr(AT + 2 * HUGE + 3 * PAGE_SIZE), Access::Write);
    let Ok(Resolved::Mapped(range)) = resolved else { panic!("{resolved:?}") };
    assert_eq!((range.start().0, range.len()), (AT + 2 * HUGE, 16 * PAGE_SIZE));
    assert_eq!(leaf(&space, AT + 2 * HUGE), Some((DEVICE.plus(2048), device, 1)));
    let Inspection::Page { contiguous, .. } = space.inspect(VirtAddr(AT + 2 * HUGE)) else {
        panic!("no page")
    };
    assert_eq!(contiguous, A::CONTIG_ENTRIES == 16);
    let beyond = VirtAddr(AT + 2 * HUGE + 16 * PAGE_SIZE);
    assert_eq!(program.store(beyond, 1), Err(FaultError::Bus), "the source has no such page");
    assert_eq!(space.resident().total(), 0);
    audit(&machine, &memory, &[&space]);
    // At an address that is not congruent, the same frames are mapped as base pages.
    map(
        &space,
        &object,
        &MapRequest { flags: MapFlags::POPULATE, ..shared(2 * AT + PAGE_SIZE, HUGE) },
    )
    .unwrap();
    assert_eq!(leaf(&space, 2 * AT + PAGE_SIZE), Some((DEVICE, device, 1)));
    assert_eq!(leaf(&space, 2 * AT + HUGE), Some((DEVICE.plus(511), device, 1)), "populated");
    audit(&machine, &memory, &[&space]);
    drop(space);
    assert_eq!(driver.mappings(), 0);
    audit(&machine, &memory, &[]);
}

fn congruent_address<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let contig = u64::from(A::CONTIG_ENTRIES);
    // The first frame, the pages of the piece, the first page of the mapping, its pages, and the
    // modulus of its congruent address.
    let cases = [
        (DEVICE, 2048, 0, 1024, 512),
        (DEVICE.plus(5), 2048, 0, 1019, 512),
        (DEVICE.plus(5), 2048, 3, 1024, 512),
        (DEVICE.plus(300), 2048, 0, 213, contig),
        // The piece is too short for a huge leaf.
        (DEVICE.plus(5), 518, 0, 1024, contig),
        (DEVICE.plus(5), 2048, 0, 26, 1),
        (DEVICE.plus(5), 2048, 0, 27, contig),
    ];
    for (first, count, page, pages, congruent) in cases {
        let driver = Driver::of(&[(0, first, count)]);
        let object = memory.frame_object(&driver, 8 * MIB, MemoryType::Device).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        // The highest free address is as good as any other.
        space.mmap(&anywhere(7 * PAGE_SIZE)).unwrap();
        let request = MapRequest { sharing: Sharing::Shared, ..anywhere(pages * PAGE_SIZE) };
        let source = MapObject { object: &object, offset: page * PAGE_SIZE, access: BOTH };
        let at = space.mmap_object(&request, &source).unwrap();
        let frame = u64::from(first.0) + page;
        let distance = (at.0 / PAGE_SIZE).wrapping_sub(frame);
        assert_eq!(distance % congruent, 0, "{at} for {first:?}, {pages} pages from {page} on");
        let aligned = VirtAddr(at.0.next_multiple_of(HUGE));
        if congruent == 512 {
            space.fault(aligned, Access::Read).unwrap();
            assert_eq!(leaf(&space, aligned.0).map(|leaf| leaf.2), Some(2));
        }
        audit(&machine, &memory, &[&space]);
    }
    // The source has no such page yet.
    let driver = Driver::default();
    let object = memory.frame_object(&driver, 8 * MIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let request = MapRequest { sharing: Sharing::Shared, ..anywhere(HUGE) };
    let at = map(&space, &object, &request).unwrap();
    assert!(at.0.is_multiple_of(HUGE));
}

/// Programs fetch no instructions from devices.
fn not_executable<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 1024)]);
    let executable = Protection::READ | Protection::EXECUTE;
    for memory_type in [MemoryType::Device, MemoryType::Uncached] {
        let object = memory.frame_object(&driver, 4 * MIB, memory_type);
        let Ok(object) = object else { continue };
        let space = AddressSpace::new(&memory, options()).unwrap();
        for sharing in [Sharing::Shared, Sharing::Private] {
            let request = |protection| MapRequest { protection, sharing, ..fixed(AT, HUGE) };
            let refused = map(&space, &object, &request(executable));
            assert_eq!(refused, Err(Error::AccessDenied));
            map(&space, &object, &request(Protection::READ)).unwrap();
            let refused = space.mprotect(VirtAddr(AT), PAGE_SIZE, executable);
            assert_eq!(refused, Err(Error::AccessDenied));
            assert_eq!(space.mapping_count(), 1);
        }
        audit(&machine, &memory, &[&space]);
    }
}

fn kept_type<A: Walk>() {
    for memory_type in MemoryType::ALL {
        let (machine, memory) = strict::<A>(32 * MIB);
        let driver = Driver::of(&[(0, DEVICE, 1024)]);
        let object = memory.frame_object(&driver, 4 * MIB, memory_type);
        let Ok(object) = object else {
            assert_eq!(
                (object.map(drop), A::memory_type(memory_type)),
                (Err(Error::Invalid), None)
            );
            continue;
        };
        let of = |page: u32| Some((DEVICE.plus(page), stored::<A>(memory_type), 1));
        let space = AddressSpace::new(&memory, options()).unwrap();
        map(&space, &object, &shared(AT, 4 * MIB)).unwrap();
        let program = Program::new(&machine, &space);
        if memory_type != MemoryType::Normal {
            program.load(VirtAddr(AT)).unwrap();
        }
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        space.fault(VirtAddr(AT + HUGE), Access::Read).unwrap();
        // A huge leaf is split; some pages lose all permissions and regain them.
        let (nothing, read) = (Protection::empty(), Protection::READ);
        space.mprotect(VirtAddr(AT + PAGE_SIZE), 3 * PAGE_SIZE, nothing).unwrap();
        let hidden = space.inspect(VirtAddr(AT + PAGE_SIZE));
        let Inspection::Absent(Absent::ProtNone { frame, memory: kept, .. }) = hidden else {
            panic!("{hidden:?}")
        };
        assert_eq!((frame, kept), (DEVICE.plus(1), stored::<A>(memory_type)));
        audit(&machine, &memory, &[&space]);
        space.mprotect(VirtAddr(AT + PAGE_SIZE), 2 * PAGE_SIZE, read).unwrap();
        space.mprotect(VirtAddr(AT + 2 * PAGE_SIZE), PAGE_SIZE, READ_WRITE).unwrap();
        assert_eq!(
            [0u32, 1, 2].map(|n| leaf(&space, AT + u64::from(n) * PAGE_SIZE)),
            [0, 1, 2].map(of)
        );
        // A child has the leaves; a move moves them.
        let child = space.fork().unwrap();
        assert_eq!((leaf(&child, AT), leaf(&child, AT + PAGE_SIZE)), (of(0), of(1)));
        assert_eq!(child.fault(VirtAddr(AT), Access::Write), Ok(Resolved::Spurious));
        let (from, to) = (VirtAddr(AT + HUGE), VirtAddr(3 * AT + 16 * PAGE_SIZE));
        space.mremap(from, HUGE, HUGE, Remap::To(to)).unwrap();
        assert_eq!(leaf(&space, to.0), of(512));
        space.mremap(to, 64 * PAGE_SIZE, PAGE_SIZE, Remap::InPlace).unwrap();
        space.munmap(VirtAddr(AT + 100 * PAGE_SIZE), PAGE_SIZE).unwrap();
        assert_eq!(leaf(&space, AT + 101 * PAGE_SIZE), of(101));
        space.clear_soft_dirty().unwrap();
        space.clear_accessed(|_| true).unwrap();
        assert_eq!(leaf(&space, AT), of(0));
        audit(&machine, &memory, &[&space, &child]);
    }
}

/// The frame of an anonymous page follows that of the embedder's block, at the next address.
fn beside_a_folio<A: Walk>() {
    for (hides, ends) in [(false, false), (false, true), (true, false), (true, true)] {
        let (machine, memory) = strict::<A>(32 * MIB);
        // The next single-page blocks are consecutive, and the driver owns one of them.
        let blocks: Vec<_> = (0..8).map(|_| memory.allocate_frames(Order(0)).unwrap()).collect();
        let shown = blocks[3].first;
        let driver = Driver::of(&[(0, shown, 1)]);
        let object = memory.frame_object(&driver, PAGE_SIZE, MemoryType::Normal).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        map(&space, &object, &shared(AT, PAGE_SIZE)).unwrap();
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        // A neighbor in the same table keeps the table allocated.
        space.mmap(&fixed(AT + 8 * PAGE_SIZE, PAGE_SIZE)).unwrap();
        space.fault(VirtAddr(AT + 8 * PAGE_SIZE), Access::Write).unwrap();
        for block in &blocks {
            if block.first == shown.plus(1) {
                // SAFETY: 1. and 2. the test allocated the block and never used it.
                assert!(unsafe { memory.free_frames(*block) });
            }
        }
        // Touches pages elsewhere until the following frame is the next one to be allocated.
        space.mmap(&fixed(2 * AT, 64 * PAGE_SIZE)).unwrap();
        let mut next = None;
        for page in 0..64 {
            space.fault(VirtAddr(2 * AT + page * PAGE_SIZE), Access::Write).unwrap();
            if leaf(&space, 2 * AT + page * PAGE_SIZE).unwrap().0 == shown.plus(1) {
                next = Some(VirtAddr(2 * AT + page * PAGE_SIZE));
                break;
            }
        }
        let next = next.expect("the freed frame is used again");
        space.mremap(next, PAGE_SIZE, PAGE_SIZE, Remap::To(VirtAddr(AT + PAGE_SIZE))).unwrap();
        assert_eq!(leaf(&space, AT + PAGE_SIZE).unwrap().0, shown.plus(1));
        if hides {
            space.mprotect(VirtAddr(AT), 2 * PAGE_SIZE, Protection::empty()).unwrap();
        }
        let before = space.resident().total();
        if ends {
            drop(space);
            audit(&machine, &memory, &[]);
        } else {
            space.munmap(VirtAddr(AT), 2 * PAGE_SIZE).unwrap();
            assert_eq!(space.resident().total(), before - 1);
            audit(&machine, &memory, &[&space]);
        }
    }
}

/// An entry without access stores the frames above 2^43 in another way than those below.
fn hidden_high<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let first = Frame(0x8000_0000 - 24);
    let driver = Driver::of(&[(0, first, 48), (48, Frame(0x9000_0000), 16)]);
    let device = stored::<A>(MemoryType::Device);
    let object = memory.frame_object(&driver, MIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let (at, length) = (VirtAddr(AT), 64 * PAGE_SIZE);
    let frame = |page| if page < 48 { first.plus(page) } else { Frame(0x9000_0000 + page - 48) };
    let hidden = |space: &AddressSpace<'_, _>, start: VirtAddr, pages: std::ops::Range<u32>| {
        for page in pages {
            let found = space.inspect(VirtAddr(start.0 + u64::from(page) * PAGE_SIZE));
            let Inspection::Absent(Absent::ProtNone { frame: found, memory, .. }) = found else {
                panic!("{page}: {found:?}")
            };
            assert_eq!((found, memory), (frame(page), device), "{page}");
        }
    };
    map(&space, &object, &shared(AT, length)).unwrap();
    space.fault(at, Access::Write).unwrap();
    space.fault(VirtAddr(AT + 48 * PAGE_SIZE), Access::Write).unwrap();
    space.mprotect(at, length, Protection::empty()).unwrap();
    hidden(&space, at, 0..64);
    let child = space.fork().unwrap();
    hidden(&child, at, 0..64);
    let to = VirtAddr(3 * AT + 5 * PAGE_SIZE);
    space.mremap(at, length, length, Remap::To(to)).unwrap();
    hidden(&space, to, 0..64);
    audit(&machine, &memory, &[&space, &child]);
    space.munmap(VirtAddr(to.0 + 20 * PAGE_SIZE), PAGE_SIZE).unwrap();
    space.mprotect(to, 20 * PAGE_SIZE, READ_WRITE).unwrap();
    let rest = VirtAddr(to.0 + 21 * PAGE_SIZE);
    space.mprotect(rest, 43 * PAGE_SIZE, Protection::READ).unwrap();
    for page in (0..64).filter(|page| *page != 20) {
        let found = leaf(&space, to.0 + u64::from(page) * PAGE_SIZE);
        assert_eq!(found, Some((frame(page), device, 1)), "{page}");
    }
    audit(&machine, &memory, &[&space, &child]);
    object.revoke(0, u64::MAX).unwrap();
    assert_eq!(child.inspect(at), Inspection::Empty);
    audit(&machine, &memory, &[&space, &child]);
}

#[test]
fn without_memory_for_tables_nothing_is_shown() {
    let (machine, memory) = strict::<X86>(4 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 512)]);
    let object = memory.frame_object(&driver, HUGE, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, HUGE)).unwrap();
    for allowed in 0.. {
        memory.fail_allocations_after(Some(allowed));
        let resolved = space.fault(VirtAddr(AT), Access::Write);
        memory.fail_allocations_after(None);
        audit(&machine, &memory, &[&space]);
        match resolved {
            Ok(_) => break,
            Err(error) => assert_eq!((error, leaf(&space, AT)), (FaultError::OutOfMemory, None)),
        }
    }
    assert_eq!(leaf(&space, AT).map(|leaf| leaf.2), Some(Level::<X86>::PMD.number()));
    // The revoke of a page cuts the leaf, without memory.
    object.revoke(PAGE_SIZE, PAGE_SIZE).unwrap();
    assert_eq!(leaf(&space, AT + PAGE_SIZE), None);
    assert_eq!(leaf(&space, AT + HUGE - PAGE_SIZE).map(|leaf| leaf.2), Some(1));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn two_memory_types_of_a_frame_are_reported() {
    let (machine, memory) = strict::<X86>(32 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 16)]);
    let [registers, buffer] = [MemoryType::Device, MemoryType::WriteCombining]
        .map(|kind| memory.frame_object(&driver, MIB, kind).unwrap());
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &registers, &shared(AT, PAGE_SIZE)).unwrap();
    map(&space, &buffer, &shared(2 * AT, PAGE_SIZE)).unwrap();
    let program = Program::new(&machine, &space);
    program.load(VirtAddr(AT)).unwrap();
    machine.assert_clean();
    program.load(VirtAddr(2 * AT)).unwrap();
    let found = machine.take_violations();
    assert!(
        matches!(found.as_slice(), [bindery_hosted::Violation::MixedTypes { .. }]),
        "{found:?}"
    );
    // Either order is correct.
    space.munmap(VirtAddr(AT), PAGE_SIZE).unwrap();
    space.munmap(VirtAddr(2 * AT), PAGE_SIZE).unwrap();
    map(&space, &registers, &shared(AT, PAGE_SIZE)).unwrap();
    program.load(VirtAddr(AT)).unwrap();
    audit(&machine, &memory, &[&space]);
}
