//! `mincore(2)`.

use arrayvec::ArrayVec;

use crate::addr::{PAGE_SHIFT, PageRange, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Kind};
use crate::error::Error;
use crate::interrupt;
use crate::object::{ObjectState, pages};
use crate::platform::Platform;
use crate::swap;
use crate::table::PageTable;
use crate::table::locking::SPAN_ENTRIES;
use crate::table::look;

use super::range::page_range;
use crate::space::AddressSpace;
use crate::vma::{MappingFlags, Vma};

/// The maximum number of runs of pages that one look at an object's index collects.
const RUNS: usize = 32;

/// Whether pages can be accessed without waiting for their content.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Error, Platform, Residence};
///
/// fn resident<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Result<u64, Error> {
///     let mut pages = 0;
///     space.mincore(at, 1 << 20, |residence, count| match residence {
///         Residence::Resident => pages += count,
///         Residence::Absent => {}
///     })?;
///     Ok(pages)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residence {
    /// In memory: mapped, in the page index of the mapping's object, or in the swap cache.
    Resident,
    /// Not in memory.
    Absent,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Reports the pages of `length` bytes (rounded up) at `start` that are in memory. Calls `tell`
    /// for runs of pages with the same residence, in ascending order, with the length in pages.
    /// `tell` may run in a read section, so it must neither sleep nor access the program's memory.
    /// All pages of a file count as resident if the program neither owns the file nor may write it
    /// ([`crate::FileAccess::OWNER`]).
    ///
    /// Context: may sleep. Complexity: linear in the number of entries in the range; ranges without
    /// a table cost nothing.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::OutOfRange`]; [`Error::NotMapped`] at the first hole;
    /// [`Error::Interrupted`] if a fatal signal is pending before a mapping. Runs before the last
    /// two are reported. (Linux does not check for signals.)
    pub fn mincore(
        &self,
        start: VirtAddr,
        length: u64,
        tell: impl FnMut(Residence, u64),
    ) -> Result<(), Error> {
        mincore(self, page_range::<P::Arch>(start, length)?, tell)
    }

    /// The end of the mapping that contains `addr`; `None` if no mapping does.
    ///
    /// Context: may sleep. Complexity: logarithmic in the number of mappings.
    pub fn mapping_end(&self, addr: VirtAddr) -> Option<VirtAddr> {
        self.vmas.lock().view().at(addr).map(|vma| VirtAddr(vma.end()))
    }
}

fn mincore<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
    tell: impl FnMut(Residence, u64),
) -> Result<(), Error> {
    let limit = space.limit();
    if range.end() > limit {
        return Err(Error::OutOfRange { limit });
    }
    let mut report = MincoreReport { page_table: &space.page_table, tell };
    let vmas = space.vmas.lock();
    let mut at = range.start();
    while at < range.end() {
        interrupt::check(space.platform())?;
        let vma = vmas.view().at(at).ok_or(Error::NotMapped(at))?;
        let part = VirtRange::raw(at.0, vma.end().min(range.end().0));
        if vma.has(MappingFlags::HIDES_RESIDENCE) {
            (report.tell)(Residence::Resident, part.pages());
        } else if vma.has(MappingFlags::FRAMES) {
            (report.tell)(Residence::Absent, part.pages());
        } else {
            report.part(vma, part);
        }
        at = part.end();
    }
    Ok(())
}

/// A report of a call to its caller.
struct MincoreReport<'r, 'm, P: Platform, T> {
    page_table: &'r PageTable<'m, P>,
    /// Receives a residence and the number of pages with that residence.
    tell: T,
}

