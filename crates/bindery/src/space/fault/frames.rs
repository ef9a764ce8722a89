//! Faults on mappings of frames outside the core's memory ([`crate::FrameSource`]).

use crate::addr::{Frame, PAGE_SHIFT, VirtRange};
use crate::arch::{Arch, Entry, Level, Permissions};
use crate::error::FaultError;
use crate::frame::FrameRange;
use crate::memory::{self, may_show};
use crate::object::ShownFrames;
use crate::platform::Platform;
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
    level: Level<A>,
}

/// Maps the frames around the page, within the span of one level-2 entry. Leaves are created with
/// accessed and dirty set, so the MMU never changes them.
#[cold]
pub(super) fn map_shown<P: Platform>(
    fault: &Fault<'_, '_, P>,
    frames: ShownFrames<'_>,
    pages: u64,
) -> Stepped {
    let (vma, page) = (fault.vma, fault.page);
    let index = vma.page_offset_of(page);
    let piece = frames.piece(index, pages).ok_or(FaultError::Bus)?;
    let table = P::Arch::PMD.span();
    let slot = VirtRange::from_len(page.align_down(table), table).unwrap_or(fault.range());
    let part = slot.intersection(vma.range());
    // The distances, in pages, from the page of the fault to the ends of the range that may be
    // mapped.
    let below = ((page.0 - part.start().0) >> PAGE_SHIFT).min(index - piece.page);
    let above = part.end().0 - page.0;
    let above = (above >> PAGE_SHIFT).min(piece.pages().end - index);
    let start = page.0 - (below << PAGE_SHIFT);
    let around = VirtRange::raw(start, page.0 + (above << PAGE_SHIFT));
    let showable = |range: VirtRange, first| {
        let first = piece.frame_of(first)?;
        let frames = FrameRange { first, count: range.pages() as u32 };
        may_show(fault.memory(), frames).then_some((range, first))
    };
    // A frame that may not be shown affects no other page.
    let (range, first) = showable(around, index - below)
        .or_else(|| showable(fault.range(), index))
        .ok_or(FaultError::Bus)?;
    let shown = shown(fault, &frames, range, first);
    let mapped = fault.page_table().with_tables(range, |span| fill_shown(fault, span, &shown))?;
    publish(fault.page_table(), range);
    if fault.access == Access::Write && !vma.is_shared() {
        // The leaf is read-only, so the write then copies its page.
        return Ok(Next::Again);
    }
    Ok(mapped)
}

fn shown<P: Platform>(
    fault: &Fault<'_, '_, P>,
    frames: &ShownFrames<'_>,
    range: VirtRange,
    first: Frame,
) -> Shown<P::Arch> {
    let unused = fault.vma.flags().attributes().of_memory(frames.memory);
    let allowed = if fault.vma.is_shared() { unused } else { unused.read_only() };
    let attributes = if allowed.permissions().contains(Permissions::WRITE) {
        allowed.written()
    } else {
        allowed.accessed().soft_dirty()
    };
    let huge = range.len() == P::Arch::PMD.span() && first.is_aligned(P::Arch::PMD.order());
    let level = if huge { Level::PMD } else { Level::PTE };
    let template = attributes.entry(Frame(0), Level::<P::Arch>::PTE);
    Shown { range, first, template, attributes, level }
}

/// Creates one huge leaf, or fills the empty entries of the table that covers the range.
fn fill_shown<P: Platform>(
    fault: &Fault<'_, '_, P>,
    mut span: FillSpan<'_, '_, '_, P>,
    shown: &Shown<P::Arch>,
) -> Result<Next, NoMemory> {
    let Shown { range, first, .. } = *shown;
    let EntryAt { node, entry, .. } = span.entry_at(range.start());
    if node.level > Level::PTE && !entry.is_empty() {
        // Another thread has mapped a huge leaf.
        return Ok(Next::Again);
    }
    if shown.level == Level::PMD && node.level > Level::PTE {
        let holder = span.table_at(range.start(), Level::PMD)?;
        let deposit = span.take_deposit()?;
        let page_table = fault.page_table();
        memory::map_shown(fault.memory(), FrameRange { first, count: range.pages() as u32 });
        let index = P::Arch::PMD.index_of(range.start());
        let leaf = shown.attributes.entry(first, Level::<P::Arch>::PMD);
        page_table.publish_huge(TableEntry { table: holder, index }, leaf);
        page_table.deposit_table(holder, deposit);
        span.counts.entries_written += 1;
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
