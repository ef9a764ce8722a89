//! Swap-out of folios that several VMAs map: the pages of a stretch, which belong to one owner, are
//! processed VMA by VMA through the reverse map.
//!
//! ```text
//! VMA of the parent    | look at all folios | flush |
//! VMA of a child       |                    | look  | flush |
//! unused folios, all mappings of which were met:
//! VMA of the parent    | swap entries | flush |
//! VMA of a child       |              | swap entries | flush |
//! write out            | all folios, no lock but theirs
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use arrayvec::ArrayVec;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PageRange, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, Equal, Level};
use crate::folio::{ExclusiveRun, Folio, FolioOwner, LockedFolio, Owner, OwnerKind, Turn};
use crate::platform::Platform;
use crate::swap::SlotRun;

use super::edit::Edit;
use super::locking::Depth;
use super::narrowing::Narrowing;
use super::rewrite::clear_accessed;
use super::run::{Run, What};
use super::span::Span;
use super::swap_out::no_access::{page_without_access, write_without_access};

/// The maximum number of folios in a stretch.
const FOLIOS: usize = 32;
/// A stretch ends where an index is a multiple of this.
const WINDOW: u64 = 512;

/// A folio that several VMAs map.
pub(crate) struct SharedFolio<'m, P: Platform> {
    pub(crate) leaving: LockedFolio<'m, P>,
    /// The index of its first page.
    first: u64,
    /// The number of visited mappings, in all VMAs. During the swap-out, the number of removed
    /// mappings of one VMA.
    pub(crate) met: u32,
    /// Whether one of the mappings was used.
    pub(crate) used: bool,
}

impl<P: Platform> SharedFolio<'_, P> {
    fn end(&self) -> u64 {
        self.first + u64::from(self.leaving.folio().pages())
    }
}

/// A part of a VMA that may map pages of a stretch.
#[derive(Clone, Copy)]
pub(crate) struct StretchPart {
    pub(crate) range: VirtRange,
    /// The index of its first page.
    index: u64,
}

/// Locked folios of one owner with consecutive indexes.
pub(crate) struct SharedFolios<'m, P: Platform> {
    pub(crate) folios: ArrayVec<SharedFolio<'m, P>, FOLIOS>,
    owner: Owner,
    turn: Turn,
    /// The number of wanted pages.
    wanted: u64,
    /// Whether more folios may follow the first, because no VMA that maps the first was visited
    /// yet.
    grows: bool,
}

impl<'m, P: Platform> SharedFolios<'m, P> {
    /// A batch of the folio `leaving`, at `owner`, and up to about `wanted` pages of the folios
    /// that follow it.
    pub(crate) fn new(
        leaving: LockedFolio<'m, P>,
        owner: FolioOwner,
        turn: Turn,
        wanted: u64,
    ) -> Self {
        let FolioOwner { owner, first } = owner;
        let mut folios = ArrayVec::new();
        folios.push(SharedFolio { leaving, first: first.first(), met: 0, used: false });
        Self { folios, owner, turn, wanted, grows: true }
    }

    /// The pages that the stretch has or may have. Empty without folios.
    pub(crate) fn pages(&self) -> PageRange {
        let first = self.folios.first().map_or(0, |folio| folio.first);
        let end = self.end();
        let window = (first + 1).next_multiple_of(WINDOW);
        PageRange { first, end: if self.grows { end.max(window) } else { end } }
    }

    /// The front of `range` that may map pages of the stretch. `index` is the index of the first
    /// page of `range`.
    pub(crate) fn part_of(&self, index: u64, range: VirtRange) -> Option<StretchPart> {
        let pages = self.pages().end.saturating_sub(index).min(range.pages());
        let end = range.start().0 + (pages << PAGE_SHIFT);
        (pages > 0).then(|| StretchPart { range: VirtRange::raw(range.start().0, end), index })
    }

