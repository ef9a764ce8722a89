//! Shared memory: missing pages, present pages that are not mapped, protection that outlives a
//! mapping; and poison.

use std::thread;

use bindery::addr::{VirtAddr, VirtRange};
use bindery::arch::{Absent, Level, Marker};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, Advice, Error, FaultError, FileAccess, FillMode, FrameKind, Inspection,
    MapObject, MapRequest, Object, PartialFill, PinTime, Protection, Sealing, Sharing,
    UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultMessage, UserfaultModes,
    WriteProtectMode,
};
use bindery_hosted::{Machine, MemoryFiles};

use super::fixture::{A, AT, Fixture, PAGE, Wish, at, with_fixture, with_wish};
use crate::support::READ_WRITE;
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::map;

const LENGTH: u64 = 64 * PAGE;
const HERE: u64 = 8 * AT;
const HUGE: u64 = 2 << 20;
const OWN_PAGE: (u32, FrameKind) = (1, FrameKind::Anonymous);
const PROTECT: WriteProtectMode = WriteProtectMode::PROTECT;
const LIFT: WriteProtectMode = WriteProtectMode::empty();

fn here(page: u64) -> VirtAddr {
    VirtAddr(HERE + page * PAGE)
}

/// Runs `scenario` with shared memory that is registered at [`HERE`].
fn with_shared(
    features: UserfaultFeatures,
    modes: UserfaultModes,
    scenario: impl FnOnce(&Fixture<'_, '_>, &Object<'_, Machine<A>>),
) {
    with_wish(Wish { features, ..Wish::default() }, |fixture| {
        let object = fixture.memory.shared_memory(LENGTH, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(fixture.space, &object, HERE, LENGTH, Sharing::Shared).unwrap();
        let space = fixture.space;
        space.register_userfault(fixture.fd, VirtAddr(HERE), LENGTH, modes).unwrap();
        scenario(fixture, &object);
        space.unregister_userfault(fixture.fd, VirtAddr(HERE), LENGTH).unwrap();
        space.munmap(VirtAddr(HERE), LENGTH).unwrap();
    });
}

fn copy(fixture: &Fixture<'_, '_>, page: u64, byte: u8) -> Result<(), PartialFill> {
    let mut source = |_, piece: &mut [u8]| {
        piece.fill(byte);
        Ok(())
    };
    fixture.space.handler(fixture.fd).fill_copy(here(page), PAGE, FillMode::empty(), &mut source)
}

/// Pinning a zero page in a private mapping of shared memory gives the device a permanent private
/// page.
#[test]
fn a_pinned_zero_page_becomes_private() {
    with_wish(Wish::default(), |fixture| {
        let object = fixture.memory.shared_memory(LENGTH, Sealing::Allowed, Accounting::PerPage);
        let (object, space) = (object.unwrap(), fixture.space);
        map(space, &object, HERE, LENGTH, Sharing::Private).unwrap();
        let missing = UserfaultModes::MISSING;
        space.register_userfault(fixture.fd, VirtAddr(HERE), LENGTH, missing).unwrap();
        space.handler(fixture.fd).fill_zeroes(here(0), 4 * PAGE, FillMode::empty()).unwrap();
        for (page, time) in [(0, PinTime::Short), (1, PinTime::Long)] {
            let pinned = space.pin(here(page), 1, Access::Read, time).unwrap();
            assert_eq!((pinned.pages(), fixture.memory.frame_kind(pinned.first())), OWN_PAGE);
        }
        space.mprotect(here(2), PAGE, Protection::READ).unwrap();
        let pinned = space.pin(here(2), 1, Access::Read, PinTime::Short).unwrap();
        assert_eq!((pinned.pages(), fixture.memory.frame_kind(pinned.first())), OWN_PAGE);
        drop(pinned);
        assert_eq!(object.resident_pages(), 0);
        space.unregister_userfault(fixture.fd, VirtAddr(HERE), LENGTH).unwrap();
        space.munmap(VirtAddr(HERE), LENGTH).unwrap();
    });
}

#[test]
fn a_supplied_shared_page_serves_all_mappings() {
    with_shared(UserfaultFeatures::empty(), UserfaultModes::MISSING, |fixture, object| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(here(3)));
            let expected = UserfaultFault {
                address: here(3),
                kind: UserfaultKind::Missing,
                is_write: false,
                thread: 0,
            };
            assert_eq!(fixture.fault(), expected);
            copy(fixture, 3, 5).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(0x0505_0505_0505_0505));
        });
        let mut byte = [0];
        object.read(3 * PAGE, &mut byte).unwrap();
        assert_eq!(byte, [5]);
        // Pages of the object are mapped without a message.
        object.write(4 * PAGE, &[6]).unwrap();
        fixture.space.fault(here(4), Access::Read).unwrap();
        assert!(!fixture.fd.is_readable());
        let exists = |page| Err(PartialFill { done: 0, error: Error::Exists(here(page)) });
        assert_eq!(copy(fixture, 4, 1), exists(4));
        object.write(5 * PAGE, &[6]).unwrap();
        assert_eq!(copy(fixture, 5, 1), exists(5));
        fixture
            .space
            .handler(fixture.fd)
            .fill_zeroes(here(6), 4 * PAGE, FillMode::empty())
            .unwrap();
        fixture.space.fault(here(9), Access::Write).unwrap();
        assert_eq!(object.resident_pages(), 7);
    });
}

