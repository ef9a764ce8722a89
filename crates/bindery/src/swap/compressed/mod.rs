//! [`CompressedStore`]: holds pages in less memory than they used uncompressed.
//!
//! | file | contents |
//! |---|---|
//! | `extent` | [`Handle`] and the run of chunks that it refers to |
//! | `pools` | the pool of each CPU, and the search of all for room |
//! | `pool` | frames with holes, and the placement of objects |
//! | `quota` | the limit of the frames of all pools |
//! | `object` | the bytes of objects |
//! | `workspace` | the compressor's memory |
//!
//! A page is compressed by LZ4 (the block format of lz4_flex, in safe Rust) and stored as an object
//! of the compressed length. If that would save less than an eighth of the page, the page is stored
//! raw, in a frame of its own. Pages of one repeated word do not reach this store, because their
//! owner keeps the word.
//!
//! ```text
//! store   page -> workspace: copy, compress -> reserve chunks (lock) -> write -> handle
//! load    handle -> decompress from the frame to the page               (no lock)
//!         handle of a split object -> workspace: gather -> decompress
//! free    handle -> release chunks (lock) -> free empty frames
//! ```
//!
//! **Access to bytes.** Reserved chunks belong to the storing thread until it passes the handle on,
//! and are not written again until [`CompressedStore::free`] takes the handle. So loads acquire no
//! lock, though other threads store and free concurrently. The owner of a handle must ensure that
//! no load of the handle runs when it is freed, and must pass the handle on by release and acquire.
//!
//! **Locks.** A spin lock protects each [`pool::Pool`]. The steps under it are bounded by the
//! pieces of an object and the chunks of a frame; the allocator's lock ranks below it. A workspace
//! has a mutex, so [`CompressedStore::store`] and [`CompressedStore::load`] may sleep; the mutex's
//! holder waits only for the spin lock. Reclaim may call both with VMAs and mutexes locked, but not
//! with a table's lock, in a read section or in an interrupt handler.
//!
//! **Memory.** Frames are allocated one by one, without waiting. Frames with objects count toward
//! the limit; the workspaces do not (as the compressors' buffers of Linux's zram do not).
//! [`CompressedStore::prepare`] allocates the first workspace, of 32 KiB, while memory is still
//! available. Objects are not moved, so a frame is freed with its last object;
//! [`CompressedUsage::wasted`] reports the waste.
//!
//! **Stack.** A store uses about 1 KiB of stack, most of it for the compressor; the tables are not
//! on the stack.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod extent;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
mod object;
mod pool;
mod pools;
mod quota;
#[cfg(test)]
mod tests;
mod workspace;

use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::cpu::CpuTable;
use crate::error::NoMemory;
use crate::frame::Frames;
use crate::platform::{Cpu, Platform};

use super::CompressedUsage;

use extent::Extent;
pub(crate) use extent::Handle;
use pools::Pools;
pub(crate) use pools::StorePart;
use workspace::{Workspaces, decompress};

/// The size of the largest object that is stored compressed; a page that needs more is stored raw.
const LARGEST: usize = PAGE_SIZE as usize / 8 * 7;

/// The reason why a page was not stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StoreError {
    /// The store has reached its limit of frames.
    Limit,
    /// No frame is free.
    NoMemory,
}

/// The handle refers to no stored page, or the bytes there are not those of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Corrupt;

/// A store of compressed pages.
///
/// Dropping the store cannot free its frames: free all handles and call
/// [`CompressedStore::release`] first.
pub(crate) struct CompressedStore<P: Platform> {
    pools: Pools<P>,
    workspaces: Workspaces<P>,
}

impl<P: Platform> CompressedStore<P> {
    /// An empty store that may use `limit` frames for pages.
    pub(crate) const fn new(limit: u64) -> Self {
        Self { pools: Pools::new(limit), workspaces: Workspaces::new() }
    }

    /// Allocates the first workspace, so that later stores need only room for their object.
    ///
    /// # Errors
    /// If no 2^3 consecutive frames are free.
    pub(crate) fn prepare(&self, frames: &Frames<P>) -> Result<(), NoMemory> {
        self.workspaces.with(frames, None, |_| ()).ok_or(NoMemory)
    }

    /// Stores the content of `page`, which must not be written during the call. (Otherwise each
    /// stored byte is from either before or after the write.) May sleep until another store has
    /// finished.
    ///
    /// # Errors
    /// If the page needs a new frame, and the store has reached its limit or no frame is free. On
    /// an error, nothing is stored.
    ///
    /// # Safety
    /// 1. `page` is a frame of the memory and is not freed during the call.
    /// 2. All accesses to the page's bytes use only atomics or [`Platform::read_bytes`] and
    ///    [`Platform::write_bytes`].
    pub(crate) unsafe fn store(
        &self,
        frames: &Frames<P>,
        page: Frame,
    ) -> Result<Handle, StoreError> {
        let stored = self.workspaces.with(frames, self.pools.own(frames), |workspace| {
            // SAFETY: 1. and 2. the caller's obligations.
            let object = unsafe { workspace.compress(frames.platform(), page) };
            let extents = self.pools.reserve(frames, object.len())?;
            // SAFETY: 1. the chunks are reserved here, and the handle is created after this.
            unsafe { object::write(frames.platform(), &extents, object) };
            extents.first().and_then(|first| first.handle()).ok_or(StoreError::NoMemory)
        });
        stored.unwrap_or(Err(StoreError::NoMemory))
    }

