//! [`CompressedStore`]: pages in less memory than they had.
//!
//! | file | contents |
//! |---|---|
//! | `extent` | [`Handle`] and the stretch of chunks that it names |
//! | `pool` | frames with holes, and where an object goes |
//! | `object` | the bytes of objects |
//! | `workspace` | the compressor's memory |
//!
//! A page is compressed by LZ4 (the block format of lz4_flex, in safe Rust) and put away as an
//! object of as many bytes. Where that would not save an eighth of the page, it is kept as it is,
//! in a frame of its own. Pages of one repeated value are not for this store: their owner keeps the
//! value.
//!
//! ```text
//! store   page -> workspace: copy, compress -> reserve chunks (lock) -> write -> handle
//! load    handle -> decompress from the frame to the page               (no lock)
//!         handle of a split object -> workspace: gather -> decompress
//! free    handle -> give chunks back (lock) -> free empty frames
//! ```
//!
//! **Who may touch a byte.** Reserved chunks belong to the thread that stores until it passes the
//! handle on, and are not written again until [`CompressedStore::free`] takes the handle. So loads
//! take no lock, though others store and free beside them. The owner of the handle sees to it that
//! no load of it runs when it frees it, and passes it on by release and acquire.
//!
//! **Locks.** A spin lock around [`Pool`], held for a number of steps bounded by the pieces of an
//! object and the chunks of a frame, with the allocator's lock below. A workspace has a mutex, so
//! [`CompressedStore::store`] and [`CompressedStore::load`] may sleep; its holder waits for nothing
//! but the spin lock. Reclaim may call both with VMAs and mutexes locked, not with a table's lock,
//! in a read section or in an interrupt handler.
//!
//! **Memory.** Frames are taken one by one, and never waited for. Those with objects count toward
//! the limit; the workspaces do not (Linux's zram: neither do its compressors' buffers). The first
//! workspace is made by [`CompressedStore::prepare`], when there is still memory: 32 KiB. Objects
//! are not moved, so a frame comes back when its last object is freed: what is wasted is
//! [`CompressedUsage::wasted`].
//!
//! **Stack.** About 1 KiB for a store, of which the compressor takes most; the tables are not on
//! it.

mod extent;
mod object;
mod pool;
#[cfg(test)]
mod tests;
mod workspace;

use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::error::NoMemory;
use crate::frame::Frames;
use crate::platform::Platform;
use crate::sync::Mutex;

use extent::Extent;
pub(crate) use extent::Handle;
use pool::Pool;
use workspace::{Workspaces, decompress};

/// The largest object that is compressed: a page that takes more is kept as it is.
const LARGEST: usize = PAGE_SIZE as usize / 8 * 7;

/// Why a page was not stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StoreError {
    /// The store may take no more frames.
    Limit,
    /// No frame is free.
    NoMemory,
}

/// The handle names nothing that is stored, or the bytes there are not those of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Corrupt;

/// What a store holds (Linux: `mm_stat` of zram).
///
/// ```
/// use bindery::CompressedUsage;
///
/// /// The ratio of compression, in percent.
/// fn ratio(usage: &CompressedUsage) -> Option<u64> {
///     (100 * usage.bytes_compressed).checked_div(4096 * usage.pages_stored)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompressedUsage {
    /// Pages that are stored.
    pub pages_stored: u64,
    /// Of those, pages that are kept as they are.
    pub pages_raw: u64,
    /// Bytes of all objects.
    pub bytes_compressed: u64,
    /// Frames with objects.
    pub frames_used: u64,
    /// The most that there were.
    pub frames_used_max: u64,
}

impl CompressedUsage {
    const NONE: Self = Self {
        pages_stored: 0,
        pages_raw: 0,
        bytes_compressed: 0,
        frames_used: 0,
        frames_used_max: 0,
    };

    /// Bytes of the frames that no object uses: holes, and the ends of last chunks.
    ///
    /// Context: any.
    pub fn wasted(&self) -> u64 {
        (self.frames_used * PAGE_SIZE).saturating_sub(self.bytes_compressed)
    }
}

/// A store of compressed pages.
///
/// It cannot reach its frames when it is dropped: free all handles and call
/// [`CompressedStore::release`] before.
pub(crate) struct CompressedStore<P: Platform> {
    pool: Mutex<P::SpinLock, Pool>,
    workspaces: Workspaces<P>,
}

impl<P: Platform> CompressedStore<P> {
    /// A store without pages that may take `limit` frames for them.
    pub(crate) const fn new(limit: u64) -> Self {
        Self { pool: Mutex::new(Pool::new(limit)), workspaces: Workspaces::new() }
    }

    /// Makes the first workspace, so that stores need no more than room for their object.
    ///
    /// # Errors
    /// Where 2^3 consecutive frames are not free.
    pub(crate) fn prepare(&self, frames: &Frames<P>, platform: &P) -> Result<(), NoMemory> {
        self.workspaces.with(frames, platform, |_| ()).ok_or(NoMemory)
    }

