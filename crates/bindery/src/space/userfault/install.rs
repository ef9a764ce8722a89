//! Maps the pages that a handler supplies.

use core::sync::atomic::Ordering;

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Level, Marker};
use crate::error::{Error, Failure, NoMemory};
use crate::platform::Platform;
use crate::space::op::VmaOp;
use crate::stats::Counts;
use crate::table::publish::publish;
use crate::table::{EntryAt, run};

/// Whether the entry is a marker that a page may replace.
fn is_replaceable<A: Arch>(entry: Entry) -> bool {
    let marker = || match A::decode_absent(entry) {
        Some(Absent::Marker(Marker::UserfaultWriteProtect | Marker::Poison)) => true,
        Some(Absent::Marker(Marker::Guard) | Absent::Swap { .. } | Absent::ProtNone { .. })
        | None => false,
    };
    entry.0 & A::PRESENT == 0 && marker()
}

/// Whether `entry` blocks a page that a handler supplies. Markers of userfaultfds do not.
pub(super) fn is_occupied<A: Arch>(entry: Entry) -> bool {
    !entry.is_empty() && !is_replaceable::<A>(entry)
}

impl<P: Platform> VmaOp<'_, '_, P> {
    /// The entry of a zero page.
    pub(super) fn zero_entry(&self) -> Entry {
        let attributes = self.vma.flags().attributes().accessed().read_only();
        attributes.entry(self.memory().zero_frame, Level::<P::Arch>::PTE)
    }

    /// Writes `entry` for each page from the start of `range` up to the first non-empty entry, in
    /// one table. Returns the end of the written part.
    ///
    /// # Errors
    /// [`Error::Exists`] if the first entry is not empty; [`Error::OutOfMemory`].
    pub(super) fn install(&self, range: VirtRange, entry: Entry) -> Result<VirtAddr, Failure> {
        let page_table = self.page_table();
        let span = P::Arch::PTE.table_span();
        let start = range.start();
        let end = start.align_down(span).0.saturating_add(span).min(range.end().0);
        let part = VirtRange::raw(start.0, end);
        let mapped = page_table.with_tables(part, |mut span| {
            let EntryAt { node, entry: found, .. } = span.entry_at(start);
            if node.level > Level::PTE && !found.is_empty() {
                return Ok(0);
            }
            let table = span.table_at(start, Level::PTE)?;
            let first = P::Arch::PTE.index_of(start);
            let entries = page_table.entries(table);
            let count = run::count_empty(&entries[first.positions(part.pages() as u32)]);
            for word in &entries[first.positions(count)] {
                word.store(entry.0, Ordering::Relaxed);
            }
            span.counts.entries_read += u64::from(count);
            span.counts.entries_written += u64::from(count);
            page_table.change_entry_count(table, count, 0);
            Ok(count)
        });
        publish(page_table, part);
        let count = mapped?;
        if count == 0 {
            return Err(Error::Exists(start).into());
        }
        Ok(start.offset(u64::from(count) * PAGE_SIZE))
    }

    /// Removes markers from the range of a folio that is about to be mapped there.
    pub(super) fn lift_markers(&self, range: VirtRange) -> Result<(), NoMemory> {
        let entry = {
            let section = self.page_table().read_section();
            self.page_table().peek(&section, range.start(), &mut Counts::default()).entry
        };
        if !is_replaceable::<P::Arch>(entry) {
            return Ok(());
        }
        self.page_table().edit(|edit| {
            // Only markers: another handler may have mapped a protected page since the look.
            edit.unmark(range, Marker::UserfaultWriteProtect)?;
            edit.unmark(range, Marker::Poison)
        })
    }
}
