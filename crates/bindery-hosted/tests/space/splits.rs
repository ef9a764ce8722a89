//! Huge leaves and contiguous runs that an operation covers partly: split once, only at the edges,
//! with deposited tables. No bit that the MMU has set in any entry is lost.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Absent, Level, Riscv64};
use bindery::{Counts, FolioError, Inspection, Protection, Remap, testing};
use bindery_hosted::Walk;

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// Congruent with `AT` modulo a table.
const TO: u64 = 4 * GIB;

on_every_architecture! {
    a_dirty_huge_leaf_has_dirty_parts => cut_dirty;
    a_clean_huge_leaf_has_clean_parts => cut_clean;
    cutting_a_huge_leaf_allocates_nothing => cut_from_reserve;
    a_huge_leaf_moves_with_its_deposit => move_and_cut;
    what_was_cut_can_be_joined_again => join;
    what_differs_is_not_joined => refuse_to_join;
}

fn counted<A: Walk>(fixture: &Fixture<'_, '_, A>, work: impl FnOnce()) -> Counts {
    let before = fixture.space.counts();
    work();
    fixture.space.counts() - before
}

/// The accessed and dirty state of a page's leaf or `PROT_NONE` leaf.
fn used<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64) -> (bool, bool) {
    match fixture.space.inspect(VirtAddr(at)) {
        Inspection::Page { attributes, .. } => (attributes.accessed, attributes.dirty),
        Inspection::Absent(Absent::ProtNone { accessed, dirty, .. }) => (accessed, dirty),
        other => panic!("{at:#x} is {other:?}"),
    }
}

/// A huge leaf at `AT`.
fn huge<A: Walk>(scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    with_fixture::<A>(9, |fixture| {
        fixture.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        fixture.fill(AT, 512);
        assert!(matches!(
            fixture.space.inspect(VirtAddr(AT)),
            Inspection::Page { level, .. } if level == Level::PMD
        ));
        scenario(fixture);
    });
}

/// An operation that cuts a huge leaf at `AT`, and the place of the pages from the hundredth on
/// afterwards.
type Cut<A> = (fn(&Fixture<'_, '_, A>), u64);

fn cuts<A: Walk>() -> [Cut<A>; 4] {
    let rest = AT + 100 * PAGE;
    [
        (|fixture| fixture.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap(), rest),
        (|fixture| fixture.space.discard(VirtAddr(AT + PAGE), 99 * PAGE).unwrap(), rest),
        (
            |fixture| fixture.space.mprotect(VirtAddr(AT), 100 * PAGE, Protection::READ).unwrap(),
            rest,
        ),
        (
            |fixture| {
                let (from, to) = (VirtAddr(AT + 100 * PAGE), Remap::To(VirtAddr(TO + 7 * PAGE)));
                fixture.space.mremap(from, 412 * PAGE, 412 * PAGE, to).unwrap();
            },
            TO + 7 * PAGE,
        ),
    ]
}

fn cut_dirty<A: Walk>() {
    for (cut, rest) in cuts::<A>() {
        huge::<A>(|fixture| {
            testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 1);
            // One store, recorded in the only entry.
            fixture.fill(AT, 1);
            cut(fixture);
            for page in 0..412 {
                assert_eq!(used(fixture, rest + page * PAGE), (true, true), "page {page}");
            }
            fixture.assert_filled(rest, 412, AT + 100);
        });
    }
}

fn cut_clean<A: Walk>() {
    for (cut, rest) in cuts::<A>() {
        huge::<A>(|fixture| {
            testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 1);
            assert!(!fixture.space.is_dirty(VirtAddr(AT)));
            cut(fixture);
            for page in 0..412 {
                assert_eq!(used(fixture, rest + page * PAGE), (false, false), "page {page}");
            }
            fixture.assert_filled(rest, 412, AT + 100);
            assert_eq!(used(fixture, rest), (true, false));
        });
    }
}

