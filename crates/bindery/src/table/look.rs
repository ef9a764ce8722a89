//! Reads mappings without changing them: no split, no unfolding. [`look`] takes no lock, so its
//! results are hints unless the caller excludes all other threads. [`survey`] locks, and reports
//! pages in runs.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{
    Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Kind, Level, Permissions,
};
use crate::folio::Folio;
use crate::platform::Platform;
use crate::stats::Counts;

use super::cursor::Chunks;
use super::locking::{self, Depth, Node};
use super::{EntryAt, PageTable, Table, run};

/// A run of equal results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Looked<'s, A: Arch> {
    /// The entry without the contiguous bit. For a huge leaf and for an empty entry, the one entry
    /// that covers the whole range.
    pub(crate) entry: Entry,
    /// The entry as stored in memory.
    pub(crate) raw: Entry,
    pub(crate) node: Node<A, Table<'s>>,
    pub(crate) index: EntryIndex,
    /// The part of the examined range that the run covers.
    pub(crate) range: VirtRange,
}

impl<A: Arch> Looked<'_, A> {
    /// The frame of the first page of the range, if a leaf or a `PROT_NONE` entry maps it.
    pub(crate) fn frame(&self) -> Option<Frame> {
        let first = match self.node.level.kind(self.raw) {
            Kind::Leaf => A::frame(self.entry),
            Kind::Absent => match A::decode_absent(self.raw) {
                Some(Absent::ProtNone { frame, .. }) => frame,
                Some(Absent::Swap { .. } | Absent::Marker(_)) | None => return None,
            },
            Kind::Empty | Kind::Table => return None,
        };
        // A huge entry records the frame of its first page.
        let inside = self.range.start().0 & (self.node.level.span() - 1);
        Some(first.plus((inside >> PAGE_SHIFT) as u32))
    }
}

/// The entries of a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MappedRun {
    /// Consecutive pages with equal attributes, including pages mapped without permissions.
    Pages {
        /// The frame of the first page.
        first: Frame,
        /// The folio that contains the pages. `None` for the huge zero page, for single pages
        /// beyond the core's memory, and for the zero page, which may be mapped at each address of
        /// the stretch.
        folio: Option<Folio>,
        /// The attributes. Accessed and dirty are gathered from the whole contiguous run, if any.
        attributes: Attributes,
    },
    /// Pages that were swapped out, or markers.
    Absent(Absent),
}

/// A range of addresses with equal mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stretch<A: Arch> {
    pub(crate) range: VirtRange,
    /// The level of its entries.
    pub(crate) level: Level<A>,
    pub(crate) what: MappedRun,
}

/// The number of pages of the folio mapped in `range`, including pages without permissions.
pub(crate) fn mapped_pages<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    folio: Folio,
) -> u32 {
    let mut pages = 0;
    look(page_table, range, |looked| {
        if looked.frame().is_some_and(|frame| frame.0.wrapping_sub(folio.head.0) < folio.pages()) {
            pages += looked.range.pages() as u32;
        }
        true
    });
    pages
}

/// Calls `f` for every entry that covers a part of `range`, in ascending order, until `f` returns
/// false. Makes one call per leaf, per absent entry, and per empty entry of the lowest existing
/// table.
pub(crate) fn look<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    f: impl FnMut(Looked<'_, P::Arch>) -> bool,
) {
    look_alike(page_table, range, |_, _, _| 1, f);
}

/// As [`look`], with one call for consecutive leaves of a lowest table, whichever pages they map,
/// and one call for consecutive empty entries. Each call receives the first entry.
pub(crate) fn look_by_kind<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    f: impl FnMut(Looked<'_, P::Arch>) -> bool,
) {
    let alike = |raw: Entry, entries: &[AtomicU64], left: Range<usize>| match Level::<P::Arch>::PTE
        .kind(raw)
    {
        Kind::Leaf | Kind::Table => 1 + run::count_leaves::<P::Arch>(&entries[left][1..]),
        Kind::Empty => run::count_empty_ahead(&entries[left]),
        Kind::Absent => 1,
    };
    look_alike(page_table, range, alike, f);
}

