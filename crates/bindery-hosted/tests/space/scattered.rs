//! `mprotect` of pages whose frames are in random order: they change in runs of equal attributes,
//! and each page keeps its content, its owner and its own write permission.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, FaultError, Protection};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::fixture::with_fixture;
use crate::support::kernel::Numbers;
use crate::support::{GIB, READ_WRITE, audit, fixed};

on_every_architecture! {
    all_pages_change_in_one_stretch => one_stretch;
    each_page_keeps_what_is_its_own => beside_a_child;
}

/// Two tables.
const PAGES: u64 = 600;
const AT: u64 = GIB - 37 * PAGE_SIZE;

fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE_SIZE)
}

/// Memory that was written in random order.
fn scatter<A: Walk>(space: &AddressSpace<'_, Machine<A>>, program: &Program<'_, '_, A>) {
    space.mmap(&fixed(AT, PAGES * PAGE_SIZE)).unwrap();
    for number in 0..PAGES {
        let page = number * 7 % PAGES;
        program.store(at(page), page + 1).unwrap();
    }
}

fn one_stretch<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let (space, program) = (fixture.space, &fixture.program);
        scatter(space, program);
        let before = space.counts();
        space.mprotect(at(0), PAGES * PAGE_SIZE, Protection::READ).unwrap();
        let work = space.counts() - before;
        assert_eq!(work.entries_written, PAGES);
        assert!(work.invalidations <= 2, "{work:?}");
        for page in 0..PAGES {
            assert_eq!(program.load(at(page)), Ok(page + 1));
            assert_eq!(program.store(at(page), 0), Err(FaultError::Protection));
        }
        let before = space.counts();
        space.mprotect(at(0), PAGES * PAGE_SIZE, READ_WRITE).unwrap();
        let work = space.counts() - before;
        assert_eq!((work.entries_written, work.invalidations), (PAGES, 0));
        let before = space.counts();
        for page in 0..PAGES {
            program.store(at(page), page + 2).unwrap();
        }
        assert_eq!((space.counts() - before).entries_written, 0, "all are writable at once");
    });
}

fn beside_a_child<A: Walk>() {
    for order in [0, 4] {
        with_fixture::<A>(order, |fixture| {
            let (space, program) = (fixture.space, &fixture.program);
            scatter(space, program);
            space.discard(at(150), 40 * PAGE_SIZE).unwrap();
            let mut expected: Vec<u64> = (1..=PAGES).collect();
            expected[150..190].fill(0);
            let child = space.fork().unwrap();
            let inherited = expected.clone();
            let protections = [Protection::READ, READ_WRITE, Protection::empty()];
            let mut allowed = vec![READ_WRITE; PAGES as usize];
            let mut random = Numbers(5);
            for _ in 0..60 {
                let first = random.below(PAGES);
                let pages = first..(first + random.of_any_size(9)).min(PAGES);
                let protection = protections[random.below(3) as usize];
                let length = (pages.end - pages.start) * PAGE_SIZE;
                space.mprotect(at(first), length, protection).unwrap();
                allowed[pages.start as usize..pages.end as usize].fill(protection);
                for _ in 0..40 {
                    let page = random.below(PAGES);
                    let (here, value) = (allowed[page as usize], random.below(1 << 30));
                    let stored = program.store(at(page), value);
                    let may = here.contains(Protection::WRITE);
                    assert_eq!(stored, if may { Ok(()) } else { Err(FaultError::Protection) });
                    if may {
                        expected[page as usize] = value;
                    }
                    let loaded = program.load(at(page));
                    let none = here.is_empty();
                    let value = expected[page as usize];
                    assert_eq!(loaded, if none { Err(FaultError::Protection) } else { Ok(value) });
                }
                audit(fixture.machine, fixture.memory, &[space, &child]);
            }
            let program = Program::new(fixture.machine, &child);
            for page in 0..PAGES {
                assert_eq!(program.load(at(page)), Ok(inherited[page as usize]));
            }
            audit(fixture.machine, fixture.memory, &[space, &child]);
        });
    }
}