fn cut_from_reserve<A: Walk>() {
    huge::<A>(|fixture| {
        let tables = audit(fixture.machine, fixture.memory, &[fixture.space]).tables;
        fixture.memory.fail_allocations_after(Some(0));
        let cost = counted(fixture, || fixture.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap());
        fixture.memory.fail_allocations_after(None);
        assert_eq!((cost.tables_allocated, cost.tables_freed), (0, 0), "{cost:?}");
        // One invalidation for the break of the leaf, one for the pages, and one more if the
        // hundredth page lies in a block.
        assert_eq!(cost.invalidations, 2 + u64::from(A::CONTIG_ENTRIES > 1), "{cost:?}");
        assert_eq!(audit(fixture.machine, fixture.memory, &[fixture.space]).tables, tables);
    });
}

fn move_and_cut<A: Walk>() {
    huge::<A>(|fixture| {
        let to = VirtAddr(TO);
        let cost = counted(fixture, || {
            fixture.space.mremap(VirtAddr(AT), 2 * MIB, 2 * MIB, Remap::To(to)).unwrap();
        });
        assert_eq!((cost.entries_read, cost.invalidations), (1, 1), "{cost:?}");
        fixture.space.mprotect(VirtAddr(TO + PAGE), PAGE, Protection::READ).unwrap();
        fixture.assert_filled(TO, 512, AT);
    });
}

/// Splits the leaf at `AT` and makes all entries equal again.
fn cut_and_mend<A: Walk>(fixture: &Fixture<'_, '_, A>) {
    fixture.space.mprotect(VirtAddr(AT), PAGE, Protection::READ).unwrap();
    fixture.space.mprotect(VirtAddr(AT), PAGE, READ_WRITE).unwrap();
    assert!(testing::table_at(fixture.space, VirtAddr(AT), Level::PTE).is_some());
}

fn join<A: Walk>() {
    for page in [0, 77, 511] {
        huge::<A>(|fixture| {
            cut_and_mend(fixture);
            testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 512);
            fixture.fill(AT + page * PAGE, 1);
            fixture.program.store(VirtAddr(AT + page * PAGE), AT + page).unwrap();
            let cost = counted(fixture, || fixture.space.join_leaves(VirtAddr(AT)).unwrap());
            assert_eq!(cost.invalidations, 1, "{cost:?}");
            assert!(testing::table_at(fixture.space, VirtAddr(AT), Level::PTE).is_none());
            assert_eq!(used(fixture, AT), (true, true), "page {page} was written");
            fixture.assert_filled(AT, 512, AT);
            // The leaf can be cut again.
            cut_and_mend(fixture);
            fixture.assert_filled(AT, 512, AT);
        });
    }
}

fn refuse_to_join<A: Walk>() {
    let unlike: [fn(&Fixture<'_, '_, A>); 4] = [
        |_| {},
        |fixture| fixture.space.discard(VirtAddr(AT + 5 * PAGE), PAGE).unwrap(),
        |fixture| {
            // Replaces one page.
            fixture.space.discard(VirtAddr(AT + 5 * PAGE), PAGE).unwrap();
            fixture.fill(AT + 5 * PAGE, 1);
        },
        |fixture| {
            let hole = VirtAddr(AT + 5 * PAGE);
            fixture.space.discard(hole, PAGE).unwrap();
            let poison = Absent::Marker(bindery::arch::Marker::Poison);
            testing::plant(fixture.space, hole, 1, poison);
        },
    ];
    for (number, make_unlike) in unlike.into_iter().enumerate() {
        huge::<A>(|fixture| {
            if number > 0 {
                cut_and_mend(fixture);
            }
            make_unlike(fixture);
            let before = fixture.memory.free_frame_count();
            assert_eq!(fixture.space.join_leaves(VirtAddr(AT)), Err(FolioError::Unsuitable));
            assert_eq!(fixture.memory.free_frame_count(), before);
            fixture.assert_filled(AT, 5, AT);
            fixture.assert_filled(AT + 6 * PAGE, 506, AT + 6);
        });
    }
}

/// The architectures that have contiguous runs.
macro_rules! with_blocks {
    ($($test:ident => $run:ident;)*) => {
        $(#[test]
        fn $test() {
            $run::<AArch64>();
            $run::<Riscv64<3>>();
            $run::<Riscv64<4>>();
        })*
    };
}

