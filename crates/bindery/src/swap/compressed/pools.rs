//! [`Pools`]: one pool for each CPU, so that CPUs that store and free pages share no cache line.
//!
//! An online CPU stores in its own pool; all other CPUs share one pool. A frame has the number of
//! its pool in its metadata, so a page is freed under the lock of the pool that holds it, whichever
//! CPU frees it. Pages are mostly freed where they were stored, so that lock is mostly the CPU's
//! own.
//!
//! **No room is lost.** An object that finds no room in the CPU's pool is stored in any other pool.
//! A search visits all pools, each under its own lock: it first returns their credit
//! ([`super::quota`]) and then tries each pool. A failed search is remembered until room appears in
//! a pool ([`crate::frame::drains`]), because reclaim would otherwise compress all of memory in
//! vain. Until then, smaller objects are stored only if the CPU's own pool has room.
//!
//! **CPUs that go offline.** Their frames stay in their pool: frees and searches find them there,
//! and so does the CPU when it comes online again. The credit returns to the quota, and the frames
//! of the compressor return to the memory.
//!
//! The lock of a search ranks before those of pools, and no thread holds the locks of two pools.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::extent::Extent;
use super::pool::{Emptied, Extents, Pool, PoolInFrames, pool_of};
use super::quota::CompressedQuota;
use super::workspace::WorkspaceSlot;
use super::{Corrupt, StoreError};
use crate::addr::Frame;
use crate::cpu::CpuTable;
use crate::frame::Frames;
use crate::frame::drains::{self, Drains, Machine};
use crate::frame::meta::NONE;
use crate::platform::{Cpu, Platform};
use crate::swap::CompressedUsage;
use crate::sync::{Mutex, MutexGuard};

/// The number of the pool that is shared by all CPUs without their own. The number of a CPU's pool
/// is one more than that of the CPU.
pub(super) const SHARED: u32 = 0;

/// The maximum number of free frames that [`Pools::has_room_for`] leaves to pages that have slots
/// but are not stored yet.
const MOST_ON_THE_WAY: u64 = 512;

/// A CPU's part of compressed memory.
pub(crate) struct StorePart<P: Platform> {
    pool: Mutex<P::SpinLock, Pool>,
    pub(super) workspace: WorkspaceSlot<P>,
}

impl<P: Platform> StorePart<P> {
    pub(crate) const fn new(cpu: Cpu) -> Self {
        let pool = Mutex::new(Pool::new(cpu.0 as u32 + 1));
        Self { pool, workspace: WorkspaceSlot::new() }
    }
}

/// The pools of a store.
pub(super) struct Pools<P: Platform> {
    shared: Mutex<P::SpinLock, Pool>,
    pub(super) parts: CpuTable<StorePart<P>>,
    quota: CompressedQuota,
    searches: Drains<P>,
    /// Whether the last search failed for lack of memory rather than by the limit.
    lacked_memory: AtomicBool,
}

impl<P: Platform> Pools<P> {
    pub(super) const fn new(limit: u64) -> Self {
        Self {
            shared: Mutex::new(Pool::new(SHARED)),
            parts: CpuTable::new(),
            quota: CompressedQuota::new(limit),
            searches: Drains::unknown(),
            lacked_memory: AtomicBool::new(false),
        }
    }

    /// The part of the running CPU, if it was ever online. The answer may be stale.
    #[inline]
    pub(super) fn own(&self, frames: &Frames<P>) -> Option<&StorePart<P>> {
        self.parts.of(|| frames.platform().cpu())
    }

