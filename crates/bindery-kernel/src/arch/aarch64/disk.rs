//! The disk: the first block device among the virtio devices of the device tree.

use core::ptr::NonNull;

use virtio_drivers::Hal;
use virtio_drivers::transport::mmio::MmioTransport;
use virtio_drivers::transport::{DeviceType, Transport as _};

use crate::memory::map_registers;

use super::interrupts;
use super::machine::{TREE, registers};

/// The transport of the device's queue.
pub type Transport = MmioTransport<'static>;

/// The first interrupt number that all CPUs share (SPI).
const FIRST_SHARED_INTERRUPT: u32 = 32;

/// A disk that was found.
pub struct Found {
    transport: Transport,
    interrupt: u32,
}

/// Finds the disk.
pub fn find<H: Hal>() -> Option<Found> {
    let nodes = TREE.get()?.all_nodes();
    let is_virtio = |node: &fdt::node::FdtNode<'_, '_>| {
        node.compatible().is_some_and(|names| names.all().any(|name| name == "virtio,mmio"))
    };
    nodes.filter(is_virtio).find_map(|node| {
        let area = registers(node).next()?;
        let size = area.end - area.start;
        let header = NonNull::new(map_registers(area.start, size))?;
        // SAFETY: the device tree says that the registers of such a device lie there. They stay
        // mapped.
        let transport = unsafe { MmioTransport::new(header.cast(), size as usize) }.ok()?;
        // An interrupt has three numbers: kind, number, flags.
        let number = node.property("interrupts")?.value.chunks_exact(4).nth(1)?;
        let interrupt = FIRST_SHARED_INTERRUPT + u32::from_be_bytes(number.try_into().ok()?);
        let is_disk = transport.device_type() == DeviceType::Block;
        is_disk.then_some(Found { transport, interrupt })
    })
}

impl Found {
    /// Enables the device's interrupt.
    pub fn begin(interrupt: u32) {
        interrupts::route(interrupt, crate::disk::interrupt);
    }

    /// The transport, and the number for [`Found::begin`].
    pub fn into_parts(self) -> (Transport, u32) {
        (self.transport, self.interrupt)
    }
}
