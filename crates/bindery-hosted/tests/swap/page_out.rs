//! `MADV_PAGEOUT`: pages are swapped out and in with their complete state.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::{AArch64, Absent, Level, X86_64};
use bindery::{
    Access, Advice, Inspection, MapRequest, PinTime, Protection, Remap, Sharing, SizeMode,
};
use bindery_hosted::{Program, Walk};
use bindery_linux::proc::{ClearRefs, clear_refs};

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, MIB, audit, fixed};

const AT: u64 = GIB;

fn map<A: Walk>(swapping: &Swapping<'_, '_, A>, pages: u64) {
    swapping.space.mmap(&fixed(AT, pages * 4096)).unwrap();
}

fn page_out<A: Walk>(swapping: &Swapping<'_, '_, A>, at: u64, pages: u64) {
    swapping.space.madvise(VirtAddr(at), pages * 4096, Advice::PageOut).unwrap();
}

fn out_and_in<A: Walk>(order: u8, pages: u64) {
    with_swap::<A>(order, 4096, |swapping| {
        map(swapping, pages);
        swapping.fill(AT, pages);
        let free = swapping.memory.free_frame_count();
        let before = swapping.space.counts();
        page_out(swapping, AT, pages);
        let cost = swapping.space.counts() - before;
        assert_eq!(swapping.swapped(AT, pages), pages);
        assert_eq!(swapping.taken(), pages);
        assert_eq!(swapping.space.counts().swap_pages, pages);
        assert!(cost.invalidations <= pages.div_ceil(512), "{cost:?}");
        assert!(swapping.memory.free_frame_count() >= free, "the store holds the content now");
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.assert_filled(AT, pages, AT);
        assert_eq!(swapping.taken(), 0, "exclusive pages that came back keep slots");
        assert_eq!(swapping.space.counts().swap_pages, 0);
        // The pages are written once more and swapped out again.
        swapping.fill(AT, pages);
        page_out(swapping, AT, pages);
        assert_eq!(swapping.swapped(AT, pages), pages);
        swapping.fill(AT, pages);
        swapping.assert_filled(AT, pages, AT);
    });
}

fn base_pages_go_out_and_come_back<A: Walk>() {
    out_and_in::<A>(0, 700);
}

fn folios_go_out_and_come_back<A: Walk>() {
    out_and_in::<A>(4, 1024);
}

fn huge_folios_go_out_and_come_back<A: Walk>() {
    out_and_in::<A>(9, 1024);
}

fn a_run_comes_back_as_one_folio<A: Walk>() {
    for (order, pages) in [(4, 32), (9, 512)] {
        with_swap::<A>(order, 4096, |swapping| {
            map(swapping, 1024);
            swapping.fill(AT, pages);
            page_out(swapping, AT, pages);
            let before = swapping.space.counts();
            assert_eq!(swapping.program.load(VirtAddr(AT + 4096)), Ok(AT + 1));
            let cost = swapping.space.counts() - before;
            assert_eq!(swapping.swapped(AT, pages), pages - (1 << order));
            assert_eq!(cost.folios_touched, 1, "{cost:?}");
            let Inspection::Page { level, .. } = swapping.space.inspect(VirtAddr(AT)) else {
                panic!("the page is not mapped");
            };
            assert_eq!(level, if order == 9 { Level::PMD } else { Level::PTE });
        });
    }
}

/// The pages that the MMU may cache together.
fn folded<A: Walk>(swapping: &Swapping<'_, '_, A>, pages: u64) -> Vec<bool> {
    let is_folded = |page: u64| match swapping.space.inspect(VirtAddr(AT + page * 4096)) {
        Inspection::Page { contiguous, .. } => contiguous,
        other => panic!("{other:?}"),
    };
    (0..pages).map(is_folded).collect()
}

