//! `mremap(2)` of private memory: shrink, grow, move.

use core::ptr::NonNull;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch};
use crate::error::Error;
use crate::platform::Platform;
use crate::table::TablePool;
use crate::table::relocate::Move;
use crate::tlb::Gather;

use super::index::Indexed;
use super::vma::Vma;
use super::{AddressSpace, Removed};

/// Where a mapping may go when it is resized.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Remap {
    /// Nowhere: it grows in place or not at all.
    #[default]
    InPlace,
    /// Anywhere, if it cannot grow in place (`MREMAP_MAYMOVE`).
    MayMove,
    /// Exactly there, even if it need not move; what is mapped there goes
    /// (`MREMAP_MAYMOVE | MREMAP_FIXED`).
    To(VirtAddr),
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Resizes or moves the mapping of `old_length` bytes at `old` to `new_length` bytes (both
    /// rounded up to pages), contents included, and returns its address. The range lies in one
    /// mapping; what is cut off by a smaller length may reach over several.
    ///
    /// Where the destination is ours to choose, it is congruent with the source modulo the largest
    /// table that the range covers, so that whole tables move by one entry each.
    ///
    /// # Errors
    /// In Linux's order: [`Error::Unaligned`], [`Error::ZeroLength`] (the new length),
    /// [`Error::OutOfRange`], [`Error::Overlap`], [`Error::TooManyMappings`],
    /// [`Error::NotMapped`], [`Error::NotShared`] (an old length of zero),
    /// [`Error::CrossesMapping`], [`Error::BelowMinimum`], [`Error::NoRoom`],
    /// [`Error::OutOfMemory`]. Nothing is changed
    /// then, with one exception, as on Linux: when memory runs out, what was mapped at a
    /// destination that the caller chose may be gone, and what a smaller length leaves out of a
    /// mapping that was to move there.
    ///
    /// Complexity: one entry for each table that moves whole; of the rest, the base pages that are
    /// moved. One invalidation for at most 64 tables; one more for each contiguous block that an
    /// end of the range cuts, and for the upper tables that a large move leaves empty.
    pub fn mremap(
        &self,
        old: VirtAddr,
        old_length: u64,
        new_length: u64,
        remap: Remap,
    ) -> Result<VirtAddr, Error> {
        let (old_length, new_length) = self.check_lengths(old, old_length, new_length)?;
        if let Remap::To(target) = remap {
            self.check_target(old, old_length, target, new_length)?;
        }
        let (mut gather, mut removed) = (Gather::new(), Removed::default());
        let guard = self.mutex.lock();
        let result =
            self.remap_locked(old, old_length, new_length, remap, &mut gather, &mut removed);
        self.flush(&mut gather);
        drop(guard);
        self.finish(gather, removed);
        result
    }

    fn check_lengths(
        &self,
        old: VirtAddr,
        old_length: u64,
        length: u64,
    ) -> Result<(u64, u64), Error> {
        if !old.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(old));
        }
        let limit = self.limit();
        // As Linux: a length that wraps when it is rounded up becomes zero.
        let round = |length: u64| length.checked_next_multiple_of(PAGE_SIZE).unwrap_or(0);
        let (old_length, length) = (round(old_length), round(length));
        if length == 0 {
            return Err(Error::ZeroLength);
        }
        if length > limit.0 {
            return Err(Error::OutOfRange { limit });
        }
        Ok((old_length, length))
    }

    fn check_target(
        &self,
        old: VirtAddr,
        old_length: u64,
        target: VirtAddr,
        length: u64,
    ) -> Result<(), Error> {
        if !target.is_aligned(PAGE_SIZE) {
            return Err(Error::Unaligned(target));
        }
        let limit = self.limit();
        if target.0 > limit.0 - length {
            return Err(Error::OutOfRange { limit });
        }
        // As Linux, whose sum may wrap too: the old range is not checked yet.
        let old_end = old.0.wrapping_add(old_length);
        if old_end > target.0 && target.0 + length > old.0 {
            return Err(Error::Overlap);
        }
        Ok(())
    }

    fn remap_locked(
        &self,
        old: VirtAddr,
        old_length: u64,
        length: u64,
        remap: Remap,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<VirtAddr, Error> {
        if matches!(remap, Remap::To(_)) {
            // As Linux, before anything is looked at: source and destination may each be cut.
            self.room_for(6)?;
        }
        let vma = self
            .first_behind(old.0)
            .filter(|vma| vma.start() <= old.0)
            .ok_or(Error::NotMapped(old))?;
        if old_length == 0 {
            return Err(Error::NotShared);
        }
        if let Remap::To(target) = remap {
            let kept = old_length.min(length);
            let source = self.source_in(vma, old, kept)?;
            let minimum = self.options.minimum_address;
            if target < minimum {
                return Err(Error::BelowMinimum { minimum });
            }
            if length < old_length {
                let tail = self.unmap_range(VirtAddr(old.0 + length), old_length - length)?;
                self.unmap_locked(tail, gather, removed)?;
            }
            let target = VirtRange::raw(target.0, target.0 + length);
            return self.move_mapping(source, target, gather, removed);
        }
        if length <= old_length {
            if length < old_length {
                let tail = self.unmap_range(VirtAddr(old.0 + length), old_length - length)?;
                self.unmap_locked(tail, gather, removed)?;
            }
            return Ok(old);
        }
        let source = self.source_in(vma, old, old_length)?;
        if vma.end() == source.end().0 && self.grow_in_place(vma, old.0, length, removed) {
            return Ok(old);
        }
        if remap == Remap::InPlace {
            return Err(Error::NoRoom);
        }
        self.room_for(4)?;
        let target = self.congruent_place(source, length).ok_or(Error::NoRoom)?;
        self.move_mapping(source, target, gather, removed)
    }

    fn source_in(&self, vma: &Vma, old: VirtAddr, length: u64) -> Result<VirtRange, Error> {
        let end = VirtAddr(vma.end());
        if length > end.0 - old.0 {
            return Err(Error::CrossesMapping { end });
        }
        Ok(VirtRange::raw(old.0, old.0 + length))
    }

    fn grow_in_place(&self, vma: &Vma, start: u64, length: u64, removed: &mut Removed) -> bool {
        let Some(end) = start.checked_add(length) else { return false };
        let next = self.vmas.next(NonNull::from(vma));
        let ceiling = next.map_or(self.limit().0, |next| self.vma(next).start());
        if end > ceiling {
            return false;
        }
        vma.write(self.platform());
        vma.set_end(end);
        self.vmas.bounds_changed(NonNull::from(vma));
        vma.end_write();
        self.merge_around(vma, removed);
        true
    }

    /// A free range of `length` bytes, congruent with `source` modulo the largest entry span that
    /// fits into it twice (so that at least one slot is covered whole), else modulo the contiguous
    /// block.
    fn congruent_place(&self, source: VirtRange, length: u64) -> Option<VirtRange> {
        let start = source.start().0;
        let spans = (2..=P::Arch::LEVELS).rev().map(arch::span::<P::Arch>);
        let whole = spans.filter(|span| {
            let first = start.next_multiple_of(*span);
            first.saturating_add(*span) <= source.end().0
        });
        let block = u64::from(P::Arch::BLOCK) * PAGE_SIZE;
        whole
            .chain([arch::table_span::<P::Arch>(1), block, PAGE_SIZE])
            .find_map(|align| self.find_free(length, align, start & (align - 1)))
    }

    /// Moves what `source`, a part of one VMA, maps to the beginning of `target`, which becomes
    /// one VMA. Everything that can fail is done before anything is moved.
    fn move_mapping(
        &self,
        source: VirtRange,
        target: VirtRange,
        gather: &mut Gather,
        removed: &mut Removed,
    ) -> Result<VirtAddr, Error> {
        let locate = || {
            let vma = self.first_behind(source.start().0);
            vma.filter(|vma| vma.range().covers(source)).ok_or(Error::NotMapped(source.start()))
        };
        let vma = locate()?;
        let page_offset = vma.page_offset_of(source.start());
        let moved = self.new_vma(Vma::new(target, vma.protection(), page_offset))?;
        // Cut out of the middle, the VMA leaves two parts.
        let upper = if vma.start() < source.start().0 && source.end().0 < vma.end() {
            let range = VirtRange::raw(source.end().0, vma.end());
            let offset = vma.page_offset_of(source.end());
            match self.new_vma(Vma::new(range, vma.protection(), offset)) {
                Ok(node) => Some(node),
                Err(error) => return Err(self.give_back([Some(moved), None], error)),
            }
        } else {
            None
        };
        if let Err(error) = self.unmap_locked(target, gather, removed) {
            return Err(self.give_back([Some(moved), upper], error));
        }
        self.flush(gather);
        // The target may have been a part of the same VMA, which is shorter now.
        let vma = match locate() {
            Ok(vma) => vma,
            Err(error) => return Err(self.give_back([Some(moved), upper], error)),
        };
        let outer = vma.range();
        let to = target.start();
        // From here on faults in the source wait, and find themselves outside of the VMA
        // afterwards: a fault between the count and the move could need one more table.
        vma.write(self.platform());
        let probe = Move { source, to, hull: source };
        let missing = self.table.tables_for_move(&probe);
        let Ok(mut pool) = TablePool::fill(self.table.memory, missing) else {
            vma.end_write();
            return Err(self.give_back([Some(moved), upper], Error::OutOfMemory));
        };
        // From here on nothing can fail. In the target nothing is mapped yet.
        if source.covers(outer) {
            self.remove(vma, removed);
        } else {
            if outer.start() < source.start() {
                vma.set_end(source.start().0);
            } else {
                vma.set_start(source.end().0);
            }
            self.vmas.bounds_changed(NonNull::from(vma));
        }
        match upper {
            // Not where the target was all in front of the source: then the VMA itself is what
            // is left above.
            Some(upper) if outer.start() < source.start() && source.end() < outer.end() => {
                self.vma(upper).set_end(outer.end().0);
                self.insert(upper);
            }
            Some(upper) => self.free_unused(upper),
            None => {}
        }
        let hull = self.hull(source, target);
        let emptied = self.table.relocate(&Move { source, to, hull }, &mut pool);
        gather.absorb(self.table.memory, emptied);
        if !source.covers(outer) {
            vma.end_write();
        }
        self.insert(moved);
        pool.give_back();
        self.table.stats.add(&pool.counts);
        self.merge_around(self.vma(moved), removed);
        Ok(to)
    }

    /// Frees VMAs that were never in the index, and hands the error on.
    pub(super) fn give_back(&self, nodes: [Option<NonNull<Vma>>; 2], error: Error) -> Error {
        nodes.into_iter().flatten().for_each(|node| self.free_unused(node));
        error
    }

    /// Frees a VMA that was never in the index.
    fn free_unused(&self, node: NonNull<Vma>) {
        let memory = self.table.memory;
        // SAFETY: the node came from this slab (`new_vma`), was never put into the index, and so
        // is known to nobody else.
        unsafe { memory.vmas.free(&memory.frames, self.platform(), node) };
    }
}