#[test]
fn behind_the_end_of_the_object_nothing_waits() {
    with_shared(UserfaultFeatures::empty(), UserfaultModes::MISSING, |fixture, object| {
        object.set_size(4 * PAGE).unwrap();
        assert_eq!(fixture.space.fault(here(4), Access::Read), Err(FaultError::Bus));
        let fault = Err(PartialFill { done: 0, error: Error::Fault(here(4)) });
        assert_eq!(copy(fixture, 4, 1), fault);
        object.set_size(LENGTH).unwrap();
    });
}

#[test]
fn an_objects_page_is_mapped_on_request() {
    with_shared(UserfaultFeatures::empty(), UserfaultModes::MINOR, |fixture, object| {
        object.write(0, &[8; 16 * 4096]).unwrap();
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(here(3)));
            assert_eq!(fixture.fault().kind, UserfaultKind::Minor);
            object.write(3 * PAGE, &[9; 8]).unwrap();
            let present = |page, pages| {
                let mode = FillMode::empty();
                fixture.space.handler(fixture.fd).fill_present(here(page), pages * PAGE, mode)
            };
            present(3, 1).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(0x0909_0909_0909_0909));
            let partial = |done, error| Err(PartialFill { done: done * PAGE, error });
            assert_eq!(present(0, 5), partial(3, Error::Exists(here(3))));
            assert_eq!(present(4, 20), partial(12, Error::Fault(here(16))));
            let anonymous =
                fixture.space.handler(fixture.fd).fill_present(at(0), PAGE, FillMode::empty());
            assert_eq!(anonymous, partial(0, Error::Invalid));
        });
        // Faults on pages that the object lacks do not involve the handler.
        fixture.space.fault(here(20), Access::Write).unwrap();
        assert!(!fixture.fd.is_readable());
    });
}

/// Protects pages or lifts the protection.
fn protect(fixture: &Fixture<'_, '_>, page: u64, pages: u64, mode: WriteProtectMode) {
    fixture.space.handler(fixture.fd).write_protect(here(page), pages * PAGE, mode).unwrap();
}

/// Reads the page, which holds `byte`, then checks that a write to it waits until the protection is
/// lifted.
#[track_caller]
fn assert_protected(fixture: &Fixture<'_, '_>, page: u64, byte: u8) {
    let mut found = [0];
    fixture.space.read_user(here(page), &mut found).unwrap();
    assert_eq!(found, [byte], "page {page}");
    thread::scope(|scope| {
        let writer = fixture.spawn(scope, 1, move |program| program.store(here(page), 1));
        assert_eq!(fixture.fault().kind, UserfaultKind::WriteProtected);
        protect(fixture, page, 1, LIFT);
        writer.join().unwrap().unwrap();
    });
}

/// Calls `drop` to remove the mappings of eight protected pages, four of which hold `8`.
fn protected_pages_survive(drop: impl FnOnce(&Fixture<'_, '_>, &Object<'_, Machine<A>>), byte: u8) {
    with_shared(UserfaultFeatures::empty(), UserfaultModes::WRITE_PROTECT, |fixture, object| {
        object.write(0, &[8; 4 * 4096]).unwrap();
        fixture.space.fault(here(1), Access::Read).unwrap();
        fixture.space.fault(here(2), Access::Write).unwrap();
        protect(fixture, 0, 8, PROTECT);
        drop(fixture, object);
        for page in [1, 2, 3] {
            assert_protected(fixture, page, byte);
        }
        assert_protected(fixture, 6, 0);
        // The neighboring pages were never protected.
        fixture.space.write_user(here(8), &[1]).unwrap();
        protect(fixture, 0, 8, LIFT);
        fixture.space.write_user(here(0), &[1]).unwrap();
    });
}

#[test]
fn protection_outlives_advice() {
    let drop = |fixture: &Fixture<'_, '_>, _: &Object<'_, Machine<A>>| {
        fixture.space.madvise(here(0), LENGTH, Advice::DontNeed).unwrap();
    };
    protected_pages_survive(drop, 8);
}