/// If the architecture folds entries, the entries of a swapped-in folio are folded as before, for
/// private and for shared memory.
fn a_run_that_comes_back_is_folded<A: Walk>() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        with_swap::<A>(4, 4096, |swapping| {
            swapping.memory.shared_folio_policy().set(Order(4), SizeMode::Always);
            let request = MapRequest { sharing, ..fixed(AT, 64 * 4096) };
            swapping.space.mmap(&request).unwrap();
            swapping.fill(AT, 64);
            let before = folded(swapping, 64);
            assert!(before.iter().all(|page| *page == before[0]));
            page_out(swapping, AT, 64);
            assert_eq!(swapping.swapped(AT, 64), if sharing == Sharing::Private { 64 } else { 0 });
            assert_eq!(swapping.taken(), 64);
            swapping.assert_filled(AT, 64, AT);
            assert_eq!(folded(swapping, 64), before);
            swapping.space.munmap(VirtAddr(AT), 64 * 4096).unwrap();
        });
    }
}

#[test]
fn entries_of_64_kib_are_refolded_on_aarch64() {
    with_swap::<AArch64>(4, 4096, |swapping| {
        map(swapping, 64);
        swapping.fill(AT, 64);
        page_out(swapping, AT, 64);
        for folio in 0..4 {
            let at = AT + (folio * 16 + 5) * 4096;
            swapping.assert_filled(at, 1, AT + folio * 16 + 5);
        }
        assert_eq!(folded(swapping, 64), [true; 64]);
    });
}

fn zeroes_and_patterns_need_no_store<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        map(swapping, 64);
        swapping.program.fill(VirtAddr(AT), 32 * 4096, 0).unwrap();
        swapping.program.fill(VirtAddr(AT + 32 * 4096), 32 * 4096, 0x5a).unwrap();
        let free = swapping.memory.free_frame_count();
        page_out(swapping, AT, 64);
        assert_eq!(swapping.memory.free_frame_count(), free + 64, "something was stored");
        assert_eq!(swapping.program.load(VirtAddr(AT + 4096)), Ok(0));
        assert_eq!(swapping.program.load(VirtAddr(AT + 40 * 4096 + 8)), Ok(0x5a5a_5a5a_5a5a_5a5a));
    });
}

fn unmapping_frees_the_slots<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            map(swapping, 1024);
            swapping.fill(AT, 1024);
            page_out(swapping, AT, 1024);
            assert_eq!(swapping.taken(), 1024);
            // A part of a folio, the edges of tables, and the rest.
            swapping.space.munmap(VirtAddr(AT + 5 * 4096), 7 * 4096).unwrap();
            assert_eq!(swapping.taken(), 1024 - 7);
            swapping.space.discard(VirtAddr(AT + 500 * 4096), 20 * 4096).unwrap();
            assert_eq!(swapping.taken(), 1024 - 27);
            swapping.assert_filled(AT, 5, AT);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.assert_filled(AT + 12 * 4096, 488, AT + 12);
            assert_eq!(swapping.program.load(VirtAddr(AT + 510 * 4096)), Ok(0));
            swapping.space.munmap(VirtAddr(AT), 4 * MIB).unwrap();
            assert_eq!(swapping.taken(), 0);
        });
    }
}

fn a_move_takes_swap_entries_along<A: Walk>() {
    for (order, off) in [(0, 0), (4, 4096), (9, 2 * MIB), (9, 4096)] {
        with_swap::<A>(order, 4096, |swapping| {
            map(swapping, 1024);
            swapping.fill(AT, 1024);
            page_out(swapping, AT, 1024);
            let to = 4 * AT + off;
            let remap = Remap::To(VirtAddr(to));
            swapping.space.mremap(VirtAddr(AT), 4 * MIB, 4 * MIB, remap).unwrap();
            assert_eq!(swapping.swapped(to, 1024), 1024);
            assert_eq!(swapping.taken(), 1024);
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.assert_filled(to, 1024, AT);
        });
    }
}

