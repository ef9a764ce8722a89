//! Faults on pages in swap, under loom: two faults that need one run of slots at once, and a fault
//! concurrent with a fork. The steps are those of [`super::slot_state`], of the folio's count and
//! of its lock.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib swap::loom_model`.
//!
//! The contents of a frame and of a slot in the store are loom cells. A slot that becomes free
//! immediately gets another page's content, and so does a frame without references. So a fault that
//! reads too early or too late shows as a race or finds another page. The last tests each leave out
//! one rule ([`Omit`]) and must fail. The other tests also require that each of their outcomes was
//! seen.

mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32 as Flags, Ordering::Relaxed};

use crate::sync::model::{self, thread};

use world::{Access, CONTENT, Omit, PAGES, STORED, World};

fn check(omit: Omit, sharers: usize, scenario: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    model::check(Some(3), move || scenario(&Arc::new(World::new(omit, sharers))));
}

fn spawn(world: &Arc<World>, what: Access, own: usize) -> thread::JoinHandle<u32> {
    let world = Arc::clone(world);
    thread::spawn(move || world.access(what, own))
}

/// Two threads of a process fault on pages of one run; each may read up to its entry of `most`
/// pages at once. Bit n of the returned flags is set if some execution read the run in n folios.
fn two_faults(omit: Omit, most: [usize; 2]) -> u32 {
    let seen = Arc::new(Flags::new(0));
    let folios = Arc::clone(&seen);
    check(omit, 1, move |world| {
        let [first, second] =
            [0, 1].map(|page| Access { space: 0, page, most: most[page], write: false });
        let other = spawn(world, second, 2);
        assert_eq!(world.access(first, 0), CONTENT, "another page came back");
        assert_eq!(other.join().unwrap(), CONTENT + 1, "another page came back");
        world.assert_all_is_back(PAGES);
        folios.fetch_or(1 << world.folios_in_use(), Relaxed);
    });
    seen.load(Relaxed)
}

/// A process forks while an older child of it faults on the page that all of them share.
fn a_fork_beside_another_child(omit: Omit) {
    check(omit, 2, |world| {
        world.take_second_page_away();
        let older = Access { space: 1, page: 0, most: 1, write: false };
        let fault = spawn(world, older, 0);
        world.fork(0, 2);
        assert_eq!(world.access(Access { space: 2, ..older }, 2), CONTENT, "the child's page");
        assert_eq!(fault.join().unwrap(), CONTENT, "the older child's page");
        assert_eq!(world.access(Access { space: 0, ..older }, 1), CONTENT, "the parent's page");
        world.assert_all_is_back(1);
    });
}

/// A process writes to a page that it has in swap, and forks at the same time. The child has the
/// content at the time of the fork. Returns whether some forks came before the store, and whether
/// some came after it.
fn a_fork_beside_a_write(omit: Omit) -> u32 {
    let seen = Arc::new(Flags::new(0));
    let outcomes = Arc::clone(&seen);
    check(omit, 1, move |world| {
        world.take_second_page_away();
        let write = Access { space: 0, page: 0, most: 1, write: true };
        let parent = spawn(world, write, 0);
        world.fork(0, 2);
        let load = Access { space: 2, write: false, ..write };
        let found = world.access(load, 2);
        assert_eq!(parent.join().unwrap(), STORED);
        assert_eq!(world.access(load, 2), found, "the child sees a store of its parent");
        world.assert_all_is_back(1);
        outcomes.fetch_or(if found == CONTENT { 1 } else { 2 }, Relaxed);
    });
    seen.load(Relaxed)
}

#[test]
fn two_faults_read_a_run_once() {
    assert_eq!(two_faults(Omit::Nothing, [PAGES, PAGES]), 1 << 1, "one folio");
}

#[test]
fn a_shared_run_comes_back_in_pieces() {
    assert_eq!(two_faults(Omit::Nothing, [PAGES, 1]), 1 << 1 | 1 << 2, "one folio, or two");
}

#[test]
fn a_fork_refers_to_a_slot_being_released() {
    a_fork_beside_another_child(Omit::Nothing);
}

#[test]
fn a_child_gets_the_swap_of_its_fork() {
    assert_eq!(a_fork_beside_a_write(Omit::Nothing), 1 | 2, "one of the outcomes was not seen");
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "freed more than once")]
fn without_a_whole_claim_slots_free_twice() {
    two_faults(Omit::WholeClaim, [PAGES, 1]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_the_lock_two_faults_claim_a_slot() {
    two_faults(Omit::ClaimUnderLock, [PAGES, PAGES]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_the_folios_lock_a_fault_reads_early() {
    two_faults(Omit::FolioLock, [PAGES, PAGES]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "the count of a folio is wrong")]
fn without_the_lock_a_fork_uses_released_slots() {
    a_fork_beside_another_child(Omit::NameUnderLock);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "Causality violation")]
fn without_sharing_a_child_sees_parents_stores() {
    a_fork_beside_a_write(Omit::Shared);
}
