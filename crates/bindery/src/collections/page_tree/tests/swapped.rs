//! Pages in swap beside pages in memory, compared with a `BTreeMap`.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::model::{page, range};
use super::*;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Memory(Frame),
    Swap(SwapSlot),
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    /// Adds the absent pages.
    Add(u64, u32, u32),
    /// Swaps out the first run of the range, to slots from a given number on.
    Out(u64, u64, u64),
    /// Swaps in the first run of the range.
    In(u64, u64, u32),
    TakeFrames(u64, u64),
    TakeSwapped(u64, u64),
    /// Takes the first run in memory of the range, which leaves shadows.
    Reclaim(u64, u64, u32),
    /// Marks pages.
    Dirty(u64, u64),
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        6 => (page(), 0..4_u32, 1..150_u32).prop_map(|(page, f, n)| Turn::Add(page, f * 50, n)),
        6 => (range(), 0..4_u64).prop_map(|((from, end), slot)| Turn::Out(from, end, slot * 50)),
        3 => (range(), 0..4_u32).prop_map(|((from, end), f)| Turn::In(from, end, f * 50)),
        2 => range().prop_map(|(from, end)| Turn::TakeFrames(from, end)),
        3 => range().prop_map(|(from, end)| Turn::TakeSwapped(from, end)),
        3 => (range(), 0..9_u32).prop_map(|((from, end), now)| Turn::Reclaim(from, end, now)),
        2 => range().prop_map(|(from, end)| Turn::Dirty(from, end - from)),
    ]
}

fn slot(number: u64) -> SwapSlot {
    SwapSlot { area: 5, slot: (1 << 37) + number }
}

struct Both {
    world: World,
    model: BTreeMap<u64, Place>,
    shadows: BTreeMap<u64, u32>,
}

/// The pages of the node of level 0 that contains the page's slot.
fn neighbors(page: u64) -> core::ops::Range<u64> {
    page / 64 * 64..page / 64 * 64 + 64
}

impl Both {
    /// The first run of one kind in the range: its first page, the location of that page, and its
    /// length.
    fn next(&self, from: u64, end: u64, swapped: bool) -> Option<(u64, Place, u32)> {
        let kind = |place: &Place| matches!(place, Place::Swap(_)) == swapped;
        let mut range = self.model.range(from..end.max(from));
        let (&page, &first) = range.find(|(_, place)| kind(place))?;
        let follows = |n: &u32| {
            let next = page + u64::from(*n);
            let expected = match first {
                Place::Memory(frame) => Place::Memory(frame.plus(*n)),
                Place::Swap(slot) => Place::Swap(slot.plus(u64::from(*n))),
            };
            next < end && self.model.get(&next) == Some(&expected)
        };
        Some((page, first, 1 + (1..).take_while(follows).count() as u32))
    }

    fn take(&mut self, page: u64, count: u32) {
        (page..page + u64::from(count)).for_each(|page| _ = self.model.remove(&page));
    }

    fn apply(&mut self, turn: Turn) {
        match turn {
            Turn::Add(first, frame, count) => {
                for n in 0..count {
                    let page = first + u64::from(n);
                    if page < PAGE_LIMIT && !self.model.contains_key(&page) {
                        self.world.add(page, frame + n, 1);
                        self.model.insert(page, Place::Memory(Frame(frame + n)));
                    }
                }
            }
            Turn::Out(from, end, number) => {
                let Some((page, _, count)) = self.next(from, end, false) else { return };
                self.world.index.send_out(page, slot(number), count);
                for n in 0..u64::from(count) {
                    self.model.insert(page + n, Place::Swap(slot(number + n)));
                }
            }
            Turn::In(from, end, frame) => {
                let Some((page, _, count)) = self.next(from, end, true) else { return };
                self.world.index.bring_in(page, Frame(frame), count);
                for n in 0..count {
                    self.model.insert(page + u64::from(n), Place::Memory(Frame(frame + n)));
                }
            }
            Turn::TakeFrames(from, end) => {
                let expected = self.next(from, end, false);
                let taken = self.world.take(from, end);
                let told = taken.map(|run| (run.page, Place::Memory(run.frame), run.count));
                assert_eq!(told, expected);
                expected.into_iter().for_each(|(page, _, count)| self.take(page, count));
            }
            Turn::TakeSwapped(from, end) => {
                let expected = self.next(from, end, true);
                let (index, nodes) = self.world.parts();
                let taken = index.take_swapped(from, end, &nodes);
                let told = taken.map(|run| (run.page, Place::Swap(run.first), run.count));
                assert_eq!(told, expected);
                expected.into_iter().for_each(|(page, _, count)| self.take(page, count));
            }
            Turn::Reclaim(from, end, now) => {
                let Some((page, _, count)) = self.next(from, end, false) else { return };
                self.apply(Turn::TakeFrames(from, end));
                self.world.index.leave_shadows(page, count, now);
                self.shadows.extend((page..page + u64::from(count)).map(|page| (page, now)));
            }
            Turn::Dirty(first, count) => {
                self.world.index.set_flags(first, count, PageFlags::DIRTY);
            }
        }
    }

