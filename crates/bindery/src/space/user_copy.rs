//! Reads and writes of a program's memory from outside, with the program's permissions.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, KeyRights, Kind, Level};
use crate::bytes;
use crate::error::FaultError;
use crate::interrupt;
use crate::memory::written_for_another;
use crate::platform::Platform;
use crate::table::EntryAt;
use crate::table::locking::Depth;

use super::AddressSpace;
use super::call::steps::CallWait;
use super::fault::{Access, TriedFault, record_access, step_fault};
use crate::vma::{MappingFlags, VmaReadGuard};

/// The number of bytes that are held on the stack between a load and a store.
pub(super) const COPIED_AT_ONCE: usize = 1024;

/// The process on whose behalf memory is accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asker {
    /// The program that owns the memory.
    Program,
    /// Another process.
    Other,
}

/// A copy between two address spaces that ended early ([`AddressSpace::copy_from`]).
///
/// ```
/// use bindery::addr::VirtAddr;
/// use bindery::{AddressSpace, Platform};
///
/// /// How many bytes were copied.
/// fn copy<P: Platform>(to: &AddressSpace<'_, P>, from: &AddressSpace<'_, P>, at: VirtAddr) -> u64 {
///     match to.copy_from(at, from, at, 4096) {
///         Ok(()) => 4096,
///         Err(partial) => partial.copied,
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartialCopy {
    /// The number of copied bytes.
    pub copied: u64,
    /// The fault at the next byte, or the signal that preceded it.
    pub fault: FaultError,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Reads `into.len()` bytes at `at`, like loads of the program: missing pages are faulted in.
    /// The program need not be the running one. (Linux: `copy_from_user`, `process_vm_readv(2)`.)
    ///
    /// Context: may sleep. Complexity: linear in the number of pages that the bytes touch.
    ///
    /// # Errors
    /// The fault of such a load; the bytes before it have been read.
    pub fn read_user(&self, at: VirtAddr, into: &mut [u8]) -> Result<(), FaultError> {
        UserCopy::of(self, Asker::Program).read(at, into)
    }

    /// As [`AddressSpace::read_user`], for a caller other than the program: a debugger, or another
    /// process. (Linux: `access_remote_vm`.)
    ///
    /// Context: may sleep. Complexity: as for [`AddressSpace::read_user`].
    ///
    /// # Errors
    /// As [`AddressSpace::read_user`]; also [`FaultError::Protection`] for secret memory
    /// ([`crate::Memory::secret_memory`]).
    pub fn read_foreign(&self, at: VirtAddr, into: &mut [u8]) -> Result<(), FaultError> {
        UserCopy::of(self, Asker::Other).read(at, into)
    }

    /// Writes `from` at `at`, like stores of the program.
    ///
    /// Context: may sleep. Complexity: linear in the number of pages that the bytes touch.
    ///
    /// # Errors
    /// The fault of such a store; the bytes before it have been written.
    pub fn write_user(&self, at: VirtAddr, from: &[u8]) -> Result<(), FaultError> {
        UserCopy::of(self, Asker::Program).write(at, from)
    }

    /// As [`AddressSpace::write_user`], for a caller other than the program.
    ///
    /// Context: may sleep. Complexity: as for [`AddressSpace::write_user`].
    ///
    /// # Errors
    /// As [`AddressSpace::read_foreign`], with the fault of a store.
    pub fn write_foreign(&self, at: VirtAddr, from: &[u8]) -> Result<(), FaultError> {
        UserCopy::of(self, Asker::Other).write(at, from)
    }

    /// Copies `length` bytes at `from` in another process's memory to `to` in this memory, as a
    /// load of the other program and a store of this program would. Both may be the same process,
    /// but the bytes must not overlap; otherwise the result is a mix of old and new bytes. (Linux:
    /// `process_vm_readv(2)`.)
    ///
    /// No lock is held between one piece of 1 KiB and the next.
    ///
    /// Context: may sleep. Complexity: linear in the number of bytes.
    ///
    /// # Errors
    /// [`PartialCopy`]: the fault that a load or a store would have had
    /// ([`AddressSpace::read_foreign`]), or [`FaultError::Interrupted`] after a fatal signal, and
    /// how many bytes were copied before it.
    pub fn copy_from(
        &self,
        to: VirtAddr,
        other: &AddressSpace<'_, P>,
        from: VirtAddr,
        length: u64,
    ) -> Result<(), PartialCopy> {
        in_pieces(self.platform(), to, from, length, |here, there, piece| {
            other.read_foreign(there, piece)?;
            self.write_user(here, piece)
        })
    }

    /// As [`AddressSpace::copy_from`], in the opposite direction: copies the bytes at `from` in
    /// this memory to `to` in another process's memory. (Linux: `process_vm_writev(2)`.)
    ///
    /// Context: may sleep. Complexity: linear in the number of bytes.
    ///
    /// # Errors
    /// As [`AddressSpace::copy_from`].
    pub fn copy_to(
        &self,
        from: VirtAddr,
        other: &AddressSpace<'_, P>,
        to: VirtAddr,
        length: u64,
    ) -> Result<(), PartialCopy> {
        in_pieces(self.platform(), from, to, length, |here, there, piece| {
            self.read_user(here, piece)?;
            other.write_foreign(there, piece)
        })
    }
}

