//! An area becomes larger or smaller: `vrealloc`.
//!
//! ```text
//! smaller   |  stays  | given back, addresses kept |g|
//! larger    |  stays  | new frames        |g|               where the addresses behind are free
//! moved     |(freed)  |g|    ...    |  the same frames  | new frames |g|
//! ```

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::platform::{Platform, Tables};
use crate::space::index::Indexed;
use crate::stats::Counts;

use super::area::{Area, Claim, Placement};
use super::request::{AreaKind, VmallocOptions};
use super::walk::{Holes, Leaves, Walk};
use super::{KernelMap, KernelMapError};

impl<P: Platform> KernelMap<'_, P> {
    /// Changes the size of what [`KernelMap::vmalloc`] gave at `start` to `size` bytes, rounded up to
    /// pages, and gives its address (Linux: `vrealloc`).
    ///
    /// What lies within both sizes keeps its content; it is never copied: where the addresses behind
    /// the area are taken, the same frames are mapped elsewhere, and the old address is given back.
    /// New pages are as `options` say; where the area moves, all its pages have the permissions of
    /// `options`. What a smaller size leaves over is free when the call returns, but for its
    /// addresses.
    ///
    /// # Errors
    /// Those of [`KernelMap::vmalloc`] and [`KernelMap::vfree`]; [`KernelMapError::WouldPause`] where
    /// a huge piece would have to be cut. The area is as it was then, at its old address (it may keep
    /// addresses behind it, and tables for them, until it is freed).
    ///
    /// May sleep. Complexity: as [`KernelMap::vmalloc`] for the difference, as
    /// [`KernelMap::vmap`] where it moves.
    pub fn vrealloc(
        &self,
        start: VirtAddr,
        size: u64,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, KernelMapError> {
        let (pages, leaves) = self.check_vmalloc(size, options)?;
        let claim = self.claim_start(start, AreaKind::Vmalloc)?;
        let old = self.area(claim.0).pages();
        let misaligned = !start.is_aligned(options.align);
        if pages < old && !misaligned {
            let result = self.shrink(claim, pages);
            self.release(claim);
            return result.map(|()| start);
        }
        if pages == old && !misaligned {
            self.release(claim);
            return Ok(start);
        }
        if !misaligned && self.extend(claim, pages) {
            let result = self.grow(claim, old, pages, &leaves, options);
            self.release(claim);
            return result.map(|()| start);
        }
        match self.move_area(claim, pages, &leaves, options) {
            Ok(moved) => Ok(moved),
            Err(problem) => {
                self.release(claim);
                Err(problem)
            }
        }
    }

    fn shrink(&self, claim: Claim, pages: u64) -> Result<(), KernelMapError> {
        let area = self.area(claim.0);
        let range = area.range();
        let cut = VirtAddr(range.start().0 + (pages << PAGE_SHIFT));
        self.cut(claim, cut)?;
        // If the area came here from another place, TLBs may know its frames by the old addresses
        // until a purge.
        self.purge();
        self.drop_tail(area, pages, Holes::None);
        Ok(())
    }

    /// Unmaps and frees all pages of a claimed area from the `pages`-th on, at once.
    fn drop_tail(&self, area: &Area, pages: u64, holes: Holes) {
        let mut counts = Counts::default();
        let range = area.range();
        let tail = VirtRange::raw(range.start().0 + (pages << PAGE_SHIFT), range.end().0);
        self.clear(tail, holes, &mut counts);
        self.invalidate(tail, 1, Tables::Unchanged, &mut counts);
        area.set_pages(pages);
        area.blocks.cut(self.memory, pages).free(self.memory);
        self.stats.add(&counts);
    }

    /// Makes room for `pages` pages and a guard page behind a claimed area's start, if the addresses
    /// there are free.
    fn extend(&self, claim: Claim, pages: u64) -> bool {
        let area = self.area(claim.0);
        let _writer = self.freed.lock();
        let Some(end) = area.start().checked_add((pages + 1) * PAGE_SIZE) else { return false };
        if end > area.end() {
            let limit = self.index.next(claim.0).map_or(u64::MAX, |next| self.area(next).start());
            if end > limit.min(self.window.end().0) {
                return false;
            }
            area.set_end(end);
            self.index.bounds_changed(claim.0);
        }
        true
    }

    fn grow(
        &self,
        claim: Claim,
        old: u64,
        pages: u64,
        leaves: &Leaves,
        options: &VmallocOptions,
    ) -> Result<(), KernelMapError> {
        let area = self.area(claim.0);
        let mut walk = Walk::new(self);
        area.set_pages(pages);
        let result = self.populate(claim, old, pages, leaves, options.content, &mut walk);
        if let Err(stop) = result {
            self.stats.add(&walk.counts);
            self.drop_tail(area, old, Holes::Perhaps);
            return Err(stop.into());
        }
        let start = area.start();
        let new = VirtRange::raw(start + (old << PAGE_SHIFT), start + (pages << PAGE_SHIFT));
        self.publish(new, &mut walk.counts);
        self.stats.add(&walk.counts);
        Ok(())
    }

    /// Maps the frames of a claimed area somewhere else, with more or fewer pages.
    fn move_area(
        &self,
        claim: Claim,
        pages: u64,
        leaves: &Leaves,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, KernelMapError> {
        let old = self.area(claim.0);
        // Fewer pages where the alignment alone asks for another place.
        let kept = pages.min(old.pages());
        let piece = self.largest_piece(pages, leaves) << PAGE_SHIFT;
        let make = || Area::new(old.kind, old.pieces, old.pauses, old.memory);
        let place = |align| Placement { pages, align, congruent: 0 };
        let new_claim = match self.reserve(place(options.align.max(piece)), make) {
            Err(KernelMapError::OutOfAddresses) if piece > options.align => {
                self.reserve(place(options.align), make)?
            }
            result => result?,
        };
        let new = self.area(new_claim.0);
        let range = new.range();
        let mut walk = Walk::new(self);
        let mut done = 0;
        let mut result = Ok(());
        for (head, order) in old.blocks.iter(self.memory) {
            let count = u64::min(1 << order, kept - done);
            let at = range.start().0 + (done << PAGE_SHIFT);
            result = result.and_then(|()| self.map_run(&mut walk, at, head, count, leaves));
            done += count;
        }
        let result = result.and_then(|()| {
            self.populate(new_claim, kept, pages, leaves, options.content, &mut walk)
        });
        if let Err(stop) = result {
            // What it has of its own is behind the old pages; the frames of those stay where they
            // are.
            self.stats.add(&walk.counts);
            self.abandon(new_claim);
            return Err(stop.into());
        }
        self.publish(range, &mut walk.counts);
        self.stats.add(&walk.counts);
        let left = old.blocks.cut(self.memory, kept);
        new.blocks.prepend(self.memory, &old.blocks);
        old.blocks.prepend(self.memory, &left);
        // The old area first, so that no purge frees the new one's frames before it.
        self.finish_unmap(claim, super::UnmapTime::Later);
        self.release(new_claim);
        Ok(range.start())
    }
}
