//! The memory for a move that unmaps mappings first: allocated before its first change.

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::VirtRange;
use crate::error::NoMemory;
use crate::platform::Platform;
use crate::space::call::munmap::{UnmapSupplies, supply_unmapping};
use crate::space::op::Op;
use crate::space::userfault::events;
use crate::stats::Counts;
use crate::table::TablePool;
use crate::userfault::Notices;
use crate::vma::Vma;
use crate::vmas::ReservedVma;

use super::plan::RemapPlan;

/// Memory for one mapping's move. A step uses these supplies first, and allocates the rest.
pub(super) struct RemapSupplies<'m, P: Platform> {
    /// For unmapping: in the target first, then the tail of the source.
    pub(super) unmappings: ArrayVec<UnmapSupplies<'m, P>, 2>,
    /// For the VMA of the target, and for the part above the source.
    pub(super) moved: Option<ReservedVma<'m, P>>,
    pub(super) upper: Option<ReservedVma<'m, P>>,
    /// The messages about the move, and whether the destination stays registered.
    pub(super) told: Option<(Notices, bool)>,
    pub(super) tables: TablePool<'m, P>,
}

impl<'m, P: Platform> RemapSupplies<'m, P> {
    #[inline]
    pub(super) fn none(memory: &'m Memory<P>) -> Self {
        let tables = TablePool::new(memory);
        Self { unmappings: ArrayVec::new(), moved: None, upper: None, told: None, tables }
    }

    /// Allocates all memory for unmapping the mappings in the target and the source's tail, and for
    /// the move of the source, a part of `vma`. The supplies must be given back, even on failure.
    pub(super) fn fill(
        &mut self,
        op: &mut Op<'_, 'm, P>,
        vma: &Vma,
        plan: &RemapPlan,
    ) -> Result<(), NoMemory> {
        let &RemapPlan { source, tail, length, remap, .. } = plan;
        let to = remap.target().unwrap_or_default();
        for range in [VirtRange::raw(to.0, to.0 + length), tail] {
            if !range.is_empty()
                && let Some(first) = op.vmas.first_in(range)
            {
                self.unmappings.push(supply_unmapping(op, range, first)?);
            }
        }
        if vma.userfault_pointer().is_some() {
            let unmaps = !remap.keeps_source();
            self.told = Some(events::prepare_move(op, vma, (source, to), unmaps)?);
        }
        self.moved = Some(op.vmas.reserve()?);
        self.upper = Some(op.vmas.reserve()?);
        let mut counts = Counts::default();
        let done = op.edit.mover(source.into(), to, &mut self.tables, &mut counts).supply_tables();
        op.edit.count(&counts);
        done
    }

    /// Gives back the supplies that the call did not need.
    pub(super) fn give_back(&mut self, op: &Op<'_, 'm, P>) {
        self.unmappings.drain(..).for_each(|unmapping| unmapping.give_back(op));
        if let Some((notices, _)) = self.told.take() {
            notices.cancel(op.memory());
        }
        (self.moved, self.upper) = (None, None);
        let mut counts = Counts::default();
        self.tables.settle(&mut counts);
        op.edit.count(&counts);
    }
}
