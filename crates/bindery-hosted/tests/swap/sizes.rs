//! The size of swapped-in folios: as large as at the swap-out, and larger only if faults continue
//! page after page.

use bindery::addr::VirtAddr;
use bindery_hosted::{SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_swap};
use crate::support::{GIB, MIB, audit};

const AT: u64 = GIB;
const PAGE: u64 = 4096;

/// Pages in swap from [`AT`] on that were swapped out by calls of `each` pages.
fn send_out<A: Walk>(swapping: &Swapping<'_, '_, A>, pages: u64, each: u64) {
    swapping.map(AT, pages);
    swapping.fill(AT, pages);
    for first in (0..pages).step_by(each as usize) {
        swapping.page_out(AT + first * PAGE, each);
    }
    assert_eq!(swapping.swapped(AT, pages), pages);
}

/// The number of pages that an access to one page swaps in.
fn brought_by<A: Walk>(swapping: &Swapping<'_, '_, A>, page: u64) -> u64 {
    let before = swapping.swapped(AT, 1024);
    assert_eq!(swapping.program.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
    before - swapping.swapped(AT, 1024)
}

fn a_folio_comes_back_as_it_went_out<A: Walk>() {
    for order in [4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            send_out(swapping, 1024, 1 << order);
            assert_eq!(brought_by(swapping, 777), 1 << order);
        });
    }
}

/// Calls for a part of a folio split the folio, and its pages are swapped in singly although their
/// slots are consecutive.
fn pages_that_went_out_alone_come_back_alone<A: Walk>() {
    for (order, each) in [(4, 1), (9, 1), (9, 16), (4, 2)] {
        with_swap::<A>(order, 4096, |swapping| {
            send_out(swapping, 1024, each);
            for page in [3, 300, 511, 512, 999] {
                assert!(brought_by(swapping, page) <= each, "order {order}, page {page}");
            }
            let child = swapping.space.fork().unwrap();
            assert_eq!(brought_by(swapping, 700), 1, "a fork changes nothing");
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        });
    }
}

/// The first 16 pages are swapped in by single faults. Then the access pattern predicts the use of
/// all pages.
fn faults_page_after_page_read_larger_folios<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        send_out(swapping, 1024, 1);
        let first: Vec<u64> = (0..17).map(|page| brought_by(swapping, page)).collect();
        assert_eq!(first, [[1; 16].as_slice(), &[16]].concat());
        let major = swapping.memory.events().major_faults;
        swapping.assert_filled(AT, 512, AT);
        assert_eq!(swapping.memory.events().major_faults - major, 30);
        assert_eq!(brought_by(swapping, 600), 1, "elsewhere");
        assert_eq!(brought_by(swapping, 512), 1, "no fault was at the page before");
    });
}

/// `swapoff` swaps in everything.
fn swapoff_brings_back_what_the_policy_allows<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        send_out(swapping, 64, 1);
        swapping.memory.stop_swapping_to(&swapping.area);
        let before = swapping.space.counts();
        swapping.space.swap_in_area(&swapping.area).unwrap();
        assert_eq!((swapping.space.counts() - before).folios_touched, 4);
        swapping.assert_filled(AT, 64, AT);
    });
}

/// On a device, pages that were swapped out singly are read around other pages, whatever the
/// policy.
fn pages_that_went_out_alone_are_read_around<A: Walk>() {
    let device = device(4096, SwapService::AtOnce);
    with_device::<A>(64 * MIB, 4, device, |swapping| {
        swapping.memory.set_page_cluster(3);
        send_out(swapping, 64, 1);
        swapping.assert_filled(AT, 8, AT);
        let events = swapping.memory.events();
        assert!(events.swap_read_around_hits >= 4, "{events:?}");
        swapping.assert_filled(AT, 64, AT);
    });
}

on_every_architecture! {
    whole => a_folio_comes_back_as_it_went_out;
    alone => pages_that_went_out_alone_come_back_alone;
    in_order => faults_page_after_page_read_larger_folios;
    swapoff => swapoff_brings_back_what_the_policy_allows;
    on_a_device => pages_that_went_out_alone_are_read_around;
}
