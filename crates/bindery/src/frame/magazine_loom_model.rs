//! The order of a magazine drain under loom ([`super::magazine`]). The slots are in the product's
//! stacks; the slab's lists are modeled by a vector.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p bindery --release --lib magazine_loom_model`.
//!
//! All free slots are in the magazine of CPU 1, one for each allocation. CPU 0 and a thread whose
//! CPU has no magazine allocate concurrently, and the thread must get a slot. The last tests leave
//! out one rule each ([`Omit`]) and must fail.

use core::ptr::{NonNull, without_provenance_mut};
use std::rc::Rc;
use std::vec::Vec;

use crate::sync::model;
use crate::sync::model::sync::Mutex;

use super::magazine::Kept;

/// The rule that a model leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    /// A magazine's lock is held until its slots are on the lists.
    LockHeld,
    /// A refill during a drain takes one slot only.
    OneSlot,
    /// The lists are tried again after a drain that found nothing.
    TryAgain,
}

struct Lists {
    slots: Vec<NonNull<u8>>,
    drains: u32,
}

struct World {
    omit: Omit,
    magazines: [Mutex<Kept>; 2],
    lists: Mutex<Lists>,
}

impl World {
    /// As `Slab::reserve`, on a CPU with a magazine or without one.
    fn allocate(&self, magazine: Option<&Mutex<Kept>>) -> Option<NonNull<u8>> {
        let slot = match magazine {
            Some(magazine) => {
                let mut kept = magazine.lock().unwrap();
                let slot = kept.pop();
                slot.or_else(|| self.refill(&mut kept))
            }
            None => self.lists.lock().unwrap().slots.pop(),
        };
        slot.or_else(|| self.take_after_drain())
    }

    fn refill(&self, kept: &mut Kept) -> Option<NonNull<u8>> {
        let mut lists = self.lists.lock().unwrap();
        let slot = lists.slots.pop()?;
        while lists.drains == 0 || self.omit == Omit::OneSlot {
            let Some(other) = lists.slots.pop() else { break };
            kept.push(other);
        }
        Some(slot)
    }

    fn take_after_drain(&self) -> Option<NonNull<u8>> {
        self.lists.lock().unwrap().drains += 1;
        let found: usize = self.magazines.iter().map(|magazine| self.empty(magazine)).sum();
        let mut lists = self.lists.lock().unwrap();
        lists.drains -= 1;
        if found == 0 && self.omit == Omit::TryAgain {
            return None;
        }
        lists.slots.pop()
    }

    /// Returns the number of slots that the magazine had.
    fn empty(&self, magazine: &Mutex<Kept>) -> usize {
        let mut kept = magazine.lock().unwrap();
        let slots: Vec<_> = kept.take_all().into_iter().flatten().collect();
        let kept = (self.omit != Omit::LockHeld).then_some(kept);
        self.lists.lock().unwrap().slots.extend(&slots);
        drop(kept);
        slots.len()
    }
}

fn slots(count: usize) -> Kept {
    let mut kept = Kept::EMPTY;
    for number in 1..=count {
        kept.push(NonNull::new(without_provenance_mut(number)).unwrap());
    }
    kept
}

/// CPU 1 is taken offline. A thread that still has its number frees the only slot into its magazine
/// and then allocates it.
fn explore_offline(omit: Omit) {
    model::check(Some(6), move || {
        let world = Rc::new(World {
            omit,
            magazines: [Mutex::new(Kept::EMPTY), Mutex::new(Kept::EMPTY)],
            lists: Mutex::new(Lists { slots: Vec::new(), drains: 0 }),
        });
        let offline = |world: &World| {
            world.empty(&world.magazines[1]);
        };
        let slot = model::beside(&world, [offline], |world| {
            *world.magazines[1].lock().unwrap() = slots(1);
            world.allocate(None)
        });
        assert!(slot.is_some(), "a slot was free");
    });
}

fn explore(omit: Omit, others: usize) {
    model::check(Some(if others > 1 { 3 } else { 6 }), move || {
        let full = slots(others + 1);
        let world = Rc::new(World {
            omit,
            magazines: [Mutex::new(Kept::EMPTY), Mutex::new(full)],
            lists: Mutex::new(Lists { slots: Vec::new(), drains: 0 }),
        });
        let other = |world: &World| {
            world.allocate(Some(&world.magazines[0]));
        };
        let slot = model::beside(&world, (0..others).map(|_| other), |world| world.allocate(None));
        assert!(slot.is_some(), "a slot was free");
    });
}

#[test]
fn the_free_slot_is_found_beside_one_drain() {
    explore(Omit::Nothing, 1);
}

#[test]
fn the_free_slot_is_found_beside_two_drains() {
    explore(Omit::Nothing, 2);
}

#[test]
fn the_slot_is_found_beside_a_leaving_cpu() {
    explore_offline(Omit::Nothing);
}

#[test]
#[should_panic(expected = "a slot was free")]
fn a_slot_of_a_leaving_cpu_is_missed() {
    explore_offline(Omit::LockHeld);
}

#[test]
#[should_panic(expected = "a slot was free")]
fn a_slot_on_its_way_is_missed() {
    explore(Omit::LockHeld, 1);
}

#[test]
#[should_panic(expected = "a slot was free")]
fn a_refill_beside_a_drain_hides_a_slot() {
    explore(Omit::OneSlot, 1);
}

#[test]
#[should_panic(expected = "a slot was free")]
fn a_slot_that_another_drain_moved_is_missed() {
    explore(Omit::TryAgain, 1);
}
