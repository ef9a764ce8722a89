//! Frames that are not the core's, mapped by one leaf of 1 GiB: calls on the whole leaf and on parts
//! of it.

use bindery::addr::{Frame, Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{Absent, MemoryType};
use bindery::{
    Access, AddressSpace, Error, FaultError, Inspection, MapObject, MapRequest, Memory, Object,
    Protection, Remap, Resolved, Sharing,
};
use bindery_hosted::{Config, Machine, Program, Walk};

use super::frames::{HUGE, X86, stored};
use crate::support::devices::{BOTH, DEVICE, Driver, leaf, map, shared};
use crate::support::{GIB, MIB, READ_WRITE, anywhere, audit, fixed, memory_with, options, strict};

const AT: u64 = 4 * GIB;
/// The pages of a gibibyte.
const PAGES: u32 = (GIB / PAGE_SIZE) as u32;
/// The tables with which a leaf of 1 GiB can be cut down to pages.
const DEPOSITS: u64 = 513;

on_every_architecture! {
    one_leaf_maps_a_gibibyte => whole;
    a_part_of_a_gibibyte_is_cut_out => partial_calls;
    a_gibibyte_moves_as_one_entry => moved;
    a_gibibyte_moves_to_an_address_not_congruent => moved_elsewhere;
    a_child_has_the_gibibyte_of_its_parent => forked;
    a_gibibyte_without_access_keeps_its_entry => hidden;
    a_page_of_a_gibibyte_is_copied => private;
    smaller_leaves_remain_where_they_are => beside_smaller;
}

/// A device of two gibibytes, aligned to one, and a memory of 64 MiB.
fn with_device<A: Walk>(
    memory_type: MemoryType,
    scenario: impl for<'m> FnOnce(
        &Machine<A>,
        &'m Memory<Machine<A>>,
        &Object<'m, Machine<A>>,
        &AddressSpace<'m, Machine<A>>,
    ),
) {
    let (machine, memory) = strict::<A>(64 * MIB);
    let driver = Driver::of(&[(0, DEVICE, 2 * PAGES)]);
    let object = memory.frame_object(&driver, 2 * GIB, memory_type).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    scenario(&machine, &memory, &object, &space);
    audit(&machine, &memory, &[&space]);
    drop(space);
    assert_eq!(driver.mappings(), 0);
    audit(&machine, &memory, &[]);
}

/// The frame and the level of the leaf at an address, whose memory type is `Device`.
fn device<A: Walk>(space: &AddressSpace<'_, Machine<A>>, at: u64) -> Option<(Frame, u8)> {
    leaf(space, at).map(|(frame, memory, level)| {
        assert_eq!(memory, stored::<A>(MemoryType::Device), "{at:#x}");
        (frame, level)
    })
}

fn whole<A: Walk>() {
    with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
        map(space, object, &shared(AT, 2 * GIB)).unwrap();
        let before = space.counts();
        let resolved = space.fault(VirtAddr(AT + GIB - PAGE_SIZE), Access::Write);
        let Ok(Resolved::Mapped(range)) = resolved else { panic!("{resolved:?}") };
        assert_eq!((range.start().0, range.len()), (AT, GIB));
        let work = space.counts() - before;
        assert!(work.entries_written <= 1 + u64::from(A::LEVELS), "{work:?}");
        assert_eq!(device(space, AT), Some((DEVICE, 3)));
        assert_eq!(device(space, AT + GIB), None);
        let program = Program::new(machine, space);
        assert_eq!(program.load(VirtAddr(AT + GIB - 8)), Ok(u64::MAX), "a bus without a device");
        program.load(VirtAddr(AT + GIB + 8)).unwrap();
        assert_eq!(device(space, AT + GIB), Some((DEVICE.plus(PAGES), 3)));
        audit(machine, memory, &[space]);
        // Each of the calls writes one entry for a gibibyte.
        let before = space.counts();
        space.mprotect(VirtAddr(AT), GIB, Protection::READ).unwrap();
        let work = space.counts() - before;
        assert_eq!(work.entries_written, 1, "{work:?}");
        assert_eq!(device(space, AT), Some((DEVICE, 3)));
        assert_eq!(program.store(VirtAddr(AT + 8), 1), Err(FaultError::Protection));
        let before = space.counts();
        space.munmap(VirtAddr(AT), GIB).unwrap();
        let work = space.counts() - before;
        assert_eq!((work.entries_written, work.tables_freed), (2, DEPOSITS), "{work:?}");
        assert_eq!(
            (device(space, AT), device(space, AT + GIB)),
            (None, Some((DEVICE.plus(PAGES), 3)))
        );
        object.revoke(GIB, GIB).unwrap();
        assert_eq!(device(space, AT + GIB), None);
    });
}

