//! Scans: which pages of a range are in some categories, and protection of those that are, in one
//! step (`ioctl(PAGEMAP_SCAN)`).
//!
//! A scan goes run by run, and holds the address space's mutex for a bounded stretch at a time. One
//! that protects keeps faults out of the stretch: of a page that it reports as written and protects,
//! each later write is reported by the next scan.

use crate::Memory;
use crate::table::PageTable;
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
    /// What a scan knows of a page (`PAGE_IS_*`, with the same bits).
    ///
    /// # Context
    /// Context: any.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct PageCategories: u64 {
        /// A scan may protect it: it is registered with a userfaultfd that lifts the protection of
        /// written pages ([`crate::UserfaultFeatures::WP_ASYNC`]).
        const PROTECTABLE = 1 << 0;
        /// It is not protected: it was written since it was, or never was.
        const WRITTEN = 1 << 1;
        /// It is mapped, and of an object.
        const FILE = 1 << 2;
        /// It is mapped.
        const PRESENT = 1 << 3;
        /// It is in swap, or a marker stands in its place.
        const SWAPPED = 1 << 4;
        /// It is the zero page.
        const ZERO = 1 << 5;
        /// A huge leaf maps it.
        const HUGE = 1 << 6;
        /// It was written since soft-dirty was last cleared.
        const SOFT_DIRTY = 1 << 7;
        /// It is a guard.
        const GUARD = 1 << 8;
    }
}

/// What a scan looks for, and what it does (`struct pm_scan_arg`).
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
    /// Where: whole pages.
    pub range: VirtRange,
    /// Categories that count where a page does not have them.
    pub inverted: PageCategories,
    /// Categories of which all must count.
    pub required: PageCategories,
    /// Categories of which one must count, if there are any.
    pub any_of: PageCategories,
    /// Categories that are reported.
    pub reported: PageCategories,
    /// Whether matching pages are write-protected. Mappings that cannot be protected so
    /// ([`PageCategories::PROTECTABLE`]) are passed over.
    pub protects: bool,
    /// Whether such mappings end the scan instead.
    pub refuses_others: bool,
    /// How many pages are reported at the most; not looked at where nothing is reported.
    pub maximum_pages: u64,
}

impl PageScan {
    /// A scan of a range, for all pages.
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

/// Matching pages that follow each other and are reported alike (`struct page_region`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageRegion {
    /// Where.
    pub range: VirtRange,
    /// Those of their categories that are reported.
    pub categories: PageCategories,
}

/// Room for the regions that a scan reports.
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
    /// Room in which there is nothing yet.
    ///
    /// Context: any.
    pub fn new(room: &'a mut [PageRegion]) -> Self {
        Self { room, count: 0 }
    }

    /// Room in which there is one region, which a scan that goes on may lengthen.
    ///
    /// Context: any.
    pub fn after(room: &'a mut [PageRegion], region: PageRegion) -> Self {
        let count = room.first_mut().map_or(0, |first| {
            *first = region;
            1
        });
        Self { room, count }
    }

    /// What was reported.
    ///
    /// Context: any.
    pub fn found(&self) -> &[PageRegion] {
        &self.room[..self.count]
    }

    /// Whether there is no room left.
    ///
    /// Context: any.
    pub fn is_full(&self) -> bool {
        self.count == self.room.len()
    }

    /// Says whether there was room.
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

/// How far a scan has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scanned {
    /// The end of the range, or the first matching page that was not reported any more; or where
    /// there was no memory to protect what matches.
    pub end: VirtAddr,
    /// Pages that were reported.
    pub pages: u64,
}

/// Stretches to be protected that a scan remembers.
const MATCHES: usize = 64;
/// Tables of level 1 that a scan looks at before it lets others go on.
const TABLES: u64 = 64;

/// A scan under way.
struct Walk<'a, 'r> {
    scan: &'a PageScan,
    regions: Option<&'a mut PageRegions<'r>>,
    pages: u64,
    /// The first matching page that cannot be reported.
    stopped: Option<VirtAddr>,
    /// Where to go on.
    at: VirtAddr,
    /// What is to be protected before anything else is looked at.
    matches: ArrayVec<VirtRange, MATCHES>,
    /// There was no room for more of them: the scan goes on from here.
    resumes: Option<VirtAddr>,
}

impl Walk<'_, '_> {
    fn is_over(&self) -> bool {
        self.stopped.is_some() || self.resumes.is_some()
    }

    /// Reports pages that are alike, if they match and there is room.
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
    /// Takes back what was reported from `at` on, and says how many pages that was.
    #[cold]
    fn take_back(&mut self, at: VirtAddr) -> u64 {
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
    /// Looks at the pages of a range, reports those that match, and protects them if that is asked
    /// for (`ioctl(PAGEMAP_SCAN)`). Ends where there is no room for more. Without `regions`,
    /// nothing is reported, and nothing limits the scan. Pages in no mapping do not match.
    ///
    /// What is protected is reported as [`PageCategories::WRITTEN`] again after its next write.
    /// Pages without an entry count as written.
    ///
    /// Context: may sleep. Complexity: in the runs. The mutex is held for 64 tables at a time; a
    /// scan that protects makes one invalidation for them.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] for a mapping that cannot be protected, if such are refused;
    /// [`Error::Interrupted`] for a fatal signal; what was reported before either may be protected.
    /// [`Error::OutOfMemory`] if nothing can be protected. A scan that could protect something
    /// before the memory ran out ends there ([`Scanned::end`]): what was protected is reported, and
    /// nothing behind it is protected.
    pub fn scan_pages(
        &self,
        scan: &PageScan,
        regions: Option<&mut PageRegions<'_>>,
    ) -> Result<Scanned, Error> {
        let start = scan.range.start();
        let mut walk = Walk {
            scan,
            regions,
            pages: 0,
            at: start,
            stopped: None,
            matches: ArrayVec::new(),
            resumes: None,
        };
        let end = scan.range.end().min(self.limit());
        while walk.at < end {
            // Part by part: what was protected would not match once more.
            let scanned = self.page_table.memory.retry(|| {
                interrupt::check(self.platform())?;
                self.operate(|op| scan_part(op, end, &mut walk))
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
}

/// Goes on up to `end` at most. Where it fails for want of memory, all is as if the walk had
/// come to where it is, and not looked any further.
fn scan_part<P: Platform>(
    op: &mut Op<'_, '_, P>,
    end: VirtAddr,
    walk: &mut Walk<'_, '_>,
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
    // Keeps faults out, as `userfault_protect` demands.
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
        // Never less than nothing, whatever the caller's regions were before.
        walk.pages = walk.pages.saturating_sub(regions.take_back(reached));
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

/// Scans the front of a part of a mapping, whose pages have the `common` categories.
fn scan_tables<P: Platform>(
    page_table: &PageTable<'_, P>,
    part: VirtRange,
    common: PageCategories,
    walk: &mut Walk<'_, '_>,
) -> VirtAddr {
    let vacant = common | PageCategories::WRITTEN;
    let size = TABLES * P::Arch::PMD.span();
    let Some(mapped) = page_table.first_part(part, size, None) else {
        walk.report(part, vacant);
        return walk.resumes.unwrap_or(part.end());
    };
    let mut at = part.start();
    page_table.survey_while(mapped, |stretch| {
        walk.report(VirtRange::raw(at.0, stretch.range.start().0), vacant);
        walk.report(stretch.range, common | categories(page_table.memory, stretch));
        at = stretch.range.end();
        !walk.is_over()
    });
    walk.report(VirtRange::raw(at.0, mapped.end().0), vacant);
    walk.resumes.unwrap_or(mapped.end())
}
