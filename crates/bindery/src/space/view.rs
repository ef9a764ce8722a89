//! Views for listings of mappings: one mapping at a time, with its object and its pages in runs.
//!
//! A view is lent to a closure with the mutex held, so the mapping stays. A run is lent with its
//! tables locked, so its folio stays mapped.

use core::fmt;

use crate::Memory;
use crate::addr::{Frame, Order, PAGE_SHIFT, VirtAddr, VirtRange};
use crate::arch::{Absent, Attributes, Level};
use crate::collections::page_tree::PageFlags;
use crate::error::{Error, NoMemory};
use crate::folio::{Folio, OwnerKind};
use crate::object::{Accounting, ObjectState, SegmentId, pages};
use crate::platform::Platform;
use crate::swap;
use crate::table::look;
use crate::table::look::{MappedRun, Stretch};
use crate::table::rewrite::use_bits::UseBits;
use crate::vma::Vma;

use super::op::Op;
use super::{AddressSpace, Mapping, MappingFlags};

/// A mapping that [`AddressSpace::view_mapping`] lends, while it holds the address space's mutex.
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, PageRunContent, Platform};
///
/// /// The bytes of the first mapping that are in memory.
/// fn resident_bytes<P: Platform>(space: &AddressSpace<'_, P>) -> Option<u64> {
///     space.view_mapping(VirtAddr(0), |view| {
///         let mut bytes = 0;
///         view.for_each_run(view.range(), |run| {
///             if matches!(run.content(), PageRunContent::Pages { .. }) {
///                 bytes += run.range().len();
///             }
///         });
///         bytes
///     })
/// }
/// ```
///
/// The closure may keep the values that it reads:
///
/// ```
/// # use bindery::{AddressSpace, Platform, addr::VirtAddr};
/// fn first<P: Platform>(space: &AddressSpace<'_, P>) {
///     let mut kept = None;
///     space.view_mapping(VirtAddr(0), |view| kept = Some(view.range()));
/// }
/// ```
///
/// but not the view, which a later call may make stale:
///
/// ```compile_fail,E0521
/// # use bindery::{AddressSpace, Platform, addr::VirtAddr};
/// fn first<P: Platform>(space: &AddressSpace<'_, P>) {
///     let mut kept = None;
///     space.view_mapping(VirtAddr(0), |view| kept = Some(view));
/// }
/// ```
///
/// # Context
/// Context: any, within the closure. Only [`MappingView::for_each_run`] spins.
pub struct MappingView<'a, 'm, P: Platform> {
    space: &'a AddressSpace<'m, P>,
    vma: &'a Vma,
}

