//! Folios under loom: the code of [`super::count`], [`super::reference`] and [`super::lock`]
//! itself, over a few frames. Loom explores every value of their metadata that the memory model
//! allows.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib loom_model`.
//!
//! # How a broken protocol shows
//! | failure | detected by |
//! |---|---|
//! | a walker holds a frame that is no folio, or another folio | the use of a frame is a loom cell: its holder reads it, making and freeing write it |
//! | a folio is freed under a holder | the same cell: an unordered access is a race |
//! | an owner changes under a reader | the owner is a loom cell too |
//! | a late reference or lock hits a table or a slab | their counts and states are audited |
//! | an owner dangles, a folio leaks, a reference gets lost | audited at the end |
//!
//! The last tests leave out one rule each ([`Omit`]) and must fail. The other tests also require
//! that loom reached the interesting point ([`Seen`]), so that no model passes without it.
//!
//! Two CPUs are explored completely, three with at most [`PREEMPTIONS`] preemptions.

mod hand_over;
mod world;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::sync::model;

use super::count::{self, MAPPING};
use super::handle::Folio;
use super::reference::Heads;
use crate::addr::{Frame, Order};

use world::{FIRST, Omit, Seen, World};

const PREEMPTIONS: usize = 3;

type Work = fn(&World);

fn explore<const N: usize>(omit: Omit, prepare: Work, work: [Work; N]) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let shared = Arc::clone(&seen);
    model::check((N > 2).then_some(PREEMPTIONS), move || {
        let world = World::new(omit, &shared);
        prepare(&world);
        model::beside(&world, work.into_iter().skip(1), work[0]);
        world.audit();
    });
    seen
}

fn hold<const N: usize>(prepare: Work, work: [Work; N]) -> Arc<Seen> {
    explore(Omit::Nothing, prepare, work)
}

/// The protocol without one rule.
fn without<const N: usize>(omit: Omit, prepare: Work, work: [Work; N]) {
    explore(omit, prepare, work);
}

const PAGE: Folio = Folio::of(Frame(0), Order::PAGE);

fn nothing(_: &World) {}

fn pinned(world: &World) {
    assert!(count::pin(world.count(FIRST.head), count::PinRoom::All));
}

fn walk(world: &World) {
    world.walk(Frame(1), |folio| world.check(folio));
}

fn walk_to_head(world: &World) {
    world.walk(Frame(0), |folio| world.check(folio));
}

/// Reads the owner under the lock, like a walker that follows the owner.
fn read_owner(world: &World) {
    world.walk(Frame(1), |folio| {
        world.with_lock(folio, || {
            world.owner(folio);
        });
    });
}

/// As [`read_owner`], asleep until the lock is free.
fn wait_to_read_owner(world: &World) {
    world.walk(Frame(1), |folio| {
        world.wait_for_lock(folio, || {
            world.owner(folio);
        });
    });
}

/// As [`read_owner`], for a walker that releases the lock by one subtraction.
fn read_owner_at_once(world: &World) {
    world.walk(Frame(1), |folio| {
        world.with_lock_at_once(folio, || {
            world.owner(folio);
        });
    });
}

/// A device writes the folio. A fault takes over the lock, and the folio remains unmapped.
fn reclaim_lock(world: &World) {
    world.with_lock_of_request(FIRST, || {});
}

/// As [`reclaim_lock`], for a fault of another anon group, which maps the folio.
fn reclaim_lock_to_map(world: &World) {
    world.with_lock_of_request(FIRST, || world.map_again(FIRST));
}

fn unmap(world: &World) {
    world.unmap(FIRST, 2);
}

fn unmap_by_pages(world: &World) {
    world.unmap(FIRST, 1);
}

/// The frames become a page and a table.
fn reuse_as_table(world: &World) {
    if world.unmap(FIRST, 2) {
        world.make_folio(PAGE, MAPPING);
        world.make_table(Frame(1));
    }
}

/// The head becomes a table.
fn reuse_head_as_table(world: &World) {
    if world.unmap(FIRST, 2) {
        world.make_table(Frame(0));
    }
}

/// The head becomes a slab.
fn reuse_as_slab(world: &World) {
    if world.unmap(FIRST, 2) {
        world.make_slab(Frame(0));
    }
}

/// The head becomes a page that is used and freed.
fn live_again(world: &World) {
    if world.unmap(FIRST, 2) {
        world.make_folio(PAGE, MAPPING);
        world.unmap(PAGE, 1);
    }
}

fn unpin(world: &World) {
    world.unpin(FIRST);
}

fn unpin_and_reuse(world: &World) {
    if world.unpin(FIRST) {
        world.make_table(Frame(0));
    }
}

/// Copy-on-write finds that it owns the folio, and retains its mapping.
fn claim_and_unmap(world: &World) {
    world.claim(FIRST, 2);
    world.unmap(FIRST, 1);
}

fn cut(world: &World) {
    world.cut();
}

#[test]
fn a_walkers_reference_and_the_unmapping_are_ordered() {
    let seen = hold(nothing, [unmap, walk]);
    assert!(seen.held.load(Relaxed) > 0 && seen.refused.load(Relaxed) > 0);
    hold(nothing, [unmap_by_pages, unmap_by_pages, walk]);
}

#[test]
fn a_late_reference_does_not_change_reused_frames() {
    let seen = hold(nothing, [reuse_as_table, walk]);
    assert!(seen.mistaken.load(Relaxed) > 0);
    hold(nothing, [reuse_head_as_table, walk]);
    hold(nothing, [reuse_head_as_table, walk_to_head]);
    hold(nothing, [reuse_as_slab, walk]);
}

