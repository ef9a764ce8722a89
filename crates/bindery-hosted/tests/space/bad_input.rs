//! Addresses and lengths that make no sense, in every argument of every operation: each call fails
//! with the right error and changes nothing, not even a counter.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::{Absent, Marker, X86_64};
use bindery::check;
use bindery::{
    Access, AddressSpace, Errno, Error, FaultError, FolioError, Inspection, MapRequest, Operation,
    Place, Protection, Remap, SpaceOptions, testing,
};
use bindery_hosted::{Machine, Walk};

use super::refusal::{AT, MINIMUM, PAGE, State, nowhere, out_of_range, refused, scene, state};
use crate::support::fixture::{Fixture, layout, with_fixture};
use crate::support::{MIB, READ_WRITE, READ_WRITE_EXECUTE, audit, fixed, options, strict};

on_every_architecture! {
    a_mapping_that_cannot_be_is_refused => map;
    an_unmapping_that_cannot_be_is_refused => unmap;
    a_discard_that_cannot_be_is_refused => discard;
    a_protection_that_cannot_be_is_refused => protect;
    a_fault_at_an_invalid_address_is_sigsegv => fault;
    an_invalid_address_shows_nothing => look;
    the_last_page_of_user_space_is_ordinary => last_page;
    a_senseless_hint_is_no_error => hint;
}

fn map<A: Walk>() {
    scene::<A>(|fixture, end| {
        let map = |place, length, expected| {
            let request =
                MapRequest { length, protection: READ_WRITE, place, ..MapRequest::default() };
            refused(fixture, expected, |space| space.mmap(&request));
        };
        let place = |at| [Place::Fixed(VirtAddr(at)), Place::FixedNoReplace(VirtAddr(at))];
        for fixed in place(AT + 1).into_iter().chain(place(AT + PAGE - 1)) {
            let (Place::Fixed(at) | Place::FixedNoReplace(at)) = fixed else { unreachable!() };
            map(fixed, PAGE, Error::Unaligned(at));
        }
        for anywhere in place(AT).into_iter().chain([Place::Anywhere, Place::Near(VirtAddr(AT))]) {
            map(anywhere, 0, Error::ZeroLength);
            map(anywhere, end + 1, Error::TooLong);
            map(anywhere, 1 << 63, Error::TooLong);
            map(anywhere, u64::MAX - PAGE + 2, Error::TooLong);
            map(anywhere, u64::MAX, Error::TooLong);
        }
        for at in nowhere(end) {
            place(at).into_iter().for_each(|fixed| map(fixed, PAGE, out_of_range(end)));
            place(at + 1).into_iter().for_each(|fixed| map(fixed, PAGE, out_of_range(end)));
        }
        place(end - PAGE).into_iter().for_each(|fixed| map(fixed, PAGE + 1, out_of_range(end)));
        place(AT).into_iter().for_each(|fixed| map(fixed, end - AT + 1, out_of_range(end)));
        place(MINIMUM.0).into_iter().for_each(|fixed| map(fixed, end, out_of_range(end)));
        for low in [0, PAGE, MINIMUM.0 - PAGE] {
            place(low)
                .into_iter()
                .for_each(|fixed| map(fixed, PAGE, Error::BelowMinimum { minimum: MINIMUM }));
        }
        map(Place::Anywhere, end, Error::NoRoom);
        map(Place::Near(VirtAddr(0)), end - PAGE, Error::NoRoom);
        let over = Place::FixedNoReplace(VirtAddr(AT - PAGE));
        map(over, 2 * PAGE, Error::Exists(VirtAddr(AT)));
        let inside = VirtAddr(AT + 3 * PAGE);
        map(Place::FixedNoReplace(inside), PAGE, Error::Exists(inside));
    });
}

