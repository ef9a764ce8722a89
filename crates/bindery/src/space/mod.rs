//! Address spaces: VMAs, and one operation a file.
//!
//! # Who locks what
//! 1. The *mutex* of the address space: every operation that changes VMAs takes it (`mmap`,
//!    `munmap`, `mprotect`, `mremap`, `fork`). Faults do not.
//! 2. The lock of each VMA: faults take it for reading, changes of the VMA for writing. It is taken
//!    after the mutex, in address order.
//! 3. The table locks (`table::locking`), innermost of these three. `docs/lock-order.md` has all
//!    locks.
//!
//! A fault that cannot take its VMA's lock waits for the mutex, never the other way round: a holder
//! of the mutex waits for faults to leave, and faults inside wait only for table locks.
//!
//! # Files
//! | file | contents |
//! |---|---|
//! | `mmap`, `map_request`, `gap_search` | `mmap(2)`; what a program asks for; where the mapping goes |
//! | `munmap`, `mprotect`, `mremap`, `madvise`, `mlock`, `mincore`, `msync`, `mseal`, `brk`, `fork`, `remap_file_pages` | the call of that name |
//! | `pkey`, `shmdt`, `dev_zero` | `pkey_alloc(2)`; `shmdt(2)`; `mmap(2)` of `/dev/zero` |
//! | `guard_pages`, `collapse`, `page_out` | the larger operations of `madvise(2)` |
//! | `forget` | `MADV_COLD` and `MADV_FREE` |
//! | `advice` | the kinds of advice and the table of their effects |
//! | `will_need` | `MADV_WILLNEED` |
//! | `scan_pages` | `ioctl(PAGEMAP_SCAN)` |
//! | `populate` | pages that come before the first access (`MAP_POPULATE`, `mlock`) |
//! | `fault`, `stack_growth` | page faults; mappings that grow down |
//! | `userfault`, `move_pages` | the calls of a userfaultfd; `UFFDIO_MOVE` |
//! | `swap_off`, `reap` | `swapoff(2)`; the OOM reaper |
//! | `change`, `transaction`, `parts` | changes of the set of VMAs; one operation from its lock to its last free; the VMAs of a range |
//! | `freeable` | how far page tables go with an unmapped range |
//! | `limits`, `settings`, `merging` | limits and usage; `prctl(2)`; the setting of KSM |
//! | `pin`, `pin_count` | pinned pages, and how many there may be |
//! | `folio` | splits mapped folios, and joins their leaves |
//! | `user_copy` | a program's memory, read and written from outside |
//! | `inspect`, `resident`, `view` | reading for tests, debuggers and listings as those of `/proc` |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod advice;
mod brk;
mod change;
mod collapse;
mod dev_zero;
mod fault;
mod folio;
mod forget;
mod fork;
mod freeable;
mod gap_search;
mod guard_pages;
mod inspect;
mod limits;
mod madvise;
mod map_request;
mod merging;
mod mincore;
mod mlock;
mod mmap;
pub(crate) mod move_pages;
mod mprotect;
mod mremap;
mod mseal;
mod msync;
mod munmap;
mod page_out;
mod parts;
mod pin;
mod pin_count;
mod pkey;
mod populate;
mod reap;
mod remap_file_pages;
mod resident;
mod scan_pages;
mod settings;
mod shmdt;
mod stack_growth;
mod swap_off;
mod transaction;
mod user_copy;
mod userfault;
mod view;
#[cfg(any(test, lock_violations = "types", lock_violations = "moves"))]
#[allow(dead_code, reason = "it only has to compile")]
#[path = "../../tests/violations/space.rs"]
mod violations;
mod will_need;

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::Memory;
use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::{Error, NoMemory};
use crate::object::{self, Object};
use crate::platform::Platform;
use crate::rmap::Groups;
use crate::stats::Counts;
use crate::sync::Mutex;
#[cfg(feature = "baseline")]
use crate::table::Reach;
use crate::table::zap::Flush;
use crate::table::{PageTable, ReadSection, RunLimit};
use crate::tlb::{Gather, TlbOnLeave};
use crate::userfault::release as release_userfault;

