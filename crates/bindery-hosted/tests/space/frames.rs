//! The embedder's frames, shown to programs (Linux: `VM_PFNMAP`).

use std::sync::atomic::Ordering;

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{Absent, Arch, Level, MemoryType};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, FileAccess, Inspection, LockPages, MapFlags,
    MapObject, MapRequest, Memory, Object, PinError, PinTime, Protection, Remap, Residence,
    Resolved, Seals, Sharing,
};
use bindery_hosted::{Config, Machine, Program, Walk};
use bindery_linux::proc::{self, Unnamed};

use crate::support::devices::{BOTH, DEVICE, Driver, leaf, map, shared};
use crate::support::{GIB, MIB, READ_WRITE, anywhere, audit, fixed, memory_with, options, strict};

const AT: u64 = GIB;
const HUGE: u64 = 2 * MIB;

/// The actual type of leaves that were requested with type `memory`.
fn stored<A: Arch>(memory: MemoryType) -> MemoryType {
    let bits = A::memory_type(memory).expect("the architecture has it");
    A::memory_type_of(bindery::arch::Entry(bits))
}

on_every_architecture! {
    devices_are_never_executable => not_executable;
    pieces_are_mapped_as_large_as_entries_can => largest_pieces;
    a_chosen_address_is_congruent_with_the_frames => congruent_address;
    all_calls_keep_the_memory_type => kept_type;
    frames_of_the_embedder_stay_while_a_program_maps_them => embedder_frames;
    a_run_of_shown_frames_ends_before_a_folio => beside_a_folio;
    after_a_revoke_the_source_is_asked_again => revoked;
    a_child_has_the_frames_of_its_parent => forked;
    forks_beside_revokes_keep_no_frame => forked_beside_revokes;
    a_writable_private_mapping_is_shown_whole => private_whole;
    frames_on_both_sides_of_8_tib_are_hidden => hidden_high;
    faults_beside_revokes_see_no_frame_of_before => revoked_beside_faults;
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

fn embedder_frames<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let block = memory.allocate_frames(Order(9)).unwrap();
    let driver = Driver::of(&[(0, block.first, 512), (512, DEVICE, 4)]);
    let object = memory.frame_object(&driver, 4 * MIB, MemoryType::Normal).unwrap();
    let (one, other) = (
        AddressSpace::new(&memory, options()).unwrap(),
        AddressSpace::new(&memory, options()).unwrap(),
    );
    map(&one, &object, &shared(AT, 4 * MIB)).unwrap();
    map(&other, &object, &shared(AT + PAGE_SIZE, HUGE)).unwrap();
    let program = Program::new(&machine, &one);
    program.store(VirtAddr(AT + 8), 77).unwrap();
    let program = Program::new(&machine, &other);
    assert_eq!(program.load(VirtAddr(AT + PAGE_SIZE + 8)), Ok(77));
    audit(&machine, &memory, &[&one, &other]);
    // SAFETY: 1. the test allocated the block; 2. the call refuses to free a block that a program
    // maps.
    let free = || unsafe { memory.free_frames(block) };
    assert!(!free(), "two programs map it");
    one.munmap(VirtAddr(AT + PAGE_SIZE), 3 * PAGE_SIZE).unwrap();
    drop(other);
    assert!(!free(), "one program maps a part of it");
    audit(&machine, &memory, &[&one]);
    let kept = (VirtAddr(AT + 4 * PAGE_SIZE), HUGE - 4 * PAGE_SIZE);
    one.munmap(VirtAddr(AT), PAGE_SIZE).unwrap();
    one.mprotect(kept.0, kept.1, Protection::empty()).unwrap();
    assert!(!free(), "an entry without permissions refers to it");
    driver.set(&[]);
    object.revoke(0, HUGE).unwrap();
    assert!(free());
    audit(&machine, &memory, &[&one]);
    // Frames that the core uses are never shown.
    let page =
        memory.shared_memory(PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::None);
    let page = page.unwrap();
    page.write(0, b"mine").unwrap();
    map(&one, &page, &shared(2 * AT, PAGE_SIZE)).unwrap();
    one.fault(VirtAddr(2 * AT), Access::Read).unwrap();
    let (frame, ..) = leaf(&one, 2 * AT).unwrap();
    driver.set(&[(4, frame, 1)]);
    one.mprotect(kept.0, kept.1, READ_WRITE).unwrap();
    assert_eq!(one.fault(kept.0, Access::Read), Err(FaultError::Bus));
    audit(&machine, &memory, &[&one]);
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

fn revoked<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let [old, new] = [(); 2].map(|()| memory.allocate_frames(Order(2)).unwrap());
    let driver = Driver::of(&[(0, old.first, 4)]);
    let object = memory.frame_object(&driver, 4 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 4 * PAGE_SIZE)).unwrap();
    let child = space.fork().unwrap();
    let program = Program::new(&machine, &space);
    for page in 0..4 {
        program.store(VirtAddr(AT + page * PAGE_SIZE), page).unwrap();
    }
    child.fault(VirtAddr(AT), Access::Read).unwrap();
    driver.set(&[(0, new.first, 4)]);
    object.revoke(PAGE_SIZE, PAGE_SIZE + 1).unwrap();
    let frames = [0, 1, 2, 3].map(|page| leaf(&space, AT + page * PAGE_SIZE).map(|leaf| leaf.0));
    assert_eq!(frames, [Some(old.first), None, None, Some(old.first.plus(3))]);
    program.store(VirtAddr(AT + PAGE_SIZE), 5).unwrap();
    assert_eq!(leaf(&space, AT + PAGE_SIZE).map(|leaf| leaf.0), Some(new.first.plus(1)));
    object.revoke(0, u64::MAX).unwrap();
    assert_eq!((leaf(&space, AT), leaf(&child, AT)), (None, None));
    for block in [old, new] {
        // SAFETY: 1. the test allocated the block; 2. the block was revoked.
        assert!(unsafe { memory.free_frames(block) });
    }
    driver.set(&[]);
    assert_eq!(program.store(VirtAddr(AT), 1), Err(FaultError::Bus));
    audit(&machine, &memory, &[&space, &child]);
    let memory_object =
        memory.shared_memory(PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::None);
    assert_eq!(memory_object.unwrap().revoke(0, PAGE_SIZE), Err(Error::Invalid));
}

