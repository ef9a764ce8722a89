//! Random moves at the edges of pages, tables and mappings, compared with a list of pages.

use std::collections::BTreeMap;

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, X86_64};
use bindery::testing::PageMove;
use bindery::{Advice, Errno, Inspection};
use bindery_hosted::Walk;
use proptest::prelude::*;

use super::fixture::{FROM, LENGTH, Moving, PAGE, TO, with_moving};

/// The content of each present page, by its address.
type Pages = BTreeMap<u64, u64>;

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, value: u64 },
    PageOut { at: u64, pages: u64 },
    Discard { at: u64, pages: u64 },
    Move { source: u64, destination: u64, length: u64, allows_holes: bool },
}

/// Pages near the beginning, the end, and the table borders of either mapping.
fn place() -> impl Strategy<Value = u64> {
    let near = prop_oneof![Just(0u64), Just(512), Just(1024), Just(2048), Just(16), Just(600)];
    let base = prop_oneof![Just(FROM), Just(TO)];
    (base, near, 0u64..40).prop_map(|(base, near, off)| {
        let page = (near + off).saturating_sub(20).min(LENGTH / PAGE - 1);
        base + page * PAGE
    })
}

fn length() -> impl Strategy<Value = u64> {
    let pages = prop_oneof![1u64..40, Just(512), 500u64..530, Just(1024), Just(2048)];
    prop_oneof![9 => pages.prop_map(|pages| pages * PAGE), 1 => any::<u64>()]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (place(), 1u64..1 << 40).prop_map(|(at, value)| Step::Write { at, value }),
        1 => (place(), 1u64..40).prop_map(|(at, pages)| Step::PageOut { at, pages }),
        1 => (place(), 1u64..40).prop_map(|(at, pages)| Step::Discard { at, pages }),
        4 => (place(), place(), length(), any::<bool>()).prop_map(
            |(source, destination, length, allows_holes)| {
                Step::Move { source, destination, length, allows_holes }
            }
        ),
    ]
}

/// Pages of the mapping from `at` on.
fn left_at(at: u64) -> u64 {
    let base = if at < TO { FROM } else { TO };
    (base + LENGTH - at) / PAGE
}

/// Adds the pages that faults have created besides the written ones.
fn look<A: Walk>(moving: &Moving<'_, '_, A>, pages: &mut Pages) {
    for base in [FROM, TO] {
        for at in (base..base + LENGTH).step_by(PAGE as usize) {
            let is_there = moving.space.inspect(VirtAddr(at)) != Inspection::Empty;
            if is_there {
                pages.entry(at).or_insert(0);
            } else {
                assert_eq!(pages.remove(&at), None, "{at:#x} is lost");
            }
        }
    }
}

/// The effect of a move of single pages, and its result.
fn moved(pages: &mut Pages, what: &PageMove) -> (u64, Result<(), Errno>) {
    let (source, destination) = (what.source.0, what.destination.0);
    let fits = |at: u64| what.length / PAGE <= left_at(at);
    if what.length == 0 || !what.length.is_multiple_of(PAGE) || !fits(source) || !fits(destination)
    {
        return (0, Err(Errno::EINVAL));
    }
    for offset in (0..what.length).step_by(PAGE as usize) {
        let (from, to) = (source + offset, destination + offset);
        let stop = match (pages.contains_key(&from), pages.contains_key(&to)) {
            // If the source has no table, the destination does not matter.
            (false, true) => Some(Errno::EEXIST),
            (_, true) => Some(Errno::EEXIST),
            (false, false) if !what.allows_holes => Some(Errno::ENOENT),
            _ => None,
        };
        if let Some(errno) = stop {
            return (offset, Err(errno));
        }
        if let Some(value) = pages.remove(&from) {
            pages.insert(to, value);
        }
    }
    (what.length, Ok(()))
}

fn run<A: Walk>(order: u8, steps: &[Step]) {
    with_moving::<A>(order, |moving| {
        let mut pages = Pages::new();
        for step in steps {
            match *step {
                Step::Write { at, value } => {
                    moving.program.store(VirtAddr(at), value).unwrap();
                    pages.insert(at, value);
                    look(moving, &mut pages);
                }
                Step::PageOut { at, pages } => {
                    let length = pages.min(left_at(at)) * PAGE;
                    moving.space.madvise(VirtAddr(at), length, Advice::PageOut).unwrap();
                }
                Step::Discard { at, pages: count } => {
                    let length = count.min(left_at(at)) * PAGE;
                    moving.space.discard(VirtAddr(at), length).unwrap();
                    pages.retain(|page, _| *page < at || *page >= at + length);
                }
                Step::Move { source, destination, length, allows_holes } => {
                    let (source, destination) = (VirtAddr(source), VirtAddr(destination));
                    let what = PageMove {
                        source,
                        destination,
                        length,
                        allows_holes,
                        ..PageMove::default()
                    };
                    let found = moving.try_move(&what);
                    let expected = moved(&mut pages, &what);
                    // If neither address is valid, Linux first reports the one without a table.
                    let either = found.0 == expected.0
                        && expected.1 == Err(Errno::EEXIST)
                        && found.1 == Err(Errno::ENOENT)
                        && !pages.contains_key(&(source.0 + found.0));
                    assert!(found == expected || either, "{what:?}: {found:?}, not {expected:?}");
                    look(moving, &mut pages);
                }
            }
        }
        for (at, value) in pages {
            assert_eq!(moving.program.load(VirtAddr(at)), Ok(value), "at {at:#x}");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn moves_equal_those_of_single_pages_x86_64(
        order in prop_oneof![Just(0u8), Just(4), Just(9)],
        steps in prop::collection::vec(step(), 1..24),
    ) {
        run::<X86_64<4>>(order, &steps);
    }

    #[test]
    fn moves_are_as_those_of_single_pages_aarch64(
        order in prop_oneof![Just(0u8), Just(4), Just(9)],
        steps in prop::collection::vec(step(), 1..24),
    ) {
        run::<AArch64>(order, &steps);
    }
}