/// Ranges that `munmap` refuses.
fn not_to_unmap(end: u64) -> Vec<(u64, u64, Error)> {
    let mut ranges = vec![
        (AT + 1, PAGE, Error::Unaligned(VirtAddr(AT + 1))),
        (AT + PAGE - 1, 0, Error::Unaligned(VirtAddr(AT + PAGE - 1))),
        (u64::MAX, u64::MAX, Error::Unaligned(VirtAddr(u64::MAX))),
        (end, 1, out_of_range(end)),
        (end - PAGE, PAGE + 1, out_of_range(end)),
        (AT, end - AT + 1, out_of_range(end)),
        (AT, end, out_of_range(end)),
        (AT, 1 << 63, out_of_range(end)),
        (AT, u64::MAX - AT, out_of_range(end)),
        (AT, u64::MAX, out_of_range(end)),
        (0, end + 1, out_of_range(end)),
        (0, u64::MAX, out_of_range(end)),
    ];
    ranges.extend(nowhere(end).map(|at| (at, PAGE, out_of_range(end))));
    ranges
}

fn unmap<A: Walk>() {
    scene::<A>(|fixture, end| {
        for (start, length, expected) in not_to_unmap(end) {
            refused(fixture, expected, |space| space.munmap(VirtAddr(start), length));
        }
        for start in [0, AT, end - PAGE, end] {
            refused(fixture, Error::ZeroLength, |space| space.munmap(VirtAddr(start), 0));
        }
        let before = state(fixture.space);
        for (start, length) in [(0, AT), (AT + 32 * PAGE, end - AT - 32 * PAGE), (end - PAGE, 1)] {
            assert_eq!(fixture.space.munmap(VirtAddr(start), length), Ok(()), "nothing is there");
        }
        assert_eq!(state(fixture.space), before);
    });
}

/// The common refusals of `mprotect` and `discard`, before any change. Only a range that wraps is
/// out of range; any other begins in unmapped memory.
fn not_mapped_ranges(end: u64) -> Vec<(u64, u64, Error)> {
    let mut ranges = vec![
        (AT + 1, PAGE, Error::Unaligned(VirtAddr(AT + 1))),
        (AT + 1, 0, Error::Unaligned(VirtAddr(AT + 1))),
        (AT + PAGE - 1, 0, Error::Unaligned(VirtAddr(AT + PAGE - 1))),
        (u64::MAX, 1, Error::Unaligned(VirtAddr(u64::MAX))),
        (u64::MAX, u64::MAX, Error::Unaligned(VirtAddr(u64::MAX))),
        (AT, u64::MAX, out_of_range(end)),
        (AT, u64::MAX - AT + 1, out_of_range(end)),
        (AT, u64::MAX - PAGE + 2, out_of_range(end)),
        (0, u64::MAX, out_of_range(end)),
        (u64::MAX - PAGE + 1, PAGE, out_of_range(end)),
        (end - PAGE, PAGE + 1, Error::NotMapped(VirtAddr(end - PAGE))),
        (AT + 32 * PAGE, end, Error::NotMapped(VirtAddr(AT + 32 * PAGE))),
        (AT + 32 * PAGE, 1 << 63, Error::NotMapped(VirtAddr(AT + 32 * PAGE))),
    ];
    let inside = nowhere(end).into_iter().filter(|at| *at != u64::MAX - PAGE + 1);
    let holes = [0, AT - PAGE, AT + 32 * PAGE, end - PAGE];
    ranges.extend(inside.chain(holes).map(|at| (at, PAGE, Error::NotMapped(VirtAddr(at)))));
    ranges
}

/// Calls with a length of zero succeed.
fn nothing<A: Walk>(
    fixture: &Fixture<'_, '_, A>,
    end: u64,
    call: impl Fn(VirtAddr) -> Result<(), Error>,
) {
    let before = state(fixture.space);
    for at in [0, AT, end, u64::MAX - PAGE + 1] {
        assert_eq!(call(VirtAddr(at)), Ok(()));
    }
    assert_eq!(state(fixture.space), before);
}

fn discard<A: Walk>() {
    scene::<A>(|fixture, end| {
        for (start, length, expected) in not_mapped_ranges(end) {
            refused(fixture, expected, |space| space.discard(VirtAddr(start), length));
        }
        nothing(fixture, end, |at| fixture.space.discard(at, 0));
        for (start, length, hole) in [
            (AT, 33 * PAGE, AT + 32 * PAGE),
            (AT, end - AT + PAGE, AT + 32 * PAGE),
            (AT - PAGE, 40 * PAGE, AT - PAGE),
        ] {
            let hole = Error::NotMapped(VirtAddr(hole));
            assert_eq!(fixture.space.discard(VirtAddr(start), length), Err(hole));
            assert_eq!(fixture.program.load(VirtAddr(AT)), Ok(0), "what is mapped is dropped");
            fixture.fill(AT, 1);
        }
    });
}

