//! The content of slots: written out from the frames of a folio, and read in.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::area::SlotRun;
use super::cell::Cell;
use super::page_set::PageSet;
use super::same_filled;
use crate::Memory;
use crate::frame::Folio;
use crate::frame::swap_place::SwapPlace;
use crate::platform::Platform;

impl<P: Platform> Memory<P> {
    /// Sends the content of the folio, whose slots are busy, to the area's store. The caller has
    /// the folio's lock, and nobody writes to the folio. Nothing is stored if a page does not fit.
    pub(crate) fn write_out(&self, folio: Folio, place: SwapPlace) -> Option<Written> {
        let run = SlotRun { area: place.area, first: place.first, count: folio.pages() };
        let (_, _, values) = self.cells(run)?;
        let mut written = Written { filled: PageSet::EMPTY };
        for (page, value) in (0..).zip(values) {
            let frame = folio.head.plus(page);
            // The slot is busy: nobody else looks at the value. SAFETY: 1. No entry maps the folio,
            // nobody has pinned it, and the caller has its lock and the only reference but the
            // cache's: nobody writes to it.
            match unsafe { same_filled::word_of(self.platform.direct_map(frame)) } {
                Some(word) => {
                    value.store(word, Relaxed);
                    written.filled.add(page, 1);
                }
                None => match self.swap.store(self, frame) {
                    Some(handle) => value.store(handle, Relaxed),
                    None => {
                        let before = (0..page).filter(|page| !written.filled.has(*page));
                        before.for_each(|page| {
                            self.swap.forget(self, values[page as usize].load(Relaxed));
                        });
                        return None;
                    }
                },
            }
        }
        self.rare.pages_swapped_out.fetch_add(u64::from(run.count), Relaxed);
        Some(written)
    }

    /// Brings the content of the folio's slots into its frames. The slots are busy, and the folio
    /// is the caller's alone.
    pub(crate) fn load_folio(&self, folio: Folio, run: SlotRun) -> bool {
        let Some((_, cells, values)) = self.cells(run) else { return false };
        let mut page = 0;
        while page < run.count {
            let (cell, value) = self.content(cells, values, page);
            let frame = folio.head.plus(page);
            if cell.has(Cell::FILLED) && value == 0 {
                let zeroes = (page..run.count)
                    .take_while(|page| {
                        let (cell, value) = self.content(cells, values, *page);
                        cell.has(Cell::FILLED) && value == 0
                    })
                    .count() as u32;
                self.platform.zero(frame, zeroes);
                page += zeroes;
                continue;
            }
            if cell.has(Cell::FILLED) {
                same_filled::fill(self.words(frame), value);
            } else if !cell.has(Cell::STORED) || !self.swap.load(self, value, frame) {
                return false;
            }
            page += 1;
        }
        self.rare.pages_swapped_in.fetch_add(u64::from(run.count), Relaxed);
        true
    }

    #[inline]
    fn content(&self, cells: &[AtomicU64], values: &[AtomicU64], page: u32) -> (Cell, u64) {
        (Cell(cells[page as usize].load(Relaxed)), values[page as usize].load(Relaxed))
    }
}

/// How the content of a folio's pages has gone out.
pub(crate) struct Written {
    /// The pages that one word fills; the area's store has the others.
    filled: PageSet,
}

impl Written {
    /// What the page's cell says then.
    pub(super) fn content(&self, page: u32) -> u64 {
        if self.filled.has(page) { Cell::FILLED } else { Cell::STORED }
    }
}
