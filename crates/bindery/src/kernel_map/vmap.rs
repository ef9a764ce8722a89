//! `vmap`, `vunmap`, `ioremap`, `iounmap`: map the caller's frames and device registers.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, PhysAddr, VirtAddr};
use crate::arch::{Arch, Level, MemoryType, Permissions};
use crate::error::Failure;
use crate::frame::FrameRange;
use crate::platform::Platform;

use super::area::AreaTraits;
use super::leaves::Leaves;
use super::request::{AreaKind, Pauses, Pieces, UnmapTime, VmapOptions};
use super::reserve::Placement;
use super::walk::{Walk, WalkError};
use super::{KernelMap, KernelMapError};

impl<P: Platform> KernelMap<'_, P> {
    /// Maps single frames at consecutive addresses, in the order of the list (Linux: `vmap`).
    /// Returns the first address.
    ///
    /// Consecutive frames are mapped in the largest pieces, and the start address is aligned for
    /// the largest one. The caller retains the frames and may free them only after
    /// [`KernelMap::vunmap`] (see [`UnmapTime`]). Frames come from
    /// [`crate::Memory::allocate_frames`], from a pin, from another area, or from beyond the memory
    /// that the core knows.
    ///
    /// If a frame is also mapped with another memory type ([`crate::Platform::direct_map`] counts),
    /// clean the caches before mapping it with any type but [`MemoryType::Normal`] (Arm ARM,
    /// "Mismatched memory attributes"; SDM, "Programming the PAT").
    ///
    /// Context: may sleep. Complexity: linear in the list; a run costs one search and a store for
    /// each entry.
    ///
    /// # Errors
    /// [`KernelMapError::Empty`], [`KernelMapError::TooLarge`], [`KernelMapError::BadPermissions`],
    /// [`KernelMapError::NoSuchMemoryType`], [`KernelMapError::OutOfAddresses`],
    /// [`KernelMapError::OutOfMemory`].
    pub fn vmap(&self, pages: &[Frame], options: &VmapOptions) -> Result<VirtAddr, KernelMapError> {
        let leaves = options.leaves(self)?;
        self.pages((pages.len() as u64) << PAGE_SHIFT)?;
        let place = Placement::of_list(pages, &leaves);
        let mapping = VmapWork { place, traits: options.traits(AreaKind::Vmap) };
        mapping.make(self, |walk, at| walk.map_list(at, pages, &leaves))
    }

    /// Like [`KernelMap::vmap`], for ranges of frames: folios of any orders. Ranges that are
    /// adjacent in memory count as one.
    ///
    /// Context: may sleep. Complexity: linear in the ranges, plus a store for each entry.
    ///
    /// # Errors
    /// As [`KernelMap::vmap`]; [`KernelMapError::BadFrames`] if a range ends beyond 2^32 frames.
    pub fn vmap_ranges(
        &self,
        ranges: &[FrameRange],
        options: &VmapOptions,
    ) -> Result<VirtAddr, KernelMapError> {
        let leaves = options.leaves(self)?;
        let is_beyond =
            |range: &FrameRange| u64::from(range.first.0) + u64::from(range.count) > 1 << u32::BITS;
        if ranges.iter().any(is_beyond) {
            return Err(KernelMapError::BadFrames);
        }
        let mut pages = 0_u64;
        let mut longest = (0, 0, Frame(0));
        for (first, count) in joined(ranges) {
            if count > longest.0 {
                longest = (count, pages, first);
            }
            pages = pages.saturating_add(count);
        }
        let pages = self.pages(pages.saturating_mul(PAGE_SIZE))?;
        let (count, offset, first) = longest;
        let piece = leaves.largest_piece(count);
        let congruent = u64::from(first.0).wrapping_sub(offset) & (piece - 1);
        let place =
            Placement { pages, align: piece << PAGE_SHIFT, congruent: congruent << PAGE_SHIFT };
        let mapping = VmapWork { place, traits: options.traits(AreaKind::Vmap) };
        mapping.make(self, |walk, mut at| {
            for (first, count) in joined(ranges) {
                walk.map_run(at, first, count, &leaves)?;
                at += count << PAGE_SHIFT;
            }
            Ok(())
        })
    }

    /// Unmaps the area of [`KernelMap::vmap`] or [`KernelMap::vmap_ranges`] at `start` (Linux:
    /// `vunmap`). The caller retains the frames; `time` determines when it may free them
    /// ([`UnmapTime`]).
    ///
    /// Context: may sleep. Complexity: one store for each entry.
    ///
    /// # Errors
    /// As [`KernelMap::vfree`].
    ///
    /// # Safety
    /// 1. The area is the caller's: it came from [`KernelMap::vmap`] or [`KernelMap::vmap_ranges`].
    /// 2. Its addresses are no longer used: no reference, no access, and no CPU executes there.
    pub unsafe fn vunmap(&self, start: VirtAddr, time: UnmapTime) -> Result<(), KernelMapError> {
        self.memory.outermost(|| {
            let claim = self.areas.claim_start(start, AreaKind::Vmap)?;
            self.finish_unmap(claim, time);
            Ok(())
        })
    }

    /// Maps `size` bytes of physical addresses from `from`, memory or not, to read and write
    /// (Linux: `ioremap`, `ioremap_wc`, `ioremap_cache`, ...). Returns the address of `from`, which
    /// need not be at the start of a page: whole pages around the bytes are mapped.
    ///
    /// The address is congruent to the physical one modulo the size rounded up to a power of two,
    /// at most the size of the largest leaf. So the address is aligned if `from` is, and pieces are
    /// as large as possible. (On x86-64, for types other than uncached, the MTRRs assign one type
    /// to the whole range.)
    ///
    /// Context: may sleep. Complexity: a store for each entry.
    ///
    /// # Errors
    /// [`KernelMapError::Empty`], [`KernelMapError::TooLarge`], [`KernelMapError::BadFrames`] if
    /// the range ends beyond the physical addresses (2^44), [`KernelMapError::NoSuchMemoryType`],
    /// [`KernelMapError::OutOfAddresses`], [`KernelMapError::OutOfMemory`].
    pub fn ioremap(
        &self,
        from: PhysAddr,
        size: u64,
        memory: MemoryType,
    ) -> Result<VirtAddr, KernelMapError> {
        let options = VmapOptions {
            permissions: Permissions::READ | Permissions::WRITE,
            memory,
            pieces: Pieces::Largest,
            pauses: Pauses::Allowed,
        };
        let leaves = options.leaves(self)?;
        if size == 0 {
            return Err(KernelMapError::Empty);
        }
        let offset = from.0 % PAGE_SIZE;
        let end = from.0.checked_add(size).ok_or(KernelMapError::BadFrames)?;
        let pages = self.pages(size.saturating_add(offset))?;
        if end > 1 << (u32::BITS + PAGE_SHIFT) {
            return Err(KernelMapError::BadFrames);
        }
        let align = if self.reach.is_page() {
            PAGE_SIZE
        } else {
            (pages << PAGE_SHIFT).next_power_of_two().min(self.largest_leaf.span())
        };
        let base = from.0 - offset;
        let place = Placement { pages, align, congruent: base & (align - 1) };
        let first = Frame((base >> PAGE_SHIFT) as u32);
        let mapping = VmapWork { place, traits: options.traits(AreaKind::Ioremap) };
        let start = mapping.make(self, |walk, at| walk.map_run(at, first, pages, &leaves))?;
        Ok(start.offset(offset))
    }

    /// Unmaps an [`KernelMap::ioremap`] area; `at` is the address that `ioremap` returned (Linux:
    /// `iounmap`).
    ///
    /// Context: may sleep. Complexity: one store for each entry.
    ///
    /// # Errors
    /// As [`KernelMap::vfree`].
    ///
    /// # Safety
    /// 1. The area is the caller's: it came from [`KernelMap::ioremap`].
    /// 2. Its addresses are no longer used: no reference and no access.
    pub unsafe fn iounmap(&self, at: VirtAddr) -> Result<(), KernelMapError> {
        self.memory.outermost(|| {
            let claim = self.areas.claim_start(at.align_down(PAGE_SIZE), AreaKind::Ioremap)?;
            self.finish_unmap(claim, UnmapTime::Later);
            Ok(())
        })
    }
}

