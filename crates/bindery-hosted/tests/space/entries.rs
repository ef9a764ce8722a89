//! Entries that the MMU does not see: swapped-out pages, markers, and pages hidden by a protection
//! without access. These entries move, split and fork as runs and keep their content and order.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, Absent, Level, Marker, Riscv64};
use bindery::{AddressSpace, Counts, Inspection, Protection, Remap, testing};
use bindery_hosted::{Machine, Walk};

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::{self, GIB, MIB, READ_WRITE, READ_WRITE_EXECUTE, fixed};

const PAGE: u64 = 4096;
const AT: u64 = GIB;
/// Congruent with `AT` modulo a table.
const TO: u64 = 4 * GIB;
const SLOT: u64 = 0x1234;

on_every_architecture! {
    swap_entries_move_in_order_as_soft_dirty => move_swapped;
    incongruent_swap_entries_keep_their_order => shift_swapped;
    markers_move_as_they_are => move_markers;
    swap_entries_and_markers_unmap_without_flush => unmap_absent;
    a_protection_changes_nothing_that_is_not_there => protect_absent;
    forked_swap_entries_are_shared_and_markers_copied => fork_absent;
    a_huge_swap_entry_moves_as_one_entry => move_huge_swap;
    a_huge_swap_entry_is_cut_into_slots => cut_huge_swap;
    a_misaligned_huge_swap_entry_moves_by_slots => shift_huge_swap;
    a_huge_swap_entry_forks_as_one => fork_huge_swap;
    a_huge_marker_is_cut_into_markers => cut_huge_marker;
    a_prot_none_page_keeps_its_state => hide_and_show;
    prot_none_pages_move_and_stay_prot_none => move_prot_none;
    a_cut_prot_none_huge_leaf_keeps_all => cut_prot_none_huge;
    hiding_takes_one_flush_and_showing_none => count_hiding;
}

fn swapped(slot: u64) -> Absent {
    Absent::Swap { device: 3, slot, exclusive: true, soft_dirty: false, userfault: false }
}

/// As [`swapped`], moved.
fn moved(slot: u64) -> Absent {
    Absent::Swap { device: 3, slot, exclusive: true, soft_dirty: true, userfault: false }
}

