//! The protocol of the kernel's tables under loom: runs the code of [`super::protocol`] itself,
//! over modeled tables and TLBs. Loom explores every schedule of their accesses and every load
//! result that the memory model allows.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib loom_model`.
//!
//! # How a broken protocol shows
//! | failure | detected by |
//! |---|---|
//! | a table or frame is freed while in use | its life is a loom cell: each access reads it, freeing writes it |
//! | an access after the free | the life says `Freed` |
//! | a table is found before it is made | its life is written before: a race |
//! | a TLB uses a stale entry | each user of an address knows its frame |
//! | a TLB walks from a detached table | a live page faults |
//! | a TLB keeps an entry that a cut has replaced | after each execution, TLBs and tables are compared |
//! | a table leaks, or is lost with its contents | after each execution, lives and tree, areas and leaves are compared |
//! | a walker without a claim sees a hole | dumps check the pages that must be mapped |
//!
//! The last tests leave out one rule each ([`Omit`]) and must fail. The other tests also require
//! that loom reached the interesting point ([`Seen`]), so that no model passes without it.
//!
//! # Bounds
//! Two CPUs are explored completely, three with at most [`PREEMPTIONS`] preemptions in one
//! execution (not counting waits and exits). The hardware's walkers are strict: until an
//! invalidation, they cache every entry that they walked through, even speculatively. Frames are
//! never reused. Areas are in a plain list without guard pages, under a lock of the model. Not
//! modeled: the index and a purge's search for neighbors in it, entries cached as invalid (RISC-V),
//! detached tables with tables below them, and a purge in rounds.

mod cpu;
mod look_up;
mod world;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::vec::Vec;

use crate::sync::model::{self, thread};

use crate::addr::Frame;

use cpu::Cpu;
use world::{Omit, Seen, World, count, frame, pages};

const PREEMPTIONS: usize = 3;

/// Prepares the world before the CPUs run; each CPU calls it in turn.
type Setup = fn(&[Cpu]);

/// Explores all interleavings of the CPUs' operations, and audits the state after each execution.
fn explore<const N: usize>(omit: Omit, setup: Setup, work: [fn(&Cpu); N]) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let shared = Arc::clone(&seen);
    model::check((N > 2).then_some(PREEMPTIONS), move || {
        count(&shared.executions);
        let world = Rc::new(World::new(omit, N, &shared));
        let mut cpus: Vec<Cpu> = (0..N).map(|number| Cpu::new(&world, number)).collect();
        setup(&cpus);
        let others = cpus.drain(1..).zip(&work[1..]);
        let others: Vec<_> = others
            .map(|(cpu, work)| {
                let work = *work;
                thread::spawn(move || work(&cpu))
            })
            .collect();
        work[0](&cpus[0]);
        others.into_iter().for_each(|cpu| cpu.join().unwrap());
        world.audit();
    });
    std::println!("{} executions", seen.executions.load(Relaxed));
    seen
}

/// Explores the complete protocol, which must hold.
fn hold<const N: usize>(setup: Setup, work: [fn(&Cpu); N]) -> Arc<Seen> {
    explore(Omit::Nothing, setup, work)
}

/// An area at page 0 with frame 0, used by all CPUs.
fn one_area(cpus: &[Cpu]) {
    cpus[0].map(pages(0, 1), frame(0));
    cpus.iter().for_each(|cpu| cpu.access(0, frame(0)));
}

/// Two areas under one table, the second at page 1 with frame 1.
fn two_areas(cpus: &[Cpu]) {
    one_area(cpus);
    cpus[0].map(pages(1, 1), frame(1));
    cpus.iter().for_each(|cpu| cpu.access(1, frame(1)));
}

/// A huge leaf at pages 0 to 3, of frames 0 to 3.
fn huge_area(cpus: &[Cpu]) {
    cpus[0].map(pages(0, 4), frame(0));
    cpus.iter().for_each(|cpu| cpu.access(2, frame(2)));
}

/// A contiguous run of pages 0 and 1.
fn contig_area(cpus: &[Cpu]) {
    cpus[0].map(pages(0, 2), frame(0));
    cpus[0].fold(0);
    cpus.iter().for_each(|cpu| cpu.access(1, frame(1)));
}

fn unmap_and_purge(cpu: &Cpu) {
    cpu.unmap(pages(0, 1));
    cpu.purge();
}

/// Maps page `number` and accesses it.
fn use_page(cpu: &Cpu, number: u64, frame: Frame) {
    if cpu.map(pages(number, 1), frame) {
        assert_eq!(cpu.physical(number), Some(frame));
        cpu.access(number, frame);
    }
}

/// Dumps pages 0 to 7; each result must be in one of the lists.
fn dump(cpu: &Cpu, allowed: &[&[u32]]) {
    for (number, found) in cpu.dump(pages(0, 8)).into_iter().enumerate() {
        let Some(found) = found else { continue };
        let fits = |list: &&[u32]| list.get(number).is_some_and(|known| frame(*known) == found);
        assert!(allowed.iter().any(fits), "a dump found what was never mapped there");
    }
}

