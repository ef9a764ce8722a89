//! Zero pages: mapped by a read of memory that was never written, and replaced by the first write.

use core::sync::atomic::Ordering;

use crate::addr::{Orders, VirtRange};
use crate::arch::{Arch, Kind, Level};
use crate::events::RareEvents;
use crate::folio::{FreshFolio, OwnerKind};
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::swap::frequent_events;
use crate::table::cursor::Cursor;
use crate::table::publish::publish;
use crate::table::{EntryAt, TableEntry};
use crate::vma::Vma;

use super::Resolved;
use super::first_touch::{folio_place, own_folio, wait_for_block};
use super::slow::{Fault, Next, Stepped, Tries};

impl<P: Platform> Fault<'_, '_, P> {
    /// The orders of zero pages that a read may map; these include the huge zero page if a write
    /// could get a huge folio.
    pub(in crate::space) fn zero_orders(&self) -> Orders {
        let (memory, flags) = (self.memory(), self.vma.flags());
        if !memory.uses_huge_zero_page() {
            return Orders::PAGE;
        }
        let allowed = memory.folio_policy().orders(flags.huge_advice());
        let orders = self.space.settings.used_orders(allowed, flags);
        Orders::PAGE | orders & Orders::of(memory.huge_order())
    }

    /// Maps the zero page.
    pub(super) fn map_zero_page(&self) -> Stepped {
        let (page_table, page) = (self.page_table(), self.page);
        let mapped = page_table.with_tables(self.range(), |mut span| {
            if !span.entry_at(page).entry.is_empty() {
                // Another CPU was faster; its entry may be huge, in which case it must not be
                // split.
                return Ok(Next::Again);
            }
            let table = span.table_at(page, Level::PTE)?;
            let index = P::Arch::PTE.index_of(page);
            let attributes = self.vma.flags().attributes().accessed().read_only();
            let entry = attributes.entry(self.memory().zero_frame, Level::<P::Arch>::PTE);
            page_table.fill(TableEntry { table, index }, entry, 1);
            span.counts.entries_written += 1;
            Ok(Next::Done(Resolved::ZeroPage))
        });
        publish(page_table, self.range());
        Ok(mapped?)
    }

    /// Maps the huge zero page around the page, whose entry was empty when it was read. `None` if
    /// memory for the huge zero page or its tables is lacking, since the small zero page needs
    /// less.
    pub(in crate::space) fn map_huge_zero_page(&self) -> Option<Next> {
        let (memory, page_table) = (self.memory(), self.page_table());
        let range = folio_place(self.page, memory.huge_order())?;
        let frame = memory.huge_zero.frame(&memory.frames, &memory.rare)?;
        let mapped = page_table.with_tables(range, |mut span| {
            let EntryAt { node, entry: found, .. } = span.entry_at(self.page);
            if node.level == Level::PTE || !found.is_empty() {
                return Ok(Next::Again);
            }
            let table = span.table_at(range.start(), Level::PMD)?;
            let deposit = span.take_deposit()?;
            let index = P::Arch::PMD.index_of(range.start());
            let attributes = self.vma.flags().attributes().accessed().read_only();
            let entry = attributes.entry(frame, Level::<P::Arch>::PMD);
            page_table.publish_huge(TableEntry { table, index }, entry);
            page_table.deposit_table(table, deposit);
            span.counts.entries_written += 1;
            Ok(Next::Done(Resolved::ZeroPage))
        });
        publish(page_table, range);
        mapped.ok()
    }

    /// Replaces the huge zero page by a huge folio that is exclusive to the process. If no huge
    /// folio is free, replaces only the page.
    pub(super) fn fill_huge(&self) -> Stepped {
        let memory = self.memory();
        let order = memory.huge_order();
        let Some(range) = folio_place(self.page, order) else { return Ok(Next::Again) };
        memory.may_wait();
        let Some(folio) = own_folio(memory, self.vma, range.start(), order) else {
            if self.tries == Tries::First
                && let Some(wait) = wait_for_block(self.memory(), self.vma)
            {
                return Ok(Next::Wait(wait));
            }
            return self.copy();
        };
        memory.platform().zero(folio.head, folio.pages());
        before_execution(memory, self.vma.flags().attributes().permissions(), *folio);
        let left = {
            let section = self.read_section();
            let mut cursor = self.cursor_of(&section, range);
            cursor.counts.bytes_zeroed += range.len();
            replace_huge_zero(&mut cursor, self.vma, range, folio)
        };
        match left {
            None => {
                publish(self.page_table(), range);
                Ok(Next::Done(Resolved::New(range)))
            }
            Some(folio) => {
                folio.discard();
                Ok(Next::Again)
            }
        }
    }
}

/// Replaces the huge zero page in `range` by the folio, by break-before-make. Returns the folio if
/// the huge zero page is no longer mapped there.
fn replace_huge_zero<'m, P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    vma: &Vma,
    range: VirtRange,
    folio: FreshFolio<'m, P>,
) -> Option<FreshFolio<'m, P>> {
    let page_table = cursor.page_table;
    let EntryAt { node, index, entry: raw } = cursor.entry_at(range.start());
    if node.level != Level::PMD
        || node.level.kind(raw) != Kind::Leaf
        || !page_table.memory.is_zero(P::Arch::frame(raw))
    {
        return Some(folio);
    }
    // The leaf is read-only, so the MMU can only set accessed in the interim, which the new leaf
    // has anyway. The table on deposit is kept for the new leaf.
    let word = &page_table.entries(node.table)[index.position()];
    word.store(0, Ordering::Relaxed);
    page_table.invalidate_now(range, node.level, &mut cursor.counts);
    let pages = folio.pages();
    let folio = folio.map(pages);
    RareEvents::note(&frequent_events(page_table.memory).huge_faults);
    let leaf = vma.flags().attributes().written().entry(folio.head, node.level);
    word.store(leaf.0, Ordering::Release);
    cursor.counts.entries_written += 2;
    cursor.counts.folios_touched += 1;
    cursor.counts.mapped(OwnerKind::Anonymous, folio.pages());
    None
}
