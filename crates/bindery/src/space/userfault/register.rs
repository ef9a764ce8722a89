//! Registration: selects the VMAs and the kinds of fault that a userfaultfd serves.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::op::Op;
use crate::space::userfault::{is_served, userfault_range};
use crate::userfault::{self, Userfault, UserfaultFeatures, UserfaultModes, UserfaultState};
use crate::vma::{MappingFlags, Vma};
use crate::vmas::{Parts, VmaView};

/// The flags of a VMA for `modes`.
fn flags_of(modes: UserfaultModes) -> MappingFlags {
    let mut flags = MappingFlags::empty();
    flags.set(MappingFlags::USERFAULT_MISSING, modes.contains(UserfaultModes::MISSING));
    let protects = modes.contains(UserfaultModes::WRITE_PROTECT);
    flags.set(MappingFlags::USERFAULT_WRITE_PROTECT, protects);
    flags.set(MappingFlags::USERFAULT_MINOR, modes.contains(UserfaultModes::MINOR));
    flags
}

/// Whether a userfaultfd can serve these faults of the VMA: the VMA must be anonymous or map shared
/// memory. Asynchronous write-protection sends no messages, and works for all VMAs with pages of
/// the core's memory.
fn can_be_served(vma: &Vma, modes: UserfaultModes, state: &UserfaultState) -> bool {
    if vma.flags().intersects(MappingFlags::DROPPABLE | MappingFlags::FRAMES) {
        return false;
    }
    if state.has(UserfaultFeatures::WP_ASYNC) && modes == UserfaultModes::WRITE_PROTECT {
        return true;
    }
    takes_pages(vma) && (vma.object().is_some() || !modes.contains(UserfaultModes::MINOR))
}

/// Whether a handler may supply pages of the VMA: the VMA must be anonymous or map shared memory.
pub(super) fn takes_pages(vma: &Vma) -> bool {
    vma.object().is_none_or(|object| object.is_shared_memory() && !object.is_secret())
}

/// The modes in which the VMA is registered.
fn modes_of(vma: &Vma) -> UserfaultModes {
    let mut modes = UserfaultModes::empty();
    if !is_served(vma) {
        return modes;
    }
    modes.set(UserfaultModes::MISSING, vma.has(MappingFlags::USERFAULT_MISSING));
    modes.set(UserfaultModes::WRITE_PROTECT, vma.has(MappingFlags::USERFAULT_WRITE_PROTECT));
    modes.set(UserfaultModes::MINOR, vma.has(MappingFlags::USERFAULT_MINOR));
    modes
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Registers the mappings in `length` bytes at `start`: the userfaultfd serves their faults of
    /// these `modes`, which replace earlier modes (`UFFDIO_REGISTER`).
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings in the range.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Invalid`] if
    /// `modes` is empty, the userfaultfd belongs to another address space, the range has no
    /// mapping, or a mapping is neither anonymous nor shared memory; [`Error::AccessDenied`] if a
    /// mapping can never be written; [`Error::Busy`] if a mapping belongs to another userfaultfd;
    /// [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping cannot be split. After the
    /// last two, the mappings before it are registered.
    pub fn register_userfault(
        &self,
        userfault: &Userfault<'_, P>,
        start: VirtAddr,
        length: u64,
        modes: UserfaultModes,
    ) -> Result<(), Error> {
        register_userfault(self, userfault, start, length, modes)
    }

    /// Unregisters the mappings in `length` bytes at `start` and wakes the faults that wait there
    /// (`UFFDIO_UNREGISTER`). Skips mappings that are not registered; those of userfaultfds that
    /// were closed count as such, and no longer refer to them afterwards.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings in the range, and in the
    /// number of runs in mappings that were registered for write-protection.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Invalid`] if
    /// the range has no mapping, or if a mapping is neither anonymous nor shared memory, or belongs
    /// to another userfaultfd; [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping
    /// cannot be split. After the last two, the mappings before it are unregistered.
    pub fn unregister_userfault(
        &self,
        userfault: &Userfault<'_, P>,
        start: VirtAddr,
        length: u64,
    ) -> Result<(), Error> {
        unregister_userfault(self, userfault, start, length)
    }

    /// Closes a userfaultfd of this address space: unregisters all mappings that it serves and
    /// wakes all waiting threads. Dropping the handle instead also wakes these threads, but
    /// mappings then continue to refer to the userfaultfd and do not merge with others.
    ///
    /// Context: may sleep. Complexity: linear in the number of mappings.
    pub fn close_userfault(&self, userfault: Userfault<'_, P>) {
        close_userfault(self, userfault)
    }
}

fn close_userfault<P: Platform>(space: &AddressSpace<'_, P>, userfault: Userfault<'_, P>) {
    if space.owns_userfault(&userfault) {
        space.operate(|op| {
            let everything = VirtRange::raw(0, space.limit().0);
            // A change of a whole mapping needs no split, so it cannot fail.
            let done = &mut VirtAddr(0);
            let result = unregister(op, everything, &userfault, done);
            debug_assert!(result.is_ok());
        });
        crate::deferred::free_some(space.page_table.memory);
    }
    drop(userfault);
}