/// By the time of the fork, the source has other frames than those that the parent maps.
fn forked<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let [old, new] = [(); 2].map(|()| memory.allocate_frames(Order(9)).unwrap());
    let driver = Driver::of(&[(0, old.first, 512), (512, DEVICE, 16)]);
    let object = memory.frame_object(&driver, 4 * MIB, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 4 * MIB)).unwrap();
    map(&space, &object, &MapRequest { protection: Protection::READ, ..shared(2 * AT, HUGE) })
        .unwrap();
    for at in [AT, AT + HUGE, 2 * AT + 5 * PAGE_SIZE] {
        space.fault(VirtAddr(at), Access::Read).unwrap();
    }
    space.mprotect(VirtAddr(2 * AT), PAGE_SIZE, Protection::empty()).unwrap();
    driver.set(&[(0, new.first, 512)]);
    let child = space.fork().unwrap();
    let found = |at| [&space, &child].map(|space| leaf(space, at));
    let huge = |first| Some((first, stored::<A>(MemoryType::Normal), 2));
    assert_eq!(found(AT), [huge(old.first); 2]);
    let [ours, theirs] = found(AT + HUGE + 3 * PAGE_SIZE);
    assert_eq!((ours, theirs.map(|leaf| leaf.0)), (theirs, Some(DEVICE.plus(3))));
    assert!(matches!(
        child.inspect(VirtAddr(2 * AT)),
        Inspection::Absent(Absent::ProtNone { frame, .. }) if frame == old.first
    ));
    audit(&machine, &memory, &[&space, &child]);
    // Both may write at once, and see what the other wrote.
    let [ours, theirs] = [&space, &child].map(|space| Program::new(&machine, space));
    ours.store(VirtAddr(AT), 7).unwrap();
    assert_eq!(theirs.load(VirtAddr(AT)), Ok(7));
    theirs.store(VirtAddr(AT), 8).unwrap();
    assert_eq!(ours.load(VirtAddr(2 * AT + PAGE_SIZE)), theirs.load(VirtAddr(2 * AT + PAGE_SIZE)));
    drop(space);
    // SAFETY: 1. the test allocated the block; 2. the call refuses a block that a program maps.
    let free = |block| unsafe { memory.free_frames(block) };
    assert!(!free(old), "the child maps it");
    object.revoke(0, u64::MAX).unwrap();
    assert!(free(old));
    assert_eq!(leaf(&child, AT), None);
    child.fault(VirtAddr(AT), Access::Read).unwrap();
    assert_eq!(leaf(&child, AT), huge(new.first));
    audit(&machine, &memory, &[&child]);
}

