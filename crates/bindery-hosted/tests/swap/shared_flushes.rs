//! The number of TLB flushes while shared memory is swapped out: one for each table of a range,
//! and, under memory pressure, one for each address space and batch of 32 folios, whatever pages
//! stay in between.

use bindery::addr::VirtAddr;
use bindery::{AddressSpace, Advice, LockPages, Residence, Sharing};
use bindery_hosted::{Program, Walk};

use super::shared::{AT, PAGE, with_shared};
use crate::support::objects_fixture::map;
use crate::support::{audit, options};

const PAGES: u64 = 512;

fn page(number: u64) -> VirtAddr {
    VirtAddr(AT + number * PAGE)
}

fn one_for_each_table<A: Walk>() {
    with_shared::<A>(0, 2 * PAGES, |shared| {
        let swapping = shared.swapping;
        let other = AddressSpace::new(swapping.memory, options()).unwrap();
        map(&other, &shared.object, AT, 2 * PAGES * PAGE, Sharing::Shared).unwrap();
        let theirs = Program::new(swapping.machine, &other);
        for number in (0..2 * PAGES).step_by(2) {
            assert_eq!(theirs.load(page(number)), Ok(AT + number));
            // A fault maps neighbors too.
            other.madvise(page(number + 1), PAGE, Advice::DontNeed).unwrap();
        }
        let before = swapping.space.counts().invalidations;
        shared.page_out(0, 2 * PAGES);
        assert_eq!(shared.object.swapped_pages(), PAGES, "what is mapped here alone");
        assert_eq!(swapping.space.counts().invalidations - before, 2);
        swapping.assert_filled(AT, 2 * PAGES, AT);
    });
}

fn one_for_each_space_and_batch<A: Walk>() {
    with_shared::<A>(0, PAGES, |shared| {
        let swapping = shared.swapping;
        let other = AddressSpace::new(swapping.memory, options()).unwrap();
        map(&other, &shared.object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let theirs = Program::new(swapping.machine, &other);
        for number in 0..PAGES {
            assert_eq!(theirs.load(page(number)), Ok(AT + number));
        }
        let spaces = [swapping.space, &other];
        for space in spaces {
            space.madvise(page(0), PAGES * PAGE, Advice::Cold).unwrap();
        }
        for number in (0..PAGES).step_by(4) {
            assert_eq!(theirs.load(page(number)), Ok(AT + number));
        }
        let before = spaces.map(|space| space.counts().invalidations);
        let unused = PAGES / 4 * 3;
        assert_eq!(swapping.memory.reclaim(unused).freed, unused);
        assert_eq!(shared.object.swapped_pages(), unused);
        for (space, before) in spaces.into_iter().zip(before) {
            let flushes = space.counts().invalidations - before;
            // The last batches are smaller because fewer pages are still wanted.
            assert!((1..=PAGES / 32 + 5).contains(&flushes), "{flushes} flushes");
        }
        let mut resident = Vec::new();
        other
            .mincore(page(0), PAGES * PAGE, |residence, pages| {
                resident.extend(vec![residence == Residence::Resident; pages as usize]);
            })
            .unwrap();
        let used = (0..PAGES).map(|number| number % 4 == 0);
        assert!(resident.into_iter().eq(used), "what was used stays");
        audit(swapping.machine, swapping.memory, &spaces);
        for number in 0..PAGES {
            assert_eq!(theirs.load(page(number)), Ok(AT + number));
        }
    });
}

/// Only the pages of a locked VMA stay.
fn pages_that_one_has_locked_stay<A: Walk>() {
    with_shared::<A>(0, PAGES, |shared| {
        let swapping = shared.swapping;
        let other = AddressSpace::new(swapping.memory, options()).unwrap();
        map(&other, &shared.object, AT, 64 * PAGE, Sharing::Shared).unwrap();
        other.mlock(page(8), 16 * PAGE, LockPages::Now).unwrap();
        for _ in 0..8 {
            swapping.memory.reclaim(1 << 20);
        }
        assert_eq!(shared.object.resident_pages(), 16);
        swapping.assert_filled(AT, PAGES, AT);
        audit(swapping.machine, swapping.memory, &[swapping.space, &other]);
    });
}

on_every_architecture! {
    range => one_for_each_table;
    pressure => one_for_each_space_and_batch;
    locked => pages_that_one_has_locked_stay;
}
