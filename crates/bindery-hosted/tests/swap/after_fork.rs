//! Pages swapped in for one process while another process of the family still refers to their
//! slots. Swap holds their content, so they need no memory once no process maps them.

use bindery::addr::VirtAddr;
use bindery::arch::{Absent, X86_64};
use bindery::{Access, AddressSpace, Advice, Error, Inspection, Protection, testing};
use bindery_hosted::{Machine, Program, Walk};

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, READ_WRITE, audit, fixed, options, strict};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 512;

/// A child that has read all pages of its parent, whose own entries are in swap.
fn with_reader<A: Walk>(
    order: u8,
    scenario: impl for<'m> FnOnce(&Swapping<'_, 'm, A>, AddressSpace<'m, Machine<A>>),
) {
    with_swap::<A>(order, 4096, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, PAGES);
        let child = swapping.space.fork().unwrap();
        let free = swapping.memory.free_frame_count();
        assert_reads(swapping, &child, 0);
        assert!(swapping.memory.free_frame_count() <= free - PAGES, "nothing came in");
        scenario(swapping, child);
        assert_eq!(swapping.swapped(AT, PAGES), PAGES);
        assert_eq!(swapping.taken(), PAGES);
        swapping.assert_filled(AT, PAGES, AT);
    });
}

#[track_caller]
fn assert_reads<'m, A: Walk>(
    swapping: &Swapping<'_, 'm, A>,
    space: &AddressSpace<'m, Machine<A>>,
    from: u64,
) {
    let program = Program::new(swapping.machine, space);
    for page in from..PAGES {
        let at = AT + page * PAGE;
        assert_eq!(program.load(VirtAddr(at)), Ok(AT + page), "page {page}");
    }
}

fn what_the_caller_alone_maps_goes_out<A: Walk>() {
    for (order, protection) in [0, 4, 9]
        .into_iter()
        .flat_map(|order| [READ_WRITE, Protection::empty()].map(|protection| (order, protection)))
    {
        with_reader::<A>(order, |swapping, child| {
            child.mprotect(VirtAddr(AT), PAGES * PAGE, protection).unwrap();
            let free = swapping.memory.free_frame_count();
            let before = child.counts();
            child.madvise(VirtAddr(AT), PAGES * PAGE, Advice::PageOut).unwrap();
            let cost = child.counts() - before;
            assert_eq!(child.counts().swap_pages, PAGES, "order {order}");
            assert_eq!(cost.invalidations, 1, "{cost:?}");
            assert_eq!(swapping.memory.free_frame_count(), free + PAGES, "order {order}");
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            child.mprotect(VirtAddr(AT), PAGES * PAGE, READ_WRITE).unwrap();
            assert_reads(swapping, &child, 0);
        });
    }
}

fn what_two_children_map_stays<A: Walk>() {
    for order in [0, 4] {
        with_reader::<A>(order, |swapping, child| {
            let other = swapping.space.fork().unwrap();
            assert_reads(swapping, &other, 0);
            child.madvise(VirtAddr(AT), PAGES * PAGE, Advice::PageOut).unwrap();
            assert_eq!(child.counts().swap_pages, 0);
            drop(other);
            child.madvise(VirtAddr(AT), PAGES * PAGE, Advice::PageOut).unwrap();
            assert_eq!(child.counts().swap_pages, PAGES);
        });
    }
}

fn reclaim_takes_what_one_process_maps<A: Walk>() {
    for order in [0, 4] {
        with_reader::<A>(order, |swapping, child| {
            let free = swapping.memory.free_frame_count();
            child.madvise(VirtAddr(AT), PAGES * PAGE, Advice::Cold).unwrap();
            let before = child.counts();
            swapping.memory.reclaim(PAGES);
            let cost = child.counts() - before;
            assert_eq!(child.counts().swap_pages, PAGES, "order {order}");
            assert!(cost.invalidations <= PAGES / 32, "{cost:?}");
            assert!(swapping.memory.free_frame_count() >= free + PAGES, "order {order}");
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            assert_reads(swapping, &child, 0);
        });
    }
}

fn what_the_last_process_unmaps_leaves_memory<A: Walk>() {
    for order in [0, 4, 9] {
        with_reader::<A>(order, |swapping, child| {
            let free = swapping.memory.free_frame_count();
            let half = PAGES / 2;
            child.munmap(VirtAddr(AT), half * PAGE).unwrap();
            let freed = swapping.memory.free_frame_count() - free;
            assert!(order == 9 || freed == half, "{freed} of {half} pages, order {order}");
            assert_reads(swapping, &child, half);
            drop(child);
            let freed = swapping.memory.free_frame_count() - free;
            assert!(freed >= PAGES, "{freed} of {PAGES} pages, order {order}");
        });
    }
}

/// A write copies the page and removes the last mapping of the original.
fn what_a_write_leaves_goes<A: Walk>() {
    for order in [0, 4] {
        with_reader::<A>(order, |swapping, child| {
            let free = swapping.memory.free_frame_count();
            let program = Program::new(swapping.machine, &child);
            for page in 0..PAGES {
                program.store(VirtAddr(AT + page * PAGE), page).unwrap();
            }
            assert_eq!(swapping.memory.free_frame_count(), free, "order {order}");
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        });
    }
}

