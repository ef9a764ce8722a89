//! The kernel's own mappings: [`KernelMap`], with `vmalloc`, `vmap` and `ioremap` in the largest
//! pieces that addresses and frames allow.
//!
//! ```text
//! arena    |  area            |g|  area     |g|  free          | freed |g|  area ...
//!          | 2 MiB | 64K | 4K |   | 4K | 4K |                              g: guard page
//! ```
//!
//! # The protocol
//!
//! **An address has one owner.** A range of addresses belongs to one *area* from its reservation
//! until a purge frees it. Only the area's owner writes the entries of its addresses, so leaves
//! need no lock. An area is in one of five states:
//!
//! | state | owner | entries |
//! |---|---|---|
//! | busy | the caller that maps it, changes its protection or its size | change |
//! | live | the caller that was given the address | stay |
//! | freed | none: it waits for a purge | empty; TLBs may remember the old ones |
//! | purging | the purge | empty |
//! | surveyed | the purge, which has seen what is mapped around the area | empty |
//!
//! **Tables are installed by compare-exchange, and only the purge detaches them.** Two areas may
//! share a table. A caller that finds a table missing builds one and offers it. If two callers
//! offer a table for the same entry, one wins, and the loser frees its table. A table is detached
//! when all addresses under it are free. The purge checks this under the areas' lock, which
//! prevents areas from being reserved there. So the tables above an owned address are never
//! detached, and the owner walks them without a lock. A caller that builds a table waits until the
//! detached tables are flushed (step 2 below). Otherwise:
//! 1. A purge detaches table T, which had one area; the other addresses of T were free before.
//! 2. Another area is reserved there, and its owner installs a table in T's place.
//! 3. A CPU whose TLB holds T uses the new area, walks from T, and finds nothing.
//!
//! **Walkers without a claim** ([`KernelMap::physical`], [`KernelMap::for_each_piece`]) walk in
//! read sections. For these walkers and those of the hardware, a purge runs in this order:
//! 1. It detaches the tables that cover no area.
//! 2. It invalidates the TLBs once for all areas: from here on no TLB holds the frames or tables.
//! 3. It frees the addresses: from here on a new mapping may replace them, perhaps a huge leaf in
//!    place of the table.
//! 4. It frees the frames.
//! 5. It frees tables and areas after a grace period, without waiting for that
//!    ([`crate::deferred`]).
//!
//! If step 3 or 4 came before step 2, a CPU could use the old area through its TLB. If the tables
//! were freed with the frames, this could happen:
//! 1. A dump reads the entry that points to table T and is about to read T.
//! 2. The purge detaches T and frees its frame; a huge leaf replaces T's entry.
//! 3. The frame's next owner writes data into it; the dump interprets the data as entries.
//!
//! **Live leaves are never folded.** A contiguous run is written as a whole, into empty entries.
//!
//! **A cut pauses.** To change the protection of a part of a huge leaf or of a contiguous run, the
//! larger piece must be replaced by smaller ones, and architectures require break-before-make. The
//! valid bits of the larger piece are cleared, every TLB is invalidated, and then the new entries
//! are written. A CPU that uses the address in between faults. Its handler calls
//! [`KernelMap::resolve`], which waits for the end of the pause. The paused entry keeps all its
//! other bits, so software walkers never see a hole. (A processor that speculates beyond the valid
//! bit still finds the frame, which the kernel could access a moment before.) An owner whose
//! accesses must not fault (for example to a stack on which the fault itself would be handled) maps
//! with [`Pauses::Never`], and changes that would need a pause are refused. A pause is short: one
//! table of entries and one invalidation, with interrupts off if [`Platform::SpinLock`] disables
//! them.
//!
//! | file | idea |
//! |---|---|
//! | `request` | requests of callers, and their results |
//! | `error` | the reasons for a refusal |
//! | `area` | one range of addresses, and the claim by which a caller owns it |
//! | `areas` | all areas: found, claimed, put on the list for the next purge |
//! | `reserve` | addresses for a new area |
//! | `blocks` | the frames that an area owns |
//! | `protocol` | the protocol of the tables, which the model checker runs too |
//! | `walk`, `leaves` | the one walk: finds or makes tables, clears leaves; writes runs of leaves |
//! | `vmalloc`, `resize` | frames and addresses in one call; growing and shrinking |
//! | `vmap` | the caller's frames; device registers |
//! | `protect` | permissions of a part: cuts |
//! | `purge` | makes freed areas free |
//! | `look` | look-ups, faults, dumps |

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod area;
mod areas;
mod blocks;
mod error;
mod leaves;
mod look;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
mod protect;
mod protocol;
mod purge;
mod request;
mod reserve;
mod resize;
mod vmalloc;
mod vmap;
mod walk;

