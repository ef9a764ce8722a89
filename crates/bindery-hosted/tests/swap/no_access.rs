//! Memory that a program keeps without access. It is swapped out like any other memory and swapped
//! in under `PROT_NONE` with its whole state.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::{AArch64, Absent, X86_64};
use bindery::{
    AddressSpace, Advice, FaultError, Inspection, MapRequest, Protection, Sharing, SizeMode,
    UserfaultFeatures, UserfaultModes, UserfaultScope, WriteProtectMode, testing,
};
use bindery_hosted::{Machine, Program, Walk};
use bindery_linux::proc::{ClearRefs, PhysicalAddresses, clear_refs, pagemap, smaps_rollup};

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, READ_WRITE, audit, fixed};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 512;
const LENGTH: u64 = PAGES * PAGE;

type Scenario<'f, A> = &'f dyn Fn(&Swapping<'_, '_, A>);

/// For each folio size, filled memory to which all access was then removed.
fn without_access<A: Walk>(scenario: Scenario<'_, A>) {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            swapping.space.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
            scenario(swapping);
        });
    }
}

/// Asserts that the pages are in swap and are swapped in once access is allowed.
#[track_caller]
fn assert_out_and_in<A: Walk>(swapping: &Swapping<'_, '_, A>) {
    assert_eq!(swapping.swapped(AT, PAGES), PAGES);
    assert_eq!((swapping.taken(), swapping.space.counts().swap_pages), (PAGES, PAGES));
    assert_eq!(swapping.space.resident().anonymous, 0);
    audit(swapping.machine, swapping.memory, &[swapping.space]);
    assert!(swapping.program.load(VirtAddr(AT)).is_err());
    assert_eq!(swapping.taken(), PAGES, "an access that is refused brings nothing in");
    swapping.space.mprotect(VirtAddr(AT), LENGTH, READ_WRITE).unwrap();
    swapping.assert_filled(AT, PAGES, AT);
    assert_eq!(swapping.taken(), 0, "pages that came back exclusive have no slots");
    swapping.fill(AT, PAGES);
    assert_eq!(swapping.space.resident().anonymous, PAGES);
}

fn advice_sends_it_out<A: Walk>() {
    without_access::<A>(&|swapping| {
        swapping.page_out(AT, PAGES);
        assert_out_and_in(swapping);
    });
}

fn reclaim_sends_it_out<A: Walk>() {
    without_access::<A>(&|swapping| {
        let reclaimed = swapping.memory.reclaim(PAGES);
        assert!(reclaimed.freed >= PAGES, "{reclaimed:?}");
        assert_out_and_in(swapping);
    });
}

fn what_was_noted_of_a_page_is_kept<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, 32);
            swapping.fill(AT, 32);
            clear_refs(swapping.space, ClearRefs::SoftDirty).unwrap();
            for page in [1, 2, 9, 20] {
                swapping.program.store(VirtAddr(AT + page * PAGE), AT + page).unwrap();
            }
            swapping.space.mprotect(VirtAddr(AT), 32 * PAGE, Protection::empty()).unwrap();
            swapping.page_out(AT, 32);
            for page in 0..32 {
                let found = swapping.space.inspect(VirtAddr(AT + page * PAGE));
                let Inspection::Absent(Absent::Swap { soft_dirty, exclusive, .. }) = found else {
                    panic!("page {page}: {found:?}");
                };
                assert_eq!(soft_dirty, [1, 2, 9, 20].contains(&page), "page {page}");
                assert!(exclusive, "page {page}");
            }
            swapping.space.mprotect(VirtAddr(AT), 32 * PAGE, Protection::READ).unwrap();
            swapping.assert_filled(AT, 32, AT);
        });
    }
}

/// Recently used pages of memory without access are evicted later.
fn what_was_used_goes_later<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        // The clock hand reaches the cold pages among the others.
        let (part, cold) = (PAGES / 4, AT + LENGTH / 4);
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        swapping.space.madvise(VirtAddr(cold), 2 * part * PAGE, Advice::Cold).unwrap();
        swapping.space.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
        swapping.memory.reclaim(2 * part);
        assert_eq!(swapping.swapped(cold, 2 * part), 2 * part);
        assert_eq!(swapping.swapped(AT, PAGES), 2 * part, "what was used went out, too");
    });
}

