//! Scans: find the pages of a range that belong to given categories, and optionally write-protect
//! them in the same step (`ioctl(PAGEMAP_SCAN)`).
//!
//! A scan reads the page table run by run, and holds the address space's mutex for a bounded part
//! of the range at a time. A protecting scan also blocks faults in that part. No write is therefore
//! lost: after a scan has reported and protected a page, the next scan reports every later write to
//! it.

use crate::Memory;
use crate::table::PageTable;
use crate::table::look;
use arrayvec::ArrayVec;
use bitflags::bitflags;

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, Arch, Level, Marker};
use crate::error::{Error, Failure};
use crate::interrupt;
use crate::platform::Platform;
use crate::table::look::{MappedRun, Stretch};
use crate::vma::MappingFlags;

use crate::space::AddressSpace;
use crate::space::op::Op;
use crate::space::userfault::protect;

bitflags! {
    /// The categories of a page (`PAGE_IS_*`, with the same bits).
    ///
    /// # Context
    /// Context: any.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct PageCategories: u64 {
        /// A scan may protect the page. It is registered with a userfaultfd that lifts the
        /// protection of written pages ([`crate::UserfaultFeatures::WP_ASYNC`]).
        const PROTECTABLE = 1 << 0;
        /// The page is not protected: it was written since its last protection, or was never
        /// protected.
        const WRITTEN = 1 << 1;
        /// The page is mapped and belongs to an object.
        const FILE = 1 << 2;
        /// The page is mapped.
        const PRESENT = 1 << 3;
        /// The page is in swap, or its entry is a marker.
        const SWAPPED = 1 << 4;
        /// The page is the zero page.
        const ZERO = 1 << 5;
        /// A huge leaf maps the page.
        const HUGE = 1 << 6;
        /// The page was written since the soft-dirty bits were last cleared.
        const SOFT_DIRTY = 1 << 7;
        /// The page is a guard.
        const GUARD = 1 << 8;
    }
}

/// A request for a scan (`struct pm_scan_arg`).
///
/// ```
/// use bindery::addr::VirtRange;
/// use bindery::{PageCategories, PageScan};
///
/// /// The pages that were written since the last such scan.
/// fn written(range: VirtRange) -> PageScan {
///     PageScan {
///         required: PageCategories::WRITTEN,
///         reported: PageCategories::WRITTEN,
///         protects: true,
///         ..PageScan::of(range)
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageScan {
    /// The range to scan, in whole pages.
    pub range: VirtRange,
    /// Categories that are inverted before pages are matched.
    pub inverted: PageCategories,
    /// Categories that a matching page must all belong to, after the inversion.
    pub required: PageCategories,
    /// Categories; a matching page must belong to at least one of them, after the inversion. Empty
    /// for no such condition.
    pub any_of: PageCategories,
    /// Categories to report.
    pub reported: PageCategories,
    /// Whether to write-protect matching pages. The scan skips mappings that it cannot protect (see
    /// [`PageCategories::PROTECTABLE`]).
    pub protects: bool,
    /// Whether a mapping that cannot be protected ends the scan with an error instead.
    pub refuses_others: bool,
    /// The maximum number of pages to report. Has no effect on a scan without regions.
    pub maximum_pages: u64,
}

impl PageScan {
    /// A scan that matches all pages of a range.
    ///
    /// Context: any.
    pub fn of(range: VirtRange) -> Self {
        Self {
            range,
            inverted: PageCategories::empty(),
            required: PageCategories::empty(),
            any_of: PageCategories::empty(),
            reported: PageCategories::all(),
            protects: false,
            refuses_others: false,
            maximum_pages: u64::MAX,
        }
    }

    fn matches(&self, categories: PageCategories) -> bool {
        let counting = categories ^ self.inverted;
        counting.contains(self.required)
            && (self.any_of.is_empty() || counting.intersects(self.any_of))
    }
}

