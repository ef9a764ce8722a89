//! Address spaces: the memory calls, and page faults.
//!
//! # Locks
//! 1. The *mutex* of the address space ([`crate::vmas`]): every operation that changes VMAs
//!    acquires it (`mmap`, `munmap`, `mprotect`, `mremap`, `fork`). Faults do not.
//! 2. The lock of each VMA: faults acquire it for reading, changes of the VMA for writing. VMA
//!    locks are acquired after the mutex, in address order.
//! 3. The table locks (`table::locking`), innermost of these three. `docs/lock-order.md` lists all
//!    locks.
//!
//! A fault that cannot acquire its VMA's lock waits for the mutex, never the other way round. A
//! holder of the mutex waits for faults to finish, and those faults wait only for table locks.
//!
//! # Files
//! | file | contents |
//! |---|---|
//! | `call/` | the memory calls, one per file |
//! | `entry_policy` | the permissions that a mapping gives its entries |
//! | `fault`, `stack_growth` | page faults; mappings that grow down |
//! | `userfault`, `move_pages` | the calls of a userfaultfd; `UFFDIO_MOVE` |
//! | `op`, `sleep` | one operation, from its lock to its last free; a call that may sleep |
//! | `limits`, `settings`, `merging` | limits and usage; `prctl(2)`; the KSM setting |
//! | `pin`, `pin_count` | pinned pages, and the limits on their number |
//! | `folio` | splits mapped folios and joins their leaves |
//! | `user_copy`, `pending_copy` | accesses to program memory from outside, blocking or in steps |
//! | `forced_copy` | accesses by a debugger, which no protection stops |
//! | `inspect`, `resident`, `view` | reads for tests, debuggers and listings such as `/proc` |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod call;
mod entry_policy;
mod fault;
mod folio;
#[cfg(any(test, lock_violations = "types", lock_violations = "moves"))]
#[allow(dead_code, reason = "it only has to compile")]
#[path = "../../tests/violations/folio.rs"]
mod folio_violations;
mod forced_copy;
mod inspect;
mod limits;
mod merging;
pub(crate) mod move_pages;
mod op;
mod pending_copy;
mod pin;
mod pin_count;
mod resident;
mod settings;
mod sleep;
mod stack_growth;
mod user_copy;
mod userfault;
mod view;
#[cfg(any(test, lock_violations = "types", lock_violations = "moves"))]
#[allow(dead_code, reason = "it only has to compile")]
#[path = "../../tests/violations/space.rs"]
mod violations;

use core::fmt;
use core::marker::PhantomData;

use crate::Memory;
use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::Arch;
use crate::error::{Error, NoMemory};
use crate::object::Object;
use crate::platform::Platform;
use crate::stats::Counts;
#[cfg(feature = "baseline")]
use crate::table::Reach;
use crate::table::zap::Flush;
use crate::table::{PageTable, RunLimit};

pub use self::userfault::{
    FillMode, FillOrder, FillSource, MoveMode, PartialFill, PendingEvents, UserfaultHandler,
    WriteProtectMode,
};
pub use crate::vma::{MappingFlags, Protection};
pub use crate::vmas::place::Place;
pub use call::advice::Advice;
pub use call::collapse::{CollapseLimits, CollapseProgress};
pub use call::madvise::PendingMadvise;
pub use call::map_request::{FileAccess, MapFlags, MapObject, MapRequest, Sharing};
pub use call::mincore::Residence;
pub use call::mlock::{LockAll, LockPages};
pub use call::mprotect::{PendingProtect, ProtectFrom};
pub use call::mremap::Remap;
pub use call::msync::{MappedWriteback, SyncFlags};
pub use call::populate::Populate;
pub use call::read_steps::PendingRead;
pub use call::scan_pages::{PageCategories, PageRegion, PageRegions, PageScan, Scanned};
pub use call::steps::{CallPoll, CallReady, CallWait, Step};
pub use call::swap_off_steps::{PendingObjectSwapIn, PendingSwapIn};
pub use call::write_steps::PendingWrite;
pub use call::writeback::Writeback;
pub use fault::{Access, FaultPoll, FaultReady, FaultWait, Resolved, TriedFault};
pub use folio::FolioError;
pub use inspect::{Inspection, Mapping};
pub use limits::{Limits, Locking, Usage};
pub use pending_copy::{PendingCopy, PendingUserCopy};
pub use pin::{PinTime, Pinned};
pub use resident::Resident;
pub use settings::{ExecGain, LargeFolios};
pub use user_copy::PartialCopy;
pub use view::{FolioView, MappingView, ObjectView, PageRun, PageRunContent};

