//! Objects, which back all mappings that are not anonymous: shared memory, a file behind a pager,
//! or frames of the embedder.
//!
//! An *object* has numbered pages, independent of its mappings. It lives while a handle
//! ([`Object`]) or a mapping exists. Pages that are not in memory are zeroes, in swap, or stored by
//! the pager ([`Pager`]).
//!
//! | file | contents |
//! |---|---|
//! | `state` | `ObjectState`: the object's state, its holders, its committed memory |
//! | `backing` | the storage that holds its content besides memory |
//! | `page_index` | the index of its pages, with its lock |
//! | `invalidate` | its invalidate lock, and the proofs that it is held |
//! | `frame_source` | [`FrameSource`]: frames that are not the core's, shown to programs |
//! | `create` | new objects |
//! | `lent` | what was lent to it for as long as it has holders |
//! | `attachments` | reports of its mappings |
//! | `pages` | pages found, marked dirty |
//! | `mapped_write` | pages that faults and pins make dirty, with the pager's consent |
//! | `dropping` | pages dropped |
//! | `placed_folio` | a folio at its place in an object |
//! | `fetch`, `ask` | pages brought in, without the pager and from it |
//! | `supply`, `arrival` | filled folios enter the page index; their age |
//! | `page_read`, `read_end` | a read, from its first folio to the index; its end |
//! | `read_request`, `write_request`, `answer` | the requests that a pager gets, and its answers; model under loom: `answer_loom_model` |
//! | `read_ahead` | pages of a file read before they are needed |
//! | `in_flight`, `transfers` | the pages that the pager works on; reads, changes and turns of pages, and the threads that wait for them |
//! | `wait`, `polled_wait`, `polled_lock` | waits with all locks released, by a thread or polled; for locks before a step |
//! | `content`, `read_steps`, `write_steps` | reads and writes from outside mappings, at once or in steps |
//! | `collapse` | one large folio for small ones |
//! | `holes` | the ranges with and without pages |
//! | `reclaim`, `reclaim_shared` | reclaim of a file's clean pages; of shared memory |
//! | `resize` | its size, holes, preallocation |
//! | `quota` | [`Quota`]: the page limit of a file system in memory |
//! | `coherence` | pages and sizes that the other side of a file has changed |
//! | `save`, `sync` | writes dirty pages to the pager; a whole range, at once or in steps |
//! | `detached_batch` | pages that are being stored, and that any thread settles |
//! | `unsaved`, `write_back` | the pages that are to be stored: counted; stored for a file system |
//! | `failed_pages` | pages that the pager has failed to store |
//! | `swap_out`, `swap_in`, `swap_off` | swaps shared memory out and in |
//! | `swap_ahead`, `will_need` | swaps pages in before an access needs them |
//! | `write_errors` | failed writes, reported once to each opener |
//! | `seals` | forbidden changes |
//! | `pager` | [`Pager`]: the storage of files |
//! | `read_buffer`, `stored_bytes` | the pages that a pager fills, and the bytes that it stores |
//! | `mappings` | updates of mappings when pages are dropped or saved |
//! | `registry` | all objects of a memory, and the files that are found by number |
//! | `file_system` | [`FileSystem`]: one object for each file |
//! | `weak` | [`WeakObject`]: a handle that keeps no pages |
//! | `last_holder` | the end of an object |
//!
//! The page index is a [`crate::collections::page_tree`].
//!
//! # Folios
//! A folio belongs to one object and has one reference for each of its pages in the page index. So
//! a hole in the middle of a large folio needs no split: its pages leave the index and release
//! their references, and the frames are freed when the folio has neither a page in the index nor a
//! mapping.
//!
//! ```text
//! index        | 0  1  2  3  4  5  6  7 |          | 0  1  .  .  .  5  6  7 |
//! folio        |f0 f1 f2 f3 f4 f5 f6 f7 |  punched |f0 f1 f2 f3 f4 f5 f6 f7 |
//! references               8            |   ---->               5           |
//! ```
//!
//! # Locks
//! - *Changes*: one writer, resizer or sealer at a time (Linux: the inode lock). Faults do not
//!   acquire this lock.
//! - The invalidate lock (Linux: `invalidate_lock` of the mapping): faults hold it for reading
//!   while they look up a page and map it. A thread that removes pages or permissions holds it for
//!   writing, so no fault maps a page that is being removed. Without the lock, this could happen:
//!   1. CPU A looks up page 3.
//!   2. CPU B truncates the object to two pages, unmaps page 3 everywhere and frees it.
//!   3. CPU A maps the freed page.
//! - The mapping lock (Linux: `i_mmap_rwsem`): guards the tree of VMAs (`rmap`). Walkers hold it
//!   for reading.
//! - The index lock: guards the page index and the list of records in flight, for one look or
//!   change. While it is held, only the spin locks of frames, slabs and the registry are acquired.
//!   Its holder is in a read section, so waiters spin, and it may be acquired with tables locked.
//!
//! `docs/lock-order.md` lists the order of all locks. While the pager reads or stores pages, the
//! call holds none of them and is represented by a record in a list ([`in_flight`]).

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

