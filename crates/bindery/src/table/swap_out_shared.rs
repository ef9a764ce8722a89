//! Swap-out of a folio that several VMAs map: one of them at a time, by the reverse map.

use core::sync::atomic::Ordering;

use crate::addr::VirtRange;
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Level};
use crate::frame::{ExclusiveRun, Folio, OwnerKind};
use crate::platform::Platform;
use crate::swap::SlotRun;
use crate::tlb::Gather;

use super::PageTable;
use super::locking::Depth;
use super::run::{Run, What};

impl<P: Platform> PageTable<'_, P> {
    /// Makes swap entries of the leaves in `range` that map pages of `folio`, whose slots are
    /// `slots`, and counts its mappings down after the flush. The caller has the folio's lock and a
    /// reference, and the slots are busy.
    pub(crate) fn swap_out_shared(
        &self,
        range: VirtRange,
        folio: Folio,
        slots: SlotRun,
        gather: &mut Gather,
    ) {
        let memory = self.memory;
        let mut cursor = self.cursor_beside(range, Depth::Floor(Level::PTE), Some(&*gather));
        let mut unmapped = 0;
        while let Ok(Some(run)) = cursor.next_run(Equal::SOFT_DIRTY) {
            let What::Leaf(first) = run.what else { continue };
            let number = P::Arch::frame(first).0.wrapping_sub(folio.head.0);
            let pages = run.pages();
            if number >= folio.pages() || pages > folio.pages() - number {
                continue;
            }
            let named = SlotRun { first: slots.first + u64::from(number), count: pages, ..slots };
            if memory.name_slots(named).is_err() {
                break;
            }
            self.write_swap_entries(&run, first, folio, number, slots);
            gather.stale(run.range(), run.node.level);
            cursor.counts.entries_written += u64::from(run.count);
            cursor.counts.folios_touched += 1;
            unmapped += pages;
        }
        self.flush(gather, &mut cursor.counts);
        if unmapped > 0 {
            cursor.counts.unmapped(OwnerKind::Anonymous, unmapped);
            cursor.counts.swap_pages = cursor.counts.swap_pages.wrapping_add(u64::from(unmapped));
            memory.frames.unmap(&memory.platform, folio, unmapped);
        }
    }

    fn write_swap_entries(
        &self,
        run: &Run<P::Arch>,
        first: Entry,
        folio: Folio,
        number: u32,
        slots: SlotRun,
    ) {
        let attributes = P::Arch::attributes(first);
        let scale = run.node.level.order().0;
        let table = self.slots(run.node.table);
        let mut done = 0;
        while done < run.count {
            let page = number + (done << scale);
            let ExclusiveRun { exclusive, count: same } =
                self.memory.frames.exclusive_run(folio, page, folio.pages() - page);
            let exclusive = exclusive && (scale == 0 || same == folio.pages());
            let mut entry = P::Arch::encode_absent(Absent::Swap {
                device: slots.area,
                slot: slots.first + u64::from(page),
                exclusive,
                soft_dirty: attributes.soft_dirty,
                userfault: attributes.userfault,
            });
            let step = P::Arch::absent_step(entry);
            let count = (same >> scale).max(1).min(run.count - done);
            let index = run.index + done;
            for slot in &table[index.slots(count)] {
                slot.store(entry.0, Ordering::Relaxed);
                entry = Entry(entry.0.wrapping_add(step));
            }
            done += count;
        }
    }
}
