//! Swap-in: entries that refer to the slots of a folio map the folio's pages again, run by run.

use core::sync::atomic::Ordering;

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Attributes, Equal, Level, Permissions};
use crate::folio::{Folio, FolioLocked, FreshFolio, OwnerKind, SwapPlace};
use crate::platform::Platform;
use crate::stats::Counts;
use crate::swap::CachedFolio;
use crate::swap::page_set::PageSet;

use super::cursor::Cursor;
use super::locking::Depth;
use super::rewrite::protect::{EntryPolicy, Watched, Writable};
use super::run::{self, Entries, Run, What};
use super::{NoMemory, PageTable, Table, TableEntry};

/// A folio whose content is complete, and the addresses of its pages.
pub(crate) struct SwapIn<'l> {
    pub(crate) folio: FolioLocked<'l>,
    pub(crate) place: SwapPlace,
    /// The address of the folio's first page, which may lie outside of the range.
    pub(crate) start: VirtAddr,
    /// The part of the folio that is in the VMA.
    pub(crate) range: VirtRange,
    /// The attributes of the VMA's leaves.
    pub(crate) attributes: Attributes,
    /// The pages that may be writable.
    pub(crate) change: EntryPolicy,
}

impl<'l> SwapIn<'l> {
    #[inline(always)]
    fn cached<P: Platform>(&self, memory: &'l Memory<P>) -> CachedFolio<'l, P> {
        CachedFolio::new(memory, self.folio, self.place)
    }
}

/// The pages that were mapped.
pub(crate) struct SwappedIn {
    /// Pages of the folio.
    pub(crate) pages: PageSet,
    /// Whether all of the pages are exclusive.
    pub(crate) exclusive: bool,
    /// Whether some cached pages could not be mapped, because the folio's count of mappings is at
    /// its maximum or the deposit of a huge entry is missing.
    pub(crate) refused: bool,
}

/// Maps the pages of the folio wherever entries of the range refer to the pages' slots. `own` is
/// called before each run, with whether the run is exclusive. The caller holds a reference to the
/// folio and excludes changes of the VMA.
///
/// Ends early if pages cannot be mapped ([`SwappedIn::refused`]).
pub(crate) fn swap_in<P: Platform>(
    page_table: &PageTable<'_, P>,
    what: &SwapIn<'_>,
    mut own: impl FnMut(bool),
) -> SwappedIn {
    let mut done = SwappedIn { pages: PageSet::EMPTY, exclusive: true, refused: false };
    let section = page_table.read_section();
    let mut cursor = page_table.cursor(&section, what.range, Depth::Floor(Level::PTE));
    loop {
        let run = match cursor.next_run(Equal::empty()) {
            Ok(Some(run)) => run,
            Ok(None) => break,
            Err(NoMemory) => {
                done.refused = true;
                break;
            }
        };
        let What::Absent(first) = run.what else { continue };
        let Some(Absent::Swap { device, slot, exclusive, soft_dirty, userfault }) =
            P::Arch::decode_absent(first)
        else {
            continue;
        };
        let number = what.number_of(run.at);
        if device != what.place.area || slot != what.place.first + u64::from(number) {
            continue;
        }
        let attributes = what.attributes_of(exclusive, soft_dirty, userfault);
        let mut left = run;
        while left.count > 0 {
            let part = cached_part(page_table, &left, what);
            if part.count > 0 {
                own(exclusive);
                if !map_part(&mut cursor, &part, what, exclusive, attributes) {
                    done.refused = true;
                    return done;
                }
                done.pages.add(what.number_of(part.at), part.pages());
                done.exclusive &= exclusive;
            }
            left = left.rest(part.count.max(1));
        }
    }
    done
}

/// Maps `copy`, a fresh folio with the content of one page, if the page's entry, which is the whole
/// range, still refers to the page's slot. Returns the copy otherwise. The caller holds the cached
/// folio's lock, releases the slot afterwards, and excludes changes of the VMA.
#[cold]
pub(crate) fn swap_in_copy<'m, P: Platform>(
    page_table: &PageTable<'_, P>,
    what: &SwapIn<'_>,
    copy: FreshFolio<'m, P>,
) -> Option<FreshFolio<'m, P>> {
    let section = page_table.read_section();
    let mut cursor = page_table.cursor(&section, what.range, Depth::Floor(Level::PTE));
    let Ok(Some(run)) = cursor.next_run(Equal::empty()) else { return Some(copy) };
    let What::Absent(first) = run.what else { return Some(copy) };
    let Some(Absent::Swap { device, slot, soft_dirty, userfault, .. }) =
        P::Arch::decode_absent(first)
    else {
        return Some(copy);
    };
    let number = what.number_of(run.at);
    let is_its = device == what.place.area && slot == what.place.first + u64::from(number);
    if !is_its || what.cached(page_table.memory).pages_in_cache(number, 1) == 0 {
        return Some(copy);
    }
    // The copy is exclusive, even if other entries refer to the slot.
    let attributes = what.attributes_of(true, soft_dirty, userfault);
    let copy = copy.map(1);
    write_swapped_in(page_table, &run, copy, 0, attributes);
    cursor.counts.entries_written += 1;
    cursor.counts.bytes_copied += PAGE_SIZE;
    cursor.counts.folios_touched += 1;
    cursor.counts.mapped(OwnerKind::Anonymous, 1);
    cursor.counts.swap_pages = cursor.counts.swap_pages.wrapping_sub(1);
    None
}

