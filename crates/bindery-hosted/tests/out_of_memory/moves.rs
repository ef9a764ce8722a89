//! Memory runs out at every single point of every kind of `mremap`, on every architecture. The
//! caller loses no data, nothing leaks, and the call succeeds once memory is available again.

use bindery::addr::VirtAddr;
use bindery::{Error, Protection, Remap, testing};
use bindery_hosted::Walk;

use super::shortage::{
    AT, CROSSING, Case, Layout, Stretch, VerbOf, at_every_point, filled, huge, moved, two_tables,
    zero,
};
use crate::support::{MIB, READ_WRITE_EXECUTE, fixed};

const PAGE: u64 = 4096;
/// Another address, congruent with `AT` modulo every table that the tests fill.
const TO: u64 = 4 << 30;

on_every_architecture! {
    shrinking => shrink;
    shrinking_in_the_middle => shrink_middle;
    growing_in_place => grow;
    growing_by_moving => grow_away;
    moving_across_tables => move_pages;
    moving_and_growing => move_and_grow;
    moving_and_shrinking => move_and_shrink;
    moving_over_another_mapping => move_over;
    moving_out_of_the_middle => move_middle;
    moving_into_the_same_mapping => move_within;
    moving_whole_tables => move_tables;
    moving_a_huge_leaf => move_huge;
    moving_a_huge_leaf_to_a_misaligned_place => shift_huge;
    moving_a_part_of_a_huge_leaf => move_in_huge;
    moving_several_mappings => move_several;
    leaving_across_tables => leave_pages;
    leaving_for_a_place_of_our_choice => leave_anywhere;
    leaving_the_middle => leave_middle;
    leaving_for_another_mapping => leave_over;
    leaving_whole_tables => leave_tables;
    leaving_a_part_of_a_huge_leaf => leave_in_huge;
}

fn to<A: Walk>(case: Case<A>, operation: VerbOf<A>, after: fn(u64) -> Vec<Stretch>) -> u64 {
    at_every_point(&Case { operation, after, ..case })
}

fn shrink<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let at = VirtAddr(CROSSING);
            Ok((space.mremap(at, 16 * PAGE, 5 * PAGE, Remap::InPlace)?.0, None))
        },
        after: |at| vec![filled(at, 5)],
        ..two_tables()
    });
    assert_eq!(points, 0);
}

fn shrink_middle<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let at = VirtAddr(CROSSING);
            Ok((space.mremap(at, 12 * PAGE, 5 * PAGE, Remap::InPlace)?.0, None))
        },
        after: |at| vec![filled(at, 5), moved(at + 12, at + 12 * PAGE, 4)],
        ..two_tables()
    });
    assert_eq!(points, 1, "the VMA that is cut off");
}

fn grow<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        operation: |space| {
            let at = VirtAddr(CROSSING);
            Ok((space.mremap(at, 16 * PAGE, 20 * PAGE, Remap::InPlace)?.0, None))
        },
        after: |at| vec![filled(at, 16), zero(at + 16 * PAGE, 4)],
        ..two_tables()
    });
    assert_eq!(points, 0);
}

fn grow_away<A: Walk>() {
    let points = at_every_point::<A>(&Case {
        set_up: |fixture| {
            (two_tables().set_up)(fixture);
            // Maps an obstacle that cannot merge.
            fixture.space.mmap(&fixed(CROSSING + 16 * PAGE, PAGE)).unwrap();
            let wall = VirtAddr(CROSSING + 16 * PAGE);
            fixture.space.mprotect(wall, PAGE, Protection::READ).unwrap();
        },
        operation: |space| {
            let at = VirtAddr(CROSSING);
            Ok((space.mremap(at, 16 * PAGE, 20 * PAGE, Remap::MayMove)?.0, None))
        },
        after: |at| vec![moved(CROSSING, at, 16), zero(at + 16 * PAGE, 4)],
        ..two_tables()
    });
    assert!(points >= 3, "the VMA and the tables: {points}");
}

fn move_pages<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::To(VirtAddr(TO - 3 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, target)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 16)],
    );
    // With three levels, two level-2 tables; with more levels, one or two upper tables.
    let tables = u64::from(A::LEVELS - 1) + u64::from(A::LEVELS.min(3) - 1);
    assert!((4..=tables).contains(&points), "{points}");
}

fn move_and_grow<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::To(VirtAddr(TO - 3 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 40 * PAGE, target)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 16), zero(at + 16 * PAGE, 24)],
    );
    assert!(points >= 4, "{points}");
}

fn move_and_shrink<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::To(VirtAddr(TO - 3 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 10 * PAGE, target)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 10)],
    );
    assert!(points >= 4, "{points}");
}

