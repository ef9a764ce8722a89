//! Swap-out: entries that map whole folios become entries that refer to swap slots, run by run.
//!
//! ```text
//! range     | leaf run: a folio of 16 pages | leaf run: 512 base pages ...    |
//! store     | 16 swap entries               | 512 swap entries                |   under the lock
//! flush     |------------------------ once ----------------------------------|   under the lock
//! unmap     | one compare-exchange          | one for each                    |   under the lock
//! write out | without locks on tables                                         |
//! ```
//!
//! A folio whose mappings all lie in the range is found without the reverse map. The entries change
//! first, and the folio's counts after the flush. A pin or a reference taken before that makes the
//! compare-exchange fail, and the entries are restored. A plain store replaces a leaf, even if the
//! MMU may set accessed or dirty in the leaf at that moment: the content written to swap is the
//! folio's content after the flush, and a restored entry counts as accessed and dirty.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::AtomicU64;

use crate::addr::{Order, PAGE_SHIFT, VirtAddr};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Equal, Kind, Level};
use crate::folio::{
    Age, Eviction, ExclusiveRun, Folio, FolioLock, FolioLocked, OwnerKind, is_shared_page,
};
use crate::platform::Platform;
use crate::swap::{CachedFolio, SlotRun, leave_cache, send_out_again};

use super::out_batch::{InCache, OutBatch, OutRun};
use super::rewrite::clear_accessed;
use super::run::{self, Run, What};
use super::span::Span;
use super::swap_out_scan::{Choice, SwapOutScan, SwapOutStop};
use super::{EntryAt, NoMemory, Table};

mod cached;
mod lazy;
pub(super) mod no_access;
mod restore;

/// The swap-out of the leaves of one part.
struct SwapOut<'c, 'l, 'a, 'm, P: Platform> {
    scan: &'c mut SwapOutScan<'l>,
    span: &'c mut Span<'a, 'm, P>,
    batch: &'c mut OutBatch,
    /// The attributes of the VMA's leaves.
    attributes: Attributes,
    flush: FlushTime,
}

/// The step that follows a run.
enum AfterRun {
    /// Process the next run.
    Run,
    /// Stop: no slots are left.
    NoSlots,
    /// Split the run's folio first.
    Cut(Folio),
    /// Process the same run again.
    Again,
}

/// The lock of a folio that is swapped out.
enum OutLock<'l, P: Platform> {
    Taken(FolioLock<'l, P>),
    /// The caller of the scan holds the guard, and leaves the lock to the batch if the folio is
    /// swapped out.
    OfCaller(FolioLocked<'l>),
}

impl<P: Platform> OutLock<'_, P> {
    #[inline(always)]
    fn locked(&self) -> FolioLocked<'_> {
        match self {
            Self::Taken(lock) => lock.locked(),
            Self::OfCaller(locked) => *locked,
        }
    }
}

/// The time at which stale translations are flushed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushTime {
    /// Before the locks are released.
    Here,
    /// Later, together with other places; until then the tables are marked as pending.
    Deferred,
}

/// Turns the leaves that `span` has locked into swap entries wherever they are the only mappings of
/// an anonymous folio. The VMA's leaves have `attributes`. Flushes once, before the locks are
/// released.
#[inline(never)]
pub(crate) fn swap_out<P: Platform>(
    span: &mut Span<'_, '_, P>,
    attributes: Attributes,
    scan: &mut SwapOutScan<'_>,
    batch: &mut OutBatch,
) -> Result<SwapOutStop, NoMemory> {
    let mut work = SwapOut { scan, span, batch, attributes, flush: FlushTime::Here };
    let stop = work.store_entries();
    work.unmap_lazy();
    work.unmap_folios();
    stop
}

