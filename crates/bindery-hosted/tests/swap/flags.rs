//! Swap entries with different flags, and markers between them: each entry keeps its own flags.

use bindery::addr::VirtAddr;
use bindery::arch::{Absent, Marker};
use bindery::{
    Advice, FaultError, Inspection, UserfaultFeatures, UserfaultModes, UserfaultScope,
    WriteProtectMode, testing,
};
use bindery_hosted::Walk;

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, audit};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 32;

/// For each page in swap, whether it is exclusive and whether it is write-protected for a
/// userfaultfd.
fn flags<A: Walk>(swapping: &Swapping<'_, '_, A>) -> Vec<(bool, bool)> {
    let of = |page: u64| match swapping.space.inspect(VirtAddr(AT + page * PAGE)) {
        Inspection::Absent(Absent::Swap { exclusive, userfault, .. }) => (exclusive, userfault),
        other => panic!("page {page} is not in swap: {other:?}"),
    };
    (0..PAGES).map(of).collect()
}

/// Protected pages in the middle of a folio are swapped out with the other pages and are still
/// protected after the swap-in.
fn write_protected_pages_stay_protected<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, PAGES);
            let space = swapping.space;
            let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
            let (start, length) = (VirtAddr(AT), PAGES * PAGE);
            space.register_userfault(&fd, start, length, UserfaultModes::WRITE_PROTECT).unwrap();
            swapping.fill(AT, PAGES);
            let protected = [3, 4, 5, 15, 16, 31];
            for page in protected {
                let at = VirtAddr(AT + page * PAGE);
                space.handler(&fd).write_protect(at, PAGE, WriteProtectMode::PROTECT).unwrap();
            }
            swapping.page_out(AT, PAGES);
            for (page, (exclusive, userfault)) in (0..).zip(flags(swapping)) {
                assert_eq!((exclusive, userfault), (true, protected.contains(&page)), "{page}");
            }
            audit(swapping.machine, swapping.memory, &[space]);
            swapping.assert_filled(AT, PAGES, AT);
            for page in 0..PAGES {
                let Inspection::Page { attributes, .. } = space.inspect(VirtAddr(AT + page * PAGE))
                else {
                    panic!("page {page} is not mapped");
                };
                assert_eq!(attributes.userfault, protected.contains(&page), "page {page}");
            }
            space.close_userfault(fd);
        });
    }
}

/// An exited child did not inherit some pages of a folio: these pages are exclusive, and the other
/// pages are not known to be.
fn exclusive_and_other_pages_go_out_together<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        swapping.map(AT, PAGES);
        swapping.fill(AT, PAGES);
        let own = [2, 3, 9, 20];
        let advise = |advice| {
            for page in own {
                swapping.space.madvise(VirtAddr(AT + page * PAGE), PAGE, advice).unwrap();
            }
        };
        advise(Advice::DontFork);
        drop(swapping.space.fork().unwrap());
        advise(Advice::DoFork);
        assert_eq!(swapping.space.mapping_count(), 1);
        swapping.page_out(AT, PAGES);
        assert_eq!(swapping.memory.events().folio_splits, 0, "the folios went as a whole");
        for (page, (exclusive, _)) in (0..).zip(flags(swapping)) {
            assert_eq!(exclusive, own.contains(&page), "page {page}");
        }
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.assert_filled(AT, PAGES, AT);
        swapping.fill(AT, PAGES);
        swapping.assert_filled(AT, PAGES, AT);
        assert_eq!(swapping.taken(), 0);
    });
}

/// Poison among the pages stays in place and occupies no slot, while its neighbors are swapped out
/// and in.
fn poison_stays_where_it_is<A: Walk>() {
    for order in [0, 4] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, PAGES);
            swapping.fill(AT, PAGES);
            let poisoned = [6, 7, 20];
            for page in poisoned {
                let at = VirtAddr(AT + page * PAGE);
                swapping.space.discard(at, PAGE).unwrap();
                testing::plant(swapping.space, at, 1, Absent::Marker(Marker::Poison));
            }
            let is_poisoned = |page: u64| {
                let at = VirtAddr(AT + page * PAGE);
                swapping.space.inspect(at) == Inspection::Absent(Absent::Marker(Marker::Poison))
            };
            for advice in [Advice::Cold, Advice::PageOut] {
                swapping.space.madvise(VirtAddr(AT), PAGES * PAGE, advice).unwrap();
                assert!(poisoned.iter().all(|page| is_poisoned(*page)));
            }
            assert_eq!((swapping.swapped(AT, PAGES), swapping.taken()), (29, 29));
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            for page in 0..PAGES {
                let expected =
                    if poisoned.contains(&page) { Err(FaultError::Bus) } else { Ok(AT + page) };
                assert_eq!(swapping.program.load(VirtAddr(AT + page * PAGE)), expected, "{page}");
            }
            // As on Linux, freeing removes the poison.
            swapping.space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::Free).unwrap();
            assert_eq!(swapping.program.load(VirtAddr(AT + 6 * PAGE)), Ok(0));
        });
    }
}

on_every_architecture! {
    protected => write_protected_pages_stay_protected;
    exclusive => exclusive_and_other_pages_go_out_together;
    poison => poison_stays_where_it_is;
}
