//! The things that a fault waits for without locks.

use crate::error::{Failure, FaultError};
use crate::folio::FolioRef;
use crate::object::Awaited;
use crate::platform::Platform;
use crate::space::AddressSpace;
use crate::vma::VmaReadGuard;

use super::refused;

/// The thing that a fault waits for before it begins again.
#[must_use = "the fault would begin again at once"]
pub(in crate::space) enum Wait {
    /// Memory is collected, since no block for a large folio is free.
    Memory,
    /// The pager of the VMA's object reads or stores pages.
    Object(Awaited),
}

impl Wait {
    /// Unlocks the VMA and waits. The reference keeps the folio that the page needs until the fault
    /// has mapped it.
    ///
    /// # Errors
    /// The fault for the pager's error.
    pub(super) fn wait<'m, P: Platform>(
        self,
        space: &AddressSpace<'m, P>,
        locked: VmaReadGuard<'_, P>,
    ) -> Result<Option<FolioRef<'m, P>>, Failure<FaultError>> {
        match self {
            Self::Memory => {
                drop(locked);
                space.page_table.memory.collect();
                Ok(None)
            }
            Self::Object(awaited) => {
                let object = space.object_of(locked.vma());
                drop(locked);
                let Some(object) = object else { return Ok(None) };
                let kept = awaited.wait(&object).map_err(refused)?;
                if kept.is_some() {
                    space.page_table.memory.note_major_fault();
                }
                Ok(kept)
            }
        }
    }
}
