//! Devices receive discards of free slots and lose no needed content.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bindery::Advice;
use bindery::addr::VirtAddr;
use bindery_hosted::{SwapService, Walk};

use super::fixture::{device, with_device};
use crate::support::kernel::Finished;
use crate::support::{GIB, MIB};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
/// Slots of one discard.
const RUN: u64 = 512;

fn runs_of_free_slots_are_told<A: Walk>() {
    let file = device(4096, SwapService::AtOnce);
    with_device::<A>(64 * MIB, 0, file, |swapping| {
        swapping.map(AT, 2 * RUN);
        swapping.fill(AT, 2 * RUN);
        swapping.page_out(AT, 2 * RUN);
        assert_eq!(swapping.taken(), 2 * RUN);
        assert_eq!(swapping.memory.discard_free_slots(), 0, "nothing is free");
        let before = file.pages_on_disk();
        // Drops all of the first run and a part of the second.
        let drop = |first: u64, count: u64| {
            let at = VirtAddr(AT + first * PAGE);
            swapping.space.madvise(at, count * PAGE, Advice::DontNeed).unwrap();
        };
        drop(0, RUN + 100);
        assert_eq!(swapping.memory.discard_free_slots(), RUN);
        assert_eq!(swapping.memory.discard_free_slots(), 0, "it was told");
        assert_eq!(file.counts().discarded, RUN);
        if let (Some(before), Some(after)) = (before, file.pages_on_disk()) {
            assert!(after + RUN <= before, "the file took {before} pages and takes {after}");
        }
        swapping.assert_filled(AT + (RUN + 100) * PAGE, RUN - 100, AT + RUN + 100);
        // Free slots are used again, and discarded again.
        swapping.fill(AT, 2 * RUN);
        swapping.page_out(AT, 2 * RUN);
        swapping.assert_filled(AT, 2 * RUN, AT);
        drop(0, 2 * RUN);
        swapping.memory.reclaim(1);
        // The rest of the second run was swapped in before, and now two runs are dropped.
        assert_eq!(file.counts().discarded, 4 * RUN, "reclaim tells too");
    });
}

/// Once every run has been used, slots that were not discarded are allocated.
fn what_was_not_told_is_handed_out<A: Walk>() {
    let file = device(RUN + 100, SwapService::AtOnce);
    with_device::<A>(64 * MIB, 0, file, |swapping| {
        swapping.map(AT, RUN + 100);
        for _ in 0..2 {
            swapping.fill(AT, RUN + 100);
            swapping.page_out(AT, RUN + 100);
            assert_eq!(swapping.taken(), RUN + 100, "all slots are taken");
            swapping.assert_filled(AT, RUN + 100, AT);
        }
        swapping.space.munmap(VirtAddr(AT), (RUN + 100) * PAGE).unwrap();
        assert_eq!(file.counts().discarded, 0);
        assert_eq!(swapping.memory.discard_free_slots(), RUN + 100, "the last run is short");
    });
}

/// A stopped area is about to be removed, so its device receives no further discards.
fn a_stopped_area_is_left_alone<A: Walk>() {
    let file = device(2 * RUN, SwapService::AtOnce);
    with_device::<A>(64 * MIB, 0, file, |swapping| {
        swapping.map(AT, RUN);
        swapping.fill(AT, RUN);
        swapping.page_out(AT, RUN);
        swapping.space.munmap(VirtAddr(AT), RUN * PAGE).unwrap();
        swapping.memory.stop_swapping_to(&swapping.area);
        assert_eq!(swapping.memory.discard_free_slots(), 0);
        swapping.memory.resume_swapping_to(&swapping.area);
        assert_eq!(swapping.memory.discard_free_slots(), RUN);
    });
}

/// One thread swaps pages out and in and drops them while another sends discards. The device
/// verifies that no slot is discarded during a request for it, and none is read that was discarded.
fn beside_transfers<A: Walk>() {
    let file = device(8 * RUN, SwapService::Shuffled(3, Duration::ZERO));
    with_device::<A>(64 * MIB, 4, file, |swapping| {
        swapping.map(AT, 2 * RUN);
        swapping.served(file, || {
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                let _finished = Finished(&over);
                scope.spawn(|| {
                    while !over.load(Relaxed) {
                        swapping.memory.discard_free_slots();
                    }
                });
                for round in 0..20 {
                    swapping.fill(AT, 2 * RUN);
                    swapping.page_out(AT, 2 * RUN);
                    if round % 2 == 0 {
                        swapping.assert_filled(AT, 2 * RUN, AT);
                    }
                }
            });
        });
        swapping.memory.discard_free_slots();
        assert!(file.counts().discarded >= RUN, "{:?}", file.counts());
    });
}

on_every_architecture! {
    runs => runs_of_free_slots_are_told;
    reuse => what_was_not_told_is_handed_out;
    stopped => a_stopped_area_is_left_alone;
    transfers => beside_transfers;
}