impl<'a, P: Platform> MappingView<'a, '_, P> {
    /// The addresses of the mapping.
    #[inline]
    pub fn range(&self) -> VirtRange {
        self.vma.range()
    }

    /// The flags of the mapping.
    #[inline]
    pub fn flags(&self) -> MappingFlags {
        self.vma.flags()
    }

    /// A copy of the mapping's description.
    #[inline]
    pub fn mapping(&self) -> Mapping {
        Mapping::of(self.vma)
    }

    /// The mapping's object; `None` for anonymous memory.
    #[inline]
    pub fn object(&self) -> Option<ObjectView<'a, P>> {
        let memory = self.space.page_table.memory;
        self.vma.object().map(|state| ObjectView { memory, state })
    }

    /// The number of the page at `addr` in the object, or among the anonymous pages. Meaningful for
    /// addresses of the mapping.
    #[inline]
    pub fn page_offset_of(&self, addr: VirtAddr) -> u64 {
        self.vma.page_offset().wrapping_add(addr.0.wrapping_sub(self.vma.start()) >> PAGE_SHIFT)
    }

    /// Whether the policy allows a folio above order 0 that fits somewhere in the mapping (Linux:
    /// `THPeligible`).
    pub fn may_use_large_folios(&self) -> bool {
        let (space, vma) = (self.space, self.vma);
        let memory = space.page_table.memory;
        let orders = match vma.object() {
            Some(object) => object.orders(memory, vma.flags()),
            None => memory.folio_policy().orders(vma.flags().huge_advice()),
        };
        let mut orders = space.settings.used_orders(orders, vma.flags());
        let range = vma.range();
        let fits = |order: Order| {
            let size = order.bytes();
            // The index of an object's page fixes its place.
            let shift = (range.start().0 >> PAGE_SHIFT).wrapping_sub(vma.page_offset());
            let congruent = vma.is_anonymous() || shift.trailing_zeros() >= u32::from(order.0);
            let last = range.end().0 & !(size - 1);
            congruent && last.checked_sub(size).is_some_and(|first| first >= range.start().0)
        };
        core::iter::from_fn(|| orders.take_largest()).any(fits)
    }

    /// Calls `f` for each run of non-empty entries in `range`, in ascending order: pages of one
    /// folio with the same attributes, equal markers, or one swapped page. Skips addresses outside
    /// of the mapping.
    ///
    /// Tables are locked during the calls, for at most 1,024 entries at a time. `f` must therefore
    /// not acquire a lock that the embedder holds around calls of the core, and may call only
    /// functions of views.
    ///
    /// Complexity: linear in the number of entries of the range; ranges without a table cost
    /// nothing.
    #[inline]
    pub fn for_each_run(&self, range: VirtRange, mut f: impl FnMut(PageRun<'_, P>)) {
        let page_table = &self.space.page_table;
        let memory = page_table.memory;
        let range = self.vma.range().intersection(range);
        look::survey(page_table, range, |stretch| f(PageRun { memory, stretch }));
    }

    /// The number of entries, in all address spaces, that refer to the slot of a swap area; 0 if
    /// the slot does not exist.
    #[inline]
    pub fn slot_entries(&self, area: u8, slot: u64) -> u32 {
        let memory = self.space.page_table.memory;
        swap::state_of(memory, area, slot).map_or(0, |state| state.entries())
    }
}

impl<P: Platform> fmt::Debug for MappingView<'_, '_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.mapping().fmt(f)
    }
}

/// A run of pages with the same attributes ([`MappingView::for_each_run`]).
///
/// # Context
/// Context: any.
pub struct PageRun<'a, P: Platform> {
    memory: &'a Memory<P>,
    stretch: &'a Stretch<P::Arch>,
}

/// The content of a [`PageRun`].
#[derive(Debug)]
pub enum PageRunContent<'a, P: Platform> {
    /// Pages, including those mapped without permissions.
    Pages {
        /// The frame of the first page. The other pages' frames are consecutive, unless
        /// [`PageRun::is_zero_page`] is true.
        first: Frame,
        /// The folio of the pages; `None` for the zero page, the huge zero page, and frames beyond
        /// the core's memory.
        folio: Option<FolioView<'a, P>>,
        /// The attributes of the entries. Accessed and dirty cover the whole contiguous run.
        attributes: Attributes,
    },
    /// A swapped-out page, or markers.
    Absent(Absent),
}

impl<'a, P: Platform> PageRun<'a, P> {
    /// The addresses of the run.
    #[inline]
    pub fn range(&self) -> VirtRange {
        self.stretch.range
    }

    /// The level of the run's entries.
    #[inline]
    pub fn level(&self) -> Level<P::Arch> {
        self.stretch.level
    }

    /// The content of the run.
    #[inline]
    pub fn content(&self) -> PageRunContent<'a, P> {
        match self.stretch.what {
            MappedRun::Pages { first, folio, attributes } => PageRunContent::Pages {
                first,
                folio: folio.map(|folio| FolioView { memory: self.memory, folio }),
                attributes,
            },
            MappedRun::Absent(absent) => PageRunContent::Absent(absent),
        }
    }

    /// Whether each page of the run is the zero page, that is, the same frame.
    #[inline]
    pub fn is_zero_page(&self) -> bool {
        matches!(self.stretch.what, MappedRun::Pages { first, .. } if first == self.memory.zero_frame)
    }
}

impl<P: Platform> fmt::Debug for PageRun<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stretch.fmt(f)
    }
}

/// A folio that stays mapped while its [`PageRun`] is lent.
///
/// # Context
/// Context: any. Complexity: constant, except [`FolioView::exclusive_run`].
pub struct FolioView<'a, P: Platform> {
    memory: &'a Memory<P>,
    folio: Folio,
}