fn swapoff_brings_it_back_without_access<A: Walk>() {
    without_access::<A>(&|swapping| {
        swapping.page_out(AT, PAGES);
        assert_eq!(swapping.swapped(AT, PAGES), PAGES);
        swapping.memory.stop_swapping_to(&swapping.area);
        swapping.space.swap_in_area(&swapping.area).unwrap();
        assert_eq!(swapping.taken(), 0);
        for page in 0..PAGES {
            let found = swapping.space.inspect(VirtAddr(AT + page * PAGE));
            assert!(matches!(found, Inspection::Absent(Absent::ProtNone { .. })), "{found:?}");
        }
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.space.mprotect(VirtAddr(AT), LENGTH, READ_WRITE).unwrap();
        swapping.assert_filled(AT, PAGES, AT);
    });
}

/// The pages in the `Swap:` field and bits of the page map.
fn what_proc_says<A: Walk>(swapping: &Swapping<'_, '_, A>, pages: usize) -> (u64, Vec<u64>) {
    let mut text = String::new();
    smaps_rollup(swapping.space, &mut text).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Swap:")).unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    let mut words = vec![0; pages];
    pagemap(swapping.space, AT / PAGE, PhysicalAddresses::Withheld, &mut words);
    (kib / (PAGE / 1024), words)
}

/// `/proc` reports swapped-out pages, and the protection of a userfaultfd still holds after the
/// swap-in.
fn proc_and_a_userfaultfd_know_of_it<A: Walk>() {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const WRITE_PROTECTED: u64 = 1 << 57;
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            let (space, start) = (swapping.space, VirtAddr(AT));
            swapping.map(AT, 32);
            swapping.fill(AT, 32);
            let fd = space.userfault(UserfaultFeatures::SIGBUS, UserfaultScope::All).unwrap();
            space.register_userfault(&fd, start, 32 * PAGE, UserfaultModes::WRITE_PROTECT).unwrap();
            let protected = VirtAddr(AT + 8 * PAGE);
            space
                .handler(&fd)
                .write_protect(protected, 8 * PAGE, WriteProtectMode::PROTECT)
                .unwrap();
            space.mprotect(start, 32 * PAGE, Protection::empty()).unwrap();
            assert_eq!(what_proc_says(swapping, 32).0, 0);
            swapping.page_out(AT, 32);
            let (out, words) = what_proc_says(swapping, 32);
            assert_eq!(out, 32);
            let is_protected = |page: usize| (8..16).contains(&page);
            for (page, word) in words.into_iter().enumerate() {
                assert_eq!(word & (PRESENT | SWAPPED), SWAPPED, "page {page}");
                assert_eq!(word & WRITE_PROTECTED != 0, is_protected(page), "page {page}");
            }
            space.mprotect(start, 32 * PAGE, READ_WRITE).unwrap();
            swapping.assert_filled(AT, 32, AT);
            for page in 0..32 {
                let at = VirtAddr(AT + page as u64 * PAGE);
                let stored = if is_protected(page) { Err(FaultError::Bus) } else { Ok(()) };
                assert_eq!(swapping.program.store(at, 1), stored, "page {page}");
            }
            assert_eq!(what_proc_says(swapping, 32).0, 0);
            space.close_userfault(fd);
        });
    }
}

fn a_part_of_a_folio_goes<A: Walk>() {
    without_access::<A>(&|swapping| {
        swapping.page_out(AT + 3 * PAGE, 250);
        assert_eq!(swapping.swapped(AT, PAGES), 250);
        assert_eq!(swapping.swapped(AT + 3 * PAGE, 250), 250);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.space.mprotect(VirtAddr(AT), LENGTH, READ_WRITE).unwrap();
        swapping.assert_filled(AT, PAGES, AT);
    });
}

