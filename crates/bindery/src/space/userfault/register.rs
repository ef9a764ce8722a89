//! Registration: which faults of which VMAs a userfaultfd serves.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::addr::{VirtAddr, VirtRange};
use crate::error::{Error, Failure};
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::space::op::Op;
use crate::userfault::{self, Userfault, UserfaultFeatures, UserfaultModes, UserfaultState};
use crate::vma::{MappingFlags, Vma};
use crate::vmas::{Parts, VmaView};

/// The flags of a VMA that say the same as `modes`.
fn flags_of(modes: UserfaultModes) -> MappingFlags {
    let mut flags = MappingFlags::empty();
    flags.set(MappingFlags::USERFAULT_MISSING, modes.contains(UserfaultModes::MISSING));
    let protects = modes.contains(UserfaultModes::WRITE_PROTECT);
    flags.set(MappingFlags::USERFAULT_WRITE_PROTECT, protects);
    flags.set(MappingFlags::USERFAULT_MINOR, modes.contains(UserfaultModes::MINOR));
    flags
}

/// Whether a userfaultfd can serve these faults of the VMA: it is anonymous, or of shared memory.
/// Protection that nobody is told of can be anywhere.
fn can_be_served(vma: &Vma, modes: UserfaultModes, state: &UserfaultState) -> bool {
    if vma.has(MappingFlags::DROPPABLE) {
        return false;
    }
    if state.has(UserfaultFeatures::WP_ASYNC) && modes == UserfaultModes::WRITE_PROTECT {
        return true;
    }
    match vma.object() {
        None => !modes.contains(UserfaultModes::MINOR),
        Some(object) => !object.is_file() && !object.is_secret(),
    }
}

/// The modes in which the VMA is registered.
fn modes_of(vma: &Vma) -> UserfaultModes {
    let mut modes = UserfaultModes::empty();
    modes.set(UserfaultModes::MISSING, vma.has(MappingFlags::USERFAULT_MISSING));
    modes.set(UserfaultModes::WRITE_PROTECT, vma.has(MappingFlags::USERFAULT_WRITE_PROTECT));
    modes.set(UserfaultModes::MINOR, vma.has(MappingFlags::USERFAULT_MINOR));
    modes
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Lets the userfaultfd serve the faults of these `modes` in all that is mapped of `length`
    /// bytes at `start`, instead of those that it has served there (`UFFDIO_REGISTER`).
    ///
    /// Context: may sleep. Complexity: in the mappings of the range.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Invalid`] if
    /// there are no modes, if it is one of another address space, if nothing is mapped, or if a
    /// mapping is neither anonymous nor shared memory; [`Error::AccessDenied`] if a mapping can
    /// never be written; [`Error::Busy`] if a mapping belongs to another userfaultfd;
    /// [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping cannot be split. Of the
    /// last two, the mappings before are registered.
    pub fn register_userfault(
        &self,
        userfault: &Userfault<'_, P>,
        start: VirtAddr,
        length: u64,
        modes: UserfaultModes,
    ) -> Result<(), Error> {
        if modes.is_empty() || !self.owns_userfault(userfault) {
            return Err(Error::Invalid);
        }
        let range = self.userfault_range(start, length)?;
        self.page_table.memory.outermost(|| {
            self.operate(|op| {
                may_register(*op.vmas, range, userfault, modes)?;
                register(op, range, userfault, modes)
            })
        })
    }

    /// Lets the userfaultfd serve nothing any more in `length` bytes at `start`, and the faults
    /// that wait there go on (`UFFDIO_UNREGISTER`). Mappings that it does not serve are left alone.
    ///
    /// Context: may sleep. Complexity: in the mappings of the range, and in the runs of those that
    /// were registered for write-protection.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`]; [`Error::Invalid`] if
    /// nothing is mapped, if a mapping is neither anonymous nor shared memory, or if it belongs to
    /// another userfaultfd; [`Error::TooManyMappings`] or [`Error::OutOfMemory`] if a mapping
    /// cannot be split. Of the last two, the mappings before are unregistered.
    pub fn unregister_userfault(
        &self,
        userfault: &Userfault<'_, P>,
        start: VirtAddr,
        length: u64,
    ) -> Result<(), Error> {
        let range = self.userfault_range(start, length)?;
        if !self.owns_userfault(userfault) {
            return Err(Error::Invalid);
        }
        let mut done = range.start();
        let result = self.page_table.memory.outermost(|| {
            self.operate(|op| {
                may_unregister(*op.vmas, range, userfault)?;
                unregister(op, range, userfault, &mut done)
            })
        });
        // What is registered still is waited for.
        userfault.state().wake(self.platform(), VirtRange::raw(range.start().0, done.0));
        result
    }

    /// Closes a userfaultfd of this address space: unregisters all that it serves, and wakes all
    /// who wait. Dropping the handle does so too, except that mappings go on to name it, and so
    /// are not joined with others.
    ///
    /// Context: may sleep. Complexity: in the mappings.
    pub fn close_userfault(&self, userfault: Userfault<'_, P>) {
        if self.owns_userfault(&userfault) {
            self.operate(|op| {
                let everything = VirtRange::raw(0, self.limit().0);
                // Whole mappings are not cut, so nothing can fail.
                let done = &mut VirtAddr(0);
                let result = unregister(op, everything, &userfault, done);
                debug_assert!(result.is_ok());
            });
            self.page_table.memory.free_some();
        }
        drop(userfault);
    }
}