#[test]
fn protection_outlives_truncation_and_holes() {
    let truncate = |_: &Fixture<'_, '_>, object: &Object<'_, Machine<A>>| {
        object.set_size(0).unwrap();
        object.set_size(LENGTH).unwrap();
    };
    protected_pages_survive(truncate, 0);
    let punch = |_: &Fixture<'_, '_>, object: &Object<'_, Machine<A>>| {
        object.punch_hole(0, LENGTH).unwrap();
    };
    protected_pages_survive(punch, 0);
}

#[test]
fn protection_outlives_swap() {
    with_shared(UserfaultFeatures::empty(), UserfaultModes::WRITE_PROTECT, |fixture, object| {
        let area = fixture.memory.swap_on(100, 0).unwrap();
        object.write(0, &[8; 8 * 4096]).unwrap();
        for page in 0..8 {
            fixture.space.fault(here(page), Access::Write).unwrap();
        }
        protect(fixture, 0, 4, PROTECT);
        fixture.space.madvise(here(0), 8 * PAGE, Advice::PageOut).unwrap();
        assert_eq!(object.swapped_pages(), 8);
        assert_protected(fixture, 1, 8);
        assert_eq!(object.swapped_pages(), 7, "a read brings it back");
        assert_protected(fixture, 3, 8);
        fixture.space.write_user(here(5), &[1]).unwrap();
        assert!(!fixture.fd.is_readable());
        object.set_size(0).unwrap();
        fixture.memory.swap_off(&area).unwrap();
        object.set_size(LENGTH).unwrap();
    });
}

#[test]
fn protection_of_a_huge_leaf_outlives_a_hole() {
    use_object_order_of_two_mib(|fixture, object, start| {
        let at = |page: u64| VirtAddr(start + page * PAGE);
        let space = fixture.space;
        space.fault(at(0), Access::Write).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT;
        space.register_userfault(fixture.fd, at(0), HUGE, modes).unwrap();
        space.handler(fixture.fd).write_protect(at(0), HUGE, PROTECT).unwrap();
        object.punch_hole(0, HUGE).unwrap();
        assert_eq!(object.resident_pages(), 0);
        space.handler(fixture.fd).write_protect(at(0), PAGE, LIFT).unwrap();
        space.write_user(at(0), &[1]).unwrap();
        thread::scope(|scope| {
            let writer = fixture.spawn(scope, 1, move |program| program.store(at(511), 1));
            assert_eq!(fixture.fault().kind, UserfaultKind::WriteProtected);
            space.handler(fixture.fd).write_protect(at(0), HUGE, LIFT).unwrap();
            writer.join().unwrap().unwrap();
        });
    });
}

