//! The sums that `smaps` shows for one mapping or for all.

use core::fmt::{self, Write};

use bindery::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use bindery::arch::{Absent, Attributes, Level};
use bindery::{
    FolioView, MappingFlags, MappingView, ObjectView, OwnerKind, PageRun, PageRunContent, Platform,
};

use super::line::write_size;
use super::sharing::{PART_SHIFT, Shared, for_each_shared};

/// Sums in bytes. Fields whose name begins with `part` count the process' proportional share of
/// each page, times 2^[`PART_SHIFT`].
#[derive(Clone, Copy, Default)]
pub(super) struct Tally {
    resident: u64,
    part: u64,
    part_dirty: u64,
    part_anonymous: u64,
    part_file: u64,
    part_memory: u64,
    part_locked: u64,
    shared_clean: u64,
    shared_dirty: u64,
    private_clean: u64,
    private_dirty: u64,
    referenced: u64,
    anonymous: u64,
    lazy: u64,
    huge_anonymous: u64,
    huge_memory: u64,
    huge_file: u64,
    swapped: u64,
    part_swapped: u64,
}

/// Whether the sums cover one mapping or all mappings.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    Mapping,
    All,
}

/// Whether a page was written since its content was saved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Saved {
    Clean,
    Dirty,
}

impl Tally {
    /// Adds the entries of `range`, a part of the mapping.
    pub(super) fn add<P: Platform>(&mut self, view: &MappingView<'_, '_, P>, range: VirtRange) {
        view.for_each_run(range, |run| match run.content() {
            PageRunContent::Pages { first, folio: Some(folio), attributes } => {
                self.add_pages(view, run, (first, folio), attributes);
            }
            // The zero page and frames beyond the core's memory are not counted.
            PageRunContent::Pages { folio: None, .. } => {}
            PageRunContent::Absent(Absent::Swap { device, slot, .. }) => {
                self.swapped += run.range().len();
                for slot in slot..slot + run.range().pages() {
                    let entries = view.slot_entries(device, slot).max(1);
                    self.part_swapped += (PAGE_SIZE << PART_SHIFT) / u64::from(entries);
                }
            }
            PageRunContent::Absent(Absent::Marker(_) | Absent::ProtNone { .. }) => {}
        });
        self.add_swapped_shared(view, range);
    }

    /// Adds the swapped pages of the mapping's shared memory, whichever process swapped them out. A
    /// private mapping counts only pages that it has not copied. Linux does not divide these pages
    /// among the processes that map them either.
    fn add_swapped_shared<P: Platform>(&mut self, view: &MappingView<'_, '_, P>, range: VirtRange) {
        let Some(object) = view.object().filter(ObjectView::is_swapped) else { return };
        let mut add = |range: VirtRange| {
            let (first, count) = (view.page_offset_of(range.start()), range.pages());
            self.swapped += object.swapped_pages(first, first + count) << PAGE_SHIFT;
        };
        if view.flags().contains(MappingFlags::SHARED) {
            return add(range);
        }
        let mut at = range.start();
        view.for_each_run(range, |run| {
            add(super::range(at, run.range().start()));
            at = run.range().end();
        });
        add(super::range(at, range.end()));
    }

