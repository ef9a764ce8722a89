//! `MADV_WILLNEED`: pages in swap are swapped in before their use, and nothing else changes.

use bindery::addr::VirtAddr;
use bindery::arch::{Level, X86_64};
use bindery::{
    Accounting, AddressSpace, Advice, Error, FaultError, Inspection, Protection, Sealing, Sharing,
    SwapOperation, UserfaultFeatures, UserfaultModes, UserfaultScope, WriteProtectMode,
};
use bindery_hosted::{Machine, Program, SwapFile, SwapService, Walk};

use super::fixture::{Swapping, device, with_device, with_little_memory, with_swap};
use super::shared::with_shared;
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

type Amd64 = X86_64<4>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 1024;

fn will_need<A: Walk>(swapping: &Swapping<'_, '_, A>, at: u64, pages: u64) -> Result<(), Error> {
    let result = begin(swapping, at, pages);
    audit(swapping.machine, swapping.memory, &[swapping.space]);
    result
}

/// As [`will_need`], for states in which a device may have pending requests, so no audit is
/// possible.
fn begin<A: Walk>(swapping: &Swapping<'_, '_, A>, at: u64, pages: u64) -> Result<(), Error> {
    swapping.space.madvise(VirtAddr(at), pages * PAGE, Advice::WillNeed)
}

/// The device completes all requests.
fn end<A: Walk>(swapping: &Swapping<'_, '_, A>, device: &SwapFile) {
    swapping.served(device, || swapping.memory.wait_for_swap_writes().unwrap());
    audit(swapping.machine, swapping.memory, &[swapping.space]);
}

fn major_faults<A: Walk>(swapping: &Swapping<'_, '_, A>) -> u64 {
    swapping.memory.events().major_faults
}

/// Private pages that [`Swapping::fill`] wrote, all of them in swap.
fn with_pages_out<A: Walk>(order: u8, scenario: impl FnOnce(&Swapping<'_, '_, A>)) {
    with_swap::<A>(order, 4096, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, PAGES);
        assert_eq!(swapping.swapped(AT, PAGES), PAGES);
        scenario(swapping);
    });
}

fn private_pages_are_mapped_in_runs<A: Walk>() {
    for order in [0, 4, 9] {
        with_pages_out::<A>(order, |swapping| {
            let before = swapping.space.counts();
            will_need(swapping, AT, PAGES).unwrap();
            let cost = swapping.space.counts() - before;
            assert_eq!((swapping.swapped(AT, PAGES), swapping.taken()), (0, 0));
            assert_eq!(cost.folios_touched, PAGES >> order, "one step for each folio: {cost:?}");
            if order == 9 {
                let Inspection::Page { level, .. } = swapping.space.inspect(VirtAddr(AT)) else {
                    panic!("nothing is mapped");
                };
                assert_eq!(level, Level::PMD, "a huge entry came in as one");
            }
            let written = swapping.space.counts().entries_written;
            swapping.assert_filled(AT, PAGES, AT);
            assert_eq!(swapping.space.counts().entries_written, written, "a read has faulted");
            assert_eq!(major_faults(swapping), 0);
        });
    }
}

fn the_range_alone_comes_in<A: Walk>() {
    with_pages_out::<A>(0, |swapping| {
        will_need(swapping, AT + 3 * PAGE, 600).unwrap();
        assert_eq!(swapping.swapped(AT, PAGES), PAGES - 600);
        assert_eq!(swapping.swapped(AT + 3 * PAGE, 600), 0);
        // Pages in memory and absent pages do not change.
        let before = swapping.space.counts();
        will_need(swapping, AT + 3 * PAGE, 600).unwrap();
        assert_eq!((swapping.space.counts() - before).entries_written, 0);
    });
}

fn shared_memory_comes_into_its_index<A: Walk>() {
    for order in [0, 4, 9] {
        with_shared::<A>(order, PAGES, |shared| {
            shared.page_out(0, PAGES);
            shared.assert_has(0, PAGES);
            will_need(shared.swapping, AT + 512 * PAGE, 512).unwrap();
            shared.assert_has(512, 512);
            will_need(shared.swapping, AT, PAGES).unwrap();
            shared.assert_has(PAGES, 0);
            shared.swapping.assert_filled(AT, PAGES, AT);
            assert_eq!(major_faults(shared.swapping), 0);
        });
    }
}