/// Maps an object of large folios at a multiple of their size.
fn use_object_order_of_two_mib(
    scenario: impl for<'m> FnOnce(&Fixture<'_, 'm>, &Object<'m, Machine<A>>, u64),
) {
    with_wish(Wish::default(), |fixture| {
        use_object_order(fixture.memory, 9);
        let object = fixture.memory.shared_memory(HUGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(fixture.space, &object, HERE, HUGE, Sharing::Shared).unwrap();
        scenario(fixture, &object, HERE);
        fixture.space.munmap(VirtAddr(HERE), HUGE).unwrap();
    });
}

#[test]
fn supplied_pages_are_large_where_the_range_allows() {
    use_object_order_of_two_mib(|fixture, object, start| {
        let (space, fd) = (fixture.space, fixture.fd);
        let modes = UserfaultModes::MISSING | UserfaultModes::MINOR;
        space.register_userfault(fd, VirtAddr(start), HUGE, modes).unwrap();
        space.handler(fd).fill_zeroes(VirtAddr(start), HUGE, FillMode::empty()).unwrap();
        assert_eq!(object.resident_pages(), 512);
        let is_huge = || {
            let at = VirtAddr(start + 5 * PAGE);
            matches!(space.inspect(at), Inspection::Page { level, .. } if level == Level::PMD)
        };
        assert!(is_huge());
        space.madvise(VirtAddr(start), HUGE, Advice::DontNeed).unwrap();
        space.handler(fd).fill_present(VirtAddr(start), HUGE, FillMode::empty()).unwrap();
        assert!(is_huge());
    });
}

#[test]
fn shared_memory_is_mapped_by_whole_folios() {
    with_wish(Wish::default(), |fixture| {
        use_object_order(fixture.memory, 4);
        let space = fixture.space;
        space.mmap(&MapRequest { length: PAGE, ..MapRequest::default() }).unwrap();
        let object = fixture.memory.shared_memory(LENGTH, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        let request = MapRequest {
            length: LENGTH,
            protection: READ_WRITE,
            sharing: Sharing::Shared,
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let mapped = MapObject { object: &object, offset: 0, access };
        let at = space.mmap_object(&request, &mapped).unwrap();
        assert!(at.is_aligned(16 * PAGE), "{at:?}");
        space.write_user(at, &[1]).unwrap();
        let last = VirtAddr(at.0 + 15 * PAGE);
        assert!(matches!(space.inspect(last), Inspection::Page { .. }));
        // A part that begins inside a folio cannot be mapped by huge leaves.
        let mapped = MapObject { offset: PAGE, ..mapped };
        let request = MapRequest { length: LENGTH - PAGE, ..request };
        let next = space.mmap_object(&request, &mapped).unwrap();
        assert_eq!(next.0, at.0 - (LENGTH - PAGE), "it lies just below");
        space.munmap(next, LENGTH - PAGE).unwrap();
        space.munmap(at, LENGTH).unwrap();
    });
}

#[test]
fn collapsing_leaves_what_a_handler_serves_alone() {
    use_object_order_of_two_mib(|fixture, object, start| {
        use_object_order(fixture.memory, 0);
        let (space, fd, start) = (fixture.space, fixture.fd, VirtAddr(start));
        map(space, object, 2 * HERE, HUGE, Sharing::Shared).unwrap();
        let other = VirtAddr(2 * HERE);
        for page in 0..511 {
            object.write(page * PAGE, &[page as u8]).unwrap();
        }
        let collapse = |at: VirtAddr| space.collapse_range(VirtRange::from_len(at, HUGE).unwrap());
        let resolved = |at: VirtAddr| space.inspect(VirtAddr(at.0 + 5 * PAGE));
        let is_huge =
            |found| matches!(found, Inspection::Page { level, .. } if level == Level::PMD);
        space.register_userfault(fd, start, HUGE, UserfaultModes::MISSING).unwrap();
        assert_eq!(collapse(start), Err(Error::Busy));
        assert_eq!(collapse(other), Err(Error::Busy), "a page is missing");
        space.register_userfault(fd, start, HUGE, UserfaultModes::WRITE_PROTECT).unwrap();
        assert_eq!(collapse(start), Err(Error::Invalid), "it is write-protected");
        space.register_userfault(fd, start, HUGE, UserfaultModes::MISSING).unwrap();
        object.write(511 * PAGE, &[9]).unwrap();
        space.register_userfault(fd, start, HUGE, UserfaultModes::MINOR).unwrap();
        collapse(start).unwrap();
        assert!(is_huge(resolved(start)), "it is mapped without a message");
        assert!(!fd.is_readable());
        space.munmap(other, HUGE).unwrap();
    });
}

#[test]
fn a_served_child_inherits_shared_memorys_protection() {
    let modes = UserfaultModes::WRITE_PROTECT;
    with_shared(UserfaultFeatures::EVENT_FORK, modes, |fixture, _| {
        fixture.space.fault(here(1), Access::Write).unwrap();
        protect(fixture, 0, 4, PROTECT);
        let (child, theirs) = thread::scope(|scope| {
            let forked = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.space.fork()));
            let Ok(UserfaultMessage::Fork(theirs)) = fixture.fd.read() else { panic!("no fork") };
            (forked.join().unwrap().unwrap(), theirs)
        });
        for page in [1, 3] {
            let write = || child.write_user(here(page), &[1]);
            thread::scope(|scope| {
                let writer = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), write));
                let Ok(UserfaultMessage::Fault(fault)) = theirs.read() else { panic!("no fault") };
                let expected = (UserfaultKind::WriteProtected, here(page));
                assert_eq!((fault.kind, fault.address), expected);
                child.handler(&theirs).write_protect(here(page), PAGE, LIFT).unwrap();
                writer.join().unwrap().unwrap();
            });
        }
        child.close_userfault(theirs);
        drop(child);
        assert_protected(fixture, 1, 1);
    });
}

