//! Families of processes: chains of forks leave nothing behind, and the reverse map visits only the
//! VMAs that may map a page.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::addr::PAGE_SIZE;
use bindery::platform::Cpu;
use bindery::testing::{self, anon_groups, walk_anonymous};
use bindery::{Access, AddressSpace, Advice, Error, Inspection, Memory, PinTime, Protection};
use bindery_hosted::{Config, Machine, Program, TlbKind, Walk};

use super::families::{Space, X, assert_walk, free, new_space, page, write};
use crate::support::kernel::Finished;
use crate::support::{MIB, READ_WRITE, audit, fixed, memory_with, options, strict};

on_every_architecture! {
    chain => a_walk_in_a_chain_visits_one_vma;
    star => a_walk_in_a_star_visits_who_can_map_the_page;
    star_after_chain => a_walk_in_a_star_after_a_chain_visits_who_can_map_the_page;
    chain_below_star => a_walk_in_a_chain_below_a_star_visits_who_can_map_the_page;
    sister => children_that_live_keep_what_the_parent_does_not_map_any_more;
    group_with_children => a_group_with_children_does_not_contract;
    walker => a_walker_meets_a_chain_that_contracts;
    prot_none => pages_without_permission_are_found_in_a_chain;
    split => parts_of_a_split_vma_contract_together;
    group_of_several => several_vmas_of_one_group_are_all_surveyed;
    pins => pinned_pages_stay_found_across_generations;
    locked_folio => a_folio_that_is_locked_puts_the_contraction_off;
    out_of_memory => a_fork_that_contracts_may_run_out_of_memory;
}

/// A machine without the strict TLB, with which 20,000 generations take too long.
fn plain(bytes: u64) -> (Machine<X>, Memory<Machine<X>>) {
    memory_with(Config { memory: bytes, tlb: TlbKind::Plain, ..Config::default() })
}

/// The child, after the parent has exited.
fn next<A: Walk>(space: Space<'_, A>) -> Space<'_, A> {
    space.fork().unwrap()
}

#[test]
fn a_forking_daemon_takes_constant_memory() {
    let (machine, memory) = plain(64 * MIB);
    let mut space = new_space(&memory, 4);
    write(&space, 1);
    let mut early = 0;
    for generation in 1..=20_000 {
        space = next(space);
        write(&space, 1);
        if generation == 100 {
            early = free(&memory);
        }
    }
    assert_eq!(free(&memory), early, "frames are lost");
    assert!(anon_groups(&memory) <= 12, "{} groups for one VMA", anon_groups(&memory));
    audit(&machine, &memory, &[&space]);
}

#[test]
fn a_daemon_of_500_mappings_takes_constant_memory() {
    let (machine, memory) = plain(128 * MIB);
    let mut space = AddressSpace::new(&memory, options()).unwrap();
    for number in 0..500 {
        space.mmap(&fixed(page(2 * number).0, PAGE_SIZE)).unwrap();
        space.fault(page(2 * number), Access::Write).unwrap();
    }
    // Half of the pages come from the first generation.
    let generation = |space| {
        let space = next(space);
        for number in (0..500).step_by(2) {
            space.fault(page(2 * number), Access::Write).unwrap();
        }
        space
    };
    // The cycle of contractions has a length that divides 60.
    for _ in 0..240 {
        space = generation(space);
    }
    let early = free(&memory);
    for _ in 0..240 {
        space = generation(space);
    }
    assert_eq!(free(&memory), early, "frames are lost");
    assert!(anon_groups(&memory) <= 12 * 500, "{} groups", anon_groups(&memory));
    audit(&machine, &memory, &[&space]);
}

fn a_walk_in_a_chain_visits_one_vma<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 4);
    write(&space, 4);
    for generation in 0..40 {
        space = next(space);
        // Uses pages of the first, every third, every second and every generation.
        for (number, step) in [(1, 3), (2, 2), (3, 1)] {
            if generation % step == 0 {
                space.fault(page(number), Access::Write).unwrap();
            }
        }
        for number in 0..4 {
            assert_eq!(assert_walk(&space, page(number), 1).found, 1);
        }
        audit(&machine, &memory, &[&space]);
    }
}

