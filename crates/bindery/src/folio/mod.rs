//! Folios: blocks of 1 to 512 pages of user memory with one reference count.
//!
//! Invariants 14 to 21 of `docs/invariants.md` are about folios.
//!
//! | file | contents |
//! |---|---|
//! | `handle` | [`Folio`], the name of a folio; [`FolioHandle`], which has the methods of one |
//! | `fresh` | the life of a folio; [`FreshFolio`], which only its maker knows |
//! | `frozen` | [`FrozenFolio`], which has no holder any more and is to be freed |
//! | `count` | the word of references, pins and mappings, and its transitions |
//! | `mapping` | mappings and pins |
//! | `reference` | [`FolioRef`], [`HeldFolio`]: references, also from a frame number |
//! | `lock` | [`FolioLock`] and [`LockedFolio`]; [`FolioLocked`], a proof of the lock |
//! | `lock_word` | the bits of the lock, as functions of their word |
//! | `owner` | the owner of a folio |
//! | `exclusive` | [`ExclusiveBits`](exclusive::ExclusiveBits): which pages one process has for itself |
//! | `flags` | dirty, lazy, fetchable, read around |
//! | `aging`, `unevictable` | [`ReclaimState`](aging::ReclaimState): the age of a folio, and whether it is locked into memory |
//! | `alone` | whether one process may have all mappings of a folio |
//! | `swap_place` | the swap slots of a folio in the swap cache |
//! | `split` | one folio into several |
//! | `batch` | [`FolioBatch`]: passes over many folios |
//! | `view` | the use of each frame, for readers of all memory |
//!
//! Loops over entries use [`Folio`]s, which are plain numbers, and change counts by runs. Guards
//! ([`FolioRef`], [`FolioLock`], [`LockedFolio`]) are used outside these loops.
//!
//! # Holds on a folio
//! | hold | taken by | keeps | under |
//! |---|---|---|---|
//! | a fresh folio | the thread that allocated it | everything: no other thread can find it | nothing; plain stores |
//! | a mapping | the thread that writes the entry; fork and moves, from an existing one | frame, contents, kind of owner | the lock of the entry's table |
//! | a pin | a thread that keeps a mapping meanwhile | frame, contents | that table's lock |
//! | a reference | a holder of a mapping or a reference; a page index, one for each page; a walker, from a frame number | frame, order, kind | nothing |
//! | the lock | a holder of a reference, or one that keeps a mapping | owner and index | nothing; below the invalidate locks, above those of anonymous families; only tried under a table's lock and in a read section |
//!
//! The release of the last hold frees the folio. A walker may take a reference at any time, so a
//! read of the count never proves that a thread is the only holder, unless the same step freezes
//! the count (`count`). After the freeze, all accesses are plain. A walker with a reference may
//! rely on the folio's order. With the lock as well, it may rely on the owner. A mapped folio for
//! which a walk finds no entry is busy, because entries move between tables.

mod aging;
mod alone;
mod batch;
mod count;
mod exclusive;
mod flags;
mod fresh;
mod frozen;
mod handle;
mod lock;
mod lock_word;
#[cfg(all(test, any(loom, shuttle)))]
mod loom_model;
mod mapping;
mod owner;
mod reference;
mod split;
mod swap_place;
#[cfg(test)]
mod tests;
mod unevictable;
mod view;

pub(crate) use aging::{Age, Eviction, Turn};
pub(crate) use batch::FolioBatch;
pub(crate) use count::PinRoom;
#[cfg(all(test, any(loom, shuttle)))]
pub(crate) use count::{REFERENCE, publish, refer, take_all};
pub(crate) use exclusive::ExclusiveRun;
pub(crate) use flags::mark_single_lazy;
pub(crate) use fresh::FreshFolio;
pub(crate) use frozen::FrozenFolio;
pub use handle::MAX_FOLIO_ORDER;
pub(crate) use handle::{FOLIO_ORDERS, Folio, FolioHandle, Freed, OnePage};
pub(crate) use lock::{FolioLock, FolioLocked, LockedFolio};
#[cfg(all(test, any(loom, shuttle)))]
pub(crate) use lock_word::{
    begin_writeback, lock_unless_writeback, mark_held, take_from_request, unlock,
};
pub(crate) use mapping::{is_shared_page, unmap_shared_page};
pub use owner::OwnerKind;
pub(crate) use owner::{
    ALIGN as OWNER_ALIGN, FolioIndex, FolioOwner, LiveOwner, Owner, OwnerMark, OwnerRun,
};
pub(crate) use reference::{FolioRef, HeldFolio};
pub(crate) use swap_place::SwapPlace;
pub use view::{FrameUsage, FrameUse, FrameView};
pub(crate) use view::{frame_usage, frame_view, pages_of_block};