/// Each block is freed although a child that was forked during the revoke still exists.
fn forked_beside_revokes<A: Walk>() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let driver = Driver::default();
    let object = memory.frame_object(&driver, 64 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 64 * PAGE_SIZE)).unwrap();
    // The rounds that the revoker has begun and ended, and the children that were forked.
    let [begun, ended, forked] = [(); 3].map(|()| std::sync::atomic::AtomicU64::new(0));
    let rounds = 200;
    std::thread::scope(|scope| {
        let forker = scope.spawn(|| {
            let _cpu = machine.bind(Cpu(1));
            for round in 1..=rounds {
                while begun.load(Ordering::Acquire) < round {
                    std::thread::yield_now();
                }
                let child = space.fork().unwrap();
                forked.store(round, Ordering::Release);
                while ended.load(Ordering::Acquire) < round {
                    std::thread::yield_now();
                }
                drop(child);
            }
        });
        let _cpu = machine.bind(Cpu(0));
        let mut unfreed = 0;
        for round in 1..=rounds {
            let block = memory.allocate_frames(Order(6)).unwrap();
            driver.set(&[(0, block.first, 64)]);
            space.fault(VirtAddr(AT), Access::Write).unwrap();
            driver.set(&[]);
            begun.store(round, Ordering::Release);
            object.revoke(0, 64 * PAGE_SIZE).unwrap();
            while forked.load(Ordering::Acquire) < round && !forker.is_finished() {
                std::thread::yield_now();
            }
            // SAFETY: 1. the test allocated the block; 2. the block was revoked.
            unfreed += u32::from(!unsafe { memory.free_frames(block) });
            ended.store(round, Ordering::Release);
        }
        assert_eq!(unfreed, 0, "children map frames that were revoked");
    });
    audit(&machine, &memory, &[&space]);
}

