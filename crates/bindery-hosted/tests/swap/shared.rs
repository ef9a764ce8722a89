//! Shared memory in swap: pages are swapped out of all mappings and swapped in on every path to
//! them.

use bindery::addr::VirtAddr;
use bindery::arch::{Level, X86_64};
use bindery::{
    Access, Accounting, AddressSpace, Advice, Error, FaultError, Inspection, LockPages, Object,
    PinTime, Residence, Sealing, Sharing,
};
use bindery_hosted::{Machine, Program, Walk};

use super::fixture::{Swapping, with_swap};
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::map;
use crate::support::{GIB, audit, options};

pub const AT: u64 = GIB;
pub const PAGE: u64 = 4096;
pub const ORDERS: [u8; 3] = [0, 4, 9];

/// A memfd of `pages` pages, mapped shared at [`AT`] and filled there.
pub struct Shared<'s, 'm, A: Walk> {
    pub swapping: &'s Swapping<'s, 'm, A>,
    pub object: Object<'m, Machine<A>>,
}

#[track_caller]
pub fn with_shared<A: Walk>(order: u8, pages: u64, scenario: impl FnOnce(&Shared<'_, '_, A>)) {
    with_swap::<A>(order, 4096, |swapping| {
        use_object_order(swapping.memory, order);
        let object =
            swapping.memory.shared_memory(pages * PAGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(swapping.space, &object, AT, pages * PAGE, Sharing::Shared).unwrap();
        swapping.fill(AT, pages);
        scenario(&Shared { swapping, object });
        swapping.space.munmap(VirtAddr(AT), pages * PAGE).unwrap();
    });
}

impl<A: Walk> Shared<'_, '_, A> {
    pub fn page_out(&self, page: u64, pages: u64) {
        let at = VirtAddr(AT + page * PAGE);
        self.swapping.space.madvise(at, pages * PAGE, Advice::PageOut).unwrap();
    }

    /// Pages in memory and in swap.
    #[track_caller]
    pub fn assert_has(&self, resident: u64, swapped: u64) {
        let has = (self.object.resident_pages(), self.object.swapped_pages());
        assert_eq!(has, (resident, swapped), "pages in memory and in swap");
        assert_eq!(self.swapping.taken(), swapped, "slots");
        self.audit();
    }

    #[track_caller]
    pub fn audit(&self) {
        audit(self.swapping.machine, self.swapping.memory, &[self.swapping.space]);
    }

    /// A page's first word as a call reads it.
    pub fn read(&self, page: u64) -> u64 {
        let mut word = [0; 8];
        assert_eq!(self.object.read(page * PAGE, &mut word), Ok(8));
        u64::from_le_bytes(word)
    }
}

fn out_and_in<A: Walk>() {
    for (order, pages) in [(0, 700), (4, 1024), (9, 1024)] {
        with_shared::<A>(order, pages, |shared| {
            let swapping = shared.swapping;
            for _ in 0..2 {
                let before = swapping.space.counts();
                shared.page_out(0, pages);
                let cost = swapping.space.counts() - before;
                shared.assert_has(0, pages);
                // Both huge leaves are in one table.
                let tables = if order == 9 { 1 } else { pages.div_ceil(512) };
                assert!(cost.invalidations <= tables, "{cost:?}");
                // The tables have no entries; the object's index holds the state.
                assert_eq!(swapping.space.inspect(VirtAddr(AT)), Inspection::Empty);
                assert_eq!(swapping.space.counts().swap_pages, 0);
                swapping.assert_filled(AT, pages, AT);
                shared.assert_has(pages, 0);
                swapping.fill(AT, pages);
            }
        });
    }
}

fn a_run_comes_back_as_one_folio<A: Walk>() {
    for order in [4, 9] {
        with_shared::<A>(order, 1024, |shared| {
            shared.page_out(0, 1024);
            assert_eq!(shared.swapping.program.load(VirtAddr(AT + PAGE)), Ok(AT + 1));
            shared.assert_has(1 << order, 1024 - (1 << order));
            let level = match shared.swapping.space.inspect(VirtAddr(AT)) {
                Inspection::Page { level, .. } => level,
                other => panic!("{other:?}"),
            };
            assert_eq!(level, if order == 9 { Level::PMD } else { Level::PTE });
        });
    }
}

fn calls_find_swapped_pages<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            let swapping = shared.swapping;
            shared.page_out(0, 512);
            assert_eq!(shared.read(17), AT + 17);
            shared.page_out(0, 512);
            // Writes a part of a page, a whole page, and several at once.
            shared.object.write(40 * PAGE + 8, &[7; 8]).unwrap();
            shared.object.write(41 * PAGE, &[8; 4096]).unwrap();
            shared.object.write(42 * PAGE + 100, &[9; 3 * 4096]).unwrap();
            assert_eq!(swapping.program.load(VirtAddr(AT + 40 * PAGE)), Ok(AT + 40));
            assert_eq!(
                swapping.program.load(VirtAddr(AT + 40 * PAGE + 8)),
                Ok(0x0707_0707_0707_0707)
            );
            assert_eq!(swapping.program.load(VirtAddr(AT + 41 * PAGE)), Ok(0x0808_0808_0808_0808));
            assert_eq!(swapping.program.load(VirtAddr(AT + 42 * PAGE)), Ok(AT + 42));
            assert_eq!(swapping.program.load(VirtAddr(AT + 44 * PAGE)), Ok(0x0909_0909_0909_0909));
            assert_eq!(swapping.program.load(VirtAddr(AT + 45 * PAGE + 96)), Ok(0x0909_0909));
            assert_eq!(shared.read(46), AT + 46);
            shared.audit();
        });
    }
}

