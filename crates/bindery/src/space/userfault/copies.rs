//! Base pages that a handler supplies: copied one after the other and mapped together.
//!
//! ```text
//! no locks     | copy | copy | copy | .....  into fresh folios
//! one lock     | the entries of all of them, as far as they are empty |
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{Ordering, fence};

use arrayvec::ArrayVec;

use crate::addr::{Frame, Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{Error, FaultError};
use crate::folio::{FolioIndex, FreshFolio, OnePage, OwnerKind};
use crate::memory::before_execution;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::space::op::VmaOp;
use crate::table::fill_span::FillSpan;
use crate::table::publish::publish;
use crate::table::{NoMemory, run};
use crate::vma::MappingAttributes;

use super::fill::Fill;

/// The number of pages that are copied before the first of them is mapped: 128 KiB, some ten
/// microseconds.
const TOGETHER: usize = 32;

impl<P: Platform> VmaOp<'_, '_, P> {
    /// The number of base pages between `at` and `end` that can be supplied together: up to the
    /// first non-empty entry, the end of the table, or the next address at which a large folio
    /// could start. The result is a guess, since only the VMA is locked.
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

    /// Maps fresh folios of one page at the start of `range`, which lies in one table, up to the
    /// first non-empty entry. Returns the number of mapped folios.
    ///
    /// # Safety
    /// 1. The caller has left the folios ([`FreshFolio::leave`]). It treats the first ones, up to
    ///    the returned number, as mapped.
    unsafe fn map_pages(
        &self,
        range: VirtRange,
        folios: &[OnePage],
        attributes: MappingAttributes,
    ) -> Result<usize, NoMemory> {
        let memory = self.memory();
        for page in folios {
            before_execution(memory, attributes.permissions(), page.folio());
        }
        let mapped = self
            .page_table()
            // SAFETY: 1. the caller's obligation 1: a step that maps any folio is the last.
            .with_tables(range, |span| unsafe {
                map_pages_locked(span, range, folios, attributes)
            });
        publish(self.page_table(), range);
        mapped
    }
}

impl<'m, P: Platform> Fill<'_, 'm, P> {
    /// Fills `count` base pages from `at` on, while the source and memory suffice, and maps them up
    /// to the first non-empty entry. Returns the end of the mapped pages.
    ///
    /// # Errors
    /// As [`super::handler::UserfaultHandler::fill_copy`], if the first page fails.
    pub(super) fn copy_pages(
        &self,
        at: VirtAddr,
        count: u32,
        mut source: impl FnMut(VirtAddr, &mut [u8]) -> Result<(), FaultError>,
    ) -> Result<VirtAddr, Error> {
        let mut folios = ArrayVec::<OnePage, TOGETHER>::new();
        let mut failed = None;
        for number in 0..(count as usize).min(TOGETHER) {
            let page = at.offset(number as u64 * PAGE_SIZE);
            match self.copied_page(page, &mut source) {
                Ok(folio) => {
                    debug_assert_eq!(folio.order, Order::PAGE, "asked for");
                    folios.extend(OnePage::of(folio.leave()));
                }
                Err(error) => {
                    // For a later page, the next call reports the same again, or has newer
                    // information.
                    failed = Some(error);
                    break;
                }
            }
        }
        if let (Some(error), true) = (failed, folios.is_empty()) {
            return Err(error);
        }
        self.count_copied(folios.len() as u32);
        let range = VirtRange::raw(at.0, at.0 + folios.len() as u64 * PAGE_SIZE);
        let memory = self.space.page_table.memory;
        let mapped: Result<_, Error> = memory.retry(|| {
            self.in_vma(at, range.end(), |op| {
                let owner = AnonGroup::as_owner(op.vma.group());
                for (page, index) in folios.iter().zip(op.vma.page_offset_of(at)..) {
                    // SAFETY: 1. the folio was left above and is not mapped yet; only the owner is
                    // set.
                    let fresh = unsafe { memory.frames.fresh(page.folio()) };
                    fresh.set_owner(owner, FolioIndex::new(index));
                    fresh.leave();
                }
                op.before_end(at, range.end(), |end| {
                    let mut folios = &folios[..];
                    if end < range.end() {
                        folios = &folios[..VirtRange::raw(at.0, end.0).pages() as usize];
                    }
                    let range = VirtRange::raw(at.0, end.0);
                    // SAFETY: 1. the attempt that maps some folios is the last, and the other
                    // folios are discarded.
                    Ok(unsafe { op.map_pages(range, folios, op.fill_attributes(self.mode)) }?)
                })
            })
        });
        for page in folios.iter().skip(*mapped.as_ref().unwrap_or(&0)) {
            // SAFETY: 1. the folio was left above; the folios before it are mapped, and this one is
            // not.
            unsafe { memory.frames.fresh(page.folio()) }.discard();
        }
        match mapped? {
            // An entry has since been filled: the next check decides.
            0 => Ok(at),
            pages => Ok(at.offset(pages as u64 * PAGE_SIZE)),
        }
    }

    /// A fresh page with the source's content for `page`.
    // Always inlined: a call would return the page in memory, once per page.
    #[inline(always)]
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

/// # Safety
/// 1. As `VmaOp::map_pages`.
unsafe fn map_pages_locked<P: Platform>(
    mut span: FillSpan<'_, '_, '_, P>,
    range: VirtRange,
    folios: &[OnePage],
    attributes: MappingAttributes,
) -> Result<usize, NoMemory> {
    let page_table = span.page_table;
    let frames = &page_table.memory.frames;
    let start = range.start();
    let found = span.entry_at(start);
    if found.node.level > Level::PTE && !found.entry.is_empty() {
        return Ok(0);
    }
    let table = span.table_at(start, Level::PTE)?;
    let first = P::Arch::PTE.index_of(start);
    let entries = &page_table.entries(table)[first.positions(folios.len() as u32)];
    let vacant = run::count_empty(entries);
    for page in &folios[..vacant as usize] {
        // SAFETY: 1. the caller's obligation 1.
        unsafe { frames.fresh(page.folio()) }.map(1);
    }
    // A CPU that sees a leaf also sees the page's contents and its count.
    fence(Ordering::Release);
    let template = attributes.entry(Frame(0), Level::<P::Arch>::PTE);
    for (word, page) in entries.iter().zip(&folios[..vacant as usize]) {
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