/// As [`look`], with one call for the entries of a lowest table that `alike` counts. `alike`
/// receives the first entry as it was read, the table, and the indexes that are left in `range`.
// Always inlined: the callers know how they count.
#[inline(always)]
fn look_alike<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    alike: impl Fn(Entry, &[AtomicU64], Range<usize>) -> u32,
    mut f: impl FnMut(Looked<'_, P::Arch>) -> bool,
) {
    let mut counts = Counts::default();
    let mut at = range.start();
    while at < range.end() {
        // One table at a time, to keep each read section short.
        let section = page_table.read_section();
        let EntryAt { node, index: first, entry } = page_table.peek(&section, at, &mut counts);
        let span = node.level.span();
        let entries = page_table.entries(node.table);
        let mut index = first;
        let mut raw = entry;
        loop {
            let mut count = 1;
            if node.level == Level::PTE {
                let left = (range.end().0 - at.0) >> PAGE_SHIFT;
                let left = left.min(u64::from(index.left::<P::Arch>())) as u32;
                count = alike(raw, entries, index.positions(left));
            }
            let start = at.0 & !(span - 1);
            let end = start.saturating_add(span * u64::from(count)).min(range.end().0);
            let leaf = node.level.kind(raw) == Kind::Leaf;
            let entry = if leaf && node.level == Level::PTE {
                P::Arch::clear_contig(raw, index)
            } else {
                raw
            };
            let part = VirtRange::raw(at.0, end);
            page_table.memory.worked(u64::from(count), 0);
            if !f(Looked { entry, raw, node, index, range: part }) {
                page_table.count(&counts);
                return;
            }
            at = VirtAddr(end);
            index += count;
            if at >= range.end() || index.left::<P::Arch>() == 0 {
                break;
            }
            raw = Entry(entries[index.position()].load(Ordering::Acquire));
            if node.level.kind(raw) == Kind::Table {
                break;
            }
        }
    }
    page_table.count(&counts);
}

/// The first address of `range` that is not mapped with `permission`, or its end.
pub(crate) fn skip_present<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    permission: Permissions,
) -> VirtAddr {
    let mut at = range.end();
    look(page_table, range, |looked| {
        let leaf = looked.node.level.kind(looked.raw) == Kind::Leaf;
        let allowed = leaf && P::Arch::attributes(looked.entry).permissions.contains(permission);
        if !allowed {
            at = looked.range.start();
        }
        allowed
    });
    debug_assert!(at.is_aligned(PAGE_SIZE));
    at
}

/// Calls `f` for every non-empty stretch of `range`, in ascending order: once per run of pages of
/// one folio, per run of equal markers, and per swapped-out page.
///
/// The tables are locked, a few at a time, so `f` receives current values and the folios stay. `f`
/// acquires only locks that may be taken inside a table lock. The caller keeps moves of tables
/// out of the range.
pub(crate) fn survey<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    f: impl FnMut(&Stretch<P::Arch>),
) {
    survey_within(page_table, range, |work| work(), f);
}

/// As [`survey`]; `within` runs its argument each time that tables are locked, while holding the
/// further locks that the caller requires.
pub(crate) fn survey_within<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    within: impl Fn(&mut dyn FnMut()),
    mut f: impl FnMut(&Stretch<P::Arch>),
) {
    let mut chunks = Chunks::of(range);
    let mut over = false;
    while !over {
        within(&mut || match chunks.next_part(page_table, None) {
            Some(part) => {
                let section = page_table.read_section();
                let cursor = chunks.lock(page_table, &section, part, Depth::Floor(Level::PTE));
                survey_locked(page_table, cursor.range(), &mut f);
            }
            None => over = true,
        });
    }
}

/// As [`survey`], until `f` returns false.
pub(crate) fn survey_while<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    mut f: impl FnMut(&Stretch<P::Arch>) -> bool,
) {
    let (mut chunks, mut goes_on) = (Chunks::of(range), true);
    while goes_on && let Some(part) = chunks.next_part(page_table, None) {
        let section = page_table.read_section();
        let cursor = chunks.lock(page_table, &section, part, Depth::Floor(Level::PTE));
        survey_locked(page_table, cursor.range(), &mut |stretch| goes_on = goes_on && f(stretch));
    }
}

fn survey_locked<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
    f: &mut impl FnMut(&Stretch<P::Arch>),
) {
    let mut run: Option<Stretch<P::Arch>> = None;
    look(page_table, range, |looked| {
        if let Some(next) = mapped_run(page_table, &looked) {
            let next = Stretch { range: looked.range, level: looked.node.level, what: next };
            lengthen(page_table, &mut run, next, f);
        }
        true
    });
    if let Some(run) = run {
        f(&run);
    }
}