mod answer;
#[cfg(all(test, any(loom, shuttle)))]
mod answer_loom_model;
mod arrival;
mod ask;
mod attachments;
mod backing;
mod coherence;
#[cfg(feature = "collapse")]
mod collapse;
mod content;
mod create;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod damage;
mod detached_batch;
mod dropping;
mod failed_pages;
mod fetch;
mod file_system;
mod frame_source;
mod holes;
mod in_flight;
mod invalidate;
mod last_holder;
mod lent;
pub(crate) mod mapped_write;
mod mappings;
mod page_index;
mod page_read;
mod pager;
pub(crate) mod pages;
mod placed_folio;
mod polled_lock;
mod polled_wait;
mod quota;
mod read_ahead;
mod read_buffer;
mod read_end;
mod read_request;
mod read_steps;
pub(crate) mod reclaim;
pub(crate) mod reclaim_shared;
mod registry;
mod resize;
mod save;
mod seals;
mod state;
mod stored_bytes;
pub(crate) mod supply;
mod swap_ahead;
mod swap_in;
mod swap_off;
pub(crate) mod swap_out;
mod sync;
mod transfers;
mod unsaved;
mod wait;
mod weak;
mod will_need;
mod write_back;
mod write_errors;
mod write_request;
mod write_steps;

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::Memory;
use crate::platform::Platform;

pub use attachments::{Attachments, SegmentId};
pub use backing::Accounting;
#[cfg(feature = "collapse")]
pub(crate) use collapse::{collapse, try_collapse};
pub(crate) use detached_batch::{settle_written, store_for_reclaim};
pub use file_system::FileSystem;
pub(crate) use frame_source::ShownFrames;
pub use frame_source::{FrameList, FramePiece, FrameSource};
pub(crate) use invalidate::PagesStay;
pub use pager::{Pager, PagerError, Preparation, WriteAccess};
pub(crate) use polled_lock::ObjectLock;
pub use polled_wait::ParkedOn;
pub(crate) use polled_wait::{ObjectWait, Polled, PolledWait};
pub use quota::Quota;
pub use read_ahead::ReadPattern;
pub use read_buffer::ReadBuffer;
pub(crate) use read_end::drop_answered;
pub use read_request::{KeptRead, ReadRequest};
pub(crate) use read_steps::{PageReady, ReadSteps};
pub use resize::Growth;
pub use seals::{Sealing, Seals};
pub use stored_bytes::StoredBytes;
pub(crate) use swap_off::ObjectSwapIn;
pub(crate) use sync::FollowedSave;
pub(crate) use wait::{ForHandler, HandlerWait, Stop, Wait};
pub use weak::WeakObject;
pub use write_errors::ErrorMark;
pub use write_request::{KeptWrite, WriteRequest};
pub(crate) use write_steps::WriteSteps;
pub(crate) use {
    registry::Registry,
    seals::WritableMapping,
    state::{ObjectState, map_removed},
};

/// The maximum size of an object in bytes, as on Linux.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;

/// A handle to shared memory or a file, like a kernel's open file description. Clones are handles
/// to the same object. The object exists as long as a handle or a mapping exists; dropping the last
/// of them frees its memory. Dropping a handle may therefore sleep, because it writes dirty pages
/// to the pager and lets other threads run in between ([`Platform::yield_if_due`]).
///
/// All methods take `&self` and may be called from several CPUs at once, but not from interrupt
/// context.
///
/// ```
/// use bindery::{Accounting, Error, Memory, Platform, Sealing, Seals};
///
/// /// A memfd that stays as it is.
/// fn constant<P: Platform>(memory: &Memory<P>, bytes: &[u8]) -> Result<u64, Error> {
///     let object = memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage)?;
///     object.write(0, bytes)?;
///     object.add_seals(Seals::WRITE | Seals::SHRINK | Seals::GROW | Seals::SEAL)?;
///     Ok(object.size())
/// }
/// ```
///
/// A handle is dropped before the memory that it belongs to:
///
/// ```
/// # use bindery::{Accounting, Error, Memory, Platform, Sealing};
/// fn leave<P: Platform>(memory: Memory<P>) -> Result<u64, Error> {
///     let object = memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage)?;
///     let size = object.size();
///     drop(object);
///     drop(memory);
///     Ok(size)
/// }
/// ```
///
/// A handle cannot outlive the memory:
///
/// ```compile_fail,E0505
/// # use bindery::{Accounting, Error, Memory, Platform, Sealing};
/// fn leave<P: Platform>(memory: Memory<P>) -> Result<u64, Error> {
///     let object = memory.shared_memory(0, Sealing::Allowed, Accounting::PerPage)?;
///     drop(memory);
///     Ok(object.size())
/// }
/// ```
pub struct Object<'m, P: Platform> {
    pub(crate) memory: &'m Memory<P>,
    pub(crate) state: NonNull<ObjectState>,
    /// The order in which calls through this handle read a file.
    pattern: ReadPattern,
    /// A file's pager lives as long as `'m`.
    pager: PhantomData<&'m dyn Pager>,
}

