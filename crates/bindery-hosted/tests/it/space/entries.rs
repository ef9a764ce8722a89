//! What becomes of entries that the MMU does not see: swapped-out pages, markers, and pages that a
//! protection of nothing hides. They move, split and fork as runs, keep what they say, and keep
//! their order.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Absent, Marker, Riscv64};
use bindery::{AddressSpace, Counts, Inspection, Protection, Remap, testing};
use bindery_hosted::{Machine, Walk};

use crate::support::stage::{Stage, on_stage};
use crate::support::{self, GIB, MIB, READ_WRITE, fixed};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// Congruent with `AT` modulo a table.
const TO: u64 = 4 * GIB;
const SLOT: u64 = 0x1234;

on_every_architecture! {
    a_run_of_swap_entries_moves_in_order_and_is_soft_dirty => move_swapped;
    swap_entries_keep_their_order_where_nothing_is_congruent => shift_swapped;
    markers_move_as_they_are => move_markers;
    swap_entries_and_markers_are_unmapped_without_a_flush => unmap_absent;
    a_protection_changes_nothing_that_is_not_there => protect_absent;
    a_forked_swap_entry_is_nobodys_alone_and_a_marker_is_both_sides => fork_absent;
    a_huge_swap_entry_moves_as_one_entry => move_huge_swap;
    a_huge_swap_entry_is_cut_into_its_slots => cut_huge_swap;
    a_huge_swap_entry_is_moved_slot_by_slot_where_it_does_not_fit => shift_huge_swap;
    a_huge_swap_entry_is_forked_as_one_entry => fork_huge_swap;
    a_huge_marker_is_cut_into_markers => cut_huge_marker;
    a_prot_none_page_keeps_accessed_dirty_and_content => hide_and_show;
    prot_none_pages_move_and_stay_prot_none => move_prot_none;
    a_prot_none_huge_leaf_is_cut_and_keeps_all => cut_prot_none_huge;
    hiding_takes_one_flush_and_showing_none => count_hiding;
}

fn swapped(slot: u64) -> Absent {
    Absent::Swap { device: 3, slot, exclusive: true, soft_dirty: false, userfault: false }
}

/// As [`swapped`], moved.
fn moved(slot: u64) -> Absent {
    Absent::Swap { device: 3, slot, exclusive: true, soft_dirty: true, userfault: false }
}

/// `pages` at `AT`, and behind them one that was written, so that the table stays.
fn scene<A: Walk>(pages: u64, play: impl FnOnce(&Stage<'_, '_, A>)) {
    on_stage::<A>(0, |stage| {
        stage.space.mmap(&fixed(AT, (pages + 1) * PAGE)).unwrap();
        stage.fill(AT + pages * PAGE, 1);
        play(stage);
        stage.assert_filled(AT + pages * PAGE, 1, AT + pages * PAGE);
    });
}

#[track_caller]
fn assert_run<A: Walk>(
    space: &AddressSpace<'_, Machine<A>>,
    at: u64,
    count: u64,
    expected: impl Fn(u64) -> Absent,
) {
    for page in 0..count {
        let found = space.inspect(VirtAddr(at + page * PAGE));
        assert_eq!(found, Inspection::Absent(expected(page)), "page {page} at {at:#x}");
    }
}

#[track_caller]
fn assert_empty<A: Walk>(stage: &Stage<'_, '_, A>, at: u64, count: u64) {
    for page in 0..count {
        assert_eq!(stage.space.inspect(VirtAddr(at + page * PAGE)), Inspection::Empty);
    }
}

fn counted<A: Walk>(stage: &Stage<'_, '_, A>, work: impl FnOnce()) -> Counts {
    let before = stage.space.counts();
    work();
    stage.space.counts() - before
}

fn mremap<A: Walk>(stage: &Stage<'_, '_, A>, from: u64, length: u64, to: u64) -> Counts {
    counted(stage, || {
        let target = Remap::To(VirtAddr(to));
        assert_eq!(stage.space.mremap(VirtAddr(from), length, length, target), Ok(VirtAddr(to)));
    })
}