    /// A shadow is lost when its page comes back, and with the last page of its node.
    fn compare_shadows(&mut self) {
        let Self { world, model, shadows } = self;
        shadows.retain(|page, _| {
            !model.contains_key(page) && model.range(neighbors(*page)).next().is_some()
        });
        for page in shadows.keys().flat_map(|page| neighbors(*page)) {
            assert_eq!(world.index.shadow(page, 1), shadows.get(&page).copied());
            let first = shadows.range(page..page + 70).next().map(|(_, shadow)| *shadow);
            assert_eq!(world.index.shadow(page, 70), first);
        }
    }

    fn compare(&self, page: u64, end: u64) {
        let index = &self.world.index;
        assert!(index.check());
        assert_eq!(index.node_count(), nodes_for(self.model.keys()));
        let frames = index.next_run(page, end);
        let frames = frames.map(|run| (run.page, Place::Memory(run.frame), run.count));
        assert_eq!(frames, self.next(page, end, false));
        let swapped = index.next_swapped(page, end);
        let swapped = swapped.map(|run| (run.page, Place::Swap(run.first), run.count));
        assert_eq!(swapped, self.next(page, end, true));
        let cut = index.next_swapped_up_to(page, end, 3).map(|run| (run.page, run.count));
        assert_eq!(cut, swapped.map(|(page, _, count)| (page, count.min(3))));
        let used = self.model.range(page..end.max(page)).next().map(|(page, _)| *page);
        assert_eq!(index.next_used(page, end), used);
        let limit = end - page;
        let there = match self.model.get(&page) {
            _ if limit == 0 => return,
            None => PageStretch::Empty(used.map_or(limit, |used| used - page)),
            Some(Place::Memory(frame)) => {
                PageStretch::Frames(*frame, self.next(page, end, false).unwrap().2)
            }
            Some(Place::Swap(slot)) => {
                PageStretch::Swapped(*slot, self.next(page, end, true).unwrap().2)
            }
        };
        assert_eq!(index.run(page, limit), there);
        let found = index.get(page).map(|slot| Place::Memory(slot.frame));
        assert_eq!(found.or(index.swapped(page).map(Place::Swap)), self.model.get(&page).copied());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn pages_in_swap_and_memory_are_distinguished(
        turns in prop::collection::vec((turn(), range()), 1..60),
    ) {
        let (model, shadows) = (BTreeMap::new(), BTreeMap::new());
        let mut both = Both { world: World::new(), model, shadows };
        for (turn, (from, end)) in turns {
            both.apply(turn);
            both.compare_shadows();
            both.compare(from, end);
        }
        both.world.finish();
    }
}

#[test]
fn slots_and_areas_of_any_size_are_kept() {
    let mut world = World::new();
    world.add(60, 0, 10);
    let last = SwapSlot { area: 31, slot: (1 << 38) - 10 };
    world.index.send_out(60, last, 10);
    assert_eq!(world.index.swapped(69), Some(last.plus(9)));
    assert_eq!(world.index.run(60, 100), PageStretch::Swapped(last, 10));
    assert_eq!((world.index.get(60), world.index.next_run(0, u64::MAX)), (None, None));
    world.index.bring_in(62, Frame(0), 3);
    assert_eq!(world.index.next_swapped(0, u64::MAX).map(|run| run.count), Some(2));
    assert_eq!(world.runs(), [run(62, 0, 3)]);
    world.finish();
}

#[test]
fn swapped_pages_are_found_without_resident_ones() {
    let mut world = World::new();
    world.add(0, 0, 400);
    world.index.send_out(390, slot(0), 2);
    let (found, looks) = looked_at(&mut world, |index| index.next_swapped(0, u64::MAX));
    assert_eq!(found.map(|run| (run.page, run.count)), Some((390, 2)));
    assert!(looks < 12, "{looks} nodes and slots");
    world.index.send_out(0, slot(100), 390);
    let (found, looks) = looked_at(&mut world, |index| index.next_swapped_up_to(5, u64::MAX, 4));
    assert_eq!(found.map(|run| (run.page, run.count)), Some((5, 4)));
    assert!(looks < 16, "{looks} nodes and slots, whatever the length of the run");
    world.finish();
}
