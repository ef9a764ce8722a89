//! Faults that are served by pages from another place (`UFFDIO_MOVE`).

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::Permissions;
use bindery::{
    Advice, Errno, Error, FillMode, Inspection, MoveMode, Operation, PartialFill,
    UserfaultFeatures, UserfaultModes, UserfaultScope,
};
use bindery_hosted::Program;

use super::fixture::{AT, Fixture, PAGE, PAGES, Wish, at, with_fixture, with_wish};
use crate::support::kernel::Finished;
use crate::support::{GIB, fixed, use_order};

/// The address of the handler's pages, which are not registered.
const FROM: u64 = 4 * GIB;

fn source(page: u64) -> VirtAddr {
    VirtAddr(FROM + page * PAGE)
}

/// Maps the source and writes to every page of it.
fn prepare(fixture: &Fixture<'_, '_>, pages: u64) {
    fixture.space.mmap(&fixed(FROM, PAGES * PAGE)).unwrap();
    let program = Program::new(fixture.machine, fixture.space);
    (0..pages).for_each(|page| program.store(source(page), page + 1).unwrap());
}

fn moves(
    fixture: &Fixture<'_, '_>,
    page: u64,
    pages: u64,
    mode: MoveMode,
) -> Result<(), PartialFill> {
    fixture.space.handler(fixture.fd).move_pages(at(page), source(page), pages * PAGE, mode)
}

#[test]
fn a_fault_waits_until_its_page_is_moved() {
    with_fixture(|fixture| {
        prepare(fixture, 8);
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            assert_eq!(fixture.fault().address, at(3));
            moves(fixture, 2, 4, MoveMode::empty()).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(4));
            let writer = fixture.spawn(scope, 1, |program| program.store(at(7), 9));
            assert_eq!(fixture.fault().address, at(7));
            moves(fixture, 7, 1, MoveMode::DONT_WAKE).unwrap();
            assert!(!writer.is_finished());
            fixture.space.wake_userfaults(fixture.fd, at(7), PAGE).unwrap();
            writer.join().unwrap().unwrap();
        });
        assert_eq!(fixture.space.inspect(source(3)), Inspection::Empty);
    });
}

/// As on Linux, a page whose content may be dropped (`MADV_FREE`) counts as written once it has
/// moved.
#[test]
fn freed_pages_keep_their_content_once_moved() {
    // A huge leaf, or a table as a whole; pages of one table; a folio, to two tables.
    let cases = [(0, 0, 512), (608, 608, 32), (504, 512, 16)];
    for (order, (to, from, pages)) in
        [0, 4, 9].into_iter().flat_map(|order| cases.map(|case| (order, case)))
    {
        with_fixture(|fixture| {
            let (space, memory) = (fixture.space, fixture.memory);
            let area = memory.swap_on(PAGES, 0).unwrap();
            use_order(memory, order);
            prepare(fixture, PAGES);
            space.madvise(source(0), PAGES * PAGE, Advice::Free).unwrap();
            let handler = space.handler(fixture.fd);
            handler.move_pages(at(to), source(from), pages * PAGE, MoveMode::empty()).unwrap();
            space.madvise(at(0), PAGES * PAGE, Advice::PageOut).unwrap();
            // A lost page would otherwise be asked for.
            space.unregister_userfault(fixture.fd, at(0), PAGES * PAGE).unwrap();
            let program = Program::new(fixture.machine, space);
            for page in 0..pages {
                let there = program.load(at(to + page));
                assert_eq!(there, Ok(from + page + 1), "order {order}, page {page} of {pages}");
            }
            space.munmap(at(0), PAGES * PAGE).unwrap();
            space.munmap(source(0), PAGES * PAGE).unwrap();
            memory.swap_off(&area).unwrap();
        });
    }
}

#[test]
fn pages_moved_before_an_error_are_reported() {
    with_fixture(|fixture| {
        prepare(fixture, 4);
        let errno = |partial: PartialFill| partial.error.errno(Operation::Userfault);
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            let partial = moves(fixture, 0, 8, MoveMode::empty()).unwrap_err();
            assert_eq!(partial, PartialFill { done: 4 * PAGE, error: Error::NotMapped(source(4)) });
            assert_eq!(errno(partial), Errno::ENOENT);
            assert_eq!(reader.join().unwrap(), Ok(4));
        });
        moves(fixture, 4, 4, MoveMode::ALLOW_SOURCE_HOLES).unwrap();
        let there = moves(fixture, 0, 1, MoveMode::empty()).unwrap_err();
        assert_eq!((there.done, errno(there)), (0, Errno::EEXIST));
    });
}

