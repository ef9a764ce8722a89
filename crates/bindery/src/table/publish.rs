//! Makes new entries visible to the page walkers.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::arch::Arch;
use crate::platform::{Invalidation, Platform, Tables};

use super::PageTable;

/// Makes new entries of `range` visible to the walkers. If the MMU may cache empty entries, flushes
/// the range on this CPU immediately; other CPUs fault once more.
pub(crate) fn publish<P: Platform>(page_table: &PageTable<'_, P>, range: VirtRange) {
    page_table.memory.platform().publish_entries();
    if P::Arch::INVALID_MAY_BE_CACHED {
        flush_local(page_table, range);
    }
}

/// Flushes this CPU's TLB entries of `range`, which allow less than the tables do.
pub(crate) fn flush_local<P: Platform>(page_table: &PageTable<'_, P>, range: VirtRange) {
    // A cached empty entry may be of any level.
    let tables = if P::Arch::INVALID_MAY_BE_CACHED { Tables::Changed } else { Tables::Unchanged };
    let what = Invalidation { range, stride: PAGE_SIZE, tables };
    page_table.memory.platform().invalidate_local(page_table.root, &what);
}
