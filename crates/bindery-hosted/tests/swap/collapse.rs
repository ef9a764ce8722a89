//! Collapse of ranges with pages in swap, which are swapped in first.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::Level;
use bindery::{Advice, CollapseLimits, Error, Inspection, SizeMode};
use bindery_hosted::Walk;

use super::fixture::{Swapping, with_swap};

const AT: u64 = 1 << 30;
const PAGE: u64 = 4096;
const PAGES: u64 = 512;
const ORDERS: [u8; 2] = [0, 4];

fn collapse<A: Walk>(swapping: &Swapping<'_, '_, A>) -> Result<(), Error> {
    swapping.space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::Collapse)
}

fn is_huge<A: Walk>(swapping: &Swapping<'_, '_, A>) -> bool {
    matches!(swapping.space.inspect(VirtAddr(AT)), Inspection::Page { level, .. } if level == Level::PMD)
}

fn on_demand<A: Walk>() {
    for order in ORDERS {
        for out in [1 << order, 64, PAGES] {
            with_swap::<A>(order, 4096, |swapping| {
                swapping.map(AT, PAGES);
                swapping.fill(AT, PAGES);
                swapping.page_out(AT, out);
                assert_eq!(swapping.swapped(AT, PAGES), out);
                assert_eq!(collapse(swapping), Ok(()));
                assert!(is_huge(swapping));
                swapping.assert_filled(AT, PAGES, AT);
                assert_eq!(swapping.taken(), 0, "the small pages are gone, and their slots");
            });
        }
    }
}

/// A child keeps its pages in swap.
fn beside_a_child<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, 10);
        let child = swapping.space.fork().unwrap();
        assert_eq!(collapse(swapping), Ok(()));
        assert!(is_huge(swapping));
        swapping.program.store(VirtAddr(AT), 1).unwrap();
        let mut word = [0; 8];
        child.read_user(VirtAddr(AT), &mut word).unwrap();
        assert_eq!(u64::from_ne_bytes(word), AT);
    });
}

/// If another obstacle stops the collapse, the pages stay in swap.
fn beside_a_guard<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, 10);
        let guard = VirtAddr(AT + 100 * PAGE);
        swapping.space.madvise(guard, PAGE, Advice::GuardInstall).unwrap();
        assert_eq!(collapse(swapping), Err(Error::Invalid));
        assert_eq!(swapping.swapped(AT, PAGES), 10);
    });
}

fn in_the_background<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, 65);
        swapping.memory.folio_policy().set(Order(9), SizeMode::Always);
        let collapsed = |swapped| {
            let limits = CollapseLimits { missing: 0, swapped, ..CollapseLimits::default() };
            swapping.space.collapse_some(VirtAddr(AT), 1, &limits).collapsed
        };
        assert_eq!(collapsed(64), 0);
        assert_eq!(swapping.swapped(AT, PAGES), 65);
        assert_eq!(collapsed(65), 1);
        assert!(is_huge(swapping));
        swapping.assert_filled(AT, PAGES, AT);
    });
}

on_every_architecture! {
    demanded => on_demand;
    shared_with_a_child => beside_a_child;
    guarded => beside_a_guard;
    background => in_the_background;
}
