//! First touches: the largest folio that fits, or a zero page.

use core::sync::atomic::Ordering;

use crate::Memory;
use crate::addr::{Order, Orders, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{AbsentFormat, Arch, Entry, Level};
use crate::effort::Collecting;
use crate::error::Failure;
use crate::events::RareEvents;
use crate::folio::{FreshFolio, MAX_FOLIO_ORDER, OwnerKind};
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::stats::Counts;
use crate::swap::frequent_events;
use crate::table::fill_span::FillSpan;
use crate::table::publish::publish;
use crate::table::{EntryAt, NoMemory, Table, TableEntry, run};
use crate::vma::{MappingAttributes, MappingFlags, Vma};

use super::slow::{Fault, Next, Stepped, Tries};
use super::swap_in::{FaultSlot, slot_of};
use super::{Access, Resolved, Wait};

/// The content of a non-empty entry.
pub(in crate::space) enum Occupant<A: Arch> {
    /// A reference to a swap slot.
    Slot(FaultSlot),
    /// Anything else, at its level.
    Entry(Entry, Level<A>),
}

impl<P: Platform> Fault<'_, '_, P> {
    /// The most frequent fault: a first write to anonymous memory whose table exists, with a folio
    /// small enough to be zeroed in the read section. The fault takes one read section and one
    /// lock. A write to a page that became private to this process ([`Fault::reuse_in_place`]) is
    /// handled in the same way. `None` for any other fault.
    ///
    /// The folio is zeroed before the table is locked, so that nearby faults do not wait for the
    /// zeroing.
    // Always inlined: `handle_fault` does little else.
    #[inline(always)]
    pub(super) fn touch_small(&self, flags: MappingFlags) -> Option<Resolved> {
        let (memory, page_table, page) = (self.memory(), self.page_table(), self.page);
        let section = self.read_section();
        let Some(found) = page_table.leaf_table(&section, page) else {
            return self.reuse_huge(&section);
        };
        let entries = page_table.entries(found.table);
        let table = found.table;
        let allowed = memory.folio_policy().orders(flags.huge_advice());
        let mut orders = self.space.settings.used_orders(allowed, flags) | Orders::PAGE;
        if orders.has_large() && !run::load(entries, P::Arch::PTE.index_of(page)).is_empty() {
            // The neighboring entries need not be read.
            return self.reuse_in_place(&section, &found);
        }
        while let Some(order) = orders.take_largest() {
            let Some(range) = folio_place(page, order) else { continue };
            // A folio as large as the table would replace the table.
            if order >= P::Arch::PMD.order() || !self.vma.range().covers(range) {
                continue;
            }
            let first = P::Arch::PTE.index_of(range.start());
            let stretch = &entries[first.positions(order.pages())];
            if !run::are_empty(stretch) {
                continue;
            }
            if order > ZEROED_IN_SECTION {
                return None;
            }
            // If no frame is free, the slow path waits for one outside of the read section.
            let folio = own_folio(memory, self.vma, range.start(), order)?;
            memory.platform().zero(folio.head, folio.pages());
            let locked = page_table.try_lock_leaf_table(&section, page, &found);
            if !locked || !run::are_empty(stretch) {
                if locked {
                    page_table.unlock(table);
                }
                folio.discard();
                return None;
            }
            let entry = flags.attributes().written().entry(folio.head, Level::<P::Arch>::PTE);
            let pages = folio.pages();
            let folio = folio.map(pages);
            page_table.write_leaves(TableEntry { table, index: first }, entry, folio.pages());
            page_table.unlock(table);
            let counts = Counts {
                entries_descended: u64::from(P::Arch::LEVELS) - 1,
                entries_read: u64::from(folio.pages()),
                entries_written: u64::from(folio.pages()),
                tables_locked: 1,
                folios_touched: 1,
                bytes_zeroed: range.len(),
                anonymous_pages: u64::from(folio.pages()),
                ..Counts::default()
            };
            page_table.count_in(&section, &counts);
            publish(page_table, range);
            return Some(Resolved::New(range));
        }
        // The page's own entry is not empty. Checked last, so that a first touch pays nothing for
        // the check.
        self.reuse_in_place(&section, &found)
    }

    /// As [`Fault::touch_small`], in a separate function, for the first touch of a mapping and for
    /// a touch whose VMA was locked by a writer.
    #[inline(never)]
    pub(super) fn touch_new(&self, flags: MappingFlags) -> Option<Resolved> {
        self.touch_small(flags)
    }

    /// The orders of folios that fit around the page if its entry is empty: for a write, the orders
    /// of the policy; for a read, the orders of the zero pages. Otherwise, the content of the
    /// entry. The result is a hint, read without locks: a step that acts on it checks the entry
    /// again.
    pub(in crate::space) fn vacant_orders(&self) -> Result<Orders, Occupant<P::Arch>> {
        let mut counts = Counts::default();
        let (memory, page_table, page) = (self.memory(), self.page_table(), self.page);
        let section = self.read_section();
        let seen = page_table.peek(&section, page, &mut counts);
        page_table.count_in(&section, &counts);
        let EntryAt { node, entry, .. } = seen;
        if !entry.is_empty() {
            return self.occupied(seen);
        }
        let flags = self.vma.flags();
        let wanted = match self.access {
            Access::Write => {
                let allowed = memory.folio_policy().orders(flags.huge_advice());
                self.space.settings.used_orders(allowed, flags) | Orders::PAGE
            }
            // A table has no room for the huge zero page.
            Access::Read | Access::Execute if node.level == Level::PTE => return Ok(Orders::PAGE),
            Access::Read | Access::Execute => self.zero_orders(),
        };
        let huge = P::Arch::PMD.order();
        let fits = |order: Order| {
            let range = folio_place(page, order).filter(|range| self.vma.range().covers(*range));
            let Some(range) = range.filter(|_| order <= huge) else { return false };
            let first = P::Arch::PTE.index_of(range.start());
            let entries = page_table.entries(node.table);
            // Above level 1, the empty entry covers the whole range.
            node.level > Level::PTE
                || order < huge
                    && run::count_empty(&entries[first.positions(order.pages())]) == order.pages()
        };
        let orders = Order::PAGE.up_to(MAX_FOLIO_ORDER).filter(|order| wanted.contains(*order));
        let fitting = orders.filter(|order| fits(*order)).map(Orders::of);
        Ok(fitting.fold(Orders::default(), |set, order| set | order))
    }

    /// The result of [`Fault::vacant_orders`] for a non-empty entry.
    // Returns the whole result, because the caller passes the place on.
    #[inline(never)]
    fn occupied(&self, seen: EntryAt<P::Arch, Table<'_>>) -> Result<Orders, Occupant<P::Arch>> {
        let EntryAt { node, entry, .. } = seen;
        if entry.0 & P::Arch::PRESENT == 0
            && P::Arch::is_swap(entry)
            && let Some(slot) = slot_of(self.page_table(), seen, self.page)
        {
            return Err(Occupant::Slot(slot));
        }
        Err(Occupant::Entry(entry, node.level))
    }

    /// Maps fresh memory or a zero page. The entry was empty when it was read, and `orders` are
    /// those that fit.
    pub(super) fn first_touch(&self, mut orders: Orders) -> Stepped {
        if self.access != Access::Write {
            let huge = if orders.has_large() { self.map_huge_zero_page() } else { None };
            return huge.map_or_else(|| self.map_zero_page(), Ok);
        }
        if orders.is_empty() {
            return Ok(Next::Again);
        }
        let memory = self.memory();
        let mut asked = self.tries == Tries::Last;
        while let Some(order) = orders.take_largest() {
            let Some(range) = folio_place(self.page, order) else { continue };
            memory.may_wait();
            let Some(folio) = own_folio(memory, self.vma, range.start(), order) else {
                if order > Order::PAGE && !asked {
                    asked = true;
                    if let Some(wait) = wait_for_block(self.memory(), self.vma) {
                        return Ok(Next::Wait(wait));
                    }
                }
                continue;
            };
            memory.platform().zero(folio.head, folio.pages());
            let zeroed = Counts { bytes_zeroed: range.len(), ..Counts::default() };
            self.page_table().count(&zeroed);
            let mut folio = Some(folio);
            let next = self.map_folio(range, &mut folio, self.vma.flags().attributes().written());
            if let Some(folio) = folio {
                folio.discard();
            }
            if matches!(next, Err(Failure::NoMemory)) && order > Order::PAGE {
                // A smaller folio needs no deposited table.
                continue;
            }
            return next;
        }
        Err(Failure::NoMemory)
    }

    /// Maps a fresh folio in `range`, if all entries there are empty. Otherwise the caller keeps
    /// it.
    pub(in crate::space) fn map_folio(
        &self,
        range: VirtRange,
        fresh: &mut Option<FreshFolio<'_, P>>,
        attributes: MappingAttributes,
    ) -> Stepped {
        let Some(folio) = fresh.as_deref().copied() else { return Ok(Next::Again) };
        let huge = folio.order == P::Arch::PMD.order() && folio.order > Order::PAGE;
        let level = if huge { Level::PMD } else { Level::PTE };
        before_execution(self.memory(), attributes.permissions(), folio);
        let mapped = self
            .page_table()
            .with_tables(range, |span| map_folio_locked(span, range, fresh, (attributes, level)));
        publish(self.page_table(), range);
        Ok(mapped?)
    }
}

/// Decides whether to collect memory when no block for a large folio is free. `None` means to use a
/// smaller folio.
pub(super) fn wait_for_block<P: Platform>(memory: &Memory<P>, vma: &Vma) -> Option<Wait> {
    match memory.effort.collecting(vma.flags().huge_advice()) {
        Collecting::Now => return Some(Wait::Memory),
        Collecting::Later => memory.platform().collect_memory_later(),
        Collecting::Never => {}
    }
    None
}

/// A fresh folio of 2^`order` pages that belongs to the VMA's anon group, for the pages from
/// `start`.
pub(super) fn own_folio<'m, P: Platform>(
    memory: &'m Memory<P>,
    vma: &Vma,
    start: VirtAddr,
    order: Order,
) -> Option<FreshFolio<'m, P>> {
    let fresh = memory.frames.new_exclusive_folio(order)?;
    fresh.set_owner(AnonGroup::as_owner(vma.group()), vma.folio_index_at(start));
    Some(fresh)
}