/// One parent whose children are alive; every second child has its own pages.
fn star<'m, A: Walk>(parent: &Space<'m, A>, children: usize) -> Vec<Space<'m, A>> {
    let fork = |number| {
        let child = parent.fork().unwrap();
        if number % 2 == 0 {
            child.fault(page(1), Access::Write).unwrap();
        }
        child
    };
    (0..children).map(fork).collect()
}

#[track_caller]
fn assert_star<'m, A: Walk>(
    machine: &Machine<A>,
    memory: &'m Memory<Machine<A>>,
    parent: &Space<'m, A>,
    children: &[Space<'m, A>],
) {
    let all = children.len() as u64 + 1;
    assert_eq!(assert_walk(parent, page(0), all).found, all, "nobody has written to the page");
    for child in children.iter().step_by(2) {
        assert_eq!(assert_walk(child, page(1), 1).found, 1, "the child's own page");
    }
    // Pages that the parent writes after its forks are its own, but its group belongs to the
    // family.
    let spaces: Vec<_> = std::iter::once(parent).chain(children).collect();
    audit(machine, memory, &spaces);
}

fn a_walk_in_a_star_visits_who_can_map_the_page<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let parent = new_space(&memory, 4);
    write(&parent, 2);
    let children = star(&parent, 50);
    assert_star(&machine, &memory, &parent, &children);
}

fn a_walk_in_a_star_after_a_chain_visits_who_can_map_the_page<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut parent = new_space(&memory, 4);
    write(&parent, 2);
    for _ in 0..23 {
        parent = next(parent);
    }
    let children = star(&parent, 50);
    assert_star(&machine, &memory, &parent, &children);
    // Only future children can map the parent's own page.
    drop(children);
    parent.fault(page(1), Access::Write).unwrap();
    assert_eq!(assert_walk(&parent, page(1), 1).found, 1);
}

fn a_walk_in_a_chain_below_a_star_visits_who_can_map_the_page<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let parent = new_space(&memory, 4);
    write(&parent, 2);
    let mut children = star(&parent, 20);
    for _ in 0..23 {
        let child = children.pop().unwrap();
        children.push(next(child));
        children.last().unwrap().fault(page(1), Access::Write).unwrap();
    }
    let last = children.last().unwrap();
    assert_eq!(assert_walk(last, page(1), 1).found, 1);
    assert_eq!(assert_walk(last, page(0), 21).found, 21);
    assert_star(&machine, &memory, &parent, &children);
}

fn children_that_live_keep_what_the_parent_does_not_map_any_more<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 4);
    Program::new(&machine, &space).store(page(0), 7).unwrap();
    for _ in 0..3 {
        space = next(space);
    }
    // The oldest sibling of later generations keeps the first page.
    let sister = space.fork().unwrap();
    for _ in 0..30 {
        let child = space.fork().unwrap();
        child.fault(page(0), Access::Write).unwrap();
        // This child, too, forks again while it has a child.
        let second = child.fork().unwrap();
        child.discard(page(0), PAGE_SIZE).unwrap();
        drop(child.fork().unwrap());
        assert_walk(&second, page(0), 3);
        audit(&machine, &memory, &[&space, &child, &second, &sister]);
        drop(second);
        space = child;
        assert_walk(&sister, page(0), 2);
    }
    assert_eq!(Program::new(&machine, &sister).load(page(0)), Ok(7));
    assert!(anon_groups(&memory) <= 16, "{} groups", anon_groups(&memory));
}

/// The group of an ended address space does not contract while it has two groups below: both may
/// map its pages.
fn a_group_with_children_does_not_contract<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut line = vec![new_space(&memory, 4)];
    for _ in 0..6 {
        let child = line.last().unwrap().fork().unwrap();
        Program::new(&machine, &child).store(page(0), line.len() as u64).unwrap();
        child.discard(page(1), PAGE_SIZE).unwrap();
        line.push(child);
    }
    let last = line.pop().unwrap();
    // The child maps pages of the last group of its parent's line.
    let space = last.fork().unwrap();
    drop(last);
    let child = space.fork().unwrap();
    drop(line);
    space.discard(page(0), PAGE_SIZE).unwrap();
    let groups = anon_groups(&memory);
    let second = space.fork().unwrap();
    assert_eq!(anon_groups(&memory), groups + 1);
    assert_eq!(assert_walk(&child, page(0), 3).found, 1);
    audit(&machine, &memory, &[&space, &child, &second]);
    drop(space);
    drop(second);
    assert_eq!(assert_walk(&child, page(0), 1).found, 1);
    assert_eq!(Program::new(&machine, &child).load(page(0)), Ok(6));
    // Once only one child is left, the group contracts.
    let grandchild = child.fork().unwrap();
    drop(child);
    assert_eq!(anon_groups(&memory), 3, "the root, the child's, the grandchild's");
    assert_eq!(assert_walk(&grandchild, page(0), 1).found, 1);
    audit(&machine, &memory, &[&grandchild]);
}

