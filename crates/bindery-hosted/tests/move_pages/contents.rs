//! The moved pages: contents, frames, attributes, and the reverse map.

use bindery::addr::VirtAddr;
use bindery::testing;
use bindery::{Access, Advice, Inspection, Remap};
use bindery_hosted::{Program, Walk};

use super::fixture::{FROM, Moving, PAGE, TO, with_moving};
use crate::support::{GIB, KIB, MIB, audit};

on_every_architecture! {
    pages_arrive_at_every_distance => arrive;
    whole_folios_are_not_copied_or_split => keep_folios;
    a_part_of_a_folio_is_split_off => split_off;
    the_reverse_map_leads_to_the_new_place => found_again;
    moved_pages_may_be_forked_moved_and_unmapped => used_afterwards;
    pages_move_within_a_mapping => overlap;
    zero_pages_move_as_they_are => zero_pages;
}

const ORDERS: [u8; 3] = [0, 4, 9];

fn arrive<A: Walk>() {
    for order in ORDERS {
        for (source, destination, length) in [
            (0, 0, PAGE),
            (0, PAGE, 64 * KIB),
            (0, 0, 4 * MIB),
            (0, 64 * KIB, 4 * MIB),
            (0, PAGE, 4 * MIB),
            (2 * MIB - 64 * KIB, 3 * PAGE, 2 * MIB + 128 * KIB),
        ] {
            with_moving::<A>(order, |moving| {
                moving.fill(FROM, 8 * MIB / PAGE);
                let (from, to) = (FROM + source, TO + destination);
                let pages = length / PAGE;
                moving.move_all(from, to, length);
                for page in 0..pages {
                    let expected = FROM + source / PAGE + page;
                    assert_eq!(moving.program.load(VirtAddr(to + page * PAGE)), Ok(expected));
                }
                moving.assert_empty(from, pages);
                moving.assert_empty(TO, destination / PAGE);
                // New pages at the old address have other frames.
                moving.program.store(VirtAddr(from), 1).unwrap();
                assert_eq!(moving.program.load(VirtAddr(to)), Ok(FROM + source / PAGE));
            });
        }
    }
}

fn keep_folios<A: Walk>() {
    for order in ORDERS {
        for shift in [0, 64 * KIB, 3 * PAGE] {
            with_moving::<A>(order, |moving| {
                moving.fill(FROM, 1024);
                let frames: Vec<_> =
                    (0..1024).map(|page| moving.frame(FROM + page * PAGE)).collect();
                let before = moving.memory.events().folio_splits;
                let cost = moving.move_all(FROM, TO + shift, 1024 * PAGE);
                assert_eq!(moving.memory.events().folio_splits, before);
                assert_eq!((cost.bytes_copied, cost.bytes_zeroed), (0, 0), "{cost:?}");
                for (page, frame) in (0..).zip(frames) {
                    assert_eq!(moving.frame(TO + shift + page * PAGE), frame, "page {page}");
                }
                moving.assert_filled(TO + shift, 1024, FROM);
            });
        }
    }
}

fn split_off<A: Walk>() {
    for order in [4, 9] {
        with_moving::<A>(order, |moving| {
            let pages = 1 << order;
            moving.fill(FROM, pages);
            // The upper half, and then one page of the lower.
            let half = pages / 2;
            moving.move_all(FROM + half * PAGE, TO, half * PAGE);
            moving.assert_filled(TO, half, FROM + half);
            moving.move_all(FROM + PAGE, TO + 4 * MIB, PAGE);
            moving.assert_filled(TO + 4 * MIB, 1, FROM + 1);
            moving.assert_filled(FROM, 1, FROM);
            moving.assert_filled(FROM + 2 * PAGE, half - 2, FROM + 2);
            let view = |at| moving.memory.frame_view(moving.frame(at)).block.count;
            assert_eq!(u64::from(view(TO)), half, "a half stays one folio");
            assert_eq!(view(TO + 4 * MIB), 1);
        });
    }
}

fn found_again<A: Walk>() {
    for order in ORDERS {
        for shift in [0, PAGE] {
            with_moving::<A>(order, |moving| {
                moving.fill(FROM, 512);
                moving.move_all(FROM, TO + shift, 512 * PAGE);
                let walk = testing::walk_anonymous(moving.space, VirtAddr(TO + shift)).unwrap();
                assert_eq!((walk.found, walk.mappings), (1 << order, 1 << order), "{walk:?}");
                // The reverse map finds every page.
                moving.space.madvise(VirtAddr(TO), 8 * MIB, Advice::Cold).unwrap();
                let mut rounds = 0;
                while moving.swapped(TO + shift, 512) < 512 && rounds < 64 {
                    moving.memory.reclaim(512);
                    rounds += 1;
                }
                assert_eq!(moving.swapped(TO + shift, 512), 512);
                moving.assert_filled(TO + shift, 512, FROM);
            });
        }
    }
}

