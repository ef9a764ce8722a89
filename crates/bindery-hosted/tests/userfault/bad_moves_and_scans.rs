//! Each field of the structures of `UFFDIO_MOVE` and `PAGEMAP_SCAN` at its edges: the errno is that
//! of Linux, and a refused request changes nothing.

use bindery::addr::VirtAddr;
use bindery::{
    AddressSpace, Errno, Error, Inspection, Mapping, MoveMode, PageCategories, Protection,
    UserfaultFeatures, UserfaultModes,
};
use bindery_linux::proc::{SCAN_END, SCAN_WORDS, pagemap_scan};
use bindery_linux::{UserfaultRequest, userfault_control};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;

use super::fixture::{A, AT, Fixture, PAGE, PAGES, Space, Wish, at, with_wish};
use crate::support::{GIB, fixed, options};

/// The source of moves: mapped, written and not registered. Nothing is mapped behind it.
const FROM: u64 = 4 * GIB;
const SOURCES: u64 = 256;
/// The number of present pages, both at the start of the registered memory and of the source.
const FILLED: u64 = 8;
/// The number of mapped, unregistered pages after the registered ones.
const OTHERS: u64 = 8;
/// The span of one table.
const TABLE: u64 = 512 * PAGE;
/// As on Linux, the last page of the half cannot be mapped.
const END: u64 = (1 << 47) - PAGE;

fn with_scene(wish: Wish, scenario: impl FnOnce(&Fixture<'_, '_>)) {
    with_wish(wish, |fixture| {
        let space = fixture.space;
        space.mmap(&fixed(AT + PAGES * PAGE, OTHERS * PAGE)).unwrap();
        space.mmap(&fixed(FROM, SOURCES * PAGE)).unwrap();
        for page in 0..FILLED {
            space.write_user(VirtAddr(FROM + page * PAGE), &[1]).unwrap();
        }
        scenario(fixture);
        space.munmap(at(PAGES), OTHERS * PAGE).unwrap();
        space.munmap(VirtAddr(FROM), SOURCES * PAGE).unwrap();
    });
}

/// All state that a refused request could have changed.
fn state(space: &Space<'_>) -> (Vec<Mapping>, Vec<Inspection<A>>) {
    let mut mappings = Vec::new();
    space.for_each_mapping(|mapping| mappings.push(mapping));
    let registered = (0..PAGES + OTHERS).step_by(7).map(at);
    let sources = (0..FILLED + 2).map(|page| VirtAddr(FROM + page * PAGE));
    (mappings, registered.chain(sources).map(|page| space.inspect(page)).collect())
}

