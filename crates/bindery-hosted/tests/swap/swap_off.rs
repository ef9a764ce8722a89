//! `swapoff`: an early end leaves the area and all pages usable.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Accounting, Error, Sealing, Sharing, SwapError};
use bindery_hosted::{Program, SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_swap};
use crate::support::kernel::Finished;
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

const AT: u64 = GIB;
const PAGES: u64 = 64;

/// Any signal ends the call between two runs, as on Linux, and the call can be repeated.
fn a_signal_interrupts_it<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        let Swapping { machine, memory, space, area, .. } = *swapping;
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, PAGES);
        memory.stop_swapping_to(&area);
        let mut left = PAGES;
        for fatal in [false, true] {
            let signal_after = |questions| match fatal {
                true => machine.fatal_signal_after(questions),
                false => machine.signal_after(questions),
            };
            signal_after(Some(3));
            assert_eq!(space.swap_in_area(&area), Err(Error::Interrupted));
            signal_after(None);
            let now = swapping.swapped(AT, PAGES);
            assert!(now > 0 && now < left, "{now} pages are out");
            left = now;
            assert_eq!(memory.swap_off(&area), Err(SwapError::InUse));
            audit(machine, memory, &[space]);
        }
        // The call was abandoned, so pages are swapped out as before.
        memory.resume_swapping_to(&area);
        swapping.assert_filled(AT, PAGES, AT);
        swapping.page_out(AT, PAGES);
        assert_eq!(swapping.swapped(AT, PAGES), PAGES);
        memory.stop_swapping_to(&area);
        assert_eq!(space.swap_in_area(&area), Ok(()));
        assert_eq!((swapping.taken(), swapping.swapped(AT, PAGES)), (0, 0));
        swapping.assert_filled(AT, PAGES, AT);
        memory.resume_swapping_to(&area);
    });
}

/// As above, for pages of objects.
fn a_signal_interrupts_it_in_shared_memory<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        let Swapping { machine, memory, space, area, .. } = *swapping;
        let object = memory.shared_memory(PAGES * 4096, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(space, &object, AT, PAGES * 4096, Sharing::Shared).unwrap();
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, PAGES);
        memory.stop_swapping_to(&area);
        machine.signal_after(Some(3));
        assert_eq!(memory.swap_in_objects(&area), Err(Error::Interrupted));
        machine.signal_after(None);
        assert!(object.swapped_pages() > 0 && object.swapped_pages() < PAGES);
        audit(machine, memory, &[space]);
        assert_eq!(memory.swap_in_objects(&area), Ok(()));
        swapping.assert_filled(AT, PAGES, AT);
        memory.resume_swapping_to(&area);
        space.munmap(VirtAddr(AT), PAGES * 4096).unwrap();
    });
}

/// A space that is forked in between has entries that no call has visited. The area stays, and the
/// next round finds the entries. A space that ends removes its entries.
fn forks_and_ends_are_met_again<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            let Swapping { machine, memory, space, area, .. } = *swapping;
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            swapping.page_out(AT, PAGES);
            let older = space.fork().unwrap();
            memory.stop_swapping_to(&area);
            space.swap_in_area(&area).unwrap();
            // The parent's pages are in memory; the child's pages are still in swap, and its own
            // child inherits them there.
            let younger = older.fork().unwrap();
            older.swap_in_area(&area).unwrap();
            assert_eq!(memory.swap_off(&area), Err(SwapError::InUse), "the youngest is left");
            audit(machine, memory, &[space, &older, &younger]);
            let third = younger.fork().unwrap();
            drop(younger);
            assert_eq!(memory.swap_off(&area), Err(SwapError::InUse));
            third.swap_in_area(&area).unwrap();
            assert_eq!(memory.swap_off(&area), Ok(()));
            for space in [space, &older, &third] {
                let program = Program::new(machine, space);
                for page in 0..PAGES {
                    assert_eq!(program.load(VirtAddr(AT + page * 4096)), Ok(AT + page));
                }
            }
            // The fixture needs an area at the end.
            assert_eq!(memory.swap_on(4096, 0), Ok(area));
        });
    }
}