/// A new area for the caller's frames.
struct VmapWork {
    place: Placement,
    traits: AreaTraits,
}

impl VmapWork {
    /// Reserves the area, aligned for large pieces if possible, and lets `fill` map its pages.
    /// Returns its address.
    fn make<'m, P: Platform>(
        &self,
        map: &KernelMap<'m, P>,
        mut fill: impl FnMut(&mut Walk<'_, 'm, P>, u64) -> Result<(), WalkError>,
    ) -> Result<VirtAddr, KernelMapError> {
        map.memory.outermost(|| self.make_once(map, &mut fill))
    }

    fn make_once<'m, P: Platform>(
        &self,
        map: &KernelMap<'m, P>,
        fill: &mut impl FnMut(&mut Walk<'_, 'm, P>, u64) -> Result<(), WalkError>,
    ) -> Result<VirtAddr, Failure<KernelMapError>> {
        let claim = self.place.reserve_or_aligned(PAGE_SIZE, map, self.traits)?;
        let range = claim.range();
        // SAFETY: 1. the claim; the walk visits only the area's addresses.
        let mut walk = unsafe { Walk::new(map) };
        if let Err(stop) = fill(&mut walk, range.start().0) {
            map.stats.add(&walk.counts);
            map.abandon(claim);
            return Err(stop.into());
        }
        map.publish(range, &mut walk.counts);
        map.stats.add(&walk.counts);
        map.areas.release(claim);
        Ok(range.start())
    }
}