// Derived implementations would require `P: Clone` and `P: Copy`.
impl<P: Platform> Clone for FolioView<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for FolioView<'_, P> {}

impl<P: Platform> FolioView<'_, P> {
    /// The frame of the folio's first page.
    #[inline]
    pub fn first(&self) -> Frame {
        self.folio.head
    }

    /// The number of pages in the folio.
    #[inline]
    pub fn pages(&self) -> u32 {
        self.folio.pages()
    }

    /// The kind of the folio's owner, or of its last owner if an object has dropped the folio.
    #[inline]
    pub fn owner(&self) -> OwnerKind {
        self.memory.frames.folio(self.folio).owner_kind()
    }

    /// Whether the folio belongs to an object (shared memory or a file).
    #[inline]
    pub fn is_of_object(&self) -> bool {
        self.memory.frames.folio(self.folio).is_of_object()
    }

    /// Whether the folio's own state is dirty. Dirty bits of entries are not considered.
    #[inline]
    pub fn is_dirty(&self) -> bool {
        self.memory.frames.folio(self.folio).is_dirty()
    }

    /// Whether reclaim may drop the folio unless it is written again (`MADV_FREE`).
    #[inline]
    pub fn is_lazy(&self) -> bool {
        self.memory.frames.folio(self.folio).is_lazy()
    }

    /// The number of mappings of the folio's pages: one for each page and each entry that maps it.
    #[inline]
    pub fn mappings(&self) -> u32 {
        self.memory.frames.folio(self.folio).mappings()
    }

    /// Whether `page` (an index in the folio) is anon-exclusive, and the number of pages from
    /// `page` on, at most `count`, with the same answer. The number is 0 if `page` is not in the
    /// folio.
    ///
    /// Complexity: linear in the number of pages, 64 at a time.
    #[inline]
    pub fn exclusive_run(&self, page: u32, count: u32) -> (bool, u32) {
        let run = self.memory.frames.folio(self.folio).exclusive().run(page, count);
        (run.exclusive, run.count)
    }
}

impl<P: Platform> fmt::Debug for FolioView<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.folio.fmt(f)
    }
}

/// The object of a lent mapping ([`MappingView::object`]).
///
/// # Context
/// Context: any. Complexity: constant, unless a function says otherwise.
pub struct ObjectView<'a, P: Platform> {
    memory: &'a Memory<P>,
    state: &'a ObjectState,
}

impl<P: Platform> ObjectView<'_, P> {
    /// As [`crate::Object::identity`].
    #[inline]
    pub fn identity(&self) -> u64 {
        self.state.identity()
    }

    /// Whether the object is a file behind a pager.
    #[inline]
    pub fn is_file(&self) -> bool {
        self.state.is_file()
    }

    /// As [`crate::Object::is_secret`].
    #[inline]
    pub fn is_secret(&self) -> bool {
        self.state.is_secret()
    }

    /// The way in which the object's memory counts as committed; [`Accounting::None`] for a file.
    #[inline]
    pub fn accounting(&self) -> Accounting {
        self.state.accounting()
    }

    /// The identity of a segment; `None` unless [`Memory::segment_memory`] created the object.
    #[inline]
    pub fn segment(&self) -> Option<SegmentId> {
        self.state.segment().map(|mark| mark.id)
    }

    /// The number of the object's pages from `first` to `end` that are in swap.
    ///
    /// Complexity: logarithmic in the number of pages, per run of slots; constant if no page is in
    /// swap.
    pub fn swapped_pages(&self, first: u64, end: u64) -> u64 {
        pages::swapped_pages(self.memory, self.state, first, end)
    }

    /// Whether any of the object's pages is in swap.
    #[inline]
    pub fn is_swapped(&self) -> bool {
        self.state.pages.swapped() > 0
    }

    /// The number of the object's pages from `first` to `end` that were written and not saved
    /// since.
    ///
    /// Complexity: logarithmic in the number of pages, per run of dirty pages.
    pub fn dirty_pages(&self, first: u64, end: u64) -> u64 {
        let mut from = first;
        self.state.pages.look(self.memory.platform(), |index| {
            let mut dirty = 0;
            while let Some(run) = index.next_run_with(PageFlags::DIRTY, from, end) {
                dirty += u64::from(run.count);
                from = run.page + u64::from(run.count);
            }
            dirty
        })
    }
}