use crate::error::{Failure, NoMemory};
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::Memory;
use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, EntryIndex, Level};
use crate::deferred::{Batch, DetachedTables};
use crate::platform::{Platform, Tables};
use crate::stats::{Counts, Stats};
use crate::sync::Mutex;
#[cfg(feature = "baseline")]
use crate::table::Reach;
use crate::table::{RunLimit, Table, free_table, new_table, run};

pub(crate) use area::Area;
use areas::Areas;
pub use error::KernelMapError;
pub use request::{
    AreaKind, Content, KernelAddress, KernelArea, KernelPiece, Pauses, Pieces, Resolution,
    UnmapTime, VmallocOptions, VmapOptions,
};

/// The kernel's half of the addresses, and its mappings: `vmalloc`, `vmap`, `ioremap`.
///
/// All functions take `&self` and may be called concurrently on all CPUs. Functions that change
/// mappings may sleep. Functions that only read ([`KernelMap::physical`]) and
/// [`KernelMap::resolve`] may be called in interrupt handlers.
///
/// The caller may access an address, within its permissions, from the call that returned it until
/// the call that frees it. The core itself never touches mapped memory. Every area has an unmapped
/// guard page after it.
///
/// ```
/// use bindery::{KernelMap, KernelMapError, Platform, VmallocOptions};
///
/// fn scratch<P: Platform>(map: &KernelMap<'_, P>) -> Result<(), KernelMapError> {
///     let at = map.vmalloc(64 << 10, &VmallocOptions::default())?;
///     assert!(map.physical(at).is_some());
///     // SAFETY: 1. made above; 2. and 3. no CPU uses it.
///     unsafe { map.vfree(at) }
/// }
/// ```
///
/// # What the embedder does
///
/// | step | details |
/// |---|---|
/// | choose an arena | whole root entries of its own, in the half that all roots share |
/// | make the map | before the first address space copies the root ([`KernelMap::with_root`]), or with a root of its own that is loaded for the kernel's half ([`KernelMap::new`]) |
/// | program the memory types | `IA32_PAT`, `MAIR_EL1`: as documented at [`crate::arch::X86_64`] and [`crate::arch::AArch64`] |
/// | invalidate on all CPUs | [`Platform::invalidate_kernel`]; kernel entries are global |
/// | in the fault handler | [`KernelMap::resolve`]; [`KernelMap::explain`] for the message if it refuses |
/// | when memory is short | [`KernelMap::purge`] |
/// | caches | clean them before memory is mapped with another type; synchronize instruction caches when memory becomes executable (AArch64 `IC IVAU`, RISC-V `FENCE.I` on all CPUs): the core executes no such instruction |
pub struct KernelMap<'m, P: Platform> {
    memory: &'m Memory<P>,
    root: Frame,
    ownership: Ownership,
    areas: Areas<'m, P>,
    reach: RunLimit,
    largest_leaf: Level<P::Arch>,
    largest_contig: Level<P::Arch>,
    purging: Mutex<P::Mutex, Purging>,
    pausing: Mutex<P::SpinLock, Pausing>,
    /// Nonzero while a TLB may hold a table that a purge has detached. A thread that builds a table
    /// parks on this word.
    unflushed: AtomicU32,
    /// The number of freed pages above which a purge is due.
    limit: AtomicU64,
    stats: Stats,
}

/// The right to purge; one caller at a time holds it.
struct Purging(());

/// The right to pause entries; only one caller at a time holds it, so a fault waits for at most one
/// CPU.
struct Pausing(());

/// The owner of the root table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ownership {
    Own,
    Adopted,
}

/// The default of [`KernelMap::set_purge_limit`]: 32 MiB of freed pages, or a 64th of the memory if
/// that is less.
const PURGE_LIMIT: u64 = 8192;

impl<'m, P: Platform> KernelMap<'m, P> {
    /// A kernel map with a root table of its own ([`KernelMap::root`]), for machines where kernel
    /// and user space have separate roots (AArch64: `TTBR1_EL1`), and for tests.
    ///
    /// `arena` is the range of addresses to allocate from, in whole pages.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`KernelMapError::BadArena`], [`KernelMapError::OutOfMemory`].
    pub fn new(memory: &'m Memory<P>, arena: VirtRange) -> Result<Self, KernelMapError> {
        Self::with_limit(memory, arena, RunLimit::NONE)
    }

    /// Like [`KernelMap::new`], with a given reach. With [`Reach::Page`], the baseline of
    /// benchmarks, every page has its own frame and entry, which are checked, built and stored one
    /// by one.
    ///
    /// # Errors
    /// As [`KernelMap::new`].
    #[cfg(feature = "baseline")]
    pub fn with_reach(
        memory: &'m Memory<P>,
        arena: VirtRange,
        reach: Reach,
    ) -> Result<Self, KernelMapError> {
        Self::with_limit(memory, arena, RunLimit::of(reach))
    }

