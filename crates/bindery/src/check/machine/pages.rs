//! The pages that the self-test maps, and their unmapping at its end.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use crate::arch::Permissions;
use crate::kernel_map::{KernelMapError, Pieces, VmallocOptions};
use crate::platform::Platform;
use crate::space::{Access, AddressSpace, MapRequest, Protection};
use crate::{KernelMap, Memory};

use super::MachineError;

/// A page of a kernel area that is freed at the end.
pub(super) struct TestArea<'t, 'm, P: Platform> {
    pub(super) map: &'t KernelMap<'m, P>,
    pub(super) at: VirtAddr,
    pub(super) size: u64,
}

impl<'t, 'm, P: Platform> TestArea<'t, 'm, P> {
    pub(super) fn new(
        map: &'t KernelMap<'m, P>,
        size: u64,
        permissions: Permissions,
        pieces: Pieces,
    ) -> Result<Self, MachineError> {
        let options =
            VmallocOptions { align: size, permissions, pieces, ..VmallocOptions::default() };
        Ok(Self { map, at: map.vmalloc(size, &options)?, size })
    }

    pub(super) fn protect(&self, permissions: Permissions) -> Result<(), MachineError> {
        let range = VirtRange::raw(self.at.0, self.at.0 + self.size);
        // SAFETY: 1. allocated in `new`; 2. the test accesses it through the MMU and expects
        // faults; 3. only the test uses it.
        Ok(unsafe { self.map.protect(range, permissions) }?)
    }

    /// The physical address of a page of the area.
    pub(super) fn physical(&self, page: u64) -> Result<PhysAddr, MachineError> {
        let at = self.at.offset(page << PAGE_SHIFT);
        Ok(self.map.physical(at).ok_or(KernelMapError::NotAnArea(at))?)
    }

    /// Writes to a page of the area through the direct map.
    pub(super) fn fill(&self, page: u64, bytes: &[u8]) -> Result<(), MachineError> {
        fill(self.map.memory(), self.physical(page)?, bytes);
        Ok(())
    }
}

impl<P: Platform> Drop for TestArea<'_, '_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. allocated in `new`; 2. and 3. only the test uses it, and the test is over.
        let _ = unsafe { self.map.vfree(self.at) };
    }
}

pub(super) fn frame_of(at: PhysAddr) -> Frame {
    Frame((at.0 >> PAGE_SHIFT) as u32)
}

/// Writes to a frame of the self-test's own area.
pub(super) fn fill<P: Platform>(memory: &Memory<P>, to: PhysAddr, bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(PAGE_SIZE as usize)];
    let to = memory.platform().direct_map(frame_of(to));
    // SAFETY: the frame belongs to an area that only the self-test uses, and the arena shows the
    // whole frame.
    unsafe { memory.platform().write_bytes(to, bytes) };
}

/// Reads the first word of a frame of the self-test's own area.
pub(super) fn first_word<P: Platform>(memory: &Memory<P>, from: PhysAddr) -> u64 {
    let mut bytes = [0; 8];
    let from = memory.platform().direct_map(frame_of(from));
    // SAFETY: as in `fill`.
    unsafe { memory.platform().read_bytes(from, &mut bytes) };
    u64::from_ne_bytes(bytes)
}

/// A mapping of one page that is unmapped at the end.
pub(super) struct UserPage<'t, 'm, P: Platform> {
    pub(super) space: &'t AddressSpace<'m, P>,
    pub(super) at: VirtAddr,
}

impl<'t, 'm, P: Platform> UserPage<'t, 'm, P> {
    /// A present page with `protection`.
    pub(super) fn new(
        space: &'t AddressSpace<'m, P>,
        protection: Protection,
        touched: Access,
    ) -> Result<Self, MachineError> {
        let request = MapRequest { length: PAGE_SIZE, protection, ..MapRequest::default() };
        let page = Self { space, at: space.mmap(&request)? };
        space.fault(page.at, touched)?;
        Ok(page)
    }

    pub(super) fn protect(&self, protection: Protection) -> Result<(), MachineError> {
        Ok(self.space.mprotect(self.at, PAGE_SIZE, protection)?)
    }
}

impl<P: Platform> Drop for UserPage<'_, '_, P> {
    fn drop(&mut self) {
        // The mapping was created here, and unmapping a whole mapping never runs out of memory.
        let _ = self.space.munmap(self.at, PAGE_SIZE);
    }
}
