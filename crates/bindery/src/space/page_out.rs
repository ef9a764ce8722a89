//! `MADV_PAGEOUT`: the anonymous pages of a range go to swap.

use crate::addr::VirtRange;
use crate::arch::Level;
use crate::error::Error;
use crate::interrupt;
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::cursor::Chunks;
use crate::table::locking::Depth;
use crate::table::out_batch::OutBatch;
use crate::table::swap_out::{SwapOutStop, Victims};
use crate::tlb::Gather;
use crate::vma::Vma;

use super::AddressSpace;

impl<P: Platform> AddressSpace<'_, P> {
    /// Sends the anonymous folios that are mapped in `part` alone to swap, table by table: one
    /// flush for each part that one set of locks serves. The VMA is locked for reading: a fault in
    /// it waits for the folio that it wants, and for no other. Ends early where no slots are left.
    // Not one of the commoner kinds of advice, and long.
    #[inline(never)]
    pub(super) fn page_out(
        &self,
        vma: &Vma,
        part: VirtRange,
        gather: &mut Gather,
    ) -> Result<(), Error> {
        // The mutex keeps writers out.
        let Some(locked) = vma.try_read(self.platform()) else { return Ok(()) };
        let memory = self.table.memory;
        let attributes = vma.flags().attributes();
        let mut chunks = Chunks::of(part);
        let mut batch = OutBatch::new();
        let mut victims = Victims::ALL;
        loop {
            let stop = {
                let Some(mut cursor) =
                    chunks.next(&self.table, Depth::Floor(Level::PTE), Some(&*gather))
                else {
                    break;
                };
                PageTable::swap_out(&mut cursor, attributes, &mut victims, &mut batch, gather)
            };
            batch.write_out(memory);
            match stop.map_err(|_| Error::OutOfMemory)? {
                SwapOutStop::End => {}
                SwapOutStop::Full(at) => chunks.go_on_from(at),
                SwapOutStop::NoSlots => break,
            }
            interrupt::check(self.platform())?;
        }
        drop(locked);
        Ok(())
    }
}
