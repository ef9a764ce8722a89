//! `MADV_COLD` and `MADV_FREE`: the pages of a range forget that they were used, or written.
//!
//! The call names pages, and both kinds of advice concern folios. As on Linux:
//!
//! | the range has of a folio | what happens |
//! |---|---|
//! | everything that is mapped of it | all of it forgets |
//! | a part, and nobody else maps or holds it | it is split, and the pages inside forget |
//! | a part of what others map or hold, too | nothing |

use crate::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Kind, Level};
use crate::folio::{Age, Folio};
use crate::frame::Frames;
use crate::platform::Platform;
use crate::space::folio::split_if_alone;
use crate::table::NoMemory;
use crate::table::PageTable;
use crate::table::rewrite::use_bits::UseBits;
use crate::vma::Vma;

use crate::space::fault::folio_range;
use crate::space::op::Op;

/// A large folio of private memory, and where entries map it.
struct Seen {
    folio: Folio,
    /// The number of the first page that is mapped there.
    number: u32,
    /// From that page to the last, with holes.
    range: VirtRange,
    /// How many are mapped there.
    pages: u32,
}

/// Lets the folios of a part of a VMA forget.
pub(in crate::space) fn forget_contents<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
    forget: UseBits,
) -> Result<(), NoMemory> {
    let part = without_shared_huge_edges(op.edit.table(), part);
    let locked = vma.lock_write(op.platform());
    let done = forget_folios(op, &locked, part, forget);
    op.edit.flush();
    drop(locked);
    done
}

fn forget_folios<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
    forget: UseBits,
) -> Result<(), NoMemory> {
    let (mut cut, frames) = (false, &op.memory().frames);
    op.edit.clear_use(part, forget, |folio, pages| {
        let Some(folio) = folio else { return true };
        let concerned = forget_folio(frames, folio, pages, forget);
        cut |= !concerned && folio.order > Order::PAGE;
        concerned
    })?;
    if cut { forget_cut_folios(op, vma, part, forget) } else { Ok(()) }
}

/// As [`forget_folios`], of large folios whose pages are not one run.
#[cold]
#[inline(never)]
fn forget_cut_folios<P: Platform>(
    op: &mut Op<'_, '_, P>,
    vma: &Vma,
    part: VirtRange,
    forget: UseBits,
) -> Result<(), NoMemory> {
    let (mut at, frames) = (part.start(), &op.memory().frames);
    while let Some(seen) = first_large_folio(op.edit.table(), VirtRange::raw(at.0, part.end().0)) {
        let Seen { folio, number, range, pages } = seen;
        at = range.end();
        let unbroken = range.pages() == u64::from(pages);
        let whole = unbroken && frames.folio(folio).mappings() == pages;
        if !whole && !split_if_alone(op.edit.table(), range.start()) {
            continue;
        }
        // Some of the pages may lie behind those of another folio.
        let all = folio_range(vma, range.start(), number, folio).intersection(part);
        op.edit.clear_use(all, forget, |found, run| {
            found.is_some_and(|found| {
                let pages = if whole && found == folio { pages } else { run };
                forget_folio(frames, found, pages, forget)
            })
        })?;
    }
    Ok(())
}

/// Lets a folio forget if these `pages` are all that is mapped of it. Says whether they are.
fn forget_folio<P: Platform>(
    frames: &Frames<P>,
    folio: Folio,
    pages: u32,
    forget: UseBits,
) -> bool {
    let frames = &frames;
    let whole = frames.folio(folio).mappings() == pages;
    match forget {
        // A pin may write at any moment.
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

/// The huge leaf that maps `page`, unless an anonymous folio is mapped and held there alone.
fn shared_huge_leaf<P: Platform>(
    page_table: &PageTable<'_, P>,
    page: VirtAddr,
) -> Option<VirtRange> {
    let frames = &page_table.memory.frames;
    let mut found = None;
    page_table.look(VirtRange::raw(page.0, page.0 + PAGE_SIZE), |looked| {
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

/// The range without the huge leaves that it covers in part and that stay whole, since others
/// map or hold their folio.
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

/// The first large folio of private memory that the range has, up to the first page of another
/// folio.
fn first_large_folio<P: Platform>(page_table: &PageTable<'_, P>, range: VirtRange) -> Option<Seen> {
    let frames = &page_table.memory.frames;
    let mut seen: Option<Seen> = None;
    page_table.look(range, |looked| {
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
                seen = Some(Seen { folio, number, range: looked.range, pages });
                true
            }
            (None, None) => true,
        }
    });
    seen
}