    /// Stores the content of `page`, which nobody writes meanwhile. (Where somebody does, the
    /// stored bytes are of before or after, each for itself.) May sleep until another store is
    /// done.
    ///
    /// # Errors
    /// Where it takes a new frame, and the store has as many as it may or none is free. Then
    /// nothing is stored.
    ///
    /// # Safety
    /// 1. `page` is a frame of the memory and is not freed during the call.
    /// 2. Its bytes are accessed by atomics or by [`Platform::read_bytes`] and
    ///    [`Platform::write_bytes`] alone, if by anybody.
    pub(crate) unsafe fn store(
        &self,
        frames: &Frames<P>,
        platform: &P,
        page: Frame,
    ) -> Result<Handle, StoreError> {
        let stored = self.workspaces.with(frames, platform, |workspace| {
            // SAFETY: 1. and 2. the caller's.
            let object = unsafe { workspace.compress(platform, page) };
            let extents = self.pool.lock().reserve(frames, object.len())?;
            // SAFETY: 1. reserved here, and the handle is made after this.
            unsafe { object::write(platform, &extents, object) };
            extents.first().and_then(|first| first.handle()).ok_or(StoreError::NoMemory)
        });
        stored.unwrap_or(Err(StoreError::NoMemory))
    }

    /// Writes what is stored to `page`, which holds anything after an error. As after
    /// [`Platform::zero`], the caller makes a release fence before it publishes the page. May sleep
    /// where the object is in pieces.
    ///
    /// # Errors
    /// Where the handle names no stored page, or its bytes are damaged.
    ///
    /// # Safety
    /// 1. If the handle names what is stored, [`CompressedStore::store`] of this store, with the
    ///    same `frames`, returned it before the call, and it is not freed during the call.
    /// 2. `page` is a frame of the memory that the caller alone has.
    pub(crate) unsafe fn load(
        &self,
        frames: &Frames<P>,
        platform: &P,
        handle: &Handle,
        page: Frame,
    ) -> Result<(), Corrupt> {
        let object = handle.extent().ok_or(Corrupt)?;
        object::check(frames, object)?;
        if object.is_raw() {
            platform.copy(object.frame, page, 1);
            return Ok(());
        }
        if object.is_last() {
            // SAFETY: of the bytes, 1. checked above, 2. the caller's obligation 1; of the page, 1.
            // the caller's obligation 2.
            return unsafe { decompress(object::bytes_in(platform, object), platform, page) };
        }
        // SAFETY: 1. and 2. the caller's.
        unsafe { self.load_pieces(frames, platform, object, page) }
    }

    /// [`CompressedStore::load`] of an object that was split.
    ///
    /// # Safety
    /// As there.
    unsafe fn load_pieces(
        &self,
        frames: &Frames<P>,
        platform: &P,
        object: Extent,
        page: Frame,
    ) -> Result<(), Corrupt> {
        let loaded = self.workspaces.with(frames, platform, |workspace| {
            let buffer = workspace.buffer();
            // SAFETY: 1. the caller's obligation 1.
            let length = unsafe { object::gather(frames, platform, object, buffer) }?;
            // SAFETY: 1. the caller's obligation 2.
            unsafe { decompress(buffer.get(..length).ok_or(Corrupt)?, platform, page) }
        });
        loaded.unwrap_or(Err(Corrupt))
    }

    /// Frees what is stored, and the frames that become empty. A handle that names nothing is left
    /// alone and counted in [`Frames::refused`]. Does not sleep.
    ///
    /// # Safety
    /// If the handle names what is stored:
    /// 1. [`CompressedStore::store`] of this store, with the same `frames`, returned it before the
    ///    call, and nobody else frees it.
    /// 2. No [`CompressedStore::load`] of it runs.
    pub(crate) unsafe fn free(&self, frames: &Frames<P>, platform: &P, handle: Handle) {
        let released = handle.extent().ok_or(Corrupt).and_then(|object| {
            // SAFETY: 1. and 2. the caller's.
            unsafe { self.pool.lock().release(frames, platform, object) }
        });
        // The lock is free again.
        let Ok(emptied) = released else { return frames.refuse() };
        for frame in emptied {
            // SAFETY: 1. the pool gave it up. 2. no object lies in it, so nobody reads it.
            unsafe { frames.free(platform, frame, Order::PAGE) };
        }
    }

    /// Frees the workspaces. Later stores make new ones. May sleep.
    pub(crate) fn release(&self, frames: &Frames<P>, platform: &P) {
        self.workspaces.release(frames, platform);
    }

    /// How many frames the store may take for objects.
    pub(crate) fn limit(&self) -> u64 {
        self.pool.lock().limit()
    }

    /// Changes that. Where more are used already, none is taken until enough are freed.
    pub(crate) fn set_limit(&self, frames: u64) {
        self.pool.lock().set_limit(frames);
    }

    /// Whether a page may find room: none was refused since something was freed. Spins.
    pub(crate) fn may_take(&self, frames: &Frames<P>) -> bool {
        self.pool.lock().may_take(frames)
    }

    /// What is stored now.
    pub(crate) fn usage(&self) -> CompressedUsage {
        self.pool.lock().usage
    }

    /// All frames of the store, workspaces too: as many as [`crate::FrameUsage::compressed`] shows.
    /// May sleep.
    pub(crate) fn frames_held(&self) -> u64 {
        self.workspaces.frames() + self.usage().frames_used
    }

    /// Verifies the lists of frames with holes, for the auditor. O(frames).
    ///
    /// # Errors
    /// A frame that is on no list where it belongs.
    pub(crate) fn check(&self, frames: &Frames<P>) -> Result<(), Frame> {
        self.pool.lock().check(frames)
    }
}
