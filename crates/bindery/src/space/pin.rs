//! Pins: pages that stay where they are while a device, or anybody else behind the back of the page
//! tables, reads or writes them.

use core::fmt;

use crate::Memory;
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Kind};
use crate::error::FaultError;
use crate::frame::Folio;
use crate::platform::Platform;
use crate::table::lock::Depth;

use super::AddressSpace;
use super::fault::Access;

/// How long pages will be pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinTime {
    /// For one transfer.
    Short,
    /// Until user space says otherwise (Linux: `FOLL_LONGTERM`): even for reading, a private
    /// mapping gets a page of its own first, as the object's page would not show its later writes.
    Long,
}

/// Pinned pages of one folio: they keep their frames, and with them what the program sees, until
/// this is dropped. `fork` gives the child copies of them; collapsing leaves them alone; moves take
/// them along.
pub struct Pinned<'m, P: Platform> {
    memory: &'m Memory<P>,
    folio: Folio,
    first: Frame,
    pages: u32,
}

impl<P: Platform> Pinned<'_, P> {
    /// The frame of the first page; the others follow.
    pub fn first(&self) -> Frame {
        self.first
    }

    /// How many pages are pinned, at least one.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}

impl<P: Platform> Drop for Pinned<'_, P> {
    fn drop(&mut self) {
        self.memory.frames.unpin(&self.memory.platform, self.folio);
    }
}

impl<P: Platform> fmt::Debug for Pinned<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("first", &self.first).field("pages", &self.pages).finish()
    }
}

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// Pins the page at `at` and as many of the at most `pages` behind it as lie in the same folio,
    /// mapped in a row with the same permissions. The page is made the program's own before, where
    /// the pin could not be kept otherwise: for writing, and for reading anonymous memory that is
    /// shared with another process until one of them writes. May sleep. (Linux:
    /// `pin_user_pages`.)
    ///
    /// # Errors
    /// The fault that the access would have had; [`FaultError::OutOfMemory`] also where the folio
    /// has too many pins. Nothing is pinned then.
    ///
    /// Complexity: in the pages pinned; one atomic instruction.
    pub fn pin(
        &self,
        at: VirtAddr,
        pages: u32,
        access: Access,
        time: PinTime,
    ) -> Result<Pinned<'m, P>, FaultError> {
        if at >= self.limit() {
            return Err(FaultError::NotMapped);
        }
        let page = at.align_down(PAGE_SIZE);
        loop {
            let locked = self.lock_vma(page).ok_or(FaultError::NotMapped)?;
            let vma = locked.vma();
            let own = !vma.is_shared() && (vma.is_anonymous() || time == PinTime::Long);
            let range = VirtRange::from_len(page, u64::from(pages.max(1)) * PAGE_SIZE)
                .map_or(VirtRange::raw(page.0, page.0 + PAGE_SIZE), |range| {
                    range.intersection(vma.range())
                });
            if let Some(pinned) = self.pin_present(range, access, own)? {
                return Ok(pinned);
            }
            drop(locked);
            // A page of its own comes with a write; who may not write shares nothing for long.
            let writable = self.may_write(page);
            let needed = if own && writable { Access::Write } else { access };
            self.fault(page, needed)?;
            if own && !writable {
                return self.pin_read_only(page, access);
            }
        }
    }

    /// Pins what is mapped from the beginning of `range` on, if it allows the access and, with
    /// `own`, is nobody else's.
    fn pin_present(
        &self,
        range: VirtRange,
        access: Access,
        own: bool,
    ) -> Result<Option<Pinned<'m, P>>, FaultError> {
        let memory = self.table.memory;
        let at = range.start();
        // One table at a time: the run ends with it at the latest.
        let table = arch::table_span::<P::Arch>(1);
        let range = VirtRange::raw(at.0, range.end().0.min((at.0 | (table - 1)).saturating_add(1)));
        let mut cursor = self.table.cursor(range, Depth::Floor(1));
        let (node, index, raw) = cursor.entry_at(at);
        if arch::kind::<P::Arch>(raw, node.level) != Kind::Leaf {
            return Ok(None);
        }
        let entry = if node.level == 1 { P::Arch::unblock(raw, index) } else { raw };
        let permissions = P::Arch::attributes(entry).permissions;
        let inside = (at.0 & (arch::span::<P::Arch>(node.level) - 1)) >> PAGE_SHIFT;
        let first = P::Arch::frame(entry).plus(inside as u32);
        let Some(folio) = memory.frames.folio_of(first) else { return Ok(None) };
        let number = first.0 - folio.head.0;
        let limit = (folio.pages() - number).min(range.pages() as u32);
        let (exclusive, alike) = memory.frames.exclusive_run(folio, number, limit);
        let shared_object = memory.frames.is_of_object(folio) && !own;
        if !permissions.contains(access.permission()) || own && !exclusive {
            return Ok(None);
        }
        let wanted = if shared_object { limit } else { alike };
        let pages = if node.level > 1 {
            wanted
        } else {
            let slots = self.table.slots(node.table);
            let equal = arch::Equal::WRITABLE;
            let step = P::Arch::STEP;
            crate::table::run::leaves::<P::Arch>(slots, index, wanted, equal, step, 0).0
        };
        if !memory.frames.pin(folio) {
            return Err(FaultError::OutOfMemory);
        }
        self.record_access(&mut cursor, node, index, access);
        Ok(Some(Pinned { memory, folio, first, pages }))
    }

    fn may_write(&self, page: VirtAddr) -> bool {
        self.lock_vma(page)
            .is_some_and(|locked| locked.vma().protection().contains(super::Protection::WRITE))
    }

    /// The last resort of a mapping that may not be written: its page as it is.
    fn pin_read_only(&self, page: VirtAddr, access: Access) -> Result<Pinned<'m, P>, FaultError> {
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let _locked = self.lock_vma(page).ok_or(FaultError::NotMapped)?;
        self.pin_present(range, access, false)?.ok_or(FaultError::Protection)
    }
}
