//! Memory runs out at every single point of every operation, on every architecture. The operation
//! fails or falls back to another way, the caller loses no data, nothing leaks, and the operation
//! succeeds once memory is available again.

use bindery::addr::VirtAddr;
use bindery::arch::Level;
use bindery::testing::{self, leak_frame};
use bindery::{Access, AddressSpace, Error, Protection};
use bindery_hosted::Walk;

use super::shortage::{
    AT, CROSSING, Case, Folios, Layout, VerbOf, at_every_point, filled, huge, moved, no_memory,
    no_memory_for_folio, two_tables, zero,
};
use crate::support::fixture::with_fixture;
use crate::support::{self, GIB, MIB, READ_WRITE_EXECUTE, anywhere, audit, fixed, options, strict};

const PAGE: u64 = 4096;

on_every_architecture! {
    a_new_address_space => new;
    mapping => map;
    mapping_over_the_middle_of_another => map_over;
    unmapping_the_middle => unmap_middle;
    unmapping_a_part_of_a_huge_leaf => unmap_in_huge;
    discarding_a_part_of_a_huge_leaf => discard_in_huge;
    protecting_the_middle => protect_middle;
    protecting_a_part_of_a_huge_leaf => protect_in_huge;
    protecting_two_mappings => protect_two;
    a_first_touch => touch;
    a_first_read => read_zeroes;
    a_write_to_a_page_of_zeroes => write_over_zero;
    a_copy_on_write => copy;
    forking => fork;
    collapsing => collapse;
}

fn new<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| AddressSpace::new(space.memory(), options()).map(|_| (0, None)),
        ..two_tables()
    });
    assert_eq!(points, 2, "the root, and the tree's state");
}

#[test]
fn memory_that_really_runs_out_is_no_different() {
    let (machine, memory) = strict::<bindery::arch::X86_64<4>>(16 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, GIB)).unwrap();
    let mut touched = 0;
    while space.fault(VirtAddr(AT + touched * PAGE), Access::Write).is_ok() {
        touched += 1;
    }
    assert_eq!(memory.free_frame_count(), 0);
    assert!(touched > 3000, "{touched}");
    audit(&machine, &memory, &[&space]);
    space.munmap(VirtAddr(AT), PAGE).unwrap();
    assert_eq!(memory.free_frame_count(), 1);
    space.fault(VirtAddr(AT + touched * PAGE), Access::Write).unwrap();
    assert_eq!(memory.free_frame_count(), 0);
    audit(&machine, &memory, &[&space]);
}

fn map<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| Ok((space.mmap(&anywhere(8 * PAGE))?.0, None)),
        after: |at| vec![filled(CROSSING, 16), zero(at, 8)],
        ..two_tables()
    });
    assert_eq!(points, 1, "the VMA");
}

fn map_over<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| Ok((space.mmap(&fixed(CROSSING + 4 * PAGE, 8 * PAGE))?.0, None)),
        after: |at| vec![filled(CROSSING, 4), zero(at, 8), moved(CROSSING + 12, at + 8 * PAGE, 4)],
        ..two_tables()
    });
    assert_eq!(points, 2, "the VMA, and the one that is cut off");
}

fn unmap_middle<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            space.munmap(VirtAddr(CROSSING + 4 * PAGE), 8 * PAGE).map(|()| (0, None))
        },
        after: |_| vec![filled(CROSSING, 4), moved(CROSSING + 12, CROSSING + 12 * PAGE, 4)],
        ..two_tables()
    });
    assert_eq!(points, 1, "the VMA that is cut off");
}

fn unmap_in_huge<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| space.munmap(VirtAddr(AT + 3 * PAGE), 99 * PAGE).map(|()| (0, None)),
        after: |_| vec![filled(AT, 3), moved(AT + 102, AT + 102 * PAGE, 410)],
        ..huge()
    });
    assert_eq!(points, 1, "the table is on deposit");
}

fn discard_in_huge<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| space.discard(VirtAddr(AT + 3 * PAGE), 99 * PAGE).map(|()| (0, None)),
        after: |_| {
            vec![filled(AT, 3), zero(AT + 3 * PAGE, 99), moved(AT + 102, AT + 102 * PAGE, 410)]
        },
        ..huge()
    });
    assert_eq!(points, 0, "the table is on deposit");
}

fn protect_middle<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let middle = VirtAddr(CROSSING + 4 * PAGE);
            space.mprotect(middle, 8 * PAGE, Protection::READ).map(|()| (0, None))
        },
        ..two_tables()
    });
    assert_eq!(points, 2, "three VMAs of one");
}

fn protect_in_huge<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let middle = VirtAddr(AT + 3 * PAGE);
            space.mprotect(middle, 99 * PAGE, Protection::READ).map(|()| (0, None))
        },
        ..huge()
    });
    assert_eq!(points, 2, "the table is on deposit");
}