/// As [`swap_out`], for a caller that collects folios from several places. The caller flushes the
/// edit and then calls [`OutBatch::unmap_deferred`], and holds the VMA's lock for reading until
/// both are done. A folio that the caller holds has lost none of its references.
pub(crate) fn swap_out_deferred<P: Platform>(
    span: &mut Span<'_, '_, P>,
    attributes: Attributes,
    scan: &mut SwapOutScan<'_>,
    batch: &mut OutBatch,
) -> Result<SwapOutStop, NoMemory> {
    SwapOut { scan, span, batch, attributes, flush: FlushTime::Deferred }.store_entries()
}

impl<'l, 'm, P: Platform> SwapOut<'_, 'l, '_, 'm, P> {
    fn store_entries(&mut self) -> Result<SwapOutStop, NoMemory> {
        self.batch.drop_stopped(self.span.page_table.memory);
        while let Some(mut run) = self.span.next_run(Equal::SOFT_DIRTY)? {
            let (What::Leaf(first) | What::Absent(first)) = run.what else { continue };
            if self.batch.is_full() {
                return Ok(SwapOutStop::Full(run.at));
            }
            let next = if matches!(run.what, What::Leaf(_)) {
                self.store_run(&mut run, first)
            } else {
                self.store_absent(&run, first)
            };
            match next {
                AfterRun::Run => {}
                AfterRun::NoSlots => return Ok(SwapOutStop::NoSlots),
                AfterRun::Cut(folio) => return Ok(SwapOutStop::Cut(folio, run.at)),
                AfterRun::Again => return Ok(SwapOutStop::Full(run.at)),
            }
        }
        Ok(SwapOutStop::End)
    }

    /// Turns the run and the rest of its folio into swap entries, if these leaves are all the
    /// folio's mappings. Returns how to continue.
    // The run is not copied, since that would cost a call per page.
    fn store_run(&mut self, run: &mut Run<P::Arch>, first: Entry) -> AfterRun {
        let memory = self.span.page_table.memory;
        let frames = &memory.frames;
        let frame = P::Arch::frame(first);
        let Some(folio) =
            frames.folio_of(frame).filter(|folio| frames.folio(*folio).is_anonymous())
        else {
            return AfterRun::Run;
        };
        let number = frame.0 - folio.head.0;
        let held = self.scan.holds(folio);
        let pages = self.mapped_here(run, folio, number);
        let only_here = frames.folio(folio).is_mapped_and_held(pages, u32::from(held));
        if !only_here && frames.folio(folio).is_swap_cached() {
            return self.store_cached(run, first, folio, pages);
        }
        if !only_here {
            return self.ask_for_split(folio);
        }
        if self.stays(run, folio, || P::Arch::attributes(first).accessed) {
            return AfterRun::Run;
        }
        let Some(lock) = self.lock(folio) else { return AfterRun::Run };
        if frames.folio(folio).is_lazy() && !frames.folio(folio).is_dirty() {
            self.drop_lazy(run, folio, pages);
            return AfterRun::Run;
        }
        let left = (self.span.range().end().0 - run.at.0) >> PAGE_SHIFT;
        let Some(slots) = self.batch.slots(memory, folio.order, left.min(512) as u32) else {
            return self.without_slots(folio);
        };
        self.scan.left = self.scan.left.saturating_sub(pages);
        let by_page = self.is_page_by_page(run);
        let named = if by_page { 0 } else { pages };
        let _ = CachedFolio::send_out(memory, lock.locked(), slots, number, named);
        self.leave_to_batch(lock);
        self.defer(run.node.table, pages, pages);
        run.count = pages >> run.node.level.order().0;
        if by_page {
            self.store_page_by_page(run, folio, number, slots);
        } else {
            self.write_entries(run, folio, number, slots);
        }
        let at = run.at.0.wrapping_sub(u64::from(number) << PAGE_SHIFT);
        self.batch.add(slots, VirtAddr(at), InCache::New);
        AfterRun::Run
    }

