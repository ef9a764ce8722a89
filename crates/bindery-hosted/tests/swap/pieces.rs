//! Runs that are not swapped in as a whole, or that lie in two clusters or two areas.

use std::thread;

use bindery::SizeMode;
use bindery::addr::{Order, VirtAddr};
use bindery::platform::Cpu;
use bindery_hosted::{Program, SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_swap};
use crate::support::objects::Chance;
use crate::support::{GIB, MIB, audit, use_order};

const AT: u64 = GIB;
const BYTES: u64 = 64 * MIB;

/// Allows faults to use only folios of these orders.
fn use_orders<A: Walk>(swapping: &Swapping<'_, '_, A>, orders: &[u8]) {
    for order in 1..=9 {
        swapping.memory.folio_policy().set(Order(order), SizeMode::Never);
    }
    orders.iter().for_each(|order| use_order(swapping.memory, *order));
}

/// 1. A folio of 16 pages is swapped out, and a child refers to its slots too.
/// 2. The parent swaps one page in, which stays in the swap cache for the child.
/// 3. The child's faults use the largest folios whose slots are only in swap.
fn slots_that_are_partly_cached_come_back_in_pieces<A: Walk>() {
    let device = device(4096, SwapService::AtOnce);
    with_device::<A>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        let child = swapping.space.fork().unwrap();
        let theirs = Program::new(swapping.machine, &child);
        let load = |page: u64| {
            assert_eq!(theirs.load(VirtAddr(AT + page * 4096)), Ok(AT + page));
            (device.counts().reads, device.counts().pages_read)
        };
        use_orders(swapping, &[]);
        swapping.assert_filled(AT + 3 * 4096, 1, AT + 3);
        use_orders(swapping, &[2, 4]);
        assert_eq!(load(5), (2, 5), "4 to 7 are whole, and 0 to 15 are not");
        assert_eq!(load(3), (2, 5), "it is in the cache");
        assert_eq!(load(1), (3, 6), "3 is not in swap alone");
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        for page in 0..16 {
            let _ = load(page);
        }
        swapping.assert_filled(AT, 16, AT);
        assert_eq!(swapping.taken(), 0);
    });
}

/// 1. A folio of 16 pages is swapped out. One thread reads only page 5; the device is slow.
/// 2. Another thread needs the whole run. Page 5 is busy, so the thread reads the largest folio
///    next to it.
/// 3. Once page 5 is present, the next fault reads the remaining pages around it.
fn slots_that_two_faults_want_come_back_in_pieces<A: Walk>() {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.served(device, || swapping.page_out(AT, 16));
        let load = |cpu: u16, page: u64| {
            swapping.machine.on_cpu(Cpu(cpu), || {
                let program = Program::new(swapping.machine, swapping.space);
                assert_eq!(program.load(VirtAddr(AT + page * 4096)), Ok(AT + page));
            });
        };
        thread::scope(|scope| {
            use_orders(swapping, &[]);
            let first = scope.spawn(|| load(1, 5));
            device.wait_for_request();
            use_orders(swapping, &[2, 3, 4]);
            let second = scope.spawn(|| load(2, 0));
            while device.waiting() < 2 {
                assert!(!second.is_finished(), "it has read nothing");
                thread::yield_now();
            }
            while !(first.is_finished() && second.is_finished()) {
                device.serve_one(swapping.memory);
            }
        });
        let out = |page: u64| swapping.swapped(AT + page * 4096, 1) == 1;
        let back: Vec<_> = (0..16).filter(|page| !out(*page)).collect();
        assert_eq!(back, [0, 1, 2, 3, 5], "one page, and the four before it");
        swapping.served(device, || swapping.assert_filled(AT, 16, AT));
        // The reads: 5; 0 to 3; 4, 6 and 7 singly; 8 to 15.
        assert_eq!((device.counts().reads, device.counts().pages_read), (6, 16));
    });
}

/// A page of the run was dropped while it was in swap, and its slot now holds another page.
fn slots_that_were_freed_come_back_in_pieces<A: Walk>() {
    let device = device(16, SwapService::AtOnce);
    with_device::<A>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 32);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        let ninth = VirtAddr(AT + 9 * 4096);
        swapping.space.discard(ninth, 4096).unwrap();
        assert_eq!(swapping.taken(), 15);
        use_orders(swapping, &[]);
        let other = AT + 20 * 4096;
        swapping.fill(other, 1);
        swapping.page_out(other, 1);
        assert_eq!(swapping.taken(), 16, "there is one slot to go to");
        use_orders(swapping, &[2, 4]);
        swapping.assert_filled(AT + 2 * 4096, 1, AT + 2);
        assert_eq!((device.counts().reads, device.counts().pages_read), (1, 4));
        swapping.assert_filled(AT + 8 * 4096, 1, AT + 8);
        assert_eq!((device.counts().reads, device.counts().pages_read), (2, 5));
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        assert_eq!(swapping.program.load(ninth), Ok(0), "another page came back");
        swapping.assert_filled(other, 1, other);
        swapping.assert_filled(AT, 9, AT);
        swapping.assert_filled(AT + 10 * 4096, 6, AT + 10);
    });
}