/// A walker follows a page that all generations of a chain share while processes fork and exit.
fn a_walker_meets_a_chain_that_contracts<A: Walk>() {
    let config = Config { memory: 64 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let sister = new_space(&memory, 4);
    write(&sister, 2);
    let mut space = sister.fork().unwrap();
    let walks = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _finished = Finished(&over);
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                while !over.load(Relaxed) {
                    if let Some(walk) = walk_anonymous(&sister, page(0)) {
                        assert!(walk.found >= 1, "the sister maps it: {walk:?}");
                    }
                    walks.fetch_add(1, Relaxed);
                }
            });
        });
        machine.on_cpu(Cpu(0), || {
            let mut generations = 0;
            while generations < 200 || walks.load(Relaxed) < 200 {
                let child = space.fork().unwrap();
                child.fault(page(1), Access::Write).unwrap();
                space = child;
                generations += 1;
            }
        });
    });
    audit(&machine, &memory, &[&sister, &space]);
    // A walker that stopped in the middle of the family kept the family's groups. Without the
    // walker, the next generations remove them.
    for _ in 0..8 {
        let child = space.fork().unwrap();
        child.fault(page(1), Access::Write).unwrap();
        space = child;
    }
    audit(&machine, &memory, &[&sister, &space]);
    assert!(anon_groups(&memory) <= 12, "{} groups", anon_groups(&memory));
}

fn pages_without_permission_are_found_in_a_chain<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 4);
    write(&space, 4);
    space.mprotect(page(2), 2 * PAGE_SIZE, Protection::empty()).unwrap();
    for generation in 0..40 {
        space = next(space);
        space.fault(page(0), Access::Write).unwrap();
        if generation % 7 == 0 {
            // A page of this generation is `PROT_NONE`.
            space.mprotect(page(2), PAGE_SIZE, READ_WRITE).unwrap();
            space.fault(page(2), Access::Write).unwrap();
            space.mprotect(page(2), PAGE_SIZE, Protection::empty()).unwrap();
        }
        for number in 0..4 {
            assert_eq!(walk_anonymous(&space, page(number)).unwrap().found, 1);
        }
        audit(&machine, &memory, &[&space]);
    }
    assert!(anon_groups(&memory) <= 2 * 12, "{} groups", anon_groups(&memory));
}

fn parts_of_a_split_vma_contract_together<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 64);
    write(&space, 64);
    for generation in 0..40_u64 {
        space = next(space);
        // Only one group is inherited from the last generation, but every second page now has its
        // own VMA.
        if generation == 20 {
            for number in (0..64).step_by(2) {
                space.mprotect(page(number), PAGE_SIZE, Protection::READ).unwrap();
            }
        }
        space.fault(page(1 + 2 * (generation % 32)), Access::Write).unwrap();
        for number in [0, 1, 2 * (generation % 32), 63] {
            assert_eq!(walk_anonymous(&space, page(number)).unwrap().found, 1);
        }
        audit(&machine, &memory, &[&space]);
    }
    // After the next fork, the VMAs of one group have a group each.
    assert!(anon_groups(&memory) <= 64 * 12, "{} groups", anon_groups(&memory));
    // Both parts were one VMA with one group above, so a walk for its pages visits all of them.
    for number in 0..64 {
        assert_walk(&space, page(number), 64);
    }
}