#[test]
fn the_destination_is_one_of_the_same_userfaultfd() {
    with_fixture(|fixture| {
        prepare(fixture, 2);
        let space = fixture.space;
        let invalid = Err(PartialFill { done: 0, error: Error::Invalid });
        // Moves the page to the source, where nothing is registered.
        moves(fixture, 0, 1, MoveMode::empty()).unwrap();
        let mode = MoveMode::empty();
        assert_eq!(space.handler(fixture.fd).move_pages(source(0), at(0), PAGE, mode), invalid);
        let other = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        assert_eq!(space.handler(&other).move_pages(at(1), source(1), PAGE, mode), invalid);
        let modes = UserfaultModes::MISSING;
        space.register_userfault(&other, VirtAddr(FROM), PAGES * PAGE, modes).unwrap();
        space.handler(&other).move_pages(source(0), at(0), PAGE, mode).unwrap();
        // Any userfaultfd of the address space may supply copies and zeroes.
        let none = FillMode::empty();
        assert_eq!(space.handler(&other).fill_zeroes(at(2), PAGE, none), Ok(()));
        space.close_userfault(other);
        let stranger = bindery::AddressSpace::new(fixture.memory, Default::default()).unwrap();
        assert_eq!(stranger.handler(fixture.fd).move_pages(at(1), source(1), PAGE, mode), invalid);
    });
}

#[test]
fn protected_pages_stay_so_where_writes_are_watched() {
    let both = UserfaultModes::MISSING | UserfaultModes::WRITE_PROTECT;
    for modes in [UserfaultModes::MISSING, both] {
        with_wish(Wish { modes, ..Wish::default() }, |fixture| {
            let space = fixture.space;
            space.mmap(&fixed(FROM, PAGES * PAGE)).unwrap();
            let other = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
            space.register_userfault(&other, VirtAddr(FROM), PAGES * PAGE, both).unwrap();
            let mut fill = |_, piece: &mut [u8]| {
                piece.fill(3);
                Ok(())
            };
            let protect = FillMode::WRITE_PROTECT;
            space.handler(&other).fill_copy(source(0), 4 * PAGE, protect, &mut fill).unwrap();
            moves(fixture, 0, 4, MoveMode::empty()).unwrap();
            let Inspection::Page { attributes, .. } = space.inspect(at(2)) else { panic!() };
            let watched = modes.contains(UserfaultModes::WRITE_PROTECT);
            assert_eq!(attributes.userfault, watched);
            assert_eq!(attributes.permissions.contains(Permissions::WRITE), !watched);
            assert_eq!(fixture.byte(2), 3);
            space.close_userfault(other);
        });
    }
}

/// A handler moves all pages back and forth, in pieces, while programs read and write them.
#[test]
fn programs_use_their_pages_while_these_move() {
    const MOVED: u64 = 700;
    const ROUNDS: u64 = 30;
    with_fixture(|fixture| {
        let space = fixture.space;
        prepare(fixture, MOVED);
        let modes = UserfaultModes::MISSING;
        space.register_userfault(fixture.fd, VirtAddr(FROM), PAGES * PAGE, modes).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        let is_over = || over.load(std::sync::atomic::Ordering::Relaxed);
        // A needed page is present or being moved, so the handler wakes its waiters again.
        thread::scope(|scope| {
            let finished = Finished(&over);
            for cpu in [1, 2] {
                fixture.spawn(scope, cpu, move |program| {
                    let mut number = u64::from(cpu);
                    while !is_over() {
                        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let page = (number >> 33) % MOVED;
                        // Writes to its own half of the page, to which no other thread writes.
                        let half = u64::from(cpu) * 1024;
                        let base = if number >> 60 & 1 == 0 { AT } else { FROM };
                        let to = VirtAddr(base + page * PAGE + half);
                        if fixture.space.inspect(to) != Inspection::Empty {
                            let _ = program.load(to);
                        }
                    }
                });
            }
            fixture.machine.on_cpu(bindery::platform::Cpu(3), || {
                for round in 0..ROUNDS {
                    let (to, from) = if round % 2 == 0 { (AT, FROM) } else { (FROM, AT) };
                    let piece = [1, 16, 512, 700][round as usize / 2 % 4];
                    for first in (0..MOVED).step_by(piece) {
                        let count = (MOVED - first).min(piece as u64);
                        let (to, from) = (to + first * PAGE, from + first * PAGE);
                        let mode = MoveMode::empty();
                        let (to, from) = (VirtAddr(to), VirtAddr(from));
                        space.handler(fixture.fd).move_pages(to, from, count * PAGE, mode).unwrap();
                    }
                }
                drop(finished);
                while fixture.fd.is_readable() {
                    let _ = fixture.fd.try_read();
                }
            });
            // The end of a registration releases threads that wait for a page that has moved on.
            space.unregister_userfault(fixture.fd, VirtAddr(AT), PAGES * PAGE).unwrap();
            space.unregister_userfault(fixture.fd, VirtAddr(FROM), PAGES * PAGE).unwrap();
        });
        let program = Program::new(fixture.machine, space);
        for page in 0..MOVED {
            assert_eq!(program.load(source(page)), Ok(page + 1), "page {page}");
        }
    });
}
