//! Folios for which swap has single slots but no block of their size. They are swapped out page by
//! page.

use bindery::Protection;
use bindery::addr::VirtAddr;
use bindery_hosted::Walk;

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, READ_WRITE, audit};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
/// Pages of two huge folios.
const PAGES: u64 = 1024;

#[track_caller]
fn assert_full<A: Walk>(swapping: &Swapping<'_, '_, A>, slots: u64) {
    assert_eq!((swapping.taken(), swapping.swapped(AT, PAGES)), (slots, slots));
    audit(swapping.machine, swapping.memory, &[swapping.space]);
}

fn every_slot_is_used<A: Walk>(protection: Protection, send: impl Fn(&Swapping<'_, '_, A>) + Copy) {
    // With only the slots of one block, only the pages of one folio find slots.
    for (order, slots) in [(4, 9), (4, 16 + 7), (9, 100), (9, 512 + 3)] {
        with_swap::<A>(order, slots, |swapping| {
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            let length = PAGES * PAGE;
            swapping.space.mprotect(VirtAddr(AT), length, protection).unwrap();
            send(swapping);
            assert_full(swapping, slots);
            // When swap is full, no more folios are split.
            let before = swapping.memory.events().folio_splits;
            send(swapping);
            assert_eq!(swapping.memory.events().folio_splits, before);
            assert_full(swapping, slots);
            swapping.space.mprotect(VirtAddr(AT), length, READ_WRITE).unwrap();
            swapping.assert_filled(AT, PAGES, AT);
        });
    }
}

fn by_advice<A: Walk>() {
    for protection in [READ_WRITE, Protection::empty()] {
        every_slot_is_used::<A>(protection, |swapping| swapping.page_out(AT, PAGES));
    }
}

fn by_reclaim<A: Walk>() {
    for protection in [READ_WRITE, Protection::empty()] {
        every_slot_is_used::<A>(protection, |swapping| {
            // A folio is split in one turn of the clock, and its pages are examined in later turns.
            (0..3).for_each(|_| _ = swapping.memory.reclaim(PAGES));
        });
    }
}

on_every_architecture! {
    advice => by_advice;
    reclaimed => by_reclaim;
}