    fn add_pages<P: Platform>(
        &mut self,
        view: &MappingView<'_, '_, P>,
        run: PageRun<'_, P>,
        (first, folio): (Frame, FolioView<'_, P>),
        attributes: Attributes,
    ) {
        let owner = folio.owner();
        let bytes = run.range().len();
        let written = attributes.dirty || folio.is_dirty();
        self.resident += bytes;
        if attributes.accessed {
            self.referenced += bytes;
        }
        if owner == OwnerKind::Anonymous {
            self.anonymous += bytes;
            if folio.is_lazy() && !written {
                self.lazy += bytes;
            }
        }
        if run.level() > Level::PTE {
            match owner {
                OwnerKind::Anonymous => self.huge_anonymous += bytes,
                OwnerKind::SharedMemory => self.huge_memory += bytes,
                OwnerKind::File => self.huge_file += bytes,
            }
        }
        let locked = view.flags().contains(MappingFlags::LOCKED);
        for_each_shared(folio, first, run.range().pages(), |shared| {
            let part = shared.part();
            self.part += part;
            if locked {
                self.part_locked += part;
            }
            match owner {
                OwnerKind::Anonymous => self.part_anonymous += part,
                OwnerKind::File => self.part_file += part,
                OwnerKind::SharedMemory => self.part_memory += part,
            }
            if owner == OwnerKind::File && !attributes.dirty {
                // The file records writes through all mappings.
                let at = run.range().start() + (shared.first << PAGE_SHIFT);
                let dirty = dirty_pages(view, at, shared.pages);
                self.add_saved(&shared, dirty, Saved::Dirty);
                self.add_saved(&shared, shared.pages - dirty, Saved::Clean);
            } else {
                let saved = if written { Saved::Dirty } else { Saved::Clean };
                self.add_saved(&shared, shared.pages, saved);
            }
        });
    }

    /// Adds `pages` pages of `shared` to the sum for their sharing and state.
    fn add_saved(&mut self, shared: &Shared, pages: u64, saved: Saved) {
        let bytes = pages * PAGE_SIZE;
        *match (shared.is_private(), saved) {
            (true, Saved::Clean) => &mut self.private_clean,
            (true, Saved::Dirty) => &mut self.private_dirty,
            (false, Saved::Clean) => &mut self.shared_clean,
            (false, Saved::Dirty) => &mut self.shared_dirty,
        } += bytes;
        if saved == Saved::Dirty {
            self.part_dirty += shared.part() / shared.pages.max(1) * pages;
        }
    }

    /// Writes the lines of the sums, in Linux's order.
    pub(super) fn write(&self, extent: Extent, out: &mut dyn Write) -> fmt::Result {
        let whole = |part: u64| part >> PART_SHIFT;
        write_size(out, "Rss:", self.resident)?;
        write_size(out, "Pss:", whole(self.part))?;
        write_size(out, "Pss_Dirty:", whole(self.part_dirty))?;
        if extent == Extent::All {
            write_size(out, "Pss_Anon:", whole(self.part_anonymous))?;
            write_size(out, "Pss_File:", whole(self.part_file))?;
            write_size(out, "Pss_Shmem:", whole(self.part_memory))?;
        }
        write_size(out, "Shared_Clean:", self.shared_clean)?;
        write_size(out, "Shared_Dirty:", self.shared_dirty)?;
        write_size(out, "Private_Clean:", self.private_clean)?;
        write_size(out, "Private_Dirty:", self.private_dirty)?;
        write_size(out, "Referenced:", self.referenced)?;
        write_size(out, "Anonymous:", self.anonymous)?;
        write_size(out, "KSM:", 0)?;
        write_size(out, "LazyFree:", self.lazy)?;
        write_size(out, "AnonHugePages:", self.huge_anonymous)?;
        write_size(out, "ShmemPmdMapped:", self.huge_memory)?;
        write_size(out, "FilePmdMapped:", self.huge_file)?;
        write_size(out, "Shared_Hugetlb:", 0)?;
        write_size(out, "Private_Hugetlb:", 0)?;
        write_size(out, "Swap:", self.swapped)?;
        write_size(out, "SwapPss:", whole(self.part_swapped))?;
        write_size(out, "Locked:", whole(self.part_locked))
    }
}

/// The number of dirty pages among `pages` pages of the mapping's file from `at` on.
fn dirty_pages<P: Platform>(view: &MappingView<'_, '_, P>, at: VirtAddr, pages: u64) -> u64 {
    let Some(object) = view.object() else { return 0 };
    let first = view.page_offset_of(at);
    object.dirty_pages(first, first.saturating_add(pages))
}