/// A private mapping of shared memory has both its own copies and the object's pages.
fn a_private_mapping_of_shared_memory_has_both<A: Walk>() {
    with_shared::<A>(0, 32, |shared| {
        let (swapping, own) = (shared.swapping, AT + 64 * PAGE);
        map(swapping.space, &shared.object, own, 32 * PAGE, Sharing::Private).unwrap();
        swapping.program.store(VirtAddr(own + 5 * PAGE), 5).unwrap();
        swapping.page_out(own, 32);
        shared.page_out(0, 32);
        assert_eq!((swapping.swapped(own, 32), shared.object.swapped_pages()), (1, 32));
        will_need(swapping, own, 32).unwrap();
        shared.assert_has(32, 0);
        assert_eq!(swapping.swapped(own, 32), 0);
        assert_eq!(swapping.program.load(VirtAddr(own + 5 * PAGE)), Ok(5));
        assert_eq!(swapping.program.load(VirtAddr(own + 6 * PAGE)), Ok(AT + 6));
        swapping.space.munmap(VirtAddr(own), 32 * PAGE).unwrap();
    });
}

fn a_hole_is_an_error_after_the_rest<A: Walk>() {
    with_pages_out::<A>(0, |swapping| {
        swapping.space.munmap(VirtAddr(AT + 100 * PAGE), 8 * PAGE).unwrap();
        let hole = Err(Error::NotMapped(VirtAddr(AT + 100 * PAGE)));
        assert_eq!(will_need(swapping, AT, PAGES), hole);
        assert_eq!(swapping.swapped(AT, PAGES), 0);
    });
}

fn a_fatal_signal_ends_it<A: Walk>() {
    with_pages_out::<A>(0, |swapping| {
        swapping.machine.fatal_signal_after(Some(10));
        assert_eq!(will_need(swapping, AT, PAGES), Err(Error::Interrupted));
        swapping.machine.fatal_signal_after(None);
        assert_eq!(swapping.swapped(AT, PAGES), PAGES - 10, "a run for each question");
        swapping.assert_filled(AT, PAGES, AT);
    });
    with_shared::<A>(0, PAGES, |shared| {
        shared.page_out(0, PAGES);
        shared.swapping.machine.fatal_signal_after(Some(2));
        assert_eq!(will_need(shared.swapping, AT, PAGES), Err(Error::Interrupted));
        shared.swapping.machine.fatal_signal_after(None);
        shared.assert_has(128, PAGES - 128);
    });
}

/// Maps memory at `at` and writes to its pages until memory is short. Returns the number of written
/// pages.
fn fill_until_short<A: Walk>(swapping: &Swapping<'_, '_, A>, at: u64) -> u64 {
    let mut pages = 0;
    swapping.map(at, 8192);
    while swapping.memory.shortage() == 0 {
        swapping.fill(at + pages * PAGE, 16);
        pages += 16;
    }
    pages
}

/// If memory is short, no page is swapped in and none is evicted to make room.
fn nothing_comes_in_where_memory_is_short<A: Walk>() {
    for order in [0, 4] {
        with_little_memory::<A>(16 * MIB, order, 8192, |swapping| {
            let memory = swapping.memory;
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            swapping.page_out(AT, PAGES);
            let hot = AT + GIB;
            let pages = fill_until_short(swapping, hot);
            let before = memory.events();
            will_need(swapping, AT, PAGES).unwrap();
            let after = memory.events();
            assert_eq!(after.pages_swapped_out, before.pages_swapped_out, "hot pages went out");
            assert_eq!((swapping.swapped(AT, PAGES), swapping.swapped(hot, pages)), (PAGES, 0));
            // With memory for some pages, those are swapped in, and memory is not short afterwards.
            swapping.space.munmap(VirtAddr(hot), 512 * PAGE).unwrap();
            will_need(swapping, AT, PAGES).unwrap();
            let came = PAGES - swapping.swapped(AT, PAGES);
            assert!((256..PAGES).contains(&came), "{came} pages came in");
            assert_eq!(memory.shortage(), 0);
            assert_eq!(memory.events().pages_swapped_out, before.pages_swapped_out);
        });
    }
}