with_blocks! {
    unmapping_unfolds_only_the_blocks_at_edges => unmap_blocks;
    protecting_unfolds_only_the_blocks_at_edges => protect_blocks;
    a_part_ending_with_blocks_unfolds_none => unmap_whole_blocks;
    a_misaligned_move_unfolds_and_back_folds => shift_blocks;
    an_aligned_move_keeps_blocks_and_cuts_two => move_blocks;
    a_blocks_recorded_write_survives_its_unfolding => dirty_unfolded;
    a_blocks_recorded_write_survives_a_move => dirty_moved;
    a_blocks_recorded_write_survives_hiding => dirty_prot_none;
    a_blocks_recorded_write_survives_a_fork => dirty_forked;
}

/// Four blocks of 16 pages.
fn four_blocks<A: Walk>(scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    with_fixture::<A>(4, |fixture| {
        fixture.space.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        fixture.fill(AT, 64);
        assert_eq!(blocked(fixture, AT, 64), (0..64).collect::<Vec<_>>());
        scenario(fixture);
    });
}

/// The pages that are in a contiguous run.
fn blocked<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, pages: u64) -> Vec<u64> {
    let contiguous = |page: &u64| {
        let found = fixture.space.inspect(VirtAddr(at + page * PAGE));
        matches!(found, Inspection::Page { contiguous: true, .. })
    };
    (0..pages).filter(contiguous).collect()
}

fn unmap_blocks<A: Walk>() {
    four_blocks::<A>(|fixture| {
        let cost =
            counted(fixture, || fixture.space.munmap(VirtAddr(AT + 5 * PAGE), 55 * PAGE).unwrap());
        // One break for each of two blocks, one flush for the pages.
        assert_eq!(cost.invalidations, 3, "{cost:?}");
        // Each unfolding clears 16 entries and sets them; each page is suspended and cleared.
        assert_eq!(cost.entries_written, 2 * 32 + 2 * 55, "{cost:?}");
        assert_eq!(blocked(fixture, AT, 64), []);
        fixture.assert_filled(AT, 5, AT);
        fixture.assert_filled(AT + 60 * PAGE, 4, AT + 60);
    });
}

fn unmap_whole_blocks<A: Walk>() {
    four_blocks::<A>(|fixture| {
        let cost =
            counted(fixture, || fixture.space.munmap(VirtAddr(AT + 16 * PAGE), 32 * PAGE).unwrap());
        assert_eq!((cost.invalidations, cost.entries_written), (1, 64), "{cost:?}");
        assert_eq!(blocked(fixture, AT, 64).len(), 32);
    });
}

fn protect_blocks<A: Walk>() {
    four_blocks::<A>(|fixture| {
        let middle = VirtAddr(AT + 5 * PAGE);
        let cost = counted(fixture, || {
            fixture.space.mprotect(middle, 55 * PAGE, Protection::READ).unwrap();
        });
        assert_eq!(cost.invalidations, 3, "{cost:?}");
        assert_eq!(cost.entries_written, 2 * 32 + 55, "{cost:?}");
        assert_eq!(blocked(fixture, AT, 64), (16..48).collect::<Vec<_>>());
        assert!(fixture.program.store(VirtAddr(AT + 20 * PAGE), 0).is_err());
        fixture.assert_filled(AT, 64, AT);
        fixture.space.mprotect(middle, 55 * PAGE, READ_WRITE).unwrap();
        fixture.fill(AT, 64);
    });
}

fn shift_blocks<A: Walk>() {
    four_blocks::<A>(|fixture| {
        let length = 64 * PAGE;
        let away = TO + 3 * PAGE;
        let cost = counted(fixture, || {
            fixture.space.mremap(VirtAddr(AT), length, length, Remap::To(VirtAddr(away))).unwrap();
        });
        assert_eq!(cost.invalidations, 1, "{cost:?}");
        assert_eq!(blocked(fixture, away, 64), []);
        fixture.assert_filled(away, 64, AT);
        let cost = counted(fixture, || {
            fixture.space.mremap(VirtAddr(away), length, length, Remap::To(VirtAddr(AT))).unwrap();
        });
        assert_eq!(cost.invalidations, 1, "{cost:?}");
        assert_eq!(blocked(fixture, AT, 64).len(), 64);
        fixture.assert_filled(AT, 64, AT);
    });
}

