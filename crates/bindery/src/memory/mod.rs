//! [`Memory`]: all physical memory that an embedder hands over, and the state that its address
//! spaces share.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod answers;
mod commitment;
mod cpus;
mod dirty_limit;
mod embedder_frames;
mod folio_policy;
mod instructions;
mod mapped;
mod named;
mod record;
mod shown;
mod watermarks;

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::arch::{Arch, Level, MemoryType};
use crate::commit::CommitState;
use crate::deferred::{self, Deferral};
use crate::effort::EffortSetting;
use crate::error::Error;
use crate::events::{Events, RareEvents};
use crate::frame::meta;
use crate::frame::{AllocateFor, FrameRange, FrameTraffic, Frames, FramesError, FreeBatch};
use crate::huge_zero::HugeZero;
use crate::platform::Platform;
use crate::swap::{self, Clock, Swap};
use crate::sync::Mutex;

pub(crate) use answers::{Answers, Earlier};
pub use commitment::Commitment;
pub(crate) use commitment::Reservation;
pub(crate) use cpus::{CpuRecord, Cpus};
pub use dirty_limit::DirtyLimit;
pub use embedder_frames::FrameKind;
pub(crate) use folio_policy::HugeAdvice;
pub use folio_policy::{FolioPolicy, SizeMode};
pub(crate) use instructions::{
    before_execution, before_execution_of, written_by_call, written_for_another,
};
pub(crate) use mapped::{absent_limit, folio_limit, share_frames, unmap_frames, unmap_pages};
pub(crate) use named::{Name, NameLinks, Records, find_named};
use record::Slabs;
pub(crate) use record::{Anchor, DEFERRED_KINDS, Opaque, Record, RecordKind};
pub(crate) use shown::{map_shown, may_show, shown_limit, unmap_shown};
use watermarks::Watermarks;

/// The machine's memory under Bindery's management: frames, their metadata, the zero page, the
/// folio policies. A system has one memory, and every [`crate::AddressSpace`] borrows it.
///
/// ```
/// use bindery::{FrameRange, FramesError, Memory, Platform};
///
/// /// # Safety
/// /// As of [`Memory::new`].
/// unsafe fn start<P: Platform>(platform: P, free: FrameRange) -> Result<Memory<P>, FramesError> {
///     // SAFETY: 1. and 2. the caller's obligations.
///     let memory = unsafe { Memory::new(platform, &[free]) }?;
///     assert!(memory.total_frames() < u64::from(free.count)); // the metadata takes some
///     Ok(memory)
/// }
/// ```
pub struct Memory<P: Platform> {
    pub(crate) frames: Frames<P>,
    pub(crate) zero_frame: Frame,
    pub(crate) huge_zero: HugeZero,
    pub(crate) swap: Swap<P>,
    /// The position at which reclaim continues, and its record of evictions.
    pub(crate) clock: Clock,
    slabs: Slabs<P>,
    /// The list of all objects, which the module `object` interprets.
    pub(crate) objects: Anchor<P>,
    /// Answers of pagers that no thread waits for; the module `object` interprets them.
    pub(crate) answers: Answers,
    pub(crate) deferred: Deferral<P>,
    pub(crate) effort: EffortSetting,
    policy: FolioPolicy,
    shared_policy: FolioPolicy,
    file_policy: FolioPolicy,
    commit: CommitState,
    dirty_limit: DirtyLimit,
    /// Held while pages move between the global commitment and the credit of a CPU. On its own
    /// cache lines, because each fault reads the fields beside it.
    credit_lock: CachePadded<Mutex<P::SpinLock, ()>>,
    fault_reserve: AtomicU64,
    watermarks: Watermarks,
    /// On its own cache lines, like `credit_lock`.
    creations: CachePadded<Creations>,
    pub(crate) rare: RareEvents,
    pub(crate) cpus: Cpus<P>,
}

/// The counts that a new address space changes.
#[derive(Default)]
struct Creations {
    /// The number of lists of areas created so far.
    indexes: AtomicU64,
    /// The last identity assigned to an address space for its userfaultfds.
    last_identity: AtomicU64,
}

impl<P: Platform> fmt::Debug for Memory<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("total_frames", &self.total_frames())
            .field("free_frames", &self.free_frame_count())
            .finish_non_exhaustive()
    }
}

