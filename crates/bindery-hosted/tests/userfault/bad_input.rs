//! Each field of each request of a userfaultfd at its edges: the errno is that of Linux, and a
//! refused request changes nothing.

use bindery::addr::VirtAddr;
use bindery::{
    AddressSpace, Errno, Error, FillMode, Inspection, PartialFill, Platform, UserfaultFeatures,
    UserfaultModes, WriteProtectMode,
};
use bindery_linux::{UserfaultRequest, userfault_api, userfault_control};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;

use super::fixture::{AT, Fixture, PAGE, PAGES, Wish, at, with_wish};
use crate::support::fixed;

/// The number of registered pages that are present.
const FILLED: u64 = 8;
/// The number of mapped, unregistered pages after the registered ones.
const OTHERS: u64 = 8;
/// As on Linux, the last page of the half cannot be mapped.
const END: u64 = (1 << 47) - PAGE;
const REQUESTS: [UserfaultRequest; 8] = [
    UserfaultRequest::Register,
    UserfaultRequest::Unregister,
    UserfaultRequest::Wake,
    UserfaultRequest::Copy,
    UserfaultRequest::ZeroPage,
    UserfaultRequest::WriteProtect,
    UserfaultRequest::Continue,
    UserfaultRequest::Poison,
];

fn with_scene(scenario: impl FnOnce(&Fixture<'_, '_>)) {
    let modes = UserfaultModes::MISSING | UserfaultModes::WRITE_PROTECT;
    with_wish(Wish { modes, ..Wish::default() }, |fixture| {
        fixture.copy(0, FILLED * PAGE, 7).unwrap();
        fixture.space.mmap(&fixed(AT + PAGES * PAGE, OTHERS * PAGE)).unwrap();
        scenario(fixture);
        fixture.space.munmap(at(PAGES), OTHERS * PAGE).unwrap();
    });
}

/// All state that a refused request could have changed.
fn state<P: Platform>(
    space: &AddressSpace<'_, P>,
) -> (Vec<bindery::Mapping>, Vec<Inspection<P::Arch>>) {
    let mut mappings = Vec::new();
    space.for_each_mapping(|mapping| mappings.push(mapping));
    let pages = (0..PAGES + OTHERS).step_by(7).map(|page| space.inspect(at(page)));
    (mappings, pages.collect())
}

fn addresses() -> impl Strategy<Value = u64> {
    let edges = vec![
        0,
        PAGE,
        AT - PAGE,
        AT,
        AT + 1,
        AT + FILLED * PAGE,
        AT + (PAGES - 1) * PAGE,
        AT + PAGES * PAGE,
        AT + (PAGES + OTHERS) * PAGE,
        END - PAGE,
        END,
        1 << 63,
        u64::MAX - PAGE + 1,
        u64::MAX,
    ];
    prop_oneof![select(edges), (0..PAGES + 2 * OTHERS).prop_map(|page| AT + page * PAGE)]
}

fn lengths() -> impl Strategy<Value = u64> {
    let edges = vec![
        0,
        1,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        PAGES * PAGE,
        END,
        1 << 63,
        u64::MAX - PAGE + 1,
        u64::MAX,
    ];
    prop_oneof![select(edges), (1..2 * PAGES).prop_map(|pages| pages * PAGE)]
}

fn modes() -> impl Strategy<Value = u64> {
    prop_oneof![select(vec![8, 1 << 8, 1 << 32, 1 << 63, u64::MAX]), 0..8u64, 0..2u64]
}

/// Linux's answer.
fn expected(request: UserfaultRequest, start: u64, length: u64, mode: u64) -> Result<(), Errno> {
    use UserfaultRequest as R;
    let aligned = start.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
    let end = start.checked_add(length).filter(|end| *end <= END);
    let (Some(end), true) = (end, aligned && length > 0 && start >= 1 << 16) else {
        return Err(Errno::EINVAL);
    };
    let modes = match request {
        R::Register => mode != 0 && mode < 8 && mode & 4 == 0,
        R::Unregister | R::Wake => true,
        R::Copy | R::Continue => mode < 4,
        R::WriteProtect => mode < 3,
        _ => mode < 2,
    };
    if !modes {
        return Err(Errno::EINVAL);
    }
    let (first, last, behind) = (AT, AT + PAGES * PAGE, AT + (PAGES + OTHERS) * PAGE);
    let touches = start < behind && end > first;
    let inside = start >= first && end <= last;
    match request {
        R::Wake => Ok(()),
        R::Register | R::Unregister if touches => Ok(()),
        R::Register | R::Unregister => Err(Errno::EINVAL),
        R::WriteProtect if touches && end <= last => Ok(()),
        _ if !inside => Err(Errno::ENOENT),
        R::Continue => Err(Errno::EINVAL),
        _ if start < first + FILLED * PAGE => Err(Errno::EEXIST),
        _ => Ok(()),
    }
}

