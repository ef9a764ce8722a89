//! The end of a folio at an address or an index that is too low for the folio's other pages.

use bindery::addr::VirtAddr;
use bindery::testing::{self, PageMove};
use bindery::{AddressSpace, Advice, Remap};
use bindery_hosted::{Machine, Program, Walk};

use super::fixture::{FROM, Moving, PAGE, with_moving};
use crate::support::{audit, fixed, use_order};

on_every_architecture! {
    a_folios_end_moves_lowest_as_single_pages => moved;
    a_cached_folios_end_moves_lowest_as_copies => cached;
    slots_at_the_lowest_addresses_become_folios => read_in;
    mremap_to_the_lowest_addresses_keeps_the_index => remapped;
}

/// The pages of the folio that move.
const KEPT: u64 = 8;
/// The lowest address that programs may map, below the length of the largest folio.
const LOW: u64 = 64 * 1024;

const ORDERS: [u8; 2] = [5, 9];

/// Only the last [`KEPT`] pages of a folio are left, at `at`. The addresses above [`LOW`] have
/// space for the other pages.
fn with_end<A: Walk>(scenario: impl Fn(&Moving<'_, '_, A>, u64)) {
    for order in ORDERS {
        with_moving::<A>(order, |moving| {
            let pages = 1 << order;
            moving.fill(FROM, pages);
            moving.space.mmap(&fixed(LOW, 2 * KEPT * PAGE)).unwrap();
            scenario(moving, FROM + (pages - KEPT) * PAGE);
        });
    }
}

/// The values that [`Moving::fill`] has written at the end of the folio.
fn written(end: u64) -> u64 {
    FROM + (end - FROM) / PAGE
}

fn to_low(from: u64) -> PageMove {
    let (source, destination) = (VirtAddr(from), VirtAddr(LOW));
    PageMove { source, destination, length: KEPT * PAGE, ..PageMove::default() }
}

#[track_caller]
fn assert_found<A: Walk>(space: &AddressSpace<'_, Machine<A>>, at: u64) {
    for page in 0..KEPT {
        let walk = testing::walk_anonymous(space, VirtAddr(at + page * PAGE)).expect("no lock");
        assert!(walk.found > 0 && walk.found == walk.mappings, "page {page}: {walk:?}");
    }
}

fn moved<A: Walk>() {
    for munmapped in [true, false] {
        with_end::<A>(|moving, end| {
            if munmapped {
                moving.space.munmap(VirtAddr(FROM), end - FROM).unwrap();
            }
            assert_eq!(moving.try_move(&to_low(end)), (KEPT * PAGE, Ok(())));
            moving.assert_empty(end, KEPT);
            moving.assert_filled(LOW, KEPT, written(end));
            assert_found(moving.space, LOW);
            moving.space.madvise(VirtAddr(LOW), KEPT * PAGE, Advice::PageOut).unwrap();
            assert_eq!(moving.swapped(LOW, KEPT), KEPT);
            moving.assert_filled(LOW, KEPT, written(end));
        });
    }
}

/// The other pages of the folio stay in swap, are swapped in at their own addresses, or were
/// dropped.
fn cached<A: Walk>() {
    for (low_first, others) in [(true, true), (false, true), (true, false)] {
        with_end::<A>(|moving, end| {
            moving.memory.set_compressed_limit(0);
            let pages = (end - FROM) / PAGE;
            moving
                .space
                .madvise(VirtAddr(FROM), end - FROM + KEPT * PAGE, Advice::PageOut)
                .unwrap();
            assert_eq!(moving.swapped(FROM, pages + KEPT), pages + KEPT);
            if !others {
                moving.space.munmap(VirtAddr(FROM), end - FROM).unwrap();
            }
            assert_eq!(moving.try_move(&to_low(end)), (KEPT * PAGE, Ok(())));
            if !low_first {
                moving.assert_filled(FROM, pages, FROM);
            }
            moving.assert_filled(LOW, KEPT, written(end));
            audit(moving.machine, moving.memory, &[moving.space]);
            assert_found(moving.space, LOW);
            if others {
                moving.assert_filled(FROM, pages, FROM);
                assert_found(moving.space, FROM);
            }
            moving.memory.set_compressed_limit(4096);
        });
    }
}

/// The slots are as contiguous at the lowest addresses as in the swapped-out folio.
fn read_in<A: Walk>() {
    with_end::<A>(|moving, end| {
        moving.space.madvise(VirtAddr(FROM), end - FROM + KEPT * PAGE, Advice::PageOut).unwrap();
        assert_eq!(moving.try_move(&to_low(end)), (KEPT * PAGE, Ok(())));
        use_order(moving.memory, 3);
        moving.assert_filled(LOW, KEPT, written(end));
        assert_eq!(moving.frame(LOW).0 + 7, moving.frame(LOW + 7 * PAGE).0, "one folio");
        assert_found(moving.space, LOW);
    });
}

/// `mremap` moves the VMA with its offset: the index has space below the moved pages, but the
/// address space has none.
fn remapped<A: Walk>() {
    with_end::<A>(|moving, end| {
        let (space, length) = (moving.space, KEPT * PAGE);
        space.munmap(VirtAddr(FROM), end - FROM).unwrap();
        let low = VirtAddr(LOW);
        assert_eq!(space.mremap(VirtAddr(end), length, length, Remap::To(low)), Ok(low));
        moving.assert_filled(LOW, KEPT, written(end));
        let child = space.fork().unwrap();
        assert_found(space, LOW);
        assert_found(&child, LOW);
        Program::new(moving.machine, &child).store(low, 1).unwrap();
        audit(moving.machine, moving.memory, &[space, &child]);
        drop(child);
        for _ in 0..2 {
            space.madvise(low, length, Advice::PageOut).unwrap();
            assert_eq!(moving.swapped(LOW, KEPT), KEPT);
            moving.assert_filled(LOW, KEPT, written(end));
            assert_found(space, LOW);
        }
    });
}
