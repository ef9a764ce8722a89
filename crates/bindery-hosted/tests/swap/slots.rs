//! Slots: which slots an allocation finds, and which page owns each.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::Absent;
use bindery::{Advice, Inspection, SizeMode, testing};
use bindery_hosted::{Program, Walk};

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, MIB, audit, fixed, use_order};

const AT: u64 = GIB;

fn page_out<A: Walk>(swapping: &Swapping<'_, '_, A>, at: u64, pages: u64) {
    swapping.space.madvise(VirtAddr(at), pages * 4096, Advice::PageOut).unwrap();
}

/// Allows faults to use only smaller folios from now on.
fn use_instead<A: Walk>(swapping: &Swapping<'_, '_, A>, order: u8, smaller: u8) {
    swapping.memory.folio_policy().set(Order(order), SizeMode::Never);
    use_order(swapping.memory, smaller);
}

/// The last cluster of a device has fewer slots than a table has entries: each slot is used, by
/// folios while blocks are left, then by single pages.
fn a_short_cluster_serves_what_fits<A: Walk>() {
    for (order, slots) in [(0, 96), (4, 100)] {
        with_swap::<A>(order, slots, |swapping| {
            swapping.space.mmap(&fixed(AT, 256 * 4096)).unwrap();
            swapping.fill(AT, 256);
            page_out(swapping, AT, 256);
            assert_eq!(swapping.swapped(AT, 256), slots);
            swapping.assert_filled(AT, 256, AT);
        });
    }
}

/// Folios leave holes in their slots that fit only single pages; a block that becomes entirely free
/// serves a whole folio again.
fn holes_serve_single_pages_and_blocks_folios<A: Walk>() {
    with_swap::<A>(4, 512, |swapping| {
        swapping.space.mmap(&fixed(AT, 1024 * 4096)).unwrap();
        swapping.fill(AT, 512);
        page_out(swapping, AT, 512);
        for folio in 0..32 {
            swapping.space.discard(VirtAddr(AT + folio * 16 * 4096), 4096).unwrap();
        }
        assert_eq!(swapping.taken(), 480);
        let more = AT + 512 * 4096;
        swapping.fill(more, 16);
        use_instead(swapping, 4, 0);
        let single = more + 64 * 4096;
        swapping.fill(single, 20);
        page_out(swapping, single, 20);
        assert_eq!(swapping.swapped(single, 20), 20, "holes are out of reach");
        // The slots of the last folio, with its hole, are a block again.
        swapping.space.discard(VirtAddr(AT + 31 * 16 * 4096), 16 * 4096).unwrap();
        let splits = swapping.memory.events().folio_splits;
        page_out(swapping, more, 16);
        assert_eq!(swapping.swapped(more, 16), 16, "a block is out of reach");
        assert_eq!(swapping.memory.events().folio_splits, splits, "it was cut in spite of a block");
        swapping.assert_filled(single, 20, single);
        swapping.assert_filled(more, 16, more);
    });
}

/// 1. A folio is swapped in for a parent and stays in the cache for its child.
/// 2. Both drop one of its pages, and the slot is free.
/// 3. The child writes to a new page there, which is swapped out to the same slot.
/// 4. The child's other pages are swapped in. They belong to the folio, but the new page does not.
fn a_slot_of_a_cached_folio_that_is_used_again_is_another_page<A: Walk>() {
    with_swap::<A>(4, 16, |swapping| {
        swapping.space.mmap(&fixed(AT, 16 * 4096)).unwrap();
        swapping.fill(AT, 16);
        page_out(swapping, AT, 16);
        let child = swapping.space.fork().unwrap();
        let theirs = Program::new(swapping.machine, &child);
        swapping.assert_filled(AT, 16, AT);
        assert_eq!(swapping.taken(), 16, "the child needs them");
        let third = VirtAddr(AT + 3 * 4096);
        swapping.space.discard(third, 4096).unwrap();
        child.discard(third, 4096).unwrap();
        assert_eq!(swapping.taken(), 15);
        use_instead(swapping, 4, 0);
        theirs.store(third, 7).unwrap();
        child.madvise(third, 4096, Advice::PageOut).unwrap();
        assert_eq!(swapping.taken(), 16, "there is one slot to go to");
        assert_eq!(theirs.load(VirtAddr(AT + 4 * 4096)), Ok(AT + 4));
        assert_eq!(theirs.load(third), Ok(7), "an old page came back in its place");
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        assert_eq!(swapping.program.load(third), Ok(0));
        assert_eq!(swapping.taken(), 0);
    });
}

/// A fork would add references to the slots of a run in two clusters, but the last slot's count is
/// at its maximum. The first attempt adds no reference, and the second finds that page in memory.
/// The auditor compares the counts with the entries.
fn a_run_across_clusters_is_named_in_all_or_in_none<A: Walk>() {
    with_swap::<A>(0, 1536, |swapping| {
        let before = AT + 64 * MIB;
        swapping.map(before, 256);
        swapping.fill(before, 256);
        page_out(swapping, before, 256);
        swapping.map(AT, 512);
        swapping.fill(AT, 512);
        page_out(swapping, AT, 512);
        let slot = |page: u64| match swapping.space.inspect(VirtAddr(AT + page * 4096)) {
            Inspection::Absent(Absent::Swap { device, slot, .. }) => (device, slot),
            other => panic!("page {page} is not in swap: {other:?}"),
        };
        let (area, last) = slot(511);
        assert_eq!(last - slot(0).1, 511, "the slots are in a row");
        assert_ne!(last / 512, slot(0).1 / 512, "and in two clusters");
        // The first child also names the slot.
        let first = swapping.space.fork().unwrap();
        testing::damage_slot(swapping.memory, area, last, i16::MAX - 1);
        let second = swapping.space.fork().unwrap();
        testing::damage_slot(swapping.memory, area, last, 1 - i16::MAX);
        assert_eq!(swapping.swapped(AT, 512), 511);
        audit(swapping.machine, swapping.memory, &[swapping.space, &first, &second]);
        drop((first, second));
        swapping.assert_filled(AT, 512, AT);
        assert_eq!(swapping.taken(), 256);
    });
}

on_every_architecture! {
    named => a_run_across_clusters_is_named_in_all_or_in_none;
    short => a_short_cluster_serves_what_fits;
    holes => holes_serve_single_pages_and_blocks_folios;
    again => a_slot_of_a_cached_folio_that_is_used_again_is_another_page;
}
