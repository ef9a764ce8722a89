//! The state of a call, together with the memory for a move that first unmaps mappings. All of this
//! memory is allocated before the first change.

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

/// A call, across all its attempts. The supplies serve one mapping's move and are absent between
/// two attempts. A step uses the supplies first and allocates only the rest.
pub(super) struct RemapCall<'m, P: Platform> {
    /// The call, or its part for the mapping that moves next.
    pub(super) plan: RemapPlan,
    /// In a move of several mappings, the source address up to which mappings have moved.
    pub(super) moved_to: u64,
    /// New pages of a locked mapping.
    pub(super) grown: Option<VirtRange>,
    /// For unmapping, first in the target and then in the tail of the source.
    pub(super) unmappings: ArrayVec<UnmapSupplies<'m, P>, 2>,
    /// For the VMA of the target and for the part above the source.
    pub(super) moved: Option<ReservedVma<'m, P>>,
    pub(super) upper: Option<ReservedVma<'m, P>>,
    /// The messages about the move, and whether the destination stays registered.
    pub(super) notices: Option<(Notices, bool)>,
    pub(super) tables: TablePool<'m, P>,
}

impl<'m, P: Platform> RemapCall<'m, P> {
    /// A call without supplies.
    #[inline]
    pub(super) fn new(memory: &'m Memory<P>, plan: RemapPlan) -> Self {
        Self {
            plan,
            moved_to: plan.source.start().0,
            grown: None,
            unmappings: ArrayVec::new(),
            moved: None,
            upper: None,
            notices: None,
            tables: TablePool::new(memory),
        }
    }

    /// Allocates all memory for unmapping the mappings in the target and the source's tail, and for
    /// the move of the source, a part of `vma`. `free_supplies` must follow, even on failure.
    pub(super) fn supply(&mut self, op: &mut Op<'_, 'm, P>, vma: &Vma) -> Result<(), NoMemory> {
        let RemapPlan { source, tail, length, remap, .. } = self.plan;
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
            self.notices = Some(events::prepare_move(op, vma, (source, to), unmaps)?);
        }
        self.moved = Some(op.vmas.reserve()?);
        self.upper = Some(op.vmas.reserve()?);
        op.edit.move_range(source.into(), to, &mut self.tables, |mover| mover.supply_tables())
    }

    /// Frees the supplies that the attempt did not need.
    pub(super) fn free_supplies(&mut self, op: &Op<'_, 'm, P>) {
        self.unmappings.drain(..).for_each(|unmapping| unmapping.cancel(op));
        if let Some((notices, _)) = self.notices.take() {
            notices.cancel(op.memory());
        }
        (self.moved, self.upper) = (None, None);
        let mut counts = Counts::default();
        self.tables.settle(&mut counts);
        op.edit.count(&counts);
    }
}