// SAFETY: a handle is a counted reference to a state of atomics and lock-protected fields; the
// thread that owns the handle may use and release the state on any CPU. Pagers are `Send` and
// `Sync`.
unsafe impl<P: Platform> Send for Object<'_, P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Sync for Object<'_, P> {}

impl<'m, P: Platform> Object<'m, P> {
    pub(crate) fn state(&self) -> &ObjectState {
        // SAFETY: the handle is a holder, and the state is freed with its last holder
        // (`last_holder`).
        unsafe { self.state.as_ref() }
    }

    /// Another handle to the object that a VMA maps.
    ///
    /// # Safety
    /// 1. The VMA holds the object until this returns.
    pub(crate) unsafe fn of_mapping(memory: &'m Memory<P>, state: NonNull<ObjectState>) -> Self {
        // SAFETY: the caller's obligation 1.
        unsafe { state.as_ref() }.hold();
        Self { memory, state, pattern: ReadPattern::Unknown, pager: PhantomData }
    }

    /// A number that no other object of the memory has or has had; a kernel can use it as an inode
    /// number.
    ///
    /// Context: any.
    pub fn identity(&self) -> u64 {
        self.state().identity()
    }

    /// The size in bytes.
    ///
    /// Context: any.
    pub fn size(&self) -> u64 {
        self.state().size()
    }

    /// Whether only programs that map the object can access it ([`Memory::secret_memory`]).
    ///
    /// Context: any.
    pub fn is_secret(&self) -> bool {
        self.state().is_secret()
    }

    /// Keeps the object's pages in memory from now on: reclaim does not swap them out. Pages that
    /// are already in swap stay there until they are used. The number of pages is not limited, so
    /// an embedder that offers this to programs must limit it. (Linux: `mapping_set_unevictable`,
    /// for a driver's own pages.)
    ///
    /// Context: any.
    pub fn keep_in_memory(&self) {
        self.state().keep_in_memory(true);
    }

    /// Undoes [`Object::keep_in_memory`]: reclaim may swap the object's pages out again.
    ///
    /// Context: any.
    pub fn allow_swap(&self) {
        self.state().keep_in_memory(false);
        self.memory.clock.note_unlocked(self.memory.frames.span().count);
    }

    /// The number of steps that all calls have taken so far in the tree of the object's mappings:
    /// `mmap` and `munmap` of the object, and the walks of `sync` and of calls that remove pages.
    #[cfg(any(test, feature = "measure"))]
    pub fn mapping_steps(&self) -> u64 {
        self.state().mappers.looked_at()
    }

    /// The number of nodes and slots of the object's page index that all calls have read so far.
    #[cfg(any(test, feature = "measure"))]
    pub fn page_steps(&self) -> u64 {
        self.state().pages.look(self.memory.platform(), |index| index.looked_at())
    }

    /// The number of the object's pages in memory, including those beyond its end. (`st_blocks` is
    /// the sum of this and [`Object::swapped_pages`], in base pages.) May be outdated unless the
    /// caller excludes other users.
    ///
    /// Context: any.
    pub fn resident_pages(&self) -> u64 {
        self.state().pages.resident()
    }

    /// The number of the object's pages in swap; 0 for a file. They have content like pages in
    /// memory and count as committed. May be outdated, like [`Object::resident_pages`].
    ///
    /// Context: any.
    pub fn swapped_pages(&self) -> u64 {
        self.state().pages.swapped()
    }
}

impl<P: Platform> Clone for Object<'_, P> {
    fn clone(&self) -> Self {
        self.state().hold();
        Self { memory: self.memory, state: self.state, pattern: self.pattern, pager: PhantomData }
    }
}

impl<P: Platform> Drop for Object<'_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. the released holder is the handle's own.
        unsafe { last_holder::release(self.memory, self.state) };
    }
}

impl<P: Platform> fmt::Debug for Object<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object")
            .field("identity", &self.identity())
            .field("size", &self.size())
            .field("resident_pages", &self.resident_pages())
            .field("seals", &self.seals())
            .finish_non_exhaustive()
    }
}