#[test]
fn files_can_be_protected_where_nobody_is_told() {
    let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
    with_wish(
        Wish { features, modes: UserfaultModes::WRITE_PROTECT, ..Wish::default() },
        |fixture| {
            let files: &'static MemoryFiles = Box::leak(Box::new(MemoryFiles::new()));
            let file = fixture.memory.file(files, 1, 8 * PAGE).unwrap();
            map(fixture.space, &file, HERE, 8 * PAGE, Sharing::Shared).unwrap();
            let register =
                |modes| fixture.space.register_userfault(fixture.fd, here(0), 8 * PAGE, modes);
            assert_eq!(register(UserfaultModes::MISSING), Err(Error::Invalid));
            register(UserfaultModes::WRITE_PROTECT).unwrap();
            fixture.space.fault(here(0), Access::Read).unwrap();
            protect(fixture, 0, 8, PROTECT);
            fixture.space.write_user(here(1), &[1]).unwrap();
            fixture.space.write_user(here(0), &[1]).unwrap();
            let mut byte = [9];
            fixture.space.read_user(here(3), &mut byte).unwrap();
            let protected: Vec<_> = (0..8).filter(|page| is_protected(fixture, *page)).collect();
            assert_eq!(protected, [2, 3, 4, 5, 6, 7]);
            fixture.space.unregister_userfault(fixture.fd, here(0), 8 * PAGE).unwrap();
            fixture.space.munmap(here(0), 8 * PAGE).unwrap();
        },
    );
}

fn is_protected(fixture: &Fixture<'_, '_>, page: u64) -> bool {
    match fixture.space.inspect(here(page)) {
        Inspection::Page { attributes, .. } => attributes.userfault,
        Inspection::Absent(absent) => absent == Absent::Marker(Marker::UserfaultWriteProtect),
        _ => false,
    }
}

#[test]
fn private_mappings_of_shared_memory_get_copies() {
    with_wish(Wish::default(), |fixture| {
        let object = fixture.memory.shared_memory(LENGTH, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        object.write(0, &[3; 2 * 4096]).unwrap();
        map(fixture.space, &object, HERE, LENGTH, Sharing::Private).unwrap();
        let modes = UserfaultModes::MISSING | UserfaultModes::MINOR;
        fixture.space.register_userfault(fixture.fd, here(0), LENGTH, modes).unwrap();
        copy(fixture, 0, 5).unwrap();
        copy(fixture, 9, 6).unwrap();
        fixture.space.handler(fixture.fd).fill_zeroes(here(10), PAGE, FillMode::empty()).unwrap();
        assert_eq!(object.resident_pages(), 2);
        fixture.space.handler(fixture.fd).fill_present(here(1), PAGE, FillMode::empty()).unwrap();
        fixture.space.write_user(here(1), &[4]).unwrap();
        let mut bytes = [0; 2];
        object.read(PAGE - 1, &mut bytes).unwrap();
        assert_eq!(bytes, [3, 3]);
        for (page, byte) in [(0, 5), (1, 4), (9, 6), (10, 0)] {
            let mut found = [77];
            fixture.space.read_user(here(page), &mut found).unwrap();
            assert_eq!(found, [byte], "page {page}");
        }
        fixture.space.munmap(here(0), LENGTH).unwrap();
    });
}

#[test]
fn a_poisoned_page_is_sigbus_until_supplied() {
    with_fixture(|fixture| {
        fixture.copy(8, PAGE, 1).unwrap();
        let poison = |page, pages| {
            fixture.space.handler(fixture.fd).fill_poison(at(page), pages * PAGE, FillMode::empty())
        };
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            poison(2, 4).unwrap();
            assert_eq!(reader.join().unwrap(), Err(FaultError::Bus));
        });
        let exists =
            |page, done| Err(PartialFill { done: done * PAGE, error: Error::Exists(at(page)) });
        assert_eq!(poison(3, 1), exists(3, 0));
        assert_eq!(poison(6, 4), exists(8, 2));
        assert_eq!(fixture.space.write_user(at(5), &[1]), Err(FaultError::Bus));
        fixture.copy(5, PAGE, 4).unwrap();
        assert_eq!(fixture.byte(5), 4);
        let child = fixture.space.fork().unwrap();
        assert_eq!(child.fault(at(4), Access::Read), Err(FaultError::Bus));
        drop(child);
        fixture.space.madvise(at(2), PAGE, Advice::DontNeed).unwrap();
        poison(2, 1).unwrap();
    });
}
