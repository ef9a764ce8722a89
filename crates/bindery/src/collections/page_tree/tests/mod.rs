//! Tests of the index, with memory running out at every point.

mod model;
mod swapped;

extern crate std;

use std::collections::BTreeSet;
use std::vec::Vec;

use super::*;
use crate::frame::Frames;
use crate::frame::slab::Slab;
use crate::frame::tests::{Machine, assert_all_free, new_frames};

/// The frames and the slab for the nodes of one index.
struct World {
    index: PageIndex,
    slab: Slab<IndexNode, Machine>,
    frames: Frames<Machine>,
}

impl World {
    fn new() -> Self {
        let frames = new_frames(512);
        Self { index: PageIndex::new(), slab: Slab::new(), frames }
    }

    /// The index and the source of its nodes.
    fn parts(&mut self) -> (&mut PageIndex, Nodes<'_, Machine>) {
        // SAFETY: 1. a world has one index, one slab and one allocator.
        let nodes = unsafe { Nodes::new(&self.slab, &self.frames) };
        (&mut self.index, nodes)
    }

    fn prepare(&mut self, first: u64, count: u64) -> Result<(), NoMemory> {
        let (index, nodes) = self.parts();
        index.prepare(first, count, &nodes)
    }

    fn add(&mut self, first: u64, frame: u32, count: u32) {
        assert_eq!(self.prepare(first, count.into()), Ok(()));
        self.index.set(first, Frame(frame), count);
    }

    fn take(&mut self, from: u64, end: u64) -> Option<IndexRun> {
        let (index, nodes) = self.parts();
        index.take_run(from, end, &nodes)
    }

    fn prune(&mut self, first: u64, count: u64) {
        let (index, nodes) = self.parts();
        index.prune(first, count, &nodes);
    }

    fn clear(&mut self) {
        let (index, nodes) = self.parts();
        index.clear(&nodes);
    }

    /// All runs of pages that have `flags`.
    fn runs_with(&self, flags: PageFlags) -> Vec<IndexRun> {
        let next = |from| self.index.next_run_with(flags, from, u64::MAX);
        let after = |run: &IndexRun| next(run.page + u64::from(run.count));
        std::iter::successors(next(0), after).collect()
    }

    fn runs(&self) -> Vec<IndexRun> {
        self.runs_with(PageFlags::empty())
    }

    /// Asserts that no node and no frame has leaked.
    fn finish(mut self) {
        self.clear();
        assert!(self.index.check());
        assert_eq!((self.index.node_count(), self.slab.objects(&self.frames)), (0, 0));
        self.slab.trim(&self.frames);
        assert_all_free(&self.frames);
    }
}

fn run(page: u64, frame: u32, count: u32) -> IndexRun {
    IndexRun { page, frame: Frame(frame), count }
}

/// The number of nodes that the pages need.
fn nodes_for<'a>(pages: impl Iterator<Item = &'a u64> + Clone) -> u64 {
    let Some(highest) = pages.clone().max() else { return 0 };
    let beneath = |level| pages.clone().map(move |page| page >> (6 * (level + 1)));
    let levels = (0..=8).take_while(|level| *level == 0 || highest >> (6 * level) > 0);
    levels.map(|level| beneath(level).collect::<BTreeSet<_>>().len() as u64).sum()
}

#[test]
fn an_index_without_pages_has_no_node() {
    static INDEX: PageIndex = PageIndex::new();
    assert_eq!(INDEX.run(0, u64::MAX), PageStretch::Empty(u64::MAX));
    assert_eq!(INDEX.run(u64::MAX, 5), PageStretch::Empty(5));
    assert_eq!((INDEX.get(0), INDEX.get(u64::MAX)), (None, None));
    assert_eq!(INDEX.next_run(0, u64::MAX), None);
    assert!(INDEX.check() && INDEX.node_count() == 0);
}

#[test]
fn seven_nodes_fit_in_a_frame() {
    assert_eq!(Slab::<IndexNode, Machine>::PER_FRAME, 7);
}

#[test]
fn an_index_may_be_shared_and_sent() {
    fn shared<T: Send + Sync>() {}
    shared::<PageIndex>();
}

#[test]
fn a_page_in_frame_zero_is_present() {
    let mut world = World::new();
    world.add(3, 0, 1);
    let slot = Slot { frame: Frame(0), flags: PageFlags::empty() };
    assert_eq!((world.index.get(3), world.index.get(4)), (Some(slot), None));
    world.finish();
}