impl<P: Platform, T: FnMut(Residence, u64)> MincoreReport<'_, '_, P, T> {
    /// Reports a part of one mapping. Looks pages up in the object outside the read sections in
    /// which it reads the table.
    fn part(&mut self, vma: &Vma, part: VirtRange) {
        let page_table = self.page_table;
        let memory = page_table.memory;
        let mut at = part.start();
        while at < part.end() {
            let tell = &mut self.tell;
            // The end of the unmapped pages from `at` on.
            let mut vacant = at;
            look::look_by_kind(page_table, VirtRange::raw(at.0, part.end().0), |looked| {
                let stretch = looked.range;
                let residence = match looked.node.level.kind(looked.raw) {
                    Kind::Leaf => Some(Residence::Resident),
                    Kind::Absent => match P::Arch::decode_absent(looked.raw) {
                        Some(Absent::ProtNone { .. }) => Some(Residence::Resident),
                        Some(Absent::Marker(_)) => None,
                        Some(Absent::Swap { device, slot, .. }) => {
                            // A huge entry refers to the first of its slots.
                            let span = looked.node.level.span();
                            let first = slot + ((stretch.start().0 & (span - 1)) >> PAGE_SHIFT);
                            let mut slots = first..first + stretch.pages();
                            let is_resident = |slot| swap::is_slot_resident(memory, device, slot);
                            Some(if slots.all(is_resident) {
                                Residence::Resident
                            } else {
                                Residence::Absent
                            })
                        }
                        None => Some(Residence::Absent),
                    },
                    Kind::Empty | Kind::Table => None,
                };
                match residence {
                    None => vacant = stretch.end(),
                    Some(_) if vacant > at => return false,
                    Some(residence) => {
                        tell(residence, stretch.pages());
                        (at, vacant) = (stretch.end(), stretch.end());
                    }
                }
                true
            });
            if vacant > at {
                self.object(vma, VirtRange::raw(at.0, vacant.0));
                at = vacant;
            }
        }
    }

    /// Reports `stretch`, which has no entries, although the object may hold its pages.
    fn object(&mut self, vma: &Vma, stretch: VirtRange) {
        let Some(object) = vma.object() else {
            return (self.tell)(Residence::Absent, stretch.pages());
        };
        let memory = self.page_table.memory;
        let first = vma.page_offset_of(stretch.start());
        let mut pages = PageRange::from_count(first, stretch.pages());
        while pages.first < pages.end {
            // Limits the time for which the index is locked.
            let most = pages.end.min(pages.first + u64::from(SPAN_ENTRIES));
            let mut runs = ArrayVec::<_, RUNS>::new();
            let part = PageRange { first: pages.first, end: most };
            let done = pages::resident_runs(memory, object, part, &mut runs);
            let mut resident = PageRange { first: pages.first, end: pages.first };
            for run in &runs {
                if run.page > resident.end {
                    self.resident(resident);
                    self.not_in_index(object, PageRange { first: resident.end, end: run.page });
                    resident = PageRange { first: run.page, end: run.page };
                }
                resident.end += u64::from(run.count);
            }
            self.resident(resident);
            // A hole may extend far beyond the limit.
            let rest = if done == most { pages.end } else { done };
            let hole = pages::hole(memory, object, done, rest - done);
            pages.first = done + hole;
            self.not_in_index(object, PageRange { first: resident.end, end: pages.first });
        }
    }

    fn resident(&mut self, pages: PageRange) {
        if pages.first < pages.end {
            (self.tell)(Residence::Resident, pages.end - pages.first);
        }
    }

    /// Reports pages that the object's index does not have in memory.
    fn not_in_index(&mut self, object: &ObjectState, pages: PageRange) {
        let memory = self.page_table.memory;
        let mut page = pages.first;
        while page < pages.end {
            let left = pages.end - page;
            let (resident, count) = match pages::hole(memory, object, page, left) {
                0 => {
                    let most = left.min(u64::from(SPAN_ENTRIES));
                    pages::cached_run(memory, object, page, most).unwrap_or((false, 1))
                }
                hole => (false, hole),
            };
            (self.tell)(if resident { Residence::Resident } else { Residence::Absent }, count);
            page += count;
        }
    }
}