/// As [`swap_in`], for a folio that is one run of one level-1 table, as it is when its slots were
/// claimed for it. Returns whether all pages are exclusive, or `None`, without having changed an
/// entry, if the folio is not such a run.
pub(crate) fn swap_in_whole<P: Platform>(
    page_table: &PageTable<'_, P>,
    what: &SwapIn<'_>,
    own: impl FnOnce(bool),
) -> Option<bool> {
    let pages = u64::from(what.folio.pages());
    // A cached folio whose entries have moved may cross tables.
    if what.range.start() != what.start
        || what.range.pages() != pages
        || !what.start.is_aligned(pages << PAGE_SHIFT)
    {
        return None;
    }
    let section = page_table.read_section();
    let found = page_table.leaf_table(&section, what.start)?;
    if !page_table.try_lock_leaf_table(&section, what.start, &found) {
        return None;
    }
    let exclusive = map_whole(page_table, found.table, what, own);
    page_table.unlock(found.table.frame());
    exclusive
}

/// Maps the folio, which ends within the locked table of its first page.
#[inline(always)]
fn map_whole<P: Platform>(
    page_table: &PageTable<'_, P>,
    table: Table<'_>,
    what: &SwapIn<'_>,
    own: impl FnOnce(bool),
) -> Option<bool> {
    let index = P::Arch::PTE.index_of(what.start);
    let (folio, place, pages) = (what.folio, what.place, what.folio.pages());
    let entry = run::load(page_table.entries(table), index);
    let Some(Absent::Swap { device, slot, exclusive, soft_dirty, userfault }) =
        P::Arch::decode_absent(entry)
    else {
        return None;
    };
    let attributes = what.attributes_of(exclusive, soft_dirty, userfault);
    if (device, slot) != (place.area, place.first)
        || pages > 1
            && P::Arch::match_absent(&page_table.entries(table)[index.positions(pages)]).0 != pages
        || CachedFolio::new(page_table.memory, folio, place).pages_in_cache(0, pages) != pages
    {
        return None;
    }
    own(exclusive);
    page_table.memory.frames.folio(*folio).map(pages).ok()?;
    if exclusive {
        page_table.memory.frames.folio(*folio).exclusive().set(0, pages);
    } else {
        page_table.memory.frames.folio(*folio).exclusive().clear(0, pages);
    }
    let first = P::Arch::page_entry(folio.head, Level::PTE, attributes);
    page_table.write_leaves(TableEntry { table, index }, first, pages);
    // The entries were not empty before.
    page_table.change_entry_count(table, 0, pages);
    page_table.count(&Counts {
        entries_descended: u64::from(P::Arch::LEVELS) - 1,
        entries_read: u64::from(pages),
        entries_written: u64::from(pages),
        tables_locked: 1,
        folios_touched: 1,
        anonymous_pages: u64::from(pages),
        swap_pages: 0u64.wrapping_sub(u64::from(pages)),
        ..Counts::default()
    });
    Some(exclusive)
}

/// The front of the run for which the cache has pages.
#[inline]
fn cached_part<'s, P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &Run<'s, P::Arch>,
    what: &SwapIn<'_>,
) -> Run<'s, P::Arch> {
    let (number, pages) = (what.number_of(run.at), run.pages());
    let cached = what.cached(page_table.memory).pages_in_cache(number, pages);
    Run { count: cached >> run.node.level.order().0, ..*run }
}

fn write_swapped_in<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &Run<P::Arch>,
    folio: Folio,
    number: u32,
    attributes: Attributes,
) {
    let first = P::Arch::page_entry(folio.head.plus(number), run.node.level, attributes);
    if run.node.level == Level::PTE {
        page_table.write_leaves(run.node.place(run.index), first, run.count);
        // The entries were not empty before.
        page_table.change_entry_count(run.node.table, 0, run.count);
    } else {
        page_table.entries(run.node.table)[run.index.position()].store(first.0, Ordering::Release);
    }
}

/// Maps a run whose pages are in the cache. Returns whether that was possible.
#[inline]
fn map_part<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    what: &SwapIn<'_>,
    exclusive: bool,
    attributes: Attributes,
) -> bool {
    let (number, pages) = (what.number_of(run.at), run.pages());
    let (page_table, counts) = (cursor.page_table, &mut cursor.counts);
    let frames = &page_table.memory.frames;
    if frames.folio(*what.folio).map(pages).is_err() {
        return false;
    }
    if exclusive {
        frames.folio(*what.folio).exclusive().set(number, pages);
    } else {
        frames.folio(*what.folio).exclusive().clear(number, pages);
    }
    write_swapped_in(page_table, run, *what.folio, number, attributes);
    counts.entries_written += u64::from(run.count);
    counts.folios_touched += 1;
    counts.mapped(OwnerKind::Anonymous, pages);
    counts.swap_pages = counts.swap_pages.wrapping_sub(u64::from(pages));
    true
}

impl SwapIn<'_> {
    /// The number of the folio's page for address `at`.
    #[inline]
    fn number_of(&self, at: VirtAddr) -> u32 {
        (at.0.wrapping_sub(self.start.0) >> PAGE_SHIFT) as u32
    }

    fn attributes_of(&self, exclusive: bool, soft_dirty: bool, userfault: bool) -> Attributes {
        let mut attributes = Attributes {
            accessed: true,
            // No other copy of the content exists.
            dirty: exclusive,
            soft_dirty,
            userfault,
            ..self.attributes
        };
        let watched = self.change.watched == Watched::SoftDirty && !soft_dirty;
        if !exclusive || watched || userfault || self.change.writable == Writable::Noticed {
            attributes.permissions -= Permissions::WRITE;
        }
        attributes
    }
}