fn partial_calls<A: Walk>() {
    let page = AT + 5 * HUGE + 7 * PAGE_SIZE;
    let entire = |space: &AddressSpace<'_, Machine<A>>| {
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        assert_eq!(device(space, AT), Some((DEVICE, 3)));
    };
    // After a call on one page of the leaf, everything else is mapped, in the largest leaves.
    let rest_is_mapped = |space: &AddressSpace<'_, Machine<A>>| {
        for (at, level) in [(AT, 2), (AT + 5 * HUGE, 1), (page + PAGE_SIZE, 1), (AT + 6 * HUGE, 2)]
        {
            let frame = DEVICE.plus(((at - AT) / PAGE_SIZE) as u32);
            assert_eq!(device(space, at), Some((frame, level)), "{at:#x}");
        }
    };
    type Call<A> = fn(&AddressSpace<'_, Machine<A>>, &Object<'_, Machine<A>>, VirtAddr);
    let calls: [Call<A>; 4] = [
        |space, _, page| space.munmap(page, PAGE_SIZE).unwrap(),
        |space, _, page| space.mprotect(page, PAGE_SIZE, Protection::empty()).unwrap(),
        |space, _, page| {
            let to = Remap::To(VirtAddr(AT + 8 * GIB));
            space.mremap(page, PAGE_SIZE, PAGE_SIZE, to).unwrap();
            assert_eq!(device(space, AT + 8 * GIB).map(|found| found.1), Some(1));
        },
        |space, object, page| object.revoke(page.0 - AT, PAGE_SIZE).map(|()| _ = space).unwrap(),
    ];
    for call in calls {
        with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
            map(space, object, &shared(AT, GIB)).unwrap();
            entire(space);
            // No cut needs memory for tables.
            let before = space.counts();
            call(space, object, VirtAddr(page));
            let made = (space.counts() - before).tables_allocated;
            assert!(made <= u64::from(A::LEVELS), "{made} tables");
            assert_eq!(device(space, page), None);
            rest_is_mapped(space);
            audit(machine, memory, &[space]);
        });
    }
    // Between two multiples of 2 MiB, no leaf becomes smaller than that.
    with_device::<A>(MemoryType::Device, |_, _, object, space| {
        map(space, object, &shared(AT, GIB)).unwrap();
        entire(space);
        space.munmap(VirtAddr(AT + 5 * HUGE), 3 * HUGE).unwrap();
        assert_eq!(device(space, AT + 5 * HUGE), None);
        assert_eq!(device(space, AT + 4 * HUGE), Some((DEVICE.plus(4 * 512), 2)));
        assert_eq!(device(space, AT + 8 * HUGE), Some((DEVICE.plus(8 * 512), 2)));
    });
}

fn moved<A: Walk>() {
    with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
        map(space, object, &shared(AT, 2 * GIB)).unwrap();
        space.fault(VirtAddr(AT + GIB), Access::Write).unwrap();
        let before = space.counts();
        let to = Remap::To(VirtAddr(AT + 8 * GIB));
        space.mremap(VirtAddr(AT), 2 * GIB, 2 * GIB, to).unwrap();
        let work = space.counts() - before;
        assert!(work.entries_written <= 2 + 2 * u64::from(A::LEVELS), "{work:?}");
        assert_eq!(device(space, AT + 9 * GIB), Some((DEVICE.plus(PAGES), 3)));
        assert_eq!((device(space, AT), device(space, AT + GIB)), (None, None));
        audit(machine, memory, &[space]);
        // Its tables have moved along.
        space.munmap(VirtAddr(AT + 9 * GIB + HUGE), HUGE).unwrap();
        assert_eq!(device(space, AT + 9 * GIB), Some((DEVICE.plus(PAGES), 2)));
    });
}

fn moved_elsewhere<A: Walk>() {
    for (shift, level) in [(HUGE, 2), (PAGE_SIZE, 1)] {
        with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
            map(space, object, &shared(AT, GIB)).unwrap();
            space.fault(VirtAddr(AT), Access::Write).unwrap();
            let to = AT + 8 * GIB + shift;
            space.mremap(VirtAddr(AT), GIB, GIB, Remap::To(VirtAddr(to))).unwrap();
            for at in [0, 3 * HUGE, GIB - HUGE] {
                let frame = DEVICE.plus((at / PAGE_SIZE) as u32);
                assert_eq!(device(space, to + at), Some((frame, level)), "{at:#x}");
                assert_eq!(device(space, AT + at), None);
            }
            audit(machine, memory, &[space]);
        });
    }
}

