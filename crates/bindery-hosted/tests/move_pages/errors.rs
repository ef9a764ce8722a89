//! Moves that fail with Linux's errno, and their progress up to the error.

use bindery::addr::VirtAddr;
use bindery::arch::{Absent, Marker};
use bindery::testing::{self, PageMove};
use bindery::{Access, Advice, Errno, LockPages, PinTime, Protection};
use bindery_hosted::Walk;

use super::fixture::{FROM, LENGTH, PAGE, TO, from_to, with_moving};
use crate::support::{GIB, MIB};

on_every_architecture! {
    bad_arguments_are_invalid => invalid;
    unlike_mappings_are_invalid => unlike;
    a_missing_or_present_page_stops_the_move => stopped;
    holes_are_passed_over_where_they_are_allowed => holes;
    shared_and_pinned_pages_are_busy => busy;
    a_pinned_folio_across_tables_is_restored => busy_across_tables;
    markers_do_not_move => markers;
}

const NOTHING: u64 = 0;

#[track_caller]
fn refused<A: Walk>(what: &PageMove, errno: Errno) {
    with_moving::<A>(0, |moving| {
        moving.fill(FROM, 4);
        assert_eq!(moving.try_move(what), (NOTHING, Err(errno)), "{what:?}");
        moving.assert_filled(FROM, 4, FROM);
    });
}

fn invalid<A: Walk>() {
    for what in [
        from_to(FROM + 1, TO, PAGE),
        from_to(FROM, TO + 1, PAGE),
        from_to(FROM, TO, PAGE + 1),
        from_to(FROM, TO, 0),
        from_to(FROM, u64::MAX - PAGE + 1, PAGE),
        from_to(FROM, TO, u64::MAX - PAGE + 1),
        from_to(FROM, A::USER_END, PAGE),
        from_to(A::USER_END - PAGE, TO, 2 * PAGE),
        from_to(0, TO, PAGE),
        from_to(FROM, TO, LENGTH + PAGE),
        from_to(FROM + PAGE, TO, LENGTH),
        from_to(FROM, TO + PAGE, LENGTH),
        PageMove { is_registered: false, ..from_to(FROM, TO, PAGE) },
    ] {
        refused::<A>(&what, Errno::EINVAL);
    }
    refused::<A>(&PageMove { is_changing: true, ..from_to(FROM, TO, PAGE) }, Errno::EAGAIN);
    refused::<A>(&from_to(GIB, TO, PAGE), Errno::ENOENT);
    refused::<A>(&from_to(FROM, GIB, PAGE), Errno::ENOENT);
}

fn unlike<A: Walk>() {
    let invalid = (NOTHING, Err(Errno::EINVAL));
    with_moving::<A>(0, |moving| {
        moving.fill(FROM, 1);
        let what = from_to(FROM, TO, PAGE);
        moving.space.mprotect(VirtAddr(TO), LENGTH, Protection::READ).unwrap();
        assert_eq!(moving.try_move(&what), invalid);
        moving.space.mprotect(VirtAddr(FROM), LENGTH, Protection::READ).unwrap();
        assert_eq!(moving.try_move(&what), invalid, "not writable");
        for at in [FROM, TO] {
            let writable = Protection::READ | Protection::WRITE;
            moving.space.mprotect(VirtAddr(at), LENGTH, writable).unwrap();
        }
        moving.space.mlock(VirtAddr(FROM), PAGE, LockPages::Now).unwrap();
        assert_eq!(moving.try_move(&what), invalid, "one is locked");
        moving.space.munlock(VirtAddr(FROM), PAGE).unwrap();
        moving.space.munmap(VirtAddr(TO), LENGTH).unwrap();
        let shared = bindery::MapRequest {
            sharing: bindery::Sharing::Shared,
            ..crate::support::fixed(TO, LENGTH)
        };
        moving.space.mmap(&shared).unwrap();
        assert_eq!(moving.try_move(&what), invalid, "shared");
        assert_eq!(moving.try_move(&from_to(TO, FROM + PAGE, PAGE)), invalid, "shared");
        moving.assert_filled(FROM, 1, FROM);
    });
}

fn stopped<A: Walk>() {
    for order in [0, 4] {
        with_moving::<A>(order, |moving| {
            moving.fill(FROM, 32);
            moving.space.discard(VirtAddr(FROM + 20 * PAGE), PAGE).unwrap();
            // The destination of page 9 is occupied.
            moving.memory.folio_policy().set(bindery::addr::Order(4), bindery::SizeMode::Never);
            moving.program.store(VirtAddr(TO + 9 * PAGE), 1).unwrap();
            let what = from_to(FROM, TO, 32 * PAGE);
            assert_eq!(moving.try_move(&what), (9 * PAGE, Err(Errno::EEXIST)));
            moving.assert_filled(TO, 9, FROM);
            moving.assert_filled(FROM + 9 * PAGE, 7, FROM + 9);
            moving.assert_empty(FROM, 9);
            assert_eq!(moving.try_move(&from_to(FROM, TO, PAGE)).1, Err(Errno::EEXIST));
            // A hole at page 20, wherever the destination is.
            let rest = from_to(FROM + 9 * PAGE, TO + MIB + 5 * PAGE, 15 * PAGE);
            assert_eq!(moving.try_move(&rest), (11 * PAGE, Err(Errno::ENOENT)));
            moving.assert_filled(TO + MIB + 5 * PAGE, 11, FROM + 9);
        });
    }
}