    fn with_limit(
        memory: &'m Memory<P>,
        arena: VirtRange,
        reach: RunLimit,
    ) -> Result<Self, KernelMapError> {
        memory.outermost(|| {
            let mut counts = Counts::default();
            let root = new_table(memory, P::Arch::ROOT, &mut counts);
            let root = root.ok_or(NoMemory)?;
            let map = Self::with_ownership(memory, root, Ownership::Own, arena, reach);
            map.stats.add(&counts);
            map.begin()
        })
    }

    /// A kernel map under an existing root table: the table whose upper half all address spaces
    /// share ([`Platform::kernel_root`]), often built by boot code. The root's entries for `arena`
    /// are empty and become the map's. The map fills them in this call and never changes them
    /// again, so roots that are copied later share all its mappings.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// As [`KernelMap::new`]; also [`KernelMapError::BadArena`] if an entry of the root is in use.
    ///
    /// # Safety
    /// 1. `root` is a table of [`Platform::Arch`]'s highest level, in the format of the
    ///    architecture, which [`Platform::direct_map`] shows for as long as the map lives.
    /// 2. No other code changes its entries for `arena`, or copied them before.
    /// 3. The map is dropped only when no copy of this root exists: its entries would point to
    ///    freed tables. (Most kernels never drop it.)
    pub unsafe fn with_root(
        memory: &'m Memory<P>,
        root: Frame,
        arena: VirtRange,
    ) -> Result<Self, KernelMapError> {
        memory.outermost(|| {
            let reach = RunLimit::NONE;
            Self::with_ownership(memory, root, Ownership::Adopted, arena, reach).begin()
        })
    }

    fn with_ownership(
        memory: &'m Memory<P>,
        root: Frame,
        ownership: Ownership,
        arena: VirtRange,
        reach: RunLimit,
    ) -> Self {
        Self {
            memory,
            root,
            ownership,
            areas: Areas::new(memory, arena),
            reach,
            // Huge leaves are never in the root, which is copied.
            largest_leaf: P::Arch::LARGEST_LEAF.min(P::Arch::ROOT.below()),
            largest_contig: P::Arch::LARGEST_CONTIG_LEVEL,
            purging: Mutex::new(Purging(())),
            pausing: Mutex::new(Pausing(())),
            unflushed: AtomicU32::new(0),
            limit: AtomicU64::new(PURGE_LIMIT.min(memory.total_frames() / 64)),
            stats: Stats::default(),
        }
    }