/// Linux's `remap_pfn_range` refuses a part of a mapping that is or may become private and
/// writable.
fn private_whole<A: Walk>() {
    let (machine, memory) = strict::<A>(32 * MIB);
    let block = memory.allocate_frames(Order(3)).unwrap();
    let driver = Driver::of(&[(0, block.first, 4), (4, DEVICE, 2), (6, block.first.plus(4), 2)]);
    let object = memory.frame_object(&driver, 10 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let map = |protection, sharing, first: u64, pages: u64| {
        let request = MapRequest { protection, sharing, ..fixed(AT, pages * PAGE_SIZE - 5) };
        let source = MapObject { object: &object, offset: first * PAGE_SIZE, access: BOTH };
        space.mmap_object(&request, &source)
    };
    let (ours, shared, invalid) = (Sharing::Private, Sharing::Shared, Err(Error::Invalid));
    for protection in [READ_WRITE, Protection::READ, Protection::empty()] {
        // Without the last page, beyond the object, and with a hole in the middle.
        assert_eq!(map(protection, ours, 0, 9), invalid, "{protection:?}");
        assert_eq!(map(protection, ours, 8, 1), invalid, "{protection:?}");
        assert_eq!(map(protection, ours, 7, 4), invalid, "{protection:?}");
        assert_eq!(space.mapping_count(), 0);
        assert_eq!(map(protection, shared, 0, 11), Ok(VirtAddr(AT)));
        space.munmap(VirtAddr(AT), 11 * PAGE_SIZE).unwrap();
    }
    driver.set(&[(0, block.first, 4), (5, DEVICE, 1)]);
    assert_eq!(map(READ_WRITE, ours, 0, 6), invalid);
    assert_eq!(map(READ_WRITE, ours, 1, 3), Ok(VirtAddr(AT)));
    // A mapping that was shown whole stays what it is when parts of it are cut, moved, protected.
    let (at, page) = (VirtAddr(AT + PAGE_SIZE), PAGE_SIZE);
    space.mprotect(at, page, Protection::READ).unwrap();
    driver.set(&[]);
    space.mprotect(at, page, READ_WRITE).unwrap();
    space.mremap(at, page, page, Remap::To(VirtAddr(2 * AT))).unwrap();
    let grown = space.mremap(VirtAddr(2 * AT), page, 2 * page, Remap::MayMove);
    assert_eq!(grown, Err(Error::Fault(VirtAddr(2 * AT + page))));
    assert_eq!(space.fault(VirtAddr(2 * AT), Access::Write), Err(FaultError::Bus));
    audit(&machine, &memory, &[&space]);
    // A private mapping that never becomes writable has no such rule.
    let registers = memory.frame_object(&driver, page, MemoryType::Device).unwrap();
    let request = MapRequest { protection: Protection::READ, ..fixed(4 * AT, page) };
    let source = MapObject { object: &registers, offset: 0, access: BOTH };
    space.mmap_object(&request, &source).unwrap();
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

/// A block is freed once no leaf maps it. If a fault had mapped the source's earlier answer, the
/// strict TLB or the block's count would show it.
fn revoked_beside_faults<A: Walk>() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let driver = Driver::default();
    let object = memory.frame_object(&driver, 64 * PAGE_SIZE, MemoryType::Normal).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, 64 * PAGE_SIZE)).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let stores = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let storer = scope.spawn(|| {
            let _cpu = machine.bind(Cpu(1));
            let program = Program::new(&machine, &space);
            let mut page = 0;
            while !done.load(Ordering::Relaxed) {
                page = (page + 7) % 64;
                let stored = program.store(VirtAddr(AT + page * PAGE_SIZE), page);
                assert!(matches!(stored, Ok(()) | Err(FaultError::Bus)), "{stored:?}");
                stores.fetch_add(u64::from(stored.is_ok()), Ordering::Relaxed);
            }
        });
        let _cpu = machine.bind(Cpu(0));
        for _ in 0..200 {
            let block = memory.allocate_frames(Order(6)).unwrap();
            let before = stores.load(Ordering::Relaxed);
            driver.set(&[(0, block.first, 64)]);
            // Each block has a store, which is usually in progress when the block is revoked.
            while stores.load(Ordering::Relaxed) == before && !storer.is_finished() {
                std::thread::yield_now();
            }
            driver.set(&[]);
            object.revoke(0, 64 * PAGE_SIZE).unwrap();
            // SAFETY: 1. the test allocated the block; 2. the block was revoked.
            assert!(unsafe { memory.free_frames(block) });
        }
        done.store(true, Ordering::Relaxed);
    });
    audit(&machine, &memory, &[&space]);
}

type X86 = bindery::arch::X86_64;

fn with_device(
    scenario: impl for<'m> FnOnce(&'m Memory<Machine<X86>>, &Object<'m, Machine<X86>>, &'m Driver),
) {
    let (machine, memory) = strict::<X86>(32 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 16)]);
    scenario(&memory, &memory.frame_object(&driver, MIB, MemoryType::Device).unwrap(), &driver);
    assert_eq!(driver.mappings(), 0);
    audit(&machine, &memory, &[]);
}

