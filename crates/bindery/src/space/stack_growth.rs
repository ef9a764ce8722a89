//! Mappings that grow down (`MAP_GROWSDOWN`).

use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use crate::error::{Failure, FaultError, NoMemory};
use crate::platform::Platform;
use crate::vma::{MappingFlags, Vma};
use crate::vmas::{STACK_GUARD_GAP, VmaSet};

use super::AddressSpace;

/// Extends the mapping above `page` down to `page`, if the mapping grows down and both the limits
/// and the mapping below allow the growth (Linux: `expand_stack`). Nothing is mapped at `page`.
pub(super) fn grow_down_to<P: Platform>(
    space: &AddressSpace<'_, P>,
    page: VirtAddr,
) -> Result<(), Failure<FaultError>> {
    space.change_vmas(|vmas| grow_down(vmas, page))
}

/// Gives the VMA around `addr` an anon group for its anonymous pages. Acquires the mutex.
pub(super) fn prepare_group<P: Platform>(
    space: &AddressSpace<'_, P>,
    addr: VirtAddr,
) -> Result<(), NoMemory> {
    space.change_vmas(|vmas| vmas.at(addr).map_or(Ok(()), |vma| vmas.prepare_group(vma)))
}

/// As [`grow_down_to`], with the mutex held, if this requires no wait for another lock. Returns
/// whether a VMA has the page now.
pub(super) fn try_grow_down<P: Platform>(
    vmas: &mut VmaSet<'_, '_, P>,
    page: VirtAddr,
) -> Result<bool, Failure<FaultError>> {
    let Some(vma) = may_grow_down(vmas, page)? else { return Ok(true) };
    if !vmas.try_prepare_group(vma)? {
        return Ok(false);
    }
    let Some(vma) = vma.try_lock_write(vmas.platform()) else { return Ok(false) };
    Ok(vmas.try_resize(&vma, page.0, vma.end()))
}

/// As [`prepare_group`], with the mutex held, if this requires no wait for another lock. Returns
/// whether the VMA, if one is there, has an anon group now.
pub(super) fn try_prepare_group<P: Platform>(
    vmas: &mut VmaSet<'_, '_, P>,
    addr: VirtAddr,
) -> Result<bool, NoMemory> {
    vmas.at(addr).map_or(Ok(true), |vma| vmas.try_prepare_group(vma))
}

fn grow_down<P: Platform>(
    vmas: &mut VmaSet<'_, '_, P>,
    page: VirtAddr,
) -> Result<(), Failure<FaultError>> {
    let Some(vma) = may_grow_down(vmas, page)? else { return Ok(()) };
    vmas.prepare_group(vma)?;
    let vma = vma.lock_write(vmas.platform());
    vmas.resize(&vma, page.0, vma.end());
    Ok(())
}

/// The VMA that may grow down to `page`; the added pages are committed. `None` if a VMA has the page.
fn may_grow_down<'op, P: Platform>(
    vmas: &mut VmaSet<'op, '_, P>,
    page: VirtAddr,
) -> Result<Option<&'op Vma>, Failure<FaultError>> {
    let refused = FaultError::NotMapped;
    let vma = vmas.first_ending_after(page.0).ok_or(refused)?;
    if vma.start() <= page.0 {
        // Another thread has mapped the page.
        return Ok(None);
    }
    if !vma.has(MappingFlags::GROWS_DOWN) || page < vmas.minimum() {
        return Err(refused.into());
    }
    if let Some(below) = vmas.previous(vma) {
        let grows = below.has(MappingFlags::GROWS_DOWN);
        let accessible = below.flags().intersects(MappingFlags::PROTECTION);
        if !grows && accessible && page.0 - below.end() < STACK_GUARD_GAP {
            return Err(refused.into());
        }
    }
    let added = (vma.start() - page.0) >> PAGE_SHIFT;
    let account = vmas.account();
    let size = vma.end() - page.0;
    let offset = vma.page_offset();
    if size > account.limits().stack || added > offset {
        return Err(refused.into());
    }
    account.may_expand(vma.flags(), added).map_err(|_| refused)?;
    if vma.has(MappingFlags::LOCKED) {
        account.may_lock(added).map_err(|_| refused)?;
    }
    let accounted = vma.has(MappingFlags::ACCOUNT);
    let committed = if accounted { added } else { 0 };
    vmas.commit(committed).map_err(|_| refused)?;
    Ok(Some(vma))
}

const _: () = assert!(STACK_GUARD_GAP.is_multiple_of(PAGE_SIZE));