fn holes<A: Walk>() {
    for order in [0, 4, 9] {
        with_moving::<A>(order, |moving| {
            let pages = [0, 1, 700, 1500];
            for page in pages {
                moving.program.store(VirtAddr(FROM + page * PAGE), page + 1).unwrap();
            }
            let what = PageMove { allows_holes: true, ..from_to(FROM, TO, LENGTH) };
            let before = moving.space.counts();
            assert_eq!(moving.try_move(&what), (LENGTH, Ok(())));
            let cost = moving.space.counts() - before;
            for page in pages {
                assert_eq!(moving.program.load(VirtAddr(TO + page * PAGE)), Ok(page + 1));
                moving.assert_empty(FROM + page * PAGE, 1);
            }
            // The fourth table's span is a hole, so no table is allocated for it.
            assert!(cost.tables_allocated <= 5, "{cost:?}");
            // A page at the destination of a hole.
            let there = TO + 1900 * PAGE;
            moving.program.store(VirtAddr(there), 5).unwrap();
            let (moved, result) = moving.try_move(&what);
            assert_eq!((moved, result), (0, Err(Errno::EEXIST)));
        });
    }
    with_moving::<A>(0, |moving| {
        // Half of the address space, empty.
        let length = (A::USER_END / 4) & !(GIB - 1);
        let (from, to) = (64 * GIB, 64 * GIB + length);
        moving.space.mmap(&crate::support::fixed(from, length)).unwrap();
        moving.space.mmap(&crate::support::fixed(to, length)).unwrap();
        let what = PageMove { allows_holes: true, ..from_to(from, to, length) };
        let before = moving.space.counts();
        assert_eq!(moving.try_move(&what), (length, Ok(())));
        let cost = moving.space.counts() - before;
        assert!(cost.entries_descended < 20_000, "{cost:?}");
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 0), "{cost:?}");
    });
}

fn busy<A: Walk>() {
    for order in [0, 4, 9] {
        with_moving::<A>(order, |moving| {
            let pages = 1024;
            moving.fill(FROM, pages);
            let child = moving.space.fork().unwrap();
            let what = from_to(FROM, TO, pages * PAGE);
            assert_eq!(testing::move_pages(moving.space, &what), (0, Err(Errno::EBUSY)));
            drop(child);
            // Each page is private again after a write.
            moving.fill(FROM, pages);
            let at = VirtAddr(FROM + 600 * PAGE);
            let pinned = moving.space.pin(at, 1, Access::Write, PinTime::Long).unwrap();
            let folio = u64::from(moving.memory.frame_view(pinned.first()).block.count);
            let before = 600 / folio * folio;
            assert_eq!(moving.try_move(&what), (before * PAGE, Err(Errno::EBUSY)));
            moving.assert_filled(TO, before, FROM);
            moving.assert_filled(FROM + before * PAGE, pages - before, FROM + before);
            assert_eq!(moving.frame(at.0), pinned.first(), "it stays where it is");
            drop(pinned);
            let rest = from_to(FROM + before * PAGE, TO + before * PAGE, (pages - before) * PAGE);
            assert_eq!(moving.try_move(&rest), ((pages - before) * PAGE, Ok(())));
            moving.assert_filled(TO, pages, FROM);
        });
    }
}

fn busy_across_tables<A: Walk>() {
    for order in [4, 9] {
        with_moving::<A>(order, |moving| {
            let pages = 1 << order;
            moving.fill(FROM, pages);
            // Here the folio ends in the next table.
            let across = TO + 2 * MIB - 5 * PAGE;
            moving.move_all(FROM, across, pages * PAGE);
            let at = VirtAddr(across + 9 * PAGE);
            let pinned = moving.space.pin(at, 1, Access::Write, PinTime::Long).unwrap();
            let back = from_to(across, FROM + PAGE, pages * PAGE);
            assert_eq!(moving.try_move(&back), (NOTHING, Err(Errno::EBUSY)));
            moving.assert_filled(across, pages, FROM);
            moving.program.store(VirtAddr(across), 5).unwrap();
            assert_eq!(moving.frame(at.0), pinned.first());
            drop(pinned);
            assert_eq!(moving.try_move(&back), (pages * PAGE, Ok(())));
            assert_eq!(moving.program.load(VirtAddr(FROM + PAGE)), Ok(5));
            moving.assert_filled(FROM + 2 * PAGE, pages - 1, FROM + 1);
        });
    }
}

fn markers<A: Walk>() {
    with_moving::<A>(0, |moving| {
        moving.fill(FROM, 2);
        for marker in [Marker::Poison, Marker::Guard, Marker::UserfaultWriteProtect] {
            testing::plant(moving.space, VirtAddr(FROM + 2 * PAGE), 1, Absent::Marker(marker));
            let what = from_to(FROM + PAGE, TO + PAGE, 2 * PAGE);
            assert_eq!(moving.try_move(&what), (PAGE, Err(Errno::EFAULT)), "{marker:?}");
            // A marker is not a hole at the destination either.
            let back = from_to(TO + PAGE, FROM + 2 * PAGE, PAGE);
            assert_eq!(moving.try_move(&back), (NOTHING, Err(Errno::EEXIST)), "{marker:?}");
            moving.move_all(TO + PAGE, FROM + PAGE, PAGE);
            moving.space.discard(VirtAddr(FROM + 2 * PAGE), PAGE).unwrap();
            moving.space.madvise(VirtAddr(FROM), MIB, Advice::GuardRemove).unwrap();
        }
        let guards = VirtAddr(FROM + 2 * MIB);
        moving.space.madvise(guards, 2 * MIB, Advice::GuardInstall).unwrap();
        assert_eq!(moving.try_move(&from_to(guards.0, TO, PAGE)).1, Err(Errno::EFAULT));
        assert_eq!(moving.try_move(&from_to(guards.0, TO, 2 * MIB)).1, Err(Errno::EFAULT));
        assert_eq!(moving.try_move(&from_to(FROM, guards.0, PAGE)).1, Err(Errno::EEXIST));
    });
}
