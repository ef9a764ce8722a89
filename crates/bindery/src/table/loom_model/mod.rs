//! The locking protocol under loom: the actual code of [`super::locking`], applied to a tree. Loom
//! schedules the tree's locks, entries and read sections in every order, and answers its loads with
//! every value that the memory model allows.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib loom_model`.
//!
//! # How a broken protocol shows
//! | failure | detected by |
//! |---|---|
//! | two operations in one table | the contents are a loom cell: a race without a common lock |
//! | a table is freed while in use | its life is a loom cell: accesses read it, freeing writes it |
//! | an access after the free | the life reads `Freed` |
//! | a write into a stray table | each visit checks for itself, whatever `is_stray` returns |
//! | a write under an old address | the place is a loom cell: moves write it, visits read it |
//! | a deadlock | all CPUs sleep, and loom reports "deadlock" |
//! | an operation gets lost | the visits of each execution are counted |
//! | a call returns before a TLB has forgotten what it revoked | each call checks the model's TLB |
//! | a table leaks, or is freed twice | each execution ends by comparing live tables to the tree |
//!
//! The last tests omit one rule each ([`Omit`]) and must fail. The other tests also require that
//! loom reached the interesting point ([`Seen`]), so no model passes without reaching it.
//!
//! # Bounds
//! Two CPUs are explored completely, three with at most [`PREEMPTIONS`] preemptions per execution
//! (sleeping and ending do not count). Each CPU performs one operation. Frames are never reused, so
//! every late access is detected.

mod cpu;
mod flush;
mod world;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::vec::Vec;

use crate::sync::model::{self, thread};

use crate::arch::Level;

use cpu::Cpu;
use world::{Omit, Seen, World, pages};

const PREEMPTIONS: usize = 3;

/// Explores the effects of the operations of several CPUs on each other; `check` inspects the
/// result of each execution.
fn explore<const N: usize>(
    omit: Omit,
    work: [fn(&Cpu); N],
    check: impl Fn(&World) + Send + Sync + 'static,
) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let shared = Arc::clone(&seen);
    model::check((N > 2).then_some(PREEMPTIONS), move || {
        let world = Rc::new(World::new(omit, &shared));
        let mut others = Vec::new();
        for (number, work) in work.into_iter().enumerate().skip(1) {
            let cpu = Cpu::new(&world, number);
            others.push(thread::spawn(move || work(&cpu)));
        }
        work[0](&Cpu::new(&world, 0));
        others.into_iter().for_each(|cpu| cpu.join().unwrap());
        world.audit();
        check(&world);
    });
    seen
}

/// Explores the whole protocol. Each execution leaves `visits` visits.
fn hold<const N: usize>(work: [fn(&Cpu); N], visits: u32) -> Arc<Seen> {
    explore(Omit::Nothing, work, move |world| assert_eq!(world.visits(), visits))
}

/// Explores the protocol without one of its rules.
fn without<const N: usize>(omit: Omit, work: [fn(&Cpu); N]) {
    explore(omit, work, |_| {});
}

// One table, and adjacent tables.

#[test]
fn operations_in_one_table_exclude_each_other() {
    let seen = hold([|cpu| cpu.operate(pages(0, 1)), |cpu| cpu.operate(pages(1, 1))], 2);
    assert!(seen.waits.load(Relaxed) > 0);
}

#[test]
fn an_operation_on_a_table_excludes_direct_ones() {
    let seen = hold([|cpu| cpu.operate(pages(0, 4)), |cpu| cpu.operate(pages(1, 2))], 4);
    assert!(seen.waits.load(Relaxed) > 0);
}

#[test]
fn operations_in_sister_tables_never_wait() {
    let seen = hold([|cpu| cpu.operate(pages(0, 2)), |cpu| cpu.operate(pages(4, 2))], 4);
    assert_eq!(seen.waits.load(Relaxed), 0);
}

#[test]
fn operations_in_several_tables_never_deadlock() {
    let seen = hold(
        [
            |cpu| cpu.operate(pages(3, 2)),
            |cpu| cpu.operate(pages(4, 1)),
            |cpu| cpu.operate(pages(2, 3)),
        ],
        5,
    );
    assert!(seen.waits.load(Relaxed) > 0);
}

#[test]
fn an_operation_holds_tables_of_every_level() {
    for work in [
        [(|cpu| cpu.operate(pages(7, 14))) as fn(&Cpu), |cpu| cpu.operate(pages(4, 1))],
        [|cpu| cpu.operate(pages(7, 14)), |cpu| cpu.operate(pages(22, 1))],
    ] {
        let seen = hold(work, 3);
        assert!(seen.waits.load(Relaxed) > 0);
    }
}