impl<P: Platform> Memory<P> {
    /// Takes over the frames in `ranges`. About 0.8 % of them hold the metadata (32 bytes for
    /// each frame between the lowest and the highest).
    ///
    /// Context: spins. Complexity: linear in the frames; done once, at boot.
    ///
    /// # Errors
    /// If ranges are empty, overlap, or are too small to hold their own metadata.
    ///
    /// # Safety
    /// 1. Only the memory uses the frames from the call on, forever: they are RAM, and no part of
    ///    the caller's image, heap, stacks, tables or initial file system; no device writes them;
    ///    no other `Memory` was made of them. (Leave such frames out of `ranges`.)
    /// 2. No translation in any table that a CPU walks, or in any TLB, leads to the frames, except
    ///    those of the direct map.
    ///
    /// Two memories over the same frames would both allocate them, so safe code cannot create a
    /// memory:
    ///
    /// ```compile_fail,E0133
    /// use bindery::{FrameRange, FramesError, Memory, Platform};
    ///
    /// fn take<P: Platform>(platform: P, ranges: &[FrameRange]) -> Result<Memory<P>, FramesError> {
    ///     Memory::new(platform, ranges)
    /// }
    /// ```
    pub unsafe fn new(platform: P, ranges: &[FrameRange]) -> Result<Self, FramesError> {
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { take_over(platform, ranges) }
    }

    /// The platform that was passed to [`Memory::new`].
    ///
    /// Context: any.
    #[inline]
    pub fn platform(&self) -> &P {
        self.frames.platform()
    }

    /// The folio sizes that faults may use in anonymous memory. May be changed at any time.
    ///
    /// The initial policy is that of Linux in its default configuration: the huge size (2 MiB)
    /// inherits, the global mode is [`SizeMode::Always`], and no other size is used. Some
    /// distributions choose [`SizeMode::Madvise`] instead ([`FolioPolicy::set_global`]).
    ///
    /// Context: any.
    pub fn folio_policy(&self) -> &FolioPolicy {
        &self.policy
    }

    /// Like [`Memory::folio_policy`], for shared memory (Linux: `shmem_enabled`). The initial
    /// global mode is [`SizeMode::Never`], as on Linux.
    ///
    /// Context: any.
    pub fn shared_folio_policy(&self) -> &FolioPolicy {
        &self.shared_policy
    }

    /// Like [`Memory::folio_policy`], for files. Initially no size is used. (On Linux the file
    /// system decides.)
    ///
    /// Context: any.
    pub fn file_folio_policy(&self) -> &FolioPolicy {
        &self.file_policy
    }

    /// The limit for the dirty pages of all files together, initially a fifth of the frames (Linux:
    /// `vm.dirty_ratio`, 20 %).
    ///
    /// Context: any.
    pub fn dirty_limit(&self) -> &DirtyLimit {
        &self.dirty_limit
    }

