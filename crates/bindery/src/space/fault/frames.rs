//! Faults on mappings of frames outside the core's memory ([`crate::FrameSource`]).

use crate::addr::{Frame, PAGE_SHIFT, VirtRange};
use crate::arch::{Arch, Entry, Level, Permissions};
use crate::error::{Failure, FaultError};
use crate::frame::FrameRange;
use crate::memory::{self, may_show};
use crate::object::{FramePiece, ShownFrames};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::table::deposit::LargeDeposit;
use crate::table::fill_span::FillSpan;
use crate::table::publish::publish;
use crate::table::{EntryAt, NoMemory, Table, TableEntry, run};
use crate::vma::MappingAttributes;

use super::slow::{Fault, Next, Stepped};
use super::{Access, Resolved};

/// The frames to be mapped. The first belongs at the start of `range`.
#[derive(Clone, Copy)]
struct Shown<A> {
    range: VirtRange,
    first: Frame,
    /// The level-1 leaf of frame 0; the leaf of any other frame takes one multiplication.
    template: Entry,
    attributes: MappingAttributes,
    /// The level of the leaves.
    level: Level<A>,
}

impl<A: Arch> Shown<A> {
    /// The frames.
    fn frames(&self) -> FrameRange {
        FrameRange { first: self.first, count: self.range.pages() as u32 }
    }

    /// Whether programs may map all of the frames.
    fn is_allowed<P: Platform<Arch = A>>(&self, fault: &Fault<'_, '_, P>) -> bool {
        may_show(fault.memory(), self.frames())
    }
}

/// Maps the frames around the page: one leaf above level 2, or else within the span of one level-2
/// entry. Leaves are created with accessed and dirty set, so the MMU never changes them.
#[cold]
pub(super) fn map_shown<P: Platform>(
    fault: &Fault<'_, '_, P>,
    frames: ShownFrames<'_>,
    pages: u64,
) -> Stepped {
    let index = fault.vma.page_offset_of(fault.page);
    let piece = frames.piece(index, pages).ok_or(FaultError::Bus)?;
    let large = shown(fault, &frames, &piece, fault.memory().largest_shown_leaf());
    let is_possible = |shown: &Shown<P::Arch>| {
        shown.level > Level::PMD && is_vacant(fault, shown.level) && shown.is_allowed(fault)
    };
    let mapped = match large.filter(is_possible) {
        Some(large) => map_large(fault, &large)?,
        None => None,
    };
    let mapped = match mapped {
        Some(mapped) => mapped,
        None => map_small(fault, &frames, &piece)?,
    };
    if fault.access == Access::Write && !fault.vma.is_shared() {
        // The leaf is read-only, so the write then copies its page.
        return Ok(Next::Again);
    }
    Ok(mapped)
}

/// Maps the frames that one level-2 entry can cover, or only that of the page.
fn map_small<P: Platform>(
    fault: &Fault<'_, '_, P>,
    frames: &ShownFrames<'_>,
    piece: &FramePiece,
) -> Stepped {
    // A frame that may not be shown affects no other page.
    let mut parts = [Level::PMD, Level::PTE].into_iter();
    let shown = parts
        .find_map(|level| shown(fault, frames, piece, level).filter(|part| part.is_allowed(fault)))
        .ok_or(FaultError::Bus)?;
    let range = shown.range;
    let mapped = fault.page_table().with_tables(range, |span| fill_shown(fault, span, &shown))?;
    publish(fault.page_table(), range);
    Ok(mapped)
}

/// The part of the piece around the page of the fault that one entry of `level` covers, as far as
/// the mapping does.
fn shown<P: Platform>(
    fault: &Fault<'_, '_, P>,
    frames: &ShownFrames<'_>,
    piece: &FramePiece,
    level: Level<P::Arch>,
) -> Option<Shown<P::Arch>> {
    let (vma, page, span) = (fault.vma, fault.page, level.span());
    let index = vma.page_offset_of(page);
    let slot = VirtRange::from_len(page.align_down(span), span).unwrap_or(fault.range());
    let part = slot.intersection(vma.range());
    // The distances, in pages, from the page of the fault to the ends of the range that may be
    // mapped.
    let below = ((page.0 - part.start().0) >> PAGE_SHIFT).min(index - piece.page);
    let above = part.end().0 - page.0;
    let above = (above >> PAGE_SHIFT).min(piece.pages().end - index);
    let start = page.0 - (below << PAGE_SHIFT);
    let range = VirtRange::raw(start, page.0 + (above << PAGE_SHIFT));
    let first = piece.frame_of(index - below)?;
    let unused = vma.flags().attributes().of_memory(frames.memory);
    let allowed = if vma.is_shared() { unused } else { unused.read_only() };
    let attributes = if allowed.permissions().contains(Permissions::WRITE) {
        allowed.written()
    } else {
        allowed.accessed().soft_dirty()
    };
    let fills = range.len() == span && first.is_aligned(level.order());
    let level = if fills { level } else { Level::PTE };
    let template = attributes.entry(Frame(0), Level::<P::Arch>::PTE);
    Some(Shown { range, first, template, attributes, level })
}

