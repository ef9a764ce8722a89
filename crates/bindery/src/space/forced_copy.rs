//! Reads and writes of a program's memory by its debugger, which no protection of a mapping stops.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::sync::atomic::Ordering;

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Kind, Level};
use crate::bytes;
use crate::error::{Failure, FaultError};
use crate::memory::written_for_another;
use crate::platform::Platform;
use crate::table::EntryAt;
use crate::table::cursor::Cursor;
use crate::table::locking::Depth;
use crate::vma::MappingFlags;

use super::AddressSpace;
use super::fault::{
    Access, allows, is_write_protecting, mapped_frame, record_access, record_forced_write, unshare,
};
use super::user_copy::piece_after;
use super::userfault::protect::lifts_unseen;

impl<P: Platform> AddressSpace<'_, P> {
    /// As [`AddressSpace::read_foreign`], for a debugger: also reads memory that the program itself
    /// may not read. (Linux: `FOLL_FORCE`, for `/proc/PID/mem` and `ptrace(2)`.)
    ///
    /// Context: may sleep. Complexity: as for [`AddressSpace::read_user`].
    ///
    /// # Errors
    /// As [`AddressSpace::read_foreign`], but [`FaultError::Protection`] only for secret memory and
    /// for frames of a [`crate::FrameSource`]. The bytes before the error have been read.
    pub fn read_forced(&self, at: VirtAddr, into: &mut [u8]) -> Result<(), FaultError> {
        let mut done = 0;
        while done < into.len() {
            let (at, length) = piece_after(at, done, into.len())?;
            let piece = &mut into[done..done + length];
            loop {
                match self.read_foreign(at, piece) {
                    Err(FaultError::Protection) => {}
                    result => break result?,
                }
                let read = |frame, offset| {
                    // SAFETY: 1. the bytes lie within a page; 2. a mapped page, whose table is
                    // locked.
                    unsafe { bytes::read(self.platform(), frame, offset, piece) };
                };
                if access_by_force(self, at, Access::Read, read)? {
                    break;
                }
            }
            done += length;
        }
        Ok(())
    }

    /// As [`AddressSpace::write_foreign`], for a debugger: also writes to a private mapping that
    /// the program itself may not write. Such a write copies the page first, as a write by the
    /// program would, so no other process and no object sees it. The protection stays, and with it
    /// the mapping. So a breakpoint can be set in a program's text and in a vDSO. (Linux:
    /// `FOLL_FORCE`, for `/proc/PID/mem` and `ptrace(2)`.)
    ///
    /// Context: may sleep. Complexity: as for [`AddressSpace::write_user`]; one copy for each page
    /// that is not the program's own yet.
    ///
    /// # Errors
    /// As [`AddressSpace::write_foreign`], but [`FaultError::Protection`] only for secret memory,
    /// for frames of a [`crate::FrameSource`], for a shared mapping that is not writable, and for a
    /// page of a mapping that is not writable if the handler of a userfaultfd awaits a write to it
    /// (Linux waits for the handler).
    /// [`FaultError::OutOfMemory`] if a page cannot be copied. The bytes before the error have been
    /// written.
    pub fn write_forced(&self, at: VirtAddr, from: &[u8]) -> Result<(), FaultError> {
        let mut done = 0;
        while done < from.len() {
            let (at, length) = piece_after(at, done, from.len())?;
            let piece = &from[done..done + length];
            loop {
                match self.write_foreign(at, piece) {
                    Err(FaultError::Protection) => {}
                    result => break result?,
                }
                let write = |frame, offset| {
                    // SAFETY: 1. and 2. as in `read_forced`; 3. an anonymous page of this process
                    // alone, which is not written to swap while its entry maps it.
                    unsafe { bytes::write(self.platform(), frame, offset, piece) };
                    written_for_another(self.page_table.memory, frame);
                };
                if access_by_force(self, at, Access::Write, write)? {
                    break;
                }
            }
            done += length;
        }
        Ok(())
    }
}