#[test]
fn calls_have_the_answers_of_linux() {
    with_device(|memory, object, _| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let (at, length) = (VirtAddr(AT), 16 * PAGE_SIZE);
        map(&space, object, &shared(AT, length)).unwrap();
        space.fault(at, Access::Write).unwrap();
        let refused = [
            Advice::DontNeed,
            Advice::DontNeedLocked,
            Advice::Free,
            Advice::Cold,
            Advice::PageOut,
            Advice::DoFork,
            Advice::WipeOnFork,
            Advice::DoDump,
            Advice::Collapse,
            Advice::PopulateRead,
            Advice::PopulateWrite,
            Advice::GuardInstall,
            Advice::GuardRemove,
        ];
        for advice in Advice::ALL {
            let expected = match advice {
                Advice::Remove => Err(Error::NoContent),
                advice if refused.contains(advice) => Err(Error::Invalid),
                _ => Ok(()),
            };
            assert_eq!(space.madvise(at, length, *advice), expected, "{advice:?}");
        }
        assert!(leaf(&space, AT).is_some(), "no advice has unmapped it");
        // The mapping cannot grow, and the attempt leaves nothing behind.
        let grown = space.mremap(at, length, 2 * length, Remap::MayMove);
        assert_eq!(grown, Err(Error::Fault(VirtAddr(AT + length))));
        assert_eq!(space.mremap(at, 0, length, Remap::MayMove), Err(Error::Fault(at)));
        let left = Remap::Leave(VirtAddr(2 * AT));
        assert_eq!(space.mremap(at, length, length, left), Err(Error::Invalid));
        // Its pages cannot be locked or pinned, and no other process can read them.
        assert_eq!(space.mlock(at, length, LockPages::Now), Ok(()));
        assert_eq!(space.usage().locked, 0);
        let pinned = space.pin(at, 1, Access::Read, PinTime::Short).map(drop);
        assert_eq!(pinned, Err(PinError::Fault(FaultError::Protection)));
        let mut bytes = [0];
        assert_eq!(space.read_foreign(at, &mut bytes), Err(FaultError::Protection));
        assert_eq!(space.read_user(at, &mut bytes), Err(FaultError::Protection));
        space.mincore(at, length, |there, _| assert_eq!(there, Residence::Absent)).unwrap();
        let mut text = String::new();
        proc::smaps(&space, &Unnamed, &mut text).unwrap();
        assert!(text.contains("Rss:                   0 kB\n"), "{text}");
        assert!(text.contains("VmFlags: rd wr sh mr mw ms pf io "), "{text}");
    });
}

#[test]
fn handles_have_no_content() {
    with_device(|memory, object, driver| {
        assert!(object.shows_frames());
        assert_eq!(object.read(0, &mut [0]), Err(Error::Invalid));
        assert_eq!(object.write(0, &[0]), Err(Error::Invalid));
        assert_eq!(object.set_size(2 * MIB), Err(Error::Invalid));
        let empty = memory.frame_object(driver, 0, MemoryType::Device).unwrap();
        assert_eq!(empty.set_size(MIB), Err(Error::Invalid), "also once");
        assert_eq!(object.punch_hole(0, PAGE_SIZE), Err(Error::NoContent));
        let allocated = object.allocate(0, PAGE_SIZE, bindery::Growth::Allowed);
        assert_eq!(allocated, Err(Error::NoContent));
        assert_eq!(object.add_seals(Seals::GROW), Err(Error::Invalid));
        assert_eq!((object.next_data(5), object.next_hole(5)), (Some(5), Some(MIB)));
        assert_eq!(object.sync(0, MIB), Ok(()));
    });
}

#[test]
fn a_private_device_mapping_is_never_writable() {
    with_device(|memory, object, _| {
        let space = AddressSpace::new(memory, options()).unwrap();
        assert_eq!(map(&space, object, &fixed(AT, PAGE_SIZE)), Err(Error::Invalid));
        let request = MapRequest { protection: Protection::READ, ..fixed(AT, PAGE_SIZE) };
        map(&space, object, &request).unwrap();
        space.fault(VirtAddr(AT), Access::Read).unwrap();
        let denied = space.mprotect(VirtAddr(AT), PAGE_SIZE, READ_WRITE);
        assert_eq!(denied, Err(Error::AccessDenied));
        assert_eq!(space.reap(), Ok(()));
        assert!(leaf(&space, AT).is_some(), "not a content of the process");
    });
}

