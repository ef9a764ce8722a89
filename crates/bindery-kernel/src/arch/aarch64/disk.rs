//! The disk: not supported on this architecture yet.

use core::ptr::NonNull;

use virtio_drivers::Hal;
use virtio_drivers::transport::mmio::MmioTransport;

/// The transport of the device's queue.
pub type Transport = MmioTransport<'static>;

/// A device that was found.
pub struct Found {
    transport: Transport,
}

/// Finds no disk.
pub fn find<H: Hal>() -> Option<Found> {
    None
}

impl Found {
    /// Lets the device interrupt.
    pub fn begin(_: NonNull<u8>) {}

    /// The transport.
    pub fn into_parts(self) -> (Transport, NonNull<u8>) {
        (self.transport, NonNull::dangling())
    }
}
