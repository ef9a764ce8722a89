//! Sets of pages of a file, as ranges.

use alloc::vec::Vec;
use core::ops::Range;

/// A set of pages.
#[derive(Default)]
pub struct PageSet {
    /// By rising page. They neither overlap nor touch each other.
    ranges: Vec<Range<u64>>,
}

impl PageSet {
    /// No page.
    pub const fn new() -> Self {
        Self { ranges: Vec::new() }
    }

    /// A copy of the pages in a range; `None` if there is no memory for it.
    pub fn within(&self, pages: &Range<u64>) -> Option<Self> {
        let first = self.ranges.partition_point(|range| range.end <= pages.start);
        let behind = self.ranges.partition_point(|range| range.start < pages.end);
        let met = self.ranges.get(first..behind).unwrap_or_default();
        let mut ranges = Vec::new();
        ranges.try_reserve_exact(met.len()).ok()?;
        let part = |range: &Range<u64>| range.start.max(pages.start)..range.end.min(pages.end);
        ranges.extend(met.iter().map(part));
        Some(Self { ranges })
    }

    /// The first page of a range that is not in the set, and the pages after it up to one that is
    /// in the set.
    pub fn first_gap(&self, pages: &Range<u64>) -> Option<Range<u64>> {
        let mut at = pages.start;
        let first = self.ranges.partition_point(|range| range.end <= at);
        for range in self.ranges[first..].iter().take_while(|range| range.start < pages.end) {
            if range.start > at {
                return Some(at..range.start);
            }
            at = range.end;
        }
        (at < pages.end).then_some(at..pages.end)
    }

    /// The number of pages in a range.
    pub fn count(&self, pages: &Range<u64>) -> u64 {
        let first = self.ranges.partition_point(|range| range.end <= pages.start);
        let met = self.ranges[first..].iter().take_while(|range| range.start < pages.end);
        met.map(|range| range.end.min(pages.end) - range.start.max(pages.start)).sum()
    }

    /// The end of the longest run from the start of `pages` in which at most `room` pages are not
    /// in the set.
    pub fn end_with(&self, pages: &Range<u64>, room: u64) -> u64 {
        let (mut at, mut room) = (pages.start, room);
        let first = self.ranges.partition_point(|range| range.end <= pages.start);
        for range in self.ranges[first..].iter().take_while(|range| range.start < pages.end) {
            let gap = range.start.saturating_sub(at);
            if gap > room {
                break;
            }
            room -= gap;
            at = range.end;
        }
        at.saturating_add(room).min(pages.end)
    }

    /// Makes room for `count` further ranges: as many calls of [`PageSet::add`] then find memory.
    /// Returns whether there was memory.
    pub fn make_room(&mut self, count: usize) -> bool {
        self.ranges.try_reserve(count).is_ok()
    }

    /// Adds pages; pages that are already in the set do not matter. Returns whether there was
    /// memory for the change.
    pub fn add(&mut self, pages: Range<u64>) -> bool {
        let first = self.ranges.partition_point(|range| range.end < pages.start);
        let behind = self.ranges.partition_point(|range| range.start <= pages.end);
        if first == behind {
            if self.ranges.try_reserve(1).is_err() {
                return false;
            }
            self.ranges.insert(first, pages);
            return true;
        }
        let start = pages.start.min(self.ranges[first].start);
        let end = pages.end.max(self.ranges[behind - 1].end);
        self.ranges[first] = start..end;
        self.ranges.drain(first + 1..behind);
        true
    }

    /// Removes pages and returns their number. Without memory to split a range, its part after
    /// `pages` is removed too.
    pub fn remove(&mut self, pages: &Range<u64>) -> u64 {
        let first = self.ranges.partition_point(|range| range.end <= pages.start);
        let behind = self.ranges.partition_point(|range| range.start < pages.end);
        if first >= behind || pages.is_empty() {
            return 0;
        }
        // A range removed in one piece leaves room for another.
        let has_room = self.ranges.try_reserve(1).is_ok();
        let before = self.ranges[first].start..pages.start;
        let after = pages.end..self.ranges[behind - 1].end;
        let mut removed: u64 =
            self.ranges.drain(first..behind).map(|range| range.end - range.start).sum();
        let mut at = first;
        if !before.is_empty() {
            removed -= before.end - before.start;
            self.ranges.insert(at, before);
            at += 1;
        }
        if !after.is_empty() && (at == first || has_room) {
            removed -= after.end - after.start;
            self.ranges.insert(at, after);
        }
        removed
    }
}
