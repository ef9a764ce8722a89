//! Clusters that a CPU owns, under loom: the code of [`super`] that takes slots and chooses the
//! list of a cluster, with the locks of [`crate::swap::area`] around it.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib cluster::loom_model`.
//!
//! The content of a cluster's slots is a loom cell: a thread that has taken a slot reads the cell,
//! and a discard writes it. So a slot that is taken during a discard shows as a race. A cluster
//! that is on a wrong list fails an assertion, and so does an allocation that fails while a slot is
//! free. The last tests each leave out one rule ([`Omit`]) and must fail.

use std::array;
use std::sync::Arc;

use crate::sync::model::cell::UnsafeCell;
use crate::sync::model::sync::{Mutex, MutexGuard};
use crate::sync::model::{self, thread};

use super::{ClusterState, List};
use crate::addr::Order;
use crate::platform::Cpu;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// An allocation disowns all clusters before it fails.
    Disown,
    /// A CPU takes slots of its cluster only while it is the owner.
    OwnerCheck,
    /// A cluster that must be discarded leaves its owner.
    OwnerLeaves,
    /// A cluster under discard is on no list.
    Discarding,
    /// A CPU that goes offline gives up its clusters.
    Offline,
}

const CLUSTERS: usize = 1;
/// The number of slots of a cluster.
const SLOTS: u32 = 2;

struct World {
    omit: Omit,
    /// The list of each cluster, by its number.
    lists: Mutex<[u32; CLUSTERS]>,
    clusters: [Mutex<ClusterState>; CLUSTERS],
    content: [UnsafeCell<u32>; CLUSTERS],
    /// Whether the device discards free slots.
    discards: bool,
}

// SAFETY: the model tracks each access to the cells and reports races.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

/// A taken slot: the number of its cluster, and its number in the cluster.
struct Taken(usize, u32);

impl World {
    fn new(omit: Omit, discards: bool) -> Self {
        Self {
            omit,
            lists: Mutex::new([List::Free.number(); CLUSTERS]),
            clusters: array::from_fn(|_| Mutex::new(ClusterState::new(SLOTS))),
            content: array::from_fn(|_| UnsafeCell::new(0)),
            discards,
        }
    }

    fn cluster(&self, number: usize) -> MutexGuard<'_, ClusterState> {
        self.clusters[number].lock().unwrap()
    }

    fn lists(&self) -> MutexGuard<'_, [u32; CLUSTERS]> {
        self.lists.lock().unwrap()
    }

    /// A thread uses the slot that it has taken.
    fn used(&self, number: usize, (slot, _): (u32, u32)) -> Taken {
        // SAFETY: as for `Sync`.
        self.content[number].with(|content| unsafe { content.read() });
        Taken(number, slot)
    }

    /// `take_own`, from the cluster from which the CPU has last allocated.
    fn take_own(&self, cpu: u16, number: usize) -> Option<Taken> {
        let mut state = self.cluster(number);
        if self.omit != Omit::OwnerCheck && state.owner != Some(Cpu(cpu)) {
            return None;
        }
        let taken = state.take(List::Owned, Order::PAGE, 1, self.discards)?;
        drop(state);
        Some(self.used(number, taken))
    }

    fn take_from_lists(&self, cpu: u16, lists: &mut [u32; CLUSTERS]) -> Option<Taken> {
        let order = Order::PAGE;
        for list in [List::Room(order), List::Free, List::Freed] {
            for (number, on) in lists.iter_mut().enumerate().filter(|(_, on)| **on == list.number())
            {
                let mut state = self.cluster(number);
                let taken = state.take(list, order, 1, self.discards);
                state.own(Some(Cpu(cpu)));
                *on = state.list().number();
                drop(state);
                if let Some(taken) = taken {
                    return Some(self.used(number, taken));
                }
            }
        }
        None
    }

    /// `take_listed`.
    fn take_listed(&self, cpu: u16) -> Option<Taken> {
        let mut lists = self.lists();
        self.take_from_lists(cpu, &mut lists).or_else(|| {
            if self.omit != Omit::Disown {
                self.disown_all(&mut lists, None);
            }
            self.take_from_lists(cpu, &mut lists)
        })
    }

    /// `allocate`, on a CPU that has last allocated from the cluster `last`.
    fn allocate(&self, cpu: u16, last: usize) -> Option<Taken> {
        self.take_own(cpu, last).or_else(|| self.take_listed(cpu))
    }

    fn disown_all(&self, lists: &mut [u32; CLUSTERS], cpu: Option<Cpu>) {
        for (number, on) in lists.iter_mut().enumerate() {
            let mut state = self.cluster(number);
            if state.owner.is_some() && (cpu.is_none() || state.owner == cpu) {
                state.owner = None;
                *on = state.list().number();
            }
        }
    }

    /// `cpu_offline`.
    fn offline(&self, cpu: u16) {
        if self.omit != Omit::Offline {
            self.disown_all(&mut self.lists(), Some(Cpu(cpu)));
        }
    }

    /// The first half of a free. The caller knows that the list of the cluster changes.
    fn free(&self, Taken(number, slot): &Taken) {
        self.cluster(*number).free_run(*slot, 1);
    }

    /// The second half of a free: `relist`.
    fn relist(&self, number: usize) {
        let mut lists = self.lists();
        let mut state = self.cluster(number);
        let list = state.list();
        if list != List::Owned && self.omit != Omit::OwnerLeaves {
            state.owner = None;
        }
        lists[number] = list.number();
    }

    /// `discard_freed`, with a cluster that the device discards.
    fn discard(&self) {
        let freed = {
            let mut lists = self.lists();
            let Some(number) = lists.iter().position(|on| *on == List::Freed.number()) else {
                return;
            };
            let mut state = self.cluster(number);
            state.discarding = self.omit != Omit::Discarding;
            lists[number] = List::Full.number();
            number
        };
        // SAFETY: as for `Sync`.
        self.content[freed].with_mut(|content| unsafe { content.write(0) });
        let mut lists = self.lists();
        let mut state = self.cluster(freed);
        (state.stale, state.discarding) = (false, false);
        lists[freed] = state.list().number();
    }

    /// Asserts that each cluster is on the right list.
    fn assert_listed(&self) {
        let lists = self.lists();
        for (number, on) in lists.iter().enumerate() {
            assert_eq!(*on, self.cluster(number).list().number(), "it is on a wrong list");
        }
    }
}