/// `pages` at `AT`, and a written page behind them that keeps the table allocated.
fn scene<A: Walk>(pages: u64, scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    with_fixture::<A>(0, |fixture| {
        fixture.space.mmap(&fixed(AT, (pages + 1) * PAGE)).unwrap();
        fixture.fill(AT + pages * PAGE, 1);
        scenario(fixture);
        fixture.assert_filled(AT + pages * PAGE, 1, AT + pages * PAGE);
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
fn assert_empty<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, count: u64) {
    for page in 0..count {
        assert_eq!(fixture.space.inspect(VirtAddr(at + page * PAGE)), Inspection::Empty);
    }
}

fn counted<A: Walk>(fixture: &Fixture<'_, '_, A>, work: impl FnOnce()) -> Counts {
    let before = fixture.space.counts();
    work();
    fixture.space.counts() - before
}

fn mremap<A: Walk>(fixture: &Fixture<'_, '_, A>, from: u64, length: u64, to: u64) -> Counts {
    counted(fixture, || {
        let target = Remap::To(VirtAddr(to));
        assert_eq!(fixture.space.mremap(VirtAddr(from), length, length, target), Ok(VirtAddr(to)));
    })
}

fn move_swapped<A: Walk>() {
    scene::<A>(100, |fixture| {
        testing::plant(fixture.space, VirtAddr(AT), 100, swapped(SLOT));
        let cost = mremap(fixture, AT, 100 * PAGE, TO);
        assert_run(fixture.space, TO, 100, |page| moved(SLOT + page));
        assert_empty(fixture, AT, 100);
        // Three tables at most lead to the destination.
        let tables = cost.tables_allocated;
        assert_eq!((cost.entries_read, cost.entries_written), (100, 200 + tables), "{cost:?}");
        assert_eq!(cost.invalidations, 0, "{cost:?}");
        // Moves the entries to the source again, where the tables exist.
        let cost = mremap(fixture, TO, 100 * PAGE, AT);
        assert_run(fixture.space, AT, 100, |page| moved(SLOT + page));
        assert_eq!(cost.entries_read, 100, "{cost:?}");
    });
}

fn shift_swapped<A: Walk>() {
    scene::<A>(100, |fixture| {
        testing::plant(fixture.space, VirtAddr(AT), 40, swapped(SLOT));
        testing::plant(fixture.space, VirtAddr(AT + 41 * PAGE), 50, swapped(7));
        // Moves the entries into two tables.
        let to = TO - 37 * PAGE;
        let cost = mremap(fixture, AT, 100 * PAGE, to);
        assert_run(fixture.space, to, 40, |page| moved(SLOT + page));
        assert_run(fixture.space, to + 41 * PAGE, 50, |page| moved(7 + page));
        assert_empty(fixture, to + 40 * PAGE, 1);
        assert_empty(fixture, to + 91 * PAGE, 9);
        assert_eq!(cost.entries_read, 100, "{cost:?}");
        assert_eq!(cost.entries_written, 180 + cost.tables_allocated, "{cost:?}");
        assert_eq!(cost.invalidations, 0, "{cost:?}");
    });
}

fn move_markers<A: Walk>() {
    scene::<A>(64, |fixture| {
        for (first, marker) in [(0, Marker::Guard), (20, Marker::Poison)] {
            testing::plant(fixture.space, VirtAddr(AT + first * PAGE), 20, Absent::Marker(marker));
        }
        for to in [TO, TO + 64 * MIB + 3 * PAGE] {
            let from = if to == TO { AT } else { TO };
            let cost = mremap(fixture, from, 64 * PAGE, to);
            assert_run(fixture.space, to, 20, |_| Absent::Marker(Marker::Guard));
            assert_run(fixture.space, to + 20 * PAGE, 20, |_| Absent::Marker(Marker::Poison));
            assert_empty(fixture, to + 40 * PAGE, 24);
            // The table's entry count shows that the rest is empty.
            assert!((40..=64).contains(&cost.entries_read), "{cost:?}");
        }
    });
}

fn unmap_absent<A: Walk>() {
    scene::<A>(100, |fixture| {
        testing::plant(fixture.space, VirtAddr(AT), 60, swapped(SLOT));
        testing::plant(fixture.space, VirtAddr(AT + 60 * PAGE), 20, Absent::Marker(Marker::Poison));
        let cost = counted(fixture, || fixture.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap());
        assert_empty(fixture, AT, 100);
        assert_eq!((cost.entries_written, cost.invalidations), (80, 0), "{cost:?}");
        assert_eq!(cost.entries_read, 100, "{cost:?}");
    });
    with_fixture::<A>(0, |fixture| {
        fixture.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        testing::plant(fixture.space, VirtAddr(AT), 512, swapped(SLOT));
        // A table with only swap entries is removed by one entry, with one flush of the upper
        // levels.
        let cost = counted(fixture, || fixture.space.munmap(VirtAddr(AT), 2 * MIB).unwrap());
        assert!(cost.entries_written <= u64::from(A::LEVELS), "{cost:?}");
        assert!(cost.invalidations <= 1, "{cost:?}");
    });
}

fn protect_absent<A: Walk>() {
    scene::<A>(100, |fixture| {
        testing::plant(fixture.space, VirtAddr(AT), 60, swapped(SLOT));
        testing::plant(fixture.space, VirtAddr(AT + 60 * PAGE), 20, Absent::Marker(Marker::Guard));
        for protection in [Protection::READ, Protection::empty(), READ_WRITE, READ_WRITE_EXECUTE] {
            let cost = counted(fixture, || {
                fixture.space.mprotect(VirtAddr(AT), 90 * PAGE, protection).unwrap();
            });
            assert_run(fixture.space, AT, 60, |page| swapped(SLOT + page));
            assert_run(fixture.space, AT + 60 * PAGE, 20, |_| Absent::Marker(Marker::Guard));
            assert_eq!((cost.entries_written, cost.invalidations), (0, 0), "{cost:?}");
            assert_eq!(cost.entries_read, 90, "{cost:?}");
        }
        fixture.space.mprotect(VirtAddr(AT), 90 * PAGE, READ_WRITE).unwrap();
    });
}

fn fork_absent<A: Walk>() {
    scene::<A>(100, |fixture| {
        testing::plant(fixture.space, VirtAddr(AT), 60, swapped(SLOT));
        testing::plant(fixture.space, VirtAddr(AT + 60 * PAGE), 20, Absent::Marker(Marker::Poison));
        let watched = Absent::Marker(Marker::UserfaultWriteProtect);
        testing::plant(fixture.space, VirtAddr(AT + 80 * PAGE), 10, watched);
        let child = fixture.space.fork().unwrap();
        let shared = |page| Absent::Swap {
            device: 3,
            slot: SLOT + page,
            exclusive: false,
            soft_dirty: false,
            userfault: false,
        };
        for space in [fixture.space, &child] {
            assert_run(space, AT, 60, shared);
            assert_run(space, AT + 60 * PAGE, 20, |_| Absent::Marker(Marker::Poison));
        }
        assert_run(fixture.space, AT + 80 * PAGE, 10, |_| watched);
        // The child's mapping has no userfaultfd.
        assert_eq!(child.inspect(VirtAddr(AT + 80 * PAGE)), Inspection::Empty);
        support::audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
    });
}

/// Four MiB with a huge swap entry in the first half.
fn huge_swap<A: Walk>(scenario: impl FnOnce(&Fixture<'_, '_, A>)) {
    with_fixture::<A>(0, |fixture| {
        fixture.space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        fixture.fill(AT + 2 * MIB, 1);
        testing::plant_huge(fixture.space, VirtAddr(AT), swapped(SLOT));
        scenario(fixture);
        fixture.assert_filled(AT + 2 * MIB, 1, AT + 2 * MIB);
    });
}

fn move_huge_swap<A: Walk>() {
    huge_swap::<A>(|fixture| {
        let cost = mremap(fixture, AT, 2 * MIB, TO);
        assert_eq!(cost.entries_read, 1, "{cost:?}");
        assert_eq!(cost.entries_written, 2 + cost.tables_allocated, "{cost:?}");
        assert_eq!(cost.invalidations, 0, "{cost:?}");
        assert!(testing::table_at(fixture.space, VirtAddr(TO), Level::PTE).is_none());
        assert_eq!(fixture.space.inspect(VirtAddr(TO)), Inspection::Absent(moved(SLOT)));
        assert_empty(fixture, AT, 1);
    });
}

fn cut_huge_swap<A: Walk>() {
    huge_swap::<A>(|fixture| {
        let cost = counted(fixture, || {
            fixture.space.munmap(VirtAddr(AT + 5 * PAGE), 95 * PAGE).unwrap();
        });
        assert_run(fixture.space, AT, 5, |page| swapped(SLOT + page));
        assert_empty(fixture, AT + 5 * PAGE, 95);
        assert_run(fixture.space, AT + 100 * PAGE, 412, |page| swapped(SLOT + 100 + page));
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 0), "{cost:?}");
    });
}