    /// Handles a folio for which no slots are free. A large folio is split if slots for single
    /// pages are free, because only a block of the folio's size is missing.
    #[cold]
    #[inline(never)]
    fn without_slots(&mut self, folio: Folio) -> AfterRun {
        let memory = self.span.page_table.memory;
        if folio.order == Order::PAGE {
            return AfterRun::NoSlots;
        }
        if !memory.swap.has_room(&memory.frames) {
            return AfterRun::Run;
        }
        if self.scan.choice == Choice::All {
            let tried = self.scan.unsplittable == Some(folio);
            return if tried { AfterRun::Run } else { AfterRun::Cut(folio) };
        }
        self.scan.cut_held |= self.scan.holds(folio);
        // The clock hand reaches the other folios by itself.
        self.scan.later = true;
        AfterRun::Run
    }

    /// The slots of a folio in the swap cache. `pages` more entries now refer to the slots, from
    /// page `number` on. If some of the folio's pages have left the cache, the whole folio leaves
    /// it too and gets new slots.
    fn slots_again(
        &mut self,
        folio: FolioLocked<'_>,
        number: u32,
        pages: u32,
    ) -> Result<SlotRun, AfterRun> {
        let memory = self.span.page_table.memory;
        if let Some(slots) = send_out_again(memory, folio, number, pages) {
            return Ok(slots);
        }
        if !leave_cache(memory, folio) {
            return Err(AfterRun::Run);
        }
        self.scan.later = true;
        Err(if self.scan.choice == Choice::All { AfterRun::Again } else { AfterRun::Run })
    }

    /// The lock of a folio to be swapped out. `None` if another thread holds the lock.
    #[inline(always)]
    fn lock<'k>(&self, folio: Folio) -> Option<OutLock<'k, P>>
    where
        'm: 'k,
        'l: 'k,
    {
        let memory = self.span.page_table.memory;
        match self.scan.held {
            Some(held) if *held == folio => Some(OutLock::OfCaller(held)),
            // SAFETY: 1. the run's mappings, under the span's lock.
            _ => unsafe { memory.frames.folio(folio).try_lock() }.map(OutLock::Taken),
        }
    }

    /// Hands the folio to the batch: either the scan's lock, or that of the folio that the caller
    /// holds.
    #[inline(always)]
    fn leave_to_batch(&mut self, lock: OutLock<'_, P>) {
        match lock {
            OutLock::Taken(lock) => lock.leave_to_batch(),
            OutLock::OfCaller(_) => self.scan.swapped_held = true,
        }
    }

    /// Stops at a run whose folio is also mapped elsewhere or with holes, if the folio may be
    /// split.
    #[cold]
    fn ask_for_split(&mut self, folio: Folio) -> AfterRun {
        let page_table = self.span.page_table;
        let frames = &page_table.memory.frames;
        let tried = self.scan.choice != Choice::All || self.scan.unsplittable == Some(folio);
        // More mappings than pages means that other VMAs also map the folio.
        let may = frames.folio(folio).mappings() <= folio.pages()
            && frames.folio(folio).is_mapped_and_held(frames.folio(folio).mappings(), 0);
        if folio.order > Order::PAGE && !tried && may {
            return AfterRun::Cut(folio);
        }
        // After a fork, all pages of a table are mapped twice, so one pass replaces a step per run.
        // Reclaim counts the mappings of the folio that it holds, and therefore has to visit each
        // run.
        if self.scan.choice == Choice::All && is_shared_page(frames, folio.head) {
            self.span.skip_leaves(|frame| is_shared_page(frames, frame));
        }
        AfterRun::Run
    }

    /// Whether the pages of the run are processed singly, which is the baseline.
    #[inline(always)]
    fn is_page_by_page(&self, run: &Run<P::Arch>) -> bool {
        self.span.page_table.reach.is_page()
            && run.node.level == Level::PTE
            && self.flush == FlushTime::Here
    }

