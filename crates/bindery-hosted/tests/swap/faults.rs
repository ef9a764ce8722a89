//! Faults on pages in swap: the faults that count as major, and the results if the page cannot be
//! mapped.

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::testing::{FolioDamage, damage_folio};
use bindery::{Access, Advice, FaultError, Inspection};
use bindery_hosted::Walk;

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, fixed};

const AT: u64 = GIB;
const PAGE: u64 = 4096;

fn page_out<A: Walk>(swapping: &Swapping<'_, '_, A>, pages: u64) {
    swapping.space.madvise(VirtAddr(AT), pages * PAGE, Advice::PageOut).unwrap();
    assert_eq!(swapping.swapped(AT, pages), pages);
}

fn major_faults<A: Walk>(swapping: &Swapping<'_, '_, A>) -> u64 {
    swapping.memory.events().major_faults
}

fn a_fault_that_reads_is_major<A: Walk>() {
    for (order, faults) in [(0, 32), (4, 2)] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.space.mmap(&fixed(AT, 32 * PAGE)).unwrap();
            swapping.fill(AT, 32);
            assert_eq!(major_faults(swapping), 0, "new pages are not read");
            page_out(swapping, 32);
            swapping.assert_filled(AT, 32, AT);
            assert_eq!(major_faults(swapping), faults);
            // A page of one repeated word is not in the store but counts as read nevertheless.
            swapping.program.fill(VirtAddr(AT), 32 * PAGE, 0x5a).unwrap();
            page_out(swapping, 32);
            for page in 0..32 {
                swapping.program.load(VirtAddr(AT + page * PAGE)).unwrap();
            }
            assert_eq!(major_faults(swapping), 2 * faults);
            // Swapoff does not count as a fault.
            page_out(swapping, 32);
            swapping.memory.stop_swapping_to(&swapping.area);
            swapping.space.swap_in_area(&swapping.area).unwrap();
            assert_eq!(major_faults(swapping), 2 * faults);
        });
    }
}

fn a_page_that_is_in_the_cache_is_not_read<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        swapping.space.mmap(&fixed(AT, PAGE)).unwrap();
        swapping.fill(AT, 1);
        page_out(swapping, 1);
        let child = swapping.space.fork().unwrap();
        child.fault(VirtAddr(AT), Access::Read).unwrap();
        assert_eq!(major_faults(swapping), 1);
        swapping.assert_filled(AT, 1, AT);
        assert_eq!(major_faults(swapping), 1, "the child has read it");
    });
}

/// The fault fails without any change and may be retried.
fn a_page_with_too_many_mappings_is_refused<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        swapping.space.mmap(&fixed(AT, PAGE)).unwrap();
        swapping.fill(AT, 1);
        page_out(swapping, 1);
        let child = swapping.space.fork().unwrap();
        child.fault(VirtAddr(AT), Access::Read).unwrap();
        let Inspection::Page { frame, .. } = child.inspect(VirtAddr(AT)) else {
            panic!("the child has no page");
        };
        damage_folio(swapping.memory, frame, FolioDamage::Mappings(i32::MAX - 1));
        for access in [Access::Read, Access::Write] {
            let refused = swapping.space.fault(VirtAddr(AT), access);
            assert_eq!(refused, Err(FaultError::OutOfMemory));
        }
        assert_eq!(swapping.swapped(AT, 1), 1);
        damage_folio(swapping.memory, frame, FolioDamage::Mappings(1 - i32::MAX));
        swapping.assert_filled(AT, 1, AT);
    });
}

#[test]
fn a_file_read_by_the_pager_faults_majorly() {
    use crate::support::objects_fixture::{map, with_fixture};
    let files = bindery_hosted::MemoryFiles::new();
    files.put(1, &[7; 4096]);
    with_fixture::<X86_64<4>>(0, |fixture| {
        let space = fixture.space();
        let file = fixture.memory.file(&files, 1, PAGE).unwrap();
        map(&space, &file, AT, PAGE, bindery::Sharing::Shared).unwrap();
        let major_faults = || fixture.memory.events().major_faults;
        space.fault(VirtAddr(AT), Access::Read).unwrap();
        assert_eq!(major_faults(), 1);
        space.discard(VirtAddr(AT), PAGE).unwrap();
        space.fault(VirtAddr(AT), Access::Read).unwrap();
        assert_eq!(major_faults(), 1, "the page was there");
    });
}

on_every_architecture! {
    major => a_fault_that_reads_is_major;
    minor => a_page_that_is_in_the_cache_is_not_read;
    too_many => a_page_with_too_many_mappings_is_refused;
}
