//! Shared memory on a device: pages under writeback, and requests that fail.

use std::thread;
use std::time::Duration;

use bindery::addr::{Order, VirtAddr};
use bindery::platform::Cpu;
use bindery::{
    Accounting, Advice, Error, FaultError, Object, Sealing, Sharing, SizeMode, SwapOperation,
};
use bindery_hosted::{Machine, Program, SwapFile, SwapService, Walk};

use super::fixture::{Swapping, device, with_device};
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 512;
const SLOTS: u64 = 4096;

#[track_caller]
fn with_shared<A: Walk>(
    order: u8,
    device: &'static SwapFile,
    scenario: impl FnOnce(&Swapping<'_, '_, A>, &Object<'_, Machine<A>>),
) {
    with_device::<A>(64 * MIB, order, device, |swapping| {
        let memory = swapping.memory;
        use_object_order(memory, order);
        let object = memory.shared_memory(PAGES * PAGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(swapping.space, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        swapping.fill(AT, PAGES);
        scenario(swapping, &object);
        swapping.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
    });
}

fn page_out<A: Walk>(swapping: &Swapping<'_, '_, A>) {
    swapping.space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::PageOut).unwrap();
}

fn pages_go_to_a_device_and_come_back<A: Walk>() {
    let shuffled = SwapService::Shuffled(7, Duration::from_micros(50));
    for service in [SwapService::AtOnce, SwapService::InOrder, shuffled] {
        for order in [0, 4, 9] {
            let device = device(SLOTS, service);
            with_shared::<A>(order, device, |swapping, object| {
                swapping.served(device, || {
                    page_out(swapping);
                    swapping.memory.wait_for_swap_writes().unwrap();
                    assert_eq!((object.resident_pages(), object.swapped_pages()), (0, PAGES));
                    audit(swapping.machine, swapping.memory, &[swapping.space]);
                    assert_eq!(device.counts().pages_written, PAGES);
                    swapping.assert_filled(AT, PAGES, AT);
                    assert_eq!(device.counts().pages_read, PAGES);
                    assert!(device.counts().reads <= PAGES >> order, "a folio came in parts");
                    assert_eq!(swapping.taken(), 0);
                    // Faults, calls and holes while the device still writes.
                    page_out(swapping);
                    object.punch_hole(3 * PAGE, 5 * PAGE).unwrap();
                    object.write(20 * PAGE + 8, &[1; 8]).unwrap();
                    swapping.assert_filled(AT, 3, AT);
                    swapping.assert_filled(AT + 8 * PAGE, PAGES - 8, AT + 8);
                    page_out(swapping);
                    object.set_size(100 * PAGE + 8).unwrap();
                    page_out(swapping);
                });
                audit(swapping.machine, swapping.memory, &[swapping.space]);
                assert_eq!(object.swapped_pages(), swapping.taken());
            });
        }
    }
}

/// One thread reads only page 5; the device is slow. Another thread needs the whole run and reads
/// the largest folio next to that page.
fn slots_that_two_faults_want_come_back_in_pieces<A: Walk>() {
    let device = device(SLOTS, SwapService::InOrder);
    with_shared::<A>(4, device, |swapping, object| {
        swapping.served(device, || page_out(swapping));
        let use_orders = |orders: &[u8]| {
            for order in 1..=9 {
                let mode = if orders.contains(&order) { SizeMode::Always } else { SizeMode::Never };
                swapping.memory.shared_folio_policy().set(Order(order), mode);
            }
        };
        let load = |cpu: u16, page: u64| {
            swapping.machine.on_cpu(Cpu(cpu), || {
                let program = Program::new(swapping.machine, swapping.space);
                assert_eq!(program.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
            });
        };
        thread::scope(|scope| {
            use_orders(&[]);
            let first = scope.spawn(|| load(1, 5));
            device.wait_for_request();
            use_orders(&[2, 3, 4]);
            let second = scope.spawn(|| load(2, 0));
            while device.waiting() < 2 {
                assert!(!second.is_finished(), "it has read nothing");
                thread::yield_now();
            }
            while !(first.is_finished() && second.is_finished()) {
                device.serve_one(swapping.memory);
            }
        });
        assert_eq!((object.resident_pages(), device.counts().pages_read), (5, 5));
        swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
        assert_eq!((device.counts().pages_read, swapping.taken()), (PAGES, 0));
    });
}

fn a_failed_write_keeps_the_pages<A: Walk>() {
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::AtOnce);
        with_shared::<A>(order, device, |swapping, object| {
            device.fail(|request| request.operation() == SwapOperation::Write);
            page_out(swapping);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            assert_eq!(object.swapped_pages(), PAGES);
            device.fail(|_| false);
            swapping.assert_filled(AT, PAGES, AT);
            assert_eq!((device.counts().pages_read, swapping.taken()), (0, 0));
        });
    }
}

/// The device cannot read one slot: an access to its page gets SIGBUS, a read an error, and all
/// others are swapped in. When the device can read again, that page is unchanged.
fn a_read_error_loses_nothing_else<A: Walk>() {
    const BAD: u64 = 21;
    for order in [0, 4, 9] {
        let device = device(SLOTS, SwapService::AtOnce);
        with_shared::<A>(order, device, |swapping, object| {
            page_out(swapping);
            device.fail(|request| {
                let end = request.slot() + u64::from(request.pages());
                request.operation() == SwapOperation::Read && (request.slot()..end).contains(&BAD)
            });
            for page in 0..PAGES {
                let at = VirtAddr(AT + page * PAGE);
                let expected = if page == BAD { Err(FaultError::Bus) } else { Ok(AT + page) };
                assert_eq!(swapping.program.load(at), expected, "page {page}, order {order}");
            }
            assert_eq!((object.swapped_pages(), swapping.taken()), (1, 1));
            assert_eq!(object.read(BAD * PAGE, &mut [0; 8]), Err(Error::InputOutput));
            assert_eq!(object.write(BAD * PAGE, &[0; 8]), Err(Error::InputOutput));
            assert_eq!(object.punch_hole(BAD * PAGE, 8), Err(Error::InputOutput));
            let off = swapping.memory.swap_in_objects(&swapping.area);
            assert_eq!(off, Err(Error::InputOutput), "the area still has the page");
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            device.fail(|_| false);
            assert_eq!(swapping.program.load(VirtAddr(AT + BAD * PAGE)), Ok(AT + BAD));
            assert_eq!(swapping.taken(), 0);
        });
    }
}

on_every_architecture! {
    wanted => slots_that_two_faults_want_come_back_in_pieces;
    device => pages_go_to_a_device_and_come_back;
    write => a_failed_write_keeps_the_pages;
    read => a_read_error_loses_nothing_else;
}
