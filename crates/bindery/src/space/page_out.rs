//! `MADV_PAGEOUT`: the anonymous pages of a range go to swap, and shared memory does.

use arrayvec::ArrayVec;

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{Arch, Kind, Level};
use crate::error::Error;
use crate::frame::Folio;
use crate::interrupt;
use crate::object::ObjectState;
use crate::object::reclaim::Spare;
use crate::object::swap_out::{FOLIOS, Leaving, swap_out};
use crate::platform::Platform;
use crate::table::PageTable;
use crate::table::cursor::Chunks;
use crate::table::locking::Depth;
use crate::table::out_batch::OutBatch;
use crate::table::victims::{SwapOutStop, Victims};
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
        let memory = self.page_table.memory;
        let attributes = vma.flags().attributes();
        let mut chunks = Chunks::of(self.without_shared_huge_edges(part));
        let mut batch = OutBatch::new();
        let mut victims = Victims::ALL;
        // The mutex keeps writers out.
        let Some(locked) = vma.try_read(self.platform()) else { return Ok(()) };
        loop {
            let stop = {
                let Some(mut cursor) =
                    chunks.next(&self.page_table, Depth::Floor(Level::PTE), Some(&*gather))
                else {
                    break;
                };
                PageTable::swap_out(&mut cursor, attributes, &mut victims, &mut batch, gather)
            };
            batch.write_out(memory);
            match stop.map_err(|_| Error::OutOfMemory)? {
                SwapOutStop::End => {}
                SwapOutStop::Full(at) => chunks.go_on_from(at),
                SwapOutStop::Cut(folio, at) => {
                    if !self.split_if_alone(at) {
                        victims.leave(folio);
                    }
                    chunks.go_on_from(at);
                }
                SwapOutStop::NoSlots => break,
            }
            interrupt::check(self.platform())?;
        }
        drop(locked);
        Ok(())
    }

    /// Sends the folios of shared memory that are mapped in `part` alone to swap: one walk through
    /// the reverse map for each [`FOLIOS`]. As on Linux, what other VMAs map too stays, and so does
    /// what nobody has touched here.
    #[inline(never)]
    pub(super) fn page_out_shared(
        &self,
        object: &ObjectState,
        part: VirtRange,
    ) -> Result<(), Error> {
        let memory = self.page_table.memory;
        let mut folios = ArrayVec::new();
        let mut batch = OutBatch::new();
        let mut at = part.start();
        while at < part.end() {
            interrupt::check(self.platform())?;
            let (mapped, next) = self.mapped_folios(VirtRange::raw(at.0, part.end().0));
            let leaving = mapped
                .iter()
                .filter_map(|(folio, pages)| Leaving::new(memory, object, folio.head, *pages));
            folios.extend(leaving);
            swap_out(memory, object, &mut folios, Spare::Nothing, &mut batch);
            batch.write_out(memory);
            at = next;
        }
        Ok(())
    }

    /// The first folios of objects that are mapped in the range, with how many of their pages, and
    /// up to where.
    fn mapped_folios(&self, range: VirtRange) -> (ArrayVec<(Folio, u32), FOLIOS>, VirtAddr) {
        let frames = &self.page_table.memory.frames;
        let mut mapped = ArrayVec::<(Folio, u32), FOLIOS>::new();
        let mut next = range.end();
        self.page_table.look(range, |looked| {
            if looked.node.level.kind(looked.raw) != Kind::Leaf {
                return true;
            }
            let folio = frames.folio_of(P::Arch::frame(looked.entry));
            let Some(folio) = folio.filter(|folio| frames.is_of_object(*folio)) else {
                return true;
            };
            let pages = looked.range.pages() as u32;
            let full = mapped.is_full();
            match mapped.last_mut() {
                Some((last, count)) if *last == folio => *count += pages,
                _ if full => next = looked.range.start(),
                _ => mapped.push((folio, pages)),
            }
            next == range.end()
        });
        (mapped, next)
    }
}