impl<P: Platform> fmt::Debug for ObjectView<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectView").field("identity", &self.identity()).finish_non_exhaustive()
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Lends the first mapping that ends after `at` to `view`, with the mutex held; `None` if no
    /// mapping does. A listing continues at the end of the last mapping, so operations of other
    /// threads run in between. `view` must not call operations of this address space.
    ///
    /// Context: may sleep. Complexity: logarithmic in the number of mappings.
    #[inline]
    pub fn view_mapping<R>(
        &self,
        at: VirtAddr,
        view: impl FnOnce(&MappingView<'_, '_, P>) -> R,
    ) -> Option<R> {
        let vmas = self.vmas.lock();
        vmas.view().first_ending_after(at.0).map(|vma| view(&MappingView { space: self, vma }))
    }

    /// The peak total size of all mappings (`VmPeak`).
    ///
    /// Context: any.
    pub fn peak_total(&self) -> u64 {
        self.vmas.account().peak_total()
    }

    /// The peak number of resident pages (`VmHWM`, and `ru_maxrss` of `getrusage`). Updated before
    /// each call that removes pages, and by this function. If several CPUs have entered the address
    /// space, each CPU except one may distort the peak by up to 31 pages, and pages that other CPUs
    /// map and unmap during this function may count twice. The result is never below the current
    /// number of resident pages.
    ///
    /// Context: any. Complexity: linear in the number of CPUs that have entered. Acquires no lock.
    pub fn resident_peak(&self) -> u64 {
        self.vmas.account().note_resident(self.resident().total() as i64);
        self.vmas.account().resident_peak()
    }

    /// Resets [`AddressSpace::resident_peak`] to the current number of resident pages.
    ///
    /// Context: any.
    pub fn reset_resident_peak(&self) {
        self.vmas.account().reset_resident_peak();
    }

    /// Clears the accessed bits of all pages in the mappings selected by `concerned`
    /// (`clear_refs`). A concurrent access may count as an earlier one.
    ///
    /// Context: may sleep. Complexity: linear in the number of entries of these mappings, with the
    /// mutex held; one flush per up to 64 tables.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if a huge leaf that two mappings share cannot be split. The bits of
    /// the preceding mappings are cleared.
    pub fn clear_accessed(&self, concerned: impl Fn(&Mapping) -> bool) -> Result<(), Error> {
        clear_use_in(self, UseBits::Accessed, |vma| concerned(&Mapping::of(vma)))
    }

    /// Clears the soft-dirty bits of all pages and mappings (`clear_refs`). Every store after the
    /// return sets the bits again. A concurrent store may count as an earlier one.
    ///
    /// Context: may sleep. Complexity: as [`AddressSpace::clear_accessed`].
    ///
    /// # Errors
    /// As [`AddressSpace::clear_accessed`].
    pub fn clear_soft_dirty(&self) -> Result<(), Error> {
        clear_use_in(self, UseBits::SoftDirty, |_| true)
    }
}

fn clear_use_in<P: Platform>(
    space: &AddressSpace<'_, P>,
    bits: UseBits,
    concerned: impl Fn(&Vma) -> bool,
) -> Result<(), Error> {
    // A second attempt clears the mappings before the failure again, which changes nothing.
    space.operate_with_reclaim(|op| Ok(clear_use_locked(op, bits, &concerned)?))
}

fn clear_use_locked<P: Platform>(
    op: &mut Op<'_, '_, P>,
    bits: UseBits,
    concerned: &impl Fn(&Vma) -> bool,
) -> Result<(), NoMemory> {
    for vma in op.vmas.iter() {
        // Linux also skips these mappings: no leaf records an access to a frame outside the core's
        // memory.
        if !concerned(vma) || vma.has(MappingFlags::FRAMES) {
            continue;
        }
        let vma = vma.lock_write(op.platform());
        if bits == UseBits::SoftDirty {
            op.vmas.change_flags(&vma, vma.flags() - MappingFlags::SOFT_DIRTY);
        }
        // One flush per up to 64 tables. A store before that flush counts as a store before the
        // call.
        op.edit.clear_use(vma.range(), bits, |_, _| true)?;
    }
    Ok(())
}
