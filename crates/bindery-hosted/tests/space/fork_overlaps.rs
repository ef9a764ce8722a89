//! Families of processes whose generations overlap: each parent exits only after its child has
//! forked. These families leave nothing behind either (`fork_chains.rs` tests generations that do
//! not overlap).

use std::any::TypeId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;

use bindery::addr::PAGE_SIZE;
use bindery::platform::Cpu;
use bindery::testing::{self, anon_groups, walk_anonymous};
use bindery::{Access, Advice, Error, Protection};
use bindery_hosted::{Config, TlbKind, Walk};

use super::families::{Space, X, assert_walk, free, new_space, page, write};
use crate::support::kernel::Finished;
use crate::support::{MIB, READ_WRITE, audit, fixed, memory_with, strict};

on_every_architecture! {
    by_one => generations_that_overlap_by_one_take_constant_memory;
    by_three => generations_that_overlap_by_three_take_constant_memory;
    walks => walks_among_overlapping_generations_visit_who_can_map_the_page;
    not_forked => a_vma_that_no_child_gets_is_surveyed;
    inherited => an_idle_child_of_a_surveyed_parent_keeps_nothing;
    idle => a_child_that_never_forks_keeps_what_it_maps;
    out_of_memory => a_fork_of_overlapping_generations_may_run_out_of_memory;
    exits => overlapping_generations_exit_while_others_fork;
}

/// Overlapping generations: each exits after its child and `overlap - 1` further generations have
/// forked. Calls `each` for every new generation, and `then` with all living ones.
fn overlapping<'m, A: Walk>(
    first: Space<'m, A>,
    (overlap, generations): (usize, u32),
    each: impl Fn(u32, &Space<'m, A>),
    mut then: impl FnMut(u32, &VecDeque<Space<'m, A>>),
) -> VecDeque<Space<'m, A>> {
    let mut line = VecDeque::from([first]);
    for generation in 0..generations {
        let child = line.back().unwrap().fork().unwrap();
        each(generation, &child);
        line.push_back(child);
        if line.len() > overlap + 1 {
            line.pop_front();
        }
        then(generation, &line);
    }
    line
}

/// Many generations on one architecture, fewer on the others.
fn generations<A: Walk>() -> u32 {
    if TypeId::of::<A>() == TypeId::of::<X>() { 2_000 } else { 200 }
}

fn assert_overlapping<A: Walk>(overlap: usize) {
    let (machine, memory) =
        memory_with::<A>(Config { memory: 64 * MIB, tlb: TlbKind::Plain, ..Config::default() });
    let first = new_space(&memory, 8);
    write(&first, 8);
    // The lower half keeps the pages of the first or of a few generations.
    first.mprotect(page(2), 2 * PAGE_SIZE, Protection::empty()).unwrap();
    let all = generations::<A>();
    let mut early = 0;
    let line = overlapping(
        first,
        (overlap, all),
        |generation, child| {
            for (number, step) in [(5, 7), (6, 2), (7, 1)] {
                if generation % step == 0 {
                    child.fault(page(number), Access::Write).unwrap();
                }
            }
            if generation % 50 == 0 {
                child.mprotect(page(2), PAGE_SIZE, READ_WRITE).unwrap();
                child.fault(page(2), Access::Write).unwrap();
                child.mprotect(page(2), PAGE_SIZE, Protection::empty()).unwrap();
            }
        },
        |generation, line| {
            // Three VMAs: the upper part has had its own group since before the split.
            let groups = anon_groups(&memory);
            assert!(groups <= 3 * 40, "{groups} groups in generation {generation}");
            if generation == 100 {
                early = free(&memory);
            }
            if generation % (all / 20) < 12 {
                let alive = line.len() as u64;
                for number in 0..8 {
                    // The former parts of one VMA share one ancestor group.
                    let walk = walk_anonymous(line.back().unwrap(), page(number)).unwrap();
                    assert_eq!(walk.found, walk.mappings, "page {number}: {walk:?}");
                    assert!(walk.visited <= 3 * alive, "page {number}: {walk:?}");
                }
                audit(&machine, &memory, &line.iter().collect::<Vec<_>>());
            }
        },
    );
    let late = free(&memory);
    assert!(late + 16 >= early, "{} frames are lost", early - late);
    drop(line);
    audit(&machine, &memory, &[]);
    assert_eq!(anon_groups(&memory), 0);
}

fn generations_that_overlap_by_one_take_constant_memory<A: Walk>() {
    assert_overlapping::<A>(1);
}

