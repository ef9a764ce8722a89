//! Maps what a handler supplies.

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Entry, Level};
use crate::error::Error;
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::fault::read_attributes;
use crate::table::locking::Depth;
use crate::table::run;
use crate::vma::Vma;

impl<P: Platform> AddressSpace<'_, P> {
    /// Maps the zero page from the beginning of `range` on, as far as the entries are empty, in one
    /// table. Returns the end of that, which is the beginning if the first entry is not empty.
    pub(super) fn install_zeroes(&self, vma: &Vma, range: VirtRange) -> Result<VirtAddr, Error> {
        let span = Level::PTE.table_span::<P::Arch>();
        let start = range.start();
        let end = start.align_down(span).0.saturating_add(span).min(range.end().0);
        let part = VirtRange::raw(start.0, end);
        let attributes = read_attributes(vma.flags());
        let leaf = P::Arch::leaf(self.table.memory.zero_frame, Level::PTE, attributes);
        let mapped = self.table.with_tables(|pool| {
            let mut cursor = self.table.cursor(part, Depth::Floor(Level::PTE));
            let (node, _, entry) = cursor.entry_at(start);
            if node.level > Level::PTE && !entry.is_empty() {
                return Ok(0);
            }
            let table = cursor.table_at(start, Level::PTE, pool)?;
            let first = Level::PTE.index_of::<P::Arch>(start);
            let slots = self.table.slots(table);
            let count = run::count_empty(slots, first, part.pages() as u32);
            for slot in &slots[first as usize..(first + count) as usize] {
                slot.store(leaf.0, Ordering::Relaxed);
            }
            cursor.counts.entries_read += u64::from(count);
            cursor.counts.entries_written += u64::from(count);
            self.table.change_entry_count(table, count, 0);
            Ok(count)
        });
        self.published(part);
        let count = mapped.map_err(|_| Error::OutOfMemory)?;
        Ok(start.offset(u64::from(count) * PAGE_SIZE))
    }

    /// Whether `entry` is in the way of a page that a handler supplies.
    pub(super) fn is_occupied(&self, entry: Entry) -> bool {
        !entry.is_empty()
    }
}