fn both_sides_of_a_fork_find_the_content<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            map(swapping, 512);
            swapping.fill(AT, 512);
            page_out(swapping, AT, 512);
            let child = swapping.space.fork().unwrap();
            assert_eq!(swapping.taken(), 512);
            let theirs = Program::new(swapping.machine, &child);
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            // The child writes first, and the parent must not see the write.
            theirs.store(VirtAddr(AT), 1).unwrap();
            assert_eq!(swapping.program.load(VirtAddr(AT)), Ok(AT));
            swapping.program.store(VirtAddr(AT + 4096), 2).unwrap();
            assert_eq!(theirs.load(VirtAddr(AT + 4096)), Ok(AT + 1));
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            swapping.assert_filled(AT + 8192, 510, AT + 2);
            for page in 2..512 {
                assert_eq!(theirs.load(VirtAddr(AT + page * 4096)), Ok(AT + page));
            }
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            assert_eq!(swapping.taken(), 0);
            drop(child);
            swapping.program.store(VirtAddr(AT + 8192), 7).unwrap();
        });
    }
}

fn what_others_map_or_hold_stays<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            map(swapping, 32);
            swapping.fill(AT, 32);
            let pinned =
                swapping.space.pin(VirtAddr(AT), 1, Access::Write, PinTime::Short).unwrap();
            page_out(swapping, AT, 32);
            assert_eq!(swapping.swapped(AT, 32), 32 - (1 << order), "a pinned folio went out");
            drop(pinned);
            page_out(swapping, AT, 32);
            assert_eq!(swapping.swapped(AT, 32), 32);
            swapping.assert_filled(AT, 32, AT);
            let child = swapping.space.fork().unwrap();
            page_out(swapping, AT, 32);
            assert_eq!(swapping.swapped(AT, 32), 0, "as on Linux, shared folios stay");
            drop(child);
            page_out(swapping, AT, 32);
            assert_eq!(swapping.swapped(AT, 32), 32);
        });
    }
}

/// After a fork, pages that both processes map stay, and pages that the child has since copied are
/// swapped out, wherever they lie among the shared pages.
fn pages_that_are_mapped_twice_are_passed_over<A: Walk>() {
    with_swap::<A>(0, 4096, |swapping| {
        map(swapping, 1024);
        swapping.fill(AT, 1024);
        let child = swapping.space.fork().unwrap();
        let theirs = Program::new(swapping.machine, &child);
        let copied = [0, 3, 4, 20, 511, 512, 700, 1023];
        for page in copied {
            theirs.store(VirtAddr(AT + page * 4096), 7).unwrap();
        }
        page_out(swapping, AT + 4096, 1022);
        for page in 0..1024 {
            let goes = copied.contains(&page) && (1..1023).contains(&page);
            assert_eq!(swapping.swapped(AT + page * 4096, 1) == 1, goes, "page {page}");
        }
        audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
        swapping.assert_filled(AT, 1024, AT);
    });
}

fn a_full_area_keeps_what_does_not_fit<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 96, |swapping| {
            map(swapping, 256);
            swapping.fill(AT, 256);
            page_out(swapping, AT, 256);
            assert_eq!(swapping.swapped(AT, 256), 96);
            assert_eq!(swapping.taken(), 96);
            swapping.assert_filled(AT, 256, AT);
        });
    }
}

fn a_partly_unmapped_folio_goes_out<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        map(swapping, 64);
        swapping.fill(AT, 64);
        swapping.space.munmap(VirtAddr(AT + 3 * 4096), 5 * 4096).unwrap();
        swapping.space.munmap(VirtAddr(AT), 3 * 4096).unwrap();
        page_out(swapping, AT + 8 * 4096, 56);
        assert_eq!(swapping.swapped(AT + 8 * 4096, 56), 56);
        assert_eq!(swapping.taken(), 56, "pages that nobody maps have no slots");
        swapping.assert_filled(AT + 8 * 4096, 56, AT + 8);
    });
}

