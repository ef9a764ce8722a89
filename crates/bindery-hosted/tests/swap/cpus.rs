//! Each CPU allocates slots in its own clusters, and no slot is lost when its CPU goes offline.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::Absent;
use bindery::platform::Cpu;
use bindery::{AddressSpace, Advice, Inspection};
use bindery_hosted::{Program, SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_swap};
use crate::support::{GIB, MIB, audit, fixed, options};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
/// Slots of one cluster.
const RUN: u64 = 512;

/// The cluster of the slot of a page in swap.
fn cluster<A: Walk>(swapping: &Swapping<'_, '_, A>, page: u64) -> Option<u64> {
    match swapping.space.inspect(VirtAddr(AT + page * PAGE)) {
        Inspection::Absent(Absent::Swap { slot, .. }) => Some(slot / RUN),
        _ => None,
    }
}

/// Swaps pages out by calls on a CPU.
fn page_out_on<A: Walk>(swapping: &Swapping<'_, '_, A>, cpu: u16, first: u64, pages: u64) {
    swapping.machine.on_cpu(Cpu(cpu), || swapping.page_out(AT + first * PAGE, pages));
}

fn each_cpu_has_a_cluster_of_its_own<A: Walk>() {
    with_swap::<A>(0, 4 * RUN, |swapping| {
        swapping.map(AT, 90);
        swapping.fill(AT, 90);
        for round in 0..3 {
            for cpu in 0..3 {
                page_out_on(swapping, cpu, 30 * round + 10 * u64::from(cpu), 10);
            }
        }
        let clusters = [0, 10, 20].map(|page| cluster(swapping, page).expect("it is in swap"));
        assert!(clusters[0] != clusters[1] && clusters[1] != clusters[2]);
        assert_ne!(clusters[0], clusters[2]);
        for page in 0..90 {
            let cpu = page / 10 % 3;
            assert_eq!(cluster(swapping, page), Some(clusters[cpu as usize]), "page {page}");
        }
        assert_eq!(swapping.taken(), 90);
        assert_eq!(swapping.memory.swap_usage().taken, 90);
        swapping.assert_filled(AT, 90, AT);
    });
}

/// The clusters of other CPUs are used before an allocation fails, for folios and for pages.
fn the_last_slot_is_found_whichever_cpu_has_it<A: Walk>() {
    for order in [0, 4] {
        let folio = 1 << order;
        with_swap::<A>(order, 3 * RUN, |swapping| {
            swapping.map(AT, 4 * RUN);
            swapping.fill(AT, 4 * RUN);
            for cpu in 1..3 {
                page_out_on(swapping, cpu, u64::from(cpu) * folio, folio);
            }
            let splits = swapping.memory.events().folio_splits;
            page_out_on(swapping, 0, 3 * folio, 3 * RUN - 2 * folio);
            assert_eq!(swapping.taken(), 3 * RUN, "slots are left");
            assert_eq!(swapping.memory.events().folio_splits, splits, "a block was out of reach");
            page_out_on(swapping, 0, 0, folio);
            assert_eq!((swapping.taken(), swapping.swapped(AT, folio)), (3 * RUN, 0));
            // One block is freed, and the next CPU allocates it.
            let freed = VirtAddr(AT + folio * PAGE);
            swapping.space.madvise(freed, folio * PAGE, Advice::DontNeed).unwrap();
            page_out_on(swapping, 2, 0, folio);
            assert_eq!((swapping.taken(), swapping.swapped(AT, folio)), (3 * RUN, folio));
            swapping.assert_filled(AT + 2 * folio * PAGE, folio, AT + 2 * folio);
        });
    }
}

fn a_cpu_that_goes_offline_leaves_its_cluster<A: Walk>() {
    with_swap::<A>(0, 4 * RUN, |swapping| {
        swapping.map(AT, 30);
        swapping.fill(AT, 30);
        page_out_on(swapping, 1, 0, 10);
        swapping.memory.cpu_offline(Cpu(1)).unwrap();
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        // A cluster in use is preferred to a free one.
        page_out_on(swapping, 0, 10, 10);
        assert_eq!(cluster(swapping, 0), cluster(swapping, 10));
        swapping.memory.cpu_online(Cpu(1)).unwrap();
        page_out_on(swapping, 1, 20, 10);
        assert_ne!(cluster(swapping, 20), cluster(swapping, 10), "CPU 0 owns it now");
        assert_eq!(swapping.memory.events().pages_swapped_out, 30);
        swapping.assert_filled(AT, 30, AT);
        assert_eq!(swapping.memory.events().pages_swapped_in, 30);
    });
}