/// Pages without a mapping and without references to their slots do not keep the folio in memory.
#[test]
fn a_partly_cached_folio_leaves_memory() {
    with_swap::<bindery::arch::X86_64<4>>(4, 4096, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        let child = swapping.space.fork().unwrap();
        let program = Program::new(swapping.machine, &child);
        assert_eq!(program.load(VirtAddr(AT)), Ok(AT));
        swapping.space.munmap(VirtAddr(AT), 3 * PAGE).unwrap();
        assert_eq!(swapping.taken(), 13);
        let free = swapping.memory.free_frame_count();
        child.munmap(VirtAddr(AT), 16 * PAGE).unwrap();
        assert!(swapping.memory.free_frame_count() >= free + 16);
        assert_eq!(swapping.taken(), 13);
        swapping.assert_filled(AT + 3 * PAGE, 13, AT + 3);
    });
}

/// A folio some of whose pages the parent has dropped is swapped out to its own slots: by advice,
/// by reclaim if one process maps the folio, and by reclaim if two do.
fn what_is_in_the_cache_in_part_goes_out<A: Walk>() {
    for (order, by_advice, readers) in
        [(4, true, 1), (9, true, 1), (4, false, 1), (9, false, 1), (4, false, 2)]
    {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            swapping.page_out(AT, PAGES);
            let children: Vec<_> = (0..readers).map(|_| swapping.space.fork().unwrap()).collect();
            children.iter().for_each(|child| assert_reads(swapping, child, 0));
            // The parent keeps some pages of each folio.
            let kept = |page: &u64| page % 16 >= 5;
            for page in (0..PAGES).filter(|page| !kept(page)) {
                swapping.space.discard(VirtAddr(AT + page * PAGE), PAGE).unwrap();
            }
            let free = swapping.memory.free_frame_count();
            if by_advice {
                children[0].madvise(VirtAddr(AT), PAGES * PAGE, Advice::PageOut).unwrap();
            } else {
                // A folio leaves the cache in one turn of the clock and is evicted in a later turn.
                (0..3).for_each(|_| _ = swapping.memory.reclaim(2 * PAGES));
            }
            for child in &children {
                let out = child.counts().swap_pages;
                assert_eq!(out, PAGES, "order {order}, advice: {by_advice}, {readers} readers");
            }
            // The content of these pages is now in swap twice.
            assert!(swapping.memory.free_frame_count() >= free + PAGES / 2);
            let spaces: Vec<_> = children.iter().chain([swapping.space]).collect();
            audit(swapping.machine, swapping.memory, &spaces);
            children.iter().for_each(|child| assert_reads(swapping, child, 0));
            for page in (0..PAGES).filter(kept) {
                let at = AT + page * PAGE;
                assert_eq!(swapping.program.load(VirtAddr(at)), Ok(AT + page), "page {page}");
            }
            audit(swapping.machine, swapping.memory, &spaces);
        });
    }
}

/// The entries of a slot have a maximum, and the mappings of a page in memory have none that
/// processes reach.
fn a_page_whose_slot_is_full_comes_in<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            let (memory, space) = (swapping.memory, swapping.space);
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            swapping.page_out(AT, PAGES);
            let first = space.fork().unwrap();
            let slots = [5, 300].map(|page| {
                let found = space.inspect(VirtAddr(AT + page * PAGE));
                let Inspection::Absent(Absent::Swap { device, slot, .. }) = found else {
                    panic!("{found:?}")
                };
                (device, slot)
            });
            // This process and its child name the slot, and two processes may.
            let others = i16::MAX - 1;
            let count = |by| {
                for (area, slot) in slots {
                    testing::damage_slot(memory, area, slot, by);
                }
            };
            count(others);
            let asked = swapping.machine.ran_out_of_memory();
            let second = space.fork().unwrap();
            assert_eq!(swapping.machine.ran_out_of_memory(), asked);
            count(-others);
            let folios = if order == 9 { 1 } else { 2 };
            assert_eq!(swapping.swapped(AT, PAGES), PAGES - (folios << order), "order {order}");
            audit(swapping.machine, memory, &[space, &first, &second]);
            for child in [&first, &second, space] {
                assert_reads(swapping, child, 0);
            }
            audit(swapping.machine, memory, &[space, &first, &second]);
        });
    }
}

#[test]
fn a_lost_page_may_have_no_more_entries() {
    let (machine, memory) = strict::<X86_64<4>>(16 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
    space.fault(VirtAddr(AT), Access::Write).unwrap();
    let absent =
        Absent::Swap { device: 0, slot: 7, exclusive: false, soft_dirty: false, userfault: false };
    testing::plant(&space, VirtAddr(AT + 3 * PAGE), 1, absent);
    testing::damage_slot(&memory, 0, 7, i16::MAX);
    assert_eq!(space.fork().err(), Some(Error::LimitReached));
    assert_eq!(machine.ran_out_of_memory(), 0, "no memory would help");
    testing::damage_slot(&memory, 0, 7, -i16::MAX);
    audit(&machine, &memory, &[&space]);
    space.fork().unwrap();
    space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
    testing::forget_areas(&memory);
}

on_every_architecture! {
    full => a_page_whose_slot_is_full_comes_in;
    partly => what_is_in_the_cache_in_part_goes_out;
    caller => what_the_caller_alone_maps_goes_out;
    children => what_two_children_map_stays;
    reclaimed => reclaim_takes_what_one_process_maps;
    last => what_the_last_process_unmaps_leaves_memory;
    written => what_a_write_leaves_goes;
}