fn entries_of_unequal_flags_keep_them<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        map(swapping, 32);
        swapping.fill(AT, 32);
        clear_refs(swapping.space, ClearRefs::SoftDirty).unwrap();
        for page in [1, 2, 9, 20] {
            swapping.program.store(VirtAddr(AT + page * 4096), AT + page).unwrap();
        }
        page_out(swapping, AT, 32);
        assert_eq!(swapping.swapped(AT, 32), 32);
        for page in 0..32 {
            let Inspection::Absent(Absent::Swap { soft_dirty, .. }) =
                swapping.space.inspect(VirtAddr(AT + page * 4096))
            else {
                panic!("page {page} is not in swap");
            };
            assert_eq!(soft_dirty, [1, 2, 9, 20].contains(&page), "page {page}");
        }
        swapping.assert_filled(AT, 32, AT);
    });
}

fn a_mapping_without_access_keeps_its_pages<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        map(swapping, 64);
        swapping.fill(AT, 64);
        page_out(swapping, AT, 64);
        swapping.space.mprotect(VirtAddr(AT), 64 * 4096, Protection::empty()).unwrap();
        assert!(swapping.program.load(VirtAddr(AT)).is_err());
        swapping.memory.stop_swapping_to(&swapping.area);
        swapping.space.swap_in_area(&swapping.area).unwrap();
        assert_eq!(swapping.taken(), 0);
        assert!(swapping.program.load(VirtAddr(AT)).is_err());
        let both = Protection::READ | Protection::WRITE;
        swapping.space.mprotect(VirtAddr(AT), 64 * 4096, both).unwrap();
        swapping.assert_filled(AT, 64, AT);
    });
}

fn lazily_freed_pages_vanish_unless_they_were_written_again<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            map(swapping, 1024);
            swapping.fill(AT, 1024);
            swapping.space.madvise(VirtAddr(AT), 4 * MIB, Advice::Free).unwrap();
            for page in [3, 700] {
                swapping.program.store(VirtAddr(AT + page * 4096), 7).unwrap();
            }
            let free = swapping.memory.free_frame_count();
            page_out(swapping, AT, 1024);
            // The written folios stay and are swapped out the next time.
            assert_eq!(swapping.taken(), 0);
            let kept = 2 << order;
            assert!(swapping.memory.free_frame_count() >= free + 1024 - kept);
            assert_eq!(swapping.program.load(VirtAddr(AT + 3 * 4096)), Ok(7));
            assert_eq!(swapping.program.load(VirtAddr(AT + 700 * 4096)), Ok(7));
            let there = swapping.program.load(VirtAddr(AT + 4096)).unwrap();
            assert_eq!(there, if order == 0 { 0 } else { AT + 1 });
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            page_out(swapping, AT, 1024);
            assert!(swapping.taken() >= kept);
            assert_eq!(swapping.program.load(VirtAddr(AT + 3 * 4096)), Ok(7));
        });
    }
}

#[test]
fn a_forced_write_copies_without_loss() {
    with_swap::<X86_64<4>>(4, 4096, |swapping| {
        map(swapping, 16);
        swapping.fill(AT, 16);
        page_out(swapping, AT, 16);
        let child = swapping.space.fork().unwrap();
        drop(child);
        // No other entry refers to the slots, but these entries do not show that.
        swapping.fill(AT, 16);
        swapping.assert_filled(AT, 16, AT);
        assert_eq!(swapping.taken(), 0);
    });
}

on_every_architecture! {
    base_pages => base_pages_go_out_and_come_back;
    folios => folios_go_out_and_come_back;
    huge_folios => huge_folios_go_out_and_come_back;
    one_folio => a_run_comes_back_as_one_folio;
    folded => a_run_that_comes_back_is_folded;
    zeroes => zeroes_and_patterns_need_no_store;
    unmapping => unmapping_frees_the_slots;
    moves => a_move_takes_swap_entries_along;
    forks => both_sides_of_a_fork_find_the_content;
    held => what_others_map_or_hold_stays;
    twice => pages_that_are_mapped_twice_are_passed_over;
    full => a_full_area_keeps_what_does_not_fit;
    partly => a_partly_unmapped_folio_goes_out;
    flags => entries_of_unequal_flags_keep_them;
    lazy => lazily_freed_pages_vanish_unless_they_were_written_again;
    no_access => a_mapping_without_access_keeps_its_pages;
}