/// The mapping at the destination is unmapped only when no later step can fail.
fn move_over<A: Walk>() {
    let case = Case {
        set_up: |fixture| {
            (two_tables().set_up)(fixture);
            fixture.space.mmap(&fixed(TO, 64 * PAGE)).unwrap();
            fixture.fill(TO, 64);
        },
        before: vec![filled(CROSSING, 16), filled(TO, 64)],
        ..two_tables::<A>()
    };
    let points = to(
        case,
        |space| {
            let target = Remap::To(VirtAddr(TO + 8 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, target)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 16), filled(TO, 8), moved(TO + 24, at + 16 * PAGE, 40)],
    );
    let tables = u64::from(A::LEVELS - 1);
    assert_eq!(points, 3 + tables, "three VMAs and the tables that there may have to be");
}

fn move_middle<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::To(VirtAddr(TO));
            Ok((space.mremap(VirtAddr(CROSSING + 4 * PAGE), 8 * PAGE, 8 * PAGE, target)?.0, None))
        },
        |at| {
            let above = moved(CROSSING + 12, CROSSING + 12 * PAGE, 4);
            vec![filled(CROSSING, 4), moved(CROSSING + 4, at, 8), above]
        },
    );
    assert!(points >= 4, "two VMAs and the tables: {points}");
}

/// Source and destination are parts of the same mapping.
fn move_within<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::To(VirtAddr(CROSSING + 10 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING + 2 * PAGE), 3 * PAGE, 3 * PAGE, target)?.0, None))
        },
        |at| {
            vec![
                filled(CROSSING, 2),
                moved(CROSSING + 5, CROSSING + 5 * PAGE, 5),
                moved(CROSSING + 2, at, 3),
                moved(CROSSING + 13, at + 3 * PAGE, 3),
            ]
        },
    );
    assert_eq!(points, 3 + u64::from(A::LEVELS - 1));
}

fn move_tables<A: Walk>() {
    let case = Case {
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 6 * MIB)).unwrap();
            fixture.fill(AT, 1536);
        },
        before: vec![filled(AT, 1536)],
        ..two_tables::<A>()
    };
    let points = to(
        case,
        |space| {
            let target = Remap::To(VirtAddr(TO + 2 * MIB));
            Ok((space.mremap(VirtAddr(AT), 6 * MIB, 6 * MIB, target)?.0, None))
        },
        |at| vec![moved(AT, at, 1536)],
    );
    assert_eq!(points, 1, "the table of level 2");
}

fn move_huge<A: Walk>() {
    let points = to::<A>(
        huge(),
        |space| {
            let target = Remap::To(VirtAddr(TO + 2 * MIB));
            Ok((space.mremap(VirtAddr(AT), 2 * MIB, 2 * MIB, target)?.0, None))
        },
        |at| vec![moved(AT, at, 512)],
    );
    assert_eq!(points, 1, "the table of level 2; the one on deposit moves");
}

fn shift_huge<A: Walk>() {
    let points = to::<A>(
        huge(),
        |space| {
            let target = Remap::To(VirtAddr(TO + 16 * PAGE));
            Ok((space.mremap(VirtAddr(AT), 2 * MIB, 2 * MIB, target)?.0, None))
        },
        |at| vec![moved(AT, at, 512)],
    );
    assert_eq!(points, 3, "a table of level 2, and two of level 1");
}

fn move_in_huge<A: Walk>() {
    let points = to::<A>(
        huge(),
        |space| {
            let target = Remap::To(VirtAddr(TO + 16 * PAGE));
            Ok((space.mremap(VirtAddr(AT + 3 * PAGE), 99 * PAGE, 99 * PAGE, target)?.0, None))
        },
        |at| vec![filled(AT, 3), moved(AT + 3, at, 99), moved(AT + 102, AT + 102 * PAGE, 410)],
    );
    assert_eq!(points, 4, "two VMAs and two tables");
}

