//! The index compared with a standard library map through arbitrary sequences of steps.

use std::collections::BTreeMap;
use std::iter;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Inserts the absent pages of the range, in frames that begin with the second number.
    Set(u64, u32, u32),
    /// Like `Set`, but only this many allocations succeed.
    SetWithout(u64, u32, u32, u64),
    /// Prepares pages and prunes them again.
    Abandon(u64, u32),
    Take(u64, u64),
    TakeAll(u64, u64),
    SetFlags(u64, u64),
    ClearFlags(u64, u64),
    Clear,
}

/// Page numbers close to the bounds of levels, nodes and the numbers themselves.
pub(super) fn page() -> impl Strategy<Value = u64> {
    let ends = [6, 12, 18, 30, 36, 48, 52].map(|bits| 1_u64 << bits);
    let around = (prop::sample::select(ends.to_vec()), 0..200_u64)
        .prop_map(|(end, by)| (end + 100).saturating_sub(by).min(PAGE_LIMIT - 1));
    prop_oneof![3 => 0..300_u64, 3 => around, 1 => 0..PAGE_LIMIT]
}

/// A range of pages: mostly short, sometimes nearly all.
pub(super) fn range() -> impl Strategy<Value = (u64, u64)> {
    (page(), prop_oneof![3 => 0..200_u64, 1 => 0..PAGE_LIMIT, 1 => Just(u64::MAX)])
        .prop_map(|(from, count)| (from, from.saturating_add(count)))
}

fn step() -> impl Strategy<Value = Step> {
    let set = || (page(), 0..4_u32, 1..150_u32).prop_map(|(page, f, n)| (page, f * 50, n));
    prop_oneof![
        8 => set().prop_map(|(page, frame, count)| Step::Set(page, frame, count)),
        3 => (set(), 0..12_u64).prop_map(|((page, f, n), left)| Step::SetWithout(page, f, n, left)),
        1 => (page(), 1..150_u32).prop_map(|(page, count)| Step::Abandon(page, count)),
        5 => range().prop_map(|(from, end)| Step::Take(from, end)),
        1 => range().prop_map(|(from, end)| Step::TakeAll(from, end)),
        3 => range().prop_map(|(from, end)| Step::SetFlags(from, end - from)),
        2 => range().prop_map(|(from, end)| Step::ClearFlags(from, end - from)),
        1 => Just(Step::Clear),
    ]
}

/// An index and its expected content.
struct Pair {
    world: World,
    model: BTreeMap<u64, Slot>,
}

impl Pair {
    fn new() -> Self {
        Self { world: World::new(), model: BTreeMap::new() }
    }

    /// The first run of pages with `flags` in the range, page by page.
    fn next_run(&self, flags: PageFlags, from: u64, end: u64) -> Option<IndexRun> {
        let fits = |slot: &Slot| slot.flags.contains(flags);
        let mut range = self.model.range(from..end.max(from)).filter(|(_, slot)| fits(slot));
        let (&page, Slot { frame, .. }) = range.next()?;
        let follows = |n: &u32| {
            let next = page + u64::from(*n);
            let slot = self.model.get(&next).filter(|slot| fits(slot) && next < end);
            slot.is_some_and(|slot| slot.frame == frame.plus(*n))
        };
        Some(IndexRun { page, frame: *frame, count: 1 + (1..).take_while(follows).count() as u32 })
    }

    /// Inserts the absent pages among `count` from `first` on, which are prepared.
    fn set(&mut self, first: u64, frame: u32, count: u32) {
        let mut n = 0;
        while n < count {
            let page = first + u64::from(n);
            let absent = |n: &u32| !self.model.contains_key(&(first + u64::from(*n)));
            let length = (n..count).take_while(absent).count() as u32;
            let first_frame = Frame(frame + n);
            self.world.index.set(page, first_frame, length);
            for by in 0..length {
                let slot = Slot { frame: first_frame.plus(by), flags: PageFlags::empty() };
                self.model.insert(page + u64::from(by), slot);
            }
            n += length.max(1);
        }
    }