fn unregister_userfault<P: Platform>(
    space: &AddressSpace<'_, P>,
    userfault: &Userfault<'_, P>,
    start: VirtAddr,
    length: u64,
) -> Result<(), Error> {
    let range = userfault_range(space, start, length)?;
    if !space.owns_userfault(userfault) {
        return Err(Error::Invalid);
    }
    let mut done = range.start();
    // An attempt that finds no memory may have unregistered a mapping that is refused unless it is
    // registered. So its repetition does not check the mappings again.
    let mut may = false;
    let result = space.operate_with_reclaim(|op| {
        if !may {
            may_unregister(*op.vmas, range, userfault)?;
            may = true;
        }
        unregister(op, range, userfault, &mut done)
    });
    // Faults in mappings that are still registered continue to wait.
    userfault.state().wake(space.platform(), VirtRange::raw(range.start().0, done.0));
    result
}

fn register_userfault<P: Platform>(
    space: &AddressSpace<'_, P>,
    userfault: &Userfault<'_, P>,
    start: VirtAddr,
    length: u64,
    modes: UserfaultModes,
) -> Result<(), Error> {
    if modes.is_empty() || !space.owns_userfault(userfault) {
        return Err(Error::Invalid);
    }
    let range = userfault_range(space, start, length)?;
    space.operate_with_reclaim(|op| {
        may_register(*op.vmas, range, userfault, modes)?;
        register(op, range, userfault, modes)
    })
}

/// Fails if a VMA in `range` cannot be registered or if the range has no VMA.
fn may_register<P: Platform>(
    vmas: VmaView<'_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
    modes: UserfaultModes,
) -> Result<(), Error> {
    let mut found = false;
    for vma in vmas.overlapping(range) {
        found = true;
        if !can_be_served(vma, modes, userfault.state()) {
            return Err(Error::Invalid);
        }
        if !vma.has(MappingFlags::MAY_WRITE) {
            return Err(Error::AccessDenied);
        }
        if belongs_to_another(vma, userfault) {
            return Err(Error::Busy);
        }
    }
    if found { Ok(()) } else { Err(Error::Invalid) }
}

/// Whether a userfaultfd other than `userfault` serves the VMA. One that is closed serves none.
fn belongs_to_another<P: Platform>(vma: &Vma, userfault: &Userfault<'_, P>) -> bool {
    is_served(vma) && vma.userfault_pointer() != Some(userfault.pointer())
}

fn register<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
    modes: UserfaultModes,
) -> Result<(), Failure> {
    // A finished part may have merged with the VMA after the range.
    let mut parts = Parts::of(range);
    while let Some((vma, part)) = parts.next(*op.vmas) {
        let own = vma.userfault_pointer() == Some(userfault.pointer());
        // A VMA that already has the modes also keeps its other modes, as on Linux.
        if own && vma.flags().contains(flags_of(modes)) {
            continue;
        }
        let flags = (vma.flags() - MappingFlags::USERFAULT) | flags_of(modes);
        let memory = op.memory();
        op.vmas.with_flags(vma, part, flags, |vma| {
            set_userfault(memory, vma, Some(userfault));
            Ok(())
        })?;
    }
    Ok(())
}

/// Sets the userfaultfd of a VMA to one that the caller holds, or to none. The caller holds the
/// VMA's lock for writing.
fn set_userfault<P: Platform>(memory: &Memory<P>, vma: &Vma, new: Option<&Userfault<'_, P>>) {
    let old = vma.userfault_pointer();
    if let Some(new) = new {
        new.state().hold();
    }
    // SAFETY: 1. the new userfaultfd is held above; the old one is released below.
    unsafe { vma.set_userfault(new.map(Userfault::pointer)) };
    if let Some(old) = old {
        // SAFETY: 1. this is the VMA's own reference; the VMA now refers to another userfaultfd.
        unsafe { userfault::release(memory, old) };
    }
}

/// Fails if a VMA in `range` belongs to another userfaultfd or cannot be served, or if the range
/// has no VMA.
fn may_unregister<P: Platform>(
    vmas: VmaView<'_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
) -> Result<(), Error> {
    let mut found = false;
    for vma in vmas.overlapping(range) {
        found = true;
        let others = belongs_to_another(vma, userfault);
        if others || !can_be_served(vma, modes_of(vma), userfault.state()) {
            return Err(Error::Invalid);
        }
    }
    if found { Ok(()) } else { Err(Error::Invalid) }
}

/// Unregisters the VMAs of the range that belong to the userfaultfd or to closed ones. Records the
/// end of the finished part in `done`.
fn unregister<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
    done: &mut VirtAddr,
) -> Result<(), Failure> {
    // A finished part may have merged with the VMA after the range.
    let mut parts = Parts::of(range);
    while let Some((vma, part)) = parts.next(*op.vmas) {
        *done = part.start();
        if vma.userfault_pointer().is_none() || belongs_to_another(vma, userfault) {
            continue;
        }
        let flags = vma.flags() - MappingFlags::USERFAULT;
        let protects = vma.has(MappingFlags::USERFAULT_WRITE_PROTECT);
        let Op { space, vmas, edit, .. } = op;
        vmas.with_flags(vma, part, flags, |vma| {
            set_userfault(space.page_table.memory, vma, None);
            if !protects {
                return Ok(());
            }
            // If memory runs out here, the first write to the page lifts its protection.
            edit.userfault_lift(vma.range())
        })?;
    }
    *done = range.end();
    Ok(())
}
