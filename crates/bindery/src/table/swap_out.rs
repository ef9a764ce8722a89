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
//! A folio whose mappings are all in the range is found without the reverse map. The entries
//! change first, and the folio's counts after the flush: a pin or a reference that is taken until
//! then makes the compare-exchange fail, and the entries are restored. A plain store replaces a
//! leaf, even if the MMU may set accessed or dirty in it at that moment: what is stored is the
//! content that the folio has after the flush, and an entry that is restored counts as accessed and
//! dirty.

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

/// The step after a run.
enum AfterRun {
    /// The next one.
    Run,
    /// Nothing: no slots are left.
    NoSlots,
    /// Its folio is to be split first.
    Cut(Folio),
    /// The same run.
    Again,
}

/// The lock of a folio that is swapped out.
enum OutLock<'l, P: Platform> {
    Taken(FolioLock<'l, P>),
    /// The caller of the scan has the guard, and leaves it to the batch if the folio is
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

/// When what is stale is flushed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushTime {
    /// Before the locks are released.
    Here,
    /// Later, with other places: the tables are marked as pending.
    Deferred,
}

/// Makes swap entries of the leaves that `span` has locked, in a VMA whose leaves say `attributes`,
/// where they are all that maps an anonymous folio. One flush, before the locks are released.
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

/// As [`swap_out`], for a caller that collects folios of many places: it flushes the edit, and
/// calls [`OutBatch::unmap_deferred`] then, with the VMA locked for reading until that is done. A
/// folio that the caller holds has lost none of its references.
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

    /// Makes swap entries of the run, and of the rest of its folio, if these are all mappings of
    /// the folio. Returns how to continue.
    // The run is not copied: that would be a call for each page.
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

    /// No slots are free for the folio. A large folio is cut if slots for single pages are free,
    /// since only a block of its size is missing.
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
        // The hand reaches the others by itself.
        self.scan.later = true;
        AfterRun::Run
    }

    /// The slots that a folio of the cache has. Entries refer to `pages` of them once more, from
    /// page `number` on. If some of the folio's pages have left the cache, the folio leaves it too,
    /// and gets new slots.
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

    /// The lock of a folio to be swapped out. `None` if another thread has it.
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

    /// The batch has the folio from now on: the lock of the scan, or that of the held one.
    #[inline(always)]
    fn leave_to_batch(&mut self, lock: OutLock<'_, P>) {
        match lock {
            OutLock::Taken(lock) => lock.leave_to_batch(),
            OutLock::OfCaller(_) => self.scan.swapped_held = true,
        }
    }

    /// Stops at a run of a folio that is mapped elsewhere as well, or with holes, if it may be
    /// split.
    #[cold]
    fn ask_for_split(&mut self, folio: Folio) -> AfterRun {
        let page_table = self.span.page_table;
        let frames = &page_table.memory.frames;
        let tried = self.scan.choice != Choice::All || self.scan.unsplittable == Some(folio);
        // More mappings than pages: others map it, too.
        let may = frames.folio(folio).mappings() <= folio.pages()
            && frames.folio(folio).is_mapped_and_held(frames.folio(folio).mappings(), 0);
        if folio.order > Order::PAGE && !tried && may {
            return AfterRun::Cut(folio);
        }
        // After a fork, all pages of a table are mapped twice: one pass replaces a step for each
        // run. Reclaim counts the mappings of the folio that it holds, and so has to visit them.
        if self.scan.choice == Choice::All && is_shared_page(frames, folio.head) {
            self.span.skip_leaves(|frame| is_shared_page(frames, frame));
        }
        AfterRun::Run
    }

    /// Whether the pages of the run go one by one: the baseline.
    #[inline(always)]
    fn is_page_by_page(&self, run: &Run<P::Arch>) -> bool {
        self.span.page_table.reach.is_page()
            && run.node.level == Level::PTE
            && self.flush == FlushTime::Here
    }

    /// The baseline: each page gets its own entry, under the lock of its slot's cluster, and its
    /// own flush.
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

    /// Whether a folio that is mapped only here stays: enough pages are on their way, or it was
    /// used lately, or others are chosen.
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

    /// Reads and clears the accessed bits of a folio, once in a turn. Returns whether it was used
    /// recently.
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

    /// Adjusts the address space's counters before entries change whose flush is deferred past the
    /// unlock: they map `unmapped` pages less, and refer to `named` slots. The flush comes from a
    /// thread that does not know these counters.
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

    /// Stores the swap entries of the run, each with the bits that its leaf and its page had.
    // Always: the other callers are rare, and a call for each page costs more than the work.
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
            // A huge leaf is exclusive as a whole, or each writer gets a copy.
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

    /// Whether the run is one that the cursor has yielded whole: its entries agree.
    fn is_uniform(&self, run: &Run<P::Arch>) -> bool {
        self.span.passed().end() == run.range().end()
    }

    /// After the flush: folios without other references lose their mappings, and the entries of the
    /// others are restored.
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
                // SAFETY: 1. entries of swap slots have replaced them; 2. the flush above; 3. those
                // of the caller and of the cache.
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
