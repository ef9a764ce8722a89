//! Unmapped folios of the swap cache without content in swap. The write of such a folio has failed,
//! or all requests of its device were in use when it was to be written.

use super::page_set::PageSet;
use super::{AllInUse, CachedFolio, SlotRun, TakeRequest, find_cached, try_write_out};
use crate::Memory;
use crate::folio::{FrozenFolio, LockedFolio};
use crate::platform::Platform;

/// Writes out an unmapped folio of the swap cache, if its slots may be written. Returns the folio
/// if it now belongs to the caller.
///
/// # Errors
/// As [`try_write_out`].
pub(crate) fn write_out_cached<'m, P: Platform>(
    memory: &'m Memory<P>,
    locked: LockedFolio<'m, P>,
    take: TakeRequest,
) -> Result<Option<FrozenFolio<'m, P>>, AllInUse> {
    let Some(cached) = CachedFolio::find(memory, locked.locked()) else { return Ok(None) };
    let Some(stored) = cached.prepare_eviction() else { return Ok(None) };
    if !cached.may_be_written(stored) {
        cached.unlock(&PageSet::EMPTY);
        return Ok(None);
    }
    try_write_out(memory, locked, stored, take)
}

/// Writes out the folios that the cache has for these slots, to which entries referred a moment
/// ago. Skips folios that another thread has mapped, referenced or locked since: a device may have
/// them already. Does not wait. Removes from `slots` those that it has examined.
///
/// # Errors
/// [`AllInUse`]: the first of the remaining slots belongs to a folio that must wait for a request.
pub(crate) fn write_out_slots<P: Platform>(
    memory: &Memory<P>,
    slots: &mut SlotRun,
) -> Result<(), AllInUse> {
    let mut batch = memory.free_batch();
    while slots.count > 0 {
        let locked = find_cached(memory, slots.area, slots.first)
            .and_then(|cached| cached.try_into_locked());
        if let Some(locked) = locked {
            let handle = memory.frames.folio(locked.folio());
            // The references of the cache and of `locked`.
            let alone = handle.mappings() == 0 && handle.pins() == 0 && handle.references() == 2;
            if alone && let Some(frozen) = write_out_cached(memory, locked, TakeRequest::IfFree)? {
                frozen.free_into(&mut batch);
            }
        }
        (slots.first, slots.count) = (slots.first + 1, slots.count - 1);
    }
    Ok(())
}