/// Copies from or to the memory of an address space.
pub(super) struct UserCopy<'s, 'm, P: Platform> {
    space: &'s AddressSpace<'m, P>,
    asker: Asker,
}

impl<'s, 'm, P: Platform> UserCopy<'s, 'm, P> {
    pub(super) fn of(space: &'s AddressSpace<'m, P>, asker: Asker) -> Self {
        Self { space, asker }
    }

    /// Reads `into.len()` bytes at `at`.
    fn read(&self, at: VirtAddr, into: &mut [u8]) -> Result<(), FaultError> {
        let mut done = 0;
        while done < into.len() {
            let (part, length) = piece_after(at, done, into.len())?;
            let target = &mut into[done..done + length];
            while !self.load(part, target, Self::lock)? {
                self.space.fault_for_kernel(part, Access::Read, KeyRights::ALL)?;
            }
            done += length;
        }
        Ok(())
    }

    /// Writes `from` at `at`.
    fn write(&self, at: VirtAddr, from: &[u8]) -> Result<(), FaultError> {
        let mut done = 0;
        while done < from.len() {
            let (part, length) = piece_after(at, done, from.len())?;
            let source = &from[done..done + length];
            while !self.store(part, source, Self::lock)? {
                self.space.fault_for_kernel(part, Access::Write, KeyRights::ALL)?;
            }
            done += length;
        }
        Ok(())
    }

    /// Reads bytes of one page, unless the page or a lock has to be waited for.
    pub(super) fn try_read(
        &self,
        at: VirtAddr,
        into: &mut [u8],
    ) -> Result<Option<CallWait<'s, 'm, P>>, FaultError> {
        while !self.load(at, into, Self::try_lock)? {
            if let Some(wait) = self.try_fault(at, Access::Read)? {
                return Ok(Some(wait));
            }
        }
        Ok(None)
    }

    /// Writes bytes of one page, unless the page or a lock has to be waited for.
    pub(super) fn try_write(
        &self,
        at: VirtAddr,
        from: &[u8],
    ) -> Result<Option<CallWait<'s, 'm, P>>, FaultError> {
        while !self.store(at, from, Self::try_lock)? {
            if let Some(wait) = self.try_fault(at, Access::Write)? {
                return Ok(Some(wait));
            }
        }
        Ok(None)
    }

    fn try_fault(
        &self,
        at: VirtAddr,
        access: Access,
    ) -> Result<Option<CallWait<'s, 'm, P>>, FaultError> {
        Ok(match step_fault(self.space, at, access)? {
            TriedFault::Resolved(_) => None,
            TriedFault::Blocked(wait) => Some(CallWait::new(wait)),
        })
    }