fn shared_memory_stays_out_where_memory_is_short<A: Walk>() {
    with_little_memory::<A>(16 * MIB, 0, 8192, |swapping| {
        let memory = swapping.memory;
        let object = memory.shared_memory(PAGES * PAGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(swapping.space, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        swapping.fill(AT, PAGES);
        swapping.page_out(AT, PAGES);
        fill_until_short(swapping, AT + GIB);
        let before = memory.events().pages_swapped_out;
        will_need(swapping, AT, PAGES).unwrap();
        assert_eq!(memory.events().pages_swapped_out, before, "hot pages went out");
        assert_eq!(object.swapped_pages(), PAGES);
        swapping.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
    });
}

/// A child and its parent refer to the same slots. Both see the content, and each has its own copy
/// after a write.
fn entries_of_a_child_come_in<A: Walk>() {
    for order in [0, 4] {
        with_pages_out::<A>(order, |swapping| {
            let child = swapping.space.fork().unwrap();
            child.madvise(VirtAddr(AT), PAGES * PAGE, Advice::WillNeed).unwrap();
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            let program = Program::new(swapping.machine, &child);
            program.store(VirtAddr(AT + PAGE), 1).unwrap();
            will_need_beside(swapping, &child);
            assert_eq!(program.load(VirtAddr(AT + PAGE)), Ok(1));
            assert_eq!(program.load(VirtAddr(AT + 2 * PAGE)), Ok(AT + 2));
            swapping.assert_filled(AT, PAGES, AT);
            assert_eq!(major_faults(swapping), 0, "the child's pages are in the cache");
            drop(child);
        });
    }
}

fn will_need_beside<'m, A: Walk>(
    swapping: &Swapping<'_, 'm, A>,
    child: &AddressSpace<'m, Machine<A>>,
) {
    swapping.space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::WillNeed).unwrap();
    audit(swapping.machine, swapping.memory, &[swapping.space, child]);
}

fn protections_stay<A: Walk>() {
    with_pages_out::<A>(0, |swapping| {
        let space = swapping.space;
        let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        let (start, length) = (VirtAddr(AT), 16 * PAGE);
        space.register_userfault(&fd, start, length, UserfaultModes::WRITE_PROTECT).unwrap();
        space
            .handler(&fd)
            .write_protect(VirtAddr(AT + PAGE), PAGE, WriteProtectMode::PROTECT)
            .unwrap();
        let closed = VirtAddr(AT + 512 * PAGE);
        space.mprotect(closed, 512 * PAGE, Protection::empty()).unwrap();
        will_need(swapping, AT, PAGES).unwrap();
        assert_eq!(swapping.swapped(AT, PAGES), 0);
        for page in 0..16 {
            let Inspection::Page { attributes, .. } = space.inspect(VirtAddr(AT + page * PAGE))
            else {
                panic!("page {page} is not mapped");
            };
            assert_eq!(attributes.userfault, page == 1, "page {page}");
        }
        assert_eq!(swapping.program.load(closed), Err(FaultError::Protection));
        space.mprotect(closed, 512 * PAGE, Protection::READ).unwrap();
        swapping.assert_filled(AT, PAGES, AT);
        space.close_userfault(fd);
    });
}

/// The call submits reads until the request table is full and waits for none of them.
#[test]
fn a_device_is_not_waited_for() {
    for order in [0, 4] {
        let device = device(4096, SwapService::InOrder);
        with_device::<Amd64>(64 * MIB, order, device, |swapping| {
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            swapping.served(device, || swapping.page_out(AT, PAGES));
            begin(swapping, AT, PAGES).unwrap();
            assert_eq!(device.waiting(), 32);
            // A read in flight is neither repeated nor awaited.
            begin(swapping, AT, PAGES).unwrap();
            assert_eq!((device.waiting(), swapping.swapped(AT, PAGES)), (32, PAGES));
            end(swapping, device);
            let begun = 32 << order;
            swapping.assert_filled(AT, begun, AT);
            assert_eq!((device.counts().pages_read, major_faults(swapping)), (begun, 0));
            assert_eq!(swapping.memory.events().swap_read_around, 0);
            swapping.served(device, || swapping.assert_filled(AT, PAGES, AT));
            assert_eq!(device.counts().pages_read, PAGES, "each is read once");
        });
    }
}