// Tables that are detached.

#[test]
fn an_operation_whose_table_is_detached_starts_again() {
    let seen = hold([|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.zap(pages(0, 4))], 1);
    assert!(seen.restarts.load(Relaxed) > 0);
}

#[test]
fn an_operation_restarts_after_a_higher_detach() {
    let seen = hold([|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.zap(pages(0, 16))], 1);
    assert!(seen.restarts.load(Relaxed) > 0);
}

#[test]
fn two_operations_meet_in_the_new_table() {
    let seen = explore(
        Omit::Nothing,
        [
            |cpu| cpu.operate(pages(1, 1)),
            |cpu| cpu.zap(pages(0, 4)),
            |cpu| cpu.operate(pages(2, 1)),
        ],
        |world| assert!(world.visits() == 2 && world.tables_made() <= 1),
    );
    assert!(seen.restarts.load(Relaxed) > 0);
}

#[test]
fn a_lockless_lookup_meets_no_freed_table() {
    explore(Omit::Nothing, [|cpu| cpu.peek(1), |cpu| cpu.zap(pages(0, 16))], |_| {});
    hold([|cpu| cpu.peek(1), |cpu| cpu.zap(pages(0, 4)), |cpu| cpu.operate(pages(2, 1))], 1);
}

#[test]
fn a_table_detached_twice_is_freed_once() {
    hold([|cpu| cpu.zap(pages(0, 4)), |cpu| cpu.zap(pages(0, 16))], 0);
}

#[test]
fn pruning_an_empty_table_loses_no_operation() {
    // Only X is detached; Z is detached together with RIGHT; X and two operations.
    let seen =
        explore(Omit::Nothing, [|cpu| cpu.prune(0), |cpu| cpu.operate(pages(1, 1))], |world| {
            assert_eq!(world.visits_at(1), 1)
        });
    assert!(seen.restarts.load(Relaxed) > 0);
    let seen =
        explore(Omit::Nothing, [|cpu| cpu.prune(20), |cpu| cpu.operate(pages(21, 1))], |world| {
            assert_eq!(world.visits_at(21), 1)
        });
    assert!(seen.restarts.load(Relaxed) > 0);
    explore(
        Omit::Nothing,
        [|cpu| cpu.prune(0), |cpu| cpu.operate(pages(1, 1)), |cpu| cpu.operate(pages(3, 2))],
        |world| assert_eq!((world.visits_at(1), world.visits_at(3), world.visits_at(4)), (1, 1, 1)),
    );
}

#[test]
fn unmapping_to_a_table_meets_both_sides() {
    let seen = hold(
        [
            |cpu| cpu.zap(pages(0, 5)),
            |cpu| cpu.operate(pages(1, 1)),
            |cpu| cpu.operate(pages(3, 2)),
        ],
        4,
    );
    assert!(seen.restarts.load(Relaxed) > 0);
}

// Tables that are created.

#[test]
fn a_table_is_created_once_for_both() {
    let seen = explore(
        Omit::Nothing,
        [|cpu| cpu.operate(pages(9, 1)), |cpu| cpu.operate(pages(10, 1))],
        |world| assert_eq!((world.visits(), world.tables_made()), (2, 1)),
    );
    assert!(seen.waits.load(Relaxed) > 0);
}

#[test]
fn tables_on_two_levels_are_created_once() {
    explore(
        Omit::Nothing,
        [|cpu| cpu.operate(pages(33, 1)), |cpu| cpu.operate(pages(34, 1))],
        |world| assert_eq!((world.visits(), world.tables_made()), (2, 2)),
    );
    explore(
        Omit::Nothing,
        [|cpu| cpu.operate(pages(33, 1)), |cpu| cpu.operate(pages(38, 1))],
        |world| assert_eq!((world.visits(), world.tables_made()), (2, 3)),
    );
}

#[test]
fn a_table_created_below_a_detached_is_freed() {
    let seen = hold([|cpu| cpu.operate(pages(9, 1)), |cpu| cpu.zap(pages(0, 16))], 1);
    assert!(seen.restarts.load(Relaxed) > 0);
}

// Moves of pages.

#[test]
fn moves_in_any_directions_never_deadlock() {
    for work in [
        // Under one parent, in one direction and in both; then under two parents.
        [(|cpu| cpu.transfer(1, 5, 1)) as fn(&Cpu), |cpu| cpu.transfer(2, 6, 1)],
        [|cpu| cpu.transfer(1, 5, 1), |cpu| cpu.transfer(6, 2, 1)],
        [|cpu| cpu.transfer(21, 1, 1), |cpu| cpu.transfer(2, 22, 1)],
    ] {
        let seen = hold(work, 4);
        assert!(seen.waits.load(Relaxed) > 0);
    }
}