fn protect<A: Walk>() {
    scene::<A>(|fixture, end| {
        let longer = [0, AT - PAGE, AT + 32 * PAGE, end - PAGE];
        let longer = longer.map(|at| (at, 64 * MIB, Error::NotMapped(VirtAddr(at))));
        for (start, length, expected) in not_mapped_ranges(end).into_iter().chain(longer) {
            for protection in [Protection::empty(), Protection::READ, READ_WRITE_EXECUTE] {
                refused(fixture, expected, |space| {
                    space.mprotect(VirtAddr(start), length, protection)
                });
            }
        }
        nothing(fixture, end, |at| fixture.space.mprotect(at, 0, Protection::READ));
    });
}

#[test]
fn a_protection_stops_at_a_hole() {
    scene::<X86_64<4>>(|fixture, end| {
        let hole = Error::NotMapped(VirtAddr(AT + 32 * PAGE));
        let (at, all) = (VirtAddr(AT), end - AT);
        assert_eq!(fixture.space.mprotect(at, all, Protection::READ), Err(hole));
        let layout = fixture.layout();
        let [written, read_only] = layout[..] else { panic!("{layout:?}") };
        // The written mapping still counts as committed memory, so the two do not merge.
        for (part, at) in [(written, AT), (read_only, AT + 16 * PAGE)] {
            assert_eq!((part.range.start(), part.range.len()), (VirtAddr(at), 16 * PAGE));
            assert_eq!(part.protection, Protection::READ);
        }
        assert_eq!(fixture.space.usage().committed, 16);
    });
}

#[test]
fn never_written_memory_merges_with_read_only() {
    scene::<X86_64<4>>(|fixture, _| {
        let at = AT + 64 * PAGE;
        fixture.space.mmap(&fixed(at, 16 * PAGE)).unwrap();
        let protection = Protection::READ;
        let above = fixed(at + 16 * PAGE, 16 * PAGE);
        fixture.space.mmap(&MapRequest { protection, ..above }).unwrap();
        assert_eq!(fixture.program.load(VirtAddr(at)), Ok(0));
        fixture.space.mprotect(VirtAddr(at), 32 * PAGE, protection).unwrap();
        let layout = fixture.layout();
        let [_, _, whole] = layout[..] else { panic!("{layout:?}") };
        assert_eq!((whole.range.start(), whole.range.len()), (VirtAddr(at), 32 * PAGE));
        assert_eq!(fixture.space.usage().committed, 16, "what nobody can write is not promised");
    });
}

fn fault<A: Walk>() {
    scene::<A>(|fixture, end| {
        let accesses = [Access::Read, Access::Write, Access::Execute];
        let holes = [0, 1, AT - 1, AT + 32 * PAGE, end - 1, u64::MAX];
        for at in nowhere(end).into_iter().chain(holes) {
            for access in accesses {
                refused(fixture, FaultError::NotMapped, |space| space.fault(VirtAddr(at), access));
            }
        }
        for (at, access) in [
            (AT, Access::Execute),
            (AT + 16 * PAGE - 1, Access::Execute),
            (AT + 16 * PAGE, Access::Write),
            (AT + 31 * PAGE, Access::Execute),
        ] {
            refused(fixture, FaultError::Protection, |space| space.fault(VirtAddr(at), access));
        }
        fixture.space.mprotect(VirtAddr(AT), 16 * PAGE, Protection::empty()).unwrap();
        for access in accesses {
            refused(fixture, FaultError::Protection, |space| space.fault(VirtAddr(AT), access));
        }
        fixture.space.mprotect(VirtAddr(AT), 16 * PAGE, READ_WRITE).unwrap();
    });
}

