//! Each allocation of each call with Linux's full semantics fails in turn. The call fails or
//! manages without the memory, no data is lost, nothing leaks, and the call succeeds once memory is
//! available again.

use bindery::addr::VirtAddr;
use bindery::{
    Advice, Error, FaultError, LockAll, LockPages, MapFlags, MapRequest, PinError, PinTime, Remap,
    Sharing,
};
use bindery_hosted::Walk;

use super::shortage::{
    AT, CROSSING, Case, Folios, Layout, at_every_point, filled, huge, moved, two_tables, zero,
};
use crate::support::{GIB, MIB, READ_WRITE_EXECUTE, anywhere, fixed};

const PAGE: u64 = 4096;

on_every_architecture! {
    mapping_shared_memory => map_shared;
    mapping_populated => map_populated;
    forking_shared_memory => fork_shared;
    locking_the_middle => lock_middle;
    locking_everything => lock_all;
    sealing_the_middle => seal_middle;
    advising_about_the_middle => advise_middle;
    guarding_a_whole_table_span => guard;
    lifting_a_part_of_a_guard => lift_guard;
    collapsing_small_pages => collapse;
    collapsing_what_a_child_shares => collapse_shared;
    moving_several_mappings => move_several;
    moving_and_leaving_the_source => move_and_leave;
    duplicating_a_shared_mapping => duplicate;
    growing_the_heap => grow_heap;
    pinning_what_a_child_shares => pin_shared;
    forking_what_is_pinned => fork_pinned;
}

/// Maps the error of a failed split, which asks for a retry, to the failed allocation that caused
/// it.
fn cut(error: Error) -> Error {
    if error == Error::TryAgain { Error::OutOfMemory } else { error }
}

fn shared(length: u64) -> MapRequest {
    MapRequest { sharing: Sharing::Shared, ..anywhere(length) }
}

fn map_shared<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| Ok((space.mmap(&shared(8 * PAGE))?.0, None)),
        after: |at| vec![filled(CROSSING, 16), zero(at, 8)],
        ..two_tables()
    });
    assert_eq!(points, 2, "the object and the VMA");
}

fn map_populated<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let request = MapRequest { flags: MapFlags::POPULATE, ..anywhere(4 * PAGE) };
            Ok((space.mmap(&request)?.0, None))
        },
        after: |at| vec![filled(CROSSING, 16), zero(at, 4)],
        layout: Layout::MayDiffer,
        ..two_tables()
    });
    assert!(points > 4, "{points}");
}

fn fork_shared<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            let place = fixed(CROSSING, 16 * PAGE);
            fixture.space.mmap(&MapRequest { sharing: Sharing::Shared, ..place }).unwrap();
            fixture.fill(CROSSING, 16);
        },
        operation: |space| Ok((0, Some(space.fork()?))),
        ..two_tables()
    });
    assert_eq!(points, 3, "root, state, VMA: no table and no page");
}

fn lock_middle<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            space.mlock(VirtAddr(CROSSING + 4 * PAGE), 8 * PAGE, LockPages::Now)?;
            Ok((0, None))
        },
        ..two_tables()
    });
    assert_eq!(points, 2, "two VMAs");
}

fn lock_all<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            (two_tables::<A>().set_up)(fixture);
            fixture.space.mmap(&fixed(GIB + 64 * MIB, 4 * PAGE)).unwrap();
        },
        operation: |space| {
            space.mlockall(LockAll::CURRENT)?;
            Ok((0, None))
        },
        layout: Layout::MayDiffer,
        ..two_tables()
    });
    assert!(points >= 4, "pages that cannot be had are done without: {points}");
}

fn seal_middle<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            space.mseal(VirtAddr(CROSSING + 4 * PAGE), 8 * PAGE)?;
            Ok((0, None))
        },
        ..two_tables()
    });
    assert_eq!(points, 2, "two VMAs");
}

fn advise_middle<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let at = VirtAddr(CROSSING + 4 * PAGE);
            space.madvise(at, 8 * PAGE, Advice::DontFork).map_err(cut)?;
            Ok((0, None))
        },
        ..two_tables()
    });
    assert_eq!(points, 2, "two VMAs");
}

fn guard<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        order: 0,
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
            fixture.fill(AT + 3 * MIB, 4);
        },
        operation: |space| {
            space.madvise(VirtAddr(AT), 2 * MIB + PAGE, Advice::GuardInstall)?;
            Ok((0, None))
        },
        before: vec![filled(AT + 3 * MIB, 4)],
        after: |_| vec![filled(AT + 3 * MIB, 4)],
        layout: Layout::MayDiffer,
        ..two_tables()
    });
    assert!(points >= 1, "a table on deposit");
}