/// Each mapping moves or stays as a whole. Mappings before one that cannot move have moved, as
/// documented.
fn move_several<A: Walk>() {
    let case = Case {
        set_up: |fixture| {
            let upper = CROSSING + 6 * PAGE;
            fixture.space.mmap(&fixed(CROSSING, 4 * PAGE)).unwrap();
            fixture.space.mmap(&fixed(upper, 10 * PAGE)).unwrap();
            fixture.space.mprotect(VirtAddr(upper), 4 * PAGE, READ_WRITE_EXECUTE).unwrap();
            fixture.fill(CROSSING, 4);
            fixture.fill(upper, 10);
        },
        before: vec![filled(CROSSING, 4), filled(CROSSING + 6 * PAGE, 10)],
        layout: Layout::MayDiffer,
        ..two_tables::<A>()
    };
    let points = to(
        case,
        |space| {
            let (from, to, length) = (VirtAddr(CROSSING), VirtAddr(TO - 3 * PAGE), 16 * PAGE);
            let done = space.mremap(from, length, length, Remap::To(to));
            // Moves everything back to its old place.
            if done.is_err() {
                space.memory().fail_allocations_after(None);
                let failures = testing::failed_allocations(space.memory());
                let back = space.mremap(to, length, length, Remap::To(from));
                assert!(matches!(back, Ok(_) | Err(Error::NotMapped(_))), "{back:?}");
                assert_eq!(testing::failed_allocations(space.memory()), failures);
            }
            Ok((done?.0, None))
        },
        |at| vec![moved(CROSSING, at, 4), moved(CROSSING + 6 * PAGE, at + 6 * PAGE, 10)],
    );
    // The tables are the same as in `moving_across_tables`; the first mapping needs all of them.
    let tables = u64::from(A::LEVELS - 1) + u64::from(A::LEVELS.min(3) - 1);
    assert!((3 + 4..=3 + tables).contains(&points), "three VMAs and the tables: {points}");
}

fn leave_pages<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::LeaveTo(VirtAddr(TO - 3 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, target)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 16), zero(CROSSING, 16)],
    );
    let tables = u64::from(A::LEVELS - 1) + u64::from(A::LEVELS.min(3) - 1);
    assert!((1 + 4..=1 + tables).contains(&points), "{points}");
}

fn leave_anywhere<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let remap = Remap::Leave(VirtAddr(0));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, remap)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 16), zero(CROSSING, 16)],
    );
    assert!(points >= 3, "the VMA and the tables: {points}");
}

/// The rest is one mapping, without splits.
fn leave_middle<A: Walk>() {
    let points = to::<A>(
        two_tables(),
        |space| {
            let target = Remap::LeaveTo(VirtAddr(TO));
            Ok((space.mremap(VirtAddr(CROSSING + 4 * PAGE), 8 * PAGE, 8 * PAGE, target)?.0, None))
        },
        |at| {
            let middle = [moved(CROSSING + 4, at, 8), zero(CROSSING + 4 * PAGE, 8)];
            let edges = [filled(CROSSING, 4), moved(CROSSING + 12, CROSSING + 12 * PAGE, 4)];
            middle.into_iter().chain(edges).collect()
        },
    );
    assert!(points >= 3, "the VMA and the tables: {points}");
}

fn leave_over<A: Walk>() {
    let case = Case {
        set_up: |fixture| {
            (two_tables().set_up)(fixture);
            fixture.space.mmap(&fixed(TO, 64 * PAGE)).unwrap();
            fixture.fill(TO, 64);
        },
        before: vec![filled(CROSSING, 16), filled(TO, 64)],
        ..two_tables::<A>()
    };
    let points = to(
        case,
        |space| {
            let target = Remap::LeaveTo(VirtAddr(TO + 8 * PAGE));
            Ok((space.mremap(VirtAddr(CROSSING), 16 * PAGE, 16 * PAGE, target)?.0, None))
        },
        |at| vec![moved(CROSSING, at, 16), zero(CROSSING, 16), filled(TO, 8)],
    );
    let tables = u64::from(A::LEVELS - 1);
    assert_eq!(points, 3 + tables, "three VMAs and the tables that there may have to be");
}

fn leave_tables<A: Walk>() {
    let case = Case {
        set_up: |fixture| {
            fixture.space.mmap(&fixed(AT, 6 * MIB)).unwrap();
            fixture.fill(AT, 1536);
        },
        before: vec![filled(AT, 1536)],
        ..two_tables::<A>()
    };
    let points = to(
        case,
        |space| {
            let target = Remap::LeaveTo(VirtAddr(TO + 2 * MIB));
            Ok((space.mremap(VirtAddr(AT), 6 * MIB, 6 * MIB, target)?.0, None))
        },
        |at| vec![moved(AT, at, 1536), zero(AT, 1536)],
    );
    assert_eq!(points, 2, "the VMA, and the table of level 2");
}

fn leave_in_huge<A: Walk>() {
    let points = to::<A>(
        huge(),
        |space| {
            let target = Remap::LeaveTo(VirtAddr(TO + 16 * PAGE));
            Ok((space.mremap(VirtAddr(AT + 3 * PAGE), 99 * PAGE, 99 * PAGE, target)?.0, None))
        },
        |at| {
            let rest = [filled(AT, 3), moved(AT + 102, AT + 102 * PAGE, 410)];
            rest.into_iter().chain([moved(AT + 3, at, 99), zero(AT + 3 * PAGE, 99)]).collect()
        },
    );
    assert_eq!(points, 3, "the VMA and two tables");
}
