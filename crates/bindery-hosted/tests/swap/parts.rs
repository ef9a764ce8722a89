//! Advice about a part of a large folio, and about folios with holes: such folios are split, or
//! kept if other processes map or hold them.

use bindery::addr::VirtAddr;
use bindery::arch::{Absent, Level};
use bindery::{Access, Advice, Inspection, PinTime, Remap, testing};
use bindery_hosted::{Program, Walk};

use super::fixture::{Swapping, with_swap};
use crate::support::{GIB, MIB, audit};

const AT: u64 = GIB;
const PAGE: u64 = 4096;

impl<A: Walk> Swapping<'_, '_, A> {
    fn advise(&self, first: u64, pages: u64, advice: Advice) {
        self.space.madvise(VirtAddr(AT + first * PAGE), pages * PAGE, advice).unwrap();
    }

    fn splits(&self) -> u64 {
        self.memory.events().folio_splits
    }

    fn is_accessed(&self, page: u64) -> bool {
        match self.space.inspect(VirtAddr(AT + page * PAGE)) {
            Inspection::Page { attributes, .. } => attributes.accessed,
            other => panic!("page {page} is not mapped: {other:?}"),
        }
    }

    /// The number of pages in folios whose content may be dropped.
    fn lazy(&self, pages: u64) -> u64 {
        let is_lazy = |page: &u64| {
            let at = VirtAddr(AT + page * PAGE);
            self.space.inspect(at) != Inspection::Empty && testing::is_lazy(self.space, at)
        };
        (0..pages).filter(is_lazy).count() as u64
    }

    /// The slot of a page.
    fn slot(&self, page: u64) -> Option<u64> {
        match self.space.inspect(VirtAddr(AT + page * PAGE)) {
            Inspection::Absent(Absent::Swap { slot, .. }) => Some(slot),
            _ => None,
        }
    }
}

/// The range extends from the middle of one folio to the middle of the third. Pages inside the
/// range are swapped out, and pages outside stay.
fn a_part_of_a_folio_goes_out_alone<A: Walk>() {
    for (order, pages) in [(4, 16), (9, 512)] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, 3 * pages);
            swapping.fill(AT, 3 * pages);
            let (first, count) = (pages / 2, 2 * pages);
            swapping.advise(first, count, Advice::PageOut);
            assert_eq!(swapping.swapped(AT + first * PAGE, count), count);
            assert_eq!(swapping.swapped(AT, 3 * pages), count, "what is outside went too");
            assert_eq!((swapping.taken(), swapping.splits()), (count, 2));
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.assert_filled(AT, 3 * pages, AT);
            swapping.fill(AT, 3 * pages);
            swapping.assert_filled(AT, 3 * pages, AT);
        });
    }
}

/// A folio that is pinned, or mapped by a child, is not split, and a huge leaf stays.
fn a_part_of_a_folio_that_others_hold_stays<A: Walk>() {
    for (order, pages) in [(4, 16), (9, 512)] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, 2 * pages);
            swapping.fill(AT, 2 * pages);
            let level = |page: u64| match swapping.space.inspect(VirtAddr(AT + page * PAGE)) {
                Inspection::Page { level, .. } => level,
                other => panic!("page {page} is not mapped: {other:?}"),
            };
            let before = level(0);
            assert_eq!(before == Level::PMD, order == 9);
            let half = pages / 2;
            let pinned =
                swapping.space.pin(VirtAddr(AT), 1, Access::Write, PinTime::Short).unwrap();
            for advice in [Advice::Cold, Advice::Free, Advice::PageOut] {
                swapping.advise(half, half, advice);
                swapping.advise(0, half, advice);
            }
            assert_eq!((swapping.swapped(AT, pages), swapping.splits()), (0, 0));
            assert_eq!((level(0), swapping.lazy(pages)), (before, 0));
            drop(pinned);
            let child = swapping.space.fork().unwrap();
            for advice in [Advice::Cold, Advice::Free, Advice::PageOut] {
                swapping.advise(half, half, advice);
                child.madvise(VirtAddr(AT), half * PAGE, advice).unwrap();
            }
            assert_eq!((swapping.swapped(AT, pages), swapping.splits()), (0, 0));
            assert_eq!((level(0), swapping.lazy(pages)), (before, 0));
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            drop(child);
            swapping.advise(half, half, Advice::PageOut);
            assert_eq!((swapping.swapped(AT, pages), swapping.splits()), (half, 1));
            swapping.assert_filled(AT, 2 * pages, AT);
        });
    }
}

/// Pages 3 to 6 were unmapped: the runs around them are swapped out, each to consecutive slots.
fn a_folio_with_a_hole_goes_out_by_runs<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        swapping.map(AT, 32);
        swapping.fill(AT, 32);
        swapping.space.munmap(VirtAddr(AT + 3 * PAGE), 4 * PAGE).unwrap();
        swapping.advise(0, 3, Advice::PageOut);
        assert_eq!((swapping.swapped(AT, 3), swapping.splits()), (3, 1));
        swapping.advise(7, 25, Advice::PageOut);
        assert_eq!(swapping.swapped(AT + 7 * PAGE, 25), 25);
        assert_eq!(swapping.taken(), 28, "pages that nobody maps have no slots");
        let slots: Vec<_> = (7..16).map(|page| swapping.slot(page).unwrap()).collect();
        assert!(slots.windows(2).all(|pair| pair[1] == pair[0] + 1), "{slots:?}");
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.assert_filled(AT, 3, AT);
        swapping.assert_filled(AT + 7 * PAGE, 25, AT + 7);
    });
}