fn move_swapped<A: Walk>() {
    scene::<A>(100, |stage| {
        testing::plant(stage.space, VirtAddr(AT), 100, swapped(SLOT));
        let cost = mremap(stage, AT, 100 * PAGE, TO);
        assert_run(stage.space, TO, 100, |page| moved(SLOT + page));
        assert_empty(stage, AT, 100);
        // Three tables at most lead to the destination.
        let tables = cost.tables_allocated;
        assert_eq!((cost.entries_read, cost.entries_written), (100, 200 + tables), "{cost:?}");
        assert_eq!(cost.invalidations, 0, "{cost:?}");
        // And back, where the tables are.
        let cost = mremap(stage, TO, 100 * PAGE, AT);
        assert_run(stage.space, AT, 100, |page| moved(SLOT + page));
        assert_eq!(cost.entries_read, 100, "{cost:?}");
    });
}

fn shift_swapped<A: Walk>() {
    scene::<A>(100, |stage| {
        testing::plant(stage.space, VirtAddr(AT), 40, swapped(SLOT));
        testing::plant(stage.space, VirtAddr(AT + 41 * PAGE), 50, swapped(7));
        // Into two tables.
        let to = TO - 37 * PAGE;
        let cost = mremap(stage, AT, 100 * PAGE, to);
        assert_run(stage.space, to, 40, |page| moved(SLOT + page));
        assert_run(stage.space, to + 41 * PAGE, 50, |page| moved(7 + page));
        assert_empty(stage, to + 40 * PAGE, 1);
        assert_empty(stage, to + 91 * PAGE, 9);
        assert_eq!(cost.entries_read, 100, "{cost:?}");
        assert_eq!(cost.entries_written, 180 + cost.tables_allocated, "{cost:?}");
        assert_eq!(cost.invalidations, 0, "{cost:?}");
    });
}

fn move_markers<A: Walk>() {
    scene::<A>(64, |stage| {
        for (first, marker) in [(0, Marker::Guard), (20, Marker::Poison)] {
            testing::plant(stage.space, VirtAddr(AT + first * PAGE), 20, Absent::Marker(marker));
        }
        for to in [TO, TO + 64 * MIB + 3 * PAGE] {
            let from = if to == TO { AT } else { TO };
            let cost = mremap(stage, from, 64 * PAGE, to);
            assert_run(stage.space, to, 20, |_| Absent::Marker(Marker::Guard));
            assert_run(stage.space, to + 20 * PAGE, 20, |_| Absent::Marker(Marker::Poison));
            assert_empty(stage, to + 40 * PAGE, 24);
            // The entry count says when the rest is empty.
            assert!((40..=64).contains(&cost.entries_read), "{cost:?}");
        }
    });
}

fn unmap_absent<A: Walk>() {
    scene::<A>(100, |stage| {
        testing::plant(stage.space, VirtAddr(AT), 60, swapped(SLOT));
        testing::plant(stage.space, VirtAddr(AT + 60 * PAGE), 20, Absent::Marker(Marker::Poison));
        let cost = counted(stage, || stage.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap());
        assert_empty(stage, AT, 100);
        assert_eq!((cost.entries_written, cost.invalidations), (80, 0), "{cost:?}");
        assert_eq!(cost.entries_read, 100, "{cost:?}");
    });
    on_stage::<A>(0, |stage| {
        stage.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        testing::plant(stage.space, VirtAddr(AT), 512, swapped(SLOT));
        // A table of nothing but swap goes by one entry, with one flush of the way to it.
        let cost = counted(stage, || stage.space.munmap(VirtAddr(AT), 2 * MIB).unwrap());
        assert!(cost.entries_written <= u64::from(A::LEVELS), "{cost:?}");
        assert!(cost.invalidations <= 1, "{cost:?}");
    });
}