/// Pages that were swapped in for a parent keep their slots, to which the child still refers.
/// Reclaim must not write the pages to these slots again.
fn a_stopped_area_gets_no_page_again<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            let Swapping { machine, memory, space, area, .. } = *swapping;
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            let child = space.fork().unwrap();
            while memory.reclaim(PAGES).freed > 0 {}
            assert_eq!(swapping.swapped(AT, PAGES), PAGES);
            memory.stop_swapping_to(&area);
            space.swap_in_area(&area).unwrap();
            (0..8).for_each(|_| assert_eq!(memory.reclaim(PAGES).freed, 0));
            assert_eq!(swapping.swapped(AT, PAGES), 0, "pages went to a stopped area");
            audit(machine, memory, &[space, &child]);
            child.swap_in_area(&area).unwrap();
            assert_eq!(memory.swap_off(&area), Ok(()));
            swapping.assert_filled(AT, PAGES, AT);
            drop(child);
            // The fixture needs an area at the end.
            assert_eq!(memory.swap_on(4096, 0), Ok(area));
        });
    }
}

/// Pages that were read around a needed page are in the cache and unchanged in swap. A stopped area
/// releases them without a write.
#[test]
fn a_stopped_area_releases_pages_it_has() {
    let device = device(4096, SwapService::AtOnce);
    with_device::<X86_64<4>>(64 * MIB, 0, device, |swapping| {
        let memory = swapping.memory;
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        // A single written word avoids word-filled pages.
        for page in 0..PAGES {
            swapping.program.store(VirtAddr(AT + page * 4096 + 64), page + 1).unwrap();
        }
        swapping.page_out(AT, PAGES);
        memory.wait_for_swap_writes().unwrap();
        memory.set_page_cluster(3);
        // Reads in order, so that more pages are read than needed.
        swapping.assert_filled(AT, 4, AT);
        memory.set_page_cluster(0);
        let (written, free) = (device.counts().pages_written, memory.free_frame_count());
        memory.stop_swapping_to(&swapping.area);
        (0..4).for_each(|_| _ = memory.reclaim(PAGES));
        assert!(memory.free_frame_count() > free, "what was read around stays");
        assert_eq!(device.counts().pages_written, written);
        swapping.space.swap_in_area(&swapping.area).unwrap();
        assert_eq!(memory.swap_off(&swapping.area), Ok(()));
        swapping.assert_filled(AT, PAGES, AT);
        assert_eq!(memory.swap_on_device(device, 0), Ok(swapping.area));
    });
}

/// Reclaimers on other CPUs use the area all the time. Once the reclaimers that began before the
/// stop have ended, one round completes the call.
fn it_ends_while_others_reclaim<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            let Swapping { machine, memory, space, area, .. } = *swapping;
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            let spaces = [space.fork().unwrap(), space.fork().unwrap(), space.fork().unwrap()];
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                let _finished = Finished(&over);
                for cpu in [Cpu(1), Cpu(2)] {
                    let over = &over;
                    scope.spawn(move || {
                        machine.on_cpu(cpu, || {
                            while !over.load(Ordering::Relaxed) {
                                memory.reclaim(PAGES);
                            }
                        });
                    });
                }
                for _ in 0..8 {
                    memory.resume_swapping_to(&area);
                    for at in 0..PAGES {
                        swapping.program.store(VirtAddr(AT + at * 4096), AT + at).unwrap();
                    }
                    memory.stop_swapping_to(&area);
                    let round = || {
                        spaces.iter().chain([space]).for_each(|s| s.swap_in_area(&area).unwrap());
                        memory.swap_areas().all(|area| area.taken == 0)
                    };
                    let ended = (0..5_000).any(|_| {
                        // A reclaimer that allocated slots before the stop may be waiting for a CPU
                        // of the host.
                        round() || {
                            thread::sleep(Duration::from_millis(1));
                            false
                        }
                    });
                    assert!(ended, "pages go to the stopped area all the time");
                }
            });
            assert_eq!(memory.swap_off(&area), Ok(()));
            swapping.assert_filled(AT, PAGES, AT);
            audit(machine, memory, &[space, &spaces[0], &spaces[1], &spaces[2]]);
            drop(spaces);
            assert_eq!(memory.swap_on(4096, 0), Ok(area));
        });
    }
}

on_every_architecture! {
    signals => a_signal_interrupts_it;
    stopped => a_stopped_area_gets_no_page_again;
    reclaimers => it_ends_while_others_reclaim;
    shared_signals => a_signal_interrupts_it_in_shared_memory;
    forks => forks_and_ends_are_met_again;
}
