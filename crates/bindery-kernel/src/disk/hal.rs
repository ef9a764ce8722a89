//! Memory for the device: `virtio_drivers::Hal`.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bindery::Platform;
use bindery::addr::Order;
use virtio_drivers::{BufferDirection, Hal, PhysAddr};

use crate::arch;
use crate::memory::{MAP_START, map_registers, memory};
use crate::platform::Machine;

/// The kernel's services for the driver. All large buffers of the device lie in the direct map.
pub struct KernelMemory;

/// The physical address of an address in the direct map.
pub fn physical(at: NonNull<u8>) -> u64 {
    (at.as_ptr().addr() - arch::direct_map(0).as_ptr().addr()) as u64
}

/// Zeroed frames that are never freed.
pub fn frames(pages: usize) -> Option<NonNull<u8>> {
    let order = Order(pages.next_power_of_two().trailing_zeros() as u8);
    let frames = memory().allocate_frames(order)?;
    Machine.zero(frames.first, frames.count);
    Some(Machine.direct_map(frames.first))
}

// SAFETY: `dma_alloc` gives frames that nothing else uses, zeroed, aligned and never freed;
// `mmio_phys_to_virt` maps the registers forever; `share` returns the address at which the device
// finds a buffer, or a copy of a small buffer, which `unshare` copies back.
unsafe impl Hal for KernelMemory {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        match frames(pages) {
            Some(start) => (physical(start), start),
            None => (0, NonNull::dangling()),
        }
    }

    /// A driver that is dropped at boot frees its memory here. That memory is not reused.
    unsafe fn dma_dealloc(_: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        0
    }

    unsafe fn mmio_phys_to_virt(at: PhysAddr, size: usize) -> NonNull<u8> {
        NonNull::new(map_registers(at, size as u64)).expect("registers are not at address 0")
    }

    unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
        if is_direct(buffer.cast()) {
            return physical(buffer.cast());
        }
        let place = NEXT.fetch_add(1, Ordering::Relaxed) % (PAGE / SMALL) * SMALL;
        assert!(buffer.len() <= SMALL, "the driver's own buffers are small");
        let copy = SMALL_PAGE.load(Ordering::Relaxed) + place as u64;
        // SAFETY: the buffer is valid for its length, and the copy lies in the page for copies.
        unsafe {
            let to = arch::direct_map(copy).as_ptr();
            to.copy_from_nonoverlapping(buffer.as_ptr().cast(), buffer.len());
        }
        copy
    }

    unsafe fn unshare(at: PhysAddr, buffer: NonNull<[u8]>, direction: BufferDirection) {
        if is_direct(buffer.cast()) || direction == BufferDirection::DriverToDevice {
            return;
        }
        // SAFETY: as in `share`; the device is done with the copy.
        unsafe {
            let from = arch::direct_map(at).as_ptr();
            buffer.as_ptr().cast::<u8>().copy_from_nonoverlapping(from, buffer.len());
        }
    }
}

/// A page for copies of buffers outside the direct map. Such buffers are those that the crate keeps
/// on the stack while it waits for a flush. At most one flush is in progress.
const PAGE: usize = 4096;
/// The bytes of a copy.
const SMALL: usize = 64;
/// The physical address of the page.
static SMALL_PAGE: AtomicU64 = AtomicU64::new(0);
/// The number of the next copy.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Allocates the page for copies; `None` if there is no memory.
pub fn begin() -> Option<()> {
    SMALL_PAGE.store(physical(frames(1)?), Ordering::Relaxed);
    Some(())
}

/// Whether an address is in the direct map. The kernel map's arena begins behind the direct map.
fn is_direct(at: NonNull<u8>) -> bool {
    let start = arch::direct_map(0).as_ptr().addr();
    (start..MAP_START.0 as usize).contains(&at.as_ptr().addr())
}