    /// The baseline: each page gets its own entry, under the lock of its slot's cluster, and a
    /// flush of its own.
    #[cold]
    fn store_page_by_page(
        &mut self,
        run: &Run<P::Arch>,
        folio: Folio,
        number: u32,
        slots: SlotRun,
    ) {
        let page_table = self.span.page_table;
        for done in 0..run.count {
            let at = VirtAddr(run.at.0 + (u64::from(done) << PAGE_SHIFT));
            let page = Run { at, index: run.index + done, count: 1, ..*run };
            let first = slots.first + u64::from(number + done);
            let named = SlotRun { first, count: 1, ..slots }.dup(page_table.memory);
            debug_assert!(named.is_ok(), "a slot that is new has no entries");
            self.write_entries(&page, folio, number + done, slots);
            self.span.flush();
        }
    }

    /// Whether a folio that is mapped only here stays in memory: enough pages are in flight, the
    /// folio was used recently, or other folios were chosen.
    #[inline(always)]
    fn stays(&mut self, run: &Run<P::Arch>, folio: Folio, used: impl FnOnce() -> bool) -> bool {
        self.scan.choice != Choice::All
            && (self.scan.left == 0 || !self.is_chosen(run, used(), folio))
    }

    fn is_chosen(&mut self, run: &Run<P::Arch>, used: bool, folio: Folio) -> bool {
        if self.scan.choice == Choice::Passing {
            return self.span.page_table.memory.frames.folio(folio).reclaim_state().age()
                == Age::Passing;
        }
        !self.is_used(run, used, folio)
    }

    /// Reads and clears the accessed bits of a folio, once per clock turn. Returns whether the
    /// folio was used recently.
    fn is_used(&mut self, run: &Run<P::Arch>, used: bool, folio: Folio) -> bool {
        let frames = &self.span.page_table.memory.frames;
        let turn = self.scan.turn;
        if frames.folio(folio).reclaim_state().is_looked_at(turn) {
            return true;
        }
        if used {
            clear_accessed(self.span, run);
        }
        frames.folio(folio).reclaim_state().note_look(turn);
        let later = frames.folio(folio).reclaim_state().update_age(used) == Eviction::Later;
        self.scan.later |= later;
        later
    }

    /// Adjusts the address space's counters before a change of entries whose flush is deferred past
    /// the unlock: the entries map `unmapped` fewer pages and refer to `named` slots. The thread
    /// that flushes does not know these counters.
    #[inline]
    fn defer(&mut self, table: Table<'_>, unmapped: u32, named: u32) {
        if self.flush == FlushTime::Deferred {
            self.span.mark_pending(table);
            let counts = &mut self.span.counts;
            counts.unmapped(OwnerKind::Anonymous, unmapped);
            counts.swap_pages = counts.swap_pages.wrapping_add(u64::from(named));
        }
    }

    /// The number of the folio's pages that are mapped consecutively from the run's first on. The
    /// run ends where the entries differ in more than the frame.
    fn mapped_here(&mut self, run: &Run<P::Arch>, folio: Folio, number: u32) -> u32 {
        let pages = run.pages();
        let rest = folio.pages() - number;
        if pages >= rest || run.node.level > Level::PTE {
            return pages;
        }
        let left = ((self.span.range().end().0 - run.at.0) >> PAGE_SHIFT) as u32;
        let most = rest.min(left).min(run.index.left::<P::Arch>());
        let entries = self.span.page_table.entries(run.node.table);
        let maps = |index: &EntryIndex| {
            let entry = run::load(entries, *index);
            P::Arch::PTE.kind(entry) == Kind::Leaf
                && P::Arch::frame(P::Arch::clear_contig(entry, *index))
                    == folio.head.plus(number + (*index - run.index))
        };
        let more = run.index.stretch(most).skip(pages as usize).take_while(maps).count() as u32;
        if more > 0 {
            self.span.unfold_edges(&Run { count: pages + more, ..*run });
        }
        pages + more
    }