/// Calls `work` with the frame of the page at `at` and the offset in the page, in a mapping that
/// does not allow the access. For a write, the page is the program's own. Returns `false`, without
/// a call, if the mapping allows the access by now.
fn access_by_force<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
    access: Access,
    work: impl FnOnce(Frame, usize),
) -> Result<bool, FaultError> {
    let page = at.align_down(PAGE_SIZE);
    loop {
        let found = {
            let locked = space.lock_vma(page).ok_or(FaultError::NotMapped)?;
            let flags = locked.vma().flags();
            if flags.intersects(MappingFlags::SECRET | MappingFlags::FRAMES) {
                return Err(FaultError::Protection);
            }
            if allows::<P::Arch>(flags, access) {
                return Ok(false);
            }
            may_force(flags, access)?;
            let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
            let section = space.page_table.read_section();
            let mut cursor = space.page_table.cursor(&section, range, Depth::Floor(Level::PTE));
            let found = find_page(&mut cursor, access);
            if let ForcedPage::Usable(frame) = found {
                work(frame, (at.0 % PAGE_SIZE) as usize);
                return Ok(true);
            }
            found
        };
        let memory = space.page_table.memory;
        match found {
            ForcedPage::Missing => match space.map_by_force(page) {
                // Mapped by another thread, or the mapping was replaced by one to look at.
                Ok(_) | Err(FaultError::Protection) => {}
                Err(error) => return Err(error),
            },
            ForcedPage::WriteProtected => memory.retry(|| lift(space, page))?,
            ForcedPage::Usable(_) | ForcedPage::OfOthers => {
                memory.retry(|| unshare(space, page))?;
            }
        }
    }
}

/// Lifts a userfaultfd's write protection of the page, unless a handler awaits the write. It stays
/// behind where the userfaultfd is closed or has let the mapping go.
fn lift<P: Platform>(
    space: &AddressSpace<'_, P>,
    page: VirtAddr,
) -> Result<(), Failure<FaultError>> {
    let Some(locked) = space.lock_vma(page) else { return Ok(()) };
    if is_write_protecting(locked.vma()) && !lifts_unseen(locked.vma()) {
        return Err(FaultError::Protection.into());
    }
    let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
    space.page_table.edit(|edit| edit.userfault_lift(range))?;
    Ok(())
}

/// Whether a debugger may access a mapping with these flags, which do not allow the access.
fn may_force(flags: MappingFlags, access: Access) -> Result<(), FaultError> {
    let may = if access == Access::Write {
        // A write to a shared mapping would reach the object.
        flags & (MappingFlags::SHARED | MappingFlags::MAY_WRITE) == MappingFlags::MAY_WRITE
    } else {
        flags.contains(MappingFlags::MAY_READ)
    };
    if !may {
        return Err(FaultError::Protection);
    }
    if flags.contains(MappingFlags::REAPED) { Err(FaultError::Bus) } else { Ok(()) }
}

/// The page that a forced access finds.
enum ForcedPage {
    /// The page may be accessed in this frame; the access is recorded.
    Usable(Frame),
    /// No page is mapped.
    Missing,
    /// The page may be read, but a write has to copy it.
    OfOthers,
    /// The page may be read, but a userfaultfd has write-protected it.
    WriteProtected,
}

/// Looks for the page of the cursor's range, whose table is locked.
fn find_page<P: Platform>(cursor: &mut Cursor<'_, '_, P>, access: Access) -> ForcedPage {
    let (page_table, at) = (cursor.page_table, cursor.range().start());
    let EntryAt { node, index, entry: raw } = cursor.entry_at(at);
    let Some(first) = mapped_frame(node, index, raw) else { return ForcedPage::Missing };
    let inside = (at.0 & (node.level.span() - 1)) >> PAGE_SHIFT;
    let frame = first.plus(inside as u32);
    let is_leaf = node.level.kind(raw) == Kind::Leaf;
    if access != Access::Write {
        if is_leaf {
            record_access(cursor, node, index, access);
        }
        return ForcedPage::Usable(frame);
    }
    if is_write_protected::<P::Arch>(is_leaf, raw) {
        return ForcedPage::WriteProtected;
    }
    let frames = &page_table.memory.frames;
    let own = frames.folio_of(frame).filter(|folio| {
        let handle = frames.folio(*folio);
        handle.is_anonymous() && handle.exclusive().contains(frame.0 - folio.head.0)
    });
    let Some(folio) = own else { return ForcedPage::OfOthers };
    if is_leaf {
        record_forced_write(cursor, node, index);
    } else {
        // Only software changes such an entry, with the table locked.
        let word = &page_table.entries(node.table)[index.position()];
        word.store(P::Arch::mark_absent_soft_dirty(raw).0, Ordering::Relaxed);
        frames.folio(folio).mark_dirty();
    }
    ForcedPage::Usable(frame)
}

/// Whether a userfaultfd has write-protected the page of this leaf or `PROT_NONE` entry.
fn is_write_protected<A: Arch>(is_leaf: bool, raw: Entry) -> bool {
    if is_leaf {
        A::attributes(raw).userfault
    } else {
        matches!(A::decode_absent(raw), Some(Absent::ProtNone { userfault: true, .. }))
    }
}