use crate::vma::Vma;
use crate::vmas::{Bounds, VmaIndex};
use call::brk::ProgramBreak;
use call::mlock::FutureLocks;
use call::pkey::Keys;
use op::AfterUnlock;
use pin_count::PinCounts;
use settings::Settings;
use userfault::UserfaultIdentity;

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
    /// user space, except on x86-64 with five levels, where the search starts below 2^47, as
    /// programs unaware of five levels expect.
    pub search_top: Option<VirtAddr>,
    /// The maximum number of VMAs (Linux: `vm.max_map_count`). As on Linux, `mmap` and `brk` fail
    /// only above the maximum, so they may create one more VMA; splits and moves may not.
    pub maximum_mappings: usize,
}

impl Default for SpaceOptions {
    fn default() -> Self {
        Self { minimum_address: VirtAddr(0x1_0000), search_top: None, maximum_mappings: 65_530 }
    }
}

/// The bounds of the mappings of an address space with these options.
fn bounds(options: &SpaceOptions) -> Bounds {
    let SpaceOptions { minimum_address, search_top, maximum_mappings } = *options;
    Bounds { minimum: minimum_address, search_top, maximum: maximum_mappings }
}

/// The memory of one process: its mappings and the page tables that the MMU walks.
///
/// All operations take `&self` and may be called from several CPUs at once. Unless its
/// documentation says otherwise, an operation may sleep and is not for interrupt handlers. Dropping
/// the address space unmaps everything; no CPU may have its root loaded at that time.
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
///
/// The address space must be dropped before its memory:
///
/// ```
/// # use bindery::{AddressSpace, Error, Memory, Platform, SpaceOptions};
/// fn end<P: Platform>(memory: Memory<P>) -> Result<(), Error> {
///     let space = AddressSpace::new(&memory, SpaceOptions::default())?;
///     drop(space);
///     drop(memory);
///     Ok(())
/// }
/// ```
///
/// The opposite order does not compile:
///
/// ```compile_fail,E0505
/// # use bindery::{AddressSpace, Error, Memory, Platform, SpaceOptions};
/// fn end<P: Platform>(memory: Memory<P>) -> Result<(), Error> {
///     let space = AddressSpace::new(&memory, SpaceOptions::default())?;
///     drop(memory);
///     drop(space);
///     Ok(())
/// }
/// ```
pub struct AddressSpace<'m, P: Platform> {
    pub(crate) page_table: PageTable<'m, P>,
    pub(crate) vmas: VmaIndex<P>,
    pin_counts: PinCounts,
    program_break: ProgramBreak,
    settings: Settings,
    keys: Keys,
    future_locks: FutureLocks,
    userfaults: UserfaultIdentity,
    /// The pagers of the mapped files are borrowed for `'m`, so the address space must not coerce
    /// to a type with a shorter lifetime ([`crate::Memory::file`]).
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
        Self::with_limit(memory, bounds(&options), RunLimit::NONE)
    }

    /// As [`AddressSpace::new`], at a reach of the caller's choice. Any reach except
    /// [`Reach::Table`] is for comparison.
    ///
    /// # Errors
    /// As [`AddressSpace::new`].
    #[cfg(feature = "baseline")]
    pub fn with_reach(
        memory: &'m Memory<P>,
        options: SpaceOptions,
        reach: Reach,
    ) -> Result<Self, Error> {
        Self::with_limit(memory, bounds(&options), RunLimit::of(reach))
    }

    fn with_limit(memory: &'m Memory<P>, bounds: Bounds, reach: RunLimit) -> Result<Self, Error> {
        let page_table = || Ok(PageTable::new(memory, reach).ok_or(NoMemory)?);
        let page_table = memory.retry::<_, Error>(page_table)?;
        Ok(Self {
            page_table,
            vmas: VmaIndex::new(memory.index_key(), bounds),
            pin_counts: PinCounts::default(),
            program_break: ProgramBreak::default(),
            settings: Settings::default(),
            keys: Keys::new(),
            future_locks: FutureLocks::default(),
            userfaults: UserfaultIdentity::default(),
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

    /// Records that the calling CPU is about to load the root. From this call on, the CPU receives
    /// the invalidations of this address space, also after it has loaded another root: its TLB may
    /// keep translations, tagged with an ASID or PCID. The first call on a CPU may allocate memory
    /// for the CPU's counters.
    ///
    /// ```
    /// use bindery::{AddressSpace, Platform};
    ///
    /// /// Without tags: loading a root flushes the TLB.
    /// ///
    /// /// # Safety
    /// /// 1. `old` is loaded on this CPU, and preemption is off.
    /// unsafe fn switch<P: Platform>(old: &AddressSpace<'_, P>, new: &AddressSpace<'_, P>) {
    ///     if old.root() == new.root() {
    ///         return;
    ///     }
    ///     new.enter();
    ///     let _root = new.root(); // load it here
    ///     // SAFETY: 1. another root is loaded now; 2. its load has flushed the TLB; 3. obligation
    ///     // 1 of the caller.
    ///     unsafe { old.leave() };
    /// }
    /// ```
    ///
    /// Context: spins.
    pub fn enter(&self) {
        self.page_table.enter();
    }

    /// Ends the invalidations to the calling CPU, until it calls [`AddressSpace::enter`] again. A
    /// CPU that never leaves receives invalidations that it does not need.
    ///
    /// Context: any.
    ///
    /// # Safety
    /// The core cannot check these obligations. If one is not met, programs reach freed frames:
    /// 1. The CPU has loaded another root before the call. It loads this root again only after
    ///    [`AddressSpace::enter`].
    /// 2. Since that load, the CPU's TLB and its page-walk caches hold nothing of this address
    ///    space under any tag, and no flush that has yet to remove something is in progress.
    /// 3. The caller runs on that CPU and does not migrate between the load and the return.
    ///
    /// An interleaving without the second:
    /// 1. CPU A loads another root by a load that keeps translations, and leaves.
    /// 2. CPU B unmaps a page. No CPU needs an invalidation, so the frame is freed.
    /// 3. CPU A loads the first root again, and its program writes through the old translation into
    ///    a frame that by now has another owner.
    ///
    /// ```compile_fail,E0133
    /// # use bindery::{AddressSpace, Platform};
    /// fn forget<P: Platform>(space: &AddressSpace<'_, P>) {
    ///     space.leave();
    /// }
    /// ```
    pub unsafe fn leave(&self) {
        // SAFETY: the caller's obligations.
        unsafe { self.page_table.leave() };
    }

    /// Work done on the page table so far. Exact when no call runs.
    ///
    /// Context: any. Complexity: linear in the number of CPUs that have entered.
    pub fn counts(&self) -> Counts {
        self.page_table.counts.read()
    }

    /// The memory from which the address space allocates its frames.
    ///
    /// Context: any.
    pub fn memory(&self) -> &'m Memory<P> {
        self.page_table.memory
    }

    /// Sets the maximum number of VMAs ([`SpaceOptions::maximum_mappings`]); existing VMAs stay. A
    /// child of [`AddressSpace::fork`] starts with its parent's maximum.
    ///
    /// Context: any.
    pub fn set_maximum_mappings(&self, most: usize) {
        self.vmas.set_maximum(most);
    }

    /// The number of mappings (VMAs).
    ///
    /// Context: any.
    pub fn mapping_count(&self) -> usize {
        self.vmas.len()
    }

    pub(crate) fn platform(&self) -> &'m P {
        self.page_table.memory.platform()
    }

    /// The end of user space.
    ///
    /// Context: any.
    #[inline]
    pub fn limit(&self) -> VirtAddr {
        VirtAddr(P::Arch::USER_END)
    }

    /// A handle to the object that backs the VMA, if the VMA is not anonymous.
    pub(crate) fn object_of(&self, vma: &Vma) -> Option<Object<'m, P>> {
        let memory = self.page_table.memory;
        // SAFETY: 1. a VMA holds its object until `finish`, which follows the end of all references
        // to the VMA.
        vma.object_pointer().map(|state| unsafe { Object::of_mapping(memory, state) })
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
        let mut after = AfterUnlock::new(&self.page_table);
        let mut vmas = self.vmas.lock();
        // SAFETY: 1. both belong to this address space.
        let (mut set, _) = unsafe { after.lend(&mut vmas) };
        // SAFETY: 1. no handle of the address space is left.
        unsafe { set.remove_all() };
        drop(set);
        // The steps below may wait for readers.
        drop(vmas);
        let end = P::Arch::ROOT.span();
        let everything = VirtRange::raw(0, P::Arch::USER_END.next_multiple_of(end));
        // No CPU has the root loaded, so pages may leave the lists before the TLBs drop them. The
        // range covers all tables completely, so no leaf has to be split and nothing can fail.
        let mut edit = after.edit();
        let zapped = edit.zap(everything, everything, Flush::AtEnd);
        debug_assert!(zapped.is_ok(), "unmapping everything splits no leaf");
        edit.flush();
        after.finish();
        // SAFETY: 1. this is the drop, after which no call uses the address space.
        unsafe { self.pin_counts.release(self.page_table.memory) };
        // SAFETY: 1. no CPU has the root, and readers find no VMA that leads to it; 2. no handle is
        // left, because the VMAs, from which other threads make handles, have left all lists.
        unsafe { self.page_table.free_root() };
        crate::deferred::free_some(self.page_table.memory);
    }
}