#[test]
fn three_moves_in_a_ring_never_deadlock() {
    let seen = hold(
        [|cpu| cpu.transfer(1, 5, 1), |cpu| cpu.transfer(6, 21, 1), |cpu| cpu.transfer(22, 2, 1)],
        6,
    );
    assert!(seen.waits.load(Relaxed) > 0);
}

#[test]
fn a_move_within_a_table_locks_once() {
    // Moves within X; from X and Y to Y; from Y to Y and beyond.
    for work in [
        [(|cpu| cpu.transfer(3, 0, 1)) as fn(&Cpu), |cpu| cpu.operate(pages(1, 1))],
        [|cpu| cpu.transfer(2, 5, 3), |cpu| cpu.operate(pages(1, 1))],
        [|cpu| cpu.transfer(4, 7, 3), |cpu| cpu.operate(pages(5, 1))],
    ] {
        let seen = hold(work, 3);
        assert!(seen.waits.load(Relaxed) > 0);
    }
}

#[test]
fn a_move_across_tables_holds_those_below() {
    for work in [
        [(|cpu| cpu.transfer(2, 20, 3)) as fn(&Cpu), |cpu| cpu.operate(pages(1, 1))],
        [|cpu| cpu.transfer(22, 0, 3), |cpu| cpu.operate(pages(21, 1))],
    ] {
        let seen = hold(work, 3);
        assert!(seen.waits.load(Relaxed) > 0);
    }
}

#[test]
fn a_move_without_target_table_meets_its_source() {
    // One range's cover is above the other's: that of the higher range, that of the lower range,
    // and by two levels.
    for work in [
        [(|cpu| cpu.transfer(1, 9, 1)) as fn(&Cpu), |cpu| cpu.operate(pages(2, 1))],
        [|cpu| cpu.transfer(21, 17, 1), |cpu| cpu.operate(pages(22, 1))],
        [|cpu| cpu.transfer(1, 33, 1), |cpu| cpu.operate(pages(2, 1))],
    ] {
        let seen = hold(work, 3);
        assert!(seen.waits.load(Relaxed) > 0);
    }
}

#[test]
fn a_move_meets_others_in_its_new_table() {
    explore(
        Omit::Nothing,
        [|cpu| cpu.transfer(1, 9, 1), |cpu| cpu.operate(pages(10, 2))],
        |world| assert_eq!((world.visits(), world.tables_made()), (4, 1)),
    );
    explore(
        Omit::Nothing,
        [
            |cpu| cpu.transfer(1, 9, 1),
            |cpu| cpu.transfer(10, 2, 1),
            |cpu| cpu.operate(pages(11, 1)),
        ],
        |world| assert_eq!((world.visits(), world.tables_made()), (5, 1)),
    );
}

#[test]
fn a_move_with_a_detached_end_restarts() {
    for work in [
        [(|cpu| cpu.transfer(1, 5, 1)) as fn(&Cpu), |cpu| cpu.zap(pages(4, 4))],
        [|cpu| cpu.transfer(1, 5, 1), |cpu| cpu.zap(pages(0, 4))],
    ] {
        let seen = hold(work, 2);
        assert!(seen.restarts.load(Relaxed) > 0);
    }
}

#[test]
fn a_move_detaches_emptied_tables_under_locks() {
    let seen = hold([|cpu| cpu.empty(pages(0, 4), 5), |cpu| cpu.operate(pages(1, 1))], 2);
    assert!(seen.restarts.load(Relaxed) > 0);
    for work in [
        [(|cpu| cpu.empty(pages(0, 4), 5)) as fn(&Cpu), |cpu| cpu.transfer(6, 2, 1)],
        [|cpu| cpu.empty(pages(0, 16), 21), |cpu| cpu.transfer(22, 6, 1)],
    ] {
        let seen = hold(work, 3);
        assert!(seen.restarts.load(Relaxed) > 0);
    }
}

// The VMA's lock: moves of whole tables, and unmapping beside tables that stay.

#[test]
fn a_fault_never_writes_a_moved_tables_source() {
    let seen = explore(
        Omit::Nothing,
        [|cpu| cpu.fault(1), |cpu| cpu.move_table(pages(0, 4), pages(8, 4), Level::PMD)],
        |world| assert_eq!((world.visits_at(1), world.visits_at(9)), (0, world.visits())),
    );
    assert!(seen.refusals.load(Relaxed) > 0);
}