/// Whether no smaller entry is mapped where a leaf of `level` would map the page. A hint.
fn is_vacant<P: Platform>(fault: &Fault<'_, '_, P>, level: Level<P::Arch>) -> bool {
    let section = fault.read_section();
    let found = fault.page_table().peek(&section, fault.page, &mut Counts::default());
    found.entry.is_empty() && found.node.level >= level
}

/// Creates one leaf above level 2. `None` if there is no memory for the tables with which it could
/// be split, or if smaller entries are mapped there.
fn map_large<P: Platform>(
    fault: &Fault<'_, '_, P>,
    shown: &Shown<P::Arch>,
) -> Result<Option<Next>, Failure<FaultError>> {
    let Shown { range, level, .. } = *shown;
    let page_table = fault.page_table();
    let Ok(deposit) = LargeDeposit::new(page_table, level) else { return Ok(None) };
    let mut deposit = Some(deposit);
    let mapped = page_table.with_tables(range, |mut span| {
        let EntryAt { node, entry, .. } = span.entry_at(range.start());
        if !entry.is_empty() {
            // Another thread has mapped the frames.
            return Ok(Some(Next::Again));
        }
        if node.level < level {
            return Ok(None);
        }
        let holder = span.table_at(range.start(), level)?;
        if let Some(deposit) = deposit.take() {
            deposit.give_to(holder);
        }
        put_leaf(fault, &mut span, shown, holder);
        Ok(Some(Next::Done(Resolved::Mapped(range))))
    })?;
    publish(page_table, range);
    Ok(mapped)
}

/// Creates one leaf in `holder`, a locked table of its level that has the deposit for it.
fn put_leaf<P: Platform>(
    fault: &Fault<'_, '_, P>,
    span: &mut FillSpan<'_, '_, '_, P>,
    shown: &Shown<P::Arch>,
    holder: Table<'_>,
) {
    let Shown { range, first, level, .. } = *shown;
    memory::map_shown(fault.memory(), shown.frames());
    let index = level.index_of(range.start());
    let leaf = shown.attributes.entry(first, level);
    fault.page_table().publish_huge(TableEntry { table: holder, index }, leaf);
    span.counts.entries_written += 1;
}

/// Creates one huge leaf, or fills the empty entries of the table that covers the range.
fn fill_shown<P: Platform>(
    fault: &Fault<'_, '_, P>,
    mut span: FillSpan<'_, '_, '_, P>,
    shown: &Shown<P::Arch>,
) -> Result<Next, NoMemory> {
    let range = shown.range;
    let EntryAt { node, entry, .. } = span.entry_at(range.start());
    if node.level > Level::PTE && !entry.is_empty() {
        // Another thread has mapped a huge leaf.
        return Ok(Next::Again);
    }
    if shown.level == Level::PMD && node.level > Level::PTE {
        let holder = span.table_at(range.start(), Level::PMD)?;
        let deposit = span.take_deposit()?;
        fault.page_table().deposit_table(holder, deposit);
        put_leaf(fault, &mut span, shown, holder);
    } else {
        let table = span.table_at(range.start(), Level::PTE)?;
        fill_table(fault, &mut span, shown, table);
    }
    Ok(Next::Done(Resolved::Mapped(range)))
}

/// Fills the empty entries of the range in `table`, which is locked. Other threads may have filled
/// some entries, but with the same frames, unless the frames were revoked; a revoke waits for this
/// fault.
fn fill_table<P: Platform>(
    fault: &Fault<'_, '_, P>,
    span: &mut FillSpan<'_, '_, '_, P>,
    shown: &Shown<P::Arch>,
    table: Table<'_>,
) {
    let (page_table, count) = (fault.page_table(), shown.range.pages() as u32);
    let begin = P::Arch::PTE.index_of(shown.range.start());
    let end = begin + count;
    let mut at = begin;
    while at < end {
        let vacant = run::count_empty(&page_table.entries(table)[at.positions(end - at)]);
        span.counts.entries_read += u64::from(vacant.max(1));
        if vacant == 0 {
            at += 1;
            continue;
        }
        let first = shown.first.plus(at - begin);
        memory::map_shown(fault.memory(), FrameRange { first, count: vacant });
        let leaf = P::Arch::nth_page(shown.template, first.0);
        page_table.fill(TableEntry { table, index: at }, leaf, vacant);
        span.counts.entries_written += u64::from(vacant);
        at += vacant;
    }
}
