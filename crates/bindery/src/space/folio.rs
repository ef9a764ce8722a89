//! Changes the size of mapped folios in place: splits a folio into smaller ones, or joins its
//! leaves into a huge leaf.

use crate::table::PageTable;
use crate::table::look;
use crate::table::split_folio::split_folio;
use core::fmt;
use core::sync::atomic::Ordering;

use crate::addr::{Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Kind, Level};
use crate::error::{CallError, Failure};
use crate::folio::Folio;
use crate::platform::Platform;
use crate::table::EntryAt;
use crate::table::collapse::JoinError;
use crate::table::locking::Depth;
use crate::table::split_folio::Uncut;

use super::AddressSpace;
use super::fault::folio_range;
use crate::vma::Vma;

/// The reason why a folio could not be split or leaves could not be joined. Nothing visible to a
/// program has changed.
///
/// ```
/// use bindery::addr::{Order, VirtAddr};
/// use bindery::{AddressSpace, FolioError, Platform};
///
/// /// Whether the folio consists of base pages afterwards.
/// fn split<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> bool {
///     // A single page cannot be split.
///     matches!(space.split_folio(at, Order(0)), Ok(()) | Err(FolioError::Unsuitable))
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FolioError {
    /// No folio is mapped there.
    NotMapped,
    /// The folio is not larger than the requested parts; or the entries to be joined do not map all
    /// pages of one folio in order, with equal attributes, or only some of the pages are exclusive
    /// since a `fork`.
    Unsuitable,
    /// Other mappings or holders of the folio exist.
    Busy,
    /// No memory for the table that a huge leaf must keep on deposit.
    OutOfMemory,
}

impl fmt::Display for FolioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "no folio is mapped at the address",
            Self::Unsuitable => "the folio cannot be cut so, or the entries cannot be joined",
            Self::Busy => "the folio is used elsewhere too",
            Self::OutOfMemory => "physical memory ran out",
        })
    }
}

impl core::error::Error for FolioError {}

impl<P: Platform> AddressSpace<'_, P> {
    /// Splits the folio mapped at `addr` into folios of 2^`order` pages and frees those that are no
    /// longer mapped. Contents, permissions, and the accessed and dirty bits are unchanged.
    ///
    /// Context: may sleep. Complexity: linear in the number of pages of the folio.
    ///
    /// # Errors
    /// [`FolioError::NotMapped`]; [`FolioError::Unsuitable`] if the folio is not larger than the
    /// requested parts; [`FolioError::Busy`] if it has other mappings or holders, or if another VMA
    /// maps a part of it.
    pub fn split_folio(&self, addr: VirtAddr, order: Order) -> Result<(), FolioError> {
        self.page_table.memory.retry(|| split_once(self, addr, order))
    }

    /// Replaces the leaves around `addr` by one huge leaf. The leaves must fill a level-1 table and
    /// map all pages, in order, of one folio of that size.
    ///
    /// Context: may sleep. Complexity: linear in the number of entries of one table. One
    /// invalidation.
    ///
    /// # Errors
    /// [`FolioError::NotMapped`] if no VMA covers the whole table's span;
    /// [`FolioError::Unsuitable`]; [`FolioError::OutOfMemory`].
    pub fn join_leaves(&self, addr: VirtAddr) -> Result<(), FolioError> {
        self.page_table.memory.outermost(|| join_leaves_locked(self, addr))
    }

    /// Whether the leaf at `page` is known to be dirty, from its entry or from its folio. Waits for
    /// operations in progress.
    ///
    /// Context: may sleep.
    pub fn is_dirty(&self, page: VirtAddr) -> bool {
        is_dirty(self, page)
    }
}

fn is_dirty<P: Platform>(space: &AddressSpace<'_, P>, page: VirtAddr) -> bool {
    if page >= space.limit() {
        return false;
    }
    let _guard = space.vmas.lock();
    let page = page.align_down(PAGE_SIZE);
    let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
    let section = space.page_table.read_section();
    let mut cursor = space.page_table.cursor(&section, range, Depth::Floor(Level::PTE));
    let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
    let frames = &space.page_table.memory.frames;
    let folio = cursor.folio_at(page);
    if folio.is_some_and(|(folio, _)| frames.folio(folio).is_dirty()) {
        return true;
    }
    match node.level.kind(raw) {
        Kind::Leaf => {
            let words = space.page_table.entries(node.table);
            let size = if node.in_contig(raw) { P::Arch::CONTIG_ENTRIES } else { 1 };
            words[index.align_down(size).positions(size)]
                .iter()
                .any(|word| P::Arch::attributes(Entry(word.load(Ordering::Relaxed))).dirty)
        }
        Kind::Absent => {
            matches!(P::Arch::decode_absent(raw), Some(Absent::ProtNone { dirty: true, .. }))
        }
        Kind::Empty | Kind::Table => false,
    }
}

