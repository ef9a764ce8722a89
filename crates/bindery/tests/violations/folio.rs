//! Folios that are freed, locked or released in violation of their types, which must not compile. A
//! module of `space`, as `space.rs`, which explains how to read the pairs.

use crate::addr::Frame;
use crate::folio::{
    FolioIndex, FolioLock, FolioRef, FreshFolio, FrozenFolio, HeldFolio, LiveOwner, LockedFolio,
};
use crate::frame::{Frames, FreeBatch};
use crate::platform::Platform;

/// A folio gets another owner only under its lock.
pub(crate) fn set_owner<P: Platform>(frames: &Frames<P>, lock: &FolioLock<'_, P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = (frames, lock.set_owner(LiveOwner::NONE, FolioIndex::NONE));
    #[cfg(lock_violations = "types")]
    let _ = (lock, frames.set_owner(LiveOwner::NONE, FolioIndex::NONE)); //~ E0599
}

/// The index of a folio has room for its first page.
pub(crate) fn set_index<P: Platform>(lock: &FolioLock<'_, P>, page: u64, number: u32) {
    #[cfg(not(lock_violations = "types"))]
    let _ = FolioIndex::for_folio(page, number).map(|index| lock.set_owner(LiveOwner::NONE, index));
    #[cfg(lock_violations = "types")]
    let _ = lock.set_owner(LiveOwner::NONE, page.wrapping_sub(number.into())); //~ E0308
}

/// A folio comes from a frame's metadata, so it exists. It cannot be created from a number.
pub(crate) fn folio<P: Platform>(frames: &Frames<P>, frame: Frame) -> Option<u32> {
    #[cfg(not(lock_violations = "types"))]
    let folio = frames.folio_of(frame)?;
    #[cfg(lock_violations = "types")]
    let folio = crate::folio::Folio::of(frame, crate::addr::Order::PAGE); //~ E0624
    Some(frames.folio(folio).mappings())
}

/// A device's request receives a folio's lock only with a reference.
pub(crate) fn hand_over_lock<P: Platform>(held: FolioRef<'_, P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = held.try_into_locked().map(LockedFolio::into_request);
    #[cfg(lock_violations = "types")]
    let _ = held.try_lock().map(FolioLock::into_request); //~ E0599
}

/// The guard of a locked folio owns its reference, which no other guard can release.
pub(crate) fn release_twice<P: Platform>(held: FolioRef<'_, P>) {
    #[cfg(not(lock_violations = "moves"))]
    drop(held.try_into_locked());
    #[cfg(lock_violations = "moves")]
    let _ = (held.try_into_locked(), drop(held)); //~ E0382
}

/// A folio's lock does not outlive the reference that keeps the folio.
pub(crate) fn release_locked<P: Platform>(held: FolioRef<'_, P>) {
    let lock = held.try_lock();
    #[cfg(not(lock_violations = "moves"))]
    let _ = (drop(lock), drop(held));
    #[cfg(lock_violations = "moves")]
    let _ = (drop(held), drop(lock)); //~ E0505
}

/// A reference that was converted to a value becomes only one guard, however often the value is
/// named.
pub(crate) fn guard_twice<P: Platform>(frames: &Frames<P>, held: HeldFolio) {
    #[cfg(not(lock_violations = "moves"))]
    drop(held.guard(frames));
    #[cfg(lock_violations = "moves")]
    let _ = (held.guard(frames), held.guard(frames)); //~ E0382
}

/// A lock that was left to a batch changes no owner.
pub(crate) fn leave_to_batch<P: Platform>(lock: FolioLock<'_, P>) {
    #[cfg(not(lock_violations = "moves"))]
    let _ = (lock.set_owner(LiveOwner::NONE, FolioIndex::NONE), lock.leave_to_batch());
    #[cfg(lock_violations = "moves")]
    let _ = (lock.leave_to_batch(), lock.set_owner(LiveOwner::NONE, FolioIndex::NONE)); //~ E0382
}

/// A device's request receives the only guard of a folio's lock.
pub(crate) fn hand_over<P: Platform>(leaving: LockedFolio<'_, P>) {
    #[cfg(not(lock_violations = "moves"))]
    leaving.into_request();
    #[cfg(lock_violations = "moves")]
    let _ = (leaving.into_request(), leaving.unlock()); //~ E0382
}

/// A folio that no thread has frozen is not freed: its number, which is freely copied, is not
/// sufficient.
pub(crate) fn free_number<P: Platform>(frames: &Frames<P>, frozen: FrozenFolio<'_, P>) {
    let folio = frames.folio(frozen.folio());
    let mut batch = FreeBatch::new(frames);
    #[cfg(not(lock_violations = "types"))]
    let _ = (folio, frozen.free_into(&mut batch));
    #[cfg(lock_violations = "types")]
    let _ = (FrozenFolio::free_into(folio, &mut batch), frozen); //~ E0308
}

/// A folio is freed only once.
pub(crate) fn free_twice<P: Platform>(frames: &Frames<P>, frozen: FrozenFolio<'_, P>) {
    let mut batch = FreeBatch::new(frames);
    #[cfg(lock_violations = "moves")]
    frozen.free_into(&mut batch);
    frozen.free_into(&mut batch); //~ E0382
}

/// The lock of a folio that is evicted ends when the folio is frozen, not before.
pub(crate) fn end_lock<P: Platform>(leaving: LockedFolio<'_, P>, frozen: FrozenFolio<'_, P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = leaving.into_frozen(frozen);
    #[cfg(lock_violations = "types")]
    let _ = (leaving.into_frozen(), frozen); //~ E0061
}

/// A fresh folio is published only once and cannot be discarded afterwards.
pub(crate) fn publish_twice<P: Platform>(fresh: FreshFolio<'_, P>) {
    let _ = fresh.map(1);
    #[cfg(lock_violations = "moves")]
    fresh.discard(); //~ E0382
}

/// The number of a folio does not prove that the folio is fresh.
pub(crate) fn overwrite_owner<P: Platform>(frames: &Frames<P>, fresh: &FreshFolio<'_, P>) {
    #[cfg(not(lock_violations = "types"))]
    let _ = (frames, fresh.set_owner(LiveOwner::NONE, FolioIndex::NONE));
    #[cfg(lock_violations = "types")]
    let _ = frames.folio(**fresh).set_owner(LiveOwner::NONE, FolioIndex::NONE); //~ E0599
}

/// Holds of a folio are dropped by number only if the caller states whose hold it is.
pub(crate) fn release_number<P: Platform>(frames: &Frames<P>, held: FolioRef<'_, P>) {
    let folio = *held;
    #[cfg(not(lock_violations = "moves"))]
    let _ = (frames.folio(folio).references(), drop(held));
    #[cfg(lock_violations = "moves")]
    let _ = (held, frames.folio(folio).release()); //~ E0133
}