/// A folio that another thread has locked keeps its entries and is swapped out later.
fn a_locked_folio_stays<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            let (pages, kept) = (32_u64, 1_u64 << order);
            swapping.map(AT, pages);
            swapping.fill(AT, pages);
            swapping.space.madvise(VirtAddr(AT), pages * PAGE, Advice::Cold).unwrap();
            swapping.space.mprotect(VirtAddr(AT), pages * PAGE, Protection::empty()).unwrap();
            let locked = AT + 16 * PAGE;
            let before = swapping.space.inspect(VirtAddr(locked));
            let Inspection::Absent(Absent::ProtNone { frame, .. }) = before else {
                panic!("{before:?}");
            };
            testing::with_folio_locked(swapping.memory, frame, || {
                swapping.page_out(AT, pages);
                swapping.memory.reclaim(pages);
                assert_eq!(swapping.space.inspect(VirtAddr(locked)), before);
                assert_eq!(
                    (swapping.swapped(AT, pages), swapping.taken()),
                    (pages - kept, pages - kept)
                );
            });
            swapping.page_out(AT, pages);
            assert_eq!(swapping.swapped(AT, pages), pages);
            swapping.space.mprotect(VirtAddr(AT), pages * PAGE, READ_WRITE).unwrap();
            swapping.assert_filled(AT, pages, AT);
        });
    }
}

fn pages_out<'m, A: Walk>(space: &AddressSpace<'m, Machine<A>>) -> u64 {
    space.counts().swap_pages
}

/// A child that may not access what its parent may.
fn what_a_family_shares_goes<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            let child = swapping.space.fork().unwrap();
            child.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
            swapping.memory.reclaim(PAGES);
            assert_eq!((pages_out(swapping.space), pages_out(&child)), (PAGES, PAGES));
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            child.mprotect(VirtAddr(AT), LENGTH, READ_WRITE).unwrap();
            let theirs = Program::new(swapping.machine, &child);
            theirs.store(VirtAddr(AT), 1).unwrap();
            swapping.assert_filled(AT, PAGES, AT);
            assert_eq!(theirs.load(VirtAddr(AT + PAGE)), Ok(AT + 1));
            // The cache holds the pages that the parent has swapped in; the child's entries stay
            // inaccessible.
            child.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
            swapping.page_out(AT, PAGES);
            child.madvise(VirtAddr(AT), LENGTH, Advice::PageOut).unwrap();
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            swapping.assert_filled(AT, PAGES, AT);
        });
    }
}

/// Shared memory is swapped out through its object.
fn shared_memory_goes<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.memory.shared_folio_policy().set(Order(order), SizeMode::Always);
            let request = MapRequest { sharing: Sharing::Shared, ..fixed(AT, LENGTH) };
            swapping.space.mmap(&request).unwrap();
            for advised in [true, false] {
                swapping.space.mprotect(VirtAddr(AT), LENGTH, READ_WRITE).unwrap();
                swapping.fill(AT, PAGES);
                swapping.space.mprotect(VirtAddr(AT), LENGTH, Protection::empty()).unwrap();
                if advised {
                    swapping.page_out(AT, PAGES);
                } else {
                    swapping.memory.reclaim(PAGES);
                }
                assert_eq!(swapping.taken(), PAGES, "order {order}, by advice: {advised}");
            }
            swapping.space.mprotect(VirtAddr(AT), LENGTH, READ_WRITE).unwrap();
            swapping.assert_filled(AT, PAGES, AT);
            swapping.space.munmap(VirtAddr(AT), LENGTH).unwrap();
        });
    }
}

fn all<A: Walk>() {
    proc_and_a_userfaultfd_know_of_it::<A>();
    what_was_noted_of_a_page_is_kept::<A>();
    what_was_used_goes_later::<A>();
    a_part_of_a_folio_goes::<A>();
    a_locked_folio_stays::<A>();
    what_a_family_shares_goes::<A>();
    shared_memory_goes::<A>();
}

#[test]
fn the_rest_on_x86_64() {
    all::<X86_64<4>>();
}

#[test]
fn the_rest_on_aarch64() {
    all::<AArch64>();
}

on_every_architecture! {
    advice => advice_sends_it_out;
    reclaimed => reclaim_sends_it_out;
    swapoff => swapoff_brings_it_back_without_access;
}