fn several_vmas_of_one_group_are_all_surveyed<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 8);
    write(&space, 8);
    for _ in 0..5 {
        space = next(space);
    }
    // Five generations deep, and three VMAs of one group: the next fork contracts.
    space.mprotect(page(2), 3 * PAGE_SIZE, Protection::READ).unwrap();
    space.madvise(page(2), 3 * PAGE_SIZE, Advice::DontFork).unwrap();
    assert_eq!(anon_groups(&memory), 6);
    let child = space.fork().unwrap();
    let left = "the root, the parent's, and the child's two, one for each VMA";
    assert_eq!(anon_groups(&memory), 2 + 1 + 1, "{left}");
    audit(&machine, &memory, &[&space, &child]);
    for number in 0..8 {
        let walk = walk_anonymous(&space, page(number)).unwrap();
        assert_eq!(walk.found, walk.mappings, "page {number}");
    }
    drop(space);
    assert_eq!(anon_groups(&memory), 2 + 1 + 1, "{left}");
    audit(&machine, &memory, &[&child]);
}

fn pinned_pages_stay_found_across_generations<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 4);
    write(&space, 2);
    let mut pins = Vec::new();
    for generation in 0..24 {
        space = next(space);
        if generation % 5 == 0 {
            let pinned = space.pin(page(0), 1, Access::Write, PinTime::Long).unwrap();
            pins.push((pinned.first(), pinned));
        }
        assert_eq!(assert_walk(&space, page(0), 1).found, 1);
        audit(&machine, &memory, &[&space]);
    }
    assert_eq!(pins.len(), 5);
    drop(space);
    drop(pins);
    audit(&machine, &memory, &[]);
}

fn a_folio_that_is_locked_puts_the_contraction_off<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let mut space = new_space(&memory, 4);
    write(&space, 1);
    // The page belongs to the group of a generation in between.
    space = next(space);
    write(&space, 1);
    for _ in 0..4 {
        space = next(space);
    }
    let Inspection::Page { frame, .. } = space.inspect(page(0)) else { panic!("no page") };
    let groups = anon_groups(&memory);
    space = testing::with_folio_locked(&memory, frame, || {
        for _ in 0..5 {
            space = next(space);
        }
        space
    });
    assert_eq!(anon_groups(&memory), groups + 5, "nothing is contracted");
    audit(&machine, &memory, &[&space]);
    space = next(space);
    assert!(anon_groups(&memory) <= 3, "{} groups", anon_groups(&memory));
    assert_eq!(assert_walk(&space, page(0), 1).found, 1);
}

/// A fork that contracts runs out of memory at each allocation; the fork afterwards succeeds.
fn a_fork_that_contracts_may_run_out_of_memory<A: Walk>() {
    let mut failures = 0;
    for point in 0.. {
        let (machine, memory) = strict::<A>(64 * MIB);
        let frames = free(&memory);
        let mut space = new_space(&memory, 4);
        space.mmap(&fixed(page(8).0, PAGE_SIZE)).unwrap();
        Program::new(&machine, &space).store(page(0), 7).unwrap();
        space.fault(page(8), Access::Write).unwrap();
        for _ in 0..5 {
            space = next(space);
        }
        testing::fail_one_allocation(&memory, Some(point));
        let forked = space.fork();
        testing::fail_one_allocation(&memory, None);
        let reached = testing::failed_allocations(&memory) > 0;
        let spaces: Vec<_> = std::iter::once(&space).chain(&forked).collect();
        audit(&machine, &memory, &spaces);
        assert_walk(&space, page(0), 2);
        let child = match forked {
            Ok(child) => child,
            Err(error) => {
                assert_eq!(error, Error::OutOfMemory);
                failures += 1;
                space.fork().unwrap()
            }
        };
        assert_eq!(Program::new(&machine, &child).load(page(0)), Ok(7));
        assert_eq!(assert_walk(&child, page(0), 2).found, 2);
        audit(&machine, &memory, &[&space, &child]);
        drop(space);
        assert_eq!(anon_groups(&memory), 6, "the root, the parent's, the child's, of two VMAs");
        drop(child);
        audit(&machine, &memory, &[]);
        assert_eq!(free(&memory), frames, "frames have leaked");
        // A failed table allocation is retried, so not every failure is visible.
        if !reached {
            break;
        }
    }
    assert!(failures >= 6, "{failures}: root and state, and a group and a VMA for each of two");
}