fn other_ways_find_swapped_pages<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            let space = shared.swapping.space;
            shared.page_out(0, 512);
            let pinned =
                space.pin(VirtAddr(AT + 3 * PAGE), 1, Access::Write, PinTime::Short).unwrap();
            assert!(shared.object.resident_pages() > 0);
            drop(pinned);
            shared.page_out(0, 512);
            space.madvise(VirtAddr(AT), 512 * PAGE, Advice::PopulateRead).unwrap();
            shared.assert_has(512, 0);
            shared.page_out(0, 512);
            shared.object.allocate(0, 512 * PAGE, bindery::Growth::Allowed).unwrap();
            shared.assert_has(512, 0);
            shared.swapping.assert_filled(AT, 512, AT);
            shared.page_out(0, 512);
            space.mlock(VirtAddr(AT), 512 * PAGE, LockPages::Now).unwrap();
            shared.assert_has(512, 0);
            space.munlock(VirtAddr(AT), 512 * PAGE).unwrap();
            shared.swapping.assert_filled(AT, 512, AT);
        });
    }
}

fn collapse_brings_pages_back<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            shared.page_out(0, 500);
            shared.swapping.space.madvise(VirtAddr(AT), 512 * PAGE, Advice::Collapse).unwrap();
            shared.assert_has(512, 0);
            shared.swapping.assert_filled(AT, 512, AT);
        });
    }
}

fn a_private_mapping_goes_on<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            let swapping = shared.swapping;
            let private = 2 * AT;
            map(swapping.space, &shared.object, private, 512 * PAGE, Sharing::Private).unwrap();
            for page in (0..512).step_by(3) {
                swapping.program.store(VirtAddr(private + page * PAGE), page).unwrap();
            }
            swapping.space.madvise(VirtAddr(AT), 512 * PAGE, Advice::PageOut).unwrap();
            for page in 0..512 {
                let expected = if page % 3 == 0 { page } else { AT + page };
                let at = VirtAddr(private + page * PAGE);
                assert_eq!(swapping.program.load(at), Ok(expected), "page {page}");
            }
            // A copy of a page in swap.
            shared.page_out(0, 512);
            swapping.program.store(VirtAddr(private + PAGE), 5).unwrap();
            swapping.assert_filled(AT, 512, AT);
            // Copies are swapped out as anonymous memory, separately from their originals.
            swapping.space.madvise(VirtAddr(private), 512 * PAGE, Advice::PageOut).unwrap();
            shared.audit();
            for page in (0..512).step_by(3) {
                assert_eq!(swapping.program.load(VirtAddr(private + page * PAGE)), Ok(page));
            }
            swapping.space.munmap(VirtAddr(private), 512 * PAGE).unwrap();
        });
    }
}

/// As on Linux, `MADV_PAGEOUT` leaves pages that other processes map too and pages that are not
/// mapped here.
fn what_others_map_stays<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            let swapping = shared.swapping;
            let other = AddressSpace::new(swapping.memory, options()).unwrap();
            map(&other, &shared.object, AT, 512 * PAGE, Sharing::Shared).unwrap();
            let theirs = Program::new(swapping.machine, &other);
            assert_eq!(theirs.load(VirtAddr(AT)), Ok(AT));
            shared.page_out(0, 1 << order);
            assert_eq!(shared.object.swapped_pages(), 0);
            other.munmap(VirtAddr(AT), 512 * PAGE).unwrap();
            map(&other, &shared.object, AT, 512 * PAGE, Sharing::Shared).unwrap();
            // Now only the first process maps the pages.
            other.madvise(VirtAddr(AT), 512 * PAGE, Advice::PageOut).unwrap();
            assert_eq!(shared.object.swapped_pages(), 0);
            shared.page_out(0, 512);
            assert_eq!(shared.object.swapped_pages(), 512);
            assert_eq!(theirs.load(VirtAddr(AT + 5 * PAGE)), Ok(AT + 5));
            theirs.store(VirtAddr(AT + 5 * PAGE), 1).unwrap();
            assert_eq!(swapping.program.load(VirtAddr(AT + 5 * PAGE)), Ok(1));
            audit(swapping.machine, swapping.memory, &[swapping.space, &other]);
        });
    }
}