/// Consecutive matching pages with the same reported categories (`struct page_region`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageRegion {
    /// The addresses of the pages.
    pub range: VirtRange,
    /// The reported categories.
    pub categories: PageCategories,
}

/// A buffer for the regions that a scan reports.
///
/// ```
/// use bindery::{AddressSpace, Error, PageRegion, PageRegions, PageScan, Platform};
///
/// fn first<P: Platform>(
///     space: &AddressSpace<'_, P>,
///     scan: &PageScan,
/// ) -> Result<Option<PageRegion>, Error> {
///     let mut room = [PageRegion::default()];
///     let mut regions = PageRegions::new(&mut room);
///     space.scan_pages(scan, Some(&mut regions))?;
///     Ok(regions.found().first().copied())
/// }
/// ```
#[derive(Debug)]
pub struct PageRegions<'a> {
    room: &'a mut [PageRegion],
    count: usize,
}

impl<'a> PageRegions<'a> {
    /// An empty buffer.
    ///
    /// Context: any.
    pub fn new(room: &'a mut [PageRegion]) -> Self {
        Self { room, count: 0 }
    }

    /// A buffer with one region, which the next scan may extend.
    ///
    /// Context: any.
    pub fn after(room: &'a mut [PageRegion], region: PageRegion) -> Self {
        let count = room.first_mut().map_or(0, |first| {
            *first = region;
            1
        });
        Self { room, count }
    }

    /// The reported regions.
    ///
    /// Context: any.
    pub fn found(&self) -> &[PageRegion] {
        &self.room[..self.count]
    }

    /// Whether the buffer is full.
    ///
    /// Context: any.
    pub fn is_full(&self) -> bool {
        self.count == self.room.len()
    }

    /// Adds a region, or extends the last one. Returns `false` if the buffer is full.
    fn add(&mut self, region: PageRegion) -> bool {
        if let Some(last) = self.room[..self.count].last_mut()
            && last.range.end() == region.range.start()
            && last.categories == region.categories
        {
            last.range = VirtRange::raw(last.range.start().0, region.range.end().0);
            return true;
        }
        let Some(slot) = self.room.get_mut(self.count) else { return false };
        *slot = region;
        self.count += 1;
        true
    }
}

/// The result of a scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scanned {
    /// The end of the scanned part: the end of the range, the first matching page that did not fit,
    /// or the first matching page that could not be protected for lack of memory.
    pub end: VirtAddr,
    /// The number of reported pages.
    pub pages: u64,
}

/// The number of ranges that a scan collects before it protects them.
const MATCHES: usize = 64;
/// The number of level-1 tables that a scan reads before it releases the mutex.
const TABLES: u64 = 64;

/// The state of a scan.
struct PagemapScan<'a, 'r> {
    scan: &'a PageScan,
    regions: Option<&'a mut PageRegions<'r>>,
    pages: u64,
    /// The first matching page that cannot be reported.
    stopped: Option<VirtAddr>,
    /// The start of the unscanned part.
    at: VirtAddr,
    /// Matching ranges that must be protected before the scan continues.
    matches: ArrayVec<VirtRange, MATCHES>,
    /// `matches` is full. The scan resumes at this address.
    resumes: Option<VirtAddr>,
}

impl PagemapScan<'_, '_> {
    fn is_over(&self) -> bool {
        self.stopped.is_some() || self.resumes.is_some()
    }

    /// Reports pages with the same categories if they match and fit.
    fn report(&mut self, range: VirtRange, categories: PageCategories) {
        if range.is_empty() || self.is_over() || !self.scan.matches(categories) {
            return;
        }
        if self.scan.protects && self.matches.is_full() {
            self.resumes = Some(range.start());
            return;
        }
        let mut part = range;
        if let Some(regions) = &mut self.regions {
            let left = self.scan.maximum_pages - self.pages;
            let pages = range.pages().min(left);
            part = VirtRange::raw(range.start().0, range.start().0 + (pages << PAGE_SHIFT));
            let categories = categories & self.scan.reported;
            if pages == 0 || !regions.add(PageRegion { range: part, categories }) {
                self.stopped = Some(range.start());
                return;
            }
            self.pages += pages;
        }
        if part != range {
            self.stopped = Some(part.end());
        }
        if self.scan.protects {
            self.matches.push(part);
        }
    }
}