    /// The VMA of the page, after its writer has left.
    #[inline(always)]
    fn lock(&self, page: VirtAddr) -> Option<VmaReadGuard<'s, P>> {
        self.space.lock_vma(page)
    }

    /// The VMA of the page, unless a writer has it.
    #[inline(always)]
    fn try_lock(&self, page: VirtAddr) -> Option<VmaReadGuard<'s, P>> {
        self.space.vmas.try_read(self.space.platform(), page)
    }

    /// Reads bytes of one page, if `lock` locks its VMA and the page is mapped for reading.
    #[inline(always)]
    fn load(
        &self,
        at: VirtAddr,
        into: &mut [u8],
        lock: impl FnOnce(&Self, VirtAddr) -> Option<VmaReadGuard<'s, P>>,
    ) -> Result<bool, FaultError> {
        self.if_mapped(at, Access::Read, lock, |frame, offset| {
            let length = into.len().min(PAGE_SIZE as usize - offset);
            // SAFETY: 1. the bytes lie within a page; 2. a mapped page, whose table is locked.
            unsafe { bytes::read(self.space.platform(), frame, offset, &mut into[..length]) };
        })
    }

    /// Writes bytes of one page, if `lock` locks its VMA and the page is mapped for writing.
    #[inline(always)]
    fn store(
        &self,
        at: VirtAddr,
        from: &[u8],
        lock: impl FnOnce(&Self, VirtAddr) -> Option<VmaReadGuard<'s, P>>,
    ) -> Result<bool, FaultError> {
        self.if_mapped(at, Access::Write, lock, |frame, offset| {
            let length = from.len().min(PAGE_SIZE as usize - offset);
            // SAFETY: 1. and 2. as in `load`; 3. a page that is being saved is not writable.
            unsafe { bytes::write(self.space.platform(), frame, offset, &from[..length]) };
            written_for_another(self.space.page_table.memory, frame);
        })
    }

    /// Calls `work` with the frame of the page at `at` and the offset in the page, if the page is
    /// mapped for the access, which is recorded. The table is locked during `work`, so the page
    /// stays mapped. The VMA is locked for reading, so that the bytes reach the page that the
    /// address maps when the call returns. Without the VMA lock:
    /// 1. CPU A, writing to X, waits for the lock of the page's table;
    /// 2. CPU B moves that table to Y, and `mremap` returns;
    /// 3. CPU A writes to the page that is now mapped at Y.
    ///
    /// If the page is not mapped for the access, or `lock` has not locked the VMA, returns `false`
    /// with nothing locked, because a fault waits for the writer of the VMA, and the writer waits
    /// for its readers.
    #[inline(always)]
    fn if_mapped(
        &self,
        at: VirtAddr,
        access: Access,
        lock: impl FnOnce(&Self, VirtAddr) -> Option<VmaReadGuard<'s, P>>,
        work: impl FnOnce(Frame, usize),
    ) -> Result<bool, FaultError> {
        let Self { space, asker } = *self;
        if at >= space.limit() {
            return Err(FaultError::NotMapped);
        }
        let page = at.align_down(PAGE_SIZE);
        let Some(locked) = lock(self, page) else { return Ok(false) };
        let flags = locked.vma().flags();
        // The direct map may lack frames outside the core's memory.
        if asker == Asker::Other && flags.contains(MappingFlags::SECRET)
            || flags.contains(MappingFlags::FRAMES)
        {
            return Err(FaultError::Protection);
        }
        let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
        let section = space.page_table.read_section();
        let mut cursor = space.page_table.cursor(&section, range, Depth::Floor(Level::PTE));
        let EntryAt { node, index, entry: raw } = cursor.entry_at(page);
        if node.level.kind(raw) == Kind::Leaf {
            let entry = node.single(raw, index);
            let allowed = P::Arch::attributes(entry).permissions;
            if allowed.contains(access.permission()) {
                record_access(&mut cursor, node, index, access);
                let span = node.level.span();
                let inside = at.0 & (span - 1);
                let frame = P::Arch::frame(entry).plus((inside / PAGE_SIZE) as u32);
                work(frame, (inside % PAGE_SIZE) as usize);
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Calls `copy` for `length` bytes in pieces. No piece crosses a page boundary on either side, so
/// that a faulting piece is not copied in part. A fatal signal ends the copy between two pieces.
fn in_pieces<P: Platform>(
    platform: &P,
    here: VirtAddr,
    there: VirtAddr,
    length: u64,
    mut copy: impl FnMut(VirtAddr, VirtAddr, &mut [u8]) -> Result<(), FaultError>,
) -> Result<(), PartialCopy> {
    let mut piece = [0; COPIED_AT_ONCE];
    let mut copied = 0;
    while copied < length {
        let part = |fault| PartialCopy { copied, fault };
        interrupt::check(platform).map_err(|_| part(FaultError::Interrupted))?;
        let (from, to, count) =
            piece_of_both((here, there), copied, length - copied).map_err(part)?;
        copy(from, to, &mut piece[..count]).map_err(part)?;
        copied += count as u64;
    }
    Ok(())
}

/// The addresses and the length of a piece after `done` bytes, with `left` bytes to copy.
#[inline(always)]
pub(super) fn piece_of_both(
    (here, there): (VirtAddr, VirtAddr),
    done: u64,
    left: u64,
) -> Result<(VirtAddr, VirtAddr, usize), FaultError> {
    let done = done as usize;
    let left = usize::try_from(left).unwrap_or(usize::MAX).min(COPIED_AT_ONCE);
    let (from, fits) = piece_after(here, done, done.saturating_add(left))?;
    let (to, count) = piece_after(there, done, done.saturating_add(fits))?;
    Ok((from, to, count))
}

/// The start and the length of the piece after `done` bytes.
#[inline(always)]
pub(super) fn piece_after(
    at: VirtAddr,
    done: usize,
    length: usize,
) -> Result<(VirtAddr, usize), FaultError> {
    let at = at.checked_add(done as u64).ok_or(FaultError::NotMapped)?;
    let inside = (at.0 & (PAGE_SIZE - 1)) as usize;
    Ok((at, (length - done).min(PAGE_SIZE as usize - inside)))
}
