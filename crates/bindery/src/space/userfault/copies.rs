//! Base pages that a handler supplies: copied one after the other, and mapped together.
//!
//! ```text
//! no locks     | copy | copy | copy | .....  into fresh folios
//! one lock     | the entries of all of them, as far as they are empty |
//! ```

use core::sync::atomic::{Ordering, fence};

use crate::addr::{Frame, Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Error, FaultError};
use crate::folio::{FreshFolio, FreshPages, OwnerKind};
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::op::VmaOp;
use crate::table::fill_span::FillSpan;
use crate::table::publish::publish;
use crate::table::{NoMemory, run};
use crate::vma::MappingAttributes;

use super::fill::Fill;

/// Pages that are copied before the first of them is mapped: 128 KiB, some ten microseconds.
const TOGETHER: usize = 32;

impl<P: Platform> VmaOp<'_, '_, P> {
    /// How many base pages may be supplied together, of those between `at` and `end`: as far as the
    /// entries of one table are empty, and before the next place where a large folio could begin.
    /// A guess: nothing is locked but the VMA.
    pub(super) fn pages_together(&self, at: VirtAddr, end: VirtAddr) -> u32 {
        let (space, flags) = (self.space, self.vma.flags());
        let policy = space.page_table.memory.folio_policy().orders(flags.huge_advice());
        let mut larger = space.settings.used_orders(policy, flags);
        let mut step = P::Arch::PMD.order();
        while let Some(order) = larger.take_largest() {
            step = if order > Order::PAGE { order.min(step) } else { step };
        }
        let bytes = PAGE_SIZE << step.0;
        let end = end.0.min(at.align_down(bytes).0.saturating_add(bytes));
        let pages = ((end - at.0) / PAGE_SIZE).min(TOGETHER as u64) as u32;
        let section = space.page_table.read_section();
        let Some(found) = space.page_table.leaf_table(&section, at) else { return pages };
        let first = P::Arch::PTE.index_of(at);
        run::count_empty(&space.page_table.entries(found.table)[first.positions(pages)])
    }

    /// Maps fresh folios of one page at the beginning of `range`, which lies in one table, as far
    /// as the entries are empty. Returns their number.
    fn map_pages(
        &self,
        range: VirtRange,
        folios: &mut FreshPages<'_, P, TOGETHER>,
        attributes: MappingAttributes,
    ) -> Result<usize, NoMemory> {
        let memory = self.memory();
        for page in folios.left() {
            before_execution(memory, attributes.permissions(), page.folio());
        }
        let mapped = self
            .page_table()
            .with_tables(range, |span| map_pages_locked(span, range, folios, attributes));
        publish(self.page_table(), range);
        mapped
    }
}

impl<'m, P: Platform> Fill<'_, 'm, P> {
    /// Fills `count` base pages from `at` on, as far as the source and memory suffice, and maps
    /// them as far as the entries are empty. Returns the end of that.
    ///
    /// # Errors
    /// As [`super::handler::UserfaultHandler::fill_copy`], of the first page.
    pub(super) fn copy_pages(
        &self,
        at: VirtAddr,
        count: u32,
        mut source: impl FnMut(VirtAddr, &mut [u8]) -> Result<(), FaultError>,
    ) -> Result<VirtAddr, Error> {
        let memory = self.space.page_table.memory;
        let mut folios = FreshPages::<_, TOGETHER>::new(&memory.frames);
        let mut failed = None;
        for number in 0..(count as usize).min(TOGETHER) {
            let page = at.offset(number as u64 * PAGE_SIZE);
            match self.copied_page(page, &mut source) {
                Ok(folio) => {
                    debug_assert_eq!(folio.order, Order::PAGE, "asked for");
                    folios.push(folio);
                }
                Err(error) => {
                    // Of a later page, the next call says the same again, or knows better.
                    failed = Some(error);
                    break;
                }
            }
        }
        if let (Some(error), true) = (failed, folios.len() == 0) {
            return Err(error);
        }
        self.count_copied(folios.len() as u32);
        let range = VirtRange::raw(at.0, at.0 + folios.len() as u64 * PAGE_SIZE);
        let mapped: Result<_, Error> = memory.retry(|| {
            self.in_vma(at, range.end(), |op| {
                let owner = AnonGroup::as_owner(op.vma.group());
                folios.set_owner(owner, op.vma.page_offset_of(at));
                Ok(op.map_pages(range, &mut folios, op.fill_attributes(self.mode))?)
            })
        });
        folios.discard();
        match mapped? {
            // An entry was filled in between: the next look decides.
            0 => Ok(at),
            pages => Ok(at.offset(pages as u64 * PAGE_SIZE)),
        }
    }

    /// A fresh page with the source's content for `page`.
    fn copied_page(
        &self,
        page: VirtAddr,
        source: &mut impl FnMut(VirtAddr, &mut [u8]) -> Result<(), FaultError>,
    ) -> Result<FreshFolio<'m, P>, Error> {
        let folio = self.new_folio(Order::PAGE)?;
        let filled = self.copy_in(&folio, |_, bytes| source(page, bytes));
        if filled.is_err() {
            folio.discard();
            return Err(Error::Fault(page));
        }
        Ok(folio)
    }
}

fn map_pages_locked<P: Platform>(
    mut span: FillSpan<'_, '_, '_, P>,
    range: VirtRange,
    folios: &mut FreshPages<'_, P, TOGETHER>,
    attributes: MappingAttributes,
) -> Result<usize, NoMemory> {
    let page_table = span.page_table;
    let start = range.start();
    let found = span.entry_at(start);
    if found.node.level > Level::PTE && !found.entry.is_empty() {
        return Ok(0);
    }
    let table = span.table_at(start, Level::PTE)?;
    let first = P::Arch::PTE.index_of(start);
    let entries = &page_table.entries(table)[first.positions(folios.left().len() as u32)];
    let vacant = run::count_empty(entries);
    let mapped = folios.map(vacant as usize);
    // A CPU that sees a leaf sees the page's contents, and its count.
    fence(Ordering::Release);
    let template = attributes.entry(Frame(0), Level::<P::Arch>::PTE);
    for (word, page) in entries.iter().zip(mapped) {
        let entry = P::Arch::nth_page(template, page.folio().head.0);
        word.store(entry.0, Ordering::Relaxed);
    }
    page_table.change_entry_count(table, vacant, 0);
    span.counts.entries_read += u64::from(vacant);
    span.counts.entries_written += u64::from(vacant);
    span.counts.folios_touched += u64::from(vacant);
    span.counts.mapped(OwnerKind::Anonymous, vacant);
    Ok(vacant as usize)
}