    /// A nonzero number that was never returned before.
    pub(crate) fn new_identity(&self) -> u64 {
        self.creations.last_identity.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Reserves `frames` frames for faults; initially 0. [`Object::write`] and [`Object::allocate`]
    /// reclaim pages if they would consume the reserve. If reclaim frees too few pages, they fail
    /// with [`crate::Error::OutOfMemory`], and [`Platform::out_of_memory`] is not called. So a
    /// program that fills all memory with a file gets that error, no program is killed, and faults
    /// still find frames.
    ///
    /// [`Object::write`]: crate::Object::write
    /// [`Object::allocate`]: crate::Object::allocate
    ///
    /// Context: any.
    pub fn set_fault_reserve(&self, frames: u64) {
        self.fault_reserve.store(frames, Ordering::Relaxed);
    }

    /// The number of frames that was set by [`Memory::set_fault_reserve`].
    ///
    /// Context: any.
    pub fn fault_reserve(&self) -> u64 {
        self.fault_reserve.load(Ordering::Relaxed)
    }

    /// The order of folios that one entry above level 1 maps.
    pub(crate) fn huge_order(&self) -> Order {
        P::Arch::PMD.order()
    }

    /// Counts of rare events so far.
    ///
    /// Context: any.
    pub fn events(&self) -> Events {
        let of_cpus = self.cpus.records().map(|record| &record.swap.events);
        let FrameTraffic { taken, returned } = self.frames.traffic();
        self.rare.read(taken, returned, of_cpus)
    }

    /// Whether the frame is the zero page or part of the huge zero page, which all address spaces
    /// share.
    pub(crate) fn is_zero(&self, frame: Frame) -> bool {
        frame == self.zero_frame || self.huge_zero.pages_from(frame, self.huge_order()) > 0
    }

    /// The number of free frames, in base pages.
    ///
    /// Context: any.
    pub fn free_frame_count(&self) -> u64 {
        self.frames.free_frame_count()
    }

    /// Sets the watermarks of the embedder's reclaimer, in free frames (Linux: those of a zone).
    /// The reclaimer wakes when fewer than `low` frames are free ([`Memory::is_short`]) and
    /// reclaims until `high` are free ([`Memory::shortage`]). Both are initially 0. While a swap
    /// area is on, both are at least three times the frames reserved for reclaim
    /// ([`Memory::reserved_frames`]). A system without a swap area, which only drops pages of
    /// files, must call this function.
    ///
    /// Context: any.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `low` is above `high`, or `high` above half of all frames: reclaim
    /// would never end. Nothing has changed.
    pub fn set_watermarks(&self, low: u64, high: u64) -> Result<(), Error> {
        self.watermarks.set(low, high, self.total_frames())
    }

    /// Whether fewer frames are free than the low watermark ([`Memory::set_watermarks`]), so the
    /// embedder should wake its reclaimer. An embedder checks this after a fault or a call, or by a
    /// timer.
    ///
    /// Context: any. Complexity: constant unless memory is short or other CPUs keep many free
    /// frames; then linear in the CPUs that were ever online.
    pub fn is_short(&self) -> bool {
        !self.frames.has_free_frames(self.watermarks.low().max(self.enough_free_frames()))
    }

    /// The number of pages to free until the high watermark is reached
    /// ([`Memory::set_watermarks`]); the embedder's reclaimer frees that number.
    ///
    /// Context: any. Complexity: linear in the CPUs that were ever online.
    pub fn shortage(&self) -> u64 {
        let high = self.watermarks.high().max(self.enough_free_frames());
        high.saturating_sub(self.free_frame_count())
    }

    /// Whether `frames` frames may be used for content that is not needed yet: at least three times
    /// the reserve and a 64th of all frames remain free.
    pub(crate) fn has_room_for(&self, frames: u64) -> bool {
        let enough = self.enough_free_frames().max(self.total_frames() / 64);
        self.frames.has_free_frames(enough + frames)
    }

    /// The number of free frames at which allocations are far from the reserve.
    pub(crate) fn enough_free_frames(&self) -> u64 {
        self.frames.reserve() * 3
    }

    /// The number of usable frames: all frames of the ranges, without the metadata.
    ///
    /// Context: any.
    pub fn total_frames(&self) -> u64 {
        self.frames.total_frames()
    }

    /// Frees cached frames and the deferred items whose grace period has ended
    /// ([`Memory::deferred`]).
    ///
    /// Context: spins. Complexity: linear in the frames and items that are freed.
    pub fn trim(&self) {
        deferred::free_all_ripe(self);
        self.slabs().for_each(|slab| slab.trim(&self.frames));
        self.frames.trim();
    }

    /// Makes the frame allocator fail: at the `n`-th allocation from now and at all later ones, or
    /// at none with `None`. For tests that run out of memory at each single point.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_allocations_after(&self, n: Option<u64>) {
        self.frames.inject.fail_after(n);
    }

