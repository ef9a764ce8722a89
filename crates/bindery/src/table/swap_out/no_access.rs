//! Pages of a mapping without access: their entries become swap entries under `PROT_NONE`.
//!
//! An entry of the same form may exist without being a page of such a mapping: a move leaves such
//! entries while it checks for pins ([`super::super::mover::pages`]), and an unmapping leaves
//! suspended leaves until the flush ([`super::super::zap`]). Both hold the lock of the table from
//! the first such entry to the last, and a move also holds the folio's lock. Entries are therefore
//! swapped out here only with both locks held, and only where the VMA itself allows no access.

use core::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SHIFT, VirtAddr};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Level, Permissions};
use crate::folio::Folio;
use crate::platform::Platform;
use crate::swap::{CachedFolio, SlotRun};

use super::super::PageTable;
use super::super::out_batch::InCache;
use super::super::run::{self, Run};
use super::{AfterRun, SwapOut};

/// The frame of the first of a run of absent entries, and whether one of the pages was used, if the
/// entries belong to a VMA without access. The VMA's leaves would have `attributes`.
pub(in crate::table) fn page_without_access<A: Arch>(
    first: Entry,
    attributes: Attributes,
) -> Option<(Frame, bool)> {
    if attributes.permissions.intersects(Permissions::ACCESS) {
        return None;
    }
    match A::decode_absent(first) {
        Some(Absent::ProtNone { frame, accessed, .. }) => Some((frame, accessed)),
        Some(Absent::Swap { .. } | Absent::Marker(_)) | None => None,
    }
}

/// The swap entry that replaces `hidden`, a `PROT_NONE` entry of the folio's page `page`.
fn swap_entry_of<A: Arch>(
    hidden: Entry,
    page: u32,
    exclusive: bool,
    slots: SlotRun,
) -> Option<Entry> {
    let Some(Absent::ProtNone { soft_dirty, userfault, .. }) = A::decode_absent(hidden) else {
        return None;
    };
    let (device, slot) = (slots.area, slots.first + u64::from(page));
    Some(A::encode_absent(Absent::Swap { device, slot, exclusive, soft_dirty, userfault }))
}

/// Turns a run of `PROT_NONE` entries of the folio, from its page `number` on, into swap entries.
/// The caller has read the first entry with the lock of the table held.
pub(in crate::table) fn write_without_access<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &Run<P::Arch>,
    folio: Folio,
    number: u32,
    slots: SlotRun,
) {
    let each = run.node.level.order().pages();
    let pages = (number..).step_by(each as usize);
    for (word, page) in page_table.entries_of(run).iter().zip(pages) {
        let hidden = Entry(word.load(Ordering::Relaxed));
        // A huge entry must be exclusive as a whole; otherwise each writer gets a copy.
        let found = page_table.memory.frames.folio(folio).exclusive().run(page, each);
        let exclusive = found.exclusive && found.count >= each;
        let entry = swap_entry_of::<P::Arch>(hidden, page, exclusive, slots);
        debug_assert!(entry.is_some(), "a run of such entries has no others");
        if let Some(entry) = entry {
            word.store(entry.0, Ordering::Relaxed);
        }
    }
}

impl<P: Platform> SwapOut<'_, '_, '_, '_, P> {
    /// As [`SwapOut::store_run`], for absent entries.
    #[cold]
    #[inline(never)]
    pub(super) fn store_absent(&mut self, run: &Run<P::Arch>, first: Entry) -> AfterRun {
        let memory = self.span.page_table.memory;
        let frames = &memory.frames;
        let found = page_without_access::<P::Arch>(first, self.attributes);
        let Some((frame, used)) = found else { return AfterRun::Run };
        let Some(folio) =
            frames.folio_of(frame).filter(|folio| frames.folio(*folio).is_anonymous())
        else {
            return AfterRun::Run;
        };
        let number = frame.0 - folio.head.0;
        let pages = self.without_access_here(run, folio, number);
        let run = Run { count: pages >> run.node.level.order().0, ..*run };
        let held = self.scan.holds(folio);
        let in_cache =
            if frames.folio(folio).is_swap_cached() { InCache::Before } else { InCache::New };
        let references = u32::from(held) + in_cache.references();
        if !frames.folio(folio).is_mapped_and_held(pages, references) {
            return self.ask_for_split(folio);
        }
        if self.stays(&run, folio, || used) {
            return AfterRun::Run;
        }
        let Some(lock) = self.lock(folio) else { return AfterRun::Run };
        let slots = match in_cache {
            InCache::Before => self.slots_again(lock.locked(), number, pages),
            InCache::New => {
                let slots = self.batch.slots(memory, folio.order, 1);
                slots.ok_or_else(|| self.without_slots(folio))
            }
        };
        let slots = match slots {
            Ok(slots) => slots,
            Err(next) => return next,
        };
        if in_cache == InCache::New {
            let _ = CachedFolio::send_out(memory, lock.locked(), slots, number, pages);
        }
        self.leave_to_batch(lock);
        self.scan.left = self.scan.left.saturating_sub(pages);
        self.defer(run.node.table, pages, pages);
        write_without_access(self.span.page_table, &run, folio, number, slots);
        self.span.counts.entries_written += u64::from(run.count);
        self.span.counts.folios_touched += 1;
        // No TLB holds the pages, but the batch flushes anyway.
        self.span.gather.stale(run.range(), run.node.level);
        let at = run.at.0.wrapping_sub(u64::from(number) << PAGE_SHIFT);
        self.batch.add(slots, VirtAddr(at), in_cache);
        AfterRun::Run
    }

    /// The number of the folio's pages that consecutive entries, from the run's first entry on,
    /// refer to. The run ends where the entries differ in more than the frame.
    fn without_access_here(&self, run: &Run<P::Arch>, folio: Folio, number: u32) -> u32 {
        let (pages, rest) = (run.pages(), folio.pages() - number);
        if pages >= rest || run.node.level > Level::PTE {
            return pages;
        }
        let left = ((self.span.range().end().0 - run.at.0) >> PAGE_SHIFT) as u32;
        let most = rest.min(left).min(run.index.left::<P::Arch>());
        let entries = self.span.page_table.entries(run.node.table);
        let has = |index: &EntryIndex| {
            let wanted = folio.head.plus(number + (*index - run.index));
            let hidden = P::Arch::decode_absent(run::load(entries, *index));
            matches!(hidden, Some(Absent::ProtNone { frame, .. }) if frame == wanted)
        };
        pages + run.index.stretch(most).skip(pages as usize).take_while(has).count() as u32
    }
}
