//! Addresses and lengths that make no sense, in every argument of every verb: each is refused for
//! the right reason, and nothing has changed, not even a counter.

mod common;
mod stage;

use bindery::addr::VirtAddr;
use bindery::arch::{Absent, Marker, X86_64};
use bindery::check;
use bindery::{
    Access, AddressSpace, Counts, Errno, Error, FaultError, FolioError, Inspection, MapRequest,
    Mapping, Place, Protection, Remap, SpaceOptions, Verb, testing,
};
use bindery_hosted::{Machine, Walk};
use common::{GIB, MIB, READ_WRITE, audit, fixed, options, strict};
use stage::{Stage, layout, on_stage};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// The lowest address that may be mapped.
const MINIMUM: VirtAddr = VirtAddr(0x1_0000);

on_every_architecture! {
    a_mapping_that_cannot_be_is_refused => map;
    an_unmapping_that_cannot_be_is_refused => unmap;
    a_discard_that_cannot_be_is_refused => discard;
    a_protection_that_cannot_be_is_refused => protect;
    a_resizing_that_cannot_be_is_refused => resize;
    a_move_that_cannot_be_is_refused => move_to;
    a_fault_at_an_address_that_is_none_is_a_segmentation_fault => fault;
    looking_at_an_address_that_is_none_finds_nothing => look;
    the_last_page_of_user_space_is_a_page_as_any_other => last_page;
    a_hint_that_makes_no_sense_is_no_error => hint;
}

/// Sixteen pages read-write, of which one was written; behind them sixteen read-only.
fn scene<A: Walk>(play: impl FnOnce(&Stage<'_, '_, A>, u64)) {
    on_stage::<A>(0, |stage| {
        stage.space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        let read_only =
            MapRequest { protection: Protection::READ, ..fixed(AT + 16 * PAGE, 16 * PAGE) };
        stage.space.mmap(&read_only).unwrap();
        stage.fill(AT, 1);
        play(stage, A::USER_END);
        stage.assert_filled(AT, 1, AT);
    });
}

/// Everything about an address space that a refused call could have changed.
fn state<A: Walk>(space: &AddressSpace<'_, Machine<A>>) -> (Vec<Mapping>, Counts, u64, usize) {
    (layout(space), space.counts(), space.memory().free_frames(), space.mapping_count())
}