pub use self::userfault::{FillMode, FillSource, MoveMode, PartialFill, WriteProtectMode};
pub use crate::vma::{MappingFlags, Protection};
pub use advice::Advice;
pub use collapse::{CollapseLimits, CollapseProgress};
pub use fault::{Access, Resolved};
pub use folio::FolioError;
pub use inspect::{Inspection, Mapping};
pub use limits::{Limits, Locking, Usage};
pub use map_request::{FileAccess, MapFlags, MapObject, MapRequest, Place, Sharing};
pub use mincore::Residence;
pub use mlock::{LockAll, LockPages};
pub use mprotect::ProtectFrom;
pub use mremap::Remap;
pub use msync::SyncFlags;
pub use pin::{PinTime, Pinned};
pub use resident::Resident;
pub use scan_pages::{PageCategories, PageRegion, PageRegions, PageScan, Scanned};
pub use settings::{ExecGain, LargeFolios};
pub use user_copy::PartialCopy;
pub use view::{FolioView, MappingView, ObjectView, PageRun, PageRunContent};

use crate::collections::range_skip_list::Index;
use crate::vma::{self, Vma};
use brk::ProgramBreak;
use change::Removed;
use limits::Account;
use pin_count::PinCounts;
use pkey::Keys;
use settings::Settings;

/// What a mapping that grows down keeps free below itself, in bytes (Linux: `stack_guard_gap`).
pub(crate) const STACK_GUARD_GAP: u64 = 256 * PAGE_SIZE;

/// Options of an address space.
///
/// ```
/// use bindery::SpaceOptions;
/// use bindery::addr::VirtAddr;
///
/// let options = SpaceOptions { search_top: Some(VirtAddr(1 << 40)), ..SpaceOptions::default() };
/// assert_eq!(options.maximum_mappings, 65_530);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpaceOptions {
    /// The lowest address that may be mapped, in bytes (Linux: `vm.mmap_min_addr`).
    pub minimum_address: VirtAddr,
    /// The address at which the search for free addresses begins, downwards; `None` for the end of
    /// user space, but below 2^47 on x86-64 with five levels, as programs expect that do not know
    /// of it.
    pub search_top: Option<VirtAddr>,
    /// The maximum number of VMAs (Linux: `vm.max_map_count`). As on Linux, `mmap` and `brk` refuse
    /// only above it, so they may make one more; splits and moves may not.
    pub maximum_mappings: usize,
}

impl Default for SpaceOptions {
    fn default() -> Self {
        Self { minimum_address: VirtAddr(0x1_0000), search_top: None, maximum_mappings: 65_530 }
    }
}

/// The proof that an address space's mutex is held: the set of VMAs, their bounds and flags change
/// only in functions that take it. The mutex of each address space guards one, and nobody else can
/// make one.
pub(crate) struct MmapLocked(());

