//! The bytes of stored objects: written before their handle is known, stable until it is freed.

use core::slice;
use core::sync::atomic::Ordering::Relaxed;

use super::Corrupt;
use super::extent::{Extent, LINK};
use super::pool::is_pool_frame;
use crate::bytes;
use crate::frame::Frames;
use crate::platform::Platform;

/// Writes an object to the chunks that were reserved for it.
pub(super) fn write<P: Platform>(platform: &P, extents: &[Extent], mut object: &[u8]) {
    for (index, extent) in extents.iter().enumerate() {
        if let Some(next) = extents.get(index + 1) {
            bytes::write(platform, extent.frame, extent.start(), &next.pack().to_ne_bytes());
        }
        let (at, count) = extent.bytes();
        let (here, rest) = object.split_at(count.min(object.len()));
        bytes::write(platform, extent.frame, at, here);
        object = rest;
    }
}

/// Whether the extent's chunks are in use. A handle that was made up, or freed, mostly fails here.
pub(super) fn check<P: Platform>(frames: &Frames<P>, extent: Extent) -> Result<(), Corrupt> {
    let is_stored = is_pool_frame(frames, extent.frame)
        && frames.meta(extent.frame).word.load(Relaxed) & extent.mask() == extent.mask();
    if is_stored { Ok(()) } else { Err(Corrupt) }
}

/// The extent behind a checked one; `None` if the object ends there.
pub(super) fn rest<P: Platform>(platform: &P, extent: Extent) -> Result<Option<Extent>, Corrupt> {
    if extent.is_last() {
        return Ok(None);
    }
    let mut link = [0; LINK];
    bytes::read(platform, extent.frame, extent.start(), &mut link);
    let next = Extent::unpack(u64::from_ne_bytes(link)).ok_or(Corrupt)?;
    let left = extent.length - extent.bytes().1;
    if next.length == left { Ok(Some(next)) } else { Err(Corrupt) }
}

/// The bytes of an object in one checked extent. Not used after the object is freed.
pub(super) fn bytes_in<P: Platform>(platform: &P, extent: Extent) -> &[u8] {
    let (at, count) = extent.bytes();
    // SAFETY: an extent's bytes lie inside its frame (`Extent::unpack`), which holds compressed pages
    // (`check`), so the direct map shows them; they are written before the handle is known, and the
    // holder of the handle keeps them from being freed. Others write other chunks of the frame.
    unsafe { slice::from_raw_parts(bytes::place(platform, extent.frame, at).as_ptr(), count) }
}

/// Copies the pieces of an object together, and tells its length.
pub(super) fn gather<P: Platform>(
    frames: &Frames<P>,
    platform: &P,
    object: Extent,
    into: &mut [u8],
) -> Result<usize, Corrupt> {
    let mut at = 0;
    let mut next = Some(object);
    while let Some(extent) = next {
        check(frames, extent)?;
        let here = bytes_in(platform, extent);
        into.get_mut(at..at + here.len()).ok_or(Corrupt)?.copy_from_slice(here);
        at += here.len();
        next = rest(platform, extent)?;
    }
    Ok(at)
}
