//! Pages in swap: their entries move, and the content appears at the new address, whatever the
//! state of the swap cache.

use bindery::addr::VirtAddr;
use bindery::testing;
use bindery::{Advice, Errno};
use bindery_hosted::{Program, Walk};

use super::fixture::{FROM, Moving, PAGE, TO, from_to, with_moving};
use crate::support::{MIB, audit};

on_every_architecture! {
    swap_entries_move_in_runs => runs;
    pages_in_the_swap_cache_move_too => cached;
    a_cached_folio_may_lie_across_tables => across_tables;
    a_part_of_a_cached_folio_is_copied => parted;
    pages_that_another_process_names_are_busy => shared;
    what_is_partly_in_swap_moves => mixed;
}

const ORDERS: [u8; 3] = [0, 4, 9];

fn page_out<A: Walk>(moving: &Moving<'_, '_, A>, at: u64, pages: u64) {
    moving.space.madvise(VirtAddr(at), pages * PAGE, Advice::PageOut).unwrap();
    assert_eq!(moving.swapped(at, pages), pages);
}

fn runs<A: Walk>() {
    for order in ORDERS {
        for shift in [0, 64 * 1024, 3 * PAGE] {
            with_moving::<A>(order, |moving| {
                moving.fill(FROM, 1024);
                page_out(moving, FROM, 1024);
                let cost = moving.move_all(FROM, TO + shift, 1024 * PAGE);
                // No TLB holds swap entries.
                assert_eq!(cost.bytes_copied, 0, "{cost:?}");
                assert_eq!(moving.swapped(TO + shift, 1024), 1024);
                moving.assert_empty(FROM, 1024);
                moving.assert_filled(TO + shift, 1024, FROM);
                // Moves a part of the range, then moves it to the source again.
                page_out(moving, TO + shift, 1024);
                moving.move_all(TO + shift + 5 * PAGE, FROM + PAGE, 600 * PAGE);
                moving.assert_filled(FROM + PAGE, 600, FROM + 5);
                moving.assert_filled(TO + shift, 5, FROM);
                moving.assert_filled(TO + shift + 605 * PAGE, 1024 - 605, FROM + 605);
            });
        }
    }
}

fn cached<A: Walk>() {
    for order in ORDERS {
        with_moving::<A>(order, |moving| {
            moving.memory.set_compressed_limit(0);
            moving.fill(FROM, 512);
            page_out(moving, FROM, 512);
            let frames = moving.memory.free_frame_count();
            moving.move_all(FROM, TO, 512 * PAGE);
            moving.assert_filled(TO, 512, FROM);
            let walk = testing::walk_anonymous(moving.space, VirtAddr(TO)).unwrap();
            assert_eq!((walk.found, walk.mappings), (1 << order, 1 << order));
            // The folios came from the swap cache, so none was allocated. A table may have been.
            assert!(moving.memory.free_frame_count() + 4 > frames);
        });
    }
}

fn across_tables<A: Walk>() {
    for order in [4, 9] {
        with_moving::<A>(order, |moving| {
            let pages = 1 << order;
            moving.memory.set_compressed_limit(0);
            moving.fill(FROM, pages);
            page_out(moving, FROM, pages);
            let to = TO + 2 * MIB - 5 * PAGE;
            moving.move_all(FROM, to, pages * PAGE);
            moving.assert_filled(to, pages, FROM);
            let walk = testing::walk_anonymous(moving.space, VirtAddr(to)).unwrap();
            assert_eq!((walk.found, walk.mappings), (pages, pages));
        });
    }
}

fn parted<A: Walk>() {
    for order in [4, 9] {
        for old_first in [true, false] {
            with_moving::<A>(order, |moving| {
                let pages = 1 << order;
                let half = pages / 2;
                moving.memory.set_compressed_limit(0);
                moving.fill(FROM, pages);
                page_out(moving, FROM, pages);
                moving.move_all(FROM + half * PAGE, TO + 7 * PAGE, half * PAGE);
                let places = [(FROM, FROM), (TO + 7 * PAGE, FROM + half)];
                let order = if old_first { [0, 1] } else { [1, 0] };
                for number in order {
                    let (at, from) = places[number];
                    moving.assert_filled(at, half, from);
                    audit(moving.machine, moving.memory, &[moving.space]);
                }
                for (at, _) in places {
                    let walk = testing::walk_anonymous(moving.space, VirtAddr(at)).unwrap();
                    assert_eq!(walk.found, walk.mappings, "{walk:?}");
                    moving.program.store(VirtAddr(at), 1).unwrap();
                }
                moving.memory.set_compressed_limit(4096);
            });
        }
    }
}

fn shared<A: Walk>() {
    for order in ORDERS {
        with_moving::<A>(order, |moving| {
            moving.fill(FROM, 512);
            page_out(moving, FROM, 512);
            let child = moving.space.fork().unwrap();
            let what = from_to(FROM, TO, 512 * PAGE);
            assert_eq!(testing::move_pages(moving.space, &what), (0, Err(Errno::EBUSY)));
            assert_eq!(Program::new(moving.machine, &child).load(VirtAddr(FROM)), Ok(FROM));
            drop(child);
        });
    }
}

fn mixed<A: Walk>() {
    with_moving::<A>(0, |moving| {
        moving.fill(FROM, 1024);
        for page in (0..1024).step_by(3) {
            page_out(moving, FROM + page * PAGE, 1);
        }
        moving.move_all(FROM, TO + PAGE, 1024 * PAGE);
        moving.assert_filled(TO + PAGE, 1024, FROM);
    });
}