    /// The number of the folio in the stretch that contains the frame, usually `next`.
    fn number_of(&self, frame: Frame, next: usize) -> Option<usize> {
        let has = |folio: &SharedFolio<'_, P>| {
            let folio = folio.leaving.folio();
            frame.0.wrapping_sub(folio.head.0) < folio.pages()
        };
        match self.folios.get(next) {
            Some(folio) if has(folio) => Some(next),
            _ => self.folios.iter().position(has),
        }
    }

    /// The index after the last folio's pages.
    fn end(&self) -> u64 {
        self.folios.last().map_or(0, SharedFolio::end)
    }

    /// Adds the folio that starts at the frame, which is page `index` of the owner. The folio is
    /// added only if it directly follows the last folio, which was met, and if several VMAs map it
    /// and its lock is free. Returns the number of the folio in the stretch. The caller holds the
    /// lock of the table that maps the folio.
    fn add(
        &mut self,
        memory: &'m Memory<P>,
        frame: Frame,
        pages: u32,
        index: u64,
    ) -> Option<usize> {
        let frames = &memory.frames;
        let follows = self.folios.last().is_some_and(|last| last.met > 0 && last.end() == index);
        let wanted = follows && index - self.pages().first < self.wanted && !self.folios.is_full();
        let folio = frames.folio_of(frame).filter(|_| wanted)?;
        if folio.head != frame
            || frames.folio(folio).reclaim_state().is_looked_at(self.turn)
            || frames.folio(folio).mappings() <= pages
            || frames.folio(folio).pins() > 0
        {
            return None;
        }
        let leaving = frames.try_hold(folio.head)?.try_into_locked()?;
        let FolioOwner { owner, first } = leaving.owner();
        if leaving.folio() != folio || owner != self.owner || first.first() != index {
            return None;
        }
        let _ = self.folios.try_push(SharedFolio { leaving, first: index, met: 0, used: false });
        Some(self.folios.len() - 1)
    }
}

/// The frame of the first page that the run maps, in a VMA whose leaves have `attributes`, and
/// whether a page of the run was used.
fn mapped_page<A: Arch>(run: &Run<A>, attributes: Attributes) -> Option<(Frame, bool)> {
    match run.what {
        What::Leaf(leaf) => Some((A::frame(leaf), A::attributes(leaf).accessed)),
        What::Absent(first) => page_without_access::<A>(first, attributes),
        What::Empty | What::Table(_) => None,
    }
}

/// Reads and clears the accessed bits of the leaves in `part` that map pages of the folios. The
/// stretch grows in the first part in which its first folio is found. Leaves of the VMA have
/// `attributes`. Stale ranges enter the gather.
pub(super) fn look_at_shared<'m, P: Platform>(
    edit: &mut Edit<'_, 'm, P>,
    part: StretchPart,
    attributes: Attributes,
    folios: &mut SharedFolios<'m, P>,
) {
    let StretchPart { range, index } = part;
    let memory = edit.memory;
    let section = edit.table().read_section();
    let mut span = edit.span(&section, range, Depth::Floor(Level::PTE));
    let mut next = 0;
    while let Ok(Some(run)) = span.next_run(Equal::empty()) {
        let page = mapped_page::<P::Arch>(&run, attributes);
        let mut number = page.and_then(|(frame, _)| folios.number_of(frame, next));
        let index = index + ((run.at - range.start()) >> PAGE_SHIFT);
        if number.is_none() && folios.grows && index >= folios.end() {
            number = page.and_then(|(frame, _)| folios.add(memory, frame, run.pages(), index));
            if number.is_none() {
                break;
            }
        }
        let (Some((_, used)), Some(number)) = (page, number) else { continue };
        let folio = &mut folios.folios[number];
        folio.met += run.pages();
        if used {
            folio.used = true;
            clear_accessed(&mut span, &run);
        }
        next = number + 1;
    }
    folios.grows &= folios.folios.iter().all(|folio| folio.met == 0);
}