/// The second mapping cannot be split; the first is already protected, as documented.
fn protect_two<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            fixture.space.mmap(&fixed(CROSSING, 16 * PAGE)).unwrap();
            fixture.fill(CROSSING, 16);
            let upper = VirtAddr(CROSSING + 8 * PAGE);
            let all = READ_WRITE_EXECUTE;
            fixture.space.mprotect(upper, 8 * PAGE, all).unwrap();
        },
        operation: |space| {
            let second = VirtAddr(CROSSING + 2 * PAGE);
            let done = space.mprotect(second, 12 * PAGE, Protection::READ).map(|()| (0, None));
            // Restores write access, so that existing pages can be written after any outcome.
            if done.is_err() {
                space.memory().fail_allocations_after(None);
                let failures = testing::failed_allocations(space.memory());
                space.mprotect(second, 6 * PAGE, support::READ_WRITE).unwrap();
                assert_eq!(testing::failed_allocations(space.memory()), failures);
            }
            done
        },
        layout: Layout::MayDiffer,
        ..two_tables()
    });
    assert_eq!(points, 2);
}

/// 4 MiB that were never touched; faults at `AT`.
fn untouched<A: Walk>(order: u8, operation: VerbOf<A>) -> u64 {
    at_every_point(&Case {
        order,
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        },
        operation,
        before: vec![],
        after: |_| vec![zero(AT, 1024)],
        ..two_tables()
    })
}

fn touch<A: Walk>() {
    for order in [0, 1, 4, 8, 9] {
        let points = untouched::<A>(order, |space| {
            space.fault(VirtAddr(AT + 5 * PAGE), Access::Write).map_err(no_memory)?;
            Ok((0, None))
        });
        // Allocations: the mapping's group, the folio, and its tables. A huge folio needs a
        // deposited table instead of the lowest.
        assert_eq!(points, 1 + u64::from(A::LEVELS), "order {order}");
    }
}

fn read_zeroes<A: Walk>() {
    let points = untouched::<A>(9, |space| {
        space.fault(VirtAddr(AT + 5 * PAGE), Access::Read).map_err(no_memory)?;
        Ok((0, None))
    });
    assert_eq!(points, u64::from(A::LEVELS - 1));
}

fn write_over_zero<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
            assert_eq!(fixture.program.load(VirtAddr(AT)), Ok(0));
        },
        operation: |space| {
            space.fault(VirtAddr(AT), Access::Write).map_err(no_memory)?;
            Ok((0, None))
        },
        before: vec![],
        after: |_| vec![zero(AT, 4)],
        ..two_tables()
    });
    assert_eq!(points, 2, "the mapping's group, and the page");
}

fn copy<A: Walk>() {
    for (order, set_up) in [(0, two_tables::<A>()), (4, two_tables()), (9, huge())] {
        let points = at_every_point::<A>(&Case {
            order,
            folios: Folios::SharedWithChild,
            operation: |space| {
                let mut at = VirtAddr(CROSSING + 9 * PAGE);
                if space.inspect(at) == bindery::Inspection::Empty {
                    at = VirtAddr(AT + 9 * PAGE);
                }
                space.fault(at, Access::Write).map_err(no_memory)?;
                Ok((0, None))
            },
            ..set_up
        });
        assert_eq!(points, 1, "the copy, order {order}");
    }
}

fn fork<A: Walk>() {
    for (order, set_up, tables) in [(0, two_tables::<A>(), 2), (4, two_tables(), 2), (9, huge(), 1)]
    {
        let points = at_every_point::<A>(&Case {
            order,
            operation: |space| Ok((0, Some(space.fork()?))),
            ..set_up
        });
        // Allocations: the tree's state and root, the VMA and its group, a table on each upper
        // level, and either the level-1 tables or a deposit.
        assert_eq!(points, 4 + u64::from(A::LEVELS - 2) + tables, "order {order}");
    }
}

fn collapse<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            (huge().set_up)(fixture);
            fixture.space.mprotect(VirtAddr(AT), PAGE, Protection::READ).unwrap();
            fixture.space.mprotect(VirtAddr(AT), PAGE, support::READ_WRITE).unwrap();
        },
        operation: |space| {
            space.join_leaves(VirtAddr(AT)).map_err(no_memory_for_folio)?;
            assert!(testing::table_at(space, VirtAddr(AT), Level::PTE).is_none());
            Ok((0, None))
        },
        ..huge()
    });
    assert_eq!(points, 1, "the table on deposit");
}

#[test]
fn the_hooks_count_what_they_refuse() {
    with_fixture::<bindery::arch::X86_64<4>>(0, |fixture| {
        let memory = fixture.memory;
        testing::fail_one_allocation(memory, Some(1));
        let frame = leak_frame(memory);
        assert_eq!(testing::failed_allocations(memory), 0);
        assert_eq!(fixture.space.fork().err(), Some(Error::OutOfMemory));
        assert_eq!(testing::failed_allocations(memory), 1);
        drop(fixture.space.fork().unwrap());
        // SAFETY: 1. the frame was leaked above, and no other code knows it.
        unsafe { testing::free_frame(memory, frame) };
    });
}
