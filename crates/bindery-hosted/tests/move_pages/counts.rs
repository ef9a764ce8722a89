//! The cost of a move: entries, tables, invalidations, and the work under one set of locks.

use bindery::addr::VirtAddr;
use bindery::testing::{self, PageMove};
use bindery::{Access, Advice, Errno, PinTime};
use bindery_hosted::Walk;

use super::fixture::{FROM, PAGE, TO, from_to, with_moving};
use crate::support::{KIB, MIB};

on_every_architecture! {
    a_full_table_is_carried_by_one_entry => carried;
    an_empty_target_table_goes_to_the_source => exchanged;
    a_table_with_an_immovable_page_stays => stays;
    a_huge_leaf_is_one_entry => huge;
    huge_leaves_move_eight_at_a_time => huge_together;
    a_huge_swap_entry_is_one_entry => huge_swapped;
    a_call_flushes_once => one_flush;
}

const TABLE: u64 = 2 * MIB;

fn carried<A: Walk>() {
    for order in [0, 4] {
        with_moving::<A>(order, |moving| {
            moving.fill(FROM, 1024);
            // The tables of the upper levels that the target lacks.
            moving.program.store(VirtAddr(TO + 3 * TABLE), 1).unwrap();
            let cost = moving.move_all(FROM, TO, 2 * TABLE);
            assert_eq!((cost.tables_moved, cost.tables_allocated), (2, 0), "{cost:?}");
            assert_eq!(cost.entries_written, 4, "{cost:?}");
            assert_eq!(cost.invalidations, 1, "{cost:?}");
            moving.assert_filled(TO, 1024, FROM);
            // Faults at the old address find no table and allocate another.
            moving.program.store(VirtAddr(FROM), 7).unwrap();
            assert_eq!(moving.program.load(VirtAddr(TO)), Ok(FROM));
            let walk = testing::walk_anonymous(moving.space, VirtAddr(TO + 600 * PAGE)).unwrap();
            assert_eq!((walk.found, walk.mappings), (1 << order, 1 << order));
        });
    }
}

fn exchanged<A: Walk>() {
    for order in [0, 4, 9] {
        with_moving::<A>(order, |moving| {
            // Leaves an empty table at the target.
            moving.fill(TO, 512);
            moving.move_all(TO, FROM + 3 * TABLE + 64 * KIB, 256 * PAGE);
            moving.move_all(TO + 256 * PAGE, FROM + 2 * TABLE, 256 * PAGE);
            moving.fill(FROM, 512);
            let cost = moving.move_all(FROM, TO, TABLE);
            assert_eq!((cost.tables_allocated, cost.tables_freed), (0, 0), "{cost:?}");
            assert!(cost.entries_written <= 4, "{cost:?}");
            moving.assert_filled(TO, 512, FROM);
            // The table that moved to the source is used there.
            moving.memory.folio_policy().set(bindery::addr::Order(order), bindery::SizeMode::Never);
            let before = moving.space.counts();
            moving.program.store(VirtAddr(FROM), 7).unwrap();
            assert_eq!((moving.space.counts() - before).tables_allocated, 0);
            assert_eq!(moving.program.load(VirtAddr(TO)), Ok(FROM));
            moving.assert_filled(FROM + 2 * TABLE, 256, TO + 256);
        });
    }
}

fn stays<A: Walk>() {
    with_moving::<A>(0, |moving| {
        moving.fill(FROM, 512);
        let what = from_to(FROM, TO, TABLE);
        let pinned =
            moving.space.pin(VirtAddr(FROM + 300 * PAGE), 1, Access::Write, PinTime::Long).unwrap();
        let before = moving.space.counts();
        assert_eq!(moving.try_move(&what), (300 * PAGE, Err(Errno::EBUSY)));
        assert_eq!((moving.space.counts() - before).tables_moved, 0);
        drop(pinned);
        moving.assert_filled(TO, 300, FROM);
        moving.assert_filled(FROM + 300 * PAGE, 212, FROM + 300);
        // The mover read the other entries and left them unchanged.
        let walk = testing::walk_anonymous(moving.space, VirtAddr(FROM + 299 * PAGE + PAGE));
        assert_eq!(walk.map(|walk| walk.found), Some(1));
        let holes = PageMove { allows_holes: true, ..from_to(FROM, TO + TABLE, TABLE) };
        let before = moving.space.counts();
        assert_eq!(moving.try_move(&holes), (TABLE, Ok(())));
        assert_eq!((moving.space.counts() - before).tables_moved, 1);
        moving.assert_filled(TO + TABLE + 300 * PAGE, 212, FROM + 300);
        moving.assert_empty(TO + TABLE, 300);
    });
}