/// A cluster that is still assigned to a CPU does not prevent the removal of its area, and a new
/// area in the same place has no assigned clusters.
fn an_area_goes_with_the_clusters_of_all_cpus<A: Walk>() {
    with_swap::<A>(0, RUN, |swapping| {
        swapping.map(AT, RUN);
        for _ in 0..3 {
            let area = swapping.memory.swap_on(2 * RUN, 1).unwrap();
            swapping.fill(AT, 20);
            page_out_on(swapping, 1, 0, 10);
            page_out_on(swapping, 2, 10, 10);
            let taken = |number| {
                let found = swapping.memory.swap_areas().find(|area| area.number == number);
                found.map(|area| area.taken)
            };
            assert_eq!(taken(area.number), Some(20), "the area of higher priority is used");
            assert!(swapping.memory.swap_off(&area).is_err(), "slots are taken");
            swapping.memory.resume_swapping_to(&area);
            swapping.assert_filled(AT, 20, AT);
            swapping.memory.swap_off(&area).unwrap();
            assert_eq!(taken(area.number), None);
        }
    });
}

/// A cluster whose slots are all free is discarded even if it is still assigned to a CPU.
fn free_slots_of_an_owned_cluster_are_discarded<A: Walk>() {
    let file = device(4 * RUN, SwapService::AtOnce);
    with_device::<A>(64 * MIB, 0, file, |swapping| {
        swapping.map(AT, 20);
        swapping.fill(AT, 20);
        page_out_on(swapping, 1, 0, 10);
        page_out_on(swapping, 2, 10, 10);
        swapping.space.madvise(VirtAddr(AT), 10 * PAGE, Advice::DontNeed).unwrap();
        assert_eq!(swapping.memory.discard_free_slots(), RUN);
        swapping.fill(AT, 10);
        page_out_on(swapping, 1, 0, 10);
        assert_ne!(cluster(swapping, 0), cluster(swapping, 10), "CPU 2 has that one");
        swapping.space.munmap(VirtAddr(AT), 20 * PAGE).unwrap();
        assert_eq!(swapping.memory.discard_free_slots(), 2 * RUN);
    });
}

/// A CPU goes offline while one of its requests is in flight, and a thread that read the CPU's
/// number earlier submits another request later. The other CPUs find both.
fn requests_of_an_offline_cpu_are_found<A: Walk>() {
    let file = device(RUN, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, file, |swapping| {
        let memory = swapping.memory;
        let written = || memory.events().pages_swapped_out;
        let serve = || while file.serve_one(memory) {};
        swapping.map(AT, 6);
        swapping.fill(AT, 6);
        page_out_on(swapping, 1, 0, 1);
        serve();
        page_out_on(swapping, 0, 1, 1);
        assert_eq!(written(), 0, "CPU 1 looks for it");
        memory.cpu_offline(Cpu(1)).unwrap();
        page_out_on(swapping, 0, 2, 1);
        assert_eq!(written(), 1);
        serve();
        assert_eq!((memory.finish_swap_writes(), memory.finish_swap_writes()), (2, 0), "idle");
        page_out_on(swapping, 1, 3, 1);
        serve();
        page_out_on(swapping, 0, 4, 1);
        assert_eq!(written(), 4, "nothing looks for the late request");
        memory.cpu_online(Cpu(1)).unwrap();
        page_out_on(swapping, 1, 5, 1);
        serve();
        assert_eq!(memory.finish_swap_writes(), 2);
        swapping.served(file, || swapping.assert_filled(AT, 6, AT));
    });
}

/// Several CPUs repeatedly fill a small area and swap all pages in. The area never exceeds its
/// number of slots, and no slot is lost.
fn cpus_fill_an_area_together<A: Walk>() {
    const PAGES: u64 = 400;
    with_swap::<A>(0, 2 * RUN, |swapping| {
        let (machine, memory) = (swapping.machine, swapping.memory);
        let work = || {
            let space = AddressSpace::new(memory, options()).unwrap();
            let program = Program::new(machine, &space);
            space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
            for round in 0..20 {
                for page in 0..PAGES {
                    program.store(VirtAddr(AT + page * PAGE), round + page).unwrap();
                }
                space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::PageOut).unwrap();
                let taken: u64 = memory.swap_areas().map(|area| area.taken).sum();
                assert!(taken <= 2 * RUN);
                for page in 0..PAGES {
                    let there = program.load(VirtAddr(AT + page * PAGE));
                    assert_eq!(there, Ok(round + page));
                }
            }
        };
        thread::scope(|scope| {
            for cpu in 0..3 {
                scope.spawn(move || machine.on_cpu(Cpu(cpu), work));
            }
        });
        assert_eq!(swapping.taken(), 0);
        // All slots are free again, whichever CPU allocated slots last.
        swapping.map(AT, 2 * RUN);
        swapping.fill(AT, 2 * RUN);
        swapping.page_out(AT, 2 * RUN);
        assert_eq!(swapping.taken(), 2 * RUN);
    });
}

on_every_architecture! {
    own => each_cpu_has_a_cluster_of_its_own;
    last => the_last_slot_is_found_whichever_cpu_has_it;
    offline => a_cpu_that_goes_offline_leaves_its_cluster;
    areas => an_area_goes_with_the_clusters_of_all_cpus;
    discards => free_slots_of_an_owned_cluster_are_discarded;
    requests => requests_of_an_offline_cpu_are_found;
    together => cpus_fill_an_area_together;
}