impl PageRegions<'_> {
    /// Removes the regions from `at` on. Returns the number of removed pages.
    #[cold]
    fn truncate(&mut self, at: VirtAddr) -> u64 {
        let mut pages = 0;
        while let Some(last) = self.room[..self.count].last_mut()
            && last.range.end() > at
        {
            let start = last.range.start();
            pages += VirtRange::raw(start.max(at).0, last.range.end().0).pages();
            if start < at {
                last.range = VirtRange::raw(start.0, at.0);
            } else {
                self.count -= 1;
            }
        }
        pages
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Reports the matching pages of a range, and protects them if the request asks for it
    /// (`ioctl(PAGEMAP_SCAN)`). Ends when `regions` is full. Without `regions`, scans the whole
    /// range and reports nothing. Unmapped pages do not match.
    ///
    /// After its next write, a protected page is [`PageCategories::WRITTEN`] again. Pages without
    /// an entry count as written.
    ///
    /// Context: may sleep. Complexity: linear in the number of runs. The mutex is held for 64
    /// tables at a time; a protecting scan makes one invalidation per 64 tables.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] for a mapping that cannot be protected, with
    /// [`PageScan::refuses_others`]; [`Error::Interrupted`] for a fatal signal. Pages reported
    /// before either may be protected. [`Error::OutOfMemory`] if memory runs out before any page is
    /// protected. If memory runs out later, the scan ends at that point without an error
    /// ([`Scanned::end`]): every protected page is reported, and no page beyond the end is
    /// protected.
    pub fn scan_pages(
        &self,
        scan: &PageScan,
        regions: Option<&mut PageRegions<'_>>,
    ) -> Result<Scanned, Error> {
        scan_pages(self, scan, regions)
    }
}

fn scan_pages<P: Platform>(
    space: &AddressSpace<'_, P>,
    scan: &PageScan,
    regions: Option<&mut PageRegions<'_>>,
) -> Result<Scanned, Error> {
    let start = scan.range.start();
    let mut walk = PagemapScan {
        scan,
        regions,
        pages: 0,
        at: start,
        stopped: None,
        matches: ArrayVec::new(),
        resumes: None,
    };
    let end = scan.range.end().min(space.limit());
    while walk.at < end {
        // Each attempt scans one part only: pages that an attempt has protected would not match in
        // the next attempt.
        let scanned = space.page_table.memory.retry(|| {
            interrupt::check(space.platform())?;
            space.operate(|op| scan_part(op, end, &mut walk))
        });
        match scanned {
            Ok(()) => {}
            // The next scan returns the error.
            Err(Error::OutOfMemory) if walk.at > start => walk.stopped = Some(walk.at),
            Err(error) => return Err(error),
        }
        if let Some(end) = walk.stopped {
            return Ok(Scanned { end, pages: walk.pages });
        }
    }
    Ok(Scanned { end: scan.range.end(), pages: walk.pages })
}