/// Dumps the first `count` pages, which are all mapped.
fn dump_whole(cpu: &Cpu, count: u32) {
    let whole: Vec<_> = (0..count).map(|number| Some(frame(number))).collect();
    assert_eq!(cpu.dump(pages(0, u64::from(count))), whole, "a hole in a live area");
}

// Installed tables.

#[test]
fn two_areas_missing_a_table_share_one() {
    let work: [fn(&Cpu); 2] = [|cpu| use_page(cpu, 0, frame(0)), |cpu| use_page(cpu, 1, frame(1))];
    let seen = hold(|_| {}, work);
    assert!(seen.lost.load(Relaxed) > 0);
    let seen = hold(|_| {}, [work[0], work[1], |cpu| use_page(cpu, 3, frame(3))]);
    assert!(seen.lost.load(Relaxed) > 0);
}

#[test]
fn two_areas_under_two_tables_never_meet() {
    let work: [fn(&Cpu); 2] = [|cpu| use_page(cpu, 0, frame(0)), |cpu| use_page(cpu, 4, frame(1))];
    let seen = hold(|_| {}, work);
    assert_eq!(seen.lost.load(Relaxed), 0);
}

#[test]
fn a_failed_map_leaves_its_neighbors_table() {
    hold(|_| {}, [|cpu| cpu.fail_to_map(pages(0, 1)), |cpu| use_page(cpu, 1, frame(1))]);
}

#[test]
fn a_dump_beside_a_map_sees_either() {
    hold(|_| {}, [|cpu| use_page(cpu, 1, frame(1)), |cpu| dump(cpu, &[&[0, 1]])]);
    hold(
        |_| {},
        [|cpu| assert!(cpu.map(pages(0, 4), frame(0))), |cpu| dump(cpu, &[&[0, 1, 2, 3]])],
    );
}

// Detached tables.

#[test]
fn a_map_beside_a_purge_keeps_its_table() {
    let seen = hold(one_area, [unmap_and_purge, |cpu| use_page(cpu, 1, frame(1))]);
    assert!(seen.waits.load(Relaxed) > 0);
}

#[test]
fn an_area_survives_its_neighbors_purge() {
    hold(
        two_areas,
        [unmap_and_purge, |cpu| {
            assert_eq!(cpu.physical(1), Some(frame(1)));
            cpu.access(1, frame(1));
        }],
    );
}

#[test]
fn two_freed_neighbors_free_their_table() {
    hold(
        two_areas,
        [unmap_and_purge, |cpu| {
            cpu.unmap(pages(1, 1));
            cpu.purge();
        }],
    );
}

#[test]
fn a_remapped_address_leads_to_the_new_area() {
    let seen = hold(one_area, [unmap_and_purge, |cpu| use_page(cpu, 0, frame(1))]);
    assert!(seen.refusals.load(Relaxed) > 0);
}

#[test]
fn a_guessing_cpu_never_touches_freed_memory() {
    hold(one_area, [unmap_and_purge, |cpu| cpu.guess(0)]);
    hold(
        one_area,
        [unmap_and_purge, |cpu| {
            cpu.guess(1);
            use_page(cpu, 0, frame(1));
        }],
    );
}

#[test]
fn a_dump_never_meets_a_freed_table() {
    let seen = hold(one_area, [unmap_and_purge, |cpu| dump(cpu, &[&[0]])]);
    assert!(seen.absences.load(Relaxed) > 0);
}

#[test]
fn a_huge_leaf_replaces_a_dumped_table() {
    let replace = |cpu: &Cpu| {
        unmap_and_purge(cpu);
        assert!(cpu.map(pages(0, 4), frame(4)));
        cpu.access(0, frame(4));
    };
    let seen = hold(one_area, [replace, |cpu| dump(cpu, &[&[0], &[4, 5, 6, 7]])]);
    assert!(seen.absences.load(Relaxed) > 0);
}

#[test]
fn purge_map_and_dump_agree_on_three_cpus() {
    let work: [fn(&Cpu); 3] =
        [unmap_and_purge, |cpu| use_page(cpu, 1, frame(1)), |cpu| dump(cpu, &[&[0, 1]])];
    let seen = hold(one_area, work);
    assert!(seen.waits.load(Relaxed) > 0 && seen.lost.load(Relaxed) == 0);
}

#[test]
#[cfg_attr(shuttle, ignore = "random schedules do not reach the point")]
fn two_maps_beside_a_purge_share_a_table() {
    let work: [fn(&Cpu); 3] =
        [unmap_and_purge, |cpu| use_page(cpu, 1, frame(1)), |cpu| use_page(cpu, 2, frame(2))];
    let seen = hold(one_area, work);
    assert!(seen.waits.load(Relaxed) > 0 && seen.lost.load(Relaxed) > 0);
}

// Cuts.

#[test]
fn lookups_never_miss_what_a_cut_pauses() {
    let seen =
        hold(huge_area, [|cpu| cpu.cut(1), |cpu| assert_eq!(cpu.physical(2), Some(frame(2)))]);
    assert!(seen.pauses.load(Relaxed) > 0);
    let seen = hold(
        contig_area,
        [|cpu| cpu.cut_contig(0), |cpu| assert_eq!(cpu.physical(1), Some(frame(1)))],
    );
    assert!(seen.pauses.load(Relaxed) > 0);
}