/// Makes a call that must be refused so, and change nothing.
#[track_caller]
fn refused<A: Walk, T, E: Copy + PartialEq + core::fmt::Debug>(
    stage: &Stage<'_, '_, A>,
    expected: E,
    call: impl FnOnce(&AddressSpace<'_, Machine<A>>) -> Result<T, E>,
) {
    let before = state(stage.space);
    let result = call(stage.space).err();
    assert_eq!(result, Some(expected));
    assert_eq!(state(stage.space), before);
}

fn out_of_range(end: u64) -> Error {
    Error::OutOfRange { limit: VirtAddr(end) }
}

/// Addresses that no user program has.
fn nowhere(end: u64) -> [u64; 7] {
    let kernel = 0xffff_8000_0000_0000;
    [end, end + PAGE, 1 << 57, 1 << 63, kernel, u64::MAX - 2 * PAGE + 1, u64::MAX - PAGE + 1]
}

fn map<A: Walk>() {
    scene::<A>(|stage, end| {
        let map = |place, length, expected| {
            let request = MapRequest { length, protection: READ_WRITE, place };
            refused(stage, expected, |space| space.mmap(&request));
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

/// What `munmap` and `discard` refuse alike.
fn bad_ranges(end: u64) -> Vec<(u64, u64, Error)> {
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
    scene::<A>(|stage, end| {
        for (start, length, expected) in bad_ranges(end) {
            refused(stage, expected, |space| space.munmap(VirtAddr(start), length));
        }
        for start in [0, AT, end - PAGE, end] {
            refused(stage, Error::ZeroLength, |space| space.munmap(VirtAddr(start), 0));
        }
        let before = state(stage.space);
        for (start, length) in [(0, AT), (AT + 32 * PAGE, end - AT - 32 * PAGE), (end - PAGE, 1)] {
            assert_eq!(stage.space.munmap(VirtAddr(start), length), Ok(()), "nothing is there");
        }
        assert_eq!(state(stage.space), before);
    });
}

fn discard<A: Walk>() {
    scene::<A>(|stage, end| {
        for (start, length, expected) in bad_ranges(end) {
            refused(stage, expected, |space| space.discard(VirtAddr(start), length));
        }
        let hole = VirtAddr(AT + 32 * PAGE);
        refused(stage, Error::NotMapped(hole), |space| space.discard(hole, PAGE));
        let before = state(stage.space);
        assert_eq!(stage.space.discard(VirtAddr(AT), 0), Ok(()));
        assert_eq!(state(stage.space), before);
    });
}

fn protect<A: Walk>() {
    scene::<A>(|stage, end| {
        let protect = |start, length, expected| {
            for protection in [Protection::empty(), Protection::READ, Protection::all()] {
                refused(stage, expected, |space| {
                    space.mprotect(VirtAddr(start), length, protection)
                });
            }
        };
        protect(AT + 1, PAGE, Error::Unaligned(VirtAddr(AT + 1)));
        protect(AT + 1, 0, Error::Unaligned(VirtAddr(AT + 1)));
        protect(u64::MAX, 1, Error::Unaligned(VirtAddr(u64::MAX)));
        // Only a range that wraps is out of range; any other has a beginning where nothing is.
        for length in [u64::MAX, u64::MAX - AT + 1, u64::MAX - PAGE + 2] {
            protect(AT, length, out_of_range(end));
        }
        protect(u64::MAX - PAGE + 1, PAGE, out_of_range(end));
        for at in nowhere(end).into_iter().filter(|at| *at != u64::MAX - PAGE + 1) {
            protect(at, PAGE, Error::NotMapped(VirtAddr(at)));
        }
        for at in [0, AT - PAGE, AT + 32 * PAGE, end - PAGE] {
            protect(at, PAGE, Error::NotMapped(VirtAddr(at)));
            protect(at, 64 * MIB, Error::NotMapped(VirtAddr(at)));
        }
        let before = state(stage.space);
        for at in [0, AT, end, u64::MAX - PAGE + 1] {
            assert_eq!(stage.space.mprotect(VirtAddr(at), 0, Protection::READ), Ok(()));
        }
        assert_eq!(state(stage.space), before);
    });
}

#[test]
fn a_protection_of_a_range_with_a_hole_is_refused_behind_what_it_has_done() {
    scene::<X86_64<4>>(|stage, end| {
        let hole = Error::NotMapped(VirtAddr(AT + 32 * PAGE));
        let (at, all) = (VirtAddr(AT), end - AT);
        assert_eq!(stage.space.mprotect(at, all, Protection::READ), Err(hole));
        let [whole] = stage.layout()[..] else { panic!("{:?}", stage.layout()) };
        assert_eq!((whole.range.len(), whole.protection), (32 * PAGE, Protection::READ));
    });
}

fn resize<A: Walk>() {
    scene::<A>(|stage, end| {
        for remap in [Remap::InPlace, Remap::MayMove] {
            let resize = |old, old_length, length, expected| {
                refused(stage, expected, |space| {
                    space.mremap(VirtAddr(old), old_length, length, remap)
                });
            };
            for at in [AT + 1, AT + PAGE - 1, u64::MAX] {
                resize(at, PAGE, PAGE, Error::Unaligned(VirtAddr(at)));
            }
            // A length that wraps when it is rounded up is zero.
            for length in [0, u64::MAX, u64::MAX - PAGE + 2] {
                resize(AT, PAGE, length, Error::ZeroLength);
                resize(end, length, length, Error::ZeroLength);
            }
            for length in [end + 1, 1 << 57, 1 << 63, u64::MAX - PAGE + 1] {
                resize(AT, 16 * PAGE, length, out_of_range(end));
            }
            for at in nowhere(end).into_iter().chain([0, AT - PAGE, AT + 32 * PAGE]) {
                resize(at, PAGE, 2 * PAGE, Error::NotMapped(VirtAddr(at)));
                resize(at, 0, PAGE, Error::NotMapped(VirtAddr(at)));
            }
            resize(AT, 0, PAGE, Error::NotShared);
            let crossing = Error::CrossesMapping { end: VirtAddr(AT + 16 * PAGE) };
            resize(AT, 17 * PAGE, 18 * PAGE, crossing);
            resize(AT + 15 * PAGE, 2 * PAGE, 3 * PAGE, crossing);
            resize(AT, 16 * PAGE, end, Error::NoRoom);
        }
        let in_place = |old, old_length| {
            refused(stage, Error::NoRoom, |space| {
                space.mremap(VirtAddr(old), old_length, old_length + PAGE, Remap::InPlace)
            });
        };
        in_place(AT, 16 * PAGE);
        in_place(AT, 3 * PAGE);
        // Shrinking what ends beyond user space would unmap there.
        for tail in [1 << 63, u64::MAX - PAGE + 1] {
            refused(stage, out_of_range(end), |space| {
                space.mremap(VirtAddr(AT), tail, PAGE, Remap::InPlace)
            });
        }
    });
}

fn move_to<A: Walk>() {
    scene::<A>(|stage, end| {
        let old = AT + 2 * PAGE;
        let move_to = |old_length, length, to, expected| {
            refused(stage, expected, |space| {
                space.mremap(VirtAddr(old), old_length, length, Remap::To(VirtAddr(to)))
            });
        };
        for to in [1, AT + 64 * PAGE + 1, end - 1] {
            move_to(PAGE, PAGE, to, Error::Unaligned(VirtAddr(to)));
        }
        for to in nowhere(end) {
            move_to(PAGE, PAGE, to, out_of_range(end));
        }
        move_to(PAGE, 2 * PAGE, end - PAGE, out_of_range(end));
        move_to(PAGE, end, PAGE, out_of_range(end));
        move_to(PAGE, end + 1, AT, out_of_range(end));
        move_to(PAGE, 0, AT + 64 * PAGE, Error::ZeroLength);
        move_to(2 * PAGE, 2 * PAGE, old, Error::Overlap);
        move_to(2 * PAGE, 2 * PAGE, old + PAGE, Error::Overlap);
        move_to(2 * PAGE, 2 * PAGE, old - PAGE, Error::Overlap);
        move_to(PAGE, 3 * PAGE, old - 2 * PAGE, Error::Overlap);
        move_to(0, PAGE, AT + 64 * PAGE, Error::NotShared);
        let crossing = Error::CrossesMapping { end: VirtAddr(AT + 16 * PAGE) };
        move_to(15 * PAGE, 16 * PAGE, AT + 64 * PAGE, crossing);
        for to in [0, PAGE, MINIMUM.0 - PAGE] {
            move_to(PAGE, PAGE, to, Error::BelowMinimum { minimum: MINIMUM });
            move_to(8 * PAGE, PAGE, to, Error::BelowMinimum { minimum: MINIMUM });
        }
        for at in nowhere(end).into_iter().chain([0, AT - PAGE, AT + 32 * PAGE]) {
            let to = Remap::To(VirtAddr(AT + 64 * PAGE));
            let expected = Error::NotMapped(VirtAddr(at));
            refused(stage, expected, |space| space.mremap(VirtAddr(at), PAGE, PAGE, to));
        }
    });
}

fn fault<A: Walk>() {
    scene::<A>(|stage, end| {
        let accesses = [Access::Read, Access::Write, Access::Execute];
        let holes = [0, 1, AT - 1, AT + 32 * PAGE, end - 1, u64::MAX];
        for at in nowhere(end).into_iter().chain(holes) {
            for access in accesses {
                refused(stage, FaultError::NotMapped, |space| space.fault(VirtAddr(at), access));
            }
        }
        for (at, access) in [
            (AT, Access::Execute),
            (AT + 16 * PAGE - 1, Access::Execute),
            (AT + 16 * PAGE, Access::Write),
            (AT + 31 * PAGE, Access::Execute),
        ] {
            refused(stage, FaultError::Protection, |space| space.fault(VirtAddr(at), access));
        }
        stage.space.mprotect(VirtAddr(AT), 16 * PAGE, Protection::empty()).unwrap();
        for access in accesses {
            refused(stage, FaultError::Protection, |space| space.fault(VirtAddr(AT), access));
        }
        stage.space.mprotect(VirtAddr(AT), 16 * PAGE, READ_WRITE).unwrap();
    });
}

fn look<A: Walk>() {
    scene::<A>(|stage, end| {
        let holes = [0, 1, AT - 1, AT + PAGE, AT + 32 * PAGE, end - 1, u64::MAX];
        let before = state(stage.space);
        for at in nowhere(end).into_iter().chain(holes).map(VirtAddr) {
            assert_eq!(stage.space.inspect(at), Inspection::Empty);
            assert!(!stage.space.is_dirty(at));
        }
        assert_eq!((before.0, before.2), (stage.layout(), stage.memory.free_frames()));
        for at in nowhere(end).into_iter().chain([0, AT - 1, AT + 32 * PAGE, u64::MAX]) {
            refused(stage, FolioError::NotMapped, |space| space.collapse(VirtAddr(at)));
            refused(stage, FolioError::NotMapped, |space| space.split_folio(VirtAddr(at), 0));
        }
    });
}

fn last_page<A: Walk>() {
    scene::<A>(|stage, end| {
        let last = VirtAddr(end - PAGE);
        stage.space.mmap(&fixed(last.0, PAGE)).unwrap();
        stage.fill(last.0, 1);
        assert!(stage.program.load(VirtAddr(end)).is_err());
        stage.space.mprotect(last, 1, Protection::READ).unwrap();
        let grow = stage.space.mremap(last, PAGE, 2 * PAGE, Remap::InPlace);
        assert_eq!(grow, Err(Error::NoRoom));
        let below = VirtAddr(end - 8 * PAGE);
        assert_eq!(stage.space.mremap(last, PAGE, PAGE, Remap::To(below)), Ok(below));
        stage.assert_filled(below.0, 1, last.0);
        assert_eq!(stage.space.mremap(below, PAGE, PAGE, Remap::To(last)), Ok(last));
        stage.assert_filled(last.0, 1, last.0);
        audit(stage.machine, stage.memory, &[stage.space]);
        stage.space.munmap(last, PAGE).unwrap();
    });
}

fn hint<A: Walk>() {
    scene::<A>(|stage, end| {
        for hint in nowhere(end).into_iter().chain([0, 1, AT, AT + PAGE + 1, end - 1, u64::MAX]) {
            let place = Place::Near(VirtAddr(hint));
            let request = MapRequest { length: PAGE + 1, protection: READ_WRITE, place };
            let at = stage.space.mmap(&request).unwrap();
            assert!(at >= MINIMUM && at.0 + 2 * PAGE <= end && at.is_aligned(PAGE));
            assert_eq!(stage.layout().len(), 3, "a mapping of its own at {at}");
            stage.space.munmap(at, 2 * PAGE).unwrap();
        }
    });
}

#[test]
fn a_mapping_too_many_is_refused_by_every_verb_and_changes_nothing() {
    let (machine, memory) = strict::<X86_64<4>>(16 * MIB);
    let few = SpaceOptions { maximum_mappings: 1, ..options() };
    let space = AddressSpace::new(&memory, few).unwrap();
    space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
    let before = state(&space);
    let too_many = Some(Error::TooManyMappings);
    let middle = VirtAddr(AT + 4 * PAGE);
    assert_eq!(space.mmap(&fixed(8 * AT, PAGE)).err(), too_many);
    assert_eq!(space.munmap(middle, PAGE).err(), too_many);
    assert_eq!(space.mprotect(middle, PAGE, Protection::READ).err(), too_many);
    assert_eq!(space.mremap(middle, PAGE, PAGE, Remap::To(VirtAddr(8 * AT))).err(), too_many);
    assert_eq!(space.mremap(VirtAddr(AT), 2 * PAGE, PAGE, Remap::InPlace).err(), too_many);
    assert_eq!(space.mremap(VirtAddr(AT), PAGE, 2 * PAGE, Remap::MayMove).err(), too_many);
    assert_eq!(state(&space), before);
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_protection_that_could_be_cut_once_and_not_twice_cuts_nothing() {
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
fn what_stands_where_a_page_was_answers_a_touch_as_linux_does() {
    on_stage::<X86_64<4>>(0, |stage| {
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
            stage.space.mmap(&fixed(at.0, PAGE)).unwrap();
            testing::plant(stage.space, at, 1, absent);
            assert_eq!(stage.space.inspect(at), Inspection::Absent(absent));
            for access in [Access::Read, Access::Write] {
                assert_eq!(stage.space.fault(at, access), Err(expected));
            }
            assert_eq!(stage.space.inspect(at), Inspection::Absent(absent));
        }
        let wp = VirtAddr(AT + 3 * PAGE);
        stage.space.mmap(&fixed(wp.0, PAGE)).unwrap();
        testing::plant(stage.space, wp, 1, Absent::Marker(Marker::UserfaultWriteProtect));
        assert_eq!(stage.program.load(wp), Ok(0), "nobody watches");
    });
}

#[test]
fn every_refusal_has_the_errno_of_its_verb() {
    use Errno::{EEXIST, EFAULT, EINVAL, ENOMEM, EPERM};
    let at = VirtAddr(AT);
    let verbs = [Verb::Mmap, Verb::Munmap, Verb::Mprotect, Verb::Mremap];
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
    ];
    for (error, expected) in table {
        assert_eq!(verbs.map(|verb| error.errno(verb)), expected, "{error:?}");
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
    assert_eq!(report.free_frames, memory.free_frames());
    assert_eq!((report.mappings, report.tables, report.pages), (0, 0, 0));
}