/// The memory of one process: its mappings, and the page tables that the MMU walks.
///
/// All operations take `&self` and may be called from several CPUs at once. Unless an operation
/// says otherwise, it may sleep and is not for interrupt handlers. Dropping the address space
/// unmaps everything; no CPU may have its root loaded then.
///
/// ```
/// use bindery::{AddressSpace, Error, MapRequest, Memory, Platform, Protection, SpaceOptions};
///
/// fn program<P: Platform>(memory: &Memory<P>) -> Result<AddressSpace<'_, P>, Error> {
///     let space = AddressSpace::new(memory, SpaceOptions::default())?;
///     let protection = Protection::READ | Protection::WRITE;
///     let at = space.mmap(&MapRequest { length: 1 << 20, protection, ..MapRequest::default() })?;
///     space.munmap(at, 4096)?;
///     assert_eq!(space.mapping_count(), 1);
///     Ok(space)
/// }
/// ```
pub struct AddressSpace<'m, P: Platform> {
    pub(crate) page_table: PageTable<'m, P>,
    pub(crate) vmas: Index<Vma>,
    pub(crate) mmap_lock: Mutex<P::Mutex, MmapLocked>,
    options: SpaceOptions,
    maximum_mappings: AtomicUsize,
    account: Account,
    pin_counts: PinCounts,
    program_break: ProgramBreak,
    settings: Settings,
    keys: Keys,
    /// The locks of mappings to come (`mlockall`).
    future: AtomicU64,
    /// The number by which userfaultfds know it; 0 as long as there was none.
    userfaults: AtomicU64,
    /// The pagers of the files that it maps live for `'m`, so it must not pass for one with a
    /// shorter life ([`crate::Memory::file`]).
    _pagers: PhantomData<fn(&'m ()) -> &'m ()>,
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// An address space without mappings.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no frame for the root table.
    pub fn new(memory: &'m Memory<P>, options: SpaceOptions) -> Result<Self, Error> {
        Self::with_limit(memory, options, RunLimit::NONE)
    }

    /// As [`AddressSpace::new`], at a reach of the caller's choice: anything but [`Reach::Table`]
    /// is for comparison.
    ///
    /// # Errors
    /// As [`AddressSpace::new`].
    #[cfg(feature = "baseline")]
    pub fn with_reach(
        memory: &'m Memory<P>,
        options: SpaceOptions,
        reach: Reach,
    ) -> Result<Self, Error> {
        Self::with_limit(memory, options, RunLimit::of(reach))
    }

    fn with_limit(
        memory: &'m Memory<P>,
        options: SpaceOptions,
        reach: RunLimit,
    ) -> Result<Self, Error> {
        let page_table = || Ok(PageTable::new(memory, reach).ok_or(NoMemory)?);
        let page_table = memory.retry::<_, Error>(page_table)?;
        Ok(Self {
            page_table,
            vmas: Index::new(memory.index_key()),
            mmap_lock: Mutex::new(MmapLocked(())),
            options,
            maximum_mappings: AtomicUsize::new(options.maximum_mappings),
            account: Account::new(&Limits::default()),
            pin_counts: PinCounts::default(),
            program_break: ProgramBreak::default(),
            settings: Settings::default(),
            keys: Keys::new(),
            future: AtomicU64::new(0),
            userfaults: AtomicU64::new(0),
            _pagers: PhantomData,
        })
    }

    /// The frame of the root table, which the embedder loads into the MMU between
    /// [`AddressSpace::enter`] and [`AddressSpace::leave`].
    ///
    /// Context: any.
    pub fn root(&self) -> Frame {
        self.page_table.root
    }

    /// Records that the calling CPU is about to load the root. From here on the CPU receives
    /// invalidations.
    ///
    /// Context: any.
    pub fn enter(&self) {
        let section = ReadSection::enter(self.platform());
        self.page_table.active_cpus.enter(self.platform().cpu());
        // The mark must be out before this CPU's walker reads its first entry.
        self.platform().publish_entries();
        drop(section);
    }

    /// Records that the calling CPU has loaded another root, and what its TLB may still hold.
    ///
    /// With [`TlbOnLeave::Flushed`], the CPU gets no invalidation of this address space until it
    /// calls [`AddressSpace::enter`] again. The caller must meet this contract, which the core
    /// cannot check; otherwise a program reaches frames that were freed:
    /// 1. The CPU has loaded another root before the call. It loads this one again only after
    ///    [`AddressSpace::enter`].
    /// 2. Since then, its TLB and its walker's caches hold nothing of this address space.
    /// 3. The caller runs on that CPU, and does not change CPUs between the load and the return.
    ///
    /// If in doubt, pass [`TlbOnLeave::Kept`], which asks for the first and the third only.
    ///
    /// Context: any.
    pub fn leave(&self, tlb_on_leave: TlbOnLeave) {
        let section = ReadSection::enter(self.platform());
        self.page_table.active_cpus.leave(self.platform().cpu(), tlb_on_leave);
        drop(section);
    }

    /// Work done on the page table so far.
    ///
    /// Context: any.
    pub fn counts(&self) -> Counts {
        self.page_table.stats.read()
    }

    /// The memory that the address space takes its frames from.
    ///
    /// Context: any.
    pub fn memory(&self) -> &'m Memory<P> {
        self.page_table.memory
    }

    /// Sets the maximum number of VMAs ([`SpaceOptions::maximum_mappings`]); existing ones stay. A
    /// child of [`AddressSpace::fork`] begins with its parent's.
    ///
    /// Context: any.
    pub fn set_maximum_mappings(&self, most: usize) {
        self.maximum_mappings.store(most, Ordering::Relaxed);
    }

    /// The number of mappings (VMAs).
    ///
    /// Context: any.
    pub fn mapping_count(&self) -> usize {
        self.vmas.len()
    }

    pub(crate) fn platform(&self) -> &'m P {
        &self.page_table.memory.platform
    }

    /// The end of user space.
    ///
    /// Context: any.
    #[inline]
    pub fn limit(&self) -> VirtAddr {
        VirtAddr(P::Arch::USER_END)
    }

    fn search_top(&self) -> u64 {
        const BELOW_FIVE_LEVELS: u64 = (1 << 47) - PAGE_SIZE;
        match self.options.search_top {
            Some(top) => top.0.min(P::Arch::USER_END),
            None if P::Arch::LEVELS > 4 => P::Arch::USER_END.min(BELOW_FIVE_LEVELS),
            None => P::Arch::USER_END,
        }
    }

    /// The VMA after `node`.
    ///
    /// The reference lives as long as `self` is borrowed, which is longer than the VMA may: every
    /// caller holds the mutex, or the VMA's lock, or is in a read section, and lets go of the
    /// reference before that.
    pub(crate) fn vma(&self, node: NonNull<Vma>) -> &Vma {
        // SAFETY: nodes come from the index, and are freed only after they were taken out of it
        // with the lock for writing held and a grace period has passed (`AddressSpace::finish`).
        // The caller keeps that from happening as the text above says.
        unsafe { node.as_ref() }
    }

    /// The VMAs that have a part in `range`, in rising order. The VMA that was
    /// yielded last may be changed.
    pub(crate) fn vmas_in(&self, _mm: &MmapLocked, range: VirtRange) -> impl Iterator<Item = &Vma> {
        let mut next = self.vmas.first_ending_after(range.start().0);
        core::iter::from_fn(move || {
            let vma = next.map(|node| self.vma(node)).filter(|vma| vma.start() < range.end().0)?;
            next = self.vmas.next(NonNull::from(vma));
            Some(vma)
        })
    }

    /// A handle to what backs the VMA, if it is not anonymous.
    pub(crate) fn object_of(&self, vma: &Vma) -> Option<Object<'m, P>> {
        let memory = self.page_table.memory;
        // SAFETY: 1. a VMA holds its object until `finish`, which comes after all references to it.
        vma.object_pointer().map(|state| unsafe { Object::of_mapping(memory, state) })
    }

    /// The VMA around `addr`.
    pub(crate) fn vma_at(&self, mm: &MmapLocked, addr: VirtAddr) -> Option<&Vma> {
        self.first_ending_after(mm, addr.0).filter(|vma| vma.start() <= addr.0)
    }

    /// The first VMA that ends after `addr`.
    pub(crate) fn first_ending_after(&self, _mm: &MmapLocked, addr: u64) -> Option<&Vma> {
        self.vmas.first_ending_after(addr).map(|node| self.vma(node))
    }

    /// Makes every TLB forget what is stale, and counts down what was taken from VMAs that stay.
    /// Called by every operation before it releases the mutex. (No other thread relies on that for
    /// the flush: a thread that locks a table meets the mark of the pending flush, see
    /// [`crate::tlb`].)
    fn flush(&self, gather: &mut Gather) {
        if gather.is_stale() {
            let mut counts = Counts::default();
            self.page_table.flush(gather, &mut counts);
            self.page_table.stats.add(&counts);
        }
        if gather.take_stays() {
            self.page_table.drop_contents(gather);
        }
    }

    /// Flushes, gives back what was unmapped, lets go of what the removed VMAs hold, and frees the
    /// tables and VMAs when no reader is left. Called without locks on VMAs or tables.
    ///
    /// Mappings are counted down before anon groups and objects are let go: a walker of the reverse
    /// map that is in a read section and sees that a folio is mapped may rely on its owner
    /// (`rmap`).
    fn finish(&self, gather: &mut Gather, removed: Removed) {
        let memory = self.page_table.memory;
        self.flush(gather);
        self.page_table.drop_contents_yielding(gather);
        let Removed { vmas, mut groups, mut unlocked, .. } = removed;
        for vma in vmas.iter() {
            unlocked |= vma.has(MappingFlags::LOCKED);
            if let Some(group) = vma.group_pointer() {
                Groups::release(memory, group, &mut groups);
            }
            if let Some(object) = vma.object_pointer() {
                // SAFETY: 1. the VMA's own holder, which it gives up here.
                unsafe { object::map_removed(memory, object, vma.flags()) };
            }
            if let Some(userfault) = vma.userfault_pointer() {
                // SAFETY: 1. the VMA's own hold, which it gives up here.
                unsafe { release_userfault(memory, userfault) };
            }
        }
        if unlocked {
            memory.note_unlocked();
        }
        let tables = self.page_table.take_emptied(gather);
        // SAFETY: 1. the VMAs are out of the index and the trees; no VMA and no child holds the
        // groups.
        unsafe { memory.free_unlinked(tables, vmas, groups) };
    }
}