fn shift_huge_swap<A: Walk>() {
    huge_swap::<A>(|fixture| {
        mremap(fixture, AT, 2 * MIB, TO + 9 * PAGE);
        assert_run(fixture.space, TO + 9 * PAGE, 512, |page| moved(SLOT + page));
        assert!(
            testing::table_at(fixture.space, VirtAddr(AT), Level::PTE).is_none(),
            "the hull is gone"
        );
    });
}

fn fork_huge_swap<A: Walk>() {
    huge_swap::<A>(|fixture| {
        let child = fixture.space.fork().unwrap();
        assert!(testing::table_at(&child, VirtAddr(AT), Level::PTE).is_none());
        support::audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
        // Each side has its own deposited table.
        for space in [fixture.space, &child] {
            space.munmap(VirtAddr(AT), PAGE).unwrap();
        }
        for page in 1..512 {
            let (here, there) = (VirtAddr(AT + page * PAGE), SLOT + page);
            let shared = matches!(child.inspect(here), Inspection::Absent(Absent::Swap { slot, exclusive: false, .. }) if slot == there);
            assert!(shared && child.inspect(here) == fixture.space.inspect(here));
        }
        support::audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
    });
}

fn cut_huge_marker<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        fixture.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        testing::plant_huge(fixture.space, VirtAddr(AT), Absent::Marker(Marker::Guard));
        let middle = VirtAddr(AT + 8 * PAGE);
        fixture.space.mprotect(middle, 8 * PAGE, Protection::READ).unwrap();
        assert_run(fixture.space, AT, 512, |_| Absent::Marker(Marker::Guard));
        assert!(testing::table_at(fixture.space, VirtAddr(AT), Level::PTE).is_some());
    });
}

/// The accessed and dirty state of a page.
fn used<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64) -> (bool, bool) {
    match fixture.space.inspect(VirtAddr(at)) {
        Inspection::Page { attributes, .. } => (attributes.accessed, attributes.dirty),
        Inspection::Absent(Absent::ProtNone { accessed, dirty, .. }) => (accessed, dirty),
        other => panic!("{at:#x} is {other:?}"),
    }
}

/// Thirty-two pages in a repeating pattern: untouched, read, and written since their content was
/// saved. Returns the state of each.
fn mixed<A: Walk>(fixture: &Fixture<'_, '_, A>, order: u8) -> Vec<(bool, bool)> {
    fixture.space.mmap(&fixed(AT, 32 * PAGE)).unwrap();
    fixture.fill(AT, 32);
    testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 32);
    for page in 0..32 {
        let at = AT + page * PAGE;
        match page % 3 {
            0 => {}
            1 => assert_eq!(fixture.program.load(VirtAddr(at)), Ok(AT + page)),
            _ => fixture.program.store(VirtAddr(at), AT + page).unwrap(),
        }
    }
    let uses: Vec<_> = (0..32).map(|page| used(fixture, AT + page * PAGE)).collect();
    if order == 0 || A::CONTIG_ENTRIES == 1 {
        assert_eq!(uses[..3], [(false, false), (true, false), (true, true)]);
        return uses;
    }
    // The MMU may have set a bit in any entry of the block, so the bit holds for all pages.
    vec![(true, true); 32]
}