    /// Sets the maximum number of free frames that each online CPU keeps for itself; 0 for none.
    /// The next call of [`Memory::cpu_online`] or [`Memory::cpu_offline`] overrides it. For tests
    /// with little memory.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_front_limit(&self, frames: u32) {
        self.frames.set_front_limit(frames);
    }

    /// The entries of a table.
    ///
    /// # Safety
    /// 1. `table` is a page table of [`Platform::Arch`] or its root: its frame was zeroed for this
    ///    use, and the core and the MMU access it only by aligned 64-bit atomics.
    /// 2. It is not freed while the result is used: the caller has it locked, is in a read section
    ///    in which it found the table, has detached it, or is the only thread that can find it.
    #[inline]
    pub(crate) unsafe fn table_entries(&self, table: Frame) -> &[AtomicU64] {
        let arena = self.platform().direct_map(table).cast::<AtomicU64>();
        debug_assert!(PAGE_SIZE >= 8 << P::Arch::INDEX_BITS);
        // SAFETY: the arena shows all 4,096 bytes of the frame for as long as the platform lives
        // (obligation 1 of `Platform`), aligned to 4,096; a table of 2^INDEX_BITS entries fits. All
        // other accesses to the bytes are atomic (the caller's obligation 1), and the frame remains
        // a table (its obligation 2).
        unsafe { core::slice::from_raw_parts(arena.as_ptr(), P::Arch::ENTRIES as usize) }
    }

    /// The bits of an entry that select a memory type; `None` if the architecture or the machine
    /// has no such type.
    pub(crate) fn memory_type_bits(&self, memory: MemoryType) -> Option<u64> {
        let is_selectable =
            memory == MemoryType::Normal || self.platform().page_based_memory_types();
        P::Arch::memory_type(memory).filter(|_| is_selectable)
    }

    /// The level of the largest entry that maps frames of a [`crate::FrameSource`] in programs.
    pub(crate) fn largest_shown_leaf(&self) -> Level<P::Arch> {
        self.platform().largest_shown_leaf().clamp(Level::PMD, P::Arch::LARGEST_LEAF)
    }

    /// The key for the tower heights of a new list of areas. It depends only on the platform's seed
    /// and on the number of earlier lists, so the same calls have the same cost wherever the kernel
    /// and its frames are located.
    pub(crate) fn index_key(&self) -> [u64; 2] {
        [self.platform().seed(), self.creations.indexes.fetch_add(1, Ordering::Relaxed)]
    }

    /// Called before an allocation that may wait for memory. Not called under a table lock or in a
    /// read section, because the thread that frees memory could wait for the caller. In those
    /// contexts, an allocation is only tried; if it fails, the caller releases all locks,
    /// allocates, and retries ([`crate::table::TablePool`]).
    #[inline]
    pub(crate) fn may_wait(&self) {
        self.platform().allocation_may_wait();
    }

    /// Counts a fault that read content from a pager or swap.
    pub(crate) fn note_major_fault(&self) {
        RareEvents::note(&swap::frequent_events(self).major_faults);
        self.platform().major_fault();
    }

    /// Reports to a measuring platform the work done in a read section or under locks.
    #[inline(always)]
    pub(crate) fn worked(&self, _entries: u64, _tables_marked: u64) {
        #[cfg(any(test, feature = "measure"))]
        self.platform()
            .worked(crate::platform::Work { entries: _entries, tables_marked: _tables_marked });
    }

    /// A batch for a caller that unmaps many pages: frames that become free are freed together with
    /// their neighbors.
    pub(crate) fn free_batch(&self) -> FreeBatch<'_, P> {
        FreeBatch::new(&self.frames)
    }
}

/// The maximum fraction of all frames that may be dirty pages of files, as a divisor.
const DIRTY_SHARE: u64 = 5;

/// # Safety
/// 1. and 2. as of [`Memory::new`].
unsafe fn take_over<P: Platform>(
    platform: P,
    ranges: &[FrameRange],
) -> Result<Memory<P>, FramesError> {
    // SAFETY: 1. is the caller's promise 1.
    let frames = unsafe { Frames::new(platform, ranges) }?;
    let zero_frame = frames.allocate(Order::PAGE, AllocateFor::Use);
    let zero_frame = zero_frame.ok_or(FramesError::TooSmall)?;
    frames.platform().zero(zero_frame, 1);
    if !P::Arch::COHERENT_FETCHES {
        frames.platform().synchronize_instructions(zero_frame, 1);
    }
    frames.meta(zero_frame).state.store(meta::MetaKind::Zero as u32, Ordering::Relaxed);
    let total = frames.total_frames();
    let deferral = Deferral::new(frames.total_frames());
    Ok(Memory {
        frames,
        zero_frame,
        huge_zero: HugeZero::new(),
        swap: Swap::new(total / 2),
        clock: Clock::new(),
        slabs: Slabs::new(),
        objects: Anchor::new(),
        answers: Answers::new(),
        deferred: deferral,
        effort: EffortSetting::new(),
        policy: FolioPolicy::new(SizeMode::Inherit, SizeMode::Always),
        shared_policy: FolioPolicy::new(SizeMode::Inherit, SizeMode::Never),
        file_policy: FolioPolicy::new(SizeMode::Never, SizeMode::Never),
        dirty_limit: DirtyLimit::new(total / DIRTY_SHARE),
        commit: CommitState::new(total),
        credit_lock: CachePadded::new(Mutex::new(())),
        fault_reserve: AtomicU64::new(0),
        watermarks: Watermarks::new(),
        creations: CachePadded::default(),
        rare: RareEvents::default(),
        cpus: Cpus::new(),
    })
}
