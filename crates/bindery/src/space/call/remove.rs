//! `MADV_REMOVE`: punches holes in the objects behind a range.
//!
//! No lock of the address space is held during a hole. Between two mappings, and between two steps,
//! other threads may change the mappings, which the call looks up one after another.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::arch::KeyRights;
use crate::error::Error;
use crate::object::{Object, ObjectLock};
use crate::platform::Platform;
use crate::vma::{MappingFlags, Vma};
use crate::vmas::Parts;

use super::advice::Loss;
use super::lock_wait::wait_for_object;
use super::madvise::may_be_advised;
use super::steps::{CallWait, Step};
use crate::space::AddressSpace;

/// A part of an object that is to become a hole.
#[derive(Debug)]
struct FutureHole<'m, P: Platform> {
    object: Object<'m, P>,
    /// In bytes.
    offset: u64,
    /// In bytes.
    length: u64,
}

/// Removes the contents, and waits where a hole has to wait.
///
/// # Errors
/// As [`Removal::step`].
pub(super) fn remove_contents<P: Platform>(
    space: &AddressSpace<'_, P>,
    range: VirtRange,
) -> Result<(), Error> {
    let mut parts = Parts::of(range);
    while let Some(hole) = next_hole(space, &mut parts)? {
        hole.object.punch_hole(hole.offset, hole.length)?;
    }
    parts.end()
}

/// The hole behind the next mapping.
fn next_hole<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    parts: &mut Parts,
) -> Result<Option<FutureHole<'m, P>>, Error> {
    let vmas = space.vmas.lock();
    let Some((vma, part)) = parts.next(vmas.view()) else { return Ok(None) };
    if !may_be_advised(vma, Loss::Contents, KeyRights::ALL) {
        return Err(Error::Sealed(part.start()));
    }
    if let Some(error) = refusal_of_removal(vma) {
        return Err(error);
    }
    let object = space.object_of(vma).ok_or(Error::Invalid)?;
    // A saturated offset is beyond the maximum size, which gives `Invalid`, as on Linux.
    let offset = vma.page_offset_of(part.start()).saturating_mul(PAGE_SIZE);
    Ok(Some(FutureHole { object, offset, length: part.len() }))
}

/// The error for a mapping whose contents the call must not remove.
pub(super) fn refusal_of_removal(vma: &Vma) -> Option<Error> {
    if vma.has(MappingFlags::LOCKED) || vma.is_anonymous() {
        Some(Error::Invalid)
    } else if !vma.has(MappingFlags::SHARED | MappingFlags::MAY_WRITE) {
        Some(Error::AccessDenied)
    } else {
        None
    }
}

/// A `MADV_REMOVE` in steps, and its progress.
#[derive(Debug)]
pub(super) struct Removal<'m, P: Platform> {
    /// The mappings after the last one; `None` after the end of the call.
    parts: Option<Parts>,
    /// The hole behind the last mapping, which is not punched yet.
    hole: Option<FutureHole<'m, P>>,
}

impl<'m, P: Platform> Removal<'m, P> {
    /// The advice for `range`. Nothing is removed yet.
    pub(super) fn new(range: VirtRange) -> Self {
        Self { parts: Some(Parts::of(range)), hole: None }
    }

    /// Punches holes until all are punched, or until the pager stores pages of the next one, or
    /// another thread has the mutex when it is needed for the next one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a locked or an anonymous mapping; [`Error::AccessDenied`] for a
    /// private one, or one of a file that the program may not write; [`Error::Sealed`]; the errors
    /// of [`Object::punch_hole`]; [`Error::NotMapped`] for a hole between mappings, at the end. No
    /// step after an error does anything.
    pub(super) fn step<'s>(
        &mut self,
        space: &'s AddressSpace<'m, P>,
    ) -> Result<Step<'s, 'm, P>, Error> {
        let result = self.advance(space);
        if !matches!(result, Ok(Step::Blocked(_))) {
            (self.parts, self.hole) = (None, None);
        }
        result
    }

    fn advance<'s>(&mut self, space: &'s AddressSpace<'m, P>) -> Result<Step<'s, 'm, P>, Error> {
        let Some(parts) = &mut self.parts else { return Ok(Step::Done) };
        loop {
            if let Some(hole) = &self.hole {
                let wait = wait_for_object(&hole.object, ObjectLock::Changes, &mut None);
                if let Some(wait) = wait {
                    return Ok(Step::Blocked(wait));
                }
            }
            if let Some(hole) = &self.hole
                && let Some(wait) = hole.object.try_punch_hole(hole.offset, hole.length)?
            {
                return Ok(Step::Blocked(CallWait::for_object(wait)));
            }
            self.hole = None;
            if let Some(wait) = space.wait_for_mutex(&mut None) {
                return Ok(Step::Blocked(wait));
            }
            self.hole = next_hole(space, parts)?;
            if self.hole.is_none() {
                return parts.clone().end().map(|()| Step::Done);
            }
        }
    }
}