#[test]
fn the_source_follows_every_mapping() {
    with_device(|memory, object, driver| {
        let space = AddressSpace::new(memory, options()).unwrap();
        map(&space, object, &shared(AT, 16 * PAGE_SIZE)).unwrap();
        assert_eq!(driver.mappings(), 1);
        space.munmap(VirtAddr(AT + 4 * PAGE_SIZE), PAGE_SIZE).unwrap();
        assert_eq!(driver.mappings(), 2, "a hole makes two of one");
        let child = space.fork().unwrap();
        assert_eq!(driver.mappings(), 4);
        drop(child);
        assert_eq!(driver.mappings(), 2);
        // Neighbors do not merge: each is a separate mapping of the driver's.
        map(&space, object, &shared(2 * AT, PAGE_SIZE)).unwrap();
        let next = MapObject { object, offset: PAGE_SIZE, access: BOTH };
        space.mmap_object(&shared(2 * AT + PAGE_SIZE, PAGE_SIZE), &next).unwrap();
        assert_eq!((driver.mappings(), space.mapping_count()), (4, 4));
    });
}

#[test]
fn the_source_hears_of_every_move() {
    with_device(|memory, object, driver| {
        let space = AddressSpace::new(memory, options()).unwrap();
        let at = |page: u64| VirtAddr(AT + page * PAGE_SIZE);
        let told = || (driver.take_made_and_removed(), driver.take_moves());
        let made_and_removed = |made, removed| ((made, removed), Vec::new());
        let move_to = |from, pages: u64, to| {
            let length = pages * PAGE_SIZE;
            space.mremap(from, length, length, Remap::To(to)).unwrap();
        };
        map(&space, object, &shared(AT, 16 * PAGE_SIZE)).unwrap();
        space.fault(at(0), Access::Write).unwrap();
        assert_eq!(told(), made_and_removed(1, 0));
        // Between its neighbors, a mapping moves as it is; past a neighbor, it is made anew.
        move_to(at(0), 16, at(100));
        assert_eq!(told(), ((0, 0), vec![(AT, 16, at(100).0)]));
        space.mmap(&fixed(at(200).0, PAGE_SIZE)).unwrap();
        move_to(at(100), 16, at(300));
        assert_eq!(told(), ((1, 1), vec![(at(100).0, 16, at(300).0)]));
        // A part from the middle: the parts around it are two mappings.
        move_to(at(304), 4, at(0));
        assert_eq!((driver.mappings(), space.mapping_count()), (3, 4));
        assert_eq!(told(), ((3, 1), vec![(at(304).0, 4, AT)]));
        move_to(at(308), 2, at(20));
        move_to(at(314), 2, at(30));
        let moves = vec![(at(308).0, 2, at(20).0), (at(314).0, 2, at(30).0)];
        assert_eq!(told(), ((4, 2), moves));
        // A part that is unmapped: at an end, by a smaller size, in the middle.
        space.munmap(at(310), PAGE_SIZE).unwrap();
        space.mremap(at(311), 3 * PAGE_SIZE, 2 * PAGE_SIZE, Remap::InPlace).unwrap();
        assert_eq!(told(), made_and_removed(2, 2));
        space.munmap(at(1), PAGE_SIZE).unwrap();
        assert_eq!(told(), made_and_removed(2, 1));
        // Several mappings, the last of which is sealed.
        let first = VirtAddr(4 * AT);
        map(&space, object, &shared(first.0, PAGE_SIZE)).unwrap();
        map(&space, object, &shared(first.0 + PAGE_SIZE, PAGE_SIZE)).unwrap();
        space.mseal(VirtAddr(first.0 + PAGE_SIZE), PAGE_SIZE).unwrap();
        told();
        let both = space.mremap(first, 2 * PAGE_SIZE, 2 * PAGE_SIZE, Remap::To(at(500)));
        assert_eq!(both, Err(Error::Sealed(VirtAddr(first.0 + PAGE_SIZE))));
        let (_, moves) = told();
        assert_eq!(moves, [(first.0, 1, at(500).0)], "what has really moved");
        assert_eq!(leaf(&space, first.0), None);
    });
}

