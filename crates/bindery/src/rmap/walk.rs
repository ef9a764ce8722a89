//! Walking: all places where pages of an owner may be mapped.

use crate::Memory;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::space::index::Indexed;
use crate::space::vma::Vma;
use crate::table::PageTable;

/// A stretch of an object or group, as one VMA sees it.
pub(crate) struct Sight<'a, 'm, P: Platform> {
    /// The tables in which it may be mapped.
    pub(crate) table: PageTable<'m, P>,
    /// The VMA; its bounds and offset stay as they are, its protection may change.
    pub(crate) vma: &'a Vma,
    /// Where the stretch stands there.
    pub(crate) range: VirtRange,
}

/// Calls `f` for each VMA that maps pages `first` to `first + count` of `object`, with the lock of
/// the object's list held; for parents before their children. Complexity: in the VMAs that map the object.
pub(crate) fn for_each_sight<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
    mut f: impl FnMut(Sight<'_, 'm, P>),
) {
    object.mappers_gate.write(&memory.platform);
    for vma in object.mappers.iter() {
        if let Some(range) = part_of(vma, first, count) {
            // SAFETY: the VMA stands in the object's list, whose lock is held, and leaves it before
            // its address space is gone.
            let table = unsafe { PageTable::from_state(memory, vma.tree()) };
            f(Sight { table, vma, range });
        }
    }
    object.mappers_gate.end_write();
}

/// Where pages `first` to `first + count` stand in the VMA, as far as it reaches.
pub(crate) fn part_of(vma: &Vma, first: u64, count: u64) -> Option<VirtRange> {
    let offset = vma.page_offset();
    let pages = (vma.end() - vma.start()) >> PAGE_SHIFT;
    let begin = first.max(offset);
    let end = first.saturating_add(count).min(offset.saturating_add(pages));
    (begin < end).then(|| {
        let at = |page: u64| vma.start() + ((page - offset) << PAGE_SHIFT);
        VirtRange::raw(at(begin), at(end))
    })
}
