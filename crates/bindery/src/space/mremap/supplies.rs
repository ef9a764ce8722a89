//! The memory that a move takes which unmaps something first: had before its first change.

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::VirtRange;
use crate::error::NoMemory;
use crate::frame::slab::Reserved;
use crate::platform::Platform;
use crate::space::munmap::UnmapSupplies;
use crate::space::{AddressSpace, MmapLocked};
use crate::stats::Counts;
use crate::table::TablePool;
use crate::table::move_range::Move;
use crate::userfault::Notices;
use crate::vma::Vma;

use super::RemapCall;
use super::relocation::SourceFate;

/// Memory for one mapping's move. A step takes what is here first, and allocates what is not.
pub(super) struct RemapSupplies<'m, P: Platform> {
    /// For what is unmapped: in the target first, then the tail of the source.
    pub(super) unmappings: ArrayVec<UnmapSupplies, 2>,
    /// For the VMA of the target, and for what is left above the source.
    pub(super) moved: Option<Reserved<Vma>>,
    pub(super) upper: Option<Reserved<Vma>>,
    /// The messages about the move, and whether what moves stays registered.
    pub(super) told: Option<(Notices, bool)>,
    pub(super) tables: TablePool<'m, P>,
}

impl<'m, P: Platform> RemapSupplies<'m, P> {
    #[inline]
    pub(super) fn none(memory: &'m Memory<P>) -> Self {
        let tables = TablePool::new(memory);
        Self { unmappings: ArrayVec::new(), moved: None, upper: None, told: None, tables }
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Gets all memory that it takes to unmap what is in the target, and the source's `tail`, and
    /// to move the source. Where there is not enough, nothing has changed.
    pub(super) fn supply_remap(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        source: VirtRange,
        tail: VirtRange,
        target: VirtRange,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<(), NoMemory> {
        let supplied = self.try_supply(mm, vma, source, tail, target, call);
        if supplied.is_err() {
            self.give_back_supplies(call);
        }
        supplied
    }

    fn try_supply(
        &self,
        mm: &MmapLocked,
        vma: &Vma,
        source: VirtRange,
        tail: VirtRange,
        target: VirtRange,
        call: &mut RemapCall<'_, 'm, P>,
    ) -> Result<(), NoMemory> {
        let supplies = &mut call.supplies;
        for range in [target, tail] {
            if !range.is_empty()
                && let Some(first) = self.vmas_in(mm, range).next()
            {
                supplies.unmappings.push(self.supply_unmapping(mm, range, first)?);
            }
        }
        if vma.userfault_pointer().is_some() {
            let goes = call.remap.fate() == SourceFate::Goes;
            supplies.told = Some(self.tell_of_move(vma, source, target.start(), goes)?);
        }
        supplies.moved = Some(self.reserve_vma()?);
        supplies.upper = Some(self.reserve_vma()?);
        let what = Move { source, to: target.start(), freeable: source };
        let mut counts = Counts::default();
        let tables = self.page_table.tables_to_lay(&what, &mut counts);
        self.page_table.stats.add(&counts);
        supplies.tables.add(tables)
    }

    /// Gives back what the call did not need.
    pub(super) fn give_back_supplies(&self, call: &mut RemapCall<'_, 'm, P>) {
        let supplies = &mut call.supplies;
        supplies.unmappings.drain(..).for_each(|unmapping| self.give_back_unmapping(unmapping));
        if let Some((notices, _)) = supplies.told.take() {
            notices.cancel(self.page_table.memory);
        }
        let reserved = [supplies.moved.take(), supplies.upper.take()];
        reserved.into_iter().flatten().for_each(|reserved| self.give_back_reserved(reserved));
        let mut counts = Counts::default();
        supplies.tables.settle(&mut counts);
        self.page_table.stats.add(&counts);
    }
}
