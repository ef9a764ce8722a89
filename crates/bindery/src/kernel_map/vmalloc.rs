//! `vmalloc` and `vfree`: allocate frames and addresses in one call.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;

use crate::addr::{Frame, Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use crate::arch::MemoryType;
use crate::error::Failure;
use crate::frame::{AllocateFor, MAX_ORDER};
use crate::platform::Platform;

use super::area::{AreaTraits, Claim};
use super::leaves::Leaves;
use super::request::{AreaKind, Content, Pieces, UnmapTime, VmallocOptions};
use super::reserve::Placement;
use super::walk::{Holes, Walk, WalkError};
use super::{KernelMap, KernelMapError};

/// The minimum number of pages allocated between two checks for a fatal signal.
const PAGES_AT_ONCE: u64 = 512;

/// Consecutive frames, and the area's page at which they begin.
struct FrameRun {
    at: u64,
    first: Frame,
    count: u64,
}

impl<P: Platform> KernelMap<'_, P> {
    /// Allocates `size` bytes, rounded up to pages, and maps them at consecutive addresses (Linux:
    /// `vmalloc`, `vzalloc`, `vmalloc_huge`). Returns the first address.
    ///
    /// The frames come in the largest free blocks, but no block is larger than the number of
    /// missing pages: sizes are not rounded up to those of large pieces. If no large block is free,
    /// only the affected part consists of smaller ones. The caller owns the memory until
    /// [`KernelMap::vfree`].
    ///
    /// Context: may sleep. Complexity: linear in the blocks of frames, plus one store for each
    /// entry written.
    ///
    /// # Errors
    /// [`KernelMapError::Empty`], [`KernelMapError::TooLarge`], [`KernelMapError::BadAlignment`],
    /// [`KernelMapError::BadPermissions`]; [`KernelMapError::OutOfAddresses`] and
    /// [`KernelMapError::OutOfMemory`] after a purge did not help (without a purge if the request
    /// exceeds the machine's memory); [`KernelMapError::Interrupted`], checked between blocks of
    /// frames, at intervals of at least 512 pages.
    pub fn vmalloc(&self, size: u64, options: &VmallocOptions) -> Result<VirtAddr, KernelMapError> {
        self.memory.outermost(|| self.vmalloc_once(size, options))
    }

    fn vmalloc_once(
        &self,
        size: u64,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, Failure<KernelMapError>> {
        let (pages, leaves) = options.check(self, size)?;
        let piece = leaves.largest_piece(pages) << PAGE_SHIFT;
        let VmallocOptions { pieces, pauses, .. } = *options;
        let kind = AreaKind::Vmalloc;
        let traits = AreaTraits { kind, pieces, pauses, memory: MemoryType::Normal };
        let best = Placement { pages, align: options.align.max(piece), congruent: 0 };
        let claim = best.reserve_or_aligned(options.align, self, traits)?;
        // SAFETY: 1. the claim; the walk visits only the area's addresses.
        let mut walk = unsafe { Walk::new(self) };
        if let Err(stop) = walk.populate(&claim, 0..pages, &leaves, options.content) {
            self.stats.add(&walk.counts);
            self.abandon(claim);
            return Err(stop.into());
        }
        let range = claim.range();
        self.publish(range, &mut walk.counts);
        self.stats.add(&walk.counts);
        self.areas.release(claim);
        Ok(range.start())
    }

    /// The number of pages for `size` bytes, if the arena has room for them and a guard page.
    pub(super) fn pages(&self, size: u64) -> Result<u64, KernelMapError> {
        match size.div_ceil(PAGE_SIZE) {
            0 => Err(KernelMapError::Empty),
            pages if pages >= self.areas.arena.pages() => Err(KernelMapError::TooLarge),
            pages => Ok(pages),
        }
    }

    /// Dismantles an unfinished claimed area.
    pub(super) fn abandon(&self, claim: Claim<'_>) {
        self.unmap(claim, Holes::Perhaps);
        // Memory or addresses are short.
        self.purge_freed();
    }

    /// Frees the [`KernelMap::vmalloc`] area at `start` (Linux: `vfree`). Its frames and addresses
    /// are reused after the next purge; the call runs a purge if enough pages wait.
    ///
    /// Context: may sleep. Complexity: one store for each entry.
    ///
    /// # Errors
    /// [`KernelMapError::NotAnArea`], [`KernelMapError::NotTheStart`], [`KernelMapError::Freed`],
    /// [`KernelMapError::WrongKind`].
    ///
    /// # Safety
    /// 1. The area is the caller's: it came from [`KernelMap::vmalloc`] or [`KernelMap::vrealloc`].
    /// 2. Its addresses are no longer used: no reference, no access, and no CPU executes there.
    /// 3. Its frames are not used through another area, the direct map, or a device.
    ///
    /// ```
    /// fn free<P: bindery::Platform>(map: &bindery::KernelMap<'_, P>, at: bindery::addr::VirtAddr) {
    ///     // SAFETY: 1. `vmalloc` returned it; 2. and 3. it is not used any more.
    ///     unsafe { map.vfree(at) }.unwrap();
    /// }
    /// ```
    ///
    /// Safe code does not free an area:
    ///
    /// ```compile_fail,E0133
    /// fn free<P: bindery::Platform>(map: &bindery::KernelMap<'_, P>, at: bindery::addr::VirtAddr) {
    ///     map.vfree(at).unwrap();
    /// }
    /// ```
    pub unsafe fn vfree(&self, start: VirtAddr) -> Result<(), KernelMapError> {
        self.memory.outermost(|| {
            let claim = self.areas.claim_start(start, AreaKind::Vmalloc)?;
            self.finish_unmap(claim, UnmapTime::Later);
            Ok(())
        })
    }

    /// Unmaps a claimed area, and purges if that is due.
    #[inline]
    pub(super) fn finish_unmap(&self, claim: Claim<'_>, time: UnmapTime) {
        let waiting = self.unmap(claim, Holes::None);
        match time {
            UnmapTime::Now => self.purge_freed(),
            UnmapTime::Later if waiting > self.purge_limit() => self.purge_if_due(),
            UnmapTime::Later => {}
        }
    }

    /// Empties the entries of a claimed area and lists it for the next purge; returns the number of
    /// pages that wait for that purge.
    fn unmap(&self, claim: Claim<'_>, holes: Holes) -> u64 {
        let mut counts = crate::Counts::default();
        // SAFETY: 1. the claim.
        unsafe { self.clear(claim.range(), holes, &mut counts) };
        self.stats.add(&counts);
        self.areas.put_off(claim)
    }
}

impl VmallocOptions {
    /// Checks a request for `size` bytes before anything is allocated: the pages, and their leaves.
    pub(super) fn check<P: Platform>(
        &self,
        map: &KernelMap<'_, P>,
        size: u64,
    ) -> Result<(u64, Leaves<P::Arch>), KernelMapError> {
        let pages = map.pages(size)?;
        if !self.align.is_power_of_two() || self.align < PAGE_SIZE {
            return Err(KernelMapError::BadAlignment);
        }
        let leaves = Leaves::new(map, self.permissions, MemoryType::Normal, self.pieces)?;
        if pages > map.memory.total_frames() {
            // Refused before the request drains memory from others: reclaim cannot satisfy it.
            return Err(KernelMapError::OutOfMemory);
        }
        Ok((pages, leaves))
    }
}

impl<P: Platform> Walk<'_, '_, P> {
    /// Allocates frames for these pages of a claimed area and maps them.
    ///
    /// # Errors
    /// The area keeps the part that was mapped.
    pub(super) fn populate(
        &mut self,
        area: &Claim<'_>,
        pages: Range<u64>,
        leaves: &Leaves<P::Arch>,
        content: Content,
    ) -> Result<(), WalkError> {
        let (map, memory) = (self.map, self.map.memory);
        let start = area.range().start().0;
        let Range { start: mut at, end: until } = pages;
        // Blocks that are adjacent in memory are mapped as one.
        let mut run = FrameRun { at, first: Frame(0), count: 0 };
        let mut pause = at + PAGES_AT_ONCE;
        while at < until {
            if at >= pause {
                if memory.platform().fatal_signal() {
                    return Err(WalkError::Interrupted);
                }
                pause = at + PAGES_AT_ONCE;
            }
            let mut order = Order((until - at).ilog2().min(u32::from(MAX_ORDER.0)) as u8);
            if area.traits.pieces == Pieces::Largest && at > 0 {
                // A large block at an address that is not aligned to the block's size would be
                // mapped by single pages.
                order = order.min(Order(at.trailing_zeros() as u8));
            }
            if map.reach.is_page() {
                order = Order::PAGE;
            }
            let block = memory.frames.allocate_up_to(order, AllocateFor::Use).or_else(|| {
                // Freed areas may hold memory until a purge.
                map.purge_freed();
                memory.frames.allocate_up_to(order, AllocateFor::Use)
            });
            let (head, order) = block.ok_or(WalkError::NoMemory)?;
            area.blocks.push(memory, head, order);
            let pages = u64::from(order.pages());
            if content == Content::Zeroes {
                memory.platform().zero(head, order.pages());
                self.counts.bytes_zeroed += pages << PAGE_SHIFT;
            }
            if u64::from(run.first.0) + run.count != u64::from(head.0) {
                self.map_run(start + (run.at << PAGE_SHIFT), run.first, run.count, leaves)?;
                run = FrameRun { at, first: head, count: 0 };
            }
            run.count += pages;
            at += pages;
        }
        self.map_run(start + (run.at << PAGE_SHIFT), run.first, run.count, leaves)
    }
}
