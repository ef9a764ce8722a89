//! First touches: the largest folio that fits, or a zero page.

use core::sync::atomic::Ordering;

use crate::addr::{Order, Orders, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{AbsentFormat, Arch, Attributes, Entry, Level};
use crate::effort::Collecting;
use crate::error::{Failure, FaultError};
use crate::events::RareEvents;
use crate::folio::{Folio, MAX_FOLIO_ORDER, OwnerKind};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::stats::Counts;
use crate::table::cursor::Cursor;
use crate::table::locking::{Depth, LockTree};
use crate::table::{EntryAt, NoMemory, ReadSection, TablePool, run};
use crate::vma::{MappingFlags, Vma};

use super::swap_in::Slot;
use super::{Access, Resolved, Step, Tries};

/// What an entry holds that is not empty.
pub(in crate::space) enum Occupant<A: Arch> {
    /// The name of a swap slot.
    Slot(Slot),
    /// Anything else, at its level.
    Entry(Entry, Level<A>),
}

impl<P: Platform> AddressSpace<'_, P> {
    /// The commonest fault, a first write to anonymous memory where there is a table already and no
    /// large folio fits: all in one read section, with one lock. `None` if it is not that one.
    ///
    /// The folio is zeroed before the table is locked, so that faults nearby go on meanwhile.
    // Always: `fault` does little else.
    #[inline(always)]
    pub(super) fn touch_small(
        &self,
        vma: &Vma,
        page: VirtAddr,
        flags: MappingFlags,
    ) -> Option<Resolved> {
        let memory = self.page_table.memory;
        let section = ReadSection::enter(self.platform());
        let found = self.page_table.leaf_table(&section, page)?;
        let table = found.table;
        let slots = self.page_table.slots(table);
        let mut orders = self.used_orders(memory.folio_policy().orders(flags.huge_advice()), flags)
            | Orders::PAGE;
        if orders.has_large() && !run::load(slots, P::Arch::PTE.index_of(page)).is_empty() {
            // A copy on write, most often: its neighbors need not be read.
            return None;
        }
        while let Some(order) = orders.take_largest() {
            let Some(range) = folio_place(page, order) else { continue };
            // One as large as the table would take the place of the table.
            if order >= P::Arch::PMD.order() || !vma.range().covers(range) {
                continue;
            }
            let first = P::Arch::PTE.index_of(range.start());
            let stretch = &slots[first.slots(order.pages())];
            if !run::are_empty(stretch) {
                continue;
            }
            if order > ZEROED_IN_SECTION {
                return None;
            }
            // Where there is none at once, the slow way waits for one outside of the read section.
            let folio = self.own_folio(vma, range.start(), order)?;
            self.platform().zero(folio.head, folio.pages());
            let locked = self.page_table.try_lock_leaf_table(page, &found);
            if !locked || !run::are_empty(stretch) {
                if locked {
                    self.page_table.unlock(table);
                }
                memory.frames.fresh(folio).discard(self.platform());
                return None;
            }
            let entry = P::Arch::page_entry(folio.head, Level::PTE, written_attributes(flags));
            memory.frames.fresh(folio).map(folio.pages());
            self.page_table.write_leaves(table, first, entry, folio.pages());
            self.page_table.unlock(table);
            self.page_table.stats.add(&Counts {
                entries_descended: u64::from(P::Arch::LEVELS) - 1,
                entries_read: u64::from(folio.pages()),
                entries_written: u64::from(folio.pages()),
                tables_locked: 1,
                folios_touched: 1,
                bytes_zeroed: range.len(),
                anonymous_pages: u64::from(folio.pages()),
                ..Counts::default()
            });
            self.published(range);
            return Some(Resolved::New(range));
        }
        None
    }

    /// As [`AddressSpace::touch_small`], in a function of its own: for the first touch of a
    /// mapping, and of one that a writer had locked.
    #[inline(never)]
    pub(super) fn touch_new(
        &self,
        vma: &Vma,
        page: VirtAddr,
        flags: MappingFlags,
    ) -> Option<Resolved> {
        self.touch_small(vma, page, flags)
    }

    /// The sizes of folios, one bit for each order, that would fit around `page`: into the VMA,
    /// into one table, and where the entries seem to be empty. What an entry holds that is not
    /// empty is returned instead. Looks without locks, so a caller that acts on it looks again.
    pub(in crate::space) fn vacant_orders(
        &self,
        vma: &Vma,
        page: VirtAddr,
        access: Access,
    ) -> Result<Orders, Occupant<P::Arch>> {
        let mut counts = Counts::default();
        let section = ReadSection::enter(self.platform());
        let seen = self.page_table.peek(&section, page, &mut counts);
        self.page_table.stats.add(&counts);
        let EntryAt { node, entry, .. } = seen;
        if !entry.is_empty() {
            return self.occupied(&section, seen, page);
        }
        let wanted = match access {
            Access::Write => {
                let policy = self.page_table.memory.folio_policy();
                self.used_orders(policy.orders(vma.flags().huge_advice()), vma.flags())
                    | Orders::PAGE
            }
            // Any zero page is a small one there.
            Access::Read | Access::Execute if node.level == Level::PTE => return Ok(Orders::PAGE),
            Access::Read | Access::Execute => self.zero_orders(vma.flags()),
        };
        let huge = P::Arch::PMD.order();
        let fits = |order: Order| {
            let range = folio_place(page, order).filter(|range| vma.range().covers(*range));
            let Some(range) = range.filter(|_| order <= huge) else { return false };
            let first = P::Arch::PTE.index_of(range.start());
            let slots = self.page_table.slots(node.table);
            // Above level 1, the empty entry covers all of the range.
            node.level > Level::PTE
                || order < huge
                    && run::count_empty(&slots[first.slots(order.pages())]) == order.pages()
        };
        let orders = Order::PAGE.up_to(MAX_FOLIO_ORDER).filter(|order| wanted.contains(*order));
        let fitting = orders.filter(|order| fits(*order)).map(Orders::of);
        Ok(fitting.fold(Orders::default(), |set, order| set | order))
    }

    /// What [`AddressSpace::vacant_orders`] says of an entry that is not empty.
    // Returns all of the result: the caller passes on where it is to be written.
    #[inline(never)]
    fn occupied(
        &self,
        section: &ReadSection<'_, P>,
        seen: EntryAt<P::Arch>,
        page: VirtAddr,
    ) -> Result<Orders, Occupant<P::Arch>> {
        let EntryAt { node, entry, .. } = seen;
        if entry.0 & P::Arch::PRESENT == 0
            && P::Arch::is_swap(entry)
            && let Some(slot) = self.slot_of(section, seen, page)
        {
            return Err(Occupant::Slot(slot));
        }
        Err(Occupant::Entry(entry, node.level))
    }

    /// The entry of `page` was empty when it was read; `orders` would fit.
    pub(super) fn first_touch(
        &self,
        vma: &Vma,
        page: VirtAddr,
        access: Access,
        mut orders: Orders,
        tries: Tries,
    ) -> Result<Step, Failure<FaultError>> {
        if access != Access::Write {
            let huge = if orders.has_large() { self.map_huge_zero_page(vma, page) } else { None };
            return huge.map_or_else(|| self.map_zero_page(vma, page), Ok);
        }
        if orders.is_empty() {
            return Ok(Step::Again);
        }
        let mut asked = tries == Tries::Last;
        while let Some(order) = orders.take_largest() {
            let Some(range) = folio_place(page, order) else { continue };
            self.page_table.memory.may_wait();
            let Some(folio) = self.own_folio(vma, range.start(), order) else {
                if order > Order::PAGE && !asked {
                    asked = true;
                    if let Some(step) = self.without_block(vma) {
                        return Ok(step);
                    }
                }
                continue;
            };
            self.platform().zero(folio.head, folio.pages());
            let zeroed = Counts { bytes_zeroed: range.len(), ..Counts::default() };
            self.page_table.stats.add(&zeroed);
            let step = self.map_folio(range, folio, written_attributes(vma.flags()));
            if !matches!(step, Ok(Step::Done(_))) {
                self.page_table.memory.frames.fresh(folio).discard(self.platform());
            }
            if matches!(step, Err(Failure::NoMemory)) && order > Order::PAGE {
                // A smaller one needs no table on deposit.
                continue;
            }
            return step;
        }
        Err(Failure::NoMemory)
    }

    /// What a fault does that has found no block for a large folio: `None` if it makes do without.
    pub(super) fn without_block(&self, vma: &Vma) -> Option<Step> {
        match self.page_table.memory.collecting(vma.flags().huge_advice()) {
            Collecting::Now => return Some(Step::Collect),
            Collecting::Later => self.platform().collect_memory_later(),
            Collecting::Never => {}
        }
        None
    }

    pub(in crate::space) fn map_folio(
        &self,
        range: VirtRange,
        folio: Folio,
        attributes: Attributes,
    ) -> Result<Step, Failure<FaultError>> {
        let huge = folio.order == P::Arch::PMD.order() && folio.order > Order::PAGE;
        let level = if huge { Level::PMD } else { Level::PTE };
        self.page_table.memory.before_execution(attributes.permissions, folio);
        let mapped = self.page_table.with_tables(|pool| {
            let mut cursor = self.page_table.cursor(range, Depth::Floor(Level::PTE));
            map_folio_locked(&mut cursor, range, folio, attributes, level, pool)
        });
        self.published(range);
        Ok(mapped?)
    }
}