fn truncation_and_holes_free_slots<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 1024, |shared| {
            let swapping = shared.swapping;
            shared.page_out(0, 1024);
            shared.object.punch_hole(5 * PAGE, 7 * PAGE).unwrap();
            assert_eq!(shared.swapping.taken(), 1024 - 7);
            shared.audit();
            // The hole begins and ends in the middle of pages, which are swapped in and partly
            // zeroed.
            shared.object.punch_hole(100 * PAGE + 16, 2 * PAGE).unwrap();
            assert_eq!(shared.read(100), AT + 100);
            assert_eq!(shared.read(101), 0);
            assert_eq!(shared.read(102), 0);
            assert_eq!(shared.read(103), AT + 103);
            shared.audit();
            shared.object.set_size(600 * PAGE + 8).unwrap();
            assert!(swapping.taken() <= 601);
            assert_eq!(shared.read(600), AT + 600);
            assert_eq!(swapping.program.load(VirtAddr(AT + 601 * PAGE)), Err(FaultError::Bus));
            shared.object.set_size(1024 * PAGE).unwrap();
            assert_eq!(swapping.program.load(VirtAddr(AT + 600 * PAGE + 8)), Ok(0));
            assert_eq!(swapping.program.load(VirtAddr(AT + 700 * PAGE)), Ok(0));
            assert_eq!(swapping.program.load(VirtAddr(AT + 6 * PAGE)), Ok(0));
            swapping.assert_filled(AT + 12 * PAGE, 88, AT + 12);
            shared.audit();
            shared.object.set_size(0).unwrap();
            shared.assert_has(0, 0);
        });
    }
}

/// A folio with a hole in it is swapped out, and its other pages are swapped in.
fn a_folio_with_a_hole_goes_out<A: Walk>() {
    for order in [4, 9] {
        with_shared::<A>(order, 512, |shared| {
            shared.object.punch_hole(3 * PAGE, 2 * PAGE).unwrap();
            shared.page_out(0, 512);
            shared.assert_has(0, 510);
            assert_eq!(shared.swapping.program.load(VirtAddr(AT + 3 * PAGE)), Ok(0));
            assert_eq!(shared.swapping.program.load(VirtAddr(AT + 2 * PAGE)), Ok(AT + 2));
            shared.page_out(0, 512);
            shared.assert_has(0, 511);
            shared.swapping.assert_filled(AT + 5 * PAGE, 507, AT + 5);
        });
    }
}

fn dropping_the_object_frees_the_slots<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 1024, |shared| shared.page_out(0, 1024));
    }
}

fn locked_and_pinned_pages_stay<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            let space = shared.swapping.space;
            let pinned = space.pin(VirtAddr(AT), 1, Access::Write, PinTime::Short).unwrap();
            shared.page_out(0, 512);
            shared.assert_has(1 << order, 512 - (1 << order));
            drop(pinned);
            space.mlock(VirtAddr(AT), 512 * PAGE, LockPages::Now).unwrap();
            let refused = space.madvise(VirtAddr(AT), 512 * PAGE, Advice::PageOut);
            assert_eq!(refused, Err(Error::Invalid));
            space.munlock(VirtAddr(AT), 512 * PAGE).unwrap();
            shared.page_out(0, 512);
            shared.assert_has(0, 512);
            shared.swapping.assert_filled(AT, 512, AT);
        });
    }
}

fn listings_know_swapped_pages<A: Walk>() {
    with_shared::<A>(0, 64, |shared| {
        let space = shared.swapping.space;
        shared.object.punch_hole(32 * PAGE, 16 * PAGE).unwrap();
        shared.page_out(0, 64);
        shared.assert_has(0, 48);
        assert_eq!(shared.object.next_data(PAGE), Some(PAGE));
        assert_eq!(shared.object.next_hole(PAGE), Some(32 * PAGE));
        assert_eq!(shared.object.next_data(33 * PAGE), Some(48 * PAGE));
        shared.swapping.program.load(VirtAddr(AT + PAGE)).unwrap();
        let mut resident = Vec::new();
        let tell = |residence, count| {
            resident.extend((0..count).map(|_| residence == Residence::Resident));
        };
        space.mincore(VirtAddr(AT), 64 * PAGE, tell).unwrap();
        let expected: Vec<bool> = (0..64).map(|page| page == 1).collect();
        assert_eq!(resident, expected);
        let mut smaps = String::new();
        bindery_linux::proc::smaps(space, &bindery_linux::proc::Unnamed, &mut smaps).unwrap();
        let swap = smaps.lines().find(|line| line.starts_with("Swap:")).unwrap();
        assert_eq!(swap.split_whitespace().nth(1), Some("188"), "{swap}");
    });
}