    fn take(&mut self, from: u64, end: u64) -> bool {
        let expected = self.next_run(PageFlags::empty(), from, end);
        assert_eq!(self.world.take(from, end), expected);
        let Some(run) = expected else { return false };
        for n in 0..u64::from(run.count) {
            self.model.remove(&(run.page + n));
        }
        true
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Set(first, frame, count) => {
                let count = u64::from(count).min(PAGE_LIMIT - first) as u32;
                assert_eq!(self.world.prepare(first, count.into()), Ok(()));
                self.set(first, frame, count);
            }
            Step::SetWithout(first, frame, count, left) => {
                let count = u64::from(count).min(PAGE_LIMIT - first) as u32;
                self.world.frames.inject.fail_after(Some(left));
                let prepared = self.world.prepare(first, count.into());
                self.world.frames.inject.fail_after(None);
                assert_eq!(prepared.is_err(), self.world.frames.inject.failed() > 0);
                if prepared.is_ok() {
                    self.set(first, frame, count);
                }
            }
            Step::Abandon(first, count) => {
                let count = u64::from(count).min(PAGE_LIMIT - first);
                assert_eq!(self.world.prepare(first, count), Ok(()));
                self.compare_runs();
                self.world.prune(first, count);
            }
            Step::Take(from, end) => _ = self.take(from, end),
            Step::TakeAll(from, end) => while self.take(from, end) {},
            Step::SetFlags(first, count) => {
                let failed = PageFlags::DIRTY | PageFlags::FAILED;
                let flags = if first % 2 == 0 { PageFlags::DIRTY } else { failed };
                self.world.index.set_flags(first, count, flags);
                let range = self.model.range_mut(first..first.saturating_add(count));
                range.for_each(|(_, slot)| slot.flags = flags);
            }
            Step::ClearFlags(first, count) => {
                self.world.index.clear_flags(first, count);
                let range = self.model.range_mut(first..first.saturating_add(count));
                range.for_each(|(_, slot)| slot.flags = PageFlags::empty());
            }
            Step::Clear => {
                self.world.clear();
                self.model.clear();
            }
        }
    }

    fn compare_runs(&self) {
        for flags in [PageFlags::empty(), PageFlags::DIRTY] {
            let next = |from| self.next_run(flags, from, u64::MAX);
            let after = |run: &IndexRun| next(run.page + u64::from(run.count));
            assert!(std::iter::successors(next(0), after).eq(self.world.runs_with(flags)));
        }
    }

    fn compare(&self, page: u64, end: u64) {
        let index = &self.world.index;
        assert!(index.check());
        assert_eq!(index.node_count(), nodes_for(self.model.keys()));
        assert_eq!(index.node_count(), self.world.slab.objects(&self.world.frames));
        assert_eq!(index.get(page), self.model.get(&page).copied());
        let limit = end - page;
        let expected = match self.next_run(PageFlags::empty(), page, u64::MAX) {
            None => PageStretch::Empty(limit),
            Some(next) if next.page > page => PageStretch::Empty(limit.min(next.page - page)),
            Some(next) => PageStretch::Frames(next.frame, limit.min(next.count.into()) as u32),
        };
        assert_eq!(index.run(page, limit), expected);
        for flags in [PageFlags::empty(), PageFlags::DIRTY] {
            assert_eq!(index.next_run_with(flags, page, end), self.next_run(flags, page, end));
        }
        let run = self.next_run(PageFlags::empty(), page, end);
        assert_eq!(index.next_run(page, end), run);
        for cut in [1, 3, u64::MAX] {
            let shorter = |run: IndexRun| IndexRun { count: run.count.min(cut as u32), ..run };
            let next = |from| self.next_run(PageFlags::empty(), from, end).map(shorter);
            let after = |run: &IndexRun| run.page + u64::from(run.count);
            let all: Vec<_> = iter::successors(next(page), |run| next(after(run))).collect();
            for most in [1, 2, all.len() + 1] {
                let mut found = Vec::new();
                let done = index.each_run_cut(
                    page,
                    end,
                    |_| cut,
                    |run| {
                        found.push(run);
                        found.len() < most
                    },
                );
                assert_eq!(found, all[..most.min(all.len())]);
                assert_eq!(done, all.get(most - 1).map_or(end, after));
            }
        }
        let is_dirty = |slot: &&Slot| slot.flags.contains(PageFlags::DIRTY);
        let dirty = self.model.values().filter(is_dirty).count() as u64;
        assert_eq!(index.has_dirty(), dirty > 0);
        assert_eq!(index.dirty_count(), dirty);
        let has_failed = |slot: &&Slot| slot.flags.contains(PageFlags::FAILED);
        assert_eq!(index.failed_count(), self.model.values().filter(has_failed).count() as u64);
        let alike = self.next_run(PageFlags::DIRTY, page, end).map(|run| {
            let flags = |by: u32| self.model[&(run.page + u64::from(by))].flags;
            let count = (0..run.count).take_while(|by| flags(*by) == flags(0)).count() as u32;
            (IndexRun { count, ..run }, flags(0))
        });
        assert_eq!(index.next_dirty(page, end), alike);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_index_agrees_with_a_btree_map(
        steps in prop::collection::vec((step(), range()), 1..60),
    ) {
        let mut pair = Pair::new();
        for (step, (from, end)) in steps {
            pair.apply(step);
            pair.compare(from, end);
            pair.compare_runs();
        }
        pair.world.finish();
    }
}