fn runner() -> TestRunner {
    let config = ProptestConfig { cases: 1500, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
}

fn addresses() -> impl Strategy<Value = u64> {
    let edges = vec![
        0,
        1,
        PAGE,
        AT - PAGE,
        AT,
        AT + 1,
        AT + (PAGES - 1) * PAGE,
        AT + PAGES * PAGE,
        AT + (PAGES + OTHERS) * PAGE,
        FROM - PAGE,
        FROM,
        FROM + PAGE - 1,
        FROM + FILLED * PAGE,
        FROM + (SOURCES - 1) * PAGE,
        FROM + SOURCES * PAGE,
        END - PAGE,
        END,
        END + PAGE,
        1 << 63,
        u64::MAX - PAGE + 1,
        u64::MAX,
    ];
    prop_oneof![
        select(edges),
        (0..PAGES + 2 * OTHERS).prop_map(|page| AT + page * PAGE),
        (0..SOURCES + 2).prop_map(|page| FROM + page * PAGE),
    ]
}

fn lengths() -> impl Strategy<Value = u64> {
    let edges = vec![
        0,
        1,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        SOURCES * PAGE,
        PAGES * PAGE,
        END,
        1 << 63,
        u64::MAX - PAGE + 1,
        u64::MAX,
    ];
    prop_oneof![select(edges), (1..2 * SOURCES).prop_map(|pages| pages * PAGE)]
}

/// The end of the mapping that contains an address.
fn end_of_mapping(start: u64) -> Option<u64> {
    let mappings = [(AT, PAGES * PAGE), (AT + PAGES * PAGE, OTHERS * PAGE), (FROM, SOURCES * PAGE)];
    let inside = |(first, length): &&(u64, u64)| (*first..first + length).contains(&start);
    mappings.iter().find(inside).map(|(first, length)| first + length)
}

/// Linux's answer for the first page of a move; `None` if the page moves or is skipped.
fn refused_move([to, from, length, mode]: [u64; 4], filled: bool) -> Option<Errno> {
    let fits = |start: u64| {
        let end = start.checked_add(length).filter(|end| *end <= END);
        start.is_multiple_of(PAGE) && start >= 1 << 16 && end.is_some()
    };
    if !length.is_multiple_of(PAGE) || length == 0 || !fits(to) || !fits(from) || mode > 3 {
        return Some(Errno::EINVAL);
    }
    let (Some(to_end), Some(from_end)) = (end_of_mapping(to), end_of_mapping(from)) else {
        return Some(Errno::ENOENT);
    };
    let is_registered = (AT..AT + PAGES * PAGE).contains(&to);
    if length > to_end - to || length > from_end - from || !is_registered {
        return Some(Errno::EINVAL);
    }
    let in_registered = |page: u64| filled && page < AT + FILLED * PAGE;
    let is_there = |page: u64| in_registered(page) || (FROM..FROM + FILLED * PAGE).contains(&page);
    // A missing table at the source is reported before an occupied destination.
    let has_table = from >= FROM || filled && from < AT + TABLE;
    match mode & 2 == 0 {
        true if !has_table => Some(Errno::ENOENT),
        _ if in_registered(to) => Some(Errno::EEXIST),
        true if !is_there(from) => Some(Errno::ENOENT),
        _ => None,
    }
}

#[test]
fn each_field_of_a_move_at_its_edges() {
    for filled in [false, true] {
        with_scene(Wish::default(), |fixture| {
            if filled {
                fixture.copy(0, FILLED * PAGE, 7).unwrap();
            }
            let modes = prop_oneof![select(vec![4, 1 << 8, 1 << 32, 1 << 63, u64::MAX]), 0..4u64];
            let calls = (addresses(), addresses(), lengths(), modes, any::<u64>());
            let tried = runner().run(&calls, |(to, from, length, mode, moved)| {
                let Some(errno) = refused_move([to, from, length, mode], filled) else {
                    return Err(TestCaseError::reject("it moves"));
                };
                let mut words = [to, from, length, mode, moved];
                let before = (state(fixture.space), words);
                let (space, fd) = (fixture.space, fixture.fd);
                let mut source = |_: VirtAddr, _: &mut [u8]| Ok(());
                let request = UserfaultRequest::Move;
                let done = userfault_control(space, space, fd, request, &mut words, &mut source);
                prop_assert_eq!(done.map(|_| ()), Err(errno));
                prop_assert_eq!(&state(space), &before.0);
                prop_assert!(words[4] == moved || words[4] as i64 == -(errno as i64));
                prop_assert_eq!(&words[..4], &before.1[..4]);
                Ok(())
            });
            tried.unwrap();
        });
    }
}

/// A handle of another address space, pages of another address space, and a range across VMAs.
#[test]
fn strangers_and_ranges_across_mappings_do_not_move() {
    with_scene(Wish::default(), |fixture| {
        let (space, fd) = (fixture.space, fixture.fd);
        let other = AddressSpace::new(fixture.memory, options()).unwrap();
        let theirs = other.userfault(UserfaultFeatures::empty(), Default::default()).unwrap();
        // Parts of both places are separate mappings.
        space.mprotect(at(100), PAGE, Protection::READ).unwrap();
        space.mprotect(VirtAddr(FROM + 100 * PAGE), PAGE, Protection::READ).unwrap();
        let before = state(space);
        let words = [AT, FROM, PAGE, 0, 5];
        let control = |space: &Space<'_>, caller: &Space<'_>, fd, mut words: [u64; 5]| {
            let mut source = |_: VirtAddr, _: &mut [u8]| Ok(());
            userfault_control(space, caller, fd, UserfaultRequest::Move, &mut words, &mut source)
        };
        assert_eq!(control(space, space, &theirs, words), Err(Errno::EINVAL));
        assert_eq!(control(&other, &other, fd, words), Err(Errno::EINVAL));
        assert_eq!(control(space, &other, fd, words), Err(Errno::EINVAL));
        let mode = MoveMode::ALLOW_SOURCE_HOLES.bits().into();
        for (to, from) in [(98, 0), (0, 98), (100, 0), (0, 100)] {
            let words = [AT + to * PAGE, FROM + from * PAGE, 4 * PAGE, mode, 5];
            assert_eq!(control(space, space, fd, words), Err(Errno::EINVAL), "{to}, {from}");
        }
        assert_eq!(state(space), before);
        let moved = space.handler(fd).move_pages(at(0), VirtAddr(FROM), PAGE, MoveMode::empty());
        assert_eq!(moved, Ok(()));
        let gone = space.handler(fd).move_pages(at(1), VirtAddr(FROM), PAGE, MoveMode::empty());
        assert_eq!(gone.map_err(|gone| gone.error), Err(Error::NotMapped(VirtAddr(FROM))));
        other.close_userfault(theirs);
    });
}

/// Linux's answer to a scan that protects nothing. `None` if the scan may end before it reaches the
/// error.
fn expected_scan(words: &[u64; SCAN_WORDS]) -> Option<Result<(), Errno>> {
    let [size, flags, start, end, _, room, length, most, categories @ ..] = *words;
    let known = categories.iter().all(|bits| bits & !PageCategories::all().bits() == 0);
    let accessible = |start: u64, length: Option<u64>| {
        let end = length.and_then(|length| start.checked_add(length));
        end.is_some_and(|end| end <= END)
    };
    if size != 96 || flags > 3 || !known || !start.is_multiple_of(PAGE) {
        return Some(Err(Errno::EINVAL));
    }
    if !accessible(start, end.checked_sub(start)) {
        return Some(Err(Errno::EFAULT));
    }
    if room == 0 && length > 0 {
        return Some(Err(Errno::EINVAL));
    }
    if room != 0 && !accessible(room, length.checked_mul(24)) {
        return Some(Err(Errno::EFAULT));
    }
    // An empty range has no effect at any address.
    let touches =
        |first: u64, pages: u64| start < end && start < first + pages * PAGE && end > first;
    let others = touches(AT + PAGES * PAGE, OTHERS) || touches(FROM, SOURCES);
    match others && flags & 2 != 0 {
        true if most == 0 && length == 0 => Some(Err(Errno::EPERM)),
        true => None,
        false => Some(Ok(())),
    }
}

#[test]
fn each_field_of_a_scan_at_its_edges() {
    let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
    let wish = Wish { features, modes: UserfaultModes::WRITE_PROTECT, ..Wish::default() };
    with_scene(wish, |fixture| {
        (0..FILLED).for_each(|page| fixture.space.write_user(at(page), &[1]).unwrap());
        let sizes = prop_oneof![19 => Just(96), 1 => select(vec![0, 88, 95, 97, 104, u64::MAX])];
        let flags = prop_oneof![9 => select(vec![0, 2]), 1 => select(vec![4, 6, 1 << 63])];
        let lengths = || select(vec![0, 1, 2, 33, 1 << 40, 1 << 59, u64::MAX / 24, u64::MAX]);
        let most = select(vec![0, 1, 7, u64::MAX]);
        let bits = || {
            let edges = vec![1 << 9, 1 << 32, 1 << 63, u64::MAX];
            prop_oneof![15 => 0..512u64, 1 => select(edges)]
        };
        let calls = (
            (sizes, flags, addresses(), addresses(), any::<u64>()),
            (addresses(), lengths(), most),
            (bits(), bits(), bits(), bits()),
        );
        let tried = runner().run(&calls, |(first, second, third)| {
            let (size, flags, start, end, walked) = first;
            let (room, length, most) = second;
            let mut words = [
                size, flags, start, end, walked, room, length, most, third.0, third.1, third.2,
                third.3,
            ];
            let expected = expected_scan(&words);
            prop_assume!(expected.is_some());
            let before = (state(fixture.space), words);
            let mut written = 0;
            let done = pagemap_scan(fixture.space, &mut words, &mut |_, _| {
                written += 1;
                Ok(())
            });
            prop_assert_eq!(Some(done.map(|_| ())), expected, "{:x?}", before.1);
            prop_assert_eq!(&state(fixture.space), &before.0);
            prop_assert!(done.map_or(0, |found| found) == written && written <= length);
            if done.is_ok() {
                let last = words[SCAN_END];
                prop_assert!(last >= start && last <= end.next_multiple_of(PAGE));
            } else if done != Err(Errno::EPERM) {
                prop_assert_eq!(words[SCAN_END], walked);
            }
            words[SCAN_END] = walked;
            prop_assert_eq!(words, before.1);
            Ok(())
        });
        tried.unwrap();
    });
}
