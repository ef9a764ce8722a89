//! Under a table lock and in a read section, an allocation must not wait. If it fails, the call
//! releases its locks, allocates outside them, where it may wait, and then checks everything again.
//! If the second allocation succeeds, the call does not fail.
//!
//! The hosted machine panics if an allocation that may wait is made in a read section
//! (`Platform::allocation_may_wait`), so every test of the suite verifies that, too.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{
    Access, Accounting, AddressSpace, Advice, FaultError, FileAccess, MapObject, MapRequest,
    Memory, PinTime, Place, Sealing, Sharing, testing,
};
use bindery_hosted::{Machine, Walk};

use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict};

const AT: VirtAddr = VirtAddr(GIB);

/// Runs `work` in a fresh address space repeatedly, with one more allocation that succeeds each
/// time, until none fails. Returns the number of failures and the number of successes despite a
/// failed allocation.
fn fail_each<A: Walk, E: PartialEq + std::fmt::Debug>(
    out_of_memory: &E,
    prepare: impl Fn(&AddressSpace<'_, Machine<A>>),
    work: impl for<'m> Fn(&AddressSpace<'m, Machine<A>>, &'m Memory<Machine<A>>) -> Result<(), E>,
) -> (u32, u32) {
    let (mut failures, mut recovered) = (0, 0);
    for point in 0.. {
        let (machine, memory) = strict::<A>(32 * MIB);
        let space = AddressSpace::new(&memory, options()).unwrap();
        prepare(&space);
        testing::fail_one_allocation(&memory, Some(point));
        let result = work(&space, &memory);
        let failed = testing::failed_allocations(&memory);
        testing::fail_one_allocation(&memory, None);
        audit(&machine, &memory, &[&space]);
        match result {
            Err(error) => {
                assert_eq!(error, *out_of_memory);
                failures += 1;
            }
            Ok(()) => recovered += u32::from(failed > 0),
        }
        if failed == 0 {
            return (failures, recovered);
        }
    }
    unreachable!()
}

fn a_read_fault_waits_for_tables<A: Walk>() {
    let levels = u32::from(A::LEVELS);
    let (failures, recovered) = fail_each::<A, FaultError>(
        &FaultError::OutOfMemory,
        |space| _ = space.mmap(&fixed(AT.0, MIB)).unwrap(),
        |space, _| space.fault(AT, Access::Read).map(|_| ()),
    );
    assert_eq!((failures, recovered), (0, levels - 1), "one table a level below the root");
}

fn a_first_touch_waits_for_its_folio<A: Walk>() {
    let (failures, recovered) = fail_each::<A, FaultError>(
        &FaultError::OutOfMemory,
        |space| {
            space.mmap(&fixed(AT.0, MIB)).unwrap();
            space.fault(AT, Access::Write).unwrap();
        },
        |space, _| space.fault(VirtAddr(AT.0 + PAGE_SIZE), Access::Write).map(|_| ()),
    );
    assert_eq!((failures, recovered), (0, 1));
}

fn guards_wait_for_tables<A: Walk>() {
    let (failures, recovered) = fail_each::<A, bindery::Error>(
        &bindery::Error::OutOfMemory,
        |space| {
            space.mmap(&fixed(AT.0, 8 * MIB)).unwrap();
            // The group exists.
            space.fault(VirtAddr(AT.0 + 6 * MIB), Access::Write).unwrap();
        },
        |space, _| space.madvise(AT, 2 * MIB + PAGE_SIZE, Advice::GuardInstall),
    );
    assert_eq!(
        (failures, recovered),
        (0, 2),
        "the reserve of a large guard, and a table for a small one"
    );
}

fn a_fork_waits_for_tables_and_copies_pinned_pages_outside<A: Walk>() {
    let levels = u32::from(A::LEVELS);
    let (failures, recovered) = fail_each::<A, bindery::Error>(
        &bindery::Error::OutOfMemory,
        |space| {
            space.mmap(&fixed(AT.0, MIB)).unwrap();
            space.fault(AT, Access::Write).unwrap();
            space.fault(VirtAddr(AT.0 + PAGE_SIZE), Access::Write).unwrap();
        },
        |space, _| {
            let pinned = space.pin(AT, 1, Access::Write, PinTime::Short);
            let pinned = pinned.map_err(|_| bindery::Error::OutOfMemory)?;
            let child = space.fork().map(drop);
            drop(pinned);
            child
        },
    );
    assert_eq!(
        failures, 6,
        "the count of pins, the root and its state, a group, a VMA, the copy of the pinned page"
    );
    assert_eq!(recovered, levels - 1, "tables");
}

fn shared_memory_waits_for_the_nodes_of_its_index<A: Walk>() {
    let (failures, recovered) = fail_each::<A, FaultError>(
        &FaultError::OutOfMemory,
        |_| {},
        |space, memory| {
            let object = memory.shared_memory(MIB, Sealing::Allowed, Accounting::PerPage);
            let Ok(object) = object else { return Err(FaultError::OutOfMemory) };
            let request = MapRequest {
                length: MIB,
                protection: READ_WRITE,
                place: Place::Fixed(AT),
                sharing: Sharing::Shared,
                ..MapRequest::default()
            };
            let access = FileAccess::READ | FileAccess::WRITE;
            let source = MapObject { object: &object, offset: 0, access };
            if space.mmap_object(&request, &source).is_err() {
                return Err(FaultError::OutOfMemory);
            }
            space.fault(AT, Access::Write).map(|_| ())
        },
    );
    assert_eq!(failures, 3, "the object, the VMA, the folio");
    assert_eq!(recovered, u32::from(A::LEVELS) - 1 + 1, "tables, and the only node of the index");
}

on_every_architecture! {
    reading => a_read_fault_waits_for_tables;
    touching => a_first_touch_waits_for_its_folio;
    guarding => guards_wait_for_tables;
    forking => a_fork_waits_for_tables_and_copies_pinned_pages_outside;
    sharing => shared_memory_waits_for_the_nodes_of_its_index;
}