/// Zeroes, one repeated word, and incompressible data next to each other: one fault swaps in all
/// pages as one folio.
fn raw_pages_beside_zeroes_come_back_as_one_folio<A: Walk>() {
    for order in [4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            let pages = 1 << order;
            let content = |page: u64| -> Vec<u8> {
                let mut chance = Chance::new(page + 1, (0, 1));
                match page % 4 {
                    0 => vec![0; 4096],
                    1 => (0..4096).map(|_| chance.below(256) as u8).collect(),
                    2 => vec![0x5a; 4096],
                    _ => (0..4096u64).map(|byte| (byte / 64 + page) as u8).collect(),
                }
            };
            swapping.map(AT, pages);
            for page in 0..pages {
                let at = VirtAddr(AT + page * 4096);
                swapping.space.write_user(at, &content(page)).unwrap();
            }
            swapping.page_out(AT, pages);
            assert_eq!(swapping.swapped(AT, pages), pages);
            swapping.program.load(VirtAddr(AT + 5 * 4096)).unwrap();
            assert_eq!(swapping.swapped(AT, pages), 0);
            assert_eq!(swapping.memory.events().major_faults, 1);
            for page in 0..pages {
                let mut found = vec![0; 4096];
                swapping.space.read_user(VirtAddr(AT + page * 4096), &mut found).unwrap();
                assert!(found == content(page), "page {page}");
            }
        });
    }
}

/// One run of entries refers to slots of two clusters: it is forked, dropped in part, moved and
/// swapped in.
fn runs_that_cross_clusters_are_whole<A: Walk>() {
    with_swap::<A>(0, 1536, |swapping| {
        // The first cluster is half full.
        let first = AT + 64 * MIB;
        swapping.map(first, 256);
        swapping.fill(first, 256);
        swapping.page_out(first, 256);
        swapping.map(AT, 1024);
        swapping.fill(AT, 512);
        swapping.page_out(AT, 512);
        assert_eq!(swapping.taken(), 768);
        let child = swapping.space.fork().unwrap();
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        let middle = VirtAddr(AT + 200 * 4096);
        child.munmap(middle, 100 * 4096).unwrap();
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        assert_eq!(swapping.taken(), 768, "the parent has them");
        swapping.space.discard(middle, 200 * 4096).unwrap();
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        assert_eq!(swapping.taken(), 668, "the child has the rest");
        let theirs = Program::new(swapping.machine, &child);
        for page in (0..200).chain(300..512) {
            assert_eq!(theirs.load(VirtAddr(AT + page * 4096)), Ok(AT + page));
        }
        swapping.assert_filled(AT, 200, AT);
        swapping.assert_filled(AT + 400 * 4096, 112, AT + 400);
        assert_eq!(swapping.taken(), 256);
    });
}

/// The area with the highest priority is filled first; stopped or removed areas are skipped.
fn areas_are_used_by_priority<A: Walk>() {
    let device = device(96, SwapService::AtOnce);
    with_device::<A>(BYTES, 0, device, |swapping| {
        let memory = swapping.memory;
        let taken = |number: u8| {
            let mut areas = memory.swap_areas().filter(|area| area.number == number);
            areas.next().map(|area| area.taken)
        };
        let last = memory.swap_on(512, -3).unwrap();
        let first = memory.swap_on(64, 5).unwrap();
        swapping.map(AT, 512);
        swapping.fill(AT, 512);
        swapping.page_out(AT, 40);
        assert_eq!([first, swapping.area, last].map(|area| taken(area.number)), all([40, 0, 0]));
        swapping.page_out(AT + 40 * 4096, 100);
        assert_eq!([first, swapping.area, last].map(|area| taken(area.number)), all([64, 76, 0]));
        memory.stop_swapping_to(&swapping.area);
        swapping.page_out(AT + 140 * 4096, 100);
        assert_eq!([first, swapping.area, last].map(|area| taken(area.number)), all([64, 76, 100]));
        memory.resume_swapping_to(&swapping.area);
        swapping.page_out(AT + 240 * 4096, 30);
        assert_eq!([first, swapping.area, last].map(|area| taken(area.number)), all([64, 96, 110]));
        audit(swapping.machine, memory, &[swapping.space]);
        for area in [first, last] {
            memory.stop_swapping_to(&area);
            swapping.space.swap_in_area(&area).unwrap();
            assert_eq!(memory.swap_off(&area), Ok(()));
        }
        assert_eq!((taken(first.number), taken(last.number)), (None, None));
        assert_eq!(swapping.swapped(AT, 512), 96);
        swapping.assert_filled(AT, 512, AT);
    });
}

fn all(taken: [u64; 3]) -> [Option<u64>; 3] {
    taken.map(Some)
}

on_every_architecture! {
    cached => slots_that_are_partly_cached_come_back_in_pieces;
    wanted => slots_that_two_faults_want_come_back_in_pieces;
    freed => slots_that_were_freed_come_back_in_pieces;
    raw => raw_pages_beside_zeroes_come_back_as_one_folio;
    clusters => runs_that_cross_clusters_are_whole;
    priorities => areas_are_used_by_priority;
}