fn forked<A: Walk>() {
    with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
        map(space, object, &shared(AT, 2 * GIB)).unwrap();
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        space.fault(VirtAddr(AT + GIB), Access::Write).unwrap();
        // Base pages before the leaf and after it, in tables of their own.
        for at in [AT - HUGE, AT + 2 * GIB] {
            space.mmap(&fixed(at, HUGE)).unwrap();
            space.fault(VirtAddr(at), Access::Write).unwrap();
        }
        let child = space.fork().unwrap();
        for space in [space, &child] {
            assert_eq!(device(space, AT), Some((DEVICE, 3)));
            assert_eq!(device(space, AT + GIB), Some((DEVICE.plus(PAGES), 3)));
        }
        audit(machine, memory, &[space, &child]);
        child.munmap(VirtAddr(AT + PAGE_SIZE), PAGE_SIZE).unwrap();
        assert_eq!((device(space, AT), device(&child, AT)), (Some((DEVICE, 3)), Some((DEVICE, 1))));
        object.revoke(0, PAGE_SIZE).unwrap();
        assert_eq!((device(space, AT), device(&child, AT)), (None, None));
        assert_eq!(device(space, AT + HUGE), Some((DEVICE.plus(512), 2)));
        audit(machine, memory, &[space, &child]);
    });
}

fn hidden<A: Walk>() {
    with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
        map(space, object, &shared(AT, GIB)).unwrap();
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        space.mprotect(VirtAddr(AT), GIB, Protection::empty()).unwrap();
        let is_hidden = |space: &AddressSpace<'_, Machine<A>>, at: u64, page: u32| {
            let found = space.inspect(VirtAddr(at));
            let Inspection::Absent(Absent::ProtNone { frame, memory, .. }) = found else {
                panic!("{found:?}")
            };
            assert_eq!((frame, memory), (DEVICE.plus(page), stored::<A>(MemoryType::Device)));
        };
        is_hidden(space, AT + 3 * PAGE_SIZE, 3);
        let child = space.fork().unwrap();
        is_hidden(&child, AT + GIB - PAGE_SIZE, PAGES - 1);
        audit(machine, memory, &[space, &child]);
        let to = AT + 16 * GIB;
        space.mremap(VirtAddr(AT), GIB, GIB, Remap::To(VirtAddr(to))).unwrap();
        is_hidden(space, to + HUGE, 512);
        audit(machine, memory, &[space, &child]);
        // A part becomes accessible.
        space.mprotect(VirtAddr(to + HUGE), PAGE_SIZE, READ_WRITE).unwrap();
        assert_eq!(device(space, to + HUGE), Some((DEVICE.plus(512), 1)));
        is_hidden(space, to + HUGE + PAGE_SIZE, 513);
        is_hidden(space, to + GIB - PAGE_SIZE, PAGES - 1);
        child.mprotect(VirtAddr(AT), GIB, READ_WRITE).unwrap();
        assert_eq!(device(&child, AT), Some((DEVICE, 3)));
        audit(machine, memory, &[space, &child]);
    });
}

fn private<A: Walk>() {
    with_device::<A>(MemoryType::Normal, |machine, memory, object, space| {
        let request = MapRequest { sharing: Sharing::Private, ..fixed(AT, GIB) };
        let source = MapObject { object, offset: 0, access: BOTH };
        space.mmap_object(&request, &source).unwrap();
        space.fault(VirtAddr(AT + HUGE), Access::Read).unwrap();
        assert_eq!(leaf(space, AT).map(|leaf| leaf.2), Some(3));
        // The direct map has no such frames, so a write fails, and the pages stay.
        assert_eq!(space.fault(VirtAddr(AT + HUGE), Access::Write), Err(FaultError::Bus));
        assert_eq!(leaf(space, AT + HUGE + PAGE_SIZE).map(|leaf| leaf.0), Some(DEVICE.plus(513)));
        audit(machine, memory, &[space]);
    });
}

fn beside_smaller<A: Walk>() {
    with_device::<A>(MemoryType::Device, |machine, memory, object, space| {
        map(space, object, &shared(AT, GIB)).unwrap();
        space.fault(VirtAddr(AT), Access::Write).unwrap();
        object.revoke(HUGE, HUGE).unwrap();
        space.fault(VirtAddr(AT + HUGE), Access::Write).unwrap();
        assert_eq!(device(space, AT + HUGE), Some((DEVICE.plus(512), 2)));
        object.revoke(2 * HUGE + PAGE_SIZE, PAGE_SIZE).unwrap();
        space.fault(VirtAddr(AT + 2 * HUGE + PAGE_SIZE), Access::Write).unwrap();
        assert_eq!(device(space, AT + 2 * HUGE + PAGE_SIZE), Some((DEVICE.plus(1025), 1)));
        audit(machine, memory, &[space]);
    });
}