    /// Stores the swap entries of the run, each with the bits of its leaf and its page.
    // Always inlined: the other callers are rare, and a call per page costs more than the work.
    #[inline(always)]
    fn write_entries(&mut self, run: &Run<P::Arch>, folio: Folio, number: u32, place: SlotRun) {
        let page_table = self.span.page_table;
        let entries = page_table.entries(run.node.table);
        let scale = run.node.level.order().0;
        let uniform = !matches!(run.what, What::Leaf(_)) || self.is_uniform(run);
        let narrowing = match self.flush {
            FlushTime::Here => self.span.narrow_until_flush(run),
            FlushTime::Deferred => self.span.narrow(run),
        };
        let mut done = 0;
        while done < run.count {
            let index = run.index + done;
            let raw = run::load(entries, index);
            let leaf =
                if run.node.level == Level::PTE { P::Arch::clear_contig(raw, index) } else { raw };
            let attributes = P::Arch::attributes(leaf);
            let page = number + (done << scale);
            let ExclusiveRun { exclusive, count: same } =
                page_table.memory.frames.folio(folio).exclusive().run(page, folio.pages() - page);
            // A huge leaf must be exclusive as a whole; otherwise each writer gets a copy.
            let exclusive = exclusive && (scale == 0 || same == folio.pages());
            let first = Absent::Swap {
                device: place.area,
                slot: place.first + u64::from(page),
                exclusive,
                soft_dirty: attributes.soft_dirty,
                userfault: attributes.userfault,
            };
            let entry = P::Arch::encode_absent(first);
            let most = (same >> scale).max(1).min(run.count - done);
            let count = if uniform {
                most
            } else {
                equal_software_bits::<P::Arch>(entries, index, most, attributes)
            };
            narrowing.overwrite(done, count, entry);
            done += count;
        }
        self.span.counts.entries_written += u64::from(run.count);
        self.span.counts.folios_touched += 1;
    }

    /// Whether the cursor yielded the run as a whole, so that its entries agree.
    fn is_uniform(&self, run: &Run<P::Arch>) -> bool {
        self.span.passed().end() == run.range().end()
    }

    /// After the flush, unmaps folios without other references and restores the entries of the
    /// other folios.
    fn unmap_folios(&mut self) {
        let memory = self.span.page_table.memory;
        let mut unmapped = 0;
        for number in self.batch.settled..self.batch.runs.len() {
            let OutRun { slots, at } = self.batch.runs[number];
            let in_cache = self.batch.in_cache(number);
            let mut done = 0;
            while done < slots.count {
                let slot = SlotRun { first: slots.first + u64::from(done), count: 1, ..slots };
                let folio = slot.cached_folio(memory);
                let Some(folio) = folio else { break };
                let start = VirtAddr(at.0.wrapping_add(u64::from(done) << PAGE_SHIFT));
                let pages = memory.frames.folio(folio).mappings();
                let held = u32::from(self.scan.holds(folio));
                // SAFETY: 1. entries of swap slots have replaced them; 2. the flush above; 3. the
                // references of the caller and of the cache.
                let is_unmapped = unsafe {
                    let folio = memory.frames.folio(folio);
                    folio.unmap_all(pages, held + in_cache.references())
                };
                if is_unmapped {
                    unmapped += pages;
                } else if in_cache == InCache::Before {
                    // SAFETY: 1. and 2. as above; nothing was dropped.
                    unsafe { self.batch.keep(memory, folio, pages, in_cache) };
                    unmapped += pages;
                } else {
                    self.restore(folio, start);
                }
                done += folio.pages();
            }
        }
        self.batch.settled = self.batch.runs.len();
        let counts = &mut self.span.counts;
        counts.unmapped(OwnerKind::Anonymous, unmapped);
        counts.swap_pages = counts.swap_pages.wrapping_add(u64::from(unmapped));
    }
}

/// The number of leaves from `index` on, up to `most`, that agree with `first` in the bits that a
/// swap entry keeps.
fn equal_software_bits<A: Arch>(
    entries: &[AtomicU64],
    index: EntryIndex,
    most: u32,
    first: Attributes,
) -> u32 {
    let agrees = |index: &EntryIndex| {
        let other = A::attributes(A::clear_contig(run::load(entries, *index), *index));
        (other.soft_dirty, other.userfault) == (first.soft_dirty, first.userfault)
    };
    index.stretch(most).take_while(agrees).count().max(1) as u32
}