fn look<A: Walk>() {
    scene::<A>(|fixture, end| {
        let holes = [0, 1, AT - 1, AT + PAGE, AT + 32 * PAGE, end - 1, u64::MAX];
        let before = state(fixture.space);
        for at in nowhere(end).into_iter().chain(holes).map(VirtAddr) {
            assert_eq!(fixture.space.inspect(at), Inspection::Empty);
            assert!(!fixture.space.is_dirty(at));
        }
        let State { layout, free_frames, .. } = before;
        assert_eq!((layout, free_frames), (fixture.layout(), fixture.memory.free_frame_count()));
        for at in nowhere(end).into_iter().chain([0, AT - 1, AT + 32 * PAGE, u64::MAX]) {
            refused(fixture, FolioError::NotMapped, |space| space.join_leaves(VirtAddr(at)));
            refused(fixture, FolioError::NotMapped, |space| {
                space.split_folio(VirtAddr(at), Order::PAGE)
            });
        }
    });
}

fn last_page<A: Walk>() {
    scene::<A>(|fixture, end| {
        let last = VirtAddr(end - PAGE);
        fixture.space.mmap(&fixed(last.0, PAGE)).unwrap();
        fixture.fill(last.0, 1);
        assert!(fixture.program.load(VirtAddr(end)).is_err());
        fixture.space.mprotect(last, 1, Protection::READ).unwrap();
        let grow = fixture.space.mremap(last, PAGE, 2 * PAGE, Remap::InPlace);
        assert_eq!(grow, Err(Error::NoRoom));
        let below = VirtAddr(end - 8 * PAGE);
        assert_eq!(fixture.space.mremap(last, PAGE, PAGE, Remap::To(below)), Ok(below));
        fixture.assert_filled(below.0, 1, last.0);
        assert_eq!(fixture.space.mremap(below, PAGE, PAGE, Remap::To(last)), Ok(last));
        fixture.assert_filled(last.0, 1, last.0);
        audit(fixture.machine, fixture.memory, &[fixture.space]);
        fixture.space.munmap(last, PAGE).unwrap();
    });
}

fn hint<A: Walk>() {
    scene::<A>(|fixture, end| {
        for hint in nowhere(end).into_iter().chain([0, 1, AT, AT + PAGE + 1, end - 1, u64::MAX]) {
            let place = Place::Near(VirtAddr(hint));
            let request = MapRequest {
                length: PAGE + 1,
                protection: READ_WRITE,
                place,
                ..MapRequest::default()
            };
            let at = fixture.space.mmap(&request).unwrap();
            assert!(at >= MINIMUM && at.0 + 2 * PAGE <= end && at.is_aligned(PAGE));
            assert_eq!(fixture.layout().len(), 3, "a mapping of its own at {at}");
            fixture.space.munmap(at, 2 * PAGE).unwrap();
        }
    });
}

#[test]
fn one_mapping_too_many_changes_nothing() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    // As on Linux, the first mapping above the limit can still be created.
    let few = SpaceOptions { maximum_mappings: 1, ..options() };
    let space = AddressSpace::new(&memory, few).unwrap();
    space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
    space.mmap(&fixed(4 * AT, 16 * PAGE)).unwrap();
    let before = state(&space);
    let too_many = Some(Error::TooManyMappings);
    let middle = VirtAddr(AT + 4 * PAGE);
    assert_eq!(space.mmap(&fixed(8 * AT, PAGE)).err(), too_many);
    assert_eq!(space.mmap(&fixed(AT + 16 * PAGE, PAGE)).err(), too_many, "though it would join");
    assert_eq!(space.munmap(middle, PAGE).err(), too_many);
    assert_eq!(space.mprotect(middle, PAGE, Protection::READ).err(), too_many);
    let elsewhere = VirtAddr(8 * AT);
    let there = [Remap::To(elsewhere), Remap::Leave(elsewhere), Remap::LeaveTo(elsewhere)];
    for remap in there.into_iter().chain([Remap::Leave(VirtAddr(0))]) {
        assert_eq!(space.mremap(middle, PAGE, PAGE, remap).err(), too_many, "{remap:?}");
    }
    assert_eq!(space.mremap(VirtAddr(AT), 2 * PAGE, PAGE, Remap::InPlace).err(), too_many);
    assert_eq!(space.mremap(VirtAddr(AT), PAGE, 2 * PAGE, Remap::MayMove).err(), too_many);
    assert_eq!(state(&space), before);
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_protection_with_one_cut_left_cuts_nothing() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let few = SpaceOptions { maximum_mappings: 2, ..options() };
    let space = AddressSpace::new(&memory, few).unwrap();
    space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
    let before = layout(&space);
    let refused = space.mprotect(VirtAddr(AT + PAGE), PAGE, Protection::READ);
    assert_eq!(refused, Err(Error::TooManyMappings));
    assert_eq!(layout(&space), before);
    audit(&machine, &memory, &[&space]);
}

