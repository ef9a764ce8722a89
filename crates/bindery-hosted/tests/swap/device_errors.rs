//! A device that fails. A page that could not be written stays in memory. A page that could not be
//! read raises SIGBUS only for the access that needs it.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{Error, FaultError, SwapOperation, SwapRequest};
use bindery_hosted::{Program, SwapService, Walk};

use super::fixture::{device, with_device};
use crate::support::{GIB, MIB, audit};

const AT: u64 = GIB;
const BYTES: u64 = 64 * MIB;
const SLOTS: u64 = 4096;
const PAGES: u64 = 64;

fn is_write(request: &SwapRequest) -> bool {
    request.operation() == SwapOperation::Write
}

/// Whether the request reads this slot, among others.
fn reads(request: &SwapRequest, slot: u64) -> bool {
    let slots = request.slot()..request.slot() + u64::from(request.pages());
    !is_write(request) && slots.contains(&slot)
}

fn a_failed_write_keeps_the_page<A: Walk>() {
    for order in [0, 4] {
        for service in [SwapService::AtOnce, SwapService::InOrder] {
            let device = device(SLOTS, service);
            with_device::<A>(BYTES, order, device, |swapping| {
                swapping.map(AT, PAGES);
                swapping.fill(AT, PAGES);
                let free = swapping.memory.free_frame_count();
                // Fails the write of every second folio.
                device.fail(move |request| is_write(request) && request.slot() >> order & 1 == 1);
                swapping.served(device, || swapping.page_out(AT, PAGES));
                audit(swapping.machine, swapping.memory, &[swapping.space]);
                let failed = device.counts().failed;
                assert_eq!((failed, swapping.swapped(AT, PAGES)), (PAGES >> order >> 1, PAGES));
                assert_eq!(swapping.memory.events().swap_write_errors, failed);
                assert_eq!(swapping.memory.events().pages_swapped_out, PAGES / 2);
                let kept = free + PAGES - swapping.memory.free_frame_count();
                assert_eq!(kept, PAGES / 2, "pages that were not written stay");
                let child = swapping.space.fork().unwrap();
                swapping.served(device, || {
                    swapping.assert_filled(AT, PAGES, AT);
                    let theirs = Program::new(swapping.machine, &child);
                    for page in 0..PAGES {
                        assert_eq!(theirs.load(VirtAddr(AT + page * 4096)), Ok(AT + page));
                    }
                });
                assert_eq!(device.counts().pages_read, PAGES / 2, "the others are in memory");
                audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            });
        }
    }
}

/// A folio with a piece that could not be written stays whole and is swapped out the next time.
fn a_folio_goes_out_again_after_an_error<A: Walk>() {
    let device = device(SLOTS, SwapService::AtOnce);
    with_device::<A>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        // Zeroes in the middle: two pieces, and both kinds of content.
        swapping.program.store(VirtAddr(AT + 5 * 4096), 0).unwrap();
        device.fail(|request| is_write(request) && request.slot() % 16 == 6);
        swapping.page_out(AT, 16);
        assert_eq!((device.counts().writes, device.counts().failed), (2, 1));
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        device.fail(|_| false);
        let freed = swapping.memory.reclaim(16).freed;
        assert!(freed >= 16, "the folio stays forever: {freed}");
        assert_eq!((device.counts().writes, device.counts().pages_read), (4, 0));
        swapping.assert_filled(AT, 5, AT);
        assert_eq!(swapping.program.load(VirtAddr(AT + 5 * 4096)), Ok(0));
        swapping.assert_filled(AT + 6 * 4096, 10, AT + 6);
        assert_eq!(device.counts().pages_read, 15);
        assert_eq!(swapping.memory.swap_usage().filled, 0);
    });
}

/// The device cannot read one slot: its page raises SIGBUS, and all others are swapped in. When the
/// device can read again, that page is unchanged.
fn a_read_error_is_sigbus_for_one_page<A: Walk>() {
    const BAD: u64 = 21;
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::AtOnce);
        with_device::<A>(BYTES, order, device, |swapping| {
            swapping.map(AT, 512);
            swapping.fill(AT, 512);
            swapping.page_out(AT, 512);
            assert_eq!(swapping.swapped(AT, 512), 512);
            device.fail(|request| reads(request, BAD));
            for page in 0..512 {
                let at = VirtAddr(AT + page * 4096);
                let expected = if page == BAD { Err(FaultError::Bus) } else { Ok(AT + page) };
                assert_eq!(swapping.program.load(at), expected, "page {page}, order {order}");
            }
            assert!(swapping.memory.events().swap_read_errors > 0);
            assert_eq!((swapping.swapped(AT, 512), swapping.taken()), (1, 1));
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            let bad = VirtAddr(AT + BAD * 4096);
            assert_eq!(swapping.program.store(bad, 1), Err(FaultError::Bus));
            let off = swapping.space.swap_in_area(&swapping.area);
            assert_eq!(off, Err(Error::Fault(bad)), "the area still has the page");
            device.fail(|_| false);
            assert_eq!(swapping.program.load(bad), Ok(AT + BAD));
            assert_eq!(swapping.taken(), 0);
        });
    }
}

/// A process with an unreadable page and its child exit, after which the slot is free.
#[test]
fn an_unreadable_page_can_be_unmapped() {
    let device = device(SLOTS, SwapService::AtOnce);
    with_device::<X86_64<4>>(BYTES, 4, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        let child = swapping.space.fork().unwrap();
        device.fail(|request| !is_write(request));
        let theirs = Program::new(swapping.machine, &child);
        assert_eq!(theirs.load(VirtAddr(AT)), Err(FaultError::Bus));
        assert_eq!(swapping.program.load(VirtAddr(AT)), Err(FaultError::Bus));
        drop(child);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.space.munmap(VirtAddr(AT), 16 * 4096).unwrap();
        assert_eq!(swapping.taken(), 0);
    });
}

on_every_architecture! {
    write => a_failed_write_keeps_the_page;
    again => a_folio_goes_out_again_after_an_error;
    read => a_read_error_is_sigbus_for_one_page;
}
