//! The serial line (a 16550 at the usual ports), and QEMU's two ports: one for bytes to the host,
//! one to end the machine.

use x86_64::instructions::port::Port;

use super::Ended;

const SERIAL: u16 = 0x3f8;
const CONTROL: u16 = 0xe9;
const POWER_OFF: u16 = 0xf4;

/// In the line status: a byte has come.
const RECEIVED: u8 = 1 << 0;
/// In the line status: there is room for a byte to send.
const ROOM: u8 = 1 << 5;

/// Writes to a device.
fn write(port: u16, value: u8) {
    // SAFETY: the ports of this file are those of devices that touch no memory.
    unsafe { Port::new(port).write(value) }
}

fn line_status() -> u8 {
    // SAFETY: as in `write`; reading the status changes nothing.
    unsafe { Port::new(SERIAL + 5).read() }
}

/// Sets the serial line up, and silences the two old interrupt controllers: the firmware leaves
/// their timer at vector 8, which would be taken for a double fault.
pub fn begin() {
    // No interrupts; 115,200 baud (divisor 1, behind the latch bit), 8 bits, no parity; queues on.
    for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
        write(SERIAL + register, value);
    }
    write(0x21, 0xff);
    write(0xa1, 0xff);
}

/// Sends a byte over the serial line.
pub fn write_console(byte: u8) {
    while line_status() & ROOM == 0 {
        core::hint::spin_loop();
    }
    write(SERIAL, byte);
}

/// A byte that has come over the serial line.
pub fn read_console() -> Option<u8> {
    // SAFETY: as in `write`; the byte is taken from the queue.
    (line_status() & RECEIVED != 0).then(|| unsafe { Port::new(SERIAL).read() })
}

/// Sends a byte over the control channel.
pub fn write_control(byte: u8) {
    write(CONTROL, byte);
}

/// Ends the machine. The status of the first program goes over the control channel.
pub fn power_off(how: Ended) -> ! {
    let value: u32 = match how {
        Ended::Program(_) => 0,
        Ended::Failed => 1,
    };
    // SAFETY: as in `write`.
    unsafe { Port::new(POWER_OFF).write(value) };
    loop {
        // Where there is no such device.
        x86_64::instructions::interrupts::disable();
        x86_64::instructions::hlt();
    }
}