#[test]
fn absent_entries_answer_accesses_like_linux() {
    with_fixture::<X86_64<4>>(0, |fixture| {
        let swap = Absent::Swap {
            device: 1,
            slot: 7,
            exclusive: true,
            soft_dirty: false,
            userfault: false,
        };
        for (page, absent, expected) in [
            (0, Absent::Marker(Marker::Guard), FaultError::NotMapped),
            (1, Absent::Marker(Marker::Poison), FaultError::Bus),
            (2, swap, FaultError::Bus),
        ] {
            let at = VirtAddr(AT + page * PAGE);
            fixture.space.mmap(&fixed(at.0, PAGE)).unwrap();
            testing::plant(fixture.space, at, 1, absent);
            assert_eq!(fixture.space.inspect(at), Inspection::Absent(absent));
            for access in [Access::Read, Access::Write] {
                assert_eq!(fixture.space.fault(at, access), Err(expected));
            }
            assert_eq!(fixture.space.inspect(at), Inspection::Absent(absent));
        }
        let wp = VirtAddr(AT + 3 * PAGE);
        fixture.space.mmap(&fixed(wp.0, PAGE)).unwrap();
        testing::plant(fixture.space, wp, 1, Absent::Marker(Marker::UserfaultWriteProtect));
        assert_eq!(fixture.program.load(wp), Ok(0), "nobody watches");
    });
}

#[test]
fn every_refusal_has_the_errno_of_its_operation() {
    use Errno::{EACCES, EAGAIN, EEXIST, EFAULT, EINVAL, ENOMEM, EPERM};
    let at = VirtAddr(AT);
    let operations = [Operation::Mmap, Operation::Munmap, Operation::Mprotect, Operation::Mremap];
    let table = [
        (Error::Unaligned(at), [EINVAL; 4]),
        (Error::ZeroLength, [EINVAL; 4]),
        (Error::OutOfRange { limit: at }, [ENOMEM, EINVAL, ENOMEM, EINVAL]),
        (Error::TooLong, [ENOMEM, EINVAL, ENOMEM, EINVAL]),
        (Error::BelowMinimum { minimum: at }, [EPERM; 4]),
        (Error::Exists(at), [EEXIST; 4]),
        (Error::NotMapped(at), [ENOMEM, ENOMEM, ENOMEM, EFAULT]),
        (Error::CrossesMapping { end: at }, [EFAULT; 4]),
        (Error::Overlap, [EINVAL; 4]),
        (Error::TooManyMappings, [ENOMEM; 4]),
        (Error::NoRoom, [ENOMEM; 4]),
        (Error::OutOfMemory, [ENOMEM; 4]),
        (Error::NotShared, [EINVAL; 4]),
        (Error::Invalid, [EINVAL; 4]),
        (Error::Sealed(at), [EPERM; 4]),
        (Error::AccessDenied, [EACCES; 4]),
        (Error::LimitReached, [ENOMEM; 4]),
        (Error::Overcommitted, [ENOMEM; 4]),
        (Error::LockLimit, [EAGAIN; 4]),
        (Error::LockForbidden, [EPERM; 4]),
    ];
    for (error, expected) in table {
        assert_eq!(operations.map(|operation| error.errno(operation)), expected, "{error:?}");
        assert!(!error.to_string().is_empty());
    }
    assert_eq!((EPERM as i32, ENOMEM as i32, EFAULT as i32), (1, 12, 14));
    assert_eq!((EEXIST as i32, EINVAL as i32), (17, 22));
}

#[test]
fn an_audit_of_nothing_finds_nothing() {
    let (_machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let mut scratch = vec![u32::MAX; check::scratch_words(&memory)];
    let report = check::check::<Machine<X86_64<4>>>(&memory, &[], &mut scratch).unwrap();
    assert_eq!(report.free_frames, memory.free_frame_count());
    assert_eq!((report.mappings, report.tables, report.pages), (0, 0, 0));
}