impl<P: Platform> fmt::Debug for AddressSpace<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace")
            .field("root", &self.root())
            .field("mappings", &self.mapping_count())
            .field("resident", &self.resident())
            .finish_non_exhaustive()
    }
}

impl<P: Platform> Drop for AddressSpace<'_, P> {
    fn drop(&mut self) {
        let mut removed = Removed::default();
        // Nobody else has it: a drop has the address space for itself.
        let mm = self.mmap_lock.lock();
        while let Some(node) = self.vmas.first_ending_after(0) {
            let vma = self.vma(node);
            // SAFETY: 1. no handle of the address space is left, so nobody looks a VMA up in it,
            // and a walker of the reverse map only reads what stays as it is; 2. it is removed at
            // once.
            self.remove(&mm, unsafe { vma.written(self.platform()) }, &mut removed);
            // A reclaimer came by the reverse map before, and goes on without its locks.
            vma.wait_for_readers(self.platform());
        }
        // What follows may wait for readers.
        drop(mm);
        let mut gather = Gather::new();
        let end = P::Arch::ROOT.span();
        let everything = VirtRange::raw(0, P::Arch::USER_END.next_multiple_of(end));
        // No CPU has the root loaded, so what leaves the lists before it leaves the TLBs hurts
        // nobody. All tables are covered whole, so no leaf has to be split and nothing can fail.
        let zapped = self.page_table.zap(everything, everything, Flush::AtEnd, &mut gather);
        debug_assert!(zapped.is_ok(), "unmapping everything splits no leaf");
        self.finish(&mut gather, removed);
        self.let_go_of_pins();
        // SAFETY: 1. no CPU has the root, and readers find no VMA that leads to it; 2. no handle is
        // left: the VMAs, by which others made theirs, are out of all lists.
        unsafe { self.page_table.free_root() };
        self.page_table.memory.free_some();
    }
}