#[test]
fn a_fault_never_writes_below_a_moved_table() {
    let seen = explore(
        Omit::Nothing,
        [|cpu| cpu.fault(1), |cpu| cpu.move_table(pages(0, 16), pages(32, 16), Level::PUD)],
        |world| assert_eq!((world.visits_at(1), world.visits_at(33)), (0, world.visits())),
    );
    assert!(seen.refusals.load(Relaxed) > 0);
}

#[test]
fn faults_around_a_tables_move_meet_inside() {
    let seen = explore(
        Omit::Nothing,
        [
            |cpu| cpu.fault(1),
            |cpu| cpu.move_table(pages(0, 4), pages(16, 4), Level::PMD),
            |cpu| cpu.fault(18),
        ],
        |world| {
            assert_eq!(world.visits_at(1), 0);
            assert_eq!(world.visits_at(17) + world.visits_at(18), world.visits());
        },
    );
    assert!(seen.refusals.load(Relaxed) > 0);
}

#[test]
fn neighbors_of_a_moved_table_work_on() {
    hold(
        [
            |cpu| cpu.operate(pages(4, 1)),
            |cpu| cpu.move_table(pages(0, 4), pages(12, 4), Level::PMD),
            |cpu| cpu.operate(pages(7, 2)),
        ],
        3,
    );
}

#[test]
fn unmapping_to_a_table_excludes_moves() {
    let seen = explore(
        Omit::Nothing,
        [|cpu| cpu.with_vma(1, || cpu.transfer(1, 5, 1)), |cpu| cpu.unmap(pages(0, 5))],
        |world| assert!(matches!(world.visits(), 1 | 3)),
    );
    assert!(seen.refusals.load(Relaxed) > 0);
}

// Each rule is needed: without it, one of the models above fails.

#[test]
#[should_panic(expected = "wrote into a stray table")]
fn ignoring_the_mark_writes_a_stray_table() {
    // A move, because an operation on one range would miss the table when it descends again.
    without(Omit::StrayCheck, [|cpu| cpu.transfer(1, 5, 1), |cpu| cpu.zap(pages(0, 4))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "wrote into a stray table")]
fn marking_only_the_top_lets_writes_through() {
    without(Omit::StrayBelow, [|cpu| cpu.transfer(1, 5, 1), |cpu| cpu.zap(pages(0, 16))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "ausality violation")]
fn dropping_without_waiting_races_an_operation() {
    without(Omit::WaitBelow, [|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.zap(pages(0, 16))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_waiting_for_readers_operations_lose_tables() {
    without(Omit::Readers, [|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.zap(pages(0, 4))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_waiting_for_readers_lookups_lose_tables() {
    without(Omit::Readers, [|cpu| cpu.peek(1), |cpu| cpu.zap(pages(0, 4))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn keeping_a_table_across_sections_finds_it_freed() {
    without(Omit::OneSection, [|cpu| cpu.peek(1), |cpu| cpu.prune(0)]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn locking_source_then_target_deadlocks() {
    without(Omit::OnePass, [|cpu| cpu.transfer(1, 5, 1), |cpu| cpu.transfer(6, 2, 1)]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn moving_without_the_vma_lock_races_faults() {
    without(
        Omit::VmaLock,
        [|cpu| cpu.fault(1), |cpu| cpu.move_table(pages(0, 4), pages(8, 4), Level::PMD)],
    );
}

/// Marking acquires locks out of order, namely of tables before an edge that is already held.
/// 1. CPU A, unmapping pages 0 to 4, locks LEFT and, as its edge, Y;
/// 2. CPU B, moving page 1 to 5, locks X and waits for Y;
/// 3. CPU A detaches X, and waits for CPU B in order to mark X.
///
/// An operation on one range cannot cause this, because it would have to hold LEFT.
#[test]
#[should_panic(expected = "deadlock")]
fn unmapping_without_the_vma_lock_deadlocks() {
    without(
        Omit::VmaLock,
        [|cpu| cpu.with_vma(1, || cpu.transfer(1, 5, 1)), |cpu| cpu.unmap(pages(0, 5))],
    );
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn installing_a_table_unlocked_meets_others() {
    without(Omit::LockedBirth, [|cpu| cpu.operate(pages(9, 1)), |cpu| cpu.operate(pages(10, 1))]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn a_table_installed_without_release_is_half_made() {
    without(Omit::Release, [|cpu| cpu.operate(pages(9, 1)), |cpu| cpu.operate(pages(10, 1))]);
}
