//! `vrealloc`: grows or shrinks an area.
//!
//! ```text
//! smaller   |  stays  | freed, addresses kept  |g|
//! larger    |  stays  | new frames        |g|               if the addresses after it are free
//! moved     |(freed)  |g|    ...    |  the same frames  | new frames |g|
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Level, MemoryType};
use crate::error::{Failure, NoMemory};
use crate::platform::{Platform, Tables};
use crate::stats::Counts;

use super::area::{Area, Claim};
use super::leaves::Leaves;
use super::protect::cut;
use super::request::{AreaKind, UnmapTime, VmallocOptions};
use super::reserve::Placement;
use super::walk::{Holes, Walk};
use super::{KernelMap, KernelMapError};

impl<P: Platform> KernelMap<'_, P> {
    /// Changes the size of the [`KernelMap::vmalloc`] area at `start` to `size` bytes, rounded up
    /// to pages, and returns its address (Linux: `vrealloc`).
    ///
    /// The content up to the smaller of both sizes is preserved without being copied. If the
    /// addresses after the area are taken, the same frames are mapped elsewhere, and the old
    /// address is freed. New pages get the content and permissions of `options`; the area retains
    /// its choice of pieces and pauses. When the call returns, the frames beyond a smaller size are
    /// free; their addresses are freed later.
    ///
    /// Context: may sleep. Complexity: as [`KernelMap::vmalloc`] for the difference, as
    /// [`KernelMap::vmap`] if the area moves.
    ///
    /// # Errors
    /// The errors of [`KernelMap::vmalloc`] and [`KernelMap::vfree`];
    /// [`KernelMapError::WouldPause`] if a huge piece would have to be split. After an error the
    /// area is unchanged, at its old address.
    ///
    /// # Safety
    /// 1. The area is the caller's: it came from [`KernelMap::vmalloc`] or [`KernelMap::vrealloc`].
    /// 2. Its addresses are not used from the call on: after success, the caller derives pointers
    ///    anew from the address that the call returns.
    /// 3. The frames beyond a smaller size are not used through another area, the direct map, or a
    ///    device.
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
        let (pages, _) = options.check(self, size)?;
        let claim = self.areas.claim_start(start, AreaKind::Vmalloc)?;
        let old = claim.pages();
        let leaves =
            Leaves::new(self, options.permissions, MemoryType::Normal, claim.traits.pieces);
        let leaves = match leaves {
            Ok(leaves) => leaves,
            Err(problem) => {
                self.areas.release(claim);
                return Err(problem.into());
            }
        };
        let misaligned = !start.is_aligned(options.align);
        if pages < old && !misaligned {
            let result = shrink(self, &claim, pages);
            self.areas.release(claim);
            return result.map(|()| start);
        }
        if pages == old && !misaligned {
            self.areas.release(claim);
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
            self.areas.release(claim);
            return moved.map(|_| start);
        };
        let start = moved.range().start();
        // The old area is unmapped first, so no purge can free the new area's frames before that.
        // It still owns the frames beyond a smaller size.
        let time = if pages < old { UnmapTime::Now } else { UnmapTime::Later };
        self.finish_unmap(claim, time);
        self.areas.release(moved);
        Ok(start)
    }
}

/// Shrinks a claimed area to `pages` pages.
fn shrink<P: Platform>(
    map: &KernelMap<'_, P>,
    area: &Claim<'_>,
    pages: u64,
) -> Result<(), Failure<KernelMapError>> {
    let range = area.range();
    let at = VirtAddr(range.start().0 + (pages << PAGE_SHIFT));
    cut(map, area, at)?;
    // If the area was moved, TLBs may hold its frames under the old addresses until a purge.
    map.purge_freed();
    // SAFETY: 1. the purge has flushed the addresses that the area had before its move, and the
    // claim has prevented another move since.
    unsafe { drop_tail(map, area, pages, Holes::None) };
    Ok(())
}

/// Unmaps and frees, at once, all pages of a claimed area from page `pages` on.
///
/// # Safety
/// 1. No TLB maps these pages' frames at addresses that the area had before a move.
unsafe fn drop_tail<P: Platform>(
    map: &KernelMap<'_, P>,
    area: &Claim<'_>,
    pages: u64,
    holes: Holes,
) {
    let mut counts = Counts::default();
    let range = area.range();
    let tail = VirtRange::raw(range.start().0 + (pages << PAGE_SHIFT), range.end().0);
    // SAFETY: 1. the claim.
    unsafe { map.clear(tail, holes, &mut counts) };
    map.invalidate(tail, Level::PTE, Tables::Unchanged, &mut counts);
    area.set_pages(pages);
    // SAFETY: 1. the flush above, and the caller's obligation 1.
    unsafe { area.blocks.cut(map.memory, pages).free(map.memory) };
    map.stats.add(&counts);
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
        // A spare area, which receives the addresses to be freed if memory runs out.
        let slab = &memory.slab::<Area>();
        let allocate = || slab.allocate_with(&memory.frames, || Area::new(area.traits));
        let spare = allocate().or_else(|| {
            map.purge_freed();
            allocate()
        });
        let spare = spare.ok_or(NoMemory)?;
        let end = area.end();
        let grown = map.areas.extend(area, self.pages).then(|| self.grow(area));
        if matches!(grown, Some(Err(_))) && area.end() > end {
            // SAFETY: 1. allocated above, and not used again.
            unsafe { map.areas.put_off_rest(area, end, spare) };
            // Memory is short, and freed tables may be waiting for a purge.
            map.purge_freed();
        } else {
            // SAFETY: it came from this slab, and no other reference exists.
            unsafe { memory.slab::<Area>().free(&memory.frames, spare) };
        }
        grown.transpose()
    }

    fn grow(&self, area: &Claim<'_>) -> Result<(), Failure<KernelMapError>> {
        let Self { map, pages, leaves, options } = *self;
        // SAFETY: 1. the claim; the walk visits only the area's addresses.
        let mut walk = unsafe { Walk::new(map) };
        let old = area.pages();
        area.set_pages(pages);
        let result = walk.populate(area, old..pages, leaves, options.content);
        if let Err(stop) = result {
            map.stats.add(&walk.counts);
            // SAFETY: 1. the frames of the new pages were never mapped at another address.
            unsafe { drop_tail(map, area, old, Holes::Perhaps) };
            return Err(stop.into());
        }
        let start = area.start();
        let new = VirtRange::raw(start + (old << PAGE_SHIFT), start + (pages << PAGE_SHIFT));
        map.publish(new, &mut walk.counts);
        map.stats.add(&walk.counts);
        Ok(())
    }

    /// Moves the frames of a claimed area to other addresses, with more or fewer pages. The caller
    /// then unmaps the old area and releases the new one.
    fn move_area(&self, old: &Claim<'_>) -> Result<Claim<'k>, Failure<KernelMapError>> {
        let Self { map, pages, leaves, options } = *self;
        // A shrinking area moves if its start does not satisfy the requested alignment.
        let kept = pages.min(old.pages());
        let piece = leaves.largest_piece(pages) << PAGE_SHIFT;
        let best = Placement { pages, align: options.align.max(piece), congruent: 0 };
        let new = best.reserve_or_aligned(options.align, map, old.traits)?;
        let range = new.range();
        // SAFETY: 1. the claim of the new area; the walk visits only its addresses.
        let mut walk = unsafe { Walk::new(map) };
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
            // The new area's own frames follow the old pages, which still belong to the old area.
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