fn swapoff_brings_everything_back<A: Walk>() {
    for order in ORDERS {
        with_shared::<A>(order, 512, |shared| {
            let Swapping { memory, area, .. } = *shared.swapping;
            let second = memory.shared_memory(64 * PAGE, Sealing::Allowed, Accounting::PerPage);
            let second = second.unwrap();
            let empty = memory.shared_memory(PAGE, Sealing::Allowed, Accounting::PerPage).unwrap();
            map(shared.swapping.space, &second, 2 * AT, 64 * PAGE, Sharing::Shared).unwrap();
            shared.swapping.fill(2 * AT, 64);
            shared.page_out(0, 512);
            shared.swapping.space.madvise(VirtAddr(2 * AT), 64 * PAGE, Advice::PageOut).unwrap();
            assert_eq!(second.swapped_pages(), 64);
            memory.stop_swapping_to(&area);
            assert_eq!(memory.swap_in_objects(&area), Ok(()));
            assert_eq!(shared.swapping.taken(), 0);
            assert_eq!(shared.object.resident_pages(), 512);
            shared.audit();
            memory.resume_swapping_to(&area);
            shared.swapping.assert_filled(AT, 512, AT);
            shared.swapping.assert_filled(2 * AT, 64, 2 * AT);
            drop(empty);
            shared.swapping.space.munmap(VirtAddr(2 * AT), 64 * PAGE).unwrap();
        });
    }
}

#[test]
fn secret_memory_stays() {
    with_swap::<X86_64<4>>(0, 4096, |swapping| {
        let secret = swapping.memory.secret_memory().unwrap();
        secret.set_size(8 * PAGE).unwrap();
        map(swapping.space, &secret, AT, 8 * PAGE, Sharing::Shared).unwrap();
        swapping.fill(AT, 8);
        let advised = swapping.space.madvise(VirtAddr(AT), 8 * PAGE, Advice::PageOut);
        assert_eq!(advised, Err(Error::Invalid));
        while swapping.memory.reclaim(1 << 20).freed > 0 {}
        assert_eq!((secret.resident_pages(), secret.swapped_pages()), (8, 0));
        swapping.space.munmap(VirtAddr(AT), 8 * PAGE).unwrap();
    });
}

/// Under pressure, unused shared memory is evicted, wherever it is mapped.
fn reclaim_takes_shared_memory<A: Walk>() {
    for order in [0, 4] {
        with_shared::<A>(order, 512, |shared| {
            let swapping = shared.swapping;
            let other = AddressSpace::new(swapping.memory, options()).unwrap();
            map(&other, &shared.object, AT, 512 * PAGE, Sharing::Shared).unwrap();
            let theirs = Program::new(swapping.machine, &other);
            for page in 0..512 {
                assert_eq!(theirs.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
            }
            let mut rounds = 0;
            while shared.object.swapped_pages() < 512 && rounds < 16 {
                swapping.memory.reclaim(1 << 20);
                rounds += 1;
            }
            assert_eq!(shared.object.swapped_pages(), 512, "after {rounds} rounds");
            audit(swapping.machine, swapping.memory, &[swapping.space, &other]);
            swapping.assert_filled(AT, 512, AT);
            for page in 0..512 {
                assert_eq!(theirs.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
            }
            // The memory stays if one of the processes has locked it.
            other.mlock(VirtAddr(AT), 512 * PAGE, LockPages::Now).unwrap();
            for _ in 0..8 {
                swapping.memory.reclaim(1 << 20);
            }
            assert_eq!(shared.object.swapped_pages(), 0);
            other.munlock(VirtAddr(AT), 512 * PAGE).unwrap();
        });
    }
}

on_every_architecture! {
    out_in => out_and_in;
    one_folio => a_run_comes_back_as_one_folio;
    calls => calls_find_swapped_pages;
    other_ways => other_ways_find_swapped_pages;
    collapse => collapse_brings_pages_back;
    private => a_private_mapping_goes_on;
    others => what_others_map_stays;
    truncation => truncation_and_holes_free_slots;
    holes => a_folio_with_a_hole_goes_out;
    dropped => dropping_the_object_frees_the_slots;
    locked => locked_and_pinned_pages_stay;
    listings => listings_know_swapped_pages;
    swapoff => swapoff_brings_everything_back;
    reclaimed => reclaim_takes_shared_memory;
}
