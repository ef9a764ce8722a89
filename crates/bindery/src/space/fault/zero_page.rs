//! Zero pages: mapped where memory is read before it was written, and replaced when it is.

use core::sync::atomic::Ordering;

use crate::addr::{Orders, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Attributes, Kind, Level, Permissions};
use crate::error::{Failure, FaultError};
use crate::events::RareEvents;
use crate::folio::{Folio, OwnerKind};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::table::EntryAt;
use crate::table::cursor::Cursor;
use crate::table::locking::Depth;
use crate::vma::{MappingFlags, Vma};

use super::first_touch::{folio_place, written_attributes};
use super::{Resolved, Step, Tries};

impl<P: Platform> AddressSpace<'_, P> {
    /// The orders of zero pages, one bit for each, that a read may map in a mapping with these
    /// flags: the huge one where a write might take a huge folio.
    pub(in crate::space) fn zero_orders(&self, flags: MappingFlags) -> Orders {
        let memory = self.page_table.memory;
        if !memory.uses_huge_zero_page() {
            return Orders::PAGE;
        }
        let orders = self.used_orders(memory.folio_policy().orders(flags.huge_advice()), flags);
        Orders::PAGE | orders & Orders::of(memory.huge_order())
    }

    pub(super) fn map_zero_page(
        &self,
        vma: &Vma,
        page: VirtAddr,
    ) -> Result<Step, Failure<FaultError>> {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let mapped = self.page_table.with_tables(|pool| {
            let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
            if !cursor.entry_at(page).entry.is_empty() {
                // Another CPU was faster; what it mapped may be huge and must not be cut.
                return Ok(Step::Again);
            }
            let table = cursor.table_at(page, Level::PTE, pool)?;
            let index = P::Arch::PTE.index_of(page);
            let attributes = read_attributes(vma.flags());
            let entry =
                P::Arch::page_entry(self.page_table.memory.zero_frame, Level::PTE, attributes);
            self.page_table.fill(table, index, entry, 1, &mut cursor.counts);
            Ok(Step::Done(Resolved::ZeroPage))
        });
        self.published(range);
        Ok(mapped?)
    }

    /// Maps the huge zero page around `page`, where the entry seemed to be empty. `None` if there
    /// is no memory for it, or for the tables that it needs: a small one may do without.
    pub(in crate::space) fn map_huge_zero_page(&self, vma: &Vma, page: VirtAddr) -> Option<Step> {
        let memory = self.page_table.memory;
        let range = folio_place(page, memory.huge_order())?;
        let frame = memory.huge_zero_frame()?;
        let mapped = self.page_table.with_tables(|pool| {
            let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
            let EntryAt { node, entry: found, .. } = cursor.entry_at(page);
            if node.level == Level::PTE || !found.is_empty() {
                return Ok(Step::Again);
            }
            let table = cursor.table_at(range.start(), Level::PMD, pool)?;
            // A later split of the leaf must not fail.
            let deposit = pool.take(Level::PTE, &mut cursor.counts)?;
            let index = P::Arch::PMD.index_of(range.start());
            let entry = P::Arch::page_entry(frame, Level::PMD, read_attributes(vma.flags()));
            self.page_table.publish_huge(table, index, entry);
            self.page_table.deposit_table(table, deposit);
            cursor.counts.entries_written += 1;
            Ok(Step::Done(Resolved::ZeroPage))
        });
        self.published(range);
        mapped.ok()
    }

    /// Puts a huge folio of the program's own in the place of the huge zero page around `page`;
    /// where none is free, a page in the place of the one page.
    pub(super) fn fill_huge(
        &self,
        vma: &Vma,
        page: VirtAddr,
        tries: Tries,
    ) -> Result<Step, Failure<FaultError>> {
        let memory = self.page_table.memory;
        let order = memory.huge_order();
        let Some(range) = folio_place(page, order) else { return Ok(Step::Again) };
        memory.may_wait();
        let Some(folio) = self.own_folio(vma, range.start(), order) else {
            if tries == Tries::First
                && let Some(step) = self.without_block(vma)
            {
                return Ok(step);
            }
            return Ok(self.copy(vma, page)?.map_or(Step::Again, Step::Done));
        };
        self.platform().zero(folio.head, folio.pages());
        memory.before_execution(vma.flags().attributes().permissions, folio);
        let filled = {
            let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
            cursor.counts.bytes_zeroed += range.len();
            replace_huge_zero(&mut cursor, vma, range, folio)
        };
        if filled {
            self.published(range);
            Ok(Step::Done(Resolved::New(range)))
        } else {
            memory.frames.fresh(folio).discard(self.platform());
            Ok(Step::Again)
        }
    }
}

/// What a leaf says whose page is one of zeroes.
pub(in crate::space) fn read_attributes(flags: MappingFlags) -> Attributes {
    let mut attributes = Attributes { accessed: true, ..flags.attributes() };
    attributes.permissions -= Permissions::WRITE;
    attributes
}

/// Puts the folio in the place of the huge zero page in `range`, by break-before-make. Says
/// whether it is still mapped there.
fn replace_huge_zero<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
    folio: Folio,
) -> bool {
    let page_table = cursor.page_table;
    let EntryAt { node, index, entry: raw } = cursor.entry_at(range.start());
    if node.level != Level::PMD
        || node.level.kind(raw) != Kind::Leaf
        || !page_table.memory.is_zero(P::Arch::frame(raw))
    {
        return false;
    }
    // Read-only, so nothing but accessed can come in between, and the new leaf has that anyway. The
    // table on deposit stays for the new one.
    let slot = &page_table.slots(node.table)[index.slot()];
    slot.store(0, Ordering::Relaxed);
    page_table.invalidate_now(range, node.level, &mut cursor.counts);
    page_table.memory.frames.fresh(folio).map(folio.pages());
    RareEvents::note(&page_table.memory.rare.huge_faults);
    let leaf = P::Arch::page_entry(folio.head, node.level, written_attributes(vma.flags()));
    slot.store(leaf.0, Ordering::Release);
    cursor.counts.entries_written += 2;
    cursor.counts.folios_touched += 1;
    cursor.counts.mapped(OwnerKind::Anonymous, folio.pages());
    true
}