fn generations_that_overlap_by_three_take_constant_memory<A: Walk>() {
    assert_overlapping::<A>(3);
}

/// With one VMA and pages of many generations, fewer than 40 groups exist, and a walk visits only
/// the VMAs that can map the page.
fn walks_among_overlapping_generations_visit_who_can_map_the_page<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    for overlap in [1, 3] {
        let first = new_space(&memory, 8);
        write(&first, 8);
        overlapping(
            first,
            (overlap, 60),
            |generation, child| {
                for (number, step) in [(1, 5), (2, 3), (3, 2), (4, 1)] {
                    if generation % step == 0 {
                        child.fault(page(number), Access::Write).unwrap();
                    }
                }
            },
            |generation, line| {
                assert!(anon_groups(&memory) < 40, "{} groups", anon_groups(&memory));
                let alive = line.len() as u64;
                for space in line {
                    for number in [0, 5] {
                        assert_eq!(assert_walk(space, page(number), alive).found, alive);
                    }
                    // The writer can map the page, as can younger generations that did not write
                    // it.
                    for number in 1..5 {
                        let walk = walk_anonymous(space, page(number)).unwrap();
                        assert_eq!(walk.found, walk.mappings, "{generation}: {walk:?}");
                        assert!(walk.visited <= alive, "{generation}: {walk:?}");
                    }
                }
                assert_eq!(assert_walk(line.back().unwrap(), page(4), 1).found, 1);
                audit(&machine, &memory, &line.iter().collect::<Vec<_>>());
            },
        );
    }
}

/// Of three VMAs of one group, a child inherits only two. All three are surveyed, because otherwise
/// the page that no child inherits would have a freed group as its owner.
fn a_vma_that_no_child_gets_is_surveyed<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let first = new_space(&memory, 8);
    write(&first, 8);
    let each = |generation, child: &Space<'_, A>| {
        if generation == 2 {
            write(child, 8);
        }
    };
    let mut line = overlapping(first, (6, 6), each, |_, _| ());
    let space = line.pop_back().unwrap();
    space.mprotect(page(4), 2 * PAGE_SIZE, Protection::READ).unwrap();
    space.madvise(page(4), 2 * PAGE_SIZE, Advice::DontFork).unwrap();
    line.clear();
    let child = space.fork().unwrap();
    audit(&machine, &memory, &[&space, &child]);
    for number in 0..8 {
        let walk = walk_anonymous(&space, page(number)).unwrap();
        assert_eq!(walk.found, walk.mappings, "page {number}");
    }
    drop(space);
    assert_eq!(anon_groups(&memory), 4, "the root, the parent's, and the child's two");
    audit(&machine, &memory, &[&child]);
}

/// A child that is forked by an already surveyed parent keeps no dead group.
fn an_idle_child_of_a_surveyed_parent_keeps_nothing<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let first = new_space(&memory, 4);
    let mut line = overlapping(first, (30, 30), |_, child| write(child, 1), |_, _| ());
    // The parent is alive and has not been surveyed.
    let parent = line.remove(line.len() - 2).unwrap();
    let space = line.pop_back().unwrap();
    line.clear();
    let idle = space.fork().unwrap();
    assert!(anon_groups(&memory) > 30, "the parent may have pages of all of them");
    drop(parent);
    let line = overlapping(space, (1, 20), |_, child| write(child, 1), |_, _| ());
    let spaces: Vec<_> = line.iter().chain([&idle]).collect();
    audit(&machine, &memory, &spaces);
    assert!(anon_groups(&memory) < 25, "{} groups", anon_groups(&memory));
}

/// A child that does not fork keeps the pages that it may map, until it exits.
fn a_child_that_never_forks_keeps_what_it_maps<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    let first = new_space(&memory, 4);
    write(&first, 4);
    let mut line = overlapping(first, (6, 6), |_, child| write(child, 2), |_, _| ());
    // The oldest five generations exit after the fork of the idle child, so the child may map their
    // pages.
    let idle = line.back().unwrap().fork().unwrap();
    let busy = line.back().unwrap().fork().unwrap();
    line.clear();
    let line = overlapping(
        busy,
        (1, 100),
        |_, child| write(child, 1),
        |_, line| {
            let spaces: Vec<_> = line.iter().chain([&idle]).collect();
            audit(&machine, &memory, &spaces);
            for number in 0..4 {
                let walk = walk_anonymous(&idle, page(number)).unwrap();
                assert_eq!(walk.found, walk.mappings, "page {number}: {walk:?}");
            }
        },
    );
    assert!(anon_groups(&memory) < 40, "{} groups", anon_groups(&memory));
    drop(line);
    // When the idle child forks, those groups are freed.
    let child = idle.fork().unwrap();
    audit(&machine, &memory, &[&idle, &child]);
    drop(idle);
    assert_eq!(anon_groups(&memory), 3, "the root, the idle one's, its child's");
    assert_walk(&child, page(1), 1);
}

