//! The disk: the first virtio block device on bus 0 of PCI, which interrupts by MSI-X.

use core::ptr::NonNull;

use virtio_drivers::Hal;
use virtio_drivers::transport::DeviceType;
use virtio_drivers::transport::pci::bus::{Command, ConfigurationAccess, DeviceFunction, PciRoot};
use virtio_drivers::transport::pci::{PciTransport, virtio_device_type};
use x86_64::instructions::port::Port;

use crate::memory::map_registers;

use super::interrupts::{self, DISK};

/// The transport of the device's queue.
pub type Transport = PciTransport;

/// The vendor-specific capability, which virtio uses.
const VENDOR: u8 = 9;
/// The MSI-X capability.
const MSI_X: u8 = 17;
/// The type of a virtio capability: the common configuration.
const COMMON: u16 = 1;

/// PCI configuration space through its two I/O ports.
struct Ports;

fn select(function: DeviceFunction, offset: u8) -> Port<u32> {
    const ENABLED: u32 = 1 << 31;
    let DeviceFunction { bus, device, function } = function;
    let place = u32::from(bus) << 16 | u32::from(device) << 11 | u32::from(function) << 8;
    // SAFETY: the address port of PCI, which touches no memory.
    unsafe { Port::<u32>::new(0xcf8).write(ENABLED | place | u32::from(offset & !3)) };
    Port::new(0xcfc)
}

impl ConfigurationAccess for Ports {
    fn read_word(&self, function: DeviceFunction, offset: u8) -> u32 {
        // SAFETY: a read of the configuration space touches no memory.
        unsafe { select(function, offset).read() }
    }

    fn write_word(&mut self, function: DeviceFunction, offset: u8, data: u32) {
        // SAFETY: only registers of the disk are written, which this file owns.
        unsafe { select(function, offset).write(data) };
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self
    }
}

/// A disk that was found.
pub struct Found {
    /// The disk's transport.
    pub transport: Transport,
    /// The common configuration of virtio.
    common: NonNull<u8>,
}

/// Finds the disk and routes its interrupt to the calling CPU.
pub fn find<H: Hal>() -> Option<Found> {
    let mut root = PciRoot::new(Ports);
    let mut functions = root.enumerate_bus(0);
    let (function, _) =
        functions.find(|(_, info)| virtio_device_type(info) == Some(DeviceType::Block))?;
    root.set_command(function, Command::MEMORY_SPACE | Command::BUS_MASTER);
    let word = |at: u8| Ports.read_word(function, at);
    let (mut common, mut table) = (None, None);
    for capability in root.capabilities(function) {
        let at = capability.offset;
        match capability.id {
            VENDOR if capability.private_header >> 8 == COMMON => {
                common = Some((word(at + 4) as u8, word(at + 8)));
            }
            MSI_X => table = Some((at, word(at + 4))),
            _ => {}
        }
    }
    let (bar, offset) = common?;
    let (capability, place) = table?;
    let common = registers(&mut root, function, bar, offset)?;
    route(registers(&mut root, function, place as u8 & 7, place & !7)?.cast());
    const ENABLED: u32 = 1 << 31;
    Ports.write_word(function, capability, word(capability) | ENABLED);
    let transport = PciTransport::new::<H, _>(&mut root, function).ok()?;
    Some(Found { transport, common })
}

/// The registers at an offset in a region of the device.
fn registers(
    root: &mut PciRoot<Ports>,
    function: DeviceFunction,
    bar: u8,
    offset: u32,
) -> Option<NonNull<u8>> {
    let (start, _) = root.bar_info(function, bar).ok()??.memory_address_size()?;
    NonNull::new(map_registers(start + u64::from(offset), 64))
}

/// Fills the first entry of the MSI-X table (PCI specification, "MSI-X Table Structure"; Intel SDM
/// volume 3A, "Message Signalled Interrupts").
fn route(entry: NonNull<u32>) {
    let address = 0xfee0_0000 | interrupts::id() << 12;
    for (at, value) in [address, 0, DISK as u32, 0].into_iter().enumerate() {
        // SAFETY: the entry has four words, which `registers` has mapped.
        unsafe { entry.add(at).write_volatile(value) };
    }
}

impl Found {
    /// Makes the first queue send the first MSI-X message. Called after the queue is set up.
    pub fn begin(common: NonNull<u8>) {
        const QUEUE: usize = 0x16;
        const QUEUE_MESSAGE: usize = 0x1a;
        // SAFETY: the registers are mapped, and 16 bits wide (virtio specification, 4.1.4.3).
        unsafe {
            common.add(QUEUE).cast::<u16>().write_volatile(0);
            common.add(QUEUE_MESSAGE).cast::<u16>().write_volatile(0);
        }
    }

    /// The transport, and the registers for [`Found::begin`].
    pub fn into_parts(self) -> (Transport, NonNull<u8>) {
        (self.transport, self.common)
    }
}
