//! A folio at its place in an object: the folio's pages that the index refers to, in memory or by
//! their swap slots.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::Order;
use crate::collections::page_tree::{IndexRun, PageFlags, PageIndex};
use crate::folio::{Folio, FolioIndex, FolioLock, SwapPlace};
use crate::frame::FreeBatch;
use crate::platform::Platform;
use crate::swap::page_set::PageSet;
use crate::swap::{CachedFolio, lock_folio};

use super::ObjectState;
use super::invalidate::PagesMayGo;

/// A folio that belongs, or may belong, at a place in an object.
#[derive(Clone, Copy)]
pub(super) struct PlacedFolio<'a, P: Platform> {
    pub(super) memory: &'a Memory<P>,
    pub(super) object: &'a ObjectState,
    pub(super) folio: Folio,
    /// The page index of its first page.
    pub(super) first: u64,
}

impl<P: Platform> PlacedFolio<'_, P> {
    /// The page index of the page after its last.
    pub(super) fn end(&self) -> u64 {
        self.first + u64::from(self.folio.pages())
    }

    /// The next pages from `from` on for which the index refers to this folio. A page that was
    /// dropped may since be in another folio.
    pub(super) fn next_run(
        &self,
        index: &PageIndex,
        flags: PageFlags,
        from: u64,
    ) -> Option<IndexRun> {
        if from >= self.end() {
            return None;
        }
        if self.folio.order == Order::PAGE {
            let slot = index.get(from)?;
            let here = slot.frame == self.folio.head && slot.flags.contains(flags);
            return here.then_some(IndexRun { page: from, frame: slot.frame, count: 1 });
        }
        let mut from = from;
        loop {
            let run = index.next_run_with(flags, from, self.end())?;
            if run.frame == self.folio.head.plus((run.page - self.first) as u32) {
                return Some(run);
            }
            from = run.page + u64::from(run.count);
        }
    }

    /// Whether the index holds a page of the folio.
    fn is_in_index(&self) -> bool {
        let (mut from, end) = (self.first, self.end());
        let platform = self.memory.platform();
        while let Some(run) = self.object.pages.look(platform, |index| index.next_run(from, end)) {
            // A dropped page may since be in another folio.
            if run.frame == self.folio.head.plus((run.page - self.first) as u32) {
                return true;
            }
            from = run.page + u64::from(run.count);
        }
        false
    }

    /// Releases the references to `count` pages of the folio that the index held until now. Frees
    /// the folio into `batch` if no other reference remains. If other references remain and the
    /// index no longer holds a page of the folio, the folio loses its owner. The caller keeps pages
    /// of the folio from being inserted or dropped. May wait for the folio's lock.
    ///
    /// # Safety
    /// 1. The caller has removed these pages from the index and releases them only here.
    pub(super) unsafe fn release_dropped(
        &self,
        count: u32,
        batch: &mut FreeBatch<'_, P>,
        _: &PagesMayGo,
    ) {
        let folio = self.memory.frames.folio(self.folio);
        // SAFETY: 1. the references were the index's and now belong to the caller (obligation 1).
        if let Some(frozen) = unsafe { folio.freeze(count) } {
            frozen.free_into(batch);
            return;
        }
        if !self.is_in_index() {
            // The holder of the folio's lock may need these frames.
            batch.free_all();
            // SAFETY: 1. the references that are released below keep the folio.
            unsafe { lock_folio(self.memory, self.folio) }.detach_from_object();
        }
        // SAFETY: 1. the references belong to the caller, which removed the pages from the index
        // (obligation 1), and have not been released yet.
        unsafe { folio.release_pages(count) };
    }

    /// Inserts the folio, which is in the swap cache and complete, into the index wherever the
    /// index refers to its slots. Frees those slots. The caller has a reference to the folio.
    pub(super) fn swap_in(&self, place: SwapPlace, lock: &FolioLock<'_, P>) {
        let Self { memory, object, first, .. } = *self;
        let (locked, folio, end) = (lock.locked(), lock.folio(), self.end());
        let cached = CachedFolio::new(memory, locked, place);
        debug_assert_eq!(folio, self.folio);
        let put = object.pages.change(memory, |index, _| {
            let (mut put, mut count, mut from) = (PageSet::EMPTY, 0, first);
            while let Some(run) = index.next_swapped(from, end) {
                let number = (run.page - first) as u32;
                let slot = place.first + u64::from(number);
                let ours = run.first.area == place.area && run.first.slot == slot;
                let pages = if ours { cached.pages_in_cache(number, run.count) } else { 0 };
                from = run.page + u64::from(pages.max(1));
                if pages == 0 {
                    continue;
                }
                if count == 0 {
                    lock.set_owner(object.as_owner(), FolioIndex::new(first));
                }
                // Added before another thread can find the pages in the index and drop them.
                if memory.frames.folio(folio).add_references(pages).is_err() {
                    continue;
                }
                index.bring_in(run.page, folio.head.plus(number), pages);
                put.add(number, pages);
                count += i64::from(pages);
            }
            object.pages.count_swapped(-count);
            (put, count)
        });
        cached.unlock(&put);
    }
}
