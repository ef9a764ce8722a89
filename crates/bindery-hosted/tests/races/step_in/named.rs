//! Combinations that once failed or that guard one rule, each in its own test. The first call is
//! held at each of its steps in turn, so the tests stay valid if the core's flushes and locks move.

use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery_hosted::Walk;

use super::operations::{Operation, operations};
use super::run::{At, Outcome, Verdict, run};
use super::stops::Step;

fn operation<A: Walk>(name: &str) -> Operation<A> {
    operations().into_iter().find(|operation| operation.name == name).unwrap()
}

/// Whether the second call must be able to return while the first is held.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    Sometimes,
    MayAlways,
}

/// Holds `held` at each of its steps, runs `stepped_in`, and panics with the problems.
fn meet<A: Walk>(held: &str, stepped_in: &str, folio_order: u8, waits: Waits) {
    let (a, b) = (operation::<A>(held), operation::<A>(stepped_in));
    let steps = run(&a, &b, At::Nowhere, folio_order).steps;
    let places = (0..steps).map(At::Step).chain([At::Contended]);
    let outcomes: Vec<_> = places.map(|at| (at, run(&a, &b, at, folio_order))).collect();
    let audited =
        outcomes.iter().filter(|(_, outcome)| outcome.verdict == Verdict::Audited).count();
    let wrong: Vec<_> =
        outcomes.iter().filter(|(_, outcome)| !outcome.problems.is_empty()).collect();
    let name = A::NAME;
    println!("{name}: {held} held at {steps} steps, {stepped_in} meanwhile: {audited} audited");
    for (at, Outcome { step, problems, .. }) in &wrong {
        println!("  {at:?} ({step:?}): {problems:#?}");
    }
    assert!(wrong.is_empty(), "{name}: wrong at {} steps of {held}", wrong.len());
    assert!(waits == Waits::MayAlways || audited > 0, "{stepped_in} never returned");
}

fn meet_everywhere(held: &str, stepped_in: &str) {
    meet::<X86_64<4>>(held, stepped_in, 0, Waits::Sometimes);
    meet::<AArch64>(held, stepped_in, 4, Waits::Sometimes);
    meet::<Riscv64<3>>(held, stepped_in, 0, Waits::Sometimes);
}

/// 1. A truncation checks which whole tables it may detach, before it locks them;
/// 2. a guard is installed in one of them, and the call returns;
/// 3. the truncation detaches the table, and the guard with it.
#[test]
fn a_guard_installed_during_a_truncation_stays() {
    meet_everywhere("truncate", "guard install in file");
}

/// 1. A truncation has detached a table and released its locks but not flushed yet;
/// 2. a guard is installed at its addresses, which needs a new table in place of the old one;
/// 3. a TLB still walks the old table.
#[test]
fn no_table_replaces_another_before_its_flush() {
    meet::<AArch64>("truncate", "guard install in file", 0, Waits::Sometimes);
    meet::<AArch64>("truncate", "guard install in file", 4, Waits::Sometimes);
}

/// 1. `write_user(X)` has found X's table and waits for its lock;
/// 2. `mremap` moves the table to Y and returns;
/// 3. `write_user` acquires the lock and writes to Y.
#[test]
fn a_late_write_user_never_reaches_the_target() {
    for held in ["write_user to anon", "write_user to file"] {
        for moved in ["move anon, congruent", "move anon", "move file, congruent", "move file"] {
            meet::<X86_64<4>>(held, moved, 0, Waits::MayAlways);
            meet::<AArch64>(held, moved, 4, Waits::MayAlways);
        }
    }
    // The remaining steps depend on a wait for a table lock.
    let (a, b) = (operation::<X86_64<4>>("write_user to anon"), operation("move anon, congruent"));
    let outcome = run(&a, &b, At::Contended, 0);
    assert_eq!(outcome.step, Some(Step::Relax), "it met no lock: {outcome:?}");
}

/// 1. A sync has write-protected the entry and released the lock but has not flushed;
/// 2. `mprotect` finds an entry that is narrow enough, flushes nothing, and returns;
/// 3. another CPU stores through its TLB.
#[test]
fn no_store_succeeds_after_mprotect_read_beside_sync() {
    meet_everywhere("sync", "mprotect read");
}

/// As with a sync, but the entries were removed, so `mprotect` finds none.
#[test]
fn no_store_succeeds_after_mprotect_none_beside_punch() {
    for hole in ["punch", "punch all"] {
        meet_everywhere(hole, "mprotect none");
        meet_everywhere(hole, "mprotect none, one table");
    }
}

/// 1. A write fault has found the VMA and the entry, shared or empty;
/// 2. `munmap` removes the mapping and returns;
/// 3. the fault maps a page where no VMA is.
#[test]
fn no_write_fault_maps_a_page_after_munmap() {
    meet_everywhere("fault private, write", "munmap all");
    meet_everywhere("fault anon, write", "munmap anon");
    meet_everywhere("fault file, write", "munmap part");
}