#[test]
fn adjacent_folios_are_one_run_across_nodes() {
    let mut world = World::new();
    world.add(512, 0x200, 512);
    world.add(1024, 0x400, 16);
    world.add(1040, 0x800, 1);
    assert_eq!(world.runs(), [run(512, 0x200, 528), run(1040, 0x800, 1)]);
    assert_eq!(world.index.run(600, 10_000), PageStretch::Frames(Frame(0x258), 440));
    assert_eq!(world.index.run(600, 7), PageStretch::Frames(Frame(0x258), 7));
    world.finish();
}

#[test]
fn the_last_page_is_found_at_once() {
    let mut world = World::new();
    let last = PAGE_LIMIT - 1;
    world.add(0, 7, 1);
    world.add(last, 9, 1);
    assert_eq!(world.index.node_count(), 17, "they share the root of nine levels");
    assert_eq!(world.index.run(1, u64::MAX), PageStretch::Empty(last - 1));
    assert_eq!(world.index.next_run(1, last), None);
    assert_eq!(world.index.next_run(1, u64::MAX), Some(run(last, 9, 1)));
    assert_eq!(world.index.run(PAGE_LIMIT, 10), PageStretch::Empty(10));
    assert_eq!(world.take(1, u64::MAX), Some(run(last, 9, 1)));
    assert_eq!(world.index.node_count(), 1, "and the root sinks again");
    world.finish();
}

#[test]
fn pages_beyond_the_limit_are_refused() {
    let mut world = World::new();
    for (first, count) in [(PAGE_LIMIT, 1), (PAGE_LIMIT - 1, 2), (u64::MAX, 1), (1, u64::MAX)] {
        assert_eq!(world.prepare(first, count), Err(NoMemory));
    }
    assert_eq!(world.prepare(PAGE_LIMIT, 0), Ok(()));
    assert_eq!(world.slab.objects(&world.frames), 0);
    world.finish();
}

#[test]
fn a_hole_in_a_folio_leaves_both_ends() {
    let mut world = World::new();
    world.add(0, 0x1000, 512);
    assert_eq!(world.take(100, 300), Some(run(100, 0x1064, 200)));
    assert_eq!(world.take(100, 300), None);
    assert_eq!(world.runs(), [run(0, 0x1000, 100), run(300, 0x112c, 212)]);
    assert_eq!(world.index.run(100, 1000), PageStretch::Empty(200));
    assert_eq!(world.index.node_count(), 1 + 6, "two of eight nodes were emptied");
    world.finish();
}

#[test]
fn a_dirty_part_is_found_without_neighbors() {
    let mut world = World::new();
    world.add(60, 0x100, 100);
    world.add(1 << 40, 0x300, 1);
    world.index.set_flags(70, 60, PageFlags::DIRTY);
    let runs = [run(60, 0x100, 100), run(1 << 40, 0x300, 1)];
    assert_eq!(world.runs(), runs, "flags do not cut runs");
    assert_eq!(world.runs_with(PageFlags::DIRTY), [run(70, 0x10a, 60)]);
    let slot = Slot { frame: Frame(0x10a), flags: PageFlags::DIRTY };
    assert_eq!(world.index.get(70), Some(slot));
    world.index.clear_flags(80, u64::MAX);
    assert_eq!(world.runs_with(PageFlags::DIRTY), [run(70, 0x10a, 10)]);
    assert_eq!(world.runs(), runs);
    world.index.set_flags(0, u64::MAX, PageFlags::DIRTY);
    assert_eq!(world.runs_with(PageFlags::DIRTY), runs);
    world.finish();
}

#[test]
fn a_returned_page_has_no_old_flag() {
    let mut world = World::new();
    world.add(5, 0x100, 2);
    world.index.set_flags(0, 100, PageFlags::DIRTY);
    assert_eq!(world.take(5, 6), Some(run(5, 0x100, 1)));
    world.add(5, 0x200, 1);
    assert_eq!(world.runs_with(PageFlags::DIRTY), [run(6, 0x101, 1)]);
    world.finish();
}

#[test]
fn prepared_pages_stay_absent_and_searches_pass_them() {
    let mut world = World::new();
    world.add(0, 1, 1);
    assert_eq!(world.prepare(100, 1000), Ok(()));
    world.add(5000, 2, 1);
    assert_eq!(world.index.run(1, u64::MAX), PageStretch::Empty(4999));
    assert_eq!(world.runs(), [run(0, 1, 1), run(5000, 2, 1)]);
    assert!(!world.index.check(), "nodes without pages count as lost until they are pruned");
    world.prune(100, 1000);
    assert!(world.index.check());
    world.finish();
}

#[test]
fn clearing_frees_prepared_nodes_too() {
    let mut world = World::new();
    world.add(1 << 20, 1, 1);
    assert_eq!(world.prepare(1 << 50, 300), Ok(()));
    world.finish();
}