/// The largest folio that is zeroed inside a read section, in which the thread cannot be preempted:
/// 64 KiB, a few microseconds.
const ZEROED_IN_SECTION: Order = Order(4);

/// The range in which a folio of 2^`order` pages around `page` would be mapped.
#[inline]
pub(in crate::space) fn folio_place(page: VirtAddr, order: Order) -> Option<VirtRange> {
    let size = PAGE_SIZE << order.0;
    VirtRange::from_len(page.align_down(size), size)
}

fn map_folio_locked<P: Platform>(
    mut span: FillSpan<'_, '_, '_, P>,
    range: VirtRange,
    fresh: &mut Option<FreshFolio<'_, P>>,
    (attributes, level): (MappingAttributes, Level<P::Arch>),
) -> Result<Next, NoMemory> {
    let page_table = span.page_table;
    let Some(folio) = fresh.as_deref().copied() else { return Ok(Next::Again) };
    let EntryAt { node, entry, .. } = span.entry_at(range.start());
    if node.level < level || !entry.is_empty() {
        // Another thread has installed a table or a page here, so the folio no longer fits.
        return Ok(Next::Again);
    }
    let table = span.table_at(range.start(), level)?;
    let index = level.index_of(range.start());
    let count = if level == Level::PTE { folio.pages() } else { 1 };
    let vacant = run::count_empty(&page_table.entries(table)[index.positions(count)]);
    span.counts.entries_read += u64::from(vacant);
    if vacant != count {
        return Ok(Next::Again);
    }
    let deposit = if level > Level::PTE { Some(span.take_deposit()?) } else { None };
    let entry = attributes.entry(folio.head, level);
    if let Some(fresh) = fresh.take() {
        fresh.map(folio.pages());
    }
    span.counts.folios_touched += 1;
    span.counts.mapped(OwnerKind::Anonymous, folio.pages());
    if level == Level::PTE {
        page_table.fill(TableEntry { table, index }, entry, count);
        span.counts.entries_written += u64::from(count);
    } else {
        let word = &page_table.entries(table)[index.position()];
        word.store(entry.0, Ordering::Release);
        span.counts.entries_written += 1;
        RareEvents::note(&frequent_events(page_table.memory).huge_faults);
        page_table.change_entry_count(table, 1, 0);
        if let Some(deposit) = deposit {
            page_table.deposit_table(table, deposit);
        }
    }
    Ok(Next::Done(Resolved::New(range)))
}

const _: () = assert!(MAX_FOLIO_ORDER.0 < u16::BITS as u8, "orders fit into a bit set");
