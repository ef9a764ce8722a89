//! `/proc/self/pagemap`: a word for each page of the address space.
//!
//! ```text
//! 63      62      61   60..59 58    57            56        55         54 ............ 0
//! present swapped file -      guard write-protect exclusive soft-dirty frame, or device and slot
//! ```

use bindery::addr::{Frame, PAGE_SHIFT, VirtAddr, VirtRange};
use bindery::arch::{Absent, Arch, Attributes, Marker};
use bindery::{AddressSpace, FolioView, MappingFlags, MappingView, PageRunContent, Platform};

use super::sharing::for_each_shared;

const FRAME_MASK: u64 = (1 << 55) - 1;
const SOFT_DIRTY: u64 = 1 << 55;
/// No other entry maps the page.
const EXCLUSIVE: u64 = 1 << 56;
const WRITE_PROTECTED: u64 = 1 << 57;
const GUARD: u64 = 1 << 58;
/// The page belongs to a file or to shared memory.
const FILE: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// The width of the device number in the frame field of a swapped page; the slot number follows.
const DEVICE_BITS: u32 = 5;
/// The device number of markers, which programs see as swapped pages.
const MARKERS: u64 = 31;

/// Whether programs see the physical addresses of their pages. (Linux: only programs with
/// `CAP_SYS_ADMIN`.)
///
/// ```
/// use bindery_linux::proc::{PhysicalAddresses, pagemap};
/// use bindery::{FolioView, MappingView, PageRunContent, AddressSpace, Platform};
///
/// /// The `pagemap` word of one page, as an unprivileged program reads it.
/// fn word<P: Platform>(space: &AddressSpace<'_, P>, page: u64) -> Option<u64> {
///     let mut word = [0];
///     (pagemap(space, page, PhysicalAddresses::Withheld, &mut word) == 1).then_some(word[0])
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PhysicalAddresses {
    /// No: the field reads as zero.
    #[default]
    Withheld,
    /// Yes.
    Shown,
}

impl PhysicalAddresses {
    fn field(self, value: u64) -> u64 {
        if self == Self::Shown { value & FRAME_MASK } else { 0 }
    }
}

/// Fills `into` with the words of `/proc/self/pagemap` from number `first_page` (an address divided
/// by 4,096) on. Returns the number of words, which is less than `into.len()` only at the end of
/// user space, where the file ends. Pages outside of mappings read as zero.
///
/// Context: may sleep. Complexity: linear in the words; the page table is read in runs. The address
/// space's mutex is held for 512 pages at a time.
pub fn pagemap<P: Platform>(
    space: &AddressSpace<'_, P>,
    first_page: u64,
    addresses: PhysicalAddresses,
    into: &mut [u64],
) -> usize {
    let pages = (P::Arch::USER_END >> PAGE_SHIFT).saturating_sub(first_page);
    let count = usize::try_from(pages).map_or(into.len(), |pages| pages.min(into.len()));
    let into = &mut into[..count];
    let mut done = 0;
    while done < count {
        let words = &mut into[done..];
        let start = VirtAddr((first_page + done as u64) << PAGE_SHIFT);
        let end = start + ((words.len() as u64) << PAGE_SHIFT);
        let told = space.view_mapping(start, |view| {
            let gap = super::range(start, view.range().start().clamp(start, end));
            if !gap.is_empty() {
                return fill_gap(words, gap.pages());
            }
            let part_end = view.range().end().min(end).min(next_table::<P::Arch>(start));
            let part = super::range(start, part_end);
            Told { view, addresses, part }.fill(&mut words[..part.pages() as usize])
        });
        done += told.unwrap_or_else(|| fill_gap(&mut into[done..], u64::MAX));
    }
    count
}

/// The bits of a page that come from its entry.
fn common_of(attributes: Attributes) -> u64 {
    let flag = |set: bool, bit: u64| if set { bit } else { 0 };
    PRESENT | flag(attributes.soft_dirty, SOFT_DIRTY) | flag(attributes.userfault, WRITE_PROTECTED)
}