#[test]
#[cfg_attr(shuttle, ignore = "random schedules do not reach the point")]
fn accesses_wait_while_a_cut_pauses_them() {
    let seen = hold(huge_area, [|cpu| cpu.cut(1), |cpu| cpu.access_paused(2, frame(2))]);
    assert!(seen.pauses.load(Relaxed) > 0);
    let seen = hold(
        huge_area,
        [
            |cpu| cpu.cut(1),
            |cpu| {
                cpu.access_paused(1, frame(1));
                cpu.access_paused(1, frame(1));
            },
        ],
    );
    assert!(seen.pauses.load(Relaxed) > 0);
    let seen = hold(contig_area, [|cpu| cpu.cut_contig(0), |cpu| cpu.access_paused(0, frame(0))]);
    assert!(seen.pauses.load(Relaxed) > 0);
}

#[test]
fn a_dump_sees_no_hole_during_a_cut() {
    let seen = hold(huge_area, [|cpu| cpu.cut(1), |cpu| dump_whole(cpu, 4)]);
    assert!(seen.pauses.load(Relaxed) > 0);
    let seen = hold(contig_area, [|cpu| cpu.cut_contig(0), |cpu| dump_whole(cpu, 2)]);
    assert!(seen.pauses.load(Relaxed) > 0);
}

#[test]
fn cut_access_and_dump_agree_on_three_cpus() {
    let work: [fn(&Cpu); 3] =
        [|cpu| cpu.cut(1), |cpu| cpu.access_paused(2, frame(2)), |cpu| dump_whole(cpu, 4)];
    let seen = hold(huge_area, work);
    assert!(seen.pauses.load(Relaxed) > 0);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_waiting_for_readers_a_dump_loses() {
    explore(Omit::Readers, one_area, [unmap_and_purge, |cpu| dump(cpu, &[&[0]])]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "reached what another area had mapped")]
fn addresses_freed_before_the_flush_are_misused() {
    let work: [fn(&Cpu); 2] = [unmap_and_purge, |cpu| use_page(cpu, 0, frame(1))];
    explore(Omit::FlushBeforeAddresses, one_area, work);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn frames_freed_before_the_flush_are_touched() {
    explore(Omit::FlushBeforeFree, one_area, [unmap_and_purge, |cpu| cpu.guess(0)]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a live page faulted")]
fn a_table_made_before_the_flush_is_missed() {
    let work: [fn(&Cpu); 2] = [unmap_and_purge, |cpu| use_page(cpu, 1, frame(1))];
    explore(Omit::WaitForFlush, one_area, work);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn a_table_installed_without_release_is_half_made() {
    let work: [fn(&Cpu); 2] = [|cpu| use_page(cpu, 0, frame(0)), |cpu| use_page(cpu, 1, frame(1))];
    explore(Omit::Release, |_| {}, work);
}

#[test]
#[should_panic]
fn a_table_installed_by_store_loses_another() {
    let work: [fn(&Cpu); 2] = [|cpu| use_page(cpu, 0, frame(0)), |cpu| use_page(cpu, 1, frame(1))];
    explore(Omit::Exchange, |_| {}, work);
}

#[test]
#[should_panic(expected = "assertion `left == right` failed")]
fn detaching_a_used_table_breaks_an_area() {
    let work: [fn(&Cpu); 2] = [unmap_and_purge, |cpu| assert_eq!(cpu.physical(1), Some(frame(1)))];
    explore(Omit::AskWhetherFree, two_areas, work);
}

#[test]
#[should_panic]
fn emptying_an_empty_entry_loses_a_table() {
    let work: [fn(&Cpu); 2] =
        [|cpu| cpu.fail_to_map(pages(0, 1)), |cpu| use_page(cpu, 1, frame(1))];
    explore(Omit::LeaveEmpty, |_| {}, work);
}

#[test]
#[should_panic(expected = "a hole in a live area")]
fn a_second_look_finds_a_cuts_hole() {
    explore(Omit::OneLook, huge_area, [|cpu| cpu.cut(1), |cpu| dump_whole(cpu, 4)]);
}

#[test]
#[should_panic(expected = "a hole in a live area")]
fn pausing_by_emptying_shows_dumps_a_hole() {
    explore(Omit::KeepBits, huge_area, [|cpu| cpu.cut(1), |cpu| dump_whole(cpu, 4)]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a hole in a live area")]
fn pausing_by_emptying_lets_accesses_fail() {
    explore(Omit::KeepBits, huge_area, [|cpu| cpu.cut(1), |cpu| cpu.access_paused(2, frame(2))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a TLB remembers what was replaced")]
fn a_cut_without_pause_leaves_a_stale_leaf() {
    explore(Omit::Pause, huge_area, [|cpu| cpu.cut(1), |cpu| cpu.access_paused(2, frame(2))]);
}