#[test]
fn a_mistaken_reference_may_free_the_next_folio() {
    let seen = hold(nothing, [live_again, walk]);
    assert!(seen.mistaken.load(Relaxed) > 0);
    hold(nothing, [live_again, walk_to_head]);
}

#[test]
fn two_walkers_and_a_free_agree_on_last() {
    let seen = hold(nothing, [reuse_as_table, walk, walk_to_head]);
    assert!(seen.held.load(Relaxed) > 0);
}

#[test]
fn a_cut_and_a_walker_exclude_each_other() {
    let seen = hold(nothing, [cut, walk]);
    assert!(seen.busy.load(Relaxed) > 0 && seen.held.load(Relaxed) > 0);
    assert!(seen.mistaken.load(Relaxed) > 0);
    hold(nothing, [cut, walk, walk_to_head]);
}

#[test]
fn an_owners_reads_and_changes_are_ordered() {
    let seen = hold(nothing, [claim_and_unmap, read_owner]);
    assert!(seen.busy.load(Relaxed) > 0);
}

#[test]
fn a_pinned_folios_owner_ends_with_its_mapping() {
    let seen = hold(pinned, [unmap, read_owner]);
    assert!(seen.left_to_the_other.load(Relaxed) > 0);
    hold(pinned, [unmap_by_pages, claim_and_unmap]);
    hold(pinned, [unmap, unpin, read_owner]);
    hold(pinned, [unmap, unpin_and_reuse]);
}

#[test]
fn an_unlock_wakes_a_sleeper() {
    let seen = hold(nothing, [wait_to_read_owner, wait_to_read_owner]);
    assert!(seen.slept.load(Relaxed) > 0);
    let seen = hold(pinned, [unmap, wait_to_read_owner]);
    assert!(seen.slept.load(Relaxed) > 0);
}

#[test]
fn marks_left_by_an_unlock_are_handled() {
    let seen = hold(nothing, [read_owner_at_once, wait_to_read_owner]);
    assert!(seen.marked.load(Relaxed) > 0 && seen.slept.load(Relaxed) > 0);
    let seen = hold(pinned, [unmap, read_owner_at_once]);
    assert!(seen.marked.load(Relaxed) > 0);
    hold(nothing, [read_owner_at_once, read_owner_at_once, wait_to_read_owner]);
}

#[test]
fn a_taken_back_folio_has_no_old_owner() {
    let seen = hold(pinned, [unmap, reclaim_lock]);
    assert!(seen.left_to_the_other.load(Relaxed) > 0);
    let seen = hold(pinned, [unmap, reclaim_lock_to_map]);
    assert!(seen.left_to_the_other.load(Relaxed) > 0 && seen.mapped_again.load(Relaxed) > 0);
    hold(pinned, [unmap_by_pages, unmap_by_pages, reclaim_lock_to_map]);
}

// Each rule is necessary: without it, one of the models above fails.

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_release_a_half_made_folio_shows() {
    without(Omit::Release, nothing, [live_again, walk_to_head]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_acquire_a_half_made_folio_shows() {
    without(Omit::Acquire, nothing, [live_again, walk_to_head]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn who_adds_to_zero_holds_what_is_freed() {
    without(Omit::NeverFromZero, nothing, [unmap, walk]);
}

#[test]
#[should_panic(expected = "held what is not this folio")]
fn without_a_second_check_a_table_is_taken() {
    without(Omit::LookAgain, nothing, [reuse_as_table, walk]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn a_plain_free_frees_under_a_holder() {
    without(Omit::Freeze, nothing, [unmap, walk]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn who_does_not_freeze_cuts_under_a_holder() {
    without(Omit::FreezeToCut, nothing, [cut, walk]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a table's entries")]
fn a_tables_count_must_not_share_the_word() {
    without(Omit::CountElsewhere, nothing, [reuse_head_as_table, walk_to_head]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_acquire_a_free_races_the_last_user() {
    without(Omit::AcquireLast, nothing, [unmap, walk]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "by a stranger")]
fn who_locks_without_a_reference_locks_a_table() {
    without(Omit::LockReferenced, nothing, [reuse_head_as_table, walk_to_head]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn an_unlocked_owner_change_races_a_reader() {
    without(Omit::LockOwner, nothing, [claim_and_unmap, read_owner]);
}

#[test]
#[should_panic(expected = "an owner dangles")]
fn a_last_unmapping_without_owner_update_dangles() {
    without(Omit::Orphan, pinned, [unmap, walk]);
}

#[test]
#[should_panic(expected = "an owner dangles")]
fn a_mark_checked_before_unlocking_is_missed() {
    without(Omit::MarkWithLock, pinned, [unmap, read_owner]);
}

#[test]
#[should_panic(expected = "an owner dangles")]
fn a_handover_without_its_mark_dangles() {
    without(Omit::SettleHandOver, pinned, [unmap, reclaim_lock]);
}

#[test]
#[should_panic(expected = "mapped with the owner of before")]
fn a_folio_mapped_by_its_owner_keeps_it() {
    without(Omit::LookAtMappings, pinned, [unmap, reclaim_lock_to_map]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "by a stranger")]
fn without_a_reference_the_owners_walk_locks_tables() {
    without(Omit::KeepToOrphan, pinned, [unmap, unpin_and_reuse]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_a_second_check_a_sleeper_sleeps_forever() {
    without(Omit::SecondLook, nothing, [wait_to_read_owner, wait_to_read_owner]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sleepers_stale_mark_loses_the_wakeup() {
    without(Omit::MarksLeftBehind, nothing, [read_owner_at_once, wait_to_read_owner]);
}

#[test]
#[should_panic(expected = "a folio stays locked")]
fn an_orphans_stale_mark_lets_owners_dangle() {
    without(Omit::MarksLeftBehind, pinned, [unmap, read_owner_at_once]);
}