/// Refuses if a VMA of `range` cannot be registered, or none exists.
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
        let others = vma.userfault_pointer().filter(|other| *other != userfault.pointer());
        if others.is_some() && !vma.userfault().is_some_and(UserfaultState::is_closed) {
            return Err(Error::Busy);
        }
    }
    if found { Ok(()) } else { Err(Error::Invalid) }
}

fn register<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
    modes: UserfaultModes,
) -> Result<(), Failure> {
    // What was done may have been joined with what lies after the range.
    let mut parts = Parts::of(range);
    while let Some((vma, part)) = parts.next(*op.vmas) {
        let own = vma.userfault_pointer() == Some(userfault.pointer());
        // As Linux: modes that are there already stay, and others with them.
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

/// Lets the VMA, which is locked for writing, name a userfaultfd that the caller holds, or
/// none.
fn set_userfault<P: Platform>(memory: &Memory<P>, vma: &Vma, new: Option<&Userfault<'_, P>>) {
    let old = vma.userfault_pointer();
    if let Some(new) = new {
        new.state().hold();
    }
    // SAFETY: 1. held above; the old one is released below.
    unsafe { vma.set_userfault(new.map(Userfault::pointer)) };
    if let Some(old) = old {
        // SAFETY: 1. the VMA's own hold; it names another one now.
        unsafe { userfault::release(memory, old) };
    }
}

/// Refuses if a VMA of `range` belongs to another userfaultfd or cannot be served, or none exists.
fn may_unregister<P: Platform>(
    vmas: VmaView<'_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
) -> Result<(), Error> {
    let mut found = false;
    for vma in vmas.overlapping(range) {
        found = true;
        let other = vma.userfault_pointer();
        let others = other.is_some_and(|other| other != userfault.pointer());
        if others || !can_be_served(vma, modes_of(vma), userfault.state()) {
            return Err(Error::Invalid);
        }
    }
    if found { Ok(()) } else { Err(Error::Invalid) }
}

/// Notes in `done` how far it has come.
fn unregister<P: Platform>(
    op: &mut Op<'_, '_, P>,
    range: VirtRange,
    userfault: &Userfault<'_, P>,
    done: &mut VirtAddr,
) -> Result<(), Failure> {
    // What was done may have been joined with what lies after the range.
    let mut parts = Parts::of(range);
    while let Some((vma, part)) = parts.next(*op.vmas) {
        *done = part.start();
        if vma.userfault_pointer() != Some(userfault.pointer()) {
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
            // If memory for that runs out, the first write lifts the protection.
            edit.userfault_lift(vma.range())
        })?;
    }
    *done = range.end();
    Ok(())
}
