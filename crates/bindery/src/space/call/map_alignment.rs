//! The preferred alignment of a new mapping of an object.

use core::ops::Range;

use crate::Memory;
use crate::addr::PAGE_SHIFT;
use crate::arch::{Arch, Level};
use crate::object::{ObjectState, ShownFrames};
use crate::platform::Platform;
use crate::vma::MappingFlags;
use crate::vmas::Alignment;

/// The alignment at which whole folios of shared memory can be mapped: that of the largest folio
/// for which the mapping has room. `first` is the object's first page in the mapping.
#[inline(never)]
pub(super) fn object_alignment<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    (flags, length): (MappingFlags, u64),
) -> Alignment {
    if let Some(frames) = object.frames() {
        let pages = first..first + (length >> PAGE_SHIFT);
        let largest = memory.largest_shown_leaf();
        return frames_alignment(&frames, pages, object.size_in_pages(), largest);
    }
    let mut orders = object.orders(memory, flags);
    while let Some(order) = orders.take_largest() {
        if !object.is_file()
            && order.bytes() <= length
            && first.is_multiple_of(u64::from(order.pages()))
        {
            return Alignment::to(order.bytes());
        }
    }
    Alignment::PAGE
}

/// The alignment at which frames outside the core's memory get the largest leaves: an address is
/// congruent with its frame modulo the largest leaf for which the first piece of the mapping has
/// room. `pages` are the pages of the mapping, in an object of `size` pages. The result is a hint,
/// since the source may provide other frames when the pages are mapped.
fn frames_alignment<A: Arch>(
    frames: &ShownFrames<'_>,
    pages: Range<u64>,
    size: u64,
    largest: Level<A>,
) -> Alignment {
    let found = frames.piece(pages.start, size);
    let found = found.and_then(|piece| Some((piece.frame_of(pages.start)?, piece.pages().end)));
    let Some((first, end)) = found else { return Alignment::PAGE };
    let count = end.min(pages.end) - pages.start;
    let contig = u64::from(A::CONTIG_ENTRIES);
    let fits = |leaf: &u64| u64::from(first.0).wrapping_neg() % leaf + leaf <= count;
    let leaves = Level::PMD.up_to(largest).rev().map(|level: Level<A>| level.order().pages());
    let leaf = leaves.map(u64::from).chain([contig]).find(fits);
    leaf.map_or(Alignment::PAGE, |leaf| Alignment {
        align: leaf << PAGE_SHIFT,
        congruent: (u64::from(first.0) % leaf) << PAGE_SHIFT,
    })
}