impl VmapOptions {
    /// The properties of an area with these options.
    fn traits(&self, kind: AreaKind) -> AreaTraits {
        let Self { pieces, pauses, memory, .. } = *self;
        AreaTraits { kind, pieces, pauses, memory }
    }

    /// The leaves of an area with these options.
    fn leaves<P: Platform>(
        &self,
        map: &KernelMap<'_, P>,
    ) -> Result<Leaves<P::Arch>, KernelMapError> {
        Leaves::new(map, self.permissions, self.memory, self.pieces)
    }
}

impl Placement {
    /// The alignment for the start of a list of `count` pages: chosen so that the first complete
    /// large piece in it can be mapped as one. A piece of n pages contains two list entries that
    /// are n/2 - 1 apart both in position and in value, so only every n/2-th position need be
    /// checked.
    fn of_list<A: Arch>(pages: &[Frame], leaves: &Leaves<A>) -> Self {
        let count = pages.len() as u64;
        for piece in leaves.piece_sizes().filter(|piece| *piece <= count) {
            let (size, half) = (piece as usize, (piece as usize / 2).max(1));
            for (chunk, place) in pages.chunks_exact(half).zip((0..).step_by(half)) {
                let first = chunk[0].0;
                if chunk[half - 1].0.wrapping_sub(first) as usize != half - 1 {
                    continue;
                }
                // The index in the list where the piece around this page begins.
                let Some(begin) = usize::checked_sub(place, first as usize & (size - 1)) else {
                    continue;
                };
                let ends = pages.get(begin).zip(pages.get(begin + size - 1));
                if ends.is_some_and(|(a, b)| b.0.wrapping_sub(a.0) as usize == size - 1) {
                    let congruent = (pages[begin].0 as usize).wrapping_sub(begin) & (size - 1);
                    return Self {
                        pages: count,
                        align: piece << PAGE_SHIFT,
                        congruent: (congruent as u64) << PAGE_SHIFT,
                    };
                }
            }
        }
        Self { pages: count, align: PAGE_SIZE, congruent: 0 }
    }
}

impl<P: Platform> Walk<'_, '_, P> {
    /// Maps a list of frames. At each address that suits a large piece, checks whether the frames
    /// form one. Maps the other frames one table at a time.
    ///
    /// ```text
    /// addresses  | 2 MiB           | 2 MiB           | 2 MiB           |
    ///            ^ a run?          ^ a run?          ^ a run?            one comparison each
    ///             64 KiB? 64 KiB? ...                                    and here
    /// ```
    /// So a list of small pieces costs one comparison for each position where a large piece could
    /// begin, and a later large piece is still found.
    fn map_list(
        &mut self,
        mut at: u64,
        mut pages: &[Frame],
        leaves: &Leaves<P::Arch>,
    ) -> Result<(), WalkError> {
        while !pages.is_empty() {
            let large = large_run(at, pages, leaves);
            let count = if large > 0 {
                self.map_run(at, pages[0], large as u64, leaves)?;
                large
            } else {
                let index = P::Arch::PTE.index_of(VirtAddr(at));
                let room = index.left::<P::Arch>() as usize;
                let count = room.min(pages.len());
                self.map_pages(at, &pages[..count], leaves)?;
                count
            };
            at += (count as u64) << PAGE_SHIFT;
            pages = &pages[count..];
        }
        Ok(())
    }
}

/// The number of pages, from `at` on, that form whole huge leaves.
fn large_run<A: Arch>(at: u64, pages: &[Frame], leaves: &Leaves<A>) -> usize {
    let huge = A::ENTRIES as usize;
    let first = pages[0].0;
    let may_be = leaves.largest() > Level::PTE
        && (at >> PAGE_SHIFT | u64::from(first)) & (huge as u64 - 1) == 0
        && pages.get(huge - 1).is_some_and(|last| last.0.wrapping_sub(first) as usize == huge - 1);
    if may_be { run_length(pages) & !(huge - 1) } else { 0 }
}

/// The ranges as first frames and counts, with adjacent ranges joined.
fn joined(ranges: &[FrameRange]) -> impl Iterator<Item = (Frame, u64)> {
    let mut ranges = ranges.iter().filter(|range| range.count > 0).peekable();
    core::iter::from_fn(move || {
        let FrameRange { first, count } = *ranges.next()?;
        let mut count = u64::from(count);
        let continues =
            |next: &&FrameRange, count: u64| u64::from(first.0) + count == u64::from(next.first.0);
        while let Some(next) = ranges.next_if(|next| continues(next, count)) {
            count += u64::from(next.count);
        }
        Some((first, count))
    })
}

/// The number of consecutive frames at the beginning of `pages`.
fn run_length(pages: &[Frame]) -> usize {
    let first = pages[0].0;
    let follows = |(page, ahead): &(&Frame, u32)| first.checked_add(*ahead) == Some(page.0);
    pages.iter().zip(0..).take_while(follows).count()
}
