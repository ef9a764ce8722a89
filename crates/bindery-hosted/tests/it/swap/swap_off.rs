//! `swapoff`: what ends it early leaves everything as it can be used.

use bindery::addr::VirtAddr;
use bindery::{Accounting, Error, Sealing, Sharing, SwapError};
use bindery_hosted::{Program, Walk};

use super::fixture::{Swapping, with_swap};
use crate::support::objects_fixture::map;
use crate::support::{GIB, audit};

const AT: u64 = GIB;
const PAGES: u64 = 64;

/// Any signal ends it between two runs, as on Linux, and it can be repeated.
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
        // It was given up: pages go out as before.
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

/// As above, for what objects have.
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

/// A space that is forked in between has entries that nobody has looked at: the area stays, and the
/// next round finds them. One that ends takes its entries along.
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
            // The parent's pages are back; what the child has, its own child gets in swap.
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
            // The fixture wants an area at the end.
            assert_eq!(memory.swap_on(4096, 0), Ok(area));
        });
    }
}

on_every_architecture! {
    signals => a_signal_interrupts_it;
    shared_signals => a_signal_interrupts_it_in_shared_memory;
    forks => forks_and_ends_are_met_again;
}