fn lift_guard<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        order: 0,
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
            fixture.fill(AT + 3 * MIB, 4);
            fixture.space.madvise(VirtAddr(AT), 2 * MIB, Advice::GuardInstall).unwrap();
        },
        operation: |space| {
            space.madvise(VirtAddr(AT + PAGE), PAGE, Advice::GuardRemove)?;
            Ok((AT + PAGE, None))
        },
        before: vec![filled(AT + 3 * MIB, 4)],
        after: |at| vec![filled(AT + 3 * MIB, 4), zero(at, 1)],
        ..two_tables()
    });
    assert_eq!(points, 0, "the table was on deposit");
}

fn small_pages<A: Walk>() -> Case<A> {
    Case { order: 0, ..huge() }
}

fn collapse<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            space.madvise(VirtAddr(AT), 2 * MIB, Advice::Collapse)?;
            Ok((0, None))
        },
        ..small_pages()
    });
    assert!(points >= 2, "a reserve and a folio: {points}");
}

fn collapse_shared<A: Walk>() {
    at_every_point::<A>(&Case {
        folios: Folios::SharedWithChild,
        operation: |space| {
            space.madvise(VirtAddr(AT), 2 * MIB, Advice::Collapse)?;
            Ok((0, None))
        },
        ..small_pages()
    });
}

fn move_several<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            (two_tables::<A>().set_up)(fixture);
            let middle = VirtAddr(CROSSING + 4 * PAGE);
            fixture.space.mprotect(middle, 4 * PAGE, READ_WRITE_EXECUTE).unwrap();
        },
        operation: |space| {
            let to = VirtAddr(AT + 64 * MIB);
            // The parts that moved before memory ran out were moved back, so that the call can be
            // repeated.
            let moved = space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, Remap::To(to));
            if moved.is_err() {
                put_back(space, to);
            }
            moved.map(|at| (at.0, None))
        },
        after: |at| vec![moved(CROSSING, at, 16)],
        layout: Layout::MayDiffer,
        ..two_tables()
    });
    assert!(points >= 3, "{points}");
}

/// Moves the mappings at `to` back, one by one.
fn put_back<A: Walk>(space: &bindery::AddressSpace<'_, bindery_hosted::Machine<A>>, to: VirtAddr) {
    space.memory().fail_allocations_after(None);
    let mut there = Vec::new();
    space.for_each_mapping(|mapping| there.push(mapping.range));
    for range in there.into_iter().filter(|range| range.start() >= to) {
        let home = VirtAddr(CROSSING + (range.start().0 - to.0));
        space.mremap(range.start(), range.len(), range.len(), Remap::To(home)).unwrap();
    }
}

fn move_and_leave<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let to = VirtAddr(AT + 64 * MIB);
            let at = space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, Remap::LeaveTo(to))?;
            Ok((at.0, None))
        },
        after: |at| vec![moved(CROSSING, at, 16), zero(CROSSING, 16)],
        ..two_tables()
    });
    assert!(points >= 2, "{points}");
}

fn duplicate<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            let place = fixed(CROSSING, 16 * PAGE);
            fixture.space.mmap(&MapRequest { sharing: Sharing::Shared, ..place }).unwrap();
            fixture.fill(CROSSING, 16);
        },
        operation: |space| {
            let at = space.mremap(VirtAddr(CROSSING), 0, 16 * PAGE, Remap::MayMove)?;
            Ok((at.0, None))
        },
        after: |at| vec![filled(CROSSING, 16), moved(CROSSING, at, 16)],
        ..two_tables()
    });
    assert_eq!(points, 1, "the VMA");
}

fn grow_heap<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            (two_tables::<A>().set_up)(fixture);
            fixture.space.set_break_start(VirtAddr(AT + 64 * MIB));
        },
        operation: |space| {
            let wanted = VirtAddr(AT + 64 * MIB + 4 * PAGE);
            let end = space.set_break(wanted);
            if end == wanted { Ok((AT + 64 * MIB, None)) } else { Err(Error::OutOfMemory) }
        },
        after: |at| vec![filled(CROSSING, 16), zero(at, 4)],
        ..two_tables()
    });
    assert_eq!(points, 1, "the VMA");
}

/// The error of a pin, if it is a lack of memory.
fn no_memory_to_pin(error: PinError) -> Error {
    assert_eq!(error, PinError::Fault(FaultError::OutOfMemory));
    Error::OutOfMemory
}

fn pin_shared<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        folios: Folios::SharedWithChild,
        operation: |space| {
            space
                .pin(VirtAddr(CROSSING), 1, bindery::Access::Read, PinTime::Long)
                .map(|_| (0, None))
                .map_err(no_memory_to_pin)
        },
        ..two_tables()
    });
    assert_eq!(points, 2, "the count of pins, and a page of its own");
}

fn fork_pinned<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let pin = |page: u64| {
                let at = VirtAddr(CROSSING + page * PAGE);
                space.pin(at, 1, bindery::Access::Write, PinTime::Short)
            };
            let _pins = [pin(0), pin(9)];
            Ok((0, Some(space.fork()?)))
        },
        ..two_tables()
    });
    assert!(points >= 6, "two copies among them: {points}");
}