    /// Writes the stored content to `page`, which holds arbitrary bytes after an error. As after
    /// [`Platform::zero`], the caller executes a release fence before it publishes the page. May
    /// sleep if the object is in pieces.
    ///
    /// # Errors
    /// If the handle refers to no stored page, or the bytes of the page are damaged.
    ///
    /// # Safety
    /// 1. If the handle refers to a stored page, [`CompressedStore::store`] of this store, with the
    ///    same `frames`, returned the handle before the call, and the handle is not freed during
    ///    the call.
    /// 2. `page` is a frame of the memory to which only the caller has access.
    pub(crate) unsafe fn load(
        &self,
        frames: &Frames<P>,
        handle: &Handle,
        page: Frame,
    ) -> Result<(), Corrupt> {
        let object = handle.extent().ok_or(Corrupt)?;
        object::check(frames, object)?;
        let platform = frames.platform();
        if object.is_raw() {
            platform.copy(object.frame, page, 1);
            return Ok(());
        }
        if object.is_last() {
            // SAFETY: of the bytes, 1. checked above, 2. the caller's obligation 1; of the page, 1.
            // the caller's obligation 2.
            return unsafe { decompress(object::bytes_in(platform, object), platform, page) };
        }
        // SAFETY: 1. and 2. the caller's obligations.
        unsafe { self.load_pieces(frames, object, page) }
    }

    /// [`CompressedStore::load`] for a split object.
    ///
    /// # Safety
    /// As for [`CompressedStore::load`].
    unsafe fn load_pieces(
        &self,
        frames: &Frames<P>,
        object: Extent,
        page: Frame,
    ) -> Result<(), Corrupt> {
        let loaded = self.workspaces.with(frames, self.pools.own(frames), |workspace| {
            let buffer = workspace.buffer();
            // SAFETY: 1. the caller's obligation 1.
            let length = unsafe { object::gather(frames, object, buffer) }?;
            // SAFETY: 1. the caller's obligation 2.
            unsafe { decompress(buffer.get(..length).ok_or(Corrupt)?, frames.platform(), page) }
        });
        loaded.unwrap_or(Err(Corrupt))
    }

    /// Frees the stored page, and the frames that become empty. A handle that refers to no stored
    /// page is ignored and counted in [`crate::frame::Allocator::refused`]. Does not sleep.
    ///
    /// # Safety
    /// If the handle refers to a stored page:
    /// 1. [`CompressedStore::store`] of this store, with the same `frames`, returned the handle
    ///    before the call, and no other call frees it.
    /// 2. No [`CompressedStore::load`] of the handle runs.
    pub(crate) unsafe fn free(&self, frames: &Frames<P>, handle: Handle) {
        let released = handle.extent().ok_or(Corrupt).and_then(|object| {
            // SAFETY: 1. and 2. the caller's obligations.
            unsafe { self.pools.release(frames, object) }
        });
        // The lock is already released here.
        let Ok(emptied) = released else { return frames.refuse() };
        for frame in emptied {
            // SAFETY: 1. the pool released it. 2. The frame holds no object, so no thread reads it.
            unsafe { frames.free(frame, Order::PAGE) };
        }
    }

    /// Frees the workspaces. Later stores allocate new ones. May sleep.
    pub(crate) fn release(&self, frames: &Frames<P>) {
        self.workspaces.release(frames, &self.pools.parts);
    }

    /// The parts of the CPUs.
    pub(crate) fn parts(&self) -> &CpuTable<StorePart<P>> {
        &self.pools.parts
    }

    /// Returns the credit and the memory that a CPU retains, when the CPU is taken offline. Its
    /// pages stay in place. Does not sleep.
    pub(crate) fn hand_over(&self, frames: &Frames<P>, cpu: Cpu) {
        self.pools.hand_over(frames, cpu);
    }

    /// The number of frames that the store may use for objects.
    pub(crate) fn limit(&self) -> u64 {
        self.pools.limit()
    }

    /// Sets the limit. If more frames are already used, no frame is allocated until enough are
    /// freed.
    pub(crate) fn set_limit(&self, frames: u64) {
        self.pools.set_limit(frames);
    }

    /// Whether a page may find room: no page was refused since room last appeared.
    #[inline]
    pub(crate) fn may_take(&self, frames: &Frames<P>) -> bool {
        self.pools.may_take(frames)
    }

    /// Whether `pages` pages would find room even if they did not compress, besides those that are
    /// already on their way.
    #[inline]
    pub(crate) fn has_room_for(&self, frames: &Frames<P>, pages: u32) -> bool {
        self.pools.has_room_for(frames, pages)
    }

    /// The current usage.
    pub(crate) fn usage(&self) -> CompressedUsage {
        self.pools.usage()
    }

    /// The number of all frames of the store, including workspaces, as in
    /// [`crate::FrameUsage::compressed`]. May sleep.
    pub(crate) fn frames_held(&self) -> u64 {
        self.workspaces.frames(&self.pools.parts) + self.usage().frames_used
    }

    /// Verifies the lists of frames with holes, for the auditor. O(frames).
    ///
    /// # Errors
    /// A frame that is missing from its list.
    pub(crate) fn check(&self, frames: &Frames<P>) -> Result<(), Frame> {
        self.pools.check(frames)
    }
}