/// A fork among overlapping generations runs out of memory at each allocation.
fn a_fork_of_overlapping_generations_may_run_out_of_memory<A: Walk>() {
    let (mut failures, mut contractions) = (0, 0);
    for point in 0.. {
        let (machine, memory) = strict::<A>(64 * MIB);
        let frames = free(&memory);
        let first = new_space(&memory, 4);
        first.mmap(&fixed(page(8).0, PAGE_SIZE)).unwrap();
        write(&first, 2);
        first.fault(page(8), Access::Write).unwrap();
        let mut line = overlapping(first, (1, 10), |_, child| write(child, 1), |_, _| ());
        let before = anon_groups(&memory);
        testing::fail_one_allocation(&memory, Some(point));
        let forked = line.back().unwrap().fork();
        testing::fail_one_allocation(&memory, None);
        let reached = testing::failed_allocations(&memory) > 0;
        let spaces: Vec<_> = line.iter().chain(&forked).collect();
        audit(&machine, &memory, &spaces);
        assert_walk(line.back().unwrap(), page(1), 3);
        let child = match forked {
            Ok(child) => child,
            Err(error) => {
                assert_eq!(error, Error::OutOfMemory);
                failures += 1;
                line.back().unwrap().fork().unwrap()
            }
        };
        // The child has two groups, and dead groups are freed at once because no reader exists.
        contractions += u64::from(anon_groups(&memory) < before + 2);
        assert_eq!(assert_walk(&child, page(1), 3).found, 3);
        line.push_back(child);
        audit(&machine, &memory, &line.iter().collect::<Vec<_>>());
        while line.len() > 1 {
            line.pop_front();
        }
        drop(line);
        audit(&machine, &memory, &[]);
        assert_eq!(free(&memory), frames, "frames have leaked");
        // A table allocation is retried if none was free at once: not every failure is visible.
        if !reached {
            break;
        }
    }
    assert!(failures >= 6, "{failures}: root and state, and a group and a VMA for each of two");
    assert!(contractions > failures, "{contractions}: the forks contract");
}

/// Overlapping generations on two CPUs, with a walker: while one CPU forks, a process on the other
/// exits.
fn overlapping_generations_exit_while_others_fork<A: Walk>() {
    let config = Config { memory: 64 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let sister = new_space(&memory, 4);
    write(&sister, 4);
    let over = AtomicBool::new(false);
    let line = thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<Space<'_, A>>(2);
        let _finished = Finished(&over);
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                while !over.load(Relaxed) {
                    if let Some(walk) = walk_anonymous(&sister, page(0)) {
                        assert!(walk.found >= 1, "the sister maps it: {walk:?}");
                    }
                    thread::yield_now();
                }
            });
        });
        let exits = || {
            machine.on_cpu(Cpu(2), || {
                for space in receive {
                    // This process forks too, so two surveys of a family may run concurrently.
                    let child = space.fork().unwrap();
                    child.fault(page(2), Access::Write).unwrap();
                    drop(space);
                    drop(child);
                }
            });
        };
        let exiting = scope.spawn(exits);
        let line = machine.on_cpu(Cpu(0), || {
            let mut line = VecDeque::from([sister.fork().unwrap()]);
            for generation in 0..300 {
                let child = line.back().unwrap().fork().unwrap();
                child.fault(page(1 + generation % 2), Access::Write).unwrap();
                line.push_back(child);
                if line.len() > 3 {
                    send.send(line.pop_front().unwrap()).unwrap();
                }
            }
            drop(send);
            line
        });
        exiting.join().unwrap();
        line
    });
    let spaces: Vec<_> = line.iter().chain([&sister]).collect();
    audit(&machine, &memory, &spaces);
    assert!(anon_groups(&memory) <= 60, "{} groups", anon_groups(&memory));
    drop(line);
    drop(sister);
    // Several CPUs were busy, so the core may not know that all have left their read sections.
    memory.drain_deferred();
    assert_eq!(anon_groups(&memory), 0);
}