/// Turns the leaves in `range` that map pages of the folios into swap entries and counts the
/// mappings down after one flush. The folios' slots are busy.
pub(super) fn swap_out_shared<'m, P: Platform>(
    edit: &mut Edit<'_, 'm, P>,
    range: VirtRange,
    attributes: Attributes,
    folios: &mut SharedFolios<'m, P>,
) {
    folios.folios.iter_mut().for_each(|folio| folio.met = 0);
    let section = edit.table().read_section();
    let mut span = edit.span(&section, range, Depth::Floor(Level::PTE));
    let mut next = 0;
    while let Ok(Some(run)) = span.next_run(Equal::SOFT_DIRTY) {
        let page = mapped_page::<P::Arch>(&run, attributes);
        let number = page.and_then(|(frame, _)| folios.number_of(frame, next));
        let (Some((frame, _)), Some(number)) = (page, number) else { continue };
        next = number + 1;
        let shared = &mut folios.folios[number];
        let folio = shared.leaving.folio();
        if dup_slots_and_store(&mut span, &run, frame, folio) {
            shared.met += run.pages();
        }
    }
    span.flush();
    for shared in folios.folios.iter().filter(|shared| shared.met > 0) {
        // SAFETY: 1. the entries met above; 2. flushed above.
        unsafe { span.count_down(shared.leaving.folio(), shared.met) };
    }
}

impl<P: Platform> Span<'_, '_, P> {
    /// Drops `pages` mappings of the folio, which swap entries have replaced.
    ///
    /// # Safety
    /// 1. The span has stored these entries, and drops the mappings only here.
    /// 2. The span has flushed the mappings.
    unsafe fn count_down(&mut self, folio: Folio, pages: u32) {
        self.counts.folios_touched += 1;
        self.counts.unmapped(OwnerKind::Anonymous, pages);
        self.counts.swap_pages = self.counts.swap_pages.wrapping_add(u64::from(pages));
        // SAFETY: 1. and 2. the caller's obligations 1 and 2.
        unsafe { self.page_table.memory.frames.folio(folio).unmap(pages) };
    }
}

/// Turns the run, which maps pages of the folio from `frame` on, into swap entries. Returns whether
/// that was possible.
fn dup_slots_and_store<P: Platform>(
    span: &mut Span<'_, '_, P>,
    run: &Run<P::Arch>,
    frame: Frame,
    folio: Folio,
) -> bool {
    let page_table = span.page_table;
    let memory = page_table.memory;
    let (number, pages) = (frame.0 - folio.head.0, run.pages());
    let Some(place) = memory.frames.folio(folio).swap_place() else { return false };
    let slots = SlotRun { area: place.area, first: place.first, count: folio.pages() };
    let named = SlotRun { first: slots.first + u64::from(number), count: pages, ..slots };
    if pages > folio.pages() - number || named.dup(memory).is_err() {
        return false;
    }
    let narrowing = span.narrow_until_flush(run);
    match run.what {
        What::Leaf(leaf) => write_swap_entries(memory, &narrowing, run, leaf, (folio, slots)),
        What::Absent(_) | What::Empty | What::Table(_) => {
            write_without_access(page_table, run, folio, number, slots);
        }
    }
    span.counts.entries_written += u64::from(run.count);
    true
}

/// Stores the swap entries of the run. The run's leaves agree with `first`.
fn write_swap_entries<P: Platform>(
    memory: &Memory<P>,
    narrowing: &Narrowing<'_, P::Arch>,
    run: &Run<P::Arch>,
    first: Entry,
    (folio, slots): (Folio, SlotRun),
) {
    let attributes = P::Arch::attributes(first);
    let number = P::Arch::frame(first).0 - folio.head.0;
    let scale = run.node.level.order().0;
    let mut done = 0;
    while done < run.count {
        let page = number + (done << scale);
        let ExclusiveRun { exclusive, count: same } =
            memory.frames.folio(folio).exclusive().run(page, folio.pages() - page);
        let exclusive = exclusive && (scale == 0 || same == folio.pages());
        let entry = P::Arch::encode_absent(Absent::Swap {
            device: slots.area,
            slot: slots.first + u64::from(page),
            exclusive,
            soft_dirty: attributes.soft_dirty,
            userfault: attributes.userfault,
        });
        let count = (same >> scale).max(1).min(run.count - done);
        narrowing.overwrite(done, count, entry);
        done += count;
    }
}