#[test]
fn shared_memory_on_a_device_is_not_awaited() {
    let device = device(4096, SwapService::InOrder);
    with_device::<Amd64>(64 * MIB, 0, device, |swapping| {
        let memory = swapping.memory;
        let object = memory.shared_memory(64 * PAGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        map(swapping.space, &object, AT, 64 * PAGE, Sharing::Shared).unwrap();
        swapping.fill(AT, 64);
        swapping.served(device, || swapping.page_out(AT, 64));
        assert_eq!(object.swapped_pages(), 64);
        begin(swapping, AT, 64).unwrap();
        assert_eq!(device.waiting(), 32);
        end(swapping, device);
        swapping.assert_filled(AT, 32, AT);
        assert_eq!((device.counts().pages_read, major_faults(swapping)), (32, 0));
        swapping.served(device, || swapping.assert_filled(AT, 64, AT));
        swapping.space.munmap(VirtAddr(AT), 64 * PAGE).unwrap();
    });
}

/// Two mappings show pages that an early read has loaded, so no page is private to one process.
#[test]
fn early_read_shared_memory_is_mapped_twice() {
    let device = device(4096, SwapService::InOrder);
    with_device::<Amd64>(64 * MIB, 0, device, |swapping| {
        let memory = swapping.memory;
        let object = memory.shared_memory(16 * PAGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        for at in [AT, AT + GIB] {
            map(swapping.space, &object, at, 16 * PAGE, Sharing::Shared).unwrap();
        }
        swapping.fill(AT, 16);
        swapping.served(device, || swapping.page_out(AT, 16));
        assert_eq!(object.swapped_pages(), 16);
        begin(swapping, AT, 16).unwrap();
        end(swapping, device);
        swapping.assert_filled(AT, 16, AT);
        swapping.assert_filled(AT + GIB, 16, AT);
        audit(swapping.machine, memory, &[swapping.space]);
        for at in [AT, AT + GIB] {
            swapping.space.munmap(VirtAddr(at), 16 * PAGE).unwrap();
        }
    });
}

/// Word-filled pages are not on the device. They are swapped in with their neighbors and singly.
#[test]
fn filled_pages_beside_others_use_a_device() {
    let device = device(4096, SwapService::InOrder);
    with_device::<Amd64>(64 * MIB, 4, device, |swapping| {
        swapping.map(AT, 32);
        swapping.program.fill(VirtAddr(AT), 32 * PAGE, 0x5a).unwrap();
        swapping.program.store(VirtAddr(AT + 3 * PAGE), 3).unwrap();
        swapping.served(device, || swapping.page_out(AT, 32));
        begin(swapping, AT, 32).unwrap();
        assert_eq!(device.waiting(), 1);
        end(swapping, device);
        assert_eq!(swapping.program.load(VirtAddr(AT + 3 * PAGE)), Ok(3));
        for page in [2, 15, 16, 31] {
            let word = swapping.program.load(VirtAddr(AT + page * PAGE));
            assert_eq!(word, Ok(0x5a5a_5a5a_5a5a_5a5a), "page {page}");
        }
        assert_eq!((device.counts().pages_read, major_faults(swapping)), (1, 0));
    });
}

/// A page under writeback is locked and about to leave memory, so the call skips it.
#[test]
fn pages_on_their_way_out_are_passed_over() {
    let device = device(4096, SwapService::InOrder);
    with_device::<Amd64>(64 * MIB, 0, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        assert_eq!(device.waiting(), 16);
        begin(swapping, AT, 16).unwrap();
        assert_eq!((device.waiting(), swapping.swapped(AT, 16)), (16, 16));
        swapping.served(device, || swapping.assert_filled(AT, 16, AT));
    });
}

/// A page that the device cannot read causes an error only when it is accessed.
#[test]
fn a_failed_read_is_no_error_of_advice() {
    let device = device(4096, SwapService::AtOnce);
    with_device::<Amd64>(64 * MIB, 0, device, |swapping| {
        swapping.map(AT, 16);
        swapping.fill(AT, 16);
        swapping.page_out(AT, 16);
        device.fail(|request| request.operation() == SwapOperation::Read);
        begin(swapping, AT, 16).unwrap();
        end(swapping, device);
        assert_eq!(swapping.program.load(VirtAddr(AT)), Err(FaultError::Bus));
        device.fail(|_| false);
        swapping.assert_filled(AT, 16, AT);
    });
}

on_every_architecture! {
    private => private_pages_are_mapped_in_runs;
    range => the_range_alone_comes_in;
    shared => shared_memory_comes_into_its_index;
    both => a_private_mapping_of_shared_memory_has_both;
    hole => a_hole_is_an_error_after_the_rest;
    signal => a_fatal_signal_ends_it;
    short => nothing_comes_in_where_memory_is_short;
    short_of_shared => shared_memory_stays_out_where_memory_is_short;
    child => entries_of_a_child_come_in;
    protections => protections_stay;
}