fn check(omit: Omit, discards: bool, scenario: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    model::check(Some(3), move || {
        let world = Arc::new(World::new(omit, discards));
        scenario(&world);
        world.assert_listed();
    });
}

/// CPU 0 owns the only cluster and takes and frees slots concurrently with an allocation on CPU 1.
/// One slot is free throughout.
fn beside_an_allocation(omit: Omit) {
    check(omit, false, |world| {
        let first = world.take_listed(0).expect("all are free");
        let other = Arc::clone(world);
        let thread = thread::spawn(move || other.take_listed(1).is_some());
        world.free(&first);
        let again = world.take_own(0, 0).is_some();
        world.relist(0);
        assert!(thread.join().unwrap(), "a slot was free, and was not found");
        assert!(again || world.allocate(0, 0).is_some(), "a slot is left");
    });
}

/// CPU 0 goes offline while a thread has its stale number; the lists get the remaining slot.
fn beside_a_cpu_that_goes(omit: Omit) {
    check(omit, false, |world| {
        let _first = world.take_listed(0).expect("all are free");
        let other = Arc::clone(world);
        let thread = thread::spawn(move || other.offline(0));
        let taken = world.take_own(0, 0);
        thread.join().unwrap();
        world.assert_listed();
        if let Some(taken) = taken {
            world.free(&taken);
            world.relist(0);
        }
        let mut lists = world.lists();
        assert!(world.take_from_lists(1, &mut lists).is_some(), "the slot is lost");
    });
}

/// The last slots of CPU 0's cluster are freed by two threads concurrently with a discard and an
/// allocation on CPU 0. One of the threads lists the cluster late.
fn beside_a_discard(omit: Omit) {
    check(omit, true, |world| {
        let first = world.take_listed(0).expect("all are free");
        let second = world.take_own(0, first.0).expect("one is left");
        let late = Arc::clone(world);
        world.free(&first);
        let thread = thread::spawn(move || {
            late.relist(0);
            late.allocate(0, 0).is_some()
        });
        world.free(&second);
        world.relist(0);
        world.discard();
        let taken = thread.join().unwrap();
        assert!(taken || world.allocate(0, 0).is_some(), "all slots are free");
    });
}

#[test]
fn the_slot_of_an_owned_cluster_is_found() {
    beside_an_allocation(Omit::Nothing);
}

#[test]
fn a_cpu_that_goes_leaves_the_slot() {
    beside_a_cpu_that_goes(Omit::Nothing);
}

#[test]
fn no_slot_is_taken_during_a_discard() {
    beside_a_discard(Omit::Nothing);
}

#[test]
#[should_panic(expected = "a slot was free, and was not found")]
fn a_cluster_not_disowned_hides_a_slot() {
    beside_an_allocation(Omit::Disown);
}

#[test]
#[should_panic(expected = "on a wrong list")]
fn an_unchecked_owner_corrupts_the_list() {
    beside_a_cpu_that_goes(Omit::OwnerCheck);
}

#[test]
#[should_panic(expected = "the slot is lost")]
fn unended_ownership_loses_a_slot() {
    beside_a_cpu_that_goes(Omit::Offline);
}

#[test]
#[should_panic]
fn a_kept_owner_takes_slots_during_discards() {
    beside_a_discard(Omit::OwnerLeaves);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic]
fn an_unflagged_discard_lets_slots_be_taken() {
    beside_a_discard(Omit::Discarding);
}
