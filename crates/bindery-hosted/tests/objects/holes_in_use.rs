//! Threads that need a page of a file while another thread punches a hole there, and the pager has
//! freed the page's block but the page is still in memory.

use std::thread;

use bindery::platform::Cpu;
use bindery::{Access, TriedFault};

use super::held_pager::Io;
use super::mapped_writes::{Fixture, PAGES, at, with_blocks, with_size};
use crate::support::objects::PAGE;

/// A thread that needs a page of a hole sleeps while the hole is punched. Only then it may ask the
/// pager: page 5 is dirty, page 6 is clean, and page 7 is not in memory.
fn hole_is_waited_for(io: Io, needs: impl FnOnce(&Fixture<'_>) + Send) {
    with_blocks(PAGES as usize, |fixture| {
        fixture.space.write_user(at(5), b"5").unwrap();
        fixture.space.write_user(at(6), b"6").unwrap();
        fixture.file.sync(6 * PAGE, PAGE).unwrap();
        fixture.punch(7);
        let before = fixture.pager.asked(io);
        fixture.pager.held.hold_next(Io::Discard, 5);
        let punch = || fixture.file.punch_hole(5 * PAGE, 3 * PAGE).unwrap();
        thread::scope(|scope| {
            let hole = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), punch));
            fixture.pager.held.wait_until_held();
            let user = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), || needs(fixture)));
            while fixture.machine.parked_threads() == 0 && fixture.pager.asked(io) == before {
                thread::yield_now();
            }
            let during = fixture.pager.asked(io);
            fixture.pager.held.release();
            hole.join().unwrap();
            user.join().unwrap();
            assert_eq!(during, before);
        });
        assert!(!fixture.check().contains(&5));
    });
}

#[test]
fn a_sync_waits_for_a_hole() {
    hole_is_waited_for(Io::Write, |fixture| fixture.file.sync(5 * PAGE, PAGE).unwrap());
}

#[test]
fn a_mapped_write_sleeps_during_a_hole() {
    hole_is_waited_for(Io::MakeWritable, |fixture| assert!(fixture.write(6).is_ok()));
}

#[test]
fn a_read_waits_for_a_hole() {
    hole_is_waited_for(Io::Read, |fixture| assert_eq!(fixture.byte(7), 0));
}

#[test]
fn a_huge_leaf_waits_for_a_hole() {
    with_size((512, 512, 9), |fixture| {
        assert!(fixture.space.fault(at(3), Access::Read).is_ok());
        fixture.pager.held.hold_next(Io::Discard, 5);
        thread::scope(|scope| {
            let hole = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.punch(5)));
            fixture.pager.held.wait_until_held();
            let is_blocked = matches!(fixture.try_write(3), TriedFault::Blocked(_));
            fixture.pager.held.release();
            hole.join().unwrap();
            assert!(is_blocked && fixture.asked().is_empty(), "page 5 would keep its block");
        });
    });
}
