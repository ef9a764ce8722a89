//! The devices with memory-mapped registers.

use crate::memory::map_device;

use super::{interrupts, machine, time};

/// Sets up the interrupts and the clocks.
pub fn begin() {
    let machine = machine::get();
    interrupts::begin(map_device(machine.local_apic, 4096));
    time::calibrate(machine);
}