fn used_afterwards<A: Walk>() {
    for order in ORDERS {
        with_moving::<A>(order, |moving| {
            let pages = 512;
            moving.fill(FROM, pages);
            moving.move_all(FROM, TO, pages * PAGE);
            let child = moving.space.fork().unwrap();
            moving.program.store(VirtAddr(TO), 7).unwrap();
            let of_child = Program::new(moving.machine, &child);
            assert_eq!(of_child.load(VirtAddr(TO)), Ok(FROM));
            of_child.store(VirtAddr(TO + PAGE), 9).unwrap();
            audit(moving.machine, moving.memory, &[moving.space, &child]);
            drop(child);
            assert_eq!(moving.program.load(VirtAddr(TO + PAGE)), Ok(FROM + 1));
            let elsewhere = VirtAddr(16 * GIB);
            let length = 4 * MIB;
            moving.space.mremap(VirtAddr(TO), length, length, Remap::To(elsewhere)).unwrap();
            assert_eq!(moving.program.load(VirtAddr(elsewhere.0 + 2 * PAGE)), Ok(FROM + 2));
            let walk =
                testing::walk_anonymous(moving.space, VirtAddr(elsewhere.0 + 2 * PAGE)).unwrap();
            assert_eq!(walk.found, walk.mappings);
            moving.space.munmap(elsewhere, length).unwrap();
        });
    }
}

/// If the ranges overlap, the pages move one by one, from the lowest.
fn overlap<A: Walk>() {
    with_moving::<A>(0, |moving| {
        moving.fill(FROM + 4 * PAGE, 4);
        moving.move_all(FROM + 4 * PAGE, FROM + 2 * PAGE, 4 * PAGE);
        moving.assert_filled(FROM + 2 * PAGE, 4, FROM + 4 * PAGE);
        moving.assert_empty(FROM + 6 * PAGE, 2);
        // The first page takes the second one's place.
        let up = super::fixture::from_to(FROM + 2 * PAGE, FROM + 3 * PAGE, 4 * PAGE);
        assert_eq!(moving.try_move(&up), (0, Err(bindery::Errno::EEXIST)));
    });
}

fn zero_pages<A: Walk>() {
    with_moving::<A>(0, |moving| {
        for page in 0..4 {
            assert_eq!(moving.program.load(VirtAddr(FROM + page * PAGE)), Ok(0));
        }
        let zero = moving.frame(FROM);
        moving.move_all(FROM, TO, 4 * PAGE);
        assert_eq!(moving.frame(TO), zero);
        moving.assert_empty(FROM, 4);
        moving.program.store(VirtAddr(TO), 3).unwrap();
        assert_eq!(moving.program.load(VirtAddr(TO + PAGE)), Ok(0));
    });
}

/// Attributes of the page at `at`.
fn attributes<A: Walk>(moving: &Moving<'_, '_, A>, at: u64) -> bindery::arch::Attributes {
    match moving.space.inspect(VirtAddr(at)) {
        Inspection::Page { attributes, .. } => attributes,
        other => panic!("{at:#x} is {other:?}"),
    }
}

on_every_architecture! {
    a_moved_page_is_soft_dirty_and_writable => as_it_was;
}

fn as_it_was<A: Walk>() {
    for order in [0, 4] {
        with_moving::<A>(order, |moving| {
            let pages = 16;
            moving.fill(FROM, pages);
            testing::clear_accessed_and_dirty(moving.space, VirtAddr(FROM), pages as u32);
            moving.move_all(FROM, TO, pages * PAGE);
            let arrived = attributes(moving, TO);
            assert!(!arrived.accessed && !arrived.dirty && arrived.soft_dirty, "{arrived:?}");
            assert!(arrived.permissions.contains(bindery::arch::Permissions::WRITE));
            // One of the pages is accessed, then written.
            moving.space.fault(VirtAddr(TO), Access::Write).unwrap();
            moving.move_all(TO, FROM, pages * PAGE);
            assert!(attributes(moving, FROM).dirty || moving.space.is_dirty(VirtAddr(FROM)));
        });
    }
}