fn protect_absent<A: Walk>() {
    scene::<A>(100, |stage| {
        testing::plant(stage.space, VirtAddr(AT), 60, swapped(SLOT));
        testing::plant(stage.space, VirtAddr(AT + 60 * PAGE), 20, Absent::Marker(Marker::Guard));
        for protection in [Protection::READ, Protection::empty(), READ_WRITE, Protection::all()] {
            let cost = counted(stage, || {
                stage.space.mprotect(VirtAddr(AT), 90 * PAGE, protection).unwrap();
            });
            assert_run(stage.space, AT, 60, |page| swapped(SLOT + page));
            assert_run(stage.space, AT + 60 * PAGE, 20, |_| Absent::Marker(Marker::Guard));
            assert_eq!((cost.entries_written, cost.invalidations), (0, 0), "{cost:?}");
            assert_eq!(cost.entries_read, 90, "{cost:?}");
        }
        stage.space.mprotect(VirtAddr(AT), 90 * PAGE, READ_WRITE).unwrap();
    });
}

fn fork_absent<A: Walk>() {
    scene::<A>(100, |stage| {
        testing::plant(stage.space, VirtAddr(AT), 60, swapped(SLOT));
        testing::plant(stage.space, VirtAddr(AT + 60 * PAGE), 20, Absent::Marker(Marker::Poison));
        let watched = Absent::Marker(Marker::UserfaultWriteProtect);
        testing::plant(stage.space, VirtAddr(AT + 80 * PAGE), 10, watched);
        let child = stage.space.fork().unwrap();
        let shared = |page| Absent::Swap {
            device: 3,
            slot: SLOT + page,
            exclusive: false,
            soft_dirty: false,
            userfault: false,
        };
        for space in [stage.space, &child] {
            assert_run(space, AT, 60, shared);
            assert_run(space, AT + 60 * PAGE, 20, |_| Absent::Marker(Marker::Poison));
        }
        assert_run(stage.space, AT + 80 * PAGE, 10, |_| watched);
        // The child's mapping has no userfaultfd.
        assert_eq!(child.inspect(VirtAddr(AT + 80 * PAGE)), Inspection::Empty);
        support::audit(stage.machine, stage.memory, &[stage.space, &child]);
    });
}

/// Four MiB with a huge swap entry in the first half.
fn huge_swap<A: Walk>(play: impl FnOnce(&Stage<'_, '_, A>)) {
    on_stage::<A>(0, |stage| {
        stage.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        stage.fill(AT + 2 * MIB, 1);
        testing::plant_huge(stage.space, VirtAddr(AT), swapped(SLOT));
        play(stage);
        stage.assert_filled(AT + 2 * MIB, 1, AT + 2 * MIB);
    });
}

fn move_huge_swap<A: Walk>() {
    huge_swap::<A>(|stage| {
        let cost = mremap(stage, AT, 2 * MIB, TO);
        assert_eq!(cost.entries_read, 1, "{cost:?}");
        assert_eq!(cost.entries_written, 2 + cost.tables_allocated, "{cost:?}");
        assert_eq!(cost.invalidations, 0, "{cost:?}");
        assert!(testing::table_at(stage.space, VirtAddr(TO), 1).is_none());
        assert_eq!(stage.space.inspect(VirtAddr(TO)), Inspection::Absent(moved(SLOT)));
        assert_empty(stage, AT, 1);
    });
}

fn cut_huge_swap<A: Walk>() {
    huge_swap::<A>(|stage| {
        let cost = counted(stage, || {
            stage.space.munmap(VirtAddr(AT + 5 * PAGE), 95 * PAGE).unwrap();
        });
        assert_run(stage.space, AT, 5, |page| swapped(SLOT + page));
        assert_empty(stage, AT + 5 * PAGE, 95);
        assert_run(stage.space, AT + 100 * PAGE, 412, |page| swapped(SLOT + 100 + page));
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 0), "{cost:?}");
    });
}