/// The largest folio that is zeroed inside a read section, where nobody else runs on the CPU: 64
/// KiB, a few microseconds.
const ZEROED_IN_SECTION: Order = Order(4);

/// What a leaf says whose page is about to be written.
pub(in crate::space) fn written_attributes(flags: MappingFlags) -> Attributes {
    Attributes { accessed: true, dirty: true, soft_dirty: true, ..flags.attributes() }
}

/// Where a folio of 2^`order` pages around `page` would be mapped.
#[inline]
pub(in crate::space) fn folio_place(page: VirtAddr, order: Order) -> Option<VirtRange> {
    let size = PAGE_SIZE << order.0;
    VirtRange::from_len(page.align_down(size), size)
}

fn map_folio_locked<'m, P: Platform>(
    cursor: &mut Cursor<'_, 'm, P>,
    range: VirtRange,
    folio: Folio,
    attributes: Attributes,
    level: Level<P::Arch>,
    pool: &mut TablePool<'m, P>,
) -> Result<Step, NoMemory> {
    let page_table = cursor.page_table;
    let EntryAt { node, entry, .. } = cursor.entry_at(range.start());
    if node.level < level || !entry.is_empty() {
        // A table or a page has come between: the folio does not fit any more.
        return Ok(Step::Again);
    }
    let table = cursor.table_at(range.start(), level, pool)?;
    let index = level.index_of(range.start());
    let count = if level == Level::PTE { folio.pages() } else { 1 };
    let vacant = run::count_empty(&page_table.slots(table)[index.slots(count)]);
    cursor.counts.entries_read += u64::from(vacant);
    if vacant != count {
        return Ok(Step::Again);
    }
    // A later split of a huge leaf must not fail.
    let deposit =
        if level > Level::PTE { Some(pool.take(Level::PTE, &mut cursor.counts)?) } else { None };
    let entry = P::Arch::page_entry(folio.head, level, attributes);
    page_table.memory.frames.fresh(folio).map(folio.pages());
    cursor.counts.folios_touched += 1;
    cursor.counts.mapped(OwnerKind::Anonymous, folio.pages());
    if level == Level::PTE {
        page_table.fill(table, index, entry, count, &mut cursor.counts);
    } else {
        let slot = &page_table.slots(table)[index.slot()];
        slot.store(entry.0, Ordering::Release);
        cursor.counts.entries_written += 1;
        RareEvents::note(&page_table.memory.rare.huge_faults);
        page_table.change_entry_count(table, 1, 0);
        if let Some(deposit) = deposit {
            page_table.deposit_table(table, deposit);
        }
    }
    Ok(Step::Done(Resolved::New(range)))
}

const _: () = assert!(MAX_FOLIO_ORDER.0 < u16::BITS as u8, "orders fit into a bit set");