/// The content of the entry without its folio; `None` if the entry is empty.
fn mapped_run<P: Platform>(
    page_table: &PageTable<'_, P>,
    looked: &Looked<'_, P::Arch>,
) -> Option<MappedRun> {
    let level = looked.node.level;
    // A huge entry records the frame of its first page.
    let inside = looked.range.start().0 & (level.span() - 1);
    let inside = inside >> PAGE_SHIFT;
    let pages = |frame: Frame, attributes| MappedRun::Pages {
        first: frame.plus(inside as u32),
        folio: None,
        attributes,
    };
    match level.kind(looked.raw) {
        Kind::Empty | Kind::Table => None,
        Kind::Leaf => {
            let entry = gathered(page_table, looked);
            Some(pages(P::Arch::frame(entry), P::Arch::attributes(entry)))
        }
        Kind::Absent => Some(match P::Arch::decode_absent(looked.raw)? {
            Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory } => {
                let bits = Attributes { accessed, dirty, soft_dirty, ..Attributes::default() };
                pages(frame, Attributes { userfault, memory, ..bits })
            }
            Absent::Swap { device, slot, exclusive, soft_dirty, userfault } => {
                let slot = slot + inside;
                let swap = Absent::Swap { device, slot, exclusive, soft_dirty, userfault };
                MappedRun::Absent(swap)
            }
            marker @ Absent::Marker(_) => MappedRun::Absent(marker),
        }),
    }
}

/// The leaf, with accessed and dirty gathered from all entries of its contiguous run, since the MMU
/// may have set them in any of the entries.
fn gathered<P: Platform>(page_table: &PageTable<'_, P>, looked: &Looked<'_, P::Arch>) -> Entry {
    if !looked.node.in_contig(looked.raw) {
        return looked.entry;
    }
    let entries = page_table.entries(looked.node.table);
    let first = looked.index.align_down(P::Arch::CONTIG_ENTRIES);
    first
        .stretch(P::Arch::CONTIG_ENTRIES)
        .map(|index| run::load(entries, index))
        .fold(looked.entry, P::Arch::gather)
}

/// Extends the run by `next`, or passes the run to `f` and starts another.
fn lengthen<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &mut Option<Stretch<P::Arch>>,
    mut next: Stretch<P::Arch>,
    f: &mut impl FnMut(&Stretch<P::Arch>),
) {
    if let Some(run) = run
        && run.range.end() == next.range.start()
        && run.level == next.level
        && continues(page_table, run, &next.what)
    {
        run.range = VirtRange::raw(run.range.start().0, next.range.end().0);
        return;
    }
    if let MappedRun::Pages { first, folio, .. } = &mut next.what {
        *folio = page_table.memory.frames.folio_of(*first);
    }
    if let Some(run) = run.replace(next) {
        f(&run);
    }
}

/// Whether `next` continues the run.
fn continues<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &Stretch<P::Arch>,
    next: &MappedRun,
) -> bool {
    match (&run.what, next) {
        (
            MappedRun::Pages { first, folio, attributes },
            MappedRun::Pages { first: frame, attributes: others, .. },
        ) => {
            let placed = match folio {
                Some(folio) => {
                    frame.0.wrapping_sub(first.0) == run.range.pages() as u32
                        && frame.0.wrapping_sub(folio.head.0) < folio.pages()
                }
                None => frame == first && *frame == page_table.memory.zero_frame,
            };
            placed && attributes == others
        }
        (MappedRun::Absent(Absent::Marker(one)), MappedRun::Absent(Absent::Marker(other))) => {
            one == other
        }
        (MappedRun::Pages { .. }, MappedRun::Absent(_))
        | (MappedRun::Absent(_), MappedRun::Pages { .. })
        | (
            MappedRun::Absent(Absent::Swap { .. } | Absent::ProtNone { .. }),
            MappedRun::Absent(_),
        )
        | (
            MappedRun::Absent(_),
            MappedRun::Absent(Absent::Swap { .. } | Absent::ProtNone { .. }),
        ) => false,
    }
}

/// Whether one empty entry covers the whole `range` and no flush is pending in its table. Nothing
/// is then mapped in `range`, and no TLB has a translation for it. `false` may be wrong. The caller
/// excludes new tables from the range.
pub(crate) fn is_under_empty_entry<P: Platform>(
    page_table: &PageTable<'_, P>,
    range: VirtRange,
) -> bool {
    let section = page_table.read_section();
    let mut counts = Counts::default();
    let EntryAt { node, entry, .. } = page_table.peek(&section, range.start(), &mut counts);
    page_table.memory.worked(counts.entries_descended, 0);
    page_table.count_in(&section, &counts);
    let last = range.start().0 | (node.level.span() - 1);
    entry.is_empty()
        && range.end().0 - 1 <= last
        && locking::has_no_pending_flush(&page_table.tables(&section), node.table.frame())
}