#[test]
fn running_out_of_memory_leaves_the_index_unchanged() {
    // Into an empty index, below, above and beside existing pages.
    let before = [&[][..], &[(0, 1)], &[(1 << 30, 1)], &[(0, 70), (1 << 51, 3)]];
    let new = [(0, 1), (63, 2), (4000, 200), ((1 << 36) - 2, 4), (PAGE_LIMIT - 130, 130)];
    for (before, (first, count)) in before.iter().flat_map(|b| new.map(|new| (*b, new))) {
        let mut world = World::new();
        before.iter().for_each(|(first, count)| world.add(*first, 0x50, *count));
        let (runs, nodes) = (world.runs(), world.index.node_count());
        for left in 0.. {
            world.frames.inject.fail_after(Some(left));
            let prepared = world.prepare(first, count);
            world.frames.inject.fail_after(None);
            if prepared.is_ok() {
                break;
            }
            assert_eq!(world.frames.inject.failed(), 1, "it stops at the first failure");
            assert!(world.index.check());
            assert_eq!((world.runs(), world.index.node_count()), (runs.clone(), nodes));
            assert_eq!(world.slab.objects(&world.frames), nodes);
        }
        world.finish();
    }
}

#[test]
fn full_memory_is_reported_and_comes_back() {
    let mut world = World::new();
    world.add(9, 1, 1);
    assert_eq!(world.prepare(0, PAGE_LIMIT), Err(NoMemory));
    assert!(world.index.check());
    assert_eq!(world.runs(), [run(9, 1, 1)]);
    assert_eq!(world.index.node_count(), 1);
    world.finish();
}

/// The number of steps of `work`.
fn looked_at<R>(world: &mut World, work: impl FnOnce(&mut PageIndex) -> R) -> (R, u64) {
    let before = world.index.looked_at();
    let result = work(&mut world.index);
    (result, world.index.looked_at() - before)
}

#[test]
fn dirty_pages_are_found_without_clean_ones() {
    let mut world = World::new();
    let count = 1 << 16;
    for first in (0..count).step_by(64) {
        // Not in consecutive frames.
        world.add(first, (first * 2) as u32, 64);
    }
    let dirty = |index: &mut PageIndex, from| {
        index.next_run_with(PageFlags::DIRTY, from, u64::MAX).map(|run| (run.page, run.count))
    };
    let (found, steps) = looked_at(&mut world, |index| dirty(index, 0));
    assert_eq!(found, None);
    assert!(steps <= 4, "{steps} steps in a clean index");
    for page in [100, 101, 40_000, count - 1] {
        world.index.set_flags(page, 1, PageFlags::DIRTY);
        assert!(world.index.check());
    }
    let mut from = 0;
    for wanted in [(100, 2), (40_000, 1), (count - 1, 1)] {
        let (found, steps) = looked_at(&mut world, |index| dirty(index, from));
        assert_eq!(found, Some(wanted));
        assert!(steps <= 20, "{steps} steps to {found:?}");
        from = wanted.0 + u64::from(wanted.1);
    }
    let ((), steps) = looked_at(&mut world, |index| index.clear_flags(0, u64::MAX));
    assert!(steps <= 60, "{steps} steps to clean three nodes");
    assert!(world.index.check());
    assert_eq!(dirty(&mut world.index, 0), None);
    // The marks of removed pages are removed as well, up to a root that moves to a lower level.
    world.index.set_flags(0, 1, PageFlags::DIRTY);
    world.index.set_flags(count - 64, 64, PageFlags::DIRTY);
    while world.take(64, u64::MAX).is_some() {
        assert!(dirty(&mut world.index, 0) == Some((0, 1)));
    }
    assert!(world.index.check());
    world.add(count, 7, 1);
    assert!(world.index.check(), "a root that becomes higher");
    assert_eq!(dirty(&mut world.index, 0), Some((0, 1)));
    world.clear();
}

#[test]
fn a_long_run_is_counted_in_pieces() {
    let mut world = World::new();
    for first in (0..8192).step_by(64) {
        world.add(first, first as u32, 64);
    }
    let (mut from, before) = (0, world.index.looked_at());
    while let Some(run) = world.index.next_run(from, u64::MAX) {
        assert_eq!((run.page, run.count), (from, LONGEST_RUN));
        from += u64::from(run.count);
    }
    assert_eq!(from, 8192);
    let steps = world.index.looked_at() - before;
    assert!(steps <= 2 * 8192, "{steps} steps for 8,192 pages");
    let (run, steps) = looked_at(&mut world, |index| index.run_cut(5, 8000, |_| 1));
    assert_eq!(run, PageStretch::Frames(Frame(5), 1));
    assert!(steps <= 8, "{steps} steps for one page of a long run");
    world.clear();
}
