//! The devices whose registers the kernel map maps.

use fdt::Fdt;

use crate::boot::Stretch;
use crate::memory::map_device;

use super::machine::{TREE, device, registers};
use super::{interrupts, time};

/// The first interrupt number that is private to a CPU (PPI).
const FIRST_PRIVATE_INTERRUPT: u32 = 16;

/// Maps the remaining devices and initializes them.
///
/// # Panics
/// If a required device is missing.
pub fn begin() {
    let tree = TREE.get().expect("the device tree is read first");
    let mapped = |area: Stretch| map_device(area.start, area.end - area.start).addr() as u64;
    time::begin(device(tree, "arm,pl031").map(mapped));
    let Some(controller) = tree.find_compatible(&["arm,gic-v3"]) else {
        panic!("the machine has no GICv3, which the kernel needs (QEMU: -M virt,gic-version=3)");
    };
    let mut areas = registers(controller);
    let (Some(distributor), Some(redistributors)) = (areas.next(), areas.next()) else {
        panic!("the device tree gives no registers for the GICv3");
    };
    let end = redistributors.end - redistributors.start;
    let redistributors = mapped(redistributors);
    interrupts::begin(
        mapped(distributor),
        (redistributors, redistributors + end),
        timer_interrupt(tree),
    );
}

/// The virtual timer's interrupt, the third of the timer node. Each interrupt has three numbers:
/// kind, number, flags (Linux, Documentation/devicetree/bindings/timer/arm,arch_timer.yaml).
fn timer_interrupt(tree: &Fdt<'_>) -> u32 {
    let number = || {
        let interrupts = tree.find_compatible(&["arm,armv8-timer"])?.property("interrupts")?;
        let number = interrupts.value.chunks_exact(4).nth(2 * 3 + 1)?;
        Some(FIRST_PRIVATE_INTERRUPT + u32::from_be_bytes(number.try_into().ok()?))
    };
    match number() {
        Some(number @ FIRST_PRIVATE_INTERRUPT..32) => number,
        _ => panic!("the device tree has no virtual timer, which the kernel needs"),
    }
}