fn shift_huge_swap<A: Walk>() {
    huge_swap::<A>(|stage| {
        mremap(stage, AT, 2 * MIB, TO + 9 * PAGE);
        assert_run(stage.space, TO + 9 * PAGE, 512, |page| moved(SLOT + page));
        assert!(testing::table_at(stage.space, VirtAddr(AT), 1).is_none(), "the hull is gone");
    });
}

fn fork_huge_swap<A: Walk>() {
    huge_swap::<A>(|stage| {
        let child = stage.space.fork().unwrap();
        assert!(testing::table_at(&child, VirtAddr(AT), 1).is_none());
        support::audit(stage.machine, stage.memory, &[stage.space, &child]);
        // Each side has a reserve of its own.
        for space in [stage.space, &child] {
            space.munmap(VirtAddr(AT), PAGE).unwrap();
        }
        for page in 1..512 {
            let (here, there) = (VirtAddr(AT + page * PAGE), SLOT + page);
            let shared = matches!(child.inspect(here), Inspection::Absent(Absent::Swap { slot, exclusive: false, .. }) if slot == there);
            assert!(shared && child.inspect(here) == stage.space.inspect(here));
        }
        support::audit(stage.machine, stage.memory, &[stage.space, &child]);
    });
}

fn cut_huge_marker<A: Walk>() {
    on_stage::<A>(0, |stage| {
        stage.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        testing::plant_huge(stage.space, VirtAddr(AT), Absent::Marker(Marker::Guard));
        let middle = VirtAddr(AT + 8 * PAGE);
        stage.space.mprotect(middle, 8 * PAGE, Protection::READ).unwrap();
        assert_run(stage.space, AT, 512, |_| Absent::Marker(Marker::Guard));
        assert!(testing::table_at(stage.space, VirtAddr(AT), 1).is_some());
    });
}

/// What a page says of its use.
fn used<A: Walk>(stage: &Stage<'_, '_, A>, at: u64) -> (bool, bool) {
    match stage.space.inspect(VirtAddr(at)) {
        Inspection::Page { attributes, .. } => (attributes.accessed, attributes.dirty),
        Inspection::Absent(Absent::ProtNone { accessed, dirty, .. }) => (accessed, dirty),
        other => panic!("{at:#x} is {other:?}"),
    }
}

/// Thirty-two pages of which the first is untouched, the second read and the third written since
/// their content was saved, and so on. Returns what each says.
fn mixed<A: Walk>(stage: &Stage<'_, '_, A>, order: u8) -> Vec<(bool, bool)> {
    stage.space.mmap(&fixed(AT, 32 * PAGE)).unwrap();
    stage.fill(AT, 32);
    testing::clear_accessed_and_dirty(stage.space, VirtAddr(AT), 32);
    for page in 0..32 {
        let at = AT + page * PAGE;
        match page % 3 {
            0 => {}
            1 => assert_eq!(stage.program.load(VirtAddr(at)), Ok(AT + page)),
            _ => stage.program.store(VirtAddr(at), AT + page).unwrap(),
        }
    }
    let uses: Vec<_> = (0..32).map(|page| used(stage, AT + page * PAGE)).collect();
    if order == 0 || A::CONTIG_ENTRIES == 1 {
        assert_eq!(uses[..3], [(false, false), (true, false), (true, true)]);
        return uses;
    }
    // The MMU may have said so in any entry of the block, so it is true of all.
    vec![(true, true); 32]
}

fn hide<A: Walk>(stage: &Stage<'_, '_, A>, at: u64, pages: u64) {
    stage.space.mprotect(VirtAddr(at), pages * PAGE, Protection::empty()).unwrap();
    assert!(stage.program.load(VirtAddr(at)).is_err());
}

#[track_caller]
fn assert_used<A: Walk>(stage: &Stage<'_, '_, A>, at: u64, uses: &[(bool, bool)]) {
    let now: Vec<_> = (0..32).map(|page| used(stage, at + page * PAGE)).collect();
    assert_eq!(now, uses);
}