    /// The entries of the root, or of a table below it.
    #[inline]
    fn entries<'s>(&self, table: Table<'s>) -> &'s [AtomicU64]
    where
        'm: 's,
    {
        let memory: &'s Memory<P> = self.memory;
        // SAFETY: 1. and 2. a `Table` guarantees both.
        unsafe { memory.table_entries(table.frame()) }
    }

    /// The entries of the root.
    pub(crate) fn root_entries(&self) -> &[AtomicU64] {
        // SAFETY: 1. `KernelMap::new` made the root, or obligation 1 of `KernelMap::with_root`; 2.
        // the root is freed when the map is dropped, or is the embedder's and outlives the map.
        unsafe { self.memory.table_entries(self.root) }
    }

    /// Fills the root's entries for the arena with tables.
    fn begin(mut self) -> Result<Self, Failure<KernelMapError>> {
        let arena = self.areas.arena;
        // Until the entries belong to the map, dropping it must not empty them.
        self.areas.arena = VirtRange::raw(arena.start().0, arena.start().0);
        let entries = self.root_entries();
        let indices = Self::root_indices(arena).ok_or(KernelMapError::BadArena)?;
        if indices.start.up_to(indices.end).any(|index| !run::load(entries, index).is_empty()) {
            return Err(KernelMapError::BadArena.into());
        }
        let mut counts = Counts::default();
        for index in indices.start.up_to(indices.end) {
            let Some(table) = new_table(self.memory, P::Arch::ROOT.below(), &mut counts) else {
                self.empty_root_entries(arena, indices.start..index + 1);
                return Err(Failure::NoMemory);
            };
            self.memory.frames.table(table).unlock();
            entries[index.position()].store(P::Arch::table(table).0, Ordering::Release);
            counts.entries_written += 1;
        }
        self.memory.platform().publish_entries();
        self.stats.add(&counts);
        self.areas.arena = arena;
        Ok(self)
    }

    /// The positions in the root that cover an arena; `None` if the range cannot be an arena.
    fn root_indices(arena: VirtRange) -> Option<Range<EntryIndex>> {
        let (start, last) = (arena.start(), VirtAddr(arena.end().0.wrapping_sub(1)));
        let level = P::Arch::ROOT;
        let top = level.span_shift() + P::Arch::INDEX_BITS;
        let under_one_root = start.0.checked_shr(top) == last.0.checked_shr(top);
        let whole_pages = start.is_aligned(PAGE_SIZE) && arena.end().is_aligned(PAGE_SIZE);
        let useful = under_one_root && whole_pages && arena.len() >= 2 * PAGE_SIZE;
        // If one root has both halves, the bits above those that the table translates must be
        // copies of the highest translated bit. If user space has the whole lower half, they are
        // nonzero.
        let above = start.0.checked_shr(top).unwrap_or(0);
        let ones = u64::MAX.checked_shr(top).unwrap_or(0);
        let upper =
            above == ones && (start.0 >> (top - 1) & 1 == 1 || P::Arch::USER_END >> top != 0);
        let lower = above == 0 && start.0 != 0 && last.0 < P::Arch::USER_END;
        let index = |at| level.index_of(at);
        (useful && (upper || lower)).then(|| index(start)..index(last) + 1)
    }

    /// Empties root entries that cover no area. Invalidates all TLBs and frees the tables that the
    /// entries pointed to after a grace period.
    fn empty_root_entries(&self, arena: VirtRange, indices: Range<EntryIndex>) {
        let entries = self.root_entries();
        let mut counts = Counts::default();
        let mut tables = DetachedTables::default();
        for index in indices.start.up_to(indices.end) {
            let entry = run::load(entries, index);
            if !entry.is_empty() {
                entries[index.position()].store(0, Ordering::Relaxed);
                // SAFETY: 1. the only entry that points to the table was just cleared; 2. the flush
                // follows.
                unsafe { tables.push(&self.memory.frames, P::Arch::frame(entry)) };
            }
        }
        self.invalidate(arena, Level::PTE, Tables::Changed, &mut counts);
        Batch::of(tables).free_after_readers(self.memory);
    }

    /// The root table, which AArch64 loads into `TTBR1_EL1`. [`Platform::invalidate_kernel`]
    /// receives it.
    ///
    /// Context: any.
    pub fn root(&self) -> Frame {
        self.root
    }

    /// The memory that provides the map's frames.
    ///
    /// Context: any.
    pub fn memory(&self) -> &'m Memory<P> {
        self.memory
    }

    /// The addresses that the map allocates from.
    ///
    /// Context: any.
    pub fn arena(&self) -> VirtRange {
        self.areas.arena
    }

    /// The map without leaves above `level`, for processors that lack larger leaves (x86-64 without
    /// 1 GiB pages: [`Level::PMD`]).
    ///
    /// Context: any.
    #[must_use]
    pub fn with_largest_leaf(self, level: Level<P::Arch>) -> Self {
        let largest_leaf = level.clamp(Level::PTE, self.largest_leaf);
        let mut map = self;
        map.largest_leaf = largest_leaf;
        map
    }

    /// The map without contiguous runs, for machines that do not support them (RISC-V without
    /// Svnapot).
    ///
    /// Context: any.
    #[must_use]
    pub fn without_contiguous_runs(self) -> Self {
        let mut map = self;
        map.largest_contig = Level::NONE;
        map
    }

    /// Work done on the tables.
    ///
    /// Context: any.
    pub fn counts(&self) -> Counts {
        self.stats.read()
    }

    /// Sets the number of freed pages that may wait for a purge. While another CPU purges, twice
    /// that number may wait; beyond that, a CPU that frees pages waits until the purge ends. With
    /// 0, a purge follows every free.
    ///
    /// Context: any.
    pub fn set_purge_limit(&self, pages: u64) {
        self.limit.store(pages, Ordering::Relaxed);
    }
}

impl<P: Platform> fmt::Debug for KernelMap<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelMap")
            .field("root", &self.root)
            .field("arena", &self.areas.arena)
            .finish_non_exhaustive()
    }
}

impl<P: Platform> Drop for KernelMap<'_, P> {
    /// Frees all frames, tables and areas. No address of the map is in use.
    fn drop(&mut self) {
        if let Some(indices) = Self::root_indices(self.areas.arena) {
            self.free_everything();
            self.empty_root_entries(self.areas.arena, indices);
            crate::deferred::free_some(self.memory);
        }
        if self.ownership == Ownership::Own {
            // SAFETY: 1. the map made it; 2. neither the map's addresses nor its root are still in
            // use.
            unsafe { free_table(self.memory, self.root, &mut Counts::default()) };
        }
    }
}