#[test]
fn the_source_hears_of_no_move_that_fails() {
    let (machine, memory) = strict::<X86>(4 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 16)]);
    let object = memory.frame_object(&driver, MIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let (at, length) = (VirtAddr(AT), 16 * PAGE_SIZE);
    map(&space, &object, &shared(AT, length)).unwrap();
    space.fault(at, Access::Write).unwrap();
    driver.take_made_and_removed();
    let to = VirtAddr(2 * AT);
    space.mremap(at, length, 2 * length, Remap::MayMove).unwrap_err();
    space.mremap(at, length, length, Remap::Leave(to)).unwrap_err();
    space.mremap(at, length, length, Remap::LeaveTo(to)).unwrap_err();
    for (source, pages) in [(at, 16), (VirtAddr(2 * AT + 4 * PAGE_SIZE), 4)] {
        let (length, to) = (pages * PAGE_SIZE, VirtAddr(source.0 + AT));
        for allowed in 0.. {
            memory.fail_allocations_after(Some(allowed));
            let moved = space.mremap(source, length, length, Remap::To(to));
            memory.fail_allocations_after(None);
            audit(&machine, &memory, &[&space]);
            if moved == Ok(to) {
                break;
            }
            assert_eq!(moved, Err(Error::OutOfMemory));
            assert_eq!((driver.take_made_and_removed(), driver.take_moves()), ((0, 0), vec![]));
        }
        assert_eq!(driver.take_moves(), [(source.0, pages, to.0)]);
        driver.take_made_and_removed();
    }
    for allowed in 0.. {
        memory.fail_allocations_after(Some(allowed));
        let child = space.fork();
        memory.fail_allocations_after(None);
        if let Ok(child) = child {
            assert_eq!(driver.take_made_and_removed(), (3, 0));
            drop(child);
            break;
        }
        let (made, removed) = driver.take_made_and_removed();
        assert_eq!(made, removed, "a child that fails has no mappings");
    }
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

/// Linux's vDSO does not consist of such frames. Its pages are folios, and a debugger copies them.
#[test]
fn an_embedders_mapping_neither_grows_nor_merges() {
    let (machine, memory) = strict::<X86>(32 * MIB);
    let image =
        memory.shared_memory(2 * PAGE_SIZE, bindery::Sealing::Forbidden, bindery::Accounting::None);
    let image = image.unwrap();
    image.write(0, b"code").unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let at = VirtAddr(AT);
    let request = MapRequest {
        protection: Protection::READ | Protection::EXECUTE,
        flags: MapFlags::DONT_EXPAND | MapFlags::LOCKED,
        ..fixed(AT, PAGE_SIZE)
    };
    let source = |offset| MapObject { object: &image, offset, access: FileAccess::READ };
    space.mmap_object(&request, &source(0)).unwrap();
    let next = MapRequest { place: bindery::Place::Fixed(next_page(at)), ..request };
    space.mmap_object(&next, &source(PAGE_SIZE)).unwrap();
    assert_eq!((space.mapping_count(), space.usage().locked), (2, 0));
    space.munmap(next_page(at), PAGE_SIZE).unwrap();
    let grown = space.mremap(at, PAGE_SIZE, 2 * PAGE_SIZE, Remap::MayMove);
    assert_eq!(grown, Err(Error::Fault(next_page(at))));
    for advice in [Advice::DoDump, Advice::GuardInstall] {
        assert_eq!(space.madvise(at, PAGE_SIZE, advice), Err(Error::Invalid));
    }
    assert_eq!(space.madvise(at, PAGE_SIZE, Advice::DontNeed), Ok(()));
    // A breakpoint is private to the program.
    space.mprotect(at, PAGE_SIZE, READ_WRITE).unwrap();
    space.write_user(at, b"trap").unwrap();
    let mut bytes = [0; 4];
    image.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"code");
    let moved = space.mremap(at, PAGE_SIZE, PAGE_SIZE, Remap::To(VirtAddr(2 * AT)));
    assert_eq!(moved, Ok(VirtAddr(2 * AT)), "it may move");
    let mut text = String::new();
    proc::smaps(&space, &Unnamed, &mut text).unwrap();
    assert!(text.contains(" de "), "{text}");
    audit(&machine, &memory, &[&space]);
}

fn next_page(at: VirtAddr) -> VirtAddr {
    VirtAddr(at.0 + PAGE_SIZE)
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