    /// All pools: that of the running CPU first, and then again among the others.
    fn all<'a>(&'a self, frames: &Frames<P>) -> impl Iterator<Item = &'a Mutex<P::SpinLock, Pool>> {
        let own = self.own(frames).map(|part| &part.pool);
        own.into_iter().chain(self.each())
    }

    /// All pools.
    fn each(&self) -> impl Iterator<Item = &Mutex<P::SpinLock, Pool>> {
        core::iter::once(&self.shared).chain(self.parts.iter().map(|part| &part.pool))
    }

    fn in_frames<'a>(&'a self, pool: &'a mut Pool, frames: &'a Frames<P>) -> PoolInFrames<'a, P> {
        pool.in_frames(frames, &self.quota, &self.searches)
    }

    /// Reserves chunks for an object of `length` bytes, at most a page.
    ///
    /// # Errors
    /// The errors of [`super::CompressedStore::store`]; nothing is reserved.
    pub(super) fn reserve(&self, frames: &Frames<P>, length: usize) -> Result<Extents, StoreError> {
        let own = self.own(frames).map_or(&self.shared, |part| &part.pool);
        let reserved = self.in_frames(&mut own.lock(), frames).reserve(length);
        reserved.or_else(|error| self.search(frames, length, error))
    }

    /// Searches all pools for room, unless the last search found none and no room has appeared
    /// since.
    #[cold]
    #[inline(never)]
    fn search(
        &self,
        frames: &Frames<P>,
        length: usize,
        error: StoreError,
    ) -> Result<Extents, StoreError> {
        let mut result = Err(error);
        drains::run(&self.searches, || {
            self.quota.set_searching(true);
            self.each().for_each(|pool| pool.lock().return_credit(&self.quota));
            for pool in self.all(frames) {
                result = self.in_frames(&mut pool.lock(), frames).reserve(length);
                if result.is_ok() {
                    break;
                }
            }
            self.quota.set_searching(false);
            self.lacked_memory.store(result == Err(StoreError::NoMemory), Relaxed);
            u64::from(result.is_ok())
        });
        if result == Err(StoreError::NoMemory) {
            // Another search may have ended before this thread returned the credit of a frame that
            // it did not get. Its result concerns the limit, and would outlast the shortage of
            // memory.
            self.lacked_memory.store(true, Relaxed);
        }
        result
    }

    /// Releases the chunks of an object and returns the frames that are now empty, for the caller
    /// to free.
    ///
    /// # Errors
    /// As [`PoolInFrames::release`].
    ///
    /// # Safety
    /// As for [`PoolInFrames::release`].
    pub(super) unsafe fn release(
        &self,
        frames: &Frames<P>,
        object: Extent,
    ) -> Result<Emptied, Corrupt> {
        let mut pool = self.lock_pool_of(frames, object.frame).ok_or(Corrupt)?;
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { self.in_frames(&mut pool, frames).release(object) }
    }

    /// Locks the pool that a frame belongs to, or any pool if the frame belongs to none or is
    /// concurrently freed; the caller checks this with the lock held.
    #[inline]
    fn lock_pool_of(
        &self,
        frames: &Frames<P>,
        frame: Frame,
    ) -> Option<MutexGuard<'_, P::SpinLock, Pool>> {
        if !frames.manages(frame) {
            return None;
        }
        let pool = match pool_of(frames, frame).checked_sub(1) {
            None => &self.shared,
            Some(cpu) => &self.parts.get(Cpu(u16::try_from(cpu).ok()?))?.pool,
        };
        Some(pool.lock())
    }

    pub(super) fn limit(&self) -> u64 {
        self.quota.limit()
    }

    /// Changes the limit. A refused page may find room now.
    pub(super) fn set_limit(&self, frames: u64) {
        self.quota.set_limit(frames);
        self.searches.disturb();
    }

    /// Whether a page may find room: no page was refused since room last appeared.
    #[inline]
    pub(super) fn may_take(&self, frames: &Frames<P>) -> bool {
        self.searches.state() != drains::EMPTY
            || self.lacked_memory.load(Relaxed) && frames.free_frame_count() > 0
    }

    /// Whether `pages` pages would find room even if they did not compress, and with them the pages
    /// that are already on their way: up to an eighth of the limit stays free for these.
    #[inline]
    pub(super) fn has_room_for(&self, frames: &Frames<P>, pages: u32) -> bool {
        let limit = self.quota.limit();
        let least = (limit / 8).min(MOST_ON_THE_WAY).max(u64::from(pages));
        limit.saturating_sub(self.quota.granted()) >= least && self.may_take(frames)
    }

    /// The sums over all pools, which are counted one after another.
    pub(super) fn usage(&self) -> CompressedUsage {
        let mut usage = CompressedUsage::NONE;
        for pool in self.each() {
            let pool = pool.lock();
            usage.pages_stored += pool.counts.pages_stored;
            usage.pages_raw += pool.counts.pages_raw;
            usage.bytes_compressed += pool.counts.bytes_compressed;
            usage.frames_used += pool.counts.frames_used;
        }
        usage.frames_used_max = self.quota.most().max(usage.frames_used);
        usage
    }

    /// Returns the credit of a CPU that is taken offline, and frees the frames of its compressor.
    pub(super) fn hand_over(&self, frames: &Frames<P>, cpu: Cpu) {
        if let Some(part) = self.parts.get(cpu) {
            part.pool.lock().return_credit(&self.quota);
            part.workspace.free_if_idle(frames);
        }
    }

    /// The number of frames granted to all pools, read at one point in time.
    #[cfg(test)]
    pub(super) fn granted(&self) -> u64 {
        self.quota.granted()
    }

    /// Verifies the lists of all pools, and that the number of frames granted to them agrees with
    /// the quota.
    ///
    /// # Errors
    /// A frame that is missing from its list; [`NONE`] if a sum is wrong.
    pub(super) fn check(&self, frames: &Frames<P>) -> Result<(), Frame> {
        let mut granted = 0;
        for pool in self.each() {
            let mut pool = pool.lock();
            granted += pool.granted();
            self.in_frames(&mut pool, frames).check()?;
        }
        if granted == self.quota.granted() { Ok(()) } else { Err(Frame(NONE)) }
    }
}
