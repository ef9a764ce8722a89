//! Reading and writing a program's memory from outside, as the program itself would.

use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{self, Arch, Kind};
use crate::bytes;
use crate::error::FaultError;
use crate::platform::Platform;
use crate::table::lock::Depth;

use super::AddressSpace;
use super::fault::Access;

/// Bytes that stand on the stack between a load and a store.
const COPIED_AT_ONCE: usize = 1024;

/// Why a copy between two address spaces ended early ([`AddressSpace::copy_user`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartialCopy {
    /// How many bytes were copied.
    pub copied: u64,
    /// Why the next one was not.
    pub fault: FaultError,
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Reads `into.len()` bytes at `at`, as a load of the program would: pages come in by faults.
    /// The program need not be the one that runs. May sleep. (Linux: `copy_from_user`,
    /// `process_vm_readv(2)`.)
    ///
    /// # Errors
    /// The fault that a load would have had; what lies before it has been read.
    ///
    /// Complexity: in the pages that the bytes touch.
    pub fn read_user(&self, at: VirtAddr, into: &mut [u8]) -> Result<(), FaultError> {
        let mut done = 0;
        while done < into.len() {
            let (part, length) = step(at, done, into.len())?;
            let target = &mut into[done..done + length];
            self.with_page(part, Access::Read, |frame, offset| {
                bytes::read(self.platform(), frame, offset, target);
            })?;
            done += length;
        }
        Ok(())
    }

    /// Writes `from` at `at`, as stores of the program would.
    ///
    /// # Errors
    /// The fault that a store would have had; what lies before it has been written.
    ///
    /// Complexity: in the pages that the bytes touch.
    pub fn write_user(&self, at: VirtAddr, from: &[u8]) -> Result<(), FaultError> {
        let mut done = 0;
        while done < from.len() {
            let (part, length) = step(at, done, from.len())?;
            let source = &from[done..done + length];
            self.with_page(part, Access::Write, |frame, offset| {
                bytes::write(self.platform(), frame, offset, source);
            })?;
            done += length;
        }
        Ok(())
    }

    /// Copies `length` bytes at `from` in this address space to `to` in `target`, as a load of the one
    /// program and a store of the other would. Both may be one, but the bytes must not overlap, or
    /// what is copied is a mix of old and new. May sleep. (Linux: `process_vm_readv(2)` and
    /// `process_vm_writev(2)`.)
    ///
    /// No lock is held from one piece of 1 KiB to the next.
    ///
    /// # Errors
    /// [`PartialCopy`]: the fault that a load or a store would have had, and how many bytes were
    /// copied before it.
    ///
    /// Complexity: in the bytes.
    pub fn copy_user(
        &self,
        from: VirtAddr,
        target: &AddressSpace<'_, P>,
        to: VirtAddr,
        length: u64,
    ) -> Result<(), PartialCopy> {
        let mut piece = [0; COPIED_AT_ONCE];
        let mut copied = 0;
        while copied < length {
            let part = |fault| PartialCopy { copied, fault };
            let left = usize::try_from(length - copied).unwrap_or(usize::MAX).min(piece.len());
            // Not across a page of either, so that a fault leaves nothing of a piece copied.
            let (source, fits) =
                step(from, copied as usize, left.saturating_add(copied as usize)).map_err(part)?;
            let (into, count) =
                step(to, copied as usize, fits.saturating_add(copied as usize)).map_err(part)?;
            self.read_user(source, &mut piece[..count]).map_err(part)?;
            target.write_user(into, &piece[..count]).map_err(part)?;
            copied += count as u64;
        }
        Ok(())
    }

    /// Calls `work` once with the frame of the page at `at` and the offset in it, after the access is
    /// allowed and recorded. The table is locked meanwhile, so the page stays; and the VMA is held for
    /// reading, so the bytes land where the address leads when the call returns:
    /// 1. CPU A, writing to X, waits for the lock of the page's table;
    /// 2. CPU B moves that table to Y, and `mremap` returns;
    /// 3. CPU A writes to what is at Y now.
    fn with_page(
        &self,
        at: VirtAddr,
        access: Access,
        mut work: impl FnMut(crate::addr::Frame, usize),
    ) -> Result<(), FaultError> {
        if at >= self.limit() {
            return Err(FaultError::NotMapped);
        }
        let page = at.align_down(PAGE_SIZE);
        loop {
            if let Some(locked) = self.lock_vma(page) {
                let range = VirtRange::raw(page.0, page.0 + PAGE_SIZE);
                let mut cursor = self.table.cursor(range, Depth::Floor(1));
                let (node, index, raw) = cursor.entry_at(page);
                if arch::kind::<P::Arch>(raw, node.level) == Kind::Leaf {
                    let entry = if node.level == 1 { P::Arch::unblock(raw, index) } else { raw };
                    let allowed = P::Arch::attributes(entry).permissions;
                    if allowed.contains(access.permission()) {
                        self.record_access(&mut cursor, node, index, access);
                        let span = arch::span::<P::Arch>(node.level);
                        let inside = at.0 & (span - 1);
                        let frame = P::Arch::frame(entry).plus((inside / PAGE_SIZE) as u32);
                        work(frame, (inside % PAGE_SIZE) as usize);
                        return Ok(());
                    }
                }
                drop(cursor);
                // A fault waits for whoever changes the VMA, and who changes it waits for its readers.
                drop(locked);
            }
            self.fault(at, access)?;
        }
    }
}

/// Where the piece behind `done` bytes begins, and how long it is.
fn step(at: VirtAddr, done: usize, length: usize) -> Result<(VirtAddr, usize), FaultError> {
    let at = at.checked_add(done as u64).ok_or(FaultError::NotMapped)?;
    let inside = (at.0 & (PAGE_SIZE - 1)) as usize;
    Ok((at, (length - done).min(PAGE_SIZE as usize - inside)))
}