fn hide_and_show<A: Walk>() {
    for order in [0, 4] {
        on_stage::<A>(order, |stage| {
            let uses = mixed(stage, order);
            hide(stage, AT, 32);
            assert_used(stage, AT, &uses);
            stage.space.mprotect(VirtAddr(AT), 32 * PAGE, READ_WRITE).unwrap();
            assert_used(stage, AT, &uses);
            stage.assert_filled(AT, 32, AT);
            stage.fill(AT, 32);
        });
    }
}

fn move_prot_none<A: Walk>() {
    for (order, to) in
        [(0, TO), (0, TO + 5 * PAGE), (4, TO), (4, TO + 5 * PAGE), (4, TO - 9 * PAGE)]
    {
        on_stage::<A>(order, |stage| {
            let uses = mixed(stage, order);
            hide(stage, AT, 32);
            let cost = mremap(stage, AT, 32 * PAGE, to);
            assert_eq!(cost.entries_read, 32, "{cost:?}");
            assert_used(stage, to, &uses);
            assert_empty(stage, AT, 32);
            for page in 0..32 {
                let found = stage.space.inspect(VirtAddr(to + page * PAGE));
                let Inspection::Absent(Absent::ProtNone { soft_dirty, .. }) = found else {
                    panic!("{found:?}");
                };
                assert!(soft_dirty, "a move is a change");
            }
            stage.space.mprotect(VirtAddr(to), 32 * PAGE, READ_WRITE).unwrap();
            assert_used(stage, to, &uses);
            stage.assert_filled(to, 32, AT);
        });
    }
}

fn cut_prot_none_huge<A: Walk>() {
    on_stage::<A>(9, |stage| {
        stage.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        stage.fill(AT, 512);
        testing::clear_accessed_and_dirty(stage.space, VirtAddr(AT), 1);
        assert_eq!(stage.program.load(VirtAddr(AT + 9 * PAGE)), Ok(AT + 9));
        hide(stage, AT, 512);
        let cost = counted(stage, || stage.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap());
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 0), "{cost:?}");
        assert_eq!(used(stage, AT + 100 * PAGE), (true, false));
        assert_eq!(used(stage, AT + 511 * PAGE), (true, false));
        stage.space.mprotect(VirtAddr(AT + 100 * PAGE), 412 * PAGE, READ_WRITE).unwrap();
        assert_eq!(used(stage, AT + 100 * PAGE), (true, false));
        stage.assert_filled(AT + 100 * PAGE, 412, AT + 100);
    });
}

fn count_hiding<A: Walk>() {
    on_stage::<A>(4, |stage| {
        stage.space.mmap(&fixed(AT, 256 * PAGE)).unwrap();
        stage.fill(AT, 256);
        let hiding = counted(stage, || hide(stage, AT, 256));
        let work = (hiding.entries_read, hiding.entries_written, hiding.invalidations);
        // Read to find the runs, and to write them.
        assert_eq!(work, (512, 256, 1), "{hiding:?}");
        let showing = counted(stage, || {
            stage.space.mprotect(VirtAddr(AT), 256 * PAGE, READ_WRITE).unwrap();
        });
        assert_eq!((showing.entries_written, showing.invalidations), (256, 0), "{showing:?}");
    });
}

#[test]
fn what_was_a_block_before_it_was_prot_none_is_one_afterwards() {
    fold_again::<AArch64>();
    fold_again::<Riscv64<4>>();
}

fn fold_again<A: Walk>() {
    on_stage::<A>(4, |stage| {
        stage.space.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        stage.fill(AT, 64);
        hide(stage, AT, 64);
        stage.space.mprotect(VirtAddr(AT), 64 * PAGE, READ_WRITE).unwrap();
        for page in 0..64 {
            let found = stage.space.inspect(VirtAddr(AT + page * PAGE));
            assert!(matches!(found, Inspection::Page { contiguous: true, .. }), "{found:?}");
        }
        stage.assert_filled(AT, 64, AT);
    });
}
