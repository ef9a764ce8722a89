//! `MADV_COLD` and `MADV_FREE`: clear the accessed bits, and for `MADV_FREE` also the dirty bits,
//! of a range's pages.
//!
//! The caller passes a range of pages, but both kinds of advice apply to whole folios, as on Linux:
//!
//! | the range covers | effect on the folio |
//! |---|---|
//! | all mapped pages of the folio | the whole folio's bits are cleared |
//! | a part of a folio without other mappings or references | split; the range's bits are cleared |
//! | a part of a folio with other mappings or references | none |

use crate::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Kind, Level};
use crate::folio::{Age, Folio, mark_single_lazy};
use crate::frame::Frames;
use crate::platform::Platform;
use crate::space::folio::split_if_alone;
use crate::table::NoMemory;
use crate::table::PageTable;
use crate::table::look;
use crate::table::rewrite::use_bits::UseBits;
use crate::vma::Vma;

use crate::space::fault::folio_range;
use crate::space::op::Op;

/// A large folio of private memory, and the entries that map it.
struct LargeFolio {
    folio: Folio,
    /// The number of the first mapped page within the folio.
    number: u32,
    /// The addresses from the first mapped page to the last, holes included.
    range: VirtRange,
    /// The number of mapped pages in `range`.
    pages: u32,
}

/// Clears the use bits of the folios that a part of a VMA maps.
pub(in crate::space) fn cold_or_free<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
    bits: UseBits,
) -> Result<(), NoMemory> {
    let part = without_shared_huge_edges(op.edit.table(), part);
    let locked = vma.lock_write(op.platform());
    let done = clear_use_of_folios(op, &locked, part, bits);
    op.edit.flush();
    drop(locked);
    done
}

fn clear_use_of_folios<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
    bits: UseBits,
) -> Result<(), NoMemory> {
    let (mut cut, frames) = (false, &op.memory().frames);
    let frees = bits == UseBits::AccessedAndDirty;
    let single = |frame| frees && mark_single_lazy(frames, frame);
    op.edit.clear_use_quickly(part, bits, single, |folio, pages| {
        let Some(folio) = folio else { return true };
        let concerned = clear_use_of_folio(frames, folio, pages, bits);
        cut |= !concerned && folio.order > Order::PAGE;
        concerned
    })?;
    if cut { clear_use_of_cut_folios(op, vma, part, bits) } else { Ok(()) }
}

/// As [`clear_use_of_folios`], for large folios whose pages do not form one run.
#[cold]
#[inline(never)]
fn clear_use_of_cut_folios<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
    bits: UseBits,
) -> Result<(), NoMemory> {
    let (mut at, frames) = (part.start(), &op.memory().frames);
    while let Some(seen) = first_large_folio(op.edit.table(), VirtRange::raw(at.0, part.end().0)) {
        let LargeFolio { folio, number, range, pages } = seen;
        at = range.end();
        let unbroken = range.pages() == u64::from(pages);
        let whole = unbroken && frames.folio(folio).mappings() == pages;
        if !whole && !split_if_alone(op.edit.table(), range.start()) {
            continue;
        }
        // Pages of another folio may lie between pages of this one.
        let all = folio_range(vma, range.start(), number, folio).intersection(part);
        op.edit.clear_use(all, bits, |found, run| {
            found.is_some_and(|found| {
                let pages = if whole && found == folio { pages } else { run };
                clear_use_of_folio(frames, found, pages, bits)
            })
        })?;
    }
    Ok(())
}

/// Marks a folio as cold or lazy if these `pages` are all its mappings. Returns whether they are.
fn clear_use_of_folio<P: Platform>(
    frames: &Frames<P>,
    folio: Folio,
    pages: u32,
    bits: UseBits,
) -> bool {
    let frames = &frames;
    let whole = frames.folio(folio).mappings() == pages;
    match bits {
        // The holder of a pin may write at any time.
        UseBits::AccessedAndDirty if whole && frames.folio(folio).pins() == 0 => {
            frames.folio(folio).mark_lazy()
        }
        UseBits::Accessed if whole || !frames.folio(folio).is_anonymous() => {
            frames.folio(folio).reclaim_state().set_age(Age::Cold)
        }
        UseBits::Accessed | UseBits::AccessedAndDirty | UseBits::SoftDirty | UseBits::Dirty => {
            return false;
        }
    }
    true
}

/// The huge leaf that maps `page`, unless that leaf is the only user of an anonymous folio.
fn shared_huge_leaf<P: Platform>(
    page_table: &PageTable<'_, P>,
    page: VirtAddr,
) -> Option<VirtRange> {
    let frames = &page_table.memory.frames;
    let mut found = None;
    look::look(page_table, VirtRange::raw(page.0, page.0 + PAGE_SIZE), |looked| {
        let level = looked.node.level;
        if level > Level::PTE && level.kind(looked.raw) == Kind::Leaf {
            let folio = frames.folio_of(P::Arch::frame(looked.entry));
            let alone = |folio: Folio| {
                frames.folio(folio).is_anonymous()
                    && frames.folio(folio).is_mapped_and_held(folio.pages(), 0)
            };
            let start = page.align_down(level.span());
            let leaf = VirtRange::from_len(start, level.span());
            found = leaf.filter(|_| !folio.is_some_and(alone));
        }
        false
    });
    found
}

/// Shrinks the range by the huge leaves that it covers partly and whose folio has other mappings or
/// references: such a leaf is not split.
pub(in crate::space) fn without_shared_huge_edges<P: Platform>(
    page_table: &PageTable<'_, P>,
    part: VirtRange,
) -> VirtRange {
    let (mut start, mut end) = (part.start(), part.end());
    let span = P::Arch::PMD.span();
    if !start.is_aligned(span)
        && let Some(leaf) = shared_huge_leaf(page_table, start)
    {
        start = leaf.end().min(end);
    }
    if start < end
        && !end.is_aligned(span)
        && let Some(leaf) = shared_huge_leaf(page_table, VirtAddr(end.0 - PAGE_SIZE))
    {
        end = leaf.start().max(start);
    }
    VirtRange::raw(start.0, end.0)
}

/// The first large folio of private memory in the range. The scan stops at the first page of
/// another folio.
fn first_large_folio<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
) -> Option<LargeFolio> {
    let frames = &page_table.memory.frames;
    let mut seen: Option<LargeFolio> = None;
    look::look(page_table, range, |looked| {
        let frame = looked.frame();
        let folio = frame
            .and_then(|frame| frames.folio_of(frame))
            .filter(|folio| folio.order > Order::PAGE && frames.folio(*folio).is_anonymous());
        let pages = looked.range.pages() as u32;
        match (&mut seen, frame.zip(folio)) {
            (Some(seen), Some((_, folio))) if seen.folio == folio => {
                seen.range = VirtRange::raw(seen.range.start().0, looked.range.end().0);
                seen.pages += pages;
                true
            }
            (Some(_), _) => looked.raw.is_empty(),
            (None, Some((frame, folio))) => {
                let number = frame.0 - folio.head.0;
                seen = Some(LargeFolio { folio, number, range: looked.range, pages });
                true
            }
            (None, None) => true,
        }
    });
    seen
}