fn huge<A: Walk>() {
    with_moving::<A>(9, |moving| {
        moving.fill(FROM, 1024);
        moving.program.store(VirtAddr(TO + 3 * TABLE), 1).unwrap();
        let before = moving.memory.events().leaf_splits;
        let cost = moving.move_all(FROM, TO, 2 * TABLE);
        assert_eq!(cost.entries_written, 4, "{cost:?}");
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 1), "{cost:?}");
        assert_eq!(moving.memory.events().leaf_splits, before);
        moving.assert_filled(TO, 1024, FROM);
        // The huge leaf's deposited table moved with it, so that a part of the leaf can be
        // unmapped.
        moving.space.discard(VirtAddr(TO + PAGE), PAGE).unwrap();
        assert_eq!(moving.program.load(VirtAddr(TO + PAGE)), Ok(0));
        moving.assert_filled(TO + 2 * PAGE, 510, FROM + 2);
        let pinned =
            moving.space.pin(VirtAddr(TO + TABLE), 1, Access::Write, PinTime::Long).unwrap();
        let back = from_to(TO + TABLE, FROM, TABLE);
        assert_eq!(moving.try_move(&back), (0, Err(Errno::EBUSY)));
        assert_eq!(moving.frame(TO + TABLE), pinned.first());
    });
}

fn huge_together<A: Walk>() {
    with_moving::<A>(9, |moving| {
        moving.fill(FROM, 10 * 512);
        let cost = moving.move_all(FROM, TO, 10 * TABLE);
        // One more entry is that of a new level-2 table.
        assert_eq!((cost.entries_written, cost.invalidations), (21, 1), "{cost:?}");
        // One table on each side, for both eight leaves and two.
        assert_eq!(cost.tables_locked, 4, "{cost:?}");
        moving.assert_filled(TO, 10 * 512, FROM);
        // A page at the destination ends the move at its entry.
        moving.program.store(VirtAddr(FROM + 3 * TABLE), 1).unwrap();
        let back = moving.try_move(&from_to(TO, FROM, 10 * TABLE));
        assert_eq!(back, (3 * TABLE, Err(Errno::EEXIST)));
        moving.assert_filled(FROM, 3 * 512, FROM);
        moving.assert_filled(TO + 3 * TABLE, 7 * 512, FROM + 3 * 512);
    });
}

fn huge_swapped<A: Walk>() {
    with_moving::<A>(9, |moving| {
        moving.fill(FROM, 512);
        moving.space.madvise(VirtAddr(FROM), TABLE, Advice::PageOut).unwrap();
        assert_eq!(moving.swapped(FROM, 512), 512);
        moving.program.store(VirtAddr(TO + 3 * TABLE), 1).unwrap();
        let cost = moving.move_all(FROM, TO, TABLE);
        assert_eq!((cost.entries_written, cost.tables_allocated), (2, 0), "{cost:?}");
        moving.assert_filled(TO, 512, FROM);
        moving.space.madvise(VirtAddr(TO), TABLE, Advice::PageOut).unwrap();
        // A part of the folio is split off.
        moving.move_all(TO + 256 * PAGE, FROM, 256 * PAGE);
        moving.assert_filled(TO, 256, FROM);
        moving.assert_filled(FROM, 256, FROM + 256);
    });
}

fn one_flush<A: Walk>() {
    for order in [0, 4, 9] {
        for shift in [0, 64 * KIB] {
            with_moving::<A>(order, |moving| {
                moving.fill(FROM, 3 * TABLE / PAGE);
                let cost = moving.move_all(FROM, TO + shift, 3 * TABLE);
                // One more for each split huge leaf.
                let broken = if order == 9 && shift > 0 { 3 } else { 0 };
                assert!(cost.invalidations <= 1 + broken, "{order} {shift} {cost:?}");
                assert_eq!(moving.space.counts().bytes_copied, 0);
                moving.assert_filled(TO + shift, 3 * TABLE / PAGE, FROM);
            });
        }
    }
}
