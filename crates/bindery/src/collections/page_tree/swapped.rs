//! Pages in swap: their slots contain swap slot numbers.
//!
//! ```text
//! 63 .. 58   57 ..... 50   49 ............ 12   11 ... 3   2         1       0
//! spare      area          swap slot            spare      SWAPPED   spare   not PRESENT
//! ```

use super::node::{Nodes, PRESENT, Words, failed_in, mask, pieces, slot, word_of};
use super::{LONGEST_RUN, Leaf, PageIndex};
use crate::addr::{Frame, PAGE_SHIFT};
use crate::platform::Platform;

/// Set in the slot of a page in swap.
const SWAPPED: u64 = 1 << 2;

const SLOT_BITS: u32 = 38;
const AREA_SHIFT: u32 = PAGE_SHIFT + SLOT_BITS;

/// The location of a page in swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SwapSlot {
    /// The swap area.
    pub(crate) area: u8,
    /// The slot in the area, below 2^38.
    pub(crate) slot: u64,
}

/// Consecutive pages in consecutive swap slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SwappedRun {
    /// The number of the first page.
    pub(crate) page: u64,
    /// The swap slot of the first page.
    pub(crate) first: SwapSlot,
    /// The number of pages, at least 1.
    pub(crate) count: u32,
}

impl SwapSlot {
    /// The swap slot `pages` pages after this one.
    pub(crate) fn plus(self, pages: u64) -> Self {
        Self { slot: self.slot + pages, ..self }
    }

    /// Decodes the word of a page, if it is in swap.
    pub(super) fn in_word(word: u64) -> Option<Self> {
        let slot = word >> PAGE_SHIFT & ((1 << SLOT_BITS) - 1);
        let swapped = word & (SWAPPED | PRESENT) == SWAPPED;
        swapped.then_some(Self { area: (word >> AREA_SHIFT) as u8, slot })
    }

    fn to_word(self) -> u64 {
        u64::from(self.area) << AREA_SHIFT | self.slot << PAGE_SHIFT | SWAPPED
    }
}

impl PageIndex {
    /// The swap slot of `page`, if it is in swap. O(h).
    pub(crate) fn swapped(&self, page: u64) -> Option<SwapSlot> {
        SwapSlot::in_word(self.words(page)?[slot(page, 0)])
    }

    /// The first page at or after `from` that is in memory or in swap, if it is before `end`. O(h).
    pub(crate) fn next_used(&self, from: u64, end: u64) -> Option<u64> {
        self.seek_used(from).map(|(page, _)| page).filter(|page| *page < end)
    }

    /// The first run of pages in swap at or after `from`, truncated at `end`. O(h), plus one step
    /// for each page of the run.
    pub(crate) fn next_swapped(&self, from: u64, end: u64) -> Option<SwappedRun> {
        self.next_swapped_up_to(from, end, u64::MAX)
    }

    /// As [`PageIndex::next_swapped`], but truncates the run after `most` pages, at least 1.
    pub(crate) fn next_swapped_up_to(&self, from: u64, end: u64, most: u64) -> Option<SwappedRun> {
        if from >= end {
            return None;
        }
        let (page, words) = self.seek_swapped(from).filter(|(page, _)| *page < end)?;
        let first = SwapSlot::in_word(words[slot(page, 0)])?;
        let end = end.min(page.saturating_add(most));
        Some(SwappedRun { page, first, count: self.swapped_length(page, first, end) })
    }

    fn seek_swapped(&self, from: u64) -> Option<(u64, &Words)> {
        self.seek(from, |node, _| node.swapped)
    }

    /// The length of the run in swap that begins with `page`, whose slot is `first`, and ends
    /// before `end`.
    pub(super) fn swapped_length(&self, page: u64, first: SwapSlot, end: u64) -> u32 {
        let end = end.min(page.saturating_add(u64::from(LONGEST_RUN)));
        let mut count = 0;
        for (piece, slots) in pieces(page, end) {
            let words = self.words(piece).map_or(&[][..], |words| &words[slots.clone()]);
            let follows = |(word, n): &(&u64, u64)| **word == first.plus(*n).to_word();
            let more = words.iter().zip(count..).take_while(follows).count();
            count += more as u64;
            self.note(more as u64);
            if more < slots.len() {
                break;
            }
        }
        count as u32
    }

    /// Replaces the frames of `count` pages from `first` on by consecutive swap slots. One step for
    /// each page, plus O(h) for each 64.
    pub(crate) fn send_out(&mut self, first: u64, to: SwapSlot, count: u32) {
        debug_assert!(to.slot + u64::from(count) <= 1 << SLOT_BITS);
        self.turn(first, count, |n| to.plus(n).to_word());
    }

    /// Replaces the swap slots of `count` pages from `first` on by consecutive frames, without
    /// flags. The cost is the same.
    pub(crate) fn bring_in(&mut self, first: u64, frame: Frame, count: u32) {
        self.turn(first, count, |n| word_of(frame.plus(n as u32)));
    }

    /// Replaces the words of present pages; `word_for` receives the distance from the first page.
    fn turn(&mut self, first: u64, count: u32, word_for: impl Fn(u64) -> u64) {
        for (page, slots) in pieces(first, first.saturating_add(u64::from(count))) {
            let Some(Leaf { used, dirty, swapped, words }) = self.leaf_mut(page) else { continue };
            debug_assert_eq!(*used & mask(&slots), mask(&slots), "pages from {page:#x} are absent");
            let fewer = (*dirty & mask(&slots)).count_ones();
            let failed = if fewer > 0 { failed_in(&words[slots.clone()]) } else { 0 };
            *dirty &= !mask(&slots);
            for (n, word) in (page - first..).zip(&mut words[slots.clone()]) {
                *word = word_for(n);
            }
            let out = SwapSlot::in_word(words[slots.start]).is_some();
            *swapped = *swapped & !mask(&slots) | if out { mask(&slots) } else { 0 };
            self.dirty -= fewer;
            self.failed -= failed;
            self.mark_above(page);
        }
    }

    /// Removes the run that [`PageIndex::next_swapped`] finds and the nodes that become empty. O(h)
    /// for the descent and for each 64 pages, plus two steps for each page.
    pub(crate) fn take_swapped<P: Platform>(
        &mut self,
        from: u64,
        end: u64,
        nodes: &Nodes<'_, P>,
    ) -> Option<SwappedRun> {
        let run = self.next_swapped(from, end)?;
        for (page, slots) in pieces(run.page, run.page + u64::from(run.count)) {
            let Leaf { used, swapped, words, .. } = self.leaf_mut(page)?;
            *used &= !mask(&slots);
            *swapped &= !mask(&slots);
            let emptied = *used == 0;
            words[slots].fill(0);
            if emptied {
                self.free_empty(page, nodes);
            }
            self.mark_above(page);
        }
        Some(run)
    }
}
