//! Safe versions, for tests, of the kernel map calls that are unsafe in a kernel.

use bindery::addr::{VirtAddr, VirtRange};
use bindery::arch::Permissions;
use bindery::{KernelMap, KernelMapError, Platform, UnmapTime, VmallocOptions};

/// On the machines of these tests, addresses of the kernel are reached only through the modeled
/// MMU, never by a pointer. So a test may free memory that is still in use and expect a violation.
pub trait Areas {
    /// `vfree`
    fn free_vmalloc(&self, start: VirtAddr) -> Result<(), KernelMapError>;
    /// `vunmap`
    fn free_vmap(&self, start: VirtAddr, time: UnmapTime) -> Result<(), KernelMapError>;
    /// `iounmap`
    fn free_ioremap(&self, at: VirtAddr) -> Result<(), KernelMapError>;
    /// `vrealloc`
    fn resize_vmalloc(
        &self,
        start: VirtAddr,
        size: u64,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, KernelMapError>;
    /// `protect`
    fn protect_part(&self, part: VirtRange, to: Permissions) -> Result<(), KernelMapError>;
}

impl<P: Platform> Areas for KernelMap<'_, P> {
    fn free_vmalloc(&self, start: VirtAddr) -> Result<(), KernelMapError> {
        // SAFETY: 1. to 3. no pointer refers to an area (see the trait).
        unsafe { self.vfree(start) }
    }

    fn free_vmap(&self, start: VirtAddr, time: UnmapTime) -> Result<(), KernelMapError> {
        // SAFETY: 1. and 2. as in `free_vmalloc`.
        unsafe { self.vunmap(start, time) }
    }

    fn free_ioremap(&self, at: VirtAddr) -> Result<(), KernelMapError> {
        // SAFETY: 1. and 2. as in `free_vmalloc`.
        unsafe { self.iounmap(at) }
    }

    fn resize_vmalloc(
        &self,
        start: VirtAddr,
        size: u64,
        options: &VmallocOptions,
    ) -> Result<VirtAddr, KernelMapError> {
        // SAFETY: 1. to 3. as in `free_vmalloc`.
        unsafe { self.vrealloc(start, size, options) }
    }

    fn protect_part(&self, part: VirtRange, to: Permissions) -> Result<(), KernelMapError> {
        // SAFETY: 1. to 3. as in `free_vmalloc`.
        unsafe { self.protect(part, to) }
    }
}