#[test]
fn each_field_at_its_edges() {
    with_scene(|fixture| {
        let config =
            ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() };
        let mut runner = TestRunner::new(config);
        let calls = (select(&REQUESTS[..]), addresses(), lengths(), modes());
        let tried = runner.run(&calls, |(request, start, length, mode)| {
            let expected = expected(request, start, length, mode);
            // This test does not undo successful calls.
            prop_assume!(expected.is_err() || request == UserfaultRequest::Wake);
            let copies = request == UserfaultRequest::Copy;
            let mut words =
                if copies { [start, AT, length, mode, 5] } else { [start, length, mode, 5, 6] };
            let before = (state(fixture.space), words);
            let mut source = |_: VirtAddr, piece: &mut [u8]| {
                piece.fill(1);
                Ok(())
            };
            let (space, fd) = (fixture.space, fixture.fd);
            let done = userfault_control(space, space, fd, request, &mut words, &mut source);
            prop_assert_eq!(done.map(|_| ()), expected);
            if request != UserfaultRequest::WriteProtect {
                prop_assert_eq!(&state(space), &before.0);
            }
            if let Some(result) = request.result() {
                let told = words[result] == before.1[result]
                    || words[result] as i64 == -(done.unwrap_err() as i64);
                prop_assert!(told, "{:?}", words);
                words[result] = before.1[result];
            }
            prop_assert_eq!(words, before.1);
            Ok(())
        });
        tried.unwrap();
    });
}

#[test]
fn ranges_across_mappings_are_refused() {
    with_scene(|fixture| {
        let last = at(PAGES - 1);
        let absent = Err(PartialFill { done: 0, error: Error::NotMapped(last) });
        assert_eq!(fixture.copy(PAGES - 1, 2 * PAGE, 1), absent);
        let (space, fd, none) = (fixture.space, fixture.fd, FillMode::empty());
        assert_eq!(space.handler(fd).fill_zeroes(last, 2 * PAGE, none), absent);
        assert_eq!(space.handler(fd).fill_poison(last, 2 * PAGE, none), absent);
        assert_eq!(space.handler(fd).fill_present(last, 2 * PAGE, none), absent);
        // Splits a registered mapping; the two parts still count as registered.
        space.mprotect(at(100), PAGE, bindery::Protection::READ).unwrap();
        let absent = Err(PartialFill { done: 0, error: Error::NotMapped(at(99)) });
        assert_eq!(fixture.copy(99, 2 * PAGE, 1), absent);
        space.handler(fd).write_protect(at(99), 2 * PAGE, WriteProtectMode::PROTECT).unwrap();
    });
}

#[test]
fn another_address_space_is_refused() {
    with_scene(|fixture| {
        let other = AddressSpace::new(fixture.memory, crate::support::options()).unwrap();
        other.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        let theirs = other.userfault(UserfaultFeatures::empty(), Default::default()).unwrap();
        let before = state(fixture.space);
        let mut source = |_: VirtAddr, _: &mut [u8]| Ok(());
        for request in REQUESTS.into_iter().filter(|request| *request != UserfaultRequest::Wake) {
            let copies = request == UserfaultRequest::Copy;
            let start = at(20).0;
            let mode = u64::from(request == UserfaultRequest::Register);
            let mut words =
                if copies { [start, AT, PAGE, 0, 5] } else { [start, PAGE, mode, 5, 6] };
            let space = fixture.space;
            let done = userfault_control(space, space, &theirs, request, &mut words, &mut source);
            assert_eq!(done, Err(Errno::EINVAL), "{request:?}");
        }
        assert_eq!(state(fixture.space), before);
        other.close_userfault(theirs);
    });
}

#[test]
fn the_handshake_refuses_what_it_does_not_know() {
    let every = |words: [u64; 3], may| {
        let mut asked = words;
        let agreed = userfault_api(&mut asked, may);
        if agreed.is_err() {
            assert_eq!(asked, [0; 3]);
        }
        agreed
    };
    for version in [0, 0xa9, 0xab, 1 << 32, u64::MAX] {
        assert_eq!(every([version, 0, 0], true), Err(Errno::EINVAL));
    }
    let known: Vec<u32> = (0..64).filter(|bit| every([0xaa, 1 << bit, 0], true).is_ok()).collect();
    assert_eq!(known, (0..=16).collect::<Vec<u32>>());
    assert_eq!(every([0xaa, 1 << 1, 0], false), Err(Errno::EPERM));
    let asynchronous = every([0xaa, 1 << 15, 77], true).unwrap();
    assert!(asynchronous.contains(UserfaultFeatures::WP_UNPOPULATED));
}
