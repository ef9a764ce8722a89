//! The control channel and power-off, each a port that QEMU provides.

use x86_64::instructions::port::Port;

use super::Ended;

const CONTROL: u16 = 0xe9;
const POWER_OFF: u16 = 0xf4;

/// Sends a byte over the control channel.
pub fn write_control(byte: u8) {
    // SAFETY: the port touches no memory.
    unsafe { Port::new(CONTROL).write(byte) };
}

/// Ends the machine. The status of the first program is sent over the control channel.
pub fn power_off(how: Ended) -> ! {
    let value: u32 = match how {
        Ended::Program(_) => 0,
        Ended::Failed => 1,
    };
    // SAFETY: as in `write`.
    unsafe { Port::new(POWER_OFF).write(value) };
    loop {
        // The machine has no such device.
        x86_64::instructions::interrupts::disable();
        x86_64::instructions::hlt();
    }
}