/// After a move by less than the size of the folio, two tables map it.
fn a_folio_across_tables_goes_out<A: Walk>() {
    for advice in [Advice::PageOut, Advice::Free] {
        with_swap::<A>(4, 4096, |swapping| {
            swapping.map(3 * AT, 16);
            swapping.fill(3 * AT, 16);
            let to = AT + 2 * MIB - 5 * PAGE;
            let remap = Remap::To(VirtAddr(to));
            swapping.space.mremap(VirtAddr(3 * AT), 16 * PAGE, 16 * PAGE, remap).unwrap();
            swapping.space.madvise(VirtAddr(to), 16 * PAGE, advice).unwrap();
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            match advice {
                Advice::PageOut => assert_eq!(swapping.swapped(to, 16), 16),
                _ => assert!(testing::is_lazy(swapping.space, VirtAddr(to + 15 * PAGE))),
            }
            swapping.assert_filled(to, 16, 3 * AT);
        });
    }
}

/// Pages inside the range become cold, and pages outside do not change.
fn a_part_of_a_folio_is_cold<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        swapping.map(AT, 32);
        swapping.fill(AT, 32);
        swapping.advise(4, 4, Advice::Cold);
        let accessed = (0..16).filter(|page| swapping.is_accessed(*page)).collect::<Vec<_>>();
        assert_eq!(accessed, [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(swapping.splits(), 1);
        // A folio entirely in the range is not split.
        swapping.advise(8, 24, Advice::Cold);
        assert!((16..32).all(|page| !swapping.is_accessed(page)));
        assert_eq!(swapping.splits(), 1);
        swapping.assert_filled(AT, 32, AT);
    });
}

/// Pages in the range may be dropped; all others may not.
fn a_part_of_a_folio_is_lazy<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        swapping.map(AT, 32);
        swapping.fill(AT, 32);
        swapping.advise(12, 10, Advice::Free);
        assert_eq!((swapping.lazy(32), swapping.splits()), (10, 2));
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.advise(0, 32, Advice::PageOut);
        assert_eq!(swapping.taken(), 22, "what may vanish has vanished");
        swapping.assert_filled(AT, 12, AT);
        swapping.assert_filled(AT + 22 * PAGE, 10, AT + 22);
        for page in 12..22 {
            assert_eq!(swapping.program.load(VirtAddr(AT + page * PAGE)), Ok(0));
        }
    });
}

/// Differing entries and holes do not prevent a folio from becoming lazy.
fn a_folio_of_several_runs_is_lazy<A: Walk>() {
    with_swap::<A>(4, 4096, |swapping| {
        swapping.map(AT, 48);
        swapping.fill(AT, 48);
        // A child has exited. Pages written since then are exclusive and writable.
        drop(swapping.space.fork().unwrap());
        swapping.fill(AT + 3 * PAGE, 2);
        swapping.space.munmap(VirtAddr(AT + 20 * PAGE), 2 * PAGE).unwrap();
        swapping.advise(0, 20, Advice::Free);
        swapping.advise(22, 26, Advice::Free);
        assert_eq!(swapping.lazy(48), 46);
        audit(swapping.machine, swapping.memory, &[swapping.space]);
    });
}

/// As on Linux, `MADV_FREE` of pages in swap frees their slots, because a new page costs less than
/// a swap-in.
fn freeing_what_is_in_swap_frees_the_slots<A: Walk>() {
    for order in [0, 4, 9] {
        with_swap::<A>(order, 4096, |swapping| {
            swapping.map(AT, 1024);
            swapping.fill(AT, 1024);
            swapping.advise(0, 1024, Advice::PageOut);
            let child = swapping.space.fork().unwrap();
            swapping.advise(100, 700, Advice::Free);
            assert_eq!((swapping.taken(), swapping.swapped(AT, 1024)), (1024, 324));
            audit(swapping.machine, swapping.memory, &[swapping.space, &child]);
            let theirs = Program::new(swapping.machine, &child);
            assert_eq!(theirs.load(VirtAddr(AT + 200 * PAGE)), Ok(AT + 200));
            drop(child);
            assert_eq!(swapping.taken(), 324);
            assert_eq!(swapping.program.load(VirtAddr(AT + 200 * PAGE)), Ok(0));
            swapping.assert_filled(AT, 100, AT);
            swapping.assert_filled(AT + 800 * PAGE, 224, AT + 800);
        });
    }
}

on_every_architecture! {
    part => a_part_of_a_folio_goes_out_alone;
    others => a_part_of_a_folio_that_others_hold_stays;
    hole => a_folio_with_a_hole_goes_out_by_runs;
    tables => a_folio_across_tables_goes_out;
    cold => a_part_of_a_folio_is_cold;
    lazy => a_part_of_a_folio_is_lazy;
    runs => a_folio_of_several_runs_is_lazy;
    swapped => freeing_what_is_in_swap_frees_the_slots;
}
