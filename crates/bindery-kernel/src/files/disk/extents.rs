//! Lists of extents: the blocks of a file's pages, by rising page.

use alloc::vec::Vec;
use core::ops::Range;

/// Consecutive pages of a file in consecutive blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The first page.
    pub page: u32,
    /// The first block.
    pub block: u32,
    /// How many.
    pub count: u32,
}

impl Extent {
    /// The page after the extent.
    fn end(&self) -> u64 {
        u64::from(self.page) + u64::from(self.count)
    }

    /// Whether `next` follows this extent in the file and on the disk.
    fn joins(&self, next: &Self) -> bool {
        (self.page + self.count, self.block + self.count) == (next.page, next.block)
    }
}

/// A stretch of a file's pages.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// The first block; `None` in a hole.
    pub block: Option<u64>,
    /// How many pages.
    pub pages: u64,
}

/// The place of pages, at most `pages` of them.
pub fn run(extents: &[Extent], page: u64, pages: u64) -> Run {
    let index = extents.partition_point(|extent| extent.end() <= page);
    match extents.get(index) {
        Some(extent) if u64::from(extent.page) <= page => {
            let block = u64::from(extent.block) + page - u64::from(extent.page);
            Run { block: Some(block), pages: pages.min(extent.end() - page) }
        }
        Some(extent) => Run { block: None, pages: pages.min(u64::from(extent.page) - page) },
        None => Run { block: None, pages },
    }
}

/// Whether an extent of new pages becomes a part of the one before it.
pub fn continues(extents: &[Extent], new: &Extent) -> bool {
    let index = extents.partition_point(|extent| extent.page < new.page);
    index > 0 && extents[index - 1].joins(new)
}

/// Adds an extent of pages that have no block. Allocates if the list has no room.
pub fn insert(extents: &mut Vec<Extent>, new: Extent) {
    let index = extents.partition_point(|extent| extent.page < new.page);
    let joins_next = extents.get(index).is_some_and(|next| new.joins(next));
    if index > 0 && extents[index - 1].joins(&new) {
        let behind = if joins_next { extents.remove(index).count } else { 0 };
        extents[index - 1].count += new.count + behind;
    } else if joins_next {
        extents[index] = Extent { count: new.count + extents[index].count, ..new };
    } else {
        extents.insert(index, new);
    }
}

/// Whether an extent is split in two if the pages of a range are removed from it.
pub fn splits(extents: &[Extent], pages: &Range<u64>) -> bool {
    let index = extents.partition_point(|extent| extent.end() <= pages.start);
    let met = extents.get(index);
    met.is_some_and(|met| u64::from(met.page) < pages.start && pages.end < met.end())
}

/// Removes the pages of a range from a list and adds their extents to `freed`. The list must have
/// room for one more extent, and `freed` for as many as the list holds.
pub fn cut(extents: &mut Vec<Extent>, pages: &Range<u64>, freed: &mut Vec<Extent>) {
    let first = extents.partition_point(|extent| extent.end() <= pages.start);
    let behind = extents.partition_point(|extent| u64::from(extent.page) < pages.end);
    if first >= behind || pages.is_empty() {
        return;
    }
    let part = |extent: Extent, from: u64, to: u64| {
        let from = from.clamp(extent.page.into(), extent.end());
        let to = to.clamp(from, extent.end());
        let block = extent.block + (from - u64::from(extent.page)) as u32;
        Extent { page: from as u32, block, count: (to - from) as u32 }
    };
    let (left, right) = (extents[first], extents[behind - 1]);
    freed.extend(extents.drain(first..behind).map(|met| part(met, pages.start, pages.end)));
    let kept = [part(left, 0, pages.start), part(right, pages.end, u64::MAX)];
    for extent in kept.into_iter().rev().filter(|extent| extent.count > 0) {
        extents.insert(first, extent);
    }
}