fn move_blocks<A: Walk>() {
    four_blocks::<A>(|fixture| {
        let cost = counted(fixture, || {
            let (from, to) = (VirtAddr(AT + 5 * PAGE), Remap::To(VirtAddr(TO + 5 * PAGE)));
            fixture.space.mremap(from, 55 * PAGE, 55 * PAGE, to).unwrap();
        });
        assert_eq!(cost.invalidations, 3, "{cost:?}");
        assert_eq!(blocked(fixture, TO, 64), (16..48).collect::<Vec<_>>());
        assert_eq!(blocked(fixture, AT, 64), []);
        fixture.assert_filled(TO + 5 * PAGE, 55, AT + 5);
    });
}

/// One page of each of the four blocks.
const WRITTEN: [u64; 4] = [3, 20, 44, 63];

/// Clean blocks, with a store to one page of each: the MMU has recorded the store in some entry of
/// the block, in a different one for each run of `scenario`.
fn written_blocks<A: Walk>(scenario: impl Fn(&Fixture<'_, '_, A>)) {
    let mut elsewhere = 0;
    for time in 0..16 {
        four_blocks::<A>(|fixture| {
            // The machine chooses the entry by a number that changes with each walk.
            for _ in 0..=time {
                testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 64);
                assert_eq!(fixture.program.load(VirtAddr(AT)), Ok(AT));
            }
            testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 64);
            for page in WRITTEN {
                let at = AT + page * PAGE;
                fixture.fill(at, 1);
                fixture.program.store(VirtAddr(at), AT + page).unwrap();
                elsewhere += u32::from(!used(fixture, at).1);
            }
            scenario(fixture);
        });
    }
    assert!(elsewhere > 32, "the record is in another entry, mostly: {elsewhere} of 64");
}

/// Asserts that the four pages are dirty, the last of them at `at + 63 * PAGE`.
#[track_caller]
fn assert_dirty<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, pages: &[u64]) {
    for page in pages {
        assert_eq!(used(fixture, at + page * PAGE), (true, true), "page {page}");
    }
}

fn dirty_unfolded<A: Walk>() {
    written_blocks::<A>(|fixture| {
        // Four pages of each block stay, including the written page; the dirty bit may be in
        // another entry.
        for gone in [4..16, 24..32, 32..44, 48..60] {
            let (start, pages) = (AT + gone.start * PAGE, gone.end - gone.start);
            fixture.space.munmap(VirtAddr(start), pages * PAGE).unwrap();
        }
        assert_dirty(fixture, AT, &WRITTEN);
    });
}

fn dirty_moved<A: Walk>() {
    for shift in [0, 3, 11] {
        written_blocks::<A>(|fixture| {
            let to = TO + shift * PAGE;
            let (from, target) = (VirtAddr(AT), Remap::To(VirtAddr(to)));
            fixture.space.mremap(from, 64 * PAGE, 64 * PAGE, target).unwrap();
            for page in WRITTEN {
                let at = VirtAddr(to + page * PAGE);
                assert!(fixture.space.is_dirty(at), "page {page}");
            }
            if shift > 0 {
                assert_dirty(fixture, to, &WRITTEN);
            }
        });
    }
}

fn dirty_prot_none<A: Walk>() {
    written_blocks::<A>(|fixture| {
        fixture.space.mprotect(VirtAddr(AT), 64 * PAGE, Protection::empty()).unwrap();
        assert_dirty(fixture, AT, &WRITTEN);
        // A part of each block becomes accessible again, perhaps without the entry that recorded
        // the bit.
        for page in WRITTEN {
            fixture.space.mprotect(VirtAddr(AT + page * PAGE), PAGE, READ_WRITE).unwrap();
        }
        assert_dirty(fixture, AT, &WRITTEN);
        fixture.space.mprotect(VirtAddr(AT), 64 * PAGE, READ_WRITE).unwrap();
    });
}

fn dirty_forked<A: Walk>() {
    written_blocks::<A>(|fixture| {
        let child = fixture.space.fork().unwrap();
        // Copy-on-write takes pages out of the parent's blocks.
        for page in [4, 19, 45, 62] {
            fixture.fill(AT + page * PAGE, 1);
        }
        assert_dirty(fixture, AT, &WRITTEN);
        for page in WRITTEN {
            assert!(child.is_dirty(VirtAddr(AT + page * PAGE)), "page {page}");
        }
        audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
    });
}
