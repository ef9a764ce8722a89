//! The bytes of stored objects: written before their handle is known, and stable until it is freed.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::slice;
use core::sync::atomic::Ordering::Relaxed;

use super::Corrupt;
use super::extent::{Extent, LINK};
use super::pool::is_pool_frame;
use crate::bytes::place;
use crate::frame::Frames;
use crate::platform::Platform;

/// Writes an object to the chunks that were reserved for it.
///
/// # Safety
/// 1. The chunks of `extents` are reserved ([`super::pool::PoolInFrames::reserve`]), and only the
///    caller knows them.
pub(super) unsafe fn write<P: Platform>(platform: &P, extents: &[Extent], mut object: &[u8]) {
    for (index, extent) in extents.iter().enumerate() {
        // SAFETY: 1. the extent is reserved (obligation 1).
        let start = unsafe { place_of(platform, *extent) };
        // SAFETY: the direct map shows the chunks, which only the caller uses (the caller's
        // obligation 1).
        let chunks = unsafe { slice::from_raw_parts_mut(start, extent.room()) };
        let (link, mut here) = chunks.split_at_mut(if extent.is_last() { 0 } else { LINK });
        if let Some(next) = extents.get(index + 1)
            && !link.is_empty()
        {
            link.copy_from_slice(&next.pack().to_ne_bytes());
        }
        let count = here.len().min(object.len());
        here = &mut here[..count];
        here.copy_from_slice(&object[..count]);
        object = &object[count..];
    }
}

/// Whether the extent's chunks are in use. This check rejects most forged or freed handles.
pub(super) fn check<P: Platform>(frames: &Frames<P>, extent: Extent) -> Result<(), Corrupt> {
    let is_stored = is_pool_frame(frames, extent.frame)
        && frames.meta(extent.frame).word.load(Relaxed) & extent.mask() == extent.mask();
    if is_stored { Ok(()) } else { Err(Corrupt) }
}

/// The bytes of an object in one extent.
///
/// # Safety
/// 1. The extent has passed [`check`].
/// 2. The extent is neither freed nor written for as long as the bytes are used.
pub(super) unsafe fn bytes_in<P: Platform>(platform: &P, extent: Extent) -> &[u8] {
    let link = if extent.is_last() { 0 } else { LINK };
    // SAFETY: 1. the caller's obligation 1.
    let start = unsafe { place_of(platform, extent) };
    // SAFETY: the direct map shows the chunks (obligation 1), which do not change (obligation 2).
    let chunks = unsafe { slice::from_raw_parts(start, extent.room()) };
    &chunks[link..link + extent.bytes()]
}

/// The extent after another; `None` if the object ends there.
///
/// # Safety
/// As for [`bytes_in`].
pub(super) unsafe fn rest<P: Platform>(
    platform: &P,
    extent: Extent,
) -> Result<Option<Extent>, Corrupt> {
    if extent.is_last() {
        return Ok(None);
    }
    // SAFETY: 1. the caller's obligation 1.
    let link = unsafe { place_of(platform, extent) }.cast::<u64>();
    // SAFETY: chunks are aligned, and long enough for a link; the caller's obligations cover the
    // rest.
    let next = Extent::unpack(unsafe { link.read() }).ok_or(Corrupt)?;
    let left = extent.length - extent.bytes();
    if next.length == left { Ok(Some(next)) } else { Err(Corrupt) }
}

/// Copies the pieces of an object into one buffer and returns the object's length.
///
/// # Safety
/// 1. The extents of the object that pass [`check`] are neither freed nor written during the call.
pub(super) unsafe fn gather<P: Platform>(
    frames: &Frames<P>,
    object: Extent,
    into: &mut [u8],
) -> Result<usize, Corrupt> {
    let mut at = 0;
    let mut next = Some(object);
    while let Some(extent) = next {
        check(frames, extent)?;
        // SAFETY: 1. checked above. 2. the caller's obligation 1.
        let here = unsafe { bytes_in(frames.platform(), extent) };
        into.get_mut(at..at + here.len()).ok_or(Corrupt)?.copy_from_slice(here);
        at += here.len();
        // SAFETY: as above.
        next = unsafe { rest(frames.platform(), extent) }?;
    }
    Ok(at)
}

/// The address of an extent in a frame of compressed pages.
///
/// # Safety
/// 1. The extent's frame belongs to the memory: the extent has passed [`check`] or was reserved.
unsafe fn place_of<P: Platform>(platform: &P, extent: Extent) -> *mut u8 {
    // SAFETY: 1. an extent lies inside its frame (`Extent::unpack`, `PoolInFrames::carve`), which
    // belongs to the memory by the caller's obligation 1.
    unsafe { place(platform, extent.frame, extent.start()) }.as_ptr()
}
