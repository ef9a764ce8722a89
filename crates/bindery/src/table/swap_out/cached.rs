//! Folios of the swap cache that are swapped out again, to their present slots. Entries of another
//! process, which has not accessed the page since a fork, refer to these slots.

use crate::arch::Entry;
use crate::folio::Folio;
use crate::platform::Platform;

use super::super::out_batch::InCache;
use super::super::run::Run;
use super::{AfterRun, Arch, SwapOut};
use crate::addr::{PAGE_SHIFT, VirtAddr};

impl<P: Platform> SwapOut<'_, '_, '_, '_, P> {
    /// Turns the run, which maps `pages` pages of a folio in the swap cache, into swap entries, if
    /// no other entries map the folio. Usually the content is already in swap, and nothing is
    /// written.
    #[cold]
    #[inline(never)]
    pub(super) fn store_cached(
        &mut self,
        run: &Run<P::Arch>,
        first: Entry,
        folio: Folio,
        pages: u32,
    ) -> AfterRun {
        let memory = self.span.page_table.memory;
        let frames = &memory.frames;
        let held = self.scan.holds(folio);
        let references = u32::from(held) + InCache::Before.references();
        let only_here = frames.folio(folio).is_mapped_and_held(pages, references);
        if !only_here || self.stays(run, folio, || P::Arch::attributes(first).accessed) {
            return AfterRun::Run;
        }
        let Some(lock) = self.lock(folio) else { return AfterRun::Run };
        let number = P::Arch::frame(first).0 - folio.head.0;
        let slots = match self.slots_again(lock.locked(), number, pages) {
            Ok(slots) => slots,
            Err(next) => return next,
        };
        self.leave_to_batch(lock);
        self.scan.left = self.scan.left.saturating_sub(pages);
        self.defer(run.node.table, pages, pages);
        let run = Run { count: pages >> run.node.level.order().0, ..*run };
        self.write_entries(&run, folio, number, slots);
        let at = run.at.0.wrapping_sub(u64::from(number) << PAGE_SHIFT);
        self.batch.add(slots, VirtAddr(at), InCache::Before);
        AfterRun::Run
    }
}