/// Scans the next part, up to `end` at most. If it fails for lack of memory, `walk` ends before the
/// first page that could not be protected.
fn scan_part<P: Platform>(
    op: &mut Op<'_, '_, P>,
    end: VirtAddr,
    walk: &mut PagemapScan<'_, '_>,
) -> Result<(), Failure> {
    walk.resumes = None;
    let range = VirtRange::raw(walk.at.0, end.0);
    let Some(vma) = op.vmas.first_in(range) else {
        walk.at = range.end();
        return Ok(());
    };
    let part = vma.range().intersection(range);
    let protectable = protect::lifts_unseen(vma);
    if !protectable && walk.scan.refuses_others {
        return Err(Error::AccessDenied.into());
    }
    if vma.has(MappingFlags::FRAMES) {
        walk.at = part.end();
        return Ok(());
    }
    let mut common = PageCategories::empty();
    common.set(PageCategories::PROTECTABLE, protectable);
    common.set(PageCategories::SOFT_DIRTY, vma.has(MappingFlags::SOFT_DIRTY));
    if !walk.scan.protects {
        walk.at = scan_tables(op.edit.table(), part, common, walk);
        return Ok(());
    }
    if !protectable {
        walk.at = part.end();
        return Ok(());
    }
    // Excludes faults, as `protect_front` requires.
    let locked = vma.lock_write(op.platform());
    let end = scan_tables(op.edit.table(), part, common, walk);
    let mut protect = |range: VirtRange| {
        let reached = protect::protect_front(&mut op.edit, range);
        (reached < range.end()).then_some(reached)
    };
    let short = walk.matches.drain(..).find_map(&mut protect);
    op.edit.flush();
    drop(locked);
    let Some(reached) = short else {
        walk.at = end;
        return Ok(());
    };
    if let Some(regions) = &mut walk.regions {
        // The caller's buffer may already contain regions of other ranges.
        walk.pages = walk.pages.saturating_sub(regions.truncate(reached));
    }
    walk.stopped = None;
    walk.at = reached;
    Err(Failure::NoMemory)
}

fn categories<P: Platform>(memory: &Memory<P>, stretch: &Stretch<P::Arch>) -> PageCategories {
    let mut categories = PageCategories::empty();
    let (protected, soft_dirty) = match stretch.what {
        MappedRun::Pages { first, folio, attributes } => {
            categories |= PageCategories::PRESENT;
            let of_object = folio.is_some_and(|folio| memory.frames.folio(folio).is_of_object());
            categories.set(PageCategories::FILE, of_object);
            categories.set(PageCategories::ZERO, memory.is_zero(first));
            categories.set(PageCategories::HUGE, stretch.level > Level::PTE);
            (attributes.userfault, attributes.soft_dirty)
        }
        MappedRun::Absent(absent) => {
            categories |= PageCategories::SWAPPED;
            let marker = |marker| absent == Absent::Marker(marker);
            categories.set(PageCategories::GUARD, marker(Marker::Guard));
            match absent {
                Absent::Swap { userfault, soft_dirty, .. } => (userfault, soft_dirty),
                Absent::Marker(_) | Absent::ProtNone { .. } => {
                    (marker(Marker::UserfaultWriteProtect), false)
                }
            }
        }
    };
    categories.set(PageCategories::WRITTEN, !protected);
    categories.set(PageCategories::SOFT_DIRTY, soft_dirty);
    categories
}

/// Scans the front of a part of a mapping whose pages have the `common` categories. Returns the end
/// of the scanned front.
fn scan_tables<P: Platform>(
    page_table: &PageTable<'_, P>,
    part: VirtRange,
    common: PageCategories,
    walk: &mut PagemapScan<'_, '_>,
) -> VirtAddr {
    let vacant = common | PageCategories::WRITTEN;
    let size = TABLES * P::Arch::PMD.span();
    let Some(mapped) = page_table.first_part(part, size, None) else {
        walk.report(part, vacant);
        return walk.resumes.unwrap_or(part.end());
    };
    let mut at = part.start();
    look::survey_while(page_table, mapped, |stretch| {
        walk.report(VirtRange::raw(at.0, stretch.range.start().0), vacant);
        walk.report(stretch.range, common | categories(page_table.memory, stretch));
        at = stretch.range.end();
        !walk.is_over()
    });
    walk.report(VirtRange::raw(at.0, mapped.end().0), vacant);
    walk.resumes.unwrap_or(mapped.end())
}