#[test]
fn a_chosen_address_is_congruent_modulo_a_gibibyte() {
    let (_machine, memory) = strict::<X86>(32 * MIB);
    let driver = Driver::of(&[(0, DEVICE.plus(3 * 512), 2 * PAGES)]);
    let object = memory.frame_object(&driver, 2 * GIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    for (length, congruent) in [(2 * GIB, GIB), (GIB, HUGE)] {
        let request = MapRequest { sharing: Sharing::Shared, ..anywhere(length) };
        let at = map(&space, &object, &request).unwrap();
        assert_eq!(at.0 % congruent, (3 * HUGE) % congruent, "{at}");
    }
}

#[test]
fn a_machine_may_lack_leaves_of_a_gibibyte() {
    let config = Config { memory: 32 * MIB, gibibyte_leaves: false, ..Config::default() };
    let (machine, memory) = memory_with::<X86>(config);
    let driver = Driver::of(&[(0, DEVICE, PAGES)]);
    let object = memory.frame_object(&driver, GIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, GIB)).unwrap();
    space.fault(VirtAddr(AT + HUGE), Access::Write).unwrap();
    assert_eq!(
        (device(&space, AT), device(&space, AT + HUGE)),
        (None, Some((DEVICE.plus(512), 2)))
    );
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_fault_without_memory_maps_nothing() {
    let (machine, memory) = strict::<X86>(16 * MIB);
    let driver = Driver::of(&[(0, DEVICE, PAGES)]);
    let object = memory.frame_object(&driver, GIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, GIB)).unwrap();
    for allowed in [0, 1, 2, 100, 512, 513, 514, 515] {
        memory.fail_allocations_after(Some(allowed));
        let resolved = space.fault(VirtAddr(AT), Access::Write);
        memory.fail_allocations_after(None);
        audit(&machine, &memory, &[&space]);
        if allowed > DEPOSITS {
            assert_eq!((resolved.is_ok(), device(&space, AT)), (true, Some((DEVICE, 3))));
            object.revoke(0, GIB).unwrap();
        } else {
            let nothing = (Err(FaultError::OutOfMemory), None);
            assert_eq!((resolved, device(&space, AT)), nothing, "{allowed} tables");
        }
    }
}

/// The memory has room for the tables of a leaf of 2 MiB.
#[test]
fn with_little_memory_a_gibibyte_is_mapped_smaller() {
    let (machine, memory) = strict::<X86>(16 * MIB);
    let driver = Driver::of(&[(0, DEVICE, PAGES)]);
    let object = memory.frame_object(&driver, GIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, GIB)).unwrap();
    let mut taken = Vec::new();
    while memory.free_frame_count() > DEPOSITS - 10 {
        taken.push(memory.allocate_frames(Order(0)).unwrap());
    }
    space.fault(VirtAddr(AT + HUGE), Access::Write).unwrap();
    assert_eq!(
        (device(&space, AT), device(&space, AT + HUGE)),
        (None, Some((DEVICE.plus(512), 2)))
    );
    audit(&machine, &memory, &[&space]);
    for block in taken {
        // SAFETY: 1. the test allocated the block; 2. no program maps it.
        assert!(unsafe { memory.free_frames(block) });
    }
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_fork_without_memory_keeps_the_gibibyte() {
    let (machine, memory) = strict::<X86>(16 * MIB);
    let driver = Driver::of(&[(0, DEVICE, PAGES)]);
    let object = memory.frame_object(&driver, GIB, MemoryType::Device).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    map(&space, &object, &shared(AT, GIB)).unwrap();
    space.fault(VirtAddr(AT), Access::Write).unwrap();
    let mut failed = 0;
    for allowed in (0..).step_by(31) {
        memory.fail_allocations_after(Some(allowed));
        let child = space.fork();
        memory.fail_allocations_after(None);
        assert_eq!(device(&space, AT), Some((DEVICE, 3)));
        match child {
            Ok(child) => {
                assert_eq!(device(&child, AT), Some((DEVICE, 3)));
                audit(&machine, &memory, &[&space, &child]);
                break;
            }
            Err(error) => assert_eq!(error, Error::OutOfMemory),
        }
        audit(&machine, &memory, &[&space]);
        failed += 1;
    }
    assert!(failed > DEPOSITS / 31, "the child's leaf has tables of its own");
}