fn hide<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, pages: u64) {
    fixture.space.mprotect(VirtAddr(at), pages * PAGE, Protection::empty()).unwrap();
    assert!(fixture.program.load(VirtAddr(at)).is_err());
}

#[track_caller]
fn assert_used<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, uses: &[(bool, bool)]) {
    let now: Vec<_> = (0..32).map(|page| used(fixture, at + page * PAGE)).collect();
    assert_eq!(now, uses);
}

fn hide_and_show<A: Walk>() {
    for order in [0, 4] {
        with_fixture::<A>(order, |fixture| {
            let uses = mixed(fixture, order);
            hide(fixture, AT, 32);
            assert_used(fixture, AT, &uses);
            fixture.space.mprotect(VirtAddr(AT), 32 * PAGE, READ_WRITE).unwrap();
            assert_used(fixture, AT, &uses);
            fixture.assert_filled(AT, 32, AT);
            fixture.fill(AT, 32);
        });
    }
}

fn move_prot_none<A: Walk>() {
    for (order, to) in
        [(0, TO), (0, TO + 5 * PAGE), (4, TO), (4, TO + 5 * PAGE), (4, TO - 9 * PAGE)]
    {
        with_fixture::<A>(order, |fixture| {
            let uses = mixed(fixture, order);
            hide(fixture, AT, 32);
            let cost = mremap(fixture, AT, 32 * PAGE, to);
            assert_eq!(cost.entries_read, 32, "{cost:?}");
            assert_used(fixture, to, &uses);
            assert_empty(fixture, AT, 32);
            for page in 0..32 {
                let found = fixture.space.inspect(VirtAddr(to + page * PAGE));
                let Inspection::Absent(Absent::ProtNone { soft_dirty, .. }) = found else {
                    panic!("{found:?}");
                };
                assert!(soft_dirty, "a move is a change");
            }
            fixture.space.mprotect(VirtAddr(to), 32 * PAGE, READ_WRITE).unwrap();
            assert_used(fixture, to, &uses);
            fixture.assert_filled(to, 32, AT);
        });
    }
}

fn cut_prot_none_huge<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        fixture.space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        fixture.fill(AT, 512);
        testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 1);
        assert_eq!(fixture.program.load(VirtAddr(AT + 9 * PAGE)), Ok(AT + 9));
        hide(fixture, AT, 512);
        let cost = counted(fixture, || fixture.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap());
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 0), "{cost:?}");
        assert_eq!(used(fixture, AT + 100 * PAGE), (true, false));
        assert_eq!(used(fixture, AT + 511 * PAGE), (true, false));
        fixture.space.mprotect(VirtAddr(AT + 100 * PAGE), 412 * PAGE, READ_WRITE).unwrap();
        assert_eq!(used(fixture, AT + 100 * PAGE), (true, false));
        fixture.assert_filled(AT + 100 * PAGE, 412, AT + 100);
    });
}

fn count_hiding<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        fixture.space.mmap(&fixed(AT, 256 * PAGE)).unwrap();
        fixture.fill(AT, 256);
        let hiding = counted(fixture, || hide(fixture, AT, 256));
        let work = (hiding.entries_read, hiding.entries_written, hiding.invalidations);
        // Each entry is read twice: once to find the runs and once to write them.
        assert_eq!(work, (512, 256, 1), "{hiding:?}");
        let showing = counted(fixture, || {
            fixture.space.mprotect(VirtAddr(AT), 256 * PAGE, READ_WRITE).unwrap();
        });
        assert_eq!((showing.entries_written, showing.invalidations), (256, 0), "{showing:?}");
    });
}

#[test]
fn a_block_survives_prot_none() {
    fold_again::<AArch64>();
    fold_again::<Riscv64<4>>();
}

fn fold_again<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        fixture.space.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        fixture.fill(AT, 64);
        hide(fixture, AT, 64);
        fixture.space.mprotect(VirtAddr(AT), 64 * PAGE, READ_WRITE).unwrap();
        for page in 0..64 {
            let found = fixture.space.inspect(VirtAddr(AT + page * PAGE));
            assert!(matches!(found, Inspection::Page { contiguous: true, .. }), "{found:?}");
        }
        fixture.assert_filled(AT, 64, AT);
    });
}
