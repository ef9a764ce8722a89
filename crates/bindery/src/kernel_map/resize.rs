//! `vrealloc`: grows or shrinks an area.
//!
//! ```text
//! smaller   |  stays  | freed, addresses kept  |g|
//! larger    |  stays  | new frames        |g|               if the addresses after it are free
//! moved     |(freed)  |g|    ...    |  the same frames  | new frames |g|
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Level, MemoryType};
use crate::error::{Failure, NoMemory};
use crate::platform::{Platform, Tables};
use crate::stats::Counts;

use super::area::{Area, Claim, Placement};
use super::leaves::Leaves;
use super::request::{AreaKind, VmallocOptions};
use super::walk::{Holes, Walk};
use super::{KernelMap, KernelMapError};

impl<P: Platform> KernelMap<'_, P> {
    /// Changes the size of the [`KernelMap::vmalloc`] area at `start` to `size` bytes, rounded up
    /// to pages, and returns its address (Linux: `vrealloc`).
    ///
    /// The content up to the smaller size stays, and is never copied. If the addresses after the
    /// area are taken, the same frames are mapped elsewhere, and the old address is freed. New
    /// pages get the content and permissions of `options`; the area keeps its pieces and pauses.
    /// When the call returns, memory beyond a smaller size is free; its addresses are freed later.
    ///
    /// Context: may sleep. Complexity: as [`KernelMap::vmalloc`] for the difference, as
    /// [`KernelMap::vmap`] if it moves.
    ///
    /// # Errors
    /// Those of [`KernelMap::vmalloc`] and [`KernelMap::vfree`]; [`KernelMapError::WouldPause`] if
    /// a huge piece would have to be cut. After an error the area is unchanged, at its old address.
    ///
    /// # Safety
    /// 1. The area is the caller's: it came from [`KernelMap::vmalloc`] or [`KernelMap::vrealloc`].
    /// 2. Its addresses are not used from the call on: after success, the caller derives pointers
    ///    anew from the address that the call returns.
    /// 3. The frames beyond a smaller size are not used by another way: another area, the direct
    ///    map, or a device.
    pub unsafe fn vrealloc(
        &self,
        start: VirtAddr,
        size: u64,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, KernelMapError> {
        self.memory.outermost(|| self.vrealloc_once(start, size, options))
    }

    fn vrealloc_once(
        &self,
        start: VirtAddr,
        size: u64,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, Failure<KernelMapError>> {
        let (pages, _) = self.check_vmalloc(size, options)?;
        let claim = self.claim_start(start, AreaKind::Vmalloc)?;
        let old = claim.pages();
        let leaves = self.leaves(options.permissions, MemoryType::Normal, claim.pieces);
        let leaves = match leaves {
            Ok(leaves) => leaves,
            Err(problem) => {
                self.release(claim);
                return Err(problem.into());
            }
        };
        let misaligned = !start.is_aligned(options.align);
        if pages < old && !misaligned {
            let result = self.shrink(&claim, pages);
            self.release(claim);
            return result.map(|()| start);
        }
        if pages == old && !misaligned {
            self.release(claim);
            return Ok(start);
        }
        let resize = Resize { map: self, pages, leaves: &leaves, options };
        let result = if misaligned { Ok(None) } else { resize.grow_in_place(&claim) };
        let moved = match result {
            Ok(None) => resize.move_area(&claim).map(Some),
            Ok(Some(())) => Ok(None),
            Err(problem) => Err(problem),
        };
        let Ok(Some(moved)) = moved else {
            self.release(claim);
            return moved.map(|_| start);
        };
        let start = moved.range().start();
        // The old area is unmapped first, so that no purge frees the new one's frames before it.
        self.finish_unmap(claim, super::UnmapTime::Later);
        self.release(moved);
        Ok(start)
    }

    fn shrink(&self, area: &Claim<'_>, pages: u64) -> Result<(), Failure<KernelMapError>> {
        let range = area.range();
        let cut = VirtAddr(range.start().0 + (pages << PAGE_SHIFT));
        self.cut(area, cut)?;
        // If the area was moved, TLBs may hold its frames under the old addresses until a purge.
        self.purge_freed();
        self.drop_tail(area, pages, Holes::None);
        Ok(())
    }

    /// Unmaps and frees, at once, all pages of a claimed area from page `pages` on.
    fn drop_tail(&self, area: &Area, pages: u64, holes: Holes) {
        let mut counts = Counts::default();
        let range = area.range();
        let tail = VirtRange::raw(range.start().0 + (pages << PAGE_SHIFT), range.end().0);
        self.clear(tail, holes, &mut counts);
        self.invalidate(tail, Level::PTE, Tables::Unchanged, &mut counts);
        area.set_pages(pages);
        area.blocks.cut(self.memory, pages).free(self.memory);
        self.stats.add(&counts);
    }

    /// Extends a claimed area to `pages` pages and a guard page, if the addresses after it are
    /// free.
    fn extend(&self, area: &Claim<'_>, pages: u64) -> bool {
        let _writer = self.freed.lock();
        let Some(end) = area.start().checked_add((pages + 1) * PAGE_SIZE) else { return false };
        if end > area.end() {
            // SAFETY: 1. the lock is held.
            let start_of = |next| unsafe { self.area(next) }.start();
            let limit = self.index.next(area).map_or(u64::MAX, start_of);
            if end > limit.min(self.arena.end().0) {
                return false;
            }
            area.set_end(end);
            self.index.bounds_changed(area);
        }
        true
    }
}

/// A new size for an area.
struct Resize<'k, 'm, P: Platform> {
    map: &'k KernelMap<'m, P>,
    pages: u64,
    /// The leaves of new pages.
    leaves: &'k Leaves<P::Arch>,
    options: &'k VmallocOptions,
}

impl<'k, P: Platform> Resize<'k, '_, P> {
    /// Grows a claimed area in place. `None` if the addresses after it are taken.
    fn grow_in_place(&self, area: &Claim<'_>) -> Result<Option<()>, Failure<KernelMapError>> {
        let (map, memory) = (self.map, self.map.memory);
        // A spare area, which returns the addresses if memory runs out.
        let make = || Area::new(area.kind, area.pieces, area.pauses, area.memory);
        let areas = &memory.slab::<Area>();
        let allocate = || areas.allocate_with(&memory.frames, make);
        let spare = allocate().or_else(|| {
            map.purge_freed();
            allocate()
        });
        let spare = spare.ok_or(NoMemory)?;
        let end = area.end();
        let grown = map.extend(area, self.pages).then(|| self.grow(area));
        if matches!(grown, Some(Err(_))) && area.end() > end {
            // SAFETY: 1. allocated above, and not used again.
            unsafe { map.put_off_rest(area, end, spare) };
            // Memory is short, and tables may wait for a purge.
            map.purge_freed();
        } else {
            // SAFETY: it came from this slab, and no other reference exists.
            unsafe { memory.slab::<Area>().free(&memory.frames, spare) };
        }
        grown.transpose()
    }

    fn grow(&self, area: &Claim<'_>) -> Result<(), Failure<KernelMapError>> {
        let Self { map, pages, leaves, options } = *self;
        let mut walk = Walk::new(map);
        let old = area.pages();
        area.set_pages(pages);
        let result = walk.populate(area, old..pages, leaves, options.content);
        if let Err(stop) = result {
            map.stats.add(&walk.counts);
            map.drop_tail(area, old, Holes::Perhaps);
            return Err(stop.into());
        }
        let start = area.start();
        let new = VirtRange::raw(start + (old << PAGE_SHIFT), start + (pages << PAGE_SHIFT));
        map.publish(new, &mut walk.counts);
        map.stats.add(&walk.counts);
        Ok(())
    }

    /// Moves the frames of a claimed area to other addresses, with more or fewer pages. The caller
    /// unmaps the old area, and then releases the new one.
    fn move_area(&self, old: &Claim<'_>) -> Result<Claim<'k>, Failure<KernelMapError>> {
        let Self { map, pages, leaves, options } = *self;
        // A shrinking area moves if its alignment needs another place.
        let kept = pages.min(old.pages());
        let piece = map.largest_piece(pages, leaves) << PAGE_SHIFT;
        let make = || Area::new(old.kind, old.pieces, old.pauses, old.memory);
        let best = Placement { pages, align: options.align.max(piece), congruent: 0 };
        let new = map.reserve_at_best(best, options.align, make)?;
        let range = new.range();
        let mut walk = Walk::new(map);
        let from = old.range().start().0;
        let kept_range = VirtRange::raw(from, from + (kept << PAGE_SHIFT));
        let mut result = Ok(());
        map.for_each_piece(kept_range, |piece| {
            let leaves = Leaves::like(leaves, piece.permissions);
            let at = range.start().0 + (piece.range.start().0 - from);
            let first = Frame((piece.to.0 >> PAGE_SHIFT) as u32);
            let count = piece.range.pages();
            result = result.and_then(|()| walk.map_run(at, first, count, &leaves));
        });
        let result =
            result.and_then(|()| walk.populate(&new, kept..pages, leaves, options.content));
        if let Err(stop) = result {
            // The new area's own frames come after the old pages, which still belong to the old
            // area.
            map.stats.add(&walk.counts);
            map.abandon(new);
            return Err(stop.into());
        }
        map.publish(range, &mut walk.counts);
        map.stats.add(&walk.counts);
        let left = old.blocks.cut(map.memory, kept);
        new.blocks.prepend(map.memory, &old.blocks);
        old.blocks.prepend(map.memory, &left);
        Ok(new)
    }
}