fn split_once<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: VirtAddr,
    order: Order,
) -> Result<(), Failure<FolioError>> {
    let page = addr.align_down(PAGE_SIZE);
    let vmas = space.vmas.lock();
    let vma = vmas.view().at(page).ok_or(FolioError::NotMapped)?;
    split_locked(&space.page_table, &vma.lock_write(space.platform()), page, order)
}

fn join_leaves_locked<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: VirtAddr,
) -> Result<(), Failure<FolioError>> {
    let base = addr.align_down(P::Arch::PMD.span());
    let range = VirtRange::from_len(base, P::Arch::PMD.span());
    let vmas = space.vmas.lock();
    let vma = vmas.view().first_ending_after(base.0).ok_or(FolioError::NotMapped)?;
    if !range.is_some_and(|range| vma.range().covers(range)) {
        return Err(FolioError::NotMapped.into());
    }
    let locked = vma.lock_write(space.platform());
    let result = space.page_table.edit(|edit| edit.join_leaves(base));
    drop(locked);
    result.map_err(|error| match error {
        JoinError::NotUniform => FolioError::Unsuitable.into(),
        JoinError::NoMemory => Failure::NoMemory,
    })
}

/// Splits a folio whose pages are mapped in `range`, in order.
fn split_mapped<P: Platform>(
    page_table: &PageTable<'_, P>,
    folio: Folio,
    range: VirtRange,
    order: Order,
) -> Result<(), Failure<FolioError>> {
    let memory = page_table.memory;
    let mut held = None;
    let hold = || {
        held = memory.frames.folio(folio).keep();
        held.is_some()
    };
    let cut = split_folio(page_table, folio, range, order, hold);
    if let (Some(held), Ok(())) = (held, &cut) {
        held.release_parts(order);
    }
    cut.map_err(|uncut| match uncut {
        Uncut::NotMapped => FolioError::NotMapped.into(),
        Uncut::Busy => FolioError::Busy.into(),
        Uncut::NoMemory => Failure::NoMemory,
    })
}

/// Splits the folio mapped at `page` into single pages, if the folio has no other reference and no
/// other address space maps it. Returns whether the folio was split; otherwise nothing has changed.
/// The caller holds the mutex, since VMAs beside that of `page` may map pages of the folio.
#[inline(never)]
pub(super) fn split_if_alone<P: Platform>(page_table: &PageTable<'_, P>, page: VirtAddr) -> bool {
    let frames = &page_table.memory.frames;
    let mut at_page = None;
    look::look(page_table, VirtRange::raw(page.0, page.0 + PAGE_SIZE), |looked| {
        at_page = looked.frame();
        false
    });
    let folio = at_page.and_then(|frame| Some((frame, frames.folio_of(frame)?)));
    let Some((frame, folio)) = folio else { return false };
    let start = page.0.saturating_sub(u64::from(frame.0 - folio.head.0) << PAGE_SHIFT);
    let end = start.saturating_add(u64::from(folio.pages()) << PAGE_SHIFT);
    let range = VirtRange::raw(start, end.min(P::Arch::USER_END));
    // The mappings are counted before any change: if other address spaces also map the folio, its
    // leaves stay unchanged.
    let mut pages = 0;
    look::look(page_table, range, |looked| {
        let frame = looked.frame().map_or(u32::MAX, |frame| frame.0);
        if frame.wrapping_sub(folio.head.0) < folio.pages() {
            pages += looked.range.pages() as u32;
        }
        true
    });
    folio.order > Order::PAGE
        && frames.folio(folio).is_mapped_and_held(pages, 0)
        && split_mapped(page_table, folio, range, Order::PAGE).is_ok()
}

/// As [`AddressSpace::split_folio`], in a VMA that the caller protects from changes.
pub(super) fn split_locked<P: Platform>(
    page_table: &PageTable<'_, P>,
    vma: &Vma,
    page: VirtAddr,
    order: Order,
) -> Result<(), Failure<FolioError>> {
    let (folio, number) = {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let section = page_table.read_section();
        let mut cursor = page_table.cursor(&section, range, Depth::Floor(Level::PTE));
        cursor.folio_at(page).ok_or(FolioError::NotMapped)?
    };
    if order >= folio.order {
        return Err(FolioError::Unsuitable.into());
    }
    split_mapped(page_table, folio, folio_range(vma, page, number, folio), order)
}

impl CallError for FolioError {
    const OUT_OF_MEMORY: Self = Self::OutOfMemory;
}
