//! Tests with clusters whose lists change late or not at all.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::boxed::Box;

use super::SlotRun;
use crate::Memory;
use crate::addr::Order;
use crate::frame::tests::Machine;
use crate::swap::freed::FreedSlots;
use crate::swap::slots::{index, while_areas_stay};
use crate::swap::{SwapDevice, SwapError, SwapRequest, allocate_slots};

fn new_memory() -> Memory<Machine> {
    let machine = Machine::new(0x100, 1 << 12);
    let whole = machine.whole();
    // SAFETY: the machine has no other user.
    unsafe { Memory::new(machine, &[whole]) }.unwrap()
}

/// A device that lists the cluster again while it discards the slots, as a late thread that has
/// freed slots does.
struct Late {
    discarded: AtomicU32,
}

impl SwapDevice<Machine> for Late {
    fn slots(&self) -> u64 {
        512
    }

    fn discards(&self) -> bool {
        true
    }

    fn discard(&self, memory: &Memory<Machine>, first: u64, _count: u64) {
        self.discarded.fetch_add(1, Relaxed);
        memory.swap.area(0).unwrap().relist(first);
        assert!(allocate_slots(memory, Order::PAGE, 1).is_none(), "its slots are discarded");
        assert!(!memory.swap.area(0).unwrap().has_free_slot());
    }

    fn submit(&self, _memory: &Memory<Machine>, _request: SwapRequest) {
        unreachable!("no page is sent out");
    }
}

#[test]
fn a_cluster_under_discard_stays_off_the_lists() {
    let memory = new_memory();
    let late: &'static Late = Box::leak(Box::new(Late { discarded: AtomicU32::new(0) }));
    let area = memory.swap_on_device(late, 0).unwrap();
    for round in 1..3 {
        let run = allocate_slots(&memory, Order::PAGE, 16).unwrap();
        run.free_unused(&memory);
        assert_eq!(memory.discard_free_slots(), 512);
        assert_eq!(late.discarded.load(Relaxed), round);
        assert!(memory.swap.area(0).unwrap().has_free_slot(), "it is listed again");
    }
    assert_eq!(memory.swap_off(&area), Ok(()));
}

#[test]
fn an_area_ends_before_its_cluster_is_listed() {
    let memory = new_memory();
    let area = memory.swap_on(1024, 0).unwrap();
    let run = allocate_slots(&memory, Order::PAGE, 16).unwrap();
    assert_eq!(memory.swap_off(&area), Err(SwapError::InUse));
    memory.resume_swapping_to(&area);
    let slots = memory.swap.area(run.area).unwrap();
    while_areas_stay(memory.platform(), |stay| {
        let (cluster, _, _) = run.cells(stay, &memory).unwrap();
        let mut freed = FreedSlots::new(slots, cluster);
        let mut state = cluster.state.lock();
        (freed.first, freed.count) = (index(run.first), run.count);
        freed.free_run(&mut state);
        assert!(freed.relist, "the cluster is on a list of clusters in use");
    });
    // No slot is taken, so the area is removed, and the late thread finds no cluster.
    assert_eq!(memory.swap_off(&area), Ok(()));
    slots.relist(run.first);
    assert_eq!(memory.swap_areas().count(), 0);
    assert_eq!(memory.swap_on(1024, 0).map(|area| area.slots), Ok(1024));
    assert_eq!(allocate_slots(&memory, Order::PAGE, 16).map(|run| run.count), Some(16));
}

#[test]
fn an_area_beyond_the_accounts_is_refused() {
    let memory = new_memory();
    let free = memory.free_frame_count();
    let records = core::mem::size_of::<super::Cluster<Machine>>() as u64;
    // The records of the largest area occupy the largest block.
    let most = (crate::frame::MAX_ORDER.pages() as u64) * crate::addr::PAGE_SIZE / records * 512;
    for slots in [0, most + 1, 1 << 30, (1 << 30) + 1, u64::MAX] {
        assert_eq!(memory.swap_on(slots, 0), Err(SwapError::Size), "{slots}");
    }
    assert_eq!(memory.swap_on(most, 0), Err(SwapError::OutOfMemory));
    assert_eq!((memory.free_frame_count(), memory.swap_areas().count()), (free, 0));
}

#[test]
fn slots_beyond_the_area_are_none() {
    let memory = new_memory();
    memory.swap_on(512, 0).unwrap();
    let run = SlotRun { area: 0, first: 512, count: 1 };
    assert!(while_areas_stay(memory.platform(), |stay| run.cells(stay, &memory).is_none()));
}