/// The end of the level-1 table that covers `at`. The mutex is held for one such table at a time.
fn next_table<A: Arch>(at: VirtAddr) -> VirtAddr {
    VirtAddr((at.0 | (A::PMD.span() - 1)).saturating_add(1))
}

/// Zeroes the words of `pages` unmapped pages. Returns the number of words.
fn fill_gap(words: &mut [u64], pages: u64) -> usize {
    let count = usize::try_from(pages).map_or(words.len(), |pages| pages.min(words.len()));
    words[..count].fill(0);
    count
}

/// A part of a mapping to report.
struct Told<'a, 'm, P: Platform> {
    view: &'a MappingView<'a, 'm, P>,
    addresses: PhysicalAddresses,
    part: VirtRange,
}

impl<P: Platform> Told<'_, '_, P> {
    /// Fills the words of the part and returns their number.
    fn fill(&self, words: &mut [u64]) -> usize {
        // A soft-dirty mapping makes all its pages soft-dirty, even those with empty entries.
        let soft_dirty = self.view.flags().contains(MappingFlags::SOFT_DIRTY);
        let everywhere = if soft_dirty { SOFT_DIRTY } else { 0 };
        words.fill(everywhere);
        if self.view.flags().contains(MappingFlags::FRAMES) {
            return words.len();
        }
        self.view.for_each_run(self.part, |run| {
            let first = (run.range().start().0 - self.part.start().0) >> PAGE_SHIFT;
            let first = first as usize;
            let words = &mut words[first..first + run.range().pages() as usize];
            match run.content() {
                PageRunContent::Pages { first, folio: Some(folio), attributes } => {
                    self.tell_pages(words, first, folio, attributes);
                }
                PageRunContent::Pages { first, folio: None, attributes } => {
                    // Every page of a run of zero pages has the same frame. Frames of the huge zero
                    // page, and frames beyond the core's memory, are consecutive.
                    let step = u64::from(!run.is_zero_page());
                    let common = common_of(attributes);
                    for (page, word) in (0..).zip(words.iter_mut()) {
                        *word = common | self.addresses.field(u64::from(first.0) + page * step);
                    }
                }
                PageRunContent::Absent(absent) => self.tell_absent(words, absent),
            }
            if soft_dirty {
                words.iter_mut().for_each(|word| *word |= SOFT_DIRTY);
            }
        });
        words.len()
    }

    fn tell_pages(
        &self,
        words: &mut [u64],
        first: Frame,
        folio: FolioView<'_, P>,
        attributes: Attributes,
    ) {
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        let common = common_of(attributes) | flag(folio.is_of_object(), FILE);
        for_each_shared(folio, first, words.len() as u64, |shared| {
            let common = common | flag(shared.is_private(), EXCLUSIVE);
            let pages = shared.first..shared.first + shared.pages;
            for (page, word) in pages.clone().zip(&mut words[shared.first as usize..]) {
                *word = common | self.addresses.field(u64::from(first.0) + page);
            }
        });
    }

    fn tell_absent(&self, words: &mut [u64], absent: Absent) {
        match absent {
            Absent::Swap { device, slot, soft_dirty, userfault, .. } => {
                let flag = |set: bool, bit: u64| if set { bit } else { 0 };
                let common =
                    SWAPPED | flag(soft_dirty, SOFT_DIRTY) | flag(userfault, WRITE_PROTECTED);
                for (slot, word) in (slot..).zip(words) {
                    let place = u64::from(device) | slot << DEVICE_BITS;
                    *word = common | self.addresses.field(place);
                }
            }
            Absent::Marker(marker) => {
                // Linux's numbers of these markers.
                let (number, flag) = match marker {
                    Marker::UserfaultWriteProtect => (1, WRITE_PROTECTED),
                    Marker::Poison => (2, 0),
                    Marker::Guard => (4, GUARD),
                };
                let place = self.addresses.field(MARKERS | number << DEVICE_BITS);
                words.fill(SWAPPED | flag | place);
            }
            // `for_each_run` reports `PROT_NONE` pages as pages.
            Absent::ProtNone { .. } => {}
        }
    }
}
